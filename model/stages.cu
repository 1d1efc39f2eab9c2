// model/stages.cu: which blocks a stage of a pipeline has, and which rank has what.
//
// A pipeline is as fast as its slowest stage. Floating-point operations of a training step, for each token: a block has
// b, the head (on the last stage, with the loss) h = 6 V C, the embedding none. With k blocks on the last stage and the
// other L - k on S - 1 stages, as equally as that goes,
//
//     slowest(k) = max(ceil((L - k) / (S - 1)) b,  k b + h)
//
// and the best k has the least slowest(k); of several that have, the one with the least sum of the stages' squared
// costs. GPT-2 with 12 blocks, whose head costs as much as 5 of them: 4 stages have 3, 4, 4 and 1.
//
// Which of the other stages have the block that is left over does not change this: the later ones, because stages at
// the front keep more micro-batches' activations (1F1B: S - s of them), and have the embedding.
#include "model/model.h"

#include <numeric>

namespace {

// n blocks on s stages.
std::vector<int64_t> deal_out(int64_t n, int64_t s) {
    std::vector<int64_t> blocks;
    for (int64_t i = 0; i < s; ++i) blocks.push_back(n / s + (i >= s - n % s ? 1 : 0));
    return blocks;
}

}  // namespace

std::vector<int64_t> cut_stages(const Config& c, int64_t S, int64_t T, const std::vector<int64_t>& by_hand) {
    check(S <= c.L, "a pipeline of ", S, " stages: each has at least one block, and the model has only ", c.L,
          ": use a smaller --pp (or --chunks), or a model with more blocks");
    if (!by_hand.empty()) {
        const int64_t n = std::accumulate(by_hand.begin(), by_hand.end(), int64_t{0});
        check(std::ssize(by_hand) == S, "--stages: ", by_hand.size(), " numbers for ", S, " stages: give one for each");
        check(std::ranges::min(by_hand) >= 1, "--stages: each stage has at least one block");
        check(n == c.L, "--stages: ", n, " blocks in all, and the model has ", c.L);
        return by_hand;
    }
    if (S == 1) return {c.L};
    const double head = 6 * static_cast<double>(c.V * c.C),
                 block = (flops_per_token(c, T) - head) / static_cast<double>(c.L);
    std::vector<int64_t> best;
    double least_slowest = 0, least_squares = 0;
    for (int64_t k = 1; k <= c.L - (S - 1); ++k) {
        std::vector<int64_t> blocks = deal_out(c.L - k, S - 1);
        blocks.push_back(k);
        double slowest = 0, squares = 0;
        for (size_t s = 0; s < blocks.size(); ++s) {
            const double cost = static_cast<double>(blocks[s]) * block + (s + 1 == blocks.size() ? head : 0);
            slowest = std::max(slowest, cost), squares += cost * cost;
        }
        if (best.empty() || slowest < least_slowest || (slowest == least_slowest && squares < least_squares))
            best = blocks, least_slowest = slowest, least_squares = squares;
    }
    return best;
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
