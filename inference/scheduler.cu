// inference/scheduler.cu: which tokens the next step computes.
//
// A step reads all weights once, whatever the number of its rows, so that a row alone is the most expensive. Batching
// by steps (continuous batching) fills each with what there is: a request that has its last token leaves after it, and
// another joins the next. A prompt has many rows and would make those that get one token a step wait; cut into pieces
// (chunked prefill) it takes what room they leave.
//
//     requests    A B C D | E F G              in the order in which they came; the first n_running_ have pages
//                         ^ n_running_
//     preemption          <-                   the last that runs gives its pages up
//     admission           ->                   the first that waits, when there are pages for it
//
// The order never changes, so that all who run came before all who wait.
//
// Pages are reserved for all that run before the first token is appended: until then a preempted request's parts can be
// taken out of the step as if they had never been in it.
#include "inference/inference.h"

#include <algorithm>

namespace {

int64_t n_tokens(const Sequence& s) { return std::ssize(s.tokens); }
int64_t prompt_n(const Request& r) { return std::ssize(r.prompt); }
int64_t rows_left(const Sequence& s) { return n_tokens(s) - s.computed_n; }

// Is all computed but the row of each last token? Then all of its sequences draw the next ones in the same step.
bool is_decoding(const Request& r) {
    return std::ranges::all_of(r.sequences, [](const auto& s) { return rows_left(*s) == 1; });
}

std::vector<SequenceId> cached_sequences(const Request& r) {
    std::vector<SequenceId> ids;
    for (const auto& s : r.sequences)
        if (s->cached) ids.push_back(*s->cached);
    return ids;
}

// Pages that a request needs, beside those that it has, to compute the tokens that it has; and one more for each
// sequence: without it a request would be admitted into the last pages, and preempted as soon as another one grows.
// (With lengths as people write and read them, 400 requests and 1000 pages: a fifth as many preemptions.)
// But no page after the end of the answer: no request waits for what it will never use.
int64_t pages_ahead(const PagedCache& cache, const Request& r) {
    const int64_t page_size = cache.sizes().page_size;
    const int64_t all_rows = prompt_n(r) + r.max_tokens - 1;  // the last token's is never computed
    int64_t pages = 0;
    for (const auto& s : r.sequences) {
        if (s->cached) {
            const int64_t rows = std::min(n_tokens(*s) + page_size, all_rows) - s->computed_n;
            pages += cache.pages_wanted(*s->cached, rows);
        } else {  // will be forked where the prompt ends. 2: the page of the next token, and one more
            pages += std::min(n_tokens(*s) / page_size + 2, ceil_div(all_rows, page_size)) - prompt_n(r) / page_size;
        }
    }
    return pages;
}

}  // namespace

// A step that is being put together.
struct Scheduler::Step {
    std::vector<StepPart> parts;
    int64_t rows_left;    // of step_tokens
    int64_t logits_left;  // rows of them
    static StepPart part_of(Request& r, Sequence& s, int64_t n) {
        const int64_t first = std::max(s.computed_n, std::ssize(r.scored)), end = s.computed_n + n;
        const int64_t n_scored = r.scores_prompt ? std::max<int64_t>(0, std::min(end, prompt_n(r) - 1) - first) : 0;
        return {&r, &s, s.computed_n, n, n_scored + (end == n_tokens(s)), n_scored};
    }
    // All answers to a prompt draw their first tokens from the last of its rows.
    static int64_t logits_of(const StepPart& part) {
        const bool first = part.n_drawn() > 0 && n_tokens(*part.sequence) == prompt_n(*part.request);
        return part.n_logits + (first ? part.request->n - 1 : 0);
    }
    void add(const StepPart& part) {
        parts.push_back(part);
        rows_left -= part.n, logits_left -= logits_of(part);
    }
    void take_out(const Request& r) {
        for (const StepPart& part : parts)
            if (part.request == &r) rows_left += part.n, logits_left += logits_of(part);
        std::erase_if(parts, [&](const StepPart& part) { return part.request == &r; });
    }
};

Scheduler::Scheduler(const SchedulerOptions& options, PagedCache& cache) : options_(options), cache_(cache) {
    check(options.step_tokens >= 1, "a step computes at least 1 token, not ", options.step_tokens);
    check(options.max_sequences >= 1, "at least 1 sequence runs at a time, not ", options.max_sequences);
    check(options.max_length >= 1, "a sequence has room for at least 1 token, not ", options.max_length);
}

// ---------------------------------------------------------------------------------------------------------------------
// Requests come and go

