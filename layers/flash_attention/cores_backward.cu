// Flash attention on CUDA cores, backward. The maths is in flash_attention.cu, the tiles in flash_attention/cores.cuh.
//
// In both kernels scores become probabilities, and dP becomes dS = P * (dP - delta); lse2 = lse log2(e).
#include "layers/flash_attention/cores.cuh"

#include <cstring>
#include <type_traits>

namespace {

// dq. Block (query tile, query head, b), as in the forward: lse and delta belong to the rows.
template <class Number, class T>
__global__ void __launch_bounds__(T::kThreadsX* T::kThreadsY)
    flash_dq_kernel(Shape shape, Heads<Number> dq, Heads<const Number> dout, const float* lse, const float* delta,
                    Heads<const Number> q, Heads<const Number> k, Heads<const Number> v) {
    if constexpr (T::kSmall && kAfterTuring) return;
    const Mask& mask = shape.mask;
    const int b = static_cast<int>(blockIdx.z), t0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * T::kRows;
    const int64_t h = blockIdx.y, kv = h / (shape.H / shape.K);
    const int n_rows = min(T::kRows, mask.T - t0);
    float* q_rows = dynamic_shared<float>();
    float* dout_rows = q_rows + T::kRowsFloats;
    float* dS = dout_rows + T::kRowsFloats;
    float* k_tile = dS + T::kProbsFloats;
    float* v_tile = k_tile + T::kOthersFloats;
    load_rows<T>(q_rows, q.head(b, h) + t0 * q.token_stride, q.token_stride, n_rows, shape.D);
    load_rows<T>(dout_rows, dout.head(b, h) + t0 * dout.token_stride, dout.token_stride, n_rows, shape.Dv);

    const View view = view_of<true>(mask, b, t0, T::kRows);
    RowIntervals<T> rows;
    rows.template find<true>(mask, b, t0);
    float row_lse2[T::kR], row_delta[T::kR], factor[T::kR];
    for (int r = 0; r < T::kR; ++r) {
        const int64_t row = (b * shape.H + h) * mask.T + min(t0 + first_row<T>() + r, mask.T - 1);
        row_lse2[r] = lse[row] * kLog2e, row_delta[r] = delta[row], factor[r] = shape.scale;
    }
    typename T::Scores scores, registers, &dscores = scores_in<T>(registers, dS);
    typename T::Columns acc;
    clear<T>(acc);
    for (int s0 = view.any.first; s0 < view.any.end; s0 += T::kOthers) {
        const int n = min(T::kOthers, view.any.end - s0);
        __syncthreads();  // all threads have finished reading the previous tiles
        load_others<T>(k_tile, k.head(b, kv) + s0 * k.token_stride, k.token_stride, n, shape.D);
        load_others<T>(v_tile, v.head(b, kv) + s0 * v.token_stride, v.token_stride, n, shape.Dv);
        __syncthreads();  // the tiles are complete
        multiply_scores<T>(scores, q_rows, k_tile, n, shape.scale * kLog2e);
        if (needs_mask<T>(view, s0, n)) rows.apply(scores, s0, n);
        multiply_scores<T>(dscores, dout_rows, v_tile, n, 1.0f);  // dP = do v^T
        for (int i = 0; i < score_steps<T>(n); ++i)
            for (int m = 0; m < T::kMScores; ++m)
                for (int r = 0; r < T::kR; ++r)
                    dscores[i][m][r] =
                        exp2_below(scores[i][m][r] - row_lse2[r], 0.0f) * (dscores[i][m][r] - row_delta[r]);
        share_scores<T>(dS, dscores, n);
        __syncthreads();                          // every thread's dS is complete
        multiply_columns<T>(acc, dS, k_tile, n);  // dq = scale dS k
    }
    store_rows<T>(dq.head(b, h) + t0 * dq.token_stride, dq.token_stride, acc, factor, n_rows, shape.D);
}

// ---------------------------------------------------------------------------------------------------------------------

// What a kernel that owns keys reads and writes. lse and delta belong to the others.
template <class Number>
struct KeySide {
    const Shape& shape;
    Heads<Number> dk, dv;
    Heads<const Number> dout;
    const float *lse, *delta;
    Heads<const Number> q, k, v;
};
// Float32 sums of dq, of the heads that share a key head.
struct DqRows {
    float* data;
    int64_t token_stride, head_stride;
    __device__ float* row(int64_t h, int64_t t) const { return data + h * head_stride + t * token_stride; }
};

// The rows of n queries, dq += dS k, for a tile of n_keys keys. dS is [query][key], so that here a row's columns lie
// side by side: the picture in cores.cuh with queries for columns, keys for others and columns for rows.
template <class T>
__device__ void add_to_dq(float* dq, int64_t stride, float* dq_tile, const float* dS, const float* k_lines, int n,
                          int n_keys, int D) {
    load_others<T>(dq_tile, dq, stride, n, D);
    for (int m = 0; m < n; m += T::kMScores)
        multiply(*reinterpret_cast<float(*)[T::kMScores][T::kD]>(dq_tile + m * T::kOtherPitch), k_lines, T::kOtherPitch,
                 dS + m * T::kPitch, T::kPitch, 1, n_keys);
    for (int j = 0; j < n; ++j) std::memcpy(dq + j * stride, dq_tile + j * T::kOtherPitch, sizeof(float) * D);
}

// dk and dv of the keys from s0 on: the rows are keys; all queries of the group's heads that see them are read tile by
// tile, head by head. With dq, also what these keys add to it.
template <class T, bool kWithDq, class Number>
__device__ __forceinline__ void sum_over_queries(const KeySide<Number>& a, int b, int64_t kv, int s0,
                                                 [[maybe_unused]] const DqRows& dq) {
    const Shape& shape = a.shape;
    const Mask& mask = shape.mask;
    const int64_t group = shape.H / shape.K;
    float* k_rows = dynamic_shared<float>();
    float* v_rows = k_rows + T::kRowsFloats;
    float* probs = v_rows + T::kRowsFloats;
    float* dS = probs + T::kProbsFloats;
    float* q_tile = dS + T::kProbsFloats;
    float* dout_tile = q_tile + T::kOthersFloats;
    [[maybe_unused]] float* dq_tile = dout_tile + T::kOthersFloats;
    [[maybe_unused]] float* k_lines = dq_tile + T::kOthersFloats;  // the keys as they are, not transposed
    const int n_rows = min(T::kRows, mask.T - s0);
    load_rows<T>(k_rows, a.k.head(b, kv) + s0 * a.k.token_stride, a.k.token_stride, n_rows, shape.D);
    load_rows<T>(v_rows, a.v.head(b, kv) + s0 * a.v.token_stride, a.v.token_stride, n_rows, shape.Dv);
    if constexpr (kWithDq)
        load_others<T>(k_lines, a.k.head(b, kv) + s0 * a.k.token_stride, a.k.token_stride, n_rows, shape.D);

    const View view = view_of<false>(mask, b, s0, T::kRows);
    RowIntervals<T> rows;
    rows.template find<false>(mask, b, s0);
    typename T::Scores registers[2];
    typename T::Scores &scores = scores_in<T>(registers[0], probs), &dscores = scores_in<T>(registers[1], dS);
    typename T::Columns dk_acc, dv_acc;
    clear<T>(dk_acc);
    clear<T>(dv_acc);
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        const float* head_lse = a.lse + (b * shape.H + h) * mask.T;
        const float* head_delta = a.delta + (b * shape.H + h) * mask.T;
        for (int t0 = view.any.first; t0 < view.any.end; t0 += T::kOthers) {
            const int n = min(T::kOthers, view.any.end - t0);
            __syncthreads();  // all threads have finished reading the previous tiles
            load_others<T>(q_tile, a.q.head(b, h) + t0 * a.q.token_stride, a.q.token_stride, n, shape.D);
            load_others<T>(dout_tile, a.dout.head(b, h) + t0 * a.dout.token_stride, a.dout.token_stride, n, shape.Dv);
            __syncthreads();  // the tiles are complete
            multiply_scores<T>(scores, k_rows, q_tile, n, shape.scale * kLog2e);
            if (needs_mask<T>(view, t0, n)) rows.apply(scores, t0, n);
            multiply_scores<T>(dscores, v_rows, dout_tile, n, 1.0f);  // dP^T = v do^T
            for (int i = 0; i < score_steps<T>(n); ++i)
                for (int m = 0; m < T::kMScores; ++m) {
                    const int t = min(t0 + other_of<T>(i, m), mask.T - 1);
                    const float lse2 = head_lse[t] * kLog2e, other_delta = head_delta[t];
                    for (int r = 0; r < T::kR; ++r) {
                        scores[i][m][r] = exp2_below(scores[i][m][r] - lse2, 0.0f);
                        dscores[i][m][r] = scores[i][m][r] * (dscores[i][m][r] - other_delta);
                    }
                }
            share_scores<T>(probs, scores, n);
            share_scores<T>(dS, dscores, n);
            __syncthreads();                                   // every thread's P and dS are complete
            multiply_columns<T>(dv_acc, probs, dout_tile, n);  // dv = P^T do
            multiply_columns<T>(dk_acc, dS, q_tile, n);        // dk = scale dS^T q
            if constexpr (kWithDq)
                add_to_dq<T>(dq.row(h - kv * group, t0), dq.token_stride, dq_tile, dS, k_lines, n, n_rows, shape.D);
        }
    }
    float factor[T::kR];
    for (int r = 0; r < T::kR; ++r) factor[r] = 1.0f;
    store_rows<T>(a.dv.head(b, kv) + s0 * a.dv.token_stride, a.dv.token_stride, dv_acc, factor, n_rows, shape.Dv);
    for (int r = 0; r < T::kR; ++r) factor[r] = shape.scale;
    store_rows<T>(a.dk.head(b, kv) + s0 * a.dk.token_stride, a.dk.token_stride, dk_acc, factor, n_rows, shape.D);
}

