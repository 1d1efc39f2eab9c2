// llm.h: a language model as its maths: forward and backward of GPT-2, LLaMA, Qwen and DeepSeek's dense form. Bodies in
// llm.cu; what a model is made of, in model/model.h.
#pragma once

#include "model/model.h"

// tokens -> logits. tokens and targets (and documents and positions) have been copied into the activations. training:
// this forward counts for the histories of fp8's delayed scaling, which an evaluation must not touch.
// Activations of_step() of inference: the new tokens of several sequences -> the logits of logit_rows; what the tokens
// leave for later ones is in the cache then.
void forward(const Model& model, Activations& acts, const Workspace& workspace, cudaStream_t stream,
             bool training = true);
// logits -> losses. Forward only: the logits stay. With --head-chunks (Recompute) there are never all logits: then
// forward() computes the losses, unless it is a training step's; and loss_backward leaves them to backward(), or
// head_backward(), which computes logits, losses and gradients of one chunk of rows after the other.
void loss_forward(const Model& model, Activations& acts, cudaStream_t stream);
// logits -> losses, and logits become d(dloss * sum of losses) / d logits.
void loss_backward(const Model& model, Activations& acts, float dloss, cudaStream_t stream);
// Gradients of the logits -> all parameter gradients, which are added to, or written (Workspace::accumulate).
void backward(const Model& model, Activations& acts, const Workspace& workspace, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// The same in parts, for stages that have some of the blocks. The residual stream between them is a tensor (N, C) of
// the model's dtype (with sequence parallelism this rank's rows, with 2D to 3D its rows and columns), of which a stage
// gets `in` and gives `out`; its gradient goes the other way. Weight gradients are computed at once, or queued where
// the workspace has a queue. Weights are waited for; that gradients are complete, the caller tells data parallelism.

// acts.tokens -> out (may be acts.embedded). Backward: where it is queued, dout and acts must stay until it has run.
void embed_forward(const Model& model, Activations& acts, const Workspace& workspace, Tensor out, cudaStream_t stream);
void embed_backward(const Model& model, Activations& acts, const Workspace& workspace, Tensor dout,
                    cudaStream_t stream);
// Blocks [first, last) of the model's. Nothing is copied where `in` is the first block's saved input
// (InFlight::take_chunk). training: as in forward().
void forward_blocks(const Model& model, Activations& acts, const Workspace& workspace, int64_t first, int64_t last,
                    Tensor in, Tensor out, cudaStream_t stream, bool training = true);
// dout -> din; in place where din is dout. With recomputation the forward of all these blocks is run again, from the
// inputs that acts keeps.
void backward_blocks(const Model& model, Activations& acts, const Workspace& workspace, int64_t first, int64_t last,
                     Tensor din, Tensor dout, cudaStream_t stream);
// Final norm and head: in -> acts.logits; nothing is copied where `in` is acts.final_norm.sum. Backward: acts.logits,
// which hold their gradient -> din. Where weight gradients are queued, acts.logits and acts.final_norm.out must stay.
void head_forward(const Model& model, Activations& acts, const Workspace& workspace, Tensor in, cudaStream_t stream);
void head_backward(const Model& model, Activations& acts, const Workspace& workspace, Tensor din, cudaStream_t stream);
