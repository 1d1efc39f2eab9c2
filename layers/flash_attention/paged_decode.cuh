// layers/flash_attention/paged_decode.cuh: attention over a cache in pages where each sequence has one row: a step that
// decodes. Included by paged_attention.cu, whose kernel computes any step, and defines what is computed here: in the
// same order of every sum, but with few waits one after the other, because a block of such a step has little else to
// do. The longest chain for a context of up to kPassBytes:
//
//     chunk -> pages -> keys and values, all of them at a time -> scores -> probabilities -> outputs
//
// A block of kDecodeThreads threads has up to eight query heads of one key head. For a pass, of up to 256 keys:
//
//     copies       16 bytes each, of keys and values as they are stored, to shared memory
//     scores       a thread has a key, and multiplies its columns with all queries
//     maxima       of each tile of 32 keys, a warp; then each thread takes that of its key's tile and all before it
//     outputs      a thread has a column of a query: o = o 2^(m - m') + p value, and l the same with 1 for the value
//
// The block may also do what comes before the attention (paged_write.cu): it rotates queries and the new key, and
// writes the new key and value to their page. All else that it reads was there when the step began. So it is asked for
// before the launch in front of this one, the product that makes queries, keys and values, has ended
// (early_launch.cuh).
//
// A block runs most of its instructions once, and has to fetch them: on an H100 the scores of 80 keys took 4300
// clocks, of which the multiplications are a few hundred, in a kernel of 74 KB. So there are kernels for 1, 4 and 8
// queries, and loops that most blocks go through once or twice are not unrolled: 34 KB.
#pragma once

#include "layers/early_launch.cuh"
#include "layers/flash_attention/paged_tile.cuh"
#include "layers/ptx.cuh"
#include "layers/rope.cuh"

namespace {

constexpr int kDecodeThreads = 256, kTileKeys = kWarp;
constexpr int kMostQueries = 8, kMostItems = 512;  // queries of a block, and times columns
constexpr int kPassBytes = 72 << 10;               // of keys and values in shared memory

// The step's new keys and values, which are in no page yet. keys == nullptr: they are, and queries have been rotated.
template <class Number>
struct NewRows {
    const Number *keys, *values;
    int64_t key_stride, value_stride, key_head_stride, value_head_stride;
    const int32_t *rows, *positions;  // rows: of the pool
    const float* table;               // of rotations, or nullptr
    int64_t n_positions;
    bool neighbours;
};

struct DecodeShape {
    PagedShape s;
    int queries, pass;           // most queries of a block; keys of a pass
    int key_pitch, value_pitch;  // bytes of a row in shared memory
};

// Shared memory. Items are columns of queries: item r Dv + c.
struct DecodeShared {
    int64_t* rows;                      // (pass): of the pool
    char *keys, *values;                // (pass) rows
    float *q, *probs, *tile_max, *max;  // (queries, D), (queries, pass), (queries, tiles), (queries)
    float *key_scales, *value_scales;   // (pass): of codes
    float *o, *sum;                     // (items): of the split that is being read
    float *all_o, *all_sum, *all_max;   // (items): of the splits before it

    __device__ __forceinline__ explicit DecodeShared(const DecodeShape& d) {
        char* next = dynamic_shared<char>();
        const auto bytes = [&](int n) { return (next += n) - n; };
        const auto floats = [&](int n) { return reinterpret_cast<float*>(bytes(4 * n)); };
        keys = bytes(d.pass * d.key_pitch), values = bytes(d.pass * d.value_pitch);
        rows = reinterpret_cast<int64_t*>(bytes(8 * d.pass));
        q = floats(d.queries * d.s.D), probs = floats(d.queries * d.pass);
        tile_max = floats(d.queries * d.pass / kTileKeys), max = floats(d.queries);
        key_scales = floats(d.pass), value_scales = floats(d.pass);
        const int items = d.queries * d.s.Dv;
        o = floats(items), sum = floats(items), all_o = floats(items), all_sum = floats(items), all_max = floats(items);
    }
    static size_t bytes(const DecodeShape& d) {
        const int floats = d.queries * (d.s.D + d.pass + d.pass / kTileKeys + 1 + 5 * d.s.Dv) + 2 * d.pass;
        return static_cast<size_t>(d.pass * (d.key_pitch + d.value_pitch + 8) + 4 * floats);
    }
};

// The key head and query heads of a block, of a chunk of one row.
struct DecodeBlock {
    PagedChunk chunk;
    int head, first, n, begin, end;  // first: query head; [begin, end): keys that it sees
    __device__ __forceinline__ DecodeBlock(const PagedChunk& its_chunk, int y, const DecodeShape& d)
        : chunk(its_chunk) {
        const int tiles = (d.s.group + d.queries - 1) / d.queries, in_group = y % tiles * d.queries;
        head = y / tiles, first = head * d.s.group + in_group, n = min(d.queries, d.s.group - in_group);
        begin = max(0, chunk.position - d.s.window + 1), end = chunk.position + 1;
    }
};

// Starts the copies of n keys and values, those of the pool; the pass's rows are in at.rows.
template <class Stored>
__device__ __forceinline__ void copy_rows(const DecodeShared& at, const Pool<Stored>& pool, int n,
                                          const DecodeShape& d) {
    constexpr int kPack = 16 / sizeof(Stored);
    const int packs = d.s.D / kPack;
    const int64_t to_values = static_cast<int64_t>(d.s.values) * d.s.P * d.s.D;
    for (int i = threadIdx.x; i < n * packs; i += kDecodeThreads) {
        const int j = i / packs, pack = i % packs;
        const Stored* key = pool.numbers + at.rows[j] * d.s.D + pack * kPack;
        cp_async_16(at.keys + j * d.key_pitch + pack * 16, key);
        cp_async_16(at.values + j * d.value_pitch + pack * 16, key + to_values);
    }
    cp_async_commit();
    if constexpr (kQuantised<Stored>)
        for (int j = threadIdx.x; j < n; j += kDecodeThreads) {
            at.key_scales[j] = pool.scales[at.rows[j]];
            at.value_scales[j] = pool.scales[at.rows[j] + static_cast<int64_t>(d.s.values) * d.s.P];
        }
}

// Two columns of a head, which are rotated together.
template <class Number>
struct ColumnPair {
    int first = 0, second = 0;
    Number x{}, y{};

