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

std::vector<Visit> visits_of_micro_batch(const Model& model, const Recompute& recompute) {
    std::vector<Visit> visits = forward_visits(model);
    for (const Visit& visit : backward_visits(model, recompute)) visits.push_back(visit);
    return visits;
}

namespace {

using Bytes = __int128;  // that all ranks together send: of a plan they may be more than 2^63

// What ranks with the same weights do in a step: visits, each list this many times.
struct RepeatedVisits {
    std::vector<Visit> visits;
    int64_t times;
};
struct RankWork {
    Model model;  // whose memory need not be there
    std::vector<RepeatedVisits> work;
};

// Elements that a step with ZeRO 3 fetches: of each unit on the way of a step (model/visits.cu), unless its buffer
// still holds it. The first time through a list finds what the list before it has left in the buffers; all others find
// what the list itself leaves.
int64_t fetched_n(const RankWork& rank) {
    std::map<int, size_t> in_buffer;
    const auto fetch = [&](const std::vector<Visit>& visits) {
        int64_t n = 0;
        for (const Visit& visit : visits) {
            for (size_t u : visit.weights) {
                const Unit& unit = rank.model.units[u];
                if (const auto at = in_buffer.find(unit.buffer); at != in_buffer.end() && at->second == u) continue;
                in_buffer[unit.buffer] = u;
                n += unit.n;
            }
        }
        return n;
    };
    int64_t n = 0;
    for (const auto& [visits, times] : rank.work) {
        if (times > 0) n += fetch(visits);
        if (times > 1) n += (times - 1) * fetch(visits);
    }
    return n;
}

// Maxima of tensors, one number each, that a step of fp8 finds over the ranks that have parts of them: of the input and
// of the output gradient of each layer (model/block_linear.cu), and of the weights (quantise_block).
int64_t fp8_maxima(const RankWork& rank) {
    const Precision& p = rank.model.precision;
    if (p.fp8 == Fp8Recipe::none || p.fp8 == Fp8Recipe::block) return 0;
    const int64_t n_linears = std::ssize(block_linear_shapes(rank.model.config));
    const bool with_visits = rank.model.sharding.shards_weights();  // weights are quantised when they come
    int64_t n = with_visits ? 0 : rank.model.n_blocks() * n_linears;
    for (const auto& [visits, times] : rank.work) {
        for (const Visit& visit : visits) {
            if (visit.block < 0) continue;
            if (with_visits) n += times * n_linears;
            n += times * (n_linears - (visit.work == Work::recompute_block && visit.last ? 1 : 0));
        }
    }
    return n;
}

// What the optimizers of all ranks with one share of the layers add up over the others (Optimizer::sums).
std::vector<Tensor> optimizer_sums(const Trainer& t, const Model& model) {
    if (model.sharding.host_updates()) return {};
    Arena counting("optimizer");
    const TrainOptions& o = t.options;
    return make_optimizer(o.optimizer, counting, model.params, model.n, o.optimizer_options)->sums();
}

// Bytes that tensor parallelism sends in a step, all ranks together.
Bytes tensor_bytes(const Trainer& t, const RankWork& rank) {
    if (!t.tensor_parallel) return 0;
    const Model& model = rank.model;
    Bytes visited = 0, shared = 0;
    for (const auto& [visits, times] : rank.work) {
        const TensorTraffic traffic =
            tensor_traffic(model, t.micro_batch * t.options.rank_seq(), visits, t.options.recompute.selective);
        visited += Bytes{times} * traffic.visits, shared = traffic.shared_gradients;
    }
    const int64_t n = t.options.tp, numbers = 2 * (n - 1) * static_cast<int64_t>(t.step_sums().bytes());
    Bytes sums = 0;  // that optimizers make of what they update, as shared gradients
    for (const Tensor& sum : optimizer_sums(t, model)) sums += 2 * (n - 1) * static_cast<int64_t>(sum.bytes());
    const int64_t fp8 = 4 * fp8_maxima(rank) + static_cast<int64_t>(model.fp8_states.bytes());
    // With ZeRO each of the data-parallel ranks adds up its shard of the gradients, otherwise all of them everything.
    const Sharding& s = model.sharding;
    return s.size * (visited + numbers + 2 * (n - 1) * fp8) + (s.shards_states() ? 1 : s.size) * (shared + sums);
}

// Bytes that context parallelism sends in a step, all ranks together: each attention is one call, forward or backward.
Bytes context_traffic(const Trainer& t, const RankWork& rank) {
    if (!t.context_parallel) return 0;
    Bytes bytes = 0;  // of a rank
    const ContextParallel::Sizes sizes = t.attention_sizes();
    for (const auto& [visits, times] : rank.work) {
        for (const Visit& visit : visits) {
            if (visit.work == Work::forward_block || visit.work == Work::recompute_block)
                bytes += times * t.context_parallel->forward_bytes(sizes);
            if (visit.work == Work::backward_block) bytes += times * t.context_parallel->backward_bytes(sizes);
        }
    }
    return t.world.size / t.options.pp * bytes;
}

// Bytes of all ranks that have these weights, or other parts of the same layers.
Bytes traffic_of(const Trainer& t, const RankWork& rank) {
    const Model& model = rank.model;
    const Sharding& s = model.sharding;
    const Bytes P = model.n, W = dtype_bytes(model.weights.dtype), G = dtype_bytes(model.grads.dtype),
                M = t.micro_batches();
    const int64_t small = static_cast<int64_t>(t.step_sums().bytes() + model.fp8_states.bytes());
    Bytes big = 2 * P * G;
    if (s.naive || s.zero == 1) big = P * (G + W);
    if (s.zero == 2) big = P * (M * G + W);
    if (s.zero == 3) big = P * M * G + fetched_n(rank) * W;
    return t.options.tp * (s.size - 1) * (big + 2 * small) + tensor_bytes(t, rank) + context_traffic(t, rank);
}

// A rank of the pipeline: each of its chunks' visits, as often as micro-batches go through it in a step.
RankWork work_of_stage_rank(const Trainer& t, int rank) {
    const TrainOptions& o = t.options;
    const Pipeline& pipeline = *t.pipeline;
    const RankStages stages = pipeline.stages_of(rank);
    Arena weights("weights"), grads("gradients"), masters("master weights");
    RankWork its{build_model(t.config, o.precision, o.seq, weights, grads, masters, t.model.sharding, t.model.layout,
                             stages.part),
                 {}};
    const int64_t M = t.micro_batches() / (pipeline.has_twins() ? 2 : 1);
    for (const auto& [first, n] : stages.chunks) {
        its.work.push_back({chunk_forward_visits(first, first + n), M});
        its.work.push_back({chunk_backward_visits(first, first + n, o.recompute), M});
    }
    if (stages.part.embedding) its.work.push_back({{{.work = Work::embed}, {.work = Work::backward_embedding}}, M});
    if (stages.part.head) its.work.push_back({{{.work = Work::forward_head}, {.work = Work::backward_head}}, M});
    return its;
}

// Bytes between the ranks of all pipelines.
Bytes pipeline_traffic(const Trainer& t, const std::vector<RankWork>& ranks) {
    const Pipeline& pipeline = *t.pipeline;
    const int64_t pp = t.options.pp, n_pipelines = t.world.size / pp;
    // Numbers that are validated later go from rank to rank and back, with the norm.
    const Tensor numbers = validates_later(t.options) ? t.totals : t.step_sums();
    Bytes bytes = 2 * (pp - 1) * static_cast<int64_t>(numbers.bytes());
    for (int rank = 0; rank < pp; ++rank) bytes += pipeline.planned(rank).bytes;
    bytes *= n_pipelines;
    const Sharding& s = t.model.sharding;
    // DualPipe: the two ranks with the same stages all-reduce their gradients (with --zero, their shards of them).
    for (int rank = 0; pipeline.has_twins() && rank < pp / 2; ++rank) {
        const Model& model = ranks[static_cast<size_t>(rank)].model;
        const int64_t grads = model.n * static_cast<int64_t>(dtype_bytes(model.grads.dtype));
        bytes += t.options.tp * (s.shards_states() ? 1 : s.size) * 2 * grads;
        bytes += n_pipelines * 2 * static_cast<int64_t>(model.fp8_states.bytes());
    }
    // A tied embedding, whose gradients the first and the last rank all-reduce.
    if (pipeline.ties_two_ranks()) bytes += n_pipelines * 2 * static_cast<int64_t>(ranks[0].model.dwte.bytes());
    return bytes;
}

}  // namespace

