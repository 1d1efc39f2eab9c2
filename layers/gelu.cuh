// layers/gelu.cuh: GELU and its derivative of one number, for gelu.cu, which has the maths, and for products that apply
// them to their result.
#pragma once

#include "layers/sigmoid.cuh"

namespace {

constexpr float kSqrt8OverPi = 1.5957691216057308f;
constexpr float kCubic = 0.044715f;

// y = x s(v)
__device__ __forceinline__ float gelu(float x) {
    const float v = kSqrt8OverPi * (x + kCubic * x * x * x);
    return x * Sigmoid(v).value;
}
// y' = s + x s (1 - s) v'
__device__ __forceinline__ float gelu_derivative(float x) {
    const float square = min(x * x, 1e30f);  // v' is finite where s (1 - s) is 0
    const Sigmoid s(kSqrt8OverPi * x * (1.0f + kCubic * square));
    const float dv = kSqrt8OverPi * (1.0f + 3.0f * kCubic * square);
    return s.value + x * s.value * s.complement * dv;  // y = x s(v): by x, then by v
}

}  // namespace
