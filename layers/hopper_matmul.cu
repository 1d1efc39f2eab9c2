// Our own matrix product on Hopper's tensor cores, for what cuBLASLt is slow at: what follows a product.
//
//   P (M, N) = alpha a (M, K) op(b) (K, N)                                2 M N K flops
//
//   out = P + bias                       none, bias
//   out = gelu(before)                   before = P + bias, which is written, too
//   out = P gelu'(x)                     x (M, N) is read
//   out = P,  delta[b,h,t] = P . x       of the 64 columns of head h of row b T + t: x (M, N) is read
//
// The tensor cores of a multiprocessor multiply 128 x 192 x 768 (K = 768 is a small one) in 9216 clocks. Its 24576
// results take 12 to 18 instructions each to finish, 128 at a time: up to 3500 clocks, if no warp waited for memory or
// for an exponential. Consumers that finished their own sums would leave the tensor cores idle meanwhile, because the
// sums of two tiles do not fit into registers. So finishing is the work of warps of their own, beside the products of
// the next tile:
//
//     producer    one thread    a, b: from device memory to stages of shared memory
//     consumers   2 x 128       the products; then alpha and bias, and the rounded tile to panels of shared memory
//     finishers   six warps     the panels to device memory, by way of GELU or gelu'(x)
//
//        producer  ──full[i]──>   consumer 0   ──written[0]──>   finishers      panels: 64 rows of 64 columns, three
//                  <─empty[i]──                <──free[0]────                   for each consumer, 48 KiB in all
//                  ──full[i]──>   consumer 1   ──written[1]──>
//                  <─empty[i]──                <──free[1]────
//
// A consumer needs its panels back when its next tile is multiplied: the finishers have the time of a whole tile. What
// they read is rounded to 16 bits, as a product without an epilogue would have stored it. What needs no finishing (P,
// or before) the copy engine stores; where that is all, one thread is enough, and the tiles have 256 columns. (Delta is
// the first step of attention's backward, of which P is the gradient of its output, and x is that output. A kernel of
// its own would have to read P from device memory.)
//
// As many blocks as multiprocessors stay, and compute one tile after the other. Products with a long K and few tiles,
// with a transposed a, with an out of float32, with an old out, or with sums of a's rows, are those of
// hopper_matmul_split.cu.
#include "layers/chunk.cuh"
#include "layers/gelu.cuh"
#include "layers/hopper_matmul.cuh"
#include "layers/hopper_matmul.h"
#include "layers/hopper_matmul_split.h"

#include <algorithm>
#include <limits>

