// layers/flash_attention/hopper.cuh: the tiles of flash attention on Hopper's tensor cores (wgmma, sm_90a), forward and
// backward. The maths is in flash_attention.cu, the instructions are in layers/ptx.cuh. Fragments, masks and the
// running softmax are those of flash_attention/mma.cuh.
//
// A block has 128 rows and three warp groups. One of them is the producer: one of its warps tells the copy engine which
// tiles to bring, and the rest of it is idle. The other two are consumers, with 64 rows each: they multiply, and take
// the exponentials. The others of the rows stream past in a ring of stages (layers/ptx.cuh):
//
//     full[i]     stage i has been filled       the producer announces the bytes, and the copy engine brings them
//     empty[i]    stage i has been read         the consumers arrive when their products that read it are done
//
// Tiles are cut into panels of 64 columns, 128 bytes a row, swizzled: as the copy engine writes them, and wgmma reads
// them. What is outside of a tensor the copy engine fills with zeros: columns from D on, tokens from T on. Others that
// no row of the block sees, of another document for example, are loaded, and masked.
//
//                  operand A                               operand B                              result
//     scores       X, shared memory, K-major               Y, shared memory, K-major              S, dP in registers
//     columns      P in registers: S, packed               Y, shared memory, N-major              o, dq, dk, dv, too
//
// In both a row of Y is a token, as it lies in device memory: nothing is ever transposed.
//
// Registers are moved from the producer, which needs few, to the consumers: 168 a thread at the start, for three groups
// of 128 threads 64512 of the 65536 that there are; then the producer's threads keep 24, and the consumers' have 240.
// (The backward's producer has more to do: 40 and 232.)
#pragma once

#include "layers/flash_attention/mma.cuh"
#include "layers/tensor_map.h"

namespace {

using HopperSizes = HeadSizes<HeadSize<64, 64>, HeadSize<80, 80>, HeadSize<96, 96>, HeadSize<128, 128>,
                              HeadSize<192, 128>, HeadSize<192, 192>, HeadSize<256, 256>>;

constexpr int kGroup = 128, kConsumers = 2, kHopperThreads = kGroup * (kConsumers + 1);
constexpr int kGroupRows = 64, kBlockRows = kGroupRows * kConsumers;
constexpr int kPanelColumns = 64, kRowBytes = 2 * kPanelColumns;

// This thread's warp group. The shuffle tells the compiler that a warp's threads agree on it: what depends on it then
// lies in the registers that a warp shares, of which there are enough.
__device__ __forceinline__ int warp_group() {
    return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kGroup, 0);
}

// kRows tokens of one head in shared memory. Row r of a panel starts r * kRowBytes further on. The swizzle repeats
// every 8 rows, so an operand can begin at any multiple of 8.
template <int kRows_, int kColumns_>
struct Panels {
    static constexpr int kRows = kRows_, kColumns = kColumns_;
    static constexpr int kPanels = (kColumns + kPanelColumns - 1) / kPanelColumns;
    static constexpr int kPanelBytes = kRows * kRowBytes, kBytes = kPanels * kPanelBytes;
};

