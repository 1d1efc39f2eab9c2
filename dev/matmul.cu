// dev/matmul.cu: the matrix product, twelve times.
//
//   out (M, N) = a (M, K) b (K, N)          all row-major; f32, bf16 or f16, sums in float32;  2 M N K flops
//
// A language model spends most of its time here, and it is the one operation that can be limited by arithmetic instead
// of memory: each of the M K + K N inputs takes part in N or M products. The rungs move this reuse into faster and
// faster memory. A multiprocessor of an H100 does 128 multiply-adds per clock. They need 256 operands, and the
// multiprocessor gets from
//
//     device memory     4 numbers per clock    so each number must be used 64 times after it is loaded
//     shared memory    32                                                   8 times
//     registers        as many as it needs
//
//   rung               out elements per thread  reads for each multiply-add: of device memory, of shared memory
//   naive, coalesced         1                                                2                 0
//   shared tiles             1                                                2/32              2
//   register tiles           8 x 8                                            2/128             2/8
//
// Tensor cores multiply small matrices in one instruction, in 16 bits with 16 times as many multiply-adds per clock:
// rungs 7 to 11, with --dtype bf16 or f16. (In float32 they would round the factors to TF32.) The kernels of rungs 7 to
// 10, with the reads that they need from each memory, are in dev/matmul_tensor_cores.cuh.
//
//   run      make dev && build/cpu/dev/matmul                   (on a GPU build/cuda/dev/matmul)
//            build/cpu/dev/matmul --check | --size 512x512x512 | --dtype bf16 | --rung 4
//   debug    make DEVICE=cpu debug FILES=dev/matmul.cu PROGRAM=dev/matmul &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/matmul --check --rung 4
//            (... --rung 9 --dtype bf16 --size 130x264x328: the rungs on tensor cores need 16 bits)
#include "dev/ladder.h"
#include "dev/matmul_tensor_cores.cuh"
#include "layers/hopper_matmul.h"

#include <limits>

namespace {

// The arguments of each rung.
struct Problem {
    Tensor out, a, b;
    int64_t M, N, K;
};

// ---------------------------------------------------------------------------------------------------------------------
// 1. Naive: one thread per element of out; threadIdx.x is the row, as one might write it at first.
//
// The 32 threads of a warp have 32 rows and one column: they read a[m][k] at addresses that are K numbers apart, 32
// sectors of 32 bytes for 128 bytes of use, and write out the same way. All of them need the same b[k][n]: that is one
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
// 2. Coalesced: threadIdx.x is the column. Only x and y are exchanged; now the warp reads 32 neighbours of b and writes
// 32 neighbours of out, 4 sectors each, and all threads need the same a[m][k].

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
// So they fetch a tile of 32 x 32 of both into shared memory, one number per thread, multiply the tiles, and go on
// along K. Device memory is read 32 times less. Now each multiply-add needs two reads of shared memory, which gives 32
// numbers per clock: enough for 16 multiply-adds, an eighth of what the multiprocessor could do.
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
        // Beyond the edges the tiles hold zeros, which add nothing: so every thread can take part in the barriers.
        a_tile[y][x] = m < M && first + x < K ? to_float(a[m * K + first + x]) : 0.0f;
        b_tile[y][x] = first + y < K && n < N ? to_float(b[(first + y) * N + n]) : 0.0f;
        __syncthreads();  // both tiles are complete
        for (int k = 0; k < kSide; ++k) sum = fmaf(a_tile[y][k], b_tile[k][x], sum);
        __syncthreads();  // all threads have finished reading them: they may be overwritten
    }
    if (m < M && n < N) out[m * N + n] = from_float<T>(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. Register tiles: a thread computes 8 x 8 elements. For one k it reads 8 numbers of a and 8 of b from shared memory,
// and does 64 multiply-adds with them: a quarter of a read for each instead of two. A block of 16 x 16 threads computes
// 128 x 128 elements, so device memory is also read 4 times less than before. The cost is registers: 64 sums, 16
// factors and the addresses. A multiprocessor has 65536, so with 128 per thread two such blocks fit, and that is what
// the 2 in __launch_bounds__ asks the compiler for. (Otherwise it uses 162, and then there is no second block that can
// compute while the first one waits.)
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
    // + 1: the 16 lanes that store the 16 k of one row of a write to 16 banks, not to one.
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
        __syncthreads();  // all threads have finished reading them
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        for (int j = 0; j < kEach; ++j) {
            const int64_t m = first_m + y + i * kThreads, n = first_n + x + j * kThreads;
            if (m < M && n < N) out[m * N + n] = from_float<T>(sums[i][j]);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. Vectorised: 16 bytes per load. Fetching from device memory takes a quarter of the instructions (an eighth for 16
// bits), and so does reading shared memory: the 8 columns of a thread are two groups of 4 neighbours, 4 x ... and 64 +
// 4 x ..., which are two 16-byte reads. kN is the number of elements in a load: 1 for matrices whose rows are not
// a multiple of 16 bytes.

// 4 more columns: rows stay on 16-byte boundaries, and fewer of the stores of a column go to the same bank.
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
        f.a[l] = m < M && a_k < K ? load_packed<T, kN>(a + m * K + a_k) : Packed<T, kN>{};
        f.b[l] = n < N && b_k < K ? load_packed<T, kN>(b + b_k * N + n) : Packed<T, kN>{};
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
        __syncthreads();  // all threads have finished reading them
    }
    store(out, sums, M, N);
}

// ---------------------------------------------------------------------------------------------------------------------
// 6. Double buffered: the next tile is loaded while this one is multiplied. A load from device memory takes about 600
// clocks, and in rung 5 all threads of a block wait for it together. Two tiles, used alternately, also save one barrier
// per round: the tile that is written now is read in the next round, and was last read in the previous round, before
// this round's barrier.

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
        __syncthreads();  // this round's tiles are complete, and no thread still reads the other ones
        fetch(fetched, a, b, first + kTileK, M, N, K);  // beyond K: nothing but zeros
        multiply(sums, tiles[turn]);
        put(tiles[turn ^ 1], fetched);
    }
    store(out, sums, M, N);
}