namespace {

enum class Finish { store, gelu, gelu_derivative, delta };

enum NamedBarriers : uint32_t { kBiasWritten = 1 };  // + consumer

// Tiles that the finishers compute on have 192 columns: so a consumer's thread has 96 sums instead of 128, and there
// are registers for 16 warps. (A product with 256 columns needs more than the 128 that a thread of 16 warps starts
// with.)
template <Finish kFinish>
struct Roles {
    static constexpr bool kStores = kFinish == Finish::store;
    using Tile = TileOf<kStores ? 4 : 3>;
    static constexpr int kStages = kStores ? 3 : 4, kThreads = kGroup * (kConsumers + (kStores ? 1 : 2));
    static constexpr int kConsumerRegisters = kStores ? 184 : kFinish == Finish::gelu ? 152 : 136;
    static constexpr int kOtherRegisters = kStores ? 136 : kFinish == Finish::gelu ? 104 : 120;
    static constexpr int kPartColumns = kStores ? Tile::kColumns : 32;  // of a tile, for one finisher
    static constexpr int kFinishers = Tile::kColumns / kPartColumns;
    static_assert(kConsumers * kConsumerRegisters + kOtherRegisters * (kThreads / kGroup - kConsumers) <=
                  kThreads / kGroup * (65536 / kThreads / 8 * 8));
};

template <Finish kFinish>
struct Shared {
    using R = Roles<kFinish>;
    unsigned char stages[R::kStages * R::Tile::kStageBytes];
    unsigned char panels[kConsumers][R::Tile::kPanels * kPanelBytes];  // of the rounded tile
    float2 bias[kConsumers][R::Tile::kColumns / 2];
    Ring<R::kStages> ring;
    uint64_t written[kConsumers], free[kConsumers];
};
template <Finish kFinish>
constexpr size_t kSharedBytes = sizeof(Shared<kFinish>) + kTileAlignment;
static_assert(std::max(kSharedBytes<Finish::store>, kSharedBytes<Finish::gelu>) <= 227 << 10);

template <class Number>
struct Arguments {
    Number* out;
    const Number *bias, *x;  // bias may be null; x: gelu_derivative, delta
    float* delta;            // (M / T, N / 64, T)
    int T;
    int* zeros;
    int n_zeros;
    int M, N;
    float alpha;
    int steps;  // along K
};

template <class Number>
__device__ __forceinline__ float2 unpack_pair(uint32_t bits) {
    Number pair[2];
    memcpy(static_cast<void*>(pair), &bits, 4);
    return {to_float(pair[0]), to_float(pair[1])};
}

// ---------------------------------------------------------------------------------------------------------------------
// Consumers

// sums = alpha sums + bias. Each thread has fetched two numbers of the tile's bias before the products: `own`.
template <class Number, int kFragments>
__device__ __forceinline__ void scale_and_add(float (&sums)[kFragments][4], float alpha, bool has_bias, uint32_t own,
                                              float2* bias, int group) {
    if (has_bias) {
        if (in_group() < kFragments * 4) bias[in_group()] = unpack_pair<Number>(own);
        named_barrier_sync(kBiasWritten + group, kGroup);
    }
#pragma unroll
    for (int n = 0; n < kFragments; ++n) {
        const float2 add = has_bias ? bias[n * 4 + lane() % 4] : float2{0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sums[n][2 * half] = fmaf(alpha, sums[n][2 * half], add.x);
            sums[n][2 * half + 1] = fmaf(alpha, sums[n][2 * half + 1], add.y);
        }
    }
}

// A consumer's 64 rows, rounded, to its panels. A fragment's 8 columns are one 16-byte chunk of a panel's row.
template <class Number, int kFragments>
__device__ __forceinline__ void put_sums(unsigned char* panels, const float (&sums)[kFragments][4]) {
    const int row = not_hoisted(warp_of_group() * 16 + lane() / 4);
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int byte = (row + half * 8) * kRowBytes + n % 8 * 16 + lane() % 4 * 4;
            *reinterpret_cast<uint32_t*>(panels + n / 8 * kPanelBytes + swizzled<128>(byte)) =
                pack<Number>(sums[n][2 * half], sums[n][2 * half + 1]);
        }
}

