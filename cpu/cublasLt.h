// cublasLt.h on the CPU: matrix multiplication as NVIDIA's library offers it (cublas_lt.cpp).
//
// One function of cuBLASLt does all the work,
//
//     D = epilogue(alpha * op(A) * op(B) + beta * C)          A: m x k, B: k x n, C and D: m x n, after op
//
// and everything else here describes its arguments:
//
//     cublasLtHandle_t              the library; one for each device and thread
//     cublasLtMatmulDesc_t          the operation: transpose A or B? which epilogue? the bias' address, fp8 scales
//     cublasLtMatrixLayout_t        one matrix: type, rows, columns, leading dimension, order, batch. Not its address
//     cublasLtMatmulPreference_t    what the search for an algorithm may use: how much workspace, which alignment
//     cublasLtMatmulAlgo_t          the algorithm found. On a GPU there are hundreds; here there is one
//
// A matrix is column-major unless CUBLASLT_MATRIX_LAYOUT_ORDER says otherwise. C++ arrays are row-major, so the usual
// trick is to read a row-major X[rows][columns] as the column-major matrix X^T, columns x rows, with ld = columns. A
// linear layer Y[N][OC] = X[N][C] W[OC][C]^T + b[OC] becomes Y^T = W X^T + b:  m = OC, n = N, k = C,  A = W with
// CUBLAS_OP_T (its memory is a C x OC column-major matrix), B = X without.
//
// Epilogues save a pass over D, and the rounding in between: they use the float32 sums before these are rounded to D's
// type. The bias has one element for each ROW of D (for each output channel, in the trick above). GELU is the tanh
// approximation, here by the float32 operations of layers/gelu.cu. With AUX it is taken of the number as AUX has it,
// rounded to AUX's type: so a program that computes D again from AUX gets D's bits. (NVIDIA does not say which of the
// two it takes.)
//
// Names, numbers and rules are NVIDIA's, and what NVIDIA refuses is refused here, so that a program that runs on the
// CPU does not fail on the GPU: CUBLAS_STATUS_INVALID_VALUE for arguments that contradict each other,
// CUBLAS_STATUS_NOT_SUPPORTED for combinations that no GPU kernel exists for. Setting an attribute checks only its
// size, as NVIDIA's library does; its value is checked when a multiplication uses it.
//
//     A, B          C and D                 bias and AUX           remarks
//     32F           32F                     32F
//     16BF          16BF or 32F             as D
//     16F           16F or 32F              as D
//     8F_E4M3/E5M2  16BF, 16F or 32F; or    as C, but where C is   not both E5M2; D E5M2 only where A or B is; A
//                   C 16-bit, D 8F_*        32F the bias is 16BF   transposed, B not (what Hopper has); m and k
//                                           or 16F                 multiples of 16, 16-byte alignment
//
// An fp8 matrix has one scale, or one for each block of it (CUBLASLT_MATMUL_DESC_A_SCALE_MODE, see there): then
//
//     op(A) op(B) [i, j] = sum over blocks b of 128 k's:  a_scale[i, b] b_scale[j, b] sum over k in b: A[i, k] B[k, j]
//
// and D is 16BF, 16F or 32F, without scales of its own. The last block may be short.
//
// The compute type is CUBLAS_COMPUTE_32F, or one of its FAST_ or PEDANTIC variants, which all compute in plain float32
// here; the scale type is CUDA_R_32F. No workspace is needed. The same call gives the same bits every time.
// Not here: integer, double and complex types, the bit-mask RELU_AUX epilogues, Blackwell's scales for blocks of 16 and
// 32 (fp8 and fp4), one scale per row, cublasLtMatrixTransform. A multiplication with a dimension of zero is refused.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_runtime.h"
#include "library_types.h"

#define CUBLAS_VERSION 130000  // what cublasLtGetVersion() returns

// ---------------------------------------------------------------------------------------------------------------------
// What cuBLASLt shares with cuBLAS

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_MAPPING_ERROR = 11,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_INTERNAL_ERROR = 14,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
    CUBLAS_STATUS_LICENSE_ERROR = 16,
};

enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 };

enum cublasComputeType_t {
    CUBLAS_COMPUTE_16F = 64,
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_COMPUTE_32F_PEDANTIC = 69,
    CUBLAS_COMPUTE_64F = 70,
    CUBLAS_COMPUTE_32I = 72,
    CUBLAS_COMPUTE_32F_FAST_16F = 74,
    CUBLAS_COMPUTE_32F_FAST_16BF = 75,
    CUBLAS_COMPUTE_32F_FAST_TF32 = 77,
};

const char* cublasLtGetStatusName(cublasStatus_t status);    // "CUBLAS_STATUS_INVALID_VALUE"
const char* cublasLtGetStatusString(cublasStatus_t status);  // "an argument is missing, out of range, ..."
size_t cublasLtGetVersion();

