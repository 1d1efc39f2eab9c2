// test/comm_check.cu: ranks as a program of its own, for what a test cannot do to itself: to be started by mpirun,
// to be killed.
//
//   comm_check [--ranks N] [--trace FOLDER] [--timeout S] [--comm NAME] MODE
//     check     every collective against a serial sum; under mpirun also that what has arrived takes no memory
//     throw     rank 1 throws in step 3        exit   it leaves without a word      hang   it sleeps for ever
//     sizes     ranks disagree on a size             roots  they disagree on a root: all send, and none receives
//     half      rank 1 hangs when it has announced a long message, whose bytes MPI sends when it is called again
//     work      all_reduce for ever, printing each rank's process id first: to be killed
//     overlap   gradients are reduced on a stream of their own while the next are computed, as data parallelism does;
//               overlap-early and overlap-late leave out one of the two event waits: strict mode reports a race
//     two-streams  one communicator is called on two streams in turns
#include "comm_check.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace {

const char* const kModes[] = {"check", "throw", "exit",    "hang",          "sizes",        "roots",
                              "half",  "work",  "overlap", "overlap-early", "overlap-late", "two-streams"};

void endless(Comm& world, const std::string& mode) {
    const cudaStream_t stream = device().stream;
    comm_check::Buffer x(DType::f32, 1003);
    const comm_check::CommMemory memory(world, 1003);
    comm_check::fill(x, std::vector<float>(1003, 0), stream);
    std::printf("rank %d pid %d\n", world.rank, static_cast<int>(getpid()));
    std::fflush(stdout);
    for (int64_t step = 1;; ++step) {
        world.set_step(step);
        if (step == 3 && world.rank == 1) {
            if (mode == "throw") fail("the disk is full");
            if (mode == "exit") std::_Exit(7);
            if (mode == "hang")
                for (;;) sleep(1000);
        }
        const int64_t n = mode == "sizes" && step == 3 && world.rank == 1 ? 1002 : 1003;
        const std::vector<AllReduce>& all = all_reduce_algorithms();
        world.algorithm = all[static_cast<size_t>(step) % all.size()];
        world.all_reduce(make_tensor(x.tensor.data, DType::f32, {n}), stream);
        cudaCheck(cudaStreamSynchronize(stream));
    }
}

