// Canvas and plots: areas against geometry, and charts read back from their PNG.
//
//   run:   build/cpu/run_tests -# "[#test_plot]"
#include <algorithm>
#include <cmath>
#include <random>

#include "json.h"
#include "parallel/comm/transport.h"
#include "stb_image.h"
#include "temp_folder.h"
#include "test.h"

namespace {

constexpr Canvas::Color black{0, 0, 0};
constexpr double pi = 3.14159265358979;

struct Picture {
    int width = 0, height = 0;
    std::vector<uint8_t> rgb;

    explicit Picture(const std::string& path) {
        int channels = 0;
        uint8_t* pixels = stbi_load(path.c_str(), &width, &height, &channels, 3);
        REQUIRE(pixels != nullptr);
        CHECK(channels == 3);
        rgb.assign(pixels, pixels + 3 * width * height);
        stbi_image_free(pixels);
    }
    explicit Picture(const Canvas& canvas) : width(canvas.width()), height(canvas.height()), rgb(canvas.rgb()) {}

    const uint8_t* at(int x, int y) const {
        return &rgb[3 * (static_cast<size_t>(y) * static_cast<size_t>(width) + static_cast<size_t>(x))];
    }
    bool is(int x, int y, int r, int g, int b) const {
        return at(x, y)[0] == r && at(x, y)[1] == g && at(x, y)[2] == b;
    }
    double darkness(int x, int y) const { return 1 - at(x, y)[0] / 255.0; }
    double ink() const {  // in pixels of black
        double sum = 0;
        for (int y = 0; y < height; y++)
            for (int x = 0; x < width; x++) sum += darkness(x, y);
        return sum;
    }
    // Columns (or rows) that hold a pixel of exactly this colour.
    std::vector<int> columns_of(int r, int g, int b, bool rows = false) const {
        std::vector<int> found;
        for (int i = 0; i < (rows ? height : width); i++) {
            bool any = false;
            for (int j = 0; j < (rows ? width : height); j++)
                any = any || (rows ? is(j, i, r, g, b) : is(i, j, r, g, b));
            if (any) found.push_back(i);
        }
        return found;
    }
};

Picture draw(const Plot& plot) {
    TempFolder folder;
    write_png(folder / "x.png", plot);
    CHECK(folder.listing() == "x.png");
    return Picture(folder / "x.png");
}

Plot plot_of(std::vector<double> x, std::vector<double> y) {
    Plot plot;
    plot.series.push_back({"", std::move(x), std::move(y)});
    return plot;
}

}  // namespace

TEST_CASE("canvas: shapes cover their area") {
    // Coverage fades linearly over the pixel at the edge: exact for straight edges on the pixel grid, else within 1 %.
    Canvas canvas(200, 200);
    canvas.fill(10.25, 20.5, 30.75, 40, black);
    CHECK(Picture(canvas).ink() == Approx(20.5 * 19.5).epsilon(0.01));
    CHECK(Picture(canvas).darkness(10, 30) == Approx(0.75).margin(0.01));
    CHECK(Picture(canvas).darkness(20, 20) == Approx(0.5).margin(0.01));

    Canvas disc(200, 200);
    disc.disc({100.3, 99.6}, 40, black);
    CHECK(Picture(disc).ink() == Approx(pi * 1600).epsilon(0.01));

    Canvas line(200, 200);
    line.line({{20, 30}, {170, 141}}, 6, black);
    CHECK(Picture(line).ink() == Approx(6 * std::hypot(150, 111) + pi * 9).epsilon(0.01));

    Canvas pale(200, 200);  // crossing itself, and half transparent: no pixel is painted twice
    pale.line({{20, 20}, {180, 180}, {180, 20}, {20, 180}}, 8, black, 0.5);
    const Picture picture(pale);
    double darkest = 0;
    for (int y = 0; y < 200; y++)
        for (int x = 0; x < 200; x++) darkest = std::max(darkest, picture.darkness(x, y));
    CHECK(darkest == Approx(0.5).margin(0.01));
}

