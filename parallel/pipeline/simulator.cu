// simulator.cu: when everything in a table happens, for given durations.
//
//     start = max(end of the action before it on its rank,
//                 when what it waits for on another rank was sent + time of a message)
//     end   = start + duration
//
// A result is sent when the actions before its send have been done; in a table without messages, when it has been
// computed. Messages take no time of a rank: they travel during the computing.
#include "parallel/pipeline/pipeline.h"

#include <algorithm>
#include <array>
#include <cmath>

double Times::of(const Action& action) const {
    const StageTimes& t = of(action.stage);
    switch (action.what) {
        case Do::forward: return t.forward;
        case Do::backward: return t.backward_input + t.backward_weight;
        case Do::backward_input: return t.backward_input;
        case Do::backward_weight: return t.backward_weight;
        case Do::update: return update;
        default: return 0;
    }
}

namespace {

using Place = std::pair<int, size_t>;  // a rank, and a place in its list of spans
constexpr Place kNowhere{-1, 0};

class Simulator {
  public:
    Simulator(const PipelineSchedule& schedule, const Times& times) : s_(schedule), times_(times) {
        const auto n = static_cast<size_t>(s_.p);
        result_.ranks.resize(n), waited_for_.resize(n);
        for (auto* lists : {&done_, &sent_})
            for (auto& of_kind : *lists) of_kind.assign(static_cast<size_t>(s_.n_stages * s_.m), kNowhere);
        has_messages_ = std::ranges::any_of(
            s_.ranks, [](const auto& actions) { return std::ranges::any_of(actions, sends, &Action::what); });
    }

    Simulation run() {
        std::vector<size_t> next(static_cast<size_t>(s_.p), 0);
        for (bool moves = true; moves;) {
            moves = false;
            for (int rank = 0; rank < s_.p; ++rank) {
                const std::vector<Action>& actions = s_.ranks[static_cast<size_t>(rank)];
                for (size_t& i = next[static_cast<size_t>(rank)]; i < actions.size() && add(rank, actions[i]); ++i)
                    moves = true;
            }
        }
        for (size_t rank = 0; rank < next.size(); ++rank)
            check(next[rank] == s_.ranks[rank].size(), "schedule ", s_.name, ": rank ", rank,
                  " waits for ever at action ", next[rank]);
        result_.bubble = bubble_of(result_.ranks);
        find_critical_path();
        return std::move(result_);
    }

  private:
    using Places = std::array<std::vector<Place>, 2>;  // of forwards, of backwards, by (stage, micro-batch)
    Place& place(Places& places, bool forward, int stage, int micro) {
        return places[forward ? 0 : 1][static_cast<size_t>(stage * s_.m + micro)];
    }
    const Span& span(const Place& at) const { return result_.ranks[static_cast<size_t>(at.first)][at.second]; }

    // False where what the action waits for has not been done.
    bool add(int rank, const Action& a) {
        std::vector<Span>& spans = result_.ranks[static_cast<size_t>(rank)];
        if (sends(a.what)) place(sent_, a.what == Do::send_activation, a.stage, a.micro) = {rank, spans.size() - 1};
        if (sends(a.what) || receives(a.what)) return true;
        Place cause = spans.empty() ? kNowhere : Place{rank, spans.size() - 1};
        double start = spans.empty() ? 0 : spans.back().end;
        const bool forward = a.what == Do::forward, by_input = is_input_gradient(a.what);
        const int before = forward ? a.stage - 1 : a.stage + 1;
        if ((forward || by_input) && before >= 0 && before < s_.n_stages) {
            const bool here = s_.rank_of(before, a.micro) == rank;
            const Place at = place(here || !has_messages_ ? done_ : sent_, forward, before, a.micro);
            if (at == kNowhere) return false;
            const double there = span(at).end + (here ? 0 : times_.message);
            if (there > start) start = there, cause = at;
        }
        spans.push_back({a, start, start + times_.of(a)});
        waited_for_[static_cast<size_t>(rank)].push_back(cause);
        if (forward || by_input) place(done_, forward, a.stage, a.micro) = {rank, spans.size() - 1};
        return true;
    }

    void find_critical_path() {
        Place at = kNowhere;
        for (int rank = 0; rank < s_.p; ++rank) {
            const std::vector<Span>& spans = result_.ranks[static_cast<size_t>(rank)];
            if (spans.empty() || (at != kNowhere && spans.back().end <= result_.end)) continue;
            at = {rank, spans.size() - 1};
            result_.end = spans.back().end;
        }
        for (; at != kNowhere; at = waited_for_[static_cast<size_t>(at.first)][at.second])
            result_.critical_path.push_back(at);
        std::ranges::reverse(result_.critical_path);
    }

    const PipelineSchedule& s_;
    const Times& times_;
    Simulation result_;
    std::vector<std::vector<Place>> waited_for_;  // as result_.ranks: whose end a span's start is
    Places done_, sent_;                          // the last action before that moment
    bool has_messages_ = false;
};

}  // namespace

Simulation simulate(const PipelineSchedule& schedule, const Times& times) {
    const size_t n = times.stages.size();
    check(n == 1 || n == static_cast<size_t>(schedule.n_stages), "times of ", n, " stages for a schedule of ",
          schedule.n_stages, ": one for all, or one for each");
    for (const StageTimes& t : times.stages) {
        const auto is_time = [](double time) { return time >= 0 && std::isfinite(time); };
        check(is_time(t.forward) && is_time(t.backward_input) && is_time(t.backward_weight) && is_time(times.message),
              "times of a stage ", t.forward, ", ", t.backward_input, ", ", t.backward_weight, " and of a message ",
              times.message, ": they are 0 or more");
    }
    return Simulator(schedule, times).run();
}

double bubble_of(const std::vector<std::vector<Span>>& ranks) {
    double busy = 0, longest = 0;
    for (const std::vector<Span>& spans : ranks) {
        if (spans.empty()) continue;
        longest = std::max(longest, spans.back().end - spans.front().start);
        for (const Span& span : spans) busy += span.end - span.start;
    }
    if (longest == 0) return 0;
    return std::max(0.0, 1 - busy / (static_cast<double>(ranks.size()) * longest));  // rounding may go below 0
}
