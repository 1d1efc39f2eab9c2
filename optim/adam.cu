// Adam: adaptive moment estimation.                                              (Kingma & Ba 2015, arXiv:1412.6980)
//
// For each weight w with gradient g, in update t = 1, 2, ...:
//
//   g  = g + weight_decay * w               weight decay as the gradient of an L2 term in the loss
//   m  = beta1 m + (1 - beta1) g            first moment: decaying mean of the gradients, as in momentum
//   v  = beta2 v + (1 - beta2) g^2          second moment: decaying mean of their squares, as in RMSProp
//   m^ = m / (1 - beta1^t)                  corrections, without which the first updates would be too small (m) or too
//   v^ = v / (1 - beta2^t)                  large (v), because both start at 0
//   w  = w - lr * m^ / (sqrt(v^) + eps)
//
// adamw.cu says what is wrong with this weight decay, and explains the kernel, which differs from this one in the
// update only. AdamUpdate (optim/adam.h) is these lines for one element.
#include "core/kernel.cuh"
#include "optim/adam.h"
#include "optim/elementwise.cuh"

namespace {

template <class F, class G>
__global__ void __launch_bounds__(kTileThreads<F>)
    adam_kernel(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy, float* __restrict__ ms,
                float* __restrict__ vs, const G* __restrict__ grads, const float* __restrict__ norm_scale,
                const Tile* __restrict__ tiles, F format, AdamUpdate<false> adam) {
    const Tile tile = tiles[blockIdx.x];
    const float scale = norm_scale[1];
    if (scale != scale) return;  // NaN: some gradient is inf or NaN, and the update is skipped
    const TileDraws<F> draws(format, tile);
    for (int part = 0; part < kTileParts<F>; ++part) {
        const unsigned k = static_cast<unsigned>(part * kDrawStride) + threadIdx.x;
        if (is_behind(tile, k)) return;
        const int64_t i = tile.first + k, j = tile.state_first + k;
        const float g = scale * to_float(grads[i]);
        float m = ms[j], v = vs[j];
        const float w = adam(to_float(values[i]), g, tile.decay, m, v);
        ms[j] = m;
        vs[j] = v;
        format.store(values, copy, i, w, draws.bits(part, k));
    }
}

struct LaunchAdam {
    template <class F, class G, class... Arguments>
    static void launch(int n_tiles, cudaStream_t stream, Arguments... arguments) {
        adam_kernel<F, G><<<n_tiles, kTileThreads<F>, 0, stream>>>(arguments...);
    }
};

}  // namespace

std::unique_ptr<Optimizer> make_adam(Arena& arena, const std::vector<Param>& params, int64_t n,
                                     const OptimizerOptions& options) {
    return std::make_unique<Elementwise<AdamUpdate<false>, LaunchAdam>>(arena, params, n, options);
}
