// Speculative decoding on the host: which tokens are proposed without a model, and how many of them become text.
//
// Prompt look-up as plain loops:
//
//   for n = 3, 2, 1:
//       for i = (number of tokens) - 1, downwards:
//           if the n tokens before place i equal the last n tokens:  propose tokens[i], tokens[i + 1], ...
//
// A map from n tokens to the place after their last occurrence takes the place of the inner loop. The last n tokens
// themselves come into it when the token after them is known, so that a look-up finds an earlier occurrence.
#include "inference/inference.h"

#include <algorithm>

namespace {

constexpr size_t kMostTokens = 3;

// The n tokens before a place as one number: 21 bits each, and no two n share a number, since each token counts from 1.
uint64_t pack(std::span<const int32_t> tokens, size_t place, size_t n) {
    uint64_t packed = 0;
    for (size_t i = place - n; i < place; ++i) packed = packed << 21 | static_cast<uint64_t>(tokens[i] + 1);
    return packed;
}

}  // namespace

size_t tokens_gained(std::span<const int32_t> proposed, std::span<const Sampled> drawn) {
    check(drawn.size() == proposed.size() + 1, "tokens_gained: ", drawn.size(), " tokens were drawn for ",
          proposed.size(), " proposed ones; there must be one more");
    size_t n = 0;
    while (n < proposed.size() && drawn[n].token == proposed[n]) ++n;
    return n + 1;
}

std::vector<int32_t> PromptLookup::propose(std::span<const int32_t> tokens, int64_t k) {
    for (; n_read_ < tokens.size(); ++n_read_)
        for (size_t n = 1; n <= std::min(kMostTokens, n_read_); ++n) followers_[pack(tokens, n_read_, n)] = n_read_;
    for (size_t n = std::min(kMostTokens, tokens.size()); n > 0; --n) {
        const auto found = followers_.find(pack(tokens, tokens.size(), n));
        if (found == followers_.end()) continue;
        std::vector<int32_t> proposed;
        for (size_t i = 0; i < static_cast<size_t>(k); ++i) {
            const size_t place = found->second + i;
            proposed.push_back(place < tokens.size() ? tokens[place] : proposed[place - tokens.size()]);
        }
        return proposed;
    }
    return {};
}
