// test/train_runs.h: small runs of train_gpt, and what two of them have in common.
#pragma once

#include "io/io.h"
#include "program.h"

#include <cmath>

// A run of a few seconds at most: 2 sequences of 16 bytes a step.
inline const std::string kSmall =
    " --batch 2 --seq 16 --steps 20 --val-every 10 --val-sequences 4 --sample 0 --warmup 2 ";

inline const std::string& text_file() {
    static const TempFolder folder;
    static const std::string path = [] {
        spit(folder / "text.txt", made_text(400));
        return folder / "text.txt";
    }();
    return path;
}

inline Outcome train(const std::string& arguments, const std::string& before = "") {
    return run_program("train_gpt", "--data " + text_file() + kSmall + arguments, before);
}

// Runs `command` in the background of a shell script, which finds its process number in $pid and what it printed in
// FOLDER/out and FOLDER/err. await TEXT FILE: waits until the text is there, at most 60 s.
inline Outcome with_background(const TempFolder& folder, const std::string& command, const std::string& script) {
    // What a command before this one has printed must not be taken for this one's.
    for (const char* old : {"out", "err"}) std::filesystem::remove(folder / old);
    return run_shell(concat("export OMP_NUM_THREADS=1; await() { for i in $(seq 1200); do grep -q \"$1\" ", folder.path,
                            "/$2 && return; sleep 0.05; done; echo \"$1 did not come\"; }; ( ", command, " ) > ",
                            folder / "out", " 2> ", folder / "err", " & pid=$!; ", script));
}

// The rows of log.csv without the columns that measure time.
inline std::string log_without_times(const std::string& run) {
    std::string text;
    for (const LogRow& row : read_csv_log(run + "/log.csv"))
        text += format("%lld %lld %a %a %a %a %a\n", static_cast<long long>(row.step),
                       static_cast<long long>(row.tokens), row.loss.value_or(-1), row.val_loss.value_or(-1),
                       row.lr.value_or(-1), row.grad_norm.value_or(-1), row.loss_scale.value_or(-1));
    return text;
}

inline void check_same_end(const std::string& a, const std::string& b) {
    for (const std::string file : {"/model.safetensors", "/optimizer.safetensors"}) {
        INFO(file);
        CHECK(slurp(newest_checkpoint(a) + file) == slurp(newest_checkpoint(b) + file));
    }
    CHECK(log_without_times(a) == log_without_times(b));
}

// Two runs of as many steps: losses and norms to `tolerance`, the final weights, each parameter in its own length, to
// `of_weights` times that.
inline void check_same_run(const std::string& a, const std::string& b, double tolerance, double of_weights = 10) {
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
        CHECK(std::sqrt(difference) <= of_weights * tolerance * std::sqrt(size) + 1e-9);
    }
}
