// model/sublayer.h: what an attention or a feed-forward is. A block is two of them, each after a norm, each added to
// the stream:
//
//     x = x + attention(norm1(x))
//     x = x + feed_forward(norm2(x))
//
// A sub-layer is one file, which defines a SubLayer and says all that is to be known of it: its parameters and their
// Hugging Face names, what it keeps, what it can compute again, its forward, its backward and what they move.
// sublayers.cu has the table of them. feed_forward_gelu.cu is the shortest, and the one to copy.
#pragma once

#include "layers/decode.h"
#include "model/model.h"

#include <cmath>
#include <optional>
#include <string>

// Gives every parameter its place in the flat arrays. Fused matrices (q, k and v; gate and up) get one place; their
// parts are rows of it, under names of their own. (parameters.cu)
// With tensor parallelism each rank has some rows, or some columns, of most matrices of a sub-layer: Part and Crossing
// say which; the sizes are those of the whole model.
class Placer {
  public:
    // counting: decides the places; otherwise the units have memory.
    Placer(Model& model, bool counting) : model_(model), counting_(counting) {}

    // Output rows of a linear layer under a name of their own.
    struct Part {
        std::string name;
        int64_t rows;
        std::vector<std::pair<int64_t, int64_t>> here = {};  // {first, how many} of them that this rank has; none: all
        AxisSet along = 0;                                   // they are divided along these axes
    };
    // A part of `groups` groups of rows, each for itself divided among the ranks: heads, or columns of a feed-forward.
    Part divided(const std::string& name, int64_t rows, int64_t groups = 1) const;
    // Keys or values of K heads of D columns each: divided, or, where there are more ranks than heads, shared.
    Part keys(const std::string& name, int64_t K, int64_t D) const;
    // What all ranks have, and each of them computes with for its own heads alone.
    Part shared(const std::string& name, int64_t rows) const { return {name, rows}; }

    struct Place {
        Tensor value, grad, master;
        int64_t offset = 0;
    };
    // What is taken from here on belongs to this unit, which has this number in the whole model.
    void begin_unit(const std::string& name, int64_t number);
    void end_unit();
    Place take(std::initializer_list<int64_t> dims);
    // Rows [first, first + rows) of a place as the parameter `name`.
    Param& name(const std::string& name, const Place& place, int64_t first, int64_t rows, bool decay,
                bool transposed = false, int64_t padded_rows = 0);
    // inside: of a sub-layer, where each rank has a part of its gradient.
    Norm norm(const std::string& prefix, int64_t C, bool bias, bool inside = false);
    // A linear layer (O, C) of one or more parts, each with its name. transposed: files hold (C, O). crossing: whether
    // it reads the residual stream, writes it, or stands between such layers.
    Linear linear(Crossing crossing, const std::vector<Part>& parts, int64_t C, bool bias, bool transposed = false);
    // Rows of the embedding or the head: the tokens of this rank, and padding.
    // copy_of: as in Param.
    Place tokens(const std::string& name, const std::string& copy_of = {});
    Place positions(const std::string& name);  // a row for each position
    int64_t n() const { return n_; }

  private:
    ::Part heads() const { return model_.layout.part(model_.layout.heads); }
    AxisSet heads_axes() const { return TensorLayout::set_of(model_.layout.heads); }
    // Of elements that are divided along these axes: the axes along which ranks have the same.
    AxisSet copies(AxisSet along) const;
    bool is_first(AxisSet axes) const;  // of the ranks along these axes
    // Which elements of the whole a parameter is, and which ranks have parts of its gradient: copies, as far as the
    // rows that the gradient is a sum over are divided along these axes.
    void settle(Param& param, const Cut& cut, AxisSet along, AxisSet parts_along) const;
    static constexpr AxisSet kAllAxes = 0xff;
    Tensor next_elements(const Tensor& unit, std::initializer_list<int64_t> dims) const;

    static constexpr size_t kNone = static_cast<size_t>(-1);
    Model& model_;
    const bool counting_;
    int64_t n_ = 0, unit_offset_ = 0;
    size_t unit_ = kNone;
    Tensor weights_, grads_, masters_;  // of the unit
};

// Hands out the tensors that a sub-layer keeps for its backward. (activations.cu)
class SavedTaker {
  public:
    // shared: what can be computed again is one tensor for all blocks (selective recomputation).
    // rows: of the residual stream and of norms; N, or with sequence parallelism a part of them.
    SavedTaker(Arena& arena, DType dtype, int64_t B, int64_t T, int64_t rows, bool shared)
        : B(B), T(T), N(B * T), rows(rows), arena_(arena), dtype_(dtype), shared_(shared) {}
    const int64_t B, T, N, rows;

