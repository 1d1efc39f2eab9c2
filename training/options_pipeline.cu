// training/options_pipeline.cu: what --pp, --pipeline and the flags beside them mean together, and what cannot be
// combined with them.
#include "training/training.h"

#include <algorithm>
#include <sstream>

namespace {

// "5,7,7,5"
std::vector<std::string> split_list(const std::string& list) {
    std::vector<std::string> parts;
    std::istringstream text(list + ",");
    for (std::string part; std::getline(text, part, ',');) parts.push_back(part);
    return parts;
}

void read_stages(TrainOptions& o, const std::string& list) {
    o.stages.clear();
    if (list.empty()) return;
    for (const std::string& number : split_list(list)) {
        o.stages.push_back(parse_whole_number("--stages", number, 1 << 20));
        check(o.stages.back() >= 1, "--stages ", list, ": each stage has at least one block");
    }
    const int64_t n = n_pipeline_stages(o), n_given = std::ssize(o.stages);
    check(n_given == n, "--stages ", list, ": it has ", n_given, n_given == 1 ? " number" : " numbers", ", and --pp ",
          o.pp, " --pipeline ", o.pipeline, " has ", n, " stages: give one for each");
}

void read_times(TrainOptions& o, const std::string& list) {
    const std::vector<std::string> parts = split_list(list);
    check(parts.size() == 4, "--times ", list,
          ": give four numbers, of a forward, a backward by input, a backward by weight and a message: --times "
          "1,1,1,0.1");
    double numbers[4];
    for (size_t i = 0; i < 4; ++i) {
        expect_number("--times", parts[i]);
        numbers[i] = std::stod(parts[i]);
        check(numbers[i] >= (i == 3 ? 0 : 1e-6) && numbers[i] <= 1e6, "--times ", list,
              ": computing takes 1e-6 to 1e6, and a message 0 to 1e6, in any unit");
    }
    o.pipeline_times = {.stages = {{numbers[0], numbers[1], numbers[2]}}, .message = numbers[3]};
}

// The numbers of the schedule, whether it is drawn or run.
void check_schedule_flags(TrainOptions& o, const TypedFlags& typed) {
    check(o.pp >= 1, "--pp must be at least 1");
    check(o.micro_batches >= 0, "--micro-batches must not be negative");
    check(o.chunks >= 1, "--chunks must be at least 1");
    check(o.chunks <= kMostPairs, "--chunks ", o.chunks, ": a rank has at most ", kMostPairs, " stages");
    check(o.memory_limit >= 0, "--memory-limit must not be negative");
    const bool all = o.draw && o.pipeline == "all";
    const std::vector<std::string>& known = schedule_names_of_pipelines();
    check(all || std::ranges::count(known, o.pipeline) > 0, "--pipeline ", o.pipeline, ": use ", comma_list(known),
          o.draw ? ", or all" : "");
    o.asynchronous = is_asynchronous_pipeline(o.pipeline);
    read_times(o, typed.times);
    const auto check_belongs = [&](const char* flag, bool belongs, const char* to) {
        check(belongs || all || typed.given.count(flag) == 0, flag, " has no effect with --pipeline ", o.pipeline,
              ": use ", to, ", or leave ", flag, " out");
    };
    check_belongs("--chunks", o.pipeline == "interleaved", "--pipeline interleaved");
    check_belongs("--vertical-sync", o.pipeline == "pipedream", "--pipeline pipedream");
    check_belongs("--memory-limit", o.pipeline == "auto", "--pipeline auto");
    check_belongs("--times", o.draw || o.pipeline == "auto", "--pipeline auto, or --draw");
    check_belongs("--flush-every", o.asynchronous, "--pipeline pipedream or 2bw");
}

// How many micro-batches a step has on this rank: --micro-batches, or as many as --micro-batch makes.
void choose_micro_batch(TrainOptions& o, const TypedFlags& typed) {
    if (o.micro_batches == 0) return;
    const int64_t local = o.batch / o.data_ranks();
    check(typed.given.count("--micro-batch") == 0,
          "--micro-batches and --micro-batch say the same in two ways: leave one of the two out");
    check(local % o.micro_batches == 0, "--micro-batches ", o.micro_batches, ": ",
          o.data_ranks() > 1 ? "a rank's share of --batch" : "the --batch", ", ", local,
          " sequences, cannot be divided by it: choose one that divides it");
    o.micro_batch = local / o.micro_batches;
}

// An update that does not wait: its gradients are those of one micro-batch, or of one step before, and evaluation and
// checkpoints need moments at which the pipeline is empty.
void check_asynchronous(const TrainOptions& o) {
    const std::string name = "--pipeline " + o.pipeline;
    const int64_t m = step_micro_batches(o);
    check(o.pipeline != "pipedream" || m == 1, name, " updates after each micro-batch: a step has one, and not ", m,
          ": leave --micro-batch and --micro-batches out");
    check(o.pipeline != "2bw" || m >= o.pp, name, " needs at least as many micro-batches a step as ranks, --pp ", o.pp,
          ", and a step has ", m, ": use --micro-batches ", o.pp);
    check(o.flush_every > 0, "--flush-every must be positive: evaluations and checkpoints need an empty pipeline");
    for (const auto& [flag, value] :
         {std::pair("--val-every", o.val_every), {"--save-every", o.save_every}, {"--stop-after", o.stop_after}})
        check(value % o.flush_every == 0, flag, " ", value, " with ", name, ": it must be a multiple of --flush-every ",
              o.flush_every, ", when the pipeline is empty");
    // Of the steps between two such moments there is one table, of two stages a rank at most (make_schedule).
    const int64_t most = std::max<int64_t>(1, kMostPairs / (2 * o.pp * m));
    check(std::min(o.flush_every, o.steps) <= most, "--flush-every ", o.flush_every, " with ", name,
          ": the table of so many steps would be too large: use --flush-every ", most, " or less");
    check(o.clip == 0, name, " with --clip ", o.clip, ": there is never one norm of all gradients; add --clip 0");
    check(o.dtype != "fp16" && o.dtype != "float16" && o.dtype != "fp8", name, " with --dtype ", o.dtype,
          ": its scales are those of a step that all ranks end together; use --dtype bf16 or fp32");
}

}  // namespace

