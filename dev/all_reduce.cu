// dev/all_reduce.cu: times the all_reduce algorithms for many sizes and numbers of ranks, and plots time against size,
// with the limit.
//
//   run      build/cpu/dev/all_reduce                        2, 4 and 8 threads, 1 Ki to 1 Mi floats
//            build/cpu/dev/all_reduce --ranks 3 --max 65536 --out FOLDER     pictures: FOLDER/all_reduce_3.png
//            mpirun -np 4 build/cpu/dev/all_reduce           processes
//   debug    make DEBUG=1 DEVICE=cpu dev && gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/all_reduce --ranks 2
//
// The limit: of N bytes the rank that sends most must send at least 2 (n-1)/n N. The rate at which bytes leave a rank
// is measured with the traffic pattern of the ring: all ranks send the largest message to their right neighbour at the
// same time. So the limit includes no latency and no additions. Each time is that of the slowest rank, and the median
// of several rounds.
#include "dev/program.h"
#include "io/io.h"
#include "parallel/data/data.h"

#include <algorithm>
#include <cstdio>

namespace {

// Median over rounds of the time until the slowest rank is done.
template <class F>
double race(Comm& comm, int n_rounds, F&& f) {
    const cudaStream_t stream = device().stream;
    std::vector<double> times;
    Tensor slowest = make_tensor(nullptr, DType::f32, {1});
    cudaCheck(cudaMalloc(&slowest.data, slowest.bytes()));
    for (int round = 0; round <= n_rounds; ++round) {  // the first one warms up
        comm.barrier(stream);
        cudaCheck(cudaStreamSynchronize(stream));
        const double start = seconds_now();
        f();
        cudaCheck(cudaStreamSynchronize(stream));
        fill_constant(slowest, static_cast<float>(seconds_now() - start));
        comm.algorithm = AllReduce::library;
        comm.all_reduce(slowest, slowest, ReduceOp::max, stream);
        cudaCheck(cudaStreamSynchronize(stream));
        if (round > 0) times.push_back(to_floats(slowest)[0]);
    }
    cudaCheck(cudaFree(slowest.data));
    return median(times);
}

void race_all(Comm& world, int64_t max_n, const std::string& folder) {
    const int n_ranks = world.size, right = (world.rank + 1) % n_ranks, left = (world.rank + n_ranks - 1) % n_ranks;
    const cudaStream_t stream = device().stream;
    const bool prints = world.rank == 0;
    Tensor x = make_tensor(nullptr, DType::f32, {max_n}), y = x;
    cudaCheck(cudaMalloc(&x.data, x.bytes()));
    cudaCheck(cudaMalloc(&y.data, y.bytes()));
    fill_constant(x, 0);
    Arena scratch("communication");
    for (const AllReduce algorithm : all_reduce_algorithms())
        world.count_memory([&] {
            world.algorithm = algorithm;
            world.all_reduce(x, stream);
        });
    world.take_memory(scratch);
    scratch.reserve();
    world.take_memory(scratch);

    const double message_s = race(world, 9, [&] {
        world.group_start();
        world.send(x, right, stream);
        world.recv(y, left, stream);
        world.group_end();
    });
    const double bytes_per_s = static_cast<double>(x.bytes()) / message_s;
    Plot plot;
    plot.title = concat("all_reduce of float32 over ", n_ranks, " ranks");
    plot.x_label = "bytes";
    plot.y_label = "microseconds";
    plot.log_x = plot.log_y = true;
    for (const AllReduce algorithm : all_reduce_algorithms())
        plot.series.push_back({all_reduce_name(algorithm), {}, {}, true, true});
    plot.series.push_back({concat("2(n-1)/n N at ", human_bytes(bytes_per_s), "/s"), {}, {}});

    if (prints) {
        std::printf("\n%d ranks, microseconds; a message: %s/s and rank\n%12s", n_ranks,
                    human_bytes(bytes_per_s).c_str(), "bytes");
        for (const AllReduce algorithm : all_reduce_algorithms()) std::printf("%12s", all_reduce_name(algorithm));
        std::printf("%12s\n", "limit");
    }
    for (int64_t n = std::min<int64_t>(1024, max_n); n <= max_n; n *= 4) {
        const Tensor part = x.slice(0, n);
        const double bytes = static_cast<double>(part.bytes());
        if (prints) std::printf("%12s", human_bytes(bytes).c_str());
        for (size_t i = 0; i < plot.series.size(); ++i) {
            double s = 2.0 * (n_ranks - 1) / n_ranks * bytes / bytes_per_s;
            if (i < all_reduce_algorithms().size())
                s = race(world, n <= 65536 ? 15 : 5, [&] {
                    world.algorithm = all_reduce_algorithms()[i];
                    world.all_reduce(part, stream);
                });
            plot.series[i].x.push_back(bytes);
            plot.series[i].y.push_back(1e6 * s);
            if (prints) std::printf("%12.0f", 1e6 * s);
        }
        if (prints) std::printf("\n");
    }
    cudaCheck(cudaFree(x.data));
    cudaCheck(cudaFree(y.data));
    if (!prints) return;
    const std::string path = concat(folder, "/all_reduce_", n_ranks, ".png");
    write_png(path, plot);
    std::printf("picture  %s\n", path.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    int64_t n_ranks = 0, max_n = 1 << 20;
    std::string folder = "runs/all_reduce";
    CommandLine line{"all_reduce: times the all-reduce algorithms for many sizes, and draws them"};
    Heading h{line, "Options"};
    h.count("--ranks", n_ranks, "threads that are ranks; without it 2, then 4, then 8", 2);
    h.count("--max", max_n, "numbers of the largest message");
    h.option("--out", folder, "the folder of the pictures");
    return run_program("all_reduce", line, argc, argv, [&] {
        std::vector<int> ranks{2, 4, 8};
        if (n_ranks > 0) ranks = {static_cast<int>(n_ranks)};
        if (started_by_mpirun()) ranks = {0};
        make_folder(folder);
        for (const int n : ranks) {
            RankOptions options;
            options.ranks = n;
            options.ranks_per_node = (n + 1) / 2;  // two machines, for two-level
            run_ranks(options, [&](Comm& world) {
                check(world.size > 1, "all_reduce needs at least two ranks: give --ranks 2 or more");
                race_all(world, max_n, folder);
            });
        }
    });
}