__int128 expected_traffic(const Trainer& t) {
    if (!t.pipeline)
        return traffic_of(t, {t.model, {{visits_of_micro_batch(t.model, t.options.recompute), t.micro_batches()}}});
    std::vector<RankWork> ranks;
    Bytes bytes = 0;
    for (int rank = 0; rank < t.options.pp; ++rank) {
        ranks.push_back(work_of_stage_rank(t, rank));
        bytes += traffic_of(t, ranks.back());
    }
    return bytes + pipeline_traffic(t, ranks);
}

// --compress says in parallel/data/data.h what it sends; other algorithms than the library's send wider numbers or more
// of them.
bool traffic_is_known(const Trainer& t) {
    return t.world.algorithm == AllReduce::library && t.options.data_parallel.compress.kind == Compression::none;
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
    for (const OptimizerState& state : t.optimizer->states()) states += static_cast<int64_t>(state.tensor.bytes());
    for (const auto& array : {t.model.weight_buffers, t.model.grad_buffers})
        for (const Tensor& buffer : array) buffers += static_cast<int64_t>(buffer.bytes());

    // What the states of all ranks take together, each element counted once: S.
    double S = 0;
    for (const auto& row : gather_numbers(t.data_parallel.comm(), {states})) S += static_cast<double>(row[0]);
    if (!s.shards_states()) S /= n;  // once, so that a whole number stays one
    const double W = P * static_cast<double>(dtype_bytes(t.model.weights.dtype)),
                 G = P * static_cast<double>(dtype_bytes(t.model.grads.dtype));
    const double states_of_rank = s.naive ? (s.rank == 0 ? S : 0) : s.shards_states() ? S / n : S;
    // The ranks of a pipeline have other parameters each: --plan has a row for each.
    const auto formula = [&](double bytes) { return t.pipeline ? -1 : bytes; };
    return {{"weights", formula(s.shards_weights() ? W / n : W), static_cast<int64_t>(t.model.weights.bytes())},
            {"gradients", formula(s.shards_grads() ? G / n : G), static_cast<int64_t>(t.model.grads.bytes())},
            {"masters, optimizer", formula(states_of_rank), states},
            {"units in use", -1, buffers},
            {"activations", -1, static_cast<int64_t>(t.memory.activations.bytes())},
            {"communication", -1, static_cast<int64_t>(t.memory.communication.bytes())},
            {"sent in a step", -1, step.sent},
            {"received in a step", -1, step.received}};
}

}  // namespace

