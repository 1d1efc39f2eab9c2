// --draw: what is printed and drawn of a schedule is what its table and its simulation say; a run's trace beside what
// was predicted; and what the flags of pipelines refuse.
//
//   run:   build/cpu/run_tests -# "[#test_pipeline_drawing]"
#include <cmath>
#include <regex>

#include "json.h"
#include "planning/planning.h"
#include "program.h"
#include "run_models.h"
#include "stb_image.h"
#include "train_runs.h"

namespace {

using Ranks = std::vector<std::vector<Span>>;

PipelineSchedule made(const std::string& name, int p, int m) {
    ScheduleOptions o;
    o.name = name, o.p = p, o.m = m, o.per_update = p;
    return make_schedule(o);
}

constexpr size_t kLabel = std::string_view("rank 0  ").size();  // of up to ten ranks

struct Case {
    std::string name;
    int p, m;
};
// Every schedule, with numbers that all of them can have, and some with others.
std::vector<Case> cases() {
    std::vector<Case> all = {{"1f1b", 3, 7},  {"gpipe", 2, 1}, {"interleaved", 3, 12}, {"zb-h1", 5, 11},
                             {"zb-v", 3, 13}, {"2bw", 3, 9},   {"pipedream", 3, 11}};
    for (const std::string& name : schedule_names_of_pipelines())
        for (const int m : {12, 24}) all.push_back({name, 4, m});
    return all;
}

std::vector<Action> computing_of(const PipelineSchedule& s, int rank) {
    std::vector<Action> actions;
    for (const Action& a : s.ranks[static_cast<size_t>(rank)])
        if (computes(a.what)) actions.push_back(a);
    return actions;
}

std::string plain(const std::string& colored) { return std::regex_replace(colored, std::regex("\033\\[[0-9;]*m"), ""); }

// The rows of a drawing, with the parts that are below each other put together again. unit: columns of a unit of time.
std::map<std::string, std::string> rows_of(const std::string& drawing, size_t width, double unit) {
    std::map<std::string, std::string> rows;
    size_t first = 0;  // column where the part begins
    std::istringstream lines(drawing);
    for (std::string line; std::getline(lines, line);) {
        CHECK(line.size() <= width);
        if (line.starts_with("from time ")) first = static_cast<size_t>(std::lround(unit * std::stod(line.substr(10))));
        if (!line.starts_with("rank ")) continue;
        std::string& row = rows[line.substr(0, line.find(' ', 5))];
        const size_t label = line.find_first_not_of(' ', line.find(' ', 5));
        if (label == std::string::npos) continue;
        // A name that the part above shows as a whole leaves blanks here.
        const size_t begin = first + label - kLabel;
        CHECK(begin >= row.size());
        CHECK_FALSE(std::isdigit(line[label]));
        row.resize(begin, ' ');
        row += line.substr(label);
        CHECK_FALSE(std::isalpha(row.back()));
    }
    return rows;
}

// Width, height and the colours of a PNG, as 0xrrggbb.
struct Image {
    int width = 0, height = 0;
    std::vector<int> pixels;
    std::map<int, int64_t> colors;  // pixels of each
    int at(double x, double y) const {
        return pixels.at(static_cast<size_t>(y) * static_cast<size_t>(width) + static_cast<size_t>(x));
    }
    explicit Image(const std::string& path) {
        int channels = 0;
        uint8_t* rgb = stbi_load(path.c_str(), &width, &height, &channels, 3);
        REQUIRE(rgb != nullptr);
        for (int64_t i = 0; i < int64_t{width} * height; ++i) {
            pixels.push_back(rgb[3 * i] << 16 | rgb[3 * i + 1] << 8 | rgb[3 * i + 2]);
            ++colors[pixels.back()];
        }
        stbi_image_free(rgb);
    }
};

struct Drawn {
    std::string letters;
    int micro;
    size_t column, n_columns;
};
std::vector<Drawn> names_in(const std::string& row) {
    std::vector<Drawn> names;
    const std::regex pattern("([FfBbWw]+)([0-9]+)-*");
    for (std::sregex_iterator at(row.begin(), row.end(), pattern), end; at != end; ++at)
        names.push_back(
            {(*at)[1], std::stoi((*at)[2]), static_cast<size_t>(at->position()), static_cast<size_t>(at->length())});
    return names;
}

}  // namespace