    __device__ __forceinline__ void load(const Number* head, int i, int D, bool neighbours) {
        first = neighbours ? 2 * i : i, second = neighbours ? 2 * i + 1 : i + D / 2;
        x = head[first], y = head[second];
    }
    __device__ __forceinline__ void rotate(float cosine, float sine) {
        float x1 = to_float(x), x2 = to_float(y);
        rotate_point(x1, x2, cosine, sine);
        x = from_float<Number>(x1), y = from_float<Number>(x2);
    }
    template <class To>
    __device__ __forceinline__ void store(To* head) const {
        if constexpr (std::is_same_v<To, float>) head[first] = to_float(x), head[second] = to_float(y);
        else head[first] = x, head[second] = y;
    }
};

// What a thread has of the block's queries, and of the chunk's new key and value: a pair of columns of each, or none.
// Where they go, and how far they are rotated, was there when the step began. The numbers are asked for all at a time.
template <class Number>
struct NewPairs {
    static_assert(kMostItems <= 2 * kDecodeThreads);
    int i;  // of the D / 2 pairs of a head
    float cosine = 1, sine = 0;
    int64_t pool_row = 0;
    bool has_query = false, has_key = false;
    ColumnPair<Number> query, key, value;

    __device__ __forceinline__ NewPairs(const DecodeBlock& block, const NewRows<Number>& fresh, const DecodeShape& d)
        : i(static_cast<int>(threadIdx.x) % (d.s.D / 2)) {
        const PagedShape& s = d.s;
        if (!fresh.keys) return;
        const int64_t row = fresh.rows[block.chunk.row];
        if (row < 0 || row >= static_cast<int64_t>(s.n_pages) * s.P) __trap();
        pool_row = (row / s.P * s.page_heads + block.head) * s.P + row % s.P;
        if (!fresh.table) return;
        const int64_t position = fresh.positions[block.chunk.row];
        if (position < 0 || position >= fresh.n_positions) __trap();
        cosine = fresh.table[position * s.D + i], sine = fresh.table[position * s.D + s.D / 2 + i];
    }
    __device__ __forceinline__ void load_query(const DecodeBlock& block, Heads<const Number> q, bool neighbours,
                                               const DecodeShape& d) {
        const int r = static_cast<int>(threadIdx.x) / (d.s.D / 2);
        if ((has_query = r < block.n))
            query.load(q.head(0, block.first + r) + block.chunk.row * q.token_stride, i, d.s.D, neighbours);
    }
    __device__ __forceinline__ void load_key_and_value(const DecodeBlock& block, const NewRows<Number>& fresh,
                                                       const DecodeShape& d) {
        if (!(has_key = static_cast<int>(threadIdx.x) < d.s.D / 2)) return;
        const int64_t row = block.chunk.row;
        key.load(fresh.keys + row * fresh.key_stride + block.head * fresh.key_head_stride, i, d.s.D, fresh.neighbours);
        value.load(fresh.values + row * fresh.value_stride + block.head * fresh.value_head_stride, i, d.s.D, true);
    }
    __device__ __forceinline__ void store_query(const DecodeShared& at, bool rotates, const DecodeShape& d) {
        if (!has_query) return;
        if (rotates) query.rotate(cosine, sine);
        query.store(at.q + static_cast<int>(threadIdx.x) / (d.s.D / 2) * d.s.D);
    }
    // To place j of the pass, and, `stores`, to the pool.
    __device__ __forceinline__ void store_key_and_value(const DecodeShared& at, Number* pool, bool rotates, int j,
                                                        bool stores, const DecodeShape& d) {
        if (!has_key) return;
        if (rotates) key.rotate(cosine, sine);
        key.store(reinterpret_cast<Number*>(at.keys + j * d.key_pitch));
        value.store(reinterpret_cast<Number*>(at.values + j * d.value_pitch));
        if (!stores) return;
        Number* const pool_key = pool + pool_row * d.s.D;
        key.store(pool_key);
        value.store(pool_key + static_cast<int64_t>(d.s.values) * d.s.P * d.s.D);
    }
};

// x[r] = scale log2(e) dot(query r, key j): a sum in ascending order of the columns.
template <class Stored, int kQueries>
__device__ __forceinline__ void compute_scores(float (&x)[kQueries], const DecodeShared& at, int n_queries, int j,
                                               const DecodeShape& d) {
    constexpr int kPack = 16 / sizeof(Stored);
    const Stored* key = reinterpret_cast<const Stored*>(at.keys + j * d.key_pitch);
    for (int c = 0; c < d.s.D; c += kPack) {
        const Packed<Stored> pack = load_packed(key + c);
        float k[kPack];
        for (int l = 0; l < kPack; ++l) k[l] = to_float(pack.v[l]);
        if constexpr (kQuantised<Stored>)
            for (int l = 0; l < kPack; ++l) k[l] *= at.key_scales[j];
#pragma unroll
        for (int r = 0; r < kQueries; ++r)
            if (r < n_queries)
                for (int l = 0; l < kPack; ++l) x[r] = fmaf(k[l], at.q[r * d.s.D + c + l], x[r]);
    }
}

// The probabilities of n keys, as powers of two below the maximum after their tile.
template <int kQueries, class Stored>
__device__ __forceinline__ void compute_decode_probs(const DecodeShared& at, int n_queries, int n,
                                                     const DecodeShape& d) {
    const int j = static_cast<int>(threadIdx.x), tile = j / kTileKeys, tiles = d.pass / kTileKeys;
    float x[kQueries] = {};
    if (j < n) compute_scores<Stored>(x, at, n_queries, j, d);
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
        if (r >= n_queries) continue;
        x[r] = j < n ? __fmul_rn(x[r], d.s.factor) : kMasked;
        const float whole = rintf(warp_max(x[r]));
        if (j % kTileKeys == 0 && tile < tiles) at.tile_max[r * tiles + tile] = whole;
    }
    __syncthreads();  // the tiles' maxima are there
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
        if (r >= n_queries || j >= n) continue;
        float max = at.max[r];
#pragma unroll 1
        for (int w = 0; w <= tile; ++w) max = at.tile_max[r * tiles + w] > max ? at.tile_max[r * tiles + w] : max;
        at.probs[r * d.pass + j] = exp2_below(x[r], max);
    }
    __syncthreads();  // the probabilities are there
}

