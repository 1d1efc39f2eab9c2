// io/checksum.cu: a 64-bit checksum that one core computes faster than a disk delivers bytes.
//
//   four lanes h_0 ... h_3; word i of 8 bytes goes to lane j = i mod 4:   h_j = rotate(h_j + word P, 31) Q,   P, Q odd
//   the result folds the length and the lanes in the same way
//
// (The round of xxHash, Y. Collet 2012.) Each step can be undone when the word is known: it maps different lanes to
// different lanes, and different words to different lanes. So a change inside one word of 8 bytes always changes the
// checksum; any other change is missed with a probability of about 2^-64. The second product spreads the highest bit of
// a word, which the first one leaves where it is. Four lanes because a multiplication takes several cycles: four of
// them run at the same time.
//
// It finds broken bytes, not forged ones: whoever wants to can make other bytes with the same checksum.
#include <bit>
#include <cstring>

#include "io/io.h"

namespace {

// 2^64 over the golden ratio, and over the square root of two, made odd: being odd is all that the argument needs.
constexpr uint64_t kP = 0x9E3779B97F4A7C15u, kQ = 0xB504F333F9DE6485u;

uint64_t add_word(uint64_t lane, uint64_t word) { return std::rotl(lane + word * kP, 31) * kQ; }

}  // namespace

uint64_t checksum(const void* data, size_t bytes) {
    constexpr size_t block_bytes = 32;
    uint64_t lanes[4] = {1, 2, 3, 4}, words[4];
    const auto add_block = [&](const unsigned char* from) {
        std::memcpy(words, from, block_bytes);
        for (int j = 0; j < 4; ++j) lanes[j] = add_word(lanes[j], words[j]);
    };
    const auto* next = static_cast<const unsigned char*>(data);
    size_t left_bytes = bytes;
    for (; left_bytes >= block_bytes; left_bytes -= block_bytes, next += block_bytes) add_block(next);
    if (left_bytes > 0) {  // padded with zeros; the length tells them from zeros of the data
        unsigned char last[block_bytes] = {};
        std::memcpy(last, next, left_bytes);
        add_block(last);
    }
    uint64_t sum = bytes;
    for (const uint64_t lane : lanes) sum = add_word(sum, lane);
    return sum ^ sum >> 32;
}

std::string checksum_text(uint64_t checksum) { return format("%016llx", static_cast<unsigned long long>(checksum)); }
