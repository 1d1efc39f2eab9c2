// layers/rope.cuh: the rotation of a point, for rope.cu and for paged_write.cu, which rotates keys on their way to a
// cache: both must round alike.
#pragma once

#include "core/kernel.cuh"

namespace {

// (x1, x2) -> (x1 cosine - x2 sine, x2 cosine + x1 sine)
__device__ __forceinline__ void rotate_point(float& x1, float& x2, float cosine, float sine) {
    const float y1 = x1 * cosine - x2 * sine;
    x2 = x2 * cosine + x1 * sine;
    x1 = y1;
}

}  // namespace
