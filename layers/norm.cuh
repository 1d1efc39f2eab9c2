// layers/norm.cuh: what LayerNorm and RMSNorm share: how a row lies in the registers of its threads.
//
// A row of C channels is read once, kept in registers, reduced to one or two numbers, and written. P threads share a
// row. Each holds up to kColumns of its channels, in chunks of n (chunk.cuh):
//
//     thread t of P holds the columns  (k P + t) n, ..., (k P + t) n + n - 1     for k = 0, 1, ... K - 1
//
//     C = 20, n = 4, P = 4    | t0  | t1  | t2  | t3  | t0  |      neighbours read neighbouring addresses
//                             k = 0 ................. k = 1
//
// On a GPU:
//
//     C up to 512       8, 16 or 32 threads a row (or one), 16 columns each       4 rows a block
//     C up to 1024      a warp a row, 24 or 32 columns a thread                   4 rows a block
//     wider             96, 128, ... 512 threads a row, 16 columns each            one row a block
//
// In the first two the lanes of a warp form the sum of a row without a barrier; in the third it crosses the block's
// warps through shared memory. So threadIdx.x is the position in the row, threadIdx.y the row in the block.
//
// The backward also sums over the rows: as many blocks as there is room for walk through all rows with a stride, each
// thread adds up its own columns in registers, at the end the block adds up its threads and writes one partial row, and
// the last blocks add these to the parameter's gradient (column_sum.cuh). Every sum has a fixed order, which depends on
// N and C alone: not on the number of multiprocessors, so that all GPUs give the same result. What a thread holds of
// these sums is as much as it holds of two rows (RMSNorm: of one); so only the rows that two loops need are kept beside
// them, and the weights and the gradient past the norm are loaded where they are used.
#pragma once

#include "layers/chunk.cuh"
#include "layers/column_sum.cuh"
#include "layers/early_launch.cuh"
#include "layers/layers.h"

#include <algorithm>
#include <bit>

namespace {

// How many columns a thread holds before another one shares the row. On the CPU device "registers" are the first-level
// cache, and each thread that takes part in a sum costs a switch of stacks, as much as 100 columns: there most rows are
// one thread's.
constexpr int kRowColumns = kOnCpu ? 2048 : 16;

}  // namespace

// Tests set it to 16, so that the CPU shares rows among threads as a GPU does.
inline int64_t norm_row_columns = kRowColumns;

namespace {

constexpr int kBlockRows = 4;
constexpr int kMaxRowThreads = 512;  // so that a thread may have 128 registers
static_assert(kMaxNormC == kMaxRowThreads * 16);

// Rows that a warp shares, where 16 columns a thread are not enough. Their number of threads is known to the compiler.
template <int kColumns>
constexpr bool kWarpRows = kColumns == 24 || kColumns == 32;
// __launch_bounds__ of kernels whose threads hold so many columns: threads, and blocks that share a multiprocessor. Up
// to 168 registers for 24 columns, 255 for 32.
template <int kColumns>
constexpr int kNormThreads = kWarpRows<kColumns> ? kBlockRows* kWarp : kMaxRowThreads;
template <int kColumns>
constexpr int kNormBlocks = !kWarpRows<kColumns> ? 1
                            : kColumns == 24     ? 3
                                                 : 2;
// Of the backward, whose blocks each leave a partial row: as many threads in one block, so that these are fewer.
template <int kColumns>
constexpr int kBackwardThreads = kNormThreads<kColumns>* kNormBlocks<kColumns>;

// How many columns of a row of C a thread of a GPU holds at most. Chunks of one column take any C, so rarely 768.
constexpr int thread_columns(int64_t C, bool single_columns) {
    return C <= 16 * kWarp || C > 32 * kWarp ? 16 : C <= 24 * kWarp && !single_columns ? 24 : 32;
}

struct NormGeometry {
    dim3 block;                // (threads a row, rows a block)
    int64_t n_blocks_forward;  // one block for every block.y rows
    dim3 backward_block;
    int64_t n_blocks_backward;  // = partial rows
    size_t backward_shared_bytes;
};

// chunk_columns: as in dispatch_rows(). Multiples of 8 are whole chunks in every dtype.
inline NormGeometry norm_geometry(const char* operation, int64_t N, int64_t C, int64_t chunk_columns) {
    check(C >= 1 && C <= kMaxNormC, operation, ": rows of ", C, " channels; between 1 and ", kMaxNormC,
          " are possible");
    int64_t threads = ceil_div(C, std::min<int64_t>(norm_row_columns, kRowColumns));
    if (threads > kWarp) threads = threads <= 2 * kWarp ? kWarp : round_up(threads, kWarp);
    else if (threads > 1)
        threads = std::max<int64_t>(8, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(threads))));
    const int64_t rows = threads <= kWarp ? kBlockRows : 1;
    // Of the backward as many blocks as the 132 multiprocessors of an H100 hold at a time: with 512 threads each, but
    // one block of those that hold more than 16 columns a thread. A block that sums over fewer than 32 rows (or 8,
    // where all its threads share a row) would write too much of what it reads.
    const int columns = threads == kWarp ? thread_columns(C, chunk_columns % 8 != 0) : 16;
    const int64_t backward_rows = columns == 24   ? kBackwardThreads<24> / kWarp
                                  : columns == 32 ? kBackwardThreads<32> / kWarp
                                                  : rows;
    const int64_t n_most = columns > 16 ? 132 : 132 * 512 / (threads * rows);
    const auto block = [&](int64_t y) { return dim3(static_cast<unsigned>(threads), static_cast<unsigned>(y)); };
    return {block(rows), ceil_div(N, rows), block(backward_rows), std::min(ceil_div(N, 8 * rows), n_most),
            rows > 1 ? static_cast<size_t>(backward_rows * C) * sizeof(float) : 0};
}

