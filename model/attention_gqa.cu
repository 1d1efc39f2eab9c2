// model/attention_gqa.cu: multi-head, multi-query and grouped-query attention: H query heads over K key/value heads.
//   (Vaswani et al. 2017, arXiv:1706.03762; MQA: Shazeer 2019, arXiv:1911.02150;
//    GQA: Ainslie et al. 2023, arXiv:2305.13245)
//
//   qkv = [H query heads | K key heads | K value heads] = linear(inp), each head of D columns
//   heads_h,t = sum over the s that t sees of softmax(q_h,t . k_s / sqrt(D)) v_s  of key head h / (H/K), rounded down
//   out = linear(heads)
//
// t sees all s <= t; with a sliding window of w tokens (Mistral, arXiv:2310.06825; Qwen's later layers) t - w < s <= t.
//
// Positions: GPT-2 has none here; LLaMA and Qwen rotate queries and keys. Qwen2 (arXiv:2407.10671) adds biases to qkv,
// which the product has done. Qwen3 (arXiv:2505.09388) first normalises every query and key head, so that no score can
// grow without bound: then queries and keys are in tensors of their own, because the norm's backward needs what qkv
// holds.
#include "model/sublayer.h"

#include <algorithm>

namespace {

enum LinearOf { kQkv, kOut };
enum NormOf { kQNorm, kKNorm };                                 // Qwen3: (D), of every query head and of every key head
enum Saved { kQkvRows, kLse, kHeads, kQ, kK, kQRstd, kKRstd };  // the last four with qk_norm

void check(const Config& c) {
    ::check(c.H % c.K == 0, "model configuration: ", c.H, " query heads cannot share ", c.K, " key/value heads evenly");
}

int64_t qkv_width(const Config& c) { return (c.H + 2 * c.K) * c.D; }

void place(Placer& placer, const Config& c, const std::string& prefix, SubLayerParameters& p) {
    if (c.family == Family::gpt2) {
        p.linears[kQkv] =
            placer.linear(Crossing::enters, {placer.divided(prefix + "attn.c_attn", qkv_width(c), 3)}, c.C, true, true);
        p.linears[kOut] = placer.linear(Crossing::leaves, {{prefix + "attn.c_proj", c.C}}, c.H * c.D, true, true);
        return;
    }
    const std::string a = prefix + "self_attn.";
    p.linears[kQkv] = placer.linear(Crossing::enters,
                                    {placer.divided(a + "q_proj", c.H * c.D), placer.keys(a + "k_proj", c.K, c.D),
                                     placer.keys(a + "v_proj", c.K, c.D)},
                                    c.C, c.qkv_bias);
    if (c.qk_norm) p.norms[kQNorm] = placer.norm(a + "q_norm", c.D, false, true);
    if (c.qk_norm) p.norms[kKNorm] = placer.norm(a + "k_norm", c.D, false, true);
    p.linears[kOut] = placer.linear(Crossing::leaves, {{a + "o_proj", c.C}}, c.H * c.D, c.attn_out_bias);
}

void take_saved(SavedTaker& take, const Config& c, Slots& saved) {
    saved[kQkvRows] = take.keep("attention", qkv_width(c));
    saved[kLse] = take.arena().take("attention", DType::f32, {take.B, c.H, take.T});
    saved[kHeads] = take.keep("attention", c.H * c.D);
    if (!c.qk_norm) return;
    saved[kQRstd] = take.keep_norms(c.H);
    saved[kKRstd] = take.keep_norms(c.K);
    saved[kQ] = take.recomputable("attention", c.H * c.D);
    saved[kK] = take.recomputable("attention", c.K * c.D);
}
void take_gradients(SavedTaker& take, const Config& c, Slots& gradients) {
    gradients[kQkvRows] = take.keep("gradients of activations", qkv_width(c));
    gradients[kHeads] = take.keep("gradients of activations", c.H * c.D);
    if (!c.qk_norm) return;
    gradients[kQ] = take.keep("gradients of activations", c.H * c.D);
    gradients[kK] = take.keep("gradients of activations", c.K * c.D);
}
int64_t scratch_n(const Model& model, int64_t B, int64_t T) {
    const Config& c = model.local;
    const int64_t attention = attention_scratch_n(model, {B, c.H, c.K, c.D, c.D, model.precision.dtype}, T);
    return std::max(attention, c.qk_norm ? rmsnorm_backward_scratch_n(B * T * c.H, c.D) : 0);
}

// Where the heads are, for values as for gradients: in the rows of qkv, or, normalised, in tensors of their own.
QkvHeads raw_heads(const BlockContext& b, const Slots& slots) {
    const Config& c = b.model.local;
    return qkv_heads(slots[kQkvRows].view({b.acts.B, b.acts.T, qkv_width(c)}), c.H, c.K);
}
QkvHeads heads_of(const BlockContext& b, const Slots& slots) {
    const Config& c = b.model.local;
    QkvHeads heads = raw_heads(b, slots);
    if (!c.qk_norm) return heads;
    heads.q = heads_in(slots[kQ], b.acts, c.H, c.D);
    heads.k = heads_in(slots[kK], b.acts, c.K, c.D);
    return heads;
}

// Qwen3: raw queries and keys -> normalised ones; and rotated.
void norm_queries_and_keys(const BlockContext& b, const SubLayerParameters& p, const Slots& saved) {
    const QkvHeads raw = raw_heads(b, saved), heads = heads_of(b, saved);
    const float eps = static_cast<float>(b.model.local.norm_eps);
    rmsnorm_heads_forward(heads.q, saved[kQRstd], raw.q, p.norms[kQNorm].weight, eps, b.stream);
    rmsnorm_heads_forward(heads.k, saved[kKRstd], raw.k, p.norms[kKNorm].weight, eps, b.stream);
}
void recompute(const BlockContext& b, const SubLayerParameters& p, const Slots& saved) {
    if (!b.model.local.qk_norm) return;
    norm_queries_and_keys(b, p, saved);
    const QkvHeads heads = heads_of(b, saved);
    rope_forward(b, heads.q, RopePairs::halves);
    rope_forward(b, heads.k, RopePairs::halves);
}
void norm_queries_and_keys_backward(const BlockContext& b, const SubLayerParameters& p, const Slots& saved) {
    const Tensor scratch = b.workspace.scratch;
    const Slots& gradients = b.workspace.dattention;
    const QkvHeads raw = raw_heads(b, saved), draw = raw_heads(b, gradients), dheads = heads_of(b, gradients);
    rope_backward(b, dheads.q, RopePairs::halves);
    rope_backward(b, dheads.k, RopePairs::halves);
    const Norm &q_norm = p.norms[kQNorm], &k_norm = p.norms[kKNorm];
    rmsnorm_heads_backward(draw.q, q_norm.dweight, dheads.q, raw.q, q_norm.weight, saved[kQRstd],
                           b.workspace.accumulate, scratch, b.stream);
    rmsnorm_heads_backward(draw.k, k_norm.dweight, dheads.k, raw.k, k_norm.weight, saved[kKRstd],
                           b.workspace.accumulate, scratch, b.stream);
}

void forward(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor out, Tensor inp) {
    const Config& c = b.model.local;
    block_linear_forward(b, p.linears[kQkv], saved[kQkvRows], inp);
    const QkvHeads heads = heads_of(b, saved);
    const HeadColumns attended = heads_in(saved[kHeads], b.acts, c.H, c.D);
    if (has_cache(b)) {
        if (c.qk_norm) norm_queries_and_keys(b, p, saved);
        attend_to_cache(b, p, attended, heads);
    } else {
        if (c.qk_norm) recompute(b, p, saved);
        else if (c.family == Family::llama)
            rope_forward(heads.q.rows, b.acts.positions, rope_rows(b), c.H, c.K, b.stream);
        attend_forward(b, attended, saved[kLse], heads, flash_options(b, p));
    }
    if (out.exists()) block_linear_forward(b, p.linears[kOut], out, saved[kHeads]);
}

void backward(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor dinp, Tensor dout,
              Tensor inp) {
    const Config& c = b.model.local;
    const Slots& gradients = b.workspace.dattention;
    const QkvHeads heads = heads_of(b, saved), dheads = heads_of(b, gradients);
    const HeadColumns attended = heads_in(saved[kHeads], b.acts, c.H, c.D),
                      dattended = heads_in(gradients[kHeads], b.acts, c.H, c.D);
    attend_backward(b, p.linears[kOut], dheads, dattended, dout, attended, saved[kLse], heads, flash_options(b, p));
    if (c.qk_norm) norm_queries_and_keys_backward(b, p, saved);
    else if (c.family == Family::llama)
        rope_backward(dheads.q.rows, b.acts.positions, rope_rows(b), c.H, c.K, b.stream);

    block_linear_backward_input(b, p.linears[kQkv], dinp, gradients[kQkvRows]);
    block_linear_backward_weight(b, p.linears[kQkv], gradients[kQkvRows], inp);
}

// Norms of heads; rope; the attention. Backward: the attention; rope; norms.
Elements elements(const Config& c) {
    const double q = static_cast<double>(c.H * c.D), k = static_cast<double>(c.K * c.D), v = k;
    const double normed = c.qk_norm ? q + k : 0, rope = c.family == Family::llama ? 2 * (q + k) : 0;
    const Elements attended = attend_elements(q, k, v, q);
    return {.forward = 2 * normed + rope + attended.forward,
            .backward = 3 * normed + attended.backward + rope,
            .again = c.qk_norm ? 2 * normed + rope : 0};
}

int64_t score_width(const Config& c) { return c.H * (c.D + c.D); }
int64_t rope_width(const Config& c) { return c.D; }
int64_t cache_width(const Config& c) { return 2 * c.K * c.D; }
int64_t cache_heads(const Config& c) { return 2 * c.K; }
int64_t cache_scratch_n(const Config& c, int64_t N, int64_t max_length) {
    return paged_attention_scratch_n(N, c.H, c.D, max_length);
}

}  // namespace

extern const SubLayer kGroupedQueryAttention = {.name = "gqa",
                                                .check = check,
                                                .place = place,
                                                .take_saved = take_saved,
                                                .take_gradients = take_gradients,
                                                .scratch_n = scratch_n,
                                                .forward = forward,
                                                .recompute = recompute,
                                                .backward = backward,
                                                .elements = elements,
                                                .first_linear_alone_reads_inp = true,
                                                .score_width = score_width,
                                                .rope_width = rope_width,
                                                .cache_width = cache_width,
                                                .cache_heads = cache_heads,
                                                .cache_scratch_n = cache_scratch_n};
