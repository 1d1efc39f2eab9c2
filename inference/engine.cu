// inference/engine.cu: a step of inference.
//
//     parts = the scheduler's: for each sequence some of its tokens         many of a prompt, one of an answer
//     copies of pages that the cache wants made
//     tables: for each row its token, its position, its row in the cache; for each sequence its pages
//     forward: the rows through the model; their keys and values go to the cache, the attention reads them there
//     a token for each row that is the last of its sequence
//
// The cache's pages lie in one pool per layer. A page that was swapped out lies in a pool of the host.
#include "inference/inference.h"

#include <algorithm>

int64_t longest_sequence(const Config& c, int64_t wanted) {
    // Dynamic scaling computes other frequencies for each length beyond that of the training: what is in the cache
    // would have to change with every token.
    const bool dynamic = c.family == Family::llama && c.rope_scaling.acts() && c.rope_scaling.kind == RopeKind::dynamic;
    const int64_t longest = dynamic ? std::min(c.T_max, c.rope_scaling.original_max_position) : c.T_max;
    check(wanted >= 0 && wanted <= longest, "a length of ", wanted, " tokens: the model has ", longest, " positions",
          dynamic ? " before its dynamic rope scaling begins" : "", ", and at most so many can be given");
    return wanted == 0 ? longest : wanted;
}

namespace {

EngineOptions settled(const Model& model, EngineOptions o) {
    o.scheduler.max_length = longest_sequence(model.config, o.scheduler.max_length);
    check(o.scheduler.step_tokens >= 1 && o.scheduler.max_sequences >= 1, "inference: a step of ",
          o.scheduler.step_tokens, " tokens and ", o.scheduler.max_sequences, " sequences: both must be at least 1");
    check(o.cache.page_size >= 1, "inference: pages of ", o.cache.page_size, " rows: it must be at least 1");
    if (o.cache.n_pages == 0)
        o.cache.n_pages = o.scheduler.max_sequences * ceil_div(o.scheduler.max_length, o.cache.page_size);
    if (o.scheduler.preemption == Preemption::swap && o.cache.n_host_pages == 0) o.cache.n_host_pages = o.cache.n_pages;
    return o;
}

int64_t answer_length(const Request& request, const Sequence& sequence) {
    return std::ssize(sequence.tokens) - std::ssize(request.prompt);
}

void upload(const Tensor& to, const Tensor& pinned, cudaStream_t stream) {
    if (to.n() > 0) cudaCheck(cudaMemcpyAsync(to.data, pinned.data, to.bytes(), cudaMemcpyHostToDevice, stream));
}

}  // namespace

Engine::Engine(const Model& model, const EngineOptions& options)
    : model_(model), options_(settled(model, options)), cache_(options_.cache), scheduler_(options_.scheduler, cache_),
      cache_report_(options_.cache, options_.scheduler.max_length) {}

StepSizes Engine::largest_step() const {
    const SchedulerOptions& o = options_.scheduler;
    StepSizes sizes;
    sizes.tokens = std::max(o.step_tokens, o.max_sequences);
    sizes.sequences = o.max_sequences;
    sizes.chunks = o.max_sequences + sizes.tokens / kChunkRows;
    sizes.pages = ceil_div(o.max_length, options_.cache.page_size);
    sizes.logits = std::min(sizes.tokens, o.max_sequences * (1 + options_.lookup));
    return sizes;
}

void Engine::take_memory(Arena& cache, Arena& activations, Arena& pinned) {
    const StepSizes largest = largest_step();
    const CacheSizes& sizes = options_.cache;
    const DType dtype = options_.cache_dtype.value_or(model_.precision.dtype);
    pools_ = take_cache_pools(model_, sizes.n_pages, sizes.page_size, dtype, cache);
    if (sizes.n_host_pages > 0)
        host_pools_ = take_cache_pools(model_, sizes.n_host_pages, sizes.page_size, dtype, pinned);
    acts_ = take_step_activations(model_, pools_, largest, activations);
    workspace_ = take_step_workspace(model_, largest, options_.scheduler.max_length, activations);
    sampler_.take_memory(largest.logits, model_.config.V, activations, pinned);
    const auto like = [&](const Tensor& tensor) { return pinned.take("tables of a step", DType::i32, {tensor.n()}); };
    tables_ = {like(acts_.tokens),     like(acts_.positions), like(acts_.cache_rows),
               like(acts_.page_table), like(acts_.chunks),    like(acts_.logit_rows)};
}

void Engine::copy_pages() {
    const cudaStream_t stream = device().stream;
    const auto copy = [&](const PageCopy& page, const std::vector<Tensor>& device, const std::vector<Tensor>& host) {
        for (size_t l = 0; l < device.size(); ++l) {
            const Tensor& from = page.way == PageCopy::Way::to_device ? host[l] : device[l];
            const Tensor& to = page.way == PageCopy::Way::to_host ? host[l] : device[l];
            const Tensor source = from.slice(page.from, 1);
            cudaCheck(
                cudaMemcpyAsync(to.slice(page.to, 1).data, source.data, source.bytes(), cudaMemcpyDefault, stream));
        }
    };
    for (const PageCopy& page : cache_.take_copies()) {
        copy(page, pools_.layers, host_pools_.layers);
        copy(page, pools_.scales, host_pools_.scales);
    }
}

