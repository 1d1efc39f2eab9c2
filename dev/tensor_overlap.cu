// dev/tensor_overlap.cu: the messages of 1D tensor parallelism, from one all-reduce to pieces that travel beside
// products: the two products of a feed-forward, y = B (A x), on n ranks.
//
//   run      make dev && build/cpu/dev/tensor_overlap                            (--help lists the flags)
//   debug    make DEBUG=1 DEVICE=cpu dev &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/tensor_overlap --rows 32
//
//     1  all-reduce          x is whole on each rank; after the second product the parts of y are added everywhere
//     2  gather, scatter     x and y are divided by rows (--sp): gather, multiply; multiply, reduce-scatter. As many
//                            bytes, and 1/n of the memory between
//     3  ring                the same bytes in n - 1 messages each (--tp-overlap): a piece of the rows is multiplied
//                            while the next one travels
//
// Steps 1 and 2 wait for all bytes before they go on; in step 3 a rank waits for a message only where its product takes
// less time. Every step is checked against float64. On the CPU device the ranks share the cores, and nothing is hidden:
// there step 3 shows what the smaller products cost. A time is the least of several rounds, of the slowest rank.
#include "dev/program.h"
#include "io/io.h"
#include "layers/layers.h"
#include "parallel/tensor/tensor.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>

