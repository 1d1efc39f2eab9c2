// model/block_linear.cu: the linear layer of a block, as three products that may be called at different times.
//
//   forward           out = inp W^T + bias
//   backward_input    dinp = dout W                    the layer before waits for it
//   backward_weight   dW (+)= dout^T inp, dbias        nobody waits for it before the update: it may come later
//
// A pipeline with a zero bubble (Qi et al. 2023, arXiv:2401.10241) puts the third one where a rank would otherwise be
// idle. WeightGradients is the queue for that: what an entry needs is kept until run(). With tensor parallelism the
// ranks compute it together then, with one exception: 1D has gathered all rows of the gradient for a layer that writes
// the stream, and those are kept.
#include "model/sublayer.h"

namespace {

// What the input and the output gradient of this layer were scaled by, of this micro-batch.
Tensor scaled_by(const BlockContext& b, const Linear& linear) { return b.saved.fp8.slice(linear.index, 1).view({2}); }

// Scales are those of the whole tensor, of which a rank of tensor parallelism has a part: saved[which] = its amax. The
// amax of what all ranks have is the same on each of them.
AmaxFrom amax_of_all(const BlockContext& b, const Linear& linear, int64_t which, Tensor x) {
    TensorParallel* const ranks = b.model.tensor_parallel;
    if (!ranks || linear.fp8.recipe == Fp8Recipe::block) return AmaxFrom::here;
    const Tensor saved = scaled_by(b, linear), amax = saved.slice(which, 1);
    fp8_linear_amax(saved, which, x, linear.fp8.recipe, linear.fp8_state, b.stream);
    ranks->max(amax, b.stream);
    return AmaxFrom::caller;
}

// A row of a step of inference has the same bits whatever the other rows are, and however many. cuBLASLt chooses a
// kernel by the number of rows, and with it an order of summation; on the CPU device there is one.
void step_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, cudaStream_t stream) {
    if (device().is_cpu) linear_forward(out, inp, weight, bias, stream);
    else few_rows_forward(out, inp, weight, bias, stream);
}

void own_backward_weight(const Linear& linear, Tensor dbias, Tensor dout, Tensor inp, Tensor scaled_by,
                         const Workspace& workspace, cudaStream_t stream) {
    const bool accumulate = workspace.accumulate;
    const Tensor scratch = workspace.scratch;
    const Fp8Recipe recipe = linear.fp8.recipe;
    if (recipe == Fp8Recipe::none)
        linear_backward_weight(linear.dweight, dbias, dout, inp, accumulate, scratch, stream);
    else fp8_linear_backward_weight(linear.dweight, dbias, dout, inp, scaled_by, recipe, accumulate, scratch, stream);
}

// Does this rank compute the layer's products alone?
bool is_alone(const Model& model, const Linear& linear) {
    return !model.tensor_parallel || linear.crossing == Crossing::inside;
}

// Tensor parallelism: products of layers that read the residual stream, or write it, with other ranks. `own` is the
// product of this rank alone.
struct Crossed {
    const Model& model;
    const bool divided_rows;  // Activations'
    const Linear& linear;
    const cudaStream_t stream;
    const Tensor dbias = {};  // of backward_weight, if it is to be computed

    bool is_alone() const { return ::is_alone(model, linear); }
    bool enters() const { return linear.crossing == Crossing::enters; }
    ColumnGeometry* geometry() const { return model.tensor_parallel->geometry(); }
    OneD& one_d() const { return model.tensor_parallel->one_d(); }

