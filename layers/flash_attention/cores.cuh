// layers/flash_attention/cores.cuh: the tiles of flash attention on CUDA cores, in float32, forward and backward. On a
// GPU it is for f32 tensors. The CPU device has no tensor cores, and runs 16-bit tensors this way too: they become
// floats in shared memory.
//
// A block owns `kRows` rows: queries in the forward and in dq, keys in dk and dv. They lie transposed in shared memory,
// [column][row]. The others, kOthers at a time, stream past: they lie as in device memory, [other][column]. All
// products are then of two kinds, and in both a thread has a register tile of kM x kR numbers, kR rows side by side:
//
//     scores        S[j][r] = sum over columns x of  rows[x][r] * others[j][x]           j: others      (S, dP)
//     accumulation  A[c][r] += sum over others j of  P[j][r] * others[j][c]              c: columns     (o, dq, dk, dv)
//
//                 rows r ->                       each step of either sum: kR numbers of one line, kM single numbers,
//               +-----------+                     kM kR multiply-adds.
//     others j  |  P[j][r]  |  shared memory
//               +-----------+
//
// The two devices fill this picture differently:
//
//   GPU    16 x 16 threads. threadIdx.y says which kR = 4 (or 2) rows, and the 16 threads of threadIdx.x deal out the
//          others and the columns among them. A row's maximum is a butterfly over these 16 lanes.
//   CPU    one thread, kR = 32 rows: the loops over r are vector instructions with a broadcast number, and the loops
//          over m run over registers. There is no barrier.
//
// Each number is a sum in ascending order of x, or of j: it does not depend on where a tile begins. Together with
// rescaling by powers of two (see exp2_below) that makes a document's results independent of what stands before it in
// its row, to the bit.
#pragma once

#include "layers/chunk.cuh"  // kOnCpu
#include "layers/flash_attention/flash_attention.cuh"
#ifdef CUDA_ON_CPU
#include "cpu_vector.h"
#endif

#include <algorithm>
#include <bit>
#include <cfloat>

namespace {

using Sizes = HeadSizes<HeadSize<32, 32>, HeadSize<64, 64>, HeadSize<128, 128>, HeadSize<192, 192>, HeadSize<256, 256>>;

template <int kD_, int kDv_, bool kSmall_ = false>
struct Tile {
    static constexpr int kD = kD_, kDv = kDv_;
    static constexpr bool kSmall = kSmall_;
    static constexpr int kThreadsX = kOnCpu ? 1 : 16, kThreadsY = kThreadsX;
    static constexpr int kR = kOnCpu ? 32 : (kD <= 64 ? 4 : 2);  // rows of a thread
    static constexpr int kRows = kR * kThreadsY;
    static constexpr int kPitch = kOnCpu ? kRows : kRows + 4;  // of transposed rows; GPU: an odd multiple of 16 bytes
    static constexpr int kOthers = kOnCpu ? 64 : (kSmall || kD > 128 ? 16 : 32);
    // A thread's share of the others, and of the columns: kScoreSteps or kColumnSteps register tiles of kM.
    static constexpr int kMScores = kOnCpu ? 8 : kOthers / kThreadsX, kMColumns = kOnCpu ? 8 : kD / kThreadsX;
    static constexpr int kScoreSteps = kOthers / kThreadsX / kMScores;
    static constexpr int kColumnSteps = kD / kThreadsX / kMColumns;
    static_assert(kD == kDv && kScoreSteps * kMScores * kThreadsX == kOthers &&
                  kColumnSteps * kMColumns * kThreadsX == kD);

