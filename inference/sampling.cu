// Sampling on the host: from options and tokens to the tables that the kernels read (layers/sampling.cu), and back.
//
// A step brings one table to the device (a rule for each row, and adjustments of single logits) and launches the
// kernels. What they find, a few numbers a row, they write to pinned memory, where the host reads it: a copy would be
// one more thing to wait for.
#include "inference/inference.h"
#include "layers/decode.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace {

SamplingRule rule_of(const SamplingRow& row, int64_t V) {
    const SamplingOptions& options = *row.options;
    SamplingRule rule;
    rule.seed = options.seed, rule.sample = row.sample, rule.position = static_cast<uint64_t>(row.position);
    rule.n_top = static_cast<int32_t>(std::min(options.logprobs, V));
    rule.given = row.given;
    rule.repetition = static_cast<float>(options.repetition_penalty);
    rule.presence = static_cast<float>(options.presence_penalty);
    rule.frequency = static_cast<float>(options.frequency_penalty);
    if (options.temperature == 0) return rule;
    rule.inverse_temperature = static_cast<float>(1 / options.temperature);
    rule.top_k = static_cast<int32_t>(std::min(options.top_k, V));
    rule.top_p = options.top_p;
    rule.log_min_p = static_cast<float>(std::log(options.min_p));
    return rule;
}

bool has_penalties(const SamplingOptions& o) {
    return o.repetition_penalty != 1 || o.presence_penalty != 0 || o.frequency_penalty != 0;
}

// [token | log-probability | top tokens | their log-probabilities]: layers.h
int64_t result_columns(int64_t n_top) { return 2 + 2 * std::max<int64_t>(n_top, 0); }

}  // namespace

const std::vector<SamplingNumber>& sampling_numbers() {
    using Options = SamplingOptions;
    // Comparisons are written so that NaN is outside.
    constexpr auto at_most_100 = [](double x) { return std::abs(x) <= 100; };
    static const std::vector<SamplingNumber> table = {
        {"temperature", &Options::temperature, [](double x) { return x == 0 || (x >= 1e-6 && x <= 1e6); },
         "0 (the most probable token) or from 1e-6 to 1e6", "divides the logits; 0: always the most probable token"},
        {"top_p", &Options::top_p, [](double x) { return x > 0 && x <= 1; }, "above 0 and at most 1 (all tokens)",
         "only the most probable tokens that together have this probability"},
        {"min_p", &Options::min_p, [](double x) { return x >= 0 && x <= 1; }, "from 0 (all tokens) to 1",
         "only tokens with at least this fraction of the most probable one's probability"},
        {"repetition_penalty", &Options::repetition_penalty, [](double x) { return x >= 0.01 && x <= 100; },
         "from 0.01 to 100 (1: none)", "above 1: tokens seen before become less probable"},
        {"presence_penalty", &Options::presence_penalty, at_most_100, "from -100 to 100",
         "subtracted from the logits of tokens that the answer has"},
        {"frequency_penalty", &Options::frequency_penalty, at_most_100, "from -100 to 100",
         "the same, for each time that the answer has them"},
    };
    return table;
}

void check_sampling(const SamplingOptions& o, int64_t V) {
    check(V <= kMostSampledTokens, "the model has ", V, " tokens, and at most ", kMostSampledTokens,
          " can be sampled from");
    for (const SamplingNumber& number : sampling_numbers())
        check(number.is_valid(o.*number.value), number.name, " is ", o.*number.value, "; it must be ", number.range);
    check(o.top_k >= 0, "top_k is ", o.top_k, "; it must be 0 (all tokens) or more");
    check(o.logprobs >= -1 && o.logprobs <= kMostLogprobs, "logprobs is ", o.logprobs, "; it must be from 0 to ",
          kMostLogprobs, ", or -1 (none)");
    for (const auto& [token, bias] : o.logit_bias) {
        check(token >= 0 && token < V, "logit_bias names token ", token, ", but the model's tokens are 0 to ", V - 1);
        check(std::abs(bias) <= 100 || bias == -INFINITY, "logit_bias of token ", token, " is ", bias,
              "; it must be from -100 to 100");
    }
}

void Sampler::take_memory(int64_t max_rows, int64_t V, Arena& device, Arena& pinned) {
    V_ = V, max_rows_ = max_rows;
    // A row has at most V adjustments. Rows whose adjustments have no room together are drawn by several launches.
    const int64_t tables_n = max_rows * kStructN<SamplingRule> + V * kStructN<LogitAdjustment>;
    const int64_t results_n = max_rows * (2 + 2 * kMostTop);
    host_tables_ = pinned.take("sampling", DType::i32, {tables_n});
    results_ = pinned.take("sampling", DType::i32, {results_n});
    tables_ = device.take("sampling", DType::i32, {tables_n});
    x_ = device.take("sampling", DType::f32, {max_rows, sampling_columns(V)});
    distributions_ = device.take("sampling", DType::i32, {max_rows, kStructN<SamplingDistribution>});
    rules_.reserve(static_cast<size_t>(max_rows));
    adjustments_.reserve(static_cast<size_t>(V));
    places_.assign(static_cast<size_t>(V), -1);
}

