// Gradient descent: plain, with momentum, and with Nesterov momentum.
//              (Robbins & Monro 1951; Polyak 1964; Nesterov 1983; for networks: Sutskever et al. 2013, PMLR 28(3))
//
//   g = g + weight_decay * w
//   sgd        w = w - lr g
//   momentum   m = momentum m + g        w = w - lr m                      m is a decaying sum of gradients
//   nesterov   m = momentum m + g        w = w - lr (g + momentum m)       the step as if m were one gradient further
//
// Where the loss is a narrow valley, plain descent jumps from one side to the other. In m these gradients cancel, and
// those along the valley add up to 1 / (1 - momentum) times one of them. So with a momentum of 0.9 the same lr makes
// steps ten times as long as in sgd. As in PyTorch m has no lr: where lr changes, the whole step does at once. (Polyak
// and Sutskever et al. add lr g to m, and subtract m.)
#include "core/kernel.cuh"
#include "optim/elementwise.cuh"

namespace {

struct SgdUpdate {
    static constexpr const char* kName = "SGD";
    static constexpr std::array<const char*, 0> kStates = {};
    float lr, weight_decay;

    SgdUpdate(const OptimizerOptions& o, double lr_, int64_t)
        : lr(static_cast<float>(lr_)), weight_decay(o.weight_decay) {}

    __device__ __forceinline__ float operator()(float w, float g, float decay) const {
        return w - lr * (g + weight_decay * decay * w);
    }
};

struct MomentumUpdate {
    static constexpr const char* kName = "Momentum";
    static constexpr std::array<const char*, 1> kStates = {"m"};
    float lr, weight_decay, momentum;
    bool nesterov;

    MomentumUpdate(const OptimizerOptions& o, double lr_, int64_t)
        : lr(static_cast<float>(lr_)), weight_decay(o.weight_decay), momentum(o.momentum), nesterov(o.nesterov) {}

    __device__ __forceinline__ float operator()(float w, float g, float decay, float& m) const {
        g += weight_decay * decay * w;
        m = momentum * m + g;
        return w - lr * (nesterov ? g + momentum * m : m);
    }
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(Arena& arena, const std::vector<UpdatedUnit>& units,
                                    const OptimizerOptions& options) {
    return std::make_unique<Elementwise<SgdUpdate>>(arena, units, options);
}
std::unique_ptr<Optimizer> make_momentum(Arena& arena, const std::vector<UpdatedUnit>& units,
                                         const OptimizerOptions& options) {
    return std::make_unique<Elementwise<MomentumUpdate>>(arena, units, options);
}
std::unique_ptr<Optimizer> make_nesterov(Arena& arena, const std::vector<UpdatedUnit>& units,
                                         const OptimizerOptions& options) {
    OptimizerOptions one_further = options;
    one_further.nesterov = true;
    return std::make_unique<Elementwise<MomentumUpdate>>(arena, units, one_further);
}
