// dev/attention_forward.cu: softmax(q k^T) v, nine times.
//
//   S_ts = q_t . k_s / sqrt(D)    P_ts = exp(S_ts) / sum_s exp(S_ts), s <= t    out_t = sum_s P_ts v_s
//   lse_t = log sum_s exp(S_ts), for the backward
//
// N heads of T tokens, D = 64 (dev/attention.cuh); q, k, v, out (N, T, D) bf16 or f16; lse (N, T) f32. Each pair of a
// query and a key takes 128 multiply-adds and one exponential, while the tensors themselves are small: at T = 4096 in
// 16 bits 2 MB per head for 2.1 Gflop, a thousand flops a byte. So the limit is the arithmetic of the tensor cores. But
// S and P are T x T numbers. The rungs differ in where S and P are kept, in how often a loaded number is used, and so
// in what the kernel waits for:
//
//   rung               S and P are in       a number that was fetched   what it waits for
//                                           serves
//   naive              device memory        1 query                     device memory: 24 bytes per pair
//   fused row          registers            1, from the caches          loads: each query reads all its keys
//   flash              registers, shared    64 queries                  shared memory, and the FMA units
//   mma.sync           registers            64                          copies; ldmatrix, in 8 turns
//   cp.async           registers            64                          ldmatrix, in 8 turns
//   swizzle            registers            64                          ldmatrix, in one turn
//   product, mma       registers            128                         products
//   wgmma + TMA        registers            64                          products and exponentials in turn
//   product, Hopper    registers            128                         products beside exponentials
//
//   run      make dev && build/cpu/dev/attention_forward        (on a GPU build/cuda/dev/attention_forward)
//            build/cpu/dev/attention_forward --check | --size 4x1000 | --dtype f16 | --rung 3
//   debug    make DEVICE=cpu debug FILES=dev/attention_forward.cu PROGRAM=dev/attention_forward &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/attention_forward --check
#include "dev/attention.cuh"
#include "layers/tensor_map.h"

