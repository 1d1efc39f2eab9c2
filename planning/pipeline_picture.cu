// planning/pipeline_picture.cu: schedules of pipelines as a picture: a panel each, a lane per rank, time to the right.
// Below a lane the activations that the rank keeps. Outlined: the critical path, the actions that the end waits for.
#include "planning/planning.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int kWidth = 1280, kLeft = 70, kRight = 90;
constexpr int kLegend = 40, kTitle = 52, kAxis = 34, kPanelGap = 6;  // heights: above all panels; of a panel's parts
constexpr int kLane = 20, kAlive = 10, kLaneGap = 6;                 // of a rank's lane, of what is below it
constexpr double kText = 9;
constexpr Canvas::Color kInk{40, 40, 40}, kPale{150, 150, 150}, kIdle{240, 240, 240}, kPath{190, 20, 40},
    kAliveColor{150, 150, 185}, kWhite{255, 255, 255};

// Of a rank's first stage, and of its second.
constexpr Canvas::Color kForward[2] = {{120, 175, 225}, {35, 90, 160}}, kByInput[2] = {{250, 185, 95}, {195, 100, 20}},
                        kByWeight[2] = {{125, 200, 165}, {30, 120, 90}};

constexpr int kRankHeight = kLane + kAlive + kLaneGap;
int height_of(const PipelinePanel& panel) { return kTitle + panel.schedule->p * kRankHeight + kAxis + kPanelGap; }

class Panel {
  public:
    Panel(Canvas& canvas, double top, const PipelinePanel& panel, double duration, double most)
        : canvas_(canvas), top_(top), panel_(panel), s_(*panel.schedule), late_(staleness(s_)), duration_(duration),
          most_(most) {}

    void draw() {
        canvas_.text({12, top_ + 20}, panel_.title, 11, kInk, Canvas::Align::left, true);
        std::string subtitle = panel_.subtitle;
        if (const double end = end_of(*panel_.ranks); end > duration_ * 1.0001)
            subtitle += concat("; cut: it ends at ", panel_.seconds ? human_seconds(end) : format("%.3g", end));
        canvas_.text({12, top_ + 40}, Canvas::shorten(subtitle, kText, kWidth - 24), kText, kInk);
        for (int rank = 0; rank < s_.p; ++rank) {
            draw_lane(rank);
            draw_alive(rank);
        }
        draw_path();
        draw_axis();
    }

  private:
    // Whole pixels, so that no seams show between neighbours; what is later than the others' end is cut.
    double x_of(double t) const { return std::round(kLeft + std::min(t / duration_, 1.0) * (kWidth - kLeft - kRight)); }
    double top_of(int rank) const { return top_ + kTitle + rank * kRankHeight; }
    const std::vector<Span>& spans(int rank) const { return (*panel_.ranks)[static_cast<size_t>(rank)]; }
    // Marks as wide as on other bars would cover it.
    bool is_narrow(const Span& span) const {
        return computes(span.action.what) && x_of(span.end) - x_of(span.start) < 6;
    }

    void draw_lane(int rank) {
        const double top = top_of(rank);
        canvas_.text({12, top + 15}, concat("rank ", rank), 10, kInk, Canvas::Align::left, true);
        if (spans(rank).empty()) return;
        canvas_.fill(x_of(spans(rank).front().start), top, x_of(spans(rank).back().end), top + kLane, kIdle);
        for (const Span& span : spans(rank))
            if (computes(span.action.what)) draw_bar(rank, span);
        const Span* bar = nullptr;  // before an update; the mark of a narrow one is above it only
        for (const Span& span : spans(rank))
            if (computes(span.action.what)) bar = &span;
            else {
                const double x = x_of(span.end), bottom = bar && is_narrow(*bar) ? top - 1 : top + kLane + 2;
                canvas_.fill(std::min(x_of(span.start), x - 2), top - 4, x + 1, bottom, kInk);
            }
    }

