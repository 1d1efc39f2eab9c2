// planning/memory.cu: where the bytes of a training run go: the table at its start, and ./train_gpt --plan.
//
// Bytes that a model keeps, for each of its Psi parameters              (Rajbhandari et al. 2020, arXiv:1910.02054)
//
//   float32 AdamW             4 weights + 4 gradients + 4 m + 4 v                            = 16 Psi
//   mixed precision AdamW     2 weights + 2 gradients + 4 master weights + 4 m + 4 v         = 16 Psi
//   bf16, no master, Lion     2 weights + 2 gradients + 4 m                                  =  8 Psi
//   fp8                       2 more: each weight of the blocks twice, as it is and transposed
//
// and activations, which grow with the tokens of a micro-batch and not with Psi. All are counted here by the functions
// that later take them, over arenas that only count: so the plan is what the program takes.
#include "planning/planning.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

namespace {

// The bytes of an optimizer's states by kind: "m", "v", "row", ...
std::vector<std::pair<std::string, double>> by_kind(const Optimizer& optimizer) {
    std::vector<std::pair<std::string, double>> kinds;
    for (const OptimizerState& state : optimizer.states()) {
        auto at =
            std::find_if(kinds.begin(), kinds.end(), [&](const auto& entry) { return entry.first == state.kind; });
        if (at == kinds.end()) at = kinds.insert(kinds.end(), {state.kind, 0.0});
        at->second += static_cast<double>(state.tensor.bytes());
    }
    return kinds;
}

double table_bytes(const Arena& arena, const std::string& name) {
    double sum = 0;
    for (const auto& [what, bytes] : arena.table()) sum += what == name ? static_cast<double>(bytes) : 0;
    return sum;
}

// Of a run like this one that shards nothing. (With Muon shards differ: one may have matrices only.)
struct WholeStates {
    std::vector<std::pair<std::string, double>> optimizer;
    double fp8_weights;
};
WholeStates whole_states(const Trainer& t) {
    const TrainOptions& o = t.options;
    Arena weights("weights"), grads("gradients"), masters("master weights"), states("optimizer states");
    const Sharding whole{.offload = t.model.sharding.offload};
    const Model model =
        build_model(t.config, o.precision, o.seq, weights, grads, masters, whole, t.model.layout, t.model.part);
    const std::vector<UpdatedUnit> units = model.updated_units();
    const auto optimizer = whole.host_updates() ? make_host_optimizer(o.optimizer, states, units, o.optimizer_options)
                                                : make_optimizer(o.optimizer, states, units, o.optimizer_options);
    return {by_kind(*optimizer), table_bytes(weights, "fp8 weights")};
}

// Bytes of activations of a model like this one with L layers.
double activation_bytes(const Trainer& t, const Recompute& recompute, int64_t L) {
    Config config = t.config;
    config.L = L;
    Arena weights("weights"), grads("gradients"), masters("master weights"), activations("activations");
    const Model model =
        build_model(config, t.options.precision, t.options.seq, weights, grads, masters, {}, t.model.layout);
    Activations acts = take_activations(model, t.micro_batch, t.options.rank_seq(), recompute, activations);
    take_workspace(model, t.micro_batch, t.options.rank_seq(), true, activations);
    if (t.options.mask_documents) take_documents(model, acts, t.options.seq, activations);
    if (t.options.has_positions()) take_positions(acts, activations);
    return static_cast<double>(activations.bytes());
}

std::string size_text(double bytes) { return format("%10s %9.4g GB", human_bytes(bytes).c_str(), bytes / 1e9); }

void print_activations(const Trainer& t) {
    const int64_t L = t.config.L, root = std::max<int64_t>(1, std::llround(std::sqrt(static_cast<double>(L))));
    std::printf("activations of %lld x %lld tokens     another layer        in all\n",
                static_cast<long long>(t.micro_batch), static_cast<long long>(t.options.rank_seq()));
    std::vector<std::pair<std::string, Recompute>> choices = {{"none", {}}, {"selective", {.selective = true}}};
    const Recompute& r = t.options.recompute;
    for (const int64_t every : std::set{root, r.every})
        if (every > 1) choices.push_back({std::to_string(every), {.every = every}});
    choices.push_back({"full", {.every = 1}});
    for (auto& [name, choice] : choices) {
        choice.head_chunks = r.head_chunks;
        const int64_t n = std::max<int64_t>(1, choice.every);
        const double layer =
            (activation_bytes(t, choice, 2 * n) - activation_bytes(t, choice, n)) / static_cast<double>(n);
        const bool chosen = choice.every == r.every && choice.selective == r.selective;
        std::printf("  --recompute %-12s %14s %s%s\n", name.c_str(), human_bytes(layer).c_str(),
                    size_text(activation_bytes(t, choice, L)).c_str(), chosen ? "   this run" : "");
    }
}

// One line of a table of states: bytes of all ranks together.
struct StateRow {
    std::string name;
    double bytes;
};
struct StateTable {
    std::vector<StateRow> device, host;
    double sum() const {
        double bytes = 0;
        for (const auto& rows : {device, host})
            for (const StateRow& row : rows) bytes += row.bytes;
        return bytes;
    }
};

// Weights, gradients, master weights and the optimizer's states of all ranks together,
// by the place where --offload puts them.
StateTable state_table(const Trainer& t, const WholeStates& whole) {
    const TrainOptions& o = t.options;
    const double n = static_cast<double>(t.model.n);
    StateTable table;
    auto& weight_rows = o.offload == Offload::params ? table.host : table.device;
    auto& optimizer_rows = t.memory.optimizer.kind() == MemoryKind::device ? table.device : table.host;
    weight_rows.push_back({"weights", n * static_cast<double>(dtype_bytes(o.precision.dtype))});
    table.device.push_back({"gradients", n * static_cast<double>(dtype_bytes(o.precision.grad_dtype))});
    if (o.precision.fp8 != Fp8Recipe::none) table.device.push_back({"fp8 weights, both ways", whole.fp8_weights});
    if (o.precision.master) optimizer_rows.push_back({"master weights", 4 * n});
    for (const auto& [kind, bytes] : whole.optimizer) optimizer_rows.push_back({"optimizer " + kind, bytes});
    return table;
}

// psi: parameters of the model, or of --params, whose states then follow from the bytes of a parameter.
void print_states(const std::vector<StateRow>& rows, double n, double psi) {
    double sum = 0;
    for (const StateRow& row : rows) {
        sum += row.bytes;
        std::printf("  %-24s %18.2f %s\n", row.name.c_str(), row.bytes / n, size_text(row.bytes / n * psi).c_str());
    }
    std::printf("  %-24s %18.2f %s\n", "sum", sum / n, size_text(sum / n * psi).c_str());
}

// What each stage leaves of the states on a rank: the table of the ZeRO paper (arXiv:1910.02054, figure 1). Weights in
// 8 bits are not sharded; stage 3 has those of two blocks, which take turns. What --offload keeps on the host is in a
// column of its own; --offload params has stage 3 alone. all: bytes of a parameter's states; fp8: of them, those of
// weights in 8 bits.
void print_stages(const Trainer& t, double psi, double all, double fp8) {
    const Precision& precision = t.options.precision;
    const double weights = static_cast<double>(dtype_bytes(precision.dtype)),
                 grads = static_cast<double>(dtype_bytes(precision.grad_dtype)),
                 fp8_in_turns = fp8 * std::min(1.0, 2 / static_cast<double>(t.model.n_blocks()));
    const double n = static_cast<double>(t.options.sharding_ranks()), states = all - weights - grads - fp8;
    const bool offloads = t.options.offload != Offload::none, fetches = t.options.offload == Offload::params;
    std::printf("on each of %lld ranks       bytes per parameter %s\n",
                static_cast<long long>(t.options.sharding_ranks()),
                offloads ? "    on the device              on the host" : "       in all");
    for (int stage = fetches ? 3 : 0; stage <= 3; ++stage) {
        const double of_weights = weights / (stage >= 3 ? n : 1), of_states = states / (stage >= 1 ? n : 1);
        const double on_host = (fetches ? of_weights : 0) + (offloads ? of_states : 0);
        const double on_device =
            of_weights + grads / (stage >= 2 ? n : 1) + (stage >= 3 ? fp8_in_turns : fp8) + of_states - on_host;
        const std::string name = stage == 0 ? "0 (ddp)" : std::to_string(stage);
        const bool of_run = stage == t.options.data_parallel.zero && !t.options.data_parallel.naive;
        std::printf("  --zero %-17s %18.3f %s%s%s\n", name.c_str(), on_device, size_text(on_device * psi).c_str(),
                    offloads ? (" " + size_text(on_host * psi)).c_str() : "", of_run ? "   this run" : "");
    }
}

// What the arenas of this rank hold.
void print_total(Trainer& t) {
    const TrainOptions& o = t.options;
    std::printf("%-26s           bytes\n", rank_count(o.ranks) > 1 ? "in all, on rank 0" : "in all");
    const size_t total = t.memory.bytes(), activations = t.memory.activations.bytes(),
                 sampling = t.memory.sampling.bytes();
    double states = static_cast<double>(t.model.grads.bytes());  // on the device
    if (o.offload != Offload::params) states += static_cast<double>(t.model.weights.bytes());
    if (t.memory.optimizer.kind() == MemoryKind::device) {
        states += static_cast<double>(t.model.masters.bytes());
        for (const auto& [kind, bytes] : by_kind(*t.optimizer)) states += bytes;
    }
    if (o.precision.fp8 != Fp8Recipe::none) states += table_bytes(t.memory.weights, "fp8 weights");
    for (const auto& buffers : {t.model.weight_buffers, t.model.grad_buffers})
        for (const Tensor& buffer : buffers) states += static_cast<double>(buffer.bytes());
    const size_t state_bytes = static_cast<size_t>(states), communication = t.memory.communication.bytes();
    // Of pipelines: older weights, and what an update that is undone was made from.
    const size_t copies = static_cast<size_t>(table_bytes(t.memory.weights, "versions of the weights") +
                                              table_bytes(t.memory.optimizer, "before an update"));
    std::vector<std::pair<const char*, size_t>> rows = {
        {"states", state_bytes}, {"activations and scratch", activations}, {"sampling", sampling}};
    if (communication > 0) rows.push_back({"communication", communication});
    if (copies > 0) rows.push_back({"copies of weights, states", copies});
    rows.push_back(
        {"tables, cuBLASLt workspace", total - state_bytes - activations - sampling - communication - copies});
    rows.push_back({"total", total});
    if (t.memory.host_bytes() > 0) rows.push_back({"on the host", t.memory.host_bytes()});
    for (const auto& [name, bytes] : rows)
        std::printf("  %-26s %13zu %s\n", name, bytes, size_text(static_cast<double>(bytes)).c_str());
}

}  // namespace

