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
//               Why two means are subtracted: y does not change when a constant is added to x, or x is multiplied by
//               one, so dx has no component along the all-ones vector and none along n.
//
// As plain loops, for each row:
//
//   m = sum(x) / C                                          for c < C:  dn[c] = dy[c] * g[c];  n[c] = (x[c] - m) * r
//   r = 1 / sqrt(sum((x - m)^2) / C + eps)                  a = sum(dn) / C;  b = sum(dn * n) / C
//   for c < C:  y[c] = (x[c] - m) * r * g[c] + b[c]         for c < C:  dx[c] = r * (dn[c] - a - n[c] * b) + dsum[c]
//
// The variance is summed from x - m, in a second pass over registers: mean(x^2) - m^2 would cancel for rows whose mean
// is large compared with their spread.
//
// Bytes: forward 2 rows read, 2 written (with branch); backward 3 read, 1 written. Memory is the limit, so each row is
// read once and kept in registers; norm.cuh says how. m and r are saved: 2 N floats.
//
// rmsnorm.cu is the same without means: read it first. Rows of more than 8192 channels do not fit.
#include "layers/layers.h"
#include "layers/norm.cuh"

namespace {

template <class T, int n>
__global__ void __launch_bounds__(kMaxRowThreads)
    layernorm_forward_kernel(T* out, T* sum, float* mean, float* rstd, const T* inp, const T* branch,
                             const T* __restrict__ weight, const T* __restrict__ bias, int64_t N, int64_t C,
                             float eps) {
    __shared__ float scratch[2][kWarp];  // one for each sum: the first may still be read while the second is written
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int64_t row_C = row < N ? C : 0;  // beyond the last row there is nothing to load or store
    RowShare<n> x, g, b;
    load_row<n>(x, inp + row * C, row_C);
    if (branch) {
        load_row<n>(b, branch + row * C, row_C);
#pragma unroll
        for (int k = 0; k < row_chunks<n>(row_C); ++k)
            for (int i = 0; i < n; ++i) x[k][i] = to_float(from_float<T>(x[k][i] + b[k][i]));  // as the sum is stored
        store_row<n>(sum + row * C, x, row_C);
    }
    load_row<n>(g, weight, row_C);
    load_row<n>(b, bias, row_C);
    float sums[n] = {}, squares[n] = {};
#pragma unroll
    for (int k = 0; k < row_chunks<n>(row_C); ++k)
        for (int i = 0; i < n; ++i) sums[i] += x[k][i];
    const float m = row_sum(sums, scratch[0]) / static_cast<float>(C);
#pragma unroll
    for (int k = 0; k < row_chunks<n>(row_C); ++k)
        for (int i = 0; i < n; ++i) {
            x[k][i] = chunk_column<n>(k) + i < C ? x[k][i] - m : 0.0f;
            squares[i] += x[k][i] * x[k][i];
        }
    const float r = 1.0f / sqrtf(row_sum(squares, scratch[1]) / static_cast<float>(C) + eps);
#pragma unroll
    for (int k = 0; k < row_chunks<n>(row_C); ++k)
        for (int i = 0; i < n; ++i) x[k][i] = x[k][i] * r * g[k][i] + b[k][i];
    store_row<n>(out + row * C, x, row_C);
    if (threadIdx.x == 0 && row < N) mean[row] = m, rstd[row] = r;
}

// partial: (2, gridDim.x, C), the sums of dy n and of dy over this block's rows.
template <class T, int n>
__global__ void __launch_bounds__(kMaxRowThreads)
    layernorm_backward_kernel(T* dinp, float* partial, const T* dout, const T* dsum, const T* inp,
                              const T* __restrict__ weight, const float* mean, const float* rstd, int64_t N,
                              int64_t C) {
    // One array for each of a row's two sums. A thread that writes to one has passed the barrier of the other, and all
    // threads have read the first before that barrier: so two arrays are enough for all rows.
    __shared__ float scratch[2][kWarp];
    RowShare<n> dweight, dbias;
    zero_row<n>(dweight, C);
    zero_row<n>(dbias, C);
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < N; first += stride) {
        const int64_t row = first + threadIdx.y, row_C = row < N ? C : 0;
        RowShare<n> dy, x, g, past;
        load_row<n>(dy, dout + row * C, row_C);
        load_row<n>(x, inp + row * C, row_C);
        load_row<n>(g, weight, row_C);
        if (dsum) load_row<n>(past, dsum + row * C, row_C);
        else zero_row<n>(past, row_C);
        const float m = row < N ? mean[row] : 0.0f, r = row < N ? rstd[row] : 0.0f;
        float sums[n] = {}, dot[n] = {};
#pragma unroll
        for (int k = 0; k < row_chunks<n>(row_C); ++k)
            for (int i = 0; i < n; ++i) {
                x[k][i] = (x[k][i] - m) * r;  // from here on the normalised row
                dbias[k][i] += dy[k][i];
                dweight[k][i] += dy[k][i] * x[k][i];
                dy[k][i] *= g[k][i];  // from here on the gradient of it
                sums[i] += dy[k][i];
                dot[i] += dy[k][i] * x[k][i];
            }
        const float mean_dn = row_sum(sums, scratch[0]) / static_cast<float>(C);
        const float mean_dot = row_sum(dot, scratch[1]) / static_cast<float>(C);
#pragma unroll
        for (int k = 0; k < row_chunks<n>(row_C); ++k)
            for (int i = 0; i < n; ++i) dy[k][i] = r * (dy[k][i] - mean_dn - x[k][i] * mean_dot) + past[k][i];
        store_row<n>(dinp + row * C, dy, row_C);
    }
    float* shared = dynamic_shared<float>();
    store_partial<n>(partial + blockIdx.x * C, dweight, shared, C);
    if (blockDim.y > 1) __syncthreads();  // the first sums have been read out of shared memory
    store_partial<n>(partial + (static_cast<int64_t>(gridDim.x) + blockIdx.x) * C, dbias, shared, C);
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
    const NormGeometry geometry = norm_geometry(name, N, C);
    const dim3 grid(static_cast<unsigned>(geometry.n_blocks_forward));
    dispatch_chunks(inp.dtype, C, [&](auto zero) {
        using Chunk = decltype(zero);
        using T = typename Chunk::Element;
        layernorm_forward_kernel<T, Chunk::n><<<grid, geometry.block, 0, stream>>>(
            out.ptr<T>(), branch ? sum.ptr<T>() : nullptr, mean.ptr<float>(), rstd.ptr<float>(), inp.ptr<T>(),
            branch ? branch.ptr<T>() : nullptr, weight.ptr<T>(), bias.ptr<T>(), N, C, eps);
    });
    cudaCheckLaunch();
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
    expect(name, "dbias", dbias, dbias.dtype == DType::f32 ? DType::f32 : inp.dtype, {C});
    expect(name, "mean", mean, DType::f32, {N});
    expect(name, "rstd", rstd, DType::f32, {N});
    expect_aligned(name, {{"dinp", dinp}, {"dout", dout}, {"dsum", dsum}, {"inp", inp}, {"weight", weight}});
    if (N == 0) return zero_unless(accumulate, dweight, stream), zero_unless(accumulate, dbias, stream);
    const NormGeometry geometry = norm_geometry(name, N, C);
    // Each block leaves one partial row of dg and one of db; column sums add them in their order.
    const int64_t R = geometry.n_blocks_backward;
    const Tensor partial = scratch_as(name, scratch, {2 * R, C});
    dispatch_chunks(inp.dtype, C, [&](auto zero) {
        using Chunk = decltype(zero);
        using T = typename Chunk::Element;
        layernorm_backward_kernel<T, Chunk::n>
            <<<static_cast<unsigned>(R), geometry.block, geometry.backward_shared_bytes, stream>>>(
                dinp.ptr<T>(), partial.ptr<float>(), dout.ptr<T>(), dsum ? dsum.ptr<T>() : nullptr, inp.ptr<T>(),
                weight.ptr<T>(), mean.ptr<float>(), rstd.ptr<float>(), N, C);
    });
    cudaCheckLaunch();
    add_column_sums(dweight, partial.slice(0, R), accumulate, stream);
    add_column_sums(dbias, partial.slice(R, R), accumulate, stream);
}

int64_t layernorm_backward_scratch_n(int64_t N, int64_t C) {
    return 2 * norm_geometry("layernorm_backward", N, C).n_blocks_backward * C;
}