TEST_CASE("--draw prints every action of a schedule once, in its order and at its time", "[pipeline]") {
    const std::map<Do, std::string> letters = {
        {Do::forward, "F"}, {Do::backward, "BW"}, {Do::backward_input, "B"}, {Do::backward_weight, "W"}};
    for (const auto& [name, p, m] : cases())
        for (const size_t width : {60, 90, 400}) {
            CAPTURE(name, p, m, width);
            const PipelineSchedule s = made(name, p, m);
            const Simulation simulation = simulate(s, {});
            const std::string text = pipeline_drawing(s, simulation.ranks, width, false);
            CHECK(plain(pipeline_drawing(s, simulation.ranks, width, true)) == text);
            // Columns of a unit of time: letter and digits, and a blank where there is room.
            const std::string begin = text.substr(text.find("rank 0") + kLabel);
            const double unit = static_cast<double>(names_in(begin).at(1).column) / simulation.ranks[0].at(1).start;
            const auto rows = rows_of(text, width, unit);
            REQUIRE(static_cast<int>(rows.size()) == p);
            const double digits = static_cast<double>(concat(m - 1).size());
            const bool has_blanks =
                s.asynchronous || simulation.end * (digits + 2) <= static_cast<double>(width - kLabel);
            CHECK(unit == digits + (has_blanks ? 2 : 1));
            for (int rank = 0; rank < p; ++rank) {
                const std::string& row = rows.at(concat("rank ", rank));
                const std::vector<Drawn> names = names_in(row);
                const std::vector<Action> actions = computing_of(s, rank);
                REQUIRE(names.size() == actions.size());
                std::vector<Span> spans;
                for (const Span& span : simulation.ranks[static_cast<size_t>(rank)])
                    if (computes(span.action.what)) spans.push_back(span);
                for (size_t i = 0; i < names.size(); ++i) {
                    CAPTURE(rank, i);
                    std::string wanted = letters.at(actions[i].what);
                    // Of micro-batches that go up the ranks, rank r has the stage p - 1 - r.
                    const bool is_second =
                        s.placement == Placement::both_ways ? actions[i].stage != rank : actions[i].stage / p % 2 == 1;
                    CHECK(pipeline_chunk(s, rank, actions[i]) % 2 == (is_second ? 1 : 0));
                    if (is_second)
                        for (char& c : wanted) c = static_cast<char>(std::tolower(c));
                    CHECK(names[i].letters == wanted);
                    CHECK(names[i].micro == actions[i].micro);
                    CHECK(static_cast<double>(names[i].column) == unit * spans[i].start);
                }
                CHECK(std::count(row.begin(), row.end(), '|') == (s.asynchronous ? m / s.per_update : 0));
            }
        }
}

TEST_CASE("--draw of small pipelines, to the letter", "[pipeline]") {
    const auto drawn = [](const std::string& name, size_t width, bool colored) {
        const PipelineSchedule s = made(name, 2, 2);
        return pipeline_drawing(s, simulate(s, {}).ranks, width, colored);
    };
    const std::string one = "rank 0  F0 F1       BW0--    BW1--\nrank 1     F0 BW0-- F1 BW1--\n";
    for (const size_t width : {1, 48, 120}) CHECK(drawn("1f1b", width, false) == one);
    // Black letters in light colors of the first stage, white ones in dark colors of the second.
    const std::string F = "\033[38;5;16;48;5;75m", BW = "\033[38;5;16;48;5;216m", f = "\033[38;5;231;48;5;32m",
                      bw = "\033[38;5;231;48;5;167m", off = "\033[0m";
    const auto row = [&](const std::string& begin, const std::string& middle) {
        return begin + F + "F0" + off + " " + F + "F1" + off + " " + f + "f0" + off + " " + middle + BW + "BW0--" +
               off + " " + BW + "BW1--" + off + "\n";
    };
    CHECK(drawn("interleaved", 120, true) ==
          row("rank 0  ", f + "f1" + off + "       " + bw + "bw0--" + off + "    " + bw + "bw1--" + off + " ") +
              row("rank 1     ", bw + "bw0--" + off + " " + f + "f1" + off + " " + bw + "bw1--" + off + " "));
}

TEST_CASE("--draw has parts of about the same width below each other, where a row is wider than the terminal",
          "[pipeline]") {
    const PipelineSchedule s = made("1f1b", 3, 59);
    const Simulation simulation = simulate(s, {});
    const auto drawn = [&](size_t width) { return pipeline_drawing(s, simulation.ranks, width, false); };
    CHECK(drawn(1) == drawn(48));
    for (size_t width = 48; width < 560; ++width) {
        CAPTURE(width);
        std::istringstream lines(drawn(width));
        std::vector<double> begins;
        for (std::string line; std::getline(lines, line);) {
            CHECK(line.size() <= width);
            if (line.starts_with("from time ")) begins.push_back(std::stod(line.substr(10)));
        }
        CHECK(begins.empty() == (3 * simulation.end <= static_cast<double>(width - kLabel)));
        if (begins.empty()) continue;
        // No part is shorter than others, but for rounding, and none than a name: BW58.
        const double first = begins.at(1), n = static_cast<double>(begins.size());
        for (size_t i = 0; i < begins.size(); ++i) CHECK(begins[i] == static_cast<double>(i) * first);
        CHECK(simulation.end - begins.back() > first - n);
        CHECK(3 * (simulation.end - begins.back()) > 4);
    }
}

TEST_CASE("--draw has room for each name, whatever the durations are", "[pipeline]") {
    for (const auto& [name, p, m] : cases())
        for (const StageTimes& stage : {StageTimes{3, 1, 1}, {3.7, 0.6, 0.5}, {0.4, 5, 0.3}}) {
            CAPTURE(name, p, m, stage.forward);
            const PipelineSchedule s = made(name, p, m);
            const std::string text =
                pipeline_drawing(s, simulate(s, {.stages = {stage}, .message = 0.3}).ranks, 100, false);
            std::map<std::string, std::vector<int>> micro_batches;  // of the names in a rank's rows
            std::istringstream lines(text);
            for (std::string line; std::getline(lines, line);)
                for (const Drawn& drawn : names_in(line.substr(std::min(line.size(), kLabel))))
                    if (line.starts_with("rank ")) micro_batches[line.substr(0, 6)].push_back(drawn.micro);
            for (int rank = 0; rank < p; ++rank) {
                std::vector<int> wanted;
                for (const Action& a : computing_of(s, rank)) wanted.push_back(a.micro);
                CHECK(micro_batches[concat("rank ", rank)] == wanted);
            }
        }
}

