// model/parameters.cu: the parameters of a model: their names, their places in the flat arrays, their initial values.
#include "model/sublayer.h"

#include <cmath>
#include <set>

void Placer::begin_unit(const std::string& name, int64_t number) {
    end_unit();
    // Parameters are placed twice: first to count elements, then, when the memory is there, to point into it.
    if (counting_) model_.units.push_back({.name = name, .offset = n_, .number = static_cast<size_t>(number)});
    unit_ = unit_ == kNone ? 0 : unit_ + 1;
    unit_offset_ = n_;
    if (counting_) {  // no memory yet
        weights_ = {nullptr, model_.weights.dtype}, grads_ = {nullptr, model_.grads.dtype};
        masters_ = {nullptr, DType::f32};
    } else {
        weights_ = model_.unit_weights(unit_), grads_ = model_.unit_grads(unit_), masters_ = model_.unit_masters(unit_);
    }
}
void Placer::end_unit() {
    if (unit_ != kNone) model_.units[unit_].n = n_ - unit_offset_;
}

// The next elements of the unit, which has no memory yet while arenas count.
Tensor Placer::next_elements(const Tensor& unit, std::initializer_list<int64_t> dims) const {
    Tensor next = make_tensor(nullptr, unit.dtype, dims);
    const size_t first = static_cast<size_t>(n_ - unit_offset_) * dtype_bytes(unit.dtype);
    if (unit.data) next.data = static_cast<char*>(unit.data) + first;
    return next;
}
Placer::Place Placer::take(std::initializer_list<int64_t> dims) {
    const Place place{next_elements(weights_, dims), next_elements(grads_, dims), next_elements(masters_, dims), n_};
    n_ = round_up(n_ + place.value.n(), 64);  // the next one is aligned to 256 bytes in f32, to 128 in 16 bits
    return place;
}

Param& Placer::name(const std::string& name, const Place& place, int64_t first, int64_t rows, bool decay,
                    bool transposed, int64_t padded_rows) {
    const int64_t row_n = place.value.n() / place.value.shape[0];
    const Tensor master = place.master.data ? place.master.slice(first, rows) : Tensor{};
    Param param{name,
                place.value.slice(first, rows),
                place.grad.slice(first, rows),
                master,
                place.offset + first * row_n,
                decay,
                transposed,
                padded_rows};
    return model_.params.emplace_back(std::move(param));
}

AxisSet Placer::copies(AxisSet along) const {
    AxisSet axes = model_.layout.all() & ~along;
    if ((along & kSameKeys) != 0) axes = (axes & ~heads_axes()) | kSameKeys;
    return axes;
}
bool Placer::is_first(AxisSet axes) const {
    const TensorLayout& layout = model_.layout;
    for (int a = 0; a < 3; ++a)
        if ((axes >> a & 1) != 0 && layout.coordinate(a) != 0) return false;
    return (axes & kSameKeys) == 0 || heads().index % (heads().of / model_.config.K) == 0;
}
void Placer::settle(Param& param, const Cut& cut, AxisSet along, AxisSet parts_along) const {
    const AxisSet same = copies(along);
    if (cut.exists()) param.cut = cut;
    param.sharers = same & parts_along, param.counted = is_first(same);
}

Norm Placer::norm(const std::string& prefix, int64_t C, bool bias, bool inside) {
    const TensorLayout& layout = model_.layout;
    // With sequence parallelism each rank has normalised some of the rows.
    const AxisSet rows = TensorLayout::set_of(layout.stream_rows) | (layout.sequence ? heads_axes() : AxisSet{0});
    const ::Part columns = inside ? ::Part{} : layout.part(layout.stream_columns);
    const auto [first, n] = columns.range(C, "columns of a norm");
    const auto vector = [&](const std::string& its_name) {
        const Place place = take({n});
        settle(name(its_name, place, 0, n, false), columns.of > 1 ? Cut{C, 1, {{first, n}}, 0, 1} : Cut{},
               inside ? AxisSet{0} : TensorLayout::set_of(layout.stream_columns), inside ? layout.all() : rows);
        return place;
    };
    Norm norm;
    const Place weight = vector(prefix + ".weight");
    norm.weight = weight.value, norm.dweight = weight.grad;
    if (bias) {
        const Place b = vector(prefix + ".bias");
        norm.bias = b.value, norm.dbias = b.grad;
    }
    return norm;
}

