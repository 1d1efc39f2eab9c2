// inference/timeline.cu: what each request does in each step, as a picture (Gantt chart).
//
// With static batching the rows of a batch begin together, and white fills the places of the short ones until the
// longest is done. With continuous batching the place of a request that ends is taken by the next one.
#include "inference/inference.h"

#include <algorithm>

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
        const bool is_prefill =
            part.first < static_cast<int64_t>(part.request->prompt.size()) || part.n > part.n_logits;
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

void write_timelines_png(const std::string& path, std::span<const std::pair<std::string, Timeline>> all) {
    using State = Timeline::State;
    using Color = Canvas::Color;
    constexpr Color ink{38, 38, 38}, faint{225, 225, 225};
    const auto color_of = [](State state) {
        switch (state) {
            case State::waiting: return Color{214, 214, 214};
            case State::prefill: return Color{230, 159, 0};
            case State::decode: return Color{0, 114, 178};
            default: return Color{204, 121, 167};
        }
    };
    size_t most_rows = 1;
    int64_t n_steps = 1;
    for (const auto& [title, timeline] : all) {
        most_rows = std::max(most_rows, timeline.rows_.size());
        n_steps = std::max(n_steps, timeline.n_steps_);
    }
    check(!all.empty(), path, ": there is no timeline to draw; give at least one");

    constexpr int above = 36, below = 30, legend = 34;
    constexpr double left = 24, right = 1096;
    const double row = std::clamp(360.0 / static_cast<double>(most_rows), 2.0, 14.0);
    const int panel = above + below + static_cast<int>(row * static_cast<double>(most_rows));
    Canvas canvas(1120, static_cast<int>(all.size()) * panel + legend);
    int64_t tick = 1;  // 1, 2, 5, 10, 20, ... steps
    for (int i = 0; 12 * tick < n_steps; ++i) tick = i % 3 == 1 ? tick / 2 * 5 : tick * 2;
    const double step = (right - left) / static_cast<double>(n_steps);
    double top = above;
    for (const auto& [title, timeline] : all) {
        const double bottom = top + row * static_cast<double>(timeline.rows_.size());
        canvas.text({left, top - 12}, title, 11, ink, Canvas::Align::left, true);
        for (int64_t at = 0; at <= n_steps; at += tick) {
            const double x = left + static_cast<double>(at) * step;
            canvas.fill(x, top, x + 1, bottom + 4, faint);
            canvas.text({x, bottom + 18}, concat(at), 9, ink, Canvas::Align::center);
        }
        for (size_t r = 0; r < timeline.rows_.size(); ++r) {
            const auto& [first_step, states] = timeline.rows_[r];
            const double y = top + static_cast<double>(r) * row;
            for (size_t i = 0, end; i < states.size(); i = end) {
                for (end = i; end < states.size() && states[end] == states[i];) ++end;
                const double x = left + static_cast<double>(first_step + static_cast<int64_t>(i)) * step;
                canvas.fill(x, y, x + static_cast<double>(end - i) * step, y + row - (row > 4 ? 1 : 0),
                            color_of(states[i]));
            }
        }
        top += panel;
    }
    double x = left;
    const std::pair<const char*, State> entries[] = {
        {"waiting", State::waiting},
        {"prefill", State::prefill},
        {"decode", State::decode},
        {"interrupted: preempted, or no room in the step", State::interrupted}};
    for (const auto& [text, state] : entries) {
        canvas.fill(x, canvas.height() - 26, x + 14, canvas.height() - 12, color_of(state));
        canvas.text({x + 20, canvas.height() - 14.0}, text, 9, ink);
        x += 20 + Canvas::text_width(text, 9) + 24;
    }
    canvas.text({x, canvas.height() - 14.0}, "columns: steps; rows: requests", 9, ink);
    canvas.save(path);
}
