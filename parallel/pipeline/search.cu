// search.cu: a schedule for given durations ("auto"): the search of the zero-bubble paper (Qi et al. 2023, section
// 3.1), in our form. One stage per rank; forwards, gradients by input and by weight apart; at most max_alive
// micro-batches alive.
//
// A table is made in the order of time. A rank that is free takes
//
//     the next backward (B) or the next forward (F), if it is there and memory allows it
//     otherwise the next gradient by weight (W), if that fits into the time before the next B or F comes
//     otherwise nothing: it waits
//
// What that leaves open are the rules below. Which of them are good depends on the durations, so all combinations are
// tried, beside the tables of the other files that have one stage per rank and no updates, and the one that takes least
// time is taken.
#include "parallel/pipeline/pipeline.h"

#include <algorithm>
#include <limits>

namespace {

constexpr double kUnknown = std::numeric_limits<double>::infinity();

enum class Warmup { like_1f1b, like_zb_h2, by_memory };

struct Rules {
    Warmup warmup = Warmup::like_1f1b;  // forwards before the first B: p - s, 2 (p - s) - 1, or what memory allows
    bool backward_first = true;         // where both are there; otherwise F and B by turns
    double late = 0;                    // a W may hold up what comes next by this part of its duration
};

class Search {
  public:
    Search(const ScheduleOptions& o, int max_alive, const Rules& rules) : o_(o), max_alive_(max_alive), rules_(rules) {
        ranks_.resize(static_cast<size_t>(o.p));
        for (Rank& rank : ranks_) {
            rank.forward_is_there.assign(static_cast<size_t>(o.m), kUnknown);
            rank.backward_is_there.assign(static_cast<size_t>(o.m), kUnknown);
        }
        ranks_[0].forward_is_there.assign(static_cast<size_t>(o.m), 0);
    }

    PipelineSchedule run() {
        PipelineSchedule s = empty_schedule(o_, Placement::loop, o_.p);
        s.splits_backward = true;
        for (double now = 0; now < kUnknown;) {
            // Ranks that send to each other may each make the other go on at this moment.
            for (bool changes = true; changes;) {
                changes = false;
                for (int stage = 0; stage < o_.p; ++stage)
                    if (ranks_[static_cast<size_t>(stage)].free <= now) changes = decide(stage, now) || changes;
            }
            double next = kUnknown;
            for (const Rank& rank : ranks_)
                for (const double time : {rank.free, next_forward(rank), next_backward(rank)})
                    if (time > now) next = std::min(next, time);
            now = next;
        }
        for (size_t stage = 0; stage < ranks_.size(); ++stage) s.ranks[stage] = std::move(ranks_[stage].actions);
        return s;
    }

  private:
    struct Rank {
        double free = 0;  // when its last action ends
        int forwards = 0, backwards = 0, weights = 0;
        std::vector<double> forward_is_there, backward_is_there;  // by micro-batch: when what it waits for has come
        std::vector<Action> actions;
    };

    double next_forward(const Rank& r) const {
        return r.forwards < o_.m ? r.forward_is_there[static_cast<size_t>(r.forwards)] : kUnknown;
    }
    double next_backward(const Rank& r) const {
        return r.backwards < o_.m ? r.backward_is_there[static_cast<size_t>(r.backwards)] : kUnknown;
    }
    bool may_begin_forward(int stage, const Rank& r) const {
        const int behind = o_.p - stage;
        const int warmup = rules_.warmup == Warmup::like_1f1b    ? behind
                           : rules_.warmup == Warmup::like_zb_h2 ? 2 * behind - 1
                                                                 : o_.m;
        return r.forwards - r.weights < max_alive_ && r.forwards - r.backwards < warmup;
    }

    // True: it begins something.
    bool decide(int stage, double now) {
        const Rank& r = ranks_[static_cast<size_t>(stage)];
        const double backward = next_backward(r), forward = may_begin_forward(stage, r) ? next_forward(r) : kUnknown;
        const bool can_forward = forward <= now, can_backward = backward <= now;
        const bool after_backward = !r.actions.empty() && r.actions.back().what != Do::forward;
        if (can_backward && (rules_.backward_first || !after_backward || !can_forward))
            return begin(stage, Do::backward_input, now);
        if (can_forward) return begin(stage, Do::forward, now);
        const double comes = std::min(backward, forward);
        if (r.weights < r.backwards && now + (1 - rules_.late) * o_.times.of(stage).backward_weight <= comes)
            return begin(stage, Do::backward_weight, now);
        return false;
    }

    bool begin(int stage, Do what, double now) {
        Rank& r = ranks_[static_cast<size_t>(stage)];
        int& n = what == Do::forward ? r.forwards : what == Do::backward_input ? r.backwards : r.weights;
        const auto micro = static_cast<size_t>(n);
        const Action action{what, n++, stage};
        r.actions.push_back(action);
        r.free = now + o_.times.of(action);
        const double comes = r.free + o_.times.message;
        if (what == Do::forward && stage + 1 < o_.p)
            ranks_[static_cast<size_t>(stage) + 1].forward_is_there[micro] = comes;
        if (what == Do::forward && stage + 1 == o_.p) r.backward_is_there[micro] = r.free;
        if (what == Do::backward_input && stage > 0)
            ranks_[static_cast<size_t>(stage) - 1].backward_is_there[micro] = comes;
        return true;
    }

    const ScheduleOptions& o_;
    const int max_alive_;
    const Rules& rules_;
    std::vector<Rank> ranks_;
};

std::vector<Rules> all_rules() {
    std::vector<Rules> all;
    for (const Warmup warmup : {Warmup::like_1f1b, Warmup::like_zb_h2, Warmup::by_memory})
        for (const bool backward_first : {true, false})
            for (const double late : {0.0, 0.5, 1.0}) all.push_back({warmup, backward_first, late});
    return all;
}

}  // namespace

PipelineSchedule auto_schedule(const ScheduleOptions& o) {
    check(o.max_alive >= 0, "pipeline schedule auto with ", o.max_alive,
          " micro-batches alive at most: 1 or more; 0: as 1f1b");
    const int max_alive = o.max_alive > 0 ? o.max_alive : std::min(o.p, o.m);
    PipelineSchedule best;
    double time = kUnknown;
    const auto consider = [&](PipelineSchedule s) {
        for (int rank = 0; rank < o.p; ++rank)
            if (alive(s, rank).in_all > max_alive) return;
        double longest = 0;
        for (const std::vector<Span>& spans : simulate(s, o.times).ranks)
            longest = std::max(longest, spans.back().end - spans.front().start);
        if (longest < time) time = longest, best = std::move(s);
    };
    for (const auto by_hand : {naive, gpipe, one_f_one_b, zero_bubble_h1, zero_bubble_h2}) consider(by_hand(o));
    for (const Rules& rules : all_rules()) consider(Search(o, max_alive, rules).run());
    return best;
}
