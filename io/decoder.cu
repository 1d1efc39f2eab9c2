// io/decoder.cu: what becomes of the text of a token when it is printed, and text that appears token by token.
#include "io/tokenizer_parts.h"

#include <algorithm>
#include <charconv>

namespace {

constexpr size_t kPrintedCodes = 256 + 68;  // 68 of the 256 bytes do not print

std::array<uint32_t, 256> printed_codes() {
    std::array<uint32_t, 256> codes;
    uint32_t next = 256;
    for (uint32_t byte = 0; byte < 256; ++byte) {
        const bool prints = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        codes[byte] = prints ? byte : next++;
    }
    return codes;
}

// How many bytes at the end of a text are the beginning of a UTF-8 character: those that some bytes after them
// complete.
size_t incomplete_bytes(std::string_view text) {
    for (size_t n = 1; n <= std::min<size_t>(3, text.size()); ++n) {
        const std::string_view end = text.substr(text.size() - n);
        if ((static_cast<unsigned char>(end[0]) & 0xC0) == 0x80) continue;  // a character begins further left
        for (const char* second : {"\x80", "\xA0"})  // one of them is allowed after every first byte
            if (utf8_char_at(concat(end, n == 1 ? second : "", "\x80\x80"), 0).bytes > n) return n;
        return 0;
    }
    return 0;
}

}  // namespace

std::string printed_byte(unsigned char byte) {
    std::string text;
    append_utf8(text, printed_codes()[byte]);
    return text;
}

std::optional<std::string> bytes_of_printed(std::string_view token) {
    static const auto byte_of = [] {
        std::array<int, kPrintedCodes> bytes;
        bytes.fill(-1);
        const std::array<uint32_t, 256> codes = printed_codes();
        for (size_t byte = 0; byte < 256; ++byte) bytes[codes[byte]] = static_cast<int>(byte);
        return bytes;
    }();
    std::string bytes;
    for (size_t i = 0; i < token.size();) {
        const auto [code, length] = utf8_char_at(token, i);
        if (code >= byte_of.size() || byte_of[code] < 0) return std::nullopt;
        bytes.push_back(static_cast<char>(byte_of[code]));
        i += length;
    }
    return bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// The decoders of tokenizer.json

Decoder::Step decode_byte_fallback() {
    return [](std::string_view token, bool) {
        unsigned byte = 0;
        const bool is_byte = token.size() == 6 && token.starts_with("<0x") && token[5] == '>' &&
                             std::from_chars(token.data() + 3, token.data() + 5, byte, 16).ptr == token.data() + 5;
        return is_byte ? std::string(1, static_cast<char>(byte)) : std::string(token);
    };
}

Decoder::Step decode_replace(const Regex& pattern, const std::string& replacement) {
    return [=](std::string_view token, bool) { return pattern.replace_all(token, replacement); };
}

Decoder::Step decode_strip(const std::string& character, int start, int stop) {
    return [=](std::string_view token, bool) {
        for (int i = 0; i < start && token.starts_with(character); ++i) token.remove_prefix(character.size());
        for (int i = 0; i < stop && token.ends_with(character); ++i) token.remove_suffix(character.size());
        return std::string(token);
    };
}

Decoder::Step decode_spaces(const std::string& mark, bool keeps_first) {
    const Regex pattern = Regex::literal(mark);
    return [=](std::string_view token, bool is_first) {
        return pattern.replace_all(token, is_first && !keeps_first ? "" : " ");
    };
}

std::string Decoder::text_of(std::string token, bool is_first) const {
    for (const Step& step : steps) token = step(token, is_first);
    return token;
}

void Decoder::append(std::string_view text, DecodeState& state, std::string& out) const {
    while (state.stripping && !text.empty()) {
        state.stripping = state.n_stripped < n_stripped && text.starts_with(stripped);
        if (!state.stripping) break;
        text.remove_prefix(stripped.size());
        ++state.n_stripped;
    }
    out += text;
}

// ---------------------------------------------------------------------------------------------------------------------
// Text that appears token by token

std::string StreamDecoder::push(int32_t token) {
    tokenizer_->decode_next(token, state_, held_back_);
    const size_t complete = held_back_.size() - incomplete_bytes(held_back_);
    const std::string text = held_back_.substr(0, complete);
    held_back_.erase(0, complete);
    return text;
}

std::string StreamDecoder::finish() {
    state_ = {};
    return std::exchange(held_back_, "");
}