    void begin_block() { next_ = 0; }
    // (N, columns), of the model's dtype, or in float32 the factors of norms (rstd): kept from the forward to the
    // backward.
    Tensor keep(const char* what, int64_t columns) { return arena_.take(what, dtype_, {N, columns}); }
    Tensor keep_norms(int64_t columns) { return arena_.take("norms", DType::f32, {N, columns}); }
    Tensor keep_rows(const char* what, int64_t columns) { return arena_.take(what, dtype_, {rows, columns}); }
    // Cheap to compute again from what is kept: the outputs of norms and of activation functions, and MLA's keys.
    Tensor recomputable(const char* what, int64_t columns) { return recomputable(what, N, columns); }
    Tensor recomputable_rows(const char* what, int64_t columns) { return recomputable(what, rows, columns); }
    Arena& arena() { return arena_; }

  private:
    Tensor recomputable(const char* what, int64_t n, int64_t columns);
    Arena& arena_;
    const DType dtype_;
    const bool shared_;
    std::vector<Tensor> tensors_;  // shared ones, in the order of the calls in a block
    size_t next_ = 0;
};

// (activations.cu) What a block keeps, with the input that is given; the tokens of a micro-batch, all_tokens of all
// ranks that look up embeddings together; their losses; the final norm, of `rows` rows, and n_logits logits; rows
// of the residual stream and sequences of a micro-batch on this rank.
BlockSaved take_block(const Model& model, SavedTaker& take, Tensor input);
void take_tokens(const Model& model, Activations& acts, int64_t all_tokens, Arena& arena);
void take_losses(const Model& model, Activations& acts, Arena& arena);
void take_head(const Model& model, Activations& acts, int64_t rows, int64_t n_logits, Tensor sum, Arena& arena);
int64_t rows_of_rank(const Model& model, int64_t N);
int64_t sequences_of_rank(const Model& model, int64_t B);

// What the functions of a sub-layer work with: one block of one micro-batch, on one stream.
struct BlockContext {
    const Model& model;
    const Activations& acts;  // sizes, documents, positions
    const Workspace& workspace;
    const BlockSaved& saved;
    cudaStream_t stream;
    std::optional<NormInFront> norm = {};  // in front of the sub-layer, if its first product computes this norm
};

// Elements read and written for one token, each operation by itself, beside the products. again: by what selective
// recomputation runs again. fp8_forward, fp8_backward: so many more where products are in fp8, by operations that
// products of 16 bits have in them.
struct Elements {
    double forward = 0, backward = 0, again = 0, fp8_forward = 0, fp8_backward = 0;
};

struct SubLayer {
    const char* name;
    void (*check)(const Config& config);  // Error for sizes that do not fit together
    // `prefix`: of the block's names, "model.layers.3." or "transformer.h.3.". The matrix that writes the output is
    // named o_proj, down_proj or c_proj, by which init_weights knows it: its initial values are smaller.
    void (*place)(Placer& placer, const Config& config, const std::string& prefix, SubLayerParameters& parameters);
    void (*take_saved)(SavedTaker& take, const Config& config, Slots& saved);
    // Gradients of what is saved, in the same slots; one set for all blocks.
    void (*take_gradients)(SavedTaker& take, const Config& config, Slots& gradients);
    int64_t (*scratch_n)(const Model& model, int64_t B, int64_t T);  // floats, beside what linear layers need

    // inp -> out, keeping what the backward needs in `saved`. No `out`: all but the last product, whose result nobody
    // needs where a forward is run again.
    void (*forward)(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor out, Tensor inp);
    // Fills again what take_saved called recomputable.
    void (*recompute)(const BlockContext& b, const SubLayerParameters& p, const Slots& saved);
    // dout -> dinp (written), and the gradients of the parameters (added to, or written: Workspace).
    void (*backward)(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor dinp, Tensor dout,
                     Tensor inp);
    Elements (*elements)(const Config& config);
    // Then the product may form the norm in front of the sub-layer (norm_forward).
    bool first_linear_alone_reads_inp = false;

    // Attention only. score_width: columns that a score multiplies, of q.k and of p.v, in all heads.
    int64_t (*score_width)(const Config& config) = nullptr;
    int64_t (*rope_width)(const Config& config) = nullptr;   // columns of a head that rope rotates
    int64_t (*cache_width)(const Config& config) = nullptr;  // numbers that a token leaves in the cache of a layer
    int64_t (*cache_heads)(const Config& config) = nullptr;  // heads that these are: each has a scale with e4m3
    // floats that the attention of N new tokens over a cache needs, with sequences of up to max_length tokens
    int64_t (*cache_scratch_n)(const Config& config, int64_t N, int64_t max_length) = nullptr;
};

// ---------------------------------------------------------------------------------------------------------------------
// What sub-layers share