template <class Number, bool kBTransposed, Finish kFinish>
__device__ __forceinline__ void consume(Shared<kFinish>& shared, const TileGrid& grid, const Arguments<Number>& args,
                                        int group) {
    using Tile = typename Roles<kFinish>::Tile;
    const bool has_bias = kFinish < Finish::gelu_derivative && args.bias;
    typename Tile::Sums sums = {};  // see wgmma_m64k16
    uint32_t round = 0, parity = 0;
    for (int i = static_cast<int>(blockIdx.x); i < grid.tiles(); i += static_cast<int>(gridDim.x), parity ^= 1) {
        uint32_t own_bias = 0;
        if (has_bias && 2 * in_group() < Tile::kColumns) {
            const int n = grid.at(i).y * Tile::kColumns + 2 * in_group();
            if (n < args.N) own_bias = *reinterpret_cast<const uint32_t*>(args.bias + n);
        }
        multiply_steps<Tile, Number, false, kBTransposed>(sums, shared.stages, shared.ring, round, args.steps, group);
        mbarrier_wait(&shared.free[group], parity ^ 1);  // the finishers have read the tile before
        if (has_bias || args.alpha != 1.0f)
            scale_and_add<Number>(sums, args.alpha, has_bias, own_bias, shared.bias[group], group);
        put_sums<Number>(shared.panels[group], sums);
        fence_proxy_async();  // the copy engine may store them
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(&shared.written[group]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The finishers: six warps with 128 x 32 numbers of a tile each, first 64 rows of consumer 0, then those of consumer 1.
// Four lanes have a row, 64 bytes, and a lane has eight columns of every eighth row. Which rows eight neighbouring
// lanes have, r and r + 4, follows from the swizzle: their 16-byte chunks then are in different banks.
//
// GELU here, for a result that is rounded to 16 bits, in half of the instructions that layers/gelu.cu takes:
//
//   y  = x s                           s = 1 / (1 + 2^(-v log2 e)), which is 0 where the power is infinite
//   y' = s + x v' (s - s^2)            s - s^2 loses digits where s is almost 1: up to 2^-23, times x v' < 35, because
//                                      from x = 5 on s is 1

// s(v), for v = sqrt(8/pi) (x + 0.044715 x^3).
__device__ __forceinline__ float sigmoid_of_gelu(float x, float square) {
    constexpr float kLog2e = 1.4426950408889634f;
    return rcp_approx(1.0f + ex2_approx(x * fmaf(square, -kLog2e * kSqrt8OverPi * kCubic, -kLog2e * kSqrt8OverPi)));
}
__device__ __forceinline__ float short_gelu(float x) { return x * sigmoid_of_gelu(x, x * x); }
__device__ __forceinline__ float short_gelu_derivative(float x) {
    const float square = x * x, s = sigmoid_of_gelu(x, square);
    const float slope = fmaf(square, 3.0f * kCubic * kSqrt8OverPi, kSqrt8OverPi);  // v'
    return fmaf(x * fmaf(-s, s, s), slope, s);  // not x v' (s - s^2): x v' may be infinite where s - s^2 is 0
}

// One thread: panels of a consumer's 64 rows, from a tile's column on, to device memory by the copy engine. It reads
// them until bulk_wait_read.
template <class Tile, int kPanels, class Number>
__device__ __forceinline__ void store_panels(const CUtensorMap& map, const unsigned char* panels,
                                             const Arguments<Number>& args, int2 at, int consumer, int column) {
    const int m = at.x * kTileRows + consumer * kGroupRows, n = at.y * Tile::kColumns + column;
    for (int p = 0; p < kPanels; ++p)
        if (m < args.M && n + p * kPanelColumns < args.N)
            tensor_store<2>(&map, {n + p * kPanelColumns, m}, panels + p * kPanelBytes);
    bulk_commit();
}

constexpr int kLaneRows = kGroupRows / 8;  // of a consumer's 64
__device__ __forceinline__ int first_row_of_lane() { return lane() / 8 + lane() / 4 % 2 * 4; }
__device__ __forceinline__ int first_column_of_lane() { return lane() % 4 * 8; }

// This lane's numbers of a finisher's 64 rows, in x and in out: where the first one is, and how many of the rows from
// there on lie in out.
struct Rows {
    int64_t first;
    int n_rows;
    __device__ __forceinline__ Rows(int M, int N, int m, int n) {
        first = static_cast<int64_t>(m) * N + n;
        n_rows = n < N ? M - m : 0;
    }
};

// Finishes a finisher's 64 rows of a panel. x holds these rows' numbers, each of which is replaced, when it has been
// used, by one of the rows after them: so 4 KiB a warp are always on their way.
template <class Number, Finish kFinish>
__device__ __forceinline__ void finish_rows(const unsigned char* panel, int column, Packed<Number> (&x)[kLaneRows],
                                            const Arguments<Number>& args, const Rows& here, const Rows& next) {
    const int64_t step = 8 * static_cast<int64_t>(args.N);
    const unsigned char* rounded =
        panel + swizzled<128>(first_row_of_lane() * kRowBytes + 2 * (column + first_column_of_lane()));
    Number* to = args.out + here.first;
    const Number* from = args.x + next.first;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r, to += step, from += step) {
        Packed<Number> y = load_packed(reinterpret_cast<const Number*>(rounded + r * 8 * kRowBytes));
        const Packed<Number> at = x[r];
        if constexpr (kFinish == Finish::gelu_derivative)
            x[r] = 8 * r < next.n_rows ? load_packed(from) : Packed<Number>{};
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            float low = to_float(y.v[i]), high = to_float(y.v[i + 1]);
            if constexpr (kFinish == Finish::gelu) {
                low = short_gelu(low), high = short_gelu(high);
            } else {
                low *= short_gelu_derivative(to_float(at.v[i]));
                high *= short_gelu_derivative(to_float(at.v[i + 1]));
            }
            const uint32_t pair = pack<Number>(low, high);
            memcpy(static_cast<void*>(&y.v[i]), &pair, 4);
        }
        if (8 * r < here.n_rows) store_packed(to, y);
    }
}

// A finisher has the columns from `column` on of every tile.
template <class Number, Finish kFinish>
__device__ __forceinline__ void finish(Shared<kFinish>& shared, const TileGrid& grid, const Arguments<Number>& args,
                                       const CUtensorMap& stored, int column) {
    constexpr bool kReads = kFinish == Finish::gelu_derivative;
    const auto rows_of = [&](int tile, int consumer) {
        const int2 at = grid.at(min(tile, grid.tiles() - 1));  // behind the last tile: any
        return Rows(args.M, args.N, at.x * kTileRows + consumer * kGroupRows + first_row_of_lane(),
                    at.y * Roles<kFinish>::Tile::kColumns + column + first_column_of_lane());
    };
    int tile = static_cast<int>(blockIdx.x);
    Rows here = rows_of(tile, 0);
    Packed<Number> x[kLaneRows];
#pragma unroll
    for (int r = 0; kReads && r < kLaneRows; ++r)
        x[r] = 8 * r < here.n_rows ? load_packed(args.x + here.first + 8 * r * static_cast<int64_t>(args.N))
                                   : Packed<Number>{};
    for (uint32_t parity = 0; tile < grid.tiles(); tile += static_cast<int>(gridDim.x), parity ^= 1) {
#pragma unroll 1
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
            const unsigned char* panel = shared.panels[consumer] + column / kPanelColumns * kPanelBytes;
            const Rows next = consumer + 1 < kConsumers ? rows_of(tile, consumer + 1)
                                                        : rows_of(tile + static_cast<int>(gridDim.x), 0);
            mbarrier_wait(&shared.written[consumer], parity);
            if (!kReads && column % kPanelColumns == 0 && lane() == 0)
                store_panels<typename Roles<kFinish>::Tile, 1>(stored, panel, args, grid.at(tile), consumer, column);
            finish_rows<Number, kFinish>(panel, column % kPanelColumns, x, args, here, next);
            here = next;
            __syncwarp();  // all lanes have read the panel
            if (lane() == 0) {
                if (!kReads) bulk_wait_read<0>();  // and so has the copy engine
                mbarrier_arrive(&shared.free[consumer]);
            }
        }
    }
}

