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

// The geometry that a product of this layer belongs to: with tensor parallelism that divides the residual stream's
// columns, those that read it or write it. Otherwise it is a product of this rank alone.
ColumnGeometry* geometry_of(const Model& model, const Linear& linear) {
    const bool crosses = linear.crossing != Crossing::inside;
    return model.tensor_parallel && crosses ? model.tensor_parallel->geometry() : nullptr;
}

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

// whole_rows: of a step of inference.
void product_forward(const Model& model, const Linear& linear, Tensor out, Tensor inp, Tensor bias, bool whole_rows,
                     cudaStream_t stream) {
    ColumnGeometry* const geometry = geometry_of(model, linear);
    if (!geometry) (whole_rows ? step_forward : linear_forward)(out, inp, linear.weight, bias, stream);
    else if (whole_rows) geometry->forward_whole_rows(out, inp, linear.weight, bias, linear.crossing, stream);
    else geometry->forward(out, inp, linear.weight, bias, linear.crossing, stream);
}
void product_backward_input(const Model& model, const Linear& linear, Tensor dinp, Tensor dout, cudaStream_t stream) {
    ColumnGeometry* const geometry = geometry_of(model, linear);
    if (geometry) geometry->backward_input(dinp, dout, linear.weight, linear.crossing, stream);
    else linear_backward_input(dinp, dout, linear.weight, false, stream);
}

void backward_weight(const Model& model, const Linear& linear, Tensor dout, Tensor inp, Tensor scaled_by,
                     Tensor scratch, cudaStream_t stream) {
    if (ColumnGeometry* const geometry = geometry_of(model, linear)) {
        geometry->backward_weight(linear.dweight, dout, inp, linear.crossing, stream);
        if (linear.dbias) column_sum(linear.dbias, dout, scratch, stream);
        return;
    }
    const Fp8Recipe recipe = linear.fp8.recipe;
    if (recipe == Fp8Recipe::none) linear_backward_weight(linear.dweight, linear.dbias, dout, inp, scratch, stream);
    else fp8_linear_backward_weight(linear.dweight, linear.dbias, dout, inp, scaled_by, recipe, scratch, stream);
}

}  // namespace

void block_linear_forward(const BlockContext& b, const Linear& linear, Tensor out, Tensor inp) {
    const Tensor bias = linear.adds_bias ? linear.bias : Tensor{};
    if (linear.quantised.codes.exists()) return quantised_linear_forward(out, inp, linear.quantised, bias, b.stream);
    if (!b.saved.fp8) return product_forward(b.model, linear, out, inp, bias, has_cache(b), b.stream);
    const AmaxFrom amax = amax_of_all(b, linear, 0, inp);
    fp8_linear_forward(out, scaled_by(b, linear), inp, linear.fp8, bias, linear.fp8_state, b.acts.training,
                       b.workspace.scratch, b.stream, amax);
}

void block_linear_backward_input(const BlockContext& b, const Linear& linear, Tensor dinp, Tensor dout) {
    if (!b.saved.fp8) return product_backward_input(b.model, linear, dinp, dout, b.stream);
    const AmaxFrom amax = amax_of_all(b, linear, 1, dout);
    fp8_linear_backward_input(dinp, scaled_by(b, linear), dout, linear.fp8, false, linear.fp8_state,
                              b.workspace.scratch, b.stream, amax);
}

void block_linear_backward_weight(const BlockContext& b, const Linear& linear, Tensor dout, Tensor inp) {
    const Tensor scales = b.saved.fp8 ? scaled_by(b, linear) : Tensor{};
    if (b.workspace.later) b.workspace.later->push(b.model, linear, dout, inp, scales, b.stream);
    else backward_weight(b.model, linear, dout, inp, scales, b.workspace.scratch, b.stream);
}

void head_linear_forward(const Model& model, const Activations& acts, Tensor inp, cudaStream_t stream) {
    product_forward(model, model.head, acts.logits, inp, {}, acts.logit_rows.exists(), stream);
}
void head_linear_backward_input(const Model& model, Tensor dinp, Tensor dlogits, cudaStream_t stream) {
    product_backward_input(model, model.head, dinp, dlogits, stream);
}
void head_linear_backward_weight(const Model& model, Tensor dlogits, Tensor inp, Tensor scratch, cudaStream_t stream) {
    backward_weight(model, model.head, dlogits, inp, {}, scratch, stream);
}

// ---------------------------------------------------------------------------------------------------------------------

void WeightGradients::take_memory(const Model& model, int64_t B, int64_t T, int64_t micro_batches, Arena& arena) {
    int64_t bytes = 0;  // every output gradient begins on 256 bytes, as vector loads and the products want it
    for (const auto& [inputs, outputs] : block_linear_shapes(model.config))
        bytes += round_up(B * T * outputs * static_cast<int64_t>(dtype_bytes(model.precision.dtype)), 256);
    memory_ = arena.take("output gradients for later", DType::i32, {micro_batches * model.config.L * bytes / 4});
}

void WeightGradients::push(const Model& model, const Linear& linear, Tensor dout, Tensor inp, Tensor scaled_by,
                           cudaStream_t stream) {
    const int64_t bytes = round_up(static_cast<int64_t>(dout.bytes()), 256);
    check(used_ + bytes <= static_cast<int64_t>(memory_.bytes()), "weight gradients for later: their memory of ",
          memory_.bytes(), " bytes is full: call run(), or take memory for more micro-batches");
    Tensor kept = dout;  // the workspace's tensor is written again by the next block
    kept.data = static_cast<char*>(memory_.data) + used_;
    cudaCheck(cudaMemcpyAsync(kept.data, dout.data, dout.bytes(), cudaMemcpyDeviceToDevice, stream));
    used_ += bytes;
    entries_.push_back({&model, &linear, kept, inp, scaled_by});
}

void WeightGradients::run(Tensor scratch, cudaStream_t stream) {
    for (const Entry& e : entries_) backward_weight(*e.model, *e.linear, e.dout, e.inp, e.scaled_by, scratch, stream);
    entries_.clear();
    used_ = 0;
}
