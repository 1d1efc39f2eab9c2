// train_options.cu: parses the command line of train_gpt with CLI11, and checks what can be checked before any work.
#include "train_options.h"

#include "io/io.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <optional>
#include <set>

namespace {

// Options that belong to one call of the program and not to the run.
const std::set<std::string> kNotSaved = {"--help", "--out", "--resume", "--stop-after"};
// Options of the run that a resumed one may be given anew: they do not touch the loss curve (beyond rounding).
const std::set<std::string> kMayChange = {"--val-every", "--sample", "--keep", "--save-every", "--temperature", "--micro-batch"};

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
    std::optional<float> weight_decay, beta1, beta2, eps, momentum;
};

void add_options(CLI::App& app, TrainOptions& o, GivenHyperparameters& given) {
    app.add_option("--model", o.model, "tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-1b, llama-3b, llama-8b, or a config.json")
        ->group("Model");
    app.add_option("--init", o.init, "start from the weights of this Hugging Face folder (config.json + safetensors)")->group("Model");
    app.add_option("--tokenizer", o.tokenizer, "tokenizer.json for text; without it a token is a byte")->group("Model");
    app.add_option("--dtype", o.dtype, "precision of weights and activations: fp32")->group("Model");

    app.add_option("--data", o.data, "text file, folder of text, or token shards *.bin; default: this machine's C++ headers")
        ->group("Data");
    app.add_option("--val", o.val, "held-out text or shards; default: the last part of --data")->group("Data");
    app.add_option("--val-fraction", o.val_fraction, "how much of --data is held out when there is no --val")->group("Data");
    app.add_option("--batch", o.batch, "sequences per step")->group("Data");
    app.add_option("--micro-batch", o.micro_batch, "sequences at a time; gradients are accumulated; 0: the whole batch")->group("Data");
    app.add_option("--seq", o.seq, "tokens per sequence")->group("Data");
    app.add_option("--steps", o.steps, "updates in the whole run")->group("Data");
    app.add_option("--seed", o.seed, "of the weights and of the order of the data")->group("Data");

    app.add_option("--lr", o.schedule.peak, "highest learning rate")->group("Optimisation");
    app.add_option("--schedule", o.schedule.name, "constant, linear, cosine or wsd")->group("Optimisation");
    app.add_option("--warmup", o.schedule.warmup, "steps of linear warmup; -1: a twentieth of the steps")->group("Optimisation");
    app.add_option("--min-lr-ratio", o.schedule.min_ratio, "last learning rate / highest")->group("Optimisation");
    app.add_option("--decay-fraction", o.schedule.decay_fraction, "wsd: share of the steps that decay")->group("Optimisation");
    app.add_option("--optimizer", o.optimizer, "sgd, momentum, nesterov, adagrad, rmsprop, adam, adamw, adafactor, lion, muon, adam8bit")
        ->group("Optimisation");
    app.add_option("--weight-decay", given.weight_decay, "on matrices only; default: the optimizer's own, as for the next four")
        ->group("Optimisation");
    app.add_option("--beta1", given.beta1, "memory of the mean gradient")->group("Optimisation");
    app.add_option("--beta2", given.beta2, "memory of the mean squared gradient")->group("Optimisation");
    app.add_option("--eps", given.eps, "added to the root that divides")->group("Optimisation");
    app.add_option("--momentum", given.momentum, "momentum, nesterov, muon")->group("Optimisation");
    app.add_option("--clip", o.clip, "largest global norm of the gradients; 0: no clipping")->group("Optimisation");

    app.add_option("--out", o.out, "folder for log.csv, loss.png, TensorBoard events, checkpoints; default: runs/N")->group("Output");
    app.add_option("--val-every", o.val_every, "steps between evaluations; 0: only at the end")->group("Output");
    app.add_option("--val-sequences", o.val_sequences, "sequences of held-out text per evaluation")->group("Output");
    app.add_option("--sample", o.sample_tokens, "tokens of text to write before and after training; 0: none")->group("Output");
    app.add_option("--temperature", o.temperature, "of the sample")->group("Output");
    app.add_option("--save-every", o.save_every, "steps between checkpoints; 0: only at the end")->group("Output");
    app.add_option("--keep", o.keep, "checkpoints to keep; 0: all")->group("Output");
    app.add_option("--stop-after", o.stop_after, "save and end after this step, as Ctrl-C would; the schedule is that of --steps")
        ->group("Output");
    app.add_flag("--resume", o.resume, "continue the run in --out, bit for bit")->group("Output");
}

