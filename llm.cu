// llm.cu: GPT-2, LLaMA and their kin, forward and, in mirrored order, backward.
//
// A model is a token embedding, L blocks and a head. A block adds two branches to the residual stream x:
//
//     x = x + attention(norm1(x))
//     x = x + feed_forward(norm2(x))
//
// GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases, GELU, tied head.
// LLaMA (Touvron et al. 2023, arXiv:2302.13971): rotary positions, RMSNorm, no biases, SwiGLU, grouped-query attention.
// Qwen2, Qwen3, DeepSeek and MFA differ from LLaMA in their attention alone: model/attention.h has the variants.
//
// The addition to the stream is done by the norm that comes next (it reads the sum anyway), so a block hands on two things:
// the stream before its last branch (norm2.sum), and that branch (acts.branch).
#include "model/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// A linear layer of a block, in dtype or with its products in fp8.
void linear_forward(Tensor out, const Linear& linear, BlockLinear which, Tensor inp, const BlockSaved& saved,
                    const Activations& acts, cudaStream_t stream) {
    if (!saved.fp8) return linear_forward(out, inp, linear.weight, linear.bias, stream);
    const Tensor scaled_by = saved.fp8.slice(which, 1).view({2});
    fp8_linear_forward(out, scaled_by, inp, linear.fp8, linear.bias, linear.fp8_state, acts.training, acts.scratch,
                       stream);
}
void linear_backward(Tensor dinp, const Linear& linear, BlockLinear which, Tensor dout, Tensor inp,
                     const BlockSaved& saved, const Activations& acts, cudaStream_t stream) {
    if (!saved.fp8) {
        linear_backward_input(dinp, dout, linear.weight, false, stream);
        linear_backward_weight(linear.dweight, linear.dbias, dout, inp, acts.scratch, stream);
        return;
    }
    const Tensor scaled_by = saved.fp8.slice(which, 1).view({2});
    fp8_linear_backward_input(dinp, scaled_by, dout, linear.fp8, false, linear.fp8_state, acts.scratch, stream);
    fp8_linear_backward_weight(linear.dweight, linear.dbias, dout, inp, scaled_by, linear.fp8.recipe, acts.scratch,
                               stream);
}

namespace {

// saved.sum = inp + branch, saved.out = norm(saved.sum). Without a branch, saved.sum is inp itself.
void norm_forward(const Config& config, const Norm& norm, const NormSaved& saved, Tensor inp, Tensor branch,
                  cudaStream_t stream) {
    const Tensor sum = branch ? saved.sum : Tensor{};
    const float eps = static_cast<float>(config.norm_eps);
    if (config.family == Family::gpt2)
        layernorm_forward(saved.out, sum, saved.mean, saved.rstd, inp, branch, norm.weight, norm.bias, eps, stream);
    else rmsnorm_forward(saved.out, sum, saved.rstd, inp, branch, norm.weight, eps, stream);
}

// dinp = d norm + dsum
void norm_backward(const Config& config, const Norm& norm, const NormSaved& saved, Tensor dinp, Tensor dout,
                   Tensor dsum, Tensor scratch, cudaStream_t stream) {
    if (config.family == Family::gpt2)
        layernorm_backward(dinp, norm.dweight, norm.dbias, dout, dsum, saved.sum, norm.weight, saved.mean, saved.rstd,
                           scratch, stream);
    else rmsnorm_backward(dinp, norm.dweight, dout, dsum, saved.sum, norm.weight, saved.rstd, scratch, stream);
}

void activation_forward(const Config& config, const BlockSaved& saved, cudaStream_t stream) {
    if (config.family == Family::llama) swiglu_forward(saved.act, saved.up, stream);
    else gelu_forward(saved.act, saved.up, stream);
}

// residual, acts.branch -> saved.norm2.sum, acts.branch: the block's stream and its last branch, not yet added.
// Without a branch residual is the whole input. `last_branch` is false where a forward is run again for the sake of what it
// saves: then nobody needs the block's output.
void block_forward(const Model& model, const Block& block, const BlockSaved& saved, Activations& acts, Tensor residual,
                   bool has_branch, bool last_branch, cudaStream_t stream) {
    const Config& c = model.config;
    norm_forward(c, block.norm1, saved.norm1, residual, has_branch ? acts.branch : Tensor{}, stream);
    linear_forward(saved.qkv, block.qkv, kQkv, saved.norm1.out, saved, acts, stream);
    attention_variant(c).forward(model, block, saved, acts, stream);
    linear_forward(acts.branch, block.attn_out, kAttnOut, saved.attn, saved, acts, stream);

    norm_forward(c, block.norm2, saved.norm2, saved.norm1.sum, acts.branch, stream);
    linear_forward(saved.up, block.up, kUp, saved.norm2.out, saved, acts, stream);
    activation_forward(c, saved, stream);
    if (last_branch) linear_forward(acts.branch, block.down, kDown, saved.act, saved, acts, stream);
}

// Selective recomputation: fills again what the blocks share (take_blocks).
void recompute_shared(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
                      cudaStream_t stream) {
    const Config& config = model.config;
    norm_forward(config, block.norm1, saved.norm1, saved.norm1.sum, {}, stream);
    attention_variant(config).recompute_cheap(model, block, saved, acts, stream);
    norm_forward(config, block.norm2, saved.norm2, saved.norm2.sum, {}, stream);
    activation_forward(config, saved, stream);
}

// Recomputation by blocks: runs blocks [first, last] forward again, from the input of the first.
void recompute_blocks(const Model& model, Activations& acts, size_t first, size_t last, cudaStream_t stream) {
    Tensor residual = acts.blocks[first].norm1.sum;
    for (size_t l = first; l <= last; ++l) {
        gather(model, 1 + l, l < last ? static_cast<int64_t>(2 + l) : -1, stream);
        block_forward(model, model.blocks[l], acts.blocks[l], acts, residual, l > first, l < last, stream);
        residual = acts.blocks[l].norm2.sum;
    }
}

// acts.dresidual holds the gradient of the block's output, which is the gradient of both its branches; it leaves as the
// gradient of the block's input.
void block_backward(const Model& model, const Block& block, const BlockSaved& saved, Activations& acts,
                    cudaStream_t stream) {
    const Config& c = model.config;
    if (acts.recompute.selective) recompute_shared(model, block, saved, acts, stream);

    linear_backward(acts.dact, block.down, kDown, acts.dresidual, saved.act, saved, acts, stream);
    if (c.family == Family::llama) swiglu_backward(acts.dup, acts.dact, saved.up, stream);
    else gelu_backward(acts.dup, acts.dact, saved.up, stream);
    linear_backward(acts.dnorm, block.up, kUp, acts.dup, saved.norm2.out, saved, acts, stream);
    norm_backward(c, block.norm2, saved.norm2, acts.dresidual, acts.dnorm, acts.dresidual, acts.scratch, stream);

    linear_backward(acts.dattn, block.attn_out, kAttnOut, acts.dresidual, saved.attn, saved, acts, stream);
    attention_variant(c).backward(model, block, saved, acts, stream);
    linear_backward(acts.dnorm, block.qkv, kQkv, acts.dqkv, saved.norm1.out, saved, acts, stream);
    norm_backward(c, block.norm1, saved.norm1, acts.dresidual, acts.dnorm, acts.dresidual, acts.scratch, stream);
}

}  // namespace

