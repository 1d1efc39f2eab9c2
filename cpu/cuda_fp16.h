// cuda_fp16.h on the CPU: __half, and the rounding rules that all 16- and 8-bit floats here share.
//
// This file also explains what a "half" is and what a GPU does when it stores one. nvcc finds NVIDIA's header
// of this name; the CPU build finds this one, which offers the part of it that language model code uses.
//
// A small float is sign | exponent | mantissa. With e the stored exponent, m the mantissa, M mantissa bits:
//
//     value = (-1)^sign * 2^(e - bias) * (1 + m / 2^M)          normal,    e > 0
//     value = (-1)^sign * 2^(1 - bias) * (    m / 2^M)          subnormal, e = 0: evenly spaced down to zero
//
//     format        sign exponent mantissa   bias   largest      smallest normal   smallest       inf   NaN codes
//     float32          1        8       23    127   3.4e38       2^-126            2^-149         yes   2^24 - 2
//     bfloat16         1        8        7    127   3.4e38       2^-126            2^-133         yes   254
//     half (fp16)      1        5       10     15   65504        2^-14             2^-24          yes   2046
//     fp8 e5m2         1        5        2     15   57344        2^-14             2^-16          yes   6
//     fp8 e4m3         1        4        3      7   448          2^-6              2^-9           no    2
//
// Conversions from float round to the nearest value, ties to the even code, as the GPU's cvt.rn does. All of them are
// branch-free integer code plus at most one float addition, so that GCC turns a loop of them into vector instructions
// (its own _Float16 and the F16C intrinsics stay scalar in a loop, g++ 12). A NaN becomes the one NaN that NVIDIA
// writes: positive, all mantissa bits set. test/test_number_formats.cu compares every code with NVIDIA's conversions.
//
// Arithmetic (+, __hadd, __hfma, ...) computes exactly or in float32 and rounds once, like the GPU's instructions.
// Not here: conversions that round down, up or to zero; the transcendentals (hexp, hlog, ...): work in float instead.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstdint>
#include <limits>
#include <utility>

#include "cuda_runtime.h"  // float2

namespace cuda_cpu {

template <int exponent_bits_, int mantissa_bits_>
struct SmallFloat {
    static constexpr int mantissa_bits = mantissa_bits_;
    static constexpr int bias = (1 << (exponent_bits_ - 1)) - 1;
    static constexpr uint32_t magnitude_mask = (1u << (exponent_bits_ + mantissa_bits_)) - 1;
    static constexpr uint32_t infinity = ((1u << exponent_bits_) - 1) << mantissa_bits_;  // where it has one

    // The float32 bits of 2^exponent.
    static constexpr uint32_t power_of_two(int exponent) { return uint32_t(127 + exponent) << 23; }

    // float32 bits of |x|  ->  code of the nearest magnitude. Beyond the largest finite code it continues, as if there
    // were more exponents: the caller decides what an overflow becomes. Not for NaN.
    static constexpr uint32_t round(uint32_t magnitude) {
        constexpr int dropped = 23 - mantissa_bits;
        // Normal: add just under half a unit, plus one if the code below is odd, then drop the lower bits. A carry out
        // of the mantissa increments the exponent, which is what rounding up to the next power of two means.
        const uint32_t odd = (magnitude >> dropped) & 1;
        const uint32_t normal = (magnitude + ((1u << (dropped - 1)) - 1) + odd) >> dropped;
        if constexpr (bias == 127) return normal;  // bfloat16: float32's own exponents, subnormals included

        // Subnormal: multiples of one step. Add the power of two whose last mantissa bit is worth that step: the float
        // addition itself then rounds to a multiple of it, and the multiple stands in the low bits of the sum.
        constexpr uint32_t counter = power_of_two(1 - bias - mantissa_bits + 23);
        const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(counter);
        const uint32_t subnormal = std::bit_cast<uint32_t>(sum) - counter;
        return magnitude < power_of_two(1 - bias) ? subnormal : normal - (uint32_t(127 - bias) << mantissa_bits);
    }