// Per step and bucket: "backward" writes the gradients, they are summed over ranks, and the "optimizer" reads the sums.
void overlap(Comm& world, bool wait_before, bool wait_after) {
    constexpr int kBuckets = 3, kSteps = 8;
    constexpr int64_t n = 257;
    const cudaStream_t compute = device().stream;
    cudaStream_t reduction;
    cudaEvent_t is_written, is_reduced;
    cudaCheck(cudaStreamCreateWithFlags(&reduction, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&is_written, &is_reduced})
        cudaCheck(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    const comm_check::CommMemory memory(world, n);
    std::vector<std::unique_ptr<comm_check::Buffer>> grads, sources, weights;
    for (int b = 0; b < kBuckets; ++b) {
        grads.push_back(std::make_unique<comm_check::Buffer>(DType::f32, n));
        sources.push_back(std::make_unique<comm_check::Buffer>(DType::f32, n));
        weights.push_back(std::make_unique<comm_check::Buffer>(DType::f32, n));
    }
    std::string wrong;
    for (int step = 1; step <= kSteps; ++step) {
        world.set_step(step);
        for (size_t b = 0; b < kBuckets; ++b) {
            const float value = static_cast<float>(100 * step + 10 * static_cast<int>(b) + world.rank);
            comm_check::fill(*sources[b], std::vector<float>(n, value), compute);
            cudaCheck(cudaMemcpyAsync(grads[b]->tensor.data, sources[b]->tensor.data, n * sizeof(float),
                                      cudaMemcpyDeviceToDevice, compute));
            cudaCheck(cudaEventRecord(is_written, compute));
            if (wait_before) cudaCheck(cudaStreamWaitEvent(reduction, is_written));
            world.all_reduce(*grads[b], reduction);
        }
        cudaCheck(cudaEventRecord(is_reduced, reduction));
        if (wait_after) cudaCheck(cudaStreamWaitEvent(compute, is_reduced));
        for (size_t b = 0; b < kBuckets; ++b)
            cudaCheck(cudaMemcpyAsync(weights[b]->tensor.data, grads[b]->tensor.data, n * sizeof(float),
                                      cudaMemcpyDeviceToDevice, compute));
        for (size_t b = 0; b < kBuckets; ++b) {
            float want = 0;
            for (int r = 0; r < world.size; ++r) want += static_cast<float>(100 * step + 10 * static_cast<int>(b) + r);
            for (float x : comm_check::read(*weights[b], compute))
                if (wrong.empty() && x != want)
                    wrong = concat("step ", step, ", bucket ", b, ": ", x, " instead of ", want);
        }
    }
    cudaCheck(cudaDeviceSynchronize());
    for (cudaEvent_t event : {is_written, is_reduced}) cudaCheck(cudaEventDestroy(event));
    cudaCheck(cudaStreamDestroy(reduction));
    check(wrong.empty(), "wrong sums: ", wrong);
}

// Each stream has a tensor of its own, but the calls share the communicator's scratch: the communicator orders them.
void two_streams(Comm& world) {
    constexpr int64_t n = 257;
    const cudaStream_t streams[] = {device().stream, make_stream()};
    const comm_check::CommMemory memory(world, n);
    comm_check::Buffer a(DType::f32, n), b(DType::f32, n);
    comm_check::fill(a, std::vector<float>(n, 1), streams[0]);
    comm_check::fill(b, std::vector<float>(n, 2), streams[1]);
    world.algorithm = AllReduce::ring;
    for (int i = 0; i < 2; ++i) {
        world.all_reduce(a, streams[0]);
        world.all_reduce(b, streams[1]);
    }
    const float factor = static_cast<float>(world.size * world.size);
    comm_check::compare("a", comm_check::read(a, streams[0]), std::vector<float>(n, factor));
    comm_check::compare("b", comm_check::read(b, streams[1]), std::vector<float>(n, 2 * factor));
    cudaCheck(cudaStreamDestroy(streams[1]));
}

// As on a link of a pipeline: one rank only sends, another only receives. The barriers are the world's.
void one_way(Comm& world) {
    constexpr int64_t n = 1 << 14, kMostBytes = 16 << 20;
    const auto resident_bytes = [] {
        int64_t all = 0, resident = 0;
        std::ifstream("/proc/self/statm") >> all >> resident;
        return resident * sysconf(_SC_PAGESIZE);
    };
    const cudaStream_t stream = device().stream;
    const auto link = world.split(world.rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{world.rank}, "one way");
    comm_check::Buffer x(DType::f32, n);
    comm_check::fill(x, std::vector<float>(n, 1), stream);
    const int64_t before = resident_bytes();
    for (int i = 0; i < 600; ++i) {  // 37.5 MiB
        if (world.rank == 0) link->send(x, 1, stream);
        if (world.rank == 1) link->recv(x, 0, stream);
        if (i % 20 == 19) world.barrier(stream);
    }
    cudaCheck(cudaStreamSynchronize(stream));
    const int64_t more = resident_bytes() - before;
    check(more < kMostBytes, "rank ", world.rank, " has ", more, " bytes more than before 600 messages that arrived");
}

void run(int argc, char** argv) {
    RankOptions options;
    std::string mode;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        const auto value = [&] { return std::string(i + 1 < argc ? argv[++i] : ""); };
        if (argument == "--ranks") options.ranks = std::atoi(value().c_str());
        else if (argument == "--timeout") options.timeout_s = std::atof(value().c_str());
        else if (argument == "--comm") options.comm = value();
        else if (argument == "--trace") options.trace = "0", options.trace_folder = value();
        else mode = argument;
    }
    check(std::ranges::count(kModes, mode) > 0, "'", mode, "' is no mode: test/comm_check.cu lists them");
    run_ranks(options, [&](Comm& world) {
        if (mode.starts_with("overlap")) {
            overlap(world, mode != "overlap-early", mode != "overlap-late");
            if (world.rank == 0) std::printf("all right\n");
            return;
        }
        if (mode == "two-streams") return two_streams(world);
        if (mode == "roots") {
            comm_check::Buffer x(DType::f32, 100003);  // too many for MPI to take them before their receiver does
            return world.broadcast(x.tensor, world.rank, device().stream);
        }
        if (mode == "half") {
            comm_check::Buffer x(DType::f32, 1000003);
            if (world.rank == 0) return world.recv(x.tensor, 1, device().stream);
            world.send(x.tensor, 0, device().stream);
            for (;;) sleep(1000);
        }
        if (mode != "check") return endless(world, mode);
        const cudaStream_t stream = device().stream;
        comm_check::check_all(
            world, !options.trace.empty() ? std::vector<int64_t>{1, 77} : std::vector<int64_t>{0, 1, 1000, 100003},
            stream);
        if (started_by_mpirun() && world.size > 1) one_way(world);
        for (int rank = 0; rank < world.size; ++rank)
            check(world.node_of(rank) == 0, "one machine is taken for several");
        check(device().index == world.rank % device_count(), "the ranks do not take the devices in turn");
        check(world.state().sharers == (device().is_cpu ? world.size : ceil_div(world.size, device_count())),
              "so many ranks share a device: ", world.state().sharers);
        const int64_t microseconds = std::llround(1e6 * world.state().started);
        for (const auto& row : gather_numbers(world, {microseconds}))
            check(row[0] == microseconds, "the ranks' traces begin at different times");
        std::vector<int> last_first;
        for (int rank = world.size; rank-- > 0;) last_first.push_back(rank);
        const auto turned = world.split(last_first, "turned");
        check(turned->rank == world.size - 1 - world.rank, "split: its ranks are not in the order of the members");
        comm_check::check_all(*turned, {33}, stream);
        {
            // A communicator that its sender has done with before the bytes of a long message have left.
            auto pair = world.split(world.rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{world.rank}, "pair");
            comm_check::Buffer x(DType::f32, 300003);
            std::vector<float> numbers(300003);
            for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i);
            if (world.rank == 0) comm_check::fill(x, numbers, stream), pair->send(x, 1, stream);
            if (world.rank == 1) usleep(50'000), pair->recv(x, 0, stream);
            if (world.rank == 1) comm_check::compare("a long message", comm_check::read(x, stream), numbers);
            pair.reset();
            comm_check::fill(x, std::vector<float>(300003, -1), stream);  // other numbers where those were
        }
        if (world.size % 2 == 0) {
            Mesh mesh(world, {{"dp", world.size / 2}, {"tp", 2}});
            if (world.rank == 0) std::fputs(mesh.picture().c_str(), stdout);
            comm_check::check_all(mesh.comm("dp"), {33}, stream);
            comm_check::check_all(mesh.comm("tp"), {33}, stream);
        }
        if (world.rank == 0) std::printf("all right\n");
    });
}

}  // namespace

int main(int argc, char** argv) {
    try {
        run(argc, argv);
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "comm_check: %s\n", error.what());
        return 2;
    }
}