    // whole_rows: of a step of inference.
    void forward(Tensor out, Tensor inp, Tensor bias, bool whole_rows, const OneD::Product& own) const {
        if (is_alone()) own(out, inp);
        else if (geometry() && whole_rows)
            geometry()->forward_whole_rows(out, inp, linear.weight, bias, linear.crossing, stream);
        else if (geometry()) geometry()->forward(out, inp, linear.weight, bias, linear.crossing, stream);
        else if (enters()) one_d().enter(out, inp, divided_rows, own, stream);
        else one_d().leave(out, inp, divided_rows, own, stream);
    }
    void backward_input(Tensor dinp, Tensor dout, const OneD::Product& own) const {
        if (is_alone()) own(dinp, dout);
        else if (geometry()) geometry()->backward_input(dinp, dout, linear.weight, linear.crossing, stream);
        else if (enters()) one_d().enter_backward_input(dinp, dout, divided_rows, own, stream);
        else one_d().leave_backward_input(dinp, dout, divided_rows, own, stream);
    }
    void backward_weight(Tensor dout, Tensor inp, Tensor scaled_by, const Workspace& workspace) const {
        const auto own = [&](Tensor all_dout, Tensor all_inp) {
            own_backward_weight(linear, dbias, all_dout, all_inp, scaled_by, workspace, stream);
        };
        if (is_alone()) own(dout, inp);
        else if (geometry()) {
            geometry()->backward_weight(linear.dweight, dout, inp, linear.crossing, workspace.accumulate, stream);
            if (dbias) column_sum(dbias, dout, workspace.accumulate, workspace.scratch, stream);
        } else if (enters())
            one_d().enter_backward_weight(
                inp, divided_rows, [&](Tensor all) { own(dout, all); }, stream);
        else one_d().leave_backward_weight(dout, divided_rows, [&](Tensor all) { own(all, inp); });
    }
    bool is_one_d() const { return !is_alone() && !geometry(); }
    // dout of the layer that reads the stream: what it has given to the stream is there after this call.
    void finish_backward_input() const {
        if (is_one_d() && enters()) one_d().finish_backward_input(divided_rows, stream);
    }
    // The same later, from a dout that stays until then.
    WeightGradients::Compute later(Tensor dout, Tensor inp, Tensor scaled_by) const {
        return [&model = model, divided = divided_rows, &linear = linear, dbias = dbias, dout, inp, scaled_by](
                   const Workspace& workspace, cudaStream_t at_run) {
            Crossed{model, divided, linear, at_run, dbias}.backward_weight(dout, inp, scaled_by, workspace);
        };
    }
    // A layer of a block: dout is copied.
    void push(Tensor dout, Tensor inp, Tensor scaled_by, WeightGradients& queue) const {
        finish_backward_input();
        if (!is_one_d() || enters()) return queue.push(later(queue.keep(dout, stream), inp, scaled_by));
        one_d().leave_backward_weight(dout, divided_rows, [&](Tensor all) {
            const Tensor kept = queue.keep(all, stream);
            queue.push([&linear = linear, dbias = dbias, kept, inp, scaled_by](const Workspace& workspace,
                                                                               cudaStream_t at_run) {
                own_backward_weight(linear, dbias, kept, inp, scaled_by, workspace, at_run);
            });
        });
    }
};

}  // namespace

bool is_few_rows(const BlockContext& b, const Linear& linear) {
    return has_cache(b) && is_alone(b.model, linear) && !linear.quantised.codes.exists() && !b.saved.fp8 &&
           !device().is_cpu;
}
// Is this the layer that reads the norm in front of the sub-layer?
static bool forms_norm(const BlockContext& b, Tensor inp) { return b.norm && b.norm->out.data == inp.data; }

void block_linear_forward(const BlockContext& b, const Linear& linear, Tensor out, Tensor inp) {
    const Tensor bias = linear.adds_bias ? linear.bias : Tensor{};
    if (forms_norm(b, inp))
        return few_rows_normed_forward(out, {}, *b.norm, linear.weight, bias, Activation::none, b.stream);
    const auto own = [&](Tensor to, Tensor from) {
        if (linear.quantised.codes.exists()) quantised_linear_forward(to, from, linear.quantised, bias, b.stream);
        else if (b.saved.fp8) {
            const AmaxFrom amax = amax_of_all(b, linear, 0, from);
            fp8_linear_forward(to, scaled_by(b, linear), from, linear.fp8, bias, linear.fp8_state, b.acts.training,
                               b.workspace.scratch, b.stream, amax);
        } else (has_cache(b) ? step_forward : linear_forward)(to, from, linear.weight, bias, b.stream);
    };
    Crossed{b.model, b.acts.divided_rows, linear, b.stream}.forward(out, inp, bias, has_cache(b), own);
}

void block_linear_backward_input(const BlockContext& b, const Linear& linear, Tensor dinp, Tensor dout) {
    const auto own = [&](Tensor to, Tensor from) {
        if (!b.saved.fp8) return linear_backward_input(to, from, linear.weight, false, b.stream);
        const AmaxFrom amax = amax_of_all(b, linear, 1, from);
        fp8_linear_backward_input(to, scaled_by(b, linear), from, linear.fp8, false, linear.fp8_state,
                                  b.workspace.scratch, b.stream, amax);
    };
    Crossed{b.model, b.acts.divided_rows, linear, b.stream}.backward_input(dinp, dout, own);
}