Placer::Part Placer::divided(const std::string& name, int64_t rows, int64_t groups) const {
    Part part{name, rows, {}, heads_axes()};
    for (int64_t g = 0; g < groups && heads().of > 1; ++g) {
        const auto [first, n] = heads().range(rows / groups, "rows of heads");
        part.here.push_back({g * (rows / groups) + first, n});
    }
    return part;
}

Placer::Part Placer::keys(const std::string& name, int64_t K, int64_t D) const {
    if (K >= heads().of) return divided(name, K * D);
    const int64_t same = heads().of / K;  // parts with the same head
    return {name, K * D, {{heads().index / same * D, D}}, kSameKeys};
}

Linear Placer::linear(Crossing crossing, const std::vector<Part>& parts, int64_t C, bool bias, bool transposed) {
    // One matrix product for all parts, whose rows lie one part after the other; each part has its name in checkpoints.
    const TensorLayout& layout = model_.layout;
    const bool leaves = crossing == Crossing::leaves;
    const Axes column_axes = crossing == Crossing::enters ? layout.enter_columns
                             : leaves                     ? layout.leave_columns
                                                          : Axes{};
    const ::Part columns = layout.part(column_axes), stream = leaves ? layout.part(layout.stream_columns) : ::Part{};
    const auto [first_col, C_here] = columns.range(C, "inputs of a linear layer");
    const auto ranges_of = [&](const Part& part) {
        if (!part.here.empty()) return part.here;
        const auto [first, n] = stream.range(part.rows, "outputs of a linear layer");
        return std::vector<std::pair<int64_t, int64_t>>{{first, n}};
    };
    int64_t O = 0;
    for (const Part& part : parts) O += cut_rows({.row_ranges = ranges_of(part)});
    const Place weight = take({O, C_here});
    const Place b = bias ? take({O}) : Place{};
    int64_t first = 0;
    for (const Part& part : parts) {
        const std::vector<std::pair<int64_t, int64_t>> ranges = ranges_of(part);
        const int64_t rows = cut_rows({.row_ranges = ranges});
        const bool rows_are_cut = rows < part.rows;
        const AxisSet row_axes = leaves ? TensorLayout::set_of(layout.stream_columns) : part.along;
        settle(name(part.name + ".weight", weight, first, rows, true, transposed),
               rows_are_cut || columns.of > 1 ? Cut{part.rows, C, ranges, first_col, C_here} : Cut{},
               row_axes | TensorLayout::set_of(column_axes), kAllAxes);
        // What leaves a sub-layer in 1D is the same on all ranks, and so is its gradient.
        if (bias)
            settle(name(part.name + ".bias", b, first, rows, false),
                   rows_are_cut ? Cut{part.rows, 1, ranges, 0, 1} : Cut{}, row_axes,
                   leaves ? TensorLayout::set_of(layout.stream_rows) : kAllAxes);
        first += rows;
    }
    Linear linear;
    linear.weight = weight.value, linear.dweight = weight.grad;
    linear.bias = b.value, linear.dbias = b.grad;
    linear.crossing = crossing;
    linear.adds_bias = !leaves || layout.divides_columns() || layout.rank == 0;
    return linear;
}

Placer::Place Placer::tokens(const std::string& its_name, const std::string& copy_of) {
    const Config& c = model_.config;
    const TensorLayout& layout = model_.layout;
    const int64_t rows = vocabulary_rows(c, layout), n = n_tokens(c, layout);
    const ::Part columns = layout.part(layout.enter_columns);
    const auto [first_col, C_here] = columns.range(c.C, "columns of the embedding");
    const Place place = take({rows, C_here});
    Param& param = name(its_name, place, 0, rows, true, false, rows - n);
    param.copy_of = copy_of;
    settle(param, layout.all() != 0 ? Cut{c.V, c.C, {{first_token(c, layout), n}}, first_col, C_here} : Cut{},
           heads_axes() | TensorLayout::set_of(layout.enter_columns), kAllAxes);
    return place;
}

