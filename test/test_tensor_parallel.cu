// test/test_tensor_parallel.cu: layers that are divided among ranks, by themselves and in whole runs.
#include "json.h"
#include "layers/layers.h"
#include "parallel/tensor/tensor.h"
#include "reference.h"
#include "tensor_runs.h"

#include <algorithm>
#include <deque>

namespace {

// Models whose heads and columns 2, 3, 4, 6 and 12 ranks can divide, and whose vocabulary none can.
const std::vector<std::string>& model_names() {
    static const std::vector<std::string> names = {"gpt2", "llama", "biases", "qwen3", "deepseek", "lite", "mfa"};
    return names;
}

}  // namespace

TEST_CASE("every attention and feed-forward is in a model that ranks divide", "[tensor_parallel]") {
    std::vector<std::string> files;
    for (const std::string& name : model_names()) files.push_back(model_file(name));
    CHECK(attentions_without_model(files) == std::set<std::string>{});
    CHECK(feed_forwards_without_model(files) == std::set<std::string>{});
}

// ---------------------------------------------------------------------------------------------------------------------
// The parts

TEST_CASE("cuts: all ranks together have each element once, and pieces say where", "[tensor_parallel]") {
    const int64_t rows = 18, cols = 6;
    std::vector<float> whole(static_cast<size_t>(rows * cols));
    for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<float>(i);
    for (const int n : {1, 2, 3}) {
        for (const bool by_columns : {false, true}) {
            std::vector<float> again(whole.size(), -1);
            for (int r = 0; r < n; ++r) {
                const int64_t R = 6 / n, C = cols / n;
                // Rows: of three groups of six the same part of each, as of queries, keys and values.
                const Cut cut = by_columns ? Cut{rows, cols, {{0, rows}}, r * C, C}
                                           : Cut{rows, cols, {{r * R, R}, {6 + r * R, R}, {12 + r * R, R}}, 0, cols};
                Param param;
                param.name = "x";
                param.cut = cut;
                const std::vector<float> part = cut_from(param, whole);
                REQUIRE(std::ssize(part) == (by_columns ? rows * C : 3 * R * cols));
                put_into(again, cut, part);
                for (int64_t first = 0; first < std::ssize(part); first += 5)
                    for (int64_t m = 1; first + m <= std::ssize(part); m += 7) {
                        int64_t seen = 0;
                        for (const CutPiece& piece : cut_pieces(cut, first, m)) {
                            CHECK(piece.local_first == seen);
                            for (int64_t i = 0; i < piece.n; ++i, ++seen)
                                CHECK(part[static_cast<size_t>(first + seen)] ==
                                      static_cast<float>(piece.first + i / piece.run * piece.stride + i % piece.run));
                        }
                        CHECK(seen == m);
                    }
            }
            CHECK(again == whole);
        }
    }
}

