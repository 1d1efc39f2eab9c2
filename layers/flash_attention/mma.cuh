// layers/flash_attention/mma.cuh: the tiles of flash attention on tensor cores (mma.sync), forward and backward.
//
// A block has four warps, and each warp owns 16 or 32 of the block's rows (kRowTiles of 16), whole: no two warps ever
// add to the same number. The others stream past in tiles, through shared memory, one cp.async ahead of the arithmetic.
// A warp's products are of two kinds, as in flash_attention/cores.cuh:
//
//     scores        S (rows, others)  += X (rows, columns) Y (others, columns)^T      S, dP
//     accumulation  A (rows, columns) += P (rows, others)  Y (others, columns)        o, dq, dk, dv
//
//                  operand A                        operand B                            result
//     scores       X from shared memory, ldmatrix   Y as it lies, ldmatrix               S in registers
//     accumulation P in registers: S, packed        Y as it lies, ldmatrix transposed    A in registers
//
// mma needs B with a column's elements in pairs down the rows. For the scores B = Y^T, and a column of Y^T is a row of
// Y: there are the pairs. For the accumulation B = Y, and ldmatrix turns each 8 x 8 matrix on its way. So nothing is
// ever transposed in memory, keys and values lie in shared memory as they do in device memory, and P never leaves the
// registers: what the result fragment of the scores holds is, rounded to 16 bits, an A fragment (layers/ptx.cuh).
//
// Rows in shared memory are 16 bytes longer than their columns need. ldmatrix reads 8 rows of 16 bytes at a time, which
// must lie in different banks: with rows of kColumns / 8 + 1 packs of 16 bytes, an odd number, 8 neighbouring rows
// start in all 8 of the bank groups. (The other way is to permute the packs of a row by its number. It saves these 16
// bytes, 6 % at 128 columns, and costs an exclusive-or for every address.)
//
// Columns between D and kD are zeros in shared memory, and so are others behind the last token: no NaN gets into a
// product.
#pragma once

#include "layers/flash_attention/flash_attention.cuh"
#include "layers/ptx.cuh"

namespace {

using MmaSizes = HeadSizes<HeadSize<32, 32>, HeadSize<64, 64>, HeadSize<96, 96>, HeadSize<128, 128>, HeadSize<192, 128>,
                           HeadSize<192, 192>, HeadSize<256, 256>>;

constexpr int kWarps = 4, kThreads = kWarps * kWarp;

template <int kColumns>
constexpr int kPitch = kColumns + 8;  // of a row in shared memory, in elements

// This thread's place in a fragment.
__device__ __forceinline__ int lane() { return not_hoisted(static_cast<int>(threadIdx.x)) % kWarp; }
__device__ __forceinline__ int quad() { return lane() / 4; }     // g: row g and g + 8 of a fragment
__device__ __forceinline__ int in_quad() { return lane() % 4; }  // t: columns 2t and 2t + 1
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / kWarp; }

// Results of a warp's products: 16 x 8 fragments, kColumns / 8 of them side by side, kRowTiles below each other.
template <int kRowTiles, int kColumns>
using Fragments = float[kRowTiles][kColumns / 8][4];
// The same as operand A of the next product: 16 x 16 fragments.
template <int kRowTiles, int kColumns>
using Packs = uint32_t[kRowTiles][kColumns / 16][4];

