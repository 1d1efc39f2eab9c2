// model/attention_mla.cu: multi-head latent attention.  (DeepSeek-V2, arXiv:2405.04434; DeepSeek-V3, arXiv:2412.19437)
//
//   qkv         = [query latent (q_rank) | latent (kv_rank) | shared key (D_rope)] = linear(inp)
//   q_h         = q_up_h rmsnorm(query latent)                                 H heads of D columns
//   [k_h | v_h] = kv_up_h rmsnorm(latent)                                      D - D_rope and D_v columns
//   queries     = [q_h's first columns | rope(its last D_rope)]
//   keys        = [k_h | rope(shared key)]
//   heads_h     = sum over s of softmax(scale query_h . key_s,h) v_s,h
//   out         = linear(heads)
//
// scale = 1 / sqrt(D), larger with YaRN (rope.cu). Without a q_rank the first product gives the queries themselves, in
// the place of their latent.
//
// Training expands keys and values and is then multi-head attention. Generating keeps only the latent and the shared
// key of each token, and folds kv_up into query and output (layers/flash_attention/paged_latent_attention.cu): the same
// function, with sums in another order.
#include "model/sublayer.h"

#include <algorithm>

namespace {

enum LinearOf { kQkv, kOut, kQUp, kKvUp };  // kQUp: (H D, q_rank); kKvUp: (H (D - D_rope + D_v), kv_rank)
enum NormOf { kQNorm, kKvNorm };            // (q_rank), (kv_rank): of the latents
enum Saved { kQkvRows, kLse, kHeads, kQ, kKv, kK, kQLatent, kKvLatent, kQRstd, kKvRstd };

constexpr float kLatentEps =
    1e-6f;  // of the latents' norms: transformers has a constant here, whatever rms_norm_eps is

void check(const Config& c) {
    ::check(c.K == c.H && c.kv_rank > 0 && c.q_rank >= 0 && c.D > c.D_rope && c.D_v > 0,
            "model configuration: MLA needs as many key/value heads as query heads, kv_lora_rank ", c.kv_rank,
            ", qk_nope_head_dim ", c.D - c.D_rope, " and v_head_dim ", c.D_v, " above 0");
}

int64_t first_width(const Config& c) { return c.q_rank > 0 ? c.q_rank : c.H * c.D; }  // query latent, or queries
int64_t kv_width(const Config& c) { return c.H * (c.D - c.D_rope + c.D_v); }

void place(Placer& placer, const Config& c, const std::string& prefix, SubLayerParameters& p) {
    const std::string a = prefix + "self_attn.";
    p.linears[kQkv] =
        placer.linear(Crossing::enters,
                      {c.q_rank > 0 ? placer.shared(a + "q_a_proj", c.q_rank) : placer.divided(a + "q_proj", c.H * c.D),
                       placer.shared(a + "kv_a_proj_with_mqa", c.kv_rank + c.D_rope)},
                      c.C, false);
    if (c.q_rank > 0) {
        p.norms[kQNorm] = placer.norm(a + "q_a_layernorm", c.q_rank, false, true);
        p.linears[kQUp] = placer.linear(Crossing::inside, {placer.divided(a + "q_b_proj", c.H * c.D)}, c.q_rank, false);
    }
    p.norms[kKvNorm] = placer.norm(a + "kv_a_layernorm", c.kv_rank, false, true);
    p.linears[kKvUp] =
        placer.linear(Crossing::inside, {placer.divided(a + "kv_b_proj", kv_width(c))}, c.kv_rank, false);
    p.linears[kKvUp].weight_is_read = true;  // by the absorbed form
    p.linears[kOut] = placer.linear(Crossing::leaves, {{a + "o_proj", c.C}}, c.H * c.D_v, false);
}

void take_saved(SavedTaker& take, const Config& c, Slots& saved) {
    saved[kQkvRows] = take.keep("attention", first_width(c) + c.kv_rank + c.D_rope);
    saved[kLse] = take.arena().take("attention", DType::f32, {take.B, c.H, take.T});
    saved[kHeads] = take.keep("attention", c.H * c.D_v);
    if (c.q_rank > 0) {
        saved[kQRstd] = take.keep_norms(1);
        saved[kQ] = take.keep("attention", c.H * c.D);
        saved[kQLatent] = take.recomputable("norms", c.q_rank);
    }
    saved[kKvRstd] = take.keep_norms(1);
    saved[kKv] = take.keep("attention", kv_width(c));
    saved[kKvLatent] = take.recomputable("norms", c.kv_rank);
    saved[kK] = take.recomputable("attention", c.H * c.D);
}
void take_gradients(SavedTaker& take, const Config& c, Slots& gradients) {
    const auto gradient = [&](int64_t columns) { return take.keep("gradients of activations", columns); };
    gradients[kQkvRows] = gradient(first_width(c) + c.kv_rank + c.D_rope);
    gradients[kHeads] = gradient(c.H * c.D_v);
    if (c.q_rank > 0) gradients[kQ] = gradient(c.H * c.D), gradients[kQLatent] = gradient(c.q_rank);
    gradients[kK] = gradient(c.H * c.D);
    gradients[kKv] = gradient(kv_width(c));
    gradients[kKvLatent] = gradient(c.kv_rank);
}
int64_t scratch_n(const Model& model, int64_t B, int64_t T) {
    const Config& c = model.local;
    const int64_t attention = attention_scratch_n(model, {B, c.H, c.H, c.D, c.D_v, model.precision.dtype}, T);
    return std::max({attention, rmsnorm_backward_scratch_n(B * T, c.kv_rank),
                     c.q_rank > 0 ? rmsnorm_backward_scratch_n(B * T, c.q_rank) : 0});
}

// Where everything is, for values as for gradients.
struct Places {
    HeadColumns query_latent, latent, shared_key;  // in qkv
    HeadColumns q, q_rotated;                      // in a tensor of their own, or in qkv
    HeadColumns own_keys, values;                  // in kv
    HeadColumns keys, heads;
};
Places places_of(const BlockContext& b, const Slots& slots) {
    const Config& c = b.model.local;
    const Activations& acts = b.acts;
    const Tensor qkv = slots[kQkvRows], q_rows = c.q_rank > 0 ? slots[kQ] : qkv;
    const int64_t own = c.D - c.D_rope, first = first_width(c);
    return {heads_in(qkv, acts, 1, c.q_rank),
            heads_in(qkv, acts, 1, c.kv_rank, first),
            heads_in(qkv, acts, 1, c.D_rope, first + c.kv_rank),
            heads_in(q_rows, acts, c.H, c.D),
            heads_in(q_rows, acts, c.H, c.D_rope, own, c.D),
            heads_in(slots[kKv], acts, c.H, own, 0, own + c.D_v),
            heads_in(slots[kKv], acts, c.H, c.D_v, own, own + c.D_v),
            heads_in(slots[kK], acts, c.H, c.D),
            heads_in(slots[kHeads], acts, c.H, c.D_v)};
}

FlashAttentionOptions options(const BlockContext& b, const SubLayerParameters& p) {
    return flash_options(b, p, rope_softmax_factor(b.model.local.rope_scaling));
}

void norm_latents(const BlockContext& b, const SubLayerParameters& p, const Slots& saved) {
    const Config& c = b.model.local;
    const Places at = places_of(b, saved);
    if (c.q_rank > 0)
        rmsnorm_heads_forward(heads_in(saved[kQLatent], b.acts, 1, c.q_rank), saved[kQRstd], at.query_latent,
                              p.norms[kQNorm].weight, kLatentEps, b.stream);
    rmsnorm_heads_forward(heads_in(saved[kKvLatent], b.acts, 1, c.kv_rank), saved[kKvRstd], at.latent,
                          p.norms[kKvNorm].weight, kLatentEps, b.stream);
}

void forward(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor out, Tensor inp) {
    const Config& c = b.model.local;
    const Places at = places_of(b, saved);
    block_linear_forward(b, p.linears[kQkv], saved[kQkvRows], inp);
    norm_latents(b, p, saved);
    if (c.q_rank > 0) block_linear_forward(b, p.linears[kQUp], saved[kQ], saved[kQLatent]);
    rope_forward(b, at.q_rotated, c.rope_pairs);
    rope_forward(b, at.shared_key, c.rope_pairs);
    if (has_cache(b)) {  // absorbed
        paged_latent_write(paged_step(b), heads_in(saved[kKvLatent], b.acts, 1, c.kv_rank), at.shared_key, b.stream);
        paged_latent_attention_forward(at.heads, at.q, paged_step(b), p.linears[kKvUp].weight, options(b, p).scale,
                                       b.workspace.scratch, b.stream);
    } else {
        block_linear_forward(b, p.linears[kKvUp], saved[kKv], saved[kKvLatent]);
        latent_keys_forward(at.keys, at.own_keys, at.shared_key, b.stream);
        attend_forward(b, at.heads, saved[kLse], {at.q, at.keys, at.values}, options(b, p));
    }
    if (out.exists()) block_linear_forward(b, p.linears[kOut], out, saved[kHeads]);
}

void recompute(const BlockContext& b, const SubLayerParameters& p, const Slots& saved) {
    const Places at = places_of(b, saved);
    norm_latents(b, p, saved);
    latent_keys_forward(at.keys, at.own_keys, at.shared_key, b.stream);
}

void backward(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor dinp, Tensor dout,
              Tensor inp) {
    const Config& c = b.model.local;
    const Slots& gradients = b.workspace.dattention;
    const Tensor scratch = b.workspace.scratch;
    const Places at = places_of(b, saved), d = places_of(b, gradients);
    attend_backward(b, p.linears[kOut], {d.q, d.keys, d.values}, d.heads, dout, at.heads, saved[kLse],
                    {at.q, at.keys, at.values}, options(b, p));
    latent_keys_backward(d.own_keys, d.shared_key, d.keys, b.stream);
    block_linear_backward_input(b, p.linears[kKvUp], gradients[kKvLatent], gradients[kKv]);
    block_linear_backward_weight(b, p.linears[kKvUp], gradients[kKv], saved[kKvLatent]);
    rope_backward(b, d.shared_key, c.rope_pairs);
    rope_backward(b, d.q_rotated, c.rope_pairs);
    const Norm &kv_norm = p.norms[kKvNorm], &q_norm = p.norms[kQNorm];
    rmsnorm_heads_backward(d.latent, kv_norm.dweight, heads_in(gradients[kKvLatent], b.acts, 1, c.kv_rank), at.latent,
                           kv_norm.weight, saved[kKvRstd], b.workspace.accumulate, scratch, b.stream);
    if (c.q_rank > 0) {
        block_linear_backward_input(b, p.linears[kQUp], gradients[kQLatent], gradients[kQ]);
        block_linear_backward_weight(b, p.linears[kQUp], gradients[kQ], saved[kQLatent]);
        rmsnorm_heads_backward(d.query_latent, q_norm.dweight, heads_in(gradients[kQLatent], b.acts, 1, c.q_rank),
                               at.query_latent, q_norm.weight, saved[kQRstd], b.workspace.accumulate, scratch,
                               b.stream);
    }

    block_linear_backward_input(b, p.linears[kQkv], dinp, gradients[kQkvRows]);
    block_linear_backward_weight(b, p.linears[kQkv], gradients[kQkvRows], inp);
}

// Norms of latents; rope; the keys put together (latent_keys.cu); the attention. Backward: the attention; the others.
Elements elements(const Config& c) {
    const double q = static_cast<double>(c.H * c.D), k = q, v = static_cast<double>(c.H * c.D_v);
    const double normed = static_cast<double>(c.q_rank + c.kv_rank);
    const double rope = 2 * static_cast<double>((c.H + 1) * c.D_rope);
    const double keys = k - static_cast<double>(c.H * c.D_rope) + k;
    const Elements attended = attend_elements(q, k, v, v);
    return {.forward = 2 * normed + rope + keys + attended.forward,
            .backward = 3 * normed + attended.backward + rope + keys,
            .again = 2 * normed + keys};
}

int64_t score_width(const Config& c) { return c.H * (c.D + c.D_v); }
int64_t rope_width(const Config& c) { return c.D_rope; }
int64_t cache_width(const Config& c) { return c.kv_rank + c.D_rope; }
int64_t cache_heads(const Config&) { return 2; }
int64_t cache_scratch_n(const Config& c, int64_t N, int64_t max_length) {
    constexpr int64_t most = kMaxLatentColumns;
    ::check(cache_width(c) <= most, "a model with kv_lora_rank ", c.kv_rank, " and qk_rope_head_dim ", c.D_rope,
            " cannot generate, because a cache has at most ", most,
            " elements a token for both; it can be trained, with --sample 0");
    return paged_latent_attention_scratch_n(N, c.H, c.kv_rank, c.D_rope, max_length);
}

}  // namespace

extern const SubLayer kLatentAttention = {.name = "mla",
                                          .check = check,
                                          .place = place,
                                          .take_saved = take_saved,
                                          .take_gradients = take_gradients,
                                          .scratch_n = scratch_n,
                                          .forward = forward,
                                          .recompute = recompute,
                                          .backward = backward,
                                          .elements = elements,
                                          .score_width = score_width,
                                          .rope_width = rope_width,
                                          .cache_width = cache_width,
                                          .cache_heads = cache_heads,
                                          .cache_scratch_n = cache_scratch_n};
