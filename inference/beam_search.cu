// Beam search on the host: from the most probable next tokens of k beams to the next k beams.
//
// As plain loops, a step:
//
//   for each beam b and token v:  candidates += (score[b] + log p_b[v], b, v)
//   sort candidates
//   of the first k candidates those that end:   answers += candidate, with score / length^length_penalty
//   answers = the best k of them
//   beams = of all candidates that do not end the first k
//
// Of a beam no token but its n_tokens() most probable ones can come into an answer or a next beam.
#include "inference/inference.h"

#include <algorithm>
#include <cmath>

BeamSearch::BeamSearch(const BeamOptions& options) : options_(options) {
    check(options.n_beams >= 1, "n_beams is ", options.n_beams, "; it must be at least 1");
    check(options.max_tokens >= 1, "max_tokens is ", options.max_tokens, "; it must be at least 1");
    check(std::abs(options.length_penalty) <= 100, "length_penalty is ", options.length_penalty,
          "; it must be from -100 to 100");
    check(n_tokens() <= kMostTop, "n_beams is ", options.n_beams, ": with ", options.stop_tokens.size(),
          " stop tokens each beam needs its ", n_tokens(), " most probable tokens, and at most ", kMostTop,
          " are available: use fewer beams");
}

int64_t BeamSearch::n_tokens() const {
    return std::max<int64_t>(2, 1 + std::ssize(options_.stop_tokens)) * options_.n_beams;
}

void BeamSearch::step(std::span<const std::vector<TokenLogprob>> top) {
    check(top.size() == beams_.size(), "BeamSearch::step: tokens of ", top.size(), " beams; there are ", beams_.size());
    const size_t k = static_cast<size_t>(options_.n_beams);
    std::vector<Beam> candidates;
    for (size_t b = 0; b < beams_.size(); ++b)
        for (const auto& [token, logprob] : top[b]) {
            if (logprob == -INFINITY) continue;
            candidates.push_back({b, beams_[b].answer});
            candidates.back().answer.tokens.push_back(token);
            candidates.back().answer.score += logprob;
        }
    const auto is_better = [](const auto& a, const auto& b) { return a.score > b.score; };
    std::stable_sort(candidates.begin(), candidates.end(),
                     [&](const Beam& a, const Beam& b) { return is_better(a.answer, b.answer); });

    beams_.clear();
    for (size_t i = 0; i < candidates.size(); ++i) {
        BeamAnswer& answer = candidates[i].answer;
        const int64_t length = std::ssize(answer.tokens);
        const bool is_stop = std::count(options_.stop_tokens.begin(), options_.stop_tokens.end(), answer.tokens.back());
        if (!is_stop && length < options_.max_tokens) {
            if (beams_.size() < k) beams_.push_back(std::move(candidates[i]));
        } else if (i < k) {
            answer.score /= std::pow(length, options_.length_penalty);
            answers_.push_back(std::move(answer));
        }
    }
    std::stable_sort(answers_.begin(), answers_.end(), is_better);
    answers_.resize(std::min(answers_.size(), k));
    if (!can_improve()) beams_.clear();
}

bool BeamSearch::can_improve() const {
    using enum BeamOptions::EarlyStopping;
    if (beams_.empty() || std::ssize(answers_) < options_.n_beams) return true;
    if (options_.early_stopping == yes) return false;
    const BeamAnswer& best = beams_[0].answer;
    // Scores are below 0: with a length penalty above 0 the best length that a beam can have is the largest.
    const bool may_grow = options_.early_stopping == never && options_.length_penalty > 0;
    const double length = static_cast<double>(may_grow ? options_.max_tokens : std::ssize(best.tokens));
    return best.score / std::pow(length, options_.length_penalty) > answers_.back().score;
}
