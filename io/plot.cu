// Line charts. Values become pixels in two steps: an Axis maps a value to [0, 1], the Frame maps that to the picture.
#include <algorithm>
#include <cmath>

#include "io/io.h"

namespace {

using Point = Canvas::Point;
using Color = Canvas::Color;
using Align = Canvas::Align;

constexpr Color ink{38, 38, 38}, soft_ink{89, 89, 89}, white{255, 255, 255};
constexpr Color grid{226, 226, 226}, faint_grid{243, 243, 243};

// Colours that people with the common kinds of colour blindness tell apart (Okabe and Ito 2008), but a grey in place of
// their yellow, which can hardly be seen on a white page.
constexpr Color palette[8] = {{0, 114, 178}, {213, 94, 0},   {0, 158, 115}, {204, 121, 167},
                              {230, 159, 0}, {86, 180, 233}, {40, 40, 40},  {140, 140, 140}};

// ---------------------------------------------------------------------------------------------------------------------
// Axes

struct Tick {
    double value;
    std::string label;
    bool major = true;
};

struct Axis {
    bool log = false;
    double low = 0, high = 1;
    std::vector<Tick> ticks;

    double place(double value) const {  // 0 at low, 1 at high
        return log ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
    }
    // Beyond 1e300 differences overflow: such a value is as good as infinite.
    bool shows(double value) const {
        return std::isfinite(value) && std::fabs(value) < 1e300 && (!log || value > 1e-300);
    }
};

int exponent10(double value) { return static_cast<int>(std::floor(std::log10(value) + 1e-9)); }

// The smallest of 1, 2, 5, 10, 20, ... that is not below `step`.
double nice_step(double step) {
    const double power = std::pow(10.0, exponent10(step)), digit = step / power;
    return power * (digit <= 1.001 ? 1 : digit <= 2.001 ? 2 : digit <= 5.001 ? 5 : 10);
}

// A tick's value with as many digits as a step needs: 0.25, 1500, 20k, 3e-5.
std::string tick_label(double value, double step, double largest) {
    if (std::fabs(value) < 1e-6 * step) return "0";
    if (largest >= 1e15 || largest < 0.9e-3) {
        const int digits = std::clamp(exponent10(std::fabs(value)) - exponent10(step), 0, 9);
        const std::string number = format("%.*e", digits, value);
        const size_t e = number.find('e');
        return number.substr(0, e + 1) + std::to_string(std::stoi(number.substr(e + 1)));  // e-05 -> e-5
    }
    const char* units[] = {"", "k", "M", "G", "T"};
    const auto digits = [&](int unit) { return std::max(0, -exponent10(step / std::pow(1000.0, unit))); };
    int unit = largest < 0.99e4 ? 0 : std::min(4, exponent10(largest) / 3);
    if (digits(unit) > 2) unit = 0;  // 1000.3, not 1.0003k
    return format("%.*f%s", std::min(digits(unit), 12), value / std::pow(1000.0, unit), units[unit]);
}

void set_linear_ticks(Axis& axis, int n_wanted) {
    const double step = nice_step((axis.high - axis.low) / std::max(1, n_wanted));
    const double largest = std::max(std::fabs(axis.low), std::fabs(axis.high));
    axis.ticks.clear();
    for (double i = std::ceil(axis.low / step - 1e-6); i <= axis.high / step + 1e-6; i++)
        axis.ticks.push_back({i * step, tick_label(i * step, step, largest)});
}

// Powers of ten; where there are few of them also their double and fivefold; where they are too few, linear steps.
void set_log_ticks(Axis& axis, int n_wanted) {
    const double n_decades = std::log10(axis.high / axis.low);
    if (n_decades < 0.8) return set_linear_ticks(axis, n_wanted);
    const int stride = std::max(1, static_cast<int>(std::ceil(n_decades / std::max(1, n_wanted))));
    axis.ticks.clear();
    for (int e = exponent10(axis.low); e <= exponent10(axis.high); e++) {
        for (int digit = 1; digit <= 9; digit++) {
            const double power = std::pow(10.0, e), value = digit * power;
            if (value < axis.low * (1 - 1e-9) || value > axis.high * (1 + 1e-9)) continue;
            if (digit == 1 ? e % stride != 0 : stride > 1) continue;
            const bool major = digit == 1 || ((digit == 2 || digit == 5) && 3 * n_decades <= n_wanted);
            axis.ticks.push_back({value, major ? tick_label(value, power, value) : "", major});
        }
    }
}

void set_ticks(Axis& axis, int n_wanted) {
    axis.log ? set_log_ticks(axis, n_wanted) : set_linear_ticks(axis, n_wanted);
}

// The range of the values that both axes can show; `margin` is the free part left at each end.
Axis make_axis(bool log, const std::vector<double>& values, double margin) {
    Axis axis;
    axis.log = log;
    if (values.empty()) {
        axis.low = log ? 1 : 0;
        axis.high = log ? 10 : 1;
        return axis;
    }
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    axis.low = *low;
    axis.high = *high;
    if (log) {
        const double factor = axis.high / axis.low < 1 + 1e-9 ? 2 : std::pow(axis.high / axis.low, margin);
        axis.low /= factor;
        axis.high *= factor;
        return axis;
    }
    const double largest = std::max(std::fabs(axis.low), std::fabs(axis.high)), span = axis.high - axis.low;
    if (span <= 1e-9 * largest || largest < 1e-290) {  // constant, as far as labels can tell
        const double half = largest < 1e-290 ? 1 : 0.1 * largest;
        axis.low -= half;
        axis.high += half;
        return axis;
    }
    // Zero is worth showing if it is near, and needs no margin below it.
    const bool from_zero = axis.low >= 0 && axis.low < 0.1 * axis.high;
    axis.low = from_zero ? 0 : axis.low - margin * span;
    axis.high += margin * span;
    return axis;
}

// ---------------------------------------------------------------------------------------------------------------------
// The picture. s is the scale of its letters and lines: 1 where it has 960 x 600 pixels.

struct Frame {  // the rectangle between the axes, in pixels
    double left = 0, top = 0, right = 0, bottom = 0;
    Axis x, y;
    Point at(double x_value, double y_value) const {
        return {left + x.place(x_value) * (right - left), bottom - y.place(y_value) * (bottom - top)};
    }
};

// The points of a series in pixels, cut into pieces where values are missing.
std::vector<std::vector<Point>> pieces_of(const Series& series, const Frame& frame) {
    std::vector<std::vector<Point>> pieces(1);
    for (size_t i = 0; i < series.x.size(); i++) {
        if (frame.x.shows(series.x[i]) && frame.y.shows(series.y[i])) {
            pieces.back().push_back(frame.at(series.x[i], series.y[i]));
        } else if (!pieces.back().empty()) {
            pieces.emplace_back();
        }
    }
    if (pieces.back().empty()) pieces.pop_back();
    return pieces;
}

// A million steps on a thousand columns: of the points that follow each other within one column the first, the lowest,
// the highest and the last draw the same picture.
std::vector<Point> thin_out(const std::vector<Point>& points) {
    std::vector<Point> kept;
    for (size_t i = 0; i < points.size();) {
        size_t end = i, low = i, high = i;
        for (; end < points.size() && std::floor(points[end].x) == std::floor(points[i].x); end++) {
            if (points[end].y < points[low].y) low = end;
            if (points[end].y > points[high].y) high = end;
        }
        size_t last_kept = points.size();
        for (size_t j : {i, std::min(low, high), std::max(low, high), end - 1}) {
            if (j != last_kept) kept.push_back(points[j]);
            last_kept = j;
        }
        i = end;
    }
    return kept;
}

void draw_axes(Canvas& canvas, const Frame& frame, const Plot& plot, double s) {
    for (bool major : {false, true}) {
        for (const Tick& tick : frame.x.ticks) {
            const double x = std::floor(frame.at(tick.value, frame.y.low).x);
            if (tick.major == major) canvas.fill(x, frame.top, x + s, frame.bottom, major ? grid : faint_grid);
        }
        for (const Tick& tick : frame.y.ticks) {
            const double y = std::floor(frame.at(frame.x.low, tick.value).y);
            if (tick.major == major) canvas.fill(frame.left, y, frame.right, y + s, major ? grid : faint_grid);
        }
    }
    for (const Tick& tick : frame.x.ticks) {
        const double x = std::floor(frame.at(tick.value, frame.y.low).x);
        canvas.text({x, frame.bottom + 21 * s}, tick.label, 10 * s, soft_ink, Align::center);
        if (tick.major) canvas.fill(x, frame.bottom, x + s, frame.bottom + 5 * s, ink);
    }
    for (const Tick& tick : frame.y.ticks) {
        const double y = std::floor(frame.at(frame.x.low, tick.value).y);
        canvas.text({frame.left - 10 * s, y + 5 * s}, tick.label, 10 * s, soft_ink, Align::right);
        if (tick.major) canvas.fill(frame.left - 5 * s, y, frame.left, y + s, ink);
    }
    canvas.fill(frame.left, frame.top, frame.left + s, frame.bottom + s, ink);
    canvas.fill(frame.left, frame.bottom, frame.right, frame.bottom + s, ink);

    const double middle = (frame.left + frame.right) / 2;
    const double wide = plot.width - 20 * s, high = plot.height - 20 * s;
    const std::string title = Canvas::shorten(plot.title, 13 * s, wide);
    const std::string x_label = Canvas::shorten(plot.x_label, 10 * s, wide);
    const double half = Canvas::text_width(title, 13 * s) / 2;
    const double title_at = std::clamp(middle, 10 * s + half, std::max(10 * s + half, canvas.width() - 10 * s - half));
    canvas.text({title_at, frame.top - 18 * s}, title, 13 * s, ink, Align::center, true);
    canvas.text({middle, frame.bottom + 45 * s}, x_label, 10 * s, ink, Align::center);
    canvas.text({22 * s, (frame.top + frame.bottom) / 2}, Canvas::shorten(plot.y_label, 10 * s, high), 10 * s, ink,
                Align::center, false, true);
}

void draw_series(Canvas& canvas, const std::vector<std::vector<Point>>& pieces, const Series& series, Color color,
                 double s) {
    for (const std::vector<Point>& piece : pieces) {
        if (piece.size() == 1) canvas.disc(piece[0], (series.thick ? 3.5 : 2) * s, color);
        canvas.line(thin_out(piece), (series.thick ? 2.2 : 1.2) * s, color, series.thick ? 1 : 0.45);
        for (const Point& point : series.markers ? piece : std::vector<Point>()) {
            canvas.disc(point, 5 * s, white);
            canvas.disc(point, 3.6 * s, color);
        }
    }
}

// In the corner where it hides the least of the curves.
void draw_legend(Canvas& canvas, const Frame& frame, const std::vector<Series>& all, const std::vector<Color>& colors,
                 const std::vector<std::vector<Point>>& curves, double s) {
    const double row = 21 * s, inset = 12 * s, sample = 26 * s;
    const double room = (frame.right - frame.left) * 0.5 - sample - 4 * inset;
    const auto n_room = static_cast<size_t>(std::max(1.0, (frame.bottom - frame.top - 3 * inset) / row));
    std::vector<std::pair<std::string, size_t>> rows;  // text, series
    for (size_t i = 0; i < all.size(); i++)
        if (!all[i].label.empty()) rows.push_back({Canvas::shorten(all[i].label, 10 * s, room), i});
    if (rows.empty()) return;
    if (rows.size() > n_room) {
        rows[n_room - 1] = {concat("and ", rows.size() - n_room + 1, " more"), all.size()};
        rows.resize(n_room);
    }
    double width = 0;
    for (const auto& [text, i] : rows) width = std::max(width, Canvas::text_width(text, 10 * s));
    width += sample + 3 * inset;
    const double height = static_cast<double>(rows.size()) * row + inset;

    Point best{};
    int least = -1;
    const double left = frame.left + inset, right = frame.right - inset - width;
    const double top = frame.top + inset, bottom = frame.bottom - inset - height;
    for (const Point& corner : {Point{right, top}, Point{left, top}, Point{right, bottom}, Point{left, bottom}}) {
        int n_hidden = 0;
        for (const std::vector<Point>& curve : curves) {
            for (size_t i = 0; i < curve.size(); i++) {  // also between points that are far apart
                const Point a = curve[i], b = curve[std::min(i + 1, curve.size() - 1)];
                const int n_steps = 1 + static_cast<int>(std::hypot(b.x - a.x, b.y - a.y) / (4 * s));
                for (int k = 0; k < n_steps; k++) {
                    const double x = a.x + (b.x - a.x) * k / n_steps, y = a.y + (b.y - a.y) * k / n_steps;
                    n_hidden += x > corner.x && x < corner.x + width && y > corner.y && y < corner.y + height;
                }
            }
        }
        if (least < 0 || n_hidden < least) least = n_hidden, best = corner;
    }
    best = {std::floor(best.x), std::floor(best.y)};
    canvas.fill(best.x, best.y, best.x + width, best.y + height, white, 0.85);
    for (const Point& corner : {best, Point{best.x + width - s, best.y}})
        canvas.fill(corner.x, corner.y, corner.x + s, corner.y + height, grid);
    for (const Point& corner : {best, Point{best.x, best.y + height - s}})
        canvas.fill(corner.x, corner.y, corner.x + width, corner.y + s, grid);
    for (size_t r = 0; r < rows.size(); r++) {
        const auto& [text, i] = rows[r];
        const double y = best.y + inset / 2 + (static_cast<double>(r) + 0.5) * row, x = best.x + inset;
        canvas.text({x + sample + inset, y + 4.5 * s}, text, 10 * s, ink);
        if (i == all.size()) continue;
        Series shown = all[i];
        const std::vector<Point> line = {{x, y}, {x + sample, y}}, marker = {{x + sample / 2, y}};
        shown.markers = false;
        draw_series(canvas, {line}, shown, colors[i], s);
        if (all[i].markers) draw_series(canvas, {marker}, shown, colors[i], s);
    }
}

Color color_of(const Plot& plot, size_t k) {
    const int color = plot.series[k].color;
    return palette[color >= 0 ? static_cast<size_t>(color) : k % 8];
}

void check_plot(const std::string& path, const Plot& plot, int width) {
    check(plot.width >= 160 && plot.height >= 120, path, ": a plot of ", plot.width, " x ", plot.height,
          " pixels is too small; 160 x 120 is the minimum");
    check(plot.width == width, path, ": plots of ", width, " and ", plot.width,
          " pixels cannot stand one below the other; give them one width");
    for (const Series& series : plot.series) {
        check(series.x.size() == series.y.size(), path, ": series \"", series.label, "\" has ", series.x.size(),
              " x and ", series.y.size(), " y values");
        check(series.color >= -1 && series.color < 8, path, ": series \"", series.label, "\" wants color ",
              series.color, "; the palette has 0 to 7");
    }
}

// The axes of a plot whose upper edge lies at `top`. How far to the right they begin is up to the labels of y.
Frame make_frame(const Plot& plot, double top, double s) {
    Frame frame;
    frame.x.log = plot.log_x;
    frame.y.log = plot.log_y;
    std::vector<double> x_values, y_values;
    for (const Series& series : plot.series) {
        for (size_t i = 0; i < series.x.size(); i++) {
            if (!frame.x.shows(series.x[i]) || !frame.y.shows(series.y[i])) continue;
            x_values.push_back(series.x[i]);
            y_values.push_back(series.y[i]);
        }
    }
    frame.x = make_axis(plot.log_x, x_values, 0.01);
    frame.y = make_axis(plot.log_y, y_values, 0.05);
    const double above = (plot.title.empty() ? 20 : 50) * s, below = (plot.x_label.empty() ? 36 : 62) * s;
    set_ticks(frame.y, static_cast<int>((plot.height - below - above) / (50 * s)));
    double widest = 0;
    for (const Tick& tick : frame.y.ticks) widest = std::max(widest, Canvas::text_width(tick.label, 10 * s));
    frame.left = std::floor(widest + (plot.y_label.empty() ? 24 : 46) * s);
    frame.right = plot.width - 28 * s;
    frame.top = top + std::floor(above);
    frame.bottom = top + std::floor(plot.height - below);
    return frame;
}

// As many ticks on x as there is space for their labels side by side.
void set_x_ticks(Frame& frame, double s) {
    for (int n_wanted = static_cast<int>((frame.right - frame.left) / (75 * s)); n_wanted >= 1; n_wanted--) {
        set_ticks(frame.x, n_wanted);
        bool crowded = false;
        double reached = -1e9;
        for (const Tick& tick : frame.x.ticks) {
            const double half = Canvas::text_width(tick.label, 10 * s) / 2, at = frame.at(tick.value, frame.y.low).x;
            if (half == 0) continue;
            crowded = crowded || at - half < reached;
            reached = at + half + 14 * s;
        }
        if (!crowded) return;
    }
}

void draw_plot(Canvas& canvas, const Plot& plot, const Frame& frame, double s) {
    draw_axes(canvas, frame, plot, s);
    std::vector<Color> colors;
    for (size_t k = 0; k < plot.series.size(); k++) colors.push_back(color_of(plot, k));
    std::vector<std::vector<Point>> curves;
    for (bool thick : {false, true}) {
        for (size_t k = 0; k < plot.series.size(); k++) {
            if (plot.series[k].thick != thick) continue;
            const std::vector<std::vector<Point>> pieces = pieces_of(plot.series[k], frame);
            draw_series(canvas, pieces, plot.series[k], colors[k], s);
            for (const std::vector<Point>& piece : pieces) curves.push_back(thin_out(piece));
        }
    }
    if (curves.empty())
        canvas.text({(frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2}, "no data", 13 * s, soft_ink,
                    Align::center);
    draw_legend(canvas, frame, plot.series, colors, curves, s);
}

}  // namespace

void write_png(const std::string& path, const Plot& plot) { write_png(path, std::vector<Plot>{plot}); }

void write_png(const std::string& path, const std::vector<Plot>& plots) {
    check(!plots.empty(), path, ": there is no plot to draw; give at least one");
    // Letters grow with the picture; all of its plots have letters of one size.
    const Plot& first = plots.front();
    const double s = std::clamp(std::sqrt(first.width * static_cast<double>(first.height) / (960 * 600)), 0.7, 8.0);
    std::vector<Frame> frames;
    int height = 0;
    double left = 0;
    for (const Plot& plot : plots) {
        check_plot(path, plot, first.width);
        frames.push_back(make_frame(plot, height, s));
        left = std::max(left, frames.back().left);
        height += plot.height;
    }
    Canvas canvas(first.width, height);
    for (size_t i = 0; i < plots.size(); i++) {
        frames[i].left = left;  // one x lies below the other
        set_x_ticks(frames[i], s);
        draw_plot(canvas, plots[i], frames[i], s);
    }
    canvas.save(path);
}
