// test/test_sampling_distribution.cu: how often tokens are drawn, of 10^5 draws; with a draft model and without.
//
// test_sampling.cu compares the kernels draw by draw. This is about random numbers: that they are spread evenly over
// samples and positions, and that a draft model's proposals leave the distribution as it is. It launches no kernel in
// another way, so that once is enough (ONCE in the Makefile).
#include "sampling.h"

TEST_CASE("sampling: 10^5 draws of each option by chi-square", "[sampling]") {
    const int64_t V = 53, padding = 11, n_rows = 100000;
    const std::vector<double> x = logits_with_ties(V, 5);
    Buffer logits(DType::f32, {n_rows, V + padding}, repeated(x, n_rows, padding));
    TestSampler test(n_rows, V);
    for (const Case& c : cases()) {
        // Penalties and biases only move logits: one of each will do.
        if (c.name == "repetition 1.7" || c.name == "presence, frequency" || c.name == "top_k above V") continue;
        const std::vector<double> expected = probabilities(adjusted(x, c.options, c.prompt, c.answer), c.options);
        std::vector<int64_t> counts(static_cast<size_t>(V), 0);
        std::vector<SamplingRow> rows;
        for (int64_t i = 0; i < n_rows; ++i)  // other samples and other positions
            rows.push_back({&c.options, static_cast<uint64_t>(i % 10), i / 10, c.prompt, c.answer});
        for (const Sampled& s : test.draw(logits, rows)) ++counts.at(static_cast<size_t>(s.token));
        check_chi_square(counts, expected, c.name);
    }
}

namespace {

// A language of 7 tokens: the first token has the logits of row 7, the one behind token v those of row v.
constexpr int64_t kV = 7, kStart = 7;
struct Language {
    std::vector<double> logits;
    explicit Language(uint64_t seed, double scale) : logits(random_values(8 * kV, seed, scale)) {}
    std::vector<double> behind(int64_t token) const {
        return {logits.begin() + token * kV, logits.begin() + (token + 1) * kV};
    }
};

// Rows of logits behind these tokens.
std::vector<double> rows_behind(const Language& language, const std::vector<int64_t>& tokens) {
    std::vector<double> x;
    for (int64_t token : tokens)
        for (double number : language.behind(token)) x.push_back(number);
    return x;
}

}  // namespace

TEST_CASE("speculation: two tokens with a draft model have the distribution of plain sampling", "[speculation]") {
    const int64_t n = 50000, n_calls = 2;  // texts of two tokens at a time
    const Language target(31, 1.5), draft(32, 1.5);
    for (const SamplingOptions& o : {options(1, 0, 1, 0), options(0.8, 5, 0.9, 0)}) {
        TestSampler test(2 * n, kV, 2 * n);
        Buffer one(DType::f32, {n, kV}), two(DType::f32, {2 * n, kV});
        std::vector<int64_t> counts(kV * kV, 0);
        int64_t n_accepted = 0;
        for (int64_t call = 0; call < n_calls; ++call) {
            std::vector<SamplingRow> first, second, both;
            for (int64_t i = 0; i < n; ++i) first.push_back({&o, static_cast<uint64_t>(call * n + i), 0});
            second = first;
            for (SamplingRow& row : second) row.position = 1;
            // The draft proposes two tokens ...
            one.set(rows_behind(draft, std::vector<int64_t>(n, kStart)));
            const auto d1 = test.sampler.propose(one, first, 0, device().stream);
            std::vector<int64_t> tokens;
            for (const Sampled& s : d1) tokens.push_back(s.token);
            one.set(rows_behind(draft, tokens));
            const auto d2 = test.sampler.propose(one, second, n, device().stream);
            // ... and one step of the target verifies both.
            std::vector<int64_t> before;
            for (size_t i = 0; i < first.size(); ++i) {
                both.push_back(first[i]), both.push_back(second[i]);
                both[2 * i].proposed = d1[i].token, both[2 * i].slot = static_cast<int64_t>(i);
                both[2 * i + 1].proposed = d2[i].token, both[2 * i + 1].slot = n + static_cast<int64_t>(i);
                before.push_back(kStart), before.push_back(d1[i].token);
            }
            two.set(rows_behind(target, before));
            auto drawn = test.draw(two, both);
            // Where the first was rejected, the next step proposes and verifies the second again.
            std::vector<int64_t> rejected, texts(first.size());
            tokens.clear();
            for (size_t i = 0; i < first.size(); ++i) {
                tokens.push_back(drawn[2 * i].token);
                n_accepted += drawn[2 * i].token == d1[i].token;
            }
            one.set(rows_behind(draft, tokens));
            const auto again = test.sampler.propose(one, second, n, device().stream);
            for (size_t i = 0; i < first.size(); ++i) {
                if (drawn[2 * i].token == d1[i].token) continue;
                both[2 * i + 1].proposed = again[i].token;
                before[2 * i + 1] = drawn[2 * i].token;
            }
            two.set(rows_behind(target, before));
            const auto last = test.draw(two, both);
            for (size_t i = 0; i < first.size(); ++i) {
                const bool accepted = drawn[2 * i].token == d1[i].token;
                const int64_t token2 = accepted ? drawn[2 * i + 1].token : last[2 * i + 1].token;
                ++counts.at(static_cast<size_t>(drawn[2 * i].token * kV + token2));
            }
        }
        const auto p = probabilities(target.behind(kStart), o), q = probabilities(draft.behind(kStart), o);
        std::vector<double> expected;
        double acceptance = 0;
        for (int64_t v = 0; v < kV; ++v) {
            acceptance += std::min(p[static_cast<size_t>(v)], q[static_cast<size_t>(v)]);
            for (double next : probabilities(target.behind(v), o)) expected.push_back(p[static_cast<size_t>(v)] * next);
        }
        check_chi_square(counts, expected, "two tokens");
        // Accepted as often as any method can: sum of min(p, q), within 6 standard deviations (2 in 10^9).
        const double deviation = std::sqrt(acceptance * (1 - acceptance) * static_cast<double>(n * n_calls));
        CHECK(std::abs(static_cast<double>(n_accepted) - acceptance * static_cast<double>(n * n_calls)) <=
              6 * deviation);
    }
}
