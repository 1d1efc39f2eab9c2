// inference/draft_model.cu: a small model proposes the next tokens of answers (inference/speculation.cu says why).
//
// As a plain loop, before each step of the engine:
//
//     for each sequence that draws in the step:  forget the rows of the tokens that it does not have (rejected ones)
//     draft_tokens times, a small step for all sequences together:
//         compute the tokens whose rows are missing: at first a prompt; then the one or two that the text has gained;
//                                                    then the last proposal
//         where none is missing any more: draw a token, with the random numbers of the target at that position, and
//             propose it
//
// All that is kept here follows from the texts that the engine has, and can be computed again. So nobody has to report
// when a sequence has ended, was preempted or was cancelled: a text that is not proposed for is dropped, and its full
// pages may be found again. A sequence for which there is no room or no page gets fewer proposals, or none, which
// changes only the speed.
#include "inference/inference.h"

#include <algorithm>

DraftModel::DraftModel(const Model& model, const EngineOptions& options)
    : options_(options), model_(model, of_device(options.cache), options.graphs.value()) {}

// Texts that are not in use are dropped, not swapped.
CacheSizes DraftModel::of_device(CacheSizes sizes) {
    sizes.n_host_pages = 0;
    return sizes;
}

void DraftModel::take_memory(StepSizes largest, Arena& cache, Arena& activations, Arena& pinned) {
    largest.logits = options_.scheduler.max_sequences;
    model_.take_memory(largest, options_.cache_dtype, cache, activations, pinned);
    sampler_.take_memory(largest.logits, model_.config().V, activations, pinned);
}

void DraftModel::propose(std::vector<Drafted> drafted) {
    bring_up_to_date(drafted);
    // Those that lack the fewest rows first: a long prompt takes what the others leave.
    const auto n_missing = [&](const Drafted& d) {
        const Text& text = texts_.at(d.sequence);
        return std::ssize(text.tokens) - (text.cached ? model_.cache.length(*text.cached) : 0);
    };
    std::ranges::stable_sort(drafted, {}, n_missing);
    for (int64_t k = 0; k < options_.draft_tokens; ++k) small_step(drafted);
}

// Afterwards texts_ has the texts of these sequences and no others. The cache wants this order: sequences end and are
// truncated here, before small_step() reserves rows.
void DraftModel::bring_up_to_date(std::span<const Drafted> drafted) {
    PagedCache& cache = model_.cache;
    std::unordered_map<const Sequence*, Text> before = std::move(texts_);
    texts_.clear();
    for (const Drafted& d : drafted) {
        Text& text = texts_[d.sequence];
        const std::vector<int32_t>& tokens = d.sequence->tokens;
        if (const auto found = before.find(d.sequence); found != before.end()) {
            text = std::move(found->second);
            before.erase(found);
        }
        if (text.cached) {
            const auto first = std::ranges::mismatch(text.tokens, tokens).in2;
            // The logits after the last token are wanted.
            const int64_t right = std::min<int64_t>(first - tokens.begin(), std::ssize(tokens) - 1);
            if (right < cache.length(*text.cached)) cache.truncate(*text.cached, right);
        }
        text.tokens = tokens;
        // The last token of the answer is drawn by the target in any case.
        const int64_t answer_n = std::ssize(tokens) - std::ssize(d.request->prompt);
        text.wanted = d.request->max_tokens - answer_n - 1;
    }
    for (const auto& [sequence, text] : before)
        if (text.cached) cache.end(*text.cached);
}

// The rows of a text that are missing, as far as there is room.
std::optional<CachedRows> DraftModel::next_rows(Text& text, int64_t room) {
    PagedCache& cache = model_.cache;
    if (text.wanted <= 0 || room <= 0) return {};
    if (!text.cached) {
        text.cached = cache.begin();
        cache.share_prefix(*text.cached, text.tokens);
    }
    const int64_t first = cache.length(*text.cached), n = std::min(room, std::ssize(text.tokens) - first);
    if (!cache.reserve(*text.cached, n)) return {};
    CachedRows rows{*text.cached, first, {text.tokens.begin() + first, text.tokens.begin() + first + n}};
    if (n > 1) cache.append(*text.cached, rows.tokens);
    rows.n_logits = first + n == std::ssize(text.tokens);
    return rows;
}

void DraftModel::small_step(std::span<const Drafted> drafted) {
    std::vector<CachedRows> rows;
    std::vector<SamplingRow> drawing;
    std::vector<const Drafted*> its;  // of each that draws
    int64_t room = options_.scheduler.step_tokens;
    for (const Drafted& d : drafted) {
        Text& text = texts_.at(d.sequence);
        const std::optional<CachedRows> next = next_rows(text, room);
        if (!next) continue;
        room -= std::ssize(next->tokens);
        rows.push_back(*next);
        if (next->n_logits == 0) continue;
        const std::span<const int32_t> tokens = text.tokens;
        const size_t prompt_n = d.request->prompt.size();
        drawing.push_back({.options = &d.request->sampling,
                           .sample = d.sequence->sample,
                           .position = std::ssize(tokens),
                           .prompt = tokens.first(prompt_n),
                           .answer = tokens.subspan(prompt_n)});
        its.push_back(&d);
    }
    if (rows.empty()) return;
    for (const CachedRows& its : rows)  // as the scheduler does: nobody finds a row alone in the step that computes it
        if (its.tokens.size() == 1) model_.cache.append(its.sequence, its.tokens);
    const Tensor logits = model_.forward(rows);
    if (drawing.empty()) return;
    const std::vector<Sampled> drawn = sampler_.draw(logits, drawing, device().stream);
    for (size_t i = 0; i < its.size(); ++i) {
        Text& text = texts_.at(its[i]->sequence);
        const std::vector<int32_t>& stops = its[i]->request->stop_tokens;
        const int32_t token = drawn[i].token;
        text.wanted -= 1;
        if (token < 0 || std::ranges::count(stops, token)) text.wanted = 0;  // logits that are not finite, or the end
        if (token < 0) continue;
        its[i]->sequence->draft.push_back(token);
        text.tokens.push_back(token);
    }
}