void forward(const Model& model, Activations& acts, cudaStream_t stream, bool training) {
    const Config& c = model.config;
    acts.training = training;
    gather(model, 0, 1, stream);
    embedding_forward(acts.embedded.view({acts.B, acts.T, c.C}), acts.tokens, acts.positions, model.wte, model.wpe,
                      stream);
    Tensor residual = acts.embedded;
    for (size_t l = 0; l < model.blocks.size(); ++l) {
        gather(model, 1 + l, static_cast<int64_t>(2 + l), stream);
        block_forward(model, model.blocks[l], acts.blocks[l], acts, residual, l > 0, true, stream);
        residual = acts.blocks[l].norm2.sum;
    }
    gather(model, head_unit(model), -1, stream);
    if (c.tied) gather(model, 0, -1, stream);
    norm_forward(c, model.final_norm, acts.final_norm, residual, acts.branch, stream);
    linear_forward(acts.logits, acts.final_norm.out, model.head.weight, {}, stream);
}

void loss_forward(const Model& model, Activations& acts, cudaStream_t stream) {
    cross_entropy_forward(acts.losses, acts.logits, acts.targets, model.config.V, stream);
}

void loss_backward(const Model& model, Activations& acts, float dloss, cudaStream_t stream) {
    cross_entropy_forward_backward(acts.losses, acts.logits, acts.targets, model.config.V, dloss, stream);
}

void backward(const Model& model, Activations& acts, cudaStream_t stream) {
    const Config& c = model.config;
    const size_t head = head_unit(model);
    gather(model, head, -1, stream);
    if (c.tied) gather(model, 0, -1, stream);
    begin_grads(model, head, stream);
    if (c.tied) begin_grads(model, 0, stream);
    linear_backward_input(acts.dnorm, acts.logits, model.head.weight, false, stream);
    linear_backward_weight(model.head.dweight, {}, acts.logits, acts.final_norm.out, acts.scratch, stream);
    norm_backward(c, model.final_norm, acts.final_norm, acts.dresidual, acts.dnorm, {}, acts.scratch, stream);
    end_grads(model, head, stream);
    const size_t L = model.blocks.size(),
                 segment = acts.recompute.every > 0 ? static_cast<size_t>(acts.recompute.every) : L;
    for (size_t l = L; l-- > 0;) {
        // The last segment's activations are still there from the forward; those before were overwritten.
        if ((l + 1) % segment == 0 && l + 1 < L) recompute_blocks(model, acts, l + 1 - segment, l, stream);
        const bool next_is_run_again = l % segment == 0;  // then its segment is gathered from the front
        gather(model, 1 + l, next_is_run_again ? -1 : static_cast<int64_t>(l), stream);
        begin_grads(model, 1 + l, stream);
        block_backward(model, model.blocks[l], acts.blocks[l], acts, stream);
        end_grads(model, 1 + l, stream);
    }
    if (!c.tied) begin_grads(model, 0, stream);
    embedding_backward(model.dwte, model.dwpe, acts.dresidual.view({acts.B, acts.T, c.C}), acts.tokens, acts.positions,
                       acts.links, stream);
    end_grads(model, 0, stream);
}

void forward_cached(const Model& model, Activations& acts, LatentCache& cache, cudaStream_t stream) {
    check(model.config.attention == AttentionKind::mla && cache.layers.size() == model.blocks.size(),
          "forward_cached: needs a model with MLA, and a cache taken for it");
    const int64_t end = cache.length + acts.T;
    check(end <= cache.layers[0].shape[1] && end <= model.rope_table.shape[0], "forward_cached: ", cache.length, " + ",
          acts.T, " tokens, but the cache has ", cache.layers[0].shape[1], " rows and the model was built for ",
          model.rope_table.shape[0], " positions: take a longer cache");
    acts.first = cache.length;
    for (size_t l = 0; l < acts.blocks.size(); ++l) acts.blocks[l].cache = cache.layers[l];
    forward(model, acts, stream, false);
    for (BlockSaved& saved : acts.blocks) saved.cache = {};
    acts.first = 0;
    cache.length = end;
}