TEST_CASE("the last line of --draw is what the table and the simulator say", "[pipeline]") {
    const std::regex contract(
        "(\\S+) p (\\d+) m (\\d+): bubble (\\d\\.\\d{4}), peak activations ([0-9. ]+), "
        "weight versions ([0-9 ]+)");
    const auto numbers = [](const std::string& text) {
        std::istringstream words(text);
        return std::vector<double>(std::istream_iterator<double>(words), {});
    };
    for (const auto& [name, p, m] : cases()) {
        CAPTURE(name, p, m);
        const PipelineSchedule s = made(name, p, m);
        const Simulation simulation = simulate(s, {});
        const std::string line = pipeline_summary(s, simulation.bubble);
        std::smatch parts;
        REQUIRE(std::regex_match(line, parts, contract));
        CHECK(parts[1] == name);
        CHECK(std::stoi(parts[2]) == p);
        CHECK(std::stoi(parts[3]) == m);
        CHECK(std::abs(std::stod(parts[4]) - simulation.bubble) <= 0.5e-4 + 1e-12);  // four digits
        const std::vector<double> peaks = numbers(parts[5]), versions = numbers(parts[6]);
        REQUIRE(static_cast<int>(peaks.size()) == p);
        CHECK(versions == std::vector<double>(s.versions.begin(), s.versions.end()));
        for (int rank = 0; rank < p; ++rank) {  // counted again, from the spans
            double now = 0, most = 0;
            for (const Span& span : simulation.ranks[static_cast<size_t>(rank)]) {
                const Do what = span.action.what;
                now += what == Do::forward ? 1 : what == Do::backward || what == Do::backward_weight ? -1 : 0;
                most = std::max(most, now);
            }
            const double stages_of_a_micro_batch = static_cast<double>(s.n_stages) / p;
            CHECK(std::abs(peaks[static_cast<size_t>(rank)] - most / stages_of_a_micro_batch) <= 0.005);
        }
    }
}

TEST_CASE("--draw of updates after several micro-batches: as many as ranks, or the next number that divides all",
          "[pipeline]") {
    TrainOptions o;
    o.pipeline = "2bw", o.pp = 3;
    for (const auto& [m, wanted] : {std::pair(9, 3), {8, 4}, {7, 7}}) {
        o.micro_batches = m;
        CHECK(simulated_pipeline(o).schedule.per_update == wanted);
    }
}

TEST_CASE("--draw says how old each gradient is, of as many micro-batches as fit", "[pipeline]") {
    const std::string first_line =
        "staleness: updates of a stage between the weights that a gradient is of and those that it changes\n";
    CHECK(staleness_table(made("pipedream", 3, 4), 60) == first_line +
                                                              "  micro-batch   0  1  2  3\n"
                                                              "  stage 0       0  1  2  2\n"
                                                              "  stage 1       0  1  1  1\n"
                                                              "  stage 2       0  0  0  0\n");
    CHECK(staleness_table(made("pipedream", 1, 200), 60) ==
          first_line +
              "  micro-batch    0   1   2   3   4   5   6   7   8   9 ...\n"
              "  stage 0        0   0   0   0   0   0   0   0   0   0 ...\n");
    CHECK(staleness_table(made("pipedream", 1, 200), 10) == staleness_table(made("pipedream", 1, 200), 60));
}

TEST_CASE("--draw with --out writes a picture and a trace", "[pipeline][program]") {
    const TempFolder folder;
    const std::string out = folder / "new/folder";
    const std::string one =
        printed_by("train_gpt", "--pipeline zb-v --pp 3 --micro-batches 7 --draw --times 2,1,1,0.5 --out " + out);
    const PipelineSchedule s = made("zb-v", 3, 7);
    Times times{.stages = {{1, 0.5, 0.5}}, .message = 0.5};  // a stage is half of what a rank has
    const Simulation simulation = simulate(s, times);
    CHECK(one.find("\n" + pipeline_summary(s, simulation.bubble) + "\n") + pipeline_summary(s, 0).size() + 2 ==
          one.size());
    CHECK_THAT(one, ContainsSubstring("zb-v: 3 ranks, 7 micro-batches, 6 stages, 2 a rank (small letters: the "
                                      "second)\nof a stage: F forward 1, B backward by input 0.5, W by weight 0.5, "
                                      "BW both 1, a message 0.5\n\n"));
    CHECK_THAT(one, !ContainsSubstring("staleness"));

    size_t n = 0;
    const auto trace = parsed_json(slurp(out + "/schedule.json"));
    for (const auto& event : trace["traceEvents"]) {
        if (event["ph"] != "X") continue;
        ++n;
        const std::vector<Span>& spans = simulation.ranks[as<size_t>(event["tid"])];
        const auto span = std::find_if(spans.begin(), spans.end(), [&](const Span& one_span) {
            return action_text(one_span.action) == as<std::string>(event["name"]);
        });
        REQUIRE(span != spans.end());
        CHECK(as<double>(event["ts"]) == 1000 * span->start);
        CHECK(as<double>(event["dur"]) == 1000 * (span->end - span->start));
    }
    CHECK(n == 3 * 2 * 3 * 7);

    const Image picture(out + "/schedule.png");
    for (const int color : {0x78afe1, 0x235aa0, 0xfab95f, 0xc36414, 0x7dc8a5, 0x1e785a, 0xbe1428})
        CHECK(picture.colors.count(color) == 1);  // F, B, W of both stages, and the critical path
    CHECK_THAT(printed_by("train_gpt", "--pipeline 1f1b --pp 2 --micro-batches 2 --draw --times 1e-6,2e-3,2e-3,0"),
               ContainsSubstring("F forward 1e-06, BW both 0.004, a message 0\n"));
    const std::string all = printed_by("train_gpt", "--pipeline all --pp 4 --micro-batches 7 --draw --out " + out);
    CHECK(Image(out + "/schedule.png").height > 8 * picture.height);
    for (const std::string& name : schedule_names_of_pipelines()) CHECK_THAT(all, ContainsSubstring("\n" + name + " "));
}