// Adds n keys to o and sum of each item: sums in ascending order of the keys.
template <class Stored>
__device__ __forceinline__ void add_decode_values(const DecodeShared& at, int n_queries, int n, const DecodeShape& d) {
    const int Dv = d.s.Dv, tiles = d.pass / kTileKeys;
#pragma unroll 1
    for (int item = threadIdx.x; item < n_queries * Dv; item += kDecodeThreads) {
        const int r = item / Dv, c = item % Dv;
        float o = at.o[item], sum = at.sum[item], max = at.max[r];
#pragma unroll 1
        for (int tile = 0; tile * kTileKeys < n; ++tile) {
            const float its_max = at.tile_max[r * tiles + tile], larger = its_max > max ? its_max : max;
            const float factor = power_of_two(max - larger);
            o *= factor, sum *= factor, max = larger;
            const int j0 = tile * kTileKeys, end = min(n, j0 + kTileKeys);
            const float* probs = at.probs + r * d.pass;
#pragma unroll 8
            for (int j = j0; j < end; ++j) {
                float value = to_float(reinterpret_cast<const Stored*>(at.values + j * d.value_pitch)[c]);
                if constexpr (kQuantised<Stored>) value *= at.value_scales[j];
                o = fmaf(value, probs[j], o);
                sum += probs[j];
            }
        }
        at.o[item] = o, at.sum[item] = sum;
    }
    __syncthreads();  // the tiles' maxima have been read, keys and values too
#pragma unroll 1
    for (int r = threadIdx.x; r < n_queries; r += kDecodeThreads)
#pragma unroll 1
        for (int tile = 0; tile * kTileKeys < n; ++tile)
            at.max[r] = at.tile_max[r * tiles + tile] > at.max[r] ? at.tile_max[r * tiles + tile] : at.max[r];
}

