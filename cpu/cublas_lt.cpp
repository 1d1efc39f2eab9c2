// The bodies of cpu/cublasLt.h: checks, then the multiplication on OpenBLAS.
//
// How a multiplication runs. D is cut into tiles, and the tiles of all matrices of a batch are spread over the OpenMP
// threads. A tile is one task from start to end: C's part is loaded, OpenBLAS (single-threaded inside a parallel region)
// multiplies, the epilogue runs while the tile is in the cache, and the result is rounded once to D's type. Many small
// matrices and one large matrix so take the same path, and no thread waits for another before the end. Measured on two
// cores (dev/bench, GPT-2's shapes), this is faster than OpenBLAS's own threads by up to a fifth.
//
// 16- and 8-bit matrices are widened to float32, which is exact, panel by panel into a scratch buffer of at most a few
// MiB for each thread, never as a whole.
//
// Row-major D: the transposed problem, D^T = op(B)^T op(A)^T, is column-major. So everything below is column-major.
//
// The sums of one element are formed by one thread in a fixed order: the same call gives the same bits.
#include "cublasLt.h"

#include <cblas.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "cuda_fp8.h"

struct cublasLtContext {};

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Element types

size_t element_bytes(int32_t type) {
    switch (type) {
        case CUDA_R_32F: return 4;
        case CUDA_R_16F:
        case CUDA_R_16BF: return 2;
        default: return 1;
    }
}

