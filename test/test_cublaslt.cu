// cuBLASLt, real or ours (cpu/cublasLt.h), against triple loops in double.
//
// Tolerance, for each element by itself: a sum of k products in float32, in any order, is off by at most
// (k + 8) * 2^-23 * (sum of |alpha a b| + |beta c| + |bias|), the 8 for the scalings and additions around it, 2^-23 and
// not 2^-24 because tensor cores cut where a CPU rounds. The epilogues' slope is at most 1.2 and they add at most 64
// ulp of their own. Then D's type rounds once: half a unit in its last place. Nothing else is allowed of ours.
//
// NVIDIA's, on an H100, rounds more than once in 16 bits by some of its kernels (with rows off 16 bytes): the product
// before beta C is added, that sum before the bias or GELU's slope. (Of eight elements that were off by more than one
// rounding, this gives the bits of all.) And it sums products of fp8 with about 14 bits. Of some combinations of types,
// orders and epilogues it has none (NOT_SUPPORTED): those are left out there, but for the ones that layers/matmul.cu
// relies on.
//
// All matrices stand in device memory with gaps behind each column that hold NaN (must not be read) and, in D, a mark
// (must not be written).
//
//   run:   make test, or build/cpu/run_tests "[cublaslt]"
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "reference.h"
#ifdef CUDA_ON_CPU
#include "bf16_products.h"
#endif

namespace {

struct Type {
    cudaDataType id;
    int bytes, mantissa_bits, smallest_exponent;  // 2^smallest_exponent is the smallest subnormal
    double largest;
};
const Type f32{CUDA_R_32F, 4, 23, -149, 3.4e38}, f16{CUDA_R_16F, 2, 10, -24, 65504},
    bf16{CUDA_R_16BF, 2, 7, -133, 3.4e38};
const Type e4m3{CUDA_R_8F_E4M3, 1, 3, -9, 448}, e5m2{CUDA_R_8F_E5M2, 1, 2, -16, 57344};

float load(const Type& type, const char* from) {
    const auto as = [&]<class T>(T value) {
        std::memcpy(&value, from, sizeof(T));
        return float(value);
    };
    switch (type.id) {
        case CUDA_R_32F: return as(0.0f);
        case CUDA_R_16F: return as(__half(0.0f));
        case CUDA_R_16BF: return as(__nv_bfloat16(0.0f));
        case CUDA_R_8F_E4M3: return as(__nv_fp8_e4m3(0.0f));
        default: return as(__nv_fp8_e5m2(0.0f));
    }
}

void store(const Type& type, float x, char* to) {
    const auto as = [&](auto value) { std::memcpy(to, &value, sizeof value); };
    switch (type.id) {
        case CUDA_R_32F: return as(x);
        case CUDA_R_16F: return as(__half(x));
        case CUDA_R_16BF: return as(__nv_bfloat16(x));
        case CUDA_R_8F_E4M3: return as(__nv_fp8_e4m3(x));
        default: return as(__nv_fp8_e5m2(x));
    }
}

std::mt19937 generator(1);
bool of_nvidia() { return !device().is_cpu; }
float uniform() { return float(generator() >> 8) * 0x1p-23f - 1.0f; }

// A batch of matrices in device memory, with a copy on the host.
struct Matrices {
    Type type;
    int64_t rows, columns, ld, stride;
    int batch;
    cublasLtOrder_t order;
    std::vector<char> host;
    void* device = nullptr;
    cublasLtMatrixLayout_t layout = nullptr;

