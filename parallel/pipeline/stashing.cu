// stashing.cu: schedules that update the weights while other micro-batches are in flight. The pipeline is never empty,
// so there is no bubble but at the beginning and the end of the table; instead, gradients are those of older weights.
//
// Version k of a stage's weights is that after k updates; version 0 is there when the table begins. Both schedules
// compute in the order of 1F1B, with the update after the backward, and the backward of a micro-batch with the version
// of its forward ("weight stashing": otherwise it would not be the gradient of anything).
//
// PipeDream (Harlap et al. 2018, arXiv:1806.03377; Narayanan et al. 2019, SOSP): an update after each backward. In the
// forward of micro-batch t, stage s of p has the gradients of all but the p - s - 1 micro-batches before t:
//
//     W_s(t + 1) = W_s(t) - lr grad_s(W_0(t - p + 1), ..., W_s(t - p + 1 + s), ..., W_(p-1)(t))
//
// It keeps p - s versions. With vertical sync each stage uses the version that the micro-batch met at stage 0, the one
// that is oldest, and keeps p:
//
//     W(t + 1) = W(t) - lr grad(W(t - p + 1))
//
// PipeDream-2BW (Narayanan et al. 2020, arXiv:2006.09503): an update for the gradients of n >= p micro-batches (a
// batch), and two versions. Batch t computes with version t - 1, which is complete when its first micro-batch begins:
//
//     W(t + 1) = W(t) - lr grad(W(t - 1))
//
// In all of them a version before the first is version 0.
#include "parallel/pipeline/pipeline.h"

#include <algorithm>

namespace {

// The order of 1F1B, with an update after every n backwards. version_of(micro, newest): that of a forward.
template <typename VersionOf>
PipelineSchedule with_updates(const ScheduleOptions& o, int n, const VersionOf& version_of) {
    PipelineSchedule s = one_f_one_b(o);
    s.asynchronous = true;
    s.per_update = n;
    for (int stage = 0; stage < o.p; ++stage) {
        std::vector<Action> actions;
        std::vector<int> used(static_cast<size_t>(o.m));
        int newest = 0, kept = 1;
        for (Action a : s.ranks[static_cast<size_t>(stage)]) {
            int& version = used[static_cast<size_t>(a.micro)];
            if (a.what == Do::forward) version = std::max(0, version_of(a.micro, newest));
            a.version = version;
            kept = std::max(kept, newest - version + 1);
            actions.push_back(a);
            if (a.what == Do::backward && (a.micro + 1) % n == 0)
                actions.push_back({Do::update, a.micro, stage, ++newest});
        }
        s.ranks[static_cast<size_t>(stage)] = std::move(actions);
        s.versions[static_cast<size_t>(stage)] = kept;
    }
    return s;
}

}  // namespace

PipelineSchedule pipedream(const ScheduleOptions& o) {
    return with_updates(o, 1, [&](int micro, int newest) { return o.vertical_sync ? micro - o.p + 1 : newest; });
}

PipelineSchedule pipedream_2bw(const ScheduleOptions& o) {
    check(o.per_update >= o.p && o.m % o.per_update == 0, "pipeline schedule 2bw on ", o.p, " ranks, ", o.m,
          " micro-batches, ", o.per_update, " a step: a step has ", o.p,
          " micro-batches or more (one a rank), and the table whole steps");
    return with_updates(o, o.per_update, [&](int micro, int) { return micro / o.per_update - 1; });
}

std::vector<std::vector<int>> staleness(const PipelineSchedule& s) {
    std::vector<std::vector<int>> result(static_cast<size_t>(s.n_stages),
                                         std::vector<int>(static_cast<size_t>(s.m), 0));
    if (!s.asynchronous) return result;
    for (const std::vector<Action>& actions : s.ranks)
        for (const Action& a : actions)
            if (a.what == Do::backward)
                result[static_cast<size_t>(a.stage)][static_cast<size_t>(a.micro)] = a.micro / s.per_update - a.version;
    return result;
}
