// pipeline_trace.cu: spans of pipelines for Perfetto (ui.perfetto.dev), and spans out of the trace of a run.
#include "io/json.h"
#include "planning/planning.h"

#include <algorithm>

namespace {

const char* category(Do what) {
    switch (what) {
        case Do::forward: return "forward";
        case Do::backward: return "backward";
        case Do::backward_input: return "backward by input";
        case Do::backward_weight: return "backward by weight";
        default: return "update";
    }
}

JsonText name_row(const char* what, size_t process, int rank, const std::string& name) {
    return {{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", rank}, {"args", {{"name", name}}}};
}

}  // namespace

// Chrome's format counts in microseconds: a unit of --times is shown as a millisecond.
void write_schedule_trace(const std::string& path, const std::vector<DrawnPipeline>& drawn) {
    JsonText all = JsonText::array();
    for (size_t i = 0; i < drawn.size(); ++i) {
        const PipelineSchedule& s = drawn[i].schedule;
        all.push_back(name_row("process_name", i, 0, concat(s.name, ", p ", s.p, ", m ", s.m)));
        for (int rank = 0; rank < s.p; ++rank) {
            all.push_back(name_row("thread_name", i, rank, concat("rank ", rank)));
            for (const Span& span : drawn[i].simulation.ranks[static_cast<size_t>(rank)])
                all.push_back({{"ph", "X"},
                               {"name", action_text(span.action)},
                               {"cat", category(span.action.what)},
                               {"pid", i},
                               {"tid", rank},
                               {"ts", 1000 * span.start},
                               {"dur", 1000 * (span.end - span.start)},
                               {"args", {{"stage", span.action.stage}, {"version", span.action.version}}}});
        }
    }
    write_text_file(path, JsonText{{"traceEvents", all}, {"displayTimeUnit", "ms"}}.str() + "\n");
}
