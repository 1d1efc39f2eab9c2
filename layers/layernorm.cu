// LayerNorm: every row to mean 0 and variance 1, then a learned scale and shift.
//                                                                    (Ba, Kiros & Hinton 2016, arXiv:1607.06450)
//
//   forward     x = inp  or  inp + branch  (the residual add before the norm, fused: it saves a pass over memory)
//               m = mean_c(x)          r = 1 / sqrt(mean_c((x - m)^2) + eps)
//               n = (x - m) r          y = n g + b
//
//   backward    db = sum over rows of dy
//               dg = sum over rows of dy n
//               with dn = dy g:
//               dx = r (dn - mean_c(dn) - n mean_c(dn n))
//               + dsum, the gradient that reaches x past the norm, along the residual stream
//
//               Why two means are subtracted: y does not change when a constant is added to x, or when x is multiplied
//               by a positive constant, so dx has no component along the all-ones vector and none along n.
//
// As plain loops, for each row:
//
//   m = sum(x) / C                                          for c < C:  dn[c] = dy[c] * g[c];  n[c] = (x[c] - m) * r
//   r = 1 / sqrt(sum((x - m)^2) / C + eps)                  p = sum(dn) / C;  q = sum(dn * n) / C
//   for c < C:  y[c] = (x[c] - m) * r * g[c] + b[c]         for c < C:  dx[c] = r * (dn[c] - p - n[c] * q) + dsum[c]
//
// The variance is summed from x - m, in a second pass over registers: mean(x^2) - m^2 would cancel for rows whose mean
// is large compared with their spread.
//
// Bytes: forward 2 rows read, 2 written (with branch); backward 3 read, 1 written. Memory is the limit, so each row is
// read once and kept in registers; norm.cuh says how. m and r are saved: 2 N floats.
//
// rmsnorm.cu is the same without means: read it first. Rows of more than 8192 channels do not fit.
#include "layers/early_launch.cuh"
#include "layers/layers.h"
#include "layers/norm.cuh"

namespace {

template <class T, int n, int kColumns>
__global__ void __launch_bounds__(kNormThreads<kColumns>, kNormBlocks<kColumns>)
    layernorm_forward_kernel(T* out, T* sum, float* mean, float* rstd, const T* inp, const T* branch,
                             const T* __restrict__ weight, const T* __restrict__ bias, int64_t N, int C, float eps) {
    constexpr int K = kColumns / n;
    let_next_start();
    prefetch_columns<K, n>(weight, C, N);
    prefetch_columns<K, n>(bias, C, N);
    wait_for_previous();
    __shared__ float scratch[2][kWarp];  // one for each sum: the first may still be read while the second is written
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int row_C = row < N ? C : 0;  // beyond the last row there is nothing to load or store
    float x[K][n];
    load_row(x, inp + row * C, row_C);
    if (branch) add_branch(x, sum + row * C, branch + row * C, row_C);
    float sums[n] = {}, squares[n] = {};
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(row_C); ++k)
        for (int i = 0; i < n; ++i) sums[i] += x[k][i];
    const float m = row_sum(sums, scratch[0]) / static_cast<float>(C);
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(row_C); ++k)
        for (int i = 0; i < n; ++i) {
            x[k][i] = chunk_column<K, n>(k) + i < C ? x[k][i] - m : 0.0f;
            squares[i] += x[k][i] * x[k][i];
        }
    const float r = 1.0f / sqrtf(row_sum(squares, scratch[1]) / static_cast<float>(C) + eps);
#pragma unroll
    for (int k = 0; k < row_chunks<K, n>(row_C); ++k) {
        float g[n], b[n];
        load_columns(g, weight, chunk_column<K, n>(k), row_C);
        load_columns(b, bias, chunk_column<K, n>(k), row_C);
        for (int i = 0; i < n; ++i) x[k][i] = x[k][i] * r * g[i] + b[i];
    }
    store_row(out + row * C, x, row_C);
    if (threadIdx.x == 0 && row < N) mean[row] = m, rstd[row] = r;
}