TEST_CASE("the picture of pipelines has each action and what is kept at its place", "[pipeline]") {
    const TempFolder folder;
    std::vector<DrawnPipeline> drawn;
    // The last one takes three times as long, is cut, and does not change the scale of the others.
    for (const auto& [name, time] : {std::pair("zb-v", 0.5), {"1f1b", 1.0}, {"1f1b", 3.0}}) {
        const PipelineSchedule s = made(name, 2, 4);
        const Times times{.stages = {{time, time, time}}};
        drawn.push_back({s, times, simulate(s, times)});
    }
    write_pipeline_panels(folder / "x.png", schedule_panels(drawn));
    const Image picture(folder / "x.png");
    const double duration = std::max(drawn[0].simulation.end, drawn[1].simulation.end);
    const auto x_of = [&](double t) { return 70 + t / duration * (1280 - 70 - 90); };
    double most = 0;
    for (const DrawnPipeline& each : drawn)
        for (const double peak : peak_activations(each.schedule)) most = std::max(most, peak);
    const std::map<Do, std::pair<int, int>> colors = {{Do::forward, {0x78afe1, 0x235aa0}},
                                                      {Do::backward, {0xfab95f, 0xc36414}},
                                                      {Do::backward_input, {0xfab95f, 0xc36414}},
                                                      {Do::backward_weight, {0x7dc8a5, 0x1e785a}}};
    size_t n_bars = 0;
    for (size_t panel = 0; panel < drawn.size(); ++panel) {
        const PipelineSchedule& s = drawn[panel].schedule;
        for (int rank = 0; rank < 2; ++rank) {
            const double top = 40 + static_cast<double>(panel) * (52 + 2 * 36 + 34 + 6) + 52 + rank * 36;
            double kept = 0;  // by the rank, while it does an action
            for (const Span& span : drawn[panel].simulation.ranks[static_cast<size_t>(rank)]) {
                const Do what = span.action.what;
                if (what == Do::forward) kept += 2.0 / s.n_stages;
                const double x = x_of(span.start + 0.2 * (span.end - span.start));
                INFO(s.name << " rank " << rank << ": " << action_text(span.action));
                if (x < x_of(duration) - 4) {
                    const auto& [first, second] = colors.at(what);
                    const bool is_second = pipeline_chunk(s, rank, span.action) == 1;
                    CHECK(picture.at(x, top + 4) == (is_second ? second : first));
                    if (what == Do::backward) CHECK(picture.at(x, top + 17) == 0x7dc8a5);
                    int height = 0;
                    for (int y = 20; y < 32; ++y) height += picture.at(x, top + y) == 0x9696b9;
                    CHECK(height == Approx(10 * kept / most).margin(1.1));
                    ++n_bars;
                }
                if (what == Do::backward || what == Do::backward_weight) kept -= 2.0 / s.n_stages;
            }
        }
    }
    CHECK(n_bars > 2 * (4 * 6 + 4 * 2));
    int n_tick_pixels = 0;  // of 5 to 13 ticks
    for (int x = 60; x < 1200; ++x) n_tick_pixels += picture.at(x, 40 + 52 + 2 * 36) != 0xffffff;
    CHECK(n_tick_pixels >= 5);
    CHECK(n_tick_pixels < 40);
    // Dark colours stand in the legend where ranks have two stages.
    const auto dark_in_legend = [](const Image& image) {
        return std::count(image.pixels.begin(), image.pixels.begin() + int64_t{40} * image.width, 0x235aa0);
    };
    CHECK(dark_in_legend(picture) > 0);
    write_pipeline_panels(folder / "x.png", schedule_panels({drawn[1]}));
    CHECK(dark_in_legend(Image(folder / "x.png")) == 0);

    std::vector<PipelinePanel> panels = schedule_panels(drawn);
    panels[1].seconds = true;
    write_pipeline_trace(folder / "x.json", panels);
    const Json::Value trace = parsed_json(slurp(folder / "x.json"));
    std::vector<double> ends(3);  // in microseconds; of a schedule a unit is a millisecond
    for (const Json::Value& event : trace["traceEvents"])
        if (event["ph"] == "X")
            ends.at(as<size_t>(event["pid"])) =
                std::max(ends[as<size_t>(event["pid"])], as<double>(event["ts"]) + as<double>(event["dur"]));
    for (size_t i = 0; i < 3; ++i) CHECK(ends[i] == Approx((i == 1 ? 1e6 : 1e3) * drawn[i].simulation.end));

    CHECK(panel_subtitle(drawn[1].schedule, 0.2) == "bubble 20 %; activations kept at most, by rank: 2 1");
    CHECK(panel_subtitle(drawn[0].schedule, -0.1) == "bubble 0 %; activations kept at most, by rank: 2 2");
    CHECK(panel_subtitle(made("pipedream", 2, 4), 0.2) ==
          "bubble 20 %; activations kept at most, by rank: 2 1; versions of the weights: 2 1; 2 late: a gradient of "
          "weights that are 2 updates old");
}

