// library_types.h on the CPU: how CUDA's libraries name the type of a matrix element at run time.
// The numbers are NVIDIA's. cpu/cublasLt.h multiplies the float types except double.
#pragma once

enum cudaDataType_t {
    CUDA_R_32F = 0,       // float
    CUDA_R_64F = 1,       // double
    CUDA_R_16F = 2,       // __half
    CUDA_R_8I = 3,        // int8_t
    CUDA_R_32I = 10,      // int32_t
    CUDA_R_16BF = 14,     // __nv_bfloat16
    CUDA_R_8F_E4M3 = 28,  // __nv_fp8_e4m3
    CUDA_R_8F_E5M2 = 29,  // __nv_fp8_e5m2
};
using cudaDataType = cudaDataType_t;
