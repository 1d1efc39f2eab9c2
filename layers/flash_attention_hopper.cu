// Flash attention on Hopper's tensor cores (wgmma, sm_90a), forward. The maths is in flash_attention.cu, the
// instructions in layers/ptx.cuh.
//
// A block has 128 rows and three warp groups. One of them is the producer: one of its threads tells the copy engine
// which tiles of q, k and v to bring, and is otherwise idle. The other two are consumers, with 64 rows each: they
// multiply, and take the exponentials.
//
//     producer     wait(k_empty)  load k 0   wait(v_empty)  load v 0   wait(k_empty)  load k 1   ...
//     consumer     wait(k_full)   S = q k 0^T;   softmax;   then for each further tile i
//                      S' = q k i^T    started         wait(k_full)
//                      o += P v i-1    started         wait(v_full)
//                      softmax of S', when it is there, while o += P v is still under way;     arrive(k_empty)
//                      P = S', o rescaled, when that is done;                                  arrive(v_empty)
//
// Tensor cores do a product of a tile in about the time that the exponentials of a tile take. So while one consumer
// takes exponentials the other one should multiply: before a consumer starts its two products it waits for its turn,
// and passes the turn on when they are started (named barriers 1 and 2).
//
// Keys and values lie in two stages of shared memory, each filled again when both consumers have arrived. Tiles are cut
// into panels of 64 columns, 128 bytes a row, swizzled: as the copy engine writes them, and wgmma reads them.
//
//                  operand A                              operand B                                    result
//     S = q k^T    q, shared memory, K-major              k, shared memory, K-major (a row is a key)   S in registers
//     o += P v     P in registers: S, packed              v, shared memory, N-major (a row is a key)   o in registers
//
// What is outside of a tensor the copy engine fills with zeros: columns from D on, tokens from T on. Keys that are no
// row's business, of other documents for example, are loaded, and masked.
//
// Registers of a consumer's thread at D = 128: 64 for o, 64 for S, 32 for P. The producer gives back most of its own.
#include "layers/flash_attention_mma.cuh"
#include "layers/tensor_map.h"

namespace {

using HopperSizes = HeadSizes<HeadSize<64, 64>, HeadSize<80, 80>, HeadSize<96, 96>, HeadSize<128, 128>,
                              HeadSize<192, 128>, HeadSize<192, 192>>;

constexpr int kGroup = 128, kConsumers = 2, kHopperThreads = kGroup * (kConsumers + 1);
constexpr int kStages = 2, kRowBytes = 128, kPanelColumns = 64;
constexpr int kGroupRows = 64, kBlockRows = kGroupRows * kConsumers;
enum NamedBarriers : uint32_t { kTurn = 1, kRowsWritten = 3 };  // each of two: + consumer

template <int kD_, int kDv_>
struct HopperTile {
    static constexpr int kD = kD_, kDv = kDv_;
    static constexpr int kKeys = kD <= 128 ? 128 : 64;
    static constexpr int kPanels = (kD + 63) / 64, kValuePanels = (kDv + 63) / 64;
    static constexpr int kQPanelBytes = kBlockRows * kRowBytes, kPanelBytes = kKeys * kRowBytes;
    static constexpr int kQBytes = kPanels * kQPanelBytes, kKBytes = kPanels * kPanelBytes,
                         kVBytes = kValuePanels * kPanelBytes;
    static constexpr size_t kSharedBytes = kQBytes + kStages * (kKBytes + kVBytes) + 1024 + kTileAlignment;
};

struct Barriers {
    uint64_t q_full, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

// ---------------------------------------------------------------------------------------------------------------------
// Products of a warp group. All are started here, and waited for by the caller.

// scores = q k^T: 64 rows of q.
template <class Number, class T>
__device__ __forceinline__ void start_scores(float (&scores)[T::kKeys / 8][4], const unsigned char* q_rows,
                                             const unsigned char* k_tile) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < T::kD; k += 16) {
        const int panel = k / kPanelColumns, byte = k % kPanelColumns * 2;
        wgmma_m64k16<Number>(scores, wgmma_descriptor<128>(q_rows + panel * T::kQPanelBytes + byte, 0, 8 * kRowBytes),
                             wgmma_descriptor<128>(k_tile + panel * T::kPanelBytes + byte, 0, 8 * kRowBytes), k > 0);
    }
    wgmma_commit();
}

