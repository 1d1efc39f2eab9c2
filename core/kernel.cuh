// core/kernel.cuh: what kernels share. Included by .cu files with kernels, never by host headers.
//
// Everything is in an anonymous namespace: device functions belong to the translation unit that launches them.
#pragma once

#include "core/core.h"

#include <cmath>

namespace {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// The last parameters of a function whose misuse the CPU device reports with the caller's line.
#ifdef CUDA_ON_CPU
#define CALLERS_LINE , const char *file = __builtin_FILE(), int line = __builtin_LINE()
#else
#define CALLERS_LINE
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Element types. Storage is float, bf16 or f16; arithmetic and sums are float.

template <class T>
__device__ __forceinline__ float to_float(T x) {
    return static_cast<float>(x);
}
template <class T>
__device__ __forceinline__ T from_float(float x) {
    return static_cast<T>(x);  // rounds to nearest even
}

// kN elements, loaded and stored at once; by default 16 bytes: 4 floats or 8 16-bit numbers. Packed<T, 1> is the same
// kernel's way through rows whose length is not a multiple of that.
template <class T, int kN = 16 / sizeof(T)>
struct alignas(kN * sizeof(T)) Packed {
    using Element = T;
    static constexpr int n = kN;
    T v[n];
};
template <class T, int kN = 16 / sizeof(T)>
__device__ __forceinline__ Packed<T, kN> load_packed(const T* address CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    if constexpr (kN > 1) cuda_cpu::check_aligned(address, sizeof(Packed<T, kN>), "load_packed", file, line);
#endif
    return *reinterpret_cast<const Packed<T, kN>*>(address);
}
template <class T, int kN>
__device__ __forceinline__ void store_packed(T* address, const Packed<T, kN>& value CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    if constexpr (kN > 1) cuda_cpu::check_aligned(address, sizeof(Packed<T, kN>), "store_packed", file, line);
#endif
    *reinterpret_cast<Packed<T, kN>*>(address) = value;
}

// ---------------------------------------------------------------------------------------------------------------------
// The place of a thread

// The index of this thread in a one-dimensional grid, 64-bit so that no product overflows.
__device__ __forceinline__ int64_t global_thread() {
    return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// The dynamic shared memory that the launch asked for, on a 128-byte boundary (a 16-byte boundary in the CPU device's
// strict mode, where it ends at a guard page).
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
#ifdef CUDA_ON_CPU
    return static_cast<T*>(cuda_cpu::dynamic_shared_memory());
#else
    extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
    return reinterpret_cast<T*>(dynamic_shared_bytes);
#endif
}

// More than 48 KiB of dynamic shared memory a block have to be asked for before the launch.
template <class Kernel>
void allow_shared(Kernel* kernel, size_t bytes) {
    if (bytes > (48 << 10))
        cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

// x, of which the compiler then knows nothing. It computes what does not change in a loop before the loop, and keeps it
// in registers: too many of them for what is cheap to compute again, such as an address that depends on the thread.
template <class Int>
__device__ __forceinline__ Int not_hoisted(Int x) {
#ifndef CUDA_ON_CPU
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Reductions over a warp: the butterfly, with rounds o = 16, 8, 4, 2, 1. After round o every lane holds the sum of the
// 32/o lanes whose numbers equal its own modulo o; every lane ends with the same bits, because a + b == b + a.

struct Sum {
    __device__ __forceinline__ static float of(float a, float b) { return a + b; }
    static constexpr float identity = 0.0f;
};
struct Max {
    __device__ __forceinline__ static float of(float a, float b) { return fmaxf(a, b); }
    static constexpr float identity = -INFINITY;
};

#ifdef CUDA_ON_CPU
// A butterfly is five warp exchanges: each parks 32 fibers. The CPU device does the same additions, in the same order,
// in one exchange: the last lane to arrive computes all rounds.
struct ButterflyOperands {
    float value;
    int width;
};
template <class Operation>
static void complete_butterfly(void** lanes, unsigned mask) {
    (void)mask;  // always all 32
    float value[kWarp], next[kWarp];
    for (int l = 0; l < kWarp; ++l) value[l] = static_cast<ButterflyOperands*>(lanes[l])->value;
    for (int o = static_cast<ButterflyOperands*>(lanes[0])->width / 2; o > 0; o /= 2) {
        for (int l = 0; l < kWarp; ++l) next[l] = Operation::of(value[l], value[l ^ o]);
        for (int l = 0; l < kWarp; ++l) value[l] = next[l];
    }
    for (int l = 0; l < kWarp; ++l) static_cast<ButterflyOperands*>(lanes[l])->value = value[l];
}
#endif

// Every lane of the warp takes part. With a width of 2, 4, 8 or 16 each group of so many neighbours is reduced by
// itself.
template <class Operation>
__device__ __forceinline__ float warp_reduce(float value, int width = kWarp) {
#ifdef CUDA_ON_CPU
    ButterflyOperands operands{value, width};
    cuda_cpu::exchange(kFullWarp, &operands, complete_butterfly<Operation>, "warp_reduce", __FILE__, __LINE__);
    return operands.value;
#else
#pragma unroll
    for (int o = width / 2; o > 0; o /= 2) value = Operation::of(value, __shfl_xor_sync(kFullWarp, value, o));
    return value;
#endif
}
__device__ __forceinline__ float warp_sum(float value, int width = kWarp) { return warp_reduce<Sum>(value, width); }
__device__ __forceinline__ float warp_max(float value, int width = kWarp) { return warp_reduce<Max>(value, width); }

// Reduction over a block of blockDim.x = 32 k threads (k <= 32), in a fixed order; every thread gets the result.
// `scratch` is shared memory of 32 floats. It is free for reuse after the next barrier that all threads pass.
template <class Operation>
__device__ __forceinline__ float block_reduce(float value, float* scratch) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = blockDim.x / kWarp;
    value = warp_reduce<Operation>(value);
    if (n_warps == 1) return value;
    if (lane == 0) scratch[warp] = value;
    __syncthreads();  // every warp's part is in scratch
    float total = scratch[0];
    for (int w = 1; w < n_warps; ++w) total = Operation::of(total, scratch[w]);
    return total;
}

// ---------------------------------------------------------------------------------------------------------------------
// The last block. A sum over what many blocks have stored needs all of them to have come to their end. Instead of a
// second launch, the blocks count themselves, and the last one goes on. Which one that is differs from run to run; what
// it computes does not, if it reads what they stored in a fixed order.

// True in all threads of the block that is the last of n to come here: what the others have stored before is there to
// be read. Each block comes once, with all its threads. *arrivals is 0 before, and again after the last one.
__device__ __forceinline__ bool is_last_block(unsigned* arrivals, unsigned n) {
    __shared__ bool is_last;
    __threadfence();  // what this thread has stored can be seen before the block is counted
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) is_last = atomicInc(arrivals, n - 1) == n - 1;
    __syncthreads();  // is_last is there
    const bool last = is_last;
    if (last) __threadfence();  // nothing is read before the count
    return last;
}

}  // namespace