// Fills in the tables, and sends them to the device. draws_ becomes the rows of logits, in order.
StepSizes Engine::prepare(const std::vector<StepPart>& parts) {
    const cudaStream_t stream = device().stream;
    const int64_t P = options_.cache.page_size;
    StepSizes sizes;
    for (const StepPart& part : parts)
        sizes.pages = std::max<int64_t>(sizes.pages, std::ssize(cache_.page_table(*part.sequence->cached)));
    draws_.clear();
    int32_t *tokens = tables_.tokens.ptr<int32_t>(), *positions = tables_.positions.ptr<int32_t>(),
            *cache_rows = tables_.cache_rows.ptr<int32_t>(), *page_table = tables_.page_table.ptr<int32_t>(),
            *chunks = tables_.chunks.ptr<int32_t>(), *logit_rows = tables_.logit_rows.ptr<int32_t>();
    for (const StepPart& part : parts) {
        const Sequence& sequence = *part.sequence;
        const std::vector<int32_t>& pages = cache_.page_table(*sequence.cached);
        std::copy(pages.begin(), pages.end(), page_table + sizes.sequences * sizes.pages);
        for (int64_t i = 0; i < part.n; ++i) {
            const int64_t row = sizes.tokens + i, position = part.first + i;
            const int64_t n = std::ssize(sequence.tokens);
            tokens[row] = position < n ? sequence.tokens[static_cast<size_t>(position)]
                                       : sequence.draft[static_cast<size_t>(position - n)];
            positions[row] = static_cast<int32_t>(position);
            cache_rows[row] = static_cast<int32_t>(pages[static_cast<size_t>(position / P)] * P + position % P);
            if (i % kChunkRows == 0) {
                const int64_t chunk[4] = {row, std::min(kChunkRows, part.n - i), sizes.sequences, position};
                for (int k = 0; k < 4; ++k) chunks[4 * sizes.chunks + k] = static_cast<int32_t>(chunk[k]);
                ++sizes.chunks;
            }
        }
        ++sizes.sequences;
        sizes.tokens += part.n;
        if (part.n_logits == 0) continue;
        // The end of a prompt is followed by the first tokens of all its answers, which are drawn from the same logits.
        const bool first = std::ssize(sequence.tokens) == std::ssize(part.request->prompt);
        const int64_t answers = first && !part.request->beams ? part.request->n : 1;
        for (int64_t k = 0; k < answers; ++k) {
            for (int64_t row = sizes.tokens - part.n_logits; row < sizes.tokens; ++row)
                logit_rows[sizes.logits++] = static_cast<int32_t>(row);
            draws_.push_back(
                {part.request, part.sequence, first ? static_cast<uint64_t>(k) : sequence.sample, part.n_logits});
        }
    }
    const Activations acts = of_step(acts_, sizes);
    upload(acts.tokens, tables_.tokens, stream);
    upload(acts.positions, tables_.positions, stream);
    upload(acts.cache_rows, tables_.cache_rows, stream);
    upload(acts.page_table, tables_.page_table, stream);
    upload(acts.chunks, tables_.chunks, stream);
    upload(acts.logit_rows, tables_.logit_rows, stream);
    return sizes;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tokens

std::vector<Sampled> Engine::draw_tokens(const Tensor& logits) {
    std::vector<SamplingRow> rows;
    std::deque<std::vector<int32_t>> with_draft;  // of sequences that have one: the rows behind it see its tokens
    for (const Draw& draw : draws_) {
        const Sequence& sequence = *draw.sequence;
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
    if (token.token < 0) reason = "error";                          // logits that are not finite
    else if (std::find(stops.begin(), stops.end(), token.token) != stops.end()) reason = "stop";
    if (reason == nullptr) {
        sequence.tokens.push_back(token.token);
        const int64_t n = std::ssize(sequence.tokens);
        if (token_ready && !token_ready(request, sequence, token)) reason = "stop";
        else if (answer_n >= request.max_tokens || n >= options_.scheduler.max_length) reason = "length";
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
    search.step(top);
    if (search.beams().empty()) {
        const std::vector<BeamAnswer> answers = search.answers();
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
        if (!draw.request->beams && draw.sample != draw.sequence->sample)
            draw.sequence = &scheduler_.fork(*draw.request, *draw.sequence), draw.sequence->sample = draw.sample;
    size_t row = 0;
    for (const Draw& draw : draws_) {
        const std::span<const Sampled> its = drawn.subspan(row, static_cast<size_t>(draw.n));
        row += its.size();
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
        n_proposed_ += std::ssize(draft), n_accepted_ += static_cast<int64_t>(gained) - 1;
        bool goes_on = true;
        for (size_t i = 0; i < gained && goes_on; ++i) goes_on = give(*draw.request, sequence, its[i]);
        // Behind the last token, which no step has computed yet, the cache has rows of drafts that were wrong.
        if (goes_on && gained <= draft.size()) scheduler_.truncate(sequence, std::ssize(sequence.tokens) - 1);
    }
}

// Of sequences whose prompt is computed: a token of the next step is then the last one, and the draft stands behind it.
void Engine::propose_drafts() {
    if (options_.lookup == 0) return;
    for (Request* request : requests_)
        for (const auto& sequence : request->sequences)
            if (sequence->tokens.size() > request->prompt.size() && !request->beams)
                sequence->draft = lookups_[sequence.get()].propose(sequence->tokens, options_.lookup);
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
    const cudaStream_t stream = device().stream;
    propose_drafts();
    const std::vector<StepPart> parts = scheduler_.next_step();
    if (parts.empty()) return false;
    ++n_steps_;
    if (with_timeline_) timeline_.step(parts);
    cache_report_.step(cache_.use());
    copy_pages();
    const StepSizes sizes = prepare(parts);
    Activations acts = of_step(acts_, sizes);
    forward(model_, acts, of_step(workspace_, sizes), stream, false);
    TensorParallel* const ranks = model_.tensor_parallel;  // each has the logits of its tokens
    if (sizes.logits > 0) deliver(draw_tokens(ranks ? ranks->gather_columns(acts.logits, stream) : acts.logits));
    else cudaCheck(cudaStreamSynchronize(stream));  // the next step fills the same tables
    return true;
}
