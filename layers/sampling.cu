// Sampling, the first half: from a row of logits to the distribution that its token is drawn from.
//
// As plain loops, for each row:
//
//   for a in adjustments:  x[a.token] = adjusted(x[a.token])
//   keep the top_k largest x;  of those the fewest largest with probabilities that add up to top_p
//                                                           (both are: x >= threshold)
//   of those the ones with at least min_p of the largest probability
//
// Exact sums. Weights are integers, w = floor(2^44 exp((x - max) / temperature)), and sums of up to 2^18 fit into 63
// bits. Integers have no rounding, so the sum is the same in whatever order threads add. (exp(...) as a float32 has 24
// bits: down to 2^-20 nothing is cut off, and below that less than 2^-44 of the largest probability.)
//
// No sort. Thresholds are found digit by digit (radix selection). The bits of a float32 are made into an unsigned
// integer, the key, in the same order. The first pass adds up the mass (1 each for top_k, w for top_p) of the tokens by
// the highest digit of the key; from the top, the digit at which the goal is reached is the first digit of the
// threshold. The second pass does the same with the second digit, for tokens that begin with the first; and so on:
//
//   goal 5      digit              f  e  d  c  b  a ...     the threshold begins with c; of the goal 5 - 3 are left for
//               mass down to it    0  1  3  7  9 20 ...     the second digit, among the tokens that begin with c
#include "layers/sampling.cuh"

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Adjusted logits

constexpr int kPieceColumns = kOnCpu ? 1 << 18 : 2048;  // of a row, for a block: a GPU needs many that read

