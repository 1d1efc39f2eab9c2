// planning/pipeline_plan.cu: --plan with --pp: what each rank of a pipeline has and sends. Ranks differ: those at the
// ends have the embedding and the head, and by most schedules the first one keeps the activations of the
// most micro-batches.
//
//     in flight   what blocks and heads keep at once, at most, and the tensors at the stages' borders; workspace and
//                 tokens, which the table of rank 0 below counts, too, are not in it
//     for W       the part of it that is there because gradients by weight come later than those by input: output
//                 gradients of linear layers, and activations that a whole backward would have given back earlier
//
// All are counted by the functions that take them, over arenas that only count, for any rank.
#include "planning/planning.h"

#include <cstdio>

namespace {

// "0-5 18-23, head"
std::string part_text(const ModelPart& part) {
    std::string text = part.embedding ? "embedding, " : "";
    for (size_t i = 0; i < part.blocks.size(); ++i) {
        const int64_t first = part.blocks[i];
        while (i + 1 < part.blocks.size() && part.blocks[i + 1] == part.blocks[i] + 1) ++i;
        text += first == part.blocks[i] ? concat(first, " ") : concat(first, "-", part.blocks[i], " ");
    }
    text.pop_back();
    return text + (part.head ? ", head" : "");
}

// Bytes of what a rank with this part keeps from step to step, of the first of the ranks with the same weights.
struct States {
    int64_t parameters, weights, grads, others;  // others: masters and optimizer states
};
States states_of(const Trainer& t, const ModelPart& part) {
    const TrainOptions& o = t.options;
    Arena weights("weights"), grads("gradients"), masters("master weights"), states("optimizer states");
    const Model model =
        build_model(t.config, o.precision, o.seq, weights, grads, masters, t.model.sharding, t.model.layout, part);
    int64_t others = static_cast<int64_t>(model.masters.bytes());
    const auto optimizer = make_optimizer(o.optimizer, states, model.updated_units(), o.optimizer_options);
    for (const OptimizerState& state : optimizer->states()) others += static_cast<int64_t>(state.tensor.bytes());
    return {model.n, static_cast<int64_t>(weights.bytes()), static_cast<int64_t>(grads.bytes()), others};
}

// Bytes in the columns of a rank, with copies of weights and states.
int64_t listed_bytes(const Trainer& t, int rank) {
    const States its = states_of(t, t.pipeline->stages_of(rank).part);
    const int64_t put_back = validates_later(t.options) ? its.weights + its.others : 0;
    return t.pipeline->schedule().versions[static_cast<size_t>(rank)] * its.weights + its.grads + its.others +
           put_back + t.pipeline->planned(rank).activations;
}

}  // namespace

std::pair<int, double> largest_pipeline_rank(Trainer& t) {
    std::pair<int, double> largest{0, static_cast<double>(t.memory.bytes())};
    // What rank 0 takes beside its columns, the others take, too.
    const double beside = largest.second - static_cast<double>(listed_bytes(t, 0));
    for (int rank = 1; rank < t.options.pp; ++rank)
        if (const double bytes = beside + static_cast<double>(listed_bytes(t, rank)); bytes > largest.second)
            largest = {rank, bytes};
    return largest;
}

void print_pipeline_plan(const Trainer& t) {
    const Pipeline& pipeline = *t.pipeline;
    const PipelineSchedule& schedule = pipeline.schedule();
    const int steps = static_cast<int>(steps_at_once(t.options));
    std::printf(
        "pp       %lld ranks divide the layers into %d stages, --pipeline %s, %d micro-batches a step, bubble %.4f\n",
        static_cast<long long>(t.options.pp), schedule.n_stages, t.options.pipeline.c_str(), schedule.m / steps,
        simulate(schedule, Times{}).bubble);
    std::printf("         where a block's forward, backward by input and backward by weight take equally long\n");
    std::printf("rank  %-24s %10s %10s %10s %10s %10s %10s %12s %8s\n", "blocks", "parameters", "weights", "gradients",
                "states", "in flight", "for W", "sent a step", "versions");
    for (int rank = 0; rank < t.options.pp; ++rank) {
        const ModelPart part = pipeline.stages_of(rank).part;
        const States its = states_of(t, part);
        const PipelineTraffic traffic = pipeline.planned(rank);
        const auto text = [](int64_t bytes) { return human_bytes(static_cast<double>(bytes)); };
        std::printf("%4d  %-24s %10s %10s %10s %10s %10s %10s %12s %8d\n", rank, part_text(part).c_str(),
                    human_count(static_cast<double>(its.parameters)).c_str(), text(its.weights).c_str(),
                    text(its.grads).c_str(), text(its.others).c_str(), text(traffic.activations).c_str(),
                    text(traffic.longer).c_str(), text(traffic.bytes).c_str(),
                    schedule.versions[static_cast<size_t>(rank)]);
    }
    std::printf("what follows is of rank 0\n");
}
