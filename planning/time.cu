// planning/time.cu: the floating-point operations and the seconds of a training step.
//
// A kernel computes and moves bytes at the same time. A step in which the two overlap fully takes the larger of
//
//   compute    FLOPs / (peak of the device in this precision)
//   memory     bytes that all operations read and write / bandwidth
//
// and one in which they never overlap takes their sum. Real steps lie between, where their kernels reach the rates.
//
// On the CPU device the same cores compute and move, so that nothing overlaps; and all kernels but the products (norms,
// attention, activation functions, the loss, the optimizer) compute for longer than a copy of their bytes would take:
// kCpuLeast to kCpuMost times. They convert numbers of 16 bits to float32, so that each takes the time of 4 bytes.
#include "core/names.h"
#include "model/sublayer.h"
#include "planning/planning.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Devices

const DeviceSpec kSpecs[] = {
    {.name = "h200",
     .f32 = 66.9e12,
     .f16 = 989.4e12,
     .fp8 = 1978.9e12,
     .bytes_per_s = 4.8e12,
     .bytes = 141e9,
     .source = "NVIDIA H200 data sheet; H100 architecture white paper, table 2 (SXM5)",
     .reached_f16 = 790e12,
     .reached_bytes = 4.3e12,
     .reached_source = "measured on one H200: bf16 products of 8192 x 8192 random numbers; a copy",
     .sm_count = 132,
     .block_shared_kib = 227,
     .is_hopper = true},
    {.name = "h100",
     .f32 = 66.9e12,
     .f16 = 989.4e12,
     .fp8 = 1978.9e12,
     .bytes_per_s = 3.35e12,
     .bytes = 80e9,
     .source = "NVIDIA H100 architecture white paper, table 2 (SXM5)",
     .reached_f16 = 798e12,
     .reached_bytes = 3.0e12,
     .reached_source = "measured on one H100 SXM: bf16 products of 8192 x 8192 random numbers; a copy",
     .sm_count = 132,
     .block_shared_kib = 227,
     .is_hopper = true},
    {.name = "a100",
     .f32 = 19.5e12,
     .f16 = 312e12,
     .fp8 = 0,
     .bytes_per_s = 2.039e12,
     .bytes = 80e9,
     .source = "NVIDIA A100 80GB data sheet (SXM)",
     .reached_f16 = 257e12,
     .reached_bytes = 0.9 * 2.039e12,
     .reached_source = "fp16 products of 8192 x 8192 random numbers, H. He, thonking.ai, 2024; 0.9 of the bandwidth",
     .sm_count = 108,
     .block_shared_kib = 163},
    {.name = "4090",
     .f32 = 82.6e12,
     .f16 = 165.2e12,
     .fp8 = 330.3e12,
     .bytes_per_s = 1.008e12,
     .bytes = 24e9,
     .source = "NVIDIA Ada GPU architecture white paper, appendix A",
     .reached_f16 = 0.9 * 165.2e12,
     .reached_bytes = 0.9 * 1.008e12,
     .reached_source = "0.9 of the data sheet",
     .sm_count = 128,
     .block_shared_kib = 99},
    {.name = "t4",
     .f32 = 8.1e12,
     .f16 = 65e12,
     .fp8 = 0,
     .multiplies_bf16 = false,
     .bytes_per_s = 320e9,
     .bytes = 16e9,
     .source = "NVIDIA T4 data sheet and Turing GPU architecture white paper",
     .reached_f16 = 24e12,
     .reached_bytes = 0.9 * 320e9,
     .reached_source = "fp16 products of 4096 x 4096 numbers at its 70 W, NVIDIA's developer forum, 2023; 0.9 of the "
                       "bandwidth",
     .sm_count = 40,
     .block_shared_kib = 64},
};

// Calibrated on two cores of an AMD EPYC (Zen 3, g++ 12, 117 GFLOP/s and 22 GB/s as rates.cu measures them), where
// these steps then ran; batches of 16 x 128 tokens in float32 where nothing else is said:
//
//                                           planned tokens/s      measured
//   tiny, the default run                   8.3k to 14.2k         13.7k
//   tiny, --dtype bf16                      8.1k to 14.2k         12.7k
//   tiny, --batch 4 --seq 512               8.1k to 13.2k          9.5k
//   deepseek-tiny                           8.2k to 14.3k         10.5k
//   mfa-tiny                                7.6k to 12.5k          9.8k
//   a GPT-2 of 4 layers, width 192          4.9k to  7.2k          6.2k
//   a LLaMA of 6 layers, width 512, x 4     0.51k to 0.76k         0.80k
constexpr double kCpuLeast = 2, kCpuMost = 6;

