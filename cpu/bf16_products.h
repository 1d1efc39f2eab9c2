// cpu/bf16_products.h: how products of two bf16 matrices are computed (sgemm.cpp explains the three ways).
#pragma once

#include "cublas_lt.h"

namespace cuda_cpu {

enum class Bf16Products { exact, dots, tiles };
Bf16Products bf16_products();
void set_bf16_products(Bf16Products products);  // for tests; the processor must have it

// Does this processor have the instructions? Tiles also need the system's permission, which this asks for, and must
// multiply right: the first call computes two small products, and warns on stderr if one is wrong.
bool has_bf16_dots();
bool has_bf16_tiles();
bool bf16_dots_are_fast();  // the processor has them, and takes less time with them than for float32 products

// What sgemm (cublas_lt.h) promises, of bf16 matrices.
void multiply_with_dots(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha,
                        float beta, float* d, int64_t ld, float* space);
void multiply_with_tiles(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha,
                         float beta, float* d, int64_t ld, float* space);
int64_t dots_space(int64_t columns, int64_t k);  // the floats of `space` for multiply_with_dots
int64_t tiles_space(int64_t columns, int64_t k);

}  // namespace cuda_cpu
