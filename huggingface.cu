// huggingface.cu: models as Hugging Face folders: config.json, and safetensors whole or in shards.
//
// Two differences between their files and our memory: GPT-2's Conv1D stores weights (C, O), transposed; and our embedding
// and head have rows of padding, which are never written.
#include "io/io.h"
#include "llm.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

using nlohmann::ordered_json;
using nlohmann::json;

// ---------------------------------------------------------------------------------------------------------------------
// Configurations

namespace {

Config gpt2(int64_t L, int64_t H, int64_t C) {
    Config c;
    c.family = Family::gpt2;
    c.V = 50257, c.T_max = 1024, c.L = L, c.H = H, c.K = H, c.D = C / H, c.C = C, c.F = 4 * C, c.tied = true;
    return c;
}

Config llama3(int64_t L, int64_t H, int64_t C, int64_t D, int64_t F, double factor, bool tied) {
    Config c;
    c.V = 128256, c.T_max = 131072, c.L = L, c.H = H, c.K = 8, c.D = D, c.C = C, c.F = F, c.rope_base = 500000.0, c.tied = tied;
    c.rope_scaling = {factor, 1.0, 4.0, 8192};
    return c;
}

Config qwen(int64_t V, int64_t T_max, int64_t L, int64_t H, int64_t K, int64_t C, int64_t D, int64_t F, bool tied) {
    Config c;
    c.V = V, c.T_max = T_max, c.L = L, c.H = H, c.K = K, c.D = D, c.C = C, c.F = F, c.tied = tied;
    c.rope_base = 1e6, c.norm_eps = 1e-6;
    return c;
}
Config qwen2(int64_t V, int64_t L, int64_t H, int64_t K, int64_t C, int64_t F, bool tied) {
    Config c = qwen(V, 32768, L, H, K, C, C / H, F, tied);
    c.qkv_bias = true;
    return c;
}
Config qwen3(int64_t L, int64_t H, int64_t C, int64_t F, bool tied) {
    Config c = qwen(151936, 40960, L, H, 8, C, 128, F, tied);
    c.qk_norm = true;
    return c;
}

Config tiny() {
    Config c;  // bytes as tokens: the defaults of llm.h
    c.tied = true;
    return c;
}

// tiny, and a model of LLaMA 3.2 1B's shape, with other attention. Ours: DeepSeek and StepFun have published none without
// experts.
Config with_mla(Config c, int64_t q_rank, int64_t kv_rank, int64_t D_nope, int64_t D_rope, int64_t D_v) {
    c.attention = AttentionKind::mla, c.rope_pairs = RopePairs::neighbours, c.norm_eps = 1e-6;
    c.K = c.H, c.q_rank = q_rank, c.kv_rank = kv_rank, c.D = D_nope + D_rope, c.D_rope = D_rope, c.D_v = D_v;
    return c;
}
Config with_mfa(Config c, int64_t H, int64_t D, int64_t q_rank) {
    c.attention = AttentionKind::mfa, c.H = H, c.K = 1, c.D = D, c.q_rank = q_rank;
    return c;
}
Config one_billion() {
    Config c = llama3(16, 16, 2048, 128, 8192, 1.0, true);
    c.T_max = 4096, c.rope_base = 10000.0, c.rope_scaling = {};
    return c;
}

// Sizes as published: GPT-2 by OpenAI (2019), LLaMA 3.1 and 3.2 by Meta (2024), Qwen2.5 and Qwen3 by Alibaba (2024, 2025).
const std::vector<std::pair<std::string, Config>>& presets() {
    static const std::vector<std::pair<std::string, Config>> all = {
        {"tiny", tiny()},
        {"gpt2", gpt2(12, 12, 768)},
        {"gpt2-medium", gpt2(24, 16, 1024)},
        {"gpt2-large", gpt2(36, 20, 1280)},
        {"gpt2-xl", gpt2(48, 25, 1600)},
        {"llama-1b", llama3(16, 32, 2048, 64, 8192, 32.0, true)},
        {"llama-3b", llama3(28, 24, 3072, 128, 8192, 32.0, true)},
        {"llama-8b", llama3(32, 32, 4096, 128, 14336, 8.0, false)},
        {"qwen2.5-0.5b", qwen2(151936, 24, 14, 2, 896, 4864, true)},
        {"qwen2.5-1.5b", qwen2(151936, 28, 12, 2, 1536, 8960, true)},
        {"qwen2.5-7b", qwen2(152064, 28, 28, 4, 3584, 18944, false)},
        {"qwen3-0.6b", qwen3(28, 16, 1024, 3072, true)},
        {"qwen3-1.7b", qwen3(28, 16, 2048, 6144, true)},
        {"qwen3-4b", qwen3(36, 32, 2560, 9728, true)},
        {"qwen3-8b", qwen3(36, 32, 4096, 12288, false)},
        {"deepseek-tiny", with_mla(tiny(), 64, 32, 32, 16, 32)},
        {"deepseek-1b", with_mla(one_billion(), 768, 512, 128, 64, 128)},
        {"mfa-tiny", with_mfa(tiny(), 4, 64, 64)},
        {"mfa-1b", with_mfa(one_billion(), 20, 192, 1024)},
    };
    return all;
}

// Reads values out of a config.json, naming file and key when one is missing or of another kind.
class ConfigReader {
  public:
    explicit ConfigReader(const std::string& path) : path_(path) {
        try {
            object_ = json::parse(read_text_file(path));
        } catch (const json::exception& error) {
            fail(path, " is not valid JSON: ", error.what());
        }
        check(object_.is_object(), path, ": expected a JSON object");
    }
    bool has(const json& object, const char* key) const { return object.contains(key) && !object.at(key).is_null(); }
    bool has(const char* key) const { return has(object_, key); }

