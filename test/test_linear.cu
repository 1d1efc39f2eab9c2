// test/test_linear.cu: the linear layer and its gradients against float64.
#include "layers/layers.h"
#include "reference.h"

namespace {

using Values = std::vector<double>;

size_t at(int64_t row, int64_t col, int64_t cols) { return static_cast<size_t>(row * cols + col); }

struct Size {
    int64_t N, C, O;
};
const Size kSizes[] = {{1, 1, 1}, {3, 5, 7}, {33, 48, 65}, {70, 33, 3}, {130, 20, 129}};

Values forward(const Values& x, const Values& w, const Values& b, const Size& s) {
    Values y(static_cast<size_t>(s.N * s.O));
    for (int64_t n = 0; n < s.N; ++n)
        for (int64_t o = 0; o < s.O; ++o) {
            double sum = b.empty() ? 0 : b[static_cast<size_t>(o)];
            for (int64_t c = 0; c < s.C; ++c) sum += x[at(n, c, s.C)] * w[at(o, c, s.C)];
            y[at(n, o, s.O)] = sum;
        }
    return y;
}

// Adds the gradients to what dx, dw and db hold.
void backward(Values& dx, Values& dw, Values& db, const Values& dy, const Values& x, const Values& w, const Size& s) {
    for (int64_t n = 0; n < s.N; ++n)
        for (int64_t o = 0; o < s.O; ++o) {
            const double d = dy[at(n, o, s.O)];
            db[static_cast<size_t>(o)] += d;
            for (int64_t c = 0; c < s.C; ++c) {
                dx[at(n, c, s.C)] += d * w[at(o, c, s.C)];
                dw[at(o, c, s.C)] += d * x[at(n, c, s.C)];
            }
        }
}

// A sum of n products of normal numbers grows like sqrt(n).
double absolute(int64_t n) { return sum_error(n) * 4 * std::sqrt(static_cast<double>(n)) + 0x1p-25; }

}  // namespace

TEST_CASE("linear: the reference's gradient is that of the reference", "[linear]") {
    const Size s{3, 4, 5};
    const auto x = random_values(s.N * s.C, 1), w = random_values(s.O * s.C, 2), b = random_values(s.O, 3),
               dy = random_values(s.N * s.O, 4);
    const auto loss = [&](const Values& inp, const Values& weight, const Values& bias) {
        const Values y = forward(inp, weight, bias, s);
        double total = 0;
        for (size_t i = 0; i < y.size(); ++i) total += dy[i] * y[i];
        return total;
    };
    Values dx(x.size()), dw(w.size()), db(b.size());
    backward(dx, dw, db, dy, x, w, s);
    // Linear in each: only rounding, 1e-15 / 1e-5.
    for (const auto& [i, d] : finite_differences([&](const Values& v) { return loss(v, w, b); }, x))
        CHECK(dx[i] == Approx(d).margin(1e-8));
    for (const auto& [i, d] : finite_differences([&](const Values& v) { return loss(x, v, b); }, w))
        CHECK(dw[i] == Approx(d).margin(1e-8));
    for (const auto& [i, d] : finite_differences([&](const Values& v) { return loss(x, w, v); }, b))
        CHECK(db[i] == Approx(d).margin(1e-8));
}

TEST_CASE("linear forward against float64", "[linear]") {
    for (DType dtype : kFloatDTypes)
        for (const Size& s : kSizes)
            for (bool with_bias : {false, true}) {
                const Values x = rounded(random_values(s.N * s.C, 1), dtype),
                             w = rounded(random_values(s.O * s.C, 2), dtype);
                const Values b = with_bias ? rounded(random_values(s.O, 3), dtype) : Values{};
                Buffer inp(dtype, {s.N, s.C}, x), weight(dtype, {s.O, s.C}, w), bias(dtype, {s.O}),
                    out(dtype, {s.N, s.O});
                if (with_bias) bias.set(b);
                linear_forward(out, inp, weight, with_bias ? bias.tensor() : Tensor{}, device().stream);
                // On a GPU some of cuBLASLt's kernels round a 16-bit product before they add the bias (test_matmul.cu).
                const double u = unit_roundoff(dtype),
                             more = device().is_cpu || dtype == DType::f32 || !with_bias ? 0 : u;
                check_close(out.values(), forward(x, w, b, s), u + more, absolute(s.C) + more * largest(b),
                            concat("linear forward ", dtype_name(dtype), " N ", s.N, ", C ", s.C, ", O ", s.O));
            }
}

