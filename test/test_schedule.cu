// Learning rate schedules at their corner points, and what holds for every step.
//
//   run:   build/cpu/run_tests -# "[#test_schedule]"
#include <algorithm>
#include <cmath>

#include "optim/optim.h"
#include "temp_folder.h"
#include "test.h"

namespace {

Schedule make(const std::string& name, int64_t warmup = 10, int64_t steps = 110) {
    Schedule schedule;
    schedule.name = name;
    schedule.peak = 0.5;  // powers of two: the corner points come out exact
    schedule.min_ratio = 0.125;
    schedule.decay_fraction = 0.25;
    schedule.warmup = warmup;
    schedule.steps = steps;
    return schedule;
}

// How much of the way from peak to floor is gone in the last step, after a warmup that ends before it.
double descent_at_the_end(const Schedule& s) { return s.name == "constant" ? 0 : 1; }
bool reads(const Schedule& s, double Schedule::*field) {
    const std::vector<std::string> readers = schedules_that_read(field);
    return std::ranges::find(readers, s.name) != readers.end();
}
double floor_of(const Schedule& s) { return reads(s, &Schedule::min_ratio) ? s.peak * s.min_ratio : 0; }
double end_of(const Schedule& s) {
    const double descent = descent_at_the_end(s);
    return s.peak * (1 - descent) + floor_of(s) * descent;
}

// The most that the rate falls in one step, as a part of peak - floor. A cosine is at most pi / 2 times as steep as a
// line.
double steepest_step(const Schedule& s) {
    const double steps = static_cast<double>(s.steps), rest = steps - static_cast<double>(s.warmup);
    return 1.6 / std::max(1.0, std::min(rest, s.name == "wsd" ? s.decay_fraction * steps : steps));
}

// A few roundings of numbers below 1.
bool near(double a, double b) { return std::abs(a - b) <= 8 * 0x1p-53; }

}  // namespace

TEST_CASE("every schedule starts with a linear warmup", "[schedule]") {
    for (const std::string& name : schedule_names()) {
        INFO(name);
        const Schedule schedule = make(name);
        CHECK(near(learning_rate(schedule, 1), 0.05));
        CHECK(near(learning_rate(schedule, 5), 0.25));
        CHECK(learning_rate(schedule, 10) == 0.5);
    }
}

TEST_CASE("schedules between the warmup and the end", "[schedule]") {
    // Warmup ends at 10, the run at 110. floor = 0.5 / 8 = 0.0625, so a quarter of the way down is 0.109375 below 0.5.
    SECTION("constant") {
        for (int64_t s : {11, 60, 109, 110}) CHECK(learning_rate(make("constant"), s) == 0.5);
    }
    SECTION("linear") {
        CHECK(near(learning_rate(make("linear"), 11), 0.5 - 0.4375 / 100));
        CHECK(near(learning_rate(make("linear"), 35), 0.390625));
        CHECK(near(learning_rate(make("linear"), 60), 0.28125));
    }
    SECTION("cosine") {
        CHECK(near(learning_rate(make("cosine"), 60), 0.28125));  // half way in steps is half way down
        CHECK(near(learning_rate(make("cosine"), 35), 0.0625 + 0.4375 * (1 + std::sqrt(0.5)) / 2));
        CHECK(near(learning_rate(make("cosine"), 85), 0.0625 + 0.4375 * (1 - std::sqrt(0.5)) / 2));
        CHECK(learning_rate(make("cosine"), 35) > learning_rate(make("linear"), 35));  // slow at first,
        CHECK(learning_rate(make("cosine"), 85) < learning_rate(make("linear"), 85));  // slow at the end
    }
    SECTION("wsd") {
        // The last quarter of ALL steps, those of the warmup included: from 82.5 on.
        CHECK(learning_rate(make("wsd"), 11) == 0.5);
        CHECK(learning_rate(make("wsd"), 82) == 0.5);
        CHECK(near(learning_rate(make("wsd"), 83), 0.5 - 0.4375 * 0.5 / 27.5));
        CHECK(near(learning_rate(make("wsd"), 96), 0.5 - 0.4375 * 13.5 / 27.5));
    }
}

TEST_CASE("schedules at the end and beyond", "[schedule]") {
    for (const std::string& name : schedule_names()) {
        INFO(name);
        for (int64_t s : {110, 111, 1000000}) CHECK(learning_rate(make(name), s) == end_of(make(name)));
        Schedule to_zero = make(name);
        to_zero.min_ratio = 0;
        CHECK(learning_rate(to_zero, 110) == end_of(to_zero));
    }
}

