// Latent attention: MLA over a cache of latents, in the absorbed form.
//                                                           (DeepSeek-V2 2024, arXiv:2405.04434, section 2.1)
//
// In training MLA expands every latent c_s (R numbers) to the keys and values of all heads, k_s = Wk c_s and v_s = Wv
// c_s. When one token per step is generated, every step would expand the whole context again. But both are linear, so
//
//   q . k_s          =  q . (Wk c_s)        =  (Wk^T q) . c_s           Wk is applied to the query instead
//   sum_s p_s v_s    =  sum_s p_s (Wv c_s)  =  Wv (sum_s p_s c_s)       Wv is applied after the sum instead
//
// The H heads then are H query heads over one key/value head: the cache row [c_s | r_s], whose first R columns are the
// value too. Per token and layer it has R + Dr numbers where expanded ones are H (D + Dv): 576 instead of 40960 in
// DeepSeek-V3.
//
//   1. fold       query = [Wk^T q | rotated part of q]                              R + Dr
//   2. the cache  softmax(scale query . row) over the rows seen, tile by tile, with the running maximum m, sum l and
//                 unfinished output o of flash_attention.cu:
//                 o = o exp(m - m') + sum over the tile of exp(score - m') c_s
//   3. unfold     out = Wv o / l                                                    Dv
//
// As plain loops, for one head of one token:
//
//   query = Wk^T q[0 ... Dn)                                            # R numbers
//   for s seen:  score[s] = scale * (dot(query, c[s]) + dot(q[Dn ...), r[s]))
//   p = softmax(score)
//   o = sum over s of p[s] * c[s]                                       # R numbers
//   out = Wv o                                                          # Dv numbers
//
// One block does all three steps for one head of one token: between them nothing leaves shared memory. H blocks read
// the same cache rows; all but the first find them in the second-level cache. FLOPs 2 R (Dn + Dv) + 2 S (2 R + Dr) per
// head, S rows seen. That is more than the expanded form's 2 S (D + Dv), which is why only decoding uses this form:
// decoding is limited by the bytes it reads, and here they are 71 times fewer.
#include "layers/chunk.cuh"
#include "layers/layers.h"

#include <numeric>

