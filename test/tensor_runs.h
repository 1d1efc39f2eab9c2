// test/tensor_runs.h: whole runs with tensor parallelism, for comparison with those of one process.
//
// A run with --tp computes what one process does, but for the order in which the ranks' parts of a sum are added. With
// momentum, which is linear in the gradients, losses of 20 steps then differ by some 1e-7 and the weights by 1e-6 at
// most; AdamW would make much of the gradients that are 0 but for rounding (of GPT-2's key biases, for example).
#pragma once

#include "run_models.h"
#include "train_runs.h"

#include <array>

// Long enough that errors would grow, and so slow that rounding does not.
inline const std::string kTwentySteps = "--steps 20 --lr 0.01 ";

// What the model wrote before training, with the line above it.
inline std::string first_sample(const Outcome& its) {
    const size_t first = its.out.find("---- sample before training"), last = its.out.find("\n----\n", first + 8);
    REQUIRE(last != std::string::npos);
    return its.out.substr(first, last - first);
}

struct Runs {
    TempFolder folder;
    int number = 0;
    Outcome outcome(const std::string& model_name, const std::string& flags, const std::string& run,
                    const std::string& before = "") {
        return run_on_ranks(
            "--data " + text_file() + " --model " + model_file(model_name) +
                " --batch 12 --seq 16 --steps 10 --warmup 2 --val-every 5 --val-sequences 24 --sample 0 "
                "--optimizer momentum " +
                flags + " --out " + run,
            before);
    }
    // Flags for a model that has learned something: to one that has not all tokens are nearly as probable, and its
    // sample is the same whatever is wrong.
    std::string trained(const std::string& model_name) {
        return "--init " + run(model_name, "--steps 60 --optimizer adamw --lr 0.01 --val-every 0 ") + " ";
    }
    std::string run(const std::string& model_name, const std::string& flags, const std::string& before = "") {
        const std::string path = folder / std::to_string(number++);
        const Outcome its = outcome(model_name, flags, path, before);
        INFO(model_name << " " << flags << "\n" << its.err);
        REQUIRE(its.status == 0);
        const bool divides = flags.find("--tp") != std::string::npos || flags.find("--pp") != std::string::npos;
        if (divides && before.empty()) check_account(its.out, flags);
        return path;
    }
    // A run with `before` to step 5, and on with `after`: its folder.
    std::string resumed(const std::string& model_name, const std::string& common, const std::string& before,
                        const std::string& after) {
        INFO(model_name << " " << common << ": " << before << "-> " << after);
        const std::string path = run(model_name, common + before + "--stop-after 5 ");
        must_succeed(outcome(model_name, common + after + "--resume ", path));
        return path;
    }
};

// A model, flags, and words of the one line that refuses them.
inline void check_refused(Runs& runs, const std::array<std::string, 3>& wrong) {
    const auto& [model, flags, words] = wrong;
    const Outcome outcome =
        run_program("train_gpt", "--data " + text_file() + " --seq 16 --sample 0 --model " + model_file(model) + " " +
                                     flags + " --out " + (runs.folder / "wrong"));
    INFO(flags);
    CHECK_THAT(line_of(outcome), ContainsSubstring(words));
    CHECK(!std::filesystem::exists(runs.folder / "wrong"));
}