// ---------------------------------------------------------------------------------------------------------------------
// The library handle

struct cublasLtContext;
using cublasLtHandle_t = cublasLtContext*;

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle);
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle);

// ---------------------------------------------------------------------------------------------------------------------
// Matrix layout. Unlike NVIDIA's, our descriptors are not opaque: print them in the debugger.

enum cublasLtOrder_t {
    CUBLASLT_ORDER_COL = 0,  // element (i, j) at i + j * ld
    CUBLASLT_ORDER_ROW = 1,  // element (i, j) at i * ld + j
};

enum cublasLtMatrixLayoutAttribute_t {
    CUBLASLT_MATRIX_LAYOUT_TYPE = 0,                  // int32 cudaDataType
    CUBLASLT_MATRIX_LAYOUT_ORDER = 1,                 // int32 cublasLtOrder_t
    CUBLASLT_MATRIX_LAYOUT_ROWS = 2,                  // uint64
    CUBLASLT_MATRIX_LAYOUT_COLS = 3,                  // uint64
    CUBLASLT_MATRIX_LAYOUT_LD = 4,                    // int64
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,           // int32: how many matrices; the same for A, B, C and D
    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6,  // int64: elements from one to the next; 0 uses one for all
};

struct cublasLtMatrixLayoutOpaque_t {
    int32_t type = CUDA_R_32F, order = CUBLASLT_ORDER_COL;
    uint64_t rows = 0, columns = 0;
    int64_t ld = 0;
    int32_t batch_count = 1;
    int64_t batch_stride = 0;
};
using cublasLtMatrixLayout_t = cublasLtMatrixLayoutOpaque_t*;

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld);
cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType type, uint64_t rows,
                                        uint64_t columns, int64_t ld);
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout);
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes);

// ---------------------------------------------------------------------------------------------------------------------
// The operation

// x is alpha op(A) op(B) + beta C, in float32.
enum cublasLtEpilogue_t {
    CUBLASLT_EPILOGUE_DEFAULT = 1,  // D = x
    CUBLASLT_EPILOGUE_RELU = 2,     // D = max(x, 0)
    CUBLASLT_EPILOGUE_BIAS = 4,     // D = x + bias
    CUBLASLT_EPILOGUE_RELU_BIAS = CUBLASLT_EPILOGUE_RELU | CUBLASLT_EPILOGUE_BIAS,
    CUBLASLT_EPILOGUE_GELU = 32,  // D = gelu(x)
    CUBLASLT_EPILOGUE_GELU_BIAS = CUBLASLT_EPILOGUE_GELU | CUBLASLT_EPILOGUE_BIAS,
    CUBLASLT_EPILOGUE_GELU_AUX = CUBLASLT_EPILOGUE_GELU | 128,  // AUX = x,        D = gelu(AUX)
    CUBLASLT_EPILOGUE_GELU_AUX_BIAS = CUBLASLT_EPILOGUE_GELU_AUX | CUBLASLT_EPILOGUE_BIAS,  // AUX = x + bias
    CUBLASLT_EPILOGUE_DGELU = 64 | 128,                                                     // D = x * gelu'(AUX)
    CUBLASLT_EPILOGUE_DGELU_BGRAD = CUBLASLT_EPILOGUE_DGELU | 16,  // and bias = sum of D, as stored, over its columns
    CUBLASLT_EPILOGUE_BGRADA = 256,                                // D = x, bias[i] = sum_k op(A)[i, k]
    CUBLASLT_EPILOGUE_BGRADB = 512,                                // D = x, bias[j] = sum_k op(B)[k, j]
};

enum cublasLtPointerMode_t {
    CUBLASLT_POINTER_MODE_HOST = 0,    // alpha and beta are read during the call
    CUBLASLT_POINTER_MODE_DEVICE = 1,  // ... when the stream reaches the multiplication
};

// How many scales an fp8 matrix has, and where they are stored. k is divided into L = ceil(k / 128) blocks. The scales
// start on a 16-byte boundary. Both A and B have block scales, or neither; not both of them 128 x 128.
enum cublasLtMatmulMatrixScale_t {
    CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F = 0,  // one
    // One for each 1 x 128 block: that of row i of op(A) and block b is scale[b * m + i], for B scale[b * n + j].
    CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F = 4,
    // One for each 128 x 128 block: that of row i of op(A) and block b is scale[i / 128 * L4 + b], where L4 is L
    // rounded up to a multiple of 4; for B the same with j.
    CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F = 5,
};

