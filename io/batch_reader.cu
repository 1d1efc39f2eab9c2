// io/batch_reader.cu: the order in which a run sees its tokens.
//
// An epoch cuts the text into windows of T tokens and visits them shuffled. The shuffle is computed, not stored: window
// number i of an epoch is a permutation of [0, n) evaluated at i, and the permutation follows from (seed, epoch). So
// sequence i of a run is a pure function of (seed, i), a run resumes exactly from one number, every rank finds its own
// rows, and a data set of a billion windows costs no memory. The same holds for the choice among several sources.
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
    : BatchReader(TokenMix{{std::move(source)}}, T, seed) {}

BatchReader::BatchReader(const TokenMix& mix, int64_t T, uint64_t seed) : T_(T), seed_(seed) {
    check(T >= 1, "the sequence length must be at least 1, got ", T);
    int64_t shares = 0;
    for (const MixedSource& source : mix) {
        const int64_t n = source.tokens.n();
        check(n > T, "text too short: it has ", n, " tokens, and --seq ", T, " needs at least ", T + 1,
              ": use a smaller --seq or more text");
        // As many windows as fit at every offset below T, so that all epochs are equally long. Of a text that has room
        // for one window only, the offsets that leave it room.
        const int64_t n_windows = std::max<int64_t>(1, n / T - 1);
        parts_.push_back({source.tokens, source.share, shares, n_windows, std::min(T, n - n_windows * T)});
        shares += source.share;
    }
    check(shares == kMixShares, "the shares of the sources add up to ", shares, ", not to ", kMixShares);
}

int64_t BatchReader::sequences_per_epoch() const {
    int64_t n = 0;
    for (const Part& part : parts_) n += part.n_windows;
    return n;
}

// Where sequence i begins.
BatchReader::Place BatchReader::place(int64_t i) const {
    check(i >= 0, "sequence number ", i, " is negative");
    static const uint64_t offset_key = hash_name("batch_reader.offset"), order_key = hash_name("batch_reader.order"),
                          mix_key = hash_name("batch_reader.mix");
    size_t p = 0;
    if (parts_.size() > 1) {
        // Shuffled by the thousand; a source's shares lie side by side in what the shuffle leads to.
        const int64_t thousand = i / kMixShares;
        const int64_t share =
            shuffled(i % kMixShares, kMixShares, seed_, mix_key + (static_cast<uint64_t>(thousand) << 32));
        while (share >= parts_[p].shares_before + parts_[p].share) ++p;
        i = thousand * parts_[p].share + share - parts_[p].shares_before;  // its number in this source
    }
    const Part& part = parts_[p];
    const uint64_t epoch = static_cast<uint64_t>(i / part.n_windows);
    const int64_t offset =
        static_cast<int64_t>(uniform_below(seed_, offset_key + p, epoch, static_cast<uint64_t>(part.n_offsets)));
    // Rounds of one epoch are keys in a row; 2^16 keeps the sources apart, and 2^32 the epochs.
    const int64_t window = shuffled(i % part.n_windows, part.n_windows, seed_, order_key + (p << 16) + (epoch << 32));
    return {&part, offset + window * T_};
}

void BatchReader::sequence(int64_t i, int32_t* tokens, int32_t* targets) const {
    const auto [part, first] = place(i);
    part->source.read(first, T_, tokens);
    part->source.read(first + 1, T_, targets);
}

void BatchReader::documents(int64_t i, int32_t* spans, int32_t* positions) const {
    const auto [part, first] = place(i);
    // The first document begins with the sequence.
    std::vector<int64_t> ends = part->source.document_starts(first + 1, T_ - 1);
    ends.push_back(first + T_);
    int32_t begin = 0;
    for (const int64_t document_end : ends) {
        const int32_t end = static_cast<int32_t>(document_end - first);
        for (int32_t t = begin; t < end; ++t) spans[2 * t] = begin, spans[2 * t + 1] = end, positions[t] = t - begin;
        begin = end;
    }
}

std::string BatchReader::describe(int64_t i) const {
    const auto [part, first] = place(i);
    return part->source.describe(first, T_);
}