Placer::Place Placer::positions(const std::string& its_name) {
    const Config& c = model_.config;
    const TensorLayout& layout = model_.layout;
    const ::Part columns = layout.part(layout.stream_columns);
    const auto [first_col, C_here] = columns.range(c.C, "columns of the embedding");
    const Place place = take({c.T_max, C_here});
    settle(name(its_name, place, 0, c.T_max, true),
           columns.of > 1 ? Cut{c.T_max, c.C, {{0, c.T_max}}, first_col, C_here} : Cut{},
           TensorLayout::set_of(layout.stream_columns), TensorLayout::set_of(layout.stream_rows));
    return place;
}

// The first and the last product of the attention and of the feed-forward, then what they have between: the order in
// which checkpoints hold fp8's histories.
std::vector<Linear*> linears(Block& block) {
    auto &a = block.attention.linears, &f = block.feed_forward.linears;
    std::vector<Linear*> present;
    for (Linear* linear : {&a[0], &a[1], &f[0], &f[1], &a[2], &a[3], &f[2], &f[3]})
        if (linear->weight.exists()) present.push_back(linear);
    return present;
}

Block place_block(Placer& placer, const Config& c, int64_t l) {
    const bool gpt2 = c.family == Family::gpt2;
    const std::string prefix = gpt2 ? concat("transformer.h.", l, ".") : concat("model.layers.", l, ".");
    Block block;
    block.norm1 = placer.norm(prefix + (gpt2 ? "ln_1" : "input_layernorm"), c.C, gpt2);
    find_attention(c.attention).place(placer, c, prefix, block.attention);
    block.norm2 = placer.norm(prefix + (gpt2 ? "ln_2" : "post_attention_layernorm"), c.C, gpt2);
    find_feed_forward(c.feed_forward).place(placer, c, prefix, block.feed_forward);
    block.attention.window = l < c.n_full_layers ? 0 : c.window;
    int64_t index = 0;
    for (Linear* linear : linears(block)) linear->index = index++;
    return block;
}

ModelPart whole_model(const Config& config) {
    ModelPart part;
    for (int64_t l = 0; l < config.L; ++l) part.blocks.push_back(l);
    return part;
}

