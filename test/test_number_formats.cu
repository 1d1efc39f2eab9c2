// bfloat16, half and fp8: every conversion against the definition of the format, in double, by search.
//
// The references know nothing of bit tricks. A format is the sorted table of its values, each computed from the formula
// in cpu/cuda_fp16.h; rounding is a search for the two neighbours in the table and a comparison of distances. Where the
// standard leaves a choice (NaN, saturation), NVIDIA's headers decide: test/golden/number_formats.bin has their
// answers. Under nvcc the same test checks NVIDIA's own conversions, on the host and in a kernel.
//
//   run:   make test, or build/cpu/run_tests "[number_formats]"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "test.h"

namespace {

struct Format {
    const char* name;
    int exponent_bits, mantissa_bits;
    bool has_infinity;  // otherwise the largest exponent holds numbers too, and only the very last code is NaN
    unsigned nan_code;

    int bias() const { return (1 << (exponent_bits - 1)) - 1; }
    unsigned code_count() const { return 1u << (exponent_bits + mantissa_bits); }  // of one sign
    unsigned infinity() const { return code_count() - (1u << mantissa_bits); }
    unsigned largest() const { return has_infinity ? infinity() - 1 : code_count() - 2; }
    unsigned sign() const { return code_count(); }

    // The defining formula. It knows no infinity: the code after the largest counts as the value it would have.
    double value(unsigned code) const {
        const int exponent = int(code >> mantissa_bits);
        const double fraction = std::ldexp(code & ((1u << mantissa_bits) - 1), -mantissa_bits);
        return exponent == 0 ? std::ldexp(fraction, 1 - bias()) : std::ldexp(1 + fraction, exponent - bias());
    }
};

const Format bfloat16{"bfloat16", 8, 7, true, 0x7fff}, half_{"half", 5, 10, true, 0x7fff};
const Format e4m3{"e4m3", 4, 3, false, 0x7f}, e5m2{"e5m2", 5, 2, true, 0x7f};

class Reference {
  public:
    explicit Reference(const Format& format_) : format(format_) {
        for (unsigned code = 0; code <= format.largest() + 1; ++code) values.push_back(format.value(code));
    }

    // Nearest value, a tie goes to the even code. What rounds to the code after the largest has overflowed.
    unsigned round(double x, bool saturate = false) const {
        if (std::isnan(x)) return format.nan_code;
        const unsigned sign = std::signbit(x) ? format.sign() : 0;
        const double magnitude = std::min(std::fabs(x), values.back());
        const unsigned above = unsigned(std::lower_bound(values.begin(), values.end(), magnitude) - values.begin());
        unsigned code = above;
        if (values[above] != magnitude) {
            const double up = values[above] - magnitude, down = magnitude - values[above - 1];
            code = up < down || (up == down && above % 2 == 0) ? above : above - 1;
        }
        return sign | (saturate ? std::min(code, format.largest()) : code);
    }

    const Format& format;
    std::vector<double> values;
};

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
uint32_t bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
uint32_t bits_of(__half x) { return __half_as_ushort(x); }

// All conversions from one float, in one record.
struct Codes {
    uint16_t bfloat16, half;
    uint8_t e4m3, e4m3_unsaturated, e5m2, e5m2_unsaturated;
    bool operator==(const Codes&) const = default;
};

__host__ __device__ inline Codes convert(float x) {
    return {__bfloat16_as_ushort(__float2bfloat16(x)),
            __half_as_ushort(__float2half(x)),
            __nv_fp8_e4m3(x).__x,
            __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E4M3),
            __nv_fp8_e5m2(x).__x,
            __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E5M2)};
}

__global__ void convert_kernel(const float* x, Codes* codes, int n) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) codes[i] = convert(x[i]);
}

const Reference reference_bfloat16(bfloat16), reference_half(half_), reference_e4m3(e4m3), reference_e5m2(e5m2);

