// io/normalizer.cu: what is done to a text before it is cut into words.
//
// Unicode often has two ways to write one thing: an accented letter is one character, or a letter and an accent. A
// normal form chooses one: C composes, D decomposes, and KC and KD also replace compatibility characters (a ligature by
// its letters). The tables are those of utf8proc. A model has learned from texts that Hugging Face's library
// normalized, and that one knows Unicode 9: what is newer and would change (unicode_tables.h) stays as it is, as do
// bytes that are not UTF-8.
#include "io/tokenizer_parts.h"
#include "io/unicode_tables.h"

#include <utf8proc.h>

#include <algorithm>

namespace {

bool is_ascii(std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// Decomposes, orders the marks on each letter, and composes. (utf8proc_map does all of it, but orders by exchanging
// neighbours: 80000 marks on one letter take it 46 s.)
void append_normal_form(std::string& out, std::string_view text, utf8proc_option_t options) {
    std::vector<utf8proc_int32_t> codes;
    codes.reserve(text.size());
    for (size_t i = 0; i < text.size();) {
        const auto [code, bytes] = utf8_char_at(text, i);
        utf8proc_int32_t parts[32];  // the longest decomposition has 18
        int boundary_class = 0;      // not asked for
        const utf8proc_ssize_t n = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code), parts,
                                                           std::ssize(parts), options, &boundary_class);
        check(n >= 0 && n <= std::ssize(parts), "a text of ", text.size(), " bytes cannot be normalized");
        codes.insert(codes.end(), parts, parts + n);
        i += bytes;
    }
    const auto mark_class = [](utf8proc_int32_t code) { return utf8proc_get_property(code)->combining_class; };
    const auto is_mark = [&](utf8proc_int32_t code) { return mark_class(code) > 0; };
    for (auto first = std::ranges::find_if(codes, is_mark); first != codes.end();) {
        const auto end = std::find_if_not(first, codes.end(), is_mark);
        std::stable_sort(first, end, [&](auto x, auto y) { return mark_class(x) < mark_class(y); });
        first = std::find_if(end, codes.end(), is_mark);
    }
    const utf8proc_ssize_t n = utf8proc_normalize_utf32(codes.data(), std::ssize(codes), options);
    for (utf8proc_ssize_t i = 0; i < n; ++i) append_utf8(out, static_cast<uint32_t>(codes[static_cast<size_t>(i)]));
}

}  // namespace

void append_utf8(std::string& text, uint32_t code) {
    auto put = [&](uint32_t byte) { text += static_cast<char>(byte); };
    if (code < 0x80) return put(code);
    if (code < 0x800) {
        put(0xC0 | code >> 6);
    } else {
        if (code < 0x10000) {
            put(0xE0 | code >> 12);
        } else {
            put(0xF0 | code >> 18);
            put(0x80 | (code >> 12 & 0x3F));
        }
        put(0x80 | (code >> 6 & 0x3F));
    }
    put(0x80 | (code & 0x3F));
}

bool is_white_space(uint32_t code) {
    return (code >= 9 && code <= 13) || code == ' ' || code == 0x85 || code == 0xA0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F ||
           code == 0x3000;
}

Normalizer normal_form(bool compose, bool compatibility) {
    const auto options = static_cast<utf8proc_option_t>(
        UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) | (compatibility ? UTF8PROC_COMPAT : 0));
    return [options](std::string_view text) {
        if (is_ascii(text)) return std::string(text);
        std::string out;
        size_t begin = 0;  // of what has not been appended yet
        for (size_t i = 0; i < text.size();) {
            const Utf8Char c = utf8_char_at(text, i);
            if (!c.is_utf8() || find_range(never_normalized, c.code)) {
                append_normal_form(out, text.substr(begin, i - begin), options);
                out += text.substr(i, c.bytes);
                begin = i + c.bytes;
            }
            i += c.bytes;
        }
        append_normal_form(out, text.substr(begin), options);
        return out;
    };
}

Normalizer prepend(const std::string& prefix) {
    return [=](std::string_view text) { return text.empty() ? std::string() : concat(prefix, text); };
}

Normalizer replace(const Regex& pattern, const std::string& replacement) {
    return [=](std::string_view text) { return pattern.replace_all(text, replacement); };
}

Normalizer lowercase() {
    return [](std::string_view text) {
        std::string out;
        for (size_t i = 0; i < text.size();) {
            const auto [code, bytes] = utf8_char_at(text, i);
            if (code >= 0x80 && bytes == 1) out += text[i];  // not UTF-8
            else if (code == 0x130) out += "i\xCC\x87";      // the only one whose lower case is two characters
            else append_utf8(out, static_cast<uint32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(code))));
            i += bytes;
        }
        return out;
    };
}

Normalizer strip(bool left, bool right) {
    return [=](std::string_view text) {
        size_t first = text.size(), last = 0;  // of the characters that are not white space
        for (size_t i = 0; i < text.size();) {
            const auto [code, bytes] = utf8_char_at(text, i);
            if (!is_white_space(code)) {
                first = std::min(first, i);
                last = i + bytes;
            }
            i += bytes;
        }
        const size_t begin = left ? first : 0, end = right ? last : text.size();
        return std::string(begin < end ? text.substr(begin, end - begin) : "");
    };
}

std::string normalize(const std::vector<Normalizer>& steps, std::string_view text) {
    std::string normalized(text);
    for (const Normalizer& step : steps) normalized = step(normalized);
    return normalized;
}
