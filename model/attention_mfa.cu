// model/attention_mfa.cu: multi-matrix factorization attention: many wide query heads over one key and one value head.
//                                               (Hu et al. 2024, arXiv:2412.19255; as in Step-3, arXiv:2507.19427)
//
//   qkv     = [query latent (q_rank) | key (D) | value (D)] = linear(inp)
//   q_h     = rope(Wq_h rmsnorm(query latent))                 Wq = kQUp (H D, q_rank)
//   heads_h = sum over s of softmax(q_h . rope(key_s) / sqrt(D)) value_s
//   out     = linear(heads)
//
// The cache holds one key and one value, as with MQA: 2 D numbers per token and layer. What makes heads differ is the
// query, and its matrix is factored: all heads share the first factor (C to q_rank), so that more and wider heads cost
// H D q_rank weights instead of H D C.
#include "model/sublayer.h"

#include <algorithm>

namespace {

enum LinearOf { kQkv, kOut, kQUp };  // kQUp: (H D, q_rank), latent to queries
enum NormOf { kLatentNorm };         // (q_rank)
enum Saved { kQkvRows, kLse, kHeads, kQ, kLatent, kLatentRstd };

void check(const Config& c) {
    ::check(c.K == 1 && c.q_rank > 0, "model configuration: MFA has one key/value head, not ", c.K,
            ", and a query latent (share_q_dim ", c.q_rank, ")");
}

void place(Placer& placer, const Config& c, const std::string& prefix, SubLayerParameters& p) {
    const std::string a = prefix + "self_attn.";
    p.linears[kQkv] = placer.linear(
        Crossing::enters,
        {placer.shared(a + "q_proj", c.q_rank), placer.shared(a + "k_proj", c.D), placer.shared(a + "v_proj", c.D)},
        c.C, false);
    p.norms[kLatentNorm] = placer.norm(a + "inter_norm", c.q_rank, false, true);
    p.linears[kQUp] = placer.linear(Crossing::inside, {placer.divided(a + "wq", c.H * c.D)}, c.q_rank, false);
    p.linears[kOut] = placer.linear(Crossing::leaves, {{a + "o_proj", c.C}}, c.H * c.D, false);
}

void take_saved(SavedTaker& take, const Config& c, Slots& saved) {
    saved[kQkvRows] = take.keep("attention", c.q_rank + 2 * c.D);
    saved[kLse] = take.arena().take("attention", DType::f32, {take.B, c.H, take.T});
    saved[kHeads] = take.keep("attention", c.H * c.D);
    saved[kLatentRstd] = take.keep_norms(1);
    saved[kQ] = take.keep("attention", c.H * c.D);
    saved[kLatent] = take.recomputable("norms", c.q_rank);
}
void take_gradients(SavedTaker& take, const Config& c, Slots& gradients) {
    gradients[kQkvRows] = take.keep("gradients of activations", c.q_rank + 2 * c.D);
    gradients[kHeads] = take.keep("gradients of activations", c.H * c.D);
    gradients[kQ] = take.keep("gradients of activations", c.H * c.D);
    gradients[kLatent] = take.keep("gradients of activations", c.q_rank);
}
int64_t scratch_n(const Model& model, int64_t B, int64_t T) {
    const Config& c = model.local;
    const int64_t attention = attention_scratch_n(model, {B, c.H, 1, c.D, c.D, model.precision.dtype}, T);
    return std::max(attention, rmsnorm_backward_scratch_n(B * T, c.q_rank));
}

// Where everything is, for values as for gradients.
struct Heads {
    HeadColumns latent, q, k, v;
};
Heads heads_of(const BlockContext& b, const Slots& slots) {
    const Config& c = b.model.local;
    const Tensor qkv = slots[kQkvRows];
    return {heads_in(qkv, b.acts, 1, c.q_rank), heads_in(slots[kQ], b.acts, c.H, c.D),
            heads_in(qkv, b.acts, 1, c.D, c.q_rank), heads_in(qkv, b.acts, 1, c.D, c.q_rank + c.D)};
}

void norm_latent(const BlockContext& b, const SubLayerParameters& p, const Slots& saved) {
    const Config& c = b.model.local;
    rmsnorm_heads_forward(heads_in(saved[kLatent], b.acts, 1, c.q_rank), saved[kLatentRstd], heads_of(b, saved).latent,
                          p.norms[kLatentNorm].weight, static_cast<float>(c.norm_eps), b.stream);
}

void forward(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor out, Tensor inp) {
    const Config& c = b.model.local;
    const Heads heads = heads_of(b, saved);
    block_linear_forward(b, p.linears[kQkv], saved[kQkvRows], inp);
    norm_latent(b, p, saved);
    block_linear_forward(b, p.linears[kQUp], saved[kQ], saved[kLatent]);
    const HeadColumns attended = heads_in(saved[kHeads], b.acts, c.H, c.D);
    if (has_cache(b)) {
        attend_to_cache(b, p, attended, {heads.q, heads.k, heads.v});
    } else {
        rope_forward(b, heads.q, RopePairs::halves);
        rope_forward(b, heads.k, RopePairs::halves);
        attend_forward(b, attended, saved[kLse], {heads.q, heads.k, heads.v}, flash_options(b, p));
    }
    if (out.exists()) block_linear_forward(b, p.linears[kOut], out, saved[kHeads]);
}

void backward(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor dinp, Tensor dout,
              Tensor inp) {
    const Config& c = b.model.local;
    const Slots& gradients = b.workspace.dattention;
    const Heads heads = heads_of(b, saved), dheads = heads_of(b, gradients);
    const HeadColumns attended = heads_in(saved[kHeads], b.acts, c.H, c.D),
                      dattended = heads_in(gradients[kHeads], b.acts, c.H, c.D);
    attend_backward(b, p.linears[kOut], {dheads.q, dheads.k, dheads.v}, dattended, dout, attended, saved[kLse],
                    {heads.q, heads.k, heads.v}, flash_options(b, p));
    rope_backward(b, dheads.k, RopePairs::halves);
    rope_backward(b, dheads.q, RopePairs::halves);
    block_linear_backward_input(b, p.linears[kQUp], gradients[kLatent], gradients[kQ]);
    block_linear_backward_weight(b, p.linears[kQUp], gradients[kQ], saved[kLatent]);
    const Norm& norm = p.norms[kLatentNorm];
    rmsnorm_heads_backward(dheads.latent, norm.dweight, heads_in(gradients[kLatent], b.acts, 1, c.q_rank), heads.latent,
                           norm.weight, saved[kLatentRstd], b.workspace.accumulate, b.workspace.scratch, b.stream);

    block_linear_backward_input(b, p.linears[kQkv], dinp, gradients[kQkvRows]);
    block_linear_backward_weight(b, p.linears[kQkv], gradients[kQkvRows], inp);
}

// The latent's norm; rope; the attention. Backward: the attention; rope; norm.
Elements elements(const Config& c) {
    const double q = static_cast<double>(c.H * c.D), k = static_cast<double>(c.D), v = k;
    const double normed = static_cast<double>(c.q_rank), rope = 2 * (q + k);
    const Elements attended = attend_elements(q, k, v, q);
    return {.forward = 2 * normed + rope + attended.forward,
            .backward = 3 * normed + attended.backward + rope,
            .again = 2 * normed};
}

int64_t score_width(const Config& c) { return c.H * (c.D + c.D); }
int64_t rope_width(const Config& c) { return c.D; }
int64_t cache_width(const Config& c) { return 2 * c.D; }
int64_t cache_heads(const Config&) { return 2; }
int64_t cache_scratch_n(const Config& c, int64_t N, int64_t max_length) {
    return paged_attention_scratch_n(N, c.H, c.D, max_length);
}

}  // namespace

extern const SubLayer kFactorizationAttention = {.name = "mfa",
                                                 .check = check,
                                                 .place = place,
                                                 .take_saved = take_saved,
                                                 .take_gradients = take_gradients,
                                                 .scratch_n = scratch_n,
                                                 .forward = forward,
                                                 .recompute = norm_latent,
                                                 .backward = backward,
                                                 .elements = elements,
                                                 .score_width = score_width,
                                                 .rope_width = rope_width,
                                                 .cache_width = cache_width,
                                                 .cache_heads = cache_heads,
                                                 .cache_scratch_n = cache_scratch_n};
