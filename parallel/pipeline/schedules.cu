// schedules.cu: the schedules by name, and those that compute the whole backward at once: naive, GPipe, 1F1B and
// interleaved 1F1B.
//
// p = 3, m = 4; digits are forwards, letters backwards, which take twice the time:
//
//     gpipe   0123      AABBCCDD            1f1b   012    AA3BB CC DD
//              0123   AABBCCDD                      01  AA2BB3CC DD
//               0123AABBCCDD                         0AA1BB2CC3DD
//
// Both wait for (p - 1) (F + B), where B is the whole backward, in m (F + B) + that: a bubble of (p - 1) / (m + p - 1).
// But what a forward saves is kept for m micro-batches by GPipe, and for p - s by stage s of 1F1B, because it computes
// a backward as soon as there is one.
#include "core/names.h"
#include "parallel/pipeline/pipeline.h"

#include <algorithm>

PipelineSchedule empty_schedule(const ScheduleOptions& o, Placement placement, int n_stages) {
    PipelineSchedule s;
    s.name = o.name, s.p = o.p, s.m = o.m, s.placement = placement, s.n_stages = n_stages;
    s.versions.assign(static_cast<size_t>(o.p), 1);
    s.ranks.resize(static_cast<size_t>(o.p));
    return s;
}

PipelineSchedule naive(const ScheduleOptions& o) {
    PipelineSchedule s = empty_schedule(o, Placement::loop, o.p);
    for (int stage = 0; stage < o.p; ++stage)
        for (int micro = 0; micro < o.m; ++micro)
            for (const Do what : {Do::forward, Do::backward})
                s.ranks[static_cast<size_t>(stage)].push_back({what, micro, stage});
    return s;
}

PipelineSchedule gpipe(const ScheduleOptions& o) {
    PipelineSchedule s = empty_schedule(o, Placement::loop, o.p);
    for (int stage = 0; stage < o.p; ++stage)
        for (const Do what : {Do::forward, Do::backward})
            for (int micro = 0; micro < o.m; ++micro)
                s.ranks[static_cast<size_t>(stage)].push_back({what, micro, stage});
    return s;
}

// Stage s begins with p - s forwards: while the first micro-batch goes down to the last stage and its gradient comes
// back. Then a backward makes room for the next forward.
PipelineSchedule one_f_one_b(const ScheduleOptions& o) {
    PipelineSchedule s = empty_schedule(o, Placement::loop, o.p);
    for (int stage = 0; stage < o.p; ++stage) {
        std::vector<Action>& actions = s.ranks[static_cast<size_t>(stage)];
        const int warmup = std::min(o.p - stage, o.m);
        for (int micro = 0; micro < warmup; ++micro) actions.push_back({Do::forward, micro, stage});
        for (int micro = 0; micro < o.m; ++micro) {
            actions.push_back({Do::backward, micro, stage});
            if (micro + warmup < o.m) actions.push_back({Do::forward, micro + warmup, stage});
        }
    }
    return s;
}

// v stages a rank. The micro-batches go in groups of p, or of up to 2 p - 1 where p does not divide m: a group's
// forwards through all stages of a rank, then the next group's; its backwards through the stages in the other order. A
// forward has 1 / v of the layers, so the ranks wait for (p - 1) (F + B) / v: a bubble of (p - 1) / (v m + p - 1).
// Rank r begins with as many forwards as a group's v - 1 first stages have, one more, and two for each rank after it
// (one goes down while another comes back): (v - 1) p + 2 (p - r) - 1, where p divides m.
PipelineSchedule interleaved(const ScheduleOptions& o) {
    check(o.chunks >= 1, "pipeline schedule interleaved: ", o.chunks, " chunks; 1 or more");
    PipelineSchedule s = empty_schedule(o, Placement::loop, o.chunks * o.p);
    const int groups = std::max(1, o.m / o.p), largest = (o.m + groups - 1) / groups;
    for (int rank = 0; rank < o.p; ++rank) {
        std::vector<Action> forwards, backwards, &actions = s.ranks[static_cast<size_t>(rank)];
        for (int group = 0, first = 0; group < groups; ++group) {
            const int n = o.m / groups + (group < o.m % groups ? 1 : 0);  // the larger groups first
            for (int chunk = 0; chunk < o.chunks; ++chunk)
                for (int micro = first; micro < first + n; ++micro) {
                    forwards.push_back({Do::forward, micro, chunk * o.p + rank});
                    backwards.push_back({Do::backward, micro, (o.chunks - 1 - chunk) * o.p + rank});
                }
            first += n;
        }
        const auto warmup =
            std::min(forwards.size(), static_cast<size_t>((o.chunks - 1) * largest + 2 * (o.p - rank) - 1));
        actions.assign(forwards.begin(), forwards.begin() + static_cast<std::ptrdiff_t>(warmup));
        for (size_t i = 0; i < backwards.size(); ++i) {
            actions.push_back(backwards[i]);
            if (i + warmup < forwards.size()) actions.push_back(forwards[i + warmup]);
        }
    }
    return s;
}

