// Fuzzes the reader of tokenizer.json, and the tokenizer that it makes: any bytes are either refused with an Error, or
// give a tokenizer that encodes text. Built and run by `make fuzz`; seeds: test/golden/tokenizer/*/tokenizer.json
#include "io/io.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    std::string_view bytes(reinterpret_cast<const char*>(data), size);
    try {
        auto tokenizer = parse_tokenizer(bytes, "fuzz");
        const std::string_view sample = "It's 1234  o'clock,\r\n \xC5\xBF!<|endoftext|>";
        for (std::string_view text : {bytes.substr(0, 4096), sample}) {
            std::vector<int32_t> ids = tokenizer->encode(text);
            for (int32_t id : ids)
                if (id < 0 || id >= tokenizer->vocab_size()) std::abort();
            // A prefix space may come before each piece; anything else that differs is wrong.
            if (tokenizer->decode(ids).size() < text.size()) std::abort();
        }
    } catch (const Error&) {
    }
    return 0;
}
