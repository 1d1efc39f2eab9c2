// Adafactor: Adam's v from its row and column means.                           (Shazeer & Stern 2018, arXiv:1804.04235)
//
//   for each matrix W (R, C) with gradient G:
//   row_r = beta row_r + (1 - beta) mean over c of G^2       beta = 1 - t^-decay_power: 0 at first, then towards 1
//   col_c = beta col_c + (1 - beta) mean over r of G^2
//   v_rc  = max(row_r col_c / mean(row), eps)                the matrix of rank 1 with these means
//   U     = G / sqrt(v)                                      about 1 each
//   alpha = max(min_scale, rms(W)) * min(lr, 1 / sqrt(t)) / max(1, rms(U) / clip_threshold)
//   W     = W - alpha U - lr weight_decay W
//
// R + C numbers of state instead of 2 R C. rms(X) is the root of the mean square: steps are relative to the size of W.
// A step that is unusually long, because G has grown faster than v, is shortened. A vector is a matrix of one row: then
// row / mean(row) = 1, and col is the full v. As in torch.optim.Adafactor, but with eps = 1e-30, the value that the
// paper adds to G^2.
//
// All matrices of a unit at once, in tiles of 64 x 64: six launches, for any number of parameters.
//   squares   tile: sums of G^2 by row and by column, sum of W^2
//   factors   row or column: adds up its tiles; new row_r, col_c
//   scales    matrix: mean(row), rms(W)
//   sizes     tile: sum of U^2
//   lengths   matrix: alpha
//   apply     tile
//
// Where ranks divide a matrix (Param::cut), factors writes a rank's sums to the places of its rows and columns in the
// whole, and they are added up over the ranks: R + C + 1 numbers, and one more for U. Each rank then has the row and
// the col of the whole matrix.
//   part_sums          matrix: sum of W^2, of U^2
//   divided_factors    row or column of the whole: new row_r, col_c
//   factors_of_part    row or column of the part: a copy of its factor
#include "optim/weights.cuh"

#include <algorithm>
#include <cmath>