void Scheduler::add(Request& r) {
    check(r.sequences.empty(), "request ", r.id, " was added before");
    // Without r.id, which counts the requests that were added: who sent this one knows it by another name.
    check(!r.prompt.empty(), "the prompt is empty; give it at least one token");
    check(r.max_tokens >= 1, "max_tokens is ", r.max_tokens, "; ask for at least 1");
    check(r.n >= 1, r.n, " answers are not a request; ask for at least 1");
    check(r.n <= options_.most_answers(), r.n, " answers to a prompt are computed together, and at most ",
          options_.most_answers(), " sequences can be in a step; ask for fewer");
    check(prompt_n(r) + r.max_tokens <= options_.max_length, "a prompt of ", prompt_n(r),
          " tokens and an answer of up to ", r.max_tokens, " are more than the ", options_.max_length,
          " that there is room for; shorten the prompt, or ask for fewer tokens");
    // The last token's row is never computed. Of several answers each has pages of its own from the one on in which the
    // prompt ends.
    const int64_t page_size = cache_.sizes().page_size;
    const int64_t pages = ceil_div(prompt_n(r) + r.max_tokens - 1, page_size), shared = prompt_n(r) / page_size;
    const int64_t needed = shared + r.n * (pages - shared);
    check(needed <= cache_.sizes().n_pages, r.n, " answers to ", prompt_n(r), " tokens, of up to ", r.max_tokens,
          " each, need ", needed, " pages of the cache, which has ", cache_.sizes().n_pages,
          "; ask for less, or give the cache more (--cache-pages)");
    r.sequences.push_back(std::make_unique<Sequence>());
    r.sequences.back()->tokens = r.prompt;
    requests_.push_back(&r);
}

void Scheduler::remove(Request& r) {
    const auto at = std::ranges::find(requests_, &r);
    check(at != requests_.end(), "request ", r.id, " was removed before, or never added");
    if (at - requests_.begin() < static_cast<ptrdiff_t>(n_running_)) --n_running_;
    requests_.erase(at);
    is_full_ = false;
    forget(r);
}

Sequence& Scheduler::fork(Request& r, const Sequence& parent) {
    check(parent.cached.has_value(), "a sequence of request ", r.id, " that is not in the cache cannot be forked");
    const SequenceId copy = cache_.fork(*parent.cached);
    r.sequences.push_back(std::make_unique<Sequence>(parent));
    r.sequences.back()->cached = copy;
    return *r.sequences.back();
}

void Scheduler::drop(Request& r, const Sequence& sequence) {
    const auto at = std::ranges::find(r.sequences, &sequence, [](const auto& s) { return s.get(); });
    check(at != r.sequences.end(), "request ", r.id, " has no such sequence to drop");
    if (sequence.cached) cache_.end(*sequence.cached);
    if (!r.beams) r.ended_tokens += std::ssize(sequence.tokens) - prompt_n(r);
    r.sequences.erase(at);
}

void Scheduler::truncate(Sequence& sequence, int64_t length) {
    check(sequence.cached.has_value(), "a sequence that is not in the cache has no rows to forget");
    cache_.truncate(*sequence.cached, length);
    sequence.computed_n = length;
}

int64_t Scheduler::n_running() const { return static_cast<int64_t>(n_running_); }
int64_t Scheduler::n_waiting() const { return static_cast<int64_t>(requests_.size() - n_running_); }

