// cuBLASLt's multiplication: tiles, epilogues, threads. (What cublasLt.h promises; cublas_lt.cpp has checked the
// arguments; the arithmetic of a tile is sgemm.h's.)
//
// How a multiplication runs. D is divided into tiles, and the tiles of all matrices of a batch are spread over the
// OpenMP threads. A tile is one task from start to end: C's part is loaded, sgemm multiplies, the epilogue runs while
// the tile is in the cache, and the result is rounded once to D's type. So one large matrix and many small ones are
// computed in the same way, and threads wait for each other only at the end.
//
// 16- and 8-bit matrices are widened to float32, which is exact, or paired (two bf16 matrices: sgemm.cpp), when sgemm
// copies them to its packed panels. (Few columns need no panels of A: few_columns.h.) Where blocks of an fp8
// matrix have scales of their own, the product over one block of k is formed by itself, and added to the tile with its
// scales.
//
// Row-major D: the transposed problem, D^T = op(B)^T op(A)^T, is column-major. So everything below is column-major.
//
// An element of D has the same bits however D is divided, because sgemm sums each element in one order.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "cublas_lt.h"
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

// GELU as in layers/gelu.cu, operation by operation, so with the same bits:  gelu(x) = x s(v),
// v = sqrt(8/pi) (x + c x^3), s(v) = 1 / (1 + exp(-v)), of which exp(-|v|) gives both s(v) and 1 - s(v) with all
// digits.
constexpr float gelu_c1 = 1.5957691216057308f, gelu_c3 = 0.044715f;

struct Sigmoid {
    float value, complement;
    explicit Sigmoid(float v) {
        const float e = __expf(-std::fabs(v)), large = 1.0f / (1.0f + e), small = e * large;
        value = v >= 0.0f ? large : small;
        complement = v >= 0.0f ? small : large;
    }
};

void apply_gelu(float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] *= Sigmoid(gelu_c1 * (x[i] + gelu_c3 * x[i] * x[i] * x[i])).value;
}

// x *= gelu'(z) = s + z s (1 - s) v'.
void apply_gelu_gradient(float* x, const float* z, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const float square = ::min(z[i] * z[i], 1e30f);  // v' is finite where s (1 - s) is 0
        const Sigmoid s(gelu_c1 * z[i] * (1.0f + gelu_c3 * square));
        const float dv = gelu_c1 * (1.0f + 3.0f * gelu_c3 * square);
        x[i] *= s.value + z[i] * s.value * s.complement * dv;
    }
}

