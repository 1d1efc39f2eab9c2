// test/tensor_runs.h: whole runs with tensor parallelism, for comparison with those of one process.
//
// A run with --tp computes what one process does, but for the order in which the ranks' parts of a sum are added. With
// momentum, which is linear in the gradients, losses of 10 steps then differ by some 1e-7 and the weights by 1e-6 at
// most; AdamW would make much of the gradients that are 0 but for rounding (of GPT-2's key biases, for example).
#pragma once

#include "run_models.h"
#include "train_runs.h"

#include <array>
#include <cmath>

// Long enough that errors would grow, and so slow that rounding does not.
inline const std::string kTwentySteps = "--steps 20 --lr 0.01 ";

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
    std::string run(const std::string& model_name, const std::string& flags, const std::string& before = "") {
        const std::string path = folder / std::to_string(number++);
        const Outcome its = outcome(model_name, flags, path, before);
        INFO(model_name << " " << flags << "\n" << its.err);
        REQUIRE(its.status == 0);
        if (flags.find("--tp") != std::string::npos && before.empty()) check_account(its.out);
        return path;
    }
};

// Losses and norms to `tolerance`, the final weights to 10 times that.
inline void check_same_run(const std::string& a, const std::string& b, double tolerance) {
    const std::vector<LogRow> rows = read_csv_log(a + "/log.csv"), others = read_csv_log(b + "/log.csv");
    REQUIRE(rows.size() == others.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        INFO("step " << rows[i].step);
        CHECK(*rows[i].loss == Approx(*others[i].loss).epsilon(tolerance));
        CHECK(*rows[i].grad_norm == Approx(*others[i].grad_norm).epsilon(tolerance));
        REQUIRE(rows[i].val_loss.has_value() == others[i].val_loss.has_value());
        if (rows[i].val_loss) CHECK(*rows[i].val_loss == Approx(*others[i].val_loss).epsilon(tolerance));
    }
    const SafetensorsReader weights(newest_checkpoint(a) + "/model.safetensors"),
        expected(newest_checkpoint(b) + "/model.safetensors");
    REQUIRE(weights.tensors().size() == expected.tensors().size());
    for (const auto& [name, stored] : expected.tensors()) {
        REQUIRE(weights.at(name).shape == stored.shape);
        const std::vector<float> x = weights.at(name).floats(), y = stored.floats();
        double difference = 0, size = 0;
        for (size_t i = 0; i < x.size(); ++i) difference += std::pow(x[i] - y[i], 2), size += std::pow(y[i], 2);
        INFO(name);
        CHECK(std::sqrt(difference) <= 10 * tolerance * std::sqrt(size) + 1e-9);
    }
}
