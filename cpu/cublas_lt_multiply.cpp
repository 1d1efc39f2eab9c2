// cuBLASLt's multiplication, on OpenBLAS. (What cublasLt.h promises; cublas_lt.cpp has checked the arguments.)
//
// How a multiplication runs. D is cut into tiles, and the tiles of all matrices of a batch are spread over the OpenMP
// threads. A tile is one task from start to end: C's part is loaded, OpenBLAS multiplies (with one thread: it starts
// none of its own inside a parallel region), the epilogue runs while the tile is in the cache, and the result is
// rounded once to D's type. One large matrix and many small ones so take the same path, and threads meet only at the
// end. Measured on two cores at GPT-2's shapes, float32: as fast as OpenBLAS's own threads, 190 to 215 GFLOP/s;
// bfloat16 5 to 15 % less; products with one to four tokens two to six times faster.
//
// 16- and 8-bit matrices are widened to float32, which is exact, panel by panel into a scratch buffer of a few MiB for
// each thread, never as a whole. Where blocks of an fp8 matrix have scales of their own a panel is one block of k: its
// product is formed by itself, and added to the tile with its scales.
//
// Row-major D: the transposed problem, D^T = op(B)^T op(A)^T, is column-major. So everything below is column-major.
//
// The sum of one element is formed by one thread in a fixed order: the same call gives the same bits, and with
// OpenBLAS's AVX2 and AVX-512 kernels it gives them with any (small) number of threads.
#include <cblas.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "cublas_lt.h"
#include "cuda_fp8.h"
#include "device.h"

