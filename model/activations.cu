// model/activations.cu: the memory of a forward and of its backward.
#include "model/sublayer.h"

#include <algorithm>

Tensor SavedTaker::recomputable(const char* what, int64_t n, int64_t columns) {
    if (!shared_) return arena_.take(what, dtype_, {n, columns});
    // Selective recomputation: the first block takes the tensors, and the others get the same ones in the same order.
    if (next_ == tensors_.size()) tensors_.push_back(arena_.take(what, dtype_, {n, columns}));
    return tensors_[next_++];
}

namespace {

NormSaved take_norm(const Model& model, SavedTaker& take, Tensor sum, Tensor out) {
    NormSaved saved{sum, out, {}, {}};
    if (model.config.family == Family::gpt2) saved.mean = take.arena().take("norms", DType::f32, {take.rows});
    saved.rstd = take.arena().take("norms", DType::f32, {take.rows});
    return saved;
}

}  // namespace

BlockSaved take_block(const Model& model, SavedTaker& take, Tensor input) {
    const Config& c = model.local;
    BlockSaved saved;
    take.begin_block();
    saved.norm1 = take_norm(model, take, input, take.recomputable_rows("norms", c.C));
    model.attention->take_saved(take, model.local, saved.attention);
    const Tensor sum =
        take.keep_rows("residual stream", c.C);  // after attention: norm2 adds, and its backward reads it
    saved.norm2 = take_norm(model, take, sum, take.recomputable_rows("norms", c.C));
    model.feed_forward->take_saved(take, model.local, saved.feed_forward);
    return saved;
}

void take_tokens(const Model& model, Activations& acts, int64_t all_tokens, Arena& arena) {
    const int64_t N = acts.B * acts.T;
    if (all_tokens == N) {  // one behind the other: one copy brings both
        const Tensor both = arena.take("tokens", DType::i32, {2, N});
        acts.tokens = both.slice(0, 1).view({acts.B, acts.T});
        acts.targets = both.slice(1, 1).view({N});
    } else {
        acts.tokens = arena.take("tokens", DType::i32, {all_tokens / acts.T, acts.T});
        acts.targets = arena.take("tokens", DType::i32, {N});
    }
    if (model.layout.size > 1) acts.local_tokens = arena.take("tokens", DType::i32, {all_tokens / acts.T, acts.T});
}

void take_losses(const Model& model, Activations& acts, Arena& arena) {
    const int64_t N = acts.B * acts.T;
    acts.losses = arena.take("losses", DType::f32, {N});
    if (model.layout.size == 1) return;
    acts.max = arena.take("losses", DType::f32, {N}), acts.all_max = arena.take("losses", DType::f32, {N});
    acts.sums = arena.take("losses", DType::f32, {N, 2});
}

void take_head(const Model& model, Activations& acts, int64_t rows, int64_t n_logits, Tensor sum, Arena& arena) {
    const DType dtype = model.precision.dtype;
    SavedTaker take(arena, dtype, 1, n_logits, rows, false);  // there is one final norm: nothing to share
    acts.final_norm = take_norm(model, take, sum, take.keep_rows("norms", model.local.C));
    acts.logits = arena.take("logits", dtype, {n_logits, vocabulary_rows(model.local, model.layout)});
}

namespace {

// The activations of L blocks. Blocks l, l + n, l + 2 n, ... share one set of tensors, but for the input of each n
// blocks, from which their forward can be run again (recompute.cu). n = 1 without inputs is what a forward without a
// backward needs: block 0's input is the embedding, which is no longer read when block 1 writes its own input there.
void take_blocks(const Model& model, Activations& acts, int64_t n, bool keep_inputs, Arena& arena) {
    const int64_t C = model.local.C, L = model.n_blocks();
    const int64_t rows = acts.embedded.shape[0];
    SavedTaker take(arena, model.precision.dtype, acts.B, acts.T, rows, acts.recompute.selective);
    const int64_t n_linears = static_cast<int64_t>(block_linear_shapes(model.config).size());
    for (int64_t l = 0; l < L; ++l) {
        BlockSaved saved;
        if (l < n) {
            saved = take_block(model, take, l == 0 ? acts.embedded : take.keep_rows("residual stream", C));
        } else {
            saved = acts.blocks[static_cast<size_t>(l % n)];
            if (keep_inputs && l % n == 0) saved.norm1.sum = take.keep_rows("residual stream", C);
        }
        // Not shared: a forward that is run again leaves out its last product, but the backward needs what the input of
        // that product was scaled by.
        if (model.precision.fp8 != Fp8Recipe::none) saved.fp8 = arena.take("fp8 scales", DType::f32, {n_linears, 2});
        acts.blocks.push_back(saved);
    }
}

// What a forward needs, of blocks that share n sets of tensors. n_logits: rows that the head is applied to. rows: of
// the residual stream on this rank. all_tokens: of all ranks that look up embeddings together.
Activations take(const Model& model, int64_t B, int64_t T, int64_t rows, int64_t n_logits, int64_t all_tokens,
                 const Recompute& recompute, int64_t n, bool keep_inputs, Arena& arena) {
    const Config& c = model.local;
    const DType dtype = model.precision.dtype;
    const int64_t N = B * T;
    Activations acts;
    acts.B = B, acts.T = T;
    acts.divided_rows = rows < N;
    acts.recompute = recompute;
    take_tokens(model, acts, all_tokens, arena);
    acts.embedded = arena.take("residual stream", dtype, {rows, c.C});
    take_losses(model, acts, arena);
    take_blocks(model, acts, n, keep_inputs, arena);
    const int64_t final_rows = acts.divided_rows ? rows : n_logits;
    take_head(model, acts, final_rows, recompute.head_rows(n_logits),
              arena.take("residual stream", dtype, {final_rows, c.C}), arena);
    return acts;
}

// Scratch of the linear layers of a block, forward and backward.
int64_t linear_scratch_n(const Model& model, int64_t N, bool training) {
    const Fp8Recipe fp8 = model.precision.fp8;
    int64_t n = 0;
    for (const auto& [C, O] : block_linear_shapes(model.config)) {
        if (training || fp8 != Fp8Recipe::none) n = std::max(n, linear_backward_scratch_n(N, O));
        if (fp8 != Fp8Recipe::none) n = std::max(n, fp8_linear_scratch_n(fp8, N, C, O));
    }
    return n;
}

}  // namespace