TEST_CASE("the loss of a divided vocabulary is that of the whole, against float64",
          "[tensor_parallel][cross_entropy][counted]") {
    const int64_t N = 37, V = 301;
    const cudaStream_t stream = device().stream;
    const float dloss = 0.37f;
    for (const DType dtype : kFloatDTypes) {
        std::vector<double> x = rounded(random_values(N * V, 7, 4.0), dtype);
        x[3 * V + 7] = INFINITY;  // in a row that is ignored
        std::vector<int32_t> targets;
        for (int64_t i = 0; i < N; ++i) targets.push_back(static_cast<int32_t>(i * 41 % V));
        targets[3] = -1, targets[5] = 0, targets[6] = static_cast<int32_t>(V - 1);
        Buffer targets_i32(DType::i32, {N});
        targets_i32.set_integers(targets);
        // In float64, on the whole rows.
        std::vector<double> losses(static_cast<size_t>(N)), dx(x.size());
        for (size_t i = 0; i < static_cast<size_t>(N); ++i) {
            const double* row = x.data() + i * static_cast<size_t>(V);
            if (targets[i] < 0) continue;
            const double max = *std::max_element(row, row + V);
            double sum = 0;
            for (int64_t v = 0; v < V; ++v) sum += std::exp(row[v] - max);
            losses[i] = std::log(sum) + max - row[targets[i]];
            for (int64_t v = 0; v < V; ++v)
                dx[i * static_cast<size_t>(V) + static_cast<size_t>(v)] =
                    (std::exp(row[v] - max) / sum - (v == targets[i])) * static_cast<double>(dloss);
        }
        // 9 ranks of 48 columns: of the last ones 13 are tokens, then none.
        for (const int64_t width : {301, 160, 48}) {
            const int64_t n = width == 48 ? 9 : ceil_div(V, width);
            const int64_t Vp = round_up(width, 16);
            std::deque<Buffer> logits, maxima, sums;
            std::vector<double> all_max(static_cast<size_t>(N), -INFINITY), all_sums(static_cast<size_t>(2 * N));
            const auto tokens = [&](int64_t r) { return std::clamp<int64_t>(V - r * width, 0, width); };
            for (int64_t r = 0; r < n; ++r) {
                std::vector<double> its(static_cast<size_t>(N * Vp), NAN);  // nothing may look at the padding
                for (int64_t i = 0; i < N; ++i)
                    for (int64_t v = 0; v < tokens(r); ++v)
                        its[static_cast<size_t>(i * Vp + v)] = x[static_cast<size_t>(i * V + r * width + v)];
                logits.emplace_back(dtype, std::initializer_list<int64_t>{N, Vp}, its);
                maxima.emplace_back(DType::f32, std::initializer_list<int64_t>{N});
                sums.emplace_back(DType::f32, std::initializer_list<int64_t>{N, 2});
                cross_entropy_parts(maxima.back(), sums.back(), logits.back(), targets_i32, r * width, tokens(r),
                                    stream);
                const std::vector<double> max = maxima.back().values();
                for (size_t i = 0; i < all_max.size(); ++i) all_max[i] = std::max(all_max[i], max[i]);
            }
            Buffer maximum(DType::f32, {N}, all_max);
            for (int64_t r = 0; r < n; ++r) {
                cross_entropy_rescale(sums[static_cast<size_t>(r)], maxima[static_cast<size_t>(r)], maximum, stream);
                const std::vector<double> its = sums[static_cast<size_t>(r)].values();
                for (size_t i = 0; i < its.size(); ++i) all_sums[i] += its[i];
            }
            Buffer sum(DType::f32, {N, 2}, all_sums), out(DType::f32, {N});
            std::vector<double> gradient(dx.size());
            for (int64_t r = 0; r < n; ++r) {
                Buffer& its = logits[static_cast<size_t>(r)];
                cross_entropy_finish(out, its, targets_i32, maximum, sum, r * width, tokens(r), NAN, stream);
                check_close(out.values(), losses, 0, 1e-5, concat("losses, ", width, " columns"));
                cross_entropy_finish(out, its, targets_i32, maximum, sum, r * width, tokens(r), dloss, stream);
                const std::vector<double> values = its.values();
                for (int64_t i = 0; i < N; ++i)
                    for (int64_t v = 0; v < Vp; ++v) {
                        const double value = values[static_cast<size_t>(i * Vp + v)];
                        if (v < tokens(r)) gradient[static_cast<size_t>(i * V + r * width + v)] = value;
                        else CHECK(value == 0);
                    }
            }
            // As in test_cross_entropy.cu: the exponentials, V / 128 additions of a thread, and the ranks'.
            const double sum_error = (11 + static_cast<double>(V) / 128 + 40 + static_cast<double>(n)) * 0x1p-24;
            check_close(gradient, dx, unit_roundoff(dtype) + sum_error + 0x1p-21,
                        0.37 * (sum_error + 0x1p-23) + (dtype == DType::f16 ? 0x1p-25 : 0),
                        concat("dlogits, ", width, " columns, ", dtype_name(dtype)));
        }
    }
}

