// cpu/packing.h: copies of matrices in the order in which a multiplication reads them ("packed"): a few lines side by
// side, word after word. sgemm.h packs both of its matrices, few_columns.h the smaller one. (`width`: cpu_vector.h;
// words and `Arithmetic`: arithmetic.h.)
#pragma once

#include <algorithm>
#include <cstdint>

#include "arithmetic.h"
#include "cublas_lt.h"

namespace cuda_cpu {
namespace {

// The order in which what is multiplied next is fetched to the second-level cache: a multiplication reads so many rows
// at the same time that the hardware's prefetchers lose them. On AMD's processors the order in which it lies in memory
// is the fastest, on Intel's the one in which it is read: a line of each of some rows, and then the next line of each.
// (Up to 16 columns are multiplied 1.1 to 1.3 times as fast as in the order of memory, 17 to 64 columns 1.02 to 1.2
// times: one core of a Xeon with AMX, and weights that come from memory.) AMD's processors before Zen 4, which have no
// AVX-512, are between the two: where the arithmetic takes no time beside the bytes, up to four columns of floats, they
// read as fast as they can in the order of the multiplication, and at 88 % of that in the other.
enum class Order { memory, multiplication };

// The order for rows that follow each other in memory, with or without gaps.
inline Order best_order(bool with_gaps, [[maybe_unused]] bool little_arithmetic = false) {
#if defined(__x86_64__)
    if (__builtin_cpu_is("intel")) return Order::multiplication;
    if (little_arithmetic && !__builtin_cpu_supports("avx512f")) return Order::multiplication;
#endif
    return with_gaps ? Order::multiplication : Order::memory;
}

// In the order of the multiplication, what to fetch with *from, number l of a row of k numbers: the number that is
// `ahead` numbers further on in its row or, near its end, in the row read next, which is to_next numbers further on.
template <class T>
[[gnu::always_inline]] inline const T* place_ahead(const T* from, int64_t ahead, int64_t l, int64_t k,
                                                   int64_t to_next) {
    return from + ahead + (l + ahead < k ? 0 : to_next - k);
}

// Up to `width` lines of k numbers each, transposed, where `out` is the place of the first word of the first line. A
// vector of one word of every line is a part of one sliver (A), or the whole of several (B), each of `length` words a
// line.
template <class Arithmetic, int sliver, class T>
void pack_lines(const T* from, int64_t line_stride, int64_t lines, int64_t k, float* out, int64_t length) {
    constexpr int terms = Arithmetic::terms;
    static_assert(sliver >= width || 2 * sliver == width);
    static const T zeros[width * terms] = {};
    // Stores words l and l + 1 of all lines: as a part of one sliver, or half of the lines in one and half in the next.
    const auto put = [&](Vector x, Vector y, int64_t l) {
        if constexpr (sliver >= width) {
            store(out + l * sliver, x), store(out + (l + 1) * sliver, y);
        } else {
            static constexpr auto first = [](int lane) { return lane % sliver + lane / sliver * width; };
            static constexpr auto second = [](int lane) { return first(lane) + sliver; };
            store(out + l * sliver, choose(x, y, first));
            if (lines > sliver) store(out + l * sliver + sliver * length, choose(x, y, second));
        }
    };
    int64_t l = 0;
    for (; l + width <= k / terms; l += width) {
        const T* const first = from + l * terms;
        Vector x[width];
        if (lines == width) load_transposed<Arithmetic>(x, [&](int i) { return first + i * line_stride; });
        else load_transposed<Arithmetic>(x, [&](int i) { return i < lines ? first + i * line_stride : zeros; });
#pragma GCC unroll 16
        for (int i = 0; i < width; i += 2) put(x[i], x[i + 1], l + i);
    }
    for (; l * terms < k; ++l)
        for (int i = 0; i < (sliver >= width ? width : lines > sliver ? width : sliver); ++i)
            out[i / sliver * sliver * length + l * sliver + i % sliver] =
                i < lines ? Arithmetic::word(from + i * line_stride + l * terms, k - l * terms) : 0.0f;
}

// Word l of `sliver` lines that are neighbours in memory, of which `lines` exist: numbers are copied in rows. (Without
// __restrict g++ copies a sliver of 8 one by one; and a loop over a sliver of 48 it takes for a call of memmove.)
template <class Arithmetic, int sliver, class T>
void pack_row(const T* __restrict from, int64_t k_stride, int64_t lines, int64_t k, int64_t l, float* __restrict out) {
    const T* const row = from + l * Arithmetic::terms * k_stride;
    if constexpr (Arithmetic::terms == 1) {
        if constexpr (sliver % width == 0 && requires { load(row); }) {
            if (lines == sliver) {
                for (int i = 0; i < sliver; i += width) store(out + i, load(row + i));
                return;
            }
        }
        if (lines == sliver)
            for (int i = 0; i < sliver; ++i) out[i] = float(row[i]);
        else
            for (int i = 0; i < sliver; ++i) out[i] = i < lines ? float(row[i]) : 0.0f;
    } else {
        static constexpr T zeros[sliver] = {};
        const T* const next = l * 2 + 1 < k ? row + k_stride : zeros;
        if (lines == sliver)
            for (int i = 0; i < sliver; ++i) out[i] = Arithmetic::pair(row[i], next[i]);
        else
            for (int i = 0; i < sliver; ++i) out[i] = i < lines ? Arithmetic::pair(row[i], next[i]) : 0.0f;
    }
}

// `count` lines (A's rows or B's columns) of k numbers, as slivers of `sliver` lines and `length` words: out[l * sliver
// + i] for word l of line i, sliver after sliver. The last one is padded with zeros to a whole number of vectors, or
// to a sliver. What lies after a sliver's last word of k is not written.
template <class Arithmetic, int sliver, class T>
void pack(const T* from, int64_t line_stride, int64_t k_stride, int64_t count, int64_t k, float* to, int64_t length) {
    if (line_stride == 1) {
        // All slivers of a row at once: as it lies in memory.
        const int64_t whole = count / sliver * sliver;
        int64_t l = 0;
        // Where a sliver is half a vector, two of its words: whole cache lines are written.
        if constexpr (2 * sliver == width && Arithmetic::terms == 1 && requires { load(from, from); })
            for (; l + 2 <= k; l += 2)
                for (int64_t first = 0; first < whole; first += sliver) {
                    const T* const at = from + l * k_stride + first;
                    store(to + first * length + l * sliver, load(at, at + k_stride));
                }
        for (; l * Arithmetic::terms < k; ++l)
            for (int64_t first = 0; first < whole; first += sliver)
                pack_row<Arithmetic, sliver>(from + first, k_stride, sliver, k, l, to + first * length + l * sliver);
        for (l = 0; whole < count && l * Arithmetic::terms < k; ++l)
            pack_row<Arithmetic, sliver>(from + whole, k_stride, count - whole, k, l, to + whole * length + l * sliver);
        return;
    }
    // Otherwise each line is contiguous, and `width` lines at a time are transposed in registers.
    for (int64_t first = 0; first < count; first += width, from += width * line_stride) {
        const int64_t lines = std::min<int64_t>(width, count - first);
        float* const out = to + first / sliver * sliver * length + first % sliver;
        if constexpr (requires { Arithmetic::words(from); }) {
            pack_lines<Arithmetic, sliver>(from, line_stride, lines, k, out, length);
        } else {
            float wide[width * panel_k];
            for (int64_t i = 0; i < lines; ++i)
                for (int64_t l = 0; l < k; ++l) wide[i * panel_k + l] = float(from[i * line_stride + l]);
            pack_lines<Arithmetic, sliver>(wide, panel_k, lines, k, out, length);
        }
    }
}

template <class Arithmetic, int sliver>
void pack(const Matrix& matrix, int64_t line_stride, int64_t k_stride, int64_t count, int64_t k, float* to,
          int64_t length) {
    Arithmetic::with_elements(
        matrix, [&](const auto* from) { pack<Arithmetic, sliver>(from, line_stride, k_stride, count, k, to, length); });
}

}  // namespace
}  // namespace cuda_cpu
