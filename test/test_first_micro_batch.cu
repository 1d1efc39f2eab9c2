// test/test_first_micro_batch.cu: the first micro-batch of a step writes the gradients of parameters. They hold NaN
// before, so that what nobody writes shows.
#include "models.h"

#include <functional>

namespace {

// The gradients are `count` tensors of `n` elements each; run(gradients, accumulate) launches the operation.
void check_written(const char* what, DType dtype, const std::vector<std::vector<int64_t>>& shapes,
                   const std::function<void(const std::vector<Tensor>&, bool)>& run) {
    INFO(what << ", gradients in " << dtype_name(dtype));
    Arena arena("gradients");
    std::vector<Tensor> added, written;
    for (int pass = 0; pass < 2; ++pass) {
        added.clear(), written.clear();
        for (const std::vector<int64_t>& shape : shapes)
            for (std::vector<Tensor>* list : {&added, &written})
                list->push_back(shape.size() == 1 ? arena.take("gradient", dtype, {shape[0]})
                                                  : arena.take("gradient", dtype, {shape[0], shape[1]}));
        if (pass == 0) arena.reserve();
    }
    const auto fill = [](const std::vector<Tensor>& gradients, int value) {
        for (const Tensor& x : gradients) cudaCheck(cudaMemsetAsync(x.data, value, x.bytes(), device().stream));
    };
    fill(added, 0), fill(written, 0xff);  // 0xff: NaN
    run(added, true);
    run(written, false);
    for (size_t i = 0; i < shapes.size(); ++i) CHECK(to_floats(written[i]) == to_floats(added[i]));
}

}  // namespace

TEST_CASE("gradients of parameters are written where they do not accumulate", "[layers]") {
    const cudaStream_t s = device().stream;
    for (const DType dtype : {DType::f32, DType::bf16})
        for (const DType gradients : {DType::f32, dtype}) {
            const int64_t N = 48, C = 32, O = 16, B = 4, T = 12, V = 70;
            const Buffer x(dtype, {N, C}, random_values(N * C, 1)), dy(dtype, {N, C}, random_values(N * C, 2)),
                dout(dtype, {N, O}, random_values(N * O, 3)), weight(dtype, {C}, random_values(C, 4)),
                mean(DType::f32, {N}, random_values(N, 5, 0.01)), rstd(DType::f32, {N}, std::vector<double>(N, 1.0)),
                matrix(dtype, {O, C}, random_values(O * C, 6)), dx(dtype, {N, C}), parts(DType::f32, {N, 2}),
                scratch(DType::f32, {1 << 16});
            Buffer tokens(DType::i32, {B, T}), positions(DType::i32, {B, T}), lists(DType::i32, {1 << 12});
            std::vector<int32_t> ids(N), places(N);
            for (size_t i = 0; i < ids.size(); ++i)
                ids[i] = static_cast<int32_t>(i * i % 23) - 1, places[i] = static_cast<int32_t>(i % 5);
            tokens.set_integers(ids), positions.set_integers(places);
            const Tensor rows = dy.tensor().view({B, T, C});
            const HeadColumns heads{x.tensor().view({B, T, C}), 2, C / 2}, dheads{rows, 2, C / 2},
                dinp{dx.tensor().view({B, T, C}), 2, C / 2};
            const Tensor half = weight.tensor().slice(0, C / 2);
            const Buffer rstds(DType::f32, {N, 2}, std::vector<double>(2 * N, 1.0));
            using Gradients = std::vector<Tensor>;
            const auto check = [&](const char* what, const std::vector<std::vector<int64_t>>& shapes,
                                   const std::function<void(const Gradients&, bool)>& run) {
                check_written(what, gradients, shapes, run);
            };
            check("linear", {{O, C}, {O}}, [&](const Gradients& d, bool accumulate) {
                linear_backward_weight(d[0], d[1], dout, x, accumulate, scratch, s);
            });
            check("column sum", {{C}, {C}}, [&](const Gradients& d, bool accumulate) {
                column_sum(d[0], x, accumulate, scratch, s);
                column_sum(d[1], x.tensor().slice(0, 0), accumulate, scratch, s);  // of no rows: 0
            });
            check("LayerNorm", {{C}, {C}}, [&](const Gradients& d, bool accumulate) {
                layernorm_backward(dx, d[0], d[1], dy, {}, x, weight, mean, rstd, accumulate, scratch, s);
            });
            check("RMSNorm", {{C}, {C / 2}}, [&](const Gradients& d, bool accumulate) {
                rmsnorm_backward(dx, d[0], dy, {}, x, weight, rstd, accumulate, scratch, s);
                rmsnorm_heads_backward(dinp, d[1], dheads, heads, half, rstds, accumulate, scratch, s);
            });
            check("norms of divided rows", {{C}, {C}}, [&](const Gradients& d, bool accumulate) {
                divided_norm_backward_parts(parts, d[0], d[1], dy, x, weight, mean, rstd, accumulate, scratch, s);
            });
            check("embedding", {{V, C}, {T, C}, {V, C}, {T, C}}, [&](const Gradients& d, bool accumulate) {
                embedding_backward(d[0], d[1], rows, tokens, {}, accumulate, accumulate, lists, s);
                embedding_backward(d[2], d[3], rows, tokens, positions, accumulate, accumulate, lists, s);
            });
            if (dtype == DType::f32 || !has_fp8()) continue;
            const Buffer saved(DType::f32, {2}, {4.0, 4.0});
            const int64_t n = fp8_linear_scratch_n(Fp8Recipe::current, N, C, O);
            REQUIRE(n <= scratch.tensor().n());
            check("fp8", {{O, C}, {O}}, [&](const Gradients& d, bool accumulate) {
                fp8_linear_backward_weight(d[0], d[1], dout, x, saved, Fp8Recipe::current, accumulate, scratch, s);
            });
        }
}

TEST_CASE("the first micro-batch writes every gradient of a model", "[model]") {
    std::vector<Config> configs = small_models();
    configs.push_back(small_qwen3());
    configs.back().tied = configs.back().qkv_bias = true;
    for (const Config& config : configs)
        for (const Precision& precision : {Precision{}, Precision{DType::bf16, DType::bf16, true}}) {
            INFO(config.attention << ", " << config.feed_forward << (config.tied ? ", tied, " : ", ")
                                  << dtype_name(precision.dtype));
            TinyTrainer m(config, 2, 7, precision, {.every = 1});
            init_weights(m.model, 3);
            std::vector<int32_t> tokens(14);
            for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 5 % 31);
            m.set_batch(tokens, tokens);
            const auto gradients = [&](int fill, bool accumulate) {
                cudaCheck(cudaMemsetAsync(m.model.grads.data, fill, m.model.grads.bytes(), device().stream));
                m.workspace.accumulate = accumulate;
                m.compute_gradients(1.0f / 14);
                std::map<std::string, std::vector<float>> all;
                for (const Param& param : m.model.params) all[param.name] = to_floats(param.grad);
                return all;
            };
            const auto added = gradients(0, true), written = gradients(0xff, false);
            for (const auto& [name, values] : added) {
                INFO(name);
                // On a GPU a 16-bit gradient of a weight with a bias is another algorithm's where it accumulates:
                // there the bias' gradient is summed apart (linear.cu). Two sums in float32, each rounded once.
                if (device().is_cpu || precision.dtype == DType::f32) CHECK((written.at(name) == values));
                else
                    CHECK(norm_of_difference(values, written.at(name)) <=
                          2 * unit_roundoff(precision.dtype) * norm_of(values));
            }
        }
}