namespace {

constexpr int kTile = 64;    // rows and columns of a tile
constexpr int kBlock = 256;  // threads of the block of a matrix
// A thread handles one column of the tile. On the CPU device a barrier switches stacks once for each thread, so there
// one thread handles all columns, and its loops over columns are SIMD.
constexpr int kThreads = kOnCpu ? 1 : kTile;
constexpr int kColumns = kTile / kThreads;

struct Matrix {
    int64_t offset, row_first, col_first;  // in the flat arrays; in the factors
    int32_t R, C, first_tile, tiles_across, n_tiles;
    float decay;
    uint64_t key;  // of random numbers: hash_name
    // The whole matrix, of which this is a part: its sides, the places of its factors, and those of its sums: of rows,
    // of columns and of W^2 from sum_first on; of U^2. sum_first -1: it is not cut, and these are as above.
    int64_t whole_row_first, whole_col_first, sum_first, u_at;
    int32_t whole_R, whole_C;
    bool counted;             // of ranks that have the same part one adds its sums
    PlaceInWhole place;       // of the part's elements
    PlaceInWhole rows, cols;  // of its rows and columns
    __host__ __device__ double whole_n() const { return static_cast<double>(whole_R) * whole_C; }
};
// Where a tile begins, or a line: the 64 rows, or the 64 columns, of a block of the kernels that make factors.
struct Place {
    int32_t matrix, row, col;  // first row and column of a tile. Of a line: row >= 0 or col >= 0, the other is -1
};
struct MatrixScale {
    float row_mean, rms, alpha;
};
struct Tables {
    const Matrix* matrices;
    const Place *tiles, *lines, *whole_lines;
};
// Scratch, all of it written in each step before it is read.
struct Partials {
    float *row_sums, *col_sums;  // (n_tiles, 64): of G^2
    float *w_sums, *u_sums;      // (n_tiles): of W^2, of U^2
    MatrixScale* scales;         // (n_matrices)
    float* divided;              // sums of matrices that are cut (Matrix)
};

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

// The sum of one float per column, in order, for thread 0 alone.
__device__ __forceinline__ float tile_sum(const float (&mine)[kColumns], float* shared) {
    for (int k = 0; k < kColumns; ++k) shared[threadIdx.x + k] = mine[k];
    __syncthreads();  // all values have been written
    float sum = 0;
    for (int k = 0; threadIdx.x == 0 && k < kTile; ++k) sum += shared[k];
    return sum;
}

template <class V, class G>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(Partials p, const V* values, const G* grads, const float* norm_scale, Tables tables) {
    __shared__ float squares[kTile][kTile + 1];  // + 1: a column's elements lie in different banks
    __shared__ float shared[kTile];
    const Place tile = tables.tiles[blockIdx.x];
    const Matrix m = tables.matrices[tile.matrix];
    const int x = threadIdx.x, n_rows = min(kTile, m.R - tile.row);
    const float scale = norm_scale[1];
    float col_sums[kColumns] = {}, w_sums[kColumns] = {};
    for (int r = 0; r < n_rows; ++r) {
        const int64_t first = m.offset + static_cast<int64_t>(tile.row + r) * m.C + tile.col + x;
        float g[kColumns], w[kColumns];  // 0 beyond the end of the row
        load_chunk(g, grads + first, m.C - tile.col - x);
        load_chunk(w, values + first, m.C - tile.col - x);
        for (int k = 0; k < kColumns; ++k) {
            g[k] *= scale;
            col_sums[k] += g[k] * g[k];
            w_sums[k] += w[k] * w[k];
            squares[r][x + k] = g[k] * g[k];
        }
    }
    const float w_sum = tile_sum(w_sums, shared);  // after its barrier the squares are complete as well
    if (x == 0) p.w_sums[blockIdx.x] = w_sum;
    for (int k = x; k < x + kColumns; ++k) {
        float row_sum = 0;
        for (int c = 0; k < n_rows && c < kTile; ++c) row_sum += squares[k][c];
        p.row_sums[blockIdx.x * int64_t{kTile} + k] = row_sum;
        p.col_sums[blockIdx.x * int64_t{kTile} + k] = col_sums[k - x];
    }
}

// One thread per row or column. The sum of a tile is f32, over 64 elements; thousands of tiles are added up in double.
__global__ void __launch_bounds__(kTile)
    factors_kernel(float* rows, float* cols, Partials p, const float* norm_scale, Tables tables, float one_minus_beta) {
    const Place line = tables.lines[blockIdx.x];
    const Matrix m = tables.matrices[line.matrix];
    const bool is_row = line.row >= 0;
    const int k = (is_row ? line.row : line.col) + static_cast<int>(threadIdx.x);
    const float scale = norm_scale[1];
    if (scale != scale || k >= (is_row ? m.R : m.C)) return;  // NaN: no update
    // Down the column's tiles, or across the row's.
    const int first = is_row ? k / kTile * m.tiles_across : k / kTile, step = is_row ? 1 : m.tiles_across;
    const int last = is_row ? first + m.tiles_across : m.n_tiles;
    const float* sums = is_row ? p.row_sums : p.col_sums;
    double sum = 0;
    for (int tile = first; tile < last; tile += step) sum += sums[(m.first_tile + tile) * int64_t{kTile} + k % kTile];
    if (m.sum_first >= 0) {
        const int64_t at = is_row ? m.rows.of(k) : m.whole_R + m.cols.of(k);
        if (m.counted) p.divided[m.sum_first + at] = static_cast<float>(sum);
        return;
    }
    const float mean = static_cast<float>(sum / (is_row ? m.C : m.R));
    float& factor = is_row ? rows[m.row_first + k] : cols[m.col_first + k];
    factor = (1 - one_minus_beta) * factor + one_minus_beta * mean;
}

// Lines of whole matrices, of which this rank has a part: p.divided has the sums of all ranks.
__global__ void __launch_bounds__(kTile)
    divided_factors_kernel(float* rows, float* cols, Partials p, const float* norm_scale, Tables tables,
                           float one_minus_beta) {
    const Place line = tables.whole_lines[blockIdx.x];
    const Matrix m = tables.matrices[line.matrix];
    const bool is_row = line.row >= 0;
    const int k = (is_row ? line.row : line.col) + static_cast<int>(threadIdx.x);
    const float scale = norm_scale[1];
    if (scale != scale || k >= (is_row ? m.whole_R : m.whole_C)) return;  // NaN: no update
    const float mean =
        p.divided[m.sum_first + (is_row ? 0 : m.whole_R) + k] / static_cast<float>(is_row ? m.whole_C : m.whole_R);
    float& factor = is_row ? rows[m.whole_row_first + k] : cols[m.whole_col_first + k];
    factor = (1 - one_minus_beta) * factor + one_minus_beta * mean;
}
__global__ void __launch_bounds__(kTile) factors_of_part_kernel(float* rows, float* cols, Tables tables) {
    const Place line = tables.lines[blockIdx.x];
    const Matrix m = tables.matrices[line.matrix];
    const int row = line.row + static_cast<int>(threadIdx.x), col = line.col + static_cast<int>(threadIdx.x);
    if (m.sum_first < 0) return;
    if (line.row >= 0 && row < m.R) rows[m.row_first + row] = rows[m.whole_row_first + m.rows.of(row)];
    if (line.row < 0 && col < m.C) cols[m.col_first + col] = cols[m.whole_col_first + m.cols.of(col)];
}

// The sum of n numbers, by a block of kBlock threads, for thread 0 alone.
__device__ __forceinline__ double sum_of(const float* numbers, int64_t n, double* shared) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += kBlock) sum += numbers[i];
    __syncthreads();  // all threads have read the last sum's numbers
    shared[threadIdx.x] = sum;
    __syncthreads();  // all values have been written
    for (int k = 1; threadIdx.x == 0 && k < kBlock; ++k) sum += shared[k];
    return sum;
}

