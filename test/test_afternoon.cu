// test/test_afternoon.cu: a newcomer's afternoon in one folder, command by command, as doc/runs.md and doc/models.md
// tell it: train, stop, lengthen, move, fine-tune, load with transformers, start two at once, run out of disk, diverge.
//
//   run:   build/cpu/run_tests "[afternoon]"      LLM_PYTHON=path/to/python3 names one with torch and transformers
#include "train_runs.h"

#include <cmath>

namespace {

// The folder, with ./train_gpt and what the newcomer has: a text, another one, and a tokenizer.
struct Desk {
    TempFolder folder;
    std::string go = concat("cd ", folder.path, "; export OMP_NUM_THREADS=1; ");

    Desk() {
        std::filesystem::create_symlink(program_file("train_gpt"), folder / "train_gpt");
        std::filesystem::copy("test/golden/tokenizer/gpt2", folder / "tokenizer");
        spit(folder / "play.txt", made_text(400));
        std::string other;
        for (int i = 0; i < 400; ++i) other += concat(i, " times ", i % 13, " is ", i * (i % 13), ".\n");
        spit(folder / "sums.txt", other);
    }
    Outcome type(const std::string& command) const { return run_shell(go + command); }
    Outcome in_background(const std::string& command, const std::string& script) const {
        return with_background(folder, go + command, script);
    }
    std::string checkpoint(const std::string& run) const { return newest_checkpoint(folder / run); }
    int64_t saved_step(const std::string& run) const {
        return std::stoll(checkpoint(run).substr(checkpoint(run).rfind('-') + 1));
    }
    std::vector<LogRow> log(const std::string& run) const { return read_csv_log(folder / (run + "/log.csv")); }
};

// Small models of small texts: only the sizes differ from what a person would type.
const std::string kSizes = " --batch 2 --seq 16 --val-every 10 --val-sequences 4 --sample 0 --warmup 2 ";
const std::string kTrainPlay = "./train_gpt --tokenizer tokenizer --schedule constant" + kSizes;

// Trains a model with a tokenizer, and stops it with Ctrl-C. Returns the step after which it ended.
int64_t train_and_stop(const Desk& desk) {
    const Outcome typed = desk.in_background("exec " + kTrainPlay + "--data play.txt --steps 5000",
                                             "await 'step    2/' out; kill -INT $pid; wait $pid; echo status $?");
    const std::string out = slurp(desk.folder / "out"), err = slurp(desk.folder / "err");
    INFO(typed.out << out << err);
    CHECK(typed.out == "status 0\n");
    CHECK_THAT(err, ContainsSubstring("then saving; press Ctrl-C again to stop without saving"));
    const int64_t step = desk.saved_step("runs/1");
    CHECK(desk.log("runs/1").back().step == step);
    CHECK_THAT(out, ContainsSubstring(concat("stopped after step ", step, " of 5000; saved. Continue with:  ",
                                             "./train_gpt --out runs/1 --resume\n")));
    return step;
}

// Lengthens the run that was stopped, moves it and its text, and compares it with a run that was all of this from the
// beginning: the bits are the same.
void lengthen_and_move(const Desk& desk, int64_t stopped) {
    const auto until = [&](int64_t more) { return concat(" --stop-after ", stopped + more); };
    Outcome typed = desk.type("./train_gpt --out runs/1 --resume --steps 6000" + until(3));
    INFO(typed.err);
    REQUIRE(typed.status == 0);
    CHECK_THAT(typed.out, ContainsSubstring("schedule constant to step 6000 instead of 5000: it goes on"));
    REQUIRE(desk.type("mkdir shelf && mv runs/1 shelf/play && mv play.txt shelf").status == 0);
    CHECK(one_line_with(line_of(desk.type("./train_gpt --out shelf/play --resume")), "no data at play.txt"));
    const std::string go_on = "./train_gpt --out shelf/play --resume";
    REQUIRE(desk.type(go_on + " --data shelf/play.txt" + until(6)).status == 0);
    REQUIRE(desk.type(go_on + until(9)).status == 0);  // the new path is the run's
    REQUIRE(desk.type(kTrainPlay + "--data shelf/play.txt --steps 6000 --out whole" + until(9)).status == 0);
    check_same_end(desk.folder / "whole", desk.folder / "shelf/play");
}

// Goes on from it with another text: the tokenizer is found, and lies in the new checkpoints.
void fine_tune(const Desk& desk) {
    const Outcome typed = desk.type("./train_gpt --init shelf/play --data sums.txt --steps 20" + kSizes);
    INFO(typed.err);
    REQUIRE(typed.status == 0);
    CHECK_THAT(typed.out,
               ContainsSubstring("output   runs/1\n") && ContainsSubstring("tokens (shelf/play/checkpoints/"));
    CHECK_THAT(typed.out, ContainsSubstring("the learning rate rises to 0.0003"));
    const std::vector<LogRow> rows = desk.log("runs/1");
    REQUIRE(rows.size() == 21);
    CHECK(*rows.back().val_loss < *rows.front().val_loss);  // of step 0
    CHECK(slurp(desk.checkpoint("runs/1") + "/tokenizer.json") == slurp(desk.folder / "tokenizer/tokenizer.json"));
}

void load_with_transformers(const Desk& desk) {
    const Outcome loaded = run_python("test/golden/check_folder.py " + desk.checkpoint("runs/1"));
    if (loaded.status == 77 || loaded.status == 127) return;  // there is no torch, no transformers, or no Python
    INFO(loaded.out << loaded.err);
    CHECK(loaded.status == 0);
    CHECK(loaded.out.starts_with("check_folder: ok"));  // and it has generated text
}

// Models of bytes. The tokenizer of the first run is not theirs.
void start_three_at_once(const Desk& desk) {
    const std::string train = "./train_gpt --data sums.txt --steps 2" + kSizes;
    Outcome typed =
        desk.type(concat(train, "& a=$!; ", train, "& b=$!; ", train, "& c=$!; wait $a && wait $b && wait $c"));
    INFO(typed.err);
    REQUIRE(typed.status == 0);
    for (const std::string run : {"runs/2", "runs/3", "runs/4"}) {
        CHECK_THAT(typed.out, ContainsSubstring("output   " + run + "\n"));
        CHECK(desk.log(run).size() == 2);
    }
    CHECK(desk.type("ls runs").out == "1\n2\n3\n4\n");
    typed = desk.type("./train_gpt --init runs/2 --data sums.txt --tokenizer tokenizer" + kSizes);
    CHECK(one_line_with(line_of(typed), "beyond the model's vocabulary of 256: leave --tokenizer out"));
}

// No file may grow beyond 4 blocks of 512 bytes or 1 KiB, until prlimit lifts this: neither the log nor a checkpoint.
// The save that fails is tried again, and the log loses no row.
void fill_the_disk(const Desk& desk) {
    const Outcome typed = desk.in_background(
        "ulimit -S -f 4; exec ./train_gpt --out runs/2 --resume --steps 240 --save-every 40",
        "await 'keeps the rows of its logs' err; await 'could not be saved' err; prlimit --pid $pid --fsize=unlimited; "
        "wait $pid; echo status $?");
    const std::string err = slurp(desk.folder / "err");
    INFO(typed.out << err);
    CHECK(typed.out == "status 0\n");
    CHECK_THAT(err, ContainsSubstring("step 40 could not be saved: ") &&
                        ContainsSubstring("the newest checkpoint is runs/2/checkpoints/step-00000002"));
    CHECK(desk.saved_step("runs/2") == 240);
    const std::vector<LogRow> rows = desk.log("runs/2");
    REQUIRE(rows.size() == 240);
    for (size_t i = 0; i < rows.size(); ++i) CHECK(rows[i].step == static_cast<int64_t>(i) + 1);
}

// The message names a checkpoint if there is one, with weights that are finite, and the command that helps.
void diverge(const Desk& desk) {
    const std::string train = "./train_gpt --data sums.txt --lr 1e20 --clip 0 --init runs/1" + kSizes + "--warmup 0 ";
    const std::string with = line_of(desk.type(train + "--save-every 1 --out diverged"));
    INFO(with);
    CHECK(one_line_with(with, "the loss is", "the weights are unchanged by this step",
                        "--resume would meet the same numbers", "--init diverged/checkpoints/step-0000000",
                        " --out OTHER, with a smaller --lr (at this step it was "));
    const SafetensorsReader saved(desk.checkpoint("diverged") + "/model.safetensors");
    for (const float x : saved.at("model.norm.weight").floats()) CHECK(std::isfinite(x));
    const std::string without = line_of(desk.type(train + "--out none"));
    INFO(without);
    CHECK(one_line_with(without, "the loss is", "Nothing was saved yet"));
    CHECK(without.find("checkpoints/") == std::string::npos);
}

}  // namespace

TEST_CASE("a newcomer's afternoon", "[program][afternoon]") {
    const Desk desk;
    lengthen_and_move(desk, train_and_stop(desk));
    fine_tune(desk);
    load_with_transformers(desk);
    start_three_at_once(desk);
    fill_the_disk(desk);
    diverge(desk);
}
