// trace.cu: --trace: who computed what, and who sent what to whom, when: as lines of text and as a Perfetto trace.
#include "io/json.h"
#include "parallel/comm/transport.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

void Trace::add(const TraceEvent& event) {
    const std::lock_guard lock(mutex_);
    std::fputs(trace_line(event).c_str(), stdout);
    events_.push_back(event);
}
std::vector<TraceEvent> Trace::take() {
    const std::lock_guard lock(mutex_);
    return std::move(events_);
}

std::set<int64_t> traced_steps(const std::string& list) {
    std::set<int64_t> steps;
    std::istringstream text(list);
    for (std::string number; std::getline(text, number, ',');) {
        check(!number.empty() && number.size() < 18 && number.find_first_not_of("0123456789") == std::string::npos,
              "--trace ", list, ": give the numbers of the steps to record, as in --trace 3 or --trace 3,4");
        steps.insert(std::stoll(number));
    }
    return steps;
}

// "trace    step 12  rank 3 -> 4     1.50 KiB      12 us  all_reduce #17 of dp". Only a message has an arrow.
std::string trace_line(const TraceEvent& event) {
    const bool is_message = event.kind == TraceEvent::sending || event.kind == TraceEvent::receiving;
    const std::string arrow = is_message ? concat(event.kind == TraceEvent::sending ? "-> " : "<- ", event.peer) : "";
    const std::string bytes = event.kind == TraceEvent::computing ? "" : human_bytes(static_cast<double>(event.bytes));
    return format("trace    step %lld  rank %d %-6s %10s %9.0f us  %s\n", static_cast<long long>(event.step),
                  event.rank, arrow.c_str(), bytes.c_str(), 1e6 * (event.end - event.start), event.what.c_str());
}

std::string pack_events(const std::vector<TraceEvent>& events) {
    JsonText all = JsonText::array();
    for (const TraceEvent& e : events)
        all.push_back(
            JsonText::array({static_cast<int>(e.kind), e.rank, e.peer, e.step, e.bytes, e.start, e.end, e.what}));
    return all.str();
}
std::vector<TraceEvent> unpack_events(const std::string& packed) {
    std::vector<TraceEvent> events;
    const Json::Value all = parse_json(packed, "the events of a rank");
    for (const Json::Value& e : all)
        events.push_back({static_cast<TraceEvent::Kind>(e[0].asInt()), e[1].asInt(), e[2].asInt(), e[3].asInt64(),
                          e[4].asUInt64(), e[5].asDouble(), e[6].asDouble(), e[7].asString()});
    return events;
}

std::vector<TracedMessage> match_messages(const std::vector<TraceEvent>& events) {
    std::map<std::string, std::vector<TracedMessage>> open;
    for (const TraceEvent::Kind kind : {TraceEvent::sending, TraceEvent::receiving}) {
        std::map<std::string, size_t> n_seen;
        for (const TraceEvent& e : events) {
            if (e.kind != kind) continue;
            const bool sends = kind == TraceEvent::sending;
            const int from = sends ? e.rank : e.peer, to = sends ? e.peer : e.rank;
            // "send of dp" meets "recv of dp", "all_reduce #3 of dp" itself.
            const std::string start = e.what.substr(0, 4),
                              call = start == "send" || start == "recv" ? e.what.substr(5) : e.what;
            const std::string key = concat(from, " ", to, " ", call);
            const size_t i = n_seen[key]++;
            std::vector<TracedMessage>& messages = open[key];
            if (sends) messages.push_back({&e, nullptr});
            else if (i < messages.size()) messages[i].recv = &e;
        }
    }
    std::vector<TracedMessage> matched;
    for (const auto& [key, messages] : open)
        for (const TracedMessage& message : messages)
            if (message.recv) matched.push_back(message);
    return matched;
}

namespace {

// Perfetto draws each arrow; those of a few bytes would cover the others.
constexpr size_t kMinArrowBytes = 64;

// The two rows of a rank.
constexpr int kComputingRow = 0, kCommunicationRow = 1;
int row_of(const TraceEvent& e) { return e.kind == TraceEvent::computing ? kComputingRow : kCommunicationRow; }

JsonText name_row(const char* what, int rank, int row, const std::string& name) {
    return {{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", row}, {"args", {{"name", name}}}};
}

// One end of an arrow: "s" start, "f" finish.
JsonText arrow_end(const char* phase, int id, int rank, double seconds) {
    JsonText end = {{"ph", phase},        {"id", id},    {"name", "message"},
                    {"cat", "message"},   {"pid", rank}, {"tid", kCommunicationRow},
                    {"ts", 1e6 * seconds}};
    if (phase[0] == 'f') end.set("bp", "e");  // it ends at the slice that it lies in, not at the next one
    return end;
}

// Chrome's trace format, which Perfetto (ui.perfetto.dev) reads: a rank is a process with two rows, computing and
// communication; messages lie inside their collectives, and an arrow goes from each send to its receive.
void write_json(const std::string& path, const std::vector<TraceEvent>& events, int n_ranks) {
    static const char* const kCategories[] = {"computing", "collective", "message", "message"};
    JsonText all = JsonText::array();
    for (int rank = 0; rank < n_ranks; ++rank) {
        all.push_back(name_row("process_name", rank, 0, concat("rank ", rank)));
        all.push_back(name_row("thread_name", rank, kComputingRow, "computing"));
        all.push_back(name_row("thread_name", rank, kCommunicationRow, "communication"));
    }
    for (const TraceEvent& e : events) {
        const std::string name = e.kind == TraceEvent::sending     ? concat("send to ", e.peer)
                                 : e.kind == TraceEvent::receiving ? concat("receive from ", e.peer)
                                                                   : e.what;
        all.push_back({{"ph", "X"},
                       {"name", name},
                       {"cat", kCategories[e.kind]},
                       {"pid", e.rank},
                       {"tid", row_of(e)},
                       {"ts", 1e6 * e.start},
                       {"dur", 1e6 * (e.end - e.start)},
                       {"args", {{"step", e.step}, {"bytes", e.bytes}, {"call", e.what}}}});
    }
    int id = 0;
    for (const TracedMessage& message : match_messages(events)) {
        if (message.send->bytes < kMinArrowBytes) continue;
        all.push_back(arrow_end("s", ++id, message.send->rank, message.send->start));
        all.push_back(arrow_end("f", id, message.recv->rank, message.recv->end));
    }
    write_text_file(path, JsonText{{"traceEvents", all}, {"displayTimeUnit", "ms"}}.str() + "\n");
}

}  // namespace

void write_trace(const std::string& folder, std::vector<TraceEvent> events) {
    if (events.empty()) return;
    std::stable_sort(events.begin(), events.end(),
                     [](const TraceEvent& a, const TraceEvent& b) { return a.start < b.start; });
    int n_ranks = 0;
    for (const TraceEvent& e : events) n_ranks = std::max(n_ranks, 1 + std::max(e.rank, e.peer));
    write_json(folder + "/trace.json", events, n_ranks);
    write_trace_picture(folder + "/trace.png", events, n_ranks);
    std::printf("trace    %s/trace.json (open it in ui.perfetto.dev), and as a picture %s/trace.png\n", folder.c_str(),
                folder.c_str());
}
