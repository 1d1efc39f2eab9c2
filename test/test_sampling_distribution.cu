// test/test_sampling_distribution.cu: how often tokens are drawn, of 10^5 draws; and how often two models agree.
//
// test_sampling.cu compares the kernels draw by draw. This is about random numbers: that they are spread evenly over
// samples, positions and tokens. It launches no kernel in another way, so that once is enough (ONCE in the Makefile).
#include "sampling.h"

TEST_CASE("sampling: 10^5 draws of each option by chi-square", "[sampling]") {
    const int64_t V = 53, padding = 11, n_rows = 100000;
    const std::vector<double> x = logits_with_ties(V, 5);
    Buffer logits(DType::f32, {n_rows, V + padding}, repeated(x, n_rows, padding));
    TestSampler test(n_rows, V);
    for (const Case& c : cases()) {
        // Penalties and biases only move logits: one of each will do.
        if (c.name == "repetition 1.7" || c.name == "top_k above V") continue;
        const std::vector<double> expected = probabilities(adjusted(x, c.options, c.prompt, c.answer), c.options);
        std::vector<int64_t> counts(static_cast<size_t>(V), 0);
        std::vector<SamplingRow> rows;
        for (int64_t i = 0; i < n_rows; ++i)  // other samples and other positions
            rows.push_back({&c.options, static_cast<uint64_t>(i % 10), i / 10, c.prompt, c.answer});
        for (const Sampled& s : test.draw(logits, rows)) ++counts.at(static_cast<size_t>(s.token));
        check_chi_square(counts, expected, c.name);
    }
}

// Two models that draw with the same random numbers, as the target and the draft of speculative decoding do.
TEST_CASE("speculation: a draft model's tokens are accepted as often as the theory says", "[speculation]") {
    const int64_t V = 23, n = 100000;
    const std::vector<double> x = random_values(V, 31, 1.5);
    std::vector<double> y = random_values(V, 32, 1.0);
    for (size_t v = 0; v < y.size(); ++v) y[v] += x[v];
    Buffer target(DType::f32, {n, V}, repeated(x, n, 0)), draft(DType::f32, {n, V}, repeated(y, n, 0));
    TestSampler test(n, V);
    for (const SamplingOptions& o : {options(1, 0, 1, 0), options(0.8, 9, 0.9, 0)}) {
        std::vector<SamplingRow> rows;
        for (int64_t i = 0; i < n; ++i) rows.push_back({&o, static_cast<uint64_t>(i % 1000), i / 1000});
        const std::vector<Sampled> drawn = test.draw(target, rows), proposed = test.draw(draft, rows);
        int64_t n_accepted = 0;
        std::vector<int64_t> counts(static_cast<size_t>(V)), draft_counts = counts;
        for (size_t i = 0; i < rows.size(); ++i) {
            n_accepted += drawn[i].token == proposed[i].token;
            ++counts.at(static_cast<size_t>(drawn[i].token)), ++draft_counts.at(static_cast<size_t>(proposed[i].token));
        }
        const std::vector<double> p = probabilities(x, o), q = probabilities(y, o);
        double expected = 0, distance = 0;
        for (size_t v = 0; v < p.size(); ++v) {
            double sum = 0;
            for (size_t w = 0; w < p.size(); ++w) sum += std::max(p[w] / p[v], q[w] / q[v]);
            if (p[v] > 0 && q[v] > 0) expected += 1 / sum;
            distance += std::abs(p[v] - q[v]) / 2;
        }
        const double rate = static_cast<double>(n_accepted) / static_cast<double>(n);
        INFO("accepted " << rate << ", expected " << expected << ", distance " << distance);
        // Within 6 standard deviations (2 in 10^9).
        CHECK(std::abs(rate - expected) <= 6 * std::sqrt(expected * (1 - expected) / static_cast<double>(n)));
        CHECK(expected >= (1 - distance) / (1 + distance));
        CHECK(expected <= 1 - distance);  // no method accepts more
        CHECK(expected < 0.95);
        check_chi_square(counts, p, "target");
        check_chi_square(draft_counts, q, "draft");
    }
}
