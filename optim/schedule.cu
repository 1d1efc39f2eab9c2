// The learning rate over the steps of a run.      (cosine: arXiv:1608.03983; warmup-stable-decay: arXiv:2404.06395)
//
//   peak        ______            warmup   the first updates are made with poor moment estimates and steep gradients:
//              /      \                    they get small steps
//             /        \          stable   far from the minimum, long steps make progress
//            /          \__ floor decay    near it, the step length is what keeps the loss from settling
//           0  warmup  steps
//
// Everything is a pure function of the Schedule and the step, in double.
#include "core/names.h"
#include "optim/optim.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace {

// The fraction of a straight way from step `start` to the last step that is complete at step s. It never divides by 0:
// where s > start, steps > start.
double done(const Schedule& schedule, double s, double start) {
    return s <= start ? 0.0 : (s - start) / (static_cast<double>(schedule.steps) - start);
}

double constant(const Schedule&, double) { return 0; }
double linear(const Schedule& schedule, double s) { return done(schedule, s, static_cast<double>(schedule.warmup)); }
double cosine(const Schedule& schedule, double s) { return (1 - std::cos(std::numbers::pi * linear(schedule, s))) / 2; }
double wsd(const Schedule& schedule, double s) {
    const double decay_start = static_cast<double>(schedule.steps) * (1 - schedule.decay_fraction);
    return done(schedule, s, std::max(static_cast<double>(schedule.warmup), decay_start));
}

// descent: 0 where the rate is at its peak, 1 where it is at the floor, which is 0 for those that read no min_ratio;
// for warmup < s <= steps.
struct Entry {
    const char* name;
    double (*descent)(const Schedule& schedule, double s);
    bool is_stretched;  // for a run that is given other steps; otherwise it is as if the run had begun with them
    bool reads_min_ratio = true, reads_decay_fraction = false;
};
constexpr Entry kTable[] = {{"constant", constant, false, false},
                            {"linear", linear, true},
                            {"cosine", cosine, true},
                            {"wsd", wsd, false, true, true}};

const Entry& entry(const std::string& name) { return find_named(kTable, "--schedule", name); }

double position_of(const Schedule& s, int64_t step) {
    if (s.until == 0) return static_cast<double>(step);
    const double left = static_cast<double>(s.steps) - s.position;
    return s.position + static_cast<double>(step - s.from) * left / static_cast<double>(s.until - s.from);
}

}  // namespace

std::vector<std::string> schedule_names() { return names_of(kTable); }

bool is_stretched(const std::string& schedule) { return entry(schedule).is_stretched; }

std::vector<std::string> schedules_that_read(double Schedule::*field) {
    std::vector<std::string> names;
    for (const Entry& e : kTable)
        if (field == &Schedule::min_ratio ? e.reads_min_ratio : e.reads_decay_fraction) names.push_back(e.name);
    return names;
}

void check_schedule(const Schedule& s) {
    entry(s.name);
    // Written so that a NaN fails, too.
    check(s.peak >= 0 && std::isfinite(s.peak), "the learning rate is ", s.peak, ": it must be a number >= 0");
    check(s.min_ratio >= 0 && s.min_ratio <= 1, "the schedule's final ratio is ", s.min_ratio,
          ": it must be from 0 to 1");
    check(s.decay_fraction >= 0 && s.decay_fraction <= 1, "the schedule's decay fraction is ", s.decay_fraction,
          ": it must be from 0 to 1");
    check(s.steps >= 1, "a schedule of ", s.steps, " steps: it must have at least 1");
    check(s.warmup >= 0 && s.warmup <= s.steps, "warmup of ", s.warmup, " steps: it must be from 0 to the ", s.steps,
          " steps of the run: make it shorter, or the run longer");
}

double learning_rate(const Schedule& schedule, int64_t step) {
    check_schedule(schedule);
    check(step >= 1, "learning_rate: step ", step, ": steps count from 1");
    const Entry& its = entry(schedule.name);
    const double floor = its.reads_min_ratio ? schedule.peak * schedule.min_ratio : 0;
    const double warmup = static_cast<double>(schedule.warmup);
    // Beyond the end the rate is that of the last step.
    const double s = std::min(position_of(schedule, step), static_cast<double>(schedule.steps));
    if (warmup > 0 && s <= warmup) return schedule.peak * s / warmup;
    const double descent = its.descent(schedule, s);
    return schedule.peak * (1 - descent) + floor * descent;  // exactly peak at 0, exactly floor at 1
}

Schedule begin_schedule(Schedule s, int64_t step, int64_t until) {
    check(until > step, "a schedule from step ", step, " to step ", until, " has no steps");
    s.steps = until - step;
    s.from = step;
    s.until = until;
    s.position = 0;
    return s;
}

Schedule continue_schedule(Schedule s, int64_t step, int64_t until) {
    check(until > step, "a schedule cannot end at step ", until, ": the run has made ", step, " steps");
    if (!is_stretched(s.name)) {
        s.steps += until - s.last_step();
        if (s.until > 0) s.until = until;
        return s;
    }
    s.position = std::min(position_of(s, step), static_cast<double>(s.steps));
    s.from = step;
    s.until = until;
    return s;
}
