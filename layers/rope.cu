// RoPE: rotary position embedding.                                              (Su et al. 2021, arXiv:2104.09864)
//
// A head's D numbers are D/2 points of the plane, (x_i, x_{i+D/2}); at position t point i is rotated by the angle
// t w_i. In a row of several documents positions count from the beginning of each.
//
//   forward     y1 = x1 cos - x2 sin               w_i = base^(-2i/D): 1 radian a token (i = 0) to nearly 1/base
//               y2 = x2 cos + x1 sin
//   backward    dx1 = dy1 cos + dy2 sin            a rotation's inverse and its transpose are the rotation back:
//               dx2 = dy2 cos - dy1 sin            the same kernel with -sin
//
// As a plain loop:
//
//   for each token at position t, for each query or key head x, for i = 0 ... D/2 - 1:
//       c = cos(t w_i), s = sin(t w_i)                                             both from the table
//       x[i], x[i + D/2] = x[i] c - x[i + D/2] s, x[i + D/2] c + x[i] s
//
// Queries and keys are rotated, values are not. The dot product of a query rotated at position t and a key rotated at s
// depends on t and s through t - s only: so attention's scores depend on distances, not on absolute positions.
//
// In Hugging Face's layout of LLaMA a point's two numbers are D/2 apart; in Meta's own files, the paper and DeepSeek
// they are neighbours. The two differ by a fixed order of the rows of the query and key weights.
//
// Long contexts. Let P be the longest sequence of the training, and turns = P w / (2 pi) the number of full rotations
// of a point in it. At positions beyond P the slow points (turns < 1) reach angles that did not occur in the training.
// There are four remedies (RopeKind), each of which computes other frequencies w':
//
//   linear    w' = w / factor: all positions are divided by `factor`               (Chen et al. 2023, arXiv:2306.15595)
//   llama3    w' = (1 - a) w / factor + a w      fast points, which distinguish neighbours, keep w (a = 1); slow points
//   yarn      w' = (1 - a) w / factor + a w      get w / factor (a = 0): `factor` times the positions, the same angles
//               llama3: a = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor), limited to [0, 1]
//                                                                            (transformers' modeling_rope_utils.py)
//               yarn: a falls linearly with the point's number i, from 1 at the point with turns = beta_fast (rounded
//               down) to 0 at the point with turns = beta_slow (rounded up)        (Peng et al. 2023, arXiv:2309.00071)
//   dynamic   w' = base'^(-2i/D),  base' = base growth^(D/(D-2)),  growth = factor T/P - (factor - 1) if T > P, else 1
//               ("dynamic NTK": transformers' modeling_rope_utils.py; arXiv:2309.00071). With this exponent the slowest
//               point, i = D/2 - 1, is slowed by exactly `growth`, and the fastest not at all. T is the length of the
//               sequence: a table for more positions differs in every row.
//
// YaRN also multiplies attention's scores by mscale^2, with mscale = 0.1 m ln(factor) + 1: a softmax over more keys is
// flatter, and larger scores compensate for that. Its authors put mscale into the table's numbers (m = 1). DeepSeek
// (arXiv:2405.04434) multiplies the softmax's scale by mscale(mscale_all_dim)^2, and leaves mscale(mscale) /
// mscale(mscale_all_dim) in the table, which is 1 in all of their models. An attention_factor takes the place of what
// is in the table.
#include "layers/chunk.cuh"
#include "layers/layers.h"
#include "layers/rope.cuh"
#ifdef CUDA_ON_CPU
#include "cpu_vector.h"
#endif

#include <cmath>
#include <numeric>

// ---------------------------------------------------------------------------------------------------------------------
// The table, on the host

