// cpu/few_columns.h: D = alpha A B + beta D for up to 16 columns of B, where A's rows are contiguous: sgemm for
// products that use each element of A a few times only. In a language model: a linear layer for a few tokens, A its
// weight.
//
// Such a product takes as long as A's bytes take to come from memory, and a packed copy of A would be written and read
// once more. So A is read once, and is never written. Up to 8 columns, with AVX-512 up to 12 (16 bits: 16):
//
//   for each group of rows:  for each 384 k's:  sums = 0
//       for each `width` k's:  load a square of A, width rows x width k's;  transpose it in registers
//           for each k of the square, column j:  sums[j] = fused multiply-add(A[rows, k], B[k, j], sums[j])
//       D[rows, j] = alpha sums[j] + beta D[rows, j]
//
// A vector's elements are different rows of D, and each sum still runs in ascending k: the bits are sgemm.h's. (The
// usual kernel, whose vectors run along k and are added up at the end, needs no transpose, but has another order of
// summation for each width of vectors.) A sum's additions wait for each other, and yet are fast enough for what comes
// from memory. (Two squares below each other, for one or two columns, read twice as many rows at the same time: on a
// Zen 3 they take a sixth longer.)
//
// For more columns, up to 16, AVX2 has too few registers for that. There, and for a float32 A with AVX-512, a vector's
// elements are different columns of D, and no element of A is moved within a register:
//
//   for each 6 rows (AVX-512: 8):  for each 384 k's:  sums = 0
//       for each k, row i:  sums[i] = fused multiply-add(A[i, k], B[k, all columns], sums[i])
//
// Up to 8 columns would fill half of these sums of AVX2, which takes a tenth longer than the squares.
//
// While a group of rows is multiplied, the next one is fetched (packing.h says in what order), a line with each word.
// One core of an AMD EPYC (Zen 4) reads a float32 A for up to four columns as fast as it adds up an array; from 5
// columns on (16 bits: from 2) the arithmetic takes longer, with AVX-512 at 16 columns 95 % of its peak. One core of a
// Xeon with AMX reads A at 85 % of that rate for one column, and at 75 % for eight.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "arithmetic.h"
#include "cublas_lt.h"
#include "packing.h"

namespace cuda_cpu {
namespace {

// Columns for which squares are the faster way; their sums must fit in the registers, beside a square.
template <class T>
constexpr int most_transposed = width < 16                   ? 8
                                : sizeof(T) == sizeof(float) ? 12
                                                             : 16;

// A group of A's rows, from some k on.
template <class T, Order order>
struct Rows {
    const T* first;
    int64_t stride, count;  // rows
    int64_t k_left;         // elements of a row from here to its end
    const T* next;          // what is fetched in place of `first`; the last group: itself, which the cache has

    const T* row(int64_t i) const { return first + std::min(i, count - 1) * stride; }  // the last one stands for more

