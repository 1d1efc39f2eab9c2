// Sampling, the second half: a token from the distribution of a row (layers/sampling.cu).
//
// As a plain loop:
//
//   target = random * sum of w;   for v < V:  { target -= w[v];  if (target < 0) return v; }
//
// and for a proposal d of a draft model with distribution q:
//
//   if (random * q[d] < p[d]) return d;   otherwise as above with w[v] = max(0, p[v] - q[v])
//
// The sum is not walked through: the row is cut into as many pieces as there are bins, which are added up at the same
// time; the piece in which the sum exceeds the target is cut again, until one chunk is left.
//
// Why an accepted or replaced proposal has distribution p: v is proposed and accepted with probability q[v] min(1,
// p[v] / q[v]) = min(p[v], q[v]). A rejection has probability 1 - sum of min(p, q) = sum of max(0, p - q), and then v
// is drawn with max(0, p[v] - q[v]) / that sum. Together min(p[v], q[v]) + max(0, p[v] - q[v]) = p[v].
#include "layers/sampling.cuh"

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// The draw

// A thread's part of the sum over a range of tokens, from its first chunk `start` on.
template <class Weights>
__device__ __forceinline__ uint64_t sum_of_weights(const Weights& weights, int start, int end) {
    if (start >= end) return 0;
    uint64_t sum[kN] = {}, w[kN];
    for (int v = start; v < end; v += kThreads * kN) {
        weights.load(w, v);
        for (int l = 0; l < kN; ++l) sum[l] += w[l];
    }
    for (int l = 1; l < kN; ++l) sum[0] += sum[l];
    return sum[0];
}

// The first token v at which the weights of the tokens up to v add up to more than random / 2^64 of all. -1: all are 0.
template <class Weights>
__device__ int find_token(const Weights& weights, int columns, uint64_t random, Bins& bins) {
    int first = 0, last = columns;    // the token is in [first, last), whole chunks
    uint64_t before = 0, target = 0;  // before: the weight of the tokens up to first
    do {
        const int piece = (last - first + kBins * kN - 1) / (kBins * kN) * kN;  // of a bin: whole chunks
        for (int b = 0; b < kBins; ++b) {
            const int start = first + b * piece + static_cast<int>(threadIdx.x) * kN;
            const int end = min(last, first + (b + 1) * piece);
            bins.of_threads[b * kThreads + static_cast<int>(threadIdx.x)] = sum_of_weights(weights, start, end);
        }
        add_bins(bins);
        if (last - first == columns) {
            const uint64_t all = sum_of_bins(bins);
            if (all == 0) return -1;
            target = static_cast<uint64_t>(static_cast<unsigned __int128>(random) * all >> 64);
        }
        int b = 0;
        while (before + bins.sums[b] <= target) before += bins.sums[b++];
        first += b * piece;
        last = min(last, first + piece);
    } while (last - first > kN);
    uint64_t w[kN];
    weights.load(w, first);
    int l = 0;
    while (before + w[l] <= target) before += w[l++];
    return first + l;
}

__device__ int draw_token(const RowWeights& weights, int columns, const SamplingRule& rule, Bins& bins) {
    if (!weights.distribution.is_valid) return -1;
    return find_token(weights, columns, weights.distribution.inverse_temperature > 0 ? rule.random : 0, bins);
}

__global__ void __launch_bounds__(kThreads)
    draw_kernel(int* results, const float* x_rows, const SamplingDistribution* distributions, const SamplingRule* rules,
                int columns, int result_columns) {
    __shared__ Bins bins;
    const int64_t row = blockIdx.x;
    const int token = draw_token({x_rows + row * columns, distributions[row]}, columns, rules[row], bins);
    if (threadIdx.x == 0) results[row * result_columns] = token;
}

// ---------------------------------------------------------------------------------------------------------------------
// Proposals

// 1 / the sum of the weights of a row. Only for rows that are valid: their largest x has weight 2^44.
__device__ double per_sum(const RowWeights& weights, int columns, Bins& bins) {
    for (int b = 0; b < kBins; ++b) bins.of_threads[b * kThreads + static_cast<int>(threadIdx.x)] = 0;
    bins.of_threads[threadIdx.x] = sum_of_weights(weights, static_cast<int>(threadIdx.x) * kN, columns);
    add_bins(bins);
    return 1 / static_cast<double>(sum_of_bins(bins));
}
__device__ double probability(const RowWeights& weights, double per_sum, int token) {
    uint64_t w[1];
    weights.load(w, token);
    return static_cast<double>(w[0]) * per_sum;
}