namespace {

constexpr int kKeys = 128;  // rows of a tile = threads of a block: each thread forms one score

struct LatentShape {
    int64_t R, Dr, Dn, Dv;
    int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
    int64_t cache_rows;  // of a sequence
    int64_t first;       // position of token 0
    float scale;
};

// x . row over n columns, in chunks.
template <int kN, class Number>
__device__ __forceinline__ float dot_row(const float* x, const Number* row, int64_t n) {
    float sum[kN] = {};
    for (int64_t c = 0; c < n; c += kN) {
        float a[kN], b[kN];
        load_chunk(a, x + c, n - c);
        load_chunk(b, row + c, n - c);
        for (int l = 0; l < kN; ++l) sum[l] = fmaf(a[l], b[l], sum[l]);
    }
    return fold_chunk<Sum>(sum);
}

// Block (h, t, b). Shared: query (R + Dr), o (R), probs (kKeys).
template <class Number, int kN>
__global__ void __launch_bounds__(kKeys)
    latent_attention_kernel(Number* out, const Number* q, const Number* cache, const Number* kv_b, LatentShape s) {
    __shared__ float scratch[2][kWarp];
    const int64_t R = s.R, W = s.R + s.Dr, h = blockIdx.x, t = blockIdx.y;
    const int64_t token = blockIdx.z * static_cast<int64_t>(gridDim.y) + t;
    float *query = dynamic_shared<float>(), *o = query + W, *probs = o + R;
    const Number *wk = kv_b + h * (s.Dn + s.Dv) * R, *wv = wk + s.Dn * R;
    q += token * s.q_token_stride + h * s.q_head_stride;
    out += token * s.out_token_stride + h * s.out_head_stride;
    cache += blockIdx.z * s.cache_rows * W;

    // 1. fold. Each thread has chunks of columns of its own, here and in o.
    for (int64_t r = threadIdx.x * kN; r < R; r += kKeys * kN) {
        float x[kN] = {}, zero[kN] = {}, w[kN];
        for (int64_t d = 0; d < s.Dn; ++d) {
            load_chunk(w, wk + d * R + r, R - r);
            for (int l = 0; l < kN; ++l) x[l] = fmaf(to_float(q[d]), w[l], x[l]);
        }
        store_chunk(query + r, x, R - r);
        store_chunk(o + r, zero, R - r);
    }
    for (int64_t d = threadIdx.x; d < s.Dr; d += kKeys) query[R + d] = to_float(q[s.Dn + d]);
    __syncthreads();  // the whole query is there

    // 2. the cache
    float m = -INFINITY, total = 0.0f;
    const int64_t n_seen = s.first + t + 1;
    for (int64_t tile = 0; tile < n_seen; tile += kKeys) {
        const int64_t key = tile + threadIdx.x;
        const float score = key < n_seen ? s.scale * dot_row<kN>(query, cache + key * W, W) : -INFINITY;
        const float next = fmaxf(m, block_reduce<Max>(score, scratch[0]));  // finite: each tile has a visible row
        const float p = expf(score - next), shrink = expf(m - next);
        total = total * shrink + block_reduce<Sum>(p, scratch[1]);
        m = next;
        probs[threadIdx.x] = p;
        __syncthreads();  // all probabilities of the tile are there
        const int n_tile = static_cast<int>(min(n_seen - tile, static_cast<int64_t>(kKeys)));
        for (int64_t r = threadIdx.x * kN; r < R; r += kKeys * kN) {
            float sum[kN], c[kN];
            load_chunk(sum, o + r, R - r);
            for (int l = 0; l < kN; ++l) sum[l] *= shrink;
            for (int k = 0; k < n_tile; ++k) {
                load_chunk(c, cache + (tile + k) * W + r, R - r);
                for (int l = 0; l < kN; ++l) sum[l] = fmaf(probs[k], c[l], sum[l]);
            }
            store_chunk(o + r, sum, R - r);
        }
        __syncthreads();  // all have read probs and scratch; after the last tile: o is complete
    }
    // 3. unfold
    for (int64_t d = threadIdx.x; d < s.Dv; d += kKeys)
        out[d] = from_float<Number>(dot_row<kN>(o, wv + d * R, R) / total);
}

// Block (t, b): copies latent and key side by side into row first + t.
template <class Number, int kN>
__global__ void latent_cache_append_kernel(Number* cache, const Number* latent, const Number* key, int64_t key_stride,
                                           int64_t R, int64_t Dr, int64_t cache_rows, int64_t first) {
    const int64_t t = blockIdx.x, b = blockIdx.y, token = b * gridDim.x + t;
    Number* row = cache + (b * cache_rows + first + t) * (R + Dr);
    for (int64_t c = threadIdx.x * kN; c < R; c += blockDim.x * kN)
        copy_chunk<kN>(row + c, latent + token * R + c, R - c);
    for (int64_t c = threadIdx.x * kN; c < Dr; c += blockDim.x * kN)
        copy_chunk<kN>(row + R + c, key + token * key_stride + c, Dr - c);
}

void check_cache(const char* name, const Tensor& cache, int64_t B, int64_t T, int64_t columns, int64_t first) {
    expect(name, "cache", cache, cache.dtype, {B, -1, columns});
    check(first >= 0 && first + T <= cache.shape[1], name, ": tokens ", first, " to ", first + T - 1,
          " do not fit in a cache of ", cache.shape[1], " rows: take a longer one");
}

}  // namespace

