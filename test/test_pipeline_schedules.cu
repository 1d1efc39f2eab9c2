// Pipeline schedules: the tables, what makes them invalid, and their times against closed formulas. No device is
// needed.
//
//   run:   build/cpu/run_tests -# "[#test_pipeline_schedules]"
#include <algorithm>
#include <cmath>
#include <random>

#include "parallel/pipeline/pipeline.h"
#include "pipeline_toy.h"
#include "temp_folder.h"
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

// By rank; of two stages of a rank the second has small letters.
using Orders = std::vector<std::string>;
Orders order_of(const std::string& name, int p, int m) {
    ScheduleOptions o = options_of(name, p, m);
    o.per_update = p;
    const auto s = make_schedule(o);
    Orders orders;
    for (int rank = 0; rank < p; ++rank) {
        std::string text;
        for (const Action& a : s.ranks[static_cast<size_t>(rank)]) {
            if (sends(a.what) || receives(a.what)) continue;
            std::string name_of = a.what == Do::update ? concat("U", a.version) : action_text(a);
            name_of = name_of.substr(0, name_of.find(' '));
            if (a.stage != s.stages_of(rank)[0])
                for (char& letter : name_of) letter = static_cast<char>(std::tolower(letter));
            text += (text.empty() ? "" : " ") + name_of;
        }
        orders.push_back(text);
    }
    return orders;
}

// Times are sums of small whole numbers: the only rounding is that of the quotient.
bool near(double a, double b) { return std::abs(a - b) < 1e-12; }

}  // namespace

TEST_CASE("the order of small tables, by eye", "[pipeline]") {
    CHECK(order_of("naive", 2, 2) == Orders{"F0 BW0 F1 BW1", "F0 BW0 F1 BW1"});
    CHECK(order_of("gpipe", 2, 3) == Orders{"F0 F1 F2 BW0 BW1 BW2", "F0 F1 F2 BW0 BW1 BW2"});
    CHECK(order_of("1f1b", 3, 4) ==
          Orders{"F0 F1 F2 BW0 F3 BW1 BW2 BW3", "F0 F1 BW0 F2 BW1 F3 BW2 BW3", "F0 BW0 F1 BW1 F2 BW2 F3 BW3"});
    CHECK(order_of("interleaved", 2, 3) ==
          Orders{"F0 F1 F2 f0 f1 f2 bw0 bw1 bw2 BW0 BW1 BW2", "F0 F1 F2 f0 bw0 f1 bw1 f2 bw2 BW0 BW1 BW2"});
    CHECK(order_of("zb-h1", 3, 4) == Orders{"F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
                                            "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
                                            "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"});
    CHECK(order_of("zb-h2", 2, 4) ==
          Orders{"F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3", "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"});
    CHECK(order_of("zb-v", 2, 4) == Orders{"F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3",
                                           "F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3"});
    CHECK(order_of("dualpipe", 4, 8) == Orders{"F0 F1 F2 f4 b4 w4 f5 F3 bw5 f6 BW0 bw6 f7 BW1 bw7 B2 W2 B3 W3",
                                               "F0 f4 F1 f5 F2 bw4 f6 BW0 F3 bw5 f7 BW1 bw6 BW2 b7 B3 w7 W3",
                                               "F4 f0 F5 f1 F6 bw0 f2 BW4 F7 bw1 f3 BW5 bw2 BW6 b3 B7 w3 W7",
                                               "F4 F5 F6 f0 b0 w0 f1 F7 bw1 f2 BW4 bw2 f3 BW5 bw3 B6 W6 B7 W7"});
    CHECK(order_of("dualpipe-v", 2, 5) ==
          Orders{"F0 F1 F2 f0 b0 w0 f1 F3 bw1 f2 BW0 F4 bw2 f3 BW1 bw3 f4 BW2 bw4 B3 W3 B4 W4",
                 "F0 f0 F1 f1 F2 bw0 f2 BW0 F3 bw1 f3 BW1 F4 bw2 f4 BW2 bw3 BW3 b4 B4 w4 W4"});
    CHECK(order_of("pipedream", 2, 3) == Orders{"F0 F1 BW0 U1 F2 BW1 U2 BW2 U3", "F0 BW0 U1 F1 BW1 U2 F2 BW2 U3"});
    CHECK(order_of("2bw", 2, 4) == Orders{"F0 F1 BW0 F2 BW1 U1 F3 BW2 BW3 U2", "F0 BW0 F1 BW1 U1 F2 BW2 F3 BW3 U2"});
}

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

