// AdamW: Adam with decoupled weight decay. Nearly all language models are trained with it.
//                            (Kingma & Ba 2015, arXiv:1412.6980; Loshchilov & Hutter 2019, arXiv:1711.05101)
//
// For each weight w with gradient g, in update t = 1, 2, ...:
//
//   m  = beta1 m + (1 - beta1) g            first moment: decaying mean of the gradients, the direction
//   v  = beta2 v + (1 - beta2) g^2          second moment: decaying mean of their squares, the usual size
//   m^ = m / (1 - beta1^t)                  m and v start at 0 and are too small at first: after t updates the factors
//   v^ = v / (1 - beta2^t)                  of all g in the mean sum to 1 - beta^t, not yet to 1
//   w  = w - lr * (m^ / (sqrt(v^) + eps) + weight_decay * w)
//
// m^ / sqrt(v^) has no unit: every weight moves by about lr in an update, whether its gradients are large or small.
//
// Decay is added after the division ("decoupled"). As an L2 term in the loss (adam.cu) it would be part of g and be
// divided by sqrt(v^) too, so that weights with large gradients were decayed least; here each loses the same share
// lr * weight_decay. Biases and norm weights are not decayed.
//
// AdamUpdate (optim/adam.h) is these five lines for one element, also for the host, 8-bit Adam and Muon. WeightFormat
// (optim/weights.cuh) writes the new weight in f32, with a 16-bit copy, or stochastically rounded to bf16.
#include "core/kernel.cuh"
#include "optim/adam.h"
#include "optim/elementwise.cuh"

namespace {

// A tile of at most kTileN elements of one parameter is updated by threads that have a pack of four neighbours each (on
// the CPU device one); with stochastic rounding eight packs, which share draws of random bits (on the CPU device eight
// chunks). Memory is the limit: an element reads g, m, v, w and writes m, v, w, 28 bytes.
template <class F, class G>
__global__ void __launch_bounds__(kTileThreads<F>* kBlockTiles<F>)
    adamw_kernel(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy, float* __restrict__ ms,
                 float* __restrict__ vs, const G* __restrict__ grads, const float* __restrict__ norm_scale,
                 const Tile* __restrict__ tiles, int n_tiles, TileOrigin origin, F format, AdamUpdate<true> adamw) {
    update_tile(values, copy, ms, vs, grads, norm_scale, tiles, n_tiles, origin, format, adamw);
}

struct LaunchAdamW {
    static constexpr const char* kKernel = "adamw_kernel";
    template <class F, class G>
    static void launch(int n_tiles, cudaStream_t stream, typename F::Value* values, typename F::Copy* copy, float* ms,
                       float* vs, const G* grads, const float* norm_scale, const Tile* tiles, const TileOrigin& origin,
                       const F& format, const AdamUpdate<true>& update) {
        adamw_kernel<F, G><<<tile_blocks<F>(n_tiles), tile_block<F>(), 0, stream>>>(
            values, copy, ms, vs, grads, norm_scale, tiles, n_tiles, origin, format, update);
    }
};
using AdamW = Elementwise<AdamUpdate<true>, LaunchAdamW>;

}  // namespace

std::unique_ptr<Optimizer> make_adamw(Arena& arena, const std::vector<UpdatedUnit>& units,
                                      const OptimizerOptions& options) {
    return std::make_unique<AdamW>(arena, units, options);
}
std::unique_ptr<Optimizer> make_packed_adamw(Arena& arena, const std::vector<UpdatedUnit>& units,
                                             const OptimizerOptions& options) {
    return std::make_unique<AdamW>(arena, units, options, true);
}
