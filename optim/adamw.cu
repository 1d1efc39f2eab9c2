// AdamW: Adam with decoupled weight decay. (Kingma & Ba 2015, arXiv:1412.6980; Loshchilov & Hutter 2019, arXiv:1711.05101)
//
//   g  = scale * grad                       clipped by the global norm (grad_clip.cu)
//   m  = beta1 m + (1 - beta1) g            mean of the recent gradients:          which way
//   v  = beta2 v + (1 - beta2) g^2          mean of their squares, per element:    how large they usually are here
//   m^ = m / (1 - beta1^t)                  m and v start at 0 and are too small at first: after t steps the weights in the
//   v^ = v / (1 - beta2^t)                  running mean sum to 1 - beta^t, not yet to 1
//   w  = w - lr * (m^ / (sqrt(v^) + eps) + weight_decay * w)
//
// m^ / sqrt(v^) has no unit: every weight moves by about lr a step, whether its gradients are large or small. Decay stands
// outside of that fraction ("decoupled"): as an L2 term in the loss it would be part of g, and weights with large gradients
// would be decayed least. Biases and norm weights are not decayed.
//
// Bound by memory: a step reads g, m, v, w and writes m, v, w: 28 bytes an element in f32, for one division and one root.
#include "core/kernel.cuh"
#include "optim/optim.h"

#include <cmath>

// ---------------------------------------------------------------------------------------------------------------------
// Kernel

namespace {

// What is the same for all elements in step t.
struct AdamWStep {
    float lr, eps, weight_decay;
    float beta1, one_minus_beta1, m_correction;  // m^ = m * m_correction
    float beta2, one_minus_beta2, v_correction;
};

// One element a thread and no barrier. On the CPU device the threads of a block are a loop over consecutive i; __restrict__
// tells g++ that no store can change what the next turn loads (true: six different arrays), and the loop becomes SIMD.
template <class V, class G>
__global__ void __launch_bounds__(kTileN)
    adamw_kernel(V* __restrict__ values, float* __restrict__ ms, float* __restrict__ vs, const G* __restrict__ grads,
                 const float* __restrict__ norm_scale, const Tile* __restrict__ tiles, AdamWStep s) {
    const Tile tile = tiles[blockIdx.x];
    const float scale = norm_scale[1];
    // A NaN scale says that some gradient is inf or NaN: this step must leave no trace in w, m and v.
    if (static_cast<int>(threadIdx.x) >= tile.n || scale != scale) return;
    const int64_t i = tile.first + threadIdx.x;

    const float g = scale * to_float(grads[i]);
    const float w = to_float(values[i]);
    const float m = s.beta1 * ms[i] + s.one_minus_beta1 * g;
    const float v = s.beta2 * vs[i] + s.one_minus_beta2 * (g * g);
    const float update = (m * s.m_correction) / (sqrtf(v * s.v_correction) + s.eps);
    ms[i] = m;
    vs[i] = v;
    values[i] = from_float<V>(w - s.lr * (update + s.weight_decay * tile.decay * w));
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

AdamW::AdamW(Arena& arena, const std::vector<Param>& params, int64_t n, const AdamWOptions& options)
    : options_(options), host_tiles_(make_tiles(params)) {
    static_assert(sizeof(Tile) == 4 * sizeof(int32_t), "the table is kept in a tensor of (n_tiles, 4) i32");
    check(options.beta1 >= 0 && options.beta1 < 1, "AdamW: beta1 is ", options.beta1, ": it must be from 0 to below 1");
    check(options.beta2 >= 0 && options.beta2 < 1, "AdamW: beta2 is ", options.beta2, ": it must be from 0 to below 1");
    check(options.eps > 0 && std::isfinite(options.eps), "AdamW: eps is ", options.eps, ": it must be a number above 0");
    check(options.weight_decay >= 0 && std::isfinite(options.weight_decay), "AdamW: weight decay is ", options.weight_decay,
          ": it must be a number >= 0");
    for (const Param& param : params)
        check(param.offset >= 0 && param.offset + param.value.n() <= n, "AdamW: ", param.name, " ", param.value.describe(),
              " at offset ", param.offset, " is not inside the flat buffer of ", n, " elements");
    m_ = arena.take("optimizer m", DType::f32, {n});
    v_ = arena.take("optimizer v", DType::f32, {n});
    tiles_ = arena.take("optimizer tiles", DType::i32, {static_cast<int64_t>(host_tiles_.size()), 4});
}

void AdamW::init(cudaStream_t stream) {
    if (host_tiles_.empty()) return;
    check(m_ && v_ && tiles_, "AdamW: init before the arena is reserved");
    cudaCheck(cudaMemsetAsync(m_.data, 0, m_.bytes(), stream));
    cudaCheck(cudaMemsetAsync(v_.data, 0, v_.bytes(), stream));
    cudaCheck(cudaMemcpyAsync(tiles_.data, host_tiles_.data(), tiles_.bytes(), cudaMemcpyHostToDevice, stream));
}

void AdamW::step(Tensor values, Tensor grads, Tensor norm_scale, double lr, int64_t t, cudaStream_t stream) {
    if (host_tiles_.empty()) return;
    expect("AdamW", "values", values, values.dtype, {m_.n()});
    expect("AdamW", "grads", grads, grads.dtype, {m_.n()});
    expect("AdamW", "norm_scale", norm_scale, DType::f32, {2});
    check(t >= 1, "AdamW: t is ", t, ": updates count from 1");
    check(lr >= 0 && std::isfinite(lr), "AdamW: the learning rate is ", lr, ": it must be a number >= 0");

    // In double, because 1 - beta^t is a difference of near numbers: in float, 1 - 0.999f^1 would keep 14 of its 24 bits.
    // All start from beta as the kernel has it, rounded to float: then m and v are exact running means of that beta.
    const double beta1 = options_.beta1, beta2 = options_.beta2, updates = static_cast<double>(t);
    AdamWStep s;
    s.lr = static_cast<float>(lr);
    s.eps = options_.eps;
    s.weight_decay = options_.weight_decay;
    s.beta1 = options_.beta1;
    s.beta2 = options_.beta2;
    s.one_minus_beta1 = static_cast<float>(1 - beta1);
    s.one_minus_beta2 = static_cast<float>(1 - beta2);
    s.m_correction = static_cast<float>(1 / (1 - std::pow(beta1, updates)));
    s.v_correction = static_cast<float>(1 / (1 - std::pow(beta2, updates)));

    const int n_tiles = narrow(static_cast<int64_t>(host_tiles_.size()), "AdamW: the number of tiles");
    dispatch(values.dtype, [&](auto value_zero) {
        dispatch(grads.dtype, [&](auto grad_zero) {
            using V = decltype(value_zero);
            using G = decltype(grad_zero);
            adamw_kernel<V, G><<<n_tiles, kTileN, 0, stream>>>(values.ptr<V>(), m_.ptr<float>(), v_.ptr<float>(), grads.ptr<G>(),
                                                              norm_scale.ptr<float>(), static_cast<const Tile*>(tiles_.data), s);
            cudaCheckLaunch();
        });
    });
}
