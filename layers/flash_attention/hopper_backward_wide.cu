// Flash attention on Hopper's tensor cores, backward, heads of more than 128 columns. The maths is in
// flash_attention.cu, the tiles and the roles of the warp groups in flash_attention/hopper.cuh.
//
// dk and dv of 64 keys and 192 columns take 192 registers of the 240 that a consumer's thread has, so there is no room
// for a part of dq, which hopper_backward.cu computes beside them. So here are two kernels that mirror each other: one
// owns queries and sums dq, the other owns keys and sums dk and dv, and both compute S and dP: seven products instead
// of five. (Of more than 192 columns dk and dv have a kernel each: eight products.) In each kernel the rows' two tiles
// stay in shared memory, and those of the others are loaded into a ring of stages:
//
//                           128 rows     others, stages                  registers of a consumer's thread
//     D = Dv = 192  dq      q, do        k, v of 64 keys, 2 stages       96 dq, 32 S, 32 dP, 16 dS
//                   dk, dv  k, v         q, do of 16 queries, 3 stages   192 dk and dv, 8 S, 8 dP, 4 P, 4 dS
//     D = Dv = 256  dq      q, do        k, v of 32 keys, 2 stages       128 dq, 16 S, 16 dP, 8 dS
//                   dk      k, v         q, do of 32 queries, 3 stages   128 dk, 16 S, 16 dP, 8 dS
//                   dv      the same                                     128 dv, 16 S, 8 P
//
// The work of a consumer on one tile of others. Time runs downwards; what is side by side happens at the same time:
//
//     dq     tensor cores      threads                     dk, dv    tensor cores        threads
//                              wait(full)                                                wait(full)
//            S = q k^T                                               S^T = k q^T
//            dP = do v^T       P = exp(scale S - lse)                dP^T = v do^T       P^T, rounded to 16 bits
//                              dS = P (dP - delta)                   dv += P^T do        dS^T = P^T (dP^T - delta)
//            dq += dS k                                              dk += dS^T q
//                              arrive(empty)                                             arrive(empty)
//
// While one consumer computes exponentials the other one multiplies: exponentials and the rest take about half of the
// time that the products of a tile take, so the two alternate without a barrier between them. All products of a tile
// are complete before the first of the next tile starts (if a product continues into the next round of the loop, the
// compiler inserts a wait after each product: its warning C7515).
//
// At the barriers:
//
//     full[i]        others of stage i; for dk and dv also their lse and delta, which the 32 lanes of the producer's
//                    warp write by ordinary stores (rows of T floats start on no boundary that the copy engine takes)
//     empty[i]       each of the eight warps of the consumers releases a stage by itself: a group that skips a tile
//                    does not multiply, and only the products synchronise its four warps
//     kRowsWritten   a group's results have overwritten its rows, before its first thread has them stored
#include "layers/flash_attention/hopper.cuh"