// o += P v, or o = P v. The columns of whole panels go in one product, those of a part of a panel in another.
template <class Number, class T>
__device__ __forceinline__ void start_output(float (&o)[T::kDv / 8][4], const uint32_t (&P)[T::kKeys / 16][4],
                                             const unsigned char* v_tile, bool accumulate) {
    constexpr int kWhole = T::kDv / 64 * 8, kRest = T::kDv / 8 - kWhole;  // in fragments of 8 columns
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < T::kKeys / 16; ++k) {
        const unsigned char* v_rows = v_tile + k * 16 * kRowBytes;
        const bool add = accumulate || k > 0;
        wgmma_m64k16<Number, true>(reinterpret_cast<float(&)[kWhole][4]>(o[0]), P[k],
                                   wgmma_descriptor<128>(v_rows, T::kPanelBytes, 8 * kRowBytes), add);
        if constexpr (kRest > 0)
            wgmma_m64k16<Number, true>(
                reinterpret_cast<float(&)[kRest][4]>(o[kWhole]), P[k],
                wgmma_descriptor<128>(v_rows + kWhole / 8 * T::kPanelBytes, T::kPanelBytes, 8 * kRowBytes), add);
    }
    wgmma_commit();
}

// ---------------------------------------------------------------------------------------------------------------------
// The running softmax of a thread's two rows, quad() and quad() + 8 of its warp's 16. The sum is this lane's own part.

struct TwoRows {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

    // Scores become probabilities times 2^(scale2 max); what has been summed with the old maximum is to be multiplied
    // by rescale.
    template <int kOtherTiles>
    __device__ __forceinline__ void add(float (&scores)[kOtherTiles][4], float (&rescale)[2], float scale2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float larger = max[half];
#pragma unroll
            for (int n = 0; n < kOtherTiles; ++n)
                larger = fmaxf(larger, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            larger = warp_max(larger, 4);
            // A row that has seen nothing yet: its scores are all -infinity, and less 0 they stay so.
            const float shift = larger == -INFINITY ? 0.0f : larger * scale2;
            rescale[half] = ex2_approx(fmaf(max[half], scale2, -shift));
            float tile_sum = 0.0f;
#pragma unroll
            for (int n = 0; n < kOtherTiles; ++n)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i)
                    tile_sum += scores[n][i] = ex2_approx(fmaf(scores[n][i], scale2, -shift));
            sum[half] = fmaf(sum[half], rescale[half], tile_sum);
            max[half] = larger;
        }
    }
};

template <int kColumnTiles>
__device__ __forceinline__ void multiply_rows(float (&o)[kColumnTiles][4], const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] *= factor[i / 2];
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

struct Maps {
    CUtensorMap q, k, v, out;
};

// One thread. Round r of a stage is filled when round r - 1 has been read: the first one at once.
template <class T>
__device__ __forceinline__ void produce(const Maps& maps, unsigned char* tiles, Barriers& barriers, int n_tiles,
                                        int first_key, int t0, int h, int kv, int b) {
    mbarrier_arrive_expect_tx(&barriers.q_full, T::kQBytes);
    for (int panel = 0; panel < T::kPanels; ++panel)
        tensor_load<4>(tiles + panel * T::kQPanelBytes, &maps.q, {panel * kPanelColumns, h, t0, b}, &barriers.q_full);
    for (int tile = 0; tile < n_tiles; ++tile) {
        const int i = tile % kStages, s0 = first_key + tile * T::kKeys;
        const uint32_t parity = (tile / kStages + 1) % 2;
        unsigned char* k_tile = tiles + T::kQBytes + i * (T::kKBytes + T::kVBytes);
        mbarrier_wait(&barriers.k_empty[i], parity);
        mbarrier_arrive_expect_tx(&barriers.k_full[i], T::kKBytes);
        for (int panel = 0; panel < T::kPanels; ++panel)
            tensor_load<4>(k_tile + panel * T::kPanelBytes, &maps.k, {panel * kPanelColumns, kv, s0, b},
                           &barriers.k_full[i]);
        mbarrier_wait(&barriers.v_empty[i], parity);
        mbarrier_arrive_expect_tx(&barriers.v_full[i], T::kVBytes);
        for (int panel = 0; panel < T::kValuePanels; ++panel)
            tensor_load<4>(k_tile + T::kKBytes + panel * T::kPanelBytes, &maps.v, {panel * kPanelColumns, kv, s0, b},
                           &barriers.v_full[i]);
    }
}

