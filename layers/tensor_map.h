// layers/tensor_map.h: tells the copy engine of Hopper (TMA) where a tensor lies; kernels then copy boxes of it by
// their coordinates (tensor_load and tensor_store of layers/ptx.cuh).
#pragma once

#include "core/core.h"

#include <cuda.h>

// data: dims[0] contiguous elements, dims[1] of those strides[0] elements apart, ...; 2 to 4 dimensions. A box has
// box[d] elements, at most 256, along dimension d. swizzle: 0, or 32, 64 or 128 bytes, then a box is as wide as that.
// Data and strides are multiples of 16 bytes.
CUtensorMap make_tensor_map(const void* data, DType dtype, std::initializer_list<int64_t> dims,
                            std::initializer_list<int64_t> strides, std::initializer_list<int64_t> box, int swizzle);
