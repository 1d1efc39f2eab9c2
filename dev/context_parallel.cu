// dev/context_parallel.cu: where the tokens of a sequence are with context parallelism, who sends what, and what both
// modes take.
//
//   run      make dev && build/cpu/dev/context_parallel context.png              (--help lists the flags)
//   debug    make DEBUG=1 DEVICE=cpu dev &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/context_parallel out.png --seq 64
//
// The picture is drawn from ZigZag (parallel/context/zigzag.cu), which the program itself works with. Printed are the
// pairs of queries and keys that each rank has in each step of the ring, and the time and bytes of a causal attention,
// forward and backward, in both modes beside one rank's. A time is the least of several rounds, each of which runs all
// three. On the CPU device the ranks share the cores that the one rank has.
#include "dev/program.h"
#include "io/io.h"
#include "parallel/context/context.h"

#include <algorithm>
#include <cstdio>
#include <mutex>

namespace {

struct Sizes {
    int64_t ranks = 4, seq = 2048, heads = 8, key_heads = 8, width = 32, rounds = 3;
    int n() const { return static_cast<int>(ranks); }
};

// ---------------------------------------------------------------------------------------------------------------------
// The picture

constexpr Canvas::Color kInk{40, 40, 40}, kPale{150, 150, 150}, kWhite{255, 255, 255};
constexpr double kText = 9;

struct Drawing {
    Canvas& canvas;
    const ZigZag& zigzag;
    int n = zigzag.n;

    void title(double x, double y, const std::string& text) const { canvas.text({x, y}, text, 10, kInk, {}, true); }
    void box(double left, double top, double right, double bottom, Canvas::Color color, const std::string& text) const {
        canvas.fill(left, top, right, bottom, kWhite);
        canvas.fill(left + 1, top + 1, right - 1, bottom - 1, color);
        check(Canvas::text_width(text, kText) < right - left, "the picture has no room for ", text);
        canvas.text({(left + right) / 2, (top + bottom) / 2 + kText / 2}, text, kText, kInk, Canvas::Align::center);
    }
    void arrow(Canvas::Point from, Canvas::Point to, Canvas::Color color) const {
        canvas.line({from, to}, 1.5, color, 0.8);
        const double dx = to.x - from.x, dy = to.y - from.y, length = std::hypot(dx, dy);
        for (const double side : {-1.0, 1.0})
            canvas.line({to, {to.x - (7 * dx + side * 3 * dy) / length, to.y - (7 * dy - side * 3 * dx) / length}}, 1.5,
                        color, 0.8);
    }
    // Which rank has chunk i: 0 ... 2 n - 1.
    int owner(int chunk) const {
        for (int r = 0; r < n; ++r)
            for (const int64_t first : zigzag.of_rank(r).first)
                if (first == chunk * zigzag.chunk()) return r;
        return -1;
    }

    // Queries down, keys to the right: the rank that computes each pair of chunks, and in which step of the ring.
    void pairs(double left, double top, double side) const {
        const double cell = side / (2 * n);
        title(left, top - 36, "causal pairs of chunks: the rank (color) and the step of the ring (number)");
        for (int q = 0; q < 2 * n; ++q) {
            const double y = top + q * cell;
            box(left - 64, y, left - 6, y + cell, color_of(owner(q)), concat("rank ", owner(q)));
            box(left + q * cell, top - 26, left + (q + 1) * cell, top - 6, color_of(owner(q)), concat(owner(q)));
            for (int k = 0; k < 2 * n; ++k) {
                const double x = left + k * cell;
                if (k > q) {
                    canvas.fill(x + 1, y + 1, x + cell - 1, y + cell - 1, {242, 242, 242});
                    continue;
                }
                int step = 0;
                while (zigzag.keys_in_step(owner(q), step) != owner(k)) ++step;
                box(x, y, x + cell, y + cell, color_of(owner(q)), k == q ? "" : concat(step));
                if (k < q) continue;
                for (int i = 1; i < static_cast<int>(cell) - 1; ++i)  // of the diagonal half
                    canvas.fill(x + i, y + 1, x + i + 1, y + i, {242, 242, 242});
                canvas.text({x + cell / 3, y + cell * 0.8}, concat(step), kText, kInk, Canvas::Align::center);
            }
        }
        canvas.text({left, top + side + 18}, "keys ->   queries: downwards, each row of chunks belongs to one rank",
                    kText, kPale);
    }

