// RMSNorm: one learned scale per channel, no mean, no bias.        (Zhang & Sennrich 2019, arXiv:1910.07467)
//
//   forward     x = inp  or  inp + branch  (the residual add before the norm, fused: it saves a pass over memory)
//               y = x r g              r = 1 / sqrt(mean_c(x^2) + eps)
//
//   backward    with n = x r, the normalised row:   dg = sum over rows of dy n
//
//               dn = dy g.  Through n_c = x_c r(x) with  dr/dx_c = -r^3 x_c / C = -r^2 n_c / C:
//               dx = r (dn - n mean_c(dn n))        the part of dn along n goes: scaling x does not change y
//               + dsum, the gradient that reaches x past the norm, along the residual stream
//
//   bytes       forward 2 rows read, 2 written (with branch); backward 3 read, 1 written: memory is the limit, so each row
//               is read once and kept in registers. norm.cuh says how. r is saved: N floats.
//
// Rows of more than 16384 channels do not fit.
#include "layers/layers.h"
#include "layers/norm.cuh"

namespace {

template <class T, int n>
__global__ void __launch_bounds__(kMaxRowThreads)
    rmsnorm_forward_kernel(T* out, T* sum, float* rstd, const T* inp, const T* branch, const T* __restrict__ weight, int64_t N,
                           int64_t C, float eps) {
    __shared__ float scratch[kWarp];
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= N) return;  // all threads of a row together; with more than one row a block, they share nothing
    RowShare<T, n> x, g;
    x.load(inp + row * C, C);
    if (branch) {
        RowShare<T, n> b;
        b.load(branch + row * C, C);
        x.add(b);
        x.store(sum + row * C, C);
    }
    g.load(weight, C);
    float squares[n] = {};
#pragma unroll
    for (int k = 0; k < x.K; ++k)
        for (int i = 0; i < n; ++i) squares[i] += to_float(x.pack[k].v[i]) * to_float(x.pack[k].v[i]);
    const float r = 1.0f / sqrtf(row_sum(squares, scratch) / static_cast<float>(C) + eps);
#pragma unroll
    for (int k = 0; k < x.K; ++k)
        for (int i = 0; i < n; ++i) x.pack[k].v[i] = from_float<T>(to_float(x.pack[k].v[i]) * r * to_float(g.pack[k].v[i]));
    x.store(out + row * C, C);
    if (threadIdx.x == 0) rstd[row] = r;
}

// partial: (gridDim.x, C), the sum of dy n over this block's rows.
template <class T, int n>
__global__ void __launch_bounds__(kMaxRowThreads)
    rmsnorm_backward_kernel(T* dinp, float* partial, const T* dout, const T* dsum, const T* inp, const T* __restrict__ weight,
                            const float* rstd, int64_t N, int64_t C) {
    __shared__ float scratch[2][kWarp];  // in turn: a row's sum may still be read while the next row's is written
    using Row = RowShare<T, n>;
    float dweight[Row::K][n] = {};
    int turn = 0;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < N; row += stride, turn ^= 1) {
        Row dy, x, g;
        dy.load(dout + row * C, C);
        x.load(inp + row * C, C);
        g.load(weight, C);
        const float r = rstd[row];
        float dot[n] = {};
#pragma unroll
        for (int k = 0; k < Row::K; ++k)
            for (int i = 0; i < n; ++i) {
                const float dy_n = to_float(dy.pack[k].v[i]) * (to_float(x.pack[k].v[i]) * r);
                dweight[k][i] += dy_n;
                dot[i] += dy_n * to_float(g.pack[k].v[i]);
            }
        const float mean = row_sum(dot, scratch[turn]) / static_cast<float>(C);  // mean_c(dn n)
        Row past = {};
        if (dsum) past.load(dsum + row * C, C);
#pragma unroll
        for (int k = 0; k < Row::K; ++k)
            for (int i = 0; i < n; ++i) {
                const float dn = to_float(dy.pack[k].v[i]) * to_float(g.pack[k].v[i]);
                const float dx = r * (dn - to_float(x.pack[k].v[i]) * r * mean);
                dy.pack[k].v[i] = from_float<T>(dx + to_float(past.pack[k].v[i]));
            }
        dy.store(dinp + row * C, C);
    }
    store_partial<n>(partial + blockIdx.x * C, dweight, dynamic_shared<float>(), C);
}

}  // namespace

