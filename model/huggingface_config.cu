// model/huggingface_config.cu: config.json: how Hugging Face describes a model, read and written.
#include "io/io.h"
#include "model/model.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>

using nlohmann::json;
using nlohmann::ordered_json;

namespace {

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
    Config c;
    c.family = Family::gpt2;
    c.L = in.integer("n_layer"), c.H = c.K = in.integer("n_head"), c.C = in.integer("n_embd"), c.D = c.C / c.H;
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
    check(in.has("head_dim") || c.C % c.H == 0, in.path(), ": hidden_size ", c.C,
          " cannot be divided by num_attention_heads ", c.H);
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

Config load_config(const std::string& preset_or_path) {
    if (const Config* preset = find_preset(preset_or_path)) return *preset;
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

std::pair<std::string, std::string> hugging_face_type(const Config& c) {
    if (c.attention == AttentionKind::mla) return {"deepseek_v3", "DeepseekV3ForCausalLM"};
    if (c.attention == AttentionKind::mfa) return {"mfa", "MfaForCausalLM"};  // transformers has none
    if (c.qkv_bias) return {"qwen2", "Qwen2ForCausalLM"};
    if (c.qk_norm) return {"qwen3", "Qwen3ForCausalLM"};
    return {"llama", "LlamaForCausalLM"};
}

namespace {

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
        out = {{"architectures", {"GPT2LMHeadModel"}},
               {"model_type", "gpt2"},
               {"activation_function", "gelu_new"},
               {"vocab_size", c.V},
               {"n_positions", c.T_max},
               {"n_ctx", c.T_max},
               {"n_embd", c.C},
               {"n_layer", c.L},
               {"n_head", c.H},
               {"n_inner", c.F},
               {"layer_norm_epsilon", c.norm_eps},
               {"initializer_range", c.init_std},
               {"tie_word_embeddings", c.tied},
               {"torch_dtype", "float32"}};
        return out.dump(2) + "\n";
    }
    const auto [type, architecture] = hugging_face_type(c);
    out = {{"architectures", {architecture}},
           {"model_type", type},
           {"hidden_act", "silu"},
           {"vocab_size", c.V},
           {"max_position_embeddings", c.T_max},
           {"hidden_size", c.C},
           {"num_hidden_layers", c.L},
           {"num_attention_heads", c.H},
           {"num_key_value_heads", c.K},
           {"intermediate_size", c.F},
           {"rms_norm_eps", c.norm_eps},
           {"rope_theta", c.rope_base},
           {"attention_bias", false},
           {"mlp_bias", false},
           {"initializer_range", c.init_std},
           {"tie_word_embeddings", c.tied},
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