TEST_CASE("interleaved: a bubble of (p - 1) / (v m + p - 1), for any number of micro-batches", "[pipeline]") {
    for (int p = 1; p <= 16; ++p)
        for (int m = 1; m <= 64; ++m)
            for (int v = 1; v <= 4; ++v) {
                ScheduleOptions o = options_of("interleaved", p, m);
                o.chunks = v;
                const auto s = make_schedule(o);
                INFO("p " << p << ", m " << m << ", v " << v);
                // With fewer micro-batches than ranks each chunk waits for the one before: v p + m - 1 forwards and
                // backwards of a chunk in all.
                const double length = m >= p ? v * m + p - 1 : v * p + m - 1;
                REQUIRE(near(bubble_at(s), 1 - v * m / length));
                // A group has p micro-batches, or where p does not divide m a few more.
                const int groups = std::max(1, m / p), largest = (m + groups - 1) / groups;
                for (int rank = 0; rank < p; ++rank)
                    REQUIRE(alive(s, rank).in_all == std::min(v * m, (v - 1) * largest + 2 * (p - rank) - 1));
            }
}

TEST_CASE("zero bubbles: bubbles and memory of the papers, for F = B = W", "[pipeline]") {
    for (int p = 1; p <= 16; ++p)
        for (int m = 1; m <= 64; ++m) {
            INFO("p " << p << ", m " << m);
            const auto h1 = make_schedule(options_of("zb-h1", p, m)), h2 = make_schedule(options_of("zb-h2", p, m)),
                       v = make_schedule(options_of("zb-v", p, m));
            if (m >= p) REQUIRE(near(bubble_at(h1), (p - 1) / (3.0 * m + p - 1)));
            if (m >= 2 * p - 1) {
                REQUIRE(near(bubble_at(h2), 0));
                REQUIRE(near(bubble_at(v), 0));
            }
            for (int rank = 0; rank < p; ++rank) {
                REQUIRE(alive(h1, rank).in_all == std::min(p, m));
                REQUIRE(alive(h2, rank).in_all == std::min(2 * p - 1, m));
                // Half stages: as much as p micro-batches of 1f1b.
                const int peak = alive(v, rank).in_all;
                REQUIRE((m >= 2 * p - 1 ? peak == 2 * p : peak <= 2 * p));
            }
        }
    // Sums of other times are rounded: no bubble is 0, not less ("-0.0000").
    CHECK(bubble_at(make_schedule(options_of("zb-h2", 3, 7)), {0.1, 0.1, 2}) == 0);
}

namespace {

// Where a forward is directly before a backward, its result is sent behind both: as if they were computed as one.
void compute_pairs_as_one(PipelineSchedule& schedule) {
    for (auto& actions : schedule.ranks)
        for (auto forward = actions.begin(); forward != actions.end(); ++forward) {
            if (forward->what != Do::forward) continue;
            const auto next =
                std::find_if(forward + 1, actions.end(), [](const Action& a) { return computes(a.what); });
            const auto send = std::find_if(forward + 1, next, [](const Action& a) { return sends(a.what); });
            if (next != actions.end() && next->what == Do::backward && send != next)
                std::rotate(send, send + 1, next + 1);
        }
}

}  // namespace

