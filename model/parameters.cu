// model/parameters.cu: the parameters of a model: their names, their places in the flat arrays, their initial values.
#include "model/attention.h"

#include <cmath>

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
            weights_ = {nullptr, model_.weights.dtype}, grads_ = {nullptr, model_.grads.dtype},
            masters_ = {nullptr, DType::f32};
        } else {
            weights_ = model_.unit_weights(unit_), grads_ = model_.unit_grads(unit_),
            masters_ = model_.unit_masters(unit_);
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
        Place place{cut(weights_, dims), cut(grads_, dims), cut(masters_, dims), offset};
        n_ = round_up(offset + place.value.n(), 64);  // 256 bytes in f32, 128 in 16 bits
        return place;
    }
    // Rows [first, first + rows) of a place as the parameter `name`.
    void name(const std::string& name, const Place& place, int64_t first, int64_t rows, bool decay,
              bool transposed = false, int64_t padded_rows = 0) {
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
        if (unit.data)
            part.data =
                static_cast<char*>(unit.data) + static_cast<size_t>(n_ - unit_offset_) * dtype_bytes(unit.dtype);
        return part;
    }
    static constexpr size_t kNone = static_cast<size_t>(-1);
    Model& model_;
    const bool counting_;
    int64_t n_ = 0, unit_offset_ = 0;
    size_t unit_ = kNone;
    Tensor weights_, grads_, masters_;  // of the unit
};

// The attention of a LLaMA-like block, in reading order; `a` is the names' prefix.
void place_attention(Placer& placer, const Config& c, Block& block, const std::string& a) {
    switch (c.attention) {
        case AttentionKind::gqa:
            block.qkv = placer.linear({{a + "q_proj", c.H * c.D}, {a + "k_proj", c.K * c.D}, {a + "v_proj", c.K * c.D}},
                                      c.C, c.has_qkv_bias(), false);
            if (!c.qk_norm) break;
            block.q_norm = placer.norm(a + "q_norm", c.D, false);
            block.k_norm = placer.norm(a + "k_norm", c.D, false);
            break;
        case AttentionKind::mla:
            block.qkv =
                placer.linear({c.q_rank > 0 ? std::pair{a + "q_a_proj", c.q_rank} : std::pair{a + "q_proj", c.H * c.D},
                               {a + "kv_a_proj_with_mqa", c.kv_rank + c.D_rope}},
                              c.C, false, false);
            if (c.q_rank > 0) {
                block.q_norm = placer.norm(a + "q_a_layernorm", c.q_rank, false);
                block.q_up = placer.linear({{a + "q_b_proj", c.H * c.D}}, c.q_rank, false, false);
            }
            block.k_norm = placer.norm(a + "kv_a_layernorm", c.kv_rank, false);
            block.kv_up = placer.linear({{a + "kv_b_proj", c.H * (c.D - c.D_rope + c.D_v)}}, c.kv_rank, false, false);
            break;
        case AttentionKind::mfa:
            block.qkv =
                placer.linear({{a + "q_proj", c.q_rank}, {a + "k_proj", c.D}, {a + "v_proj", c.D}}, c.C, false, false);
            block.q_norm = placer.norm(a + "inter_norm", c.q_rank, false);
            block.q_up = placer.linear({{a + "wq", c.H * c.D}}, c.q_rank, false, false);
            break;
    }
    block.attn_out = placer.linear({{a + "o_proj", c.C}}, c.attn_width(), c.has_attn_out_bias(), false);
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
        block.window = l < c.n_full_layers ? 0 : c.window;
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
            block.up = placer.linear({{m + "gate_proj", c.F}, {m + "up_proj", c.F}}, c.C, c.has_mlp_bias(), false);
            block.down = placer.linear({{m + "down_proj", c.C}}, c.F, c.has_mlp_bias(), false);
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
        if (linear->weight.exists()) present.push_back(linear);
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
            if (model.sharding.shards_weights() && l >= 2) linear.fp8 = linears(model.blocks[l - 2])[i]->fp8;
            else linear.fp8 = take_fp8_weight(arena, p.fp8, linear.weight.shape[0], linear.weight.shape[1]);
            if (delayed) linear.fp8_state = model.fp8_states.slice(row, 2);
            row += 2;
        }
    }
}

}  // namespace