    // Code of a finite magnitude -> its float32 bits (exact). An infinity of the format comes out as 2^(bias + 1).
    static constexpr uint32_t widen(uint32_t code) {
        const uint32_t shifted = code << (23 - mantissa_bits);
        if constexpr (bias == 127) return shifted;
        // Subnormal: append the mantissa to the implied 1 of the smallest normal number, and subtract that 1 again.
        constexpr uint32_t smallest_normal = power_of_two(1 - bias);
        const float subnormal = std::bit_cast<float>(shifted | smallest_normal) - std::bit_cast<float>(smallest_normal);
        const bool is_subnormal = code < (1u << mantissa_bits);
        return is_subnormal ? std::bit_cast<uint32_t>(subnormal) : shifted + (uint32_t(127 - bias) << 23);
    }
};

constexpr uint16_t float_to_half_bits(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
    const uint32_t code = std::min(SmallFloat<5, 10>::round(magnitude), SmallFloat<5, 10>::infinity);
    return uint16_t(magnitude > 0x7f800000 ? 0x7fff : ((bits >> 16) & 0x8000) | code);
}

constexpr float half_bits_to_float(uint16_t code) {
    const uint32_t magnitude = code & SmallFloat<5, 10>::magnitude_mask;
    uint32_t bits = SmallFloat<5, 10>::widen(magnitude);
    bits = magnitude >= SmallFloat<5, 10>::infinity ? 0x7f800000 : bits;
    bits |= uint32_t(code & 0x8000) << 16;
    return std::bit_cast<float>(magnitude > SmallFloat<5, 10>::infinity ? 0x7fffffff : bits);
}

// double -> float, "to odd": an inexact result takes the neighbour whose last bit is 1. That bit records that the
// result was inexact, so that rounding again, to a format at least two bits shorter, gives the same as rounding once
// (with two ordinary roundings, the first can create a tie that the exact value is not). Not for NaN.
constexpr float round_to_odd(double x) {
    const float nearest = float(x);
    if (double(nearest) == x) return nearest;
    const bool too_far = (nearest > x) == (x > 0);
    return std::bit_cast<float>((std::bit_cast<uint32_t>(nearest) - (too_far ? 1 : 0)) | 1);
}

// An integer as a double; integers of more than 53 bits are rounded to odd for the same reason.
template <std::integral Integer>
constexpr double integer_to_double(Integer value) {
    constexpr int64_t exact = int64_t(1) << 53;
    if (sizeof(Integer) < 8 || (std::cmp_less(value, exact) && std::cmp_greater(value, -exact))) return double(value);
    return double((value >> 11) | ((value & 0x7ff) != 0 ? 1 : 0)) * 2048.0;
}

// Towards zero and saturating, as the GPU converts to integers. NaN becomes 0, or the top bit alone in 64 bits.
template <std::integral Integer>
constexpr Integer float_to_integer(float x) {
    constexpr Integer lowest = std::numeric_limits<Integer>::min(), highest = std::numeric_limits<Integer>::max();
    if (x != x) return sizeof(Integer) == 8 ? Integer(uint64_t(1) << 63) : 0;
    if (x <= float(lowest)) return lowest;
    if (x >= float(highest)) return highest;
    return Integer(x);
}

// a * b + c rounded to odd in double, for a, b, c with at most 24 bits of mantissa. The product is exact; Knuth's
// two-sum finds what the addition lost.
constexpr double fma_to_odd(double a, double b, double c) {
    const double product = a * b, sum = product + c;
    const double c_seen = sum - product;
    const double lost = (product - (sum - c_seen)) + (c - c_seen);
    const uint64_t bits = std::bit_cast<uint64_t>(sum);
    if (!(lost < 0 || lost > 0) || (bits & 1)) return sum;  // exact, not finite, or odd already
    return std::bit_cast<double>((lost > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

// The operators and functions that __half and __nv_bfloat16 have in common. Friends defined in the class are found by
// argument, and accept what converts to Number: `x += 1.0f` and `__hmul(x, 2.0f)` compile, as under nvcc.
template <class Number>
struct Arithmetic {
    static constexpr uint16_t bits(Number a) { return std::bit_cast<uint16_t>(a); }
    static constexpr Number from_bits(unsigned code) { return std::bit_cast<Number>(uint16_t(code)); }

    friend constexpr Number __hadd(Number a, Number b) { return float(a) + float(b); }
    friend constexpr Number __hsub(Number a, Number b) { return float(a) - float(b); }
    friend constexpr Number __hmul(Number a, Number b) { return float(a) * float(b); }
    friend constexpr Number __hdiv(Number a, Number b) { return float(a) / float(b); }
    friend constexpr Number __hfma(Number a, Number b, Number c) { return fma_to_odd(float(a), float(b), float(c)); }
    friend constexpr Number __hneg(Number a) { return __hisnan(a) ? from_bits(0x7fff) : from_bits(bits(a) ^ 0x8000); }
    friend constexpr Number __habs(Number a) { return __hisnan(a) ? from_bits(0x7fff) : from_bits(bits(a) & 0x7fff); }

    friend constexpr bool __hisnan(Number a) { return float(a) != float(a); }
    friend constexpr int __hisinf(Number a) {  // -1, 0 or 1
        const float value = a;
        return value - value != 0 && value == value ? (value > 0 ? 1 : -1) : 0;
    }
    friend constexpr bool __heq(Number a, Number b) { return float(a) == float(b); }
    friend constexpr bool __hne(Number a, Number b) { return float(a) < float(b) || float(a) > float(b); }
    friend constexpr bool __hlt(Number a, Number b) { return float(a) < float(b); }
    friend constexpr bool __hle(Number a, Number b) { return float(a) <= float(b); }
    friend constexpr bool __hgt(Number a, Number b) { return float(a) > float(b); }
    friend constexpr bool __hge(Number a, Number b) { return float(a) >= float(b); }

    // If one operand is NaN, the result is the other; -0 is below +0.
    friend constexpr Number __hmax(Number a, Number b) {
        if (__hisnan(a) && __hisnan(b)) return from_bits(0x7fff);
        if (__heq(a, b)) return from_bits(bits(a) & bits(b));
        return __hisnan(b) || __hgt(a, b) ? a : b;
    }
    friend constexpr Number __hmin(Number a, Number b) {
        if (__hisnan(a) && __hisnan(b)) return from_bits(0x7fff);
        if (__heq(a, b)) return from_bits(bits(a) | bits(b));
        return __hisnan(b) || __hlt(a, b) ? a : b;
    }
    // The same, but if one operand is NaN, the result is NaN.
    friend constexpr Number __hmax_nan(Number a, Number b) {
        return __hisnan(a) || __hisnan(b) ? from_bits(0x7fff) : __hmax(a, b);
    }
    friend constexpr Number __hmin_nan(Number a, Number b) {
        return __hisnan(a) || __hisnan(b) ? from_bits(0x7fff) : __hmin(a, b);
    }

    friend constexpr Number operator+(const Number& a) { return a; }
    friend constexpr Number operator-(const Number& a) { return __hneg(a); }
    friend constexpr Number operator+(const Number& a, const Number& b) { return __hadd(a, b); }
    friend constexpr Number operator-(const Number& a, const Number& b) { return __hsub(a, b); }
    friend constexpr Number operator*(const Number& a, const Number& b) { return __hmul(a, b); }
    friend constexpr Number operator/(const Number& a, const Number& b) { return __hdiv(a, b); }
    friend constexpr Number& operator+=(Number& a, const Number& b) { return a = __hadd(a, b); }
    friend constexpr Number& operator-=(Number& a, const Number& b) { return a = __hsub(a, b); }
    friend constexpr Number& operator*=(Number& a, const Number& b) { return a = __hmul(a, b); }
    friend constexpr Number& operator/=(Number& a, const Number& b) { return a = __hdiv(a, b); }
    friend constexpr bool operator==(const Number& a, const Number& b) { return __heq(a, b); }
    friend constexpr bool operator!=(const Number& a, const Number& b) { return !__heq(a, b); }
    friend constexpr bool operator<(const Number& a, const Number& b) { return __hlt(a, b); }
    friend constexpr bool operator<=(const Number& a, const Number& b) { return __hle(a, b); }
    friend constexpr bool operator>(const Number& a, const Number& b) { return __hgt(a, b); }
    friend constexpr bool operator>=(const Number& a, const Number& b) { return __hge(a, b); }
};

// The same for a pair in one 32-bit register (__half2, __nv_bfloat162): each lane on its own.
template <class Pair>
struct PairArithmetic {
    friend constexpr Pair __hadd2(Pair a, Pair b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
    friend constexpr Pair __hsub2(Pair a, Pair b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
    friend constexpr Pair __hmul2(Pair a, Pair b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
    friend constexpr Pair __h2div(Pair a, Pair b) { return {__hdiv(a.x, b.x), __hdiv(a.y, b.y)}; }
    friend constexpr Pair __hfma2(Pair a, Pair b, Pair c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
    friend constexpr Pair __hmax2(Pair a, Pair b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
    friend constexpr Pair __hmin2(Pair a, Pair b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }
    friend constexpr Pair __hneg2(Pair a) { return {__hneg(a.x), __hneg(a.y)}; }
    friend constexpr Pair __habs2(Pair a) { return {__habs(a.x), __habs(a.y)}; }
    friend constexpr float __low2float(Pair a) { return a.x; }
    friend constexpr float __high2float(Pair a) { return a.y; }
    friend constexpr Pair __lowhigh2highlow(Pair a) { return {a.y, a.x}; }

    friend constexpr Pair operator-(const Pair& a) { return __hneg2(a); }
    friend constexpr Pair operator+(const Pair& a, const Pair& b) { return __hadd2(a, b); }
    friend constexpr Pair operator-(const Pair& a, const Pair& b) { return __hsub2(a, b); }
    friend constexpr Pair operator*(const Pair& a, const Pair& b) { return __hmul2(a, b); }
    friend constexpr Pair operator/(const Pair& a, const Pair& b) { return __h2div(a, b); }
    friend constexpr Pair& operator+=(Pair& a, const Pair& b) { return a = __hadd2(a, b); }
    friend constexpr Pair& operator-=(Pair& a, const Pair& b) { return a = __hsub2(a, b); }
    friend constexpr Pair& operator*=(Pair& a, const Pair& b) { return a = __hmul2(a, b); }
    friend constexpr Pair& operator/=(Pair& a, const Pair& b) { return a = __h2div(a, b); }
    friend constexpr bool operator==(const Pair& a, const Pair& b) { return a.x == b.x && a.y == b.y; }
};

}  // namespace cuda_cpu

struct __nv_bfloat16;

// The bare bits, for code that moves them about.
struct alignas(2) __half_raw {
    unsigned short x;
};
struct alignas(4) __half2_raw {
    unsigned short x, y;
};

struct alignas(2) __half : cuda_cpu::Arithmetic<__half> {
    __half() = default;  // not initialised, like a float
    constexpr __half(const __half_raw& raw) : __x(raw.x) {}
    constexpr __half(float value) : __x(cuda_cpu::float_to_half_bits(value)) {}
    constexpr __half(double value)
        : __x(value != value ? 0x7fff : cuda_cpu::float_to_half_bits(cuda_cpu::round_to_odd(value))) {}
    constexpr __half(std::integral auto value) : __half(cuda_cpu::integer_to_double(value)) {}
    explicit constexpr __half(__nv_bfloat16 value);  // in cuda_bf16.h

    constexpr operator __half_raw() const { return {__x}; }
    constexpr operator float() const { return cuda_cpu::half_bits_to_float(__x); }
    constexpr operator bool() const { return (__x & 0x7fff) != 0; }
    template <std::integral Integer>
    constexpr operator Integer() const {
        return cuda_cpu::float_to_integer<Integer>(float(*this));
    }

  protected:
    unsigned short __x;
};

struct alignas(4) __half2 : cuda_cpu::PairArithmetic<__half2> {
    __half x, y;  // x in the low half of the word
    __half2() = default;
    constexpr __half2(const __half& low, const __half& high) : x(low), y(high) {}
    constexpr __half2(const __half2_raw& raw) : x(__half_raw{raw.x}), y(__half_raw{raw.y}) {}
    constexpr operator __half2_raw() const { return {__half_raw(x).x, __half_raw(y).x}; }
};

using half = __half;
using half2 = __half2;
using nv_half = __half;
using nv_half2 = __half2;
using __nv_half = __half;
using __nv_half2 = __half2;

constexpr __half __float2half(float value) { return value; }
constexpr __half __float2half_rn(float value) { return value; }
constexpr __half __double2half(double value) { return value; }
constexpr float __half2float(__half value) { return value; }

constexpr unsigned short __half_as_ushort(__half value) { return __half_raw(value).x; }
constexpr short __half_as_short(__half value) { return short(__half_raw(value).x); }
constexpr __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
constexpr __half __short_as_half(short bits) { return __half_raw{static_cast<unsigned short>(bits)}; }

constexpr __half2 make_half2(__half x, __half y) { return {x, y}; }
constexpr __half2 __halves2half2(__half low, __half high) { return {low, high}; }
constexpr __half2 __half2half2(__half both) { return {both, both}; }
constexpr __half2 __float2half2_rn(float both) { return {both, both}; }
constexpr __half2 __floats2half2_rn(float low, float high) { return {low, high}; }
constexpr __half2 __float22half2_rn(float2 pair) { return {pair.x, pair.y}; }
constexpr float2 __half22float2(__half2 pair) { return {float(pair.x), float(pair.y)}; }
constexpr __half __low2half(__half2 pair) { return pair.x; }
constexpr __half __high2half(__half2 pair) { return pair.y; }
