// train_gpt.cu: trains a GPT-2 or LLaMA model.
//
//   run      make && ./train_gpt                                        a small LLaMA on the C++ headers of this machine
//            ./train_gpt --data shakespeare.txt --out runs/shakespeare    (--help lists all flags)
//   debug    make debug && gdb -x cpu/cuda.gdb --args build/cpu-debug/train_gpt --steps 2
//
// The step, which is the algorithm:
//
//   for each micro-batch:  forward, scaled loss, backward      in --dtype; gradients add up
//   norm of all gradients, unscale, check, clip                on the device
//   AdamW, or another optimizer, on the float32 weights        and in the same pass the 16-bit copy for the next forward;
//                                                              with fp8 this copy is quantised
//   read loss and norm back, log                               a norm that is inf: nothing was updated, lower the scale
#include "trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <iostream>

#include <unistd.h>

namespace {

volatile std::sig_atomic_t stop_requested = 0;
void request_stop(int signal) {
    stop_requested = 1;
    std::signal(signal, SIG_DFL);  // a second Ctrl-C ends the program at once
}

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---------------------------------------------------------------------------------------------------------------------
// The step

struct StepResult {
    double loss, grad_norm;
    bool skipped;  // a gradient overflowed; nothing has changed but the loss scale
};

// The device runs ahead of the host: it is asked once a step, at the end, for the losses and the norm.
void copy_to_device_async(const Tensor& to, const void* from, cudaStream_t stream) {
    cudaCheck(cudaMemcpyAsync(to.data, from, to.bytes(), cudaMemcpyHostToDevice, stream));
}
void copy_to_host_async(void* to, const Tensor& from, cudaStream_t stream) {
    cudaCheck(cudaMemcpyAsync(to, from.data, from.bytes(), cudaMemcpyDeviceToHost, stream));
}

// For tests (--inject-overflow STEP): what a gradient too large for its type leaves behind.
void inject_overflow(const Tensor& grads, cudaStream_t stream) {
    static const float f32 = INFINITY;
    static const __half f16 = __float2half(INFINITY);
    const Tensor one = grads.slice(grads.n() / 2, 1);
    copy_to_device_async(one, one.dtype == DType::f32 ? static_cast<const void*>(&f32) : &f16, stream);
}

// Step s trains on sequences [(s - 1) batch, s batch) of the run.
StepResult train_step(Trainer& t, const BatchReader& data, int64_t step) {
    const TrainOptions& o = t.options;
    const cudaStream_t stream = device().stream;
    const int64_t T = o.seq, n_step = o.batch * T, n_micro = t.micro_batch * T;
    for (int64_t b = 0; b < o.batch; ++b)
        data.sequence((step - 1) * o.batch + b, t.host_tokens + b * T, t.host_targets + b * T);

    const float loss_scale = static_cast<float>(t.scaler.scale);
    cudaCheck(cudaMemsetAsync(t.model.grads.data, 0, t.model.grads.bytes(), stream));
    for (int64_t first = 0; first < n_step; first += n_micro) {
        copy_to_device_async(t.acts.tokens, t.host_tokens + first, stream);
        copy_to_device_async(t.acts.targets, t.host_targets + first, stream);
        forward(t.model, t.acts, stream);
        loss_backward(t.model, t.acts, loss_scale / static_cast<float>(n_step), stream);
        backward(t.model, t.acts, stream);
        copy_to_host_async(t.host_losses + first, t.acts.losses, stream);
    }
    if (step == o.inject_overflow) inject_overflow(t.model.grads, stream);
    grad_norm(t.norm_result, t.model.grads, static_cast<float>(o.clip), 1.0f / loss_scale, t.norm_scratch, stream);
    t.optimizer->step(t.model.weights(static_cast<uint64_t>(o.seed)), t.model.grads, t.norm_result,
                      learning_rate(o.schedule, step), t.updates + 1, stream);
    quantise_weights(t.model, stream);
    advance_fp8(t.model, stream);

    copy_to_host_async(t.host_norm, t.norm_result, stream);
    cudaCheck(cudaStreamSynchronize(stream));
    double loss = 0;
    for (int64_t i = 0; i < n_step; ++i) loss += t.host_losses[i];
    loss /= static_cast<double>(n_step);
    const double norm = t.host_norm[0];
    const bool overflow = !std::isfinite(norm);
    check((!overflow && std::isfinite(loss)) || o.precision.dtype == DType::f16, "step ", step, ": the loss is ", loss, " and the gradient norm ", norm,
          "; the weights are unchanged by this step. Use a smaller --lr, a longer --warmup or a smaller --clip; the last "
          "checkpoint in ", o.out, " is good");
    t.scaler.update(overflow);
    if (!overflow) ++t.updates;
    return {loss, norm, overflow};
}

// Mean loss over the first n_sequences of the held-out text.
double evaluate(Trainer& t, const BatchReader& data, int64_t n_sequences) {
    const cudaStream_t stream = device().stream;
    const int64_t T = t.options.seq, n_micro = t.micro_batch * T;
    const int64_t n_batches = std::max<int64_t>(1, std::min(n_sequences, data.sequences_per_epoch()) / t.micro_batch);
    double total = 0;
    for (int64_t batch = 0; batch < n_batches; ++batch) {
        for (int64_t b = 0; b < t.micro_batch; ++b)
            data.sequence(batch * t.micro_batch + b, t.host_tokens + b * T, t.host_targets + b * T);
        copy_to_device_async(t.acts.tokens, t.host_tokens, stream);
        copy_to_device_async(t.acts.targets, t.host_targets, stream);
        forward(t.model, t.acts, stream, false);
        loss_forward(t.model, t.acts, stream);
        copy_to_host_async(t.host_losses, t.acts.losses, stream);
        cudaCheck(cudaStreamSynchronize(stream));
        for (int64_t i = 0; i < n_micro; ++i) total += t.host_losses[i];
    }
    return total / static_cast<double>(n_batches * n_micro);
}

// ---------------------------------------------------------------------------------------------------------------------
// What a person sees

// What a terminal can show: control characters and bytes that are no UTF-8 become dots.
std::string printable_text(const std::string& text) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
        const Utf8Char c = utf8_char_at(text, i);
        const bool shown = c.code == '\n' || c.code == '\t' || (c.code >= 32 && c.code != 127 && c.code != 0xfffd);
        out += shown ? text.substr(i, c.bytes) : ".";
        i += c.bytes;
    }
    return out;
}