    // fill: random numbers; otherwise 7, the mark. The gaps are NaN, or the mark.
    Matrices(const Type& type_, int64_t rows_, int64_t columns_, bool fill, int batch_ = 1, bool shared = false,
             cublasLtOrder_t order_ = CUBLASLT_ORDER_COL, int64_t gap = 8)
        : type(type_), rows(rows_), columns(columns_), batch(batch_), order(order_) {
        const int64_t lines = order == CUBLASLT_ORDER_COL ? columns : rows;
        ld = order == CUBLASLT_ORDER_COL ? rows : columns;
        ld += gap;
        if (gap % 8 == 0 && gap > 0) ld = (ld + 15) / 16 * 16;  // what AUX and fp8 need
        stride = shared ? 0 : ld * lines + 16;
        host.resize(size_t(((shared ? 0 : batch - 1) * stride + ld * lines) * type.bytes));
        for (size_t i = 0; i < host.size(); i += size_t(type.bytes)) store(type, fill ? NAN : 7.0f, &host[i]);
        if (fill)
            for (int b = 0; b < batch; ++b)
                for (int64_t i = 0; i < rows; ++i)
                    for (int64_t j = 0; j < columns; ++j) set(b, i, j, uniform());
        REQUIRE(cudaMalloc(&device, host.size()) == cudaSuccess);
        upload();
        REQUIRE(cublasLtMatrixLayoutCreate(&layout, type.id, uint64_t(rows), uint64_t(columns), ld) ==
                CUBLAS_STATUS_SUCCESS);
        attribute(CUBLASLT_MATRIX_LAYOUT_ORDER, int32_t(order));
        attribute(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t(batch));
        attribute(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
    }
    Matrices(const Matrices&) = delete;
    ~Matrices() {
        cublasLtMatrixLayoutDestroy(layout);
        cudaFree(device);
    }
    template <class T>
    void attribute(cublasLtMatrixLayoutAttribute_t name, T value) {
        REQUIRE(cublasLtMatrixLayoutSetAttribute(layout, name, &value, sizeof value) == CUBLAS_STATUS_SUCCESS);
    }
    void upload() { REQUIRE(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice) == cudaSuccess); }
    void download() {  // when everything has been computed
        REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
        REQUIRE(cudaMemcpy(host.data(), device, host.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
    }
    size_t offset(int b, int64_t i, int64_t j) const {
        return size_t((b * stride + (order == CUBLASLT_ORDER_COL ? i + j * ld : i * ld + j)) * type.bytes);
    }
    void set(int b, int64_t i, int64_t j, float x) { store(type, x, &host[offset(b, i, j)]); }
    double at(int b, int64_t i, int64_t j) const { return load(type, &host[offset(b, i, j)]); }
    double op(bool transpose, int b, int64_t i, int64_t j) const { return transpose ? at(b, j, i) : at(b, i, j); }
    // Elements outside of the matrices that are no longer the mark.
    int64_t gaps_written() const {
        int64_t marks = 0;
        for (size_t i = 0; i < host.size(); i += size_t(type.bytes)) marks += load(type, &host[i]) != 7.0f;
        return marks - rows * columns * batch;
    }
};

struct Operation {
    cublasLtMatmulDesc_t description = nullptr;
    Operation(cublasComputeType_t compute = CUBLAS_COMPUTE_32F) {
        cublasLtMatmulDescCreate(&description, compute, CUDA_R_32F);
    }
    Operation(const Operation&) = delete;
    ~Operation() { cublasLtMatmulDescDestroy(description); }
    template <class T>
    void attribute(cublasLtMatmulDescAttributes_t name, T value) {
        REQUIRE(cublasLtMatmulDescSetAttribute(description, name, &value, sizeof value) == CUBLAS_STATUS_SUCCESS);
    }
};

cublasLtHandle_t handle() {
    static cublasLtHandle_t the_handle = [] {
        cublasLtHandle_t created = nullptr;
        cublasLtCreate(&created);
        return created;
    }();
    return the_handle;
}

// D = alpha op(A) op(B) + beta C
cublasStatus_t multiply(const Operation& operation, float alpha, const Matrices& A, const Matrices& B, float beta,
                        const Matrices& C, const Matrices& D) {
    return cublasLtMatmul(handle(), operation.description, &alpha, A.device, A.layout, B.device, B.layout, &beta,
                          C.device, C.layout, D.device, D.layout, nullptr, nullptr, 0, nullptr);
}

struct Case {
    int64_t m, n, k;
    bool transpose_a = false, transpose_b = false;
    cublasLtOrder_t order_a = CUBLASLT_ORDER_COL, order_b = CUBLASLT_ORDER_COL, order_d = CUBLASLT_ORDER_COL;
    float alpha = 1, beta = 0;
    Type a = f32, b = f32, d = f32, c = d, bias = c;
    int batch = 1;
    bool share_a = false, share_b = false, in_place = false;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    float a_scale = 1, b_scale = 1, d_scale = 1;  // fp8
    int64_t gap = 8;
};

// What rounding x to the type may add.
double rounding(const Type& type, double x) {
    if (type.id == CUDA_R_32F) return 0;  // counted in the sum already
    return std::max(std::ldexp(std::fabs(x), -type.mantissa_bits - 1), std::ldexp(0.5, type.smallest_exponent)) *
           1.0001;
}

bool has(const Case& c, int flag) { return (int(c.epilogue) & flag) != 0; }

// What Hopper's fp8 may add to a sum whose terms have this size: 2^-13 of the largest term, and of the sum so far, for
// each of the few that are added before they come to a register.
double fp8_error(const Type& type, double size) { return of_nvidia() && type.bytes == 1 ? 0x1p-11 * size : 0; }

// Calls f; of two bf16 matrices once for exact products, and once for this processor's fastest ones (cpu/sgemm.cpp).
template <class F>
void in_each_way(const Type& a, const Type& b, F&& f) {
#ifdef CUDA_ON_CPU
    using cuda_cpu::Bf16Products;
    if (a.id == bf16.id && b.id == bf16.id) {
        const struct Restore {
            Bf16Products before = cuda_cpu::bf16_products();
            ~Restore() { cuda_cpu::set_bf16_products(before); }
        } restore;
        const bool has_tiles = cuda_cpu::has_bf16_tiles(), has_dots = !has_tiles && cuda_cpu::has_bf16_dots();
        const std::pair<Bf16Products, bool> ways[] = {
            {Bf16Products::exact, true}, {Bf16Products::dots, has_dots}, {Bf16Products::tiles, has_tiles}};
        for (const auto& [way, is_here] : ways) {
            if (!is_here) continue;
            INFO("way " << int(way));
            cuda_cpu::set_bf16_products(way);
            f();
        }
        return;
    }
#endif
    (void)a, (void)b;
    f();
}

// Runs one case, compares every element of D, AUX and bias gradient. `required`: NVIDIA's must have it too.
void check_one_way(const Case& c, bool required) {
    INFO("m n k " << c.m << " " << c.n << " " << c.k << "  trans " << c.transpose_a << c.transpose_b << "  order "
                  << c.order_a << c.order_b << c.order_d << "  alpha beta " << c.alpha << " " << c.beta << "  types "
                  << c.a.id << " " << c.b.id << " " << c.c.id << " " << c.d.id << "  batch " << c.batch << c.share_a
                  << c.share_b << c.in_place << "  epilogue " << c.epilogue);
    Matrices A(c.a, c.transpose_a ? c.k : c.m, c.transpose_a ? c.m : c.k, true, c.batch, c.share_a, c.order_a, c.gap);
    Matrices B(c.b, c.transpose_b ? c.n : c.k, c.transpose_b ? c.k : c.n, true, c.batch, c.share_b, c.order_b, c.gap);
    Matrices C(c.c, c.m, c.n, true, c.batch, false, c.order_d, c.in_place ? c.gap : c.gap + 8);
    Matrices D(c.d, c.m, c.n, false, c.batch, false, c.order_d, c.gap);
    const bool gradient_of_a = has(c, CUBLASLT_EPILOGUE_BGRADA), gradient_of_b = has(c, CUBLASLT_EPILOGUE_BGRADB);
    const bool gradient_of_d = has(c, 16), reads_aux = has(c, 64);
    const bool any_gradient = gradient_of_a || gradient_of_b || gradient_of_d;
    Matrices bias(c.bias, gradient_of_b ? c.n : c.m, 1, !any_gradient, c.batch);
    Matrices aux(c.bias, c.m, c.n, reads_aux, c.batch, false, c.order_d);
    if (c.beta == 0)  // C must not be read
        for (size_t i = 0; i < C.host.size(); i += size_t(c.c.bytes)) store(c.c, NAN, &C.host[i]);
    if (reads_aux && !of_nvidia() && c.bias.id != f16.id) {  // whose squares are beyond float32: a slope of 1, and of 0
        aux.set(0, 0, 0, 1e25f), aux.set(0, c.m - 1, c.n - 1, -1e25f);
        aux.upload();
    }
    if (c.in_place) D.host = C.host;  // C and D have one layout
    const std::vector<char> c_before = c.in_place ? D.host : C.host;
    C.upload();
    D.upload();

    Operation operation;
    operation.attribute(CUBLASLT_MATMUL_DESC_TRANSA, int32_t(c.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N));
    operation.attribute(CUBLASLT_MATMUL_DESC_TRANSB, int32_t(c.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N));
    operation.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t(c.epilogue));
    if (any_gradient || has(c, CUBLASLT_EPILOGUE_BIAS)) {  // with another epilogue these are an invalid value
        operation.attribute(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device);
        operation.attribute(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(c.bias.id));
        if (c.batch > 1) operation.attribute(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, bias.stride);
    }
    if (has(c, 128)) {
        operation.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.device);
        operation.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux.ld);
        if (c.batch > 1) operation.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, aux.stride);
    }
    float* scales = nullptr;
    const bool finds_amax = c.a.bytes == 1 && (c.d.bytes == 1 || !of_nvidia());
    const float c_scale = c.a.bytes == 1 && !of_nvidia() ? 0.75f : 1.0f;
    if (c.a.bytes == 1) {
        const float values[5] = {c.a_scale, c.b_scale, c.d_scale, 0, c_scale};
        REQUIRE(cudaMalloc(&scales, sizeof values) == cudaSuccess);
        REQUIRE(cudaMemcpy(scales, values, sizeof values, cudaMemcpyHostToDevice) == cudaSuccess);
        operation.attribute(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales);
        operation.attribute(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales + 1);
        if (c.d.bytes == 1) operation.attribute(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, scales + 2);
        if (!of_nvidia()) operation.attribute(CUBLASLT_MATMUL_DESC_C_SCALE_POINTER, scales + 4);
        if (finds_amax) operation.attribute(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, scales + 3);
    }
    const cublasStatus_t status = multiply(operation, c.alpha, A, B, c.beta, c.in_place ? D : C, D);
    if (of_nvidia() && !required && status == CUBLAS_STATUS_NOT_SUPPORTED) {
        cudaFree(scales);
        return;
    }
    REQUIRE(std::string(cublasLtGetStatusName(status)) == "CUBLAS_STATUS_SUCCESS");
    D.download(), bias.download(), aux.download();
    C.host = c_before;

    int64_t wrong = 0;
    const auto compare = [&](const char* what, int b, int64_t i, int64_t j, double got, double want, double tolerance) {
        if (!(std::fabs(got - want) <= tolerance) && wrong++ == 0)
            UNSCOPED_INFO(what << "[" << b << "][" << i << "," << j << "] is " << got << ", not " << want << " +- "
                               << tolerance);
    };
    const double epsilon = double(c.k + 8) * 0x1p-23, alpha = double(c.alpha) * c.a_scale * c.b_scale,
                 beta = double(c.beta) * c_scale;
    double amax = 0, amax_error = 0;
    for (int b = 0; b < c.batch; ++b) {
        std::vector<double> gradient(size_t(c.m)), gradient_size(size_t(c.m));
        for (int64_t i = 0; i < c.m; ++i)
            for (int64_t j = 0; j < c.n; ++j) {
                double x = 0, size = 0;
                for (int64_t k = 0; k < c.k; ++k) {
                    const double product = A.op(c.transpose_a, b, i, k) * B.op(c.transpose_b, b, k, j);
                    x += alpha * product, size += std::fabs(alpha * product);
                }
                double rounded = 0;  // what roundings before the last one may add
                const auto before = [&](bool something) {
                    if (of_nvidia() && something) rounded += rounding(c.d, x);
                };
                const bool biased = has(c, CUBLASLT_EPILOGUE_BIAS);
                before(c.beta != 0 || biased || reads_aux);
                if (c.beta != 0) {
                    x += beta * C.at(b, i, j), size += std::fabs(beta * C.at(b, i, j));
                    before(biased || reads_aux);
                }
                if (biased) x += bias.at(b, i, 0), size += std::fabs(bias.at(b, i, 0));
                double error = epsilon * size + fp8_error(c.a, size) + rounded;
                if (has(c, CUBLASLT_EPILOGUE_GELU) && has(c, 128)) {
                    compare("AUX", b, i, j, aux.at(b, i, j), x, error + rounding(c.bias, x));
                    // Here D is gelu(AUX); NVIDIA does not say whether it is that or gelu(x).
                    if (device().is_cpu) x = aux.at(b, i, j), error = 0;
                    else error += rounding(c.bias, x);
                }
                if (has(c, CUBLASLT_EPILOGUE_RELU)) x = std::max(x, 0.0);
                // What test_gelu.cu allows: far below 0 the result is small, and its error is one of x.
                // NVIDIA's in 16 bits is off by up to one more rounding of x to 16 bits: its tanh has so many bits.
                if (has(c, CUBLASLT_EPILOGUE_GELU)) {
                    const double approximate = of_nvidia() && c.d.bytes == 2 ? std::ldexp(0.5, -c.d.mantissa_bits) : 0;
                    error = 1.2 * error + (64 * 0x1p-24 + approximate) * std::fabs(x), x = gelu(x);
                }
                if (reads_aux) {
                    error = 1.2 * error + 64 * 0x1p-24 * std::fabs(x);
                    x *= gelu_derivative(aux.at(b, i, j));
                }
                // NVIDIA does not say whether the sums are of D before it is rounded.
                gradient[size_t(i)] += x, gradient_size[size_t(i)] += std::fabs(x) * 0x1p-22 + error + rounding(c.d, x);
                if (std::fabs(x) > amax) amax = std::fabs(x), amax_error = error;
                x *= c.d_scale, error = error * c.d_scale + std::fabs(x) * 0x1p-24;
                x = std::min(std::max(x, -c.d.largest), c.d.largest);
                compare("D", b, i, j, D.at(b, i, j), x, error + rounding(c.d, x));
            }
        for (int64_t i = 0; any_gradient && i < bias.rows; ++i) {
            double x = gradient_of_d ? gradient[size_t(i)] : 0, error = gradient_of_d ? gradient_size[size_t(i)] : 0;
            for (int64_t k = 0; !gradient_of_d && k < c.k; ++k) {
                const double value = gradient_of_a ? A.op(c.transpose_a, b, i, k) : B.op(c.transpose_b, b, k, i);
                x += value, error += epsilon * std::fabs(value);
            }
            compare("bias", b, i, 0, bias.at(b, i, 0), x, error + rounding(c.bias, x));
        }
    }
    CHECK(wrong == 0);
    if (!c.in_place) CHECK(D.gaps_written() <= 0);  // below 0 where a result happens to be the mark
    if (any_gradient) CHECK(bias.gaps_written() <= 0);
    if (finds_amax) {
        float got = 0;
        REQUIRE(cudaMemcpy(&got, scales + 3, sizeof got, cudaMemcpyDeviceToHost) == cudaSuccess);
        CHECK(std::fabs(got - amax) <= amax_error + 1e-6 * amax);
    }
    cudaFree(scales);
}

