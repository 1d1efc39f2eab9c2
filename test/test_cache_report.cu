// What the reports say of simulated runs, and the issue's bound on wasted memory.
//
//   run:   build/cpu/run_tests -# "[#test_cache_report]"
#include <cstdlib>

#include "simulated_engine.h"
#include "temp_folder.h"

namespace {

using simulated::SimulatedEngine;

// LLM_TEST_PICTURES=FOLDER keeps what is drawn, to be looked at.
void keep_picture(const TempFolder& folder, const std::string& name) {
    if (const char* target = std::getenv("LLM_TEST_PICTURES"))
        spit(std::string(target) + "/" + name, slurp(folder / name));
}

}  // namespace

TEST_CASE("cache report: in pages 96 % of the allocated memory holds tokens, in slots less than 40 %",
          "[cache_report]") {
    Random random{5};
    const CacheSizes sizes{.page_size = 16, .n_pages = 1000};
    SimulatedEngine engine(sizes, {.step_tokens = 512, .max_sequences = 256, .max_length = 2048});
    engine.checks_text = false;
    CacheReport report(sizes, 2048);
    for (int32_t i = 0; i < 300; ++i) {
        const Request& request = add_with_usual_lengths(engine, random);
        report.finished(static_cast<int64_t>(request.prompt.size()), request.max_tokens);
    }
    engine.after_step = [&](std::span<const StepPart>) { report.step(engine.cache.use()); };
    while (!engine.is_done()) engine.step();
    const CacheReport::Shares pages = report.paged(), slots = report.contiguous();
    CHECK(pages.tokens >= 0.96);
    CHECK(slots.tokens < 0.4);
    CHECK(slots.tokens + slots.reserved + slots.internal + slots.external == Approx(1));
    TempFolder folder;
    report.write_png(folder / "cache.png");
    keep_picture(folder, "cache.png");
    UNSCOPED_INFO(report.text());
    CHECK(engine.cache.use().sequence_rows == 0);
}

TEST_CASE("cache report: the shares of two sequences by hand", "[cache_report]") {
    // 23 rows: two slots of 10 and three that are left.
    CacheReport report({.page_size = 1, .n_pages = 23}, 10);
    report.finished(4, 3);  // 4, 5, 6 rows in three steps
    report.finished(2, 1);  // 2 rows in one
    const CacheReport::Shares slots = report.contiguous();
    CHECK(slots.tokens == Approx(17.0 / 40 * 20 / 23));
    CHECK(slots.reserved == Approx((2 + 1) / 40.0 * 20 / 23));
    CHECK(slots.internal == Approx((3 * 4 + 8) / 40.0 * 20 / 23));
    CHECK(slots.external == Approx(3.0 / 23));

    CacheReport pages({.page_size = 4, .n_pages = 10}, 40);
    pages.step({.n_pages = 10,
                .free_pages = 5,
                .kept_pages = 2,
                .owned_pages = 3,
                .n_sequences = 2,
                .used_rows = 10,
                .sequence_rows = 14});
    pages.step({.n_pages = 10,
                .free_pages = 6,
                .kept_pages = 3,
                .owned_pages = 1,
                .n_sequences = 1,
                .used_rows = 2,
                .sequence_rows = 2});
    CHECK(pages.paged().tokens == Approx(12.0 / 16));
    CHECK(pages.paged().internal == Approx(4.0 / 16));
    const std::string text = pages.text();
    CHECK_THAT(text, ContainsSubstring("15.0 % tokens, 5.0 % unused in pages, 25.0 % kept, 55.0 % free"));
    CHECK_THAT(text, ContainsSubstring("75.0 % hold tokens; 1.5 sequences at a time"));
    CHECK_THAT(text, ContainsSubstring("saves 25.0 % of the rows"));
    CHECK_THAT(text, ContainsSubstring("1 sequences at a time"));

    TempFolder folder;  // nothing happened, and very much did
    const CacheReport nothing({.n_pages = 4}, 100);
    CHECK_THAT(nothing.text(), ContainsSubstring("there was no step"));
    CHECK(one_line_with(error_of([&] { CacheReport({.n_pages = 4}, 0); }), "at least 1 row, not 0"));
    CacheReport idle({.page_size = 4, .n_pages = 4}, 16);  // steps, and nobody in the cache
    idle.step({.n_pages = 4, .free_pages = 4});
    CHECK_THAT(idle.text(), ContainsSubstring("saves 0.0 % of the rows"));
    nothing.write_png(folder / "nothing.png");
    for (int64_t i = 0; i < 5000; ++i) pages.step({.n_pages = 10, .free_pages = 10});
    pages.write_png(folder / "much.png");
}

