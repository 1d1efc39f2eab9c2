// dev/matmul.cu: the matrix product, eleven times.
//
//   out (M, N) = a (M, K) b (K, N)          all row-major; f32, bf16 or f16, sums in float32;  2 M N K flops
//
// This is where a language model spends its time, and the one operation that can be bound by arithmetic instead of
// memory: each of the M K + K N inputs takes part in N or M products. The climb is about getting that reuse out of fast
// memory. A multiprocessor of an H100 makes 128 multiply-adds a clock. They want 256 numbers, and it gets from
//
//     device memory     4 numbers a clock      so each number must be used 64 times once it is there
//     shared memory    32                                                   8 times
//     registers        as many as it needs
//
//   rung               out elements a thread    reads for each multiply-add: of device memory, of shared memory
//   naive, coalesced         1                                                2                 0
//   shared tiles             1                                                2/32              2
//   register tiles           8 x 8                                            2/128             2/8
//
// Tensor cores multiply small matrices in one instruction, 15 times as fast as all this in 16 bits: rungs 7 to 10, with
// --dtype bf16 or f16. (In float32 they would have to cut the factors to TF32.) A multiprocessor of an H100 then makes
// 2048 multiply-adds a clock, and the same question comes back, 16 times harder:
//
//   rung               out elements                        reads for each multiply-add: of device memory, of shared memory
//   mma.sync           128 x 128 a block, 64 x 32 a warp                              2/128             1/64 + 1/32
//   wgmma              128 x 128 a block, 64 x 128 four warps                         2/128             1/64 + 1/128
//   persistent         128 x 256 a block, 64 x 256 four warps                         1/128 + 1/256     1/64 + 1/256
//
// Shared memory gives 64 16-bit numbers a clock, which is 2048/64 = 1/32 for each multiply-add: mma.sync, whose operands
// go through registers, asks for more than that, wgmma, which reads shared memory itself, for less. The tensor cores of
// an A100 are half as fast, and mma.sync feeds them.
//
//   run      make dev && build/cpu/dev/matmul                   (on a GPU build/cuda/dev/matmul)
//            build/cpu/dev/matmul --check | --size 512x512x512 | --dtype bf16 | --rung 4
//   debug    make DEBUG=1 DEVICE=cpu dev && gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/matmul --check --rung 4
//            (... --rung 9 --dtype bf16 --size 130x264x328: the rungs on tensor cores need 16 bits)
#include "dev/ladder.h"
#include "layers/ptx.cuh"
#include "layers/tensor_map.h"

#include <limits>

