// test/simulated_engine.h: an engine whose model is a hash, to test what the scheduler and the cache do with it.
//
// The row of a token depends on all rows before it, which are read from where the page table says that they are; the
// next token depends on the row. So one row that is missing, in a wrong place, or computed from wrong ones changes the
// text, and the right text is known from a loop without cache and scheduler.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <set>

#include "inference/inference.h"
#include "test.h"

// xorshift64*
struct Random {
    uint64_t state;
    uint64_t next() {
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return state * 0x2545F4914F6CDD1Du >> 11;
    }
    int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
    double uniform() { return static_cast<double>(next()) * 0x1p-53; }
};

namespace simulated {

inline uint64_t mix(uint64_t a, uint64_t b) {
    const uint64_t x = (a ^ b) * 0xD6E8FEB86659FD93u;
    return (x ^ x >> 32) * 0x9E3779B97F4A7C15u;
}
// `before`: the sum of the rows before, each times its position, as attention sums over them.
inline uint64_t row_of(uint64_t before, int32_t token) { return mix(before, static_cast<uint64_t>(token) + 1); }
inline int32_t token_after(uint64_t row, uint64_t sample) { return static_cast<int32_t>(mix(row, sample) >> 60); }

// What follows a prompt, by a plain loop.
inline std::vector<int32_t> answer(const Request& request, uint64_t sample) {
    std::vector<int32_t> tokens = request.prompt;
    uint64_t before = 0;
    for (size_t s = 0; s < request.prompt.size() + static_cast<size_t>(request.max_tokens) - 1; ++s) {
        const uint64_t row = row_of(before, tokens[s]);
        before += row * (s + 1);
        if (s + 1 >= request.prompt.size()) tokens.push_back(token_after(row, sample));
    }
    return tokens;
}

struct SimulatedEngine {
    PagedCache cache;
    Scheduler scheduler;
    std::vector<uint64_t> device, host;
    Random random{7};
    int64_t draft_n = 0;  // speculate that far; half of the drafts have a wrong token
    bool checks_text = true;

    std::vector<std::unique_ptr<Request>> requests;  // all that were added
    std::set<int64_t> finished, first_served;        // ids
    std::vector<int64_t> order;                      // of the first row of each request
    std::map<SequenceId, int64_t> n_rows;            // that were computed of each
    int64_t n_steps = 0, n_rows_computed = 0, n_logits = 0;
    std::function<void(std::span<const StepPart>)> after_step = [](std::span<const StepPart>) {};

    SimulatedEngine(const CacheSizes& sizes, const SchedulerOptions& options)
        : cache(sizes), scheduler(options, cache), device(sizes.n_pages * sizes.page_size),
          host(sizes.n_host_pages * sizes.page_size) {}

    Request& add(std::vector<int32_t> prompt, int64_t max_tokens, int64_t n = 1) {
        requests.push_back(std::make_unique<Request>());
        Request& request = *requests.back();
        request.id = static_cast<int64_t>(requests.size()) - 1;
        request.prompt = std::move(prompt);
        request.max_tokens = max_tokens;
        request.n = n;
        scheduler.add(request);
        return request;
    }
    void remove(Request& request) {
        scheduler.remove(request);
        finished.insert(request.id);
    }
    bool is_done() const { return finished.size() == requests.size(); }

    void step() {
        const std::vector<StepPart> parts = scheduler.next_step();
        if (parts.empty()) FAIL("step " << n_steps << " computes nothing, and requests wait");
        copy();
        // Where each part has one row, a GPU's attention writes them while it reads the others (paged_decode.cuh):
        // nobody sees what another part writes.
        const bool at_once =
            checks_text && std::ranges::all_of(parts, [](const StepPart& part) { return part.n == 1; });
        const std::vector<uint64_t> before = at_once ? device : std::vector<uint64_t>();
        int64_t n = 0, logits = 0;
        for (const StepPart& part : parts) {
            const bool first = part.sequence->tokens.size() == part.request->prompt.size();
            n += part.n;
            logits += part.n_scored + (part.n_drawn() == 0 ? 0 : first ? part.request->n : 1);  // without drafts
            if (first_served.insert(part.request->id).second) order.push_back(part.request->id);
            compute(part, at_once ? before : device);
        }
        for (const StepPart& part : parts) {
            const auto n_draw = std::ranges::count_if(
                parts, [&](const StepPart& other) { return other.request == part.request && other.n_drawn() > 0; });
            if (part.n_drawn() > 0 && n_draw != static_cast<int64_t>(part.request->sequences.size()))
                FAIL(n_draw << " of " << part.request->sequences.size() << " sequences draw a token");
        }
        if (n > scheduler.options().step_tokens) FAIL("step " << n_steps << " has " << n << " tokens");
        if (logits > scheduler.options().max_sequences) FAIL("step " << n_steps << " has " << logits << " logits");
        ++n_steps;
        n_rows_computed += n;
        after_step(parts);
        for (const StepPart& part : parts) {
            score(part);
            if (part.n_drawn() > 0) draw(part);
        }
    }