void rmsnorm_forward(Tensor out, Tensor sum, Tensor rstd, Tensor inp, Tensor branch, Tensor weight, float eps,
                     cudaStream_t stream) {
    const char* name = "rmsnorm_forward";
    expect(name, "inp", inp, out.dtype, {-1, -1});
    const int64_t N = inp.shape[0], C = inp.shape[1];
    expect(name, "out", out, inp.dtype, {N, C});
    expect(name, "rstd", rstd, DType::f32, {N});
    expect(name, "weight", weight, inp.dtype, {C});
    if (branch) {
        expect(name, "branch", branch, inp.dtype, {N, C});
        expect(name, "sum", sum, inp.dtype, {N, C});
    }
    expect_aligned(name, {{"out", out}, {"sum", sum}, {"inp", inp}, {"branch", branch}, {"weight", weight}});
    if (N == 0) return;
    const NormGeometry geometry = norm_geometry(name, N, C);
    const dim3 grid(static_cast<unsigned>(geometry.n_blocks_forward));
    dispatch_packed(inp.dtype, C, [&](auto zero) {
        using Pack = decltype(zero);
        using T = typename Pack::Element;
        rmsnorm_forward_kernel<T, Pack::n><<<grid, geometry.block, 0, stream>>>(
            out.ptr<T>(), branch ? sum.ptr<T>() : nullptr, rstd.ptr<float>(), inp.ptr<T>(), branch ? branch.ptr<T>() : nullptr,
            weight.ptr<T>(), N, C, eps);
    });
    cudaCheckLaunch();
}

void rmsnorm_backward(Tensor dinp, Tensor dweight, Tensor dout, Tensor dsum, Tensor inp, Tensor weight, Tensor rstd,
                      Tensor scratch, cudaStream_t stream) {
    const char* name = "rmsnorm_backward";
    expect(name, "inp", inp, dinp.dtype, {-1, -1});
    const int64_t N = inp.shape[0], C = inp.shape[1];
    expect(name, "dinp", dinp, inp.dtype, {N, C});
    expect(name, "dout", dout, inp.dtype, {N, C});
    if (dsum) expect(name, "dsum", dsum, inp.dtype, {N, C});
    expect(name, "weight", weight, inp.dtype, {C});
    expect(name, "dweight", dweight, dweight.dtype == DType::f32 ? DType::f32 : inp.dtype, {C});
    expect(name, "rstd", rstd, DType::f32, {N});
    expect_aligned(name, {{"dinp", dinp}, {"dout", dout}, {"dsum", dsum}, {"inp", inp}, {"weight", weight}});
    if (N == 0) return;
    const NormGeometry geometry = norm_geometry(name, N, C);
    const dim3 grid(static_cast<unsigned>(geometry.n_blocks_backward));
    const Tensor partial = scratch_as(name, scratch, {geometry.n_blocks_backward, C});
    dispatch_packed(inp.dtype, C, [&](auto zero) {
        using Pack = decltype(zero);
        using T = typename Pack::Element;
        rmsnorm_backward_kernel<T, Pack::n><<<grid, geometry.block, geometry.backward_shared_bytes, stream>>>(
            dinp.ptr<T>(), partial.ptr<float>(), dout.ptr<T>(), dsum ? dsum.ptr<T>() : nullptr, inp.ptr<T>(), weight.ptr<T>(),
            rstd.ptr<float>(), N, C);
    });
    cudaCheckLaunch();
    add_column_sums(dweight, partial, stream);
}

int64_t rmsnorm_backward_scratch_n(int64_t N, int64_t C) {
    return norm_geometry("rmsnorm_backward", N, C).n_blocks_backward * C;
}
