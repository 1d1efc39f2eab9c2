// RoPE: rotary position embedding.                                              (Su et al. 2021, arXiv:2104.09864)
//
// A head's D numbers are D/2 points of the plane, (x_i, x_{i+D/2}); at position t point i is rotated by the angle t w_i.
//
//   forward     y1 = x1 cos - x2 sin               w_i = base^(-2i/D): from one radian a token (i = 0) down to 1/base
//               y2 = x2 cos + x1 sin
//   backward    dx1 = dy1 cos + dy2 sin            a rotation's inverse and its transpose are the rotation back:
//               dx2 = dy2 cos - dy1 sin            the same kernel with -sin
//
// Queries and keys are rotated, values are not. Two rotated vectors at t and s have the dot product that they would have at
// t - s and 0: attention sees distances instead of positions.
//
// Hugging Face lays LLaMA out so that a point's two numbers are D/2 apart; Meta's own files and the paper have them side by
// side. The two differ by a fixed order of the rows of the query and key weights.
//
// Long contexts (llama3 scaling, transformers' modeling_rope_utils.py): a model that was trained on P positions has never
// seen the slow points turn once. With wavelength = 2 pi / w and turns = P / wavelength, the turns made in training:
//
//   turns > high_freq_factor     w         fast points tell neighbours apart: unchanged
//   turns < low_freq_factor      w/factor  slow points: `factor` times the positions, the same angles
//   between                      (1 - a) w/factor + a w,      a = (turns - low) / (high - low)
#include "layers/chunk.cuh"
#include "layers/layers.h"

#include <cmath>

// ---------------------------------------------------------------------------------------------------------------------
// The table, on the host

std::vector<double> rope_frequencies(int64_t D, double base, const RopeScaling& scaling) {
    check(D > 0 && D % 2 == 0, "rope_frequencies: head size D = ", D, " is not even: it is made of pairs");
    check(base > 0, "rope_frequencies: base = ", base, " is not positive");
    const double factor = scaling.factor, low = scaling.low_freq_factor, high = scaling.high_freq_factor;
    check(factor > 0, "rope_frequencies: scaling factor = ", factor, " is not positive");
    std::vector<double> frequencies(static_cast<size_t>(D / 2));
    for (int64_t i = 0; i < D / 2; ++i) {
        double& w = frequencies[static_cast<size_t>(i)];
        w = std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(D));
        if (factor == 1.0) continue;
        check(low < high, "rope_frequencies: low_freq_factor = ", low, " is not below high_freq_factor = ", high);
        const double turns = static_cast<double>(scaling.original_max_position) * w / (2 * M_PI);
        if (turns < low)
            w /= factor;
        else if (turns <= high)
            w *= (1 - (turns - low) / (high - low)) / factor + (turns - low) / (high - low);
    }
    return frequencies;
}

// Angles grow to thousands of radians, where a float knows only three digits behind the point: they are computed in double.
void rope_table(Tensor table, const std::vector<double>& frequencies) {
    const int64_t half = static_cast<int64_t>(frequencies.size()), D = 2 * half;
    expect("rope_table", "table", table, DType::f32, {-1, D});
    std::vector<float> values(static_cast<size_t>(table.n()));
    for (int64_t t = 0; t < table.shape[0]; ++t)
        for (int64_t i = 0; i < half; ++i) {
            const double angle = static_cast<double>(t) * frequencies[static_cast<size_t>(i)];
            values[static_cast<size_t>(t * D + i)] = static_cast<float>(std::cos(angle));
            values[static_cast<size_t>(t * D + half + i)] = static_cast<float>(std::sin(angle));
        }
    copy_to_device(table, values.data());
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Kernel. Block (t, b, group of heads); threadIdx.y is the head in the group, threadIdx.x the chunk of kN points of it.
// A thread reads and writes its own points only: in place.

template <class Number, int kN>
__global__ void rope_kernel(Number* qkv, const float* table, int n_rotated, int n_heads, int64_t D, float direction) {
    const int head = blockIdx.z * blockDim.y + threadIdx.y;
    const int64_t half = D / 2, i = static_cast<int64_t>(threadIdx.x) * kN, n_left = half - i;
    if (head >= n_rotated || n_left <= 0) return;  // the last n_heads - n_rotated heads are values
    const int64_t t = blockIdx.x, row = static_cast<int64_t>(blockIdx.y) * gridDim.x + t;
    Number* point = qkv + (row * n_heads + head) * D + i;
    const float* cosines = table + t * D + i;
    float x1[kN], x2[kN], c[kN], s[kN];
    load_chunk(x1, point, n_left);
    load_chunk(x2, point + half, n_left);
    load_chunk(c, cosines, n_left);
    load_chunk(s, cosines + half, n_left);
    for (int l = 0; l < kN; ++l) {
        const float sine = direction * s[l], y1 = x1[l] * c[l] - x2[l] * sine;
        x2[l] = x2[l] * c[l] + x1[l] * sine;
        x1[l] = y1;
    }
    store_chunk(point, x1, n_left);
    store_chunk(point + half, x2, n_left);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

void rotate(const char* operation, const char* argument, Tensor qkv, Tensor table, int64_t H, int64_t K, float direction,
            cudaStream_t stream) {
    check(H > 0 && K > 0 && H % K == 0, operation, ": H = ", H, " query heads are not a multiple of K = ", K, " key heads");
    expect(operation, argument, qkv, qkv.dtype, {-1, -1, -1});
    const int64_t B = qkv.shape[0], T = qkv.shape[1], n_heads = H + 2 * K, D = qkv.shape[2] / n_heads, half = D / 2;
    check(qkv.shape[2] == n_heads * D && D % 2 == 0 && D > 0, operation, ": ", argument, " has ", qkv.shape[2],
          " columns, expected (H + 2K) D = ", n_heads, " D with an even D");
    expect(operation, "table", table, DType::f32, {-1, D});
    check(table.shape[0] >= T, operation, ": table is ", table.describe(), ", expected a row for each of T = ", T, " positions");
    expect_aligned(operation, {{argument, qkv}, {"table", table}});
    dispatch_chunks(qkv.dtype, half, [&](auto chunk) {
        using Number = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const HeadLaunch to = head_launch(B, T, H + K, ceil_div(half, kN));
        rope_kernel<Number, kN><<<to.grid, to.block, 0, stream>>>(qkv.ptr<Number>(), table.ptr<float>(), narrow(H + K, "heads"),
                                                                  narrow(n_heads, "heads"), D, direction);
        cudaCheckLaunch();
    });
}

}  // namespace

void rope_forward(Tensor qkv, Tensor table, int64_t H, int64_t K, cudaStream_t stream) {
    rotate("rope_forward", "qkv", qkv, table, H, K, 1.0f, stream);
}
void rope_backward(Tensor dqkv, Tensor table, int64_t H, int64_t K, cudaStream_t stream) {
    rotate("rope_backward", "dqkv", dqkv, table, H, K, -1.0f, stream);
}
