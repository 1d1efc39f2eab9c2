// test/test_sampling.cu: tokens drawn from logits, one by one, against float64 loops that sort and add up.
#include "sampling.h"

#include <fstream>

TEST_CASE("sampling: each option against a sort in float64", "[sampling]") {
    const int64_t V = 53, padding = 11, n_rows = 300;
    const std::vector<double> x = logits_with_ties(V, 5);
    Buffer logits(DType::f32, {n_rows, V + padding}, repeated(x, n_rows, padding));
    TestSampler test(n_rows, V);
    for (const Case& c : cases()) {
        const std::vector<double> expected = probabilities(adjusted(x, c.options, c.prompt, c.answer), c.options);
        std::vector<SamplingRow> rows;
        for (int64_t i = 0; i < n_rows; ++i)
            rows.push_back({&c.options, static_cast<uint64_t>(i % 10), i / 10, c.prompt, c.answer});
        check_draws(test.draw(logits, rows), rows, expected, kError, c.name);
    }
}

TEST_CASE("sampling: V of 1 and 50257, in every dtype", "[sampling][counted]") {
    for (DType dtype : kFloatDTypes)
        for (int64_t V : {1, 50257}) {
            const int64_t n_rows = 2, padding = 47;
            const std::vector<double> x = rounded(random_values(V, 8, 3.0), dtype);
            Buffer logits(dtype, {n_rows, V + padding}, repeated(x, n_rows, padding));
            const auto before = logits.bits();
            TestSampler test(n_rows, V);
            for (const SamplingOptions& o :
                 {options(0.7, 0, 1, 0), options(1, 50, 0.9, 0), options(1.5, 0, 0.95, 0.001)}) {
                std::vector<SamplingRow> rows;
                std::vector<Sampled> sampled;
                for (int64_t i = 0; i < 12; ++i) rows.push_back({&o, 0, i});
                for (int64_t i = 0; i < 12; i += n_rows)
                    for (const Sampled& s :
                         test.draw(logits, {rows[static_cast<size_t>(i)], rows[static_cast<size_t>(i + 1)]}))
                        sampled.push_back(s);
                check_draws(sampled, rows, probabilities(x, o), 4 * kError, concat(dtype_name(dtype), ", V = ", V));
            }
            CHECK(logits.bits() == before);
        }
}

TEST_CASE("sampling: greedy is the first of the largest logits, in every dtype, and never the padding", "[sampling]") {
    for (DType dtype : kFloatDTypes)
        for (int64_t V : {1, 53, 50257}) {
            const int64_t Vp = V + 15;
            auto x = rounded(random_values(3 * Vp, 3, 2.0), dtype);
            std::vector<int32_t> expected;
            for (int64_t row = 0; row < 3; ++row) {
                const auto first = x.begin() + row * Vp;
                std::fill(first + V, first + Vp, 60000.0);
                expected.push_back(static_cast<int32_t>(std::max_element(first, first + V) - first));
                if (row == 1) *(first + V - 1) = *(first + expected[1]);  // a second one, later
            }
            Buffer logits(dtype, {3, Vp}, x);
            SamplingOptions greedy = options(0, 3, 0.5, 0.5);  // options that do not apply
            TestSampler test(3, V);
            const auto sampled = test.draw(logits, {{&greedy}, {&greedy}, {&greedy}});
            for (size_t row = 0; row < 3; ++row) CHECK(sampled[row].token == expected[row]);
        }
}

TEST_CASE("sampling: -0 equals 0, and what options leave only one token", "[sampling]") {
    Buffer logits(DType::f32, {1, 5}, {-0.0, -1.0, 0.0, -2.0, 0.0});
    TestSampler test(1, 5);
    const auto drawn = [&](const SamplingOptions& o) {
        std::vector<int64_t> counts(5, 0);
        for (int64_t i = 0; i < 64; ++i) ++counts.at(static_cast<size_t>(test.draw(logits, {{&o, 0, i}})[0].token));
        return counts;
    };
    CHECK(drawn(options(0, 0, 1, 0)) == std::vector<int64_t>{64, 0, 0, 0, 0});
    // All that equal the largest; 64 draws miss one of three with probability 3 (2/3)^64 = 10^-11.
    for (const SamplingOptions& o :
         {options(1, 1, 1, 0), options(1, 0, 1e-9, 0), options(1, 0, 1, 1), options(1e-6, 0, 1, 0)}) {
        const auto counts = drawn(o);
        CHECK((counts[0] > 0 && counts[2] > 0 && counts[4] > 0));
        CHECK((counts[1] == 0 && counts[3] == 0));
    }
    CHECK(drawn(biased({{3, 1000}})) == std::vector<int64_t>{0, 0, 0, 64, 0});
    CHECK(drawn(biased({{0, -kInfinity}, {1, -kInfinity}, {2, -kInfinity}, {4, -kInfinity}})) ==
          std::vector<int64_t>{0, 0, 0, 64, 0});
}

