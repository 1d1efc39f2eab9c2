// zero_bubble.cu: zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241).
//
// A backward is two products for each matrix: the gradient with respect to the input (B), for which the stage before
// waits, and that with respect to the weight (W), for which nobody waits before the update. So B goes first, and W
// fills the time in which a rank would wait.
//
// p = 3, m = 5, F = B = W: digits are forwards, letters B, and W is a W:
//
//     zb-h1   012  AW3BW4CWDWEW             zb-h2   01234AWBWCWDWEW
//              01 A2BW3CW4DWEWW                      012A3B4CWDWEWWW
//               0A1B2CW3DW4EWWW                       0A1B2C3D4EWWWWW
//
// zb-h1 keeps at most p micro-batches alive, as 1F1B does, and waits for (p - 1) F: a bubble of
// (p - 1) / (3 m + p - 1). zb-h2 begins with enough forwards for the first stage to compute until its first gradient
// has come back: 2 p - 1 alive, no bubble where m >= 2 p - 1. zb-v has no bubble with the memory of 1F1B: a
// stage on the way down and one on the way back on each rank, the first backwards on the rank that had the first
// forwards.
#include "parallel/pipeline/pipeline.h"

#include <algorithm>

namespace {

// Stage s begins with warmup(s) forwards. Then B, W, F by turns: the W of the micro-batch lag(s) before that of B.
template <typename Count>
PipelineSchedule one_way(const ScheduleOptions& o, const Count& warmup_of, const Count& lag_of) {
    PipelineSchedule s = empty_schedule(o, Placement::loop, o.p);
    s.splits_backward = true;
    for (int stage = 0; stage < o.p; ++stage) {
        std::vector<Action>& actions = s.ranks[static_cast<size_t>(stage)];
        const int warmup = std::min(warmup_of(stage), o.m), lag = std::min(lag_of(stage), o.m);
        for (int micro = 0; micro < warmup; ++micro) actions.push_back({Do::forward, micro, stage});
        for (int micro = 0; micro < o.m; ++micro) {
            actions.push_back({Do::backward_input, micro, stage});
            if (micro >= lag) actions.push_back({Do::backward_weight, micro - lag, stage});
            if (micro + warmup < o.m) actions.push_back({Do::forward, micro + warmup, stage});
        }
        for (int micro = o.m - lag; micro < o.m; ++micro) actions.push_back({Do::backward_weight, micro, stage});
    }
    return s;
}

}  // namespace

PipelineSchedule zero_bubble_h1(const ScheduleOptions& o) {
    const std::function<int(int)> warmup = [&](int s) { return o.p - s; }, lag = [](int s) { return s; };
    return one_way(o, warmup, lag);
}

PipelineSchedule zero_bubble_h2(const ScheduleOptions& o) {
    const std::function<int(int)> warmup = [&](int s) { return 2 * (o.p - s) - 1; }, lag = [](int s) { return 2 * s; };
    return one_way(o, warmup, lag);
}

// Rank r of p, n micro-batches; 0 is the stage on the way down, 1 that on the way back:
//
//     1.  2 (p - r) - 1 times    F0                    until the first micro-batch has turned and comes back
//     2.  r                      F1 F0
//     3.  p - r                  F1 B1 W1              the first backwards
//     4.  n - p                  F0 B0 W0 F1 B1 W1     the main part, without F0 when all of them are done
//     5.  r                      B0 B1                 other ranks wait for these: by input first
//     6.  p - r                  B0 W0
//     7.  r                      W1, and then r W0     the gradients by weight that were put off
//
// A table for fewer than 2 p - 1 micro-batches is that for 2 p - 1 without the others.
PipelineSchedule zero_bubble_v(const ScheduleOptions& o) {
    PipelineSchedule s = empty_schedule(o, Placement::vee, 2 * o.p);
    s.splits_backward = true;
    for (int rank = 0; rank < o.p; ++rank) {
        std::vector<Action>& actions = s.ranks[static_cast<size_t>(rank)];
        int done[3][2] = {};  // micro-batches: by F, B, W, and by way
        const auto add = [&](Do what, int kind, int way) {
            const int micro = done[kind][way]++;
            if (micro < o.m) actions.push_back({what, micro, way == 0 ? rank : 2 * o.p - 1 - rank});
        };
        const auto F = [&](int way) { add(Do::forward, 0, way); };
        const auto B = [&](int way) { add(Do::backward_input, 1, way); };
        const auto W = [&](int way) { add(Do::backward_weight, 2, way); };
        const int n = std::max(o.m, 2 * o.p - 1), behind = o.p - rank;
        for (int i = 0; i < 2 * behind - 1; ++i) F(0);
        for (int i = 0; i < rank; ++i) F(1), F(0);
        for (int i = 0; i < behind; ++i) F(1), B(1), W(1);
        for (int i = 0; i < n - o.p; ++i) {
            if (done[0][0] < n) F(0);
            B(0), W(0), F(1), B(1), W(1);
        }
        for (int i = 0; i < rank; ++i) B(0), B(1);
        for (int i = 0; i < behind; ++i) B(0), W(0);
        for (int i = 0; i < rank; ++i) W(1);
        for (int i = 0; i < rank; ++i) W(0);
    }
    return s;
}
