// test/test_model.cu: whole models against PyTorch and transformers (test/golden/), and against themselves.
//
// The goldens are float64 results rounded to float32 (test/golden/make_golden.py), so the tolerances below measure our
// float32 alone: PyTorch's own float32 is within 1e-6 of them everywhere but where a comment says otherwise.
#include "io/io.h"
#include "llm.h"
#include "optim/optim.h"
#include "reference.h"
#include "temp_folder.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace {

const std::string kGolden = "test/golden/";

// A model with its memory, ready to train.
struct Machine {
    Arena values{"values"}, grads{"grads"}, states{"states"}, activations{"activations"};
    Config config;
    Model model;
    Activations acts;
    std::unique_ptr<Optimizer> adamw;
    Tensor norm, norm_scratch;

    Machine(const Config& c, int64_t B, int64_t T, bool training = true) : config(c) {
        for (int pass = 0; pass < 2; ++pass) {
            model = build_model(config, DType::f32, T, values, grads);
            adamw = make_optimizer("adamw", states, model.params, model.values.n(), {});
            acts = take_activations(config, DType::f32, B, T, training, activations);
            norm = activations.take("norm", DType::f32, {2});
            norm_scratch = activations.take("norm", DType::f32, {grad_norm_scratch_n(model.grads.n())});
            if (pass == 0)
                for (Arena* arena : {&values, &grads, &states, &activations}) arena->reserve();
        }
        adamw->init(device().stream);
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
    double train_step(float dloss, double lr, int64_t t) {
        zero_grads();
        forward(model, acts, device().stream);
        loss_backward(model, acts, dloss, device().stream);
        backward(model, acts, device().stream);
        grad_norm(norm, model.grads, 1.0f, norm_scratch, device().stream);
        adamw->step(model.values, model.grads, norm, lr, t, device().stream);
        return mean_loss();
    }
};

std::vector<float> floats_of(const SafetensorsReader& file, const std::string& name) { return file.at(name).floats(); }
std::vector<int32_t> integers_of(const SafetensorsReader& file, const std::string& name) {
    const StoredTensor& stored = file.at(name);
    std::vector<int32_t> values(static_cast<size_t>(stored.n()));
    std::copy_n(stored.data, stored.bytes, reinterpret_cast<unsigned char*>(values.data()));
    return values;
}

// A parameter (or its gradient) as the Hugging Face file has it.
std::vector<float> in_file_layout(const Param& param, const Tensor& tensor) {
    const int64_t rows = tensor.shape[0] - param.padded_rows;
    std::vector<float> values = to_floats(tensor.slice(0, rows));
    if (!param.transposed) return values;
    const int64_t cols = tensor.cols();
    std::vector<float> out(values.size());
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) out[static_cast<size_t>(c * rows + r)] = values[static_cast<size_t>(r * cols + c)];
    return out;
}

double norm_of(const std::vector<float>& a) {
    double sum = 0;
    for (float x : a) sum += static_cast<double>(x) * x;
    return std::sqrt(sum);
}
double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double worst = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double difference = std::abs(static_cast<double>(a[i]) - b[i]);
        if (!(difference <= worst)) worst = difference;
    }
    return worst;
}
double largest(const std::vector<float>& a) {
    double most = 0;
    for (float x : a) most = std::max(most, std::abs(static_cast<double>(x)));
    return most;
}

// Step `s` of the golden token array (steps, B, T + 1): inputs are the first T of each row, targets the last T.
void cut_batch(const std::vector<int32_t>& all, int64_t s, int64_t B, int64_t T, std::vector<int32_t>& tokens,
               std::vector<int32_t>& targets) {
    tokens.clear(), targets.clear();
    for (int64_t b = 0; b < B; ++b) {
        const auto row = all.begin() + (s * B + b) * (T + 1);
        tokens.insert(tokens.end(), row, row + T);
        targets.insert(targets.end(), row + 1, row + T + 1);
    }
}

// GPT-2's key bias shifts every score of a softmax row alike: its gradient is exactly 0, and what float32 leaves of it is
// rounding noise, which AdamW scales up to whole steps. PyTorch's own float32 is 3e-4 off there. So that third is left out.
std::vector<float> without_key_bias(const Param& param, const Config& c, std::vector<float> values) {
    const std::string& name = param.name;
    if (c.family == Family::gpt2 && name.size() > 16 && name.compare(name.size() - 16, 16, "attn.c_attn.bias") == 0)
        std::fill(values.begin() + c.C, values.begin() + 2 * c.C, 0.0f);
    return values;
}