    int64_t integer(const json& object, const char* key) const {
        check(has(object, key), path_, ": \"", key, "\" is missing");
        check(object.at(key).is_number_integer(), path_, ": \"", key, "\" is not a whole number");
        const int64_t value = object.at(key).get<int64_t>();
        check(value > 0 && value < int64_t{1} << 31, path_, ": \"", key, "\" is ", value, ", expected 1 to 2^31");
        return value;
    }
    int64_t integer(const char* key) const { return integer(object_, key); }
    int64_t integer(const char* key, int64_t otherwise) const { return has(key) ? integer(key) : otherwise; }
    double number(const json& object, const char* key, double otherwise) const {
        if (!has(object, key)) return otherwise;
        check(object.at(key).is_number(), path_, ": \"", key, "\" is not a number");
        const double value = object.at(key).get<double>();
        check(std::isfinite(value) && value > 0, path_, ": \"", key, "\" is ", value, ", expected a positive number");
        return value;
    }
    double number(const char* key, double otherwise) const { return number(object_, key, otherwise); }
    // A whole number that may be 0.
    int64_t count(const char* key) const { return object_.at(key) == 0 ? 0 : integer(key); }
    bool boolean(const json& object, const char* key, bool otherwise) const {
        if (!has(object, key)) return otherwise;
        check(object.at(key).is_boolean(), path_, ": \"", key, "\" is not true or false");
        return object.at(key).get<bool>();
    }
    bool boolean(const char* key, bool otherwise) const { return boolean(object_, key, otherwise); }
    std::string text(const json& object, const char* key, const std::string& otherwise) const {
        if (!has(object, key)) return otherwise;
        check(object.at(key).is_string(), path_, ": \"", key, "\" is not a string");
        return object.at(key).get<std::string>();
    }
    std::string text(const char* key, const std::string& otherwise) const { return text(object_, key, otherwise); }
    // A value that we support in one form only.
    void must_be(const char* key, const std::string& only) const {
        const std::string value = text(key, only);
        check(value == only, path_, ": \"", key, "\" is \"", value, "\"; this program supports \"", only, "\"");
    }
    const json& object() const { return object_; }
    const std::string& path() const { return path_; }

