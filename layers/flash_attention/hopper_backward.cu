// Flash attention on Hopper's tensor cores, backward. The maths is in flash_attention.cu, the tiles and the roles of
// the warp groups in flash_attention/hopper.cuh.
//
// One kernel computes each S and dP once: five products. An item of work owns 128 keys of one key head, whose dk and dv
// stay in registers, and goes through the queries that see them in rounds of 128. What a round adds to dq comes from
// dS, which both consumers put into shared memory, and goes to device memory, where the sums of a head lie in float32.
//
//               128 keys     queries, of a stage     dS          results on their way    shared memory
//     D = 64    k, v         q, do of 64, 3 stages   128 x 128   2 x 16 KiB for each     179 KiB
//     D = 128   k, v         q, do of 64, 2 stages   128 x 128   16 KiB for each         195 KiB
//
// The work of a consumer. Time runs downwards; what is side by side happens at the same time:
//
//     for each stage of a round           tensor cores            threads
//                                                                 wait(full)
//                                         S^T = k q^T
//                                         dP^T = v do^T           P^T, rounded to 16 bits
//                                         dv += P^T do            dS^T = P^T (dP^T - delta), to shared memory, too
//                                         dk += dS^T q
//                                                                 arrive(empty)
//     then, of 64 queries for each        dq = dS k
//     consumer, over all 128 keys                                 dq to shared memory;  arrive(staged)
//
// While one consumer computes exponentials the other one multiplies: exponentials and the rest take about half of the
// time that the products of a tile take, so within a round the two alternate without a barrier between them. S^T and
// dP^T of a round's second stage start before dv and dk of the first one are complete, where registers hold all of them
// (run_both). All products of a round are complete before the first of the next one starts (if a product continues into
// the next round of the loop, the compiler inserts a wait after each product: its warning C7515).
//
// THE ORDER OF DQ'S SUM. Query tile i gets a part from each tile of keys j that it sees, in descending order of j: so a
// run repeats bit for bit. Each consumer has a writer, a thread of the producer's group, which waits until the parts
// before j have been added (a counter in device memory for each 64 queries), has the copy engine add this one, waits
// until that is done, and counts. The first part is stored, not added; the last one is added by the consumer itself,
// which then has the sum, and stores it in 16 bits. So no kernel has to write zeros before, or to round after.
//
// Can blocks wait for each other for ever? A block takes items by a counter, head by head, and of a head the last keys
// first: when it has taken an item, all before it have been taken by blocks that are running. It does its items one
// after the other, and waits only for parts of items before its own. So the first item that is not complete waits for
// nothing, whatever order the blocks start in, and also where blocks run one after the other, as on the CPU device. The
// result does not depend on which block takes which item.
//
// Waiting is rare, because an item starts with the first queries that see its keys. The items of a head start at about
// the same time, and with a causal mask tile i gets its parts like this, each when the one before is there:
//
//     round of an item        0            1            2            3
//     keys 3            queries 3
//     keys 2            queries 2    queries 3
//     keys 1            queries 1    queries 2    queries 3
//     keys 0            queries 0    queries 1    queries 2    queries 3
//
// (In ascending order of j, with the last queries first, item j waits for j others before its first part can be added:
// on an H100 that took 3.72 ms where this takes 1.11, 768 heads of 1024 tokens and 64 columns.)
//
// A head's sums lie in one of a few slots, as many as blocks can be at work on: head b K + kv uses slot (b K + kv) %
// n_slots, and the first part of a tile waits until the last sum of the head before it has been taken. In memory that
// is 34 slots instead of 768 for GPT-2 124M's 64 x 12 heads, 9 MB instead of 201, which stay in L2.
//
// BYTES, a layer of that shape (T = 1024, D = 64): q, k, v, do and the results are 0.7 GB from and to memory, 0.23 ms
// at 3 TB/s. q and do, read again for each of a head's 4.5 tiles of keys on average, and the parts of dq (32 KiB for
// 128 x 128 pairs) are 0.9 GB each between L2 and the multiprocessors. The products are 0.26 TFLOP, 0.32 ms at 798
// TFLOP/s. Parts that each have a place of their own in memory, summed by a second kernel, would move 1.8 GB more: 0.6
// ms.
//
// At the barriers:
//
//     round_full[i], round_empty[i]   what the next round is: the producer finds out for consumers and writers
//     keys_full, keys_empty           k and v of the item's keys, and which queries see them: consumers and the
//                                     loader, which may be late where it has nothing to load, have read them
//     full[i]        q and do of stage i, and their lse and delta, which the 32 lanes of the producer's warp write by
//                    ordinary stores (rows of T floats start on no boundary that the copy engine takes)
//     empty[i]       each of the eight warps of the consumers releases a stage by itself: a group that skips a stage
//                    does not multiply, and only the products synchronise its four warps
//     staged[g][i], taken[g][i]     results of consumer g, for its writer
//     kDsFree, kDsWritten           named: both consumers have read dS of the round before, have written this one's
//
// How many queries a stage: the product of 64 rows and N others takes N / 2 clocks for 16 columns. If both come from
// shared memory, (64 + N) 32 bytes at 128 bytes per clock take (64 + N) / 4 clocks. So 64 others are the fewest that do
// not keep the tensor cores waiting. With 192 columns dk and dv leave no registers for this: hopper_backward_wide.cu.
//
// Registers of a consumer's thread at D = 128: 128 for dk and dv, then 32 S, 32 dP, 16 P, 16 dS, or 32 for dq: 232 in
// all, which leaves 40 to the producer's group.
#include "layers/flash_attention/hopper.cuh"

