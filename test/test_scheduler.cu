// The scheduler with a simulated engine (simulated_engine.h): what a request is answered, in which order, in how many
// steps, with how many rows computed.
//
//   run:   build/cpu/run_tests -# "[#test_scheduler]"
#include "simulated_engine.h"
#include "temp_folder.h"

namespace {

using simulated::SimulatedEngine;

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
SimulatedEngine engine_of(const Case& c, int64_t max_length = 80) {
    return SimulatedEngine({c.page_size, c.n_pages, c.n_host_pages, c.share_prefixes},
                           {c.step_tokens, c.max_sequences, max_length, c.batching, c.preemption});
}

// The oldest of the requests that are not finished.
const Request* oldest(const SimulatedEngine& engine) {
    for (const auto& request : engine.requests)
        if (!engine.finished.contains(request->id)) return request.get();
    return nullptr;
}

// Requests arrive and are cancelled at random. The engine checks each row and each answer.
int64_t run_at_random(const Case& c, uint64_t seed, int64_t n_requests) {
    CAPTURE(c);
    Random random{seed};
    SimulatedEngine engine = engine_of(c);
    engine.draft_n = c.draft_n;
    const int64_t most_samples = std::min<int64_t>({3, c.step_tokens, c.max_sequences});
    const Request* was_oldest = nullptr;
    bool had_pages = false;
    while (static_cast<int64_t>(engine.requests.size()) < n_requests || !engine.is_done()) {
        while (static_cast<int64_t>(engine.requests.size()) < n_requests && (engine.is_done() || random.below(3) > 0)) {
            const int64_t prompt_n = 1 + random.below(20), n = 1 + random.below(most_samples);
            Request& added = engine.add(random_prompt(random, prompt_n), 1 + random.below(n == 1 ? 60 : 20), n);
            added.scores_prompt = random.below(3) == 0;
        }
        engine.step();
        Request& request = *engine.requests[random.below(static_cast<int64_t>(engine.requests.size()))];
        if (random.below(12) == 0 && !engine.finished.contains(request.id)) {
            if (request.sequences.size() > 1 && random.below(2)) {
                engine.scheduler.drop(request, *request.sequences.front());
            } else {
                engine.remove(request);
            }
        }
        if (engine.n_steps % 8 == 0) engine.cache.check_consistency();
        // Who was the oldest before this step, and is still, has the pages that it had.
        const Request* now = oldest(engine);
        const bool has_pages = now && std::ranges::all_of(now->sequences, [&](const auto& s) {
                                   return s->cached && !engine.cache.is_swapped(*s->cached);
                               });
        if (now == was_oldest && had_pages && !has_pages) FAIL("the oldest request has lost its pages");
        was_oldest = now;
        had_pages = has_pages;
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
#if defined(__SANITIZE_ADDRESS__)
    constexpr int64_t n_requests = 30;  // without optimisation, each memory access checked
#else
    constexpr int64_t n_requests = 100;
#endif
    for (const int64_t page_size : {1, 3, 16}) {
        // What the largest requests need. One answer: 79 rows; three to 15 tokens: 3 * 3 pages of 16 rows.
        const int64_t least = page_size == 1 ? 79 : page_size == 3 ? 27 : 9;
        for (const int64_t step_tokens : {1, 7, 512}) {
            for (const Preemption preemption : {Preemption::swap, Preemption::recompute}) {
                // With the fewest pages one large request runs at a time; with some more others are preempted.
                for (int64_t variant = 0; variant < 4; ++variant) {
                    const int64_t n_pages = least * (2 + variant) / 2;
                    const int64_t n_host_pages = variant == 1 ? least / 2 : 1000;
                    const bool share_prefixes = variant % 2 == 1;
                    const Batching batching = variant == 3 ? Batching::static_batches : Batching::continuous;
                    const int64_t draft_n = variant < 2 ? 3 : 0;
                    n_preemptions[preemption == Preemption::swap] +=
                        run_at_random({page_size, n_pages, n_host_pages, share_prefixes, step_tokens, 12, batching,
                                       preemption, draft_n},
                                      seed++, n_requests);
                }
            }
        }
    }
    CHECK(n_preemptions[0] > n_requests);
    CHECK(n_preemptions[1] > n_requests);
}

TEST_CASE("scheduler: with enough memory every row is computed once, in few steps", "[scheduler]") {
    Random random{3};
    for (const int64_t step_tokens : {2, 7, 512}) {
        SimulatedEngine engine =
            engine_of({3, 1000, 0, false, step_tokens, 100, Batching::continuous, Preemption::swap, 0});
        int64_t n_rows = 0;
        for (int64_t i = 0; i < 30; ++i) {
            const int64_t prompt_n = 1 + random.below(30), answer_n = 1 + random.below(30), n = 1 + i % 2;
            engine.add(random_prompt(random, prompt_n), answer_n, n);
            n_rows += prompt_n + n * (answer_n - 1);
        }
        while (!engine.is_done()) engine.step();
        CHECK(engine.n_rows_computed == n_rows);
        CHECK(engine.scheduler.n_preemptions() == 0);
        CHECK(engine.order.size() == 30);
        CHECK(std::ranges::is_sorted(engine.order));
        // Steps are full as long as requests wait; then at most 29 tokens of an answer are left.
        CHECK(engine.n_steps <= n_rows / step_tokens + 30);
    }
}

TEST_CASE("scheduler: swapped rows are not computed again, dropped rows are", "[scheduler]") {
    const auto run = [](Preemption preemption) {
        SimulatedEngine engine = engine_of({4, 20, 100, false, 64, 8, Batching::continuous, preemption, 0});
        for (int32_t i = 0; i < 8; ++i) engine.add({i, i, i}, 60);
        while (!engine.is_done()) engine.step();
        CHECK(engine.scheduler.n_preemptions() > 0);
        CHECK(engine.order == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7});
        return engine.n_rows_computed;
    };
    CHECK(run(Preemption::swap) == 8 * (3 + 59));
    CHECK(run(Preemption::recompute) > 8 * (3 + 59));
    // Alone it comes back into a cache that it fills.
    SimulatedEngine engine = engine_of({4, 3, 3, false, 64, 8, Batching::continuous, Preemption::swap, 0});
    const Request& alone = engine.add({1, 2, 3}, 10);
    while (alone.sequences.front()->computed_n < 9) engine.step();
    CHECK(engine.scheduler.preempt_last());
    while (!engine.is_done()) engine.step();
    CHECK(engine.n_rows_computed == 12);
}

TEST_CASE("scheduler: who is admitted has room to grow", "[scheduler]") {
    for (const Preemption preemption : {Preemption::swap, Preemption::recompute}) {
        Random random{4};
        SimulatedEngine engine = engine_of({16, 500, 1000, true, 512, 64, Batching::continuous, preemption, 0}, 2000);
        engine.checks_text = false;
        for (int32_t i = 0; i < 100; ++i) add_with_usual_lengths(engine, random);
        while (!engine.is_done()) engine.step();
        CHECK(engine.scheduler.n_preemptions() < 45);  // it is 31; without that room at least 59
    }
}

TEST_CASE("scheduler: as many sequences run together as have pages to their end", "[scheduler]") {
    // Prompts reach into the last page of their answer, so that no sequence ever takes another one.
    for (const auto& [prompt_n, answer_n] : {std::pair<int64_t, int64_t>{9, 8}, {17, 16}, {30, 19}}) {
        const int64_t pages = ceil_div(prompt_n + answer_n - 1, 16);
        SimulatedEngine engine =
            engine_of({16, 6 * pages, 0, false, 512, 6, Batching::continuous, Preemption::recompute, 0});
        Random random{5};
        for (int64_t i = 0; i < 6; ++i) engine.add(random_prompt(random, prompt_n), answer_n);
        while (!engine.is_done()) engine.step();
        INFO("prompts of " << prompt_n << " tokens, answers of " << answer_n);
        CHECK(engine.n_steps == answer_n);
        CHECK(engine.scheduler.n_preemptions() == 0);
    }
    // Two answers whose last row takes a second page: with three pages the second one waits for the first.
    SimulatedEngine engine = engine_of({16, 3, 0, false, 512, 6, Batching::continuous, Preemption::recompute, 0});
    for (int32_t i = 0; i < 2; ++i) engine.add(std::vector<int32_t>(16, i), 2);
    while (!engine.is_done()) engine.step();
    CHECK(engine.n_steps == 4);
    CHECK(engine.scheduler.n_preemptions() == 0);
}

TEST_CASE("scheduler: the latest gives its pages up, and comes back first", "[scheduler]") {
    for (const Preemption preemption : {Preemption::swap, Preemption::recompute}) {
        SimulatedEngine engine = engine_of({4, 12, 12, true, 64, 8, Batching::continuous, preemption, 0});
        for (int32_t i = 0; i < 4; ++i) engine.add({i, i, i}, 30);
        std::vector<std::vector<int64_t>> served;  // changes of who is in a step
        engine.after_step = [&](std::span<const StepPart> parts) {
            std::vector<int64_t> ids;
            for (const StepPart& part : parts) ids.push_back(part.request->id);
            if (served.empty() || served.back() != ids) served.push_back(ids);
        };
        while (!engine.is_done()) engine.step();
        // Twelve pages. Each has one, and one to grow. With three pages for each of four all are taken: 3 waits with
        // the pages that it has, and gives them up when 0 wants its fourth. 32 rows need eight pages.
        CHECK(served.front() == std::vector<int64_t>{0, 1, 2, 3});
        for (const std::vector<int64_t>& ids : served) {
            INFO("a step with " << ids.size() << " requests, the first of them " << ids[0]);
            CHECK(std::ranges::is_sorted(ids));
            for (size_t i = 1; i < ids.size(); ++i) CHECK(ids[i] == ids[i - 1] + 1);  // nobody is passed over
        }
        CHECK(engine.order == std::vector<int64_t>{0, 1, 2, 3});
        CHECK(engine.scheduler.n_preemptions() > 0);
    }
}

TEST_CASE("scheduler: who is preempted in a step is not in it", "[scheduler]") {
    for (const Preemption preemption : {Preemption::swap, Preemption::recompute}) {
        SimulatedEngine engine = engine_of({1, 80, 100, false, 5, 8, Batching::continuous, preemption, 0});
        engine.checks_text = false;
        Request& a = engine.add({1, 2}, 40, 2);
        engine.add({3}, 30);
        engine.step();
        // Both answers of the first request are to be computed in pieces, beside the second request's tokens; its next
        // piece needs a page when the second request has one in the same step.
        for (const auto& s : a.sequences) s->tokens.resize(40);
        std::vector<int64_t> served;
        engine.after_step = [&](std::span<const StepPart> parts) {
            if (engine.scheduler.n_preemptions() != 1 || !served.empty()) return;
            for (const StepPart& part : parts) served.push_back(part.request->id);
        };
        while (!engine.is_done()) engine.step();
        CHECK(served == std::vector<int64_t>{0});
    }
}

TEST_CASE("scheduler: the rows and logits of who is preempted in a step are left for others", "[scheduler]") {
    // Eight rows and three logits a step; 13 pages. The second prompt has as many rows in a step as there are logits.
    SimulatedEngine engine = engine_of({1, 13, 0, false, 8, 3, Batching::continuous, Preemption::recompute, 0});
    engine.checks_text = false;
    Request& a = engine.add({1, 2}, 10);
    const Request& scored = engine.add({3, 4, 5, 6}, 1);
    engine.requests.back()->scores_prompt = true;
    engine.add({7, 8, 9, 10}, 10);
    engine.step();
    CHECK(scored.sequences.front()->computed_n == 2);
    CHECK(engine.requests.back()->sequences.front()->computed_n == 3);
    // Now the third has a row and a logit in the step, until the first one's six rows need its pages.
    a.sequences.front()->tokens.resize(8);
    int64_t n_rows = 0;
    engine.after_step = [&](std::span<const StepPart> parts) {
        for (const StepPart& part : parts) n_rows += part.n;
    };
    engine.step();
    CHECK(engine.scheduler.n_preemptions() == 1);
    CHECK(n_rows == 6 + 2);
}

TEST_CASE("scheduler: who was preempted comes back when each of its answers has room to grow", "[scheduler]") {
    // Pages of four rows. Swapped: the one that it had, one to grow, and one for the first request to grow.
    for (const auto& [steps, comes_back] : {std::pair(1, true), {2, false}}) {  // with 3 pages free, and with 2
        SimulatedEngine engine = engine_of({4, 4, 4, false, 64, 8, Batching::continuous, Preemption::swap, 0});
        engine.add({1, 2, 3}, 14);
        engine.add({4, 5, 6}, 4);
        for (int i = 0; i < steps; ++i) engine.step();
        REQUIRE(engine.scheduler.preempt_last());
        engine.step();
        CHECK(engine.scheduler.n_running() == (comes_back ? 2 : 1));
    }
    // To be computed again, two answers of two tokens: three pages for the first, two for the other, which shares the
    // prompt's, and one for the first request to grow, which has two. Each answer takes a page less where it ends
    // before that.
    for (const auto& [n_pages, max_tokens, comes_back] :
         std::vector<std::tuple<int64_t, int64_t, bool>>{{8, 12, true}, {7, 12, false}, {6, 4, true}, {5, 4, false}}) {
        SimulatedEngine engine =
            engine_of({4, n_pages, 0, false, 64, 8, Batching::continuous, Preemption::recompute, 0});
        engine.add({1, 2, 3}, 14);
        engine.add({4, 5, 6, 7}, max_tokens, 2);
        for (int i = 0; i < 2; ++i) engine.step();
        REQUIRE(engine.scheduler.preempt_last());
        engine.step();
        CHECK(engine.scheduler.n_running() == (comes_back ? 2 : 1));
    }
}

TEST_CASE("scheduler: continuous batching fills the places of those who leave", "[scheduler]") {
    // Eight at a time; every eighth answer is long.
    std::vector<int64_t> answers;
    for (int64_t i = 0; i < 64; ++i) answers.push_back(i % 8 == 3 ? 60 : 1 + i % 5);
    const auto run = [&](Batching batching) {
        SimulatedEngine engine = engine_of({4, 1000, 0, true, 512, 8, batching, Preemption::recompute, 0});
        for (const int64_t n : answers) engine.add({1, 2}, n);
        while (!engine.is_done()) engine.step();
        CHECK(engine.scheduler.n_preemptions() == 0);
        return engine.n_steps;
    };
    // Static: each batch of eight takes as long as its longest answer.
    CHECK(run(Batching::static_batches) == 8 * 60);
    // Continuous: the next request goes to the place that is free first.
    std::vector<int64_t> free_at(8);
    for (const int64_t n : answers) *std::ranges::min_element(free_at) += n;
    CHECK(run(Batching::continuous) == std::ranges::max(free_at));
    CHECK(std::ranges::max(free_at) < 8 * 60 / 3);
}

TEST_CASE("scheduler: a long prompt comes in pieces, and the others go on", "[scheduler]") {
    SimulatedEngine engine = engine_of({4, 1000, 0, true, 10, 8, Batching::continuous, Preemption::recompute, 0});
    for (int32_t i = 0; i < 3; ++i) engine.add({i}, 40);
    engine.step();
    engine.add(std::vector<int32_t>(39, 9), 2);
    std::vector<int64_t> pieces;
    int64_t n_steps = 0;
    engine.after_step = [&](std::span<const StepPart> parts) {
        int64_t n_decodes = 0;
        for (const StepPart& part : parts) {
            if (part.request->id < 3) ++n_decodes;
            if (part.request->id == 3) pieces.push_back(part.n);
        }
        if (++n_steps <= 39) CHECK(n_decodes == 3);
    };
    while (!engine.is_done()) engine.step();
    CHECK(pieces == std::vector<int64_t>{7, 7, 7, 7, 7, 4, 1});
}

TEST_CASE("scheduler: a prompt whose log-probabilities are wanted has the logits that the others leave",
          "[scheduler]") {
    SimulatedEngine engine = engine_of({2, 100, 0, true, 100, 4, Batching::continuous, Preemption::swap, 0});
    engine.add({7, 8, 9}, 3);
    engine.step();
    engine.add({7, 8, 9, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4}, 2).scores_prompt = true;
    std::vector<std::array<int64_t, 3>> its;
    engine.after_step = [&](std::span<const StepPart> parts) {
        if (parts.back().request->scores_prompt)
            its.push_back({parts.back().first, parts.back().n, parts.back().n_scored});
    };
    while (!engine.is_done()) {
        engine.step();
        if (its.size() == 4) engine.scheduler.preempt_last();
    }
    // Nothing is taken over of the prompt before, which begins alike. Beside an answer 3 logits are left, alone 4. When
    // all are scored, its own pages are taken over.
    CHECK(its == std::vector<std::array<int64_t, 3>>{{0, 3, 3}, {3, 3, 3}, {6, 4, 4}, {10, 3, 2}, {12, 2, 0}});
    // Its answers need logits where it ends, and not before.
    SimulatedEngine two = engine_of({2, 100, 0, true, 100, 4, Batching::continuous, Preemption::swap, 0});
    two.add({1, 2, 3, 4, 5, 6}, 1, 2).scores_prompt = true;
    two.step();
    CHECK(two.n_rows_computed == 4);
}

TEST_CASE("scheduler: a prompt that is being computed is shared in the same step", "[scheduler]") {
    SimulatedEngine engine = engine_of({4, 100, 0, true, 100, 8, Batching::continuous, Preemption::recompute, 0});
    std::vector<int32_t> prompt(21, 5);
    for (int32_t i = 0; i < 4; ++i) engine.add(prompt, 3);
    engine.step();
    CHECK(engine.n_rows_computed == 21 + 3 * 1);  // 20 of the 21 rows are shared
    CHECK(engine.cache.use().owned_pages == 5 + 4);
    while (!engine.is_done()) engine.step();
}

// The answer to the first request fills a page in the step in which the second one comes, whose prompt is what the
// first has by then and one token more.
TEST_CASE("scheduler: a row alone is not shared in the step that computes it", "[scheduler]") {
    SimulatedEngine engine = engine_of({4, 100, 0, true, 100, 8, Batching::continuous, Preemption::recompute, 0});
    const Request& first = engine.add(std::vector<int32_t>(6, 5), 9);
    engine.step();
    engine.step();
    std::vector<int32_t> prompt = first.sequences.front()->tokens;
    REQUIRE(prompt.size() == 8);
    prompt.push_back(1);
    engine.add(prompt, 3);
    engine.step();
    CHECK(engine.n_rows_computed == 7 + 1 + 5);  // of the 9 rows 4 are shared
    engine.add(prompt, 3);
    engine.step();
    CHECK(engine.n_rows_computed == 13 + 2 + 1);  // now 8
    while (!engine.is_done()) engine.step();
}

TEST_CASE("scheduler: the answers to one prompt share its pages, also after they were computed again", "[scheduler]") {
    for (const Preemption preemption : {Preemption::swap, Preemption::recompute}) {
        // Of the second request the pages do not suffice without sharing: 3 * ceil(49 / 4) > 20.
        SimulatedEngine engine = engine_of({4, 20, 100, false, 64, 8, Batching::continuous, preemption, 0});
        engine.add(std::vector<int32_t>(4, 1), 30);
        engine.add(std::vector<int32_t>(40, 2), 10, 3);
        int64_t n_together = 0;
        engine.after_step = [&](std::span<const StepPart> parts) {
            const auto n =
                std::ranges::count_if(parts, [](const StepPart& p) { return p.request->id == 1 && p.n_logits; });
            n_together += n == 3;
        };
        while (!engine.is_done()) engine.step();
        CHECK(n_together == 9);
        CHECK(engine.scheduler.n_preemptions() > 0);
        CHECK(engine.n_rows_computed > 33 + 40 + 27 - (preemption == Preemption::swap));
    }
}

TEST_CASE("scheduler: drafts take what is left", "[scheduler]") {
    SimulatedEngine engine = engine_of({4, 100, 0, true, 6, 8, Batching::continuous, Preemption::recompute, 0});
    engine.draft_n = 5;
    engine.add({1, 2}, 20);
    engine.add({3, 4}, 20);
    int64_t n_parts_with_draft = 0;
    engine.after_step = [&](std::span<const StepPart> parts) {
        for (const StepPart& part : parts) n_parts_with_draft += part.first >= 2 && part.n > 1;
    };
    while (!engine.is_done()) engine.step();
    CHECK(n_parts_with_draft > 0);
    CHECK(engine.n_steps < 20);  // without drafts 20: one for the prompts, then one a token
}

TEST_CASE("scheduler: cancelled in every state", "[scheduler]") {
    SimulatedEngine engine = engine_of({4, 12, 12, false, 8, 8, Batching::continuous, Preemption::swap, 0});
    Request& a = engine.add({1, 2, 3}, 40);
    Request& b = engine.add({4, 5, 6}, 40);
    Request& waiting = engine.add(std::vector<int32_t>(40, 7), 2);
    engine.remove(waiting);
    CHECK(engine.scheduler.n_waiting() == 2);
    while (engine.scheduler.n_preemptions() == 0) engine.step();
    CHECK(engine.cache.use().host_pages > 0);
    engine.remove(b);  // swapped out
    CHECK(engine.cache.use().host_pages == 0);
    Request& prompt = engine.add(std::vector<int32_t>(12, 7), 2);
    while (prompt.sequences[0]->computed_n == 0) engine.step();
    CHECK(prompt.sequences[0]->computed_n < 12);
    engine.remove(prompt);  // a part of its prompt is computed
    CHECK_FALSE(prompt.sequences[0]->cached.has_value());
    CHECK(prompt.sequences[0]->computed_n == 0);
    engine.remove(a);  // it runs
    CHECK(engine.cache.pages_available() == 12);
    CHECK(engine.scheduler.next_step().empty());
    CHECK_THAT(error_of([&] { engine.scheduler.remove(a); }), ContainsSubstring("request 0 was removed before"));
}

TEST_CASE("scheduler: of several answers that are computed again the first may be cancelled", "[scheduler]") {
    SimulatedEngine engine = engine_of({4, 12, 0, false, 8, 8, Batching::continuous, Preemption::recompute, 0});
    Request& request = engine.add({1, 2, 3}, 9, 2);
    while (request.sequences.front()->computed_n < 6) engine.step();
    CHECK(engine.scheduler.preempt_last());
    engine.step();
    CHECK_FALSE(request.sequences.back()->cached.has_value());  // it will be forked from the first
    engine.scheduler.drop(request, *request.sequences.front());
    while (!engine.is_done()) engine.step();
}

TEST_CASE("scheduler: it is full until somebody leaves", "[scheduler]") {
    SimulatedEngine engine = engine_of({4, 12, 0, false, 8, 1, Batching::continuous, Preemption::recompute, 0});
    Request& runs = engine.add({1, 2, 3}, 20);
    engine.add({1, 2, 3}, 9);
    CHECK_FALSE(engine.scheduler.is_full());
    engine.step();
    CHECK(engine.scheduler.is_full());
    // A step without a row for the one that waits does not know whether there is a place for it.
    engine.checks_text = false;
    runs.sequences.front()->tokens.resize(12);
    engine.step();
    CHECK_FALSE(engine.scheduler.is_full());
    engine.step();
    CHECK(engine.scheduler.is_full());
    engine.remove(runs);
    CHECK_FALSE(engine.scheduler.is_full());
    engine.step();
    CHECK_FALSE(engine.scheduler.is_full());
}

TEST_CASE("scheduler: what can never run is refused", "[scheduler]") {
    PagedCache cache({.page_size = 4, .n_pages = 10});
    Scheduler scheduler({.step_tokens = 16, .max_sequences = 3, .max_length = 60}, cache);
    const auto add = [&](int64_t prompt_n, int64_t max_tokens, int64_t n) {
        Request request;
        request.id = 7;
        request.prompt.resize(prompt_n);
        request.max_tokens = max_tokens;
        request.n = n;
        return error_of([&] {
            scheduler.add(request);
            scheduler.remove(request);
        });
    };
    CHECK(one_line_with(add(0, 1, 1), "the prompt is empty"));
    CHECK(one_line_with(add(1, 0, 1), "max_tokens is 0"));
    CHECK(one_line_with(add(1, 1, 0), "0 answers"));
    CHECK(one_line_with(add(1, 1, 4), "4 answers", "at most 3"));
    CHECK(one_line_with(add(50, 11, 1), "more than the 60"));
    CHECK(one_line_with(add(31, 11, 1), "need 11 pages of the cache, which has 10"));
    CHECK(add(30, 11, 1) == "");  // 40 rows
    CHECK(add(30, 3, 3) == "");   // 7 pages for all, and one more for each
    CHECK(one_line_with(add(30, 4, 3), "need 13 pages"));
    Request request;
    request.prompt = {1};
    scheduler.add(request);
    CHECK(one_line_with(error_of([&] { scheduler.add(request); }), "added before"));
    CHECK(scheduler.next_step().size() == 1);
    scheduler.fork(request, *request.sequences[0]);
    CHECK(one_line_with(error_of([&] { scheduler.next_step(); }), "2 sequences", "n is 1"));
    CHECK(one_line_with(error_of([&] { scheduler.drop(request, Sequence()); }), "no such sequence"));
    for (int i = 0; i < 2; ++i) scheduler.drop(request, *request.sequences[0]);
    CHECK(one_line_with(error_of([&] { scheduler.next_step(); }), "0 sequences", "remove it"));
    CHECK(one_line_with(error_of([&] { Scheduler({.step_tokens = 0, .max_length = 8}, cache); }), "at least 1 token"));
    CHECK(one_line_with(error_of([&] { Scheduler({}, cache); }), "room for at least 1 token"));
}

// It takes 6.4 us where this was written, with the simulated engine. The bound has room for sanitizers.
TEST_CASE("scheduler: a step of 64 sequences costs microseconds", "[scheduler]") {
    SimulatedEngine engine =
        engine_of({16, 64 * 80, 0, true, 512, 64, Batching::continuous, Preemption::recompute, 0}, 2000);
    engine.checks_text = false;
    for (int32_t i = 0; i < 80; ++i) engine.add(std::vector<int32_t>(500, i), 600);  // some wait all the time
    while (engine.scheduler.n_running() < 64) engine.step();
    double fastest = 1;
    for (int64_t i = 0; i < 400; ++i) {
        const double start = seconds_now();
        engine.step();
        fastest = std::min(fastest, seconds_now() - start);
    }
    CAPTURE(fastest);
    CHECK(fastest < 1e-3);
}
