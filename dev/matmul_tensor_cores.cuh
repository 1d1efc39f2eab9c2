// dev/matmul_tensor_cores.cuh: the kernels of rungs 7 to 10 of dev/matmul.cu, which multiply with tensor cores.
//
// A multiprocessor of an H100 does 2048 multiply-adds per clock with them, 16 times as many as with FMA instructions.
// So each number that is read must be used 16 times as often:
//
//   rung               out elements                        reads per multiply-add: of device memory, of shared memory
//   mma.sync           128 x 128 per block, 64 x 32 per warp                          2/128             1/64 + 1/32
//   wgmma              128 x 128 per block, 64 x 128 per four warps                   2/128             1/64 + 1/128
//   persistent         128 x 256 per block, 64 x 256 per four warps                   1/128 + 1/256     1/64 + 1/256
//
// Shared memory gives 64 16-bit numbers per clock, which is 64/2048 = 1/32 for each multiply-add: mma.sync, whose
// operands go through registers, needs more than that; wgmma, which reads shared memory itself, needs less. The tensor
// cores of an A100 are half as fast, and mma.sync keeps them busy.
//
// Here are kernels only: headers are not rewritten for the CPU device, so the launches are in matmul.cu.
#pragma once

#include "core/kernel.cuh"
#include "layers/ptx.cuh"
#include "layers/tensor_map.h"

namespace {

constexpr int kTileM = 128;     // rows of out that a block computes,
constexpr int kMmaTileN = 128;  // and with mma.sync its columns

// ---------------------------------------------------------------------------------------------------------------------
// 7. Tensor cores: mma.sync. A warp multiplies 16 x 16 by 16 x 8 in one instruction, with operands in registers, in
// fragments (layers/ptx.cuh). Eight warps compute 128 x 128, each 64 x 32: for 16 of K it loads 4 fragments of a and 4
// of b, and makes 16 products of them. ldmatrix loads a fragment of a, or two of b, at a time; it transposes the 8 x 8
// matrices of b while loading them, because mma needs pairs of neighbours in a column of b.
//
// Tiles stay 16-bit in shared memory, and lie in panels of 64 columns: rows of 128 bytes, all 32 banks. ldmatrix reads
// 8 rows of 16 bytes at a time, at the same column of 8 neighbouring rows: all in the same 4 banks. So the eight
// 16-byte packs of a row are permuted by the row's number: pack p of row r lies at place p ^ (r % 8). Then the 8 rows
// are in 8 different groups of banks, without any padding. It is the same swizzle of 128 bytes that Hopper's copy
// engine writes.
//
// The tiles are copied by cp.async, without going through registers, into kStages stages in turn: while one is
// multiplied, kStages - 1 are in flight. There is one barrier per round: after it the tile of this round is complete
// for all threads, and no thread still reads the tile of the previous round, whose stage is filled again.

constexpr int kWarps = 8, kMmaThreads = kWarps * kWarp;
constexpr int kPanelColumns = 64, kRowBytes = 128;  // of a panel
constexpr int kStepK = 64;                          // of K per round
constexpr int kBPanelBytes = kStepK * kRowBytes;    // 64 of K x 64 of N
constexpr int kATileBytes = kTileM * kRowBytes,
              kBTileBytes = 2 * kBPanelBytes;  // 128 of M x 64 of K; 64 of K x 128 of N
constexpr int kMmaStageBytes = kATileBytes + kBTileBytes;

// Starts the copies of a panel of x (n_rows x n_columns), whose first element is (row0, column0); zeros beyond the
// edges. If rows are not multiples of 16 bytes (packs == false), elements are copied one by one through registers, and
// the copy is complete at once.
template <int kRows, class T>
__device__ __forceinline__ void copy_panel(unsigned char* panel, const T* x, int64_t row0, int64_t column0,
                                           int64_t n_rows, int64_t n_columns, bool packs) {
    for (int i = static_cast<int>(threadIdx.x); i < kRows * 8; i += kMmaThreads) {
        const int64_t row = row0 + i / 8, column = column0 + i % 8 * 8, at = row * n_columns + column;
        T* to = reinterpret_cast<T*>(panel + swizzled<128>(i * 16));
        const bool is_there = row < n_rows && column < n_columns;
        if (packs) {
            cp_async_16(to, is_there ? x + at : x, is_there);
        } else {
#pragma unroll 1  // unrolling would take registers that the sums need
            for (int e = 0; e < 8; ++e) to[e] = is_there && column + e < n_columns ? x[at + e] : from_float<T>(0.0f);
        }
    }
}

// The address that this lane gives to ldmatrix for the 16 x 16 numbers of a panel that begin at (row, column).
__device__ __forceinline__ const unsigned char* fragment(const unsigned char* panel, int row, int column) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    return panel + swizzled<128>((row + lane % 16) * kRowBytes + (column + lane / 16 * 8) * 2);
}

