// training/options_check.cu: what flags mean together, and which of them cannot be combined. Everything here is known
// before the model's shape and the data are; an Error names the flags and says which one to change.
#include "core/names.h"
#include "parallel/comm/transport.h"
#include "training/training.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

// Steps as long as those from random weights take a trained model away from what it has learned: a model with a
// validation loss of 1.578 had 1.770 after 20 steps of AdamW at 3e-3, and 1.560 after 20 at 3e-4.
// (0.003 / 10 is not the number that reads "0.0003"; a quotient of whole numbers is.)
double a_tenth_of(double learning_rate) { return std::round(1e9 * learning_rate) / 1e10; }

void choose_optimizer(TrainOptions& o, const TypedFlags& typed) {
    o.schedule.steps = o.steps;
    o.pretrained_lr = !typed.lr && !o.init.empty();
    const double default_lr = default_learning_rate(o.optimizer);
    o.schedule.peak = typed.lr.value_or(o.pretrained_lr ? a_tenth_of(default_lr) : default_lr);
    o.typed_schedule = o.schedule;
    if (o.resume && !o.out.empty()) o.schedule = resumed_schedule(o, read_state(o.checkpoint)).schedule;
    else if (o.schedule.warmup == -1) o.schedule.warmup = o.steps / 20;
    o.optimizer_options = default_optimizer_options(o.optimizer);
    for (const Hyperparameter& h : hyperparameters())
        if (const auto value = typed.hyperparameters.at("--" + h.name)) o.optimizer_options.*h.field = *value;
}

// What --dtype and the flags beside it mean together.
void choose_precision(TrainOptions& o, const TypedFlags& typed) {
    const bool fp8 = o.dtype == "fp8";
    check(fp8 || o.dtype == "fp32" || o.dtype == "bf16" || o.dtype == "fp16" || o.dtype == "float32" ||
              o.dtype == "bfloat16" || o.dtype == "float16",
          "--dtype ", o.dtype, ": use fp32, bf16, fp16 or fp8");
    Precision& p = o.precision;
    p.dtype = fp8 ? DType::bf16 : dtype_from_name(o.dtype);
    if (fp8) {
        p.fp8 = fp8_recipe_from_name(typed.fp8);
        check(p.fp8 != Fp8Recipe::none, "--fp8 none with --dtype fp8: use delayed, current or block, or --dtype bf16");
        expect_fp8_device(p.fp8);
        check(o.rank_seq() % 16 == 0, "--dtype fp8 multiplies blocks of 16 tokens: --seq ", o.seq,
              " is not a multiple of ", 16 * o.cp);
    }
    const bool master = choose<bool>("--master", typed.master, {{"fp32", true}, {"none", false}, {"auto", true}});
    check(master || p.dtype == DType::bf16,
          "--master none needs --dtype bf16 or fp8: float32 has no other "
          "weights, and float16 lacks the range");
    p.master = master && p.dtype != DType::f32;
    if (p.dtype != DType::f32) o.optimizer_options.ns_dtype = DType::bf16;  // also of float16, which lacks the range

    const bool accumulates =
        (o.micro_batch != 0 && o.micro_batch < o.batch / o.data_ranks()) || o.recompute.head_chunks > 1;
    const std::set<std::string> grad_dtypes = {"auto", "same", "fp32", "bf16", "fp16"};
    check(grad_dtypes.contains(typed.grad_dtype), "--grad-dtype ", typed.grad_dtype, ": use fp32, same or auto");
    if (typed.grad_dtype == "auto") p.grad_dtype = accumulates ? DType::f32 : p.dtype;
    else if (typed.grad_dtype == "same") p.grad_dtype = p.dtype;
    else p.grad_dtype = dtype_from_name(typed.grad_dtype);
    check(p.grad_dtype == DType::f32 || p.grad_dtype == p.dtype, "--grad-dtype ", typed.grad_dtype, " with --dtype ",
          o.dtype, ": use fp32, same or auto");

    const LossScaleOptions scale = parse_loss_scale(typed.loss_scale != "auto" ? typed.loss_scale
                                                    : p.dtype == DType::f16    ? "dynamic"
                                                                               : "1");
    o.loss_scale.dynamic = scale.dynamic;
    if (!scale.dynamic) o.loss_scale.start = scale.start;
    o.loss_scale.largest = std::max(o.loss_scale.largest, o.loss_scale.start);
    LossScaler check_it(o.loss_scale);
    check(p.dtype == DType::f16 || !o.loss_scale.dynamic,
          "--loss-scale dynamic is for --dtype fp16: bf16 and fp32 have the range of float32");
    check(o.tune_matmul == "auto" || o.tune_matmul == "on" || o.tune_matmul == "off", "--tune-matmul ", o.tune_matmul,
          ": use on, off or auto");
    const int64_t head_chunks = o.recompute.head_chunks;
    o.recompute = parse_recompute(typed.recompute);
    o.recompute.head_chunks = head_chunks;
    check(head_chunks >= 1, "--head-chunks ", head_chunks, ": use 1 (all tokens at once) or more");
    check(
        head_chunks == 1 || o.tp == 1,
        "--head-chunks with --tp: its ranks have divided the logits among them, and sum up the gradient of all rows of "
        "the head's input at once; leave one of the two out");
    o.attention = flash_tier_from_name(typed.attention);
    expect_flash_tier(o.attention, p.dtype);
}