// Forwards in the order of a timetable in which each takes 1 and no rank has two at a time. With loop p micro-batches
// after each other go through all stages, then the next p. With vee and both_ways a micro-batch begins at every second
// time; the times of the two stages of a rank differ by an odd number, so that they take turns.
PipelineSchedule forward_schedule(const PipelineSchedule& like, int m) {
    check(m >= 1, "forwards of ", m, " micro-batches: 1 or more");
    ScheduleOptions o;
    o.name = like.name, o.p = like.p, o.m = m;
    PipelineSchedule s = empty_schedule(o, like.placement, like.n_stages);
    s.forward_only = true;
    const auto start = [&](int micro, int stage) {
        if (s.placement == Placement::loop) return micro / s.p * s.n_stages + micro % s.p + stage;
        const int first = s.placement == Placement::both_ways && s.rank_of(0, micro) != 0 ? (m + 1) / 2 : 0;
        return 2 * (micro - first) + stage;
    };
    for (int rank = 0; rank < s.p; ++rank) {
        std::vector<Action>& actions = s.ranks[static_cast<size_t>(rank)];
        for (int stage = 0; stage < s.n_stages; ++stage)
            for (int micro = 0; micro < m; ++micro)
                if (s.rank_of(stage, micro) == rank) actions.push_back({Do::forward, micro, stage});
        std::ranges::stable_sort(actions, {}, [&](const Action& a) { return start(a.micro, a.stage); });
    }
    add_messages(s);
    check_schedule(s);
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// By name

namespace {

struct Entry {
    const char* name;
    PipelineSchedule (*make)(const ScheduleOptions& options);
    int stages_per_rank = 1;  // kChunks: as ScheduleOptions says
    bool asynchronous = false;
};
constexpr int kChunks = 0;
constexpr Entry kSchedules[] = {{"naive", naive},
                                {"gpipe", gpipe},
                                {"1f1b", one_f_one_b},
                                {"interleaved", interleaved, kChunks},
                                {"zb-h1", zero_bubble_h1},
                                {"zb-h2", zero_bubble_h2},
                                {"zb-v", zero_bubble_v, 2},
                                {"dualpipe", dual_pipe},
                                {"dualpipe-v", dual_pipe_v, 2},
                                {"auto", auto_schedule},
                                {"pipedream", pipedream, 1, true},
                                {"2bw", pipedream_2bw, 1, true}};

const Entry& entry(const std::string& name) { return find_named(kSchedules, "--pipeline", name); }

}  // namespace

const std::vector<std::string>& schedule_names_of_pipelines() {
    static const std::vector<std::string> names = names_of(kSchedules);
    return names;
}

int64_t stages_per_rank(const ScheduleOptions& options) {
    const int stages = entry(options.name).stages_per_rank;
    return stages == kChunks ? options.chunks : stages;
}

bool is_asynchronous_pipeline(const std::string& name) {
    const auto is_it = [&](const Entry& its) { return name == its.name && its.asynchronous; };
    return std::ranges::any_of(kSchedules, is_it);
}

PipelineSchedule make_schedule(const ScheduleOptions& o) {
    const Entry& its = entry(o.name);
    check(o.p >= 1, "a pipeline of ", o.p, " ranks: 1 or more");
    check(o.m >= 1, "a pipeline with ", o.m, " micro-batches: 1 or more");
    const int64_t pairs = std::max<int64_t>(2, stages_per_rank(o)) * o.p * o.m;
    check(pairs <= kMostPairs, "a pipeline of ", o.p, " ranks with ", o.m, " micro-batches: its table could have ",
          pairs, " forwards; at most ", kMostPairs);
    PipelineSchedule schedule = its.make(o);
    add_messages(schedule);
    check_schedule(schedule);
    return schedule;
}
