// llm.cu: GPT-2, LLaMA and their kin, forward and, in mirrored order, backward.
//
// A model is a token embedding, L blocks and a head. A block adds two branches to the residual stream x:
//
//     x = x + attention(norm1(x))
//     x = x + feed_forward(norm2(x))
//
// GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases, GELU, tied head.
// LLaMA (Touvron et al. 2023, arXiv:2302.13971): rotary positions, RMSNorm, no biases, SwiGLU; since LLaMA 2
// (arXiv:2307.09288) grouped-query attention.
// Qwen2, Qwen3, DeepSeek and MFA differ from LLaMA in their attention alone. Each attention and each feed-forward is a
// file in model/, behind one interface (model/sublayer.h).
//
// The sums x + branch are formed by the norm that comes next, because it reads them anyway (model/norm.cu): so x is a
// pair {sum, branch} from one operation to the next (Residual).
//
// With tensor parallelism (parallel/tensor) a rank has some of the heads and of the feed-forward's columns, and of x
// everything, or some rows, or some rows and columns: the products that read or write x talk to the other ranks
// (model/block_linear.cu), as do norms of divided rows (model/norm.cu), the embedding and the loss.
//
// Where there are many ranks, begin_visit gathers the weights that the work of a visit reads and end_visit reduces the
// gradients that it has completed (model/visits.cu). On one rank they do nothing.
#include "model/sublayer.h"

#include "llm.h"

#include <algorithm>
#include <cmath>

namespace {

// x = x + attention(norm1(x)), x = x + feed_forward(norm2(x)). `last_product` is false where a forward is run again for
// what it saves: then nobody needs the output of the last linear layer.
Residual block_forward(const BlockContext& b, const Block& block, Residual x, bool last_product = true) {
    const Model& model = b.model;
    const BlockSaved& saved = b.saved;
    const Tensor branch = b.workspace.branch;

    const SubLayer &attention = *model.attention, &feed_forward = *model.feed_forward;

    const BlockContext first = norm_forward(b, attention, block.attention, block.norm1, saved.norm1, x);
    attention.forward(first, block.attention, saved.attention, branch, saved.norm1.out);
    x = {saved.norm1.sum, branch};

    const BlockContext second = norm_forward(b, feed_forward, block.feed_forward, block.norm2, saved.norm2, x);
    feed_forward.forward(second, block.feed_forward, saved.feed_forward, last_product ? branch : Tensor{},
                         saved.norm2.out);
    return {saved.norm2.sum, branch};
}

// dx, in place: from the gradient of the block's output to that of its input. x + branch passes its gradient on to
// both.
void block_backward(const BlockContext& b, const Block& block, Tensor dx) {
    const Model& model = b.model;
    const BlockSaved& saved = b.saved;
    const Workspace& ws = b.workspace;
    const Tensor dnorm = ws.dnorm;

    // x = x + feed_forward(norm2(x))
    prefetch_rows(b, saved.norm2.out);
    model.feed_forward->backward(b, block.feed_forward, saved.feed_forward, dnorm, dx, saved.norm2.out);
    norm_backward(model, block.norm2, saved.norm2, dx, dnorm, dx, ws, b.stream);

    // x = x + attention(norm1(x))
    prefetch_rows(b, saved.norm1.out);
    model.attention->backward(b, block.attention, saved.attention, dnorm, dx, saved.norm1.out);
    norm_backward(model, block.norm1, saved.norm1, dx, dnorm, dx, ws, b.stream);
}

// Selective recomputation: fills again what the blocks share.
void recompute_shared(const BlockContext& b, const Block& block) {
    norm_forward(b.model, block.norm1, b.saved.norm1, {b.saved.norm1.sum, {}}, b.workspace, b.stream);
    b.model.attention->recompute(b, block.attention, b.saved.attention);
    norm_forward(b.model, block.norm2, b.saved.norm2, {b.saved.norm2.sum, {}}, b.workspace, b.stream);
    b.model.feed_forward->recompute(b, block.feed_forward, b.saved.feed_forward);
}

// ---------------------------------------------------------------------------------------------------------------------
// What a visit does

struct Pass {
    const Model& model;
    Activations& acts;
    const Workspace& workspace;
    cudaStream_t stream;