// From double, a conversion must not go through float: that would round twice.
Codes reference(double x) {
    return {uint16_t(reference_bfloat16.round(x)),  uint16_t(reference_half.round(x)),
            uint8_t(reference_e4m3.round(x, true)), uint8_t(reference_e4m3.round(x, false)),
            uint8_t(reference_e5m2.round(x, true)), uint8_t(reference_e5m2.round(x, false))};
}

Codes convert_double(double x) {
    return {__bfloat16_as_ushort(__double2bfloat16(x)),
            __half_as_ushort(__double2half(x)),
            __nv_fp8_e4m3(x).__x,
            __nv_cvt_double_to_fp8(x, __NV_NOSAT, __NV_E4M3),
            __nv_fp8_e5m2(x).__x,
            __nv_cvt_double_to_fp8(x, __NV_NOSAT, __NV_E5M2)};
}

// Each representable value of each format, each tie between two neighbours, and the floats right beside the tie.
std::vector<float> values_and_ties() {
    std::vector<float> list;
    for (const Reference* table : {&reference_bfloat16, &reference_half, &reference_e4m3, &reference_e5m2})
        for (size_t i = 0; i + 1 < table->values.size(); ++i) {
            const float tie = float(table->values[i] / 2 + table->values[i + 1] / 2);
            for (float x : {float(table->values[i]), tie, std::nextafter(tie, 0.f), std::nextafter(tie, INFINITY)}) {
                list.push_back(x);
                list.push_back(-x);
            }
        }
    for (float x : {INFINITY, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min()}) {
        list.push_back(x);
        list.push_back(-x);
    }
    for (uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu})
        list.push_back(std::bit_cast<float>(nan));
    return list;
}

std::string show(double x, const Codes& c) {
    return format("x=%a  bf16 %04x  half %04x  e4m3 %02x %02x  e5m2 %02x %02x", x, c.bfloat16, c.half, c.e4m3,
                  c.e4m3_unsaturated, c.e5m2, c.e5m2_unsaturated);
}

