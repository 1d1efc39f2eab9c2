// layers/hopper_matmul.cuh: tiles of a product on Hopper's tensor cores (wgmma, sm_90a): how a block loads and
// multiplies them. hopper_matmul.cu says what is done with the results.
//
//   out (M, N) = op(a) (M, K) op(b) (K, N)
//
// A block has 128 x 256 numbers of out at a time (or 128 x 192), and goes through K in steps of 64. A stage of shared
// memory holds the operands of a step, in panels of 64 x 64 numbers: 64 rows of 128 bytes, as the copy engine (TMA)
// writes them with its swizzle of 128 bytes, and as wgmma reads them. Rows of a panel are rows of the operand as it
// lies in device memory, so nothing is ever transposed; which way it lies is in wgmma's descriptor:
//
//                   not transposed                               transposed
//     a  16 KiB     (M, K): 128 rows of 64 k, K-major            (K, M): 2 panels, 64 rows of 64 m, M-major
//     b  32 KiB     (K, N): 4 panels, 64 rows of 64 n, N-major   (N, K): 256 rows of 64 k, K-major
//
// Either way consumer g, which multiplies 64 x 256 of the tile, has its 64 rows of op(a) in panel g. A step is
// 128 x 256 x 64 multiply-adds for 48 KiB, 1024 clocks of the tensor cores.
//
//     producer     one thread       wait(empty[i])   announce the bytes, start the copies of a and b to stage i
//     consumers    two groups of    wait(full[i])    start the products of stage i;  those of the step before are done:
//                  128 threads                       arrive(empty[i - 1])
//
// Beyond the edges of an operand the copy engine writes zeros, so M, N and K need not be multiples of anything but the
// 16 bytes of a row.
#pragma once

#include "layers/ptx.cuh"
#include "layers/tensor_map.h"

namespace {

constexpr int kGroup = 128, kConsumers = 2, kGroupRows = 64, kTileRows = kConsumers * kGroupRows;
constexpr int kStepK = 64, kPanelColumns = 64, kRowBytes = 2 * kPanelColumns, kPanelBytes = 64 * kRowBytes;
constexpr int kABytes = kConsumers * kPanelBytes;

template <int kPanels_>
struct TileOf {
    static constexpr int kPanels = kPanels_, kColumns = kPanels * kPanelColumns;
    static constexpr int kStageBytes = kABytes + kPanels * kPanelBytes;
    using Sums = float[kColumns / 8][4];  // of a thread: its fragments of 64 rows
};

struct Operands {
    CUtensorMap a, b;
};

// The tiles of out. Tile number i: down the rows of a strip of eight rows of tiles, then to the next column of it, so
// that blocks that run at the same time share rows of a and columns of b, which they then find in the L2 cache.
constexpr int kStrip = 8;
struct TileGrid {
    int rows, columns;
    __host__ __device__ __forceinline__ int tiles() const { return rows * columns; }
    __host__ __device__ __forceinline__ int2 at(int i) const {  // row and column
        const int strip = i / (kStrip * columns), first = strip * kStrip, in_strip = i % (kStrip * columns);
        const int n_rows = min(kStrip, rows - first);  // the last strip may have fewer
        return {first + in_strip % n_rows, in_strip / n_rows};
    }
    __device__ __forceinline__ int tile(int row, int column) const {  // its number
        const int first = row / kStrip * kStrip;
        return first * columns + column * min(kStrip, rows - first) + row - first;
    }
};

template <int kStages>
struct Ring {
    uint64_t full[kStages], empty[kStages];
};

// A thread's place in its group.
__device__ __forceinline__ int in_group() { return static_cast<int>(threadIdx.x) % kGroup; }
__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_of_group() { return in_group() / kWarp; }

// One thread. n_readers arrive when they have read a stage.
template <int kStages>
__device__ __forceinline__ void init_ring(Ring<kStages>& ring, uint32_t n_readers) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(&ring.full[i], 1), mbarrier_init(&ring.empty[i], n_readers);
}

// One thread fills the stage of a round with 64 of K from k on, of the tile that begins at (m, n).
template <class Tile, bool kATransposed, bool kBTransposed, int kStages>
__device__ __forceinline__ void load_step(const Operands& maps, unsigned char* stages, Ring<kStages>& ring,
                                          uint32_t round, int m, int n, int k) {
    const uint32_t i = round % kStages;
    unsigned char *a = stages + i * Tile::kStageBytes, *b = a + kABytes;
    mbarrier_wait(&ring.empty[i], (round / kStages + 1) % 2);
    mbarrier_arrive_expect_tx(&ring.full[i], Tile::kStageBytes);
    if constexpr (kATransposed)
        for (int p = 0; p < kConsumers; ++p)
            tensor_load<2>(a + p * kPanelBytes, &maps.a, {m + p * kPanelColumns, k}, &ring.full[i]);
    else tensor_load<2>(a, &maps.a, {k, m}, &ring.full[i]);
    if constexpr (kBTransposed) tensor_load<2>(b, &maps.b, {k, n}, &ring.full[i]);
    else
        for (int p = 0; p < Tile::kPanels; ++p)
            tensor_load<2>(b + p * kPanelBytes, &maps.b, {n + p * kPanelColumns, k}, &ring.full[i]);
}