  private:
    std::string path_;
    json object_;
};

Config read_gpt2(const ConfigReader& in) {
    Config c = gpt2(in.integer("n_layer"), in.integer("n_head"), in.integer("n_embd"));
    in.must_be("activation_function", "gelu_new");
    c.V = in.integer("vocab_size");
    c.T_max = in.integer("n_positions", 1024);
    c.F = in.integer("n_inner", 4 * c.C);
    c.norm_eps = in.number("layer_norm_epsilon", 1e-5);
    c.tied = in.boolean("tie_word_embeddings", true);
    c.init_std = in.number("initializer_range", 0.02);
    check(in.boolean("scale_attn_weights", true) && !in.boolean("scale_attn_by_inverse_layer_idx", false), in.path(),
          ": only attention scaled by 1/sqrt(head size) is supported");
    check(c.C % c.H == 0, in.path(), ": n_embd ", c.C, " cannot be divided by n_head ", c.H);
    return c;
}

// RoPE: transformers 5 writes rope_parameters {rope_theta, rope_type, ...}; before, rope_theta and rope_scaling.
void read_rope(const ConfigReader& in, Config& c) {
    const bool newer = in.has("rope_parameters");
    const char* key = newer ? "rope_parameters" : "rope_scaling";
    const json none = json::object();
    const json& rope = in.has(key) ? in.object().at(key) : none;
    check(rope.is_object(), in.path(), ": \"", key, "\" is not an object");
    c.rope_base = in.number(rope, "rope_theta", in.number("rope_theta", 10000.0));
    const std::string type = in.text(rope, "rope_type", in.text(rope, "type", "default"));
    check(type == "default" || type == "llama3" || type == "yarn", in.path(), ": rope_type \"", type,
          "\" is not supported, only default, llama3 and yarn");
    RopeScaling& to = c.rope_scaling;
    if (type == "default") return;
    to.original_max_position = in.integer(rope, "original_max_position_embeddings");
    if (type == "llama3") {
        to.factor = in.number(rope, "factor", 8.0);
        to.low_freq_factor = in.number(rope, "low_freq_factor", 1.0);
        to.high_freq_factor = in.number(rope, "high_freq_factor", 4.0);
        return;
    }
    check(!in.has(rope, "attention_factor") && in.boolean(rope, "truncate", true), in.path(),
          ": YaRN's attention_factor and truncate are not supported, only what follows from factor and mscale");
    to.kind = RopeKind::yarn;
    to.factor = in.number(rope, "factor", static_cast<double>(c.T_max) / static_cast<double>(to.original_max_position));
    to.beta_fast = in.number(rope, "beta_fast", 32.0);
    to.beta_slow = in.number(rope, "beta_slow", 1.0);
    if (in.has(rope, "mscale")) to.mscale = in.number(rope, "mscale", 1.0);
    if (in.has(rope, "mscale_all_dim")) to.mscale_all_dim = in.number(rope, "mscale_all_dim", 1.0);
}

// What LLaMA and all that are built like it have.
Config read_llama_like(const ConfigReader& in) {
    Config c;
    in.must_be("hidden_act", "silu");
    check(!in.boolean("attention_bias", false) && !in.boolean("mlp_bias", false), in.path(),
          ": attention_bias and mlp_bias are not supported");
    c.V = in.integer("vocab_size");
    c.T_max = in.integer("max_position_embeddings", 2048);
    c.L = in.integer("num_hidden_layers");
    c.H = in.integer("num_attention_heads");
    c.K = in.integer("num_key_value_heads", c.H);
    c.C = in.integer("hidden_size");
    c.F = in.integer("intermediate_size");
    c.norm_eps = in.number("rms_norm_eps", 1e-6);
    c.tied = in.boolean("tie_word_embeddings", false);
    c.init_std = in.number("initializer_range", 0.02);
    read_rope(in, c);
    return c;
}

// llama, qwen2, qwen3. mfa, our own: one key/value head, and share_q_dim numbers of the latent that queries come from.
Config read_llama(const ConfigReader& in, const std::string& type) {
    Config c = read_llama_like(in);
    check(in.has("head_dim") || c.C % c.H == 0, in.path(), ": hidden_size ", c.C, " cannot be divided by num_attention_heads ",
          c.H);
    c.D = in.integer("head_dim", c.C / c.H);
    check(!in.boolean("use_sliding_window", false), in.path(), ": use_sliding_window is not supported");
    c.qkv_bias = type == "qwen2";
    c.qk_norm = type == "qwen3";
    if (type == "mfa") c.attention = AttentionKind::mfa, c.q_rank = in.integer("share_q_dim");
    return c;
}

// deepseek_v3, and deepseek_v2, which is the same where there are no experts.
Config read_deepseek(const ConfigReader& in, bool v3) {
    Config c = read_llama_like(in);
    const int64_t n_dense = in.has("first_k_dense_replace") ? in.count("first_k_dense_replace") : v3 ? 3 : 0;
    check(n_dense >= c.L, in.path(), ": layers from ", n_dense, " on have experts (first_k_dense_replace ", n_dense,
          ", num_hidden_layers ", c.L, "), which are not there yet: only models without experts can be used");
    check(c.K == c.H, in.path(), ": num_key_value_heads ", c.K, " must be num_attention_heads ", c.H,
          ": every head has its own key");
    c.attention = AttentionKind::mla;
    c.q_rank = in.has("q_lora_rank") ? in.integer("q_lora_rank") : 0;
    c.kv_rank = in.integer("kv_lora_rank");
    c.D_rope = in.integer("qk_rope_head_dim");
    c.D = in.integer("qk_nope_head_dim") + c.D_rope;
    c.D_v = in.integer("v_head_dim");
    c.rope_pairs = !v3 || in.boolean("rope_interleave", true) ? RopePairs::neighbours : RopePairs::halves;
    return c;
}

}  // namespace