// The partial rows of `params`: the sums of dy n, and of dy, over this block's rows.
template <class T, int n, int kColumns>
__global__ void __launch_bounds__(kBackwardThreads<kColumns>, 1)
    layernorm_backward_kernel(T* dinp, ColumnSums params, const T* dout, const T* dsum, const T* inp,
                              const T* __restrict__ weight, const float* mean, const float* rstd, int64_t N, int C) {
    constexpr int K = kColumns / n;
    // One array for each of a row's two sums. A thread that writes to one has passed the barrier of the other, and all
    // threads have read the first before that barrier: so two arrays are enough for all rows.
    __shared__ float scratch[2][kWarp];
    float dweight[K][n], dbias[K][n];
    zero_row(dweight, C);
    zero_row(dbias, C);
    const unsigned stride = gridDim.x * blockDim.y;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < N; first += stride) {
        const int64_t row = first + threadIdx.y;
        const int row_C = row < N ? C : 0;
        float dy[K][n], x[K][n];
        load_row(dy, dout + row * C, row_C);
        load_row(x, inp + row * C, row_C);
        const float m = row < N ? mean[row] : 0.0f, r = row < N ? rstd[row] : 0.0f;
        float sums[n] = {}, dot[n] = {};
#pragma unroll
        for (int k = 0; k < row_chunks<K, n>(row_C); ++k) {
            float g[n];
            load_columns(g, weight, chunk_column<K, n>(k), row_C);
            for (int i = 0; i < n; ++i) {
                x[k][i] = (x[k][i] - m) * r;  // from here on the normalised row
                dbias[k][i] += dy[k][i];
                dweight[k][i] += dy[k][i] * x[k][i];
                dy[k][i] *= g[i];  // from here on the gradient of it
                sums[i] += dy[k][i];
                dot[i] += dy[k][i] * x[k][i];
            }
        }
        const float mean_dn = row_sum(sums, scratch[0]) / static_cast<float>(C);
        const float mean_dot = row_sum(dot, scratch[1]) / static_cast<float>(C);
#pragma unroll
        for (int k = 0; k < row_chunks<K, n>(row_C); ++k) {
            float past[n] = {};
            if (dsum) load_columns(past, dsum + row * C, chunk_column<K, n>(k), row_C);
            for (int i = 0; i < n; ++i) dy[k][i] = r * (dy[k][i] - mean_dn - x[k][i] * mean_dot) + past[i];
        }
        store_row(dinp + row * C, dy, row_C);
    }
    float* shared = dynamic_shared<float>();
    store_partial(params.partial + blockIdx.x * C, dweight, shared, C);
    if (blockDim.y > 1) __syncthreads();  // the first sums have been read out of shared memory
    store_partial(params.partial + (static_cast<int64_t>(gridDim.x) + blockIdx.x) * C, dbias, shared, C);
    finish_column_sums<n>(params, blockIdx.x, gridDim.x, C, 0, C, params.arrivals);
}

}  // namespace