// A linear layer of a block, in the model's dtype or with its products in fp8: its three products, which may be called
// at different times. (block_linear.cu)
void block_linear_forward(const BlockContext& b, const Linear& linear, Tensor out, Tensor inp);
// Is its product one of few_rows.cu that this rank computes alone: of a step of inference on a GPU?
bool is_few_rows(const BlockContext& b, const Linear& linear);
void block_linear_backward_input(const BlockContext& b, const Linear& linear, Tensor dinp, Tensor dout);
// The same with GELU after the layer: out = gelu(before), before = linear(inp); and before the layer, of which before
// is the input: dbefore = gelu'(before) * what the layer's input gets. In one product where that can be.
void block_linear_gelu_forward(const BlockContext& b, const Linear& linear, Tensor out, Tensor before, Tensor inp);
void block_linear_gelu_backward_input(const BlockContext& b, const Linear& linear, Tensor dbefore, Tensor dout,
                                      Tensor before);
// The same with attention before the layer, of which attended is the output: dattended = what the layer's input gets,
// and with it attention's delta, where this rank computes the product alone. True: it has.
bool block_linear_delta_backward_input(const BlockContext& b, const Linear& linear, Tensor dattended,
                                       const FlashDelta& delta, Tensor dout, Tensor attended);
// A linear layer of gates and what they multiply, and SwiGLU after it.
void block_linear_swiglu_forward(const BlockContext& b, const Linear& linear, Tensor out, Tensor before, Tensor inp);
// Now, or later, if the workspace has a queue. After backward_input of the same dout.
void block_linear_backward_weight(const BlockContext& b, const Linear& linear, Tensor dout, Tensor inp);
// The three products of the head, which reads the residual stream as the first layer of a block does.
void head_linear_forward(const Model& model, const Activations& acts, Tensor logits, Tensor inp, cudaStream_t stream);
void head_linear_backward_input(const Model& model, const Activations& acts, Tensor dinp, Tensor dlogits,
                                cudaStream_t stream);
void head_linear_backward_weight(const Model& model, const Activations& acts, Tensor dlogits, Tensor inp,
                                 const Workspace& workspace, cudaStream_t stream);  // now, or later
// Before a sub-layer's backward: with sequence parallelism the other ranks' rows of its input travel meanwhile.
void prefetch_rows(const BlockContext& b, Tensor inp);

// The linear layers that a block has, in the order of Linear::index.
std::vector<Linear*> linears(Block& block);
// The parameters of block l of the whole model. (parameters.cu)
Block place_block(Placer& placer, const Config& config, int64_t l);
// Fills in Visit::next. (visits.cu)
void set_next(std::vector<Visit>& visits);
// With fp8: the 8-bit weights of Model::blocks[l], from its 16-bit ones.
void quantise_block(const Model& model, int64_t l, cudaStream_t stream);

// The norm before a sub-layer, and the addition before it (Residual): saved.sum = x, saved.out = norm(x). LayerNorm in
// GPT-2, RMSNorm elsewhere. (norm.cu)
void norm_forward(const Model& model, const Norm& norm, const NormSaved& saved, const Residual& x,
                  const Workspace& workspace, cudaStream_t stream);
// Of a block: the context of the sub-layer after it, of these parameters. In a step of inference the norm may be left
// to the sub-layer's first product (BlockContext::norm); then saved.out is not written.
BlockContext norm_forward(const BlockContext& b, const SubLayer& sub_layer, const SubLayerParameters& parameters,
                          const Norm& norm, const NormSaved& saved, const Residual& x);
// dinp = d norm(dout) + dsum; dsum, if any, is what reaches the stream past the norm.
void norm_backward(const Model& model, const Norm& norm, const NormSaved& saved, Tensor dinp, Tensor dout, Tensor dsum,
                   const Workspace& workspace, cudaStream_t stream);

