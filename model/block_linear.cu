// model/block_linear.cu: the linear layer of a block, as three products that may be called at different times.
//
//   forward           out = inp W^T + bias
//   backward_input    dinp = dout W                    the layer before waits for it
//   backward_weight   dW += dout^T inp, dbias          nobody waits for it before the update: it may come later
//
// A pipeline with a zero bubble (Qi et al. 2023, arXiv:2401.10241) puts the third one where a rank would otherwise be
// idle. WeightGradients is the queue for that: what an entry needs is kept until run().
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

void own_backward_weight(const Linear& linear, Tensor dout, Tensor inp, Tensor scaled_by, Tensor scratch,
                         cudaStream_t stream) {
    const Fp8Recipe recipe = linear.fp8.recipe;
    if (recipe == Fp8Recipe::none) linear_backward_weight(linear.dweight, linear.dbias, dout, inp, scratch, stream);
    else fp8_linear_backward_weight(linear.dweight, linear.dbias, dout, inp, scaled_by, recipe, scratch, stream);
}

// Tensor parallelism: products of layers that read the residual stream, or write it, with other ranks. `own` is the
// product of this rank alone.
struct Crossed {
    const Model& model;
    const Activations& acts;
    const Linear& linear;
    cudaStream_t stream;

    bool is_alone() const { return !model.tensor_parallel || linear.crossing == Crossing::inside; }
    bool enters() const { return linear.crossing == Crossing::enters; }
    ColumnGeometry* geometry() const { return model.tensor_parallel->geometry(); }
    OneD& one_d() const { return model.tensor_parallel->one_d(); }

    // whole_rows: of a step of inference.
    void forward(Tensor out, Tensor inp, Tensor bias, bool whole_rows, const OneD::Product& own) const {
        if (is_alone()) own(out, inp);
        else if (geometry() && whole_rows)
            geometry()->forward_whole_rows(out, inp, linear.weight, bias, linear.crossing, stream);
        else if (geometry()) geometry()->forward(out, inp, linear.weight, bias, linear.crossing, stream);
        else if (enters()) one_d().enter(out, inp, acts.divided_rows, own, stream);
        else one_d().leave(out, inp, acts.divided_rows, own, stream);
    }
    void backward_input(Tensor dinp, Tensor dout, const OneD::Product& own) const {
        if (is_alone()) own(dinp, dout);
        else if (geometry()) geometry()->backward_input(dinp, dout, linear.weight, linear.crossing, stream);
        else if (enters()) one_d().enter_backward_input(dinp, dout, acts.divided_rows, own, stream);
        else one_d().leave_backward_input(dinp, dout, acts.divided_rows, own, stream);
    }
    void backward_weight(Tensor dout, Tensor inp, Tensor scaled_by, Tensor scratch) const {
        const auto own = [&](Tensor all_dout, Tensor all_inp) {
            own_backward_weight(linear, all_dout, all_inp, scaled_by, scratch, stream);
        };
        if (is_alone()) own(dout, inp);
        else if (geometry()) {
            geometry()->backward_weight(linear.dweight, dout, inp, linear.crossing, stream);
            if (linear.dbias) column_sum(linear.dbias, dout, scratch, stream);
        } else if (enters())
            one_d().enter_backward_weight(
                inp, acts.divided_rows, [&](Tensor all) { own(dout, all); }, stream);
        else one_d().leave_backward_weight(dout, acts.divided_rows, [&](Tensor all) { own(all, inp); });
    }
};

}  // namespace

void block_linear_forward(const BlockContext& b, const Linear& linear, Tensor out, Tensor inp) {
    const Tensor bias = linear.adds_bias ? linear.bias : Tensor{};
    const auto own = [&](Tensor to, Tensor from) {
        if (linear.quantised.codes.exists()) quantised_linear_forward(to, from, linear.quantised, bias, b.stream);
        else if (b.saved.fp8) {
            const AmaxFrom amax = amax_of_all(b, linear, 0, from);
            fp8_linear_forward(to, scaled_by(b, linear), from, linear.fp8, bias, linear.fp8_state, b.acts.training,
                               b.workspace.scratch, b.stream, amax);
        } else (has_cache(b) ? step_forward : linear_forward)(to, from, linear.weight, bias, b.stream);
    };
    Crossed{b.model, b.acts, linear, b.stream}.forward(out, inp, bias, has_cache(b), own);
}

