// Pipeline schedules: the tables, what makes them invalid, and their times against closed formulas. No device is needed.
//
//   run:   build/cpu/run_tests -# "[#test_pipeline_schedules]"
#include <algorithm>
#include <numeric>

#include "parallel/pipeline/pipeline.h"
#include "test.h"

namespace {

ScheduleOptions options_of(const std::string& name, int p, int m) {
    ScheduleOptions o;
    o.name = name, o.p = p, o.m = m;
    return o;
}

double bubble_at(const PipelineSchedule& schedule, StageTimes times = {}) {
    Times t;
    t.stages = {times};
    return simulate(schedule, t).bubble;
}

// Of all ranks.
std::vector<int> peaks(const PipelineSchedule& schedule) {
    std::vector<int> result;
    for (int rank = 0; rank < schedule.p; ++rank) result.push_back(alive(schedule, rank).in_all);
    return result;
}

// Times are sums of small whole numbers: the only rounding is that of the quotient.
bool near(double a, double b) { return std::abs(a - b) < 1e-12; }

}  // namespace

TEST_CASE("whole backwards: the bubble and what is alive are those of the papers' formulas", "[pipeline]") {
    for (int p = 1; p <= 16; ++p)
        for (int m = 1; m <= 64; ++m) {
            INFO("p " << p << ", m " << m);
            const auto a = make_schedule(options_of("naive", p, m)), b = make_schedule(options_of("gpipe", p, m)),
                       c = make_schedule(options_of("1f1b", p, m));
            const double full = static_cast<double>(p - 1) / (m + p - 1);
            REQUIRE(near(bubble_at(a), static_cast<double>(p - 1) / p));
            REQUIRE(near(bubble_at(b), full));
            REQUIRE(near(bubble_at(c), full));
            std::vector<int> by_rank;
            for (int s = 0; s < p; ++s) by_rank.push_back(std::min(p - s, m));
            REQUIRE(peaks(a) == std::vector<int>(static_cast<size_t>(p), 1));
            REQUIRE(peaks(b) == std::vector<int>(static_cast<size_t>(p), m));
            REQUIRE(peaks(c) == by_rank);
        }
}

TEST_CASE("forwards alone are without a bubble behind the first stages'", "[pipeline]") {
    for (const std::string& name : schedule_names_of_pipelines())
        for (int p = 2; p <= 8; p += 2)
            for (const int m : {1, 2, 5, 8, 24}) {
                ScheduleOptions o = options_of(name, p, 8 * p);
                o.per_update = p;
                const auto forwards = forward_schedule(make_schedule(o), m);
                INFO(name << ", p " << p << ", m " << m);
                CHECK(forwards.forward_only);
                // One micro-batch after the other is the worst.
                CHECK(simulate(forwards, {}).end <= m * forwards.n_stages);
                for (int rank = 0; rank < p; ++rank) CHECK(alive(forwards, rank).in_all <= 1);
            }
}
