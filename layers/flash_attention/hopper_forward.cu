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
// computes exponentials the other one should multiply: a consumer waits for its turn before it starts its products,
// and then gives the turn to the other one (named barriers 1 and 2).
//
// A block stays, and does one tile of queries after the other: as many blocks as multiprocessors. So the beginning and
// the end of a tile are done beside the products of others: the producer fills free stages with the next tile's keys
// and values, and a consumer's half of q is loaded again when its last S is there; each consumer stores its own half of
// the output, while the other one still multiplies.
//
// THE ORDER of the work is computed from indices, without a counter. Heads are taken in sections, whose keys and values
// stay in L2 together (all heads at once, longest first, would read keys and values from memory 4.5 times at eight
// tiles a head). In the last section all heads' longest tiles come first, as a causal mask has them, in the one before
// it the shortest, and so on. Number n of a block is number n gridDim + x of that order for even n, and from the other
// end of the row of gridDim for odd n. So no block has the longer one of each row. With 132 blocks the one with the
// most work has, in tiles of keys, this many times the mean (T x heads of all sequences, GPT-2 124M's shape first):
//
//                              1024 x 768    1024 x 96    2048 x 256    4096 x 128    8192 x 32
//     this order                    1.003        1.031         1.009         1.000        1.002
//     head by head, the same        1.026        1.031         1.031         1.031        1.031
//     head by head, each row from
//     the same end                  1.356        1.375         1.213         1.125        1.079
//     head by head, each to the
//     next free block, as a grid    1.022        1.184         1.035         1.035        1.059
//
// Keys and values lie in stages of shared memory, each filled again when both consumers have arrived.
//
// Registers of a consumer's thread at D = 128: 64 for o, 64 for S, 32 for P.
#include "layers/flash_attention/hopper.cuh"

namespace {

enum NamedBarriers : uint32_t { kTurn = 1, kRowsWritten = 3, kOutFree = 5 };  // each of two: + consumer

template <int kD_, int kDv_>
struct ForwardTile {
    static constexpr int kD = kD_, kDv = kDv_;
    static constexpr int kKeys = kD <= 128 ? 128 : kD <= 192 ? 64 : 32;
    static constexpr int kStages = kD <= 64 || (kD <= 192 && kDv <= 128 && kKeys == 64) ? 3 : 2;
    using Q = Panels<kGroupRows, kD>;  // of one consumer, as the output
    using Out = Panels<kGroupRows, kDv>;
    using K = Panels<kKeys, kD>;
    using V = Panels<kKeys, kDv>;
    static constexpr int kStageBytes = K::kBytes + V::kBytes;
    static constexpr int kFirstOut = kConsumers * Q::kBytes, kFirstStage = kFirstOut + kConsumers * Out::kBytes;
    static constexpr int kTileBytes = kFirstStage + kStages * kStageBytes;
    static constexpr size_t kSharedBytes = kTileBytes + 256 + kTileAlignment;  // 256: for Barriers
    static_assert(kSharedBytes <= 227 << 10);
};

template <int kStages>
struct Barriers {
    uint64_t q_full[kConsumers], q_empty[kConsumers];
    uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

// ---------------------------------------------------------------------------------------------------------------------
// The order of the work

struct Order {
    int n_tiles;  // of queries, for a head
    int n_heads;  // of all sequences
    int section;  // heads that are done together
    int n_sections;
    int n_items;       // n_tiles n_heads
    int heads_of_one;  // of a sequence: H

