// Our product on Hopper's tensor cores where K is long and out has few tiles: the gradients of weights.
//
//   out (M, N) = alpha op(a) (M, K) op(b) (K, N) + beta out          row_sums[m] = sum over k of op(a)[m][k]
//
// dweight (O, C) = dout^T (O, N) inp (N, C), of GPT-2's layers: K is 65536 tokens, and the 768 x 3072 numbers are 72
// tiles, for 132 multiprocessors. So K is cut, and blocks that have parts of the same tile write float32 sums to the
// workspace. The last of them to come to its end adds all parts of the tile, in the order of the blocks: the result
// depends on the shape and on the number of multiprocessors, and is the same on every run.
//
// THE CUT. Whole rounds of tiles, one for each block, are not cut. Those that are left, R < G tiles for G blocks, are a
// line of R S steps (S = K / 64), cut into G equal pieces. A piece lies in one tile or in two neighbours, and there are
// at most R + G - 1 parts of tiles. Here R = 3, G = 5:
//
//     tiles    |---------0---------|---------1---------|---------2---------|
//     blocks   |-----0-----|-----1-----|-----2-----|-----3-----|-----4-----|
//     parts    0           1   2       3           4     5     6                  block + tile
//
// THE ORDER OF K. Multiplied each from its first step on, the pieces would be at G different places of K at any time,
// and each would fetch its rows of a and b for itself: 768 bytes for 32768 multiply-adds, for all blocks together three
// times as many as an H100's memory gives. So a block takes its steps in an order in which others are at the same
// place:
//
//     a piece of two tiles      of the second tile [0, y), then of the first one [x, S)
//     a piece [x, x + n)        at time i the step that is i modulo n
//
// As x - y = S - n, at time i all blocks are at i, or n, 2 n, ... or S - n steps further on. They all started at the
// same time and have the same work, so what one of them has fetched the others find in the L2 cache.
//
//     producer    one thread     as in hopper_matmul.cuh, four stages
//     consumers   2 x 128        wgmma; a tile that is whole from registers to out, a part of one to the workspace;
//                                each consumer counts and adds the parts of its 64 rows by itself
//
// Row sums are products, too: of a's tile and 16 x 8 ones. It lies in shared memory already, and its products with 8
// columns take an eighth of the time of those with 256. Every tile of a row of tiles would have the same sums; so that
// none has more work than the others, the steps are dealt out among them, and each sums its own. The last tile of the
// row to end adds them.
#include "layers/hopper_matmul.cuh"
#include "layers/hopper_matmul_split.h"

#include <algorithm>
#include <limits>

namespace {

using Tile = TileOf<4>;
constexpr int kStages = 4, kThreads = kGroup * (kConsumers + 1);
constexpr int kPartFloats = kTileRows * Tile::kColumns;

struct Shared {
    unsigned char stages[kStages * Tile::kStageBytes];
    uint32_t ones[16 * 8 / 2];  // 16-bit: row m of op(a), times a column of these, is its sum
    Ring<kStages> ring;
    bool is_last[kConsumers];
};
constexpr size_t kSharedBytes = sizeof(Shared) + kTileAlignment;
static_assert(kSharedBytes <= 227 << 10);

// A block's steps of one tile: at time i step first + (i + turn) % n_steps.
struct Segment {
    int tile, first, n_steps, turn;
    int part;  // -1: the whole tile
    __device__ __forceinline__ int step(int i) const { return first + i + turn - (i + turn < n_steps ? 0 : n_steps); }
};

// The parts of a cut tile follow each other.
struct Parts {
    int first, n;
};

struct Schedule {
    TileGrid grid;
    int steps;        // S
    int whole_tiles;  // tiles that are not cut
    int cut_tiles;    // R: those behind them
    int pieces;       // G, or fewer blocks, but none without a step; 0: nothing is cut

