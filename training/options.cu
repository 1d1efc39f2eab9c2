// training/options.cu: the command line of train_gpt.
//
// io/command_line.cu reads it; options_check.cu settles what flags mean together. With --resume, the flags that decide
// the loss curve come from the checkpoint, so that `--out DIR --resume` is enough to continue a run: with the same
// bits, if the flags of its ranks are given again (OnResume::repeated).
#include "io/command_line.h"
#include "training/training.h"

#include <charconv>
#include <cstdlib>

namespace {

// What becomes of a flag when a run is resumed.
enum class OnResume {
    fixed,          // saved, and must stay: it decides the loss curve
    may_change,     // saved; another value does not touch the loss curve (beyond rounding)
    with_schedule,  // saved; another value together with --steps and --schedule, because a new schedule begins
    repeated,       // not saved: of the ranks; the command that continues the run should have it, too
    this_call       // not saved: of one call of the program
};
// Flags that are not here are fixed. Paths may change because the tokens are compared, by their checksum, and --steps
// by the rule of resumed_schedule().
const std::map<OnResume, std::set<std::string>> kOnResume = {
    {OnResume::may_change,
     {"--val-every", "--sample", "--keep", "--save-every", "--temperature", "--micro-batch", "--recompute",
      "--head-chunks", "--attention", "--keep-best", "--data", "--val", "--tokenizer", "--steps"}},
    {OnResume::with_schedule, {"--schedule", "--lr", "--warmup", "--min-lr-ratio", "--decay-fraction"}},
    {OnResume::repeated, {"--ranks",     "--comm",         "--all-reduce",    "--comm-timeout", "--ranks-per-node",
                          "--dp-mode",   "--zero",         "--bucket-mib",    "--offload",      "--tp",
                          "--sp",        "--tp-mode",      "--tp-depth",      "--tp-overlap",   "--cp",
                          "--cp-mode",   "--pp",           "--pipeline",      "--chunks",       "--stages",
                          "--times",     "--memory-limit", "--vertical-sync", "--flush-every",  "--graph",
                          "--run-ahead", "--tune-matmul",  "--log-every"}},
    {OnResume::this_call,
     {"--help", "--out", "--resume", "--new-data", "--stop-after", "--plan", "--account", "--device-spec", "--params",
      "--inject-overflow", "--trace", "--micro-batches", "--draw", "--verbose"}}};
OnResume on_resume(const std::string& flag) {
    for (const auto& [kind, flags] : kOnResume)
        if (flags.contains(flag)) return kind;
    return OnResume::fixed;
}
// Of those that are repeated some are saved, too: where --pipeline is asynchronous, gradients are those of weights some
// updates ago, and it decides how many; and the blocks of adam8bit lie in the parts that tensor parallelism cuts.
constexpr const char* kAsynchronousFlags[] = {"--pp", "--pipeline", "--vertical-sync", "--flush-every"};
constexpr const char* kPartFlags[] = {"--tp", "--tp-mode", "--tp-depth"};

// What other programs call these flags.
const std::vector<Synonym> kSynonyms = {
    {"learning-rate", "--lr"},
    {"batch-size", "--batch"},
    {"micro-batch-size", "--micro-batch"},
    {"grad-accum", "--micro-batches"},
    {"accumulation-steps", "--micro-batches"},
    {"num-micro-batches", "--micro-batches"},
    {"num-microbatches", "--micro-batches"},
    {"gradient-accumulation-steps", "--micro-batches"},
    {"epochs", "--steps"},
    {"iters", "--steps"},
    {"iterations", "--steps"},
    {"max-iters", "--steps"},
    {"context-length", "--seq"},
    {"block-size", "--seq"},
    {"max-length", "--seq"},
    {"save-dir", "--out"},
    {"input", "--data"},
    {"dataset", "--data"},
    {"eval-every", "--val-every"},
    {"eval-interval", "--val-every"},
    {"precision", "--dtype"},
    {"fp16", "--dtype fp16"},
    {"bf16", "--dtype bf16"},
    {"max-grad-norm", "--clip"},
    {"pretrained", "--init"},
    {"finetune", "--init"},
    {"warmup-steps", "--warmup"},
    {"wd", "--weight-decay"},
    {"scheduler", "--schedule"},
    {"gpus", "--ranks"},
    {"world-size", "--ranks"},
    {"fsdp", "--zero 3"},
    {"tensor-parallel-size", "--tp"},
    {"context-parallel-size", "--cp"},
    {"pipeline-parallel-size", "--pp"},
    {"pipeline-model-parallel-size", "--pp"},
    {"pipeline-schedule", "--pipeline"},
    {"pp-schedule", "--pipeline"},
    {"virtual-stages", "--chunks"},
    {"virtual-pipeline-model-parallel-size", "--chunks"},
    {"num-layers-per-virtual-pipeline-stage", "--chunks"},
    {"pp-layers", "--stages"},
    {"pipeline-layers", "--stages"},
    {"weight-stashing", "--pipeline pipedream"},
    {"sequence-parallel", "--sp"},
    {"tensor-model-parallel-size", "--tp"},
    {"gradient-checkpointing", "--recompute"},
    {"activation-checkpointing", "--recompute"},
    {"dry-run", "--plan"},
    {"continue", "--resume"},
    {"checkpoint-every", "--save-every"},
    {"save-interval", "--save-every"},
    {"layers", "--model config.json"},
    {"hidden-size", "--model config.json"},
};

// "3e-3" and "0.003" are the same value.
bool same_value(const std::string& a, const std::string& b) {
    char *end_a = nullptr, *end_b = nullptr;
    const double x = std::strtod(a.c_str(), &end_a), y = std::strtod(b.c_str(), &end_b);
    const bool numbers = !a.empty() && !b.empty() && *end_a == 0 && *end_b == 0;
    return numbers ? x == y : a == b;
}

// In a run that is given other steps.
std::string schedules_that(bool are_stretched) {
    std::vector<std::string> names = schedule_names();
    std::erase_if(names, [&](const std::string& name) { return is_stretched(name) != are_stretched; });
    return comma_list(names);
}

// "sgd, momentum, ...", in lines of at most 88 characters.
std::string listed(const std::vector<std::string>& names) {
    std::string text;
    size_t line = 0;  // where the last line begins
    for (const std::string& name : names) {
        if (text.empty()) {
            text = name;
        } else if (text.size() + name.size() + 3 <= line + 88) {
            text += ", " + name;
        } else {
            line = text.size() + 2;
            text += ",\n" + name;
        }
    }
    return text;
}

void add_model_options(CommandLine& line, TrainOptions& o) {
    Heading model{line, "Model"};
    model.option("--model", o.model, listed(preset_names()) + ", or a config.json");
    model.option("--init", o.init,
                 "start from the weights of this Hugging Face folder (config.json + safetensors), or of this run");
    model.option(
        "--tokenizer", o.tokenizer,
        "tokenizer.json for text, or its folder; default: that beside the model, or else each byte is a token");
}

void add_precision_options(CommandLine& line, TrainOptions& o, TypedFlags& typed) {
    Heading precision{line, "Precision"};
    precision.option("--dtype", o.dtype,
                     "of weights and activations: fp32, bf16, fp16, or fp8 (bf16, with the blocks' matmuls in 8 bits)");
    precision.option("--fp8", typed.fp8,
                     "numbers with a common scale: a tensor (delayed or current), or block (1x128, 128x128)");
    precision.option("--master", typed.master,
                     "fp32: master weights beside 16-bit ones; none: bf16 alone, rounded stochastically; auto: fp32 "
                     "beside 16 bits");
    precision.option(
        "--grad-dtype", typed.grad_dtype,
        "of the weights' gradients: fp32, or same as the weights; auto: fp32 where micro-batches, or chunks of the\n"
        "head, add up");
    precision.option("--loss-scale", typed.loss_scale, "dynamic, or a number; auto: dynamic for fp16, otherwise 1");
    precision.option("--loss-scale-start", o.loss_scale.start, "dynamic: the first scale");
    precision.option("--loss-scale-interval", o.loss_scale.interval,
                     "dynamic: steps without overflow after which the scale grows");
    precision.option("--loss-scale-growth", o.loss_scale.growth, "dynamic: factor of this growth");
    precision.option("--loss-scale-backoff", o.loss_scale.backoff, "dynamic: factor after an overflow");
    precision.option("--attention", typed.attention,
                     "units that compute attention: cores (fp32), mma, hopper (sm_90a), or auto");
    precision.option("--tune-matmul", o.tune_matmul,
                     "what computes a product, of cuBLASLt's algorithms and our kernels: on (they are timed once, and\n"
                     "the fastest noted in ~/.cache/llm.cu), off (fixed choices), or auto (on, on a GPU)");
    Heading hidden{line, ""};
    hidden.option("--inject-overflow", o.inject_overflow, "for tests: makes a gradient of this step infinite");
}

void add_memory_options(CommandLine& line, TrainOptions& o, TypedFlags& typed) {
    Heading memory{line, "Memory"};
    memory.option("--recompute", typed.recompute,
                  "activations that the backward computes again: none, selective (norms and activation functions), "
                  "full (all but the blocks' inputs), or a number N (only every N-th block's input is kept)");
    memory.option("--head-chunks", o.recompute.head_chunks,
                  "parts of a micro-batch's tokens that go through the head one after the other: logits, the largest "
                  "tensor, exist for one part at a time");
    memory.option("--offload", typed.offload,
                  "keep on the host: optimizer (states and master weights, updated there; during the backward with "
                  "--clip 0 but for fp16, otherwise after it, when the norm is known), params (also the weights; needs "
                  "--zero 3), "
                  "unified (pages that move)");
    memory.flag("--plan", o.plan, "print the bytes, FLOPs and seconds of this run, and end");
    memory.flag(
        "--account", o.account,
        "print where the time of a step goes, launch by launch, with a prediction, and end; with --out also as\n"
        "account.md, account.png and launches.tsv");
    memory.option("--device-spec", o.device_spec,
                  "the device of --plan and --account: h200, h100, a100, 4090, t4, or this one");
    memory.option("--params", o.plan_parameters,
                  "the plan of any model with this many parameters (7.5e9): weights, gradients and optimizer only");
}

void add_rank_options(CommandLine& line, TrainOptions& o, TypedFlags& typed) {
    Heading ranks{line, "Ranks"};
    ranks.option("--ranks", o.ranks.ranks,
                 "number of ranks, as threads of this process; 0: one, or the processes that mpirun -np N starts");
    ranks.option(
        "--tp", o.tp,
        "tensor parallelism: this many ranks divide each layer, its heads, columns and vocabulary; the others, if "
        "any, divide the batch");
    ranks.option(
        "--tp-mode", typed.tp_mode,
        "what a rank of --tp has of each layer: 1d, 2d (4, 9, ... ranks), 2.5d (8, 18, ...) or 3d (8, 27, ...)");
    ranks.option("--tp-depth", o.tp_depth,
                 "2.5d: copies of the grid of ranks; 0: the most that are not more than its side");
    ranks.flag("--sp", o.sp,
               "sequence parallelism: the ranks of --tp also divide what lies between the layers, by tokens");
    ranks.flag("--tp-overlap", o.tp_overlap,
               "with --sp: products of rows that travel between the ranks take turns with messages, piece by piece");
    ranks.option("--cp", o.cp,
                 "context parallelism: this many ranks divide each sequence, two chunks of its tokens each");
    ranks.option("--cp-mode", typed.cp_mode,
                 "attention of --cp: ring (keys and values travel), or ulysses (tokens are exchanged for heads)");
    ranks.option("--pp", o.pp,
                 "pipeline parallelism: this many ranks divide the layers, and micro-batches go through them");
    ranks.option("--zero", o.data_parallel.zero,
                 "shard over the ranks: 1 optimizer states, 2 also gradients, 3 also weights (FSDP)");
    ranks.option("--dp-mode", typed.dp_mode,
                 "ddp, or naive: rank 0 collects, updates and sends (slow: for comparison)");
    ranks.option("--bucket-mib", o.data_parallel.bucket_mib, "ddp: gradients that are all-reduced together");
    ranks.option("--compress", typed.compress,
                 "ddp: gradients travel as bf16, fp8, powersgd (low rank) or 1bit; none: as --grad-dtype");
    ranks.option("--compress-rank", o.data_parallel.compress.rank,
                 "powersgd: rank of the approximation of a matrix, 1 to 16");
    ranks.option("--comm", o.ranks.comm, "transport of the messages: auto, threads, mpi or nccl");
    ranks.option("--all-reduce", o.ranks.all_reduce, "algorithm: " + listed(all_reduce_names()));
    ranks.option("--ranks-per-node", o.ranks.ranks_per_node,
                 "threads: treat this many ranks as one machine (for two-level); 0: all");
    ranks.option(
        "--comm-timeout", o.ranks.timeout_s,
        "seconds that a rank waits for another before the run ends; 30 times as long where models are read or\n"
        "written, 5 times where MPI starts");
    ranks.option("--trace", o.ranks.trace,
                 "steps to record, as 3 or 3,4: who computes what and sends what to whom when, as text,\n"
                 "and in the folder of the run as trace.json (for ui.perfetto.dev) and trace.png");
}

void add_pipeline_options(CommandLine& line, TrainOptions& o, TypedFlags& typed) {
    Heading pipeline{line, "Pipelines (--pp)"};
    pipeline.option("--pipeline", o.pipeline,
                    "which rank does what when: " + listed(schedule_names_of_pipelines()) +
                        " (the last two are asynchronous: their gradients are of older weights)");
    pipeline.option("--micro-batches", o.micro_batches,
                    "micro-batches of a step on a rank, instead of the sequences of one, --micro-batch");
    pipeline.option("--stages", typed.stages, "blocks of each stage, as 5,7,7,5; default: stages of equal cost");
    pipeline.option("--chunks", o.chunks, "interleaved: stages that each rank has");
    pipeline.flag("--vertical-sync", o.vertical_sync,
                  "pipedream: a micro-batch meets weights of one version in all stages");
    pipeline.option("--flush-every", o.flush_every,
                    "pipedream, 2bw: steps between two moments at which the pipeline is empty, as saving needs it");
    pipeline.option(
        "--times", typed.times,
        "auto and --draw: of a micro-batch on a rank: forward, backward by input, by weight; and of a message");
    pipeline.option("--memory-limit", o.memory_limit,
                    "auto: most micro-batches whose activations a rank may keep; 0: as many as 1f1b");
    pipeline.flag("--draw", o.draw,
                  "print the schedule of --pp ranks and --micro-batches, and end; with --out also as picture and\n"
                  "trace; --pipeline all compares them");
}

void add_data_options(CommandLine& line, TrainOptions& o) {
    Heading data{line, "Data"};
    data.option("--data", o.data,
                "text file, folder of text, or token shards *.bin; several with weights: a.txt:0.7,b.txt:0.3;\n"
                "default: this machine's C++ headers");
    data.option("--val", o.val, "held-out text or shards; default: the last part of --data");
    data.option("--val-fraction", o.val_fraction,
                "share of --data that is held out when there is no --val; 0: none, and no validation loss");
    data.flag("--mask-documents", o.mask_documents,
              "in training no token attends to another document, and positions count from its beginning");
    data.option("--eot", o.eot,
                "id of the token that each document of a shard begins with; -1: that of --tokenizer, or of the "
                "tokenizer that the shard's header names");
    data.option("--batch", o.batch, "sequences per step");
    data.option("--micro-batch", o.micro_batch,
                "sequences of one forward and backward; gradients are accumulated; 0: the whole batch");
    data.option("--seq", o.seq, "tokens per sequence");
    data.option("--steps", o.steps,
                "updates in the whole run; with --resume the run becomes longer or shorter: its schedule goes on (" +
                    schedules_that(false) + "), or what is left of it is stretched (" + schedules_that(true) +
                    "); or give --schedule, and a new one begins");
    data.option("--seed", o.seed, "of the initial weights, the order of the data, stochastic rounding and the samples");
}

void add_optimizer_options(CommandLine& line, TrainOptions& o, TypedFlags& typed) {
    Heading optimizer{line, "Optimisation"};
    optimizer.option("--lr", typed.lr,
                     "highest learning rate; default: the optimizer's own for small models (adamw: 0.003), with "
                     "--init a tenth of it");
    optimizer.option("--schedule", o.schedule.name, "of the learning rate: " + listed(schedule_names()));
    optimizer.option("--warmup", o.schedule.warmup, "steps of linear warmup; -1: a twentieth of the steps");
    optimizer.option("--min-lr-ratio", o.schedule.min_ratio,
                     comma_list(schedules_that_read(&Schedule::min_ratio)) + ": last learning rate / highest");
    optimizer.option("--decay-fraction", o.schedule.decay_fraction,
                     comma_list(schedules_that_read(&Schedule::decay_fraction)) + ": share of the steps that decay");
    optimizer.option("--optimizer", o.optimizer, listed(optimizer_names()));
    for (const Hyperparameter& h : hyperparameters()) {
        const std::vector<std::string> readers = optimizers_that_read(h);
        optimizer.option("--" + h.name, typed.hyperparameters["--" + h.name],
                         h.help + "\n(" + (readers == optimizer_names() ? "all optimizers" : comma_list(readers)) +
                             "; default: the optimizer's own)");
    }
    optimizer.option("--clip", o.clip, "largest global norm of the gradients; 0: no clipping");
}

void add_launch_options(CommandLine& line, TypedFlags& typed) {
    Heading launches{line, "Launches"};
    launches.option("--graph", typed.graph,
                    "launch forward, backward and norm as one CUDA graph: on, off, or auto: on a GPU, with one rank");
    launches.option("--run-ahead", typed.run_ahead,
                    "launch a step before the numbers of the one before are read: on, off, or auto: on a GPU, where "
                    "nothing depends on them");
}

void add_output_options(CommandLine& line, TrainOptions& o) {
    Heading output{line, "Output"};
    output.option("--out", o.out, "folder for log.csv, loss.png, TensorBoard events, checkpoints; default: runs/N");
    output.option("--val-every", o.val_every,
                  "steps between evaluations, with --init also before the first step; 0: only at the end");
    output.option("--val-sequences", o.val_sequences, "sequences of held-out text per evaluation");
    output.option("--sample", o.sample_tokens,
                  "tokens of text to generate before and after training, in at most 10 s; 0: none");
    output.option("--temperature", o.temperature, "divides the sample's logits: below 1 likely tokens come more often");
    output.option("--save-every", o.save_every, "steps between checkpoints; 0: only at the end");
    output.option("--keep", o.keep, "checkpoints to keep; 0: all");
    output.flag("--keep-best", o.keep_best,
                "also keep the checkpoint with the lowest validation loss; it is saved when it is found");
    output.option("--log-every", o.log_every,
                  "steps between lines of progress; 0: every step, in a terminal on one line that changes");
    output.flag("--verbose", o.verbose, "with --tune-matmul on: also print how each matrix product is computed");
    output.option("--stop-after", o.stop_after,
                  "save and end after this step, as Ctrl-C would; the schedule is that of --steps");
    output.flag("--resume", o.resume, "continue the run in --out, bit for bit; the folder and the data may have moved");
    output.flag("--new-data", o.new_data, "with --resume: go on with other data than the run had");
}

// The options of the checkpoint stand in for those that were not given; one that was given must say the same.
void adopt_saved_options(CommandLine& line, TrainOptions& o) {
    if (!o.plan && !o.account) check_not_written(o.out);
    o.checkpoint = readable_checkpoint(o.out);
    const RunState saved = read_state(o.checkpoint);
    o.resumed_step = saved.step;
    o.new_schedule = line.given("--steps") && line.given("--schedule") &&
                     !same_value(line.value_of("--steps"), saved.options.at("--steps"));
    check(o.stop_after == 0 || o.stop_after > saved.step, "--stop-after ", o.stop_after, ": the run in ", o.out,
          " is at step ", saved.step, " already: give a later step, or leave the flag out");
    check(!line.given("--steps") || o.steps >= saved.step, "--steps ", o.steps, ": the run in ", o.out, " is at step ",
          saved.step, " already: --steps counts the steps of the whole run, those before --resume too");
    const bool was_asynchronous = saved.options.count("--pipeline") > 0;
    check(was_asynchronous || !is_asynchronous_pipeline(o.pipeline), "--pipeline ", o.pipeline,
          " would change the loss curve of the run in ", o.out,
          ", whose gradients are those of its newest weights: use another schedule, or start a new run with another "
          "--out");
    for (const auto& [flag, value] : saved.options) {
        check(line.knows(flag), o.checkpoint, "/state.json: unknown option ", flag,
              "; was it written by another version?");
        const OnResume its = on_resume(flag);
        const bool may_change = its == OnResume::may_change || (o.new_schedule && its == OnResume::with_schedule) ||
                                (line.given("--new-data") && flag == "--val-fraction");
        const std::string own = line.value_of(flag);
        check(!line.given(flag) || may_change || same_value(own, value), flag, " ", own, " differs from the run in ",
              o.out, ", which has ", value.empty() ? concat("no ", flag) : concat(flag, " ", value), ": ",
              its == OnResume::with_schedule ? "leave the flag out, give a new --schedule with more --steps"
                                             : "leave the flag out",
              ", or start a new run with another --out");
        const bool replaced = flag == "--micro-batch" && line.given("--micro-batches");
        if (!line.given(flag) && !value.empty() && !replaced) line.give(flag, value);
    }
}

// The shortest text that reads back as the same number.
template <class T>
std::string number_text(T value) {
    char text[40];
    return std::string(text, std::to_chars(text, text + sizeof text, value).ptr);
}

// What a checkpoint says of the run. Defaults that depend on the optimizer are saved as the numbers they are.
void set_identity(TrainOptions& options, const CommandLine& line) {
    for (const std::string& flag : line.flags()) {
        const bool saved = on_resume(flag) < OnResume::repeated;
        (saved ? options.identity : options.of_this_call)[flag] = line.value_of(flag);
    }
    if (options.asynchronous) {  // with 2bw gradients are those of the step before, on any number of ranks
        for (const char* flag : kAsynchronousFlags) options.identity[flag] = line.value_of(flag);
        if (options.pipeline == "2bw") options.identity.erase("--pp");
    }
    if (options.optimizer == "adam8bit")
        for (const char* flag : kPartFlags) options.identity[flag] = line.value_of(flag);
    options.identity["--micro-batch"] = std::to_string(options.micro_batch);
    options.identity["--lr"] = number_text(options.schedule.peak);
    for (const Hyperparameter& h : hyperparameters())
        options.identity["--" + h.name] = number_text(options.optimizer_options.*h.field);
}

}  // namespace

