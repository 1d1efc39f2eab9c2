// test/test_ptx.cu: the instructions of layers/ptx.cuh. On the CPU device they are held against the tables of the PTX
// manual; with DEVICE=cuda the same tests ask the hardware whether the tables are right.
#include "layers/ptx.cuh"
#include "reference.h"

namespace {

// Four matrices of 8 x 8: matrix i, row r, column c holds 64 i + 8 r + c. out (32 lanes, 4): what each lane gets.
template <bool kTranspose>
__global__ void ldmatrix_kernel(int32_t* out) {
    __shared__ __align__(16) uint16_t matrices[32][8];
    const int lane = static_cast<int>(threadIdx.x);
    for (int c = 0; c < 8; ++c) matrices[lane][c] = static_cast<uint16_t>(8 * lane + c);
    __syncthreads();
    uint32_t r[4];
    ldmatrix_x4<kTranspose>(r, matrices[lane]);
    for (int i = 0; i < 4; ++i) out[4 * lane + i] = static_cast<int32_t>(r[i]);
}

// c (16, 8) += a (16, 16) b (16, 8), row-major in device memory, each lane fetching its fragments by the manual's
// tables.
template <class Number, bool kByShuffles = false>
__global__ void mma_kernel(float* c, const Number* a, const Number* b) {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    uint32_t fa[4], fb[2];
    float fc[4];
    for (int i = 0; i < 4; ++i) {
        const int row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
        fa[i] = pack<Number>(to_float(a[row * 16 + column]), to_float(a[row * 16 + column + 1]));
        fc[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    }
    for (int i = 0; i < 2; ++i) {
        const int row = 2 * t + i * 8;
        fb[i] = pack<Number>(to_float(b[row * 8 + g]), to_float(b[(row + 1) * 8 + g]));
    }
    if constexpr (kByShuffles) {
        const float4 sums =
            mma_bf16_by_shuffles({fa[0], fa[1], fa[2], fa[3]}, {fb[0], fb[1]}, {fc[0], fc[1], fc[2], fc[3]});
        fc[0] = sums.x, fc[1] = sums.y, fc[2] = sums.z, fc[3] = sums.w;
    } else {
        mma_m16n8k16<Number>(fc, fa, fb);
    }
    for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = fc[i];
}

// out[0, 128): inp reversed, by a first group of copies; out[128, 256): a second group that copies the first half of
// inp and writes zeros behind it.
__global__ void copy_kernel(float* out, const float* inp) {
    __shared__ __align__(16) float first[128], second[128];
    const unsigned t = threadIdx.x;
    cp_async_16(first + 4 * t, inp + 4 * t);
    cp_async_commit();
    cp_async_16(second + 4 * t, inp + 4 * t, t < 16);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();  // every thread's first group has landed
    for (unsigned i = t; i < 128; i += 32) out[i] = first[127 - i];
    cp_async_wait<0>();
    __syncthreads();  // and the second
    for (unsigned i = t; i < 128; i += 32) out[128 + i] = second[i];
}

__global__ void ex2_kernel(float* out, const float* inp, int n) {
    const int i = static_cast<int>(global_thread());
    if (i < n) out[i] = ex2_approx(inp[i]);
}
template <class Number>
__global__ void pack_kernel(int32_t* out, const float* inp, int n) {
    const int i = static_cast<int>(global_thread());
    if (i < n) out[i] = static_cast<int32_t>(pack<Number>(inp[2 * i], inp[2 * i + 1]));
}

}  // namespace

TEST_CASE("ptx: ldmatrix", "[ptx]") {
    Buffer plain(DType::i32, {32, 4}), transposed(DType::i32, {32, 4});
    ldmatrix_kernel<false><<<1, 32, 0, device().stream>>>(plain.tensor().ptr<int32_t>());
    cudaCheckLaunch();
    ldmatrix_kernel<true><<<1, 32, 0, device().stream>>>(transposed.tensor().ptr<int32_t>());
    cudaCheckLaunch();
    const auto p = plain.values(), q = transposed.values();
    for (int l = 0; l < 32; ++l)
        for (int i = 0; i < 4; ++i) {
            const int g = l / 4, t = l % 4, at = 64 * i;
            INFO("lane " << l << ", matrix " << i);
            CHECK(p[static_cast<size_t>(4 * l + i)] == at + 8 * g + 2 * t + 65536.0 * (at + 8 * g + 2 * t + 1));
            CHECK(q[static_cast<size_t>(4 * l + i)] == at + 16 * t + g + 65536.0 * (at + 16 * t + 8 + g));
        }
}

TEST_CASE("ptx: mma", "[ptx]") {
    for (DType dtype : {DType::bf16, DType::f16}) {
        const auto x = rounded(random_values(256, 1), dtype), y = rounded(random_values(128, 2), dtype),
                   z = rounded(random_values(128, 3), DType::f32);
        Buffer a(dtype, {16, 16}, x), b(dtype, {16, 8}, y), c(DType::f32, {16, 8}, z);
        dispatch(dtype, [&](auto zero) {
            using Number = decltype(zero);
            if constexpr (!std::is_same_v<Number, float>) {
                mma_kernel<Number><<<1, 32, 0, device().stream>>>(c.tensor().ptr<float>(), a.tensor().ptr<Number>(),
                                                                  b.tensor().ptr<Number>());
                cudaCheckLaunch();
            }
        });
        std::vector<double> expected = z;
        for (size_t i = 0; i < 16; ++i)
            for (size_t j = 0; j < 8; ++j)
                for (size_t k = 0; k < 16; ++k) expected[i * 8 + j] += x[i * 16 + k] * y[k * 8 + j];
        // Products are exact; 16 sums of some units' size are rounded in float32, on a GPU perhaps towards zero.
        check_close(c.values(), expected, 0, 16 * 0x1p-23 * largest(expected), "mma");
    }
}

// What GPUs before sm_80 compute with instead.
TEST_CASE("ptx: mma of bf16 by shuffles", "[ptx]") {
    const auto x = rounded(random_values(256, 1), DType::bf16), y = rounded(random_values(128, 2), DType::bf16),
               z = rounded(random_values(128, 3), DType::f32);
    Buffer a(DType::bf16, {16, 16}, x), b(DType::bf16, {16, 8}, y), c(DType::f32, {16, 8}, z);
    mma_kernel<__nv_bfloat16, true><<<1, 32, 0, device().stream>>>(
        c.tensor().ptr<float>(), a.tensor().ptr<__nv_bfloat16>(), b.tensor().ptr<__nv_bfloat16>());
    cudaCheckLaunch();
    std::vector<double> expected = z;
    for (size_t i = 0; i < 16; ++i)
        for (size_t j = 0; j < 8; ++j)
            for (size_t k = 0; k < 16; ++k)
                expected[i * 8 + j] = std::fma(static_cast<float>(x[i * 16 + k]), static_cast<float>(y[k * 8 + j]),
                                               static_cast<float>(expected[i * 8 + j]));
    CHECK(c.values() == expected);  // the same bits: the sums are in the same order
}

TEST_CASE("ptx: cp.async", "[ptx]") {
    const auto x = rounded(random_values(128, 4), DType::f32);
    Buffer inp(DType::f32, {128}, x), out(DType::f32, {256});
    copy_kernel<<<1, 32, 0, device().stream>>>(out.tensor().ptr<float>(), inp.tensor().ptr<float>());
    cudaCheckLaunch();
    std::vector<double> expected(x.rbegin(), x.rend());
    expected.insert(expected.end(), x.begin(), x.begin() + 64);
    expected.resize(256, 0.0);
    CHECK(out.values() == expected);
}

TEST_CASE("ptx: ex2.approx", "[ptx]") {
    std::vector<double> x = {0, 1, -1, 10, -125, 127.5, -200, -INFINITY};
    for (double value : random_values(100, 5, 20.0)) x.push_back(static_cast<float>(value));
    const int n = static_cast<int>(x.size());
    Buffer inp(DType::f32, {n}, x), out(DType::f32, {n});
    ex2_kernel<<<1, 128, 0, device().stream>>>(out.tensor().ptr<float>(), inp.tensor().ptr<float>(), n);
    cudaCheckLaunch();
    const auto y = out.values();
    for (size_t i = 0; i < x.size(); ++i)  // the manual: 2^-22; results below the smallest normal number are flushed
        CHECK(y[i] == Approx(x[i] < -126 ? 0.0 : std::exp2(x[i])).epsilon(0x1p-22).margin(0x1p-126));
}

TEST_CASE("ptx: pack", "[ptx]") {
    const auto x = rounded(random_values(64, 6), DType::f32);
    Buffer inp(DType::f32, {64}, x), bf16(DType::i32, {32}), f16(DType::i32, {32});
    pack_kernel<__nv_bfloat16>
        <<<1, 32, 0, device().stream>>>(bf16.tensor().ptr<int32_t>(), inp.tensor().ptr<float>(), 32);
    cudaCheckLaunch();
    pack_kernel<__half><<<1, 32, 0, device().stream>>>(f16.tensor().ptr<int32_t>(), inp.tensor().ptr<float>(), 32);
    cudaCheckLaunch();
    for (auto [dtype, packed] : {std::pair{DType::bf16, &bf16}, std::pair{DType::f16, &f16}}) {
        Buffer as_numbers(dtype, {64});
        const auto bits = packed->bits();
        copy_to_device(as_numbers, bits.data());
        CHECK(as_numbers.values() == rounded(x, dtype));  // low half first, rounded to nearest even
    }
}