#include <algorithm>

namespace {

using OnePassSizes = HeadSizes<HeadSize<64, 64>, HeadSize<80, 80>, HeadSize<96, 96>, HeadSize<128, 128>>;

enum NamedBarriers : uint32_t { kDsFree = 1, kDsWritten = 2, kSumThere = 3 };  // kSumThere + consumer
constexpr int kBoxes = 4;                                                      // rounds that are known ahead

template <int kD_, int kDv_>
struct BackwardTile {
    static constexpr int kD = kD_, kDv = kDv_;
    static constexpr int kOthers = 64, kSteps = kBlockRows / kOthers;
    static constexpr int kStages = kD <= 64 ? 3 : 2;
    // Do the products of a round's two stages overlap? More columns leave no registers for it.
    static constexpr bool kOverlap = kD <= 80;
    static_assert(kSteps == 2);
    using K = Panels<kBlockRows, kD>;
    using V = Panels<kBlockRows, kDv>;
    using Q = Panels<kOthers, kD>;
    using Dout = Panels<kOthers, kDv>;
    using Scores = Panels<kBlockRows, kBlockRows>;  // dS^T: rows are keys
    // dq is computed in pieces of this many columns, one after the other where registers do not hold all.
    static constexpr int kPiece = kD < 128 ? kD : 64, kPieces = kD / kPiece;
    using Dq = Panels<kGroupRows, kPiece>;
    using Dk = Panels<kGroupRows, kD>;
    using Dv = Panels<kGroupRows, kDv>;
    static constexpr int kPartFloats = kGroupRows * kPiece;
    static constexpr int kStagings = kD <= 64 ? 2 : 1;  // results on their way, of each consumer
    static constexpr int kStagingBytes =
        std::max({kPartFloats * static_cast<int>(sizeof(float)), Dk::kBytes, Dv::kBytes});
    // In shared memory, in this order
    static constexpr int kKeysBytes = K::kBytes + V::kBytes, kStageBytes = Q::kBytes + Dout::kBytes;
    static constexpr int kFirstStage = kKeysBytes, kFirstScores = kFirstStage + kStages * kStageBytes,
                         kFirstStaging = kFirstScores + Scores::kBytes,
                         kFirstStatistics = kFirstStaging + kConsumers * kStagings * kStagingBytes,
                         kStatisticsBytes = kStages * 2 * kOthers * static_cast<int>(sizeof(float)),
                         kFirstBarrier = kFirstStatistics + kStatisticsBytes;
    static constexpr size_t kSharedBytes = kFirstBarrier + 512 + kTileAlignment;  // 512: for Barriers
    static_assert(kSharedBytes <= 227 << 10);
};

// A round, or that an item has no more of them, or that there are no more items.
struct Round {
    static constexpr int kEndOfItem = -1, kEnd = -2;
    int b, h, kv, j, i;   // query and key head; tile of keys; tile of queries
    uint32_t parity = 0;  // of keys_full
    int place = 0;        // of its sums: of consumer 0's queries, the other one's are the next
    // The count when all parts before this one have been added; and that after this one. The last part of a head makes
    // it the next head's first count.
    int count = 0, next_count = 0;
    bool first = false, last = false;  // of the parts
    // Of consumer `group`, whose 64 queries they are.
    __device__ __forceinline__ int query(int group) const { return i * kBlockRows + group * kGroupRows; }
};

template <class T>
struct Barriers {
    uint64_t round_full[kBoxes], round_empty[kBoxes], keys_full, keys_empty;
    uint64_t full[T::kStages], empty[T::kStages];
    uint64_t staged[kConsumers][T::kStagings], taken[kConsumers][T::kStagings];
    Round rounds[kBoxes];
    Interval seen_by;        // queries that see the item's keys
    View views[kConsumers];  // queries that see each consumer's
};

// ---------------------------------------------------------------------------------------------------------------------
// Items and rounds

// Where dq is summed: for each slot and head of a group, and each 64 queries, the sum so far and how many parts it has.
struct Sums {
    float* sums;
    int *counts, *next_item;
    int n_slots;
};
struct Work {
    int n_tiles, n_items;  // of a head; of all: (b, key head, tile of keys)
    int K, group;          // key heads; query heads of each
};
struct Item {
    int b, kv, j;
    int slot, epoch;  // of its head's sums, and how many heads have had the slot before
    __device__ __forceinline__ Item(const Work& work, int n_slots, int item) {
        const int head = item / work.n_tiles;
        j = work.n_tiles - 1 - item % work.n_tiles;
        b = head / work.K, kv = head % work.K;
        epoch = head / n_slots, slot = head % n_slots;
    }
};

// The rounds of an item: for each query head of the group all tiles of queries that get a part from these keys, from
// the first one to the last. A tile of queries that sees nothing gets its part, zeros, from the first tile of keys.
struct Rounds {
    int head = 0, i = -1;  // of the group; tile of queries
    Interval tiles;        // of keys, from which it gets parts
    __device__ __forceinline__ bool next(const Work& work, const Mask& mask, const Item& item) {
        for (;;) {
            if (++i == work.n_tiles) {
                if (++head == work.group) return false;
                i = 0;
            }
            const Interval keys = view_of<true>(mask, item.b, i * kBlockRows, kBlockRows).any;
            tiles = {keys.first / kBlockRows, (keys.end + kBlockRows - 1) / kBlockRows};
            if (keys.end <= keys.first) tiles = {0, 1};
            if (item.j >= tiles.first && item.j < tiles.end) return true;
        }
    }
    __device__ __forceinline__ Round round(const Work& work, const Item& item, uint32_t parity) const {
        const int first_count = item.epoch * (work.n_tiles + 1);
        Round r{item.b, item.kv * work.group + head, item.kv, item.j, i, parity};
        r.place = ((item.slot * work.group + head) * work.n_tiles + i) * kConsumers;
        r.first = item.j == tiles.end - 1, r.last = item.j == tiles.first;
        r.count = first_count + tiles.end - 1 - item.j;
        r.next_count = r.last ? first_count + work.n_tiles + 1 : r.count + 1;
        return r;
    }
};

struct Maps {
    CUtensorMap q, dout, k, v, dq, dk, dv;
};
struct Arguments {
    Shape shape;
    Work work;
    Sums sums;
    const float *lse, *delta;
    float scale2;  // scale log2(e)
};

// ---------------------------------------------------------------------------------------------------------------------
// The producer's group: one warp loads; of the others a thread each plans, and writes for each consumer

template <class T>
__device__ __forceinline__ void init_barriers(Barriers<T>& barriers) {
    constexpr int kWarps = kConsumers * kGroup / kWarp;
    if (threadIdx.x == 0) {
        static_assert(sizeof(Barriers<T>) <= 512);
        for (int i = 0; i < kBoxes; ++i) {
            mbarrier_init(&barriers.round_full[i], 1);
            mbarrier_init(&barriers.round_empty[i], kWarps + 1 + kConsumers);  // the loader, the writers
        }
        mbarrier_init(&barriers.keys_full, 1);
        mbarrier_init(&barriers.keys_empty, kWarps + 1);  // the loader, which reads seen_by
        for (int i = 0; i < T::kStages; ++i)
            mbarrier_init(&barriers.full[i], 1 + kWarp), mbarrier_init(&barriers.empty[i], kWarps);
        for (int g = 0; g < kConsumers; ++g)
            for (int i = 0; i < T::kStagings; ++i)
                mbarrier_init(&barriers.staged[g][i], kGroup / kWarp), mbarrier_init(&barriers.taken[g][i], 1);
        fence_proxy_async();
    }
    __syncthreads();  // the mbarriers are initialised. This is the last barrier of all threads
}

// This warp has read, or written.
__device__ __forceinline__ void arrive_by_warp(uint64_t* barrier) {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(barrier);
}

// A warp: q and do of a stage, with their lse and delta.
template <class T>
__device__ __forceinline__ void load_stage(const Arguments& a, const Maps& maps, unsigned char* tiles, uint64_t* full,
                                           uint32_t stage, int b, int h, int t0) {
    if (lane() == 0) {
        unsigned char* q_tile = tiles + T::kFirstStage + stage * T::kStageBytes;
        mbarrier_arrive_expect_tx(full, T::kStageBytes);
        load_panels<typename T::Q>(q_tile, maps.q, h, t0, b, full);
        load_panels<typename T::Dout>(q_tile + T::Q::kBytes, maps.dout, h, t0, b, full);
    }
    // All lanes copy lse and delta, and then arrive: so `full` is complete only after these stores.
    float* to = reinterpret_cast<float*>(tiles + T::kFirstStatistics) + stage * 2 * T::kOthers;
    const int64_t row = (b * a.shape.H + h) * a.shape.mask.T + t0;
    const float *lse = a.lse + row, *delta = a.delta + row;
    const int n = a.shape.mask.T - t0;
    for (int i = lane(); i < T::kOthers; i += kWarp) {
        to[i] = i < n ? lse[i] * kLog2e : 0.0f;
        to[T::kOthers + i] = i < n ? delta[i] : 0.0f;
    }
    mbarrier_arrive(full);
}

// One thread: the next round, for all.
template <class T>
__device__ __forceinline__ void announce(Barriers<T>& barriers, Ring<kBoxes>& box, const Round& round) {
    mbarrier_wait(&barriers.round_empty[box.stage()], box.parity() ^ 1);
    barriers.rounds[box.stage()] = round;
    mbarrier_arrive(&barriers.round_full[box.stage()]);
    box.next();
}

// One thread: k and v of an item, when those of the one before have been read, and who sees them.
template <class T>
__device__ __forceinline__ void load_keys(const Arguments& a, const Maps& maps, unsigned char* tiles,
                                          Barriers<T>& barriers, const Item& item, uint32_t parity) {
    const int s0 = item.j * kBlockRows;
    mbarrier_wait(&barriers.keys_empty, parity);
    mbarrier_arrive_expect_tx(&barriers.keys_full, T::kKeysBytes);
    load_panels<typename T::K>(tiles, maps.k, item.kv, s0, item.b, &barriers.keys_full);
    load_panels<typename T::V>(tiles + T::K::kBytes, maps.v, item.kv, s0, item.b, &barriers.keys_full);
    barriers.seen_by = view_of<false>(a.shape.mask, item.b, s0, kBlockRows).any;
    for (int group = 0; group < kConsumers; ++group)
        barriers.views[group] = view_of<false>(a.shape.mask, item.b, s0 + group * kGroupRows, kGroupRows);
}

// One thread. Takes items until there are no more, loads their keys, and finds their rounds.
template <class T>
__device__ __forceinline__ void plan(const Arguments& a, const Maps& maps, unsigned char* tiles,
                                     Barriers<T>& barriers) {
    Ring<kBoxes> box;
    for (uint32_t n = 0;; ++n) {
        const int taken = atomicAdd(a.sums.next_item, 1);
        if (taken >= a.work.n_items) return announce(barriers, box, {0, 0, 0, 0, Round::kEnd});
        const Item item(a.work, a.sums.n_slots, taken);
        load_keys<T>(a, maps, tiles, barriers, item, (n + 1) % 2);
        for (Rounds rounds; rounds.next(a.work, a.shape.mask, item);)
            announce(barriers, box, rounds.round(a.work, item, n % 2));
        announce(barriers, box, {item.b, 0, item.kv, item.j, Round::kEndOfItem, n % 2});
    }
}

// A warp: the stages of each round.
template <class T>
__device__ __forceinline__ void load(const Arguments& a, const Maps& maps, unsigned char* tiles,
                                     Barriers<T>& barriers) {
    Ring<T::kStages> ring;
    for (Ring<kBoxes> box;; box.next()) {
        mbarrier_wait(&barriers.round_full[box.stage()], box.parity());
        const Round& round = barriers.rounds[box.stage()];
        if (round.i == Round::kEnd) return;
        if (round.i == Round::kEndOfItem) arrive_by_warp(&barriers.keys_empty);
        for (int step = 0; step < T::kSteps && round.i != Round::kEndOfItem; ++step) {
            const int t0 = round.i * kBlockRows + step * T::kOthers;
            if (!View{barriers.seen_by, {}}.overlaps(t0, T::kOthers)) continue;
            mbarrier_wait(&barriers.empty[ring.stage()], ring.parity() ^ 1);
            load_stage<T>(a, maps, tiles, &barriers.full[ring.stage()], ring.stage(), round.b, round.h, t0);
            ring.next();
        }
        arrive_by_warp(&barriers.round_empty[box.stage()]);
    }
}

// One thread: what consumer `group` has computed goes to device memory, in the order in which it computes it.
template <class T>
struct Writer {
    const Arguments& a;
    const Maps& maps;
    unsigned char* staging;
    Barriers<T>& barriers;
    const int group;
    Ring<T::kStagings> ring;

