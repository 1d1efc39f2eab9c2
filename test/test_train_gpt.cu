// test/test_train_gpt.cu: the training program from outside. Resuming, being killed, bad input, what it leaves behind.
#include "file_size_limit.h"
#include "io/io.h"
#include "json.h"
#include "optim/optim.h"
#include "run_models.h"
#include "training/training.h"
#include "train_runs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

TEST_CASE("a run leaves a log, events, a plot and a checkpoint, and learns", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    const double start = seconds_now();
    const Outcome outcome = train("--out " + run + " --steps 60 --lr 1e-2 --sample 20", "OMP_NUM_THREADS=2");
    const double seconds = seconds_now() - start;
    INFO(outcome.err << outcome.out);
    REQUIRE(outcome.status == 0);
    const std::vector<LogRow> rows = read_csv_log(run + "/log.csv");
    REQUIRE(rows.size() == 60);
    double ms = 0;
    for (const LogRow& row : rows) {
        CHECK(*row.tokens_per_s * *row.step_ms == Approx(1e3 * 2 * 16).epsilon(0.01));
        CHECK(*row.mfu > 0);
        CHECK((row.grad_norm.has_value() && !row.loss_scale));  // which fp16 alone has
        ms += *row.step_ms;
    }
    CHECK((ms > 0 && ms < 1e3 * seconds));
    CHECK(*rows.front().loss == Approx(std::log(256.0)).margin(0.3));  // knows nothing: uniform over the bytes
    CHECK(*rows.back().loss < 3.0);
    CHECK(*rows.back().val_loss < 3.2);
    CHECK(rows.back().tokens == 60 * 2 * 16);
    CHECK(slurp(run + "/loss.png").substr(1, 3) == "PNG");
    CHECK(run_shell("ls " + run + "/events.out.tfevents.*").status == 0);
    for (const std::string file : {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"})
        CHECK(std::filesystem::exists(newest_checkpoint(run) + "/" + file));
    for (const std::string word : {"memory\n  weights  ", "sample before training", "sample after training",
                                   "parameters", "tok/s", "left", "total"})
        CHECK_THAT(outcome.out, ContainsSubstring(word));
}

TEST_CASE("--trace goes to the folder of the run, also on one rank", "[program][train_gpt]") {
    for (const std::string ranks : {"1", "2"}) {
        const TempFolder folder;
        const std::string out =
            must_succeed(run_shell(concat("cd ", folder.path, " && ", program_path("train_gpt"), " --data ",
                                          text_file(), kSmall, "--steps 3 --trace 2 --ranks ", ranks)));
        INFO(out);
        CHECK(folder.listing() == "runs");
        CHECK(slurp(folder / "runs/1/trace.png").substr(1, 3) == "PNG");
        const std::string json = slurp(folder / "runs/1/trace.json");
        for (const std::string words : {"forward of block 0", "backward of block 3", "update"}) {
            CHECK_THAT(out, ContainsSubstring(words));
            CHECK_THAT(json, ContainsSubstring(words));
        }
        CHECK_THAT(out, ContainsSubstring("runs/1/trace.json") && ContainsSubstring("runs/1/trace.png"));
        // The last step's line says nothing of the time that is left.
        const std::string last = out.substr(out.find("step 3/3"));
        CHECK(last.substr(0, last.find('\n')).find("left") == std::string::npos);
        CHECK_THAT(out, ContainsSubstring(" left"));
    }
}

// The whole run with all that overlaps steps, launches as a graph, a step ahead of its numbers; its end without it.
TEST_CASE("twenty steps equal seven, a stop, and the others, bit for bit", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string saves = " --save-every 7 --keep 0 ";
    std::vector<std::string> variants = {saves, " --micro-batch 1 --schedule wsd "};
    for (const std::string precision : {" ", " --dtype bf16 --master none "})
        for (const std::string& optimizer : optimizer_names())
            variants.push_back(precision + "--optimizer " + optimizer + " ");
    for (const std::string precision :
         {"--dtype bf16", "--dtype bf16 --recompute 2 --grad-dtype fp32", "--dtype fp16",
          "--dtype fp16 --micro-batch 1", "--dtype fp16 --loss-scale 1024 --optimizer muon",
          "--dtype fp16 --loss-scale-interval 3 --optimizer adam8bit", "--dtype fp8",
          "--dtype fp8 --fp8 current --recompute 2 --micro-batch 1", "--dtype fp8 --fp8 block --recompute selective"})
        if (can_train(precision)) variants.push_back(" " + precision + " ");
    for (const std::string& variant : variants) {
        const std::string flags = variant + "--model " + model_file("deep-gqa") + " ";
        INFO(flags);
        const std::string whole = folder / "whole", parts = folder / "parts";
        const bool waits = flags.find("fp16") != std::string::npos || flags.find("fp8") != std::string::npos;
        const std::string ahead = waits ? "" : "--run-ahead on ";
        REQUIRE(train(flags + "--graph on " + ahead + "--out " + whole).status == 0);
        const std::string first = must_succeed(train(flags + ahead + "--out " + parts + " --stop-after 7"));
        CHECK_THAT(first, ContainsSubstring("--resume"));
        CHECK(read_csv_log(parts + "/log.csv").size() == 7);
        if (variant == saves) {  // and the step after it has not been launched then
            const std::string weights = "/checkpoints/step-00000007/model.safetensors";
            CHECK(slurp(whole + weights) == slurp(parts + weights));
        }
        const Outcome second =
            run_program("train_gpt", "--out " + parts + " --resume");  // the flags come from the checkpoint
        INFO(second.err);
        REQUIRE(second.status == 0);
        check_same_end(whole, parts);
        // A step's time is its own, also where the host reads its end when it has launched the next one.
        std::vector<double> ms;
        for (const LogRow& row : read_csv_log(whole + "/log.csv")) ms.push_back(row.step_ms.value());
        CHECK(ms.back() > 0.1 * *std::ranges::min_element(ms.begin() + 1, ms.end() - 1));
        std::filesystem::remove_all(whole);
        std::filesystem::remove_all(parts);
    }
}

TEST_CASE("--mask-documents changes the run, belongs to it, and needs documents", "[program][train_gpt]") {
    const TempFolder folder;
    std::filesystem::create_directories(folder / "text");
    for (int i = 0; i < 300; ++i) spit(folder / concat("text/", 1000 + i), concat("File ", i * i % 97, " of many.\n"));
    const std::string data = "--data " + (folder / "text") + " ", whole = folder / "whole", parts = folder / "parts",
                      plain = folder / "plain";
    const std::string masked = data + "--mask-documents --micro-batch 1 --recompute 2 ";
    must_succeed(train(masked + "--out " + whole));
    REQUIRE(train(masked + "--stop-after 10 --out " + parts).status == 0);
    REQUIRE(run_program("train_gpt", "--resume --out " + parts).status == 0);  // without the flag: it is the run's
    check_same_end(whole, parts);
    REQUIRE(train(data + "--micro-batch 1 --out " + plain + " --stop-after 10").status == 0);
    const std::vector<LogRow> with = read_csv_log(whole + "/log.csv"), without = read_csv_log(plain + "/log.csv");
    CHECK(*with[0].loss != *without[0].loss);  // the same weights and tokens
    CHECK(*with[0].loss == Approx(*without[0].loss).margin(0.2));
    Outcome other = run_program("train_gpt", "--resume --mask-documents --out " + plain);
    CHECK(one_line_with(line_of(other), "--mask-documents", "differs from the run in"));
    other = run_program("train_gpt", "--resume --init gpt2 --out " + plain);
    CHECK(one_line_with(line_of(other), "--init gpt2", "which has no --init: leave"));
    CHECK(run_program("train_gpt", "--resume --mask-documents --out " + parts).status == 0);
}

TEST_CASE("the same command twice gives the same bits", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string a = folder / "a", b = folder / "b";
    REQUIRE(train("--out " + a).status == 0);
    REQUIRE(train("--out " + b).status == 0);
    check_same_end(a, b);
}

TEST_CASE("a run killed at any moment resumes to the same end", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string whole = folder / "whole", killed = folder / "killed";
    const std::string flags = "--steps 60 --save-every 2 ";
    REQUIRE(train(flags + "--out " + whole).status == 0);
    bool started = false;
    for (int kill = 0; kill < 8; ++kill) {
        const std::string arguments =
            started ? "--out " + killed + " --resume" : "--data " + text_file() + kSmall + flags + "--out " + killed;
        const Outcome outcome =
            run_program("train_gpt", arguments, concat("timeout --foreground -s KILL ", 0.35 + 0.11 * kill));
        INFO(outcome.err);
        // Killed: 137, or 124 from coreutils 8 (Ubuntu 22.04).
        CHECK((outcome.status == 137 || outcome.status == 124 || outcome.status == 0));
        started = latest_checkpoint(killed).has_value();
        if (started)  // whatever the kill left, the newest checkpoint is whole
            CHECK_NOTHROW(SafetensorsReader(newest_checkpoint(killed) + "/model.safetensors"));
        else std::filesystem::remove_all(killed);
    }
    const std::string arguments =
        started ? "--out " + killed + " --resume" : "--data " + text_file() + kSmall + flags + "--out " + killed;
    printed_by("train_gpt", arguments);
    check_same_end(whole, killed);
}

TEST_CASE("training goes on from a Hugging Face folder", "[program][train_gpt]") {
    const TempFolder folder;
    const Outcome outcome =
        train("--init test/golden/gpt2 --data " + (folder / "digits.txt") + " --out " + (folder / "run"),
              "for i in $(seq 2000); do printf '%s ' $i; done > " + (folder / "digits.txt") + ";");
    INFO(outcome.err);
    REQUIRE(outcome.status == 0);
    const std::string config = slurp(newest_checkpoint(folder / "run") + "/config.json");
    CHECK_THAT(config, ContainsSubstring("GPT2LMHeadModel"));
}

// Each case: one clear line on stderr, exit status 2, no output folder.
TEST_CASE("bad input ends with one line that says what to do", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    const auto file = [&](const std::string& name, const std::string& bytes) {
        spit(folder / name, bytes);
        return folder / name;
    };
    const auto llama_json = [&](const std::string& name, const std::string& replace, const std::string& by) {
        return file(name, replaced(slurp("test/golden/llama/config.json"), replace, by));
    };
    // A copy of the golden LLaMA with other bytes in its weights.
    const auto model_folder = [&](const std::string& name, const std::string& weights) {
        std::filesystem::create_directories(folder / name);
        std::filesystem::copy_file("test/golden/llama/config.json", folder / (name + "/config.json"));
        spit(folder / (name + "/model.safetensors"), weights);
        return folder / name;
    };
    const std::string weights = slurp("test/golden/llama/model.safetensors");
    const auto shard = [&](int32_t magic, int32_t version, int32_t n, size_t bytes, uint16_t token) {
        std::string header(1024, '\0');
        const int32_t fields[3] = {magic, version, n};
        std::memcpy(header.data(), fields, sizeof fields);
        std::string tokens;
        for (size_t i = 0; i < bytes / 2; ++i) tokens.append(reinterpret_cast<const char*>(&token), 2);
        return header + tokens;
    };
    struct Case {
        std::string arguments, says;
    };
    const std::vector<Case> cases = {
        {"--no-such-flag 3", "no-such-flag"},
        {"--steps", "steps"},
        {"--steps many", "many"},
        {"--steps 0", "must be positive"},
        {"--data " + (folder / "absent.txt"), "absent.txt"},
        {"--data " + file("empty.txt", ""), "empty"},
        {"--data " + file("short.txt", "tiny"), "short.txt"},
        {"--data ''", "--data is empty"},
        {"--val-fraction 1e-9", "the held-out part has 0 tokens"},
        {"--model " + std::string(3000, 'x'), "use one of tiny"},
        {"--seq 100000", "100000"},
        {"--val " + file("shortval.txt", "short"), "shortval.txt"},
        {"--data " + file("binary.txt", std::string("a\0b\0c", 5)), "binary.txt"},
        {"--model gpt7", "use one of tiny"},
        {"--model " + file("broken.json", "{ \"model_type\": "), "not valid JSON"},
        {"--model " + file("array.json", "[]"), "expected a JSON object"},
        {"--model " + file("bert.json", "{\"model_type\": \"bert\"}"), "bert"},
        {"--model " + llama_json("heads.json", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4"),
         "cannot share"},
        {"--model " + llama_json("odd.json", "\"head_dim\": 8", "\"head_dim\": 7"), "must be even"},
        {"--model " + llama_json("missing.json", "\"hidden_size\"", "\"hidden_sise\""), "\"hidden_size\" is missing"},
        {"--model " + llama_json("negative.json", "\"hidden_size\": 48", "\"hidden_size\": -48"), "-48"},
        {"--model " + llama_json("text.json", "\"hidden_size\": 48", "\"hidden_size\": \"48\""),
         "\"hidden_size\" is \"48\", expected a whole number"},
        {"--model " + llama_json("huge.json", "\"hidden_size\": 48", "\"hidden_size\": 99999999999999999999"),
         "\"hidden_size\" is 1e+20, expected a whole number from 1 to 2147483647"},
        {"--data " + file("ok.bin", shard(20240520, 1, 4000, 8000, 5)) + " --model test/golden/gpt2 --seq 64",
         "longer than the 32 positions"},
        {"--model test/golden/llama", "vocabulary"},
        {"--init " + (folder / "nowhere"), "nowhere"},
        {"--data " + file("ok.bin", shard(20240520, 1, 4000, 8000, 5)) + " --init " +
             model_folder("truncated", weights.substr(0, weights.size() / 2)),
         "truncated"},
        {"--data " + file("ok.bin", shard(20240520, 1, 4000, 8000, 5)) + " --init " +
             model_folder("dtype", replaced(weights, "\"F32\"", "\"I32\"")),
         "I32"},
        {"--data " + file("ok.bin", shard(20240520, 1, 4000, 8000, 5)) + " --init " +
             model_folder("shape", replaced(weights, "[76,48]", "[48,76]")),
         "(48, 76)"},
        {"--data " + file("ok.bin", shard(20240520, 1, 4000, 8000, 5)) + " --init " +
             model_folder("name", replaced(weights, "model.norm.weight", "model.norm.weighs")),
         "model.norm.weight"},
        {"--data " + file("foreign.bin", shard(12345, 1, 4000, 8000, 5)), "12345"},
        {"--data " + file("cut.bin", shard(20240520, 1, 4000, 4000, 5)), "cut.bin"},
        {"--data " + file("beyond.bin", shard(20240520, 1, 4000, 8000, 256)),
         "token id 256, beyond the model's vocabulary of 256"},
        {"--val-fraction 0 --data " + file("sixteen.txt", std::string(16, 'x')),
         "has 16 tokens, and --seq 16 needs 17"},
        {"--tokenizer " + (folder / "absent.json"), "absent.json"},
        {"--tokenizer " + file("word.json", "{\"model\": {\"type\": \"WordPiece\"}}"), "WordPiece"},
        {"--tokenizer " + (folder / "word.json") + " --data " + (folder / "ok.bin"), "WordPiece"},  // which needs none
        {"--batch 6 --micro-batch 4", "--micro-batch"},
        {"--schedule sawtooth", "sawtooth"},
        {"--optimizer adamax", "adamax"},
        {"--warmup 30", "warmup"},
        {"--beta2 1.5", "beta2"},
        {"--batch 4611686018427387904 --micro-batch 1", "2^40 tokens"},
        {"--clip -1", "--clip"},
        {"--clip 1e-50", "--clip"},
        {"--lr -1", "learning rate"},
        {"--dtype int3", "int3"},
        {"--temperature 0", "--temperature"},
        {"--temperature 1e-40", "--temperature"},
        {"--temperature 1e300", "--temperature"},
        {"--val-fraction 1", "--val-fraction"},
        {"--resume", "no checkpoint"},
        {"--mask-documents", "all of it is one document"},
        {"--model llama-8b --batch 64 --seq 8192 --data " + file("long.bin", shard(20240520, 1, 200000, 400000, 5)),
         "needs"},
        {"--model tiny --batch 4096 --seq 2064", "too large for the gradient of the embedding: use a smaller --micro"},
        {"--plan --model tiny --batch 4096 --seq 2064", "a micro-batch of 8454144 tokens"},
        {"--model gpt2", "give the model's --tokenizer"},
        {"--new-data", "--new-data belongs to --resume"},
        {"--account --ranks 2", "--account: it is that of one rank"},
        {"--eps 1e39", "--eps: in float32 it is inf"},
        {"--eot -2", "--eot -2: a token id, or -1"},
        {"--stop-after -1", "must not be negative"},
        {"--log-every -1", "must not be negative"},
        {"--ranks 2 --pp 2 --pipeline auto --memory-limit -1", "--memory-limit must not be negative"},
        {"--ranks 2 --pp 2 --pipeline 2bw --micro-batches 2 --clip 0 --val-every 0 --dtype fp8",
         "--pipeline 2bw with --dtype fp8"},
        {"--ranks 2 --pp 2 --sample 10", "--sample with --pp: no rank has the whole model"},
    };
    REQUIRE(cases.size() >= 25);
    for (const Case& c : cases) {
        // Later flags win: --out stands first, so that a case may set anything.
        const Outcome outcome = train("--out " + run + " " + c.arguments);
        INFO(c.arguments << "\nstderr: " << outcome.err);
        CHECK(one_line_with(line_of(outcome), c.says));
        CHECK(outcome.err.starts_with("train_gpt: "));
        CHECK_FALSE(std::filesystem::exists(run));
    }
    CHECK(run_program("train_gpt", "--resume").err ==
          "train_gpt: --resume needs --out DIR, the folder of the run to continue\n");
}

TEST_CASE("output that cannot be written is one clear line", "[program][train_gpt]") {
    const TempFolder folder;
    spit(folder / "file", "in the way");
    for (const std::string& out : {folder / "file/run", std::string("/proc/no/run"), folder / "file"}) {
        const Outcome outcome = train("--out " + out);
        INFO(outcome.err);
        CHECK(one_line_with(line_of(outcome), "train_gpt: ", out));
    }
    CHECK(slurp(folder / "file") == "in the way");
    std::filesystem::create_directories(folder / "blocked");
    std::filesystem::create_symlink("/proc/tty", folder / "blocked/checkpoints");  // where no folder can be made
    CHECK_THAT(line_of(train("--steps 1 --warmup 0 --out " + (folder / "blocked"))),
               ContainsSubstring("step 1 could not be saved, and no checkpoint was before it: cannot make the folder"));
    std::filesystem::create_symlink("/proc/tty", folder / "runs");
    const Outcome nowhere = run_shell(
        concat("cd ", folder.path, "; timeout 20 ", program_path("train_gpt"), " --seq 16 --data ", text_file()));
    CHECK_THAT(line_of(nowhere), ContainsSubstring("cannot make the folder runs/1: "));
    for (const std::string what : {"--plan", "--draw"})
        CHECK(run_shell(program_path("train_gpt") + " " + what + " > /dev/full").status == 2);
    // The first file that a run opens does not become standard output where that is closed.
    const std::string run = folder / "run";
    train("--steps 2 --save-every 1 --sample 0 --out " + run + " <&- >&-");
    CHECK(read_csv_log(run + "/log.csv").size() == 2);
}

TEST_CASE("a vocabulary that cannot be sampled from is trained without samples", "[program][train_gpt][plan]") {
    const TempFolder folder;
    spit(folder / "config.json", R"({"model_type": "gpt2", "vocab_size": 262145, "n_positions": 64, "n_embd": 8,
                                     "n_layer": 1, "n_head": 1, "activation_function": "gelu_new",
                                     "layer_norm_epsilon": 1e-5})");
    const std::string plan = "--plan --batch 1 --seq 8 --model " + folder.path;
    CHECK_THAT(line_of(run_program("train_gpt", plan)),
               ContainsSubstring("--sample 300: the model has 262145 tokens, and at most 262144 can be sampled from"));
    CHECK(run_program("train_gpt", plan + " --sample 0").status == 0);
}

TEST_CASE("a plan has a line for the recomputation of the run, and marks it", "[program][train_gpt][plan]") {
    for (const std::string choice : {"none", "selective", "2", "3", "4", "full"}) {
        const std::string plan = printed_by("train_gpt", "--plan --recompute " + choice);
        const size_t line = plan.find("\n  --recompute " + choice + " ");
        INFO(choice << plan);
        REQUIRE(line != std::string::npos);
        CHECK_THAT(plan.substr(line, plan.find('\n', line + 1) - line), ContainsSubstring("this run"));
    }
}

TEST_CASE("wrong variables of the environment are one clear line", "[program][train_gpt]") {
    const TempFolder folder;
    for (const auto& [variable, words] :
         {std::pair<std::string, std::string>{"OMPI_COMM_WORLD_SIZE=abc", "has started \"abc\" processes"},
          {"OMPI_COMM_WORLD_SIZE=", "has started \"\" processes"},
#ifdef CUDA_ON_CPU
          {"OMP_NUM_THREADS=100000", "OMP_NUM_THREADS asks for 100000 threads"},
#endif
          {"PMI_SIZE=-1", "has started \"-1\" processes"}})
        for (const std::string name : {"train_gpt", "generate"}) {
            const Outcome outcome = run_program(name, "--plan", variable);
            INFO(variable << " " << name << ": " << outcome.err);
            CHECK(one_line_with(line_of(outcome), words));
        }
#ifdef CUDA_ON_CPU
    CHECK(one_line_with(run_program("train_gpt", "--plan", "ulimit -s 400;").err.substr(0, 60), "a stack of 400 KiB"));
#endif
    // A rank alone, which nobody counted, is no mpirun.
    CHECK_THAT(run_program("train_gpt", "--plan", "OMPI_COMM_WORLD_RANK=1").out, ContainsSubstring("--recompute"));
}

#ifdef CUDA_ON_CPU
TEST_CASE("where the host's memory ends is one clear line, whoever asked for it", "[program][train_gpt]") {
    for (int mib = 60; mib < 300; mib += 10) {
        const TempFolder folder;
        const Outcome outcome = run_program("train_gpt", "--steps 1 --sample 0 --val-every 0 --out " + (folder / "run"),
                                            concat("ulimit -c 0 -v ", mib << 10, "; OMP_NUM_THREADS=2 exec"));
        INFO(mib << " MiB: " << outcome.err);
        if (outcome.status == 0) break;
        CHECK(one_line_with(line_of(outcome), "memory"));
    }
}
#endif

TEST_CASE("a full disk loses nothing that was saved", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    REQUIRE(train("--stop-after 4 --out " + run).status == 0);
    const std::string before = newest_checkpoint(run), model = slurp(before + "/model.safetensors");
    // No file may grow beyond 512 blocks of 512 bytes or 1 KiB: the log fits, the next checkpoint does not.
    const Outcome outcome = run_program("train_gpt", "--resume --out " + run, "ulimit -f 512; exec");
    INFO(outcome.err);
    CHECK(one_line_with(line_of(outcome), "model.safetensors"));
    CHECK(newest_checkpoint(run) == before);
    CHECK(slurp(before + "/model.safetensors") == model);
    CHECK(run_shell("ls " + run + "/checkpoints").out == "step-00000004\n");
    CHECK(run_program("train_gpt", "--resume --out " + run).status == 0);
}

TEST_CASE("a run whose lock cannot be written leaves no folder", "[train_gpt]") {
    const TempFolder folder;
    const std::string fault = error_of([&] {
        const FileSizeLimit no_byte(0);
        RunFolder run(folder / "group/run");
    });
    CHECK(one_line_with(fault, "group/run/lock", "free some space"));
    CHECK(!is_there(folder / "group"));
    const std::filesystem::path here = std::filesystem::current_path();
    std::filesystem::current_path(folder.path);  // where it chooses a folder itself
    {
        const FileSizeLimit no_byte(0);
        CHECK_THROWS_AS(RunFolder(""), Error);
    }
    CHECK(is_there("runs"));
    CHECK(!is_there("runs/1"));
    std::filesystem::current_path(here);
}

// A link to itself where the next checkpoint should be: std::filesystem's errors are not ours.
TEST_CASE("whatever keeps a checkpoint or a plot from being written, the run goes on", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    REQUIRE(train("--stop-after 4 --out " + run).status == 0);
    std::filesystem::create_symlink("step-00000008", run + "/checkpoints/step-00000008");
    const Outcome outcome = run_program("train_gpt", "--resume --save-every 8 --out " + run);
    INFO(outcome.err);
    CHECK(outcome.status == 0);
    CHECK_THAT(outcome.err, ContainsSubstring("step 8 could not be saved") && ContainsSubstring("The run goes on"));
    CHECK(newest_checkpoint(run) == run + "/checkpoints/step-00000020");

    std::filesystem::remove(run + "/log.csv");
    CHECK_NOTHROW(draw_loss(run));
}

TEST_CASE("the picture of a run has the losses of its log, and names no validation loss where there is none",
          "[train_gpt][plot]") {
    const TempFolder folder;  // its path is short enough for the title
    Plot plot{"Loss of " + folder.path, "step", "loss (nats per token)", {{"training", {1, 2}, {3, 2.5}}}};
    plot.series[0].thick = false;
    write_png(folder / "expected.png", plot);
    {
        CsvLog log(folder / "log.csv", -1);
        LogRow row;
        row.step = 1, row.loss = 3;
        log.write(row);
        row.step = 2, row.loss = 2.5;
        log.write(row);
    }
    const auto is_drawn = [&] {
        draw_loss(folder.path);
        return slurp(folder / "loss.png") == slurp(folder / "expected.png");
    };
    CHECK(is_drawn());
    // Where some was, the losses that there are: the weights of --init have no other.
    {
        CsvLog log(folder / "log.csv", -1);
        LogRow row;
        row.step = 0, row.val_loss = 3.5;
        log.write(row);
        row.step = 1, row.loss = 3, row.val_loss.reset();
        log.write(row);
        row.step = 2, row.loss = 2.5, row.val_loss = 2.75;
        log.write(row);
    }
    CHECK_FALSE(is_drawn());
    plot.series.push_back({"validation", {0, 2}, {3.5, 2.75}});
    plot.series[1].markers = true;
    write_png(folder / "expected.png", plot);
    CHECK(is_drawn());
}

TEST_CASE("a sample has what a terminal can show, and begins with a line or the first token", "[train_gpt]") {
    const std::shared_ptr<const Tokenizer> bytes = make_byte_tokenizer();
    const auto [train, val] = open_train_and_val(text_file(), "", *bytes, 0.1);
    RunData data{.tokenizer = bytes,
                 .train_tokens = train,
                 .val_tokens = val,
                 .train = BatchReader(train, 16, 0),
                 .val = BatchReader(val, 16, 0),
                 .identity = {}};
    CHECK(data.show(bytes->encode("a\tb\n\x7f\x1b[2J\xff\xc3\xa9~")) == "a\tb\n..[2J.\xc3\xa9~");
    CHECK(data.show({'a', 256}) == "token ids: 97 256");
    CHECK(data.prompt() == std::vector<int32_t>{'\n'});
    data.is_text = false;
    CHECK_THAT(data.show({'a'}), Catch::Matchers::EndsWith(": 97"));
    int32_t first = 0;
    val[0].tokens.read(0, 1, &first);
    REQUIRE(first != 'L');
    CHECK(data.prompt() == std::vector<int32_t>{first});
    data.val.reset();
    CHECK(data.prompt() == std::vector<int32_t>{'L'});
}

// Embeddings of one token that are infinite: the loss of the sequences with this token is not finite, that of the
// others is.
// A final norm that is infinite: no loss is finite.
TEST_CASE("a loss that is not a number is traced to its sequences and documents", "[program][train_gpt]") {
    const TempFolder folder;
    std::filesystem::create_directories(folder / "text");
    for (int i = 0; i < 4; ++i)
        spit(folder / concat("text/", i), std::string(400, static_cast<char>('a' + i)) + "\n");  // "d" only in file 3
    // A head of its own: with the embedding as the head, the loss of every token would be broken.
    spit(folder / "model.json",
         R"({"model_type":"llama","vocab_size":256,"hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,
        "num_attention_heads":1,"num_key_value_heads":1,"head_dim":8,"max_position_embeddings":64,"rms_norm_eps":1e-5,
        "rope_theta":10000.0,"tie_word_embeddings":false,"hidden_act":"silu"})");
    const std::string flags = "--data " + (folder / "text") + " --val " + text_file() + " --val-every 0 --out ";
    REQUIRE(train("--model " + (folder / "model.json") + " --stop-after 1 " + flags + (folder / "good")).status == 0);
    const std::string checkpoint = newest_checkpoint(folder / "good");
    const SafetensorsReader saved(checkpoint + "/model.safetensors");
    std::filesystem::create_directories(folder / "broken");
    std::filesystem::copy_file(checkpoint + "/config.json", folder / "broken/config.json");
    // The error of a run from these weights with 8 numbers of a tensor made infinite.
    const auto error_with = [&](const std::string& broken, int64_t first) {
        std::vector<TensorToStore> tensors;
        for (const auto& [name, tensor] : saved.tensors())
            tensors.push_back({name, tensor.dtype, tensor.shape, [&, name = name](void* bytes) {
                                   const StoredTensor& from = saved.at(name);
                                   std::memcpy(bytes, from.data, from.bytes);
                                   if (name == broken) std::fill_n(static_cast<float*>(bytes) + first, 8, INFINITY);
                               }});
        write_safetensors(folder / "broken/model.safetensors", tensors);
        const Outcome outcome =
            train("--init " + (folder / "broken") + " --batch 20 --micro-batch 10 " + flags + (folder / "run"));
        std::filesystem::remove_all(folder / "run");
        return line_of(outcome);
    };
    const std::string all = error_with("model.norm.weight", 0), some = error_with("model.embed_tokens.weight", 8 * 'd');
    INFO(some << "\n" << all);
    CHECK(one_line_with(some, "step 1: the loss is nan", "The loss is not finite for ",
                        " of its 20 sequences, first for sequence ",
                        folder / "text/3, in the document that begins at its token 0", "Nothing was saved yet"));
    CHECK(
        one_line_with(all, "The loss of all of its 20 sequences is not finite: this comes from the weights of --init " +
                               (folder / "broken")));
    CHECK(all.find("--lr") == std::string::npos);  // no rate helps
    // It is the first: a step that ends before it is all right.
    const int first = static_cast<int>(number_after(some, "first for sequence "));
    REQUIRE(first > 0);
    // (The held-out text has a "d": a validation loss that is not a number is never the best.)
    const Outcome before = train(concat("--init ", folder / "broken", " --batch ", first,
                                        " --steps 1 --warmup 0 --keep-best ", flags, folder / "run"));
    CHECK(before.status == 0);
    CHECK_THAT(before.out, ContainsSubstring("| val loss nan\n") && !ContainsSubstring("best "));
    // And what comes from a step that was too large is no fault of the first weights.
    CHECK_THAT(
        line_of(train("--lr 1e18 --clip 0 --warmup 0 --model " + (folder / "model.json") + " " + flags +
                      (folder / "fast"))),
        ContainsSubstring("step 2: the loss is ") && ContainsSubstring("of the steps before, not from its data"));
}

TEST_CASE("a run is neither overwritten nor continued as another one", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    REQUIRE(train("--stop-after 2 --out " + run).status == 0);
    const std::string log = slurp(run + "/log.csv");
    Outcome outcome = train("--out " + run);
    CHECK(one_line_with(line_of(outcome), "already holds a run", "--resume"));
    outcome = run_program("train_gpt", "--resume --lr 0.5 --out " + run);
    CHECK(one_line_with(line_of(outcome), "--lr 0.5 differs"));
    for (const auto& [flags, says] :
         {std::pair("--steps 20 --schedule constant", "--schedule constant differs from the run"),  // of as many steps
          {"--trace 2", "step 2 is not among those that will be made, 3 to 20"}})
        CHECK(one_line_with(line_of(run_program("train_gpt", concat(flags, " --resume --out ", run))), says));
    // What an earlier version has written has no checksum, and may have options that this one does not know.
    const std::string path = newest_checkpoint(run) + "/state.json", state = slurp(path);
    for (const auto& [flag, value, says] : {std::tuple("--speed", "3", "unknown option --speed; was it written by"),
                                            {"--pipeline", "2bw", "--pipeline 2bw, which this run has, needs --pp"}}) {
        json other = parsed_json(state);
        other.removeMember("checksum"), other["options"][flag] = value;
        spit(path, dumped(other));
        CHECK(one_line_with(line_of(run_program("train_gpt", "--resume --out " + run)), says));
    }
    for (const auto& [text, says] :
         {std::pair("[]", "it is not a JSON object"),
          {"{}", "\"step\" is missing, or is not what it should be"},
          {R"({"step": 1, "updates": "1"})", "\"updates\" is missing, or is not what it should be"},
          {R"({"step": 1, "updates": 1, "loss_scale": {"scale": 1, "good_steps": 0, "overflows": 0}})",
           "\"options\" is missing"},
          {R"({"step": -1, "updates": 1, "loss_scale": {"scale": 1, "good_steps": 0, "overflows": 0}})",
           "\"step\" is -1, expected 0 to 2^60"},
          {R"({"step": 1, "updates": 1, "loss_scale": {"scale": 1, "good_steps": 0, "overflows": 0}, "options": {}})",
           "\"options\" has no \"--steps\""},
          {R"({"step": 1, "updates": 1, "loss_scale": {"scale": 1, "good_steps": 0, "overflows": 0}, "options": {},
               "data": {"train_tokens": 1, "val_tokens": 1, "train_checksum": "x", "val_checksum": "0"}})",
           "a checksum is not a hexadecimal number"}}) {
        spit(path, text);
        CHECK(one_line_with(error_of([&] { read_state(newest_checkpoint(run)); }), "is not a training state: ", says));
    }
    spit(path, state);
    CHECK(slurp(run + "/log.csv") == log);
    // A flag given again with the same value, written otherwise, is no conflict.
    CHECK(run_program("train_gpt", "--resume --lr 3e-3 --out " + run).status == 0);
    // Without a checkpoint nothing can be continued.
    std::filesystem::remove_all(run + "/checkpoints");
    CHECK(one_line_with(line_of(train("--out " + run)), "has saved no checkpoint: delete the folder"));
    std::filesystem::remove_all(run);
    std::filesystem::create_directory(run);
    spit(run + "/checkpoints", "a file");
    CHECK(one_line_with(line_of(train("--out " + run)), "/checkpoints: this is a file", "move it away"));
}

