// Matrix product: the operation that takes most of a language model's time. NVIDIA's cuBLASLt computes it (on the CPU
// device: cpu/cublas_lt.cpp and cpu/sgemm.h), and on Hopper, where that is faster, a kernel of ours (hopper_matmul.cu).
// dev/matmul.cu writes it out, from the naive kernel to the fastest.
//
//   out (M, N) = alpha op(a) (M, K) op(b) (K, N) + beta out + bias (N)        2 M N K flops
//
//   backward    da = dout op(b)^T,  db = op(a)^T dout: two more products of the same kind (linear.cu)
//
// As plain loops, without transposed factors:
//
//   for m < M, n < N:
//       sum = 0;  for k < K:  sum += a[m][k] * b[k][n]
//       out[m][n] = alpha * sum + beta * out[m][n] + bias[n]
//
// Sums are float32 for every type, and float32 factors are not rounded to TF32. matmul_plan.cu says how cuBLASLt is
// asked, and by which of its algorithms it multiplies; where it has none, plain_matmul.cu does.
//
// What often follows a product is done before its result is stored (an epilogue), where cuBLASLt or ours can: it saves
// a pass over memory, and a rounding. Otherwise kernels do it afterwards (multiply_in_parts). Which it is follows from
// the product's sizes and types, and where products are timed (tune_matmuls) from what was measured.
//
// fp8. The tensor cores of Ada and Hopper multiply 8-bit floats twice as fast as 16-bit ones, but read them one way
// only, with K contiguous in both factors: in cuBLASLt's terms A transposed and B not, in ours b transposed and a not.
// The scales that the numbers are multiplied by are passed with them: one for a tensor, or (Hopper) one for each block
// of 128 along K, which then multiplies the partial sum over that block. Hopper adds fp8 products with about 14 bits;
// we leave cuBLASLt's "fast accumulation" off, so that it moves such sums to float32 registers every few products
// (DeepSeek-V3, section 3.3.2).
//
// The device has one workspace: products that run at the same time, on two streams, would need one each.
#include "layers/matmul_plan.h"

#include <cublasLt.h>

