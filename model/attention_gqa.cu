// model/attention_gqa.cu: multi-head, multi-query and grouped-query attention: H query heads over K key and value heads.
//       (Vaswani et al. 2017, arXiv:1706.03762; MQA: Shazeer 2019, arXiv:1911.02150; GQA: Ainslie et al. 2023, arXiv:2305.13245)
//
//   qkv = [H query heads | K key heads | K value heads], each of D columns
//   attn_h,t = sum over the s that t sees of softmax(q_h,t . k_s / sqrt(D)) v_s          key head h / (H/K)
//
// t sees all s <= t; with a sliding window of w tokens (Mistral, arXiv:2310.06825; Qwen's later layers) t - w < s <= t.
//
// Positions: GPT-2 has none here; LLaMA and Qwen rotate queries and keys. Qwen2 (arXiv:2407.10671) adds biases to qkv, which
// the product has done. Qwen3 (arXiv:2505.09388) first normalises every query and key head, so that no score can grow without
// bound: then queries and keys stand in tensors of their own, because the norm's backward needs what qkv holds.
#include "model/attention.h"

namespace {

QkvHeads heads_of(const Config& c, const Activations& acts, Tensor qkv, Tensor q, Tensor k) {
    QkvHeads heads = qkv_heads(qkv.view({acts.B, acts.T, c.qkv_width()}), c.H, c.K);
    if (c.qk_norm) heads.q = heads_in(q, acts, c.H, c.D), heads.k = heads_in(k, acts, c.K, c.D);
    return heads;
}

void take_saved(BlockSaved& saved, const Config& c, DType, int64_t N, Arena& arena) {
    if (!c.qk_norm) return;
    saved.q_rstd = arena.take("norms", DType::f32, {N, c.H});
    saved.k_rstd = arena.take("norms", DType::f32, {N, c.K});
}
void take_cheap(BlockSaved& saved, const Config& c, DType dtype, int64_t N, Arena& arena) {
    if (!c.qk_norm) return;
    saved.q = arena.take("attention", dtype, {N, c.H * c.D});
    saved.k = arena.take("attention", dtype, {N, c.K * c.D});
}
void take_gradients(Activations& acts, const Config& c, DType dtype, int64_t N, Arena& arena) {
    if (!c.qk_norm) return;
    acts.dq = arena.take("gradients of activations", dtype, {N, c.H * c.D});
    acts.dk = arena.take("gradients of activations", dtype, {N, c.K * c.D});
}
int64_t scratch_n(const Config& c, int64_t N) { return c.qk_norm ? rmsnorm_backward_scratch_n(N * c.H, c.D) : 0; }

// Qwen3: qkv -> q, k, normalised and rotated.
void norm_queries_and_keys(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
                           cudaStream_t stream) {
    const Config& c = model.config;
    if (!c.qk_norm) return;
    const QkvHeads raw = qkv_heads(saved.qkv.view({acts.B, acts.T, c.qkv_width()}), c.H, c.K);
    const QkvHeads heads = heads_of(c, acts, saved.qkv, saved.q, saved.k);
    const float eps = static_cast<float>(c.norm_eps);
    rmsnorm_heads_forward(heads.q, saved.q_rstd, raw.q, block.q_norm.weight, eps, stream);
    rmsnorm_heads_forward(heads.k, saved.k_rstd, raw.k, block.k_norm.weight, eps, stream);
    rope_forward(heads.q, RopePairs::halves, acts.positions, rope_rows(model, acts), stream);
    rope_forward(heads.k, RopePairs::halves, acts.positions, rope_rows(model, acts), stream);
}

void forward(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
             cudaStream_t stream) {
    const Config& c = model.config;
    const QkvHeads heads = heads_of(c, acts, saved.qkv, saved.q, saved.k);
    if (c.qk_norm) norm_queries_and_keys(model, block, saved, acts, stream);
    else if (c.family == Family::llama)
        rope_forward(heads.q.rows, acts.positions, rope_rows(model, acts), c.H, c.K, stream);
    flash_attention_forward(heads_in(saved.attn, acts, c.H, c.D), saved.lse, heads.q, heads.k, heads.v,
                            attention_options(model, block, acts), stream);
}

void backward(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
              cudaStream_t stream) {
    const Config& c = model.config;
    const QkvHeads heads = heads_of(c, acts, saved.qkv, saved.q, saved.k);
    const QkvHeads dheads = heads_of(c, acts, acts.dqkv, acts.dq, acts.dk);
    flash_attention_backward(dheads.q, dheads.k, dheads.v, heads_in(acts.dattn, acts, c.H, c.D),
                             heads_in(saved.attn, acts, c.H, c.D), saved.lse, heads.q, heads.k, heads.v,
                             attention_options(model, block, acts), acts.scratch, stream);
    if (!c.qk_norm) {
        if (c.family == Family::llama)
            rope_backward(dheads.q.rows, acts.positions, rope_rows(model, acts), c.H, c.K, stream);
        return;
    }
    rope_backward(dheads.q, RopePairs::halves, acts.positions, rope_rows(model, acts), stream);
    rope_backward(dheads.k, RopePairs::halves, acts.positions, rope_rows(model, acts), stream);
    const QkvHeads raw = qkv_heads(saved.qkv.view({acts.B, acts.T, c.qkv_width()}), c.H, c.K);
    const QkvHeads draw = qkv_heads(acts.dqkv.view({acts.B, acts.T, c.qkv_width()}), c.H, c.K);
    rmsnorm_heads_backward(draw.q, block.q_norm.dweight, dheads.q, raw.q, block.q_norm.weight, saved.q_rstd,
                           acts.scratch, stream);
    rmsnorm_heads_backward(draw.k, block.k_norm.dweight, dheads.k, raw.k, block.k_norm.weight, saved.k_rstd,
                           acts.scratch, stream);
}

}  // namespace

const AttentionVariant kGroupedQueryAttention = {
    take_saved, take_cheap, take_gradients, scratch_n, forward, norm_queries_and_keys, backward};
