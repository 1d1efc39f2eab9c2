// train_gpt.cu: trains a GPT-2 or LLaMA model.
//
//   run      make && ./train_gpt                                        a small LLaMA on the C++ headers of this machine
//            ./train_gpt --data shakespeare.txt --out runs/shakespeare    (--help lists all flags)
//   debug    make debug && gdb -x cpu/cuda.gdb --args build/cpu-debug/train_gpt --steps 2
//
// The step, which is the algorithm:
//
//   for each micro-batch:  forward, loss, backward         gradients add up
//   norm of all gradients, clip                            on the device
//   AdamW                                                  new weights
//   read loss and norm back, log
#include "io/io.h"
#include "llm.h"
#include "optim/optim.h"
#include "train_options.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
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
// Memory: everything is counted first, printed, and then taken.

struct Memory {
    Arena values{"parameters"}, grads{"gradients"}, optimizer{"optimizer states"}, activations{"activations"},
        sampling{"sampling"};
    std::vector<Arena*> all() { return {&values, &grads, &optimizer, &activations, &sampling}; }
};

void print_and_reserve(Memory& memory) {
    size_t total = 0, free_bytes = 0, device_bytes = 0;
    std::printf("memory\n");
    const auto line = [](const char* indent, const std::string& what, size_t bytes) {
        std::printf("  %s%-28s %10s\n", indent, what.c_str(), human_bytes(static_cast<double>(bytes)).c_str());
    };
    for (Arena* arena : memory.all()) total += arena->bytes();
    for (Arena* arena : memory.all()) {
        if (arena->bytes() == 0) continue;
        line("", arena->name(), arena->bytes());
        for (const auto& [what, bytes] : arena->table())
            if (bytes < arena->bytes() && bytes >= total / 100) line("  ", what, bytes);  // smaller ones are in the sum
    }
    cudaCheck(cudaMemGetInfo(&free_bytes, &device_bytes));
    line("", "total", total);
    check(total <= device_bytes, "this run needs ", human_bytes(static_cast<double>(total)), ", the device has ",
          human_bytes(static_cast<double>(device_bytes)), ": use a smaller --micro-batch, --seq or --model");
    for (Arena* arena : memory.all()) arena->reserve();
}

// ---------------------------------------------------------------------------------------------------------------------
// The trainer: all that a step needs.

struct Trainer {
    TrainOptions options;
    Config config;
    int64_t micro_batch = 0;
    Memory memory;
    Model model;
    Activations acts, sample_acts;
    std::unique_ptr<Optimizer> optimizer;
    Tensor norm_result, norm_scratch;
    int32_t *host_tokens = nullptr, *host_targets = nullptr;  // pinned, one step's batch
    float *host_losses = nullptr, *host_norm = nullptr;

    void allocate();
    struct Result {
        double loss, grad_norm;
    };
    Result step(const BatchReader& data, int64_t step);
    double evaluate(const BatchReader& data, int64_t n_sequences);
};

void Trainer::allocate() {
    const int64_t n_step = options.batch * options.seq, sample_T = std::min<int64_t>(options.seq, 256);
    const DType dtype = DType::f32;
    for (int pass = 0; pass < 2; ++pass) {  // counting, then for real
        model = build_model(config, dtype, options.seq, memory.values, memory.grads);
        optimizer = make_optimizer(options.optimizer, memory.optimizer, model.params, model.values.n(), options.optimizer_options);
        acts = take_activations(config, dtype, micro_batch, options.seq, true, memory.activations);
        norm_result = memory.activations.take("shared by layers", DType::f32, {2});
        norm_scratch = memory.activations.take("shared by layers", DType::f32, {grad_norm_scratch_n(model.grads.n())});
        if (options.sample_tokens > 0) sample_acts = take_activations(config, dtype, 1, sample_T, false, memory.sampling);
        if (pass == 0) print_and_reserve(memory);
    }
    optimizer->init(device().stream);
    cudaCheck(cudaMallocHost(&host_tokens, static_cast<size_t>(n_step) * sizeof(int32_t)));
    cudaCheck(cudaMallocHost(&host_targets, static_cast<size_t>(n_step) * sizeof(int32_t)));
    cudaCheck(cudaMallocHost(&host_losses, static_cast<size_t>(n_step) * sizeof(float)));
    cudaCheck(cudaMallocHost(&host_norm, 2 * sizeof(float)));
}