void print_sample(Trainer& t, const Tokenizer& tokenizer, const char* title) {
    if (t.options.sample_tokens == 0) return;
    const std::vector<int32_t> prompt = tokenizer.encode("\n");
    std::vector<int32_t> text;
    const double deadline = seconds_now() + 10;  // large models write slowly without a KV cache
    sample(t.model, t.sample_acts, prompt, t.options.sample_tokens, t.options.temperature, static_cast<uint64_t>(t.options.seed),
           [&](int32_t token) {
               text.push_back(token);
               return seconds_now() < deadline;
           });
    const std::string printable = printable_text(tokenizer.decode(text));
    std::printf("---- %s ----\n%s\n----\n", title, printable.c_str());
    std::fflush(stdout);
}

void print_progress(const LogRow& row, int64_t steps, double seconds_left) {
    std::printf("step %*lld/%lld | loss %.4f | lr %.2e | ", static_cast<int>(std::to_string(steps).size()),
                static_cast<long long>(row.step), static_cast<long long>(steps), row.loss.value_or(NAN), *row.lr);
    if (row.grad_norm) std::printf("norm %6.3f", *row.grad_norm);
    else std::printf("overflow: step skipped");
    if (row.loss_scale) std::printf(" | scale %g", *row.loss_scale);
    std::printf(" | %7s tok/s | %4.1f%% of matmul peak | %s left", human_count(*row.tokens_per_s).c_str(), 100 * *row.mfu,
                human_seconds(seconds_left).c_str());
    if (row.val_loss) std::printf(" | val loss %.4f", *row.val_loss);
    std::printf("\n");
    std::fflush(stdout);
}

