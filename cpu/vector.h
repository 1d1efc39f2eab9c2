// cpu/vector.h: vectors of floats, as wide as the CPU's registers, for sgemm.h, few_columns.h and bf16_tiles.h: the
// compiler's own vector type, a fused multiply-add, the transpose of a square of them, and the end of every sum. Each
// file that includes it has its own copy, for the instructions which that file is compiled for.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

// A file that compiles what it includes for AVX-512, by #pragma GCC target, defines CUDA_CPU_AVX512 first: g++ 12 reads
// all of a file before it obeys the pragma, so that __AVX512F__ says nothing there.
#if defined(__AVX512F__) && !defined(CUDA_CPU_AVX512)
#define CUDA_CPU_AVX512
#endif
#if defined(__AVX2__) || defined(CUDA_CPU_AVX512)
#include <immintrin.h>
#endif

#include "cublas_lt.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace cuda_cpu {
namespace {

#if defined(CUDA_CPU_AVX512)
constexpr int width = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int width = 8;
#else
constexpr int width = 4;
#endif
typedef float Vector __attribute__((vector_size(width * sizeof(float))));
typedef float LooseVector __attribute__((vector_size(width * sizeof(float)), aligned(4), may_alias));  // any floats

inline Vector load(const float* from) { return *reinterpret_cast<const LooseVector*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<LooseVector*>(to) = x; }

#if defined(CUDA_CPU_AVX512)
inline Vector multiply_add(Vector a, Vector b, Vector c) { return Vector(_mm512_fmadd_ps(a, b, c)); }
inline Vector broadcast(float x) { return Vector(_mm512_set1_ps(x)); }
#elif defined(__AVX2__) && defined(__FMA__)
inline Vector multiply_add(Vector a, Vector b, Vector c) { return Vector(_mm256_fmadd_ps(a, b, c)); }
inline Vector broadcast(float x) { return Vector(_mm256_set1_ps(x)); }
#else  // four lanes, and two roundings, for any other CPU
inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
inline Vector broadcast(float x) { return Vector{x, x, x, x}; }
#endif

// x, in a register from here on. Without it, g++ -mtune=znver3 reads x from memory anew for each multiply-add that uses
// it as soon as it runs out of registers: 16 loads for 12 multiply-adds in sgemm.h's loop with AVX2 instead of 7.
inline Vector in_register(Vector x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#endif
    return x;
}

// Loads from 16-bit types, widened: exact.
inline Vector load(const __nv_bfloat16* from) {
    typedef uint16_t Codes __attribute__((vector_size(width * sizeof(uint16_t))));
    typedef uint32_t Bits __attribute__((vector_size(width * sizeof(uint32_t))));
    Codes codes;
    std::memcpy(&codes, from, sizeof codes);
    return Vector(__builtin_convertvector(codes, Bits) << 16);
}
#if defined(CUDA_CPU_AVX512)
inline Vector load(const __half* from) {
    return Vector(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
#endif

// The Arithmetic of sgemm.h, for products of floats: a word is a number of any type, widened.
struct Floats {
    static constexpr int terms = 1;  // numbers in a word

    static Vector multiply_add(Vector x, Vector y, Vector sum) { return cuda_cpu::multiply_add(x, y, sum); }
    // The first word of a line that has `left` more numbers, and the first `width` words.
    template <class T>
    static float word(const T* from, int64_t /*left*/, int64_t /*k_stride*/ = 1) {
        return float(*from);
    }
    template <class T>
    requires requires(const T* from) { load(from); }
    static Vector words(const T* from) { return load(from); }
    template <class F>
    static void with_elements(const Matrix& matrix, F&& f) {
        matrix.with_elements(f);
    }
};

// The same for instructions that add two products of bf16 numbers to a sum: a word is a pair of numbers, that with the
// smaller k in its upper or in its lower half.
template <bool smaller_k_is_upper>
struct Pairs {
    static constexpr int terms = 2;

    static float pair(__nv_bfloat16 first, __nv_bfloat16 second) {
        const uint32_t x = __bfloat16_as_ushort(first), y = __bfloat16_as_ushort(second);
        return std::bit_cast<float>(smaller_k_is_upper ? x << 16 | y : y << 16 | x);
    }
    static float word(const __nv_bfloat16* from, int64_t left, int64_t k_stride = 1) {
        return pair(from[0], left > 1 ? from[k_stride] : __ushort_as_bfloat16(0));
    }
    static Vector words(const __nv_bfloat16* from) {
        typedef uint32_t Bits __attribute__((vector_size(width * sizeof(uint32_t))));
        Bits bits;
        std::memcpy(&bits, from, sizeof bits);
        return Vector(smaller_k_is_upper ? bits << 16 | bits >> 16 : bits);
    }
    template <class F>
    static void with_elements(const Matrix& matrix, F&& f) {
        f(reinterpret_cast<const __nv_bfloat16*>(matrix.data));
    }
};

// {a, b}[place(0)], {a, b}[place(1)], ...: elements of two vectors, chosen by numbers known to the compiler.
template <class Place, int... lane>
inline Vector choose(Vector a, Vector b, Place place, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, place(lane)...);
#else
    typedef int Lanes __attribute__((vector_size(width * sizeof(int))));
    return __builtin_shuffle(a, b, Lanes{place(lane)...});
#endif
}
template <class Place>
inline Vector choose(Vector a, Vector b, Place place) {
    return choose(a, b, place, std::make_integer_sequence<int, width>());
}

// x[i][j] becomes x[j][i]. Each round exchanges one bit of a line's number with one bit of a lane's. x86 has
// instructions that do so in one clock: for the two lowest bits those that interleave the elements, or pairs, of each
// four lanes; for the others those that choose every second group of four lanes. Together they leave lines 1 and 2 of
// each four exchanged.
template <int distance, class First, class Second>
inline void exchange_bits(Vector (&x)[width], First first, Second second) {
#pragma GCC unroll 8
    for (int pair = 0; pair < width / 2; ++pair) {
        const int i = pair / distance * 2 * distance + pair % distance;
        const Vector a = x[i], b = x[i + distance];
        x[i] = choose(a, b, first), x[i + distance] = choose(a, b, second);
    }
}
inline void transpose(Vector (&x)[width]) {
    static constexpr auto singles = [](int lane) { return lane / 4 * 4 + lane % 4 / 2 + lane % 2 * width; };
    static constexpr auto pairs = [](int lane) { return lane / 4 * 4 + lane % 2 + lane % 4 / 2 * width; };
    static constexpr auto fours = [](int lane) { return lane / 4 * 8 + lane % 4; };
    exchange_bits<1>(x, singles, [](int lane) { return singles(lane) + 2; });
    exchange_bits<2>(x, pairs, [](int lane) { return pairs(lane) + 2; });
    if constexpr (width >= 8) exchange_bits<4>(x, fours, [](int lane) { return fours(lane) + 4; });
    if constexpr (width >= 16) exchange_bits<8>(x, fours, [](int lane) { return fours(lane) + 4; });
#pragma GCC unroll 4
    for (int i = 0; i < width; i += 4) std::swap(x[i + 1], x[i + 2]);
}

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
