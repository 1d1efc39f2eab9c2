// cpu/sgemm.h: the arithmetic of cuBLASLt's multiplication on one thread: D = alpha A B + beta D for one tile of D,
// with sums in float32. sgemm.cpp compiles it for float32 products, bf16_dots.cpp for an instruction that adds two
// products of bf16 numbers; Arithmetic is what differs between the two (arithmetic.h).
//
// Registers. The innermost loop keeps a small block of D in vector registers, 48 x 8 elements with AVX-512, 24 x 4 with
// AVX2, 12 x 8 on Arm. For each k (every two, where an instruction takes two) it loads one column of A's block (three
// vectors), and multiplies it with each element of B's row: 24 (12) fused multiply-adds for 3 loads and 8 (4)
// broadcasts, so that the arithmetic is what takes the time.
//
// Caches. It reads A and B from copies that lie in the order in which it reads them ("packed"): A as slivers of 48
// rows, B as slivers of 8 columns, k after k. It takes 384 k's at a time: a sliver of B then fits in the first-level
// cache, and stays there while it is multiplied with a block of four slivers of A (288 KiB), which fits in the
// second-level cache. Packing transposes where it must, in registers. It widens 16- and 8-bit numbers to floats, which
// is exact, or puts two bf16 numbers into one word of 32 bits: a "word" of a packed copy is one float, or such a pair.
// (Goto & van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.)
//
// To copy an element takes as long as some 64 multiply-adds, and an element of B has one for each row of A: 128 in a
// model of 128 columns. So with few rows, up to eight slivers, B is read in place if it is of floats whose k's are
// neighbours in memory, as a token's numbers are. (On a Xeon with AVX-512 products with 128 rows take 4 to 8 % less
// time.)
//
// One order of summation. An element of A B is formed by fused multiply-adds in the order of k, from zero, anew for
// each 384 k's, and these parts are added up in order. This is true at the edges of a matrix as well as inside of it.
// So the bits of an element depend on its row of A, its column of B, alpha, beta and its old value, and on nothing
// else: not on the shape of the matrices, not on its place in them, not on the number of threads, nor, among CPUs with
// fused multiply-add, on the width of the vectors. A token's activations are the same bits in whatever batch it is
// computed. (Libraries do not promise this: OpenBLAS has other kernels at the edge of a matrix, and for small ones.)
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "arithmetic.h"
#include "cublas_lt.h"
#include "few_columns.h"
#include "packing.h"

namespace cuda_cpu {
namespace {

// The block in registers, and how many rows of A are packed at a time.
#if defined(__aarch64__)
constexpr int block_columns = 8;
#else
constexpr int block_columns = width / 2;
#endif
constexpr int block_vectors = 3, block_rows = block_vectors * width;
// A block of one vector of rows, at the end of a matrix, takes two slivers of B where they are narrow: with fewer than
// eight sums a multiply-add would wait for the one before it.
constexpr int most_columns = std::min(8, 2 * block_columns);
constexpr int64_t panel_rows = 4 * block_rows;
// Words for which the innermost loop is written out. With AVX2 what a loop adds to 12 multiply-adds is a fifth of its
// instructions. (On a Zen 3, another of whose threads was busy, a step of GPT-2 124M took a tenth less time.)
constexpr int words_together = width == 8 ? 4 : 1;
// How many columns of B are packed at a time. (Where columns are neighbours in memory, more of them would be written to
// more places at the same time than the first-level cache has lines for: slivers lie multiples of 4096 bytes apart.)
constexpr int64_t group_columns = 8 * block_columns;

// ---------------------------------------------------------------------------------------------------------------------
// Fetching ahead

// The part of A, or of B transposed, that is packed next. It is fetched while the part before it is multiplied: a cache
// line with each k of the first blocks. (For 17 to 32 columns, where the arithmetic takes about as long as A's bytes, a
// product takes a fifth less time.)
class Ahead {
  public:
    Ahead() = default;
    Ahead(const Matrix& part, int64_t rows, int64_t k, Order order = Order::memory) {
        const bool along_rows = part.row_stride == 1;
        const int64_t bytes = element_bytes(part.type), runs = along_rows ? k : rows;
        at = part.data;
        length = (along_rows ? rows : k) * bytes;
        stride = (along_rows ? part.column_stride : part.row_stride) * bytes;
        left = runs * divide_up(length, 64);
        if (order == Order::multiplication && runs % width == 0) together = width;
    }