namespace {

struct Sizes {
    int64_t ranks = 4, rows = 512, width = 256, hidden = 1024, rounds = 5;
    int n() const { return static_cast<int>(ranks); }
};
const char* const kSteps[] = {"all-reduce", "gather, scatter", "ring"};

struct Result {
    double seconds = 0;
    int64_t sent = 0;  // bytes of a rank
    double error = 0;  // largest, of the rows that are checked, as a part of the largest y
};

// Rows 0 and rows - 1 of y, in float64.
std::vector<std::vector<double>> expected(const Sizes& s, const std::vector<float>& x, const std::vector<float>& a,
                                          const std::vector<float>& b) {
    const size_t C = static_cast<size_t>(s.width), F = static_cast<size_t>(s.hidden);
    std::vector<std::vector<double>> rows;
    for (const size_t row : {size_t{0}, static_cast<size_t>(s.rows) - 1}) {
        std::vector<double> h(F), y(C);
        for (size_t f = 0; f < F; ++f)
            for (size_t c = 0; c < C; ++c) h[f] += static_cast<double>(a[f * C + c]) * x[row * C + c];
        for (size_t c = 0; c < C; ++c)
            for (size_t f = 0; f < F; ++f) y[c] += b[c * F + f] * h[f];
        rows.push_back(y);
    }
    return rows;
}

double error_of(const std::vector<float>& y, const std::vector<double>& row) {
    double largest = 0, error = 0;
    for (size_t c = 0; c < row.size(); ++c) {
        largest = std::max(largest, std::abs(row[c]));
        error = std::max(error, std::abs(y[c] - row[c]));
    }
    return error / largest;
}

Result run(const Sizes& s, int step) {
    const std::vector<float> x = normal_values(s.rows * s.width, 1.0, 1, 1),
                             a = normal_values(s.hidden * s.width, 0.1, 1, 2),
                             b = normal_values(s.width * s.hidden, 0.1, 1, 3);
    const std::vector<std::vector<double>> y = expected(s, x, a, b);
    RankOptions options;
    options.ranks = s.n();
    options.quiet = true;
    Result result;
    std::mutex mutex;
    run_ranks(options, [&](Comm& world) {
        const cudaStream_t stream = device().stream;
        const int64_t F = s.hidden / s.ranks, N = step == 0 ? s.rows : s.rows / s.ranks, r = world.rank;
        Arena arena("feed-forward");
        OneD one_d(world);
        Tensor inp, out, h, A, B;
        for (int pass = 0; pass < 2; ++pass) {
            inp = arena.take("x", DType::f32, {N, s.width}), out = arena.take("y", DType::f32, {N, s.width});
            h = arena.take("h", DType::f32, {s.rows, F});
            A = arena.take("A", DType::f32, {F, s.width}), B = arena.take("B", DType::f32, {s.width, F});
            one_d.take_memory(s.rows, s.width, DType::f32, step > 0, step == 2, arena);
            world.take_memory(arena);
            if (pass == 0) arena.reserve();
        }
        copy_to_device(inp, x.data() + (step == 0 ? 0 : r * N * s.width));
        copy_to_device(A, a.data() + r * F * s.width);
        std::vector<float> columns;
        for (int64_t c = 0; c < s.width; ++c)
            columns.insert(columns.end(), b.begin() + c * s.hidden + r * F, b.begin() + c * s.hidden + (r + 1) * F);
        copy_to_device(B, columns.data());
        world.barrier(stream);
        cudaCheck(cudaStreamSynchronize(stream));
        const int64_t before = world.traffic().sent;
        const double start = seconds_now();
        const auto by = [&](const Tensor& weight) {
            return [&](Tensor to, Tensor from) { linear_forward(to, from, weight, {}, stream); };
        };
        one_d.enter(h, inp, step > 0, by(A), stream);
        one_d.leave(out, h, step > 0, by(B), stream);
        cudaCheck(cudaStreamSynchronize(stream));
        const std::vector<float> values = to_floats(out);
        const std::lock_guard lock(mutex);
        result.seconds = std::max(result.seconds, seconds_now() - start);
        result.sent = world.traffic().sent - before;
        if (r == 0) result.error = std::max(result.error, error_of(values, y[0]));
        if (r == s.ranks - 1)
            result.error = std::max(result.error, error_of({values.end() - s.width, values.end()}, y[1]));
    });
    return result;
}

void climb(const Sizes& s) {
    Result best[3];
    for (int64_t round = 0; round < s.rounds; ++round)
        for (int step = 0; step < 3; ++step) {
            Result result = run(s, step);
            check(result.error < 1e-5, kSteps[step], ": off by ", result.error, " of the largest number");
            if (round > 0) result.seconds = std::min(result.seconds, best[step].seconds);
            best[step] = result;
        }
    std::printf("| step | version | ms | of step 1 | a rank sends | error |\n| --- | --- | --- | --- | --- | --- |\n");
    for (int step = 0; step < 3; ++step)
        std::printf("| %d | %s | %.2f | %.2f | %s | %.1e |\n", step + 1, kSteps[step], 1e3 * best[step].seconds,
                    best[step].seconds / best[0].seconds, human_bytes(static_cast<double>(best[step].sent)).c_str(),
                    best[step].error);
}

void check_sizes(const Sizes& sizes) {
    check(sizes.rows % sizes.ranks == 0 && sizes.hidden % sizes.ranks == 0, "--rows ", sizes.rows, " and --hidden ",
          sizes.hidden, " cannot be divided among ", sizes.ranks, " ranks");
    check(sizes.rows % (8 * sizes.ranks) == 0, "--rows ", sizes.rows, ": a rank has ", sizes.rows / sizes.ranks,
          " of them, and --tp-overlap needs a multiple of 8: use a multiple of ", 8 * sizes.ranks);
}

}  // namespace

int main(int argc, char** argv) {
    Sizes sizes;
    CommandLine line{"tensor_overlap: times the messages of two products, from one all-reduce to pieces that overlap"};
    Heading h{line, "Options"};
    h.count("--ranks", sizes.ranks, "ranks, threads of this process", 2);
    h.count("--rows", sizes.rows, "rows of x and y");
    h.count("--width", sizes.width, "columns of x and y");
    h.count("--hidden", sizes.hidden, "columns between the two products");
    h.count("--rounds", sizes.rounds, "times that each step is measured");
    return run_program("tensor_overlap", line, argc, argv, [&] {
        check_sizes(sizes);
        climb(sizes);
    });
}
