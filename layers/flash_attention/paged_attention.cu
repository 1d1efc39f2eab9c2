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
// where the factors are powers of two, and round nothing. So the bits depend on the row's own sequence only, and whether
// one block does all splits, one after the other, or each has its own block and a second kernel adds them, is a matter
// of speed: the second where the step has few rows (kSplitRows), for chunks of one row. In f32, and on the CPU device,
// there is one split: the sums are one chain, and the bits are flash attention's.
//
// BYTES: each block reads (t + 1) 2 D numbers once. A step that decodes reads the whole cache of its sequences, K
// (t + 1) 2 D numbers each, and computes 4 D H/K flops for every pair of a key and a value: its limit is the memory.
#include "layers/flash_attention/cores.cuh"
#include "layers/softmax.cuh"  // Larger

#include <climits>
#include <numeric>

namespace {

constexpr int kThreads = kOnCpu ? 1 : 128;
constexpr int kKeys = kOnCpu ? 64 : 32;  // of a tile
constexpr int kLanes = kOnCpu ? 64 : 1;  // keys, or columns, of a thread
constexpr int kRows = kOnCpu ? 32 : 16;  // queries of a tile
constexpr int kM = 4;                    // queries of a register tile
constexpr int kSplit = 256;              // keys
constexpr int64_t kSplitRows = 1024;     // rows times heads of a step whose splits have blocks of their own
constexpr int64_t kMaxD = 192;           // as flash attention
constexpr float kLargestCode = 448.0f;   // of e4m3

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
    int64_t N, W;  // rows of the step; columns of a row of the pool
    int n_sequences, table_columns, n_pages, P;
    int H, K, group, D;   // group: query heads of a key head
    int pitch;            // of rows of values and outputs in shared memory: whole lanes
    int tiles;            // of kRows queries, in the largest chunk
    int split, n_splits;  // keys of a split; splits of the longest sequence
    bool parallel;        // each split of a chunk of one row has its own block
    float factor;         // scale * log2(e): exponentials are powers of two
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

// What a block computes: the queries first ... first + n - 1 of the chunk's, which see the keys [begin, end). Query i is
// that of head i % group of the chunk's row i / group.
struct PagedTile {
    PagedChunk chunk;
    int head, first, n, begin, end;  // head: of keys

