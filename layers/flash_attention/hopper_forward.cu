// Flash attention on Hopper's tensor cores, forward. The maths is in flash_attention.cu, the tiles and the roles of the
// warp groups in flash_attention/hopper.cuh.
//
//     producer     wait(k_empty)  load k 0   wait(v_empty)  load v 0   wait(k_empty)  load k 1   ...
//     consumer     wait(k_full)   S = q k 0^T;   softmax;   then for each further tile i
//                      S' = q k i^T    started         wait(k_full)
//                      o += P v i-1    started         wait(v_full)
//                      softmax of S', when it is there, while o += P v is still under way;     arrive(k_empty)
//                      P = S', o rescaled, when that is done;                                  arrive(v_empty)
//
// Tensor cores do a product of a tile in about the time that the exponentials of a tile take. So while one consumer
// computes exponentials the other one should multiply: a consumer waits for its turn before it starts its two products,
// and then gives the turn to the other one (named barriers 1 and 2).
//
// Keys and values lie in two stages of shared memory, each filled again when both consumers have arrived.
//
// Registers of a consumer's thread at D = 128: 64 for o, 64 for S, 32 for P.
#include "layers/flash_attention/hopper.cuh"

namespace {

constexpr int kStages = 2;
enum NamedBarriers : uint32_t { kTurn = 1, kRowsWritten = 3 };  // each of two: + consumer

template <int kD_, int kDv_>
struct ForwardTile {
    static constexpr int kD = kD_, kDv = kDv_;
    static constexpr int kKeys = kD <= 128 ? 128 : 64;
    using Q = Panels<kBlockRows, kD>;
    using K = Panels<kKeys, kD>;
    using V = Panels<kKeys, kDv>;
    static constexpr int kTileBytes = Q::kBytes + kStages * (K::kBytes + V::kBytes);
    static constexpr size_t kSharedBytes = kTileBytes + 1024 + kTileAlignment;
};

struct Barriers {
    uint64_t q_full, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

struct Maps {
    CUtensorMap q, k, v, out;
};

// One thread. The producer alone announces a stage as full; every consumer arrives when it has read one.
__device__ __forceinline__ void init_barriers(Barriers& barriers) {
    mbarrier_init(&barriers.q_full, 1);
    for (int i = 0; i < kStages; ++i) {
        mbarrier_init(&barriers.k_full[i], 1), mbarrier_init(&barriers.k_empty[i], kConsumers);
        mbarrier_init(&barriers.v_full[i], 1), mbarrier_init(&barriers.v_empty[i], kConsumers);
    }
    fence_proxy_async();
}

// One thread. Round r of a stage is filled when round r - 1 has been read: the first one at once.
template <class T>
__device__ __forceinline__ void produce(const Maps& maps, unsigned char* tiles, Barriers& barriers, int n_tiles,
                                        int first_key, int t0, int h, int kv, int b) {
    mbarrier_arrive_expect_tx(&barriers.q_full, T::Q::kBytes);
    load_panels<typename T::Q>(tiles, maps.q, h, t0, b, &barriers.q_full);
    for (int tile = 0; tile < n_tiles; ++tile) {
        const int i = tile % kStages, s0 = first_key + tile * T::kKeys;
        const uint32_t parity = (tile / kStages + 1) % 2;
        unsigned char* k_tile = tiles + T::Q::kBytes + i * (T::K::kBytes + T::V::kBytes);
        mbarrier_wait(&barriers.k_empty[i], parity);
        mbarrier_arrive_expect_tx(&barriers.k_full[i], T::K::kBytes);
        load_panels<typename T::K>(k_tile, maps.k, kv, s0, b, &barriers.k_full[i]);
        mbarrier_wait(&barriers.v_empty[i], parity);
        mbarrier_arrive_expect_tx(&barriers.v_full[i], T::V::kBytes);
        load_panels<typename T::V>(k_tile + T::K::kBytes, maps.v, kv, s0, b, &barriers.v_full[i]);
    }
}

// The end of a group's rows: lse, and o / sum through shared memory to device memory.
template <class Number, class T>
__device__ __forceinline__ void finish_rows(const Shape& shape, const Maps& maps, float* lse, OnlineRows<1>& rows,
                                            const float (&o)[T::kDv / 8][4], unsigned char* q_rows, float scale2, int b,
                                            int h, int group, int group_row, int warp_row) {
    const Mask& mask = shape.mask;
    float factor[2];
    for (int half = 0; half < 2; ++half) {
        const float sum = warp_sum(rows.sum[0][half], 4);
        const int t = warp_row + half * 8 + quad();
        factor[half] = inverse_sum(sum);
        if (in_quad() == 0 && t < mask.T)
            lse[(b * shape.H + h) * mask.T + t] = fmaf(rows.max[0][half], scale2, log2f(sum)) * kLn2;
    }
    // This group has read its rows of q for the last time: the output overwrites them, and the copy engine stores it.
    put_rows<Number, typename T::Q>(q_rows, o, factor);
    fence_proxy_async();
    named_barrier_sync(kRowsWritten + group, kGroup);
    if (static_cast<int>(threadIdx.x) % kGroup == 0 && group_row < mask.T) {
        store_panels<Panels<kBlockRows, T::kDv>>(maps.out, h, group_row, b, q_rows);
        bulk_commit();
        bulk_wait_read<0>();  // when this block ends, the next one gets its shared memory
    }
}

// Block (query tile, query head, b). The longest rows of a causal mask come first: otherwise a long block would start
// last, and run alone at the end.
template <class Number, class T>
__global__ void __launch_bounds__(kHopperThreads, 1)
    flash_forward_hopper_kernel(Shape shape, const __grid_constant__ Maps maps, float* lse) {
    const Mask& mask = shape.mask;
    const int b = static_cast<int>(blockIdx.z), t0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kBlockRows;
    const int h = static_cast<int>(blockIdx.y), kv = h / static_cast<int>(shape.H / shape.K);
    const int group = warp_group(), in_group = static_cast<int>(threadIdx.x) % kGroup;
    unsigned char* tiles = shared_tiles();
    Barriers& barriers = *reinterpret_cast<Barriers*>(tiles + T::kTileBytes);
    const Interval keys = view_of<true>(mask, b, t0, kBlockRows).any;
    // Queries that see nothing go through one tile, all of which is masked: so the pipeline has one case.
    const int n_tiles = max(1, (keys.end - keys.first + T::kKeys - 1) / T::kKeys);
    if (threadIdx.x == 0) init_barriers(barriers);
    __syncthreads();  // the mbarriers are initialised. This is the last barrier of all threads

    if (group == kConsumers) {
        give_registers<24>();
        if (in_group / kWarp == 0 && elect_one()) produce<T>(maps, tiles, barriers, n_tiles, keys.first, t0, h, kv, b);
        return;
    }
    take_registers<240>();

    const float scale2 = shape.scale * kLog2e;
    unsigned char* q_rows = tiles + group * kGroupRows * kRowBytes;
    const auto k_tile = [&](int tile) { return tiles + T::Q::kBytes + tile % kStages * (T::K::kBytes + T::V::kBytes); };
    const auto v_tile = [&](int tile) { return k_tile(tile) + T::K::kBytes; };
    const int group_row = t0 + group * kGroupRows, warp_row = group_row + in_group / kWarp * 16;
    const View view = view_of<true>(mask, b, group_row, kGroupRows);
    Fragments<1, T::kKeys> scores;
    Fragments<1, T::kDv> o;
    Packs<1, T::kKeys> P;
    OnlineRows<1> rows;
    float rescale[1][2];
    rows.clear();
    const auto softmax = [&](int tile) {
        const int s0 = keys.first + tile * T::kKeys;
        if (view.needs_mask(s0, T::kKeys)) apply_mask<true>(scores, mask, b, warp_row, s0);
        rows.add(scores, rescale, scale2);
    };

    mbarrier_wait(&barriers.q_full, 0);
    mbarrier_wait(&barriers.k_full[0], 0);
    start_scores<Number, typename T::Q, typename T::K>(scores[0], q_rows, k_tile(0));
    wgmma_wait<0>(scores[0]);
    if (in_group == 0) mbarrier_arrive(&barriers.k_empty[0]);
    softmax(0);
    pack_fragments<Number>(P, scores);

    // Two groups arrive at a turn's barrier: its consumer, which waits, and the other one, which continues.
    if (group == 1 && n_tiles > 1) named_barrier_arrive(kTurn + 0, kConsumers * kGroup);
    for (int tile = 1; tile < n_tiles; ++tile) {
        const int i = tile % kStages, before = (tile - 1) % kStages;
        mbarrier_wait(&barriers.k_full[i], tile / kStages % 2);
        named_barrier_sync(kTurn + group, kConsumers * kGroup);
        start_scores<Number, typename T::Q, typename T::K>(scores[0], q_rows, k_tile(tile));
        mbarrier_wait(&barriers.v_full[before], (tile - 1) / kStages % 2);
        start_columns<Number, typename T::V>(o[0], P[0], v_tile(tile - 1), tile > 1);
        if (group == 0 || tile + 1 < n_tiles) named_barrier_arrive(kTurn + 1 - group, kConsumers * kGroup);
        wgmma_wait<1>(scores[0]);
        if (in_group == 0) mbarrier_arrive(&barriers.k_empty[i]);
        softmax(tile);
        compute_before_wait(rows.sum[0][0] + rows.sum[0][1]);
        wgmma_wait<0>(o[0], P[0]);
        if (in_group == 0) mbarrier_arrive(&barriers.v_empty[before]);
        multiply_rows(o, rescale);
        pack_fragments<Number>(P, scores);
    }
    const int last = n_tiles - 1;
    mbarrier_wait(&barriers.v_full[last % kStages], last / kStages % 2);
    start_columns<Number, typename T::V>(o[0], P[0], v_tile(last), last > 0);
    wgmma_wait<0>(o[0], P[0]);

    finish_rows<Number, T>(shape, maps, lse, rows, o[0], q_rows, scale2, b, h, group, group_row, warp_row);
}

template <class Number>
void launch(const FlashArguments& a, cudaStream_t stream) {
    HopperSizes::dispatch(a.q.D, a.v.D, [&](auto size) {
        using T = ForwardTile<decltype(size)::kD, decltype(size)::kDv>;
        const dim3 grid(static_cast<unsigned>(ceil_div(a.T, int64_t{kBlockRows})), static_cast<unsigned>(a.q.count),
                        static_cast<unsigned>(a.B));
        const Maps maps{head_map(a.q, kBlockRows), head_map(a.k, T::kKeys), head_map(a.v, T::kKeys),
                        head_map(a.out, kGroupRows)};
        allow_shared(flash_forward_hopper_kernel<Number, T>, T::kSharedBytes);
        flash_forward_hopper_kernel<Number, T>
            <<<grid, kHopperThreads, T::kSharedBytes, stream>>>(shape_of(a), maps, a.lse);
        launched("flash_forward_hopper_kernel", forward_cost(a));
    });
}

}  // namespace

void flash_forward_hopper(const FlashArguments& a, cudaStream_t stream) {
    if (a.q.rows.dtype == DType::bf16) launch<__nv_bfloat16>(a, stream);
    else launch<__half>(a, stream);
}
