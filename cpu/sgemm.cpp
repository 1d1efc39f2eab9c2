// cpu/sgemm.cpp: sgemm.h's multiplication compiled for float32, and the choice of the arithmetic for a product.
//
// A product of two bf16 matrices is computed by the fastest of these that the processor has (bf16_products):
//
//   tiles   AMX multiplies tiles of 16 x 32 and 32 x 16 numbers (bf16_tiles.h): 16 times the rate of float32. The order
//           of its sums is its own.
//   dots    AVX-512 BF16 adds two products to each of 16 sums (bf16_dots.cpp): up to twice the rate of float32 on AMD's
//           processors. The order is that of float32's, and so are the bits, but for numbers below 1.2e-38, which it
//           takes as zero. Intel's processors have half the rate of float32 with it, and do without.
//   exact   float32 products of the widened numbers. CUDA_CPU_EXACT=1 in the environment asks for it everywhere: the
//           bits are then the same on all processors with fused multiply-add.
//
// In each of them an element's bits depend on its row of A and its column of B alone.
#include <atomic>
#include <cstdlib>

#include "bf16_products.h"
#include "sgemm.h"

namespace cuda_cpu {
namespace {

Bf16Products best_bf16_products() {
    const char* const exact = std::getenv("CUDA_CPU_EXACT");
    if (exact && *exact && std::strcmp(exact, "0") != 0) return Bf16Products::exact;
    if (has_bf16_tiles()) return Bf16Products::tiles;
    return bf16_dots_are_fast() ? Bf16Products::dots : Bf16Products::exact;
}

std::atomic<Bf16Products>& bf16_choice() {
    static std::atomic<Bf16Products> choice = best_bf16_products();
    return choice;
}

}  // namespace

Bf16Products bf16_products() { return bf16_choice(); }
void set_bf16_products(Bf16Products products) { bf16_choice() = products; }

int64_t sgemm_space(int64_t columns, int64_t k) {
    return std::max({packed_space(columns, k), dots_space(columns, k), tiles_space(columns, k)});
}

void sgemm(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha, float beta,
           float* d, int64_t ld, float* space) {
    if (alpha == 0.0f) k = 0;  // as in every BLAS: what A and B hold does not matter, NaN neither
    auto* multiply = multiply_packed<Floats>;
    if (a.type == CUDA_R_16BF && b.type == CUDA_R_16BF) switch (bf16_products()) {
            case Bf16Products::tiles: multiply = multiply_with_tiles; break;
            case Bf16Products::dots: multiply = multiply_with_dots; break;
            case Bf16Products::exact: break;
        }
    multiply(a, b, rows, columns, k, alpha, beta, d, ld, space);
}

}  // namespace cuda_cpu
