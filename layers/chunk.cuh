// layers/chunk.cuh: the neighbouring elements that one thread handles at a time, and the threads that share a row.
//
// A thread moves a chunk of a row at once. How large a chunk should be is where the two devices differ:
//
//   GPU    16 bytes: 4 floats or 8 16-bit numbers. One load instruction then moves 512 bytes a warp. Its addresses must
//          be multiples of 16, so every row must be whole chunks long; other rows go one element at a time (n = 1).
//   CPU    32 elements, at any address: g++ turns the loops over a chunk into vector instructions. (It unrolls loops of
//          up to 16 rounds before they are vectorised, and most of them stay scalar: 32 is four times faster than 16.)
//
// -DGPU_CHUNKS makes the CPU device take the GPU's choices, so that the tests run the GPU's code without a GPU (make
// gpu-choices).
//
// In registers a chunk is float x[n]. Loops over it have a constant bound and no branches.
#pragma once

#include "core/kernel.cuh"
#include "layers/layers.h"

#include <algorithm>

namespace {

#if defined(CUDA_ON_CPU) && !defined(GPU_CHUNKS)
constexpr bool kOnCpu = true;
#else
constexpr bool kOnCpu = false;
#endif
template <class T>
constexpr int kChunk = kOnCpu ? 32 : Packed<T>::n;
// True if a chunk of n elements is moved as whole 16-byte packs.
template <class T, int n>
constexpr bool kPacked = !kOnCpu && n % Packed<T>::n == 0;

// The elements [0, n) of a row from `from` on. Those in front of n_left lie inside the row; the others, all of them if
// n_left <= 0, become 0.
template <int n, class T>
__device__ __forceinline__ void load_chunk(float (&x)[n], const T* from, int64_t n_left) {
    if (n_left < n) {            // the end of a row: only what is there
        if constexpr (kOnCpu) {  // without a branch in the loops: g++ vectorises them
            for (int l = 0; l < n; ++l) x[l] = 0.0f;
            for (int l = 0; l < static_cast<int>(n_left); ++l) x[l] = to_float(from[l]);
        } else {
            for (int l = 0; l < n; ++l) x[l] = l < n_left ? to_float(from[l]) : 0.0f;
        }
    } else if constexpr (kPacked<T, n>) {
        for (int l = 0; l < n; l += Packed<T>::n) {
            const Packed<T> pack = load_packed(from + l);
            for (int i = 0; i < Packed<T>::n; ++i) x[l + i] = to_float(pack.v[i]);
        }
    } else {
#ifdef CUDA_ON_CPU
#pragma GCC unroll 1  // g++ would unroll the loop over 16 floats, which are one vector, and load them one by one
#endif
        for (int l = 0; l < n; ++l) x[l] = to_float(from[l]);
    }
}

// Rounds x to T and writes those of its elements that lie inside the row.
template <int n, class T>
__device__ __forceinline__ void store_chunk(T* to, const float (&x)[n], int64_t n_left) {
    if (n_left < n) {
        if constexpr (kOnCpu) {
            for (int l = 0; l < static_cast<int>(n_left); ++l) to[l] = from_float<T>(x[l]);
        } else {
            for (int l = 0; l < n; ++l)
                if (l < n_left) to[l] = from_float<T>(x[l]);
        }
    } else if constexpr (kPacked<T, n>) {
        for (int l = 0; l < n; l += Packed<T>::n) {
            Packed<T> pack;
            for (int i = 0; i < Packed<T>::n; ++i) pack.v[i] = from_float<T>(x[l + i]);
            store_packed(to + l, pack);
        }
    } else {
#ifdef CUDA_ON_CPU
#pragma GCC unroll 1  // as in load_chunk
#endif
        for (int l = 0; l < n; ++l) to[l] = from_float<T>(x[l]);
    }
}

template <int n, class T>
__device__ __forceinline__ void store_zeros(T* to, int64_t n_left) {
    const float zeros[n] = {};
    store_chunk(to, zeros, n_left);
}

// The bits themselves, for kernels that only move elements.
template <int n, class T>
__device__ __forceinline__ void copy_chunk(T* to, const T* from, int64_t n_left) {
    if (n_left < n) {
        for (int l = 0; l < n; ++l)
            if (l < n_left) to[l] = from[l];
    } else if constexpr (kPacked<T, n>) {
        store_packed(to, load_packed(from));
    } else {
        for (int l = 0; l < n; ++l) to[l] = from[l];
    }
}

// The n elements of a chunk become one: x_l + x_{l + n/2} for l < n/2, then the same with half as many, log2(n) times.
template <class Operation, int n>
__device__ __forceinline__ float fold_chunk(const float (&x)[n]) {
    if constexpr (n == 1) {
        return x[0];
    } else {
        float half[n / 2];
#ifdef CUDA_ON_CPU
#pragma GCC unroll 1  // as in load_chunk
#endif
        for (int l = 0; l < n / 2; ++l) half[l] = Operation::of(x[l], x[l + n / 2]);
        return fold_chunk<Operation>(half);
    }
}

// dispatch() for kernels that are templates over T and the size of their chunks, rows of row_n elements each:
//     dispatch_chunks(out.dtype, F, [&](auto chunk) { ... decltype(chunk)::Element ... decltype(chunk)::n ... });
template <class T, int kN>
struct Chunk {
    using Element = T;
    static constexpr int n = kN;
};
template <class F>
void dispatch_chunks(DType dtype, int64_t row_n, F&& f) {
    dispatch(dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (kOnCpu) {
            f(Chunk<T, kChunk<T>>{});
        } else if (row_n % kChunk<T> == 0) {
            f(Chunk<T, kChunk<T>>{});
        } else {
            f(Chunk<T, 1>{});
        }
    });
}