namespace cuda_cpu {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Element types

template <class From, class To>
void convert_all(const void* from, void* to, int64_t n) {
    const From* __restrict source = static_cast<const From*>(from);
    To* __restrict target = static_cast<To*>(to);
    for (int64_t i = 0; i < n; ++i) target[i] = To(source[i]);
}

void widen(int32_t type, const void* from, float* to, int64_t n) {
    switch (type) {
        case CUDA_R_32F: std::memcpy(to, from, size_t(n) * sizeof(float)); break;
        case CUDA_R_16F: convert_all<__half, float>(from, to, n); break;
        case CUDA_R_16BF: convert_all<__nv_bfloat16, float>(from, to, n); break;
        case CUDA_R_8F_E4M3: convert_all<__nv_fp8_e4m3, float>(from, to, n); break;
        case CUDA_R_8F_E5M2: convert_all<__nv_fp8_e5m2, float>(from, to, n); break;
    }
}

void narrow(int32_t type, const float* from, void* to, int64_t n) {
    switch (type) {
        case CUDA_R_32F: std::memcpy(to, from, size_t(n) * sizeof(float)); break;
        case CUDA_R_16F: convert_all<float, __half>(from, to, n); break;
        case CUDA_R_16BF: convert_all<float, __nv_bfloat16>(from, to, n); break;
        case CUDA_R_8F_E4M3: convert_all<float, __nv_fp8_e4m3>(from, to, n); break;  // saturating
        case CUDA_R_8F_E5M2: convert_all<float, __nv_fp8_e5m2>(from, to, n); break;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The epilogues, on one column of a tile (n elements in float32). All loops vectorise.

constexpr float gelu_c1 = 0.7978845608f, gelu_c3 = 0.044715f;  // gelu(x) = x / (1 + exp(-2 c1 (x + c3 x^3)))

void apply_gelu(float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const float u = gelu_c1 * (x[i] + gelu_c3 * x[i] * x[i] * x[i]);
        x[i] = x[i] / (1.0f + __expf(-2.0f * u));
    }
}

// x *= gelu'(z). With s = 1 / (1 + exp(-2u)), gelu = z s and gelu' = s + z s (1 - s) 2u'.
void apply_gelu_gradient(float* x, const float* z, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const float u = gelu_c1 * (z[i] + gelu_c3 * z[i] * z[i] * z[i]);
        const float du = gelu_c1 * (1.0f + 3.0f * gelu_c3 * z[i] * z[i]);
        const float s = 1.0f / (1.0f + __expf(-2.0f * u));
        const float tail = s * (1.0f - s);  // 0 for large |z|, where du overflows
        x[i] *= s + (tail > 0.0f ? z[i] * tail * 2.0f * du : tail);
    }
}

void apply_relu(float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles

// The largest sizes bound the scratch buffer, and keep a tile of D in the second-level cache while its epilogue runs.
constexpr int64_t max_tile = 1024, max_narrow_tile = 512, max_k_panel = 768;
// OpenBLAS multiplies up to this many multiply-adds (100^3) without packing its operands first, with other kernels,
// that sum in another order. Where a matrix is cut depends on the number of threads; which kernel a tile meets must
// not, or the last bits of a result would depend on it too. So only larger tiles are cut further.
constexpr int64_t unpacked_limit = 1'000'000;
// Products this thin (few tokens) gain up to four times from the unpacked kernels: their tiles are always small.
constexpr int64_t thin = 16, longest_thin_tile = 128, shortest_thin_tile = 64;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One dimension cut into pieces that start at multiples of `grain` and differ by at most one grain. The grains are
// multiples of OpenBLAS's register blocks (24 x 12 with AVX2, 16 x 4 with AVX-512): inside of a matrix, too, an
// element's sum depends on whether it stands in a full block.
constexpr int64_t row_grain = 48, column_grain = 12, k_grain = 16;
struct Cuts {
    int64_t size, count, grain;

    int64_t start(int64_t piece) const { return std::min(size, divide_up(size, grain) * piece / count * grain); }
    int64_t length(int64_t piece) const { return start(piece + 1) - start(piece); }
    int64_t shortest() const { return std::min(divide_up(size, grain) / count * grain, length(count - 1)); }
    int64_t longest() const { return std::min(size, divide_up(divide_up(size, grain), count) * grain); }
};

struct Tiling {
    Cuts rows, columns, k;  // rows and columns are tiles of D; the panels of k are summed one after the other
    int64_t count(int64_t batch_count) const { return rows.count * columns.count * batch_count; }
};

// Finds the cuts with which the busiest thread has the least to do: tiles of equal number and size for each thread, but
// not too narrow, because each tile reads its rows of A and columns of B anew.
Tiling choose_tiling(const Multiplication& p, int64_t threads) {
    const bool widen = p.a.type != CUDA_R_32F || p.b.type != CUDA_R_32F;
    const int64_t limit = widen || p.d.type != CUDA_R_32F ? max_narrow_tile : max_tile;
    Tiling tiling{{p.m, divide_up(p.m, limit), row_grain},
                  {p.n, divide_up(p.n, limit), column_grain},
                  {p.k, widen ? divide_up(p.k, max_k_panel) : 1, k_grain}};
    if (p.has_block_scales()) tiling.k = {p.k, divide_up(p.k, scale_block), scale_block};
    const int64_t k = tiling.k.shortest();

    const int64_t thin_length = std::min(unpacked_limit / (std::min(p.m, p.n) * k) / 16 * 16, longest_thin_tile);
    if (std::min(p.m, p.n) <= thin && thin_length >= shortest_thin_tile) {
        Cuts& longer = p.m > p.n ? tiling.rows : tiling.columns;
        longer.count = divide_up(longer.size, thin_length);
        longer.grain = 16;
        return tiling;
    }

    // In multiply-adds; to read (and pack) an element costs as much as about 64 of them.
    const auto cost = [&](const Tiling& candidate) {
        const int64_t rows = candidate.rows.longest(), columns = candidate.columns.longest();
        return divide_up(candidate.count(p.batch_count), threads) * (rows * columns + 64 * (rows + columns));
    };
    Tiling best = tiling;
    for (int64_t r = tiling.rows.count; r <= tiling.rows.count + threads; ++r)
        for (int64_t c = tiling.columns.count; r * c * p.batch_count <= 4 * threads; ++c) {
            const Tiling candidate{{p.m, r, row_grain}, {p.n, c, column_grain}, tiling.k};
            if (candidate.rows.shortest() * candidate.columns.shortest() * k <= unpacked_limit) break;
            if (cost(candidate) < cost(best)) best = candidate;
        }
    return best;
}

// One thread's scratch memory: grows to the largest request, which the tile sizes bound at about 5 MiB.
float* scratch(size_t floats) {
    struct Free {
        void operator()(float* pointer) const { ::operator delete[](pointer, std::align_val_t(64)); }
    };
    thread_local std::unique_ptr<float, Free> buffer;
    thread_local size_t capacity = 0;
    if (floats > capacity) {
        buffer.reset();
        buffer.reset(static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t(64))));
        capacity = floats;
    }
    return buffer.get();
}

