// planning/pipeline_run.cu: what a run did beside what its schedule says: the spans of its actions out of a trace, the
// simulation with the times that they took, and the account.
#include "io/json.h"
#include "planning/planning.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <numeric>

namespace {

double mean(const std::vector<double>& numbers) {
    return numbers.empty() ? 0
                           : std::accumulate(numbers.begin(), numbers.end(), 0.0) / static_cast<double>(numbers.size());
}

void begin_at_zero(std::vector<std::vector<Span>>& ranks) {
    double first = INFINITY;
    for (const std::vector<Span>& spans : ranks)
        if (!spans.empty()) first = std::min(first, spans.front().start);
    for (std::vector<Span>& spans : ranks)
        for (Span& span : spans) span.start -= first, span.end -= first;
}

// How long a message takes, where its receiver has waited for it: the median.
double message_time(const std::vector<std::vector<Span>>& ranks) {
    std::map<std::string, double> ends;
    for (const std::vector<Span>& spans : ranks)
        for (const Span& span : spans) ends[action_text(span.action)] = span.end;
    std::vector<double> times;
    for (const std::vector<Span>& spans : ranks) {
        double free = 0;  // since when the rank waits: what it did itself is no later
        for (const Span& span : spans) {
            const Action& a = span.action;
            const bool waits = a.what == Do::forward || a.what == Do::backward || a.what == Do::backward_input;
            const int before = a.what == Do::forward ? a.stage - 1 : a.stage + 1;
            const auto from = ends.find(action_text({a.what, a.micro, before}));
            if (waits && from != ends.end() && from->second > free) times.push_back(span.start - from->second);
            free = span.end;
        }
    }
    std::ranges::sort(times);
    return times.empty() ? 0 : std::max(0.0, times[times.size() / 2]);
}

// Of the simulation, the actions that were measured.
std::vector<std::vector<Span>> those_measured(const Simulation& simulation,
                                              const std::vector<std::vector<Span>>& measured) {
    std::vector<std::vector<Span>> predicted(measured.size());
    for (size_t rank = 0; rank < measured.size(); ++rank)
        for (const Span& span : simulation.ranks[rank])
            if (std::ranges::any_of(measured[rank], [&](const Span& m) { return m.action == span.action; }))
                predicted[rank].push_back(span);
    begin_at_zero(predicted);
    return predicted;
}

}  // namespace

std::vector<std::vector<Span>> traced_spans(const std::vector<TraceEvent>& events, const PipelineSchedule& s,
                                            const std::vector<int>& world_ranks) {
    check(world_ranks.size() == static_cast<size_t>(s.p), "the trace of a pipeline of ", s.p, " ranks, for ",
          world_ranks.size());
    std::vector<std::vector<Span>> ranks(world_ranks.size());
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
        std::map<std::string, Action> known;
        for (const Action& a : s.ranks[rank])
            if (computes(a.what) || a.what == Do::update) known[action_text(a)] = a;
        std::vector<const TraceEvent*> its;
        for (const TraceEvent& e : events)
            if (e.kind == TraceEvent::computing && e.rank == world_ranks[rank]) its.push_back(&e);
        std::ranges::stable_sort(its, {}, [](const TraceEvent* e) { return e->start; });
        bool inside = false;
        for (const TraceEvent* e : its) {
            const auto action = known.find(e->what);
            if (action != known.end()) {
                ranks[rank].push_back({action->second, e->start, e->end});
                inside = true;
            } else if (inside && e->start <= ranks[rank].back().end) {
                ranks[rank].back().end = e->end;  // a part of it: "forward of block 3"
            } else {
                inside = false;
            }
        }
    }
    begin_at_zero(ranks);
    return ranks;
}

Times measured_times(const PipelineSchedule& s, const std::vector<std::vector<Span>>& measured) {
    std::vector<std::map<Do, std::vector<double>>> of_stage(static_cast<size_t>(s.n_stages));
    std::vector<double> updates;
    for (const std::vector<Span>& spans : measured)
        for (const Span& span : spans) {
            if (!computes(span.action.what)) updates.push_back(span.end - span.start);
            else of_stage[static_cast<size_t>(span.action.stage)][span.action.what].push_back(span.end - span.start);
        }
    Times times;
    times.stages.clear();
    for (auto& durations : of_stage) {
        StageTimes t{mean(durations[Do::forward]), mean(durations[Do::backward_input]),
                     mean(durations[Do::backward_weight])};
        // The parts of a whole backward are not known: as those done apart or, where none are, all by input.
        if (durations[Do::backward_input].empty()) t.backward_input = mean(durations[Do::backward]);
        times.stages.push_back(t);
    }
    times.update = mean(updates);
    times.message = message_time(measured);
    return times;
}

