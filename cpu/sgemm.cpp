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

#include "cublas_lt.h"
#include "vector.h"

namespace cuda_cpu {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Packing

constexpr int block_vectors = 3, block_rows = block_vectors * width, block_columns = width / 2;
constexpr int64_t panel_rows = 4 * block_rows;

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
    matrix.with_elements([&](const auto* from) { pack<sliver>(from, line_stride, k_stride, count, k, to); });
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
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) finish_column(sums[j], alpha, beta, d + j * ld, rows);
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
    return std::max((panel_rows + divide_up(columns, width) * width) * longest,
                    columns <= most_few_columns ? most_few_columns * k : 0);
}

void sgemm(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha, float beta,
           float* d, int64_t ld, float* space) {
    if (alpha == 0.0f) k = 0;  // as in every BLAS: what A and B hold does not matter, NaN neither
    if (columns <= most_few_columns && a.column_stride == 1)
        return multiply_few_columns(a, b, rows, columns, k, alpha, beta, d, ld, space);
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