void draw_loss(const std::string& out) {
    Plot plot{"", "step", "loss (nats per token)", {}};
    Series train{"training", {}, {}}, val{"validation", {}, {}};
    val.markers = true;
    for (const LogRow& row : read_csv_log(out + "/log.csv")) {
        if (row.loss) train.x.push_back(static_cast<double>(row.step)), train.y.push_back(*row.loss);
        if (row.val_loss) val.x.push_back(static_cast<double>(row.step)), val.y.push_back(*row.val_loss);
    }
    train.thick = false;
    plot.title = "Loss of " + out;
    plot.series = {train, val};
    write_png(out + "/loss.png", plot);
}

// ---------------------------------------------------------------------------------------------------------------------

size_t free_device_bytes() {
    size_t free_bytes = 0, device_bytes = 0;
    cudaCheck(cudaMemGetInfo(&free_bytes, &device_bytes));
    return free_bytes;
}

// runs/1, runs/2, ...: the first that does not exist.
std::string fresh_run_folder() {
    for (int i = 1;; ++i)
        if (const std::string folder = "runs/" + std::to_string(i); !std::filesystem::exists(folder)) return folder;
}

// The model's configuration: that of the checkpoint, of the weights to start from, or of the preset.
Config choose_config(const TrainOptions& o, int64_t vocab_size) {
    if (o.resume) return load_config(latest_checkpoint(o.out).value());
    Config config = load_config(o.init.empty() ? o.model : o.init);
    if (o.init.empty() && o.model == "tiny") {  // has no vocabulary of its own
        config.V = vocab_size;
        config.T_max = std::max(config.T_max, o.seq);
    }
    return config;
}

void check_tokens(const TokenSource& source, const Config& config, int64_t T) {
    check(source.n() > T, source.description(), ": ", source.n(), " tokens are too short a text for --seq ", T,
          ": use a smaller --seq or more text");
    const int32_t largest = source.max_token();
    check(largest < config.V, source.description(), ": holds token id ", largest,
          ", beyond the model's vocabulary of ", config.V, ": use the --tokenizer and --model that belong together");
}

