// Flash attention on CUDA cores, forward. The maths is in flash_attention.cu, the tiles in flash_attention/cores.cuh.
#include "layers/flash_attention/cores.cuh"

namespace {

// The running softmax of a thread's rows, in powers of two. The maximum is rounded to a whole number: then rescaling
// sums by 2^(old - new) changes exponents only.
template <class T>
struct OnlineRows {
    float max[T::kR], sum[T::kR], rescale[T::kR];
    __device__ __forceinline__ void clear() {
        for (int r = 0; r < T::kR; ++r) max[r] = kNothingYet, sum[r] = 0.0f;
    }
    // A score x becomes 2^(x - max); rescale is the factor by which older sums have to be multiplied.
    __device__ __forceinline__ void add(typename T::Scores& scores, int n) {
        float tile_max[T::kR];
        for (int r = 0; r < T::kR; ++r) tile_max[r] = kMasked;
        for (int i = 0; i < score_steps<T>(n); ++i)
            for (int m = 0; m < T::kMScores; ++m)
                for (int r = 0; r < T::kR; ++r)
                    tile_max[r] = scores[i][m][r] > tile_max[r] ? scores[i][m][r] : tile_max[r];
        for (int r = 0; r < T::kR; ++r) {
            if constexpr (T::kThreadsX > 1) tile_max[r] = warp_max(tile_max[r], T::kThreadsX);
            const float whole = rintf(tile_max[r]), larger = whole > max[r] ? whole : max[r];
            rescale[r] = power_of_two(max[r] - larger);
            max[r] = larger;
        }
        for (int i = 0; i < score_steps<T>(n); ++i)
            for (int m = 0; m < T::kMScores; ++m)
                for (int r = 0; r < T::kR; ++r) scores[i][m][r] = exp2_below(scores[i][m][r], max[r]);
    }
    // After a barrier: the sum over the tile's others, in order. Every thread of a row computes the whole sum.
    __device__ __forceinline__ void add_sums(const float* probs, int n) {
        for (int r = 0; r < T::kR; ++r) sum[r] *= rescale[r];
        for (int j = 0; j < n; ++j)
            for (int r = 0; r < T::kR; ++r) sum[r] += probs[j * T::kPitch + first_row<T>() + r];
    }
};

// Forward. Block (query tile, query head, b). The longest rows of a causal mask come first: otherwise a long block
// would start last, and run alone at the end. Two blocks to a multiprocessor, as its shared memory has room for: left
// to itself ptxas aims at more, and spills registers.
template <class Number, class T>
__global__ void __launch_bounds__(T::kThreadsX* T::kThreadsY, 2)
    flash_forward_kernel(Shape shape, Heads<Number> out, float* lse, Heads<const Number> q, Heads<const Number> k,
                         Heads<const Number> v) {
    const Mask& mask = shape.mask;
    const int b = static_cast<int>(blockIdx.z), t0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * T::kRows;
    const int64_t h = blockIdx.y, kv = h / (shape.H / shape.K);
    const int n_rows = min(T::kRows, mask.T - t0);
    float* q_rows = dynamic_shared<float>();
    float* probs = q_rows + T::kRowsFloats;
    float* k_tile = probs + T::kProbsFloats;
    float* v_tile = k_tile + T::kOthersFloats;
    load_rows<T>(q_rows, q.head(b, h) + t0 * q.token_stride, q.token_stride, n_rows, shape.D);

    const View view = view_of<true>(mask, b, t0, T::kRows);
    RowIntervals<T> rows;
    rows.template find<true>(mask, b, t0);
    OnlineRows<T> softmax;
    softmax.clear();
    typename T::Scores registers, &scores = scores_in<T>(registers, probs);
    typename T::Columns o;
    clear<T>(o);
    for (int s0 = view.any.first; s0 < view.any.end; s0 += T::kOthers) {
        const int n = min(T::kOthers, view.any.end - s0);
        __syncthreads();  // all threads have finished reading the previous tiles
        load_others<T>(k_tile, k.head(b, kv) + s0 * k.token_stride, k.token_stride, n, shape.D);
        load_others<T>(v_tile, v.head(b, kv) + s0 * v.token_stride, v.token_stride, n, shape.Dv);
        __syncthreads();  // the tiles are complete
        multiply_scores<T>(scores, q_rows, k_tile, n, shape.scale * kLog2e);
        if (needs_mask<T>(view, s0, n)) rows.apply(scores, s0, n);
        softmax.add(scores, n);
        share_scores<T>(probs, scores, n);
        __syncthreads();  // every thread's probabilities are complete
        softmax.add_sums(probs, n);
        for (int i = 0; i < T::kColumnSteps; ++i)
            for (int m = 0; m < T::kMColumns; ++m)
                for (int r = 0; r < T::kR; ++r) o[i][m][r] *= softmax.rescale[r];
        multiply_columns<T>(o, probs, v_tile, n);
    }
    float factor[T::kR];
    for (int r = 0; r < T::kR; ++r) factor[r] = inverse_sum(softmax.sum[r]);
    store_rows<T>(out.head(b, h) + t0 * out.token_stride, out.token_stride, o, factor, n_rows, shape.Dv);
    if (!kOnCpu && threadIdx.x > 0) return;
    for (int r = 0; r < T::kR && first_row<T>() + r < n_rows; ++r)
        lse[(b * shape.H + h) * mask.T + t0 + first_row<T>() + r] = (softmax.max[r] + log2f(softmax.sum[r])) * kLn2;
}

}  // namespace

void flash_forward_cores(const FlashArguments& a, cudaStream_t stream) {
    dispatch_cores(a, [&](auto number, auto size) {
        using Number = decltype(number);
        using T = Tile<decltype(size)::kD, decltype(size)::kDv>;
        const size_t bytes = sizeof(float) * (T::kRowsFloats + T::kProbsFloats + 2 * T::kOthersFloats);
        const dim3 threads(T::kThreadsX, T::kThreadsY);
        allow_shared(flash_forward_kernel<Number, T>, bytes);
        flash_forward_kernel<Number, T><<<grid_of<T>(a, a.q.count), threads, bytes, stream>>>(
            shape_of(a), Heads<Number>(a.out), a.lse, Heads<const Number>(a.q), Heads<const Number>(a.k),
            Heads<const Number>(a.v));
        launched("flash_forward_kernel", forward_cost(a));
    });
}
