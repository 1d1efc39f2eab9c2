// planning/account.cu: what a run on many ranks took and sent, measured, beside what the formulas say.
//
// With P elements (padding counted), n ranks, W, G, S bytes per element of weights, gradients,
// and masters with optimizer states:
//
//     bytes per rank                               sent in a step, by all ranks together, M micro-batches
//     ddp      P (W + G + S)                       (n-1) 2 P G
//     naive    rank 0 all of it, others P (W + G)  (n-1) P (G + W)
//     zero 1   P (W + G + S/n)                     (n-1) P (G + W)
//     zero 2   P (W + (G + S)/n)                   (n-1) P (M G + W)
//     zero 3   P (W + G + S)/n                     (n-1) (P M G + W times the units that are fetched)
//
// The sum over the ranks is exact whatever the sharding boundaries: of each element n - 1 ranks send their gradient to
// its owner, which sends the sum or the new weight to n - 1. On top of that come the numbers that a step adds up
// (Trainer::totals), and fp8's histories.
#include "planning/planning.h"

#include <algorithm>
#include <cstdio>

namespace {

// Elements that a step with ZeRO 3 fetches: of each unit on the way of a step (model/visits.cu), unless its buffer
// still holds it.
int64_t fetched_n(const Trainer& t) {
    std::vector<Visit> visits = forward_visits(t.model);
    for (const Visit& visit : backward_visits(t.model, t.options.recompute)) visits.push_back(visit);
    std::map<int, size_t> in_buffer;
    int64_t n = 0;
    for (int64_t micro = 0; micro < t.local_batch / t.micro_batch; ++micro) {
        for (const Visit& visit : visits) {
            for (size_t u : visit.weights) {
                const Unit& unit = t.model.units[u];
                if (const auto at = in_buffer.find(unit.buffer); at != in_buffer.end() && at->second == u) continue;
                in_buffer[unit.buffer] = u;
                n += unit.n;
            }
        }
    }
    return n;
}

// Maxima of tensors, one number each, that a step of fp8 finds over the ranks that have parts of them: of the input and
// of the output gradient of each layer (model/block_linear.cu), and of the weights (quantise_block).
int64_t fp8_maxima(const Trainer& t) {
    const Precision& p = t.model.precision;
    if (p.fp8 == Fp8Recipe::none || p.fp8 == Fp8Recipe::block) return 0;
    const int64_t n_linears = std::ssize(block_linear_shapes(t.config)), M = t.local_batch / t.micro_batch;
    const bool with_visits = t.model.sharding.shards_weights();  // weights are quantised when they come
    int64_t n = with_visits ? 0 : t.model.n_blocks() * n_linears;
    std::vector<Visit> visits = forward_visits(t.model);
    for (const Visit& visit : backward_visits(t.model, t.options.recompute)) visits.push_back(visit);
    for (const Visit& visit : visits) {
        if (visit.block < 0) continue;
        if (with_visits) n += M * n_linears;
        n += M * (n_linears - (visit.work == Work::recompute_block && visit.last ? 1 : 0));
    }
    return n;
}

// Numbers that the optimizers of all ranks with one share of the layers add up over the others (Optimizer::sums).
std::vector<int64_t> optimizer_sums(const Trainer& t) {
    if (t.model.sharding.host_updates()) return {};
    Arena counting("optimizer");
    const TrainOptions& o = t.options;
    return make_optimizer(o.optimizer, counting, t.model.params, t.model.n, o.optimizer_options, false)->sums();
}

// Bytes that tensor parallelism sends in a step, all ranks together.
int64_t tensor_bytes(const Trainer& t) {
    if (!t.tensor_parallel) return 0;
    const TensorTraffic traffic = tensor_traffic(t.model, t.micro_batch * t.options.rank_seq(), t.options.recompute);
    const int64_t M = t.local_batch / t.micro_batch, n = t.options.tp,
                  numbers = 2 * (n - 1) * static_cast<int64_t>(t.step_sums().bytes());
    int64_t sums = 0;  // that optimizers make of what they update, as shared gradients
    for (const int64_t sum : optimizer_sums(t)) sums += 2 * (n - 1) * 4 * sum;
    const int64_t fp8 = 4 * fp8_maxima(t) + static_cast<int64_t>(t.model.fp8_states ? t.model.fp8_states.bytes() : 0);
    // With ZeRO each of the data-parallel ranks adds up its shard of the gradients, otherwise all of them everything.
    const Sharding& s = t.model.sharding;
    return s.size * (M * traffic.micro_batch + numbers + 2 * (n - 1) * fp8) +
           (s.shards_states() ? 1 : s.size) * (traffic.shared_gradients + sums);
}

// Bytes that context parallelism sends in a step, all ranks together: each attention is one call, forward or backward.
int64_t context_traffic(const Trainer& t) {
    if (!t.context_parallel) return 0;
    int64_t bytes = 0;  // of a rank
    const ContextParallel::Sizes sizes = t.attention_sizes();
    const auto add = [&](const Visit& visit) {
        if (visit.work == Work::forward_block || visit.work == Work::recompute_block)
            bytes += t.context_parallel->forward_bytes(sizes);
        if (visit.work == Work::backward_block) bytes += t.context_parallel->backward_bytes(sizes);
    };
    for (const Visit& visit : forward_visits(t.model)) add(visit);
    for (const Visit& visit : backward_visits(t.model, t.options.recompute)) add(visit);
    return t.world.size * (t.local_batch / t.micro_batch) * bytes;
}

}  // namespace