void print_account(Trainer& t, const Traffic& step, bool only_trains, const CommTime& time) {
    const Sharding& s = t.model.sharding;
    const std::vector<Row> rows = account_rows(t, step);
    if (t.pipeline) print_pipeline_traffic(t);
    std::vector<int64_t> mine;
    for (const Row& row : rows) mine.push_back(row.measured);
    const std::vector<std::vector<int64_t>> all = gather_numbers(t.world, mine);
    if (t.world.rank != 0) return;
    const std::string scheme =
        concat(s.naive ? "naive" : concat("zero ", s.zero),
               t.pipeline ? concat(", pp ", t.options.pp, " ", t.options.pipeline) : "",
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
    // A step whose update was undone did a part of its work twice.
    const bool known = (only_trains || !t.model.sharding.shards_weights()) &&
                       !(t.pipeline && t.pipeline->updates_put_back() > 0) && traffic_is_known(t);
    const int64_t expected = known ? static_cast<int64_t>(expected_traffic(t)) : 0;  // a run counts in int64, too
    std::printf("  sent by all %20s  %18lld\n", known ? std::to_string(expected).c_str() : "",
                static_cast<long long>(sent));
    if (time.total == 0) return;  // stopped by a signal: the last step was not timed
    if (device().is_cpu)
        std::printf(
            "  collectives took %s of the last step; the CPU device runs streams one after the other, so none of it "
            "was hidden\n",
            human_seconds(time.total).c_str());
    else
        std::printf("  collectives took %s of the last step, %.0f %% of it hidden behind computing\n",
                    human_seconds(time.total).c_str(), 100 * std::max(0.0, 1 - time.exposed / time.total));
}