TEST_CASE("DualPipe: the bubble of its description, and what is alive", "[pipeline]") {
    for (int H = 1; H <= 8; ++H)
        for (int C = 2 * H; C <= 32; ++C)
            for (const bool both_ways : {true, false}) {
                INFO("H " << H << ", C " << C << ", both ways " << both_ways);
                auto s =
                    make_schedule(both_ways ? options_of("dualpipe", 2 * H, 2 * C) : options_of("dualpipe-v", H, C));
                // (S / 2 - 1) ((F and B) + B - 3 W) for S stages, F = B = W = 1, B of both gradients, and F and B as
                // one action; where a forward's result is sent at its end it is half of that.
                const double work = 2.0 * C * 3, waiting = (H - 1) * (3.0 + 2 - 3);
                REQUIRE(near(bubble_at(s), 1 - work / (work + waiting / 2)));
                for (int rank = 0; rank < s.p; ++rank) REQUIRE(alive(s, rank).in_all == s.n_stages + 1);
                compute_pairs_as_one(s);
                check_schedule(s);
                REQUIRE(near(bubble_at(s), 1 - work / (work + waiting)));
            }
}

TEST_CASE("PipeDream: versions kept, and how old each gradient is", "[pipeline]") {
    for (int p = 1; p <= 16; ++p)
        for (int m = 1; m <= 64; ++m)
            for (const bool vertical : {false, true}) {
                ScheduleOptions o = options_of("pipedream", p, m);
                o.vertical_sync = vertical;
                const auto s = make_schedule(o);
                INFO("p " << p << ", m " << m << ", vertical sync " << vertical);
                REQUIRE(near(bubble_at(s), static_cast<double>(p - 1) / (m + p - 1)));  // of 1f1b
                const auto stale = staleness(s);
                for (int stage = 0; stage < p; ++stage) {
                    const int behind =
                        vertical ? p : p - stage;  // stages that a gradient has to come from, and this one
                    REQUIRE(s.versions[static_cast<size_t>(stage)] == std::min(behind, m));
                    // W(t + 1) = W(t) - lr grad(W(t - behind + 1)), and before the first version the first.
                    for (int t = 0; t < m; ++t)
                        REQUIRE(stale[static_cast<size_t>(stage)][static_cast<size_t>(t)] == std::min(t, behind - 1));
                }
            }
}

TEST_CASE("PipeDream-2BW: two versions, and gradients that are one step old", "[pipeline]") {
    for (int p = 1; p <= 16; ++p)
        for (int n = p; n <= 20; ++n)
            for (int steps = 1; steps <= 5; ++steps) {
                ScheduleOptions o = options_of("2bw", p, n * steps);
                o.per_update = n;
                const auto s = make_schedule(o);
                INFO("p " << p << ", n " << n << ", steps " << steps);
                REQUIRE(near(bubble_at(s), static_cast<double>(p - 1) / (n * steps + p - 1)));
                REQUIRE(s.versions == std::vector<int>(static_cast<size_t>(p), std::min(2, steps)));
                for (const std::vector<int>& of_stage : staleness(s))
                    for (int i = 0; i < o.m; ++i) REQUIRE(of_stage[static_cast<size_t>(i)] == (i < n ? 0 : 1));
            }
}

TEST_CASE("forwards alone: a rank is busy from its first to its last, but for the last group", "[pipeline]") {
    for (const std::string& name : schedule_names_of_pipelines())
        for (int p = 2; p <= 8; p += 2)
            for (const int m : {1, 2, 5, 8, 24}) {
                ScheduleOptions o = options_of(name, p, 8 * p);
                o.per_update = p;
                const auto forwards = forward_schedule(make_schedule(o), m);
                INFO(name << ", p " << p << ", m " << m);
                CHECK(forwards.forward_only);
                // The last micro-batch: where a rank has v stages, behind whole groups of p micro-batches on all
                // stages; where it has two ways, behind (the micro-batches of a way - 1) pairs.
                const int S = forwards.n_stages, of_a_way = name == "dualpipe" ? (m + 1) / 2 : m;
                const bool loop = forwards.placement == Placement::loop;
                CHECK(simulate(forwards, {}).end == (loop ? (m - 1) / p * S + (m - 1) % p : 2 * (of_a_way - 1)) + S);
                for (int rank = 0; rank < p; ++rank) CHECK(alive(forwards, rank).in_all <= 1);
            }
}

