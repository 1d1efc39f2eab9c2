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
// row / mean(row) = 1, and col is the full v. As in torch.optim.Adafactor, with the paper's eps.
//
// All matrices at once, in tiles of 64 x 64: six launches per step, for any number of parameters.
//   squares   tile: sums of G^2 by row and by column, sum of W^2
//   factors   row or column: adds up its tiles; new row_r, col_c
//   scales    matrix: mean(row), rms(W)
//   sizes     tile: sum of U^2
//   lengths   matrix: alpha
//   apply     tile
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
};
struct Place {
    int32_t matrix, row, col;  // first row and column of a tile. Of a line: row >= 0 or col >= 0, the other is -1
};
struct MatrixScale {
    float row_mean, rms, alpha;
};
struct Tables {
    const Matrix* matrices;
    const Place *tiles, *lines;
};
// Scratch, all of it written in each step before it is read.
struct Partials {
    float *row_sums, *col_sums;  // (n_tiles, 64): of G^2
    float *w_sums, *u_sums;      // (n_tiles): of W^2, of U^2
    MatrixScale* scales;         // (n_matrices)
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
    factors_kernel(float* rows, float* cols, Partials p, const float* norm_scale, Tables tables, float rest) {
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
    const float mean = static_cast<float>(sum / (is_row ? m.C : m.R));
    float& factor = is_row ? rows[m.row_first + k] : cols[m.col_first + k];
    factor = (1 - rest) * factor + rest * mean;
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

__global__ void __launch_bounds__(kBlock) scales_kernel(Partials p, const float* rows, Tables tables) {
    __shared__ double shared[kBlock];
    const Matrix m = tables.matrices[blockIdx.x];
    const double row_sum = sum_of(rows + m.row_first, m.R, shared),
                 w_sum = sum_of(p.w_sums + m.first_tile, m.n_tiles, shared);
    if (threadIdx.x > 0) return;
    p.scales[blockIdx.x].row_mean = fmaxf(static_cast<float>(row_sum / m.R), 1e-37f);  // a divisor
    p.scales[blockIdx.x].rms = static_cast<float>(sqrt(w_sum / (static_cast<double>(m.R) * m.C)));
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
    const double sum = sum_of(p.u_sums + m.first_tile, m.n_tiles, shared);
    if (threadIdx.x > 0) return;
    MatrixScale& scale = p.scales[blockIdx.x];
    const float rms = static_cast<float>(sqrt(sum / (static_cast<double>(m.R) * m.C)));
    scale.alpha = fmaxf(min_scale, scale.rms) * relative_lr / fmaxf(1.0f, rms / clip_threshold);
}

template <class F, class G>
__global__ void __launch_bounds__(kThreads)
    apply_kernel(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy, Partials p,
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
        format.store_chunk(values, copy, first, w, m.C - col, m.key, first - m.offset);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The optimizer

class Adafactor final : public Optimizer {
    static constexpr const char* kName = "Adafactor";

  public:
    Adafactor(Arena& arena, const std::vector<Param>& params, int64_t n, const OptimizerOptions& options)
        : params_(params), n_(n), options_(options) {
        check_optimizer_input(kName, params, n, options);
        int64_t n_rows = 0, n_cols = 0;
        for (const Param& param : params_) {
            // The vocabulary's padding is not included in any mean; it stays 0.
            const bool is_vector = param.value.ndim < 2;
            const int64_t R = is_vector ? 1 : param.value.rows() - param.padded_rows,
                          C = is_vector ? param.value.n() : param.value.cols();
            const int32_t index = static_cast<int32_t>(matrices_.size());
            const int32_t first_tile = narrow(static_cast<int64_t>(tiles_.size()), "Adafactor: the number of tiles");
            for (int64_t row = 0; row < R; row += kTile)
                for (int64_t col = 0; col < C; col += kTile)
                    tiles_.push_back({index, static_cast<int32_t>(row), static_cast<int32_t>(col)});
            for (int64_t row = 0; row < R; row += kTile) lines_.push_back({index, static_cast<int32_t>(row), -1});
            for (int64_t col = 0; col < C; col += kTile) lines_.push_back({index, -1, static_cast<int32_t>(col)});
            matrices_.push_back({param.offset, n_rows, n_cols, narrow(R, "rows"), narrow(C, "columns"), first_tile,
                                 static_cast<int32_t>(ceil_div(C, kTile)),
                                 static_cast<int32_t>(tiles_.size()) - first_tile, param.decay ? 1.0f : 0.0f,
                                 hash_name(param.name)});
            n_rows += R;
            n_cols += C;
        }
        const auto count = [](const auto& table) { return static_cast<int64_t>(table.size()); };
        rows_ = arena.take("optimizer row", DType::f32, {n_rows});
        cols_ = arena.take("optimizer col", DType::f32, {n_cols});
        matrix_table_ = arena.take("optimizer tiles", DType::i32, {count(matrices_), sizeof(Matrix) / 4});
        tile_table_ = arena.take("optimizer tiles", DType::i32, {count(tiles_), sizeof(Place) / 4});
        line_table_ = arena.take("optimizer tiles", DType::i32, {count(lines_), sizeof(Place) / 4});
    }
    int64_t scratch_n() const override {
        return static_cast<int64_t>(tiles_.size() * (2 * kTile + 2) +
                                    matrices_.size() * sizeof(MatrixScale) / sizeof(float));
    }
    void use_scratch(Tensor scratch) override { scratch_ = scratch; }
    void init(cudaStream_t stream) override {
        if (tiles_.empty()) return;
        check(tile_table_.data != nullptr, kName, ": init before the arena is reserved");
        const auto upload = [&](const Tensor& to, const void* from) {
            cudaCheck(cudaMemcpyAsync(to.data, from, to.bytes(), cudaMemcpyHostToDevice, stream));
        };
        upload(matrix_table_, matrices_.data());
        upload(tile_table_, tiles_.data());
        upload(line_table_, lines_.data());
        for (const Tensor& state : {rows_, cols_}) cudaCheck(cudaMemsetAsync(state.data, 0, state.bytes(), stream));
    }
    void step(const Weights& weights, Tensor grads, Tensor norm_scale, double lr, int64_t t,
              cudaStream_t stream) override;
    std::vector<OptimizerState> states() const override {
        std::vector<OptimizerState> all;
        for (size_t k = 0; k < matrices_.size(); ++k) {
            all.push_back({"row", params_[k].name, rows_.slice(matrices_[k].row_first, matrices_[k].R), 0});
            all.push_back({"col", params_[k].name, cols_.slice(matrices_[k].col_first, matrices_[k].C), 0});
        }
        return all;
    }

  private:
    std::vector<Param> params_;
    int64_t n_;
    OptimizerOptions options_;
    std::vector<Matrix> matrices_;
    std::vector<Place> tiles_, lines_;
    Tensor rows_, cols_, matrix_table_, tile_table_, line_table_, scratch_;
};

void Adafactor::step(const Weights& weights, Tensor grads, Tensor norm_scale, double lr, int64_t t,
                     cudaStream_t stream) {
    if (tiles_.empty()) return;
    check_optimizer_step(kName, n_, weights, grads, norm_scale, lr, t);
    const Tables tables = {static_cast<const Matrix*>(matrix_table_.data), static_cast<const Place*>(tile_table_.data),
                           static_cast<const Place*>(line_table_.data)};
    float* const scratch = scratch_.ptr<float>();
    const size_t tile_n = tiles_.size(), rows_n = tile_n * kTile;
    // The parts of the scratch, in the order of Partials' members.
    const Partials p = {scratch, scratch + rows_n, scratch + 2 * rows_n, scratch + 2 * rows_n + tile_n,
                        reinterpret_cast<MatrixScale*>(scratch + 2 * rows_n + 2 * tile_n)};
    float *const rows = rows_.ptr<float>(), *const cols = cols_.ptr<float>(), *const norm = norm_scale.ptr<float>();
    const float rest = static_cast<float>(std::pow(static_cast<double>(t), -static_cast<double>(options_.decay_power)));
    const float relative_lr = static_cast<float>(std::min(lr, 1 / std::sqrt(static_cast<double>(t))));
    const float decay_step = static_cast<float>(lr * options_.weight_decay);
    const int n_tiles = narrow(static_cast<int64_t>(tiles_.size()), "tiles"), n_lines = static_cast<int>(lines_.size()),
              n_matrices = static_cast<int>(matrices_.size());
    // Each kernel needs results of the one before, from all tiles: so there are six launches. Kernels that read no
    // weights and gradients are launched here, and so compiled once, and not for each of their types.
    const auto launch_scales = [&] {
        factors_kernel<<<n_lines, kTile, 0, stream>>>(rows, cols, p, norm, tables, rest);
        cudaCheckLaunch();
        scales_kernel<<<n_matrices, kBlock, 0, stream>>>(p, rows, tables);
        cudaCheckLaunch();
    };
    const auto launch_lengths = [&] {
        lengths_kernel<<<n_matrices, kBlock, 0, stream>>>(p, tables, options_.min_scale, relative_lr,
                                                          options_.clip_threshold);
        cudaCheckLaunch();
    };
    dispatch_weights(kName, weights, grads.dtype, t, [&](auto format, auto grad_zero) {
        using F = decltype(format);
        using G = decltype(grad_zero);
        auto* const values = weights.values.ptr<typename F::Value>();
        const G* const g = grads.ptr<G>();
        squares_kernel<<<n_tiles, kThreads, 0, stream>>>(p, values, g, norm, tables);
        cudaCheckLaunch();
        launch_scales();
        sizes_kernel<<<n_tiles, kThreads, 0, stream>>>(p, g, rows, cols, norm, tables, options_.eps);
        cudaCheckLaunch();
        launch_lengths();
        apply_kernel<F, G><<<n_tiles, kThreads, 0, stream>>>(values, copy_of<F>(weights), p, g, rows, cols, norm,
                                                             tables, options_.eps, decay_step, format);
        cudaCheckLaunch();
    });
}

}  // namespace

std::unique_ptr<Optimizer> make_adafactor(Arena& arena, const std::vector<Param>& params, int64_t n,
                                          const OptimizerOptions& options) {
    return std::make_unique<Adafactor>(arena, params, n, options);
}