namespace {

using WideSizes = HeadSizes<HeadSize<192, 128>, HeadSize<192, 192>, HeadSize<256, 256>>;

enum NamedBarriers : uint32_t { kRowsWritten = 1 };  // + consumer
constexpr int kMaxStages = 3;

struct Barriers {
    uint64_t rows_full, full[kMaxStages], empty[kMaxStages];
};

// Rows (q, do) and others (k, v), or the other way round; kStatistics floats of each other come with them.
template <int kD_, int kDv_, int kOthers_, int kStages_, int kStatistics>
struct BackwardTile {
    static constexpr int kD = kD_, kDv = kDv_, kOthers = kOthers_, kStages = kStages_;
    using RowX = Panels<kBlockRows, kD>;
    using RowY = Panels<kBlockRows, kDv>;
    using OtherX = Panels<kOthers, kD>;
    using OtherY = Panels<kOthers, kDv>;
    static constexpr int kRowBytes = RowX::kBytes + RowY::kBytes, kStageBytes = OtherX::kBytes + OtherY::kBytes;
    static constexpr int kTileBytes = kRowBytes + kStages * kStageBytes;
    static constexpr size_t kSharedBytes =
        kTileBytes + kStages * kStatistics * kOthers * sizeof(float) + sizeof(Barriers) + kTileAlignment;
    static_assert(kStages <= kMaxStages && kSharedBytes <= 227 << 10);
};
template <int kD, int kDv>
using DqTile = BackwardTile<kD, kDv, kD <= 192 ? 64 : 32, kDv <= 128 ? 3 : 2, 0>;
// Others: as many as dk and dv leave registers for.
template <int kD, int kDv>
using DkDvTile = BackwardTile<kD, kDv, kDv <= 128 || 192 < kD ? 32 : 16, 3, 2>;

template <int kStages>
__device__ __forceinline__ void init_barriers(Barriers& barriers, uint32_t n_fillers) {
    if (threadIdx.x == 0) {
        mbarrier_init(&barriers.rows_full, 1);
        for (int i = 0; i < kStages; ++i)
            mbarrier_init(&barriers.full[i], n_fillers), mbarrier_init(&barriers.empty[i], kConsumers * kGroup / kWarp);
        fence_proxy_async();
    }
    __syncthreads();  // the mbarriers are initialised. This is the last barrier of all threads
}

// This warp has read a stage.
__device__ __forceinline__ void release(uint64_t* empty) {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(empty);
}

// ---------------------------------------------------------------------------------------------------------------------
// dq. Block (query tile, query head, b).

struct DqMaps {
    CUtensorMap q, dout, k, v, dq;
};

// One thread: q and do of the block's queries, then k and v of all keys that they see.
template <class T>
__device__ __forceinline__ void produce_keys(const DqMaps& maps, unsigned char* tiles, Barriers& barriers,
                                             const Interval& keys, int t0, int h, int kv, int b) {
    mbarrier_arrive_expect_tx(&barriers.rows_full, T::kRowBytes);
    load_panels<typename T::RowX>(tiles, maps.q, h, t0, b, &barriers.rows_full);
    load_panels<typename T::RowY>(tiles + T::RowX::kBytes, maps.dout, h, t0, b, &barriers.rows_full);
    Ring<T::kStages> ring;
    for (int s0 = keys.first; s0 < keys.end; s0 += T::kOthers, ring.next()) {
        unsigned char* k_tile = tiles + T::kRowBytes + ring.stage() * T::kStageBytes;
        uint64_t* full = &barriers.full[ring.stage()];
        mbarrier_wait(&barriers.empty[ring.stage()], ring.parity() ^ 1);
        mbarrier_arrive_expect_tx(full, T::kStageBytes);
        load_panels<typename T::OtherX>(k_tile, maps.k, kv, s0, b, full);
        load_panels<typename T::OtherY>(k_tile + T::OtherX::kBytes, maps.v, kv, s0, b, full);
    }
}

template <class Number, class T>
__global__ void __launch_bounds__(kHopperThreads, 1)
    flash_dq_hopper_kernel(Shape shape, const __grid_constant__ DqMaps maps, const float* lse, const float* delta) {
    const Mask& mask = shape.mask;
    const int b = static_cast<int>(blockIdx.z), t0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kBlockRows;
    const int h = static_cast<int>(blockIdx.y), kv = h / static_cast<int>(shape.H / shape.K);
    const int group = warp_group(), in_group = static_cast<int>(threadIdx.x) % kGroup;
    unsigned char *tiles = shared_tiles(), *stages = tiles + T::kRowBytes;
    Barriers& barriers = *reinterpret_cast<Barriers*>(tiles + T::kTileBytes);
    const Interval keys = view_of<true>(mask, b, t0, kBlockRows).any;
    init_barriers<T::kStages>(barriers, 1);

    if (group == kConsumers) {
        give_registers<24>();
        if (in_group < kWarp && elect_one()) produce_keys<T>(maps, tiles, barriers, keys, t0, h, kv, b);
        return;
    }
    take_registers<240>();

    unsigned char *q_rows = tiles + group * kGroupRows * kRowBytes, *dout_rows = q_rows + T::RowX::kBytes;
    const int group_row = t0 + group * kGroupRows, warp_row = group_row + in_group / kWarp * 16;
    const View view = view_of<true>(mask, b, group_row, kGroupRows);
    const float scale2 = shape.scale * kLog2e;
    float row_lse2[2], row_delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t row = (b * shape.H + h) * mask.T + min(warp_row + half * 8 + quad(), mask.T - 1);
        row_lse2[half] = lse[row] * kLog2e, row_delta[half] = delta[row];
    }
    Fragments<1, T::kOthers> scores, dscores;
    Fragments<1, T::kD> dq;
    Packs<1, T::kOthers> dS;
    clear(dq);
    Ring<T::kStages> ring;
    mbarrier_wait(&barriers.rows_full, 0);
    for (int s0 = keys.first; s0 < keys.end; s0 += T::kOthers, ring.next()) {
        mbarrier_wait(&barriers.full[ring.stage()], ring.parity());
        const unsigned char *k_tile = stages + ring.stage() * T::kStageBytes, *v_tile = k_tile + T::OtherX::kBytes;
        if (!view.overlaps(s0, T::kOthers)) {
            release(&barriers.empty[ring.stage()]);
            continue;
        }
        start_scores<Number, typename T::RowX, typename T::OtherX>(scores[0], q_rows, k_tile);
        start_scores<Number, typename T::RowY, typename T::OtherY>(dscores[0], dout_rows, v_tile);  // dP = do v^T
        wgmma_wait<1>(scores[0]);
        if (view.needs_mask(s0, T::kOthers)) apply_mask<true>(scores, mask, b, warp_row, s0);
#pragma unroll
        for (int n = 0; n < T::kOthers / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[0][n][i] = ex2_approx(fmaf(scores[0][n][i], scale2, -row_lse2[i / 2]));
        wgmma_wait<0>(dscores[0]);
#pragma unroll
        for (int n = 0; n < T::kOthers / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)  // dS = P * (dP - delta)
                dscores[0][n][i] = scores[0][n][i] * (dscores[0][n][i] - row_delta[i / 2]);
        pack_fragments<Number>(dS, dscores);
        start_columns<Number, typename T::OtherX>(dq[0], dS[0], k_tile);  // dq = scale dS k
        wgmma_wait<0>(dq[0], dS[0]);
        release(&barriers.empty[ring.stage()]);
    }

    // This group has read its rows of q for the last time: dq overwrites them, and the copy engine stores it.
    const float factor[2] = {shape.scale, shape.scale};
    put_rows<Number, typename T::RowX>(q_rows, dq[0], factor);
    fence_proxy_async();
    named_barrier_sync(kRowsWritten + group, kGroup);
    if (in_group == 0 && group_row < mask.T) {
        store_panels<typename T::RowX>(maps.dq, h, group_row, b, q_rows);
        bulk_commit();
        bulk_wait_read<0>();  // when this block ends, the next one gets its shared memory
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// dk and dv. Block (key tile, key head, b): all queries of the group's heads that see these keys are loaded, head by
// head. It computes S^T and dP^T, with keys as rows; lse and delta belong to the others, and are loaded with them.

struct DkDvMaps {
    CUtensorMap k, v, q, dout, dk, dv;
};

// A warp: k and v of the block's keys, then q and do of all queries that see them, for n_heads heads from h0 on, with
// their lse and delta.
template <class T>
__device__ __forceinline__ void produce_queries(const DkDvMaps& maps, unsigned char* tiles, float* statistics,
                                                Barriers& barriers, const Interval& queries, int s0, int h0,
                                                int n_heads, int kv, int b, const Shape& shape, const float* lse,
                                                const float* delta) {
    const bool elected = elect_one();
    if (elected) {
        mbarrier_arrive_expect_tx(&barriers.rows_full, T::kRowBytes);
        load_panels<typename T::RowX>(tiles, maps.k, kv, s0, b, &barriers.rows_full);
        load_panels<typename T::RowY>(tiles + T::RowX::kBytes, maps.v, kv, s0, b, &barriers.rows_full);
    }
    Ring<T::kStages> ring;
    for (int h = h0; h < h0 + n_heads; ++h)
        for (int t0 = queries.first; t0 < queries.end; t0 += T::kOthers, ring.next()) {
            uint64_t* full = &barriers.full[ring.stage()];
            // The consumers must have read what the stage held in its previous round.
            mbarrier_wait(&barriers.empty[ring.stage()], ring.parity() ^ 1);
            if (elected) {
                unsigned char* q_tile = tiles + T::kRowBytes + ring.stage() * T::kStageBytes;
                mbarrier_arrive_expect_tx(full, T::kStageBytes);
                load_panels<typename T::OtherX>(q_tile, maps.q, h, t0, b, full);
                load_panels<typename T::OtherY>(q_tile + T::OtherX::kBytes, maps.dout, h, t0, b, full);
            }
            // All lanes copy lse and delta, and then arrive: so `full` is complete only after these stores.
            float* to = statistics + ring.stage() * 2 * T::kOthers;
            for (int i = lane(); i < T::kOthers; i += kWarp) {
                const int64_t from = (b * shape.H + h) * shape.mask.T + t0 + i;
                const bool there = t0 + i < shape.mask.T;
                to[i] = there ? lse[from] * kLog2e : 0.0f;
                to[T::kOthers + i] = there ? delta[from] : 0.0f;
            }
            mbarrier_arrive(full);
        }
}

// One tile of queries, with the 2 kOthers numbers lse2 and delta.
template <class Number, class T, KeySums kSums>
__device__ __forceinline__ void add_queries(Fragments<1, T::kD>& dk, Fragments<1, T::kDv>& dv,
                                            const unsigned char* k_rows, const unsigned char* q_tile,
                                            const float* statistics, const Mask& mask, const View& view, int b,
                                            int group_row, int t0, float scale2) {
    const unsigned char *v_rows = k_rows + T::RowX::kBytes, *dout_tile = q_tile + T::OtherX::kBytes;
    const float *lse2 = statistics + not_hoisted(2 * in_quad()), *deltas = lse2 + T::kOthers;  // this thread's queries
    Fragments<1, T::kOthers> scores, dscores;
    Packs<1, T::kOthers> P, dS;
    start_scores<Number, typename T::RowX, typename T::OtherX>(scores[0], k_rows, q_tile);  // S^T
    if constexpr (kSums != KeySums::dv)
        start_scores<Number, typename T::RowY, typename T::OtherY>(dscores[0], v_rows, dout_tile);  // dP^T
    wgmma_wait<kSums == KeySums::dv ? 0 : 1>(scores[0]);
    if (view.needs_mask(t0, T::kOthers))
        apply_mask<false>(scores, mask, b, group_row + not_hoisted(static_cast<int>(threadIdx.x) % kGroup) / kWarp * 16,
                          t0);
#pragma unroll
    for (int n = 0; n < T::kOthers / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[0][n][i] = ex2_approx(fmaf(scores[0][n][i], scale2, -lse2[n * 8 + i % 2]));
    if constexpr (kSums != KeySums::dk) {
        pack_fragments<Number>(P, scores);
        start_columns<Number, typename T::OtherY>(dv[0], P[0], dout_tile);  // dv = P^T do
    }
    if constexpr (kSums != KeySums::dv) {
        wgmma_wait<kSums == KeySums::dk ? 0 : 1>(dscores[0]);
#pragma unroll
        for (int n = 0; n < T::kOthers / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dscores[0][n][i] = scores[0][n][i] * (dscores[0][n][i] - deltas[n * 8 + i % 2]);
        pack_fragments<Number>(dS, dscores);
        start_columns<Number, typename T::OtherX>(dk[0], dS[0], q_tile);  // dk = scale dS^T q
    }
    if constexpr (kSums == KeySums::both) wgmma_wait<0>(dk[0], dv[0], P[0], dS[0]);
    else if constexpr (kSums == KeySums::dk) wgmma_wait<0>(dk[0], dS[0]);
    else wgmma_wait<0>(dv[0], P[0]);
}

template <class Number, class T, KeySums kSums>
__global__ void __launch_bounds__(kHopperThreads, 1)
    flash_dk_dv_hopper_kernel(Shape shape, const __grid_constant__ DkDvMaps maps, const float* lse,
                              const float* delta) {
    const Mask& mask = shape.mask;
    const int b = static_cast<int>(blockIdx.z), s0 = static_cast<int>(blockIdx.x) * kBlockRows,
              kv = static_cast<int>(blockIdx.y), n_heads = static_cast<int>(shape.H / shape.K), group = warp_group(),
              in_group = static_cast<int>(threadIdx.x) % kGroup;
    unsigned char *tiles = shared_tiles(), *stages = tiles + T::kRowBytes;
    float* statistics = reinterpret_cast<float*>(tiles + T::kTileBytes);  // [stage][lse2, delta][query]
    Barriers& barriers = *reinterpret_cast<Barriers*>(statistics + T::kStages * 2 * T::kOthers);
    const Interval queries = view_of<false>(mask, b, s0, kBlockRows).any;
    init_barriers<T::kStages>(barriers, 1 + kWarp);

    if (group == kConsumers) {
        give_registers<24>();
        if (in_group < kWarp)
            produce_queries<T>(maps, tiles, statistics, barriers, queries, s0, kv * n_heads, n_heads, kv, b, shape, lse,
                               delta);
        return;
    }
    take_registers<240>();

    unsigned char *k_rows = tiles + group * kGroupRows * kRowBytes, *v_rows = k_rows + T::RowX::kBytes;
    const int group_row = s0 + group * kGroupRows;
    const View view = view_of<false>(mask, b, group_row, kGroupRows);
    const float scale2 = shape.scale * kLog2e;
    Fragments<1, T::kD> dk;
    Fragments<1, T::kDv> dv;
    clear(dk), clear(dv);
    Ring<T::kStages> ring;
    mbarrier_wait(&barriers.rows_full, 0);
    for (int head = 0; head < n_heads; ++head)
        for (int t0 = queries.first; t0 < queries.end; t0 += T::kOthers, ring.next()) {
            mbarrier_wait(&barriers.full[ring.stage()], ring.parity());
            const unsigned char* q_tile = stages + ring.stage() * T::kStageBytes;
            if (!view.overlaps(t0, T::kOthers)) {
                release(&barriers.empty[ring.stage()]);
                continue;
            }
            add_queries<Number, T, kSums>(dk, dv, k_rows, q_tile, statistics + ring.stage() * 2 * T::kOthers, mask,
                                          view, b, group_row, t0, scale2);
            release(&barriers.empty[ring.stage()]);
        }

    const float one[2] = {1.0f, 1.0f}, factor[2] = {shape.scale, shape.scale};
    if constexpr (kSums != KeySums::dv) put_rows<Number, typename T::RowX>(k_rows, dk[0], factor);
    if constexpr (kSums != KeySums::dk) put_rows<Number, typename T::RowY>(v_rows, dv[0], one);
    fence_proxy_async();
    named_barrier_sync(kRowsWritten + group, kGroup);
    if (in_group == 0 && group_row < mask.T) {
        if constexpr (kSums != KeySums::dv) store_panels<typename T::RowX>(maps.dk, kv, group_row, b, k_rows);
        if constexpr (kSums != KeySums::dk) store_panels<typename T::RowY>(maps.dv, kv, group_row, b, v_rows);
        bulk_commit(), bulk_wait_read<0>();  // when this block ends, the next one gets its shared memory
    }
}

// ---------------------------------------------------------------------------------------------------------------------

template <class Number>
void launch(const FlashArguments& a, cudaStream_t stream) {
    WideSizes::dispatch(a.q.D, a.v.D, [&](auto size) {
        constexpr int kD = decltype(size)::kD, kDv = decltype(size)::kDv;
        const unsigned tiles = static_cast<unsigned>(ceil_div(a.T, int64_t{kBlockRows})),
                       B = static_cast<unsigned>(a.B);
        for_key_sums<kD>([&](auto sums) {
            using T = DkDvTile<kD, kDv>;
            constexpr KeySums kSums = decltype(sums)::value;
            const DkDvMaps maps{head_map(a.k, kBlockRows),   head_map(a.v, kBlockRows),  head_map(a.q, T::kOthers),
                                head_map(a.out, T::kOthers), head_map(a.dk, kGroupRows), head_map(a.dv, kGroupRows)};
            allow_shared(flash_dk_dv_hopper_kernel<Number, T, kSums>, T::kSharedBytes);
            flash_dk_dv_hopper_kernel<Number, T, kSums>
                <<<dim3(tiles, static_cast<unsigned>(a.k.count), B), kHopperThreads, T::kSharedBytes, stream>>>(
                    shape_of(a), maps, a.lse, a.delta);
            launched("flash_dk_dv_hopper_kernel", key_sums_cost(a, kSums));
        });
        using T = DqTile<kD, kDv>;
        const DqMaps maps{head_map(a.q, kBlockRows), head_map(a.out, kBlockRows), head_map(a.k, T::kOthers),
                          head_map(a.v, T::kOthers), head_map(a.dq, kGroupRows)};
        allow_shared(flash_dq_hopper_kernel<Number, T>, T::kSharedBytes);
        flash_dq_hopper_kernel<Number, T>
            <<<dim3(tiles, static_cast<unsigned>(a.q.count), B), kHopperThreads, T::kSharedBytes, stream>>>(
                shape_of(a), maps, a.lse, a.delta);
        launched("flash_dq_hopper_kernel", dq_cost(a));
    });
}

}  // namespace

void flash_backward_hopper_wide(const FlashArguments& a, cudaStream_t stream) {
    dispatch_16_bits(a.q.rows.dtype, [&](auto zero) { launch<decltype(zero)>(a, stream); });
}
