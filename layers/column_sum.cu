// Column sums: the gradient of a bias, where the product that reads dy does not form it (linear.cu). The kernels of the
// norms end with the second of its two stages: the gradient of a scale.
//
//   y[n, c] = ... + b[c]      so      db[c] = sum over the N rows of dy[n, c]
//
// As plain loops:
//
//   for c < C:
//       sum = 0;  for n < N:  sum += dy[n][c]
//       db[c] += sum                 (the first micro-batch of a step: =)
//
// The rows are many and the columns few, so one thread per column would leave most of a GPU idle. Two stages: many
// blocks each sum a chunk of rows into one partial row; then the last blocks to end sum the partial rows
// (column_sum.cuh). No atomics on floats: every sum has a fixed order, chunk by chunk, and the chunks depend on N and C
// only. So the result has the same bits on every run and every machine.
//
//        inp (N, C)                    partial (R, C) f32               dparam (C)
//     chunk 0  ████████  --sum-->      ████████  ─┐
//     chunk 1  ████████  --sum-->      ████████   ├─ sum, += -->        ████████
//     chunk 2  ████████  --sum-->      ████████  ─┘
#include "layers/chunk.cuh"
#include "layers/column_sum.cuh"
#include "layers/layers.h"

#include <algorithm>

namespace {

constexpr int kColumnBlock = 128;  // threads: neighbours read neighbouring chunks of columns

// Chunks have 64 rows, or more, so that there are at most about a million partial sums (or 32 rows of them), each of
// which is written and read once.
int64_t n_chunks(int64_t N, int64_t C) {
    return std::min(ceil_div(N, 64), std::max<int64_t>(32, (int64_t{1} << 20) / std::max<int64_t>(C, 1)));
}

// Block (chunk of rows, range of columns); one thread sums n neighbouring columns over the chunk_rows rows.
template <class T, int n>
__global__ void column_sum_kernel(ColumnSums param, const T* inp, int64_t N, int64_t C, int64_t chunk_rows) {
    const int64_t begin = static_cast<int64_t>(blockIdx.y) * kColumnBlock * n, c = begin + threadIdx.x * n;
    if (c < C) {
        const int64_t first = blockIdx.x * chunk_rows, last = min(first + chunk_rows, N);
        float sum[n] = {}, x[n];
#pragma unroll 8
        for (int64_t row = first; row < last; ++row) {
            load_chunk(x, inp + row * C + c, C - c);
            for (int l = 0; l < n; ++l) sum[l] += x[l];
        }
        store_chunk(param.partial + blockIdx.x * C + c, sum, C - c);
    }
    finish_column_sums<n>(param, blockIdx.x, gridDim.x, C, begin, min(begin + kColumnBlock * n, C),
                          param.arrivals + blockIdx.y * (param.G + 1));
}

}  // namespace

void column_sum(Tensor dparam, Tensor inp, bool accumulate, Tensor scratch, cudaStream_t stream) {
    const char* name = "column_sum";
    expect(name, "inp", inp, inp.dtype, {-1, -1});
    const int64_t N = inp.shape[0], C = inp.shape[1];
    expect(name, "dparam", dparam, dparam.dtype == DType::f32 || inp.dtype == DType::f32 ? dparam.dtype : inp.dtype,
           {C});
    expect_aligned(name, {{"dparam", dparam}, {"inp", inp}});
    if (N == 0) return zero_unless(accumulate, dparam, stream);
    if (C == 0) return;
    const int64_t chunk_rows = ceil_div(N, n_chunks(N, C)), R = ceil_div(N, chunk_rows);
    const Tensor partial = scratch_as(name, scratch, {R, C});
    LaunchCost cost = {.reads = bytes_of(inp), .flops = static_cast<double>(N * C)};
    dispatch_chunks(inp.dtype, C, [&](auto zero) {
        using Chunk = decltype(zero);
        using T = typename Chunk::Element;
        const int64_t n_ranges = ceil_div(C, kColumnBlock * Chunk::n);
        const dim3 grid(static_cast<unsigned>(R), static_cast<unsigned>(n_ranges));
        const ColumnSums param = column_sums(name, partial, dparam, {}, accumulate, n_ranges);
        column_sum_kernel<T, Chunk::n><<<grid, kColumnBlock, 0, stream>>>(param, inp.ptr<T>(), N, C, chunk_rows);
        add_cost_of_sums(cost, partial, dparam, {}, accumulate, n_ranges);
    });
    launched("column_sum_kernel", cost);
}

int64_t column_sum_scratch_n(int64_t N, int64_t C) { return n_chunks(N, C) * C; }