TEST_CASE("sampling: a seen token's logit is divided by the penalty wherever it is above 0", "[sampling]") {
    SamplingOptions greedy = penalties(2, 0, 0);
    greedy.temperature = 0;
    const std::vector<int32_t> seen{0, 2};
    TestSampler test(1, 3);
    const Buffer below_1(DType::f32, {1, 3}, {0.75, 0.5, 0.875}), below_0(DType::f32, {1, 3}, {-0.25, -0.375, -0.5});
    for (const Buffer* logits : {&below_1, &below_0}) CHECK(test.draw(*logits, {{&greedy, 0, 0, seen}})[0].token == 1);
}

TEST_CASE("sampling: a row draws the same alone, among others, and again", "[sampling][counted]") {
    for (int64_t V : {53, 3001}) {
        const std::vector<Case> all = cases();
        const int64_t n_rows = 3 * std::ssize(all), Vp = V + 7;
        Buffer logits(DType::bf16, {n_rows, Vp}, random_values(n_rows * Vp, 21, 3.0));
        // Prompts or answers of the whole vocabulary have more adjustments together than fit into one launch.
        std::vector<int32_t> whole(static_cast<size_t>(V));
        std::iota(whole.begin(), whole.end(), 0);
        std::vector<SamplingOptions> options_of_row;
        for (int64_t i = 0; i < n_rows; ++i) {
            options_of_row.push_back(all[static_cast<size_t>(i) % all.size()].options);
            options_of_row.back().logprobs = i % 4 - 1;
        }
        std::vector<SamplingRow> rows;
        for (size_t i = 0; i < options_of_row.size(); ++i) {
            const std::span<const int32_t> answers[] = {all[i % all.size()].answer, {}, whole};
            rows.push_back({&options_of_row[i], i, 5, whole, answers[i / all.size()]});
        }
        TestSampler test(n_rows, V);
        const auto together = test.draw(logits, rows), again = test.draw(logits, rows);
        std::vector<int32_t> tokens;
        for (int64_t i = 0; i < n_rows; ++i) {
            const size_t row = static_cast<size_t>(i);
            const Sampled alone = test.draw(logits.tensor().slice(i, 1), {rows[row]})[0];
            for (const Sampled& other : {together[row], again[row]}) {
                CHECK(other.token == alone.token);
                CHECK(other.logprob == alone.logprob);
                REQUIRE(other.top.size() == alone.top.size());
                for (size_t n = 0; n < alone.top.size(); ++n) {
                    CHECK(other.top[n].token == alone.top[n].token);
                    CHECK(other.top[n].logprob == alone.top[n].logprob);
                }
            }
            tokens.push_back(alone.token);
        }
        record_bits(tokens.data(), tokens.size() * sizeof(int32_t));
    }
}

TEST_CASE("sampling: log-probabilities of the token and of the most probable ones, before all options",
          "[sampling][counted]") {
    for (DType dtype : kFloatDTypes)
        for (int64_t V : {1, 53, 4001}) {
            const int64_t Vp = V + 3;
            std::vector<double> x = rounded(logits_with_ties(V, 12), dtype);
            if (V > 1) x[1] = -kInfinity;
            Buffer logits(dtype, {2, Vp}, repeated(x, 2, 3));
            SamplingOptions o = biased({{0, 3}});
            o.logprobs = V < kMostTop ? 20 : kMostTop, o.top_k = 7;
            SamplingOptions only_own = o;
            only_own.logprobs = 0;
            TestSampler test(2, V);
            const auto sampled = test.draw(logits, {{&o, 0, 3}, {&only_own, 0, 3}});

            std::vector<double> p = softmax(x);
            std::vector<int32_t> order(static_cast<size_t>(V));
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
                return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)];
            });
            // As the loss in test_cross_entropy.cu, whose sum this is; and two roundings of numbers below 32.
            const double error = (51 + static_cast<double>(V) / 128 + 64) * 0x1p-24;
            const auto expected = [&](int32_t token) { return std::log(p[static_cast<size_t>(token)]); };
            REQUIRE(sampled[0].top.size() == static_cast<size_t>(std::min(V, o.logprobs)));
            for (size_t i = 0; i < sampled[0].top.size(); ++i) {
                CHECK(sampled[0].top[i].token == order[i]);
                CHECK(std::abs(sampled[0].top[i].logprob - expected(order[i])) <= error);
            }
            CHECK(sampled[1].top.empty());
            for (const Sampled& s : sampled) CHECK(std::abs(s.logprob - expected(s.token)) <= error);
        }
}

