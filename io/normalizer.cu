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
#include <cstdlib>

namespace {

bool is_left_alone(uint32_t code) {
    const auto* after = std::upper_bound(std::begin(never_normalized), std::end(never_normalized), code,
                                         [](uint32_t c, const CodePointRange& range) { return c < range.first; });
    return after != std::begin(never_normalized) && code <= after[-1].last;
}

bool is_ascii(std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

void append_normal_form(std::string& out, std::string_view text, int options) {
    if (text.empty()) return;
    utf8proc_uint8_t* form = nullptr;
    const utf8proc_ssize_t bytes =
        utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                     &form, static_cast<utf8proc_option_t>(options));
    const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(form, std::free);
    check(bytes >= 0, "a text of ", text.size(), " bytes cannot be normalized: ", utf8proc_errmsg(bytes));
    out.append(reinterpret_cast<const char*>(form), static_cast<size_t>(bytes));
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
    const int options =
        UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) | (compatibility ? UTF8PROC_COMPAT : 0);
    return [options](std::string_view text) {
        if (is_ascii(text)) return std::string(text);
        std::string out;
        size_t begin = 0;  // of what has not been appended yet
        for (size_t i = 0; i < text.size();) {
            const auto [code, bytes] = utf8_char_at(text, i);
            const bool is_utf8 = code < 0x80 || bytes > 1;
            if (!is_utf8 || is_left_alone(code)) {
                append_normal_form(out, text.substr(begin, i - begin), options);
                out += text.substr(i, bytes);
                begin = i + bytes;
            }
            i += bytes;
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
        size_t first = text.size(), last = 0;  // of the characters that are no white space
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
