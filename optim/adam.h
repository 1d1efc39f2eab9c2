// optim/adam.h: the update of Adam and AdamW for one element, which adam.cu and adamw.cu explain. Their kernels call
// it, and so do 8-bit Adam (adam8bit.cu) and the host (adam_host.cu).
#pragma once

#include "optim/optim.h"

#include <array>
#include <cmath>

namespace {

template <bool decoupled>
struct AdamUpdate {
    static constexpr const char* kName = decoupled ? "AdamW" : "Adam";
    static constexpr std::array<const char*, 2> kStates = {"m", "v"};
    float lr, eps, weight_decay;
    float beta1, one_minus_beta1, m_correction;  // m^ = m * m_correction
    float beta2, one_minus_beta2, v_correction;

    // In double, because 1 - beta^t is a small difference of near numbers: in float, 1 - 0.999^2 would keep 15 of its
    // 24 bits. All start from beta as the kernel has it, rounded to float: so the weights in m and v sum to 1 - beta^t.
    AdamUpdate(const OptimizerOptions& o, double lr_, int64_t t)
        : lr(static_cast<float>(lr_)), eps(o.eps), weight_decay(o.weight_decay), beta1(o.beta1), beta2(o.beta2) {
        const double b1 = o.beta1, b2 = o.beta2, updates = static_cast<double>(t);
        one_minus_beta1 = static_cast<float>(1 - b1);
        one_minus_beta2 = static_cast<float>(1 - b2);
        m_correction = static_cast<float>(1 / (1 - std::pow(b1, updates)));
        v_correction = static_cast<float>(1 / (1 - std::pow(b2, updates)));
    }

    __host__ __device__ __forceinline__ float operator()(float w, float g, float decay, float& m, float& v) const {
        if (!decoupled) g += weight_decay * decay * w;
        m = beta1 * m + one_minus_beta1 * g;
        v = beta2 * v + one_minus_beta2 * (g * g);
        float update = (m * m_correction) / (sqrtf(v * v_correction) + eps);
        if (decoupled) update += weight_decay * decay * w;
        return w - lr * update;
    }
};

}  // namespace