    __device__ __forceinline__ unsigned char* wait() {
        mbarrier_wait(&barriers.staged[group][ring.stage()], ring.parity());
        return staging + ring.stage() * T::kStagingBytes;
    }
    __device__ __forceinline__ void free() {
        mbarrier_arrive(&barriers.taken[group][ring.stage()]);
        ring.next();
    }
    __device__ __forceinline__ void write_part(const Round& round) {
        int* count = a.sums.counts + round.place + group;
        for (int piece = 0; piece < T::kPieces; ++piece) {
            const unsigned char* part = wait();
            if (piece == 0) wait_for_count(count, round.count);
            if (round.last) {
                store_panels<typename T::Dq>(maps.dq, round.h, round.query(group), round.b, part,
                                             piece * kPanelColumns);
            } else {
                float* sum =
                    a.sums.sums + (int64_t{round.place + group} * T::kPieces + piece) * int64_t{T::kPartFloats};
                constexpr uint32_t kBytes = T::kPartFloats * sizeof(float);
                if (round.first) bulk_store(sum, part, kBytes);
                else bulk_add(sum, part, kBytes);
            }
            bulk_commit();
            if (round.last) bulk_wait_read<0>();
            else bulk_wait<0>();
            free();
        }
        set_count(count, round.next_count);
    }
    template <class Rows>
    __device__ __forceinline__ void write_rows(const CUtensorMap& map, const Round& end) {
        const int row = end.j * kBlockRows + group * kGroupRows;
        const unsigned char* rows = wait();
        if (row < a.shape.mask.T) store_panels<Rows>(map, end.kv, row, end.b, rows);
        bulk_commit();
        bulk_wait_read<0>();
        free();
    }
    __device__ __forceinline__ void run() {
        for (Ring<kBoxes> box;; box.next()) {
            mbarrier_wait(&barriers.round_full[box.stage()], box.parity());
            const Round& round = barriers.rounds[box.stage()];
            if (round.i == Round::kEnd) return;
            if (round.i == Round::kEndOfItem) {
                write_rows<typename T::Dk>(maps.dk, round);
                write_rows<typename T::Dv>(maps.dv, round);
            } else if (round.query(group) < a.shape.mask.T) {
                write_part(round);
            }
            mbarrier_arrive(&barriers.round_empty[box.stage()]);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// A consumer

// dq of 64 queries = dS k, a piece of k's columns from `keys` on: dS lies in shared memory with keys as rows.
template <class Number, class T>
__device__ __forceinline__ void start_dq(float (&dq)[T::kPiece / 8][4], const unsigned char* dS,
                                         const unsigned char* keys) {
    constexpr int kWhole = T::kPiece / 64 * 8, kRest = T::kPiece / 8 - kWhole;
    const uint64_t first_row = wgmma_descriptor<128>(dS, T::Scores::kPanelBytes, 8 * kRowBytes),
                   first_key = wgmma_descriptor<128>(keys, T::K::kPanelBytes, 8 * kRowBytes);
    wgmma_fence(dq);
#pragma unroll
    for (int k = 0; k < kBlockRows / 16; ++k) {
        const uint64_t rows = wgmma_advance(first_row, k * 16 * kRowBytes),
                       columns = wgmma_advance(first_key, k * 16 * kRowBytes);
        wgmma_m64k16<Number, true, true>(reinterpret_cast<float(&)[kWhole][4]>(dq[0]), rows, columns, k > 0);
        if constexpr (kRest > 0)
            wgmma_m64k16<Number, true, true>(reinterpret_cast<float(&)[kRest][4]>(dq[kWhole]), rows,
                                             wgmma_advance(columns, kWhole / 8 * T::K::kPanelBytes), k > 0);
    }
    wgmma_commit();
}

// dS^T of this consumer's 64 keys and kOthers queries, to its place in shared memory. n_keys of them exist. The others
// have zeros as k, but exp(0 - lse) may be infinite, and infinity times zero would make dq NaN: their dS is 0.
template <class T>
__device__ __forceinline__ void put_scores(unsigned char* tiles, const uint32_t (&dS)[T::kOthers / 16][4], int group,
                                           int step, int n_keys) {
    if (step == 0) named_barrier_sync(kDsFree, kConsumers * kGroup);  // dq of the round before has read them
    unsigned char* rows = tiles + T::kFirstScores + group * kGroupRows * kRowBytes;
    const int first_row = not_hoisted(warp() % 4 * 16 + quad());
#pragma unroll
    for (int n = 0; n < T::kOthers / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + half * 8, column = step * T::kOthers + n * 8 + 2 * in_quad();
            const int byte = row * kRowBytes + column % kPanelColumns * 2;
            *reinterpret_cast<uint32_t*>(rows + column / kPanelColumns * T::Scores::kPanelBytes + swizzled<128>(byte)) =
                row < n_keys ? dS[n / 2][n % 2 * 2 + half] : 0;
        }
}

template <class Number, class T>
struct Consumer {
    const Arguments& a;
    unsigned char* tiles;
    const int group;
    Ring<T::kStages> ring;
    Ring<T::kStagings> staging;

    __device__ __forceinline__ Barriers<T>& barriers() const {
        return *reinterpret_cast<Barriers<T>*>(tiles + T::kFirstBarrier);
    }
    // The next place for results that the writer takes, when it is free; then they are there.
    __device__ __forceinline__ unsigned char* place_for_results() {
        mbarrier_wait(&barriers().taken[group][staging.stage()], staging.parity() ^ 1);
        return tiles + T::kFirstStaging + (group * T::kStagings + staging.stage()) * T::kStagingBytes;
    }
    __device__ __forceinline__ void hand_over() {
        fence_proxy_async();
        arrive_by_warp(&barriers().staged[group][staging.stage()]);
        staging.next();
    }

    // The sum of the parts before the last one, when it is there. It lies as the threads hold theirs, four floats each.
    __device__ __forceinline__ void load_sum(float4 (&sum)[T::kPiece / 8], const Round& round, int piece) {
        const int place = round.place + group;
        if (piece == 0 && threadIdx.x % kGroup == 0) wait_for_count(a.sums.counts + place, round.count);
        if (piece == 0) named_barrier_sync(kSumThere + group, kGroup);
        const float4* from = reinterpret_cast<const float4*>(a.sums.sums + (int64_t{place} * T::kPieces + piece) *
                                                                               int64_t{T::kPartFloats});
        from += not_hoisted(static_cast<int>(threadIdx.x) % kGroup);
#pragma unroll
        for (int n = 0; n < T::kPiece / 8; ++n) sum[n] = __ldcg(from + n * kGroup);
    }
    // The part of dq of this consumer's 64 queries of a round, from dS of both.
    __device__ __forceinline__ void add_dq(const Round& round) {
#pragma unroll
        for (int piece = 0; piece < T::kPieces; ++piece) {
            float dq[T::kPiece / 8][4];
            float4 sum[T::kPiece / 8] = {};
            start_dq<Number, T>(dq, tiles + T::kFirstScores + not_hoisted(group * T::Scores::kPanelBytes),
                                tiles + not_hoisted(piece * T::K::kPanelBytes));
            if (round.last && !round.first) load_sum(sum, round, piece);  // while the tensor cores multiply
            wgmma_wait<0>(dq);
            unsigned char* to = place_for_results();
            if (round.last) {
#pragma unroll
                for (int n = 0; n < T::kPiece / 8; ++n)
                    dq[n][0] += sum[n].x, dq[n][1] += sum[n].y, dq[n][2] += sum[n].z, dq[n][3] += sum[n].w;
                const float factor[2] = {a.shape.scale, a.shape.scale};
                put_rows<Number, typename T::Dq>(to, dq, factor);
            } else {
                float4* part = reinterpret_cast<float4*>(to) + not_hoisted(static_cast<int>(threadIdx.x) % kGroup);
#pragma unroll
                for (int n = 0; n < T::kPiece / 8; ++n) part[n * kGroup] = {dq[n][0], dq[n][1], dq[n][2], dq[n][3]};
            }
            hand_over();
        }
    }

    using Scores = Fragments<1, T::kOthers>;
    using Factors = Packs<1, T::kOthers>;
    __device__ __forceinline__ const unsigned char* q_of(const Ring<T::kStages>& at) const {
        return tiles + T::kFirstStage + at.stage() * T::kStageBytes;
    }
    // S^T = k q^T and dP^T = v do^T
    __device__ __forceinline__ void start_stage(Scores& S, Scores& dP, const Ring<T::kStages>& at) {
        const unsigned char *k_rows = tiles + not_hoisted(group * kGroupRows * kRowBytes), *q_tile = q_of(at);
        start_scores<Number, typename T::K, typename T::Q>(S[0], k_rows, q_tile);
        start_scores<Number, typename T::V, typename T::Dout>(dP[0], k_rows + T::K::kBytes, q_tile + T::Q::kBytes);
    }
    // S is there. P, and dv += P^T do; when dP is there, dS and dk += dS^T q.
    __device__ __forceinline__ void add_stage(Scores& S, Scores& dP, Factors& P, Factors& dS, float (&dk)[T::kD / 8][4],
                                              float (&dv)[T::kDv / 8][4], const Ring<T::kStages>& at, const View& view,
                                              const Round& round, int t0, int step) {
        const unsigned char *q_tile = q_of(at), *dout_tile = q_tile + T::Q::kBytes;
        // Of this thread's first query.
        const float* lse2 = reinterpret_cast<float*>(tiles + T::kFirstStatistics) + at.stage() * 2 * T::kOthers +
                            not_hoisted(2 * in_quad());
        const float* deltas = lse2 + T::kOthers;
        if (view.needs_mask(t0, T::kOthers)) {
            const int warp_row = round.j * kBlockRows + not_hoisted(static_cast<int>(threadIdx.x)) / kWarp * 16;
            apply_mask<false>(S, a.shape.mask, round.b, warp_row, t0);
        }
#pragma unroll
        for (int n = 0; n < T::kOthers / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) S[0][n][i] = ex2_approx(fmaf(S[0][n][i], a.scale2, -lse2[n * 8 + i % 2]));
        pack_fragments<Number>(P, S);
        start_columns<Number, typename T::Dout>(dv, P[0], dout_tile);  // dv = P^T do
        wgmma_wait<1>(dP[0]);
#pragma unroll
        for (int n = 0; n < T::kOthers / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dP[0][n][i] = S[0][n][i] * (dP[0][n][i] - deltas[n * 8 + i % 2]);
        pack_fragments<Number>(dS, dP);
        put_scores<T>(tiles, dS[0], group, step, a.shape.mask.T - round.j * kBlockRows - group * kGroupRows);
        start_columns<Number, typename T::Q>(dk, dS[0], q_tile);  // dk = scale dS^T q
    }
    __device__ __forceinline__ void release_stage() {
        arrive_by_warp(&barriers().empty[ring.stage()]);
        ring.next();
    }

    // A stage by itself.
    __device__ __forceinline__ void run_step(float (&dk)[T::kD / 8][4], float (&dv)[T::kDv / 8][4], const View& view,
                                             const Round& round, int step) {
        const int t0 = round.i * kBlockRows + step * T::kOthers;
        const bool loaded = View{barriers().seen_by, {}}.overlaps(t0, T::kOthers);
        if (loaded) mbarrier_wait(&barriers().full[ring.stage()], ring.parity());
        if (view.overlaps(t0, T::kOthers)) {
            Scores S, dP;
            Factors P, dS;
            start_stage(S, dP, ring);
            wgmma_wait<1>(S[0]);
            add_stage(S, dP, P, dS, dk, dv, ring, view, round, t0, step);
            wgmma_wait<0>(dk, dv, P[0], dS[0]);
        } else {
            const uint32_t zeros[T::kOthers / 16][4] = {};
            put_scores<T>(tiles, zeros, group, step, 0);
        }
        if (loaded) release_stage();
    }
    // Both stages of a round: the first products of the second one start before the last ones of the first one end.
    __device__ __forceinline__ void run_both(float (&dk)[T::kD / 8][4], float (&dv)[T::kDv / 8][4], const View& view,
                                             const Round& round) {
        const int t0 = round.i * kBlockRows;
        Scores S, dP;
        Factors P, dS;
        mbarrier_wait(&barriers().full[ring.stage()], ring.parity());
        start_stage(S, dP, ring);
        wgmma_wait<1>(S[0]);
        add_stage(S, dP, P, dS, dk, dv, ring, view, round, t0, 0);
        Ring<T::kStages> second = ring;
        second.next();
        mbarrier_wait(&barriers().full[second.stage()], second.parity());
        start_stage(S, dP, second);
        wgmma_wait<1>(S[0], dk, dv, P[0], dS[0]);
        release_stage();
        add_stage(S, dP, P, dS, dk, dv, ring, view, round, t0 + T::kOthers, 1);
        wgmma_wait<0>(dk, dv, P[0], dS[0]);
        release_stage();
    }

    __device__ __forceinline__ void run_round(float (&dk)[T::kD / 8][4], float (&dv)[T::kDv / 8][4],
                                              const Round& round) {
        const View& view = barriers().views[group];
        const int t0 = round.i * kBlockRows;
        if (T::kOverlap && view.overlaps(t0, T::kOthers) && view.overlaps(t0 + T::kOthers, T::kOthers))
            run_both(dk, dv, view, round);
        else
            for (int step = 0; step < T::kSteps; ++step) run_step(dk, dv, view, round, step);
        fence_proxy_async();
        named_barrier_sync(kDsWritten, kConsumers * kGroup);
        if (round.query(group) < a.shape.mask.T) add_dq(round);
    }

    __device__ __forceinline__ void run() {
        Ring<kBoxes> box;
        Fragments<1, T::kD> dk;
        Fragments<1, T::kDv> dv;
        clear(dk);
        clear(dv);
        for (;; box.next()) {
            mbarrier_wait(&barriers().round_full[box.stage()], box.parity());
            const Round& round = barriers().rounds[box.stage()];
            if (round.i == Round::kEnd) return;
            mbarrier_wait(&barriers().keys_full, round.parity);
            if (round.i != Round::kEndOfItem) {
                run_round(dk[0], dv[0], round);
            } else {
                arrive_by_warp(&barriers().keys_empty);
                const float one[2] = {1.0f, 1.0f}, factor[2] = {a.shape.scale, a.shape.scale};
                put_rows<Number, typename T::Dk>(place_for_results(), dk[0], factor);
                hand_over();
                put_rows<Number, typename T::Dv>(place_for_results(), dv[0], one);
                hand_over();
                clear(dk);
                clear(dv);
            }
            arrive_by_warp(&barriers().round_empty[box.stage()]);
        }
    }
};

template <class Number, class T>
__global__ void __launch_bounds__(kHopperThreads, 1)
    flash_backward_hopper_kernel(const __grid_constant__ Arguments a, const __grid_constant__ Maps maps) {
    const int group = warp_group(), in_group = static_cast<int>(threadIdx.x) % kGroup;
    unsigned char* tiles = shared_tiles();
    auto& barriers = *reinterpret_cast<Barriers<T>*>(tiles + T::kFirstBarrier);
    init_barriers<T>(barriers);

    if (group == kConsumers) {
        give_registers<40>();
        const int role = in_group / kWarp;
        if (role == kConsumers) load<T>(a, maps, tiles, barriers);
        else if (role > kConsumers && lane() == 0) plan<T>(a, maps, tiles, barriers);
        else if (lane() == 0)
            Writer<T>{a, maps, tiles + T::kFirstStaging + role * T::kStagings * T::kStagingBytes, barriers, role, {}}
                .run();
        return;
    }
    take_registers<232>();
    Consumer<Number, T>{a, tiles, group, {}, {}}.run();
}

// ---------------------------------------------------------------------------------------------------------------------
// The launch

// The sums of dq that an item may add to: of the tiles of queries that see more than one tile of keys. Documents, which
// the host does not know, count as one; a window as none.
int64_t summed_bytes(const FlashArguments& a, int64_t kD) {
    const int64_t n_tiles = ceil_div(a.T, int64_t{kBlockRows}), first = a.causal ? 1 : 0;
    if (n_tiles < 2) return 0;
    const int64_t halves = ceil_div(a.T - first * kBlockRows, int64_t{kGroupRows});
    return a.n_slots * (a.q.count / a.k.count) * halves * kGroupRows * kD * 4;
}
LaunchCost cost_of(const FlashArguments& a, int64_t kD) {
    const int64_t n_halves = ceil_div(a.T, int64_t{kGroupRows}),
                  sums = summed_bytes(a, kD) + 4 * (1 + a.n_slots * (a.q.count / a.k.count) * n_halves);
    return {.reads = bytes_of(a.q, a.k, a.v, a.out) + 2 * row_floats_bytes(a) + document_bytes(a) + sums,
            .writes = bytes_of(a.dq, a.dk, a.dv) + sums,
            .scratch = 2 * sums,
            .flops = product_flops(a, 3 * a.q.D + 2 * a.v.D)};
}

template <class Number>
void launch(const FlashArguments& a, cudaStream_t stream) {
    OnePassSizes::dispatch(a.q.D, a.v.D, [&](auto size) {
        using T = BackwardTile<decltype(size)::kD, decltype(size)::kDv>;
        const int64_t n_tiles = ceil_div(a.T, int64_t{kBlockRows}), K = a.k.count;
        const Work work{narrow(n_tiles, "tiles"), narrow(a.B * K * n_tiles, "tiles of keys"), narrow(K, "heads"),
                        narrow(a.q.count / K, "heads")};
        const Sums sums{a.dq_sums, a.dq_counts + 1, a.dq_counts, narrow(a.n_slots, "slots")};
        const Maps maps{head_map(a.q, T::kOthers), head_map(a.out, T::kOthers), head_map(a.k, kBlockRows),
                        head_map(a.v, kBlockRows), head_map(a.dq, kGroupRows),  head_map(a.dk, kGroupRows),
                        head_map(a.dv, kGroupRows)};
        allow_shared(flash_backward_hopper_kernel<Number, T>, T::kSharedBytes);
        flash_backward_hopper_kernel<Number, T>
            <<<static_cast<unsigned>(std::min(work.n_items, device().sm_count)), kHopperThreads, T::kSharedBytes,
               stream>>>(Arguments{shape_of(a), work, sums, a.lse, a.delta, a.scale * kLog2e}, maps);
        launched("flash_backward_hopper_kernel", cost_of(a, T::kD));
    });
}

}  // namespace

// As many slots as heads that the blocks can be at work on, each with the item that it has taken ahead, and one more.
DqSums hopper_sums(int64_t B, int64_t T, int64_t H, int64_t K, int64_t D, int64_t Dv) {
    DqSums sums;
    OnePassSizes::dispatch(D, Dv, [&](auto size) {
        const int64_t n_tiles = ceil_div(T, int64_t{kBlockRows});
        sums = {std::min(B * K, ceil_div(int64_t{2} * device().sm_count, n_tiles) + 1),
                H / K * n_tiles * kBlockRows * decltype(size)::kD, H / K * n_tiles * kConsumers};
    });
    return sums;
}

void flash_backward_hopper(const FlashArguments& a, cudaStream_t stream) {
    if (a.n_slots == 0) return flash_backward_hopper_wide(a, stream);
    dispatch_16_bits(a.q.rows.dtype, [&](auto zero) { launch<decltype(zero)>(a, stream); });
}