    __host__ __device__ __forceinline__ int piece_begin(int piece) const {
        return static_cast<int>(static_cast<int64_t>(piece) * cut_tiles * steps / pieces);
    }
    __device__ __forceinline__ int piece_of(int step) const {
        int piece = static_cast<int>(static_cast<int64_t>(step) * pieces / (cut_tiles * steps));
        while (piece_begin(piece + 1) <= step) ++piece;
        return piece;
    }
    __device__ __forceinline__ Parts parts_of(int tile) const {
        const int cut = tile - whole_tiles, first = piece_of(cut * steps), last = piece_of((cut + 1) * steps - 1);
        return {first + cut, last - first + 1};
    }
    // Number i of this block; n_steps is 0 if it has fewer.
    __device__ __forceinline__ Segment segment(int i) const {
        const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
        if (block + i * blocks < whole_tiles) return {block + i * blocks, 0, steps, 0, -1};
        i -= (whole_tiles - block + blocks - 1) / blocks;
        if (block >= pieces || i > 1) return {};
        const int begin = piece_begin(block), n = piece_begin(block + 1) - begin, tile = begin / steps,
                  x = begin % steps, y = x + n - steps;
        const Segment in_first{whole_tiles + tile, x, min(n, steps - x), y > 0 || x % n == 0 ? 0 : n - x % n,
                               block + tile};
        if (y <= 0) return i == 0 ? in_first : Segment{};
        return i == 1 ? in_first : Segment{whole_tiles + tile + 1, 0, y, 0, block + tile + 1};
    }
};

struct Result {
    void *out, *row_sums;  // float, or the operands' type; row_sums may be null
    bool is_float;
    float *parts, *row_parts;  // in the workspace: (parts, 128, 256), and (parts + tiles, 128)
    unsigned* arrivals;        // (cut tiles + rows of tiles, consumers)
    int n_parts;
    int64_t M, N;
    float alpha, beta;
};

// ---------------------------------------------------------------------------------------------------------------------
// Stores

template <class T>
__device__ __forceinline__ void put_pair(T* to, float low, float high, float alpha, float beta) {
    low *= alpha, high *= alpha;
    if (beta != 0.0f) {
        const Packed<T, 2> old = load_packed<T, 2>(to);
        low += beta * to_float(old.v[0]), high += beta * to_float(old.v[1]);
    }
    store_packed(to, Packed<T, 2>{{from_float<T>(low), from_float<T>(high)}});
}

// f(row, column, low, high) for the pairs of neighbours that a thread has of a tile.
template <class F>
__device__ __forceinline__ void for_each_pair(const Tile::Sums& sums, int consumer, F&& f) {
    const int row = not_hoisted(consumer * kGroupRows + warp_of_group() * 16 + lane() / 4),
              column = not_hoisted(lane() % 4 * 2);
#pragma unroll
    for (int n = 0; n < Tile::kColumns / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            f(row + half * 8, column + n * 8, sums[n][2 * half], sums[n][2 * half + 1]);
}

template <class T>
__device__ __forceinline__ void store_whole(const Result& result, const Tile::Sums& sums, int2 at, int consumer) {
    const int64_t m0 = static_cast<int64_t>(at.x) * kTileRows, n0 = static_cast<int64_t>(at.y) * Tile::kColumns;
    T* const out = static_cast<T*>(result.out);
    for_each_pair(sums, consumer, [&](int row, int column, float low, float high) {
        const int64_t m = m0 + row, n = n0 + column;
        if (m < result.M && n < result.N) put_pair(out + m * result.N + n, low, high, result.alpha, result.beta);
    });
}
__device__ __forceinline__ void store_part(const Result& result, const Tile::Sums& sums, int part, int consumer) {
    float* const to = result.parts + static_cast<int64_t>(part) * kPartFloats;
    for_each_pair(sums, consumer, [&](int row, int column, float low, float high) {
        store_packed(to + row * Tile::kColumns + column, Packed<float, 2>{{low, high}});
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Row sums

// The steps are dealt out to the columns of tiles in runs of 32, in turn: so few that all columns have the same work at
// any time, and so many that it does not matter that a run's last products are waited for.
constexpr int kRun = 32;

// The products of a segment, and the sums of its rows of op(a) over those of its steps that are column at.y's.
template <class Number, bool kATransposed, bool kBTransposed>
__device__ __forceinline__ void multiply_and_sum(Tile::Sums& sums, Shared& shared, const Result& result,
                                                 const Segment& segment, int2 at, int columns, uint32_t& round,
                                                 int group) {
    RowSums row_sums = {};
    for (int i = 0, n = 0; i < segment.n_steps; i += n) {
        const int step = segment.step(i), before_turn = segment.n_steps - segment.turn;
        n = min(kRun - step % kRun, (i < before_turn ? before_turn : segment.n_steps) - i);
        if (step / kRun % columns == at.y)
            multiply_steps<Tile, Number, kATransposed, kBTransposed, true>(sums, shared.stages, shared.ring, round, n,
                                                                           group, i > 0, row_sums, shared.ones);
        else
            multiply_steps<Tile, Number, kATransposed, kBTransposed>(sums, shared.stages, shared.ring, round, n, group,
                                                                     i > 0);
    }
    const int part = segment.part >= 0 ? segment.part : result.n_parts + segment.tile;
    float* const to = result.row_parts + static_cast<int64_t>(part) * kTileRows + group * kGroupRows +
                      warp_of_group() * 16 + lane() / 4;
    if (lane() % 4 == 0) to[0] = row_sums[0][0], to[8] = row_sums[0][2];
}

// ---------------------------------------------------------------------------------------------------------------------
// Parts of tiles

enum NamedBarriers : uint32_t { kIsLast = 1 };  // + consumer

// is_last_block (kernel.cuh), of consumers: their 128 threads. `shared_last` is in shared memory.
__device__ __forceinline__ bool is_last_consumer(bool& shared_last, unsigned* arrivals, int n, int group) {
    __threadfence();  // what this thread has stored can be seen before the consumer is counted
    named_barrier_sync(kIsLast + group, kGroup);
    if (in_group() == 0)
        shared_last = atomicInc(arrivals, static_cast<unsigned>(n - 1)) == static_cast<unsigned>(n - 1);
    named_barrier_sync(kIsLast + group, kGroup);  // shared_last is there
    const bool last = shared_last;
    if (last) __threadfence();  // nothing is read before the count
    return last;
}

// The parts of a consumer's rows of a tile, a thread four neighbours of a row at a time.
template <class Out>
__device__ __forceinline__ void add_parts(const Result& result, const Parts& parts, int2 at, int group) {
    constexpr int kChunks = Tile::kColumns / 4;  // of a row
    const float* const first = result.parts + static_cast<int64_t>(parts.first) * kPartFloats;
#pragma unroll 4
    for (int i = in_group(); i < kGroupRows * kChunks; i += kGroup) {
        const int row = group * kGroupRows + i / kChunks, column = i % kChunks * 4;
        const float* from = first + row * Tile::kColumns + column;
        Packed<float> sum{};
        for (int p = 0; p < parts.n; ++p, from += kPartFloats) {
            const auto four = load_packed(from);
            for (int l = 0; l < 4; ++l) sum.v[l] += four.v[l];
        }
        const int64_t m = static_cast<int64_t>(at.x) * kTileRows + row,
                      n = static_cast<int64_t>(at.y) * Tile::kColumns + column;
        if (m >= result.M || n >= result.N) continue;
        Out* const to = static_cast<Out*>(result.out) + m * result.N + n;
        put_pair(to, sum.v[0], sum.v[1], result.alpha, result.beta);
        put_pair(to + 2, sum.v[2], sum.v[3], result.alpha, result.beta);
    }
}

// A consumer, when what it has computed of a tile is in device memory. The last one that has a part of the tile adds
// them up; and the last tile of a row of tiles adds up the tiles' row sums, which are behind those of the parts.
template <class Out>
__device__ __forceinline__ void finish_tile(bool& shared_last, const Schedule& schedule, const Result& result,
                                            const Segment& segment, int2 at, int group) {
    const int row = group * kGroupRows + in_group();
    const auto row_sum_at = [&](int i) -> float& {
        return result.row_parts[static_cast<int64_t>(i) * kTileRows + row];
    };
    if (segment.part >= 0) {
        const Parts parts = schedule.parts_of(segment.tile);
        unsigned* const of_tile = result.arrivals + (segment.tile - schedule.whole_tiles) * kConsumers + group;
        if (!is_last_consumer(shared_last, of_tile, parts.n, group)) return;
        add_parts<Out>(result, parts, at, group);
        if (result.row_sums && in_group() < kGroupRows) {
            float sum = 0.0f;
            for (int p = 0; p < parts.n; ++p) sum += row_sum_at(parts.first + p);
            row_sum_at(result.n_parts + segment.tile) = sum;
        }
    }
    if (!result.row_sums) return;
    unsigned* const of_row = result.arrivals + (schedule.cut_tiles + at.x) * kConsumers + group;
    if (!is_last_consumer(shared_last, of_row, schedule.grid.columns, group)) return;
    const int64_t m = static_cast<int64_t>(at.x) * kTileRows + row;
    if (in_group() >= kGroupRows || m >= result.M) return;
    float sum = 0.0f;
    for (int c = 0; c < schedule.grid.columns; ++c) sum += row_sum_at(result.n_parts + schedule.grid.tile(at.x, c));
    static_cast<Out*>(result.row_sums)[m] = from_float<Out>(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// The kernel

template <class Number, bool kATransposed, bool kBTransposed>
__global__ void __launch_bounds__(kThreads, 1)
    hopper_matmul_split_kernel(const __grid_constant__ Operands maps, Schedule schedule, Result result) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_tiles());
    const int group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kGroup, 0);  // the same for a warp
    if (threadIdx.x < sizeof shared.ones / sizeof *shared.ones) {
        shared.ones[threadIdx.x] = pack<Number>(1.0f, 1.0f);
        if (threadIdx.x == 0) init_ring(shared.ring, kConsumers);
        fence_proxy_async();
    }
    __syncthreads();  // ones and mbarriers are there. This is the last barrier of all threads

    uint32_t round = 0;
    Segment segment = schedule.segment(0);
    if (group < kConsumers) {
        take_registers<232>();
        Tile::Sums sums = {};  // see wgmma_m64k16
        for (int s = 1; segment.n_steps > 0; segment = schedule.segment(s++)) {
            const int2 at = schedule.grid.at(segment.tile);
            if (kATransposed && result.row_sums)
                multiply_and_sum<Number, kATransposed, kBTransposed>(sums, shared, result, segment, at,
                                                                     schedule.grid.columns, round, group);
            else
                multiply_steps<Tile, Number, kATransposed, kBTransposed>(sums, shared.stages, shared.ring, round,
                                                                         segment.n_steps, group);
            if (segment.part >= 0) store_part(result, sums, segment.part, group);
            else if (result.is_float) store_whole<float>(result, sums, at, group);
            else store_whole<Number>(result, sums, at, group);
            if (result.is_float) finish_tile<float>(shared.is_last[group], schedule, result, segment, at, group);
            else finish_tile<Number>(shared.is_last[group], schedule, result, segment, at, group);
        }
        return;
    }
    give_registers<40>();
    if (warp_of_group() > 0 || !elect_one()) return;
    for (int s = 1; segment.n_steps > 0; segment = schedule.segment(s++)) {
        const int2 at = schedule.grid.at(segment.tile);
        for (int i = 0; i < segment.n_steps; ++i, ++round)
            load_step<Tile, kATransposed, kBTransposed>(maps, shared.stages, shared.ring, round, at.x * kTileRows,
                                                        at.y * Tile::kColumns, segment.step(i) * kStepK);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

constexpr int64_t kPartBytes = kPartFloats * sizeof(float), kRowPartBytes = kTileRows * sizeof(float);

// What is left behind whole rounds is cut if that saves more than the parts cost: to write, read and add them counts as
// the time of 30 steps. Blocks are left idle rather than cut a tile unevenly, if they are few.
Schedule schedule_of(int64_t M, int64_t N, int64_t K) {
    const TileGrid grid = tile_grid<Tile>(M, N);
    const int blocks = device().sm_count, tiles = grid.tiles(), steps = narrow(ceil_div(K, int64_t{kStepK}), "steps");
    const int left = tiles % blocks;
    Schedule schedule{grid, steps, tiles, 0, 0};
    int pieces = blocks;
    if (left > 0 && blocks / left * left * 100 >= blocks * 94) pieces = blocks / left * left;
    pieces = static_cast<int>(std::min<int64_t>(pieces, static_cast<int64_t>(left) * steps));  // a step each, at least
    const bool saves = static_cast<int64_t>(pieces - left) * steps > int64_t{30} * pieces;
    if (left == 0 || !saves ||
        (left + pieces - 1) * (kPartBytes + kRowPartBytes) + tiles * kRowPartBytes >
            static_cast<int64_t>(kBlasWorkspaceBytes) ||
        static_cast<int64_t>(left) * steps > std::numeric_limits<int>::max() / 2)
        return schedule;
    schedule.whole_tiles = tiles - left, schedule.cut_tiles = left, schedule.pieces = pieces;
    return schedule;
}

template <class Number, bool kATransposed, bool kBTransposed>
void launch_split(const Schedule& schedule, const Result& result, Tensor a, Tensor b, cudaStream_t stream) {
    const auto kernel = hopper_matmul_split_kernel<Number, kATransposed, kBTransposed>;
    allow_shared(kernel, kSharedBytes);
    const int blocks = std::max(std::min(schedule.whole_tiles, device().sm_count), schedule.pieces);
    kernel<<<blocks, kThreads, kSharedBytes, stream>>>(operand_maps<Tile>(a, kATransposed, b, kBTransposed), schedule,
                                                       result);
}

}  // namespace

bool hopper_matmul_cuts(int64_t M, int64_t N, int64_t K) { return schedule_of(M, N, K).pieces > 0; }
bool hopper_matmul_sums_rows(int64_t M, int64_t N) {
    const TileGrid grid = tile_grid<Tile>(M, N);
    return 2 * grid.tiles() * kRowPartBytes <= static_cast<int64_t>(kBlasWorkspaceBytes) &&
           (device().sm_count + grid.rows) * kConsumers <= kArrivals;
}

void hopper_matmul_split(Tensor out, Tensor a, Tensor b, const MatmulOptions& o, cudaStream_t stream) {
    const int64_t M = out.shape[0], N = out.shape[1], K = a.shape[o.transpose_a ? 0 : 1];
    const Schedule schedule = schedule_of(M, N, K);
    const int n_parts = schedule.pieces > 0 ? schedule.cut_tiles + schedule.pieces - 1 : 0;
    float* const parts = n_parts > 0 || o.a_row_sums ? matmul_workspace() : nullptr;
    const Result result{.out = out.data,
                        .row_sums = o.a_row_sums.data,
                        .is_float = out.dtype == DType::f32,
                        .parts = parts,
                        .row_parts = parts + static_cast<int64_t>(n_parts) * kPartFloats,
                        .arrivals = device().arrivals,
                        .n_parts = n_parts,
                        .M = M,
                        .N = N,
                        .alpha = o.alpha,
                        .beta = o.beta};
    dispatch_16_bits(a.dtype, [&](auto zero) {
        using Number = decltype(zero);
        dispatch_bool(o.transpose_a, [&](auto a_transposed) {
            dispatch_bool(o.transpose_b, [&](auto b_transposed) {
                launch_split<Number, decltype(a_transposed)::value, decltype(b_transposed)::value>(schedule, result, a,
                                                                                                   b, stream);
            });
        });
    });
    // Written and read: parts, their row sums, counters; and the row sums of tiles, of which those of rows that exist
    // are read.
    const int64_t parts_bytes = n_parts * (kPartBytes + (o.a_row_sums ? kRowPartBytes : 0)),
                  sums_written = o.a_row_sums ? schedule.grid.tiles() * kRowPartBytes : 0,
                  sums_read = o.a_row_sums ? schedule.grid.columns * M * static_cast<int64_t>(sizeof(float)) : 0,
                  counters = schedule.cut_tiles + (o.a_row_sums ? schedule.grid.rows : 0),
                  counter_bytes = counters * kConsumers * static_cast<int64_t>(sizeof(unsigned));
    launched("hopper_matmul_split_kernel",
             {.reads = bytes_of(a, b) + (o.beta != 0.0f ? bytes_of(out) : 0) + parts_bytes + sums_read + counter_bytes,
              .writes = bytes_of(out, o.a_row_sums) + parts_bytes + sums_written + counter_bytes,
              .scratch = 2 * parts_bytes + sums_read + sums_written,
              .flops = 2.0 * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(K),
              .product = {M, N, K}});
}
