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
__global__ void __launch_bounds__(kTileThreads<F>* kBlockTiles<F>)
    adam_kernel(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy, float* __restrict__ ms,
                float* __restrict__ vs, const G* __restrict__ grads, const float* __restrict__ norm_scale,
                const Tile* __restrict__ tiles, int n_tiles, TileOrigin origin, F format, AdamUpdate<false> adam) {
    update_tile(values, copy, ms, vs, grads, norm_scale, tiles, n_tiles, origin, format, adam);
}

struct LaunchAdam {
    static constexpr const char* kKernel = "adam_kernel";
    template <class F, class G>
    static void launch(int n_tiles, cudaStream_t stream, typename F::Value* values, typename F::Copy* copy, float* ms,
                       float* vs, const G* grads, const float* norm_scale, const Tile* tiles, const TileOrigin& origin,
                       const F& format, const AdamUpdate<false>& update) {
        adam_kernel<F, G><<<tile_blocks<F>(n_tiles), tile_block<F>(), 0, stream>>>(
            values, copy, ms, vs, grads, norm_scale, tiles, n_tiles, origin, format, update);
    }
};

}  // namespace

std::unique_ptr<Optimizer> make_adam(Arena& arena, const std::vector<UpdatedUnit>& units,
                                     const OptimizerOptions& options) {
    return std::make_unique<Elementwise<AdamUpdate<false>, LaunchAdam>>(arena, units, options);
}