TEST_CASE("a resumed run counts the overflows in a row that were before it", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    REQUIRE(train("--dtype fp16 --loss-scale 128 --stop-after 3 --inject-overflow 3 --out " + run).status == 0);
    const std::string path = newest_checkpoint(run) + "/state.json";
    json state = parsed_json(slurp(path));
    CHECK(state["loss_scale"]["overflows"] == 1);
    CHECK(state["updates"] == 2);
    state.removeMember("checksum");
    state["loss_scale"]["overflows"] = 19;
    spit(path, dumped(state));
    CHECK(one_line_with(line_of(run_program("train_gpt", "--resume --inject-overflow 4 --out " + run)),
                        "gradients were infinite or NaN in 20 steps in a row with the loss scale 128"));
}

namespace {

// Changes bit 30 of a weight in the middle of a tensor: of a float32, the largest bit of the exponent.
void flip_bit(const std::string& path, const std::string& tensor) {
    std::string bytes = slurp(path);
    const SafetensorsReader file(path);
    const StoredTensor& stored = file.at(tensor);
    const std::string data(reinterpret_cast<const char*>(stored.data), stored.bytes);
    const size_t at = bytes.find(data);
    REQUIRE(at != std::string::npos);
    bytes[at + stored.bytes / 8 * 4 + 3] ^= 0x40;
    spit(path, bytes);
}

}  // namespace

