// The learning rate over the steps of a run.      (cosine: arXiv:1608.03983; warmup-stable-decay: arXiv:2404.06395)
//
//   peak        ______            warmup   the first updates are made with poor moment estimates and steep gradients:
//              /      \                    they get small steps
//             /        \          stable   far from the minimum, long steps make progress
//   floor    /          \__       decay    near it, the step length is what keeps the loss from settling
//           0  warmup  steps
//
// Everything is a pure function of the step in double: a resumed run needs no state from here.
#include "optim/optim.h"

#include <algorithm>
#include <cmath>
#include <numbers>

void check_schedule(const Schedule& s) {
    const bool known = s.name == "constant" || s.name == "linear" || s.name == "cosine" || s.name == "wsd";
    check(known, "unknown schedule '", s.name, "': use constant, linear, cosine or wsd");
    // Written so that a NaN fails, too.
    check(s.peak >= 0 && std::isfinite(s.peak), "the learning rate is ", s.peak, ": it must be a number >= 0");
    check(s.min_ratio >= 0 && s.min_ratio <= 1, "the schedule's final ratio is ", s.min_ratio,
          ": it must be from 0 to 1");
    check(s.decay_fraction >= 0 && s.decay_fraction <= 1, "the schedule's decay fraction is ", s.decay_fraction,
          ": it must be from 0 to 1");
    check(s.steps >= 1, "a schedule of ", s.steps, " steps: it must have at least 1");
    check(s.warmup >= 0 && s.warmup <= s.steps, "warmup of ", s.warmup, " steps: it must be from 0 to the ", s.steps,
          " steps of the run");
}

double learning_rate(const Schedule& schedule, int64_t step) {
    check_schedule(schedule);
    check(step >= 1, "learning_rate: step ", step, ": steps count from 1");
    const double floor = schedule.peak * schedule.min_ratio;
    const double warmup = static_cast<double>(schedule.warmup), steps = static_cast<double>(schedule.steps);
    const double s = std::min(static_cast<double>(step), steps);  // beyond the end: as in the last step
    if (s <= warmup) return schedule.peak * s / warmup;           // never divides by 0: s is at least 1

    // The fraction of the descent from peak to floor that is complete at s, for a descent that starts after step
    // `start` and ends at `steps`. It never divides by 0: where s > start, steps > start.
    const auto done = [&](double start) { return s <= start ? 0.0 : (s - start) / (steps - start); };
    double descent = 0;
    if (schedule.name == "linear") descent = done(warmup);
    if (schedule.name == "cosine") descent = (1 - std::cos(std::numbers::pi * done(warmup))) / 2;
    if (schedule.name == "wsd") descent = done(std::max(warmup, steps * (1 - schedule.decay_fraction)));
    return schedule.peak * (1 - descent) + floor * descent;  // exactly peak at 0, exactly floor at 1
}
