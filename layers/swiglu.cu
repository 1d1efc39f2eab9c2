// SwiGLU: a feed-forward layer's gate, silu(gate) * up; silu is also called swish.  (Shazeer 2020, arXiv:2002.05202)
//
//   forward     y = silu(g) u                      silu(g) = g s(g),   s(g) = 1 / (1 + exp(-g))
//   backward    du = dy silu(g)
//               dg = dy u silu'(g)                 silu'(g) = s + g s (1 - s) = s (1 + g (1 - s))
//
// As a plain loop:
//
//   for n < N, f < F:
//       g = inp[n][f];  u = inp[n][F + f];  s = 1 / (1 + exp(-g))
//       out[n][f] = g * s * u
//       dinp[n][f] = dout[n][f] * u * s * (1 + g * (1 - s))
//       dinp[n][F + f] = dout[n][f] * g * s
//
// The gate controls, number by number, how much of u passes. A gated layer has three matrices where a plain one has
// two; with F = 8/3 C instead of 4 C it costs as much, and learns better: LLaMA's feed-forward layer.
//
// Gate and up projection are one matrix product, so a row of inp is [g_0 ... g_F-1 | u_0 ... u_F-1], and so is one of
// dinp.
//
// Bytes: forward reads 2 and writes 1 number per output, backward reads 3 and writes 2. Memory limits both.
#include "layers/chunk.cuh"
#include "layers/layers.h"
#include "layers/sigmoid.cuh"

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Kernels. blockIdx.x is the row; blockIdx.y and the thread choose the chunk [f, f + kN) of its F columns.

__device__ __forceinline__ int64_t first_column(int chunk_n) {
    return (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * chunk_n;
}

template <class T, int kN>
__global__ void swiglu_forward_kernel(T* out, const T* inp, int64_t F) {
    const int64_t row = blockIdx.x, f = first_column(kN);
    if (f >= F) return;
    const T* gate = inp + row * 2 * F;
    float g[kN], u[kN];
    load_chunk(g, gate + f, F - f);
    load_chunk(u, gate + F + f, F - f);
    for (int l = 0; l < kN; ++l) u[l] *= silu(g[l]);
    store_chunk(out + row * F + f, u, F - f);
}

template <class T, int kN>
__global__ void swiglu_backward_kernel(T* dinp, const T* dout, const T* inp, int64_t F) {
    const int64_t row = blockIdx.x, f = first_column(kN);
    if (f >= F) return;
    const T* gate = inp + row * 2 * F;
    T* dgate = dinp + row * 2 * F;
    float g[kN], u[kN], dy[kN];
    load_chunk(g, gate + f, F - f);
    load_chunk(u, gate + F + f, F - f);
    load_chunk(dy, dout + row * F + f, F - f);
    for (int l = 0; l < kN; ++l) {
        const Sigmoid s(g[l]);
        const float dsilu = s.value * (1.0f + g[l] * s.complement), silu = g[l] * s.value;
        g[l] = dy[l] * u[l] * dsilu;  // dg
        u[l] = dy[l] * silu;          // du
    }
    store_chunk(dgate + f, g, F - f);
    store_chunk(dgate + F + f, u, F - f);
}

// A row of F columns as (blocks, threads): at most 256 threads per block; on a GPU whole warps, on the CPU device no
// thread without a chunk, which would take its turn all the same.
struct RowLaunch {
    dim3 grid, block;
};
RowLaunch row_launch(int64_t rows, int64_t F, int chunk_n) {
    const int64_t n_chunks = ceil_div(F, chunk_n);
    const int64_t threads = std::min<int64_t>(256, round_up(n_chunks, kOnCpu ? 1 : kWarp));
    return {
        dim3(static_cast<unsigned>(narrow(rows, "swiglu: rows")), static_cast<unsigned>(ceil_div(n_chunks, threads))),
        dim3(static_cast<unsigned>(threads))};
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers. All dimensions but the last are rows.

void swiglu_forward(Tensor out, Tensor inp, cudaStream_t stream) {
    const int64_t N = out.rows(), F = out.cols();
    check(out.data && inp.data, "swiglu_forward: out is ", out, ", inp is ", inp);
    expect("swiglu_forward", "inp", inp.view({inp.rows(), inp.cols()}), out.dtype, {N, 2 * F});
    expect_aligned("swiglu_forward", {{"out", out}, {"inp", inp}});
    if (out.n() == 0) return;
    dispatch_chunks(out.dtype, F, [&](auto chunk) {
        using T = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const RowLaunch to = row_launch(N, F, kN);
        swiglu_forward_kernel<T, kN><<<to.grid, to.block, 0, stream>>>(out.ptr<T>(), inp.ptr<T>(), F);
        launched("swiglu_forward_kernel", {.reads = bytes_of(inp), .writes = bytes_of(out)});
    });
}

void swiglu_backward(Tensor dinp, Tensor dout, Tensor inp, cudaStream_t stream) {
    const int64_t N = dout.rows(), F = dout.cols();
    check(dinp.data && dout.data && inp.data, "swiglu_backward: dinp is ", dinp, ", dout is ", dout, ", inp is ", inp);
    expect("swiglu_backward", "inp", inp.view({inp.rows(), inp.cols()}), dout.dtype, {N, 2 * F});
    expect("swiglu_backward", "dinp", dinp.view({dinp.rows(), dinp.cols()}), dout.dtype, {N, 2 * F});
    expect_aligned("swiglu_backward", {{"dinp", dinp}, {"dout", dout}, {"inp", inp}});
    if (dout.n() == 0) return;
    dispatch_chunks(dout.dtype, F, [&](auto chunk) {
        using T = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const RowLaunch to = row_launch(N, F, kN);
        swiglu_backward_kernel<T, kN><<<to.grid, to.block, 0, stream>>>(dinp.ptr<T>(), dout.ptr<T>(), inp.ptr<T>(), F);
        launched("swiglu_backward_kernel", {.reads = bytes_of(dout, inp), .writes = bytes_of(dinp)});
    });
}