std::vector<std::string> preset_names() {
    std::vector<std::string> names;
    for (const auto& [name, config] : presets()) names.push_back(name);
    return names;
}

void check_config(const Config& c) {
    check(c.V > 0 && c.T_max > 0 && c.L > 0 && c.H > 0 && c.K > 0 && c.D > 0 && c.C > 0 && c.F > 0,
          "model configuration: every size must be positive");
    check(c.H % c.K == 0, "model configuration: ", c.H, " query heads cannot share ", c.K, " key/value heads evenly");
    check(c.family != Family::llama || (c.rope_D() > 0 && c.rope_D() % 2 == 0),
          "model configuration: rotary embedding turns pairs, so the head size ", c.rope_D(), " must be even");
    check(c.attention != AttentionKind::mfa || (c.K == 1 && c.q_rank > 0),
          "model configuration: MFA has one key/value head, not ", c.K, ", and a query latent (share_q_dim ", c.q_rank, ")");
    check(c.attention != AttentionKind::mla || (c.K == c.H && c.kv_rank > 0 && c.q_rank >= 0 && c.D > c.D_rope && c.D_v > 0),
          "model configuration: MLA needs as many key/value heads as query heads, kv_lora_rank ", c.kv_rank,
          ", qk_nope_head_dim ", c.D - c.D_rope, " and v_head_dim ", c.D_v, " above 0");
}

Config load_config(const std::string& preset_or_path) {
    for (const auto& [name, config] : presets())
        if (name == preset_or_path) return config;
    std::string path = preset_or_path;
    if (std::filesystem::is_directory(path)) path += "/config.json";
    if (!std::filesystem::exists(path)) {
        std::string names;
        for (const std::string& name : preset_names()) names += (names.empty() ? "" : ", ") + name;
        fail("no model '", preset_or_path, "': use one of ", names, ", or the path of a config.json or of its folder");
    }
    const ConfigReader in(path);
    const std::string type = in.text("model_type", "");
    Config config;
    if (type == "gpt2") config = read_gpt2(in);
    else if (type == "llama" || type == "qwen2" || type == "qwen3" || type == "mfa") config = read_llama(in, type);
    else if (type == "deepseek_v2" || type == "deepseek_v3") config = read_deepseek(in, type == "deepseek_v3");
    else
        fail(path, ": model_type \"", type,
             "\" is not supported, only gpt2, llama, qwen2, qwen3, deepseek_v2, deepseek_v3 and mfa");
    check_config(config);
    return config;
}

namespace {

// model_type and the class of transformers.
std::pair<std::string, std::string> type_of(const Config& c) {
    if (c.attention == AttentionKind::mla) return {"deepseek_v3", "DeepseekV3ForCausalLM"};
    if (c.attention == AttentionKind::mfa) return {"mfa", "MfaForCausalLM"};  // transformers has none
    if (c.qkv_bias) return {"qwen2", "Qwen2ForCausalLM"};
    if (c.qk_norm) return {"qwen3", "Qwen3ForCausalLM"};
    return {"llama", "LlamaForCausalLM"};
}

ordered_json rope_scaling_to_json(const RopeScaling& s) {
    ordered_json out = {{"rope_type", s.kind == RopeKind::yarn ? "yarn" : "llama3"},
                        {"factor", s.factor},
                        {"original_max_position_embeddings", s.original_max_position}};
    if (s.kind == RopeKind::llama3) {
        out["low_freq_factor"] = s.low_freq_factor;
        out["high_freq_factor"] = s.high_freq_factor;
        return out;
    }
    out["beta_fast"] = s.beta_fast;
    out["beta_slow"] = s.beta_slow;
    if (s.mscale != 0) out["mscale"] = s.mscale;
    if (s.mscale_all_dim != 0) out["mscale_all_dim"] = s.mscale_all_dim;
    return out;
}

}  // namespace