// What is read of logits whose first V columns are tokens, in chunks of kN.
template <class T, int kN>
int64_t bytes_of_tokens(const Tensor& logits, int64_t V) {
    return logits.shape[0] * std::min(round_up(V, kN), logits.shape[1]) * static_cast<int64_t>(sizeof(T));
}

// Nothing is to be added to this gradient of a parameter: where it does not accumulate, it is 0.
inline void zero_unless(bool accumulate, const Tensor& gradient, cudaStream_t stream) {
    if (!accumulate && gradient.n() > 0) set_to_zero(gradient, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches over heads: (B, T, heads, chunks of a head). Block (t, b, group of heads); in it threadIdx.x is the chunk
// and threadIdx.y the head, so that no kernel divides to find out where it is.

// Checks that rows (B, T, columns) contain `heads`: `count` of D columns.
inline void expect_heads(const char* operation, const char* argument, const HeadColumns& heads, DType dtype, int64_t B,
                         int64_t T, int64_t count, int64_t D) {
    expect(operation, argument, heads.rows, dtype, {B, T, -1});
    check(heads.count == count && heads.D == D, operation, ": ", argument, " has ", heads.count, " heads of ", heads.D,
          " columns, expected ", count, " of ", D);
    const int64_t columns = heads.rows.shape[2], stride = heads.head_stride();
    check(heads.column >= 0 && stride >= D && heads.column + (count - 1) * stride + D <= columns, operation, ": ",
          argument, "'s ", count, " heads of ", D, " columns, ", stride, " apart, from column ", heads.column,
          " on, are not inside of ", columns, " columns");
}

// T rows that are two chunks of a sequence of whole_T tokens, in order.
inline void expect_chunks(const char* operation, const char* argument, const TokenChunks& chunks, int64_t T,
                          int64_t whole_T) {
    const int64_t length = chunks.length, first = chunks.first[0], second = chunks.first[1];
    check(length >= 0 && length <= T && first >= 0 && first + length <= second && second + T - length <= whole_T,
          operation, ": ", argument, ": ", length, " rows from token ", first, " on and ", T - length, " from token ",
          second, " on are not two chunks, one after the other, of ", whole_T, " tokens");
}

struct HeadLaunch {
    dim3 grid, block;
};
inline HeadLaunch head_launch(int64_t B, int64_t T, int64_t n_heads, int64_t n_chunks) {
    check(n_chunks <= 1024, "a head of ", n_chunks, " chunks does not fit in a block of threads");
    const int64_t y = std::min(n_heads, std::max<int64_t>(1, 256 / n_chunks)), z = ceil_div(n_heads, y);
    return {dim3(static_cast<unsigned>(T), static_cast<unsigned>(B), static_cast<unsigned>(z)),
            dim3(static_cast<unsigned>(n_chunks), static_cast<unsigned>(y))};
}

// ---------------------------------------------------------------------------------------------------------------------
// Reductions along rows. A team of blockDim.x threads shares a row, blockDim.y teams make a block:
//
//   blockDim = (1, 256)     a short row is one thread's work, without any barrier
//              (32, 8)      a warp a row: reductions are shuffles, the block has no barrier
//              (64.., 1)    a block a row, for vocabularies
//
// A row is short where one thread alone is faster than 32 that exchange results. On the CPU device an exchange switches
// between 32 fibers, which takes as long as some 500 exponentials; on a GPU it is five shuffles, and one thread a row
// would read uncoalesced.

constexpr int64_t kShortRow = kOnCpu ? 1024 : 16;

struct RowTeams {
    dim3 grid, block;
};
// A thread of a team gets some 32 chunks before the team grows beyond a warp.
inline RowTeams row_teams(int64_t n_rows, int64_t row_n, int chunk_n) {
    int64_t x = 1;
    if (row_n > kShortRow) x = std::min<int64_t>(256, round_up(ceil_div(row_n, 32 * chunk_n), kWarp));
    const int64_t y = x <= kWarp ? 256 / x : 1;
    return {dim3(static_cast<unsigned>(ceil_div(n_rows, y))), dim3(static_cast<unsigned>(x), static_cast<unsigned>(y))};
}
__device__ __forceinline__ int64_t team_row() { return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; }

// Every thread of the team takes part and gets the result. `scratch`: 32 floats of shared memory for each use; only
// teams that are a whole block (blockDim.y == 1) touch it, so teams of one block never meet there.
template <class Operation>
__device__ __forceinline__ float team_reduce(float value, float* scratch) {
    return blockDim.x == 1 ? value : block_reduce<Operation>(value, scratch);
}

}  // namespace