TEST_CASE("sampling: no token where the logits are not finite or every token is banned", "[sampling]") {
    Buffer logits(DType::f32, {4, 3},
                  {1, NAN, 2, 1, kInfinity, 2, -kInfinity, -kInfinity, -kInfinity, 1, -kInfinity, 2});
    TestSampler test(4, 3);
    for (double temperature : {0.0, 1.0}) {
        const SamplingOptions o = options(temperature, 2, 0.9, 0.1);
        const auto sampled = test.draw(logits, {{&o}, {&o}, {&o}, {&o}});
        for (size_t row = 0; row < 3; ++row) CHECK(sampled[row].token == -1);
        CHECK(sampled[3].token != -1);
        const SamplingRow given{.options = &o, .given = 1};
        const auto known = test.draw(logits, {given, given, given, given});
        for (size_t row = 0; row < 4; ++row) CHECK(known[row].token == (row < 3 ? -1 : 1));
        SamplingOptions banned = o;
        banned.logit_bias = {{0, -kInfinity}, {2, -kInfinity}};
        CHECK(test.draw(logits.tensor().slice(3, 1), {{&banned}})[0].token == -1);
    }
    // As many of the most probable tokens as there are, of a row that has the largest of all keys: token 0's, a NaN.
    Buffer half(DType::f16, {1, 3}, {NAN, 1, 2});
    SamplingOptions all = options(1, 0, 1, 0);
    all.logprobs = 3;
    const Sampled sampled = test.draw(half, {{&all}})[0];
    for (size_t i = 0; i < 3; ++i) CHECK(sampled.top.at(i).token == std::vector<int32_t>{0, 2, 1}[i]);
}

