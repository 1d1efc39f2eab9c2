// training/progress.cu: what a person sees of a run: the first lines, one line per step, samples of text, the logs,
// the plot.
#include "training/training.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>

void print_start(const Trainer& t, const RunData& data) {
    const TrainOptions& o = t.options;
    const bool slow = o.precision.dtype == DType::bf16 && device().capability < 80;
    std::printf("device   %s%s\n", device().name.c_str(),
                slow ? ": its tensor cores multiply no bf16, --dtype fp16 is faster" : "");
    std::printf("model    %s: %s parameters in %s, %lld layers, width %lld, %lld heads, vocabulary %lld\n",
                (o.init.empty() ? o.model : o.init).c_str(),
                human_count(static_cast<double>(parameter_count(t.config))).c_str(), o.dtype.c_str(),
                static_cast<long long>(t.config.L), static_cast<long long>(t.config.C),
                static_cast<long long>(t.config.H), static_cast<long long>(t.config.V));
    if (o.pretrained_lr)
        std::printf(
            "start    from trained weights: the learning rate rises to %g, a tenth of %s's default (set --lr)\n",
            o.schedule.peak, o.optimizer.c_str());
    for (size_t i = 0; i < data.train_tokens.size(); ++i) {
        const MixedSource& part = data.train_tokens[i];
        std::printf("data     %s; ", part.tokens.description().c_str());
        if (data.train_tokens.size() > 1)
            std::printf("%.1f %% of the sequences; ", 100 * static_cast<double>(part.share) / kMixShares);
        std::printf("training on %s tokens", human_count(static_cast<double>(part.tokens.n())).c_str());
        // Of several sources the last line says what is held out of all.
        if (i + 1 == data.train_tokens.size())
            std::printf(", %s held out",
                        data.val ? human_count(static_cast<double>(data.identity.val_n)).c_str() : "none");
        std::printf("\n");
    }
    std::printf("output   %s\n", o.out.c_str());
    if (started_by_mpirun())
        std::printf("stop     kill -USR1 %ld finishes a step and saves; mpirun's Ctrl-C leaves one second for that\n",
                    static_cast<long>(::getppid()));
}

LogRow make_row(const Trainer& t, int64_t step, const StepResult& result, double step_seconds, double matmul_rate) {
    const TrainOptions& o = t.options;
    const int64_t n_step = o.batch * o.seq;  // tokens, of all ranks
    LogRow row;
    row.step = step;
    row.tokens = step * n_step;
    // Where the forward overflowed there is no loss, and none is written: the column stays empty. Where only gradients
    // did, there is one.
    if (std::isfinite(result.loss)) row.loss = result.loss;
    row.lr = learning_rate(o.schedule, step);
    if (!result.skipped) row.grad_norm = result.grad_norm;
    if (o.precision.dtype == DType::f16) row.loss_scale = result.loss_scale.value_or(t.scaler.scale);
    row.tokens_per_s = static_cast<double>(n_step) / step_seconds;
    row.mfu = flops_per_token(t.config, o.seq) * *row.tokens_per_s / (matmul_rate * t.world.size);
    row.step_ms = 1e3 * step_seconds;
    return row;
}

// A new run that cannot begin its logs, as on a full disk, leaves none: the same command is to work again.
RunLog::RunLog(const std::string& out, int64_t resume_step) try
    : csv_(out + "/log.csv", resume_step), tensorboard_(out, resume_step) {
} catch (const Error&) {
    if (resume_step < 0) ::unlink((out + "/log.csv").c_str());
}

void RunLog::write_waiting() {
    for (; !csv_waits_.empty(); csv_waits_.pop_front()) csv_.write(csv_waits_.front());
    for (; !events_wait_.empty(); events_wait_.pop_front()) {
        LogRow& row = events_wait_.front();
        const std::pair<const char*, std::optional<double>*> scalars[] = {
            {"train/loss", &row.loss},
            {"train/lr", &row.lr},
            {"train/grad_norm", &row.grad_norm},
            {"train/loss_scale", &row.loss_scale},
            {"train/tokens_per_s", &row.tokens_per_s},
            {"val/loss", &row.val_loss},
        };
        for (const auto& [tag, value] : scalars) {
            if (*value) tensorboard_.scalar(tag, row.step, **value);
            value->reset();  // it is there, also where the next one has to wait
        }
    }
}

void RunLog::write(const LogRow& row) {
    csv_waits_.push_back(row);
    events_wait_.push_back(row);
    try {
        write_waiting();
        said_ = false;
    } catch (const Error& error) {
        if (std::exchange(said_, true)) return;
        end_progress_line();
        std::fprintf(stderr,
                     "train_gpt: %s. The run goes on, and keeps the rows of its logs until they can be written\n",
                     error.what());
    }
}

