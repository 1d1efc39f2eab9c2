// dev/attention.cuh: shared by the ladders of attention: the problem, the operands of tensor cores, the reference.
//
// N heads of T tokens, each a matrix (T, D) of its own, D = 64; bf16 or f16, sums in float32. Causal: query t sees the
// keys 0 .. t. (In a model the heads of a token lie side by side in one row, several of q may share one of k and v, and
// documents and windows limit what is seen. The product's kernels handle all of this. Here it would only make the steps
// harder to see.)
//
// Forward and backward go through pairs (query t, key s), in tiles. "Rows" are the tokens that a block or a warp owns
// and sums for: queries in the forward. "Others" are those that are read tile by tile: keys in the forward.
#pragma once

#include "dev/ladder.h"
#include "layers/ptx.cuh"

#include <cfloat>

namespace {

constexpr int kD = 64;            // columns of a head
constexpr float kScale = 0.125f;  // 1 / sqrt(D)
constexpr float kLog2e = 1.44269504f;
constexpr float kScale2 = kScale * kLog2e;  // exp(kScale x) = 2^(kScale2 x), which is one instruction

constexpr int kBlock = 128, kWarps = kBlock / kWarp;

// Blocks (tile of `rows` tokens, head).
inline dim3 blocks_of(int64_t T, int rows, int64_t N) {
    check(N < 65536, N, " heads: at most 65535 are possible");
    return dim3(static_cast<unsigned>(ceil_div(T, rows)), static_cast<unsigned>(N));
}

// Two neighbouring numbers in one register, as the tensor cores take them.
template <class Number>
__device__ __forceinline__ uint32_t pair_at(const Number* address) {
    const Packed<Number, 2> pair = load_packed<Number, 2>(address);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensor cores. A warp owns 16 rows. The fragments are those of layers/ptx.cuh: this lane has a part of the rows quad()
// and quad() + 8, in each 8 columns the columns 2 in_quad() and the next one.

constexpr int kWarpRows = 16, kRows = kWarpRows * kWarps;  // of a warp, of a block

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ __forceinline__ int quad() { return lane() / 4; }
__device__ __forceinline__ int in_quad() { return lane() % 4; }

using RowOperand = uint32_t[kD / 16][4];  // A: 16 rows x D
using RowSums = float[kD / 8][4];         // C: 16 rows x D

// Rows stay for the whole kernel, so they stay in registers. Those from T on are zeros.
template <class Number>
__device__ __forceinline__ void load_rows(RowOperand& rows, const Number* head, int first, int T) {
#pragma unroll
    for (int k = 0; k < kD / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first + quad() + i % 2 * 8, column = k * 16 + i / 2 * 8 + 2 * in_quad();
            rows[k][i] = row < T ? pair_at(head + row * kD + column) : 0;
        }
}

template <class Number>
__device__ __forceinline__ void store_rows(Number* head, const RowSums& sums, const float (&factor)[2], int first,
                                           int T) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first + quad() + half * 8;
        if (row >= T) continue;
#pragma unroll
        for (int n = 0; n < kD / 8; ++n)
            store_packed(head + row * kD + n * 8 + 2 * in_quad(),
                         Packed<Number, 2>{{from_float<Number>(sums[n][2 * half] * factor[half]),
                                            from_float<Number>(sums[n][2 * half + 1] * factor[half])}});
    }
}

// Where a tile of others has the 16 bytes number `pack` (of 8) of a row, in elements. A row is 128 bytes, and those are
// all 32 banks of shared memory. ldmatrix reads 8 rows at a time, 16 bytes of each:
//
//     InOrder     the same pack of 8 rows begins at one bank: 8 turns instead of one
//     Swizzled    row r has its pack p at place p xor (r mod 8): 8 rows, 8 places, all banks, one turn
struct InOrder {
    __device__ __forceinline__ static int at(int row, int pack) { return row * kD + pack * 8; }
};
struct Swizzled {
    __device__ __forceinline__ static int at(int row, int pack) { return row * kD + (pack ^ row % 8) * 8; }
};

// Copies n_rows others from `first` on into a tile; zeros for those from T on, so that no NaN gets into a product.
// Neighbouring threads take neighbouring packs. kAsync: only starts the copies, which bypass the registers.
template <int n_rows, class Layout, bool kAsync, class Number>
__device__ __forceinline__ void load_tile(Number* tile, const Number* head, int first, int T) {
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < n_rows * 8; i += kBlock) {
        const int row = i / 8, pack = i % 8;
        const bool there = first + row < T;
        const Number* from = there ? head + (first + row) * kD + pack * 8 : head;
        Number* to = tile + Layout::at(row, pack);
        if constexpr (kAsync) cp_async_16(to, from, there);
        else store_packed(to, there ? load_packed(from) : Packed<Number>{});
    }
}

