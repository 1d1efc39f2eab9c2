// cuda_bf16.h on the CPU: __nv_bfloat16, the upper half of a float32.
//
// Eight exponent bits, like float32, so that it covers the same range and gradients need no loss scaling; seven
// mantissa bits: two to three decimal digits. cuda_fp16.h compares the formats and explains the rounding; here the
// rounding is simplest, because a bfloat16 is a float32 without its last 16 bits.
//
// Every function has the name and the result of NVIDIA's. A NaN that is rounded becomes 0x7fff; widening to float
// keeps all bits, the payload of a NaN included.
#pragma once

#include "cuda_fp16.h"

namespace cuda_cpu {

constexpr uint16_t float_to_bfloat16_bits(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = SmallFloat<8, 7>::round(bits);  // keeps the sign; an overflow carries to infinity
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
}

constexpr float bfloat16_bits_to_float(uint16_t code) { return std::bit_cast<float>(uint32_t(code) << 16); }

}  // namespace cuda_cpu

// The bare bits, for code that moves them about.
struct alignas(2) __nv_bfloat16_raw {
    unsigned short x;
};
struct alignas(4) __nv_bfloat162_raw {
    unsigned short x, y;
};

struct alignas(2) __nv_bfloat16 : cuda_cpu::Arithmetic<__nv_bfloat16> {
    __nv_bfloat16() = default;  // not initialised, like a float
    constexpr __nv_bfloat16(const __nv_bfloat16_raw& raw) : __x(raw.x) {}
    constexpr __nv_bfloat16(float value) : __x(cuda_cpu::float_to_bfloat16_bits(value)) {}
    constexpr __nv_bfloat16(double value)
        : __x(value != value ? 0x7fff : cuda_cpu::float_to_bfloat16_bits(cuda_cpu::round_to_odd(value))) {}
    constexpr __nv_bfloat16(std::integral auto value) : __nv_bfloat16(cuda_cpu::integer_to_double(value)) {}
    explicit constexpr __nv_bfloat16(__half value) : __nv_bfloat16(float(value)) {}

    constexpr operator __nv_bfloat16_raw() const { return {__x}; }
    constexpr operator float() const { return cuda_cpu::bfloat16_bits_to_float(__x); }
    constexpr operator bool() const { return (__x & 0x7fff) != 0; }
    template <std::integral Integer>
    constexpr operator Integer() const {
        return cuda_cpu::float_to_integer<Integer>(float(*this));
    }

  protected:
    unsigned short __x;
};

constexpr __half::__half(__nv_bfloat16 value) : __half(float(value)) {}

struct alignas(4) __nv_bfloat162 : cuda_cpu::PairArithmetic<__nv_bfloat162> {
    __nv_bfloat16 x, y;  // x in the low half of the word
    __nv_bfloat162() = default;
    constexpr __nv_bfloat162(const __nv_bfloat16& low, const __nv_bfloat16& high) : x(low), y(high) {}
    constexpr __nv_bfloat162(const __nv_bfloat162_raw& raw)
        : x(__nv_bfloat16_raw{raw.x}), y(__nv_bfloat16_raw{raw.y}) {}
    constexpr operator __nv_bfloat162_raw() const { return {__nv_bfloat16_raw(x).x, __nv_bfloat16_raw(y).x}; }
};

using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

constexpr __nv_bfloat16 __float2bfloat16(float value) { return value; }
constexpr __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
constexpr __nv_bfloat16 __double2bfloat16(double value) { return value; }
constexpr float __bfloat162float(__nv_bfloat16 value) { return value; }

constexpr unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return __nv_bfloat16_raw(value).x; }
constexpr short __bfloat16_as_short(__nv_bfloat16 value) { return short(__nv_bfloat16_raw(value).x); }
constexpr __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16_raw{bits}; }
constexpr __nv_bfloat16 __short_as_bfloat16(short bits) { return __nv_bfloat16_raw{static_cast<unsigned short>(bits)}; }

constexpr __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
constexpr __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
constexpr __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 both) { return {both, both}; }
constexpr __nv_bfloat162 __float2bfloat162_rn(float both) { return {both, both}; }
constexpr __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {low, high}; }
constexpr __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return {pair.x, pair.y}; }
constexpr float2 __bfloat1622float2(__nv_bfloat162 pair) { return {float(pair.x), float(pair.y)}; }
constexpr __nv_bfloat16 __low2bfloat16(__nv_bfloat162 pair) { return pair.x; }
constexpr __nv_bfloat16 __high2bfloat16(__nv_bfloat162 pair) { return pair.y; }