TEST_CASE("the picture of a pipeline says of a gradient how many updates old its weights are", "[pipeline]") {
    const TempFolder folder;
    const PipelineSchedule s = made("pipedream", 2, 3);
    const Times times;
    write_pipeline_panels(folder / "x.png", schedule_panels({{s, times, simulate(s, times)}}));
    const Image picture(folder / "x.png");
    const Simulation run = simulate(s, times);
    const std::vector<std::vector<int>> late = staleness(s);
    CHECK(late[0].back() > 0);
    for (const Span& span : run.ranks[0]) {
        if (!computes(span.action.what)) continue;
        const bool is_forward = span.action.what == Do::forward;
        const int updates = late[0][static_cast<size_t>(span.action.micro)];
        const auto x_of = [&](double t) { return std::round(70 + t / run.end * (1280 - 70 - 90)); };
        const double left = x_of(span.start), right = x_of(span.end), top = 40 + 52;
        Canvas bar(picture.width, picture.height);  // the same bar
        if (is_forward) bar.fill(left, top, right, top + 20, {120, 175, 225});
        else
            bar.fill(left, top, right, top + 14, {250, 185, 95}),
                bar.fill(left, top + 14, right, top + 20, {125, 200, 165});
        bar.text(
            {(left + right) / 2, top + 14},
            is_forward || updates == 0 ? concat(span.action.micro) : concat(span.action.micro, ": ", updates, " late"),
            9, {40, 40, 40}, Canvas::Align::center);
        INFO(action_text(span.action));
        int n_different = 0;
        for (int y = static_cast<int>(top) + 3; y < static_cast<int>(top) + 17; ++y)
            for (int x = static_cast<int>(left) + 3; x < static_cast<int>(right) - 3; ++x) {
                const uint8_t* const rgb = &bar.rgb()[static_cast<size_t>(3 * (y * picture.width + x))];
                n_different += picture.at(x, y) != (rgb[0] << 16 | rgb[1] << 8 | rgb[2]);
            }
        CHECK(n_different == 0);
    }
}

TEST_CASE("the picture of many micro-batches shows what they compute, and not only outlines and updates",
          "[pipeline][program]") {
    const TempFolder folder;
    for (const std::string name : {"1f1b", "pipedream"}) {
        INFO(name);
        const std::string drawn =
            printed_by("train_gpt", "--pipeline " + name + " --pp 2 --micro-batches 500 --draw --out " + folder.path);
        CHECK_THAT(drawn,
                   Catch::Matchers::StartsWith(name +
                                               ": 2 ranks, 500 micro-batches, 2 stages\nF forward 1, BW both 2, a "
                                               "message 0" +
                                               (name == "1f1b" ? "\n\n" : ", | update\n\n")));
        CHECK((drawn.find("\nstaleness: ") != std::string::npos) == (name == "pipedream"));
        const Image picture(folder / "schedule.png");
        const auto share = [&](int color) {  // of the two lanes, which are 20 pixels high and about 1120 wide
            const auto at = picture.colors.find(color);
            return at == picture.colors.end() ? 0 : static_cast<double>(at->second) / (2 * 20 * 1120);
        };
        CHECK(share(0x78afe1) > 0.25);  // F: a third of the time
        CHECK(share(0xfab95f) > 0.35);  // BW: two thirds, of which the upper seven tenths have this color
        CHECK(share(0xbe1428) > 0);     // the critical path
    }
}

TEST_CASE("--draw has colors only in a terminal that knows them, and where NO_COLOR is not set",
          "[pipeline][program]") {
    if (run_shell("command -v script").status != 0) return;  // it runs a command in a terminal of its own
    const TempFolder folder;
    for (const auto& [variables, colored] : std::vector<std::pair<std::string, bool>>{
             {"TERM=xterm NO_COLOR=", true}, {"TERM=xterm NO_COLOR=1", false}, {"TERM=dumb NO_COLOR=", false}}) {
        const Outcome drawn =
            run_shell(concat(variables, " script -qec 'stty cols 0; ", program_path("train_gpt"),
                             " --pipeline 1f1b --pp 2 --micro-batches 8 --draw' ", folder / "typescript"));
        INFO(variables);
        CHECK(drawn.status == 0);
        CHECK_THAT(drawn.out,
                   !ContainsSubstring("from time"));  // 89 columns, of a terminal that does not say how many it has
        CHECK((drawn.out.find('\033') != std::string::npos) == colored);
    }
}