TrainOptions parse_train_options(int argc, char** argv) {
    TrainOptions options;
    TypedFlags typed;
    options.schedule.warmup = -1;
    CommandLine line{
        "train_gpt: trains GPT-2, LLaMA, Qwen and DeepSeek-like models from random weights or from a Hugging Face "
        "folder.\n"
        "Without any flag it trains a small LLaMA on the C++ headers of this machine."};
    add_model_options(line, options);
    add_precision_options(line, options, typed);
    add_memory_options(line, options, typed);
    add_rank_options(line, options, typed);
    add_pipeline_options(line, options, typed);
    add_data_options(line, options);
    add_optimizer_options(line, options, typed);
    add_launch_options(line, typed);
    add_output_options(line, options);
    line.parse({"train_gpt", kSynonyms, "--data \"shards/*.bin\""}, argc, argv, [&] {
        for (const std::string& flag : line.flags())
            if (line.given(flag)) typed.given.insert(flag);
        // As a shell completes the name of a folder.
        while (options.out.size() > 1 && options.out.back() == '/') options.out.pop_back();
        if (options.resume && !options.out.empty() && !options.draw) adopt_saved_options(line, options);
    });
    settle_options(options, typed);
    set_identity(options, line);
    options.program = argv[0];
    for (const std::string& flag : line.flags()) {
        if (!line.given(flag) || on_resume(flag) != OnResume::repeated) continue;
        options.repeated.push_back(flag);
        if (line.value_of(flag) != "true") options.repeated.push_back(line.value_of(flag));  // --sp has no value
    }
    return options;
}