    void draw_bar(int rank, const Span& span) {
        const int chunk = pipeline_chunk(s_, rank, span.action) % 2;
        const double left = x_of(span.start), right = x_of(span.end), top = top_of(rank), bottom = top + kLane;
        const Do what = span.action.what;
        const Canvas::Color upper = what == Do::forward           ? kForward[chunk]
                                    : what == Do::backward_weight ? kByWeight[chunk]
                                                                  : kByInput[chunk];
        canvas_.fill(left, top, right, bottom, upper);
        if (what == Do::backward) canvas_.fill(left, top + kLane * 0.7, right, bottom, kByWeight[chunk]);
        if (right - left > 3) canvas_.fill(right - 1, top, right, bottom, kWhite);  // between neighbours
        std::string name = concat(span.action.micro);
        const bool is_gradient = what == Do::backward || what == Do::backward_weight;
        if (const int late = late_[static_cast<size_t>(span.action.stage)][static_cast<size_t>(span.action.micro)];
            late > 0 && is_gradient)
            name += concat(": ", late, " late");
        if (Canvas::text_width(name, kText) + 2 > right - left) name = concat(span.action.micro);
        if (Canvas::text_width(name, kText) + 2 < right - left)
            canvas_.text({(left + right) / 2, top + 14}, name, kText, chunk == 0 ? kInk : kWhite,
                         Canvas::Align::center);
    }

    // Forwards whose backward is not done, over time; and the most of them, at the right.
    void draw_alive(int rank) {
        const double top = top_of(rank) + kLane + 1, bottom = top + kAlive;
        const double unit = static_cast<double>(s_.p) / s_.n_stages;
        double level = 0, since = 0;
        const auto advance = [&](double until, double to) {
            const double height = level / most_ * kAlive;
            if (height > 0) canvas_.fill(x_of(since), bottom - height, x_of(until), bottom, kAliveColor);
            since = until, level = to;
        };
        for (const Span& span : spans(rank)) {
            const Do what = span.action.what;
            if (what == Do::forward) advance(span.start, level + unit);
            else if (what == Do::backward_weight || what == Do::backward) advance(span.end, level - unit);
        }
        const std::string peak = format("%.3g", peak_activations(s_)[static_cast<size_t>(rank)]);
        canvas_.text({kWidth - kRight + 10, top + 9}, concat("keeps ", peak), kText, kInk);
    }

    void draw_path() {
        const auto& path = panel_.critical_path;
        const Span* before = nullptr;
        int rank_before = 0;
        for (size_t i = 0; i < path.size(); ++i) {
            const int rank = path[i].first;
            const auto span_at = [&](size_t place) -> const Span& { return spans(rank)[path[place].second]; };
            const Span& first = span_at(i);
            if (first.start >= duration_) break;
            while (i + 1 < path.size() && path[i + 1].first == rank &&
                   (is_narrow(span_at(i)) || is_narrow(span_at(i + 1))))
                ++i;  // what is too narrow for an outline shares its neighbours'
            const double left = x_of(first.start), right = x_of(span_at(i).end) - 1, top = top_of(rank),
                         bottom = top + kLane;
            if (before && rank != rank_before) {
                const bool down = rank > rank_before;
                canvas_.line(
                    {{x_of(before->end) - 1, top_of(rank_before) + (down ? kLane : 0)}, {left, down ? top : bottom}},
                    1.6, kPath);
            }
            canvas_.line({{left, top}, {right, top}, {right, bottom}, {left, bottom}, {left, top}}, 1.4, kPath);
            before = &span_at(i), rank_before = rank;
        }
    }

    void draw_axis() {
        const double y = top_of(s_.p) - 2, power = std::pow(10, std::floor(std::log10(duration_ / 8)));
        double step = power;  // 1, 2 or 5 times a power of ten
        for (const double digit : {1, 2, 5, 10})
            if (duration_ / (digit * power) <= 12) {
                step = digit * power;
                break;
            }
        for (int tick = 0; tick * step <= duration_ * 1.0001; ++tick) {
            const double t = tick * step, x = x_of(t);
            canvas_.line({{x, y}, {x, y + 4}}, 1, kPale);
            canvas_.text({x, y + 17}, panel_.seconds && tick > 0 ? human_seconds(t) : format("%.3g", t), kText, kInk,
                         Canvas::Align::center);
        }
    }

