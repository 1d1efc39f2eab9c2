// test/test_head_chunks.cu: the head in chunks of rows (--head-chunks): the losses and gradients of the head at once,
// and logits of one chunk.
#include "models.h"

namespace {

constexpr int64_t kB = 3, kT = 13, kN = kB * kT;  // 39 rows: the last chunk is a shorter one

struct Pass {
    std::vector<float> losses, evaluated;
    std::map<std::string, std::vector<float>> gradients;
    int64_t logits_bytes, activation_bytes;
};

// A step's micro-batch that writes the gradients, which are NaN before; and the losses of an evaluation.
Pass pass_of(const Config& config, const Precision& precision, int64_t chunks) {
    TinyTrainer m(config, kB, kT, precision, {.every = 1, .head_chunks = chunks});
    init_weights(m.model, 3);
    std::vector<int32_t> tokens(kN), targets(kN);
    for (size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = static_cast<int32_t>(i * 5 % 31),
        targets[i] = static_cast<int32_t>(i * 7 % 37) - (i % 9 == 4 ? 99 : 0);
    m.set_batch(tokens, targets);
    const cudaStream_t stream = device().stream;
    Pass pass;
    forward(m.model, m.acts, m.workspace, stream, false);
    loss_forward(m.model, m.acts, stream);
    pass.evaluated = to_floats(m.acts.losses);
    for (const Tensor& tensor : {m.model.grads, m.acts.losses})
        cudaCheck(cudaMemsetAsync(tensor.data, 0xff, tensor.bytes(), stream));
    m.workspace.accumulate = false;
    m.compute_gradients(1.0f / kN);
    pass.losses = to_floats(m.acts.losses);
    for (const Param& param : m.model.params) pass.gradients[param.name] = to_floats(param.grad);
    pass.logits_bytes = bytes_of(m.acts.logits), pass.activation_bytes = static_cast<int64_t>(m.activations.bytes());
    return pass;
}

// The same bits. On a GPU cuBLASLt chooses an algorithm by the number of rows, so that the sums of each product may be
// in another order: float32's errors, and of 16-bit logits another rounding here and there.
void check_same(const std::vector<float>& got, const std::vector<float>& expected, DType dtype) {
    if (device().is_cpu) {
        CHECK((got == expected));
        return;
    }
    CHECK(norm_of_difference(expected, got) <= (dtype == DType::f32 ? 1e-5 : model_error(dtype)) * norm_of(expected));
}

}  // namespace

TEST_CASE("the head in chunks of rows: losses and gradients of all rows at once", "[model][head_chunks]") {
    for (const Config& config : {small_llama(), small_gpt2()})  // a head of its own, and a tied one
        for (const Precision& precision : {Precision{}, Precision{DType::bf16, DType::f32, true}}) {
            const Pass whole = pass_of(config, precision, 1);
            const int64_t row = config.V_padded() * static_cast<int64_t>(dtype_bytes(precision.dtype));
            check_same(whole.evaluated, whole.losses, precision.dtype);
            for (const int64_t chunks : {2, 4, 39}) {
                INFO(config.attention << ", " << dtype_name(precision.dtype) << ", " << chunks << " chunks");
                const Pass parts = pass_of(config, precision, chunks);
                check_same(parts.losses, whole.losses, precision.dtype);
                check_same(parts.evaluated, whole.losses, precision.dtype);
                CHECK(parts.logits_bytes == (chunks == 2 ? 24 : chunks == 4 ? 16 : 8) * row);
                // Arenas hand out multiples of 256 bytes.
                CHECK(whole.activation_bytes - parts.activation_bytes ==
                      round_up(whole.logits_bytes, 256) - round_up(parts.logits_bytes, 256));
                for (const auto& [name, values] : whole.gradients) {
                    INFO(name);
                    // The gradient of the head's weight is a sum over rows, cut into chunks; everything else follows
                    // from the gradient of its input, whose rows are what they were.
                    const bool is_heads = name == "lm_head.weight" || (config.tied && name.find("wte") != name.npos);
                    if (!is_heads || !device().is_cpu) {
                        check_same(parts.gradients.at(name), values, precision.dtype);
                        continue;
                    }
                    // 39 products below 4 / 39 in size, and as many sums, rounded to float32 in another order
                    for (size_t i = 0; i < values.size(); ++i)
                        if (!(std::abs(parts.gradients.at(name)[i] - values[i]) <= 39 * 0x1p-24 * 4))
                            FAIL(name << " differs at " << i);
                }
            }
        }
}