std::string data_parallel_mode(const TrainOptions& o) {
    return o.data_parallel.naive ? "--dp-mode naive" : concat("--zero ", o.data_parallel.zero);
}

// Gradient compression changes the loss curve, so it is part of the run, also of one that is resumed on one rank, which
// sends nothing, and has nothing to compress.
void choose_compression(TrainOptions& o, const std::string& name) {
    CompressOptions& c = o.data_parallel.compress;
    c.kind = compression_from_name(name);
    check(c.rank >= 1 && c.rank <= 16, "--compress-rank ", c.rank, ": use 1 to 16");
    if (c.kind == Compression::none) return;
    check(o.data_parallel.zero == 0 && !o.data_parallel.naive, "--compress ", name, " with ", data_parallel_mode(o),
          ": compressors make the whole "
          "sum for every rank, which only --dp-mode ddp without --zero asks for: leave one of the two out");
    check(c.kind == Compression::bf16 || o.precision.dtype != DType::f16, "--compress ", name,
          " adds the errors of a step to the "
          "gradients of the next, which --dtype fp16 may have scaled differently, or made infinite: use --dtype bf16 "
          "or --compress bf16");
    check(o.precision.grad_dtype == DType::f32, "--compress ", name,
          " compresses float32 gradients: add --grad-dtype fp32");
}

// Before they are multiplied with each other.
void check_axes(const TrainOptions& o) {
    for (const auto& [flag, n] : {std::pair("--tp", o.tp), {"--cp", o.cp}, {"--pp", o.pp}})
        check(n >= 1, flag, " must be at least 1");
    for (const auto& [flag, n] : {std::pair("--tp", o.tp), {"--cp", o.cp}, {"--pp", o.pp}, {"--tp-depth", o.tp_depth}})
        check(n <= kMostPlannedRanks, flag, " ", n, ": at most ", kMostPlannedRanks, " ranks can be planned");
}

