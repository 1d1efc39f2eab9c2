// cuda_fp8.h on the CPU: the two 8-bit floats that fp8 training uses.
//
//     e4m3   3 mantissa bits, largest 448, no infinity, one NaN (0x7f, and 0xff with the sign):
//            weights and activations, where the digits matter
//     e5m2   2 mantissa bits, largest 57344, infinity and NaN as in IEEE 754, the upper half of a __half:
//            gradients, where the range matters
//
// Both need scaling: a tensor is multiplied by a factor that moves its largest value near the largest code, and the
// matrix multiplication divides its result by the factor (cublasLt.h, the SCALE_POINTER attributes).
//
// A value too large for the format depends on the saturation mode: __NV_SATFINITE gives the largest finite value, for
// infinity too; __NV_NOSAT gives infinity (e5m2) or NaN (e4m3). The classes' constructors saturate. All conversions
// between a class and other types are explicit. cuda_fp16.h compares the formats and explains the rounding.
#pragma once

#include "cuda_bf16.h"

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;  // first element in the low byte
using __nv_fp8x4_storage_t = unsigned int;

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

constexpr __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t saturate,
                                                   __nv_fp8_interpretation_t interpretation) {
    using E4M3 = cuda_cpu::SmallFloat<4, 3>;
    using E5M2 = cuda_cpu::SmallFloat<5, 2>;
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
    const uint32_t rounded = interpretation == __NV_E4M3 ? E4M3::round(magnitude) : E5M2::round(magnitude);
    const uint32_t largest = interpretation == __NV_E4M3 ? 0x7e : 0x7b;
    // The code after the largest number is e4m3's NaN and e5m2's infinity.
    const uint32_t code = std::min(rounded, saturate == __NV_SATFINITE ? largest : largest + 1);
    return __nv_fp8_storage_t(magnitude > 0x7f800000 ? 0x7f : ((bits >> 24) & 0x80) | code);
}

constexpr __nv_fp8_storage_t __nv_cvt_double_to_fp8(double x, __nv_saturation_t saturate,
                                                    __nv_fp8_interpretation_t interpretation) {
    if (x == x) return __nv_cvt_float_to_fp8(cuda_cpu::round_to_odd(x), saturate, interpretation);
    // From double, and only from double, NVIDIA keeps a NaN's sign and (e5m2) its second mantissa bit.
    const uint64_t bits = std::bit_cast<uint64_t>(x);
    const unsigned code = interpretation == __NV_E4M3 ? 0x7f : 0x7e | ((bits >> 50) & 1);
    return __nv_fp8_storage_t(((bits >> 56) & 0x80) | code);
}

constexpr __nv_fp8_storage_t __nv_cvt_halfraw_to_fp8(__half_raw x, __nv_saturation_t saturate,
                                                     __nv_fp8_interpretation_t interpretation) {
    return __nv_cvt_float_to_fp8(__half(x), saturate, interpretation);
}

constexpr __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_fp8(__nv_bfloat16_raw x, __nv_saturation_t saturate,
                                                         __nv_fp8_interpretation_t interpretation) {
    return __nv_cvt_float_to_fp8(__nv_bfloat16(x), saturate, interpretation);
}

constexpr __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t saturate,
                                                        __nv_fp8_interpretation_t interpretation) {
    return __nv_fp8x2_storage_t(__nv_cvt_float_to_fp8(x.x, saturate, interpretation) |
                                __nv_cvt_float_to_fp8(x.y, saturate, interpretation) << 8);
}

// Exact: every fp8 number is a half.
constexpr __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t interpretation) {
    const bool is_nan = (x & 0x7f) > (interpretation == __NV_E4M3 ? 0x7e : 0x7c);
    const uint16_t e5m2 = uint16_t(x << 8);
    const uint32_t e4m3 = cuda_cpu::SmallFloat<4, 3>::widen(x & 0x7f) | uint32_t(x & 0x80) << 24;
    const uint16_t number =
        interpretation == __NV_E4M3 ? cuda_cpu::float_to_half_bits(std::bit_cast<float>(e4m3)) : e5m2;
    return {is_nan ? uint16_t(0x7fff) : number};
}

constexpr __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t interpretation) {
    return {__nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(x), interpretation).x,
            __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(x >> 8), interpretation).x};
}