TEST_CASE("a flipped bit in a checkpoint is found, and the run resumes from the one before", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string whole = folder / "whole";
    REQUIRE(train("--steps 6 --save-every 2 --out " + whole).status == 0);
    const std::vector<std::pair<std::string, std::string>> places = {
        {"/model.safetensors", "model.layers.1.mlp.up_proj.weight"},
        {"/optimizer.safetensors", "v.model.layers.1.mlp.up_proj.weight"}};
    for (const auto& [file, tensor] : places) {
        const std::string run = folder / "run";
        REQUIRE(train("--steps 6 --save-every 2 --stop-after 4 --out " + run).status == 0);
        flip_bit(newest_checkpoint(run) + file, tensor);
        const Outcome full =
            run_program("train_gpt", "--resume --out " + run, "ulimit -S -f 4; exec");  // none is written
        CHECK(full.status == 2);
        CHECK_THAT(full.err, ContainsSubstring("The newest checkpoint is " + run + "/checkpoints/step-00000002: "));
        const Outcome overflow = run_program("train_gpt", "--resume --inject-overflow 3 --out " + run);
        CHECK_THAT(overflow.err, ContainsSubstring("--init " + run + "/checkpoints/step-00000002 --out OTHER"));
        const Outcome outcome = run_program("train_gpt", "--resume --out " + run);
        INFO(outcome.err);
        REQUIRE(outcome.status == 0);
        CHECK(one_line_with(outcome.err.substr(0, outcome.err.size() - 1), "step-00000004" + file, "\"" + tensor + "\"",
                            "Resuming from " + run + "/checkpoints/step-00000002"));
        CHECK_THAT(outcome.out, ContainsSubstring("resumed after step 2"));
        check_same_end(whole, run);
        CHECK(run_shell("ls " + run + "/checkpoints").out == "step-00000004\nstep-00000006\n");  // 4 is a new one

        // None is whole: the newest is named.
        flip_bit(run + "/checkpoints/step-00000004" + file, tensor);
        flip_bit(run + "/checkpoints/step-00000006" + file, tensor);
        const Outcome none = run_program("train_gpt", "--resume --out " + run);
        CHECK(one_line_with(line_of(none), "step-00000006" + file, "\"" + tensor + "\"", "no checkpoint in"));
        std::filesystem::remove_all(run);
    }
}

