// parallel/tensor/cut.cu: the elements of a cut parameter.
//
//     whole (rows 6, cols 4)        rows {1, 2}, {4, 1} of it            columns 2 and 3 of all rows
//      0  1  2  3                    4  5  6  7      piece 0: first 4,      2  3      one piece: first 2, run 2,
//      4  5  6  7                    8  9 10 11      n 8, in one run        6  7      stride 4, n 12
//      8  9 10 11                   16 17 18 19      piece 1: first 16     10 11
//     12 13 14 15                                                          14 15
//     16 17 18 19                                                          18 19
//     20 21 22 23                                                          22 23
#include "parallel/tensor/tensor.h"

#include <algorithm>

int64_t cut_rows(const Cut& cut) {
    int64_t rows = 0;
    for (const auto& range : cut.row_ranges) rows += range.second;
    return rows;
}

std::vector<CutPiece> cut_pieces(const Cut& cut, int64_t first, int64_t n) {
    std::vector<CutPiece> pieces;
    const int64_t end = first + n, cols = cut.n_cols;
    int64_t range_first = 0;  // local element
    for (const auto& [row, rows] : cut.row_ranges) {
        const int64_t range_end = range_first + rows * cols;
        int64_t at = std::max(first, range_first);
        const int64_t last = std::min(end, range_end);
        while (at < last) {
            const int64_t in_range = at - range_first, row_at = row + in_range / cols, col = in_range % cols;
            const int64_t whole_first = row_at * cut.cols + cut.first_col + col;
            int64_t n_here = last - at, run = n_here, stride = n_here;
            if (cols != cut.cols) {  // a part of a row, or whole rows
                if (col > 0 || n_here < cols) n_here = std::min(n_here, cols - col), run = stride = n_here;
                else n_here = n_here / cols * cols, run = cols, stride = cut.cols;
            }
            pieces.push_back({at - first, n_here, whole_first, run, stride});
            at += n_here;
        }
        range_first = range_end;
    }
    return pieces;
}

namespace {

// Calls f(place in the whole parameter, place in this rank's part, how many) for each run of neighbouring elements.
template <class F>
void for_each_run(const Cut& cut, F&& f) {
    for (const CutPiece& piece : cut_pieces(cut, 0, cut_rows(cut) * cut.n_cols))
        for (int64_t i = 0; i < piece.n; i += piece.run)
            f(piece.first + i / piece.run * piece.stride, piece.local_first + i, std::min(piece.run, piece.n - i));
}

}  // namespace

std::vector<float> cut_from(const Param& param, const std::vector<float>& whole) {
    const Cut& cut = param.cut;
    check(std::ssize(whole) == cut.rows * cut.cols, param.name, ": ", whole.size(), " numbers, and the whole has ",
          cut.rows, " x ", cut.cols);
    std::vector<float> part(static_cast<size_t>(cut_rows(cut) * cut.n_cols));
    for_each_run(cut,
                 [&](int64_t from, int64_t to, int64_t n) { std::copy_n(whole.begin() + from, n, part.begin() + to); });
    return part;
}

void put_into(std::vector<float>& whole, const Cut& cut, const std::vector<float>& its) {
    for_each_run(cut,
                 [&](int64_t to, int64_t from, int64_t n) { std::copy_n(its.begin() + from, n, whole.begin() + to); });
}
