// test/sampling.h: a Sampler with its memory, probabilities in float64, and comparisons of draws with them.
#pragma once

#include "inference/inference.h"
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace sampling_test {

struct TestSampler {
    Arena device_memory{"test", MemoryKind::device}, pinned{"test", MemoryKind::pinned};
    Sampler sampler;
    TestSampler(int64_t max_rows, int64_t V) {
        sampler.take_memory(max_rows, V, device_memory, pinned);
        device_memory.reserve(), pinned.reserve();
        sampler.take_memory(max_rows, V, device_memory, pinned);
    }
    std::vector<Sampled> draw(Tensor logits, const std::vector<SamplingRow>& rows) {
        return sampler.draw(logits, rows, device().stream);
    }
};

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// How far a score of the kernel, (x - max) / temperature - log E, may be from that below, without the part that is the
// same for all tokens. Adjustments round x, of size below 10 where it matters, three times, by 10 * 2^-24 each, which
// the temperature divides; two operations round the quotient, which is at most 23 below the largest, by 23 * 2^-24
// each; the logarithms, of size below 32, by 2 units of 32 * 2^-24. That is less than 200 * 2^-24 for temperatures from
// 0.5 on; the difference of two scores is off by twice that.
constexpr double kError = 400 * 0x1p-24;

// ---------------------------------------------------------------------------------------------------------------------
// The reference: probabilities of all tokens

inline std::vector<double> softmax(const std::vector<double>& x) {
    const double max = *std::max_element(x.begin(), x.end());
    std::vector<double> p;
    for (double number : x) p.push_back(std::exp(number - max));
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& number : p) number /= sum;
    return p;
}

// Keeps the x that are at least the n-th largest.
inline void keep_largest(std::vector<double>& x, size_t n) {
    std::vector<double> sorted = x;
    std::sort(sorted.rbegin(), sorted.rend());
    for (double& number : x)
        if (number < sorted[std::min(n, sorted.size()) - 1]) number = -kInfinity;
}

inline std::vector<double> adjusted(std::vector<double> x, const SamplingOptions& o, const std::vector<int32_t>& prompt,
                                    const std::vector<int32_t>& answer) {
    for (const auto& [token, bias] : o.logit_bias) x[static_cast<size_t>(token)] += bias;
    for (int32_t v = 0; v < std::ssize(x); ++v) {
        double& number = x[static_cast<size_t>(v)];
        const auto times = std::count(answer.begin(), answer.end(), v);
        if (times > 0 || std::count(prompt.begin(), prompt.end(), v) > 0)
            number = number > 0 ? number / o.repetition_penalty : number * o.repetition_penalty;
        if (times > 0) number -= o.presence_penalty + o.frequency_penalty * static_cast<double>(times);
    }
    return x;
}

// Of x without padding. Steps 3 to 6 of inference.h.
inline std::vector<double> probabilities(std::vector<double> x, const SamplingOptions& o) {
    for (double& number : x) number /= o.temperature;
    if (o.top_k > 0) keep_largest(x, static_cast<size_t>(o.top_k));
    if (o.top_p < 1) {
        std::vector<double> p = softmax(x);
        std::sort(p.rbegin(), p.rend());
        double sum = 0;
        size_t n = 0;
        while (sum < o.top_p) {
            sum += p[n++];
            // Otherwise rounding decides whether the next token is kept. This is no test, unless that is no matter.
            REQUIRE((std::abs(sum - o.top_p) > kError || p[n - 1] < 3 * kError));
        }
        keep_largest(x, n);
    }
    if (o.min_p > 0) {
        const std::vector<double> p = softmax(x);
        const double least = o.min_p * *std::max_element(p.begin(), p.end());
        for (size_t v = 0; v < x.size(); ++v) {
            REQUIRE((o.min_p == 1 || std::abs(p[v] - least) > 1e-6 * least));
            if (p[v] < least) x[v] = -kInfinity;
        }
    }
    return softmax(x);
}

struct Case {
    std::string name;
    SamplingOptions options;
    std::vector<int32_t> prompt = {}, answer = {};
};
inline SamplingOptions options(double temperature, int64_t top_k, double top_p, double min_p) {
    SamplingOptions o;
    o.temperature = temperature, o.top_k = top_k, o.top_p = top_p, o.min_p = min_p, o.seed = 17;
    return o;
}
inline SamplingOptions penalties(double repetition, double presence, double frequency) {
    SamplingOptions o = options(0.9, 0, 1, 0);
    o.repetition_penalty = repetition, o.presence_penalty = presence, o.frequency_penalty = frequency;
    return o;
}
inline SamplingOptions biased(std::vector<std::pair<int32_t, double>> bias) {
    SamplingOptions o = options(1.1, 0, 1, 0);
    o.logit_bias = std::move(bias);
    return o;
}