    // Fetches a line while the numbers at `from` are multiplied, and n_before numbers of this part before them.
    // (Always inline: g++ 12 leaves out a call of a function that only fetches.)
    [[gnu::always_inline]] void fetch(const T* from, int64_t n_before) const {
        __builtin_prefetch(order == Order::memory ? next + n_before : from + (next - first), 0, 2);
    }
};

// Calls f(part, its first row, its first k) for the parts of A in the order in which they are read: of each `group`
// rows panel_k k's after panel_k k's. Where k is 0 a group is one part.
template <Order order, class T, class F>
void for_parts(const T* a, int64_t row_stride, int64_t rows, int64_t k, int64_t group, F&& f) {
    for (int64_t row = 0; row < rows; row += group) {
        const T* const first = a + row * row_stride;
        const T* const next = row + group < rows ? first + group * row_stride : first;
        int64_t first_k = 0;
        do {
            f(Rows<T, order>{first + first_k, row_stride, std::min(group, rows - row), k - first_k,
                             next + first_k * (order == Order::memory ? group : 1)},
              row, first_k);
            first_k += panel_k;
        } while (first_k < k);
    }
}

// k numbers of row i, from element l on, as floats.
template <class T, Order order>
void widen_row(const Rows<T, order>& a, int64_t i, int64_t l, int64_t k, float* to) {
    const T* const row = a.row(i);
    int64_t done = 0;
    if constexpr (requires { load(row); })
        for (; done + width <= k; done += width) store(to + done, load(row + l + done));
    for (; done < k; ++done) to[done] = float(row[l + done]);
}

// Adds the products of a word of `width` rows of A with all columns of B, whose words are b[0], ..., b[columns - 1].
// With pairs of A, and floats of B, those of the second number come next.
template <class Arithmetic, int columns>
void add_word(Vector x, const float* b, Vector (&sums)[columns]) {
    if constexpr (Arithmetic::terms == Arithmetic::WordsOfB::terms) {
#pragma GCC unroll 16
        for (int j = 0; j < columns; ++j) sums[j] = Arithmetic::multiply_add(x, broadcast(b[j]), sums[j]);
    } else {
        add_word<Floats>(Arithmetic::first(x), b, sums);
        add_word<Floats>(Arithmetic::second(x), b + columns, sums);
    }
}

// Adds k products to the sums of `width` rows of A and all columns of B: b[l * columns + j] is word l of column j.
template <class Arithmetic, int columns, class T, Order order>
void add_products(const Rows<T, order>& a, const float* b, int64_t k, Vector (&total)[columns]) {
    const T* rows[width];
    for (int i = 0; i < width; ++i) rows[i] = a.row(i);
    Vector sums[columns];
    std::memcpy(sums, total, sizeof sums);
    using WordsOfB = typename Arithmetic::WordsOfB;
    constexpr int terms = Arithmetic::terms, b_words = columns * terms / WordsOfB::terms;
    int64_t l = 0;
    for (; l + width * terms <= k; l += width * terms, b += width * b_words) {
        Vector x[width];
        load_transposed<Arithmetic>(x, [&](int i) { return rows[i] + l; });
#pragma GCC unroll 16
        for (int i = 0; i < width; ++i) {
            a.fetch(rows[i] + l, (l + i * terms) * width);
            add_word<Arithmetic>(x[i], b + i * b_words, sums);
        }
    }
    for (; l < k; l += WordsOfB::terms, b += columns) {
        Vector x;
        for (int i = 0; i < width; ++i) x[i] = WordsOfB::word(rows[i] + l, k - l);
        add_word<WordsOfB>(x, b, sums);
    }
    std::memcpy(total, sums, sizeof sums);
}

// The same for types that no vector is loaded from: some k's at a time are widened to a copy that stays in the cache.
template <class Arithmetic, int columns, class T, Order order>
requires(!requires(const T* from) {
    Arithmetic::words(from);
}) void add_products(const Rows<T, order>& a, const float* b, int64_t k, Vector (&sums)[columns]) {
    constexpr int64_t part = 128;
    alignas(64) float wide[width][part];
    for (int64_t l = 0; l < k; l += part) {
        const int64_t length = std::min(part, k - l);
        for (int i = 0; i < width; ++i) {
            widen_row(a, i, l, length, wide[i]);
            for (int64_t j = 0; j < length; j += 64 / sizeof(T)) a.fetch(a.row(i) + l + j, l * width + i * length + j);
        }
        add_products<Arithmetic, columns>(Rows<float, order>{wide[0], part, width, part, wide[0]}, b + l * columns,
                                          length, sums);
    }
}

// The way with squares. B has `padded` columns, of which `columns` exist.
template <class Arithmetic, int padded, Order order, class T>
void multiply_transposed(const T* a, int64_t row_stride, int64_t rows, const float* b, int64_t columns, int64_t k,
                         float alpha, float beta, float* d, int64_t ld) {
    for_parts<order>(a, row_stride, rows, k, width, [&](const Rows<T, order>& part, int64_t row, int64_t first_k) {
        Vector sums[padded] = {};
        add_products<Arithmetic, padded>(part, b + first_k / Arithmetic::WordsOfB::terms * padded,
                                         std::min(panel_k, part.k_left), sums);
        for (int64_t j = 0; j < columns; ++j) {
            const Vector column[] = {sums[j]};
            finish_column(column, alpha, first_k == 0 ? beta : 1.0f, d + row + j * ld, part.count);
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Vectors along the columns of D

constexpr int rows_together = width < 16 ? 6 : 8, group_vectors = 3, group_rows = group_vectors * width;
constexpr int wide_columns = most_few_columns, wide_vectors = wide_columns / width;

// The products of rows i, i + 1, ... of A and 16 columns, B[l, j] = b[l * 16 + j], for k numbers: the sum of row
// i + r and column j goes to `to`[j * group_rows + r].
template <class T, Order order>
void multiply_rows(const Rows<T, order>& a, int64_t i, const float* b, int64_t k, float* to) {
    constexpr bool widened = !std::is_same_v<T, float>;
    [[maybe_unused]] float wide[widened ? rows_together : 1][panel_k];
    const float* rows[rows_together];
    for (int r = 0; r < rows_together; ++r)
        if constexpr (widened) widen_row(a, i + r, 0, k, wide[r]), rows[r] = wide[r];
        else rows[r] = a.row(i + r);

    Vector sums[rows_together][wide_vectors] = {};
    const auto multiply = [&](int64_t l) {
        Vector y[wide_vectors];
#pragma GCC unroll 4
        for (int v = 0; v < wide_vectors; ++v) y[v] = in_register(load(b + l * wide_columns + v * width));
#pragma GCC unroll 8
        for (int r = 0; r < rows_together; ++r) {
            const Vector x = broadcast(rows[r][l]);
#pragma GCC unroll 4
            for (int v = 0; v < wide_vectors; ++v) sums[r][v] = multiply_add(x, y[v], sums[r][v]);
        }
    };
    constexpr int line = 64 / sizeof(float);
    int64_t l = 0;
    for (; l + line <= k; l += line) {
#pragma GCC unroll 16
        for (int at = 0; at < line; ++at) {
            const int r = at / 2;  // fetches of several lines behind each other would keep the multiplications waiting
            if (at % 2 == 0 && r < rows_together) a.fetch(a.row(i + r) + l, i * k + l * rows_together + r * line);
            multiply(l + at);
        }
    }
    for (; l < k; ++l) multiply(l);

    for (int r = 0; r < rows_together; ++r) {
        float row[wide_columns];
        std::memcpy(row, sums[r], sizeof row);
        for (int j = 0; j < wide_columns; ++j) to[j * group_rows + r] = row[j];
    }
}

// The way without squares. B has 16 columns, of which `columns` exist.
template <Order order, class T>
void multiply_broadcast(const T* a, int64_t row_stride, int64_t rows, const float* b, int64_t columns, int64_t k,
                        float alpha, float beta, float* d, int64_t ld) {
    static_assert(group_rows % rows_together == 0);
    for_parts<order>(a, row_stride, rows, k, group_rows, [&](const Rows<T, order>& part, int64_t row, int64_t first_k) {
        float sums[wide_columns * group_rows];
        for (int64_t i = 0; i < part.count; i += rows_together)
            multiply_rows(part, i, b + first_k * wide_columns, std::min(panel_k, part.k_left), sums + i);
        for (int64_t j = 0; j < columns; ++j) {
            Vector column[group_vectors];
            std::memcpy(column, sums + j * group_rows, sizeof column);
            finish_column(column, alpha, first_k == 0 ? beta : 1.0f, d + row + j * ld, part.count);
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------------

// B as words, the columns of a word side by side, `padded` of them.
template <class Arithmetic, int padded>
void gather_columns(const Matrix& b, int64_t columns, int64_t k, float* words) {
    if constexpr (padded % width == 0 || 2 * padded == width) {
        for (int64_t l = 0; l < k; l += panel_k)
            pack<Arithmetic, padded>(b.from(0, l, 0), b.column_stride, b.row_stride, columns, std::min(panel_k, k - l),
                                     words + l / Arithmetic::terms * padded, panel_k);
        return;
    }
    Arithmetic::with_elements(b, [&](const auto* from) {
        for (int64_t l = 0; l < k; l += Arithmetic::terms)
            for (int64_t j = 0; j < padded; ++j)
                *words++ = j < columns
                               ? Arithmetic::word(from + j * b.column_stride + l * b.row_stride, k - l, b.row_stride)
                               : 0.0f;
    });
}

// multiply_few_columns, where A is fetched in this order.
template <class Arithmetic, Order order>
void multiply_fetching(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha,
                       float beta, float* d, int64_t ld, float* space) {
    const auto multiply = [&]<int padded>(std::integral_constant<int, padded>) {
        gather_columns<typename Arithmetic::WordsOfB, padded>(b, columns, k, space);
        Arithmetic::with_elements(a, [&](const auto* from) {
            if constexpr (padded <= most_transposed<std::remove_cvref_t<decltype(*from)>>)
                multiply_transposed<Arithmetic, padded, order>(from, a.row_stride, rows, space, columns, k, alpha, beta,
                                                               d, ld);
            else multiply_broadcast<order>(from, a.row_stride, rows, space, columns, k, alpha, beta, d, ld);
        });
    };
    constexpr int columns_of_12 = width < 16 ? wide_columns : 12;
    if (columns == 1) multiply(std::integral_constant<int, 1>());
    else if (columns == 2) multiply(std::integral_constant<int, 2>());
    else if (columns <= 4) multiply(std::integral_constant<int, 4>());
    else if (columns <= 8) multiply(std::integral_constant<int, 8>());
    else if (columns <= 12) multiply(std::integral_constant<int, columns_of_12>());
    else multiply(std::integral_constant<int, wide_columns>());
}

// sgemm's way for up to most_few_columns columns, 1 at least, where A's rows are contiguous (column_stride 1): the same
// bits, without packing A. `space`: most_few_columns * k floats.
template <class Arithmetic>
void multiply_few_columns(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha,
                          float beta, float* d, int64_t ld, float* space) {
    const bool little_arithmetic = a.type == CUDA_R_32F && columns <= 4;
    const auto multiply = best_order(a.row_stride != k, little_arithmetic) == Order::memory
                              ? multiply_fetching<Arithmetic, Order::memory>
                              : multiply_fetching<Arithmetic, Order::multiplication>;
    multiply(a, b, rows, columns, k, alpha, beta, d, ld, space);
}

}  // namespace
}  // namespace cuda_cpu
