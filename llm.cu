// llm.cu: GPT-2, LLaMA and their kin, forward and, in mirrored order, backward.
//
// A model is a token embedding, L blocks and a head. A block adds two branches to the residual stream x:
//
//     x = x + attention(norm1(x))
//     x = x + feed_forward(norm2(x))
//
// GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases, GELU, tied head.
// LLaMA (Touvron et al. 2023, arXiv:2302.13971): rotary positions, RMSNorm, no biases, SwiGLU, grouped-query attention.
// Qwen2, Qwen3, DeepSeek and MFA differ from LLaMA in their attention alone: attention.h has the variants.
//
// The addition to the stream is done by the norm that comes next (it reads the sum anyway), so a block hands on two things:
// the stream before its last branch (norm2.sum), and that branch (acts.branch).
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

// ---------------------------------------------------------------------------------------------------------------------
// Parameters

namespace {

// Gives every parameter its place in the flat arrays, in reading order: embedding, blocks, final norm, head. Fused tensors
// (q, k and v; gate and up) get one place; their parts are rows of it.
class Placer {
  public:
    // counting: decides the places; otherwise the units have memory.
    Placer(Model& model, bool counting) : model_(model), counting_(counting) {}

    // What is taken from here on belongs to this unit.
    void begin_unit(const std::string& name) {
        end_unit();
        if (counting_) model_.units.push_back({.name = name, .offset = n_});
        unit_ = unit_ == kNone ? 0 : unit_ + 1;
        unit_offset_ = n_;
        if (counting_) {
            values_ = {nullptr, model_.values.dtype}, grads_ = {nullptr, model_.grads.dtype}, masters_ = {nullptr, DType::f32};
        } else {
            values_ = model_.unit_values(unit_), grads_ = model_.unit_grads(unit_), masters_ = model_.unit_masters(unit_);
        }
    }
    void end_unit() {
        if (unit_ != kNone) model_.units[unit_].n = n_ - unit_offset_;
    }