// Step s trains on sequences [(s - 1) batch, s batch) of the run.
Trainer::Result Trainer::step(const BatchReader& data, int64_t step) {
    const cudaStream_t stream = device().stream;
    const int64_t T = options.seq, n_step = options.batch * T, n_micro = micro_batch * T;
    for (int64_t b = 0; b < options.batch; ++b)
        data.sequence((step - 1) * options.batch + b, host_tokens + b * T, host_targets + b * T);

    cudaCheck(cudaMemsetAsync(model.grads.data, 0, model.grads.bytes(), stream));
    for (int64_t first = 0; first < n_step; first += n_micro) {
        const size_t bytes = static_cast<size_t>(n_micro) * sizeof(int32_t);
        cudaCheck(cudaMemcpyAsync(acts.tokens.data, host_tokens + first, bytes, cudaMemcpyHostToDevice, stream));
        cudaCheck(cudaMemcpyAsync(acts.targets.data, host_targets + first, bytes, cudaMemcpyHostToDevice, stream));
        forward(model, acts, stream);
        loss_backward(model, acts, 1.0f / static_cast<float>(n_step), stream);
        backward(model, acts, stream);
        cudaCheck(cudaMemcpyAsync(host_losses + first, acts.losses.data, bytes, cudaMemcpyDeviceToHost, stream));
    }
    grad_norm(norm_result, model.grads, static_cast<float>(options.clip), norm_scratch, stream);
    optimizer->step(model.values, model.grads, norm_result, learning_rate(options.schedule, step), step, stream);

    cudaCheck(cudaMemcpyAsync(host_norm, norm_result.data, 2 * sizeof(float), cudaMemcpyDeviceToHost, stream));
    cudaCheck(cudaStreamSynchronize(stream));
    double loss = 0;
    for (int64_t i = 0; i < n_step; ++i) loss += host_losses[i];
    return {loss / static_cast<double>(n_step), host_norm[0]};
}

// Mean loss over the first n_sequences of the held-out text.
double Trainer::evaluate(const BatchReader& data, int64_t n_sequences) {
    const cudaStream_t stream = device().stream;
    const int64_t T = options.seq, n_batches = std::max<int64_t>(1, std::min(n_sequences, data.sequences_per_epoch()) / micro_batch);
    const size_t bytes = static_cast<size_t>(micro_batch * T) * sizeof(int32_t);
    double total = 0;
    for (int64_t batch = 0; batch < n_batches; ++batch) {
        for (int64_t b = 0; b < micro_batch; ++b)
            data.sequence(batch * micro_batch + b, host_tokens + b * T, host_targets + b * T);
        cudaCheck(cudaMemcpyAsync(acts.tokens.data, host_tokens, bytes, cudaMemcpyHostToDevice, stream));
        cudaCheck(cudaMemcpyAsync(acts.targets.data, host_targets, bytes, cudaMemcpyHostToDevice, stream));
        forward(model, acts, stream);
        loss_forward(model, acts, stream);
        cudaCheck(cudaMemcpyAsync(host_losses, acts.losses.data, bytes, cudaMemcpyDeviceToHost, stream));
        cudaCheck(cudaStreamSynchronize(stream));
        for (int64_t i = 0; i < micro_batch * T; ++i) total += host_losses[i];
    }
    return total / static_cast<double>(n_batches * micro_batch * T);
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints: the model as a Hugging Face folder, the optimizer's states by parameter, and state.json.

// The optimizer's states as the file names them. Those that have an element for each parameter are cut by parameter
// ("m.model.norm.weight"), so that the file does not depend on how our memory is laid out.
std::vector<std::pair<std::string, Tensor>> optimizer_tensors(const Trainer& t) {
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const OptimizerState& state : t.optimizer->states()) {
        if (!state.flat) {
            tensors.push_back({state.name, state.tensor});
            continue;
        }
        for (const Param& param : t.model.params)
            tensors.push_back({state.name + "." + param.name, state.tensor.slice(param.offset, param.value.n())});
    }
    return tensors;
}