void check_golden(const std::string& name) {
    const Config config = load_config(kGolden + name);
    const SafetensorsReader golden(kGolden + name + "/golden.safetensors");
    const int64_t B = 3, T = 17;
    Machine m(config, B, T);
    load_weights(m.model, kGolden + name);
    const std::vector<int32_t> all = integers_of(golden, "tokens");
    std::vector<int32_t> tokens, targets;
    cut_batch(all, 0, B, T, tokens, targets);
    m.set_batch(tokens, targets);
    m.zero_grads();
    forward(m.model, m.acts, device().stream);

    // Logits, relative to the largest: a logit near zero is a difference of large terms.
    const std::vector<float> padded = to_floats(m.acts.logits), wanted = floats_of(golden, "logits");
    std::vector<float> logits;
    for (int64_t n = 0; n < B * T; ++n) {
        const auto row = padded.begin() + n * config.V_padded();
        logits.insert(logits.end(), row, row + config.V);
    }
    CHECK(largest_difference(logits, wanted) <= 1e-4 * largest(wanted));

    loss_backward(m.model, m.acts, 1.0f / static_cast<float>(B * T), device().stream);
    CHECK(std::abs(m.mean_loss() - floats_of(golden, "loss")[0]) <= 1e-5);
    if (!golden.has("losses")) return;

    backward(m.model, m.acts, device().stream);
    for (const Param& param : m.model.params) {
        const std::vector<float> expected = floats_of(golden, "grad." + param.name), actual = in_file_layout(param, param.grad);
        std::vector<float> difference(expected.size());
        for (size_t i = 0; i < expected.size(); ++i) difference[i] = actual[i] - expected[i];
        INFO(name << " gradient of " << param.name);
        CHECK(norm_of(difference) <= 1e-3 * norm_of(expected));
    }

    const std::vector<float> losses = floats_of(golden, "losses"), norms = floats_of(golden, "grad_norms");
    for (int64_t s = 0; s < 10; ++s) {
        cut_batch(all, s, B, T, tokens, targets);
        m.set_batch(tokens, targets);
        const double loss = m.train_step(1.0f / static_cast<float>(B * T), 1e-3, s + 1);
        INFO(name << " step " << s);
        CHECK(std::abs(loss - losses[static_cast<size_t>(s)]) <= 5e-5);  // the same to 4 decimals
        CHECK(std::abs(to_floats(m.norm)[0] / norms[static_cast<size_t>(s)] - 1) <= 1e-4);
    }
    for (const Param& param : m.model.params) {
        INFO(name << " after 10 steps: " << param.name);
        CHECK(largest_difference(without_key_bias(param, config, in_file_layout(param, param.value)),
                                 without_key_bias(param, config, floats_of(golden, "after." + param.name))) <= 1e-4);
    }
}

Config small_llama() {
    Config c;
    c.V = 53, c.T_max = 40, c.L = 2, c.H = 6, c.K = 2, c.D = 6, c.C = 30, c.F = 44;
    return c;
}
Config small_gpt2() {
    Config c;
    c.family = Family::gpt2;
    c.V = 61, c.T_max = 40, c.L = 2, c.H = 3, c.K = 3, c.D = 10, c.C = 30, c.F = 50, c.tied = true;
    return c;
}
std::vector<int32_t> random_tokens(int64_t n, int64_t V, uint64_t seed) {
    std::vector<int32_t> tokens(static_cast<size_t>(n));
    for (size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = static_cast<int32_t>(uniform_below(seed, 7, i, static_cast<uint64_t>(V)));
    return tokens;
}

}  // namespace

TEST_CASE("GPT-2 equals transformers: logits, loss, gradients, ten AdamW steps", "[model][golden]") { check_golden("gpt2"); }
TEST_CASE("LLaMA with GQA and llama3 RoPE scaling equals transformers", "[model][golden]") { check_golden("llama"); }
TEST_CASE("LLaMA with a tied head and bf16 weights equals transformers", "[model][golden]") { check_golden("llama_tied"); }

TEST_CASE("a sharded Hugging Face folder gives the same weights as one file", "[model][golden]") {
    const Config config = load_config(kGolden + "llama");
    Machine whole(config, 1, 8), sharded(load_config(kGolden + "llama_sharded"), 1, 8);
    load_weights(whole.model, kGolden + "llama");
    load_weights(sharded.model, kGolden + "llama_sharded");
    CHECK(to_floats(whole.model.values) == to_floats(sharded.model.values));
    CHECK(to_floats(whole.model.rope_table) == to_floats(sharded.model.rope_table));  // older config.json, same meaning
}

