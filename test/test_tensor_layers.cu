// test/test_tensor_layers.cu: the layers that ranks divide, against float64 loops on the whole tensors.
//
// A model of one block is computed by n ranks as threads. With the output matrix of the attention and of the
// feed-forward set to 0, or one of them, it is: embedding, norm, head and loss; these and an attention; these and a
// feed-forward.
// Losses are compared token by token. The gradient of each parameter, put together from the ranks' parts, is compared
// with differences of the loss in float64: along a random direction in which this parameter alone changes.
//
// A geometry is a line in geometries().
#include "llm.h"
#include "models.h"
#include "ranks.h"
#include "reference.h"
#include "run_models.h"

#include <cmath>
#include <mutex>

namespace {

struct Geometry {
    const char* name;
    TensorMode mode;
    bool sequence;
    std::vector<int> ranks;  // numbers of them that can have it
};
const std::vector<Geometry>& geometries() {
    static const std::vector<Geometry> all = {{"1d", TensorMode::one_d, false, {1, 2, 3, 4, 5, 6, 7, 8, 9}},
                                              {"1d, --sp", TensorMode::one_d, true, {2, 3, 4, 5, 6, 7, 8, 9}},
                                              {"2d", TensorMode::two_d, false, {4, 9}},
                                              {"2.5d", TensorMode::two_half_d, false, {8}},
                                              {"3d", TensorMode::three_d, false, {8}}};
    return all;
}

using Values = std::map<std::string, std::vector<double>>;  // of whole parameters, rows as the layers use them

// ---------------------------------------------------------------------------------------------------------------------
// The model in float64

using Matrix = std::vector<std::vector<double>>;  // rows of the stream

struct Reference {
    const Config& c;
    int64_t B, T;
    std::vector<int32_t> tokens, targets;