// dk and dv. Block (key tile, key head, b).
template <class Number, class T>
__global__ void __launch_bounds__(T::kThreadsX* T::kThreadsY)
    flash_dk_dv_kernel(Shape shape, Heads<Number> dk, Heads<Number> dv, Heads<const Number> dout, const float* lse,
                       const float* delta, Heads<const Number> q, Heads<const Number> k, Heads<const Number> v) {
    if constexpr (T::kSmall && kAfterTuring) return;
    sum_over_queries<T, false>(KeySide<Number>{shape, dk, dv, dout, lse, delta, q, k, v}, static_cast<int>(blockIdx.z),
                               blockIdx.y, static_cast<int>(blockIdx.x) * T::kRows, {});
}

// dq in the same pass as dk and dv: five products instead of seven, and each probability once. On the CPU device only,
// where a block that does all tiles of a head, one after the other, keeps a thread busy. (On a Xeon the two kernels
// take 5.8 ms of a step of tiny in float32, this one 4.3; in bf16, one core of a Xeon with AMX, 10.3 and 7.8 ms, and
// 51 and 37.5 with sequences of 1024 tokens.)
//
// Tile after tile of keys adds to float32 sums of dq: to dq itself, or, if that has 16 bits, to the block's slot of
// dq_sums. That is a sum over keys in order, as flash_dq_kernel has it: the same bits. A block takes one key head after
// the other: there are more of them than slots.
template <class Number, class T>
__global__ void flash_backward_kernel(Shape shape, int64_t n_heads, Heads<Number> dq, [[maybe_unused]] float* dq_sums,
                                      Heads<Number> dk, Heads<Number> dv, Heads<const Number> dout, const float* lse,
                                      const float* delta, Heads<const Number> q, Heads<const Number> k,
                                      Heads<const Number> v) {
    const KeySide<Number> key_side{shape, dk, dv, dout, lse, delta, q, k, v};
    const int64_t n_tokens = shape.mask.T, D = shape.D, group = shape.H / shape.K;
    for (int64_t head = blockIdx.x; head < n_heads; head += gridDim.x) {
        const int b = static_cast<int>(head / shape.K);
        const int64_t kv = head % shape.K;
        const DqRows sums = [&]() -> DqRows {
            if constexpr (std::is_same_v<Number, float>)
                return {dq.head(b, kv * group), dq.token_stride, dq.head_stride};
            else return {dq_sums + blockIdx.x * group * n_tokens * D, D, n_tokens * D};
        }();
        for (int64_t h = 0; h < group; ++h)
            for (int64_t t = 0; t < n_tokens; ++t) std::fill_n(sums.row(h, t), D, 0.0f);
        for (int s0 = 0; s0 < n_tokens; s0 += T::kRows) sum_over_queries<T, true>(key_side, b, kv, s0, sums);
        for (int64_t h = 0; h < group; ++h)
            for (int64_t t = 0; t < n_tokens; ++t)
                for (int64_t x = 0; x < D; x += kChunk<Number>) {
                    float numbers[kChunk<Number>];
                    load_chunk(numbers, sums.row(h, t) + x, D - x);
                    for (float& number : numbers) number *= shape.scale;
                    store_chunk(dq.head(b, kv * group + h) + t * dq.token_stride + x, numbers, D - x);
                }
    }
}

}  // namespace