TEST_CASE("a schedule that was begun anew goes on behind a broken checkpoint", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string whole = folder / "whole", run = folder / "run";
    const std::string anew = "--resume --steps 6 --schedule cosine --out ";
    REQUIRE(train("--steps 2 --out " + whole).status == 0);
    std::filesystem::copy(whole, run, std::filesystem::copy_options::recursive);
    REQUIRE(run_program("train_gpt", anew + whole).status == 0);
    REQUIRE(run_program("train_gpt", anew + run + " --stop-after 4").status == 0);
    flip_bit(newest_checkpoint(run) + "/model.safetensors", "model.norm.weight");
    const Outcome outcome = run_program("train_gpt", "--resume --out " + run);
    CHECK_THAT(outcome.out, ContainsSubstring("resumed after step 2"));
    check_same_end(whole, run);
    // One that began behind step 2 says nothing of step 2. (--keep: more than an int holds.)
    const std::string other = folder / "other", keep = " --keep 3e9 --save-every 1 --out " + other;
    REQUIRE(train("--steps 2" + keep).status == 0);
    REQUIRE(run_program("train_gpt", "--resume --steps 4 --schedule linear --stop-after 3" + keep).status == 0);
    for (const char* step : {"2", "3"})
        flip_bit(other + "/checkpoints/step-0000000" + step + "/model.safetensors", "model.norm.weight");
    CHECK_THAT(
        run_program("train_gpt", "--resume --out " + other).out,
        ContainsSubstring("resumed after step 1\nschedule a new one begins: linear over steps 2 to 4, of which 2"));
}

