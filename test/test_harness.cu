// test/test_harness.cu: make bench, make profile, make gpu-check, make gpu-window and make gpu-bundle, at toy sizes and
// with programs that only pretend: what they will do on a GPU must not be found out there.
#include "llm.h"
#include "program.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>

namespace {

// The build folder that this program lies in, which the scripts are given.
std::string build_folder() { return std::filesystem::path(program_file("run_tests")).parent_path().string(); }

Outcome run_script(const std::string& script, const std::string& variables, const std::string& build = build_folder()) {
    return run_shell(concat("env -u MAKEFLAGS OMP_NUM_THREADS=1 ", variables, " dev/", script, " ", shell_word(build)));
}

bool is_png(const std::string& path) { return std::filesystem::exists(path) && slurp(path).substr(1, 3) == "PNG"; }

bool torch_is_here() {
    static const bool found =
        run_python("-c 'import importlib.util as u, sys; sys.exit(not u.find_spec(\"torch\"))'").status == 0;
    return found;
}

// The sizes of the CPU device on a GPU, too, whose table is not to be kept.
const std::string kToyBench = "KERNEL_SECONDS=0.001 STEPS=2 SEQS=16 PRECISIONS=autocast RECORD=0 ";

void make_executable(const std::string& path, const std::string& text) {
    spit(path, "#!/usr/bin/env bash\n" + text);
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
}

// What a program that pretends starts and leaves behind.
const std::string left_running = concat("sleep 60.", getpid());
// Also a moment later: what was killed ends when it has a core.
bool is_left_running() {
    for (int i = 0; i < 250; ++i, ::usleep(20000))
        if (run_shell(concat("pgrep -f 'slee[p]", left_running.substr(5), "'")).status != 0) return false;
    return true;
}

// The beginning of a run_tests that pretends: it lists these tests, once, and logs that one passed.
std::string pretend_to_test(const std::string& names) {
    return concat("case \"$*\" in --list-test-names-only | *--list*'~[program]~[alone]~[.]'*) printf '", names,
                  "\\n'; exit ;; *--list*) exit ;; esac\n",
                  "[ -z \"$LLM_TEST_LOG\" ] || printf 'start\\t%s\\npassed\\t%s\\t0\\t\\n' \"$1\" \"$1\" > "
                  "\"$LLM_TEST_LOG\"\n");
}

}  // namespace

TEST_CASE("make bench: every operation and a training run, alone", "[program][harness]") {
    const TempFolder folder;
    const std::string out =
        must_succeed(run_script("bench.sh", kToyBench + "MODELS='toy-gpt2 tiny' OPPONENTS= BENCH_OUT=" + folder.path));
    INFO(out);
    const std::string table = slurp(folder / "results.md");
    CHECK(table == out);
    // Forward and backward of each operation in layers/: GPT-2's and LLaMA's.
    for (const std::string name : {"linear qkv", "linear attn_out", "linear up", "linear down", "linear head"})
        for (const std::string pass : {"forward", "backward input", "backward weight"})
            CHECK(count(table, "| " + name + " | " + pass + " |") == 2);
    for (const std::string name : {"attention", "embedding"})
        for (const std::string pass : {"forward", "backward"})
            CHECK(count(table, "| " + name + " | " + pass + " |") == 2);
    for (const std::string name : {"layernorm", "rmsnorm", "gelu", "swiglu", "rope"})
        for (const std::string pass : {"forward", "backward"})
            CHECK(count(table, "| " + name + " | " + pass + " |") == 1);
    CHECK(count(table, "| cross entropy | forward+backward |") == 2);
    CHECK(count(table, "| column sum |") == 1);
    CHECK(count(table, " | ours | 2 | ") == 2);  // two models trained
    CHECK(count(table, "failed") == 0);
    CHECK_THAT(table, ContainsSubstring("limits, measured"));
    for (const std::string picture : {"kernels.png", "training.png"}) CHECK(is_png(folder / picture));
    // Every training run has its peak memory.
    for (const std::string line : {"train\tours\ttoy-gpt2\t16\t2\t", "train\tours\ttiny\t16\t2\t"}) {
        const std::string tsv = slurp(folder / "results.tsv");
        REQUIRE(count(tsv, line) == 1);
        double tokens_per_s = 0, bytes = 0;
        REQUIRE(std::sscanf(tsv.c_str() + tsv.find(line) + line.size(), "%lf %lf", &tokens_per_s, &bytes) == 2);
        CHECK(tokens_per_s > 0);
        if (!gpu_is_shared()) CHECK(bytes > 1e6);
    }
}

TEST_CASE("make bench: what hangs does not take its table", "[program][harness]") {
    const TempFolder folder;
    const std::string programs = folder / "build-cuda/dev";
    std::filesystem::create_directories(programs);
    std::filesystem::create_symlink(program_file("dev/bench_report"), programs + "/bench_report");
    make_executable(programs + "/bench_kernels",
                    // First of all: it has BENCH_SECONDS to come to that.
                    "trap '' TERM; case \"$*\" in *'--budget 0 '*) printf 'device\\tPretender\\n'; exit ;; esac\n"
                    "printf 'limit\\tcopy\\t1e12\\n'; exec sleep 30\n");
    const Outcome outcome = run_script(
        "bench.sh", "PARTS=limits OPPONENTS= MODELS=tiny RECORD=0 BENCH_SECONDS=1 BENCH_OUT=" + folder / "out",
        folder / "build-cuda");
    INFO(outcome.err << outcome.out);
    CHECK(outcome.status == 0);
    CHECK_THAT(outcome.err, ContainsSubstring("bench: exit status 137 of: "));
    CHECK_THAT(outcome.out, ContainsSubstring("limits, measured: copy 1000 GB/s"));
}

