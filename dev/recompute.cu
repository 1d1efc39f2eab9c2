// dev/recompute.cu: what recomputation of activations saves, and what it costs: the square-root law, measured.
//
//   run      make dev && build/cpu/dev/recompute recompute.png                   (--help lists the flags)
//   debug    make DEBUG=1 DEVICE=cpu dev &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/recompute out.png --layers 4
//
// Keeping the input of every n-th block of L, and all activations of n blocks at a time, takes (arXiv:1604.06174)
//
//     fixed + (L/n) s + n b bytes          s: a block's input;  b: all that a block keeps, its input among it
//
// which has its minimum at n = sqrt(L s / b): there it is fixed + 2 sqrt(L s b), and grows like the root of L. The
// paper counts in layers that keep one thing each, s = b; in a transformer's block b is about 16 times s, so the best n
// is smaller than sqrt(L). The cost is a second forward of all blocks but the last n.
//
// For each setting the program counts the bytes with an arena, allocates them, and asks the device how much was
// allocated: both must agree to the byte, and, where n divides L, with the law. The gradients must be those of
// --recompute none to the bit. Times are of a forward and a backward, the minimum of several rounds, each of which runs
// every setting: other programs on the machine can only make a time longer.
#include "dev/program.h"
#include "io/io.h"
#include "llm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

