// cpu/few_columns.h: D = alpha A B + beta D for up to 16 columns of B, where A's rows are contiguous: sgemm for
// products that use each element of A a few times only. In a language model: a linear layer for a few tokens, A its
// weight.
//
// Such a product takes as long as A's bytes take to come from memory, and a packed copy of A would be written and read
// once more. So A is read once, and is never written:
//
//   for each group of rows:  for each 384 k's:  sums = 0
//       for each `width` k's:  load a square of A, width rows x width k's;  transpose it in registers
//           for each k of the square, column j:  sums[j] = fused multiply-add(A[rows, k], B[k, j], sums[j])
//       D[rows, j] = alpha sums[j] + beta D[rows, j]
//
// A vector's elements are different rows of D, and each sum still runs in ascending k: the bits are sgemm.h's. (The
// usual kernel, whose vectors run along k and are added up at the end, needs no transpose, but has another order of
// summation for each width of vectors.)
//
// A sum's additions wait for each other. The columns of B, and two squares below each other, have independent sums. The
// hardware's prefetchers lose so many rows at the same time, so that A is prefetched here, `lead` elements ahead: along
// the row, and behind its end in the next group of rows. One core of an AMD EPYC (Zen 5) reads a float32 or 16-bit A
// for one column at 80 to 95 % of the speed at which it adds up an array; from 8 columns on (16 bits: from 4) the
// arithmetic takes longer.
#pragma once

#include <algorithm>

#include "arithmetic.h"
#include "cublas_lt.h"

namespace cuda_cpu {
namespace {

constexpr int64_t lead = 128;
constexpr int most_padded = width < 16 ? 8 : 16;  // columns whose sums fit in the registers, beside a square

// A group of A's rows, from some k on.
template <class T>
struct Rows {
    const T* first;
    int64_t stride, count;  // rows
    int64_t k_left;         // elements of a row from here to its end
    int64_t next;           // distance from here to the beginning of the next group

    const T* row(int64_t i) const { return first + std::min(i, count - 1) * stride; }  // the last one stands for more
    // What is read `lead` elements after element l of a row: its distance from the row's element 0.
    int64_t ahead(int64_t l) const { return l + lead < k_left ? l + lead : l + lead - k_left + next; }
};

// Adds k products to the sums of vectors * width rows of A and all columns of B: b[l * columns + j] is word l of
// column j.
template <class Arithmetic, int vectors, int columns, class T>
void add_products(const Rows<T>& a, const float* b, int64_t k, Vector (&total)[columns][vectors]) {
    const T* rows[vectors * width];
    for (int i = 0; i < vectors * width; ++i) rows[i] = a.row(i);
    Vector sums[columns][vectors];
    std::memcpy(sums, total, sizeof sums);
    constexpr int terms = Arithmetic::terms;
    int64_t l = 0;
    for (; l + width * terms <= k; l += width * terms, b += width * columns) {
        const int64_t ahead = a.ahead(l);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            Vector x[width];
#pragma GCC unroll 16
            for (int i = 0; i < width; ++i) {
                x[i] = Arithmetic::words(rows[v * width + i] + l);
                __builtin_prefetch(rows[v * width + i] + ahead);
            }
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < width; ++i)
#pragma GCC unroll 16
                for (int j = 0; j < columns; ++j)
                    sums[j][v] = Arithmetic::multiply_add(x[i], broadcast(b[i * columns + j]), sums[j][v]);
        }
    }
    for (; l < k; l += terms, b += columns)
        for (int v = 0; v < vectors; ++v) {
            Vector x;
            for (int i = 0; i < width; ++i) x[i] = Arithmetic::word(rows[v * width + i] + l, k - l);
            for (int j = 0; j < columns; ++j) sums[j][v] = Arithmetic::multiply_add(x, broadcast(b[j]), sums[j][v]);
        }
    std::memcpy(total, sums, sizeof sums);
}

