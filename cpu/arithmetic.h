// cpu/arithmetic.h: what sgemm.h, few_columns.h and bf16_tiles.h have in common, the Arithmetic of a product; and, of
// the first two, the end of every sum.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>

#include "cublas_lt.h"
#include "cpu_vector.h"

namespace cuda_cpu {
namespace {

// The Arithmetic of sgemm.h, for products of floats: a word is a number of any type, widened.
struct Floats : Numbers {
    using WordsOfB = Floats;  // what B's words are: with all but one arithmetic the same as A's
    static Vector multiply_add(Vector x, Vector y, Vector sum) { return cuda_cpu::multiply_add(x, y, sum); }
    // The first word of a line that has `left` more numbers.
    template <class T>
    static float word(const T* from, int64_t /*left*/, int64_t /*k_stride*/ = 1) {
        return float(*from);
    }
    template <class F>
    static void with_elements(const Matrix& matrix, F&& f) {
        matrix.with_elements(f);
    }
    // Columns of which word l is at [l]: they need no copy.
    static bool in_place(const Matrix& b) { return b.type == CUDA_R_32F && b.row_stride == 1; }
};

// The same for instructions that add two products of bf16 numbers to a sum: a word is a pair of numbers, that with the
// smaller k in its upper or in its lower half.
template <bool smaller_k_is_upper>
struct Pairs {
    static constexpr int terms = 2;
    typedef uint32_t Bits __attribute__((vector_size(width * sizeof(uint32_t))));

    static float pair(__nv_bfloat16 first, __nv_bfloat16 second) {
        const uint32_t x = __bfloat16_as_ushort(first), y = __bfloat16_as_ushort(second);
        return std::bit_cast<float>(smaller_k_is_upper ? x << 16 | y : y << 16 | x);
    }
    static float word(const __nv_bfloat16* from, int64_t left, int64_t k_stride = 1) {
        return pair(from[0], left > 1 ? from[k_stride] : __ushort_as_bfloat16(0));
    }
    template <std::same_as<__nv_bfloat16>... T>
    static Vector words(const T*... from) {
        const Bits bits = Bits(load(reinterpret_cast<const float*>(from)...));
        return Vector(smaller_k_is_upper ? bits << 16 | bits >> 16 : bits);
    }
    template <class F>
    static void with_elements(const Matrix& matrix, F&& f) {
        f(reinterpret_cast<const __nv_bfloat16*>(matrix.data));
    }
    static bool in_place(const Matrix& /*b*/) { return false; }
};

// Products of floats again, for bf16 matrices and few_columns.h: a word of A is a pair, so that half as many words are
// transposed, and its numbers are made floats then. A word of B is a float.
struct WidenedPairs : Pairs<false> {
    using WordsOfB = Floats;
    static Vector first(Vector x) { return Vector(Bits(x) << 16); }
    static Vector second(Vector x) { return Vector(Bits(x) & 0xffff0000u); }
};

// The end of the sums of vectors * width rows of one column of D, of which `rows` exist: alpha sum + beta D. Without
// beta, D may hold anything.
template <int vectors>
inline void finish_column(const Vector (&sums)[vectors], float alpha, float beta, float* d, int64_t rows) {
    const Vector alphas = broadcast(alpha), betas = broadcast(beta);
    const auto finish = [&](Vector sum, float* at) {
        store(at, beta == 0.0f ? alphas * sum : multiply_add(alphas, sum, betas * load(at)));
    };
    if (rows == vectors * width) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) finish(sums[v], d + v * width);
    } else {
        float column[vectors * width] = {};
        std::memcpy(column, d, size_t(rows) * sizeof(float));
        for (int v = 0; v < vectors; ++v) finish(sums[v], column + v * width);
        std::memcpy(d, column, size_t(rows) * sizeof(float));
    }
}

}  // namespace
}  // namespace cuda_cpu