    static constexpr int kRowsFloats = kD * kPitch, kProbsFloats = kOthers * kPitch;
    // GPU: neighbouring others start in neighbouring banks. CPU: whole cache lines.
    static constexpr int kOtherPitch = kOnCpu ? kD : kD + 1;
    static constexpr int kOthersFloats = static_cast<int>(round_up(kOthers * kOtherPitch, 4));
    // Of dk and dv, which take the most.
    static constexpr size_t kSharedBytes = 2 * sizeof(float) * (kRowsFloats + kProbsFloats + kOthersFloats);
    using Scores = float[kScoreSteps][kMScores][kR];
    using Columns = float[kColumnSteps][kMColumns][kR];
};

#if defined(CUDA_ON_CPU) && !defined(GPU_CHUNKS)
// to[x * to_pitch + i] = line(i)[x] for i < cuda_cpu::width and x < n, a multiple of that.
template <class Line>
inline void transpose_lines(float* to, int to_pitch, Line line, int n) {
    using namespace cuda_cpu;
    for (int x = 0; x < n; x += width) {
        Vector square[width];
        load_transposed(square, [&](int i) { return line(i) + x; });
        for (int i = 0; i < width; ++i) store(to + (x + i) * to_pitch, square[i]);
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Register tiles

// With sums[m][r] = sum over x < n of rows[x][r] * other[m * stride_m + x * stride_x]:  acc = factor * sums  if kNew,
// otherwise  acc += sums.
#if defined(CUDA_ON_CPU) && !defined(GPU_CHUNKS)
// A function of its own: inside of a kernel, where it would know n, g++ unrolls the loop over x and keeps the sums in
// memory. It takes as many sums at a time as there are registers for: 8 x 2 vectors with AVX-512, otherwise 4 x 2.
template <bool kNew = false, int kM, int kR>
[[gnu::noinline]] void multiply(float (&__restrict acc)[kM][kR], const float* __restrict rows, int pitch,
                                const float* __restrict other, int stride_m, int stride_x, int n,
                                [[maybe_unused]] float factor = 1.0f) {
    using namespace cuda_cpu;
    constexpr int kSums = width == 16 ? 16 : 8, kLines = std::min(kM, kSums / 2);
    constexpr int kVectors = std::min(static_cast<int>(std::bit_floor(unsigned{kSums / kLines})), kR / width);
    static_assert(kM % kLines == 0 && kR % (kVectors * width) == 0);
    for (int m0 = 0; m0 < kM; m0 += kLines)
        for (int r0 = 0; r0 < kR; r0 += kVectors * width) {
            Vector sums[kLines][kVectors];
            for (int m = 0; m < kLines; ++m)
                for (int v = 0; v < kVectors; ++v)
                    sums[m][v] = kNew ? broadcast(0.0f) : load(&acc[m0 + m][r0 + v * width]);
            for (int x = 0; x < n; ++x) {
                Vector row[kVectors];
                for (int v = 0; v < kVectors; ++v) row[v] = in_register(load(rows + x * pitch + r0 + v * width));
                for (int m = 0; m < kLines; ++m) {
                    const Vector y = broadcast(other[(m0 + m) * stride_m + x * stride_x]);
                    for (int v = 0; v < kVectors; ++v) sums[m][v] = multiply_add(row[v], y, sums[m][v]);
                }
            }
            for (int m = 0; m < kLines; ++m)
                for (int v = 0; v < kVectors; ++v)
                    store(&acc[m0 + m][r0 + v * width], kNew ? broadcast(factor) * sums[m][v] : sums[m][v]);
        }
}
#else
template <bool kNew = false, int kM, int kR>
__device__ __forceinline__ void multiply(float (&acc)[kM][kR], const float* rows, int pitch, const float* other,
                                         int stride_m, int stride_x, int n, float factor = 1.0f) {
    for (int m = 0; m < kM && kNew; ++m)
        for (int r = 0; r < kR; ++r) acc[m][r] = 0.0f;
    for (int x = 0; x < n; ++x) {
        float y[kM];
        for (int m = 0; m < kM; ++m) y[m] = other[m * stride_m + x * stride_x];
        const Packed<float, kR> row = load_packed<float, kR>(rows + x * pitch);
        for (int m = 0; m < kM; ++m)
            for (int r = 0; r < kR; ++r) acc[m][r] = fmaf(row.v[r], y[m], acc[m][r]);
    }
    for (int m = 0; m < kM && kNew; ++m)
        for (int r = 0; r < kR; ++r) acc[m][r] = __fmul_rn(acc[m][r], factor);
}
#endif

// How many register tiles hold the first n of a tile's others. On a GPU a thread has just one.
template <class T>
__device__ __forceinline__ int score_steps(int n) {
    return kOnCpu ? (n + T::kMScores - 1) / T::kMScores : T::kScoreSteps;
}
// The place in the tile of this thread's other m of step i, or of its column.
template <class T>
__device__ __forceinline__ int other_of(int step, int m) {
    return (step * T::kMScores + m) * T::kThreadsX + (kOnCpu ? 0 : static_cast<int>(threadIdx.x));
}
template <class T>
__device__ __forceinline__ int column_of(int step, int m) {
    return (step * T::kMColumns + m) * T::kThreadsX + (kOnCpu ? 0 : static_cast<int>(threadIdx.x));
}
template <class T>
__device__ __forceinline__ int first_row() {
    return kOnCpu ? 0 : static_cast<int>(threadIdx.y) * T::kR;
}

// S[j][r] = factor * sum_x rows[x][r] others[j][x], for this thread's rows and others.
template <class T>
__device__ __forceinline__ void multiply_scores(typename T::Scores& scores, const float* rows, const float* others,
                                                int n, float factor) {
    for (int i = 0; i < score_steps<T>(n); ++i)
        multiply</*kNew=*/true>(scores[i], rows + first_row<T>(), T::kPitch,
                                others + other_of<T>(i, 0) * T::kOtherPitch, T::kThreadsX * T::kOtherPitch, 1, T::kD,
                                factor);
}
// A[c][r] += sum_j P[j][r] others[j][c], for this thread's rows and columns.
template <class T>
__device__ __forceinline__ void multiply_columns(typename T::Columns& acc, const float* P, const float* others, int n) {
    for (int i = 0; i < T::kColumnSteps; ++i)
        multiply(acc[i], P + first_row<T>(), T::kPitch, others + column_of<T>(i, 0), T::kThreadsX, T::kOtherPitch, n);
}
template <class T>
__device__ __forceinline__ void clear(typename T::Columns& acc) {
    for (int i = 0; i < T::kColumnSteps; ++i)
        for (int m = 0; m < T::kMColumns; ++m)
            for (int r = 0; r < T::kR; ++r) acc[i][m][r] = 0.0f;
}

// Where a thread forms its scores: in registers. On the CPU device in shared memory, where they end.
template <class T>
__device__ __forceinline__ typename T::Scores& scores_in(typename T::Scores& registers,
                                                         [[maybe_unused]] float* shared) {
    if constexpr (kOnCpu) return *reinterpret_cast<typename T::Scores*>(shared);
    else return registers;
}
// This thread's part of a tile of scores, to shared memory.
template <class T>
__device__ __forceinline__ void share_scores(float* shared, const typename T::Scores& scores, int n) {
    if (kOnCpu) return;
    for (int i = 0; i < score_steps<T>(n); ++i)
        for (int m = 0; m < T::kMScores; ++m) {
            float* to = shared + other_of<T>(i, m) * T::kPitch + first_row<T>();
            for (int r = 0; r < T::kR; ++r) to[r] = scores[i][m][r];
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles from and to device memory. Columns from D on are zeros.

// The block's rows, transposed: to[column][row]. Rows behind the last are copies of it: what becomes of them is not
// stored.
template <class T, class Number>
__device__ __forceinline__ void load_rows(float* to, const Number* head, int64_t stride, int n_rows, int D) {
#if defined(CUDA_ON_CPU) && !defined(GPU_CHUNKS)
    using namespace cuda_cpu;
    for (int first = 0; first < T::kRows; first += width) {
        const auto row = [&](int i) { return head + min(first + i, n_rows - 1) * stride; };
        int whole = 0;  // columns that need no copy: vectors of numbers, all of which exist
        if constexpr (requires { load(head); }) {
            whole = D / width * width;
            transpose_lines(to + first, T::kPitch, row, whole);
        }
        if (whole == T::kD) continue;
        float lines[width][T::kD];
        for (int i = 0; i < width; ++i) {
            for (int x = whole; x < D; ++x) lines[i][x - whole] = to_float(row(i)[x]);
            for (int x = D; x < T::kD; ++x) lines[i][x - whole] = 0.0f;
        }
        const auto line = [&](int i) { return static_cast<const float*>(lines[i]); };
        transpose_lines(to + whole * T::kPitch + first, T::kPitch, line, T::kD - whole);
    }
#else
    for (int r = static_cast<int>(threadIdx.y); r < T::kRows; r += T::kThreadsY) {
        const Number* row = head + min(r, n_rows - 1) * stride;
        for (int x = static_cast<int>(threadIdx.x); x < T::kD; x += T::kThreadsX)
            to[x * T::kPitch + r] = x < D ? to_float(row[x]) : 0.0f;
    }
#endif
}
// n others, as they are: to[other][column].
template <class T, class Number>
__device__ __forceinline__ void load_others(float* to, const Number* head, int64_t stride, int n, int D) {
#if defined(CUDA_ON_CPU) && !defined(GPU_CHUNKS)
    using namespace cuda_cpu;
    for (int j = 0; j < n; ++j, head += stride, to += T::kOtherPitch) {
        int x = 0;
        if constexpr (requires { load(head); })
            for (; x + width <= D; x += width) store(to + x, load(head + x));
        for (; x < D; ++x) to[x] = to_float(head[x]);
        for (; x < T::kD; ++x) to[x] = 0.0f;
    }
#else
    for (int j = static_cast<int>(threadIdx.y); j < n; j += T::kThreadsY) {
        const Number* from = head + j * stride;
        for (int x = static_cast<int>(threadIdx.x); x < D; x += T::kThreadsX)
            to[j * T::kOtherPitch + x] = to_float(from[x]);
        for (int x = D + static_cast<int>(threadIdx.x); x < T::kD; x += T::kThreadsX) to[j * T::kOtherPitch + x] = 0.0f;
    }
#endif
}
// row r of head = factor[r] * acc[:][r]
template <class T, class Number>
__device__ __forceinline__ void store_rows(Number* head, int64_t stride, const typename T::Columns& acc,
                                           const float (&factor)[T::kR], int n_rows, int D) {
#if defined(CUDA_ON_CPU) && !defined(GPU_CHUNKS)
    using namespace cuda_cpu;
    for (int first = 0; first < n_rows; first += width)
        for (int c = 0; c < D; c += width) {
            Vector square[width];
            load_transposed(square, [&](int x) { return (&acc[0][0][0]) + (c + x) * T::kR + first; });
            for (int i = 0; i < width && first + i < n_rows; ++i) {
                Number* const row = head + (first + i) * stride + c;
                const Vector numbers = square[i] * broadcast(factor[first + i]);
                if constexpr (std::is_same_v<Number, float>)
                    if (c + width <= D) {
                        store(row, numbers);
                        continue;
                    }
                float copy[width];
                store(copy, numbers);
                store_chunk(row, copy, D - c);
            }
        }
#else
    for (int r = 0; r < T::kR && first_row<T>() + r < n_rows; ++r) {
        Number* row = head + (first_row<T>() + r) * stride;
        for (int i = 0; i < T::kColumnSteps; ++i)
            for (int m = 0; m < T::kMColumns; ++m)
                if (column_of<T>(i, m) < D) row[column_of<T>(i, m)] = from_float<Number>(acc[i][m][r] * factor[r]);
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Scores that are not there, and powers of two

// A score of -infinity counts as masked. A score must be above kNothingYet to count.
constexpr float kNothingYet = -FLT_MAX / 2, kMasked = -FLT_MAX;

// The intervals that a thread's rows see.
template <class T>
struct RowIntervals {
    int first[T::kR], end[T::kR];
    template <bool kOfQuery>
    __device__ __forceinline__ void find(const Mask& mask, int b, int t0) {
        for (int r = 0; r < T::kR; ++r) {
            const Interval seen = mask.visible<kOfQuery>(b, min(t0 + first_row<T>() + r, mask.T - 1));
            first[r] = seen.first, end[r] = seen.end;
        }
    }
    // Of a tile whose first other is s0. Others behind the tile's n are behind every row's end as well, or s0 + n is
    // not the end of the block's view and the tile is full.
    __device__ __forceinline__ void apply(typename T::Scores& scores, int s0, int n) const {
        for (int i = 0; i < score_steps<T>(n); ++i)
            for (int m = 0; m < T::kMScores; ++m) {
                const int s = s0 + other_of<T>(i, m);
                for (int r = 0; r < T::kR; ++r)
                    scores[i][m][r] = s >= first[r] && s < end[r] ? scores[i][m][r] : kMasked;
            }
    }
};
template <class T>
__device__ __forceinline__ bool needs_mask(const View& view, int s0, int n) {
    return view.needs_mask(s0, n) || n % (T::kMScores * T::kThreadsX) != 0;
}

// 2^n for a whole n, as a float whose exponent is n: 0 below 2^-126, infinity above 2^127.
__device__ __forceinline__ float power_of_two(float n) {
    return __int_as_float((static_cast<int>(n > -127.0f ? (n < 128.0f ? n : 128.0f) : -127.0f) + 127) << 23);
}
// 2^(x - m) for a whole m: x = n + f with n whole, |f| <= 1/2 and nothing rounded; then 2^f, times 2^(n - m), which is
// exact too. So 2^(x - m1) * 2^(m1 - m2) = 2^(x - m2) to the bit: it does not matter when a sum learns of a new
// maximum. Of x = -infinity f is NaN, and the result 0.
__device__ __forceinline__ float exp2_below(float x, float m) {
    const float n = rintf(x), f = x - n;
#ifdef CUDA_ON_CPU
    // The minimax polynomial on [-1/2, 1/2], with coefficients rounded to floats: relative error 1.6e-8. Loops around a
    // polynomial can be vectorised.
    float p = 1.53533620e-4f;
    p = fmaf(p, f, 1.33988749e-3f);
    p = fmaf(p, f, 9.61843692e-3f);
    p = fmaf(p, f, 5.55033237e-2f);
    p = fmaf(p, f, 0.240226477f);
    p = fmaf(p, f, 0.693147182f);
    p = fmaf(p, f, 1.0f);
#else
    const float p = exp2f(f);
#endif
    return n - m <= -127.0f ? 0.0f : p * power_of_two(n - m);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches

template <class T>
dim3 grid_of(const FlashArguments& a, int64_t n_heads) {
    return dim3(static_cast<unsigned>(ceil_div(a.T, T::kRows)), static_cast<unsigned>(n_heads),
                static_cast<unsigned>(a.B));
}

// Calls f(number, size): a value of the element type, and the head size that kernels are compiled for.
template <class F>
void dispatch_cores(const FlashArguments& a, F&& f) {
    const auto with_number = [&](auto number) { Sizes::dispatch(a.q.D, a.v.D, [&](auto size) { f(number, size); }); };
#ifdef CUDA_ON_CPU
    dispatch(a.q.rows.dtype, with_number);
#else
    check(a.q.rows.dtype == DType::f32, "flash attention of ", dtype_name(a.q.rows.dtype), " on CUDA cores: only f32");
    with_number(float{});
#endif
}

}  // namespace