namespace {

// Of every schedule by name, for these ranks and micro-batches, where it can have them.
std::vector<PipelineSchedule> all_tables(int p, int m) {
    std::vector<PipelineSchedule> tables;
    for (const std::string& name : schedule_names_of_pipelines()) {
        if (name == "dualpipe" && (p % 2 == 1 || m % 2 == 1)) continue;
        ScheduleOptions o = options_of(name, p, m);
        o.per_update = m / 2 >= p && m % 2 == 0 ? m / 2 : m;
        if (name == "2bw" && m < p) continue;
        tables.push_back(make_schedule(o));
        o.vertical_sync = true;
        if (name == "pipedream") tables.push_back(make_schedule(o));
    }
    return tables;
}

}  // namespace

TEST_CASE("any number of ranks and micro-batches", "[pipeline]") {
    for (int p = 1; p <= 9; ++p)
        for (int m = 1; m <= 20; ++m) CHECK(all_tables(p, m).size() >= 11);
}

TEST_CASE("messages, uneven stages and updates in simulated time", "[pipeline]") {
    Times times;
    times.message = 0.5;
    times.update = 0.25;
    times.stages = {{1, 2, 1}, {3, 1, 1}, {2, 1, 4}};
    // A micro-batch alone goes through all stages: 6 + 4 messages + (backwards) 10.
    CHECK(simulate(make_schedule(options_of("naive", 3, 5)), times).end == 5 * 18);
    // Backwards of 3, 2 and 5. The last stage, from 5 on: five forwards of 2, each a unit after its input, which comes
    // every 3; then five backwards of 5 and the way back.
    CHECK(simulate(make_schedule(options_of("gpipe", 3, 5)), times).end ==
          1 + .5 + 5 * 3 + .5 + 2 + 5 * 5 + .5 + 2 + .5 + 3);
    // Down 6 and two messages; back B alone, 1 + 1 + 2 and two messages; then stage 0's W.
    CHECK(simulate(make_schedule(options_of("zb-h1", 3, 1)), times).end == 6 + 1 + 4 + 1 + 1);
    // One rank: m updates behind m backwards.
    CHECK(simulate(make_schedule(options_of("pipedream", 1, 8)), {{{1, 1, 1}}, 0, 0.25}).end == 8 * 3.25);
    // A send that is late is waited for: F0's behind F1.
    auto late = make_schedule(options_of("gpipe", 2, 2));
    CHECK(simulate(late, {}).end == 1 + 2 + 4 + 2);
    std::vector<Action>& actions = late.ranks[0];
    CHECK(action_text(actions[1]) == "send F0 of stage 0 to rank 1");
    CHECK(action_text(actions[2]) == "F1 of stage 0");
    std::swap(actions[1], actions[2]);
    check_schedule(late);
    CHECK(simulate(late, {}).end == 1 + 1 + 2 + 4 + 2);
    // A table that nobody has checked: a backward before its forward, and a rank without work.
    auto unchecked = make_schedule(options_of("gpipe", 2, 1));
    std::ranges::rotate(unchecked.ranks[0], unchecked.ranks[0].end() - 1);
    CHECK_THROWS_WITH(simulate(unchecked, {}), "schedule gpipe: rank 0 waits for ever at action 0");
    unchecked.ranks = {{{.what = Do::forward, .micro = 0, .stage = 0}}, {}};
    CHECK(simulate(unchecked, {}).end == 1);
    CHECK(simulate(unchecked, {}).bubble == 0.5);
}

TEST_CASE("what has no place to wait in a simulated table is the critical path", "[pipeline]") {
    for (int p = 1; p <= 5; ++p)
        for (const int m : {1, 4, 10})
            for (const PipelineSchedule& s : all_tables(p, m)) {
                INFO(s.name << ", p " << p << ", m " << m);
                Times times;
                times.message = 0.25, times.update = 0.5;
                times.stages.clear();
                for (int stage = 0; stage < s.n_stages; ++stage)
                    times.stages.push_back({1 + stage % 3 * 0.5, 1.25, 0.5 + stage % 2});
                const Simulation result = simulate(s, times);
                const auto span = [&](size_t i) {
                    const auto [rank, place] = result.critical_path[i];
                    return result.ranks[static_cast<size_t>(rank)][place];
                };
                const size_t n = result.critical_path.size();
                REQUIRE(span(0).start == 0);
                for (size_t i = 1; i < n; ++i) {
                    const bool travels = result.critical_path[i].first != result.critical_path[i - 1].first;
                    REQUIRE(span(i).start == span(i - 1).end + (travels ? times.message : 0));
                }
                REQUIRE(span(n - 1).end == result.end);
                for (const auto& spans : result.ranks) CHECK(spans.back().end <= result.end);
                // Two actions of a rank are never at one time, and take what they should.
                for (const auto& spans : result.ranks)
                    for (size_t i = 0; i < spans.size(); ++i) {
                        REQUIRE(spans[i].end - spans[i].start == times.of(spans[i].action));
                        REQUIRE((i == 0 || spans[i].start >= spans[i - 1].end));
                    }
            }
}