TEST_CASE("the embedding of a divided vocabulary adds up to the whole", "[tensor_parallel][embedding][counted]") {
    const int64_t B = 3, T = 70, C = 20, V = 33;
    const cudaStream_t stream = device().stream;
    const std::vector<double> table = random_values(V * C, 1), dy = random_values(B * T * C, 2);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < B * T; ++i) ids.push_back(static_cast<int32_t>(i * i % V));
    Buffer tokens(DType::i32, {B, T}), here(DType::i32, {B, T}), dout(DType::f32, {B, T, C}, dy),
        out(DType::f32, {B, T, C}), scratch(DType::i32, {embedding_backward_scratch_n(DType::f32, B * T, C)});
    tokens.set_integers(ids);
    // 16 rows: ids have as many bits as -1 has ones there.
    for (const int64_t width : {33, 16, 11}) {
        std::vector<double> sum(static_cast<size_t>(B * T * C));
        for (int64_t first = 0; first < V; first += width) {
            const int64_t n = std::min(width, V - first);
            const std::vector<double> rows(table.begin() + first * C, table.begin() + (first + n) * C);
            Buffer wte(DType::f32, {n, C}, rows), dwte(DType::f32, {n, C}, std::vector<double>(rows.size()));
            ids_from(here, tokens, first, n, stream);
            embedding_forward(out, here, {}, wte, {}, stream);
            const std::vector<double> its = out.values();
            for (size_t i = 0; i < its.size(); ++i) sum[i] += its[i];
            embedding_backward(dwte, {}, dout, here, {}, true, true, scratch, stream);
            std::vector<double> expected(rows.size());
            for (int64_t i = 0; i < B * T; ++i)
                for (int64_t c = 0; c < C; ++c) {
                    const int64_t row = ids[static_cast<size_t>(i)] - first;
                    if (row >= 0 && row < n)
                        expected[static_cast<size_t>(row * C + c)] += dy[static_cast<size_t>(i * C + c)];
                }
            check_close(dwte.values(), expected, 0, sum_error(B * T) * 16, "dwte");
        }
        for (int64_t i = 0; i < B * T; ++i)
            for (int64_t c = 0; c < C; ++c)
                CHECK(sum[static_cast<size_t>(i * C + c)] ==
                      rounded({table[static_cast<size_t>(ids[static_cast<size_t>(i)] * C + c)]}, DType::f32)[0]);
    }
}