void check(const Case& c, bool required = false) {
    in_each_way(c.a, c.b, [&] { check_one_way(c, required); });
}

const auto col = CUBLASLT_ORDER_COL, row = CUBLASLT_ORDER_ROW;

#if CUBLAS_VERSION >= 120900  // older ones have no scales for blocks
const auto kScalar = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, kVector = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
           kSquare = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;

// The scales of an fp8 operand with `length` rows (A) or columns (B) in blocks of 128 along k, as NVIDIA's manual lays
// them out: 1 x 128 with the length contiguous; 128 x 128 with k contiguous, its stride a multiple of 4, NaN behind the
// last block.
struct BlockScales {
    cublasLtMatmulMatrixScale_t mode;
    int64_t length, blocks, stride;
    std::vector<float> host;
    float* device = nullptr;

    BlockScales(cublasLtMatmulMatrixScale_t mode_, int64_t length_, int64_t k)
        : mode(mode_), length(length_), blocks((k + 127) / 128), stride((blocks + 3) / 4 * 4) {
        host.assign(size_t(mode == kVector ? length * blocks : stride * ((length + 127) / 128)), NAN);
        for (int64_t i = 0; i < length; ++i)
            for (int64_t b = 0; b < blocks; ++b)  // from 2^-6 to 2^6, not powers of two
                if (mode == kVector || i % 128 == 0) host[index(i, b)] = std::exp2(6 * uniform());
        REQUIRE(cudaMalloc(&device, host.size() * sizeof(float)) == cudaSuccess);
        REQUIRE(cudaMemcpy(device, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice) == cudaSuccess);
    }
    BlockScales(const BlockScales&) = delete;
    ~BlockScales() { cudaFree(device); }
    size_t index(int64_t i, int64_t b) const { return size_t(mode == kVector ? b * length + i : i / 128 * stride + b); }
    double at(int64_t i, int64_t k) const { return host[index(i, k / 128)]; }
};

