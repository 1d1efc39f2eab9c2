// test/test_swiglu.cu: SwiGLU against float64.
#include "layers/layers.h"
#include "reference.h"

#include <cmath>

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// inp (N, 2F) = [gate | up] -> out (N, F)
std::vector<double> swiglu(const std::vector<double>& inp, int64_t N, int64_t F) {
    std::vector<double> out;
    for (int64_t r = 0; r < N; ++r)
        for (int64_t f = 0; f < F; ++f) {
            const double g = inp[static_cast<size_t>(r * 2 * F + f)], u = inp[static_cast<size_t>(r * 2 * F + F + f)];
            out.push_back(g * sigmoid(g) * u);
        }
    return out;
}
std::vector<double> swiglu_gradient(const std::vector<double>& dout, const std::vector<double>& inp, int64_t N,
                                    int64_t F) {
    std::vector<double> dinp(inp.size());
    for (int64_t r = 0; r < N; ++r)
        for (int64_t f = 0; f < F; ++f) {
            const size_t gate = static_cast<size_t>(r * 2 * F + f), up = gate + static_cast<size_t>(F);
            const double g = inp[gate], dy = dout[static_cast<size_t>(r * F + f)], s = sigmoid(g);
            dinp[gate] = dy * inp[up] * (s + g * s * (1 - s));
            dinp[up] = dy * g * s;
        }
    return dinp;
}

constexpr double kUnit = 0x1p-24;  // float32's unit roundoff
struct Size {
    int64_t N, F;
};
// Rows of one element, around the chunks of both devices (4, 8 and 32), odd ones, and one that needs two blocks.
const Size kSizes[] = {{1, 1},  {5, 3},  {3, 7},   {4, 8},    {2, 9},    {3, 31},
                       {3, 32}, {7, 33}, {3, 100}, {33, 172}, {2, 1003}, {2, 8200}};

}  // namespace

TEST_CASE("swiglu: the reference's gradient is that of the reference", "[swiglu]") {
    const int64_t N = 3, F = 7;
    const auto inp = random_values(N * 2 * F, 1, 2.0), weights = random_values(N * F, 2);
    const auto loss = [&](const std::vector<double>& x) {
        const auto out = swiglu(x, N, F);
        double total = 0;
        for (size_t i = 0; i < out.size(); ++i) total += weights[i] * out[i];
        return total;
    };
    const auto gradient = swiglu_gradient(weights, inp, N, F);
    // step^2 = 1e-10 times third derivatives below 10, and rounding 1e-15 / 1e-5
    for (const auto& [i, derivative] : finite_differences(loss, inp))
        CHECK(gradient[i] == Approx(derivative).margin(1e-8));
}

TEST_CASE("swiglu against float64", "[swiglu]") {
    for (DType dtype : kFloatDTypes)
        for (const auto& [N, F] : kSizes) {
            const auto x = rounded(random_values(N * 2 * F, 3, 3.0), dtype),
                       dy = rounded(random_values(N * F, 4), dtype);
            Buffer inp(dtype, {N, 2 * F}, x), dout(dtype, {N, F}, dy), out(dtype, {N, F}), dinp(dtype, {N, 2 * F});
            swiglu_forward(out, inp, device().stream);
            swiglu_backward(dinp, dout, inp, device().stream);
            // exp(-|g|) has a relative error of 2 |g| + 4 units (the GPU computes 2^(g log2 e)). In g s(g) for g << 0
            // that is 2 g^2 exp(-|g|) <= 1.1 units, in silu' at most as much again; everything else is a few roundings
            // of the result's own size. f16 rounds below 2^-14 to steps of 2^-24.
            const std::string what = concat("N = ", N, ", F = ", F, ", ", dtype_name(dtype));
            const double relative = unit_roundoff(dtype) + 12 * kUnit, f16_extra = dtype == DType::f16 ? 0x1p-25 : 0;
            const double size = largest(x);
            check_close(out.values(), swiglu(x, N, F), relative, 4 * kUnit * size + f16_extra,
                        "swiglu forward, " + what);
            check_close(dinp.values(), swiglu_gradient(dy, x, N, F), relative,
                        8 * kUnit * size * largest(dy) + f16_extra, "swiglu backward, " + what);
        }
}

