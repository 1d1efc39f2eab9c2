// training/diagnosis.cu: what is known of a step whose loss or gradients are not finite.
//
// The same weights and the same data give the same bits again: a run that resumes from its last checkpoint stops at the
// same step, unless something changes. What should change depends on where the numbers come from:
//
//   the weights    the loss of every sequence is not finite; in the first step: those that the run began with
//   some data      the loss of some sequences is not finite
//   the backward   all losses are finite, and the norm of the gradients is not: they are beyond the type's range
#include "training/training.h"

#include <algorithm>
#include <cmath>

namespace {

struct BadSequences {
    int64_t n = 0, first = -1;  // of all ranks; first: by its number in the run
};

// Runs the forward of the step again, and looks at the losses of each sequence. Collective.
BadSequences find_bad_sequences(Trainer& t, int64_t step) {
    const int64_t T = t.options.rank_seq();
    // By sequence: is one of its losses that this rank has not finite? In 2D, 2.5D and 3D a rank has the losses of some
    // sequences of a micro-batch.
    std::vector<int64_t> bad(static_cast<size_t>(t.local_batch));
    const int64_t part = t.model.layout.part(t.model.layout.inner_rows).index;
    for (int64_t micro = 0; micro < t.micro_batches(); ++micro) {
        upload_micro_batch(t, t.acts, t.first_row(step) + micro * t.micro_batch, device().stream);
        forward(t.model, t.acts, t.workspace, device().stream, false);
        loss_forward(t.model, t.acts, device().stream);
        cudaCheck(cudaStreamSynchronize(device().stream));
        const std::vector<float> losses = to_floats(t.acts.losses);
        const int64_t first = micro * t.micro_batch + part * t.acts.B;
        for (size_t i = 0; i < losses.size(); ++i)
            if (!std::isfinite(losses[i])) bad[static_cast<size_t>(first) + i / static_cast<size_t>(T)] = 1;
    }
    const auto rows = gather_numbers(t.world, bad);  // ranks are in the order of their sequences
    // So many in a row share the same sequences.
    const size_t group = static_cast<size_t>(t.options.cp * t.options.tp);
    BadSequences all;
    for (size_t r = 0; r < rows.size(); r += group)
        for (size_t b = 0; b < bad.size(); ++b) {
            if (std::none_of(rows.begin() + static_cast<std::ptrdiff_t>(r),
                             rows.begin() + static_cast<std::ptrdiff_t>(r + group),
                             [b](const std::vector<int64_t>& row) { return row[b] != 0; }))
                continue;
            if (all.n++ == 0)
                all.first = (step - 1) * t.options.batch + static_cast<int64_t>(r / group * bad.size() + b);
        }
    return all;
}

}  // namespace

std::string explain_not_finite(Trainer& t, const BatchReader& data, int64_t step, double loss, double norm) {
    const TrainOptions& o = t.options;
    const int64_t first = (step - 1) * o.batch;
    const auto number = [](double x) { return std::isnan(x) ? std::string("nan") : concat(x); };  // never "-nan"
    std::string text = concat("step ", step, ": the loss is ", number(loss), " and the gradient norm ", number(norm));
    const auto where = [&](int64_t i) { return concat("sequence ", i, " (", data.describe(i), ")"); };
    // With --offload and --clip 0 the host has updated during the backward, before the norm was known.
    if (t.model.sharding.host_updates() && !o.updates_after_norm()) {
        text += concat("; the weights have been updated with them. The step's data are sequences ", first, " to ",
                       first + o.batch - 1, " of the run, the first is ", where(first));
    } else if (t.pipeline) {  // no rank has all losses, and the forward's memory is the schedule's
        // A rank that does not wait for the norm, and with --clip 0 keeps no copy, has updated with a finite gradient.
        const bool may_be_updated = validates_later(o) && !o.updates_after_norm();
        text += concat("; ", may_be_updated ? "some ranks may have updated their weights" : "the weights are unchanged",
                       " by this step. Its data are sequences ", first, " to ", first + o.batch - 1,
                       " of the run, the first is ", where(first));
    } else {
        text += "; the weights are unchanged by this step. ";
        const BadSequences bad = find_bad_sequences(t, step);
        if (bad.n == o.batch && step == 1)
            return concat(text, "The loss of all of its ", o.batch,
                          " sequences is not finite: this comes from the weights",
                          o.init.empty() ? std::string(" that the run began with") : " of --init " + o.init,
                          ", which may be damaged, or their products too large for --dtype");
        if (bad.n == o.batch)
            text +=
                concat("The loss of all of its ", o.batch,
                       " sequences is not finite: this comes from the weights of the steps before, not from its data");
        else if (bad.n > 0)
            text += concat("The loss is not finite for ", bad.n, " of its ", o.batch, " sequences, first for ",
                           where(bad.first));
        else
            text += concat("The losses of its sequences, ", first, " to ", first + o.batch - 1,
                           " of the run, are finite, the first is ", where(first),
                           ": the gradients overflowed in the backward");
    }
    const std::string change =
        concat("with a smaller --lr (at this step it was ", format("%.3g", learning_rate(o.schedule, step)),
               "), a longer --warmup, ", o.clip > 0 ? "a smaller --clip" : "--clip 1",
               ", or with other data or another --seed");
    if (o.checkpoint.empty()) return concat(text, ". Nothing was saved yet: start again ", change);
    return concat(text,
                  ". The last checkpoint is from before this step, but --resume would meet the same numbers and stop "
                  "at this step again: start a new run from its weights, --init ",
                  o.checkpoint, " --out OTHER, ", change);
}
