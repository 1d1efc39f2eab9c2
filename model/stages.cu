// model/stages.cu: which blocks a stage of a pipeline has, and which rank has what.
//
// A pipeline is as fast as its slowest stage. Floating-point operations of a training step, for each token: block l has
// b(l) (not the same in all where some layers have a sliding window), the head (on the last stage, with the loss)
// h = 6 V C, the embedding none. In the best cut the slowest stage costs least. What the first n blocks cost at least
// on stages 0 to s follows from the costs on one stage fewer, where stage s begins with block i:
//
//     slowest(s, n) = min over i of max(slowest(s - 1, i),  b(i) + ... + b(n - 1) + (h on the last stage))
//
// Of several cuts that have it, the one with the least sum of the stages' squared costs, found in the same way. GPT-2
// with 12 blocks, whose head costs as much as 5 of them: 4 stages have 3, 4, 4 and 1.
//
// Of cuts that are equal in this the one with more blocks on the later stages, because stages at the front keep more
// micro-batches' activations (1F1B: S - s of them), and have the embedding.
#include "model/model.h"

#include <limits>
#include <numeric>

namespace {

// The numbers of blocks of n_stages stages.
std::vector<int64_t> best_cut(const std::vector<double>& blocks, double head, size_t n_stages) {
    constexpr double kMore = 1 + 1e-12;  // costs that differ by less than this factor are equal: they are rounded sums
    std::vector<double> before = {0};    // block l: the cost of all before it
    for (const double cost : blocks) before.push_back(before.back() + cost);
    // visit(s, n, first, cost): stages 0 to s have the first n blocks, and stage s those from `first` on, at this cost.
    const auto for_all_last_stages = [&](const auto& visit) {
        for (size_t s = 0; s < n_stages; ++s)
            for (size_t n = s + 1; n < before.size(); ++n)
                for (size_t first = s; first < (s == 0 ? 1 : n); ++first)
                    visit(s, n, first, before[n] - before[first] + (s + 1 == n_stages ? head : 0));
    };
    // By s and n: the least of all cuts, and where stage s then begins.
    std::vector<std::vector<double>> slowest(
        n_stages, std::vector<double>(before.size(), std::numeric_limits<double>::infinity()));
    auto squares = slowest;
    std::vector<std::vector<size_t>> begin(n_stages, std::vector<size_t>(before.size(), 0));
    for_all_last_stages([&](size_t s, size_t n, size_t first, double cost) {
        slowest[s][n] = std::min(slowest[s][n], s == 0 ? cost : std::max(slowest[s - 1][first], cost));
    });
    const double limit = slowest.back().back() * kMore;
    for_all_last_stages([&](size_t s, size_t n, size_t first, double cost) {
        const double sum = cost * cost + (s == 0 ? 0 : squares[s - 1][first]);
        if (cost <= limit && sum * kMore < squares[s][n]) squares[s][n] = sum, begin[s][n] = first;
    });
    std::vector<int64_t> cut(n_stages);
    for (size_t s = n_stages, end = blocks.size(); s-- > 0; end = begin[s][end])
        cut[s] = static_cast<int64_t>(end - begin[s][end]);
    return cut;
}

}  // namespace

std::vector<int64_t> cut_stages(const Config& c, int64_t S, int64_t T, const std::vector<int64_t>& by_hand) {
    check(S <= c.L, "a pipeline of ", S, " stages: each has at least one block, and the model has only ", c.L,
          ": use a smaller --pp (or --chunks), or a model with more blocks");
    if (!by_hand.empty()) {
        const int64_t n = std::accumulate(by_hand.begin(), by_hand.end(), int64_t{0});
        check(std::ssize(by_hand) == S, "--stages: ", by_hand.size(), " numbers for ", S, " stages: give one for each");
        check(std::ranges::min(by_hand) >= 1, "--stages: each stage has at least one block");
        check(n == c.L, "--stages: ", n, " blocks in all, and the model has ", c.L,
              ": give numbers that add up to it, or leave --stages out");
        return by_hand;
    }
    return best_cut(block_flops_per_token(c, T), 6 * static_cast<double>(c.V * c.C), static_cast<size_t>(S));
}

RankStages rank_stages(const Config& config, const std::vector<int64_t>& cut, const std::vector<int>& stages) {
    RankStages its;
    its.part.embedding = its.part.head = false;
    its.part.head_copy = config.tied;
    for (const int stage : stages) {
        const int64_t first = std::accumulate(cut.begin(), cut.begin() + stage, int64_t{0}),
                      n = cut[static_cast<size_t>(stage)];
        its.chunks.push_back({std::ssize(its.part.blocks), n});
        for (int64_t l = first; l < first + n; ++l) its.part.blocks.push_back(l);
        its.part.embedding = its.part.embedding || stage == 0;
        its.part.head = its.part.head || stage + 1 == std::ssize(cut);
    }
    return its;
}

// ---------------------------------------------------------------------------------------------------------------------

PipelineRanks::PipelineRanks(Comm& comm, const Config& config, const std::vector<ModelPart>& parts)
    : comm_(comm), owners_(static_cast<size_t>(config.L + 2), -1) {
    std::string text;
    for (size_t rank = 0; rank < parts.size(); ++rank) {
        const auto has = [&](int64_t unit) {
            int& owner = owners_[static_cast<size_t>(unit)];
            if (owner < 0) owner = static_cast<int>(rank);
            text += concat(rank, " has ", unit, ", ");
        };
        if (parts[rank].embedding) has(0);
        for (const int64_t l : parts[rank].blocks) has(1 + l);
        if (parts[rank].head) has(config.L + 1);
    }
    check(std::ranges::min(owners_) >= 0, "pipeline: no rank has one of the model's units");
    key_ = hash_name(text);
}

void PipelineRanks::take_memory(Arena& arena) { staging_ = arena.take("staging", DType::f32, {1 << 18}); }

std::vector<float> PipelineRanks::bring(const std::vector<float>& values, int64_t n, int from) {
    if (from == comm_.rank && from == 0) return values;
    std::vector<float> here(comm_.rank == 0 ? static_cast<size_t>(n) : 0);
    const cudaStream_t stream = device().stream;
    for (int64_t low = 0; low < n; low += staging_.n()) {
        const Tensor piece = staging_.slice(0, std::min(staging_.n(), n - low));
        if (comm_.rank == from) copy_to_device(piece, values.data() + low);
        if (comm_.rank == from) comm_.send(piece, 0, stream);
        if (comm_.rank == 0) comm_.recv(piece, from, stream);
        cudaCheck(cudaStreamSynchronize(stream));
        if (comm_.rank == 0) copy_to_host(here.data() + low, piece);
    }
    return here;
}