TEST_CASE("swiglu's derivative keeps its digits where the gate is open", "[swiglu]") {
    // silu' = s (1 + g (1 - s)). Up to g = 17 1 - s is above float32's unit; computed as a difference from 1 it would
    // be off by half a unit, times g. As e / (1 + e) it adds nothing: s is off by 2 units, the sum and the product by
    // one each, and g (1 - s) (2 g + 4) <= 1.2 units here.
    const int64_t F = 1000;
    std::vector<double> x(2 * F, 1.0), expected;
    for (int64_t f = 0; f < F; ++f) {
        x[static_cast<size_t>(f)] = static_cast<float>(4 + 0.013 * static_cast<double>(f));
        const double g = x[static_cast<size_t>(f)], s = sigmoid(g);
        expected.push_back(s * (1 + g * (1 - s)));
    }
    Buffer inp(DType::f32, {1, 2 * F}, x), dout(DType::f32, {1, F}, std::vector<double>(F, 1.0)),
        dinp(DType::f32, {1, 2 * F});
    swiglu_backward(dinp, dout, inp, device().stream);
    const auto all = dinp.values();
    check_close({all.begin(), all.begin() + F}, expected, 5.2 * kUnit, 0, "d silu / d gate");
}

TEST_CASE("swiglu takes any leading dimensions", "[swiglu]") {
    const auto x = random_values(2 * 3 * 20, 5);
    Buffer inp(DType::f32, {2, 3, 20}, x), out(DType::f32, {2, 3, 10}), flat(DType::f32, {6, 10});
    swiglu_forward(out, inp, device().stream);
    swiglu_forward(flat, inp.tensor().view({6, 20}), device().stream);
    CHECK(out.bits() == flat.bits());
}

TEST_CASE("swiglu far out", "[swiglu]") {
    for (DType dtype : kFloatDTypes) {
        // gates of +-1e4 with an up of 2: silu is the identity and zero, its derivative one and zero
        const double g = rounded({1e4}, dtype)[0];
        Buffer inp(dtype, {1, 4}, {g, -g, 2, 2}), dout(dtype, {1, 2}, {1, 1}), out(dtype, {1, 2}), dinp(dtype, {1, 4});
        swiglu_forward(out, inp, device().stream);
        swiglu_backward(dinp, dout, inp, device().stream);
        CHECK(out.values() == std::vector<double>{2 * g, 0});
        CHECK(dinp.values() == std::vector<double>{2, 0, g, 0});
    }
}

TEST_CASE("swiglu twice gives the same bits", "[swiglu]") {
    for (DType dtype : kFloatDTypes) {
        Buffer inp(dtype, {9, 2 * 37}, random_values(9 * 2 * 37, 6)), dout(dtype, {9, 37}, random_values(9 * 37, 7));
        Buffer out1(dtype, {9, 37}), out2(dtype, {9, 37}), dinp1(dtype, {9, 2 * 37}), dinp2(dtype, {9, 2 * 37});
        swiglu_forward(out1, inp, device().stream);
        swiglu_forward(out2, inp, device().stream);
        swiglu_backward(dinp1, dout, inp, device().stream);
        swiglu_backward(dinp2, dout, inp, device().stream);
        CHECK(out1.bits() == out2.bits());
        CHECK(dinp1.bits() == dinp2.bits());
    }
}

TEST_CASE("swiglu names what is wrong", "[swiglu]") {
    Buffer inp(DType::f32, {4, 16}), out(DType::f32, {4, 8}), narrow_out(DType::f32, {4, 7}), few(DType::f32, {3, 8});
    Buffer half(DType::bf16, {4, 16}), long_row(DType::f32, {65});
    Tensor shifted = make_tensor(static_cast<char*>(long_row.tensor().data) + 4, DType::f32, {4, 16});
    cudaStream_t stream = device().stream;
    CHECK_THROWS_WITH(swiglu_forward(narrow_out, inp, stream),
                      ContainsSubstring("swiglu_forward: inp is f32 (4, 16), expected f32 (4, 14)"));
    CHECK_THROWS_WITH(swiglu_forward(few, inp, stream), ContainsSubstring("swiglu_forward: inp is"));
    CHECK_THROWS_WITH(swiglu_forward(out, half, stream), ContainsSubstring("swiglu_forward: inp is bf16"));
    CHECK_THROWS_WITH(swiglu_forward({}, inp, stream), ContainsSubstring("swiglu_forward: out is no tensor"));
    CHECK_THROWS_WITH(swiglu_forward(out, shifted, stream), ContainsSubstring("swiglu_forward: inp starts at"));
    CHECK_THROWS_WITH(swiglu_backward(shifted, out, inp, stream), ContainsSubstring("swiglu_backward: dinp starts at"));
    CHECK_THROWS_WITH(swiglu_backward(out, out, inp, stream), ContainsSubstring("swiglu_backward: dinp is"));
    CHECK_THROWS_WITH(swiglu_backward(inp, narrow_out, inp, stream), ContainsSubstring("swiglu_backward: inp is"));
}