ComparedPipeline compare_pipeline(const PipelineSchedule& schedule, const std::vector<std::vector<Span>>& measured) {
    ComparedPipeline both{schedule, measured_times(schedule, measured), {}, measured, {}};
    const Simulation simulation = simulate(schedule, both.times);
    both.predicted = those_measured(simulation, measured);
    bool complete = true;
    for (size_t rank = 0; rank < measured.size(); ++rank)
        complete = complete && both.predicted[rank].size() == simulation.ranks[rank].size();
    if (complete) both.critical_path = simulation.critical_path;
    return both;
}

void write_pipeline_picture(const std::string& folder, const ComparedPipeline& both) {
    const PipelineSchedule& s = both.schedule;
    const auto panel = [&](const char* what, const std::vector<std::vector<Span>>& ranks,
                           const std::vector<std::pair<int, size_t>>& path) {
        return PipelinePanel{
            .title = concat(s.name, ", ", s.p, " ranks, ", s.m, " micro-batches: ", what),
            .subtitle = concat(human_seconds(end_of(ranks)), ", ", panel_subtitle(s, bubble_of(ranks))),
            .schedule = &s,
            .ranks = &ranks,
            .critical_path = path,
            .seconds = true};
    };
    const std::vector<PipelinePanel> panels = {
        panel("predicted from the mean times of its actions", both.predicted, both.critical_path),
        panel("measured", both.measured, {})};
    write_pipeline_panels(folder + "/pipeline.png", panels);
    write_pipeline_trace(folder + "/pipeline.json", panels);
}

void note_traced_pipeline(Trainer& t, TracedPipeline& traced) {
    if (!t.pipeline) return;
    std::vector<int> world_ranks;
    for (const auto& row : gather_numbers(t.pipeline->ranks(), {t.world.rank}))
        world_ranks.push_back(static_cast<int>(row[0]));
    if (t.world.rank == 0) traced = {t.pipeline->schedule(), world_ranks, t.options.out};
}

void show_traced_pipeline(const TracedPipeline& pipeline, const std::vector<TraceEvent>& events) {
    if (pipeline.world_ranks.empty() || events.empty()) return;
    int64_t step = -1;  // the last one; of steps that ran at once, one is traced
    for (const TraceEvent& event : events) step = std::max(step, event.step);
    std::vector<TraceEvent> its;
    std::ranges::copy_if(events, std::back_inserter(its), [&](const TraceEvent& event) { return event.step == step; });
    const ComparedPipeline both =
        compare_pipeline(pipeline.schedule, traced_spans(its, pipeline.schedule, pipeline.world_ranks));
    const PipelineSchedule& s = both.schedule;
    std::printf("pipeline %s p %d m %d: bubble %.4f predicted, %.4f measured; %s predicted, %s measured\n",
                s.name.c_str(), s.p, s.m, bubble_of(both.predicted), bubble_of(both.measured),
                human_seconds(end_of(both.predicted)).c_str(), human_seconds(end_of(both.measured)).c_str());
    write_pipeline_picture(pipeline.folder, both);
    std::printf(
        "          step %lld as predicted and as measured: %s/pipeline.png, and pipeline.json for ui.perfetto.dev\n",
        static_cast<long long>(step), pipeline.folder.c_str());
}

void print_pipeline_traffic(const Trainer& t) {
    const PipelineTraffic mine = t.pipeline->measured();
    const auto measured = gather_numbers(t.pipeline->ranks(), {mine.activations, mine.messages, mine.bytes});
    if (t.world.rank != 0) return;
    std::printf("pipeline %-36s  activations in flight                  messages\n",
                t.pipeline->schedule().name.c_str());
    std::printf("  %4s %17s %15s %10s %6s %16s %14s\n", "rank", "bytes planned", "taken", "planned", "sent",
                "bytes planned", "sent");
    for (size_t rank = 0; rank < measured.size(); ++rank) {
        const PipelineTraffic planned = t.pipeline->planned(static_cast<int>(rank));
        std::printf("  %4zu %17lld %15lld %10lld %6lld %16lld %14lld\n", rank,
                    static_cast<long long>(planned.activations), static_cast<long long>(measured[rank][0]),
                    static_cast<long long>(planned.messages), static_cast<long long>(measured[rank][1]),
                    static_cast<long long>(planned.bytes), static_cast<long long>(measured[rank][2]));
    }
    if (validates_later(t.options))
        std::printf("  updates before the norm of all gradients was known: %lld were undone and made again\n",
                    static_cast<long long>(t.pipeline->updates_put_back()));
}
