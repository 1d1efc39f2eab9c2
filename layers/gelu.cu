// GELU: the Gaussian error linear unit x Phi(x), in the tanh form that GPT-2 uses.
//                                                                       (Hendrycks & Gimpel 2016, arXiv:1606.08415)
//
//   forward     y = 0.5 x (1 + tanh(u))            u = sqrt(2/pi) (x + 0.044715 x^3)
//
// As a plain loop:
//
//   for i < n:
//       u = sqrt(2/pi) * (x[i] + 0.044715 * x[i]^3)
//       y[i] = 0.5 * x[i] * (1 + tanh(u))
//
// Because 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)), this is the same as
//
//               y = x s(v)                         v = 2u,  s(v) = 1 / (1 + exp(-v))
//   backward    dx = dy (s + x s (1 - s) v')       v' = sqrt(8/pi) (1 + 3 * 0.044715 x^2)
//
// The kernels compute the second form. 1 + tanh(u) cancels for x << 0, where tanh(u) is just above -1: at x = -5 no
// digit of y is left in float32. s(v) keeps them all, needs one exponential, and never overflows (layers/sigmoid.cuh).
//
// Rounding: v has a relative error of about 5 * 2^-24, so exp(-|v|) has |v| times that; but |v| exp(-|v|) <= 1/e, so
// the absolute error of y stays below 8 * 2^-24 |x| everywhere: test/test_gelu.cu checks this bound.
//
// Bytes: forward reads and writes each element once, backward reads two and writes one. Memory limits both.
#include "layers/chunk.cuh"
#include "layers/gelu.cuh"
#include "layers/layers.h"

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Kernels. A thread does one chunk: elements [i, i + kChunk) of the flattened tensor.

template <class T>
__global__ void gelu_forward_kernel(T* out, const T* inp, int64_t n) {
    constexpr int kN = kChunk<T>;
    const int64_t i = global_thread() * kN;
    if (i >= n) return;
    float x[kN];
    load_chunk(x, inp + i, n - i);
    for (int l = 0; l < kN; ++l) x[l] = gelu(x[l]);
    store_chunk(out + i, x, n - i);
}

// dinp may be dout: a thread has read its chunk of both inputs before it writes that chunk.
template <class T>
__global__ void gelu_backward_kernel(T* dinp, const T* dout, const T* inp, int64_t n) {
    constexpr int kN = kChunk<T>;
    const int64_t i = global_thread() * kN;
    if (i >= n) return;
    float x[kN], dy[kN];
    load_chunk(x, inp + i, n - i);
    load_chunk(dy, dout + i, n - i);
    for (int l = 0; l < kN; ++l) dy[l] *= gelu_derivative(x[l]);
    store_chunk(dinp + i, dy, n - i);
}

unsigned blocks_for(int64_t n, int chunk_n) {
    return static_cast<unsigned>(narrow(ceil_div(n, int64_t{256} * chunk_n), "gelu: number of blocks"));
}

void expect_like_inp(const char* operation, const char* argument, const Tensor& tensor, const Tensor& inp) {
    const bool same = tensor.data && tensor.dtype == inp.dtype && tensor.ndim == inp.ndim &&
                      std::equal(inp.shape, inp.shape + inp.ndim, tensor.shape);
    check(same, operation, ": ", argument, " is ", tensor, ", expected ", inp, " as inp");
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

void gelu_forward(Tensor out, Tensor inp, cudaStream_t stream) {
    check(inp.data, "gelu_forward: inp is ", inp);
    expect_like_inp("gelu_forward", "out", out, inp);
    expect_aligned("gelu_forward", {{"out", out}, {"inp", inp}});
    const int64_t n = inp.n();
    if (n == 0) return;
    dispatch(inp.dtype, [&](auto zero) {
        using T = decltype(zero);
        gelu_forward_kernel<T><<<blocks_for(n, kChunk<T>), 256, 0, stream>>>(out.ptr<T>(), inp.ptr<T>(), n);
        launched("gelu_forward_kernel", {.reads = bytes_of(inp), .writes = bytes_of(out)});
    });
}

void gelu_backward(Tensor dinp, Tensor dout, Tensor inp, cudaStream_t stream) {
    check(inp.data, "gelu_backward: inp is ", inp);
    expect_like_inp("gelu_backward", "dinp", dinp, inp);
    expect_like_inp("gelu_backward", "dout", dout, inp);
    expect_aligned("gelu_backward", {{"dinp", dinp}, {"dout", dout}, {"inp", inp}});
    const int64_t n = inp.n();
    if (n == 0) return;
    dispatch(inp.dtype, [&](auto zero) {
        using T = decltype(zero);
        gelu_backward_kernel<T>
            <<<blocks_for(n, kChunk<T>), 256, 0, stream>>>(dinp.ptr<T>(), dout.ptr<T>(), inp.ptr<T>(), n);
        launched("gelu_backward_kernel", {.reads = bytes_of(dout, inp), .writes = bytes_of(dinp)});
    });
}
