// test/attention.h: attention as float64 loops over every pair of tokens, and what its tests need beside them.
#pragma once

#include "layers/layers.h"
#include "reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

namespace {

constexpr double kUnit = 0x1p-24;  // float32's unit roundoff

struct Case {
    int64_t B, T, H, K, D, Dv;
    bool causal;
    int64_t window;                // 0: none
    std::vector<int64_t> lengths;  // of the documents in a row; empty: one
    int layout;  // 0: q, k, v packed in one row; 1: apart; 2: k and v interleaved head by head, as MLA has them
    double scale() const { return static_cast<float>(1 / std::sqrt(static_cast<double>(D))); }
    std::string name() const {
        std::string text =
            concat("B T H K D Dv = ", B, " ", T, " ", H, " ", K, " ", D, " ", Dv, causal ? ", causal" : ", full",
                   ", window ", window, ", layout ", layout, ", documents");
        for (int64_t n : lengths) text += concat(" ", n);
        return text;
    }
};

// (T, 2): first and end of each token's document. Row b has its documents in another order.
std::vector<int32_t> documents_of(const Case& c) {
    std::vector<int32_t> all;
    for (int64_t b = 0; b < c.B; ++b) {
        int64_t first = 0;
        for (size_t i = 0; i < c.lengths.size(); ++i) {
            const int64_t n = c.lengths[(i + static_cast<size_t>(b)) % c.lengths.size()];
            for (int64_t t = 0; t < n; ++t)
                all.insert(all.end(), {static_cast<int32_t>(first), static_cast<int32_t>(first + n)});
            first += n;
        }
        REQUIRE((c.lengths.empty() || first == c.T));
    }
    return all;
}

bool sees(const Case& c, const std::vector<int32_t>& documents, int64_t b, int64_t t, int64_t s) {
    const auto document = [&](int64_t token) { return documents[static_cast<size_t>(2 * (b * c.T + token))]; };
    return (!c.causal || s <= t) && (c.window == 0 || std::abs(t - s) < c.window) &&
           (documents.empty() || document(t) == document(s));
}

float to_dtype(float x, DType dtype) {
    float stored = x;
    dispatch(dtype, [&](auto zero) { stored = static_cast<float>(static_cast<decltype(zero)>(x)); });
    return stored;
}

// q (B, T, H, D), k (B, T, K, D), v (B, T, K, Dv), out (B, T, H, Dv), lse (B, H, T)
struct Values {
    std::vector<double> q, k, v, dout;
};
struct Result {
    std::vector<double> out, lse, dq, dk, dv;
};

template <class Real>
void add_scaled(Real* to, Real factor, const Real* from, int64_t n) {
#pragma omp simd  // tests are compiled without vectorised loops
    for (int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

// Loops over every pair. Real = double is the truth. Real = float is the plain computation in the same precision: each
// sum one term after the other in float32, and what PyTorch's eager operations would store in `storage` (scores,
// probabilities, their gradients, the results) is rounded to it.
template <class Real>
Result attention(const Case& c, const Values& in, DType storage) {
    const auto& [B, T, H, K, D, Dv, causal, window, lengths, layout] = c;
    const std::vector<int32_t> documents = documents_of(c);
    const Real scale = static_cast<Real>(c.scale());
    const auto keep = [&](Real x) {
        return std::is_same_v<Real, float> ? Real(to_dtype(static_cast<float>(x), storage)) : x;
    };
    const auto real = [](const std::vector<double>& x) { return std::vector<Real>(x.begin(), x.end()); };
    const std::vector<Real> q = real(in.q), k = real(in.k), v = real(in.v), dout = real(in.dout);
    std::vector<Real> dq(q.size()), dk(k.size()), dv(v.size()), out(dout.size()), row(static_cast<size_t>(Dv));
    Result result;
    result.lse.resize(static_cast<size_t>(B * H * T));
    std::vector<Real> P(static_cast<size_t>(T)), dS(static_cast<size_t>(T));
    for (int64_t b = 0; b < B; ++b)
        for (int64_t h = 0; h < H; ++h)
            for (int64_t t = 0; t < T; ++t) {
                const int64_t kv = h / (H / K);
                const Real* qt = &q[static_cast<size_t>(((b * T + t) * H + h) * D)];
                const Real* dt = &dout[static_cast<size_t>(((b * T + t) * H + h) * Dv)];
                // c.T, not T: clang++ before 16 captures no structured bindings in a lambda.
                const auto key = [&](int64_t s) { return static_cast<size_t>(((b * c.T + s) * c.K + kv) * c.D); };
                const auto value = [&](int64_t s) { return static_cast<size_t>(((b * c.T + s) * c.K + kv) * c.Dv); };
                std::vector<int64_t> keys;
                for (int64_t s = 0; s < T; ++s)
                    if (sees(c, documents, b, t, s)) keys.push_back(s);
                Real max = -INFINITY, sum = 0, r = 0;
                for (int64_t s : keys) {
                    Real score = 0;
                    for (int64_t d = 0; d < D; ++d) score += qt[d] * k[key(s) + static_cast<size_t>(d)];
                    max = std::max(max, P[static_cast<size_t>(s)] = keep(scale * score));
                }
                for (int64_t s : keys) sum += P[static_cast<size_t>(s)] = std::exp(P[static_cast<size_t>(s)] - max);
                result.lse[static_cast<size_t>((b * H + h) * T + t)] = max + std::log(sum);
                std::fill(row.begin(), row.end(), Real(0));
                for (int64_t s : keys) {  // o = P v; dP = do v^T
                    const Real p = P[static_cast<size_t>(s)] = keep(P[static_cast<size_t>(s)] / sum);
                    Real dp = 0;
                    for (int64_t d = 0; d < Dv; ++d) dp += dt[d] * v[value(s) + static_cast<size_t>(d)];
                    add_scaled(row.data(), p, &v[value(s)], Dv);
                    r += p * (dS[static_cast<size_t>(s)] = keep(dp));
                }
                for (int64_t d = 0; d < Dv; ++d)
                    out[static_cast<size_t>(((b * T + t) * H + h) * Dv + d)] = keep(row[static_cast<size_t>(d)]);
                for (int64_t s : keys) {  // dS = P * (dP - r) scale; dq = dS k; dk = dS^T q; dv = P^T do
                    const Real p = P[static_cast<size_t>(s)], ds = keep(p * (dS[static_cast<size_t>(s)] - r) * scale);
                    add_scaled(&dq[static_cast<size_t>(((b * T + t) * H + h) * D)], ds, &k[key(s)], D);
                    add_scaled(&dk[key(s)], ds, qt, D);
                    add_scaled(&dv[value(s)], p, dt, Dv);
                }
            }
    const auto kept = [&](const std::vector<Real>& x) {
        std::vector<double> y;
        for (Real number : x) y.push_back(keep(number));
        return y;
    };
    result.out = kept(out), result.dq = kept(dq), result.dk = kept(dk), result.dv = kept(dv);
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// The same on the device

// Heads of (B, T, count, D) values, put into the columns where `heads` says they lie, and taken from there.
void put(std::vector<double>& rows, const HeadColumns& heads, const std::vector<double>& values) {
    const int64_t N = heads.rows.rows(), columns = heads.rows.cols();
    for (int64_t n = 0; n < N; ++n)
        for (int64_t h = 0; h < heads.count; ++h)
            for (int64_t d = 0; d < heads.D; ++d)
                rows[static_cast<size_t>(n * columns + heads.column + h * heads.head_stride() + d)] =
                    values[static_cast<size_t>((n * heads.count + h) * heads.D + d)];
}
std::vector<double> get(const std::vector<double>& rows, const HeadColumns& heads) {
    const int64_t N = heads.rows.rows(), columns = heads.rows.cols();
    std::vector<double> values;
    for (int64_t n = 0; n < N; ++n)
        for (int64_t h = 0; h < heads.count; ++h)
            for (int64_t d = 0; d < heads.D; ++d)
                values.push_back(rows[static_cast<size_t>(n * columns + heads.column + h * heads.head_stride() + d)]);
    return values;
}

// q, k and v, or their gradients, in up to three buffers. What lies between heads is never touched.
class QkvRows {
  public:
    QkvRows(const Case& c, DType dtype) {
        const int64_t pad = 16;
        const auto add = [&](int64_t columns) {
            buffers_.push_back(std::make_unique<Buffer>(dtype, std::initializer_list<int64_t>{c.B, c.T, columns}));
            fills_.push_back(std::vector<double>(static_cast<size_t>(c.B * c.T * columns), 7.0));
            return buffers_.back()->tensor();
        };
        if (c.layout == 0) {
            const Tensor rows = add(c.H * c.D + c.K * (c.D + c.Dv));
            heads = {{rows, c.H, c.D, 0}, {rows, c.K, c.D, c.H * c.D}, {rows, c.K, c.Dv, (c.H + c.K) * c.D}};
            at_ = {0, 0, 0};
        } else if (c.layout == 1) {
            heads = {{add(c.H * c.D + pad), c.H, c.D, pad}, {add(c.K * c.D), c.K, c.D}, {add(c.K * c.Dv), c.K, c.Dv}};
            at_ = {0, 1, 2};
        } else {
            const Tensor q = add(c.H * (c.D + pad)), kv = add(c.K * (c.D + c.Dv));
            heads = {{q, c.H, c.D, 0, c.D + pad}, {kv, c.K, c.D, 0, c.D + c.Dv}, {kv, c.K, c.Dv, c.D, c.D + c.Dv}};
            at_ = {0, 1, 1};
        }
        for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i]->set(fills_[i]);
    }
    void set(const Values& values) {
        put(fills_[at_[0]], heads.q, values.q);
        put(fills_[at_[1]], heads.k, values.k);
        put(fills_[at_[2]], heads.v, values.v);
        for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i]->set(fills_[i]);
    }
    std::vector<double> q() const { return get(buffers_[at_[0]]->values(), heads.q); }
    std::vector<double> k() const { return get(buffers_[at_[1]]->values(), heads.k); }
    std::vector<double> v() const { return get(buffers_[at_[2]]->values(), heads.v); }
    size_t n_untouched() const {  // the 7s between heads
        size_t n = 0;
        for (size_t i = 0; i < buffers_.size(); ++i) {
            const auto values = buffers_[i]->values();
            n += static_cast<size_t>(std::count(values.begin(), values.end(), 7.0));
        }
        return n;
    }
    QkvHeads heads;

  private:
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<std::vector<double>> fills_;
    std::array<size_t, 3> at_;
};

Values random_inputs(const Case& c, DType dtype, uint64_t seed, double size = 1.5) {
    return {rounded(random_values(c.B * c.T * c.H * c.D, seed, size), dtype),
            rounded(random_values(c.B * c.T * c.K * c.D, seed + 1, size), dtype),
            rounded(random_values(c.B * c.T * c.K * c.Dv, seed + 2, size), dtype),
            rounded(random_values(c.B * c.T * c.H * c.Dv, seed + 3), dtype)};
}

double worst(const std::vector<double>& a, const std::vector<double>& b) {
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) most = larger(most, std::abs(a[i] - b[i]));
    return most;
}

// The longest row of n numbers.
double longest(const std::vector<double>& rows, int64_t n) {
    double most = 0;
    for (size_t i = 0; i < rows.size(); i += static_cast<size_t>(n)) {
        double square = 0;
        for (size_t j = i; j < i + static_cast<size_t>(n); ++j) square += rows[j] * rows[j];
        most = std::max(most, square);
    }
    return std::sqrt(most);
}

// CHECKs the gradients of q, k and v against finite differences of the loops in float64, whose own error is step^2 =
// 1e-10 times third derivatives of some tens, and of rounding 1e-15 * 10 / 1e-5.
void check_differences(const Case& c, const Values& in, const Result& result, double margin) {
    for (const auto& [input, gradient] :
         {std::pair{&Values::q, &Result::dq}, std::pair{&Values::k, &Result::dk}, std::pair{&Values::v, &Result::dv}}) {
        const auto loss = [&, input = input](const std::vector<double>& x) {
            Values changed = in;
            changed.*input = x;
            const std::vector<double> y = attention<double>(c, changed, DType::f32).out;
            return std::inner_product(y.begin(), y.end(), in.dout.begin(), 0.0);
        };
        for (const auto& [i, derivative] : finite_differences(loss, in.*input, 1e-5, 32))
            CHECK((result.*gradient)[i] == Approx(derivative).epsilon(1e-5).margin(margin));
    }
}

// What the plain computation in the same precision makes of a case: its largest error in each result. With a handful of
// tokens it may be exact by luck, so then it is the largest of eight draws of inputs.
Result plain_errors(const Case& c, DType dtype, const Values& in, const Result& exact, uint64_t seed) {
    Result errors{{0}, {0}, {0}, {0}, {0}};
    for (uint64_t draw = 0; draw < (c.T <= 8 ? 8u : 1u); ++draw) {
        const Values other = draw == 0 ? in : random_inputs(c, dtype, seed + 1000 * draw);
        const Result truth = draw == 0 ? exact : attention<double>(c, other, dtype),
                     plain = attention<float>(c, other, dtype);
        for (auto member : {&Result::out, &Result::lse, &Result::dq, &Result::dk, &Result::dv})
            (errors.*member)[0] = std::max((errors.*member)[0], worst(plain.*member, truth.*member));
    }
    return errors;
}

}  // namespace
