// RMSProp: AdaGrad with a decaying mean as v.        (Tieleman & Hinton 2012, Coursera: Neural Networks, lecture 6e)
//
//   g = g + weight_decay * w
//   v = beta2 v + (1 - beta2) g^2           mean of the recent squares
//   w = w - lr * g / (sqrt(v) + eps)
//
// Every weight moves by about lr per step, however long the run already is. But v starts at 0 and is not corrected, so
// the first step is lr / sqrt(1 - beta2), ten times too long with 0.99: use warmup, or Adam, which corrects it.
#include "core/kernel.cuh"
#include "optim/elementwise.cuh"

namespace {

struct RmspropUpdate {
    static constexpr const char* kName = "RMSProp";
    static constexpr std::array<const char*, 1> kStates = {"v"};
    float lr, eps, weight_decay, beta2, one_minus_beta2;

    RmspropUpdate(const OptimizerOptions& o, double lr_, int64_t)
        : lr(static_cast<float>(lr_)), eps(o.eps), weight_decay(o.weight_decay), beta2(o.beta2),
          one_minus_beta2(static_cast<float>(1 - static_cast<double>(o.beta2))) {}

    __device__ __forceinline__ float operator()(float w, float g, float decay, float& v) const {
        g += weight_decay * decay * w;
        v = beta2 * v + one_minus_beta2 * (g * g);
        return w - lr * g / (sqrtf(v) + eps);
    }
};

}  // namespace

std::unique_ptr<Optimizer> make_rmsprop(Arena& arena, const std::vector<UpdatedUnit>& units,
                                        const OptimizerOptions& options) {
    return std::make_unique<Elementwise<RmspropUpdate>>(arena, units, options);
}