// Block (chunk, key head and queries, split). Where splits have no blocks of their own, one does all. It has at most
// kQueries queries. Without the 1, blocks of a multiprocessor, ptxas stops at 64 or 128 registers, and spills some.
template <int kQueries, class Number, class Stored>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    paged_decode_kernel(Heads<Number> out, float* partial, Heads<const Number> q, Pool<Stored> pool,
                        const int32_t* page_table, const int4* chunks, NewRows<Number> fresh, DecodeShape d) {
    let_next_start();
    const PagedShape& s = d.s;
    if (!fresh.keys) wait_for_previous();
    const DecodeBlock block(load_chunk_of(chunks, static_cast<int>(blockIdx.x), s), static_cast<int>(blockIdx.y), d);
    if (block.chunk.n != 1) __trap();
    const DecodeShared at(d);
    const int32_t* pages = page_table + int64_t{block.chunk.sequence} * s.table_columns;
    const int first_split = block.begin / s.split, end_split = (block.end - 1) / s.split + 1;
    const int z = static_cast<int>(blockIdx.z);
    const bool nothing = s.parallel && (z < first_split || z >= end_split);
    const int n_items = block.n * s.Dv;
    NewPairs<Number> mine(block, fresh, d);
    const bool rotates = fresh.keys && fresh.table;
    bool waited = false;
#pragma unroll 1
    for (int split = s.parallel ? z : first_split; !nothing && split < (s.parallel ? z + 1 : end_split); ++split) {
        const int begin = max(block.begin, split * s.split), end = min(block.end, (split + 1) * s.split);
#pragma unroll 1
        for (int i = threadIdx.x; i < n_items; i += kDecodeThreads) at.o[i] = 0.0f, at.sum[i] = 0.0f;
#pragma unroll 1
        for (int r = threadIdx.x; r < block.n; r += kDecodeThreads) at.max[r] = kNothingYet;
#pragma unroll 1
        for (int s0 = begin; s0 < end; s0 += d.pass) {
            const int n = min(d.pass, end - s0);
            const bool has_new = fresh.keys && s0 + n == block.end;
#pragma unroll 1
            for (int j = threadIdx.x; j < n; j += kDecodeThreads) {
                const int position = s0 + j, page = pages[position / s.P];
                if (page < 0 || page >= s.n_pages) __trap();
                at.rows[j] = (int64_t{page} * s.page_heads + block.head) * s.P + position % s.P;
            }
            __syncthreads();  // the rows are there
            copy_rows(at, pool, has_new ? n - 1 : n, d);
            const bool has_queries = waited;
            if (!waited) {
                wait_for_previous();
                waited = true;
                mine.load_query(block, q, fresh.neighbours, d);
            }
            if (has_new) mine.load_key_and_value(block, fresh, d);
            if (!has_queries) mine.store_query(at, rotates, d);
            if constexpr (std::is_same_v<Number, Stored>)
                if (has_new) mine.store_key_and_value(at, pool.numbers, rotates, n - 1, block.first % s.group == 0, d);
            cp_async_wait<0>();
            __syncthreads();  // keys, values and queries are there
            compute_decode_probs<kQueries, Stored>(at, block.n, n, d);
            add_decode_values<Stored>(at, block.n, n, d);
        }
        __syncthreads();  // the split's maxima are there
#pragma unroll 1
        for (int i = threadIdx.x; i < n_items; i += kDecodeThreads) {
            const int r = i / s.Dv, c = i % s.Dv;
            if (s.parallel) {
                float* its = partial + partial_offset(block.chunk.row, block.first + r, z, s);
                if (c == 0) its[0] = at.max[r], its[1] = at.sum[i];
                its[2 + c] = at.o[i];
                continue;
            }
            const Join join(split == first_split ? kNothingYet : at.all_max[i], at.max[r]);
            const float before = split == first_split ? 0.0f : at.all_o[i],
                        sum_before = split == first_split ? 0.0f : at.all_sum[i];
            at.all_max[i] = join.max;
            at.all_o[i] = before * join.old_factor + at.o[i] * join.factor;
            at.all_sum[i] = sum_before * join.old_factor + at.sum[i] * join.factor;
        }
        __syncthreads();  // maxima have been read
    }
    if (!waited) wait_for_previous();
    if (s.parallel) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < n_items; i += kDecodeThreads) {
        const int r = i / s.Dv, c = i % s.Dv;
        out.head(0, block.first + r)[block.chunk.row * out.token_stride + c] =
            from_float<Number>(at.all_o[i] * inverse_sum(at.all_sum[i]));
    }
}

}  // namespace