int run(TrainOptions options) {
    const bool is_text_readable = !options.tokenizer.empty();
    const auto tokenizer = is_text_readable ? load_tokenizer(options.tokenizer) : make_byte_tokenizer();
    const Config config = choose_config(options, tokenizer->vocab_size());
    Trainer t(std::move(options), config);
    TrainOptions& o = t.options;
    t.take_memory();  // counts
    if (o.plan) {
        print_plan(t);
        return 0;
    }
    const auto [train_tokens, val_tokens] = open_train_and_val(o.data, o.val, *tokenizer, o.val_fraction);
    for (const TokenSource& tokens : {train_tokens, val_tokens}) check_tokens(tokens, t.config, o.seq);
    const BatchReader train_data(train_tokens, o.seq, static_cast<uint64_t>(o.seed)), val_data(val_tokens, o.seq, 0);

    if (o.out.empty()) o.out = fresh_run_folder();
    check(o.resume || !std::filesystem::exists(o.out + "/log.csv"), o.out,
          " already holds a run: continue it with --resume, or choose another --out");

    std::printf("device   %s\n", device().name.c_str());
    std::printf("model    %s: %s parameters in %s, %lld layers, width %lld, %lld heads, vocabulary %lld\n",
                (o.init.empty() ? o.model : o.init).c_str(), human_count(static_cast<double>(parameter_count(t.config))).c_str(),
                o.dtype.c_str(), static_cast<long long>(t.config.L), static_cast<long long>(t.config.C),
                static_cast<long long>(t.config.H), static_cast<long long>(t.config.V));
    std::printf("data     %s; training on %s tokens, %s held out\n", train_tokens.description().c_str(),
                human_count(static_cast<double>(train_tokens.n())).c_str(), human_count(static_cast<double>(val_tokens.n())).c_str());
    std::printf("output   %s\n", o.out.c_str());
    print_memory(t.memory);
    const double matmul_rate = measure_matmul_rate(o.precision.dtype);
    const size_t free_before = free_device_bytes();
    t.reserve();

    int64_t step = 0;
    if (o.resume) {
        step = load_checkpoint(t);
        std::printf("resumed after step %lld\n", static_cast<long long>(step));
    } else if (!o.init.empty()) {
        load_weights(t.model, o.init);
    } else {
        init_weights(t.model, static_cast<uint64_t>(o.seed));
    }
    quantise_weights(t.model, device().stream);
    make_folder(o.out);
    CsvLog csv(o.out + "/log.csv", o.resume ? step : -1);
    TensorBoardLog tensorboard(o.out, o.resume ? step : -1);
    if (!o.resume) print_sample(t, *tokenizer, "sample before training");

    const double flops = flops_per_token(t.config, o.seq);
    const int64_t n_step = o.batch * o.seq, first_step = step;
    const double start = seconds_now();
    bool stopped = step >= o.steps;
    while (!stopped && step < o.steps) {
        ++step;
        const double step_start = seconds_now();
        const StepResult result = train_step(t, train_data, step);
        const double step_seconds = seconds_now() - step_start;

        LogRow row;
        row.step = step;
        row.tokens = step * n_step;
        if (std::isfinite(result.loss)) row.loss = result.loss;
        row.lr = learning_rate(o.schedule, step);
        if (!result.skipped) row.grad_norm = result.grad_norm;
        if (o.precision.dtype == DType::f16) row.loss_scale = t.scaler.scale;
        row.tokens_per_s = static_cast<double>(n_step) / step_seconds;
        row.mfu = flops * *row.tokens_per_s / matmul_rate;
        row.step_ms = 1e3 * step_seconds;
        if (step == o.steps || (o.val_every > 0 && step % o.val_every == 0)) row.val_loss = evaluate(t, val_data, o.val_sequences);
        csv.write(row);
        if (row.loss) tensorboard.scalar("train/loss", step, *row.loss);
        tensorboard.scalar("train/lr", step, *row.lr);
        if (row.grad_norm) tensorboard.scalar("train/grad_norm", step, *row.grad_norm);
        if (row.loss_scale) tensorboard.scalar("train/loss_scale", step, *row.loss_scale);
        tensorboard.scalar("train/tokens_per_s", step, *row.tokens_per_s);
        if (row.val_loss) tensorboard.scalar("val/loss", step, *row.val_loss);
        const double per_step = (seconds_now() - start) / static_cast<double>(step - first_step);
        print_progress(row, o.steps, per_step * static_cast<double>(o.steps - step));

        stopped = stop_requested || step == o.stop_after;
        if (stopped || step == o.steps || (o.save_every > 0 && step % o.save_every == 0)) {
            save_checkpoint(t, step);
            draw_loss(o.out);
        }
    }
    if (step < o.steps) {
        std::printf("stopped after step %lld of %lld; saved. Continue with:  ./train_gpt --out %s --resume\n",
                    static_cast<long long>(step), static_cast<long long>(o.steps), o.out.c_str());
        return 0;
    }
    print_sample(t, *tokenizer, "sample after training");
    const size_t taken = free_before - free_device_bytes() + device().blas_workspace_bytes;
    std::printf("memory   %s taken on the device (%zu bytes; %zu planned)\n", human_bytes(static_cast<double>(taken)).c_str(),
                taken, t.memory.bytes());
    std::printf("done in %s: %s/loss.png, log.csv, checkpoints, and TensorBoard events (tensorboard --logdir %s)\n",
                human_seconds(seconds_now() - start).c_str(), o.out.c_str(), o.out.c_str());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    std::signal(SIGINT, request_stop);
    std::signal(SIGTERM, request_stop);
    std::signal(SIGXFSZ, SIG_IGN);  // a file that hits a size limit is a failed write, with its own message
    try {
        return run(parse_train_options(argc, argv));
    } catch (const std::exception& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "train_gpt: %s\n", error.what());
        return 2;
    }
}
