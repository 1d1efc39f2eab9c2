// planning/plan.cu: where the bytes, the floating-point operations and the seconds of a training step go: ./train_gpt --plan.
//
// Bytes that a model keeps, for each of its Psi parameters                          (Rajbhandari et al. 2020, arXiv:1910.02054)
//
//   float32 AdamW             4 weights + 4 gradients + 4 m + 4 v                            = 16 Psi
//   mixed precision AdamW     2 weights + 2 gradients + 4 master weights + 4 m + 4 v         = 16 Psi
//   bf16, no master, Lion     2 weights + 2 gradients + 4 m                                  =  8 Psi
//   fp8                       2 more: each weight of the blocks twice, as it is and transposed
//
// and activations, which grow with the tokens of a micro-batch and not with Psi. They are counted here by the functions that
// later take them, over arenas that only count: the plan cannot drift from the program.
//
// Time: a kernel computes and moves bytes at once. A step in which the two overlap fully takes the larger of
//
//   compute    FLOPs / (peak of the device in this precision)
//   memory     bytes that all operations read and write / bandwidth
//
// and one in which they never do, their sum: real ones lie between, where their kernels reach the rates.
#include "training/training.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Devices

// Dense rates, without sparsity, as the makers state them; float32 without tensor cores, because our float32 products are not
// cut to TF32; 16 bits with sums in float32.
struct DeviceSpec {
    const char* name;
    double f32, f16, fp8;  // FLOP/s; fp8 = 0: the device has none
    double bytes_per_s;
    double bytes;
    const char* source;
};
const DeviceSpec kSpecs[] = {
    {"h200", 66.9e12, 989.4e12, 1978.9e12, 4.8e12, 141e9,
     "NVIDIA H200 data sheet; H100 architecture white paper, table 2 (SXM5)"},
    {"h100", 66.9e12, 989.4e12, 1978.9e12, 3.35e12, 80e9, "NVIDIA H100 architecture white paper, table 2 (SXM5)"},
    {"a100", 19.5e12, 312e12, 0, 2.039e12, 80e9, "NVIDIA A100 80GB data sheet (SXM)"},
    {"4090", 82.6e12, 165.2e12, 330.3e12, 1.008e12, 24e9, "NVIDIA Ada GPU architecture white paper, appendix A"},
};

// Bytes read and written a second by a copy on this device.
double measure_copy_rate() {
    const int64_t n = device().is_cpu ? 16 << 20 : 256 << 20;
    Arena arena("copy probe");
    arena.take("probe", DType::f32, {2, n});
    arena.reserve();
    const Tensor both = arena.take("probe", DType::f32, {2, n}), from = both.slice(0, 1), to = both.slice(1, 1);
    double best = 1e30;
    for (int i = 0; i < 4; ++i) {  // the first one touches the pages
        const double start = seconds_now();
        cudaCheck(cudaMemcpyAsync(to.data, from.data, to.bytes(), cudaMemcpyDeviceToDevice, device().stream));
        cudaCheck(cudaStreamSynchronize(device().stream));
        if (i > 0) best = std::min(best, seconds_now() - start);
    }
    return static_cast<double>(both.bytes()) / best;
}

DeviceSpec find_spec(const std::string& name, DType dtype) {
    for (const DeviceSpec& spec : kSpecs)
        if (name == spec.name) return spec;
    check(name == "this", "--device-spec ", name, ": use h200, h100, a100, 4090 or this");
    size_t free_bytes = 0, device_bytes = 0;
    cudaCheck(cudaMemGetInfo(&free_bytes, &device_bytes));
    const double rate = measure_matmul_rate(dtype);
    return {device().name.c_str(), rate, rate, 0, measure_copy_rate(), static_cast<double>(device_bytes),
            "measured just now"};
}

// ---------------------------------------------------------------------------------------------------------------------
// What a step computes and moves

