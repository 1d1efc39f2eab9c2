// layers/norm.cuh: what LayerNorm and RMSNorm share: how a row lies in the registers of its threads.
//
// A row of C channels is read once, kept in registers, reduced to one or two numbers, and written. Each thread holds up to
// 32 channels of it, as packs of n (16 bytes of them; n = 1 when C is no multiple of that):
//
//     thread t of P holds the columns  (k P + t) n, ..., (k P + t) n + n - 1     for k = 0, 1, ... 32/n - 1
//
//     C = 20, n = 4, P = 4    | t0  | t1  | t2  | t3  | t0  |      neighbours read neighbouring addresses
//                             k = 0 ................. k = 1
//
// Up to 1024 channels a row is one warp's (P = 32) and a block holds 8 rows, which never wait for each other. Wider rows are
// a block's (P = 64, 96, ... 512), and their sums cross its warps through shared memory. So threadIdx.x is the place in the
// row, threadIdx.y says which of the block's rows.
//
// The backward also sums over the rows: a few hundred blocks walk through all rows with a stride, each thread adds up its own
// columns in registers, at the end the block adds up its threads and writes one partial row, and add_column_sums
// (column_sum.cu) adds these to the parameter's gradient. Every sum has a fixed order, which depends on N and C alone: not on
// the number of multiprocessors, so that the result is the same on every machine.
#pragma once

#include "core/kernel.cuh"

#include <algorithm>

namespace {

constexpr int kRowColumns = 32;      // columns of a row that one thread holds
constexpr int kNormBlock = 256;      // threads a block, while a row needs no more
constexpr int kMaxRowThreads = 512;  // so that a thread may have 128 registers
constexpr int64_t kMaxNormC = int64_t{kMaxRowThreads} * kRowColumns;

struct NormGeometry {
    dim3 block;                // (threads a row, rows a block)
    int64_t n_blocks_forward;  // one block for every block.y rows
    int64_t n_blocks_backward;  // = partial rows
    size_t backward_shared_bytes;
};

inline NormGeometry norm_geometry(const char* operation, int64_t N, int64_t C) {
    check(C >= 1 && C <= kMaxNormC, operation, ": rows of ", C, " channels; between 1 and ", kMaxNormC, " are possible");
    const int64_t threads = round_up(ceil_div(C, kRowColumns), kWarp);
    const int64_t rows = threads == kWarp ? kNormBlock / kWarp : 1;
    // 264 blocks of 256 threads are two on each of the 132 multiprocessors of an H100 or H200. A block that sums over fewer
    // than four rows a thread would write about as much as it reads.
    const int64_t n_most = 264 * kNormBlock / (threads * rows);
    return {dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)), ceil_div(N, rows),
            std::min(ceil_div(N, 4 * rows), n_most), rows > 1 ? static_cast<size_t>(rows * C) * sizeof(float) : 0};
}

// The first column of this thread's pack k.
template <int n>
__device__ __forceinline__ int64_t pack_column(int k) {
    return (static_cast<int64_t>(k) * blockDim.x + threadIdx.x) * n;
}

// This thread's share of a row. Behind the row's end it is zero: that adds nothing to a sum.
template <class T, int n>
struct RowShare {
    static constexpr int K = kRowColumns / n;
    Packed<T, n> pack[K];

    // All loads are under way before the first is waited for.
    __device__ __forceinline__ void load(const T* row, int64_t C) {
#pragma unroll
        for (int k = 0; k < K; ++k) pack[k] = pack_column<n>(k) < C ? load_packed<T, n>(row + pack_column<n>(k)) : Packed<T, n>{};
    }
    __device__ __forceinline__ void store(T* row, int64_t C) const {
#pragma unroll
        for (int k = 0; k < K; ++k)
            if (pack_column<n>(k) < C) store_packed(row + pack_column<n>(k), pack[k]);
    }
    // x = inp + branch, rounded to T: the number that the residual stream goes on with is the one that is normalised.
    __device__ __forceinline__ void add(const RowShare& other) {
#pragma unroll
        for (int k = 0; k < K; ++k)
            for (int i = 0; i < n; ++i) pack[k].v[i] = from_float<T>(to_float(pack[k].v[i]) + to_float(other.pack[k].v[i]));
    }
};

// The sum over a row of what its threads have summed into n accumulators each (n, so that the additions of a pack do not
// wait for each other). `scratch` is shared memory of 32 floats, untouched where a row is a warp's; free again after the
// next barrier.
template <int n>
__device__ __forceinline__ float row_sum(const float (&sums)[n], float* scratch) {
    float sum = sums[0];
#pragma unroll
    for (int i = 1; i < n; ++i) sum += sums[i];
    return block_reduce<Sum>(sum, scratch);
}

// partial[c] = sum over the block's rows (threadIdx.y, ascending) of the sums that their threads hold for column c.
// `shared` is (blockDim.y, C) floats, not used when a block has one row.
template <int n>
__device__ __forceinline__ void store_partial(float* partial, const float (&sums)[kRowColumns / n][n], float* shared, int64_t C) {
    float* own = blockDim.y == 1 ? partial : shared + threadIdx.y * C;
    for (int k = 0; k < kRowColumns / n; ++k)
        for (int i = 0; i < n; ++i)
            if (pack_column<n>(k) < C) own[pack_column<n>(k) + i] = sums[k][i];
    if (blockDim.y == 1) return;
    __syncthreads();  // every row of threads has put its sums into `shared`
    for (int64_t c = threadIdx.y * blockDim.x + threadIdx.x; c < C; c += blockDim.x * blockDim.y) {
        float sum = shared[c];
        for (int y = 1; y < static_cast<int>(blockDim.y); ++y) sum += shared[y * C + c];
        partial[c] = sum;
    }
}

}  // namespace