TEST_CASE("sampling: options out of range are named", "[sampling]") {
    const auto check_named = [](const SamplingOptions& o, const std::string& message) {
        CHECK_THROWS_WITH(check_sampling(o, 100), ContainsSubstring(message));
    };
    check_sampling(SamplingOptions(), 100);
    CHECK_NOTHROW(check_sampling(SamplingOptions(), kMostSampledTokens));
    CHECK_THROWS_WITH(check_sampling(SamplingOptions(), kMostSampledTokens + 1),
                      ContainsSubstring("has 262145 tokens, and at most 262144 can be sampled from"));
    for (const Case& c : cases()) check_sampling(c.options, 100);
    check_named(options(-1, 0, 1, 0), "temperature is -1; it must be 0 (the most probable token) or from 1e-6 to 1e6");
    check_named(options(NAN, 0, 1, 0), "temperature is nan");
    check_named(options(1, -2, 1, 0), "top_k is -2");
    check_named(options(1, 0, 0, 0), "top_p is 0; it must be above 0 and at most 1");
    check_named(options(1, 0, 1.5, 0), "top_p is 1.5");
    check_named(options(1, 0, 1, -0.5), "min_p is -0.5; it must be from 0");
    check_named(penalties(0, 0, 0), "repetition_penalty is 0");
    check_named(penalties(1, kInfinity, 0), "presence_penalty is inf");
    check_named(penalties(1, 0, -101), "frequency_penalty is -101");
    check_named(biased({{100, 1}}), "logit_bias names token 100, but the model's tokens are 0 to 99");
    check_named(biased({{1, kInfinity}}), "logit_bias of token 1 is inf");
    check_named(biased({{1, -101}}), "logit_bias of token 1 is -101; it must be from -100 to 100");
    SamplingOptions many;
    many.logprobs = 21;
    check_named(many, "logprobs is 21; it must be from 0 to 20, or -1");
    // The bounds are allowed, and the next number behind each is not.
    const auto check_bounds = [&](double SamplingOptions::*option, const std::string& name, double least, double most) {
        for (const auto& [bound, beyond] : {std::pair(least, -kInfinity), {most, kInfinity}}) {
            SamplingOptions o;
            o.*option = bound;
            CHECK_NOTHROW(check_sampling(o, 100));
            o.*option = std::nextafter(bound, beyond);
            check_named(o, name + " is ");
        }
    };
    check_bounds(&SamplingOptions::temperature, "temperature", 1e-6, 1e6);
    check_bounds(&SamplingOptions::top_p, "top_p", std::numeric_limits<double>::denorm_min(), 1);
    check_bounds(&SamplingOptions::min_p, "min_p", 0, 1);
    check_bounds(&SamplingOptions::repetition_penalty, "repetition_penalty", 0.01, 100);
    check_bounds(&SamplingOptions::presence_penalty, "presence_penalty", -100, 100);
    check_bounds(&SamplingOptions::frequency_penalty, "frequency_penalty", -100, 100);
    check_named(options(1, -1, 1, 0), "top_k is -1");
    for (const int64_t n : {-2, 21}) many.logprobs = n, check_named(many, concat("logprobs is ", n));
    for (const int64_t n : {-1, 20}) many.logprobs = n, check_sampling(many, 100);
    check_sampling(biased({{0, -100}, {99, 100}}), 100);
    for (const double bias : {std::nextafter(-100, -kInfinity), std::nextafter(100, kInfinity)})
        check_named(biased({{1, bias}}), "logit_bias of token 1 is ");

    Buffer logits(DType::f32, {3, 10});
    TestSampler test(2, 10);
    const SamplingOptions o = penalties(2, 0, 0);
    const std::vector<int32_t> prompt{10};
    CHECK_THROWS_WITH(test.draw(logits, {{&o}, {&o}, {&o}}), ContainsSubstring("3 rows, memory for 2"));
    CHECK_THROWS_WITH(test.draw(logits.tensor().slice(0, 1), {{&o, 0, 0, prompt}}),
                      ContainsSubstring("token 10 is outside of the vocabulary of 10"));
    Buffer wide(DType::f32, {1, (1 << 18) + 1});
    TestSampler too_wide(1, (1 << 18) + 1);
    CHECK_THROWS_WITH(too_wide.draw(wide, {{&o}}), ContainsSubstring("V = 262145 tokens; at most 262144"));

    Buffer x(DType::f32, {3, 32}), distributions(DType::i32, {3, kStructN<SamplingDistribution>}),
        rules(DType::i32, {3, kStructN<SamplingRule>}), results(DType::i32, {3, 1});
    CHECK_THROWS_WITH(log_probabilities(results, logits, rules, 10, device().stream),
                      ContainsSubstring("results is i32 (3, 1), expected 2 + 2 n columns"));
    const Tensor none = make_tensor(results.tensor().data, DType::i32, {3, 0});
    CHECK_THROWS_WITH(draw_tokens(none, x, distributions, rules, device().stream),
                      ContainsSubstring("draw_tokens: results is i32 (3, 0), expected a column for the token"));
}

// test/golden/sampling/make_sampling_golden.py has the same formula.
static std::vector<double> golden_logits(int64_t V, int64_t seed) {
    std::vector<double> x;
    for (int64_t v = 0; v < V; ++v)
        x.push_back(static_cast<double>((v * (29 + 2 * seed) + 101 * seed) % 389 * 2 - 388) / 64);
    return x;
}

TEST_CASE("sampling: the probabilities of Hugging Face's logits processors", "[sampling]") {
    std::ifstream file("test/golden/sampling/golden.txt");
    const int64_t V = 53, n_rows = 300;
    TestSampler test(n_rows, V);
    int64_t n_cases = 0;
    std::string word, name;
    SamplingOptions o;
    while (file >> word >> name >> o.temperature >> o.top_k >> o.top_p >> o.min_p >> o.repetition_penalty >> o.seed) {
        std::vector<int32_t> seen;
        int32_t token = 0;
        for (file >> word; file >> token;) seen.push_back(token);
        file.clear();
        file >> word;
        std::vector<double> expected(static_cast<size_t>(V));
        for (double& p : expected) file >> p;
        REQUIRE((file && word == "p"));
        ++n_cases;

        Buffer logits(DType::f32, {n_rows, V}, repeated(golden_logits(V, static_cast<int64_t>(o.seed)), n_rows, 0));
        // Some of the tokens are the prompt, the others the answer: the penalty is for both.
        const std::span<const int32_t> tokens = seen;
        std::vector<SamplingRow> rows;
        for (int64_t i = 0; i < n_rows; ++i)
            rows.push_back({&o, 0, i, tokens.first(seen.size() / 2), tokens.subspan(seen.size() / 2)});
        check_draws(test.draw(logits, rows), rows, expected, kError, name);
    }
    CHECK((n_cases >= 9 && file.eof()));  // all of it was read
}