// A stage, and the parity of its round, in one register.
template <int kStages>
struct Ring {
    uint32_t at = 0;
    __device__ __forceinline__ uint32_t stage() const { return kStages == 1 ? 0 : at >> 1; }
    __device__ __forceinline__ uint32_t parity() const { return at & 1; }
    __device__ __forceinline__ void next() {
        if (kStages == 1 || (at += 2) >= 2 * kStages) at = (at & 1) ^ 1;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Copies, by one thread

// Tokens token, token + 1, ... of a head, to `tile`: Tile::kBytes, which somebody has announced to the barrier.
template <class Tile>
__device__ __forceinline__ void load_panels(unsigned char* tile, const CUtensorMap& map, int head, int token, int b,
                                            uint64_t* barrier) {
    for (int panel = 0; panel < Tile::kPanels; ++panel)
        tensor_load<4>(tile + panel * Tile::kPanelBytes, &map, {panel * kPanelColumns, head, token, b}, barrier);
}

// A group's 64 rows of a tile to device memory, to a head's columns from `column` on; those behind the last token are
// left out.
template <class Tile>
__device__ __forceinline__ void store_panels(const CUtensorMap& map, int head, int token, int b,
                                             const unsigned char* rows, int column = 0) {
    for (int panel = 0; panel < Tile::kPanels; ++panel)
        tensor_store<4>(&map, {column + panel * kPanelColumns, head, token, b}, rows + panel * Tile::kPanelBytes);
}

// Dimensions (D, heads, T, B); a box is a panel of n_rows tokens of one head.
CUtensorMap head_map(const HeadColumns& heads, int64_t n_rows) {
    const Tensor& rows = heads.rows;
    const char* data =
        static_cast<const char*>(rows.data) + heads.column * static_cast<int64_t>(dtype_bytes(rows.dtype));
    const int64_t B = rows.shape[0], T = rows.shape[1], columns = rows.shape[2];
    return make_tensor_map(data, rows.dtype, {heads.D, heads.count, T, B}, {heads.head_stride(), columns, T * columns},
                           {kPanelColumns, 1, n_rows, 1}, 128);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products of a warp group. All are started here, and waited for by the caller.

// scores = x y^T: 64 rows of a tile X, and all rows of Y.
template <class Number, class X, class Y>
__device__ __forceinline__ void start_scores(float (&scores)[Y::kRows / 8][4], const unsigned char* x,
                                             const unsigned char* y) {
    static_assert(X::kColumns == Y::kColumns);
    const uint64_t first_x = wgmma_descriptor<128>(x, 0, 8 * kRowBytes),
                   first_y = wgmma_descriptor<128>(y, 0, 8 * kRowBytes);
    wgmma_fence(scores);
#pragma unroll
    for (int k = 0; k < X::kColumns; k += 16) {
        const int panel = k / kPanelColumns, byte = k % kPanelColumns * 2;
        wgmma_m64k16<Number>(scores, wgmma_advance(first_x, panel * X::kPanelBytes + byte),
                             wgmma_advance(first_y, panel * Y::kPanelBytes + byte), k > 0);
    }
    wgmma_commit();
}

// acc += P y, or acc = P y. The columns of whole panels go in one product, those of a part of a panel in another.
template <class Number, class Y>
__device__ __forceinline__ void start_columns(float (&acc)[Y::kColumns / 8][4], uint32_t (&P)[Y::kRows / 16][4],
                                              const unsigned char* y, bool accumulate = true) {
    constexpr int kWhole = Y::kColumns / 64 * 8, kRest = Y::kColumns / 8 - kWhole;  // in fragments of 8 columns
    const uint64_t first = wgmma_descriptor<128>(y, Y::kPanelBytes, 8 * kRowBytes);
    wgmma_fence(acc, P);
#pragma unroll
    for (int k = 0; k < Y::kRows / 16; ++k) {
        const uint64_t rows = wgmma_advance(first, k * 16 * kRowBytes);
        const bool add = accumulate || k > 0;
        wgmma_m64k16<Number, true>(reinterpret_cast<float(&)[kWhole][4]>(acc[0]), P[k], rows, add);
        if constexpr (kRest > 0)
            wgmma_m64k16<Number, true>(reinterpret_cast<float(&)[kRest][4]>(acc[kWhole]), P[k],
                                       wgmma_advance(rows, kWhole / 8 * Y::kPanelBytes), add);
    }
    wgmma_commit();
}

// Writes factor * acc, rounded, to a group's 64 rows of a tile in shared memory, which have been read for the last
// time. For the copy engine to see it: fence_proxy_async, and a barrier of the group.
template <class Number, class Tile, int kColumnTiles>
__device__ __forceinline__ void put_rows(unsigned char* rows, const float (&acc)[kColumnTiles][4],
                                         const float (&factor)[2]) {
    const int first_row = not_hoisted(warp() % 4 * 16 + quad());
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + half * 8, column = n * 8 + 2 * in_quad();
            const int byte = row * kRowBytes + column % kPanelColumns * 2;
            *reinterpret_cast<uint32_t*>(rows + column / kPanelColumns * Tile::kPanelBytes + swizzled<128>(byte)) =
                pack<Number>(acc[n][2 * half] * factor[half], acc[n][2 * half + 1] * factor[half]);
        }
}

}  // namespace