TEST_CASE("what is alive: by stage, in all, and weighed", "[pipeline]") {
    ScheduleOptions o = options_of("interleaved", 2, 4);
    o.chunks = 2;
    const auto s = make_schedule(o);
    CHECK(s.stages_of(0) == std::vector<int>{0, 2});
    CHECK(s.stages_of(1) == std::vector<int>{1, 3});
    // F0.0 F1.0 F0.2 F1.2 F2.0 | B0.2 F3.0 B1.2 ...: five at most, and four of stage 0
    CHECK(alive(s, 0).micro_batches == std::vector<int>{4, 2});
    CHECK(alive(s, 0).in_all == 5);
    CHECK(peak_alive(s, 0, [](int stage) { return stage == 0 ? 10 : 1; }) == 41);
    CHECK(alive(s, 0).weight_gradients == 0);
    for (int stage = 0; stage < 4; ++stage) {
        CHECK(alive(make_schedule(options_of("zb-h1", 4, 9)), stage).weight_gradients == stage + 1);
        CHECK(alive(make_schedule(options_of("zb-h2", 4, 9)), stage).weight_gradients == 2 * stage + 1);
    }
    const auto both = make_schedule(options_of("dualpipe", 4, 8));
    CHECK(both.stages_of(1) == std::vector<int>{1, 2});
    CHECK(forward_schedule(both, 1).stages_of(1) == std::vector<int>{1, 2});
    CHECK(both.rank_of(1, 3) == 1);
    CHECK(both.rank_of(1, 4) == 2);
}

TEST_CASE("a message is received before what its rank computes when it is sent", "[pipeline]") {
    for (const auto& [p, m] : {std::pair{2, 4}, {4, 8}, {4, 7}, {3, 7}, {5, 13}})
        for (const PipelineSchedule& s : all_tables(p, m)) {
            const Simulation simulation = simulate(s, {});
            std::map<std::tuple<bool, int, int>, double> sent;  // (activation, micro-batch, stage that sends)
            const auto for_each = [&](const auto& visit) {
                for (size_t rank = 0; rank < s.ranks.size(); ++rank) {
                    size_t done = 0;  // computing and updates before this action
                    for (const Action& a : s.ranks[rank]) {
                        visit(a, simulation.ranks[rank], done);
                        if (!sends(a.what) && !receives(a.what)) ++done;
                    }
                }
            };
            for_each([&](const Action& a, const auto& spans, size_t done) {
                if (sends(a.what)) sent[{a.what == Do::send_activation, a.micro, a.stage}] = spans[done - 1].end;
            });
            for_each([&, p = p, m = m](const Action& a, const auto& spans, size_t done) {
                if (!receives(a.what)) return;
                const bool forward = a.what == Do::receive_activation;
                const double time = sent.at({forward, a.micro, forward ? a.stage - 1 : a.stage + 1});
                INFO(s.name << ", p " << p << ", m " << m << ": " << action_text(a));
                CHECK((done == 0 || spans[done - 1].end < time));
                CHECK(time <= spans[done].end);
            });
        }
}

namespace {

// Of the rank that is busy for longest.
double longest(const PipelineSchedule& schedule, const Times& times) {
    double result = 0;
    for (const std::vector<Span>& spans : simulate(schedule, times).ranks)
        result = std::max(result, spans.back().end - spans.front().start);
    return result;
}

}  // namespace

