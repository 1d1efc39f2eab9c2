// Canvas: shapes on pixels.
//
// Everything is made of one primitive: how much of a pixel does a line of round ends cover? With d the distance of the
// pixel's centre from the line's middle, about clamp(radius + 1/2 - d, 0, 1): an edge fades over one pixel. A shape of
// many lines takes the maximum over them, so joints don't show, and is painted once.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>

#include "io/font.h"
#include "io/io.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wunused-function"
#define STB_IMAGE_WRITE_IMPLEMENTATION
#define STB_IMAGE_WRITE_STATIC
#define STBIW_ASSERT(x) ((x) ? void() : throw std::bad_alloc())  // what it asserts is that realloc() gave memory
#include <stb/stb_image_write.h>
#pragma GCC diagnostic pop

namespace {

using Point = Canvas::Point;

// The strokes of one glyph in its own units, curves cut into short lines.
std::vector<std::vector<Point>> glyph_strokes(const Glyph& glyph) {
    constexpr int n_pieces = 8;  // of a quarter ellipse: at 13 pixels of height off the curve by less than 1/25 pixel
    constexpr double quarter_turn = 1.57079632679489662;
    std::vector<std::vector<Point>> strokes;
    for (const char* next = glyph.path; *next;) {
        const char command = *next++;
        char* end;
        Point to{std::strtod(next, &end), 0};
        to.y = std::strtod(end, &end);
        next = end + (*end == ' ');
        if (command == 'M') {
            strokes.push_back({to});
            continue;
        }
        const Point from = strokes.back().back();
        for (int i = 1; command != 'L' && i < n_pieces; i++) {
            const double angle = quarter_turn * i / n_pieces, along = std::sin(angle), across = 1 - std::cos(angle);
            const double x_part = command == 'A' ? along : across, y_part = command == 'A' ? across : along;
            strokes.back().push_back({from.x + x_part * (to.x - from.x), from.y + y_part * (to.y - from.y)});
        }
        strokes.back().push_back(to);
    }
    return strokes;
}

// What is not ASCII is shown as one '?' a character: the bytes after the first of a UTF-8 character are skipped.
const Glyph* glyph_of(char c) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 128 && byte < 192) return nullptr;
    return &glyphs[byte >= 32 && byte < 127 ? byte - 32 : '?' - 32];
}

}  // namespace

Canvas::Canvas(int width, int height) : width_(width), height_(height) {
    check(width >= 1 && height >= 1 && width <= 16384 && height <= 16384, "a picture of ", width, " x ", height,
          " pixels; each side can have 1 to 16384");
    const size_t n_pixels = static_cast<size_t>(width) * static_cast<size_t>(height);
    rgb_.assign(3 * n_pixels, 255);
    coverage_.assign(n_pixels, 0);
}

void Canvas::fill(double left, double top, double right, double bottom, Color color, double alpha) {
    // A pixel is covered by as much of it as lies between the edges.
    auto overlap = [](double low, double high, int pixel) {
        return std::clamp(std::min(high, pixel + 1.0) - std::max(low, static_cast<double>(pixel)), 0.0, 1.0);
    };
    left_ = static_cast<int>(std::floor(std::clamp<double>(left, 0, width_)));
    right_ = static_cast<int>(std::ceil(std::clamp<double>(right, 0, width_)));
    top_ = static_cast<int>(std::floor(std::clamp<double>(top, 0, height_)));
    bottom_ = static_cast<int>(std::ceil(std::clamp<double>(bottom, 0, height_)));
    for (int y = top_; y < bottom_; y++)
        for (int x = left_; x < right_; x++)
            coverage_[static_cast<size_t>(y) * static_cast<size_t>(width_) + static_cast<size_t>(x)] =
                static_cast<float>(overlap(left, right, x) * overlap(top, bottom, y));
    paint(color, alpha);
}

void Canvas::line(const std::vector<Point>& points, double thickness, Color color, double alpha) {
    for (size_t i = 0; i < points.size(); i++) {
        if (i + 1 < points.size() || i == 0)
            cover(points[i], points[std::min(i + 1, points.size() - 1)], thickness / 2);
    }
    paint(color, alpha);
}

