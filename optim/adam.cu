// Adam: adaptive moment estimation.                                              (Kingma & Ba 2015, arXiv:1412.6980)
//
//   w = w - lr * m^ / (sqrt(v^) + eps)        m^ and v^: optim/adam.h
//
// Momentum gives the direction, RMSProp the length; the corrections m^ and v^ make the first steps full ones. Weight
// decay is the gradient of an L2 term: g + weight_decay * w (adamw.cu says what is wrong with that).
#include "core/kernel.cuh"
#include "optim/adam.h"
#include "optim/elementwise.cuh"

std::unique_ptr<Optimizer> make_adam(Arena& arena, const std::vector<Param>& params, int64_t n,
                                     const OptimizerOptions& options) {
    return std::make_unique<Elementwise<AdamUpdate<false>>>(arena, params, n, options);
}