TEST_CASE("canvas: what lies outside is cut off") {
    Canvas canvas(50, 40);
    canvas.line({{-1e6, 20.5}, {1e6, 20.5}}, 2, black);
    canvas.fill(-100, -100, 5, 5, black);
    canvas.line({{1e7, 1e7}, {2e7, 1e7}}, 2, black);
    canvas.line({{NAN, 0}, {INFINITY, 3}}, 2, black);
    canvas.line({}, 2, black);
    canvas.text({-500, -500}, "away", 10, black);
    canvas.text({45, 3}, "half away", 10, black);
    const Picture picture(canvas);
    CHECK(picture.darkness(0, 20) == 1);
    CHECK(picture.darkness(49, 20) == 1);
    CHECK(picture.darkness(4, 4) == 1);
    CHECK(picture.darkness(20, 10) == 0);
    CHECK(one_line_with(error_of([] { Canvas(0, 10); }), "0 x 10"));
    CHECK(one_line_with(error_of([] { Canvas(10, 20000); }), "16384"));
    CHECK(one_line_with(error_of([] { Canvas(20000, 10); }), "16384"));
}

TEST_CASE("canvas: every letter stays in its box, and no two look alike") {
    std::map<std::vector<uint8_t>, char> seen;
    for (char c = 33; c < 127; c++) {
        const std::string text(1, c);
        Canvas canvas(80, 80);
        canvas.text({20, 50}, text, 20, black);
        const Picture picture(canvas);
        const double width = Canvas::text_width(text, 20);
        INFO(text);
        CHECK(picture.ink() > 4);
        double outside = 0;
        for (int y = 0; y < 80; y++) {
            for (int x = 0; x < 80; x++) {  // a line is 2.4 pixels thick, and its edge fades over one
                const bool inside = x >= 18 && x <= 20 + width + 2.5 && y >= 50 - 24 - 2 && y <= 50 + 6 + 2;
                if (!inside) outside += picture.darkness(x, y);
            }
        }
        CHECK(outside == 0);
        CHECK(seen.emplace(picture.rgb, c).second);
    }
    CHECK(Canvas::text_width("0123456789", 10) == Approx(Canvas::text_width("1111111111", 10)));  // columns of numbers
    CHECK(Canvas::text_width("", 10) == 0);
    CHECK(Canvas::text_width("\x7f", 10) == Canvas::text_width("?", 10));  // the character after the last with a sign
    CHECK(Canvas::text_width("\xc3\xa9", 10) == Canvas::text_width("?", 10));  // one sign for one foreign character
}

TEST_CASE("canvas: alignment, upward text, shortening") {
    Canvas level(200, 200), upward(200, 200), right(200, 200);
    level.text({100, 100}, "Loss, nats", 10, black);
    upward.text({100, 100}, "Loss, nats", 10, black, Canvas::Align::left, false, true);
    right.text({100, 100}, "Loss", 10, black, Canvas::Align::right);
    const Picture a(level), b(upward), c(right);
    double difference = 0, beyond = 0;
    for (int y = 1; y < 200; y++) {
        for (int x = 1; x < 200; x++) {
            difference = std::max(difference, std::fabs(a.darkness(x, y) - b.darkness(y, 200 - x)));  // a quarter turn
            if (x > 101) beyond += c.darkness(x, y);
        }
    }
    CHECK(difference < 0.01);
    CHECK(a.ink() > 100);
    CHECK(c.ink() > 20);
    CHECK(beyond == 0);

    CHECK(Canvas::shorten("short", 10, 100) == "short");
    const std::string cut = Canvas::shorten("a label that has no end in sight", 10, 100);
    CHECK(cut.starts_with("a label"));
    CHECK(cut.ends_with("..."));
    CHECK(Canvas::text_width(cut, 10) <= 100);
}