    // A row a step, a column a rank: whose keys it has, and where they go next.
    void ring(double left, double top, double width, double height) const {
        const double column = width / n, row = height / n, box_width = column - 40, box_height = 34;
        title(left, top - 36, "ring: keys and values (color) travel, queries stay");
        const auto middle = [&](int r, int step) {
            return Canvas::Point{left + r * column + column / 2, top + step * row + box_height / 2};
        };
        for (int r = 0; r < n; ++r)
            canvas.text({middle(r, 0).x, top - 10}, concat("rank ", r), kText, kInk, Canvas::Align::center);
        for (int step = 0; step < n; ++step)
            for (int r = 0; r < n; ++r) {
                const int keys = zigzag.keys_in_step(r, step);
                const Canvas::Point at = middle(r, step);
                if (step + 1 < n) {
                    const int to = (r + 1) % n;
                    check(zigzag.keys_in_step(to, step + 1) == keys,
                          "the ring does not send keys to the ranks that need them");
                    const Canvas::Point end = middle(to, step + 1);
                    arrow({at.x, at.y + box_height / 2}, {end.x, end.y - box_height / 2 - 2}, color_of(keys));
                }
                box(at.x - box_width / 2, at.y - box_height / 2, at.x + box_width / 2, at.y, color_of(keys),
                    concat("K", keys, ", V", keys));
                canvas.text({at.x, at.y + 14}, concat(zigzag.causal_pairs(r, keys), " pairs"), kText, kPale,
                            Canvas::Align::center);
            }
        for (int step = 0; step < n; ++step)
            canvas.text({left - 4, middle(0, step).y}, concat("step ", step), kText, kPale, Canvas::Align::right);
    }

