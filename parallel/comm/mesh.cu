// mesh.cu: ranks as a grid of named axes.
//
// A communicator along an axis holds the ranks that differ in that coordinate only. With {dp 2, tp 4},
// rank = 4 dp + tp:
//
//               tp 0   1   2   3
//      dp 0        0   1   2   3      tp: rows       {0 1 2 3} {4 5 6 7}
//      dp 1        4   5   6   7      dp: columns    {0 4} {1 5} {2 6} {3 7}
#include "parallel/comm/comm.h"

#include <algorithm>
#include <iomanip>
#include <set>
#include <sstream>

Mesh::Mesh(Comm& world, std::vector<Axis> axes) : world_(world), axes_(std::move(axes)) {
    int64_t product = 1;
    std::set<std::string> names;
    std::string text;
    for (const Axis& axis : axes_) {
        check(axis.size >= 1 && names.insert(axis.name).second, "mesh: axis '", axis.name, "' of size ", axis.size,
              ": sizes start at 1, and names must differ");
        product *= axis.size;
        text += concat(text.empty() ? "" : " x ", axis.name, " ", axis.size);
    }
    check(product == world.size, "mesh: ", text, " = ", product, " ranks, but there are ", world.size,
          ": the product of the axes must be the number of ranks");
    indices_ = indices_of(world.rank);
    for (const Axis& axis : axes_) comms_.push_back(make_comm({axis.name}));
}

size_t Mesh::find(const std::string& name) const {
    const auto at = std::find_if(axes_.begin(), axes_.end(), [&](const Axis& axis) { return axis.name == name; });
    check(at != axes_.end(), "the mesh has no axis '", name, "'");
    return static_cast<size_t>(at - axes_.begin());
}
Comm& Mesh::comm(const std::string& axis) { return *comms_[find(axis)]; }
int Mesh::index(const std::string& axis) const { return indices_[find(axis)]; }
int Mesh::size(const std::string& axis) const { return axes_[find(axis)].size; }

int Mesh::rank_at(const std::vector<int>& indices) const {
    int rank = 0;
    for (size_t a = 0; a < axes_.size(); ++a) rank = rank * axes_[a].size + indices[a];
    return rank;
}

std::vector<int> Mesh::indices_of(int rank) const {
    std::vector<int> indices(axes_.size());
    for (size_t a = axes_.size(); a-- > 0; rank /= axes_[a].size) indices[a] = rank % axes_[a].size;
    return indices;
}

// Of all ranks those that agree with this one on all other axes, in the order of their numbers.
//
// All such groups count as placed on machines like the first one, whose other coordinates are 0, also where machines
// end in the middle of a group: then sums in two levels have one order in all of them. Weights that two groups have,
// and the norm of all gradients, must have the same bits in both.
std::unique_ptr<Comm> Mesh::make_comm(const std::vector<std::string>& along) {
    std::set<size_t> free;
    std::string name;
    for (const std::string& axis : along) {
        free.insert(find(axis));
        name += (name.empty() ? "" : "+") + axis;
    }
    std::vector<int> members, first;
    for (int rank = 0; rank < world_.size; ++rank) {
        const std::vector<int> other = indices_of(rank);
        bool same = true, in_first = true;
        for (size_t a = 0; a < axes_.size(); ++a) {
            same = same && (free.count(a) || other[a] == indices_[a]);
            in_first = in_first && (free.count(a) || other[a] == 0);
        }
        if (same) members.push_back(rank);
        if (in_first) first.push_back(rank);
    }
    return world_.split(members, name, first);
}

// The last two axes of more than one rank are a table's rows and columns; the others count the tables.
std::string Mesh::picture() const {
    std::ostringstream text;
    text << "mesh     " << world_.size << (world_.size == 1 ? " rank" : " ranks");
    std::vector<size_t> shown;
    for (size_t a = 0; a < axes_.size(); ++a) {
        text << (a == 0 ? " = " : " x ") << axes_[a].name << " " << axes_[a].size;
        if (axes_[a].size > 1) shown.push_back(a);
    }
    text << "\n";
    if (shown.empty()) return text.str();
    const size_t column = shown.back();
    shown.pop_back();
    const bool has_rows = !shown.empty();
    const size_t row = has_rows ? shown.back() : column;
    if (has_rows) shown.pop_back();

    std::vector<int> at(axes_.size(), 0);
    for (bool more = true; more;) {
        std::string title;
        for (size_t a : shown) title += concat(axes_[a].name, " ", at[a], "  ");
        text << "         " << std::left << std::setw(20) << title;
        for (int c = 0; c < axes_[column].size; ++c) text << std::setw(7) << concat(axes_[column].name, " ", c);
        text << "\n";
        for (int r = 0; r < (has_rows ? axes_[row].size : 1); ++r) {
            if (has_rows) at[row] = r;
            text << "         " << std::setw(20) << (has_rows ? concat("      ", axes_[row].name, " ", r) : "");
            for (int c = 0; c < axes_[column].size; ++c) {
                at[column] = c;
                text << std::setw(7) << rank_at(at);
            }
            text << "\n";
        }
        // The next table: count up, the last of the remaining axes fastest.
        more = false;
        for (size_t i = shown.size(); i-- > 0 && !more;) {
            more = ++at[shown[i]] < axes_[shown[i]].size;
            if (!more) at[shown[i]] = 0;
        }
    }
    return text.str();
}
