// test/test_gelu.cu: GELU against the tanh formula in float64.
#include "layers/layers.h"
#include "reference.h"

#include <cmath>

namespace {

const double kRoot = std::sqrt(2 / M_PI);
constexpr double kUnit = 0x1p-24;           // float32's unit roundoff: the arithmetic is float32 for every dtype
constexpr double kHalfSubnormal = 0x1p-25;  // half of f16's smallest step: what rounding costs below its normal numbers

// The sizes around a chunk: 4 and 8 on the GPU, 32 on the CPU; and around a block of 256 chunks of 32.
const int64_t kSizes[] = {1, 3, 7, 8, 9, 31, 32, 33, 1000, 1003, 8192, 8195};

}  // namespace

TEST_CASE("gelu: the reference's derivative is that of the reference", "[gelu]") {
    const auto x = random_values(40, 1, 3.0);
    const auto sum = [](const std::vector<double>& v) {
        double total = 0;
        for (double value : v) total += gelu(value);
        return total;
    };
    // Central differences with step h = 1e-5: h^2/6 |gelu'''| < 1e-10, and 1e-16 / h of rounding in a sum of about 100.
    for (const auto& [i, derivative] : finite_differences(sum, x))
        CHECK(gelu_derivative(x[i]) == Approx(derivative).margin(1e-8));
}

TEST_CASE("gelu against float64", "[gelu][counted]") {
    for (DType dtype : kFloatDTypes)
        for (int64_t n : kSizes) {
            const auto x = rounded(random_values(n, 2, 3.0), dtype), dy = rounded(random_values(n, 3), dtype);
            Buffer inp(dtype, {n}, x), dout(dtype, {n}, dy), out(dtype, {n}), dinp(dtype, {n});
            gelu_forward(out, inp, device().stream);
            gelu_backward(dinp, dout, inp, device().stream);
            std::vector<double> y, dx;
            for (size_t i = 0; i < x.size(); ++i) {
                y.push_back(gelu(x[i]));
                dx.push_back(dy[i] * gelu_derivative(x[i]));
            }
            // Forward: y = x s(v). v has a relative error of at most 5 units, exp(-|v|) thus |v| times that, and
            // |v| exp(-|v|) <= 1/e: 2 units; the exponential, the sum, the quotient and the product add up to 6.
            const std::string what = concat("n = ", n, ", ", dtype_name(dtype));
            const double u = unit_roundoff(dtype), f16_extra = dtype == DType::f16 ? kHalfSubnormal : 0;
            check_close(out.values(), y, u + 8 * kUnit, 8 * kUnit * largest(x) + f16_extra, "gelu forward, " + what);
            // Backward: the second term is x v' s (1 - s) with |x v'| < 3 |v|, its error 5 units times 3 v^2 exp(-|v|)
            // <= 1.7: 9 units; and 7 for the first term and the sum.
            check_close(dinp.values(), dx, u + 8 * kUnit, 16 * kUnit * largest(dy) + f16_extra,
                        "gelu backward, " + what);
        }
}

TEST_CASE("gelu keeps its digits in the negative tail", "[gelu]") {
    // Here 1 + tanh(u) would cancel: from x = -5.5 on float32 gives 0. The error is that of exp(v): 5 |v| units,
    // and 8 more.
    std::vector<double> x, y;
    for (double value = -9; value < 0; value += 0.25) x.push_back(value);
    for (double value : x) y.push_back(value / (1 + std::exp(-2 * kRoot * (value + 0.044715 * value * value * value))));
    const int64_t n = static_cast<int64_t>(x.size());
    Buffer inp(DType::f32, {n}, x), out(DType::f32, {n});
    gelu_forward(out, inp, device().stream);
    const double v = 2 * kRoot * (9 + 0.044715 * 729);
    check_close(out.values(), y, (5 * v + 8) * kUnit, 0, "gelu of -9 to 0");
}