namespace {

// The shape of an fp8 factor's scales: of a (rows = M) or b (rows = N).
void expect_scale(const char* argument, const Tensor& scale, MatmulScale mode, int64_t rows, int64_t K) {
    switch (mode) {
        case MatmulScale::tensor: expect("matmul", argument, scale, DType::f32, {1}); break;
        case MatmulScale::row128: expect("matmul", argument, scale, DType::f32, {ceil_div(K, 128), rows}); break;
        case MatmulScale::block128:
            expect("matmul", argument, scale, DType::f32, {ceil_div(rows, 128), fp8_block_scale_cols(K)});
    }
    expect_aligned("matmul", {{argument, scale}});
}

// What fp8 products require in addition to the others.
void expect_fp8_product(const Tensor& out, const Tensor& a, const Tensor& b, int64_t M, int64_t N, int64_t K,
                        const MatmulOptions& options) {
    check(is_fp8(a.dtype) && is_fp8(b.dtype) && !(a.dtype == DType::e5m2 && b.dtype == DType::e5m2),
          "matmul: there is no product of ", dtype_name(a.dtype), " and ", dtype_name(b.dtype));
    check(out.ndim == 2, "matmul: fp8 products have no batch dimension");
    check(!options.transpose_a && options.transpose_b,
          "matmul: fp8 factors must be a (M, K) and b (N, K), with transpose_b: the GPU reads them along K only");
    check(!options.bias || out.dtype != DType::f32, "matmul: fp8 products with a bias have a 16-bit out, not f32");
    check(K % 16 == 0 && N % 16 == 0, "matmul: fp8 needs K and N that are multiples of 16, not K = ", K, ", N = ", N);
    const MatmulScale a_mode = options.a_scale_mode, b_mode = options.b_scale_mode;
    check((a_mode == MatmulScale::tensor) == (b_mode == MatmulScale::tensor) &&
              !(a_mode == MatmulScale::block128 && b_mode == MatmulScale::block128),
          "matmul: a and b have one scale each, or both have scales of blocks and not both of 128 x 128");
    check(a_mode == MatmulScale::tensor || M % 4 == 0, "matmul: with scales of blocks M must be a multiple of 4, not ",
          M);
    expect_scale("a_scale", options.a_scale, a_mode, M, K);
    expect_scale("b_scale", options.b_scale, b_mode, N, K);
}

void expect_vector(const char* argument, const Tensor& vector, DType dtype, int64_t n) {
    expect("matmul", argument, vector, dtype, {n});
    expect_aligned("matmul", {{argument, vector}});
}

// What is to be done before the result is stored.
Epilogue epilogue_of(const Tensor& out, const MatmulOptions& options, int64_t M, int64_t N) {
    const int asked = (options.before_gelu ? 1 : 0) + (options.gelu_input ? 1 : 0) + (options.a_row_sums ? 1 : 0) +
                      (options.delta ? 1 : 0);
    check(options.delta || (!options.attended && !options.zeros), "matmul: attended and zeros are for delta, which is ",
          options.delta);
    if (asked == 0) return options.bias ? Epilogue::bias : Epilogue::none;
    check(asked == 1 && out.ndim == 2 && !options.a_scale && !options.b_scale && !options.added,
          "matmul: one of before_gelu, gelu_input, a_row_sums and delta at most, without batches, added and fp8 "
          "factors");
    if (options.delta) {
        check(options.beta == 0.0f && !options.bias, "matmul: delta excludes a bias, and beta must be 0");
        expect("matmul", "attended", options.attended, out.dtype, {M, N});
        expect_aligned("matmul", {{"attended", options.attended}});
        expect("matmul", "delta", options.delta, DType::f32, {-1, -1, -1});
        const Tensor& delta = options.delta;
        check(delta.shape[0] * delta.shape[2] == M && delta.shape[1] > 0 && N % delta.shape[1] == 0, "matmul: delta ",
              delta, " is not that of heads in ", out);
        return Epilogue::delta;
    }
    if (options.a_row_sums) {
        check(options.transpose_a && !options.bias, "matmul: a_row_sums are of a transposed a, without a bias");
        expect_vector("a_row_sums", options.a_row_sums, out.dtype, M);
        return Epilogue::row_sums;
    }
    const Tensor& x = options.before_gelu ? options.before_gelu : options.gelu_input;
    const char* const argument = options.before_gelu ? "before_gelu" : "gelu_input";
    expect("matmul", argument, x, out.dtype, {M, N});
    expect_aligned("matmul", {{argument, x}});
    check(options.beta == 0.0f, "matmul: with ", argument, " beta must be 0, not ", options.beta);
    check(options.before_gelu || !options.bias, "matmul: gelu_input excludes a bias");
    if (options.gelu_input) return Epilogue::gelu_derivative;
    return options.bias ? Epilogue::bias_gelu : Epilogue::gelu;
}

// Checks the shapes, and returns the product's key.
Product describe_product(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options) {
    check(out.ndim == 2 || out.ndim == 3, "matmul: out is ", out, ", expected (M, N) or (batch, M, N)");
    const bool batched = out.ndim == 3;
    const int64_t batch_count = batched ? out.shape[0] : 1, M = out.shape[out.ndim - 2], N = out.cols();
    check(a.ndim == out.ndim, "matmul: a is ", a, ", but out is ", out);
    const int64_t K = a.shape[options.transpose_a ? a.ndim - 2 : a.ndim - 1];
    const auto expect_operand = [&](const char* argument, const Tensor& tensor, DType dtype, int64_t rows,
                                    int64_t cols) {
        if (batched) expect("matmul", argument, tensor, dtype, {batch_count, rows, cols});
        else expect("matmul", argument, tensor, dtype, {rows, cols});
        expect_aligned("matmul", {{argument, tensor}});
    };
    const bool fp8 = is_fp8(a.dtype) || is_fp8(b.dtype);
    // The result has the factors' type or is float32; that of 8-bit factors has 16 bits or is float32.
    DType out_dtype = out.dtype == DType::f32 ? DType::f32 : a.dtype;
    if (fp8) out_dtype = out.dtype == DType::f32 || out.dtype == DType::f16 ? out.dtype : DType::bf16;
    expect_operand("out", out, out_dtype, M, N);
    expect_operand("a", a, a.dtype, options.transpose_a ? K : M, options.transpose_a ? M : K);
    expect_operand("b", b, fp8 ? b.dtype : a.dtype, options.transpose_b ? N : K, options.transpose_b ? K : N);
    if (fp8) expect_fp8_product(out, a, b, M, N, K, options);
    else check(!options.a_scale && !options.b_scale, "matmul: only fp8 factors have scales, not ", dtype_name(a.dtype));
    if (options.added) {
        expect_operand("added", options.added, out.dtype, M, N);
        check(!fp8 && !options.bias, "matmul: added excludes a bias and fp8 factors");
    }
    if (options.bias) {
        expect_vector("bias", options.bias, out.dtype, N);
        check(options.beta == 0.0f, "matmul: with a bias beta must be 0, not ", options.beta);
    }
    return {.M = M,
            .N = N,
            .K = K,
            .batch_count = batch_count,
            .a_dtype = a.dtype,
            .b_dtype = b.dtype,
            .out_dtype = out.dtype,
            .transpose_a = options.transpose_a,
            .transpose_b = options.transpose_b,
            .epilogue = epilogue_of(out, options, M, N),
            .a_scale_mode = options.a_scale_mode,
            .b_scale_mode = options.b_scale_mode,
            .head_size = options.delta ? N / options.delta.shape[1] : 0,
            .adds_other = options.added.exists(),
            .device = device().index};
}

LaunchCost cost_of(const Product& p, Tensor out, Tensor a, Tensor b, const MatmulOptions& o) {
    const int64_t rows = p.batch_count * p.M;
    return {.reads = bytes_multiplied(out, a, b, o) + bytes_of(o.bias, o.gelu_input, o.a_scale, o.b_scale),
            .writes = bytes_of(out, o.before_gelu, o.a_row_sums),
            .again = o.a_row_sums ? bytes_of(a) : 0,  // cuBLASLt sums the rows after the product
            .flops = 2.0 * static_cast<double>(rows) * static_cast<double>(p.N * p.K),
            .product = {rows, p.N, p.K}};
}

}  // namespace