// ---------------------------------------------------------------------------------------------------------------------
// The launcher of rungs 1 to 6.

template <class T>
using MatmulKernel = void(T* out, const T* a, const T* b, int64_t M, int64_t N, int64_t K);

template <class T, MatmulKernel<T>* kernel>
void launch(const Problem& p, int tile, dim3 block, cudaStream_t stream) {
    const dim3 grid(blocks_for(p.N, tile), blocks_for(p.M, tile));
    kernel<<<grid, block, 0, stream>>>(p.out.ptr<T>(), p.a.ptr<T>(), p.b.ptr<T>(), p.M, p.N, p.K);
    cudaCheckLaunch();
}

template <class T>
bool rows_are_packs(const Problem& p) {
    return p.K % Packed<T>::n == 0 && p.N % Packed<T>::n == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// 7. Tensor cores: mma.sync, with two tiles in turn. Its kernel is the first of matmul_tensor_cores.cuh.

constexpr int mma_bytes(int stages) { return stages * kMmaStageBytes + kTileAlignment; }

// Why a rung with so many stages cannot run; null: it can.
const char* no_stages(int stages) {
    return mma_bytes(stages) > device().block_shared_bytes ? "needs more shared memory than a block has here" : nullptr;
}

template <int kStages>
void launch_mma(const Problem& p, cudaStream_t stream) {
    dispatch_16_bits(p.out.dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int kBytes = mma_bytes(kStages);
        allow_shared(matmul_mma_kernel<T, kStages>, kBytes);
        const dim3 grid(blocks_for(p.N, kMmaTileN), blocks_for(p.M, kTileM));
        matmul_mma_kernel<T, kStages><<<grid, kMmaThreads, kBytes, stream>>>(p.out.ptr<T>(), p.a.ptr<T>(), p.b.ptr<T>(),
                                                                             p.M, p.N, p.K, rows_are_packs<T>(p));
        cudaCheckLaunch();
    });
}
void matmul_mma(const Problem& p, cudaStream_t stream) { launch_mma<2>(p, stream); }

// ---------------------------------------------------------------------------------------------------------------------
// 8. Three stages. A round of rung 7 is 128 x 128 x 64 multiply-adds, 512 clocks of an H100's tensor cores, and a load
// from device memory takes longer: with one tile in flight the block still waits. Two tiles in flight hide the whole
// time of a load. 96 KiB a block: two fit on a multiprocessor of an H100, one on that of an A100.

void matmul_mma_stages(const Problem& p, cudaStream_t stream) { launch_mma<3>(p, stream); }

// ---------------------------------------------------------------------------------------------------------------------
// 9. wgmma and the copy engine (TMA): the second kernel of matmul_tensor_cores.cuh.

// Why rungs 9 to 11 cannot run; null: they can.
const char* no_wgmma(const Problem& p) {
    if (!has_wgmma()) return "needs a GPU of compute capability 9.0 (Hopper)";
    if (p.K % 8 != 0 || p.N % 8 != 0) return "needs rows of whole 16 bytes: N and K multiples of 8";
    return nullptr;
}

