// Checkpoints of pipelines: a run goes on with another number of stages, another schedule, another mesh.
#include "io/io.h"
#include "tensor_runs.h"

#include <algorithm>

namespace {

// Of two runs on 2 ranks, each of which has written its optimizer's states and fp8's histories.
void check_same_states(const std::string& a, const std::string& b) {
    for (const std::string file : {"/optimizer-00001-of-00002.safetensors", "/optimizer-00002-of-00002.safetensors"}) {
        INFO(file);
        CHECK((slurp(newest_checkpoint(a) + file) == slurp(newest_checkpoint(b) + file)));
    }
}

// AdamW has two states a number; its epsilon is large enough that rounding stays small.
const std::string kAdamW = "--optimizer adamw --eps 1e-4 --micro-batch 2 ";

}  // namespace

TEST_CASE("a checkpoint of --pp goes on with the same bits: other stages, another schedule, one process",
          "[program][ranks][pipeline]") {
    Runs runs;
    // The head is not tied: then no sum is formed in another order than in one process.
    const std::string whole = runs.run("deep-qwen3", kAdamW);
    const std::array<std::string, 2> meshes[] = {
        {"--ranks 2 --pp 2 ", "--ranks 2 --pp 2 "},
        {"--ranks 2 --pp 2 --stages 1,4 ", "--ranks 5 --pp 5 --pipeline gpipe "},
        {"--ranks 4 --pp 4 --pipeline zb-h1 ", ""},
        {"", "--ranks 2 --pp 2 --pipeline zb-v "},
        {"--ranks 2 --pp 2 --pipeline interleaved ", "--ranks 3 --pp 3 --recompute 1 "}};
    for (const auto& [before, after] : meshes) {
        const std::string run = runs.resumed("deep-qwen3", kAdamW, before, after);
        INFO(before << "-> " << after);
        CHECK(log_without_times(run) == log_without_times(whole));
        CHECK((weights_of(run) == weights_of(whole)));
    }
}

TEST_CASE("a checkpoint of --pp goes on with another mesh", "[program][ranks][pipeline]") {
    Runs runs;
    const std::string whole = runs.run("deep-gpt2", kAdamW);
    const std::array<std::string, 2> meshes[] = {
        {"--ranks 2 --pp 2 ", ""},
        {"--ranks 4 --pp 2 --zero 1 ", "--ranks 2 --tp 2 "},
        {"--ranks 4 --pp 2 --tp 2 ", "--ranks 4 --pp 2 --zero 1 --pipeline zb-h2 "},
        {"--ranks 2 --zero 3 ", "--ranks 2 --pp 2 --pipeline dualpipe-v "},
        {"--ranks 2 --pp 2 --pipeline dualpipe ", "--ranks 4 --pp 4 "}};
    for (const auto& [before, after] : meshes)
        check_same_run(runs.resumed("deep-gpt2", kAdamW, before, after), whole, 2e-6);
}

// The ends of a tied embedding, in two places of the gradients, are one weight in a checkpoint.
TEST_CASE("a tied embedding's ends stay equal where sums are not in the order of the ranks",
          "[program][ranks][pipeline]") {
    Runs runs;
    for (const std::string& flags : std::vector<std::string>{
             "--pp 2 --all-reduce ring ", "--pp 2 --all-reduce two-level --ranks-per-node 3 ",
             "--pp 2 --pipeline zb-v --all-reduce ring ", "--pp 2 --compress powersgd --all-reduce ring "}) {
        if (is_full() && flags.find("--ranks-per-node") != std::string::npos) continue;  // for threads only
        INFO(flags);
        const std::string mesh = "--ranks 6 " + flags, whole = runs.run("deep-gpt2", kAdamW + mesh),
                          run = runs.resumed("deep-gpt2", kAdamW, mesh, mesh);
        CHECK(log_without_times(run) == log_without_times(whole));
        CHECK((weights_of(run) == weights_of(whole)));
    }
}

TEST_CASE("states of every kind, fp8's histories and compression's errors of --pp go on with the same bits",
          "[program][ranks][pipeline]") {
    Runs runs;
    const std::array<std::string, 4> cases[] = {
        {"deep-qwen3", "--optimizer adam8bit --lr 1e-3 --micro-batch 3 ", "--ranks 2 --pp 2 ", ""},
        {"deep-qwen3", "--optimizer muon --lr 1e-2 --micro-batch 3 ", "--ranks 3 --pp 3 ", "--ranks 2 --pp 2 "},
        {"deep-qwen3", "--optimizer adafactor --lr 1e-2 --micro-batch 3 ", "", "--ranks 2 --pp 2 "},
        {"deep-qwen3", "--dtype bf16 --master none --micro-batch 3 ", "--ranks 2 --pp 2 ", "--ranks 3 --pp 3 "},
        {"deep-qwen3", "--dtype fp8 --micro-batch 3 ", "--ranks 2 --pp 2 --pipeline zb-v ", ""},
        {"deep-qwen3", "--dtype fp8 --micro-batch 3 ", "", "--ranks 2 --pp 2 "}};
    for (const auto& [model, flags, before, after] : cases) {
        if (!can_train(flags)) continue;
        const std::string run = runs.resumed(model, flags, before, after), whole = runs.run(model, flags);
        INFO(flags << before << "-> " << after);
        CHECK(log_without_times(run) == log_without_times(whole));
        CHECK((weights_of(run) == weights_of(whole)));
    }
    // Updates that are undone, because they should have been clipped, leave nothing in the histories.
    const std::string fp8 = "--dtype fp8 --micro-batch 1 --steps 5 ", mesh = "--ranks 2 --pp 2 --pipeline ";
    if (can_train(fp8))
        check_same_states(runs.run("deep-qwen3", fp8 + mesh + "zb-h2 "), runs.run("deep-qwen3", fp8 + mesh + "1f1b "));
    const std::string errors = "--compress 1bit --micro-batch 2 --ranks 4 --pp 2 ";
    const std::string whole = runs.run("deep-gpt2", errors), run = runs.resumed("deep-gpt2", errors, "", "");
    CHECK(log_without_times(run) == log_without_times(whole));
    CHECK((weights_of(run) == weights_of(whole)));
    const std::string other = runs.run("deep-gpt2", errors + "--stop-after 5 ");
    const Outcome outcome = runs.outcome("deep-gpt2", errors + "--stages 1,4 --resume ", other);
    INFO(outcome.err);
    CHECK(outcome.status == 0);
    CHECK_THAT(
        outcome.out,
        ContainsSubstring(
            "no errors of 4 ranks with --pp 2, these stages, this --cp and this order of sums: they start at 0"));
}