// Of a matrix that is cut, this rank's tiles: sums (n_tiles) of W^2, behind the sums of rows and columns, or of U^2.
__global__ void __launch_bounds__(kBlock) part_sums_kernel(Partials p, const float* sums, Tables tables, bool of_u) {
    __shared__ double shared[kBlock];
    const Matrix m = tables.matrices[blockIdx.x];
    if (m.sum_first < 0) return;
    const double sum = sum_of(sums + m.first_tile, m.n_tiles, shared);
    if (threadIdx.x == 0 && m.counted)
        p.divided[of_u ? m.u_at : m.sum_first + m.whole_R + m.whole_C] = static_cast<float>(sum);
}

__global__ void __launch_bounds__(kBlock) scales_kernel(Partials p, const float* rows, Tables tables) {
    __shared__ double shared[kBlock];
    const Matrix m = tables.matrices[blockIdx.x];
    const double row_sum = sum_of(rows + m.whole_row_first, m.whole_R, shared);
    double w_sum = sum_of(p.w_sums + m.first_tile, m.n_tiles, shared);
    if (threadIdx.x > 0) return;
    if (m.sum_first >= 0) w_sum = p.divided[m.sum_first + m.whole_R + m.whole_C];
    p.scales[blockIdx.x].row_mean = fmaxf(static_cast<float>(row_sum / m.whole_R), 1e-37f);  // a divisor
    p.scales[blockIdx.x].rms = static_cast<float>(sqrt(w_sum / m.whole_n()));
}

// One element of U. The quotient of the rows comes first: it is at most R, where row * col could underflow. (The
// comparison is written out because g++ does not vectorise fmaxf, which has rules for NaN.)
__device__ __forceinline__ float update_of(float g, float row, float row_mean, float col, float eps) {
    const float v = row / row_mean * col;
    return g / sqrtf(v > eps ? v : eps);
}