TEST_CASE("auto: never worse than the schedules by hand within the same memory, and often better", "[pipeline]") {
    std::mt19937_64 random(3);
    const auto between = [&](int low, int high) {
        return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
    };
    int better = 0;
    double saved = 0;
    for (int i = 0; i < 1000; ++i) {
        ScheduleOptions o = options_of("auto", between(1, 8), between(1, 24));
        o.max_alive = between(0, 2 * o.p);
        o.times.message = between(0, 9) / 8.0;
        o.times.stages.resize(static_cast<size_t>(between(0, 1) ? o.p : 1));
        for (StageTimes& t : o.times.stages) t = {between(8, 24) / 8.0, between(8, 24) / 8.0, between(4, 24) / 8.0};
        const int max_alive = o.max_alive > 0 ? o.max_alive : std::min(o.p, o.m);
        const auto found = make_schedule(o);
        INFO("p " << o.p << ", m " << o.m << ", at most " << max_alive);
        double by_hand = 1e9;
        for (const char* name : {"naive", "gpipe", "1f1b", "zb-h1", "zb-h2"}) {
            ScheduleOptions other = o;
            other.name = name;
            const auto s = make_schedule(other);
            if (std::ranges::max(peaks(s)) <= max_alive) by_hand = std::min(by_hand, longest(s, o.times));
        }
        const double time = longest(found, o.times);
        REQUIRE(time <= by_hand);
        REQUIRE(std::ranges::max(peaks(found)) <= max_alive);
        // Where memory for 1f1b is there, too: with less, by hand there is only one micro-batch after the other.
        if (time < by_hand) ++better;
        if (max_alive >= std::min(o.p, o.m)) saved += 1 - time / by_hand;
    }
    CHECK(better > 480);
    CHECK(saved > 7);
}

namespace {

std::vector<PipelineSchedule> tables_to_change() {
    std::vector<PipelineSchedule> tables;
    for (const auto& [p, m] : {std::pair{2, 6}, {4, 4}, {3, 6}, {4, 8}})
        for (const PipelineSchedule& table : all_tables(p, m)) {
            tables.push_back(table);
            if (table.name == "1f1b" || table.name == "zb-v") tables.push_back(forward_schedule(table, m));
        }
    return tables;
}

}  // namespace

TEST_CASE("a changed table is refused with a reason, or gives the same numbers", "[pipeline]") {
    // Every reason has to be met.
    std::map<std::string, int> reasons;
    for (const char* reason : {"no such kind",
                               "there are stages",
                               "there are micro-batches",
                               "is on rank",
                               "not on another rank",
                               "the other end of this message is rank",
                               "it is not a message",
                               "does not split",
                               "has only forwards",
                               "has no updates",
                               "it is there twice",
                               "does not have the action",
                               "the whole backward is there",
                               "which comes later",
                               "in the order of the micro-batches",
                               "the next version",
                               "the last micro-batch of this update",
                               "it needs the gradients",
                               "has no update for",
                               "is not there yet",
                               "is gone",
                               "its forward used",
                               "name a version",
                               "sends another message first",
                               "a deadlock",
                               "versions of its weights"})
        reasons[reason] = 0;
    std::vector<PipelineSchedule> tables = tables_to_change();
    std::vector<ToyResult> expected;
    for (const PipelineSchedule& table : tables) {
        expected.push_back(execute_toy(table));
        INFO(table.name);
        REQUIRE(expected.back().stuck == "");
    }
    std::mt19937_64 random(16);
    Mutation mutation(random);
    int accepted = 0;
    for (int i = 0; i < 100'000; ++i) {
        const auto which = static_cast<size_t>(i) % tables.size();
        PipelineSchedule changed = tables[which];
        const std::string change = mutation.apply(changed);
        const std::string refused = error_of([&] { check_schedule(changed); });
        if (refused.empty()) {
            ++accepted;
            const ToyResult result = execute_toy(changed);
            if (result == expected[which]) continue;
            FAIL(changed.name << " p " << changed.p << " m " << changed.m << ", " << change << ": " << result.stuck);
        }
        const auto reason =
            std::ranges::find_if(reasons, [&](const auto& r) { return refused.find(r.first) != std::string::npos; });
        if (reason == reasons.end() || !refused.starts_with("schedule " + changed.name + ": "))
            FAIL(change << ": " << refused);
        ++reason->second;
    }
    CHECK(accepted > 5000);
    for (const auto& [reason, count] : reasons) {
        INFO(reason);
        CHECK(count > 0);
    }
}

