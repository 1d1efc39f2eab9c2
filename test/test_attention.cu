// test/test_attention.cu: causal self-attention (MHA, MQA, GQA) against float64 loops.
#include "layers/layers.h"
#include "reference.h"

#include <cmath>

namespace {

struct Size {
    int64_t B, T, H, K, D;
    int64_t columns() const { return (H + 2 * K) * D; }
};
const Size kSizes[] = {
    {2, 1, 1, 1, 2},   {1, 2, 6, 2, 8},   {3, 17, 6, 2, 10}, {2, 33, 4, 1, 8},  {1, 65, 3, 3, 10},
    {2, 17, 1, 1, 64}, {1, 33, 6, 2, 80}, {1, 65, 4, 1, 2},  {1, 64, 2, 2, 16}, {2, 2, 4, 1, 64},
    {1, 65, 6, 2, 64}, {3, 1, 3, 3, 80},  {1, 100, 2, 1, 8},
};
constexpr double kUnit = 0x1p-24;  // float32's unit roundoff

float to_dtype(float x, DType dtype) {
    float stored = x;
    dispatch(dtype, [&](auto zero) { stored = static_cast<float>(static_cast<decltype(zero)>(x)); });
    return stored;
}

struct Result {
    std::vector<double> out, probs, dqkv;
};

// Loops over every number. Real = double is the truth. Real = float is the plain computation in the same precision: each sum
// one term after the other in float32, and what a framework would store in `storage` is rounded to it.
template <class Real>
Result attention(const Size& size, const std::vector<double>& qkv, const std::vector<double>& dout, double scale_,
                 DType storage) {
    const auto& [B, T, H, K, D] = size;
    const int64_t C = size.columns();
    const Real scale = static_cast<Real>(scale_);
    const auto keep = [&](Real x) { return std::is_same_v<Real, float> ? Real(to_dtype(static_cast<float>(x), storage)) : x; };
    Result result{std::vector<double>(static_cast<size_t>(B * T * H * D)),
                  std::vector<double>(static_cast<size_t>(B * H * T * T)), std::vector<double>(qkv.size())};
    // Heads of a row: queries at h, keys at H + h / (H/K), values K later.
    const auto at = [&](int64_t b, int64_t t, int64_t head, int64_t d) {
        return static_cast<size_t>((b * T + t) * C + head * D + d);
    };
    const auto in = [&](int64_t b, int64_t t, int64_t head, int64_t d) { return static_cast<Real>(qkv[at(b, t, head, d)]); };
    std::vector<Real> dq(qkv.size(), 0), P(static_cast<size_t>(T * T)), dS(static_cast<size_t>(T * T));
    for (int64_t b = 0; b < B; ++b)
        for (int64_t h = 0; h < H; ++h) {
            const int64_t key = H + h / (H / K), value = key + K;
            const auto out_at = [&](int64_t t, int64_t d) { return static_cast<size_t>(((b * T + t) * H + h) * D + d); };
            const auto p = [&](int64_t t, int64_t s) -> Real& { return P[static_cast<size_t>(t * T + s)]; };
            const auto ds = [&](int64_t t, int64_t s) -> Real& { return dS[static_cast<size_t>(t * T + s)]; };
            for (int64_t t = 0; t < T; ++t) {
                Real max = -INFINITY, sum = 0;
                for (int64_t s = 0; s <= t; ++s) {
                    Real score = 0;
                    for (int64_t d = 0; d < D; ++d) score += in(b, t, h, d) * in(b, s, key, d);
                    p(t, s) = keep(scale * score);
                    max = std::max(max, p(t, s));
                }
                for (int64_t s = 0; s <= t; ++s) sum += p(t, s) = std::exp(p(t, s) - max);
                for (int64_t s = 0; s <= t; ++s) p(t, s) = keep(p(t, s) / sum);
                for (int64_t s = 0; s <= t; ++s) result.probs[static_cast<size_t>(((b * H + h) * T + t) * T + s)] = p(t, s);
                for (int64_t d = 0; d < D; ++d) {
                    Real o = 0;
                    for (int64_t s = 0; s <= t; ++s) o += p(t, s) * in(b, s, value, d);
                    result.out[out_at(t, d)] = keep(o);
                }
            }
            for (int64_t t = 0; t < T; ++t) {  // dS = P * (dP - sum dP P) scale
                Real r = 0;
                for (int64_t s = 0; s <= t; ++s) {
                    Real dp = 0;
                    for (int64_t d = 0; d < D; ++d) dp += static_cast<Real>(dout[out_at(t, d)]) * in(b, s, value, d);
                    ds(t, s) = keep(dp);
                    r += ds(t, s) * p(t, s);
                }
                for (int64_t s = 0; s <= t; ++s) ds(t, s) = keep(p(t, s) * (ds(t, s) - r) * scale);
            }
            for (int64_t t = 0; t < T; ++t)
                for (int64_t s = 0; s <= t; ++s)
                    for (int64_t d = 0; d < D; ++d) {
                        dq[at(b, t, h, d)] += ds(t, s) * in(b, s, key, d);
                        dq[at(b, s, key, d)] += ds(t, s) * in(b, t, h, d);
                        dq[at(b, s, value, d)] += p(t, s) * static_cast<Real>(dout[out_at(t, d)]);
                    }
        }
    for (size_t i = 0; i < dq.size(); ++i) result.dqkv[i] = keep(dq[i]);
    return result;
}

// The tensors of one call on the device.
struct Attention {
    const Size size;
    Buffer q, k, v, probs, out, forward_scratch, backward_scratch, dqkv;
    Attention(const Size& s, DType dtype)
        : size(s),
          q(dtype, {s.B, s.H, s.T, s.D}),
          k(dtype, {s.B, s.K, s.T, s.D}),
          v(dtype, {s.B, s.K, s.T, s.D}),
          probs(dtype, {s.B, s.H, s.T, s.T}),
          out(dtype, {s.B, s.T, s.H * s.D}),
          forward_scratch(dtype, {attention_forward_scratch_n(s.B, s.T, s.H, s.K, s.D)}),
          backward_scratch(dtype, {attention_backward_scratch_n(s.B, s.T, s.H, s.K, s.D)}),
          dqkv(dtype, {s.B, s.T, s.columns()}) {}
    AttentionSaved saved() const { return {q, k, v, probs}; }
    void forward(const Tensor& qkv, double scale) {
        attention_forward(out, saved(), qkv, static_cast<float>(scale), forward_scratch, device().stream);
    }
    void backward(const Tensor& dout, double scale) {
        attention_backward(dqkv, dout, saved(), static_cast<float>(scale), backward_scratch, device().stream);
    }
};

double worst(const std::vector<double>& a, const std::vector<double>& b) {
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
    return most;
}

// An error may be at most twice that of the plain computation in the same precision (the rule of flash-attention's tests).
// With a handful of elements the plain one may be exact by luck: two roundings of the largest element, and 8 units of
// float32 for the exponential and the quotient, are allowed on top.
void check_like_plain(const std::vector<double>& actual, const std::vector<double>& exact, const std::vector<double>& plain,
                      DType dtype, const std::string& what) {
    const double tolerance = 2 * worst(plain, exact) + (2 * unit_roundoff(dtype) + 8 * kUnit) * largest(exact);
    check_close(actual, exact, 0, tolerance, what);
}

void check_size(const Size& size, DType dtype) {
    const auto& [B, T, H, K, D] = size;
    const double scale = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
    const auto x = rounded(random_values(B * T * size.columns(), 1, 1.5), dtype),
               dy = rounded(random_values(B * T * H * D, 2), dtype);
    Buffer qkv(dtype, {B, T, size.columns()}, x), dout(dtype, {B, T, H * D}, dy);
    Attention a(size, dtype);
    a.forward(qkv, scale);
    a.backward(dout, scale);
    const Result exact = attention<double>(size, x, dy, scale, dtype), plain = attention<float>(size, x, dy, scale, dtype);
    const std::string what = concat("B T H K D = ", B, " ", T, " ", H, " ", K, " ", D, ", ", dtype_name(dtype));
    check_like_plain(a.out.values(), exact.out, plain.out, dtype, "attention out, " + what);
    check_like_plain(a.probs.values(), exact.probs, plain.probs, dtype, "attention probs, " + what);
    check_like_plain(a.dqkv.values(), exact.dqkv, plain.dqkv, dtype, "attention dqkv, " + what);
    const auto probs = a.probs.values();
    size_t n_above = 0;
    for (size_t i = 0; i < probs.size(); ++i)
        n_above += i % static_cast<size_t>(T) > i / static_cast<size_t>(T) % static_cast<size_t>(T) && probs[i] != 0;
    CHECK(n_above == 0);  // exact zeros above the diagonal
}

}  // namespace