TEST_CASE("schedules without warmup, with nothing but warmup, of one step", "[schedule]") {
    for (const std::string& name : schedule_names()) {
        INFO(name);
        const Schedule no_warmup = make(name, 0, 100);
        CHECK(learning_rate(no_warmup, 1) <= 0.5);
        CHECK(learning_rate(no_warmup, 1) >= 0.49);
        CHECK(learning_rate(no_warmup, 100) == end_of(no_warmup));
        const Schedule only_warmup = make(name, 100, 100);
        CHECK(near(learning_rate(only_warmup, 99), 0.495));
        CHECK(learning_rate(only_warmup, 100) == 0.5);
        CHECK(learning_rate(only_warmup, 101) == 0.5);
        CHECK(learning_rate(make(name, 1, 1), 1) == 0.5);
        CHECK(learning_rate(make(name, 0, 1), 1) == end_of(make(name, 0, 1)));
    }
    Schedule wsd = make("wsd", 90, 100);  // the warmup reaches into the decay: down from where the warmup ends
    CHECK(learning_rate(wsd, 90) == 0.5);
    CHECK(near(learning_rate(wsd, 95), 0.28125));
    wsd.decay_fraction = 0;  // no decay at all
    CHECK(learning_rate(wsd, 100) == 0.5);
    wsd = make("wsd", 0, 100);
    wsd.decay_fraction = 1;  // nothing but decay: linear
    for (int64_t s : {1, 37, 100}) CHECK(learning_rate(wsd, s) == learning_rate(make("linear", 0, 100), s));
}

TEST_CASE("schedules rise to the peak, then never rise again and never jump", "[schedule]") {
    for (const std::string& name : schedule_names())
        for (int64_t warmup : {0, 1, 7, 50, 97})
            for (double fraction : {0.0, 0.2, 1.0}) {
                INFO(name << ", warmup " << warmup << ", decay fraction " << fraction);
                Schedule schedule = make(name, warmup, 97);
                schedule.decay_fraction = fraction;
                bool good = true;
                for (int64_t s = 2; s <= 120; ++s) {
                    const double before = learning_rate(schedule, s - 1), now = learning_rate(schedule, s);
                    const double least = floor_of(schedule) * std::min(1.0, 8.0 * static_cast<double>(s) / 97);
                    good = good && now >= least - 1e-15 && now <= 0.5;
                    good = good && (s <= warmup ? now > before : now <= before);
                    if (s > warmup)
                        good = good && before - now <= (0.5 - floor_of(schedule)) * steepest_step(schedule) + 1e-15;
                }
                CHECK(good);
            }
}

TEST_CASE("the table says which schedules read the final ratio and the decay fraction", "[schedule]") {
    for (const std::string& name : schedule_names())
        for (double Schedule::*field : {&Schedule::min_ratio, &Schedule::decay_fraction}) {
            Schedule schedule = make(name), other = schedule;
            other.*field = 0.5;
            bool differs = false;
            for (int64_t s = 1; s <= 110; ++s) differs |= learning_rate(schedule, s) != learning_rate(other, s);
            INFO(name << ", " << (field == &Schedule::min_ratio ? "min_ratio" : "decay_fraction"));
            CHECK(differs == reads(schedule, field));
        }
}

