// layers/hopper_matmul.h: our own matrix product on Hopper's tensor cores, for the epilogues that cuBLASLt is slow at.
// matmul() calls it where matmul_plan.cu has chosen it.
#pragma once

#include "layers/matmul_plan.h"

// Files of choices hold for one version: higher where it has become faster, or takes more products.
constexpr int kHopperMatmulVersion = 3;
// Can it compute this product here? (Whether it is the fastest, is not asked.)
bool hopper_matmul_takes(const Product& product);
// out = epilogue(alpha op(a) op(b) + beta out), as matmul() says, of a product that it takes.
void hopper_matmul(Tensor out, Tensor a, Tensor b, const MatmulOptions& options, cudaStream_t stream);
