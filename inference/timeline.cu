// inference/timeline.cu: what each request does in each step, as a picture (Gantt chart).
//
// With static batching the rows of a batch begin together, and white fills the places of the short ones until the
// longest is done. With continuous batching the place of a request that ends is taken by the next one.
#include "inference/inference.h"

#include <algorithm>
#include <cmath>

void Timeline::arrive(int64_t request) {
    const bool is_new = row_of_.emplace(request, rows_.size()).second;
    check(is_new, "timeline: request ", request, " has arrived before");
    rows_.push_back({n_steps_, {}});
}

void Timeline::step(std::span<const StepPart> parts) {
    for (const auto& [request, row] : row_of_) {
        std::vector<State>& states = rows_[row].states;
        const bool has_begun = !states.empty() && states.back() != State::waiting;
        states.push_back(has_begun ? State::interrupted : State::waiting);
    }
    ++n_steps_;
    for (const StepPart& part : parts) {
        const auto at = row_of_.find(part.request->id);
        check(at != row_of_.end(), "timeline: request ", part.request->id, " is in a step, and has not arrived");
        const bool is_prefill = part.first < std::ssize(part.request->prompt) || part.n > part.n_logits;
        rows_[at->second].states.back() = is_prefill ? State::prefill : State::decode;
    }
}

void Timeline::leave(int64_t request) { row_of_.erase(request); }

std::string Timeline::text() const {
    std::string text;
    for (const Row& row : rows_) {
        text += std::string(row.first_step, ' ');
        for (const State state : row.states) text += ".pd-"[static_cast<int>(state)];
        text += '\n';
    }
    return text;
}

// ---------------------------------------------------------------------------------------------------------------------
// The picture

namespace {

using Color = Canvas::Color;
constexpr Color kInk{38, 38, 38}, kFaint{225, 225, 225};
constexpr int kWidth = 1120, kAbove = 36, kBelow = 30, kLegend = 34;
constexpr double kLeft = 24, kRight = 1096;
constexpr int64_t kMostRows = 2000;  // in a picture: of a batch of 100,000 requests it shows every 50th

// Of the states in their order. Okabe and Ito's colours (io/plot.cu).
constexpr struct {
    const char* name;
    Color color;
} kStates[] = {{"waiting", {214, 214, 214}},
               {"prefill", {230, 159, 0}},
               {"decode", {0, 114, 178}},
               {"interrupted: preempted, or no room in the step", {204, 121, 167}}};

void draw_legend(Canvas& canvas, int64_t each) {
    double x = kLeft;
    const double y = canvas.height() - 14.0;
    for (const auto& [name, color] : kStates) {
        canvas.fill(x, y - 12, x + 14, y + 2, color);
        canvas.text({x + 20, y}, name, 9, kInk);
        x += 20 + Canvas::text_width(name, 9) + 24;
    }
    canvas.text({x, y}, concat("columns: steps; rows: ", each > 1 ? concat("one of ", each, " ") : "", "requests"), 9,
                kInk);
}

}  // namespace

// Where a timeline is drawn: its upper edge, the height of a row, the width of a step, the steps between two ticks, and
// the requests of which one is drawn.
struct TimelinePanel {
    double top, row, step;
    int64_t tick, each;

    static int64_t n_requests(const Timeline& timeline) { return std::ssize(timeline.rows_); }

    void draw(Canvas& canvas, const std::string& title, const Timeline& timeline) const {
        const double bottom = top + row * static_cast<double>(ceil_div(n_requests(timeline), each));
        canvas.text({kLeft, top - 12}, title, 11, kInk, Canvas::Align::left, true);
        for (double x = kLeft, i = 0; x <= kRight + 0.5; x += static_cast<double>(tick) * step, ++i) {
            canvas.fill(x, top, x + 1, bottom + 4, kFaint);
            canvas.text({x, bottom + 18}, concat(static_cast<int64_t>(i) * tick), 9, kInk, Canvas::Align::center);
        }
        double y = top;
        for (int64_t request = 0; request < n_requests(timeline); request += each) {
            const auto& [first_step, states] = timeline.rows_[static_cast<size_t>(request)];
            double x = kLeft + static_cast<double>(first_step) * step;
            for (size_t i = 0, end; i < states.size(); i = end) {
                for (end = i; end < states.size() && states[end] == states[i];) ++end;
                const double right = x + static_cast<double>(end - i) * step;
                canvas.fill(x, y, right, y + row - (row > 4 ? 1 : 0), kStates[static_cast<size_t>(states[i])].color);
                x = right;
            }
            y += row;
        }
    }
};

void write_timelines_png(const std::string& path, std::span<const std::pair<std::string, Timeline>> all) {
    check(!all.empty(), path, ": there is no timeline to draw; give at least one");
    int64_t most_requests = 1, n_steps = 1, tick = 1;
    for (const auto& [title, timeline] : all) {
        most_requests = std::max(most_requests, TimelinePanel::n_requests(timeline));
        n_steps = std::max(n_steps, timeline.n_steps());
    }
    for (int i = 0; 12 * tick < n_steps; ++i) tick = i % 3 == 1 ? tick / 2 * 5 : tick * 2;  // 1, 2, 5, 10, 20, ...
    const int64_t each = ceil_div(most_requests * std::ssize(all), kMostRows);
    const double rows = static_cast<double>(ceil_div(most_requests, each)), row = std::clamp(360 / rows, 2.0, 14.0);
    const int height = kAbove + kBelow + static_cast<int>(std::ceil(row * rows));
    Canvas canvas(kWidth, static_cast<int>(all.size()) * height + kLegend);
    TimelinePanel panel{kAbove, row, (kRight - kLeft) / static_cast<double>(n_steps), tick, each};
    for (const auto& [title, timeline] : all) {
        panel.draw(canvas, title, timeline);
        panel.top += height;
    }
    draw_legend(canvas, each);
    canvas.save(path);
}