// Elements that the operations of llm.cu read and write for one token, each operation by itself.
struct Traffic {
    double forward = 0, backward = 0;
};
Traffic block_traffic(const Config& c) {
    const double C = static_cast<double>(c.C), F = static_cast<double>(c.F), U = static_cast<double>(c.up_width());
    const bool mla = c.attention == AttentionKind::mla, mfa = c.attention == AttentionKind::mfa;
    const double q = static_cast<double>(c.H * c.D), O = static_cast<double>(c.attn_width());
    const double k = mfa ? static_cast<double>(c.D) : static_cast<double>(c.K * c.D);
    const double v = mfa ? static_cast<double>(c.D) : static_cast<double>(c.K * c.value_D());
    // Columns that rope turns: of all query heads, and of the key heads, of which MLA shares one.
    const double turned = static_cast<double>((c.H + (mla ? 1 : c.K)) * c.rope_D());
    const double rope = c.family == Family::llama ? 2 * turned : 0;
    const double normed = c.qk_norm ? q + k : static_cast<double>(c.q_rank + c.kv_rank);  // heads, or latents
    const double keys = mla ? k - static_cast<double>(c.H * c.D_rope) + k : 0;  // put together (latent_keys.cu)
    double linears = 0;
    for (const auto& [inputs, outputs] : block_linear_shapes(c)) linears += static_cast<double>(inputs + outputs);
    Traffic t;
    t.forward = 2 * 4 * C + 2 * normed +         // norms: stream, branch -> sum, out; heads, latents
                linears +                        // linear layers
                rope + keys + (q + k + v + O) +  // attention: q, k, v -> o
                (U + F);                         // activation function
    t.backward = 2 * 4 * C + 3 * normed +        // norms: dout, dsum, x -> dinp
                 2 * linears +                   // linear layers: by input and by weight
                 2 * O + (3 * (q + k + v) + 3 * O) + rope +
                 keys +        // attention: delta; dq; dk and dv (flash_attention.cu)
                 (F + 2 * U);  // activation function
    return t;
}

