// training/boundary.cu: what lies between two steps, so that the device need not wait for the host there.
//
// Ahead of the device. A step ends with numbers that the host writes into the log. If it waited for them and only then
// launched the next step, the device would be idle meanwhile. So the host launches step s + 1 and then reads the
// numbers of step s, which come to a place of their own (StepEnd), as the batch comes from a place of its own:
//
//     host     launch 1, launch 2 | numbers of 1, launch 3 | numbers of 2, launch 4 | ...
//     device           [   step 1      ][   step 2      ][   step 3      ] ...
//
// Nothing that step s + 1 is given may depend on the numbers of step s, and all that is saved or said must be of the
// step it names. So step s + 1 waits until step s is read
//   with several ranks   which of them was asked to stop is part of these numbers
//   with fp16            an overflow changes the loss scale, and whether the step counts as an update
//   with fp8             what is said of a step that fails is found with the scales that it had
//   with --offload       the host has a part in the update
//   with --trace         a trace has the messages and the computing of one step
// and after steps that an evaluation or a checkpoint follows, the last one, and the one in which a signal came. In all
// of these the host at least reads the next batch while the device works.
// A step whose norm is not finite ends the run, and the message says that it changed no weights. The step launched
// after it must not either: the factor of the gradients, NaN, stays NaN (clip_scale).
//
// As one launch. A step of a small model is hundreds of kernels of a few microseconds, as long as it takes the host to
// launch one. The launches of forward, backward and norm, from the upload of the batch to the factor of the gradients,
// are the same in every step, but for the place of the batch and the loss scale: with --graph they become a CUDA graph
// for each of these (StepGraphs). The first two steps are launched one by one, for kernels are loaded then, and
// cuBLASLt chooses its algorithms.
// The update follows the graph: what kernels are given is part of a graph, and they are given the learning rate and the
// number of updates. For AdamW and most others that is one launch, and there is nothing to gain: if the kernel read
// these numbers from memory, a launch or a copy would have to bring them there. Adafactor has six launches a unit, Muon
// 21 a matrix, and fp8 quantises the weights; the host launches these while the device works on the graph.
#include "core/names.h"
#include "training/training.h"

#include <bit>
#include <cstdio>

namespace {

// Why the launches of a step cannot be a graph, or a step not be launched before the one before it is read; or nothing.
std::string reason_against_graph(const TrainOptions& o) {
    if (rank_count(o.ranks) > 1) return "ranks wait for each other on the host; use one rank";
    if (o.offload != Offload::none) return "--offload moves what is computed, and where; leave --offload out";
    if (o.data_parallel.zero > 0) return "--zero fetches and reduces on a stream of its own; leave --zero out";
    if (o.data_parallel.naive) return "--dp-mode naive has a stream of its own; leave --dp-mode out";
    if (!o.ranks.trace.empty()) return "--trace notes when each kernel comes; leave --trace out";
    return "";
}
std::string reason_against_run_ahead(const TrainOptions& o) {
    if (rank_count(o.ranks) > 1) return "ranks agree after each step whether to stop; use one rank";
    if (o.precision.dtype == DType::f16) return "an overflow in fp16 changes the next step; use --dtype bf16 or fp32";
    if (o.precision.fp8 != Fp8Recipe::none) return "the scales of fp8 are those of the step before; use --dtype bf16";
    if (o.offload != Offload::none) return "with --offload the host has a part in the update; leave --offload out";
    if (!o.ranks.trace.empty()) return "--trace shows steps one by one; leave --trace out";
    return "";
}

bool settled(const char* flag, const std::string& typed, const std::string& reason) {
    // The calls of a CPU device return when the work is done: there is nothing to be ahead of.
    const bool automatic = reason.empty() && !device().is_cpu;
    const bool on = choose<bool>(flag, typed, {{"on", true}, {"off", false}, {"auto", automatic}});
    check(!on || reason.empty(), flag, " on: ", reason);
    return on;
}

}  // namespace

void settle_boundary(TrainOptions& o, const TypedFlags& typed) {
    o.graph = settled("--graph", typed.graph, reason_against_graph(o));
    o.run_ahead = settled("--run-ahead", typed.run_ahead, reason_against_run_ahead(o));
    o.needs_graph = typed.graph == "on";
}

bool evaluates_after(const TrainOptions& o, int64_t step) {
    return step == o.steps || (o.val_every > 0 && step % o.val_every == 0);
}
bool saves_after(const TrainOptions& o, int64_t step) { return o.save_every > 0 && step % o.save_every == 0; }

bool may_run_ahead(Trainer& t, int64_t step) {
    const TrainOptions& o = t.options;
    return o.run_ahead && step < o.last_step() && !t.end_of(step).asked_to_stop && !evaluates_after(o, step) &&
           !saves_after(o, step);
}

void launch_as_graph(Trainer& t, int64_t step, const std::function<void()>& launches) {
    if (!t.options.graph || step == t.options.inject_overflow) return launches();
    try {
        t.graphs.run({step % 2, std::bit_cast<int64_t>(t.scaler.scale)}, device().stream, launches);
    } catch (const Error& error) {
        if (t.options.needs_graph) throw;
        t.options.graph = false;
        std::fprintf(stderr, "train_gpt: the launches of a step cannot be a graph here, and stay single: %s\n",
                     error.what());
        launches();
    }
}
