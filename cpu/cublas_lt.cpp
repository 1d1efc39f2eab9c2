// The API of cpu/cublasLt.h: descriptors, attributes, and the checks before a multiplication goes to its stream. The
// multiplication itself is in cublas_lt_multiply.cpp.
#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "cublas_lt.h"
#include "device.h"

struct cublasLtContext {};

namespace {

using Layout = cublasLtMatrixLayoutOpaque_t;
using Operation = cublasLtMatmulDescOpaque_t;
using cuda_cpu::aux_bit, cuda_cpu::bgrad_bit;
using cuda_cpu::element_bytes, cuda_cpu::is_fp8, cuda_cpu::Matrix, cuda_cpu::Multiplication;

bool is_16_bit(int32_t type) { return type == CUDA_R_16F || type == CUDA_R_16BF; }

// ---------------------------------------------------------------------------------------------------------------------
// What is refused

cublasStatus_t check_layout(const Layout& layout) {
    if (layout.order != CUBLASLT_ORDER_COL && layout.order != CUBLASLT_ORDER_ROW) return CUBLAS_STATUS_NOT_SUPPORTED;
    const uint64_t length = layout.order == CUBLASLT_ORDER_COL ? layout.rows : layout.columns;
    if (layout.rows == 0 || layout.columns == 0 || layout.batch_count < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (layout.ld < 0 || uint64_t(layout.ld) < length) return CUBLAS_STATUS_INVALID_VALUE;
    constexpr auto largest = uint64_t(std::numeric_limits<int32_t>::max());
    if (layout.rows > largest || layout.columns > largest || uint64_t(layout.ld) > largest)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

// The table of types in cublasLt.h. `bias` receives the type that a bias must have.
bool types_are_supported(int32_t a, int32_t b, int32_t c, int32_t d, int32_t asked_bias, int32_t* bias) {
    *bias = d;
    if (is_fp8(a) && is_fp8(b)) {
        if (a == CUDA_R_8F_E5M2 && b == CUDA_R_8F_E5M2) return false;
        if (d == CUDA_R_8F_E5M2 && a == b) return false;
        if (is_fp8(d)) return *bias = c, is_16_bit(c);
        if (d == CUDA_R_32F) *bias = asked_bias == CUDA_R_16F ? CUDA_R_16F : CUDA_R_16BF;
        return c == d && (is_16_bit(d) || d == CUDA_R_32F);
    }
    if (a != b || c != d) return false;
    if (a == CUDA_R_32F) return d == CUDA_R_32F;
    return is_16_bit(a) && (d == a || d == CUDA_R_32F);
}

bool epilogue_is_known(uint32_t epilogue) {
    switch (epilogue) {
        case CUBLASLT_EPILOGUE_DEFAULT:
        case CUBLASLT_EPILOGUE_RELU:
        case CUBLASLT_EPILOGUE_BIAS:
        case CUBLASLT_EPILOGUE_RELU_BIAS:
        case CUBLASLT_EPILOGUE_GELU:
        case CUBLASLT_EPILOGUE_GELU_BIAS:
        case CUBLASLT_EPILOGUE_GELU_AUX:
        case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
        case CUBLASLT_EPILOGUE_DGELU:
        case CUBLASLT_EPILOGUE_DGELU_BGRAD:
        case CUBLASLT_EPILOGUE_BGRADA:
        case CUBLASLT_EPILOGUE_BGRADB: return true;
        default: return false;
    }
}

cublasStatus_t check_epilogue(const Operation& operation, const Layout& c, const Layout& d, int32_t bias_type) {
    if (!epilogue_is_known(operation.epilogue)) return CUBLAS_STATUS_NOT_SUPPORTED;
    constexpr uint32_t uses_bias =
        CUBLASLT_EPILOGUE_BIAS | bgrad_bit | CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB;
    // Seen on an H100, with cuBLASLt 13.0. Which of the attributes it is that does not fit, it does not say.
    if (!(operation.epilogue & uses_bias) && (operation.bias || operation.bias_batch_stride != 0))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (operation.epilogue & uses_bias) {
        if (!operation.bias) return CUBLAS_STATUS_INVALID_VALUE;
        if (operation.bias_type != -1 && operation.bias_type != bias_type) return CUBLAS_STATUS_NOT_SUPPORTED;
        // D has been scaled.
        if ((operation.epilogue & bgrad_bit) && is_fp8(d.type)) return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (operation.epilogue & aux_bit) {
        const int64_t length = int64_t(d.order == CUBLASLT_ORDER_COL ? d.rows : d.columns);
        if (!operation.aux || operation.aux_ld < length || operation.aux_ld % 8 != 0)
            return CUBLAS_STATUS_INVALID_VALUE;
        if (d.batch_count > 1 && operation.aux_batch_stride % 8 != 0) return CUBLAS_STATUS_INVALID_VALUE;
        const int32_t natural = is_fp8(d.type) ? c.type : d.type;
        if (operation.aux_type != -1 && operation.aux_type != natural) return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

// What Hopper's fp8 kernels require.
bool fp8_is_supported(const Operation& operation, const Layout& a, const Layout& b, const Layout& d) {
    if (operation.transpose_a == CUBLAS_OP_N || operation.transpose_b != CUBLAS_OP_N) return false;
    if (a.order != CUBLASLT_ORDER_COL || b.order != CUBLASLT_ORDER_COL || d.order != CUBLASLT_ORDER_COL) return false;
    return a.rows % 16 == 0 && d.rows % 16 == 0 && a.ld % 16 == 0 && b.ld % 16 == 0 &&
           d.ld * int64_t(element_bytes(d.type)) % 16 == 0;
}

// Scales for blocks of fp8 matrices. NVIDIA's manual gives the pairs of modes, D's types and that m and n are multiples
// of 4; it names no epilogues and no batches: we allow the epilogues that Transformer Engine has tried and uses.
cublasStatus_t check_block_scales(const Operation& operation, const Layout& d) {
    const auto is_block = [](int32_t mode) {
        return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    };
    if (!is_block(operation.a_scale_mode) || !is_block(operation.b_scale_mode)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (operation.a_scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F &&
        operation.b_scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!operation.a_scale || !operation.b_scale) return CUBLAS_STATUS_INVALID_VALUE;
    if ((reinterpret_cast<uintptr_t>(operation.a_scale) | reinterpret_cast<uintptr_t>(operation.b_scale)) % 16 != 0)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (is_fp8(d.type) || operation.c_scale || operation.d_amax) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d.rows % 4 != 0 || d.columns % 4 != 0 || d.batch_count != 1) return CUBLAS_STATUS_NOT_SUPPORTED;
    return operation.epilogue == CUBLASLT_EPILOGUE_DEFAULT || operation.epilogue == CUBLASLT_EPILOGUE_BIAS
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t check(const Operation& operation, const Layout& a, const Layout& b, const Layout& c, const Layout& d,
                     int32_t* bias_type) {
    for (const Layout* layout : {&a, &b, &c, &d})
        if (const cublasStatus_t status = check_layout(*layout); status != CUBLAS_STATUS_SUCCESS) return status;
    for (const int32_t transpose : {operation.transpose_a, operation.transpose_b, operation.transpose_c})
        if (transpose < CUBLAS_OP_N || transpose > CUBLAS_OP_C) return CUBLAS_STATUS_INVALID_VALUE;
    const auto shape = [](const Layout& layout, int32_t transpose) {
        return transpose == CUBLAS_OP_N ? std::pair(layout.rows, layout.columns)
                                        : std::pair(layout.columns, layout.rows);
    };
    const auto [m, k] = shape(a, operation.transpose_a);
    const auto [k_of_b, n] = shape(b, operation.transpose_b);
    if (k != k_of_b || d.rows != m || d.columns != n || c.rows != m || c.columns != n)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (const Layout* layout : {&a, &b, &c})
        if (layout->batch_count != d.batch_count) return CUBLAS_STATUS_INVALID_VALUE;
    if (d.batch_count > 1 && d.batch_stride == 0) return CUBLAS_STATUS_INVALID_VALUE;  // all would overlap

    switch (operation.compute_type) {
        case CUBLAS_COMPUTE_32F:
        case CUBLAS_COMPUTE_32F_PEDANTIC:
        case CUBLAS_COMPUTE_32F_FAST_16F:
        case CUBLAS_COMPUTE_32F_FAST_16BF:
        case CUBLAS_COMPUTE_32F_FAST_TF32: break;
        default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (a.type != b.type && !(is_fp8(a.type) && is_fp8(b.type))) return CUBLAS_STATUS_INVALID_VALUE;
    if (operation.scale_type != CUDA_R_32F || operation.transpose_c != CUBLAS_OP_N || c.order != d.order)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (operation.pointer_mode != CUBLASLT_POINTER_MODE_HOST && operation.pointer_mode != CUBLASLT_POINTER_MODE_DEVICE)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!types_are_supported(a.type, b.type, c.type, d.type, operation.bias_type, bias_type))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (is_fp8(a.type) && !fp8_is_supported(operation, a, b, d)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!is_fp8(a.type) &&
        (operation.a_scale || operation.b_scale || operation.c_scale || operation.d_scale || operation.d_amax))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (operation.d_scale && !is_fp8(d.type)) return CUBLAS_STATUS_INVALID_VALUE;
    if (operation.a_scale_mode != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F ||
        operation.b_scale_mode != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) {
        if (!is_fp8(a.type)) return CUBLAS_STATUS_INVALID_VALUE;
        if (const cublasStatus_t status = check_block_scales(operation, d); status != CUBLAS_STATUS_SUCCESS)
            return status;
    }
    return check_epilogue(operation, c, d, *bias_type);
}

// ---------------------------------------------------------------------------------------------------------------------
// Attributes: the place of each in its descriptor, and its size

struct Field {
    void* address = nullptr;
    size_t bytes = 0;
};

template <class T>
Field field(T& member) {
    return {&member, sizeof(T)};
}

Field find(Layout& layout, cublasLtMatrixLayoutAttribute_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATRIX_LAYOUT_TYPE: return field(layout.type);
        case CUBLASLT_MATRIX_LAYOUT_ORDER: return field(layout.order);
        case CUBLASLT_MATRIX_LAYOUT_ROWS: return field(layout.rows);
        case CUBLASLT_MATRIX_LAYOUT_COLS: return field(layout.columns);
        case CUBLASLT_MATRIX_LAYOUT_LD: return field(layout.ld);
        case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return field(layout.batch_count);
        case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return field(layout.batch_stride);
    }
    return {};
}

Field find(Operation& operation, cublasLtMatmulDescAttributes_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: return field(operation.compute_type);
        case CUBLASLT_MATMUL_DESC_SCALE_TYPE: return field(operation.scale_type);
        case CUBLASLT_MATMUL_DESC_POINTER_MODE: return field(operation.pointer_mode);
        case CUBLASLT_MATMUL_DESC_TRANSA: return field(operation.transpose_a);
        case CUBLASLT_MATMUL_DESC_TRANSB: return field(operation.transpose_b);
        case CUBLASLT_MATMUL_DESC_TRANSC: return field(operation.transpose_c);
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return field(operation.epilogue);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return field(operation.bias);
        case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: return field(operation.bias_batch_stride);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return field(operation.aux);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return field(operation.aux_ld);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: return field(operation.aux_batch_stride);
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return field(operation.a_scale);
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return field(operation.b_scale);
        case CUBLASLT_MATMUL_DESC_C_SCALE_POINTER: return field(operation.c_scale);
        case CUBLASLT_MATMUL_DESC_D_SCALE_POINTER: return field(operation.d_scale);
        case CUBLASLT_MATMUL_DESC_AMAX_D_POINTER: return field(operation.d_amax);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return field(operation.aux_type);
        case CUBLASLT_MATMUL_DESC_FAST_ACCUM: return field(operation.fast_accumulation);
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return field(operation.bias_type);
        case CUBLASLT_MATMUL_DESC_A_SCALE_MODE: return field(operation.a_scale_mode);
        case CUBLASLT_MATMUL_DESC_B_SCALE_MODE: return field(operation.b_scale_mode);
    }
    return {};
}

Field find(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_SEARCH_MODE: return field(preference.search_mode);
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return field(preference.max_workspace_bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return field(preference.reduction_scheme_mask);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return field(preference.a_alignment);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return field(preference.b_alignment);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return field(preference.c_alignment);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return field(preference.d_alignment);
    }
    return {};
}

template <class Descriptor, class Attribute>
cublasStatus_t set_attribute(Descriptor* descriptor, Attribute attribute, const void* value, size_t bytes) {
    if (!descriptor || !value) return CUBLAS_STATUS_INVALID_VALUE;
    const Field found = find(*descriptor, attribute);
    if (!found.address || found.bytes != bytes) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(found.address, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

// With bytes = 0, only returns the number of bytes.
template <class Descriptor, class Attribute>
cublasStatus_t get_attribute(Descriptor* descriptor, Attribute attribute, void* value, size_t bytes,
                             size_t* bytes_written) {
    if (!descriptor || (bytes == 0 ? bytes_written == nullptr : value == nullptr)) return CUBLAS_STATUS_INVALID_VALUE;
    const Field found = find(*descriptor, attribute);
    if (!found.address || (bytes != 0 && found.bytes != bytes)) return CUBLAS_STATUS_INVALID_VALUE;
    if (bytes != 0) std::memcpy(value, found.address, bytes);
    if (bytes_written) *bytes_written = found.bytes;
    return CUBLAS_STATUS_SUCCESS;
}

template <class Descriptor>
cublasStatus_t create(Descriptor** descriptor) {
    if (!descriptor) return CUBLAS_STATUS_INVALID_VALUE;
    *descriptor = new (std::nothrow) Descriptor();
    return *descriptor ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

template <class Descriptor>
cublasStatus_t destroy(Descriptor* descriptor) {
    delete descriptor;
    return CUBLAS_STATUS_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// What a multiplication reads and writes, for the check of races (races.cpp)

cuda_cpu::Access access(const Matrix& matrix, int64_t rows, int64_t columns, int64_t batch_count, bool writes) {
    if (!matrix.data || rows == 0 || columns == 0) return {nullptr, 0, writes};
    const char* last = matrix.at(batch_count - 1, rows - 1, columns - 1);
    return {matrix.data, size_t(last - matrix.data) + element_bytes(matrix.type), writes};
}

std::vector<cuda_cpu::Access> accesses_of(const Multiplication& p) {
    std::vector<cuda_cpu::Access> all = {access(p.a, p.m, p.k, p.batch_count, false),
                                         access(p.b, p.k, p.n, p.batch_count, false),
                                         access(p.d, p.m, p.n, p.batch_count, true)};
    if (p.device_beta || p.beta != 0) all.push_back(access(p.c, p.m, p.n, p.batch_count, false));
    if (p.reads_aux() || p.writes_aux()) all.push_back(access(p.aux, p.m, p.n, p.batch_count, p.writes_aux()));
    const bool writes_bias =
        p.sums_gradient_of_d() || p.has(CUBLASLT_EPILOGUE_BGRADA) || p.has(CUBLASLT_EPILOGUE_BGRADB);
    if (p.bias && (writes_bias || p.has_bias())) {
        Matrix bias;
        bias.data = static_cast<char*>(p.bias), bias.type = p.bias_type, bias.batch_stride = p.bias_batch_stride;
        const bool of_rows = p.has(CUBLASLT_EPILOGUE_BGRADA) || (!p.has(CUBLASLT_EPILOGUE_BGRADB) && p.bias_along_rows);
        all.push_back(access(bias, of_rows ? p.m : p.n, 1, p.batch_count, writes_bias));
    }
    // From the first scale to the last (cublasLtMatmulMatrixScale_t).
    const auto n_scales = [&](int32_t mode, int64_t rows) {
        using cuda_cpu::divide_up, cuda_cpu::scale_block;
        const int64_t blocks = divide_up(p.k, scale_block), row_blocks = divide_up(rows, scale_block);
        if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return int64_t{1};
        return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                   ? rows * blocks
                   : (row_blocks - 1) * cuda_cpu::square_scale_stride(p.k) + blocks;
    };
    const auto scale = [&](const float* data, int64_t n, bool writes) {
        if (data) all.push_back({data, size_t(n) * sizeof(float), writes});
    };
    scale(p.a_scale, n_scales(p.a_scale_mode, p.m), false), scale(p.b_scale, n_scales(p.b_scale_mode, p.n), false);
    scale(p.c_scale, 1, false), scale(p.d_scale, 1, false), scale(p.d_amax, 1, true);
    scale(p.device_alpha, 1, false), scale(p.device_beta, 1, false);
    return all;
}

// The name of a status, and what it says.
std::pair<const char*, const char*> words_for(cublasStatus_t status) {
#define STATUS(name, text) \
    case name: return std::pair(#name, text)
    switch (status) {
        STATUS(CUBLAS_STATUS_SUCCESS, "success");
        STATUS(CUBLAS_STATUS_NOT_INITIALIZED, "no library handle was given");
        STATUS(CUBLAS_STATUS_ALLOC_FAILED, "out of memory");
        STATUS(CUBLAS_STATUS_INVALID_VALUE, "an argument is missing, out of range, or contradicts another");
        STATUS(CUBLAS_STATUS_ARCH_MISMATCH, "the device lacks what this function needs");
        STATUS(CUBLAS_STATUS_MAPPING_ERROR, "device memory could not be accessed");
        STATUS(CUBLAS_STATUS_EXECUTION_FAILED, "the kernel failed");
        STATUS(CUBLAS_STATUS_INTERNAL_ERROR, "an internal operation failed");
        STATUS(CUBLAS_STATUS_NOT_SUPPORTED, "no kernel exists for this combination of types, layouts and epilogue");
        STATUS(CUBLAS_STATUS_LICENSE_ERROR, "the license check failed");
    }
#undef STATUS
    return {"unrecognized status", "unrecognized status"};
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The API

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return create(handle); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    return handle ? destroy(handle) : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType type, uint64_t rows,
                                        uint64_t columns, int64_t ld) {
    if (!layout) return CUBLAS_STATUS_INVALID_VALUE;
    *layout = {};
    layout->type = type, layout->rows = rows, layout->columns = columns, layout->ld = ld;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
    const cublasStatus_t status = create(layout);
    return status == CUBLAS_STATUS_SUCCESS ? cublasLtMatrixLayoutInit(*layout, type, rows, columns, ld) : status;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy(layout); }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
    return set_attribute(layout, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t operation, cublasComputeType_t compute_type,
                                      cudaDataType scale_type) {
    if (!operation) return CUBLAS_STATUS_INVALID_VALUE;
    *operation = {};
    operation->compute_type = compute_type, operation->scale_type = scale_type;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute_type,
                                        cudaDataType scale_type) {
    const cublasStatus_t status = create(operation);
    return status == CUBLAS_STATUS_SUCCESS ? cublasLtMatmulDescInit(*operation, compute_type, scale_type) : status;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) { return destroy(operation); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
    return set_attribute(operation, attribute, value, bytes);
}
cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              void* value, size_t bytes, size_t* bytes_written) {
    return get_attribute(operation, attribute, value, bytes, bytes_written);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) { return create(preference); }
cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference) {
    if (!preference) return CUBLAS_STATUS_INVALID_VALUE;
    *preference = {};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { return destroy(preference); }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
    return set_attribute(preference, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a_layout, cublasLtMatrixLayout_t b_layout,
                                              cublasLtMatrixLayout_t c_layout, cublasLtMatrixLayout_t d_layout,
                                              cublasLtMatmulPreference_t preference, int requested_count,
                                              cublasLtMatmulHeuristicResult_t results[], int* returned_count) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!operation || !a_layout || !b_layout || !c_layout || !d_layout || !preference || !results || !returned_count ||
        requested_count < 1)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (const uint32_t alignment :
         {preference->a_alignment, preference->b_alignment, preference->c_alignment, preference->d_alignment})
        if (alignment == 0 || (alignment & (alignment - 1)) != 0) return CUBLAS_STATUS_INVALID_VALUE;
    int32_t bias_type;
    const cublasStatus_t status = check(*operation, *a_layout, *b_layout, *c_layout, *d_layout, &bias_type);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const bool needs_16_bytes = is_fp8(a_layout->type);
    if (needs_16_bytes && std::min(preference->a_alignment, preference->b_alignment) < 16)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    results[0] = {};
    results[0].state = CUBLAS_STATUS_SUCCESS;
    results[0].wavesCount = 1.0f;
    *returned_count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                       cublasLtMatrixLayout_t a_layout, cublasLtMatrixLayout_t b_layout,
                                       cublasLtMatrixLayout_t c_layout, cublasLtMatrixLayout_t d_layout,
                                       const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result) {
    if (!algorithm || !result) return CUBLAS_STATUS_INVALID_VALUE;
    cublasLtMatmulPreferenceOpaque_t preference;
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, operation, a_layout, b_layout, c_layout,
                                                                 d_layout, &preference, 1, result, &found);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return std::equal(std::begin(algorithm->data), std::end(algorithm->data), result->algo.data)
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t a_layout, const void* B, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* C, cublasLtMatrixLayout_t c_layout, void* D,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t*, void*, size_t,
                              cudaStream_t stream, cuda_cpu::Place place) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!operation || !a_layout || !b_layout || !c_layout || !d_layout || !alpha || !beta || !A || !B || !D)
        return CUBLAS_STATUS_INVALID_VALUE;
    int32_t bias_type;
    const cublasStatus_t status = check(*operation, *a_layout, *b_layout, *c_layout, *d_layout, &bias_type);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const bool on_device = operation->pointer_mode == CUBLASLT_POINTER_MODE_DEVICE;
    const float* const host_beta = on_device ? nullptr : static_cast<const float*>(beta);
    if (!C && !(host_beta && *host_beta == 0.0f)) return CUBLAS_STATUS_INVALID_VALUE;
    if (C == D && c_layout->type == d_layout->type &&
        (c_layout->ld != d_layout->ld || c_layout->batch_stride != d_layout->batch_stride))
        return CUBLAS_STATUS_INVALID_VALUE;  // in place, but not each element in its own place
    if (is_fp8(a_layout->type) &&
        (reinterpret_cast<uintptr_t>(A) | reinterpret_cast<uintptr_t>(B) | reinterpret_cast<uintptr_t>(D)) % 16 != 0)
        return CUBLAS_STATUS_NOT_SUPPORTED;

    Multiplication p;
    p.a = Matrix(A, *a_layout), p.b = Matrix(B, *b_layout), p.c = Matrix(C, *c_layout), p.d = Matrix(D, *d_layout);
    if (operation->transpose_a != CUBLAS_OP_N) p.a = p.a.transposed();
    if (operation->transpose_b != CUBLAS_OP_N) p.b = p.b.transposed();
    p.m = int64_t(d_layout->rows), p.n = int64_t(d_layout->columns), p.batch_count = d_layout->batch_count;
    p.k = int64_t(operation->transpose_a == CUBLAS_OP_N ? a_layout->columns : a_layout->rows);
    p.epilogue = operation->epilogue;
    p.bias = operation->bias, p.bias_type = bias_type, p.bias_batch_stride = operation->bias_batch_stride;
    Layout aux_layout = *d_layout;  // AUX is ordered like D
    aux_layout.type = is_fp8(d_layout->type) ? c_layout->type : d_layout->type;
    aux_layout.ld = operation->aux_ld, aux_layout.batch_stride = operation->aux_batch_stride;
    p.aux = Matrix(operation->aux, aux_layout);
    if (on_device) {
        p.device_alpha = static_cast<const float*>(alpha), p.device_beta = static_cast<const float*>(beta);
    } else {
        p.alpha = *static_cast<const float*>(alpha), p.beta = *host_beta;
    }
    p.a_scale = operation->a_scale, p.b_scale = operation->b_scale, p.c_scale = operation->c_scale;
    p.d_scale = operation->d_scale, p.d_amax = operation->d_amax;
    p.a_scale_mode = operation->a_scale_mode, p.b_scale_mode = operation->b_scale_mode;
    if (d_layout->order == CUBLASLT_ORDER_ROW) p.transpose();
    if (cuda_cpu::count_product)
        for (const cuda_cpu::Access& access : accesses_of(p))
            if (access.writes) cuda_cpu::count_product(reinterpret_cast<uintptr_t>(access.data), access.bytes);
    if (cuda_cpu::runs_at_once(stream)) return cuda_cpu::multiply(p), CUBLAS_STATUS_SUCCESS;
    const cuda_cpu::Footprint footprint{"a matrix product", place, accesses_of(p)};
    const cudaError_t error = cuda_cpu::enqueue(
        stream, [p] { cuda_cpu::multiply(p); }, footprint);
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

const char* cublasLtGetStatusName(cublasStatus_t status) { return words_for(status).first; }
const char* cublasLtGetStatusString(cublasStatus_t status) { return words_for(status).second; }
