// test/test_tensor_geometries.cu: 2D, 2.5D and 3D tensor parallelism: the layouts, and whole runs beside those of one
// process. (test_tensor_layers.cu has the layers one by one, test_composition.cu what goes together.)
#include "parallel/tensor/tensor.h"
#include "run_models.h"
#include "tensor_runs.h"

namespace {

struct Mesh3 {
    TensorMode mode;
    int size, depth;
};
const Mesh3 kMeshes[] = {
    {TensorMode::one_d, 5, 0},       {TensorMode::two_d, 4, 0},       {TensorMode::two_d, 9, 0},
    {TensorMode::two_half_d, 8, 0},  {TensorMode::two_half_d, 18, 0}, {TensorMode::two_half_d, 12, 3},
    {TensorMode::two_half_d, 27, 0}, {TensorMode::three_d, 8, 0},     {TensorMode::three_d, 27, 0}};

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Layouts

TEST_CASE("layouts: all ranks together have each block, and equally many have each", "[tensor_parallel]") {
    for (const Mesh3& mesh : kMeshes) {
        INFO(tensor_mode_name(mesh.mode) << ", " << mesh.size << " ranks");
        const auto layout = [&](int r) { return tensor_layout(mesh.mode, r, mesh.size, false, mesh.depth); };
        const TensorLayout any = layout(0);
        // Rows and columns of the stream, of what is inside, and of the two kinds of weights.
        const std::pair<Axes, Axes> matrices[] = {{any.stream_rows, any.stream_columns},
                                                  {any.inner_rows, any.heads},
                                                  {any.heads, any.enter_columns},
                                                  {any.stream_columns, any.leave_columns}};
        for (const auto& [rows, columns] : matrices) {
            std::map<std::pair<int64_t, int64_t>, std::vector<int>> owners;
            for (int r = 0; r < mesh.size; ++r)
                owners[{layout(r).part(rows).index, layout(r).part(columns).index}].push_back(r);
            CHECK(std::ssize(owners) == any.part(rows).of * any.part(columns).of);
            // Those with the same block are the ranks along the axes that do not divide it.
            const AxisSet copies =
                any.all() & static_cast<AxisSet>(~(TensorLayout::set_of(rows) | TensorLayout::set_of(columns)));
            for (const auto& [block, ranks] : owners)
                for (const int r : ranks) CHECK(layout(r).members(copies, 1) == ranks);
        }
        // 3D and 2D have nothing twice; a weight of 2.5D is there once for each grid.
        if (mesh.mode == TensorMode::two_d || mesh.mode == TensorMode::three_d)
            for (const auto& [rows, columns] : matrices) CHECK(any.part(rows).of * any.part(columns).of == mesh.size);
        // A product's output has the parts that the next one's input needs.
        CHECK(any.part(any.stream_columns).of == any.part(any.heads).of * (mesh.mode == TensorMode::one_d ? 0 : 1) +
                                                     (mesh.mode == TensorMode::one_d ? 1 : 0));
    }
}

TEST_CASE("layouts: ranks with the same key heads", "[tensor_parallel]") {
    // 8 ranks, 2 key heads: four ranks in a row have the same.
    CHECK(tensor_layout(TensorMode::one_d, 5, 8).members(kSameKeys, 4) == std::vector<int>{4, 5, 6, 7});
    // A grid of 2 x 2 with one key head: those of a row of the grid; with the ranks that have other rows, all.
    CHECK(tensor_layout(TensorMode::two_d, 1, 4).members(kSameKeys, 2) == std::vector<int>{0, 1});
    CHECK(tensor_layout(TensorMode::two_d, 1, 4).members(kSameKeys | 0b010, 2) == std::vector<int>{0, 1, 2, 3});
    CHECK(tensor_layout(TensorMode::three_d, 6, 8).members(kSameKeys, 2) == std::vector<int>{4, 6});
}

TEST_CASE("layouts: the depth of 2.5D divides the ranks into squares", "[tensor_parallel]") {
    const auto sizes = [](int size, int depth) {
        return tensor_layout(TensorMode::two_half_d, 0, size, false, depth).sizes;
    };
    CHECK(sizes(8, 0) == std::array<int, 3>{2, 2, 2});
    CHECK(sizes(50, 0) == std::array<int, 3>{2, 5, 5});
    CHECK(sizes(243, 0) == std::array<int, 3>{3, 9, 9});  // not 2: 121 is a square, but not a half of 243
    CHECK(sizes(27, 0) == std::array<int, 3>{3, 3, 3});
    CHECK(sizes(48, 3) == std::array<int, 3>{3, 4, 4});
    CHECK(sizes(16, 1) == std::array<int, 3>{1, 4, 4});
    CHECK_THROWS_WITH(sizes(16, 0), ContainsSubstring("with a depth of at least 2"));
    CHECK_THROWS_WITH(sizes(13, 3), ContainsSubstring("--tp-depth 3 says: --tp 12, 27 or 48"));
    CHECK_THROWS_WITH(tensor_layout(TensorMode::two_d, 0, 5), ContainsSubstring("a square of ranks is needed"));
    CHECK_THROWS_WITH(tensor_layout(TensorMode::three_d, 0, 9), ContainsSubstring("a cube of ranks is needed"));
    CHECK_THROWS_WITH(sizes(8, -1), ContainsSubstring("--tp-depth must not be negative"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Whole runs

TEST_CASE("2D, 2.5D and 3D have the curve and the weights of one process", "[program][ranks][tensor_parallel]") {
    const std::string two = "--ranks 4 --tp 4 --tp-mode 2d ", deep = "--ranks 8 --tp 8 --tp-mode 2.5d ",
                      three = "--ranks 8 --tp 8 --tp-mode 3d ", nine = "--ranks 9 --tp 9 --tp-mode 2d ";
    const std::map<std::string, std::vector<std::string>> quick = {
        {"gpt2", {nine, three + "--recompute full "}},
        {"llama", {deep + "--recompute selective ", "--ranks 8 --tp 4 --tp-mode 2d --zero 3 "}},
        {"biases", {two + "--micro-batch 4 ", three}},
        {"qwen3", {deep + "--recompute 1 "}},
        {"deepseek", {two, three}},
        {"lite", {"--ranks 8 --tp 4 --tp-mode 2d --cp 2 "}},
        {"mfa", {deep, three}}};
    std::vector<std::string> all;
    for (const std::string& mesh : {two, deep, three, nine, std::string("--ranks 18 --tp 18 --tp-mode 2.5d "),
                                    std::string("--ranks 12 --tp 12 --tp-mode 2.5d --tp-depth 3 "),
                                    std::string("--ranks 16 --tp 4 --tp-mode 2d --cp 2 --cp-mode ulysses --zero 2 ")})
        all.push_back(mesh + (all.size() % 2 ? "--recompute 1 " : ""));
    Runs runs;
    for (const std::string model : {"gpt2", "llama", "biases", "qwen3", "deepseek", "lite", "mfa"}) {
        const std::string one = runs.run(model, kTwentySteps);
        for (const std::string& mesh : is_full() ? all : quick.at(model)) {
            const bool threes = mesh.find("--tp 9") != std::string::npos || mesh.find("--tp 18") != std::string::npos;
            if (threes && (model == "biases" || model == "qwen3")) continue;  // 4 and 2 key heads
            INFO(model << " " << mesh);
            check_same_run(runs.run(model, kTwentySteps + mesh), one, 1e-6);
        }
    }
}

TEST_CASE("2D, 2.5D and 3D in 16 bits", "[program][ranks][tensor_parallel]") {
    // The q products of a sum are rounded to 16 bits one after the other, twice a block.
    Runs runs;
    const std::string flags = "--dtype bf16 ", one = runs.run("llama", flags);
    for (const std::string mode : {"--ranks 4 --tp 4 --tp-mode 2d ", "--ranks 8 --tp 8 --tp-mode 3d "})
        check_same_run(runs.run("llama", flags + mode), one, 2e-2);
    // Gradients of twice as many bytes, for the account.
    runs.run("llama", flags + "--grad-dtype fp32 --ranks 8 --tp 8 --tp-mode 3d --steps 2 --warmup 1 --val-every 0 ");
    const std::string half = "--dtype fp16 --inject-overflow 3 ";
    check_same_run(runs.run("gpt2", half + "--ranks 8 --tp 8 --tp-mode 2.5d "), runs.run("gpt2", half), 4e-3);
}

TEST_CASE("a run in 2D, 2.5D or 3D repeats bit for bit, also under strict mode", "[program][ranks][tensor_parallel]") {
    Runs runs;
    int seed = 0;
    for (const std::string flags : {"--ranks 4 --tp 4 --tp-mode 2d ", "--ranks 8 --tp 8 --tp-mode 2.5d --steps 4 ",
                                    "--ranks 8 --tp 8 --tp-mode 3d --steps 4 "}) {
        const std::string once = runs.run("biases", flags), again = runs.run("biases", flags);
        CHECK(log_without_times(once) == log_without_times(again));
        CHECK((weights_of(once) == weights_of(again)));
        if (!device().is_cpu) continue;
        INFO(flags << ", seed " << ++seed);
        CHECK(log_without_times(runs.run("biases", flags, concat("CUDA_CPU_STRICT=", seed, " "))) ==
              log_without_times(once));
    }
}

TEST_CASE("a checkpoint goes on in another geometry", "[program][ranks][tensor_parallel]") {
    Runs runs;
    const std::string adamw = " --optimizer adamw --eps 1e-4 ";
    const std::array<std::string, 3> meshes[] = {
        {"gpt2", "--ranks 4 --tp 4 --tp-mode 2d ", "--ranks 8 --tp 8 --tp-mode 3d "},
        {"biases", "--ranks 8 --tp 8 --tp-mode 3d --zero 1 ", ""},
        {"mfa", "--ranks 2 --tp 2 --sp ", "--ranks 8 --tp 8 --tp-mode 2.5d "},
        {"deepseek", "--ranks 8 --tp 4 --tp-mode 2d --zero 3 ", "--ranks 3 --tp 3 "}};
    for (const auto& [model, before, after] : meshes) {
        INFO(model << ": " << before << "-> " << after);
        check_same_run(runs.resumed(model, adamw, before, after), runs.run(model, adamw), 2e-6);
    }
}

TEST_CASE("the sample and documents in 2D, 2.5D and 3D", "[program][ranks][tensor_parallel]") {
    Runs runs;
    // A text for each document, so that positions are counted from other places in every sequence.
    std::filesystem::create_directories(runs.folder / "text");
    for (int i = 0; i < 30; ++i) spit(runs.folder / concat("text/", i, ".txt"), made_text(2 + i % 7));
    std::vector<std::string> samples, paths;
    // More tokens than the model has positions. Few: a sample ends after 10 s, and these ranks may share a GPU.
    const std::string flags =
        runs.trained("gpt2") + "--mask-documents --sample 20 --data " + (runs.folder / "text") + " ";
    for (const std::string mesh :
         {"", "--ranks 4 --tp 4 --tp-mode 2d ", "--ranks 8 --tp 8 --tp-mode 2.5d ", "--ranks 8 --tp 8 --tp-mode 3d "}) {
        paths.push_back(runs.folder / std::to_string(runs.number++));
        const Outcome its = runs.outcome("gpt2", flags + mesh, paths.back());
        INFO(mesh << its.err);
        REQUIRE(its.status == 0);
        samples.push_back(first_sample(its));
        CHECK(samples.back() == samples[0]);
        check_same_run(paths.back(), paths[0], 1e-6);
    }
    CHECK(samples[0].size() > 45);
}

// 2D: a row of a block has 18 numbers of the stream, or 24 of the feed-forward, and a step of a sample has one row.
TEST_CASE("the sample in 2D where blocks of a row begin off 16 bytes", "[program][ranks][tensor_parallel]") {
    Runs runs;
    const std::string trained = runs.trained("llama");
    std::vector<std::string> samples;
    for (const std::string mesh : {"", "--ranks 4 --tp 4 --tp-mode 2d ", "--ranks 8 --tp 8 --tp-mode 2.5d "}) {
        const Outcome its = runs.outcome("llama", trained + "--steps 1 --warmup 0 --val-every 0 --sample 20 " + mesh,
                                         runs.folder / std::to_string(runs.number++));
        INFO(mesh << its.err);
        REQUIRE(its.status == 0);
        samples.push_back(first_sample(its));
        CHECK(samples.back() == samples[0]);
    }
}

TEST_CASE("a loss that is not finite is found in one sequence, whatever ranks of a grid have its loss",
          "[program][ranks][tensor_parallel]") {
    Runs runs;
    std::vector<std::string> texts;
    for (const std::string mesh : {"", "--ranks 8 --tp 4 --tp-mode 2d ", "--ranks 8 --tp 8 --tp-mode 3d "}) {
        const std::string line = line_of(runs.outcome("llama", mesh + "--batch 16 --micro-batch 4 --lr 1e30 --clip 0 ",
                                                      runs.folder / std::to_string(runs.number++)));
        const size_t first = line.find("The loss is not finite for "), last = line.find(" (tokens ");
        INFO(line);
        REQUIRE((first != std::string::npos && last != std::string::npos));
        texts.push_back(line.substr(first, last - first));
        CHECK(texts.back() == texts[0]);
    }
}

TEST_CASE("--tp-mode refuses in one line what it cannot divide", "[program][ranks][tensor_parallel]") {
    Runs runs;
    const std::array<std::string, 3> wrong[] = {
        {"gpt2", "--tp-mode 2d", "--tp-mode says how the ranks of --tp divide the layers: add --tp"},
        {"gpt2", "--tp-depth 2", "--tp-depth says how the ranks of --tp divide the layers: add --tp"},
        {"gpt2", "--ranks 4 --tp 4 --tp-mode 4d", "--tp-mode 4d: use 1d, 2d, 2.5d or 3d"},
        {"gpt2", "--ranks 6 --tp 6 --tp-mode 2d", "a square of ranks is needed: --tp 4, 9 or 16"},
        {"gpt2", "--ranks 9 --tp 9 --tp-mode 3d", "a cube of ranks is needed: --tp 8, 27 or 64"},
        {"gpt2", "--ranks 16 --tp 16 --tp-mode 2.5d", "ranks are needed, with a depth of at least 2"},
        {"gpt2", "--ranks 8 --tp 8 --tp-mode 2.5d --tp-depth 3", "--tp-depth 3 says: --tp 12, 27 or 48"},
        {"gpt2", "--ranks 8 --tp 8 --tp-mode 2.5d --tp-depth -1", "--tp-depth must not be negative"},
        {"gpt2", "--ranks 4 --tp 4 --tp-mode 2d --tp-depth 2", "--tp-depth belongs to --tp-mode 2.5d"},
        {"gpt2", "--ranks 4 --tp 4 --tp-mode 2d --sp", "the residual stream is divided already; leave --sp out"},
        {"biases", "--ranks 9 --tp 9 --tp-mode 2d", "the model's 4 key/value heads"},
        {"odd-llama", "--ranks 4 --tp 4 --tp-mode 2d", "the model's 5 heads cannot be divided by 2"},
        {"gpt2", "--ranks 4 --tp 4 --tp-mode 2d --batch 3", "the 3 sequences of a micro-batch (--micro-batch)"},
        {"gpt2", "--ranks 8 --tp 8 --tp-mode 3d --batch 8 --micro-batch 2",
         "cannot be divided by 4: use a multiple of 4"}};
    for (const auto& each : wrong) check_refused(runs, each);
}

// ---------------------------------------------------------------------------------------------------------------------
// The plan

TEST_CASE("--plan has the published costs of 1D, 2D, 2.5D and 3D", "[program][ranks][tensor_parallel]") {
    // The rows of the table that --plan prints, of a large model: parameters of a rank, and what it keeps of tokens.
    const auto row = [](const std::string& flags, const std::string& name) {
        const std::string out = printed_by("train_gpt",
                                           "--plan --model llama-8b --dtype bf16 --seq 4096 --device-spec h100 "
                                           "--batch 64 --recompute full " +
                                               flags);
        const size_t at = out.find("\n  " + name + " ", out.find("\ngeometry of "));
        REQUIRE(at != std::string::npos);
        std::string line = out.substr(at + 1, out.find('\n', at + 1) - at - 1);
        line.erase(0, 24);
        double parameters = 0, activations = 0, sent = 0;
        char unit[8] = "", bytes[8] = "", sent_unit[8] = "";
        INFO(line);
        REQUIRE(std::sscanf(line.c_str(), "%lf%1s %lf %7s %lf %7s", &parameters, unit, &activations, bytes, &sent,
                            sent_unit) == 6);
        const auto scale = [](const char* text) { return text[0] == 'M' ? 1e6 : text[0] == 'G' ? 1e9 : 1e3; };
        return std::array<double, 3>{parameters * scale(unit), activations * scale(bytes), sent * scale(sent_unit)};
    };
    // Li & others, Colossal-AI's table: a rank of P has 1/P of the parameters in 1D, 2D and 3D, d/P in 2.5D.
    const double all = 8.03e9;
    CHECK(row("--ranks 8 --tp 8", "1d")[0] == Approx(all / 8).epsilon(0.02));
    CHECK(row("--ranks 16 --tp 16 --tp-mode 2d", "2d")[0] == Approx(all / 16).epsilon(0.02));
    CHECK(row("--ranks 64 --tp 64 --tp-mode 3d", "3d")[0] == Approx(all / 64).epsilon(0.02));
    CHECK(row("--ranks 64 --tp 64 --tp-mode 3d", "2.5d")[0] == Approx(4 * all / 64).epsilon(0.02));
    // Activations: O(1) in 1D, where --recompute full keeps the stream alone and each rank has all of it; 1/P
    // elsewhere.
    const auto kept = [&](const std::string& flags, const std::string& name) { return row(flags, name)[1]; };
    const double two = kept("--ranks 16 --tp 16 --tp-mode 2d", "2d");
    CHECK(kept("--ranks 4 --tp 4 --tp-mode 2d", "2d") / two == Approx(4).epsilon(0.02));
    CHECK(kept("--ranks 64 --tp 64 --tp-mode 3d", "3d") == Approx(two / 4).epsilon(0.02));
    // What a rank sends in 1D: 2 (P - 1) / P of the activations for each all-reduce, so it hardly depends on P.
    const auto sent = [&](int P) { return row(concat("--ranks ", P, " --tp ", P), "1d")[2]; };
    CHECK(sent(4) / sent(2) == Approx((3.0 / 4) / (1.0 / 2)).epsilon(0.02));
    CHECK(sent(8) / sent(2) == Approx((7.0 / 8) / (1.0 / 2)).epsilon(0.02));
    CHECK(row("--ranks 8 --tp 8 --micro-batch 8", "1d")[2] == sent(8));
    // Each rank computes its share of the step, attention of long sequences and what is run again, too.
    const auto plan_of = [](const std::string& flags) {
        return printed_by("train_gpt",
                          "--plan --model llama-8b --dtype bf16 --batch 16 --seq 8192 --device-spec h100 " + flags);
    };
    const auto flops = [&](const std::string& flags) {
        const std::string its = plan_of("--recompute full " + flags), before = " tokens, ";
        const char unit = its.at(its.find("FLOP", its.find(before)) - 1);
        REQUIRE((unit == 'T' || unit == 'P'));
        return number_after(its, before) * (unit == 'P' ? 1e15 : 1e12);
    };
    const double whole = flops("");
    for (const auto& [P, mode] : {std::pair{4, "1d"}, {16, "2d"}, {32, "2.5d --tp-depth 2"}, {64, "3d"}}) {
        INFO(mode);
        CHECK(flops(concat("--ranks ", P, " --tp ", P, " --tp-mode ", mode)) == Approx(whole / P).epsilon(0.01));
    }
    const auto time = [&](const std::string& flags) {
        return number_after(plan_of("--pp 2 --micro-batch 8 --ranks " + flags), "the stages' products take ");
    };
    CHECK(time("16 --tp 8 --tp-mode 3d") == Approx(1e3 * time("2") / 8).epsilon(0.02));  // in ms, and in s
    // The rows are those of the whole model, also where a rank has a stage of it.
    const std::string plan = "--plan --model tiny --batch 4 --seq 16 --device-spec h100 --tp 2 --ranks ";
    const auto title = ContainsSubstring("that divide each layer, of the whole model, without --pp: what one of them");
    CHECK_THAT(printed_by("train_gpt", plan + "4 --pp 2"), title);
    CHECK_THAT(printed_by("train_gpt", plan + "2"), !title);
    // Of a small model most of the time is that of messages, 3 us and 6 us each. In each of 4 blocks 2 products leave
    // the ranks' parts in 1D, where an all-reduce forward and one backward have 2 (P - 1) messages; in 2D and 3D 4
    // products have q (4 log2 q + 2) and 9 (q - 1).
    for (const auto& [flags, words] : std::vector<std::pair<std::string, std::string>>{
             {"--tp 4", "     433 KiB      289 us      585 us\n"},                // 96 messages
             {"--tp 4 --sp", "     544 KiB      361 us      731 us\n"},           // 120
             {"--tp 4 --tp-mode 2d", "    1.49 MiB      579 us     1.18 ms\n"},   // 192
             {"--tp 16 --tp-mode 2d", "    1.12 MiB     1.92 ms     3.86 ms\n"},  // 640
             {"--tp 8 --tp-mode 3d", "    1.02 MiB      434 us      885 us\n"}})  // 144
        CHECK_THAT(printed_by("train_gpt",
                              concat("--plan --model tiny --dtype bf16 --batch 4 --seq 16 --device-spec h100 --ranks ",
                                     flags.substr(5, flags.find(' ', 5) - 5), " ", flags)),
                   ContainsSubstring(words));
}
