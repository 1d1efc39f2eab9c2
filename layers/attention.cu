// Causal self-attention, H query heads over K key/value heads.                       (Vaswani et al. 2017, arXiv:1706.03762)
//
//   forward     S = scale q k^T          (T, T)    how much token t cares for token s; scale is usually 1/sqrt(D)
//               P = softmax(S)                     along s, over s <= t only: no token sees what comes after it
//               o = P v                  (T, D)
//   backward    dv = P^T do
//               dP = do v^T
//               dS = P * (dP - r)        r_t = sum_s dP_ts P_ts: softmax's gradient, row by row
//               dq = scale dS k,  dk = scale dS^T q
//
// MHA (K = H), MQA (K = 1; Shazeer 2019, arXiv:1911.02150) and GQA (K divides H; Ainslie et al. 2023, arXiv:2305.13245) are
// one code. The G = H/K query heads that share a key/value head are neighbours, so once heads stand before tokens,
//
//   q (B, H, T, D) is also (B K, G T, D)        k, v (B K, T, D)        P (B, H, T, T) is also (B K, G T, T)
//
// and each line above is one batch of B K matrix products whose "tokens" on the query side are G T rows. The sum over the
// group in dk and dv is then nothing but the inner dimension G T of P^T do and dS^T q.
//
// This is the plain version: P and dP are stored, 2 B H T^2 numbers, which at B = 4, H = 32, T = 4096 and 16 bits is 4 GB
// each, and half of every product is spent above the diagonal. Flash attention keeps the tiles of P on the chip instead.
#include "layers/layers.h"
#include "layers/softmax.cuh"

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Kernels: heads before tokens and back.     Block (t, b, group of heads); threadIdx.x is the chunk of the head's D numbers.
//
//   rows (B, T, (H + 2K) D) = [H query heads | K key heads | K value heads]   <->   q (B, H, T, D),  k, v (B, K, T, D)

template <class Number>
struct Heads {
    Number *q, *k, *v;
    int64_t H, K, D;
};

// Where head `head` of token t stands in q, k or v.
template <class Number>
__device__ __forceinline__ Number* find_head(const Heads<Number>& to, int64_t head, int64_t b, int64_t t, int64_t T) {
    if (head < to.H) return to.q + ((b * to.H + head) * T + t) * to.D;
    if (head < to.H + to.K) return to.k + ((b * to.K + head - to.H) * T + t) * to.D;
    return to.v + ((b * to.K + head - to.H - to.K) * T + t) * to.D;
}