struct Block {  // rows x columns floats for OpenBLAS: at data[i + j * ld], or if transposed at data[i * ld + j]
    const float* data;
    int64_t ld;
    bool transposed;
};

// The part of a matrix that starts at (row, column), as floats: where it stands, or widened into `space`.
Block block_of(const Matrix& matrix, int64_t batch, int64_t row, int64_t column, int64_t rows, int64_t columns,
               float* space) {
    const bool transposed = matrix.row_stride != 1;
    const int64_t length = transposed ? columns : rows, lines = transposed ? rows : columns;
    if (matrix.type == CUDA_R_32F) {
        const int64_t stride = transposed ? matrix.row_stride : matrix.column_stride;
        return {matrix.float_at(batch, row, column), std::max(stride, length), transposed};  // one line: any stride
    }
    for (int64_t line = 0; line < lines; ++line)
        widen(matrix.type, matrix.at(batch, row + (transposed ? line : 0), column + (transposed ? 0 : line)),
              space + line * length, length);
    return {space, length, transposed};
}

// One multiplication on its way: what its tiles have in common, and where they leave their parts of results over all of
// D.
struct Run {
    const Multiplication& p;
    Tiling tiling;
    float alpha, beta;                   // all scales included, but those of blocks
    std::vector<double> gradient_parts;  // of the bias: [batch][tile across the sum][m or n]
    std::mutex amax_mutex;
    float amax = 0;
};

class Tile {
public:
    Tile(Run& run_, int64_t task) : run(run_), p(run_.p) {
        const Tiling& tiling = run.tiling;
        row_tile = task % tiling.rows.count;
        column_tile = task / tiling.rows.count % tiling.columns.count;
        batch = task / (tiling.rows.count * tiling.columns.count);
        row = tiling.rows.start(row_tile), rows = tiling.rows.length(row_tile);
        column = tiling.columns.start(column_tile), columns = tiling.columns.length(column_tile);
    }

    void compute() {
        // Scratch: A's panel, B's panel, D's tile, one column, the bias, and with block scales the product of one
        // block. What is in float32 already needs none.
        const bool widen_a = p.a.type != CUDA_R_32F, widen_b = p.b.type != CUDA_R_32F;
        const bool in_place = p.d.type == CUDA_R_32F;
        const Cuts& k_panels = run.tiling.k;
        const int64_t k_panel = k_panels.longest();
        const auto padded = [](int64_t floats) { return divide_up(floats, 16) * 16; };
        const int64_t a_floats = widen_a ? padded(rows * k_panel) : 0,
                      b_floats = widen_b ? padded(k_panel * columns) : 0;
        const int64_t d_floats = in_place ? 0 : padded(rows * columns);
        const int64_t part_floats = p.has_block_scales() ? rows * columns : 0;
        float* const a_space = scratch(
            size_t(a_floats + b_floats + d_floats + padded(rows) + padded(std::max(rows, columns)) + part_floats));
        float* const b_space = a_space + a_floats;
        float* const d_space = b_space + b_floats;
        column_space = d_space + d_floats;
        bias = column_space + padded(rows);
        float* const part = bias + padded(std::max(rows, columns));
        out = in_place ? p.d.float_at(batch, row, column) : d_space;
        out_ld = in_place ? std::max(p.d.column_stride, rows) : rows;

        if (run.beta != 0.0f) load_c();
        for (int64_t panel = 0; panel < k_panels.count; ++panel) {
            const int64_t k = k_panels.start(panel), k_count = k_panels.length(panel);
            const Block a = block_of(p.a, batch, row, k, rows, k_count, a_space);
            const Block b = block_of(p.b, batch, k, column, k_count, columns, b_space);
            const auto multiply_panel = [&](float alpha, float beta, float* to, int64_t ld) {
                cblas_sgemm(CblasColMajor, a.transposed ? CblasTrans : CblasNoTrans,
                            b.transposed ? CblasTrans : CblasNoTrans, int(rows), int(columns), int(k_count), alpha,
                            a.data, int(a.ld), b.data, int(b.ld), beta, to, int(ld));
            };
            if (p.has_block_scales()) {
                multiply_panel(1.0f, 0.0f, part, rows);
                add_scaled(part, panel);
            } else {
                multiply_panel(run.alpha, panel == 0 ? run.beta : 1.0f, out, out_ld);
            }
        }
        if (!in_place || p.epilogue != CUBLASLT_EPILOGUE_DEFAULT) finish();
    }

private:
    // With block scales: D's tile += alpha * a_scale[i, block] * b_scale[block, j] * part[i, j], after beta C.
    void add_scaled(const float* part, int64_t block) {
        const int64_t square_stride = divide_up(run.tiling.k.count, 4) * 4;
        const auto scale = [&](const float* scales, int32_t mode, int64_t length, int64_t i) {
            return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ? scales[block * length + i]
                                                                   : scales[i / scale_block * square_stride + block];
        };
        float* const a_scales = column_space;
        for (int64_t i = 0; i < rows; ++i) a_scales[i] = scale(p.a_scale, p.a_scale_mode, p.m, row + i);
        for (int64_t j = 0; j < columns; ++j) {
            const float b_scale = run.alpha * scale(p.b_scale, p.b_scale_mode, p.n, column + j);
            float* const x = out + j * out_ld;
            if (block == 0)  // without beta, x holds nothing yet
                for (int64_t i = 0; i < rows; ++i) x[i] = run.beta == 0.0f ? 0.0f : run.beta * x[i];
            for (int64_t i = 0; i < rows; ++i) x[i] += a_scales[i] * b_scale * part[j * rows + i];
        }
    }