template <class G>
__global__ void __launch_bounds__(kThreads)
    sizes_kernel(Partials p, const G* grads, const float* rows, const float* cols, const float* norm_scale,
                 Tables tables, float eps) {
    __shared__ float shared[kTile];
    const Place tile = tables.tiles[blockIdx.x];
    const Matrix m = tables.matrices[tile.matrix];
    const int col = tile.col + static_cast<int>(threadIdx.x), end = min(tile.row + kTile, m.R);
    const float scale = norm_scale[1], row_mean = p.scales[tile.matrix].row_mean;
    float sums[kColumns] = {}, col_factors[kColumns];
    load_chunk(col_factors, cols + m.col_first + col, m.C - col);
    for (int row = tile.row; row < end; ++row) {
        const int64_t first = m.offset + static_cast<int64_t>(row) * m.C + col;
        const float row_factor = rows[m.row_first + row];
        float g[kColumns];
        load_chunk(g, grads + first, m.C - col);
        for (int k = 0; k < kColumns; ++k) {
            const float u = update_of(scale * g[k], row_factor, row_mean, col_factors[k], eps);
            sums[k] += u * u;
        }
    }
    const float sum = tile_sum(sums, shared);
    if (threadIdx.x == 0) p.u_sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kBlock)
    lengths_kernel(Partials p, Tables tables, float min_scale, float relative_lr, float clip_threshold) {
    __shared__ double shared[kBlock];
    const Matrix m = tables.matrices[blockIdx.x];
    double sum = sum_of(p.u_sums + m.first_tile, m.n_tiles, shared);
    if (threadIdx.x > 0) return;
    if (m.sum_first >= 0) sum = p.divided[m.u_at];
    MatrixScale& scale = p.scales[blockIdx.x];
    const float rms = static_cast<float>(sqrt(sum / m.whole_n()));
    scale.alpha = fmaxf(min_scale, scale.rms) * relative_lr / fmaxf(1.0f, rms / clip_threshold);
}