TEST_CASE("attention: the reference's gradient is that of the reference", "[attention]") {
    for (const Size& size : {Size{1, 5, 4, 2, 3}, Size{2, 4, 3, 3, 2}, Size{1, 6, 3, 1, 4}}) {
        const auto& [B, T, H, K, D] = size;
        const auto x = random_values(B * T * size.columns(), 3), weights = random_values(B * T * H * D, 4);
        const auto loss = [&](const std::vector<double>& v) {
            const auto y = attention<double>(size, v, weights, 0.6, DType::f32).out;
            double total = 0;
            for (size_t i = 0; i < y.size(); ++i) total += weights[i] * y[i];
            return total;
        };
        const auto gradient = attention<double>(size, x, weights, 0.6, DType::f32).dqkv;
        // step^2 = 1e-10 times third derivatives of some tens; rounding 1e-15 * 10 / 1e-5
        for (const auto& [i, derivative] : finite_differences(loss, x, 1e-5, 64))
            CHECK(gradient[i] == Approx(derivative).margin(1e-7));
    }
}

TEST_CASE("attention against float64", "[attention]") {
    for (DType dtype : kFloatDTypes)
        for (const Size& size : kSizes) check_size(size, dtype);
}

TEST_CASE("attention against float64, rows shared by a warp", "[attention]") {
    for (DType dtype : kFloatDTypes) check_size({1, 1030, 1, 1, 4}, dtype);  // beyond kShortRow of layers/chunk.cuh
}