// The same for types that no vector is loaded from: `lead` k's at a time are widened to a copy that stays in the cache.
template <class Arithmetic, int vectors, int columns, class T>
requires(!requires(const T* from) {
    Arithmetic::words(from);
}) void add_products(const Rows<T>& a, const float* b, int64_t k, Vector (&sums)[columns][vectors]) {
    alignas(64) float wide[vectors * width][lead];
    for (int64_t l = 0; l < k; l += lead) {
        const int64_t length = std::min(lead, k - l), ahead = a.ahead(l);
        for (int i = 0; i < vectors * width; ++i) {
            const T* const row = a.row(i);
            for (int64_t line = 0; line < lead; line += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + ahead + line);
            for (int64_t p = 0; p < length; ++p) wide[i][p] = float(row[l + p]);
        }
        add_products<Arithmetic, vectors, columns>(Rows<float>{wide[0], lead, vectors * width, lead, 0},
                                                   b + l * columns, length, sums);
    }
}

// B has `padded` columns, of which `columns` exist.
template <class Arithmetic, int padded, class T>
void multiply_rows(const T* a, int64_t row_stride, int64_t rows, const float* b, int64_t columns, int64_t k,
                   float alpha, float beta, float* d, int64_t ld) {
    constexpr int vectors = padded <= 2 && width < 16 ? 2 : 1;  // one square of AVX-512 is enough to do at a time
    constexpr int64_t group = vectors * width;
    for (int64_t first = 0; first < rows; first += group) {
        const int64_t count = std::min(group, rows - first);
        int64_t first_k = 0;
        do {
            const Rows<T> here{a + first * row_stride + first_k, row_stride, count, k - first_k,
                               group * row_stride - first_k};
            Vector sums[padded][vectors] = {};
            add_products<Arithmetic, vectors, padded>(here, b + first_k / Arithmetic::terms * padded,
                                                      std::min(panel_k, k - first_k), sums);
            for (int64_t j = 0; j < columns; ++j)
                finish_column(sums[j], alpha, first_k == 0 ? beta : 1.0f, d + first + j * ld, count);
            first_k += panel_k;
        } while (first_k < k);
    }
}

// B as words, the columns of a word side by side, `padded` of them.
template <class Arithmetic>
void gather_columns(const Matrix& b, int64_t columns, int64_t padded, int64_t k, float* words) {
    Arithmetic::with_elements(b, [&](const auto* from) {
        for (int64_t l = 0; l < k; l += Arithmetic::terms)
            for (int64_t j = 0; j < padded; ++j)
                *words++ = j < columns
                               ? Arithmetic::word(from + j * b.column_stride + l * b.row_stride, k - l, b.row_stride)
                               : 0.0f;
    });
}

// sgemm's way for up to most_few_columns columns, 1 at least, where A's rows are contiguous (column_stride 1): the same
// bits, without packing A. `space`: most_few_columns * k floats.
template <class Arithmetic>
void multiply_few_columns(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha,
                          float beta, float* d, int64_t ld, float* space) {
    const auto multiply = [&]<int padded>(std::integral_constant<int, padded>) {
        const int64_t words = divide_up(k, Arithmetic::terms), step = columns <= padded ? rows : 16;
        const auto in_sliver = [&](int64_t j) { return std::min<int64_t>(padded, columns - j); };
        for (int64_t j = 0; j < columns; j += padded)
            gather_columns<Arithmetic>(b.from(0, 0, j), in_sliver(j), padded, k, space + j * words);
        Arithmetic::with_elements(a, [&](const auto* from) {
            for (int64_t i = 0; i < rows; i += step)  // rows that stay in a cache for the other columns
                for (int64_t j = 0; j < columns; j += padded)
                    multiply_rows<Arithmetic, padded>(from + i * a.row_stride, a.row_stride, std::min(step, rows - i),
                                                      space + j * words, in_sliver(j), k, alpha, beta, d + i + j * ld,
                                                      ld);
        });
    };
    if (columns == 1) multiply(std::integral_constant<int, 1>());
    else if (columns == 2) multiply(std::integral_constant<int, 2>());
    else if (columns <= 4) multiply(std::integral_constant<int, 4>());
    else if (columns <= 8 || most_padded == 8) multiply(std::integral_constant<int, 8>());
    else if (columns <= 12) multiply(std::integral_constant<int, 12>());
    else multiply(std::integral_constant<int, 16>());
}

}  // namespace
}  // namespace cuda_cpu