void use_scales(Operation& operation, const BlockScales& a, const BlockScales& b) {
    operation.attribute(CUBLASLT_MATMUL_DESC_TRANSA, int32_t(CUBLAS_OP_T));
    operation.attribute(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, int32_t(a.mode));
    operation.attribute(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, int32_t(b.mode));
    operation.attribute(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, a.device);
    operation.attribute(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, b.device);
}

bool has_block_scaled_fp8() { return device().is_cpu || device().capability / 10 == 9; }  // Hopper
#endif

}  // namespace

TEST_CASE("cublasLt: float32, all transposes, both orders, alpha and beta", "[cublaslt]") {
    const int64_t sizes[][3] = {{1, 1, 1}, {33, 17, 29}, {1, 65, 7}, {131, 1, 50}, {64, 48, 1}};
    for (const auto& [m, n, k] : sizes)
        for (int choice = 0; choice < 32; ++choice)
            for (float beta : {0.0f, 1.0f, -0.5f}) {
                Case c{.m = m, .n = n, .k = k, .transpose_a = bool(choice & 1), .transpose_b = bool(choice & 2)};
                c.order_a = choice & 4 ? row : col, c.order_b = choice & 8 ? row : col,
                c.order_d = choice & 16 ? row : col;
                c.alpha = choice % 3 == 0 ? 1.0f : 0.75f, c.beta = beta, c.in_place = choice % 2 == 1;
                c.gap = choice % 5 == 0 ? 0 : 3;
                check(c);
            }
}

TEST_CASE("cublasLt: 16 bits are rounded once", "[cublaslt]") {
    for (const Type& in : {bf16, f16})
        for (const Type& out : {in, f32})
            for (int choice = 0; choice < 16; ++choice) {
                Case c{.m = 41, .n = 35, .k = 67, .transpose_a = bool(choice & 1), .transpose_b = bool(choice & 2)};
                c.order_a = choice & 4 ? row : col, c.order_d = choice & 8 ? row : col;
                c.a = c.b = in, c.c = c.d = c.bias = out;
                c.beta = choice % 3 == 0 ? 0.0f : 0.5f, c.in_place = choice % 2 == 0, c.gap = choice % 4 == 3 ? 5 : 8;
                check(c);
            }
}

TEST_CASE("cublasLt: fp8 with scales", "[cublaslt]") {
    const Type inputs[][2] = {{e4m3, e4m3}, {e4m3, e5m2}, {e5m2, e4m3}};
    for (const auto& [a, b] : inputs)
        for (const Type& out : {bf16, f16, f32, e4m3, e5m2}) {
            if (out.id == e5m2.id && a.id == b.id) continue;
            Case c{.m = 48, .n = 32, .k = 80, .transpose_a = true, .a = a, .b = b};
            c.d = out, c.c = out.bytes == 1 ? bf16 : out, c.bias = out.id == f32.id ? bf16 : c.c;
            c.a_scale = 0.25f, c.b_scale = 8.0f,
            c.d_scale = out.bytes == 1 ? 96.0f : 1.0f;  // some values saturate e4m3
            c.beta = out.id == f16.id ? 0.5f : 0.0f, c.gap = 16;
            c.epilogue = CUBLASLT_EPILOGUE_BIAS;
            check(c, !of_nvidia());
            c.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
            check(c);
        }
}

// As many tokens as there are, in layers/matmul.cu. An H100's cuBLASLt 13.0 supports neither these nor those above with
// gaps and no workspace; test_fp8.cu and test_matmul.cu ask it for what the layers use.
TEST_CASE("cublasLt: fp8 with any number of columns", "[cublaslt]") {
    for (const int64_t n : {1, 7, 33}) {
        Case c{.m = 48, .n = n, .k = 80, .transpose_a = true, .a = e4m3, .b = e4m3, .d = bf16};
        c.c = c.bias = bf16, c.gap = 16, c.epilogue = CUBLASLT_EPILOGUE_BIAS;
        check(c, !of_nvidia());
    }
}

#if CUBLAS_VERSION >= 120900
TEST_CASE("cublasLt: fp8 with scales for blocks", "[cublaslt][shapes]") {
    if (!has_block_scaled_fp8()) SKIP_TEST("needs a GPU of compute capability 9.0");
    const int64_t sizes[][3] = {{16, 4, 16}, {48, 36, 128}, {144, 132, 352}, {272, 20, 656}, {528, 140, 144}};
    const cublasLtMatmulMatrixScale_t modes[][2] = {{kVector, kVector}, {kSquare, kVector}, {kVector, kSquare}};
    for (const auto& [m, n, k] : sizes)
        for (const auto& [a_mode, b_mode] : modes)
            for (const Type& out : {bf16, f16, f32}) {
                INFO("m n k " << m << " " << n << " " << k << "  modes " << a_mode << b_mode << "  out " << out.id);
                const bool biased = out.id != f32.id, e5m2_b = m == 48;
                const float alpha = 0.5f, beta = out.id == f16.id || (out.id == f32.id && m == 48) ? 0.0f : 0.75f;
                Matrices A(e4m3, k, m, true, 1, false, col, 16), B(e5m2_b ? e5m2 : e4m3, k, n, true, 1, false, col, 16);
                Matrices D(out, m, n, true), bias(out, m, 1, true);
                if (beta == 0) std::fill(D.host.begin(), D.host.end(), char(0xff)), D.upload();  // NaN
                const std::vector<char> before = D.host;
                BlockScales a(a_mode, m, k), b(b_mode, n, k);
                Operation operation;
                use_scales(operation, a, b);
                if (biased) {
                    operation.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t(CUBLASLT_EPILOGUE_BIAS));
                    operation.attribute(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device);
                }
                const cublasStatus_t status = multiply(operation, alpha, A, B, beta, D, D);
                REQUIRE(std::string(cublasLtGetStatusName(status)) == "CUBLAS_STATUS_SUCCESS");
                D.download();
                int64_t wrong = 0;
                for (int64_t i = 0; i < m; ++i)
                    for (int64_t j = 0; j < n; ++j) {
                        double x = 0, size = 0;
                        for (int64_t l = 0; l < k; ++l) {
                            const double term = alpha * a.at(i, l) * b.at(j, l) * A.at(0, l, i) * B.at(0, l, j);
                            x += term, size += std::fabs(term);
                        }
                        const double c = beta == 0 ? 0 : beta * load(out, &before[D.offset(0, i, j)]),
                                     bias_i = biased ? bias.at(0, i, 0) : 0;
                        x += c + bias_i, size += std::fabs(c) + std::fabs(bias_i);
                        const double twice = of_nvidia() && (beta != 0 || biased) ? rounding(out, x - c - bias_i) : 0;
                        const double tolerance =
                            double(k + 8) * 0x1p-23 * size + fp8_error(e4m3, size) + rounding(out, x) + twice;
                        wrong += !(std::fabs(D.at(0, i, j) - x) <= tolerance);
                    }
                CHECK(wrong == 0);
            }
}
#endif