// nullptr for "this", which has to be measured.
const DeviceSpec* named_spec(const std::string& name) {
    for (const DeviceSpec& spec : kSpecs)
        if (name == spec.name) return &spec;
    check(name == "this", "--device-spec ", name, ": use ", comma_list(names_of(kSpecs)), " or this");
    return nullptr;
}

// ---------------------------------------------------------------------------------------------------------------------
// What a step computes and moves

// Each chunk of the head but the first reads the head's weight again, for its logits and for the gradient of its input;
// and it reads the gradient of the weight, adds to it and writes it.
double head_chunk_bytes(const Trainer& t, int64_t chunks, DType grad_dtype) {
    const double n_micro = static_cast<double>(t.micro_batches()),
                 more_chunks = n_micro * static_cast<double>(chunks - 1);
    return more_chunks * static_cast<double>(t.config.V_padded() * t.config.C) * 2 *
           static_cast<double>(dtype_bytes(t.options.precision.dtype) + dtype_bytes(grad_dtype));
}

// Elements that the operations of a block read and write for one token, each operation by itself.
Elements block_elements(const Config& c) {
    const double C = static_cast<double>(c.C);
    double linears = 0;
    for (const auto& [inputs, outputs] : block_linear_shapes(c)) linears += static_cast<double>(inputs + outputs);
    const Elements attention = find_attention(c.attention).elements(c),
                   feed_forward = find_feed_forward(c.feed_forward).elements(c);
    // Norms: stream, branch -> sum, out; backward dout, dsum, x -> dinp; again sum -> out. Linear layers: backward by
    // input and by weight.
    return {.forward = 2 * 4 * C + linears + attention.forward + feed_forward.forward,
            .backward = 2 * 4 * C + 2 * linears + attention.backward + feed_forward.backward,
            .again = 2 * 2 * C + attention.again + feed_forward.again,
            .fp8_forward = attention.fp8_forward + feed_forward.fp8_forward,
            .fp8_backward = attention.fp8_backward + feed_forward.fp8_backward};
}

// The products of a block, and alone the last one of its forward, from F to C columns. (It is not always the last in
// the order of block_linear_shapes.)
struct Linears {
    double inputs = 0, outputs = 0, weights = 0, last_inputs = 0, last_outputs = 0, last_weights = 0;
};
Linears block_linears(const Config& c) {
    const double F = static_cast<double>(c.F), C = static_cast<double>(c.C);
    Linears sum{.last_inputs = F, .last_outputs = C, .last_weights = F * C};
    for (const auto& [inputs, outputs] : block_linear_shapes(c)) {
        sum.inputs += static_cast<double>(inputs), sum.outputs += static_cast<double>(outputs);
        sum.weights += static_cast<double>(inputs * outputs);
    }
    return sum;
}

// What the backward runs again of the forward: all segments but the last, each without its last product, whose output
// nobody needs.
struct Again {
    double segments = 0, blocks = 0;
    double of_blocks(double all, double last) const { return blocks * all - segments * last; }
};
Again computed_again(const Recompute& recompute, int64_t L) {
    if (recompute.every == 0) return {};
    const int64_t segments = ceil_div(L, recompute.every) - 1;
    return {static_cast<double>(segments), static_cast<double>(segments * recompute.every)};
}

// What fp8 moves more than 16 bits do. The input of a layer is cast for its forward, the output gradient for the
// gradient of the input, and both, transposed, for that of the weight: two bytes are read and one is written, which
// the product reads instead of two. --fp8 current reads both once more, for the largest value. Weights are cast both
// ways once a step, with --zero 3 at each visit of a block; all but --fp8 block read them once more, for the largest.
// GELU and the sums that are the biases' gradients, which are part of products of 16 bits, have kernels of their own.
double fp8_bytes(const Trainer& t, double L, const Elements& block, const Linears& linears, const Again& again) {
    const Fp8Recipe recipe = t.options.precision.fp8;
    if (recipe == Fp8Recipe::none) return 0;
    const double tokens = static_cast<double>(t.local_batch * t.options.rank_seq()),
                 n_micro = static_cast<double>(t.micro_batches());
    const double largest = recipe == Fp8Recipe::current ? 2 : 0, cast = 3 - 1;
    const double forwards = L * linears.inputs + again.of_blocks(linears.inputs, linears.last_inputs);
    double biased = 0;  // outputs of layers that have a bias
    Block first = t.model.blocks[0];
    for (const Linear* linear : ::linears(first)) biased += static_cast<double>(linear->bias.n());
    const double by_tokens = (largest + cast) * forwards + L * (largest + cast) * linears.outputs +
                             L * cast * (linears.inputs + linears.outputs) +
                             2 * ((L + again.blocks) * block.fp8_forward + L * (block.fp8_backward + biased));
    const double visits = t.model.sharding.shards_weights() ? n_micro * (2 * L + again.blocks) : L;
    const double by_weights =
        visits * (recipe == Fp8Recipe::block ? 4 : 6) * linears.weights -
        n_micro * (2 * L * linears.weights + again.of_blocks(linears.weights, linears.last_weights));
    return tokens * by_tokens + by_weights;
}

