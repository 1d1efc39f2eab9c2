// layers/flash_attention/paged_tile.cuh: what a block of paged_attention.cu does with a tile, kKeys keys and values of
// one head, wherever they lie, for the queries of a chunk that share them. The picture is in paged_attention.cu.
//
// As in cores.cuh a thread has register tiles, kM queries x kLanes keys (or columns), and each number is a sum in
// ascending order, of columns or of keys. A key's columns pass through shared memory kColumns at a time, so that heads
// may have any number of them.
#pragma once

#include "layers/flash_attention/cores.cuh"
#include "layers/flash_attention/paged_attention.cuh"
#include "layers/softmax.cuh"  // Larger

namespace {

constexpr int kThreads = kOnCpu ? 1 : 128;
constexpr int kKeys = kOnCpu ? 64 : 32;  // of a tile
constexpr int kColumns = 128;            // of keys, or values, in shared memory at a time
constexpr int kLanes = kOnCpu ? 64 : 1;  // keys, or columns, of a thread
constexpr int kRows = kOnCpu ? 32 : 16;  // queries of a tile
constexpr int kM = 4;                    // queries of a register tile

template <class Stored>
constexpr bool kQuantised = std::is_same_v<Stored, __nv_fp8_e4m3>;

template <class Stored>
struct Pool {
    Stored* numbers;
    const float* scales;
    explicit Pool(const PagedStep& step)
        : numbers(step.pool.ptr<Stored>()), scales(kQuantised<Stored> ? step.scales.ptr<float>() : nullptr) {}
};

struct PagedShape {
    int64_t N;  // rows of the step
    int n_sequences, table_columns, n_pages, P;
    int H, group, D, Dv;                   // group: query heads of a key head
    int page_heads, values, scale_column;  // as in PagedAttention
    int pitch;                             // of rows of outputs in shared memory: whole lanes
    int rows, tiles;                       // queries of a tile; tiles of the largest chunk
    int split, n_splits;                   // keys of a split; splits of the longest sequence
    bool parallel;                         // each split of a chunk of one row has its own block
    float factor;                          // scale * log2(e): exponentials are powers of two
    int window;
};

struct PagedChunk {
    int row, n, sequence, position;  // position: of its first row
};

__device__ __forceinline__ PagedChunk load_chunk_of(const int4* chunks, int i, const PagedShape& s) {
    const int4 c = chunks[i];
    const int64_t end = int64_t{c.w} + c.y;
    if (c.y < 1 || c.y > kChunkRows || c.x < 0 || c.x + c.y > s.N || c.z < 0 || c.z >= s.n_sequences || c.w < 0 ||
        end > int64_t{s.table_columns} * s.P)
        __trap();
    return {c.x, c.y, c.z, c.w};
}

// What a block computes: the queries first ... first + n - 1 of the chunk, which see the keys [begin, end). Query i is
// that of head i % group of the chunk's row i / group.
struct PagedTile {
    PagedChunk chunk;
    int head, first, n, begin, end;  // head: of keys

