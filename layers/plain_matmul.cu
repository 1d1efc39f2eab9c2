// A matrix product by a kernel of our own: the naive one, each number of out by one thread.
//
//   out (M, N) = alpha op(a) (M, K) op(b) (K, N) + beta out + bias (N)
//
//   for m < M, n < N:
//       sum = 0;  for k < K:  sum += a[m][k] * b[k][n]
//       out[m][n] = alpha * sum + beta * out[m][n] + bias[n]
//
// cuBLASLt has no algorithm for some sizes: in 16 bits, for some whose rows are not a multiple of 16 bytes (K = 7).
// Models have none of them where time matters, so this is for being right: float32 sums in the order of k, whatever the
// shape.
// How a product is made fast, dev/matmul.cu shows.
#include "core/kernel.cuh"
#include "layers/matmul_plan.h"

namespace {

// Numbers from one row of a matrix to the next, from one column to the next, and to the next matrix.
struct Strides {
    int64_t row, col, matrix;
};

template <class Factor, class Out>
__global__ void plain_matmul_kernel(Out* out, const Factor* a, const Factor* b, const Out* added, const Out* bias,
                                    Strides of_a, Strides of_b, int64_t M, int64_t N, int64_t K, int64_t n, float alpha,
                                    float beta) {
    const int64_t i = global_thread();
    if (i >= n) return;
    const int64_t col = i % N, row = i / N % M, matrix = i / N / M;
    a += matrix * of_a.matrix + row * of_a.row;
    b += matrix * of_b.matrix + col * of_b.col;
    float sum = 0.0f;
    for (int64_t k = 0; k < K; ++k) sum = fmaf(to_float(a[k * of_a.col]), to_float(b[k * of_b.row]), sum);
    sum *= alpha;
    if (beta != 0.0f) sum += beta * to_float(added[i]);  // without, it may hold anything
    if (bias) sum += to_float(bias[col]);
    out[i] = from_float<Out>(sum);
}

Strides strides_of(const Tensor& x, bool transposed) {
    const int64_t cols = x.cols(), matrix = cols * x.shape[x.ndim - 2];
    return transposed ? Strides{1, cols, matrix} : Strides{cols, 1, matrix};
}

}  // namespace

void plain_matmul(Tensor out, Tensor a, Tensor b, const MatmulOptions& options, cudaStream_t stream) {
    check(a.dtype == b.dtype && (out.dtype == a.dtype || out.dtype == DType::f32), "plain_matmul: there is no product ",
          out, " of ", a, " and ", b);
    check((out.ndim == 2 || out.ndim == 3) && a.ndim == out.ndim, "plain_matmul: out is ", out, " and a is ", a,
          ", expected (M, N) and (M, K), or batches of them");
    const int64_t n = out.n(), N = out.cols(), M = out.shape[out.ndim - 2];
    const int64_t K = a.shape[options.transpose_a ? a.ndim - 2 : a.ndim - 1];
    const auto expect_matrix = [&](const char* argument, const Tensor& x, DType dtype, int64_t rows, int64_t cols) {
        if (out.ndim == 3) expect("plain_matmul", argument, x, dtype, {out.shape[0], rows, cols});
        else expect("plain_matmul", argument, x, dtype, {rows, cols});
    };
    expect_matrix("out", out, out.dtype, M, N);
    expect_matrix("a", a, a.dtype, options.transpose_a ? K : M, options.transpose_a ? M : K);
    expect_matrix("b", b, a.dtype, options.transpose_b ? N : K, options.transpose_b ? K : N);
    if (options.added) expect_matrix("added", options.added, out.dtype, M, N);
    if (options.bias) expect("plain_matmul", "bias", options.bias, out.dtype, {N});
    if (n == 0) return;
    const unsigned blocks = static_cast<unsigned>(narrow(ceil_div(n, int64_t{256}), "plain_matmul: blocks"));
    const auto launch = [&](auto factor, auto result) {
        using Factor = decltype(factor);
        using Out = decltype(result);
        plain_matmul_kernel<Factor, Out><<<blocks, 256, 0, stream>>>(
            out.ptr<Out>(), a.ptr<Factor>(), b.ptr<Factor>(), (options.added ? options.added : out).ptr<Out>(),
            options.bias.ptr_or_null<Out>(), strides_of(a, options.transpose_a), strides_of(b, options.transpose_b), M,
            N, K, n, options.alpha, options.beta);
    };
    dispatch(a.dtype, [&](auto zero) {
        if (out.dtype == a.dtype) launch(zero, zero);
        else launch(zero, 0.0f);
    });
    launched("plain_matmul_kernel", {.reads = bytes_multiplied(out, a, b, options) + bytes_of(options.bias),
                                     .writes = bytes_of(out),
                                     .flops = 2.0 * static_cast<double>(n * K),
                                     .product = {n / N, N, K}});
}
