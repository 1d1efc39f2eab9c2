// test/test_pipeline_runner.cu: tables of all schedules on real ranks, with stages that compute whole numbers: what
// they give does not depend on the schedule, and any mistake in an order, a message or a buffer changes it.
#include "core/kernel.cuh"
#include "pipeline_toy.h"
#include "ranks.h"
#include "temp_folder.h"
#include "test.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>

namespace {

constexpr int64_t kRows = 3, kColumns = 5, kN = kRows * kColumns;

// out = 31 in + weight, modulo 2^32. The first stage makes its input from the micro-batch's number.
__global__ void forward_kernel(int32_t* in, int32_t* out, int64_t n, uint32_t weight, int first_micro) {
    const int64_t i = global_thread();
    if (i >= n) return;
    if (first_micro >= 0)
        in[i] = static_cast<int32_t>(static_cast<uint32_t>(first_micro) * 977u + static_cast<uint32_t>(i));
    out[i] = static_cast<int32_t>(static_cast<uint32_t>(in[i]) * 31u + weight);
}
// dx = 17 dx + weight + in; of the last stage dx is its output first.
__global__ void backward_kernel(int32_t* dx, const int32_t* in, const int32_t* last_out, int64_t n, uint32_t weight) {
    const int64_t i = global_thread();
    if (i >= n) return;
    const uint32_t dout = static_cast<uint32_t>(last_out ? last_out[i] : dx[i]);
    dx[i] = static_cast<int32_t>(dout * 17u + weight + static_cast<uint32_t>(in[i]));
}
// A sum that depends on its order: sum = 3 sum + in + given.
__global__ void weight_kernel(int32_t* sum, const int32_t* in, int64_t n, uint32_t given) {
    const int64_t i = global_thread();
    if (i < n) sum[i] = static_cast<int32_t>(static_cast<uint32_t>(sum[i]) * 3u + static_cast<uint32_t>(in[i]) + given);
}
// What every gradient adds to, in any order.
__global__ void gradient_kernel(int32_t* sum, const int32_t* dx, int64_t n, uint32_t factor) {
    const int64_t i = global_thread();
    if (i < n) sum[i] = static_cast<int32_t>(static_cast<uint32_t>(sum[i]) + static_cast<uint32_t>(dx[i]) * factor);
}
uint32_t factor_of(int micro) { return static_cast<uint32_t>(2 * micro + 1); }
uint32_t weight_of(const Action& a) { return static_cast<uint32_t>(1000 * a.stage + a.version); }

using Sums = std::map<std::pair<int, int>, std::vector<int32_t>>;  // by rank and stage

// A rank's stages.
class Toy final : public StageWork {
  public:
    Toy(const PipelineSchedule& schedule, int rank, Arena& arena) : schedule_(schedule) {
        for (const int stage : schedule.stages_of(rank)) {
            sums[stage] = arena.take("sums", DType::i32, {2 * kN});  // of weights, of gradients
            if (!arena.counting())
                cudaCheck(cudaMemsetAsync(sums[stage].data, 0, sums[stage].bytes(), device().stream));
        }
    }
    void forward(const Action& a, Tensor in, Tensor out, cudaStream_t stream) override {
        expect_aligned("Toy", {{"in", in}, {"out", out}});  // as kernels need it, although a tensor has 60 bytes
        in_[{a.micro, a.stage}] = in;
        if (a.stage + 1 == schedule_.n_stages) out_[a.micro] = out;
        spend(a);
        forward_kernel<<<1, 32, 0, stream>>>(in.ptr<int32_t>(), out.ptr<int32_t>(), kN, weight_of(a),
                                             a.stage == 0 ? a.micro : -1);
        cudaCheckLaunch();
    }
    void backward(const Action& a, Tensor dx, cudaStream_t stream) override {
        const Tensor in = in_.at({a.micro, a.stage});
        spend(a);
        const bool last = a.stage + 1 == schedule_.n_stages;
        backward_kernel<<<1, 32, 0, stream>>>(dx.ptr<int32_t>(), in.ptr<int32_t>(),
                                              last ? out_.at(a.micro).ptr<int32_t>() : nullptr, kN, weight_of(a));
        cudaCheckLaunch();
        gradient_kernel<<<1, 32, 0, stream>>>(sums.at(a.stage).ptr<int32_t>() + kN, dx.ptr<int32_t>(), kN,
                                              factor_of(a.micro));
        cudaCheckLaunch();
        if (a.what == Do::backward) add(a, stream);
    }
    void backward_weight(const Action& a, cudaStream_t stream) override {
        spend(a);
        add(a, stream);
    }
    void update(const Action& a, cudaStream_t) override { updates.push_back(a); }