namespace {

// What each rung is called with. A rung for one dtype only says so with check().
struct Problem {
    Tensor out, a, b;
    int64_t M, N, K;
};

unsigned blocks_along(int64_t n, int64_t tile) { return static_cast<unsigned>(narrow(ceil_div(n, tile), "blocks")); }

// ---------------------------------------------------------------------------------------------------------------------
// 1. Naive: a thread an element of out; threadIdx.x runs down the rows, as one might write it first.
//
// The 32 threads of a warp have 32 rows and one column: they read a[m][k] at addresses that are K numbers apart, 32
// sectors of 32 bytes for 128 bytes of use, and write out the same way. All of them want the same b[k][n]: that is one
// load.

constexpr int kSide = 32;  // of the square that a block computes in rungs 1 to 3

template <class T>
__global__ void __launch_bounds__(kSide* kSide)
    matmul_naive_kernel(T* out, const T* a, const T* b, int64_t M, int64_t N, int64_t K) {
    const int64_t m = static_cast<int64_t>(blockIdx.y) * kSide + threadIdx.x;
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kSide + threadIdx.y;
    if (m >= M || n >= N) return;
    float sum = 0.0f;
    for (int64_t k = 0; k < K; ++k) sum = fmaf(to_float(a[m * K + k]), to_float(b[k * N + n]), sum);
    out[m * N + n] = from_float<T>(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Coalesced: threadIdx.x runs along the columns. Only x and y have changed places; now the warp reads 32 neighbours
// of b and writes 32 neighbours of out, 4 sectors each, and all want the same a[m][k].

template <class T>
__global__ void __launch_bounds__(kSide* kSide)
    matmul_coalesced_kernel(T* out, const T* a, const T* b, int64_t M, int64_t N, int64_t K) {
    const int64_t m = static_cast<int64_t>(blockIdx.y) * kSide + threadIdx.y;
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kSide + threadIdx.x;
    if (m >= M || n >= N) return;
    float sum = 0.0f;
    for (int64_t k = 0; k < K; ++k) sum = fmaf(to_float(a[m * K + k]), to_float(b[k * N + n]), sum);
    out[m * N + n] = from_float<T>(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. Shared tiles: the 1024 threads of a block need 32 rows of a and 32 columns of b, and each number of them 32 times.
// So they fetch a tile of 32 x 32 of both into shared memory, one number a thread, multiply the tiles, and go on along
// K. Device memory is read 32 times less. Now each multiply-add waits for two reads of shared memory, which gives 32
// numbers a clock and so feeds 16 multiply-adds, an eighth of what the multiprocessor could do.
//
// No bank conflicts: a_tile[y][k] is one word for the whole warp (y is the same), b_tile[k][x] are 32 neighbours.

template <class T>
__global__ void __launch_bounds__(kSide* kSide)
    matmul_shared_kernel(T* out, const T* a, const T* b, int64_t M, int64_t N, int64_t K) {
    __shared__ float a_tile[kSide][kSide], b_tile[kSide][kSide];
    const int x = threadIdx.x, y = threadIdx.y;
    const int64_t m = static_cast<int64_t>(blockIdx.y) * kSide + y, n = static_cast<int64_t>(blockIdx.x) * kSide + x;
    float sum = 0.0f;
    for (int64_t first = 0; first < K; first += kSide) {
        // Zeros behind the edges add nothing; so every thread stays for the barriers.
        a_tile[y][x] = m < M && first + x < K ? to_float(a[m * K + first + x]) : 0.0f;
        b_tile[y][x] = first + y < K && n < N ? to_float(b[(first + y) * N + n]) : 0.0f;
        __syncthreads();  // both tiles are complete
        for (int k = 0; k < kSide; ++k) sum = fmaf(a_tile[y][k], b_tile[k][x], sum);
        __syncthreads();  // nobody reads them any more: they may be overwritten
    }
    if (m < M && n < N) out[m * N + n] = from_float<T>(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. Register tiles: a thread computes 8 x 8 elements. For one k it reads 8 numbers of a and 8 of b from shared memory,
// and makes 64 multiply-adds of them: a quarter of a read for each instead of two. A block of 16 x 16 threads computes
// 128 x 128 elements, so device memory is read 4 times less than before, too. The price is registers: 64 sums, 16
// factors and the addresses. A multiprocessor has 65536, so with 128 a thread two such blocks fit, and that is what the
// 2 in __launch_bounds__ asks the compiler for. (It would take 162, and then there is no second block to work while the
// first one waits.)
//
// Its 8 columns are x, x + 16, ..., x + 112, not 8 neighbours: so 16 threads read 16 neighbouring words of b_tile and
// the stores are coalesced. a_tile is transposed, (k, m): the same for rows.

constexpr int kTile = 128;               // rows and columns of out that a block computes
constexpr int kTileK = 16;               // of K at a time
constexpr int kThreads = 16, kEach = 8;  // kThreads x kThreads threads, kEach x kEach elements each
constexpr int kBlock = kThreads * kThreads;
constexpr int kLoads = kTile * kTileK / kBlock;  // numbers of each tile that a thread fetches
static_assert(kThreads * kEach == kTile && kLoads * kBlock == kTile * kTileK);

template <class T>
__global__ void __launch_bounds__(kBlock, 2)
    matmul_registers_kernel(T* out, const T* a, const T* b, int64_t M, int64_t N, int64_t K) {
    // + 1: the 16 lanes that store the 16 k of one row of a meet 16 banks, not one.
    __shared__ float a_tile[kTileK][kTile + 1];
    __shared__ float b_tile[kTileK][kTile];
    const int t = threadIdx.x, x = t % kThreads, y = t / kThreads;
    const int64_t first_m = static_cast<int64_t>(blockIdx.y) * kTile,
                  first_n = static_cast<int64_t>(blockIdx.x) * kTile;
    float sums[kEach][kEach] = {};
    for (int64_t first = 0; first < K; first += kTileK) {
#pragma unroll
        for (int l = 0; l < kLoads; ++l) {
            const int i = l * kBlock + t, a_k = i % kTileK, a_m = i / kTileK, b_n = i % kTile, b_k = i / kTile;
            const int64_t m = first_m + a_m, n = first_n + b_n;
            a_tile[a_k][a_m] = m < M && first + a_k < K ? to_float(a[m * K + first + a_k]) : 0.0f;
            b_tile[b_k][b_n] = n < N && first + b_k < K ? to_float(b[(first + b_k) * N + n]) : 0.0f;
        }
        __syncthreads();  // both tiles are complete
        for (int k = 0; k < kTileK; ++k) {
            float a_k[kEach], b_k[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) a_k[i] = a_tile[k][y + i * kThreads], b_k[i] = b_tile[k][x + i * kThreads];
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                for (int j = 0; j < kEach; ++j) sums[i][j] = fmaf(a_k[i], b_k[j], sums[i][j]);
        }
        __syncthreads();  // nobody reads them any more
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        for (int j = 0; j < kEach; ++j) {
            const int64_t m = first_m + y + i * kThreads, n = first_n + x + j * kThreads;
            if (m < M && n < N) out[m * N + n] = from_float<T>(sums[i][j]);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. Vectorised: 16 bytes a load. Fetching from device memory takes a quarter of the instructions (an eighth for 16
// bits), and so does reading shared memory: the 8 columns of a thread are two groups of 4 neighbours, 4 x ... and 64 +
// 4 x ..., which are two 16-byte reads. kN is the number of elements in a load: matrices whose rows are no multiple of
// 16 bytes are fetched one by one, kN = 1.

// 4 more columns: rows stay on 16-byte boundaries, and fewer of the stores of a column meet in one bank.
struct alignas(16) Tiles {
    float a[kTileK][kTile + 4], b[kTileK][kTile];
};

// What a thread fetches of a tile, on its way from device to shared memory.
template <class T, int kN>
struct Fetched {
    Packed<T, kN> a[kLoads / kN], b[kLoads / kN];
};

template <class T, int kN>
__device__ __forceinline__ void fetch(Fetched<T, kN>& f, const T* a, const T* b, int64_t first, int64_t M, int64_t N,
                                      int64_t K) {
    const int64_t first_m = static_cast<int64_t>(blockIdx.y) * kTile,
                  first_n = static_cast<int64_t>(blockIdx.x) * kTile;
#pragma unroll
    for (int l = 0; l < kLoads / kN; ++l) {
        const int i = (l * kBlock + static_cast<int>(threadIdx.x)) * kN;
        const int64_t m = first_m + i / kTileK, a_k = first + i % kTileK, n = first_n + i % kTile,
                      b_k = first + i / kTile;
        f.a[l] = f.b[l] = Packed<T, kN>{};
        if (m < M && a_k < K) f.a[l] = load_packed<T, kN>(a + m * K + a_k);
        if (n < N && b_k < K) f.b[l] = load_packed<T, kN>(b + b_k * N + n);
    }
}
template <class T, int kN>
__device__ __forceinline__ void put(Tiles& tiles, const Fetched<T, kN>& f) {
#pragma unroll
    for (int l = 0; l < kLoads / kN; ++l) {
        const int i = (l * kBlock + static_cast<int>(threadIdx.x)) * kN;
        for (int e = 0; e < kN; ++e) {
            tiles.a[i % kTileK + e][i / kTileK] = to_float(f.a[l].v[e]);
            tiles.b[i / kTile][i % kTile + e] = to_float(f.b[l].v[e]);
        }
    }
}

// Row or column number i (of 8) of thread number `thread` (of 16).
__device__ __forceinline__ int place(int thread, int i) { return i / 4 * (kTile / 2) + 4 * thread + i % 4; }

__device__ __forceinline__ void multiply(float (&sums)[kEach][kEach], const Tiles& tiles) {
    const int x = threadIdx.x % kThreads, y = threadIdx.x / kThreads;
    for (int k = 0; k < kTileK; ++k) {
        Packed<float> a[kEach / 4], b[kEach / 4];
#pragma unroll
        for (int i = 0; i < kEach / 4; ++i) {
            a[i] = load_packed(&tiles.a[k][place(y, 4 * i)]);
            b[i] = load_packed(&tiles.b[k][place(x, 4 * i)]);
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            for (int j = 0; j < kEach; ++j) sums[i][j] = fmaf(a[i / 4].v[i % 4], b[j / 4].v[j % 4], sums[i][j]);
    }
}

template <class T>
__device__ __forceinline__ void store(T* out, const float (&sums)[kEach][kEach], int64_t M, int64_t N) {
    const int x = threadIdx.x % kThreads, y = threadIdx.x / kThreads;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        for (int j = 0; j < kEach; ++j) {
            const int64_t m = static_cast<int64_t>(blockIdx.y) * kTile + place(y, i);
            const int64_t n = static_cast<int64_t>(blockIdx.x) * kTile + place(x, j);
            if (m < M && n < N) out[m * N + n] = from_float<T>(sums[i][j]);
        }
}

template <class T, int kN>
__global__ void __launch_bounds__(kBlock, 2)
    matmul_vectorised_kernel(T* out, const T* a, const T* b, int64_t M, int64_t N, int64_t K) {
    __shared__ Tiles tiles;
    Fetched<T, kN> fetched;
    float sums[kEach][kEach] = {};
    for (int64_t first = 0; first < K; first += kTileK) {
        fetch(fetched, a, b, first, M, N, K);
        put(tiles, fetched);
        __syncthreads();  // both tiles are complete
        multiply(sums, tiles);
        __syncthreads();  // nobody reads them any more
    }
    store(out, sums, M, N);
}

// ---------------------------------------------------------------------------------------------------------------------
// 6. Double buffered: the loads of the next tile are on their way while this one is multiplied. A load from device
// memory takes some 600 clocks, and in rung 5 all threads of a block wait for it together. Two tiles in turn also save
// a barrier a round: what is written now is read in the next round, and was last read in the round before, behind this
// round's barrier.

template <class T, int kN>
__global__ void __launch_bounds__(kBlock, 2)
    matmul_double_buffered_kernel(T* out, const T* a, const T* b, int64_t M, int64_t N, int64_t K) {
    __shared__ Tiles tiles[2];
    Fetched<T, kN> fetched;
    float sums[kEach][kEach] = {};
    fetch(fetched, a, b, 0, M, N, K);
    put(tiles[0], fetched);
    int turn = 0;
    for (int64_t first = 0; first < K; first += kTileK, turn ^= 1) {
        __syncthreads();  // this turn's tiles are complete, and nobody reads the other ones any more
        fetch(fetched, a, b, first + kTileK, M, N, K);  // behind K: nothing but zeros
        multiply(sums, tiles[turn]);
        put(tiles[turn ^ 1], fetched);
    }
    store(out, sums, M, N);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers of rungs 1 to 6: one form for 1 to 3, one for 4, one for 5 and 6.

template <class T>
using MatmulKernel = void(T* out, const T* a, const T* b, int64_t M, int64_t N, int64_t K);

template <class T, MatmulKernel<T>* kernel>
void launch(const Problem& p, int tile, dim3 block, cudaStream_t stream) {
    const dim3 grid(blocks_along(p.N, tile), blocks_along(p.M, tile));
    kernel<<<grid, block, 0, stream>>>(p.out.ptr<T>(), p.a.ptr<T>(), p.b.ptr<T>(), p.M, p.N, p.K);
    cudaCheckLaunch();
}

void matmul_naive(const Problem& p, cudaStream_t stream) {
    dispatch(p.out.dtype, [&](auto zero) {
        using T = decltype(zero);
        launch<T, matmul_naive_kernel<T>>(p, kSide, dim3(kSide, kSide), stream);
    });
}
void matmul_coalesced(const Problem& p, cudaStream_t stream) {
    dispatch(p.out.dtype, [&](auto zero) {
        using T = decltype(zero);
        launch<T, matmul_coalesced_kernel<T>>(p, kSide, dim3(kSide, kSide), stream);
    });
}
void matmul_shared(const Problem& p, cudaStream_t stream) {
    dispatch(p.out.dtype, [&](auto zero) {
        using T = decltype(zero);
        launch<T, matmul_shared_kernel<T>>(p, kSide, dim3(kSide, kSide), stream);
    });
}
void matmul_registers(const Problem& p, cudaStream_t stream) {
    dispatch(p.out.dtype, [&](auto zero) {
        using T = decltype(zero);
        launch<T, matmul_registers_kernel<T>>(p, kTile, kBlock, stream);
    });
}

template <class T>
bool rows_are_packs(const Problem& p) {
    return p.K % Packed<T>::n == 0 && p.N % Packed<T>::n == 0;
}
void matmul_vectorised(const Problem& p, cudaStream_t stream) {
    dispatch(p.out.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (rows_are_packs<T>(p)) launch<T, matmul_vectorised_kernel<T, Packed<T>::n>>(p, kTile, kBlock, stream);
        else launch<T, matmul_vectorised_kernel<T, 1>>(p, kTile, kBlock, stream);
    });
}
void matmul_double_buffered(const Problem& p, cudaStream_t stream) {
    dispatch(p.out.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (rows_are_packs<T>(p)) launch<T, matmul_double_buffered_kernel<T, Packed<T>::n>>(p, kTile, kBlock, stream);
        else launch<T, matmul_double_buffered_kernel<T, 1>>(p, kTile, kBlock, stream);
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// 7. Tensor cores: mma.sync. A warp multiplies 16 x 16 by 16 x 8 in one instruction, with operands in registers, in
// fragments (layers/ptx.cuh). Eight warps compute 128 x 128, each 64 x 32: for 16 of K it loads 4 fragments of a and 4 of
// b, and makes 16 products of them. ldmatrix loads a fragment of a, or two of b, at a time; it turns the 8 x 8 matrices of
// b around on the way, because mma wants the pairs of b down a column.
//
// Tiles stay 16-bit in shared memory, and lie in panels of 64 columns: rows of 128 bytes, all 32 banks. ldmatrix reads 8
// rows of 16 bytes at a time, at the same column of 8 neighbouring rows: all in the same 4 banks. So the eight 16-byte
// packs of a row are permuted by the row's number: pack p of row r lies at place p ^ (r % 8). Then the 8 rows meet 8
// different groups of banks, and no byte is spent on padding. That is the swizzle of 128 bytes that the copy engine of
// Hopper writes, too.
//
// The tiles come by cp.async, past the registers, into kStages stages in turn: while one is multiplied, kStages - 1 are
// on their way. One barrier a round: behind it the tile of this round is there for all threads, and nobody reads the one
// of the round before any more, whose stage is filled again.

constexpr int kWarps = 8, kMmaThreads = kWarps * kWarp;
constexpr int kPanelColumns = 64, kRowBytes = 128;                             // of a panel
constexpr int kStepK = 64;                                                     // of K a round
constexpr int kBPanelBytes = kStepK * kRowBytes;                               // 64 of K x 64 of N
constexpr int kATileBytes = kTile * kRowBytes, kBTileBytes = 2 * kBPanelBytes;  // 128 of M x 64 of K; 64 of K x 128 of N
constexpr int kMmaStageBytes = kATileBytes + kBTileBytes;

// Starts the copies of a panel of x (n_rows x n_columns), whose first element is (row0, column0); zeros behind the edges.
// Rows that are no multiples of 16 bytes (packs == false) go one by one, through registers, and are there at once.
template <int kRows, class T>
__device__ __forceinline__ void copy_panel(unsigned char* panel, const T* x, int64_t row0, int64_t column0, int64_t n_rows,
                                           int64_t n_columns, bool packs) {
    for (int i = static_cast<int>(threadIdx.x); i < kRows * 8; i += kMmaThreads) {
        const int64_t row = row0 + i / 8, column = column0 + i % 8 * 8, at = row * n_columns + column;
        T* to = reinterpret_cast<T*>(panel + swizzled<128>(i * 16));
        const bool is_there = row < n_rows && column < n_columns;
        if (packs) {
            cp_async_16(to, is_there ? x + at : x, is_there);
        } else {
#pragma unroll 1  // the registers are for the sums
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
__device__ __forceinline__ void multiply_mma(float (&sums)[4][4][4], const unsigned char* stage, int warp_m, int warp_n) {
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
    const int64_t m0 = static_cast<int64_t>(blockIdx.y) * kTile, n0 = static_cast<int64_t>(blockIdx.x) * kTile;
    const auto load = [&](int64_t k0, int stage) {
        unsigned char* to = tiles + stage * kMmaStageBytes;
        if (k0 < K) {
            copy_panel<kTile>(to, a, m0, k0, M, K, packs);
            for (int panel = 0; panel < 2; ++panel)
                copy_panel<kStepK>(to + kATileBytes + panel * kBPanelBytes, b, k0, n0 + panel * kPanelColumns, K, N, packs);
        }
        cp_async_commit();  // a group each round, behind the end of K an empty one, so that the wait below counts right
    };
    float sums[4][4][4] = {};
    for (int stage = 0; stage < kStages - 1; ++stage) load(stage * kStepK, stage);
    int stage = 0;
    for (int64_t k0 = 0; k0 < K; k0 += kStepK, stage = (stage + 1) % kStages) {
        cp_async_wait<kStages - 2>();
        __syncthreads();  // all threads' copies of this stage have landed, and nobody reads the stage before any more
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

template <class F>
void dispatch_16_bit(DType dtype, F&& f) {
    if (dtype == DType::bf16) f(__nv_bfloat16{});
    else f(__half{});
}
template <class Kernel>
void allow_shared(Kernel* kernel, int bytes) {  // a launch may use more than 48 KiB only if it is asked for
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

template <int kStages>
void launch_mma(const Problem& p, cudaStream_t stream) {
    dispatch_16_bit(p.out.dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int kBytes = kStages * kMmaStageBytes + kTileAlignment;
        allow_shared(matmul_mma_kernel<T, kStages>, kBytes);
        const dim3 grid(blocks_along(p.N, kTile), blocks_along(p.M, kTile));
        matmul_mma_kernel<T, kStages><<<grid, kMmaThreads, kBytes, stream>>>(
            p.out.ptr<T>(), p.a.ptr<T>(), p.b.ptr<T>(), p.M, p.N, p.K, rows_are_packs<T>(p));
        cudaCheckLaunch();
    });
}
void matmul_mma(const Problem& p, cudaStream_t stream) { launch_mma<2>(p, stream); }

// ---------------------------------------------------------------------------------------------------------------------
// 8. Three stages. A round of rung 7 is 128 x 128 x 64 multiply-adds, 512 clocks of an H100's tensor cores, and a load
// from device memory takes longer: with one tile on its way the block still waits. Two on their way cover it. 96 KiB a
// block: two fit on a multiprocessor of an H100, one on that of an A100.

void matmul_mma_stages(const Problem& p, cudaStream_t stream) { launch_mma<3>(p, stream); }

// ---------------------------------------------------------------------------------------------------------------------
// 9. wgmma and the copy engine (TMA): Hopper, sm_90a. Four warps, a group, multiply 64 x 16 by 16 x 128 in one
// instruction, which reads both operands from shared memory, and runs beside the threads, as the copy engine does. What is
// left to the threads is to say when:
//
//     producer     one thread     wait(empty[i])   announce the bytes, start the copies of a and b to stage i
//     consumers    two groups     wait(full[i])    start the products of stage i;   those of the stage before are done:
//                                                  arrive(empty[i - 1])
//
// The copy engine computes addresses, writes zeros behind the edges, and swizzles; a panel is one instruction. So the
// producer needs few registers and gives them to the consumers, whose sums take 64 a thread. A product of one stage is
// always waiting behind the one that runs: tensor cores never stop for a barrier.
//
//     a       128 x 64, one panel, K-major                          consumer g has rows 64 g ...
//     b       64 x kColumns in panels of 64 columns, N-major        read as it lies
//     out     through shared memory: 64 x 64 panels, which the copy engine stores, in whole lines
//
// A block goes through tiles of out, blockIdx.x, blockIdx.x + gridDim.x, ...; here there are as many blocks as tiles. They
// are numbered along strips of kStrip rows of tiles, so that blocks that run at the same time share rows of a and
// columns of b, which they then find in the L2 cache.

constexpr int kGroup = 128, kConsumers = 2, kWgmmaThreads = kGroup * (kConsumers + 1), kGroupRows = 64, kStrip = 8;
constexpr int kOutPanelBytes = kGroupRows * kRowBytes;
static_assert(kConsumers * kGroupRows == kTile);

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
            tensor_load<2>(to, &maps.a, {step * kStepK, at.x * kTile}, &barriers.full[stage]);
            for (int panel = 0; panel < Tile::kPanels; ++panel)
                tensor_load<2>(to + kATileBytes + panel * kBPanelBytes, &maps.b,
                               {at.y * Tile::kColumns + panel * kPanelColumns, step * kStepK}, &barriers.full[stage]);
        }
    }
}

// A group's 64 rows of a tile, from registers through its panels of shared memory to device memory.
template <class T, class Tile>
__device__ __forceinline__ void store_rows(const MatmulMaps& maps, unsigned char* panels,
                                           const float (&d)[Tile::kColumns / 8][4], int64_t M, int64_t N, int m0, int n0) {
    const int group = static_cast<int>(threadIdx.x) / kGroup, in_group = static_cast<int>(threadIdx.x) % kGroup;
    const int lane = in_group % kWarp, row = in_group / kWarp * 16 + lane / 4;
    if (in_group == 0) bulk_wait_read<0>();
    named_barrier_sync(1 + group, kGroup);  // the copy engine has read the rows of the tile before: they may be overwritten
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
    __syncthreads();  // the mbarriers are there. The last barrier of all threads

    if (group == kConsumers) {
        give_registers<24>();
        if (in_group / kWarp == 0 && elect_one()) produce<Tile>(maps, grid, tiles, barriers);
        return;
    }
    take_registers<240>();
    float d[Tile::kColumns / 8][4];
    int round = 0;
    for (int i = static_cast<int>(blockIdx.x); i < grid.rows * grid.columns; i += static_cast<int>(gridDim.x)) {
        for (int step = 0; step < grid.steps; ++step, ++round) {
            const int stage = round % Tile::kStages;
            const unsigned char* from = tiles + stage * Tile::kStageBytes;
            mbarrier_wait(&barriers.full[stage], round / Tile::kStages % 2);
            const uint64_t a = wgmma_descriptor<128>(from + group * kGroupRows * kRowBytes, 0, 8 * kRowBytes);
            const uint64_t b = wgmma_descriptor<128>(from + kATileBytes, kBPanelBytes, 8 * kRowBytes);
            wgmma_fence();
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
                            at.x * kTile + group * kGroupRows, at.y * Tile::kColumns);
    }
    if (in_group == 0) bulk_wait_read<0>();  // shared memory is the next block's when this one ends
}

// What is missing for rungs 9 and 10; null: nothing.
const char* no_wgmma(const Problem& p) {
    if (!has_wgmma()) return "needs a GPU of compute capability 9.0 (Hopper)";
    if (p.K % 8 != 0 || p.N % 8 != 0) return "needs rows of whole 16 bytes: N and K multiples of 8";
    return nullptr;
}

template <class Tile>
void launch_wgmma(const Problem& p, int most_blocks, cudaStream_t stream) {
    dispatch_16_bit(p.out.dtype, [&](auto zero) {
        using T = decltype(zero);
        const auto map = [](const Tensor& x, int64_t box_rows) {
            return make_tensor_map(x.data, x.dtype, {x.shape[1], x.shape[0]}, {x.shape[1]}, {kPanelColumns, box_rows}, 128);
        };
        const MatmulMaps maps{map(p.out, kGroupRows), map(p.a, kTile), map(p.b, kStepK)};
        const auto count = [](int64_t n, int64_t tile) { return narrow(ceil_div(n, tile), "tiles"); };
        const TileGrid grid{count(p.M, kTile), count(p.N, Tile::kColumns), count(p.K, kStepK)};
        const int n_tiles = narrow(static_cast<int64_t>(grid.rows) * grid.columns, "tiles");
        allow_shared(matmul_wgmma_kernel<T, Tile>, Tile::kSharedBytes);
        const int n_blocks = std::min(n_tiles, most_blocks);
        matmul_wgmma_kernel<T, Tile><<<n_blocks, kWgmmaThreads, Tile::kSharedBytes, stream>>>(maps, grid, p.M, p.N);
        cudaCheckLaunch();
    });
}
void matmul_wgmma(const Problem& p, cudaStream_t stream) {
    launch_wgmma<WgmmaTile<128, 4>>(p, std::numeric_limits<int>::max(), stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// 10. Wide tiles, persistent blocks. With 256 columns each row of a is read for twice as many products; a consumer's sums
// take 128 registers a thread, which is why the producer gives its own away. And there are as many blocks as
// multiprocessors, which stay: while the consumers of a block round and store one tile, its producer is already filling
// the ring for the next, so loads never stop, either. In rung 9 that time is lost, once a tile, and the mbarriers are
// made anew.

void matmul_wgmma_persistent(const Problem& p, cudaStream_t stream) {
    int n_multiprocessors = 0;
    cudaCheck(cudaDeviceGetAttribute(&n_multiprocessors, cudaDevAttrMultiProcessorCount, device().index));
    launch_wgmma<WgmmaTile<256, 3>>(p, n_multiprocessors, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// 11. The product: cuBLASLt (cpu/sgemm.cpp on the CPU device), layers/matmul.cu. For 16-bit numbers it uses the tensor cores.

void matmul_product(const Problem& p, cudaStream_t stream) { matmul(p.out, p.a, p.b, {}, stream); }

// ---------------------------------------------------------------------------------------------------------------------
// The climb

// Rows [first, first + count) of a b.
std::vector<double> matmul_reference(const std::vector<float>& a, const std::vector<float>& b, int64_t first,
                                     int64_t count, int64_t N, int64_t K) {
    std::vector<double> out(static_cast<size_t>(count * N));
#pragma omp parallel for
    for (int64_t m = 0; m < count; ++m)
        for (int64_t k = 0; k < K; ++k) {
            const double factor = a[static_cast<size_t>((first + m) * K + k)];
            for (int64_t n = 0; n < N; ++n)
                out[static_cast<size_t>(m * N + n)] += factor * b[static_cast<size_t>(k * N + n)];
        }
    return out;
}

void climb(Ladder& ladder) {
    const int64_t M = ladder.size(0), N = ladder.size(1), K = ladder.size(2);
    const Problem p{ladder.output({M, N}, ladder.dtype()), ladder.normal({M, K}), ladder.normal({K, N}), M, N, K};

    // An element is a random sum of K terms; random_sum_error covers the rounding of its products too (half of them are
    // fused with the sum, none is larger). Then it is rounded to the dtype. In float64 a large product takes minutes:
    // of more than 256 rows the first and the last 16 are checked.
    const std::vector<float> a = ladder.host(p.a), b = ladder.host(p.b);
    std::vector<Expectation> expectations;
    const auto expect_rows = [&](int64_t first, int64_t count) {
        expectations.push_back({"out", p.out.slice(first, count), matmul_reference(a, b, first, count, N, K),
                                ladder.dtype() == DType::f32 ? 0 : unit_roundoff(ladder.dtype()), random_sum_error(K)});
    };
    if (M <= 256) {
        expect_rows(0, M);
    } else {
        expect_rows(0, 16);
        expect_rows(M - 16, 16);
    }

    ladder.table("matmul", Limit::matmul,
                 2.0 * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(K));
    ladder.expects(expectations);
    const auto rung = [&](const char* name, const char* why, void (*launch)(const Problem&, cudaStream_t)) {
        ladder.rung(name, why, [&](cudaStream_t stream) { launch(p, stream); });
    };
    rung("naive", "a thread an element, a warp along a column", matmul_naive);
    rung("coalesced", "a warp along a row", matmul_coalesced);
    rung("shared tiles", "each number fetched once for 32 threads", matmul_shared);
    rung("register tiles", "8 x 8 elements a thread", matmul_registers);
    rung("vectorised", "16 bytes a load", matmul_vectorised);
    rung("double buffered", "load the next tile while multiplying this one", matmul_double_buffered);
    // A rung on tensor cores, unless something speaks against it.
    const auto tensor_rung = [&](const char* name, const char* why, void (*launch)(const Problem&, cudaStream_t),
                                 const char* why_not) {
        if (ladder.dtype() == DType::f32) why_not = "needs --dtype bf16 or f16";
        if (why_not) ladder.no_rung(name, why_not);
        else rung(name, why, launch);
    };
    const char* why_no_wgmma = no_wgmma(p);
    tensor_rung("tensor cores", "mma.sync, 64 x 32 elements a warp; cp.async, swizzled", matmul_mma, nullptr);
    tensor_rung("three stages", "two tiles on their way", matmul_mma_stages, nullptr);
    tensor_rung("wgmma", "operands in shared memory; a producer, two consumers", matmul_wgmma, why_no_wgmma);
    tensor_rung("persistent", "128 x 256; the next tile is loaded while this one is stored", matmul_wgmma_persistent,
                why_no_wgmma);
    rung("product", "cuBLASLt", matmul_product);
}

}  // namespace

int main(int argc, char** argv) {
    return run_ladder(argc, argv,
                      {.name = "matmul",
                       .sizes = "M x N x K",
                       .cpu_size = {512, 512, 512},
                       .gpu_size = {4096, 4096, 4096},
                       .check_sizes = {{1, 1, 1}, {33, 65, 31}, {130, 144, 40}, {5, 131, 129}, {130, 264, 328}},
                       .dtypes = {DType::f32, DType::bf16, DType::f16},
                       .climb = climb});
}
