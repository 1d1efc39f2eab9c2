// What the reports say of simulated runs, and that pages waste less than 4 % of the memory that they take.
//
//   run:   build/cpu/run_tests -# "[#test_cache_report]"
#include <cstdlib>

#include "simulated_engine.h"
#include "stb_image.h"
#include "temp_folder.h"

namespace {

using simulated::SimulatedEngine;

// LLM_TEST_PICTURES=FOLDER keeps what is drawn, to be looked at.
void keep_picture(const TempFolder& folder, const std::string& name) {
    if (const char* target = std::getenv("LLM_TEST_PICTURES"))
        spit(std::string(target) + "/" + name, slurp(folder / name));
}

struct Pixels {
    int width = 0, height = 0, channels = 0;
    std::unique_ptr<uint8_t, void (*)(void*)> rgb;

    explicit Pixels(const std::string& path)
        : rgb(stbi_load(path.c_str(), &width, &height, &channels, 3), stbi_image_free) {
        REQUIRE(rgb != nullptr);
    }
    std::array<int, 3> at(double x, double y) const {
        const uint8_t* const its = rgb.get() + 3 * (static_cast<int>(y) * width + static_cast<int>(x));
        return {its[0], its[1], its[2]};
    }
};
constexpr std::array<int, 3> kWhite{255, 255, 255}, kWaiting{214, 214, 214}, kPrefill{230, 159, 0},
    kDecode{0, 114, 178}, kTokens{0, 158, 115}, kReserved{230, 159, 0}, kInternal{213, 94, 0}, kKept{86, 180, 233},
    kFree{232, 232, 232};

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
    CacheReport much({.page_size = 4, .n_pages = 10}, 40);  // full for half of the time, then empty
    for (int64_t i = 0; i < 5000; ++i)
        much.step(i < 2500 ? CacheUse{.n_pages = 10, .owned_pages = 10, .used_rows = 40}
                           : CacheUse{.n_pages = 10, .free_pages = 10});
    much.write_png(folder / "much.png");
    const Pixels picture(folder / "much.png");
    const double left = 520, right = 1090;
    CHECK(picture.at(left + 0.49 * (right - left), 200) == kTokens);
    CHECK(picture.at(left + 0.51 * (right - left), 200) == kFree);
    // Of 10 pages 3 full of tokens, 2 more in use, 2 kept, 3 free; of slots a quarter tokens, a twentieth reserved.
    CacheReport steady({.page_size = 4, .n_pages = 10}, 20);
    steady.step({.n_pages = 10, .free_pages = 3, .kept_pages = 2, .owned_pages = 5, .used_rows = 12});
    steady.finished(4, 3);
    steady.write_png(folder / "steady.png");
    const Pixels shares(folder / "steady.png");
    const auto at = [&](double x, double share) { return shares.at(x, 360 - share * (360 - 56)); };
    CHECK((at(800, 0.28) == kTokens && at(800, 0.32) == kInternal && at(800, 0.48) == kInternal));
    CHECK((at(800, 0.52) == kKept && at(800, 0.68) == kKept && at(800, 0.72) == kFree && at(800, 0.98) == kFree));
    CHECK((at(105, 0.23) == kTokens && at(105, 0.275) == kReserved && at(105, 0.32) == kInternal));
    CHECK((at(275, 0.58) == kTokens && at(275, 0.62) == kInternal && at(275, 0.98) == kInternal));
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
}

TEST_CASE("timeline: where a picture has each request and step", "[cache_report]") {
    const TempFolder folder;
    const double left = 24, right = 1096, top = 36;
    // Two requests in four steps: a row has 14 pixels, of which the last is white, and a panel 36 + 2 * 14 + 30.
    Request request;
    request.id = 1, request.prompt = {1};
    StepPart part{.request = &request, .sequence = nullptr, .first = 0, .n = 1, .n_logits = 1, .n_scored = 0};
    Timeline first, second;
    first.arrive(1), first.arrive(2);
    first.step({}), first.step({&part, 1}), part.first = 1, first.step({&part, 1}), first.leave(1), first.step({});
    second.arrive(1), second.step({&part, 1});
    const std::pair<std::string, Timeline> both[] = {{"first", first}, {"second", second}};
    write_timelines_png(folder / "two.png", both);
    const Pixels two(folder / "two.png");
    CHECK(two.height == 2 * (36 + 2 * 14 + 30) + 34);
    const auto middle = [&](int step) { return left + (step + 0.5) * (right - left) / 4; };
    const std::array<int, 3> colors[] = {kWaiting, kPrefill, kDecode, kWhite};
    for (int step = 0; step < 4; ++step) {
        CHECK(two.at(middle(step), top + 7) == colors[step]);
        CHECK(two.at(middle(step), top + 13) == kWhite);
        CHECK(two.at(middle(step), top + 14 + 7) == kWaiting);
    }
    CHECK(two.at(middle(0), 94 + top + 7) == kDecode);
    CHECK(two.at(middle(1), 94 + top + 7) == kWhite);
    CHECK(two.at(left + 7, two.height - 20) == kWaiting);  // the legend

    // Of twice 4100 requests, a hundred more in each step, it shows every fifth, in two pixels of height.
    Timeline batch;
    for (int64_t i = 0; i < 4100; ++i) {
        batch.arrive(i);
        if (i % 100 == 99) batch.step({});
    }
    const std::pair<std::string, Timeline> batches[] = {{"4100 requests", batch}, {"again", batch}};
    write_timelines_png(folder / "batch.png", batches);
    keep_picture(folder, "batch.png");
    const Pixels many(folder / "batch.png");
    const int bottom = 36 + 2 * 820;
    CHECK(many.height == 2 * (bottom + 30) + 34);
    CHECK(many.at((left + right) / 2, bottom - 1) == kWhite);  // it came in the last step
    CHECK(many.at(right - 10, bottom - 1) == kWaiting);
    int n_ticks = 0;  // a line every five steps
    for (int x = 1; x < many.width; ++x) {
        n_ticks += many.at(x, bottom + 2) != kWhite && many.at(x - 1, bottom + 2) == kWhite;
        CHECK(many.at(x, bottom + 27) == kWhite);
    }
    CHECK(n_ticks == 9);
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