// GELU is part of a product that this rank computes alone, in one of the types that cuBLASLt's epilogues have. 1D ranks
// may compute some rows of it at a time.
static bool has_gelu_epilogue(const BlockContext& b, const Linear& linear) {
    const TensorParallel* const ranks = b.model.tensor_parallel;
    return !linear.quantised.codes.exists() && !b.saved.fp8 && !has_cache(b) && !(ranks && ranks->geometry());
}
// Those rows of x which `part` is of whole.
static Tensor same_rows(Tensor x, Tensor whole, Tensor part) {
    const int64_t bytes = static_cast<char*>(part.data) - static_cast<char*>(whole.data);
    return x.slice(bytes / (whole.cols() * static_cast<int64_t>(dtype_bytes(whole.dtype))), part.rows());
}

// The activation is part of a product of few rows.
static void activated_step_forward(const BlockContext& b, const Linear& linear, Tensor out, Tensor before, Tensor inp,
                                   Activation activation) {
    const Tensor bias = linear.adds_bias ? linear.bias : Tensor{};
    if (forms_norm(b, inp)) few_rows_normed_forward(out, before, *b.norm, linear.weight, bias, activation, b.stream);
    else few_rows_activated_forward(out, before, inp, linear.weight, bias, activation, b.stream);
}

void block_linear_swiglu_forward(const BlockContext& b, const Linear& linear, Tensor out, Tensor before, Tensor inp) {
    if (is_few_rows(b, linear)) return activated_step_forward(b, linear, out, before, inp, Activation::swiglu);
    block_linear_forward(b, linear, before, inp);
    swiglu_forward(out, before, b.stream);
}

void block_linear_gelu_forward(const BlockContext& b, const Linear& linear, Tensor out, Tensor before, Tensor inp) {
    if (is_few_rows(b, linear)) return activated_step_forward(b, linear, out, before, inp, Activation::gelu);
    if (!has_gelu_epilogue(b, linear)) {
        block_linear_forward(b, linear, before, inp);
        return gelu_forward(out, before, b.stream);
    }
    const Tensor bias = linear.adds_bias ? linear.bias : Tensor{};
    const auto own = [&](Tensor to, Tensor from) {
        linear_gelu_forward(to, same_rows(before, out, to), from, linear.weight, bias, b.stream);
    };
    Crossed{b.model, b.acts.divided_rows, linear, b.stream}.forward(out, inp, bias, false, own);
}
void block_linear_gelu_backward_input(const BlockContext& b, const Linear& linear, Tensor dbefore, Tensor dout,
                                      Tensor before) {
    if (!has_gelu_epilogue(b, linear)) {
        block_linear_backward_input(b, linear, dbefore, dout);
        return gelu_backward(dbefore, dbefore, before, b.stream);
    }
    const auto own = [&](Tensor to, Tensor from) {
        linear_gelu_backward_input(to, from, linear.weight, same_rows(before, dbefore, to), b.stream);
    };
    Crossed{b.model, b.acts.divided_rows, linear, b.stream}.backward_input(dbefore, dout, own);
}

bool block_linear_delta_backward_input(const BlockContext& b, const Linear& linear, Tensor dattended,
                                       const FlashDelta& delta, Tensor dout, Tensor attended) {
    const bool with_delta = is_alone(b.model, linear) && !b.saved.fp8;
    if (with_delta) linear_delta_backward_input(dattended, delta, dout, linear.weight, attended, b.stream);
    else block_linear_backward_input(b, linear, dattended, dout);
    return with_delta;
}

void block_linear_backward_weight(const BlockContext& b, const Linear& linear, Tensor dout, Tensor inp) {
    const Tensor scales = b.saved.fp8 ? scaled_by(b, linear) : Tensor{};
    const Crossed crossed{b.model, b.acts.divided_rows, linear, b.stream, linear.dbias};
    if (b.workspace.later) crossed.push(dout, inp, scales, *b.workspace.later);
    else crossed.backward_weight(dout, inp, scales, b.workspace);
}

