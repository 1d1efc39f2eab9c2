// Attention over a cache in pages: PagedAttention.                              (Kwon et al. 2023, arXiv:2309.06180)
//
// As plain loops, for one query head of a new token at position t, which reads key head h and value head h of the rows
// of its sequence:
//
//     row(s) = page_table[sequence, s / P] * P + s % P
//     for s <= t:  P[s] = exp(scale * dot(q, key(row(s))))
//     out = (sum over s of P[s] * value(row(s))) / sum(P)
//
// That is flash_attention.cu's forward, with one more look-up to find a row; the running maximum, the rescaling by
// powers of two and the order of every sum are those of flash_attention/cores.cuh, whose functions are used here.
//
// A block has one key head of one chunk. What a chunk's n tokens and the H/K query heads of this key head's group have
// in common are the keys and values, so these n H/K queries are the rows of its tile, and each key is loaded once for
// all of them. The rows stay in shared memory, kKeys keys and values at a time stream past:
//
//     scores     S[r][j] = sum over columns x of  q[r][x] * keys[x][j]          lanes: kLanes keys side by side
//     output     o[r][c] = o[r][c] 2^(m - m') + sum over keys j of  P[r][j] * values[j][c]      lanes: columns
//
// Queries are never lanes, as in training's kernels: a sequence that decodes has one row, and 31 of 32 lanes would be
// idle. Keys are transposed while they are loaded, so that they can be lanes. On the CPU device one thread does a whole
// block in vectors of 64 lanes, on a GPU 128 threads have a lane each.
//
// SPLITS. A GPU needs more blocks than a few sequences have key heads. In 16 bits the keys are cut at every multiple of
// kSplit positions, and the result of a row is by definition
//
//     for each split i:  m_i, l_i, o_i  as above, of its keys alone             M = max m_i
//     out = (sum over i of o_i 2^(m_i - M)) / (sum over i of l_i 2^(m_i - M))   in ascending order of i
//
// where the factors are powers of two, and round nothing. So the bits depend on the row's own sequence only. Whether one
// block does all splits, one after the other, or each has its own block and a second kernel adds them, is a matter of
// speed: the second where the step has few rows (kSplitRows), for chunks of one row. In f32, and on the CPU device,
// there is one split: the sums are one chain, and the bits are flash attention's.
//
// BYTES: each block reads (t + 1) 2 D numbers once. A step that decodes reads the whole cache of its sequences, K
// (t + 1) 2 D numbers each, and computes 4 D H/K flops for every pair of a key and a value: its limit is the memory.
#include "layers/flash_attention/cores.cuh"
#include "layers/flash_attention/paged_attention.cuh"
#include "layers/softmax.cuh"  // Larger

#include <climits>
#include <numeric>