void print_plan(Trainer& t) {
    const TrainOptions& o = t.options;
    expect_device_spec(o.device_spec);  // before the first line is printed
    const bool any_model = o.plan_parameters > 0;
    const double n = static_cast<double>(t.model.n);
    const double psi = any_model ? o.plan_parameters : static_cast<double>(parameter_count(t.config));
    std::printf("plan     %s parameters, --dtype %s, --optimizer %s", human_count(psi).c_str(), o.dtype.c_str(),
                o.optimizer.c_str());
    if (!any_model)
        std::printf(", --batch %lld in micro-batches of %lld, --seq %lld", static_cast<long long>(o.batch),
                    static_cast<long long>(t.micro_batch), static_cast<long long>(o.seq));
    std::printf("\n");

    if (t.tensor_parallel)
        std::printf(
            "tp       %lld ranks divide each layer: what follows is of the %s parameters (with padding) of one\n",
            static_cast<long long>(o.tp), human_count(n).c_str());
    if (t.context_parallel)
        std::printf("cp       %lld ranks divide each sequence (%s): one has %lld of its tokens\n",
                    static_cast<long long>(o.cp), context_mode_name(o.cp_mode), static_cast<long long>(o.rank_seq()));
    if (t.pipeline) print_pipeline_plan(t);
    const WholeStates whole = whole_states(t);
    StateTable table = state_table(t, whole);
    const double bytes_a_parameter = table.sum() / n;
    // Buffers of the offload are not states: they are shown with them, and not counted in what ZeRO shards.
    const int64_t n_shards = o.data_parallel.zero > 0 ? o.sharding_ranks() : 1;  // each rank has its own
    for (const auto& [what, bytes] : t.memory.transit.table())
        table.host.push_back({what + " in transit", static_cast<double>(n_shards) * static_cast<double>(bytes)});
    // The flat arrays hold n elements: the parameters, and padding of the vocabulary.
    const double shown = any_model ? psi : n;
    std::printf("states                    bytes per parameter        in all\n");
    print_states(table.device, n, shown);
    if (!table.host.empty()) {
        std::printf("on the host\n");
        print_states(table.host, n, shown);
    }
    if (o.sharding_ranks() > 1) print_stages(t, shown, bytes_a_parameter, whole.fp8_weights / n);
    if (rank_count(o.ranks) > 1 && !any_model && traffic_is_known(t))
        std::printf("  a rank sends              %18s %s in a step\n", "",
                    size_text(static_cast<double>(expected_traffic(t)) / rank_count(o.ranks)).c_str());
    if (any_model) return;  // the rest depends on the shape of the model

    if (t.tensor_parallel) print_tensor_bills(t);
    if (!t.pipeline) print_activations(t);
    print_total(t);
    print_time(t);
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
