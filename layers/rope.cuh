// layers/rope.cuh: the rotation of a point, for rope.cu and for paged_write.cu, which rotates keys on their way to a
// cache: both must round alike.
#pragma once

#include "core/kernel.cuh"

namespace {

// (x1, x2) -> (x1 cosine - x2 sine, x2 cosine + x1 sine). The products are rounded by themselves: in which of them a
// compiler would join the addition is not the same in two kernels.
__device__ __forceinline__ void rotate_point(float& x1, float& x2, float cosine, float sine) {
    const float y1 = __fmul_rn(x1, cosine) - __fmul_rn(x2, sine);
    x2 = __fmul_rn(x2, cosine) + __fmul_rn(x1, sine);
    x1 = y1;
}

}  // namespace
