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

// A block updates a tile of at most kTileN elements of one parameter, a thread one of them (with stochastic rounding
// eight, which share a draw of random bits). Memory is the limit: an element reads g, m, v, w and writes m, v, w, 28
// bytes.
template <class F, class G>
__global__ void __launch_bounds__(kTileThreads<F>)
    adamw_kernel(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy, float* __restrict__ ms,
                 float* __restrict__ vs, const G* __restrict__ grads, const float* __restrict__ norm_scale,
                 const Tile* __restrict__ tiles, F format, AdamUpdate<true> adamw) {
    const Tile tile = tiles[blockIdx.x];
    const float scale = norm_scale[1];  // of gradient clipping and loss scaling
    if (scale != scale) return;         // NaN: some gradient is inf or NaN, and the update is skipped
    const TileDraws<F> draws(format, tile);
    for (int part = 0; part < kTileParts<F>; ++part) {
        const unsigned k = static_cast<unsigned>(part * kDrawStride) + threadIdx.x;  // element of the tile
        if (is_behind(tile, k)) return;
        const int64_t i = tile.first + k, j = tile.state_first + k;
        const float g = scale * to_float(grads[i]);
        float m = ms[j], v = vs[j];
        const float w = adamw(to_float(values[i]), g, tile.decay, m, v);
        ms[j] = m;
        vs[j] = v;
        format.store(values, copy, i, w, draws.bits(part, k));
    }
}

struct LaunchAdamW {
    template <class F, class G, class... Arguments>
    static void launch(int n_tiles, cudaStream_t stream, Arguments... arguments) {
        adamw_kernel<F, G><<<n_tiles, kTileThreads<F>, 0, stream>>>(arguments...);
    }
};
using AdamW = Elementwise<AdamUpdate<true>, LaunchAdamW>;

}  // namespace

std::unique_ptr<Optimizer> make_adamw(Arena& arena, const std::vector<Param>& params, int64_t n,
                                      const OptimizerOptions& options) {
    return std::make_unique<AdamW>(arena, params, n, options);
}
std::unique_ptr<Optimizer> make_packed_adamw(Arena& arena, const std::vector<Param>& params, int64_t n,
                                             const OptimizerOptions& options) {
    return std::make_unique<AdamW>(arena, params, n, options, true);
}