// Block (query tile, query head, b). The longest rows of a causal mask come first, so that no block is left alone at
// the end.
template <class Number, class T>
__global__ void __launch_bounds__(kHopperThreads, 1)
    flash_forward_hopper_kernel(Shape shape, const __grid_constant__ Maps maps, float* lse) {
    const Mask& mask = shape.mask;
    const int b = static_cast<int>(blockIdx.z), t0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kBlockRows;
    const int h = static_cast<int>(blockIdx.y), kv = h / static_cast<int>(shape.H / shape.K);
    const int group = static_cast<int>(threadIdx.x) / kGroup, in_group = static_cast<int>(threadIdx.x) % kGroup;
    unsigned char* tiles = shared_tiles();
    Barriers& barriers = *reinterpret_cast<Barriers*>(tiles + T::kQBytes + kStages * (T::kKBytes + T::kVBytes));
    const Interval keys = view_of<true>(mask, b, t0, kBlockRows).any;
    const int n_tiles = (keys.end - keys.first + T::kKeys - 1) / T::kKeys;
    if (threadIdx.x == 0) {
        mbarrier_init(&barriers.q_full, 1);
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(&barriers.k_full[i], 1), mbarrier_init(&barriers.k_empty[i], kConsumers);
            mbarrier_init(&barriers.v_full[i], 1), mbarrier_init(&barriers.v_empty[i], kConsumers);
        }
        fence_proxy_async();
    }
    __syncthreads();  // the mbarriers are there. The last barrier of all threads

    if (group == kConsumers) {
        give_registers<24>();
        if (in_group / kWarp == 0 && elect_one()) produce<T>(maps, tiles, barriers, n_tiles, keys.first, t0, h, kv, b);
        return;
    }
    take_registers<240>();

    const float scale2 = shape.scale * kLog2e;
    unsigned char* q_rows = tiles + group * kGroupRows * kRowBytes;
    const auto k_tile = [&](int tile) { return tiles + T::kQBytes + tile % kStages * (T::kKBytes + T::kVBytes); };
    const auto v_tile = [&](int tile) { return k_tile(tile) + T::kKBytes; };
    const int group_row = t0 + group * kGroupRows, warp_row = group_row + in_group / kWarp * 16;
    const View view = view_of<true>(mask, b, group_row, kGroupRows);
    float scores[1][T::kKeys / 8][4], o[T::kDv / 8][4], rescale[2];
    uint32_t P[1][T::kKeys / 16][4];
    TwoRows rows;
    const auto softmax = [&](int tile) {
        const int s0 = keys.first + tile * T::kKeys;
        if (view.needs_mask(s0, T::kKeys)) apply_mask<true>(scores, mask, b, warp_row, s0);
        rows.add(scores[0], rescale, scale2);
    };

    mbarrier_wait(&barriers.q_full, 0);
    mbarrier_wait(&barriers.k_full[0], 0);
    start_scores<Number, T>(scores[0], q_rows, k_tile(0));
    wgmma_wait<0>(scores[0]);
    if (in_group == 0) mbarrier_arrive(&barriers.k_empty[0]);
    softmax(0);
    pack_fragments<Number>(P, scores);

    // A turn's barrier is reached by its consumer, which waits, and by the other one, which goes on.
    if (group == 1 && n_tiles > 1) named_barrier_arrive(kTurn + 0, kConsumers * kGroup);
    for (int tile = 1; tile < n_tiles; ++tile) {
        const int i = tile % kStages, before = (tile - 1) % kStages;
        mbarrier_wait(&barriers.k_full[i], tile / kStages % 2);
        named_barrier_sync(kTurn + group, kConsumers * kGroup);
        start_scores<Number, T>(scores[0], q_rows, k_tile(tile));
        mbarrier_wait(&barriers.v_full[before], (tile - 1) / kStages % 2);
        start_output<Number, T>(o, P[0], v_tile(tile - 1), tile > 1);
        if (group == 0 || tile + 1 < n_tiles) named_barrier_arrive(kTurn + 1 - group, kConsumers * kGroup);
        wgmma_wait<1>(scores[0]);
        if (in_group == 0) mbarrier_arrive(&barriers.k_empty[i]);
        softmax(tile);
        wgmma_wait<0>(o, P[0]);
        if (in_group == 0) mbarrier_arrive(&barriers.v_empty[before]);
        multiply_rows(o, rescale);
        pack_fragments<Number>(P, scores);
    }
    const int last = n_tiles - 1;
    mbarrier_wait(&barriers.v_full[last % kStages], last / kStages % 2);
    start_output<Number, T>(o, P[0], v_tile(last), last > 0);
    wgmma_wait<0>(o, P[0]);

    float factor[2];
    for (int half = 0; half < 2; ++half) {
        const float sum = warp_sum(rows.sum[half], 4);
        const int t = warp_row + half * 8 + quad();
        factor[half] = 1.0f / sum;
        if (in_quad() == 0 && t < mask.T)
            lse[(b * shape.H + h) * mask.T + t] = fmaf(rows.max[half], scale2, log2f(sum)) * kLn2;
    }
    multiply_rows(o, factor);
    // Nobody needs this group's rows of q any more: the output takes their place, and the copy engine stores it.
