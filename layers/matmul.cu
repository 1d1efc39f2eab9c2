// Matrix product: the operation that takes most of a language model's time. NVIDIA's cuBLASLt computes it (on the CPU
// device: cpu/cublas_lt.cpp and cpu/sgemm.h). dev/matmul.cu writes it out, from the naive kernel to the fastest.
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
// cuBLASLt stores matrices by columns. The memory of a row-major X (rows, cols) is that of the column-major X^T (cols,
// rows) with leading dimension cols, so we ask for the transposed product and swap the factors:
//
//   out^T (N, M) = op(b)^T (N, K) op(a)^T (K, M)       its "A" is our b, its "B" is our a; a factor is transposed for
//                                                      it where it is for us
//
// and bias, one number for each column of out, is one for each row of out^T: what its bias epilogue adds, in float32,
// before the one rounding to out's type. Sums are float32 for every type, and float32 factors are not rounded to TF32.
//
// fp8. The tensor cores of Ada and Hopper multiply 8-bit floats twice as fast as 16-bit ones, but read them one way
// only, with K contiguous in both factors: in cuBLASLt's terms A transposed and B not, in ours b transposed and a not.
// The scales that the numbers are multiplied by are passed with them: one for a tensor, or (Hopper) one for each block
// of 128 along K, which then multiplies the partial sum over that block. Hopper adds fp8 products with about 14 bits;
// we leave cuBLASLt's "fast accumulation" off, so that it moves such sums to float32 registers every few products
// (DeepSeek-V3, section 3.3.2).
//
// cuBLASLt asks for a description of each matrix, and for an algorithm, which its heuristic chooses from hundreds by
// type, shape and alignment. That takes longer than a small product, so both are kept in a table: a model has a few
// dozen products, and after the first step nothing is searched.
//
// The device has one workspace: products that run at the same time, on two streams, would need one each.
#include "layers/layers.h"

#include <array>

namespace {

cudaDataType cuda_type(DType dtype) {
    switch (dtype) {
        case DType::f32: return CUDA_R_32F;
        case DType::bf16: return CUDA_R_16BF;
        case DType::f16: return CUDA_R_16F;
        case DType::e4m3: return CUDA_R_8F_E4M3;
        case DType::e5m2: return CUDA_R_8F_E5M2;
        default: fail("matmul works on float tensors, not on ", dtype_name(dtype));
    }
}

bool is_fp8(DType dtype) { return dtype == DType::e4m3 || dtype == DType::e5m2; }

// All that the choice of an algorithm depends on: two products with equal keys differ only in their addresses, alpha
// and beta.
struct Product {
    int64_t M, N, K, batch_count;
    DType a_dtype, b_dtype, out_dtype;
    bool transpose_a, transpose_b, has_bias;
    MatmulScale a_scale_mode, b_scale_mode;
    uint32_t a_alignment, b_alignment, out_alignment;  // bytes, of every row of every matrix
    int device;
    auto operator<=>(const Product&) const = default;
};

struct Plan {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
};

// Describes the row-major matrices (rows, cols) of one operand to cuBLASLt: column-major and transposed.
void describe_operand(cublasLtMatrixLayoutOpaque_t& layout, DType dtype, int64_t rows, int64_t cols,
                      int64_t batch_count) {
    cublasCheck(cublasLtMatrixLayoutInit(&layout, cuda_type(dtype), static_cast<uint64_t>(cols),
                                         static_cast<uint64_t>(rows), cols));
    const int32_t count = narrow(batch_count, "matmul: batch");
    const int64_t stride = rows * cols;
    cublasCheck(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    cublasCheck(
        cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
}

template <class Value>
void set(cublasLtMatmulDescOpaque_t& operation, cublasLtMatmulDescAttributes_t attribute, Value value) {
    cublasCheck(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof value));
}
template <class Value>
void set(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
}

// What changes from call to call of one plan: addresses.
void set_addresses(Plan& plan, const MatmulOptions& options) {
    if (options.bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, options.bias.data);
    if (options.b_scale) set(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, options.b_scale.data);
    if (options.a_scale) set(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, options.a_scale.data);
}

#if CUBLAS_VERSION >= 120900
cublasLtMatmulMatrixScale_t cuda_scale_mode(MatmulScale mode) {
    switch (mode) {
        case MatmulScale::row128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
        case MatmulScale::block128: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
        default: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    }
}
#endif

Plan make_plan(const Product& p, const MatmulOptions& options) {
    if (is_fp8(p.a_dtype)) expect_fp8_device(p.a_scale_mode != MatmulScale::tensor);
    Plan plan;
    cublasCheck(cublasLtMatmulDescInit(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (p.has_bias) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set_addresses(plan, options);
#if CUBLAS_VERSION >= 120900
    if (p.a_scale_mode != MatmulScale::tensor) {
        set(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<int32_t>(cuda_scale_mode(p.b_scale_mode)));
        set(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<int32_t>(cuda_scale_mode(p.a_scale_mode)));
    }
#endif
    describe_operand(plan.a, p.a_dtype, p.transpose_a ? p.K : p.M, p.transpose_a ? p.M : p.K, p.batch_count);
    describe_operand(plan.b, p.b_dtype, p.transpose_b ? p.N : p.K, p.transpose_b ? p.K : p.N, p.batch_count);
    describe_operand(plan.out, p.out_dtype, p.M, p.N, p.batch_count);

    // If the heuristic is not given the alignment of the addresses, it returns algorithms that need 256-byte
    // boundaries.
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasCheck(cublasLtMatmulPreferenceInit(&preference));
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(device().blas_workspace_bytes));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.b_alignment);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.a_alignment);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.out_alignment);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.out_alignment);

    cublasLtMatmulHeuristicResult_t found;
    int n_found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        device().blas, &plan.operation, &plan.b, &plan.a, &plan.out, &plan.out, &preference, 1, &found, &n_found);
    check(status == CUBLAS_STATUS_SUCCESS && n_found > 0, "matmul: cuBLASLt has no algorithm for out (", p.M, ", ", p.N,
          ") ", dtype_name(p.out_dtype), ", K = ", p.K, " ", dtype_name(p.a_dtype), ", batch ", p.batch_count,
          p.has_bias ? ", with bias" : "", ": ", cublasLtGetStatusString(status));
    plan.algorithm = found.algo;
    return plan;
}