TEST_CASE("linear backward against float64", "[linear]") {
    for (DType dtype : kFloatDTypes)
        for (DType gradient_dtype : {DType::f32, dtype})
            for (const Size& s : kSizes) {
                const Values x = rounded(random_values(s.N * s.C, 1), dtype),
                             w = rounded(random_values(s.O * s.C, 2), dtype);
                const Values dy = rounded(random_values(s.N * s.O, 5), dtype),
                             before = rounded(random_values(s.N * s.C, 6), dtype);
                Values dw = rounded(random_values(s.O * s.C, 7), gradient_dtype),
                       db = rounded(random_values(s.O, 8), gradient_dtype);
                Buffer inp(dtype, {s.N, s.C}, x), weight(dtype, {s.O, s.C}, w), dout(dtype, {s.N, s.O}, dy),
                    dinp(dtype, {s.N, s.C});
                Buffer dweight(gradient_dtype, {s.O, s.C}, dw), dbias(gradient_dtype, {s.O}, db);
                Buffer scratch(DType::f32, {linear_backward_scratch_n(s.N, s.O)});
                linear_backward_input(dinp, dout, weight, false, device().stream);
                linear_backward_weight(dweight, dbias, dout, inp, true, scratch, device().stream);
                Values dx(x.size());
                backward(dx, dw, db, dy, x, w, s);  // += for the parameters, = for dinp
                const std::string what = concat(" ", dtype_name(dtype), "/", dtype_name(gradient_dtype), " N ", s.N,
                                                ", C ", s.C, ", O ", s.O);
                check_close(dinp.values(), dx, unit_roundoff(dtype), absolute(s.O), "linear dinp" + what);
                check_close(dweight.values(), dw, unit_roundoff(gradient_dtype), absolute(s.N),
                            "linear dweight" + what);
                check_close(dbias.values(), db, unit_roundoff(gradient_dtype), absolute(s.N), "linear dbias" + what);

                dinp.set(before);
                linear_backward_input(dinp, dout, weight, true, device().stream);
                for (size_t i = 0; i < dx.size(); ++i) dx[i] += before[i];
                check_close(dinp.values(), dx, unit_roundoff(dtype), absolute(s.O), "linear dinp, accumulated" + what);

                const std::vector<unsigned char> bias_bits = dbias.bits();
                linear_backward_weight(dweight, {}, dout, inp, true, {},
                                       device().stream);  // without bias: no scratch is needed
                CHECK(dbias.bits() == bias_bits);
            }
}

TEST_CASE("linear and gelu in one call are the two calls", "[linear]") {
    for (DType dtype : kFloatDTypes)
        for (const Size& s : kSizes) {
            const auto stream = device().stream;
            Buffer inp(dtype, {s.N, s.C}, random_values(s.N * s.C, 1)),
                up(dtype, {s.O, s.C}, random_values(s.O * s.C, 2)), bias(dtype, {s.O}, random_values(s.O, 3)),
                before(dtype, {s.N, s.O}), act(dtype, {s.N, s.O}), before_2(dtype, {s.N, s.O}),
                act_2(dtype, {s.N, s.O});
            const std::string what = concat(" ", dtype_name(dtype), ", N ", s.N, ", C ", s.C, ", O ", s.O);
            const double u = unit_roundoff(dtype);
            linear_gelu_forward(act, before, inp, up, bias, stream);
            linear_forward(before_2, inp, up, bias, stream);
            gelu_forward(act_2, before_2, stream);
            // A rounding of what gelu is taken of, of at most about 30, is all that may differ.
            CHECK(before.bits() == before_2.bits());
            if (device().is_cpu) CHECK(act.bits() == act_2.bits());
            else check_close(act.values(), act_2.values(), 4 * u + 0x1p-20, 0, "gelu" + what);

            Buffer down(dtype, {s.C, s.O}, random_values(s.C * s.O, 4)),
                dout(dtype, {s.N, s.C}, random_values(s.N * s.C, 5)), dbefore(dtype, {s.N, s.O}),
                dact(dtype, {s.N, s.O}), dbefore_2(dtype, {s.N, s.O});
            linear_gelu_backward_input(dbefore, dout, down, before, stream);
            linear_backward_input(dact, dout, down, false, stream);
            gelu_backward(dbefore_2, dact, before, stream);
            check_close(dbefore.values(), dbefore_2.values(), 2 * u + 0x1p-20, absolute(s.C),
                        "before gelu, backward" + what);
        }
    Buffer x(DType::f32, {4, 8}), w(DType::f32, {5, 8}), y(DType::f32, {4, 5});
    CHECK_THROWS_WITH(linear_gelu_forward(y, x, x, w, {}, device().stream),
                      ContainsSubstring("linear_gelu_forward: before is f32 (4, 8), expected f32 (4, 5)"));
    CHECK_THROWS_WITH(linear_gelu_backward_input(x, y, w, y, device().stream),
                      ContainsSubstring("linear_gelu_backward_input: before"));
}