// max(0, p - q) in units of 2^-60: their sum is at most 2^60.
struct ResidualWeights {
    RowWeights target, draft;
    double per_target, per_draft;
    template <int n>
    __device__ __forceinline__ void load(uint64_t (&w)[n], int v) const {
        uint64_t p[n], q[n];
        target.load(p, v);
        draft.load(q, v);
        for (int l = 0; l < n; ++l) {
            const double difference = static_cast<double>(p[l]) * per_target - static_cast<double>(q[l]) * per_draft;
            w[l] = difference > 0 ? static_cast<uint64_t>(difference * 0x1p60) : 0;
        }
    }
};

__global__ void __launch_bounds__(kThreads)
    verify_kernel(int* results, const float* x_rows, const SamplingDistribution* distributions,
                  const SamplingRule* rules, const TokenProposal* proposals, const float* draft_x_rows,
                  const SamplingDistribution* draft_distributions, int columns, int result_columns) {
    __shared__ Bins bins;
    const int64_t row = blockIdx.x;
    const TokenProposal proposal = proposals[row];
    const RowWeights target{x_rows + row * columns, distributions[row]};
    int token = -1;
    // The whole block agrees, here and below. Greedy: the token does not depend on what was proposed.
    if (proposal.token >= 0 && target.distribution.is_valid && target.distribution.inverse_temperature > 0) {
        const RowWeights draft{draft_x_rows + static_cast<int64_t>(proposal.row) * columns,
                               draft_distributions[proposal.row]};
        const double per_target = per_sum(target, columns, bins);
        const double per_draft = per_sum(draft, columns, bins);
        const double p = probability(target, per_target, proposal.token);
        const double q = probability(draft, per_draft, proposal.token);
        if (static_cast<double>(proposal.random) * 0x1p-64 * q < p) {
            token = proposal.token;
        } else {
            token = find_token(ResidualWeights{target, draft, per_target, per_draft}, columns, rules[row].random, bins);
        }
    }
    // Also where a proposal was rejected though p and q differ by rounding alone.
    if (token < 0) token = draw_token(target, columns, rules[row], bins);
    if (threadIdx.x == 0) results[row * result_columns] = token;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

void draw_tokens(Tensor results, Tensor x, Tensor distributions, Tensor rules, cudaStream_t stream) {
    const int64_t rows = expect_rows("draw_tokens", x, distributions, rules);
    expect("draw_tokens", "results", results, DType::i32, {rows, -1});
    if (rows == 0) return;
    draw_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
        results.ptr<int>(), x.ptr<float>(), structs<SamplingDistribution>(distributions), structs<SamplingRule>(rules),
        static_cast<int>(x.shape[1]), narrow(results.shape[1], "columns of results"));
    cudaCheckLaunch();
}

void verify_proposals(Tensor results, Tensor x, Tensor distributions, Tensor rules, Tensor proposals, Tensor draft_x,
                      Tensor draft_distributions, cudaStream_t stream) {
    const char* operation = "verify_proposals";
    const int64_t rows = expect_rows(operation, x, distributions, rules), columns = x.shape[1];
    expect(operation, "results", results, DType::i32, {rows, -1});
    expect(operation, "proposals", proposals, DType::i32, {rows, kStructN<TokenProposal>});
    expect(operation, "draft_x", draft_x, DType::f32, {-1, columns});
    expect(operation, "draft_distributions", draft_distributions, DType::i32,
           {draft_x.shape[0], kStructN<SamplingDistribution>});
    expect_aligned(operation, {{"draft_x", draft_x}});
    if (rows == 0) return;
    verify_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
        results.ptr<int>(), x.ptr<float>(), structs<SamplingDistribution>(distributions), structs<SamplingRule>(rules),
        structs<TokenProposal>(proposals), draft_x.ptr<float>(), structs<SamplingDistribution>(draft_distributions),
        static_cast<int>(columns), narrow(results.shape[1], "columns of results"));
    cudaCheckLaunch();
}