std::vector<Sampled> Sampler::draw(Tensor logits, std::span<const SamplingRow> rows, cudaStream_t stream) {
    expect("Sampler", "logits", logits, logits.dtype, {std::ssize(rows), -1});
    check(std::ssize(rows) <= max_rows_, "Sampler: ", rows.size(), " rows, memory for ", max_rows_);
    std::vector<Sampled> sampled;
    while (sampled.size() < rows.size()) {
        const size_t first = sampled.size();
        rules_.clear(), adjustments_.clear(), n_top_ = -1;
        for (const SamplingRow& row : rows.subspan(first)) {
            if (adjustments_.size() + most_adjustments(row) > places_.size()) break;
            add_rule(row);
        }
        launch(logits.slice(static_cast<int64_t>(first), std::ssize(rules_)), stream);
        for (size_t row = 0; row < rules_.size(); ++row) sampled.push_back(result(row));
    }
    return sampled;
}

size_t Sampler::most_adjustments(const SamplingRow& row) const {
    const SamplingOptions& o = *row.options;
    size_t n = o.logit_bias.size();
    if (o.repetition_penalty != 1) n += row.prompt.size();
    if (has_penalties(o)) n += row.answer.size();
    return std::min(n, places_.size());
}

void Sampler::add_rule(const SamplingRow& row) {
    const SamplingOptions& o = *row.options;
    SamplingRule rule = rule_of(row, V_);
    rule.first_adjustment = static_cast<int32_t>(adjustments_.size());
    const auto of_token = [&](int32_t token) -> LogitAdjustment& {
        check(token >= 0 && token < V_, "Sampler: token ", token, " is outside of the vocabulary of ", V_);
        int32_t& place = places_[static_cast<size_t>(token)];
        if (place < 0) {
            place = static_cast<int32_t>(adjustments_.size());
            adjustments_.push_back({.token = token});
        }
        return adjustments_[static_cast<size_t>(place)];
    };
    for (const auto& [token, bias] : o.logit_bias) of_token(token).bias += static_cast<float>(bias);
    if (o.repetition_penalty != 1)
        for (int32_t token : row.prompt) of_token(token).is_seen = 1;
    if (has_penalties(o))
        for (int32_t token : row.answer) {
            LogitAdjustment& adjustment = of_token(token);
            adjustment.is_seen = 1;
            adjustment.n_times += 1;
        }
    rule.n_adjustments = static_cast<int32_t>(adjustments_.size()) - rule.first_adjustment;
    for (size_t i = static_cast<size_t>(rule.first_adjustment); i < adjustments_.size(); ++i)
        places_[static_cast<size_t>(adjustments_[i].token)] = -1;
    rules_.push_back(rule);
    n_top_ = std::max<int64_t>(n_top_, rule.n_top);
}

// The tables to the device, and the kernels.
void Sampler::launch(Tensor logits, cudaStream_t stream) {
    const int64_t rows = logits.shape[0];
    const Tensor x = x_.slice(0, rows), distributions = distributions_.slice(0, rows);
    int64_t n = 0;  // elements of the tables so far
    const auto place = [&](const auto& structs) {
        using Struct = typename std::decay_t<decltype(structs)>::value_type;
        const int64_t count = std::ssize(structs), first = n;
        n += count * kStructN<Struct>;
        if (count > 0) std::memcpy(host_tables_.ptr<int32_t>() + first, structs.data(), count * sizeof(Struct));
        return tables_.slice(first, n - first).view({count, kStructN<Struct>});
    };
    const Tensor rules = place(rules_), adjustments = place(adjustments_);
    upload_tables({tables_.ptr<int32_t>(), host_tables_.ptr<int32_t>(), n}, {}, stream);

    const Tensor results = results_.slice(0, rows * result_columns(n_top_)).view({rows, result_columns(n_top_)});
    adjust_logits(x, logits, rules, adjustments, V_, stream);
    sampling_distributions(distributions, x, rules, stream);
    draw_tokens(results, x, distributions, rules, stream);
    if (n_top_ >= 0) log_probabilities(results, logits, rules, V_, stream);
    cudaCheck(cudaStreamSynchronize(stream));
}

Sampled Sampler::result(size_t row) const {
    const int32_t* numbers = results_.ptr<int32_t>() + static_cast<int64_t>(row) * result_columns(n_top_);
    const auto logprob = [&](int64_t column) { return std::bit_cast<float>(numbers[column]); };
    Sampled sampled{numbers[0], 0, {}};
    const int64_t n_top = rules_[row].n_top;
    if (n_top >= 0) sampled.logprob = logprob(1);
    for (int64_t i = 0; i < n_top; ++i) sampled.top.push_back({numbers[2 + i], logprob(2 + n_top_ + i)});
    return sampled;
}