TEST_CASE("timeline: what each request does in each step, static beside continuous", "[cache_report]") {
    TempFolder folder;
    std::vector<std::pair<std::string, Timeline>> timelines;
    for (const Batching batching : {Batching::static_batches, Batching::continuous}) {
        Random random{9};
        SimulatedEngine engine({.page_size = 4, .n_pages = 60, .n_host_pages = 200},
                               {.step_tokens = 32, .max_sequences = 8, .max_length = 200, .batching = batching});
        Timeline timeline;
        std::set<int64_t> left;
        const auto leave = [&] {
            for (const int64_t id : engine.finished)
                if (left.insert(id).second) timeline.leave(id);
        };
        engine.after_step = [&](std::span<const StepPart> parts) { timeline.step(parts); };
        for (int32_t i = 0; i < 32; ++i) {
            engine.add(std::vector<int32_t>(4 + random.below(40), i), 3 + random.below(random.below(4) ? 20 : 90));
            timeline.arrive(i);
            if (i >= 12) engine.step(), leave();
        }
        while (!engine.is_done()) engine.step(), leave();
        CHECK(timeline.n_steps() == engine.n_steps);
        CHECK((engine.scheduler.n_preemptions() > 0) == (batching == Batching::continuous));  // as the picture shows
        timelines.push_back({concat(batching == Batching::continuous ? "Continuous" : "Static",
                                    " batching: ", engine.n_steps, " steps"),
                             timeline});
    }
    CHECK(timelines[1].second.n_steps() * 3 < timelines[0].second.n_steps() * 2);
    write_timelines_png(folder / "timeline.png", timelines);
    keep_picture(folder, "timeline.png");
    Timeline twice;
    twice.arrive(1);
    CHECK(one_line_with(error_of([&] { twice.arrive(1); }), "request 1 has arrived before"));
    Request stranger;
    stranger.id = 7;
    const StepPart part{.request = &stranger, .sequence = nullptr, .first = 0, .n = 1, .n_logits = 1, .n_scored = 0};
    CHECK(one_line_with(error_of([&] { twice.step({&part, 1}); }), "request 7 is in a step, and has not arrived"));
    CHECK(one_line_with(error_of([&] { write_timelines_png(folder / "none.png", {}); }), "give at least one"));
    Timeline batch;  // of more requests than a picture can have rows
    for (int64_t i = 0; i < 20'000; ++i) batch.arrive(i), batch.step({}), batch.leave(i);
    const std::pair<std::string, Timeline> alone{"20,000 requests", batch};
    CHECK_NOTHROW(write_timelines_png(folder / "batch.png", {&alone, 1}));
    keep_picture(folder, "batch.png");
}

TEST_CASE("timeline: as text", "[cache_report]") {
    // Two at a time, five tokens a step; seven pages of two rows: all are taken when request 0 needs its fifth.
    SimulatedEngine engine({.page_size = 2, .n_pages = 7, .share_prefixes = false},
                           {.step_tokens = 5, .max_sequences = 2, .max_length = 20});
    Timeline timeline;
    engine.after_step = [&](std::span<const StepPart> parts) { timeline.step(parts); };
    const auto step = [&] {
        const std::set<int64_t> before = engine.finished;
        engine.step();
        for (const int64_t id : engine.finished)
            if (!before.contains(id)) timeline.leave(id);
    };
    const auto add = [&](int64_t prompt_n, int64_t answer_n) {
        timeline.arrive(engine.add(std::vector<int32_t>(prompt_n, 1), answer_n).id);
    };
    add(4, 7);
    add(3, 6);
    step();
    add(1, 2);
    while (!engine.is_done()) step();
    CHECK(timeline.text() ==
          "pdddddd\n"
          "ppddd--ppd\n"  // its prompt and three tokens are computed again, in two pieces
          " .......pd\n");
}