#ifdef CUDA_ON_CPU
TEST_CASE("cublasLt: with alpha = 0 it does not matter what A and B hold", "[cublaslt]") {
    for (const bool blocks : {false, true}) {
        INFO("scales for blocks " << blocks);
        Matrices A(e4m3, 256, 32, false, 1, false, col, 16), B(e4m3, 256, 12, true, 1, false, col, 16),
            D(f32, 32, 12, true);
        std::fill(A.host.begin(), A.host.end(), char(0x7f)), A.upload();  // NaN
        const std::vector<char> before = D.host;
        const BlockScales a(kVector, 32, 256), b(kVector, 12, 256);
        Operation operation;
        operation.attribute(CUBLASLT_MATMUL_DESC_TRANSA, int32_t(CUBLAS_OP_T));
        if (blocks) use_scales(operation, a, b);
        REQUIRE(multiply(operation, 0, A, B, 1, D, D) == CUBLAS_STATUS_SUCCESS);
        D.download();
        CHECK(std::memcmp(D.host.data(), before.data(), before.size()) == 0);
    }
}
#endif

#if CUBLAS_VERSION >= 120900
TEST_CASE("cublasLt: block scales that do not fit are refused", "[cublaslt]") {
    if (!has_block_scaled_fp8()) SKIP_TEST("needs a GPU of compute capability 9.0");
    Matrices A(e4m3, 256, 32, true, 1, false, col, 16), B(e4m3, 256, 12, true, 1, false, col, 16),
        B6(e4m3, 256, 6, true, 1, false, col, 16), D(bf16, 32, 12, false), D6(bf16, 32, 6, false),
        D8(e4m3, 32, 12, false);
    BlockScales a(kVector, 32, 256), b(kVector, 12, 256), a_square(kSquare, 32, 256), b_square(kSquare, 12, 256);
    Operation good, squares, one_sided, shifted, epilogue;
    use_scales(good, a, b), use_scales(squares, a_square, b_square), use_scales(one_sided, a, b);
    CHECK(multiply(good, 1, A, B, 0, D, D) == CUBLAS_STATUS_SUCCESS);
    CHECK(multiply(squares, 1, A, B, 0, D, D) != CUBLAS_STATUS_SUCCESS);  // 128 x 128 on both sides
    one_sided.attribute(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, int32_t(kScalar));
    CHECK(multiply(one_sided, 1, A, B, 0, D, D) != CUBLAS_STATUS_SUCCESS);
    CHECK(multiply(good, 1, A, B6, 0, D6, D6) != CUBLAS_STATUS_SUCCESS);  // n is not a multiple of 4
    CHECK(multiply(good, 1, A, B, 0, D, D8) != CUBLAS_STATUS_SUCCESS);    // fp8 out
#ifdef CUDA_ON_CPU
    use_scales(shifted, a, b);  // scales that are not on a 16-byte boundary: a GPU may fault
    shifted.attribute(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, a.device + 1);
    CHECK(multiply(shifted, 1, A, B, 0, D, D) == CUBLAS_STATUS_NOT_SUPPORTED);
    use_scales(epilogue, a, b);
    epilogue.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t(CUBLASLT_EPILOGUE_GELU));
    CHECK(multiply(epilogue, 1, A, B, 0, D, D) == CUBLAS_STATUS_NOT_SUPPORTED);
    Operation missing;
    use_scales(missing, a, b);
    missing.attribute(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<float*>(nullptr));
    CHECK(multiply(missing, 1, A, B, 0, D, D) == CUBLAS_STATUS_INVALID_VALUE);
    Matrices A16(bf16, 256, 32, true), B16(bf16, 256, 12, true);
    CHECK(multiply(good, 1, A16, B16, 0, D, D) == CUBLAS_STATUS_INVALID_VALUE);
#endif
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
}
#endif

TEST_CASE("cublasLt: batches, also with one matrix for all", "[cublaslt]") {
    for (int choice = 0; choice < 8; ++choice) {
        Case c{.m = 19, .n = 23, .k = 31, .transpose_a = bool(choice & 1), .batch = 5};
        c.share_a = choice & 2, c.share_b = choice & 4, c.beta = choice % 3 == 0 ? 0.0f : 2.0f;
        check(c);
        c.a = c.b = c.c = c.d = c.bias = bf16;
        c.order_d = choice & 1 ? row : col;
        check(c);
    }
    check({.m = 64, .n = 64, .k = 64, .transpose_a = true, .batch = 48});
    check({.m = 3, .n = 2, .k = 5, .batch = 700});
}

TEST_CASE("cublasLt: each epilogue", "[cublaslt]") {
    for (const cublasLtEpilogue_t epilogue :
         {CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU,
          CUBLASLT_EPILOGUE_GELU_BIAS, CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
          CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADA, CUBLASLT_EPILOGUE_BGRADB})
        for (const Type& type : {f32, bf16, f16})
            for (int choice = 0; choice < 8; ++choice) {
                Case c{.m = 53, .n = 38, .k = 45, .transpose_a = bool(choice & 1), .transpose_b = bool(choice & 2)};
                c.a = c.b = c.c = c.d = c.bias = type, c.epilogue = epilogue;
                c.beta = choice & 4 ? 1.0f : 0.0f, c.batch = choice & 4 ? 3 : 1;
#ifdef CUDA_ON_CPU  // NVIDIA does not say which epilogues it has for row-major D
                c.order_d = choice % 3 == 2 ? row : col;
#endif
                check(c);
            }
}

// Every row on 16 bytes. Elsewhere layers/matmul.cu takes kernels of its own instead.
TEST_CASE("cublasLt: the epilogues of the layers", "[cublaslt]") {
    for (const cublasLtEpilogue_t epilogue :
         {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU,
          CUBLASLT_EPILOGUE_BGRADB})
        for (const Type& type : {f32, bf16, f16}) {
            // In training's terms: forward; the gradient of the input; the gradient of the weight.
            const bool forward = (epilogue & CUBLASLT_EPILOGUE_BIAS) || epilogue == CUBLASLT_EPILOGUE_GELU_AUX;
            Case c{.m = 64, .n = 48, .k = 96};
            c.transpose_a = forward, c.transpose_b = epilogue == CUBLASLT_EPILOGUE_BGRADB;
            c.a = c.b = c.c = c.d = c.bias = type, c.epilogue = epilogue, c.in_place = true;
            check(c, true);
        }
}

