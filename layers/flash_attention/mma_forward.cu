// Flash attention on tensor cores, forward. The maths is in flash_attention.cu, the tiles in flash_attention/mma.cuh.
//
// One tile of keys and one of values are in shared memory at a time, and each is copied while the other is used:
//
//     copy      | k 0 |       v 0        |        k 1         |       v 1        |        k 2         |
//     compute         | S = q k^T, tile 0 | softmax; o += P v 0 | S = q k^T, tile 1 | softmax; o += P v 1 |
//
// Registers of a thread at D = 128 and 32 rows per warp: 128 for o, 48 for S, 8 for the rows' maxima and sums.
#include "layers/flash_attention/mma.cuh"

namespace {

template <int kD_, int kDv_>
struct ForwardTile {
    static constexpr int kD = kD_, kDv = kDv_;
    static constexpr int kRowTiles = kDv <= 128 ? 2 : 1;  // more would not fit into 255 registers
    static constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarpRows * kWarps,
                         kKeys = (kRowTiles == 2 && kDv > 64) || kDv > 192 ? 48 : 64;
    static constexpr int kQElements = kRows * kPitch<kD>, kKElements = kKeys * kPitch<kD>,
                         kVElements = kKeys * kPitch<kDv>;
    static constexpr size_t kSharedBytes = 2 * (kQElements + kKElements + kVElements);
};

// Block (query tile, query head, b). The longest rows of a causal mask come first: otherwise a long block would start
// last, and run alone at the end.
template <class Number, class T>
__global__ void __launch_bounds__(kThreads)
    flash_forward_kernel(Shape shape, Heads<Number> out, float* lse, Heads<const Number> q, Heads<const Number> k,
                         Heads<const Number> v) {
    const Mask& mask = shape.mask;
    const int b = static_cast<int>(blockIdx.z), t0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * T::kRows;
    const int64_t h = blockIdx.y;
    const int kv = static_cast<int>(h / (shape.H / shape.K));
    const float scale2 = shape.scale * kLog2e;
    Number* q_tile = dynamic_shared<Number>();
    Number* k_tile = q_tile + T::kQElements;
    Number* v_tile = k_tile + T::kKElements;
    const Interval keys =
        view_of<true>(mask, b, t0, T::kRows).any;  // of the block; a warp skips what none of its rows sees
    const auto load_keys = [&](int s) {
        load_tile<T::kKeys, T::kD>(k_tile, k.head(b, not_hoisted(kv)) + s * k.token_stride, k.token_stride,
                                   min(T::kKeys, keys.end - s), shape.D, shape.packed);
    };
    load_tile<T::kRows, T::kD>(q_tile, q.head(b, h) + t0 * q.token_stride, q.token_stride, min(T::kRows, mask.T - t0),
                               shape.D, shape.packed);
    load_keys(keys.first);
    cp_async_commit();

    const int warp_row = warp() * T::kWarpRows, first_row = t0 + warp_row;
    const View view = view_of<true>(mask, b, first_row, T::kWarpRows);
    Fragments<T::kRowTiles, T::kDv> o;
    Fragments<T::kRowTiles, T::kKeys> scores;
    OnlineRows<T::kRowTiles> softmax;
    clear(o);
    softmax.clear();
    for (int s0 = keys.first; s0 < keys.end; s0 += T::kKeys) {
        cp_async_wait<0>();
        __syncthreads();  // the keys are complete, and all warps have finished reading the values of the previous tile
        load_tile<T::kKeys, T::kDv>(v_tile, v.head(b, not_hoisted(kv)) + s0 * v.token_stride, v.token_stride,
                                    min(T::kKeys, keys.end - s0), shape.Dv, shape.packed);
        cp_async_commit();
        const bool work = view.overlaps(s0, T::kKeys);
        if (work) multiply_scores<T::kD>(scores, q_tile + warp_row * kPitch<T::kD>, k_tile);
        cp_async_wait<0>();
        __syncthreads();  // the values are complete, and all warps have finished reading the keys
        if (s0 + T::kKeys < keys.end) load_keys(s0 + T::kKeys);
        cp_async_commit();

        if (!work) continue;
        if (view.needs_mask(s0, T::kKeys)) apply_mask<true>(scores, mask, b, first_row, s0);
        float rescale[T::kRowTiles][2];
        softmax.add(scores, rescale, scale2);
        multiply_rows(o, rescale);
        Packs<T::kRowTiles, T::kKeys> P;
        pack_fragments<Number>(P, scores);
        multiply_columns(o, P, v_tile);
    }

    float factor[T::kRowTiles][2];
#pragma unroll
    for (int m = 0; m < T::kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = warp_sum(softmax.sum[m][half], 4);
            const int t = first_row + m * 16 + half * 8 + quad();
            factor[m][half] = inverse_sum(sum);
            if (in_quad() == 0 && t < mask.T) lse[(b * shape.H + h) * mask.T + t] = softmax.lse(m, half, sum, scale2);
        }
    store_rows(out.head(b, h) + first_row * out.token_stride, out.token_stride, o, factor, mask.T - first_row, shape.Dv,
               shape.packed);
}

template <class Number>
void launch(const FlashArguments& a, cudaStream_t stream) {
    MmaSizes::dispatch(a.q.D, a.v.D, [&](auto size) {
        using T = ForwardTile<decltype(size)::kD, decltype(size)::kDv>;
        const dim3 grid(static_cast<unsigned>(ceil_div(a.T, T::kRows)), static_cast<unsigned>(a.q.count),
                        static_cast<unsigned>(a.B));
        allow_shared(flash_forward_kernel<Number, T>, T::kSharedBytes);
        flash_forward_kernel<Number, T><<<grid, kThreads, T::kSharedBytes, stream>>>(
            shape_of(a), Heads<Number>(a.out), a.lse, Heads<const Number>(a.q), Heads<const Number>(a.k),
            Heads<const Number>(a.v));
        launched("flash_forward_kernel", forward_cost(a));
    });
}

}  // namespace

void flash_forward_mma(const FlashArguments& a, cudaStream_t stream) {
    dispatch_16_bits(a.q.rows.dtype, [&](auto zero) { launch<decltype(zero)>(a, stream); });
}