namespace {

bool line_is_open = false;  // a line of progress in a terminal that the next one will replace

// A terminal in which a line can be replaced. mpirun gives its ranks one of their own, whatever its output goes to.
bool prints_to_terminal() {
    if (!terminal_knows_escapes()) return false;
    if (!isatty(STDOUT_FILENO) || !started_by_mpirun()) return isatty(STDOUT_FILENO);
    std::error_code none;
    const std::string output =
        std::filesystem::read_symlink(concat("/proc/", ::getppid(), "/fd/", STDOUT_FILENO), none).string();
    return output.starts_with("/dev/pts/") || output.starts_with("/dev/tty");
}

// No more than the terminal's width: what goes on in a second line could not be replaced.
std::string one_line(std::string text) {
    winsize size = {};
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1)
        text = text.substr(0, static_cast<size_t>(size.ws_col) - 1);
    return text;
}

std::string progress_text(const LogRow& row, int64_t steps, double seconds_left) {
    std::string line =
        format("step %*lld/%lld | loss %.4f | lr %.2e | ", static_cast<int>(std::to_string(steps).size()),
               static_cast<long long>(row.step), static_cast<long long>(steps), row.loss.value_or(NAN), *row.lr);
    line += row.grad_norm ? format("norm %6.3f", *row.grad_norm) : "overflow: step skipped";
    if (row.loss_scale) line += concat(" | scale ", *row.loss_scale);
    line += format(" | %7s tok/s | %4.1f%% of matmul peak", human_count(*row.tokens_per_s).c_str(), 100 * *row.mfu);
    if (row.step < steps) line += concat(" | ", human_seconds(seconds_left), " left");
    if (row.val_loss) line += format(" | val loss %.4f", *row.val_loss);
    return line;
}

}  // namespace

void end_progress_line() {
    if (std::exchange(line_is_open, false)) std::printf("\n");
    std::fflush(stdout);
}

void print_progress(const LogRow& row, const TrainOptions& o, double seconds_left) {
    const bool stays = row.val_loss || row.step == o.last_step();
    if (o.log_every > 0 && row.step % o.log_every != 0 && !stays) return;
    const std::string line = progress_text(row, o.steps, seconds_left);
    if (o.log_every > 0 || !prints_to_terminal()) {
        std::printf("%s\n", line.c_str());
    } else {
        std::printf("\r%s\033[K", stays ? line.c_str() : one_line(line).c_str());  // \033[K: clears what is behind it
        line_is_open = true;
        if (stays) end_progress_line();
    }
    std::fflush(stdout);
}

void print_val_loss_of_init(const LogRow& row, int64_t steps) {
    std::printf("step %*d/%lld | val loss %.4f of the weights of --init\n",
                static_cast<int>(std::to_string(steps).size()), 0, static_cast<long long>(steps), *row.val_loss);
    std::fflush(stdout);
}

// With ZeRO 3, and where layers are divided, no rank has all weights: so all of them run the model for every token, and
// rank 0 decides when it is enough.
void print_sample(Trainer& t, const RunData& data, const char* title) {
    const bool together = t.world.size > 1 && (t.model.sharding.shards_weights() || t.tensor_parallel);
    if (t.options.sample_tokens == 0 || (t.world.rank != 0 && !together)) return;
    std::vector<int32_t> text;
    const double deadline = seconds_now() + 10;  // a large model is slow
    sample(*t.sampler, data.prompt(), t.options.sample_tokens, t.options.temperature,
           static_cast<uint64_t>(t.options.seed), [&](int32_t token) {
               text.push_back(token);
               const int64_t go_on = seconds_now() < deadline && !stop_requested();
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
    try {
        for (const LogRow& row : read_csv_log(out + "/log.csv")) {
            if (row.loss) train.x.push_back(static_cast<double>(row.step)), train.y.push_back(*row.loss);
            if (row.val_loss) val.x.push_back(static_cast<double>(row.step)), val.y.push_back(*row.val_loss);
        }
        plot.series = {train};
        if (!val.x.empty()) plot.series.push_back(val);
        write_png(out + "/loss.png", plot);
    } catch (const std::exception& error) {  // a full disk, or a log that was moved away, is no reason to end the run
        end_progress_line();
        std::fprintf(stderr, "train_gpt: %s. The run goes on without a new plot\n", reason_of(error));
    }
}

void print_end(Trainer& t, int64_t step, size_t bytes_taken, double seconds) {
    const TrainOptions& o = t.options;
    if (t.best)
        std::printf("best     step %lld, with a validation loss of %.4f\n", static_cast<long long>(t.best->step),
                    t.best->val_loss);
    if (step < o.steps) {
        std::printf("stopped after step %lld of %lld; saved. Continue with:  %s\n", static_cast<long long>(step),
                    static_cast<long long>(o.steps), resume_command(o).c_str());
        return;
    }
    std::printf("memory   %s taken on the device (%zu bytes; %zu planned)\n",
                human_bytes(static_cast<double>(bytes_taken)).c_str(), bytes_taken, t.memory.bytes());
    if (t.offload)
        std::printf("         %s on the host (%zu bytes)\n",
                    human_bytes(static_cast<double>(t.memory.host_bytes())).c_str(), t.memory.host_bytes());
    std::printf("done in %s: %s/loss.png, log.csv, checkpoints, and TensorBoard events (tensorboard --logdir %s)\n",
                human_seconds(seconds).c_str(), o.out.c_str(), shell_quoted(o.out).c_str());
}