    int64_t n_left() const { return left; }
    void fetch() {
        __builtin_prefetch(at + offset, 0, 2);  // to the second-level cache
        --left;
        at += stride;
        if (++run < together) return;
        run = 0;
        if ((offset += 64) >= length) offset = 0;
        else at -= together * stride;
    }

  private:
    const char* at = nullptr;  // a run of `length` bytes; the next one begins `stride` after it
    int64_t length = 0, stride = 0, offset = 0, left = 0;  // left: lines
    int64_t together = 1, run = 0;  // runs of which a line each is fetched before their next line
};

// ---------------------------------------------------------------------------------------------------------------------
// The innermost loop: `rows` <= vectors * width rows and `columns` columns of D, from one sliver of A and, of B, from
// columns in place, which begin b_stride after each other, or from slivers of b_stride words. It fetches n_ahead lines.

template <class Arithmetic, bool b_in_place, int vectors, int columns>
void multiply_block(const float* __restrict a, const float* __restrict b, int64_t b_stride, int64_t words, float alpha,
                    float beta, float* d, int64_t ld, int64_t rows, Ahead& ahead, int64_t n_ahead) {
    Vector sums[columns][vectors] = {};
    constexpr int near = b_in_place ? 4 : block_columns;  // columns from b on; b_next: the others
    const int64_t column_stride = b_in_place ? b_stride : 1;
    const float* b_next = b + near * b_stride;
    const auto add_word = [&] {
        Vector x[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) x[v] = in_register(load(a + v * width));
#pragma GCC unroll 8
        for (int j = 0; j < columns; ++j) {
            const Vector y = broadcast((j < near ? b : b_next)[j % near * column_stride]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) sums[j][v] = Arithmetic::multiply_add(x[v], y, sums[j][v]);
        }
        constexpr int step = b_in_place ? 1 : block_columns;
        a += block_rows, b += step, b_next += step;
    };
    if (n_ahead > 0) {
        Ahead lines = ahead;  // in registers
        for (int64_t l = 0; l < n_ahead; ++l) lines.fetch(), add_word();
        ahead = lines;
    }
#pragma GCC unroll words_together
    for (int64_t l = n_ahead; l < words; ++l) add_word();
#pragma GCC unroll 8
    for (int j = 0; j < columns; ++j) finish_column(sums[j], alpha, beta, d + j * ld, rows);
}

// multiply_block for every size of block, [vectors - 1][columns - 1].
using MultiplyBlock = void (*)(const float*, const float*, int64_t, int64_t, float, float, float*, int64_t, int64_t,
                               Ahead&, int64_t);
constexpr int columns_of(int64_t vectors) { return vectors == 1 ? most_columns : block_columns; }
template <class Arithmetic, bool b_in_place, int vectors, int columns>
constexpr MultiplyBlock block_of_size() {
    if constexpr (columns <= columns_of(vectors)) return multiply_block<Arithmetic, b_in_place, vectors, columns>;
    else return nullptr;
}
template <class Arithmetic, bool b_in_place, int... i>
constexpr std::array<MultiplyBlock, sizeof...(i)> all_blocks(std::integer_sequence<int, i...>) {
    return {block_of_size<Arithmetic, b_in_place, i / most_columns + 1, i % most_columns + 1>()...};
}
template <class Arithmetic, bool b_in_place>
constexpr auto blocks =
    all_blocks<Arithmetic, b_in_place>(std::make_integer_sequence<int, block_vectors * most_columns>());

// ---------------------------------------------------------------------------------------------------------------------

// The floats of `space`, for any arithmetic.
inline int64_t packed_space(int64_t columns, int64_t k) {
    constexpr int64_t lines = std::max(width, block_columns);
    return std::max((panel_rows + divide_up(columns, lines) * lines) * std::min(k, panel_k),
                    columns <= most_few_columns(CUDA_R_32F) ? few_columns_space(columns, k) : 0);
}

// What is packed of A, at_a_time rows together, after the rows from first_row on of the k's from first_k on.
inline Ahead next_part(const Matrix& a, int64_t rows, int64_t k, int64_t first_row, int64_t first_k, int64_t at_a_time,
                       Order order) {
    first_row += at_a_time;
    if (first_row >= rows) first_row = 0, first_k += panel_k;
    if (first_k >= k) return {};
    return {a.from(0, first_row, first_k), std::min(at_a_time, rows - first_row), std::min(panel_k, k - first_k),
            order};
}

// count x columns elements of D, from `words` words of packed lines of A, and of lines of B that begin b_stride after
// each other, or are packed: b_stride is `words` then. `ahead` is fetched on the way.
template <class Arithmetic, bool b_in_place>
void multiply_lines(const float* packed_a, const float* b, int64_t b_stride, int64_t words, float alpha, float beta,
                    float* d, int64_t ld, int64_t count, int64_t columns, Ahead ahead) {
    const int64_t n_blocks = divide_up(columns, block_columns) * divide_up(count, block_rows);
    const int64_t n_ahead = std::min(divide_up(ahead.n_left(), n_blocks), words);
    for (int64_t j = 0; j < columns; j += block_columns)
        for (int64_t i = 0; i < count; i += block_rows) {
            const int64_t block_i = std::min<int64_t>(block_rows, count - i), vectors = divide_up(block_i, width);
            if (j % columns_of(vectors) != 0) continue;  // these columns were multiplied with those before
            const int64_t block_j = std::min<int64_t>(columns_of(vectors), columns - j);
            blocks<Arithmetic, b_in_place>[size_t((vectors - 1) * most_columns + block_j - 1)](
                packed_a + i * words, b + j * b_stride, b_stride, words, alpha, beta, d + i + j * ld, ld, block_i,
                ahead, std::min(n_ahead, ahead.n_left()));
        }
}

// What sgemm (cublas_lt.h) promises, with this arithmetic.
template <class Arithmetic>
void multiply_packed(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha,
                     float beta, float* d, int64_t ld, float* space) {
    if (columns <= most_few_columns(a.type) && a.column_stride == 1) {
        if constexpr (std::same_as<Arithmetic, Floats>)
            if (a.type == CUDA_R_16BF && b.type == CUDA_R_16BF)
                return multiply_few_columns<WidenedPairs>(a, b, rows, columns, k, alpha, beta, d, ld, space);
        return multiply_few_columns<Arithmetic>(a, b, rows, columns, k, alpha, beta, d, ld, space);
    }
    float *const packed_a = space, *const packed_b = space + panel_rows * std::min(k, panel_k);
    const bool b_in_place = rows <= 2 * panel_rows && Arithmetic::in_place(b);
    // With more columns A is not waited for, and a small model's comes from a cache: fetched so it takes longer.
    const Order order = columns <= 64 ? best_order(false) : Order::memory;
    int64_t first_k = 0;
    do {
        const int64_t length = std::min(panel_k, k - first_k), words = divide_up(length, Arithmetic::terms);
        const float panel_beta = first_k == 0 ? beta : 1.0f;
        for (int64_t row = 0; row < rows; row += panel_rows) {
            const int64_t count = std::min(panel_rows, rows - row);
            pack<Arithmetic, block_rows>(a.from(0, row, first_k), a.row_stride, a.column_stride, count, length,
                                         packed_a, words);
            // With the first rows B is packed, each group right before the product that reads it. It is kept for
            // further rows; without any, the next group takes its place, which is in the cache.
            const int64_t group = row == 0 ? group_columns : columns;
            for (int64_t column = 0; column < columns; column += group) {
                const int64_t next = column + group, count_b = std::min(group, columns - column);
                const Matrix part = b.from(0, first_k, column);
                Ahead ahead = next_part(a, rows, k, row, first_k, panel_rows, order);
                if (next < columns)
                    ahead = {b.from(0, first_k, next).transposed(), std::min(group, columns - next), length};
                float* const d_part = d + row + column * ld;
                if (b_in_place) {
                    multiply_lines<Arithmetic, true>(packed_a, part.float_at(0, 0, 0), b.column_stride, words, alpha,
                                                     panel_beta, d_part, ld, count, count_b, ahead);
                    continue;
                }
                float* const to = rows <= panel_rows ? packed_b : packed_b + column * words;
                if (row == 0)
                    pack<Arithmetic, block_columns>(part, b.column_stride, b.row_stride, count_b, length, to, words);
                multiply_lines<Arithmetic, false>(packed_a, to, words, words, alpha, panel_beta, d_part, ld, count,
                                                  count_b, ahead);
            }
        }
        first_k += panel_k;
    } while (first_k < k);
}

}  // namespace
}  // namespace cuda_cpu