    void read(Sums& all, int rank) const {
        for (const auto& [stage, sum] : sums) {
            std::vector<int32_t> values(2 * kN);
            copy_to_host(values.data(), sum);
            all[{rank, stage}] = values;
        }
    }

    std::map<int, Tensor> sums;  // by stage
    std::vector<Action> updates;
    std::vector<Span> spans;       // with times
    const Times* times = nullptr;  // seconds that actions take

  private:
    void add(const Action& a, cudaStream_t stream) {
        weight_kernel<<<1, 32, 0, stream>>>(sums.at(a.stage).ptr<int32_t>(), in_.at({a.micro, a.stage}).ptr<int32_t>(),
                                            kN, weight_of(a));
        cudaCheckLaunch();
    }
    void spend(const Action& a) {
        if (!times) return;
        const double start = seconds_now();
        std::this_thread::sleep_for(std::chrono::duration<double>(times->of(a)));
        spans.push_back({a, start, seconds_now()});
    }
    const PipelineSchedule& schedule_;
    std::map<std::pair<int, int>, Tensor> in_;
    std::map<int, Tensor> out_;  // of the last stage
};

// The same without ranks, stage by stage, with the weights' versions that the table names.
Sums expected(const PipelineSchedule& schedule, int rounds) {
    std::map<std::tuple<Do, int, int>, Action> actions;
    for (const auto& rank : schedule.ranks)
        for (const Action& a : rank) actions[{a.what, a.micro, a.stage}] = a;
    // A table may have some backwards at once and some in two halves.
    const auto version = [&](Do half, int micro, int stage) {
        const auto whole = actions.find({Do::backward, micro, stage});
        return weight_of(whole != actions.end() ? whole->second : actions.at({half, micro, stage}));
    };
    Sums sums;
    for (int n = 0; n < rounds * schedule.m; ++n) {
        const int micro = n % schedule.m;
        std::vector<std::vector<uint32_t>> in(static_cast<size_t>(schedule.n_stages) + 1, std::vector<uint32_t>(kN));
        for (size_t i = 0; i < kN; ++i) in[0][i] = static_cast<uint32_t>(micro) * 977u + static_cast<uint32_t>(i);
        for (size_t stage = 0; stage + 1 < in.size(); ++stage)
            for (size_t i = 0; i < kN; ++i)
                in[stage + 1][i] =
                    in[stage][i] * 31u + weight_of(actions.at({Do::forward, micro, static_cast<int>(stage)}));
        std::vector<uint32_t> dx = in.back();
        for (int stage = schedule.n_stages - 1; stage >= 0; --stage) {
            const std::vector<uint32_t>& x = in[static_cast<size_t>(stage)];
            std::vector<int32_t>& sum = sums[{schedule.rank_of(stage, micro), stage}];
            sum.resize(2 * kN);
            const auto add = [](int32_t& to, uint32_t factor, uint32_t value) {
                to = static_cast<int32_t>(static_cast<uint32_t>(to) * factor + value);
            };
            for (size_t i = 0; i < kN; ++i) {
                dx[i] = dx[i] * 17u + version(Do::backward_input, micro, stage) + x[i];
                add(sum[i], 3, x[i] + version(Do::backward_weight, micro, stage));
                add(sum[kN + i], 1, dx[i] * factor_of(micro));
            }
        }
    }
    return sums;
}

// A rank that executes a table with stages of this kind.
struct ToyRank {
    PipelineRunner runner;
    Arena arena{"toy"};
    std::optional<Toy> toy;
    ToyRank(Comm& world, const PipelineSchedule& table) : runner(world, table) {
        for (int pass = 0; pass < 2; ++pass) {
            toy.emplace(table, world.rank, arena);
            runner.take_memory(border_tensors(table, world.rank), kRows, kColumns, DType::i32, arena);
            if (pass == 0) arena.reserve();
        }
    }
};

struct Ran {
    Sums sums;
    std::vector<std::vector<Span>> spans;  // by rank
    std::vector<int64_t> sent;             // bytes
};

// `rounds` times one after the other, as the steps of a run.
Ran run(const PipelineSchedule& schedule, int rounds = 1, const Times* times = nullptr) {
    Ran ran;
    ran.spans.resize(static_cast<size_t>(schedule.p)), ran.sent.resize(static_cast<size_t>(schedule.p));
    std::mutex mutex;
    run_ranks(threads(schedule.p), [&](Comm& world) {
        ToyRank its(world, schedule);
        its.toy->times = times;
        world.barrier(device().stream);
        const int64_t before = world.traffic().sent;
        for (int round = 0; round < rounds; ++round) its.runner.run(schedule, *its.toy, device().stream);
        cudaCheck(cudaDeviceSynchronize());
        const std::lock_guard lock(mutex);
        const size_t rank = static_cast<size_t>(world.rank);
        ran.sent[rank] = world.traffic().sent - before;
        its.toy->read(ran.sums, world.rank);
        ran.spans[rank] = its.toy->spans;
    });
    return ran;
}

PipelineSchedule small_schedule(const std::string& name, int p, bool vertical_sync = false) {
    const int m = name == "2bw" ? 3 * p : name == "dualpipe" ? 2 * p : 2 * p + 1;
    ScheduleOptions options;
    options.name = name, options.p = p, options.m = m;
    options.vertical_sync = vertical_sync, options.per_update = name == "2bw" ? p : 0;
    return make_schedule(options);
}

void check_run(const PipelineSchedule& schedule, int rounds) {
    INFO(schedule.name << " p " << schedule.p << " m " << schedule.m);
    const Ran ran = run(schedule, rounds);
    CHECK(ran.sums == expected(schedule, rounds));
    for (int rank = 0; rank < schedule.p; ++rank)
        CHECK(ran.sent[static_cast<size_t>(rank)] == rounds * messages_sent(schedule, rank) * kN * 4);
    for (const auto& [at, sum] : ran.sums) record_bits(sum.data(), sum.size() * sizeof(int32_t));
}

}  // namespace