TEST_CASE("make bench: PyTorch beside ours, at the same shapes", "[program][harness]") {
    if (!torch_is_here()) SKIP_TEST("needs PyTorch; LLM_PYTHON names the Python that has it");
    const TempFolder folder;
    const Outcome outcome =
        run_script("bench.sh", kToyBench + "MODELS=toy-gpt2 OPPONENTS=torch BENCH_OUT=" + folder.path +
                                   " LLM_PYTHON=" + python_name());
    INFO(outcome.err << outcome.out);
    REQUIRE(outcome.status == 0);
    // Each operation has a ratio: the last column of its line is a number. bench_report has compared the shapes. Only
    // ours has fp8, ids that are not uniform, and the ways of a product with an epilogue.
    const std::string tsv = slurp(folder / "results.tsv");
    const size_t alone = count(tsv, "\tlinear up fp8 ") + count(tsv, "\tembedding, skewed ids\t") +
                         count(tsv, ", cublaslt\t") + count(tsv, ", parts\t");
    CHECK_THAT(outcome.out, ContainsSubstring(concat("(", count(tsv, "kernel\tours\t") - alone, " operations)")));
    CHECK(count(outcome.out, "| PyTorch | 2 |") == 1);
    CHECK(count(outcome.err, "failed") == 0);
}

TEST_CASE("make bench-cpu: a table of rounds", "[program][harness]") {
    if (!device().is_cpu) SKIP_TEST("it measures the CPU build");
    if (run_shell("python3 -c ''").status != 0) SKIP_TEST("needs Python");
    const TempFolder folder;
    const std::string toy = folder / "toy.json";
    spit(toy,
         R"({"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 300, "n_positions": 128})");
    const Outcome outcome = run_script("bench_cpu.py", "LLM_PYTHON= LLMC= ROUNDS=2 STEPS=1 MODEL=" + toy);
    INFO(outcome.err << outcome.out);
    REQUIRE(outcome.status == 0);
    for (const char* dtype : {"float32", "bf16"}) {
        CHECK(count(outcome.out, concat("| llm.cu, ", dtype, " | ")) == 1);
        CHECK(count(outcome.err, concat("round 2: llm.cu, ", dtype)) == 1);
    }
    CHECK(count(outcome.out, " | 1.00 | 1.00 |") == 2);  // times ours
    CHECK(count(outcome.out, "of our float32 step") == 1);
    const Outcome wrong = run_shell(program_path("dev/bench_cpu") + " --model");
    CHECK(wrong.status == 2);
    CHECK_THAT(wrong.err, ContainsSubstring("--model needs a value"));
}

TEST_CASE("bench_torch: a LLaMA in bf16 learns, and one that does not is an error", "[program][harness]") {
    if (!torch_is_here()) SKIP_TEST("needs PyTorch; LLM_PYTHON names the Python that has it");
    const TempFolder folder;
    REQUIRE(run_shell(concat(program_path("dev/bench_report"), " config tiny > ", folder / "tiny.json")).status == 0);
    const std::string command =
        concat("OMP_NUM_THREADS=1 ", python_name(), " dev/bench_torch.py train --config ", folder / "tiny.json",
               " --batch 2 --seq 16 --dtype bf16 --steps 2 --budget 0.001 ");
    const Outcome learns = run_shell(command + "--precision master");
    INFO(learns.err);
    CHECK(learns.status == 0);
    CHECK_THAT(learns.out, ContainsSubstring("train\tPyTorch\t16\t2\t"));
    CHECK_THAT(learns.out, ContainsSubstring("master bf16"));
    const Outcome still = run_shell(command + "--precision pure --lr 0");
    CHECK(still.status == 2);
    CHECK_THAT(still.err, ContainsSubstring("does not go down"));
}

