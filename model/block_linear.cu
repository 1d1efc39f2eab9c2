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

void backward_weight(const Linear& linear, Tensor dout, Tensor inp, Tensor scaled_by, Tensor scratch,
                     cudaStream_t stream) {
    const Fp8Recipe recipe = linear.fp8.recipe;
    if (recipe == Fp8Recipe::none) linear_backward_weight(linear.dweight, linear.dbias, dout, inp, scratch, stream);
    else fp8_linear_backward_weight(linear.dweight, linear.dbias, dout, inp, scaled_by, recipe, scratch, stream);
}

}  // namespace

void block_linear_forward(const BlockContext& b, const Linear& linear, Tensor out, Tensor inp) {
    const Tensor bias = linear.adds_bias ? linear.bias : Tensor{};
    if (linear.quantised.codes.exists()) return quantised_linear_forward(out, inp, linear.quantised, bias, b.stream);
    if (!b.saved.fp8) return linear_forward(out, inp, linear.weight, bias, b.stream);
    fp8_linear_forward(out, scaled_by(b, linear), inp, linear.fp8, bias, linear.fp8_state, b.acts.training,
                       b.workspace.scratch, b.stream);
}

void block_linear_backward_input(const BlockContext& b, const Linear& linear, Tensor dinp, Tensor dout) {
    if (!b.saved.fp8) return linear_backward_input(dinp, dout, linear.weight, false, b.stream);
    fp8_linear_backward_input(dinp, scaled_by(b, linear), dout, linear.fp8, false, linear.fp8_state,
                              b.workspace.scratch, b.stream);
}

void block_linear_backward_weight(const BlockContext& b, const Linear& linear, Tensor dout, Tensor inp) {
    const Tensor scales = b.saved.fp8 ? scaled_by(b, linear) : Tensor{};
    if (b.workspace.later) b.workspace.later->push(linear, dout, inp, scales, b.stream);
    else backward_weight(linear, dout, inp, scales, b.workspace.scratch, b.stream);
}

// ---------------------------------------------------------------------------------------------------------------------

void WeightGradients::take_memory(const Model& model, int64_t B, int64_t T, int64_t micro_batches, Arena& arena) {
    int64_t bytes = 0;  // every output gradient begins on 256 bytes, as vector loads and the products want it
    for (const auto& [inputs, outputs] : block_linear_shapes(model.config))
        bytes += round_up(B * T * outputs * static_cast<int64_t>(dtype_bytes(model.precision.dtype)), 256);
    memory_ = arena.take("output gradients for later", DType::i32, {micro_batches * model.config.L * bytes / 4});
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
    for (const Entry& e : entries_) backward_weight(*e.linear, e.dout, e.inp, e.scaled_by, scratch, stream);
    entries_.clear();
    used_ = 0;
}