// The largest power of two, up to 256 bytes, on whose multiples every row of a tensor starts.
uint32_t row_alignment(const Tensor& tensor) {
    const uint64_t row_bytes = static_cast<uint64_t>(tensor.cols()) * dtype_bytes(tensor.dtype);
    const uint64_t bits = reinterpret_cast<uintptr_t>(tensor.data) | row_bytes | 256;
    return static_cast<uint32_t>(bits & (~bits + 1));
}

// The shape of an fp8 factor's scales: of a (rows = M) or b (rows = N).
void expect_scale(const char* argument, const Tensor& scale, MatmulScale mode, int64_t rows, int64_t K) {
    switch (mode) {
        case MatmulScale::tensor: expect("matmul", argument, scale, DType::f32, {1}); break;
        case MatmulScale::row128: expect("matmul", argument, scale, DType::f32, {ceil_div(K, 128), rows}); break;
        case MatmulScale::block128:
            expect("matmul", argument, scale, DType::f32, {ceil_div(rows, 128), fp8_block_scale_cols(K)});
    }
    check(is_aligned(scale.data, 16), "matmul: ", argument, " starts at ", scale.data,
          ", which is no multiple of 16 bytes");
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
        check(is_aligned(tensor.data, 16), "matmul: ", argument, " starts at ", tensor.data,
              ", which is no multiple of 16 bytes");
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
    if (options.bias) {
        expect("matmul", "bias", options.bias, out.dtype, {N});
        check(is_aligned(options.bias.data, 16), "matmul: bias starts at ", options.bias.data,
              ", which is no multiple of 16 bytes");
        check(options.beta == 0.0f, "matmul: with a bias beta must be 0, not ", options.beta);
    }
    return {M,
            N,
            K,
            batch_count,
            a.dtype,
            b.dtype,
            out.dtype,
            options.transpose_a,
            options.transpose_b,
            static_cast<bool>(options.bias),
            options.a_scale_mode,
            options.b_scale_mode,
            row_alignment(a),
            row_alignment(b),
            row_alignment(out),
            device().index};
}

}  // namespace

void expect_fp8_device(bool block_scales) {
    int major = 0, minor = 0;
    cudaCheck(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device().index));
    cudaCheck(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device().index));
    check(10 * major + minor >= 89,
          "fp8 matrix products need a GPU of compute capability 8.9 or higher (Ada, Hopper), and ", device().name,
          " has ", major, ".", minor, ": use bf16");
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
    thread_local std::map<Product, Plan> plans;  // a thread drives one device (core.h), and needs no lock
    auto at = plans.find(product);
    if (at == plans.end()) at = plans.emplace(product, make_plan(product, options)).first;
    Plan& plan = at->second;
    set_addresses(plan, options);
    cublasCheck(cublasLtMatmul(device().blas, &plan.operation, &options.alpha, b.data, &plan.b, a.data, &plan.a,
                               &options.beta, out.data, &plan.out, out.data, &plan.out, &plan.algorithm,
                               device().blas_workspace, device().blas_workspace_bytes, stream));
}
