// trainer.h: what a training run holds: the model, its memory, the optimizer, and how they are saved.
#pragma once

#include "io/io.h"
#include "llm.h"
#include "optim/optim.h"
#include "train_options.h"

// Everything on the device comes from here. It is counted first, printed, and then taken.
struct Memory {
    Arena weights{"weights"}, masters{"master weights"}, grads{"gradients"}, optimizer{"optimizer states"},
        activations{"activations"}, sampling{"sampling"};
    std::vector<Arena*> all() { return {&weights, &masters, &grads, &optimizer, &activations, &sampling}; }
    size_t bytes();  // of all, and cuBLASLt's workspace
};

struct Trainer {
    TrainOptions options;
    Config config;
    int64_t micro_batch = 0;
    Memory memory;
    Model model;
    Activations acts, sample_acts;
    std::unique_ptr<Optimizer> optimizer;
    LossScaler scaler;
    int64_t updates = 0;                // steps of the optimizer; steps of the run that overflowed are not among them
    Tensor norm_result, norm_scratch;   // grad_norm's
    int32_t *host_tokens = nullptr, *host_targets = nullptr;  // pinned, one step's batch
    float *host_losses = nullptr, *host_norm = nullptr;

    explicit Trainer(TrainOptions options, Config config);
    // Goes through all that the run takes: while the arenas count, and again once they are reserved.
    void take_memory();
    void reserve();  // Error where it is more than the device has
};

// plan.cu
void print_memory(Memory& memory);
// The rate of a large matrix product of this type on this device, in FLOP/s: what a step's FLOP/s are held against.
double measure_matmul_rate(DType dtype);
void print_plan(Trainer& trainer);  // --plan: memory, FLOPs and time of this run; nothing is allocated

// trainer_checkpoint.cu: the model as a Hugging Face folder, the optimizer's states by parameter, and state.json.
void save_checkpoint(const Trainer& trainer, int64_t step);
int64_t load_checkpoint(Trainer& trainer);  // the newest; returns its step
