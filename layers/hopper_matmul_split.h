// layers/hopper_matmul_split.h: between hopper_matmul.cu and hopper_matmul_split.cu: products of which K is cut.
#pragma once

#include "layers/layers.h"

// Is K cut, so that all multiprocessors have the same part of this product?
bool hopper_matmul_cuts(int64_t M, int64_t N, int64_t K);
// Can the rows of a be summed beside this product?
bool hopper_matmul_sums_rows(int64_t M, int64_t N);
// out (M, N) = alpha op(a) op(b) + beta out, without or with row sums; out is of the operands' type or float32.
void hopper_matmul_split(Tensor out, Tensor a, Tensor b, const MatmulOptions& options, cudaStream_t stream);
