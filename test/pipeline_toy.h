// test/pipeline_toy.h: stages that compute with whole numbers, so that a table's result is exact, and depends on all
// that could be wrong: each input, each version of the weights, the order of each sum.
//
//     forward     y = mix(W, x)               x of stage 0: a number of the micro-batch
//     backward    dx = mix(W, dy, x)          dy of the last stage: mix(y)
//                 gradient = gradient * K + mix(dy, x)
//     update      W(v) = W(v - 1) * K + gradient;  gradient = 0
//
// ToyStages is one rank of it. execute_toy() executes a table with one rank after the other; a runner may call
// ToyStages from its StageWork, and compare numbers().
#pragma once

#include <algorithm>
#include <map>
#include <random>
#include <string>

#include "parallel/pipeline/pipeline.h"

class ToyStages {
  public:
    ToyStages(const PipelineSchedule& schedule, int rank) : s_(schedule) {
        for (const int stage : s_.stages_of(rank)) {
            Stage& its = stages_[stage];
            its.weights.assign(static_cast<size_t>(s_.versions[static_cast<size_t>(rank)]), mix(1, stage, 0));
        }
    }

    // x: what stage a.stage - 1 gave; of stage 0 it is not read.
    uint64_t forward(const Action& a, uint64_t x) {
        Micro& here = of(a);
        here.x = a.stage == 0 ? mix(2, a.micro, 0) : x;
        const uint64_t y = mix(weights(a), here.x, 3);
        if (a.stage + 1 == s_.n_stages) outputs_[a.micro] = here.dy = y;
        return y;
    }
    // dy: what stage a.stage + 1 gave; of the last stage it is not read.
    uint64_t backward(const Action& a, uint64_t dy) {
        Micro& here = of(a);
        if (a.stage + 1 < s_.n_stages) here.dy = dy;
        const uint64_t dx = mix(weights(a), here.dy, here.x);
        if (a.what == Do::backward) backward_weight(a);
        return dx;
    }
    void backward_weight(const Action& a) {
        uint64_t& gradient = stages_.at(a.stage).gradient;
        gradient = gradient * kFactor + mix(weights(a), of(a).dy, of(a).x + 1);
    }
    void update(const Action& a) {
        Stage& its = stages_.at(a.stage);
        const auto kept = its.weights.size(), version = static_cast<size_t>(a.version);
        its.weights[version % kept] = its.weights[(version - 1) % kept] * kFactor + its.gradient;
        its.gradient = 0;
        its.newest = version;
    }

    // By stage: the newest weights and the gradient; then what the last stage gave, by micro-batch.
    std::vector<uint64_t> numbers() const {
        std::vector<uint64_t> result;
        for (const auto& [stage, its] : stages_) {
            result.push_back(its.weights[its.newest % its.weights.size()]);
            result.push_back(its.gradient);
        }
        for (const auto& [micro, y] : outputs_) result.push_back(y);
        return result;
    }

  private:
    static constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;
    static uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
        uint64_t h = (a * kFactor ^ (b + 0x7F4A7C15)) * kFactor ^ (c + 0x9E3779B9);
        h ^= h >> 29;
        h *= 0xBF58476D1CE4E5B9;
        return h ^ h >> 32;
    }
    struct Micro {
        uint64_t x = 0, dy = 0;
    };
    struct Stage {
        std::vector<uint64_t> weights;  // a ring: version v is in place v mod their number
        uint64_t gradient = 0;
        size_t newest = 0;
        std::map<int, Micro> micros;
    };
    Micro& of(const Action& a) { return stages_.at(a.stage).micros[a.micro]; }
    uint64_t weights(const Action& a) const {
        const std::vector<uint64_t>& ring = stages_.at(a.stage).weights;
        return ring[static_cast<size_t>(a.version) % ring.size()];
    }

    const PipelineSchedule& s_;
    std::map<int, Stage> stages_;
    std::map<int, uint64_t> outputs_;
};

struct ToyResult {
    std::string stuck;                           // empty: all ranks came to the end of their lists
    std::vector<std::vector<uint64_t>> numbers;  // by rank
    bool operator==(const ToyResult&) const = default;
};

// One rank after the other, as far as it goes. A message carries its number alone: the n-th receive of a link
// has what its n-th send had.
class ToyExecutor {
  public:
    explicit ToyExecutor(const PipelineSchedule& schedule) : s_(schedule), next_(schedule.ranks.size(), 0) {
        for (int rank = 0; rank < s_.p; ++rank) ranks_.emplace_back(s_, rank);
        links_.resize(ranks_.size() * ranks_.size());
        for (auto& of_kind : results_) of_kind.resize(static_cast<size_t>(s_.n_stages * s_.m));
        for (auto& of_kind : received_) of_kind.assign(static_cast<size_t>(s_.n_stages * s_.m), -1);
    }

