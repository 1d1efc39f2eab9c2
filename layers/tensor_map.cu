// layers/tensor_map.cu: tensor maps for the copy engine, by the driver's own function. The function is looked up by
// name, so that programs need not be linked with the driver, and also run where there is none.
#include "layers/tensor_map.h"

#include <algorithm>

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    cudaCheck(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result));
#else
    cudaCheck(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result));
#endif
    check(function && result == cudaDriverEntryPointSuccess,
          "the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12: update it");
    return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap make_tensor_map(const void* data, DType dtype, std::initializer_list<int64_t> dims,
                            std::initializer_list<int64_t> strides, std::initializer_list<int64_t> box, int swizzle) {
    static const Encode encode = find_encode();
    const size_t rank = dims.size();
    check(rank >= 2 && rank <= 4 && strides.size() == rank - 1 && box.size() == rank, "make_tensor_map: ", rank,
          " dimensions, ", strides.size(), " strides, a box of ", box.size());
    check(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16,
          "make_tensor_map: f32, bf16 and f16 are possible");
    check(swizzle == 0 || swizzle == 32 || swizzle == 64 || swizzle == 128, "make_tensor_map: a swizzle of ", swizzle,
          " bytes");
    const CUtensorMapDataType type = dtype == DType::f32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const CUtensorMapSwizzle mode = swizzle == 0    ? CU_TENSOR_MAP_SWIZZLE_NONE
                                    : swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                    : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                    : CU_TENSOR_MAP_SWIZZLE_128B;
    // The driver takes strides in bytes, without that of dimension 0, whose elements are contiguous.
    cuuint64_t sizes[4], stride_bytes[3];
    cuuint32_t box_sizes[4], ones[4] = {1, 1, 1, 1};
    std::copy(dims.begin(), dims.end(), sizes);
    std::copy(box.begin(), box.end(), box_sizes);
    std::transform(strides.begin(), strides.end(), stride_bytes,
                   [&](int64_t n) { return static_cast<cuuint64_t>(n) * dtype_bytes(dtype); });
    CUtensorMap map;
    const CUresult status = encode(&map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), sizes,
                                   stride_bytes, box_sizes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, mode,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(status == CUDA_SUCCESS, "make_tensor_map: the driver returned error ", static_cast<int>(status),
          " to a tensor at ", data, " with ", rank, " dimensions, the first of ", sizes[0], " elements, and boxes ",
          box_sizes[0], " elements wide");
    return map;
}