namespace {

constexpr int kThreads = kOnCpu ? 1 : 128;
constexpr int kKeys = kOnCpu ? 64 : 32;  // of a tile
constexpr int kColumns = 128;            // of keys, or values, in shared memory at a time
constexpr int kLanes = kOnCpu ? 64 : 1;  // keys, or columns, of a thread
constexpr int kRows = kOnCpu ? 32 : 16;  // queries of a tile
constexpr int kM = 4;                    // queries of a register tile
constexpr int kSplit = 256;              // keys
constexpr int64_t kSplitRows = 1024;     // rows times heads of a step whose splits have blocks of their own
constexpr int64_t kMaxD = 192;           // of grouped-query attention: as flash attention, which computes whole prompts

template <class Stored>
constexpr bool kQuantised = std::is_same_v<Stored, __nv_fp8_e4m3>;

template <class Stored>
struct Pool {
    const Stored* numbers;
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
};

#if defined(CUDA_ON_CPU) && !defined(GPU_CHUNKS)
// ---------------------------------------------------------------------------------------------------------------------
// Transposing on the CPU device: squares of as many lines as a vector register has lanes.

#if defined(__AVX512F__)
constexpr int kSquare = 16;
#elif defined(__AVX2__)
constexpr int kSquare = 8;
#else
constexpr int kSquare = 4;
#endif
typedef float Line __attribute__((vector_size(kSquare * sizeof(float))));
typedef float LooseLine __attribute__((vector_size(kSquare * sizeof(float)), aligned(4), may_alias));
typedef int LineLanes __attribute__((vector_size(kSquare * sizeof(int))));

// a[0] b[0] a[1] b[1] ..., of the first halves of two lines and of the second.
template <int... lane>
void interleave(Line a, Line b, Line& first, Line& second, std::integer_sequence<int, lane...>) {
    first = __builtin_shuffle(a, b, LineLanes{(lane % 2 * kSquare + lane / 2)...});
    second = __builtin_shuffle(a, b, LineLanes{(lane % 2 * kSquare + lane / 2 + kSquare / 2)...});
}
// to[x * to_pitch + i] = from[i * from_pitch + x]. Interleaving line i with line i + kSquare / 2 rotates the bits of an
// element's number (line, lane) by one place; when all bits of a lane have become those of a line, both are exchanged.
inline void transpose_square(float* to, int to_pitch, const float* from, int from_pitch) {
    Line x[kSquare];
#pragma GCC unroll 16
    for (int i = 0; i < kSquare; ++i) x[i] = *reinterpret_cast<const LooseLine*>(from + i * from_pitch);
#pragma GCC unroll 4
    for (int times = 1; times < kSquare; times *= 2) {
        Line y[kSquare];
#pragma GCC unroll 8
        for (int i = 0; i < kSquare / 2; ++i)
            interleave(x[i], x[i + kSquare / 2], y[2 * i], y[2 * i + 1], std::make_integer_sequence<int, kSquare>());
#pragma GCC unroll 16
        for (int i = 0; i < kSquare; ++i) x[i] = y[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < kSquare; ++i) *reinterpret_cast<LooseLine*>(to + i * to_pitch) = x[i];
}
#endif

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

// The columns x ... x + kN - 1 of a row, those before `end`: the numbers themselves, or codes times their scale.
template <int kN, class Stored>
__device__ __forceinline__ void load_cached(float (&to)[kN], const Pool<Stored>& pool, int64_t row, int x, int end,
                                            const PagedShape& s) {
    load_chunk(to, pool.numbers + row * s.D + x, end - x);
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
    for (int j = 0; j < n_keys; j += kSquare)
        for (int x = 0; x < n; x += kN) {
            float lines[kSquare][kN];  // behind the last key it again: what becomes of them is not used
            for (int i = 0; i < kSquare; ++i)
                load_cached(lines[i], pool, rows[min(j + i, n_keys - 1)], x0 + x, x0 + n, s);
            for (int square = 0; square < kN; square += kSquare)
                transpose_square(tile + (x + square) * kKeys + j, kKeys, &lines[0][square], kN);
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

// Scores become probabilities times 2^max; rescale is the factor by which older sums have to be multiplied.
__device__ __forceinline__ void compute_probs(const Shared& at, const PagedTile& tile, int s0, const PagedShape& s) {
    const int j = static_cast<int>(threadIdx.x) % kRowThreads * kLanes;
    for (int r = static_cast<int>(threadIdx.x) / kRowThreads; r < tile.n; r += kThreads / kRowThreads) {
        const int t = tile.position_of(r, s), first = t - s.window + 1 - s0, end = t + 1 - s0;
        float x[kLanes];
        for (int l = 0; l < kLanes; ++l)
            x[l] = j + l >= first && j + l < end ? at.probs[r * kKeys + j + l] * s.factor : kMasked;
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
// Adds the tile to n columns from c0 on of the outputs.
__device__ __forceinline__ void add_values(const Shared& at, int n_rows, int n_keys, int c0, int n,
                                           const PagedShape& s) {
    for_register_tiles(n_rows, n, [&](int r, auto rows, int c) {
        constexpr int m = decltype(rows)::value;
        float o[m][kLanes];
        for (int i = 0; i < m; ++i)
            for (int l = 0; l < kLanes; ++l) o[i][l] = at.o[(r + i) * s.pitch + c0 + c + l] * at.rescale[r + i];
        multiply(o, at.tile + c, kColumns, at.probs + r * kKeys, kKeys, 1, n_keys);
        for (int i = 0; i < m; ++i)
            for (int l = 0; l < kLanes; ++l) at.o[(r + i) * s.pitch + c0 + c + l] = o[i][l];
    });
}

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

// Nothing has been read: of this split, or of all.
__device__ __forceinline__ void clear(float* o, float* max, float* sum, int n_rows, const PagedShape& s) {
    for (int i = threadIdx.x; i < n_rows * s.pitch; i += kThreads) o[i] = 0.0f;
    for (int r = threadIdx.x; r < n_rows; r += kThreads) max[r] = kNothingYet, sum[r] = 0.0f;
}

// The split's keys [s0, end), tile by tile.
template <int kN, class Stored>
__device__ __forceinline__ void read_split(const Shared& at, const PagedTile& tile, const Pool<Stored>& pool,
                                           const int32_t* pages, int s0, int end, const PagedShape& s) {
    for (; s0 < end; s0 += kKeys) {
        const int n = min(kKeys, end - s0);
        __syncthreads();  // all threads have finished reading the previous tile
        find_rows(at.keys, pages, tile.head, s0, n, s);
        for (int x = 0; x < s.D; x += kColumns) {
            const int n_columns = min(kColumns, s.D - x);
            __syncthreads();
            load_keys<kN>(at.tile, pool, at.keys, n, x, n_columns, s);
            __syncthreads();
            add_scores(at, tile.n, x, n_columns, s);
        }
        __syncthreads();
        compute_probs(at, tile, s0, s);
        for (int c = 0; c < s.Dv; c += kColumns) {
            const int n_columns = min(kColumns, s.Dv - c);
            __syncthreads();
            load_values<kN>(at.tile, pool, at.keys, n, c, n_columns, s);
            if (c == 0) add_sums(at, tile.n, n);
            __syncthreads();
            add_values(at, tile.n, n, c, n_columns, s);
        }
    }
    __syncthreads();  // the split's sums are complete
}

__device__ __forceinline__ void join_split(const Shared& at, int n_rows, const PagedShape& s) {
    for (int r = threadIdx.x; r < n_rows; r += kThreads) {
        const Join join(at.all_max[r], at.max[r]);
        at.old[r] = join.old_factor, at.add[r] = join.factor, at.all_max[r] = join.max;
        at.all_sum[r] = at.all_sum[r] * join.old_factor + at.sum[r] * join.factor;
    }
    __syncthreads();  // the factors are there
    for (int r = 0; r < n_rows; ++r)
        for (int c = threadIdx.x; c < s.Dv; c += kThreads)
            at.all_o[r * s.pitch + c] = at.all_o[r * s.pitch + c] * at.old[r] + at.o[r * s.pitch + c] * at.add[r];
    __syncthreads();  // all have read the split's sums
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

// Block (chunk, key head and tile of queries, split). A chunk whose splits have no blocks of their own is all done by
// that of split 0.
template <class Number, class Stored, int kN>
__global__ void __launch_bounds__(kThreads)
    paged_attention_kernel(Heads<Number> out, float* partial, Heads<const Number> q, Pool<Stored> pool,
                           const int32_t* page_table, const int4* chunks, PagedShape s) {
    const PagedTile tile(load_chunk_of(chunks, static_cast<int>(blockIdx.x), s), static_cast<int>(blockIdx.y), s);
    const bool parallel = s.parallel && tile.chunk.n == 1;
    int split = tile.begin / s.split, end_split = (tile.end - 1) / s.split + 1;
    if (parallel) {
        if (static_cast<int>(blockIdx.z) < split || static_cast<int>(blockIdx.z) >= end_split) return;
        split = static_cast<int>(blockIdx.z), end_split = split + 1;
    }
    if (tile.n <= 0 || (blockIdx.z > 0 && !parallel)) return;

    const Shared at(s);
    for (int r = 0; r < tile.n; ++r) {
        const Number* query = q.head(0, tile.head_of(r, s)) + tile.token_of(r, s) * q.token_stride;
        for (int x = threadIdx.x; x < s.D; x += kThreads) at.q[r * s.D + x] = to_float(query[x]);
    }
    clear(at.all_o, at.all_max, at.all_sum, tile.n, s);
    const int32_t* pages = page_table + int64_t{tile.chunk.sequence} * s.table_columns;
    for (; split < end_split; ++split) {
        clear(at.o, at.max, at.sum, tile.n, s);
        read_split<kN>(at, tile, pool, pages, max(tile.begin, split * s.split), min(tile.end, (split + 1) * s.split),
                       s);
        if (!parallel) join_split(at, tile.n, s);
    }
    for (int r = 0; r < tile.n; ++r) {
        const int token = tile.token_of(r, s), head = tile.head_of(r, s);
        float* its_partial = partial + partial_offset(token, head, static_cast<int>(blockIdx.z), s);
        Number* its_out = out.head(0, head) + token * out.token_stride;
        if (parallel && threadIdx.x == 0) its_partial[0] = at.max[r], its_partial[1] = at.sum[r];
        const float factor = 1.0f / at.all_sum[r];
        for (int c = threadIdx.x; c < s.Dv; c += kThreads)
            if (parallel) its_partial[2 + c] = at.o[r * s.pitch + c];
            else its_out[c] = from_float<Number>(at.all_o[r * s.pitch + c] * factor);
    }
}

// Block (chunk, head): joins the splits of a chunk of one row. Each thread has columns of its own.
template <class Number>
__global__ void join_splits_kernel(Heads<Number> out, const float* partial, const int4* chunks, PagedShape s) {
    const PagedChunk chunk = load_chunk_of(chunks, static_cast<int>(blockIdx.x), s);
    const int head = static_cast<int>(blockIdx.y), first = max(0, chunk.position - s.window + 1) / s.split,
              end = chunk.position / s.split + 1;
    if (chunk.n > 1) return;
    for (int c = threadIdx.x; c < s.Dv; c += blockDim.x) {
        float max = kNothingYet, sum = 0.0f, o = 0.0f;
        for (int split = first; split < end; ++split) {
            const float* its = partial + partial_offset(chunk.row, head, split, s);
            const Join join(max, its[0]);
            max = join.max;
            sum = sum * join.old_factor + its[1] * join.factor;
            o = o * join.old_factor + its[2 + c] * join.factor;
        }
        out.head(0, head)[chunk.row * out.token_stride + c] = from_float<Number>(o * (1.0f / sum));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launching

void check_step(const char* operation, const PagedAttention& a, const PagedStep& step) {
    const Tensor &pool = step.pool, &table = step.page_table;
    const bool quantised = pool.dtype == DType::e4m3;
    expect(operation, "step.pool", pool, pool.dtype, {-1, -1, a.page_heads * a.q.D});
    if (quantised)
        expect(operation, "step.scales", step.scales, DType::f32,
               {pool.shape[0], pool.shape[1], a.scale_column < a.q.D ? 2 : a.page_heads});
    expect(operation, "step.page_table", table, DType::i32, {-1, -1});
    expect(operation, "step.chunks", step.chunks, DType::i32, {-1, 4});
    expect_aligned(operation, {{"step.pool", pool}, {"step.chunks", step.chunks}});
    check(table.shape[1] * pool.shape[1] < INT_MAX - kSplit, operation, ": step.page_table is ", table,
          " with pages of ", pool.shape[1], " rows: too many positions");
    check(std::isfinite(a.scale) && a.scale > 0, operation, ": scale is ", a.scale);
    check(a.window >= 0, operation, ": window is ", a.window, "; 0 means none");
}

PagedShape shape_of(const PagedAttention& a, const PagedStep& step) {
    const int64_t N = a.q.rows.shape[1], group = a.q.count / a.K, n_chunks = step.chunks.shape[0];
    const int64_t P = step.pool.shape[1], max_length = step.page_table.shape[1] * P;
    const bool one_split = kOnCpu || step.pool.dtype == DType::f32;
    PagedShape s{};
    s.N = N;
    s.n_sequences = narrow(step.page_table.shape[0], "sequences"), s.n_pages = narrow(step.pool.shape[0], "pages");
    s.table_columns = narrow(step.page_table.shape[1], "pages"), s.P = narrow(P, "rows of a page");
    s.H = narrow(a.q.count, "heads"), s.group = narrow(group, "heads");
    s.D = narrow(a.q.D, "columns"), s.Dv = narrow(a.out.D, "columns"),
    s.pitch = narrow(round_up(s.Dv, kLanes), "columns");
    s.page_heads = narrow(a.page_heads, "heads"), s.values = narrow(a.values, "heads");
    s.scale_column = narrow(a.scale_column, "columns");
    s.rows = a.q.D > 2 * kColumns ? kRows / 2 : kRows;  // so that they fit in shared memory
    // A step of as many chunks as rows has no chunk of more than one row.
    s.tiles = narrow(ceil_div((n_chunks == N ? 1 : kChunkRows) * group, s.rows), "tiles");
    s.split = one_split ? INT_MAX : kSplit;
    s.n_splits = narrow(one_split ? 1 : ceil_div(max_length, kSplit), "splits");
    s.parallel = s.n_splits > 1 && N * a.q.count <= kSplitRows;
    s.factor = a.scale * kLog2e;
    s.window = a.window == 0 ? INT_MAX : static_cast<int>(std::min<int64_t>(a.window, INT_MAX));
    return s;
}

// Calls f(a number of the dtype of the queries, one of the pool's). They are the same, but for MLA's queries, which are
// f32, and for codes.
template <class F>
void dispatch_pool(const char* operation, DType dtype, DType pool, F&& f) {
    check(dtype == DType::f32 || pool == dtype || pool == DType::e4m3, operation, ": step.pool holds ",
          dtype_name(pool), ", expected ", dtype_name(dtype), " or e4m3");
    dispatch(dtype, [&](auto number) {
        if (pool == DType::e4m3) return f(number, __nv_fp8_e4m3{});
        if constexpr (!std::is_same_v<decltype(number), float>) return f(number, number);
        else dispatch(pool, [&](auto stored) { f(number, stored); });
    });
}

}  // namespace

void paged_attention(const char* operation, const PagedAttention& a, const PagedStep& step, Tensor scratch,
                     cudaStream_t stream) {
    check_step(operation, a, step);
    const PagedShape s = shape_of(a, step);
    const int64_t n_chunks = step.chunks.shape[0];
    float* partial = nullptr;
    if (s.parallel) partial = scratch_as(operation, scratch, {s.N, s.H, s.n_splits, 2 + s.Dv}).ptr<float>();
    const dim3 grid(static_cast<unsigned>(n_chunks), static_cast<unsigned>(a.K * s.tiles),
                    static_cast<unsigned>(s.parallel ? s.n_splits : 1));
    const auto* chunks = reinterpret_cast<const int4*>(step.chunks.ptr<int32_t>());
    dispatch_pool(operation, a.q.rows.dtype, step.pool.dtype, [&](auto number, auto stored) {
        using Number = decltype(number);
        using Stored = decltype(stored);
        const auto launch = [&](auto chunk) {
            constexpr int kN = decltype(chunk)::value;
            allow_shared(paged_attention_kernel<Number, Stored, kN>, Shared::bytes(s));
            paged_attention_kernel<Number, Stored, kN><<<grid, kThreads, Shared::bytes(s), stream>>>(
                Heads<Number>(a.out), partial, Heads<const Number>(a.q), Pool<Stored>(step),
                step.page_table.ptr<int32_t>(), chunks, s);
            cudaCheckLaunch();
        };
        if (kOnCpu || std::gcd(s.D, s.Dv) % kChunk<Stored> == 0) launch(std::integral_constant<int, kChunk<Stored>>{});
        else launch(std::integral_constant<int, 1>{});
        if (!s.parallel) return;
        join_splits_kernel<Number>
            <<<dim3(static_cast<unsigned>(n_chunks), static_cast<unsigned>(s.H)), 64, 0, stream>>>(Heads<Number>(a.out),
                                                                                                   partial, chunks, s);
        cudaCheckLaunch();
    });
}

void paged_attention_forward(const HeadColumns& out, const HeadColumns& q, int64_t K, const PagedStep& step,
                             float scale, int64_t window, Tensor scratch, cudaStream_t stream) {
    const char* operation = "paged_attention_forward";
    const DType dtype = q.rows.dtype;
    expect(operation, "q", q.rows, dtype, {1, -1, -1});
    const int64_t H = q.count, D = q.D, N = q.rows.shape[1];
    check(N > 0 && D >= 1 && D <= kMaxD, operation, ": q is ", q.rows, " with heads of ", D, " columns; 1 to ", kMaxD,
          " are possible");
    check(K >= 1 && H >= 1 && H % K == 0, operation, ": H = ", H, " query heads are not a multiple of K = ", K,
          " key/value heads");
    expect_heads(operation, "q", q, dtype, 1, N, H, D);
    expect_heads(operation, "out", out, dtype, 1, N, H, D);
    check(step.pool.dtype == dtype || step.pool.dtype == DType::e4m3, operation, ": step.pool is ", step.pool,
          ", expected ", dtype_name(dtype), " or e4m3");
    paged_attention(operation, {out, q, K, 2 * K, K, D, scale, window}, step, scratch, stream);
}

int64_t paged_attention_scratch_n(int64_t N, int64_t H, int64_t D, int64_t max_length) {
    return kOnCpu ? 0 : std::min(N * H, kSplitRows) * ceil_div(max_length, kSplit) * (2 + D);
}
