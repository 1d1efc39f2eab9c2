// Sampling, the second half: a token from the distribution of a row (layers/sampling.cu).
//
// As a plain loop:
//
//   for v < V:  score[v] = v is kept ? (x[v] - max) / temperature - log(E[v]) : -infinity
//   token = the first of the largest scores
//
// E[v] = -log(1 - u[v]) are exponential random numbers of mean 1, so that E[v] / w[v], w[v] = exp((x[v] - max) /
// temperature), is one of mean 1 / w[v]: a clock that rings w[v] times in a unit of time. The largest score is the
// clock that rings first, and of all the rings w[v] / (sum of w) are v's: that is the probability of token v. No sum
// over the row is needed, and no second pass. (Known as Gumbel-max: Maddison et al. 2014, arXiv:1411.0030.)
//
// A number for each token, where one for all would do: if the distribution changes a little, the scores do, and mostly
// the same one is the largest. Two distributions p and q with the same numbers give the same token with probability
//
//   sum over v of 1 / (sum over w of max(p[w] / p[v], q[w] / q[v]))  >=  (1 - D) / (1 + D),   D = sum of |p - q| / 2
//
// (Daliri, Musco & Suresh 2025, arXiv:2408.07978.) Speculative decoding relies on that (inference/speculation.cu). With
// a single number, and tokens in a row, each as wide as it is probable, one wider token would shift all that follow it.
#include "layers/sampling.cuh"
#include "layers/softmax.cuh"  // Larger

namespace {

constexpr float kLargestNoise = 23;  // -log E of the smallest u, 2^-33, is 22.9

// u is at most the largest float below 1, so that E is finite.
__device__ __forceinline__ float uniform_below_one(uint32_t bits) {
    return fminf((static_cast<float>(bits) + 0.5f) * 0x1p-32f, 0x1.fffffep-1f);
}

// The scores of tokens v to v + 3, of which the largest becomes `best` if it is larger.
__device__ __forceinline__ void draw_quad(float& best, int& token, const float* x, int v,
                                          const SamplingDistribution& its, const SamplingRule& rule) {
    float score[4], largest = -INFINITY;
    for (int i = 0; i < 4; ++i) {
        const float d = (x[i] - its.max) * its.inverse_temperature;
        score[i] = x[i] >= its.threshold && d >= its.log_min_p ? d : -INFINITY;
        largest = fmaxf(largest, score[i]);
    }
    if (largest + kLargestNoise <= best) return;  // whatever the noise is
    if (its.inverse_temperature != 0) {
        const Philox bits = philox(rule.seed, rule.sample, rule.position | static_cast<uint64_t>(v / 4) << 40);
        // Mostly no logarithm is needed. E >= u, so that score - log E > best needs u < exp(score - best): four random
        // numbers of which the smallest is larger, by more than what is rounded, change nothing.
        const uint32_t smallest = min(min(bits.v[0], bits.v[1]), min(bits.v[2], bits.v[3]));
        if (uniform_below_one(smallest) > 1.001f * expf(largest - best)) return;
        for (int i = 0; i < 4; ++i) score[i] -= logf(-log1pf(-uniform_below_one(bits.v[i])));
    }
    for (int i = 0; i < 4; ++i)
        if (score[i] > best) best = score[i], token = v + i;
}

constexpr int kDrawThreads = kOnCpu ? 1 : 1024, kAhead = kOnCpu ? 1 : 4;  // of the block that has a row

__global__ void __launch_bounds__(kDrawThreads)
    draw_kernel(int* results, const float* x_rows, const SamplingDistribution* distributions, const SamplingRule* rules,
                int columns, int result_columns) {
    __shared__ uint64_t scratch[kWarp];
    let_next_start();
    wait_for_previous();
    const int64_t row = blockIdx.x;
    const float* x_row = x_rows + row * columns;
    const SamplingDistribution its = distributions[row];
    const SamplingRule& rule = rules[row];
    float best = -INFINITY;  // of this thread's tokens
    int token = -1;
    constexpr int kStride = kDrawThreads * kN;
    for (int v = static_cast<int>(threadIdx.x) * kN; its.is_valid && v < columns; v += kAhead * kStride) {
        float x[kAhead][kN];
        load_ahead<kDrawThreads>(x, x_row, v, columns);
#pragma unroll  // otherwise nvcc keeps x in memory
        for (int k = 0; k < kAhead; ++k) {
            const float largest = fold_chunk<Larger>(x[k]);  // its score is the largest of the chunk
            if (largest < its.threshold) continue;
            if ((largest - its.max) * its.inverse_temperature + kLargestNoise <= best) continue;
            for (int q = 0; q < kN; q += 4) draw_quad(best, token, &x[k][q], v + k * kStride + q, its, rule);
        }
    }
    const uint64_t key = team_largest<kDrawThreads>(token < 0 ? 0 : token_key(best, token), scratch);
    if (threadIdx.x > 0) return;
    const int drawn = key == 0 ? -1 : token_of(key);
    results[row * result_columns] = its.is_valid && rule.given >= 0 ? rule.given : drawn;
}

}  // namespace

void draw_tokens(Tensor results, Tensor x, Tensor distributions, Tensor rules, cudaStream_t stream) {
    const int64_t rows = expect_rows("draw_tokens", x, distributions, rules);
    expect("draw_tokens", "results", results, DType::i32, {rows, -1});
    check(results.shape[1] >= 1, "draw_tokens: results is ", results, ", expected a column for the token");
    if (rows == 0) return;
    EarlyLaunch(static_cast<unsigned>(rows), kDrawThreads, 0, stream)(
        "draw_kernel", draw_kernel, results.ptr<int>(), x.ptr<float>(), structs<SamplingDistribution>(distributions),
        structs<SamplingRule>(rules), static_cast<int>(x.shape[1]), narrow(results.shape[1], "columns of results"));
    launched("draw_kernel", {.reads = bytes_of(x, distributions, rules),
                             .writes = rows * int64_t{sizeof(int)},
                             .flops = 2.0 * static_cast<double>(x.n())});
}