TEST_CASE("bench_report: shares, ratios and MFU by hand", "[program][harness]") {
    const TempFolder folder;
    REQUIRE(run_shell(concat(program_path("dev/bench_report"), " config tiny > ", folder / "tiny.json")).status == 0);
    const std::string head =
        "info\tdevice\ta "
        "device\ninfo\tdate\ttoday\nlimit\tours\tcopy\t1e9\nlimit\tPyTorch\tcopy\t2e9\nlimit\tours\tmatmul f32\t1e12\n";
    const double flops = flops_per_token(load_config("tiny"), 64);
    // Tokens/s at which the model's operations are half the matmul rate.
    const std::string half_of_limit = format("%.10g", 0.5e12 / flops);
    spit(folder / "results.tsv",
         head +
             // 2e6 bytes at 2e9 bytes/s are 1 ms; ours takes 2 ms: half the limit. PyTorch's best takes 3 ms.
             "kernel\tours\ttiny\tgelu\tforward\tN=1\t2e-3\t2e6\t0\nkernel\teager\ttiny\tgelu\tforward\tN=1\t8e-"
             "3\t0\t0\n"
             "kernel\tcompile\ttiny\tgelu\tforward\tN=1\t3e-3\t0\t0\n"
             // Two ways to attention, against the same time of PyTorch's.
             "kernel\tours\ttiny\tattention\tforward\tB=1\t2e-3\t2e6\t0\n"
             "kernel\tours\ttiny\tattention hopper\tforward\tB=1\t1e-3\t2e6\t0\n"
             "kernel\tsdpa cudnn\ttiny\tattention\tforward\tB=1\t4e-3\t0\t0\n"
             "train\tours\ttiny\t64\t4\t1000\t0\tslow batch\ntrain\tours\ttiny\t64\t8\t" +
             half_of_limit +
             "\t1048576\tnote\n"
             "train\tPyTorch\ttiny\t64\t8\t1000\t0\tnote\n");
    const std::string command = concat(program_path("dev/bench_report"), " results ", folder.path);
    const std::string out = must_succeed(run_shell(command));
    INFO(out);
    CHECK_THAT(out, ContainsSubstring("| gelu | forward | N=1 | 2000 | 1000 | 50 % | 8000 | 3000 |  | 1.50 |"));
    CHECK_THAT(out, ContainsSubstring("| attention | forward | B=1 | 2000 | 1000 | 50 % |  |  | 4000 cudnn | 2.00 |"));
    CHECK_THAT(
        out, ContainsSubstring("| attention hopper | forward | B=1 | 1000 | 1000 | 100 % |  |  | 4000 cudnn | 4.00 |"));
    CHECK_THAT(out, ContainsSubstring("Geometric mean of the ratios: 1.73 (2 operations)"));  // sqrt(1.5 * 2)
    CHECK_THAT(out, ContainsSubstring("| 50.0 % | 1.00 MiB |"));
    CHECK(count(out, "slow batch") == 0);
    CHECK_THAT(out, ContainsSubstring(format("| %.2f | note |", 0.5e12 / flops / 1000)));

    // A run that measured no limit has no MFU.
    spit(folder / "results.tsv", "train\tours\ttiny\t64\t4\t1000\t0\tnote\n");
    CHECK_THAT(run_shell(command).out, ContainsSubstring("| 4 | 1k |  |  |  | note |"));

    // Shapes that differ, and lines that nobody writes.
    for (const std::string bad :
         {"kernel\tours\ttiny\tgelu\tforward\tN=1\t1\t1\t1\nkernel\teager\ttiny\tgelu\tforward\tN=2\t1\t0\t0\n",
          "kernel\tours\n", "limit\tours\tcopy\tmuch\n", "nonsense\n"}) {
        spit(folder / "results.tsv", head + bad);
        CHECK(run_shell(command).status == 2);
    }
}

TEST_CASE("bench_report: a profile of three steps by hand", "[program][harness]") {
    const TempFolder folder;
    REQUIRE(run_shell(concat(program_path("dev/bench_report"), " config tiny > ", folder / "tiny.json")).status == 0);
    spit(folder / "results.tsv", "limit\tours\tcopy\t1e9\nlimit\tours\tmatmul f32\t1e12\nstep\ttiny\t2\t16\tfp32\n");
    // Steps of 10 ms: a product of 6 ms in two launches, RoPE for 1 ms, AdamW in two launches of 1 ms,
    // and 1 ms of nothing.
    std::string trace = "0\t500\tfill_kernel\n";
    for (int64_t step = 0; step < 6; ++step) {
        const auto at = [&](int64_t from_us, int64_t us, const std::string& name) {
            trace += concat(step * 10000000 + from_us * 1000, "\t", us * 1000, "\t", name, "\n");
        };
        at(1000, 3000, "void nvjet_tst_128x256(CUtensorMap)");
        at(4000, 3000, "nvjet_tst_128x256");
        at(7000, 1000, "void (anonymous namespace)::rope_kernel<float, 4>(float*, float const*)");
        at(8000, 1000, "void (anonymous namespace)::elementwise_kernel<(anonymous namespace)::AdamW, float>(float*)");
        at(9000, 1000, "void (anonymous namespace)::elementwise_kernel<(anonymous namespace)::AdamW, float>(float*)");
    }
    spit(folder / "trace.tsv", trace + "60001000\t1\tafter_kernel\n60002");  // the last line was cut off by a kill
    // The account of the step: one product, which the library does in two kernels; a copy, which the trace has not.
    const std::string zeros = "\t0\t0";
    spit(folder / "launches.tsv",
         "kernel\tgroup\tM\tN\tK\treads\twrites\tscratch\tagain\tflops\troofline_s\tpredicted_s\n"
         "memset\tcopies\t0\t0\t0\t0\t8" +
             zeros + zeros +
             "\t1e-6\n"
             "matmul\tblock products\t8\t8\t8\t10\t10" +
             zeros +
             "\t4e9\t4e-3\t5e-3\n"
             "rope_kernel\trotations\t0\t0\t0\t250000\t250000" +
             zeros +
             "\t9e9\t5e-4\t6e-4\n"
             "elementwise_kernel\toptimizer\t0\t0\t0\t1\t1" +
             zeros +
             "\t0\t1e-6\t1e-6\n"
             "elementwise_kernel\toptimizer\t0\t0\t0\t1\t1" +
             zeros + "\t0\t1e-6\t1e-6\n");
    const std::string out = must_succeed(run_shell(concat(program_path("dev/bench_report"), " profile ", folder.path)));
    INFO(out);
    CHECK_THAT(out, ContainsSubstring("10.000 ms per step (mean of 4)"));
    CHECK_THAT(out, ContainsSubstring("| block products | 6.000 | 60.0 % | 5.000 | 4.000 | 67 % | 2.000 |"));
    CHECK_THAT(out, ContainsSubstring("| optimizer | 2.000 | 20.0 % | 0.002 |"));
    CHECK_THAT(out, ContainsSubstring("| no kernel runs | 1.000 | 10.0 % |"));
    CHECK_THAT(out, ContainsSubstring("| `nvjet_tst_128x256` | block products | 2 | 6.000 | 60.0 % |"));
    CHECK_THAT(out, ContainsSubstring("| rotations | 1.000 | 10.0 % | 0.600 | 0.500 |"));
    CHECK_THAT(out, ContainsSubstring("| `rope_kernel<float, 4>` | rotations | 1 | 1.000 | 10.0 % | 50 % |"));
    CHECK(is_png(folder / "profile.png"));

    spit(folder / "trace.tsv", "0\t5\tAdamW\n9\t5\tmatmul\n");
    const Outcome few = run_shell(concat(program_path("dev/bench_report"), " profile ", folder.path));
    CHECK(few.status == 2);
    CHECK_THAT(few.err, ContainsSubstring("whole training steps"));
}

