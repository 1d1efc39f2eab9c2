// test/test_beam_search.cu: beams against all answers that there are, and against Hugging Face's generate().
#include "inference/inference.h"
#include "test.h"

#include <algorithm>
#include <cmath>
#include <fstream>

namespace {

using Early = BeamOptions::EarlyStopping;

// A language: log-probabilities of the tokens at a place of the answer, behind each token (the prompt is token 0).
// test/golden/sampling/make_beam_golden.py has the same formula.
struct Language {
    int64_t V, seed;
    std::vector<double> logprobs(const std::vector<int32_t>& answer) const {
        const int64_t place = std::ssize(answer), before = answer.empty() ? 0 : answer.back();
        std::vector<double> x;
        double sum = 0;
        for (int64_t v = 0; v < V; ++v) {
            const int64_t number = before * 37 + v * (61 + 2 * seed) + before * v * 11 + place * (97 + 13 * v * v);
            x.push_back(static_cast<double>((number + seed * 17) % 1009) / 256);
            sum += std::exp(x.back());
        }
        for (double& number : x) number -= std::log(sum);
        return x;
    }
};

std::vector<TokenLogprob> most_probable(const std::vector<double>& logprobs, int64_t n) {
    std::vector<TokenLogprob> top;
    for (size_t v = 0; v < logprobs.size(); ++v)
        top.push_back({static_cast<int32_t>(v), static_cast<float>(logprobs[v])});
    std::stable_sort(top.begin(), top.end(), [](const auto& a, const auto& b) { return a.logprob > b.logprob; });
    top.resize(std::min(top.size(), static_cast<size_t>(n)));
    return top;
}

std::vector<BeamAnswer> search(const BeamOptions& options, const Language& language) {
    BeamSearch beams(options);
    while (!beams.beams().empty()) {
        std::vector<std::vector<TokenLogprob>> top;
        for (const BeamSearch::Beam& beam : beams.beams())
            top.push_back(most_probable(language.logprobs(beam.answer.tokens), beams.n_tokens()));
        beams.step(top);
    }
    return beams.answers();
}

// All answers, by walking through them.
void add_all(std::vector<BeamAnswer>& answers, BeamAnswer& text, const BeamOptions& o, const Language& language) {
    const std::vector<double> logprobs = language.logprobs(text.tokens);
    for (int32_t v = 0; v < language.V; ++v) {
        const double before = text.score;
        text.tokens.push_back(v);
        text.score += logprobs[static_cast<size_t>(v)];
        if (std::count(o.stop_tokens.begin(), o.stop_tokens.end(), v) > 0 || std::ssize(text.tokens) == o.max_tokens) {
            const double length = static_cast<double>(text.tokens.size());
            answers.push_back({text.tokens, text.score / std::pow(length, o.length_penalty)});
        } else {
            add_all(answers, text, o, language);
        }
        text.tokens.pop_back();
        text.score = before;
    }
}

}  // namespace

TEST_CASE("beam search: with as many beams as texts it finds the best answers of all", "[beam_search]") {
    for (int64_t seed : {1, 2, 3})
        for (double length_penalty : {0.0, 1.0, 3.0, -2.0}) {
            BeamOptions o{.n_beams = 27, .length_penalty = length_penalty, .max_tokens = 4, .stop_tokens = {2}};
            o.early_stopping = Early::never;
            const Language language{3, seed};
            std::vector<BeamAnswer> expected;
            BeamAnswer text;
            add_all(expected, text, o, language);
            REQUIRE(expected.size() == 1 + 2 + 4 + 24);  // the stop token in place 1, 2, 3; all that reach place 4
            std::sort(expected.begin(), expected.end(), [](const auto& a, const auto& b) { return a.score > b.score; });
            const auto answers = search(o, language);
            REQUIRE(answers.size() == 27);
            for (size_t i = 0; i < 10; ++i) {
                CHECK(answers[i].tokens == expected[i].tokens);
                // Four log-probabilities below 8 in float32.
                CHECK(std::abs(answers[i].score - expected[i].score) <= 32 * 0x1p-24 * std::pow(4, 2));
            }
        }
}