namespace {

void check_part(const Config& config, const ModelPart& part) {
    check(!part.blocks.empty(), "a part of a model: without a block");
    for (size_t i = 0; i < part.blocks.size(); ++i)
        check(part.blocks[i] > (i == 0 ? -1 : part.blocks[i - 1]) && part.blocks[i] < config.L,
              "a part of a model: its blocks are not ascending numbers below ", config.L);
    check(!part.head_copy || config.tied, "a part of a model: a copy of a head that is not tied");
    check(!config.tied || part.head_copy || part.embedding == part.head,
          "a part of a model: the head is the embedding, which is elsewhere: it needs a copy");
}

void place_head(Placer& placer, Model& model, const std::string& embedding) {
    const bool gpt2 = model.config.family == Family::gpt2;
    model.final_norm = placer.norm(gpt2 ? "transformer.ln_f" : "model.norm", model.config.C, gpt2);
    if (model.ties_head()) {  // one matrix: both uses add to the same gradient
        model.head.weight = model.wte, model.head.dweight = model.dwte;
    } else {
        const Placer::Place head = placer.tokens("lm_head.weight", model.part.head_copy ? embedding : std::string());
        model.head.weight = head.value, model.head.dweight = head.grad;
    }
    model.head.crossing = Crossing::enters;
}

// Returns how many elements there are.
int64_t place_parameters(Model& model, bool counting) {
    const Config& c = model.config;
    const bool gpt2 = c.family == Family::gpt2;
    const ModelPart& part = model.part;
    const std::string embedding = gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight";
    Placer placer(model, counting);
    model.params.clear();
    model.blocks.clear();

    placer.begin_unit("embedding", 0);
    if (part.embedding) {
        const Placer::Place wte = placer.tokens(embedding);
        model.wte = wte.value, model.dwte = wte.grad;
    }
    if (part.embedding && gpt2) {
        const Placer::Place wpe = placer.positions("transformer.wpe.weight");
        model.wpe = wpe.value, model.dwpe = wpe.grad;
    }
    for (const int64_t l : part.blocks) {
        placer.begin_unit(concat("block ", l), 1 + l);
        model.blocks.push_back(place_block(placer, c, l));
    }
    placer.begin_unit("head", c.L + 1);
    if (part.head) place_head(placer, model, embedding);
    placer.end_unit();
    return placer.n();
}

void take_fp8(Model& model, Arena& arena) {
    const Precision& p = model.precision;
    if (p.fp8 == Fp8Recipe::none) return;
    expect_fp8_device(p.fp8);
    const bool delayed = p.fp8 == Fp8Recipe::delayed;
    const int64_t n_linears = model.n_blocks() * std::ssize(linears(model.blocks[0]));
    if (delayed) model.fp8_states = arena.take("fp8 histories", DType::f32, {2 * n_linears, kFp8StateN});
    int64_t row = 0;
    for (size_t l = 0; l < model.blocks.size(); ++l) {
        for (size_t i = 0; i < linears(model.blocks[l]).size(); ++i) {
            Linear& linear = *linears(model.blocks[l])[i];
            // ZeRO 3: blocks take turns with two buffers (parallel/data/shards.cu), and so do their 8-bit weights.
            if (model.sharding.shards_weights() && l >= 2) linear.fp8 = linears(model.blocks[l - 2])[i]->fp8;
            else linear.fp8 = take_fp8_weight(arena, p.fp8, linear.weight.shape[0], linear.weight.shape[1]);
            if (delayed) linear.fp8_state = model.fp8_states.slice(row, 2);
            row += 2;
        }
    }
}

}  // namespace

Model whole_without_memory(const Config& config, const TensorLayout& layout, bool head_copy) {
    Model whole;
    whole.config = config;
    whole.layout = layout;
    whole.part = whole_model(config);
    whole.part.head_copy = head_copy;
    whole.n = place_parameters(whole, true);
    return whole;
}

// Gradients are written by the first micro-batch of each step; what is between them counts in the norm, too.
static void zero_gaps(const Model& model) {
    for (size_t u = 0; u < model.units.size(); ++u)
        for (const Range& gap : model.gaps(u)) {
            const Tensor between = model.unit_grads(u).slice(gap.first, gap.n);
            cudaCheck(cudaMemsetAsync(between.data, 0, between.bytes(), device().stream));
        }
}

Model build_model(const Config& config, const Precision& precision, int64_t T, Arena& weights, Arena& grads,
                  Arena& masters, const Sharding& sharding, const TensorLayout& layout,
                  const std::optional<ModelPart>& part) {
    check_config(config);
    if (part) check_part(config, *part);
    check(config.family != Family::gpt2 || T <= config.T_max, "a sequence of ", T, " tokens is longer than the ",
          config.T_max, " positions this model has: use --seq ", config.T_max, " or less");
    check(precision.grad_dtype == DType::f32 || precision.grad_dtype == precision.dtype, "gradients in ",
          dtype_name(precision.grad_dtype), " of a model in ", dtype_name(precision.dtype),
          ": they are in f32 or as the model");
    check(!precision.master || precision.dtype != DType::f32, "a float32 model is its own master weights");
    Model model;
    model.config = config;
    model.local = config_of_rank(config, layout);
    model.layout = layout;
    model.part = part ? *part : whole_model(config);
    model.precision = precision;
    model.attention = &find_attention(config.attention);
    model.feed_forward = &find_feed_forward(config.feed_forward);
    model.weights.dtype = precision.dtype, model.grads.dtype = precision.grad_dtype;
    // Count, divide among the ranks, take the memory, and place again.
    model.n = place_parameters(model, true);
    if (part) model.shard_units(sharding, model.ties_head(), whole_without_memory(config, layout, part->head_copy));
    else model.shard_units(sharding, model.ties_head(), model);
    model.take(precision.dtype, precision.grad_dtype, precision.master || sharding.offload == Offload::optimizer,
               weights, grads, masters);
    place_parameters(model, false);
    const int64_t rope_width = model.attention->rope_width(config);
    if (config.family == Family::llama) model.rope_table = weights.take("rope table", DType::f32, {T, rope_width});
    take_fp8(model, weights);
    if (weights.counting()) return model;

    // The gaps between parameters and the padding rows of the vocabulary stay zero for good.
    for (const Tensor& flat : {model.weights, model.masters, model.fp8_states})
        if (flat) cudaCheck(cudaMemsetAsync(flat.data, 0, flat.bytes(), device().stream));
    if (model.grads && !sharding.shards_grads()) zero_gaps(model);
    if (model.rope_table)
        rope_table(model.rope_table, rope_frequencies(rope_width, config.rope_base, config.rope_scaling, T),
                   rope_amplitude(config.rope_scaling));
    return model;
}

