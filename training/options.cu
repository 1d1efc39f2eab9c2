// training/options.cu: parses the command line of train_gpt with CLI11, and checks what can be checked before any work.
#include "training/options.h"

#include "io/io.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <set>

namespace {

// Options that belong to one call of the program and not to the run.
const std::set<std::string> kNotSaved = {"--help",           "--out",         "--resume",     "--stop-after",
                                         "--plan",           "--device-spec", "--params",     "--inject-overflow",
                                         "--ranks",          "--comm",        "--all-reduce", "--comm-timeout",
                                         "--ranks-per-node", "--trace",       "--dp-mode",    "--zero",
                                         "--bucket-mib",     "--offload"};
// Options of the run that a resumed one may be given anew: they do not touch the loss curve (beyond rounding).
const std::set<std::string> kMayChange = {"--val-every",   "--sample",      "--keep",      "--save-every",
                                          "--temperature", "--micro-batch", "--recompute", "--attention"};

// "3e-3" and "0.003" are the same value.
bool same_value(const std::string& a, const std::string& b) {
    char *end_a = nullptr, *end_b = nullptr;
    const double x = std::strtod(a.c_str(), &end_a), y = std::strtod(b.c_str(), &end_b);
    const bool numbers = !a.empty() && !b.empty() && *end_a == 0 && *end_b == 0;
    return numbers ? x == y : a == b;
}

std::string value_of(const CLI::Option& option) {
    return option.count() > 0 ? option.results().back() : option.get_default_str();
}

// Hyperparameters that were given: every optimizer has defaults of its own for the others.
struct GivenHyperparameters {
    std::optional<double> lr;
    std::optional<float> weight_decay, beta1, beta2, eps, momentum;
};

// Flags that only make sense together with others.
struct GivenPrecision {
    std::string master = "auto", grad_dtype = "auto", loss_scale = "auto", recompute = "none", fp8 = "delayed",
                dp_mode = "ddp", attention = "auto", compress = "none", offload = "none";
};

void add_options(CLI::App& app, TrainOptions& o, GivenHyperparameters& given, GivenPrecision& precision) {
    app.add_option("--model", o.model,
                   "tiny, gpt2 (-medium, -large, -xl), llama-1b (-3b, -8b), qwen2.5-0.5b (-1.5b, -7b),\n"
                   "qwen3-0.6b (-1.7b, -4b, -8b), deepseek-tiny (-1b), mfa-tiny (-1b), or a config.json")
        ->group("Model");
    app.add_option("--init", o.init, "start from the weights of this Hugging Face folder (config.json + safetensors)")
        ->group("Model");
    app.add_option("--tokenizer", o.tokenizer, "tokenizer.json for text; without it a token is a byte")->group("Model");

    app.add_option("--dtype", o.dtype,
                   "of weights and activations: fp32, bf16, fp16, or fp8 (bf16 with the blocks' matmuls in 8 bits)")
        ->group("Precision");
    app.add_option("--fp8", precision.fp8,
                   "what shares a scale: delayed or current (a tensor), or block (1x128, 128x128)")
        ->group("Precision");
    app.add_option("--master", precision.master,
                   "fp32: master weights beside 16-bit ones (auto: so); none: bf16 alone, rounded stochastically")
        ->group("Precision");
    app.add_option("--grad-dtype", precision.grad_dtype,
                   "fp32, or same as the weights; auto: fp32 where micro-batches add up")
        ->group("Precision");
    app.add_option("--loss-scale", precision.loss_scale, "dynamic, or a number; auto: dynamic for fp16, otherwise 1")
        ->group("Precision");
    app.add_option("--loss-scale-start", o.loss_scale.start, "dynamic: the first scale")->group("Precision");
    app.add_option("--loss-scale-interval", o.loss_scale.interval,
                   "dynamic: steps without overflow until the scale grows")
        ->group("Precision");
    app.add_option("--loss-scale-growth", o.loss_scale.growth, "dynamic: what it is multiplied by then")
        ->group("Precision");
    app.add_option("--loss-scale-backoff", o.loss_scale.backoff, "dynamic: what it is multiplied by at an overflow")
        ->group("Precision");
    app.add_option("--inject-overflow", o.inject_overflow, "test hook: makes a gradient of this step inf")->group("");

    app.add_option("--attention", precision.attention,
                   "units that compute attention: cores (fp32), mma, hopper (sm_90a), or auto")
        ->group("Precision");
    app.add_option("--recompute", precision.recompute,
                   "activations to compute again in the backward: none, full, selective, or every N-th block kept")
        ->group("Memory");
    app.add_option("--offload", precision.offload,
                   "keep on the host: optimizer (states and masters, updated there; during the backward with "
                   "--clip 0, otherwise after it, when the norm is known), params (also the weights; needs --zero 3), "
                   "unified (pages that move)")
        ->group("Memory");
    app.add_flag("--plan", o.plan, "print where the bytes, FLOPs and seconds of this run go, and end")->group("Memory");
    app.add_option("--device-spec", o.device_spec, "the plan's device: h200, h100, a100, 4090, or this one")
        ->group("Memory");
    app.add_option("--params", o.plan_parameters,
                   "the plan of any model with this many parameters (7.5e9): its states only")
        ->group("Memory");

    app.add_option("--ranks", o.ranks.ranks,
                   "that many ranks, as threads of this process; mpirun -np N starts them as processes")
        ->group("Ranks");
    app.add_option("--zero", o.data_parallel.zero,
                   "cut over the ranks: 1 optimizer states, 2 and gradients, 3 and weights (FSDP)")
        ->group("Ranks");
    app.add_option("--dp-mode", precision.dp_mode, "ddp, or naive: rank 0 collects, updates and sends (to see why not)")
        ->group("Ranks");
    app.add_option("--bucket-mib", o.data_parallel.bucket_mib, "ddp: gradients that are all-reduced at once")
        ->group("Ranks");
    app.add_option("--compress", precision.compress,
                   "ddp: gradients travel as bf16, fp8, powersgd (low rank) or 1bit; none: float32")
        ->group("Ranks");
    app.add_option("--compress-rank", o.data_parallel.compress.rank,
                   "powersgd: columns that stand for a matrix, 1 to 16")
        ->group("Ranks");
    app.add_option("--comm", o.ranks.comm, "who carries messages: auto, threads, mpi or nccl")->group("Ranks");
    app.add_option("--all-reduce", o.ranks.all_reduce, "library, ring, tree, halving or two-level")->group("Ranks");
    app.add_option("--ranks-per-node", o.ranks.ranks_per_node, "threads: pretend that so many share a machine; 0: all")
        ->group("Ranks");
    app.add_option("--comm-timeout", o.ranks.timeout_s, "seconds that a rank waits for another before the run ends")
        ->group("Ranks");
    app.add_flag("--trace", o.ranks.trace, "print every message; write trace.json (Perfetto) and trace.png")
        ->group("Ranks");

    app.add_option("--data", o.data,
                   "text file, folder of text, or token shards *.bin; default: this machine's C++ headers")
        ->group("Data");
    app.add_option("--val", o.val, "held-out text or shards; default: the last part of --data")->group("Data");
    app.add_option("--val-fraction", o.val_fraction, "how much of --data is held out when there is no --val")
        ->group("Data");
    app.add_flag("--mask-documents", o.mask_documents,
                 "in training no token attends to another document, and positions count from its beginning")
        ->group("Data");
    app.add_option("--batch", o.batch, "sequences per step")->group("Data");
    app.add_option("--micro-batch", o.micro_batch, "sequences at a time; gradients are accumulated; 0: the whole batch")
        ->group("Data");
    app.add_option("--seq", o.seq, "tokens per sequence")->group("Data");
    app.add_option("--steps", o.steps, "updates in the whole run")->group("Data");
    app.add_option("--seed", o.seed, "of the weights and of the order of the data")->group("Data");

    app.add_option("--lr", given.lr,
                   "highest learning rate; default: the optimizer's own, for small models (adamw: 0.003)")
        ->group("Optimisation");
    app.add_option("--schedule", o.schedule.name, "constant, linear, cosine or wsd")->group("Optimisation");
    app.add_option("--warmup", o.schedule.warmup, "steps of linear warmup; -1: a twentieth of the steps")
        ->group("Optimisation");
    app.add_option("--min-lr-ratio", o.schedule.min_ratio, "last learning rate / highest")->group("Optimisation");
    app.add_option("--decay-fraction", o.schedule.decay_fraction, "wsd: share of the steps that decay")
        ->group("Optimisation");
    app.add_option("--optimizer", o.optimizer,
                   "sgd, momentum, nesterov, adagrad, rmsprop, adam, adamw, adafactor, lion, muon, adam8bit")
        ->group("Optimisation");
    app.add_option("--weight-decay", given.weight_decay,
                   "on matrices only; default: the optimizer's own, as for the next four")
        ->group("Optimisation");
    app.add_option("--beta1", given.beta1, "memory of the mean gradient")->group("Optimisation");
    app.add_option("--beta2", given.beta2, "memory of the mean squared gradient")->group("Optimisation");
    app.add_option("--eps", given.eps, "added to the root that divides")->group("Optimisation");
    app.add_option("--momentum", given.momentum, "momentum, nesterov, muon")->group("Optimisation");
    app.add_option("--clip", o.clip, "largest global norm of the gradients; 0: no clipping")->group("Optimisation");

    app.add_option("--out", o.out, "folder for log.csv, loss.png, TensorBoard events, checkpoints; default: runs/N")
        ->group("Output");
    app.add_option("--val-every", o.val_every, "steps between evaluations; 0: only at the end")->group("Output");
    app.add_option("--val-sequences", o.val_sequences, "sequences of held-out text per evaluation")->group("Output");
    app.add_option("--sample", o.sample_tokens, "tokens of text to write before and after training; 0: none")
        ->group("Output");
    app.add_option("--temperature", o.temperature, "of the sample")->group("Output");
    app.add_option("--save-every", o.save_every, "steps between checkpoints; 0: only at the end")->group("Output");
    app.add_option("--keep", o.keep, "checkpoints to keep; 0: all")->group("Output");
    app.add_option("--stop-after", o.stop_after,
                   "save and end after this step, as Ctrl-C would; the schedule is that of --steps")
        ->group("Output");
    app.add_flag("--resume", o.resume, "continue the run in --out, bit for bit")->group("Output");
}

// What --dtype and its companions mean together.
void choose_precision(TrainOptions& o, const GivenPrecision& given) {
    const bool fp8 = o.dtype == "fp8";
    check(fp8 || o.dtype == "fp32" || o.dtype == "bf16" || o.dtype == "fp16" || o.dtype == "float32" ||
              o.dtype == "bfloat16" || o.dtype == "float16",
          "--dtype ", o.dtype, ": use fp32, bf16, fp16 or fp8");
    Precision& p = o.precision;
    p.dtype = fp8 ? DType::bf16 : dtype_from_name(o.dtype);
    if (fp8) {
        p.fp8 = fp8_recipe_from_name(given.fp8);
        check(p.fp8 != Fp8Recipe::none, "--fp8 none with --dtype fp8: use delayed, current or block, or --dtype bf16");
        expect_fp8_device(p.fp8);
        check(o.seq % 16 == 0, "--dtype fp8 multiplies blocks of 16 tokens: --seq ", o.seq, " is no multiple of 16");
    }
    check(given.master == "auto" || given.master == "fp32" || given.master == "none", "--master ", given.master,
          ": use fp32 or none");
    check(given.master != "none" || p.dtype == DType::bf16,
          "--master none needs --dtype bf16 or fp8: float32 has no other "
          "weights, and float16 lacks the range");
    p.master = p.dtype != DType::f32 && given.master != "none";

    const bool accumulates = o.micro_batch != 0 && o.micro_batch < o.batch / rank_count(o.ranks);
    if (given.grad_dtype == "auto") p.grad_dtype = accumulates ? DType::f32 : p.dtype;
    else if (given.grad_dtype == "same") p.grad_dtype = p.dtype;
    else p.grad_dtype = dtype_from_name(given.grad_dtype);
    check(p.grad_dtype == DType::f32 || p.grad_dtype == p.dtype, "--grad-dtype ", given.grad_dtype, " with --dtype ",
          o.dtype, ": use fp32 or same");

    const LossScaleOptions scale = parse_loss_scale(given.loss_scale != "auto" ? given.loss_scale
                                                    : p.dtype == DType::f16    ? "dynamic"
                                                                               : "1");
    o.loss_scale.dynamic = scale.dynamic;
    if (!scale.dynamic) o.loss_scale.start = scale.start;
    o.loss_scale.largest = std::max(o.loss_scale.largest, o.loss_scale.start);
    LossScaler check_it(o.loss_scale);
    check(p.dtype == DType::f16 || !o.loss_scale.dynamic,
          "--loss-scale dynamic is for --dtype fp16: bf16 and fp32 have the range of float32");
    o.recompute = parse_recompute(given.recompute);
    o.attention = flash_tier_from_name(given.attention);
    expect_flash_tier(o.attention, p.dtype);
}

// Gradient compression changes the loss curve, so it is part of the run; but one rank sends nothing, and has nothing to compress.
void choose_compression(TrainOptions& o, const std::string& name) {
    CompressOptions& c = o.data_parallel.compress;
    c.kind = compression_from_name(name);
    check(c.rank >= 1 && c.rank <= 16, "--compress-rank ", c.rank, ": use 1 to 16");
    if (c.kind == Compression::none) return;
    const std::string mode = o.data_parallel.naive ? "--dp-mode naive" : concat("--zero ", o.data_parallel.zero);
    check(o.data_parallel.zero == 0 && !o.data_parallel.naive, "--compress ", name, " with ", mode,
          ": compressors make the whole "
          "sum for every rank, which only --dp-mode ddp without --zero asks for: leave one of the two away");
    check(o.precision.grad_dtype == DType::f32, "--compress ", name,
          " compresses float32 gradients: add --grad-dtype fp32");
    check(c.kind == Compression::bf16 || o.precision.dtype != DType::f16, "--compress ", name,
          " adds the errors of a step to the "
          "gradients of the next, which --dtype fp16 may have scaled otherwise, or made infinite: use --dtype bf16 or "
          "--compress bf16");
}

void check_options(const TrainOptions& o) {
    check(o.batch > 0 && o.seq > 0 && o.steps > 0, "--batch, --seq and --steps must be positive");
    check(o.micro_batch >= 0, "--micro-batch must not be negative");
    check(o.ranks.ranks >= 0, "--ranks must not be negative");
    const int64_t n_ranks = rank_count(o.ranks);
    check(o.batch % n_ranks == 0, "--batch ", o.batch, " cannot be divided among ", n_ranks,
          " ranks: choose a multiple of ", n_ranks);
    check(o.micro_batch == 0 || o.batch / n_ranks % o.micro_batch == 0,
          n_ranks > 1 ? "a rank's share of --batch, " : "--batch ", o.batch / n_ranks, n_ranks > 1 ? "," : "",
          " cannot be divided into micro-batches of ", o.micro_batch, ": choose a --micro-batch that divides it");
    check(o.data_parallel.zero >= 0 && o.data_parallel.zero <= 3, "--zero ", o.data_parallel.zero,
          ": use 0, 1, 2 or 3");
    check(!o.data_parallel.naive || o.data_parallel.zero == 0,
          "--dp-mode naive keeps all states with rank 0: leave --zero away");
    check(o.data_parallel.bucket_mib > 0, "--bucket-mib must be positive");
    check(o.seed >= 0, "--seed must not be negative");
    check(o.clip >= 0, "--clip must not be negative");
    const OptimizerOptions& h = o.optimizer_options;
    check(h.beta1 >= 0 && h.beta1 < 1 && h.beta2 >= 0 && h.beta2 < 1, "--beta1 and --beta2 must lie in [0, 1)");
    check(h.momentum >= 0 && h.momentum < 1, "--momentum must lie in [0, 1)");
    check(h.eps > 0, "--eps must be positive");
    check(h.weight_decay >= 0, "--weight-decay must not be negative");
    check(o.temperature > 0, "--temperature must be positive");
    check(o.val_fraction > 0 && o.val_fraction < 1, "--val-fraction must lie between 0 and 1");
    check(o.val_every >= 0 && o.val_sequences > 0 && o.sample_tokens >= 0 && o.save_every >= 0 && o.keep >= 0 &&
              o.stop_after >= 0,
          "--val-every, --sample, --save-every, --keep and --stop-after must not be negative, --val-sequences must be "
          "positive");
    check(o.plan_parameters >= 0 && (o.plan_parameters == 0 || o.plan),
          "--params N belongs to --plan, and must be positive");
    check(!o.resume || !o.out.empty(), "--resume needs --out DIR, the folder of the run to continue");
    check_schedule(o.schedule);
}

void check_offload(const TrainOptions& o) {
    if (o.offload != Offload::optimizer && o.offload != Offload::params) return;
    const char* name = o.offload == Offload::params ? "params" : "optimizer";
    check(o.offload != Offload::params || o.data_parallel.zero == 3,
          "--offload params needs --zero 3, which fetches a unit's weights "
          "before each use, also on one rank; with --zero ",
          o.data_parallel.zero, " use --offload optimizer");
    check(has_host_optimizer(o.optimizer), "--offload ", name, " with --optimizer ", o.optimizer,
          ": the host updates by adamw and adam; use one of them, or --offload unified");
    check(o.precision.master || o.precision.dtype == DType::f32, "--offload ", name,
          " with --master none: the host updates float32 weights; leave --master away, or use --offload unified");
}

// The options of the checkpoint stand in for those that were not given; one that was given must say the same.
void adopt_saved_options(CLI::App& app, const std::string& out) {
    const auto checkpoint = latest_checkpoint(out);
    check(checkpoint.has_value(), "--resume: there is no checkpoint in ", out, "/checkpoints");
    const std::string path = *checkpoint + "/state.json";
    std::map<std::string, std::string> saved;
    try {
        saved = nlohmann::json::parse(read_text_file(path)).at("options").get<std::map<std::string, std::string>>();
    } catch (const nlohmann::json::exception& error) {
        fail(path, " is not a training state: ", error.what());
    }
    for (const auto& [flag, value] : saved) {
        CLI::Option* option = app.get_option_no_throw(flag);
        check(option != nullptr, path, ": unknown option ", flag, "; was it written by another version?");
        check(option->count() == 0 || kMayChange.count(flag) || same_value(value_of(*option), value), flag, " ",
              value_of(*option), " differs from the run in ", out, ", which has ", flag, " ", value,
              ": leave the flag away, or start a new run with another --out");
        if (option->count() > 0 || value.empty()) continue;
        option->add_result(value);
        option->run_callback();
    }
}

// The shortest text that reads back as the same number.
template <class T>
std::string number_text(T value) {
    char text[40];
    return std::string(text, std::to_chars(text, text + sizeof text, value).ptr);
}

}  // namespace

