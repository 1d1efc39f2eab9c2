// layers/norm.cuh: what LayerNorm and RMSNorm share: how a row lies in the registers of its threads.
//
// A row of C channels is read once, kept in registers, reduced to one or two numbers, and written. P threads share a
// row. Each holds up to kRowColumns of its channels, in chunks of n (chunk.cuh):
//
//     thread t of P holds the columns  (k P + t) n, ..., (k P + t) n + n - 1     for k = 0, 1, ... K - 1
//
//     C = 20, n = 4, P = 4    | t0  | t1  | t2  | t3  | t0  |      neighbours read neighbouring addresses
//                             k = 0 ................. k = 1
//
// Narrow rows are shared by 8, 16 or 32 threads (or are one thread's): then a block has 4 rows, and the lanes of one
// warp form the sum of a row without a barrier. For wide rows P is 64, 96, ..., a block has one row, and the sum
// crosses its warps through shared memory. So threadIdx.x is the position in the row, threadIdx.y the row in the block.
//
// The backward also sums over the rows: a few hundred blocks walk through all rows with a stride, each thread adds up
// its own columns in registers, at the end the block adds up its threads and writes one partial row, and
// add_column_sums (column_sum.cu) adds these to the parameter's gradient. Every sum has a fixed order, which depends on
// N and C alone: not on the number of multiprocessors, so that all GPUs give the same result.
#pragma once

#include "layers/chunk.cuh"

#include <algorithm>
#include <bit>

namespace {

// How many columns one thread may hold. On a GPU 16 fill its registers: in LayerNorm's backward it holds 32 sums over
// rows beside the rows themselves. On the CPU device "registers" are the first-level cache, and each thread that takes
// part in a sum costs a switch of stacks, as much as 100 columns: there most rows are one thread's.
constexpr int kRowColumns = kOnCpu ? 2048 : 16;

}  // namespace

// How many it does hold before another thread shares the row. Tests set it to 16, so that the CPU does what a GPU does.
inline int64_t norm_row_columns = kRowColumns;

namespace {

constexpr int kBlockRows = 4;
constexpr int kMaxRowThreads = 512;  // so that a thread may have 128 registers
constexpr int64_t kMaxNormC = kMaxRowThreads * 16;

struct NormGeometry {
    dim3 block;                 // (threads a row, rows a block)
    int64_t n_blocks_forward;   // one block for every block.y rows
    int64_t n_blocks_backward;  // = partial rows
    size_t backward_shared_bytes;
};

inline NormGeometry norm_geometry(const char* operation, int64_t N, int64_t C) {
    check(C >= 1 && C <= kMaxNormC, operation, ": rows of ", C, " channels; between 1 and ", kMaxNormC,
          " are possible");
    int64_t threads = ceil_div(C, std::min<int64_t>(norm_row_columns, kRowColumns));
    if (threads > kWarp) threads = round_up(threads, kWarp);
    else if (threads > 1)
        threads = std::max<int64_t>(8, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(threads))));
    const int64_t rows = threads <= kWarp ? kBlockRows : 1;
    // Enough blocks to fill the 132 multiprocessors of an H100 with 512 threads each. A block that sums over fewer than
    // eight rows a thread would write too much of what it reads.
    const int64_t n_most = 132 * 512 / (threads * rows);
    return {dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows)), ceil_div(N, rows),
            std::min(ceil_div(N, 8 * rows), n_most), rows > 1 ? static_cast<size_t>(rows * C) * sizeof(float) : 0};
}

// The first column of this thread's chunk k.
template <int n>
__device__ __forceinline__ int64_t chunk_column(int k) {
    return (static_cast<int64_t>(k) * blockDim.x + threadIdx.x) * n;
}
// How many chunks of a row the loops go through. On a GPU always all K: unrolled, so every chunk has its registers.
template <int n>
__device__ __forceinline__ int row_chunks(int64_t C) {
    if constexpr (!kOnCpu) return kRowColumns / n;
    return static_cast<int>(((C + n - 1) / n + blockDim.x - 1 - threadIdx.x) / blockDim.x);
}

// This thread's share of a row of C columns. Behind the row's end it is zero: that adds nothing to a sum. A row behind
// the last one has C = 0: its threads take part, because the other rows of their warp need all lanes for their sums.
template <int n>
using RowShare = float[kRowColumns / n][n];

// All loads are under way before the first is waited for.
template <int n, class T>
__device__ __forceinline__ void load_row(RowShare<n>& x, const T* row, int64_t C) {
#pragma unroll
    for (int k = 0; k < row_chunks<n>(C); ++k) {
        const int64_t c = chunk_column<n>(k);
        if (c < C) load_chunk(x[k], row + c, C - c);
        else
            for (int i = 0; i < n; ++i) x[k][i] = 0.0f;
    }
}
template <int n>
__device__ __forceinline__ void zero_row(RowShare<n>& x, int64_t C) {
#pragma unroll
    for (int k = 0; k < row_chunks<n>(C); ++k)
        for (int i = 0; i < n; ++i) x[k][i] = 0.0f;
}
template <int n, class T>
__device__ __forceinline__ void store_row(T* row, const RowShare<n>& x, int64_t C) {
#pragma unroll
    for (int k = 0; k < row_chunks<n>(C); ++k) {
        const int64_t c = chunk_column<n>(k);
        if (c < C) store_chunk(row + c, x[k], C - c);
    }
}

// The sum over a row of what its threads have summed into n accumulators each (n, so that the additions of a chunk do
// not wait for each other). `scratch` is shared memory of 32 floats for rows wider than a warp; it is free again after
// the next barrier.
template <int n>
__device__ __forceinline__ float row_sum(const float (&sums)[n], float* scratch) {
    const float sum = fold_chunk<Sum>(sums);
    if (blockDim.x == 1) return sum;
    if (blockDim.x < kWarp) return warp_sum(sum, static_cast<int>(blockDim.x));
    return block_reduce<Sum>(sum, scratch);
}

// partial[c] = sum over the block's rows (threadIdx.y, ascending) of the sums that their threads hold for column c.
// `shared` is (blockDim.y, C) floats, not used when a block has one row.
template <int n>
__device__ __forceinline__ void store_partial(float* partial, const RowShare<n>& sums, float* shared, int64_t C) {
    store_row<n>(blockDim.y == 1 ? partial : shared + threadIdx.y * C, sums, C);
    if (blockDim.y == 1) return;
    __syncthreads();  // every row of threads has put its sums into `shared`
    for (int64_t c = threadIdx.y * blockDim.x + threadIdx.x; c < C; c += blockDim.x * blockDim.y) {
        float sum = shared[c];
        for (int y = 1; y < static_cast<int>(blockDim.y); ++y) sum += shared[y * C + c];
        partial[c] = sum;
    }
}

}  // namespace
