// trace.cu: who sent what to whom, when: as lines of text, as a Perfetto trace, as a picture.
#include "io/io.h"
#include "parallel/comm/transport.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>

void Trace::add(const TraceEvent& event) {
    const std::lock_guard lock(mutex_);
    if (print_) std::fputs(trace_line(event).c_str(), stdout);
    events_.push_back(event);
}
std::vector<TraceEvent> Trace::take() {
    const std::lock_guard lock(mutex_);
    return std::move(events_);
}

// "trace    step 12  rank 3 -> 4     1.50 KiB      12 us  all_reduce #17 of dp". A collective has no arrow.
std::string trace_line(const TraceEvent& event) {
    char line[256];
    const std::string arrow = event.peer < 0 ? "" : concat(event.sends ? "-> " : "<- ", event.peer);
    std::snprintf(line, sizeof line, "trace    step %lld  rank %d %-6s %10s %9.0f us  %s\n",
                  static_cast<long long>(event.step), event.rank, arrow.c_str(),
                  human_bytes(static_cast<double>(event.bytes)).c_str(), 1e6 * (event.end - event.start),
                  event.what.c_str());
    return line;
}

std::string pack_events(const std::vector<TraceEvent>& events) {
    nlohmann::json all = nlohmann::json::array();
    for (const TraceEvent& e : events)
        all.push_back({e.rank, e.peer, e.sends, e.step, e.bytes, e.start, e.end, e.what});
    return all.dump();
}
std::vector<TraceEvent> unpack_events(const std::string& packed) {
    std::vector<TraceEvent> events;
    for (const nlohmann::json& e : nlohmann::json::parse(packed))
        events.push_back({e[0].get<int>(), e[1].get<int>(), e[2].get<bool>(), e[3].get<int64_t>(), e[4].get<size_t>(),
                          e[5].get<double>(), e[6].get<double>(), e[7].get<std::string>()});
    return events;
}

