// trace_picture.cu: the first four traced steps as a picture: a panel per step, two lanes per rank, time to the right.
//
//     step 3
//     rank 0   computing       | forward emb | forward block 0 |       | ...
//              communication   [all_gather]\\  [all_gather]
//     rank 1   computing                    \\| forward emb | ...
//              communication   [all_gather ]
//
// What cannot be told apart is not drawn: a name that is longer than its bar, messages that are small beside the
// largest one, and messages whose arrow would begin or end within a few pixels of another one. trace.json has them all.
#include "io/io.h"
#include "parallel/comm/transport.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int kWidth = 1600, kLeft = 190, kRight = 40;
constexpr int kLegend = 44, kTitle = 40, kAxis = 34;                // heights: above all panels; of a panel's parts
constexpr int kComputing = 26, kCommunication = 20, kRankGap = 16;  // heights of a rank's lanes, and below them
constexpr int kRankHeight = kComputing + kCommunication + kRankGap;
constexpr int kMaxRanks = 16;
constexpr size_t kMaxPanels = 4;
constexpr double kText = 9, kApart = 9;  // pixels: height of capitals; between two arrows on one lane
constexpr Canvas::Color kInk{40, 40, 40}, kPale{150, 150, 150};

struct Style {
    const char* start;  // of TraceEvent::what
    Canvas::Color color;
};
constexpr Style kPhases[] = {{"forward", {110, 165, 215}}, {"recompute", {180, 160, 215}},
                             {"backward", {245, 165, 85}}, {"update", {120, 190, 120}},
                             {"norm", {185, 185, 120}},    {"quantise", {200, 150, 130}},
                             {"F", {120, 175, 225}},       {"BW", {235, 150, 70}},  // of pipelines: pipeline.h
                             {"B", {250, 185, 95}},        {"W", {125, 200, 165}}};
constexpr Style kCollectives[] = {{"all_reduce", {205, 75, 75}},  {"reduce_scatter", {225, 120, 150}},
                                  {"all_gather", {60, 130, 140}}, {"broadcast", {130, 110, 80}},
                                  {"all_to_all", {140, 90, 170}}, {"reduce ", {225, 120, 150}},
                                  {"shift", {85, 105, 185}},      {"barrier", {160, 160, 160}}};

template <size_t n>
const Style* style_of(const Style (&styles)[n], const std::string& what) {
    for (const Style& style : styles)
        if (what.starts_with(style.start)) return &style;
    return nullptr;
}

// "forward of block 3" -> "block 3"; "F3 of stage 2" -> "F3"; "all_gather #12 of dp" -> "all_gather".
std::string label_of(const TraceEvent& e) {
    if (e.kind == TraceEvent::collective) return e.what.substr(0, e.what.find(' '));
    const size_t of = e.what.find(" of "), of_stage = e.what.find(" of stage ");
    if (of_stage != std::string::npos) return e.what.substr(0, of_stage);
    return of == std::string::npos ? e.what : e.what.substr(of + 4);
}

// One step.
class Panel {
  public:
    Panel(Canvas& canvas, double top, const std::vector<TraceEvent>& events, int n_ranks)
        : canvas_(canvas), top_(top), events_(events), n_ranks_(n_ranks) {
        first_ = last_ = events[0].start;
        for (const TraceEvent& e : events) first_ = std::min(first_, e.start), last_ = std::max(last_, e.end);
        last_ = std::max(last_, first_ + 1e-6);
    }
    static int height(int n_ranks) { return kTitle + n_ranks * kRankHeight + kAxis; }

    void draw() {
        draw_lanes();
        for (const TraceEvent& e : events_)
            if (e.rank < n_ranks_ && e.peer < 0) draw_bar(e);
        const std::string shown = draw_messages();
        canvas_.text({kLeft, top_ + 22}, concat("step ", events_[0].step, ": ", human_seconds(last_ - first_), shown),
                     10, kInk, Canvas::Align::left, true);
        draw_axis();
    }

  private:
    double x_of(double t) const { return kLeft + (t - first_) / (last_ - first_) * (kWidth - kLeft - kRight); }
    double top_of(int rank) const { return top_ + kTitle + rank * kRankHeight; }
    double lane_of_messages(int rank) const { return top_of(rank) + kComputing + kCommunication / 2.0; }

    void draw_lanes() {
        for (int rank = 0; rank < n_ranks_; ++rank) {
            const double top = top_of(rank);
            canvas_.text({12, top + 17}, concat("rank ", rank), 10, kInk, Canvas::Align::left, true);
            canvas_.text({kLeft - 10, top + 17}, "computing", kText, kPale, Canvas::Align::right);
            canvas_.text({kLeft - 10, top + kComputing + 14}, "communication", kText, kPale, Canvas::Align::right);
            canvas_.fill(kLeft, top, kWidth - kRight, top + kComputing + kCommunication, {246, 246, 246});
        }
    }