void check_options(const TrainOptions& o) {
    check(o.batch > 0 && o.seq > 0 && o.steps > 0, "--batch, --seq and --steps must be positive");
    check(o.micro_batch >= 0, "--micro-batch must not be negative");
    check(o.micro_batch == 0 || o.batch % o.micro_batch == 0, "--batch ", o.batch, " cannot be divided into micro-batches of ",
          o.micro_batch, ": choose a --micro-batch that divides it");
    check(o.seed >= 0, "--seed must not be negative");
    check(o.dtype == "fp32" || o.dtype == "float32", "--dtype ", o.dtype, ": this program trains in fp32");
    check(o.clip >= 0, "--clip must not be negative");
    const OptimizerOptions& h = o.optimizer_options;
    check(h.beta1 >= 0 && h.beta1 < 1 && h.beta2 >= 0 && h.beta2 < 1, "--beta1 and --beta2 must lie in [0, 1)");
    check(h.momentum >= 0 && h.momentum < 1, "--momentum must lie in [0, 1)");
    check(h.eps > 0, "--eps must be positive");
    check(h.weight_decay >= 0, "--weight-decay must not be negative");
    check(o.temperature > 0, "--temperature must be positive");
    check(o.val_fraction > 0 && o.val_fraction < 1, "--val-fraction must lie between 0 and 1");
    check(o.val_every >= 0 && o.val_sequences > 0 && o.sample_tokens >= 0 && o.save_every >= 0 && o.keep >= 0 && o.stop_after >= 0,
          "--val-every, --sample, --save-every, --keep and --stop-after must not be negative, --val-sequences must be positive");
    check(!o.resume || !o.out.empty(), "--resume needs --out DIR, the folder of the run to continue");
    check_schedule(o.schedule);
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
        check(option->count() == 0 || kMayChange.count(flag) || same_value(value_of(*option), value), flag, " ", value_of(*option),
              " differs from the run in ", out, ", which has ", flag, " ", value,
              ": leave the flag away, or start a new run with another --out");
        if (option->count() > 0 || value.empty()) continue;
        option->add_result(value);
        option->run_callback();
    }
}

}  // namespace

TrainOptions parse_train_options(int argc, char** argv) {
    TrainOptions options;
    GivenHyperparameters given;
    options.schedule.peak = 3e-3;
    options.schedule.warmup = -1;
    CLI::App app{"train_gpt: trains GPT-2 and LLaMA models from random weights or from a Hugging Face folder.\n"
                 "Without any flag it trains a small LLaMA on the C++ headers of this machine."};
    app.option_defaults()->always_capture_default();
    add_options(app, options, given);
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
    OptimizerOptions& h = options.optimizer_options = default_optimizer_options(options.optimizer);
    h.weight_decay = given.weight_decay.value_or(h.weight_decay);
    h.beta1 = given.beta1.value_or(h.beta1);
    h.beta2 = given.beta2.value_or(h.beta2);
    h.eps = given.eps.value_or(h.eps);
    h.momentum = given.momentum.value_or(h.momentum);
    if (options.schedule.warmup == -1) options.schedule.warmup = options.steps / 20;
    check_options(options);
    for (const CLI::Option* option : app.get_options()) {
        const std::string flag = option->get_name();
        if (!kNotSaved.count(flag)) options.identity[flag] = value_of(*option);
    }
    return options;
}