namespace cuda_cpu {

// Directly to float, not through half: faster in a loop.
constexpr float fp8_bits_to_float(__nv_fp8_storage_t x, __nv_fp8_interpretation_t interpretation) {
    if (interpretation == __NV_E5M2) return half_bits_to_float(uint16_t(x << 8));
    const uint32_t bits = SmallFloat<4, 3>::widen(x & 0x7f) | uint32_t(x & 0x80) << 24;
    return std::bit_cast<float>((x & 0x7f) == 0x7f ? 0x7fffffff : bits);
}

template <__nv_fp8_interpretation_t interpretation>
struct Fp8 {
    __nv_fp8_storage_t __x;

    Fp8() = default;  // not initialised, like a float
    explicit constexpr Fp8(float value) : __x(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, interpretation)) {}
    explicit constexpr Fp8(double value) : __x(__nv_cvt_double_to_fp8(value, __NV_SATFINITE, interpretation)) {}
    explicit constexpr Fp8(__half value) : Fp8(float(value)) {}
    explicit constexpr Fp8(__nv_bfloat16 value) : Fp8(float(value)) {}
    explicit constexpr Fp8(std::integral auto value) : Fp8(float(value)) {}

    explicit constexpr operator float() const { return fp8_bits_to_float(__x, interpretation); }
    explicit constexpr operator double() const { return float(*this); }
    explicit constexpr operator __half() const { return __nv_cvt_fp8_to_halfraw(__x, interpretation); }
    explicit constexpr operator __nv_bfloat16() const { return float(*this); }
    explicit constexpr operator bool() const { return (__x & 0x7f) != 0; }
    template <std::integral Integer>
    explicit constexpr operator Integer() const {
        return float_to_integer<Integer>(float(*this));
    }
};

template <__nv_fp8_interpretation_t interpretation>
struct alignas(2) Fp8x2 {
    __nv_fp8x2_storage_t __x;

    Fp8x2() = default;
    explicit constexpr Fp8x2(float2 pair) : __x(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, interpretation)) {}
    explicit constexpr Fp8x2(__half2 pair) : Fp8x2(__half22float2(pair)) {}
    explicit constexpr Fp8x2(__nv_bfloat162 pair) : Fp8x2(__bfloat1622float2(pair)) {}
    explicit constexpr operator __half2() const { return __nv_cvt_fp8x2_to_halfraw2(__x, interpretation); }
    explicit constexpr operator float2() const { return __half22float2(__half2(*this)); }
};

template <__nv_fp8_interpretation_t interpretation>
struct alignas(4) Fp8x4 {
    __nv_fp8x4_storage_t __x;

    Fp8x4() = default;
    constexpr Fp8x4(Fp8x2<interpretation> low, Fp8x2<interpretation> high) : __x(low.__x | uint32_t(high.__x) << 16) {}
    explicit constexpr Fp8x4(float4 v) : Fp8x4(Low(float2{v.x, v.y}), Low(float2{v.z, v.w})) {}
    explicit constexpr Fp8x4(__half2 low, __half2 high) : Fp8x4(Low(low), Low(high)) {}
    explicit constexpr Fp8x4(__nv_bfloat162 low, __nv_bfloat162 high) : Fp8x4(Low(low), Low(high)) {}
    explicit constexpr operator float4() const {
        const float2 low = __half22float2(__nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(__x), interpretation));
        const float2 high = __half22float2(__nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(__x >> 16), interpretation));
        return {low.x, low.y, high.x, high.y};
    }

  private:
    using Low = Fp8x2<interpretation>;
};

}  // namespace cuda_cpu

struct __nv_fp8_e4m3 : cuda_cpu::Fp8<__NV_E4M3> {
    using Fp8::Fp8;
};
struct __nv_fp8_e5m2 : cuda_cpu::Fp8<__NV_E5M2> {
    using Fp8::Fp8;
};
struct __nv_fp8x2_e4m3 : cuda_cpu::Fp8x2<__NV_E4M3> {
    using Fp8x2::Fp8x2;
};
struct __nv_fp8x2_e5m2 : cuda_cpu::Fp8x2<__NV_E5M2> {
    using Fp8x2::Fp8x2;
};
struct __nv_fp8x4_e4m3 : cuda_cpu::Fp8x4<__NV_E4M3> {
    using Fp8x4::Fp8x4;
};
struct __nv_fp8x4_e5m2 : cuda_cpu::Fp8x4<__NV_E5M2> {
    using Fp8x4::Fp8x4;
};
