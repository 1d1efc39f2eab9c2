// training/progress.cu: what a person sees of a run: the first lines, one line per step, samples of text, the logs,
// the plot.
#include "training/training.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

void print_start(const Trainer& t, const TokenSource& train_tokens, const TokenSource& val_tokens) {
    const TrainOptions& o = t.options;
    std::printf("device   %s\n", device().name.c_str());
    std::printf("model    %s: %s parameters in %s, %lld layers, width %lld, %lld heads, vocabulary %lld\n",
                (o.init.empty() ? o.model : o.init).c_str(),
                human_count(static_cast<double>(parameter_count(t.config))).c_str(), o.dtype.c_str(),
                static_cast<long long>(t.config.L), static_cast<long long>(t.config.C),
                static_cast<long long>(t.config.H), static_cast<long long>(t.config.V));
    std::printf("data     %s; training on %s tokens, %s held out\n", train_tokens.description().c_str(),
                human_count(static_cast<double>(train_tokens.n())).c_str(),
                human_count(static_cast<double>(val_tokens.n())).c_str());
    std::printf("output   %s\n", o.out.c_str());
}

LogRow make_row(const Trainer& t, int64_t step, const StepResult& result, double step_seconds, double matmul_rate) {
    const TrainOptions& o = t.options;
    const int64_t n_step = o.batch * o.seq;  // tokens, of all ranks
    LogRow row;
    row.step = step;
    row.tokens = step * n_step;
    // A step that overflowed has no loss to speak of, and none is written: the column stays empty.
    if (std::isfinite(result.loss)) row.loss = result.loss;
    row.lr = learning_rate(o.schedule, step);
    if (!result.skipped) row.grad_norm = result.grad_norm;
    if (o.precision.dtype == DType::f16) row.loss_scale = t.scaler.scale;
    row.tokens_per_s = static_cast<double>(n_step) / step_seconds;
    row.mfu = flops_per_token(t.config, o.seq) * *row.tokens_per_s / (matmul_rate * t.world.size);
    row.step_ms = 1e3 * step_seconds;
    return row;
}

RunLog::RunLog(const std::string& out, int64_t resume_step)
    : csv_(out + "/log.csv", resume_step), tensorboard_(out, resume_step) {}

void RunLog::write(const LogRow& row) {
    csv_.write(row);
    const std::pair<const char*, std::optional<double>> scalars[] = {
        {"train/loss", row.loss},
        {"train/lr", row.lr},
        {"train/grad_norm", row.grad_norm},
        {"train/loss_scale", row.loss_scale},
        {"train/tokens_per_s", row.tokens_per_s},
        {"val/loss", row.val_loss},
    };
    for (const auto& [tag, value] : scalars)
        if (value) tensorboard_.scalar(tag, row.step, *value);
}

void print_progress(const LogRow& row, int64_t steps, double seconds_left) {
    std::printf("step %*lld/%lld | loss %.4f | lr %.2e | ", static_cast<int>(std::to_string(steps).size()),
                static_cast<long long>(row.step), static_cast<long long>(steps), row.loss.value_or(NAN), *row.lr);
    if (row.grad_norm) std::printf("norm %6.3f", *row.grad_norm);
    else std::printf("overflow: step skipped");
    if (row.loss_scale) std::printf(" | scale %g", *row.loss_scale);
    std::printf(" | %7s tok/s | %4.1f%% of matmul peak", human_count(*row.tokens_per_s).c_str(), 100 * *row.mfu);
    if (row.step < steps) std::printf(" | %s left", human_seconds(seconds_left).c_str());
    if (row.val_loss) std::printf(" | val loss %.4f", *row.val_loss);
    std::printf("\n");
    std::fflush(stdout);
}

// With ZeRO 3 no rank has all weights, so all of them run the model for every token,
// and rank 0 decides when it is enough.
void print_sample(Trainer& t, const RunData& data, const char* title) {
    const bool together = t.model.sharding.shards_weights() && t.world.size > 1;
    if (t.options.sample_tokens == 0 || (t.world.rank != 0 && !together)) return;
    std::vector<int32_t> text;
    const double deadline = seconds_now() + 10;  // the whole window is computed for every token: a large model is slow
    sample(t.model, t.sample_acts, t.sample_workspace, data.prompt(), t.options.sample_tokens, t.options.temperature,
           static_cast<uint64_t>(t.options.seed), [&](int32_t token) {
               text.push_back(token);
               const int64_t go_on = seconds_now() < deadline;
               return (together ? gather_numbers(t.world, {go_on})[0][0] : go_on) != 0;
           });
    if (t.world.rank != 0) return;
    std::printf("---- %s ----\n%s\n----\n", title, data.show(text).c_str());
    std::fflush(stdout);
}

void draw_loss(const std::string& out) {
    // The end of a long path tells runs apart; a title that is too wide would lose it.
    constexpr size_t kMost = 60;
    const std::string name = out.size() <= kMost ? out : "..." + out.substr(out.size() - kMost);
    Plot plot{"Loss of " + name, "step", "loss (nats per token)", {}};
    Series train{"training", {}, {}}, val{"validation", {}, {}};
    train.thick = false;
    val.markers = true;
    for (const LogRow& row : read_csv_log(out + "/log.csv")) {
        if (row.loss) train.x.push_back(static_cast<double>(row.step)), train.y.push_back(*row.loss);
        if (row.val_loss) val.x.push_back(static_cast<double>(row.step)), val.y.push_back(*row.val_loss);
    }
    plot.series = {train, val};
    write_png(out + "/loss.png", plot);
}