TEST_CASE("the trace of a run becomes the spans of its schedule, with the times that they took", "[pipeline]") {
    const TempFolder folder;
    for (const auto& [name, p, m] : cases()) {
        CAPTURE(name, p, m);
        const PipelineSchedule s = made(name, p, m);
        Times times;
        times.stages.clear();
        for (int stage = 0; stage < s.n_stages; ++stage)
            times.stages.push_back({1e-3 * (3 + stage % 3), 1e-3 * (2 + stage % 2), s.splits_backward ? 2.5e-3 : 0});
        times.update = s.asynchronous ? 4e-4 : 0;
        times.message = 2e-4;
        const Ranks simulated = simulate(s, times).ranks;
        std::vector<TraceEvent> events;
        std::vector<int> world_ranks;
        for (int rank = 0; rank < p; ++rank) {
            const int world = 2 * (p - rank) + 1;  // those between them belong to another pipeline
            world_ranks.push_back(world);
            for (const Span& span : simulated[static_cast<size_t>(rank)]) {
                TraceEvent e{
                    .rank = world, .start = 7.5 + span.start, .end = 7.5 + span.end, .what = action_text(span.action)};
                TraceEvent other = e, rest = e;
                other.rank = world - 1;
                e.end = rest.start = 7.5 + (span.start + span.end) / 2;  // a name inside it cuts the event
                rest.what = "forward of block 3";
                for (const TraceEvent& event : {rest, other, e}) events.push_back(event);
            }
            events.push_back({.rank = world, .start = 9e3, .end = 9.1e3, .what = "norm"});
            events.push_back(
                {.kind = TraceEvent::sending, .rank = world, .peer = 0, .start = 1, .end = 2, .what = "F0 of stage 0"});
        }
        const Ranks measured = traced_spans(events, s, world_ranks);
        for (size_t rank = 0; rank < measured.size(); ++rank) {
            REQUIRE(measured[rank].size() == simulated[rank].size());
            for (size_t i = 0; i < measured[rank].size(); ++i) {
                CHECK(measured[rank][i].action == simulated[rank][i].action);
                CHECK(std::abs(measured[rank][i].start - simulated[rank][i].start) < 1e-12);  // of 7.5: 2^-50
                CHECK(std::abs(measured[rank][i].end - simulated[rank][i].end) < 1e-12);
            }
        }
        const ComparedPipeline both = compare_pipeline(s, measured);
        CHECK(std::abs(both.times.update - times.update) < 1e-12);
        CHECK(std::abs(both.times.message - (p > 1 ? times.message : 0)) < 1e-12);
        for (int stage = 0; stage < s.n_stages; ++stage)
            for (const Do what : {Do::forward, Do::backward, Do::backward_input, Do::backward_weight}) {
                bool has = false;
                for (const auto& actions : s.ranks)
                    for (const Action& a : actions) has = has || (a.what == what && a.stage == stage);
                if (has) CHECK(std::abs(both.times.of({what, 0, stage}) - times.of({what, 0, stage})) < 1e-12);
            }
        CHECK(std::abs(bubble_of(both.predicted) - bubble_of(both.measured)) < 1e-9);
        CHECK(!both.critical_path.empty());
        Ranks incomplete = measured;
        incomplete[0].pop_back();
        CHECK(compare_pipeline(s, incomplete).critical_path.empty());  // what the end waits for was perhaps not seen
        if (p == 4) continue;
        write_pipeline_picture(folder.path, both);
        CHECK(Image(folder / "pipeline.png").colors[0x78afe1] > 1000);
        CHECK(parsed_json(slurp(folder / "pipeline.json"))["traceEvents"].size() > 2 * events.size() / 4);
    }
}

TEST_CASE("a message takes the median of the times that ranks have waited for one", "[pipeline]") {
    const auto forward = [](int micro, int stage, double start, double end) {
        return Span{{Do::forward, micro, stage}, start, end};
    };
    // Rank 1 waits 0.1, 0.9 and 0.2 for the first three. For the last, which comes while it computes, it does not.
    const Ranks measured = {
        {forward(0, 0, 0, 1), forward(1, 0, 1, 2), forward(2, 0, 2, 4), forward(3, 0, 4, 5)},
        {forward(0, 1, 1.1, 1.5), forward(1, 1, 2.9, 3.5), forward(2, 1, 4.2, 6), forward(3, 1, 6, 7)}};
    CHECK(measured_times(made("gpipe", 2, 4), measured).message == Approx(0.2));
}