    __device__ __forceinline__ PagedTile(const PagedChunk& its_chunk, int y, const PagedShape& s) : chunk(its_chunk) {
        head = y / s.tiles, first = y % s.tiles * s.rows, n = min(s.rows, chunk.n * s.group - first);
        begin = max(0, position_of(0, s) - s.window + 1), end = position_of(n - 1, s) + 1;
    }
    __device__ __forceinline__ int token_of(int r, const PagedShape& s) const {
        return chunk.row + (first + r) / s.group;
    }
    __device__ __forceinline__ int head_of(int r, const PagedShape& s) const {
        return head * s.group + (first + r) % s.group;
    }
    __device__ __forceinline__ int position_of(int r, const PagedShape& s) const {
        return chunk.position + (first + r) / s.group;
    }
    // Query r sees the keys [first_seen, end_seen) of n keys from s0 on.
    __device__ __forceinline__ int first_seen(int r, int s0, const PagedShape& s) const {
        return max(0, position_of(r, s) - s.window + 1 - s0);
    }
    __device__ __forceinline__ int end_seen(int r, int s0, int n_keys, const PagedShape& s) const {
        return min(position_of(r, s) + 1 - s0, n_keys);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Splits

// Joins a split to those before it: sums l and outputs o times these factors, whole powers of two.
struct Join {
    float max, old_factor, factor;
    __device__ __forceinline__ Join(float old_max, float its_max) : max(its_max > old_max ? its_max : old_max) {
        old_factor = power_of_two(old_max - max), factor = power_of_two(its_max - max);
    }
};

// partial (N, H, n_splits, 2 + Dv): of one split of a row the maximum, the sum, the unfinished output.
__device__ __forceinline__ int64_t partial_offset(int64_t row, int head, int split, const PagedShape& s) {
    return ((row * s.H + head) * s.n_splits + split) * (2 + s.Dv);
}

// ---------------------------------------------------------------------------------------------------------------------
// Loading a tile. In a page the P rows of head 0 come first, then those of head 1 ...: what a block reads of a page
// lies side by side. `rows` says for each of the tile's n keys which row of D columns of the pool is its key.

__device__ __forceinline__ void find_rows(int64_t* rows, const int32_t* pages, int head, int s0, int n,
                                          const PagedShape& s) {
    for (int j = threadIdx.x; j < n; j += kThreads) {
        const int position = s0 + j, page = pages[position / s.P];
        if (page < 0 || page >= s.n_pages) __trap();
        rows[j] = (int64_t{page} * s.page_heads + head) * s.P + position % s.P;
    }
}

// Asks for the same rows of the next head, which the next block reads (paged_attention.cu): the processor loads them
// while this block computes. Its own prefetcher stops where a head's rows of a page end. A GPU has other warps to run.
template <int kN, class Stored>
__device__ __forceinline__ void prefetch_next_head([[maybe_unused]] const Stored* from,
                                                   [[maybe_unused]] const PagedShape& s) {
#ifdef CUDA_ON_CPU
    const int64_t ahead = s.page_heads > 1 ? int64_t{s.P} * s.D : 0;
    for (int l = 0; l < kN; l += 64 / static_cast<int>(sizeof(Stored))) __builtin_prefetch(from + ahead + l, 0, 2);
#endif
}

// The columns x ... x + kN - 1 of a row, those before `end`: the numbers themselves, or codes times their scale.
template <int kN, class Stored>
__device__ __forceinline__ void load_cached(float (&to)[kN], const Pool<Stored>& pool, int64_t row, int x, int end,
                                            const PagedShape& s) {
    const Stored* const from = pool.numbers + row * s.D + x;
    prefetch_next_head<kN>(from, s);
    load_chunk(to, from, end - x);
    if constexpr (kQuantised<Stored>) {
        const bool two = s.scale_column < s.D;
        const float* scales = pool.scales + (two ? 2 * row : row);
        const float first = scales[0], second = scales[two ? 1 : 0];
        for (int l = 0; l < kN; ++l) to[l] *= x + l < s.scale_column ? first : second;
    }
}

// tile[x][j]: n columns from x0 on of the keys, transposed.
#if defined(CUDA_ON_CPU) && !defined(GPU_CHUNKS)
template <int kN, class Stored>
void load_keys(float* tile, const Pool<Stored>& pool, const int64_t* rows, int n_keys, int x0, int n,
               const PagedShape& s) {
    using cuda_cpu::width;
    for (int j = 0; j < n_keys; j += width)
        for (int x = 0; x < n; x += kN) {
            float lines[width][kN];  // behind the last key: the last key again, whose scores are not used
            for (int i = 0; i < width; ++i)
                load_cached(lines[i], pool, rows[min(j + i, n_keys - 1)], x0 + x, x0 + n, s);
            transpose_lines(
                tile + x * kKeys + j, kKeys, [&](int i) { return static_cast<const float*>(lines[i]); }, kN);
        }
}
#else
template <int kN, class Stored>
__device__ __forceinline__ void load_keys(float* tile, const Pool<Stored>& pool, const int64_t* rows, int n_keys,
                                          int x0, int n, const PagedShape& s) {
    // Neighbouring threads have neighbouring keys, so that what they write is side by side.
    for (int i = threadIdx.x; i < kKeys * ((n + kN - 1) / kN); i += kThreads) {
        const int j = i % kKeys, x = i / kKeys * kN;
        if (j >= n_keys) continue;
        float numbers[kN];
        load_cached(numbers, pool, rows[j], x0 + x, x0 + n, s);
        for (int l = 0; l < kN && x + l < n; ++l) tile[(x + l) * kKeys + j] = numbers[l];
    }
}
#endif
// tile[j][c]: n columns from c0 on of the values. Neighbouring threads have neighbouring chunks of a row.
template <int kN, class Stored>
__device__ __forceinline__ void load_values(float* tile, const Pool<Stored>& pool, const int64_t* rows, int n_keys,
                                            int c0, int n, const PagedShape& s) {
    const int n_chunks = (n + kN - 1) / kN;
    for (int i = threadIdx.x; i < n_keys * n_chunks; i += kThreads) {
        const int j = i / n_chunks, c = i % n_chunks * kN;
        float numbers[kN];
        load_cached(numbers, pool, rows[j] + s.values * s.P, c0 + c, c0 + n, s);
        store_chunk(tile + j * kColumns + c, numbers, n - c);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// A tile in shared memory, and what is done with it. Between two of these functions stands a barrier.

struct Shared {
    float *q, *tile, *probs;                       // (rows, D), (kColumns, kKeys) or (kKeys, kColumns), (rows, kKeys)
    float *o, *max, *sum, *rescale;                // of the split that is being read: (rows, pitch), 3 times (rows)
    float *all_o, *all_max, *all_sum, *old, *add;  // of the splits before it, and the factors that join the two
    int64_t* keys;                                 // (kKeys): find_rows

    __device__ __forceinline__ explicit Shared(const PagedShape& s) {
        float* next = dynamic_shared<float>();
        const auto take = [&](int n) { return (next += n) - n; };
        keys = reinterpret_cast<int64_t*>(take(2 * kKeys));
        tile = take(kKeys * kColumns), o = take(s.rows * s.pitch), all_o = take(s.rows * s.pitch);
        probs = take(s.rows * kKeys), q = take(s.rows * s.D);
        max = take(s.rows), sum = take(s.rows), rescale = take(s.rows);
        all_max = take(s.rows), all_sum = take(s.rows), old = take(s.rows), add = take(s.rows);
    }
    static size_t bytes(const PagedShape& s) {
        return sizeof(float) *
               static_cast<size_t>(2 * kKeys + kKeys * kColumns + s.rows * (2 * s.pitch + kKeys + s.D + 7));
    }
};
constexpr int kRowThreads = kKeys / kLanes;  // threads that share a row of probs: one, or a warp

// Calls f(first row, how many rows as a constant, first of kLanes lanes) for each of this thread's register tiles.
template <class F>
__device__ __forceinline__ void for_register_tiles(int n_rows, int n_lanes, F&& f) {
    const int across = (n_lanes + kLanes - 1) / kLanes;
    for (int i = threadIdx.x; i < across * ((n_rows + kM - 1) / kM); i += kThreads) {
        const int r = i / across * kM, lane = i % across * kLanes;
        switch (n_rows - r) {
            case 1: f(r, std::integral_constant<int, 1>{}, lane); break;
            case 2: f(r, std::integral_constant<int, 2>{}, lane); break;
            case 3: f(r, std::integral_constant<int, 3>{}, lane); break;
            default: f(r, std::integral_constant<int, kM>{}, lane);
        }
    }
}

// Adds n columns from x0 on to the scores, which start at 0.
__device__ __forceinline__ void add_scores(const Shared& at, int n_rows, int x0, int n, const PagedShape& s) {
    for_register_tiles(n_rows, kKeys, [&](int r, auto rows, int j) {
        constexpr int m = decltype(rows)::value;
        float scores[m][kLanes];
        for (int i = 0; i < m; ++i)
            for (int l = 0; l < kLanes; ++l) scores[i][l] = x0 > 0 ? at.probs[(r + i) * kKeys + j + l] : 0.0f;
        multiply(scores, at.tile + j, kKeys, at.q + r * s.D + x0, s.D, 1, n);
        for (int i = 0; i < m; ++i)
            for (int l = 0; l < kLanes; ++l) at.probs[(r + i) * kKeys + j + l] = scores[i][l];
    });
}

// A score x becomes 2^(factor x - max); rescale is the factor by which older sums have to be multiplied. The tile has n
// keys: where a split ends, a query may see the next ones, too, but what stands in their place is not a score.
__device__ __forceinline__ void compute_probs(const Shared& at, const PagedTile& tile, int s0, int n,
                                              const PagedShape& s) {
    const int j = static_cast<int>(threadIdx.x) % kRowThreads * kLanes;
    for (int r = static_cast<int>(threadIdx.x) / kRowThreads; r < tile.n; r += kThreads / kRowThreads) {
        const int first = tile.first_seen(r, s0, s), end = tile.end_seen(r, s0, n, s);
        float x[kLanes];
        for (int l = 0; l < kLanes; ++l)
            x[l] = j + l >= first && j + l < end ? __fmul_rn(at.probs[r * kKeys + j + l], s.factor) : kMasked;
        float largest = fold_chunk<Larger>(x);
        if constexpr (kRowThreads > 1) largest = warp_max(largest);
        const float whole = rintf(largest), before = at.max[r], larger = whole > before ? whole : before;
        for (int l = 0; l < kLanes; ++l) at.probs[r * kKeys + j + l] = exp2_below(x[l], larger);
        if constexpr (kRowThreads > 1) __syncwarp();  // all lanes have read the old maximum
        if (j > 0) continue;
        at.rescale[r] = power_of_two(before - larger);
        at.max[r] = larger;
    }
}

// The sums of the tile's probabilities, in ascending order.
__device__ __forceinline__ void add_sums(const Shared& at, int n_rows, int n_keys) {
    for (int r = threadIdx.x; r < n_rows; r += kThreads) {
        float sum = at.sum[r] * at.rescale[r];
        for (int j = 0; j < n_keys; ++j) sum += at.probs[r * kKeys + j];
        at.sum[r] = sum;
    }
}
// Adds the tile to n columns from c0 on of the outputs, for each query what it sees: a value that is not finite times a
// probability of 0 would be NaN, and a row must not depend on those behind it, since others may share its page.
__device__ __forceinline__ void add_values(const Shared& at, const PagedTile& tile, int s0, int n_keys, int c0, int n,
                                           const PagedShape& s) {
    for_register_tiles(tile.n, n, [&](int r, auto rows, int c) {
        constexpr int m = decltype(rows)::value;
        float o[m][kLanes];
        for (int i = 0; i < m; ++i)
            for (int l = 0; l < kLanes; ++l) o[i][l] = at.o[(r + i) * s.pitch + c0 + c + l] * at.rescale[r + i];
        const auto add_keys = [&](int i, int j, int end) {
            for (; j < end; ++j)
                for (int l = 0; l < kLanes; ++l)
                    o[i][l] = fmaf(at.probs[(r + i) * kKeys + j], at.tile[j * kColumns + c + l], o[i][l]);
        };
        // The keys [first, end) are seen by all m queries, which stand in the order of their positions.
        const int first = min(tile.first_seen(r + m - 1, s0, s), n_keys),
                  end = max(first, tile.end_seen(r, s0, n_keys, s));
        for (int i = 0; i < m - 1; ++i)
            add_keys(i, tile.first_seen(r + i, s0, s), min(first, tile.end_seen(r + i, s0, n_keys, s)));
        multiply(o, at.tile + first * kColumns + c, kColumns, at.probs + r * kKeys + first, kKeys, 1, end - first);
        for (int i = 1; i < m; ++i) add_keys(i, end, tile.end_seen(r + i, s0, n_keys, s));
        for (int i = 0; i < m; ++i)
            for (int l = 0; l < kLanes; ++l) at.o[(r + i) * s.pitch + c0 + c + l] = o[i][l];
    });
}

}  // namespace
