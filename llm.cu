// llm.cu: GPT-2 and LLaMA, forward and, in mirrored order, backward.
//
// A model is a token embedding, L blocks and a head. A block adds two branches to the residual stream x:
//
//     x = x + attention(norm1(x))
//     x = x + feed_forward(norm2(x))
//
// GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases, GELU, tied head.
// LLaMA (Touvron et al. 2023, arXiv:2302.13971): rotary positions, RMSNorm, no biases, SwiGLU, grouped-query attention.
//
// The addition to the stream is done by the norm that comes next (it reads the sum anyway), so a block hands on two things:
// the stream before its last branch (norm2.sum), and that branch (acts.branch).
#include "llm.h"

#include <algorithm>
#include <cmath>

// ---------------------------------------------------------------------------------------------------------------------
// Parameters

namespace {

// Gives every parameter its place in the flat arrays, in reading order: embedding, blocks, final norm, head. Fused tensors
// (q, k and v; gate and up) get one place; their parts are rows of it.
class Placer {
  public:
    Placer(Model& model) : model_(model) {}

    struct Place {
        Tensor value, grad;
        int64_t offset;
    };
    Place take(std::initializer_list<int64_t> dims) {
        const int64_t offset = n_;
        Place place{make_tensor(nullptr, model_.dtype, dims), make_tensor(nullptr, model_.dtype, dims), offset};
        const size_t byte = static_cast<size_t>(offset) * dtype_bytes(model_.dtype);
        if (model_.values.data) place.value.data = static_cast<char*>(model_.values.data) + byte;
        if (model_.grads.data) place.grad.data = static_cast<char*>(model_.grads.data) + byte;
        n_ = round_up(offset + place.value.n(), 64);  // 256 bytes in f32, 128 in 16 bits
        return place;
    }
    // Rows [first, first + rows) of a place as the parameter `name`.
    void name(const std::string& name, const Place& place, int64_t first, int64_t rows, bool decay, bool transposed = false,
              int64_t padded_rows = 0) {
        const int64_t row_n = place.value.n() / place.value.shape[0];
        model_.params.push_back({name, place.value.slice(first, rows), place.grad.slice(first, rows),
                                 place.offset + first * row_n, decay, transposed, padded_rows});
    }
    Norm norm(const std::string& prefix, int64_t C, bool bias) {
        Norm norm;
        const Place weight = take({C});
        name(prefix + ".weight", weight, 0, C, false);
        norm.weight = weight.value, norm.dweight = weight.grad;
        if (bias) {
            const Place b = take({C});
            name(prefix + ".bias", b, 0, C, false);
            norm.bias = b.value, norm.dbias = b.grad;
        }
        return norm;
    }
    // A linear layer made of one or more named parts, each with its number of output rows.
    Linear linear(const std::vector<std::pair<std::string, int64_t>>& parts, int64_t C, bool bias, bool transposed) {
        int64_t O = 0;
        for (const auto& part : parts) O += part.second;
        const Place weight = take({O, C});
        const Place b = bias ? take({O}) : Place{};
        int64_t first = 0;
        for (const auto& [prefix, rows] : parts) {
            name(prefix + ".weight", weight, first, rows, true, transposed);
            if (bias) name(prefix + ".bias", b, first, rows, false);
            first += rows;
        }
        return {weight.value, b.value, weight.grad, b.grad};
    }
    int64_t n() const { return n_; }