namespace {

struct Problem {
    Tensor out, lse, q, k, v;
    Tensor scores;  // (N, T, T) f32, of the naive rung
    int64_t N;
    int T;
};

// ---------------------------------------------------------------------------------------------------------------------
// 1. Naive: a kernel for each of the three formulas, with S, then P, in device memory.
//
// A pair's score is written, read three times by the softmax, written as a probability, and read for the sum: 24 bytes
// for 128 multiply-adds. S takes N T^2 floats of memory, 2 GB for 32 heads of 4096 tokens. Each thread computes one
// number and reads two operands for every multiply-add, as in matmul's first rung.

constexpr int kSide = 16;  // a block is a square of threads

template <class Number>
__global__ void __launch_bounds__(kSide* kSide) scores_kernel(float* scores, const Number* q, const Number* k, int T) {
    const int s = static_cast<int>(blockIdx.x) * kSide + static_cast<int>(threadIdx.x);
    const int t = static_cast<int>(blockIdx.y) * kSide + static_cast<int>(threadIdx.y);
    const int64_t head = static_cast<int64_t>(blockIdx.z) * T;
    if (t >= T || s > t) return;
    float sum = 0.0f;
    for (int d = 0; d < kD; ++d) sum = fmaf(to_float(q[(head + t) * kD + d]), to_float(k[(head + s) * kD + d]), sum);
    scores[(head + t) * T + s] = kScale * sum;
}

// One warp per row; neighbouring lanes have neighbouring keys.
__global__ void __launch_bounds__(kBlock) softmax_kernel(float* scores, float* lse, int64_t n_rows, int T) {
    const int64_t row = global_thread() / kWarp;
    if (row >= n_rows) return;  // whole warps
    float* x = scores + row * T;
    const int t = static_cast<int>(row % T);
    float max = -FLT_MAX, sum = 0.0f;
    for (int s = lane(); s <= t; s += kWarp) max = fmaxf(max, x[s]);
    max = warp_max(max);
    for (int s = lane(); s <= t; s += kWarp) sum += __expf(x[s] - max);
    sum = warp_sum(sum);
    for (int s = lane(); s <= t; s += kWarp) x[s] = __expf(x[s] - max) / sum;
    if (lane() == 0) lse[row] = max + logf(sum);
}

template <class Number>
__global__ void __launch_bounds__(kD* kSide) values_kernel(Number* out, const float* probs, const Number* v, int T) {
    const int d = static_cast<int>(threadIdx.x),
              t = static_cast<int>(blockIdx.y) * kSide + static_cast<int>(threadIdx.y);
    const int64_t head = static_cast<int64_t>(blockIdx.z) * T;
    if (t >= T) return;
    float sum = 0.0f;
    for (int s = 0; s <= t; ++s) sum = fmaf(probs[(head + t) * T + s], to_float(v[(head + s) * kD + d]), sum);
    out[(head + t) * kD + d] = from_float<Number>(sum);
}

template <class Number>
void launch_naive(const Problem& p, cudaStream_t stream) {
    const dim3 tiles = blocks_of(p.T, kSide, p.N);
    const unsigned n_warp_blocks = blocks_for(p.N * p.T, kWarps);
    scores_kernel<Number><<<dim3(tiles.x, tiles.x, tiles.y), dim3(kSide, kSide), 0, stream>>>(
        p.scores.ptr<float>(), p.q.ptr<Number>(), p.k.ptr<Number>(), p.T);
    cudaCheckLaunch();
    softmax_kernel<<<n_warp_blocks, kBlock, 0, stream>>>(p.scores.ptr<float>(), p.lse.ptr<float>(), p.N * p.T, p.T);
    cudaCheckLaunch();
    values_kernel<Number><<<dim3(1, tiles.x, tiles.y), dim3(kD, kSide), 0, stream>>>(
        p.out.ptr<Number>(), p.scores.ptr<float>(), p.v.ptr<Number>(), p.T);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Fused row: one warp per query, one kernel, nothing of size T x T.  (Milakov & Gimelshein 2018, arXiv:1805.02867)
//
// The maximum of a row is not needed beforehand. When a larger one, m', is found, what has been summed so far is too
// large by the factor exp(m' - m), and one multiplication corrects it. This holds for the sum of the exponentials and
// for the sum of the values:
//
//     m' = max(m, scores)     l <- l exp(m - m') + sum_s exp(S_s - m')     o <- o exp(m - m') + sum_s exp(S_s - m') v_s
//
// Each lane computes the score of one of 32 keys, then each lane sums two columns of the values: the probability of a
// key goes from its lane to all others with a shuffle. Now only q, k, v and out are in device memory. But all T queries
// read the keys before them again, 2 D numbers per pair for 2 D multiply-adds, so the speed of the caches is the limit.

template <class Number>
__global__ void __launch_bounds__(kBlock)
    attention_row_kernel(Number* out, float* lse, const Number* q, const Number* k, const Number* v, int64_t n_rows,
                         int T) {
    const int64_t row = global_thread() / kWarp;
    if (row >= n_rows) return;  // whole warps
    const int t = static_cast<int>(row % T);
    const Number *k_head = k + (row - t) * kD, *v_head = v + (row - t) * kD;
    float q_row[kD];  // every lane has the whole query
#pragma unroll
    for (int d = 0; d < kD; ++d) q_row[d] = to_float(q[row * kD + d]);
    float max = -FLT_MAX, sum = 0.0f, o[2] = {0.0f, 0.0f};  // sum: of this lane's keys
    for (int s0 = 0; s0 <= t; s0 += kWarp) {
        const int s = s0 + lane();
        float score = -INFINITY;
        if (s <= t) {
            float products = 0.0f;
#pragma unroll
            for (int d = 0; d < kD; d += 8) {
                const Packed<Number> keys = load_packed(k_head + static_cast<int64_t>(s) * kD + d);
                for (int i = 0; i < 8; ++i) products = fmaf(q_row[d + i], to_float(keys.v[i]), products);
            }
            score = kScale * products;
        }
        const float larger = fmaxf(max, warp_max(score)), rescale = __expf(max - larger);
        const float prob = __expf(score - larger);
        sum = sum * rescale + prob;
        max = larger;
        for (float& column : o) column *= rescale;
        for (int i = 0; i < min(kWarp, t - s0 + 1); ++i) {
            const float prob_i = __shfl_sync(kFullWarp, prob, i);
            const Packed<Number, 2> values =
                load_packed<Number, 2>(v_head + static_cast<int64_t>(s0 + i) * kD + 2 * lane());
            for (int c = 0; c < 2; ++c) o[c] = fmaf(prob_i, to_float(values.v[c]), o[c]);
        }
    }
    sum = warp_sum(sum);
    store_packed(out + row * kD + 2 * lane(),
                 Packed<Number, 2>{{from_float<Number>(o[0] / sum), from_float<Number>(o[1] / sum)}});
    if (lane() == 0) lse[row] = max + logf(sum);
}

template <class Number>
void launch_row(const Problem& p, cudaStream_t stream) {
    const unsigned n_blocks = blocks_for(p.N * p.T, kWarps);
    attention_row_kernel<Number><<<n_blocks, kBlock, 0, stream>>>(p.out.ptr<Number>(), p.lse.ptr<float>(),
                                                                  p.q.ptr<Number>(), p.k.ptr<Number>(),
                                                                  p.v.ptr<Number>(), p.N * p.T, p.T);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. Flash: a block owns 64 queries and fetches tiles of 32 keys and values into shared memory, so that each number
// serves 64 queries.                                                            (Dao et al. 2022, arXiv:2205.14135)
//
// Of 16 x 16 threads, thread (x, y) has the queries 4y .. 4y + 3 and of the tile's keys x and x + 16: 8 scores, which
// take 6 reads of shared memory for 8 multiply-adds. Then it sums the columns x, x + 16, ... of the same queries. The
// 16 threads of a query are half a warp: they exchange its maximum by shuffles, and P through shared memory, without a
// barrier of the block.
//
// A row of D + 1 floats puts the same column of 16 neighbouring rows into 16 banks.

constexpr int kFlashKeys = 32, kThreads = 16, kEachRow = kRows / kThreads, kEachKey = kFlashKeys / kThreads,
              kEachColumn = kD / kThreads;

struct FlashTiles {
    float q[kRows][kD + 1], k[kFlashKeys][kD + 1], v[kFlashKeys][kD], P[kRows][kFlashKeys + 1];
};

template <class Number>
__global__ void __launch_bounds__(kThreads* kThreads)
    attention_flash_kernel(Number* out, float* lse, const Number* q, const Number* k, const Number* v, int T) {
    __shared__ FlashTiles tiles;
    const int thread = static_cast<int>(threadIdx.x), x = thread % kThreads, y = thread / kThreads;
    const int t0 = static_cast<int>(blockIdx.x) * kRows;
    const int64_t head = static_cast<int64_t>(blockIdx.y) * T;
    const auto number = [&](const Number* from, int token, int d) {  // zeros beyond the last token
        return token < T ? to_float(from[(head + token) * kD + d]) : 0.0f;
    };
    for (int i = thread; i < kRows * kD; i += kThreads * kThreads)
        tiles.q[i / kD][i % kD] = number(q, t0 + i / kD, i % kD);
    float o[kEachRow][kEachColumn] = {}, max[kEachRow], sum[kEachRow] = {};  // sum: of this thread's keys
    for (float& m : max) m = -FLT_MAX;
    for (int s0 = 0; s0 < min(t0 + kRows, T); s0 += kFlashKeys) {
        __syncthreads();  // all threads have finished reading the previous tiles
        for (int i = thread; i < kFlashKeys * kD; i += kThreads * kThreads) {
            tiles.k[i / kD][i % kD] = number(k, s0 + i / kD, i % kD);
            tiles.v[i / kD][i % kD] = number(v, s0 + i / kD, i % kD);
        }
        __syncthreads();  // the tiles are complete (and in the first round the queries)
        float scores[kEachRow][kEachKey] = {};
        for (int d = 0; d < kD; ++d)
#pragma unroll
            for (int r = 0; r < kEachRow; ++r)
                for (int j = 0; j < kEachKey; ++j)
                    scores[r][j] = fmaf(tiles.q[y * kEachRow + r][d], tiles.k[x + j * kThreads][d], scores[r][j]);
#pragma unroll
        for (int r = 0; r < kEachRow; ++r) {
            const int row = y * kEachRow + r;
            for (int j = 0; j < kEachKey; ++j)
                if (s0 + x + j * kThreads > t0 + row) scores[r][j] = -INFINITY;
            const float larger = fmaxf(max[r], warp_max(fmaxf(scores[r][0], scores[r][1]), kThreads));
            const float rescale = ex2_approx(kScale2 * (max[r] - larger));
            sum[r] *= rescale;
            max[r] = larger;
            for (float& column : o[r]) column *= rescale;
            for (int j = 0; j < kEachKey; ++j) {
                const float prob = ex2_approx(kScale2 * (scores[r][j] - larger));
                sum[r] += prob;
                tiles.P[row][x + j * kThreads] = prob;
            }
        }
        __syncwarp();  // the rows of P that this warp needs are complete: it has written them itself
        for (int j = 0; j < kFlashKeys; ++j)
#pragma unroll
            for (int r = 0; r < kEachRow; ++r)
                for (int c = 0; c < kEachColumn; ++c)
                    o[r][c] = fmaf(tiles.P[y * kEachRow + r][j], tiles.v[j][x + c * kThreads], o[r][c]);
    }
    for (int r = 0; r < kEachRow; ++r) {
        const int t = t0 + y * kEachRow + r;
        const float total = warp_sum(sum[r], kThreads);
        if (t >= T) continue;
        for (int c = 0; c < kEachColumn; ++c)
            out[(head + t) * kD + x + c * kThreads] = from_float<Number>(o[r][c] / total);
        if (x == 0) lse[head + t] = kScale * max[r] + logf(total);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. mma.sync: tensor cores. One instruction of a warp does 2048 multiply-adds, as 64 FMA instructions do, and its
// operands are registers. Four warps with 16 queries each share tiles of 64 keys and values.
//
// S never leaves the registers of the warp: exponentials are computed in the registers that hold the result of the
// product. After rounding to 16 bits, the probabilities are already in the order that operand A of the next product
// needs. So P is never written to shared memory.
//
// A thread has parts of two rows, and four threads (a quad) share a row: the maximum of a row takes two shuffles.

constexpr int kKeys = 64;

struct RowPair {
    float max[2] = {-FLT_MAX, -FLT_MAX}, sum[2] = {0.0f, 0.0f};  // sum: of this lane's keys

    // Scores become 2^(kScale2 (score - max)), and o is rescaled to the new maximum.
    __device__ __forceinline__ void add(float (&scores)[kKeys / 8][4], RowSums& o) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float larger = max[half];
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
                larger = fmaxf(larger, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            larger = warp_max(larger, 4);
            const float rescale = ex2_approx(kScale2 * (max[half] - larger)), shift = kScale2 * larger;
            sum[half] *= rescale;
            max[half] = larger;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[n][i] = ex2_approx(fmaf(kScale2, scores[n][i], -shift));
                    sum[half] += scores[n][i];
                    o[n][i] *= rescale;
                }
        }
    }
};
static_assert(kKeys == kD, "RowPair::add goes through scores and o at once");

// Masks keys that come after their query. A tile that begins with key s0 has such keys if it ends after the warp's
// first row.
__device__ __forceinline__ void hide_future(float (&scores)[kKeys / 8][4], int first_row, int s0) {
    if (s0 + kKeys <= first_row + 1) return;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (s0 + n * 8 + 2 * in_quad() + i % 2 > first_row + quad() + i / 2 * 8) scores[n][i] = -INFINITY;
}

// A warp's work on one tile.
template <class Number, class Layout>
__device__ __forceinline__ void attend(RowSums& o, RowPair& softmax, const RowOperand& q_rows, const Number* k_tile,
                                       const Number* v_tile, int first_row, int s0) {
    float scores[kKeys / 8][4];
    multiply_scores<Number, Layout>(scores, q_rows, k_tile);
    hide_future(scores, first_row, s0);
    softmax.add(scores, o);
    uint32_t P[kKeys / 16][4];
    pack_fragments<Number>(P, scores);
    multiply_columns<Number, Layout>(o, P, v_tile);
}

template <class Number>
__device__ __forceinline__ void finish(Number* out_head, float* lse_head, const RowSums& o, const RowPair& softmax,
                                       int first_row, int T) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = warp_sum(softmax.sum[half], 4);
        const int t = first_row + quad() + half * 8;
        factor[half] = 1.0f / sum;
        if (in_quad() == 0 && t < T) lse_head[t] = kScale * softmax.max[half] + logf(sum);
    }
    store_rows(out_head, o, factor, first_row, T);
}

// The longest rows come first: otherwise a long block would start last, and run alone at the end.
__device__ __forceinline__ int first_query() { return static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows; }

template <class Number>
__global__ void __launch_bounds__(kBlock)
    attention_mma_kernel(Number* out, float* lse, const Number* q, const Number* k, const Number* v, int T) {
    alignas(16) __shared__ Number k_tile[kKeys * kD], v_tile[kKeys * kD];
    const int t0 = first_query(), first_row = t0 + warp() * kWarpRows;
    const int64_t head = static_cast<int64_t>(blockIdx.y) * T;
    RowOperand q_rows;
    load_rows(q_rows, q + head * kD, first_row, T);
    RowSums o = {};
    RowPair softmax;
    for (int s0 = 0; s0 < min(t0 + kRows, T); s0 += kKeys) {
        __syncthreads();  // all threads have finished reading the previous tiles
        load_tile<kKeys, InOrder, false>(k_tile, k + head * kD, s0, T);
        load_tile<kKeys, InOrder, false>(v_tile, v + head * kD, s0, T);
        __syncthreads();  // the tiles are complete
        attend<Number, InOrder>(o, softmax, q_rows, k_tile, v_tile, first_row, s0);
    }
    finish(out + head * kD, lse + head, o, softmax, first_row, T);
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. cp.async: the next tiles are copied while these are used. In rung 4 a thread loads into registers, waits about 600
// clocks, and stores into shared memory, and all four warps do so at the same time. An asynchronous copy does not go
// through registers, and threads wait for it only when they need its tile. This needs a second stage of shared memory,
// 32 KB in all, and saves one of the two barriers: the stage that is filled now was read before this round's barrier.
//
// 6. Swizzle: the same kernel with Layout = Swizzled (dev/attention.cuh). For a tile a warp makes 64 products, and 32
// times ldmatrix, each of 4 matrices. Shared memory gives one matrix of 128 bytes per clock, so the four warps need 4 x
// 32 x 4 = 512 clocks, or with 8 rows in the same banks 4096. The products take 512 clocks of an A100, which makes 1024
// multiply-adds in each. The cost is an exclusive-or for each address, and registers to keep the results: nvcc uses 168
// instead of 137 (sm_90a). Three blocks fit into a multiprocessor with either.

template <class Number, class Layout>
__global__ void __launch_bounds__(kBlock)
    attention_pipeline_kernel(Number* out, float* lse, const Number* q, const Number* k, const Number* v, int T) {
    alignas(128) __shared__ Number k_tiles[2][kKeys * kD], v_tiles[2][kKeys * kD];
    const int t0 = first_query(), first_row = t0 + warp() * kWarpRows;
    const int64_t head = static_cast<int64_t>(blockIdx.y) * T;
    const auto start = [&](int tile) {
        load_tile<kKeys, Layout, true>(k_tiles[tile % 2], k + head * kD, tile * kKeys, T);
        load_tile<kKeys, Layout, true>(v_tiles[tile % 2], v + head * kD, tile * kKeys, T);
        cp_async_commit();
    };
    start(0);
    RowOperand q_rows;
    load_rows(q_rows, q + head * kD, first_row, T);
    RowSums o = {};
    RowPair softmax;
    const int n_tiles = (min(t0 + kRows, T) + kKeys - 1) / kKeys;
    for (int tile = 0; tile < n_tiles; ++tile) {
        cp_async_wait<0>();
        __syncthreads();  // all threads' copies of this tile are complete, and no thread still reads the other stage
        if (tile + 1 < n_tiles) start(tile + 1);
        attend<Number, Layout>(o, softmax, q_rows, k_tiles[tile % 2], v_tiles[tile % 2], first_row, tile * kKeys);
    }
    finish(out + head * kD, lse + head, o, softmax, first_row, T);
}

// The rungs 3 to 6.
template <class Number>
using AttentionKernel = void(Number* out, float* lse, const Number* q, const Number* k, const Number* v, int T);

template <class Number, AttentionKernel<Number>* kernel>
void launch(const Problem& p, int n_threads, cudaStream_t stream) {
    kernel<<<blocks_of(p.T, kRows, p.N), n_threads, 0, stream>>>(
        p.out.ptr<Number>(), p.lse.ptr<float>(), p.q.ptr<Number>(), p.k.ptr<Number>(), p.v.ptr<Number>(), p.T);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 7. The product on mma.sync (layers/flash_attention/mma_forward.cu). 32 queries per warp: the result of each ldmatrix
// of keys or values is used in four products instead of two, so shared memory is less busy than the tensor cores. Any
// head size, for which it pads rows by 16 bytes instead of swizzling; grouped queries, windows and documents.
//
// 8. wgmma and TMA. On Hopper a warp group of four warps multiplies 64 rows at a time, and operand B, here q too, is
// read straight from shared memory: no ldmatrix, no registers for operands but P, and four warps read a tile once. One
// thread tells the copy engine which box of a tensor to copy; the engine computes the addresses, swizzles, and writes
// zeros for tokens beyond the last one.
//
// So the block has two roles. The producer, one thread of a fifth warp, starts the copies of the next tiles, as long as
// there are free stages. The consumers, four warps, multiply. They do not use barriers of the whole block: each stage
// has two mbarriers, full (its bytes have arrived) and empty (all four warps have read it). The ring is explained in
// layers/ptx.cuh.
//
// But a warp group does one thing after the other. A multiprocessor of an H100 does 2048 multiply-adds and 16
// exponentials per clock: the products of a tile take 2 x 64^3 / 2048 = 256 clocks, its exponentials 64^2 / 16 = 256.
// Neither unit can be busy for more than half of the time, unless another block in the same multiprocessor uses it in
// the meantime.

constexpr int kStages = 2, kConsumerWarps = 4, kTileBytes = kKeys * kD * 2;  // a row has 128 bytes: one swizzled line

struct Maps {
    CUtensorMap q, k, v;
};
struct Stage {
    unsigned char k[kTileBytes], v[kTileBytes];
};
struct HopperShared {
    unsigned char q[kTileBytes];
    Stage stages[kStages];
    uint64_t q_full, full[kStages], empty[kStages];
};

__device__ __forceinline__ void produce(HopperShared& shared, const Maps& maps, int t0, int n_tiles, int head) {
    mbarrier_arrive_expect_tx(&shared.q_full, kTileBytes);
    tensor_load<3>(shared.q, &maps.q, {0, t0, head}, &shared.q_full);
    for (int tile = 0; tile < n_tiles; ++tile) {
        const int i = tile % kStages;
        mbarrier_wait(&shared.empty[i], (tile / kStages + 1) % 2);  // the first round returns at once
        mbarrier_arrive_expect_tx(&shared.full[i], sizeof(Stage));
        tensor_load<3>(shared.stages[i].k, &maps.k, {0, tile * kKeys, head}, &shared.full[i]);
        tensor_load<3>(shared.stages[i].v, &maps.v, {0, tile * kKeys, head}, &shared.full[i]);
    }
}

// The same as attend() of the previous rungs, by a warp group. For a tile of 128-byte rows the next 16 columns of a row
// begin 32 bytes further on, and the next 16 rows 2048.
template <class Number>
__device__ __forceinline__ void attend_wgmma(RowSums& o, RowPair& softmax, const unsigned char* q_tile,
                                             const Stage& stage, int first_row, int s0) {
    float scores[kKeys / 8][4];
    wgmma_fence(scores);
#pragma unroll
    for (int k = 0; k < kD / 16; ++k)
        wgmma_m64k16<Number>(scores, wgmma_descriptor<128>(q_tile + k * 32, 0, 1024),
                             wgmma_descriptor<128>(stage.k + k * 32, 0, 1024), k > 0);
    wgmma_commit();
    wgmma_wait<0>(scores);
    hide_future(scores, first_row, s0);
    softmax.add(scores, o);
    uint32_t P[kKeys / 16][4];
    pack_fragments<Number>(P, scores);
    wgmma_fence(o, P);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
        wgmma_m64k16<Number, true>(o, P[k], wgmma_descriptor<128>(stage.v + k * 2048, 0, 1024), true);
    wgmma_commit();
    wgmma_wait<0>(o, P);
}

template <class Number>
__global__ void __launch_bounds__((kConsumerWarps + 1) * kWarp)
    attention_hopper_kernel(Number* out, float* lse, const __grid_constant__ Maps maps, int T) {
    HopperShared& shared = *reinterpret_cast<HopperShared*>(shared_tiles());
    const int t0 = first_query(), first_row = t0 + warp() * kWarpRows;
    const int n_tiles = (min(t0 + kRows, T) + kKeys - 1) / kKeys;
    if (threadIdx.x == 0) {
        mbarrier_init(&shared.q_full, 1);
        for (int i = 0; i < kStages; ++i)
            mbarrier_init(&shared.full[i], 1), mbarrier_init(&shared.empty[i], kConsumerWarps);
        fence_proxy_async();
    }
    __syncthreads();  // the mbarriers are initialised. This is the last barrier of all threads

    if (warp() == kConsumerWarps) {
        if (elect_one()) produce(shared, maps, t0, n_tiles, static_cast<int>(blockIdx.y));
        return;
    }
    RowSums o = {};
    RowPair softmax;
    mbarrier_wait(&shared.q_full, 0);
    for (int tile = 0; tile < n_tiles; ++tile) {
        const int i = tile % kStages;
        mbarrier_wait(&shared.full[i], tile / kStages % 2);
        attend_wgmma<Number>(o, softmax, shared.q, shared.stages[i], first_row, tile * kKeys);
        if (lane() == 0) mbarrier_arrive(&shared.empty[i]);
    }
    const int64_t head = static_cast<int64_t>(blockIdx.y) * T;
    finish(out + head * kD, lse + head, o, softmax, first_row, T);
}

template <class Number>
void launch_hopper(const Problem& p, cudaStream_t stream) {
    const auto map = [&](const Tensor& x) {  // dimensions (D, T, N); a box is 64 tokens of a head
        return make_tensor_map(x.data, x.dtype, {kD, p.T, p.N}, {kD, p.T * kD}, {kD, kKeys, 1}, 128);
    };
    const Maps maps{map(p.q), map(p.k), map(p.v)};
    attention_hopper_kernel<Number>
        <<<blocks_of(p.T, kRows, p.N), (kConsumerWarps + 1) * kWarp, sizeof(HopperShared) + kTileAlignment, stream>>>(
            p.out.ptr<Number>(), p.lse.ptr<float>(), maps, p.T);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 9. The product on Hopper (layers/flash_attention/hopper_forward.cu): ping-pong.
//                                                                                 (Shah et al. 2024, arXiv:2407.08608)
//
// Two consumer groups take turns: while one computes exponentials the other multiplies. And within a group, the product
// P v of a tile runs at the same time as the exponentials of the next one. Tiles of 128 keys serve 128 queries; the
// producer gives its registers to the consumers, and the output leaves through the copy engine.

void launch_product(const Problem& p, FlashTier tier, cudaStream_t stream) {
    flash_attention_forward(one_head(p.out), p.lse.view({p.N, 1, p.T}), one_head(p.q), one_head(p.k), one_head(p.v),
                            product_options(tier), stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The ladder: reference values, tolerances, and the list of rungs

struct Reference {
    std::vector<double> out, sizes, lse;  // sizes: sum_s P_ts |v_sd|, with P_ts at least `tiny`
};

Reference attention_reference(const float* q, const float* k, const float* v, int64_t T, double tiny) {
    const size_t n = static_cast<size_t>(T);
    Reference r{std::vector<double>(n * kD), std::vector<double>(n * kD), std::vector<double>(n)};
#pragma omp parallel for schedule(dynamic)
    for (int64_t t = 0; t < T; ++t) {
        std::vector<double> P;
        r.lse[static_cast<size_t>(t)] = probabilities(P, q, k, t);
        for (int64_t s = 0; s <= t; ++s)
            for (int64_t d = 0; d < kD; ++d) {
                const size_t i = static_cast<size_t>(t * kD + d);
                const double p = P[static_cast<size_t>(s)], value = v[s * kD + d];
                r.out[i] += p * value, r.sizes[i] += std::max(p, tiny) * std::abs(value);
            }
    }
    return r;
}

void climb(Ladder& ladder) {
    const int64_t N = ladder.size(0), T = ladder.size(1);
    const DType dtype = ladder.dtype();
    const Tensor q_rows = ladder.normal({N, T, kD}, kQStd), k_rows = ladder.normal({N, T, kD}),
                 v_rows = ladder.normal({N, T, kD}), scores = ladder.take(DType::f32, {N, T, T});
    const Tensor out = ladder.output({N, T, kD}, dtype), lse = ladder.output({N, T});
    const Problem p{out, lse, q_rows, k_rows, v_rows, scores, N, narrow(T, "tokens")};

    // From rung 4 on P is rounded to 16 bits, and out is in all rungs; the other errors are those of float32.
    const double u = unit_roundoff(dtype), tiny = smallest_normal(dtype);
    const double relative = 2 * u + probability_error(T) + static_cast<double>(T) * 0x1p-24;
    const double lse_absolute = score_error() + (static_cast<double>(T) + 2 * (2 + 1.16 * 24) + 24) * 0x1p-24;
    const std::vector<float> q = ladder.host(p.q), k = ladder.host(p.k), v = ladder.host(p.v);
    std::vector<Expectation> expectations;
    for (int64_t n : checked_heads(N, T)) {
        const size_t at = static_cast<size_t>(n * T * kD);
        Reference r = attention_reference(&q[at], &k[at], &v[at], T, tiny);
        expectations.push_back({"out", out.slice(n, 1), std::move(r.out), relative, u * tiny, std::move(r.sizes)});
        expectations.push_back({"lse", lse.slice(n, 1), std::move(r.lse), 0, lse_absolute});
    }

    // Two products of D multiply-adds for each of T (T + 1) / 2 pairs.
    ladder.table("attention, forward", Limit::matmul, 2.0 * kD * static_cast<double>(N * T * (T + 1)));
    ladder.expects(std::move(expectations));
    dispatch_16_bits(dtype, [&](auto zero) {
        using Number = decltype(zero);
        ladder.rung("naive", "three kernels, T x T scores", [&](auto s) { launch_naive<Number>(p, s); });
        ladder.rung("fused row", "one warp per query, the softmax online", [&](auto s) { launch_row<Number>(p, s); });
        ladder.rung("flash", "64 queries share tiles of keys in shared memory",
                    [&](auto s) { launch<Number, attention_flash_kernel<Number>>(p, kThreads * kThreads, s); });
        ladder.rung("mma.sync", "tensor cores; P stays in registers",
                    [&](auto s) { launch<Number, attention_mma_kernel<Number>>(p, kBlock, s); });
        ladder.rung("cp.async", "the next tile is copied while this one is used",
                    [&](auto s) { launch<Number, attention_pipeline_kernel<Number, InOrder>>(p, kBlock, s); });
        ladder.rung("swizzle", "ldmatrix without bank conflicts",
                    [&](auto s) { launch<Number, attention_pipeline_kernel<Number, Swizzled>>(p, kBlock, s); });
        ladder.rung("product, mma", "32 queries per warp; any head size and mask",
                    [&](auto s) { launch_product(p, FlashTier::mma, s); });
        if (!has_wgmma()) return;
        ladder.rung("wgmma + TMA", "a producer and a warp group, operands from shared memory",
                    [&](auto s) { launch_hopper<Number>(p, s); });
        ladder.rung("product, Hopper", "two warp groups take turns",
                    [&](auto s) { launch_product(p, FlashTier::hopper, s); });
    });
}

}  // namespace

int main(int argc, char** argv) {
    return run_ladder(argc, argv,
                      {.name = "attention_forward",
                       .sizes = "heads x tokens",
                       .cpu_size = {2, 512},
                       .gpu_size = {32, 4096},
                       .check_sizes = {{1, 1}, {2, 37}, {2, 70}, {1, 260}},
                       .dtypes = {DType::bf16, DType::f16},
                       .climb = climb});
}
