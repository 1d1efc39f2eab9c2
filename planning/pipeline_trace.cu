// planning/pipeline_trace.cu: pipelines for Perfetto (ui.perfetto.dev).
#include "io/json.h"
#include "planning/planning.h"

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
void write_pipeline_trace(const std::string& path, const std::vector<PipelinePanel>& panels) {
    JsonText all = JsonText::array();
    for (size_t i = 0; i < panels.size(); ++i) {
        const double scale = panels[i].seconds ? 1e6 : 1e3;
        all.push_back(name_row("process_name", i, 0, panels[i].title));
        for (int rank = 0; rank < panels[i].schedule->p; ++rank) {
            all.push_back(name_row("thread_name", i, rank, concat("rank ", rank)));
            for (const Span& span : (*panels[i].ranks)[static_cast<size_t>(rank)])
                all.push_back({{"ph", "X"},
                               {"name", action_text(span.action)},
                               {"cat", category(span.action.what)},
                               {"pid", i},
                               {"tid", rank},
                               {"ts", scale * span.start},
                               {"dur", scale * (span.end - span.start)},
                               {"args", {{"stage", span.action.stage}, {"version", span.action.version}}}});
        }
    }
    write_text_file(path, JsonText{{"traceEvents", all}, {"displayTimeUnit", "ms"}}.str() + "\n");
}