// One Catch2 assertion for a million values: report the first that differs.
template <class Values, class Got, class Want>
void check_all(const Values& values, Got got, Want want) {
    size_t wrong = 0;
    for (const auto& x : values)
        if (!(got(x) == want(x)) && wrong++ == 0)
            UNSCOPED_INFO("got  " << show(x, got(x)) << "\nwant " << show(x, want(x)));
    CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("number formats are plain data of their size", "[number_formats]") {
    STATIC_REQUIRE(sizeof(__nv_bfloat16) == 2);
    STATIC_REQUIRE(sizeof(__half) == 2);
    STATIC_REQUIRE(sizeof(__nv_fp8_e4m3) == 1);
    STATIC_REQUIRE(sizeof(__nv_fp8_e5m2) == 1);
    STATIC_REQUIRE((sizeof(__nv_bfloat162) == 4 && alignof(__nv_bfloat162) == 4));
    STATIC_REQUIRE((sizeof(__half2) == 4 && alignof(__half2) == 4));
    STATIC_REQUIRE((sizeof(__nv_fp8x2_e4m3) == 2 && sizeof(__nv_fp8x4_e5m2) == 4));
#ifdef CUDA_ON_CPU  // NVIDIA's pairs have copy constructors of their own
    STATIC_REQUIRE(std::is_trivially_copyable_v<__nv_bfloat162>);
    STATIC_REQUIRE(std::is_trivially_copyable_v<__half2>);
#endif
    STATIC_REQUIRE(std::is_trivially_copyable_v<__nv_bfloat16>);
    STATIC_REQUIRE(std::is_trivially_copyable_v<__half>);
    STATIC_REQUIRE(std::is_trivially_copyable_v<__nv_fp8_e4m3>);
    STATIC_REQUIRE(std::is_trivially_default_constructible_v<__half>);
    STATIC_REQUIRE(std::is_convertible_v<__half, float>);
    STATIC_REQUIRE(std::is_convertible_v<float, __nv_bfloat16>);
    STATIC_REQUIRE(!std::is_convertible_v<float, __nv_fp8_e4m3>);  // only explicitly
    STATIC_REQUIRE(!std::is_convertible_v<__nv_fp8_e4m3, float>);
}

TEST_CASE("every code converts to the float it stands for", "[number_formats]") {
    const auto check = [](const Format& format, auto to_float) {
        INFO(format.name);
        unsigned wrong = 0;
        for (unsigned code = 0; code < 2 * format.code_count(); ++code) {
            const unsigned magnitude = code % format.code_count();
            const float got = to_float(code);
            uint32_t want = 0x7fffffff;  // NaN
            if (magnitude <= format.largest()) want = bits_of(float(format.value(magnitude)));
            if (magnitude > format.largest() && format.exponent_bits == 8)
                want = magnitude << 16;  // bf16: bits are kept
            if (format.has_infinity && magnitude == format.infinity()) want = bits_of(INFINITY);
            if (code != magnitude && (want < 0x7fffffff)) want |= 0x80000000;
            if (bits_of(got) != want && wrong++ == 0) UNSCOPED_INFO("code " << code << " gives " << got);
        }
        CHECK(wrong == 0);
    };
    check(bfloat16, [](unsigned code) { return __bfloat162float(__ushort_as_bfloat16(uint16_t(code))); });
    check(half_, [](unsigned code) { return __half2float(__ushort_as_half(uint16_t(code))); });
    check(e4m3, [](unsigned code) { return float(std::bit_cast<__nv_fp8_e4m3>(uint8_t(code))); });
    check(e5m2, [](unsigned code) { return float(std::bit_cast<__nv_fp8_e5m2>(uint8_t(code))); });
    check(e4m3, [](unsigned code) { return float(__half(__nv_cvt_fp8_to_halfraw(uint8_t(code), __NV_E4M3))); });
    check(e5m2, [](unsigned code) { return float(__half(__nv_cvt_fp8_to_halfraw(uint8_t(code), __NV_E5M2))); });
}

TEST_CASE("a float rounds to the nearest code, ties to even", "[number_formats]") {
    const std::vector<float> values = values_and_ties();
    check_all(values, convert, reference);

    std::mt19937 random(1);
    std::vector<float> anything(200'000);
    for (float& x : anything) x = std::bit_cast<float>(uint32_t(random()));
    check_all(anything, convert, reference);

    // The same in a kernel: on a GPU, the hardware's conversions.
    const int n = int(values.size());
    float* x = nullptr;
    Codes* codes = nullptr;
    REQUIRE(cudaMalloc(&x, values.size() * sizeof(float)) == cudaSuccess);
    REQUIRE(cudaMalloc(&codes, values.size() * sizeof(Codes)) == cudaSuccess);
    REQUIRE(cudaMemcpy(x, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice) == cudaSuccess);
    convert_kernel<<<(n + 255) / 256, 256>>>(x, codes, n);
    REQUIRE(cudaGetLastError() == cudaSuccess);
    std::vector<Codes> got(values.size());
    REQUIRE(cudaMemcpy(got.data(), codes, values.size() * sizeof(Codes), cudaMemcpyDeviceToHost) == cudaSuccess);
    size_t wrong = 0;
    for (size_t i = 0; i < values.size(); ++i)
        if (!(got[i] == reference(values[i])) && wrong++ == 0) UNSCOPED_INFO(show(values[i], got[i]));
    CHECK(wrong == 0);
    cudaFree(x);
    cudaFree(codes);
}

TEST_CASE("a double rounds once", "[number_formats]") {
    // Ties of each format, and doubles so close to a tie that float cannot tell them from it.
    std::vector<double> list;
    for (const Reference* table : {&reference_half, &reference_e4m3, &reference_e5m2, &reference_bfloat16})
        for (size_t i = 0; i + 1 < table->values.size(); i += 3) {
            const double tie = table->values[i] / 2 + table->values[i + 1] / 2;
            for (double x : {tie, std::nextafter(tie, 0.0), std::nextafter(tie, INFINITY)})
                list.push_back(x), list.push_back(-x);
        }
    for (double x : {1e300, 1e-300, double(INFINITY), 0.0}) list.push_back(x), list.push_back(-x);
    check_all(list, convert_double, reference);
}

TEST_CASE("integers convert both ways", "[number_formats]") {
    for (long long x : {0ll, 1ll, -3ll, 255ll, 2049ll, 65504ll, 65519ll, 65520ll, -70000ll, (1ll << 24) + 1, 1ll << 62,
                        (129ll << 54) + 1, -(129ll << 54) - 1}) {  // the last two: 1 beyond a tie of bfloat16
        INFO(x);
        const unsigned magnitude_bfloat16 =
            (x == (129ll << 54) + 1 || x == -(129ll << 54) - 1)
                ? reference_bfloat16.round(std::nextafter(std::ldexp(129, 54), INFINITY))
                : reference_bfloat16.round(std::fabs(double(x)));
        CHECK(bits_of(__nv_bfloat16(x)) == (magnitude_bfloat16 | (x < 0 ? 0x8000 : 0)));
        CHECK(bits_of(__half(x)) == reference_half.round(double(x)));
    }
    CHECK(int(__half(-2.75f)) == -2);
    CHECK(int(__nv_bfloat16(3.9f)) == 3);
    CHECK(unsigned(__nv_bfloat16(-1.0f)) == 0);
    CHECK(int(__nv_bfloat16(1e20f)) == std::numeric_limits<int>::max());
    CHECK(int(__half(NAN)) == 0);
    CHECK(bool(__half(-0.0f)) == false);
}

TEST_CASE("arithmetic rounds the exact result once", "[number_formats]") {
    std::mt19937 random(2);
    // Exponents small enough that sums, products and fused multiply-adds are exact in double.
    const auto draw = [&](const Format& format) {
        const unsigned exponent = unsigned(format.bias()) - 6 + random() % 12;
        return (random() & 1) * format.sign() | exponent << format.mantissa_bits |
               random() % (1u << format.mantissa_bits);
    };
    unsigned wrong = 0;
    const auto check = [&](auto a, auto b, [[maybe_unused]] auto c, const Reference& reference_) {
        const double x = float(a), y = float(b);
        wrong += bits_of(a + b) != reference_.round(x + y);
        wrong += bits_of(a - b) != (x == y ? 0 : reference_.round(x - y));
        wrong += bits_of(a * b) != reference_.round(x * y);
        wrong += bits_of(a / b) != reference_.round(x / y);
        wrong += bits_of(-a) != reference_.round(-x);
        wrong += bits_of(__hmax(a, b)) != reference_.round(std::max(x, y));
        wrong += bits_of(__hmin(a, b)) != reference_.round(std::min(x, y));
        wrong += (a < b) != (x < y) || (a == b) != (x == y) || (a >= b) != (x >= y);
#ifdef CUDA_ON_CPU  // on a GPU, only in device code
        wrong += bits_of(__hfma(a, b, c)) != reference_.round(x * y + float(c));
#endif
    };
    for (int i = 0; i < 100'000; ++i) {
        const auto half_operand = [&] { return __ushort_as_half(uint16_t(draw(half_))); };
        const auto bfloat16_operand = [&] { return __ushort_as_bfloat16(uint16_t(draw(bfloat16))); };
        check(half_operand(), half_operand(), half_operand(), reference_half);
        check(bfloat16_operand(), bfloat16_operand(), bfloat16_operand(), reference_bfloat16);
    }
    CHECK(wrong == 0);

    const __half nan = __float2half(NAN), zero = 0.0f, minus_zero = -0.0f, one = 1.0f;
    CHECK(bits_of(__hmax(nan, one)) == bits_of(one));
    CHECK(bits_of(__hmax_nan(nan, one)) == 0x7fff);
    CHECK(bits_of(__hmax(minus_zero, zero)) == bits_of(zero));
    CHECK(bits_of(__hmin(zero, minus_zero)) == bits_of(minus_zero));
    CHECK((__hisnan(nan) && nan != nan && !(nan == nan) && !(nan < one)));
    CHECK((__hisinf(__half(INFINITY)) == 1 && __hisinf(__nv_bfloat16(-INFINITY)) == -1 && __hisinf(one) == 0));
#ifdef CUDA_ON_CPU
    // The product is a tie; an addend far below double's last bit must still decide it.
    const __nv_bfloat16 a = 1.0078125f, b = 1.5f;  // a * b = 1.51171875, halfway between two codes
    const __nv_bfloat16 tiny = 1e-30f;
    CHECK(float(__hfma(a, b, tiny)) == 1.515625f);
    CHECK(float(__hfma(a, b, -tiny)) == 1.5078125f);
#endif
}

TEST_CASE("pairs keep their order", "[number_formats]") {
    const float2 pair{1.5f, -2.0f};
    CHECK(bits_of(__low2bfloat16(__float22bfloat162_rn(pair))) == bits_of(__nv_bfloat16(1.5f)));
    CHECK(bits_of(__high2half(__floats2half2_rn(pair.x, pair.y))) == bits_of(__half(-2.0f)));
    const __half2_raw halves = __float22half2_rn(pair);
    CHECK(std::bit_cast<uint32_t>(halves) == (bits_of(__half(-2.0f)) << 16 | bits_of(__half(1.5f))));
    CHECK(__half22float2(__float22half2_rn(pair)).y == -2.0f);
    CHECK(__bfloat1622float2(__floats2bfloat162_rn(3.0f, 4.0f)).x == 3.0f);
    CHECK(__half22float2(__half2(__nv_fp8x2_e4m3(pair))).y == -2.0f);
    CHECK(__nv_fp8x2_e5m2(pair).__x == (__nv_fp8_e5m2(-2.0f).__x << 8 | __nv_fp8_e5m2(1.5f).__x));
    const float4 four = __nv_fp8x4_e4m3(float4{1, 2, 3, 4}).operator float4();
    CHECK((four.x == 1 && four.y == 2 && four.z == 3 && four.w == 4));
}

TEST_CASE("NVIDIA's conversions, bit for bit", "[number_formats]") {
    const auto path = std::filesystem::path(__FILE__).parent_path() / "golden" / "number_formats.bin";
    std::ifstream file(path, std::ios::binary);
    INFO(path);
    REQUIRE(file);
    const auto read = [&]<class T>(T value) {
        file.read(reinterpret_cast<char*>(&value), sizeof value);
        return value;
    };

    unsigned wrong = 0;
    const uint32_t n_floats = read(uint32_t());
    REQUIRE(n_floats == 13000);
    for (uint32_t i = 0; i < n_floats; ++i) {
        const float x = std::bit_cast<float>(read(uint32_t()));
        const Codes want = read(Codes());
        if (!(convert(x) == want) && wrong++ == 0)
            UNSCOPED_INFO("got  " << show(x, convert(x)) << "\nwant " << show(x, want));
    }
    CHECK(wrong == 0);

    const uint32_t n_codes = read(uint32_t());
    REQUIRE(n_codes == 2048);
    for (uint32_t i = 0; i < n_codes; ++i) {
        const uint16_t code = read(uint16_t());
        read(uint16_t());
        wrong += bits_of(__half2float(__ushort_as_half(code))) != read(uint32_t());
        wrong += bits_of(__bfloat162float(__ushort_as_bfloat16(code))) != read(uint32_t());
    }
    for (uint32_t code = 0; code < 256; ++code) {
        wrong += __nv_cvt_fp8_to_halfraw(uint8_t(code), __NV_E4M3).x != read(uint16_t());
        wrong += __nv_cvt_fp8_to_halfraw(uint8_t(code), __NV_E5M2).x != read(uint16_t());
    }
    CHECK(wrong == 0);
    REQUIRE(file);
    CHECK(file.peek() == EOF);
}