TEST_CASE("bench_report: a profile with the names and the extra kernels of a GPU's libraries", "[program][harness]") {
    const TempFolder folder;
    REQUIRE(run_shell(concat(program_path("dev/bench_report"), " config tiny > ", folder / "tiny.json")).status == 0);
    spit(folder / "results.tsv", "limit\tours\tcopy\t1e9\nlimit\tours\tmatmul f32\t1e12\nstep\ttiny\t2\t16\tbf16\n");
    // What a step on an H100 has: cuBLASLt fills its workspace before a product, adds up parts of K after it, or sums a
    // bias' gradient. A bias' gradient is once in a kernel of ours that the account has elsewhere. Times in us.
    const std::vector<std::pair<int64_t, std::string>> step = {
        {1, "memcpy"},
        {10, "void (anonymous namespace)::embedding_forward_kernel<__nv_bfloat16, 8>(__nv_bfloat16*, int const*)"},
        {1, "memset"},
        {1000, "nvjet_sm90_tst_96x128_64x7_2x1_v_bz_geluauxbias_auxt_TNN"},
        {200, "void (anonymous namespace)::layernorm_forward_kernel<__nv_bfloat16, 8, 24>(__nv_bfloat16*, long)"},
        {2, "memset"},
        {3000, "nvjet_sm90_tst_176x128_64x5_1x2_h_bz_TNN"},
        {700, "void (anonymous namespace)::cross_entropy_kernel<__nv_bfloat16, 8, true>(float*, __nv_bfloat16*)"},
        {3, "memset"},
        {2000, "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64_warpgroupsize1x1x1_aux_bf16_dgelu"},
        {900, "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_splitK_NTN"},
        {30,
         "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)"},
        {60, "void cublasLt::epilogue::impl::globalKernelBgradAB_v2<8, 128, __nv_bfloat16>(int, int, int)"},
        {40, "void (anonymous namespace)::column_sum_kernel<__nv_bfloat16>(__nv_bfloat16*, __nv_bfloat16*)"},
        {5, "void (anonymous namespace)::forgotten_kernel<float>(float*)"},
        {20, "void (anonymous namespace)::column_sum_kernel<__nv_bfloat16>(__nv_bfloat16*, __nv_bfloat16*)"},
        {8, "memset"},
        {300, "void (anonymous namespace)::embedding_backward_kernel<__nv_bfloat16>(__nv_bfloat16*)"},
        {500,
         "void (anonymous namespace)::adamw_kernel<(anonymous namespace)::WeightFormat<float>, "
         "__nv_bfloat16>(float*)"}};
    std::string trace = "0\t500\tfill_kernel\n";
    for (int64_t i = 1; i < 7; ++i) {
        int64_t at = i * 10000000;
        for (const auto& [us, name] : step) trace += concat(at, "\t", us * 1000, "\t", name, "\n"), at += us * 1000;
    }
    spit(folder / "trace.tsv", trace + "70000000\t1\tafter_kernel\n");
    std::string launches = "kernel\tgroup\tM\tN\tK\treads\twrites\tscratch\tagain\tflops\troofline_s\tpredicted_s\n";
    for (const auto& [kernel, group] :
         std::vector<std::pair<std::string, std::string>>{{"memcpy", "copies"},
                                                          {"embedding_forward_kernel", "embedding"},
                                                          {"matmul", "block products"},
                                                          {"layernorm_forward_kernel", "norms"},
                                                          {"matmul", "head products"},
                                                          {"cross_entropy_kernel", "cross-entropy"},
                                                          {"matmul", "block products"},
                                                          {"matmul", "block products"},
                                                          {"column_sum_kernel", "column sums"},
                                                          {"memset", "copies"},
                                                          {"embedding_backward_kernel", "embedding"},
                                                          {"adamw_kernel", "optimizer"}})
        launches += concat(kernel, "\t", group, "\t0\t0\t0\t10\t10\t0\t0\t0\t1e-6\t1e-3\n");
    spit(folder / "launches.tsv", launches);
    const std::string out = must_succeed(run_shell(concat(program_path("dev/bench_report"), " profile ", folder.path)));
    INFO(out);
    // A part, its time, its share of 10 ms, and 1 ms predicted for each of its launches.
    for (const std::string row :
         {"| block products | 3.994 | 39.9 % | 3.000 |", "| head products | 3.002 | 30.0 % | 1.000 |",
          "| norms | 0.200 | 2.0 % | 1.000 |", "| cross-entropy | 0.700 | 7.0 % | 1.000 |",
          "| column sums | 0.060 | 0.6 % | 1.000 |", "| embedding | 0.310 | 3.1 % | 2.000 |",
          "| copies | 0.009 | 0.1 % | 2.000 |", "| optimizer | 0.500 | 5.0 % | 1.000 |",
          "| not in the account | 0.005 | 0.1 % |"})
        CHECK_THAT(out, ContainsSubstring(row));
}

