// model/quantised.cu: a model whose weights take 8 bits each.
//
// A step of inference reads every weight once, and where few sequences run this is what takes the time: a quarter of
// float32's bytes, or half of bf16's, is up to four times the speed, or twice. Each row of a weight (or each 128
// neighbours of a row) has a scale of its own (layers/few_rows.cu), so that a row with one large weight does not cost
// the others their digits.
#include "model/sublayer.h"

namespace {

// A tensor like this one in the arena, with the same numbers if there is memory for them.
Tensor copy_of(const Tensor& tensor, const char* what, Arena& arena) {
    if (!tensor.exists()) return {};
    Tensor copy = tensor;
    copy.data = arena.take(what, tensor.dtype, {tensor.n()}).data;
    if (!arena.counting())
        cudaCheck(cudaMemcpyAsync(copy.data, tensor.data, tensor.bytes(), cudaMemcpyDefault, device().stream));
    return copy;
}

int64_t largest_weight(const Model& model) {
    int64_t n = 0;
    for (const auto& [inputs, outputs] : block_linear_shapes(model.config)) n = std::max(n, inputs * outputs);
    return n;
}

}  // namespace

Model quantised_copy(const Model& model, WeightFormat format, Arena& arena) {
    const cudaStream_t stream = device().stream;
    // The weight on its way: quantising needs it on the device.
    Arena staging("a weight to be quantised");
    if (!arena.counting()) staging.take("weight", model.precision.dtype, {largest_weight(model)}), staging.reserve();
    Model copy = model;
    copy.params.clear();
    copy.units.clear();
    copy.weights = copy.grads = copy.masters = {};
    copy.wte = copy_of(model.wte, "embedding", arena);
    copy.wpe = copy_of(model.wpe, "embedding", arena);
    copy.rope_table = copy_of(model.rope_table, "rope table", arena);
    const auto copy_norm = [&](Norm& norm) {
        norm.weight = copy_of(norm.weight, "norms", arena);
        norm.bias = copy_of(norm.bias, "norms", arena);
    };
    for (Block& block : copy.blocks) {
        copy_norm(block.norm1), copy_norm(block.norm2);
        for (SubLayerParameters* p : {&block.attention, &block.feed_forward})
            for (Norm& norm : p->norms) copy_norm(norm);
        for (Linear* linear : linears(block)) {
            linear->bias = copy_of(linear->bias, "biases", arena);
            if (linear->weight_is_read) {
                linear->weight = copy_of(linear->weight, "weights", arena);
                continue;
            }
            const Tensor weight = linear->weight;
            linear->quantised = take_quantised_weight(arena, format, weight.shape[0], weight.shape[1]);
            linear->weight = {};
            if (arena.counting()) continue;
            const size_t mark = staging.mark();
            quantise_weight(linear->quantised, copy_of(weight, "weight", staging), stream);
            staging.release(mark);
        }
    }
    copy_norm(copy.final_norm);
    copy.head.weight = model.ties_head() ? copy.wte : copy_of(model.head.weight, "head", arena);
    cudaCheck(cudaStreamSynchronize(stream));  // before the model's own memory, or the staging, goes
    return copy;
}