enum cublasLtMatmulDescAttributes_t {
    CUBLASLT_MATMUL_DESC_COMPUTE_TYPE = 0,                // int32 cublasComputeType_t
    CUBLASLT_MATMUL_DESC_SCALE_TYPE = 1,                  // int32 cudaDataType, of alpha and beta
    CUBLASLT_MATMUL_DESC_POINTER_MODE = 2,                // int32 cublasLtPointerMode_t
    CUBLASLT_MATMUL_DESC_TRANSA = 3,                      // int32 cublasOperation_t
    CUBLASLT_MATMUL_DESC_TRANSB = 4,                      // int32 cublasOperation_t
    CUBLASLT_MATMUL_DESC_TRANSC = 5,                      // int32 cublasOperation_t, only CUBLAS_OP_N
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,                    // uint32 cublasLtEpilogue_t
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,                // pointer to the bias, or to the bias gradient
    CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE = 10,          // int64
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,       // pointer to the m x n matrix AUX, ordered like D
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12,            // int64, a multiple of 8
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE = 13,  // int64, a multiple of 8
    CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17,            // const float*, on the device: A's true values are scale * A
                                                          // (one number, or what A_SCALE_MODE says)
    CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18,            // (fp8 only, as the following)
    CUBLASLT_MATMUL_DESC_C_SCALE_POINTER = 19,
    CUBLASLT_MATMUL_DESC_D_SCALE_POINTER = 20,         // what is stored in D is scale * result
    CUBLASLT_MATMUL_DESC_AMAX_D_POINTER = 21,          // float*: receives max |result|, before D's scale
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE = 22,  // int32 cudaDataType, -1: the type of D
    CUBLASLT_MATMUL_DESC_FAST_ACCUM = 25,              // int8, without effect
    CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26,          // int32 cudaDataType, -1: the type of D
    CUBLASLT_MATMUL_DESC_A_SCALE_MODE = 31,            // int32 cublasLtMatmulMatrixScale_t
    CUBLASLT_MATMUL_DESC_B_SCALE_MODE = 32,
};

struct cublasLtMatmulDescOpaque_t {
    int32_t compute_type = CUBLAS_COMPUTE_32F, scale_type = CUDA_R_32F, pointer_mode = CUBLASLT_POINTER_MODE_HOST;
    int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N, transpose_c = CUBLAS_OP_N;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void* bias = nullptr;
    void* aux = nullptr;
    int64_t bias_batch_stride = 0, aux_ld = 0, aux_batch_stride = 0;
    const float *a_scale = nullptr, *b_scale = nullptr, *c_scale = nullptr, *d_scale = nullptr;
    float* d_amax = nullptr;
    int32_t aux_type = -1, bias_type = -1;
    int32_t a_scale_mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
            b_scale_mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    int8_t fast_accumulation = 0;
};
using cublasLtMatmulDesc_t = cublasLtMatmulDescOpaque_t*;

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute_type,
                                        cudaDataType scale_type);
cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t operation, cublasComputeType_t compute_type,
                                      cudaDataType scale_type);
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation);
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes);
cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              void* value, size_t bytes, size_t* bytes_written);

// ---------------------------------------------------------------------------------------------------------------------
// The search for an algorithm

enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_SEARCH_MODE = 0,            // int32
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,    // uint64
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,  // uint32
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,  // uint32, as B, C and D
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};

struct cublasLtMatmulPreferenceOpaque_t {
    int32_t search_mode = 0;
    uint64_t max_workspace_bytes = 0;
    uint32_t reduction_scheme_mask = 0x7;
    uint32_t a_alignment = 256, b_alignment = 256, c_alignment = 256, d_alignment = 256;
};
using cublasLtMatmulPreference_t = cublasLtMatmulPreferenceOpaque_t*;

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference);
cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference);
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference);
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes);

struct cublasLtMatmulAlgo_t {
    uint64_t data[8];
};

struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
    int reserved[4];
};

// Writes the one algorithm into results[0], and 1 into *returned_count, when the multiplication is possible; otherwise
// returns why it is not, and writes nothing.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a_layout, cublasLtMatrixLayout_t b_layout,
                                              cublasLtMatrixLayout_t c_layout, cublasLtMatrixLayout_t d_layout,
                                              cublasLtMatmulPreference_t preference, int requested_count,
                                              cublasLtMatmulHeuristicResult_t results[], int* returned_count);
// Whether this algorithm, perhaps of another process, computes this multiplication: here, whether there is any, and
// this is the one.
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                       cublasLtMatrixLayout_t a_layout, cublasLtMatrixLayout_t b_layout,
                                       cublasLtMatrixLayout_t c_layout, cublasLtMatrixLayout_t d_layout,
                                       const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result);

// ---------------------------------------------------------------------------------------------------------------------
// The multiplication. It is enqueued on the stream and returns; the descriptors may be destroyed at once. C and D may
// be the same matrix (same address, same layout). With beta = 0, C is not read, and may be null. `algo` may be null.
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t a_layout, const void* B, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* C, cublasLtMatrixLayout_t c_layout, void* D,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream,
                              cuda_cpu::Place place = cuda_cpu::Place::here());
