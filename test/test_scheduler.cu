// The scheduler with a simulated engine (simulated_engine.h): what a request is answered, in which order, in how many
// steps, with how many rows computed.
//
//   run:   build/cpu/run_tests -# "[#test_scheduler]"
#include "simulated_engine.h"
#include "temp_folder.h"

namespace {

using simulated::Engine;

std::vector<int32_t> random_prompt(Random& random, int64_t n) {
    std::vector<int32_t> tokens(n);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(2));  // many begin alike
    return tokens;
}

struct Case {
    int64_t page_size, n_pages, n_host_pages;
    bool share_prefixes;
    int64_t step_tokens, max_sequences;
    Batching batching;
    Preemption preemption;
    int64_t draft_n;
};
std::ostream& operator<<(std::ostream& text, const Case& c) {
    return text << c.n_pages << " pages of " << c.page_size << ", " << c.n_host_pages << " on the host, sharing "
                << c.share_prefixes << ", " << c.step_tokens << " tokens a step, " << c.max_sequences << " sequences, "
                << (c.batching == Batching::continuous ? "continuous, " : "static, ")
                << (c.preemption == Preemption::swap ? "swap" : "recompute") << ", drafts of " << c.draft_n;
}
Engine engine_of(const Case& c, int64_t max_length = 80) {
    return Engine({c.page_size, c.n_pages, c.n_host_pages, c.share_prefixes},
                  {c.step_tokens, c.max_sequences, max_length, c.batching, c.preemption});
}

// The oldest of the requests that are not finished.
const Request* oldest(const Engine& engine) {
    for (const auto& request : engine.requests)
        if (!engine.finished.contains(request->id)) return request.get();
    return nullptr;
}

// Requests arrive and are cancelled at random. The engine checks each row and each answer.
int64_t run_at_random(const Case& c, uint64_t seed, int64_t n_requests) {
    CAPTURE(c);
    Random random{seed};
    Engine engine = engine_of(c);
    engine.draft_n = c.draft_n;
    const int64_t most_samples = std::min<int64_t>({3, c.step_tokens, c.max_sequences});
    std::set<SequenceId> of_oldest;
    const Request* was_oldest = nullptr;
    while (static_cast<int64_t>(engine.requests.size()) < n_requests || !engine.is_done()) {
        while (static_cast<int64_t>(engine.requests.size()) < n_requests && (engine.is_done() || random.below(3) > 0)) {
            const int64_t prompt_n = 1 + random.below(20), n = 1 + random.below(most_samples);
            engine.add(random_prompt(random, prompt_n), 1 + random.below(n == 1 ? 60 : 20), n);
        }
        engine.step();
        if (random.below(12) == 0) {
            Request& request = *engine.requests[random.below(static_cast<int64_t>(engine.requests.size()))];
            if (!engine.finished.contains(request.id)) engine.remove(request);
        }
        engine.cache.check_consistency();
        // Who was the oldest before this step, and is still, has the pages that it had.
        const Request* now = oldest(engine);
        std::set<SequenceId> ids;
        if (now)
            for (const auto& s : now->sequences)
                if (s->cached && !engine.cache.is_swapped(*s->cached)) ids.insert(*s->cached);
        if (now == was_oldest && now && ids.size() < now->sequences.size() && !of_oldest.empty())
            if (!std::ranges::includes(ids, of_oldest)) FAIL("the oldest request has lost its pages");
        was_oldest = now;
        of_oldest = ids;
        if (engine.n_steps > 100'000) FAIL("after 100000 steps there are unfinished requests");
    }
    CHECK(engine.cache.pages_available() == c.n_pages);
    CHECK(engine.cache.use().host_pages == 0);
    CHECK(engine.scheduler.n_running() + engine.scheduler.n_waiting() == 0);
    return engine.scheduler.n_preemptions();
}

}  // namespace

TEST_CASE("scheduler: every request is answered, whatever runs beside it and however little memory there is",
          "[scheduler]") {
    uint64_t seed = 1;
    int64_t n_preemptions[2] = {};
    for (const int64_t page_size : {1, 3, 16}) {
        // What the largest requests need. One answer: 79 rows; three to 15 tokens: 3 * 3 pages of 16 rows.
        const int64_t least = page_size == 1 ? 79 : page_size == 3 ? 27 : 9;
        for (const int64_t step_tokens : {1, 7, 512}) {
            for (const Preemption preemption : {Preemption::swap, Preemption::recompute}) {
                // With the fewest pages one request runs at a time; with three times as many some are preempted.
                for (int64_t variant = 0; variant < 4; ++variant) {
                    const int64_t n_pages = variant == 0 ? least : 3 * least;
                    const int64_t n_host_pages = variant == 1 ? least / 2 : 1000;
                    const bool share_prefixes = variant % 2 == 1;
                    const Batching batching = variant == 3 ? Batching::static_batches : Batching::continuous;
                    const int64_t draft_n = variant < 2 ? 3 : 0;
                    n_preemptions[preemption == Preemption::swap] +=
                        run_at_random({page_size, n_pages, n_host_pages, share_prefixes, step_tokens, 12, batching,
                                       preemption, draft_n},
                                      seed++, 100);
                }
            }
        }
    }
    CHECK(n_preemptions[0] > 200);
    CHECK(n_preemptions[1] > 200);
}
