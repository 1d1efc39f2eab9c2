// planning/pipeline_text.cu: --draw: a schedule of pipelines as text, a row per rank, time to the right.
//
//     rank 0  F0 F1       BW0-- F2 BW1-- F3 BW2--    BW3--
//     rank 1     F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3--
//
// F3: forward of micro-batch 3; B: backward by input, W: by weight, BW: both at once; small letters: the second stage
// of a rank.
//
// A column is so much time that each action has room for its name. Rows that are wider than the terminal are cut, and
// go on below; a name that begins before the cut is written in full there.
#include "planning/planning.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace {

// "3.5", "4", "1e-06"
std::string short_number(double value) {
    if (value < 1) return format("%.2g", value);
    std::string number = format("%.2f", value);
    number.erase(number.find_last_not_of('0') + 1);
    if (number.back() == '.') number.pop_back();
    return number;
}

// Text and colour of each column of a row.
struct Row {
    std::string text;
    std::vector<uint8_t> colors;  // 0: none
    std::vector<bool> in_name;    // a name goes on over the beginning of this column
    size_t behind_name(size_t column) const {
        while (column < text.size() && in_name[column]) ++column;
        return column;
    }
    void put(size_t at, const std::string& letters, uint8_t color) {
        for (size_t i = 0; i < letters.size() && at + i < text.size(); ++i)
            text[at + i] = letters[i], colors[at + i] = color;
    }
};

// Backgrounds of the terminal's 256 colours: forward, backward, backward_input, backward_weight; of two stages.
constexpr uint8_t kColors[2][4] = {{75, 216, 221, 79}, {32, 167, 172, 29}};
constexpr uint8_t kUpdateColor = 250;
bool is_dark(uint8_t color) { return std::ranges::find(kColors[1], color) != std::end(kColors[1]); }

// What is drawn of an action: "F3", "bw12".
std::string letters_of(const Action& a, int chunk) {
    static const char* const kLetters[2][4] = {{"F", "BW", "B", "W"}, {"f", "bw", "b", "w"}};
    return concat(kLetters[chunk % 2][static_cast<size_t>(a.what)], a.micro);
}

size_t name_length(Do what, size_t digits) { return (what == Do::backward ? 2 : 1) + digits; }

class Drawing {
  public:
    Drawing(const PipelineSchedule& schedule, const std::vector<std::vector<Span>>& ranks, size_t width)
        : s_(schedule), ranks_(ranks), label_(concat("rank ", schedule.p - 1, "  ").size()) {
        const size_t digits = concat(s_.m - 1).size(), room = std::max(width, label_ + 40) - label_;
        const double end = end_of(ranks);
        // Columns of a unit of time, with room for names and this many blanks behind each.
        const auto columns_for = [&](size_t blanks) {
            double most = 0;
            for (const std::vector<Span>& spans : ranks)
                for (const Span& span : spans)
                    if (computes(span.action.what))
                        most = std::max(most, static_cast<double>(name_length(span.action.what, digits) + blanks) /
                                                  (span.end - span.start));
            check(most > 0 && std::isfinite(most), "a drawing of a pipeline needs actions that take time");
            return most;
        };
        // With a blank behind each name, in which updates are shown; without, where it would be too wide.
        blank_ = s_.asynchronous || end * columns_for(1) <= static_cast<double>(room);
        columns_per_time_ = columns_for(blank_ ? 1 : 0);
        check(end * columns_per_time_ * s_.p <= kMostLetters, "a drawing of ", s_.p, " ranks in ",
              end * columns_per_time_,
              " columns is too large: use fewer ranks or micro-batches, or --times that differ less");
        n_columns_ = column(end);
        set_breaks(room, digits + (blank_ ? 2 : 1), name_length(Do::backward, digits));
    }

    std::string text(bool colored) const {
        std::vector<Row> rows;
        for (int rank = 0; rank < s_.p; ++rank) rows.push_back(row(rank));
        std::string out;
        for (size_t part = 0; part + 1 < breaks_.size(); ++part) {
            if (breaks_.size() > 2)
                out += concat(part == 0 ? "" : "\n", "from time ",
                              short_number(static_cast<double>(breaks_[part]) / columns_per_time_), ":\n");
            for (size_t rank = 0; rank < rows.size(); ++rank) {
                std::string name = concat("rank ", rank);
                name.resize(label_, ' ');
                const size_t first = rows[rank].behind_name(breaks_[part]);
                name.append(first - breaks_[part], ' ');
                out += name + cut(rows[rank], first, rows[rank].behind_name(breaks_[part + 1]), colored) + "\n";
            }
        }
        return out;
    }

  private:
    static constexpr double kMostLetters = 1e8;  // of all rows
    size_t column(double time) const { return static_cast<size_t>(std::lround(time * columns_per_time_)); }