namespace {

// The share a of its own frequency that point i of a head of D columns keeps.
double kept_share(int64_t i, double w, int64_t D, double base, const RopeScaling& scaling) {
    if (scaling.kind == RopeKind::linear) return 0;
    const double positions = static_cast<double>(scaling.original_max_position);
    if (scaling.kind == RopeKind::llama3) {
        const double low = scaling.low_freq_factor, high = scaling.high_freq_factor, turns = positions * w / (2 * M_PI);
        check(low < high, "rope_frequencies: low_freq_factor = ", low, " is not below high_freq_factor = ", high);
        return std::clamp((turns - low) / (high - low), 0.0, 1.0);
    }
    const double fast = scaling.beta_fast, slow = scaling.beta_slow, n = static_cast<double>(D);
    check(0 < slow && slow < fast, "rope_frequencies: beta_slow = ", slow, " is not below beta_fast = ", fast);
    // The number i of the point (a real number) that makes this number of turns: positions base^(-2i/D) = 2 pi turns.
    const auto point = [&](double turns) {
        return n * std::log(positions / (turns * 2 * M_PI)) / (2 * std::log(base));
    };
    const double first = std::max(std::floor(point(fast)), 0.0), last = std::min(std::ceil(point(slow)), n - 1);
    // If all points are fast, or all slow, the first may lie behind the last. Then YaRN's authors and transformers take
    // fast for slow, or slow for fast: models are trained so.
    const double length = first == last ? 0.001 : last - first;
    return 1 - std::clamp((static_cast<double>(i) - first) / length, 0.0, 1.0);
}

// The factor by which dynamic scaling multiplies the base for a sequence of T tokens.
double base_growth(int64_t D, int64_t T, const RopeScaling& scaling) {
    const int64_t P = scaling.original_max_position;
    if (scaling.kind != RopeKind::dynamic || T <= P) return 1;
    check(D > 2, "rope_frequencies: dynamic scaling needs a head size above 2, not ", D);
    const double growth = scaling.factor * static_cast<double>(T) / static_cast<double>(P) - (scaling.factor - 1);
    return std::pow(growth, static_cast<double>(D) / static_cast<double>(D - 2));
}

double yarn_mscale(double factor, double m) { return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1; }

}  // namespace

std::vector<double> rope_frequencies(int64_t D, double base, const RopeScaling& scaling, int64_t T) {
    check(D > 0 && D % 2 == 0, "rope_frequencies: head size D = ", D, " is not even: it is made of pairs");
    check(base > 0, "rope_frequencies: base = ", base, " is not positive");
    check(scaling.factor > 0, "rope_frequencies: scaling factor = ", scaling.factor, " is not positive");
    base *= base_growth(D, T, scaling);
    const bool mixes = scaling.factor != 1.0 && scaling.kind != RopeKind::dynamic;
    std::vector<double> frequencies(static_cast<size_t>(D / 2));
    for (int64_t i = 0; i < D / 2; ++i) {
        double& w = frequencies[static_cast<size_t>(i)];
        w = std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(D));
        if (!mixes) continue;
        const double a = kept_share(i, w, D, base, scaling);
        w *= (1 - a) / scaling.factor + a;
    }
    return frequencies;
}

double rope_amplitude(const RopeScaling& s) {
    if (s.attention_factor != 0) return s.attention_factor;
    if (s.factor == 1.0 || s.kind != RopeKind::yarn) return 1.0;
    if (s.mscale == 0 || s.mscale_all_dim == 0) return yarn_mscale(s.factor, 1.0);
    return yarn_mscale(s.factor, s.mscale) / yarn_mscale(s.factor, s.mscale_all_dim);
}

double rope_softmax_factor(const RopeScaling& s) {
    if (s.factor == 1.0 || s.kind != RopeKind::yarn || s.mscale_all_dim == 0) return 1.0;
    return yarn_mscale(s.factor, s.mscale_all_dim) * yarn_mscale(s.factor, s.mscale_all_dim);
}