TEST_CASE("a digit that has changed in state.json or config.json is found", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    REQUIRE(train("--steps 6 --save-every 2 --stop-after 4 --out " + run).status == 0);
    std::filesystem::copy(run, folder / "other", std::filesystem::copy_options::recursive);
    const auto change = [](const std::string& path, const std::string& digit, const std::string& other) {
        spit(path, replaced(slurp(path), digit, other));
        return path;
    };
    const std::string state = change(newest_checkpoint(run) + "/state.json", "\"step\": 4", "\"step\": 5"),
                      config = change(newest_checkpoint(folder / "other") + "/config.json", "\"rope_theta\": 1",
                                      "\"rope_theta\": 3");
    for (const auto& [its_run, says] :
         {std::pair(run, state + " is not a training state: it has changed since it was written: "),
          {folder / "other", config + " has changed since it was written: "}}) {
        const Outcome outcome = run_program("train_gpt", "--resume --out " + its_run);
        INFO(outcome.err);
        CHECK(outcome.status == 0);
        CHECK_THAT(outcome.err, ContainsSubstring(says));
        CHECK_THAT(outcome.out, ContainsSubstring("resumed after step 2"));
    }
}

TEST_CASE("half of a tokenizer.json is no whole checkpoint", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    REQUIRE(train("--steps 6 --save-every 2 --stop-after 4 --out " + run).status == 0);
    const std::string path = newest_checkpoint(run) + "/tokenizer.json", text = slurp(path);
    spit(path, text.substr(0, text.size() / 2));
    const Outcome outcome = run_program("train_gpt", "--resume --out " + run);
    INFO(outcome.err);
    CHECK(outcome.status == 0);
    CHECK_THAT(outcome.err, ContainsSubstring(path + ": not valid JSON") && ContainsSubstring("Resuming from "));
    CHECK_THAT(outcome.out, ContainsSubstring("resumed after step 2"));
}