const char* stored_dtype(DType dtype) {
    switch (dtype) {
        case DType::f32: return "F32";
        case DType::bf16: return "BF16";
        case DType::f16: return "F16";
        case DType::i32: return "I32";
    }
    return "?";
}

void save_checkpoint(const Trainer& t, int64_t step) {
    CheckpointWriter writer(t.options.out, step);
    save_model(t.model, writer.folder());
    std::vector<TensorToStore> states;
    for (const auto& [name, tensor] : optimizer_tensors(t))
        states.push_back({name, stored_dtype(tensor.dtype), {tensor.n()}, [tensor = tensor](void* bytes) { copy_to_host(bytes, tensor); }});
    write_safetensors(writer.folder() + "/optimizer.safetensors", states);
    const nlohmann::ordered_json state = {{"step", step},
                                          {"sequences", step * t.options.batch},
                                          {"tokens", step * t.options.batch * t.options.seq},
                                          {"options", t.options.identity}};
    write_text_file(writer.folder() + "/state.json", state.dump(2) + "\n");
    writer.commit(static_cast<int>(t.options.keep));
}

int64_t load_checkpoint(Trainer& t) {
    const std::string folder = latest_checkpoint(t.options.out).value();
    load_weights(t.model, folder);
    const SafetensorsReader states(folder + "/optimizer.safetensors");
    for (const auto& [name, tensor] : optimizer_tensors(t)) {
        const StoredTensor& stored = states.at(name);
        check(stored.dtype == stored_dtype(tensor.dtype) && stored.n() == tensor.n(), folder, "/optimizer.safetensors: '", name, "' does not fit the model");
        copy_to_device(tensor, stored.data);
    }
    try {
        return nlohmann::json::parse(read_text_file(folder + "/state.json")).at("step").get<int64_t>();
    } catch (const nlohmann::json::exception& error) {
        fail(folder, "/state.json is not a training state: ", error.what());
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What a person sees

// The rate of a large matrix product on this device, in FLOP/s: what a step's FLOP/s are held against.
double measure_matmul_rate() {
    const int64_t n = device().is_cpu ? 1024 : 8192;
    Arena arena("matmul probe");
    Tensor a, b, c;
    for (int pass = 0; pass < 2; ++pass) {
        a = arena.take("probe", DType::f32, {n, n});
        b = arena.take("probe", DType::f32, {n, n});
        c = arena.take("probe", DType::f32, {n, n});
        if (pass == 0) arena.reserve();
    }
    fill_normal(a, 1.0, 1, 1);
    fill_normal(b, 1.0, 1, 2);
    double best = 1e30;
    for (int i = 0; i < 4; ++i) {  // the first one warms up
        const double start = seconds_now();
        matmul(c, a, b, {}, device().stream);
        cudaCheck(cudaStreamSynchronize(device().stream));
        if (i > 0) best = std::min(best, seconds_now() - start);
    }
    return 2.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n) / best;
}

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
    std::printf("step %*lld/%lld | loss %.4f | lr %.2e | norm %6.3f | %7s tok/s | %4.1f%% of matmul peak | %s left",
                static_cast<int>(std::to_string(steps).size()), static_cast<long long>(row.step), static_cast<long long>(steps), *row.loss,
                *row.lr, *row.grad_norm, human_count(*row.tokens_per_s).c_str(), 100 * *row.mfu, human_seconds(seconds_left).c_str());
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

// runs/1, runs/2, ...: the first that does not exist.
std::string fresh_run_folder() {
    for (int i = 1;; ++i)
        if (const std::string folder = "runs/" + std::to_string(i); !std::filesystem::exists(folder)) return folder;
}

void load_model_config(Trainer& t, const Tokenizer& tokenizer) {
    const TrainOptions& o = t.options;
    if (o.resume) {
        t.config = load_config(latest_checkpoint(o.out).value());
    } else {
        t.config = load_config(o.init.empty() ? o.model : o.init);
        if (o.init.empty() && o.model == "tiny") {  // has no vocabulary of its own
            t.config.V = tokenizer.vocab_size();
            t.config.T_max = std::max(t.config.T_max, o.seq);
        }
    }
    t.micro_batch = o.micro_batch == 0 ? o.batch : o.micro_batch;
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
    Trainer t;
    t.options = std::move(options);
    TrainOptions& o = t.options;
    load_model_config(t, *tokenizer);
    const auto [train_tokens, val_tokens] = open_train_and_val(o.data, o.val, *tokenizer, o.val_fraction);
    for (const TokenSource& tokens : {train_tokens, val_tokens}) check_tokens(tokens, t.config, o.seq);
    const BatchReader train_data(train_tokens, o.seq, static_cast<uint64_t>(o.seed)), val_data(val_tokens, o.seq, 0);

    if (o.out.empty()) o.out = fresh_run_folder();
    check(o.resume || !std::filesystem::exists(o.out + "/log.csv"), o.out,
          " already holds a run: continue it with --resume, or choose another --out");

    std::printf("device   %s\n", device().name.c_str());
    std::printf("model    %s: %s parameters, %lld layers, width %lld, %lld heads, vocabulary %lld\n",
                (o.init.empty() ? o.model : o.init).c_str(), human_count(static_cast<double>(parameter_count(t.config))).c_str(),
                static_cast<long long>(t.config.L), static_cast<long long>(t.config.C), static_cast<long long>(t.config.H),
                static_cast<long long>(t.config.V));
    std::printf("data     %s; training on %s tokens, %s held out\n", train_tokens.description().c_str(),
                human_count(static_cast<double>(train_tokens.n())).c_str(), human_count(static_cast<double>(val_tokens.n())).c_str());
    std::printf("output   %s\n", o.out.c_str());
    const double matmul_rate = measure_matmul_rate();
    t.allocate();

    int64_t step = 0;
    if (o.resume) {
        step = load_checkpoint(t);
        std::printf("resumed after step %lld\n", static_cast<long long>(step));
    } else if (!o.init.empty()) {
        load_weights(t.model, o.init);
    } else {
        init_weights(t.model, static_cast<uint64_t>(o.seed));
    }
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
        const Trainer::Result result = t.step(train_data, step);
        const double step_seconds = seconds_now() - step_start;
        check(std::isfinite(result.loss) && std::isfinite(result.grad_norm), "step ", step, ": the loss is ", result.loss,
              " and the gradient norm ", result.grad_norm, "; the weights are unchanged by this step. Use a smaller --lr, a longer "
              "--warmup or a smaller --clip; the last checkpoint in ", o.out, " is good");

        LogRow row;
        row.step = step;
        row.tokens = step * n_step;
        row.loss = result.loss;
        row.lr = learning_rate(o.schedule, step);
        row.grad_norm = result.grad_norm;
        row.tokens_per_s = static_cast<double>(n_step) / step_seconds;
        row.mfu = flops * *row.tokens_per_s / matmul_rate;
        row.step_ms = 1e3 * step_seconds;
        if (step == o.steps || (o.val_every > 0 && step % o.val_every == 0)) row.val_loss = t.evaluate(val_data, o.val_sequences);
        csv.write(row);
        tensorboard.scalar("train/loss", step, *row.loss);
        tensorboard.scalar("train/lr", step, *row.lr);
        tensorboard.scalar("train/grad_norm", step, *row.grad_norm);
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