    // Parts of about the same width, in whole units of columns; behind each there is room for the end of a name.
    void set_breaks(size_t room, size_t unit, size_t longest_name) {
        breaks_ = {0};
        if (n_columns_ > room) {
            const size_t most = (room - longest_name) / unit * unit, n_parts = ceil_div(n_columns_, most),
                         its_n = ceil_div(n_columns_, n_parts * unit) * unit;
            for (size_t at = its_n; at + longest_name < n_columns_; at += its_n) breaks_.push_back(at);
        }
        breaks_.push_back(n_columns_);
    }

    Row row(int rank) const {
        Row row{std::string(n_columns_, ' '), std::vector<uint8_t>(n_columns_, 0), std::vector<bool>(n_columns_)};
        for (const Span& span : ranks_[static_cast<size_t>(rank)]) {
            const size_t begin = column(span.start);
            size_t end = column(span.end);
            if (!computes(span.action.what)) {
                row.put(std::max<size_t>(end, 1) - 1, "|", kUpdateColor);
                continue;
            }
            end -= blank_ ? 1 : 0;
            const int chunk = pipeline_chunk(s_, rank, span.action);
            const uint8_t color = kColors[chunk % 2][static_cast<size_t>(span.action.what)];
            const std::string name = letters_of(span.action, chunk);
            row.put(begin, std::string(end - begin, '-'), color);
            row.put(begin, name, color);
            for (size_t i = 1; i < name.size() && begin + i < n_columns_; ++i) row.in_name[begin + i] = true;
        }
        return row;
    }

    static std::string cut(const Row& row, size_t first, size_t last, bool colored) {
        std::string out;
        uint8_t color = 0;
        while (last > first && row.text[last - 1] == ' ') --last;  // no blanks at the end
        for (size_t i = first; i < last; ++i) {
            if (colored && row.colors[i] != color) {
                color = row.colors[i];
                out += color == 0
                           ? "\033[0m"
                           : concat("\033[38;5;", is_dark(color) ? 231 : 16, ";48;5;", static_cast<int>(color), "m");
            }
            out += row.text[i];
        }
        return out + (color == 0 ? "" : "\033[0m");
    }

    const PipelineSchedule& s_;
    const std::vector<std::vector<Span>>& ranks_;
    const size_t label_;
    bool blank_ = true;
    double columns_per_time_ = 1;
    size_t n_columns_ = 0;
    std::vector<size_t> breaks_;  // columns where the parts begin, and the end
};

// The terminal's, or what fits on most pages.
size_t text_width() {
    winsize size{};
    const bool known = isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return known ? size.ws_col : 120;
}

bool wants_colors() {
    const char* const no_color = std::getenv("NO_COLOR");  // https://no-color.org
    return isatty(STDOUT_FILENO) && terminal_knows_escapes() && (!no_color || *no_color == 0);
}

template <class T>
std::string joined(const std::vector<T>& numbers) {
    std::string text;
    for (const T number : numbers) text += (text.empty() ? "" : " ") + short_number(static_cast<double>(number));
    return text;
}

void print_legend(const PipelineSchedule& s, const Times& times) {
    const StageTimes& t = times.stages[0];
    const size_t n_here = s.stages_of(0).size();
    std::printf("%s: %d ranks, %d micro-batches, %d stages", s.name.c_str(), s.p, s.m, s.n_stages);
    if (n_here > 1)
        std::printf(", %zu a rank (small letters: %s)", n_here,
                    s.placement == Placement::both_ways ? "the micro-batches that go up the ranks"
                    : n_here == 2                       ? "the second"
                                                        : "the second, the fourth, ...");
    std::printf("\n%sF forward %s", n_here > 1 ? "of a stage: " : "", short_number(t.forward).c_str());
    if (s.splits_backward)
        std::printf(", B backward by input %s, W by weight %s", short_number(t.backward_input).c_str(),
                    short_number(t.backward_weight).c_str());
    std::printf(", BW both %s, a message %s%s\n\n", short_number(t.backward_input + t.backward_weight).c_str(),
                short_number(times.message).c_str(), s.asynchronous ? ", | update" : "");
}

}  // namespace

int pipeline_chunk(const PipelineSchedule& s, int rank, const Action& action) {
    if (s.placement == Placement::both_ways) return s.rank_of(0, action.micro) == 0 ? 0 : 1;
    const std::vector<int> stages = s.stages_of(rank);
    return static_cast<int>(std::ranges::find(stages, action.stage) - stages.begin());
}

std::string pipeline_drawing(const PipelineSchedule& schedule, const std::vector<std::vector<Span>>& ranks,
                             size_t width, bool colored) {
    return Drawing(schedule, ranks, width).text(colored);
}