  private:
    Model& model_;
    int64_t n_ = 0;
};

int64_t place_parameters(Model& model) {
    const Config& c = model.config;
    const bool gpt2 = c.family == Family::gpt2;
    Placer placer(model);
    model.params.clear();
    model.blocks.clear();

    const Placer::Place wte = placer.take({c.V_padded(), c.C});
    placer.name(gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight", wte, 0, c.V_padded(), true, false,
                c.V_padded() - c.V);
    model.wte = wte.value, model.dwte = wte.grad;
    if (gpt2) {
        const Placer::Place wpe = placer.take({c.T_max, c.C});
        placer.name("transformer.wpe.weight", wpe, 0, c.T_max, true);
        model.wpe = wpe.value, model.dwpe = wpe.grad;
    }
    for (int64_t l = 0; l < c.L; ++l) {
        Block block;
        if (gpt2) {
            const std::string p = concat("transformer.h.", l, ".");
            block.norm1 = placer.norm(p + "ln_1", c.C, true);
            block.qkv = placer.linear({{p + "attn.c_attn", c.qkv_width()}}, c.C, true, true);
            block.attn_out = placer.linear({{p + "attn.c_proj", c.C}}, c.H * c.D, true, true);
            block.norm2 = placer.norm(p + "ln_2", c.C, true);
            block.up = placer.linear({{p + "mlp.c_fc", c.F}}, c.C, true, true);
            block.down = placer.linear({{p + "mlp.c_proj", c.C}}, c.F, true, true);
        } else {
            const std::string p = concat("model.layers.", l, "."), a = p + "self_attn.", m = p + "mlp.";
            block.norm1 = placer.norm(p + "input_layernorm", c.C, false);
            block.qkv = placer.linear({{a + "q_proj", c.H * c.D}, {a + "k_proj", c.K * c.D}, {a + "v_proj", c.K * c.D}}, c.C,
                                      false, false);
            block.attn_out = placer.linear({{a + "o_proj", c.C}}, c.H * c.D, false, false);
            block.norm2 = placer.norm(p + "post_attention_layernorm", c.C, false);
            block.up = placer.linear({{m + "gate_proj", c.F}, {m + "up_proj", c.F}}, c.C, false, false);
            block.down = placer.linear({{m + "down_proj", c.C}}, c.F, false, false);
        }
        model.blocks.push_back(block);
    }
    model.final_norm = placer.norm(gpt2 ? "transformer.ln_f" : "model.norm", c.C, gpt2);
    if (c.tied) {
        model.head = {model.wte, {}, model.dwte, {}};
    } else {
        const Placer::Place head = placer.take({c.V_padded(), c.C});
        placer.name("lm_head.weight", head, 0, c.V_padded(), true, false, c.V_padded() - c.V);
        model.head = {head.value, {}, head.grad, {}};
    }
    return placer.n();
}

}  // namespace

Model build_model(const Config& config, DType dtype, int64_t T, Arena& values, Arena& grads) {
    check_config(config);
    check(config.family != Family::gpt2 || T <= config.T_max, "a sequence of ", T, " tokens is longer than the ", config.T_max,
          " positions this model has: use --seq ", config.T_max, " or less");
    Model model;
    model.config = config;
    model.dtype = dtype;
    const int64_t n = place_parameters(model);  // counts
    model.values = values.take("parameters", dtype, {n});
    model.grads = grads.take("gradients", dtype, {n});
    place_parameters(model);  // now with memory
    if (config.family == Family::llama) model.rope_table = values.take("rope table", DType::f32, {T, config.D});
    if (values.counting()) return model;

    // The gaps between parameters and the padding rows of the vocabulary stay zero for good.
    cudaCheck(cudaMemsetAsync(model.values.data, 0, model.values.bytes(), device().stream));
    cudaCheck(cudaMemsetAsync(model.grads.data, 0, model.grads.bytes(), device().stream));
    if (model.rope_table) rope_table(model.rope_table, rope_frequencies(config.D, config.rope_base, config.rope_scaling));
    return model;
}