    struct Place {
        Tensor value, grad, master;
        int64_t offset;
    };
    Place take(std::initializer_list<int64_t> dims) {
        const int64_t offset = n_;
        Place place{cut(values_, dims), cut(grads_, dims), cut(masters_, dims), offset};
        n_ = round_up(offset + place.value.n(), 64);  // 256 bytes in f32, 128 in 16 bits
        return place;
    }
    // Rows [first, first + rows) of a place as the parameter `name`.
    void name(const std::string& name, const Place& place, int64_t first, int64_t rows, bool decay, bool transposed = false,
              int64_t padded_rows = 0) {
        const int64_t row_n = place.value.n() / place.value.shape[0];
        const Tensor master = place.master.data ? place.master.slice(first, rows) : Tensor{};
        model_.params.push_back({name, place.value.slice(first, rows), place.grad.slice(first, rows), master,
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
        return {weight.value, b.value, weight.grad, b.grad, {}, {}};
    }
    int64_t n() const { return n_; }

  private:
    // The next elements of the unit, which has no memory yet while arenas count.
    Tensor cut(const Tensor& unit, std::initializer_list<int64_t> dims) const {
        Tensor part = make_tensor(nullptr, unit.dtype, dims);
        if (unit.data) part.data = static_cast<char*>(unit.data) + static_cast<size_t>(n_ - unit_offset_) * dtype_bytes(unit.dtype);
        return part;
    }
    static constexpr size_t kNone = static_cast<size_t>(-1);
    Model& model_;
    const bool counting_;
    int64_t n_ = 0, unit_offset_ = 0;
    size_t unit_ = kNone;
    Tensor values_, grads_, masters_;  // of the unit
};

// The attention of a LLaMA-like block, in reading order; `a` is the names' prefix.
void place_attention(Placer& placer, const Config& c, Block& block, const std::string& a) {
    switch (c.attention) {
        case AttentionKind::gqa:
            block.qkv = placer.linear({{a + "q_proj", c.H * c.D}, {a + "k_proj", c.K * c.D}, {a + "v_proj", c.K * c.D}}, c.C,
                                      c.qkv_bias, false);
            if (!c.qk_norm) break;
            block.q_norm = placer.norm(a + "q_norm", c.D, false);
            block.k_norm = placer.norm(a + "k_norm", c.D, false);
            break;
        case AttentionKind::mla:
            block.qkv = placer.linear({c.q_rank > 0 ? std::pair{a + "q_a_proj", c.q_rank} : std::pair{a + "q_proj", c.H * c.D},
                                       {a + "kv_a_proj_with_mqa", c.kv_rank + c.D_rope}}, c.C, false, false);
            if (c.q_rank > 0) {
                block.q_norm = placer.norm(a + "q_a_layernorm", c.q_rank, false);
                block.q_up = placer.linear({{a + "q_b_proj", c.H * c.D}}, c.q_rank, false, false);
            }
            block.k_norm = placer.norm(a + "kv_a_layernorm", c.kv_rank, false);
            block.kv_up = placer.linear({{a + "kv_b_proj", c.H * (c.D - c.D_rope + c.D_v)}}, c.kv_rank, false, false);
            break;
        case AttentionKind::mfa:
            block.qkv = placer.linear({{a + "q_proj", c.q_rank}, {a + "k_proj", c.D}, {a + "v_proj", c.D}}, c.C, false, false);
            block.q_norm = placer.norm(a + "inter_norm", c.q_rank, false);
            block.q_up = placer.linear({{a + "wq", c.H * c.D}}, c.q_rank, false, false);
            break;
    }
    block.attn_out = placer.linear({{a + "o_proj", c.C}}, c.attn_width(), false, false);
}

// Returns how many elements there are.
int64_t place_parameters(Model& model, bool counting) {
    const Config& c = model.config;
    const bool gpt2 = c.family == Family::gpt2;
    Placer placer(model, counting);
    model.params.clear();
    model.blocks.clear();

    placer.begin_unit("embedding");
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
        placer.begin_unit(concat("block ", l));
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
            place_attention(placer, c, block, a);
            block.norm2 = placer.norm(p + "post_attention_layernorm", c.C, false);
            block.up = placer.linear({{m + "gate_proj", c.F}, {m + "up_proj", c.F}}, c.C, false, false);
            block.down = placer.linear({{m + "down_proj", c.C}}, c.F, false, false);
        }
        model.blocks.push_back(block);
    }
    placer.begin_unit("head");
    model.final_norm = placer.norm(gpt2 ? "transformer.ln_f" : "model.norm", c.C, gpt2);
    if (c.tied) {
        model.head = {model.wte, {}, model.dwte, {}, {}, {}};
    } else {
        const Placer::Place head = placer.take({c.V_padded(), c.C});
        placer.name("lm_head.weight", head, 0, c.V_padded(), true, false, c.V_padded() - c.V);
        model.head = {head.value, {}, head.grad, {}, {}, {}};
    }
    placer.end_unit();
    return placer.n();
}

// The linear layers that a block has, in the order of their rows in Model::fp8_states.
std::vector<Linear*> linears(Block& block) {
    std::vector<Linear*> present;
    for (Linear* linear : {&block.qkv, &block.attn_out, &block.up, &block.down, &block.q_up, &block.kv_up})
        if (linear->weight.rank > 0) present.push_back(linear);
    return present;
}

void take_fp8(Model& model, Arena& arena) {
    const Precision& p = model.precision;
    if (p.fp8 == Fp8Recipe::none) return;
    expect_fp8_device(p.fp8);
    const bool delayed = p.fp8 == Fp8Recipe::delayed;
    const int64_t n_linears = model.config.L * static_cast<int64_t>(linears(model.blocks[0]).size());
    if (delayed) model.fp8_states = arena.take("fp8 histories", DType::f32, {2 * n_linears, kFp8StateN});
    int64_t row = 0;
    for (size_t l = 0; l < model.blocks.size(); ++l) {
        for (size_t i = 0; i < linears(model.blocks[l]).size(); ++i) {
            Linear& linear = *linears(model.blocks[l])[i];
            // ZeRO 3: the 8-bit weights of a unit come and go with it.
            if (model.sharding.cuts_values() && l >= 2) linear.fp8 = linears(model.blocks[l - 2])[i]->fp8;
            else linear.fp8 = take_fp8_weight(arena, p.fp8, linear.weight.shape[0], linear.weight.shape[1]);
            if (delayed) linear.fp8_state = model.fp8_states.slice(row, 2);
            row += 2;
        }
    }
}

}  // namespace

