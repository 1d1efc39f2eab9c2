// io/words.cu: the pre-tokenizers of byte-level BPE, which cut a text into words that no token crosses.
//
// Tokenizer files define words by regular expressions over Unicode classes: \p{L} letters, \p{N} numbers, \s white
// space. Each expression is matched by hand here: std::regex knows no Unicode, and the matchers are short. They agree
// with the regex engine of Hugging Face's tokenizers, oddities included.
#include "io/io.h"
#include "io/unicode_tables.h"

#include <algorithm>
#include <array>

// ---------------------------------------------------------------------------------------------------------------------
// Characters and their classes

Utf8Char utf8_char_at(std::string_view text, size_t i) {
    constexpr uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};  // by length: a smaller code was encoded too long
    unsigned char lead = text[i];
    if (lead < 0x80) return {lead, 1};
    size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC0 || lead > 0xF4 || i + bytes > text.size()) return {0xFFFD, 1};
    uint32_t code = lead & (0x7Fu >> bytes);
    for (size_t k = 1; k < bytes; ++k) {
        unsigned char byte = text[i + k];
        if ((byte & 0xC0) != 0x80) return {0xFFFD, 1};
        code = code << 6 | (byte & 0x3Fu);
    }
    if (code < smallest[bytes] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return {0xFFFD, 1};
    return {code, bytes};
}

namespace {

template <size_t n>
bool contains(const CodePointRange (&ranges)[n], uint32_t code) {
    auto after = std::upper_bound(ranges, ranges + n, code, [](uint32_t c, CodePointRange r) { return c < r.first; });
    return after != ranges && code <= after[-1].last;
}

enum class Kind : uint8_t { letter, number, space, symbol };

Kind find_kind(uint32_t code) {
    if (contains(unicode_letters, code)) return Kind::letter;
    if (contains(unicode_numbers, code)) return Kind::number;
    return contains(unicode_spaces, code) ? Kind::space : Kind::symbol;
}

struct KindAndBytes {
    Kind kind;
    size_t bytes;
};

KindAndBytes look_at(std::string_view text, size_t i) {
    static const auto two_byte_kinds = [] {  // the characters of most text, looked up once
        std::array<Kind, 0x800> kinds;
        for (uint32_t code = 0; code < kinds.size(); ++code) kinds[code] = find_kind(code);
        return kinds;
    }();
    auto [code, bytes] = utf8_char_at(text, i);
    return {code < two_byte_kinds.size() ? two_byte_kinds[code] : find_kind(code), bytes};
}

Kind kind_at(std::string_view text, size_t i) { return look_at(text, i).kind; }
bool is_newline(char c) { return c == '\r' || c == '\n'; }

// Where the run of at most n_max characters of one kind that begins at `start` ends.
size_t run_end(std::string_view text, size_t start, Kind kind, size_t n_max = std::string_view::npos) {
    size_t end = start;
    for (size_t n = 0; n < n_max && end < text.size(); ++n) {
        auto [found, bytes] = look_at(text, end);
        if (found != kind) break;
        end += bytes;
    }
    return end;
}

// ---------------------------------------------------------------------------------------------------------------------
// Parts that the expressions share: the length in bytes of what they match at the start of the text

// 's|'t|'re|'ve|'m|'ll|'d   or 0.
size_t contraction(std::string_view text, bool any_case) {
    if (text[0] != '\'') return 0;
    auto letter = [&](size_t i) -> char {
        if (i >= text.size()) return 0;
        return any_case && text[i] >= 'A' && text[i] <= 'Z' ? text[i] - 'A' + 'a' : text[i];
    };
    char first = letter(1), second = letter(2);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
    if ((first == 'r' || first == 'v') && second == 'e') return 3;
    if (first == 'l' && second == 'l') return 3;
    // To an expression that ignores case, U+017F (long s) is an s. No other character folds to one of these letters.
    return any_case && text.substr(1).starts_with("\xC5\xBF") ? 3 : 0;
}

// \s+(?!\S)|\s+   Whitespace before a word leaves its last character to that word, unless it has only one.
size_t whitespace(std::string_view text) {
    size_t end = 0, last = 0;
    while (end < text.size()) {
        auto [kind, bytes] = look_at(text, end);
        if (kind != Kind::space) break;
        last = end;
        end += bytes;
    }
    return end == text.size() || last == 0 ? end : last;
}

// " ?" where something else must follow: 0 or 1.
size_t optional_space(std::string_view text) { return text[0] == ' ' && text.size() > 1 ? 1 : 0; }

// ---------------------------------------------------------------------------------------------------------------------
// The expressions

constexpr const char* gpt2_regex = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

size_t gpt2_word(std::string_view text) {
    if (size_t bytes = contraction(text, false)) return bytes;
    size_t start = optional_space(text);
    Kind kind = kind_at(text, start);
    return kind == Kind::space ? whitespace(text) : run_end(text, start, kind);
}

// LLaMA 3 takes numbers in groups of three digits; Qwen 2, otherwise the same, takes every digit by itself.
constexpr const char* llama3_regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* qwen2_regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";

template <size_t max_digits>
size_t llama3_word(std::string_view text) {
    if (size_t bytes = contraction(text, true)) return bytes;

    // [^\r\n\p{L}\p{N}]?\p{L}+
    auto [kind, second] = look_at(text, 0);
    if (kind == Kind::letter) return run_end(text, 0, Kind::letter);
    bool may_lead = kind != Kind::number && !is_newline(text[0]) && second < text.size();
    if (may_lead && kind_at(text, second) == Kind::letter) return run_end(text, second, Kind::letter);

    // \p{N}{1,3}
    if (kind == Kind::number) return run_end(text, 0, Kind::number, max_digits);

    // " ?[^\s\p{L}\p{N}]+[\r\n]*"
    size_t start = optional_space(text);
    if (kind_at(text, start) == Kind::symbol) {
        size_t end = run_end(text, start, Kind::symbol);
        while (end < text.size() && is_newline(text[end])) ++end;
        return end;
    }

    // \s*[\r\n]+   up to the last newline of the whitespace
    size_t newline = text.substr(0, run_end(text, 0, Kind::space)).find_last_of("\r\n");
    return newline != text.npos ? newline + 1 : whitespace(text);
}

}  // namespace

WordSplitter find_word_splitter(const std::string& regex) {
    if (regex.empty() || regex == gpt2_regex) return gpt2_word;
    if (regex == llama3_regex) return llama3_word<3>;
    if (regex == qwen2_regex) return llama3_word<1>;
    return nullptr;
}

bool is_surely_nfc(std::string_view text) {
    bool after_mark = false;
    for (size_t i = 0; i < text.size();) {
        auto [code, bytes] = utf8_char_at(text, i);
        i += bytes;
        bool mark = code >= 0x300 && contains(unicode_marks, code);
        if ((mark && after_mark) || (code >= 0x300 && contains(unicode_composable, code))) return false;
        after_mark = mark;
    }
    return true;
}
