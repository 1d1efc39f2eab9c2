// layers/sampling.cuh: what the kernels of sampling share: keys in the order of floats, the largest of a block, tables.
#pragma once

#include "layers/chunk.cuh"
#include "layers/early_launch.cuh"
#include "layers/layers.h"

namespace {

constexpr int kThreads = kOnCpu ? 1 : 256;  // of the block that has a row
constexpr int kN = kChunk<float>;

// A barrier, where the block has more than one thread.
__device__ __forceinline__ void team_barrier() {
    if (kThreads > 1) __syncthreads();
}

// An unsigned integer for each float, in the same order; -0 counts as 0. The bits of floats above 0 are in order as
// they are; those below 0 are in reverse.
__device__ __forceinline__ uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float float_of_key(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Larger numbers for larger x, of equals for smaller v. No token has the key 0.
__device__ __forceinline__ uint64_t token_key(float x, int v) {
    return static_cast<uint64_t>(key_of(x)) << 32 | ~static_cast<uint32_t>(v);
}
__device__ __forceinline__ int token_of(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }

// The largest key of the block's threads, n_threads; every thread gets it. scratch: shared, for one call between two
// barriers.
template <int n_threads = kThreads>
__device__ __forceinline__ uint64_t team_largest(uint64_t key, uint64_t* scratch) {
    if (n_threads == 1) return key;
    for (int o = kWarp / 2; o > 0; o /= 2) {
        const uint64_t other = __shfl_xor_sync(kFullWarp, key, o);
        key = key > other ? key : other;
    }
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = key;
    __syncthreads();  // the warps' largest are in scratch
    for (int w = 0; w < n_threads / kWarp; ++w) key = key > scratch[w] ? key : scratch[w];
    return key;
}

// The chunks that this thread of n_threads has at v, v + n_threads kN, ...: kAhead of them, -infinity behind the row.
// All are asked for before the first is waited for.
template <int n_threads, int kAhead>
__device__ __forceinline__ void load_ahead(float (&x)[kAhead][kN], const float* x_row, int v, int columns) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
        for (int l = 0; l < kN; ++l) x[k][l] = -INFINITY;
        if (v + k * n_threads * kN < columns) load_chunk(x[k], x_row + v + k * n_threads * kN, kN);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// A table of structs, one a row of an i32 tensor.
template <class Struct>
Struct* structs(const Tensor& tensor) {
    static_assert(sizeof(Struct) == kStructN<Struct> * sizeof(int32_t));
    return reinterpret_cast<Struct*>(tensor.ptr<int32_t>());
}

// For dispatch_chunks. Logits may be some rows of a larger tensor, which start anywhere: then chunks have one element.
inline int64_t row_n_of_chunks(const Tensor& logits) { return is_aligned(logits.data, 16) ? logits.shape[1] : 1; }

inline int64_t expect_rows(const char* operation, const Tensor& x, const Tensor& distributions, const Tensor& rules) {
    expect(operation, "x", x, DType::f32, {-1, -1});
    const int64_t rows = x.shape[0], columns = x.shape[1];
    check(columns % 32 == 0 && columns > 0 && columns <= kMostSampledTokens, operation, ": x is ", x,
          ", expected rows of sampling_columns(V), V from 1 to ", kMostSampledTokens);
    expect(operation, "distributions", distributions, DType::i32, {rows, kStructN<SamplingDistribution>});
    expect(operation, "rules", rules, DType::i32, {rows, kStructN<SamplingRule>});
    expect_aligned(operation, {{"x", x}});
    return rows;
}

}  // namespace
