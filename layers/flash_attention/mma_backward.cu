// Flash attention on tensor cores, backward. The maths is in flash_attention.cu, the tiles in flash_attention/mma.cuh.
//
// Two kernels that mirror each other: one owns queries and sums dq, the other owns keys and sums dk and dv. In both the
// rows' two tiles stay in shared memory, and those of the others are loaded into two buffers, one of which is filled
// while the other is used:
//
//               rows                    others, streaming past     registers (D = 128)
//     dq        q, do of 64 queries     k, v of 32 keys            64 for dq, 32 for S and dP
//     dk, dv    k, v of 64 keys         q, do of 32 queries        128 for dk and dv, 32 for S and dP
//
// At D = 256 dk and dv would take 256 registers: one kernel sums dk, another one dv (KeySums).
#include "layers/flash_attention/mma.cuh"

namespace {

template <int kD_, int kDv_, bool kSmall_>
struct BackwardTile {
    static constexpr int kD = kD_, kDv = kDv_;
    static constexpr bool kSmall = kSmall_;
    static constexpr int kRowTiles = kD <= 64 ? 2 : 1;  // more would not fit into 255 registers
    // With twice as many, tiles of 128 and of 192 columns would not fit into 99 KiB (sm_86, sm_89), or 64 (sm_75).
    static constexpr int kOthers = kSmall || kD > 128 ? 16 : 32;
    static constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarpRows * kWarps;
    // Elements of two tiles, one after the other: (q, do) or (k, v).
    static constexpr int kRowsPair = kRows * (kPitch<kD> + kPitch<kDv>),
                         kOthersPair = kOthers * (kPitch<kD> + kPitch<kDv>);
    static constexpr size_t kSharedBytes = 2 * (kRowsPair + 2 * kOthersPair) + 2 * 2 * kOthers * sizeof(float);
};

// Starts the copies of n tokens of two heads of kD and kDv columns: q and do, or k and v.
template <class T, int kTokens, class Number>
__device__ __forceinline__ void load_pair(Number* pair, const Heads<const Number>& x, const Heads<const Number>& y,
                                          int b, int64_t x_head, int64_t y_head, int token, int n, const Shape& shape) {
    load_tile<kTokens, T::kD>(pair, x.head(b, x_head) + token * x.token_stride, x.token_stride, n, shape.D,
                              shape.packed);
    load_tile<kTokens, T::kDv>(pair + kTokens * kPitch<T::kD>, y.head(b, y_head) + token * y.token_stride,
                               y.token_stride, n, shape.Dv, shape.packed);
}

// ---------------------------------------------------------------------------------------------------------------------
// dq. Block (query tile, query head, b).

template <class Number, class T>
__global__ void __launch_bounds__(kThreads, 2)
    flash_dq_kernel(Shape shape, Heads<Number> dq, Heads<const Number> dout, const float* lse, const float* delta,
                    Heads<const Number> q, Heads<const Number> k, Heads<const Number> v) {
    if constexpr (T::kSmall && kAfterTuring) return;
    const Mask& mask = shape.mask;
    const int b = static_cast<int>(blockIdx.z), t0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * T::kRows;
    const int64_t h = blockIdx.y, kv = h / (shape.H / shape.K);
    const float scale2 = shape.scale * kLog2e;
    Number* rows = dynamic_shared<Number>();
    Number* others = rows + T::kRowsPair;  // two buffers
    const Interval keys =
        view_of<true>(mask, b, t0, T::kRows).any;  // of the block; a warp skips what none of its rows sees
    load_pair<T, T::kRows>(rows, q, dout, b, h, h, t0, min(T::kRows, mask.T - t0), shape);
    load_pair<T, T::kOthers>(others, k, v, b, kv, kv, keys.first, min(T::kOthers, keys.end - keys.first), shape);
    cp_async_commit();

    const int warp_row = warp() * T::kWarpRows, first_row = t0 + warp_row;
    const View view = view_of<true>(mask, b, first_row, T::kWarpRows);
    const Number *q_rows = rows + warp_row * kPitch<T::kD>,
                 *dout_rows = rows + T::kRows * kPitch<T::kD> + warp_row * kPitch<T::kDv>;
    float row_lse2[T::kRowTiles][2], row_delta[T::kRowTiles][2], factor[T::kRowTiles][2];
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t row = (b * shape.H + h) * mask.T + min(first_row + m * 16 + half * 8 + quad(), mask.T - 1);
            row_lse2[m][half] = lse[row] * kLog2e, row_delta[m][half] = delta[row], factor[m][half] = shape.scale;
        }
    Fragments<T::kRowTiles, T::kD> acc;
    clear(acc);
    int buffer = 0;
    for (int s0 = keys.first; s0 < keys.end; s0 += T::kOthers, buffer ^= 1) {
        cp_async_wait<0>();
        __syncthreads();  // this tile is complete, and all warps have finished reading the previous one
        const int next = s0 + T::kOthers;
        if (next < keys.end)
            load_pair<T, T::kOthers>(others + (buffer ^ 1) * T::kOthersPair, k, v, b, kv, kv, next,
                                     min(T::kOthers, keys.end - next), shape);
        cp_async_commit();
        if (!view.overlaps(s0, T::kOthers)) continue;
        const Number *k_tile = others + buffer * T::kOthersPair, *v_tile = k_tile + T::kOthers * kPitch<T::kD>;

        Fragments<T::kRowTiles, T::kOthers> scores, dscores;
        multiply_scores<T::kD>(scores, q_rows, k_tile);
        if (view.needs_mask(s0, T::kOthers)) apply_mask<true>(scores, mask, b, first_row, s0);
        multiply_scores<T::kDv>(dscores, dout_rows, v_tile);  // dP = do v^T
#pragma unroll
        for (int m = 0; m < T::kRowTiles; ++m)
#pragma unroll
            for (int n = 0; n < T::kOthers / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)  // dS = P * (dP - delta)
                    dscores[m][n][i] = ex2_approx(fmaf(scores[m][n][i], scale2, -row_lse2[m][i / 2])) *
                                       (dscores[m][n][i] - row_delta[m][i / 2]);
        Packs<T::kRowTiles, T::kOthers> dS;
        pack_fragments<Number>(dS, dscores);
        multiply_columns(acc, dS, k_tile);  // dq = scale dS k
    }
    store_rows(dq.head(b, h) + first_row * dq.token_stride, dq.token_stride, acc, factor, mask.T - first_row, shape.D,
               shape.packed);
}

