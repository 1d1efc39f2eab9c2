// Attention over a cache in pages: PagedAttention.                              (Kwon et al. 2023, arXiv:2309.06180)
//
// As plain loops, for one query head of a new token at position t, which reads key head h and value head h of the rows
// of its sequence:
//
//     row(s) = page_table[sequence, s / P] * P + s % P
//     for s <= t:  p[s] = exp(scale * dot(q, key(row(s))))
//     out = (sum over s of p[s] * value(row(s))) / sum(p)
//
// That is flash_attention.cu's forward, with one more look-up to find a row; the running maximum, the rescaling by
// powers of two and the order of every sum are those of flash_attention/cores.cuh, whose functions are used here.
//
// A block has one key head of one chunk. What a chunk's n tokens and the H/K query heads of this key head's group have
// in common are the keys and values, so these n H/K queries are the rows of its tile, and each key is loaded once for
// all of them. (If they are more than a tile has, kRows at most, several blocks share them, and each loads the keys.)
// The rows stay in shared memory, kKeys keys and values at a time stream past:
//
//     scores     S[r][j] = sum over columns x of  q[r][x] * keys[x][j]          lanes: kLanes keys side by side
//     output     o[r][c] = o[r][c] 2^(m - m') + sum over keys j of  p[r][j] * values[j][c]      lanes: columns
//
// Queries are never lanes, as in training's kernels: a sequence that decodes has one row, and 31 of 32 lanes would be
// idle. Keys are transposed while they are loaded, so that they can be lanes. On the CPU device one thread does a whole
// block in vectors of 64 lanes, on a GPU 128 threads have a lane each.
//
// SPLITS. A GPU needs more blocks than a few sequences have key heads. With a pool of 16 or 8 bits the keys are cut at
// every multiple of kSplit positions, and the result of a row is by definition
//
//     for each split i:  m_i, l_i, o_i  as above, of its keys alone             M = max m_i
//     out = (sum over i of o_i 2^(m_i - M)) / (sum over i of l_i 2^(m_i - M))   in ascending order of i
//
// where the factors are powers of two, and round nothing. So the bits depend on the row's own sequence only. Whether
// one block does all splits, one after the other, or each has its own block and a second kernel adds them, is a matter
// of speed: the second where the step has few rows (kSplitRows), for chunks of one row. With a pool of f32, and on the
// CPU device, there is one split: the sums are one chain, and those of f32 have the bits of flash attention.
//
// A step in which each sequence has one row is computed by another kernel on a GPU, in the same order:
// paged_decode.cuh.
//
// BYTES: each block reads (t + 1) 2 D numbers once. A step that decodes reads the whole cache of its sequences, K
// (t + 1) 2 D numbers each, and computes 4 D H/K flops for every pair of a key and a value: its limit is the memory.
#include "layers/flash_attention/paged_decode.cuh"
#include "layers/flash_attention/paged_tile.cuh"

#include <algorithm>
#include <climits>
#include <numeric>