DqSums cores_sums(int64_t B, int64_t T, int64_t H, int64_t K, int64_t D, int64_t Dv, DType dtype) {
    const int64_t heads = B * K, n_threads = device().sm_count;
    // Otherwise two kernels take less time: threads would wait for the last heads.
    const bool one_pass = kOnCpu && std::max(D, Dv) <= 128 && 5 * round_up(heads, n_threads) <= 7 * heads;
    if (!one_pass) return {};
    if (dtype == DType::f32) return {.n_slots = heads};
    return {.n_slots = std::min(heads, 4 * n_threads), .slot_floats = H / K * T * D};
}

void flash_backward_cores(const FlashArguments& a, cudaStream_t stream) {
    dispatch_cores(a, [&](auto number, auto size) {
        using Number = decltype(number);
        constexpr int kD = decltype(size)::kD, kDv = decltype(size)::kDv;
        const Heads<const Number> dout(a.out), q(a.q), k(a.k), v(a.v);
        if constexpr (kOnCpu && kD <= 128)
            if (a.n_slots > 0) {
                using T = Tile<kD, kDv>;
                const size_t bytes = T::kSharedBytes + sizeof(float) * 2 * T::kOthersFloats;
                allow_shared(flash_backward_kernel<Number, T>, bytes);
                flash_backward_kernel<Number, T><<<static_cast<unsigned>(a.n_slots), 1, bytes, stream>>>(
                    shape_of(a), a.B * a.k.count, Heads<Number>(a.dq), a.dq_sums, Heads<Number>(a.dk),
                    Heads<Number>(a.dv), dout, a.lse, a.delta, q, k, v);
                LaunchCost cost = key_sums_cost(a, KeySums::both);
                cost.writes += bytes_of(a.dq), cost.flops += product_flops(a, a.q.D);
                return launched("flash_backward_kernel", cost);
            }
        with_tile<Tile<kD, kDv>, Tile<kD, kDv, true>>([&](auto tile) {
            using T = decltype(tile);
            const dim3 threads(T::kThreadsX, T::kThreadsY);
            allow_shared(flash_dk_dv_kernel<Number, T>, T::kSharedBytes);
            flash_dk_dv_kernel<Number, T><<<grid_of<T>(a, a.k.count), threads, T::kSharedBytes, stream>>>(
                shape_of(a), Heads<Number>(a.dk), Heads<Number>(a.dv), dout, a.lse, a.delta, q, k, v);
            launched("flash_dk_dv_kernel", key_sums_cost(a, KeySums::both));
            const size_t dq_bytes = T::kSharedBytes - sizeof(float) * T::kProbsFloats;
            allow_shared(flash_dq_kernel<Number, T>, dq_bytes);
            flash_dq_kernel<Number, T><<<grid_of<T>(a, a.q.count), threads, dq_bytes, stream>>>(
                shape_of(a), Heads<Number>(a.dq), dout, a.lse, a.delta, q, k, v);
            launched("flash_dq_kernel", dq_cost(a));
        });
    });
}