// Rows of the residual stream on this rank, of a training step.
int64_t rows_of_rank(const Model& model, int64_t N) {
    const TensorLayout& layout = model.layout;
    if (!layout.sequence) return N;
    check(N % layout.size == 0, "--sp: the ", N,
          " tokens of a micro-batch (--micro-batch times --seq) cannot be divided ", "among ", layout.size,
          " ranks: use a multiple of ", layout.size);
    return N / layout.size;
}
// Sequences of a micro-batch that this rank has.
int64_t sequences_of_rank(const Model& model, int64_t B) {
    const int64_t parts = model.layout.part(model.layout.inner_rows).of;
    check(B % parts == 0, "--tp-mode ", tensor_mode_name(model.layout.mode), ": the ", B,
          " sequences of a micro-batch (--micro-batch) cannot be divided by ", parts, ": use a multiple of ", parts);
    return B / parts;
}

Activations take_activations(const Model& model, int64_t B, int64_t T, const Recompute& recompute, Arena& arena) {
    const int64_t L = model.n_blocks(), its_B = sequences_of_rank(model, B);
    return take(model, its_B, T, rows_of_rank(model, its_B * T), its_B * T, B * T, recompute,
                recompute.every > 0 ? std::min(recompute.every, L) : L, true, arena);
}

Activations take_forward_activations(const Model& model, int64_t B, int64_t T, int64_t n_logits, Arena& arena) {
    return take(model, B, T, B * T, n_logits, B * T, {}, 1, false, arena);
}

ColumnGeometry::Sizes geometry_sizes(const Model& model, const Activations& acts) {
    ColumnGeometry::Sizes sizes;
    sizes.dtype = model.precision.dtype, sizes.grad_dtype = model.precision.grad_dtype;
    sizes.rows = acts.B * acts.T, sizes.columns = model.local.C;
    const auto add = [&](const Linear& linear) {
        if (linear.crossing == Crossing::inside) return;
        sizes.products.push_back({linear.weight.rows(), linear.weight.cols()});
    };
    Block block = model.blocks[0];
    for (const Linear* linear : linears(block)) add(*linear);
    if (model.part.head) add(model.head);
    if (model.part.embedding) sizes.embedding = {model.wte.rows(), model.wte.cols()};
    return sizes;
}

void take_documents(const Model& model, Activations& acts, int64_t T, Arena& arena) {
    acts.documents = arena.take("tokens", DType::i32, {acts.B, T, 2});
    // The embedding of positions is for the sequences of the stream, which may be others than those inside.
    const TensorLayout& layout = model.layout;
    if (model.wpe.exists() && layout.stream_rows != layout.inner_rows)
        acts.stream_positions = arena.take("tokens", DType::i32, {acts.B, acts.T});
}
void take_positions(Activations& acts, Arena& arena) {
    acts.positions = arena.take("tokens", DType::i32, {acts.B, acts.T});
}

Workspace take_workspace(const Model& model, int64_t B, int64_t T, bool training, Arena& arena) {
    const Config& c = model.local;
    if (training) B = sequences_of_rank(model, B);
    const int64_t N = B * T;
    const int64_t rows = training ? rows_of_rank(model, N) : N;
    SavedTaker take(arena, model.precision.dtype, B, T, rows, false);
    Workspace workspace;
    workspace.branch = take.keep_rows("shared by layers", c.C);
    if (model.layout.divides_columns()) {
        const int64_t parts = model.layout.part(model.layout.stream_columns).of;
        workspace.norm_parts = arena.take("shared by layers", DType::f32, {N, 2});
        workspace.all_norm_parts = arena.take("shared by layers", DType::f32, {parts * N, 2});
        if (model.config.family == Family::gpt2) {
            workspace.position_rows = take.keep_rows("shared by layers", c.C);
            workspace.no_tokens = arena.take("shared by layers", DType::i32, {B, T});
        }
    }
    int64_t scratch_n = linear_scratch_n(model, N, training);
    if (training) {
        workspace.dresidual = take.keep_rows("gradients of activations", c.C);
        workspace.dnorm = take.keep_rows("gradients of activations", c.C);
        model.attention->take_gradients(take, model.local, workspace.dattention);
        model.feed_forward->take_gradients(take, model.local, workspace.dfeed_forward);
        workspace.embedding_scratch =
            arena.take("shared by layers", DType::i32, {embedding_backward_scratch_n(model.precision.dtype, N, c.C)});
        // One piece of scratch for all layers: its contents are needed within a single call only.
        scratch_n = std::max({scratch_n, layernorm_backward_scratch_n(N, c.C), rmsnorm_backward_scratch_n(N, c.C),
                              model.attention->scratch_n(model, B, T), model.feed_forward->scratch_n(model, B, T)});
    }
    if (scratch_n > 0) workspace.scratch = arena.take("shared by layers", DType::f32, {scratch_n});
    return workspace;
}