// Adds the line from a to b to the shape being drawn.
void Canvas::cover(Point a, Point b, double radius) {
    const double reach = radius + 0.5, dx = b.x - a.x, dy = b.y - a.y, length_squared = dx * dx + dy * dy;
    if (!std::isfinite(length_squared)) return;
    auto pixel = [](double at, int size) { return static_cast<int>(std::clamp<double>(at, 0, size)); };
    const int first_x = pixel(std::min(a.x, b.x) - reach, width_);
    const int last_x = pixel(std::max(a.x, b.x) + reach + 1, width_);
    const int first_y = pixel(std::min(a.y, b.y) - reach, height_);
    const int last_y = pixel(std::max(a.y, b.y) + reach + 1, height_);
    if (first_x >= last_x || first_y >= last_y) return;
    for (int y = first_y; y < last_y; y++) {
        for (int x = first_x; x < last_x; x++) {
            const double px = x + 0.5 - a.x, py = y + 0.5 - a.y;
            const double t = length_squared > 0 ? std::clamp((px * dx + py * dy) / length_squared, 0.0, 1.0) : 0;
            const double distance = std::hypot(px - t * dx, py - t * dy);
            float& covered = coverage_[static_cast<size_t>(y) * static_cast<size_t>(width_) + static_cast<size_t>(x)];
            covered = std::max(covered, static_cast<float>(std::clamp(reach - distance, 0.0, 1.0)));
        }
    }
    const bool empty = left_ >= right_ || top_ >= bottom_;
    left_ = empty ? first_x : std::min(left_, first_x);
    top_ = empty ? first_y : std::min(top_, first_y);
    right_ = empty ? last_x : std::max(right_, last_x);
    bottom_ = empty ? last_y : std::max(bottom_, last_y);
}

// Blends the covered shape into the picture, and forgets it.
void Canvas::paint(Color color, double alpha) {
    const uint8_t channels[3] = {color.r, color.g, color.b};
    for (int y = top_; y < bottom_; y++) {
        for (int x = left_; x < right_; x++) {
            const size_t i = static_cast<size_t>(y) * static_cast<size_t>(width_) + static_cast<size_t>(x);
            const double weight = alpha * static_cast<double>(std::exchange(coverage_[i], 0.0f));
            for (size_t c = 0; c < 3 && weight > 0; c++) {
                const uint8_t old = rgb_[3 * i + c];
                rgb_[3 * i + c] = static_cast<uint8_t>(std::lround(old + weight * (channels[c] - old)));
            }
        }
    }
    left_ = top_ = right_ = bottom_ = 0;
}

double Canvas::text_width(std::string_view text, double height) {
    double units = 0;
    for (char c : text)
        if (const Glyph* glyph = glyph_of(c)) units += glyph->width + glyph_gap;
    return std::max(0.0, units - glyph_gap) * height / 10;
}

std::string Canvas::shorten(std::string_view text, double height, double width) {
    if (text_width(text, height) <= width) return std::string(text);
    while (!text.empty() && text_width(text, height) + text_width(" ...", height) > width) text.remove_suffix(1);
    return std::string(text) + "...";
}

void Canvas::text(Point at, std::string_view text, double height, Color color, Align align, bool bold, bool upwards) {
    const double unit = height / 10;
    double pen = 0;
    if (align != Align::left) pen = -text_width(text, height) * (align == Align::center ? 0.5 : 1);
    // Pixel centres lie at halves: there a straight stroke is one sharp row of pixels, not two grey ones.
    const Point origin{std::floor(at.x) + 0.5, std::floor(at.y) + 0.5};
    for (char c : text) {
        const Glyph* glyph = glyph_of(c);
        if (!glyph) continue;
        for (const std::vector<Point>& stroke : glyph_strokes(*glyph)) {
            Point last{};
            for (size_t i = 0; i < stroke.size(); i++) {
                const double along = std::round(pen) + stroke[i].x * unit, up = stroke[i].y * unit;
                const Point here =
                    upwards ? Point{origin.x - up, origin.y - along} : Point{origin.x + along, origin.y - up};
                if (i > 0) cover(last, here, (bold ? 0.085 : 0.06) * height);
                last = here;
            }
        }
        pen += (glyph->width + glyph_gap) * unit;
    }
    paint(color, 1);
}

void Canvas::save(const std::string& path) const {
    std::string png;
    auto append = [](void* to, void* bytes, int n) {
        static_cast<std::string*>(to)->append(static_cast<const char*>(bytes), static_cast<size_t>(n));
    };
    // Areas of one colour are the shortest as they are. (To try five filters for each row takes a third of the time.)
    stbi_write_force_png_filter = 0;
    check(stbi_write_png_to_func(append, &png, width_, height_, 3, rgb_.data(), 3 * width_) != 0, "cannot encode ",
          path, " as PNG: out of memory");
    write_text_file(path, png);
}