template <int kRowTiles, int kColumns>
__device__ __forceinline__ void clear(float (&acc)[kRowTiles][kColumns][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

// Starts the copies of n rows of a head into a tile of kRows x kColumns; the other rows and columns become zeros.
// packed: rows start and end at multiples of 16 bytes (Shape). Otherwise they are copied element by element, and
// without cp.async: the barrier that callers put after cp_async_wait covers these copies too.
template <int kRows, int kColumns, class Number>
__device__ __forceinline__ void load_tile(Number* tile, const Number* head, int64_t stride, int n, int D, bool packed) {
    if (!packed) {
        for (int i = not_hoisted(static_cast<int>(threadIdx.x)); i < kRows * kColumns; i += kThreads) {
            const int row = i / kColumns, column = i % kColumns;
            tile[row * kPitch<kColumns> + column] =
                row < n && column < D ? head[row * stride + column] : from_float<Number>(0.0f);
        }
        return;
    }
    constexpr int kPacks = kColumns / 8;  // 16 bytes each; neighbouring threads take neighbouring ones
#pragma unroll kCopiesAtOnce
    for (int i = not_hoisted(static_cast<int>(threadIdx.x)); i < kRows * kPacks; i += kThreads) {
        const int row = i / kPacks, column = i % kPacks * 8;
        const bool there = row < n && column < D;
        cp_async_16(tile + row * kPitch<kColumns> + column, there ? head + row * stride + column : head, there);
    }
}

// Writes factor * acc, rounded, to a warp's rows of a head. Pairs of columns, 4 bytes: a quad writes 16 neighbouring
// bytes. Where rows are not packed a pair may straddle the row's end, or not be aligned: two stores.
template <class Number, int kRowTiles, int kTiles>
__device__ __forceinline__ void store_rows(Number* head, int64_t stride, const float (&acc)[kRowTiles][kTiles][4],
                                           const float (&factor)[kRowTiles][2], int n_rows, int D, bool packed) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = m * 16 + half * 8 + quad();
            if (row >= n_rows) continue;
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const int column = n * 8 + 2 * in_quad();
                if (column >= D) continue;
                const float first = acc[m][n][2 * half] * factor[m][half],
                            second = acc[m][n][2 * half + 1] * factor[m][half];
                Number* to = head + row * stride + column;
                if (packed) {
                    *reinterpret_cast<uint32_t*>(to) = pack<Number>(first, second);
                } else {
                    to[0] = from_float<Number>(first);
                    if (column + 1 < D) to[1] = from_float<Number>(second);
                }
            }
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Products of a warp

// scores = X Y^T: X (16 kRowTiles rows of this warp, kColumns), Y (kOthers, kColumns), both in shared memory.
template <int kColumns, class Number, int kRowTiles, int kOtherTiles>
__device__ __forceinline__ void multiply_scores(float (&scores)[kRowTiles][kOtherTiles][4], const Number* X,
                                                const Number* Y) {
    clear(scores);
    // Where this lane's row of a matrix starts. The four matrices of A: rows 0-7, rows 8-15, then both 8 columns on.
    const Number* a_row = X + lane() % 16 * kPitch<kColumns> + lane() / 16 * 8;
    // Those of B, for 16 others: others 0-7, the same ones 8 columns on, then others 8-15 in the same way.
    const Number* b_row = Y + (lane() % 8 + lane() / 16 * 8) * kPitch<kColumns> + lane() / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < kColumns; k += 16) {
        uint32_t a[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) ldmatrix_x4(a[m], a_row + m * 16 * kPitch<kColumns> + k);
#pragma unroll
        for (int n = 0; n < kOtherTiles; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, b_row + n * 8 * kPitch<kColumns> + k);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                mma_m16n8k16<Number>(scores[m][n], a[m], b);
                mma_m16n8k16<Number>(scores[m][n + 1], a[m], b + 2);
            }
        }
    }
}

// acc += P Y: P (16 kRowTiles rows, kOthers) in registers, Y (kOthers, kColumns) in shared memory.
template <class Number, int kRowTiles, int kOtherPairs, int kColumnTiles>
__device__ __forceinline__ void multiply_columns(float (&acc)[kRowTiles][kColumnTiles][4],
                                                 const uint32_t (&P)[kRowTiles][kOtherPairs][4], const Number* Y) {
    constexpr int pitch = kPitch<kColumnTiles * 8>;
    // The four matrices of B, for 16 columns: others 0-7, others 8-15, then both 8 columns on; each one transposed.
    const Number* b_row = Y + lane() % 16 * pitch + lane() / 16 * 8;
#pragma unroll
    for (int k = 0; k < kOtherPairs; ++k)
#pragma unroll
        for (int n = 0; n < kColumnTiles; n += 2) {
            uint32_t b[4];
            ldmatrix_x4<true>(b, b_row + k * 16 * pitch + n * 8);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                mma_m16n8k16<Number>(acc[m][n], P[m][k], b);
                mma_m16n8k16<Number>(acc[m][n + 1], P[m][k], b + 2);
            }
        }
}