template <class F, class G>
__global__ void __launch_bounds__(kThreads)
    adafactor_apply_kernel(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy, Partials p,
                           const G* __restrict__ grads, const float* __restrict__ rows, const float* __restrict__ cols,
                           const float* __restrict__ norm_scale, Tables tables, float eps, float decay_step, F format) {
    const Place tile = tables.tiles[blockIdx.x];
    const Matrix m = tables.matrices[tile.matrix];
    const int col = tile.col + static_cast<int>(threadIdx.x), end = min(tile.row + kTile, m.R);
    const float scale = norm_scale[1];
    if (scale != scale) return;  // NaN: no update
    const MatrixScale s = p.scales[tile.matrix];
    float col_factors[kColumns];
    load_chunk(col_factors, cols + m.col_first + col, m.C - col);
    for (int row = tile.row; row < end; ++row) {
        const int64_t first = m.offset + static_cast<int64_t>(row) * m.C + col;
        const float row_factor = rows[m.row_first + row];
        float g[kColumns], w[kColumns];
        load_chunk(g, grads + first, m.C - col);
        load_chunk(w, values + first, m.C - col);
        for (int k = 0; k < kColumns; ++k) {
            const float u = update_of(scale * g[k], row_factor, s.row_mean, col_factors[k], eps);
            w[k] -= s.alpha * u + decay_step * m.decay * w[k];
        }
        format.store_chunk(values, first, copy, first, w, m.C - col, m.key, first - m.offset, m.place);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The optimizer

class Adafactor final : public Optimizer {
    static constexpr const char* kName = "Adafactor";

  public:
    Adafactor(Arena& arena, const std::vector<Param>& params, int64_t n, const OptimizerOptions& options)
        : params_(params), n_(n), options_(options) {
        check_optimizer_input(kName, {{.params = params, .n = n}}, options);
        for (const Param& param : params_) add_matrix(param);
        rows_ = arena.take("optimizer row", DType::f32, {n_rows_});
        cols_ = arena.take("optimizer col", DType::f32, {n_cols_});
        matrix_table_ = arena.take("optimizer tiles", DType::i32, {std::ssize(matrices_), sizeof(Matrix) / 4});
        tile_table_ = arena.take("optimizer tiles", DType::i32, {n_tiles_, sizeof(Place) / 4});
        line_table_ = arena.take("optimizer tiles", DType::i32, {n_lines_, sizeof(Place) / 4});
        for (Matrix& m : matrices_)  // the sums of U^2 lie behind the others
            if (m.sum_first >= 0) m.u_at = divided_n_ + n_cut_++;
        if (n_cut_ == 0) return;
        whole_line_table_ = arena.take("optimizer tiles", DType::i32, {n_whole_lines_, sizeof(Place) / 4});
    }
    int64_t scratch_n() const override {
        return n_tiles_ * (2 * kTile + 2) +
               static_cast<int64_t>(matrices_.size() * sizeof(MatrixScale) / sizeof(float)) + divided_n_ + n_cut_;
    }
    std::vector<Tensor> sums() const override {
        if (n_cut_ == 0) return {};
        return {make_tensor(nullptr, DType::f32, {divided_n_}), make_tensor(nullptr, DType::f32, {n_cut_})};
    }
    void use_sums(const SumOverRanks& sum) override { sum_ = sum; }
    void use_scratch(Tensor scratch) override { scratch_ = scratch; }
    void init(cudaStream_t stream) override {
        if (matrices_.empty()) return;
        check(matrix_table_.data != nullptr, kName, ": init before the arena is reserved");
        const auto upload = [&](const Tensor& to, const void* from) {
            cudaCheck(cudaMemcpyAsync(to.data, from, to.bytes(), cudaMemcpyHostToDevice, stream));
        };
        // Listed here, and not where they are counted: a plan needs their numbers alone.
        std::vector<Place> tiles, lines, whole_lines;
        for (int32_t k = 0; k < static_cast<int32_t>(matrices_.size()); ++k) {
            const Matrix& m = matrices_[static_cast<size_t>(k)];
            add_tiles(tiles, k, m);
            add_lines(lines, k, m.R, m.C);
            if (m.sum_first >= 0) add_lines(whole_lines, k, m.whole_R, m.whole_C);
        }
        upload(matrix_table_, matrices_.data());
        upload(tile_table_, tiles.data());
        upload(line_table_, lines.data());
        if (n_cut_ > 0) upload(whole_line_table_, whole_lines.data());
        cudaCheck(cudaStreamSynchronize(stream));  // the lists end here
        for (const Tensor& state : {rows_, cols_}) cudaCheck(cudaMemsetAsync(state.data, 0, state.bytes(), stream));
    }
    void step_units(size_t, size_t, const Weights& weights, Tensor grads, Tensor norm_scale, double lr, int64_t t,
                    cudaStream_t stream) override;
    size_t n_units() const override { return 1; }  // make_by_unit has the others
    std::vector<OptimizerState> states() const override {
        std::vector<OptimizerState> all;
        for (size_t k = 0; k < matrices_.size(); ++k) {
            const Matrix& m = matrices_[k];
            all.push_back({"row", params_[k].name, 0, rows_.slice(m.whole_row_first, m.whole_R), 0});
            all.push_back({"col", params_[k].name, 0, cols_.slice(m.whole_col_first, m.whole_C), 0});
        }
        return all;
    }

  private:
    void add_matrix(const Param& param);
    static void add_tiles(std::vector<Place>& tiles, int32_t index, const Matrix& m);
    // 64 rows or columns of matrix `index`, which is R x C, each; and their number.
    static void add_lines(std::vector<Place>& lines, int32_t index, int32_t R, int32_t C);
    static int64_t count_lines(int64_t R, int64_t C) { return ceil_div(R, kTile) + ceil_div(C, kTile); }
    // Sums of squares -> factors, mean(row) and rms(W); sums of U^2 -> alpha. They read no weights and no gradients.
    void find_factors(const Partials& p, const Tables& tables, const float* norm, float one_minus_beta,
                      cudaStream_t stream);
    void find_lengths(const Partials& p, const Tables& tables, float relative_lr, cudaStream_t stream);
    // What the kernels move, in bytes: the tables of matrices (of which they read some fields), of tiles, of lines; a
    // number for each tile, for each matrix; the factors of the matrices here.
    int64_t matrix_bytes() const { return static_cast<int64_t>(matrix_table_.bytes()); }
    int64_t tile_bytes() const { return static_cast<int64_t>(tile_table_.bytes()) + matrix_bytes(); }
    int64_t line_bytes() const { return static_cast<int64_t>(line_table_.bytes()) + matrix_bytes(); }
    int64_t of_tiles() const { return n_tiles_ * int64_t{sizeof(float)}; }
    int64_t of_matrices() const { return std::ssize(matrices_) * int64_t{sizeof(float)}; }
    int64_t factor_bytes() const { return n_factors_ * int64_t{sizeof(float)}; }
    int64_t whole_factor_bytes() const { return n_whole_factors_ * int64_t{sizeof(float)}; }
    Tensor divided(int64_t first, int64_t n) const {
        return scratch_.slice(scratch_n() - divided_n_ - n_cut_ + first, n);
    }

    std::vector<Param> params_;
    int64_t n_;
    OptimizerOptions options_;
    std::vector<Matrix> matrices_;
    int64_t n_tiles_ = 0, n_lines_ = 0, n_whole_lines_ = 0;
    int64_t n_elements_ = 0;           // of all matrices
    int64_t n_rows_ = 0, n_cols_ = 0;  // of all factors
    int64_t n_factors_ = 0;            // of the matrices as they lie here; of these, those of matrices that are cut
    int64_t n_cut_factors_ = 0;
    int64_t n_whole_factors_ = 0;        // of the whole matrices that are cut
    int64_t n_tile_sums_ = 0;            // of rows and columns of tiles, without those behind a matrix' last
    int64_t divided_n_ = 0, n_cut_ = 0;  // sums of matrices that are cut, but for those of U^2; such matrices
    Tensor rows_, cols_, matrix_table_, tile_table_, line_table_, whole_line_table_, scratch_;
    SumOverRanks sum_;
};

void Adafactor::add_tiles(std::vector<Place>& tiles, int32_t index, const Matrix& m) {
    for (int64_t row = 0; row < m.R; row += kTile)
        for (int64_t col = 0; col < m.C; col += kTile)
            tiles.push_back({index, static_cast<int32_t>(row), static_cast<int32_t>(col)});
}

void Adafactor::add_lines(std::vector<Place>& lines, int32_t index, int32_t R, int32_t C) {
    for (int64_t row = 0; row < R; row += kTile) lines.push_back({index, static_cast<int32_t>(row), -1});
    for (int64_t col = 0; col < C; col += kTile) lines.push_back({index, -1, static_cast<int32_t>(col)});
}

void Adafactor::add_matrix(const Param& param) {
    // The vocabulary's padding is not included in any mean; it stays 0.
    const bool is_vector = param.value.ndim < 2;
    const int64_t R = is_vector ? 1 : param.value.rows() - param.padded_rows,
                  C = is_vector ? param.value.n() : param.value.cols();
    const int64_t n_tiles = ceil_div(R, kTile) * ceil_div(C, kTile);
    Matrix m{.offset = param.offset,
             .row_first = n_rows_,
             .col_first = n_cols_,
             .R = narrow(R, "rows"),
             .C = narrow(C, "columns"),
             .first_tile = narrow(n_tiles_, "Adafactor: the number of tiles"),
             .tiles_across = static_cast<int32_t>(ceil_div(C, kTile)),
             .n_tiles = narrow(n_tiles, "Adafactor: tiles of a matrix"),
             .decay = param.decay ? 1.0f : 0.0f,
             .key = hash_name(param.file_name()),
             .whole_row_first = n_rows_,
             .whole_col_first = n_cols_,
             .sum_first = -1,
             .u_at = -1,
             .whole_R = narrow(R, "rows"),
             .whole_C = narrow(C, "columns"),
             .counted = param.counted,
             .place = {},
             .rows = {},
             .cols = {}};
    n_tiles_ += n_tiles, n_lines_ += count_lines(R, C);
    n_rows_ += R, n_cols_ += C, n_elements_ += R * C;
    n_factors_ += R + C, n_tile_sums_ += R * ceil_div(C, kTile) + C * ceil_div(R, kTile);
    if (param.cut.exists()) {
        const Cut& cut = param.cut;
        m.place = place_in_whole(param);
        m.whole_R = narrow(is_vector ? 1 : cut.rows, "rows"),
        m.whole_C = narrow(is_vector ? cut.rows : cut.cols, "columns");
        // A vector is one row: what is cut of it are columns.
        PlaceInWhole& lines = is_vector ? m.cols : m.rows;
        lines = m.place;
        lines.first = cut.row_ranges[0].first, lines.run = 1, lines.skip = 0;
        if (!is_vector) m.cols.first = cut.first_col;
        m.whole_row_first = n_rows_, m.whole_col_first = n_cols_, m.sum_first = divided_n_;
        n_rows_ += m.whole_R, n_cols_ += m.whole_C, divided_n_ += m.whole_R + m.whole_C + 1;
        n_cut_factors_ += R + C, n_whole_factors_ += m.whole_R + m.whole_C;
        n_whole_lines_ += count_lines(m.whole_R, m.whole_C);
    }
    matrices_.push_back(m);
}

// Each kernel needs results of the one before, from all tiles: so there are six launches. Kernels that read no weights
// and gradients are launched by functions of their own, and so compiled once, and not for each of their types.
void Adafactor::find_factors(const Partials& p, const Tables& tables, const float* norm, float one_minus_beta,
                             cudaStream_t stream) {
    float *const rows = rows_.ptr<float>(), *const cols = cols_.ptr<float>();
    const int n_lines = narrow(n_lines_, "lines"), n_matrices = static_cast<int>(matrices_.size());
    const int64_t divided_bytes = (divided_n_ + n_cut_) * int64_t{sizeof(float)},
                  cut_bytes = n_cut_factors_ * int64_t{sizeof(float)};
    if (n_cut_ > 0) {
        cudaCheck(cudaMemsetAsync(p.divided, 0, static_cast<size_t>(divided_bytes), stream));
        launched("memset", {.writes = divided_bytes});
    }
    if (n_lines > 0) {
        factors_kernel<<<n_lines, kTile, 0, stream>>>(rows, cols, p, norm, tables, one_minus_beta);
        const int64_t sums_bytes = n_tile_sums_ * int64_t{sizeof(float)};
        launched("factors_kernel", {.reads = sums_bytes + factor_bytes() - cut_bytes + line_bytes() + 4,
                                    .writes = factor_bytes(),  // of matrices that are cut: sums
                                    .scratch = sums_bytes + cut_bytes});
    }
    if (n_cut_ > 0) {
        part_sums_kernel<<<n_matrices, kBlock, 0, stream>>>(p, p.w_sums, tables, false);
        launched("part_sums_kernel", {.reads = of_tiles() + matrix_bytes(), .writes = n_cut_ * 4});
        sum_(divided(0, divided_n_), stream);
        divided_factors_kernel<<<static_cast<unsigned>(n_whole_lines_), kTile, 0, stream>>>(rows, cols, p, norm, tables,
                                                                                            one_minus_beta);
        launched(
            "divided_factors_kernel",
            {.reads = 2 * whole_factor_bytes() + static_cast<int64_t>(whole_line_table_.bytes()) + matrix_bytes() + 4,
             .writes = whole_factor_bytes()});
        if (n_lines > 0) {
            factors_of_part_kernel<<<n_lines, kTile, 0, stream>>>(rows, cols, tables);
            launched("factors_of_part_kernel", {.reads = cut_bytes + line_bytes(), .writes = cut_bytes});
        }
    }
    scales_kernel<<<n_matrices, kBlock, 0, stream>>>(p, rows, tables);
    launched("scales_kernel", {.reads = n_rows_ * 4 + of_tiles() + n_cut_ * 4 + matrix_bytes(),
                               .writes = 2 * of_matrices()});  // all but alpha
}

void Adafactor::find_lengths(const Partials& p, const Tables& tables, float relative_lr, cudaStream_t stream) {
    const int n_matrices = static_cast<int>(matrices_.size());
    if (n_cut_ > 0) {
        part_sums_kernel<<<n_matrices, kBlock, 0, stream>>>(p, p.u_sums, tables, true);
        launched("part_sums_kernel", {.reads = of_tiles() + matrix_bytes(), .writes = n_cut_ * 4});
        sum_(divided(divided_n_, n_cut_), stream);
    }
    lengths_kernel<<<n_matrices, kBlock, 0, stream>>>(p, tables, options_.min_scale, relative_lr,
                                                      options_.clip_threshold);
    launched("lengths_kernel",
             {.reads = of_tiles() + n_cut_ * 4 + of_matrices() + matrix_bytes(), .writes = of_matrices()});
}

void Adafactor::step_units(size_t, size_t, const Weights& weights, Tensor grads, Tensor norm_scale, double lr,
                           int64_t t, cudaStream_t stream) {
    if (matrices_.empty()) return;
    check_optimizer_step(kName, {{.n = n_}}, weights, grads, norm_scale, lr, t);
    check(n_cut_ == 0 || sum_ != nullptr, kName,
          ": matrices are cut, and there is no sum over the ranks of their parts");
    const Tables tables = {static_cast<const Matrix*>(matrix_table_.data), static_cast<const Place*>(tile_table_.data),
                           static_cast<const Place*>(line_table_.data),
                           static_cast<const Place*>(whole_line_table_.data)};
    float* const scratch = scratch_.ptr<float>();
    const int64_t tile_n = n_tiles_, rows_n = tile_n * kTile;
    // The parts of the scratch, in the order of Partials' members.
    const Partials p = {scratch,
                        scratch + rows_n,
                        scratch + 2 * rows_n,
                        scratch + 2 * rows_n + tile_n,
                        reinterpret_cast<MatrixScale*>(scratch + 2 * rows_n + 2 * tile_n),
                        scratch + (scratch_n() - divided_n_ - n_cut_)};
    float *const rows = rows_.ptr<float>(), *const cols = cols_.ptr<float>(), *const norm = norm_scale.ptr<float>();
    const float one_minus_beta =
        static_cast<float>(std::pow(static_cast<double>(t), -static_cast<double>(options_.decay_power)));
    const float relative_lr = static_cast<float>(std::min(lr, 1 / std::sqrt(static_cast<double>(t))));
    const float decay_step = static_cast<float>(lr * options_.weight_decay);
    const int n_tiles = narrow(n_tiles_, "tiles");
    dispatch_weights(kName, weights, grads.dtype, t, [&](auto format, auto grad_zero) {
        using F = decltype(format);
        using G = decltype(grad_zero);
        auto* const values = weights.values.ptr<typename F::Value>();
        const G* const g = grads.ptr<G>();
        const double n = static_cast<double>(n_elements_);
        const int64_t value_bytes = n_elements_ * static_cast<int64_t>(sizeof(typename F::Value)),
                      grad_bytes = n_elements_ * static_cast<int64_t>(sizeof(G)),
                      copy_bytes = F::has_copy ? n_elements_ * static_cast<int64_t>(sizeof(typename F::Copy)) : 0;
        if (n_tiles > 0) {
            squares_kernel<<<n_tiles, kThreads, 0, stream>>>(p, values, g, norm, tables);
            const int64_t sums_bytes = (2 * kTile + 1) * of_tiles();
            launched("squares_kernel", {.reads = value_bytes + grad_bytes + tile_bytes() + 4,
                                        .writes = sums_bytes,
                                        .scratch = sums_bytes,
                                        .flops = 6 * n});
        }
        find_factors(p, tables, norm, one_minus_beta, stream);
        if (n_tiles > 0) {
            sizes_kernel<<<n_tiles, kThreads, 0, stream>>>(p, g, rows, cols, norm, tables, options_.eps);
            launched("sizes_kernel", {.reads = grad_bytes + factor_bytes() + tile_bytes() + of_matrices() + 4,
                                      .writes = of_tiles(),
                                      .scratch = of_tiles(),
                                      .flops = 7 * n});
        }
        find_lengths(p, tables, relative_lr, stream);
        if (n_tiles == 0) return;
        adafactor_apply_kernel<F, G><<<n_tiles, kThreads, 0, stream>>>(values, copy_of<F>(weights), p, g, rows, cols,
                                                                       norm, tables, options_.eps, decay_step, format);
        launched("adafactor_apply_kernel",
                 {.reads = value_bytes + grad_bytes + factor_bytes() + tile_bytes() + 2 * of_matrices() + 4,
                  .writes = value_bytes + copy_bytes,
                  .flops = 10 * n});
    });
}

}  // namespace

std::unique_ptr<Optimizer> make_adafactor(Arena& arena, const std::vector<UpdatedUnit>& units,
                                          const OptimizerOptions& options) {
    return make_by_unit(units, [&](const std::vector<Param>& params, int64_t n) {
        return std::make_unique<Adafactor>(arena, params, n, options);
    });
}
