// model/attention_mla.cu: multi-head latent attention.            (DeepSeek-V2, arXiv:2405.04434; DeepSeek-V3, arXiv:2412.19437)
//
//   qkv        = [query latent (q_rank) | latent (kv_rank) | shared key (D_rope)]     or, without a q_rank, with the queries
//   q_h        = q_up_h rmsnorm(query latent)                                 H heads of D columns        themselves in front
//   [k_h | v_h] = kv_up_h rmsnorm(latent)                                     D - D_rope and D_v columns
//   queries    = [q_h's first columns | rope(its last D_rope)]
//   keys       = [k_h | rope(shared key)]
//   attn_h     = sum over s of softmax(scale query_h . key_s,h) v_s,h         scale = 1 / sqrt(D), larger with YaRN (rope.cu)
//
// Training expands keys and values and is then multi-head attention. Generating keeps only the latent and the shared key of
// each token, and folds kv_up into query and output (layers/latent_attention.cu): the same function, with sums in another order.
#include "model/attention.h"

#include <algorithm>

namespace {

constexpr float kLatentEps =
    1e-6f;  // of the latents' norms: transformers has a constant here, whatever rms_norm_eps is

// Where everything is, for values as for gradients. Without a q_rank queries are part of qkv.
struct Parts {
    HeadColumns query_latent, latent, shared_key;  // in qkv
    HeadColumns q, q_rotated;
    HeadColumns own_keys, values;  // in kv
    HeadColumns keys;
};
Parts parts_of(const Config& c, const Activations& acts, Tensor qkv, Tensor q, Tensor kv, Tensor k) {
    const int64_t own = c.D - c.D_rope, first = c.q_rank > 0 ? c.q_rank : c.H * c.D;
    const Tensor q_rows = c.q_rank > 0 ? q : qkv;
    return {heads_in(qkv, acts, 1, c.q_rank),
            heads_in(qkv, acts, 1, c.kv_rank, first),
            heads_in(qkv, acts, 1, c.D_rope, first + c.kv_rank),
            heads_in(q_rows, acts, c.H, c.D),
            heads_in(q_rows, acts, c.H, c.D_rope, own, c.D),
            heads_in(kv, acts, c.H, own, 0, own + c.D_v),
            heads_in(kv, acts, c.H, c.D_v, own, own + c.D_v),
            heads_in(k, acts, c.H, c.D)};
}
Parts saved_parts(const Config& c, const Activations& acts, const BlockSaved& saved) {
    return parts_of(c, acts, saved.qkv, saved.q, saved.kv, saved.k);
}

void take_saved(BlockSaved& saved, const Config& c, DType dtype, int64_t N, Arena& arena) {
    if (c.q_rank > 0) saved.q_rstd = arena.take("norms", DType::f32, {N, 1});
    if (c.q_rank > 0) saved.q = arena.take("attention", dtype, {N, c.H * c.D});
    saved.k_rstd = arena.take("norms", DType::f32, {N, 1});
    saved.kv = arena.take("attention", dtype, {N, c.H * (c.D - c.D_rope + c.D_v)});
}
void take_cheap(BlockSaved& saved, const Config& c, DType dtype, int64_t N, Arena& arena) {
    if (c.q_rank > 0) saved.q_latent = arena.take("norms", dtype, {N, c.q_rank});
    saved.kv_latent = arena.take("norms", dtype, {N, c.kv_rank});
    saved.k = arena.take("attention", dtype, {N, c.H * c.D});
}
void take_gradients(Activations& acts, const Config& c, DType dtype, int64_t N, Arena& arena) {
    const auto take = [&](int64_t columns) { return arena.take("gradients of activations", dtype, {N, columns}); };
    if (c.q_rank > 0) acts.dq = take(c.H * c.D), acts.dq_latent = take(c.q_rank);
    acts.dk = take(c.H * c.D);
    acts.dkv = take(c.H * (c.D - c.D_rope + c.D_v));
    acts.dkv_latent = take(c.kv_rank);
}
int64_t scratch_n(const Config& c, int64_t N) {
    const int64_t of_latent = rmsnorm_backward_scratch_n(N, c.kv_rank);
    return c.q_rank > 0 ? std::max(of_latent, rmsnorm_backward_scratch_n(N, c.q_rank)) : of_latent;
}

void norm_latents(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
                  cudaStream_t stream) {
    const Config& c = model.config;
    const Parts p = saved_parts(c, acts, saved);
    if (c.q_rank > 0)
        rmsnorm_heads_forward(heads_in(saved.q_latent, acts, 1, c.q_rank), saved.q_rstd, p.query_latent,
                              block.q_norm.weight, kLatentEps, stream);
    rmsnorm_heads_forward(heads_in(saved.kv_latent, acts, 1, c.kv_rank), saved.k_rstd, p.latent, block.k_norm.weight,
                          kLatentEps, stream);
}

void forward(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
             cudaStream_t stream) {
    const Config& c = model.config;
    const Parts p = saved_parts(c, acts, saved);
    const HeadColumns out = heads_in(saved.attn, acts, c.H, c.D_v);
    const float scale = attention_options(model, block, acts).scale;
    norm_latents(model, block, saved, acts, stream);
    if (c.q_rank > 0) linear_forward(saved.q, block.q_up, kQUp, saved.q_latent, saved, acts, stream);
    rope_forward(p.q_rotated, c.rope_pairs, acts.positions, rope_rows(model, acts), stream);
    rope_forward(p.shared_key, c.rope_pairs, acts.positions, rope_rows(model, acts), stream);
    if (saved.cache) {  // absorbed
        latent_cache_append(saved.cache, acts.first, saved.kv_latent.view({acts.B, acts.T, c.kv_rank}), p.shared_key,
                            stream);
        latent_attention_forward(out, p.q, saved.cache, block.kv_up.weight, acts.first, scale, stream);
        return;
    }
    linear_forward(saved.kv, block.kv_up, kKvUp, saved.kv_latent, saved, acts, stream);
    latent_keys_forward(p.keys, p.own_keys, p.shared_key, stream);
    flash_attention_forward(out, saved.lse, p.q, p.keys, p.values, attention_options(model, block, acts), stream);
}

void recompute_cheap(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
                     cudaStream_t stream) {
    const Parts p = saved_parts(model.config, acts, saved);
    norm_latents(model, block, saved, acts, stream);
    latent_keys_forward(p.keys, p.own_keys, p.shared_key, stream);
}

void backward(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
              cudaStream_t stream) {
    const Config& c = model.config;
    const Parts p = saved_parts(c, acts, saved), d = parts_of(c, acts, acts.dqkv, acts.dq, acts.dkv, acts.dk);
    flash_attention_backward(d.q, d.keys, d.values, heads_in(acts.dattn, acts, c.H, c.D_v),
                             heads_in(saved.attn, acts, c.H, c.D_v), saved.lse, p.q, p.keys, p.values,
                             attention_options(model, block, acts), acts.scratch, stream);
    latent_keys_backward(d.own_keys, d.shared_key, d.keys, stream);
    linear_backward(acts.dkv_latent, block.kv_up, kKvUp, acts.dkv, saved.kv_latent, saved, acts, stream);
    rope_backward(d.shared_key, c.rope_pairs, acts.positions, rope_rows(model, acts), stream);
    rope_backward(d.q_rotated, c.rope_pairs, acts.positions, rope_rows(model, acts), stream);
    rmsnorm_heads_backward(d.latent, block.k_norm.dweight, heads_in(acts.dkv_latent, acts, 1, c.kv_rank), p.latent,
                           block.k_norm.weight, saved.k_rstd, acts.scratch, stream);
    if (c.q_rank == 0) return;
    linear_backward(acts.dq_latent, block.q_up, kQUp, acts.dq, saved.q_latent, saved, acts, stream);
    rmsnorm_heads_backward(d.query_latent, block.q_norm.dweight, heads_in(acts.dq_latent, acts, 1, c.q_rank),
                           p.query_latent, block.q_norm.weight, saved.q_rstd, acts.scratch, stream);
}

}  // namespace

const AttentionVariant kLatentAttention = {take_saved, take_cheap,      take_gradients, scratch_n,
                                           forward,    recompute_cheap, backward};

// ---------------------------------------------------------------------------------------------------------------------
// With a cache

LatentCache take_latent_cache(const Model& model, int64_t B, int64_t T_max, Arena& arena) {
    check(model.config.attention == AttentionKind::mla, "take_latent_cache: only MLA has latents to cache");
    LatentCache cache;
    for (int64_t l = 0; l < model.config.L; ++l)
        cache.layers.push_back(
            arena.take("latent cache", model.precision.dtype, {B, T_max, model.config.cache_width()}));
    return cache;
}
