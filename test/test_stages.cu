// Which blocks a stage of a pipeline has: against all ways to cut a model.
#include "models.h"

#include <functional>
#include <numeric>

namespace {

struct Cost {
    double slowest = 0, squares = 0;
};
Cost cost_of(const std::vector<int64_t>& cut, const std::vector<double>& blocks, double head) {
    Cost cost;
    auto block = blocks.begin();
    for (size_t s = 0; s < cut.size(); block += cut[s++]) {
        const double its = std::accumulate(block, block + cut[s], s + 1 == cut.size() ? head : 0);
        cost.slowest = std::max(cost.slowest, its), cost.squares += its * its;
    }
    return cost;
}

// All ways to write L as a sum of S numbers from 1 on.
void all_cuts(int64_t L, int64_t S, std::vector<int64_t>& cut, const std::function<void()>& see) {
    if (S == 0) {
        if (L == 0) see();
        return;
    }
    for (int64_t n = 1; n <= L - S + 1; ++n) {
        cut.push_back(n);
        all_cuts(L - n, S - 1, cut, see);
        cut.pop_back();
    }
}

}  // namespace

TEST_CASE("stages of a pipeline: no other cut has a faster slowest stage, or a smaller spread", "[model]") {
    struct Case {
        int64_t V, T, window, n_full_layers;
    };
    for (const Case& c : {Case{20, 16, 0, 0},
                          {300, 16, 0, 0},
                          {2000, 16, 0, 0},
                          {20000, 16, 0, 0},
                          {20, 400, 8, 3},  // the first three blocks see all keys
                          {300, 400, 8, 5}}) {
        Config config = small_llama();
        config.V = c.V, config.window = c.window, config.n_full_layers = c.n_full_layers;
        for (config.L = 1; config.L <= 11; ++config.L)
            for (int64_t S = 1; S <= std::min<int64_t>(config.L, 6); ++S) {
                // A block with a window has less: 12 H D for each key that a token does not see.
                const double head = 6 * static_cast<double>(config.V * config.C), W = static_cast<double>(c.window),
                             T = static_cast<double>(c.T), unseen = c.window > 0 ? T / 2 - W + W * W / (2 * T) : 0,
                             fewer = 12 * static_cast<double>(config.H * config.D) * unseen;
                const int64_t n_full = std::min(c.n_full_layers, config.L);
                std::vector<double> blocks(static_cast<size_t>(config.L));
                const double full =
                    (flops_per_token(config, c.T) - head + static_cast<double>(config.L - n_full) * fewer) /
                    static_cast<double>(config.L);
                for (int64_t l = 0; l < config.L; ++l) blocks[static_cast<size_t>(l)] = full - (l < n_full ? 0 : fewer);
                const std::vector<int64_t> chosen = cut_stages(config, S, c.T);
                INFO("V " << config.V << ", T " << c.T << ", window " << c.window << ", L " << config.L << ", S " << S
                          << ", last " << chosen.back());
                REQUIRE(std::ssize(chosen) == S);
                CHECK(std::accumulate(chosen.begin(), chosen.end(), int64_t{0}) == config.L);
                CHECK(std::ranges::min(chosen) >= 1);
                const Cost its = cost_of(chosen, blocks, head);
                std::vector<int64_t> cut;
                bool is_best = true;
                all_cuts(config.L, S, cut, [&] {
                    const Cost other = cost_of(cut, blocks, head);
                    // Equal costs are computed in different orders.
                    const bool faster = other.slowest < its.slowest * (1 - 1e-12);
                    const bool as_fast = other.slowest <= its.slowest * (1 + 1e-12);
                    is_best = is_best && !faster && !(as_fast && other.squares < its.squares * (1 - 1e-12));
                });
                CHECK(is_best);
            }
    }
    Config gpt2 = load_config("gpt2");
    CHECK(cut_stages(gpt2, 4, 1024) == std::vector<int64_t>{3, 4, 4, 1});
    CHECK(cut_stages(gpt2, 4, 1024, {3, 3, 3, 3}) == std::vector<int64_t>{3, 3, 3, 3});
    CHECK_THROWS_WITH(cut_stages(gpt2, 13, 1024), ContainsSubstring("the model has only 12: use a smaller --pp"));
    CHECK_THROWS_WITH(cut_stages(gpt2, 4, 1024, {6, 6}), ContainsSubstring("2 numbers for 4 stages"));
    CHECK_THROWS_WITH(cut_stages(gpt2, 2, 1024, {12, 0}), ContainsSubstring("at least one block"));
    CHECK_THROWS_WITH(cut_stages(gpt2, 2, 1024, {6, 7}), ContainsSubstring("13 blocks in all, and the model has 12"));
}

TEST_CASE("what a rank has of a model that is cut into stages", "[model]") {
    Config config = small_gpt2();
    config.L = 9;
    const std::vector<int64_t> cut = {2, 3, 3, 1};
    const RankStages first = rank_stages(config, cut, {0}), both_ends = rank_stages(config, cut, {0, 3}),
                     middle = rank_stages(config, cut, {1, 2});
    CHECK(first.part.blocks == std::vector<int64_t>{0, 1});
    CHECK((first.part.embedding && !first.part.head && first.part.head_copy));
    CHECK(both_ends.part.blocks == std::vector<int64_t>{0, 1, 8});
    CHECK((both_ends.part.embedding && both_ends.part.head && both_ends.part.head_copy));
    CHECK(middle.part.blocks == std::vector<int64_t>{2, 3, 4, 5, 6, 7});
    CHECK((!middle.part.embedding && !middle.part.head));
    CHECK((middle.chunks[1].first == 3 && middle.chunks[1].n == 3));
    CHECK((both_ends.chunks[1].first == 2 && both_ends.chunks[1].n == 1));
    config.tied = false;
    CHECK(!rank_stages(config, cut, {0}).part.head_copy);
}