// What this rank computes: in 1D its heads, columns of the feed-forward and rows of the vocabulary, for all tokens; in
// the other geometries an equal share of everything, as of a share of the tokens.
struct RankShare {
    Config config;
    double of_tokens;
};
RankShare share_of_rank(const Trainer& t) {
    if (t.model.layout.divides_columns()) return {t.config, 1.0 / t.model.layout.size};
    Config c = t.model.local;
    if (t.tensor_parallel) c.V = vocabulary_rows(t.config, t.model.layout);
    return {c, 1};
}

// Without messages: neither their time, nor the copies that they need, nor what is read once more because an operand
// comes in several messages (the panels of 2D and 2.5D, the keys of other ranks in context parallelism).
struct StepCost {
    double flops = 0, bytes = 0;
    double fp8_flops = 0;  // those among flops that are in fp8: the blocks' linear layers
};
StepCost step_cost(Trainer& t, double state_bytes) {
    const auto [c, share] = share_of_rank(t);
    const TrainOptions& o = t.options;
    const double tokens = share * static_cast<double>(t.local_batch * o.rank_seq()),
                 n_micro = static_cast<double>(t.micro_batches());
    const double L = static_cast<double>(c.L), C = static_cast<double>(c.C), V = static_cast<double>(c.V_padded());
    const double n = static_cast<double>(t.model.n);
    const double value_bytes = static_cast<double>(dtype_bytes(o.precision.dtype));
    const double grad_bytes = static_cast<double>(dtype_bytes(o.precision.grad_dtype));
    StepCost cost;
    cost.flops = tokens * flops_per_token(c, o.seq);

    const Elements block = block_elements(c);
    const double head =
        (2 * C) + 4 * C + (C + V) + 2 * V + 2 * (V + C) + 4 * C + 2 * C;  // embedding, norm, head, loss, back
    const Linears linears = block_linears(c);
    const Again again = computed_again(o.recompute, c.L);
    const double weights_again = again.of_blocks(linears.weights, linears.last_weights);
    // Run again, the first norm of a segment has no branch to add.
    const double elements = L * (block.forward + block.backward + (o.recompute.selective ? block.again : 0)) +
                            again.of_blocks(block.forward, linears.last_inputs + linears.last_outputs + 2 * C) + head;
    const std::vector<double> blocks = block_flops_per_token(c, o.seq);
    const double forwards_again =
        std::accumulate(blocks.begin(), blocks.begin() + static_cast<int64_t>(again.blocks), 0.0) / 3;
    cost.flops += tokens * (forwards_again - again.segments * 2 * linears.last_weights);
    if (o.precision.fp8 != Fp8Recipe::none) cost.fp8_flops = tokens * 2 * (3 * L * linears.weights + weights_again);
    // The weights are read by the forward, perhaps again, and by the gradient of the input; gradients are written by
    // the first micro-batch, added to by the others, read for their norm, and read by the optimizer, which reads and
    // writes what it updates and its states: here, or on the host. Of an embedding that is not the head, too, a
    // micro-batch reads the rows of its tokens, and adds to them.
    const double whole_n = n - (c.tied ? 0 : share * V * C);
    cost.bytes = tokens * elements * value_bytes + n_micro * (2 * whole_n + share * weights_again) * value_bytes +
                 (3 * n + 2 * (n_micro - 1) * whole_n) * grad_bytes + fp8_bytes(t, L, block, linears, again) +
                 head_chunk_bytes(t, o.recompute.head_chunks, o.precision.grad_dtype) +
                 (t.model.sharding.host_updates()
                      ? 0
                      : 2 * state_bytes + n * (o.precision.master ? 8 + value_bytes : 2 * value_bytes));
    const Optimizer::Products products = t.optimizer->products();
    cost.flops += products.flops, cost.bytes += products.bytes;
    return cost;
}