template <class Tile>
void launch_wgmma(const Problem& p, int most_blocks, cudaStream_t stream) {
    dispatch_16_bits(p.out.dtype, [&](auto zero) {
        using T = decltype(zero);
        const auto map = [](const Tensor& x, int64_t box_rows) {
            return make_tensor_map(x.data, x.dtype, {x.shape[1], x.shape[0]}, {x.shape[1]}, {kPanelColumns, box_rows},
                                   128);
        };
        const MatmulMaps maps{map(p.out, kGroupRows), map(p.a, kTileM), map(p.b, kStepK)};
        const auto count = [](int64_t n, int64_t tile) { return narrow(ceil_div(n, tile), "tiles"); };
        const TileGrid grid{count(p.M, kTileM), count(p.N, Tile::kColumns), count(p.K, kStepK)};
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
// 10. Wide tiles, persistent blocks. With 256 columns each row of a is read for twice as many products; a consumer's
// sums take 128 registers per thread, so the producer gives most of its registers to the consumers. And there are only
// as many blocks as multiprocessors, and each computes many tiles: while the consumers of a block round and store one
// tile, its producer already loads the next one, so loads never stop. In rung 9 this time is lost once per tile, and
// the mbarriers are initialised again.

void matmul_wgmma_persistent(const Problem& p, cudaStream_t stream) {
    launch_wgmma<WgmmaTile<256, 3>>(p, device().sm_count, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// 11. The product for Hopper, layers/hopper_matmul.cu: rung 10, and what follows a product (a bias, GELU, its
// derivative, sums) is done by warps of their own, beside the next tile. Where few tiles are left for the last round, K
// is cut.

void matmul_hopper(const Problem& p, cudaStream_t stream) { hopper_matmul(p.out, p.a, p.b, {}, stream); }

// ---------------------------------------------------------------------------------------------------------------------
// 12. The product: cuBLASLt (cpu/sgemm.h on the CPU device), layers/matmul.cu.
//     For 16-bit numbers it uses the tensor cores.

void matmul_product(const Problem& p, cudaStream_t stream) { matmul(p.out, p.a, p.b, {}, stream); }

// ---------------------------------------------------------------------------------------------------------------------
// The ladder: reference values, tolerances, and the list of rungs

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
    dispatch(ladder.dtype(), [&](auto zero) {
        using T = decltype(zero);
        constexpr int n = Packed<T>::n;
        const dim3 square(kSide, kSide);
        const bool packs = rows_are_packs<T>(p);
        ladder.rung("naive", "one thread per element, a warp along a column",
                    [&](auto s) { launch<T, matmul_naive_kernel<T>>(p, kSide, square, s); });
        ladder.rung("coalesced", "a warp along a row",
                    [&](auto s) { launch<T, matmul_coalesced_kernel<T>>(p, kSide, square, s); });
        ladder.rung("shared tiles", "each number fetched once for 32 threads",
                    [&](auto s) { launch<T, matmul_shared_kernel<T>>(p, kSide, square, s); });
        ladder.rung("register tiles", "8 x 8 elements per thread",
                    [&](auto s) { launch<T, matmul_registers_kernel<T>>(p, kTile, kBlock, s); });
        ladder.rung("vectorised", "16 bytes per load", [&](auto s) {
            if (packs) launch<T, matmul_vectorised_kernel<T, n>>(p, kTile, kBlock, s);
            else launch<T, matmul_vectorised_kernel<T, 1>>(p, kTile, kBlock, s);
        });
        ladder.rung("double buffered", "load the next tile while multiplying this one", [&](auto s) {
            if (packs) launch<T, matmul_double_buffered_kernel<T, n>>(p, kTile, kBlock, s);
            else launch<T, matmul_double_buffered_kernel<T, 1>>(p, kTile, kBlock, s);
        });
    });
    // A rung on tensor cores, unless the dtype or the device rules it out.
    const auto tensor_rung = [&](const char* name, const char* why, void (*launch)(const Problem&, cudaStream_t),
                                 const char* why_not) {
        if (ladder.dtype() == DType::f32) why_not = "needs --dtype bf16 or f16";
        if (why_not) ladder.no_rung(name, why_not);
        else ladder.rung(name, why, [&](auto s) { launch(p, s); });
    };
    const char* why_no_wgmma = no_wgmma(p);
    tensor_rung("tensor cores", "mma.sync, 64 x 32 elements per warp; cp.async, swizzled", matmul_mma, no_stages(2));
    tensor_rung("three stages", "two tiles in flight", matmul_mma_stages, no_stages(3));
    tensor_rung("wgmma", "operands in shared memory; a producer, two consumers", matmul_wgmma, why_no_wgmma);
    tensor_rung("persistent", "128 x 256; the next tile is loaded while this one is stored", matmul_wgmma_persistent,
                why_no_wgmma);
    tensor_rung("product (Hopper)", "warps of their own finish a tile; a long K is cut", matmul_hopper, why_no_wgmma);
    ladder.rung("product", "cuBLASLt", [&](auto s) { matmul_product(p, s); });
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