// A finisher with delta has 32 rows of each consumer, and one panel of the tile's, a head: eight lanes have a row, and
// a lane has eight columns of every fourth row.
constexpr int kHeadColumns = kPanelColumns, kHeadLanes = 8, kHeadRows = kWarp / kHeadLanes, kFinisherRows = 32;

template <class Number>
__device__ __forceinline__ void finish_delta(Shared<Finish::delta>& shared, const TileGrid& grid,
                                             const Arguments<Number>& args, const CUtensorMap& stored, int finisher) {
    using R = Roles<Finish::delta>;
    using Tile = R::Tile;
    constexpr int kRounds = kFinisherRows / kHeadRows;
    static_assert(R::kFinishers * kFinisherRows == Tile::kPanels * kGroupRows);
    const int panel = finisher % Tile::kPanels, column = panel * kPanelColumns + lane() % kHeadLanes * 8,
              first_row = finisher / Tile::kPanels * kFinisherRows + lane() / kHeadLanes;
    for (int i = (static_cast<int>(blockIdx.x) * R::kFinishers + finisher) * kWarp + lane(); i < args.n_zeros;
         i += static_cast<int>(gridDim.x) * R::kFinishers * kWarp)
        args.zeros[i] = 0;
    const auto rows_of = [&](int tile, int consumer) {
        const int2 at = grid.at(min(tile, grid.tiles() - 1));  // behind the last tile: any
        return Rows(args.M, args.N, at.x * kTileRows + consumer * kGroupRows + first_row,
                    at.y * Tile::kColumns + column);
    };
    const int64_t step = kHeadRows * static_cast<int64_t>(args.N);
    int tile = static_cast<int>(blockIdx.x);
    Rows here = rows_of(tile, 0);
    Packed<Number> x[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
        x[r] = kHeadRows * r < here.n_rows ? load_packed(args.x + here.first + r * step) : Packed<Number>{};
    for (uint32_t parity = 0; tile < grid.tiles(); tile += static_cast<int>(gridDim.x), parity ^= 1) {
        const int2 at = grid.at(tile);
        const int head = at.y * Tile::kPanels + panel;
#pragma unroll 1
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
            const unsigned char* rounded = shared.panels[consumer] + panel * kPanelBytes;
            const Rows next = consumer + 1 < kConsumers ? rows_of(tile, consumer + 1)
                                                        : rows_of(tile + static_cast<int>(gridDim.x), 0);
            const Number* from = args.x + next.first;
            int b = (at.x * kTileRows + consumer * kGroupRows + first_row) / args.T,
                t = (at.x * kTileRows + consumer * kGroupRows + first_row) % args.T;
            mbarrier_wait(&shared.written[consumer], parity);
            if (finisher < Tile::kPanels && lane() == 0)
                store_panels<Tile, 1>(stored, rounded, args, at, consumer, panel * kPanelColumns);
#pragma unroll
            for (int r = 0; r < kRounds; ++r, from += step) {
                const int byte = (first_row + r * kHeadRows) * kRowBytes + lane() % kHeadLanes * 16;
                const Packed<Number> y = load_packed(reinterpret_cast<const Number*>(rounded + swizzled<128>(byte))),
                                     z = x[r];
                x[r] = kHeadRows * r < next.n_rows ? load_packed(from) : Packed<Number>{};
                float sums[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[i] = to_float(y.v[i]) * to_float(z.v[i]);
                const float sum = warp_sum(fold_chunk<Sum>(sums), kHeadLanes);
                if (kHeadRows * r < here.n_rows && lane() % kHeadLanes == 0)
                    args.delta[(static_cast<int64_t>(b) * (args.N / kHeadColumns) + head) * args.T + t] = sum;
                for (t += kHeadRows; t >= args.T; t -= args.T) ++b;
            }
            here = next;
            __syncwarp();  // all lanes have read the panel
            if (lane() == 0) {
                if (finisher < Tile::kPanels) bulk_wait_read<0>();  // and so has the copy engine
                mbarrier_arrive(&shared.free[consumer]);
            }
        }
    }
}

// One thread: tiles that are only stored.
template <class Number>
__device__ __forceinline__ void store_tiles(Shared<Finish::store>& shared, const TileGrid& grid,
                                            const Arguments<Number>& args, const CUtensorMap& stored) {
    using Tile = Roles<Finish::store>::Tile;
    uint32_t parity = 0;
    for (int tile = static_cast<int>(blockIdx.x); tile < grid.tiles(); tile += static_cast<int>(gridDim.x), parity ^= 1)
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
            mbarrier_wait(&shared.written[consumer], parity);
            store_panels<Tile, Tile::kPanels>(stored, shared.panels[consumer], args, grid.at(tile), consumer, 0);
            bulk_wait_read<0>();
            mbarrier_arrive(&shared.free[consumer]);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel. `stored`: what is stored as it is rounded, out or before.

template <class Number, bool kBTransposed, Finish kFinish>
__global__ void __launch_bounds__(Roles<kFinish>::kThreads, 1)
    hopper_matmul_kernel(const __grid_constant__ Operands maps, const __grid_constant__ CUtensorMap stored,
                         TileGrid grid, Arguments<Number> args) {
    using R = Roles<kFinish>;
    using Tile = typename R::Tile;
    auto& shared = *reinterpret_cast<Shared<kFinish>*>(shared_tiles());
    const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarp, 0), group = warp * kWarp / kGroup;
    if (threadIdx.x == 0) {
        init_ring(shared.ring, kConsumers);
        for (int i = 0; i < kConsumers; ++i)
            mbarrier_init(&shared.written[i], kGroup / kWarp), mbarrier_init(&shared.free[i], R::kFinishers);
        fence_proxy_async();
    }
    __syncthreads();  // the mbarriers are initialised. This is the last barrier of all threads

    if (group < kConsumers) {
        take_registers<R::kConsumerRegisters>();
        consume<Number, kBTransposed, kFinish>(shared, grid, args, group);
        return;
    }
    give_registers<R::kOtherRegisters>();
    const int finisher = warp - kConsumers * kGroup / kWarp;
    if (finisher < R::kFinishers) {
        if constexpr (kFinish == Finish::delta) finish_delta<Number>(shared, grid, args, stored, finisher);
        else if constexpr (!R::kStores) finish<Number, kFinish>(shared, grid, args, stored, finisher * R::kPartColumns);
        else if (elect_one()) store_tiles<Number>(shared, grid, args, stored);
    } else if (finisher == R::kFinishers && elect_one()) {
        uint32_t round = 0;
        for (int i = static_cast<int>(blockIdx.x); i < grid.tiles(); i += static_cast<int>(gridDim.x)) {
            const int2 at = grid.at(i);
            for (int step = 0; step < args.steps; ++step, ++round)
                load_step<Tile, false, kBTransposed>(maps, shared.stages, shared.ring, round, at.x * kTileRows,
                                                     at.y * Tile::kColumns, step * kStepK);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

template <class Number, bool kBTransposed, Finish kFinish>
void launch(Tensor out, Tensor a, Tensor b, const MatmulOptions& o, cudaStream_t stream) {
    const int64_t M = out.shape[0], N = out.shape[1], K = a.shape[1];
    using R = Roles<kFinish>;
    const TileGrid grid = tile_grid<typename R::Tile>(M, N);
    const Tensor& x = o.delta ? o.attended : o.gelu_input;
    const Arguments<Number> args{out.ptr<Number>(),
                                 o.bias.ptr_or_null<Number>(),
                                 x.ptr_or_null<Number>(),
                                 o.delta.ptr_or_null<float>(),
                                 o.delta ? narrow(o.delta.shape[2], "tokens") : 0,
                                 o.zeros.ptr_or_null<int32_t>(),
                                 narrow(o.zeros.n(), "zeros"),
                                 narrow(M, "rows"),
                                 narrow(N, "columns"),
                                 o.alpha,
                                 narrow(ceil_div(K, int64_t{kStepK}), "steps")};
    const auto kernel = hopper_matmul_kernel<Number, kBTransposed, kFinish>;
    allow_shared(kernel, kSharedBytes<kFinish>);
    kernel<<<std::min(grid.tiles(), device().sm_count), R::kThreads, kSharedBytes<kFinish>, stream>>>(
        operand_maps<typename R::Tile>(a, false, b, kBTransposed),
        matrix_map(o.before_gelu ? o.before_gelu : out, kGroupRows), grid, args);
}

template <bool kBTransposed, Finish kFinish>
void launch(Tensor out, Tensor a, Tensor b, const MatmulOptions& o, cudaStream_t stream) {
    dispatch_16_bits(out.dtype,
                     [&](auto zero) { launch<decltype(zero), kBTransposed, kFinish>(out, a, b, o, stream); });
}

}  // namespace

bool hopper_matmul_takes(const Product& p) {
    constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
    const auto whole = [](int64_t n) { return n > 0 && n % 8 == 0 && n < kMost; };  // rows of 16-byte chunks
    const bool half = p.a_dtype == DType::bf16 || p.a_dtype == DType::f16;
    if (!has_wgmma() || p.batch_count != 1 || p.adds_other || !half || p.b_dtype != p.a_dtype || !whole(p.K) ||
        !whole(p.N) || p.M < 1 || p.M > kMost || (p.transpose_a && !whole(p.M)))
        return false;
    const bool rounds = p.out_dtype == p.a_dtype;
    switch (p.epilogue) {
        case Epilogue::none: return rounds || p.out_dtype == DType::f32;
        case Epilogue::row_sums:
            return p.transpose_a && (rounds || p.out_dtype == DType::f32) && hopper_matmul_sums_rows(p.M, p.N);
        case Epilogue::bias:
        case Epilogue::gelu:
        case Epilogue::bias_gelu: return rounds && !p.transpose_a && p.transpose_b;
        case Epilogue::gelu_derivative: return rounds && !p.transpose_a && !p.transpose_b;
        case Epilogue::delta: return rounds && !p.transpose_a && !p.transpose_b && p.head_size == kHeadColumns;
    }
    return false;
}

void hopper_matmul(Tensor out, Tensor a, Tensor b, const MatmulOptions& o, cudaStream_t stream) {
    if (out.ndim == 3) {  // a batch of one
        const auto matrix = [](const Tensor& x) { return x.view({x.shape[1], x.shape[2]}); };
        return hopper_matmul(matrix(out), matrix(a), matrix(b), o, stream);
    }
    const int64_t M = out.shape[0], N = out.shape[1], K = a.shape[o.transpose_a ? 0 : 1];
    const bool finished = o.bias || o.gelu_input || o.before_gelu || o.delta;
    if (!finished && (o.transpose_a || o.beta != 0.0f || out.dtype == DType::f32 || hopper_matmul_cuts(M, N, K)))
        return hopper_matmul_split(out, a, b, o, stream);
    if (o.delta) launch<false, Finish::delta>(out, a, b, o, stream);
    else if (o.gelu_input) launch<false, Finish::gelu_derivative>(out, a, b, o, stream);
    else if (o.before_gelu) launch<true, Finish::gelu>(out, a, b, o, stream);
    else if (o.transpose_b) launch<true, Finish::store>(out, a, b, o, stream);
    else launch<false, Finish::store>(out, a, b, o, stream);
    launched("hopper_matmul_kernel",
             {.reads = bytes_of(a, b, o.bias, o.gelu_input, o.attended),
              .writes = bytes_of(out, o.before_gelu, o.delta, o.zeros),
              .scratch = bytes_of(o.zeros),
              .flops = 2.0 * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(K),
              .product = {M, N, K}});
}
