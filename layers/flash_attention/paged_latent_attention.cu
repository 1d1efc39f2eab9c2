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
// DeepSeek-V3. As plain loops, for one head of one token:
//
//   query = Wk^T q[0 ... Dn)                                            # 1. fold: R numbers
//   for s seen:  score[s] = scale * (dot(query, c[s]) + dot(q[Dn ...), r[s]))
//   p = softmax(score)                                                  # 2. attention: one key head of R + Dr
//   o = sum over s of p[s] * c[s]                                       #    columns, shared by all H heads
//   out = Wv o                                                          # 3. unfold: Dv numbers
//
// Each step is a kernel. The second is that of grouped-query attention (paged_attention.cu), on queries of R + Dr f32
// numbers and outputs of R. In the other two a thread has kTokens tokens, for which it reads a weight once, and sums in
// an order that does not depend on how many tokens there are: so bits do not depend on neighbours.
//
// FLOPs 2 R (Dn + Dv) + 2 S (2 R + Dr) per head, S rows seen. That is more than the expanded form's 2 S (D + Dv), which
// is why training does not use this form: decoding is limited by the bytes it reads, and here they are 71 times fewer.
#include "layers/chunk.cuh"
#include "layers/flash_attention/paged_attention.cuh"

namespace {

constexpr int kTokens = 8, kThreads = 64;

struct LatentShape {
    int64_t N;
    int H, R, Dr, Dn, Dv;
    int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
};

// This thread's tokens. Behind the last token, the last token again: its results are written twice, with the same bits.
__device__ __forceinline__ int64_t token_of(int i, int64_t N) {
    return min(static_cast<int64_t>(blockIdx.z) * kTokens + i, N - 1);
}

// queries[n,h] = [Wk_h^T q | rotated part of q]. Block (columns, head, tokens), a thread has kN columns.
template <class Number, int kN>
__global__ void __launch_bounds__(kThreads)
    fold_kernel(float* queries, const Number* q, const Number* kv_b, LatentShape s) {
    const int64_t h = blockIdx.y, W = s.R + s.Dr, x = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kN;
    const Number* from[kTokens];
    float* to[kTokens];
    for (int i = 0; i < kTokens; ++i) {
        const int64_t token = token_of(i, s.N);
        from[i] = q + token * s.q_token_stride + h * s.q_head_stride;
        to[i] = queries + (token * s.H + h) * W;
    }
    if (x < s.R) {
        const Number* weight = kv_b + h * (s.Dn + s.Dv) * s.R + x;
        float sums[kTokens][kN] = {};
        for (int64_t d = 0; d < s.Dn; ++d) {
            float w[kN];
            load_chunk(w, weight + d * s.R, s.R - x);
            for (int i = 0; i < kTokens; ++i) {
                const float y = to_float(from[i][d]);
                for (int l = 0; l < kN; ++l) sums[i][l] = fmaf(y, w[l], sums[i][l]);
            }
        }
        for (int i = 0; i < kTokens; ++i)
            for (int l = 0; l < kN && x + l < s.R; ++l) to[i][x + l] = sums[i][l];
    }
    if (blockIdx.x > 0) return;
    for (int i = 0; i < kTokens; ++i)
        for (int d = threadIdx.x; d < s.Dr; d += kThreads) to[i][s.R + d] = to_float(from[i][s.Dn + d]);
}

// out[n,h] = Wv_h o[n,h]. Block (rows of Wv, head, tokens), a thread has a row.
template <class Number, int kN>
__global__ void __launch_bounds__(kThreads)
    unfold_kernel(Number* out, const float* o, const Number* kv_b, LatentShape s) {
    const int64_t h = blockIdx.y, d = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (d >= s.Dv) return;
    const Number* weight = kv_b + (h * (s.Dn + s.Dv) + s.Dn + d) * s.R;
    float sums[kTokens][kN] = {};
    for (int64_t r = 0; r < s.R; r += kN) {
        float w[kN], x[kN];
        load_chunk(w, weight + r, s.R - r);
        for (int i = 0; i < kTokens; ++i) {
            load_chunk(x, o + (token_of(i, s.N) * s.H + h) * s.R + r, s.R - r);
            for (int l = 0; l < kN; ++l) sums[i][l] = fmaf(x[l], w[l], sums[i][l]);
        }
    }
    for (int i = 0; i < kTokens; ++i)
        out[token_of(i, s.N) * s.out_token_stride + h * s.out_head_stride + d] =
            from_float<Number>(fold_chunk<Sum>(sums[i]));
}

void expect_columns(const char* operation, int64_t W) {
    check(W <= kMaxLatentColumns, operation, ": rows of R + Dr = ", W, " columns do not fit in shared memory: up to ",
          kMaxLatentColumns, " are possible");
}

}  // namespace