void latent_attention_forward(const HeadColumns& out, const HeadColumns& q, Tensor cache, Tensor kv_b, int64_t first,
                              float scale, cudaStream_t stream) {
    const char* name = "latent_attention_forward";
    const DType dtype = cache.dtype;
    expect(name, "q", q.rows, dtype, {-1, -1, -1});
    const int64_t B = q.rows.shape[0], T = q.rows.shape[1], H = q.count, Dv = out.D;
    expect(name, "out", out.rows, dtype, {B, T, -1});
    expect(name, "kv_b", kv_b, dtype, {-1, -1});
    const int64_t R = kv_b.shape[1], Dn = kv_b.shape[0] / H - Dv, Dr = q.D - Dn;
    check(H > 0 && out.count == H && Dn > 0 && Dr > 0 && kv_b.shape[0] == H * (Dn + Dv), name, ": q has ", H,
          " heads of ", q.D, " columns, out ", out.count, " of ", Dv, ": kv_b ", kv_b,
          " does not fit, expected (H (Dn + Dv), R)");
    check_cache(name, cache, B, T, R + Dr, first);
    for (const HeadColumns& heads : {q, out})
        check(heads.column >= 0 && heads.column + (H - 1) * heads.head_stride() + heads.D <= heads.rows.cols(), name,
              ": heads are not inside of ", heads.rows);
    expect_aligned(name, {{"q", q.rows}, {"out", out.rows}, {"cache", cache}, {"kv_b", kv_b}});
    const LatentShape shape{
        R,     Dr,   Dn, Dv, q.rows.cols(), q.head_stride(), out.rows.cols(), out.head_stride(), cache.shape[1],
        first, scale};
    // The query, o and the probabilities of a tile. Up to 48 KiB a launch needs no special permission.
    const size_t shared_bytes = static_cast<size_t>(2 * R + Dr + kKeys) * sizeof(float);
    check(shared_bytes <= 48 * 1024, name, ": latents of R = ", R,
          " columns do not fit in shared memory, use up to 5000");
    dispatch_chunks(dtype, std::gcd(R, Dr), [&](auto chunk) {
        using Number = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const dim3 grid(static_cast<unsigned>(H), static_cast<unsigned>(T), static_cast<unsigned>(B));
        latent_attention_kernel<Number, kN><<<grid, kKeys, shared_bytes, stream>>>(
            out.rows.ptr<Number>() + out.column, q.rows.ptr<Number>() + q.column, cache.ptr<Number>(),
            kv_b.ptr<Number>(), shape);
        cudaCheckLaunch();
    });
}

void latent_cache_append(Tensor cache, int64_t first, Tensor latent, const HeadColumns& key, cudaStream_t stream) {
    const char* name = "latent_cache_append";
    expect(name, "latent", latent, cache.dtype, {-1, -1, -1});
    const int64_t B = latent.shape[0], T = latent.shape[1], R = latent.shape[2], Dr = key.D;
    expect(name, "key", key.rows, cache.dtype, {B, T, -1});
    check(key.count == 1 && key.column >= 0 && key.column + Dr <= key.rows.cols(), name, ": key is ", key.count,
          " heads of ", Dr, " columns from ", key.column, " on, expected one inside of ", key.rows);
    check_cache(name, cache, B, T, R + Dr, first);
    expect_aligned(name, {{"cache", cache}, {"latent", latent}, {"key", key.rows}});
    dispatch_chunks(cache.dtype, std::gcd(std::gcd(R, Dr), std::gcd(key.column, key.rows.cols())), [&](auto chunk) {
        using Number = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const dim3 grid(static_cast<unsigned>(T), static_cast<unsigned>(B));
        latent_cache_append_kernel<Number, kN><<<grid, kOnCpu ? 1 : 64, 0, stream>>>(
            cache.ptr<Number>(), latent.ptr<Number>(), key.rows.ptr<Number>() + key.column, key.rows.cols(), R, Dr,
            cache.shape[1], first);
        cudaCheckLaunch();
    });
}