TEST_CASE("a product that is cut by columns has the bits of the whole", "[tensor_parallel]") {
    const int64_t N = 37, C = 48, O = 60;
    for (const DType dtype : kFloatDTypes) {
        Buffer inp(dtype, {N, C}, random_values(N * C, 1)), weight(dtype, {O, C}, random_values(O * C, 2)),
            whole(dtype, {N, O}), part(dtype, {N, O / 5});
        linear_forward(whole, inp, weight, {}, device().stream);
        const std::vector<double> all = whole.values();
        for (int64_t r = 0; r < 5; ++r) {
            linear_forward(part, inp, weight.tensor().slice(r * (O / 5), O / 5), {}, device().stream);
            const std::vector<double> its = part.values();
            for (int64_t i = 0; i < N; ++i)
                for (int64_t o = 0; o < O / 5; ++o)
                    CHECK((its[static_cast<size_t>(i * (O / 5) + o)] ==
                               all[static_cast<size_t>(i * O + r * (O / 5) + o)] ||
                           !device().is_cpu));  // cuBLASLt chooses an order of summation by the sizes
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Whole runs

TEST_CASE("tensor parallelism has the curve and the weights of one process", "[program][ranks][tensor_parallel]") {
    const bool full = is_full();
    // Each model on one mesh at least; those with few key heads also on more ranks than that.
    const std::map<std::string, std::vector<std::string>> quick = {
        {"gpt2", {"--ranks 3 --tp 3 ", "--ranks 4 --tp 2 --sp --zero 1 "}},
        {"llama", {"--ranks 4 --tp 2 --zero 3 ", "--ranks 12 --tp 12 --sp "}},
        {"biases", {"--ranks 8 --tp 4 --zero 2 --micro-batch 3 ", "--ranks 12 --tp 12 --recompute full "}},
        {"qwen3", {"--ranks 4 --tp 4 --sp --micro-batch 3 "}},
        {"deepseek", {"--ranks 6 --tp 3 --zero 1 ", "--ranks 2 --tp 2 --sp --recompute selective "}},
        {"lite", {"--ranks 2 --tp 2 "}},
        {"mfa",
         {"--ranks 3 --tp 3 --sp --tp-overlap ", "--ranks 4 --tp 4 --recompute full ",
          "--ranks 4 --tp 2 --sp --zero 3 --recompute full "}}};
    std::vector<std::string> all;
    for (const std::string sp : {"", "--sp ", "--sp --tp-overlap "}) {
        for (const int tp : {2, 3, 4, 6, 12}) all.push_back(concat("--ranks ", tp, " --tp ", tp, " ", sp));
        all.push_back(concat("--ranks 4 --tp 2 --micro-batch 2 --zero ",
                             sp.empty()      ? 1
                             : sp == "--sp " ? 2
                                             : 3,
                             " ", sp));
    }
    Runs runs;
    for (const std::string& model : model_names()) {
        const std::string one = runs.run(model, kTwentySteps);
        for (const std::string& mesh : full ? all : quick.at(model)) {
            const int keys = model == "biases"  ? 4
                             : model == "qwen3" ? 2
                                                : 12,
                      tp = std::stoi(mesh.substr(mesh.find("--tp ") + 5));
            if (keys % tp != 0 && tp % keys != 0) continue;
            INFO(model << " " << mesh);
            check_same_run(runs.run(model, kTwentySteps + mesh), one, 1e-6);
        }
    }
}

TEST_CASE("tensor parallelism in 16 bits", "[program][ranks][tensor_parallel]") {
    // Each rank rounds its part of a sum to 16 bits (bf16: 2^-9), twice a block.
    Runs runs;
    for (const std::string dtype : {"bf16", "fp16"}) {
        const std::string flags = "--dtype " + dtype + " ";
        const std::string one = runs.run("llama", flags);
        check_same_run(runs.run("llama", flags + "--ranks 4 --tp 2 --zero 1 "), one, dtype == "bf16" ? 2e-2 : 4e-3);
    }
}

TEST_CASE("a run with --tp repeats bit for bit, also under strict mode", "[program][ranks][tensor_parallel]") {
    Runs runs;
    const std::string flags = "--ranks 4 --tp 4 --sp --tp-overlap --zero 2 --micro-batch 2 ";
    const std::string once = runs.run("qwen3", flags), again = runs.run("qwen3", flags);
    CHECK(log_without_times(once) == log_without_times(again));
    CHECK((weights_of(once) == weights_of(again)));
    if (!device().is_cpu) return;
    const std::string few = "--ranks 2 --tp 2 --sp --steps 2 --warmup 1 --val-every 0 ";
    int seed = 0;
    for (const std::string more : {"--zero 2 --micro-batch 6 ", "--tp-overlap ", "--recompute full "}) {
        INFO(more << "seed " << ++seed);
        const std::string strict = runs.run("qwen3", few + more, concat("CUDA_CPU_STRICT=", seed, " "));
        CHECK(log_without_times(strict) == log_without_times(runs.run("qwen3", few + more)));
    }
}

// A checkpoint has one copy of a weight that ranks of --tp all have: the run goes on with it if the copies are equal.
TEST_CASE("a run of machines that end inside a group of --tp goes on with the same bits",
          "[program][ranks][tensor_parallel]") {
    if (is_full()) return;  // --ranks-per-node is for threads
    Runs runs;
    for (const std::string mesh :
         {"--ranks 6 --tp 2 --ranks-per-node 3 ", "--ranks 6 --tp 3 --sp --ranks-per-node 4 "}) {
        INFO(mesh);
        const std::string flags = "--optimizer adamw --eps 1e-4 --all-reduce two-level " + mesh;
        const std::string whole = runs.run("gpt2", flags), run = runs.resumed("gpt2", flags, "", "");
        CHECK(log_without_times(run) == log_without_times(whole));
        CHECK((weights_of(run) == weights_of(whole)));
    }
}

TEST_CASE("a checkpoint goes on with another --tp", "[program][ranks][tensor_parallel]") {
    Runs runs;
    // AdamW has two states a number; its epsilon is large enough that rounding stays small.
    const std::string adamw = " --optimizer adamw --eps 1e-4 ";
    for (const std::string model : {"gpt2", "biases"}) {
        const std::string whole = runs.run(model, adamw);
        const std::array<std::string, 2> meshes[] = {{"--ranks 4 --tp 4 ", ""},
                                                     {"", "--ranks 4 --tp 2 --zero 1 "},
                                                     {"--ranks 4 --tp 2 --zero 3 ", "--ranks 12 --tp 12 "},
                                                     {"--ranks 6 --zero 3 ", "--ranks 6 --tp 3 --zero 2 "}};
        for (const auto& [before, after] : meshes) {
            if (model == "biases" && after.find("--tp 3") != std::string::npos) continue;  // 4 key heads
            INFO(model << ": " << before << "-> " << after);
            check_same_run(runs.resumed(model, adamw, before, after), whole, 2e-6);
        }
    }
}

TEST_CASE("states of optimizers that see whole matrices go on with another mesh", "[program][ranks][tensor_parallel]") {
    Runs runs;
    // The gradients of key biases are 0 but for rounding: eps is above their squares.
    const std::array<std::string, 4> cases[] = {
        {"gpt2", "--optimizer adafactor --lr 1e-2 --eps 1e-12 ", "--ranks 4 --tp 2 --zero 1 ",
         "--ranks 4 --tp 4 --sp "},
        {"qwen3", "--optimizer adafactor --lr 1e-2 ", "--ranks 4 --tp 4 ", "--ranks 2 "},
        // So few rows that no sum of a step is as large as a matrix.
        {"qwen3", "--optimizer muon --lr 1e-2 --micro-batch 2 ", "--ranks 4 --tp 2 --zero 3 ", "--ranks 4 --tp 4 "},
        {"gpt2", "--optimizer muon --lr 1e-2 ", "", "--ranks 4 --tp 2 --zero 1 "}};
    for (const auto& [model, optimizer, before, after] : cases) {
        INFO(model << " " << optimizer << ": " << before << "-> " << after);
        const std::string whole = runs.run(model, optimizer);
        check_same_run(runs.resumed(model, optimizer, before, after), whole, 2e-6);
    }
}

TEST_CASE("adam8bit's blocks lie in the parts of --tp, and go on with the same", "[program][ranks][tensor_parallel]") {
    Runs runs;
    const std::string adam = "--optimizer adam8bit --lr 1e-3 ", four = adam + "--ranks 8 --tp 4 ";
    const std::string whole = runs.run("gpt2", four), run = runs.run("gpt2", four + "--stop-after 5 ");
    const std::string alone = runs.run("gpt2", adam + "--stop-after 5 ");
    const std::array<std::string, 3> others[] = {
        {run, "--ranks 4 --tp 2 ", "--tp 2 differs from the run in " + run + ", which has --tp 4: leave the flag out"},
        {run, "--ranks 4 --tp 4 --tp-mode 2d ", "--tp-mode 2d differs"},
        {run, "", "--tp 4: one rank cannot be divided"},
        {alone, "--ranks 2 --tp 2 ", "which has --tp 1: "}};
    for (const auto& [of, other, words] : others) {
        const Outcome resumed = runs.outcome("gpt2", adam + other + "--resume ", of);
        INFO(other);
        CHECK(resumed.status == 2);
        CHECK_THAT(resumed.err, ContainsSubstring(words));
        CHECK(resumed.out.empty());  // nothing has started
    }
    // A checkpoint of an earlier version does not say how the run was divided, but its states do.
    for (const auto& [of, had] : {std::pair(run, "the run had --tp 4, and the blocks of --optimizer adam8bit"),
                                  {alone, "the run had --tp 1, and the blocks of --optimizer adam8bit"}}) {
        const std::string path = newest_checkpoint(of) + "/state.json", text = slurp(path);
        json state = parsed_json(text);
        state.removeMember("checksum");
        for (const char* flag : {"--tp", "--tp-mode", "--tp-depth"}) state["options"].removeMember(flag);
        spit(path, dumped(state));
        CHECK_THAT(runs.outcome("gpt2", adam + "--ranks 4 --tp 2 --resume ", of).err, ContainsSubstring(had));
        spit(path, text);
    }
    must_succeed(runs.outcome("gpt2", four + "--zero 3 --resume ", run));
    CHECK(log_without_times(run) == log_without_times(whole));
    CHECK((weights_of(run) == weights_of(whole)));
}

TEST_CASE("fp8's histories are of whole tensors, whoever has the parts", "[program][ranks][tensor_parallel][fp8]") {
    if (!has_fp8()) SKIP_TEST(kNeedsFp8);
    Runs runs;
    const std::string flags = "--steps 2 --lr 1e-3 --dtype fp8 ";
    const auto histories = [&](const std::string& mesh) {
        return SafetensorsReader(newest_checkpoint(runs.run("even-gqa", flags + mesh)) + "/optimizer" +
                                 (mesh.empty() ? "" : "-00001-of-00002") + ".safetensors")
            .at("fp8.histories")
            .floats();
    };
    const std::vector<float> one = histories(""), two = histories("--ranks 2 --tp 2 ");
    REQUIRE(one.size() == two.size());
    // The two last steps' largest values: in bf16 and 8 bits, through two blocks. The gradients of gate and up (of the
    // third layer of each block's four) are products of three such numbers, and the largest one is of few that are
    // large: one that e5m2 rounds up and not down, a quarter, shows. On an H100 one was 10 % off, on a CPU 4 %.
    for (size_t i = 0; i < one.size(); ++i) {
        const bool of_gate = i / kFp8StateN % 8 == 5;  // each layer has the states of its input and of its gradient
        CHECK(two[i] == Approx(one[i]).epsilon(of_gate && !device().is_cpu ? 0.2 : 0.05));
    }
    // A resumed run has them: one of the ranks has written them, and all read them.
    const std::string mesh = flags + "--ranks 2 --tp 2 ", whole = runs.run("even-gqa", mesh),
                      run = runs.run("even-gqa", mesh + "--stop-after 1 ");
    must_succeed(runs.outcome("even-gqa", mesh + "--resume ", run));
    CHECK((weights_of(run) == weights_of(whole)));
    // Weights that come with each visit are quantised then, and their largest values found over the ranks again.
    for (const char* recipe : {"current", "delayed"})
        runs.run("even-gqa",
                 concat(flags, "--fp8 ", recipe, " --val-every 0 --ranks 4 --tp 2 --zero 3 --recompute 2 "));
    // Where they are more numbers than a micro-batch has activations of a layer.
    runs.run("deep-gqa", flags + "--batch 1 --val-every 0 --ranks 2 --tp 2 ");
}

TEST_CASE("--tp has the same bits under mpirun and as threads", "[program][ranks][tensor_parallel]") {
    if (!have_mpirun()) SKIP_TEST("no MPI");
    Runs runs;
    const auto train_with = [&](const std::string& ranks, const std::string& before) {
        const std::string run = runs.folder / std::to_string(runs.number++);
        must_succeed(run_program("train_gpt",
                                 "--data " + text_file() + " --model " + model_file("qwen3") +
                                     " --batch 4 --seq 16 --steps 4 --warmup 2 --val-every 2 --sample 0 "
                                     "--tp 2 --sp --zero 1 --optimizer adafactor " +
                                     ranks + " --out " + run,
                                 before));
        return run;
    };
    const std::string threads = train_with("--ranks 4", ""), processes = train_with("", mpirun_command(4));
    CHECK(log_without_times(threads) == log_without_times(processes));
    CHECK((weights_of(threads) == weights_of(processes)));
}

TEST_CASE("the sample of a divided model is that of one process", "[program][ranks][tensor_parallel]") {
    Runs runs;
    const std::string trained = runs.trained("deepseek");
    std::vector<std::string> samples;
    for (const std::string mesh : {"", "--ranks 3 --tp 3 --sp ", "--ranks 4 --tp 2 --zero 3 "}) {
        const Outcome its = runs.outcome("deepseek", trained + mesh + "--sample 40 --steps 3 --val-every 0 ",
                                         runs.folder / std::to_string(runs.number++));
        INFO(its.err);
        REQUIRE(its.status == 0);
        samples.push_back(first_sample(its));
    }
    CHECK(samples[0].size() > 60);
    CHECK(samples[1] == samples[0]);
    CHECK(samples[2] == samples[0]);
}

TEST_CASE("--tp refuses in one line what it cannot divide", "[program][ranks][tensor_parallel]") {
    Runs runs;
    const std::array<std::string, 3> wrong[] = {
        {"gpt2", "--tp 0", "--tp must be at least 1"},
        {"gpt2", "--tp 4294967296 --cp 4294967296", "--tp 4294967296: at most 65536 ranks"},
        {"gpt2", "--tp 8 --ranks 8 --tp-mode 2.5d --tp-depth 4294967298", "--tp-depth 4294967298: at most 65536"},
        {"gpt2", "--tp 2", "--tp 2: one rank cannot be divided into groups of 2"},
        {"gpt2", "--ranks 3 --tp 2", "the 3 ranks cannot be divided into groups of 2"},
        {"gpt2", "--ranks 5 --tp 5", "the model's 12 heads cannot be divided among 5 ranks"},
        {"biases", "--ranks 3 --tp 3", "the model's 4 key/value heads cannot be given to 3 ranks evenly"},
        {"gpt2", "--ranks 4 --tp 2 --batch 3", "--batch 3 cannot be divided among 2 ranks"},
        {"gpt2", "--ranks 4 --tp 4 --dtype fp8", "output channels of a linear layer that are a multiple of 16, not 36"},
        {"gpt2", "--ranks 2 --tp 2 --tp-overlap", "--tp-overlap is about the rows that travel with --sp"},
        {"llama", "--ranks 2 --tp 2 --sp --tp-overlap --dtype fp8", "--tp-overlap with --dtype fp8"},
        {"llama", "--ranks 4 --tp 4 --sp --tp-overlap --batch 1", "products need multiples of 8: use a multiple of 32"},
        {"gpt2", "--ranks 2 --sp", "--sp divides the tokens among the ranks of --tp: add --tp"},
        {"gpt2", "--ranks 12 --tp 12 --sp --batch 1 --seq 16", "the 16 tokens of a micro-batch"},
        {"gpt2", "--ranks 2 --tensor-parallel-size 2", "did you mean --tp?"}};
    for (const auto& each : wrong)
        if (can_train(each[1])) check_refused(runs, each);
    // Under mpirun --ranks would be the next error.
    if (!have_mpirun()) return;
    const Outcome one = run_program("train_gpt", "--tp 2", mpirun_command(1));
    CHECK_THAT(one.err, ContainsSubstring("start a multiple of them (mpirun -np 2)"));
}

TEST_CASE("--plan tells what one rank of many holds, without them", "[program][ranks][tensor_parallel]") {
    const auto plan = [](const std::string& flags, const std::string& line) {
        return number_after(printed_by("train_gpt",
                                       "--plan --model llama-8b --dtype bf16 --batch 8 --micro-batch 1 --seq 4096 "
                                       "--device-spec h100 " +
                                           flags),
                            line);
    };
    // Weights, gradients and states of a rank are an eighth; what it keeps of each token is so but for the residual
    // stream and the norms, and with --sp all of it (Korthikanti et al. 2022, arXiv:2205.05198, table 2).
    const double one = plan("", "\n  total "), eight = plan("--ranks 8 --tp 8", "\n  total ");
    CHECK(eight < one / 6);
    CHECK(eight > one / 8);
    // Bytes that another layer of 4096 tokens keeps, counted by hand: in bf16 two norms and two residual sums of width
    // 4096; queries, keys and values, and what attention gives (4096 + 2 x 1024 + 4096); gate and up, and their product
    // (3 x 14336); in float32 a sum for each of 32 heads and a number for each norm.
    const double between = 2.0 * 4 * 4096, inside = 2.0 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 4 * 32, norms = 4.0 * 2;
    const auto layer = [&](const std::string& flags) {
        return plan(flags, "\n  --recompute none") / 4096 * 1024 * 1024;  // printed in MiB
    };
    CHECK(layer("") == Approx(between + inside + norms).epsilon(5e-3));
    CHECK(layer("--ranks 8 --tp 8") == Approx(between + inside / 8 + norms).epsilon(5e-3));
    CHECK(layer("--ranks 8 --tp 8 --sp") == Approx((between + inside + norms) / 8).epsilon(5e-3));
}

TEST_CASE("the command that continues a run with --tp and --sp is whole", "[program][ranks][tensor_parallel]") {
    Runs runs;
    const std::string run = runs.folder / "run";
    const Outcome stopped = runs.outcome("llama", "--ranks 2 --tp 2 --sp --stop-after 3 ", run);
    if (!is_full()) CHECK_THAT(stopped.out, ContainsSubstring("--resume" + kUntimed + " --ranks 2 --tp 2 --sp\n"));
}