void init_weights(Model& model, uint64_t seed) {
    const double residual_std = model.config.init_std / std::sqrt(2.0 * static_cast<double>(model.config.L));
    const auto ends_with = [](const std::string& text, const std::string& end) {
        return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
    };
    for (const Param& param : model.params) {
        const bool residual = ends_with(param.name, "c_proj.weight") || ends_with(param.name, "o_proj.weight") ||
                              ends_with(param.name, "down_proj.weight");
        if (param.decay)
            fill_normal(param.value.slice(0, param.value.shape[0] - param.padded_rows),
                        residual ? residual_std : model.config.init_std, seed, hash_name(param.name));
        else
            fill_constant(param.value, ends_with(param.name, ".weight") ? 1.0f : 0.0f);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Activations

Activations take_activations(const Config& config, DType dtype, int64_t B, int64_t T, bool training, Arena& arena) {
    const Config& c = config;
    const int64_t N = B * T;
    Activations acts;
    acts.B = B;
    acts.T = T;
    acts.tokens = arena.take("tokens", DType::i32, {B, T});
    acts.targets = arena.take("tokens", DType::i32, {N});
    acts.embedded = arena.take("residual stream", dtype, {N, c.C});
    acts.losses = arena.take("losses", DType::f32, {N});
    acts.branch = arena.take("shared by layers", dtype, {N, c.C});
    acts.qkv = arena.take("shared by layers", dtype, {N, c.qkv_width()});

    const auto take_norm = [&](bool has_branch) {
        NormSaved saved;
        saved.sum = has_branch ? arena.take("residual stream", dtype, {N, c.C}) : acts.embedded;
        saved.out = arena.take("norms", dtype, {N, c.C});
        if (c.family == Family::gpt2) saved.mean = arena.take("norms", DType::f32, {N});
        saved.rstd = arena.take("norms", DType::f32, {N});
        return saved;
    };
    const auto take_block = [&](bool first) {
        BlockSaved saved;
        saved.norm1 = take_norm(!first);
        saved.attention = take_attention_saved(arena, dtype, B, T, c.H, c.K, c.D);
        saved.attn = arena.take("attention", dtype, {N, c.H * c.D});
        saved.norm2 = take_norm(true);
        saved.up = arena.take("feed-forward", dtype, {N, c.up_width()});
        saved.act = arena.take("feed-forward", dtype, {N, c.F});
        return saved;
    };
    // Without a backward nothing need be kept: all blocks share the first one's tensors. Its norm1.sum is the embedding,
    // which nobody reads any more when the second block writes its own sum there.
    for (int64_t l = 0; l < c.L; ++l) acts.blocks.push_back(training || l == 0 ? take_block(l == 0) : acts.blocks[0]);
    acts.final_norm = take_norm(true);
    acts.logits = arena.take("logits", dtype, {N, c.V_padded()});

    int64_t attention_scratch_n = attention_forward_scratch_n(B, T, c.H, c.K, c.D);
    if (training) {
        acts.dresidual = arena.take("gradients of activations", dtype, {N, c.C});
        acts.dnorm = arena.take("gradients of activations", dtype, {N, c.C});
        acts.dattn = arena.take("gradients of activations", dtype, {N, c.H * c.D});
        acts.dup = arena.take("gradients of activations", dtype, {N, c.up_width()});
        acts.dact = arena.take("gradients of activations", dtype, {N, c.F});
        acts.links = arena.take("shared by layers", DType::i32, {2, N});
        attention_scratch_n = std::max(attention_scratch_n, attention_backward_scratch_n(B, T, c.H, c.K, c.D));
        const int64_t widest = std::max({c.qkv_width(), c.up_width(), c.C});
        const int64_t scratch_n = std::max({linear_backward_scratch_n(N, widest), layernorm_backward_scratch_n(N, c.C),
                                            rmsnorm_backward_scratch_n(N, c.C)});
        acts.scratch = arena.take("shared by layers", DType::f32, {scratch_n});
    }
    acts.attention_scratch = arena.take("shared by layers", dtype, {attention_scratch_n});
    return acts;
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

namespace {

float attention_scale(const Config& config) { return 1.0f / std::sqrt(static_cast<float>(config.D)); }

// saved.sum = inp + branch, saved.out = norm(saved.sum). Without a branch, saved.sum is inp itself.
void norm_forward(const Config& config, const Norm& norm, const NormSaved& saved, Tensor inp, Tensor branch,
                  cudaStream_t stream) {
    const Tensor sum = branch ? saved.sum : Tensor{};
    const float eps = static_cast<float>(config.norm_eps);
    if (config.family == Family::gpt2)
        layernorm_forward(saved.out, sum, saved.mean, saved.rstd, inp, branch, norm.weight, norm.bias, eps, stream);
    else
        rmsnorm_forward(saved.out, sum, saved.rstd, inp, branch, norm.weight, eps, stream);
}

// dinp = d norm + dsum
void norm_backward(const Config& config, const Norm& norm, const NormSaved& saved, Tensor dinp, Tensor dout, Tensor dsum,
                   Tensor scratch, cudaStream_t stream) {
    if (config.family == Family::gpt2)
        layernorm_backward(dinp, norm.dweight, norm.dbias, dout, dsum, saved.sum, norm.weight, saved.mean, saved.rstd, scratch,
                           stream);
    else
        rmsnorm_backward(dinp, norm.dweight, dout, dsum, saved.sum, norm.weight, saved.rstd, scratch, stream);
}

// residual, acts.branch -> saved.norm2.sum, acts.branch: the block's stream and its last branch, not yet added.
void block_forward(const Model& model, const Block& block, const BlockSaved& saved, Activations& acts, Tensor residual,
                   bool first, cudaStream_t stream) {
    const Config& c = model.config;
    const Tensor qkv = acts.qkv.view({acts.B, acts.T, c.qkv_width()});

    norm_forward(c, block.norm1, saved.norm1, residual, first ? Tensor{} : acts.branch, stream);
    linear_forward(acts.qkv, saved.norm1.out, block.qkv.weight, block.qkv.bias, stream);
    if (c.family == Family::llama) rope_forward(qkv, model.rope_table, c.H, c.K, stream);
    attention_forward(saved.attn.view({acts.B, acts.T, c.H * c.D}), saved.attention, qkv, attention_scale(c),
                      acts.attention_scratch, stream);
    linear_forward(acts.branch, saved.attn, block.attn_out.weight, block.attn_out.bias, stream);

    norm_forward(c, block.norm2, saved.norm2, saved.norm1.sum, acts.branch, stream);
    linear_forward(saved.up, saved.norm2.out, block.up.weight, block.up.bias, stream);
    if (c.family == Family::llama)
        swiglu_forward(saved.act, saved.up, stream);
    else
        gelu_forward(saved.act, saved.up, stream);
    linear_forward(acts.branch, saved.act, block.down.weight, block.down.bias, stream);
}

// acts.dresidual holds the gradient of the block's output, which is the gradient of both its branches; it leaves as the
// gradient of the block's input.
void block_backward(const Model& model, const Block& block, const BlockSaved& saved, Activations& acts, cudaStream_t stream) {
    const Config& c = model.config;
    const Tensor dqkv = acts.qkv.view({acts.B, acts.T, c.qkv_width()});

    linear_backward_input(acts.dact, acts.dresidual, block.down.weight, false, stream);
    linear_backward_weight(block.down.dweight, block.down.dbias, acts.dresidual, saved.act, acts.scratch, stream);
    if (c.family == Family::llama)
        swiglu_backward(acts.dup, acts.dact, saved.up, stream);
    else
        gelu_backward(acts.dup, acts.dact, saved.up, stream);
    linear_backward_input(acts.dnorm, acts.dup, block.up.weight, false, stream);
    linear_backward_weight(block.up.dweight, block.up.dbias, acts.dup, saved.norm2.out, acts.scratch, stream);
    norm_backward(c, block.norm2, saved.norm2, acts.dresidual, acts.dnorm, acts.dresidual, acts.scratch, stream);

    linear_backward_input(acts.dattn, acts.dresidual, block.attn_out.weight, false, stream);
    linear_backward_weight(block.attn_out.dweight, block.attn_out.dbias, acts.dresidual, saved.attn, acts.scratch, stream);
    attention_backward(dqkv, acts.dattn.view({acts.B, acts.T, c.H * c.D}), saved.attention, attention_scale(c),
                       acts.attention_scratch, stream);
    if (c.family == Family::llama) rope_backward(dqkv, model.rope_table, c.H, c.K, stream);
    linear_backward_input(acts.dnorm, acts.qkv, block.qkv.weight, false, stream);
    linear_backward_weight(block.qkv.dweight, block.qkv.dbias, acts.qkv, saved.norm1.out, acts.scratch, stream);
    norm_backward(c, block.norm1, saved.norm1, acts.dresidual, acts.dnorm, acts.dresidual, acts.scratch, stream);
}

}  // namespace

void forward(const Model& model, Activations& acts, cudaStream_t stream) {
    const Config& c = model.config;
    embedding_forward(acts.embedded.view({acts.B, acts.T, c.C}), acts.tokens, model.wte, model.wpe, stream);
    Tensor residual = acts.embedded;
    for (size_t l = 0; l < model.blocks.size(); ++l) {
        block_forward(model, model.blocks[l], acts.blocks[l], acts, residual, l == 0, stream);
        residual = acts.blocks[l].norm2.sum;
    }
    norm_forward(c, model.final_norm, acts.final_norm, residual, acts.branch, stream);
    linear_forward(acts.logits, acts.final_norm.out, model.head.weight, {}, stream);
}

void loss_forward(const Model& model, Activations& acts, cudaStream_t stream) {
    cross_entropy_forward(acts.losses, acts.logits, acts.targets, model.config.V, stream);
}

void loss_backward(const Model& model, Activations& acts, float dloss, cudaStream_t stream) {
    cross_entropy_forward_backward(acts.losses, acts.logits, acts.targets, model.config.V, dloss, stream);
}

void backward(const Model& model, Activations& acts, cudaStream_t stream) {
    const Config& c = model.config;
    linear_backward_input(acts.dnorm, acts.logits, model.head.weight, false, stream);
    linear_backward_weight(model.head.dweight, {}, acts.logits, acts.final_norm.out, acts.scratch, stream);
    norm_backward(c, model.final_norm, acts.final_norm, acts.dresidual, acts.dnorm, {}, acts.scratch, stream);
    for (size_t l = model.blocks.size(); l-- > 0;) block_backward(model, model.blocks[l], acts.blocks[l], acts, stream);
    embedding_backward(model.dwte, model.dwpe, acts.dresidual.view({acts.B, acts.T, c.C}), acts.tokens, acts.links, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// Sampling

std::vector<int32_t> sample(const Model& model, Activations& acts, const std::vector<int32_t>& prompt, int64_t n,
                            double temperature, uint64_t seed, const std::function<bool(int32_t)>& token_ready) {
    check(acts.B == 1 && !prompt.empty(), "sample: needs activations for one sequence and a prompt of at least one token");
    const cudaStream_t stream = device().stream;
    const uint64_t key = hash_name("sample");
    std::vector<int32_t> text = prompt;
    std::vector<int32_t> window(static_cast<size_t>(acts.T), 0);
    for (int64_t i = 0; i < n; ++i) {
        // The last T tokens, at the front of the window: later positions cannot be seen by earlier ones.
        const size_t length = std::min(text.size(), window.size());
        std::copy(text.end() - static_cast<std::ptrdiff_t>(length), text.end(), window.begin());
        copy_to_device(acts.tokens, window.data());
        forward(model, acts, stream);
        const Tensor row = acts.logits.slice(static_cast<int64_t>(length) - 1, 1);
        std::vector<float> logits = to_floats(row);
        logits.resize(static_cast<size_t>(model.config.V));

        const double largest = *std::max_element(logits.begin(), logits.end());
        double total = 0;
        std::vector<double> weights(logits.size());
        for (size_t v = 0; v < logits.size(); ++v) total += weights[v] = std::exp((logits[v] - largest) / temperature);
        double left = uniform(seed, key, text.size()) * total;
        size_t token = 0;
        while (token + 1 < weights.size() && (left -= weights[token]) >= 0) ++token;
        text.push_back(static_cast<int32_t>(token));
        if (!token_ready(text.back())) break;
    }
    return text;
}