    ToyResult run() {
        for (bool moves = true; moves;) {
            moves = false;
            for (size_t rank = 0; rank < ranks_.size(); ++rank)
                for (; next_[rank] < s_.ranks[rank].size() && execute(rank, s_.ranks[rank][next_[rank]]); ++next_[rank])
                    moves = true;
        }
        ToyResult result;
        for (size_t rank = 0; rank < ranks_.size(); ++rank) {
            if (next_[rank] < s_.ranks[rank].size() && result.stuck.empty())
                result.stuck = concat("rank ", rank, " at ", action_text(s_.ranks[rank][next_[rank]]));
            result.numbers.push_back(ranks_[rank].numbers());
        }
        return result;
    }

  private:
    struct Link {
        std::vector<uint64_t> sent;
        int received = 0;
    };
    Link& link(size_t from, size_t to) { return links_[from * ranks_.size() + to]; }
    // The place of something of this stage and micro-batch, in lists for activations (0) and gradients (1).
    size_t place(const Action& a, int stage) const { return static_cast<size_t>(stage * s_.m + a.micro); }

    // False: it has to wait.
    bool execute(size_t rank, const Action& a) {
        const auto peer = static_cast<size_t>(a.peer);
        const bool gradient =
            a.what == Do::send_gradient || a.what == Do::receive_gradient || is_input_gradient(a.what);
        if (sends(a.what)) {
            link(rank, peer).sent.push_back(results_[gradient][place(a, a.stage)]);
        } else if (receives(a.what)) {
            received_[gradient][place(a, a.stage)] = link(peer, rank).received++;
        } else if (a.what == Do::update) {
            ranks_[rank].update(a);
        } else if (a.what == Do::backward_weight) {
            ranks_[rank].backward_weight(a);
        } else {
            uint64_t in = 0;
            const int before = gradient ? a.stage + 1 : a.stage - 1;
            if (before >= 0 && before < s_.n_stages) {
                const auto from = static_cast<size_t>(s_.rank_of(before, a.micro));
                if (from == rank) {
                    in = results_[gradient][place(a, before)];
                } else {
                    const int message = received_[gradient][place(a, a.stage)];
                    const std::vector<uint64_t>& sent = link(from, rank).sent;
                    if (message < 0 || message >= static_cast<int>(sent.size())) return false;
                    in = sent[static_cast<size_t>(message)];
                }
            }
            results_[gradient][place(a, a.stage)] =
                gradient ? ranks_[rank].backward(a, in) : ranks_[rank].forward(a, in);
        }
        return true;
    }

    const PipelineSchedule& s_;
    std::vector<ToyStages> ranks_;
    std::vector<size_t> next_;
    std::vector<Link> links_;
    std::vector<uint64_t> results_[2];  // of forwards, and of gradients by input
    std::vector<int> received_[2];      // which message of its link
};

inline ToyResult execute_toy(const PipelineSchedule& schedule) { return ToyExecutor(schedule).run(); }

// ---------------------------------------------------------------------------------------------------------------------

// Changes a table at random, in one place; undone by giving back what it was.
class Mutation {
  public:
    explicit Mutation(std::mt19937_64& random) : random_(random) {}

    std::string apply(PipelineSchedule& s) {
        const int rank = below(s.p);
        std::vector<Action>& actions = s.ranks[static_cast<size_t>(rank)];
        const int i = below(static_cast<int>(actions.size()));
        Action& a = actions[static_cast<size_t>(i)];
        const std::string what = concat(" rank ", rank, ", action ", i, " (", action_text(a), ")");
        const auto at = [&](int place) { return actions.begin() + place; };
        // Half of the places are near: those are the changes that a valid table may allow.
        const int n = static_cast<int>(actions.size()), near = std::clamp(i - 4 + below(9), 0, n - 1),
                  there = below(2) ? near : below(n);
        switch (below(9)) {
            case 0: std::swap(a, actions[static_cast<size_t>(there)]); return concat("swap with ", there, what);
            case 1: actions.erase(at(i)); return "delete" + what;
            case 2: actions.insert(at(there), Action(a)); return concat("twice, also at ", there, what);
            case 3: a.micro += other(s.m, a.micro); return "micro-batch" + what;
            case 4: a.stage += other(s.n_stages, a.stage); return "stage" + what;
            case 5: a.version += below(2) ? 1 : -1; return "version" + what;
            case 6: a.peer += other(s.p, a.peer); return "peer" + what;
            case 7: return move(actions, i, there) + what;
            default: return below(2) ? kind(a) + what : versions(s, rank);
        }
    }

  private:
    int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
    // To another number: mostly one of 0 to n - 1, now and then one outside.
    int other(int n, int now) {
        const int wanted = below(n + 2) - 1;
        return wanted == now ? 1 : wanted - now;
    }
    std::string move(std::vector<Action>& actions, int from, int to) {
        const auto first = actions.begin() + std::min(from, to), last = actions.begin() + std::max(from, to) + 1;
        std::rotate(first, from < to ? first + 1 : last - 1, last);
        return concat("move to ", to);
    }
    std::string kind(Action& a) {
        a.what = static_cast<Do>((static_cast<int>(a.what) + 1 + below(9)) % 10);
        return "kind";
    }
    std::string versions(PipelineSchedule& s, int rank) {
        s.versions[static_cast<size_t>(rank)] += below(2) ? 1 : -1;
        return concat("versions of rank ", rank);
    }
    std::mt19937_64& random_;
};
