// dev/decode_attention.cu: one new token per sequence attends to its cache, five times.
//
//   out[i,h] = sum over s < T of softmax(q[i,h] . key_s / sqrt(D)) value_s          keys and values of head h / (H/K)
//
// N sequences with T cached tokens each, H = 8 query heads over K = 2 key/value heads of D = 64 columns. A key takes
// 128 flops for each query that sees it, and 128 or 256 bytes. Training uses it for thousands of queries, a decode step
// for H/K: so the limit is not arithmetic, but reading the whole cache once. The rungs differ in where the rows of a
// sequence lie, in how many blocks read them at the same time, and in how often they are read:
//
//   rung         the rows of a sequence      blocks                        each key is read
//   contiguous   T_max in one piece          N H                           H/K times
//   paged        P at a time, anywhere       N H                           H/K times
//   split        P at a time, anywhere       N H T/256                     H/K times
//   shared       P at a time, anywhere       N K T/256                     once
//   product      P at a time, anywhere       N K T/256 (f32, CPU: N K)     once
//
// On the CPU device a thread that waits at a barrier costs more than on a GPU, and the first four rungs, which have 64
// threads a block, are much slower than the product, which has one there. What they show is the GPU's reasons.
//
//   run      make dev && build/cpu/dev/decode_attention          (on a GPU build/cuda/dev/decode_attention)
//            build/cpu/dev/decode_attention --check | --size 4x1000 | --dtype bf16 | --rung 3
//   debug    make DEVICE=cpu debug FILES=dev/decode_attention.cu PROGRAM=dev/decode_attention &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/decode_attention --check
#include "dev/attention.cuh"

