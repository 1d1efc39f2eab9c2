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
//                                                              with fp8 this copy is quantised. With --offload on the
//                                                              host, and without clipping already during the backward
//   read loss and norm back, log                               a norm that is inf: nothing was updated, lower the scale
#include "training/training.h"

#include <algorithm>
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

// ---------------------------------------------------------------------------------------------------------------------
// The step

struct StepResult {
    double loss, grad_norm;
    bool skipped;  // a gradient overflowed; nothing has changed but the loss scale
    bool stop;     // some rank was asked to
};

// The device runs ahead of the host: it is asked once a step, at the end, for the losses and the norm.
void copy_to_device_async(const Tensor& to, const void* from, cudaStream_t stream) {
    cudaCheck(cudaMemcpyAsync(to.data, from, to.bytes(), cudaMemcpyHostToDevice, stream));
}
void copy_to_host_async(void* to, const Tensor& from, cudaStream_t stream) {
    cudaCheck(cudaMemcpyAsync(to, from.data, from.bytes(), cudaMemcpyDeviceToHost, stream));
}

// For tests (--inject-overflow STEP): what a gradient too large for its type leaves behind.
void inject_overflow(const Model& model, cudaStream_t stream) {
    static const float f32 = INFINITY;
    static const __half f16 = __float2half(INFINITY);
    const Tensor grads = model.grad_shard(1), one = grads.slice(grads.n() / 2, 1);
    copy_to_device_async(one, one.dtype == DType::f32 ? static_cast<const void*>(&f32) : &f16, stream);
}

// Sequences [first, first + n) of the run or of the held-out text, to the device.
void read_sequences(Trainer& t, const BatchReader& data, int64_t first, int64_t n, int64_t to) {
    const int64_t T = t.options.seq;
    for (int64_t b = 0; b < n; ++b)
        data.sequence(first + b, t.host_tokens + (to + b) * T, t.host_targets + (to + b) * T);
}
void upload_micro_batch(Trainer& t, const Activations& acts, int64_t first, cudaStream_t stream) {
    const int64_t T = t.options.seq;
    copy_to_device_async(acts.tokens, t.host_tokens + first * T, stream);
    copy_to_device_async(acts.targets, t.host_targets + first * T, stream);
    if (!acts.documents) return;
    copy_to_device_async(acts.documents, t.host_documents + 2 * first * T, stream);
    copy_to_device_async(acts.positions, t.host_positions + first * T, stream);
}

// Step s trains on sequences [(s - 1) batch, s batch) of the run; each rank on its share of them.
StepResult train_step(Trainer& t, const BatchReader& data, int64_t step) {
    const TrainOptions& o = t.options;
    const cudaStream_t stream = device().stream;
    Model& model = t.model;
    DataParallel& ranks = t.data_parallel;
    const double n_step = static_cast<double>(o.batch * o.seq);  // tokens, of all ranks
    t.world.set_step(step);
    ranks.start_clock();
    const int64_t first = (step - 1) * o.batch + t.world.rank * t.local_batch;
    read_sequences(t, data, first, t.local_batch, 0);
    // The last token of a document keeps its target, the first of the next one: where that is an end-of-text token, it is how
    // a model learns to end.
    for (int64_t b = 0; o.mask_documents && b < t.local_batch; ++b)
        data.documents(first + b, t.host_documents + 2 * b * o.seq, t.host_positions + b * o.seq);

    const float loss_scale = static_cast<float>(t.scaler.scale);
    if (t.offload)
        t.offload->begin_step(learning_rate(o.schedule, step), t.updates + 1, 1.0f / loss_scale,
                              static_cast<uint64_t>(o.seed));
    cudaCheck(cudaMemsetAsync(t.totals.data, 0, t.totals.bytes(), stream));
    for (int64_t micro = 0; micro < t.local_batch / t.micro_batch; ++micro) {
        upload_micro_batch(t, t.acts, micro * t.micro_batch, stream);
        forward(model, t.acts, stream);
        loss_backward(model, t.acts, static_cast<float>(loss_scale / n_step), stream);
        add_losses(t.loss_sum(), t.acts.losses, stream);
        ranks.begin_backward(model, micro, stream);
        backward(model, t.acts, stream);
    }
    ranks.finish_grads(stream);
    if (step == o.inject_overflow && t.world.rank == 0) inject_overflow(model, stream);

    // Each rank squares its part, also where it holds all gradients: so the norm has the same bits with and without ZeRO.
    const int64_t n_units = static_cast<int64_t>(model.units.size());
    for (int64_t u = 0; u < n_units; ++u)
        sum_squares(t.totals.slice(u, 1).view({2}), model.grad_shard(static_cast<size_t>(u)), t.norm_scratch, stream);
    t.host_totals[4] = stop_requested ? 1.0f : 0.0f, t.host_totals[5] = 0;
    copy_to_device_async(t.stop_count(), t.host_totals + 4, stream);
    ranks.all_reduce(t.totals, stream);
    clip_scale(t.norm_result, t.totals.slice(0, n_units), static_cast<float>(o.clip), 1.0f / loss_scale, stream);
    for (size_t u = 0; u < model.units.size(); ++u) {
        if (t.offload) t.offload->update(u, t.norm_result, stream);
        else
            t.optimizers[u]->step(model.updated_weights(u, static_cast<uint64_t>(o.seed)), model.updated_grads(u),
                                  t.norm_result, learning_rate(o.schedule, step), t.updates + 1, stream);
        ranks.all_gather_weights(model, u, stream);
    }
    quantise_weights(model, stream);
    advance_fp8(model, stream);

    copy_to_host_async(t.host_totals, t.norm_result, stream);
    copy_to_host_async(t.host_totals + 2, t.loss_sum(), stream);
    copy_to_host_async(t.host_totals + 4, t.stop_count(), stream);
    cudaCheck(cudaStreamSynchronize(stream));
    const double loss = (static_cast<double>(t.host_totals[2]) + t.host_totals[3]) / n_step, norm = t.host_totals[0];
    const bool overflow = !std::isfinite(norm);
    const bool unchanged = !model.sharding.host_updates() || o.updates_after_norm();
    check((!overflow && std::isfinite(loss)) || o.precision.dtype == DType::f16, "step ", step, ": the loss is ", loss,
          " and the gradient norm ", norm, unchanged ? "; the weights are unchanged by this step" : "",
          ". Use a smaller --lr, a longer --warmup or a smaller --clip; the last "
          "checkpoint in ",
          o.out, " is good");
    t.scaler.update(overflow);
    if (!overflow) ++t.updates;
    return {loss, norm, overflow, t.host_totals[4] > 0};
}

