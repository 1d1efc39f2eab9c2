// model/versions.cu: a model with other weights than its own: a version of them that a pipeline without flushes has
// kept.
#include "model/sublayer.h"

Model with_weights(const Model& model, const Tensor& weights) {
    check(weights.dtype == model.weights.dtype && weights.n() == model.weights.n(), "a version of the weights is ",
          weights, ", the model's are ", model.weights);
    Model other = model;
    // Every weight lies in the flat array: at the same place of the other one.
    const auto move = [&](Tensor& tensor) {
        if (tensor.data)
            tensor.data = static_cast<char*>(weights.data) +
                          (static_cast<char*>(tensor.data) - static_cast<char*>(model.weights.data));
    };
    const auto move_norm = [&](Norm& norm) { move(norm.weight), move(norm.bias); };
    other.weights = weights;
    for (Param& param : other.params) move(param.value);
    for (Tensor* tensor : {&other.wte, &other.wpe, &other.head.weight}) move(*tensor);
    move_norm(other.final_norm);
    for (Block& block : other.blocks) {
        move_norm(block.norm1), move_norm(block.norm2);
        for (SubLayerParameters* parameters : {&block.attention, &block.feed_forward}) {
            for (Linear& linear : parameters->linears) move(linear.weight), move(linear.bias);
            for (Norm& norm : parameters->norms) move_norm(norm);
        }
    }
    return other;
}
