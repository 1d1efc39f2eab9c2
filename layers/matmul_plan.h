// layers/matmul_plan.h: between matmul.cu, which knows what a product is, and matmul_plan.cu, which knows what computes
// it.
#pragma once

#include "layers/layers.h"

#include <string>

inline bool is_fp8(DType dtype) { return dtype == DType::e4m3 || dtype == DType::e5m2; }

// What follows the product in the same kernel: epilogues of cuBLASLt, and of ours for Hopper.
enum class Epilogue : uint8_t { none, bias, gelu, bias_gelu, gelu_derivative, row_sums, delta };

// All that the choice of an algorithm depends on: two products that are equal here differ only in their addresses,
// alpha and beta. How rows are aligned follows from it, because every operand starts on 16 bytes (at least: cuBLASLt is
// told no more, so that a product has the same algorithm, and the same bits, wherever its operands lie).
struct Product {
    int64_t M, N, K, batch_count;
    DType a_dtype, b_dtype, out_dtype;
    bool transpose_a, transpose_b;
    Epilogue epilogue;
    MatmulScale a_scale_mode, b_scale_mode;
    int64_t head_size = 0;    // with delta
    bool adds_other = false;  // MatmulOptions::added
    int device;
    auto operator<=>(const Product&) const = default;
};

// "65536x3072x768 bf16 bf16 bf16 nt bias_gelu": M x N x K, types of a, b and out, what is transposed, the epilogue;
// then the number of matrices, the size of heads, "added", and the kinds of scales, where there are any.
std::string name_of(const Product& product);

// The distinct bytes that a product reads of its factors and of what is added to it: in X X^T and in X + A X some of
// these are the same matrix.
inline int64_t bytes_multiplied(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& o) {
    const Tensor added = o.added ? o.added : out;
    const bool reads_added = o.beta != 0.0f && added.data != a.data && added.data != b.data;
    return bytes_of(a) + (b.data == a.data ? 0 : bytes_of(b)) + (reads_added ? bytes_of(added) : 0);
}

// What computes a product: cuBLASLt; our own product for Hopper (hopper_matmul.h); or parts (multiply_in_parts).
enum class MatmulWay : uint8_t { cublas_lt, hopper, parts };
// By cuBLASLt or by ours, whichever has been chosen. MatmulWay::parts: nothing was done, because neither has the
// product, or because parts were chosen.
MatmulWay multiply_by_plan(const Product& product, Tensor out, Tensor a, Tensor b, const MatmulOptions& options,
                           cudaStream_t stream);
// Without this epilogue: the product, then kernels that do the same. A product without an epilogue: by our kernel.
void multiply_in_parts(Tensor out, Tensor a, Tensor b, const MatmulOptions& options, cudaStream_t stream);