namespace {

struct Way {
    std::string name;
    Recompute recompute;
    std::unique_ptr<Arena> arena;
    Activations acts;
    Workspace workspace;
    size_t planned = 0, taken = 0;
    std::vector<double> seconds;
    double least_seconds() const { return *std::min_element(seconds.begin(), seconds.end()); }
};

struct Sizes {
    int64_t layers = 36, width = 128, seq = 128, batch = 4, steps = 5;
};

Config config_of(const Sizes& sizes, int64_t layers) {
    Config c;
    c.L = layers, c.C = sizes.width, c.D = 32, c.H = c.K = sizes.width / 32, c.F = round_up(sizes.width * 8 / 3, 16);
    c.T_max = sizes.seq;
    return c;
}

// Bytes of the activations of a model with this many layers: nothing is allocated.
size_t planned_bytes(const Sizes& sizes, int64_t layers, const Recompute& recompute) {
    Arena weights("weights"), grads("gradients"), masters("master weights"), arena("activations");
    const Model model = build_model(config_of(sizes, layers), {}, sizes.seq, weights, grads, masters);
    take_activations(model, sizes.batch, sizes.seq, recompute, arena);
    take_workspace(model, sizes.batch, sizes.seq, true, arena);
    return arena.bytes();
}

// The law's three numbers, from models of one and two layers.
struct Law {
    double fixed, s, b, L;
    explicit Law(const Sizes& sizes) : L(static_cast<double>(sizes.layers)) {
        const auto bytes = [&](int64_t layers, int64_t every) {
            return static_cast<double>(planned_bytes(sizes, layers, {.every = every}));
        };
        const double one = bytes(1, 1);
        s = bytes(2, 1) - one;  // one more segment
        b = bytes(2, 2) - one;  // one more block in the segment
        fixed = one - s - b;
    }
    double bytes(double n) const { return fixed + L / n * s + n * b; }
    double best() const { return std::sqrt(L * s / b); }
};

void check_law(const Law& law, const Way& way, int64_t n) {
    const double expected = law.bytes(static_cast<double>(n));
    check(static_cast<double>(way.planned) == expected, "--recompute ", way.name, " takes ", way.planned,
          " bytes, the formula says ", expected);
}

// One forward and backward; its seconds.
double train(const Model& model, Activations& acts, Workspace workspace) {
    const cudaStream_t stream = device().stream;
    const double start = seconds_now();
    workspace.accumulate = false;
    forward(model, acts, workspace, stream);
    loss_backward(model, acts, 1.0f / static_cast<float>(acts.B * acts.T), stream);
    backward(model, acts, workspace, stream);
    cudaCheck(cudaStreamSynchronize(stream));
    return seconds_now() - start;
}

void take(Way& way, const Model& model, const Sizes& sizes) {
    way.arena = std::make_unique<Arena>("activations");
    take_activations(model, sizes.batch, sizes.seq, way.recompute, *way.arena);
    take_workspace(model, sizes.batch, sizes.seq, true, *way.arena);
    way.planned = way.arena->bytes();
    const size_t before = device_memory().free;
    way.arena->reserve();
    way.taken = before - device_memory().free;
    // A GPU hands out memory in pieces of 2 MiB, of which the arena's last, or its first, may be shared with others.
    const size_t difference = std::max(way.taken, way.planned) - std::min(way.taken, way.planned);
    check(difference <= (device().is_cpu ? 0 : 2 << 20), "--recompute ", way.name, ": ", way.planned,
          " bytes were planned, ", way.taken, " taken");
    way.acts = take_activations(model, sizes.batch, sizes.seq, way.recompute, *way.arena);
    way.workspace = take_workspace(model, sizes.batch, sizes.seq, true, *way.arena);
    std::vector<int32_t> tokens(static_cast<size_t>(sizes.batch * sizes.seq));
    for (size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = static_cast<int32_t>(uniform_below(1, 1, i, static_cast<uint64_t>(model.config.V)));
    copy_to_device(way.acts.tokens, tokens.data());
    copy_to_device(way.acts.targets, tokens.data());
}

void draw(const std::string& path, const std::vector<Way>& ways, const Law& law) {
    const Way& none = ways.front();
    const double all = static_cast<double>(none.planned), ms = none.least_seconds();
    Series curve{"memory by the law, fixed + (L/N) s + N b", {}, {}};
    Series time{"time of forward and backward", {}, {}, true, true, 2};
    std::vector<Series> memory;  // points without a line between them: a series each
    for (const Way& way : ways) {
        if (way.recompute.every == 0) continue;
        const double n = static_cast<double>(way.recompute.every);
        memory.push_back(
            {memory.empty() ? "memory taken" : "", {n}, {static_cast<double>(way.taken) / all}, true, true, 1});
        time.x.push_back(n), time.y.push_back(way.least_seconds() / ms);
    }
    for (int i = 0; i <= 200; ++i) {
        curve.x.push_back(std::pow(law.L, i / 200.0));
        curve.y.push_back(law.bytes(curve.x.back()) / all);
    }
    Plot plot{concat("--recompute N, ", ways.back().recompute.every, " layers: memory and time relative to none"),
              "N",
              "relative to none",
              {curve}};
    plot.series.insert(plot.series.end(), memory.begin(), memory.end());
    plot.series.push_back(time);
    plot.log_x = true;
    write_png(path, plot);
}

void print(const std::vector<Way>& ways, const Law& law, const Sizes& sizes) {
    const Way& none = ways.front();
    std::printf("%lld layers, width %lld, batch %lld x %lld, f32, on %s; least of %lld rounds\n",
                static_cast<long long>(sizes.layers), static_cast<long long>(sizes.width),
                static_cast<long long>(sizes.batch), static_cast<long long>(sizes.seq), device().name.c_str(),
                static_cast<long long>(sizes.steps));
    std::printf("fixed %.0f bytes, a segment's input s = %.0f, a block b = %.0f = %.1f s: least at N = %.1f\n\n",
                law.fixed, law.s, law.b, law.b / law.s, law.best());
    std::printf("--recompute   bytes planned     bytes taken   of none   forward and backward   of none\n");
    for (const Way& way : ways)
        std::printf("%-11s %15zu %15zu   %7.3f   %17.1f ms   %7.2f\n", way.name.c_str(), way.planned, way.taken,
                    static_cast<double>(way.taken) / static_cast<double>(none.taken), 1e3 * way.least_seconds(),
                    way.least_seconds() / none.least_seconds());
}

void run(const std::string& path, const Sizes& sizes) {
    const Config config = config_of(sizes, sizes.layers);
    Arena weights("weights"), grads("gradients"), masters("master weights");
    Model model = build_model(config, {}, sizes.seq, weights, grads, masters);
    weights.reserve(), grads.reserve();
    model = build_model(config, {}, sizes.seq, weights, grads, masters);
    init_weights(model, 1);

    std::vector<Way> ways;
    for (const std::string name : {"none", "selective"}) ways.emplace_back().name = name;
    for (int64_t n = 1; n <= sizes.layers; ++n)
        if (sizes.layers % n == 0) ways.emplace_back().name = std::to_string(n);
    const Law law(sizes);
    std::vector<float> expected;
    for (Way& way : ways) {
        way.recompute = parse_recompute(way.name);
        take(way, model, sizes);
        if (way.recompute.every > 0) check_law(law, way, way.recompute.every);
        train(model, way.acts, way.workspace);  // warms up
        const std::vector<float> gradients = to_floats(model.grads);
        if (way.name == "none") expected = gradients;
        check(gradients == expected, "--recompute ", way.name, " gives gradients that differ from those of none");
    }
    for (int64_t step = 0; step < sizes.steps; ++step)
        // Each round begins with another setting, so that a periodic disturbance does not always slow down the same
        // one.
        for (size_t i = 0; i < ways.size(); ++i) {
            Way& way = ways[(i + static_cast<size_t>(step)) % ways.size()];
            way.seconds.push_back(train(model, way.acts, way.workspace));
        }
    print(ways, law, sizes);
    draw(path, ways, law);
    std::printf("%s shows them\n", path.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    Sizes sizes;
    std::vector<std::string> paths;
    CommandLine line{"recompute: measures what recomputation of activations saves, and what it costs"};
    line.words("OUT.png", paths, 1);
    Heading h{line, "Options"};
    h.count("--layers", sizes.layers, "blocks");
    h.count("--width", sizes.width, "channels: a multiple of 32");
    h.count("--seq", sizes.seq, "tokens per sequence");
    h.count("--batch", sizes.batch, "sequences");
    h.count("--steps", sizes.steps, "times that each setting is measured");
    return run_program("recompute", line, argc, argv, [&] {
        check(!paths.empty(), "give a picture to write: recompute recompute.png");
        const std::string folder = std::filesystem::absolute(paths[0]).parent_path().string();
        check(is_folder(folder), paths[0], ": there is no folder ", folder);
        { const AtomicFile tried(paths[0]); }  // before minutes of measuring
        check(sizes.width % 32 == 0, "--width ", sizes.width, ": heads have 32 columns, give a multiple of 32");
        run(paths[0], sizes);
    });
}
