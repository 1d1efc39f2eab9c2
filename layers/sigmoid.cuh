// layers/sigmoid.cuh: 1 / (1 + exp(-x)) without overflow and without cancellation, and what is made of it.
#pragma once

#include "core/kernel.cuh"

namespace {

// value = sigmoid(x), complement = 1 - sigmoid(x) = sigmoid(-x). With e = exp(-|x|), which is in [0, 1]:
//
//   x >= 0:   value = 1 / (1 + e),  complement = e / (1 + e)          x < 0: the two change places
//
// Both keep all their digits in both tails; "1 - value" would have none left once value rounds to 1 (x > 17).
// Division: 1 + e is in [1, 2], where the GPU's approximate one is good to 2 units in the last place.
struct Sigmoid {
    float value, complement;
    __device__ __forceinline__ explicit Sigmoid(float x) {
        const float e = __expf(-fabsf(x)), large = __fdividef(1.0f, 1.0f + e), small = e * large;
        value = x >= 0.0f ? large : small;
        complement = x >= 0.0f ? small : large;
    }
};

// swiglu.cu
__device__ __forceinline__ float silu(float g) { return g * Sigmoid(g).value; }

}  // namespace