void check_options(const TrainOptions& o) {
    check(o.batch > 0 && o.seq > 0 && o.steps > 0, "--batch, --seq and --steps must be positive");
    check(o.batch <= (int64_t{1} << 40) / o.seq, "--batch ", o.batch, " sequences of --seq ", o.seq,
          " tokens: a step can have at most 2^40 tokens");
    check(o.micro_batch >= 0, "--micro-batch must not be negative");
    check_rank_options(o.ranks);
    check(o.plan_parameters == 0 || (o.tp == 1 && o.pp == 1),
          "--params with --tp or --pp: what a rank has depends on the model's layers: give --model in its place");
    const int64_t group = o.tp * o.cp * o.pp;
    std::string flags;
    for (const auto& [flag, size] : {std::pair("--tp", o.tp), {"--cp", o.cp}, {"--pp", o.pp}})
        if (size > 1) flags += concat(flags.empty() ? "" : " ", flag, " ", size);
    check(rank_count(o.ranks) % group == 0, flags, ": ",
          rank_count(o.ranks) == 1 ? "one rank" : concat("the ", rank_count(o.ranks), " ranks"),
          " cannot be divided into groups of ", group, ": start a multiple of them (",
          started_by_mpirun() ? "mpirun -np " : "--ranks ", group, ")");
    make_zigzag(o.seq, narrow(o.cp, "--cp"));  // Error where the sequence cannot be divided
    const int64_t n_ranks = o.data_ranks();
    check(o.batch % n_ranks == 0, "--batch ", o.batch, " cannot be divided among ", n_ranks,
          " ranks: choose a multiple of ", n_ranks);
    check(o.micro_batch == 0 || o.batch / n_ranks % o.micro_batch == 0,
          n_ranks > 1 ? "a rank's share of --batch, " : "--batch ", o.batch / n_ranks, n_ranks > 1 ? "," : "",
          " cannot be divided into micro-batches of ", o.micro_batch, ": choose a --micro-batch that divides it");
    constexpr int64_t kMostSequences = 65535;  // a GPU's grids have at most this many rows of blocks
    check((o.micro_batch > 0 ? o.micro_batch : o.batch / n_ranks) <= kMostSequences, "a micro-batch can have at most ",
          kMostSequences, " sequences: give a smaller --micro-batch");
    check(!(o.plan && o.account), "--plan and --account: give one of them");
    check(!o.account || rank_count(o.ranks) == 1, "--account: it is that of one rank: leave --ranks and mpirun out");
    check(o.data_parallel.zero >= 0 && o.data_parallel.zero <= 3, "--zero ", o.data_parallel.zero,
          ": use 0, 1, 2 or 3");
    check(!o.data_parallel.naive || o.data_parallel.zero == 0,
          "--dp-mode naive keeps all states with rank 0: leave --zero out");
    check(o.data_parallel.bucket_mib > 0, "--bucket-mib must be positive");
    check(o.seed >= 0, "--seed must not be negative");
    const float clip = static_cast<float>(o.clip), lr = static_cast<float>(o.schedule.peak);
    check(o.clip == 0 || (clip > 0 && std::isfinite(clip)), "--clip ", o.clip,
          ": it must be 0, for no clipping, or a float32 number above 0");
    check(std::isfinite(lr), "--lr: in float32 it is ", lr, ", and it must be a number >= 0");
    for (const Hyperparameter& h : hyperparameters()) {
        const float value = o.optimizer_options.*h.field;
        const std::string fault = hyperparameter_fault(h, value);
        check(fault.empty(), "--", h.name, ": in float32 it is ", value, ", and ", fault);
    }
    check(o.temperature >= 1e-6 && o.temperature <= 1e6, "--temperature ", o.temperature,
          ": it must lie between 1e-6 and 1e6");  // of what check_sampling allows, all but 0
    check(o.eot >= -1 && o.eot <= std::numeric_limits<int32_t>::max(), "--eot ", o.eot, ": a token id, or -1");
    check(o.val_fraction >= 0 && o.val_fraction < 1, "--val-fraction ", o.val_fraction,
          ": it must be 0, or lie between 0 and 1");
    check(o.val_every >= 0 && o.val_sequences > 0 && o.sample_tokens >= 0 && o.save_every >= 0 && o.keep >= 0 &&
              o.stop_after >= 0 && o.log_every >= 0,
          "--val-every, --sample, --save-every, --keep, --stop-after and --log-every must not be negative, "
          "--val-sequences must be positive");
    check(o.plan_parameters >= 0 && (o.plan_parameters == 0 || o.plan),
          "--params N belongs to --plan, and must be positive");
    check(o.plan_parameters <= 1e18, "--params ", o.plan_parameters, ": at most 1e18 parameters can be planned");
    check(!o.resume || !o.out.empty(), "--resume needs --out DIR, the folder of the run to continue");
    check(!o.new_data || o.resume, "--new-data belongs to --resume: a new run takes any data");
    check_schedule(o.schedule);
}