#pragma unroll
    for (int n = 0; n < T::kDv / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = in_group / kWarp * 16 + half * 8 + quad(), column = n * 8 + 2 * in_quad();
            const int byte = row * kRowBytes + column % kPanelColumns * 2;
            *reinterpret_cast<uint32_t*>(q_rows + column / kPanelColumns * T::kQPanelBytes + swizzled<128>(byte)) =
                pack<Number>(o[n][2 * half], o[n][2 * half + 1]);
        }
    fence_proxy_async();
    named_barrier_sync(kRowsWritten + group, kGroup);
    if (in_group == 0 && group_row < mask.T) {
        for (int panel = 0; panel < T::kValuePanels; ++panel)
            tensor_store<4>(&maps.out, {panel * kPanelColumns, h, group_row, b}, q_rows + panel * T::kQPanelBytes);
        bulk_commit();
        bulk_wait_read<0>();  // shared memory is the next block's when this one ends
    }
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

template <class Number>
void launch(const FlashArguments& a, cudaStream_t stream) {
    HopperSizes::dispatch(a.q.D, a.v.D, [&](auto size) {
        using T = HopperTile<decltype(size)::kD, decltype(size)::kDv>;
        const dim3 grid(static_cast<unsigned>(ceil_div(a.T, int64_t{kBlockRows})), static_cast<unsigned>(a.q.count),
                        static_cast<unsigned>(a.B));
        const Maps maps{head_map(a.q, kBlockRows), head_map(a.k, T::kKeys), head_map(a.v, T::kKeys),
                        head_map(a.out, kGroupRows)};
        allow_shared(flash_forward_hopper_kernel<Number, T>, T::kSharedBytes);
        flash_forward_hopper_kernel<Number, T><<<grid, kHopperThreads, T::kSharedBytes, stream>>>(shape_of(a), maps, a.lse);
        cudaCheckLaunch();
    });
}

}  // namespace

void flash_forward_hopper(const FlashArguments& a, cudaStream_t stream) {
    if (a.q.rows.dtype == DType::bf16) launch<__nv_bfloat16>(a, stream);
    else launch<__half>(a, stream);
}