Model build_model(const Config& config, const Precision& precision, int64_t T, Arena& weights, Arena& grads,
                  Arena& masters, const Sharding& sharding) {
    check_config(config);
    check(config.family != Family::gpt2 || T <= config.T_max, "a sequence of ", T, " tokens is longer than the ",
          config.T_max, " positions this model has: use --seq ", config.T_max, " or less");
    check(precision.grad_dtype == DType::f32 || precision.grad_dtype == precision.dtype, "gradients in ",
          dtype_name(precision.grad_dtype), " of a model in ", dtype_name(precision.dtype),
          ": they are in f32 or as the model");
    check(!precision.master || precision.dtype != DType::f32, "a float32 model is its own master weights");
    Model model;
    model.config = config;
    model.precision = precision;
    model.weights.dtype = precision.dtype, model.grads.dtype = precision.grad_dtype;
    model.n = place_parameters(model, true);
    model.shard_units(sharding, config.tied);
    model.take(precision.dtype, precision.grad_dtype, precision.master || sharding.offload == Offload::optimizer,
               weights, grads, masters);
    place_parameters(model, false);
    if (config.family == Family::llama) model.rope_table = weights.take("rope table", DType::f32, {T, config.rope_D()});
    take_fp8(model, weights);
    if (weights.counting()) return model;

    // The gaps between parameters and the padding rows of the vocabulary stay zero for good.
    for (const Tensor& flat : {model.weights, model.grads, model.masters, model.fp8_states})
        if (flat) cudaCheck(cudaMemsetAsync(flat.data, 0, flat.bytes(), device().stream));
    if (model.rope_table)
        rope_table(model.rope_table, rope_frequencies(config.rope_D(), config.rope_base, config.rope_scaling, T),
                   rope_amplitude(config.rope_scaling));
    return model;
}

Weights Model::all_weights(uint64_t seed) const {
    if (precision.master) return {.values = masters, .copy = weights};
    return {.values = weights, .stochastic = precision.dtype != DType::f32, .seed = seed};
}

size_t head_unit(const Model& model) { return model.units.size() - 1; }

namespace {

void quantise_block(Block block, cudaStream_t stream) {
    for (const Linear* linear : linears(block)) fp8_quantise_weight(linear->fp8, linear->weight, stream);
}

}  // namespace

void gather(const Model& model, size_t unit, int64_t next, cudaStream_t stream) {
    if (!model.data_parallel) return;
    model.data_parallel->gather(model, unit, next, stream);
    const bool is_block = unit > 0 && unit < head_unit(model);
    if (is_block && model.precision.fp8 != Fp8Recipe::none && model.sharding.shards_weights())
        quantise_block(model.blocks[unit - 1], stream);
}
void begin_grads(const Model& model, size_t unit, cudaStream_t stream) {
    if (model.data_parallel) model.data_parallel->begin_grads(model, unit, stream);
}
void end_grads(const Model& model, size_t unit, cudaStream_t stream) {
    if (model.data_parallel) model.data_parallel->end_grads(model, unit, stream);
}

void quantise_weights(const Model& model, cudaStream_t stream) {
    if (model.precision.fp8 == Fp8Recipe::none || model.sharding.shards_weights()) return;
    for (size_t l = 0; l < model.blocks.size(); ++l) {
        gather(model, 1 + l, -1, stream);
        quantise_block(model.blocks[l], stream);
    }
}

void advance_fp8(const Model& model, cudaStream_t stream) {
    if (!model.fp8_states) return;
    if (model.data_parallel)
        model.data_parallel->comm().all_reduce(model.fp8_states, model.fp8_states, ReduceOp::max, stream);
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
            model.write(param,
                        normal_values(n, residual ? residual_std : model.config.init_std, seed, hash_name(param.name)));
        else
            model.write(param,
                        std::vector<float>(static_cast<size_t>(n), ends_with(param.name, ".weight") ? 1.0f : 0.0f));
    }
}
