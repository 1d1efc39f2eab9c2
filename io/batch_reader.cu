// io/batch_reader.cu: the order in which a run sees its tokens.
//
// An epoch cuts the text into windows of T tokens and visits them shuffled. The shuffle is computed, not stored: window
// number i of an epoch is a permutation of [0, n) evaluated at i, and the permutation follows from (seed, epoch). So
// sequence i of a run is a pure function of (seed, i), a run resumes exactly from one number, every rank finds its own
// rows, and a data set of a billion windows costs no memory.
#include "io/io.h"

#include <algorithm>
#include <cmath>

namespace {

// A Feistel network on a grid of columns x rows cells, at least n of them. A round shifts one coordinate by a random
// amount that depends on the other one: it can be undone, so it permutes the cells, and so do rounds in a row. A number
// that lands beyond n is sent through again until it lands below: that walks along a cycle of the permutation, which
// comes back to its start below n, so it ends, and what is left is a permutation of [0, n).
int64_t shuffled(int64_t i, int64_t n, uint64_t seed, uint64_t key) {
    constexpr uint64_t n_rounds = 8;
    const uint64_t columns = static_cast<uint64_t>(std::ceil(std::sqrt(static_cast<double>(n))));
    const uint64_t rows = static_cast<uint64_t>(ceil_div(n, static_cast<int64_t>(columns)));
    uint64_t cell = static_cast<uint64_t>(i);
    do {
        uint64_t x = cell % columns, y = cell / columns;
        for (uint64_t round = 0; round < n_rounds; round += 2) {
            x = (x + uniform_below(seed, key + round, y, columns)) % columns;
            y = (y + uniform_below(seed, key + round + 1, x, rows)) % rows;
        }
        cell = y * columns + x;
    } while (cell >= static_cast<uint64_t>(n));
    return static_cast<int64_t>(cell);
}

}  // namespace

BatchReader::BatchReader(TokenSource source, int64_t T, uint64_t seed)
    : source_(std::move(source)), T_(T), seed_(seed) {
    const int64_t n = source_.n();
    check(T >= 1, "the sequence length must be at least 1, got ", T);
    check(n > T, "text too short: it has ", n, " tokens, and --seq ", T, " needs at least ", T + 1,
          ": use a smaller --seq or more text");
    // As many windows as fit at every offset below T, so that all epochs are equally long. Of a text that has room for
    // one window only, the offsets that leave it room.
    n_windows_ = std::max<int64_t>(1, n / T - 1);
    n_offsets_ = std::min(T, n - n_windows_ * T);
}

int64_t BatchReader::sequences_per_epoch() const { return n_windows_; }

// Where in the text sequence i begins.
int64_t BatchReader::first_token(int64_t i) const {
    check(i >= 0, "sequence number ", i, " is negative");
    static const uint64_t offset_key = hash_name("batch_reader.offset"), order_key = hash_name("batch_reader.order");
    const uint64_t epoch = static_cast<uint64_t>(i / n_windows_);
    const int64_t offset =
        static_cast<int64_t>(uniform_below(seed_, offset_key, epoch, static_cast<uint64_t>(n_offsets_)));
    // Rounds of one epoch are keys in a row; 2^32 keeps the epochs apart.
    const int64_t window = shuffled(i % n_windows_, n_windows_, seed_, order_key + (epoch << 32));
    return offset + window * T_;
}

void BatchReader::sequence(int64_t i, int32_t* tokens, int32_t* targets) const {
    const int64_t first = first_token(i);
    source_.read(first, T_, tokens);
    source_.read(first + 1, T_, targets);
}

void BatchReader::documents(int64_t i, int32_t* spans, int32_t* positions) const {
    const int64_t first = first_token(i);
    std::vector<int64_t> ends = source_.document_starts(first + 1, T_ - 1);  // the first one begins with the sequence
    ends.push_back(first + T_);
    int32_t begin = 0;
    for (const int64_t document_end : ends) {
        const int32_t end = static_cast<int32_t>(document_end - first);
        for (int32_t t = begin; t < end; ++t) spans[2 * t] = begin, spans[2 * t + 1] = end, positions[t] = t - begin;
        begin = end;
    }
}