TEST_CASE("make profile: a step of a toy model by kernel", "[program][harness]") {
#ifdef CUDA_ON_CPU
    const TempFolder folder;
    const std::string out = must_succeed(run_script("profile.sh", "PROFILE_OUT=" + folder.path));
    INFO(out);
    for (const std::string part : {"| block products |", "| head products |", "| attention backward |", "| norms |",
                                   "| optimizer |", "| cross-entropy |", "| `matmul` |", "| rotations and heads |"})
        CHECK_THAT(out, ContainsSubstring(part));
    CHECK(count(out, "| not in the account |") == 0);
    CHECK(is_png(folder / "profile.png"));
#else
    SKIP_TEST("at toy sizes on the CPU device only");
#endif
}

TEST_CASE("make gpu-check: the table, and what fails", "[program][harness]") {
    const TempFolder folder;
    const std::string variables =
        "CHECK_TESTS=swiglu CHECK_STEPS='tests nccl full_size sanitizers' CHECK_OUT=" + folder.path;
#ifdef CUDA_ON_CPU
    const Outcome outcome = run_script("gpu_check.sh", variables);
    INFO(outcome.err << outcome.out);
    CHECK(outcome.status == 0);
    for (const std::string row :
         {"| tests | ok |", "| full size | ok |", "| strict mode, seed 1 | ok |", "| strict mode, seed 2 | ok |"})
        CHECK_THAT(slurp(folder / "table.md"), ContainsSubstring(row));
    CHECK_THAT(slurp(folder / "log.txt"), ContainsSubstring("==== strict mode"));
#endif
    // The GPU's way through the script, with tests and a compute-sanitizer that pretend: racecheck finds something.
    const std::string build = folder / "build-cuda", bin = folder / "bin";
    std::filesystem::create_directories(build);
    std::filesystem::create_directories(bin);
    // There are two GPUs, of which tests see one.
    make_executable(build + "/run_tests", pretend_to_test("a test") +
                                              "[ \"$CUDA_VISIBLE_DEVICES\" = 1 ] || exit 1\n"
                                              "echo 'All tests passed (3 assertions in 1 test case)'\n");
    make_executable(
        bin + "/nvidia-smi",
        "[ \"$1\" = -L ] && printf 'GPU 0: Pretender\nGPU 1: Pretender\n' || echo 'NVIDIA Pretender, 1.2'\n");
    make_executable(bin + "/mpirun",
                    "case \"$*\" in *'-np 2 '*/comm_check' --comm nccl check') ;; *) exit 1 ;; esac\n");
    make_executable(bin + "/compute-sanitizer",
                    "[ $2 = racecheck ] && { echo '========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 "
                    "warnings)'; exit 86; }\n"
                    "echo \"========= ERROR SUMMARY: 0 errors\"; shift 8; \"$@\"\n");
    const Outcome pretended =
        run_script("gpu_check.sh", concat("PATH=", bin, ":$PATH CUDA_VISIBLE_DEVICES=1,0 ", variables), build);
    INFO(pretended.err << pretended.out);
    CHECK(pretended.status == 1);
    const std::string table = slurp(folder / "table.md");
    for (const std::string row :
         {"NVIDIA Pretender, 1.2", "| tests | ok |", "| NCCL on 2 GPUs | ok |", "| memcheck | ok |",
          "| racecheck | FAILED |", "1 hazard", "| initcheck | ok |", "| synccheck | ok |"})
        CHECK_THAT(table, ContainsSubstring(row));

    // Tests that fail, tests that take too long.
    make_executable(build + "/run_tests",
                    pretend_to_test("a test") + "echo 'test cases: 2 | 1 passed | 1 failed'; exit 1\n");
    const Outcome failing =
        run_script("gpu_check.sh",
                   concat("PATH=", bin, ":$PATH CHECK_STEPS=tests CHECK_TESTS=gelu CHECK_OUT=", folder.path), build);
    CHECK(failing.status == 1);
    CHECK_THAT(failing.out, ContainsSubstring("| tests | FAILED |") && ContainsSubstring("0 passed, 1 failed"));
    make_executable(build + "/run_tests", "sleep 60\n");
    const Outcome slow = run_script(
        "gpu_check.sh",
        concat("PATH=", bin, ":$PATH CHECK_SECONDS=2 CHECK_STEPS=tests CHECK_TESTS=gelu CHECK_OUT=", folder.path),
        build);
    CHECK(slow.status == 1);
    CHECK_THAT(slow.out, ContainsSubstring("| tests | STOPPED |"));
}

