// llm.h: a language model as its maths: forward and backward of GPT-2, LLaMA, Qwen and DeepSeek's dense form. Bodies in
// llm.cu; what a model is made of, in model/model.h.
#pragma once

#include "model/model.h"

// tokens -> logits. tokens and targets (and documents and positions) have been copied into the activations. training:
// this forward counts for the histories of fp8's delayed scaling, which an evaluation must not touch.
void forward(const Model& model, Activations& acts, const Workspace& workspace, cudaStream_t stream,
             bool training = true);
// logits -> losses. Forward only: the logits stay.
void loss_forward(const Model& model, Activations& acts, cudaStream_t stream);
// logits -> losses, and logits become d(dloss * sum of losses) / d logits.
void loss_backward(const Model& model, Activations& acts, float dloss, cudaStream_t stream);
// Gradients of the logits -> all parameter gradients, which are added to.
void backward(const Model& model, Activations& acts, const Workspace& workspace, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// The same in parts, for stages that have some of the blocks. The residual stream between them is a tensor (N, C) of
// the model's dtype, of which a stage gets `in` and gives `out`; its gradient goes the other way.

// acts.tokens -> out (may be acts.embedded).
void embed_forward(const Model& model, Activations& acts, Tensor out, cudaStream_t stream);
void embed_backward(const Model& model, Activations& acts, const Workspace& workspace, Tensor dout,
                    cudaStream_t stream);
// Blocks [first, last).
void forward_blocks(const Model& model, Activations& acts, const Workspace& workspace, int64_t first, int64_t last,
                    Tensor in, Tensor out, cudaStream_t stream);
// dout -> din; din may be dout.
void backward_blocks(const Model& model, Activations& acts, const Workspace& workspace, int64_t first, int64_t last,
                     Tensor din, Tensor dout, cudaStream_t stream);
// Final norm and head: in -> acts.logits. Backward: acts.logits, which hold their gradient -> din.
void head_forward(const Model& model, Activations& acts, Tensor in, cudaStream_t stream);
void head_backward(const Model& model, Activations& acts, const Workspace& workspace, Tensor din, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// MLA with a cache. A token leaves kv_rank + D_rope numbers a layer, its latent and its rotated key, and a later
// token's attention reads those alone: the absorbed form (layers/latent_attention.cu), which never expands keys and
// values.

// tokens -> logits, as forward, for T more tokens of each sequence, which see those in the cache and are appended to
// it. T is that of the activations: a whole prompt, or 1. The model must have been built for as many positions as there
// are then.
void forward_cached(const Model& model, Activations& acts, const Workspace& workspace, LatentCache& cache,
                    cudaStream_t stream);