int64_t step_micro_batches(const TrainOptions& o) {
    return o.micro_batch == 0 ? 1 : o.batch / o.data_ranks() / o.micro_batch;
}

ScheduleOptions schedule_options(const TrainOptions& o, int64_t micro_batches) {
    ScheduleOptions s;
    s.name = o.pipeline, s.p = narrow(o.pp, "--pp"), s.m = narrow(micro_batches, "--micro-batches");
    s.chunks = narrow(o.chunks, "--chunks"), s.vertical_sync = o.vertical_sync;
    s.times = o.pipeline_times, s.max_alive = narrow(o.memory_limit, "--memory-limit");
    return s;
}

int64_t n_pipeline_stages(const TrainOptions& o) { return o.pp * stages_per_rank(schedule_options(o, 1)); }

void settle_pipeline(TrainOptions& o, const TypedFlags& typed) {
    for (const char* flag : {"--pipeline", "--stages"})
        check(o.pp > 1 || typed.given.count(flag) == 0, flag, " has no effect without --pp: add --pp 2, or leave ",
              flag, " out");
    check_schedule_flags(o, typed);
    choose_micro_batch(o, typed);
    check(o.pp > 1 || !o.asynchronous, "--pipeline ", o.pipeline, ", which this run has, needs --pp: add --pp 2");
    if (o.pp == 1) return;
    read_stages(o, typed.stages);
    check(o.data_parallel.zero < 2, "--zero ", o.data_parallel.zero,
          " with --pp: each micro-batch would send all gradients, or gather all weights, again: use --zero 1");
    check(o.offload == Offload::none, "--offload with --pp: leave one of the two out");
    if (o.asynchronous) check_asynchronous(o);
    // Error for numbers of ranks and micro-batches that a schedule cannot have.
    const bool splits = !o.asynchronous && make_schedule(schedule_options(o, step_micro_batches(o))).splits_backward;
    check(typed.recompute == "none" || !splits, "--recompute ", typed.recompute, " with --pipeline ", o.pipeline,
          ": the gradients by weight are computed later than what is computed again is there; use --pipeline 1f1b");
    check(o.recompute.head_chunks == 1 || !splits, "--head-chunks with --pipeline ", o.pipeline,
          ": the gradient of the head's weight is computed later, from the logits' gradient, which would have to stay; "
          "use --pipeline 1f1b");
    check(typed.given.count("--sample") == 0 || o.sample_tokens == 0,
          "--sample with --pp: no rank has the whole model; leave it out, and let ./generate continue a prompt with a "
          "checkpoint");
    o.sample_tokens = 0;
}

void settle_drawing(TrainOptions& o, const TypedFlags& typed) {
    static const std::set<std::string> kOfDrawings = {"--draw",          "--pp",           "--pipeline",
                                                      "--micro-batches", "--chunks",       "--vertical-sync",
                                                      "--times",         "--memory-limit", "--out"};
    for (const std::string& flag : typed.given)
        check(kOfDrawings.count(flag) > 0, flag, " has no effect with --draw, which prints a schedule and ends: leave ",
              "one of the two out");
    for (const char* flag : {"--pp", "--micro-batches"})
        check(typed.given.count(flag) > 0, "--draw needs ", flag, ", as in --pipeline ", o.pipeline,
              " --pp 4 --micro-batches 8 --draw");
    check_schedule_flags(o, typed);
    check(o.micro_batches >= 1, "--micro-batches must be at least 1");
    for (const auto& [flag, n] : {std::pair("--pp", o.pp), {"--micro-batches", o.micro_batches}})
        check(n <= 1024, flag, " ", n, " with --draw: at most 1024");
}