TEST_CASE("cublasLt: matrices of many tiles and panels", "[cublaslt][shapes]") {
    check({.m = 1111, .n = 33, .k = 65, .epilogue = CUBLASLT_EPILOGUE_BIAS});
    check({.m = 65, .n = 1500, .k = 40, .transpose_b = true, .beta = 1, .epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS});
    for (const Type& type : {bf16, f16}) {
        Case c{.m = 601, .n = 45, .k = 1601, .transpose_a = true, .beta = 0.5f};
        c.a = c.b = c.c = c.d = c.bias = type;
        c.epilogue = CUBLASLT_EPILOGUE_DGELU_BGRAD;
        check(c);
        c.m = 60, c.n = 777, c.k = 100;
        check(c);
#ifdef CUDA_ON_CPU
        c.order_d = row;
        check(c);
        c.m = 777, c.n = 60;
        check(c);
        c.epilogue = CUBLASLT_EPILOGUE_BIAS;
        check(c);
#endif
    }
}

TEST_CASE("cublasLt: the same call gives the same bits", "[cublaslt]") {
    for (const Type& type : {f32, bf16}) {
        Matrices A(type, 300, 500, true), B(type, 500, 210, true), D(type, 300, 210, false),
            again(type, 300, 210, false);
        Operation operation;
        const float one = 1, zero = 0;
        for (Matrices* d : {&D, &again})
            REQUIRE(cublasLtMatmul(handle(), operation.description, &one, A.device, A.layout, B.device, B.layout, &zero,
                                   nullptr, d->layout, d->device, d->layout, nullptr, nullptr, 0,
                                   nullptr) == CUBLAS_STATUS_SUCCESS);
        D.download(), again.download();
        CHECK((D.host == again.host));  // the inner brackets: do not print the matrices
    }
}

#if defined(CUDA_ON_CPU) && defined(__FP_FAST_FMAF)
// cpu/sgemm.h's promise: an element is formed by fused multiply-adds in the order of k, anew for each 384 of them. So
// its bits do not depend on the shape of the matrices, its place in them, or the width of the CPU's vectors.
TEST_CASE("cublasLt: an element's bits come from its row and column alone", "[cublaslt][shapes]") {
    const int64_t sizes[][3] = {{1, 1, 1}, {1, 33, 771}, {65, 1, 384}, {49, 9, 385}, {101, 57, 803}, {210, 130, 33}};
    for (const auto& [m, n, k] : sizes)
        for (int choice = 0; choice < 8; ++choice)
            for (const Type& type : {f32, bf16, f16}) {
                const bool transpose_a = choice & 1, transpose_b = choice & 2;
                const float alpha = choice & 4 ? 0.7f : 1, beta = choice & 4 ? -0.3f : 0;
                INFO("m n k " << m << " " << n << " " << k << "  choice " << choice << "  type " << type.id);
                Matrices A(type, transpose_a ? k : m, transpose_a ? m : k, true);
                Matrices B(type, transpose_b ? n : k, transpose_b ? k : n, true), D(f32, m, n, true);
                const std::vector<char> before = D.host;
                Operation operation;
                operation.attribute(CUBLASLT_MATMUL_DESC_TRANSA, int32_t(transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N));
                operation.attribute(CUBLASLT_MATMUL_DESC_TRANSB, int32_t(transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N));
                REQUIRE(multiply(operation, alpha, A, B, beta, D, D) == CUBLAS_STATUS_SUCCESS);
                D.download();
                int64_t wrong = 0;
                for (int64_t i = 0; i < m; ++i)
                    for (int64_t j = 0; j < n; ++j) {
                        float sum = load(f32, &before[D.offset(0, i, j)]);
                        for (int64_t first = 0; first < k; first += 384) {
                            float part = 0;
                            for (int64_t l = first; l < std::min(first + 384, k); ++l)
                                part = std::fma(float(A.op(transpose_a, 0, i, l)), float(B.op(transpose_b, 0, l, j)),
                                                part);
                            const float panel_beta = first == 0 ? beta : 1;
                            sum = panel_beta == 0 ? alpha * part : std::fma(alpha, part, panel_beta * sum);
                        }
                        wrong += sum != float(D.at(0, i, j));
                    }
                CHECK(wrong == 0);
            }
}

// Up to 64 columns with contiguous rows of A go other ways (cpu/few_columns.h), which divide long sums.
TEST_CASE("cublasLt: few columns have the bits that they have among many", "[cublaslt]") {
    const int64_t sizes[][2] = {{1, 5}, {15, 16}, {32, 384}, {49, 400}, {112, 771}, {127, 1152}, {400, 400}, {6, 8300}};
    for (const auto& [m_any, k_any] : sizes)
        for (const Type& type : {f32, bf16, f16, e4m3, e5m2}) {
            const int64_t grain = type.bytes == 1 ? 16 : 1, most = 70;  // fp8 has whole 16 rows and k's
            const int64_t m = (m_any + grain - 1) / grain * grain, k = (k_any + grain - 1) / grain * grain;
            Matrices A(type, k, m, true, 1, false, col, 16),
                B(type.id == e5m2.id ? e4m3 : type, k, most, true, 1, false, col, 16), bias(f32, m, 1, true);
            const bool biased = type.bytes > 1 && m % 2 == 1;
            const float alpha = m % 3 == 0 ? 1.0f : 0.7f, beta = biased ? 0.0f : -0.3f;
            const auto columns = [&](int64_t n) {
                generator.seed(7);  // the same old D
                Matrices D(f32, m, most, true), D_n(f32, m, n, false), B_n(B.type, k, n, false, 1, false, col, 16);
                Operation operation;
                operation.attribute(CUBLASLT_MATMUL_DESC_TRANSA, int32_t(CUBLAS_OP_T));
                if (biased) {
                    operation.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t(CUBLASLT_EPILOGUE_BIAS));
                    operation.attribute(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device);
                }
                REQUIRE(cublasLtMatmul(handle(), operation.description, &alpha, A.device, A.layout, B.device,
                                       B_n.layout, &beta, D.device, D_n.layout, D.device, D_n.layout, nullptr, nullptr,
                                       0, nullptr) == CUBLAS_STATUS_SUCCESS);
                D.download();
                return D.host;
            };
            in_each_way(A.type, B.type, [&] {
                const std::vector<char> all = columns(most);
                for (const int64_t n : {1, 2, 3, 5, 8, 11, 13, 16, 17, 24, 25, 33, 48, 49, 64}) {
                    INFO("m n k " << m << " " << n << " " << k << "  type " << type.id);
                    const std::vector<char> few = columns(n);
                    const size_t bytes = all.size() / size_t(most) * size_t(n);
                    CHECK(std::memcmp(few.data(), all.data(), bytes) == 0);
                }
            });
        }
}