// Block (row, piece of it).
template <class T, int n>
__global__ void __launch_bounds__(kThreads)
    adjust_kernel(float* x_rows, const T* logits, const SamplingRule* rules, const LogitAdjustment* adjustments, int V,
                  int Vp, int columns) {
    let_next_start();
    wait_for_previous();
    const int64_t row = blockIdx.x;
    const int first = static_cast<int>(blockIdx.y) * kPieceColumns, end = min(first + kPieceColumns, columns);
    float* x_row = x_rows + row * columns;
    for (int v = first + static_cast<int>(threadIdx.x) * n; v < end; v += kThreads * n) {
        float x[n] = {};
        if (v < V) load_chunk(x, logits + row * Vp + v, Vp - v);
        for (int l = 0; l < n; ++l) x[l] = v + l < V ? x[l] : -INFINITY;
        store_chunk(x_row + v, x, columns - v);
    }
    team_barrier();  // the whole piece is in x
    const SamplingRule& rule = rules[row];
    for (int i = static_cast<int>(threadIdx.x); i < rule.n_adjustments; i += kThreads) {
        const LogitAdjustment& a = adjustments[rule.first_adjustment + i];
        if (a.token < first || a.token >= end) continue;
        float x = x_row[a.token] + a.bias;
        if (a.is_seen) x = x > 0 ? x / rule.repetition : x * rule.repetition;
        if (a.n_times > 0) x -= rule.presence + rule.frequency * static_cast<float>(a.n_times);
        x_row[a.token] = x;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights

// d = (x - max) / temperature <= 0
__device__ __forceinline__ uint64_t exponential_weight(float d) {
    return static_cast<uint64_t>(static_cast<int64_t>(__expf(d) * 0x1p44f));
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums of weights, in bins. A block has as many bins as a digit has values. Each thread adds into bins of its own,
// without atomics; then the threads' bins are added up. (On a GPU 4 bits a digit: bins of 256 threads take 32 KB.)

constexpr int kDigitBits = kOnCpu ? 8 : 4;
constexpr int kBins = 1 << kDigitBits;

struct Bins {
    uint64_t of_threads[kBins * kThreads];  // bin b of thread t is element b * kThreads + t
    uint64_t sums[kBins];                   // over the threads
};

// The whole block takes part. After it each thread may read sums, and write its own bins.
__device__ __forceinline__ void add_bins(Bins& bins) {
    if constexpr (kThreads == 1) {
        for (int b = 0; b < kBins; ++b) bins.sums[b] = bins.of_threads[b];
    } else {
        __syncthreads();  // all threads' bins are complete; the sums of the last time have been read
        const int lane = threadIdx.x % kWarp;
        for (int b = threadIdx.x / kWarp; b < kBins; b += kThreads / kWarp) {
            uint64_t sum = 0;
            for (int t = lane; t < kThreads; t += kWarp) sum += bins.of_threads[b * kThreads + t];
            for (int o = kWarp / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kFullWarp, sum, o);
            if (lane == 0) bins.sums[b] = sum;
        }
        __syncthreads();  // the sums are there
    }
}

__device__ __forceinline__ uint64_t sum_of_bins(const Bins& bins) {
    uint64_t sum = 0;
    for (int b = 0; b < kBins; ++b) sum += bins.sums[b];
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Thresholds

// Of the tokens with x >= lowest: the largest threshold at which the mass of those with x >= threshold is at least
// goal_of(mass of all).
template <class Mass, class Goal>
__device__ float select(const float* x_row, int columns, float lowest, const Mass& mass, const Goal& goal_of,
                        Bins& bins) {
    uint32_t found = 0, found_bits = 0;  // the digits of the threshold's key so far, and where they stand
    uint64_t above = 0, goal = 0;        // above: the mass of keys whose digits there are larger
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
        for (int b = 0; b < kBins; ++b) bins.of_threads[b * kThreads + static_cast<int>(threadIdx.x)] = 0;
        for (int v = static_cast<int>(threadIdx.x) * kN; v < columns; v += kThreads * kN) {
            float x[kN];
            uint32_t key[kN], is_in[kN], some = 0;
            load_chunk(x, x_row + v, kN);
            for (int l = 0; l < kN; ++l) {
                key[l] = key_of(x[l]);
                is_in[l] = static_cast<uint32_t>(x[l] >= lowest) & (((key[l] ^ found) & found_bits) == 0);
                some |= is_in[l];
            }
            if (!some) continue;
            uint64_t w[kN];
            for (int l = 0; l < kN; ++l) w[l] = is_in[l] ? mass(x[l]) : 0;
            for (int l = 0; l < kN; ++l) {
                const uint32_t digit = key[l] >> shift & (kBins - 1);
                bins.of_threads[digit * kThreads + threadIdx.x] += w[l];
            }
        }
        add_bins(bins);
        if (found_bits == 0) goal = goal_of(sum_of_bins(bins));
        uint32_t digit = kBins - 1;
        while (above + bins.sums[digit] < goal) above += bins.sums[digit--];
        found |= digit << shift;
        found_bits |= static_cast<uint32_t>(kBins - 1) << shift;
    }
    return float_of_key(found);
}

__global__ void __launch_bounds__(kThreads)
    distribution_kernel(SamplingDistribution* distributions, const float* x_rows, const SamplingRule* rules,
                        int columns) {
    __shared__ float scratch[kWarp];
    __shared__ Bins bins;
    let_next_start();
    wait_for_previous();
    const int64_t row = blockIdx.x;
    const float* x_row = x_rows + row * columns;
    const SamplingRule rule = rules[row];

    constexpr int kAhead = kOnCpu ? 1 : 16;
    float largest[kN];
    for (int l = 0; l < kN; ++l) largest[l] = -INFINITY;
    for (int v = static_cast<int>(threadIdx.x) * kN; v < columns; v += kAhead * kThreads * kN) {
        float x[kAhead][kN];
        load_ahead<kThreads>(x, x_row, v, columns);
        for (int k = 0; k < kAhead; ++k)
            for (int l = 0; l < kN; ++l) {
                const float number = x[k][l] == x[k][l] ? x[k][l] : INFINITY;  // NaN is as wrong as infinity
                largest[l] = largest[l] > number ? largest[l] : number;
            }
    }
    const float max = team_reduce<Max>(fold_chunk<Max>(largest), scratch);
    const bool is_valid = max > -INFINITY && max < INFINITY, is_greedy = rule.inverse_temperature == 0;
    SamplingDistribution result{max, rule.inverse_temperature, is_greedy ? max : -INFINITY,
                                is_greedy ? -INFINITY : rule.log_min_p, is_valid};
    if (is_valid && !is_greedy) {  // the whole block agrees
        if (rule.top_k > 0) {
            const auto count = [](float) { return uint64_t{1}; };
            const auto goal = [&](uint64_t all) { return min(all, static_cast<uint64_t>(rule.top_k)); };
            result.threshold = select(x_row, columns, result.threshold, count, goal, bins);
        }
        if (rule.top_p < 1) {
            const auto weight = [&](float x) { return exponential_weight((x - max) * rule.inverse_temperature); };
            const auto goal = [&](uint64_t all) {
                return min(all, static_cast<uint64_t>(ceil(rule.top_p * static_cast<double>(all))));
            };
            result.threshold = select(x_row, columns, result.threshold, weight, goal, bins);
        }
    }
    if (threadIdx.x == 0) distributions[row] = result;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

int64_t sampling_columns(int64_t V) { return round_up(V, 32); }

void adjust_logits(Tensor x, Tensor logits, Tensor rules, Tensor adjustments, int64_t V, cudaStream_t stream) {
    const char* operation = "adjust_logits";
    expect(operation, "logits", logits, logits.dtype, {-1, -1});
    const int64_t rows = logits.shape[0], Vp = logits.shape[1], columns = sampling_columns(V);
    check(V > 0 && V <= Vp, operation, ": V = ", V, " tokens do not fit in logits ", logits);
    check(V <= kMostSampledTokens, operation, ": V = ", V, " tokens; at most ", kMostSampledTokens,
          " can be sampled from");
    expect(operation, "x", x, DType::f32, {rows, columns});
    expect(operation, "rules", rules, DType::i32, {rows, kStructN<SamplingRule>});
    expect(operation, "adjustments", adjustments, DType::i32, {-1, kStructN<LogitAdjustment>});
    expect_aligned(operation, {{"x", x}});
    if (rows == 0) return;
    dispatch_chunks(logits.dtype, row_n_of_chunks(logits), [&](auto chunk) {
        using T = typename decltype(chunk)::Element;
        const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(columns, kPieceColumns)));
        EarlyLaunch(grid, kThreads, 0, stream)("adjust_kernel", adjust_kernel<T, decltype(chunk)::n>, x.ptr<float>(),
                                               logits.ptr<T>(), structs<SamplingRule>(rules),
                                               structs<LogitAdjustment>(adjustments), static_cast<int>(V),
                                               narrow(Vp, "columns of logits"), static_cast<int>(columns));
        const int64_t adjusted = adjustments.shape[0] * int64_t{sizeof(float)};  // of x: read when it has been written
        const int64_t token_bytes = bytes_of_tokens<T, decltype(chunk)::n>(logits, V);
        launched("adjust_kernel",
                 {.reads = token_bytes + bytes_of(rules, adjustments) + adjusted, .writes = bytes_of(x)});
    });
}

void sampling_distributions(Tensor distributions, Tensor x, Tensor rules, cudaStream_t stream) {
    const int64_t rows = expect_rows("sampling_distributions", x, distributions, rules);
    if (rows == 0) return;
    EarlyLaunch(static_cast<unsigned>(rows), kThreads, 0, stream)(
        "distribution_kernel", distribution_kernel, structs<SamplingDistribution>(distributions), x.ptr<float>(),
        structs<SamplingRule>(rules), static_cast<int>(x.shape[1]));
    launched("distribution_kernel", {.reads = bytes_of(x, rules), .writes = bytes_of(distributions)});
}
