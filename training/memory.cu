// training/memory.cu: the memory of a training run.
//
// take_memory() runs twice. In the first pass the arenas only count, so that --plan, and the table at the start, are
// made by the code that later takes the memory; reserve() allocates each arena once,
// and the second pass hands out the same places.
#include "training/training.h"

#include <algorithm>

namespace {

MemoryKind home_of_states(Offload offload) {
    return offload == Offload::none      ? MemoryKind::device
           : offload == Offload::unified ? MemoryKind::managed
                                         : MemoryKind::pinned;
}

}  // namespace

Memory::Memory(Offload offload)
    : weights("weights"), masters("master weights", home_of_states(offload)), grads("gradients"),
      optimizer("optimizer states", home_of_states(offload)), activations("activations"),
      communication("communication"), sampling("sampling"),
      transit("on the way to the device and back", MemoryKind::pinned), batches("batches", MemoryKind::pinned) {}

size_t Memory::bytes() {
    size_t total = device().blas_workspace_bytes;
    for (const Arena* arena : all()) total += arena->kind() == MemoryKind::device ? arena->bytes() : 0;
    return total;
}
size_t Memory::host_bytes() {
    size_t total = 0;
    for (const Arena* arena : all()) total += arena->kind() == MemoryKind::device ? 0 : arena->bytes();
    return total;
}

Trainer::Trainer(TrainOptions options_, Config config_, Mesh& mesh)
    : options(std::move(options_)), config(std::move(config_)), world(mesh.world()),
      dp_and_cp(options.cp > 1 ? mesh.make_comm({"dp", "cp"}) : nullptr),
      data_parallel(dp_and_cp ? *dp_and_cp : mesh.comm("dp"), options.data_parallel), dp_rank(mesh.index("dp")),
      local_batch(options.batch / options.data_ranks()),
      micro_batch(options.micro_batch == 0 ? local_batch : options.micro_batch), memory(options.offload),
      scaler(options.loss_scale) {
    if (options.tp > 1) {
        Comm& comm = mesh.comm("tp");
        const TensorLayout layout =
            tensor_layout(options.tp_mode, comm.rank, comm.size, options.sp, static_cast<int>(options.tp_depth));
        config_of_rank(config, layout);  // Error where it cannot be divided
        tensor_parallel = std::make_unique<TensorParallel>(comm, layout, config.K);
    }
    if (options.cp > 1)
        context_parallel = make_context_parallel(options.cp_mode, mesh.comm("cp"),
                                                 make_zigzag(options.seq, static_cast<int>(options.cp)));
    if (options.pp > 1) {
        pipeline = std::make_unique<Pipeline>(*this, mesh.comm("pp"));
        std::vector<ModelPart> parts;
        for (int rank = 0; rank < options.pp; ++rank) parts.push_back(pipeline->stages_of(rank).part);
        pipeline_ranks = std::make_unique<PipelineRanks>(mesh.comm("pp"), config, parts);
    }
    if (options.offload == Offload::none) return;
    offload = std::make_unique<OffloadedUpdate>(model, optimizer, options.updates_after_norm());
    // With --tp they are final when the ranks' parts have been added (accumulate_gradients).
    if (!tensor_parallel)
        data_parallel.grads_are_final = [this](size_t unit, cudaStream_t stream) {
            offload->grads_are_final(unit, stream);
        };
}

Trainer::~Trainer() {
    cudaStreamSynchronize(device().stream);  // an Error may come while the device works
    for (const StepEnd& end : step_ends)
        if (end.arrived) cudaEventDestroy(end.arrived), cudaFreeHost(end.numbers);
    if (start) cudaEventDestroy(start);
    cudaFreeHost(host_stop);
}

int64_t Trainer::evaluation_row() const { return std::max<int64_t>(2, steps_read_at_once(options)) * local_batch; }

void Trainer::take_memory() {
    const TrainOptions& o = options;
    Sharding sharding = data_parallel.sharding(optimizer_granularity(o.optimizer));
    sharding.offload = o.offload;
    const TensorLayout layout = tensor_parallel ? tensor_parallel->layout() : TensorLayout{};
    model = build_model(config, o.precision, o.seq, memory.weights, memory.grads, memory.masters, sharding, layout,
                        pipeline ? std::optional(pipeline->part()) : std::nullopt);
    model.data_parallel = &data_parallel;
    model.pipeline_ranks = pipeline_ranks.get();
    if (pipeline_ranks) pipeline_ranks->take_memory(memory.communication);
    model.tensor_parallel = tensor_parallel.get();
    model.context_parallel = context_parallel.get();
    model.flash_tier = o.attention;

    const std::vector<UpdatedUnit> units = model.updated_units();
    optimizer = sharding.host_updates() ? make_host_optimizer(o.optimizer, memory.optimizer, units, o.optimizer_options)
                                        : make_optimizer(o.optimizer, memory.optimizer, units, o.optimizer_options);
    if (tensor_parallel)
        optimizer->use_sums(
            [ranks = tensor_parallel.get()](Tensor tensor, cudaStream_t stream) { ranks->sum(tensor, stream); });
    if (offload) offload->take_memory(memory.transit);
    if (!pipeline) acts = take_activations(model, micro_batch, o.rank_seq(), o.recompute, memory.activations);
    workspace = take_workspace(model, micro_batch, o.rank_seq(), true, memory.activations);
    if (!pipeline && o.mask_documents) take_documents(model, acts, o.seq, memory.activations);
    if (!pipeline && o.has_positions()) take_positions(acts, memory.activations);
    totals = memory.activations.take("shared by layers", DType::f32, {n_units() + kStepNumberRows, 2});
    square_sums.emplace(memory.activations, "shared by layers", norm_parts());
    if (pipeline) acts = pipeline->take_memory();
    // A pipeline has its gradients in the second of two micro-batches (pipeline.cu).
    data_parallel.take_memory(model, pipeline ? 2 : micro_batches(), {totals, model.fp8_states}, memory.communication);
    if (o.sample_tokens > 0) {
        if (!sampler) sampler = std::make_unique<Engine>(model, sample_engine(o, config));
        sampler->take_memory(memory.sampling, memory.sampling, sample_tables);
    }
    take_tensor_parallel_memory();
    if (context_parallel) context_parallel->take_memory(attention_sizes(), memory.communication);
    const auto take_rows = [&](const char* what, int64_t row_n) {
        return memory.batches.take(what, DType::i32, {n_rows(), row_n}).ptr<int32_t>();
    };
    host_tokens = take_rows("tokens and targets", 2 * o.rank_seq());
    if (o.mask_documents) host_documents = take_rows("documents", 2 * o.seq);
    if (o.has_positions()) host_positions = take_rows("positions", o.rank_seq());
}