// Where D is cut depends on the number of threads.
TEST_CASE("cublasLt: the number of threads does not change a bit", "[cublaslt]") {
    const int threads_before = omp_get_max_threads();
    const auto check_bits = [](const Operation& operation, const Matrices& A, const Matrices& B, Matrices& D) {
        std::vector<char> with_one_thread;
        for (int threads : {1, 2, 3, 7}) {
            omp_set_num_threads(threads);
            REQUIRE(multiply(operation, 1, A, B, 0, D, D) == CUBLAS_STATUS_SUCCESS);
            D.download();
            if (threads == 1) with_one_thread = D.host;
            INFO("threads " << threads);
            CHECK((D.host == with_one_thread));
        }
    };
    const int64_t sizes[][3] = {{256, 768, 768}, {257, 769, 771}, {33, 65, 129}, {1, 768, 768}, {100, 100, 2000}};
    for (const auto& [m, n, k] : sizes)
        for (const Type& type : {f32, bf16}) {
            INFO("m n k " << m << " " << n << " " << k << "  type " << type.id);
            Matrices A(type, k, m, true), B(type, k, n, true), D(f32, m, n, false);
            Operation operation;
            operation.attribute(CUBLASLT_MATMUL_DESC_TRANSA, int32_t(CUBLAS_OP_T));
            in_each_way(type, type, [&] { check_bits(operation, A, B, D); });
        }
    // Blocks of k with scales, the last one short.
    const int64_t m = 272, n = 516, k = 784;
    Matrices A(e4m3, k, m, true, 1, false, col, 16), B(e4m3, k, n, true, 1, false, col, 16), D(f32, m, n, false);
    BlockScales a(kVector, m, k), b(kSquare, n, k);
    Operation operation;
    use_scales(operation, a, b);
    INFO("block scales");
    check_bits(operation, A, B, D);
    omp_set_num_threads(threads_before);
}
#endif

TEST_CASE("cublasLt: the call has seen its arguments when it returns", "[cublaslt]") {
    cudaStream_t stream;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    Matrices A(f32, 4, 4, true), B(f32, 4, 4, true), D(f32, 4, 4, false);
    {
        Operation operation;
        cublasLtMatrixLayout_t a_layout, d_layout;
        cublasLtMatrixLayoutCreate(&a_layout, CUDA_R_32F, 4, 4, A.ld);
        cublasLtMatrixLayoutCreate(&d_layout, CUDA_R_32F, 4, 4, D.ld);
        float alpha = 1, beta = 0;
        REQUIRE(cublasLtMatmul(handle(), operation.description, &alpha, A.device, a_layout, B.device, B.layout, &beta,
                               D.device, d_layout, D.device, d_layout, nullptr, nullptr, 0,
                               stream) == CUBLAS_STATUS_SUCCESS);
        alpha = beta = NAN;
        cublasLtMatrixLayoutDestroy(a_layout);
        cublasLtMatrixLayoutDestroy(d_layout);
    }
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    D.download();
    double want = 0;
    for (int k = 0; k < 4; ++k) want += A.at(0, 3, k) * B.at(0, k, 2);
    CHECK(D.at(0, 3, 2) == Approx(want).margin(1e-6));

    // In pointer mode device they are read when the stream gets there.
    float* scalars;
    const float ready[2] = {2, 0};
    REQUIRE(cudaMalloc(&scalars, sizeof ready) == cudaSuccess);
    Operation operation;
    operation.attribute(CUBLASLT_MATMUL_DESC_POINTER_MODE, int32_t(CUBLASLT_POINTER_MODE_DEVICE));
    REQUIRE(cudaMemcpyAsync(scalars, ready, sizeof ready, cudaMemcpyHostToDevice, stream) == cudaSuccess);
    REQUIRE(cublasLtMatmul(handle(), operation.description, scalars, A.device, A.layout, B.device, B.layout,
                           scalars + 1, D.device, D.layout, D.device, D.layout, nullptr, nullptr, 0,
                           stream) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    D.download();
    CHECK(D.at(0, 3, 2) == Approx(2 * want).margin(1e-6));
    cudaFree(scalars);
    cudaStreamDestroy(stream);
}

TEST_CASE("cublasLt: what does not fit is refused", "[cublaslt]") {
    Matrices A(f32, 8, 5, true), B(f32, 5, 6, true), D(f32, 8, 6, false);
    Matrices A2(bf16, 8, 5, true), B2(bf16, 5, 6, true), D2(bf16, 8, 6, false), D3(f16, 8, 6, false);
    const float one = 1, zero = 0;
    const auto multiply = [&](Operation& operation, Matrices& a, Matrices& b, Matrices& d, const void* c = nullptr,
                              const float* beta = nullptr) {
        return cublasLtMatmul(handle(), operation.description, &one, a.device, a.layout, b.device, b.layout,
                              beta ? beta : &zero, beta ? c : d.device, d.layout, d.device, d.layout, nullptr, nullptr,
                              0, nullptr);
    };
    // Which of the two errors it is, of some mistakes only ours is known to say.
    const auto refused = [](cublasStatus_t status, cublasStatus_t ours) {
        return of_nvidia() ? status != CUBLAS_STATUS_SUCCESS : status == ours;
    };
    Operation plain;
    CHECK(multiply(plain, A, B, D) == CUBLAS_STATUS_SUCCESS);
    CHECK(multiply(plain, A, A, D) == CUBLAS_STATUS_INVALID_VALUE);                 // 5 against 8
    CHECK(multiply(plain, A, B, A) == CUBLAS_STATUS_INVALID_VALUE);                 // D has the wrong shape
    CHECK(multiply(plain, A, B, D, nullptr, &one) == CUBLAS_STATUS_INVALID_VALUE);  // beta != 0 needs C
    CHECK(multiply(plain, A, B2, D) == CUBLAS_STATUS_INVALID_VALUE);                // mixed inputs
    CHECK(multiply(plain, A, B, D2) == CUBLAS_STATUS_NOT_SUPPORTED);                // float in, bfloat16 out
    CHECK(multiply(plain, A2, B2, D3) == CUBLAS_STATUS_NOT_SUPPORTED);              // bfloat16 in, half out
    CHECK(multiply(plain, A2, B2, D) == CUBLAS_STATUS_SUCCESS);
#ifdef CUDA_ON_CPU  // NVIDIA's faults
    CHECK(cublasLtMatmul(nullptr, plain.description, &one, A.device, A.layout, B.device, B.layout, &zero, D.device,
                         D.layout, D.device, D.layout, nullptr, nullptr, 0, nullptr) != CUBLAS_STATUS_SUCCESS);
    CHECK(cublasLtMatmul(handle(), plain.description, nullptr, A.device, A.layout, B.device, B.layout, &zero, D.device,
                         D.layout, D.device, D.layout, nullptr, nullptr, 0, nullptr) == CUBLAS_STATUS_INVALID_VALUE);
    Operation without_bias, unknown;
    without_bias.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t(CUBLASLT_EPILOGUE_BIAS));
    CHECK(multiply(without_bias, A, B, D) == CUBLAS_STATUS_INVALID_VALUE);
    unknown.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t(12345));
    CHECK(multiply(unknown, A, B, D) != CUBLAS_STATUS_SUCCESS);