TEST_CASE("a schedule that is given other steps goes on by its rule", "[schedule]") {
    const std::vector<std::string> stretched = {"linear", "cosine"};
    for (const std::string& name : schedule_names())  // the others: as if the run had begun with so many steps
        for (const int64_t step : {4, 60}) {
            if (std::ranges::find(stretched, name) != stretched.end()) continue;
            INFO(name);
            Schedule longer = continue_schedule(make(name), step, 200), whole = make(name);
            whole.steps = 200;
            for (int64_t s = step + 1; s <= 200; ++s) CHECK(learning_rate(longer, s) == learning_rate(whole, s));
        }
    for (const std::string& name : stretched) {  // 50 steps are left: each of them takes 3, or a half
        const Schedule schedule = make(name), longer = continue_schedule(schedule, 60, 210),
                       shorter = continue_schedule(schedule, 60, 85);
        CHECK(near(learning_rate(longer, 60), learning_rate(schedule, 60)));
        for (int64_t s = 61; s <= 110; ++s)
            CHECK(near(learning_rate(longer, 60 + 3 * (s - 60)), learning_rate(schedule, s)));
        for (int64_t s = 61; s <= 85; ++s)
            CHECK(near(learning_rate(shorter, s), learning_rate(schedule, 60 + 2 * (s - 60))));
        // Twice: the rest of the rest. At the end: it stays there.
        const Schedule twice = continue_schedule(longer, 120, 300);
        CHECK(near(learning_rate(twice, 120), learning_rate(longer, 120)));
        CHECK(near(learning_rate(twice, 210), learning_rate(longer, 165)));
        CHECK(near(learning_rate(twice, 300), 0.0625));
        CHECK(near(learning_rate(continue_schedule(schedule, 110, 500), 111), 0.0625));
        CHECK(near(learning_rate(continue_schedule(schedule, 110, 500), 500), 0.0625));
        CHECK(continue_schedule(longer, 120, 300).last_step() == 300);
    }
    Schedule next = make("linear");
    next.warmup = 4;
    next = begin_schedule(next, 110, 160);
    CHECK(near(learning_rate(next, 111), 0.125));
    CHECK(near(learning_rate(next, 114), 0.5));
    CHECK(near(learning_rate(next, 160), 0.0625));
    next.warmup = 0;
    CHECK(learning_rate(begin_schedule(next, 110, 160), 110) == 0.5);  // in the step before its first: not 0 / 0
    // A run's second schedule that is given other steps, too, is as if it had begun with them.
    const Schedule longer = continue_schedule(begin_schedule(make("wsd"), 110, 160), 120, 310),
                   whole = begin_schedule(make("wsd"), 110, 310);
    CHECK(longer.last_step() == 310);
    for (int64_t s = 121; s <= 310; ++s) CHECK(learning_rate(longer, s) == learning_rate(whole, s));
    CHECK_THAT(error_of([] { continue_schedule(make("cosine"), 60, 60); }), ContainsSubstring("60"));
    CHECK_THAT(error_of([] { begin_schedule(make("cosine"), 60, 60); }), ContainsSubstring("to step 60 has no steps"));
    // Nothing of the position of a schedule that was stretched is left in the one that follows it.
    const Schedule after = begin_schedule(continue_schedule(make("cosine"), 60, 210), 210, 320);
    for (int64_t s = 1; s <= 110; ++s) CHECK(learning_rate(after, 210 + s) == learning_rate(make("cosine"), s));
}

TEST_CASE("bad schedules are refused with a reason", "[schedule]") {
    const auto error = [](auto change) {
        Schedule schedule = make("cosine");
        change(schedule);
        const std::string text = error_of([&] { check_schedule(schedule); });
        CHECK(error_of([&] { learning_rate(schedule, 1); }) == text);
        return text;
    };
    CHECK_THAT(error([](Schedule& s) { s.name = "cosin"; }),
               ContainsSubstring("--schedule cosin: use constant, linear, cosine") && ContainsSubstring("wsd"));
    CHECK_THAT(error([](Schedule& s) { s.warmup = 111; }), ContainsSubstring("111") && ContainsSubstring("110"));
    CHECK_THAT(error([](Schedule& s) { s.warmup = -1; }), ContainsSubstring("warmup of -1"));
    CHECK_THAT(error([](Schedule& s) { s.steps = 0; }), ContainsSubstring("0 steps"));
    CHECK_THAT(error([](Schedule& s) { s.peak = -1; }), ContainsSubstring("learning rate is -1"));
    CHECK_THAT(error([](Schedule& s) { s.peak = NAN; }), ContainsSubstring("learning rate is nan"));
    CHECK_THAT(error([](Schedule& s) { s.peak = INFINITY; }), ContainsSubstring("learning rate is inf"));
    for (const double ratio : {-0.25, 1.5, static_cast<double>(NAN)}) {
        CHECK_THAT(error([&](Schedule& s) { s.min_ratio = ratio; }), ContainsSubstring(concat("ratio is ", ratio)));
        CHECK_THAT(error([&](Schedule& s) { s.decay_fraction = ratio; }),
                   ContainsSubstring(concat("fraction is ", ratio)));
    }
    CHECK(error([](Schedule& s) { s.min_ratio = 1; }).empty());  // a constant rate behind the warmup
    CHECK_THAT(error_of([] { learning_rate(make("cosine"), 0); }), ContainsSubstring("count from 1"));
}