ContextParallel::Sizes Trainer::attention_sizes() const {
    const Config& c = model.local;
    return {.B = acts.B, .H = c.H, .K = c.K, .D = c.D, .Dv = c.value_D(), .dtype = model.precision.dtype};
}

// Each rank squares its shard, also where it holds all gradients: so the norm has the same bits with and without ZeRO.
std::vector<SquareSums::Part> Trainer::norm_parts() const {
    std::vector<SquareSums::Part> parts;
    for (size_t u = 0; u < model.units.size(); ++u)
        for (const Range& range : model.counted(u))
            parts.push_back(
                {model.grad_shard_place(u) + range.first, range.n, static_cast<int64_t>(model.units[u].number)});
    return parts;
}

void Trainer::take_tensor_parallel_memory() {
    if (!tensor_parallel) return;
    TensorParallel::Sizes sizes{.N = acts.B * acts.T,
                                .C = model.local.C,
                                .dtype = model.precision.dtype,
                                .grad_dtype = model.precision.grad_dtype,
                                .numbers = step_sums()};
    for (const auto& [axes, parts] : model.shared_grads())
        for (const Tensor& part : parts) sizes.shared[axes] += part.n();
    if (sampler) sizes.logits_n = sampler->largest_step().logits * vocabulary_rows(config, model.layout);
    if (model.layout.divides_columns()) sizes.geometry = geometry_sizes(model, acts);
    if (sampler) sizes.geometry.whole_rows = sampler->largest_step().tokens;
    sizes.overlap = options.tp_overlap;
    sizes.sums = optimizer->sums();
    if (model.fp8_states.n() > 0) sizes.sums.push_back(model.fp8_states);
    tensor_parallel->take_memory(sizes, memory.communication);
}

std::string Trainer::memory_fault() {
    const double device_bytes = static_cast<double>(device_memory().all);
    const int sharers = world.sharers_of_device();
    double all_bytes = 0;
    for (const auto& row : gather_numbers(world, {static_cast<int64_t>(memory.bytes())}))
        all_bytes += static_cast<double>(row[0]);
    // Of those that share a device: so many times the mean of all ranks, which differ in a pipeline.
    const double bytes = sharers > 1 ? all_bytes * sharers / world.size : static_cast<double>(memory.bytes());
    if (bytes <= device_bytes) return "";
    return concat("this run needs ", human_bytes(bytes),
                  sharers > 1 ? concat(" for the ", sharers, " ranks that share a device") : "", ", the device has ",
                  human_bytes(device_bytes), ": use ", sharers > 1 ? "fewer ranks, " : "", ways_to_fit());
}

std::string Trainer::ways_to_fit() const {
    const TrainOptions& o = options;
    std::string ways;
    const auto add = [&](bool helps, const char* way) {
        if (helps) ways += std::string(way) + ", ";
    };
    const bool splits = pipeline && pipeline->schedule().splits_backward;
    add(o.recompute.every == 0 && !o.recompute.selective && !splits, "--recompute");
    add(micro_batch > 1, "a smaller --micro-batch");
    add(o.precision.dtype == DType::f32, "--dtype bf16");
    add(o.precision.master && o.precision.dtype == DType::bf16 && !model.sharding.host_updates(), "--master none");
    const bool shards = o.sharding_ranks() > 1 && o.data_parallel.compress.kind == Compression::none;
    add(!pipeline && shards && o.data_parallel.zero < 3 && !o.data_parallel.naive, "--zero 3");
    add(!pipeline && o.offload == Offload::none, "--offload");
    return ways + "a shorter --seq, a smaller --model or another --optimizer";
}

void Trainer::reserve() {
    for (Arena* arena : memory.all()) arena->reserve();
    sample_tables.reserve();
    take_memory();
    optimizer->init(device().stream);
    square_sums->init(device().stream);
    cudaCheck(cudaMemsetAsync(totals.data, 0, totals.bytes(), device().stream));
    cudaCheck(cudaMallocHost(&host_stop, sizeof *host_stop));
    for (StepEnd& end : step_ends) {
        cudaCheck(cudaMallocHost(&end.numbers, sizeof *end.numbers));
        cudaCheck(cudaEventCreate(&end.arrived));
    }
    cudaCheck(cudaEventCreate(&start));
    if (options.has_positions()) set_positions(*this, n_rows());
}