TEST_CASE("a checkpoint of more than 1 GiB is named before it is read", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run", resume = "--resume --stop-after 5 --out " + run;
    REQUIRE(train("--steps 6 --save-every 2 --stop-after 4 --out " + run).status == 0);
    const std::string newest = newest_checkpoint(run);
    std::filesystem::resize_file(newest + "/optimizer.safetensors", int64_t{1} << 30);  // a hole, which takes no room
    const Outcome outcome = run_program("train_gpt", resume);
    CHECK(outcome.status == 0);
    CHECK_THAT(outcome.out, ContainsSubstring("resume   reads 1.00 GiB of " + newest + ", to compare"));
    CHECK(count(outcome.out, "resume   reads") == 1);  // the one before it is small
}

TEST_CASE("a checkpoint without one of its files is not whole", "[program][train_gpt]") {
    const TempFolder folder;
    for (const std::string file : {"model.safetensors", "optimizer.safetensors", "config.json"}) {
        const std::string run = folder / file;
        REQUIRE(train("--steps 6 --save-every 2 --stop-after 4 --out " + run).status == 0);
        std::filesystem::remove(newest_checkpoint(run) + "/" + file);
        const Outcome outcome = run_program("train_gpt", "--resume --out " + run);
        CHECK(outcome.status == 0);
        CHECK_THAT(outcome.err, ContainsSubstring("step-00000004 holds no " + file + ". Resuming from ") &&
                                    ContainsSubstring("step-00000002, the newest checkpoint that is whole"));
    }
}