    const Block& block(const Visit& visit) const { return model.blocks[static_cast<size_t>(visit.block)]; }
    BlockContext context(const Visit& visit) const {
        return {model, acts, workspace, acts.blocks[static_cast<size_t>(visit.block)], stream};
    }
};

Tensor tokens_here(const Activations& acts) { return acts.local_tokens.exists() ? acts.local_tokens : acts.tokens; }
// Where the stream's columns are divided: tokens by their geometry, positions by each rank for its rows and columns.
Tensor stream_positions(const Activations& acts) {
    return acts.stream_positions ? acts.stream_positions : acts.positions;
}
Tensor no_tokens(const Pass& p) {  // (B, T): -1
    const Tensor all = p.workspace.no_tokens.view({p.workspace.no_tokens.n()}).slice(0, p.acts.B * p.acts.T);
    cudaCheck(cudaMemsetAsync(all.data, 0xff, all.bytes(), p.stream));
    launched("memset", {.writes = bytes_of(all)});
    return all.view({p.acts.B, p.acts.T});
}
void embed_in_columns(const Pass& p, Tensor out) {
    const Model& model = p.model;
    ColumnGeometry& geometry = *model.tensor_parallel->geometry();
    if (p.acts.logit_rows) geometry.embed_whole_rows(out, p.acts.local_tokens, model.wte, p.stream);
    else geometry.embed(out, p.acts.local_tokens, model.wte, p.stream);
    if (!model.wpe) return;
    const Tensor rows = p.workspace.position_rows.slice(0, out.rows()), none = no_tokens(p);
    embedding_forward(rows.view({p.acts.B, p.acts.T, out.cols()}), none, stream_positions(p.acts), model.wpe, model.wpe,
                      p.stream);
    residual_add(out, out, rows, p.stream);
}
void embed_in_columns_backward(const Pass& p, Tensor dout) {
    const Model& model = p.model;
    const bool accumulate = p.workspace.accumulate;
    model.tensor_parallel->geometry()->embed_backward(model.dwte, p.acts.local_tokens, dout,
                                                      accumulate || model.ties_head(), p.stream);
    if (!model.wpe) return;
    embedding_backward(model.dwpe, model.dwpe, dout.view({p.acts.B, p.acts.T, dout.cols()}), no_tokens(p),
                       stream_positions(p.acts), accumulate, accumulate, p.workspace.embedding_scratch, p.stream);
}

void embed_tokens(const Pass& p, Tensor out) {
    const Model& model = p.model;
    const Tensor tokens = tokens_here(p.acts);
    if (model.layout.size > 1)
        ids_from(tokens, p.acts.tokens, first_token(model.config, model.layout), n_tokens(model.config, model.layout),
                 p.stream);
    if (model.layout.divides_columns()) return embed_in_columns(p, out);
    // Of each row one rank has the token's, and rank 0 the position's.
    const auto lookup = [&](Tensor rows) {
        embedding_forward(rows.view({p.acts.B, p.acts.T, rows.cols()}), tokens, p.acts.positions, model.wte,
                          model.layout.rank == 0 ? model.wpe : Tensor{}, p.stream);
    };
    if (model.tensor_parallel) model.tensor_parallel->one_d().embed(out, p.acts.divided_rows, lookup, p.stream);
    else lookup(out);
}
void embed_tokens_backward(const Pass& p, Tensor dout) {
    if (p.model.layout.divides_columns()) return embed_in_columns_backward(p, dout);
    // A tied head has written its part of dwte.
    const bool accumulate = p.workspace.accumulate, accumulate_wte = accumulate || p.model.ties_head();
    const auto use = [&](Tensor rows) {
        embedding_backward(p.model.dwte, p.model.dwpe, rows.view({p.acts.B, p.acts.T, rows.cols()}),
                           tokens_here(p.acts), p.acts.positions, accumulate_wte, accumulate,
                           p.workspace.embedding_scratch, p.stream);
    };
    TensorParallel* const ranks = p.model.tensor_parallel;
    if (ranks) ranks->one_d().embed_backward(dout, p.acts.divided_rows, use, p.stream);
    else use(dout);
}

// The head in chunks of rows (--head-chunks): f(inp, dinp, logits, losses, targets) of each.
bool has_head_chunks(const Activations& acts) { return acts.recompute.head_chunks > 1; }
template <class F>
void for_head_chunks(const Pass& p, F&& f) {
    const Activations& acts = p.acts;
    const int64_t N = acts.targets.n(), rows = acts.logits.rows();
    for (int64_t first = 0; first < N; first += rows) {
        const int64_t n = std::min(rows, N - first);
        f(acts.final_norm.out.slice(first, n), p.workspace.dnorm.slice(first, n), acts.logits.slice(0, n),
          acts.losses.slice(first, n), acts.targets.slice(first, n));
    }
}

// logits = head(norm(x)). In chunks: the losses, where nothing but them is wanted.
void apply_head(const Pass& p, const Residual& x) {
    norm_forward(p.model, p.model.final_norm, p.acts.final_norm, x, p.workspace, p.stream);
    if (!has_head_chunks(p.acts))
        return head_linear_forward(p.model, p.acts, p.acts.logits, p.acts.final_norm.out, p.stream);
    if (p.acts.training) return;
    for_head_chunks(p, [&](Tensor inp, Tensor, Tensor logits, Tensor losses, Tensor targets) {
        head_linear_forward(p.model, p.acts, logits, inp, p.stream);
        cross_entropy_forward(losses, logits, targets, p.model.config.V, p.stream);
    });
}
// Inference: the head is for the rows that a wanted token follows. The stream's rows, and what the last block adds to
// them, are looked up as those of tokens and positions are, and added.
Residual wanted_rows(const Pass& p, const Residual& x) {
    const Tensor to = p.acts.final_norm.sum, rows = p.acts.logit_rows.view({1, p.acts.logit_rows.n()});
    embedding_forward(to.view({1, to.rows(), to.cols()}), rows, rows, x.sum, x.branch, p.stream);
    return {to, {}};
}
void apply_head_backward(const Pass& p, Tensor dx) {
    Workspace ws = p.workspace;
    const auto linear_backward = [&](Tensor inp, Tensor dinp, Tensor dlogits) {
        head_linear_backward_input(p.model, p.acts, dinp, dlogits, p.stream);
        head_linear_backward_weight(p.model, p.acts, dlogits, inp, ws, p.stream);
    };
    if (!has_head_chunks(p.acts)) linear_backward(p.acts.final_norm.out, ws.dnorm, p.acts.logits);
    else
        for_head_chunks(p, [&](Tensor inp, Tensor dinp, Tensor logits, Tensor losses, Tensor targets) {
            head_linear_forward(p.model, p.acts, logits, inp, p.stream);
            cross_entropy_forward_backward(losses, logits, targets, p.model.config.V, p.acts.dloss, p.stream);
            linear_backward(inp, dinp, logits);
            ws.accumulate = true;  // to what the chunks before have given the weight's gradient
        });
    ws.accumulate = p.workspace.accumulate;
    norm_backward(p.model, p.model.final_norm, p.acts.final_norm, dx, ws.dnorm, {}, ws, p.stream);
}

void visit_forward(const Pass& p, const Visit& visit, Residual& x) {
    begin_visit(p.model, visit, p.stream);
    if (visit.work == Work::embed) {
        embed_tokens(p, p.acts.embedded);
        x = {p.acts.embedded, {}};
    }
    if (visit.work == Work::forward_block) x = block_forward(p.context(visit), p.block(visit), x);
    if (visit.work == Work::forward_head && p.acts.logits.n() > 0)  // a step may compute parts of prompts alone
        apply_head(p, p.acts.logit_rows.exists() ? wanted_rows(p, x) : x);
    end_visit(p.model, visit, p.stream);
}

// dx: the gradient of the residual stream. x: the stream of blocks whose forward is run again.
void visit_backward(const Pass& p, const Visit& visit, Tensor dx, Residual& x) {
    begin_visit(p.model, visit, p.stream);
    if (visit.work == Work::backward_head) apply_head_backward(p, dx);
    if (visit.work == Work::recompute_block) {
        const BlockContext b = p.context(visit);
        if (visit.first) x = {b.saved.norm1.sum, {}};
        x = block_forward(b, p.block(visit), x, !visit.last);
    }
    if (visit.work == Work::backward_block) {
        const BlockContext b = p.context(visit);
        if (p.acts.recompute.selective) recompute_shared(b, p.block(visit));
        block_backward(b, p.block(visit), dx);
    }
    if (visit.work == Work::backward_embedding) embed_tokens_backward(p, dx);
    end_visit(p.model, visit, p.stream);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The whole model

void forward(const Model& model, Activations& acts, const Workspace& workspace, cudaStream_t stream, bool training) {
    acts.training = training;
    const Pass pass{model, acts, workspace, stream};
    Residual x;
    for (const Visit& visit : forward_visits(model)) visit_forward(pass, visit, x);
}

// dloss: NaN for the losses alone.
static void divided_loss(const Model& model, Activations& acts, float dloss, cudaStream_t stream) {
    const int64_t first = first_token(model.config, model.layout), V = n_tokens(model.config, model.layout);
    cross_entropy_parts(acts.max, acts.sums, acts.logits, acts.targets, first, V, stream);
    model.tensor_parallel->max_over_vocabulary(acts.all_max, acts.max, stream);
    cross_entropy_rescale(acts.sums, acts.max, acts.all_max, stream);
    model.tensor_parallel->sum_over_vocabulary(acts.sums, stream);
    cross_entropy_finish(acts.losses, acts.logits, acts.targets, acts.all_max, acts.sums, first, V, dloss, stream);
}

void loss_forward(const Model& model, Activations& acts, cudaStream_t stream) {
    if (has_head_chunks(acts)) return;  // forward() has computed them
    if (model.tensor_parallel) return divided_loss(model, acts, NAN, stream);
    cross_entropy_forward(acts.losses, acts.logits, acts.targets, model.config.V, stream);
}

void loss_backward(const Model& model, Activations& acts, float dloss, cudaStream_t stream) {
    acts.dloss = dloss;
    if (has_head_chunks(acts)) return;  // left to the backward of the head
    if (model.tensor_parallel) return divided_loss(model, acts, dloss, stream);
    cross_entropy_forward_backward(acts.losses, acts.logits, acts.targets, model.config.V, dloss, stream);
}

void backward(const Model& model, Activations& acts, const Workspace& workspace, cudaStream_t stream) {
    const Pass pass{model, acts, workspace, stream};
    Residual x;
    for (const Visit& visit : backward_visits(model, acts.recompute))
        visit_backward(pass, visit, workspace.dresidual, x);
}

// ---------------------------------------------------------------------------------------------------------------------
// Parts of it

void embed_forward(const Model& model, Activations& acts, const Workspace& workspace, Tensor out, cudaStream_t stream) {
    begin_visit(model, {.work = Work::embed, .weights = {0}, .traced = false}, stream);
    embed_tokens({model, acts, workspace, stream}, out);
}
void embed_backward(const Model& model, Activations& acts, const Workspace& workspace, Tensor dout,
                    cudaStream_t stream) {
    if (!workspace.later) return embed_tokens_backward({model, acts, workspace, stream}, dout);
    workspace.later->push([&model, &acts, dout](const Workspace& at_run, cudaStream_t its_stream) {
        embed_tokens_backward({model, acts, at_run, its_stream}, dout);
    });
}

void forward_blocks(const Model& model, Activations& acts, const Workspace& workspace, int64_t first, int64_t last,
                    Tensor in, Tensor out, cudaStream_t stream, bool training) {
    acts.training = training;
    const Pass pass{model, acts, workspace, stream};
    Residual x{in, {}};
    for (const Visit& visit : chunk_forward_visits(first, last)) visit_forward(pass, visit, x);
    if (x.branch) residual_add(out, x.sum, x.branch, stream);
    else copy_tensor(out, in, stream);
}

void backward_blocks(const Model& model, Activations& acts, const Workspace& workspace, int64_t first, int64_t last,
                     Tensor din, Tensor dout, cudaStream_t stream) {
    const Pass pass{model, acts, workspace, stream};
    copy_tensor(din, dout, stream);
    Residual x;
    for (const Visit& visit : chunk_backward_visits(first, last, acts.recompute)) visit_backward(pass, visit, din, x);
}

void head_forward(const Model& model, Activations& acts, const Workspace& workspace, Tensor in, cudaStream_t stream) {
    begin_visit(model, {.work = Work::forward_head, .weights = {head_unit(model)}, .traced = false}, stream);
    apply_head({model, acts, workspace, stream}, {in, {}});
}
void head_backward(const Model& model, Activations& acts, const Workspace& workspace, Tensor din, cudaStream_t stream) {
    apply_head_backward({model, acts, workspace, stream}, din);
}
