// Attention over two sets of keys from that over each of them: what lets keys be attended to in parts, one after the
// other. A part's lse is the logarithm of its sum of exponentials, so out * exp(lse) is the sum before the division:
//
//     l = exp(lse) + exp(part_lse)         out = (exp(lse) out + exp(part_lse) part) / l         lse = log(l)
//
// with the larger of the two subtracted from both, so that no exponential overflows. A part whose lse is -infinity (a
// query that sees none of its keys) has no weight; two such parts give out = 0 and lse = -infinity. The order of
// several parts is the caller's, and the same each time.
//
// Bytes: out and part are read, out is written. Memory limits it.
#include "layers/chunk.cuh"
#include "layers/flash_attention/flash_attention.cuh"

#include <numeric>

namespace {

struct Weights {
    float own, part, shift;
    __device__ __forceinline__ Weights(float lse, float part_lse) {
        const float larger = fmaxf(lse, part_lse);
        shift = larger == -INFINITY ? 0.0f : larger;
        own = expf(lse - shift), part = expf(part_lse - shift);
    }
    __device__ __forceinline__ float sum() const { return own + part; }
};

// Block (t, b, group of heads); threadIdx.y is the head in the group, threadIdx.x the chunk of kN of its columns. Every
// thread of a head reads both lse; the next kernel writes the merged one.
template <class Out, class Part, int kN>
__global__ void merge_attention_kernel(Heads<Out> out, const float* lse, Heads<const Part> part, const float* part_lse,
                                       int n_heads, int64_t D) {
    const int head = blockIdx.z * blockDim.y + threadIdx.y;
    const int64_t t = blockIdx.x, b = blockIdx.y, d = static_cast<int64_t>(threadIdx.x) * kN;
    if (head >= n_heads || d >= D) return;
    const int64_t row = (b * n_heads + head) * gridDim.x + t;
    const Weights weights(lse[row], part_lse[row]);
    const float factor = inverse_sum(weights.sum());
    Out* const at = out.head(b, head) + t * out.token_stride + d;
    float x[kN], y[kN];
    load_chunk(x, at, D - d);
    load_chunk(y, part.head(b, head) + t * part.token_stride + d, D - d);
    for (int l = 0; l < kN; ++l) x[l] = (weights.own * x[l] + weights.part * y[l]) * factor;
    store_chunk(at, x, D - d);
}

// After all threads of the kernel above have read lse.
__global__ void merge_lse_kernel(float* lse, const float* part_lse, int64_t n) {
    const int64_t row = global_thread();
    if (row >= n) return;
    const Weights weights(lse[row], part_lse[row]);
    lse[row] = weights.shift + logf(weights.sum());
}

}  // namespace

void merge_attention(const HeadColumns& out, Tensor lse, const HeadColumns& part, Tensor part_lse,
                     cudaStream_t stream) {
    const char* name = "merge_attention";
    expect(name, "out", out.rows, out.rows.dtype, {-1, -1, -1});
    const int64_t B = out.rows.shape[0], T = out.rows.shape[1];
    expect_heads(name, "out", out, out.rows.dtype, B, T, out.count, out.D);
    expect_heads(name, "part", part, part.rows.dtype, B, T, out.count, out.D);
    expect(name, "lse", lse, DType::f32, {B, out.count, T});
    expect(name, "part_lse", part_lse, DType::f32, {B, out.count, T});
    expect_aligned(name, {{"out", out.rows}, {"part", part.rows}});
    if (lse.n() == 0) return;
    int64_t common = 0;
    for (const HeadColumns& heads : {out, part})
        for (const int64_t x : {heads.D, heads.column, heads.head_stride(), heads.rows.cols()})
            common = std::gcd(common, x);
    dispatch(out.rows.dtype, [&](auto its) {
        using Out = decltype(its);
        dispatch(part.rows.dtype, [&](auto other) {
            using Part = decltype(other);
            constexpr int kPack = kOnCpu ? kChunk<float> : static_cast<int>(16 / std::min(sizeof(Out), sizeof(Part)));
            const auto with = [&](auto n) {
                constexpr int kN = decltype(n)::value;
                const HeadLaunch at = head_launch(B, T, out.count, ceil_div(out.D, kN));
                merge_attention_kernel<Out, Part, kN>
                    <<<at.grid, at.block, 0, stream>>>(Heads<Out>(out), lse.ptr<float>(), Heads<const Part>(part),
                                                       part_lse.ptr<float>(), narrow(out.count, "heads"), out.D);
            };
            if (kOnCpu || common % kPack == 0) with(std::integral_constant<int, kPack>{});
            else with(std::integral_constant<int, 1>{});
            launched("merge_attention_kernel", {.reads = bytes_of(out, part, lse, part_lse), .writes = bytes_of(out)});
        });
    });
    constexpr int kBlock = 128;
    merge_lse_kernel<<<static_cast<unsigned>(ceil_div(lse.n(), kBlock)), kBlock, 0, stream>>>(
        lse.ptr<float>(), part_lse.ptr<float>(), lse.n());
    launched("merge_lse_kernel", {.reads = bytes_of(lse, part_lse), .writes = bytes_of(lse)});
}