struct StepCost {
    double flops = 0, bytes = 0;
    double fp8_flops = 0;  // those among flops that are in fp8: the blocks' linear layers
};
StepCost step_cost(Trainer& t, double state_bytes) {
    const Config& c = t.config;
    const TrainOptions& o = t.options;
    const double tokens = static_cast<double>(t.local_batch * o.seq),
                 n_micro = static_cast<double>(t.local_batch / t.micro_batch);
    const double L = static_cast<double>(c.L), C = static_cast<double>(c.C), V = static_cast<double>(c.V_padded());
    const double n = static_cast<double>(t.model.n);
    const double value_bytes = static_cast<double>(dtype_bytes(o.precision.dtype));
    const double grad_bytes = static_cast<double>(dtype_bytes(o.precision.grad_dtype));
    StepCost cost;
    cost.flops = tokens * flops_per_token(c, o.seq);

    const Traffic block = block_traffic(c);
    const double head =
        (2 * C) + 4 * C + (C + V) + 2 * V + 2 * (V + C) + 4 * C + 2 * C;  // embedding, norm, head, loss, back
    double elements = L * (block.forward + block.backward) + head;
    if (o.recompute.every > 0) {
        // All but the last segment, without the last product of each segment's last block.
        const double again = L - std::min<double>(L, static_cast<double>(o.recompute.every));
        elements += again * block.forward;
        cost.flops += tokens * again / L * (flops_per_token(c, o.seq) - 6.0 * static_cast<double>(c.V * c.C)) / 3;
    }
    if (o.precision.fp8 != Fp8Recipe::none) {
        for (const auto& [inputs, outputs] : block_linear_shapes(c))
            cost.fp8_flops += tokens * L * 6 * static_cast<double>(inputs * outputs);
    }
    // The weights are read by the forward and by the gradient of the input; gradients are added to, zeroed, read for their
    // norm, and read by the optimizer, which reads and writes what it updates and its states: here, or on the host.
    cost.bytes = tokens * elements * value_bytes + n_micro * n * (2 * value_bytes + 2 * grad_bytes) +
                 3 * n * grad_bytes +
                 (t.model.sharding.host_updates()
                      ? 0
                      : 2 * state_bytes + n * (o.precision.master ? 8 + value_bytes : 2 * value_bytes));
    return cost;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

// The optimizer's states by kind: "m", "v", "row", ...; of what this rank updates.
std::vector<std::pair<std::string, double>> optimizer_states(const Trainer& t) {
    std::vector<std::pair<std::string, double>> kinds;
    for (const auto& optimizer : t.optimizers) {
        for (const OptimizerState& state : optimizer->states()) {
            auto at =
                std::find_if(kinds.begin(), kinds.end(), [&](const auto& entry) { return entry.first == state.kind; });
            if (at == kinds.end()) at = kinds.insert(kinds.end(), {state.kind, 0.0});
            at->second += static_cast<double>(state.tensor.bytes());
        }
    }
    return kinds;
}

// Bytes of activations of a model like this one with L layers.
double activation_bytes(const Trainer& t, const Recompute& recompute, int64_t L) {
    Config config = t.config;
    config.L = L;
    Arena weights("weights"), grads("gradients"), masters("master weights"), activations("activations");
    const Model model = build_model(config, t.options.precision, t.options.seq, weights, grads, masters);
    Activations acts = take_activations(model, t.micro_batch, t.options.seq, recompute, activations);
    if (t.options.mask_documents) take_documents(acts, activations);
    return static_cast<double>(activations.bytes());
}

double table_bytes(const Arena& arena, const std::string& name) {
    double sum = 0;
    for (const auto& [what, bytes] : arena.table()) sum += what == name ? static_cast<double>(bytes) : 0;
    return sum;
}

std::string size_text(double bytes) {
    char text[64];
    std::snprintf(text, sizeof text, "%10s %9.4g GB", human_bytes(bytes).c_str(), bytes / 1e9);
    return text;
}

void print_activations(const Trainer& t) {
    const int64_t L = t.config.L, root = std::max<int64_t>(1, std::llround(std::sqrt(static_cast<double>(L))));
    std::printf("activations of %lld x %lld tokens     another layer        in all\n",
                static_cast<long long>(t.micro_batch), static_cast<long long>(t.options.seq));
    std::vector<std::pair<std::string, Recompute>> choices = {{"none", {}}, {"selective", {.selective = true}}};
    if (root > 1) choices.push_back({std::to_string(root), {.every = root}});
    choices.push_back({"full", {.every = 1}});
    const Recompute& r = t.options.recompute;
    for (const auto& [name, choice] : choices) {
        const int64_t n = std::max<int64_t>(1, choice.every);
        const double layer =
            (activation_bytes(t, choice, 2 * n) - activation_bytes(t, choice, n)) / static_cast<double>(n);
        const bool chosen = choice.every == r.every && choice.selective == r.selective;
        std::printf("  --recompute %-12s %14s %s%s\n", name.c_str(), human_bytes(layer).c_str(),
                    size_text(activation_bytes(t, choice, L)).c_str(), chosen ? "   this run" : "");
    }
}

}  // namespace