TEST_CASE("flags of pipelines that cannot be are refused in one line", "[pipeline][program]") {
    const std::vector<std::pair<std::string, std::string>> refused = {
        {"--pp 0", "--pp must be at least 1"},
        {"--pp -2", "--pp must be at least 1"},
        {"--pp 3 --ranks 4", "--pp 3: the 4 ranks cannot be divided into groups of 3"},
        {"--pp 2 --tp 2 --ranks 2", "--tp 2 --pp 2: the 2 ranks"},
        {"--pp 2 --ranks 2 --pipeline zbv", "--pipeline zbv: use naive, gpipe, 1f1b"},
        {"--pipeline gpipe", "--pipeline has no effect without --pp"},
        {"--pp 2 --ranks 2 --pipeline all", "--pipeline all: use naive"},
        {"--pp 2 --ranks 2 --stages 1,2,3",
         "--stages 1,2,3: it has 3 numbers, and --pp 2 --pipeline 1f1b has 2 stages"},
        {"--pp 2 --ranks 2 --stages 3,0", "each stage has at least one block"},
        {"--pp 2 --ranks 2 --stages 3,", "--stages : give a whole number"},
        {"--pp 2 --ranks 2 --pipeline interleaved --chunks 0", "--chunks must be at least 1"},
        {"--pp 2 --ranks 2 --chunks 2", "--chunks has no effect with --pipeline 1f1b"},
        {"--pp 2 --ranks 2 --vertical-sync", "--vertical-sync has no effect with --pipeline 1f1b"},
        {"--pp 2 --ranks 2 --flush-every 10", "--flush-every has no effect with --pipeline 1f1b"},
        {"--pp 2 --ranks 2 --micro-batches 3", "--micro-batches 3: the --batch, 16 sequences, cannot be divided"},
        {"--pp 2 --ranks 2 --micro-batches 2 --micro-batch 2", "say the same in two ways"},
        {"--pp 2 --ranks 2 --zero 2", "--zero 2 with --pp"},
        {"--pp 2 --ranks 2 --offload optimizer", "--offload with --pp"},
        {"--pp 2 --ranks 2 --pipeline zb-h1 --recompute full", "--recompute full with --pipeline zb-h1"},
        {"--pp 2 --ranks 2 --pipeline zb-h1 --head-chunks 2", "--head-chunks with --pipeline zb-h1"},
        {"--pp 2 --ranks 2 --pipeline pipedream", "--pipeline pipedream with --clip 1"},
        {"--pp 2 --ranks 2 --pipeline pipedream --clip 0 --micro-batches 2", "a step has one, and not 2"},
        {"--pp 2 --ranks 2 --pipeline 2bw --clip 0", "use --micro-batches 2"},
        {"--pp 2 --ranks 2 --pipeline pipedream --clip 0 --dtype fp16", "--pipeline pipedream with --dtype fp16"},
        {"--pp 2 --ranks 2 --pipeline pipedream --clip 0 --flush-every 0", "--flush-every must be positive"},
        {"--pp 2 --ranks 2 --pipeline pipedream --clip 0 --stop-after 60", "it must be a multiple of --flush-every 50"},
        {"--pp 2 --ranks 2 --pipeline pipedream --clip 0 --steps 4e18 --save-every 0 --val-every 0 --flush-every 4e18",
         "use --flush-every 1048576 or less"},
        {"--draw", "--draw needs --pp"},
        {"--draw --pp 4", "--draw needs --micro-batches"},
        {"--draw --pp 4 --micro-batches 5000", "--micro-batches 5000 with --draw: at most 1024"},
        {"--draw --pp 4 --micro-batches 8 --resume", "--resume has no effect with --draw"},
        {"--draw --pp 4 --micro-batches 8 --steps 3", "--steps has no effect with --draw"},
        {"--draw --pp 4 --micro-batches 0", "--micro-batches must be at least 1"},
        {"--draw --pp 4 --micro-batches 8 --times 1,2", "--times 1,2: give four numbers"},
        {"--draw --pp 4 --micro-batches 8 --times 1,0,1,0", "computing takes 1e-6 to 1e6"},
        {"--draw --pipeline auto --pp 4 --micro-batches 8 --times 1,1e20,1,0", "computing takes 1e-6 to 1e6"},
        {"--draw --pp 4 --micro-batches 8 --times 1e-6,1,1,0", "a drawing of 4 ranks in 4.4e+07 columns is too large"},
        {"--draw --pp 3 --micro-batches 2 --pipeline 2bw", "2bw on 3 ranks, 2 micro-batches, 2 a step: "},
        {"--draw --pp 4 --micro-batches 8 --times 1,x,1,0", "--times x: give a number"},
        {"--draw --pp 4 --micro-batches 7 --pipeline dualpipe", "dualpipe"},
        {"--draw --pp 4 --micro-batches 8 --out /proc/nowhere", "/proc/nowhere"},
    };
    for (const auto& [flags, words] : refused) {
        CAPTURE(flags);
        const Outcome outcome = run_program("train_gpt", flags);
        const std::string line = line_of(outcome);
        CHECK_THAT(line, ContainsSubstring(words));
        CHECK(std::count(line.begin(), line.end(), '\n') == 0);
    }
}

