// layers/kept_rows.cuh: rows that are read twice by a kernel, once from memory: where they wait in between.
//
// Cross-entropy needs the maximum and the sum of a row before it can compute the first gradient, and then the row
// again. A row of GPT-2's logits is 50304 bf16 numbers, 100 KB. Of an H100:
//
//   second-level cache    50 MB. Blocks of 256 threads, eight a multiprocessor, have 8 x 132 rows of 100 KB under way,
//                         106 MB: the second read comes from memory, too, and 3 numbers move instead of 2.
//   registers             256 KB a multiprocessor: one row of 100 KB, with what computing needs; and nothing is loaded
//                         while that row is stored.
//   shared memory         228 KB a multiprocessor, 227 of them for one block at most: two rows. One is loaded while the
//                         other one is stored.
//
// So a row waits in shared memory. A thread has 208 bytes of it (13 chunks of 16), so that 1024 threads share a
// multiprocessor whatever the row's length is: rows up to 6.5 KB by a warp each, GPT-2's by 512 threads. Copies go
// there without passing through registers, eight chunks ahead of the one that is computed with: 128 KB under way a
// multiprocessor, where 3 TB/s of 132 of them need 23 KB in each microsecond that memory takes to answer.
//
// A row longer than a block's shared memory (LLaMA-3's: 128256 bf16, 250 KB) leaves its end in memory: with one block a
// multiprocessor, 132 ends of 23 KB stay in the second-level cache. Only ends of more than 190 KB (the same row in
// float32: 274 KB) are read from memory again. An A100 has 164 KB a multiprocessor: one row of GPT-2's at a time.
//
// The CPU device keeps nothing: one thread has a row, and a core's second-level cache has it until it is read again.
#pragma once

#include "layers/chunk.cuh"
#include "layers/ptx.cuh"

#include <algorithm>

// Bytes of shared memory for each thread; 0: rows are read twice. Tests set it, so that the CPU does what a GPU does.
inline int64_t kept_bytes_of_thread = kOnCpu ? 0 : 208;

namespace {

constexpr int kMostRowThreads = 1024;  // so that a thread may have 64 registers

struct KeptRows {
    RowTeams teams;
    int kept_n;           // columns of a row that are kept, from the first one on
    size_t shared_bytes;  // of a block
    bool asks_for_more;   // than the 48 KB that a kernel's launches may have, static_bytes among them
    int64_t again_bytes;  // of all rows: what a GPU reads from memory a second time
};

// Rows of row_n elements of T, of which the first V are read twice, in chunks of chunk_n. static_bytes: of a block's
// shared memory that has another use.
inline KeptRows kept_rows(int64_t n_rows, int64_t V, int64_t row_n, int64_t element_bytes, int chunk_n,
                          int64_t static_bytes) {
    constexpr int64_t kMultiprocessors = 132, kCacheBytes = 25 << 20;  // half of an H100's: the other half is written
    const int64_t most_n = (device().block_shared_bytes - static_bytes) / element_bytes / chunk_n * chunk_n;
    const int64_t kept_n = std::min({row_n, round_up(V, chunk_n), most_n}),
                  end_bytes = std::max<int64_t>(0, V - kept_n) * element_bytes;
    const int64_t again_bytes = end_bytes * kMultiprocessors > kCacheBytes ? n_rows * end_bytes : 0;
    if (kept_bytes_of_thread == 0 || V <= kShortRow) return {row_teams(n_rows, V, chunk_n), 0, 0, false, again_bytes};

    const int64_t wanted = round_up(ceil_div(kept_n * element_bytes, kept_bytes_of_thread), kWarp);
    const int64_t x = std::min<int64_t>(wanted, kMostRowThreads), y = x == kWarp ? 256 / kWarp : 1,
                  shared_bytes = y * kept_n * element_bytes;
    return {
        {dim3(static_cast<unsigned>(ceil_div(n_rows, y))), dim3(static_cast<unsigned>(x), static_cast<unsigned>(y))},
        static_cast<int>(kept_n),
        static_cast<size_t>(shared_bytes),
        shared_bytes + static_bytes > 48 << 10,
        again_bytes};
}

// The way of one thread through a row: its chunks are those at first, first + stride, ... What it copies to shared
// memory it reads itself, so that no barrier is needed.
template <int n, class T>
struct KeptRow {
    const T* row;
    T* kept;
    int kept_n, row_n, stride;
    static constexpr int kAhead = 8;

    __device__ __forceinline__ void start_copy(int i) const {
        if constexpr (kPacked<T, n>) {  // rows are whole chunks then, and what is kept of them, too
            if (i < kept_n) cp_async_16(kept + i, row + i);
            cp_async_commit();  // a group for each chunk, also where there is nothing to copy: groups are counted
        }
    }
    // Before the first chunk is loaded.
    __device__ __forceinline__ void start(int first) const {
        for (int k = 0; k < kAhead; ++k) start_copy(first + k * stride);
    }
    // The first time, in this order.
    __device__ __forceinline__ void load(float (&x)[n], int i) const {
        if constexpr (kPacked<T, n>) {
            start_copy(i + kAhead * stride);
            cp_async_wait<kAhead>();
            load_again(x, i);
        } else {
            load_chunk(x, row + i, row_n - i);
            if (i < kept_n) store_chunk(kept + i, x, kept_n - i);
        }
    }
    __device__ __forceinline__ void load_again(float (&x)[n], int i) const {
        if (i < kept_n) load_chunk(x, kept + i, kept_n - i);
        else load_chunk(x, row + i, row_n - i);
    }
};

}  // namespace
