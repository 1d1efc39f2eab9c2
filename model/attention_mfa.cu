// model/attention_mfa.cu: multi-matrix factorization attention: many wide query heads over one key and one value head.
//                                                     (Hu et al. 2024, arXiv:2412.19255; as in Step-3, arXiv:2507.19427)
//
//   qkv    = [query latent (q_rank) | key (D) | value (D)]
//   q_h    = rope(Wq_h rmsnorm(query latent))                 Wq = q_up (H D, q_rank)
//   attn_h = sum over s of softmax(q_h . rope(key_s) / sqrt(D)) value_s
//
// The cache holds one key and one value, as with MQA: 2 D numbers a token and layer. What makes heads differ is the query, and
// its matrix is factored: all heads share the first factor (C to q_rank), so that more and wider heads cost H D q_rank
// weights instead of H D C.
#include "model/attention.h"

namespace {

struct Heads {
    HeadColumns latent, q, k, v;
};
Heads heads_of(const Config& c, const Activations& acts, Tensor qkv, Tensor q) {
    return {heads_in(qkv, acts, 1, c.q_rank), heads_in(q, acts, c.H, c.D), heads_in(qkv, acts, 1, c.D, c.q_rank),
            heads_in(qkv, acts, 1, c.D, c.q_rank + c.D)};
}

void take_saved(BlockSaved& saved, const Config& c, DType dtype, int64_t N, Arena& arena) {
    saved.q_rstd = arena.take("norms", DType::f32, {N, 1});
    saved.q = arena.take("attention", dtype, {N, c.H * c.D});
}
void take_cheap(BlockSaved& saved, const Config& c, DType dtype, int64_t N, Arena& arena) {
    saved.q_latent = arena.take("norms", dtype, {N, c.q_rank});
}
void take_gradients(Activations& acts, const Config& c, DType dtype, int64_t N, Arena& arena) {
    acts.dq = arena.take("gradients of activations", dtype, {N, c.H * c.D});
    acts.dq_latent = arena.take("gradients of activations", dtype, {N, c.q_rank});
}
int64_t scratch_n(const Config& c, int64_t N) { return rmsnorm_backward_scratch_n(N, c.q_rank); }

void norm_latent(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
                 cudaStream_t stream) {
    const Config& c = model.config;
    rmsnorm_heads_forward(heads_in(saved.q_latent, acts, 1, c.q_rank), saved.q_rstd,
                          heads_in(saved.qkv, acts, 1, c.q_rank), block.q_norm.weight, static_cast<float>(c.norm_eps),
                          stream);
}

void forward(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
             cudaStream_t stream) {
    const Config& c = model.config;
    const Heads heads = heads_of(c, acts, saved.qkv, saved.q);
    norm_latent(model, block, saved, acts, stream);
    linear_forward(saved.q, block.q_up, kQUp, saved.q_latent, saved, acts, stream);
    rope_forward(heads.q, RopePairs::halves, acts.positions, rope_rows(model, acts), stream);
    rope_forward(heads.k, RopePairs::halves, acts.positions, rope_rows(model, acts), stream);
    flash_attention_forward(heads_in(saved.attn, acts, c.H, c.D), saved.lse, heads.q, heads.k, heads.v,
                            attention_options(model, block, acts), stream);
}

void backward(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
              cudaStream_t stream) {
    const Config& c = model.config;
    const Heads heads = heads_of(c, acts, saved.qkv, saved.q), dheads = heads_of(c, acts, acts.dqkv, acts.dq);
    flash_attention_backward(dheads.q, dheads.k, dheads.v, heads_in(acts.dattn, acts, c.H, c.D),
                             heads_in(saved.attn, acts, c.H, c.D), saved.lse, heads.q, heads.k, heads.v,
                             attention_options(model, block, acts), acts.scratch, stream);
    rope_backward(dheads.k, RopePairs::halves, acts.positions, rope_rows(model, acts), stream);
    rope_backward(dheads.q, RopePairs::halves, acts.positions, rope_rows(model, acts), stream);
    linear_backward(acts.dq_latent, block.q_up, kQUp, acts.dq, saved.q_latent, saved, acts, stream);
    rmsnorm_heads_backward(dheads.latent, block.q_norm.dweight, heads_in(acts.dq_latent, acts, 1, c.q_rank),
                           heads.latent, block.q_norm.weight, saved.q_rstd, acts.scratch, stream);
}

}  // namespace

const AttentionVariant kFactorizationAttention = {take_saved, take_cheap,  take_gradients, scratch_n,
                                                  forward,    norm_latent, backward};
