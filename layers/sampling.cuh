// layers/sampling.cuh: what the kernels of sampling share: keys in the order of floats, weights, exact sums of them.
#pragma once

#include "layers/chunk.cuh"
#include "layers/layers.h"

namespace {

constexpr int kThreads = kOnCpu ? 1 : 256;  // of the block that has a row
constexpr int kN = kChunk<float>;
constexpr int64_t kMostTokens = int64_t{1} << 18;

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

// ---------------------------------------------------------------------------------------------------------------------
// Weights

// d = (x - max) / temperature <= 0
__device__ __forceinline__ uint64_t exponential_weight(float d) {
    return static_cast<uint64_t>(static_cast<int64_t>(__expf(d) * 0x1p44f));
}

// The weights of the n tokens from v on of a row.
struct RowWeights {
    const float* x_row;
    SamplingDistribution distribution;
    template <int n>
    __device__ __forceinline__ void load(uint64_t (&w)[n], int v) const {
        float x[n];
        uint32_t some = 0;
        load_chunk(x, x_row + v, n);
        for (int l = 0; l < n; ++l) some |= static_cast<uint32_t>(x[l] >= distribution.threshold);
        for (int l = 0; l < n; ++l) w[l] = 0;
        if (!some) return;
        for (int l = 0; l < n; ++l) {
            const bool is_in = x[l] >= distribution.threshold;
            const float d = is_in ? (x[l] - distribution.max) * distribution.inverse_temperature : 0.0f;
            const uint64_t weight = exponential_weight(d);
            w[l] = is_in && d >= distribution.log_min_p ? weight : 0;
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Sums of weights, in bins. A block has as many bins as a digit has values. Each thread adds into bins of its own,
// without atomics; then the threads' bins are added up. (On a GPU 4 bits a digit: bins of 256 threads take 32 KB.)

constexpr int kDigitBits = kOnCpu ? 8 : 4;
constexpr int kBins = 1 << kDigitBits;

struct Bins {
    uint64_t of_threads[kBins * kThreads];  // bin b of thread t is element b * kThreads + t
    uint64_t sums[kBins];                   // over the threads
};

// The whole block takes part. After it each thread may read sums, and write its own bins.
__device__ __forceinline__ void add_bins(Bins& bins) {
    if constexpr (kThreads == 1) {
        for (int b = 0; b < kBins; ++b) bins.sums[b] = bins.of_threads[b];
    } else {
        __syncthreads();  // all threads' bins are complete; nobody reads the sums of the last time any more
        const int lane = threadIdx.x % kWarp;
        for (int b = threadIdx.x / kWarp; b < kBins; b += kThreads / kWarp) {
            uint64_t sum = 0;
            for (int t = lane; t < kThreads; t += kWarp) sum += bins.of_threads[b * kThreads + t];
            for (int o = kWarp / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kFullWarp, sum, o);
            if (lane == 0) bins.sums[b] = sum;
        }
        __syncthreads();  // the sums are there
    }
}

__device__ __forceinline__ uint64_t sum_of_bins(const Bins& bins) {
    uint64_t sum = 0;
    for (int b = 0; b < kBins; ++b) sum += bins.sums[b];
    return sum;
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
    check(columns % 32 == 0 && columns > 0 && columns <= kMostTokens, operation, ": x is ", x,
          ", expected rows of sampling_columns(V), V from 1 to ", kMostTokens);
    expect(operation, "distributions", distributions, DType::i32, {rows, kStructN<SamplingDistribution>});
    expect(operation, "rules", rules, DType::i32, {rows, kStructN<SamplingRule>});
    expect_aligned(operation, {{"x", x}});
    return rows;
}

}  // namespace