// Angles reach thousands of radians, where a float has only three digits after the decimal point: so they are computed
// in double.
void rope_table(Tensor table, const std::vector<double>& frequencies, double amplitude) {
    const int64_t half = static_cast<int64_t>(frequencies.size()), D = 2 * half;
    expect("rope_table", "table", table, DType::f32, {-1, D});
    std::vector<float> values(static_cast<size_t>(table.n()));
    for (int64_t t = 0; t < table.shape[0]; ++t)
        for (int64_t i = 0; i < half; ++i) {
            const double angle = static_cast<double>(t) * frequencies[static_cast<size_t>(i)];
            values[static_cast<size_t>(t * D + i)] = static_cast<float>(amplitude * std::cos(angle));
            values[static_cast<size_t>(t * D + half + i)] = static_cast<float>(amplitude * std::sin(angle));
        }
    copy_to_device(table, values.data());
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Kernel. Block (t, b, group of heads); threadIdx.y is the head in the group, threadIdx.x the chunk of kN points of it.
// A thread reads and writes its own points only, so the rotation can be done in place.

template <int kN>
__device__ __forceinline__ void turn(float& x1, float& x2, const float (&c)[kN], const float (&s)[kN], int l,
                                     float direction) {
    rotate_point(x1, x2, c[l], direction * s[l]);
}

// A chunk of points' numbers. (g++ widens 16 numbers of 16 bits in halves and then reads them as a whole, before the
// CPU has stored them: in heads of 32 columns that takes as long as all the rest. It is not done in load_chunk because
// g++ 12 makes other code where <immintrin.h> is included: with AVX2 AdamW in bf16 then takes 2.7 times as long.)
template <int kN, class Number>
__device__ __forceinline__ void load_points(float (&x)[kN], const Number* from, int64_t n_left) {
#if defined(CUDA_ON_CPU) && !defined(GPU_CHUNKS)
    if constexpr (kN == cuda_cpu::width && requires { cuda_cpu::load(from); })
        if (n_left >= kN) return cuda_cpu::store(x, cuda_cpu::load(from));
#endif
    load_chunk(x, from, n_left);
}

template <class Number, int kN, bool kNeighbours>
__global__ void rope_kernel(Number* heads, const int32_t* positions, const float* table, int64_t n_positions,
                            int n_heads, int64_t token_stride, int64_t head_stride, int64_t D, float direction) {
    const int head = blockIdx.z * blockDim.y + threadIdx.y;
    const int64_t half = D / 2, i = static_cast<int64_t>(threadIdx.x) * kN, n_left = half - i;
    if (head >= n_heads || n_left <= 0) return;
    const int64_t t = blockIdx.x, token = static_cast<int64_t>(blockIdx.y) * gridDim.x + t;
    Number* point = heads + token * token_stride + head * head_stride;
    const int64_t position = positions ? positions[token] : t;
    if (position < 0 || position >= n_positions) __trap();
    // A row of the table has the cosines of all points, then their sines.
    const float* cosines = table + position * D + i;
    float c[kN], s[kN];
    load_chunk(c, cosines, n_left);
    load_chunk(s, cosines + half, n_left);
    // A point's two numbers are neighbours (one load) or D/2 apart (two loads).
    if constexpr (kNeighbours) {
        float x[2 * kN];
        load_chunk(x, point + 2 * i, 2 * n_left);
        for (int l = 0; l < kN; ++l) turn(x[2 * l], x[2 * l + 1], c, s, l, direction);
        store_chunk(point + 2 * i, x, 2 * n_left);
    } else {
        float x1[kN], x2[kN];
        load_points(x1, point + i, n_left);
        load_points(x2, point + i + half, n_left);
        for (int l = 0; l < kN; ++l) turn(x1[l], x2[l], c, s, l, direction);
        store_chunk(point + i, x1, n_left);
        store_chunk(point + i + half, x2, n_left);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

void rotate(const char* operation, const char* argument, const HeadColumns& heads, RopePairs pairs, Tensor positions,
            Tensor table, float direction, cudaStream_t stream) {
    const Tensor& rows = heads.rows;
    expect(operation, argument, rows, rows.dtype, {-1, -1, -1});
    const int64_t B = rows.shape[0], T = rows.shape[1], columns = rows.shape[2], D = heads.D, half = D / 2;
    check(heads.count > 0 && D > 0 && D % 2 == 0, operation, ": ", argument, " has ", heads.count, " heads of ", D,
          " columns, expected an even number of columns");
    expect_heads(operation, argument, heads, rows.dtype, B, T, heads.count, D);
    expect(operation, "table", table, DType::f32, {-1, D});
    if (positions) expect(operation, "positions", positions, DType::i32, {B, T});
    check(positions || table.shape[0] >= T, operation, ": table is ", table, ", expected a row for each of T = ", T,
          " positions");
    expect_aligned(operation, {{argument, rows}});
    if (B * T == 0) return;
    // Packed loads need every head, and each half of it, on a whole number of chunks. (So are the table's rows then.)
    int64_t chunk_columns = std::gcd(std::gcd(half, heads.column), std::gcd(heads.head_stride(), columns));
    if (!is_aligned(table.data, 16)) chunk_columns = 1;
    const auto launch = [&](auto chunk) {
        using Number = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const HeadLaunch to = head_launch(B, T, heads.count, ceil_div(half, kN));
        Number* first = rows.ptr<Number>() + heads.column;
        const int32_t* its_positions = positions.ptr_or_null<int32_t>();
        const int n_heads = narrow(heads.count, "heads");
        if (pairs == RopePairs::neighbours)
            rope_kernel<Number, kN, true><<<to.grid, to.block, 0, stream>>>(first, its_positions, table.ptr<float>(),
                                                                            table.shape[0], n_heads, columns,
                                                                            heads.head_stride(), D, direction);
        else
            rope_kernel<Number, kN, false><<<to.grid, to.block, 0, stream>>>(first, its_positions, table.ptr<float>(),
                                                                             table.shape[0], n_heads, columns,
                                                                             heads.head_stride(), D, direction);
        // With positions of their own, tokens may read fewer rows of the table.
        const Tensor angles = table.slice(0, positions ? std::min(table.shape[0], B * T) : T);
        launched("rope_kernel", {.reads = bytes_of(heads, positions, angles),
                                 .writes = bytes_of(heads),
                                 .flops = 3.0 * static_cast<double>(B * T * heads.count * D)});
    };
    // A small head would fill half of a CPU chunk, and take three times as long. (Not neighbours: of 16 rounds of
    // theirs g++ 12 makes fused multiply-adds, in spite of -ffp-contract=off. rope and paged_write must round alike.)
    if constexpr (kOnCpu)
        if (half <= 16 && pairs != RopePairs::neighbours)
            return dispatch(rows.dtype, [&](auto zero) { launch(Chunk<decltype(zero), 16>{}); });
    dispatch_chunks(rows.dtype, chunk_columns, launch);
}

// The first H + K of the H + 2K heads: the others are values.
HeadColumns rotated_heads(const char* operation, const char* argument, Tensor qkv, int64_t H, int64_t K) {
    check(H > 0 && K > 0 && H % K == 0, operation, ": H = ", H, " query heads are not a multiple of K = ", K,
          " key heads");
    expect(operation, argument, qkv, qkv.dtype, {-1, -1, -1});
    const int64_t n_heads = H + 2 * K, D = qkv.shape[2] / n_heads;
    check(qkv.shape[2] == n_heads * D && D % 2 == 0 && D > 0, operation, ": ", argument, " has ", qkv.shape[2],
          " columns, expected (H + 2K) D = ", n_heads, " D with an even D");
    return {qkv, H + K, D};
}

}  // namespace

void rope_forward(const HeadColumns& heads, RopePairs pairs, Tensor positions, Tensor table, cudaStream_t stream) {
    rotate("rope_forward", "heads", heads, pairs, positions, table, 1.0f, stream);
}
void rope_backward(const HeadColumns& dheads, RopePairs pairs, Tensor positions, Tensor table, cudaStream_t stream) {
    rotate("rope_backward", "dheads", dheads, pairs, positions, table, -1.0f, stream);
}
void rope_forward(Tensor qkv, Tensor positions, Tensor table, int64_t H, int64_t K, cudaStream_t stream) {
    const HeadColumns heads = rotated_heads("rope_forward", "qkv", qkv, H, K);
    rotate("rope_forward", "qkv", heads, RopePairs::halves, positions, table, 1.0f, stream);
}
void rope_backward(Tensor dqkv, Tensor positions, Tensor table, int64_t H, int64_t K, cudaStream_t stream) {
    const HeadColumns heads = rotated_heads("rope_backward", "dqkv", dqkv, H, K);
    rotate("rope_backward", "dqkv", heads, RopePairs::halves, positions, table, -1.0f, stream);
}