// ---------------------------------------------------------------------------------------------------------------------
// dk and dv. Block (key tile, key head, b): all queries of the group's heads that see these keys are loaded, head by
// head. It computes S^T and dP^T, with keys as rows; lse and delta belong to the others, and are stored next to their
// tiles.

// One tile of queries, with the 2 kOthers numbers lse2 and delta.
template <class Number, class T, KeySums kSums>
__device__ __forceinline__ void add_queries(Fragments<T::kRowTiles, T::kD>& dk_acc,
                                            Fragments<T::kRowTiles, T::kDv>& dv_acc, const Number* k_rows,
                                            const Number* v_rows, const Number* q_tile, const float* lse2,
                                            const Mask& mask, const View& view, int b, int first_row, int t0,
                                            float scale2) {
    const Number* dout_tile = q_tile + T::kOthers * kPitch<T::kD>;
    const float* deltas = lse2 + T::kOthers;
    Fragments<T::kRowTiles, T::kOthers> scores, dscores;
    multiply_scores<T::kD>(scores, k_rows, q_tile);  // S^T
    if (view.needs_mask(t0, T::kOthers)) apply_mask<false>(scores, mask, b, first_row, t0);
    if constexpr (kSums != KeySums::dv) multiply_scores<T::kDv>(dscores, v_rows, dout_tile);  // dP^T = v do^T
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < T::kOthers / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = n * 8 + 2 * in_quad() + i % 2;
                scores[m][n][i] = ex2_approx(fmaf(scores[m][n][i], scale2, -lse2[t]));
                if constexpr (kSums != KeySums::dv) dscores[m][n][i] = scores[m][n][i] * (dscores[m][n][i] - deltas[t]);
            }
    Packs<T::kRowTiles, T::kOthers> P, dS;
    if constexpr (kSums != KeySums::dk) {
        pack_fragments<Number>(P, scores);
        multiply_columns(dv_acc, P, dout_tile);  // dv = P^T do
    }
    if constexpr (kSums != KeySums::dv) {
        pack_fragments<Number>(dS, dscores);
        multiply_columns(dk_acc, dS, q_tile);  // dk = scale dS^T q
    }
}

