// test/test_model.cu: whole models against PyTorch and transformers (test/golden/), and against themselves.
//
// The goldens are float64 results rounded to float32 (test/golden/make_golden.py), so what differs from them is our
// float32. How much that may be is measured, not guessed: versions.json has, for every model and measure, how far
// PyTorch's own float32 is from the same goldens.
#include "io/io.h"
#include "json.h"
#include "model/sublayer.h"
#include "models.h"
#include "program.h"

#include <filesystem>
#include <regex>
#include <sstream>

namespace {

const std::string kGolden = "test/golden/";

// PyTorch's float32 and ours have the same number of roundings, but other orders of summation: two draws from one
// distribution. Our largest errors were measured on the CPU device as at most 1.4 times PyTorch's; 4 times leaves room
// for the orders of other devices. Weights after ten steps are another matter, because AdamW divides a gradient by its
// own size, and with it the rounding error of those that are almost 0: measured 4.8 times, allowed 10.
constexpr double kDraws = 4, kDrawsAfterSteps = 10;
double tolerance(const std::string& model, const std::string& measure, double draws = kDraws) {
    const std::string text = read_text_file(kGolden + "versions.json");
    const size_t at = text.find("\"" + measure + "\": ", text.find("\"" + model + "\": {"));
    REQUIRE(at != std::string::npos);
    // On an H100 GPT-2 was off by up to 7 draws, and by 24 after ten steps. It is the one model whose GELU is there
    // cuBLASLt's, and NVIDIA does not say how exact that is.
    if (!device().is_cpu && model == "gpt2") draws *= 3;
    return draws * std::stod(text.substr(at + measure.size() + 4));
}
// A mean of losses. Besides what the logits carry, each is rounded to float32: PyTorch's error may be 0 by luck where
// only one loss was measured, but a tolerance below one rounding would test that luck.
double loss_tolerance(const std::string& model, double loss) {
    return std::max(tolerance(model, "loss_absolute"), kDraws * unit_roundoff(DType::f32) * loss);
}

std::vector<float> floats_of(const SafetensorsReader& file, const std::string& name) { return file.at(name).floats(); }
std::vector<int32_t> integers_of(const SafetensorsReader& file, const std::string& name) {
    const StoredTensor& stored = file.at(name);
    std::vector<int32_t> values(static_cast<size_t>(stored.n()));
    std::copy_n(stored.data, stored.bytes, reinterpret_cast<unsigned char*>(values.data()));
    return values;
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

// GPT-2's key bias adds the same number to all scores of a softmax row: its gradient is exactly 0, and what float32
// computes is rounding noise, which AdamW divides by its own size. PyTorch's own float32 is 3e-4 off there. So that
// third is left out.
std::vector<float> without_key_bias(const Param& param, const Config& c, std::vector<float> values) {
    const std::string& name = param.name;
    if (c.family == Family::gpt2 && name.size() > 16 && name.compare(name.size() - 16, 16, "attn.c_attn.bias") == 0)
        std::fill(values.begin() + c.C, values.begin() + 2 * c.C, 0.0f);
    return values;
}

// Logits against the golden tensor `name` (B, T, V), relative to the largest: a logit near zero is a difference of
// large terms.
void check_logits(const TinyTrainer& m, const std::string& model, const SafetensorsReader& golden,
                  const std::string& name) {
    const std::vector<float> padded = to_floats(m.acts.logits), wanted = floats_of(golden, name);
    std::vector<float> logits;
    for (int64_t n = 0; n < m.acts.B * m.acts.T; ++n) {
        const auto row = padded.begin() + n * m.config.V_padded();
        logits.insert(logits.end(), row, row + m.config.V);
    }
    INFO(model << ": " << name);
    CHECK(largest_difference(logits, wanted) <= tolerance(model, "logits_relative_to_max") * largest(wanted));
}

// The first T tokens of step 0's rows through the weights of a golden folder.
void check_other_logits(const std::string& folder, const Config& config, int64_t T, const std::string& name) {
    const SafetensorsReader golden(kGolden + folder + "/golden.safetensors");
    TinyTrainer m(config, 3, T);
    load_weights(m.model, kGolden + folder);
    const std::vector<int32_t> all = integers_of(golden, "tokens");
    std::vector<int32_t> tokens;
    for (int64_t b = 0; b < 3; ++b) tokens.insert(tokens.end(), all.begin() + b * 18, all.begin() + b * 18 + T);
    m.set_batch(tokens, tokens);
    forward(m.model, m.acts, m.workspace, device().stream);
    check_logits(m, folder, golden, name);
}

void check_golden(const std::string& name) {
    const Config config = load_config(kGolden + name);
    const SafetensorsReader golden(kGolden + name + "/golden.safetensors");
    const int64_t B = 3, T = 17;
    TinyTrainer m(config, B, T);
    load_weights(m.model, kGolden + name);
    const std::vector<int32_t> all = integers_of(golden, "tokens");
    std::vector<int32_t> tokens, targets;
    cut_batch(all, 0, B, T, tokens, targets);
    m.set_batch(tokens, targets);
    m.zero_grads();
    forward(m.model, m.acts, m.workspace, device().stream);
    check_logits(m, name, golden, "logits");

    loss_backward(m.model, m.acts, 1.0f / static_cast<float>(B * T), device().stream);
    const double exact_loss = floats_of(golden, "loss_f64")[0];
    CHECK(std::abs(m.mean_loss() - exact_loss) <= loss_tolerance(name, exact_loss));
    if (!golden.has("losses")) return;

    backward(m.model, m.acts, m.workspace, device().stream);
    for (const Param& param : m.model.params) {
        const std::vector<float> expected = floats_of(golden, "grad." + param.name);
        INFO(name << " gradient of " << param.name);
        CHECK(norm_of_difference(in_file_layout(param, param.grad), expected) <=
              tolerance(name, "grad_relative_norm") * norm_of(expected));
    }

    const std::vector<float> losses = floats_of(golden, "losses"), norms = floats_of(golden, "grad_norms");
    for (int64_t s = 0; s < 10; ++s) {
        cut_batch(all, s, B, T, tokens, targets);
        m.set_batch(tokens, targets);
        const double loss = m.train_step(1.0f / static_cast<float>(B * T), 1e-3, s + 1);
        INFO(name << " step " << s);
        const double exact = losses[static_cast<size_t>(s)];
        CHECK(std::abs(loss - exact) <= loss_tolerance(name, exact));
        CHECK(std::abs(to_floats(m.norm)[0] - norms[static_cast<size_t>(s)]) <= tolerance(name, "grad_norms_absolute"));
    }
    for (const Param& param : m.model.params) {
        INFO(name << " after 10 steps: " << param.name);
        CHECK(largest_difference(without_key_bias(param, config, in_file_layout(param, param.value)),
                                 without_key_bias(param, config, floats_of(golden, "after." + param.name))) <=
              tolerance(name, "after_absolute", kDrawsAfterSteps));
    }
}

// small_models(), and what they lack of what config.json can say.
std::vector<Config> hugging_face_models() {
    std::vector<Config> all = small_models();
    Config biases = small_llama(), dynamic = small_llama(), mistral = small_llama(), windows = small_qwen2();
    biases.qkv_bias = biases.attn_out_bias = biases.mlp_bias = true;
    biases.rope_scaling = {.factor = 4, .kind = RopeKind::linear};
    dynamic.T_max = 10;  // fewer than the tests' 13 tokens
    dynamic.rope_scaling = {.factor = 2, .original_max_position = 10, .kind = RopeKind::dynamic};
    mistral.mistral = true;  // without a window
    windows.window = 5, windows.n_full_layers = 1;
    for (const Config& config : {biases, dynamic, mistral, windows}) all.push_back(config);
    mistral.window = 5;
    all.push_back(mistral);
    Config qwen3 = small_qwen3();
    qwen3.qkv_bias = qwen3.attn_out_bias = true;
    all.push_back(qwen3);
    return all;
}

// One whose every linear layer has multiples of 16.
Config for_fp8(Config c) {
    c.C = 32, c.F = 48;
    if (c.attention == "mla") c.H = c.K = 2, c.D = 32, c.D_rope = 16, c.D_v = 16, c.kv_rank = 32;
    else c.H = 2, c.D = 16, c.K = c.attention == "mfa" ? 1 : 2;
    if (c.q_rank > 0) c.q_rank = 32;
    return c;
}

}  // namespace

TEST_CASE("GPT-2 equals transformers: logits, loss, gradients, ten AdamW steps", "[model][golden]") {
    check_golden("gpt2");
}
TEST_CASE("LLaMA with GQA and llama3 RoPE scaling equals transformers", "[model][golden]") { check_golden("llama"); }
TEST_CASE("LLaMA with all biases and linear RoPE scaling equals transformers", "[model][golden]") {
    check_golden("llama_biases");
}
TEST_CASE("LLaMA with dynamic RoPE scaling equals transformers beyond its positions and below", "[model][golden]") {
    check_golden("llama_dynamic");  // 17 tokens, 12 positions
    check_other_logits("llama_dynamic", load_config(kGolden + "llama_dynamic"), 9, "short_logits");
}
TEST_CASE("Mistral with and without its sliding window equals transformers", "[model][golden]") {
    check_golden("mistral");
    Config config = load_config(kGolden + "mistral");
    CHECK(config.window == 5);
    config.window = 0;
    check_other_logits("mistral", config, 17, "logits_without_window");
}
TEST_CASE("Qwen2 equals transformers", "[model][golden]") { check_golden("qwen2"); }
TEST_CASE("Qwen2 with a sliding window in its later layers equals transformers", "[model][golden]") {
    check_golden("qwen2_window");
}
TEST_CASE("Qwen3 equals transformers", "[model][golden]") { check_golden("qwen3"); }
TEST_CASE("DeepSeek-V3 without experts, with YaRN, equals transformers", "[model][golden]") {
    check_golden("deepseek");
}
TEST_CASE("DeepSeek without a query latent equals transformers", "[model][golden]") { check_golden("deepseek_lite"); }
TEST_CASE("MFA equals its PyTorch module", "[model][golden]") { check_golden("mfa"); }
TEST_CASE("LLaMA with a tied head and bf16 weights equals transformers", "[model][golden]") {
    check_golden("llama_tied");
}

TEST_CASE("a sharded Hugging Face folder gives the same weights as one file", "[model][golden]") {
    const Config config = load_config(kGolden + "llama");
    TinyTrainer whole(config, 1, 8), sharded(load_config(kGolden + "llama_sharded"), 1, 8);
    load_weights(whole.model, kGolden + "llama");
    load_weights(sharded.model, kGolden + "llama_sharded");
    CHECK(to_floats(whole.model.weights) == to_floats(sharded.model.weights));
    CHECK(to_floats(whole.model.rope_table) == to_floats(sharded.model.rope_table));  // older config.json, same meaning
}

TEST_CASE("targets that are ignored count neither in the loss nor in the gradient", "[model][golden]") {
    for (const std::string name : {"gpt2", "llama"}) {
        const SafetensorsReader golden(kGolden + name + "/golden.safetensors");
        TinyTrainer m(load_config(kGolden + name), 3, 17);
        load_weights(m.model, kGolden + name);
        std::vector<int32_t> tokens, targets;
        cut_batch(integers_of(golden, "tokens"), 0, 3, 17, tokens, targets);
        targets = integers_of(golden, "ignored_targets");
        const auto n_counted = std::count_if(targets.begin(), targets.end(), [](int32_t t) { return t >= 0; });
        REQUIRE(n_counted < 51);
        m.set_batch(tokens, targets);
        m.zero_grads();
        m.compute_gradients(1.0f / static_cast<float>(n_counted));
        const double exact_loss = floats_of(golden, "ignored_loss")[0];
        CHECK(std::abs(m.mean_loss() - exact_loss) <= loss_tolerance(name, exact_loss));
        int n_compared = 0;
        for (const Param& param : m.model.params) {
            if (!golden.has("ignored_grad." + param.name)) continue;
            const std::vector<float> expected = floats_of(golden, "ignored_grad." + param.name);
            CHECK(norm_of_difference(in_file_layout(param, param.grad), expected) <=
                  tolerance(name, "grad_relative_norm") * norm_of(expected));
            ++n_compared;
        }
        CHECK(n_compared == 2);
    }
}

TEST_CASE("what we save we load again bit for bit", "[model]") {
    for (const Config& config : hugging_face_models()) {
        TempFolder folder;
        TinyTrainer a(config, 1, 8), b(config, 1, 8);
        init_weights(a.model, 5);
        save_model(a.model, folder.path);
        b.config = load_config(folder.path);
        CHECK(config_to_json(b.config) == config_to_json(config));
        load_weights(b.model, folder.path);
        CHECK(to_floats(a.model.weights) == to_floats(b.model.weights));

        const TempFolder original;  // GPT-2's original files have shorter names, and so has what AutoModel saves
        const SafetensorsReader saved(folder.path);
        const std::string prefix = config.family == Family::gpt2 ? "transformer." : "model.";
        std::vector<TensorToStore> tensors;
        for (const auto& [name, tensor] : saved.tensors())
            tensors.push_back({name.starts_with(prefix) ? name.substr(prefix.size()) : name, tensor.dtype, tensor.shape,
                               [from = tensor](void* bytes) { std::memcpy(bytes, from.data, from.bytes); }});
        write_safetensors(original / "model.safetensors", tensors);
        init_weights(b.model, 6);
        load_weights(b.model, original.path);
        CHECK(to_floats(a.model.weights) == to_floats(b.model.weights));

        const std::string path = folder.path + "/model.safetensors";
        std::string bytes = slurp(path);
        bytes.back() ^= 1;  // of the last tensor's last number
        spit(path, bytes);
        CHECK_THROWS_WITH(load_weights(b.model, folder.path), ContainsSubstring("is broken: its bytes have checksum"));
    }
}

TEST_CASE("a head in the file of a model whose head is the embedding must be a copy of it, or stand for it",
          "[model]") {
    const TempFolder folder;
    TinyTrainer m(load_config(kGolden + "llama_tied"), 1, 8);
    load_weights(m.model, kGolden + "llama_tied");
    const std::vector<float> weights = to_floats(m.model.weights);
    const SafetensorsReader saved(kGolden + "llama_tied");
    const std::string embedding = "model.embed_tokens.weight";
    const auto load_with_head = [&](unsigned char change, bool with_embedding) {
        std::vector<TensorToStore> tensors;
        const auto store = [&](const std::string& name, const StoredTensor& from, unsigned char its_change) {
            tensors.push_back({name, from.dtype, from.shape, [&from, its_change](void* bytes) {
                                   std::memcpy(bytes, from.data, from.bytes);
                                   static_cast<unsigned char*>(bytes)[from.bytes - 1] ^= its_change;
                               }});
        };
        for (const auto& [name, tensor] : saved.tensors())
            if (with_embedding || name != embedding) store(name, tensor, 0);
        store("lm_head.weight", saved.at(embedding), change);
        write_safetensors(folder.path + "/model.safetensors", tensors);
        init_weights(m.model, 6);
        load_weights(m.model, folder.path);
        CHECK(to_floats(m.model.weights) == weights);
    };
    load_with_head(0, true);
    CHECK_THROWS_WITH(load_with_head(1, true), ContainsSubstring("'lm_head.weight' is not '" + embedding + "'"));
    load_with_head(0, false);
}

TEST_CASE("a name or a word of a Hugging Face folder with a line end is told in one line", "[model]") {
    const TempFolder folder;
    const SafetensorsReader saved(kGolden + "llama_tied");
    std::vector<TensorToStore> tensors = {{"ex\ntra", "F32", {0}, [](void*) {}}};
    for (const auto& [name, tensor] : saved.tensors())
        tensors.push_back({name, tensor.dtype, tensor.shape,
                           [from = tensor](void* bytes) { std::memcpy(bytes, from.data, from.bytes); }});
    write_safetensors(folder.path + "/model.safetensors", tensors);
    TinyTrainer m(load_config(kGolden + "llama_tied"), 1, 8);
    CHECK(one_line_with(error_of([&] { load_weights(m.model, folder.path); }), "tensor \"ex\\ntra\" belongs to no"));
    // Buffers of old files beside the weights.
    for (const char* name : {"h.0.attn.bias", "h.0.attn.masked_bias", "model.layers.0.self_attn.rotary_emb.inv_freq"}) {
        tensors[0].name = name;
        write_safetensors(folder.path + "/model.safetensors", tensors);
        CHECK(error_of([&] { load_weights(m.model, folder.path); }) == "");
    }
    const std::string config = read_text_file(kGolden + "llama_biases/config.json");
    for (const char* word : {"\"llama\"", "\"silu\"", "\"linear\""}) {
        write_text_file(folder.path + "/config.json", replaced(config, word, "\"a\\nb\""));
        CHECK(one_line_with(error_of([&] { load_config(folder.path); }), "\"a\\nb\"", "not supported"));
    }
}

TEST_CASE("transformers gives the same logits for what we save", "[model][export]") {
    TempFolder all;
    std::string folders;
    for (const Config& config : hugging_face_models()) {
        if (config.attention == "mfa") continue;  // transformers has none
        const std::string folder = concat(all.path, "/", folders.size());
        TinyTrainer m(config, 2, 13);
        init_weights(m.model, 5);
        save_model(m.model, folder);
        const std::vector<int32_t> tokens = random_tokens(26, config.V, 3);
        m.set_batch(tokens, tokens);
        forward(m.model, m.acts, m.workspace, device().stream);
        const auto fill_logits = [&](void* bytes) {
            const std::vector<float> padded = to_floats(m.acts.logits);
            for (int64_t n = 0; n < 26; ++n)
                std::copy_n(padded.begin() + n * config.V_padded(), config.V,
                            static_cast<float*>(bytes) + n * config.V);
        };
        write_safetensors(folder + "/logits.safetensors",
                          {{"tokens",
                            "I32",
                            {2, 13},
                            [&](void* bytes) { std::copy_n(tokens.data(), 26, static_cast<int32_t*>(bytes)); }},
                           {"logits", "F32", {2, 13, config.V}, fill_logits}});
        folders += folder + " ";
    }
    const Outcome outcome = run_python("test/golden/check_export.py " + folders);
    if (outcome.status == 77 || outcome.status == 127)
        SKIP_TEST("no Python with torch and transformers (set LLM_PYTHON)");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
    CHECK(count(outcome.out, "check_export: ok") == hugging_face_models().size() - 1);  // all but MFA
}

TEST_CASE("micro-batches of 2 add up to a batch of 8", "[model]") {
    for (const Config& config : small_models()) {
        const int64_t T = 11;
        const std::vector<int32_t> tokens = random_tokens(8 * T, config.V, 1),
                                   targets = random_tokens(8 * T, config.V, 2);
        TinyTrainer whole(config, 8, T), parts(config, 2, T);
        init_weights(whole.model, 9);
        init_weights(parts.model, 9);
        const float dloss = 1.0f / static_cast<float>(8 * T);
        whole.set_batch(tokens, targets);
        whole.zero_grads();
        whole.compute_gradients(dloss);
        parts.zero_grads();
        for (int64_t b = 0; b < 8; b += 2) {
            parts.set_batch({tokens.begin() + b * T, tokens.begin() + (b + 2) * T},
                            {targets.begin() + b * T, targets.begin() + (b + 2) * T});
            parts.compute_gradients(dloss);
        }
        const std::vector<float> a = to_floats(whole.model.grads), b = to_floats(parts.model.grads);
        // Each row's numbers are the same bits in both; only the sums over the 88 tokens are grouped in another way.
        CHECK(largest_difference(a, b) <= 2 * sum_error(8 * T) * largest(a));
    }
}

TEST_CASE("the same run twice gives the same bits", "[model]") {
    for (const Config& config : small_models()) {
        std::vector<float> first;
        for (int run = 0; run < 2; ++run) {
            TinyTrainer m(config, 3, 13);
            init_weights(m.model, 4);
            m.set_batch(random_tokens(39, config.V, 1), random_tokens(39, config.V, 2));
            for (int64_t t = 1; t <= 3; ++t) m.train_step(1.0f / 39, 1e-2, t);
            const std::vector<float> weights = to_floats(m.model.weights);
            if (run == 0) first = weights;
            else CHECK(weights == first);
        }
    }
}

TEST_CASE("forward without a backward gives the same logits in less memory", "[model]") {
    for (Config config : small_models()) {
        config.L = 5;
        TinyTrainer training(config, 2, 13);
        Arena arena("inference");
        take_forward_activations(training.model, 2, 13, 2 * 13, arena);
        take_workspace(training.model, 2, 13, false, arena);
        arena.reserve();
        Activations acts = take_forward_activations(training.model, 2, 13, 2 * 13, arena);
        const Workspace workspace = take_workspace(training.model, 2, 13, false, arena);
        const std::vector<int32_t> tokens = random_tokens(26, config.V, 1);
        init_weights(training.model, 4);
        training.set_batch(tokens, tokens);
        copy_to_device(acts.tokens, tokens.data());
        forward(training.model, training.acts, training.workspace, device().stream);
        forward(training.model, acts, workspace, device().stream);
        CHECK(to_floats(training.acts.logits) == to_floats(acts.logits));
        CHECK(arena.bytes() < training.activations.bytes() / 3);
    }
}

TEST_CASE("recomputation gives the same weights bit for bit, in less memory", "[model][recompute]") {
    for (Config config : small_models()) {
        config.L = 5;
        const int64_t B = 2, T = 13;
        for (const DType dtype : {DType::f32, DType::bf16}) {
            std::vector<float> expected;
            size_t most = 0;
            for (const std::string name : {"none", "full", "2", "3", "4", "5", "7", "selective"}) {
                INFO("--recompute " << name << ", " << dtype_name(dtype));
                TinyTrainer m(config, B, T, {dtype, DType::f32, dtype != DType::f32}, parse_recompute(name));
                init_weights(m.model, 4);
                // The gradients of each step, and at the end the weights: one step shows where a bit differs.
                std::vector<float> bits;
                for (int64_t t = 1; t <= (dtype == DType::f32 ? 4 : 2); ++t) {
                    m.set_batch(random_tokens(B * T, config.V, static_cast<uint64_t>(t)),
                                random_tokens(B * T, config.V, 2));
                    m.train_step(1.0f / static_cast<float>(B * T), 1e-2, t);
                    const std::vector<float> grads = to_floats(m.model.grads);
                    bits.insert(bits.end(), grads.begin(), grads.end());
                }
                const std::vector<float> weights = to_floats(m.model.all_weights(1).values);
                bits.insert(bits.end(), weights.begin(), weights.end());
                if (name == "none") {
                    expected = bits, most = m.activations.bytes();
                    continue;
                }
                CHECK(bits == expected);
                if (name == "5" || name == "7") CHECK(m.activations.bytes() == most);  // all five blocks in one segment
                else CHECK(m.activations.bytes() < most);
            }
        }
    }
    // fp8 with delayed scaling: the forward that is run again finds the histories as the first one did.
    for (Config config : {small_llama(), small_mla(16), small_mfa()}) {
        if (!has_fp8()) break;
        config = for_fp8(config);
        config.L = 5;
        std::vector<float> weights, histories;
        for (const std::string name : {"none", "full", "2", "selective"}) {
            INFO("--recompute " << name << ", fp8");
            TinyTrainer m(config, 2, 16, {DType::bf16, DType::f32, true, Fp8Recipe::delayed}, parse_recompute(name));
            init_weights(m.model, 4);
            for (int64_t t = 1; t <= 3; ++t) {
                m.set_batch(random_tokens(32, config.V, static_cast<uint64_t>(t)), random_tokens(32, config.V, 2));
                m.train_step(1.0f / 32, 1e-2, t);
            }
            if (name == "none") {
                weights = to_floats(m.model.masters), histories = to_floats(m.model.fp8_states);
                continue;
            }
            CHECK(to_floats(m.model.masters) == weights);
            CHECK(to_floats(m.model.fp8_states) == histories);
        }
    }
    CHECK(parse_recompute("1e3").every == 1000);
    for (const std::string wrong : {"", "0", "-1", "2x", "some", "0e5"})
        CHECK_THROWS_WITH(parse_recompute(wrong),
                          ContainsSubstring("use none, selective, full, or a number of blocks"));
}

// A 16-bit forward and backward against the float32 one on the same rounded weights.
TEST_CASE("16-bit gradients agree with float32 ones, in 16 and in 32 bits", "[model][precision]") {
    for (const Config& config : small_models()) {
        const int64_t B = 2, T = 13;
        const std::vector<int32_t> tokens = random_tokens(B * T, config.V, 1),
                                   targets = random_tokens(B * T, config.V, 2);
        for (const DType dtype : {DType::bf16, DType::f16}) {
            TinyTrainer exact(config, B, T);
            const auto run = [&](TinyTrainer& m, float dloss) {
                m.set_batch(tokens, targets);
                m.zero_grads();
                m.compute_gradients(dloss);
                std::vector<float> grads = to_floats(m.model.grads);
                for (float& g : grads) g /= dloss;
                return grads;
            };
            for (const DType grad_dtype : {DType::f32, dtype}) {
                TinyTrainer half(config, B, T, {dtype, grad_dtype, true});
                init_weights(half.model, 3);
                from_floats(exact.model.weights, to_floats(half.model.weights));
                const std::vector<float> a = run(half, 8.0f), b = run(exact, 8.0f);
                INFO(dtype_name(dtype) << " with gradients in " << dtype_name(grad_dtype));
                CHECK(norm_of_difference(a, b) <= model_error(dtype) * norm_of(b));
                CHECK(std::abs(half.mean_loss() - exact.mean_loss()) <= model_error(dtype) * exact.mean_loss());
            }
        }
    }
}

// An evaluation between two steps leaves no trace in the histories of delayed scaling.
TEST_CASE("evaluation does not change fp8 training", "[model][precision]") {
    if (!has_fp8()) SKIP_TEST(kNeedsFp8);
    const Config config = for_fp8(small_llama());
    std::vector<float> weights;
    for (const bool evaluate : {false, true}) {
        TinyTrainer m(config, 2, 16, {DType::bf16, DType::f32, true, Fp8Recipe::delayed});
        init_weights(m.model, 4);
        for (int64_t t = 1; t <= 4; ++t) {
            const std::vector<int32_t> tokens = random_tokens(32, config.V, static_cast<uint64_t>(t));
            if (evaluate) {
                m.set_batch(random_tokens(32, config.V, 77), tokens);
                quantise_weights(m.model, device().stream);
                forward(m.model, m.acts, m.workspace, device().stream, false);
            }
            m.set_batch(tokens, tokens);
            m.train_step(1.0f / 32, 1e-2, t);
        }
        if (!evaluate) weights = to_floats(m.model.masters);
        else CHECK(to_floats(m.model.masters) == weights);
    }
}

TEST_CASE("masters hold the exact weights, values the rounded ones", "[model][precision]") {
    for (const Config& config : small_models()) {
        TempFolder folder;
        TinyTrainer full(config, 1, 8), half(config, 1, 8, {DType::bf16, DType::bf16, true}),
            again(config, 1, 8, {DType::f16, DType::f32, true});
        init_weights(full.model, 5);
        init_weights(half.model, 5);
        CHECK(to_floats(half.model.masters) == to_floats(full.model.weights));
        std::vector<float> rounded = to_floats(full.model.weights);
        for (float& w : rounded) w = __bfloat162float(__float2bfloat16(w));
        CHECK(to_floats(half.model.weights) == rounded);
        save_model(half.model, folder.path);  // in float32
        load_weights(again.model, folder.path);
        CHECK(to_floats(again.model.masters) == to_floats(full.model.weights));
    }
    Arena a("a"), b("b"), c("c");
    CHECK_THROWS_WITH(build_model(small_gpt2(), {DType::bf16, DType::f16, true}, 8, a, b, c),
                      ContainsSubstring("in f32 or as the model"));
    CHECK_THROWS_WITH(build_model(small_gpt2(), {DType::f32, DType::f32, true}, 8, a, b, c),
                      ContainsSubstring("its own master weights"));
}

TEST_CASE("gradients of the whole model equal finite differences of its loss", "[model]") {
    for (const Config& config : small_models()) {
        const int64_t B = 2, T = 9;
        TinyTrainer m(config, B, T);
        init_weights(m.model, 11);
        const std::vector<int32_t> tokens = random_tokens(B * T, config.V, 1),
                                   targets = random_tokens(B * T, config.V, 2);
        m.set_batch(tokens, targets);
        m.zero_grads();
        m.compute_gradients(1.0f / static_cast<float>(B * T));
        // Along the gradient g itself: d/de loss(w + e g/|g|) = |g|. In float32 a step of 1e-2 has a relative error of
        // about 1e-7 loss / (1e-2 |g|) by rounding and (1e-2)^2 by the third derivative: well below 1 %.
        const std::vector<float> w = to_floats(m.model.weights), g = to_floats(m.model.grads);
        const double length = norm_of(g);
        const auto loss_at = [&](double e) {
            std::vector<float> moved = w;
            for (size_t i = 0; i < w.size(); ++i) moved[i] = static_cast<float>(w[i] + e * g[i] / length);
            from_floats(m.model.weights, moved);
            forward(m.model, m.acts, m.workspace, device().stream);
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
    CHECK(parameter_count(load_config("qwen2.5-0.5b")) == 494032768);
    CHECK(parameter_count(load_config("qwen2.5-1.5b")) == 1543714304);
    CHECK(parameter_count(load_config("qwen2.5-7b")) == 7615616512);
    CHECK(parameter_count(load_config("qwen3-0.6b")) == 596049920);
    CHECK(parameter_count(load_config("qwen3-1.7b")) == 1720574976);
    CHECK(parameter_count(load_config("qwen3-4b")) == 4022468096);
    CHECK(parameter_count(load_config("qwen3-8b")) == 8190735360);
    // 6 N for GPT-2 124M (the position embedding multiplies nothing) plus the causal half of attention.
    CHECK(flops_per_token(load_config("gpt2"), 1024) == Approx(6.0 * 123.53e6 + 6.0 * 12 * 768 * 1024).epsilon(0.001));
}

TEST_CASE("parameter_count counts what is placed, flops_per_token what multiplies", "[model]") {
    std::vector<Config> configs = hugging_face_models();
    configs.push_back(small_qwen2());
    configs.back().window = 3, configs.back().n_full_layers = 28;  // more layers than it has
    configs.push_back(small_qwen2());
    configs.back().window = 12;  // longer than the text
    for (const Config& config : configs) {
        Arena weights("values"), grads("grads"), masters("masters");
        const Model model = build_model(config, {}, 8, weights, grads, masters);
        int64_t n = 0, multiplying = config.tied ? config.V * config.C : 0;  // a tied head multiplies by the embedding
        for (const Param& param : model.params) {
            const int64_t rows = param.value.shape[0] - param.padded_rows,
                          param_n = rows * (param.value.n() / param.value.shape[0]);
            n += param_n;
            const bool lookup = param.name.find("wte") != std::string::npos ||
                                param.name.find("wpe") != std::string::npos ||
                                param.name.find("embed_tokens") != std::string::npos;
            if (param.value.ndim == 2 && !lookup) multiplying += param_n;
        }
        CHECK(parameter_count(config) == n);
        // Scores and values: 2 H (D + Dv) per pair, and twice that backward. A token's pair with itself counts half.
        double pairs = 0;
        for (int64_t l = 0; l < config.L; ++l)
            for (int64_t t = 0; t < 8; ++t) {
                const int64_t window = config.window == 0 || l < config.n_full_layers ? 8 : config.window;
                pairs += static_cast<double>(std::min(t, window) + std::min(t + 1, window)) / 2;
            }
        const double attention = 6 * static_cast<double>(config.H * (config.D + config.value_D())) * pairs / 8;
        CHECK(flops_per_token(config, 8) == Approx(static_cast<double>(6 * multiplying) + attention).epsilon(1e-12));
    }
}

// The tests that go through small_models(), and those of whole runs, have every part of the tables.
TEST_CASE("each attention and feed-forward is in a preset, read as it was saved, and in a model of the tests",
          "[model]") {
    const TempFolder folder;
    std::set<std::string> in_presets, in_tests;
    for (const std::string& name : preset_names()) {
        INFO(name);
        const Config& preset = *find_preset(name);
        in_presets.insert({preset.attention, preset.feed_forward});
        write_text_file(folder.path + "/config.json", config_to_json(preset));
        const Config read = load_config(folder.path);
        CHECK(read.attention == preset.attention);
        CHECK(read.feed_forward == preset.feed_forward);
        CHECK(config_to_json(read) == config_to_json(preset));
    }
    for (const Config& config : small_models()) in_tests.insert({config.attention, config.feed_forward});
    for (const auto& table : {attention_table(), feed_forward_table()})
        for (const SubLayer* layer : table) {
            INFO(layer->name << ": a preset has it (model/config.cu), and small_models() (test/models.h)");
            CHECK(in_presets.count(layer->name) == 1);
            CHECK(in_tests.count(layer->name) == 1);
        }
    Config unknown = small_llama();
    unknown.attention = "other";
    CHECK_THROWS_WITH(config_to_json(unknown), ContainsSubstring("the attention 'other' has no model_type"));
}

TEST_CASE("configurations of transformers: what is not supported is said", "[model]") {
    TempFolder folder;
    const auto load = [&](const std::string& golden, const std::string& from, const std::string& to) {
        const std::string text = read_text_file(kGolden + golden + "/config.json");
        write_text_file(folder.path + "/config.json", replaced(text, from, to));
        return load_config(folder.path);
    };
    CHECK_THROWS_WITH(load("deepseek", "\"first_k_dense_replace\": 2", "\"first_k_dense_replace\": 1"),
                      ContainsSubstring("layers from 1 on have experts"));
    CHECK_THROWS_WITH(load("deepseek", "\"first_k_dense_replace\": 2", "\"first_k_dense_replace\": 0"),
                      ContainsSubstring("which are not there yet"));
    CHECK_THROWS_WITH(load("deepseek", "\"attention_bias\": false", "\"attention_bias\": true"),
                      ContainsSubstring("attention_bias"));
    CHECK_THROWS_WITH(load("deepseek", "\"num_key_value_heads\": 3", "\"num_key_value_heads\": 1"),
                      ContainsSubstring("every head has its own key"));
    CHECK_THROWS_WITH(load("qwen2_window", "\"layer_types\": [", "\"layer_types\": [ \"sliding_attention\","),
                      ContainsSubstring("\"layer_types\" is not a list of 3 layers"));
    CHECK_THROWS_WITH(load("qwen2_window", "\"full_attention\",\n    \"sliding_attention\"",
                           "\"sliding_attention\",\n    \"full_attention\""),
                      ContainsSubstring("only as full_attention in the first layers"));
    CHECK_THROWS_WITH(load("qwen2_window", "\"full_attention\"", "\"chunked_attention\""),
                      ContainsSubstring("only as full_attention in the first layers"));
    CHECK_THROWS_WITH(load("qwen2", "\"use_cache\"", "\"mlp_bias\": true, \"use_cache\""),
                      ContainsSubstring("mlp_bias is supported for llama only, not for qwen2"));
    CHECK_THROWS_WITH(load("mfa", "\"use_cache\"", "\"use_sliding_window\": true, \"use_cache\""),
                      ContainsSubstring("use_sliding_window is not supported for mfa"));
    CHECK_THROWS_WITH(load("qwen2", "\"silu\"", "\"gelu\""), ContainsSubstring("hidden_act \"gelu\""));
    CHECK(load("qwen2", "\"silu\"", "\"swish\"").feed_forward == "swiglu");  // another name of it
    for (const char* name : {"\"gelu_pytorch_tanh\"", "\"gelu_fast\""})
        CHECK(load("gpt2", "\"gelu_new\"", name).feed_forward == "gelu");
    CHECK_THROWS_WITH(load("gpt2", "\"gelu_new\"", "\"gelu\""), ContainsSubstring("supports \"gelu_new\""));
    // Sizes that are possible one by one, and not together: 64 bits do not hold what follows from them, or the host the
    // lists of the layers.
    CHECK_THROWS_WITH(load("gpt2", "\"n_inner\": null", "\"n_inner\": 2147483648"),
                      ContainsSubstring("\"n_inner\" is 2147483648, expected a whole number from 1 to 2147483647"));
    CHECK_THROWS_WITH(
        load("gpt2", "\"n_inner\": null,\n  \"n_layer\": 2", "\"n_inner\": 2147483647,\n  \"n_layer\": 65536"),
        ContainsSubstring("2^50 parameters"));
    CHECK_THROWS_WITH(load("gpt2", "\"n_layer\": 2", "\"n_layer\": 65537"), ContainsSubstring("65537 layers"));
    CHECK_THROWS_WITH(load("llama_biases", "\"linear\"", "\"longrope\""),
                      ContainsSubstring("rope_type \"longrope\" is not supported"));
    CHECK_THROWS_WITH(load("llama", "\"rope_parameters\": {", "\"rope_parameters\": {\"full_attention\": {},"),
                      ContainsSubstring("for each kind of layers is not supported"));
    CHECK_THROWS_WITH(load("llama_biases", "\"factor\": 4.0,", ""), ContainsSubstring("linear needs a \"factor\""));
    CHECK_THROWS_WITH(load("llama_biases", "\"factor\"", "\"partial_rotary_factor\": 0.5, \"factor\""),
                      ContainsSubstring("partial_rotary_factor is not supported"));
    CHECK_THROWS_WITH(load("llama", "\"high_freq_factor\": 4.0", "\"high_freq_factor\": 1"),
                      ContainsSubstring("config.json: low_freq_factor 1 must be below high_freq_factor 1"));
    CHECK_THROWS_WITH(load("deepseek", "\"beta_slow\": 0.5", "\"beta_slow\": 40"),
                      ContainsSubstring("config.json: beta_slow 40 must be below beta_fast 4"));
    CHECK_THROWS_WITH(load("deepseek", "\"yarn\"", "\"linear\""),
                      ContainsSubstring("mscale_all_dim is supported for rope_type yarn only"));
    CHECK(load("llama_biases", "\"factor\"", "\"mscale_all_dim\": 0.8, \"factor\"").rope_scaling.factor == 4);
    const Config with_factor = load("deepseek", "\"mscale\"", "\"attention_factor\": 1.5, \"mscale\"");
    CHECK(rope_amplitude(with_factor.rope_scaling) == 1.5);
    CHECK_THAT(config_to_json(with_factor), ContainsSubstring("\"attention_factor\": 1.5"));
    for (const char* value : {"false", "null"})  // transformers takes null for false here
        CHECK_THROWS_WITH(load("deepseek", "\"mscale\"", concat("\"truncate\": ", value, ", \"mscale\"")),
                          ContainsSubstring("truncate is supported only where it is true"));
    for (const char* value : {"false", "null"})  // and here
        for (const std::string golden : {"gpt2", "qwen2", "deepseek"})
            CHECK_THROWS_WITH(load(golden, "\"use_cache\"", concat("\"is_causal\": ", value, ", \"use_cache\"")),
                              ContainsSubstring("is_causal is not true"));
    CHECK(load("qwen2", "\"use_cache\"", "\"is_causal\": true, \"use_cache\"").L == 2);
    const auto with_layers = [&](const std::string& golden, const std::string& layers) {
        return load(golden, "\"use_cache\"", "\"per_layer_config\": " + layers + ", \"use_cache\"");
    };
    for (const std::string golden : {"gpt2", "mistral", "deepseek"}) {
        CHECK_THROWS_WITH(with_layers(golden, R"({"0": {"sliding_window": null}})"),
                          ContainsSubstring("config.json: per_layer_config is not supported"));
        for (const char* none : {"{}", "null"}) CHECK(with_layers(golden, none).L == 2);
    }
    for (const char* zero : {"0", "0.0"})  // as if it were not there
        CHECK(load("deepseek", "\"mscale_all_dim\": 0.8", concat("\"mscale_all_dim\": ", zero))
                  .rope_scaling.mscale_all_dim == 0);
    CHECK_THROWS_WITH(load("llama_biases", "\"use_cache\"", "\"partial_rotary_factor\": 0.5, \"use_cache\""),
                      ContainsSubstring("partial_rotary_factor is not supported"));
    const std::string interleave = "\"rope_interleave\": ";  // here null is false, too, and a missing key is true
    CHECK(load("deepseek", interleave + "true", interleave + "null").rope_pairs == RopePairs::halves);
    CHECK(load("deepseek_lite", interleave + "false,", "").rope_pairs == RopePairs::neighbours);
    CHECK_THROWS_WITH(load("mfa", "\"num_key_value_heads\": 1", "\"num_key_value_heads\": 3"),
                      ContainsSubstring("MFA has one key/value head"));
    // A missing key has the default of transformers' class; null means that there is none.
    CHECK(load("mistral", "\"sliding_window\": 5,", "").window == 4096);
    CHECK(load("mistral", "\"sliding_window\": 5,", "\"sliding_window\": null,").window == 0);
    // Ministral is a Mistral with layer_types.
    const auto mistral_with = [&](const std::string& first, const std::string& second) {
        return load("mistral", "\"use_cache\"",
                    concat("\"layer_types\": [\"", first, "_attention\", \"", second, "_attention\"], \"use_cache\""));
    };
    CHECK(mistral_with("sliding", "sliding").window == 5);
    CHECK(mistral_with("full", "full").window == 0);
    CHECK_THROWS_WITH(mistral_with("full", "sliding"), ContainsSubstring("only where all are full_attention"));
    CHECK_THROWS_WITH(mistral_with("chunked", "chunked"), ContainsSubstring("only where all are full_attention"));
    CHECK(load("qwen2_window", "\"use_sliding_window\": true", "\"use_sliding_window\": false").window == 0);
    CHECK(load("qwen3", "\"head_dim\": 12,", "").D == 128);
    const auto with_sizes_alone = [&](const std::string& type, const std::string& more) {
        write_text_file(
            folder.path + "/config.json",
            concat("{\"model_type\": \"", type, "\", \"vocab_size\": 300, \"hidden_size\": 128, ",
                   "\"intermediate_size\": 96, \"num_hidden_layers\": 30, \"num_attention_heads\": 64", more, "}"));
        return load_config(folder.path);
    };
    const std::string latents = R"(, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 30)";
    const struct {
        const char* type;
        int64_t T_max, K, D, window;
        std::string more = "";
    } defaults[] = {{"llama", 2048, 64, 2, 0},
                    {"mistral", 131072, 8, 2, 4096},
                    {"qwen2", 32768, 32, 2, 0},
                    {"qwen3", 32768, 32, 128, 0},
                    {"deepseek_v2", 2048, 64, 12, 0, latents},
                    {"deepseek_v3", 4096, 64, 12, 0, latents}};
    for (const auto& [type, T_max, K, D, window, more] : defaults) {
        INFO(type);
        const Config c = with_sizes_alone(type, more);
        CHECK((c.T_max == T_max && c.K == K && c.D == D && c.window == window && !c.tied));
        CHECK((c.norm_eps == 1e-6 && c.init_std == 0.02 && c.rope_base == 10000 && !c.rope_scaling.acts()));
    }
    const Config qwen2 = with_sizes_alone("qwen2", R"(, "use_sliding_window": true)");
    CHECK((qwen2.window == 4096 && qwen2.n_full_layers == 28));
    CHECK(load("qwen2", "\"num_key_value_heads\": 1,", "\"num_key_value_heads\": null,").K == 5);
    // Of the older and the newer key the older one counts, unless there is nothing in it.
    const std::string older = "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 3.5}, \"use_cache\"";
    CHECK(load("llama", "\"use_cache\"", older).rope_scaling.factor == 3.5);
    CHECK(load("llama", "\"use_cache\"", "\"rope_scaling\": {}, \"use_cache\"").rope_scaling.factor == 8);
    const std::string original = "\"original_max_position_embeddings\"";
    CHECK(load("llama", original, "\"other\"").rope_scaling.original_max_position == 1024);
    CHECK(load("llama", "\"use_cache\"", original + ": 64, \"use_cache\"").rope_scaling.original_max_position == 64);
    // Before transformers wrote layer_types, max_window_layers alone said where the windows begin.
    CHECK(load("qwen2_window", "\"layer_types\"", "\"other\"").n_full_layers == 1);
    // A DeepSeek-V2 config without experts is a V3 one.
    const Config v3 = load_config(kGolden + "deepseek"), v2 = load("deepseek", "\"deepseek_v3\"", "\"deepseek_v2\"");
    CHECK(config_to_json(v2) == config_to_json(v3));
}

TEST_CASE("each model_type that is read is in doc/models.md, and a golden folder has it", "[model][docs]") {
    const TempFolder folder;
    write_text_file(folder / "config.json", R"({"model_type": "other"})");
    const std::string error = error_of([&] { load_config(folder.path); }), before = "is not supported, only one of ";
    REQUIRE(one_line_with(error, "\"other\" " + before));
    std::istringstream names(error.substr(error.find(before) + before.size()));
    const std::string page = read_text_file("doc/models.md"), from = page.substr(page.find("The `model_type` of a "));
    const std::string paragraph = from.substr(0, from.find("\n\n"));
    std::set<std::string> in_goldens = {"deepseek_v2"};  // without experts it is deepseek_v3
    for (const auto& entry : std::filesystem::directory_iterator(kGolden)) {
        const std::string path = entry.path().string() + "/config.json";
        if (std::filesystem::exists(path))
            in_goldens.insert(as<std::string>(parsed_json(read_text_file(path))["model_type"]));
    }
    int n = 0;
    for (std::string name; names >> name; ++n) {
        if (name.back() == ',') name.pop_back();
        INFO(name << ": name it in doc/models.md, and make a folder of it with test/golden/make_golden.py");
        CHECK(std::regex_search(paragraph, std::regex("\\b" + name + "\\b")));
        CHECK(in_goldens.count(name) == 1);
    }
    CHECK(n >= 8);
}

TEST_CASE("a model that does not fit together is refused", "[model]") {
    Config c = small_llama();
    c.K = 4;
    CHECK_THROWS_WITH(check_config(c), ContainsSubstring("6 query heads cannot share 4"));
    c = small_llama();
    c.D = 7;
    CHECK_THROWS_WITH(check_config(c), ContainsSubstring("must be even"));
    c = small_gpt2();
    for (int i = 0; i < 5; ++i) {
        Config other = c;
        other.window = i == 0, other.qkv_bias = i == 1, other.attn_out_bias = i == 2, other.mlp_bias = i == 3;
        other.qk_norm = i == 4;
        CHECK_THROWS_WITH(check_config(other), ContainsSubstring("are there for grouped-query attention"));
    }
    CHECK_THROWS_WITH(load_config("gpt5"), ContainsSubstring("use one of tiny, gpt2"));
    Arena a("a"), b("b"), d("d");
    CHECK_THROWS_WITH(build_model(small_gpt2(), {}, 41, a, b, d), ContainsSubstring("longer than the 40 positions"));
    c = small_llama();
    c.C = 8192;
    CHECK(config_of_rank(c, {}).C == 8192);
    c.C = 8256;
    // What to do: in a text for generate, too, which has no --tp-mode.
    CHECK_THROWS_WITH(build_model(c, {}, 16, a, b, d),
                      ContainsSubstring("hidden_size 8256: norms take rows of at most") &&
                          ContainsSubstring("a rank: use a smaller model, or") && !ContainsSubstring("--"));
    c.C = 2 * 8256;
    CHECK_THROWS_WITH(
        config_of_rank(c, tensor_layout(TensorMode::two_d, 0, 4)),
        ContainsSubstring("hidden_size 16512 on 2 ranks: ") && ContainsSubstring(": give --tp more ranks"));
    c.C = 64, c.kv_rank = 8256;
    CHECK_THROWS_WITH(config_of_rank(c, {}),
                      ContainsSubstring("a latent of 8256") && ContainsSubstring("8192: use a smaller model"));
}

// As a step on Hopper computes it, with products of ours, and as cuBLASLt's products and kernels behind them do: what
// differs is a rounding of some numbers before GELU, its exponential, and orders of summation.
TEST_CASE("a model's gradients with the products of Hopper are those without", "[model][hopper]") {
    if (!has_wgmma()) SKIP_TEST("a GPU without wgmma");
    Config config = small_gpt2();
    config.C = 128, config.H = config.K = 2, config.D = 64, config.F = 512;
    const int64_t B = 3, T = 40, N = B * T;
    const auto run = [&](const std::string& choices, LaunchNotes& notes) {
        TinyTrainer m(config, B, T, {DType::bf16, DType::bf16, true}, {}, "adamw", false, FlashTier::hopper);
        init_weights(m.model, 11);
        m.set_batch(random_tokens(N, config.V, 1), random_tokens(N, config.V, 2));
        set_matmul_choices(choices);
        notes.launches.clear();
        m.train_step(1.0f / static_cast<float>(N), 0, 1);
        set_matmul_choices("");
        return to_floats(m.model.grads);
    };
    const auto count = [](const LaunchNotes& notes, const std::string& kernel) {
        return std::count_if(notes.launches.begin(), notes.launches.end(),
                             [&](const NotedLaunch& launch) { return launch.kernel == kernel; });
    };
    std::string choices;
    const auto ours = [&](int64_t M, int64_t n, int64_t K, const char* rest) {
        choices += concat(M, "x", n, "x", K, " bf16 bf16 bf16 ", rest, ": hopper\n");
    };
    ours(N, 512, 128, "nt bias_gelu"), ours(N, 512, 128, "nn gelu_derivative"),
        ours(N, 128, 128, "nn delta heads of 64");
    for (const auto& [out, inp] : {std::pair{384, 128}, {128, 128}, {512, 128}, {128, 512}})
        ours(out, inp, N, "tn row_sums");
    LaunchNotes notes;
    const std::vector<float> expected = run("", notes);
    CHECK(count(notes, "flash_delta_kernel") == config.L);
    const std::vector<float> gradients = run(choices, notes);
    CHECK(count(notes, "flash_delta_kernel") == 0);
    CHECK(count(notes, "hopper_matmul_kernel") == 3 * config.L);
    CHECK(count(notes, "hopper_matmul_split_kernel") == 4 * config.L);
    const double difference = norm_of_difference(gradients, expected);
    CHECK(difference > 0);
    CHECK(difference < 2 * unit_roundoff(DType::bf16) * norm_of(expected));
}
