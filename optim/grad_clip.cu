// Clipping by the global norm.      (Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063)
//
//   norm  = unscale * sqrt(sum over all gradients of g^2)
//   scale = unscale * min(1, max_norm / (norm + 1e-6))
//
// One bad batch can have gradients a hundred times the usual size. Scaling all of them by the same number keeps the
// direction of the step and bounds its length; clipping each element by itself would change the direction. The update
// multiplies by scale as it reads the gradients, so clipping costs one pass over them and no write; scale stays on the
// device, so the host does not wait for it. unscale divides by what the loss was multiplied by (loss_scaler.cu), in the
// same multiplication.
//
// The sum is computed in two stages, in an order that depends on n alone, so that a run repeats bit for bit:
//   1. each thread sums kRows squares in f32 and stores its sum as a double;
//   2. one block adds these in double, and with them the squares of the last n % kChunkN elements.
// It leaves as two floats, high + low, 48 bits together: ranks can add those.
#include "core/kernel.cuh"
#include "optim/optim.h"

#include <cmath>

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

namespace {

constexpr int kBlock = 128;                  // threads of a block in stage 1
constexpr int kRows = 512;                   // elements per thread, summed in f32: relative error at most kRows * 2^-24
constexpr int64_t kChunkN = kBlock * kRows;  // elements that one block sums
constexpr int kLastBlock = 1024;             // threads of the one block of stage 2

// Threads that together read 64 bytes: the cache line of a CPU, and two of the 32-byte sectors that a GPU loads.
template <class T>
constexpr int kRow = 64 / sizeof(T);

// Blocks of (kRow, kBlock / kRow) threads. The threads of one y walk together down kRows rows that follow each other:
//
//   grads   | row 0: x = 0 1 2 ... | row 1: x = 0 1 2 ... | ... | row 511 |   then the same for the next y
//
// A GPU sees full sectors. On the CPU device the loop over x becomes SIMD: a vector addition or two for each row, in
// the order of memory, which hardware prefetchers recognise (rows of 128 bytes, read half by half, take twice as long).
// Because the sums are doubles, g++ also knows that storing them cannot change grads; otherwise it would not vectorise
// the loop.
template <class T>
__global__ void __launch_bounds__(kBlock) sum_squares_kernel(double* __restrict__ sums, const T* __restrict__ grads) {
    const int64_t run = static_cast<int64_t>(blockIdx.x) * (kBlock / kRow<T>)+threadIdx.y;
    const T* first = grads + run * (kRow<T> * kRows) + threadIdx.x;
    float sum = 0;
#pragma unroll 16  // loads in flight
    for (int k = 0; k < kRows; ++k) {
        const float g = to_float(first[k * kRow<T>]);
        sum += g * g;
    }
    sums[run * kRow<T> + threadIdx.x] = sum;
}

// One block adds up everything; it reads 1 / 256 of what stage 1 read.
template <class T>
__global__ void __launch_bounds__(kLastBlock)
    add_sums_kernel(float* __restrict__ result, const double* __restrict__ sums, int64_t n_sums,
                    const T* __restrict__ rest, int64_t n_rest, bool add) {
    __shared__ double shared[kLastBlock];
    const int t = threadIdx.x;
    double sum = 0;
#pragma unroll 8
    for (int64_t i = t; i < n_sums; i += kLastBlock) sum += sums[i];
    for (int64_t i = t; i < n_rest; i += kLastBlock) {
        const double g = to_float(rest[i]);
        sum += g * g;
    }
    shared[t] = sum;
    __syncthreads();  // all sums are in shared
    if (t >= kWarp) return;
    for (int i = t + kWarp; i < kLastBlock; i += kWarp) sum += shared[i];
    shared[t] = sum;  // no other thread reads the first kWarp elements before the next barrier
    __syncwarp();     // the 32 sums of this warp are in shared
    if (t > 0) return;
    for (int i = 1; i < kWarp; ++i) sum += shared[i];
    if (add) sum += static_cast<double>(result[0]) + result[1];
    result[0] = static_cast<float>(sum);
    result[1] = sum < INFINITY && result[0] < INFINITY ? static_cast<float>(sum - result[0]) : 0.0f;
}

__global__ void clip_scale_kernel(float* result, const float* sums, int n_sums, float max_norm, float unscale,
                                  bool stays_nan) {
    double sum = 0;
    for (int i = 0; i < n_sums; ++i) sum += static_cast<double>(sums[2 * i]) + sums[2 * i + 1];
    const float norm = static_cast<float>(unscale * sqrt(sum));
    float scale = unscale;
    if (max_norm > 0) scale *= fminf(1.0f, max_norm / (norm + 1e-6f));
    if (!(norm < INFINITY)) scale = NAN;  // inf or NaN: the update must not happen
    if (stays_nan && result[1] != result[1]) scale = NAN;
    result[0] = norm;
    result[1] = scale;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// kBlock doubles per chunk. (Rounded up, so that it is never 0.)
int64_t grad_norm_scratch_n(int64_t n) { return ceil_div(n, kChunkN) * kBlock * 2; }

void sum_squares(Tensor sum, Tensor grads, Tensor scratch, cudaStream_t stream, bool add) {
    const int64_t n = grads.n(), n_chunks = n / kChunkN, n_rest = n % kChunkN;
    expect("sum_squares", "sum", sum, DType::f32, {2});
    expect("sum_squares", "grads", grads, grads.dtype, {-1});
    check(scratch.dtype == DType::f32 && scratch.n() >= grad_norm_scratch_n(n), "sum_squares: scratch is ", scratch,
          ", expected at least f32 (", grad_norm_scratch_n(n), ")");
    check(is_aligned(scratch.data, sizeof(double)), "sum_squares: scratch must be on an 8-byte boundary");

    double* sums = static_cast<double*>(scratch.data);
    dispatch(grads.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (n_chunks > 0) {
            const dim3 block(kRow<T>, kBlock / kRow<T>);
            const int n_blocks = narrow(n_chunks, "sum_squares: the number of blocks");
            sum_squares_kernel<T><<<n_blocks, block, 0, stream>>>(sums, grads.ptr<T>());
            cudaCheckLaunch();
        }
        add_sums_kernel<T><<<1, kLastBlock, 0, stream>>>(sum.ptr<float>(), sums, n_chunks * kBlock,
                                                         grads.ptr<T>() + n_chunks * kChunkN, n_rest, add);
        cudaCheckLaunch();
    });
}

void clip_scale(Tensor result, Tensor sums, float max_norm, float unscale, cudaStream_t stream, bool stays_nan) {
    expect("clip_scale", "result", result, DType::f32, {2});
    expect("clip_scale", "sums", sums, DType::f32, {-1, 2});
    check(!std::isnan(max_norm), "clip_scale: max_norm is NaN");
    check(unscale > 0 && std::isfinite(unscale), "clip_scale: unscale is ", unscale, ": it must be a number above 0");
    clip_scale_kernel<<<1, 1, 0, stream>>>(result.ptr<float>(), sums.ptr<float>(),
                                           narrow(sums.shape[0], "clip_scale: sums"), max_norm, unscale, stays_nan);
    cudaCheckLaunch();
}

void grad_norm(Tensor result, Tensor grads, float max_norm, float unscale, Tensor scratch, cudaStream_t stream) {
    sum_squares(result, grads, scratch, stream);
    clip_scale(result, result.view({1, 2}), max_norm, unscale, stream);
}
