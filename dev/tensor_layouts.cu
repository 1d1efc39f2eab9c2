// dev/tensor_layouts.cu: where the blocks of activations and weights are in each geometry of tensor parallelism, and
// who sends what.
//
//   run      make dev && build/cpu/dev/tensor_layouts layouts.png
//            (--mode 1d --ranks 4: one geometry alone, with this many ranks)
//   debug    make DEBUG=1 DEVICE=cpu dev &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/tensor_layouts out.png
//
// Each row is a geometry, and its four matrices are those of a sub-layer: the residual stream x, the weight that reads
// it, what is inside, and the weight that writes the stream. A block has the color of the first rank that has it, and
// the numbers of all that have it. Everything is asked of TensorLayout (parallel/tensor/layout.cu), which the program
// itself works with: a layout that changes there changes here.
#include "dev/program.h"
#include "io/io.h"
#include "parallel/tensor/tensor.h"

#include <cstdio>
#include <map>

namespace {

constexpr Canvas::Color kInk{40, 40, 40}, kPale{120, 120, 120};
constexpr double kSide = 190, kLeft = 40, kBetween = 44, kTop = 70, kRowHeight = 350, kLine = 20;

struct Geometry {
    TensorMode mode;
    int ranks;
    TensorLayout of_rank(int rank) const { return tensor_layout(mode, rank, ranks); }
};

// A matrix by the axes that its rows and its columns are divided along.
struct Matrix {
    const char* name;
    Axes rows, columns;
    const char *down, *across;
};
std::vector<Matrix> matrices_of(const TensorLayout& l) {
    return {{"residual stream", l.stream_rows, l.stream_columns, "sequences", "columns"},
            {"weight that reads it", l.heads, l.enter_columns, "outputs", "inputs"},
            {"inside", l.inner_rows, l.heads, "sequences", "heads"},
            {"weight that writes it", l.stream_columns, l.leave_columns, "outputs", "inputs"}};
}

// "{0 1} {2 3}": the groups of ranks that differ along these axes only.
std::string groups(const Geometry& geometry, AxisSet axes) {
    std::string text;
    for (int r = 0; r < geometry.ranks; ++r) {
        const std::vector<int> members = geometry.of_rank(r).members(axes, 1);
        if (members[0] != r) continue;  // its group is there
        text += text.empty() ? "{" : " {";
        for (size_t i = 0; i < members.size(); ++i) text += concat(i > 0 ? " " : "", members[i]);
        text += "}";
    }
    return text;
}

// Who talks in the product that reads the stream; the other one has the two sides exchanged.
std::vector<std::string> messages(const Geometry& g) {
    const auto along = [&](int axis) { return groups(g, TensorLayout::set_of({axis})); };
    if (g.mode == TensorMode::one_d)
        return {"reads: no message.  writes: all-reduce of the stream in " + along(2) + ".  backward: the reverse"};
    if (g.mode == TensorMode::three_d)
        return {"reads: stream gathered in " + along(1), "weight gathered in " + along(0),
                "inside reduce-scattered in " + along(2) + ".  writes: the first and the last exchanged"};
    std::vector<std::string> lines = {"step k: column k of the stream broadcast in " + along(2),
                                      "inputs k of the weight broadcast in " + along(1)};
    if (g.mode == TensorMode::two_half_d) lines.push_back("end of a step: gradients of weights added in " + along(0));
    return lines;
}

void draw_matrix(Canvas& canvas, const Geometry& geometry, size_t which, double left, double top) {
    std::map<std::pair<int64_t, int64_t>, std::string> labels;  // of the blocks, by row and column
    std::map<std::pair<int64_t, int64_t>, int> first;
    Part rows, columns;
    for (int r = 0; r < geometry.ranks; ++r) {
        const TensorLayout layout = geometry.of_rank(r);
        const Matrix m = matrices_of(layout)[which];
        rows = layout.part(m.rows), columns = layout.part(m.columns);
        std::string& label = labels[{rows.index, columns.index}];
        label += concat(label.empty() ? "" : " ", r);
        first.try_emplace({rows.index, columns.index}, r);
    }
    const Matrix m = matrices_of(geometry.of_rank(0))[which];
    canvas.text({left, top - 30}, m.name, 10, kInk, {}, true);
    canvas.text({left, top - 12}, concat(m.across, " ->"), 8, kPale);
    canvas.text({left - 8, top + kSide}, concat("<- ", m.down), 8, kPale, Canvas::Align::left, false, true);
    const double height = kSide / static_cast<double>(rows.of), width = kSide / static_cast<double>(columns.of);
    check(height > 12 && width - 4 > Canvas::text_width(concat(geometry.ranks - 1), 9), "--ranks ", geometry.ranks,
          ": the picture has no room for their numbers");
    for (const auto& [at, label] : labels) {
        const double x = left + static_cast<double>(at.second) * width,
                     y = top + static_cast<double>(at.first) * height;
        canvas.fill(x + 1, y + 1, x + width - 1, y + height - 1, color_of(first.at(at)));
        canvas.text({x + width / 2, y + height / 2 + 5}, Canvas::shorten(label, 9, width - 4), 9, kInk,
                    Canvas::Align::center);
    }
}

void draw(const std::string& path, const std::vector<Geometry>& geometries) {
    const int width = static_cast<int>(2 * kLeft + 4 * kSide + 3 * kBetween);
    Canvas canvas(width, static_cast<int>(kRowHeight * static_cast<double>(geometries.size())));
    for (size_t g = 0; g < geometries.size(); ++g) {
        const Geometry& geometry = geometries[g];
        const double top = kTop + kRowHeight * static_cast<double>(g);
        canvas.text({kLeft, top - 50}, concat("--tp ", geometry.ranks, " --tp-mode ", tensor_mode_name(geometry.mode)),
                    11, kInk, {}, true);
        for (size_t i = 0; i < 4; ++i)
            draw_matrix(canvas, geometry, i, kLeft + static_cast<double>(i) * (kSide + kBetween), top);
        double y = top + kSide + 22;
        for (const std::string& line : messages(geometry)) {
            canvas.text({kLeft, y}, line, 9, kInk);
            std::printf("%-5s %s\n", tensor_mode_name(geometry.mode), line.c_str());
            y += kLine;
        }
    }
    canvas.save(path);
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> paths;
    std::string mode;
    int64_t ranks = 0;
    CommandLine line{"tensor_layouts: draws what each rank has of activations and weights, and prints who sends what"};
    line.words("OUT.png", paths, 1);
    Heading h{line, "Options"};
    h.option("--mode", mode, "one geometry alone, with --ranks: 1d, 2d, 2.5d or 3d");
    h.count("--ranks", ranks, "ranks of that geometry");
    return run_program("tensor_layouts", line, argc, argv, [&] {
        check(!paths.empty() && paths[0].ends_with(".png"), "give a picture to draw: tensor_layouts layouts.png");
        check(ranks <= 27, "--ranks ", ranks, ": at most 27 are drawn");
        check(mode.empty() == (ranks == 0), "--mode and --ranks belong together: --mode 2d --ranks 9");
        std::vector<Geometry> geometries = {
            {TensorMode::one_d, 4}, {TensorMode::two_d, 4}, {TensorMode::two_half_d, 8}, {TensorMode::three_d, 8}};
        if (!mode.empty()) geometries = {{tensor_mode_from_name(mode), static_cast<int>(ranks)}};
        draw(paths[0], geometries);
        std::printf("%s\n", paths[0].c_str());
    });
}