void layernorm_forward(Tensor out, Tensor sum, Tensor mean, Tensor rstd, Tensor inp, Tensor branch, Tensor weight,
                       Tensor bias, float eps, cudaStream_t stream) {
    const char* name = "layernorm_forward";
    expect(name, "inp", inp, out.dtype, {-1, -1});
    const int64_t N = inp.shape[0], C = inp.shape[1];
    expect(name, "out", out, inp.dtype, {N, C});
    expect(name, "mean", mean, DType::f32, {N});
    expect(name, "rstd", rstd, DType::f32, {N});
    expect(name, "weight", weight, inp.dtype, {C});
    expect(name, "bias", bias, inp.dtype, {C});
    if (branch) {
        expect(name, "branch", branch, inp.dtype, {N, C});
        expect(name, "sum", sum, inp.dtype, {N, C});
    }
    expect_aligned(name,
                   {{"out", out}, {"sum", sum}, {"inp", inp}, {"branch", branch}, {"weight", weight}, {"bias", bias}});
    if (N == 0) return;
    const NormGeometry geometry = norm_geometry(name, N, C, C);
    const dim3 grid(static_cast<unsigned>(geometry.n_blocks_forward));
    dispatch_rows(inp.dtype, C, C, [&](auto zero) {
        using Row = decltype(zero);
        using T = typename Row::Element;
        EarlyLaunch(grid, geometry.block, 0, stream)(
            "layernorm_forward_kernel", layernorm_forward_kernel<T, Row::n, Row::kColumns>, out.ptr<T>(),
            branch ? sum.ptr<T>() : nullptr, mean.ptr<float>(), rstd.ptr<float>(), inp.ptr<T>(),
            branch.ptr_or_null<T>(), weight.ptr<T>(), bias.ptr<T>(), N, C, eps);
    });
    launched("layernorm_forward_kernel", {.reads = bytes_of(inp, branch, weight, bias),
                                          .writes = bytes_of(out, mean, rstd) + (branch ? bytes_of(sum) : 0),
                                          .flops = 8.0 * static_cast<double>(N * C)});
}

void layernorm_backward(Tensor dinp, Tensor dweight, Tensor dbias, Tensor dout, Tensor dsum, Tensor inp, Tensor weight,
                        Tensor mean, Tensor rstd, bool accumulate, Tensor scratch, cudaStream_t stream) {
    const char* name = "layernorm_backward";
    expect(name, "inp", inp, dinp.dtype, {-1, -1});
    const int64_t N = inp.shape[0], C = inp.shape[1];
    expect(name, "dinp", dinp, inp.dtype, {N, C});
    expect(name, "dout", dout, inp.dtype, {N, C});
    if (dsum) expect(name, "dsum", dsum, inp.dtype, {N, C});
    expect(name, "weight", weight, inp.dtype, {C});
    expect(name, "dweight", dweight, dweight.dtype == DType::f32 ? DType::f32 : inp.dtype, {C});
    expect(name, "dbias", dbias, dweight.dtype, {C});
    expect(name, "mean", mean, DType::f32, {N});
    expect(name, "rstd", rstd, DType::f32, {N});
    expect_aligned(name, {{"dinp", dinp},
                          {"dweight", dweight},
                          {"dbias", dbias},
                          {"dout", dout},
                          {"dsum", dsum},
                          {"inp", inp},
                          {"weight", weight}});
    if (N == 0) return zero_unless(accumulate, dweight, stream), zero_unless(accumulate, dbias, stream);
    const NormGeometry geometry = norm_geometry(name, N, C, C);
    const int64_t R = geometry.n_blocks_backward;
    const Tensor partial = scratch_as(name, scratch, {2, R, C});
    const ColumnSums params = column_sums(name, partial, dweight, dbias, accumulate);
    dispatch_rows(inp.dtype, C, C, [&](auto zero) {
        using Row = decltype(zero);
        using T = typename Row::Element;
        allow_shared(layernorm_backward_kernel<T, Row::n, Row::kColumns>, geometry.backward_shared_bytes);
        layernorm_backward_kernel<T, Row::n, Row::kColumns>
            <<<static_cast<unsigned>(R), geometry.backward_block, geometry.backward_shared_bytes, stream>>>(
                dinp.ptr<T>(), params, dout.ptr<T>(), dsum.ptr_or_null<T>(), inp.ptr<T>(), weight.ptr<T>(),
                mean.ptr<float>(), rstd.ptr<float>(), N, C);
    });
    LaunchCost cost = {.reads = bytes_of(dout, dsum, inp, weight, mean, rstd),
                       .writes = bytes_of(dinp),
                       .flops = 14.0 * static_cast<double>(N * C)};
    add_cost_of_sums(cost, partial, dweight, dbias, accumulate);
    launched("layernorm_backward_kernel", cost);
}

int64_t layernorm_backward_scratch_n(int64_t N, int64_t C) {
    return 2 * norm_geometry("layernorm_backward", N, C, C).n_blocks_backward * C;
}