int64_t expected_traffic(const Trainer& t) {
    const Sharding& s = t.model.sharding;
    const int64_t P = t.model.n, W = static_cast<int64_t>(dtype_bytes(t.model.weights.dtype)),
                  G = static_cast<int64_t>(dtype_bytes(t.model.grads.dtype)), M = t.local_batch / t.micro_batch;
    const int64_t small =
        static_cast<int64_t>(t.step_sums().bytes() + (t.model.fp8_states ? t.model.fp8_states.bytes() : 0));
    int64_t big = 2 * P * G;
    if (s.naive || s.zero == 1) big = P * (G + W);
    if (s.zero == 2) big = P * (M * G + W);
    if (s.zero == 3) big = P * M * G + fetched_n(t) * W;
    return t.options.tp * (s.size - 1) * (big + 2 * small) + tensor_bytes(t) + context_traffic(t);
}

namespace {

struct Row {
    const char* name;
    double formula;  // of a rank; < 0: none
    int64_t measured;
};

// What this rank took and sent, beside the formulas. Collective.
std::vector<Row> account_rows(Trainer& t, const Traffic& step) {
    const Sharding& s = t.model.sharding;
    const double P = static_cast<double>(t.model.n), n = s.size;
    int64_t states = static_cast<int64_t>(t.model.masters.bytes()), buffers = 0;
    for (const auto& optimizer : t.optimizers)
        for (const OptimizerState& state : optimizer->states()) states += static_cast<int64_t>(state.tensor.bytes());
    for (const auto& array : {t.model.weight_buffers, t.model.grad_buffers})
        for (const Tensor& buffer : array) buffers += static_cast<int64_t>(buffer.bytes());

    // What the states of all ranks take together, each element counted once: S.
    double S = 0;
    for (const auto& row : gather_numbers(t.data_parallel.comm(), {states}))
        S += static_cast<double>(row[0]) / (s.shards_states() ? 1 : n);
    const double W = P * static_cast<double>(dtype_bytes(t.model.weights.dtype)),
                 G = P * static_cast<double>(dtype_bytes(t.model.grads.dtype));
    const double states_of_rank = s.naive ? (s.rank == 0 ? S : 0) : s.shards_states() ? S / n : S;
    return {{"weights", s.shards_weights() ? W / n : W, static_cast<int64_t>(t.model.weights.bytes())},
            {"gradients", s.shards_grads() ? G / n : G, static_cast<int64_t>(t.model.grads.bytes())},
            {"masters, optimizer", states_of_rank, states},
            {"units in use", -1, buffers},
            {"activations", -1, static_cast<int64_t>(t.memory.activations.bytes())},
            {"communication", -1, static_cast<int64_t>(t.memory.communication.bytes())},
            {"sent in a step", -1, step.sent},
            {"received in a step", -1, step.received}};
}

}  // namespace

void print_account(Trainer& t, const Traffic& step, const CommTime& time) {
    const Sharding& s = t.model.sharding;
    const std::vector<Row> rows = account_rows(t, step);
    std::vector<int64_t> mine;
    for (const Row& row : rows) mine.push_back(row.measured);
    const std::vector<std::vector<int64_t>> all = gather_numbers(t.world, mine);
    if (t.world.rank != 0) return;
    const std::string scheme =
        concat(s.naive ? "naive" : concat("zero ", s.zero),
               t.context_parallel ? concat(", cp ", t.options.cp, " ", context_mode_name(t.options.cp_mode)) : "",
               t.tensor_parallel
                   ? concat(", tp ", t.options.tp, " ", tensor_mode_name(t.options.tp_mode), t.options.sp ? " sp" : "")
                   : "");
    std::printf("account  %d ranks, %s                formula            bytes, least to most of a rank\n",
                t.world.size, scheme.c_str());
    for (size_t i = 0; i < rows.size(); ++i) {
        int64_t least = all[0][i], most = all[0][i];
        for (const auto& row : all) least = std::min(least, row[i]), most = std::max(most, row[i]);
        std::printf("  %-20s %20s  %18lld %18lld\n", rows[i].name,
                    rows[i].formula < 0 ? "" : std::to_string(static_cast<int64_t>(rows[i].formula)).c_str(),
                    static_cast<long long>(least), static_cast<long long>(most));
    }
    int64_t sent = 0;
    for (const auto& row : all) sent += row[6];
    // --compress says in parallel/data/data.h what it sends;
    // other algorithms than the library's send wider numbers or more of them.
    const bool known = t.data_parallel.comm().algorithm == AllReduce::library &&
                       t.options.data_parallel.compress.kind == Compression::none;
    std::printf("  sent by all %20s  %18lld\n", known ? std::to_string(expected_traffic(t)).c_str() : "",
                static_cast<long long>(sent));
    if (time.total == 0) return;  // stopped by a signal: the last step was not timed
    if (device().is_cpu)
        std::printf(
            "  collectives took %s of the last step; the CPU device runs streams one after the other, so none of it "
            "was hidden\n",
            human_seconds(time.total).c_str());
    else
        std::printf("  collectives took %s of the last step, %.0f %% of it behind computing\n",
                    human_seconds(time.total).c_str(),
                    time.total > 0 ? 100 * std::max(0.0, 1 - time.exposed / time.total) : 0.0);
}