TEST_CASE("plot: a line is where its values are") {
    Plot plot = plot_of({0, 1, 2, 3, 4}, {1, 1, 1, 1, 1});
    plot.series.push_back({"", {0, 4}, {0, 0}});
    plot.series.push_back({"", {0, 4}, {2, 2}});
    const Picture picture = draw(plot);
    CHECK(picture.width == 960);
    CHECK(picture.height == 600);
    auto middle = [&](const std::vector<int>& found) {
        REQUIRE(!found.empty());
        return (found.front() + found.back()) / 2.0;
    };
    const double one = middle(picture.columns_of(0, 114, 178, true));
    const double zero = middle(picture.columns_of(213, 94, 0, true));
    const double two = middle(picture.columns_of(0, 158, 115, true));
    CHECK(two < one);
    CHECK(one < zero);
    CHECK(one == Approx((zero + two) / 2).margin(1));
    const std::vector<int> columns = picture.columns_of(0, 114, 178);
    CHECK(columns.size() > 700);
    CHECK(columns.back() - columns.front() + 1 == static_cast<int>(columns.size()));  // no gap

    // Values that no axis shows leave a gap; so do values below zero on a log axis.
    for (double missing : {double{NAN}, double{INFINITY}, -1e305}) {
        const std::vector<int> gap =
            draw(plot_of({0, 1, 2, 3, 4, 5, 6}, {1, 1, 1, missing, 1, 1, 1})).columns_of(0, 114, 178);
        CHECK(static_cast<int>(gap.size()) < (gap.back() - gap.front()) * 3 / 4);
    }
    Plot log = plot_of({1, 2, 3, 4, 5, 6}, {1, 1, 0, -1, 1, 1});
    log.log_y = true;
    const std::vector<int> gap = draw(log).columns_of(0, 114, 178);
    CHECK(static_cast<int>(gap.size()) < (gap.back() - gap.front()) / 2);
}

TEST_CASE("plot: several stand one below the other, their x axes in the same columns") {
    const TempFolder folder;
    Plot wide_labels = plot_of({0, 1}, {1e-7, 1.00001e-7}), narrow_labels = plot_of({0, 1}, {1, 2});
    narrow_labels.height = 300;
    write_png(folder / "both.png", {wide_labels, narrow_labels});
    const Picture both(folder / "both.png"), above = draw(wide_labels), alone = draw(narrow_labels);
    REQUIRE(both.width == 960);
    REQUIRE(both.height == 900);
    // The upper one as if it were alone; the lower one's curve begins and ends where the upper one's does.
    CHECK(std::equal(above.rgb.begin(), above.rgb.end(), both.rgb.begin()));
    const auto lower_columns = [&] {
        Picture lower = both;
        lower.rgb.erase(lower.rgb.begin(), lower.rgb.begin() + static_cast<std::ptrdiff_t>(above.rgb.size()));
        lower.height = 300;
        return lower.columns_of(0, 114, 178);
    }();
    const std::vector<int> upper_columns = above.columns_of(0, 114, 178);
    REQUIRE(!lower_columns.empty());
    CHECK(std::abs(lower_columns.front() - upper_columns.front()) <= 1);
    CHECK(std::abs(lower_columns.back() - upper_columns.back()) <= 1);
    CHECK(alone.columns_of(0, 114, 178).front() < upper_columns.front() - 10);  // its labels alone need less space

    narrow_labels.width = 800;
    CHECK_THROWS_WITH(write_png(folder / "x.png", {wide_labels, narrow_labels}), ContainsSubstring("one width"));
    CHECK_THROWS_WITH(write_png(folder / "x.png", std::vector<Plot>{}), ContainsSubstring("no plot"));
    CHECK(!std::filesystem::exists(folder / "x.png"));
}

TEST_CASE("plot: a log axis makes a power law straight") {
    Plot plot = plot_of({}, {});
    plot.log_x = plot.log_y = true;
    for (double x = 1; x < 3000; x *= 2) {
        plot.series[0].x.push_back(x);
        plot.series[0].y.push_back(5 * std::pow(x, 1.5));
    }
    const Picture picture = draw(plot);
    const std::vector<int> columns = picture.columns_of(0, 114, 178), rows = picture.columns_of(0, 114, 178, true);
    auto row_at = [&](int x) {
        double sum = 0, weight = 0;
        for (int y = 0; y < picture.height; y++)
            if (picture.is(x, y, 0, 114, 178)) sum += y, weight++;
        return sum / weight;
    };
    const int left = columns[20], right = columns[columns.size() - 21], quarter = (3 * left + right) / 4;
    CHECK(row_at(quarter) == Approx((3 * row_at(left) + row_at(right)) / 4).margin(1.5));
    CHECK(rows.size() > 400);
}

