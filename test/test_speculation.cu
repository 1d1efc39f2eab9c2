// test/test_speculation.cu: proposals from the text itself, and what a step gains; verification against float64.
#include "sampling.h"

namespace {

// The definition, word for word: n = 3, 2, 1; the last place before the end.
std::vector<int32_t> propose_by_search(const std::vector<int32_t>& tokens, int64_t k) {
    const int64_t size = std::ssize(tokens);
    for (int64_t n = 3; n > 0; --n)
        for (int64_t place = size - 1; place >= n; --place) {
            if (!std::equal(tokens.begin() + place - n, tokens.begin() + place, tokens.end() - n)) continue;
            std::vector<int32_t> text = tokens;
            for (int64_t i = 0; i < k; ++i) text.push_back(text[static_cast<size_t>(place + i)]);
            return {text.end() - k, text.end()};
        }
    return {};
}

}  // namespace

TEST_CASE("speculation: prompt look-up finds the last occurrence of the longest end of the text", "[speculation]") {
    for (uint64_t n_tokens : {2, 4, 40}) {
        PromptLookup lookup;
        std::vector<int32_t> text;
        for (uint64_t i = 0; i < 300; ++i) {
            CHECK(lookup.propose(text, 5) == propose_by_search(text, 5));
            // One to three new tokens a step.
            for (uint64_t j = 0; j <= i % 3; ++j)
                text.push_back(static_cast<int32_t>(uniform_below(7, i, j, n_tokens)));
        }
    }
    PromptLookup lookup;
    CHECK(lookup.propose(std::vector<int32_t>{1, 2, 3, 1, 2}, 4) == std::vector<int32_t>{3, 1, 2, 3});
    CHECK(lookup.propose(std::vector<int32_t>{1, 2, 3, 1, 2, 9}, 4).empty());
}

TEST_CASE("speculation: a step gains the proposed tokens that were drawn, and one more", "[speculation]") {
    const auto gained = [](const std::vector<int32_t>& proposed, const std::vector<int32_t>& drawn) {
        std::vector<Sampled> sampled;
        for (int32_t token : drawn) sampled.push_back({token, 0, {}});
        return tokens_gained(proposed, sampled);
    };
    CHECK(gained({}, {5}) == 1);
    CHECK(gained({5, 6}, {4, 6, 7}) == 1);
    CHECK(gained({5, 6}, {5, 7, 7}) == 2);
    CHECK(gained({5, 6}, {5, 6, 7}) == 3);
    CHECK_THROWS_WITH(gained({5, 6}, {5, 6}), ContainsSubstring("2 tokens were drawn for 2 proposed ones"));
}

// Each proposal by itself: whether it is accepted, and what replaces it, from the random numbers of its row.
TEST_CASE("speculation: proposals are verified as float64 does it", "[speculation]") {
    for (int64_t V : {11, 1027}) {
        const int64_t n_rows = 200;
        const std::vector<double> x = random_values(V, 41, 1.5);
        std::vector<double> y = random_values(V, 42, 1.0);
        for (size_t v = 0; v < y.size(); ++v) y[v] = 0.7 * x[v] + y[v];
        Buffer target(DType::f32, {n_rows, V}, repeated(x, n_rows, 0)),
            draft(DType::f32, {n_rows, V}, repeated(y, n_rows, 0));
        TestSampler test(n_rows, V, n_rows);
        const SamplingOptions o = options(0.7, 0, 0.93, 0.002);
        std::vector<SamplingRow> rows;
        for (int64_t i = 0; i < n_rows; ++i) rows.push_back({&o, 3, i});
        const auto proposed = test.sampler.propose(draft, rows, 0, device().stream);
        for (size_t i = 0; i < rows.size(); ++i) {
            if (i % 5 == 4) continue;  // without a proposal
            rows[i].proposed = proposed[i].token, rows[i].slot = static_cast<int64_t>(i);
        }
        const auto drawn = test.draw(target, rows);

        const auto p = probabilities(x, o), q = probabilities(y, o);
        std::vector<double> residual;
        for (size_t v = 0; v < p.size(); ++v) residual.push_back(std::max(0.0, p[v] - q[v]));
        const double sum = std::accumulate(residual.begin(), residual.end(), 0.0);
        for (double& r : residual) r /= sum;
        std::vector<Sampled> plain, replaced;
        std::vector<SamplingRow> plain_rows, replaced_rows;
        int64_t n_accepted = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
            if (rows[i].proposed < 0) {
                plain.push_back(drawn[i]), plain_rows.push_back(rows[i]);
                continue;
            }
            const Philox bits = philox(o.seed, rows[i].sample, static_cast<uint64_t>(rows[i].position));
            const double u = static_cast<double>(uint64_t{bits.v[2]} << 32 | bits.v[3]) * 0x1p-64;
            const size_t d = static_cast<size_t>(rows[i].proposed);
            REQUIRE(std::abs(u * q[d] - p[d]) > 10 * kError * p[d]);
            if (u * q[d] < p[d]) {
                CHECK(drawn[i].token == rows[i].proposed);
                ++n_accepted;
            } else {
                replaced.push_back(drawn[i]), replaced_rows.push_back(rows[i]);
            }
        }
        CHECK((n_accepted > 20 && replaced.size() > 20));
        check_draws(plain, plain_rows, p, kError, "without a proposal");
        // A difference of two probabilities, divided by the sum of all of them.
        check_draws(replaced, replaced_rows, residual, 2 * kError / sum, "replaced");
    }
}

TEST_CASE("speculation: a draft that equals the target is always accepted; greedy does not look at proposals",
          "[speculation]") {
    const int64_t V = 101, n_rows = 100;
    Buffer logits(DType::f32, {n_rows, V}, random_values(n_rows * V, 43, 2.0));
    TestSampler test(n_rows, V, n_rows + 5);
    for (const SamplingOptions& o : {options(1.2, 40, 0.9, 0), options(0, 0, 1, 0)}) {
        std::vector<SamplingRow> rows;
        for (int64_t i = 0; i < n_rows; ++i) rows.push_back({&o, 9, i});
        const auto plain = test.draw(logits, rows);
        const auto proposed = test.sampler.propose(logits, rows, 5, device().stream);
        for (size_t i = 0; i < rows.size(); ++i) {
            rows[i].proposed = o.temperature > 0 ? proposed[i].token : static_cast<int32_t>(i);
            rows[i].slot = static_cast<int64_t>(i) + 5;
        }
        const auto drawn = test.draw(logits, rows);
        int64_t n_equal = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
            CHECK(drawn[i].token == (o.temperature > 0 ? proposed[i].token : plain[i].token));
            n_equal += proposed[i].token == plain[i].token;
        }
        CHECK((n_equal < n_rows) == (o.temperature > 0));  // the draft's random numbers are others
    }
    SamplingOptions o;
    CHECK_THROWS_WITH(test.sampler.propose(logits, std::vector<SamplingRow>(n_rows, {&o}), 6, device().stream),
                      ContainsSubstring("100 rows from slot 6 on, memory for 105 slots"));
    SamplingRow row{&o};
    row.proposed = 3, row.slot = 105;
    Buffer one(DType::f32, {1, V}, random_values(V, 44, 1.0));
    CHECK_THROWS_WITH(test.draw(one, {row}), ContainsSubstring("distribution in slot 105"));
}