TEST_CASE("ranks execute every schedule as its stages say", "[pipeline]") {
    const int p = GENERATE(2, 3, 4, 8);
    for (const std::string& name : schedule_names_of_pipelines())
        if (name != "dualpipe" || p % 2 == 0) check_run(small_schedule(name, p), 2);
    check_run(small_schedule("pipedream", p, true), 1);
}

TEST_CASE("an evaluation's forwards go through the stages alone", "[pipeline]") {
    for (const char* name : {"1f1b", "interleaved", "zb-v", "dualpipe"}) {
        const PipelineSchedule schedule = forward_schedule(small_schedule(name, 2), 3);
        const Ran ran = run(schedule);
        for (int rank = 0; rank < 2; ++rank) {
            CHECK(ran.sent[static_cast<size_t>(rank)] == messages_sent(schedule, rank) * kN * 4);
            CHECK(border_tensors(schedule, rank) <= 4);  // nothing is kept for a backward
        }
    }
}

TEST_CASE("the measured bubble is the simulated one", "[pipeline][alone]") {
    if (strict()) SKIP_TEST("strict mode does not run streams when they could");
    // Long enough that what the runner itself takes, and the time until a thread goes on, do not count.
    Times times;
    times.stages = {{0.01, 0.01, 0.01}};
    for (const std::string& name : schedule_names_of_pipelines()) {
        const PipelineSchedule schedule = small_schedule(name, 4);
        const double predicted = simulate(schedule, times).bubble;
        double measured = 1;  // the first of six that is near enough: others use this machine's cores, too
        for (int i = 0; i < 6 && std::abs(measured - predicted) > 0.05; ++i)
            measured = bubble_of(run(schedule, 1, &times).spans);
        INFO(name);
        CHECK(measured == Approx(predicted).margin(0.05));
    }
}

