// cpu/cpu_vector.h: vectors of floats, as wide as the CPU's registers, for the multiplications and for attention: the
// compiler's own vector type, a fused multiply-add, and a square of them, transposed. Each file that includes it
// has its own copy, for the instructions which that file is compiled for.
#pragma once

#include <concepts>
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
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

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
#else
inline Vector broadcast(float x) { return Vector{x, x, x, x}; }
#if defined(__aarch64__)
inline Vector multiply_add(Vector a, Vector b, Vector c) { return Vector(vfmaq_f32(c, a, b)); }
#else  // two roundings, for any other CPU
inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
#endif
#endif

// x, in a register from here on. Without it, g++ -mtune=znver3 reads x from memory anew for each multiply-add that uses
// it as soon as it runs out of registers: 16 loads for 12 multiply-adds in sgemm.h's loop with AVX2 instead of 7.
inline Vector in_register(Vector x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#endif
    return x;
}

// Loads from 16-bit types, widened: exact. (g++ 12 compiles its own conversion of a vector's elements as two halves,
// and it warns of the instructions of AVX-512 without a mask.)
#if defined(CUDA_CPU_AVX512)
// With two places: the first half of the vector from one, and the second half from the other.
inline Vector load(const float* first, const float* second) {
    const __m512d half = _mm512_castps_pd(_mm512_castps256_ps512(_mm256_loadu_ps(first)));
    return Vector(_mm512_maskz_insertf64x4(0xff, half, _mm256_castps_pd(_mm256_loadu_ps(second)), 1));
}
inline __m256i load_codes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m256i load_codes(const void* first, const void* second) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(first))),
                                   _mm_loadu_si128(static_cast<const __m128i*>(second)), 1);
}
template <std::same_as<__nv_bfloat16>... T>
inline Vector load(const T*... from) {
    return Vector(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, load_codes(from...)), 16));
}
template <std::same_as<__half>... T>
inline Vector load(const T*... from) {
    return Vector(_mm512_maskz_cvtph_ps(0xffff, load_codes(from...)));
}
#elif defined(__AVX2__) && defined(__FMA__)
inline __m128i load_codes(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline Vector load(const __nv_bfloat16* from) {
    return Vector(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_codes(from)), 16));
}
#if defined(__F16C__)
inline Vector load(const __half* from) { return Vector(_mm256_cvtph_ps(load_codes(from))); }
#endif
#else
inline Vector load(const __nv_bfloat16* from) {
    typedef uint16_t Codes __attribute__((vector_size(width * sizeof(uint16_t))));
    typedef uint32_t Bits __attribute__((vector_size(width * sizeof(uint32_t))));
    Codes codes;
    std::memcpy(&codes, from, sizeof codes);
    return Vector(__builtin_convertvector(codes, Bits) << 16);
}
#endif

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

// x[i][j] becomes x[j][i] in one bit of i and of j: that bit of a line's number is exchanged with one of a lane's.
template <int distance, class First, class Second>
inline void exchange_bits(Vector (&x)[width], First first, Second second) {
#pragma GCC unroll 8
    for (int pair = 0; pair < width / 2; ++pair) {
        const int i = pair / distance * 2 * distance + pair % distance;
        const Vector a = x[i], b = x[i + distance];
        x[i] = choose(a, b, first), x[i + distance] = choose(a, b, second);
    }
}

// Words of one number of any type, widened. words(from) loads `width` of them that follow each other; with AVX-512
// words(first, second) loads half of them from each place. (arithmetic.h has words of two numbers.)
struct Numbers {
    static constexpr int terms = 1;  // numbers in a word

    template <class... T>
    requires requires(const T*... from) { load(from...); }
    static Vector words(const T*... from) { return load(from...); }
};

// A square of words, transposed: x[l][i] becomes word l of line i, whose first word is at line(i).
//
// A transpose takes a round of exchanges for each bit of a line's number. x86 has instructions that do so in one clock:
// for the two lowest bits those that interleave the elements, or pairs, of every four lanes; for another one those that
// choose every second group of four lanes. Together they leave lines 1 and 2 of every four exchanged. AVX-512's fourth
// round is done by the loads: half a line, and in the other half of the vector that of the line which belongs there.
template <class Words = Numbers, class Line>
inline void load_transposed(Vector (&x)[width], Line line) {
    static constexpr auto singles = [](int lane) { return lane / 4 * 4 + lane % 4 / 2 + lane % 2 * width; };
    static constexpr auto pairs = [](int lane) { return lane / 4 * 4 + lane % 2 + lane % 4 / 2 * width; };
    static constexpr auto fours = [](int lane) { return lane / 4 * 8 + lane % 4; };
#if defined(CUDA_CPU_AVX512)
#pragma GCC unroll 8
    for (int i = 0; i < width / 2; ++i) {
        constexpr int half = width / 2 * Words::terms;
        const auto *const first = line(i / 4 * 8 + i % 4), *const second = line(i / 4 * 8 + i % 4 + 4);
        x[i] = Words::words(first, second), x[i + width / 2] = Words::words(first + half, second + half);
    }
#else
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) x[i] = Words::words(line(i));
#endif
    exchange_bits<1>(x, singles, [](int lane) { return singles(lane) + 2; });
    exchange_bits<2>(x, pairs, [](int lane) { return pairs(lane) + 2; });
    if constexpr (width >= 8) exchange_bits<4>(x, fours, [](int lane) { return fours(lane) + 4; });
#pragma GCC unroll 4
    for (int i = 0; i < width; i += 4) std::swap(x[i + 1], x[i + 2]);
}

}  // namespace
}  // namespace cuda_cpu