    // C's tile to where D's is being formed.
    void load_c() {
        for (int64_t j = 0; j < columns; ++j) {
            const char* const from = p.c.at(batch, row, column + j);
            float* const to = out + j * out_ld;
            if (from != reinterpret_cast<char*>(to)) widen(p.c.type, from, to, rows);
        }
    }

    // The epilogue, and the rounding to D's type.
    void finish() {
        if (p.has_bias()) {
            const int64_t first = batch * p.bias_batch_stride + (p.bias_along_rows ? row : column);
            widen(p.bias_type, static_cast<const char*>(p.bias) + first * int64_t(element_bytes(p.bias_type)), bias,
                  p.bias_along_rows ? rows : columns);
        }
        float amax = 0;
        for (int64_t j = 0; j < columns; ++j) {
            float* const x = out + j * out_ld;
            finish_column(x, j);
            if (p.d_amax)
                for (int64_t i = 0; i < rows; ++i) amax = std::max(amax, std::fabs(x[i]));
            if (p.d_scale)
                for (int64_t i = 0; i < rows; ++i) x[i] *= *p.d_scale;
            if (p.d.type != CUDA_R_32F) narrow(p.d.type, x, p.d.at(batch, row, column + j), rows);
        }
        if (p.d_amax) {
            const std::lock_guard lock(run.amax_mutex);
            run.amax = std::max(run.amax, amax);
        }
    }

    void finish_column(float* x, int64_t j) {
        if (p.has_bias() && p.bias_along_rows)
            for (int64_t i = 0; i < rows; ++i) x[i] += bias[i];
        else if (p.has_bias())
            for (int64_t i = 0; i < rows; ++i) x[i] += bias[j];
        if (p.writes_aux()) narrow(p.aux.type, x, p.aux.at(batch, row, column + j), rows);
        if (p.has(CUBLASLT_EPILOGUE_RELU)) apply_relu(x, rows);
        if (p.has(CUBLASLT_EPILOGUE_GELU)) apply_gelu(x, rows);
        if (p.reads_aux()) {
            widen(p.aux.type, p.aux.at(batch, row, column + j), column_space, rows);
            apply_gelu_gradient(x, column_space, rows);
        }
        if (p.sums_gradient_of_d()) {
            const Tiling& tiling = run.tiling;
            if (p.bias_along_rows) {
                double* const sums =
                    &run.gradient_parts[size_t((batch * tiling.columns.count + column_tile) * p.m + row)];
                for (int64_t i = 0; i < rows; ++i) sums[i] += double(x[i]);
            } else {
                double& sum = run.gradient_parts[size_t((batch * tiling.rows.count + row_tile) * p.n + column + j)];
                for (int64_t i = 0; i < rows; ++i) sum += double(x[i]);
            }
        }
    }

    Run& run;
    const Multiplication& p;
    int64_t row_tile, column_tile, batch, row, column, rows, columns;
    float *out, *column_space, *bias;
    int64_t out_ld;
};

// ---------------------------------------------------------------------------------------------------------------------
// Gradients of a bias

