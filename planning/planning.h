// planning/planning.h: what a training run takes: bytes, floating-point operations, seconds, messages. Before anything
// is taken (./train_gpt --plan), at the start of a run, and at its end beside what was measured.
//
// Files, in reading order:
//     memory.cu    weights, gradients, optimizer states, activations: bytes by kind and by ZeRO stage
//     time.cu      FLOPs and bytes of a step, and the seconds that they take on a device
//     rates.cu     the device's rates, measured
//     tensor_bill.cu   what tensor parallelism sends
//     account.cu   a run on many ranks: measured bytes beside the formulas
#pragma once

#include "training/training.h"

// memory.cu
void print_memory(Memory& memory);  // the arenas, with the tensors that take at least a hundredth of all
void print_plan(Trainer& trainer);  // --plan: memory, FLOPs and time of this run; nothing has been allocated

// time.cu
void expect_device_spec(const std::string& name);  // Error for a --device-spec that does not exist
void print_time(Trainer& trainer);                 // the plan's part on FLOPs, bytes moved and seconds of a step

// rates.cu: measured on this device
double measure_matmul_rate(DType dtype);  // of a large product, in FLOP/s: what a step's FLOP/s are held against
double measure_copy_rate();               // of a large copy, in bytes read and written a second
// Random numbers in [-1, 1), made on the device: a function of (key, place).
void fill_uniform(const Tensor& tensor, uint64_t key, cudaStream_t stream);

// tensor_bill.cu: bytes that all ranks of a group that divides the layers send together: for each micro-batch of N
// tokens; and once a step, for gradients that ranks have parts of.
struct TensorTraffic {
    int64_t micro_batch, shared_gradients;
};
TensorTraffic tensor_traffic(const Model& model, int64_t N, const Recompute& recompute);
// --plan: what a rank has and sends in each geometry that so many ranks can have, with the time on NVLink and
// InfiniBand.
void print_tensor_bills(const Trainer& trainer);

// account.cu: at the end of a run on many ranks. step: what this rank sent and received in one step that followed
// another. Collective; rank 0 prints.
void print_account(Trainer& trainer, const Traffic& step, const CommTime& time);
int64_t expected_traffic(const Trainer& trainer);  // bytes that all ranks together send in a step