TEST_CASE("Ctrl-C ends make test and make gpu-check with what they have started", "[program][harness]") {
    const TempFolder folder;
    const auto interrupted = [](const std::string& script) {
        // When the test runs; and twice, as timeout sends it. (bash loses one that comes during $(...), now and then.)
        const Outcome outcome = run_shell(concat(
            "setsid env --default-signal=INT ", script, " & timeout 20 sh -c \"until pgrep -f 'slee[p]",
            left_running.substr(5), "'; do sleep 0.02; done\"; sleep 0.2; kill -s INT -- -$!; ",
            "kill -s INT -- -$!; timeout 20 tail -s 0.05 --pid=$! -f /dev/null || kill -s KILL -- -$!; wait $!"));
        INFO(script << ": " << outcome.err << outcome.out);
        CHECK(outcome.status != 128 + SIGKILL);
        CHECK(!is_left_running());
    };
    // A test that does not see it, as one that waits for a program does not.
    const std::string test = pretend_to_test("a test") + "trap '' INT; " + left_running + "\n";
    std::filesystem::create_directories(folder / "build-cuda");
    make_executable(folder / "build-cuda/run_tests", test);
    interrupted(concat("CHECK_STEPS=kernel_tests CHECK_TESTS=gelu CHECK_OUT=", folder.path, " dev/gpu_check.sh ",
                       folder / "build-cuda"));
#ifdef CUDA_ON_CPU
    // run.sh takes folders whose names begin with build/cpu.
    const std::string build = std::filesystem::relative(build_folder()).string();
    make_executable(folder / "run_tests", test);
    interrupted(concat("test/run.sh ", build, "/../../../../../../../../../../..", folder.path));
#endif
}

TEST_CASE("make gpu-window: a kernel that hangs and one that traps do not stop the rest", "[program][harness]") {
    // A GPU's machine on which everything pretends.
    const TempFolder folder;
    const std::string build = folder / "build-cuda", bin = folder / "bin";
    std::filesystem::create_directories(build);
    std::filesystem::create_directories(bin);
    make_executable(bin + "/nvidia-smi", "echo 'NVIDIA Pretender, 1.2'\n");
    make_executable(build + "/run_tests",
                    pretend_to_test("works\\nhangs\\ntraps\\nleaves") +
                        "case $1 in hangs) trap '' TERM; while :; do sleep 1; done ;;"
                        " traps) echo 'CUDA: an illegal instruction was trapped: error'; exit 42 ;;" +
                        concat(" leaves) timeout 60 ", left_running, " & echo ok ;;") + " *) echo ok ;; esac\n");
    const Outcome outcome = run_script(
        "gpu_window.sh",
        concat("PATH=", bin,
               ":$PATH WINDOW_STEPS='smoke training' SMOKE_SECONDS=2 WINDOW_SECONDS=60 WINDOW_OUT=", folder / "out"),
        build);
    INFO(outcome.err << outcome.out);
    CHECK(outcome.status == 1);
    const std::string table = slurp(folder / "out/table.md");
    for (const std::string row :
         {"gpu-window on NVIDIA Pretender, 1.2, 60 s", "| smoke: hangs (STOPPED after 2 s)",
          "| smoke: traps (status 42, ", " s): CUDA: an illegal instruction was trapped",
          "2 passed, 2 failed; what follows uses --attention mma", "| training: gpt2, bf16, 64 x 1024 | FAILED"})
        CHECK_THAT(table, ContainsSubstring(row));
    CHECK(count(table, "smoke: works") == 0);
    CHECK_THAT(outcome.out, ContainsSubstring(table));
    CHECK(!is_left_running());

    // Where only a product is wrong, attention stays what it is.
    make_executable(build + "/run_tests", pretend_to_test("works\\nmatmul: ours for Hopper") +
                                              "case $1 in matmul*) exit 1 ;; *) echo ok ;; esac\n");
    CHECK_THAT(run_script("gpu_window.sh",
                          concat("PATH=", bin, ":$PATH WINDOW_STEPS=smoke WINDOW_OUT=", folder / "out"), build)
                   .out,
               ContainsSubstring("1 passed, 1 failed; what follows uses --attention auto"));

    // What the scripts of the steps log is kept: why a program failed, and which test.
    std::filesystem::create_directories(build + "/dev");
    std::filesystem::create_symlink(program_file("dev/bench_report"), build + "/dev/bench_report");
    make_executable(build + "/dev/bench_kernels", "");
    make_executable(build + "/train_gpt", "echo 'train_gpt: an illegal memory access' >&2; exit 2\n");
    make_executable(build + "/run_tests", pretend_to_test("is wrong") + "exit 1\n");
    const Outcome failed = run_script(
        "gpu_window.sh",
        concat("PATH=", bin, ":$PATH WINDOW_STEPS='training tests' MODEL=tiny BATCH=2 SEQ=32 WINDOW_SECONDS=60 ",
               "WINDOW_OUT=", folder / "out"),
        build);
    INFO(failed.err << failed.out);
    CHECK_THAT(failed.out, ContainsSubstring("| training: tiny, bf16, 2 x 32 | FAILED (1) | ") &&
                               ContainsSubstring(" | train_gpt: an illegal memory access ") &&
                               ContainsSubstring(" | kernel tests: FAILED, memcheck: "));
    CHECK_THAT(slurp(folder / "out/log.txt"), ContainsSubstring("FAILED: is wrong (status 1, "));

#ifdef CUDA_ON_CPU
    // A line of the table says what was measured, and without whom.
    run_script("gpu_window.sh",
               concat("WINDOW_STEPS='profile kernels torch' LLM_PYTHON=false WINDOW_OUT=", folder / "out"));
    CHECK_THAT(slurp(folder / "out/table.md"), ContainsSubstring(" ms per step (mean of ") &&
                                                   ContainsSubstring(" TFLOP/s (false has no torch)") &&
                                                   ContainsSubstring(" tokens/s  (false has no torch)"));
#endif

    // Nor does a test leave a program to the next one.
    make_executable(build + "/run_tests", concat(pretend_to_test("leaves"), left_running, " &\n"));
    CHECK(run_shell("test/run_each.sh " + build).status == 0);
    CHECK(!is_left_running());
}