    std::string prefix() const { return c.family == Family::gpt2 ? "transformer.h.0." : "model.layers.0."; }
    static Matrix linear(const Matrix& x, const Values& p, const std::string& name) {
        const std::vector<double>& w = p.at(name + ".weight");
        const size_t C = x[0].size(), O = w.size() / C;
        const auto bias = p.find(name + ".bias");
        Matrix out(x.size(), std::vector<double>(O));
        for (size_t i = 0; i < x.size(); ++i)
            for (size_t o = 0; o < O; ++o) {
                double sum = bias == p.end() ? 0 : bias->second[o];
                for (size_t k = 0; k < C; ++k) sum += w[o * C + k] * x[i][k];
                out[i][o] = sum;
            }
        return out;
    }
    Matrix norm(const Matrix& x, const Values& p, const std::string& name) const {
        const std::vector<double>& weight = p.at(name + ".weight");
        const auto bias = p.find(name + ".bias");
        const double n = static_cast<double>(c.C);
        Matrix out = x;
        for (std::vector<double>& row : out) {
            double mean = 0, square = 0;
            for (const double value : row) mean += c.family == Family::gpt2 ? value / n : 0;
            for (const double value : row) square += (value - mean) * (value - mean) / n;
            for (size_t k = 0; k < row.size(); ++k)
                row[k] = (row[k] - mean) / std::sqrt(square + c.norm_eps) * weight[k] +
                         (bias == p.end() ? 0 : bias->second[k]);
        }
        return out;
    }
    void rotate(double* head, int64_t t) const {
        for (int64_t i = 0; i < c.D / 2; ++i) {
            const double angle = static_cast<double>(t) *
                                 std::pow(c.rope_base, -2.0 * static_cast<double>(i) / static_cast<double>(c.D));
            const double x = head[i], y = head[i + c.D / 2];
            head[i] = x * std::cos(angle) - y * std::sin(angle);
            head[i + c.D / 2] = x * std::sin(angle) + y * std::cos(angle);
        }
    }
    Matrix attention(const Matrix& x, const Values& p) const {
        const bool gpt2 = c.family == Family::gpt2;
        const std::string a = prefix() + (gpt2 ? "attn." : "self_attn.");
        Matrix q, k, v;
        if (gpt2) {
            const Matrix all = linear(x, p, a + "c_attn");
            for (const std::vector<double>& row : all) {
                q.emplace_back(row.begin(), row.begin() + c.C);
                k.emplace_back(row.begin() + c.C, row.begin() + 2 * c.C);
                v.emplace_back(row.begin() + 2 * c.C, row.end());
            }
        } else {
            q = linear(x, p, a + "q_proj"), k = linear(x, p, a + "k_proj"), v = linear(x, p, a + "v_proj");
            for (int64_t i = 0; i < B * T; ++i) {
                for (int64_t h = 0; h < c.H; ++h) rotate(q[static_cast<size_t>(i)].data() + h * c.D, i % T);
                for (int64_t h = 0; h < c.K; ++h) rotate(k[static_cast<size_t>(i)].data() + h * c.D, i % T);
            }
        }
        Matrix heads(x.size(), std::vector<double>(static_cast<size_t>(c.H * c.D)));
        for (int64_t i = 0; i < B * T; ++i)
            for (int64_t h = 0; h < c.H; ++h) attend(heads, q, k, v, i, h);
        return linear(heads, p, a + (gpt2 ? "c_proj" : "o_proj"));
    }
    // Row i of head h: over the tokens of its sequence up to itself.
    void attend(Matrix& heads, const Matrix& q, const Matrix& k, const Matrix& v, int64_t i, int64_t h) const {
        const auto at = [&](const Matrix& m, int64_t row, int64_t head, int64_t d) -> double {
            return m[static_cast<size_t>(row)][static_cast<size_t>(head * c.D + d)];
        };
        const int64_t key_head = h / (c.H / c.K), first = i / T * T;
        std::vector<double> weights;
        double all = 0;
        for (int64_t s = first; s <= i; ++s) {
            double score = 0;
            for (int64_t d = 0; d < c.D; ++d) score += at(q, i, h, d) * at(k, s, key_head, d);
            weights.push_back(std::exp(score / std::sqrt(static_cast<double>(c.D))));
            all += weights.back();
        }
        for (int64_t s = first; s <= i; ++s)
            for (int64_t d = 0; d < c.D; ++d)
                heads[static_cast<size_t>(i)][static_cast<size_t>(h * c.D + d)] +=
                    weights[static_cast<size_t>(s - first)] / all * at(v, s, key_head, d);
    }
    Matrix feed_forward(const Matrix& x, const Values& p) const {
        const std::string m = prefix() + "mlp.";
        if (c.family == Family::gpt2) {
            Matrix act = linear(x, p, m + "c_fc");
            for (std::vector<double>& row : act)
                for (double& u : row) u = gelu(u);
            return linear(act, p, m + "c_proj");
        }
        Matrix act = linear(x, p, m + "gate_proj");
        const Matrix up = linear(x, p, m + "up_proj");
        for (size_t i = 0; i < act.size(); ++i)
            for (size_t f = 0; f < act[i].size(); ++f) act[i][f] = act[i][f] / (1 + std::exp(-act[i][f])) * up[i][f];
        return linear(act, p, m + "down_proj");
    }
    std::vector<double> losses(const Values& p) const {
        const bool gpt2 = c.family == Family::gpt2;
        const std::vector<double>& wte = p.at(gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight");
        const size_t C = static_cast<size_t>(c.C);
        Matrix x;
        for (int64_t i = 0; i < B * T; ++i) {
            const size_t row = static_cast<size_t>(tokens[static_cast<size_t>(i)]);
            x.emplace_back(wte.begin() + static_cast<int64_t>(row * C),
                           wte.begin() + static_cast<int64_t>((row + 1) * C));
            for (size_t k = 0; gpt2 && k < C; ++k)
                x.back()[k] += p.at("transformer.wpe.weight")[static_cast<size_t>(i % T) * C + k];
        }
        const auto add = [&](const Matrix& branch) {
            for (size_t i = 0; i < x.size(); ++i)
                for (size_t k = 0; k < C; ++k) x[i][k] += branch[i][k];
        };
        add(attention(norm(x, p, prefix() + (gpt2 ? "ln_1" : "input_layernorm")), p));
        add(feed_forward(norm(x, p, prefix() + (gpt2 ? "ln_2" : "post_attention_layernorm")), p));
        const Matrix last = norm(x, p, gpt2 ? "transformer.ln_f" : "model.norm");
        const std::vector<double>& head = c.tied ? wte : p.at("lm_head.weight");
        std::vector<double> all;
        for (int64_t i = 0; i < B * T; ++i) {
            double sum = 0, target = 0;
            for (int64_t v = 0; v < c.V; ++v) {
                double logit = 0;
                for (size_t k = 0; k < C; ++k)
                    logit += head[static_cast<size_t>(v) * C + k] * last[static_cast<size_t>(i)][k];
                sum += std::exp(logit);
                if (v == targets[static_cast<size_t>(i)]) target = logit;
            }
            all.push_back(std::log(sum) - target);
        }
        return all;
    }
    double loss(const Values& p) const {
        double sum = 0;
        for (const double value : losses(p)) sum += value;
        return sum / static_cast<double>(B * T);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The same by ranks

struct Computed {
    std::vector<float> losses;
    std::map<std::string, std::vector<float>> grads;  // of whole parameters
};

// What one rank gives to the whole. Error where ranks that should have the same have other bits.
void collect(Computed& all, const Model& model, const Activations& acts, int64_t N, std::mutex& mutex) {
    const std::lock_guard lock(mutex);
    // Losses of the sequences that this rank has inside of its sub-layers.
    const std::vector<float> losses = to_floats(acts.losses);
    all.losses.resize(static_cast<size_t>(N), NAN);
    const int64_t first = model.layout.part(model.layout.inner_rows).index * std::ssize(losses);
    for (size_t i = 0; i < losses.size(); ++i) {
        float& loss = all.losses[static_cast<size_t>(first) + i];
        check(std::isnan(loss) || loss == losses[i], "the ranks have different losses");
        loss = losses[i];
    }
    for (const Param& param : model.params) {
        const int64_t rows = param.value.shape[0] - param.padded_rows;
        const std::vector<float> its = to_floats(param.grad.slice(0, rows));
        std::vector<float>& whole = all.grads[param.name];
        if (param.cut.exists()) {
            whole.resize(static_cast<size_t>(param.cut.rows * param.cut.cols), NAN);
            const std::vector<float> before = cut_from(param, whole);
            for (size_t i = 0; i < its.size(); ++i)
                check(std::isnan(before[i]) || before[i] == its[i], param.name, ": the ranks have different gradients");
            put_into(whole, param.cut, its);
        } else {
            check(whole.empty() || whole == its, param.name, ": the ranks have different gradients");
            whole = its;
        }
    }
}

// later: weight gradients are queued, and computed behind the backward. overlap: --tp-overlap.
Computed compute(const Reference& r, const Values& values, const Geometry& geometry, int n, DType dtype,
                 bool later = false, bool overlap = false) {
    Computed all;
    std::mutex mutex;
    run_ranks(threads(n), [&](Comm& world) {
        const cudaStream_t stream = device().stream;
        Arena weights("weights"), grads("gradients"), masters("masters"), activations("activations"),
            messages("messages");
        std::unique_ptr<TensorParallel> ranks;
        const TensorLayout layout = tensor_layout(geometry.mode, world.rank, n, geometry.sequence);
        if (n > 1) ranks = std::make_unique<TensorParallel>(world, layout, r.c.K);
        Model model;
        Activations acts;
        Workspace workspace;
        WeightGradients queue;
        for (int pass = 0; pass < 2; ++pass) {
            model =
                build_model(r.c, {.dtype = dtype}, r.T, weights, grads, masters, {}, n > 1 ? layout : TensorLayout{});
            model.tensor_parallel = ranks.get();
            acts = take_activations(model, r.B, r.T, {}, activations);
            workspace = take_workspace(model, r.B, r.T, true, activations);
            if (later) queue.take_memory(model, r.B, r.T, r.c.L, activations);
            TensorParallel::Sizes sizes{
                .N = acts.B * acts.T, .C = model.local.C, .dtype = dtype, .grad_dtype = DType::f32};
            for (const auto& [axes, parts] : model.shared_grads())
                for (const Tensor& part : parts) sizes.shared[axes] += part.n();
            if (model.layout.divides_columns()) sizes.geometry = geometry_sizes(model, acts);
            sizes.overlap = overlap;
            if (ranks) ranks->take_memory(sizes, messages);
            if (pass == 0)
                for (Arena* arena : {&weights, &grads, &masters, &activations, &messages}) arena->reserve();
        }
        for (const Param& param : model.params) {
            const std::vector<double>& whole = values.at(param.name);
            model.write(param, {whole.begin(), whole.end()});
        }
        copy_to_device(acts.tokens, r.tokens.data());
        copy_to_device(acts.targets,
                       r.targets.data() + model.layout.part(model.layout.inner_rows).index * acts.targets.n());
        cudaCheck(cudaMemsetAsync(model.grads.data, 0xff, model.grads.bytes(), stream));  // NaN: all of it is written
        workspace.accumulate = false;
        forward(model, acts, workspace, stream);
        loss_backward(model, acts, 1.0f / static_cast<float>(r.B * r.T), stream);
        if (later) {
            workspace.later = &queue, queue.begin(0, 0);
            const Tensor dx = workspace.dresidual;
            head_backward(model, acts, workspace, dx, stream);
            backward_blocks(model, acts, workspace, 0, r.c.L, dx, dx, stream);
            embed_backward(model, acts, workspace, dx, stream);
            queue.run(0, 0, workspace, stream);
        } else {
            backward(model, acts, workspace, stream);
        }
        for (const auto& [axes, parts] : model.shared_grads())
            if (ranks) ranks->sum_shared(axes, parts, stream);
        cudaCheck(cudaStreamSynchronize(stream));
        collect(all, model, acts, r.B * r.T, mutex);
        world.barrier(stream);
        cudaCheck(cudaStreamSynchronize(stream));
    });
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------

// Heads, columns and sequences that n ranks can divide: of key heads there are fewer than ranks, where that can be.
Config config_for(bool gpt2, int n, const Geometry& geometry) {
    Config c = gpt2 ? small_gpt2() : small_llama();
    const bool in_columns = geometry.mode != TensorMode::one_d;  // then H, F and C are divided by 2, 3, 4 or 6
    c.L = 1, c.V = 37, c.D = 8, c.H = in_columns ? 12 : n < 5 ? 2 * n : n, c.F = in_columns ? 36 : 5 * n;
    c.K = gpt2 || in_columns ? c.H : n % 2 == 0 ? n / 2 : n;
    c.C = gpt2 ? c.H * c.D : in_columns ? 24 : 20;
    return c;
}

Values random_parameters(const Config& c, DType dtype, const std::string& part) {
    Arena weights("weights"), grads("gradients"), masters("masters");
    const Model model = build_model(c, {.dtype = dtype}, c.T_max, weights, grads, masters);
    Values values;
    for (const Param& param : model.params) {
        const int64_t n = param.used_n();
        const bool is_norm = !param.decay && param.name.ends_with(".weight");
        const bool of_attention = param.name.find("attn") != std::string::npos;
        const bool is_output = param.name.find("c_proj") != std::string::npos ||
                               param.name.find("o_proj") != std::string::npos ||
                               param.name.find("down_proj") != std::string::npos;
        std::vector<double> numbers = random_values(n, hash_name(param.name), param.decay ? 0.3 : 0.1);
        for (double& x : numbers)
            x = is_norm ? 1 + x : is_output && part != (of_attention ? "attention" : "feed-forward") ? 0 : x;
        values[param.name] = rounded(numbers, dtype);
    }
    return values;
}

void check_layers(bool gpt2, int n, const Geometry& geometry, DType dtype, const std::string& part) {
    const Config c = config_for(gpt2, n, geometry);
    // Sequences, or with --sp rows, that the ranks can divide; otherwise any.
    const int64_t B = geometry.mode == TensorMode::one_d ? 2 : n == 9 ? 3 : 4, T = geometry.sequence ? 2 * n : 7;
    const Reference r{c, B, T, random_tokens(B * T, c.V, 1), random_tokens(B * T, c.V, 2)};
    const Values values = random_parameters(c, dtype, part);
    const Computed computed = compute(r, values, geometry, n, dtype);
    // float32: sums of some hundred terms. 16 bits: as models.h says, and each rank rounds its part of a sum.
    const double tolerance = dtype == DType::f32 ? 2e-5 : 1.5 * model_error(dtype);
    check_close({computed.losses.begin(), computed.losses.end()}, r.losses(values), tolerance, tolerance, "losses");
    double largest_norm = 0;
    for (const auto& [name, grad] : computed.grads) largest_norm = std::max(largest_norm, norm_of(grad));
    for (const auto& [name, grad] : computed.grads) {
        INFO(name);
        REQUIRE(grad.size() == values.at(name).size());
        const std::vector<double> v = random_values(std::ssize(grad), hash_name(name) + 1);
        double along = 0;
        for (size_t i = 0; i < v.size(); ++i) along += grad[i] * v[i];
        const auto moved = [&, &name = name](double step) {
            Values other = values;
            for (size_t i = 0; i < v.size(); ++i) other[name][i] += step * v[i];
            return r.loss(other);
        };
        const double step = 1e-5, expected = (moved(step) - moved(-step)) / (2 * step);
        // A gradient that is 0, as that of key biases, has the rounding of those that it is a difference of.
        const double size = norm_of(grad) + 0.05 * largest_norm;
        CHECK(std::abs(along - expected) <= 2 * tolerance * size);
    }
}

}  // namespace

TEST_CASE("divided layers give the losses and gradients of the whole, against float64", "[tensor_parallel][llm]") {
    int number = 0;
    for (const Geometry& geometry : geometries())
        for (const int n : geometry.ranks)
            for (const bool gpt2 : {false, true})
                for (const DType dtype : kFloatDTypes)
                    for (const std::string part : {"neither", "attention", "feed-forward"}) {
                        if (!is_full() && ++number % 5 != 1) continue;
                        INFO(geometry.name << ", " << n << " ranks, " << (gpt2 ? "gpt2, " : "llama, ")
                                           << dtype_name(dtype) << ", " << part);
                        check_layers(gpt2, n, geometry, dtype, part);
                    }
}

TEST_CASE("weight gradients of divided layers, computed later, have the same bits", "[tensor_parallel][llm]") {
    for (const Geometry& geometry : geometries())
        for (const bool gpt2 : {false, true})
            for (const DType dtype : {DType::f32, DType::bf16})
                for (const bool overlap : {false, true}) {
                    const int n = geometry.mode == TensorMode::one_d ? 2 : geometry.ranks[0];
                    if (overlap && !geometry.sequence) continue;
                    Config c = config_for(gpt2, n, geometry);
                    c.L = 2;
                    const int64_t B = geometry.mode == TensorMode::one_d ? 2 : 4, T = geometry.sequence ? 8 * n : 7;
                    const Reference r{c, B, T, random_tokens(B * T, c.V, 1), random_tokens(B * T, c.V, 2)};
                    const Values values = random_parameters(c, dtype, overlap ? "feed-forward" : "attention");
                    const Computed at_once = compute(r, values, geometry, n, dtype, false, overlap),
                                   later = compute(r, values, geometry, n, dtype, true, overlap);
                    INFO(geometry.name << (gpt2 ? " gpt2 " : " llama ") << dtype_name(dtype) << overlap);
                    CHECK(later.losses == at_once.losses);
                    CHECK(later.grads == at_once.grads);
                    if (!overlap) continue;
                    // In pieces, as all at once. (check_layers has no overlap.)
                    const Computed whole = compute(r, values, geometry, n, dtype);
                    for (const auto& [name, grad] : whole.grads) {
                        INFO(name);
                        CHECK(norm_of_difference(grad, at_once.grads.at(name)) <=
                              (dtype == DType::f32 ? 2e-5 : model_error(dtype)) * norm_of(grad));
                    }
                }
}

// A step of inference has some rows, whole on every rank. Of the memory for blocks each of the calls needs most of
// some. Sums of these integers are exact.
TEST_CASE("a step's products and embedding in columns are those of the whole", "[tensor_parallel]") {
    constexpr int64_t R = 64, C = 36, O = 288, V = 324;  // by 2, 3 and 4
    const auto number = [](int64_t matrix, int64_t row, int64_t col) {
        return static_cast<double>((7 * matrix + 5 * row + 3 * col + row * col) % 11 - 5);
    };
    for (const Geometry& geometry : geometries())
        for (const int n : geometry.ranks) {
            if (geometry.mode == TensorMode::one_d) continue;
            const int64_t F = n == 9 ? 36 : 144;
            INFO(geometry.name << ", " << n << " ranks");
            run_ranks(threads(n), [&](Comm& world) {
                const TensorLayout layout = tensor_layout(geometry.mode, world.rank, n);
                const auto range = [&](int64_t of, const Axes& axes) {
                    const auto part = layout.part(axes);
                    return Range{of / part.of * part.index, of / part.of};
                };
                // This rank's part of a matrix.
                const auto block = [&](int64_t matrix, Range rows, Range cols) {
                    std::vector<double> values;
                    for (int64_t r = rows.first; r < rows.first + rows.n; ++r)
                        for (int64_t c = cols.first; c < cols.first + cols.n; ++c)
                            values.push_back(number(matrix, r, c));
                    return values;
                };
                const Range all_rows{0, R}, stream = range(C, layout.stream_columns), wide = range(O, layout.heads),
                                            inside = range(F, layout.heads), reads = range(C, layout.enter_columns),
                                            writes = range(F, layout.leave_columns), tokens = range(V, layout.heads);
                TensorParallel ranks(world, layout, n);
                Arena memory("communication");
                for (int pass = 0; pass < 2; ++pass) {
                    ranks.take_memory({.N = R,
                                       .C = stream.n,
                                       .dtype = DType::f32,
                                       .grad_dtype = DType::f32,
                                       .geometry = {.rows = 1,
                                                    .columns = stream.n,
                                                    .products = {{wide.n, reads.n}, {stream.n, writes.n}},
                                                    .embedding = {tokens.n, reads.n},
                                                    .whole_rows = R}},
                                      memory);
                    if (pass == 0) memory.reserve();
                }
                for (const Crossing way : {Crossing::enters, Crossing::leaves}) {
                    const bool enters = way == Crossing::enters;
                    const int64_t K = enters ? C : F;  // what is added up
                    const Range inputs = enters ? stream : inside, outputs = enters ? wide : stream,
                                columns = enters ? reads : writes;
                    const Buffer inp(DType::f32, {R, inputs.n}, block(0, all_rows, inputs)),
                        weight(DType::f32, {outputs.n, columns.n}, block(1, outputs, columns)),
                        bias(DType::f32, {outputs.n}, block(2, {0, 1}, outputs)), out(DType::f32, {R, outputs.n});
                    ranks.geometry()->forward_whole_rows(out, inp, weight, bias, way, device().stream);
                    std::vector<double> expected;
                    for (int64_t r = 0; r < R; ++r)
                        for (int64_t o = outputs.first; o < outputs.first + outputs.n; ++o) {
                            expected.push_back(number(2, 0, o));
                            for (int64_t k = 0; k < K; ++k) expected.back() += number(0, r, k) * number(1, o, k);
                        }
                    check(out.values() == expected, "another product, which ", enters ? "enters" : "leaves");
                }
                const Buffer wte(DType::f32, {tokens.n, reads.n}, block(3, tokens, reads)), ids(DType::i32, {1, R}),
                    out(DType::f32, {R, stream.n});
                std::vector<int32_t> here;
                std::vector<double> expected;
                for (int64_t i = 0; i < R; ++i) {
                    const int64_t token = 77 * i % V;
                    const bool is_here = token >= tokens.first && token < tokens.first + tokens.n;
                    here.push_back(is_here ? static_cast<int32_t>(token - tokens.first) : -1);
                    for (const double x : block(3, {token, 1}, stream)) expected.push_back(x);
                }
                copy_to_device(ids, here.data());
                ranks.geometry()->embed_whole_rows(out, ids, wte, device().stream);
                check(out.values() == expected, "another embedding");
                const Buffer statistics(DType::f32, {2 * R}, std::vector<double>(2 * R, 1));
                ranks.geometry()->sum_statistics(statistics, device().stream);
                check(statistics.values() == std::vector<double>(2 * R, ranks.geometry()->columns()), "other sums");
            });
        }
}

TEST_CASE("rows that were gathered beside a product are used once", "[tensor_parallel]") {
    run_ranks(threads(2), [](Comm& comm) {
        OneD layers(comm);
        Arena arena("communication");
        for (int pass = 0; pass < 2; ++pass) {
            layers.take_memory(2, 1, DType::f32, true, false, arena), comm.take_memory(arena);
            if (pass == 0) arena.reserve();
        }
        const Buffer rows(DType::f32, {1, 1});
        const cudaStream_t stream = device().stream;
        for (const float x : {1.0f, 2.0f, 3.0f}) {  // other rows in the same place
            const float mine = x + 10 * static_cast<float>(comm.rank);
            copy_to_device(rows, &mine);
            if (x == 1) layers.prefetch(rows, true, stream);
            layers.enter_backward_weight(
                rows, true,
                [&](const Tensor& all) {
                    cudaCheck(cudaStreamSynchronize(stream));
                    check(to_floats(all) == std::vector<float>{x, x + 10}, "other rows");
                },
                stream);
        }
    });
}
