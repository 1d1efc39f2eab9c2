// training/training.h: what a training run holds: the model, its memory, the optimizer, and how they are saved.
#pragma once

#include "io/io.h"
#include "llm.h"
#include "optim/optim.h"
#include "training/options.h"

#include <functional>

// Everything on the device comes from here, and what --offload keeps on the host. It is counted first, printed, and then taken.
struct Memory {
    explicit Memory(Offload offload);
    Arena weights, masters, grads, optimizer, activations, communication, sampling;
    Arena transit;  // pinned: what is on its way between host and device
    std::vector<Arena*> all() {
        return {&weights, &masters, &grads, &optimizer, &activations, &communication, &sampling, &transit};
    }
    size_t bytes();       // on the device, with cuBLASLt's workspace
    size_t host_bytes();  // pinned, and pages that move
};

struct Trainer {
    TrainOptions options;
    Config config;
    Comm& world;
    DataParallel data_parallel;
    int64_t local_batch = 0, micro_batch = 0;  // sequences of a step on this rank; and at a time
    Memory memory;
    Model model;
    Activations acts, sample_acts;
    std::vector<std::unique_ptr<Optimizer>> optimizers;  // one a unit, of what this rank updates there
    std::unique_ptr<OffloadedUpdate> offload;  // with --offload: brings their work to the host, or their states here
    LossScaler scaler;
    int64_t updates = 0;  // steps of the optimizer; steps of the run that overflowed are not among them
    // What the ranks add up in a step, each number as a pair of floats {high, low}: the squares of each unit's gradients, the
    // losses, and how many ranks were asked to stop.
    Tensor totals;                                                 // (units + 2, 2)
    Tensor norm_result, norm_scratch;                              // clip_scale's, sum_squares'
    int32_t *host_tokens = nullptr, *host_targets = nullptr;       // pinned, one step's batch of this rank
    int32_t *host_documents = nullptr, *host_positions = nullptr;  // with --mask-documents
    float* host_totals = nullptr;                                  // pinned: {norm, scale}, {loss}, {stop}

    Trainer(TrainOptions options, Config config, Mesh& mesh);
    Tensor loss_sum() const { return totals.slice(totals.shape[0] - 2, 1).view({2}); }
    Tensor stop_count() const { return totals.slice(totals.shape[0] - 1, 1).view({2}); }
    // Goes through all that the run takes: while the arenas count, and again once they are reserved.
    void take_memory();
    void reserve();  // Error where it is more than the device has
};

// planning/plan.cu
void print_memory(Memory& memory);
// The rate of a large matrix product of this type on this device, in FLOP/s: what a step's FLOP/s are held against.
double measure_matmul_rate(DType dtype);
void print_plan(Trainer& trainer);  // --plan: memory, FLOPs and time of this run; nothing is allocated

// planning/account.cu: at the end of a run on many ranks, measured bytes beside the formulas. step: what this rank sent and received in one
// step that followed another. Collective; rank 0 prints.
void print_account(Trainer& trainer, const Traffic& step, const CommTime& time);
int64_t expected_traffic(const Trainer& trainer);  // bytes that all ranks together send in a step

// training/checkpoint.cu: the model as a Hugging Face folder, the optimizer's states by parameter, and state.json.
// Collective; any number of ranks and any --zero can go on from it.
void save_checkpoint(Trainer& trainer, int64_t step);
int64_t load_checkpoint(Trainer& trainer);  // the newest; returns its step

// ---------------------------------------------------------------------------------------------------------------------
// sample.cu: continues `prompt` by `n` tokens, drawn from softmax(logits / temperature) with Philox (seed, position).
// Recomputes the whole window for every token. acts: B = 1. `token_ready` sees each token; false ends the text.

std::vector<int32_t> sample(const Model& model, Activations& acts, const std::vector<int32_t>& prompt, int64_t n,
                            double temperature, uint64_t seed, const std::function<bool(int32_t)>& token_ready);