// The axis stands beside the widest of its numbers.
TEST_CASE("plot: numbers have the digits that their steps need, and units") {
    struct Case {
        std::vector<double> values;
        std::string widest;
        bool log = false;
    };
    const Case cases[] = {{{0, 1}, "0.8"},         {{0, 9000}, "9000"},
                          {{0, 20000}, "20k"},     {{100000, 100000.3}, "100000.05"},
                          {{0, 3e15}, "1.5e15"},   {{0, 2e-5}, "1.5e-5"},
                          {{-1e-9, 2.1e7}, "15M"}, {{1, 1e6}, "1000", true},
                          {{1, 20}, "10", true},   {{1000, 1001}, "1000.2", true},
                          {{0.3, 0.34}, "0.335"}};
    for (const auto& [values, widest, log] : cases) {
        Plot plot = plot_of({1, 2}, values);
        plot.log_y = log;
        const std::vector<int> columns = draw(plot).columns_of(38, 38, 38);
        INFO(values[0] << " to " << values[1]);
        CHECK(columns.front() ==
              std::floor(Canvas::text_width(widest, 10) + 24) - 5);  // where the lines of ticks begin
    }
    for (const double most : {1e6, 1e200}) {
        Plot plot = plot_of({1, 2}, {1, most});
        plot.log_y = true;
        const Picture picture = draw(plot);
        int n_lines = 0;
        const int x = picture.columns_of(38, 38, 38).front() + 9;  // right of the axis, left of the first line of x
        for (int y = 0; y < picture.height; y++) n_lines += picture.is(x, y, 226, 226, 226);
        CHECK((n_lines >= 5 && n_lines <= 12));
    }
}

TEST_CASE("plot: nothing, one point, constants, extremes: always a picture") {
    const double huge = 1e308, tiny = 5e-324;
    // clang-format off
    const std::vector<std::pair<std::vector<double>, std::vector<double>>> cases = {
        {{}, {}}, {{3}, {4}}, {{0}, {0}}, {{1, 2, 3}, {2, 2, 2}}, {{5, 5, 5}, {1, 2, 3}}, {{NAN, NAN}, {1, 2}},
        {{1, 2}, {huge, -huge}}, {{1, 2}, {1e299, -1e299}}, {{1, 2}, {tiny, 2 * tiny}}, {{1, 2}, {1, 1 + 1e-15}},
        {{1, 2}, {1e15, 1e15 + 1}}, {{1e9, 1e9 + 1}, {-1e-9, 1e-9}}, {{2, 1, 3, 0}, {1, 5, -3, 2}},
        {{-5, -1}, {-2, -1}}};
    // clang-format on
    for (size_t i = 0; i < cases.size(); i++) {
        for (int logs = 0; logs < 4; logs++) {
            Plot plot = plot_of(cases[i].first, cases[i].second);
            plot.log_x = logs & 1;
            plot.log_y = logs & 2;
            plot.width = 400;
            plot.height = 300;
            INFO("case " << i << ", log axes " << logs);
            CHECK(draw(plot).ink() > 300);
        }
    }
    CHECK(draw(plot_of({3}, {4})).columns_of(0, 114, 178).size() >= 5);  // one point is a dot
    CHECK(draw(Plot()).ink() > 500);
}