Model build_model(const Config& config, const Precision& precision, int64_t T, Arena& values, Arena& grads, Arena& masters,
                  const Sharding& sharding) {
    check_config(config);
    check(config.family != Family::gpt2 || T <= config.T_max, "a sequence of ", T, " tokens is longer than the ", config.T_max,
          " positions this model has: use --seq ", config.T_max, " or less");
    check(precision.grad_dtype == DType::f32 || precision.grad_dtype == precision.dtype, "gradients in ",
          dtype_name(precision.grad_dtype), " of a model in ", dtype_name(precision.dtype), ": they are in f32 or as the model");
    check(!precision.master || precision.dtype != DType::f32, "a float32 model is its own master weights");
    Model model;
    model.config = config;
    model.precision = precision;
    model.values.dtype = precision.dtype, model.grads.dtype = precision.grad_dtype;
    model.n = place_parameters(model, true);
    model.cut(sharding, config.tied);
    model.take(precision.dtype, precision.grad_dtype, precision.master || sharding.offload == Offload::optimizer, values, grads, masters);
    place_parameters(model, false);
    if (config.family == Family::llama) model.rope_table = values.take("rope table", DType::f32, {T, config.rope_D()});
    take_fp8(model, values);
    if (values.counting()) return model;

    // The gaps between parameters and the padding rows of the vocabulary stay zero for good.
    for (const Tensor& flat : {model.values, model.grads, model.masters, model.fp8_states})
        if (flat) cudaCheck(cudaMemsetAsync(flat.data, 0, flat.bytes(), device().stream));
    if (model.rope_table)
        rope_table(model.rope_table, rope_frequencies(config.rope_D(), config.rope_base, config.rope_scaling),
                   rope_amplitude(config.rope_scaling));
    return model;
}

Weights Model::weights(uint64_t seed) const {
    if (precision.master) return {.values = masters, .copy = values};
    return {.values = values, .stochastic = precision.dtype != DType::f32, .seed = seed};
}

namespace {

// Units by their place in Model::units: 0 the embedding, 1 + l block l, L + 1 the head.
size_t head_unit(const Model& model) { return model.units.size() - 1; }

void quantise_block(Block block, cudaStream_t stream) {
    for (const Linear* linear : linears(block)) fp8_quantise_weight(linear->fp8, linear->weight, stream);
}

// Before a unit's weights are read; `next` is the one that follows, or -1. No-op on one rank.
void gather(const Model& model, size_t unit, int64_t next, cudaStream_t stream) {
    if (!model.data_parallel) return;
    model.data_parallel->gather(model, unit, next, stream);
    const bool is_block = unit > 0 && unit < head_unit(model);
    if (is_block && model.precision.fp8 != Fp8Recipe::none && model.sharding.cuts_values())
        quantise_block(model.blocks[unit - 1], stream);
}
void begin_grads(const Model& model, size_t unit, cudaStream_t stream) {
    if (model.data_parallel) model.data_parallel->begin_grads(model, unit, stream);
}
void end_grads(const Model& model, size_t unit, cudaStream_t stream) {
    if (model.data_parallel) model.data_parallel->end_grads(model, unit, stream);
}

}  // namespace

void quantise_weights(const Model& model, cudaStream_t stream) {
    if (model.precision.fp8 == Fp8Recipe::none || model.sharding.cuts_values()) return;
    for (size_t l = 0; l < model.blocks.size(); ++l) {
        gather(model, 1 + l, -1, stream);
        quantise_block(model.blocks[l], stream);
    }
}