void check_offload(const TrainOptions& o) {
    if (o.offload != Offload::optimizer && o.offload != Offload::params) return;
    const char* name = o.offload == Offload::params ? "params" : "optimizer";
    check(o.offload != Offload::params || o.data_parallel.compress.kind == Compression::none,
          "--offload params with --compress: weights that are fetched need --zero 3, and compressors make whole sums: "
          "leave one of the two out");
    check(has_host_optimizer(o.optimizer), "--offload ", name, " with --optimizer ", o.optimizer,
          ": the host updates by adamw and adam; use one of them, or --offload unified");
    check(o.precision.master || o.precision.dtype == DType::f32, "--offload ", name,
          " with --master none: the host updates float32 weights; leave --master out, or use --offload unified");
    check(o.offload != Offload::params || o.data_parallel.zero == 3,
          "--offload params needs --zero 3, which fetches a unit's weights "
          "before each use, also on one rank; with ",
          data_parallel_mode(o), " use --offload optimizer");
}

// What does not go together with --tp; --sp and --tp-overlap belong to it.
void check_tensor_parallel(const TrainOptions& o) {
    check(!o.tp_overlap || o.precision.fp8 == Fp8Recipe::none,
          "--tp-overlap with --dtype fp8: scales are those of all rows, which are never there together; leave it out");
    check(!o.sp || o.tp > 1, "--sp divides the tokens among the ranks of --tp: add --tp, or leave it out");
    check(o.tp > 1 || (o.tp_mode == TensorMode::one_d && o.tp_depth == 0),
          o.tp_mode == TensorMode::one_d ? "--tp-depth" : "--tp-mode",
          " says how the ranks of --tp divide the layers: add --tp, or leave it out");
    if (o.tp > 1)  // Error where its ranks make no such grid
        tensor_layout(o.tp_mode, 0, static_cast<int>(o.tp), o.sp, static_cast<int>(o.tp_depth));
    check(!o.tp_overlap || o.sp, "--tp-overlap is about the rows that travel with --sp: add --sp, or leave it out");
    check(o.precision.fp8 == Fp8Recipe::none || o.tp_mode == TensorMode::one_d, "--dtype fp8 with --tp-mode ",
          tensor_mode_name(o.tp_mode),
          ": its products of blocks are in 16 or 32 bits; use --dtype bf16 or --tp-mode 1d");
}

// --trace records steps that this call of the program makes.
void check_trace(const TrainOptions& o) {
    const int64_t first = 1 + (o.resume ? read_state(o.checkpoint).step : 0),
                  last = o.stop_after > 0 ? std::min(o.stop_after, o.steps) : o.steps;
    for (const int64_t step : traced_steps(o.ranks.trace))
        check(step >= first && step <= last, "--trace ", o.ranks.trace, ": step ", step,
              " is not among those that will be made, ", first, " to ", last);
}

