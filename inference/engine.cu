// inference/engine.cu: a step of inference.
//
//     drafts of the answers that go on, if there is speculation
//     parts = the scheduler's: for each sequence some of its tokens         many of a prompt, one of an answer
//     forward: the rows through the model and its cache (inference/paged_model.cu)
//     a token for each row that is the last of its sequence
#include "inference/inference.h"

#include <algorithm>

int64_t longest_sequence(const Config& c, const Config* draft, int64_t wanted) {
    if (draft) {
        const int64_t its = longest_sequence(*draft, nullptr, 0);
        const int64_t longest = longest_sequence(c, nullptr, wanted);
        check(longest <= its, "a length of ", longest, " tokens: the draft model has ", its,
              " positions, and at most that many can be given (--max-length)");
        return longest;
    }
    // Dynamic scaling computes other frequencies for each length beyond that of the training: what is in the cache
    // would have to change with every token.
    const bool dynamic = c.family == Family::llama && c.rope_scaling.kind == RopeKind::dynamic;
    const int64_t longest = dynamic ? std::min(c.T_max, c.rope_scaling.original_max_position) : c.T_max;
    check(wanted >= 0 && wanted <= longest, "a length of ", wanted, " tokens: the model has ", longest, " positions",
          dynamic ? " before its dynamic rope scaling begins" : "",
          ", and at most that many can be given (--max-length)");
    return wanted == 0 ? longest : wanted;
}

namespace {

EngineOptions settled(const Model& model, const Model* draft, EngineOptions o) {
    o.scheduler.max_length = longest_sequence(model.config, draft ? &draft->config : nullptr, o.scheduler.max_length);
    if (!draft) o.draft_tokens = 0;
    check(!draft || (o.draft_tokens >= 1 && o.lookup == 0), "inference: a draft model proposes at least 1 token, not ",
          o.draft_tokens, ", and there is no prompt look-up beside it");
    check(!draft || draft->config.V == model.config.V, "the draft model has a vocabulary of ",
          draft ? draft->config.V : 0, " tokens, the model one of ", model.config.V,
          ": it must be the same, because the one proposes tokens of the other");
    // No proposal is longer than a sequence.
    o.lookup = std::min(o.lookup, o.scheduler.max_length);
    o.draft_tokens = std::min(o.draft_tokens, o.scheduler.max_length);
    check(o.cache.page_size >= 1, "inference: pages of ", o.cache.page_size, " rows: it must be at least 1");
    if (o.cache.n_pages == 0)
        o.cache.n_pages = o.scheduler.max_sequences * ceil_div(o.scheduler.max_length, o.cache.page_size);
    // No sequence is longer than the cache. (Two tokens fit into any: the last one of a sequence is in no page.)
    if (o.cache.n_pages < ceil_div(o.scheduler.max_length, o.cache.page_size))
        o.scheduler.max_length = std::max<int64_t>(2, o.cache.n_pages * o.cache.page_size);
    if (!o.graphs) o.graphs = !device().is_cpu;
    if (o.scheduler.preemption == Preemption::swap && o.cache.n_host_pages == 0) o.cache.n_host_pages = o.cache.n_pages;
    return o;
}

bool all_finite(std::span<const Sampled> tokens) {  // the logits of which they were drawn, or by which they were scored
    return std::ranges::all_of(tokens, [](const Sampled& sampled) { return sampled.token >= 0; });
}

int64_t answer_length(const Request& request, const Sequence& sequence) {
    return std::ssize(sequence.tokens) - std::ssize(request.prompt);
}

}  // namespace

Engine::Engine(const Model& model, const EngineOptions& options, const Model* draft)
    : options_(settled(model, draft, options)), model_(model, options_.cache, *options_.graphs, options_.ranks),
      scheduler_(options_.scheduler, model_.cache), cache_report_(options_.cache, options_.scheduler.max_length) {
    if (draft) draft_.emplace(*draft, options_);
}

