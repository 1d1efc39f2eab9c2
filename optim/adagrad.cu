// AdaGrad: each weight has its own step length.                                  (Duchi, Hazan, Singer 2011, JMLR 12)
//
//   g = g + weight_decay * w
//   v = v + g^2                             the sum of all squares so far
//   w = w - lr * g / (sqrt(v) + eps)
//
// The embedding of a rare word seldom gets a gradient; its v is small, so its steps are long. v never shrinks, so steps
// decrease as 1 / sqrt(t): this is right for convex problems, but in long runs weights stop moving. In RMSProp
// (rmsprop.cu) v is a decaying mean instead.
#include "core/kernel.cuh"
#include "optim/elementwise.cuh"

namespace {

struct AdagradUpdate {
    static constexpr const char* kName = "AdaGrad";
    static constexpr std::array<const char*, 1> kStates = {"v"};
    float lr, eps, weight_decay;

    AdagradUpdate(const OptimizerOptions& o, double lr_, int64_t)
        : lr(static_cast<float>(lr_)), eps(o.eps), weight_decay(o.weight_decay) {}

    __device__ __forceinline__ float operator()(float w, float g, float decay, float& v) const {
        g += weight_decay * decay * w;
        v += g * g;
        return w - lr * g / (sqrtf(v) + eps);
    }
};

}  // namespace

std::unique_ptr<Optimizer> make_adagrad(Arena& arena, const std::vector<UpdatedUnit>& units,
                                        const OptimizerOptions& options) {
    return std::make_unique<Elementwise<AdagradUpdate>>(arena, units, options);
}
