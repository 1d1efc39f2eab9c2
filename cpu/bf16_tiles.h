// cpu/bf16_tiles.h: products of bf16 matrices by AMX, an instruction that multiplies tiles. (bf16_tiles.cpp gives it
// the processor's instructions, and test/test_cpu_bf16.cu the same in C++, for processors that have none.)
//
// A tile register holds 16 rows of 16 words; a word is a float, or a pair of bf16 numbers. TDPBF16PS takes a tile x of
// 16 rows of 32 k's, and a tile y of 16 pairs of k's for 16 columns (row l holds k's 2 l and 2 l + 1, a pair for each
// column), and adds the 16 x 16 sums of 32 products each to a tile of floats:
//
//   even[i][j] = sum over l = 0 ... 15, in this order, from zero, of x[i][2 l] y[2 l][j]          (fused multiply-adds)
//   odd [i][j] = the same of x[i][2 l + 1] y[2 l + 1][j]
//   sums[i][j] = sums[i][j] + (even[i][j] + odd[i][j])
//
// Every operation rounds to the nearest, and takes numbers below 1.2e-38 as zero.
//
// One order of summation: 32 k's after 32 k's as above, whatever the shape, from beta D on. (With another alpha than 1
// from zero on, and D = alpha sum + beta D at the end.) The last 32 are padded with zeros. So an element's bits depend
// on its row of A and its column of B alone; they are not those of float32's products, since even and odd k's have sums
// of their own.
//
// D is column-major, and a tile's rows are contiguous: so x is a tile of B (its columns are x's rows), y one of A, and
// a tile of sums has 16 columns of D. It is loaded from D and stored there for each panel of 384 k's. The innermost
// loop keeps 2 x 2 tiles of sums, and loads two tiles of A and two of B for four products, which take 64 cycles, the
// loads 32. The panels are sgemm.h's.
#pragma once

#include <vector>

#include "sgemm.h"

