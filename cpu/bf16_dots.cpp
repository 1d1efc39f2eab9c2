// cpu/bf16_dots.cpp: sgemm.h's multiplication compiled for AVX-512 BF16, whatever processor the other files are
// compiled for.
//
// VDPBF16PS takes 16 sums and, for each, two pairs of bf16 numbers: x[1], x[0] and y[1], y[0], where [1] is the upper
// half of a word of 32 bits. It computes
//
//   sum = round(sum + x[1] y[1]);   sum = round(sum + x[0] y[0])
//
// each like a fused multiply-add (a product of two bf16 numbers is a float anyway). Numbers below 1.2e-38 (denormals)
// count as zero, in its operands as well as in its results; the rounding is to the nearest, whatever MXCSR says. So
// pairs with the smaller k in the upper half give sums in the order of k: all bits are those of float32's products,
// except near denormals. An Intel processor's manual says the same; a test asks the processor at hand.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "bf16_products.h"

// GCC compiles what follows for these instructions. Other compilers need -march for a processor that has them.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CUDA_CPU_DOTS
#define CUDA_CPU_AVX512
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#elif defined(__AVX512BF16__)
#define CUDA_CPU_DOTS
#endif

#if defined(CUDA_CPU_DOTS)
#include <cpuid.h>

#include "sgemm.h"

namespace cuda_cpu {
namespace {

struct Dots : Pairs<true> {
    using WordsOfB = Dots;
    static Vector multiply_add(Vector x, Vector y, Vector sum) {
        return Vector(_mm512_dpbf16_ps(sum, __m512bh(x), __m512bh(y)));
    }
};

}  // namespace

bool has_bf16_dots() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

// Measured on a fifth-generation Xeon: one instruction in two cycles, 32 products, where float32 has two fused
// multiply-adds in each, 64 products.
bool bf16_dots_are_fast() { return has_bf16_dots() && !__builtin_cpu_is("intel"); }

int64_t dots_space(int64_t columns, int64_t k) { return packed_space(columns, k); }

void multiply_with_dots(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha,
                        float beta, float* d, int64_t ld, float* space) {
    multiply_packed<Dots>(a, b, rows, columns, k, alpha, beta, d, ld, space);
}

}  // namespace cuda_cpu

#else

namespace cuda_cpu {

bool has_bf16_dots() { return false; }
bool bf16_dots_are_fast() { return false; }
int64_t dots_space(int64_t, int64_t) { return 0; }
void multiply_with_dots(const Matrix&, const Matrix&, int64_t, int64_t, int64_t, float, float, float*, int64_t,
                        float*) {}

}  // namespace cuda_cpu

#endif
