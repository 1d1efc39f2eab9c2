// pipeline_run.cu: what a run did beside what its schedule says: the spans of its actions out of a trace, the simulation
// with the times that they took, and the account.
#include "io/json.h"
#include "planning/planning.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

namespace {

double mean(const std::vector<double>& numbers) {
    return numbers.empty() ? 0
                           : std::accumulate(numbers.begin(), numbers.end(), 0.0) / static_cast<double>(numbers.size());
}

double first_start(const std::vector<std::vector<Span>>& ranks) {
    double first = 0;
    bool any = false;
    for (const std::vector<Span>& spans : ranks)
        for (const Span& span : spans) first = any ? std::min(first, span.start) : span.start, any = true;
    return first;
}

void begin_at_zero(std::vector<std::vector<Span>>& ranks) {
    const double first = first_start(ranks);
    for (std::vector<Span>& spans : ranks)
        for (Span& span : spans) span.start -= first, span.end -= first;
}

// How long a message takes, where its receiver has waited for it: the median.
double message_time(const PipelineSchedule& s, const std::vector<std::vector<Span>>& ranks) {
    std::map<std::string, std::pair<int, double>> ends;  // action -> rank, end
    for (int rank = 0; rank < s.p; ++rank)
        for (const Span& span : ranks[static_cast<size_t>(rank)]) ends[action_text(span.action)] = {rank, span.end};
    std::vector<double> times;
    for (int rank = 0; rank < s.p; ++rank) {
        double free = 0;  // since when the rank waits
        for (const Span& span : ranks[static_cast<size_t>(rank)]) {
            const Action& a = span.action;
            const bool waits = a.what == Do::forward || a.what == Do::backward || a.what == Do::backward_input;
            const int before = a.what == Do::forward ? a.stage - 1 : a.stage + 1;
            const auto from = ends.find(action_text({a.what, a.micro, before}));
            if (waits && from != ends.end() && from->second.first != rank && from->second.second > free)
                times.push_back(span.start - from->second.second);
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

double end_of(const std::vector<std::vector<Span>>& ranks) {
    double end = 0;
    for (const std::vector<Span>& spans : ranks)
        if (!spans.empty()) end = std::max(end, spans.back().end);
    return end;
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
        const double both =
            mean(durations[Do::backward]);  // its parts are not known: as those done apart, or all by input
        if (durations[Do::backward_input].empty()) t.backward_input = both - t.backward_weight;
        times.stages.push_back(t);
    }
    times.update = mean(updates);
    times.message = message_time(s, measured);
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

void print_pipeline_account(const ComparedPipeline& both, const std::vector<PipelineTraffic>& planned,
                            const std::vector<PipelineTraffic>& measured) {
    const PipelineSchedule& s = both.schedule;
    std::printf("pipeline %s p %d m %d: bubble %.4f predicted, %.4f measured; %s predicted, %s measured\n",
                s.name.c_str(), s.p, s.m, bubble_of(both.predicted), bubble_of(both.measured),
                human_seconds(end_of(both.predicted)).c_str(), human_seconds(end_of(both.measured)).c_str());
    std::printf(
        "          rank   bytes of activations: planned, taken    messages: planned, sent    their bytes: planned, "
        "sent\n");
    for (size_t rank = 0; rank < planned.size(); ++rank) {
        const PipelineTraffic &p = planned[rank], &m = measured[rank];
        std::printf("          %4zu %21lld %15lld %18lld %7lld %20lld %13lld\n", rank,
                    static_cast<long long>(p.activations), static_cast<long long>(m.activations),
                    static_cast<long long>(p.messages), static_cast<long long>(m.messages),
                    static_cast<long long>(p.bytes), static_cast<long long>(m.bytes));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The trace of a run

void note_pipeline(Trainer& t, PipelineFigures& figures) {
    if (!t.pipeline || t.options.ranks.trace.empty()) return;
    const Pipeline::Kept kept = t.pipeline->kept();
    const std::vector<std::vector<int64_t>> all = gather_numbers(t.world, {kept.planned, kept.taken});
    if (t.world.rank != 0) return;
    for (const auto& row : all) figures.kept.push_back({row[0], row[1]});
    figures.message_bytes = t.pipeline->message_bytes();
}

namespace {

// The events of trace.json.
std::vector<TraceEvent> read_trace(const std::string& path) {
    static const std::map<std::string, TraceEvent::Kind> kKinds = {{"computing", TraceEvent::computing},
                                                                   {"collective", TraceEvent::collective}};
    std::vector<TraceEvent> events;
    const Json::Value trace = read_json_file(path);
    for (const Json::Value& e : member(trace, "traceEvents")) {
        if (member(e, "ph") != "X") continue;
        const auto kind = kKinds.find(member(e, "cat").asString());
        const bool sends = member(e, "name").asString().rfind("send", 0) == 0;
        const Json::Value& arguments = member(e, "args");
        const double start = 1e-6 * member(e, "ts").asDouble();
        events.push_back({.kind = kind != kKinds.end() ? kind->second
                                  : sends              ? TraceEvent::sending
                                                       : TraceEvent::receiving,
                          .rank = member(e, "pid").asInt(),
                          .step = member(arguments, "step").asInt64(),
                          .bytes = member(arguments, "bytes").asUInt64(),
                          .start = start,
                          .end = start + 1e-6 * member(e, "dur").asDouble(),
                          .what = member(arguments, "call").asString()});
    }
    return events;
}

}  // namespace

void draw_traced_pipeline(const TrainOptions& o, const std::string& folder, const PipelineFigures& figures) {
    if (figures.kept.empty()) return;
    const int64_t m = step_micro_batches(o), between = o.cp * o.tp;  // ranks of the world from one stage to the next
    const PipelineSchedule schedule = schedule_of_steps(o, m, steps_at_once(o));
    std::vector<TraceEvent> events = read_trace(folder + "/trace.json");
    const auto has_actions = [](const TraceEvent& e) { return e.what == action_text({Do::forward, 0, 0}); };
    int64_t step = -1;  // the last one that was traced
    for (const TraceEvent& e : events) step = has_actions(e) ? std::max(step, e.step) : step;
    if (step < 0) return;  // of steps that ran at once, the first one is traced
    std::erase_if(events, [&](const TraceEvent& e) { return e.step != step; });
    std::vector<int> world_ranks;
    for (int64_t rank = 0; rank < o.pp; ++rank) world_ranks.push_back(static_cast<int>(rank * between));
    const ComparedPipeline both = compare_pipeline(schedule, traced_spans(events, schedule, world_ranks));
    std::vector<PipelineTraffic> planned, measured;
    for (size_t rank = 0; rank < world_ranks.size(); ++rank) {
        const auto [plan, taken] = figures.kept[static_cast<size_t>(world_ranks[rank])];
        const int64_t n = messages_sent(schedule, static_cast<int>(rank));
        planned.push_back({plan, n, n * figures.message_bytes});
        measured.push_back({taken});
        for (const TraceEvent& e : events)
            if (e.kind == TraceEvent::sending && e.rank == world_ranks[rank] && e.what.rfind("send of pp ", 0) == 0)
                ++measured.back().messages, measured.back().bytes += static_cast<int64_t>(e.bytes);
    }
    print_pipeline_account(both, planned, measured);
    write_pipeline_picture(folder, both);
    std::printf(
        "          step %lld as predicted and as measured: %s/pipeline.png, and pipeline.json for ui.perfetto.dev\n",
        static_cast<long long>(step), folder.c_str());
}
