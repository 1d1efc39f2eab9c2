// What attention's backward computes before its tiles: softmax's own gradient, one number for each query
// (flash_attention.cu),
//
//     delta[b,h,t] = sum_d dout[b,t,h,d] out[b,t,h,d]
//
// It reads two tensors for one number a row: where the product that makes dout is ours, this is done before dout leaves
// the chip (layers/hopper_matmul.cu).
//
// On a GPU eight lanes share a row: 64 columns of 16 bits are one load of 16 bytes each, and a warp has four rows under
// way. Block (rows, head, b): no thread divides to find its row. The first threads also zero the counts of the tier
// hopper. There are more threads than counts: a thread at least for each row, where 64 rows have a count.
#include "layers/chunk.cuh"
#include "layers/flash_attention/flash_attention.cuh"

namespace {

constexpr int kDeltaLanes = kOnCpu ? 1 : 8, kDeltaRows = 32;

template <class Number, int kN>
__global__ void __launch_bounds__(kDeltaLanes* kDeltaRows)
    flash_delta_kernel(float* delta, Heads<const Number> dout, Heads<const Number> out, int64_t T, int64_t D,
                       int* zeros, int64_t n_zeros) {
    const int64_t h = blockIdx.y, b = blockIdx.z, t = static_cast<int64_t>(blockIdx.x) * kDeltaRows + threadIdx.y;
    float sum[kN] = {};
    if (t < T) {
        const Number *dy = dout.head(b, h) + t * dout.token_stride, *y = out.head(b, h) + t * out.token_stride;
        for (int64_t d = threadIdx.x * kN; d < D; d += kDeltaLanes * kN) {
            float a[kN], c[kN];
            load_chunk(a, dy + d, D - d);
            load_chunk(c, y + d, D - d);
            for (int l = 0; l < kN; ++l) sum[l] = fmaf(a[l], c[l], sum[l]);
        }
    }
    float total = fold_chunk<Sum>(sum);
    if constexpr (kDeltaLanes > 1) total = warp_sum(total, kDeltaLanes);  // all lanes of the warp, rows from T on too
    const int64_t block = (b * gridDim.y + h) * gridDim.x + blockIdx.x,
                  thread = (block * kDeltaRows + threadIdx.y) * kDeltaLanes + threadIdx.x;
    if (thread < n_zeros) zeros[thread] = 0;
    if (threadIdx.x == 0 && t < T) delta[(b * gridDim.y + h) * T + t] = total;
}

}  // namespace

void flash_delta(const FlashDelta& to, const HeadColumns& dout, const HeadColumns& out, cudaStream_t stream) {
    const char* operation = "flash_delta";
    const int64_t B = to.delta.shape[0], H = to.delta.shape[1], T = to.delta.shape[2], n_zeros = to.zeros.n();
    expect(operation, "delta", to.delta, DType::f32, {-1, -1, -1});
    expect_heads(operation, "dout", dout, out.rows.dtype, B, T, H, out.D);
    expect_heads(operation, "out", out, out.rows.dtype, B, T, H, out.D);
    const int64_t blocks = ceil_div(T, int64_t{kDeltaRows}), n_threads = B * H * blocks * kDeltaRows * kDeltaLanes;
    check(n_zeros <= n_threads, operation, ": ", n_zeros, " zeros, and ", n_threads, " threads");
    if (n_threads == 0) return;
    // Heads that are not packed go one element at a time.
    dispatch_chunks(out.rows.dtype, is_packed({dout, out}) ? out.D : 1, [&](auto chunk) {
        using Number = typename decltype(chunk)::Element;
        const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(H), static_cast<unsigned>(B));
        flash_delta_kernel<Number, decltype(chunk)::n><<<grid, dim3(kDeltaLanes, kDeltaRows), 0, stream>>>(
            to.delta.ptr<float>(), Heads<const Number>(dout), Heads<const Number>(out), T, out.D,
            to.zeros.ptr_or_null<int32_t>(), n_zeros);
        launched("flash_delta_kernel",
                 {.reads = bytes_of(dout, out), .writes = bytes_of(to.delta, to.zeros), .scratch = bytes_of(to.zeros)});
    });
}