namespace {

constexpr int kSplit = 256;           // keys
constexpr int64_t kSplitRows = 1024;  // rows times heads of a step whose splits have blocks of their own
constexpr int64_t kMaxD = 256;        // of grouped-query attention: as flash attention, which computes whole prompts

// ---------------------------------------------------------------------------------------------------------------------
// Splits

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
        compute_probs(at, tile, s0, n, s);
        for (int c = 0; c < s.Dv; c += kColumns) {
            const int n_columns = min(kColumns, s.Dv - c);
            __syncthreads();
            load_values<kN>(at.tile, pool, at.keys, n, c, n_columns, s);
            if (c == 0) add_sums(at, tile.n, n);
            __syncthreads();
            add_values(at, tile, s0, n, c, n_columns, s);
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
// that of split 0. (Without the 4, blocks of a multiprocessor, ptxas spills registers, though it takes only 56.)
template <class Number, class Stored, int kN>
__global__ void __launch_bounds__(kThreads, 4)
    paged_attention_kernel(Heads<Number> out, float* partial, Heads<const Number> q, Pool<Stored> pool,
                           const int32_t* page_table, const int4* chunks, PagedShape s) {
    // The CPU device runs blocks in the order of their numbers: there the heads of a chunk come one after the other.
    const unsigned number = blockIdx.y * gridDim.x + blockIdx.x;
    const int chunk = static_cast<int>(kOnCpu ? number / gridDim.y : blockIdx.x);
    const PagedTile tile(load_chunk_of(chunks, chunk, s), static_cast<int>(kOnCpu ? number % gridDim.y : blockIdx.y),
                         s);
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
        const float factor = inverse_sum(at.all_sum[r]);
        for (int c = threadIdx.x; c < s.Dv; c += kThreads)
            if (parallel) its_partial[2 + c] = at.o[r * s.pitch + c];
            else its_out[c] = from_float<Number>(at.all_o[r * s.pitch + c] * factor);
    }
}

// Block (chunk, head): joins the splits of a chunk of one row. Each thread has columns of its own.
template <class Number>
__global__ void join_splits_kernel(Heads<Number> out, const float* partial, const int4* chunks, PagedShape s) {
    let_next_start();
    wait_for_previous();
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
        out.head(0, head)[chunk.row * out.token_stride + c] = from_float<Number>(o * inverse_sum(sum));
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
    s.split = one_split ? INT_MAX : kSplit;
    s.n_splits = narrow(one_split ? 1 : ceil_div(max_length, kSplit), "splits");
    s.parallel = s.n_splits > 1 && N * a.q.count <= kSplitRows;
    // A step of as many chunks as rows has no chunk of more than one row.
    const int64_t queries = (n_chunks == N ? 1 : kChunkRows) * group,
                  blocks = n_chunks * a.K * (s.parallel ? s.n_splits : 1);
    // Fewer where they do not fit in shared memory, and where there are few blocks: smaller tiles make more of them,
    // which read the same keys.
    const auto most_bytes = static_cast<size_t>(device().block_shared_bytes);
    s.rows = a.q.D > 2 * kColumns ? kRows / 2 : kRows;
    while (s.rows > 1 &&
           (Shared::bytes(s) > most_bytes || (s.rows > kM && blocks * ceil_div(queries, s.rows) < device().sm_count)))
        s.rows /= 2;
    s.tiles = narrow(ceil_div(queries, s.rows), "tiles");
    s.factor = a.scale * kLog2e;
    // No window is one of all positions: no larger number, so that none overflows where it is taken from a position.
    s.window = static_cast<int>(a.window == 0 ? max_length : std::min(a.window, max_length));
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

// Joins the splits of chunks of one row.
template <class Number>
static void join_splits(const PagedAttention& a, const float* partial, const PagedStep& step, const PagedShape& s,
                        cudaStream_t stream) {
    const int64_t n_chunks = step.chunks.shape[0], partial_bytes = s.N * s.H * s.n_splits * (2 + s.Dv) * 4;
    const dim3 grid(static_cast<unsigned>(n_chunks), static_cast<unsigned>(s.H));
    EarlyLaunch(grid, 64, 0, stream)("join_splits_kernel", join_splits_kernel<Number>, Heads<Number>(a.out), partial,
                                     reinterpret_cast<const int4*>(step.chunks.ptr<int32_t>()), s);
    launched("join_splits_kernel",
             {.reads = partial_bytes + bytes_of(step.chunks), .writes = bytes_of(a.out), .scratch = partial_bytes});
}

// What the splits leave for join_splits, if they have blocks of their own.
static float* partial_in(const char* operation, Tensor scratch, const PagedShape& s) {
    return s.parallel ? scratch_as(operation, scratch, {s.N, s.H, s.n_splits, 2 + s.Dv}).ptr<float>() : nullptr;
}

// How many rows of the pool the sequences have, only the device knows: keys and values are not counted.
static LaunchCost cost_of(const PagedAttention& a, const PagedStep& step, const PagedShape& s) {
    const int64_t partial_bytes = s.parallel ? s.N * s.H * s.n_splits * (2 + s.Dv) * 4 : 0;
    return {.reads = bytes_of(a.q, step.page_table, step.chunks),
            .writes = s.parallel ? partial_bytes : bytes_of(a.out),
            .scratch = partial_bytes};
}

static bool can_decode(const PagedAttention& a, const PagedStep& step) {
    const int64_t row_bytes = a.q.D * static_cast<int64_t>(dtype_bytes(step.pool.dtype));
    return step.chunks.shape[0] == a.q.rows.shape[1] && a.values > 0 && a.q.D == a.out.D && a.q.D % 2 == 0 &&
           a.q.D <= kMaxD && row_bytes % 16 == 0;
}

void paged_attention(const char* operation, const PagedAttention& a, const PagedStep& step, Tensor scratch,
                     cudaStream_t stream) {
    if (!kOnCpu && can_decode(a, step)) return paged_decode(operation, a, step, nullptr, scratch, stream);
    check_step(operation, a, step);
    const PagedShape s = shape_of(a, step);
    const int64_t n_chunks = step.chunks.shape[0];
    float* partial = partial_in(operation, scratch, s);
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
            launched("paged_attention_kernel", cost_of(a, step, s));
        };
        if (kOnCpu || std::gcd(s.D, s.Dv) % kChunk<Stored> == 0) launch(std::integral_constant<int, kChunk<Stored>>{});
        else launch(std::integral_constant<int, 1>{});
        if (s.parallel) join_splits<Number>(a, partial, step, s, stream);
    });
}