TEST_CASE("a checkpoint with a file of another step or run is not whole", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run", other = folder / "other", copy = folder / "copy";
    for (const auto& [flags, out] : {std::pair(" --seed 7 ", other), {" ", run}})
        REQUIRE(train(concat("--steps 6 --save-every 2 --stop-after 4", flags, "--out ", out)).status == 0);
    const std::string older = run + "/checkpoints/step-00000002", same_step = newest_checkpoint(other);
    for (const auto& [from, file] : {std::pair(older, "model.safetensors"),
                                     {older, "optimizer.safetensors"},
                                     {same_step, "optimizer.safetensors"},
                                     {same_step, "state.json"}}) {
        std::filesystem::copy(run, copy, std::filesystem::copy_options::recursive);
        std::filesystem::copy_file(from + "/" + file, newest_checkpoint(copy) + "/" + file,
                                   std::filesystem::copy_options::overwrite_existing);
        const Outcome outcome = run_program("train_gpt", "--resume --out " + copy);
        INFO(outcome.err);
        CHECK_THAT(outcome.err, ContainsSubstring(" was not saved together with the state.json beside it: ") &&
                                    ContainsSubstring("step-00000002, the newest checkpoint that is whole"));
        CHECK_THAT(outcome.out, ContainsSubstring("resumed after step 2"));
        std::filesystem::remove_all(copy);
    }
}

// As earlier versions wrote state.json.
static void forget_checksums(const std::string& checkpoint) {
    json state = parsed_json(slurp(checkpoint + "/state.json"));
    state.removeMember("checksum"), state.removeMember("files");
    spit(checkpoint + "/state.json", dumped(state));
}

TEST_CASE("a checkpoint with the optimizer's states twice is an error", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    REQUIRE(train("--steps 4 --save-every 2 --stop-after 2 --out " + run).status == 0);
    const std::string checkpoint = newest_checkpoint(run);
    std::filesystem::copy(checkpoint + "/optimizer.safetensors", checkpoint + "/optimizer-00001-of-00001.safetensors");
    const Outcome outcome = run_program("train_gpt", "--resume --out " + run);
    CHECK(outcome.status == 2);
    CHECK_THAT(outcome.err, ContainsSubstring("are files of two checkpoints in it?"));
    // What the header of a file says of a state has no checksum of its own.
    std::filesystem::remove(checkpoint + "/optimizer-00001-of-00001.safetensors");
    const std::string path = checkpoint + "/optimizer.safetensors", states = slurp(path), name = "m.model.norm.weight";
    forget_checksums(checkpoint);
    for (const auto& [text, other, says] :
         {std::array<std::string, 3>{"\"F32\"", "\"I32\"", "' has dtype I32, expected F32"},
          {name, "m.model.norm@weight", "'m.model.norm@weight' names no place in"},
          {name, "m.model.norm.wei@-1", "'m.model.norm.wei@-1' names no place in"},
          {name, "m.model.norms@0:4:3", "'m.model.norms@0:4:3' names no place in"},
          {name, "m.model.norms@0:0:3", "'m.model.norms@0:0:3' names no place in"},
          {"m.model.embed_tokens.weight", "m.model@9223372036854775807", "807' names no place in"}}) {
        std::string changed = states;
        for (size_t at = 0; (at = changed.find(text, at)) < 100000; at += text.size())
            changed.replace(at, text.size(), other);
        spit(path, changed);
        CHECK_THAT(line_of(run_program("train_gpt", "--resume --out " + run)), ContainsSubstring(says));
    }
    // Of a part it must be known of how many ranks.
    spit(path, states);
    std::vector<TensorToStore> tensors;
    const SafetensorsReader saved(path);
    for (const auto& [its_name, tensor] : saved.tensors())
        tensors.push_back({its_name == name ? name + ", part " : its_name, tensor.dtype, tensor.shape,
                           [from = tensor](void* bytes) { std::memcpy(bytes, from.data, from.bytes); }});
    write_safetensors(path, tensors);
    CHECK_THAT(line_of(run_program("train_gpt", "--resume --out " + run)),
               ContainsSubstring("no file with the optimizer's states has '" + name + "'"));
}

TEST_CASE("states of which a part is missing are not taken for whole", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run";
    REQUIRE(train("--steps 2 --stop-after 1 --ranks 2 --zero 1 --out " + run).status == 0);
    const std::string optimizer = newest_checkpoint(run) + "/optimizer", resume = "--resume --ranks 1 --zero 0 --out ";
    std::filesystem::remove(optimizer + "-00002-of-00002.safetensors");
    CHECK_THAT(run_program("train_gpt", resume + run).err,
               ContainsSubstring(optimizer + "-00002-of-00002.safetensors is missing; no checkpoint in "));
    // Rank 0's, under the name that the states of one rank have.
    std::filesystem::rename(optimizer + "-00001-of-00002.safetensors", optimizer + ".safetensors");
    CHECK_THAT(run_program("train_gpt", resume + run).err,
               ContainsSubstring(optimizer + "-00001-of-00002.safetensors is missing; no checkpoint in "));
    forget_checksums(newest_checkpoint(run));
    const Outcome outcome = run_program("train_gpt", resume + run);
    INFO(outcome.err);
    CHECK(outcome.status == 2);
    CHECK_THAT(outcome.err, ContainsSubstring(" elements that the model asks for; is a file missing?"));
}