namespace cuda_cpu {
namespace {

using TileWords = Pairs<false>;

constexpr int side = 16;                     // rows of a tile, and words of a row
constexpr int64_t tile_words = side * side;  // 1 KiB
constexpr int64_t row_bytes = side * sizeof(float);
constexpr int64_t tile_panel_rows = 12 * side;

inline int64_t tiles_along(int64_t k) { return divide_up(k, 2 * side); }

inline void transpose_tile(float* tile) {
    if constexpr (width == side) {
        Vector x[width];
        load_transposed(x, [&](int i) { return tile + i * side; });
        for (int i = 0; i < width; ++i) store(tile + i * side, x[i]);
    } else {
        for (int i = 0; i < side; ++i)
            for (int j = 0; j < i; ++j) std::swap(tile[i * side + j], tile[j * side + i]);
    }
}

// `count` lines of k numbers as tiles y: for each 16 lines, for each 32 k's, 16 rows of 16 pairs, one of each line. The
// next 16 lines begin `length` rows further on.
inline void pack_pairs(const Matrix& matrix, int64_t line_stride, int64_t k_stride, int64_t count, int64_t k, float* to,
                       int64_t length) {
    pack<TileWords, side>(matrix, line_stride, k_stride, count, k, to, length);
    const int64_t words = divide_up(k, 2), padding = tiles_along(k) * side - words;
    for (int64_t first = 0; first < count; first += side)
        std::memset(to + first * length + words * side, 0, size_t(padding * side) * sizeof(float));
}

// The same as tiles x: 16 rows of 32 k's, one row of each line.
inline void pack_rows(const Matrix& matrix, int64_t line_stride, int64_t k_stride, int64_t count, int64_t k,
                      float* to) {
    if (k_stride != 1) {  // pairs of as many lines as the first-level cache holds 32 k's of, which are then transposed
        constexpr int64_t group = 8 * side, part_k = 2 * side;
        const int64_t length = tiles_along(k) * side;
        for (int64_t first = 0; first < count; first += group)
            for (int64_t l = 0; l < k; l += part_k) {
                Matrix part = matrix;
                part.data += (first * line_stride + l * k_stride) * 2;
                const int64_t lines = std::min(group, count - first);
                float* const tiles = to + first * length + l / part_k * tile_words;
                pack_pairs(part, line_stride, k_stride, lines, std::min(part_k, k - l), tiles, length);
                for (int64_t line = 0; line < lines; line += side) transpose_tile(tiles + line * length);
            }
        return;
    }
    const auto* const from = reinterpret_cast<const __nv_bfloat16*>(matrix.data);
    for (int64_t first = 0; first < count; first += side)
        for (int64_t first_k = 0; first_k < k; first_k += 2 * side, to += tile_words)
            for (int64_t i = 0; i < std::min<int64_t>(side, count - first); ++i) {
                const __nv_bfloat16* const line = from + (first + i) * line_stride + first_k;
                float* const row = to + i * side;
                if (first_k + 2 * side <= k) {
                    std::memcpy(row, line, row_bytes);  // of a length that the compiler knows: one move
                } else {
                    std::memset(row, 0, row_bytes);
                    std::memcpy(row, line, size_t(k - first_k) * 2);
                }
            }
}

// Adds to D, or with `from_zero` stores there, b_tiles * 16 columns and a_tiles * 16 rows of A B for the k's of `tiles`
// tiles. A sliver of 16 lines is `tiles` tiles. Tile registers 0 to 3 hold sums, 4 and 5 tiles of B, 6 and 7 tiles of
// A. Of what is packed next n_ahead lines are fetched with each tile, as long as there are any. (A step of GPT-2 124M
// takes 5 % less time.)
template <class Tiles, int a_tiles, int b_tiles>
void multiply_tile_block(const float* a, const float* b, int64_t tiles, bool from_zero, float* d, int64_t ld,
                         Ahead& ahead, int64_t n_ahead) {
    const int64_t sliver = tiles * tile_words;
    const auto for_each_sum = [&](auto f) {
        f(std::integral_constant<int, 0>(), d);
        if constexpr (a_tiles > 1) f(std::integral_constant<int, 1>(), d + side);
        if constexpr (b_tiles > 1) f(std::integral_constant<int, 2>(), d + side * ld);
        if constexpr (a_tiles > 1 && b_tiles > 1) f(std::integral_constant<int, 3>(), d + side * ld + side);
    };
    const int64_t ld_bytes = ld * int64_t(sizeof(float));
    if (from_zero) for_each_sum([](auto sums, float*) { Tiles::template zero<decltype(sums)::value>(); });
    else for_each_sum([&](auto sums, float* at) { Tiles::template load<decltype(sums)::value>(at, ld_bytes); });
    Ahead lines = ahead;  // in registers
    for (int64_t t = 0; t < tiles; ++t, a += tile_words, b += tile_words) {
        for (int64_t l = std::min(n_ahead, lines.n_left()); l > 0; --l) lines.fetch();
        Tiles::template load<4>(b, row_bytes);
        Tiles::template load<6>(a, row_bytes);
        Tiles::template add_products<0, 4, 6>();
        if constexpr (a_tiles > 1) {
            Tiles::template load<7>(a + sliver, row_bytes);
            Tiles::template add_products<1, 4, 7>();
        }
        if constexpr (b_tiles > 1) {
            Tiles::template load<5>(b + sliver, row_bytes);
            Tiles::template add_products<2, 5, 6>();
        }
        if constexpr (a_tiles > 1 && b_tiles > 1) Tiles::template add_products<3, 5, 7>();
    }
    ahead = lines;
    for_each_sum([&](auto sums, float* at) { Tiles::template store<decltype(sums)::value>(at, ld_bytes); });
}

inline void copy_columns(const float* from, int64_t from_ld, float* to, int64_t to_ld, int64_t rows, int64_t columns) {
    for (int64_t j = 0; j < columns; ++j) std::memcpy(to + j * to_ld, from + j * from_ld, size_t(rows) * sizeof(float));
}

template <class Tiles>
void multiply_panel(const float* a, const float* b, int64_t rows, int64_t columns, int64_t tiles, bool from_zero,
                    float* d, int64_t ld, Ahead ahead) {
    constexpr int64_t block = 2 * side;
    const int64_t n_blocks = divide_up(columns, block) * divide_up(rows, block);
    const int64_t n_ahead = divide_up(ahead.n_left(), std::max(n_blocks * tiles, int64_t(1)));  // no k: no tiles
    alignas(64) float sums[block * block] = {};  // of a block that is not whole tiles
    for (int64_t j = 0; j < columns; j += block)
        for (int64_t i = 0; i < rows; i += block) {
            const int64_t block_i = std::min(block, rows - i), block_j = std::min(block, columns - j);
            auto* multiply = multiply_tile_block<Tiles, 2, 2>;
            if (block_i <= side && block_j <= side) multiply = multiply_tile_block<Tiles, 1, 1>;
            else if (block_i <= side) multiply = multiply_tile_block<Tiles, 1, 2>;
            else if (block_j <= side) multiply = multiply_tile_block<Tiles, 2, 1>;
            const float *const a_tile = a + i * tiles * side, *const b_tile = b + j * tiles * side;
            float* const at = d + i + j * ld;
            if (block_i % side == 0 && block_j % side == 0) {
                multiply(a_tile, b_tile, tiles, from_zero, at, ld, ahead, n_ahead);
                continue;
            }
            copy_columns(at, ld, sums, block, from_zero ? 0 : block_i, block_j);
            multiply(a_tile, b_tile, tiles, from_zero, sums, block, ahead, n_ahead);
            copy_columns(sums, block, at, ld, block_i, block_j);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Few columns

constexpr int64_t most_few_for_tiles = 3 * side;

// f(0), f(1), ..., f(n - 1), with numbers known to the compiler.
template <int n, class F>
void for_each_tile(F f) {
    [&]<int... t>(std::integer_sequence<int, t...>) { (f(std::integral_constant<int, t>()), ...); }
    (std::make_integer_sequence<int, n>());
}

// b_tiles * 16 columns where A's rows are contiguous: each 16 rows x 32 k's of A are a tile x where they are, and B is
// the y's. Tile registers 0 to 2 hold sums, 4 a tile of A, and 5 to 7 tiles of B. The hardware's prefetchers lose 16
// rows at a time, so A is fetched here, a few tiles ahead of the one that is loaded: further on in its rows or, near
// their ends, from the first k's of the next 16 rows. (Two cores of a Xeon with AMX read weights that come from memory
// at 92 % of the rate of adding up an array for up to 16 columns, and at 68 to 83 % of it for 32, where packing A takes
// 1.6 to 2 times as long. For 48 columns it takes 1.5 to 2 times as long, for 64 as long as this.)
template <class Tiles, int b_tiles>
void multiply_few_with_tiles(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, bool from_zero,
                             float* d, int64_t ld, float* space) {
    constexpr int64_t ahead = 192;  // numbers
    const auto* const from = reinterpret_cast<const __nv_bfloat16*>(a.data);
    const int64_t sliver = tiles_along(k) * tile_words;
    pack_pairs(b, b.column_stride, b.row_stride, columns, k, space, tiles_along(k) * side);
    alignas(64) float tiles[b_tiles * tile_words] = {};
    for (int64_t first = 0; first < rows; first += side) {
        const int64_t count = std::min<int64_t>(side, rows - first);
        copy_columns(d + first, ld, tiles, side, from_zero ? 0 : count, columns);
        for_each_tile<b_tiles>([&](auto t) {
            constexpr int sums = t;
            if (from_zero) return Tiles::template zero<sums>();
            transpose_tile(tiles + sums * tile_words);
            Tiles::template load<sums>(tiles + sums * tile_words, row_bytes);
        });
        for (int64_t l = 0; l < k; l += 2 * side) {
            const __nv_bfloat16* const place = from + first * a.row_stride + l;
            if (count == side && l + 2 * side <= k) {
                const auto* const next = place_ahead(place, ahead, l, k, side * a.row_stride);
                for (int i = 0; i < side; ++i) __builtin_prefetch(next + i * a.row_stride);
                Tiles::template load<4>(place, a.row_stride * 2);
            } else {
                std::fill_n(tiles, tile_words, 0.0f);
                for (int64_t i = 0; i < count; ++i)
                    std::memcpy(tiles + i * side, place + i * a.row_stride,
                                size_t(std::min<int64_t>(2 * side, k - l)) * 2);
                Tiles::template load<4>(tiles, row_bytes);
            }
            const float* const tile_of_b = space + l / (2 * side) * tile_words;
            for_each_tile<b_tiles>([&](auto t) {
                constexpr int y = 5 + t;
                Tiles::template load<y>(tile_of_b + t * sliver, row_bytes);
                Tiles::template add_products<decltype(t)::value, 4, y>();
            });
        }
        for_each_tile<b_tiles>([&](auto t) {
            Tiles::template store<decltype(t)::value>(tiles + t * tile_words, row_bytes);
            transpose_tile(tiles + t * tile_words);
        });
        copy_columns(tiles, side, d + first, ld, count, columns);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

inline int64_t space_of_tiles(int64_t columns, int64_t k) {
    const int64_t b_lines = divide_up(columns, side) * side;
    const int64_t panels = (tile_panel_rows + b_lines) * tiles_along(std::min(k, panel_k));
    return std::max(panels, columns <= most_few_for_tiles ? b_lines * tiles_along(k) : 0) * side;
}

// alpha product + beta D. Without beta, D may hold anything.
inline void add_scaled(const float* product, int64_t rows, int64_t columns, float alpha, float beta, float* d,
                       int64_t ld) {
    for (int64_t j = 0; j < columns; ++j, product += rows, d += ld)
        for (int64_t i = 0; i < rows; ++i) d[i] = beta == 0.0f ? alpha * product[i] : alpha * product[i] + beta * d[i];
}

// What sgemm (cublas_lt.h) promises, of bf16 matrices. An object of the class Tiles exists while its registers are
// used.
template <class Tiles>
void multiply_by_tiles(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha,
                       float beta, float* d, int64_t ld, float* space) {
    if (alpha != 1.0f) {
        std::vector<float> product(size_t(rows * columns));
        multiply_by_tiles<Tiles>(a, b, rows, columns, k, 1.0f, 0.0f, product.data(), rows, space);
        return add_scaled(product.data(), rows, columns, alpha, beta, d, ld);
    }
    if (beta != 0.0f && beta != 1.0f)
        for (int64_t j = 0; j < columns; ++j)
            for (int64_t i = 0; i < rows; ++i) d[j * ld + i] *= beta;
    bool from_zero = beta == 0.0f;
    const Tiles in_use;
    if (columns <= most_few_for_tiles && a.column_stride == 1) {
        const auto multiply = columns <= side       ? multiply_few_with_tiles<Tiles, 1>
                              : columns <= 2 * side ? multiply_few_with_tiles<Tiles, 2>
                                                    : multiply_few_with_tiles<Tiles, 3>;
        return multiply(a, b, rows, columns, k, from_zero, d, ld, space);
    }
    const Order order = best_order(false);
    int64_t first_k = 0;
    do {
        const int64_t length = std::min(panel_k, k - first_k), tiles = tiles_along(length);
        float* const packed_b = space + tile_panel_rows * tiles * side;
        pack_rows(b.from(0, first_k, 0), b.column_stride, b.row_stride, columns, length, packed_b);
        for (int64_t row = 0; row < rows; row += tile_panel_rows) {
            const int64_t count = std::min(tile_panel_rows, rows - row);
            pack_pairs(a.from(0, row, first_k), a.row_stride, a.column_stride, count, length, space, tiles * side);
            multiply_panel<Tiles>(space, packed_b, count, columns, tiles, from_zero, d + row, ld,
                                  next_part(a, rows, k, row, first_k, tile_panel_rows, order));
        }
        from_zero = false;
        first_k += panel_k;
    } while (first_k < k);
}

}  // namespace
}  // namespace cuda_cpu
