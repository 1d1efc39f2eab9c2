// parallel/tensor/layout.cu: the ranks of a group as a grid, and what each of them has.
//
//     1d    rank r               heads r
//     2d    rank (i, j)          stream: sequences i, columns j          heads j      weights: outputs j, inputs i
//     2.5d  rank (k, i, j)       the same with sequences (k, i)          heads j      the same: k has copies
//     3d    rank (x, y, z)       stream: sequences (x, y), columns z                  enter: outputs y, inputs (z, x)
//                                inside: sequences (x, z), heads y                    leave: outputs z, inputs (y, x)
//
// In all but 3d what enters a sub-layer is divided as what leaves it. In 3d a product exchanges the parts of y and z:
// an output has the layout that the next product takes as its input.
#include "core/names.h"
#include "parallel/tensor/tensor.h"

#include <cmath>

namespace {
constexpr Named<TensorMode> kModes[] = {{"1d", TensorMode::one_d},
                                        {"2d", TensorMode::two_d},
                                        {"2.5d", TensorMode::two_half_d},
                                        {"3d", TensorMode::three_d}};

// The whole root of n, or 0.
int exact_root(int n, int power) {
    const int root = static_cast<int>(std::lround(std::pow(n, 1.0 / power)));
    return static_cast<int>(std::lround(std::pow(root, power))) == n ? root : 0;
}
}  // namespace

TensorMode tensor_mode_from_name(const std::string& name) { return find_named(kModes, "--tp-mode", name).value; }
const char* tensor_mode_name(TensorMode mode) { return name_of(kModes, mode); }

TensorLayout tensor_layout(TensorMode mode, int rank, int size, bool sequence, int depth) {
    check(mode == TensorMode::one_d || !sequence, "--sp with --tp-mode ", tensor_mode_name(mode),
          ": the residual stream is divided already; leave --sp out");
    check(depth == 0 || mode == TensorMode::two_half_d, "--tp-depth belongs to --tp-mode 2.5d");
    check(depth >= 0, "--tp-depth must not be negative");
    TensorLayout layout;
    layout.mode = mode, layout.rank = rank, layout.size = size, layout.sequence = sequence;
    if (mode == TensorMode::one_d) {
        layout.sizes = {1, 1, size};
        layout.heads = layout.leave_columns = {2};
    } else if (mode == TensorMode::three_d) {
        const int p = exact_root(size, 3);
        check(p > 1, "--tp ", size, " --tp-mode 3d: a cube of ranks is needed: --tp 8, 27 or 64");
        layout.sizes = {p, p, p};
        layout.stream_rows = {0, 1}, layout.stream_columns = {2};
        layout.inner_rows = {0, 2}, layout.heads = {1};
        layout.enter_columns = {2, 0}, layout.leave_columns = {1, 0};
    } else {
        const bool flat = mode == TensorMode::two_d;
        if (flat) depth = 1;
        // A depth of more than q would make copies where a larger q divides.                   (Wang et al. 2021)
        for (int d = 1; !flat && depth == 0 && d * d * d <= size; ++d)
            if (size % d == 0 && exact_root(size / d, 2) >= d && d > 1) depth = d;
        const int q = depth > 0 && size % depth == 0 ? exact_root(size / depth, 2) : 0;
        check(q > 1, "--tp ", size, " --tp-mode ", tensor_mode_name(mode), ": ",
              flat ? "a square of ranks is needed: --tp 4, 9 or 16"
              : depth == 0
                  ? "depth x q x q ranks are needed, with a depth of at least 2 and q at least the depth, or as "
                    "--tp-depth says: --tp 8, 18 or 27"
                  : concat("depth x q x q ranks are needed, and --tp-depth ", depth, " says: --tp ", 4 * depth, ", ",
                           9 * depth, " or ", 16 * depth));
        layout.sizes = {depth, q, q};
        layout.stream_rows = layout.inner_rows = {0, 1};
        layout.stream_columns = layout.heads = {2};
        layout.enter_columns = layout.leave_columns = {1};
    }
    return layout;
}

int TensorLayout::coordinate(int axis) const {
    int below = 1;
    for (int a = 2; a > axis; --a) below *= sizes[static_cast<size_t>(a)];
    return rank / below % sizes[static_cast<size_t>(axis)];
}

Part TensorLayout::part(const Axes& axes) const {
    Part part;
    for (const int axis : axes) {
        const int n = sizes[static_cast<size_t>(axis)];
        part = {part.index * n + coordinate(axis), part.of * n};
    }
    return part;
}

AxisSet TensorLayout::all() const {
    AxisSet set = 0;
    for (int a = 0; a < 3; ++a)
        if (sizes[static_cast<size_t>(a)] > 1) set |= static_cast<AxisSet>(1 << a);
    return set;
}
AxisSet TensorLayout::set_of(const Axes& axes) {
    AxisSet set = 0;
    for (const int axis : axes) set |= static_cast<AxisSet>(1 << axis);
    return set;
}

std::vector<int> TensorLayout::members(AxisSet axes, int same_keys) const {
    std::vector<int> members;
    for (int r = 0; r < size; ++r) {
        TensorLayout other = *this;
        other.rank = r;
        bool in = true;
        for (int a = 0; a < 3; ++a) {
            const bool is_free = axes >> a & 1, is_heads = heads == Axes{a};
            if (is_heads && (axes & kSameKeys) != 0)
                in = in && other.coordinate(a) / same_keys == coordinate(a) / same_keys;
            else if (!is_free) in = in && other.coordinate(a) == coordinate(a);
        }
        if (in) members.push_back(r);
    }
    return members;
}