TEST_CASE("attention looks only back", "[attention]") {
    const Size size{1, 40, 4, 2, 8};
    auto x = random_values(40 * size.columns(), 5);
    Buffer qkv(DType::f32, {1, 40, size.columns()}, x);
    Attention before(size, DType::f32), after(size, DType::f32);
    before.forward(qkv, 0.35);
    for (size_t i = static_cast<size_t>(25 * size.columns()); i < x.size(); ++i) x[i] = -7 * x[i];  // tokens 25 to 39 change
    qkv.set(x);
    after.forward(qkv, 0.35);
    const auto a = before.out.values(), b = after.out.values();
    const size_t n_same = 25 * 4 * 8;
    CHECK(std::equal(a.begin(), a.begin() + n_same, b.begin()));
    CHECK_FALSE(std::equal(a.begin() + n_same, a.begin() + n_same + 32, b.begin() + n_same));
}

TEST_CASE("attention that can be read by eye", "[attention]") {
    // Keys are 30 times unit vectors, and each query asks for one of them: the others get exp(-900) = 0.
    const double c = 30;
    //                        q        k        v
    Buffer qkv(DType::f32, {1, 3, 6},
               {c, 0, c, 0, 1, 2,    // t = 0 finds itself
                c, 0, 0, c, 3, 4,    // t = 1 asks for key (c, 0): token 0
                0, c, 0, c, 5, 6});  // t = 2 asks for (0, c): tokens 1 and 2, half and half
    Attention a({1, 3, 1, 1, 2}, DType::f32);
    a.forward(qkv, 1.0);
    CHECK(a.out.values() == std::vector<double>{1, 2, 1, 2, 4, 5});
    CHECK(a.probs.values() == std::vector<double>{1, 0, 0, 1, 0, 0, 0, 0.5, 0.5});
}

TEST_CASE("attention with extreme scores", "[attention]") {
    for (DType dtype : kFloatDTypes) {
        const Size size{1, 33, 2, 1, 8};
        // scores of scale * D * 80 * 80, some 1e4
        const auto x = random_values(33 * size.columns(), 6, 80.0), dy = random_values(33 * 16, 7);
        Buffer qkv(dtype, {1, 33, size.columns()}, x), dout(dtype, {1, 33, 16}, dy);
        Attention a(size, dtype);
        a.forward(qkv, 0.35);
        a.backward(dout, 0.35);
        for (double value : a.out.values()) CHECK(std::isfinite(value));
        for (double value : a.dqkv.values()) CHECK(std::isfinite(value));
        const auto probs = a.probs.values();
        for (size_t row = 0; row < probs.size() / 33; ++row) {
            double sum = 0;
            for (size_t s = 0; s < 33; ++s) sum += probs[row * 33 + s];
            // each of 33 probabilities is rounded once, relative to itself; they add up to 1
            CHECK(sum == Approx(1).epsilon(unit_roundoff(dtype) + 50 * kUnit));
        }
    }
}

TEST_CASE("attention backward never uses what stands above the diagonal", "[attention]") {
    // In f16 dP = do v^T overflows for t = 0, s = 1, where P is 0: infinity times zero must not become NaN.
    const Size size{1, 2, 1, 1, 8};
    std::vector<double> x(2 * 24, 0.1), dy(2 * 8, 0.1);
    for (size_t d = 0; d < 8; ++d) x[24 + 16 + d] = 200, dy[d] = 200;  // v of token 1, do of token 0: 8 * 40000
    Buffer qkv(DType::f16, {1, 2, 24}, x), dout(DType::f16, {1, 2, 8}, dy);
    Attention a(size, DType::f16);
    a.forward(qkv, 0.35);
    a.backward(dout, 0.35);
    for (double value : a.dqkv.values()) CHECK(std::isfinite(value));
}