bool is_fp8(int32_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
bool is_16_bit(int32_t type) { return type == CUDA_R_16F || type == CUDA_R_16BF; }

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
// A matrix in memory: element (i, j) of batch b at data + b * batch_stride + i * row_stride + j * column_stride, where
// one of the two strides is 1. Transposing is swapping the strides.

struct Matrix {
    char* data = nullptr;
    int32_t type = CUDA_R_32F;
    int64_t row_stride = 1, column_stride = 1, batch_stride = 0;

    Matrix() = default;
    Matrix(const void* address, const cublasLtMatrixLayoutOpaque_t& layout)
        : data(static_cast<char*>(const_cast<void*>(address))),
          type(layout.type),
          row_stride(layout.order == CUBLASLT_ORDER_COL ? 1 : layout.ld),
          column_stride(layout.order == CUBLASLT_ORDER_COL ? layout.ld : 1),
          batch_stride(layout.batch_count > 1 ? layout.batch_stride : 0) {}

    Matrix transposed() const {
        Matrix result = *this;
        std::swap(result.row_stride, result.column_stride);
        return result;
    }
    char* at(int64_t batch, int64_t row, int64_t column) const {
        const int64_t elements = batch * batch_stride + row * row_stride + column * column_stride;
        return data + elements * int64_t(element_bytes(type));
    }
    float* float_at(int64_t batch, int64_t row, int64_t column) const {
        return reinterpret_cast<float*>(at(batch, row, column));
    }
};

// Everything a multiplication needs when its turn comes: no pointers to descriptors.
struct Multiplication {
    int64_t m, n, k, batch_count;
    Matrix a, b, c, d, aux;  // a: m x k and b: k x n, after op; d column-major
    uint32_t epilogue;
    void* bias;
    int32_t bias_type;
    int64_t bias_batch_stride;
    bool bias_along_rows = true;  // bias[i] belongs to row i of d; false if the problem has been transposed
    float alpha = 0, beta = 0;
    const float *device_alpha = nullptr, *device_beta = nullptr;  // instead of the two, in pointer mode device
    const float *a_scale, *b_scale, *c_scale, *d_scale;
    float* d_amax;

    bool has(uint32_t flag) const { return (epilogue & flag) != 0; }
    bool has_bias() const { return has(CUBLASLT_EPILOGUE_BIAS); }
    bool sums_gradient_of_d() const { return has(16); }
    bool reads_aux() const { return has(64); }
    bool writes_aux() const { return has(CUBLASLT_EPILOGUE_GELU) && has(128); }

    void transpose() {
        std::swap(m, n);
        const Matrix old_a = a;
        a = b.transposed(), b = old_a.transposed();
        c = c.transposed(), d = d.transposed(), aux = aux.transposed();
        bias_along_rows = false;
        if (has(CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB))
            epilogue ^= CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB;
    }
};

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

// Sizes limit the scratch buffer, and keep a tile of D in the second-level cache while its epilogue runs. Smaller tiles
// would read A and B too often.
constexpr int64_t max_tile = 1024, max_narrow_tile = 512, max_k_panel = 768, min_tile = 48;

struct Tiling {
    int64_t rows, columns;            // of one tile
    int64_t row_tiles, column_tiles;  // how many
};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Cuts D into row_cuts x column_cuts tiles, so that every thread gets the same number of them and A and B are read as
// seldom as possible: each of A's rows once for each column of tiles, each of B's columns once for each row of tiles.
Tiling choose_tiling(const Multiplication& p, int64_t threads) {
    const bool all_float = p.a.type == CUDA_R_32F && p.b.type == CUDA_R_32F && p.d.type == CUDA_R_32F;
    const int64_t limit = all_float ? max_tile : max_narrow_tile;
    const int64_t least_row_cuts = divide_up(p.m, limit), most_row_cuts = std::max(least_row_cuts, p.m / min_tile);
    const int64_t least_column_cuts = divide_up(p.n, limit), most_column_cuts = std::max(least_column_cuts, p.n / min_tile);
    int64_t row_cuts = std::min(most_row_cuts, threads), column_cuts = most_column_cuts;  // D is tiny: as many as there are
    if (row_cuts * column_cuts * p.batch_count > threads) column_cuts = least_column_cuts;
    int64_t least_reads = std::numeric_limits<int64_t>::max();
    for (int64_t rows = least_row_cuts; rows <= std::min(most_row_cuts, least_row_cuts + threads); ++rows) {
        // The number of tiles is a multiple of the threads if that of the columns is a multiple of this. When there are
        // many tiles anyway, it does not matter.
        const bool many = rows * least_column_cuts * p.batch_count >= 8 * threads;
        const int64_t unit = many ? 1 : threads / std::gcd(threads, rows * p.batch_count);
        const int64_t columns = divide_up(least_column_cuts, unit) * unit;
        const int64_t reads = columns * p.m + rows * p.n;
        if (columns <= most_column_cuts && reads < least_reads)
            least_reads = reads, row_cuts = rows, column_cuts = columns;
    }
    const auto tile = [](int64_t size, int64_t cuts) { return divide_up(divide_up(size, cuts), 16) * 16; };
    const int64_t rows = tile(p.m, row_cuts), columns = tile(p.n, column_cuts);
    return {rows, columns, divide_up(p.m, rows), divide_up(p.n, columns)};
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

// One multiplication on its way: what its tiles have in common, and where they leave their parts of results over all of D.
struct Run {
    const Multiplication& p;
    Tiling tiling;
    float alpha, beta;                   // all scales included
    std::vector<double> gradient_parts;  // of the bias: [batch][tile across the sum][m or n]
    std::mutex amax_mutex;
    float amax = 0;
};

class Tile {
public:
    Tile(Run& run_, int64_t task) : run(run_), p(run_.p) {
        const Tiling& tiling = run.tiling;
        row_tile = task % tiling.row_tiles;
        column_tile = task / tiling.row_tiles % tiling.column_tiles;
        batch = task / (tiling.row_tiles * tiling.column_tiles);
        row = row_tile * tiling.rows, rows = std::min(tiling.rows, p.m - row);
        column = column_tile * tiling.columns, columns = std::min(tiling.columns, p.n - column);
    }

    void compute() {
        // Scratch: A's panel, B's panel, D's tile, one column, the bias. What is in float32 already needs none.
        const bool widen_a = p.a.type != CUDA_R_32F, widen_b = p.b.type != CUDA_R_32F;
        const bool in_place = p.d.type == CUDA_R_32F;
        const int64_t k_panel = widen_a || widen_b ? std::min(p.k, max_k_panel) : p.k;
        const auto padded = [](int64_t floats) { return divide_up(floats, 16) * 16; };
        const int64_t a_floats = widen_a ? padded(rows * k_panel) : 0, b_floats = widen_b ? padded(k_panel * columns) : 0;
        const int64_t d_floats = in_place ? 0 : padded(rows * columns);
        float* const a_space = scratch(size_t(a_floats + b_floats + d_floats + padded(rows) + std::max(rows, columns)));
        float* const b_space = a_space + a_floats;
        float* const d_space = b_space + b_floats;
        column_space = d_space + d_floats;
        bias = column_space + padded(rows);
        out = in_place ? p.d.float_at(batch, row, column) : d_space;
        out_ld = in_place ? std::max(p.d.column_stride, rows) : rows;

        if (run.beta != 0.0f) load_c();
        for (int64_t k = 0; k < p.k; k += k_panel) {
            const int64_t k_count = std::min(k_panel, p.k - k);
            const Block a = block_of(p.a, batch, row, k, rows, k_count, a_space);
            const Block b = block_of(p.b, batch, k, column, k_count, columns, b_space);
            cblas_sgemm(CblasColMajor, a.transposed ? CblasTrans : CblasNoTrans, b.transposed ? CblasTrans : CblasNoTrans,
                        int(rows), int(columns), int(k_count), run.alpha, a.data, int(a.ld), b.data, int(b.ld),
                        k == 0 ? run.beta : 1.0f, out, int(out_ld));
        }
        if (!in_place || p.epilogue != CUBLASLT_EPILOGUE_DEFAULT) finish();
    }

private:
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
                double* const sums = &run.gradient_parts[size_t((batch * tiling.column_tiles + column_tile) * p.m + row)];
                for (int64_t i = 0; i < rows; ++i) sums[i] += double(x[i]);
            } else {
                double& sum = run.gradient_parts[size_t((batch * tiling.row_tiles + row_tile) * p.n + column + j)];
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
    const int64_t parts = p.bias_along_rows ? run.tiling.column_tiles : run.tiling.row_tiles;
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

void execute(const Multiplication& p) {
    const auto value = [](const float* pointer) { return pointer ? *pointer : 1.0f; };
    const float alpha = p.device_alpha ? *p.device_alpha : p.alpha, beta = p.device_beta ? *p.device_beta : p.beta;
    const int threads = omp_in_parallel() ? 1 : omp_get_max_threads();
    Run run{p, choose_tiling(p, threads), alpha * value(p.a_scale) * value(p.b_scale), beta * value(p.c_scale), {}, {}};
    const int64_t tasks = run.tiling.row_tiles * run.tiling.column_tiles * p.batch_count;
    if (p.sums_gradient_of_d())
        run.gradient_parts.resize(size_t(p.batch_count * (p.bias_along_rows ? run.tiling.column_tiles * p.m
                                                                            : run.tiling.row_tiles * p.n)));

    const double multiply_adds = double(p.m) * double(p.n) * double(p.k) * double(p.batch_count);
    const bool small = multiply_adds <= 250'000;  // a few microseconds: not worth waking other threads
    // Static: matrix b of a batch always meets the same thread, whose cache may still hold it.
#pragma omp parallel for schedule(static) num_threads(threads) if (!small && tasks > 1)
    for (int64_t task = 0; task < tasks; ++task) Tile(run, task).compute();

    if (p.sums_gradient_of_d()) finish_gradient_of_d(run);
    if (p.has(CUBLASLT_EPILOGUE_BGRADA)) sum_rows(p, p.a, p.m, threads);
    if (p.has(CUBLASLT_EPILOGUE_BGRADB)) sum_rows(p, p.b.transposed(), p.n, threads);
    if (p.d_amax) *p.d_amax = run.amax;
}

// ---------------------------------------------------------------------------------------------------------------------
// What is refused

cublasStatus_t check_layout(const cublasLtMatrixLayoutOpaque_t& layout) {
    if (layout.order != CUBLASLT_ORDER_COL && layout.order != CUBLASLT_ORDER_ROW) return CUBLAS_STATUS_NOT_SUPPORTED;
    const uint64_t length = layout.order == CUBLASLT_ORDER_COL ? layout.rows : layout.columns;
    if (layout.rows == 0 || layout.columns == 0 || layout.batch_count < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (layout.ld < 0 || uint64_t(layout.ld) < length) return CUBLAS_STATUS_INVALID_VALUE;
    constexpr auto largest = uint64_t(std::numeric_limits<int32_t>::max());
    if (layout.rows > largest || layout.columns > largest || uint64_t(layout.ld) > largest)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

// The table of types in cublasLt.h. `bias` receives the type that a bias must have.
bool types_are_supported(int32_t a, int32_t b, int32_t c, int32_t d, int32_t asked_bias, int32_t* bias) {
    *bias = d;
    if (is_fp8(a) && is_fp8(b)) {
        if (a == CUDA_R_8F_E5M2 && b == CUDA_R_8F_E5M2) return false;
        if (d == CUDA_R_8F_E5M2 && a == b) return false;
        if (is_fp8(d)) return *bias = c, is_16_bit(c);
        if (d == CUDA_R_32F) *bias = asked_bias == CUDA_R_16F ? CUDA_R_16F : CUDA_R_16BF;
        return c == d && (is_16_bit(d) || d == CUDA_R_32F);
    }
    if (a != b || c != d) return false;
    if (a == CUDA_R_32F) return d == CUDA_R_32F;
    return is_16_bit(a) && (d == a || d == CUDA_R_32F);
}

bool epilogue_is_known(uint32_t epilogue) {
    switch (epilogue) {
        case CUBLASLT_EPILOGUE_DEFAULT:
        case CUBLASLT_EPILOGUE_RELU:
        case CUBLASLT_EPILOGUE_BIAS:
        case CUBLASLT_EPILOGUE_RELU_BIAS:
        case CUBLASLT_EPILOGUE_GELU:
        case CUBLASLT_EPILOGUE_GELU_BIAS:
        case CUBLASLT_EPILOGUE_GELU_AUX:
        case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
        case CUBLASLT_EPILOGUE_DGELU:
        case CUBLASLT_EPILOGUE_DGELU_BGRAD:
        case CUBLASLT_EPILOGUE_BGRADA:
        case CUBLASLT_EPILOGUE_BGRADB: return true;
        default: return false;
    }
}

cublasStatus_t check_epilogue(const cublasLtMatmulDescOpaque_t& operation, const cublasLtMatrixLayoutOpaque_t& c,
                              const cublasLtMatrixLayoutOpaque_t& d, int32_t bias_type) {
    if (!epilogue_is_known(operation.epilogue)) return CUBLAS_STATUS_NOT_SUPPORTED;
    constexpr uint32_t uses_bias = CUBLASLT_EPILOGUE_BIAS | 16 | CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB;
    if (operation.epilogue & uses_bias) {
        if (!operation.bias) return CUBLAS_STATUS_INVALID_VALUE;
        if (operation.bias_type != -1 && operation.bias_type != bias_type) return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (operation.epilogue & 128) {  // AUX
        const int64_t length = int64_t(d.order == CUBLASLT_ORDER_COL ? d.rows : d.columns);
        if (!operation.aux || operation.aux_ld < length || operation.aux_ld % 8 != 0) return CUBLAS_STATUS_INVALID_VALUE;
        if (d.batch_count > 1 && operation.aux_batch_stride % 8 != 0) return CUBLAS_STATUS_INVALID_VALUE;
        const int32_t natural = is_fp8(d.type) ? c.type : d.type;
        if (operation.aux_type != -1 && operation.aux_type != natural) return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

// What Hopper's fp8 kernels ask for.
bool fp8_is_supported(const cublasLtMatmulDescOpaque_t& operation, const cublasLtMatrixLayoutOpaque_t& a,
                      const cublasLtMatrixLayoutOpaque_t& b, const cublasLtMatrixLayoutOpaque_t& d) {
    if (operation.transpose_a == CUBLAS_OP_N || operation.transpose_b != CUBLAS_OP_N) return false;
    if (a.order != CUBLASLT_ORDER_COL || b.order != CUBLASLT_ORDER_COL || d.order != CUBLASLT_ORDER_COL) return false;
    return a.rows % 16 == 0 && d.rows % 16 == 0 && a.ld % 16 == 0 && b.ld % 16 == 0 &&
           d.ld * int64_t(element_bytes(d.type)) % 16 == 0;
}

using Layout = cublasLtMatrixLayoutOpaque_t;

cublasStatus_t check(const cublasLtMatmulDescOpaque_t& operation, const Layout& a, const Layout& b, const Layout& c,
                     const Layout& d, int32_t* bias_type) {
    for (const Layout* layout : {&a, &b, &c, &d})
        if (const cublasStatus_t status = check_layout(*layout); status != CUBLAS_STATUS_SUCCESS) return status;
    for (const int32_t transpose : {operation.transpose_a, operation.transpose_b, operation.transpose_c})
        if (transpose < CUBLAS_OP_N || transpose > CUBLAS_OP_C) return CUBLAS_STATUS_INVALID_VALUE;
    const auto shape = [](const Layout& layout, int32_t transpose) {
        return transpose == CUBLAS_OP_N ? std::pair(layout.rows, layout.columns) : std::pair(layout.columns, layout.rows);
    };
    const auto [m, k] = shape(a, operation.transpose_a);
    const auto [k_of_b, n] = shape(b, operation.transpose_b);
    if (k != k_of_b || d.rows != m || d.columns != n || c.rows != m || c.columns != n) return CUBLAS_STATUS_INVALID_VALUE;
    for (const Layout* layout : {&a, &b, &c})
        if (layout->batch_count != d.batch_count) return CUBLAS_STATUS_INVALID_VALUE;
    if (d.batch_count > 1 && d.batch_stride == 0) return CUBLAS_STATUS_INVALID_VALUE;  // all would write to one place

    switch (operation.compute_type) {
        case CUBLAS_COMPUTE_32F:
        case CUBLAS_COMPUTE_32F_PEDANTIC:
        case CUBLAS_COMPUTE_32F_FAST_16F:
        case CUBLAS_COMPUTE_32F_FAST_16BF:
        case CUBLAS_COMPUTE_32F_FAST_TF32: break;
        default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (operation.scale_type != CUDA_R_32F || operation.transpose_c != CUBLAS_OP_N || c.order != d.order)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (operation.pointer_mode != CUBLASLT_POINTER_MODE_HOST && operation.pointer_mode != CUBLASLT_POINTER_MODE_DEVICE)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!types_are_supported(a.type, b.type, c.type, d.type, operation.bias_type, bias_type))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (is_fp8(a.type) && !fp8_is_supported(operation, a, b, d)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!is_fp8(a.type) && (operation.a_scale || operation.b_scale || operation.c_scale || operation.d_scale ||
                            operation.d_amax))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (operation.d_scale && !is_fp8(d.type)) return CUBLAS_STATUS_INVALID_VALUE;
    return check_epilogue(operation, c, d, *bias_type);
}

// ---------------------------------------------------------------------------------------------------------------------
// Attributes: where each stands in its descriptor, and its size

struct Field {
    void* address = nullptr;
    size_t bytes = 0;
};

template <class T>
Field field(T& member) {
    return {&member, sizeof(T)};
}

Field find(cublasLtMatrixLayoutOpaque_t& layout, cublasLtMatrixLayoutAttribute_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATRIX_LAYOUT_TYPE: return field(layout.type);
        case CUBLASLT_MATRIX_LAYOUT_ORDER: return field(layout.order);
        case CUBLASLT_MATRIX_LAYOUT_ROWS: return field(layout.rows);
        case CUBLASLT_MATRIX_LAYOUT_COLS: return field(layout.columns);
        case CUBLASLT_MATRIX_LAYOUT_LD: return field(layout.ld);
        case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return field(layout.batch_count);
        case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return field(layout.batch_stride);
    }
    return {};
}

Field find(cublasLtMatmulDescOpaque_t& operation, cublasLtMatmulDescAttributes_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: return field(operation.compute_type);
        case CUBLASLT_MATMUL_DESC_SCALE_TYPE: return field(operation.scale_type);
        case CUBLASLT_MATMUL_DESC_POINTER_MODE: return field(operation.pointer_mode);
        case CUBLASLT_MATMUL_DESC_TRANSA: return field(operation.transpose_a);
        case CUBLASLT_MATMUL_DESC_TRANSB: return field(operation.transpose_b);
        case CUBLASLT_MATMUL_DESC_TRANSC: return field(operation.transpose_c);
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return field(operation.epilogue);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return field(operation.bias);
        case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: return field(operation.bias_batch_stride);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return field(operation.aux);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return field(operation.aux_ld);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: return field(operation.aux_batch_stride);
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return field(operation.a_scale);
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return field(operation.b_scale);
        case CUBLASLT_MATMUL_DESC_C_SCALE_POINTER: return field(operation.c_scale);
        case CUBLASLT_MATMUL_DESC_D_SCALE_POINTER: return field(operation.d_scale);
        case CUBLASLT_MATMUL_DESC_AMAX_D_POINTER: return field(operation.d_amax);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return field(operation.aux_type);
        case CUBLASLT_MATMUL_DESC_FAST_ACCUM: return field(operation.fast_accumulation);
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return field(operation.bias_type);
    }
    return {};
}

Field find(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_SEARCH_MODE: return field(preference.search_mode);
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return field(preference.max_workspace_bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return field(preference.reduction_scheme_mask);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return field(preference.a_alignment);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return field(preference.b_alignment);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return field(preference.c_alignment);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return field(preference.d_alignment);
    }
    return {};
}

template <class Descriptor, class Attribute>
cublasStatus_t set_attribute(Descriptor* descriptor, Attribute attribute, const void* value, size_t bytes) {
    if (!descriptor || !value) return CUBLAS_STATUS_INVALID_VALUE;
    const Field found = find(*descriptor, attribute);
    if (!found.address || found.bytes != bytes) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(found.address, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

// With bytes = 0, only tells how many there are.
template <class Descriptor, class Attribute>
cublasStatus_t get_attribute(Descriptor* descriptor, Attribute attribute, void* value, size_t bytes,
                             size_t* bytes_written) {
    if (!descriptor || (bytes == 0 ? bytes_written == nullptr : value == nullptr)) return CUBLAS_STATUS_INVALID_VALUE;
    const Field found = find(*descriptor, attribute);
    if (!found.address || (bytes != 0 && found.bytes != bytes)) return CUBLAS_STATUS_INVALID_VALUE;
    if (bytes != 0) std::memcpy(value, found.address, bytes);
    if (bytes_written) *bytes_written = found.bytes;
    return CUBLAS_STATUS_SUCCESS;
}

template <class Descriptor>
cublasStatus_t create(Descriptor** descriptor) {
    if (!descriptor) return CUBLAS_STATUS_INVALID_VALUE;
    *descriptor = new (std::nothrow) Descriptor();
    return *descriptor ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

template <class Descriptor>
cublasStatus_t destroy(Descriptor* descriptor) {
    delete descriptor;
    return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The API

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return create(handle); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    return handle ? destroy(handle) : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType type, uint64_t rows,
                                        uint64_t columns, int64_t ld) {
    if (!layout) return CUBLAS_STATUS_INVALID_VALUE;
    *layout = {};
    layout->type = type, layout->rows = rows, layout->columns = columns, layout->ld = ld;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
    const cublasStatus_t status = create(layout);
    return status == CUBLAS_STATUS_SUCCESS ? cublasLtMatrixLayoutInit(*layout, type, rows, columns, ld) : status;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy(layout); }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t bytes) {
    return set_attribute(layout, attribute, value, bytes);
}
cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                                void* value, size_t bytes, size_t* bytes_written) {
    return get_attribute(layout, attribute, value, bytes, bytes_written);
}

cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t operation, cublasComputeType_t compute_type,
                                      cudaDataType scale_type) {
    if (!operation) return CUBLAS_STATUS_INVALID_VALUE;
    *operation = {};
    operation->compute_type = compute_type, operation->scale_type = scale_type;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute_type,
                                        cudaDataType scale_type) {
    const cublasStatus_t status = create(operation);
    return status == CUBLAS_STATUS_SUCCESS ? cublasLtMatmulDescInit(*operation, compute_type, scale_type) : status;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) { return destroy(operation); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
    return set_attribute(operation, attribute, value, bytes);
}
cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              void* value, size_t bytes, size_t* bytes_written) {
    return get_attribute(operation, attribute, value, bytes, bytes_written);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) { return create(preference); }
cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference) {
    if (!preference) return CUBLAS_STATUS_INVALID_VALUE;
    *preference = {};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { return destroy(preference); }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
    return set_attribute(preference, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a_layout, cublasLtMatrixLayout_t b_layout,
                                              cublasLtMatrixLayout_t c_layout, cublasLtMatrixLayout_t d_layout,
                                              cublasLtMatmulPreference_t preference, int requested_count,
                                              cublasLtMatmulHeuristicResult_t results[], int* returned_count) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!operation || !a_layout || !b_layout || !c_layout || !d_layout || !preference || !results || !returned_count ||
        requested_count < 1)
        return CUBLAS_STATUS_INVALID_VALUE;
    *returned_count = 0;
    for (const uint32_t alignment :
         {preference->a_alignment, preference->b_alignment, preference->c_alignment, preference->d_alignment})
        if (alignment == 0 || (alignment & (alignment - 1)) != 0) return CUBLAS_STATUS_INVALID_VALUE;
    int32_t bias_type;
    const cublasStatus_t status = check(*operation, *a_layout, *b_layout, *c_layout, *d_layout, &bias_type);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const bool needs_16_bytes = is_fp8(a_layout->type);
    if (needs_16_bytes && std::min(preference->a_alignment, preference->b_alignment) < 16)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    results[0] = {};
    results[0].state = CUBLAS_STATUS_SUCCESS;
    results[0].wavesCount = 1.0f;
    *returned_count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t a_layout, const void* B, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* C, cublasLtMatrixLayout_t c_layout, void* D,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t*, void*, size_t,
                              cudaStream_t stream) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!operation || !a_layout || !b_layout || !c_layout || !d_layout || !alpha || !beta || !A || !B || !D)
        return CUBLAS_STATUS_INVALID_VALUE;
    int32_t bias_type;
    const cublasStatus_t status = check(*operation, *a_layout, *b_layout, *c_layout, *d_layout, &bias_type);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const bool on_device = operation->pointer_mode == CUBLASLT_POINTER_MODE_DEVICE;
    const float* const host_beta = on_device ? nullptr : static_cast<const float*>(beta);
    if (!C && !(host_beta && *host_beta == 0.0f)) return CUBLAS_STATUS_INVALID_VALUE;
    if (C == D && c_layout->type == d_layout->type &&
        (c_layout->ld != d_layout->ld || c_layout->batch_stride != d_layout->batch_stride))
        return CUBLAS_STATUS_INVALID_VALUE;  // in place, but not each element in its own place
    if (is_fp8(a_layout->type) && (reinterpret_cast<uintptr_t>(A) | reinterpret_cast<uintptr_t>(B) |
                                   reinterpret_cast<uintptr_t>(D)) % 16 != 0)
        return CUBLAS_STATUS_NOT_SUPPORTED;

    Multiplication p;
    p.a = Matrix(A, *a_layout), p.b = Matrix(B, *b_layout), p.c = Matrix(C, *c_layout), p.d = Matrix(D, *d_layout);
    if (operation->transpose_a != CUBLAS_OP_N) p.a = p.a.transposed();
    if (operation->transpose_b != CUBLAS_OP_N) p.b = p.b.transposed();
    p.m = int64_t(d_layout->rows), p.n = int64_t(d_layout->columns), p.batch_count = d_layout->batch_count;
    p.k = int64_t(operation->transpose_a == CUBLAS_OP_N ? a_layout->columns : a_layout->rows);
    p.epilogue = operation->epilogue;
    p.bias = operation->bias, p.bias_type = bias_type, p.bias_batch_stride = operation->bias_batch_stride;
    Layout aux_layout = *d_layout;  // AUX is ordered like D
    aux_layout.type = is_fp8(d_layout->type) ? c_layout->type : d_layout->type;
    aux_layout.ld = operation->aux_ld, aux_layout.batch_stride = operation->aux_batch_stride;
    p.aux = Matrix(operation->aux, aux_layout);
    if (on_device) {
        p.device_alpha = static_cast<const float*>(alpha), p.device_beta = static_cast<const float*>(beta);
    } else {
        p.alpha = *static_cast<const float*>(alpha), p.beta = *host_beta;
    }
    p.a_scale = operation->a_scale, p.b_scale = operation->b_scale, p.c_scale = operation->c_scale;
    p.d_scale = operation->d_scale, p.d_amax = operation->d_amax;
    if (d_layout->order == CUBLASLT_ORDER_ROW) p.transpose();
    cuda_cpu::enqueue(stream, [p] { execute(p); });
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion() { return 130000; }

const char* cublasGetStatusName(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
        case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
        case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
        case CUBLAS_STATUS_LICENSE_ERROR: return "CUBLAS_STATUS_LICENSE_ERROR";
    }
    return "unrecognized status";
}

const char* cublasGetStatusString(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "success";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "no library handle was given";
        case CUBLAS_STATUS_ALLOC_FAILED: return "out of memory";
        case CUBLAS_STATUS_INVALID_VALUE: return "an argument is missing, out of range, or contradicts another";
        case CUBLAS_STATUS_ARCH_MISMATCH: return "the device lacks what this function needs";
        case CUBLAS_STATUS_MAPPING_ERROR: return "device memory could not be accessed";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "the kernel failed";
        case CUBLAS_STATUS_INTERNAL_ERROR: return "an internal operation failed";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "no kernel exists for this combination of types, layouts and epilogue";
        case CUBLAS_STATUS_LICENSE_ERROR: return "the license check failed";
    }
    return "unrecognized status";
}

const char* cublasLtGetStatusName(cublasStatus_t status) { return cublasGetStatusName(status); }
const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasGetStatusString(status); }