#endif

    A.attribute(CUBLASLT_MATRIX_LAYOUT_LD, int64_t(7));  // fewer than the rows
    CHECK(refused(multiply(plain, A, B, D), CUBLAS_STATUS_INVALID_VALUE));
    A.attribute(CUBLASLT_MATRIX_LAYOUT_LD, A.ld);
    A.attribute(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t(2));  // B and D have 1
    CHECK(refused(multiply(plain, A, B, D), CUBLAS_STATUS_INVALID_VALUE));
    A.attribute(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t(1));

    Matrices bias(f32, 8, 1, true);
    Operation biased;
    biased.attribute(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device);
    biased.attribute(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, bias.stride);
    biased.attribute(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(CUDA_R_32F));
    CHECK(multiply(biased, A, B, D) == CUBLAS_STATUS_INVALID_VALUE);  // no epilogue that adds it
    Operation with_aux;
    with_aux.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t(CUBLASLT_EPILOGUE_GELU_AUX));
    with_aux.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, D2.device);
    with_aux.attribute(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(9));           // not a multiple of 8
    if (!of_nvidia()) CHECK(multiply(with_aux, A, B, D) != CUBLAS_STATUS_SUCCESS);  // float32: an H100's takes it
    Operation integer(CUBLAS_COMPUTE_32I);
    CHECK(refused(multiply(integer, A, B, D), CUBLAS_STATUS_NOT_SUPPORTED));

    Matrices A8(e4m3, 32, 16, true), B8(e4m3, 32, 16, true), D16(bf16, 16, 16, false);
    Operation fp8;
    fp8.attribute(CUBLASLT_MATMUL_DESC_TRANSA, int32_t(CUBLAS_OP_T));
    CHECK(multiply(fp8, A8, B8, D16) == CUBLAS_STATUS_SUCCESS);
    Matrices A8n(e4m3, 16, 32, true);
    CHECK(refused(multiply(plain, A8n, B8, D16), CUBLAS_STATUS_NOT_SUPPORTED));  // A must be transposed
    Matrices A5(e5m2, 32, 16, true), B5(e5m2, 32, 16, true);
    CHECK(refused(multiply(fp8, A5, B5, D16), CUBLAS_STATUS_NOT_SUPPORTED));  // e5m2 times e5m2
#ifdef CUDA_ON_CPU
    const auto multiply_to = [&](Operation& operation, Matrices& a, Matrices& b, void* c, Matrices& c_like, void* d,
                                 Matrices& d_like) {
        return cublasLtMatmul(handle(), operation.description, &one, a.device, a.layout, b.device, b.layout, &one, c,
                              c_like.layout, d, d_like.layout, nullptr, nullptr, 0, nullptr);
    };
    Matrices wide(f32, 8, 6, false, 1, false, col, 32), spread(f32, 8, 6, false);
    wide.attribute(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, D.stride);
    spread.attribute(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, D.stride + 8);
    for (Matrices* other : {&wide, &spread})  // in place, but C's elements, or matrices, lie elsewhere
        CHECK(multiply_to(plain, A, B, D.device, *other, D.device, D) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(multiply_to(fp8, A8, B8, D16.device, D16, static_cast<char*>(D16.device) + 8, D16) ==
          CUBLAS_STATUS_NOT_SUPPORTED);  // fp8 needs 16 bytes
    for (Matrices* each : {&A, &B, &D}) {
        each->attribute(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t(2));
        each->attribute(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, int64_t(0));
    }
    CHECK(multiply(plain, A, B, D) == CUBLAS_STATUS_INVALID_VALUE);  // two results in one place
#endif
}

TEST_CASE("cublasLt: attributes and the search for an algorithm", "[cublaslt]") {
    Operation operation;
    int32_t transpose = CUBLAS_OP_T, read_back = -1;
    int64_t wide = 0;
    size_t bytes = 0;
    const auto name = CUBLASLT_MATMUL_DESC_TRANSA;
    CHECK(cublasLtMatmulDescSetAttribute(operation.description, name, &transpose, 4) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasLtMatmulDescSetAttribute(operation.description, name, &wide, 8) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(cublasLtMatmulDescSetAttribute(operation.description, name, nullptr, 4) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(cublasLtMatmulDescSetAttribute(nullptr, name, &transpose, 4) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(cublasLtMatmulDescSetAttribute(operation.description, cublasLtMatmulDescAttributes_t(99), &transpose, 4) ==
          CUBLAS_STATUS_INVALID_VALUE);
    CHECK(cublasLtMatmulDescGetAttribute(operation.description, name, nullptr, 0, &bytes) == CUBLAS_STATUS_SUCCESS);
    CHECK(bytes == 4);
    CHECK(cublasLtMatmulDescGetAttribute(operation.description, name, &read_back, 4, nullptr) == CUBLAS_STATUS_SUCCESS);
    CHECK(read_back == CUBLAS_OP_T);
    CHECK(cublasLtMatmulDescGetAttribute(operation.description, name, &read_back, 3, &bytes) ==
          CUBLAS_STATUS_INVALID_VALUE);

    Matrices A(bf16, 40, 24, true), B(bf16, 40, 16, true), D(bf16, 24, 16, false), bad(f16, 24, 16, false);
    cublasLtMatmulPreference_t preference;
    REQUIRE(cublasLtMatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS);
    const size_t workspace = 1 << 22;
    const uint32_t alignment = 16;
    CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, 8) ==
          CUBLAS_STATUS_SUCCESS);
    CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment, 4) ==
          CUBLAS_STATUS_SUCCESS);
    CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &workspace, 8) ==
          CUBLAS_STATUS_INVALID_VALUE);
    cublasLtMatmulHeuristicResult_t results[2];
    int count = -1;
    CHECK(cublasLtMatmulAlgoGetHeuristic(handle(), operation.description, A.layout, B.layout, D.layout, D.layout,
                                         preference, 2, results, &count) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(count >= 1);
    CHECK(results[0].state == CUBLAS_STATUS_SUCCESS);
    CHECK(results[0].workspaceSize <= workspace);
    const int before = count;
    CHECK(cublasLtMatmulAlgoGetHeuristic(handle(), operation.description, A.layout, B.layout, bad.layout, bad.layout,
                                         preference, 2, results, &count) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(count == before);  // not written where there is an error
    cublasLtMatmulPreferenceDestroy(preference);

    CHECK(std::string(cublasLtGetStatusName(CUBLAS_STATUS_NOT_SUPPORTED)) == "CUBLAS_STATUS_NOT_SUPPORTED");
    CHECK(std::string(cublasLtGetStatusString(cublasStatus_t(99))) == "unrecognized status");
}