TEST_CASE("--trace of a pipeline: what was taken and sent is what was planned", "[pipeline][program]") {
    const TempFolder folder;
    for (const std::string& flags : std::vector<std::string>{
             "--ranks 2 --pp 2 --pipeline zb-v --trace 2", "--ranks 4 --pp 2 --pipeline dualpipe --zero 1 --trace 1,2",
             "--ranks 4 --pp 2 --tp 2 --recompute full --trace 2",
             "--ranks 2 --pp 2 --pipeline 2bw --clip 0 --flush-every 2 --save-every 2 --val-every 2 --trace 2 "
             "--model " +
                 model_file("deep-gqa")}) {
        CAPTURE(flags);
        std::filesystem::remove_all(folder / "run");
        const Outcome run = run_program(
            "train_gpt", concat("--data ", text_file(), " --batch 8 --micro-batches 4 --seq ",
                                "16 --steps 2 --sample 0 --val-sequences 4 --out ", folder / "run ", flags));
        INFO(run.err);
        REQUIRE(run.status == 0);
        const std::string out = std::regex_replace(run.out, std::regex("\ntrace [^\n]*"), "");  // come at any time
        const size_t account = out.find("\npipeline ");
        REQUIRE(account != std::string::npos);
        check_account(out, flags);  // no other test runs DualPipe with --zero
        std::istringstream lines(out.substr(account + 1));
        std::string line;
        std::getline(lines, line);
        CHECK_THAT(line, ContainsSubstring("activations in flight"));
        std::getline(lines, line);
        for (int rank = 0; rank < 2; ++rank) {
            std::getline(lines, line);
            CAPTURE(line);
            std::istringstream words(line);
            const std::vector<int64_t> numbers(std::istream_iterator<int64_t>(words), {});
            REQUIRE(numbers.size() == 7);
            CHECK(numbers[0] == rank);
            for (const size_t planned : {1, 3, 5}) {
                CHECK(numbers[planned] == numbers[planned + 1]);
                CHECK(numbers[planned] > 0);
            }
        }
        CHECK_THAT(run.out, !ContainsSubstring("broadcast #"));  // of a checkpoint, which is no part of a step
        CHECK_THAT(run.out,
                   ContainsSubstring("predicted, ") && ContainsSubstring("step 2 as predicted and as measured: "));
        CHECK(Image(folder / "run/pipeline.png").colors[0x78afe1] > 100);
        const Json::Value events = parsed_json(slurp(folder / "run/pipeline.json"))["traceEvents"];
        CHECK(events.size() > 30);
        double ends[2] = {};  // of the panels: predicted, measured
        for (const Json::Value& event : events)
            if (double& end = ends[event["pid"].asInt()]; event["ph"] == "X")
                end = std::max(end, 1e-6 * (event["ts"].asDouble() + event["dur"].asDouble()));
        CHECK_THAT(run.out, ContainsSubstring(concat("; ", human_seconds(ends[0]), " predicted, ",
                                                     human_seconds(ends[1]), " measured\n")));
    }
}

TEST_CASE("an asynchronous pipeline belongs to a run, a synchronous one does not", "[pipeline][program]") {
    const TempFolder folder;
    const auto train_pipeline = [&](const std::string& flags) {
        return run_program("train_gpt", concat("--data ", text_file(), " --sample 0 ", flags));
    };
    const std::string small = " --model " + model_file("deep-gqa") +
                              " --batch 8 --seq 16 --steps 4 --stop-after 2 --val-sequences 4 --lr 1e-3 ",
                      out = " --out " + (folder / "late "), other_out = " --out " + (folder / "wait ");
    REQUIRE(train_pipeline(small + out +
                           "--ranks 2 --pp 2 --pipeline pipedream --clip 0 --flush-every 2 --save-every 2 "
                           "--val-every 2")
                .status == 0);
    CHECK_THAT(
        line_of(train_pipeline(out + "--ranks 2 --pp 2 --pipeline 1f1b --resume")),
        ContainsSubstring("--pipeline 1f1b differs from the run in") && ContainsSubstring("has --pipeline pipedream"));
    CHECK_THAT(line_of(train_pipeline(out + "--ranks 4 --pp 4 --resume")),
               ContainsSubstring("--pp 4 differs from the run"));
    CHECK_THAT(line_of(train_pipeline(out + "--ranks 2 --vertical-sync --resume")),
               ContainsSubstring("--vertical-sync true differs"));
    CHECK_THAT(line_of(train_pipeline(out + "--ranks 2 --flush-every 1 --resume")),
               ContainsSubstring("--flush-every 1 differs"));
    CHECK(train_pipeline(out + "--ranks 2 --resume").status == 0);  // its flags are those of the checkpoint

    // 2BW's gradients are one step old on any number of ranks.
    const std::string two = " --out " + (folder / "two ");
    REQUIRE(train_pipeline(small + two +
                           "--ranks 2 --pp 2 --pipeline 2bw --micro-batches 4 --clip 0 --flush-every 2 --save-every 2 "
                           "--val-every 2")
                .status == 0);
    CHECK(train_pipeline(two + "--ranks 4 --pp 4 --resume").status == 0);

    REQUIRE(train_pipeline(small + other_out + "--ranks 2 --pp 2 --pipeline zb-v --micro-batches 4 --clip 0").status ==
            0);
    CHECK_THAT(line_of(train_pipeline(other_out + "--ranks 2 --pp 2 --pipeline pipedream --resume")),
               ContainsSubstring("--pipeline pipedream would change the loss curve"));
    const Outcome resumed = train_pipeline(other_out + "--ranks 4 --pp 4 --pipeline 1f1b --micro-batches 2 --resume");
    INFO(resumed.err);
    CHECK(resumed.status == 0);
}