TEST_CASE("beam search: the answers and scores of Hugging Face's generate()", "[beam_search]") {
    std::ifstream file("test/golden/sampling/beams.txt");
    std::string word, early;
    BeamOptions o;
    int64_t n_cases = 0;
    for (int64_t seed = 0, V = 0, n_stop = 0;
         file >> word >> o.n_beams >> o.length_penalty >> early >> o.max_tokens >> seed >> V >> n_stop;) {
        o.stop_tokens.resize(static_cast<size_t>(n_stop));
        for (int32_t& token : o.stop_tokens) file >> token;
        o.early_stopping = early == "never" ? Early::never : early == "True" ? Early::yes : Early::heuristic;
        const auto answers = search(o, Language{V, seed});
        INFO("case " << o.n_beams << " " << o.length_penalty << " " << early << " " << o.max_tokens << " " << seed);
        REQUIRE(std::ssize(answers) == o.n_beams);
        for (const BeamAnswer& answer : answers) {
            double score = 0;
            size_t n = 0;
            file >> word >> score >> n;
            std::vector<int32_t> tokens(n);
            for (int32_t& token : tokens) file >> token;
            CHECK(answer.tokens == tokens);
            // They add up in float32, up to 12 terms: half a unit of 2^-24 of the sum each, and seven digits in the
            // file.
            CHECK(std::abs(answer.score - score) <= 2e-6 * std::abs(score));
        }
        REQUIRE(file);
        ++n_cases;
    }
    CHECK(n_cases == 120);
}

TEST_CASE("beam search: each beam says which one it continues; what is refused", "[beam_search]") {
    BeamSearch search({.n_beams = 2, .max_tokens = 3, .stop_tokens = {9}});
    CHECK(search.n_tokens() == 4);
    search.step(std::vector<std::vector<TokenLogprob>>{{{9, -0.5f}, {1, -1.0f}, {2, -2.0f}, {3, -3.0f}}});
    REQUIRE(search.beams().size() == 2);
    CHECK(search.beams()[1].answer.tokens == std::vector<int32_t>{2});
    CHECK(search.answers().size() == 1);
    search.step(std::vector<std::vector<TokenLogprob>>{{{5, -4.0f}, {6, -5.0f}}, {{7, -1.0f}, {8, -INFINITY}}});
    REQUIRE(search.beams().size() == 2);
    CHECK(search.beams()[0].parent == 1);
    CHECK(search.beams()[0].answer.tokens == std::vector<int32_t>{2, 7});
    CHECK(search.beams()[0].answer.score == -3);
    CHECK(search.beams()[1].parent == 0);
    CHECK_THROWS_WITH(search.step({}), ContainsSubstring("tokens of 0 beams; there are 2"));
    BeamSearch banned({.n_beams = 2, .max_tokens = 3});
    banned.step(std::vector<std::vector<TokenLogprob>>{{{1, -1.0f}, {2, -INFINITY}}});
    CHECK(banned.beams().size() == 1);
    // The best beam is as good as the worst answer, and not better.
    BeamSearch equal({.n_beams = 1, .max_tokens = 3, .stop_tokens = {9}});
    equal.step(std::vector<std::vector<TokenLogprob>>{{{9, -1.0f}, {1, -1.0f}}});
    CHECK(equal.beams().empty());
    // With a length penalty below 0 a beam loses by each token: the best that it can become is an answer of its length.
    BeamSearch shorter(
        {.n_beams = 2, .length_penalty = -2, .max_tokens = 5, .stop_tokens = {9}, .early_stopping = Early::never});
    shorter.step(std::vector<std::vector<TokenLogprob>>{{{1, -0.5f}, {9, -1.0f}, {2, -3.0f}}});
    shorter.step(std::vector<std::vector<TokenLogprob>>{{{3, -0.125f}, {9, -2.0f}}, {{4, -1.0f}}});
    REQUIRE(shorter.answers().size() == 2);
    CHECK(shorter.answers()[1].score == -10);  // (-0.5 - 2) * 2^2, which -0.625 * 2^2 is above, and -0.625 * 5^2 below
    CHECK(shorter.beams().size() == 2);
    CHECK(BeamSearch({.n_beams = 2, .stop_tokens = {7, 8, 9}}).n_tokens() == 8);
    CHECK_THROWS_WITH(BeamSearch({.n_beams = 0}), ContainsSubstring("n_beams is 0; it must be at least 1"));
    CHECK_THROWS_WITH(BeamSearch({.n_beams = 33}), ContainsSubstring("66 most probable tokens, and at most 64"));
    CHECK_THROWS_WITH(BeamSearch({.max_tokens = 0}), ContainsSubstring("max_tokens is 0"));
    CHECK_THROWS_WITH(BeamSearch({.length_penalty = NAN}), ContainsSubstring("length_penalty is nan"));
}
