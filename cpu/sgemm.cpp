// The arithmetic of cuBLASLt's multiplication on one thread: D = alpha A B + beta D, in float32, for one tile of D.
//
// Registers. The innermost loop keeps a small block of D in vector registers, 48 x 8 elements with AVX-512, 24 x 4 with
// AVX2. For each k it loads one column of A's block (three vectors), and multiplies it with each element of B's row:
// 24 (12) fused multiply-adds for 3 loads and 8 (4) broadcasts, so that the arithmetic is what takes the time.
//
// Caches. It reads A and B from copies that lie in the order in which it reads them ("packed"): A as slivers of 48
// rows, B as slivers of 8 columns, k after k. It takes 384 k's at a time: a sliver of B then fits in the first-level
// cache, and stays there while it is multiplied with a block of four slivers of A (288 KiB), which fits in the
// second-level cache. Packing transposes where it must, in registers, and widens 16- and 8-bit numbers, which is exact.
// (Goto & van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.)
//
// One order of summation. An element of A B is formed by fused multiply-adds in the order of k, from zero, anew for
// each 384 k's, and these parts are added up in order. This is true at the edges of a matrix as well as inside of it.
// So the bits of an element depend on its row of A, its column of B, alpha, beta and its old value, and on nothing
// else: not on the shape of the matrices, not on its place in them, not on the number of threads, nor, among CPUs with
// fused multiply-add, on the width of the vectors. A token's activations are the same bits in whatever batch it is
// computed. (Libraries do not promise this: OpenBLAS has other kernels at the edge of a matrix, and for small ones.)
#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "cublas_lt.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"

