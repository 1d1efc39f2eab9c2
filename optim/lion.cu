// Lion: evolved sign momentum.                                                   (Chen et al. 2023, arXiv:2302.06675)
//
//   c = beta1 m + (1 - beta1) g             the direction: the mean, with more of the newest gradient
//   w = w - lr * (sign(c) + weight_decay * w)
//   m = beta2 m + (1 - beta2) g             the mean that is kept, over more steps than c
//
// It was found by a search over programs. Adam divides by the usual size of g; Lion uses only the sign: every weight
// moves by exactly lr, so that half of Adam's states are not needed. These steps are longer than Adam's, whose |m^| /
// sqrt(v^) is below 1 on average: lr should be 3 to 10 times smaller and weight_decay as many times larger.
#include "core/kernel.cuh"
#include "optim/elementwise.cuh"

namespace {

struct LionUpdate {
    static constexpr const char* kName = "Lion";
    static constexpr std::array<const char*, 1> kStates = {"m"};
    float lr, weight_decay, beta1, beta2, one_minus_beta1, one_minus_beta2;

    LionUpdate(const OptimizerOptions& o, double lr_, int64_t)
        : lr(static_cast<float>(lr_)), weight_decay(o.weight_decay), beta1(o.beta1), beta2(o.beta2),
          one_minus_beta1(static_cast<float>(1 - static_cast<double>(o.beta1))),
          one_minus_beta2(static_cast<float>(1 - static_cast<double>(o.beta2))) {}

    __device__ __forceinline__ float operator()(float w, float g, float decay, float& m) const {
        const float c = beta1 * m + one_minus_beta1 * g;
        m = beta2 * m + one_minus_beta2 * g;
        const float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : 0.0f;  // sign(0) = 0: a weight without gradients stays
        return w - lr * (sign + weight_decay * decay * w);
    }
};

}  // namespace

std::unique_ptr<Optimizer> make_lion(Arena& arena, const std::vector<UpdatedUnit>& units,
                                     const OptimizerOptions& options) {
    return std::make_unique<Elementwise<LionUpdate>>(arena, units, options);
}