TEST_CASE("an invalid table: the rank, the action and the reason", "[pipeline]") {
    const auto refusal = [](const std::string& name, const auto& change) {
        auto s = make_schedule(options_of(name, 2, 2));
        change(s.ranks);
        return error_of([&] { check_schedule(s); });
    };
    const auto find = [](std::vector<Action>& actions, const std::string& text) {
        return std::ranges::find_if(actions, [&](const Action& a) { return action_text(a) == text; });
    };
    CHECK(refusal("1f1b", [&](auto& ranks) { ranks[1].erase(find(ranks[1], "receive F1 of stage 1 from rank 0")); }) ==
          "schedule 1f1b: rank 1 does not have the action: receive F1 of stage 1 from rank 0");
    CHECK(refusal("1f1b", [&](auto& ranks) { ranks[1].erase(find(ranks[1], "send B0 of stage 1 to rank 0")); }) ==
          "schedule 1f1b: rank 1 does not have the action: send B0 of stage 1 to rank 0");
    CHECK(
        refusal("1f1b", [&](auto& ranks) {
            std::swap(*find(ranks[1], "F0 of stage 1"), *find(ranks[1], "BW0 of stage 1"));
        }) == "schedule 1f1b: rank 1, action 2 (BW0 of stage 1): it needs its forward, which comes later, as action 3");
    // Each of two ranks waits for a message that the other one would send behind what it waits with.
    CHECK(refusal("dualpipe",
                  [&](auto& ranks) {
                      for (auto& actions : ranks) {
                          const auto send = std::ranges::find_if(actions, sends, &Action::what);
                          const auto last =
                              std::find_if(send, actions.end(), [](const Action& a) { return a.what == Do::backward; });
                          std::rotate(send, send + 1, last + 1);
                      }
                  }) ==
          "schedule dualpipe: rank 0, action 2 (F1 of stage 1): a deadlock: it waits for action 5 of rank 1, which "
          "itself "
          "waits at action 2 (F0 of stage 1)");
}

TEST_CASE("a table whose sizes cannot be", "[pipeline]") {
    const auto check_refused = [](const char* name, const std::string& words, const auto& change) {
        auto s = make_schedule(options_of(name, 2, 4));
        change(s);
        CHECK_THROWS_WITH(check_schedule(s),
                          ContainsSubstring(concat("schedule ", name, ": ")) && ContainsSubstring(words));
    };
    using S = PipelineSchedule;
    check_refused("1f1b", "0 ranks and 4 micro-batches: it needs one of each at least", [](S& s) { s.p = 0; });
    check_refused("1f1b", "2 ranks and 0 micro-batches: it needs one of each at least", [](S& s) { s.m = 0; });
    check_refused("1f1b", "0 stages on 2 ranks", [](S& s) { s.n_stages = 0; });
    check_refused("1f1b", "3 stages on 2 ranks: that placement has a multiple of 2", [](S& s) { s.n_stages = 3; });
    check_refused("zb-v", "6 stages on 2 ranks: that placement has 4", [](S& s) { s.n_stages = 6; });
    check_refused("1f1b", "actions for 1 ranks", [](S& s) { s.ranks.pop_back(); });
    check_refused("1f1b", "versions for 1, and there are 2", [](S& s) { s.versions.pop_back(); });
    check_refused("1f1b", "keeps 2 versions of its weights; without updates there is 1",
                  [](S& s) { s.versions[1] = 2; });
    check_refused("pipedream", "keeps 0 versions of its weights; 1 at least", [](S& s) { s.versions[1] = 0; });
    for (const auto& change : {+[](S& s) { s.forward_only = true; }, +[](S& s) { s.splits_backward = true; }})
        check_refused("pipedream", "with updates a rank has one stage, and whole backwards", change);
    check_refused("pipedream", "4 micro-batches are not a multiple of the 3 of", [](S& s) { s.per_update = 3; });
    check_refused("1f1b", "rank 0, action 0 (F-1 of stage 0): there are micro-batches 0 to 3",
                  [](S& s) { s.ranks[0][0].micro = -1; });
    check_refused("1f1b", "there are stages 0 to 1", [](S& s) { s.ranks[0][0].stage = -1; });
}