static DecodeShape decode_shape(const PagedAttention& a, const PagedStep& step) {
    DecodeShape d{};
    d.s = shape_of(a, step);
    const int64_t row_bytes = a.q.D * static_cast<int64_t>(dtype_bytes(step.pool.dtype)),
                  longest = int64_t{d.s.table_columns} * d.s.P;
    d.queries = static_cast<int>(std::clamp<int64_t>(kMostItems / d.s.D, 1, std::min(kMostQueries, d.s.group)));
    // Neighbouring threads read neighbouring keys, an odd number of 16 bytes apart: no two of eight in the same banks.
    d.key_pitch = static_cast<int>((row_bytes / 16 | 1) * 16), d.value_pitch = static_cast<int>(row_bytes);
    d.pass = kDecodeThreads;
    const auto fits = [&] {
        return d.pass * (d.key_pitch + d.value_pitch) <= kPassBytes &&
               DecodeShared::bytes(d) <= static_cast<size_t>(device().block_shared_bytes);
    };
    while (d.pass > kTileKeys && (!fits() || d.pass / 2 >= longest)) d.pass /= 2;
    return d;
}

template <class Number>
static NewRows<Number> new_rows_of(const PagedStep& step, const NewHeads* fresh) {
    if (!fresh) return {};
    const HeadColumns &k = fresh->k, &v = fresh->v;
    const bool rotates = fresh->table.exists();
    return {k.rows.ptr<Number>() + k.column,
            v.rows.ptr<Number>() + v.column,
            k.rows.cols(),
            v.rows.cols(),
            k.head_stride(),
            v.head_stride(),
            step.rows.ptr<int32_t>(),
            rotates ? fresh->positions.ptr<int32_t>() : nullptr,
            rotates ? fresh->table.ptr<float>() : nullptr,
            rotates ? fresh->table.shape[0] : 0,
            fresh->pairs == RopePairs::neighbours};
}