void apply_relu(float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles

// The largest sizes keep a tile of D in the second-level cache while its epilogue runs.
constexpr int64_t max_tile = 1024, max_narrow_tile = 512;

// One dimension cut into pieces that start at multiples of `grain` and differ by at most one grain. The grains are
// multiples of sgemm's blocks in registers, so that only the last piece has blocks that are not full.
constexpr int64_t row_grain = 48, column_grain = 8;
struct Cuts {
    int64_t size, count, grain;

    int64_t start(int64_t piece) const { return std::min(size, divide_up(size, grain) * piece / count * grain); }
    int64_t length(int64_t piece) const { return start(piece + 1) - start(piece); }
    int64_t longest() const { return std::min(size, divide_up(divide_up(size, grain), count) * grain); }
};

struct Tiling {
    Cuts rows, columns;
    int64_t count(int64_t batch_count) const { return rows.count * columns.count * batch_count; }
};

// Finds the division into tiles with which the busiest thread has the least to do: tiles of equal number and size for
// each thread, but not too narrow, because each tile reads its rows of A and columns of B anew.
Tiling choose_tiling(const Multiplication& p, int64_t threads) {
    const int64_t limit = p.d.type == CUDA_R_32F ? max_tile : max_narrow_tile;
    // In multiply-adds; to pack an element costs as much as about 64 of them.
    const auto cost = [&](const Tiling& candidate) {
        const int64_t rows = candidate.rows.longest(), columns = candidate.columns.longest();
        return divide_up(candidate.count(p.batch_count), threads) * (rows * columns + 64 * (rows + columns));
    };
    const int64_t least_rows = divide_up(p.m, limit), least_columns = divide_up(p.n, limit);
    const int64_t most_rows = divide_up(p.m, row_grain), most_columns = divide_up(p.n, column_grain);
    Tiling best{{p.m, least_rows, row_grain}, {p.n, least_columns, column_grain}};
    for (int64_t r = least_rows; r <= std::min(most_rows, least_rows + threads); ++r)
        for (int64_t c = least_columns; c <= most_columns && r * c * p.batch_count <= 4 * threads; ++c) {
            const Tiling candidate{{p.m, r, row_grain}, {p.n, c, column_grain}};
            if (cost(candidate) < cost(best)) best = candidate;
        }
    return best;
}

// One thread's scratch memory: grows to the largest request, which the tile sizes bound at about 6 MiB.
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

// One running multiplication: what its tiles have in common, and where they store what is found over all of D.
struct Run {
    const Multiplication& p;
    Tiling tiling;
    float alpha, beta;  // all scales included, but those of blocks
    std::mutex amax_mutex;
    float amax = 0;
};

class Tile {
  public:
    Tile(Run& run_, int64_t task) : run(run_), p(run_.p) {
        const Tiling& tiling = run.tiling;
        const int64_t row_tile = task % tiling.rows.count,
                      column_tile = task / tiling.rows.count % tiling.columns.count;
        batch = task / (tiling.rows.count * tiling.columns.count);
        row = tiling.rows.start(row_tile), rows = tiling.rows.length(row_tile);
        column = tiling.columns.start(column_tile), columns = tiling.columns.length(column_tile);
    }

    void compute() {
        // Scratch: sgemm's, then D's tile, one column, the bias, and with block scales the product of one block. A D in
        // float32 is formed in its place. Elsewhere its columns begin at odd multiples of 64 bytes, which the sets of
        // the first-level cache share evenly.
        const bool in_place = p.d.type == CUDA_R_32F;
        const auto padded = [](int64_t floats) { return divide_up(floats, 16) * 16; };
        const int64_t sgemm_floats = padded(sgemm_space(columns, p.k)), d_ld = padded(rows) | 16,
                      d_floats = in_place ? 0 : d_ld * columns;
        const int64_t part_floats = p.has_block_scales() ? rows * columns : 0;
        float* const space =
            scratch(size_t(sgemm_floats + d_floats + padded(rows) + padded(std::max(rows, columns)) + part_floats));
        float* const d_space = space + sgemm_floats;
        column_space = d_space + d_floats;
        bias = column_space + padded(rows);
        float* const part = bias + padded(std::max(rows, columns));
        out = in_place ? p.d.float_at(batch, row, column) : d_space;
        out_ld = in_place ? p.d.column_stride : d_ld;

        if (run.beta != 0.0f) load_c();
        if (p.has_block_scales()) {
            for (int64_t block = 0; block * scale_block < p.k; ++block) {
                const int64_t k = block * scale_block;
                sgemm(p.a.from(batch, row, k), p.b.from(batch, k, column), rows, columns,
                      std::min(scale_block, p.k - k), run.alpha, 0.0f, part, rows, space);
                add_scaled(part, block);
            }
        } else {
            sgemm(p.a.from(batch, row, 0), p.b.from(batch, 0, column), rows, columns, p.k, run.alpha, run.beta, out,
                  out_ld, space);
        }
        if (!in_place || p.epilogue != CUBLASLT_EPILOGUE_DEFAULT || p.d_amax) finish();
    }

  private:
    // With block scales: D's tile += a_scale[i, block] * b_scale[block, j] * part[i, j], after beta C.
    void add_scaled(const float* part, int64_t block) {
        const int64_t square_stride = square_scale_stride(p.k);
        const auto scale = [&](const float* scales, int32_t mode, int64_t length, int64_t i) {
            return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ? scales[block * length + i]
                                                                   : scales[i / scale_block * square_stride + block];
        };
        float* const a_scales = column_space;
        for (int64_t i = 0; i < rows; ++i) a_scales[i] = scale(p.a_scale, p.a_scale_mode, p.m, row + i);
        for (int64_t j = 0; j < columns; ++j) {
            const float b_scale = scale(p.b_scale, p.b_scale_mode, p.n, column + j);
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
        if (p.writes_aux()) {
            narrow(p.aux.type, x, p.aux.at(batch, row, column + j), rows);
            if (p.aux.type != CUDA_R_32F) widen(p.aux.type, p.aux.at(batch, row, column + j), x, rows);
        }
        if (p.has(CUBLASLT_EPILOGUE_RELU)) apply_relu(x, rows);
        if (p.has(CUBLASLT_EPILOGUE_GELU)) apply_gelu(x, rows);
        if (p.reads_aux()) {
            widen(p.aux.type, p.aux.at(batch, row, column + j), column_space, rows);
            apply_gelu_gradient(x, column_space, rows);
        }
    }

    Run& run;
    const Multiplication& p;
    int64_t batch, row, column, rows, columns;
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

// The sums of the rows of `matrix`, `rows` x `columns`, in double precision, from the first column to the last:
// BGRADA of op(A), BGRADB of op(B) transposed, DGELU_BGRAD of D as it is stored.
void sum_rows(const Multiplication& p, const Matrix& matrix, int64_t rows, int64_t columns, int threads) {
    constexpr int64_t block = 256;
    const int64_t blocks = divide_up(rows, block);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows * columns * p.batch_count > 100'000)
    for (int64_t task = 0; task < blocks * p.batch_count; ++task) {
        const int64_t batch = task / blocks, first = task % blocks * block, count = std::min(block, rows - first);
        float values[block];
        double sums[block] = {};
        if (matrix.row_stride == 1) {
            for (int64_t k = 0; k < columns; ++k) {
                widen(matrix.type, matrix.at(batch, first, k), values, count);
                for (int64_t i = 0; i < count; ++i) sums[i] += double(values[i]);
            }
        } else {
            for (int64_t i = 0; i < count; ++i)
                for (int64_t k = 0; k < columns; k += block) {
                    const int64_t length = std::min(block, columns - k);
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
    const int threads = os_threads();
    const float scales = p.has_block_scales() ? 1.0f : value(p.a_scale) * value(p.b_scale);
    Run run{p, choose_tiling(p, threads), alpha * scales, beta * value(p.c_scale), {}};
    const int64_t tasks = run.tiling.count(p.batch_count);

    // Static: matrix b of a batch is always computed by the same thread, whose cache may still hold it.
    const double multiply_adds = double(p.m) * double(p.n) * double(p.k) * double(p.batch_count);
    if (tasks > 1 && multiply_adds > 250'000) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t task = 0; task < tasks; ++task) Tile(run, task).compute();
    } else {  // takes a few microseconds: to wake other threads would take longer
        for (int64_t task = 0; task < tasks; ++task) Tile(run, task).compute();
    }

    if (p.sums_gradient_of_d() && p.bias_along_rows) sum_rows(p, p.d, p.m, p.n, threads);
    if (p.sums_gradient_of_d() && !p.bias_along_rows) sum_rows(p, p.d.transposed(), p.n, p.m, threads);
    if (p.has(CUBLASLT_EPILOGUE_BGRADA)) sum_rows(p, p.a, p.m, p.k, threads);
    if (p.has(CUBLASLT_EPILOGUE_BGRADB)) sum_rows(p, p.b.transposed(), p.n, p.k, threads);
    if (p.d_amax) *p.d_amax = run.amax;
}

}  // namespace cuda_cpu
