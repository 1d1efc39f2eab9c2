// test/models.h: small models of every kind, with their memory, and what tests need to know of them.
#pragma once

#include "llm.h"
#include "optim/optim.h"
#include "reference.h"

#include <algorithm>
#include <cmath>

// A model with its memory, ready to train.
struct TinyTrainer {
    Arena weights{"weights"}, grads{"grads"}, masters{"masters"}, states{"states"}, activations{"activations"};
    Config config;
    Model model;
    Activations acts;
    Workspace workspace;
    std::unique_ptr<Optimizer> optimizer;
    Tensor norm, norm_scratch;

    TinyTrainer(const Config& c, int64_t B, int64_t T, const Precision& precision = {}, const Recompute& recompute = {},
                const std::string& optimizer_name = "adamw", bool documents = false,
                FlashTier tier = FlashTier::automatic)
        : config(c) {
        for (int pass = 0; pass < 2; ++pass) {
            model = build_model(config, precision, T, weights, grads, masters);
            model.flash_tier = tier;
            optimizer = make_optimizer(optimizer_name, states, model.params, model.weights.n(), {});
            acts = take_activations(model, B, T, recompute, activations);
            workspace = take_workspace(model, B, T, true, activations);
            if (documents) take_documents(model, acts, T, activations), take_positions(acts, activations);
            norm = activations.take("norm", DType::f32, {2});
            norm_scratch = activations.take("norm", DType::f32, {grad_norm_scratch_n(model.grads.n())});
            if (pass == 0)
                for (Arena* arena : {&weights, &grads, &masters, &states, &activations}) arena->reserve();
        }
        optimizer->init(device().stream);
    }
    void set_batch(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) {
        copy_to_device(acts.tokens, tokens.data());
        copy_to_device(acts.targets, targets.data());
    }
    double mean_loss() {
        double total = 0;
        int64_t n = 0;
        std::vector<int32_t> targets(static_cast<size_t>(acts.targets.n()));
        copy_to_host(targets.data(), acts.targets);
        const std::vector<float> losses = to_floats(acts.losses);
        for (size_t i = 0; i < losses.size(); ++i) total += losses[i], n += targets[i] >= 0;
        return total / static_cast<double>(n);
    }
    void zero_grads() { cudaCheck(cudaMemsetAsync(model.grads.data, 0, model.grads.bytes(), device().stream)); }
    // Adds to the gradients, or writes them where workspace.accumulate is false.
    void compute_gradients(float dloss) {
        forward(model, acts, workspace, device().stream);
        loss_backward(model, acts, dloss, device().stream);
        backward(model, acts, workspace, device().stream);
    }
    double train_step(float dloss, double lr, int64_t t) {
        Workspace first = workspace;  // the step's only micro-batch
        first.accumulate = false;
        quantise_weights(model, device().stream);
        forward(model, acts, workspace, device().stream);
        loss_backward(model, acts, dloss, device().stream);
        backward(model, acts, first, device().stream);
        grad_norm(norm, model.grads, 1.0f, 1.0f, norm_scratch, device().stream);
        optimizer->step(model.all_weights(1), model.grads, norm, lr, t, device().stream);
        advance_fp8(model, device().stream);
        return mean_loss();
    }
};

// A model with random weights that only computes: its gradients have no memory.
struct ModelWithMemory {
    Arena weights{"weights"}, grads{"gradients"}, masters{"master weights"};
    Model model;
    ModelWithMemory(const Config& config, int64_t T, DType dtype = DType::f32) {
        for (int pass = 0; pass < 2; ++pass) {
            model = build_model(config, {dtype, DType::f32, false}, T, weights, grads, masters);
            if (pass == 0) weights.reserve();
        }
        init_weights(model, 4);
    }
};

// A parameter (or its gradient) as the Hugging Face file has it.
inline std::vector<float> in_file_layout(const Param& param, const Tensor& tensor) {
    const int64_t rows = tensor.shape[0] - param.padded_rows;
    std::vector<float> values = to_floats(tensor.slice(0, rows));
    if (!param.transposed) return values;
    const int64_t cols = tensor.cols();
    std::vector<float> out(values.size());
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c)
            out[static_cast<size_t>(c * rows + r)] = values[static_cast<size_t>(r * cols + c)];
    return out;
}

inline double norm_of(const std::vector<float>& a) {
    double sum = 0;
    for (float x : a) sum += static_cast<double>(x) * x;
    return std::sqrt(sum);
}
inline double norm_of_difference(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    std::vector<float> difference = a;
    for (size_t i = 0; i < a.size(); ++i) difference[i] -= b[i];
    return norm_of(difference);
}
// How far a model in `dtype` may be from the same one in exact arithmetic, relative to the norm of what is compared. A
// number that is stored is rounded by at most u = unit_roundoff of itself; in the root mean square by 0.42 u, for which
// u / 2 stands here. A gradient passes about 30 such roundings in the two layers of a small model, and with random
// signs they add up to sqrt(30) times one of them. Four times that is allowed: in the tests' few thousand cases no sum
// of errors is further out.
inline double model_error(DType dtype) { return 4 * std::sqrt(30.0) * unit_roundoff(dtype) / 2; }
inline double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double worst = 0;
    for (size_t i = 0; i < a.size(); ++i) worst = larger(worst, std::abs(static_cast<double>(a[i]) - b[i]));
    return worst;
}
inline double largest(const std::vector<float>& a) {
    double most = 0;
    for (float x : a) most = std::max(most, std::abs(static_cast<double>(x)));
    return most;
}

inline Config small_llama() {
    Config c;
    c.V = 53, c.T_max = 40, c.L = 2, c.H = 6, c.K = 2, c.D = 8, c.C = 30, c.F = 44;
    return c;
}
inline Config small_gpt2() {
    Config c;
    c.family = Family::gpt2, c.feed_forward = "gelu";
    c.V = 61, c.T_max = 40, c.L = 2, c.H = 3, c.K = 3, c.D = 8, c.C = 24, c.F = 50, c.tied = true;
    return c;
}
inline Config small_qwen2() {
    Config c = small_llama();
    c.qkv_bias = true, c.tied = true;
    return c;
}
inline Config small_qwen3() {
    Config c = small_llama();
    c.qk_norm = true, c.D = 16;
    return c;
}
// q_rank 0: queries come from the input, as in DeepSeek-V2-Lite.
inline Config small_mla(int64_t q_rank) {
    Config c = small_llama();
    c.attention = "mla", c.H = c.K = 3, c.D = 24, c.D_rope = 8, c.D_v = 8, c.q_rank = q_rank, c.kv_rank = 24;
    c.rope_pairs = q_rank > 0 ? RopePairs::neighbours : RopePairs::halves;
    if (q_rank > 0)
        c.rope_scaling = {.factor = 4,
                          .original_max_position = 64,
                          .kind = RopeKind::yarn,
                          .beta_fast = 4,
                          .mscale = 1,
                          .mscale_all_dim = 1};
    return c;
}
inline Config small_mfa() {
    Config c = small_llama();
    c.attention = "mfa", c.H = 3, c.K = 1, c.D = 16, c.q_rank = 24;
    return c;
}
inline std::vector<Config> small_models() {
    return {small_llama(), small_gpt2(), small_qwen2(), small_qwen3(), small_mla(16), small_mla(0), small_mfa()};
}
inline std::vector<int32_t> random_tokens(int64_t n, int64_t V, uint64_t seed) {
    std::vector<int32_t> tokens(static_cast<size_t>(n));
    for (size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = static_cast<int32_t>(uniform_below(seed, 7, i, static_cast<uint64_t>(V)));
    return tokens;
}