TEST_CASE("attention twice gives the same bits, in memory from an arena too", "[attention]") {
    for (DType dtype : kFloatDTypes) {
        const Size size{2, 35, 6, 2, 10};
        const auto& [B, T, H, K, D] = size;
        Buffer qkv(dtype, {B, T, size.columns()}, random_values(B * T * size.columns(), 8));
        Buffer dout(dtype, {B, T, H * D}, random_values(B * T * H * D, 9));
        Attention first(size, dtype), second(size, dtype);
        first.forward(qkv, 0.3);
        first.backward(dout, 0.3);
        second.forward(qkv, 0.3);
        second.backward(dout, 0.3);
        CHECK(first.out.bits() == second.out.bits());
        CHECK(first.dqkv.bits() == second.dqkv.bits());

        Arena arena("test");
        AttentionSaved saved;
        for (int pass = 0; pass < 2; ++pass) {
            saved.q = arena.take("q", dtype, {B, H, T, D});
            saved.k = arena.take("k", dtype, {B, K, T, D});
            saved.v = arena.take("v", dtype, {B, K, T, D});
            saved.probs = arena.take("probs", dtype, {B, H, T, T});
            if (pass == 0) arena.reserve();
        }
        attention_forward(second.out, saved, qkv, 0.3f, second.forward_scratch, device().stream);
        attention_backward(second.dqkv, dout, saved, 0.3f, second.backward_scratch, device().stream);
        CHECK(first.out.bits() == second.out.bits());
        CHECK(first.dqkv.bits() == second.dqkv.bits());

        const std::vector<float> probs = to_floats(saved.probs);
        cudaCheck(cudaMemset(saved.probs.data, 0xff, saved.probs.bytes()));
        attention_probs(saved, 0.3f, device().stream);
        CHECK(to_floats(saved.probs) == probs);
    }
}

TEST_CASE("attention names what is wrong", "[attention]") {
    Attention a({2, 3, 4, 2, 8}, DType::f32);
    Buffer qkv(DType::f32, {2, 3, 64}), dout(DType::f32, {2, 3, 32}), odd_k(DType::f32, {2, 3, 3, 8}),
        half(DType::bf16, {2, 3, 64});
    Buffer long_row(DType::f32, {2 * 3 * 64 + 1}), few(DType::f32, {100}), thin(DType::f32, {2, 3, 60});
    Tensor shifted = make_tensor(static_cast<char*>(long_row.tensor().data) + 4, DType::f32, {2, 3, 64});
    cudaStream_t stream = device().stream;
    AttentionSaved saved = a.saved();
    const auto forward = [&](Tensor out, const AttentionSaved& s, Tensor inp, Tensor scratch) {
        attention_forward(out, s, inp, 1.0f, scratch, stream);
    };
    const std::string name = "attention_forward: ";
    CHECK_THROWS_WITH(forward(a.out, saved, thin, a.forward_scratch),
                      ContainsSubstring(name + "qkv is f32 (2, 3, 60), expected f32 (2, 3, 64)"));
    CHECK_THROWS_WITH(forward(a.out, saved, half, a.forward_scratch), ContainsSubstring(name + "qkv is bf16"));
    CHECK_THROWS_WITH(forward(qkv, saved, qkv, a.forward_scratch),
                      ContainsSubstring(name + "out is f32 (2, 3, 64), expected f32 (2, 3, 32)"));
    CHECK_THROWS_WITH(forward(a.out, saved, shifted, a.forward_scratch), ContainsSubstring(name + "qkv starts at"));
    CHECK_THROWS_WITH(forward(a.out, saved, qkv, few), ContainsSubstring(name + "scratch has 100 elements, needs"));
    CHECK_THROWS_WITH(forward(a.out, saved, qkv, {}), ContainsSubstring(name + "scratch is no tensor"));
    saved.k = odd_k;
    CHECK_THROWS_WITH(forward(a.out, saved, qkv, a.forward_scratch),
                      ContainsSubstring(name + "H = 4 query heads are not a multiple of K = 3"));
    saved = a.saved();
    saved.probs = a.q;
    CHECK_THROWS_WITH(forward(a.out, saved, qkv, a.forward_scratch), ContainsSubstring(name + "saved.probs is"));
    saved = a.saved();
    saved.v = {};
    CHECK_THROWS_WITH(forward(a.out, saved, qkv, a.forward_scratch), ContainsSubstring(name + "saved.v is no tensor"));
    CHECK_THROWS_WITH(attention_backward(thin, dout, a.saved(), 1.0f, a.backward_scratch, stream),
                      ContainsSubstring("attention_backward: dqkv is"));
    CHECK_THROWS_WITH(attention_backward(qkv, thin, a.saved(), 1.0f, a.backward_scratch, stream),
                      ContainsSubstring("attention_backward: dout is"));
    CHECK_THROWS_WITH(attention_backward(qkv, dout, a.saved(), 1.0f, few, stream),
                      ContainsSubstring("attention_backward: scratch has 100"));
}