void advance_fp8(const Model& model, cudaStream_t stream) {
    if (!model.fp8_states) return;
    if (model.data_parallel) model.data_parallel->comm().all_reduce(model.fp8_states, model.fp8_states, ReduceOp::max, stream);
    fp8_advance(model.fp8_states, stream);
}

void init_weights(Model& model, uint64_t seed) {
    const double residual_std = model.config.init_std / std::sqrt(2.0 * static_cast<double>(model.config.L));
    const auto ends_with = [](const std::string& text, const std::string& end) {
        return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
    };
    for (const Param& param : model.params) {
        const bool residual = ends_with(param.name, "c_proj.weight") || ends_with(param.name, "o_proj.weight") ||
                              ends_with(param.name, "down_proj.weight");
        const int64_t n = (param.value.shape[0] - param.padded_rows) * (param.value.n() / param.value.shape[0]);
        if (param.decay)
            model.write(param, normal_values(n, residual ? residual_std : model.config.init_std, seed, hash_name(param.name)));
        else
            model.write(param, std::vector<float>(static_cast<size_t>(n), ends_with(param.name, ".weight") ? 1.0f : 0.0f));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Activations

Recompute parse_recompute(const std::string& text) {
    if (text == "none") return {};
    if (text == "full") return {.every = 1};
    if (text == "selective") return {.selective = true};
    char* end = nullptr;
    const long long every = std::strtoll(text.c_str(), &end, 10);
    check(!text.empty() && *end == 0 && every > 0, "--recompute ", text, ": use none, selective, full, or a number of blocks");
    return {.every = every};
}

namespace {

NormSaved take_norm(const Config& c, const Activations& acts, Tensor sum, Tensor out, Arena& arena) {
    NormSaved saved{sum, out, {}, {}};
    const int64_t N = acts.B * acts.T;
    if (c.family == Family::gpt2) saved.mean = arena.take("norms", DType::f32, {N});
    saved.rstd = arena.take("norms", DType::f32, {N});
    return saved;
}

// The activations of L blocks. Blocks l, l + n, l + 2 n, ... share one set of tensors, but for the input of a segment of n
// blocks, from which its forward can be run again. n = 1 without inputs is what a forward without a backward needs: block 0's
// input is the embedding, which nobody reads any more when block 1 writes its own there.
void take_blocks(const Model& model, Activations& acts, int64_t n, bool keep_inputs, Arena& arena) {
    const Config& c = model.config;
    const DType dtype = model.precision.dtype;
    const int64_t N = acts.B * acts.T;
    const bool selective = acts.recompute.selective;
    const auto stream_tensor = [&] { return arena.take("residual stream", dtype, {N, c.C}); };
    const auto norm_tensor = [&] { return arena.take("norms", dtype, {N, c.C}); };
    const auto act_tensor = [&] { return arena.take("feed-forward", dtype, {N, c.F}); };
    const AttentionVariant& attention = attention_variant(c);

    BlockSaved shared;  // with selective recomputation
    if (selective) {
        shared.norm1.out = norm_tensor();
        shared.norm2.out = norm_tensor();
        shared.act = act_tensor();
        attention.take_cheap(shared, c, dtype, N, arena);
    }
    for (int64_t l = 0; l < c.L; ++l) {
        BlockSaved saved = shared;
        if (l < n) {
            const Tensor input = l == 0 ? acts.embedded : stream_tensor();
            saved.norm1 = take_norm(c, acts, input, selective ? shared.norm1.out : norm_tensor(), arena);
            saved.qkv = arena.take("attention", dtype, {N, c.qkv_width()});
            saved.lse = arena.take("attention", DType::f32, {acts.B, c.H, acts.T});
            saved.attn = arena.take("attention", dtype, {N, c.attn_width()});
            attention.take_saved(saved, c, dtype, N, arena);
            if (!selective) attention.take_cheap(saved, c, dtype, N, arena);
            saved.norm2 = take_norm(c, acts, stream_tensor(), selective ? shared.norm2.out : norm_tensor(), arena);
            saved.up = arena.take("feed-forward", dtype, {N, c.up_width()});
            saved.act = selective ? shared.act : act_tensor();
        } else {
            saved = acts.blocks[static_cast<size_t>(l % n)];
            if (keep_inputs && l % n == 0) saved.norm1.sum = stream_tensor();
        }
        // Not shared: a block that is run again does not run its last product, but needs what its input was scaled by.
        if (model.precision.fp8 != Fp8Recipe::none) saved.fp8 = arena.take("fp8 scales", DType::f32, {kBlockLinearN, 2});
        acts.blocks.push_back(saved);
    }
}

// Scratch of the linear layers of a block, forward and backward.
int64_t linear_scratch_n(const Model& model, int64_t N) {
    const Fp8Recipe fp8 = model.precision.fp8;
    int64_t n = 0;
    for (const auto& [C, O] : block_linear_shapes(model.config))
        n = std::max({n, linear_backward_scratch_n(N, O), fp8 == Fp8Recipe::none ? 0 : fp8_linear_scratch_n(fp8, N, C, O)});
    return n;
}

// What forward needs around the blocks.
Activations take_common(const Model& model, int64_t B, int64_t T, Arena& arena) {
    const Config& c = model.config;
    const DType dtype = model.precision.dtype;
    Activations acts;
    acts.B = B;
    acts.T = T;
    acts.tokens = arena.take("tokens", DType::i32, {B, T});
    acts.targets = arena.take("tokens", DType::i32, {B * T});
    acts.embedded = arena.take("residual stream", dtype, {B * T, c.C});
    acts.losses = arena.take("losses", DType::f32, {B * T});
    acts.branch = arena.take("shared by layers", dtype, {B * T, c.C});
    return acts;
}
void take_head(const Model& model, Activations& acts, Arena& arena) {
    const Config& c = model.config;
    const DType dtype = model.precision.dtype;
    const int64_t N = acts.B * acts.T;
    const Tensor sum = arena.take("residual stream", dtype, {N, c.C});
    acts.final_norm = take_norm(c, acts, sum, arena.take("norms", dtype, {N, c.C}), arena);
    acts.logits = arena.take("logits", dtype, {N, c.V_padded()});
}

}  // namespace

Activations take_activations(const Model& model, int64_t B, int64_t T, const Recompute& recompute, Arena& arena) {
    const Config& c = model.config;
    const DType dtype = model.precision.dtype;
    const int64_t N = B * T;
    Activations acts = take_common(model, B, T, arena);
    acts.recompute = recompute;
    take_blocks(model, acts, recompute.every > 0 ? std::min(recompute.every, c.L) : c.L, true, arena);
    take_head(model, acts, arena);

    acts.dresidual = arena.take("gradients of activations", dtype, {N, c.C});
    acts.dnorm = arena.take("gradients of activations", dtype, {N, c.C});
    acts.dqkv = arena.take("gradients of activations", dtype, {N, c.qkv_width()});
    acts.dattn = arena.take("gradients of activations", dtype, {N, c.attn_width()});
    attention_variant(c).take_gradients(acts, c, dtype, N, arena);
    acts.dup = arena.take("gradients of activations", dtype, {N, c.up_width()});
    acts.dact = arena.take("gradients of activations", dtype, {N, c.F});
    acts.links = arena.take("shared by layers", DType::i32, {2, N});
    const int64_t scratch_n = std::max({linear_scratch_n(model, N), layernorm_backward_scratch_n(N, c.C),
                                        rmsnorm_backward_scratch_n(N, c.C), flash_attention_backward_scratch_n(B, T, c.H),
                                        attention_variant(c).scratch_n(c, N)});
    acts.scratch = arena.take("shared by layers", DType::f32, {scratch_n});
    return acts;
}

Activations take_forward_activations(const Model& model, int64_t B, int64_t T, Arena& arena) {
    Activations acts = take_common(model, B, T, arena);
    take_blocks(model, acts, 1, false, arena);
    take_head(model, acts, arena);
    if (model.precision.fp8 != Fp8Recipe::none)
        acts.scratch = arena.take("shared by layers", DType::f32, {linear_scratch_n(model, B * T)});
    return acts;
}

void take_documents(Activations& acts, Arena& arena) {
    acts.documents = arena.take("tokens", DType::i32, {acts.B, acts.T, 2});
    acts.positions = arena.take("tokens", DType::i32, {acts.B, acts.T});
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// A linear layer of a block, in dtype or with its products in fp8.
void linear_forward(Tensor out, const Linear& linear, BlockLinear which, Tensor inp, const BlockSaved& saved,
                    const Activations& acts, cudaStream_t stream) {
    if (!saved.fp8) return linear_forward(out, inp, linear.weight, linear.bias, stream);
    const Tensor scaled_by = saved.fp8.slice(which, 1).view({2});
    fp8_linear_forward(out, scaled_by, inp, linear.fp8, linear.bias, linear.fp8_state, acts.training, acts.scratch, stream);
}
void linear_backward(Tensor dinp, const Linear& linear, BlockLinear which, Tensor dout, Tensor inp, const BlockSaved& saved,
                     const Activations& acts, cudaStream_t stream) {
    if (!saved.fp8) {
        linear_backward_input(dinp, dout, linear.weight, false, stream);
        linear_backward_weight(linear.dweight, linear.dbias, dout, inp, acts.scratch, stream);
        return;
    }
    const Tensor scaled_by = saved.fp8.slice(which, 1).view({2});
    fp8_linear_backward_input(dinp, scaled_by, dout, linear.fp8, false, linear.fp8_state, acts.scratch, stream);
    fp8_linear_backward_weight(linear.dweight, linear.dbias, dout, inp, scaled_by, linear.fp8.recipe, acts.scratch, stream);
}

namespace {

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

void activation_forward(const Config& config, const BlockSaved& saved, cudaStream_t stream) {
    if (config.family == Family::llama)
        swiglu_forward(saved.act, saved.up, stream);
    else
        gelu_forward(saved.act, saved.up, stream);
}

// residual, acts.branch -> saved.norm2.sum, acts.branch: the block's stream and its last branch, not yet added.
// Without a branch residual is the whole input. `last_branch` is false where a forward is run again for the sake of what it
// saves: then nobody needs the block's output.
void block_forward(const Model& model, const Block& block, const BlockSaved& saved, Activations& acts, Tensor residual,
                   bool has_branch, bool last_branch, cudaStream_t stream) {
    const Config& c = model.config;
    norm_forward(c, block.norm1, saved.norm1, residual, has_branch ? acts.branch : Tensor{}, stream);
    linear_forward(saved.qkv, block.qkv, kQkv, saved.norm1.out, saved, acts, stream);
    attention_variant(c).forward(model, block, saved, acts, stream);
    linear_forward(acts.branch, block.attn_out, kAttnOut, saved.attn, saved, acts, stream);

    norm_forward(c, block.norm2, saved.norm2, saved.norm1.sum, acts.branch, stream);
    linear_forward(saved.up, block.up, kUp, saved.norm2.out, saved, acts, stream);
    activation_forward(c, saved, stream);
    if (last_branch) linear_forward(acts.branch, block.down, kDown, saved.act, saved, acts, stream);
}

// Selective recomputation: fills again what the blocks share (take_blocks).
void recompute_shared(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
                      cudaStream_t stream) {
    const Config& config = model.config;
    norm_forward(config, block.norm1, saved.norm1, saved.norm1.sum, {}, stream);
    attention_variant(config).recompute_cheap(model, block, saved, acts, stream);
    norm_forward(config, block.norm2, saved.norm2, saved.norm2.sum, {}, stream);
    activation_forward(config, saved, stream);
}

// Recomputation by blocks: runs blocks [first, last] forward again, from the input of the first.
void recompute_blocks(const Model& model, Activations& acts, size_t first, size_t last, cudaStream_t stream) {
    Tensor residual = acts.blocks[first].norm1.sum;
    for (size_t l = first; l <= last; ++l) {
        gather(model, 1 + l, l < last ? static_cast<int64_t>(2 + l) : -1, stream);
        block_forward(model, model.blocks[l], acts.blocks[l], acts, residual, l > first, l < last, stream);
        residual = acts.blocks[l].norm2.sum;
    }
}

// acts.dresidual holds the gradient of the block's output, which is the gradient of both its branches; it leaves as the
// gradient of the block's input.
void block_backward(const Model& model, const Block& block, const BlockSaved& saved, Activations& acts, cudaStream_t stream) {
    const Config& c = model.config;
    if (acts.recompute.selective) recompute_shared(model, block, saved, acts, stream);

    linear_backward(acts.dact, block.down, kDown, acts.dresidual, saved.act, saved, acts, stream);
    if (c.family == Family::llama)
        swiglu_backward(acts.dup, acts.dact, saved.up, stream);
    else
        gelu_backward(acts.dup, acts.dact, saved.up, stream);
    linear_backward(acts.dnorm, block.up, kUp, acts.dup, saved.norm2.out, saved, acts, stream);
    norm_backward(c, block.norm2, saved.norm2, acts.dresidual, acts.dnorm, acts.dresidual, acts.scratch, stream);

    linear_backward(acts.dattn, block.attn_out, kAttnOut, acts.dresidual, saved.attn, saved, acts, stream);
    attention_variant(c).backward(model, block, saved, acts, stream);
    linear_backward(acts.dnorm, block.qkv, kQkv, acts.dqkv, saved.norm1.out, saved, acts, stream);
    norm_backward(c, block.norm1, saved.norm1, acts.dresidual, acts.dnorm, acts.dresidual, acts.scratch, stream);
}

}  // namespace

void forward(const Model& model, Activations& acts, cudaStream_t stream, bool training) {
    const Config& c = model.config;
    acts.training = training;
    gather(model, 0, 1, stream);
    embedding_forward(acts.embedded.view({acts.B, acts.T, c.C}), acts.tokens, acts.positions, model.wte, model.wpe, stream);
    Tensor residual = acts.embedded;
    for (size_t l = 0; l < model.blocks.size(); ++l) {
        gather(model, 1 + l, static_cast<int64_t>(2 + l), stream);
        block_forward(model, model.blocks[l], acts.blocks[l], acts, residual, l > 0, true, stream);
        residual = acts.blocks[l].norm2.sum;
    }
    gather(model, head_unit(model), -1, stream);
    if (c.tied) gather(model, 0, -1, stream);
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
    const size_t head = head_unit(model);
    gather(model, head, -1, stream);
    if (c.tied) gather(model, 0, -1, stream);
    begin_grads(model, head, stream);
    if (c.tied) begin_grads(model, 0, stream);
    linear_backward_input(acts.dnorm, acts.logits, model.head.weight, false, stream);
    linear_backward_weight(model.head.dweight, {}, acts.logits, acts.final_norm.out, acts.scratch, stream);
    norm_backward(c, model.final_norm, acts.final_norm, acts.dresidual, acts.dnorm, {}, acts.scratch, stream);
    end_grads(model, head, stream);
    const size_t L = model.blocks.size(), segment = acts.recompute.every > 0 ? static_cast<size_t>(acts.recompute.every) : L;
    for (size_t l = L; l-- > 0;) {
        // The last segment's activations are still there from the forward; those before were overwritten.
        if ((l + 1) % segment == 0 && l + 1 < L) recompute_blocks(model, acts, l + 1 - segment, l, stream);
        const bool next_is_run_again = l % segment == 0;  // then its segment is gathered from the front
        gather(model, 1 + l, next_is_run_again ? -1 : static_cast<int64_t>(l), stream);
        begin_grads(model, 1 + l, stream);
        block_backward(model, model.blocks[l], acts.blocks[l], acts, stream);
        end_grads(model, 1 + l, stream);
    }
    if (!c.tied) begin_grads(model, 0, stream);
    embedding_backward(model.dwte, model.dwpe, acts.dresidual.view({acts.B, acts.T, c.C}), acts.tokens, acts.positions,
                       acts.links, stream);
    end_grads(model, 0, stream);
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
        forward(model, acts, stream, false);
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