// kSplit: rows -> q, k, v. Otherwise q, k, v -> rows. With K = 0 there are only queries (out and dout).
template <bool kSplit, class Number, int kN>
__global__ void move_heads_kernel(Heads<Number> heads, Number* rows) {
    const int64_t T = gridDim.x, t = blockIdx.x, b = blockIdx.y, n_heads = heads.H + 2 * heads.K;
    const int64_t head = blockIdx.z * blockDim.y + threadIdx.y, d = static_cast<int64_t>(threadIdx.x) * kN;
    if (head >= n_heads || d >= heads.D) return;
    Number* apart = find_head(heads, head, b, t, T) + d;
    Number* in_row = rows + ((b * T + t) * n_heads + head) * heads.D + d;
    copy_chunk<kN>(kSplit ? apart : in_row, kSplit ? in_row : apart, heads.D - d);
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels: softmax forward and backward, in place. A row is S[b,h,t,:], of which the first t + 1 numbers count; a team of
// threads shares it (layers/chunk.cuh). What stands above the diagonal is never used, and zero is written there: the matrix
// products that follow run over all T columns.

template <class Number, int kN>
__global__ void causal_softmax_forward_kernel(Number* scores, int64_t n_rows, int64_t T) {
    __shared__ float scratch[2 * kWarp];
    const int64_t row = team_row();
    if (row >= n_rows) return;  // a whole team: nobody waits for it
    Number* S = scores + row * T;
    const int t = static_cast<int>(row % T), stride = static_cast<int>(blockDim.x) * kN;
    const SoftmaxStatistics softmax = softmax_statistics<kN>(S, t + 1, static_cast<int>(T), scratch);
    const float scale = 1.0f / softmax.sum;
    float x[kN];
    int s = static_cast<int>(threadIdx.x) * kN;
    for (; s <= t; s += stride) {  // a thread overwrites only what it alone reads
        load_chunk(x, S + s, T - s);
        for (int l = 0; l < kN; ++l) x[l] = s + l <= t ? __expf(x[l] - softmax.max) * scale : 0.0f;
        store_chunk(S + s, x, T - s);
    }
    for (; s < T; s += stride) store_zeros<kN>(S + s, T - s);
}

// dS = P * (dP - r) * scale over dP, with r = sum_s dP P.
template <class Number, int kN>
__global__ void causal_softmax_backward_kernel(Number* dprobs, const Number* probs, float scale, int64_t n_rows, int64_t T) {
    __shared__ float scratch[kWarp];
    const int64_t row = team_row();
    if (row >= n_rows) return;
    Number* dP = dprobs + row * T;
    const Number* P = probs + row * T;
    const int t = static_cast<int>(row % T), stride = static_cast<int>(blockDim.x) * kN;
    const int first = static_cast<int>(threadIdx.x) * kN;
    float p[kN], dp[kN], r = 0.0f;
    if (first <= t) {
        float sum[kN] = {};
        for (int s = first; s <= t; s += stride) {
            load_chunk(p, P + s, T - s);
            load_chunk(dp, dP + s, T - s);
            for (int l = 0; l < kN; ++l) sum[l] += s + l <= t ? p[l] * dp[l] : 0.0f;
        }
        r = fold_chunk<Sum>(sum);
    }
    r = team_reduce<Sum>(r, scratch);
    int s = first;
    for (; s <= t; s += stride) {
        load_chunk(p, P + s, T - s);
        load_chunk(dp, dP + s, T - s);
        for (int l = 0; l < kN; ++l) dp[l] = s + l <= t ? p[l] * (dp[l] - r) * scale : 0.0f;
        store_chunk(dP + s, dp, T - s);
    }
    for (; s < T; s += stride) store_zeros<kN>(dP + s, T - s);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers of the kernels

// v empty: only queries. rows -> heads with kSplit, heads -> rows without.
template <bool kSplit>
void move_heads(Tensor q, Tensor k, Tensor v, Tensor rows, cudaStream_t stream) {
    const int64_t B = q.shape[0], H = q.shape[1], T = q.shape[2], D = q.shape[3], K = k ? k.shape[1] : 0;
    dispatch_chunks(q.dtype, D, [&](auto chunk) {
        using Number = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const Heads<Number> heads{q.ptr<Number>(), static_cast<Number*>(k.data), static_cast<Number*>(v.data), H, K, D};
        const HeadLaunch to = head_launch(B, T, H + 2 * K, ceil_div(D, kN));
        move_heads_kernel<kSplit, Number, kN><<<to.grid, to.block, 0, stream>>>(heads, rows.ptr<Number>());
        cudaCheckLaunch();
    });
}

void causal_softmax_forward(Tensor scores, cudaStream_t stream) {
    const int64_t T = scores.cols(), n_rows = scores.rows();
    dispatch_chunks(scores.dtype, T, [&](auto chunk) {
        using Number = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const RowTeams teams = row_teams(n_rows, T, kN);
        causal_softmax_forward_kernel<Number, kN><<<teams.grid, teams.block, 0, stream>>>(scores.ptr<Number>(), n_rows, T);
        cudaCheckLaunch();
    });
}

void causal_softmax_backward(Tensor dprobs, Tensor probs, float scale, cudaStream_t stream) {
    const int64_t T = probs.cols(), n_rows = probs.rows();
    dispatch_chunks(probs.dtype, T, [&](auto chunk) {
        using Number = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const RowTeams teams = row_teams(n_rows, T, kN);
        causal_softmax_backward_kernel<Number, kN>
            <<<teams.grid, teams.block, 0, stream>>>(dprobs.ptr<Number>(), probs.ptr<Number>(), scale, n_rows, T);
        cudaCheckLaunch();
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Shapes, and the scratch cut into tensors

struct Sizes {
    int64_t B, T, H, K, D;
};

Sizes check_arguments(const char* operation, const AttentionSaved& saved, const char* rows_name, Tensor rows,
                      const char* out_name, Tensor out) {
    const DType dtype = saved.q.dtype;
    expect(operation, "saved.q", saved.q, dtype, {-1, -1, -1, -1});
    const int64_t B = saved.q.shape[0], H = saved.q.shape[1], T = saved.q.shape[2], D = saved.q.shape[3];
    expect(operation, "saved.k", saved.k, dtype, {B, -1, T, D});
    const int64_t K = saved.k.shape[1];
    check(K > 0 && H % K == 0, operation, ": H = ", H, " query heads are not a multiple of K = ", K, " key/value heads");
    expect(operation, "saved.v", saved.v, dtype, {B, K, T, D});
    expect(operation, "saved.probs", saved.probs, dtype, {B, H, T, T});
    expect(operation, rows_name, rows, dtype, {B, T, (H + 2 * K) * D});
    expect(operation, out_name, out, dtype, {B, T, H * D});
    expect_aligned(operation, {{"saved.q", saved.q}, {"saved.k", saved.k}, {"saved.v", saved.v}});
    expect_aligned(operation, {{"saved.probs", saved.probs}, {rows_name, rows}, {out_name, out}});
    return {B, T, H, K, D};
}

// Takes tensors from scratch one after the other, each on a 256-byte boundary.
constexpr int64_t kScratchUnit = 128;
class Scratch {
  public:
    Scratch(const char* operation, Tensor scratch, DType dtype, int64_t n) : rest_(scratch) {
        expect(operation, "scratch", scratch, dtype, {-1});
        expect_aligned(operation, {{"scratch", scratch}});
        check(scratch.n() >= n, operation, ": scratch has ", scratch.n(), " elements, needs ", n);
    }
    Tensor take(std::initializer_list<int64_t> dims) {
        const int64_t n = make_tensor(nullptr, rest_.dtype, dims).n(), taken = round_up(n, kScratchUnit);
        const Tensor part = rest_.slice(0, n).view(dims);
        rest_ = rest_.slice(std::min(taken, rest_.n()), rest_.n() - std::min(taken, rest_.n()));
        return part;
    }

  private:
    Tensor rest_;
};

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Attention

int64_t attention_forward_scratch_n(int64_t B, int64_t T, int64_t H, int64_t, int64_t D) {
    return round_up(B * H * T * D, kScratchUnit);  // o
}

void attention_probs(const AttentionSaved& saved, float scale, cudaStream_t stream) {
    const int64_t B = saved.q.shape[0], H = saved.q.shape[1], T = saved.q.shape[2], D = saved.q.shape[3], K = saved.k.shape[1];
    const int64_t BK = B * K, GT = H / K * T;
    matmul(saved.probs.view({BK, GT, T}), saved.q.view({BK, GT, D}), saved.k.view({BK, T, D}),
           {.transpose_b = true, .alpha = scale}, stream);  // S = scale q k^T
    causal_softmax_forward(saved.probs, stream);           // P = softmax(S), in place
}

void attention_forward(Tensor out, const AttentionSaved& saved, Tensor qkv, float scale, Tensor scratch, cudaStream_t stream) {
    const auto [B, T, H, K, D] = check_arguments("attention_forward", saved, "qkv", qkv, "out", out);
    Scratch parts("attention_forward", scratch, qkv.dtype, attention_forward_scratch_n(B, T, H, K, D));
    const Tensor o = parts.take({B, H, T, D});
    const int64_t BK = B * K, GT = H / K * T;

    move_heads<true>(saved.q, saved.k, saved.v, qkv, stream);
    attention_probs(saved, scale, stream);
    matmul(o.view({BK, GT, D}), saved.probs.view({BK, GT, T}), saved.v.view({BK, T, D}), {}, stream);  // o = P v
    move_heads<false>(o, {}, {}, out, stream);
}

int64_t attention_backward_scratch_n(int64_t B, int64_t T, int64_t H, int64_t K, int64_t D) {
    return round_up(B * H * T * D, kScratchUnit) + 2 * round_up(B * K * T * D, kScratchUnit) +  // do and dq; dk; dv
           round_up(B * H * T * T, kScratchUnit);                                               // dP
}

void attention_backward(Tensor dqkv, Tensor dout, const AttentionSaved& saved, float scale, Tensor scratch,
                        cudaStream_t stream) {
    const auto [B, T, H, K, D] = check_arguments("attention_backward", saved, "dqkv", dqkv, "dout", dout);
    Scratch parts("attention_backward", scratch, dqkv.dtype, attention_backward_scratch_n(B, T, H, K, D));
    const Tensor do_heads = parts.take({B, H, T, D}), dk_heads = parts.take({B, K, T, D}), dv_heads = parts.take({B, K, T, D});
    const Tensor dprobs = parts.take({B, H, T, T}), dq_heads = do_heads;  // do is last read for dP, before dq is written
    const int64_t BK = B * K, GT = H / K * T;
    const Tensor q = saved.q.view({BK, GT, D}), k = saved.k.view({BK, T, D}), v = saved.v.view({BK, T, D});
    const Tensor P = saved.probs.view({BK, GT, T}), dP = dprobs.view({BK, GT, T}), dO = do_heads.view({BK, GT, D});

    move_heads<true>(do_heads, {}, {}, dout, stream);                         // mirrors: o -> out
    matmul(dv_heads.view({BK, T, D}), P, dO, {.transpose_a = true}, stream);  // o = P v:         dv = P^T do
    matmul(dP, dO, v, {.transpose_b = true}, stream);                         //                  dP = do v^T
    causal_softmax_backward(dprobs, saved.probs, scale, stream);              // P = softmax(S):  scale dS, over dP
    matmul(dq_heads.view({BK, GT, D}), dP, k, {}, stream);                    // S = scale q k^T: dq = scale dS k
    matmul(dk_heads.view({BK, T, D}), dP, q, {.transpose_a = true}, stream);  //                  dk = scale dS^T q
    move_heads<false>(dq_heads, dk_heads, dv_heads, dqkv, stream);            // mirrors: qkv -> q, k, v
}
