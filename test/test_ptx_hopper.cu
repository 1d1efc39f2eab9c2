// test/test_ptx_hopper.cu: Hopper's instructions (the second half of layers/ptx.cuh) against plain loops. Inputs are
// small integers, so that every product and sum is exact and results must be equal, on whichever device.
#include "layers/layers.h"
#include "layers/ptx.cuh"
#include "layers/tensor_map.h"
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace {

#define NEEDS_HOPPER \
    if (!has_wgmma()) SKIP_TEST("needs a GPU of compute capability 9.0")

void finish() { cudaCheck(cudaStreamSynchronize(device().stream)); }

// Integers from -8 to 8: exact in all dtypes, and so are sums of 96 products of two of them.
std::vector<double> small_integers(int64_t n, uint64_t seed) {
    std::vector<double> values = random_values(n, seed, 3.0);
    for (double& x : values) x = std::clamp(std::nearbyint(x), -8.0, 8.0);
    return values;
}

// Says where large results differ; a CHECK of the two would print all of both.
void check_equal(const std::vector<double>& got, const std::vector<double>& expected) {
    REQUIRE(got.size() == expected.size());
    std::ostringstream first;
    size_t n_wrong = 0;
    for (size_t i = 0; i < got.size(); ++i)
        if (got[i] != expected[i] && ++n_wrong <= 8)
            first << "\n  element " << i << " is " << got[i] << ", expected " << expected[i];
    INFO(n_wrong << " of " << got.size() << " elements differ:" << first.str());
    CHECK(n_wrong == 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// mbarriers and bulk copies: a ring of stages. Warp 0 fills, warps 1 to 4 add 1 and let warp 0 store.

constexpr int kStages = 3, kStageFloats = 4 * kWarp;

__global__ void ring_kernel(float* out, const float* inp, int n_tiles) {
    __shared__ __align__(128) float stages[kStages][kStageFloats];
    __shared__ __align__(128) float results[kStages][kStageFloats];
    __shared__ __align__(8) uint64_t full[kStages];
    __shared__ __align__(8) uint64_t empty[kStages];
    const int warp = threadIdx.x / kWarp;
    if (threadIdx.x == 0)
        for (int i = 0; i < kStages; ++i) mbarrier_init(&full[i], 1), mbarrier_init(&empty[i], 4);
    fence_proxy_async();
    __syncthreads();
    if (warp == 0) {
        if (elect_one()) {
            for (int tile = 0; tile < n_tiles; ++tile) {
                const int i = tile % kStages;
                mbarrier_wait(&empty[i], (tile / kStages + 1) % 2);
                mbarrier_arrive_expect_tx(&full[i], sizeof stages[i]);
                bulk_load(stages[i], inp + tile * kStageFloats, sizeof stages[i], &full[i]);
            }
        }
    } else {
        const int t = static_cast<int>(threadIdx.x) - kWarp;
        for (int tile = 0; tile < n_tiles; ++tile) {
            const int i = tile % kStages;
            mbarrier_wait(&full[i], tile / kStages % 2);
            const float x = stages[i][t];
            __syncwarp();
            if (t % kWarp == 0) mbarrier_arrive(&empty[i]);
            if (t == 0) bulk_wait_read<kStages - 1>();  // the store of this result three tiles ago
            named_barrier_sync(1, 128);
            results[i][t] = x + 1;
            fence_proxy_async();
            named_barrier_sync(1, 128);
            if (t == 0) {
                bulk_store(out + tile * kStageFloats, results[i], sizeof results[i]);
                bulk_commit();
            }
        }
        if (t == 0) bulk_wait<0>();
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 0; i < kStages; ++i) mbarrier_invalidate(&full[i]), mbarrier_invalidate(&empty[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Named barriers: two groups of threads take turns, as the two consumers of flash attention do.

__global__ void turns_kernel(float* out) {
    __shared__ int n_turns;
    const unsigned group = threadIdx.x / 64, lane = threadIdx.x % 64;
    if (threadIdx.x == 0) n_turns = 0;
    __syncthreads();
    if (group == 1) named_barrier_arrive(1, 128);  // group 0 may begin
    for (int round = 0; round < 3; ++round) {
        named_barrier_sync(1 + group, 128);
        if (lane == 0) out[group * 3 + round] = static_cast<float>(n_turns++);
        if (group == 0 || round < 2) named_barrier_arrive(2 - group, 128);
    }
}

// A count in device memory: one warp's thread stores a tile, reads the last number of it, and counts; another one's
// waits for that, and adds to it.
__global__ void counts_kernel(float* sum, int* count) {
    __shared__ __align__(128) float parts[2][4];
    const unsigned turn = threadIdx.x / kWarp;
    if (threadIdx.x % kWarp > 0) return;
    for (int i = 0; i < 4; ++i) parts[turn][i] = static_cast<float>(turn * 10 + i);
    fence_proxy_async();
    if (turn > 0) wait_for_count(count, 1);
    if (turn == 0) bulk_store(sum, parts[turn], sizeof parts[turn]);
    else bulk_add(sum, parts[turn], sizeof parts[turn]);
    bulk_commit();
    bulk_wait<0>();
    if (turn == 0) sum[4] = sum[3];
    set_count(count, static_cast<int>(turn) + 1);
}

__global__ void elect_kernel(float* out) {
    const bool first = elect_one(), second = elect_one();
    out[threadIdx.x] = first ? 1.0f : 0.0f;
    out[32 + threadIdx.x] = second ? 1.0f : 0.0f;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensor copies: a box is loaded; its elements as they lie in shared memory go to `packed`; doubled, it is stored to
// another tensor, at the same place, or, where a coordinate is negative, from 0 on in that dimension.

template <class Number, int kRank>
__global__ void box_kernel(Number* packed, const __grid_constant__ CUtensorMap from,
                           const __grid_constant__ CUtensorMap to, int x, int y, int z, int w, int n) {
    __shared__ __align__(8) uint64_t landed;
    Number* tile = reinterpret_cast<Number*>(shared_tiles());
    int at[kRank], to_at[kRank];
    const int all[4] = {x, y, z, w};
    for (int d = 0; d < kRank; ++d) at[d] = all[d], to_at[d] = max(all[d], 0);
    if (threadIdx.x == 0) {
        mbarrier_init(&landed, 1);
        fence_proxy_async();
        mbarrier_arrive_expect_tx(&landed, static_cast<uint32_t>(n * sizeof(Number)));
        tensor_load<kRank>(tile, &from, at, &landed);
    }
    __syncthreads();
    mbarrier_wait(&landed, 0);
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
        packed[i] = tile[i];
        tile[i] = from_float<Number>(2 * to_float(tile[i]));
    }
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        tensor_store<kRank>(&to, to_at, tile);
        bulk_commit();
        bulk_wait<0>();
    }
}

template <class Number, int kRank>
void check_box(DType dtype, std::array<int64_t, 4> dims, std::array<int64_t, 4> box, std::array<int, 4> at,
               int swizzle) {
    // Between rows of the tensors there are elements that no box may touch. Rows that are stored to are whole chunks.
    const int64_t per_chunk = 16 / static_cast<int64_t>(sizeof(Number)), to_row = round_up(dims[0], per_chunk);
    const int64_t pitch = round_up(dims[0], int64_t{8}) + 8;
    int64_t n_box = 1;
    for (size_t d = 0; d < kRank; ++d) n_box *= box[d];
    for (size_t d = kRank; d < 4; ++d) dims[d] = box[d] = 1;
    const int64_t n = pitch * dims[1] * dims[2] * dims[3];
    const std::vector<double> values = small_integers(n, 5);
    Buffer from(dtype, {n}, values), to(dtype, {n}, std::vector<double>(static_cast<size_t>(n), 7.0)),
        packed(dtype, {n_box});
    const auto map = [&](const Buffer& data, int64_t row) {
        const int64_t s1 = pitch, s2 = pitch * dims[1], s3 = s2 * dims[2];
        const void* start = data.tensor().data;
        if constexpr (kRank == 2) return make_tensor_map(start, dtype, {row, dims[1]}, {s1}, {box[0], box[1]}, swizzle);
        else if constexpr (kRank == 3)
            return make_tensor_map(start, dtype, {row, dims[1], dims[2]}, {s1, s2}, {box[0], box[1], box[2]}, swizzle);
        else
            return make_tensor_map(start, dtype, {row, dims[1], dims[2], dims[3]}, {s1, s2, s3},
                                   {box[0], box[1], box[2], box[3]}, swizzle);
    };
    const size_t bytes =
        static_cast<size_t>(ceil_div(n_box * static_cast<int64_t>(sizeof(Number)), int64_t{1024})) * 1024;
    box_kernel<Number, kRank><<<1, 64, bytes + kTileAlignment, device().stream>>>(
        static_cast<Number*>(packed.tensor().data), map(from, dims[0]), map(to, to_row), at[0], at[1], at[2], at[3],
        static_cast<int>(n_box));
    cudaCheckLaunch();
    finish();
    // Which element of the box is at each place: chunks of 16 bytes change places within lines of 128 bytes.
    std::vector<double> expected_packed(static_cast<size_t>(n_box)), expected_to(static_cast<size_t>(n), 7.0);
    const int64_t chunks_in_pattern = std::max(swizzle / 16, 1);
    const auto offset = [&](const int64_t(&c)[4]) {
        return static_cast<size_t>(((c[3] * dims[2] + c[2]) * dims[1] + c[1]) * pitch + c[0]);
    };
    for (int64_t i = 0; i < n_box; ++i) {
        int64_t c[4] = {i % box[0], i / box[0] % box[1], i / box[0] / box[1] % box[2], i / box[0] / box[1] / box[2]};
        int64_t to_c[4];
        bool inside = true, to_inside = true;
        for (size_t d = 0; d < 4; ++d) {
            to_c[d] = c[d] + (d < kRank ? std::max(at[d], 0) : 0), c[d] += d < kRank ? at[d] : 0;
            inside = inside && c[d] >= 0 && c[d] < dims[d];
            to_inside = to_inside && to_c[d] < (d == 0 ? to_row : dims[d]);
        }
        const int64_t chunk = i / per_chunk, line = chunk / 8;
        const int64_t moved = chunk / chunks_in_pattern * chunks_in_pattern + (chunk ^ line) % chunks_in_pattern;
        const double x = inside ? values[offset(c)] : 0.0;
        expected_packed[static_cast<size_t>(moved * per_chunk + i % per_chunk)] = x;
        if (to_inside) expected_to[offset(to_c)] = 2 * x;
    }
    INFO("rank " << kRank << ", swizzle " << swizzle << ", " << dtype_name(dtype) << ", at " << at[0] << " " << at[1]);
    check_equal(packed.values(), expected_packed);
    check_equal(to.values(), expected_to);
}

// ---------------------------------------------------------------------------------------------------------------------
// wgmma. Tiles are written by ordinary stores, element by element, where wgmma expects them: rows (mn, or k) in panels
// of kSwizzle bytes side by side (16 bytes without a swizzle), one panel behind the other.

template <int kSwizzle, int kRows>
__device__ __forceinline__ uint32_t panel_offset(int row, int column) {
    constexpr int S = kSwizzle == 0 ? 16 : kSwizzle;
    return swizzled<kSwizzle>(static_cast<uint32_t>(column / (S / 2) * kRows * S + row * S + column % (S / 2) * 2));
}
// The descriptor of the 16 k's from k on, of a tile with kMn rows or columns and kK of k.
template <int kSwizzle, bool kMnMajor, int kMn, int kK>
__device__ __forceinline__ uint64_t descriptor_at(const unsigned char* tile, int k) {
    constexpr int S = kSwizzle == 0 ? 16 : kSwizzle;
    if constexpr (kMnMajor) {
        const unsigned char* start = tile + k * S;
        if (kSwizzle == 0) return wgmma_descriptor<kSwizzle>(start, 128, kK * S);
        return wgmma_descriptor<kSwizzle>(start, kK * S, 8 * S);
    } else {
        const unsigned char* start = tile + k / (S / 2) * kMn * S + k % (S / 2) * 2;
        return wgmma_descriptor<kSwizzle>(start, kMn * S, 8 * S);
    }
}

// out (64 x N) = A (64 x kK) B (kK x N) + 1: twice, the second time onto the first.
constexpr int kK = 96;
template <class Number, int N, int kSwizzle, bool kAMnMajor, bool kBMnMajor, bool kARegisters>
struct Product {
    static constexpr int kAUp = 64 * 2 * (kK + 64), kBUp = 2 * (kBMnMajor ? (N + 64) * kK : N * (kK + 64));
    static constexpr int kABytes = (kAUp + 1023) / 1024 * 1024, kBBytes = (kBUp + 1023) / 1024 * 1024;
    static constexpr size_t kSharedBytes = kABytes + kBBytes + kTileAlignment;
};
template <class Number, int N, int kSwizzle, bool kAMnMajor, bool kBMnMajor, bool kARegisters>
__global__ void product_kernel(float* out, const Number* A, const Number* B) {
    using P = Product<Number, N, kSwizzle, kAMnMajor, kBMnMajor, kARegisters>;
    unsigned char *a_tile = shared_tiles(), *b_tile = a_tile + P::kABytes;
    const auto put = [](unsigned char* tile, uint32_t offset, Number x) {
        *reinterpret_cast<Number*>(tile + offset) = x;
    };
    for (int i = static_cast<int>(threadIdx.x); i < 64 * kK; i += 128) {
        const int m = i / kK, k = i % kK;
        put(a_tile, kAMnMajor ? panel_offset<kSwizzle, kK>(k, m) : panel_offset<kSwizzle, 64>(m, k), A[i]);
    }
    for (int i = static_cast<int>(threadIdx.x); i < kK * N; i += 128) {
        const int k = i / N, n = i % N;
        put(b_tile, kBMnMajor ? panel_offset<kSwizzle, kK>(k, n) : panel_offset<kSwizzle, N>(n, k), B[i]);
    }
    fence_proxy_async();
    __syncthreads();
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float d[N / 8][4];
    for (int j = 0; j < N / 8; ++j)
        for (int i = 0; i < 4; ++i) d[j][i] = 1.0f;
    for (int round = 0; round < 2; ++round) {
        if (!kARegisters) wgmma_fence(d);
        for (int k = 0; k < kK; k += 16) {
            const uint64_t b = descriptor_at<kSwizzle, kBMnMajor, N, kK>(b_tile, k);
            const bool accumulate = round > 0 || k > 0;
            if constexpr (kARegisters) {
                uint32_t a[1][4];
                for (int i = 0; i < 4; ++i) {
                    const Number* pair = A + (warp * 16 + g + i % 2 * 8) * kK + k + 2 * t + i / 2 * 8;
                    a[0][i] = pack<Number>(to_float(pair[0]), to_float(pair[1]));
                }
                wgmma_fence(d, a);
                wgmma_m64k16<Number, kBMnMajor>(d, a[0], b, accumulate);
                wgmma_commit();
                wgmma_wait<0>(d, a);
            } else {
                wgmma_m64k16<Number, kAMnMajor, kBMnMajor>(d, descriptor_at<kSwizzle, kAMnMajor, 64, kK>(a_tile, k), b,
                                                           accumulate);
                wgmma_commit();
            }
        }
        wgmma_wait<0>(d);
    }
    for (int j = 0; j < N / 8; ++j)
        for (int i = 0; i < 4; ++i) out[(warp * 16 + g + i / 2 * 8) * N + j * 8 + 2 * t + i % 2] = d[j][i] + 1;
}

template <class Number, int N, int kSwizzle, bool kAMnMajor, bool kBMnMajor, bool kARegisters = false>
void check_product(DType dtype) {
    using P = Product<Number, N, kSwizzle, kAMnMajor, kBMnMajor, kARegisters>;
    const std::vector<double> a = small_integers(64 * kK, 1), b = small_integers(kK * N, 2);
    Buffer A(dtype, {64, kK}, a), B(dtype, {kK, N}, b), out(DType::f32, {64, N});
    const auto kernel = product_kernel<Number, N, kSwizzle, kAMnMajor, kBMnMajor, kARegisters>;
    allow_shared(kernel, P::kSharedBytes);
    product_kernel<Number, N, kSwizzle, kAMnMajor, kBMnMajor, kARegisters>
        <<<1, 128, P::kSharedBytes, device().stream>>>(out.tensor().ptr<float>(), A.tensor().ptr<Number>(),
                                                       B.tensor().ptr<Number>());
    cudaCheckLaunch();
    finish();
    std::vector<double> expected(64 * N, 1.0);
    for (size_t m = 0; m < 64; ++m)
        for (size_t n = 0; n < N; ++n)
            for (size_t k = 0; k < kK; ++k) expected[m * N + n] += 2 * a[m * kK + k] * b[k * N + n];
    INFO("N " << N << ", swizzle " << kSwizzle << ", A "
              << (kARegisters ? "in registers"
                  : kAMnMajor ? "M-major"
                              : "K-major")
              << ", B " << (kBMnMajor ? "N-major" : "K-major") << ", " << dtype_name(dtype));
    check_equal(out.values(), expected);
}
template <class Number, int N, int kSwizzle>
void check_layouts(DType dtype) {
    check_product<Number, N, kSwizzle, false, false>(dtype);
    check_product<Number, N, kSwizzle, true, false>(dtype);
    check_product<Number, N, kSwizzle, false, true>(dtype);
    check_product<Number, N, kSwizzle, true, true>(dtype);
    check_product<Number, N, kSwizzle, false, false, true>(dtype);
    check_product<Number, N, kSwizzle, false, true, true>(dtype);
}

// ---------------------------------------------------------------------------------------------------------------------
// All together, as a matrix product has it: C (M x N) = A (M x K) B. One warp loads tiles of 64 x 64 into two stages, a
// warp group multiplies. B is (N x K), or (K x N). N is a multiple of 8, whole chunks of the copy engine; other columns
// would have to be stored by threads.

constexpr int kTileBytes = 64 * 64 * 2;

template <class Number, bool kBMnMajor>
__global__ void __launch_bounds__(256, 1)
    matmul_kernel(const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap A,
                  const __grid_constant__ CUtensorMap B, int n_tiles) {
    unsigned char* tiles = shared_tiles();  // A and B of stage 0, then of stage 1, then the result
    uint64_t* full = reinterpret_cast<uint64_t*>(tiles + 5 * kTileBytes);
    uint64_t* empty = full + 2;
    const int m0 = static_cast<int>(blockIdx.y) * 64, n0 = static_cast<int>(blockIdx.x) * 64;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) mbarrier_init(&full[i], 1), mbarrier_init(&empty[i], 1);
        fence_proxy_async();
    }
    __syncthreads();
    if (threadIdx.x >= 128) {
        give_registers<24>();
        if (threadIdx.x / kWarp == 4 && elect_one()) {
            for (int tile = 0; tile < n_tiles; ++tile) {
                const int i = tile % 2;
                unsigned char* stage = tiles + i * 2 * kTileBytes;
                mbarrier_wait(&empty[i], (tile / 2 + 1) % 2);
                mbarrier_arrive_expect_tx(&full[i], 2 * kTileBytes);
                tensor_load<2>(stage, &A, {tile * 64, m0}, &full[i]);
                if (kBMnMajor) tensor_load<2>(stage + kTileBytes, &B, {n0, tile * 64}, &full[i]);
                else tensor_load<2>(stage + kTileBytes, &B, {tile * 64, n0}, &full[i]);
            }
        }
    } else {
        take_registers<240>();
        float d[8][4];
        for (int tile = 0; tile < n_tiles; ++tile) {
            const int i = tile % 2;
            const unsigned char* stage = tiles + i * 2 * kTileBytes;
            mbarrier_wait(&full[i], tile / 2 % 2);
            const uint64_t a = wgmma_descriptor<128>(stage, 0, 1024);
            const uint64_t b = wgmma_descriptor<128>(stage + kTileBytes, kTileBytes, 1024);
            wgmma_fence(d);
            for (uint32_t k = 0; k < 4; ++k)
                wgmma_m64k16<Number, false, kBMnMajor>(
                    d, wgmma_advance(a, k * 32), wgmma_advance(b, k * (kBMnMajor ? 2048 : 32)), tile > 0 || k > 0);
            wgmma_commit();
            wgmma_wait<0>(d);
            if (threadIdx.x == 0) mbarrier_arrive(&empty[i]);
        }
        const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
        unsigned char* result = tiles + 4 * kTileBytes;
        for (uint32_t j = 0; j < 8; ++j)
            for (uint32_t half = 0; half < 2; ++half)
                *reinterpret_cast<uint32_t*>(result + swizzled<128>((row + half * 8) * 128 + (j * 8 + column) * 2)) =
                    pack<Number>(d[j][2 * half], d[j][2 * half + 1]);
        fence_proxy_async();
        named_barrier_sync(1, 128);
        if (threadIdx.x == 0) {
            tensor_store<2>(&out, {n0, m0}, result);
            bulk_commit();
            bulk_wait<0>();
        }
    }
}

template <class Number, bool kBMnMajor>
void check_matmul(DType dtype, int64_t M, int64_t N, int64_t K) {
    // Rows of a tensor are multiples of 16 bytes apart; a row's last elements are nobody's.
    const auto pitch = [](int64_t n) { return ceil_div(n, int64_t{8}) * 8; };
    std::vector<double> a(static_cast<size_t>(M * pitch(K)), 7.0), b;
    const std::vector<double> a_values = small_integers(M * K, 11);
    std::vector<double> b_values = random_values(N * K, 12, 1.0);  // -1, 0, 1: sums stay below 256, exact in bf16
    for (double& x : b_values) x = x > 1.5 ? 1.0 : x < -1.5 ? -1.0 : 0.0;
    for (int64_t m = 0; m < M; ++m)
        for (int64_t k = 0; k < K; ++k)
            a[static_cast<size_t>(m * pitch(K) + k)] = a_values[static_cast<size_t>(m * K + k)];
    const int64_t b_rows = kBMnMajor ? K : N, b_columns = kBMnMajor ? N : K;
    b.assign(static_cast<size_t>(b_rows * pitch(b_columns)), 7.0);
    for (int64_t n = 0; n < N; ++n)
        for (int64_t k = 0; k < K; ++k)
            b[static_cast<size_t>(kBMnMajor ? k * pitch(N) + n : n * pitch(K) + k)] =
                b_values[static_cast<size_t>(n * K + k)];
    Buffer A(dtype, {M, pitch(K)}, a), B(dtype, {b_rows, pitch(b_columns)}, b);
    const int64_t c_pitch = N + 8;
    Buffer C(dtype, {M, c_pitch}, std::vector<double>(static_cast<size_t>(M * c_pitch), 7.0));
    const auto map = [&](const Buffer& x, int64_t rows, int64_t columns, int64_t its_pitch) {
        return make_tensor_map(x.tensor().data, dtype, {columns, rows}, {its_pitch}, {64, 64}, 128);
    };
    const size_t bytes = 5 * kTileBytes + 1024 + kTileAlignment;
    allow_shared(matmul_kernel<Number, kBMnMajor>, bytes);
    const dim3 grid(static_cast<unsigned>(ceil_div(N, int64_t{64})), static_cast<unsigned>(ceil_div(M, int64_t{64})));
    matmul_kernel<Number, kBMnMajor><<<grid, 256, bytes, device().stream>>>(
        map(C, M, N, c_pitch), map(A, M, K, pitch(K)), map(B, b_rows, b_columns, pitch(b_columns)),
        static_cast<int>(ceil_div(K, int64_t{64})));
    cudaCheckLaunch();
    finish();
    std::vector<double> expected(static_cast<size_t>(M * c_pitch), 7.0);
    for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; ++n) {
            double sum = 0;
            for (int64_t k = 0; k < K; ++k)
                sum += a_values[static_cast<size_t>(m * K + k)] * b_values[static_cast<size_t>(n * K + k)];
            REQUIRE(std::abs(sum) <= 256);
            expected[static_cast<size_t>(m * c_pitch + n)] = sum;
        }
    INFO(M << " x " << N << " x " << K << (kBMnMajor ? ", B N-major" : ", B K-major"));
    check_equal(C.values(), expected);
}

}  // namespace

TEST_CASE("hopper: a ring of stages with mbarriers, bulk loads and bulk stores", "[hopper]") {
    NEEDS_HOPPER;
    for (int n_tiles : {1, 2, 3, 4, 7, 12}) {
        const std::vector<double> values = small_integers(n_tiles * kStageFloats, 3);
        Buffer inp(DType::f32, {n_tiles, kStageFloats}, values), out(DType::f32, {n_tiles, kStageFloats});
        ring_kernel<<<1, 5 * kWarp, 0, device().stream>>>(out.tensor().ptr<float>(), inp.tensor().ptr<float>(),
                                                          n_tiles);
        cudaCheckLaunch();
        finish();
        std::vector<double> expected = values;
        for (double& x : expected) x += 1;
        CHECK(out.values() == expected);
    }
}

TEST_CASE("hopper: named barriers make two groups take turns", "[hopper]") {
    NEEDS_HOPPER;
    Buffer out(DType::f32, {6});
    turns_kernel<<<1, 128, 0, device().stream>>>(out.tensor().ptr<float>());
    cudaCheckLaunch();
    finish();
    CHECK(out.values() == std::vector<double>{0, 2, 4, 1, 3, 5});
}

TEST_CASE("hopper: a copy waits for another one's count", "[hopper]") {
    NEEDS_HOPPER;
    Buffer sum(DType::f32, {5}), count(DType::i32, {1});
    count.set_integers({0});
    counts_kernel<<<1, 2 * kWarp, 0, device().stream>>>(sum.tensor().ptr<float>(), count.tensor().ptr<int32_t>());
    cudaCheckLaunch();
    finish();
    CHECK(sum.values() == std::vector<double>{10, 12, 14, 16, 3});
}

TEST_CASE("hopper: one lane is elected, always the same", "[hopper]") {
    NEEDS_HOPPER;
    Buffer out(DType::f32, {64});
    elect_kernel<<<1, 32, 0, device().stream>>>(out.tensor().ptr<float>());
    cudaCheckLaunch();
    finish();
    std::vector<float> raw(
        64);  // not by values(), which records what it read: which lane it is differs from seed to seed
    cudaCheck(cudaMemcpy(raw.data(), out.tensor().data, 256, cudaMemcpyDeviceToHost));
    double n = 0;
    for (size_t i = 0; i < 32; ++i) n += raw[i];
    CHECK(n == 1);
    CHECK(std::equal(raw.begin(), raw.begin() + 32, raw.begin() + 32));
}

TEST_CASE("hopper: boxes of tensors, all swizzles, over every edge", "[hopper]") {
    NEEDS_HOPPER;
    for (int swizzle : {0, 32, 64, 128}) {
        const int64_t width = swizzle == 0 ? 24 : swizzle / 2;
        for (const std::array<int, 4>& at :
             {std::array{0, 0, 0, 0}, std::array{8, 3, 1, 0}, std::array{-8, -2, -1, 1}, std::array{40, 2, 2, 1},
              std::array{64, 4, 0, 2}, std::array{-104, 4, 0, 0}}) {
            check_box<__nv_bfloat16, 2>(DType::bf16, {77, 19, 1, 1}, {width, 16, 1, 1}, at, swizzle);
            check_box<__nv_bfloat16, 3>(DType::bf16, {77, 5, 4, 1}, {width, 3, 5, 1}, at, swizzle);
            check_box<__half, 4>(DType::f16, {70, 5, 3, 3}, {width, 1, 9, 2}, at, swizzle);
            check_box<float, 2>(DType::f32, {65, 13, 1, 1}, {width / 2, 11, 1, 1}, at, swizzle);
        }
        // Larger than the tensor: small heads, and fewer tokens than a tile has.
        check_box<__nv_bfloat16, 4>(DType::bf16, {8, 3, 5, 2}, {width, 1, 16, 1}, {0, 2, 0, 1}, swizzle);
    }
}

TEST_CASE("hopper: a box that lies outside of its tensor is loaded as zeros, and its store changes nothing",
          "[hopper]") {
    NEEDS_HOPPER;
    check_box<__nv_bfloat16, 2>(DType::bf16, {64, 19, 1, 1}, {64, 16, 1, 1}, {64, 0, 0, 0}, 128);
    check_box<__nv_bfloat16, 4>(DType::bf16, {64, 2, 19, 2}, {64, 1, 16, 1}, {64, 1, 16, 1}, 128);
    check_box<__nv_bfloat16, 4>(DType::bf16, {64, 2, 19, 2}, {64, 1, 16, 1}, {0, 1, 32, 1}, 128);
}

TEST_CASE("hopper: a tensor map that the copy engine cannot use is an error", "[hopper]") {
    NEEDS_HOPPER;
    Buffer data(DType::bf16, {64, 64});
    const char* start = static_cast<const char*>(data.tensor().data);
    CHECK_NOTHROW(make_tensor_map(start, DType::bf16, {60, 64}, {64}, {32, 64}, 64));
    // Heads 16 columns apart in rows of 24, which is not a multiple of 16.
    CHECK_NOTHROW(make_tensor_map(start, DType::bf16, {16, 1, 20, 2}, {16, 24, 480}, {32, 1, 16, 1}, 64));
    CHECK_THROWS_AS(make_tensor_map(start + 2, DType::bf16, {60, 32}, {64}, {32, 64}, 64), Error);  // misaligned
    CHECK_THROWS_AS(make_tensor_map(start, DType::bf16, {60, 64}, {60}, {32, 64}, 64), Error);  // rows 120 bytes apart
    CHECK_THROWS_AS(make_tensor_map(start, DType::bf16, {60, 64}, {64}, {64, 64}, 64),
                    Error);  // wider than the swizzle
    CHECK_THROWS_AS(make_tensor_map(start, DType::bf16, {60, 64}, {64}, {32, 257}, 64), Error);
    CHECK_THROWS_AS(make_tensor_map(start, DType::bf16, {60, 64}, {}, {32, 64}, 64), Error);
    CHECK_THROWS_AS(make_tensor_map(start, DType::i32, {60, 64}, {64}, {32, 64}, 0), Error);
}

TEST_CASE("hopper: wgmma in all layouts", "[hopper]") {
    NEEDS_HOPPER;
    check_layouts<__nv_bfloat16, 64, 0>(DType::bf16);
    check_layouts<__nv_bfloat16, 64, 32>(DType::bf16);
    check_layouts<__nv_bfloat16, 64, 64>(DType::bf16);
    check_layouts<__nv_bfloat16, 64, 128>(DType::bf16);
    check_layouts<__half, 128, 0>(DType::f16);
    check_layouts<__half, 128, 128>(DType::f16);
}

TEST_CASE("hopper: wgmma of all widths", "[hopper]") {
    NEEDS_HOPPER;
    check_product<__half, 8, 32, false, false>(DType::f16);
    check_product<__half, 8, 0, false, true, true>(DType::f16);
    check_product<__half, 16, 32, false, true>(DType::f16);
    check_product<__half, 16, 128, false, false, true>(DType::f16);
    check_product<__half, 32, 64, false, true>(DType::f16);
    check_product<__half, 32, 64, false, true, true>(DType::f16);
    check_product<__nv_bfloat16, 96, 64, false, true>(DType::bf16);
    check_product<__nv_bfloat16, 96, 128, false, false, true>(DType::bf16);
    // A part of the columns of a panel, as for the last 16 or 32 columns of heads of 80 and 96;
    // and one and a half panels.
    check_product<__nv_bfloat16, 16, 128, false, true, true>(DType::bf16);
    check_product<__nv_bfloat16, 32, 128, false, true, true>(DType::bf16);
    check_product<__nv_bfloat16, 96, 128, false, true, true>(DType::bf16);
    check_product<__nv_bfloat16, 192, 128, false, true>(DType::bf16);
    check_product<__nv_bfloat16, 192, 128, false, true, true>(DType::bf16);
    check_product<__nv_bfloat16, 256, 128, false, false>(DType::bf16);
    check_product<__nv_bfloat16, 256, 128, false, true, true>(DType::bf16);
}

TEST_CASE("hopper: a warp-specialised matrix product", "[hopper]") {
    NEEDS_HOPPER;
    check_matmul<__nv_bfloat16, false>(DType::bf16, 64, 64, 64);
    check_matmul<__nv_bfloat16, true>(DType::bf16, 65, 56, 130);
    check_matmul<__half, false>(DType::f16, 33, 104, 257);
    check_matmul<__half, true>(DType::f16, 100, 72, 200);
}