TEST_CASE("targets that are ignored count neither in the loss nor in the gradient", "[model][golden]") {
    for (const std::string name : {"gpt2", "llama"}) {
        const SafetensorsReader golden(kGolden + name + "/golden.safetensors");
        Machine m(load_config(kGolden + name), 3, 17);
        load_weights(m.model, kGolden + name);
        std::vector<int32_t> tokens, targets;
        cut_batch(integers_of(golden, "tokens"), 0, 3, 17, tokens, targets);
        targets = integers_of(golden, "ignored_targets");
        const auto n_counted = std::count_if(targets.begin(), targets.end(), [](int32_t t) { return t >= 0; });
        REQUIRE(n_counted < 51);
        m.set_batch(tokens, targets);
        m.zero_grads();
        forward(m.model, m.acts, device().stream);
        loss_backward(m.model, m.acts, 1.0f / static_cast<float>(n_counted), device().stream);
        backward(m.model, m.acts, device().stream);
        CHECK(std::abs(m.mean_loss() - floats_of(golden, "ignored_loss")[0]) <= 1e-5);
        int n_compared = 0;
        for (const Param& param : m.model.params) {
            if (!golden.has("ignored_grad." + param.name)) continue;
            const std::vector<float> expected = floats_of(golden, "ignored_grad." + param.name);
            CHECK(largest_difference(in_file_layout(param, param.grad), expected) <= 1e-4 * largest(expected));
            ++n_compared;
        }
        CHECK(n_compared == 2);
    }
}

TEST_CASE("what we save we load again bit for bit", "[model]") {
    for (const Config& config : {small_llama(), small_gpt2()}) {
        TempFolder folder;
        Machine a(config, 1, 8), b(config, 1, 8);
        init_weights(a.model, 5);
        save_model(a.model, folder.path);
        b.config = load_config(folder.path);
        CHECK(config_to_json(b.config) == config_to_json(config));
        load_weights(b.model, folder.path);
        CHECK(to_floats(a.model.values) == to_floats(b.model.values));
    }
}

TEST_CASE("transformers gives the same logits for what we save", "[model][export]") {
    const char* python = std::getenv("LLM_PYTHON");
    for (const Config& config : {small_llama(), small_gpt2()}) {
        TempFolder folder;
        Machine m(config, 2, 13);
        init_weights(m.model, 5);
        save_model(m.model, folder.path);
        const std::vector<int32_t> tokens = random_tokens(26, config.V, 3);
        m.set_batch(tokens, tokens);
        forward(m.model, m.acts, device().stream);
        const auto fill_logits = [&](void* bytes) {
            const std::vector<float> padded = to_floats(m.acts.logits);
            for (int64_t n = 0; n < 26; ++n)
                std::copy_n(padded.begin() + n * config.V_padded(), config.V, static_cast<float*>(bytes) + n * config.V);
        };
        write_safetensors(folder.path + "/logits.safetensors",
                          {{"tokens", "I32", {2, 13}, [&](void* bytes) { std::copy_n(tokens.data(), 26, static_cast<int32_t*>(bytes)); }},
                           {"logits", "F32", {2, 13, config.V}, fill_logits}});
        const std::string command = concat(python ? python : "python3", " test/golden/check_export.py ", folder.path, " > ",
                                           folder.path, "/said 2>&1");
        const int status = std::system(command.c_str());
        if (WEXITSTATUS(status) == 77 || WEXITSTATUS(status) == 127) {
            SKIP_TEST("no Python with torch and transformers (set LLM_PYTHON)");
        }
        INFO(read_text_file(folder.path + "/said"));
        CHECK(status == 0);
    }
}

TEST_CASE("micro-batches of 2 add up to a batch of 8", "[model]") {
    for (const Config& config : {small_llama(), small_gpt2()}) {
        const int64_t T = 11;
        const std::vector<int32_t> tokens = random_tokens(8 * T, config.V, 1), targets = random_tokens(8 * T, config.V, 2);
        Machine whole(config, 8, T), parts(config, 2, T);
        init_weights(whole.model, 9);
        init_weights(parts.model, 9);
        const float dloss = 1.0f / static_cast<float>(8 * T);
        whole.set_batch(tokens, targets);
        whole.zero_grads();
        forward(whole.model, whole.acts, device().stream);
        loss_backward(whole.model, whole.acts, dloss, device().stream);
        backward(whole.model, whole.acts, device().stream);
        parts.zero_grads();
        for (int64_t b = 0; b < 8; b += 2) {
            parts.set_batch({tokens.begin() + b * T, tokens.begin() + (b + 2) * T}, {targets.begin() + b * T, targets.begin() + (b + 2) * T});
            forward(parts.model, parts.acts, device().stream);
            loss_backward(parts.model, parts.acts, dloss, device().stream);
            backward(parts.model, parts.acts, device().stream);
        }
        const std::vector<float> a = to_floats(whole.model.grads), b = to_floats(parts.model.grads);
        CHECK(largest_difference(a, b) <= 1e-5 * largest(a));
    }
}