template <class Number, class T, KeySums kSums>
__global__ void __launch_bounds__(kThreads, 2)
    flash_dk_dv_kernel(Shape shape, Heads<Number> dk, Heads<Number> dv, Heads<const Number> dout, const float* lse,
                       const float* delta, Heads<const Number> q, Heads<const Number> k, Heads<const Number> v) {
    if constexpr (T::kSmall && kAfterTuring) return;
    const Mask& mask = shape.mask;
    const int b = static_cast<int>(blockIdx.z), s0 = static_cast<int>(blockIdx.x) * T::kRows;
    const int64_t kv = blockIdx.y, group = shape.H / shape.K;
    const float scale2 = shape.scale * kLog2e;
    Number* rows = dynamic_shared<Number>();
    Number* others = rows + T::kRowsPair;                                       // two buffers
    float* statistics = reinterpret_cast<float*>(others + 2 * T::kOthersPair);  // [buffer][lse2, delta][query]
    const Interval queries = view_of<false>(mask, b, s0, T::kRows).any;
    const auto load_queries = [&](int64_t h, int t0, int buffer) {
        const int n = min(T::kOthers, queries.end - t0);
        load_pair<T, T::kOthers>(others + buffer * T::kOthersPair, q, dout, b, h, h, t0, n, shape);
        const int i = static_cast<int>(threadIdx.x);
        if (i >= T::kOthers) return;
        float* to = statistics + buffer * 2 * T::kOthers + i;
        const int64_t from = (b * shape.H + h) * mask.T + t0 + i;
        to[0] = i < n ? lse[from] * kLog2e : 0.0f;
        to[T::kOthers] = i < n ? delta[from] : 0.0f;
    };
    load_pair<T, T::kRows>(rows, k, v, b, kv, kv, s0, min(T::kRows, mask.T - s0), shape);
    if (queries.first < queries.end) load_queries(kv * group, queries.first, 0);
    cp_async_commit();

    const int warp_row = warp() * T::kWarpRows, first_row = s0 + warp_row;
    const View view = view_of<false>(mask, b, first_row, T::kWarpRows);
    const Number *k_rows = rows + warp_row * kPitch<T::kD>,
                 *v_rows = rows + T::kRows * kPitch<T::kD> + warp_row * kPitch<T::kDv>;
    Fragments<T::kRowTiles, T::kD> dk_acc;
    Fragments<T::kRowTiles, T::kDv> dv_acc;
    clear(dk_acc);
    clear(dv_acc);
    int head = 0, buffer = 0,
        next = queries.first;  // the query head of the group, and its first query of the next tile
    while (next < queries.end) {
        cp_async_wait<0>();
        __syncthreads();  // this tile and its statistics are complete, and all warps have read the previous ones
        const int t0 = next;
        next += T::kOthers;
        if (next >= queries.end && head + 1 < group) ++head, next = queries.first;
        if (next < queries.end) load_queries(kv * group + head, next, buffer ^ 1);
        cp_async_commit();
        const Number* q_tile = others + buffer * T::kOthersPair;
        const float* lse2 = statistics + buffer * 2 * T::kOthers;
        buffer ^= 1;
        if (!view.overlaps(t0, T::kOthers)) continue;

        add_queries<Number, T, kSums>(dk_acc, dv_acc, k_rows, v_rows, q_tile, lse2, mask, view, b, first_row, t0,
                                      scale2);
    }
    float factor[T::kRowTiles][2];
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) factor[m][0] = factor[m][1] = 1.0f;
    if constexpr (kSums != KeySums::dk)
        store_rows(dv.head(b, kv) + first_row * dv.token_stride, dv.token_stride, dv_acc, factor, mask.T - first_row,
                   shape.Dv, shape.packed);
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m) factor[m][0] = factor[m][1] = shape.scale;
    if constexpr (kSums != KeySums::dv)
        store_rows(dk.head(b, kv) + first_row * dk.token_stride, dk.token_stride, dk_acc, factor, mask.T - first_row,
                   shape.D, shape.packed);
}

template <class Number, class T>
void launch_tiles(const FlashArguments& a, cudaStream_t stream) {
    const Heads<const Number> dout(a.out), q(a.q), k(a.k), v(a.v);
    const unsigned tiles = static_cast<unsigned>(ceil_div(a.T, T::kRows)), B = static_cast<unsigned>(a.B);
    for_key_sums<T::kD>([&](auto sums) {
        constexpr KeySums kSums = decltype(sums)::value;
        allow_shared(flash_dk_dv_kernel<Number, T, kSums>, T::kSharedBytes);
        flash_dk_dv_kernel<Number, T, kSums>
            <<<dim3(tiles, static_cast<unsigned>(a.k.count), B), kThreads, T::kSharedBytes, stream>>>(
                shape_of(a), Heads<Number>(a.dk), Heads<Number>(a.dv), dout, a.lse, a.delta, q, k, v);
        launched("flash_dk_dv_kernel", key_sums_cost(a, kSums));
    });
    allow_shared(flash_dq_kernel<Number, T>, T::kSharedBytes);
    flash_dq_kernel<Number, T><<<dim3(tiles, static_cast<unsigned>(a.q.count), B), kThreads, T::kSharedBytes, stream>>>(
        shape_of(a), Heads<Number>(a.dq), dout, a.lse, a.delta, q, k, v);
    launched("flash_dq_kernel", dq_cost(a));
}

template <class Number>
void launch(const FlashArguments& a, cudaStream_t stream) {
    MmaSizes::dispatch(a.q.D, a.v.D, [&](auto size) {
        constexpr int kD = decltype(size)::kD, kDv = decltype(size)::kDv;
        with_tile<BackwardTile<kD, kDv, false>, BackwardTile<kD, kDv, true>>(
            [&](auto tile) { launch_tiles<Number, decltype(tile)>(a, stream); });
    });
}

}  // namespace

void flash_backward_mma(const FlashArguments& a, cudaStream_t stream) {
    dispatch_16_bits(a.q.rows.dtype, [&](auto zero) { launch<decltype(zero)>(a, stream); });
}