// Error for a flag of the command line that changes nothing beside the others.
void check_effects(const TrainOptions& o, const TypedFlags& typed) {
    const auto check_effect = [&](const std::string& flag, bool has_effect, const std::string& reason) {
        check(has_effect || typed.given.count(flag) == 0, flag, " has no effect ", reason, ", or leave ", flag, " out");
    };
    check_effect("--fp8", o.precision.fp8 != Fp8Recipe::none, concat("with --dtype ", o.dtype, ": add --dtype fp8"));
    for (const char* flag :
         {"--loss-scale-start", "--loss-scale-interval", "--loss-scale-growth", "--loss-scale-backoff"})
        check_effect(flag, o.loss_scale.dynamic, "on a constant loss scale: use --dtype fp16 --loss-scale dynamic");
    check_effect(
        "--compress", o.data_parallel.compress.kind == Compression::none || o.sharding_ranks() > 1,
        concat("where no ranks divide the batch, so that none sends gradients: start ", 2 * o.tp * o.pp, " ranks"));
    check_effect("--compress-rank", o.data_parallel.compress.kind == Compression::power_sgd,
                 concat("with --compress ", typed.compress, ": use --compress powersgd"));
    const auto check_read = [&](const std::string& flag, const std::vector<std::string>& readers, const std::string& by,
                                const std::string& chosen) {
        check_effect(flag, std::ranges::count(readers, chosen) > 0,
                     concat("with ", by, " ", chosen, ": use ", by, " ", comma_list(readers)));
    };
    check_read("--min-lr-ratio", schedules_that_read(&Schedule::min_ratio), "--schedule", o.schedule.name);
    check_read("--decay-fraction", schedules_that_read(&Schedule::decay_fraction), "--schedule", o.schedule.name);
    for (const Hyperparameter& h : hyperparameters())
        check_read("--" + h.name, optimizers_that_read(h), "--optimizer", o.optimizer);
    check_effect("--val-fraction", o.val.empty(), "beside --val, which is all that is held out: leave --val out");
    check_effect("--ranks-per-node", all_reduce_from_name(o.ranks.all_reduce) == AllReduce::two_level,
                 concat("with --all-reduce ", o.ranks.all_reduce, ": use --all-reduce two-level"));
    check_effect("--ranks-per-node", !started_by_mpirun(),
                 "under mpirun, where the machines are known: start threads, with --ranks N");
    check_effect("--cp-mode", o.cp > 1, "without --cp: add --cp 2");
    check_effect("--device-spec", o.plan || o.account, "without --plan or --account, whose device it is: add --plan");
    check_effect("--trace", !o.plan && !o.account, "with --plan or --account, which make no step: leave that flag out");
    check_effect("--temperature", o.sample_tokens > 0, "without a sample of text: add --sample 100");
    const bool has_buckets =
        o.data_parallel.zero == 0 && !o.data_parallel.naive && o.data_parallel.compress.kind == Compression::none;
    check_effect("--bucket-mib", has_buckets,
                 "with --zero, --dp-mode naive or --compress, which send units: use none of them");
    for (const char* flag : {"--model", "--init", "--seq", "--recompute", "--head-chunks"})
        check_effect(flag, o.plan_parameters == 0, "on the plan of --params, which has no layers: leave --params out");
}

}  // namespace

void settle_options(TrainOptions& o, const TypedFlags& typed) {
    if (o.draw) return settle_drawing(o, typed);
    check_axes(o);
    // A plan of states alone does not depend on the batch: any batch that the ranks can share will do.
    if (const int64_t n = std::max<int64_t>(1, o.data_ranks()); o.plan_parameters > 0 && o.batch % n != 0)
        o.batch = n, o.micro_batch = 0;
    if (!o.init.empty() && !o.resume) o.init = find_model_folder("--init", o.init);
    choose_optimizer(o, typed);
    o.tp_mode = tensor_mode_from_name(typed.tp_mode);
    o.data_parallel.naive = choose<bool>("--dp-mode", typed.dp_mode, {{"ddp", false}, {"naive", true}});
    o.cp_mode = context_mode_from_name(typed.cp_mode);
    o.offload = offload_from_name(typed.offload);
    o.ranks.planning = o.plan && !started_by_mpirun();  // rank 0 plans for all
    check_options(o);
    if (o.seq < 2) o.sample_tokens = 0;  // no room for a token of a prompt, and one of an answer
    settle_pipeline(o, typed);
    choose_precision(o, typed);
    choose_compression(o, typed.compress);
    check_offload(o);
    check_tensor_parallel(o);
    check_effects(o, typed);
    check_trace(o);
    settle_boundary(o, typed);
    if (!o.init.empty() && typed.given.count("--model") == 0) o.model.clear();
}