// Each option by itself, and combinations. Logits of the tests have ties, also at the 5th largest (below).
inline std::vector<Case> cases() {
    const std::vector<int32_t> prompt{3, 9, 9, 50}, answer{4, 4, 12, 3, 4};
    std::vector<Case> cases{{"plain", options(1, 0, 1, 0)},
                            {"temperature 0.6", options(0.6, 0, 1, 0)},
                            {"temperature 2.5", options(2.5, 0, 1, 0)},
                            {"top_k 5", options(1, 5, 1, 0)},
                            {"top_k above V", options(1, (int64_t{1} << 32) + 1, 1, 0)},
                            {"top_p 0.7", options(1, 0, 0.7, 0)},
                            {"min_p 0.07", options(1, 0, 1, 0.07)},
                            {"top_k, top_p", options(0.8, 9, 0.85, 0)},
                            {"all of them", options(1.3, 20, 0.9, 0.1)},
                            {"repetition 1.7", penalties(1.7, 0, 0), prompt, answer},
                            {"presence -2", penalties(1, -2, 0), prompt, answer},
                            {"frequency -0.8", penalties(1, 0, -0.8), prompt, answer},
                            {"three penalties", penalties(0.6, -0.5, 0.7), prompt, answer},
                            {"bias", biased({{0, -100}, {7, 3}, {8, -kInfinity}, {52, 2}, {7, -0.5}})}};
    cases.push_back(cases.back());
    cases.back().name = "bias, penalties and all of them";
    SamplingOptions& o = cases.back().options;
    o.top_k = 11, o.top_p = 0.8, o.min_p = 0.02, o.repetition_penalty = 1.2, o.presence_penalty = 0.3;
    cases.back().prompt = {7, 52, 1}, cases.back().answer = {7, 7, 2};
    return cases;
}

// Multiples of 1/2: many are equal.
inline std::vector<double> logits_with_ties(int64_t V, uint64_t seed) {
    std::vector<double> x = random_values(V, seed, 2.0);
    for (double& number : x) number = std::round(2 * number) / 2;
    return x;
}

// n rows of V logits with padding that nothing may look at.
inline std::vector<double> repeated(const std::vector<double>& row, int64_t n, int64_t padding) {
    std::vector<double> x;
    for (int64_t i = 0; i < n; ++i) {
        x.insert(x.end(), row.begin(), row.end());
        x.insert(x.end(), static_cast<size_t>(padding), i % 2 == 0 ? NAN : 1e4);
    }
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Comparisons

// counts[i] draws of outcome i against expected probabilities, by Pearson's chi-square. An outcome of probability 0
// must not be there. Outcomes that are expected less than 8 times are put together. A chi-square number of f degrees of
// freedom is above f + 2 sqrt(f t) + 2 t with probability at most exp(-t) (Laurent & Massart 2000). t = 16: one false
// alarm in 10^7.
inline void check_chi_square(const std::vector<int64_t>& counts, const std::vector<double>& expected,
                             const std::string& what) {
    REQUIRE(counts.size() == expected.size());
    const double n = static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    double statistic = 0, rare_count = 0, rare_expected = 0;
    int64_t n_classes = 0;
    const auto add_class = [&](double count, double mean) {
        statistic += (count - mean) * (count - mean) / mean;
        ++n_classes;
    };
    for (size_t i = 0; i < counts.size(); ++i) {
        const double count = static_cast<double>(counts[i]), mean = n * expected[i];
        if (expected[i] == 0) {
            INFO(what << ": outcome " << i << " has probability 0");
            CHECK(counts[i] == 0);
        } else if (mean < 8) {
            rare_count += count, rare_expected += mean;
        } else {
            add_class(count, mean);
        }
    }
    if (rare_expected >= 8) add_class(rare_count, rare_expected);
    const double f = static_cast<double>(n_classes - 1), t = 16, limit = f + 2 * std::sqrt(f * t) + 2 * t;
    INFO(what << ": chi-square " << statistic << " with " << f << " degrees of freedom, limit " << limit);
    CHECK(statistic <= limit);
}

// The tokens that were drawn, one by one, against expected probabilities p. The random numbers of a row are known, so
// the token is that with the largest log p[v] - log E[v] (layers.h); and each whose score is nearly as large is right.
inline void check_draws(const std::vector<Sampled>& sampled, const std::vector<SamplingRow>& rows,
                        const std::vector<double>& p, double error, const std::string& what) {
    int64_t n_wrong = 0, n_close = 0;
    for (size_t row = 0; row < rows.size(); ++row) {
        const SamplingRow& r = rows[row];
        const size_t token = static_cast<size_t>(sampled[row].token);
        double largest = -kInfinity, second = -kInfinity, its = -kInfinity;
        for (size_t v = 0; v < p.size(); ++v) {
            const uint64_t counter = static_cast<uint64_t>(r.position) | static_cast<uint64_t>(v / 4) << 40;
            const uint32_t random = philox(r.options->seed, r.sample, counter).v[v % 4];
            const double score = std::log(p[v]) - std::log(-std::log1p(-(random + 0.5) * 0x1p-32));
            if (v == token) its = score;
            second = std::max(second, std::min(score, largest));
            largest = std::max(largest, score);
        }
        n_close += second >= largest - error;
        n_wrong += !(its >= largest - error);
    }
    INFO(what << ": " << n_wrong << " of " << rows.size() << " tokens are wrong");
    CHECK(n_wrong == 0);
    CHECK(n_close <= std::ssize(rows) / 50);  // the others have one right answer
}

}  // namespace sampling_test
using namespace sampling_test;
