// Deflate (RFC 1951): bytes as literals and as repetitions, "the next 100 bytes are those that began 2881 bytes ago".
//
// Pictures of curves are long repetitions: for these one place to compare with is enough, the last one that began with
// the same four bytes, and the codes that the format defines (3.2.6) are short enough.
#include "io/deflate.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr size_t kShortest = 4, kLongest = 258, kWindow = 32768;

// Of a number's bits, those after the first n from its highest one.
int n_bits_after(uint32_t number, int n) { return std::max(0, static_cast<int>(std::bit_width(number)) - n); }

// Bits, from the lowest of each byte on.
class BitWriter {
  public:
    void put(uint32_t value, int n) {
        bits_ |= static_cast<uint64_t>(value) << n_;
        for (n_ += n; n_ >= 8; n_ -= 8, bits_ >>= 8) bytes_.push_back(static_cast<char>(bits_));
    }
    // Codes come highest bit first.
    void put_code(uint32_t code, int n) {
        uint32_t reversed = 0;
        for (int i = 0; i < n; ++i) reversed |= (code >> i & 1) << (n - 1 - i);
        put(reversed, n);
    }
    // 0 to 255: a byte. 256: the end. From 257 on: the length of a repetition.
    void put_symbol(uint32_t symbol) {
        if (symbol < 144) put_code(0x30 + symbol, 8);
        else if (symbol < 256) put_code(0x190 + symbol - 144, 9);
        else if (symbol < 280) put_code(symbol - 256, 7);
        else put_code(0xc0 + symbol - 280, 8);
    }
    // Lengths and distances share codes, the longer the more: its last bits follow a code.
    void put_repetition(uint32_t length, uint32_t distance) {
        const uint32_t l = length - 3, d = distance - 1;
        const int l_bits = n_bits_after(l, 3), d_bits = n_bits_after(d, 2);
        if (length == kLongest) {
            put_symbol(285);
        } else {
            put_symbol(257 + 4 * static_cast<uint32_t>(l_bits) + (l >> l_bits));
            put(l & ((1u << l_bits) - 1), l_bits);
        }
        put_code(2 * static_cast<uint32_t>(d_bits) + (d >> d_bits), 5);
        put(d & ((1u << d_bits) - 1), d_bits);
    }
    std::string finish() {
        put(0, 7);
        return std::move(bytes_);
    }

  private:
    uint64_t bits_ = 0;
    int n_ = 0;
    std::string bytes_;
};

// How many bytes from `a` on are those from `b` on, at most n.
size_t n_equal(const char* a, const char* b, size_t n) {
    for (size_t i = 0; i + 8 <= n; i += 8) {
        uint64_t x, y;
        std::memcpy(&x, a + i, 8), std::memcpy(&y, b + i, 8);
        if (x != y) return i + static_cast<size_t>(std::countr_zero(x ^ y) / 8);
    }
    for (size_t i = n / 8 * 8; i < n; ++i)
        if (a[i] != b[i]) return i;
    return n;
}

uint32_t adler32(std::string_view bytes) {
    uint32_t sum = 1, sum_of_sums = 0;
    while (!bytes.empty()) {
        const std::string_view part = bytes.substr(0, 5552);  // so many fit into 32 bits
        for (char c : part) sum_of_sums += sum += static_cast<unsigned char>(c);
        sum %= 65521, sum_of_sums %= 65521;
        bytes.remove_prefix(part.size());
    }
    return sum_of_sums << 16 | sum;
}

}  // namespace

std::string zlib_stream(std::string_view bytes) {
    BitWriter out;
    out.put(0x5e78, 16);                  // deflate, with a window of 32 KiB
    out.put(1, 1);                        // one block, the last,
    out.put(1, 2);                        // with the fixed codes
    std::vector<size_t> places(1 << 12);  // by hash: 1 + where the last four bytes with it began
    for (size_t i = 0; i < bytes.size();) {
        size_t length = 0, distance = 0;
        if (i + kShortest <= bytes.size()) {
            uint32_t word;
            std::memcpy(&word, &bytes[i], 4);
            size_t& place = places[word * 0x9e3779b1u >> 20];
            distance = i + 1 - place;
            if (place > 0 && distance <= kWindow)
                length = n_equal(&bytes[i], &bytes[i - distance], std::min(kLongest, bytes.size() - i));
            place = i + 1;
        }
        if (length < kShortest) {
            out.put_symbol(static_cast<unsigned char>(bytes[i++]));
        } else {
            out.put_repetition(static_cast<uint32_t>(length), static_cast<uint32_t>(distance));
            i += length;
        }
    }
    out.put_symbol(256);
    std::string stream = out.finish();
    const uint32_t sum = adler32(bytes);
    for (int shift = 24; shift >= 0; shift -= 8) stream.push_back(static_cast<char>(sum >> shift));
    return stream;
}