void paged_latent_attention_forward(const HeadColumns& out, const HeadColumns& q, const PagedStep& step, Tensor kv_b,
                                    float scale, Tensor scratch, cudaStream_t stream) {
    const char* operation = "paged_latent_attention_forward";
    const DType dtype = q.rows.dtype;
    expect(operation, "q", q.rows, dtype, {1, -1, -1});
    expect(operation, "kv_b", kv_b, dtype, {-1, -1});
    const int64_t N = q.rows.shape[1], H = q.count, Dv = out.D, R = kv_b.shape[1];
    const int64_t Dn = H > 0 ? kv_b.shape[0] / H - Dv : 0, Dr = q.D - Dn, W = R + Dr;
    check(N > 0 && Dn > 0 && Dr > 0 && kv_b.shape[0] == H * (Dn + Dv), operation, ": q has ", H, " heads of ", q.D,
          " columns, out ", out.count, " of ", Dv, ": kv_b ", kv_b, " does not fit, expected (H (Dn + Dv), R)");
    expect_heads(operation, "q", q, dtype, 1, N, H, q.D);
    expect_heads(operation, "out", out, dtype, 1, N, H, Dv);
    expect_aligned(operation, {{"kv_b", kv_b}});
    check(step.pool.dtype == dtype || step.pool.dtype == DType::e4m3, operation, ": step.pool is ", step.pool,
          ", expected ", dtype_name(dtype), " or e4m3");
    expect_columns(operation, W);

    // scratch = [queries (N, H, W) | o (N, H, R) | that of the attention], each from a multiple of 16 bytes on
    const int64_t queries_n = round_up(N * H * W, 4), o_n = round_up(N * H * R, 4);
    float* parts = scratch_as(operation, scratch, {queries_n + o_n}).ptr<float>();
    const Tensor queries = make_tensor(parts, DType::f32, {1, N, H * W}),
                 o = make_tensor(parts + queries_n, DType::f32, {1, N, H * R}),
                 rest = make_tensor(parts + queries_n + o_n, DType::f32, {scratch.n() - queries_n - o_n});
    const LatentShape s{N,
                        narrow(H, "heads"),
                        narrow(R, "columns"),
                        narrow(Dr, "columns"),
                        narrow(Dn, "columns"),
                        narrow(Dv, "columns"),
                        q.rows.cols(),
                        q.head_stride(),
                        out.rows.cols(),
                        out.head_stride()};
    const auto grid = [&](int64_t n) {
        return dim3(static_cast<unsigned>(ceil_div(n, kThreads)), static_cast<unsigned>(H),
                    static_cast<unsigned>(ceil_div(N, kTokens)));
    };
    dispatch_chunks(dtype, R, [&](auto chunk) {
        using Number = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        fold_kernel<Number, kN><<<grid(ceil_div(R, kN)), kThreads, 0, stream>>>(
            queries.ptr<float>(), q.rows.ptr<Number>() + q.column, kv_b.ptr<Number>(), s);
        launched("fold_kernel", {.reads = bytes_of(q, kv_b) - H * Dv * R * static_cast<int64_t>(dtype_bytes(dtype)),
                                 .writes = bytes_of(queries),
                                 .flops = 2.0 * static_cast<double>(N * H * Dn * R)});
        paged_attention(operation, {{o, H, R}, {queries, H, W}, 1, 1, 0, R, scale, 0}, step, rest, stream);
        unfold_kernel<Number, kN><<<grid(Dv), kThreads, 0, stream>>>(out.rows.ptr<Number>() + out.column,
                                                                     o.ptr<float>(), kv_b.ptr<Number>(), s);
        launched("unfold_kernel", {.reads = bytes_of(o) + H * Dv * R * static_cast<int64_t>(dtype_bytes(dtype)),
                                   .writes = bytes_of(out),
                                   .flops = 2.0 * static_cast<double>(N * H * Dv * R)});
    });
}

int64_t paged_latent_attention_scratch_n(int64_t N, int64_t H, int64_t R, int64_t Dr, int64_t max_length) {
    expect_columns("attention over a cache of latents", R + Dr);
    return round_up(N * H * (R + Dr), 4) + round_up(N * H * R, 4) + paged_splits_n(N, H, R, max_length);
}