// Of a pipeline: the schedule simulated with the products of its stages. The head is computed with its backward.
void print_pipeline_time(const Trainer& t, const DeviceSpec& spec) {
    const TrainOptions& o = t.options;
    const PipelineSchedule& schedule = t.pipeline->schedule();
    const double rate = spec.rate(o.precision.dtype),
                 block_rate = o.precision.fp8 != Fp8Recipe::none && spec.fp8 > 0 ? spec.fp8 : rate;
    const auto [c, share] = share_of_rank(t);
    const double tokens = share * static_cast<double>(t.micro_batch * o.rank_seq()),
                 head = tokens * 2 * static_cast<double>(c.V * c.C) / rate;
    const std::vector<double> blocks = block_flops_per_token(c, o.seq);
    Times times{.stages = {}};
    const double last_product = tokens * 2 * block_linears(c).last_weights / block_rate;
    auto block = blocks.begin();
    for (const int64_t n : t.pipeline->blocks_of_stages()) {
        const double its = tokens * std::accumulate(block, block + n, 0.0) / 3 / block_rate;
        block += n;
        // Run again: all blocks, and of each segment's last one not the last product (block_forward).
        const int64_t every = o.recompute.every;
        const double again = every > 0 ? its - static_cast<double>(ceil_div(n, every)) * last_product : 0;
        times.stages.push_back({.forward = its, .backward_input = its + again, .backward_weight = its});
    }
    times.stages.back().backward_input += 2 * head, times.stages.back().backward_weight += head;
    const Simulation run = simulate(schedule, times);
    const double steps = static_cast<double>(steps_at_once(o)), seconds = run.end / steps;
    std::printf("on %s   %sFLOP/s (%s)\n", spec.name, human_count(rate).c_str(), spec.source);
    std::printf("  the stages' products take %s a step, with a bubble of %.4f: %s tokens/s at most\n",
                human_seconds(seconds).c_str(), run.bubble,
                human_count(static_cast<double>(o.batch * o.seq) / seconds).c_str());
}

}  // namespace

DeviceSpec device_spec(const std::string& name, DType dtype) {
    if (const DeviceSpec* spec = named_spec(name)) return *spec;
    const double rate = measure_matmul_rate(dtype), copy = measure_copy_rate();
    const double slower = device().is_cpu ? 4 / static_cast<double>(dtype_bytes(dtype)) : 0;
    return {.name = device().name.c_str(),
            .f32 = rate,
            .f16 = rate,
            .fp8 = 0,
            .bytes_per_s = copy,
            .bytes = static_cast<double>(device_memory().all),
            .source = "measured just now",
            .reached_f16 = rate,
            .reached_bytes = copy,
            .reached_source = "measured just now",
            .rest_least = slower * kCpuLeast,
            .rest_most = slower * kCpuMost};
}

void expect_device_spec(const std::string& name) { named_spec(name); }

void stand_in_for(const std::string& name) {
    const DeviceSpec* const spec = named_spec(name);
    if (!device().is_cpu || !spec) return;
    device().sm_count = spec->sm_count;
    device().block_shared_bytes = spec->block_shared_kib << 10;
    choose_matmuls_as_hopper(spec->is_hopper);
}

// This run's --head-chunks and, beside it, 1; or, where it is 1, 8, with the gradients that --grad-dtype auto then has.
static void print_head_chunks(const Trainer& t, const DeviceSpec& spec) {
    if (t.tensor_parallel) return;
    const int64_t N = t.micro_batch * t.options.rank_seq(), own = t.options.recompute.head_chunks;
    const double row =
        static_cast<double>(t.config.V_padded()) * static_cast<double>(dtype_bytes(t.options.precision.dtype));
    const auto print = [&](const char* before, int64_t chunks) {
        std::printf("%s--head-chunks %lld: logits of %s", before, static_cast<long long>(chunks),
                    human_bytes(static_cast<double>(Recompute{.head_chunks = chunks}.head_rows(N)) * row).c_str());
        if (chunks == 1) return;
        const DType here = t.options.precision.grad_dtype, there = chunks == own ? here : DType::f32;
        const double bytes = head_chunk_bytes(t, chunks, there);
        std::printf(", %s more moved in a step (%s)", human_bytes(bytes).c_str(),
                    human_seconds(bytes / spec.bytes_per_s).c_str());
        const double wider = static_cast<double>(dtype_bytes(there)) / static_cast<double>(dtype_bytes(here));
        if (wider > 1)
            std::printf(", gradients in float32 (%s more)",
                        human_bytes((wider - 1) * static_cast<double>(t.memory.grads.bytes())).c_str());
    };
    print("  ", own);
    if (own != 1) print("; ", 1);
    else if (N >= 8) print("; ", 8);
    std::printf("\n");
}