TEST_CASE("linear behind attention: the gradient of its output, and delta", "[linear]") {
    const int64_t B = 2, T = 7, H = 3, D = 5, O = 9, C = H * D, N = B * T;
    for (DType dtype : kFloatDTypes) {
        const auto stream = device().stream;
        const std::vector<double> at = rounded(random_values(N * C, 1), dtype);
        Buffer dout(dtype, {N, O}, random_values(N * O, 2)), weight(dtype, {O, C}, random_values(O * C, 3)),
            attended(dtype, {N, C}, at), dattended(dtype, {N, C}), same(dtype, {N, C}), delta(DType::f32, {B, H, T}),
            zeros(DType::i32, {B * H * T});
        zeros.set_integers(std::vector<int32_t>(B * H * T, 3));
        linear_delta_backward_input(dattended, {delta, zeros}, dout, weight, attended, stream);
        linear_backward_input(same, dout, weight, false, stream);
        CHECK((dattended.bits() == same.bits()));
        const std::vector<double> dy = dattended.values();
        std::vector<double> expected(B * H * T);
        for (size_t i = 0; i < dy.size(); ++i) {
            const size_t n = i / C, h = i % C / D;
            expected[(n / T * H + h) * T + n % T] += dy[i] * at[i];
        }
        check_close(delta.values(), expected, 0, sum_error(D) * D * largest(dy) * largest(at) + 0x1p-24,
                    concat("delta ", dtype_name(dtype)));
        CHECK((zeros.bits() == std::vector<unsigned char>(4 * B * H * T, 0)));
        CHECK_THROWS_WITH(linear_delta_backward_input(dattended, {delta, {}}, dout, weight, dout, stream),
                          ContainsSubstring("linear_delta_backward_input: attended"));
        Buffer other(DType::f32, {B, H, T + 1});
        CHECK_THROWS_WITH(linear_delta_backward_input(dattended, {other, {}}, dout, weight, attended, stream),
                          ContainsSubstring("matmul: delta f32 (2, 3, 8) is not that of heads in"));
        Buffer uneven(DType::f32, {B, C - 1, T});  // C columns are no such heads
        CHECK_THROWS_WITH(linear_delta_backward_input(dattended, {uneven, {}}, dout, weight, attended, stream),
                          ContainsSubstring("is not that of heads in"));
        const Tensor headless = make_tensor(delta.tensor().data, DType::f32, {B, 0, T});
        CHECK_THROWS_WITH(linear_delta_backward_input(dattended, {headless, {}}, dout, weight, attended, stream),
                          ContainsSubstring("is not that of heads in"));
        CHECK_THROWS_WITH(linear_delta_backward_input(dattended, {}, dout, weight, attended, stream),
                          ContainsSubstring("attended and zeros are for delta, which is no tensor"));
    }
}

TEST_CASE("linear says what is wrong with its arguments", "[linear][errors]") {
    Buffer x(DType::f32, {4, 8}), w(DType::f32, {5, 8}), b(DType::f32, {5}), y(DType::f32, {4, 5}),
        half(DType::bf16, {4, 8});
    Buffer scratch(DType::f32, {1}), tall(DType::f32, {6, 8});
    const auto s = device().stream;
    CHECK_THROWS_WITH(linear_forward(y, b, w, b, s), ContainsSubstring("linear_forward: inp"));
    CHECK_THROWS_WITH(linear_forward(y, half, w, b, s), ContainsSubstring("linear_forward: weight"));
    CHECK_THROWS_WITH(linear_forward(y, x, y, b, s), ContainsSubstring("linear_forward: weight"));
    CHECK_THROWS_WITH(linear_forward(x, x, w, b, s),
                      ContainsSubstring("linear_forward: out is f32 (4, 8), expected f32 (4, 5)"));
    CHECK_THROWS_WITH(linear_forward(y, x, w, x, s), ContainsSubstring("linear_forward: bias"));
    CHECK_THROWS_WITH(linear_backward_input(x, y, x, false, s), ContainsSubstring("linear_backward_input: weight"));
    CHECK_THROWS_WITH(linear_backward_input(y, y, w, false, s), ContainsSubstring("linear_backward_input: dinp"));
    CHECK_THROWS_WITH(linear_backward_weight(w, b, y, tall, true, scratch, s),
                      ContainsSubstring("linear_backward_weight: inp"));
    CHECK_THROWS_WITH(linear_backward_weight(x, b, y, x, true, scratch, s),
                      ContainsSubstring("linear_backward_weight: dweight"));
    CHECK_THROWS_WITH(linear_backward_weight(w, x, y, x, true, scratch, s),
                      ContainsSubstring("linear_backward_weight: dbias"));
    CHECK_THROWS_WITH(linear_backward_weight(w, b, y, x, true, scratch, s),
                      ContainsSubstring("scratch is f32 (1), expected f32 of at least 69"));
    Buffer w16(DType::bf16, {5, 8}, random_values(40, 1)), y16(DType::bf16, {4, 5}, random_values(20, 2));
    const auto before = w16.bits();  // a dbias of another dtype is summed after the product: dweight is not written
    CHECK_THROWS_WITH(linear_backward_weight(w16, b, y16, half, true, {}, s),
                      ContainsSubstring("scratch is no tensor"));
    CHECK(w16.bits() == before);
    const Tensor shifted = make_tensor(static_cast<char*>(x.tensor().data) + 4, DType::f32, {4, 8});
    CHECK_THROWS_WITH(linear_forward(y, shifted, w, b, s), ContainsSubstring("a starts at"));
}