TEST_CASE("make builds for a GPU that the kernels run on, and says why if not", "[program][harness]") {
    const TempFolder folder;
    make_executable(folder / "nvcc",
                    "case $1 in --list-gpu-code) printf 'sm_%s\\n' 75 80 86 90 ;; "
                    "*) echo \"Cuda compilation tools, release ${RELEASE:-13.0}, V1\" ;; esac\n");
    make_executable(folder / "nvidia-smi",
                    "case \"$*\" in -L) echo 'GPU 0: Pretender' ;; *compute_cap*) echo \"$CAP\" ;; "
                    "*) echo Pretender ;; esac\n");
    const auto make = [&](const std::string& variables, const std::string& flags) {
        const Outcome outcome = run_shell(
            concat("env -u MAKEFLAGS -u MAKELEVEL -u DEVICE -u ARCH -u NVCC -u CUDA_HOME PATH=", folder.path, ":$PATH ",
                   variables, " make -n V=1 ", flags, " build/cpu/layers/gelu.o build/cuda/layers/gelu.o"));
        return outcome.out + outcome.err;
    };
    CHECK_THAT(make("CAP=8.6", ""), ContainsSubstring("(DEVICE=cuda): nvcc is here, and a GPU: Pretender.") &&
                                        ContainsSubstring("code=sm_86"));
    CHECK_THAT(make("CAP=7.0", ""),
               ContainsSubstring("(DEVICE=cpu): the GPU here is older than compute capability 7.5"));
    CHECK_THAT(make("CAP=\"$(printf '7.0\\n9.0')\"", ""),
               ContainsSubstring("(DEVICE=cuda)") && ContainsSubstring("code=sm_90a") && !ContainsSubstring("sm_70"));
    CHECK_THAT(make("CAP=7.5", ""), ContainsSubstring("(DEVICE=cuda)") && ContainsSubstring("code=sm_75"));
    CHECK_THAT(make("CAP=12.0 RELEASE=12.4", ""),
               ContainsSubstring("(DEVICE=cpu): the nvcc of CUDA 12.4 cannot compile for the GPU here, sm_120: "));
    CHECK_THAT(make("CAP=8.6 RELEASE=11.5", ""),
               ContainsSubstring("(DEVICE=cpu): ") && ContainsSubstring("older than CUDA 12."));
    CHECK_THAT(make("RELEASE=11.5", "DEVICE=cuda"),
               ContainsSubstring("DEVICE=cuda needs the nvcc of CUDA 12 or newer"));
    CHECK_THAT(make("", "DEVICE=cuda ARCH='70 80'"), ContainsSubstring("ARCH=70 80: the kernels need 75"));
    CHECK_THAT(make("CUDA_HOME=/nowhere", ""), ContainsSubstring("(DEVICE=cpu): no nvcc in CUDA_HOME=/nowhere."));
    // A distribution's package: its headers are in /usr/include, which g++ must not search before its own.
    CHECK_THAT(make("CUDA_HOME=/usr CAP=8.6", "NVCC=nvcc"),
               ContainsSubstring("(DEVICE=cuda)") && !ContainsSubstring("-isystem /usr/include"));
}

TEST_CASE("make gpu-bundle: what a machine without a network lacks", "[program][harness]") {
    const TempFolder folder;
    const std::string bundle = folder / "bundle";
    const Outcome outcome = run_script("gpu_bundle.sh", "", bundle);
    if (outcome.err.find("here: ./install.sh first") != std::string::npos)
        SKIP_TEST("needs the packages that a bundle is made of: ./install.sh");
    INFO(outcome.err << outcome.out);
    REQUIRE(outcome.status == 0);
    // The headers alone are enough for a program that uses all of them.
    spit(folder / "program.cpp",
         "#include <CLI/CLI.hpp>\n#include <json/json.h>\n#include <httplib.h>\n#include <stb/stb_image_write.h>\n"
         "#if __has_include(<catch2/catch_all.hpp>)\n#include <catch2/catch_all.hpp>\n#else\n#include "
         "<catch2/catch.hpp>\n#endif\nint main() {}\n");
    const Outcome compiled =
        run_shell(concat("g++ -std=c++20 -fsyntax-only -H -I", bundle, "/include ", folder / "program.cpp"));
    INFO(compiled.err);
    CHECK(compiled.status == 0);
    for (const std::string header : {"CLI/CLI.hpp", "json/json.h", "httplib.h", "stb/stb_image_write.h"})
        CHECK_THAT(compiled.err, ContainsSubstring(bundle + "/include/" + header));
    CHECK(run_shell(concat("[ $(du -sk ", bundle, " | cut -f 1) -lt 60000 ]")).status == 0);
}