double measure_matmul_rate(DType dtype) {
    const int64_t n = device().is_cpu ? 1024 : 8192;
    Arena arena("matmul probe");
    Tensor a, b, c;
    for (int pass = 0; pass < 2; ++pass) {
        a = arena.take("probe", dtype, {n, n});
        b = arena.take("probe", dtype, {n, n});
        c = arena.take("probe", dtype, {n, n});
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

void print_memory(Memory& memory) {
    const size_t total = memory.bytes();
    std::printf("memory\n");
    const auto line = [](const char* indent, const std::string& what, size_t bytes) {
        std::printf("  %s%-28s %10s\n", indent, what.c_str(), human_bytes(static_cast<double>(bytes)).c_str());
    };
    const auto arenas = [&](bool on_device) {
        for (const Arena* arena : memory.all()) {
            if (arena->bytes() == 0 || (arena->kind() == MemoryKind::device) != on_device) continue;
            line("", arena->name(), arena->bytes());
            for (const auto& [what, bytes] : arena->table())
                if (bytes < arena->bytes() && bytes >= total / 100)
                    line("  ", what, bytes);  // smaller ones are in the sum
        }
    };
    arenas(true);
    if (device().blas_workspace_bytes > 0) line("", "cuBLASLt's workspace", device().blas_workspace_bytes);
    line("", "total", total);
    if (memory.host_bytes() == 0) return;
    std::printf("memory of the host\n");
    arenas(false);
    line("", "total", memory.host_bytes());
}

namespace {

// What each stage leaves of the states on a rank: the table of the ZeRO paper (arXiv:1910.02054, figure 1).
void print_stages(const Trainer& t, double psi, double weights, double grads, double all) {
    const double n = rank_count(t.options.ranks), states = all - weights - grads;
    const std::pair<const char*, double> stages[] = {
        {"0 (ddp)", all}, {"1", weights + grads + states / n}, {"2", weights + (grads + states) / n}, {"3", all / n}};
    std::printf("on each of %d ranks         bytes a parameter        in all\n", rank_count(t.options.ranks));
    for (const auto& [stage, bytes] : stages)
        std::printf(
            "  --zero %-17s %18.3f %s%s\n", stage, bytes, size_text(bytes * psi).c_str(),
            stage[0] - '0' == t.options.data_parallel.zero && !t.options.data_parallel.naive ? "   this run" : "");
    if (t.options.plan_parameters == 0)
        std::printf("  a rank sends              %18s %s in a step\n", "",
                    size_text(static_cast<double>(expected_traffic(t)) / n).c_str());
}

}  // namespace

void print_plan(Trainer& t) {
    const TrainOptions& o = t.options;
    const double n = static_cast<double>(t.model.n);
    double updated_n = 0;
    for (size_t u = 0; u < t.model.units.size(); ++u) updated_n += static_cast<double>(t.model.updated(u).n);
    const double psi = o.plan_parameters > 0 ? o.plan_parameters : static_cast<double>(parameter_count(t.config));
    std::printf(
        "plan     %s parameters, --dtype %s, --optimizer %s, --batch %lld in micro-batches of %lld, --seq %lld\n",
        human_count(psi).c_str(), o.dtype.c_str(), o.optimizer.c_str(), static_cast<long long>(o.batch),
        static_cast<long long>(t.micro_batch), static_cast<long long>(o.seq));

    // Bytes for each element of the flat arrays. With --params that is all there is to tell: the rest depends on the shape.
    const double weights = n * static_cast<double>(dtype_bytes(o.precision.dtype)),
                 grads = n * static_cast<double>(dtype_bytes(o.precision.grad_dtype));
    std::vector<std::pair<std::string, double>> rows, host_rows;
    const bool states_here = t.memory.optimizer.kind() == MemoryKind::device,
               weights_here = o.offload != Offload::params;
    auto &value_rows = weights_here ? rows : host_rows, &state_rows = states_here ? rows : host_rows;
    value_rows.push_back({"weights", weights});
    rows.push_back({"gradients", grads});
    if (o.precision.fp8 != Fp8Recipe::none)
        rows.push_back({"fp8 weights, both ways", table_bytes(t.memory.weights, "fp8 weights")});
    if (o.precision.master) state_rows.push_back({"master weights", 4 * n});
    double optimizer_bytes = 0;  // of this rank
    for (const auto& [kind, bytes] : optimizer_states(t))
        state_rows.push_back({"optimizer " + kind, bytes * n / updated_n}), optimizer_bytes += bytes;
    double all_bytes = 0;
    for (const auto& table : {rows, host_rows})
        for (const auto& row : table) all_bytes += row.second;
    for (const auto& [what, bytes] : t.memory.transit.table())
        host_rows.push_back({what + " in transit", static_cast<double>(bytes)});
    const auto print_rows = [&](const std::vector<std::pair<std::string, double>>& table) {
        double sum = 0;
        for (const auto& [name, bytes] : table) {
            sum += bytes / n;
            std::printf("  %-24s %18.2f %s\n", name.c_str(), bytes / n,
                        size_text(o.plan_parameters > 0 ? bytes / n * psi : bytes).c_str());
        }
        std::printf("  %-24s %18.2f %s\n", "sum", sum, size_text(sum * (o.plan_parameters > 0 ? psi : n)).c_str());
    };
    std::printf("states                      bytes a parameter        in all\n");
    print_rows(rows);
    if (!host_rows.empty()) {
        std::printf("on the host\n");
        print_rows(host_rows);
    }
    if (rank_count(o.ranks) > 1) print_stages(t, psi, weights / n, grads / n, all_bytes / n);
    if (o.plan_parameters > 0) return;

    print_activations(t);
    std::printf("%-26s           bytes\n", rank_count(o.ranks) > 1 ? "in all, on rank 0" : "in all");
    const size_t total = t.memory.bytes();
    size_t states = t.model.grads.bytes() + (weights_here ? t.model.weights.bytes() : 0);  // on the device
    if (states_here) states += t.model.masters.bytes() + static_cast<size_t>(optimizer_bytes);
    if (o.precision.fp8 != Fp8Recipe::none) states += static_cast<size_t>(table_bytes(t.memory.weights, "fp8 weights"));
    for (const auto& buffers : {t.model.weight_buffers, t.model.grad_buffers})
        for (const Tensor& buffer : buffers) states += buffer.bytes();
    const size_t activations = t.memory.activations.bytes(), sampling = t.memory.sampling.bytes();
    std::vector<std::pair<const char*, size_t>> parts = {
        {"states", states},
        {"activations and scratch", activations},
        {"sampling", sampling},
        {"tables, cuBLASLt workspace", total - states - activations - sampling},
        {"total", total}};
    if (t.memory.host_bytes() > 0) parts.push_back({"on the host", t.memory.host_bytes()});
    for (const auto& [name, bytes] : parts)
        std::printf("  %-26s %13zu %s\n", name, bytes, size_text(static_cast<double>(bytes)).c_str());

    const double tokens = static_cast<double>(t.local_batch * o.seq);
    const StepCost cost = step_cost(t, optimizer_bytes);
    std::printf("FLOPs a token   6 N = %s;  exact = %s (weights that multiply, and attention's causal half)\n",
                human_count(6 * psi).c_str(), human_count(flops_per_token(t.config, o.seq)).c_str());
    std::printf("a step          %s tokens, %sFLOP%s, %s moved\n", human_count(tokens).c_str(),
                human_count(cost.flops).c_str(), o.recompute.every > 0 ? " with recomputation" : "",
                human_bytes(cost.bytes).c_str());
    const DeviceSpec spec = find_spec(o.device_spec, o.precision.dtype);
    const double rate = o.precision.dtype == DType::f32 ? spec.f32 : spec.f16,
                 fp8_rate = spec.fp8 > 0 ? spec.fp8 : rate;
    const double compute = (cost.flops - cost.fp8_flops) / rate + cost.fp8_flops / fp8_rate,
                 move = cost.bytes / spec.bytes_per_s;
    const double least = std::max(compute, move), most = compute + move;
    std::printf("on %s   %sFLOP/s", spec.name, human_count(rate).c_str());
    if (cost.fp8_flops > 0)
        std::printf(", in fp8 %s", spec.fp8 > 0 ? concat(human_count(fp8_rate), "FLOP/s").c_str() : "no faster");
    std::printf(", %sB/s (%s)\n", human_count(spec.bytes_per_s).c_str(), spec.source);
    std::printf("  compute %s, memory %s: a step takes %s to %s, %s to %s tokens/s\n", human_seconds(compute).c_str(),
                human_seconds(move).c_str(), human_seconds(least).c_str(), human_seconds(most).c_str(),
                human_count(tokens / most).c_str(), human_count(tokens / least).c_str());
    if (static_cast<double>(total) > spec.bytes)
        std::printf(
            "  it does not fit: %s has %s. Try --recompute, a smaller --micro-batch, --master none, another "
            "--optimizer, or --offload\n",
            spec.name, human_bytes(spec.bytes).c_str());
}