// sums += a b for one stage: this warp's 64 x 32, from warp_m and warp_n on.
template <class T>
__device__ __forceinline__ void multiply_mma(float (&sums)[4][4][4], const unsigned char* stage, int warp_m,
                                             int warp_n) {
    const unsigned char* b_panel = stage + kATileBytes + warp_n / kPanelColumns * kBPanelBytes;
#pragma unroll
    for (int k = 0; k < kStepK; k += 16) {
        uint32_t a[4][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) ldmatrix_x4(a[i], fragment(stage, warp_m + 16 * i, k));
#pragma unroll
        for (int j = 0; j < 2; ++j) ldmatrix_x4<true>(b[j], fragment(b_panel, k, warp_n % kPanelColumns + 16 * j));
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) mma_m16n8k16<T>(sums[i][j], a[i], &b[j / 2][j % 2 * 2]);
    }
}

template <class T, int kStages>
__global__ void __launch_bounds__(kMmaThreads, 2)
    matmul_mma_kernel(T* out, const T* a, const T* b, int64_t M, int64_t N, int64_t K, bool packs) {
    unsigned char* tiles = shared_tiles();
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int warp_m = warp / 4 * 64, warp_n = warp % 4 * 32;
    const int64_t m0 = static_cast<int64_t>(blockIdx.y) * kTileM, n0 = static_cast<int64_t>(blockIdx.x) * kMmaTileN;
    const auto load = [&](int64_t k0, int stage) {
        unsigned char* to = tiles + stage * kMmaStageBytes;
        if (k0 < K) {
            copy_panel<kTileM>(to, a, m0, k0, M, K, packs);
            for (int panel = 0; panel < 2; ++panel)
                copy_panel<kStepK>(to + kATileBytes + panel * kBPanelBytes, b, k0, n0 + panel * kPanelColumns, K, N,
                                   packs);
        }
        cp_async_commit();  // one group per round, an empty one beyond the end of K: so the wait below counts correctly
    };
    float sums[4][4][4] = {};
    for (int stage = 0; stage < kStages - 1; ++stage) load(stage * kStepK, stage);
    int stage = 0;
    for (int64_t k0 = 0; k0 < K; k0 += kStepK, stage = (stage + 1) % kStages) {
        cp_async_wait<kStages - 2>();
        __syncthreads();  // all threads' copies of this stage are complete; no thread still reads the previous stage
        load(k0 + (kStages - 1) * kStepK, (stage + kStages - 1) % kStages);
        multiply_mma<T>(sums, tiles + stage * kMmaStageBytes, warp_m, warp_n);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
            for (int half = 0; half < 2; ++half) {
                const int64_t m = m0 + warp_m + 16 * i + 8 * half + lane / 4, n = n0 + warp_n + 8 * j + lane % 4 * 2;
                const float low = sums[i][j][2 * half], high = sums[i][j][2 * half + 1];
                if (m >= M || n >= N) continue;
                if (packs) {
                    *reinterpret_cast<uint32_t*>(out + m * N + n) = pack<T>(low, high);
                } else {
                    out[m * N + n] = from_float<T>(low);
                    if (n + 1 < N) out[m * N + n + 1] = from_float<T>(high);
                }
            }
}

// ---------------------------------------------------------------------------------------------------------------------
// 9. wgmma and the copy engine (TMA): Hopper, sm_90a. Four warps, a group, multiply 64 x 16 by 16 x 128 in one
// instruction, which reads both operands from shared memory, and runs at the same time as the threads, as the copy
// engine does. The threads only decide when each starts:
//
//     producer     one thread     wait(empty[i])   announce the bytes, start the copies of a and b to stage i
//     consumers    two groups     wait(full[i])    start the products of stage i;   those of the stage before are done:
//                                                  arrive(empty[i - 1])
//
// The copy engine computes addresses, writes zeros beyond the edges, and swizzles; a panel is one instruction. So the
// producer needs few registers and gives them to the consumers, whose sums take 64 per thread. A product of the next
// stage is always queued behind the one that runs: tensor cores never wait for a barrier.
//
//     a       128 x 64, one panel, K-major                          consumer g has rows 64 g ...
//     b       64 x kColumns in panels of 64 columns, N-major        read as it lies
//     out     through shared memory: 64 x 64 panels, which the copy engine stores, in whole lines
//
// A block computes the tiles blockIdx.x, blockIdx.x + gridDim.x, ... of out; in rung 9 there are as many blocks as
// tiles. They are numbered along strips of kStrip rows of tiles, so that blocks that run at the same time share rows of
// a and columns of b, which they then find in the L2 cache.

constexpr int kGroup = 128, kConsumers = 2, kWgmmaThreads = kGroup * (kConsumers + 1), kGroupRows = 64, kStrip = 8;
constexpr int kOutPanelBytes = kGroupRows * kRowBytes;
static_assert(kConsumers * kGroupRows == kTileM);

template <int kColumns_, int kStages_>
struct WgmmaTile {
    static constexpr int kColumns = kColumns_, kStages = kStages_, kPanels = kColumns / kPanelColumns;
    static constexpr int kStageBytes = kATileBytes + kPanels * kBPanelBytes;
    static constexpr int kOutBytes = kConsumers * kPanels * kOutPanelBytes;
    struct Barriers {
        uint64_t full[kStages], empty[kStages];
    };
    static constexpr int kSharedBytes = kStages * kStageBytes + kOutBytes + sizeof(Barriers) + kTileAlignment;
};

struct MatmulMaps {
    CUtensorMap out, a, b;
};
struct TileGrid {
    int rows, columns, steps;  // tiles of out, and steps of kStepK along K
};

// Tile number i of out: down the rows of a strip, then to the next column of it.
__device__ __forceinline__ int2 tile_at(const TileGrid& grid, int i) {
    const int strip = i / (kStrip * grid.columns), first = strip * kStrip, in_strip = i % (kStrip * grid.columns);
    const int rows = min(kStrip, grid.rows - first);  // the last strip may have fewer
    return {first + in_strip % rows, in_strip / rows};
}

// One thread. Round r fills stage r % kStages, when what was there in round r - kStages has been read.
template <class Tile>
__device__ __forceinline__ void produce(const MatmulMaps& maps, const TileGrid& grid, unsigned char* tiles,
                                        typename Tile::Barriers& barriers) {
    int round = 0;
    for (int i = static_cast<int>(blockIdx.x); i < grid.rows * grid.columns; i += static_cast<int>(gridDim.x)) {
        const int2 at = tile_at(grid, i);
        for (int step = 0; step < grid.steps; ++step, ++round) {
            const int stage = round % Tile::kStages;
            unsigned char* to = tiles + stage * Tile::kStageBytes;
            mbarrier_wait(&barriers.empty[stage], (round / Tile::kStages + 1) % 2);
            mbarrier_arrive_expect_tx(&barriers.full[stage], Tile::kStageBytes);
            tensor_load<2>(to, &maps.a, {step * kStepK, at.x * kTileM}, &barriers.full[stage]);
            for (int panel = 0; panel < Tile::kPanels; ++panel)
                tensor_load<2>(to + kATileBytes + panel * kBPanelBytes, &maps.b,
                               {at.y * Tile::kColumns + panel * kPanelColumns, step * kStepK}, &barriers.full[stage]);
        }
    }
}

// A group's 64 rows of a tile, from registers through its panels of shared memory to device memory.
template <class T, class Tile>
__device__ __forceinline__ void store_rows(const MatmulMaps& maps, unsigned char* panels,
                                           const float (&d)[Tile::kColumns / 8][4], int64_t M, int64_t N, int m0,
                                           int n0) {
    const int group = static_cast<int>(threadIdx.x) / kGroup, in_group = static_cast<int>(threadIdx.x) % kGroup;
    const int lane = in_group % kWarp, row = in_group / kWarp * 16 + lane / 4;
    if (in_group == 0) bulk_wait_read<0>();
    named_barrier_sync(1 + group,
                       kGroup);  // the copy engine has read the rows of the tile before: they may be overwritten
#pragma unroll
    for (int n = 0; n < Tile::kColumns / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = n * 8 + lane % 4 * 2, byte = (row + half * 8) * kRowBytes + column % kPanelColumns * 2;
            *reinterpret_cast<uint32_t*>(panels + column / kPanelColumns * kOutPanelBytes + swizzled<128>(byte)) =
                pack<T>(d[n][2 * half], d[n][2 * half + 1]);
        }
    fence_proxy_async();
    named_barrier_sync(1 + group, kGroup);  // all rows are written, and the copy engine can see them
    if (in_group != 0) return;
    for (int panel = 0; panel < Tile::kPanels; ++panel)
        if (m0 < M && n0 + panel * kPanelColumns < N)
            tensor_store<2>(&maps.out, {n0 + panel * kPanelColumns, m0}, panels + panel * kOutPanelBytes);
    bulk_commit();
}

template <class T, class Tile>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    matmul_wgmma_kernel(const __grid_constant__ MatmulMaps maps, TileGrid grid, int64_t M, int64_t N) {
    unsigned char* tiles = shared_tiles();
    unsigned char* out_panels = tiles + Tile::kStages * Tile::kStageBytes;
    auto& barriers = *reinterpret_cast<typename Tile::Barriers*>(out_panels + Tile::kOutBytes);
    const int group = static_cast<int>(threadIdx.x) / kGroup, in_group = static_cast<int>(threadIdx.x) % kGroup;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tile::kStages; ++i)
            mbarrier_init(&barriers.full[i], 1), mbarrier_init(&barriers.empty[i], kConsumers);
        fence_proxy_async();
    }
    __syncthreads();  // the mbarriers are initialised. This is the last barrier of all threads

    if (group == kConsumers) {
        give_registers<24>();
        if (in_group / kWarp == 0 && elect_one()) produce<Tile>(maps, grid, tiles, barriers);
        return;
    }
    take_registers<240>();
    float d[Tile::kColumns / 8][4] = {};  // see wgmma_m64k16
    int round = 0;
    for (int i = static_cast<int>(blockIdx.x); i < grid.rows * grid.columns; i += static_cast<int>(gridDim.x)) {
        for (int step = 0; step < grid.steps; ++step, ++round) {
            const int stage = round % Tile::kStages;
            const unsigned char* from = tiles + stage * Tile::kStageBytes;
            mbarrier_wait(&barriers.full[stage], round / Tile::kStages % 2);
            const uint64_t a = wgmma_descriptor<128>(from + group * kGroupRows * kRowBytes, 0, 8 * kRowBytes);
            const uint64_t b = wgmma_descriptor<128>(from + kATileBytes, kBPanelBytes, 8 * kRowBytes);
            wgmma_fence(d);
#pragma unroll
            for (int k = 0; k < kStepK / 16; ++k)
                wgmma_m64k16<T, false, true>(d, wgmma_advance(a, k * 32), wgmma_advance(b, k * 16 * kRowBytes),
                                             step > 0 || k > 0);
            wgmma_commit();
            wgmma_wait<1>();  // the products of the step before are done
            if (step > 0 && in_group == 0) mbarrier_arrive(&barriers.empty[(round - 1) % Tile::kStages]);
        }
        wgmma_wait<0>(d);
        if (in_group == 0) mbarrier_arrive(&barriers.empty[(round - 1) % Tile::kStages]);
        const int2 at = tile_at(grid, i);
        store_rows<T, Tile>(maps, out_panels + group * Tile::kPanels * kOutPanelBytes, d, M, N,
                            at.x * kTileM + group * kGroupRows, at.y * Tile::kColumns);
    }
    if (in_group == 0) bulk_wait_read<0>();  // when this block ends, the next one gets its shared memory
}

}  // namespace
