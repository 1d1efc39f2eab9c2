// AdamW: Adam with decoupled weight decay.                       (Loshchilov & Hutter 2019, arXiv:1711.05101)
//
//   w = w - lr * (m^ / (sqrt(v^) + eps) + weight_decay * w)        m^ and v^: optim/adam.h
//
// Decay stands outside of Adam's fraction ("decoupled"). As an L2 term in the loss it would be part of g and be divided
// by sqrt(v^) as well, so that weights with large gradients were decayed least; here each loses the same share lr *
// weight_decay a step. Biases and norm weights are not decayed. What nearly all language models are trained with.
#include "core/kernel.cuh"
#include "optim/adam.h"
#include "optim/elementwise.cuh"

std::unique_ptr<Optimizer> make_adamw(Arena& arena, const std::vector<Param>& params, int64_t n,
                                      const OptimizerOptions& options) {
    return std::make_unique<Elementwise<AdamUpdate<true>>>(arena, params, n, options);
}
