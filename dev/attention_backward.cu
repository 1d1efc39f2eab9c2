// dev/attention_backward.cu: the gradient of softmax(q k^T) v, eight times.
//
//   forward     S_ts = q_t . k_s / sqrt(D)     P_ts = exp(S_ts - lse_t), s <= t     out_t = sum_s P_ts v_s
//   backward    dP_ts = do_t . v_s             dS_ts = P_ts (dP_ts - delta_t)       delta_t = sum_s P_ts dP_ts
//               dq_t = sum_s dS_ts k_s / sqrt(D)
//               dk_s = sum_t dS_ts q_t / sqrt(D)       dv_s = sum_t P_ts do_t
//
// N heads of T tokens, D = 64 (dev/attention.cuh); q, k, v, out, do and the gradients (N, T, D) bf16 or f16; lse (N, T)
// f32. The forward has saved out and lse, but not P.
//
// The limit is five products of D multiply-adds for each pair. But dq_t is a sum over the keys of a query, dk_s and
// dv_s are sums over the queries of a key, and one block can keep only the sums of one kind in its registers. So from
// rung 2 on there are two kernels, and both compute S and dP: 7 products instead of 5, so they can reach no more than
// 71 % of the limit. (The other way is to add to dq from many blocks. With atomics no two runs give the same bits; rung
// 8, the product on Hopper, adds in turn, in the order of the keys.) The two are mirror images. Let r stand for the
// rows that a block owns, and o for the other rows, which are read tile by tile:
//
//     S_ro = x_r . x'_o / sqrt(D)    dP_ro = y_r . y'_o    dx_r = sum_o dS_ro x'_o / sqrt(D)    dy_r = sum_o P_ro y'_o
//
//                     x    y     x'   y'    others          dx    dy
//     of queries      q    do    k    v     keys <= r       dq    (not needed)
//     of keys         k    v     q    do    queries >= r    dk    dv
//
// So each rung has one kernel with the parameter kOfKeys.
//
//   run      make dev && build/cpu/dev/attention_backward       (on a GPU build/cuda/dev/attention_backward)
//            build/cpu/dev/attention_backward --check | --size 4x1000 | --dtype f16 | --rung 3
//   debug    make DEVICE=cpu debug FILES=dev/attention_backward.cu PROGRAM=dev/attention_backward &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/attention_backward --check
#include "dev/attention.cuh"

namespace {

struct Problem {
    Tensor dq, dk, dv, dout, out, lse, q, k, v;
    Tensor probs, dscores;  // (N, T, T) f32, of the naive rung
    Tensor delta;           // (N, T) f32
    Tensor scratch;         // of the product
    int64_t N;
    int T;
};

// What a kernel of the rungs 2 to 6 is called with.
template <class Number>
struct Sides {
    Number *dx, *dy;  // dy: null for queries
    const Number *x, *y, *other_x, *other_y;
    const float *lse, *delta;  // of queries
    int64_t N;
    int T;

