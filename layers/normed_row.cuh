// layers/normed_row.cuh: the norm of one row, formed by every block of the kernel that reads it.
//
// Between two products of a step that decodes one token stands a norm. As a kernel of its own it takes some 2 us, most
// of it to start, to wait and to end: its row of a few KB is read in a fraction of that. So each block of the product
// forms the row for itself, in shared memory, while the weights that it has asked for are on their way:
//
//     x = inp  or  inp + branch, rounded to T        (one of the blocks writes it, as `sum`: the residual stream)
//     row = layernorm(x), or without a bias rmsnorm(x)
//
// All threads load, normalise and store; the sums are formed by as many threads as in layernorm_forward and
// rmsnorm_forward (norm.cuh), from the same columns, in the same order: so the bits are the same. The threads of a
// product have no registers left for the row, so between these steps it lies in shared memory, and so do the norm's
// weight and bias, which are asked for before all else: after the product's weights they would come last.
#pragma once

#include "layers/norm.cuh"
#include "layers/ptx.cuh"

namespace {

// What is normalised: C columns, a multiple of 8, summed by `threads` of the block's threads. bias: none for RMSNorm.
template <class T>
struct NormedRow {
    const T *inp, *branch, *weight, *bias;
    T* sum;
    float eps;
    int C, threads;
};
// It takes longer for all blocks to read a wider row than to launch a norm. (Rows up to this have at most 128 threads
// that form their sums: fewer than a block has.)
constexpr int64_t kMostNormedC = 2048;
template <class T>
size_t normed_row_bytes(int64_t C) {
    return static_cast<size_t>(3 * C) * sizeof(T);
}

// f(c) for the first columns c of packs of 8: all threads of the block share them.
template <class F>
__device__ __forceinline__ void for_packs(int C, F&& f) {
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x) * 8; c < C; c += static_cast<int>(blockDim.x) * 8) f(c);
}
// sum = add(sum, x - mean) for the x of each thread, and the sum over all threads, to all of them. What is 0 beyond the
// row is the distance, as in layernorm.cu, and not its square: nvcc rounds a square together with its addition only if
// nothing is between the two. `scratch`: 32 floats for each use.
template <class T, class F>
__device__ __forceinline__ float normed_row_sum(const T* row, const NormedRow<T>& norm, float mean, float* scratch,
                                                F&& add) {
    constexpr int n = kChunk<T>;
    const int thread = static_cast<int>(threadIdx.x), C = thread < norm.threads ? norm.C : 0;
    float sums[n] = {};
#pragma unroll 1
    for (int c = thread * n; c < C; c += norm.threads * n) {
        float x[n];
        load_chunk(x, row + c, n_left<n>(C - c));
        for (int i = 0; i < n; ++i) sums[i] = add(sums[i], c + i < C ? x[i] - mean : 0.0f);
    }
    const float sum = warp_sum(fold_chunk<Sum>(sums), min(norm.threads, kWarp));
    if (thread < norm.threads && thread % kWarp == 0) scratch[thread / kWarp] = sum;
    __syncthreads();  // every warp's part is in scratch
    float total = scratch[0];
    for (int w = 1; w < norm.threads / kWarp; ++w) total += scratch[w];
    return total;
}

// Asks for the norm's weight and bias: to be called first, by all threads. shared: of normed_row_bytes.
template <class T>
__device__ __forceinline__ void load_norm(T* shared, const NormedRow<T>& norm) {
    const int C = norm.C;
    for_packs(C, [&](int c) {
        cp_async_16(shared + C + c, norm.weight + c);
        if (norm.bias) cp_async_16(shared + 2 * C + c, norm.bias + c);
    });
    cp_async_commit();
}
// Waits for the kernel in front, and puts the row into the beginning of `shared`. Called by all threads.
template <class T>
__device__ __forceinline__ void normalise_row(T* shared, const NormedRow<T>& norm, bool stores_sum) {
    static_assert(Packed<T>::n == 8);
    __shared__ float scratch[2][kWarp];
    const int C = norm.C;
    T *const row = shared, *const weight = shared + C, *const bias = shared + 2 * C;
    wait_for_previous();
    for_packs(C, [&](int c) {
        Packed<T> x = load_packed(norm.inp + c);
        if (norm.branch) {
            const Packed<T> branch = load_packed(norm.branch + c);
            for (int i = 0; i < 8; ++i) x.v[i] = from_float<T>(to_float(x.v[i]) + to_float(branch.v[i]));
            if (stores_sum) store_packed(norm.sum + c, x);
        }
        store_packed(row + c, x);
    });
    __syncthreads();  // x is there
    const float columns = static_cast<float>(C);
    float mean = 0.0f;
    if (norm.bias)
        mean = normed_row_sum(row, norm, 0.0f, scratch[0], [](float sum, float x) { return sum + x; }) / columns;
    const float square = normed_row_sum(row, norm, mean, scratch[1], [](float sum, float d) { return sum + d * d; });
    const float rstd = 1.0f / sqrtf(square / columns + norm.eps);
    cp_async_wait<0>();  // for what this thread has asked for, which it alone reads
    for_packs(C, [&](int c) {
        Packed<T> x = load_packed(row + c);
        const Packed<T> g = load_packed(weight + c), b = norm.bias ? load_packed(bias + c) : Packed<T>{};
        for (int i = 0; i < 8; ++i) {
            const float centred = to_float(x.v[i]) - mean, scale = to_float(g.v[i]);
            x.v[i] = from_float<T>(norm.bias ? centred * rstd * scale + to_float(b.v[i]) : centred * (rstd * scale));
        }
        store_packed(row + c, x);
    });
    __syncthreads();  // the row is there
}

}  // namespace