void block_linear_backward_input(const BlockContext& b, const Linear& linear, Tensor dinp, Tensor dout) {
    const auto own = [&](Tensor to, Tensor from) {
        if (!b.saved.fp8) return linear_backward_input(to, from, linear.weight, false, b.stream);
        const AmaxFrom amax = amax_of_all(b, linear, 1, from);
        fp8_linear_backward_input(to, scaled_by(b, linear), from, linear.fp8, false, linear.fp8_state,
                                  b.workspace.scratch, b.stream, amax);
    };
    Crossed{b.model, b.acts, linear, b.stream}.backward_input(dinp, dout, own);
}

void block_linear_backward_weight(const BlockContext& b, const Linear& linear, Tensor dout, Tensor inp) {
    const Tensor scales = b.saved.fp8 ? scaled_by(b, linear) : Tensor{};
    const Crossed crossed{b.model, b.acts, linear, b.stream};
    if (!b.workspace.later) return crossed.backward_weight(dout, inp, scales, b.workspace.scratch);
    check(crossed.is_alone(), "weight gradients for later: not of layers that ranks divide");
    b.workspace.later->push(linear, dout, inp, scales, b.stream);
}

void prefetch_rows(const BlockContext& b, Tensor inp) {
    TensorParallel* const ranks = b.model.tensor_parallel;
    if (ranks && !ranks->geometry()) ranks->one_d().prefetch(inp, b.acts.divided_rows, b.stream);
}

void head_linear_forward(const Model& model, const Activations& acts, Tensor inp, cudaStream_t stream) {
    const bool is_step = acts.logit_rows.exists();
    const auto own = [&](Tensor to, Tensor from) {
        (is_step ? step_forward : linear_forward)(to, from, model.head.weight, {}, stream);
    };
    Crossed{model, acts, model.head, stream}.forward(acts.logits, inp, {}, is_step, own);
}
void head_linear_backward_input(const Model& model, const Activations& acts, Tensor dinp, cudaStream_t stream) {
    const auto own = [&](Tensor to, Tensor from) { linear_backward_input(to, from, model.head.weight, false, stream); };
    Crossed{model, acts, model.head, stream}.backward_input(dinp, acts.logits, own);
}
void head_linear_backward_weight(const Model& model, const Activations& acts, Tensor inp, Tensor scratch,
                                 cudaStream_t stream) {
    Crossed{model, acts, model.head, stream}.backward_weight(acts.logits, inp, {}, scratch);
}

// ---------------------------------------------------------------------------------------------------------------------

void WeightGradients::take_memory(const Model& model, int64_t B, int64_t T, int64_t micro_batches, Arena& arena) {
    int64_t bytes = 0;  // every output gradient begins on 256 bytes, as vector loads and the products want it
    for (const auto& [inputs, outputs] : block_linear_shapes(model.config))
        bytes += round_up(B * T * outputs * static_cast<int64_t>(dtype_bytes(model.precision.dtype)), 256);
    memory_ = arena.take("output gradients for later", DType::i32, {micro_batches * model.n_blocks() * bytes / 4});
}

void WeightGradients::push(const Linear& linear, Tensor dout, Tensor inp, Tensor scaled_by, cudaStream_t stream) {
    const int64_t bytes = round_up(static_cast<int64_t>(dout.bytes()), 256);
    check(used_ + bytes <= static_cast<int64_t>(memory_.bytes()), "weight gradients for later: their memory of ",
          memory_.bytes(), " bytes is full: call run(), or take memory for more micro-batches");
    Tensor kept = dout;  // the workspace's tensor is written again by the next block
    kept.data = static_cast<char*>(memory_.data) + used_;
    cudaCheck(cudaMemcpyAsync(kept.data, dout.data, dout.bytes(), cudaMemcpyDeviceToDevice, stream));
    used_ += bytes;
    entries_.push_back({&linear, kept, inp, scaled_by});
}

void WeightGradients::run(Tensor scratch, cudaStream_t stream) {
    for (const Entry& e : entries_) own_backward_weight(*e.linear, e.dout, e.inp, e.scaled_by, scratch, stream);
    entries_.clear();
    used_ = 0;
}
