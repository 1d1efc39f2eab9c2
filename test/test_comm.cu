// Communicators, collectives, meshes: ranks as threads of this process, and as processes under mpirun; and what happens
// when a rank fails. What is compared is in comm_check.h; the program that mpirun starts is comm_check.cu.
#include "comm_check.h"
#include "program.h"
#include "ranks.h"
#include "test.h"
#include "json.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <numeric>
#include <regex>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

namespace {

std::string error_of(const RankOptions& options, const std::function<void(Comm&)>& f) {
    return ::error_of([&] { run_ranks(options, f); });
}

double seconds(const std::function<void()>& f) {
    const double start = seconds_now();
    f();
    return seconds_now() - start;
}

// All ranks have come, and wait no longer than this for each other from now on. Before, the machine may be slow.
void wait_at_most(Comm& world, double seconds) {
    cudaCheck(cudaDeviceSynchronize());
    world.meet_hosts();
    world.state().patience = seconds / world.state().options.timeout_s;
}

// Does a report tell that a rank has waited for `timeout_s`? A second more may count while the machine does something
// else: WaitedTime.
bool has_waited(const std::string& report, double timeout_s) {
    const std::string before = " has waited ";
    const size_t at = report.find(before);
    const double told = at == std::string::npos ? -1 : std::strtod(report.c_str() + at + before.size(), nullptr);
    INFO(report);
    CHECK((told >= timeout_s && told < timeout_s + 1.2));
    return told >= timeout_s;
}

// Every element of x on each rank, into the test's bits: strict mode's seeds must agree on them.
std::mutex bits_mutex;
void record(const std::vector<float>& x) {
    const std::lock_guard lock(bits_mutex);
    record_bits(x.data(), x.size() * sizeof(float));
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Results

TEST_CASE("documents and whole runs have every algorithm of all_reduce", "[comm][docs]") {
    for (const std::string& name : all_reduce_names()) {
        if (name == "library") continue;
        const auto check_named = [](const std::string& path, const std::string& what) {
            INFO(path << " does not have \"" << what << "\"");
            CHECK(std::regex_search(slurp(path), std::regex(what)));
        };
        std::string file = name + "_all_reduce.cu";
        std::ranges::replace(file, '-', '_');
        check_named("parallel/comm/comm.h", file);
        check_named("parallel/comm/comm.h", "\n//     " + name + "  ");
        check_named("doc/ranks.md", "\\b" + name + "\\b");
        for (const std::string path : {"test/golden/runs/runs.txt", "test/test_ranks.cu"})
            check_named(path, "--all-reduce " + name + "\\b");
    }
}

TEST_CASE("collectives and all algorithms against a serial sum, 1 to 8 ranks", "[comm]") {
    const int n = GENERATE(1, 2, 3, 4, 5, 6, 7, 8);
    CAPTURE(n);
    run_ranks(threads(n), [&](Comm& world) {
        // 33 numbers over 8 ranks: some pieces are empty. 1003: the last piece is shorter.
        comm_check::check_all(world,
                              strict() && n > 3 ? std::vector<int64_t>{0, 33} : std::vector<int64_t>{0, 1, 33, 1003},
                              device().stream);
    });
}

#ifdef CUDA_ON_CPU
// The CPU device's NCCL (cpu/nccl.h): so transport_nccl.cu runs without GPUs.
TEST_CASE("collectives and all algorithms by NCCL, 1 to 5 ranks", "[comm][nccl]") {
    const int n = GENERATE(1, 2, 3, 4, 5);
    CAPTURE(n);
    run_ranks(by_nccl(n), [&](Comm& world) {
        comm_check::check_all(world, {0, 33, strict() ? 34 : 1003}, device().stream);
        if (n != 4) return;
        Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
        for (const char* axis : {"dp", "tp"}) comm_check::check_all(mesh.comm(axis), {33}, device().stream);
    });
}

TEST_CASE("by NCCL all ranks together send what a ring sends, to the byte", "[comm][nccl]") {
    std::atomic<int64_t> sent = 0;
    run_ranks(by_nccl(3), [&](Comm& world) {
        const comm_check::CommMemory memory(world, 7);
        const comm_check::Buffer x(DType::f32, 7);  // 28 bytes, no multiple of 3
        comm_check::fill(x, std::vector<float>(7, 1), device().stream);
        const int64_t before = world.traffic().sent;
        world.all_reduce(x, device().stream);
        world.broadcast(x, 1, device().stream);
        world.reduce(x, x, ReduceOp::sum, 2, device().stream);
        cudaCheck(cudaDeviceSynchronize());
        sent += world.traffic().sent - before;
    });
    CHECK(sent == (2 + 1 + 1) * 2 * 28);  // of the 3 ranks 2 send each piece on
}
#endif

TEST_CASE("a million numbers and three", "[comm]") {
    if (strict()) SKIP_TEST("strict mode has looked at the same code at smaller sizes");
    const int n = GENERATE(2, 7);
    const int64_t length = n == 2 ? 1'000'003 : 200'003;  // each of 7 ranks adds up all of them on the host, too
    run_ranks(threads(n), [&](Comm& world) { comm_check::check_all(world, {length}, device().stream); });
}

TEST_CASE("the memory of a call is enough for a shorter one, of which a rank has a longer piece", "[comm]") {
    const int n = GENERATE(2, 4, 8);
    std::vector<int> all(static_cast<size_t>(n));
    std::iota(all.begin(), all.end(), 0);
    run_ranks(threads(n), [&](Comm& world) {
        // As the last rank has of 1024 numbers, and not of 1030.
        const auto try_it = [&](DType dtype, const auto& call) {
            Arena arena("communication");
            const auto comm = world.split(all, "one call");
            comm->count_memory([&] { call(*comm, make_tensor(nullptr, dtype, {1030})); });
            comm->take_memory(arena), arena.reserve(), comm->take_memory(arena);
            const comm_check::Buffer x(dtype, 1024);
            comm_check::fill(x, std::vector<float>(1024, 1), device().stream);
            call(*comm, x);
            const std::vector<float> sums = comm_check::read(x, device().stream);
            check(comm->rank != 0 || sums == std::vector<float>(1024, static_cast<float>(n)), "other sums");
        };
        for (const DType dtype : {DType::f32, DType::bf16}) {
            for (const AllReduce algorithm : all_reduce_algorithms())
                try_it(dtype, [&](Comm& comm, const Tensor& x) {
                    comm.algorithm = algorithm;
                    comm.all_reduce(x, device().stream);
                });
            try_it(dtype, [](Comm& comm, const Tensor& x) { comm.reduce(x, x, ReduceOp::sum, 0, device().stream); });
        }
    });
}

TEST_CASE("two levels: machines of equal and of different numbers of ranks", "[comm]") {
    const auto [n, per_node] =
        GENERATE(std::pair{8, 4}, std::pair{6, 2}, std::pair{7, 3}, std::pair{5, 4}, std::pair{3, 1});
    CAPTURE(n, per_node);
    RankOptions options = threads(n);
    options.ranks_per_node = per_node;
    run_ranks(options, [&, per = per_node](Comm& world) {
        check(world.node_of(world.size - 1) == (world.size - 1) / per, "node_of is wrong");
        const comm_check::CommMemory memory(world, 1003);
        for (const int64_t size : {int64_t{1}, int64_t{33}, int64_t{1003}})
            for (const DType dtype : {DType::f32, DType::bf16, DType::i32}) {
                const auto values = dtype == DType::i32 ? comm_check::Values::integers : comm_check::Values::fractions;
                comm_check::check_all_reduce(world, AllReduce::two_level, size, dtype, ReduceOp::sum, values,
                                             device().stream);
            }
    });
}

TEST_CASE("what an all_reduce of 4 ranks sends is what the files of the algorithms say", "[comm]") {
    const int64_t n = 1024, bytes = 4 * n;
    std::atomic<int64_t> by_tree = 0;
    run_ranks(threads(4), [&](Comm& world) {
        const comm_check::Buffer x(DType::f32, n);
        const comm_check::CommMemory memory(world, n);
        for (const AllReduce algorithm : all_reduce_algorithms()) {
            world.algorithm = algorithm;
            const int64_t before = world.traffic().sent;
            world.all_reduce(x.tensor, device().stream);
            const int64_t sent = world.traffic().sent - before;
            if (algorithm == AllReduce::tree) by_tree += sent;
            else
                check(sent == 2 * 3 * bytes / 4, all_reduce_name(algorithm), ": a rank sends ", sent, " bytes, not ",
                      2 * 3 * bytes / 4);
        }
    });
    CHECK(by_tree == 2 * 3 * bytes);
}

TEST_CASE("all_reduce repeats bit for bit, and the library's is reduce_scatter and all_gather", "[comm]") {
    const int n = GENERATE(3, 4);
    run_ranks(threads(n), [&](Comm& world) {
        const cudaStream_t stream = device().stream;
        const int64_t piece = 101;  // cut elsewhere than all_reduce cuts
        const std::vector<float> mine =
            comm_check::inputs(comm_check::Values::fractions, world.rank, piece * n, DType::f32);
        comm_check::Buffer x(DType::f32, piece * n), y(DType::f32, piece), z(DType::f32, piece * n);
        const comm_check::CommMemory memory(world, piece * n);
        for (const AllReduce algorithm : all_reduce_algorithms()) {
            world.algorithm = algorithm;
            std::vector<float> first;
            for (int i = 0; i < 3; ++i) {
                comm_check::fill(x, mine, stream);
                world.all_reduce(x, stream);
                const std::vector<float> sums = comm_check::read(x, stream);
                if (i == 0) first = sums;
                else check(first == sums, all_reduce_name(algorithm), ": not the same bits again");
            }
            record(first);
            if (algorithm != AllReduce::library) continue;
            comm_check::fill(x, mine, stream);
            world.reduce_scatter(y, x, ReduceOp::sum, stream);
            world.all_gather(z, y, stream);
            check(first == comm_check::read(z, stream), "reduce_scatter and all_gather differ from all_reduce");
        }
    });
}

TEST_CASE("two communicators on two streams", "[comm]") {
    run_ranks(threads(4), [](Comm& world) {
        cudaStream_t second;
        cudaCheck(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
        {
            const auto other = world.split({0, 1, 2, 3}, "other");
            const comm_check::CommMemory memory(world, 500), other_memory(*other, 500);
            comm_check::Buffer a(DType::f32, 500), b(DType::f32, 500);
            comm_check::fill(a, std::vector<float>(500, 1), device().stream);
            comm_check::fill(b, std::vector<float>(500, 2), second);
            // The ranks put them on their streams in different orders: nobody may wait for the other stream's turn.
            for (int i = 0; i < 3; ++i) {
                world.send(a, (world.rank + 1) % 4, device().stream);
                other->send(b, (world.rank + 1) % 4, second);
                if (world.rank % 2 == 0) world.recv(a, (world.rank + 3) % 4, device().stream);
                other->recv(b, (world.rank + 3) % 4, second);
                if (world.rank % 2 == 1) world.recv(a, (world.rank + 3) % 4, device().stream);
                world.all_reduce(a, device().stream);
                other->all_reduce(b, second);
            }
            comm_check::compare("world", comm_check::read(a, device().stream), std::vector<float>(500, 64));
            comm_check::compare("other", comm_check::read(b, second), std::vector<float>(500, 128));
            // One communicator on two streams: its calls do not overlap.
            for (int i = 0; i < 4; ++i) world.all_reduce(i % 2 ? a : b, i % 2 ? second : device().stream);
            cudaCheck(cudaDeviceSynchronize());
        }
        cudaCheck(cudaStreamDestroy(second));
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Mesh

TEST_CASE("hosts meet: none goes on before all have come, whatever is in the streams", "[comm]") {
    std::atomic<int> come = 0;
    run_ranks(threads(5), [&](Comm& world) {
        const comm_check::Buffer sum(DType::i32, 1);
        const comm_check::CommMemory memory(world, 1);
        for (int round = 1; round <= 20; ++round) {
            world.all_reduce(sum.tensor, device().stream);  // messages of streams and of hosts are told apart
            if (world.rank == round % 5) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            ++come;
            world.meet_hosts();
            check(come >= 5 * round, "rank ", world.rank, " went on when ", come.load(), " had come");
        }
    });
    CHECK(come == 100);
}

TEST_CASE("a barrier: no stream goes on before all have come", "[comm]") {
    std::atomic<int> come = 0;
    run_ranks(threads(5), [&](Comm& world) {
        for (int round = 1; round <= 10; ++round) {
            if (world.rank == round % 5) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            ++come;
            world.barrier(device().stream);
            cudaCheck(cudaStreamSynchronize(device().stream));
            check(come >= 5 * round, "rank ", world.rank, " went on when ", come.load(), " had come");
        }
    });
}

TEST_CASE("hosts tell each other more than their buffer holds at a time", "[comm]") {
    std::string text;
    std::vector<int64_t> numbers;
    for (int i = 0; i < 10'000; ++i) text += static_cast<char>(i * i % 251), numbers.push_back((int64_t{i} << 40) - i);
    run_ranks(threads(3), [&](Comm& world) {
        check(broadcast_text(world, world.rank == 0 ? text : "") == text, "another text");
        std::vector<int64_t> mine = numbers;
        mine[7'000] = world.rank;
        const auto rows = gather_numbers(world, mine);
        for (int64_t r = 0; r < world.size; ++r) {
            mine[7'000] = r;
            check(rows[static_cast<size_t>(r)] == mine, "other numbers of rank ", r);
        }
    });
}

TEST_CASE("ranks wait longer for one that reads or writes a model", "[comm]") {
    std::atomic<bool> all_done = false;
    run_ranks(threads(3), [&](Comm& world) {
        double& timeout_s = world.state().options.timeout_s;
        const double before = std::exchange(timeout_s, 0.1);  // when all have started
        world.patiently([&] {
            if (world.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
            gather_numbers(world, {1});
            if (world.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
            if (world.rank == 1) all_done = true;
        });
        check(all_done, "rank ", world.rank, " goes on before rank 1 is done");
        timeout_s = before;
    });
    // And no longer than before when that is done.
    const std::string error = error_of(threads(3), [](Comm& world) {
        world.state().options.timeout_s = 0.1;
        world.patiently([] {});
        if (world.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(400));
        gather_numbers(world, {1});
    });
    CHECK_THAT(error, ContainsSubstring("all_gather #0 of world at step 0 has waited"));
    CHECK(has_waited(error, 0.1));
}

TEST_CASE("a mesh: who is where, and with whom", "[comm]") {
    std::string picture;
    run_ranks(threads(8), [&](Comm& world) {
        Mesh mesh(world, {{"dp", 2}, {"pp", 2}, {"cp", 1}, {"tp", 2}});
        const int rank = world.rank;
        check(mesh.index("tp") == rank % 2 && mesh.index("pp") == rank / 2 % 2 && mesh.index("dp") == rank / 4 &&
                  mesh.index("cp") == 0 && mesh.size("pp") == 2,
              "wrong place");
        check(mesh.rank_at(mesh.indices_of(rank)) == rank, "rank_at");
        check(mesh.comm("cp").size == 1, "cp");
        const auto sum_along = [&](Comm& comm) {
            comm_check::Buffer x(DType::i32, 1);
            const comm_check::CommMemory memory(comm, 1);
            comm_check::fill(x, {static_cast<float>(1 << rank)}, device().stream);
            comm.all_reduce(x, device().stream);
            return static_cast<int>(comm_check::read(x, device().stream)[0]);
        };
        check(sum_along(mesh.comm("tp")) == (1 << (rank & ~1)) + (1 << (rank | 1)), "tp");
        check(sum_along(mesh.comm("pp")) == (1 << (rank & ~2)) + (1 << (rank | 2)), "pp");
        check(sum_along(mesh.comm("dp")) == (1 << (rank & ~4)) + (1 << (rank | 4)), "dp");
        check(sum_along(*mesh.make_comm({"dp", "tp"})) == (rank & 2 ? 0b11001100 : 0b00110011), "dp+tp");
        if (rank == 0) picture = mesh.picture();
    });
    CHECK(picture ==
          "mesh     8 ranks = dp 2 x pp 2 x cp 1 x tp 2\n"
          "         dp 0                tp 0   tp 1   \n"
          "               pp 0          0      1      \n"
          "               pp 1          2      3      \n"
          "         dp 1                tp 0   tp 1   \n"
          "               pp 0          4      5      \n"
          "               pp 1          6      7      \n");
    // With more axes there is a table for each place along all but the last two.
    RankOptions plan = threads(24);
    plan.planning = true;
    run_ranks(plan, [&](Comm& world) {
        picture = Mesh(world, {{"dp", 2}, {"pp", 3}, {"cp", 2}, {"tp", 2}}).picture();
    });
    std::string titles;
    std::istringstream lines(picture);
    for (std::string line; std::getline(lines, line);)
        if (line.find("tp 1") != std::string::npos) titles += line.substr(9, 10) + ", ";
    CHECK(titles == "dp 0  pp 0, dp 0  pp 1, dp 0  pp 2, dp 1  pp 0, dp 1  pp 1, dp 1  pp 2, ");
    CHECK_THAT(picture, ContainsSubstring("cp 1          22     23"));
    CHECK_THAT(error_of(threads(4),
                        [](Comm& world) {
                            Mesh(world, {{"dp", 3}, {"tp", 1}});
                        }),
               ContainsSubstring("dp 3 x tp 1 = 3 ranks, but there are 4"));
    for (const auto& axes : {std::vector<Axis>{{"dp", -2}, {"tp", -2}}, {{"dp", 2}, {"dp", 2}}})
        CHECK_THAT(error_of(threads(4), [&](Comm& world) { Mesh(world, axes); }),
                   ContainsSubstring(": sizes start at 1, and names must differ"));
    run_ranks(threads(1), [&](Comm& world) {
        Mesh mesh(world, {{"dp", 1}, {"tp", 1}});
        picture = concat(mesh.picture(), mesh.comm("tp").name, ", ", mesh.make_comm({"dp", "tp"})->name);
    });
    CHECK(picture == "mesh     1 rank = dp 1 x tp 1\ntp, dp+tp");
    CHECK_THAT(error_of(threads(1),
                        [](Comm& world) {
                            Mesh(world, {{"dp", 1}}).comm("tp");
                        }),
               ContainsSubstring("no axis 'tp'"));
}

TEST_CASE("a part of a part has the ranks that it should", "[comm]") {
    const auto f = [](Comm& world) {
        const bool odd = world.rank % 2 == 1;
        const auto half = world.split(odd ? std::vector<int>{5, 1, 3} : std::vector<int>{0, 2, 4}, "half");
        // Of the odd ones 3 and 5, in this order.
        const auto part = half->split(half->rank == 1 ? std::vector<int>{1} : std::vector<int>{2, 0}, "part");
        const comm_check::CommMemory memory(*part, 2);
        comm_check::Buffer x(DType::i32, 1), all(DType::i32, part->size);
        comm_check::fill(x, {static_cast<float>(world.rank)}, device().stream);
        part->all_gather(all, x, device().stream);
        const std::vector<float> ranks = comm_check::read(all, device().stream);
        const std::vector<float> expected = half->rank == 1 ? std::vector<float>{static_cast<float>(world.rank)}
                                            : odd           ? std::vector<float>{3, 5}
                                                            : std::vector<float>{4, 0};
        check(ranks == expected, "other ranks");
    };
    run_ranks(threads(6), f);
#ifdef CUDA_ON_CPU
    run_ranks(by_nccl(6), f);
#endif
}

TEST_CASE("a plan has the parts of communicators, and NCCL's collectives, that the run would have", "[comm]") {
    for (const std::string comm : {"auto", "threads", "nccl"}) {
        RankOptions plan = threads(6);
        plan.planning = true;
        plan.comm = comm;
        run_ranks(plan, [&](Comm& world) {
            const auto half = world.split({4, 0, 2}, "half");
            const auto part = half->split({2, 1}, "part");
            check(half->rank == 1 && part->rank == 1 && part->size == 2, "another part");
            const bool by_nccl = nccl_is_built_in() && (comm == "nccl" || (comm == "auto" && !device().is_cpu));
            check(part->transport().has_native() == by_nccl, "--comm ", comm);
        });
    }
}

// Weights that two groups of ranks have, and the norm of all gradients, must have the same bits in both.
TEST_CASE("two levels: groups along an axis add in one order, also where machines end in the middle of a group",
          "[comm]") {
    RankOptions options = threads(6);
    options.ranks_per_node = GENERATE(range(1, 7));
    CAPTURE(options.ranks_per_node);
    std::vector<float> of_dp(6), of_tp(6);
    run_ranks(options, [&](Comm& world) {
        Mesh mesh(world, {{"dp", 3}, {"tp", 2}});
        Mesh other(world, {{"dp", 2}, {"tp", 3}});
        // 1 is lost beside 2^24, and two of them are not.
        const auto sum_along = [&](Comm& comm) {
            comm.algorithm = AllReduce::two_level;
            comm_check::Buffer x(DType::f32, 1);
            const comm_check::CommMemory memory(comm, 1);
            comm_check::fill(x, {comm.rank == 0 ? 0x1p24f : 1.0f}, device().stream);
            comm.all_reduce(x, device().stream);
            return comm_check::read(x, device().stream)[0];
        };
        of_dp[static_cast<size_t>(world.rank)] = sum_along(mesh.comm("dp"));
        of_tp[static_cast<size_t>(world.rank)] = sum_along(other.comm("tp"));
    });
    for (const std::vector<float>& sums : {of_dp, of_tp}) CHECK(sums == std::vector<float>(6, sums[0]));
}

// ---------------------------------------------------------------------------------------------------------------------
// Errors

TEST_CASE("a rank that fails ends the job with its rank and its reason", "[comm]") {
    const auto step = [](Comm& world, int64_t n) {
        comm_check::Buffer x(DType::f32, n);
        const comm_check::CommMemory memory(world, n);
        comm_check::fill(x, std::vector<float>(static_cast<size_t>(n), 0), device().stream);
        world.all_reduce(x, device().stream);
        cudaCheck(cudaStreamSynchronize(device().stream));
    };
    CHECK(error_of(threads(3), [&](Comm& world) {
              for (int i = 0; i < 5; ++i) {
                  if (i == 3 && world.rank == 2) fail("the disk is full");
                  step(world, 100);
              }
          }) == "rank 2: the disk is full");
    CHECK_THAT(error_of(threads(3), [&](Comm& world) { step(world, world.rank == 1 ? 300 : 400); }),
               ContainsSubstring("all_reduce #0 of world at step 0 expects"));

    for (const int64_t n : {10, 30})  // more, or less
        CHECK_THAT(error_of(threads(2),
                            [&](Comm& world) {
                                comm_check::Buffer x(DType::f32, 20), y(DType::f32, n);
                                if (world.rank == 0) world.send(y, 1, device().stream);
                                else world.recv(x, 0, device().stream);
                                cudaCheck(cudaStreamSynchronize(device().stream));
                            }),
                   Catch::Matchers::StartsWith(
                       concat("rank 1: recv of world at step 0 expects 80 bytes from rank 0, which sent ", 4 * n,
                              ": the ranks make different calls")));

    // One rank does not come: the others do not wait for ever, and know whom they miss, also behind communicators that
    // have come and gone.
    std::string text;
    CHECK(seconds([&] {
              text = error_of(threads(3), [&](Comm& world) {
                  for (int i = 0; i < 70; ++i) world.split({0, 1, 2}, "short")->barrier(device().stream);
                  world.set_step(7);
                  step(world, 100);
                  wait_at_most(world, 0.3);
                  if (world.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(2));
                  step(world, 100);
              });
          }) < 30);
    CHECK_THAT(text, ContainsSubstring("all_reduce #1 of world at step 7 has waited"));
    CHECK(has_waited(text, 0.3));
    CHECK_THAT(text, ContainsSubstring("missing: rank 1 (last seen after all_reduce #0 of world at step 7"));
    CHECK(text.find(" s ago), rank") == std::string::npos);
    // A message that is never sent.
    text = error_of(threads(3), [&](Comm& world) {
        comm_check::Buffer x(DType::f32, 10);
        wait_at_most(world, world.rank == 2 ? 0.3 : 60);  // the others wait, too, for the end
        if (world.rank == 2) world.recv(x, 0, device().stream);
        cudaCheck(cudaDeviceSynchronize());
    });
    CHECK_THAT(text, ContainsSubstring("rank 2: recv of world at step 0 has waited"));
    CHECK(has_waited(text, 0.3));
    CHECK_THAT(text, ContainsSubstring("rank 0 (has not communicated yet)"));
}

TEST_CASE("a rank that hangs when the others have ended is found, later than one that is inside a call", "[comm]") {
    const std::string text = error_of(threads(3), [](Comm& world) {
        wait_at_most(world, 0.1);
        for (int i = 0; i < 5000 && world.rank == 1 && !world.state().job->failed(); ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
    });
    CHECK_THAT(text, ContainsSubstring("a message of the program of the end at step 0 has waited"));
    CHECK(has_waited(text, 0.2));
}

TEST_CASE("a job has failed for the first reason, and says so once", "[comm]") {
    Job job;
    std::string said;
    job.on_failure = [&](const std::string& reason) { said += reason + "; "; };
    CHECK(!job.failed());
    job.fail(1, "the disk is full");
    job.fail(0, "a message has not come");
    CHECK(job.failed());
    CHECK(job.reason() == "rank 1: the disk is full");
    CHECK(said == "rank 1: the disk is full; ");
}

TEST_CASE("a rank's slot has how many collectives of each communicator have begun", "[comm]") {
    Slot slot{};
    for (const uint64_t comm : {7, 8, 9}) note_begun(slot, comm, static_cast<int64_t>(comm) - 6);
    CHECK((read_begun(slot, 7) == 1 && read_begun(slot, 8) == 2 && read_begun(slot, 9) == 3));
    note_begun(slot, 7, 0);  // it has gone, and its place is free
    note_begun(slot, 8, 4), note_begun(slot, 9, 5);
    CHECK((read_begun(slot, 7) == 0 && read_begun(slot, 8) == 4 && read_begun(slot, 9) == 5));
    // A message is none.
    run_ranks(threads(2), [](Comm& world) {
        comm_check::Buffer x(DType::i32, 1);
        gather_numbers(world, {1}), gather_numbers(world, {2});
        if (world.rank == 0) world.send(x, 1, device().stream);
        else world.recv(x, 0, device().stream);
        cudaCheck(cudaStreamSynchronize(device().stream));
        check(read_begun(*world.state().slots[static_cast<size_t>(world.rank)], 0) == 2, "two gathers and a message");
    });
}

#ifdef CUDA_ON_CPU
// In strict mode, where streams are asynchronous: otherwise the hosts wait inside of NCCL's calls.
TEST_CASE("by NCCL a rank that does not come is named, and no other", "[comm][nccl]") {
    if (!strict()) SKIP_TEST("NCCL's calls wait");
    const auto come_too_late = [](Comm& world) {
        for (int i = 0; i < 5000 && !world.state().job->failed(); ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
    };
    const std::string of_collective = error_of(by_nccl(3), [&](Comm& world) {
        // Rank 0 and rank 2 have put a call of another communicator on a stream of its own meanwhile.
        const auto pair = world.split(world.rank == 1 ? std::vector<int>{1} : std::vector<int>{0, 2}, "pair");
        const comm_check::CommMemory memory(world, 10), pair_memory(*pair, 10);
        comm_check::Buffer x(DType::i32, 10), y(DType::i32, 10);
        const cudaStream_t second = make_stream();
        for (int i = 0; i < 3; ++i) {
            if (i == 2) wait_at_most(world, 0.3);
            if (i == 2 && world.rank == 1) come_too_late(world);
            world.all_reduce(x, device().stream);
            pair->all_reduce(y, second);
        }
        cudaCheck(cudaDeviceSynchronize());
    });
    CHECK_THAT(of_collective, ContainsSubstring("all_reduce #2 of world at step 0 has waited"));
    CHECK(has_waited(of_collective, 0.3));
    CHECK_THAT(of_collective, ContainsSubstring("missing: rank 1 (last seen after all_reduce #1 of world"));
    CHECK(of_collective.find(" s ago), rank") == std::string::npos);

    const std::string in_group = error_of(by_nccl(3), [&](Comm& world) {
        comm_check::Buffer x(DType::f32, 10), y(DType::f32, 10);
        world.barrier(device().stream);  // connects all
        wait_at_most(world, world.rank == 2 ? 0.3 : 60);
        if (world.rank != 2) come_too_late(world);
        world.group_start();
        if (world.rank == 0) world.send(x, 2, device().stream);
        if (world.rank == 2) world.recv(y, 0, device().stream);
        world.group_end();
        cudaCheck(cudaDeviceSynchronize());
    });
    CHECK_THAT(in_group, ContainsSubstring("rank 2: recv of world at step 0 has waited"));
    CHECK(has_waited(in_group, 0.3));
    CHECK_THAT(in_group, ContainsSubstring(" for a message from rank 0; missing: rank 0 (last seen after barrier #0"));
}

// What a group has put on its stream, it has put there when the group ends: strict mode would report a race.
TEST_CASE("by NCCL a call on another stream waits for the messages of a group", "[comm][nccl]") {
    run_ranks(by_nccl(2), [](Comm& world) {
        comm_check::Buffer x(DType::i32, 10), y(DType::i32, 10);
        const comm_check::CommMemory memory(world, 10);
        const cudaStream_t second = make_stream();
        world.group_start();
        world.send(x, 1 - world.rank, device().stream);
        world.recv(y, 1 - world.rank, device().stream);
        world.group_end();
        world.all_reduce(y, second);
        cudaCheck(cudaDeviceSynchronize());
        cudaCheck(cudaStreamDestroy(second));
    });
}

TEST_CASE("by NCCL the calls of a group that is over are waited for no longer", "[comm][nccl]") {
    run_ranks(by_nccl(2), [](Comm& world) {
        comm_check::Buffer x(DType::i32, 10), y(DType::i32, 10);
        world.group_start();
        world.send(x, 1 - world.rank, device().stream);
        world.recv(y, 1 - world.rank, device().stream);
        world.group_end();
        wait_at_most(world, 0.05);
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        world.state().patience = 1;
    });
}

TEST_CASE("by NCCL a communicator with calls under way can be split", "[comm][nccl]") {
    run_ranks(by_nccl(2), [](Comm& world) {
        comm_check::Buffer x(DType::i32, 1);
        const comm_check::CommMemory memory(world, 1);
        comm_check::fill(x, {1}, device().stream);
        world.all_reduce(x, device().stream);
        const auto both = world.split({1, 0}, "both");
        check(both->rank == 1 - world.rank, "the order of the members");
        check(comm_check::read(x, device().stream)[0] == 2, "the sum");
    });
}
#endif

TEST_CASE("wrong calls and wrong options are one clear line", "[comm]") {
    const auto call = [](const std::function<void(Comm&, Tensor, Tensor)>& f) {
        return error_of(threads(2), [&](Comm& world) {
            comm_check::Buffer a(DType::f32, 10), b(DType::bf16, 10);
            f(world, a, b);
        });
    };
    CHECK_THAT(call([](Comm& c, Tensor a, Tensor b) { c.all_reduce(a, b, ReduceOp::sum, nullptr); }),
               ContainsSubstring("all_reduce: out is f32"));
    CHECK_THAT(call([](Comm& c, Tensor a, Tensor) { c.all_gather(a, a, nullptr); }),
               ContainsSubstring("expected out : inp = 2 : 1"));
    CHECK_THAT(call([](Comm& c, Tensor a, Tensor) {
                   c.all_gather(a, a, {0, 12, 10}, nullptr);
               }),
               ContainsSubstring("all_gather: 3 boundaries up to 10 of f32"));
    CHECK_THAT(call([](Comm& c, Tensor a, Tensor) { c.broadcast(a, 2, nullptr); }), ContainsSubstring("root 2 of 2"));
    CHECK_THAT(call([](Comm& c, Tensor a, Tensor) { c.send(a, c.rank, nullptr); }), ContainsSubstring("send: rank"));
    CHECK_THAT(call([](Comm& c, Tensor, Tensor) { c.split({1 - c.rank}, "x"); }), ContainsSubstring("among them"));
    CHECK_THAT(call([](Comm& c, Tensor, Tensor) {
                   check_same_everywhere(c, {static_cast<size_t>(1 + c.rank), {"a thing", "the same"}});
               }),
               ContainsSubstring("rank 1: this rank runs another version of the program"));
    RankOptions plan = threads(Comm::kHostWords / 2);
    plan.planning = true;
    CHECK_THAT(error_of(plan, [](Comm& c) { gather_numbers(c, {1}); }),
               ContainsSubstring("a job of 2048 ranks: at most 2047 can tell each other numbers"));
    CHECK_THAT(call([](Comm& c, Tensor, Tensor) {
                   std::vector<std::unique_ptr<Comm>> parts;
                   for (int i = 0; i < 64; ++i) parts.push_back(c.split({c.rank}, "x"));
               }),
               ContainsSubstring("more than 64 communicators"));
    RankOptions options = threads(2);
    options.comm = "carrier pigeon";
    CHECK_THAT(error_of(options, [](Comm&) {}), ContainsSubstring("--comm carrier pigeon: use auto"));
    options.comm = "mpi";
    CHECK_THAT(error_of(options, [](Comm&) {}), ContainsSubstring("start the program with mpirun"));
    options = threads(2);
    options.all_reduce = "magic";
    CHECK_THAT(error_of(options, [](Comm&) {}), ContainsSubstring("use library, ring"));
    for (const std::string steps : {"3,,4", ",", "12345678901234567890", "3,x"}) {
        options = threads(2);
        options.trace = steps;
        CHECK_THAT(error_of(options, [](Comm&) {}),
                   ContainsSubstring("--trace " + steps + ": give the numbers of the steps to record"));
    }
    const auto refusal = [](const auto& change) {
        RankOptions changed = threads(2);
        change(changed);
        return error_of(changed, [](Comm&) {});
    };
    for (const int n : {-1, 1025})
        CHECK(refusal([&](RankOptions& o) { o.ranks = n; }) ==
              concat("--ranks ", n, ": a number of ranks from 1 to 1024"));
    CHECK(refusal([](RankOptions& o) { o.timeout_s = 0; }) == "--comm-timeout 0: seconds, more than 0");
    CHECK(refusal([](RankOptions& o) { o.ranks_per_node = -1; }) == "--ranks-per-node -1: use 1 or more, or 0 for all");
    // One rank alone: its error is the caller's, as if there were no ranks.
    CHECK(error_of(threads(1), [](Comm&) { fail("plain"); }) == "plain");
}

TEST_CASE("what the launchers of processes say", "[comm]") {
    struct Variable {
        const char* name;
        Variable(const char* its_name, const char* value) : name(its_name) { setenv(name, value, 1); }
        ~Variable() { unsetenv(name); }
    };
    RankOptions options = threads(0);
    CHECK((!started_by_mpirun() && is_first_process() && rank_count(options) == 1));
    {
        const Variable size("PMI_SIZE", "3"), rank("PMI_RANK", "1");
        CHECK((started_by_mpirun() && !is_first_process() && rank_count(options) == 3));
        check_rank_options(options);
        options.ranks = 3;
        check_rank_options(options);
        options.ranks = 2;
        CHECK_THROWS_WITH(check_rank_options(options), "--ranks 2 under an mpirun of 3 processes: leave --ranks out");
        const Variable open_mpi("OMPI_COMM_WORLD_SIZE", "2");
        check_rank_options(options);
    }
    const Variable size("OMPI_COMM_WORLD_SIZE", "0");
    CHECK_THROWS_WITH(rank_count(options), ContainsSubstring("has started \"0\" processes"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Trace

TEST_CASE("a trace has every collective and every message of every rank", "[comm][program]") {
    const TempFolder folder;
    for (const std::string& launcher : {std::string(), mpirun_command(4)}) {
        if (!launcher.empty() && !have_mpirun()) continue;
        CAPTURE(launcher);
        const Outcome run = run_shell(concat("unset CUDA_CPU_STRICT; ", launcher, program_path("comm_check"),
                                             launcher.empty() ? " --ranks 4" : "", " --trace ", folder.path, " check"));
        INFO(run.err);
        REQUIRE(run.status == 0);
        CHECK_THAT(run.out, ContainsSubstring("rank 1 -> 2"));
        CHECK_THAT(run.out, ContainsSubstring("rank 2 <- 1"));
        const auto events = parsed_json(slurp(folder / "trace.json"))["traceEvents"];
        std::map<std::string, int> n_of;
        std::set<int> ranks;
        for (const auto& event : events) {
            if (event["ph"] == "X") {
                n_of[event["cat"] == "collective"               ? "collectives"
                     : as<std::string>(event["name"])[0] == 's' ? "sends"
                                                                : "receives"]++;
                ranks.insert(as<int>(event["pid"]));
                const size_t bytes = as<uint64_t>(event["args"]["bytes"]);
                if (event["cat"] == "message" && bytes >= 64) ++n_of["ends of messages that are not tiny"];
                CHECK(as<double>(event["dur"]) >= 0);
            } else if (event["ph"] == "s" || event["ph"] == "f") {
                n_of["arrow ends"]++;
            }
        }
        CHECK(ranks == std::set<int>{0, 1, 2, 3});
        CHECK(n_of["collectives"] > 1000);
        CHECK(n_of["sends"] == n_of["receives"]);
        CHECK(n_of["arrow ends"] == n_of["ends of messages that are not tiny"]);
        CHECK(slurp(folder / "trace.png").substr(1, 3) == "PNG");
        std::filesystem::remove(folder / "trace.json");
        std::filesystem::remove(folder / "trace.png");
    }
}

TEST_CASE("why a job has failed is said also where its trace cannot be written", "[comm]") {
    const TempFolder folder;
    RankOptions options = threads(2);
    options.trace = "1", options.trace_folder = folder / "no";
    const std::string error = error_of(options, [](Comm& world) {
        world.set_step(1);
        gather_numbers(world, {world.rank});
        if (world.rank == 0) fail("the disk is full");
    });
    CHECK_THAT(error, ContainsSubstring("the disk is full. There is no trace of it: cannot create " + folder.path));
    // A job that has not failed has done so then. Of one that has failed the events are written, and no more.
    CHECK_THAT(error_of(options,
                        [](Comm& world) {
                            world.set_step(1);
                            gather_numbers(world, {world.rank});
                        }),
               Catch::Matchers::StartsWith("cannot create " + folder.path));
    options.trace_folder = folder.path;
    bool after = false;
    options.after_trace = [&](const std::vector<TraceEvent>&) { after = true; };
    CHECK(error_of(options, [](Comm& world) {
              world.set_step(1);
              gather_numbers(world, {world.rank});
              if (world.rank == 0) fail("the disk is full");
          }) == "rank 0: the disk is full");
    CHECK(std::filesystem::exists(folder / "trace.json"));
    CHECK(!after);
}

#ifdef CUDA_ON_CPU
TEST_CASE("by NCCL a message of a group ends in the trace when it has arrived", "[comm][nccl]") {
    const TempFolder folder;
    RankOptions options = by_nccl(2);
    options.trace = "0";
    options.trace_folder = folder.path;
    double sent = 0, began = 0, received = -1;  // since all ranks were there
    options.after_trace = [&](const std::vector<TraceEvent>& events) {
        for (const TraceEvent& event : events)
            if (event.what == "recv of world") began = event.start, received = event.end;
    };
    run_ranks(options, [&](Comm& world) {
        comm_check::Buffer x(DType::f32, 10);
        world.barrier(device().stream);  // connects the two
        cudaCheck(cudaStreamSynchronize(device().stream));
        if (world.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        if (world.rank == 0) sent = seconds_now() - world.state().started;
        world.group_start();
        if (world.rank == 0) world.send(x, 1, device().stream);
        else world.recv(x, 0, device().stream);
        world.group_end();
        cudaCheck(cudaStreamSynchronize(device().stream));
    });
    CHECK(sent > 0);
    CHECK(received > sent);
    CHECK((began > 0 && began < received));
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Processes

namespace {

Outcome mpirun(int n, const std::string& arguments, const std::string& before = "") {
    return run_shell(
        concat("unset CUDA_CPU_STRICT; ", before, mpirun_command(n), program_path("comm_check"), " ", arguments));
}

}  // namespace

TEST_CASE("collectives between processes", "[comm][program]") {
    if (!have_mpirun()) SKIP_TEST("no MPI");
    for (const int n : {2, 3}) {
        const Outcome run = mpirun(n, "check");
        CAPTURE(n, run.out, run.err);
        CHECK(run.status == 0);
        CHECK_THAT(run.out, ContainsSubstring("all right"));
        CHECK_THAT(run.out, ContainsSubstring(concat("ranks    ", n, " processes (MPI)")));
    }
    CHECK_THAT(mpirun(2, "--comm threads check").err, ContainsSubstring("--comm threads under mpirun"));
#ifdef CUDA_ON_CPU
    CHECK_THAT(mpirun(2, "--comm nccl check").err, ContainsSubstring("--comm nccl under mpirun: on the CPU device"));
#endif
}

TEST_CASE("a process that fails, hangs or is killed takes the job down, named", "[comm][program]") {
    if (!have_mpirun()) SKIP_TEST("no MPI");
    Outcome run;
    CHECK(seconds([&] { run = mpirun(3, "throw"); }) < 30);
    CHECK(run.status != 0);
    CHECK_THAT(run.err, ContainsSubstring("rank 1: the disk is full"));
    CHECK_THAT(run.err, !ContainsSubstring(", rank 1: the disk is full"));

    // On several hosts its name comes first. Here mpirun reaches the other one by a program that stays on this one.
    if (run_shell("mpirun --version").out.find("(Open MPI) 4") != std::string::npos) {
        const TempFolder folder;
        spit(folder / "agent", "#!/bin/sh\nshift\nexec sh -c \"$*\"\n");
        std::filesystem::permissions(folder / "agent", std::filesystem::perms::owner_all);
        run = {};
        // Its daemon may be too slow for mpirun, which ends then. lo: also where there is no network.
        const std::string flags = concat("--mca plm_rsh_agent ", folder / "agent", " --mca oob_tcp_if_include lo ",
                                         "--mca btl_tcp_if_include lo --host localhost,other ");
        for (int i = 0; i < 3 && run.err.find("the disk is full") == std::string::npos; ++i)
            run = run_shell(
                concat("unset CUDA_CPU_STRICT; ", mpirun_command(2), flags, program_path("comm_check"), " throw"));
        std::string name = run_shell("uname -n").out;
        CHECK_THAT(run.err,
                   ContainsSubstring(concat("host ", name.substr(0, name.find('\n')), ", rank 1: the disk is full")));
    }

    CHECK(seconds([&] { run = mpirun(3, "--timeout 2 hang"); }) < 30);  // 1 is too short beside other programs
    CHECK(run.status != 0);
    CHECK_THAT(run.err, ContainsSubstring("at step 3 has waited"));
    CHECK(has_waited(run.err, 2));
    CHECK_THAT(run.err, ContainsSubstring("missing: rank 1 (last seen after"));

    CHECK(seconds([&] { run = mpirun(3, "exit"); }) < 30);
    CHECK(run.status != 0);
    CHECK_THAT(run.err, ContainsSubstring("Exit code:    7"));

    CHECK(seconds([&] { run = mpirun(2, "--timeout 2 roots", "timeout 20 "); }) < 15);
    CHECK(run.status != 0);
    CHECK_THAT(run.err, ContainsSubstring(": broadcast #0 of world at step 0 has waited"));
    CHECK(has_waited(run.err, 2));
    CHECK_THAT(run.err, ContainsSubstring("s for rank 1 to receive a message. (--comm-timeout") ||
                            ContainsSubstring("s for rank 0 to receive a message. (--comm-timeout"));

    // As between two hosts: in shared memory a receiver fetches the bytes itself. lo: as above.
    CHECK(seconds([&] {
              run = mpirun(2, "--timeout 2 half",
                           "export OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=lo; timeout 20 ");
          }) < 15);
    CHECK(run.status == 2);
    CHECK_THAT(run.err, ContainsSubstring("rank 0: recv of world at step 0 has waited") &&
                            ContainsSubstring("s for the rest of a message from rank 1: that rank hangs"));
    CHECK(has_waited(run.err, 2));

    // A process that never starts MPI: the others wait inside MPI's start, where nobody has a number yet. They come
    // later than mpirun has seen it end, because of one that ends while they are there mpirun itself ends the job.
    const TempFolder folder_of_late;
    const std::string pid = folder_of_late / "pid";
    const std::string late =
        concat("while [ ! -s ", pid, " ] || [ -e /proc/$(cat ", pid, ") ]; do sleep 0.02; done; sleep 0.2; exec ",
               program_path("comm_check"), " --timeout 0.4 check");
    CHECK(seconds([&] {
              run = run_shell(
                  concat("unset CUDA_CPU_STRICT; timeout 20 ", mpirun_of_two(late, concat("echo $$ > ", pid))));
          }) < 15);
    CHECK(run.status == 2);
    CHECK_THAT(run.err, ContainsSubstring("the start: MPI has waited") &&
                            ContainsSubstring("one of them has ended, hangs, or was started as another program"));
    CHECK(has_waited(run.err, 2));

    // kill -9 at moments of its own: the pid is in the output; mpirun's report names the rank and the signal.
    for (const char* moment : {"0.3", "0.7"}) {
        const TempFolder folder;
        const std::string out = folder / "pids";
        CHECK(seconds([&] {
                  run = mpirun(3, concat("work > ", out),
                               concat("( for i in $(seq 400); do [ \"$(grep -c pid ", out,
                                      " 2> /dev/null)\" = 3 ] && break; sleep 0.05; done; sleep ", moment,
                                      "; kill -9 $(sed -n 's/^rank 2 pid //p' ", out, ") ) & "));
              }) < 30);
        CAPTURE(run.err);
        CHECK(run.status != 0);
        CHECK_THAT(run.err, ContainsSubstring("rank 2"));
        CHECK_THAT(run.err, ContainsSubstring("signal 9"));
        const std::string pids = slurp(out);
        std::istringstream lines(pids);
        for (std::string line; std::getline(lines, line);) {
            if (line.find("pid ") == std::string::npos) continue;
            // None is left, be it after a while. (One whose parent has gone may stay a zombie for want of somebody to
            // bury it.)
            const auto is_left = [path = concat("/proc/", line.substr(line.find("pid ") + 4), "/stat")] {
                const std::string state = slurp(path);
                return !state.empty() && state.find(") Z") == std::string::npos;
            };
            for (int wait = 0; wait < 100 && is_left(); ++wait)
                std::this_thread::sleep_for(std::chrono::milliseconds(100));
            CHECK(!is_left());
        }
    }
}

// The process itself is stopped for longer than the timeout: that is no waiting.
// On the CPU device others hang by NCCL at the same time: there the hosts of the other ranks wait in a call.
TEST_CASE("threads that hang take the process down", "[comm][program]") {
    const TempFolder folder;
    const std::string program = concat("env -u CUDA_CPU_STRICT ", program_path("comm_check"), " --ranks 3 ");
    std::string beside;
#ifdef CUDA_ON_CPU
    beside = concat("timeout 40 ", program, "--comm nccl --timeout 1 hang 2> ", folder / "nccl", " & ");
#endif
    Outcome run;
    CHECK(seconds([&] {
              run = run_shell(concat(program, "--timeout 2 hang & pid=$!; ", beside, "sleep 1; kill -STOP $pid; ",
                                     "sleep 4; kill -CONT $pid; wait $pid; status=$?; wait; exit $status"));
          }) < 40);
#ifdef CUDA_ON_CPU
    const std::string by_nccl = slurp(folder / "nccl");
    CHECK_THAT(by_nccl, ContainsSubstring("at step 3 has waited") && ContainsSubstring("missing: rank 1 (last seen"));
    CHECK(has_waited(by_nccl, 1));
    CHECK_THAT(by_nccl, ContainsSubstring("3 of 3 ranks have not ended within 10 s"));
#endif
    CHECK(run.status == 2);
    CHECK_THAT(run.err, ContainsSubstring("missing: rank 1 (last seen after"));
    CHECK_THAT(run.err, ContainsSubstring("1 of 3 ranks have not ended"));
    CHECK(has_waited(run.err, 2));
}

#ifdef CUDA_ON_CPU
TEST_CASE("a thread that cannot be started is one clear line", "[comm][program]") {
    // Each thread has a stack of 1 GB. (CUDA takes more addresses than are left to it here.)
    const Outcome run =
        run_program("comm_check", "--ranks 8 check", "ulimit -s 1000000; ulimit -v 3500000; exec timeout 60");
    CHECK(run.status == 2);
    CHECK_THAT(run.err, ContainsSubstring(": cannot start a thread: ") && ContainsSubstring("fewer --ranks"));
}

TEST_CASE("comm_check ends where it is told nothing to do", "[comm][program]") {
    for (const char* mode : {"", "--help"}) {
        const Outcome run = run_program("comm_check", mode, "exec timeout 10");
        CHECK(run.status == 2);
        CHECK(run.err == concat("comm_check: '", mode, "' is no mode: test/comm_check.cu lists them\n"));
    }
}

TEST_CASE("by NCCL a rank that fails ends the job at once, with its reason", "[comm][program][nccl]") {
    const Outcome run = run_program("comm_check", "--ranks 3 --comm nccl --timeout 5 throw", "env CUDA_CPU_STRICT=1");
    CHECK(run.status == 2);
    CHECK(run.err == "comm_check: rank 1: the disk is full\n");
}

// An event wait between computing and reducing is missing: by default the CPU device runs everything in the order of
// the calls, and the result is right by luck. In strict mode it is not.
TEST_CASE("strict mode finds a missing event wait around a collective", "[comm][program]") {
    const auto run = [](const std::string& mode, int seed) {
        return run_program(
            "comm_check", "--ranks 3 " + mode,
            seed == 0 ? "env -u CUDA_CPU_STRICT timeout 60" : concat("env CUDA_CPU_STRICT=", seed, " timeout 60"));
    };
    for (const int seed : {0, 1, 2, 3}) {
        CAPTURE(seed);
        const Outcome right = run("overlap", seed);
        CHECK(right.err == "");
        CHECK(right.status == 0);
        for (const char* mode : {"overlap-early", "overlap-late"}) {
            CAPTURE(mode);
            const Outcome wrong = run(mode, seed);
            if (seed == 0) CHECK(wrong.status == 0);
            else CHECK_THAT(wrong.err, ContainsSubstring("race between streams"));
        }
    }
}
#endif