void expect_fp8_device(bool block_scales) {
    const int capability = device().capability, major = capability / 10, minor = capability % 10;
    check(capability >= 89, "fp8 matrix products need a GPU of compute capability 8.9 or higher (Ada, Hopper), and ",
          device().name, " has ", major, ".", minor, ": use bf16");
    if (!block_scales) return;
    check(major == 9, "fp8 with block scaling needs a GPU of compute capability 9.0 (Hopper), and ", device().name,
          " has ", major, ".", minor, ": use current or delayed scaling");
    check(CUBLAS_VERSION >= 120900 && cublasLtGetVersion() >= 120900,
          "fp8 with block scaling needs cuBLASLt 12.9 or newer, built with ", CUBLAS_VERSION, ", running with ",
          cublasLtGetVersion(), ": update the CUDA Toolkit, or use current or delayed scaling");
}

void matmul(Tensor out, Tensor a, Tensor b, const MatmulOptions& options, cudaStream_t stream) {
    const Product product = describe_product(out, a, b, options);
    if (out.n() == 0) return;
    check(product.K > 0, "matmul: K is 0");
    switch (multiply_by_plan(product, out, a, b, options, stream)) {
        case MatmulWay::cublas_lt: return launched("matmul", cost_of(product, out, a, b, options));
        case MatmulWay::parts: return multiply_in_parts(out, a, b, options, stream);
        case MatmulWay::hopper: return;  // it has said itself what it launched
    }
}

void multiply_in_parts(Tensor out, Tensor a, Tensor b, const MatmulOptions& options, cudaStream_t stream) {
    MatmulOptions product = options;
    product.scratch = {};
    product.before_gelu = product.gelu_input = product.a_row_sums = {};
    product.delta = product.attended = product.zeros = {};
    if (options.before_gelu) {
        matmul(options.before_gelu, a, b, product, stream);
        gelu_forward(out, options.before_gelu, stream);
    } else if (options.gelu_input) {
        matmul(out, a, b, product, stream);
        gelu_backward(out, out, options.gelu_input, stream);
    } else if (options.delta) {
        matmul(out, a, b, product, stream);
        const int64_t B = options.delta.shape[0], H = options.delta.shape[1], T = options.delta.shape[2],
                      N = out.cols();
        flash_delta({options.delta, options.zeros}, {out.view({B, T, N}), H, N / H},
                    {options.attended.view({B, T, N}), H, N / H}, stream);
    } else if (options.a_row_sums) {
        matmul(out, a, b, product, stream);
        column_sum(options.a_row_sums, a, false, options.scratch, stream);
    } else {
        plain_matmul(out, a, b, options, stream);
    }
}
