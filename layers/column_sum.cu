// Column sums: the gradient of a bias, and the last step in the gradient of a norm's scale.
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
// blocks each sum a chunk of rows into one partial row; then the partial rows are summed. No atomics: every sum has a
// fixed order, chunk by chunk, and the chunks depend on N and C only. So the result has the same bits on every run and
// every machine.
//
//        inp (N, C)                    partial (R, C) f32               dparam (C)
//     chunk 0  ████████  --sum-->      ████████  ─┐
//     chunk 1  ████████  --sum-->      ████████   ├─ sum, += -->        ████████
//     chunk 2  ████████  --sum-->      ████████  ─┘
#include "layers/chunk.cuh"
#include "layers/layers.h"
#include "layers/norm.cuh"

#include <algorithm>

namespace {

constexpr int kColumnBlock = 128;    // threads of stage 1: neighbours read neighbouring chunks of columns
constexpr int64_t kRowsAThread = 8;  // stage 2: partial rows that one thread adds up, at least

// Chunks have 64 rows, or more, so that there are at most about a million partial sums, each of which is written and
// read once.
int64_t n_chunks(int64_t N, int64_t C) {
    return std::min(ceil_div(N, 64), std::max<int64_t>(32, (int64_t{1} << 20) / std::max<int64_t>(C, 1)));
}

// Stage 1. Block (chunk, columns); one thread sums the n columns of a chunk over chunk_rows rows.
template <class T, int n>
__global__ void column_sum_kernel(float* partial, const T* inp, int64_t N, int64_t C, int64_t chunk_rows) {
    const int64_t c = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
    if (c >= C) return;
    const int64_t first = blockIdx.x * chunk_rows, last = min(first + chunk_rows, N);
    float sum[n] = {}, x[n];
#pragma unroll 8
    for (int64_t row = first; row < last; ++row) {
        load_chunk(x, inp + row * C + c, C - c);
        for (int l = 0; l < n; ++l) sum[l] += x[l];
    }
    store_chunk(partial + blockIdx.x * C + c, sum, C - c);
}

// Stage 2. Block (columns, parameter): the sums of a second parameter, where there is one, are the second half of
// partial. A block has 32 columns (threadIdx.x); its warps (threadIdx.y) share the R partial rows: warp y takes the
// rows y, y + blockDim.y, ... A few partial rows are summed by one warp, without a barrier.
template <class T>
__global__ void add_column_sums_kernel(T* dparam, T* second, const float* partial, int64_t R, int64_t C,
                                       bool accumulate) {
    float(*sums)[kWarp] = dynamic_shared<float[kWarp]>();  // (blockDim.y, 32), not used by a single warp
    const int64_t c = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
    if (blockIdx.y == 1) dparam = second, partial += R * C;
    float sum = 0.0f;
    if (c < C)
        for (int64_t row = threadIdx.y; row < R; row += blockDim.y) sum += partial[row * C + c];
    if (blockDim.y > 1) {
        sums[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();  // every warp's sums are in shared memory; the first warp adds them up
        if (threadIdx.y > 0) return;
        for (int y = 1; y < static_cast<int>(blockDim.y); ++y) sum += sums[y][threadIdx.x];
    }
    if (c < C) dparam[c] = from_float<T>(accumulate ? to_float(dparam[c]) + sum : sum);
}

// partial: (R, C), and as much for the second parameter.
void add_sums(Tensor dparam, Tensor second, Tensor partial, int64_t R, int64_t C, bool accumulate,
              cudaStream_t stream) {
    if (R == 0) return zero_unless(accumulate, dparam, stream), zero_unless(accumulate, second, stream);
    if (C == 0) return;
    const unsigned n_warps = static_cast<unsigned>(std::min<int64_t>(ceil_div(R, kRowsAThread), 32));
    const size_t shared_bytes = n_warps > 1 ? n_warps * kWarp * sizeof(float) : 0;
    const dim3 grid(static_cast<unsigned>(ceil_div(C, kWarp)), second ? 2 : 1);
    dispatch(dparam.dtype, [&](auto zero) {
        using T = decltype(zero);
        add_column_sums_kernel<T><<<grid, dim3(kWarp, n_warps), shared_bytes, stream>>>(
            dparam.ptr<T>(), second ? second.ptr<T>() : nullptr, partial.ptr<float>(), R, C, accumulate);
    });
    launched("add_column_sums_kernel", {.reads = bytes_of(partial) + (accumulate ? bytes_of(dparam, second) : 0),
                                        .writes = bytes_of(dparam, second),
                                        .scratch = bytes_of(partial),
                                        .flops = static_cast<double>(partial.n())});
}

}  // namespace

void add_column_sums(Tensor dparam, Tensor partial, bool accumulate, cudaStream_t stream) {
    expect("add_column_sums", "partial", partial, DType::f32, {-1, -1});
    expect("add_column_sums", "dparam", dparam, dparam.dtype, {partial.shape[1]});
    add_sums(dparam, {}, partial, partial.shape[0], partial.shape[1], accumulate, stream);
}
void add_column_sums(Tensor dparam, Tensor second, Tensor partial, bool accumulate, cudaStream_t stream) {
    expect("add_column_sums", "partial", partial, DType::f32, {2, -1, -1});
    expect("add_column_sums", "dparam", dparam, dparam.dtype, {partial.shape[2]});
    expect("add_column_sums", "second", second, dparam.dtype, {partial.shape[2]});
    add_sums(dparam, second, partial, partial.shape[1], partial.shape[2], accumulate, stream);
}

void column_sum(Tensor dparam, Tensor inp, bool accumulate, Tensor scratch, cudaStream_t stream) {
    expect("column_sum", "inp", inp, inp.dtype, {-1, -1});
    const int64_t N = inp.shape[0], C = inp.shape[1];
    expect("column_sum", "dparam", dparam, dparam.dtype == DType::f32 ? DType::f32 : inp.dtype, {C});
    expect_aligned("column_sum", {{"inp", inp}});
    if (N == 0) return zero_unless(accumulate, dparam, stream);
    if (C == 0) return;
    const int64_t chunk_rows = ceil_div(N, n_chunks(N, C)), R = ceil_div(N, chunk_rows);
    const Tensor partial = scratch_as("column_sum", scratch, {R, C});
    dispatch_chunks(inp.dtype, C, [&](auto zero) {
        using Chunk = decltype(zero);
        using T = typename Chunk::Element;
        const dim3 grid(static_cast<unsigned>(R), static_cast<unsigned>(ceil_div(C, kColumnBlock * Chunk::n)));
        column_sum_kernel<T, Chunk::n>
            <<<grid, kColumnBlock, 0, stream>>>(partial.ptr<float>(), inp.ptr<T>(), N, C, chunk_rows);
    });
    launched("column_sum_kernel", {.reads = bytes_of(inp),
                                   .writes = bytes_of(partial),
                                   .scratch = bytes_of(partial),
                                   .flops = static_cast<double>(N * C)});
    add_column_sums(dparam, partial, accumulate, stream);
}

int64_t column_sum_scratch_n(int64_t N, int64_t C) { return n_chunks(N, C) * C; }