void store_bias_gradient(const Multiplication& p, int64_t batch, int64_t first, const double* sums, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const float sum = float(sums[i]);
        const int64_t index = batch * p.bias_batch_stride + first + i;
        narrow(p.bias_type, &sum, static_cast<char*>(p.bias) + index * int64_t(element_bytes(p.bias_type)), 1);
    }
}

// DGELU_BGRAD: the tiles' parts, added in the order of the tiles.
void finish_gradient_of_d(const Run& run) {
    const Multiplication& p = run.p;
    const int64_t length = p.bias_along_rows ? p.m : p.n;
    const int64_t parts = p.bias_along_rows ? run.tiling.columns.count : run.tiling.rows.count;
    for (int64_t batch = 0; batch < p.batch_count; ++batch) {
        std::vector<double> sums(size_t(length), 0.0);
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t i = 0; i < length; ++i)
                sums[size_t(i)] += run.gradient_parts[size_t((batch * parts + part) * length + i)];
        store_bias_gradient(p, batch, 0, sums.data(), length);
    }
}

// BGRADA and BGRADB: the sums of the rows of `matrix` (op(A), or op(B) transposed), `rows` x k.
void sum_rows(const Multiplication& p, const Matrix& matrix, int64_t rows, int threads) {
    constexpr int64_t block = 256;
    const int64_t blocks = divide_up(rows, block);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows * p.k * p.batch_count > 100'000)
    for (int64_t task = 0; task < blocks * p.batch_count; ++task) {
        const int64_t batch = task / blocks, first = task % blocks * block, count = std::min(block, rows - first);
        float values[block];
        double sums[block] = {};
        if (matrix.row_stride == 1) {
            for (int64_t k = 0; k < p.k; ++k) {
                widen(matrix.type, matrix.at(batch, first, k), values, count);
                for (int64_t i = 0; i < count; ++i) sums[i] += double(values[i]);
            }
        } else {
            for (int64_t i = 0; i < count; ++i)
                for (int64_t k = 0; k < p.k; k += block) {
                    const int64_t length = std::min(block, p.k - k);
                    widen(matrix.type, matrix.at(batch, first + i, k), values, length);
                    for (int64_t j = 0; j < length; ++j) sums[i] += double(values[j]);
                }
        }
        store_bias_gradient(p, batch, first, sums, count);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The whole multiplication

}  // namespace

void multiply(const Multiplication& p) {
    const Profiled profiled("matmul");
    const auto value = [](const float* pointer) { return pointer ? *pointer : 1.0f; };
    const float alpha = p.device_alpha ? *p.device_alpha : p.alpha, beta = p.device_beta ? *p.device_beta : p.beta;
    const int threads = omp_in_parallel() ? 1 : omp_get_max_threads();
    const float scales = p.has_block_scales() ? 1.0f : value(p.a_scale) * value(p.b_scale);
    Run run{p, choose_tiling(p, threads), alpha * scales, beta * value(p.c_scale), {}, {}};
    const int64_t tasks = run.tiling.count(p.batch_count);
    if (p.sums_gradient_of_d())
        run.gradient_parts.resize(
            size_t(p.batch_count * (p.bias_along_rows ? run.tiling.columns.count * p.m : run.tiling.rows.count * p.n)));

    // Static: matrix b of a batch always meets the same thread, whose cache may still hold it.
    const double multiply_adds = double(p.m) * double(p.n) * double(p.k) * double(p.batch_count);
    if (tasks > 1 && multiply_adds > 250'000) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t task = 0; task < tasks; ++task) Tile(run, task).compute();
    } else {  // a few microseconds: not worth waking other threads, neither for us nor for OpenBLAS
        const int before = omp_get_max_threads();
        omp_set_num_threads(1);
        for (int64_t task = 0; task < tasks; ++task) Tile(run, task).compute();
        omp_set_num_threads(before);
    }

    if (p.sums_gradient_of_d()) finish_gradient_of_d(run);
    if (p.has(CUBLASLT_EPILOGUE_BGRADA)) sum_rows(p, p.a, p.m, threads);
    if (p.has(CUBLASLT_EPILOGUE_BGRADB)) sum_rows(p, p.b.transposed(), p.n, threads);
    if (p.d_amax) *p.d_amax = run.amax;
}

}  // namespace cuda_cpu