void prefetch_rows(const BlockContext& b, Tensor inp) {
    TensorParallel* const ranks = b.model.tensor_parallel;
    if (ranks && !ranks->geometry() && !b.workspace.later) ranks->one_d().prefetch(inp, b.acts.divided_rows, b.stream);
}

void head_linear_forward(const Model& model, const Activations& acts, Tensor logits, Tensor inp, cudaStream_t stream) {
    const bool is_step = acts.logit_rows.exists();
    const auto own = [&](Tensor to, Tensor from) {
        (is_step ? step_forward : linear_forward)(to, from, model.head.weight, {}, stream);
    };
    Crossed{model, acts.divided_rows, model.head, stream}.forward(logits, inp, {}, is_step, own);
}
void head_linear_backward_input(const Model& model, const Activations& acts, Tensor dinp, Tensor dlogits,
                                cudaStream_t stream) {
    const auto own = [&](Tensor to, Tensor from) { linear_backward_input(to, from, model.head.weight, false, stream); };
    Crossed{model, acts.divided_rows, model.head, stream}.backward_input(dinp, dlogits, own);
}
void head_linear_backward_weight(const Model& model, const Activations& acts, Tensor dlogits, Tensor inp,
                                 const Workspace& workspace, cudaStream_t stream) {
    const Crossed crossed{model, acts.divided_rows, model.head, stream};
    if (!workspace.later) return crossed.backward_weight(dlogits, inp, {}, workspace);
    crossed.finish_backward_input();
    workspace.later->push(crossed.later(dlogits, inp, {}));
}

// ---------------------------------------------------------------------------------------------------------------------

// Every output gradient begins on 256 bytes, as vector loads and the products want it.
static int64_t piece_of(const Tensor& dout) { return round_up(static_cast<int64_t>(dout.bytes()), 256); }

void WeightGradients::take_memory(const Model& model, int64_t B, int64_t T, int64_t blocks, Arena& arena) {
    const int64_t N = sequences_of_rank(model, B) * T;
    int64_t bytes = 0;
    Block block = model.blocks[0];
    for (const Linear* linear : linears(block))
        bytes += piece_of(make_tensor(nullptr, model.precision.dtype, {N, linear->weight.rows()}));
    memory_ = arena.take("output gradients for later", DType::i32, {blocks, bytes / 4});
    entries_.clear();
    free_.clear();
    for (int64_t i = blocks; i-- > 0;) free_.push_back(i);
    now_ = nullptr;
    most_ = 0;
}

void WeightGradients::begin(int64_t micro, int64_t chunk) {
    const auto [at, is_new] = entries_.insert({{micro, chunk}, {}});
    check(is_new, "weight gradients for later: those of micro-batch ", micro, ", chunk ", chunk, " are still there");
    now_ = &at->second;
}

Tensor WeightGradients::keep(Tensor dout, cudaStream_t stream) {
    const int64_t bytes = piece_of(dout), piece_bytes = memory_.shape[1] * 4;
    check(now_ != nullptr, "weight gradients for later: call begin() first");
    if (now_->pieces.empty() || now_->used + bytes > piece_bytes) {
        check(!free_.empty(), "weight gradients for later: the memory for ", memory_.shape[0],
              " blocks is full: call run(), or take memory for more");
        now_->pieces.push_back(free_.back());
        free_.pop_back();
        now_->used = 0;
        most_ = std::max(most_, memory_.shape[0] - std::ssize(free_));
    }
    Tensor kept = dout;
    kept.data = static_cast<char*>(memory_.data) + now_->pieces.back() * piece_bytes + now_->used;
    copy_tensor(kept, dout, stream);
    now_->used += bytes;
    return kept;
}

void WeightGradients::push(const Compute& compute) {
    check(now_ != nullptr, "weight gradients for later: call begin() first");
    now_->computes.push_back(compute);
}

void WeightGradients::run(int64_t micro, int64_t chunk, const Workspace& workspace, cudaStream_t stream) {
    const auto at = entries_.find({micro, chunk});
    check(at != entries_.end(), "weight gradients for later: there are none of micro-batch ", micro, ", chunk ", chunk);
    for (const Compute& compute : at->second.computes) compute(workspace, stream);
    for (size_t i = at->second.pieces.size(); i-- > 0;) free_.push_back(at->second.pieces[i]);
    if (now_ == &at->second) now_ = nullptr;
    entries_.erase(at);
}