    template <bool kOfKeys>
    static Sides of(const Problem& p) {
        const Number *q = p.q.ptr<Number>(), *k = p.k.ptr<Number>(), *v = p.v.ptr<Number>(),
                     *dout = p.dout.ptr<Number>();
        const float *lse = p.lse.ptr<float>(), *delta = p.delta.ptr<float>();
        if constexpr (kOfKeys) return {p.dk.ptr<Number>(), p.dv.ptr<Number>(), k, v, q, dout, lse, delta, p.N, p.T};
        else return {p.dq.ptr<Number>(), nullptr, q, dout, k, v, lse, delta, p.N, p.T};
    }
};

// Is the pair (row, other) inside the mask? Rows from T on are never stored, and keys from T on come after every query,
// so the causal mask excludes them. Queries from T on need a test: they are zeros in the tiles, but exp(0 - lse) with
// the lse of another query may be infinite, and 0 times infinity is NaN.
template <bool kOfKeys>
__device__ __forceinline__ bool meet(int row, int other, int T) {
    return kOfKeys ? row <= other && other < T : other <= row;
}

// ---------------------------------------------------------------------------------------------------------------------
// 1. Naive: one kernel for each formula, with P and dP, then dS, in device memory: two matrices of T x T floats.
//
// Bytes per pair: 8 when P and dP are written, 20 for delta and dS, and 12 for the three gradients, each of which reads
// one of the matrices: dq along rows, dk and dv along columns.

constexpr int kSide = 16;  // a block is a square of threads

template <class Number>
__global__ void __launch_bounds__(kSide* kSide)
    pairs_kernel(float* probs, float* dprobs, const Number* dout, const float* lse, const Number* q, const Number* k,
                 const Number* v, int T) {
    const int s = static_cast<int>(blockIdx.x) * kSide + static_cast<int>(threadIdx.x);
    const int t = static_cast<int>(blockIdx.y) * kSide + static_cast<int>(threadIdx.y);
    const int64_t head = static_cast<int64_t>(blockIdx.z) * T;
    if (t >= T || s > t) return;
    const int64_t query = (head + t) * kD, key = (head + s) * kD;
    float score = 0.0f, dprob = 0.0f;
    for (int d = 0; d < kD; ++d) {
        score = fmaf(to_float(q[query + d]), to_float(k[key + d]), score);
        dprob = fmaf(to_float(dout[query + d]), to_float(v[key + d]), dprob);
    }
    probs[(head + t) * T + s] = __expf(kScale * score - lse[head + t]);
    dprobs[(head + t) * T + s] = dprob;
}

// One warp per row: dP becomes dS.
__global__ void __launch_bounds__(kBlock)
    softmax_backward_kernel(float* dprobs, const float* probs, int64_t n_rows, int T) {
    const int64_t row = global_thread() / kWarp;
    if (row >= n_rows) return;  // whole warps
    float* dP = dprobs + row * T;
    const float* P = probs + row * T;
    const int t = static_cast<int>(row % T);
    float delta = 0.0f;
    for (int s = lane(); s <= t; s += kWarp) delta = fmaf(P[s], dP[s], delta);
    delta = warp_sum(delta);
    for (int s = lane(); s <= t; s += kWarp) dP[s] = P[s] * (dP[s] - delta);
}

// gradient_r = factor * sum_o M_ro others_o, M = matrix (rows are queries) or its transpose.
template <class Number, bool kOfKeys>
__global__ void __launch_bounds__(kD* kSide)
    gradient_kernel(Number* gradient, const float* matrix, const Number* others, float factor, int T) {
    const int d = static_cast<int>(threadIdx.x);
    const int r = static_cast<int>(blockIdx.y) * kSide + static_cast<int>(threadIdx.y);
    const int64_t head = static_cast<int64_t>(blockIdx.z) * T;
    if (r >= T) return;
    float sum = 0.0f;
    for (int o = kOfKeys ? r : 0; o < (kOfKeys ? T : r + 1); ++o) {
        const float element = kOfKeys ? matrix[(head + o) * T + r] : matrix[(head + r) * T + o];
        sum = fmaf(element, to_float(others[(head + o) * kD + d]), sum);
    }
    gradient[(head + r) * kD + d] = from_float<Number>(factor * sum);
}

template <class Number>
void launch_naive(const Problem& p, cudaStream_t stream) {
    const dim3 tiles = blocks_of(p.T, kSide, p.N);
    const dim3 grid(1, tiles.x, tiles.y), block(kD, kSide);
    const unsigned n_warp_blocks = blocks_for(p.N * p.T, kWarps);
    float *P = p.probs.ptr<float>(), *dS = p.dscores.ptr<float>();
    const Number *q = p.q.ptr<Number>(), *k = p.k.ptr<Number>(), *v = p.v.ptr<Number>(), *dout = p.dout.ptr<Number>();
    pairs_kernel<Number><<<dim3(tiles.x, tiles.x, tiles.y), dim3(kSide, kSide), 0, stream>>>(
        P, dS, dout, p.lse.ptr<float>(), q, k, v, p.T);
    cudaCheckLaunch();
    softmax_backward_kernel<<<n_warp_blocks, kBlock, 0, stream>>>(dS, P, p.N * p.T, p.T);
    cudaCheckLaunch();
    gradient_kernel<Number, false><<<grid, block, 0, stream>>>(p.dq.ptr<Number>(), dS, k, kScale, p.T);
    cudaCheckLaunch();
    gradient_kernel<Number, true><<<grid, block, 0, stream>>>(p.dk.ptr<Number>(), dS, q, kScale, p.T);
    cudaCheckLaunch();
    gradient_kernel<Number, true><<<grid, block, 0, stream>>>(p.dv.ptr<Number>(), P, dout, 1.0f, p.T);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Fused row: one warp per row, nothing of size T x T. Two things make it possible.
//
// lse: with it a probability is exp(S - lse), which can be computed in any order: no maximum and no second pass are
// needed. delta: it is a sum over all keys of a query, and a warp that owns a key cannot compute it by itself. But
//
//     delta_t = sum_s P_ts (do_t . v_s) = do_t . sum_s P_ts v_s = do_t . out_t
//
// is a sum over D columns, made once for each query by a small kernel before the others.
//
// As in the forward, a lane computes S and dP of one other row, and then sums two columns of the gradients; it gets dS
// and P of the other lanes by shuffles. Each row reads all its others again. And registers limit the number of warps: x
// and y of the row are 128 numbers per lane, nvcc uses 168 registers, so 12 warps fit into a multiprocessor that could
// hold 64.

template <class Number>
__global__ void __launch_bounds__(kBlock)
    delta_kernel(float* delta, const Number* dout, const Number* out, int64_t n_rows) {
    const int64_t row = global_thread() / kWarp;
    if (row >= n_rows) return;  // whole warps
    const int64_t at = row * kD + 2 * lane();
    const Packed<Number, 2> a = load_packed<Number, 2>(dout + at), b = load_packed<Number, 2>(out + at);
    const float sum = warp_sum(fmaf(to_float(a.v[0]), to_float(b.v[0]), to_float(a.v[1]) * to_float(b.v[1])));
    if (lane() == 0) delta[row] = sum;
}

template <class Number>
void launch_delta(const Problem& p, cudaStream_t stream) {
    const unsigned n_blocks = blocks_for(p.N * p.T, kWarps);
    delta_kernel<Number>
        <<<n_blocks, kBlock, 0, stream>>>(p.delta.ptr<float>(), p.dout.ptr<Number>(), p.out.ptr<Number>(), p.N * p.T);
    cudaCheckLaunch();
}

// row . other, with the row in registers.
template <class Number>
__device__ __forceinline__ float dot_row(const float (&row)[kD], const Number* other) {
    float sum = 0.0f;
#pragma unroll
    for (int d = 0; d < kD; d += 8) {
        const Packed<Number> numbers = load_packed(other + d);
        for (int i = 0; i < 8; ++i) sum = fmaf(row[d + i], to_float(numbers.v[i]), sum);
    }
    return sum;
}
// sums += factor other, this lane's two columns.
template <class Number>
__device__ __forceinline__ void add_columns(float (&sums)[2], float factor, const Number* other) {
    const Packed<Number, 2> columns = load_packed<Number, 2>(other + 2 * lane());
    for (int c = 0; c < 2; ++c) sums[c] = fmaf(factor, to_float(columns.v[c]), sums[c]);
}
template <class Number>
__device__ __forceinline__ void store_columns(Number* row, const float (&sums)[2], float factor) {
    store_packed(row + 2 * lane(),
                 Packed<Number, 2>{{from_float<Number>(sums[0] * factor), from_float<Number>(sums[1] * factor)}});
}

template <class Number, bool kOfKeys>
__global__ void __launch_bounds__(kBlock) backward_row_kernel(Sides<Number> p) {
    const int64_t row = global_thread() / kWarp;
    if (row >= p.N * p.T) return;  // whole warps
    const int r = static_cast<int>(row % p.T);
    const int64_t head = row - r;
    float x_row[kD], y_row[kD];  // every lane has the whole row
#pragma unroll
    for (int d = 0; d < kD; ++d) x_row[d] = to_float(p.x[row * kD + d]), y_row[d] = to_float(p.y[row * kD + d]);
    float dx[2] = {0.0f, 0.0f}, dy[2] = {0.0f, 0.0f};
    const int end = kOfKeys ? p.T : r + 1;
    for (int o0 = kOfKeys ? r : 0; o0 < end; o0 += kWarp) {
        const int o = o0 + lane();
        float prob = 0.0f, dscore = 0.0f;
        if (o < end) {
            const int64_t query = kOfKeys ? head + o : row;
            prob = __expf(kScale * dot_row(x_row, p.other_x + (head + o) * kD) - p.lse[query]);
            dscore = prob * (dot_row(y_row, p.other_y + (head + o) * kD) - p.delta[query]);
        }
        for (int i = 0; i < min(kWarp, end - o0); ++i) {
            const int64_t other = (head + o0 + i) * kD;
            add_columns(dx, __shfl_sync(kFullWarp, dscore, i), p.other_x + other);
            if constexpr (kOfKeys) add_columns(dy, __shfl_sync(kFullWarp, prob, i), p.other_y + other);
        }
    }
    store_columns(p.dx + row * kD, dx, kScale);
    if constexpr (kOfKeys) store_columns(p.dy + row * kD, dy, 1.0f);
}

template <class Number>
void launch_row(const Problem& p, cudaStream_t stream) {
    const unsigned n_blocks = blocks_for(p.N * p.T, kWarps);
    launch_delta<Number>(p, stream);
    backward_row_kernel<Number, false><<<n_blocks, kBlock, 0, stream>>>(Sides<Number>::template of<false>(p));
    cudaCheckLaunch();
    backward_row_kernel<Number, true><<<n_blocks, kBlock, 0, stream>>>(Sides<Number>::template of<true>(p));
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. Flash: a block owns 32 rows and fetches tiles of 32 others into shared memory: each number serves 32 rows.
//                                                                               (Dao et al. 2022, arXiv:2205.14135)
// 16 x 16 threads; thread (a, b) has the rows 2b, 2b + 1 and the others a, a + 16, and then of the same rows the
// columns a, a + 16, ... . dS and P go through shared memory within half a warp, as in the forward. There are four
// tiles of operands and two of results, where the forward has three and one, so that shared memory has room for 32 rows
// only, and a number of an other row, once read from shared memory, is used in 2 multiply-adds.

constexpr int kFlash = 32, kThreads = 16, kEach = kFlash / kThreads, kEachColumn = kD / kThreads;

struct FlashTiles {
    float x[kFlash][kD + 1], y[kFlash][kD + 1], other_x[kFlash][kD + 1], other_y[kFlash][kD + 1];
    float P[kFlash][kFlash + 1], dS[kFlash][kFlash + 1];
};

// A tile of 32 tokens from `first` on, zeros beyond the last one.
template <class Number>
__device__ __forceinline__ void load_floats(float (&tile)[kFlash][kD + 1], const Number* head, int first, int T) {
    for (int i = static_cast<int>(threadIdx.x); i < kFlash * kD; i += kThreads * kThreads)
        tile[i / kD][i % kD] = first + i / kD < T ? to_float(head[first * kD + i]) : 0.0f;
}

template <class Number, bool kOfKeys>
__global__ void __launch_bounds__(kThreads* kThreads) backward_flash_kernel(Sides<Number> p) {
    __shared__ FlashTiles tiles;
    const int a = static_cast<int>(threadIdx.x) % kThreads, b = static_cast<int>(threadIdx.x) / kThreads;
    const int r0 = static_cast<int>(blockIdx.x) * kFlash;
    const int64_t head = static_cast<int64_t>(blockIdx.y) * p.T;
    load_floats(tiles.x, p.x + head * kD, r0, p.T);
    load_floats(tiles.y, p.y + head * kD, r0, p.T);
    float dx[kEach][kEachColumn] = {}, dy[kEach][kEachColumn] = {};
    for (int o0 = kOfKeys ? r0 : 0; o0 < (kOfKeys ? p.T : min(r0 + kFlash, p.T)); o0 += kFlash) {
        __syncthreads();  // all threads have finished reading the previous tiles
        load_floats(tiles.other_x, p.other_x + head * kD, o0, p.T);
        load_floats(tiles.other_y, p.other_y + head * kD, o0, p.T);
        __syncthreads();  // the tiles are complete (and in the first round the rows)
        float scores[kEach][kEach] = {}, dprobs[kEach][kEach] = {};
        for (int d = 0; d < kD; ++d)
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                for (int j = 0; j < kEach; ++j) {
                    const int r = b * kEach + i, o = a + j * kThreads;
                    scores[i][j] = fmaf(tiles.x[r][d], tiles.other_x[o][d], scores[i][j]);
                    dprobs[i][j] = fmaf(tiles.y[r][d], tiles.other_y[o][d], dprobs[i][j]);
                }
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            for (int j = 0; j < kEach; ++j) {
                const int r = b * kEach + i, o = a + j * kThreads;
                const int64_t query = head + min(kOfKeys ? o0 + o : r0 + r, p.T - 1);
                const float prob = meet<kOfKeys>(r0 + r, o0 + o, p.T)
                                       ? ex2_approx(fmaf(kScale2, scores[i][j], -kLog2e * p.lse[query]))
                                       : 0.0f;
                tiles.P[r][o] = prob;
                tiles.dS[r][o] = prob * (dprobs[i][j] - p.delta[query]);
            }
        __syncwarp();  // the rows of P and dS that this warp needs are complete: it has written them itself
        for (int o = 0; o < kFlash; ++o)
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                for (int c = 0; c < kEachColumn; ++c) {
                    const int r = b * kEach + i, column = a + c * kThreads;
                    dx[i][c] = fmaf(tiles.dS[r][o], tiles.other_x[o][column], dx[i][c]);
                    if constexpr (kOfKeys) dy[i][c] = fmaf(tiles.P[r][o], tiles.other_y[o][column], dy[i][c]);
                }
    }
    for (int i = 0; i < kEach; ++i) {
        const int r = r0 + b * kEach + i;
        if (r >= p.T) continue;
        for (int c = 0; c < kEachColumn; ++c) {
            const int64_t at = (head + r) * kD + a + c * kThreads;
            p.dx[at] = from_float<Number>(kScale * dx[i][c]);
            if constexpr (kOfKeys) p.dy[at] = from_float<Number>(dy[i][c]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. mma.sync: a warp owns 16 rows, x and y as operands and dx and dy as sums in its registers. S, dP, P and dS of a
// tile of 32 others stay in registers as well: the results of the first two products are turned into dS and P in place,
// and are operand A of the other two. A thread keeps 32 registers of x and y and 64 of dx and dy, and takes 32 for S
// and dP and 16 for P and dS: there is room for two blocks in a multiprocessor, and for tiles half as long as in the
// forward.
//
// lse and delta belong to queries: either to this thread's two rows, or to the columns of its fragments.

constexpr int kOthers = 32;

template <class Number>
struct alignas(128) OtherTiles {
    Number x[kOthers * kD], y[kOthers * kD];
};

// The state of a warp.
template <class Number, bool kOfKeys>
struct WarpRows {
    RowOperand x, y;
    RowSums dx = {}, dy = {};
    float lse2[2], delta[2];  // of queries
    int first;

    __device__ __forceinline__ WarpRows(const Sides<Number>& p, int64_t head, int first_row) : first(first_row) {
        load_rows(x, p.x + head * kD, first, p.T);
        load_rows(y, p.y + head * kD, first, p.T);
        for (int half = 0; half < 2; ++half) {
            const int64_t query = head + min(first + quad() + half * 8, p.T - 1);
            lse2[half] = kLog2e * p.lse[query], delta[half] = p.delta[query];
        }
    }

    // A tile of others from o0 on.
    template <class Layout>
    __device__ __forceinline__ void add(const OtherTiles<Number>& tiles, const Sides<Number>& p, int64_t head, int o0) {
        float scores[kOthers / 8][4], dscores[kOthers / 8][4];
        multiply_scores<Number, Layout>(scores, x, tiles.x);
        multiply_scores<Number, Layout>(dscores, y, tiles.y);  // dP
#pragma unroll
        for (int n = 0; n < kOthers / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = first + quad() + i / 2 * 8, other = o0 + n * 8 + 2 * in_quad() + i % 2;
                const int64_t query = head + min(other, p.T - 1);
                const float query_lse2 = kOfKeys ? kLog2e * p.lse[query] : lse2[i / 2],
                            query_delta = kOfKeys ? p.delta[query] : delta[i / 2];
                const float prob = ex2_approx(fmaf(kScale2, scores[n][i], -query_lse2));
                scores[n][i] = meet<kOfKeys>(row, other, p.T) ? prob : 0.0f;
                dscores[n][i] = scores[n][i] * (dscores[n][i] - query_delta);
            }
        uint32_t P[kOthers / 16][4], dS[kOthers / 16][4];
        pack_fragments<Number>(dS, dscores);
        multiply_columns<Number, Layout>(dx, dS, tiles.x);
        if constexpr (kOfKeys) {
            pack_fragments<Number>(P, scores);
            multiply_columns<Number, Layout>(dy, P, tiles.y);
        }
    }

    __device__ __forceinline__ void store(const Sides<Number>& p, int64_t head) const {
        store_rows(p.dx + head * kD, dx, {kScale, kScale}, first, p.T);
        if constexpr (kOfKeys) store_rows(p.dy + head * kD, dy, {1.0f, 1.0f}, first, p.T);
    }
};

// Blocks that own queries have the most to do at the end of a sequence, blocks that own keys at its beginning: the
// longest come first.
template <bool kOfKeys>
__device__ __forceinline__ int first_of_block() {
    return static_cast<int>(kOfKeys ? blockIdx.x : gridDim.x - 1 - blockIdx.x) * kRows;
}

template <class Number, bool kOfKeys>
__global__ void __launch_bounds__(kBlock) backward_mma_kernel(Sides<Number> p) {
    __shared__ OtherTiles<Number> tiles;
    const int r0 = first_of_block<kOfKeys>();
    const int64_t head = static_cast<int64_t>(blockIdx.y) * p.T;
    WarpRows<Number, kOfKeys> rows(p, head, r0 + warp() * kWarpRows);
    for (int o0 = kOfKeys ? r0 : 0; o0 < (kOfKeys ? p.T : min(r0 + kRows, p.T)); o0 += kOthers) {
        __syncthreads();  // all threads have finished reading the previous tiles
        load_tile<kOthers, InOrder, false>(tiles.x, p.other_x + head * kD, o0, p.T);
        load_tile<kOthers, InOrder, false>(tiles.y, p.other_y + head * kD, o0, p.T);
        __syncthreads();  // the tiles are complete
        rows.template add<InOrder>(tiles, p, head, o0);
    }
    rows.store(p, head);
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. cp.async: two stages, so that the next tile is copied while this one is used, and one barrier per tile.
//
// 6. Swizzle: the same kernel with Layout = Swizzled. x' is read in both directions here, as rows for S and as columns
// for dx. ldmatrix takes 8 neighbouring rows either way, so one layout avoids bank conflicts for both.

template <class Number, bool kOfKeys, class Layout>
__global__ void __launch_bounds__(kBlock) backward_pipeline_kernel(Sides<Number> p) {
    __shared__ OtherTiles<Number> stages[2];
    const int r0 = first_of_block<kOfKeys>(), first = kOfKeys ? r0 : 0;
    const int n_tiles = ((kOfKeys ? p.T : min(r0 + kRows, p.T)) - first + kOthers - 1) / kOthers;
    const int64_t head = static_cast<int64_t>(blockIdx.y) * p.T;
    const auto start = [&](int tile) {
        load_tile<kOthers, Layout, true>(stages[tile % 2].x, p.other_x + head * kD, first + tile * kOthers, p.T);
        load_tile<kOthers, Layout, true>(stages[tile % 2].y, p.other_y + head * kD, first + tile * kOthers, p.T);
        cp_async_commit();
    };
    start(0);
    WarpRows<Number, kOfKeys> rows(p, head, r0 + warp() * kWarpRows);
    for (int tile = 0; tile < n_tiles; ++tile) {
        cp_async_wait<0>();
        __syncthreads();  // all threads' copies of this tile are complete, and no thread still reads the other stage
        if (tile + 1 < n_tiles) start(tile + 1);
        rows.template add<Layout>(stages[tile % 2], p, head, first + tile * kOthers);
    }
    rows.store(p, head);
}

// The rungs 3 to 6: delta, the kernel of the queries, the kernel of the keys.
template <class Number>
using BackwardKernel = void(Sides<Number> p);

template <class Number, BackwardKernel<Number>* of_queries, BackwardKernel<Number>* of_keys>
void launch(const Problem& p, int n_rows, int n_threads, cudaStream_t stream) {
    const dim3 grid = blocks_of(p.T, n_rows, p.N);
    launch_delta<Number>(p, stream);
    of_queries<<<grid, n_threads, 0, stream>>>(Sides<Number>::template of<false>(p));
    cudaCheckLaunch();
    of_keys<<<grid, n_threads, 0, stream>>>(Sides<Number>::template of<true>(p));
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 7. The product on mma.sync (layers/flash_attention/mma_backward.cu): 32 rows per warp, which stay in shared memory;
// lse and delta of the others are fetched once per block instead of once per thread; any head size and mask.

void launch_product(const Problem& p, FlashTier tier, cudaStream_t stream) {
    flash_attention_backward(one_head(p.dq), one_head(p.dk), one_head(p.dv), one_head(p.dout), one_head(p.out),
                             p.lse.view({p.N, 1, p.T}), one_head(p.q), one_head(p.k), one_head(p.v),
                             product_options(tier), p.scratch, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The ladder: reference values, tolerances, and the list of rungs

// The gradients of one head, and for each the size of its errors. With
//
//     A_ts = P_ts (|dP_ts| + sum_d |do_td out_td|) >= |dS_ts|
//
// the delta that is computed from the rounded out has an error of one unit roundoff of the second term, and rounding dS
// to 16 bits has one of |dS|. So the errors of dq, dk and dv are relative to  sum_s A_ts |k_s| / sqrt(D),  sum_t A_ts
// |q_t| / sqrt(D), sum_t P_ts |do_t|, where numbers that are rounded count as at least `tiny`.
struct Reference {
    std::vector<double> dq, dk, dv, dq_sizes, dk_sizes, dv_sizes;
};

Reference backward_reference(const float* q, const float* k, const float* v, const float* dout, int64_t T,
                             double tiny) {
    const std::vector<double> zeros(static_cast<size_t>(T * kD));
    Reference r{zeros, zeros, zeros, zeros, zeros, zeros};
    std::vector<double> P, dP;
    for (int64_t t = 0; t < T; ++t) {
        probabilities(P, q, k, t);
        dP.assign(P.size(), 0.0);
        double out[kD] = {}, delta = 0, delta_size = 0;
        for (int64_t s = 0; s <= t; ++s) {
            const double p = P[static_cast<size_t>(s)];
            dP[static_cast<size_t>(s)] = dot(dout + t * kD, v + s * kD);
            delta += p * dP[static_cast<size_t>(s)];
            for (int64_t d = 0; d < kD; ++d) out[d] += p * v[s * kD + d];
        }
        for (int64_t d = 0; d < kD; ++d) delta_size += std::abs(dout[t * kD + d]) * std::max(std::abs(out[d]), tiny);
        for (int64_t s = 0; s <= t; ++s) {
            const double p = P[static_cast<size_t>(s)], dp = dP[static_cast<size_t>(s)];
            const double dS = kScale * p * (dp - delta), A = kScale * std::max(p * (std::abs(dp) + delta_size), tiny);
            for (int64_t d = 0; d < kD; ++d) {
                const int64_t query = t * kD + d, key = s * kD + d;
                const size_t i = static_cast<size_t>(query), j = static_cast<size_t>(key);
                r.dq[i] += dS * k[key], r.dq_sizes[i] += A * std::abs(k[key]);
                r.dk[j] += dS * q[query], r.dk_sizes[j] += A * std::abs(q[query]);
                r.dv[j] += p * dout[query], r.dv_sizes[j] += std::max(p, tiny) * std::abs(dout[query]);
            }
        }
    }
    return r;
}

// out and lse of the forward, by the product in float32, so that out has been rounded once.
void run_forward(Ladder& ladder, const Problem& p) {
    const auto in_f32 = [&](const Tensor& x) {
        const Tensor copy = ladder.take(DType::f32, {p.N, p.T, kD});
        from_floats(copy, ladder.host(x));
        return copy;
    };
    const Tensor out = ladder.take(DType::f32, {p.N, p.T, kD});
    flash_attention_forward(one_head(out), p.lse.view({p.N, 1, p.T}), one_head(in_f32(p.q)), one_head(in_f32(p.k)),
                            one_head(in_f32(p.v)), product_options(FlashTier::cuda_cores), ladder.stream());
    from_floats(p.out, ladder.host(out));
}

void climb(Ladder& ladder) {
    const int64_t N = ladder.size(0), T = ladder.size(1);
    const DType dtype = ladder.dtype();
    const Tensor q_rows = ladder.normal({N, T, kD}, kQStd), k_rows = ladder.normal({N, T, kD}),
                 v_rows = ladder.normal({N, T, kD}), dout_rows = ladder.normal({N, T, kD}),
                 out = ladder.take(dtype, {N, T, kD}), lse = ladder.take(DType::f32, {N, T});
    const Tensor dq = ladder.output({N, T, kD}, dtype), dk = ladder.output({N, T, kD}, dtype),
                 dv = ladder.output({N, T, kD}, dtype), delta = ladder.output({N, T}),
                 probs = ladder.take(DType::f32, {N, T, T}), dscores = ladder.take(DType::f32, {N, T, T});
    const FlashTier largest = has_wgmma() ? FlashTier::hopper : FlashTier::mma;
    const Tensor scratch =
        ladder.take(DType::f32, {flash_attention_backward_scratch_n(N, T, 1, 1, kD, kD, dtype, largest)});
    const Problem p{dq,    dk,      dv, dout_rows,          out, lse, q_rows, k_rows, v_rows, probs, dscores,
                    delta, scratch, N,  narrow(T, "tokens")};
    run_forward(ladder, p);

    // Units of 16 bits: out, dS and the result for dq and dk; P and the result for dv. The rest is float32's.
    const double u = unit_roundoff(dtype), tiny = smallest_normal(dtype);
    const double f32 = probability_error(T) + static_cast<double>(T) * 0x1p-24;
    const std::vector<float> q = ladder.host(p.q), k = ladder.host(p.k), v = ladder.host(p.v),
                             dout = ladder.host(p.dout);
    std::vector<Expectation> expectations;
    for (int64_t n : checked_heads(N, T)) {
        const size_t at = static_cast<size_t>(n * T * kD);
        Reference r = backward_reference(&q[at], &k[at], &v[at], &dout[at], T, tiny);
        expectations.push_back({"dq", dq.slice(n, 1), std::move(r.dq), 3 * u + f32, u * tiny, std::move(r.dq_sizes)});
        expectations.push_back({"dk", dk.slice(n, 1), std::move(r.dk), 3 * u + f32, u * tiny, std::move(r.dk_sizes)});
        expectations.push_back({"dv", dv.slice(n, 1), std::move(r.dv), 2 * u + f32, u * tiny, std::move(r.dv_sizes)});
    }

    // Five products of D multiply-adds for each of T (T + 1) / 2 pairs.
    ladder.table("attention, backward", Limit::matmul, 5.0 * kD * static_cast<double>(N * T * (T + 1)));
    ladder.expects(std::move(expectations));
    dispatch_16_bits(dtype, [&](auto zero) {
        using Number = decltype(zero);
        ladder.rung("naive", "five kernels, T x T probabilities and gradients",
                    [&](auto s) { launch_naive<Number>(p, s); });
        ladder.rung("fused row", "one warp per row, probabilities from lse", [&](auto s) { launch_row<Number>(p, s); });
        ladder.rung("flash", "32 rows share tiles in shared memory", [&](auto s) {
            launch<Number, backward_flash_kernel<Number, false>, backward_flash_kernel<Number, true>>(
                p, kFlash, kThreads * kThreads, s);
        });
        ladder.rung("mma.sync", "tensor cores; P and dS stay in registers", [&](auto s) {
            launch<Number, backward_mma_kernel<Number, false>, backward_mma_kernel<Number, true>>(p, kRows, kBlock, s);
        });
        ladder.rung("cp.async", "the next tile is copied while this one is used", [&](auto s) {
            launch<Number, backward_pipeline_kernel<Number, false, InOrder>,
                   backward_pipeline_kernel<Number, true, InOrder>>(p, kRows, kBlock, s);
        });
        ladder.rung("swizzle", "ldmatrix without bank conflicts", [&](auto s) {
            launch<Number, backward_pipeline_kernel<Number, false, Swizzled>,
                   backward_pipeline_kernel<Number, true, Swizzled>>(p, kRows, kBlock, s);
        });
        ladder.rung("product, mma", "32 rows per warp; any head size and mask",
                    [&](auto s) { launch_product(p, FlashTier::mma, s); });
        if (!has_wgmma()) return;
        ladder.rung("product, Hopper", "wgmma and TMA; one kernel with five products, dq added in turn",
                    [&](auto s) { launch_product(p, FlashTier::hopper, s); });
    });
}

}  // namespace

int main(int argc, char** argv) {
    return run_ladder(argc, argv,
                      {.name = "attention_backward",
                       .sizes = "heads x tokens",
                       .cpu_size = {2, 512},
                       .gpu_size = {32, 4096},
                       .check_sizes = {{1, 1}, {2, 37}, {1, 70}, {1, 200}},
                       .dtypes = {DType::bf16, DType::f16},
                       .climb = climb});
}