    // Tokens down, heads to the right, before and after: the rank that has each of them.
    void ulysses(double left, double top, double side) const {
        const double cell = side / n, right = left + side + 210;
        title(left, top - 36, "ulysses: tokens are exchanged for heads, and back");
        for (int i = 0; i < n; ++i)
            for (int j = 0; j < n; ++j) {
                box(left + j * cell, top + i * cell, left + (j + 1) * cell, top + (i + 1) * cell, color_of(i),
                    concat(i, " to ", j));
                box(right + j * cell, top + i * cell, right + (j + 1) * cell, top + (i + 1) * cell, color_of(j),
                    concat(j));
            }
        for (int i = 0; i < n; ++i) {
            canvas.text({left - 6, top + (i + 0.6) * cell}, concat("tokens of ", i), kText, kPale,
                        Canvas::Align::right);
            for (const double x : {left, right})
                canvas.text({x + (i + 0.5) * cell, top - 10}, concat("heads ", i), kText, kPale, Canvas::Align::center);
        }
        arrow({left + side + 12, top + side * 0.4}, {right - 12, top + side * 0.4}, kInk);
        arrow({right - 12, top + side * 0.6}, {left + side + 12, top + side * 0.6}, kInk);
        canvas.text({(left + side + right) / 2, top + side * 0.4 - 10}, "queries, keys, values", kText, kInk,
                    Canvas::Align::center);
        canvas.text({(left + side + right) / 2, top + side * 0.6 + 20}, "outputs", kText, kInk, Canvas::Align::center);
    }
};

void draw(const std::string& path, const ZigZag& zigzag) {
    const int more = std::max(0, zigzag.n - 4);  // ranks than fit at the smallest size
    Canvas canvas(1080 + 105 * more, 850 + 52 * more);
    const Drawing drawing{canvas, zigzag};
    canvas.text({12, 24},
                concat(zigzag.T, " tokens on ", zigzag.n, " ranks: ", 2 * zigzag.n, " chunks of ", zigzag.chunk(),
                       ", two a rank"),
                10, kInk);
    drawing.pairs(90, 110, 400);
    drawing.ring(580, 110, 420 + 105 * more, 400);
    drawing.ulysses(170, 610, 210 + 52 * more);
    canvas.save(path);
}

// ---------------------------------------------------------------------------------------------------------------------
// What it takes

struct Cost {
    double seconds = 0;
    int64_t sent = 0;  // bytes, all ranks
};

// mode: nullptr for one rank without messages.
Cost run(const Sizes& s, const ContextMode* mode) {
    RankOptions options;
    options.ranks = mode ? s.n() : 1;
    options.quiet = true;
    Cost cost;
    std::mutex mutex;
    run_ranks(options, [&](Comm& world) {
        const cudaStream_t stream = device().stream;
        const ZigZag zigzag = make_zigzag(s.seq, world.size);
        const int64_t T = zigzag.rows(), columns = (s.heads + 2 * s.key_heads) * s.width, outs = s.heads * s.width;
        Arena arena("attention");
        const auto attention = mode ? make_context_parallel(*mode, world, zigzag) : nullptr;
        Tensor qkv, dqkv, out, dout, lse, scratch;
        for (int pass = 0; pass < 2; ++pass) {
            for (Tensor* rows : {&qkv, &dqkv}) *rows = arena.take("rows", DType::f32, {1, T, columns});
            for (Tensor* rows : {&out, &dout}) *rows = arena.take("rows", DType::f32, {1, T, outs});
            lse = arena.take("lse", DType::f32, {1, s.heads, T});
            scratch = arena.take("scratch", DType::f32,
                                 {flash_attention_backward_scratch_n(1, T, s.heads, s.key_heads, s.width, s.width,
                                                                     DType::f32, FlashTier::automatic)});
            if (attention) attention->take_memory({1, s.heads, s.key_heads, s.width, s.width, DType::f32}, arena);
            if (pass == 0) arena.reserve();
        }
        copy_to_device(qkv, normal_values(qkv.n(), 1.0, 1, 1).data());
        copy_to_device(dout, normal_values(dout.n(), 1.0, 1, 2).data());
        const QkvHeads heads = qkv_heads(qkv, s.heads, s.key_heads), d = qkv_heads(dqkv, s.heads, s.key_heads);
        const HeadColumns y{out, s.heads, s.width}, dy{dout, s.heads, s.width};
        const FlashAttentionOptions how{.scale = 1 / std::sqrt(static_cast<float>(s.width))};
        world.barrier(stream);
        cudaCheck(cudaStreamSynchronize(stream));
        const int64_t before = world.traffic().sent;
        const double start = seconds_now();
        if (attention) {
            attention->forward(y, lse, heads.q, heads.k, heads.v, how, stream);
            attention->backward(d.q, d.k, d.v, dy, y, lse, heads.q, heads.k, heads.v, how, scratch, stream);
        } else {
            flash_attention_forward(y, lse, heads.q, heads.k, heads.v, how, stream);
            flash_attention_backward(d.q, d.k, d.v, dy, y, lse, heads.q, heads.k, heads.v, how, scratch, stream);
        }
        cudaCheck(cudaStreamSynchronize(stream));
        const std::lock_guard lock(mutex);
        cost.seconds = std::max(cost.seconds, seconds_now() - start);
        cost.sent += world.traffic().sent - before;
    });
    return cost;
}

void print_balance(const ZigZag& zigzag) {
    const double all = static_cast<double>(zigzag.T) * static_cast<double>(zigzag.T + 1) / 2;
    std::printf("causal pairs     in each step of the ring                          share\n");
    for (int r = 0; r < zigzag.n; ++r) {
        int64_t sum = 0;
        std::string steps;
        for (int step = 0; step < zigzag.n; ++step) {
            const int64_t pairs = zigzag.causal_pairs(r, zigzag.keys_in_step(r, step));
            sum += pairs, steps += concat(" ", pairs);
        }
        std::printf("rank %-4d       %-50s %.4f\n", r, steps.c_str(), static_cast<double>(sum) / all);
    }
}

void print_costs(const Sizes& s) {
    const ContextMode modes[] = {ContextMode::ring, ContextMode::ulysses};
    Cost costs[3];
    for (int64_t round = 0; round < s.rounds; ++round)
        for (int i = 0; i < 3; ++i) {
            Cost cost = run(s, i == 0 ? nullptr : &modes[i - 1]);
            if (round > 0) cost.seconds = std::min(cost.seconds, costs[i].seconds);
            costs[i] = cost;
        }
    std::printf("\nforward and backward        time     of one rank     sent by all\n");
    for (int i = 0; i < 3; ++i)
        std::printf("%-20s %11s %15.2f %15s\n",
                    i == 0 ? "one rank" : concat(s.ranks, " ranks, ", context_mode_name(modes[i - 1])).c_str(),
                    human_seconds(costs[i].seconds).c_str(), costs[i].seconds / costs[0].seconds,
                    human_bytes(static_cast<double>(costs[i].sent)).c_str());
}

void check_sizes(const Sizes& sizes) {
    check(sizes.ranks <= 8, "--ranks ", sizes.ranks, ": at most 8 are drawn");
    const int64_t K = sizes.key_heads;
    check(sizes.heads % sizes.ranks == 0 && sizes.heads % K == 0 && (K % sizes.ranks == 0 || sizes.ranks % K == 0),
          "--heads ", sizes.heads, " and --key-heads ", K, " cannot be divided among ", sizes.ranks, " ranks");
}

}  // namespace

int main(int argc, char** argv) {
    Sizes sizes;
    std::vector<std::string> paths;
    CommandLine line{"context_parallel: draws where the tokens of a sequence are, and measures an attention"};
    line.words("OUT.png", paths, 1);
    Heading h{line, "Options"};
    h.count("--ranks", sizes.ranks, "ranks, threads of this process");
    h.count("--seq", sizes.seq, "tokens of the sequence");
    h.count("--heads", sizes.heads, "query heads");
    h.count("--key-heads", sizes.key_heads, "heads of keys and values");
    h.count("--width", sizes.width, "numbers of a head");
    h.count("--rounds", sizes.rounds, "times that each mode is measured");
    return run_program("context_parallel", line, argc, argv, [&] {
        check(!paths.empty(), "give a picture to write: context_parallel context.png");
        { const AtomicFile tried(paths[0]); }  // before all is measured
        check_sizes(sizes);
        const ZigZag zigzag = make_zigzag(sizes.seq, sizes.n());
        print_balance(zigzag);
        print_costs(sizes);
        draw(paths[0], zigzag);
    });
}