namespace {

// A message: the k-th send from a to b within a call, and the k-th receive there.
struct Arrow {
    const TraceEvent *send = nullptr, *recv = nullptr;
};
std::vector<Arrow> match_messages(const std::vector<TraceEvent>& events) {
    std::map<std::string, std::vector<Arrow>> open;
    for (const bool sends : {true, false}) {
        std::map<std::string, size_t> n_seen;
        for (const TraceEvent& e : events) {
            if (e.peer < 0 || e.sends != sends) continue;
            const int from = sends ? e.rank : e.peer, to = sends ? e.peer : e.rank;
            // "send of dp" meets "recv of dp", "all_reduce #3 of dp" itself.
            const std::string call =
                e.what.substr(0, 4) == "send" || e.what.substr(0, 4) == "recv" ? e.what.substr(5) : e.what;
            const std::string key = concat(from, " ", to, " ", call);
            const size_t i = n_seen[key]++;
            std::vector<Arrow>& arrows = open[key];
            if (sends) arrows.push_back({&e, nullptr});
            else if (i < arrows.size()) arrows[i].recv = &e;
        }
    }
    std::vector<Arrow> matched;
    for (const auto& [key, arrows] : open)
        for (const Arrow& arrow : arrows)
            if (arrow.recv) matched.push_back(arrow);
    return matched;
}

// Chrome's trace format, which Perfetto (ui.perfetto.dev) reads: one row a rank, messages inside their collectives, and an
// arrow from each send to its receive.
void write_json(const std::string& path, const std::vector<TraceEvent>& events, int n_ranks) {
    nlohmann::json all = nlohmann::json::array();
    for (int rank = 0; rank < n_ranks; ++rank)
        all.push_back({{"ph", "M"},
                       {"name", "thread_name"},
                       {"pid", 0},
                       {"tid", rank},
                       {"args", {{"name", concat("rank ", rank)}}}});
    for (const TraceEvent& e : events) {
        const std::string name = e.peer < 0 ? e.what : concat(e.sends ? "send to " : "receive from ", e.peer);
        all.push_back({{"ph", "X"},
                       {"name", name},
                       {"cat", e.peer < 0 ? "collective" : "message"},
                       {"pid", 0},
                       {"tid", e.rank},
                       {"ts", 1e6 * e.start},
                       {"dur", 1e6 * (e.end - e.start)},
                       {"args", {{"step", e.step}, {"bytes", e.bytes}, {"call", e.what}}}});
    }
    int id = 0;
    for (const Arrow& arrow : match_messages(events)) {
        nlohmann::json start = {{"ph", "s"},
                                {"id", ++id},
                                {"name", "message"},
                                {"cat", "message"},
                                {"pid", 0},
                                {"tid", arrow.send->rank},
                                {"ts", 1e6 * arrow.send->start}};
        nlohmann::json finish = start;
        finish["ph"] = "f";
        finish["bp"] = "e";
        finish["tid"] = arrow.recv->rank;
        finish["ts"] = 1e6 * arrow.recv->end;
        all.push_back(start);
        all.push_back(finish);
    }
    write_text_file(path, nlohmann::json{{"traceEvents", all}, {"displayTimeUnit", "ms"}}.dump() + "\n");
}

constexpr Canvas::Color kColors[] = {{31, 119, 180}, {255, 127, 14},  {44, 160, 44},
                                     {214, 39, 40},  {148, 103, 189}, {140, 86, 75}};

// One row a rank, time to the right: a bar for each collective, colored by its kind, and a line for each message, from
// where it was sent to where it was received.
void write_timeline(const std::string& path, const std::vector<TraceEvent>& events, int n_ranks) {
    constexpr int kWidth = 1400, kLeft = 80, kRight = 20, kTop = 50, kRow = 44, kBar = 18;
    const int height = kTop + n_ranks * kRow + 50;
    double first = events[0].start, last = events[0].end;
    for (const TraceEvent& e : events) first = std::min(first, e.start), last = std::max(last, e.end);
    const double seconds = std::max(last - first, 1e-6);
    const auto x_of = [&](double t) { return kLeft + (t - first) / seconds * (kWidth - kLeft - kRight); };
    const auto y_of = [&](int rank) { return kTop + rank * kRow + kRow / 2.0; };
    Canvas canvas(kWidth, height);

    std::map<std::string, size_t> kinds;
    for (const TraceEvent& e : events)
        if (e.peer < 0) kinds.emplace(e.what.substr(0, e.what.find(' ')), kinds.size());
    double x = kLeft;
    for (const auto& [kind, i] : kinds) {
        canvas.fill(x, 14, x + 14, 28, kColors[i % std::size(kColors)]);
        canvas.text({x + 20, 27}, kind, 10, {40, 40, 40});
        x += 40 + Canvas::text_width(kind, 10);
    }
    for (int rank = 0; rank < n_ranks; ++rank) {
        canvas.line({{kLeft, y_of(rank)}, {kWidth - kRight, y_of(rank)}}, 1, {210, 210, 210});
        canvas.text({kLeft - 10, y_of(rank) + 5}, concat("rank ", rank), 10, {40, 40, 40}, Canvas::Align::right);
    }
    for (const TraceEvent& e : events) {
        if (e.peer >= 0) continue;
        const size_t kind = kinds[e.what.substr(0, e.what.find(' '))];
        canvas.fill(x_of(e.start), y_of(e.rank) - kBar / 2.0, std::max(x_of(e.end), x_of(e.start) + 1),
                    y_of(e.rank) + kBar / 2.0, kColors[kind % std::size(kColors)], 0.6);
    }
    constexpr size_t kMaxArrows = 4000;  // more would be one black area
    const std::vector<Arrow> arrows = match_messages(events);
    for (size_t i = 0; i < std::min(kMaxArrows, arrows.size()); ++i) {
        const Canvas::Point from{x_of(arrows[i].send->start), y_of(arrows[i].send->rank)},
            to{x_of(arrows[i].recv->end), y_of(arrows[i].recv->rank)};
        canvas.line({from, to}, 1, {20, 20, 20}, 0.6);
        canvas.disc(to, 2.5, {20, 20, 20});
    }
    for (int tick = 0; tick <= 5; ++tick) {
        const double t = seconds * tick / 5;
        canvas.text({x_of(first + t), height - 20.0}, tick == 0 ? "0" : human_seconds(t), 10, {40, 40, 40},
                    Canvas::Align::center);
    }
    canvas.save(path);
}

}  // namespace

void write_trace(const std::string& folder, std::vector<TraceEvent> events) {
    if (events.empty()) return;
    std::stable_sort(events.begin(), events.end(),
                     [](const TraceEvent& a, const TraceEvent& b) { return a.start < b.start; });
    int n_ranks = 0;
    for (const TraceEvent& e : events) n_ranks = std::max(n_ranks, 1 + std::max(e.rank, e.peer));
    write_json(folder + "/trace.json", events, n_ranks);
    write_timeline(folder + "/trace.png", events, n_ranks);
}