// The held-out sequences are the same however they are divided: the last micro-batch may be part empty.
TEST_CASE("the validation loss depends on neither ranks nor micro-batches", "[program][train_gpt]") {
    const TempFolder folder;
    const auto val_loss = [&](const std::string& flags) {
        const std::string run = folder / "run";
        must_succeed(
            train("--batch 12 --steps 1 --warmup 0 --lr 1e-9 --val-sequences 7 --sample 0 --out " + run + " " + flags));
        const double loss = *read_csv_log(run + "/log.csv").back().val_loss;
        std::filesystem::remove_all(run);
        return loss;
    };
    const double alone = val_loss("--micro-batch 1");  // of which 7 are exactly 7 sequences
    for (const std::string flags : {"--micro-batch 3", "", "--ranks 3", "--ranks 2 --zero 3", "--ranks 2 --pp 2"})
        CHECK(val_loss(flags) == Approx(alone).epsilon(1e-5));  // sums of another order
    // There are fewer than 100: none is evaluated twice.
    CHECK(val_loss("--val-sequences 150") == val_loss("--val-sequences 100"));
}

// An engine whose logits are no numbers ends an answer before its first token.
TEST_CASE("a sample of a broken model ends", "[program][train_gpt]") {
    const TempFolder folder;
    REQUIRE(train("--steps 1 --warmup 0 --sample 0 --out " + (folder / "good")).status == 0);
    fill_with_nan(newest_checkpoint(folder / "good") + "/model.safetensors");
    const Outcome outcome = run_program("train_gpt",
                                        "--data " + text_file() + " --init " + newest_checkpoint(folder / "good") +
                                            " --batch 2 --seq 16 --steps 1 --sample 20 --out " + (folder / "bad"),
                                        "timeout 60");
    CHECK(outcome.status == 2);
    CHECK_THAT(outcome.out, ContainsSubstring("---- sample before training ----"));
    // Never "-nan": these NaN have a sign, and so has a difference of infinities on x86.
    CHECK_THAT(outcome.out, ContainsSubstring("| val loss nan of the weights of --init"));
    CHECK_THAT(slurp(folder / "bad/log.csv"), Catch::Matchers::EndsWith("\n0,0,,nan,,,,,,\n"));
}

TEST_CASE("a model of single tokens is trained, and writes no sample", "[program][train_gpt]") {
    const TempFolder folder;
    const Outcome outcome = train("--seq 1 --steps 1 --warmup 0 --sample 20 --out " + (folder / "run"));
    INFO(outcome.err);
    CHECK(outcome.status == 0);
    CHECK(outcome.out.find("---- sample") == std::string::npos);
}

TEST_CASE("a resumed run refuses other data, unless they are meant", "[program][train_gpt]") {
    const TempFolder folder;
    const std::string run = folder / "run", text = folder / "text.txt", original = slurp(text_file());
    spit(text, original);
    REQUIRE(train("--stop-after 2 --out " + run + " --data " + text).status == 0);
    std::string changed = original;
    changed[100] ^= 1;
    for (const std::string& other : {std::string(100, 'x') + original, changed}) {
        spit(text, other);
        const Outcome outcome = run_program("train_gpt", "--resume --out " + run);
        INFO(outcome.err);
        const auto n_train = [](const std::string& s) {
            return s.size() - static_cast<size_t>(std::llround(0.1 * s.size()));
        };
        CHECK(one_line_with(line_of(outcome), "training data are not those",
                            concat(n_train(other), " tokens with checksum "), concat(n_train(original), " tokens"),
                            "--new-data"));
    }
    // So is what is held out.
    const std::string val = folder / "val.txt", with_val = folder / "with_val";
    spit(val, original);
    REQUIRE(train("--stop-after 1 --out " + with_val + " --val " + val).status == 0);
    spit(val, changed);
    CHECK(one_line_with(line_of(run_program("train_gpt", "--resume --out " + with_val)),
                        "--resume: the held-out data are not those of the run", "--new-data"));
    CHECK(run_program("train_gpt", "--resume --new-data --stop-after 4 --out " + run).status == 0);
    CHECK(run_program("train_gpt", "--resume --stop-after 5 --out " + run).status == 0);  // they are the run's now
    // Another file is other data, too.
    CHECK(run_program("train_gpt", "--resume --out " + run + " --data " + text_file()).status == 2);
    CHECK(run_program("train_gpt", "--resume --new-data --out " + run + " --data " + text_file()).status == 0);
}

TEST_CASE("token shards are trained on without a tokenizer", "[program][train_gpt]") {
    const TempFolder folder;
    int32_t header[256] = {20240520, 1, 2000};
    std::string bytes(reinterpret_cast<const char*>(header), sizeof header);
    for (int i = 0; i < 2000; ++i) {
        const uint16_t token = i % 100 == 0 ? 50256 : static_cast<uint16_t>(i * 37 % 50000);
        bytes.append(reinterpret_cast<const char*>(&token), 2);
    }
    spit(folder / "some_train_0.bin", bytes);
    spit(folder / "model.json",
         R"({"model_type":"gpt2","vocab_size":50257,"n_positions":64,"n_embd":8,"n_layer":1,"n_head":1,
        "activation_function":"gelu_new","layer_norm_epsilon":1e-5})");
    const std::string model = "--model " + (folder / "model.json") + " --steps 2 --warmup 0 --sample 3 --out ";
    const std::string said =
        must_succeed(train(model + (folder / "run") + " --data '" + (folder / "some_*.bin") + "'"));
    CHECK_THAT(said, ContainsSubstring("token ids (there is no --tokenizer to show them as text): "));
    // A model may have more tokens than there are bytes: a sample with one of the others has ids, too.
    spit(folder / "wide.json",
         R"({"model_type":"gpt2","vocab_size":512,"n_positions":64,"n_embd":8,"n_layer":1,"n_head":1,
        "activation_function":"gelu_new","layer_norm_epsilon":1e-5})");
    const Outcome wide =
        train("--model " + (folder / "wide.json") + " --steps 1 --warmup 0 --sample 40 --out " + (folder / "wide"));
    CHECK(wide.status == 0);
    CHECK_THAT(wide.out, ContainsSubstring("\ntoken ids: "));
    const Outcome text = train(model + (folder / "other"));
    CHECK(one_line_with(line_of(text), "vocabulary of 50257", "--tokenizer"));
}

TEST_CASE("a broken checkpoint is named", "[program][train_gpt]") {
    for (const std::string file : {"model.safetensors", "optimizer.safetensors", "state.json", "config.json"}) {
        const TempFolder folder;
        const std::string run = folder / "run";
        REQUIRE(train("--stop-after 2 --out " + run).status == 0);
        const std::string path = newest_checkpoint(run) + "/" + file;
        spit(path, slurp(path).substr(0, slurp(path).size() / 2));
        const Outcome outcome = run_program("train_gpt", "--resume --out " + run);
        INFO(file << ": " << outcome.err);
        CHECK(one_line_with(line_of(outcome), file));
    }
}