// Where the device has too little memory for the rank that takes most.
static void print_fit(Trainer& t, const DeviceSpec& spec) {
    const auto [rank, bytes] =
        t.pipeline ? largest_pipeline_rank(t) : std::pair(0, static_cast<double>(t.memory.bytes()));
    if (bytes <= spec.bytes) return;
    const std::string who = rank > 0 ? concat("rank ", rank, " needs about ", human_bytes(bytes), ": ") : "";
    std::printf("  %sit does not fit: %s has %s. Try %s%s\n", who.c_str(), spec.name, human_bytes(spec.bytes).c_str(),
                t.pipeline ? "more ranks, " : "", t.ways_to_fit().c_str());
}

void print_time(Trainer& t) {
    const TrainOptions& o = t.options;
    const DeviceSpec spec = device_spec(o.device_spec, o.precision.dtype);
    if (t.pipeline) {
        print_pipeline_time(t, spec);
        print_fit(t, spec);
        return;
    }
    double optimizer_bytes = 0;  // of this rank
    for (const OptimizerState& state : t.optimizer->states())
        optimizer_bytes += static_cast<double>(state.tensor.bytes());
    // Of this rank, and of all.
    const double tokens = static_cast<double>(t.local_batch * o.rank_seq()),
                 all_tokens = static_cast<double>(o.batch * o.seq);
    const StepCost cost = step_cost(t, optimizer_bytes);
    std::printf("FLOPs per token 6 N = %s;  exact = %s (weights that multiply, and attention's causal half)\n",
                human_count(6 * static_cast<double>(parameter_count(t.config))).c_str(),
                human_count(flops_per_token(t.config, o.seq)).c_str());
    std::printf("%s%s tokens, %sFLOP%s, %s moved\n", rank_count(o.ranks) > 1 ? "a step, rank 0  " : "a step          ",
                human_count(tokens).c_str(), human_count(cost.flops).c_str(),
                o.recompute.every > 0 ? " with recomputation" : "", human_bytes(cost.bytes).c_str());
    const double rate = spec.rate(o.precision.dtype), fp8_rate = spec.fp8 > 0 ? spec.fp8 : rate;
    const double compute = (cost.flops - cost.fp8_flops) / rate + cost.fp8_flops / fp8_rate,
                 move = cost.bytes / spec.bytes_per_s;
    const bool overlaps = spec.rest_least == 0;
    const double least = overlaps ? std::max(compute, move) : compute + spec.rest_least * move,
                 most = compute + (overlaps ? 1 : spec.rest_most) * move;
    std::printf("on %s   %sFLOP/s", spec.name, human_count(rate).c_str());
    if (rate < spec.rate(DType::f16) && o.precision.dtype == DType::bf16)
        std::printf(" (its tensor cores multiply no bf16; --dtype fp16: %s)", human_count(spec.f16).c_str());
    if (cost.fp8_flops > 0)
        std::printf(", in fp8 %s", spec.fp8 > 0 ? concat(human_count(fp8_rate), "FLOP/s").c_str() : "no faster");
    std::printf(", %sB/s (%s)\n", human_count(spec.bytes_per_s).c_str(), spec.source);
    std::printf("  compute %s, memory %s", human_seconds(compute).c_str(), human_seconds(move).c_str());
    if (!overlaps) std::printf(" (on a CPU %g to %g times that)", spec.rest_least, spec.rest_most);
    std::printf(": a step takes %s to %s, %s to %s tokens/s%s\n", human_seconds(least).c_str(),
                human_seconds(most).c_str(), human_count(all_tokens / most).c_str(),
                human_count(all_tokens / least).c_str(),
                rank_count(o.ranks) > 1 ? ", without messages and the copies for them" : "");
    print_head_chunks(t, spec);
    print_fit(t, spec);
}