// All rows of a request are going to be computed again, if it is not removed.
void Scheduler::forget(Request& r) {
    for (const auto& s : r.sequences) {
        if (s->cached) cache_.end(*s->cached);
        s->cached.reset();
        s->computed_n = 0;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// A step

std::vector<StepPart> Scheduler::next_step() {
    Step step{{}, options_.step_tokens, options_.max_sequences};
    const size_t n_ran = n_running_;
    for (size_t i = 0; i < n_running_; ++i) start_sequences(*requests_[i]);
    for (size_t i = 0; i < n_running_; ++i)
        if (is_decoding(*requests_[i])) add_decode(step, *requests_[i]);
    for (size_t i = 0; i < n_running_; ++i)
        if (!is_decoding(*requests_[i])) add_prompt(step, *requests_[i]);
    append(step, 0, false);
    const bool is_static = options_.batching == Batching::static_batches;
    is_full_ = false;
    while (n_waiting() > 0 && (is_static ? n_ran == 0 : step.rows_left > 0)) {
        is_full_ = !admit(*requests_[n_running_]);
        if (is_full_) break;
        const size_t first = step.parts.size();
        add_prompt(step, *requests_[n_running_++]);
        append(step, first, false);  // at once: whoever is next may have the same prompt
    }
    append(step, 0, true);
    // Several sequences that have all rows but their last, or have to be forked again, begin with the next step. If
    // nothing else is to be computed, that is this one.
    if (step.parts.empty() && n_running_ > n_ran) return next_step();
    for (StepPart& part : step.parts)
        if (part.n_drawn() > 0) add_draft(step, part);
    return std::move(step.parts);
}

// One row for each sequence, or, if there is no room for all of them, none.
void Scheduler::add_decode(Step& step, Request& r) {
    if (std::ssize(r.sequences) > step.rows_left) return;
    for (const auto& s : r.sequences)
        if (!add_rows(step, r, *s, 1)) return;
}

// The next piece of each sequence. Of several, which draw together, all but the row of the last token.
void Scheduler::add_prompt(Step& step, Request& r) {
    const int64_t last = r.sequences.size() > 1 ? 1 : 0;
    for (const auto& s : r.sequences) {
        int64_t n = std::min(step.rows_left, rows_left(*s) - last);
        while (n > 0 && Step::logits_of(Step::part_of(r, *s, n)) > step.logits_left) --n;
        if (s->cached && n > 0 && !add_rows(step, r, *s, n)) return;
    }
}

// Reserves rows, and adds a part with them. If there are too few pages, those who came later are preempted; whoever
// came last keeps the pages that it has, and is in no part of this step. (Then there is no admission either: admit()
// counts what those who run need.)
bool Scheduler::add_rows(Step& step, Request& r, Sequence& s, int64_t n) {
    while (!cache_.reserve(*s.cached, n)) {
        if (requests_[n_running_ - 1] == &r) {
            step.take_out(r);
            return false;
        }
        step.take_out(*requests_[n_running_ - 1]);
        preempt_last();
    }
    step.add(Step::part_of(r, s, n));
    return true;
}

bool Scheduler::preempt_last() {
    if (n_running_ == 0) return false;
    Request& r = *requests_[--n_running_];
    ++n_preemptions_;
    const bool swapped = options_.preemption == Preemption::swap && cache_.swap_out(cached_sequences(r));
    if (!swapped) forget(r);
    return true;
}

// A request that waits gets its pages back from the host, or takes over those that are found. False: there are too few
// pages for it and for what those who run are going to need.
bool Scheduler::admit(Request& r) {
    int64_t n_sequences = r.n, wanted = 0;
    for (size_t i = 0; i < n_running_; ++i) {
        n_sequences += requests_[i]->n;
        wanted += pages_ahead(cache_, *requests_[i]);
    }
    if (n_sequences > options_.max_sequences) return false;
    const std::vector<SequenceId> swapped = cached_sequences(r);
    if (!swapped.empty()) {
        wanted += cache_.swap_in_pages_wanted(swapped) + r.n;  // and one more for each answer
        return (n_running_ == 0 || wanted <= cache_.pages_available()) && cache_.swap_in(swapped);
    }
    start(r, *r.sequences.front());
    wanted += pages_ahead(cache_, r);
    if (wanted <= cache_.pages_available()) return true;  // as is certain where it is alone: add() has checked it
    forget(r);
    return false;
}

void Scheduler::start(const Request& r, Sequence& s) {
    s.cached = cache_.begin();
    const bool scores = r.scores_prompt && std::ssize(r.scored) + 1 < prompt_n(r);
    s.computed_n = scores ? 0 : cache_.share_prefix(*s.cached, s.tokens);
}

// After a preemption by recompute a request has a single sequence in the cache. When that has the prompt's rows again,
// the others are forked from it.
void Scheduler::start_sequences(Request& r) {
    check(!r.sequences.empty() && std::ssize(r.sequences) <= r.n, "request ", r.id, " has ", r.sequences.size(),
          " sequences before a step, and n is ", r.n, ": drop some, or remove it");
    const Sequence& first = *r.sequences.front();
    if (!first.cached) start(r, *r.sequences.front());  // the one that was has been dropped
    for (const auto& s : r.sequences) {
        if (s->cached || first.computed_n < prompt_n(r)) continue;
        s->cached = cache_.fork(*first.cached);
        truncate(*s, prompt_n(r));
    }
}

// The tokens of the parts from `first` on are in the cache as soon as the step is computed: of those with one row, or
// of the others. If all parts have one row, a GPU's attention writes the rows in the launch in which it reads those
// that were there before (paged_decode.cuh). So nobody may find such a row, and the page that it fills, in that step.
void Scheduler::append(Step& step, size_t first, bool single) {
    for (size_t i = first; i < step.parts.size(); ++i) {
        const StepPart& part = step.parts[i];
        if ((part.n == 1) != single) continue;
        cache_.append(*part.sequence->cached, std::span(part.sequence->tokens).subspan(part.first, part.n));
        part.sequence->computed_n += part.n;
    }
}

// As much of the draft as there is room for, and no more than could be answered.
void Scheduler::add_draft(Step& step, StepPart& part) {
    Sequence& s = *part.sequence;
    const int64_t answer_left = prompt_n(*part.request) + part.request->max_tokens - n_tokens(s);
    int64_t n = std::min({std::ssize(s.draft), step.rows_left, answer_left - 1});
    while (!cache_.reserve(*s.cached, n)) --n;
    s.draft.resize(n);
    cache_.append(*s.cached, s.draft);
    s.computed_n += n;
    step.rows_left -= n;
    part.n += n;
    part.n_logits += n;
}