TEST_CASE("plot: labels of any length, many series, small and large pictures") {
    const std::pair<int, int> sizes[] = {{160, 120}, {320, 200}, {1920, 1200}, {3000, 200}};
    for (const auto& [width, height] : sizes) {
        Plot plot;
        plot.width = width;
        plot.height = height;
        plot.title = plot.x_label = plot.y_label = std::string(300, 'W') + "\n\x01\xff";
        for (int k = 0; k < 40; k++) {
            const std::string label = concat(std::string(100, 'm'), k);
            plot.series.push_back({label, {1, 2}, {1.0 * k, 2.0 * k}, k % 2 == 0, k % 3 == 0});
        }
        const Picture picture = draw(plot);
        CHECK(picture.width == width);
        CHECK(picture.height == height);
    }
    Plot plot = plot_of({1, 2}, {1});
    plot.series[0].label = "val";
    CHECK(one_line_with(error_of([&] { write_png("x.png", plot); }), "x.png", "\"val\" has 2 x and 1 y values"));
    plot = plot_of({1}, {1});
    plot.series[0].color = 8;
    CHECK(one_line_with(error_of([&] { write_png("x.png", plot); }), "color 8"));
    plot.series[0].color = 7;
    plot.width = 10;
    CHECK(one_line_with(error_of([&] { write_png("x.png", plot); }), "too small"));
    plot.width = 500;
    CHECK(one_line_with(error_of([&] { write_png("no/such/folder/x.png", plot); }), "no/such/folder/x.png"));
}