std::string config_to_json(const Config& c) {
    ordered_json out;
    if (c.family == Family::gpt2) {
        out = {{"architectures", {"GPT2LMHeadModel"}}, {"model_type", "gpt2"},
               {"activation_function", "gelu_new"},    {"vocab_size", c.V},
               {"n_positions", c.T_max},               {"n_ctx", c.T_max},
               {"n_embd", c.C},                        {"n_layer", c.L},
               {"n_head", c.H},                        {"n_inner", c.F},
               {"layer_norm_epsilon", c.norm_eps},     {"initializer_range", c.init_std},
               {"tie_word_embeddings", c.tied},        {"torch_dtype", "float32"}};
        return out.dump(2) + "\n";
    }
    const auto [type, architecture] = type_of(c);
    out = {{"architectures", {architecture}},       {"model_type", type},
           {"hidden_act", "silu"},                  {"vocab_size", c.V},
           {"max_position_embeddings", c.T_max},    {"hidden_size", c.C},
           {"num_hidden_layers", c.L},              {"num_attention_heads", c.H},
           {"num_key_value_heads", c.K},            {"intermediate_size", c.F},
           {"rms_norm_eps", c.norm_eps},            {"rope_theta", c.rope_base},
           {"attention_bias", false},               {"mlp_bias", false},
           {"initializer_range", c.init_std},       {"tie_word_embeddings", c.tied},
           {"torch_dtype", "float32"}};
    if (c.attention == AttentionKind::mla) {
        out["q_lora_rank"] = c.q_rank > 0 ? ordered_json(c.q_rank) : ordered_json(nullptr);
        out["kv_lora_rank"] = c.kv_rank;
        out["qk_nope_head_dim"] = c.D - c.D_rope;
        out["qk_rope_head_dim"] = c.D_rope;
        out["v_head_dim"] = c.D_v;
        out["rope_interleave"] = c.rope_pairs == RopePairs::neighbours;
        out["first_k_dense_replace"] = c.L;  // no layer has experts
        out["num_nextn_predict_layers"] = 0;
    } else {
        out["head_dim"] = c.D;
        if (c.attention == AttentionKind::mfa) out["share_q_dim"] = c.q_rank;
    }
    if (c.rope_scaling.factor != 1.0) out["rope_scaling"] = rope_scaling_to_json(c.rope_scaling);
    return out.dump(2) + "\n";
}

std::vector<std::pair<int64_t, int64_t>> block_linear_shapes(const Config& c) {
    std::vector<std::pair<int64_t, int64_t>> shapes = {
        {c.C, c.qkv_width()}, {c.attn_width(), c.C}, {c.C, c.up_width()}, {c.F, c.C}};
    if (c.q_rank > 0) shapes.push_back({c.q_rank, c.H * c.D});
    if (c.attention == AttentionKind::mla) shapes.push_back({c.kv_rank, c.H * (c.D - c.D_rope + c.D_v)});
    return shapes;
}

int64_t parameter_count(const Config& c) {
    const bool gpt2 = c.family == Family::gpt2;
    const int64_t norm = gpt2 ? 2 * c.C : c.C;
    int64_t block = 2 * norm + (c.has_qkv_bias() ? c.qkv_width() : 0) + (gpt2 ? c.C + c.up_width() + c.C : 0) +
                    (c.qk_norm ? 2 * c.D : 0) + c.q_rank + c.kv_rank;  // biases, norms of heads and of latents
    for (const auto& [inputs, outputs] : block_linear_shapes(c)) block += inputs * outputs;
    return (c.tied ? 1 : 2) * c.V * c.C + (gpt2 ? c.T_max * c.C : 0) + c.L * block + norm;
}