// `count` heads of D columns in rows (N, columns).
inline HeadColumns heads_in(Tensor rows, const Activations& acts, int64_t count, int64_t D, int64_t column = 0,
                            int64_t stride = 0) {
    return {rows.view({acts.B, acts.T, rows.cols()}), count, D, column, stride};
}
// Is this a step of inference, over a cache? Then keys and values go to its pages, and the attention reads them there.
inline bool has_cache(const BlockContext& b) { return b.saved.cache.exists(); }
inline PagedStep paged_step(const BlockContext& b) {
    return {b.saved.cache, b.saved.cache_scales, b.acts.page_table, b.acts.chunks, b.acts.cache_rows};
}
// The rotations of the tokens' positions: in a row of T tokens none is beyond T; in a cache, or where a rank has some
// tokens of a row, it may be any.
inline Tensor rope_rows(const BlockContext& b) {
    return has_cache(b) || b.model.context_parallel ? b.model.rope_table : b.model.rope_table.slice(0, b.acts.T);
}
inline void rope_forward(const BlockContext& b, const HeadColumns& heads, RopePairs pairs) {
    rope_forward(heads, pairs, b.acts.positions, rope_rows(b), b.stream);
}
inline void rope_backward(const BlockContext& b, const HeadColumns& heads, RopePairs pairs) {
    rope_backward(heads, pairs, b.acts.positions, rope_rows(b), b.stream);
}
// score_scale: 1, or what makes the softmax sharper.
inline FlashAttentionOptions flash_options(const BlockContext& b, const SubLayerParameters& p,
                                           double score_scale = 1.0) {
    return {.scale = static_cast<float>(score_scale) / std::sqrt(static_cast<float>(b.model.local.D)),
            .window = p.window,
            .documents = b.acts.documents,
            .tier = b.model.flash_tier};
}
// Floats of scratch of its backward, below.
inline int64_t attention_scratch_n(const Model& model, const ContextParallel::Sizes& s, int64_t T) {
    if (const ContextParallel* const ranks = model.context_parallel)
        return ranks->backward_scratch_n(s, model.flash_tier);
    return flash_attention_backward_scratch_n(s.B, T, s.H, s.K, s.D, s.Dv, s.dtype, model.flash_tier);
}
// Attention of a training step: of rows that are whole sequences, or of this rank's tokens of them.
inline void attend_forward(const BlockContext& b, const HeadColumns& out, Tensor lse, const QkvHeads& heads,
                           const FlashAttentionOptions& options) {
    if (ContextParallel* const ranks = b.model.context_parallel)
        return ranks->forward(out, lse, heads.q, heads.k, heads.v, options, b.stream);
    flash_attention_forward(out, lse, heads.q, heads.k, heads.v, options, b.stream);
}
// The backward of out_linear, the linear layer after the attention, and then of the attention. dout: the gradient of
// out_linear's output. Writes dattended and dheads; the gradients of out_linear's parameters as in SubLayer::backward.
inline void attend_backward(const BlockContext& b, const Linear& out_linear, const QkvHeads& dheads,
                            const HeadColumns& dattended, Tensor dout, const HeadColumns& attended, Tensor lse,
                            const QkvHeads& heads, FlashAttentionOptions options) {
    const Tensor scratch = b.workspace.scratch, rows = attended.rows.view({attended.rows.rows(), attended.rows.cols()}),
                 drows = dattended.rows.view({rows.shape[0], rows.shape[1]});
    if (ContextParallel* const ranks = b.model.context_parallel) {
        block_linear_backward_input(b, out_linear, drows, dout);
        ranks->backward(dheads.q, dheads.k, dheads.v, dattended, attended, lse, heads.q, heads.k, heads.v, options,
                        scratch, b.stream);
    } else {
        const FlashDelta delta = flash_delta_in(scratch, b.acts.B, b.acts.T, heads.q.count, heads.k.count, heads.q.D,
                                                heads.v.D, b.model.precision.dtype, b.model.flash_tier);
        if (block_linear_delta_backward_input(b, out_linear, drows, delta, dout, rows))
            options.scratch = FlashAttentionOptions::has_delta;
        flash_attention_backward(dheads.q, dheads.k, dheads.v, dattended, attended, lse, heads.q, heads.k, heads.v,
                                 options, scratch, b.stream);
    }
    block_linear_backward_weight(b, out_linear, dout, rows);  // it uses the same scratch
}
// What both read and write for a token, whose queries, keys, values and heads have this many columns. Forward: q, k, v
// -> heads. Backward: delta, of heads and their gradient; dq, and dk with dv, each of q, k, v and the heads' gradient
// (flash_attention.cu).
inline Elements attend_elements(double q, double k, double v, double heads) {
    return {.forward = q + k + v + heads, .backward = 2 * heads + 3 * (q + k + v) + 2 * heads};
}
// Keys and values to their pages, and the attention over all that is there: of GQA, and of MFA with one key head.
inline void attend_to_cache(const BlockContext& b, const SubLayerParameters& p, const HeadColumns& out,
                            const QkvHeads& heads) {
    const PagedStep step = paged_step(b);
    const Tensor table = b.model.local.family == Family::llama ? rope_rows(b) : Tensor{}, scratch = b.workspace.scratch;
    const float scale = flash_options(b, p).scale;
    // Has each sequence one new token? Then there are as many sequences and chunks as tokens.
    const bool decodes = step.chunks.shape[0] == b.acts.T && step.page_table.shape[0] == b.acts.T;
    if (decodes)
        return paged_decode_forward(out, heads.q, heads.k, heads.v, step, RopePairs::halves, b.acts.positions, table,
                                    scale, p.window, scratch, b.stream);
    paged_write(step, heads.q, heads.k, heads.v, RopePairs::halves, b.acts.positions, table, b.stream);
    paged_attention_forward(out, heads.q, heads.k.count, step, scale, p.window, scratch, b.stream);
}