// The sums of a consumer's rows of op(a): products with 16 x 8 ones, which lie in shared memory. Eight equal columns.
using RowSums = float[1][4];

// sums = op(a) op(b) over n_steps steps, or sums += with `add`, by the 128 threads of a consumer; and, with
// kSumsRows, row_sums += op(a) ones. A step's products are queued behind those of the step before: tensor cores never
// wait for a barrier. `round` goes on from tile to tile.
template <class Tile, class Number, bool kATransposed, bool kBTransposed, bool kSumsRows = false, int kStages>
__device__ __forceinline__ void multiply_steps(typename Tile::Sums& sums, const unsigned char* stages,
                                               Ring<kStages>& ring, uint32_t& round, int n_steps, int group, bool add,
                                               RowSums& row_sums, const uint32_t* ones) {
    constexpr uint32_t kNextRows = 16 * kRowBytes, kNextColumns = 32;  // bytes to the next 16 of k
    constexpr uint32_t kNextA = kATransposed ? kNextRows : kNextColumns,
                       kNextB = kBTransposed ? kNextColumns : kNextRows;
    for (int step = 0; step < n_steps; ++step, ++round) {
        const unsigned char* stage = stages + round % kStages * Tile::kStageBytes;
        mbarrier_wait(&ring.full[round % kStages], round / kStages % 2);
        const uint64_t a = wgmma_descriptor<128>(stage + group * kPanelBytes, kPanelBytes, 8 * kRowBytes);
        const uint64_t b = wgmma_descriptor<128>(stage + kABytes, kPanelBytes, 8 * kRowBytes);
        if constexpr (kSumsRows) wgmma_fence(sums, row_sums);
        else wgmma_fence(sums);
#pragma unroll
        for (int k = 0; k < kStepK / 16; ++k) {
            wgmma_m64k16<Number, kATransposed, !kBTransposed>(sums, wgmma_advance(a, k * kNextA),
                                                              wgmma_advance(b, k * kNextB), add || step > 0 || k > 0);
            if constexpr (kSumsRows)
                wgmma_m64k16<Number, kATransposed>(row_sums, wgmma_advance(a, k * kNextA),
                                                   wgmma_descriptor<0>(ones, 128, 128), true);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the products of the step before are done
        if (step > 0 && in_group() == 0) mbarrier_arrive(&ring.empty[(round - 1) % kStages]);
    }
    if constexpr (kSumsRows) wgmma_wait<0>(sums, row_sums);
    else wgmma_wait<0>(sums);
    if (in_group() == 0) mbarrier_arrive(&ring.empty[(round - 1) % kStages]);
}
template <class Tile, class Number, bool kATransposed, bool kBTransposed, int kStages>
__device__ __forceinline__ void multiply_steps(typename Tile::Sums& sums, const unsigned char* stages,
                                               Ring<kStages>& ring, uint32_t& round, int n_steps, int group,
                                               bool add = false) {
    RowSums none;
    multiply_steps<Tile, Number, kATransposed, kBTransposed>(sums, stages, ring, round, n_steps, group, add, none,
                                                             nullptr);
}

// ---------------------------------------------------------------------------------------------------------------------
// Host

template <class Tile>
TileGrid tile_grid(int64_t M, int64_t N) {
    const int rows = narrow(ceil_div(M, int64_t{kTileRows}), "tiles"),
              columns = narrow(ceil_div(N, int64_t{Tile::kColumns}), "tiles");
    narrow(int64_t{rows} * columns, "tiles");
    return {rows, columns};
}

inline CUtensorMap matrix_map(const Tensor& x, int64_t box_rows) {
    return make_tensor_map(x.data, x.dtype, {x.shape[1], x.shape[0]}, {x.shape[1]}, {kPanelColumns, box_rows}, 128);
}
template <class Tile>
Operands operand_maps(const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b) {
    return {matrix_map(a, transpose_a ? kStepK : kTileRows), matrix_map(b, transpose_b ? Tile::kColumns : kStepK)};
}

// Sums that are not complete yet lie in the device's workspace for products. The CPU device has none until now: its
// cuBLASLt needs none.
inline float* matmul_workspace() {
    Device& on = device();
    if (!on.blas_workspace) {
        cudaCheck(cudaMalloc(&on.blas_workspace, kBlasWorkspaceBytes));
        on.blas_workspace_bytes = kBlasWorkspaceBytes;
    }
    check(on.blas_workspace_bytes >= kBlasWorkspaceBytes, "hopper_matmul: the workspace has ", on.blas_workspace_bytes,
          " bytes, not ", kBlasWorkspaceBytes);
    return static_cast<float*>(on.blas_workspace);
}

template <class F>
void dispatch_bool(bool value, F&& f) {
    if (value) f(std::true_type{});
    else f(std::false_type{});
}

}  // namespace
