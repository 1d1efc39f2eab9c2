// Inside cpu/'s cuBLASLt: the complete description of one matrix multiplication. The API (cublas_lt.cpp) checks and
// fills it; cublas_lt_multiply.cpp (tiles, epilogues, threads) and sgemm.cpp (the arithmetic) compute it.
#pragma once

#include <utility>

#include "cublasLt.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"

namespace cuda_cpu {

inline size_t element_bytes(int32_t type) {
    switch (type) {
        case CUDA_R_32F: return 4;
        case CUDA_R_16F:
        case CUDA_R_16BF: return 2;
        default: return 1;
    }
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// fp8 with a scale for each block of 128 along k.
constexpr int64_t scale_block = 128;
// Where each scale is of 128 x 128, a row of blocks has places for a multiple of four scales.
inline int64_t square_scale_stride(int64_t k) { return divide_up(divide_up(k, scale_block), 4) * 4; }

inline bool is_fp8(int32_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

// A matrix in memory: element (i, j) of batch b at data + b * batch_stride + i * row_stride + j * column_stride, where
// one of the two strides is 1. Transposing is swapping the strides.
struct Matrix {
    char* data = nullptr;
    int32_t type = CUDA_R_32F;
    int64_t row_stride = 1, column_stride = 1, batch_stride = 0;

    Matrix() = default;
    Matrix(const void* address, const cublasLtMatrixLayoutOpaque_t& layout)
        : data(static_cast<char*>(const_cast<void*>(address))), type(layout.type),
          row_stride(layout.order == CUBLASLT_ORDER_COL ? 1 : layout.ld),
          column_stride(layout.order == CUBLASLT_ORDER_COL ? layout.ld : 1),
          batch_stride(layout.batch_count > 1 ? layout.batch_stride : 0) {}

    Matrix transposed() const {
        Matrix result = *this;
        std::swap(result.row_stride, result.column_stride);
        return result;
    }
    char* at(int64_t batch, int64_t row, int64_t column) const {
        const int64_t elements = batch * batch_stride + row * row_stride + column * column_stride;
        return data + elements * int64_t(element_bytes(type));
    }
    float* float_at(int64_t batch, int64_t row, int64_t column) const {
        return reinterpret_cast<float*>(at(batch, row, column));
    }
    // Calls f with the address of the first element, as a pointer to its type.
    template <class F>
    void with_elements(F&& f) const {
        switch (type) {
            case CUDA_R_32F: return f(reinterpret_cast<const float*>(data));
            case CUDA_R_16F: return f(reinterpret_cast<const __half*>(data));
            case CUDA_R_16BF: return f(reinterpret_cast<const __nv_bfloat16*>(data));
            case CUDA_R_8F_E4M3: return f(reinterpret_cast<const __nv_fp8_e4m3*>(data));
            case CUDA_R_8F_E5M2: return f(reinterpret_cast<const __nv_fp8_e5m2*>(data));
        }
    }
    // The part that starts there.
    Matrix from(int64_t batch, int64_t row, int64_t column) const {
        Matrix result = *this;
        result.data = at(batch, row, column);
        return result;
    }
};

// The bits of an epilogue to which NVIDIA gives no names of their own.
constexpr uint32_t bgrad_bit = 16, dgelu_bit = 64, aux_bit = 128;

// Everything that a multiplication needs when the stream runs it: no pointers to descriptors.
struct Multiplication {
    int64_t m, n, k, batch_count;
    Matrix a, b, c, d, aux;  // a: m x k and b: k x n, after op; d column-major
    uint32_t epilogue;
    void* bias;
    int32_t bias_type;
    int64_t bias_batch_stride;
    bool bias_along_rows = true;  // bias[i] belongs to row i of d; false if the problem has been transposed
    float alpha = 0, beta = 0;
    const float *device_alpha = nullptr, *device_beta = nullptr;  // instead of the two, in pointer mode device
    const float *a_scale, *b_scale, *c_scale, *d_scale;
    int32_t a_scale_mode, b_scale_mode;
    float* d_amax;

    bool has_block_scales() const { return a_scale_mode != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F; }

    bool has(uint32_t flag) const { return (epilogue & flag) != 0; }
    bool has_bias() const { return has(CUBLASLT_EPILOGUE_BIAS); }
    bool sums_gradient_of_d() const { return has(bgrad_bit); }
    bool reads_aux() const { return has(dgelu_bit); }
    bool writes_aux() const { return has(CUBLASLT_EPILOGUE_GELU) && has(aux_bit); }

    void transpose() {
        std::swap(m, n);
        const Matrix old_a = a;
        a = b.transposed(), b = old_a.transposed();
        c = c.transposed(), d = d.transposed(), aux = aux.transposed();
        bias_along_rows = false;
        if (has(CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB))
            epilogue ^= CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB;
    }
};

// Computes it now, on all OpenMP threads.
void multiply(const Multiplication& multiplication);

// D = alpha A B + beta D, on this thread, without D if beta is 0: A rows x k and B k x columns, of any type; D floats,
// element (i, j) at d[i + j * ld]. An element's bits depend on nothing but its row of A, its column of B, its place's
// old value, alpha and beta. `space`: sgemm_space(columns, k) floats, aligned to 64 bytes.
void sgemm(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha, float beta,
           float* d, int64_t ld, float* space);
int64_t sgemm_space(int64_t columns, int64_t k);

// So many k's are packed together. Of floats the sum over k is formed anew for each, and these parts are added in
// order (sgemm.h); of bf16_tiles.h's products it goes on.
constexpr int64_t panel_k = 384;

}  // namespace cuda_cpu