TEST_CASE("gelu's error is below 8 units of x", "[gelu]") {
    std::vector<double> x;
    for (double value = -12; value < 12; value += 1.0 / 1024) x.push_back(value);
    const int64_t n = static_cast<int64_t>(x.size());
    Buffer inp(DType::f32, {n}, x), out(DType::f32, {n});
    gelu_forward(out, inp, device().stream);
    const auto y = out.values();
    for (size_t i = 0; i < x.size(); ++i)
        if (!(std::abs(y[i] - gelu(x[i])) <= 8 * kUnit * std::abs(x[i])))
            FAIL("gelu(" << x[i] << ") = " << y[i] << ", expected " << gelu(x[i]));
}

TEST_CASE("gelu far out is the identity and zero", "[gelu]") {
    for (DType dtype : kFloatDTypes) {
        const double far = dtype == DType::f16 ? 6e4 : 1e38;  // where v' overflows
        const std::vector<double> x = rounded({1e4, -1e4, 100, -100, far, -far, 0.0, -0.0}, dtype);
        Buffer inp(dtype, {8}, x), out(dtype, {8}), ones(dtype, {8}, std::vector<double>(8, 1.0)), dinp(dtype, {8});
        gelu_forward(out, inp, device().stream);
        gelu_backward(dinp, ones, inp, device().stream);
        CHECK(out.values() == std::vector<double>{x[0], 0, x[2], 0, x[4], 0, 0, 0});
        CHECK(dinp.values() == std::vector<double>{1, 0, 1, 0, 1, 0, 0.5, 0.5});
    }
}

TEST_CASE("gelu backward in place, and twice the same bits", "[gelu]") {
    for (DType dtype : kFloatDTypes) {
        const int64_t n = 1003;
        Buffer inp(dtype, {17, 59}, random_values(n, 4, 2.0)), dout(dtype, {17, 59}, random_values(n, 5));
        Buffer first(dtype, {17, 59}), second(dtype, {17, 59});
        gelu_backward(first, dout, inp, device().stream);
        gelu_backward(second, dout, inp, device().stream);
        gelu_backward(dout, dout, inp, device().stream);
        CHECK(first.bits() == second.bits());
        CHECK(first.bits() == dout.bits());
    }
}

TEST_CASE("gelu names what is wrong", "[gelu]") {
    Buffer a(DType::f32, {4, 8}), b(DType::f32, {8, 4}), half(DType::f16, {4, 8}), whole(DType::i32, {4, 8}),
        long_row(DType::f32, {33});
    Tensor shifted = make_tensor(static_cast<char*>(long_row.tensor().data) + 4, DType::f32, {4, 8});
    cudaStream_t stream = device().stream;
    CHECK_THROWS_WITH(gelu_forward(b, a, stream),
                      ContainsSubstring("gelu_forward: out is f32 (8, 4), expected f32 (4, 8)"));
    CHECK_THROWS_WITH(gelu_forward(half, a, stream), ContainsSubstring("gelu_forward: out is f16 (4, 8)"));
    CHECK_THROWS_WITH(gelu_forward(a, {}, stream), ContainsSubstring("gelu_forward: inp is no tensor"));
    CHECK_THROWS_WITH(gelu_forward({}, a, stream), ContainsSubstring("gelu_forward: out is no tensor"));
    CHECK_THROWS_WITH(gelu_forward(whole, whole, stream), ContainsSubstring("i32"));
    CHECK_THROWS_WITH(gelu_forward(a, shifted, stream), ContainsSubstring("gelu_forward: inp starts at"));
    CHECK_THROWS_WITH(gelu_backward(b, a, a, stream), ContainsSubstring("gelu_backward: dinp is"));
    CHECK_THROWS_WITH(gelu_backward(a, b, a, stream), ContainsSubstring("gelu_backward: dout is"));
    CHECK_THROWS_WITH(gelu_backward(a, shifted, a, stream), ContainsSubstring("gelu_backward: dout starts at"));
}
