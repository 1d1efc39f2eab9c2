// dual_pipe.cu: DualPipe and DualPipeV (DeepSeek-V3, arXiv:2412.19437; github.com/deepseek-ai/DualPipe).
//
// Every rank has two stages, and in the middle of the table it computes by turns a forward of one beside a backward of
// the other: while a message of the one travels, the other computes. There are two placements with one order:
//
//     dualpipe     half of the micro-batches go down the ranks, the other half up: each stage is on two ranks, with
//                  half of the micro-batches each, and the gradients of both are added. Rank r and rank p - 1 - r do
//                  the same.
//     dualpipe-v   the lower half of that alone ("cut in half"): a micro-batch that comes to the last rank turns there.
//
//     rank h of H on the way from the outside (h = 0) to the turn, or to the middle (h = H - 1); C micro-batches each
//     way; 0 is the stage on the way in, 1 that on the way out:
//
//     1.  2 (H - h - 1) times    F0
//     2.  h + 1                  F0 F1
//     3.  H - h - 1              B1 W1 F1                    a gradient is wanted outside: by input first
//     4.  C - 2 H + h + 1        F0 BW1 F1 BW0               the main part
//     5.  H - h - 1              BW1 F1 BW0
//     6.  h + 1                  BW1 BW0, from the half on   B1 B0
//     7.  H - h - 1              W B0                        the weights' gradients that were put off fill the waiting
//     8.  h + 1                  W
#include "parallel/pipeline/pipeline.h"

#include <algorithm>
#include <deque>

namespace {

// stage and first[way]: the rank's stages, and the first micro-batch there; n: micro-batches a way. A table for fewer
// than 2 H micro-batches a way is that for 2 H without the others.
std::vector<Action> two_ways(int h, int H, int n, const int (&stage)[2], const int (&first)[2]) {
    std::vector<Action> actions;
    std::deque<Action> put_off;
    int forwards[2] = {}, backwards[2] = {};
    const auto add = [&](Do what, int way, int i) {
        if (i < n) actions.push_back({what, first[way] + i, stage[way]});
    };
    const auto F = [&](int way) { add(Do::forward, way, forwards[way]++); };
    const auto BW = [&](int way) { add(Do::backward, way, backwards[way]++); };
    const auto B = [&](int way) {
        const int i = backwards[way]++;
        add(Do::backward_input, way, i);
        put_off.push_back({Do::backward_weight, i, way});
    };
    const auto W = [&] {
        add(Do::backward_weight, put_off.front().stage, put_off.front().micro);
        put_off.pop_front();
    };
    const int outside = H - h - 1, inside = h + 1;
    for (int i = 0; i < 2 * outside; ++i) F(0);
    for (int i = 0; i < inside; ++i) F(0), F(1);
    for (int i = 0; i < outside; ++i) B(1), W(), F(1);
    for (int i = 0; i < std::max(n, 2 * H) - 2 * H + inside; ++i) F(0), BW(1), F(1), BW(0);
    for (int i = 0; i < outside; ++i) BW(1), F(1), BW(0);
    for (int i = 0; i < 2 * inside; ++i) i < inside ? BW(1 - i % 2) : B(1 - i % 2);
    for (int i = 0; i < outside; ++i) W(), B(0);
    for (int i = 0; i < inside; ++i) W();
    return actions;
}

}  // namespace

PipelineSchedule dual_pipe(const ScheduleOptions& o) {
    check(o.p % 2 == 0, "pipeline schedule dualpipe on ", o.p,
          " ranks: it needs an even number (dualpipe-v takes any)");
    check(o.m % 2 == 0, "pipeline schedule dualpipe with ", o.m,
          " micro-batches: half of them go each way, so it needs an even number (dualpipe-v takes any)");
    PipelineSchedule s = empty_schedule(o, Placement::both_ways, o.p);
    s.splits_backward = true;
    for (int rank = 0; rank < o.p; ++rank) {
        const int other = o.p - 1 - rank, h = std::min(rank, other);
        const bool lower = rank < other;  // its way in is that of the first half of the micro-batches
        s.ranks[static_cast<size_t>(rank)] =
            two_ways(h, o.p / 2, o.m / 2, {h, o.p - 1 - h}, {lower ? 0 : o.m / 2, lower ? o.m / 2 : 0});
    }
    return s;
}

PipelineSchedule dual_pipe_v(const ScheduleOptions& o) {
    PipelineSchedule s = empty_schedule(o, Placement::vee, 2 * o.p);
    s.splits_backward = true;
    for (int rank = 0; rank < o.p; ++rank)
        s.ranks[static_cast<size_t>(rank)] = two_ways(rank, o.p, o.m, {rank, 2 * o.p - 1 - rank}, {0, 0});
    return s;
}