namespace cuda_cpu {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Vectors

#if defined(__AVX512F__)
constexpr int width = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int width = 8;
#else
constexpr int width = 4;
#endif
typedef float Vector __attribute__((vector_size(width * sizeof(float))));
typedef float LooseVector __attribute__((vector_size(width * sizeof(float)), aligned(4), may_alias));  // any floats

inline Vector load(const float* from) { return *reinterpret_cast<const LooseVector*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<LooseVector*>(to) = x; }

#if defined(__AVX512F__)
inline Vector multiply_add(Vector a, Vector b, Vector c) { return Vector(_mm512_fmadd_ps(a, b, c)); }
inline Vector broadcast(float x) { return Vector(_mm512_set1_ps(x)); }
#elif defined(__AVX2__) && defined(__FMA__)
inline Vector multiply_add(Vector a, Vector b, Vector c) { return Vector(_mm256_fmadd_ps(a, b, c)); }
inline Vector broadcast(float x) { return Vector(_mm256_set1_ps(x)); }
#else  // four lanes, and two roundings, for any other CPU
inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
inline Vector broadcast(float x) { return Vector{x, x, x, x}; }
#endif

// a and b interleaved, a[0] b[0] a[1] b[1] ...: the first half of the result and the second.
template <int... lane>
void zip(Vector a, Vector b, Vector& first, Vector& second, std::integer_sequence<int, lane...>) {
    typedef int Lanes __attribute__((vector_size(width * sizeof(int))));
#if defined(__clang__)
    first = __builtin_shufflevector(a, b, (lane % 2 * width + lane / 2)...);
    second = __builtin_shufflevector(a, b, (lane % 2 * width + lane / 2 + width / 2)...);
#else
    first = __builtin_shuffle(a, b, Lanes{(lane % 2 * width + lane / 2)...});
    second = __builtin_shuffle(a, b, Lanes{(lane % 2 * width + lane / 2 + width / 2)...});
#endif
}

// x[i][j] becomes x[j][i]. Interleaving line i with line i + width / 2 rotates the bits of an element's number (line,
// lane) by one place; after as many rounds as a line's number has bits, line and lane are exchanged.
void transpose(Vector (&x)[width]) {
#pragma GCC unroll 4
    for (int times = 1; times < width; times *= 2) {
        Vector y[width];
#pragma GCC unroll 16
        for (int i = 0; i < width / 2; ++i)
            zip(x[i], x[i + width / 2], y[2 * i], y[2 * i + 1], std::make_integer_sequence<int, width>());
#pragma GCC unroll 16
        for (int i = 0; i < width; ++i) x[i] = y[i];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Packing

constexpr int block_vectors = 3, block_rows = block_vectors * width, block_columns = width / 2;
constexpr int64_t panel_k = 384, panel_rows = 4 * block_rows;

// Up to `width` lines of k numbers each, transposed, where `out` is the place of the first number of the first line. A
// vector of one number of every line is a part of one sliver (A), or the whole of several (B).
template <int sliver>
void pack_lines(const float* from, int64_t line_stride, int64_t lines, int64_t k, float* out) {
    // Stores number l of all lines: as a part of one sliver, or divided among several.
    const auto put = [&](Vector x, int64_t l) {
        if constexpr (sliver >= width) {
            store(out + l * sliver, x);
        } else {
            float values[width];
            store(values, x);
            for (int i = 0; i < lines; i += sliver)
                std::memcpy(out + l * sliver + i * k, values + i, sliver * sizeof(float));
        }
    };
    int64_t l = 0;
    for (; l + width <= k; l += width) {
        Vector x[width];
        if (lines == width)
#pragma GCC unroll 16
            for (int i = 0; i < width; ++i) x[i] = load(from + i * line_stride + l);
        else
            for (int i = 0; i < width; ++i) x[i] = i < lines ? load(from + i * line_stride + l) : Vector{};
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < width; ++i) put(x[i], l + i);
    }
    for (; l < k; ++l) {
        Vector x = {};
        for (int i = 0; i < lines; ++i) x[i] = from[i * line_stride + l];
        put(x, l);
    }
}

// `count` lines (A's rows or B's columns) of k numbers, as slivers of `sliver` lines: out[l * sliver + i] for number l
// of line i, sliver after sliver. The last one is filled up with zeros to a whole number of vectors, or to a sliver.
template <int sliver, class T>
void pack(const T* from, int64_t line_stride, int64_t k_stride, int64_t count, int64_t k, float* to) {
    // The lines are neighbours in memory: numbers are copied in rows, nothing is transposed.
    if (line_stride == 1) {
        for (int64_t first = 0; first < count; first += sliver, from += sliver, to += sliver * k) {
            const int lines = int(std::min<int64_t>(sliver, count - first));
            for (int64_t l = 0; l < k; ++l) {
                float* const out = to + l * sliver;
                if (lines == sliver)
                    for (int i = 0; i < sliver; ++i) out[i] = float(from[l * k_stride + i]);
                else
                    for (int i = 0; i < sliver; ++i) out[i] = i < lines ? float(from[l * k_stride + i]) : 0.0f;
            }
        }
        return;
    }
    // Otherwise each line is contiguous, and `width` lines at a time are transposed in registers.
    for (int64_t first = 0; first < count; first += width, from += width * line_stride) {
        const int64_t lines = std::min<int64_t>(width, count - first);
        float* const out = to + first / sliver * sliver * k + first % sliver;
        if constexpr (std::is_same_v<T, float>) {
            pack_lines<sliver>(from, line_stride, lines, k, out);
        } else {
            float wide[width * panel_k];
            for (int64_t i = 0; i < lines; ++i)
                for (int64_t l = 0; l < k; ++l) wide[i * panel_k + l] = float(from[i * line_stride + l]);
            pack_lines<sliver>(wide, panel_k, lines, k, out);
        }
    }
}

template <int sliver>
void pack(const Matrix& matrix, int64_t line_stride, int64_t k_stride, int64_t count, int64_t k, float* to) {
    const auto as = [&]<class T>(const T* from) { pack<sliver>(from, line_stride, k_stride, count, k, to); };
    switch (matrix.type) {
        case CUDA_R_32F: return as(reinterpret_cast<const float*>(matrix.data));
        case CUDA_R_16F: return as(reinterpret_cast<const __half*>(matrix.data));
        case CUDA_R_16BF: return as(reinterpret_cast<const __nv_bfloat16*>(matrix.data));
        case CUDA_R_8F_E4M3: return as(reinterpret_cast<const __nv_fp8_e4m3*>(matrix.data));
        case CUDA_R_8F_E5M2: return as(reinterpret_cast<const __nv_fp8_e5m2*>(matrix.data));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The innermost loop: `rows` <= vectors * width rows and `columns` columns of D, from one sliver of A and one of B.

template <int vectors, int columns>
void multiply_block(const float* __restrict a, const float* __restrict b, int64_t k, float alpha, float beta, float* d,
                    int64_t ld, int64_t rows) {
    Vector sums[columns][vectors] = {};
    for (int64_t l = 0; l < k; ++l, a += block_rows, b += block_columns) {
        Vector x[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) x[v] = load(a + v * width);
#pragma GCC unroll 8
        for (int j = 0; j < columns; ++j) {
            const Vector y = broadcast(b[j]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) sums[j][v] = multiply_add(x[v], y, sums[j][v]);
        }
    }
    // alpha sum + beta D. Without beta, D may hold anything.
    const Vector alphas = broadcast(alpha), betas = broadcast(beta);
    const auto finish = [&](Vector sum, float* at) {
        store(at, beta == 0.0f ? alphas * sum : multiply_add(alphas, sum, betas * load(at)));
    };
    if (rows == vectors * width) {
#pragma GCC unroll 8
        for (int j = 0; j < columns; ++j)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) finish(sums[j][v], d + j * ld + v * width);
    } else {
        for (int j = 0; j < columns; ++j) {
            float column[vectors * width] = {};
            std::memcpy(column, d + j * ld, size_t(rows) * sizeof(float));
            for (int v = 0; v < vectors; ++v) finish(sums[j][v], column + v * width);
            std::memcpy(d + j * ld, column, size_t(rows) * sizeof(float));
        }
    }
}

// multiply_block for every size of block, [vectors - 1][columns - 1].
using MultiplyBlock = void (*)(const float*, const float*, int64_t, float, float, float*, int64_t, int64_t);
template <int... i>
constexpr std::array<MultiplyBlock, sizeof...(i)> all_blocks(std::integer_sequence<int, i...>) {
    return {multiply_block<i / block_columns + 1, i % block_columns + 1>...};
}
constexpr auto blocks = all_blocks(std::make_integer_sequence<int, block_vectors * block_columns>());

}  // namespace

int64_t sgemm_space(int64_t columns, int64_t k) {
    const int64_t longest = std::min(k, panel_k);
    return (panel_rows + divide_up(columns, width) * width) * longest;
}

void sgemm(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha, float beta,
           float* d, int64_t ld, float* space) {
    if (alpha == 0.0f) k = 0;  // as in every BLAS: what A and B hold does not matter, NaN neither
    float *const packed_a = space, *const packed_b = space + panel_rows * std::min(k, panel_k);
    int64_t first_k = 0;
    do {
        const int64_t length = std::min(panel_k, k - first_k);
        const float panel_beta = first_k == 0 ? beta : 1.0f;
        pack<block_columns>(b.from(0, first_k, 0), b.column_stride, b.row_stride, columns, length, packed_b);
        for (int64_t first_row = 0; first_row < rows; first_row += panel_rows) {
            const int64_t count = std::min(panel_rows, rows - first_row);
            pack<block_rows>(a.from(0, first_row, first_k), a.row_stride, a.column_stride, count, length, packed_a);
            for (int64_t j = 0; j < columns; j += block_columns)
                for (int64_t i = 0; i < count; i += block_rows) {
                    const int64_t block_i = std::min<int64_t>(block_rows, count - i);
                    const int64_t block_j = std::min<int64_t>(block_columns, columns - j);
                    blocks[size_t((divide_up(block_i, width) - 1) * block_columns + block_j - 1)](
                        packed_a + i * length, packed_b + j * length, length, alpha, panel_beta,
                        d + first_row + i + j * ld, ld, block_i);
                }
        }
        first_k += panel_k;
    } while (first_k < k);
}

}  // namespace cuda_cpu