// scores (16 rows, others) = rows others^T. A column of others^T is a row of the tile, so its elements are neighbours,
// as operand B needs them. One ldmatrix fetches B for 16 columns of D and 16 others: two products.
template <class Number, class Layout, int n_tiles>
__device__ __forceinline__ void multiply_scores(float (&scores)[n_tiles][4], const RowOperand& rows,
                                                const Number* tile) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kD / 16; ++k)
#pragma unroll
        for (int n = 0; n < n_tiles; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, tile + Layout::at(n * 8 + lane() % 8 + lane() / 16 * 8, 2 * k + lane() / 8 % 2));
            mma_m16n8k16<Number>(scores[n], rows[k], b);
            mma_m16n8k16<Number>(scores[n + 1], rows[k], b + 2);
        }
}

// What the scores have become, rounded to 16 bits: two result fragments side by side are one operand A. So
// probabilities go from one product to the next without leaving the registers.
template <class Number, int n_tiles>
__device__ __forceinline__ void pack_fragments(uint32_t (&P)[n_tiles / 2][4], const float (&scores)[n_tiles][4]) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            P[n / 2][n % 2 * 2 + half] = pack<Number>(scores[n][2 * half], scores[n][2 * half + 1]);
}

// sums (16 rows, D) += P (16 rows, others) others. Here a column of B runs down the rows of the tile, and ldmatrix
// transposes each 8 x 8 matrix on its way.
template <class Number, class Layout, int n_pairs>
__device__ __forceinline__ void multiply_columns(RowSums& sums, const uint32_t (&P)[n_pairs][4], const Number* tile) {
#pragma unroll
    for (int k = 0; k < n_pairs; ++k)
#pragma unroll
        for (int n = 0; n < kD / 8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4<true>(b, tile + Layout::at(k * 16 + lane() % 16, n + lane() / 16));
            mma_m16n8k16<Number>(sums[n], P[k], b);
            mma_m16n8k16<Number>(sums[n + 1], P[k], b + 2);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The product's kernels: they take N heads (T, D) as N sequences with one head each.

inline HeadColumns one_head(const Tensor& x) { return {x, 1, x.cols(), 0}; }
inline FlashAttentionOptions product_options(FlashTier tier) { return {.scale = kScale, .tier = tier}; }

// ---------------------------------------------------------------------------------------------------------------------
// The reference, and the tolerances

constexpr double kQStd = 2;  // of q, and so of the scores: some keys matter more than others

// Heads that are checked: all, or of long sequences the first and the last, because float64 takes its time.
inline std::vector<int64_t> checked_heads(int64_t N, int64_t T) {
    std::vector<int64_t> heads;
    for (int64_t n = 0; n < N; ++n)
        if (T <= 512 || n == 0 || n == N - 1) heads.push_back(n);
    return heads;
}

inline double dot(const float* a, const float* b) {
    double sum = 0;
    for (int d = 0; d < kD; ++d) sum += static_cast<double>(a[d]) * b[d];
    return sum;
}

// P[s] = probability of key s for query t, s <= t. Returns lse = log sum_s exp(score).
inline double probabilities(std::vector<double>& P, const float* q, const float* k, int64_t t) {
    P.assign(static_cast<size_t>(t + 1), 0.0);
    for (int64_t s = 0; s <= t; ++s) P[static_cast<size_t>(s)] = kScale * dot(q + t * kD, k + s * kD);
    const double max = *std::max_element(P.begin(), P.end());
    double sum = 0;
    for (double& p : P) sum += p = std::exp(p - max);
    for (double& p : P) p /= sum;
    return max + std::log(sum);
}

// The absolute error of a score in float32: that of its sum of 64 random products of standard deviation kQStd. Scores
// stay within 12 = 6 standard deviations, so score - max within 24; each of the steps from the score to the exponent
// (times scale, times log2(e), less the maximum, itself rounded) errs by at most 24 * 2^-24.
inline double score_error() { return kScale * kQStd * random_sum_error(kD) + 4 * 24 * 0x1p-24; }
// The relative error of a probability in float32: the score's error, in its own exponential and in those of the sum;
// that of __expf, 2 + 1.16 |x| units of 2^-23, in both; a sum of T positive terms, at worst T 2^-24; a quotient.
inline double probability_error(int64_t T) {
    return 2 * score_error() + (4 * (2 + 1.16 * 24) + static_cast<double>(T) + 2) * 0x1p-24;
}

}  // namespace
