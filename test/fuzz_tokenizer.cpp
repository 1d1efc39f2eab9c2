// Fuzzes the reader of tokenizer.json, the tokenizer that it makes, and the patterns in such files: any bytes are
// either refused with an Error, or give a tokenizer that encodes text. Built and run by `make fuzz`; seeds are
// test/golden/tokenizer/*/tokenizer.json.
#include "io/tokenizer_parts.h"

#include <cstdlib>

static const std::string_view kSample =
    "It's 1234  o'clock,\r\n \xC5\xBF!<|endoftext|> \xE6\x97\xA5\xE6\x9C\xAC e\xCC\x81\xFF\xF0\x9F\xAB\xA8 <s>x</s>";

static void use(const Tokenizer& tokenizer, std::string_view text) {
    const std::vector<int32_t> ids = tokenizer.encode(text);
    StreamDecoder stream(tokenizer);
    std::string streamed;
    for (int32_t id : ids) {
        if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
        streamed += stream.push(id);
    }
    if (streamed + stream.finish() != tokenizer.decode(ids)) std::abort();
    const size_t n_special = tokenizer.special_prefix().size() + tokenizer.special_suffix().size();
    if (tokenizer.encode_with_special(text).size() != ids.size() + n_special) std::abort();
}

// The stretches cover the text, in order.
static void use(const Regex& pattern, std::string_view text) {
    size_t done = 0;
    pattern.split(text, [&](size_t begin, size_t end, bool is_match) {
        if (begin != done || end < begin || (end == begin && !is_match)) std::abort();
        done = end;
    });
    if (done != text.size()) std::abort();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string_view bytes(reinterpret_cast<const char*>(data), size);
    try {
        const auto tokenizer = parse_tokenizer(bytes, "fuzz");
        for (std::string_view text : {bytes.substr(0, 4096), kSample}) use(*tokenizer, text);
    } catch (const Error&) {
    }
    if (size > 100) return 0;
    try {
        use(Regex(std::string(bytes), "fuzz"), kSample);
    } catch (const Error&) {
    }
    return 0;
}