void paged_decode(const char* operation, const PagedAttention& a, const PagedStep& step, const NewHeads* fresh,
                  Tensor scratch, cudaStream_t stream) {
    check_step(operation, a, step);
    const DecodeShape d = decode_shape(a, step);
    const PagedShape& s = d.s;
    float* partial = partial_in(operation, scratch, s);
    const dim3 grid(static_cast<unsigned>(s.N), static_cast<unsigned>(a.K * ceil_div(s.group, d.queries)),
                    static_cast<unsigned>(s.parallel ? s.n_splits : 1));
    dispatch_pool(operation, a.q.rows.dtype, step.pool.dtype, [&](auto number, auto stored) {
        using Number = decltype(number);
        using Stored = decltype(stored);
        if constexpr (std::is_same_v<Number, Stored> || kQuantised<Stored>) {
            const auto launch = [&]<int kQueries>(std::integral_constant<int, kQueries>) {
                const auto kernel = paged_decode_kernel<kQueries, Number, Stored>;
                allow_shared(kernel, DecodeShared::bytes(d));
                EarlyLaunch(grid, kDecodeThreads, DecodeShared::bytes(d), stream)(
                    "paged_decode_kernel", kernel, Heads<Number>(a.out), partial, Heads<const Number>(a.q),
                    Pool<Stored>(step), step.page_table.ptr<int32_t>(),
                    reinterpret_cast<const int4*>(step.chunks.ptr<int32_t>()), new_rows_of<Number>(step, fresh), d);
            };
            if (d.queries == 1) launch(std::integral_constant<int, 1>());
            else if (d.queries <= 4) launch(std::integral_constant<int, 4>());
            else launch(std::integral_constant<int, kMostQueries>());
            LaunchCost cost = cost_of(a, step, s);
            if (fresh) {
                const int64_t written = s.N * 2 * a.K * s.D * int64_t{sizeof(Number)};
                cost.reads += written + bytes_of(step.rows), cost.writes += written;
            }
            launched("paged_decode_kernel", cost);
            if (s.parallel) join_splits<Number>(a, partial, step, s, stream);
        }
    });
}

static void expect_new_heads(const char* operation, const PagedAttention& a, const PagedStep& step,
                             const NewHeads& fresh) {
    const DType dtype = a.q.rows.dtype;
    const int64_t N = a.q.rows.shape[1], D = a.q.D;
    expect_heads(operation, "k", fresh.k, dtype, 1, N, a.K, D);
    expect_heads(operation, "v", fresh.v, dtype, 1, N, a.K, D);
    expect(operation, "step.rows", step.rows, DType::i32, {N});
    if (!fresh.table.exists()) return;
    expect(operation, "table", fresh.table, DType::f32, {-1, D});
    expect(operation, "positions", fresh.positions, DType::i32, {1, N});
}

static PagedAttention grouped_queries(const char* operation, const HeadColumns& out, const HeadColumns& q, int64_t K,
                                      const PagedStep& step, float scale, int64_t window) {
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
    return {out, q, K, 2 * K, K, D, scale, window};
}

void paged_attention_forward(const HeadColumns& out, const HeadColumns& q, int64_t K, const PagedStep& step,
                             float scale, int64_t window, Tensor scratch, cudaStream_t stream) {
    const char* operation = "paged_attention_forward";
    paged_attention(operation, grouped_queries(operation, out, q, K, step, scale, window), step, scratch, stream);
}

void paged_decode_forward(const HeadColumns& out, const HeadColumns& q, const HeadColumns& k, const HeadColumns& v,
                          const PagedStep& step, RopePairs pairs, Tensor positions, Tensor table, float scale,
                          int64_t window, Tensor scratch, cudaStream_t stream) {
    const char* operation = "paged_decode_forward";
    const PagedAttention a = grouped_queries(operation, out, q, k.count, step, scale, window);
    if (kOnCpu || step.pool.dtype == DType::e4m3 || !can_decode(a, step)) {
        paged_write(step, q, k, v, pairs, positions, table, stream);
        return paged_attention(operation, a, step, scratch, stream);
    }
    const NewHeads fresh{k, v, pairs, positions, table};
    expect_new_heads(operation, a, step, fresh);
    paged_decode(operation, a, step, &fresh, scratch, stream);
}

int64_t paged_splits_n(int64_t N, int64_t H, int64_t D, int64_t max_length) {
    return kOnCpu ? 0 : std::min(N * H, kSplitRows) * ceil_div(max_length, kSplit) * (2 + D);
}

// Memory is planned before a model's weights are read: a model that does not fit is told by then.
int64_t paged_attention_scratch_n(int64_t N, int64_t H, int64_t D, int64_t max_length) {
    check(D <= kMaxD, "attention over a cache: heads of ", D, " columns are beyond the ", kMaxD,
          " that its kernels can have");
    return paged_splits_n(N, H, D, max_length);
}