    // Number n of this block, or n_items or more: there is none.
    __device__ __forceinline__ int item(int n) const {
        const int blocks = static_cast<int>(gridDim.x), x = static_cast<int>(blockIdx.x);
        return n * blocks + (n % 2 == 0 ? x : blocks - 1 - x);
    }
};
struct Item {
    int b, h, t0;
    __device__ __forceinline__ Item(const Order& order, int item) {
        const int s = item / (order.section * order.n_tiles), first = s * order.section,
                  heads = min(order.section, order.n_heads - first), rest = item - first * order.n_tiles;
        const int head = first + rest % heads;
        b = head / order.heads_of_one, h = head % order.heads_of_one;
        const bool longest_first = (order.n_sections - 1 - s) % 2 == 0;
        t0 = (longest_first ? order.n_tiles - 1 - rest / heads : rest / heads) * kBlockRows;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

struct Maps {
    CUtensorMap q, k, v, out;
};

// One thread. The producer alone announces a stage as full; every consumer arrives when it has read one.
template <int kStages>
__device__ __forceinline__ void init_barriers(Barriers<kStages>& barriers) {
    static_assert(sizeof(Barriers<kStages>) <= 256);
    for (int i = 0; i < kConsumers; ++i) mbarrier_init(&barriers.q_full[i], 1), mbarrier_init(&barriers.q_empty[i], 1);
    for (int i = 0; i < kStages; ++i) {
        mbarrier_init(&barriers.k_full[i], 1), mbarrier_init(&barriers.k_empty[i], kConsumers);
        mbarrier_init(&barriers.v_full[i], 1), mbarrier_init(&barriers.v_empty[i], kConsumers);
    }
    fence_proxy_async();
}

// The keys that the queries of an item see together, cut into tiles. Queries that see nothing go through one tile, all
// of which is masked: so the pipeline has one case.
template <class T>
struct KeyTiles {
    int first, n;
    __device__ __forceinline__ KeyTiles(const Mask& mask, const Item& item) {
        const Interval keys = view_of<true>(mask, item.b, item.t0, kBlockRows).any;
        first = keys.first, n = max(1, (keys.end - keys.first + T::kKeys - 1) / T::kKeys);
    }
};

// One thread. Round r of a stage is filled when round r - 1 has been read: the first one at once. Stages go on from
// item to item.
template <class T>
__device__ __forceinline__ void produce(const Shape& shape, const Order& order, const Maps& maps, unsigned char* tiles,
                                        Barriers<T::kStages>& barriers) {
    Ring<T::kStages> ring;
    for (int n = 0; order.item(n) < order.n_items; ++n) {
        const Item item(order, order.item(n));
        const KeyTiles<T> keys(shape.mask, item);
        const int kv = item.h / static_cast<int>(shape.H / shape.K);
        for (int tile = 0; tile < keys.n; ++tile, ring.next()) {
            const int s0 = keys.first + tile * T::kKeys;
            const uint32_t i = ring.stage();
            unsigned char* k_tile = tiles + T::kFirstStage + i * T::kStageBytes;
            mbarrier_wait(&barriers.k_empty[i], ring.parity() ^ 1);
            mbarrier_arrive_expect_tx(&barriers.k_full[i], T::K::kBytes);
            load_panels<typename T::K>(k_tile, maps.k, kv, s0, item.b, &barriers.k_full[i]);
            for (int group = 0; tile == 0 && group < kConsumers; ++group) {
                mbarrier_wait(&barriers.q_empty[group], (n + 1) % 2);
                mbarrier_arrive_expect_tx(&barriers.q_full[group], T::Q::kBytes);
                load_panels<typename T::Q>(tiles + group * T::Q::kBytes, maps.q, item.h, item.t0 + group * kGroupRows,
                                           item.b, &barriers.q_full[group]);
            }
            mbarrier_wait(&barriers.v_empty[i], ring.parity() ^ 1);
            mbarrier_arrive_expect_tx(&barriers.v_full[i], T::V::kBytes);
            load_panels<typename T::V>(k_tile + T::K::kBytes, maps.v, kv, s0, item.b, &barriers.v_full[i]);
        }
    }
}

// The end of a group's rows: lse, and o / sum through shared memory to device memory.
template <class Number, class T>
__device__ __forceinline__ void finish_rows(const Shape& shape, const Maps& maps, float* lse, OnlineRows<1>& rows,
                                            const float (&o)[T::kDv / 8][4], unsigned char* out_rows, float scale2,
                                            const Item& item, int group, int group_row, int warp_row) {
    const Mask& mask = shape.mask;
    float factor[2];
    for (int half = 0; half < 2; ++half) {
        const float sum = warp_sum(rows.sum[0][half], 4);
        const int t = warp_row + half * 8 + quad();
        factor[half] = inverse_sum(sum);
        if (in_quad() == 0 && t < mask.T)
            lse[(item.b * shape.H + item.h) * mask.T + t] = rows.lse(0, half, sum, scale2);
    }
    const bool first = static_cast<int>(threadIdx.x) % kGroup == 0;
    if (first) bulk_wait_read<0>();  // the copy engine has read the rows of the item before
    named_barrier_sync(kOutFree + group, kGroup);
    put_rows<Number, typename T::Out>(out_rows, o, factor);
    fence_proxy_async();
    named_barrier_sync(kRowsWritten + group, kGroup);
    if (first && group_row < mask.T) {
        store_panels<typename T::Out>(maps.out, item.h, group_row, item.b, out_rows);
        bulk_commit();
    }
}

// A consumer's part of one item. `more`: there is another one.
template <class Number, class T>
__device__ __forceinline__ void attend(const Shape& shape, const Maps& maps, float* lse, unsigned char* tiles,
                                       Barriers<T::kStages>& barriers, Ring<T::kStages>& ring, const Item& item,
                                       uint32_t q_parity, bool more) {
    const Mask& mask = shape.mask;
    const int group = warp_group(), in_group = static_cast<int>(threadIdx.x) % kGroup;
    const KeyTiles<T> keys(mask, item);
    const float scale2 = shape.scale * kLog2e;
    unsigned char* q_rows = tiles + group * T::Q::kBytes;
    const auto k_tile = [&](uint32_t stage) { return tiles + T::kFirstStage + stage * T::kStageBytes; };
    const int group_row = item.t0 + group * kGroupRows, warp_row = group_row + in_group / kWarp * 16;
    const View view = view_of<true>(mask, item.b, group_row, kGroupRows);
    Fragments<1, T::kKeys> scores;
    Fragments<1, T::kDv> o = {};  // see wgmma_m64k16
    Packs<1, T::kKeys> P;
    OnlineRows<1> rows;
    float rescale[1][2];
    rows.clear();
    const auto softmax = [&](int tile) {
        const int s0 = keys.first + tile * T::kKeys;
        if (view.needs_mask(s0, T::kKeys)) apply_mask<true>(scores, mask, item.b, warp_row, s0);
        rows.add(scores, rescale, scale2);
    };

    mbarrier_wait(&barriers.q_full[group], q_parity);
    mbarrier_wait(&barriers.k_full[ring.stage()], ring.parity());
    named_barrier_sync(kTurn + group, kConsumers * kGroup);
    start_scores<Number, typename T::Q, typename T::K>(scores[0], q_rows, k_tile(ring.stage()));
    // Two groups arrive at a turn's barrier: its consumer, which waits, and the other one, which continues.
    if (group == 0 || more || keys.n > 1) named_barrier_arrive(kTurn + 1 - group, kConsumers * kGroup);
    wgmma_wait<0>(scores[0]);
    if (in_group == 0) mbarrier_arrive(&barriers.k_empty[ring.stage()]);
    softmax(0);
    pack_fragments<Number>(P, scores);

    for (int tile = 1; tile < keys.n; ++tile) {
        const Ring<T::kStages> before = ring;
        ring.next();
        mbarrier_wait(&barriers.k_full[ring.stage()], ring.parity());
        named_barrier_sync(kTurn + group, kConsumers * kGroup);
        start_scores<Number, typename T::Q, typename T::K>(scores[0], q_rows, k_tile(ring.stage()));
        mbarrier_wait(&barriers.v_full[before.stage()], before.parity());
        start_columns<Number, typename T::V>(o[0], P[0], k_tile(before.stage()) + T::K::kBytes, tile > 1);
        if (group == 0 || more || tile + 1 < keys.n) named_barrier_arrive(kTurn + 1 - group, kConsumers * kGroup);
        wgmma_wait<1>(scores[0]);
        if (in_group == 0) mbarrier_arrive(&barriers.k_empty[ring.stage()]);
        softmax(tile);
        compute_before_wait(rows.sum[0][0] + rows.sum[0][1]);
        wgmma_wait<0>(o[0], P[0]);
        if (in_group == 0) mbarrier_arrive(&barriers.v_empty[before.stage()]);
        multiply_rows(o, rescale);
        pack_fragments<Number>(P, scores);
    }
    if (in_group == 0) mbarrier_arrive(&barriers.q_empty[group]);  // the last S is there
    mbarrier_wait(&barriers.v_full[ring.stage()], ring.parity());
    start_columns<Number, typename T::V>(o[0], P[0], k_tile(ring.stage()) + T::K::kBytes, keys.n > 1);
    wgmma_wait<0>(o[0], P[0]);
    if (in_group == 0) mbarrier_arrive(&barriers.v_empty[ring.stage()]);
    ring.next();
    finish_rows<Number, T>(shape, maps, lse, rows, o[0], tiles + T::kFirstOut + group * T::Out::kBytes, scale2, item,
                           group, group_row, warp_row);
}

template <class Number, class T>
__global__ void __launch_bounds__(kHopperThreads, 1)
    flash_forward_hopper_kernel(Shape shape, Order order, const __grid_constant__ Maps maps, float* lse) {
    const int group = warp_group(), in_group = static_cast<int>(threadIdx.x) % kGroup;
    unsigned char* tiles = shared_tiles();
    auto& barriers = *reinterpret_cast<Barriers<T::kStages>*>(tiles + T::kTileBytes);
    if (threadIdx.x == 0) init_barriers(barriers);
    __syncthreads();  // the mbarriers are initialised. This is the last barrier of all threads

    if (group == kConsumers) {
        give_registers<24>();
        if (in_group / kWarp == 0 && elect_one()) produce<T>(shape, order, maps, tiles, barriers);
        return;
    }
    take_registers<240>();
    if (group == 1) named_barrier_arrive(kTurn + 0, kConsumers * kGroup);  // the first turn is consumer 0's
    Ring<T::kStages> ring;
    for (int n = 0; order.item(n) < order.n_items; ++n)
        attend<Number, T>(shape, maps, lse, tiles, barriers, ring, Item(order, order.item(n)), n % 2,
                          order.item(n + 1) < order.n_items);
    if (in_group == 0) bulk_wait_read<0>();  // when this block ends, the next one gets its shared memory
}

// Key heads of a section: their keys and values take half of L2, which is 50 MB for 132 multiprocessors on an H100. The
// rest is for the queries and outputs that pass.
constexpr int64_t heads_of_section(int64_t head_bytes, int64_t multiprocessors) {
    return std::max<int64_t>(1, multiprocessors * (24 << 20) / 132 / head_bytes);
}
static_assert(heads_of_section(1024 * (64 + 64) * 2, 132) == 96);  // as the table above has GPT-2 124M's

Order order_of(const FlashArguments& a) {
    const int64_t head_bytes = a.T * (a.k.D + a.v.D) * static_cast<int64_t>(dtype_bytes(a.k.rows.dtype)),
                  group = a.q.count / a.k.count, n_heads = a.B * a.q.count,
                  n_tiles = ceil_div(a.T, int64_t{kBlockRows});
    const int64_t section = std::min(n_heads, heads_of_section(head_bytes, device().sm_count) * group);
    return {narrow(n_tiles, "tiles"),
            narrow(n_heads, "heads"),
            narrow(section, "heads"),
            narrow(ceil_div(n_heads, section), "sections"),
            narrow(n_tiles * n_heads, "tiles of queries"),
            narrow(a.q.count, "heads")};
}

template <class Number>
void launch(const FlashArguments& a, cudaStream_t stream) {
    HopperSizes::dispatch(a.q.D, a.v.D, [&](auto size) {
        using T = ForwardTile<decltype(size)::kD, decltype(size)::kDv>;
        const Order order = order_of(a);
        const Maps maps{head_map(a.q, kGroupRows), head_map(a.k, T::kKeys), head_map(a.v, T::kKeys),
                        head_map(a.out, kGroupRows)};
        allow_shared(flash_forward_hopper_kernel<Number, T>, T::kSharedBytes);
        flash_forward_hopper_kernel<Number, T>
            <<<static_cast<unsigned>(std::min(order.n_items, device().sm_count)), kHopperThreads, T::kSharedBytes,
               stream>>>(shape_of(a), order, maps, a.lse);
        launched("flash_forward_hopper_kernel", forward_cost(a));
    });
}

}  // namespace

void flash_forward_hopper(const FlashArguments& a, cudaStream_t stream) {
    dispatch_16_bits(a.q.rows.dtype, [&](auto zero) { launch<decltype(zero)>(a, stream); });
}