// test_pipeline_schedules.cu has 100000 changes, and executes those that are accepted without ranks. Here real ranks
// do.
TEST_CASE("real ranks execute changed tables that are accepted", "[pipeline]") {
    const int p = GENERATE(2, 3, 4);
    const int n_changes = std::getenv("LLM_TEST_RANKS") ? 33'000 : strict() ? 120 : 3000;
    std::mt19937_64 random(static_cast<uint64_t>(p));
    Mutation mutation(random);
    size_t n_accepted = 0;
    for (const std::string& name : schedule_names_of_pipelines()) {
        if (name == "dualpipe" && p % 2 != 0) continue;
        const PipelineSchedule table = small_schedule(name, p);
        std::vector<PipelineSchedule> accepted;
        for (int i = 0; i < n_changes / 12; ++i) {
            PipelineSchedule changed = table;
            mutation.apply(changed);
            if (error_of([&] { check_schedule(changed); }).empty()) accepted.push_back(changed);
        }
        const Sums sums = expected(table, 1);
        std::vector<Sums> ran(accepted.size());
        std::mutex mutex;
        run_ranks(threads(p), [&](Comm& world) {
            PipelineRunner runner(world, table);
            int n_borders = 1;
            for (const PipelineSchedule& each : accepted)
                n_borders = std::max(n_borders, border_tensors(each, world.rank));
            Arena arena("toy");
            std::vector<Toy> toys;
            for (int pass = 0; pass < 2; ++pass) {
                toys.clear();
                for (const PipelineSchedule& each : accepted) toys.emplace_back(each, world.rank, arena);
                runner.take_memory(n_borders, kRows, kColumns, DType::i32, arena);
                if (pass == 0) arena.reserve();
            }
            for (size_t i = 0; i < accepted.size(); ++i) runner.run(accepted[i], toys[i], device().stream);
            cudaCheck(cudaDeviceSynchronize());
            const std::lock_guard lock(mutex);
            for (size_t i = 0; i < accepted.size(); ++i) toys[i].read(ran[i], world.rank);
        });
        INFO(name << " p " << p);
        n_accepted += accepted.size();
        for (const Sums& its : ran) CHECK(its == sums);
    }
    CHECK(n_accepted > (strict() ? 0 : 20));
}

TEST_CASE("a table is begun again: what was done of it leaves nothing behind", "[pipeline]") {
    const PipelineSchedule table = small_schedule("zb-v", 3);
    const std::vector<size_t> until = places_before_backward(table);
    CHECK(std::ranges::min(until) > 0);
    std::mutex mutex;
    Sums ran;
    run_ranks(threads(3), [&](Comm& world) {
        ToyRank its(world, table);
        its.runner.begin(table);
        const size_t own = until[static_cast<size_t>(world.rank)];
        for (int again = 0; again < 2; ++again) {
            its.runner.advance(own, *its.toy, device().stream);
            its.runner.begin_again(until, device().stream);
        }
        its.runner.advance(table.ranks[static_cast<size_t>(world.rank)].size(), *its.toy, device().stream);
        cudaCheck(cudaDeviceSynchronize());
        const std::lock_guard lock(mutex);
        its.toy->read(ran, world.rank);
    });
    CHECK(ran == expected(table, 1));
}

TEST_CASE("a rank that fails in the middle of a table ends the others", "[pipeline]") {
    const PipelineSchedule table = small_schedule("1f1b", 4);
    class Failing final : public StageWork {
      public:
        Failing(Toy& toy, bool fails) : toy_(toy), fails_(fails) {}
        void forward(const Action& a, Tensor in, Tensor out, cudaStream_t stream) override {
            check(!fails_ || a.micro < 3, "no more");
            toy_.forward(a, in, out, stream);
        }
        void backward(const Action& a, Tensor dx, cudaStream_t stream) override { toy_.backward(a, dx, stream); }
        void backward_weight(const Action&, cudaStream_t) override {}
        void update(const Action&, cudaStream_t) override {}

      private:
        Toy& toy_;
        const bool fails_;
    };
    const auto run = [&] {
        run_ranks(threads(4), [&](Comm& world) {
            ToyRank its(world, table);
            Failing work(*its.toy, world.rank == 2);
            its.runner.run(table, work, device().stream);
            cudaCheck(cudaDeviceSynchronize());
        });
    };
    CHECK(error_of(run) == "rank 2: no more");
}
