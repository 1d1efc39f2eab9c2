// test/test_speculation.cu: proposals from the text itself, and what a step gains.
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
    // Of a vocabulary of two million: no two pairs of tokens are taken for one.
    CHECK(PromptLookup().propose(std::vector<int32_t>{0, 4, 9, 0, (1 << 20) + 4}, 4).empty());
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