    __device__ __forceinline__ PagedTile(const PagedChunk& its_chunk, int y, const PagedShape& s) : chunk(its_chunk) {
        head = y / s.tiles, first = y % s.tiles * kRows, n = min(kRows, chunk.n * s.group - first);
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

// ---------------------------------------------------------------------------------------------------------------------
// Loading a tile. `rows` are the rows of the pool in which its n keys lie.

__device__ __forceinline__ void find_rows(int64_t* rows, const int32_t* pages, int s0, int n, const PagedShape& s) {
    for (int j = threadIdx.x; j < n; j += kThreads) {
        const int position = s0 + j, page = pages[position / s.P];
        if (page < 0 || page >= s.n_pages) __trap();
        rows[j] = int64_t{page} * s.P + position % s.P;
    }
}

// The chunk of kN columns from x on of a head of one row: the numbers themselves, or codes times their scale.
template <int kN, class Stored>
__device__ __forceinline__ void load_cached(float (&to)[kN], const Pool<Stored>& pool, int64_t row, int head, int x,
                                            const PagedShape& s) {
    load_chunk(to, pool.numbers + row * s.W + int64_t{head} * s.D + x, s.D - x);
    if constexpr (kQuantised<Stored>) {
        const float scale = pool.scales[row * 2 * s.K + head];
        for (int l = 0; l < kN; ++l) to[l] *= scale;
    }
}

// keys[x][j]: neighbouring threads have neighbouring keys, so that what they write is side by side.
template <int kN, class Stored>
__device__ __forceinline__ void load_keys(float* keys, const Pool<Stored>& pool, const int64_t* rows, int n, int head,
                                          const PagedShape& s) {
    for (int i = threadIdx.x; i < kKeys * ((s.D + kN - 1) / kN); i += kThreads) {
        const int j = i % kKeys, x = i / kKeys * kN;
        if (j >= n) continue;
        float numbers[kN];
        load_cached(numbers, pool, rows[j], head, x, s);
        for (int l = 0; l < kN && x + l < s.D; ++l) keys[(x + l) * kKeys + j] = numbers[l];
    }
}
// values[j][c]: neighbouring threads have neighbouring chunks of a row.
template <int kN, class Stored>
__device__ __forceinline__ void load_values(float* values, const Pool<Stored>& pool, const int64_t* rows, int n,
                                            int head, const PagedShape& s) {
    const int n_chunks = (s.D + kN - 1) / kN;
    for (int i = threadIdx.x; i < n * n_chunks; i += kThreads) {
        const int j = i / n_chunks, c = i % n_chunks * kN;
        float numbers[kN];
        load_cached(numbers, pool, rows[j], s.K + head, c, s);
        store_chunk(values + j * s.pitch + c, numbers, s.D - c);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// A tile in shared memory, and what is done with it. Between two of these functions stands a barrier.

struct Shared {
    float *q, *keys, *values, *probs;              // (kRows, D), (D, kKeys), (kKeys, pitch), (kRows, kKeys)
    float *o, *max, *sum, *rescale;                // of the split that is being read: (kRows, pitch), 3 times (kRows)
    float *all_o, *all_max, *all_sum, *old, *add;  // of the splits before it, and the factors that join the two
    int64_t* rows;                                 // (kKeys)

    __device__ __forceinline__ explicit Shared(const PagedShape& s) {
        float* next = dynamic_shared<float>();
        const auto take = [&](int n) { return (next += n) - n; };
        rows = reinterpret_cast<int64_t*>(take(2 * kKeys));
        values = take(kKeys * s.pitch), o = take(kRows * s.pitch), all_o = take(kRows * s.pitch);
        keys = take(kKeys * s.D), probs = take(kRows * kKeys), q = take(kRows * s.D);
        max = take(kRows), sum = take(kRows), rescale = take(kRows);
        all_max = take(kRows), all_sum = take(kRows), old = take(kRows), add = take(kRows);
    }
    static size_t bytes(const PagedShape& s) {
        return sizeof(float) * static_cast<size_t>(2 * kKeys + (kKeys + 2 * kRows) * s.pitch + (kKeys + kRows) * s.D +
                                                   kRows * kKeys + 7 * kRows);
    }
};
constexpr int kRowThreads = kKeys / kLanes;  // threads that share a row of probs: one, or a warp

// Calls f(first row of a register tile, how many as a constant, first of kLanes lanes) for this thread's register tiles.
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

__device__ __forceinline__ void compute_scores(const Shared& at, int n_rows, const PagedShape& s) {
    for_register_tiles(n_rows, kKeys, [&](int r, auto rows, int j) {
        constexpr int m = decltype(rows)::value;
        float scores[m][kLanes] = {};
        multiply(scores, at.keys + j, kKeys, at.q + r * s.D, s.D, 1, s.D);
        for (int i = 0; i < m; ++i)
            for (int l = 0; l < kLanes; ++l) at.probs[(r + i) * kKeys + j + l] = scores[i][l] * s.factor;
    });
}

// Scores become probabilities times 2^max; rescale is the factor by which older sums have to be multiplied.
__device__ __forceinline__ void compute_probs(const Shared& at, const PagedTile& tile, int s0, const PagedShape& s) {
    const int j = static_cast<int>(threadIdx.x) % kRowThreads * kLanes;
    for (int r = static_cast<int>(threadIdx.x) / kRowThreads; r < tile.n; r += kThreads / kRowThreads) {
        const int t = tile.position_of(r, s), first = t - s.window + 1 - s0, end = t + 1 - s0;
        float x[kLanes];
        for (int l = 0; l < kLanes; ++l) x[l] = j + l >= first && j + l < end ? at.probs[r * kKeys + j + l] : kMasked;
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

// The sums over the tile's n keys, in ascending order.
__device__ __forceinline__ void add_values(const Shared& at, int n_rows, int n, const PagedShape& s) {
    for (int r = threadIdx.x; r < n_rows; r += kThreads) {
        float sum = at.sum[r] * at.rescale[r];
        for (int j = 0; j < n; ++j) sum += at.probs[r * kKeys + j];
        at.sum[r] = sum;
    }
    for_register_tiles(n_rows, s.D, [&](int r, auto rows, int c) {
        constexpr int m = decltype(rows)::value;
        float o[m][kLanes];
        for (int i = 0; i < m; ++i)
            for (int l = 0; l < kLanes; ++l) o[i][l] = at.o[(r + i) * s.pitch + c + l] * at.rescale[r + i];
        multiply(o, at.values + c, s.pitch, at.probs + r * kKeys, kKeys, 1, n);
        for (int i = 0; i < m; ++i)
            for (int l = 0; l < kLanes; ++l) at.o[(r + i) * s.pitch + c + l] = o[i][l];
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

// partial (N, H, n_splits, 2 + D): of one split of a row the maximum, the sum, the unfinished output.
__device__ __forceinline__ int64_t partial_offset(int64_t row, int head, int split, const PagedShape& s) {
    return ((row * s.H + head) * s.n_splits + split) * (2 + s.D);
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
        find_rows(at.rows, pages, s0, n, s);
        __syncthreads();
        load_keys<kN>(at.keys, pool, at.rows, n, tile.head, s);
        load_values<kN>(at.values, pool, at.rows, n, tile.head, s);
        __syncthreads();
        compute_scores(at, tile.n, s);
        __syncthreads();
        compute_probs(at, tile, s0, s);
        __syncthreads();
        add_values(at, tile.n, n, s);
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
        for (int c = threadIdx.x; c < s.D; c += kThreads)
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
        for (int c = threadIdx.x; c < s.D; c += kThreads)
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
    for (int c = threadIdx.x; c < s.D; c += blockDim.x) {
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
// Writing. A team of kTeam threads, which do not wait for others, has one head of one token: it collects the head in
// shared memory, rotates it there, and writes it. Head h < H is a query, then K keys and K values follow.

constexpr int kTeam = kOnCpu ? 1 : kWarp, kTeams = 8;  // threads of a team, teams of a block

struct WriteShape {
    int H, K, D;
    bool neighbours;
    int64_t pool_rows, n_positions;  // n_positions: rows of the table
};

__device__ __forceinline__ void wait_for_team() {
    if constexpr (!kOnCpu) __syncwarp();
}

// rope.cu's rotation of one head, by the row of the table of its position.
__device__ __forceinline__ void rotate_head(float* x, const float* table, int D, bool neighbours) {
    for (int i = threadIdx.x; i < D / 2; i += kTeam) {
        float &x1 = x[neighbours ? 2 * i : i], &x2 = x[neighbours ? 2 * i + 1 : i + D / 2];
        const float cosine = table[i], sine = table[D / 2 + i], y1 = x1 * cosine - x2 * sine;
        x2 = x2 * cosine + x1 * sine;
        x1 = y1;
    }
}

// The scale that makes the head's largest number the largest code; 1 for a head of zeros.
__device__ __forceinline__ float scale_for_codes(const float* x, int D) {
    float largest = 0.0f;
    for (int i = threadIdx.x; i < D; i += kTeam) largest = fmaxf(largest, fabsf(x[i]));
    if constexpr (!kOnCpu) largest = warp_max(largest);
    return largest > 0.0f ? largest / kLargestCode : 1.0f;
}

// Block (token, group of heads).
template <class Number, class Stored>
__global__ void paged_write_kernel(Stored* pool, float* scales, Heads<Number> q, Heads<const Number> k,
                                   Heads<const Number> v, const int32_t* rows, const int32_t* positions,
                                   const float* table, WriteShape s) {
    __shared__ float heads[kTeams][kMaxD];
    const int64_t token = blockIdx.x, row = rows[token], position = positions ? positions[token] : 0;
    const int h = static_cast<int>(blockIdx.y * kTeams + threadIdx.y), n_cached = 2 * s.K;
    if (row < 0 || row >= s.pool_rows || position < 0 || (table && position >= s.n_positions)) __trap();
    if (h >= s.H + n_cached || (h < s.H && !table)) return;  // the whole team; queries stay as they are

    const int cached = h - s.H;  // the head of the pool's row
    const Number* from = cached < 0     ? q.head(0, h) + token * q.token_stride
                         : cached < s.K ? k.head(0, cached) + token * k.token_stride
                                        : v.head(0, cached - s.K) + token * v.token_stride;
    float* x = heads[threadIdx.y];
    for (int i = threadIdx.x; i < s.D; i += kTeam) x[i] = to_float(from[i]);
    wait_for_team();
    if (table && cached < s.K) rotate_head(x, table + position * s.D, s.D, s.neighbours);
    wait_for_team();
    if (cached < 0) {
        Number* to = q.head(0, h) + token * q.token_stride;
        for (int i = threadIdx.x; i < s.D; i += kTeam) to[i] = from_float<Number>(x[i]);
        return;
    }
    Stored* to = pool + (row * n_cached + cached) * s.D;
    if constexpr (kQuantised<Stored>) {
        const float scale = scale_for_codes(x, s.D);
        for (int i = threadIdx.x; i < s.D; i += kTeam) to[i] = from_float<Stored>(x[i] / scale);
        if (threadIdx.x == 0) scales[row * n_cached + cached] = scale;
    } else {
        for (int i = threadIdx.x; i < s.D; i += kTeam) to[i] = from_float<Stored>(x[i]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks

void check_heads(const char* operation, const char* name, const HeadColumns& heads, DType dtype, int64_t N,
                 int64_t count, int64_t D) {
    expect(operation, name, heads.rows, dtype, {1, N, -1});
    check(heads.count == count && heads.D == D, operation, ": ", name, " has ", heads.count, " heads of ", heads.D,
          " columns, expected ", count, " of ", D);
    check(heads.column >= 0 && heads.head_stride() >= D &&
              heads.column + (count - 1) * heads.head_stride() + D <= heads.rows.cols(),
          operation, ": ", name, "'s ", count, " heads of ", D, " columns, ", heads.head_stride(),
          " apart, from column ", heads.column, " on, are not inside of ", heads.rows.cols(), " columns");
}

// Of queries: f32, bf16 or f16 in rows (1, N, columns), H heads for K key heads.
void check_queries(const char* operation, const HeadColumns& q, int64_t K) {
    const DType dtype = q.rows.dtype;
    check(q.rows.data && (dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16) && q.rows.ndim == 3 &&
              q.rows.shape[0] == 1,
          operation, ": q is ", q.rows, ", expected f32, bf16 or f16 of (1, N, columns)");
    check(q.D >= 1 && q.D <= kMaxD, operation, ": heads of q have ", q.D, " columns; 1 to ", kMaxD, " are possible");
    check(K >= 1 && q.count >= 1 && q.count % K == 0, operation, ": H = ", q.count,
          " query heads are not a multiple of K = ", K, " key/value heads");
    check_heads(operation, "q", q, dtype, q.rows.shape[1], q.count, q.D);
}

// The pool: the dtype of the queries or e4m3, with a scale for each row's heads.
void check_pool(const char* operation, const PagedStep& step, DType dtype, int64_t width, int64_t heads) {
    const Tensor& pool = step.pool;
    expect(operation, "step.pool", pool, pool.dtype == DType::e4m3 ? DType::e4m3 : dtype, {-1, -1, width});
    check(pool.shape[0] * pool.shape[1] < INT_MAX, operation, ": step.pool is ", pool, ": too many rows");
    if (pool.dtype == DType::e4m3)
        expect(operation, "step.scales", step.scales, DType::f32, {pool.shape[0], pool.shape[1], heads});
}

// Calls f(zero of the dtype, zero of the pool's type).
template <class F>
void dispatch_pool(DType dtype, DType pool, F&& f) {
    dispatch(dtype, [&](auto number) {
        if (pool == DType::e4m3) f(number, __nv_fp8_e4m3{});
        else f(number, number);
    });
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

void paged_write(const PagedStep& step, const HeadColumns& q, const HeadColumns& k, const HeadColumns& v,
                 RopePairs pairs, Tensor positions, Tensor table, cudaStream_t stream) {
    const char* operation = "paged_write";
    const DType dtype = q.rows.dtype;
    const int64_t H = q.count, K = k.count, D = q.D, N = q.rows.shape[1];
    check_queries(operation, q, K);
    check_heads(operation, "k", k, dtype, N, K, D);
    check_heads(operation, "v", v, dtype, N, K, D);
    check_pool(operation, step, dtype, 2 * K * D, 2 * K);
    expect(operation, "step.rows", step.rows, DType::i32, {N});
    if (table.exists()) {
        check(D % 2 == 0, operation, ": heads of D = ", D, " columns cannot be rotated: D must be even");
        expect(operation, "table", table, DType::f32, {-1, D});
        expect(operation, "positions", positions, DType::i32, {1, N});
    }
    const WriteShape shape{narrow(H, "heads"),
                           narrow(K, "heads"),
                           narrow(D, "columns"),
                           pairs == RopePairs::neighbours,
                           step.pool.shape[0] * step.pool.shape[1],
                           table.shape[0]};
    const dim3 grid(static_cast<unsigned>(N), static_cast<unsigned>(ceil_div(H + 2 * K, kTeams)));
    dispatch_pool(dtype, step.pool.dtype, [&](auto number, auto stored) {
        using Number = decltype(number);
        using Stored = decltype(stored);
        paged_write_kernel<Number, Stored><<<grid, dim3(kTeam, kTeams), 0, stream>>>(
            step.pool.ptr<Stored>(), kQuantised<Stored> ? step.scales.ptr<float>() : nullptr, Heads<Number>(q),
            Heads<const Number>(k), Heads<const Number>(v), step.rows.ptr<int32_t>(),
            table.exists() ? positions.ptr<int32_t>() : nullptr, table.exists() ? table.ptr<float>() : nullptr, shape);
        cudaCheckLaunch();
    });
}

int64_t paged_attention_scratch_n(int64_t N, int64_t H, int64_t D, int64_t max_length) {
    return kOnCpu ? 0 : std::min(N * H, kSplitRows) * ceil_div(max_length, kSplit) * (2 + D);
}

void paged_attention_forward(const HeadColumns& out, const HeadColumns& q, int64_t K, const PagedStep& step,
                             float scale, int64_t window, Tensor scratch, cudaStream_t stream) {
    const char* operation = "paged_attention_forward";
    const DType dtype = q.rows.dtype;
    check_queries(operation, q, K);
    const int64_t H = q.count, D = q.D, N = q.rows.shape[1], group = H / K;
    check_heads(operation, "out", out, dtype, N, H, D);
    check_pool(operation, step, dtype, 2 * K * D, 2 * K);
    expect_aligned(operation, {{"step.pool", step.pool}});
    expect(operation, "step.page_table", step.page_table, DType::i32, {-1, -1});
    expect(operation, "step.chunks", step.chunks, DType::i32, {-1, 4});
    expect_aligned(operation, {{"step.chunks", step.chunks}});
    check(std::isfinite(scale) && scale > 0, operation, ": scale is ", scale);
    check(window >= 0, operation, ": window is ", window, "; 0 means none");
    const int64_t n_chunks = step.chunks.shape[0], P = step.pool.shape[1], max_length = step.page_table.shape[1] * P;
    check(max_length < INT_MAX - kSplit, operation, ": step.page_table ", step.page_table, " with pages of ", P,
          " rows: too many positions");
    const bool one_split = kOnCpu || dtype == DType::f32;
    const int64_t n_splits = one_split ? 1 : ceil_div(max_length, kSplit);

    PagedShape s{};
    s.N = N, s.W = 2 * K * D;
    s.n_sequences = narrow(step.page_table.shape[0], "sequences"), s.n_pages = narrow(step.pool.shape[0], "pages");
    s.table_columns = narrow(step.page_table.shape[1], "pages"), s.P = narrow(P, "rows of a page");
    s.H = narrow(H, "heads"), s.K = narrow(K, "heads"), s.group = narrow(group, "heads"), s.D = narrow(D, "columns");
    s.pitch = static_cast<int>(round_up(D, kLanes));
    // A step of as many chunks as rows has no chunk of more than one row.
    s.tiles = static_cast<int>(ceil_div((n_chunks == N ? 1 : kChunkRows) * group, kRows));
    s.split = one_split ? INT_MAX : kSplit, s.n_splits = narrow(n_splits, "splits");
    s.parallel = n_splits > 1 && N * H <= kSplitRows;
    s.factor = scale * kLog2e;
    s.window = window == 0 ? INT_MAX : static_cast<int>(std::min<int64_t>(window, INT_MAX));
    float* partial = nullptr;
    if (s.parallel) partial = scratch_as(operation, scratch, {N * H * n_splits * (2 + D)}).ptr<float>();

    const dim3 grid(static_cast<unsigned>(n_chunks), static_cast<unsigned>(K * s.tiles),
                    static_cast<unsigned>(s.parallel ? n_splits : 1));
    const auto* chunks = reinterpret_cast<const int4*>(step.chunks.ptr<int32_t>());
    dispatch_pool(dtype, step.pool.dtype, [&](auto number, auto stored) {
        using Number = decltype(number);
        using Stored = decltype(stored);
        const auto launch = [&](auto chunk_columns) {
            constexpr int kN = decltype(chunk_columns)::value;
            allow_shared(paged_attention_kernel<Number, Stored, kN>, Shared::bytes(s));
            paged_attention_kernel<Number, Stored, kN><<<grid, kThreads, Shared::bytes(s), stream>>>(
                Heads<Number>(out), partial, Heads<const Number>(q), Pool<Stored>(step), step.page_table.ptr<int32_t>(),
                chunks, s);
            cudaCheckLaunch();
        };
        if (kOnCpu || D % kChunk<Stored> == 0) launch(std::integral_constant<int, kChunk<Stored>>{});
        else launch(std::integral_constant<int, 1>{});
        if (!s.parallel) return;
        join_splits_kernel<Number><<<dim3(static_cast<unsigned>(n_chunks), static_cast<unsigned>(H)), 64, 0, stream>>>(
            Heads<Number>(out), partial, chunks, s);
        cudaCheckLaunch();
    });
}