// The ranks that have a norm, and those that have an end of a tied embedding, have errors of parts of its gradient, or
// of the whole one. Errors of parts, added to the whole gradient, would make one weight different ones. And with --cp
// the ranks of a pipeline have other numbers.
TEST_CASE("compression's errors of other parts of the gradients are not read", "[program][ranks][pipeline]") {
    Runs runs;
    const std::string flags = "--compress 1bit --micro-batch 2 --ranks 4 ";
    const std::array<std::string, 3> cases[] = {
        {"--tp 2 ", "--sp ", "--tp 2 without --sp: they start at 0"},
        {"--pp 2 ", "--cp 2 ", "--pp 2, these stages, this --cp and this order of sums: they start at 0"},
        {"--pp 2 ", "--all-reduce ring ", "--pp 2, these stages, this --cp and this order of sums: they start at 0"}};
    for (const auto& [mesh, parts, message] : cases) {
        INFO(mesh << parts);
        const std::string run = runs.run("deep-gpt2", flags + mesh + parts + "--stop-after 2 ");
        const Outcome outcome = runs.outcome("deep-gpt2", flags + mesh + "--stop-after 3 --resume ", run);
        INFO(outcome.err);
        CHECK(outcome.status == 0);
        CHECK_THAT(outcome.out, ContainsSubstring(message));
    }
}

TEST_CASE("the plan of a pipeline has a row for each rank, and rank 0's memory is what the run takes",
          "[program][ranks][pipeline][alone]") {
    Runs runs;
    for (const std::string schedule : {"1f1b", "zb-h1", "interleaved"}) {
        const std::string flags =
            "--micro-batch 2 --ranks 4 --pp 2 --zero 1 --val-every 0 --pipeline " + schedule + " ";
        const Outcome run = runs.outcome("deep-gpt2", flags, runs.folder / schedule),
                      plan = runs.outcome("deep-gpt2", flags + "--plan --device-spec h100 ", runs.folder / "none");
        INFO(plan.out << plan.err << run.err);
        REQUIRE((run.status == 0 && plan.status == 0));
        CHECK(!std::filesystem::exists(runs.folder / "none"));
        const size_t table = plan.out.find("\nrank  blocks"), follows = plan.out.find("what follows is of rank 0");
        REQUIRE((table != std::string::npos && follows != std::string::npos));
        const std::string rows = plan.out.substr(table, follows - table);
        CHECK(std::count(rows.begin(), rows.end(), '\n') == 4);  // before and behind the title, and two rows
        CHECK_THAT(rows, ContainsSubstring(schedule == "interleaved" ? "embedding, 0 2-3 " : "embedding, 0-2 ") &&
                             ContainsSubstring(schedule == "interleaved" ? " 1 4, head " : " 3-4, head "));
        // What is in flight, as the run has planned it and taken it; a part of it where W comes later than B.
        for (const int rank : {0, 1}) {
            long long planned = 0;
            const size_t row = run.out.find(concat("\n     ", rank, " "), run.out.find("activations in flight"));
            REQUIRE(std::sscanf(run.out.c_str() + row, " %*d %lld", &planned) == 1);
            const std::string line = rows.substr(rows.find(concat("\n   ", rank, " ")) + 1, 96);
            INFO(line);
            CHECK(line.substr(74, 11) == concat(std::string(11 - human_bytes(static_cast<double>(planned)).size(), ' '),
                                                human_bytes(static_cast<double>(planned))));
            CHECK((line.substr(85) == "        0 B") == (schedule != "zb-h1"));
        }
        long long total = 0, taken = 0;
        const size_t at = run.out.find("taken on the device (");
        REQUIRE(std::sscanf(plan.out.c_str() + plan.out.find("  total "), "  total %lld", &total) == 1);
        REQUIRE(std::sscanf(run.out.c_str() + at, "taken on the device (%lld", &taken) == 1);
        CHECK(taken_as_planned(static_cast<double>(taken), static_cast<double>(total)));
    }
    // The table of an asynchronous schedule is of several steps.
    CHECK_THAT(runs.outcome("deep-qwen3",
                            "--plan --ranks 2 --pp 2 --pipeline pipedream --clip 0 --val-every 0 --flush-every 2 ",
                            runs.folder / "none")
                   .out,
               ContainsSubstring("--pipeline pipedream, 1 micro-batches a step, "));
}
