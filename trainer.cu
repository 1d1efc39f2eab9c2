// trainer.cu: the memory of a training run.
#include "trainer.h"

namespace {

template <class T>
void take_pinned(T*& pointer, int64_t n) {
    cudaCheck(cudaMallocHost(&pointer, static_cast<size_t>(n) * sizeof(T)));
}

}  // namespace

size_t Memory::bytes() {
    size_t total = device().blas_workspace_bytes;
    for (const Arena* arena : all()) total += arena->bytes();
    return total;
}

Trainer::Trainer(TrainOptions options_, Config config_)
    : options(std::move(options_)), config(std::move(config_)),
      micro_batch(options.micro_batch == 0 ? options.batch : options.micro_batch), scaler(options.loss_scale) {}

void Trainer::take_memory() {
    const TrainOptions& o = options;
    model = build_model(config, o.precision, o.seq, memory.weights, memory.grads, memory.masters);
    optimizer = make_optimizer(o.optimizer, memory.optimizer, model.params, model.values.n(), o.optimizer_options);
    acts = take_activations(model, micro_batch, o.seq, o.recompute, memory.activations);
    norm_result = memory.activations.take("shared by layers", DType::f32, {2});
    norm_scratch = memory.activations.take("shared by layers", DType::f32, {grad_norm_scratch_n(model.grads.n())});
    if (o.sample_tokens > 0)
        sample_acts = take_forward_activations(model, 1, std::min<int64_t>(o.seq, 256), memory.sampling);
}

void Trainer::reserve() {
    size_t free_bytes = 0, device_bytes = 0;
    cudaCheck(cudaMemGetInfo(&free_bytes, &device_bytes));
    check(memory.bytes() <= device_bytes, "this run needs ", human_bytes(static_cast<double>(memory.bytes())), ", the device has ",
          human_bytes(static_cast<double>(device_bytes)),
          ": use a smaller --micro-batch, --seq or --model, --recompute, or --dtype bf16");
    for (Arena* arena : memory.all()) arena->reserve();
    take_memory();
    optimizer->init(device().stream);
    const int64_t n_step = options.batch * options.seq;
    take_pinned(host_tokens, n_step);
    take_pinned(host_targets, n_step);
    take_pinned(host_losses, n_step);
    take_pinned(host_norm, 2);
}