StepSizes Engine::largest_step() const {
    const SchedulerOptions& o = options_.scheduler;
    StepSizes sizes;
    sizes.tokens = std::max(o.step_tokens, o.max_sequences);
    sizes.sequences = o.max_sequences;
    sizes.chunks = o.max_sequences + sizes.tokens / kChunkRows;  // >= the sum of ceil(rows of a sequence / kChunkRows)
    sizes.pages = ceil_div(o.max_length, options_.cache.page_size);
    // A token of each sequence (those of one that is forked are drawn from one row of tokens), and those of the drafts.
    sizes.logits =
        o.max_sequences + std::min(sizes.tokens, o.max_sequences * (options_.lookup + options_.draft_tokens));
    return sizes;
}

void Engine::take_memory(Arena& cache, Arena& activations, Arena& pinned) {
    const StepSizes largest = largest_step();
    model_.take_memory(largest, options_.cache_dtype, cache, activations, pinned);
    sampler_.take_memory(largest.logits, vocabulary(), activations, pinned);
    if (draft_) draft_->take_memory(largest, cache, activations, pinned);
}

// draws_ becomes the rows of logits, in order.
std::vector<CachedRows> Engine::rows_of(std::span<const StepPart> parts) {
    draws_.clear();
    std::vector<CachedRows> rows;
    for (const StepPart& part : parts) {
        const Sequence& sequence = *part.sequence;
        CachedRows& its = rows.emplace_back(CachedRows{*sequence.cached, part.first, {}, part.n_logits});
        for (int64_t i = part.first; i < part.first + part.n; ++i) {
            const int64_t n = std::ssize(sequence.tokens);
            its.tokens.push_back(i < n ? sequence.tokens[static_cast<size_t>(i)]
                                       : sequence.draft[static_cast<size_t>(i - n)]);
        }
        if (part.n_scored > 0) draws_.push_back({part.request, part.sequence, 0, part.n_scored, true});
        if (part.n_drawn() == 0) continue;
        // The end of a prompt is followed by the first tokens of all its answers, which are drawn from the same logits.
        const bool first = std::ssize(sequence.tokens) == std::ssize(part.request->prompt);
        its.times = first && !part.request->beams ? part.request->n : 1;
        for (int64_t k = 0; k < its.times; ++k)
            draws_.push_back(
                {part.request, part.sequence, first ? static_cast<uint64_t>(k) : sequence.sample, part.n_drawn()});
    }
    return rows;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tokens

std::string SpeculationCount::text() const {
    if (proposed == 0) return "";
    return format("%.1f%% of %lld proposed tokens accepted, %.2f tokens a step",
                  100 * static_cast<double>(accepted) / static_cast<double>(proposed), static_cast<long long>(proposed),
                  1 + static_cast<double>(accepted) / static_cast<double>(steps));
}

std::vector<Sampled> Engine::draw_tokens(const Tensor& logits) {
    std::vector<SamplingRow> rows;
    std::deque<std::vector<int32_t>> with_draft;  // of sequences that have one: the rows after it see its tokens
    std::deque<SamplingOptions> of_prompts;
    for (const Draw& draw : draws_) {
        const Sequence& sequence = *draw.sequence;
        if (draw.of_prompt) {
            of_prompts.emplace_back();
            of_prompts.back().temperature = 0, of_prompts.back().logprobs = draw.request->sampling.logprobs;
            const std::span<const int32_t> next =
                std::span(draw.request->prompt).subspan(draw.request->scored.size() + 1);
            for (const int32_t token : next.first(static_cast<size_t>(draw.n)))
                rows.push_back({.options = &of_prompts.back(), .given = token});
            continue;
        }
        std::span<const int32_t> text = sequence.tokens;
        if (!sequence.draft.empty()) {
            std::vector<int32_t>& both = with_draft.emplace_back(sequence.tokens);
            both.insert(both.end(), sequence.draft.begin(), sequence.draft.end());
            text = both;
        }
        const size_t prompt_n = draw.request->prompt.size(), n = sequence.tokens.size();
        for (size_t i = 0; i < static_cast<size_t>(draw.n); ++i)
            rows.push_back({.options = &draw.request->sampling,
                            .sample = draw.sample,
                            .position = static_cast<int64_t>(n + i),
                            .prompt = text.first(prompt_n),
                            .answer = text.subspan(prompt_n, n + i - prompt_n)});
    }
    return sampler_.draw(logits, rows, device().stream);
}

void Engine::start_reports(bool with_timeline) {
    cache_report_ = CacheReport(options_.cache, options_.scheduler.max_length);
    timeline_ = {};
    with_timeline_ = with_timeline;
}

void Engine::end_request(Request& request) {
    if (with_timeline_) timeline_.leave(request.id);
    scheduler_.remove(request);
    std::erase(requests_, &request);
    searches_.erase(&request);
}

void Engine::end_answer(Request& request, Sequence& sequence, const char* reason) {
    const uint64_t sample = sequence.sample;
    lookups_.erase(&sequence);
    if (request.sequences.size() == 1) end_request(request);
    else scheduler_.drop(request, sequence);
    if (answer_ended) answer_ended(request, sample, reason);
}

bool Engine::give(Request& request, Sequence& sequence, const Sampled& token) {
    const std::vector<int32_t>& stops = request.stop_tokens;
    const char* reason = nullptr;
    const int64_t answer_n = answer_length(request, sequence) + 1;  // with this token
    if (token.token < 0 || (answer_n == 1 && !all_finite(request.scored))) reason = "error";
    else if (std::find(stops.begin(), stops.end(), token.token) != stops.end()) reason = "stop";
    if (reason == nullptr) {
        sequence.tokens.push_back(token.token);
        if (token_ready && !token_ready(request, sequence, token)) reason = "stop";
        else if (answer_n >= request.max_tokens) reason = "length";
    }
    if (reason == nullptr) return true;
    cache_report_.finished(std::ssize(request.prompt), answer_n);
    end_answer(request, sequence, reason);
    return false;
}

// drawn: of each beam, in the order of request.sequences. Each beam goes on from one of those before it: the first that
// goes on from a sequence takes it over, others fork it, and a sequence from which none goes on is dropped.
void Engine::advance_beams(Request& request, std::span<const Sampled> drawn) {
    BeamSearch& search = searches_.at(&request);
    std::vector<std::vector<TokenLogprob>> top;
    for (const Sampled& row : drawn) top.push_back(row.top);
    const bool finite = all_finite(drawn);
    if (finite) search.step(top);
    if (!finite || search.beams().empty()) {
        const std::vector<BeamAnswer> answers = finite ? search.answers() : std::vector<BeamAnswer>();
        for (const auto& sequence : request.sequences)
            cache_report_.finished(std::ssize(request.prompt), answer_length(request, *sequence) + 1);
        end_request(request);
        if (beams_ended) beams_ended(request, answers);
        return;
    }
    std::vector<Sequence*> parents, next;
    for (const auto& sequence : request.sequences) parents.push_back(sequence.get());
    std::vector<bool> taken(parents.size());
    for (const BeamSearch::Beam& beam : search.beams()) {
        next.push_back(taken[beam.parent] ? &scheduler_.fork(request, *parents[beam.parent]) : parents[beam.parent]);
        taken[beam.parent] = true;
    }
    for (size_t p = 0; p < parents.size(); ++p)
        if (!taken[p]) scheduler_.drop(request, *parents[p]);
    // The order of the beams is that of the sequences from now on.
    for (size_t i = 0; i < next.size(); ++i) {
        const auto at = std::find_if(request.sequences.begin(), request.sequences.end(),
                                     [&](const auto& sequence) { return sequence.get() == next[i]; });
        std::swap(request.sequences[i], *at);
        next[i]->tokens.push_back(search.beams()[i].answer.tokens.back());
    }
}

void Engine::deliver(std::span<const Sampled> drawn) {
    // All forks first: they share the pages of the parent, whose tokens then go on differently.
    for (Draw& draw : draws_)
        if (!draw.request->beams && !draw.of_prompt && draw.sample != draw.sequence->sample)
            draw.sequence = &scheduler_.fork(*draw.request, *draw.sequence), draw.sequence->sample = draw.sample;
    size_t row = 0;
    for (const Draw& draw : draws_) {
        const std::span<const Sampled> its = drawn.subspan(row, static_cast<size_t>(draw.n));
        row += its.size();
        if (draw.of_prompt) {
            draw.request->scored.insert(draw.request->scored.end(), its.begin(), its.end());
            continue;
        }
        if (draw.request->beams) {  // all its rows are neighbours, and the last of them moves all beams
            if (draw.sequence == draw.request->sequences.back().get())
                advance_beams(*draw.request,
                              drawn.subspan(row - draw.request->sequences.size(), draw.request->sequences.size()));
            continue;
        }
        Sequence& sequence = *draw.sequence;
        const std::vector<int32_t> draft = std::move(sequence.draft);
        sequence.draft.clear();
        const size_t gained = tokens_gained(draft, its);
        speculation_.proposed += std::ssize(draft), speculation_.accepted += static_cast<int64_t>(gained) - 1;
        speculation_.steps += sequence.tokens.size() > draw.request->prompt.size();
        bool goes_on = true;
        for (size_t i = 0; i < gained && goes_on; ++i) goes_on = give(*draw.request, sequence, its[i]);
        // Behind the last token, which no step has computed yet, the cache has rows of drafts that were wrong.
        if (goes_on && gained <= draft.size()) scheduler_.truncate(sequence, std::ssize(sequence.tokens) - 1);
    }
}

// For sequences that have an answer token: the step that computes their last token computes the draft after it, too.
void Engine::propose_drafts() {
    std::vector<DraftModel::Drafted> drafted;
    for (Request* request : requests_)
        for (const auto& sequence : request->sequences) {
            sequence->draft.clear();
            if (sequence->tokens.size() == request->prompt.size() || request->beams) continue;
            if (options_.lookup > 0)  // the last token of the answer is drawn by the model in any case
                sequence->draft = lookups_[sequence.get()].propose(
                    sequence->tokens,
                    std::min(options_.lookup, request->max_tokens - answer_length(*request, *sequence) - 1));
            const bool draws = sequence->cached && !model_.cache.is_swapped(*sequence->cached) &&
                               sequence->computed_n + 1 == std::ssize(sequence->tokens);
            if (draft_ && draws) drafted.push_back({request, sequence.get()});
        }
    if (draft_) draft_->propose(std::move(drafted));
}

// ---------------------------------------------------------------------------------------------------------------------

void Engine::add(Request& request) {
    if (request.beams) {
        request.beams->n_beams = request.n;
        request.beams->max_tokens = request.max_tokens, request.beams->stop_tokens = request.stop_tokens;
        const BeamSearch search(*request.beams);
        request.sampling = {};
        request.sampling.logprobs = search.n_tokens();
        scheduler_.add(request);
        searches_.emplace(&request, search);
    } else {
        scheduler_.add(request);
    }
    requests_.push_back(&request);
    if (with_timeline_) timeline_.arrive(request.id);
}

void Engine::cancel(Request& request) {
    for (const auto& sequence : request.sequences) lookups_.erase(sequence.get());
    end_request(request);
}

bool Engine::step() {
    if (options_.lookup > 0 || draft_) propose_drafts();
    const std::vector<StepPart> parts = scheduler_.next_step();
    if (parts.empty()) return false;
    ++n_steps_;
    if (with_timeline_) timeline_.step(parts);
    cache_report_.step(model_.cache.use());
    const Tensor logits = model_.forward(rows_of(parts));
    if (!draws_.empty()) deliver(draw_tokens(logits));
    return true;
}