Weights Model::all_weights(uint64_t seed) const {
    if (precision.master) return {.values = masters, .copy = weights};
    return {.values = weights, .stochastic = precision.dtype != DType::f32, .seed = seed};
}

void quantise_block(const Model& model, int64_t l, cudaStream_t stream) {
    Block block = model.blocks[static_cast<size_t>(l)];
    TensorParallel* const ranks = model.precision.fp8 == Fp8Recipe::block ? nullptr : model.tensor_parallel;
    for (const Linear* linear : linears(block)) {
        const Tensor amax = linear->fp8.amax;
        if (ranks) fp8_amax(amax, linear->weight, {}, stream);
        if (ranks) ranks->max(amax, stream);  // of the whole weight, of which this is a part
        fp8_quantise_weight(linear->fp8, linear->weight, stream, ranks ? AmaxFrom::caller : AmaxFrom::here);
    }
}

void quantise_weights(const Model& model, cudaStream_t stream) {
    if (model.precision.fp8 == Fp8Recipe::none || model.sharding.shards_weights()) return;
    for (int64_t l = 0; l < model.n_blocks(); ++l) {
        // On many ranks the weights may still be on their way from the rank that updated them.
        if (model.data_parallel) model.data_parallel->gather(model, block_unit(l), -1, stream);
        quantise_block(model, l, stream);
    }
}

void advance_fp8(const Model& model, cudaStream_t stream) {
    if (!model.fp8_states) return;
    // Each rank has seen the largest values of its own sequences and columns only.
    if (model.data_parallel)
        model.data_parallel->comm().all_reduce(model.fp8_states, model.fp8_states, ReduceOp::max, stream);
    if (model.tensor_parallel) model.tensor_parallel->max(model.fp8_states, stream);
    fp8_advance(model.fp8_states, stream);
}

void init_weights(Model& model, uint64_t seed) {
    const double residual_std = model.config.init_std / std::sqrt(2.0 * static_cast<double>(model.config.L));
    for (const Param& param : model.params) {
        const std::string& name = param.file_name();
        const bool residual =
            name.ends_with("c_proj.weight") || name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
        const int64_t n = param.cut.exists() ? param.cut.rows * param.cut.cols : param.used_n();
        if (param.decay)
            model.write(param,
                        normal_values(n, residual ? residual_std : model.config.init_std, seed, hash_name(name)));
        else model.write(param, std::vector<float>(static_cast<size_t>(n), name.ends_with(".weight") ? 1.0f : 0.0f));
    }
}

std::set<std::string> parameter_names(const Config& config) {
    std::set<std::string> names;
    for (const Param& param : whole_without_memory(config).params) names.insert(param.name);
    return names;
}

int64_t parameter_count(const Config& config) {
    int64_t n = 0;
    for (const Param& param : whole_without_memory(config).params) n += param.used_n();
    return n;
}