    void draw_bar(const TraceEvent& e) {
        const bool computes = e.kind == TraceEvent::computing;
        const Style* style = computes ? style_of(kPhases, e.what) : style_of(kCollectives, e.what);
        const Canvas::Color color = style ? style->color : Canvas::Color{190, 190, 190};
        const double top = top_of(e.rank) + (computes ? 0 : kComputing),
                     bottom = top + (computes ? kComputing : kCommunication);
        const double left = x_of(e.start), right = std::max(x_of(e.end), left + 1);
        canvas_.fill(left, top + 1, right, bottom - 1, color);
        if (right - left > 3)
            canvas_.fill(right - 1, top + 1, right, bottom - 1, {255, 255, 255});  // between neighbours
        std::string label = label_of(e);
        const std::string bytes = computes ? "" : human_bytes(static_cast<double>(e.bytes));
        for (const std::string& text :
             {computes ? label : concat(label, " ", bytes), computes ? label.substr(label.find(' ') + 1) : bytes})
            if (Canvas::text_width(text, kText) + 6 < right - left)
                return canvas_.text({(left + right) / 2, (top + bottom) / 2 + kText / 2}, text, kText,
                                    computes ? kInk : Canvas::Color{255, 255, 255}, Canvas::Align::center);
    }

    // The largest first, each if there is space for it. Says how many.
    std::string draw_messages() {
        std::vector<TracedMessage> messages = match_messages(events_);
        size_t largest = 0;
        for (const TracedMessage& m : messages) largest = std::max(largest, m.send->bytes);
        std::stable_sort(messages.begin(), messages.end(),
                         [](const TracedMessage& a, const TracedMessage& b) { return a.send->bytes > b.send->bytes; });
        std::map<int, std::vector<double>> taken;  // rank -> where arrows begin or end on its lane
        const auto is_free = [&](int rank, double x) {
            for (double other : taken[rank])
                if (std::abs(other - x) < kApart) return false;
            return true;
        };
        size_t n_drawn = 0;
        for (const TracedMessage& m : messages) {
            const int from = m.send->rank, to = m.recv->rank;
            const double x = x_of(m.send->start), end = x_of(m.recv->end);
            if (m.send->bytes < std::max<size_t>(64, largest / 100) || std::max(from, to) >= n_ranks_ ||
                !is_free(from, x) || !is_free(to, end))
                continue;
            taken[from].push_back(x);
            taken[to].push_back(end);
            draw_arrow({x, lane_of_messages(from)}, {end, lane_of_messages(to)});
            ++n_drawn;
        }
        return messages.empty() ? "" : concat("; ", n_drawn, " of ", messages.size(), " messages are drawn");
    }

    void draw_arrow(Canvas::Point from, Canvas::Point to) {
        canvas_.line({from, to}, 1.2, {20, 20, 20}, 0.8);
        const double dx = to.x - from.x, dy = to.y - from.y, length = std::max(1.0, std::hypot(dx, dy));
        const double ux = dx / length, uy = dy / length;
        for (const double side : {-1.0, 1.0})
            canvas_.line({to, {to.x - 7 * ux + side * 3 * uy, to.y - 7 * uy - side * 3 * ux}}, 1.2, {20, 20, 20}, 0.8);
    }

    void draw_axis() {
        const double y = top_of(n_ranks_) - kRankGap + 4;
        for (int tick = 0; tick <= 5; ++tick) {
            const double t = (last_ - first_) * tick / 5, x = x_of(first_ + t);
            canvas_.line({{x, y}, {x, y + 5}}, 1, kPale);
            canvas_.text({x, y + 20}, tick == 0 ? "0" : human_seconds(t), kText, kInk, Canvas::Align::center);
        }
    }

    Canvas& canvas_;
    const double top_;
    const std::vector<TraceEvent>& events_;
    const int n_ranks_;
    double first_ = 0, last_ = 0;
};

// Only what occurs.
void draw_legend(Canvas& canvas, const std::vector<TraceEvent>& events) {
    double x = 12;
    const auto draw = [&](const auto& styles, TraceEvent::Kind kind) {
        for (const Style& style : styles) {
            const bool occurs = std::any_of(events.begin(), events.end(), [&](const TraceEvent& e) {
                return e.kind == kind && style_of(styles, e.what) == &style;
            });
            if (!occurs) continue;
            canvas.fill(x, 14, x + 14, 28, style.color);
            canvas.text({x + 20, 26}, style.start, kText, kInk);
            x += 44 + Canvas::text_width(style.start, kText);
        }
        x += 30;
    };
    draw(kPhases, TraceEvent::computing);
    draw(kCollectives, TraceEvent::collective);
}

}  // namespace

void write_trace_picture(const std::string& path, const std::vector<TraceEvent>& events, int n_ranks) {
    std::map<int64_t, std::vector<TraceEvent>> steps;
    for (const TraceEvent& e : events) steps[e.step].push_back(e);
    while (steps.size() > kMaxPanels) steps.erase(std::prev(steps.end()));
    const int n_shown = std::min(n_ranks, kMaxRanks);
    const int n_panels = static_cast<int>(steps.size());
    const bool incomplete = n_shown < n_ranks;
    Canvas canvas(kWidth, kLegend + n_panels * Panel::height(n_shown) + (incomplete ? 24 : 0));
    draw_legend(canvas, events);
    double top = kLegend;
    for (const auto& [step, its_events] : steps) {
        Panel(canvas, top, its_events, n_shown).draw();
        top += Panel::height(n_shown);
    }
    if (incomplete)
        canvas.text({12, top + 12}, concat("ranks 0 to ", n_shown - 1, " of ", n_ranks, "; trace.json has all"), kText,
                    kPale);
    canvas.save(path);
}
