// layers/column_sum.cuh: the end of kernels whose blocks have each summed the same columns over rows of their own.
//
// Block b leaves its sums in device memory, as row b of R partial rows. The last blocks to end add these up, in two
// steps, so that none of them has much to add: the last block of each of G groups (block b is of group b % G) adds up
// the group's rows, and the last of the groups adds up their sums:
//
//     partial rows      0  1  2  ... 19                   R = 20, G = 3
//     groups            0 + 3 + ... 18 -> 0     1 + 4 + ... 19 -> 1     2 + 5 + ... 17 -> 2
//     the parameter     0 + 1 + 2
//
// The order of all additions depends on R alone. (As a launch of its own each of these sums took 7 us on an H100, and
// the two norms of a block of GPT-2 have one each.)
#pragma once

#include "layers/chunk.cuh"

#include <algorithm>

namespace {

// What a kernel needs to know of them: of one parameter's sums, or of two.
struct ColumnSums {
    float* partial;        // (parameters, R, C)
    unsigned* arrivals;    // G + 1 counters for each range of columns that is summed by itself
    void *param, *second;  // (C) each; the second may be null
    DType dtype;           // theirs: f32, bf16 or f16
    bool accumulate;
    int G;
};

constexpr int64_t kRowsAGroup = 8, kMostGroups = 32;  // partial rows of a group: at most 8 of up to 256
inline int column_sum_groups(int64_t R) { return static_cast<int>(std::min(ceil_div(R, kRowsAGroup), kMostGroups)); }

// partial: (R, C), or (2, R, C) with a second parameter.
inline ColumnSums column_sums(const char* name, Tensor partial, Tensor param, Tensor second, bool accumulate,
                              int64_t n_ranges = 1) {
    ColumnSums sums{.partial = partial.ptr<float>(),
                    .arrivals = device().arrivals,
                    .param = nullptr,
                    .second = nullptr,
                    .dtype = param.dtype,
                    .accumulate = accumulate,
                    .G = column_sum_groups(partial.shape[partial.ndim - 2])};
    check(n_ranges * (sums.G + 1) <= kArrivals, name, ": ", partial.cols(), " columns are too many to be summed");
    dispatch(param.dtype, [&](auto zero) {
        sums.param = param.ptr<decltype(zero)>();
        if (second) sums.second = second.ptr<decltype(zero)>();
    });
    return sums;
}
// What a launch that ends like this costs more than one that leaves its partial rows.
inline void add_cost_of_sums(LaunchCost& cost, Tensor partial, Tensor param, Tensor second, bool accumulate,
                             int64_t n_ranges = 1) {
    const int G = column_sum_groups(partial.shape[partial.ndim - 2]);
    const int64_t counters = n_ranges * (G + 1) * static_cast<int64_t>(sizeof(unsigned));
    cost.reads += bytes_of(partial) + counters + (accumulate ? bytes_of(param, second) : 0);
    cost.writes += bytes_of(partial) + counters + bytes_of(param, second);
    cost.scratch += 2 * bytes_of(partial);
    cost.flops += static_cast<double>(partial.n());
}

// row 0 + row `step` + row 2 step + ..., of rows of C numbers, from `first` on and before `end`: the columns of a
// chunk.
template <int n>
__device__ __forceinline__ void sum_rows(float (&sum)[n], const float* first, const float* end, int64_t step,
                                         int64_t n_left) {
    for (int l = 0; l < n; ++l) sum[l] = 0.0f;
#pragma unroll 8
    for (const float* row = first; row < end; row += step) {
        float x[n];
        load_chunk(x, row, n_left);
        for (int l = 0; l < n; ++l) sum[l] += x[l];
    }
}

// All threads of block number `own` of R, whose partial row is in device memory. It has the columns from `first` on,
// before `end`, in chunks of kChunkOfRow.
template <int kChunkOfRow>
__device__ __forceinline__ void finish_column_sums(const ColumnSums& to, int64_t own, int64_t R, int64_t C,
                                                   int64_t first, int64_t end, unsigned* arrivals) {
    constexpr int n = kOnCpu || kChunkOfRow < 4 ? kChunkOfRow : 4;  // columns of a thread: four are one load of float32
    const int64_t group = own % to.G;
    const int n_chunks = static_cast<int>((end - first + n - 1) / n), n_all = (to.second ? 2 : 1) * n_chunks;
    const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x),
              n_threads = static_cast<int>(blockDim.x * blockDim.y);
    float sum[n];
    if (!is_last_block(&arrivals[group], static_cast<unsigned>((R - group + to.G - 1) / to.G))) return;
    for (int i = thread; i < n_all; i += n_threads) {
        float* const rows = to.partial + (i >= n_chunks ? R * C : 0);
        const int64_t c = first + i % n_chunks * n;
        sum_rows(sum, rows + group * C + c, rows + R * C, to.G * C, end - c);
        store_chunk(rows + group * C + c, sum, end - c);
    }
    if (!is_last_block(&arrivals[to.G], static_cast<unsigned>(to.G))) return;
    const auto add_to = [&](auto* param, int64_t n_left) {
        float old[n] = {};
        if (to.accumulate) load_chunk(old, param, n_left);
        for (int l = 0; l < n; ++l) sum[l] += old[l];
        store_chunk(param, sum, n_left);
    };
    for (int i = thread; i < n_all; i += n_threads) {
        const bool is_second = i >= n_chunks;
        const float* const rows = to.partial + (is_second ? R * C : 0);
        void* const param = is_second ? to.second : to.param;
        const int64_t c = first + i % n_chunks * n;
        sum_rows(sum, rows + c, rows + to.G * C, C, end - c);
        if (to.dtype == DType::f32) add_to(static_cast<float*>(param) + c, end - c);
        else if (to.dtype == DType::bf16) add_to(static_cast<__nv_bfloat16*>(param) + c, end - c);
        else add_to(static_cast<__half*>(param) + c, end - c);
    }
}

}  // namespace