namespace {

// The program: where there are several, python3 may be a script that looks for it. Empty if there is none.
std::string python_itself() {
    const std::string path = run_shell("python3 -c 'import sys; print(sys.executable)'").out;
    return path.substr(0, path.find('\n'));
}
std::string with_python(std::string command, const std::string& python) {
    const size_t at = command.find("python3 ");
    return at == std::string::npos ? command : command.replace(at, 7, python);
}

}  // namespace

TEST_CASE("scripts refuse what they cannot use, in one line", "[program][harness]") {
    const std::string python = python_itself();
    const std::pair<const char*, const char*> cases[] = {
        {"dev/bench.sh build/none", "there is no build/none/dev/bench_report"},
        {"dev/profile.sh build/none", "there is no build/none/dev/bench_report"},
        {"test/run.sh build/none", "there is no build/none/run_tests"},
        {"test/run_each.sh build/none", "there is no build/none/run_tests"},
        {"test/gpu_choices.sh build/none", "there is no build/none/run_tests"},
        {"test/count_bytes.sh none none", "not 'none'"},
        {"test/fuzz.sh 1 none", "there is no build/fuzz/none"},
        {"test/fuzz.sh none", "give whole seconds"},
        {"dev/data/fetch.sh fineweb-edu 0", "give the number of shards"},
        {"CHECK_STEPS=test dev/gpu_check.sh build/none", "CHECK_STEPS: test: use some of"},
        {"WINDOW_STEPS=test dev/gpu_window.sh build/none", "WINDOW_STEPS: test: use some of"},
        {"ROUNDS=0 python3 dev/bench_cpu.py", "ROUNDS=0: give whole numbers"},
        {"DTYPES=fp16 python3 dev/bench_cpu.py", "DTYPES=fp16: give fp32"},
        {"python3 dev/bench_cpu.py build/none", "dev/bench_cpu: `make bench-cpu` builds it"},
        {"LLM_PYTHON= python3 dev/bench_inference.py", "LLM_PYTHON must name"},
        {"LLM_PYTHON=python3 BATCHES=8,x python3 dev/bench_inference.py", "BATCHES=x: give whole numbers"},
        {"python3 dev/long_functions.py none.cu", "there is no file none.cu"}};
    for (const auto& [command, reason] : cases) {
        const std::string text = command;
        if (python.empty() && text.find("python3") != std::string::npos) continue;
        INFO(command);
        const Outcome outcome = run_shell(with_python(text, python));
        CHECK(outcome.status == 2);
        CHECK_THAT(outcome.out + outcome.err, ContainsSubstring(reason));
        CHECK(count(outcome.out + outcome.err, "\n") == 1);
    }
    // With several lines: argparse's usage, or the head of the script, from another folder, too.
    for (const char* command :
         {"python3 dev/readme_commands.py '('", "python3 dev/docs.py", "python3 dev/floors.py --none",
          "python3 dev/includes.py none", "python3 test/golden/runs/runs.py check none", "cd dev/data && ./fetch.sh",
          "python3 test/golden/runs/runs.py show sgd none", "cd dev && ./bench.sh", "cd dev && ./gpu_bundle.sh",
          "cd test && ./run_each.sh"}) {
        if (python.empty() && std::string(command).find("python3") != std::string::npos) continue;
        INFO(command);
        const Outcome outcome = run_shell(with_python(command, python));
        CHECK(outcome.status == 2);
        CHECK(count(outcome.out + outcome.err, "Traceback") == 0);
        CHECK(count(outcome.out + outcome.err, "\n") > 1);
    }
    CHECK(!std::filesystem::exists("build/none"));
}

TEST_CASE("Ctrl-C ends a script of ours without a traceback", "[program][harness]") {
    const std::string python = python_itself();
    if (python.empty()) SKIP_TEST("needs Python");
    const TempFolder folder;  // what the scripts start sends them the signal
    spit(folder / "bash", "#!/bin/sh\nkill -INT $PPID\nsleep 0.2\n");
    REQUIRE(run_shell(concat("cd ", folder.path, " && chmod +x bash && mkdir dev && cp bash dev/bench_cpu && ",
                             "cp bash dev/bench_report"))
                .status == 0);
    for (const std::string& script : {concat("PATH=", folder.path, ":$PATH python3 dev/readme_commands.py"),
                                      concat("python3 test/golden/runs/runs.py check ", folder / "bash sgd"),
                                      concat("python3 dev/bench_cpu.py ", folder.path)}) {
        INFO(script);
        const Outcome outcome = run_shell(with_python(script, python));
        CHECK(outcome.status == 130);
        CHECK(outcome.out + outcome.err == "");
    }
}