double flops_per_token(const Config& c, int64_t T) {
    int64_t multiplying = c.V * c.C;
    for (const auto& [inputs, outputs] : block_linear_shapes(c)) multiplying += c.L * inputs * outputs;
    return 6.0 * static_cast<double>(multiplying) + 3.0 * static_cast<double>(c.L * c.H * (c.D + c.value_D()) * T);
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights

namespace {

// (rows, cols) -> (cols, rows)
std::vector<float> transpose(const std::vector<float>& in, int64_t rows, int64_t cols) {
    std::vector<float> out(in.size());
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) out[static_cast<size_t>(c * rows + r)] = in[static_cast<size_t>(r * cols + c)];
    return out;
}

// The shape the file has for a parameter.
std::vector<int64_t> stored_shape(const Param& param) {
    std::vector<int64_t> shape(param.value.shape, param.value.shape + param.value.rank);
    shape[0] -= param.padded_rows;
    if (param.transposed) std::reverse(shape.begin(), shape.end());
    return shape;
}

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text = "(";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + ")";
}

// Buffers that old checkpoints carry beside the weights: attention masks and rotary frequencies.
bool is_known_extra(const std::string& name) {
    const auto ends_with = [&](const char* end) {
        const std::string tail = end;
        return name.size() >= tail.size() && name.compare(name.size() - tail.size(), tail.size(), tail) == 0;
    };
    return ends_with(".attn.bias") || ends_with(".attn.masked_bias") || ends_with("rotary_emb.inv_freq");
}

}  // namespace

void load_weights(Model& model, const std::string& folder) {
    const SafetensorsReader file(folder);
    // GPT-2's original files leave out the "transformer." in front of every name.
    const std::string prefix = "transformer.";
    const bool short_names = model.config.family == Family::gpt2 && !file.has("transformer.wte.weight") && file.has("wte.weight");
    std::set<std::string> used;
    for (const Param& param : model.params) {
        const std::string name = short_names && param.name.rfind(prefix, 0) == 0 ? param.name.substr(prefix.size()) : param.name;
        const StoredTensor& stored = file.at(name);
        const std::vector<int64_t> wanted = stored_shape(param);
        check(stored.shape == wanted, folder, ": tensor '", name, "' has shape ", shape_text(stored.shape), ", config.json asks for ",
              shape_text(wanted));
        check(stored.dtype == "F32" || stored.dtype == "F16" || stored.dtype == "BF16", folder, ": tensor '", name, "' has dtype ",
              stored.dtype, ", expected F32, F16 or BF16");
        std::vector<float> values = stored.floats();
        if (param.transposed) values = transpose(values, wanted[0], wanted[1]);
        model.write(param, values);
        used.insert(name);
    }
    for (const auto& [name, tensor] : file.tensors()) {
        const bool tied_head = model.config.tied && name == "lm_head.weight";
        check(used.count(name) || tied_head || is_known_extra(name), folder, ": tensor '", name,
              "' belongs to no parameter of this ", model.config.family == Family::gpt2 ? "GPT-2" : type_of(model.config).second,
              " configuration; is config.json the right one?");
    }
}

void save_model(const Model& model, const std::string& folder) {
    DataParallel* const ranks = model.data_parallel;
    if (ranks && ranks->comm().rank != 0) {  // hand over the parts, in the order in which rank 0 writes
        for (const Param& param : model.params) ranks->read(model, param);
        return;
    }
    make_folder(folder);
    std::vector<TensorToStore> tensors;
    for (const Param& param : model.params) {
        const auto fill = [&param, &model, ranks](void* bytes) {
            const int64_t rows = param.value.shape[0] - param.padded_rows;
            std::vector<float> values = ranks ? ranks->read(model, param) : to_floats(param.exact().slice(0, rows));
            if (param.transposed) values = transpose(values, rows, param.value.cols());
            std::copy(values.begin(), values.end(), static_cast<float*>(bytes));
        };
        tensors.push_back({param.name, "F32", stored_shape(param), fill});
    }
    write_text_file(folder + "/config.json", config_to_json(model.config));
    write_safetensors(folder + "/model.safetensors", tensors, {{"format", "pt"}});
}