// Mean loss over the first n_sequences of the held-out text; never masked, so that runs can be compared. The ranks take
// micro-batches in turn.
double evaluate(Trainer& t, const BatchReader& data, int64_t n_sequences) {
    Activations acts = t.acts;  // the same memory
    acts.documents = acts.positions = {};
    const cudaStream_t stream = device().stream;
    const int64_t n_batches = std::max<int64_t>(1, std::min(n_sequences, data.sequences_per_epoch()) / t.micro_batch);
    cudaCheck(cudaMemsetAsync(t.totals.data, 0, t.totals.bytes(), stream));
    for (int64_t first = 0; first < n_batches; first += t.world.size) {
        const int64_t batch = first + t.world.rank;
        if (batch < n_batches) {
            read_sequences(t, data, batch * t.micro_batch, t.micro_batch, 0);
            upload_micro_batch(t, acts, 0, stream);
        } else if (!t.model.sharding.shards_weights()) {
            break;
        }
        forward(t.model, acts, stream, false);  // with ZeRO 3 all ranks must take part in every forward
        loss_forward(t.model, acts, stream);
        if (batch < n_batches) add_losses(t.loss_sum(), acts.losses, stream);
        cudaCheck(cudaStreamSynchronize(stream));
    }
    t.data_parallel.all_reduce(t.totals, stream);
    copy_to_host_async(t.host_totals + 2, t.loss_sum(), stream);
    cudaCheck(cudaStreamSynchronize(stream));
    return (static_cast<double>(t.host_totals[2]) + t.host_totals[3]) /
           static_cast<double>(n_batches * t.micro_batch * t.options.seq);
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

// Rank 0 writes; with ZeRO 3 no rank has all weights, so all of them run the model, and rank 0 says when it is enough.
void print_sample(Trainer& t, const Tokenizer& tokenizer, const char* title) {
    const bool together = t.model.sharding.shards_weights() && t.world.size > 1;
    if (t.options.sample_tokens == 0 || (t.world.rank != 0 && !together)) return;
    const std::vector<int32_t> prompt = tokenizer.encode("\n");
    std::vector<int32_t> text;
    const double deadline = seconds_now() + 10;  // large models write slowly without a KV cache
    sample(t.model, t.sample_acts, prompt, t.options.sample_tokens, t.options.temperature,
           static_cast<uint64_t>(t.options.seed), [&](int32_t token) {
               text.push_back(token);
               const int64_t go_on = seconds_now() < deadline;
               return (together ? gather_numbers(t.world, {go_on})[0][0] : go_on) != 0;
           });
    if (t.world.rank != 0) return;
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
    std::printf(" | %7s tok/s | %4.1f%% of matmul peak | %s left", human_count(*row.tokens_per_s).c_str(),
                100 * *row.mfu, human_seconds(seconds_left).c_str());
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
    check(largest < config.V, source.description(), ": holds token id ", largest, ", beyond the model's vocabulary of ",
          config.V, ": use the --tokenizer and --model that belong together");
}

void check_documents(const TokenSource& source) {
    check(
        source.n() < 2 || !source.document_starts(1, source.n() - 1).empty(),
        "--mask-documents: ", source.description(),
        ": all of it is one document: give a folder with a file for each, or text or shards with an end-of-text token "
        "before each, or leave the flag away");
}

void print_start(Trainer& t, const TokenSource& train_tokens, const TokenSource& val_tokens) {
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
    print_memory(t.memory);
}

LogRow make_row(const Trainer& t, int64_t step, const StepResult& result, double step_seconds, double matmul_rate) {
    const TrainOptions& o = t.options;
    const int64_t n_step = o.batch * o.seq;
    LogRow row;
    row.step = step;
    row.tokens = step * n_step;
    if (std::isfinite(result.loss)) row.loss = result.loss;
    row.lr = learning_rate(o.schedule, step);
    if (!result.skipped) row.grad_norm = result.grad_norm;
    if (o.precision.dtype == DType::f16) row.loss_scale = t.scaler.scale;
    row.tokens_per_s = static_cast<double>(n_step) / step_seconds;
    row.mfu = flops_per_token(t.config, o.seq) * *row.tokens_per_s / (matmul_rate * t.world.size);
    row.step_ms = 1e3 * step_seconds;
    return row;
}

void log_row(CsvLog& csv, TensorBoardLog& tensorboard, const LogRow& row) {
    csv.write(row);
    if (row.loss) tensorboard.scalar("train/loss", row.step, *row.loss);
    tensorboard.scalar("train/lr", row.step, *row.lr);
    if (row.grad_norm) tensorboard.scalar("train/grad_norm", row.step, *row.grad_norm);
    if (row.loss_scale) tensorboard.scalar("train/loss_scale", row.step, *row.loss_scale);
    tensorboard.scalar("train/tokens_per_s", row.step, *row.tokens_per_s);
    if (row.val_loss) tensorboard.scalar("val/loss", row.step, *row.val_loss);
}

// Which build this is.
std::string program_hash() {
    const std::string path = "/proc/self/exe";
    return std::filesystem::exists(path) ? std::to_string(hash_name(read_text_file(path)))
                                         : std::string(__DATE__ " " __TIME__);
}

// What must not differ between ranks, for check_same_everywhere.
std::vector<std::pair<std::string, std::string>> what_must_agree(const Trainer& t, const TokenSource& train,
                                                                 const TokenSource& val) {
    std::vector<std::pair<std::string, std::string>> things;
    if (started_by_mpirun()) things.push_back({"the program", program_hash()});  // threads are one process
    for (const auto& [flag, value] : t.options.identity) things.push_back({flag, value});
    const DataParallelOptions& d = t.options.data_parallel;
    things.push_back({"--zero", std::to_string(d.zero)});
    things.push_back({"--dp-mode", d.naive ? "naive" : "ddp"});
    things.push_back({"--offload", concat(static_cast<int>(t.options.offload))});
    things.push_back({"--bucket-mib", std::to_string(d.bucket_mib)});
    things.push_back({"--all-reduce", t.options.ranks.all_reduce});
    things.push_back({"--resume", t.options.resume ? "given" : "absent"});
    things.push_back({"config.json", config_to_json(t.config)});
    things.push_back({"the length of the data in tokens", concat(train.n(), " and ", val.n())});
    return things;
}

// All of a run on one rank. Rank 0 speaks and writes.
void run_rank(const TrainOptions& given, Comm& world) {
    TrainOptions options = given;
    const bool speaks = world.rank == 0;
    const bool is_text_readable = !options.tokenizer.empty();
    const auto tokenizer = is_text_readable ? load_tokenizer(options.tokenizer) : make_byte_tokenizer();
    const Config config = choose_config(options, tokenizer->vocab_size());
    Mesh mesh(world, {{"dp", world.size}});
    Trainer t(std::move(options), config, mesh);
    TrainOptions& o = t.options;
    t.take_memory();  // counts
    if (o.plan) return print_plan(t);
    const auto [train_tokens, val_tokens] = open_train_and_val(o.data, o.val, *tokenizer, o.val_fraction);
    for (const TokenSource& tokens : {train_tokens, val_tokens}) check_tokens(tokens, t.config, o.seq);
    if (o.mask_documents) check_documents(train_tokens);
    const BatchReader train_data(train_tokens, o.seq, static_cast<uint64_t>(o.seed)), val_data(val_tokens, o.seq, 0);
    if (world.size > 1) {
        check_same_everywhere(world, what_must_agree(t, train_tokens, val_tokens));
        o.out = broadcast_text(world, o.out.empty() && speaks ? fresh_run_folder() : o.out);
    } else if (o.out.empty()) {
        o.out = fresh_run_folder();
    }
    check(o.resume || !speaks || !std::filesystem::exists(o.out + "/log.csv"), o.out,
          " already holds a run: continue it with --resume, or choose another --out");
    if (speaks && world.size > 1) std::printf("%s", mesh.picture().c_str());
    if (speaks) print_start(t, train_tokens, val_tokens);
    const double matmul_rate = speaks ? measure_matmul_rate(o.precision.dtype) : 0;
    const size_t free_before = free_device_bytes();
    t.reserve();

    int64_t step = 0;
    if (o.resume) {
        step = load_checkpoint(t);
        if (speaks) std::printf("resumed after step %lld\n", static_cast<long long>(step));
    } else if (!o.init.empty()) {
        load_weights(t.model, o.init);
    } else {
        init_weights(t.model, static_cast<uint64_t>(o.seed));
    }
    quantise_weights(t.model, device().stream);
    std::optional<CsvLog> csv;
    std::optional<TensorBoardLog> tensorboard;
    if (speaks) {
        make_folder(o.out);
        csv.emplace(o.out + "/log.csv", o.resume ? step : -1);
        tensorboard.emplace(o.out, o.resume ? step : -1);
    }
    if (!o.resume) print_sample(t, *tokenizer, "sample before training");

    const int64_t first_step = step;
    Traffic step_traffic;
    bool follows_a_step = false;  // nothing but training since the last one: its traffic is the formula's
    const double start = seconds_now();
    bool stopped = step >= o.steps;
    CommTime comm_time;  // of the last step
    while (!stopped && step < o.steps) {
        ++step;
        const double step_start = seconds_now();
        const Traffic before = world.traffic();
        const StepResult result = train_step(t, train_data, step);
        if (follows_a_step || step_traffic.sent == 0) {
            const Traffic after = world.traffic();
            step_traffic = {after.sent - before.sent, after.received - before.received};
        }
        follows_a_step = true;
        if (step == o.steps || step == o.stop_after) comm_time = t.data_parallel.read_clock();
        LogRow row = make_row(t, step, result, seconds_now() - step_start, matmul_rate);
        if (step == o.steps || (o.val_every > 0 && step % o.val_every == 0)) {
            row.val_loss = evaluate(t, val_data, o.val_sequences);
            follows_a_step = false;
        }
        if (speaks) {
            log_row(*csv, *tensorboard, row);
            const double per_step = (seconds_now() - start) / static_cast<double>(step - first_step);
            print_progress(row, o.steps, per_step * static_cast<double>(o.steps - step));
        }
        stopped = result.stop || step == o.stop_after;
        if (stopped || step == o.steps || (o.save_every > 0 && step % o.save_every == 0)) {
            save_checkpoint(t, step);
            if (speaks) draw_loss(o.out);
        }
    }
    if (world.size > 1 && step > first_step) print_account(t, step_traffic, comm_time);
    if (step == o.steps) print_sample(t, *tokenizer, "sample after training");
    if (!speaks) return;
    if (step < o.steps) {
        std::printf("stopped after step %lld of %lld; saved. Continue with:  ./train_gpt --out %s --resume\n",
                    static_cast<long long>(step), static_cast<long long>(o.steps), o.out.c_str());
        return;
    }
    const size_t taken = free_before - free_device_bytes() + device().blas_workspace_bytes;
    std::printf("memory   %s taken on the device (%zu bytes; %zu planned)\n",
                human_bytes(static_cast<double>(taken)).c_str(), taken, t.memory.bytes());
    if (t.offload)
        std::printf("         %s on the host (%zu bytes)\n",
                    human_bytes(static_cast<double>(t.memory.host_bytes())).c_str(), t.memory.host_bytes());
    std::printf("done in %s: %s/loss.png, log.csv, checkpoints, and TensorBoard events (tensorboard --logdir %s)\n",
                human_seconds(seconds_now() - start).c_str(), o.out.c_str(), o.out.c_str());
}

void run(const TrainOptions& options) {
    RankOptions ranks = options.ranks;
    if (options.plan) ranks.ranks = 1;  // one rank plans for all
    ranks.quiet = rank_count(ranks) == 1;
    ranks.trace_folder = options.out.empty() ? "." : options.out;
    run_ranks(ranks, [&](Comm& world) { run_rank(options, world); });
}

}  // namespace

int main(int argc, char** argv) {
    std::signal(SIGINT, request_stop);
    std::signal(SIGTERM, request_stop);
    std::signal(SIGXFSZ, SIG_IGN);  // a file that hits a size limit is a failed write, with its own message
    try {
        run(parse_train_options(argc, argv));
        return 0;
    } catch (const std::exception& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "train_gpt: %s\n", error.what());
        return 2;
    }
}
