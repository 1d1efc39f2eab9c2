// Fuzzes the reader of token shards: any bytes are either refused with an Error or give tokens that lie inside them.
// Built and run by `make fuzz`.
#include "io/io.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    try {
        TokenShard shard = parse_token_shard(data, size, "fuzz");
        // Reading every byte lets the address sanitizer see one too many.
        uint64_t sum = 0;
        const unsigned char* end = shard.tokens + shard.n * shard.token_bytes;
        for (const unsigned char* byte = shard.tokens; byte != end; ++byte) sum += *byte;
        if (end != data + size || sum > 255 * size) std::abort();
    } catch (const Error&) {
    }
    return 0;
}