double end_of(const std::vector<std::vector<Span>>& ranks) {
    double end = 0;
    for (const std::vector<Span>& spans : ranks)
        if (!spans.empty()) end = std::max(end, spans.back().end);
    return end;
}

std::vector<double> peak_activations(const PipelineSchedule& s) {
    std::vector<double> peaks;
    for (int rank = 0; rank < s.p; ++rank)
        peaks.push_back(alive(s, rank).in_all * static_cast<double>(s.p) / s.n_stages);
    return peaks;
}

std::string pipeline_summary(const PipelineSchedule& s, double bubble) {
    return concat(s.name, " p ", s.p, " m ", s.m, ": bubble ", format("%.4f", bubble), ", peak activations ",
                  joined(peak_activations(s)), ", weight versions ", joined(s.versions));
}

std::string staleness_table(const PipelineSchedule& s, size_t width) {
    const size_t cell = std::max<size_t>(2, concat(s.m - 1).size()) + 1, label = 14;
    const size_t shown = std::min(static_cast<size_t>(s.m), (std::max<size_t>(width, 60) - label - 4) / cell);
    const std::string more = shown < static_cast<size_t>(s.m) ? " ..." : "";
    const auto line = [&](std::string name, const auto& number_of) {
        name.resize(label, ' ');
        for (size_t micro = 0; micro < shown; ++micro) {
            const std::string number = concat(number_of(micro));
            name += std::string(cell - number.size(), ' ') + number;
        }
        return name + more + "\n";
    };
    std::string out =
        "staleness: updates of a stage between the weights that a gradient is of and those that it changes\n";
    out += line("  micro-batch", [](size_t micro) { return micro; });
    const std::vector<std::vector<int>> late = staleness(s);
    for (size_t stage = 0; stage < late.size(); ++stage)
        out += line(concat("  stage ", stage), [&](size_t micro) { return late[stage][micro]; });
    return out;
}

namespace {

// --pipeline all: a line each; of those that such numbers of ranks and micro-batches cannot have, the reason.
void print_comparison(const TrainOptions& o, std::vector<DrawnPipeline>& drawn) {
    std::printf("%-12s %7s %7s  %-*s  %s\n", "schedule", "bubble", "time", static_cast<int>(3 * o.pp + 8),
                "peak activations", "weight versions");
    for (const std::string& name : schedule_names_of_pipelines()) {
        TrainOptions one = o;
        one.pipeline = name;
        try {
            const DrawnPipeline d = simulated_pipeline(one);
            std::printf("%-12s %7s %7s  %-*s  %s\n", name.c_str(), format("%.4f", d.simulation.bubble).c_str(),
                        short_number(d.simulation.end).c_str(), static_cast<int>(3 * o.pp + 8),
                        joined(peak_activations(d.schedule)).c_str(), joined(d.schedule.versions).c_str());
            drawn.push_back(d);
        } catch (const Error& error) {
            std::printf("%-12s %s\n", name.c_str(), error.what());
        }
    }
}

}  // namespace

DrawnPipeline simulated_pipeline(const TrainOptions& o) {
    ScheduleOptions options = schedule_options(o, o.micro_batches);
    for (options.per_update = std::min(options.p, options.m); options.m % options.per_update != 0;)
        ++options.per_update;
    DrawnPipeline drawn{make_schedule(options), o.pipeline_times, {}};
    const double part = static_cast<double>(drawn.schedule.p) / drawn.schedule.n_stages;  // that a stage is of a rank
    for (double* time : {&drawn.times.stages[0].forward, &drawn.times.stages[0].backward_input,
                         &drawn.times.stages[0].backward_weight})
        *time *= part;
    drawn.simulation = simulate(drawn.schedule, drawn.times);
    return drawn;
}

void draw_pipelines(const TrainOptions& o) {
    std::vector<DrawnPipeline> drawn;
    std::string last_line;
    if (o.pipeline == "all") {
        print_comparison(o, drawn);
    } else {
        drawn.push_back(simulated_pipeline(o));
        const auto& [schedule, times, simulation] = drawn[0];
        print_legend(schedule, times);
        std::printf("%s\n", pipeline_drawing(schedule, simulation.ranks, text_width(), wants_colors()).c_str());
        if (schedule.asynchronous) std::printf("%s\n", staleness_table(schedule, text_width()).c_str());
        last_line = pipeline_summary(schedule, simulation.bubble) + "\n";
    }
    if (!o.out.empty()) {
        make_folder(o.out);
        write_pipeline_panels(o.out + "/schedule.png", schedule_panels(drawn));
        write_pipeline_trace(o.out + "/schedule.json", schedule_panels(drawn));
        std::printf("written: %s/schedule.png, and %s/schedule.json for ui.perfetto.dev\n", o.out.c_str(),
                    o.out.c_str());
    }
    std::printf("%s", last_line.c_str());
}