// dispatch_chunks() for kernels whose threads hold up to kColumns columns of a row of C, in chunks of n.
template <class T, int kN, int kColumns_>
struct NormRow {
    using Element = T;
    static constexpr int n = kN, kColumns = kColumns_;
};
template <class F>
void dispatch_rows(DType dtype, int64_t C, int64_t chunk_columns, F&& f) {
    dispatch_chunks(dtype, chunk_columns, [&](auto chunk) {
        using T = typename decltype(chunk)::Element;
        constexpr int n = decltype(chunk)::n;
        if constexpr (kOnCpu) {
            f(NormRow<T, n, kRowColumns>{});
        } else {
            const int columns = thread_columns(C, n == 1);
            if (columns == 16) f(NormRow<T, n, 16>{});
            if (columns == 32) f(NormRow<T, n, 32>{});
            if constexpr (n > 1)
                if (columns == 24) f(NormRow<T, n, 24>{});
        }
    });
}

// The first column of this thread's chunk k of K.
template <int K, int n>
__device__ __forceinline__ int chunk_column(int k) {
    unsigned threads = kWarpRows<K * n> ? kWarp : blockDim.x;
    if constexpr (n == 1) threads = not_hoisted(threads);  // 16 first columns do not fit into the registers
    return static_cast<int>((static_cast<unsigned>(k) * threads + threadIdx.x) * n);
}
// How many of its K chunks of a row the loops go through. On a GPU always all: unrolled, so every chunk has its
// registers.
template <int K, int n>
__device__ __forceinline__ int row_chunks(int C) {
    if constexpr (!kOnCpu) return K;
    return static_cast<int>((static_cast<unsigned>(C + n - 1) / n + blockDim.x - 1 - threadIdx.x) / blockDim.x);
}

// How many columns of a chunk load_chunk and store_chunk find. On a GPU rows are whole chunks (dispatch_chunks).
template <int n>
__device__ __forceinline__ int n_left(int left) {
    return kOnCpu ? left : n;
}

// A thread's share of a row of C columns is float[K][n]. Behind the row's end it is zero: that adds nothing to a sum. A
// row behind the last one has C = 0: its threads take part, because the other rows of their warp need all lanes for
// their sums.
template <int n, class T>
__device__ __forceinline__ void load_columns(float (&x)[n], const T* row, int c, int C) {
    if (c < C) load_chunk(x, row + c, n_left<n>(C - c));
    else
        for (int i = 0; i < n; ++i) x[i] = 0.0f;
}
// Asks for a thread's columns of a weight while the launch that makes the rows has not ended (early_launch.cuh). With
// many rows the first ones have brought it to the caches.
template <int K, int n, class T>
__device__ __forceinline__ void prefetch_columns(const T* weight, int C, int64_t N) {
    if (kOnCpu || N > 16) return;
    for (int k = 0; k < K; ++k)
        if (chunk_column<K, n>(k) < C) prefetch_to_cache(weight + chunk_column<K, n>(k));
}
// All loads are under way before the first is waited for.
template <int K, int n, class T>
__device__ __forceinline__ void load_row(float (&x)[K][n], const T* row, int C) {
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(C); ++k) load_columns(x[k], row, chunk_column<K, n>(k), C);
}
template <int K, int n>
__device__ __forceinline__ void zero_row(float (&x)[K][n], int C) {
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(C); ++k)
        for (int i = 0; i < n; ++i) x[k][i] = 0.0f;
}
template <int K, int n, class T>
__device__ __forceinline__ void store_row(T* row, const float (&x)[K][n], int C) {
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(C); ++k) {
        const int c = chunk_column<K, n>(k);
        if (c < C) store_chunk(row + c, x[k], n_left<n>(C - c));
    }
}
// x += branch, rounded as the sum is stored.
template <class T, int K, int n>
__device__ __forceinline__ void add_branch(float (&x)[K][n], T* sum, const T* branch, int C) {
    float b[K][n];
    load_row(b, branch, C);
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(C); ++k)
        for (int i = 0; i < n; ++i) x[k][i] = to_float(from_float<T>(x[k][i] + b[k][i]));
    store_row(sum, x, C);
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
template <int K, int n>
__device__ __forceinline__ void store_partial(float* partial, const float (&sums)[K][n], float* shared, int C) {
    store_row(blockDim.y == 1 ? partial : shared + threadIdx.y * C, sums, C);
    if (blockDim.y == 1) return;
    __syncthreads();  // every row of threads has put its sums into `shared`
    for (int64_t c = threadIdx.y * blockDim.x + threadIdx.x; c < C; c += blockDim.x * blockDim.y) {
        float sum = shared[c];
        for (int y = 1; y < static_cast<int>(blockDim.y); ++y) sum += shared[y * C + c];
        partial[c] = sum;
    }
}

}  // namespace
