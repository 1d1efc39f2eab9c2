// parallel/context/zigzag.cu: which tokens a rank has.
//
// A causal mask leaves query t the keys 0 ... t, so that late tokens have more work than early ones. n equal pieces of
// a sequence would give the last rank almost 2 n - 1 times the first one's. Of 2 n chunks rank r therefore has an early
// one and a late one, r and 2 n - 1 - r (as in the training of Llama 3, arXiv:2407.21783; Brandon et al. 2023,
// arXiv:2311.09431, balance it with stripes of single tokens). With n = 3, T = 12, where # are the pairs that the mask
// leaves:
//
//         keys    0  0  1  1  2  2  3  3  4  4  5  5                pairs
//      chunk 0    #                                       rank 0     3
//                 #  #
//      chunk 1    #  #  #                                 rank 1     7
//                 #  #  #  #
//      chunk 2    #  #  #  #  #                           rank 2    11
//                 #  #  #  #  #  #
//      chunk 3    #  #  #  #  #  #  #                     rank 2    15     26 together
//                 #  #  #  #  #  #  #  #
//      chunk 4    #  #  #  #  #  #  #  #  #               rank 1    19     26
//                 #  #  #  #  #  #  #  #  #  #
//      chunk 5    #  #  #  #  #  #  #  #  #  #  #         rank 0    23     26
//                 #  #  #  #  #  #  #  #  #  #  #  #
//
// With chunks of c tokens, chunk i has i c^2 + c (c + 1) / 2 pairs, and i + (2 n - 1 - i) does not depend on i: all
// ranks have the same, to the pair. This also holds for each step of a ring by itself: of the keys of rank j < r all
// queries of rank r see the first chunk, and none of them the second; of the keys of rank j > r only the later half of
// the queries see something, but both chunks. Either way 2 c^2 pairs.
#include "core/names.h"
#include "parallel/context/context.h"

TokenChunks ZigZag::of_rank(int rank) const { return {chunk(), {rank * chunk(), (2 * n - 1 - rank) * chunk()}}; }

std::vector<int64_t> ZigZag::tokens(int rank) const {
    const TokenChunks chunks = of_rank(rank);
    std::vector<int64_t> tokens;
    for (const int64_t first : chunks.first)
        for (int64_t i = 0; i < chunks.length; ++i) tokens.push_back(first + i);
    return tokens;
}

int64_t ZigZag::causal_pairs(int queries_of, int keys_of) const {
    const int64_t c = chunk();
    int64_t pairs = 0;
    for (const int64_t query : of_rank(queries_of).first)
        for (const int64_t key : of_rank(keys_of).first)
            if (key <= query) pairs += key < query ? c * c : c * (c + 1) / 2;
    return pairs;
}

ZigZag make_zigzag(int64_t T, int n) {
    const int64_t chunks = 2 * n, below = T / chunks * chunks;
    check(n == 1 || T % chunks == 0, "--seq ", T, " cannot be cut into the ", chunks, " equal chunks of --cp ", n,
          " (two a rank): use --seq ", below > 0 ? concat(below, " or ") : "", below + chunks);
    return {T, n};
}

namespace {
constexpr Named<ContextMode> kModes[] = {{"ring", ContextMode::ring}, {"ulysses", ContextMode::ulysses}};
}
ContextMode context_mode_from_name(const std::string& name) { return find_named(kModes, "--cp-mode", name).value; }
const char* context_mode_name(ContextMode mode) { return name_of(kModes, mode); }

std::unique_ptr<ContextParallel> make_context_parallel(ContextMode mode, Comm& comm, const ZigZag& zigzag) {
    return mode == ContextMode::ring ? make_ring_attention(comm, zigzag) : make_ulysses(comm, zigzag);
}