TEST_CASE("plot: a million noisy steps take no million strokes") {
    Plot plot = plot_of({}, {});
    std::mt19937 random(3);
    for (int i = 0; i < 1'000'000; i++) {
        plot.series[0].x.push_back(i);
        plot.series[0].y.push_back(static_cast<double>(random()));
    }
    plot.series[0].y[500'000] = -1e10;  // thinning out must keep a single spike
    const double begin = seconds_now();
    const Picture picture = draw(plot);
    CHECK(seconds_now() - begin < 20);  // all strokes: minutes
    CHECK(picture.columns_of(0, 114, 178, true).back() > 500);
}

TEST_CASE("a trace has each event at its place: as a picture, for Perfetto, and as a line") {
    const TempFolder folder;
    using E = TraceEvent;
    const std::string call = "all_reduce #1 of dp";
    // Step 1 takes a second, and step 2, of rank 1 alone, another one.
    const std::vector<TraceEvent> events = {{E::computing, 0, -1, 1, 0, 2, 2.25, "forward of block 3"},
                                            {E::collective, 1, -1, 1, 4096, 2.125, 2.75, call},
                                            {E::sending, 0, 1, 1, 4096, 2.25, 2.5, call},
                                            {E::receiving, 1, 0, 1, 4096, 2.125, 2.75, call},
                                            {E::sending, 0, 1, 1, 8, 2.625, 2.625, "send of dp"},
                                            {E::receiving, 1, 0, 1, 8, 2.5, 3, "recv of dp"},
                                            {E::sending, 0, 1, 1, 100, 2.5, 2.625, call},
                                            {E::receiving, 1, 0, 1, 100, 2.75, 2.875, call},
                                            {E::computing, 1, -1, 2, 0, 3.5, 4.5, "update"}};
    write_trace(folder.path, events);
    const Picture picture(folder / "trace.png");
    REQUIRE(picture.width == 1600);
    REQUIRE(picture.height == 44 + 2 * (40 + 2 * 62 + 34));
    // Of this colour, below the legend: first and last column, first and last row. The last column of a bar is white.
    const auto check_bar = [&](int r, int g, int b, const std::vector<double>& wanted) {
        std::vector<double> box = {1e9, -1, 1e9, -1};
        for (int y = 44; y < picture.height; ++y)
            for (int x = 0; x < picture.width; ++x)
                if (picture.is(x, y, r, g, b))
                    box = {std::min<double>(box[0], x), std::max<double>(box[1], x), std::min<double>(box[2], y),
                           std::max<double>(box[3], y)};
        for (size_t i = 0; i < 4; ++i) CHECK(box[i] == Approx(wanted[i]).margin(2));
    };
    const auto x_of = [](double fraction) { return 190 + fraction * (1600 - 190 - 40); };
    check_bar(110, 165, 215, {x_of(0), x_of(0.25) - 1, 85, 109});     // forward
    check_bar(205, 75, 75, {x_of(0.125), x_of(0.75) - 1, 173, 191});  // all_reduce
    check_bar(120, 190, 120, {x_of(0), x_of(1) - 1, 345, 369});       // update
    const auto darkest = [&](double x, int y) {
        double most = 0;
        for (int dy = -2; dy <= 2; ++dy) most = std::max(most, picture.darkness(static_cast<int>(x), y + dy));
        return most;
    };
    // In the middle of the arrow of 4096 bytes, and where that of 8 bytes would be.
    CHECK(darkest((x_of(0.25) + x_of(0.75)) / 2, 151) > 0.4);
    CHECK(darkest((x_of(0.625) + x_of(1)) / 2, 151) < 0.1);

    std::vector<std::string> bars, arrows;
    int n_of_call = 0;
    const Json::Value trace = parsed_json(slurp(folder / "trace.json"));
    for (const Json::Value& e : trace["traceEvents"]) {
        const std::string phase = e["ph"].asString();
        const std::string where =
            concat("rank ", e["pid"].asInt(), " row ", e["tid"].asInt(), " at ", e["ts"].asDouble());
        if (phase == "X")
            bars.push_back(concat(where, " for ", e["dur"].asDouble(), " ", e["name"].asString(), ", step ",
                                  e["args"]["step"].asInt(), ", ", e["args"]["bytes"].asInt(), " bytes"));
        n_of_call += e["args"]["call"].asString() == call;
        CHECK(e["bp"].asString() == (phase == "f" ? "e" : ""));  // an arrow ends at the slice that it lies in
        if (phase == "s" || phase == "f") arrows.push_back(concat(phase, e["id"].asInt(), " ", where));
    }
    const std::vector<std::string> wanted = {
        "rank 0 row 0 at 2e+06 for 250000 forward of block 3, step 1, 0 bytes",
        "rank 1 row 1 at 2.125e+06 for 625000 all_reduce #1 of dp, step 1, 4096 bytes",
        "rank 1 row 1 at 2.125e+06 for 625000 receive from 0, step 1, 4096 bytes",
        "rank 0 row 1 at 2.25e+06 for 250000 send to 1, step 1, 4096 bytes",
        "rank 1 row 1 at 2.5e+06 for 500000 receive from 0, step 1, 8 bytes",
        "rank 0 row 1 at 2.5e+06 for 125000 send to 1, step 1, 100 bytes",
        "rank 0 row 1 at 2.625e+06 for 0 send to 1, step 1, 8 bytes",
        "rank 1 row 1 at 2.75e+06 for 125000 receive from 0, step 1, 100 bytes",
        "rank 1 row 0 at 3.5e+06 for 1e+06 update, step 2, 0 bytes"};
    CHECK(bars == wanted);
    CHECK(arrows == std::vector<std::string>{"s1 rank 0 row 1 at 2.25e+06", "f1 rank 1 row 1 at 2.75e+06",
                                             "s2 rank 0 row 1 at 2.5e+06", "f2 rank 1 row 1 at 2.875e+06"});
    CHECK(n_of_call == 5);

    std::vector<std::string> messages;
    for (const TracedMessage& m : match_messages(events))
        messages.push_back(concat(m.send->what, ", ", m.send->bytes, " bytes -> ", m.recv->what, ", ", m.recv->bytes));
    std::ranges::sort(messages);
    CHECK(messages == std::vector<std::string>{concat(call, ", 100 bytes -> ", call, ", 100"),
                                               concat(call, ", 4096 bytes -> ", call, ", 4096"),
                                               "send of dp, 8 bytes -> recv of dp, 8"});
    CHECK(match_messages({events[2], events[4]}).empty());  // nobody received them
    CHECK(trace_line(events[0]) == "trace    step 1  rank 0                      250000 us  forward of block 3\n");
    CHECK(trace_line(events[1]) == "trace    step 1  rank 1          4.00 KiB    625000 us  all_reduce #1 of dp\n");
    CHECK(trace_line(events[2]) == "trace    step 1  rank 0 -> 1     4.00 KiB    250000 us  all_reduce #1 of dp\n");
    CHECK(trace_line(events[3]) == "trace    step 1  rank 1 <- 0     4.00 KiB    625000 us  all_reduce #1 of dp\n");
}

TEST_CASE("of a trace's messages those are drawn that can be told apart, the largest first") {
    const TempFolder folder;
    using E = TraceEvent;
    std::vector<TraceEvent> events = {{E::computing, 0, -1, 1, 0, 0, 1, "forward"}};
    const auto add = [&](size_t bytes, double start, double end) {
        events.push_back({E::sending, 0, 1, 1, bytes, start, start, "send of dp"});
        events.push_back({E::receiving, 1, 0, 1, bytes, start, end, "recv of dp"});
    };
    add(1 << 19, 0.252, 0.5);
    add(1 << 20, 0.25, 0.75);  // it begins where the smaller one does
    add(10'000, 0.85, 0.95);   // less than a hundredth of the largest
    write_trace_picture(folder / "x.png", events, 2);
    const Picture picture(folder / "x.png");
    const auto is_drawn = [&](double start, double end) {
        const int x = static_cast<int>(190 + (start + end) / 2 * (1600 - 190 - 40));
        double most = 0;
        for (int y = 149; y <= 153; ++y) most = std::max(most, picture.darkness(x, y));
        return most > 0.4;
    };
    CHECK(is_drawn(0.25, 0.75));
    CHECK(!is_drawn(0.252, 0.5));
    CHECK(!is_drawn(0.85, 0.95));
}

TEST_CASE("a trace of nothing is not written, and one of a moment has a bar") {
    const TempFolder folder;
    write_trace(folder.path, {});
    CHECK(std::filesystem::is_empty(folder.path));
    write_trace_picture(folder / "x.png", {{.step = 1, .start = 2, .end = 2, .what = "update"}}, 1);
    CHECK(Picture(folder / "x.png").is(190, 44 + 40 + 13, 120, 190, 120));
}

TEST_CASE("the events of a trace are the same when another process has read them") {
    using E = TraceEvent;
    const std::vector<TraceEvent> events = {
        {E::computing, 3, -1, int64_t{1} << 40, 0, 0.1, 1e9 / 3, "\"forward\" of block 3"},
        {E::collective, 1, -1, 2, size_t{1} << 50, 2.125, 2.75, "all_reduce #1 of dp"},
        {E::sending, 0, 1, 2, 4096, 2.25, 2.5, "send of dp"},
        {E::receiving, 1, 0, 2, 4097, 2.5, 3, "recv of dp"}};
    const std::vector<TraceEvent> same = unpack_events(pack_events(events));
    REQUIRE(same.size() == events.size());
    for (size_t i = 0; i < events.size(); ++i) {
        const TraceEvent &a = events[i], &b = same[i];
        CHECK((a.kind == b.kind && a.rank == b.rank && a.peer == b.peer && a.step == b.step && a.bytes == b.bytes));
        CHECK((a.start == b.start && a.end == b.end && a.what == b.what));
    }
}

TEST_CASE("the picture of a trace has four steps and sixteen ranks") {
    const TempFolder folder;
    std::vector<TraceEvent> events;
    for (int rank = 0; rank < 17; ++rank)
        for (int step = 1; step <= 5; ++step)
            events.push_back({.rank = rank,
                              .step = step,
                              .start = step + 0.0,
                              .end = step + 0.5,
                              .what = step == 1 ? "forward" : "update"});
    write_trace_picture(folder / "x.png", events, 17);
    const Picture picture(folder / "x.png");
    REQUIRE(picture.height == 44 + 4 * (40 + 16 * 62 + 34) + 24);
    CHECK(picture.is(300, 44 + 40 + 15 * 62 + 13, 110, 165, 215));
    CHECK_FALSE(picture.is(300, 44 + 40 + 16 * 62 + 13, 110, 165, 215));
}
