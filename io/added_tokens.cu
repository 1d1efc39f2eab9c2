// io/added_tokens.cu: finds tokens such as <|endoftext|> in a text. A model may have more than a thousand of them, and
// code is full of their first character: they are sorted, and each byte of the text narrows the range that may match.
#include "io/tokenizer_parts.h"

#include <algorithm>

namespace {

bool is_word_character(std::string_view character) {
    static const Regex word(concat('[', kRustWord, ']'), "single_word");
    return word.found_in(character);
}

// Where the last character of a text begins.
size_t last_character(std::string_view text) {
    size_t i = text.size() - 1;
    for (size_t back = 1; back <= std::min<size_t>(4, text.size()); ++back)
        if (utf8_char_at(text, text.size() - back).bytes == back) i = text.size() - back;
    return i;
}

bool stands_alone(std::string_view text, size_t begin, size_t end) {
    const std::string_view before = text.substr(0, begin), behind = text.substr(end);
    return (before.empty() || !is_word_character(before.substr(last_character(before)))) &&
           (behind.empty() || !is_word_character(behind.substr(0, utf8_char_at(behind, 0).bytes)));
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
    std::stable_sort(tokens_.begin(), tokens_.end(), [](const auto& a, const auto& b) { return a.text < b.text; });
    for (const AddedToken& token : tokens_) may_begin_[static_cast<unsigned char>(token.text[0])] = true;
}

const AddedToken* AddedTokens::longest_at(std::string_view text) const {
    const AddedToken* longest = nullptr;
    auto first = tokens_.begin(), last = tokens_.end();  // those that begin with text[0], ..., text[n - 1]
    for (size_t n = 0; n < text.size(); ++n) {
        const unsigned char byte = static_cast<unsigned char>(text[n]);
        first = std::partition_point(first, last, [&](const AddedToken& token) {
            return token.text.size() <= n || static_cast<unsigned char>(token.text[n]) < byte;
        });
        last = std::partition_point(
            first, last, [&](const AddedToken& token) { return static_cast<unsigned char>(token.text[n]) == byte; });
        if (first == last) break;
        if (first->text.size() == n + 1) longest = &*first;
    }
    return longest;
}

void AddedTokens::split(std::string_view text,
                        const std::function<void(std::string_view, const AddedToken*)>& found) const {
    size_t done = 0;
    for (size_t i = 0; i < text.size();) {
        const AddedToken* token =
            may_begin_[static_cast<unsigned char>(text[i])] ? longest_at(text.substr(i)) : nullptr;
        if (token == nullptr) {
            ++i;
            continue;
        }
        size_t begin = i, end = i + token->text.size();
        i = end;
        if (token->single_word && !stands_alone(text, begin, end)) continue;
        while (token->lstrip && begin > done) {
            const size_t space = last_character(text.substr(0, begin));
            if (!is_white_space(utf8_char_at(text, space).code)) break;
            begin = space;
        }
        if (token->lstrip) begin = std::max(begin, done);
        while (token->rstrip && end < text.size() && is_white_space(utf8_char_at(text, end).code))
            end += utf8_char_at(text, end).bytes;
        if (begin > done) found(text.substr(done, begin - done), nullptr);
        // Tokens of white space may stand in what the token before them has stripped: tokenizers finds them all the
        // same, but for those that strip the white space before them, too, of which nothing is left.
        if (begin < end) found(text.substr(begin, end - begin), token);
        done = end;
    }
    if (done < text.size()) found(text.substr(done), nullptr);
}