    Canvas& canvas_;
    const double top_;
    const PipelinePanel& panel_;
    const PipelineSchedule& s_;
    const std::vector<std::vector<int>> late_;  // by stage and micro-batch
    const double duration_, most_;              // of all panels: the time at the right, the activations kept
};

void draw_legend(Canvas& canvas, bool two_stages, bool updates) {
    double x = 12;
    const auto entry = [&](Canvas::Color upper, Canvas::Color lower, const char* name) {
        canvas.fill(x, 12, x + 16, 28, upper);
        canvas.fill(x, 23, x + 16, 28, lower);
        canvas.text({x + 22, 25}, name, kText, kInk);
        x += 44 + Canvas::text_width(name, kText);
    };
    entry(kForward[0], kForward[0], "forward");
    entry(kByInput[0], kByInput[0], "backward by input");
    entry(kByWeight[0], kByWeight[0], "backward by weight");
    entry(kByInput[0], kByWeight[0], "both at once");
    if (two_stages) entry(kForward[1], kForward[1], "dark: the second stage of a rank");
    entry(kWhite, kAliveColor, "activations kept");
    canvas.line({{x, 13}, {x + 16, 13}, {x + 16, 27}, {x, 27}, {x, 13}}, 1.4, kPath);
    canvas.text({x + 22, 25}, "critical path", kText, kInk);
    x += 44 + Canvas::text_width("critical path", kText);
    if (!updates) return;
    canvas.fill(x + 6, 10, x + 9, 30, kInk);
    canvas.text({x + 22, 25}, "update of the weights", kText, kInk);
}

}  // namespace

void write_pipeline_panels(const std::string& path, const std::vector<PipelinePanel>& panels) {
    int height = kLegend;
    double shortest = end_of(*panels[0].ranks), duration = 0, most = 0;  // naive takes several times what the others do
    for (const PipelinePanel& panel : panels) shortest = std::min(shortest, end_of(*panel.ranks));
    bool two_stages = false, updates = false;
    for (const PipelinePanel& panel : panels) {
        height += height_of(panel);
        const double end = end_of(*panel.ranks);
        if (!panel.may_be_cut || end <= 1.5 * shortest) duration = std::max(duration, end);
        for (const double peak : peak_activations(*panel.schedule)) most = std::max(most, peak);
        two_stages = two_stages || panel.schedule->stages_of(0).size() > 1;
        updates = updates || panel.schedule->asynchronous;
    }
    Canvas canvas(kWidth, height);
    draw_legend(canvas, two_stages, updates);
    double top = kLegend;
    for (const PipelinePanel& panel : panels) {
        Panel(canvas, top, panel, duration, most).draw();
        top += height_of(panel);
    }
    canvas.save(path);
}

std::string panel_subtitle(const PipelineSchedule& schedule, double bubble) {
    std::string text =
        concat("bubble ", format("%.3g", 100 * std::max(0.0, bubble)), " %; activations kept at most, by rank:");
    for (const double peak : peak_activations(schedule)) text += concat(" ", format("%.3g", peak));
    if (!schedule.asynchronous) return text;
    text += "; versions of the weights:";
    for (const int n : schedule.versions) text += concat(" ", n);
    return text + "; 2 late: a gradient of weights that are 2 updates old";
}

std::vector<PipelinePanel> schedule_panels(const std::vector<DrawnPipeline>& drawn) {
    std::vector<PipelinePanel> panels;
    for (const DrawnPipeline& d : drawn)
        panels.push_back({.title = concat(d.schedule.name, ": ", d.schedule.p, " ranks, ", d.schedule.m,
                                          " micro-batches, ", d.schedule.n_stages, " stages"),
                          .subtitle = panel_subtitle(d.schedule, d.simulation.bubble),
                          .schedule = &d.schedule,
                          .ranks = &d.simulation.ranks,
                          .critical_path = d.simulation.critical_path,
                          .may_be_cut = true});
    return panels;
}