TEST_CASE("the same run twice gives the same bits", "[model]") {
    for (const Config& config : {small_llama(), small_gpt2()}) {
        std::vector<float> first;
        for (int run = 0; run < 2; ++run) {
            Machine m(config, 3, 13);
            init_weights(m.model, 4);
            m.set_batch(random_tokens(39, config.V, 1), random_tokens(39, config.V, 2));
            for (int64_t t = 1; t <= 3; ++t) m.train_step(1.0f / 39, 1e-2, t);
            const std::vector<float> weights = to_floats(m.model.values);
            if (run == 0) first = weights;
            CHECK(weights == first);
        }
    }
}

TEST_CASE("forward without a backward gives the same logits in less memory", "[model]") {
    for (Config config : {small_llama(), small_gpt2()}) {
        config.L = 5;
        Machine training(config, 2, 13, true), inference(config, 2, 13, false);
        const std::vector<int32_t> tokens = random_tokens(26, config.V, 1);
        for (Machine* m : {&training, &inference}) {
            init_weights(m->model, 4);
            m->set_batch(tokens, tokens);
            forward(m->model, m->acts, device().stream);
        }
        CHECK(to_floats(training.acts.logits) == to_floats(inference.acts.logits));
        CHECK(inference.activations.bytes() < training.activations.bytes() / 3);
    }
}

TEST_CASE("gradients of the whole model equal finite differences of its loss", "[model]") {
    for (const Config& config : {small_llama(), small_gpt2()}) {
        const int64_t B = 2, T = 9;
        Machine m(config, B, T);
        init_weights(m.model, 11);
        const std::vector<int32_t> tokens = random_tokens(B * T, config.V, 1), targets = random_tokens(B * T, config.V, 2);
        m.set_batch(tokens, targets);
        m.zero_grads();
        forward(m.model, m.acts, device().stream);
        loss_backward(m.model, m.acts, 1.0f / static_cast<float>(B * T), device().stream);
        backward(m.model, m.acts, device().stream);
        // Along the gradient g itself: d/de loss(w + e g/|g|) = |g|. In float32 a step of 1e-2 leaves a relative error of
        // about 1e-7 loss / (1e-2 |g|) from rounding and (1e-2)^2 from the third derivative: well below 1 %.
        const std::vector<float> w = to_floats(m.model.values), g = to_floats(m.model.grads);
        const double length = norm_of(g);
        const auto loss_at = [&](double e) {
            std::vector<float> moved = w;
            for (size_t i = 0; i < w.size(); ++i) moved[i] = static_cast<float>(w[i] + e * g[i] / length);
            from_floats(m.model.values, moved);
            forward(m.model, m.acts, device().stream);
            loss_forward(m.model, m.acts, device().stream);
            return m.mean_loss();
        };
        const double slope = (loss_at(1e-2) - loss_at(-1e-2)) / 2e-2;
        CHECK(std::abs(slope / length - 1) < 1e-2);
    }
}

TEST_CASE("sizes of the presets are the published ones", "[model]") {
    CHECK(parameter_count(load_config("gpt2")) == 124439808);
    CHECK(parameter_count(load_config("gpt2-medium")) == 354823168);
    CHECK(parameter_count(load_config("gpt2-large")) == 774030080);
    CHECK(parameter_count(load_config("gpt2-xl")) == 1557611200);
    CHECK(parameter_count(load_config("llama-1b")) == 1235814400);
    CHECK(parameter_count(load_config("llama-3b")) == 3212749824);
    CHECK(parameter_count(load_config("llama-8b")) == 8030261248);
    // 6 N for GPT-2 124M (the position embedding multiplies nothing) plus the causal half of attention.
    CHECK(flops_per_token(load_config("gpt2"), 1024) == Approx(6.0 * 123.53e6 + 6.0 * 12 * 768 * 1024).epsilon(0.001));
}

TEST_CASE("a model that does not fit together is refused", "[model]") {
    Config c = small_llama();
    c.K = 4;
    CHECK_THROWS_WITH(check_config(c), ContainsSubstring("6 query heads cannot share 4"));
    c = small_llama();
    c.D = 7;
    CHECK_THROWS_WITH(check_config(c), ContainsSubstring("must be even"));
    CHECK_THROWS_WITH(load_config("gpt5"), ContainsSubstring("use one of tiny, gpt2"));
    Arena a("a"), b("b");
    CHECK_THROWS_WITH(build_model(small_gpt2(), DType::f32, 41, a, b), ContainsSubstring("longer than the 40 positions"));
}