TEST_CASE("options that no schedule can have: one line, with what to do", "[pipeline]") {
    const auto refusal = [](const std::string& name, int p, int m, const auto&... change) {
        ScheduleOptions o = options_of(name, p, m);
        (change(o), ...);
        return error_of([&] { make_schedule(o); });
    };
    const auto a_step = [](int n) { return [n](ScheduleOptions& o) { o.per_update = n; }; };
    CHECK(refusal("2f2b", 4, 8) ==
          "--pipeline 2f2b: use naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipe, dualpipe-v, auto, "
          "pipedream or 2bw");
    CHECK(refusal("1f1b", 4, 0) == "a pipeline with 0 micro-batches: 1 or more");
    CHECK(refusal("gpipe", 4, -1) == "a pipeline with -1 micro-batches: 1 or more");
    CHECK(refusal("1f1b", 0, 8) == "a pipeline of 0 ranks: 1 or more");
    CHECK(refusal("1f1b", 1000, 1000000) ==
          "a pipeline of 1000 ranks with 1000000 micro-batches: its table could have 2000000000 forwards; at most "
          "4194304");
    CHECK(refusal("interleaved", 4, 8, [](ScheduleOptions& o) { o.chunks = 1 << 30; }) ==
          "a pipeline of 4 ranks with 8 micro-batches: its table could have 34359738368 forwards; at most 4194304");
    CHECK(refusal("dualpipe", 3, 8) ==
          "pipeline schedule dualpipe on 3 ranks: it needs an even number (dualpipe-v takes any)");
    CHECK(refusal("dualpipe", 4, 7) ==
          "pipeline schedule dualpipe with 7 micro-batches: half of them go each way, so it needs an even number "
          "(dualpipe-v takes any)");
    CHECK(refusal("interleaved", 4, 8, [](ScheduleOptions& o) { o.chunks = 0; }) ==
          "pipeline schedule interleaved: 0 chunks; 1 or more");
    for (const int n : {0, 3, 5, 9})
        CHECK(refusal("2bw", 4, 8, a_step(n)) ==
              concat("pipeline schedule 2bw on 4 ranks, 8 micro-batches, ", n,
                     " a step: a step has 4 micro-batches or more (one a rank), and the table whole steps"));
    CHECK(refusal("2bw", 4, 8, a_step(4)) == "");
    CHECK(refusal("auto", 4, 8, [](ScheduleOptions& o) { o.max_alive = -2; }) ==
          "pipeline schedule auto with -2 micro-batches alive at most: 1 or more; 0: as 1f1b");
    CHECK(refusal("auto", 4, 8, [](ScheduleOptions& o) { o.times.stages.resize(3); }) ==
          "times of 3 stages for a schedule of 4: one for all, or one for each");
    CHECK(refusal("auto", 4, 8, [](ScheduleOptions& o) { o.times.stages[0].forward = -1; }) ==
          "times of a stage -1, 1, 1 and of a message 0: they are 0 or more");
    CHECK(refusal("auto", 4, 8, [](ScheduleOptions& o) { o.times.message = NAN; }) ==
          "times of a stage 1, 1, 1 and of a message nan: they are 0 or more");
    CHECK(refusal("auto", 4, 8, [](ScheduleOptions& o) { o.times.stages[0].forward = INFINITY; }) ==
          "times of a stage inf, 1, 1 and of a message 0: they are 0 or more");
    CHECK_THROWS_WITH(forward_schedule(make_schedule(options_of("1f1b", 2, 4)), 0),
                      "forwards of 0 micro-batches: 1 or more");
}