  private:
    uint64_t& row(const Sequence& s, int64_t position) {
        const int64_t P = cache.sizes().page_size;
        return device[cache.page_table(*s.cached)[position / P] * P + position % P];
    }
    void copy() {
        const int64_t P = cache.sizes().page_size;
        for (const auto& [way, from, to] : cache.take_copies()) {
            const std::vector<uint64_t>& source = way == PageCopy::Way::to_device ? host : device;
            std::vector<uint64_t>& target = way == PageCopy::Way::to_host ? host : device;
            std::copy_n(&source[from * P], P, &target[to * P]);
        }
    }
    // seen: the device's rows, as the part finds them.
    void compute(const StepPart& part, const std::vector<uint64_t>& seen) {
        Sequence& s = *part.sequence;
        const auto [at, is_new] = n_rows.try_emplace(*s.cached, part.first);
        if (at->second != part.first) FAIL("rows " << at->second << " to " << part.first << " are left out, or twice");
        at->second += part.n;
        if (s.computed_n != part.first + part.n || cache.length(*s.cached) != s.computed_n) FAIL("computed_n is wrong");
        const int64_t n_tokens = static_cast<int64_t>(s.tokens.size());
        const int64_t n_draft = std::max<int64_t>(0, s.computed_n - n_tokens);
        if (part.n_drawn() != (s.computed_n >= n_tokens ? 1 + n_draft : 0)) FAIL("n_logits is wrong");
        if (part.n_drawn() > 0 && n_draft != static_cast<int64_t>(s.draft.size())) FAIL("a draft is left over");
        if (!checks_text) return;
        uint64_t before = 0;
        const std::vector<int32_t>& pages = cache.page_table(*s.cached);
        const int64_t P = cache.sizes().page_size;
        for (int64_t t = 0; t < s.computed_n; ++t) {
            const int64_t at = pages[t / P] * P + t % P;
            if (t >= part.first) device[at] = row_of(before, t < n_tokens ? s.tokens[t] : s.draft[t - n_tokens]);
            before += (t < part.first ? seen : device)[at] * static_cast<uint64_t>(t + 1);
        }
    }
    // Each row of the prompt but the last has its logits once, in order, before the first token is drawn.
    void score(const StepPart& part) {
        Request& r = *part.request;
        if (part.n_scored > 0 && part.first + part.n - part.n_logits != std::ssize(r.scored))
            FAIL("row " << part.first + part.n - part.n_logits << " is scored behind " << r.scored.size());
        r.scored.resize(r.scored.size() + static_cast<size_t>(part.n_scored));
        if (r.scored.size() > (r.scores_prompt ? r.prompt.size() - 1 : 0)) FAIL("too many rows are scored");
        if (part.n_drawn() > 0 && r.scores_prompt && r.scored.size() + 1 < r.prompt.size()) FAIL("rows are not scored");
    }
    // The tokens behind the last rows: those of the draft as long as they are what the model says, and one more.
    void draw(const StepPart& part) {
        Request& r = *part.request;
        if (r.sequences.size() == 1 && part.sequence->tokens.size() == r.prompt.size()) {
            for (int64_t sample = 1; sample < r.n; ++sample) {
                Sequence& copy = scheduler.fork(r, *part.sequence);
                copy.sample = static_cast<uint64_t>(sample);
                n_rows[*copy.cached] = copy.computed_n;
                take_tokens(r, copy, part.n_drawn());
            }
        }
        take_tokens(r, *part.sequence, part.n_drawn());
    }
    void take_tokens(Request& r, Sequence& s, int64_t logits) {
        const int64_t first = s.computed_n - logits;
        int64_t accepted = 0;
        for (; accepted < logits; ++accepted) {
            const int32_t token = checks_text ? token_after(row(s, first + accepted), s.sample) : 0;
            s.tokens.push_back(token);
            ++n_logits;
            if (accepted + 1 < logits && s.draft[accepted] != token) break;
        }
        s.draft.clear();
        if (s.computed_n > static_cast<int64_t>(s.tokens.size()) - 1) {
            scheduler.truncate(s, static_cast<int64_t>(s.tokens.size()) - 1);
            n_rows[*s.cached] = s.computed_n;
        }
        const int64_t n_answer = static_cast<int64_t>(s.tokens.size() - r.prompt.size());
        if (n_answer > r.max_tokens) FAIL("request " << r.id << " has " << n_answer << " tokens");
        if (n_answer == r.max_tokens) return finish(r, s);
        if (draft_n == 0) return;
        const std::vector<int32_t> text = answer(r, s.sample);
        for (int64_t i = 0; i < draft_n; ++i) {
            const size_t at = s.tokens.size() + static_cast<size_t>(i);
            s.draft.push_back(at < text.size() && random.below(8) ? text[at] : -1);
        }
    }
    void finish(Request& r, const Sequence& s) {
        if (checks_text && s.tokens != answer(r, s.sample)) FAIL("request " << r.id << " has a wrong answer");
        if (r.sequences.size() == 1) return remove(r);
        scheduler.drop(r, s);
    }
};

// Lengths as in the paper's ShareGPT data: prompts of 161 tokens on average, answers of 338, log-normal.
inline int64_t log_normal(Random& random, double mean, double sigma) {
    const double normal =
        std::sqrt(-2 * std::log(1 - random.uniform())) * std::cos(2 * std::numbers::pi * random.uniform());
    const double n = std::exp(std::log(mean) - sigma * sigma / 2 + sigma * normal);
    return std::clamp<int64_t>(std::lround(n), 4, 1000);
}
inline Request& add_with_usual_lengths(SimulatedEngine& engine, Random& random) {
    const int32_t token = static_cast<int32_t>(engine.requests.size());
    return engine.add(std::vector<int32_t>(log_normal(random, 161, 1.1), token), log_normal(random, 338, 0.9));
}

}  // namespace simulated