namespace {

constexpr int kH = 8, kK = 2, kGroup = kH / kK;
constexpr int kPage = 16;                 // rows of a page
constexpr int kSplit = 256;               // keys that one block reads in rungs 3 and 4
constexpr int kThreads = kD, kKeys = kD;  // a thread has one key of a tile, then one column

struct Problem {
    Tensor out, q;            // (N, H, D)
    Tensor cache;             // (N, 2 K, T, D): each head's rows in one piece
    Tensor pool, page_table;  // (pages, 2 K, P, D), (N, pages of a sequence)
    Tensor chunks;            // of the product's step
    Tensor partial;           // (N, H, splits, 2 + D): m, l, o
    Tensor scratch;
    int64_t N;
    int T;
};

// Where row s of head `head` of sequence i begins, in elements.
struct Contiguous {
    int T;
    __device__ __forceinline__ int64_t row(int64_t i, int head, int s) const {
        return ((i * 2 * kK + head) * T + s) * kD;
    }
};
struct Paged {
    const int32_t* page_table;
    int columns;
    __device__ __forceinline__ int64_t row(int64_t i, int head, int s) const {
        const int64_t page = page_table[i * columns + s / kPage];
        return ((page * 2 * kK + head) * kPage + s % kPage) * kD;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// A tile of 64 keys for kQueries queries that share them, by 64 threads. First each thread has a key, computes its
// scores with all queries and leaves their exponentials in shared memory. Then each has a column of the values, whose
// 64 rows it reads one after the other: neighbouring threads read neighbouring numbers.
//
//     m' = max(m, scores)     l <- l exp(m - m') + sum_s exp(S_s - m')     o <- o exp(m - m') + sum_s exp(S_s - m') v_s

template <int kQueries>
struct Softmax {  // of each query; o: this thread's column
    float m[kQueries], l[kQueries], o[kQueries];
    __device__ __forceinline__ Softmax() {
        for (int g = 0; g < kQueries; ++g) m[g] = -FLT_MAX, l[g] = 0.0f, o[g] = 0.0f;
    }
};

template <int kQueries>
struct TileShared {
    float q[kQueries][kD], probs[kQueries][kKeys], scratch[kWarp];
};

template <class Number>
__device__ __forceinline__ void load_row(float (&to)[kD], const Number* from) {
    for (int d = 0; d < kD; d += Packed<Number>::n) {
        const Packed<Number> pack = load_packed(from + d);
        for (int l = 0; l < Packed<Number>::n; ++l) to[d + l] = to_float(pack.v[l]);
    }
}

// The keys [first, end) of sequence i.
template <class Number, int kQueries, class Rows>
__device__ __forceinline__ void read_keys(Softmax<kQueries>& softmax, TileShared<kQueries>& shared, const Number* cache,
                                          const Rows& rows, int64_t i, int head, int first, int end) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int tile = first; tile < end; tile += kKeys) {
        const int n = min(kKeys, end - tile);
        float key[kD];
        if (thread < n) load_row(key, cache + rows.row(i, head, tile + thread));
        for (int g = 0; g < kQueries; ++g) {
            float score = -FLT_MAX;
            if (thread < n) {
                score = 0.0f;
                for (int d = 0; d < kD; ++d) score = fmaf(shared.q[g][d], key[d], score);
                score *= kScale;
            }
            const float larger = fmaxf(softmax.m[g], block_reduce<Max>(score, shared.scratch));
            const float shrink = __expf(softmax.m[g] - larger);
            shared.probs[g][thread] = thread < n ? __expf(score - larger) : 0.0f;
            softmax.m[g] = larger, softmax.l[g] *= shrink, softmax.o[g] *= shrink;
            __syncthreads();  // the probabilities are there; and scratch has been read
        }
        for (int s = 0; s < n; ++s) {
            const float value = to_float(cache[rows.row(i, kK + head, tile + s) + thread]);
            for (int g = 0; g < kQueries; ++g) {
                softmax.l[g] += shared.probs[g][s];
                softmax.o[g] = fmaf(shared.probs[g][s], value, softmax.o[g]);
            }
        }
        __syncthreads();  // all have read the probabilities
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// 1. Contiguous: each sequence has room for the longest one, in one piece. A block (query head, sequence) reads all
// keys of its head.
//
// How long a sequence will be is not known when its memory is taken. So most of it stays empty: with lengths as they
// are in practice less than 40 % of a cache of this kind holds tokens, and that many fewer requests run at a time.
//
// 2. Paged (Kwon et al. 2023, arXiv:2309.06180): the same kernel, which looks up where a row begins. A page's 16 rows
// of one head lie side by side, 2 or 4 KB: long enough for the memory. The look-up is one number for 16 keys.

template <class Number, class Rows>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(Number* out, const Number* q, const Number* cache, Rows rows, int T) {
    __shared__ TileShared<1> shared;
    const int h = static_cast<int>(blockIdx.x);
    const int64_t i = blockIdx.y, at = (i * kH + h) * kD + threadIdx.x;
    shared.q[0][threadIdx.x] = to_float(q[at]);
    __syncthreads();
    Softmax<1> softmax;
    read_keys<Number>(softmax, shared, cache, rows, i, h / kGroup, 0, T);
    out[at] = from_float<Number>(softmax.o[0] / softmax.l[0]);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. Split: a GPU has a hundred multiprocessors, a batch of one has 8 blocks. So the keys are cut every 256 positions,
// and each split has a block, which leaves its m, l and o. A second kernel joins them, as tiles are joined:
//
//     M = max m_i      out = sum_i o_i exp(m_i - M) / sum_i l_i exp(m_i - M)
//
// The places where the keys are cut do not depend on how many blocks there are, nor the order of the sum: the same row
// has the same bits in every batch.
//
// 4. Shared: the H/K query heads of a group see the same keys. A block has all of them, so that each key is loaded once
// for the group. This is what grouped-query attention is for: the cache is H/K times smaller, but only a kernel that
// shares what it loads is H/K times faster.

template <class Number, int kQueries>
__global__ void __launch_bounds__(kThreads)
    decode_split_kernel(float* partial, const Number* q, const Number* pool, Paged rows, int T) {
    __shared__ TileShared<kQueries> shared;
    const int h = static_cast<int>(blockIdx.x) * kQueries, split = static_cast<int>(blockIdx.z);
    const int64_t i = blockIdx.y;
    for (int g = 0; g < kQueries; ++g) shared.q[g][threadIdx.x] = to_float(q[(i * kH + h + g) * kD + threadIdx.x]);
    __syncthreads();
    Softmax<kQueries> softmax;
    read_keys<Number>(softmax, shared, pool, rows, i, h / kGroup, split * kSplit, min(T, (split + 1) * kSplit));
    for (int g = 0; g < kQueries; ++g) {
        float* its = partial + ((i * kH + h + g) * gridDim.z + split) * (2 + kD);
        if (threadIdx.x == 0) its[0] = softmax.m[g], its[1] = softmax.l[g];
        its[2 + threadIdx.x] = softmax.o[g];
    }
}

// Block (query head, sequence), a thread has a column.
template <class Number>
__global__ void __launch_bounds__(kThreads) join_kernel(Number* out, const float* partial, int n_splits) {
    const int64_t row = blockIdx.y * static_cast<int64_t>(kH) + blockIdx.x;
    const float* its = partial + row * n_splits * (2 + kD);
    float m = -FLT_MAX, l = 0.0f, o = 0.0f;
    for (int split = 0; split < n_splits; ++split) m = fmaxf(m, its[split * (2 + kD)]);
    for (int split = 0; split < n_splits; ++split) {
        const float *part = its + split * (2 + kD), factor = __expf(part[0] - m);
        l = fmaf(part[1], factor, l);
        o = fmaf(part[2 + threadIdx.x], factor, o);
    }
    out[row * kD + threadIdx.x] = from_float<Number>(o / l);
}

Paged rows_of(const Problem& p) { return {p.page_table.ptr<int32_t>(), narrow(p.page_table.shape[1], "pages")}; }
dim3 grid_of(const Problem& p, int heads, int64_t splits) {
    return dim3(static_cast<unsigned>(heads), static_cast<unsigned>(p.N), static_cast<unsigned>(splits));
}

template <class Number>
void launch_contiguous(const Problem& p, cudaStream_t stream) {
    decode_kernel<Number, Contiguous><<<grid_of(p, kH, 1), kThreads, 0, stream>>>(
        p.out.ptr<Number>(), p.q.ptr<Number>(), p.cache.ptr<Number>(), Contiguous{p.T}, p.T);
    cudaCheckLaunch();
}
template <class Number>
void launch_paged(const Problem& p, cudaStream_t stream) {
    decode_kernel<Number, Paged><<<grid_of(p, kH, 1), kThreads, 0, stream>>>(p.out.ptr<Number>(), p.q.ptr<Number>(),
                                                                             p.pool.ptr<Number>(), rows_of(p), p.T);
    cudaCheckLaunch();
}
template <class Number, int kQueries>
void launch_split(const Problem& p, cudaStream_t stream) {
    const int64_t n_splits = p.partial.shape[2];
    decode_split_kernel<Number, kQueries><<<grid_of(p, kH / kQueries, n_splits), kThreads, 0, stream>>>(
        p.partial.ptr<float>(), p.q.ptr<Number>(), p.pool.ptr<Number>(), rows_of(p), p.T);
    cudaCheckLaunch();
    join_kernel<Number><<<grid_of(p, kH, 1), kThreads, 0, stream>>>(p.out.ptr<Number>(), p.partial.ptr<float>(),
                                                                    static_cast<int>(n_splits));
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. The product (layers/flash_attention/paged_attention.cu): the same, for any head size, window and page size, for
// several new tokens of a sequence at a time (a chunk of a prompt), and for caches of 8-bit codes. Powers of two
// instead of exponentials, with a maximum that is a whole number: joining splits rounds only where sums are added.

void launch_product(const Problem& p, cudaStream_t stream) {
    PagedStep step;
    step.pool = p.pool.view({p.pool.shape[0], kPage, 2 * kK * kD}), step.page_table = p.page_table;
    step.chunks = p.chunks;
    const auto heads = [&](const Tensor& x) { return HeadColumns{x.view({1, p.N, kH * kD}), kH, kD}; };
    paged_attention_forward(heads(p.out), heads(p.q), kK, step, kScale, 0, p.scratch, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The ladder: reference values, tolerances, and the list of rungs

// The pages of all sequences in turn, the last page of the pool first.
void fill_pages(const Problem& p, const std::vector<float>& cache) {
    const int64_t columns = p.page_table.shape[1], n_pages = p.pool.shape[0];
    std::vector<int32_t> table(static_cast<size_t>(p.N * columns)), chunks;
    std::vector<float> pool(static_cast<size_t>(p.pool.n()));
    for (int64_t i = 0; i < p.N; ++i) {
        for (int64_t c = 0; c < columns; ++c) {
            const int64_t page = n_pages - 1 - (c * p.N + i), rows = std::min<int64_t>(kPage, p.T - c * kPage);
            table[static_cast<size_t>(i * columns + c)] = static_cast<int32_t>(page);
            for (int64_t head = 0; head < 2 * kK; ++head)
                std::copy_n(&cache[static_cast<size_t>(((i * 2 * kK + head) * p.T + c * kPage) * kD)], rows * kD,
                            &pool[static_cast<size_t>((page * 2 * kK + head) * kPage * kD)]);
        }
        for (int64_t x : {i, int64_t{1}, i, int64_t{p.T} - 1}) chunks.push_back(static_cast<int32_t>(x));
    }
    from_floats(p.pool, pool);
    copy_to_device(p.page_table, table.data());
    copy_to_device(p.chunks, chunks.data());
}

void climb(Ladder& ladder) {
    const int64_t N = ladder.size(0), T = ladder.size(1), columns = ceil_div(T, kPage), n_splits = ceil_div(T, kSplit);
    check(N < 65536 && n_splits < 65536, "at most 65535 sequences of 16776960 tokens are possible");
    const DType dtype = ladder.dtype();
    const Tensor out = ladder.output({N, kH, kD}, dtype), q = ladder.normal({N, kH, kD}, kQStd),
                 cache = ladder.normal({N, 2 * kK, T, kD});
    const Problem p{out,
                    q,
                    cache,
                    ladder.take(dtype, {N * columns, 2 * kK, kPage, kD}),
                    ladder.take(DType::i32, {N, columns}),
                    ladder.take(DType::i32, {N, 4}),
                    ladder.take(DType::f32, {N, kH, n_splits, 2 + kD}),
                    ladder.take(DType::f32, {1 + paged_attention_scratch_n(N, kH, kD, columns * kPage)}),
                    N,
                    narrow(T, "tokens")};
    const std::vector<float> queries = ladder.host(q), rows = ladder.host(cache);
    fill_pages(p, rows);

    std::vector<double> expected(static_cast<size_t>(out.n())), sizes(expected.size()), P;
    for (int64_t i = 0; i < N; ++i)
        for (int64_t h = 0; h < kH; ++h) {
            const float* key = &rows[static_cast<size_t>((i * 2 * kK + h / kGroup) * T * kD)];
            const float *value = key + kK * T * kD, *query = &queries[static_cast<size_t>((i * kH + h) * kD)];
            double total = 0;
            P.assign(static_cast<size_t>(T), 0.0);
            for (int64_t s = 0; s < T; ++s)
                total += P[static_cast<size_t>(s)] = std::exp(kScale * dot(query, key + s * kD));
            for (double& probability : P) probability /= total;
            for (int64_t s = 0; s < T; ++s)
                for (int64_t d = 0; d < kD; ++d) {
                    const size_t at = static_cast<size_t>((i * kH + h) * kD + d);
                    expected[at] += P[static_cast<size_t>(s)] * value[s * kD + d];
                    sizes[at] += P[static_cast<size_t>(s)] * std::abs(value[s * kD + d]);
                }
        }
    // The probabilities' error, that of the sum over keys, and one rounding.
    const double u = unit_roundoff(dtype), relative = u + probability_error(T) + static_cast<double>(T) * 0x1p-24;
    ladder.table("attention of one token per sequence", Limit::copy, static_cast<double>(cache.bytes()));
    ladder.expects({{"out", out, std::move(expected), relative, u * smallest_normal(dtype), std::move(sizes)}});
    dispatch(dtype, [&](auto zero) {
        using Number = decltype(zero);
        ladder.rung("contiguous", "a block per query head reads all keys",
                    [&](cudaStream_t s) { launch_contiguous<Number>(p, s); });
        ladder.rung("paged", "a page table says where a row begins",
                    [&](cudaStream_t s) { launch_paged<Number>(p, s); });
        ladder.rung("split", "a block for every 256 keys, then one that joins them",
                    [&](cudaStream_t s) { launch_split<Number, 1>(p, s); });
        ladder.rung("shared", "each key is loaded once for the heads of a group",
                    [&](cudaStream_t s) { launch_split<Number, kGroup>(p, s); });
        ladder.rung("product", "chunks of prompts, windows, any sizes; 8-bit caches",
                    [&](cudaStream_t s) { launch_product(p, s); });
    });
}

}  // namespace

int main(int argc, char** argv) {
    return run_ladder(argc, argv,
                      {.name = "decode_attention",
                       .sizes = "sequences x tokens",
                       .cpu_size = {4, 1024},
                       .gpu_size = {16, 8192},
                       .check_sizes = {{1, 1}, {2, 37}, {3, 300}},
                       .dtypes = {DType::f32, DType::bf16, DType::f16},
                       .climb = climb});
}