// Two result fragments side by side are one operand fragment.
template <class Number, int kRowTiles, int kOtherTiles>
__device__ __forceinline__ void pack_fragments(uint32_t (&P)[kRowTiles][kOtherTiles / 2][4],
                                               const float (&scores)[kRowTiles][kOtherTiles][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kOtherTiles; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                P[m][n / 2][n % 2 * 2 + half] = pack<Number>(scores[m][n][2 * half], scores[m][n][2 * half + 1]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Masking: scores of pairs that do not see each other become -infinity. row0: the warp's first row; other0: the
// tile's first other. Only called for tiles that an interval ends in.

template <bool kRowsAreQueries, int kRowTiles, int kOtherTiles>
__device__ __forceinline__ void apply_mask(float (&scores)[kRowTiles][kOtherTiles][4], const Mask& mask, int b,
                                           int row0, int other0) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(row0 + m * 16 + half * 8 + quad(), mask.T - 1);
            const Interval seen = mask.visible<kRowsAreQueries>(b, row);
            // From this thread's first column on: a column is then a constant, and takes no register.
            const int first = seen.first - other0 - 2 * in_quad(), end = seen.end - other0 - 2 * in_quad();
#pragma unroll
            for (int n = 0; n < kOtherTiles; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (n * 8 + i < first || n * 8 + i >= end) scores[m][n][2 * half + i] = -INFINITY;
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The running softmax of the rows that a thread has a part of: m * 16 + half * 8 + quad(). The sum is this lane's own
// part; the quad adds its four up at the end.

template <int kRowTiles>
struct OnlineRows {
    float max[kRowTiles][2], sum[kRowTiles][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) max[m][half] = -INFINITY, sum[m][half] = 0.0f;
    }
    // A score x becomes 2^(scale2 (x - max)), scale2 = scale log2(e). What has been summed with the old maximum is to
    // be multiplied by rescale.
    template <int kOtherTiles>
    __device__ __forceinline__ void add(float (&scores)[kRowTiles][kOtherTiles][4], float (&rescale)[kRowTiles][2],
                                        float scale2) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float larger = max[m][half];
#pragma unroll
                for (int n = 0; n < kOtherTiles; ++n)
                    larger = fmaxf(larger, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
                larger = warp_max(larger, 4);
                // A row that has seen nothing yet: its scores are all -infinity, and less 0 they stay so. The old shift
                // is rounded as the new one is: where the maximum stays they are equal, and rescale is 1. Otherwise
                // each tile would change the weight of all keys so far by the rounding error of a large maximum.
                const float shift = larger == -INFINITY ? 0.0f : __fmul_rn(larger, scale2);
                rescale[m][half] = ex2_approx(__fmul_rn(max[m][half], scale2) - shift);
                float tile_sum = 0.0f;
#pragma unroll
                for (int n = 0; n < kOtherTiles; ++n)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; ++i)
                        tile_sum += scores[m][n][i] = ex2_approx(fmaf(scores[m][n][i], scale2, -shift));
                sum[m][half] = fmaf(sum[m][half], rescale[m][half], tile_sum);
                max[m][half] = larger;
            }
    }
    // ln of the sum of exp(scale score) over a row's keys, of which the quad's lanes have row_sum together. The maximum
    // is rounded as the shift is.
    __device__ __forceinline__ float lse(int m, int half, float row_sum, float scale2) const {
        return (__fmul_rn(max[m][half], scale2) + log2f(row_sum)) * kLn2;
    }
};

template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_rows(float (&acc)[kRowTiles][kColumnTiles][4],
                                              const float (&factor)[kRowTiles][2]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] *= factor[m][i / 2];
}

}  // namespace