TrainOptions parse_train_options(int argc, char** argv) {
    TrainOptions options;
    GivenHyperparameters given;
    GivenPrecision precision;
    options.schedule.warmup = -1;
    CLI::App app{
        "train_gpt: trains GPT-2, LLaMA, Qwen and DeepSeek-like models from random weights or from a Hugging Face "
        "folder.\n"
        "Without any flag it trains a small LLaMA on the C++ headers of this machine."};
    app.option_defaults()->always_capture_default();
    add_options(app, options, given, precision);
    app.get_formatter()->column_width(28);
    for (CLI::Option* option : app.get_options())
        if (option->get_type_size() > 0) option->take_last();
    try {
        app.parse(argc, argv);
        if (options.resume && !options.out.empty()) adopt_saved_options(app, options.out);
    } catch (const CLI::CallForHelp&) {
        std::cout << app.help();
        std::exit(0);
    } catch (const CLI::ParseError& error) {
        fail(error.what(), " (./train_gpt --help lists the flags)");
    }
    options.schedule.steps = options.steps;
    options.schedule.peak = given.lr.value_or(default_learning_rate(options.optimizer));
    OptimizerOptions& h = options.optimizer_options = default_optimizer_options(options.optimizer);
    h.weight_decay = given.weight_decay.value_or(h.weight_decay);
    h.beta1 = given.beta1.value_or(h.beta1);
    h.beta2 = given.beta2.value_or(h.beta2);
    h.eps = given.eps.value_or(h.eps);
    h.momentum = given.momentum.value_or(h.momentum);
    if (options.schedule.warmup == -1) options.schedule.warmup = options.steps / 20;
    check(precision.dp_mode == "ddp" || precision.dp_mode == "naive", "--dp-mode ", precision.dp_mode,
          ": use ddp or naive");
    options.data_parallel.naive = precision.dp_mode == "naive";
    options.offload = offload_from_name(precision.offload);
    check_options(options);
    choose_precision(options, precision);
    choose_compression(options, precision.compress);
    check_offload(options);
    for (const CLI::Option* option : app.get_options()) {
        const std::string flag = option->get_name();  // hidden ones have none
        if (!flag.empty() && !kNotSaved.count(flag)) options.identity[flag] = value_of(*option);
    }
    // Defaults that depend on the optimizer are saved as the numbers they are.
    options.identity["--lr"] = number_text(options.schedule.peak);
    options.identity["--weight-decay"] = number_text(h.weight_decay);
    options.identity["--beta1"] = number_text(h.beta1);
    options.identity["--beta2"] = number_text(h.beta2);
    options.identity["--eps"] = number_text(h.eps);
    options.identity["--momentum"] = number_text(h.momentum);
    return options;
}
