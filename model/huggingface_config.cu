// model/huggingface_config.cu: config.json, in which Hugging Face describes a model: read and written.
//
// gpt2 has names of its own: vocab_size, n_positions, n_layer, n_head, n_embd, n_inner, layer_norm_epsilon,
// tie_word_embeddings, initializer_range; activation_function: gelu_new or another name of it, or a feed-forward's;
// scale_attn_weights true, scale_attn_by_inverse_layer_idx false, is_causal true, and per_layer_config {}. The other
// model types share most of theirs. x: read; -: ignored; otherwise the table has the only value that is supported.
//
//     key                                  llama  mistral  qwen2  qwen3  mfa    deepseek_v2, _v3   in Config
//     vocab_size, hidden_size                x       x       x      x     x      x                 V, C
//     num_hidden_layers, intermediate_size   x       x       x      x     x      x                 L, F
//     num_attention_heads                    x       x       x      x     x      x                 H
//     num_key_value_heads                    x       x       x      x     1      = heads           K
//     head_dim                               x       x       x      x     x      -                 D
//     max_position_embeddings                x       x       x      x     x      x                 T_max
//     rms_norm_eps, initializer_range        x       x       x      x     x      x                 norm_eps, init_std
//     tie_word_embeddings                    x       x       x      x     x      x                 tied
//     rope_parameters, or rope_theta and     x       x       x      x     x      x                 rope_base,
//     rope_scaling (read_rope)                                                                     rope_scaling
//     original_max_position_embeddings       x       x       x      x     x      x                 rope_scaling
//     partial_rotary_factor                  1       1       1      1     1      1
//     hidden_act                             silu    silu    silu   silu  silu   silu
//     is_causal                              true    true    true   true  true   true
//     attention_bias                         x       false   (1)    x     false  false             qkv_bias,
//                                                                                                  attn_out_bias
//     mlp_bias                               x       false   false  false false  false             mlp_bias
//     use_sliding_window                     false   -       x      x     false  -                 window
//     sliding_window                         -       x       (2)    (2)   -      -                 window
//     max_window_layers                      -       -       (2)    (2)   -      -                 n_full_layers
//     layer_types                            -       (3)     (2)    (2)   -      -                 n_full_layers
//     share_q_dim                            -       -       -      -     x      -                 q_rank
//     q_lora_rank, kv_lora_rank              -       -       -      -     -      x                 q_rank, kv_rank
//     qk_nope_head_dim, qk_rope_head_dim     -       -       -      -     -      x                 D, D_rope
//     v_head_dim                             -       -       -      -     -      x                 D_v
//     rope_interleave                        -       -       -      -     -      (4)               rope_pairs
//     first_k_dense_replace                  -       -       -      -     -      all layers
//
// (1) false: Qwen2 always has biases on queries, keys and values, and on nothing else. (2) Only if use_sliding_window.
// (3) All layers must be alike, with the window or without. (4) deepseek_v3's; deepseek_v2's is always true.
// All other keys are ignored. These must be there: the vocabulary, the numbers of layers and query heads, the widths
// (but for head_dim and n_inner) and the ranks. Any other key that is missing has the default of transformers' class.
// hidden_act may also be swish, another name of silu, or name a feed-forward of ours (sublayers.cu), but for gelu.
#include "io/json.h"
#include "model/sublayer.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

namespace {

// A word of the file, fit for an error of one line: a line end in it is written as \n.
std::string in_quotes(const std::string& word) { return JsonText(word).str(); }

// Reads values out of an object of a config.json, naming file and key when one is missing or of another kind.
class ConfigReader {
  public:
    ConfigReader(const std::string& path, const Json::Value& object) : path_(path), object_(object) {}
    // Where a key is optional, null and a missing key mean the same to transformers, but for those that ask is_null.
    bool has(const char* key) const { return !member(object_, key).isNull(); }
    bool is_null(const char* key) const { return ::has(object_, key) && !has(key); }

    int64_t integer(const char* key) const {
        check(has(key), path_, ": \"", key, "\" is missing");
        const Json::Value& number = member(object_, key);
        int64_t value = 0;
        // Sizes are multiplied by each other in 64 bits: of two at a time here, and of more after check_config().
        constexpr int64_t most = std::numeric_limits<int32_t>::max();
        check(is_whole(number) && read_value(number, value) && value > 0 && value <= most, path_, ": \"", key, "\" is ",
              JsonText(number).str(), ", expected a whole number from 1 to ", most);
        return value;
    }
    int64_t integer(const char* key, int64_t otherwise) const { return has(key) ? integer(key) : otherwise; }
    double number(const char* key, double otherwise) const {
        if (!has(key)) return otherwise;
        double value = 0;
        check(read_value(member(object_, key), value), path_, ": \"", key, "\" is not a number");
        check(std::isfinite(value) && value > 0, path_, ": \"", key, "\" is ", value, ", expected a positive number");
        return value;
    }
    // A whole number that may be 0.
    int64_t count(const char* key) const { return member(object_, key) == Json::Value(0) ? 0 : integer(key); }
    bool boolean(const char* key, bool otherwise) const {
        check(!has(key) || read_value(member(object_, key), otherwise), path_, ": \"", key, "\" is not true or false");
        return otherwise;
    }
    // Of a key that is true where it is missing, and for which transformers takes null for false.
    bool is_true(const char* key) const { return !::has(object_, key) || member(object_, key) == Json::Value(true); }
    std::string text(const char* key, std::string otherwise) const {
        check(!has(key) || read_value(member(object_, key), otherwise), path_, ": \"", key, "\" is not a string");
        return otherwise;
    }
    const Json::Value& object() const { return object_; }
    const std::string& path() const { return path_; }

  private:
    std::string path_;
    Json::Value object_;
};

// Is it a feed-forward of the table, by its own name? Not "gelu", which with Hugging Face is the form with erf.
bool is_feed_forward(const std::string& activation) {
    const auto has_its_name = [&](const SubLayer* layer) { return activation == layer->name; };
    return activation != "gelu" && std::ranges::any_of(feed_forward_table(), has_its_name);
}

Config read_gpt2(const ConfigReader& in, const std::string&) {
    Config c;
    c.family = Family::gpt2, c.feed_forward = "gelu";
    c.L = in.integer("n_layer"), c.H = c.K = in.integer("n_head"), c.C = in.integer("n_embd"), c.D = c.C / c.H;
    // Three names of the form with tanh, layers/gelu.cu. "gelu", with erf, gives slightly other numbers.
    const std::string activation = in.text("activation_function", "gelu_new");
    if (is_feed_forward(activation)) c.feed_forward = activation;
    else
        check(activation == "gelu_new" || activation == "gelu_pytorch_tanh" || activation == "gelu_fast", in.path(),
              ": \"activation_function\" is ", in_quotes(activation), "; this program supports \"gelu_new\"");
    c.V = in.integer("vocab_size");
    c.T_max = in.integer("n_positions", 1024);
    c.F = in.integer("n_inner", 4 * c.C);
    c.norm_eps = in.number("layer_norm_epsilon", 1e-5);
    c.tied = in.boolean("tie_word_embeddings", true);  // GPT-2's files do not have this key, and its head is tied
    c.init_std = in.number("initializer_range", 0.02);
    check(in.boolean("scale_attn_weights", true) && !in.boolean("scale_attn_by_inverse_layer_idx", false), in.path(),
          ": only attention scaled by 1/sqrt(head size) is supported");
    check(c.C % c.H == 0, in.path(), ": n_embd ", c.C, " cannot be divided by n_head ", c.H);
    return c;
}

// The names of rope_type, and what each has beside factor. (layers/rope.cu has the formulas.)
//   linear, dynamic   nothing; dynamic's original length is max_position_embeddings
//   llama3            original_max_position_embeddings, low_freq_factor, high_freq_factor
//   yarn              original_max_position_embeddings, beta_fast, beta_slow, mscale, mscale_all_dim,
//                     attention_factor
const std::pair<const char*, RopeKind> kRopeKinds[] = {{"llama3", RopeKind::llama3},
                                                       {"yarn", RopeKind::yarn},
                                                       {"linear", RopeKind::linear},
                                                       {"dynamic", RopeKind::dynamic}};

RopeScaling read_rope_scaling(const ConfigReader& in, const ConfigReader& rope, const std::string& type,
                              int64_t T_max) {
    const auto* known = std::find_if(std::begin(kRopeKinds), std::end(kRopeKinds),
                                     [&](const auto& kind) { return kind.first == type; });
    check(known != std::end(kRopeKinds), in.path(), ": rope_type ", in_quotes(type),
          " is not supported, only default, linear, dynamic, llama3 and yarn");
    RopeScaling to;
    to.kind = known->second;
    // YaRN alone can do without a factor: then it is how much longer the sequences are than the original ones.
    check(to.kind == RopeKind::yarn || rope.has("factor"), in.path(), ": rope_type ", type, " needs a \"factor\"");
    to.factor = rope.number("factor", 1.0);
    const auto mscale = [&](const char* key) {  // 0 is as if it were not there
        double value = 0;
        return read_value(member(rope.object(), key), value) && value == 0 ? 0 : rope.number(key, 0.0);
    };
    to.mscale = mscale("mscale");
    to.mscale_all_dim = mscale("mscale_all_dim");
    if (to.kind == RopeKind::linear) return to;
    // As transformers has it: a length beside rope_scaling goes before one in it, and without both it is the longest.
    const char* const original = "original_max_position_embeddings";
    const int64_t in_rope = rope.integer(original, T_max);
    to.original_max_position = to.kind == RopeKind::dynamic ? T_max : in.integer(original, in_rope);
    to.low_freq_factor = rope.number("low_freq_factor", to.low_freq_factor);
    to.high_freq_factor = rope.number("high_freq_factor", to.high_freq_factor);
    const auto must_be_below = [&](const char* first, double a, const char* second, double b) {
        check(to.factor == 1 || a < b, in.path(), ": ", first, " ", a, " must be below ", second, " ", b);
    };
    if (to.kind == RopeKind::llama3)
        must_be_below("low_freq_factor", to.low_freq_factor, "high_freq_factor", to.high_freq_factor);
    if (to.kind != RopeKind::yarn) return to;
    check(rope.is_true("truncate"), in.path(), ": YaRN's truncate is supported only where it is true");
    to.attention_factor = rope.number("attention_factor", 0.0);
    to.factor = rope.number("factor", static_cast<double>(T_max) / static_cast<double>(to.original_max_position));
    to.beta_fast = rope.number("beta_fast", to.beta_fast);
    to.beta_slow = rope.number("beta_slow", to.beta_slow);
    must_be_below("beta_slow", to.beta_slow, "beta_fast", to.beta_fast);
    return to;
}

// transformers 5 writes rope_parameters {rope_theta, rope_type, ...}. Earlier versions had rope_theta and rope_scaling,
// in which rope_type was first called type.
void read_rope(const ConfigReader& in, Config& c) {
    // Where a file has both, transformers takes rope_scaling, if there is anything in it.
    const bool scaling = in.has("rope_scaling") && !member(in.object(), "rope_scaling").empty();
    const char* key = scaling ? "rope_scaling" : "rope_parameters";
    const ConfigReader rope(in.path(), member(in.object(), key));
    check(rope.object().isObject() || rope.object().isNull(), in.path(), ": \"", key, "\" is not an object");
    for (const Json::Value& value : rope.object())
        check(!value.isObject(), in.path(), ": \"", key, "\" for each kind of layers is not supported");
    c.rope_base = rope.number("rope_theta", in.number("rope_theta", 10000.0));
    check(rope.number("partial_rotary_factor", in.number("partial_rotary_factor", 1.0)) == 1.0, in.path(),
          ": partial_rotary_factor is not supported: all columns of a head are rotated");
    const std::string type = rope.text("rope_type", rope.text("type", "default"));
    if (type != "default") c.rope_scaling = read_rope_scaling(in, rope, type, c.T_max);
}

// What transformers' classes take where a key is missing; 0: what follows from other keys.
struct Defaults {
    int64_t max_position_embeddings = 2048, num_key_value_heads = 0, head_dim = 0;
};
Defaults defaults_of(const std::string& type) {
    if (type == "mistral") return {131072, 8, 0};
    if (type == "qwen2") return {32768, 32, 0};
    if (type == "qwen3") return {32768, 32, 128};
    if (type == "deepseek_v3") return {4096, 0, 0};
    return {};
}

// What LLaMA and all that are built like it have.
Config read_llama_like(const ConfigReader& in, const std::string& type) {
    const Defaults defaults = defaults_of(type);
    Config c;
    // SwiGLU, or a feed-forward of the table.
    const std::string activation = in.text("hidden_act", "silu");
    const bool is_silu = activation == "silu" || activation == "swish";
    check(is_silu || is_feed_forward(activation), in.path(), ": hidden_act ", in_quotes(activation),
          " is not supported: silu is");
    c.feed_forward = is_silu ? "swiglu" : activation;
    c.V = in.integer("vocab_size");
    c.T_max = in.integer("max_position_embeddings", defaults.max_position_embeddings);
    c.L = in.integer("num_hidden_layers");
    c.H = in.integer("num_attention_heads");
    // Here null means one for each query head, in every class.
    const int64_t default_K = in.is_null("num_key_value_heads") ? 0 : defaults.num_key_value_heads;
    c.K = in.integer("num_key_value_heads", default_K > 0 ? default_K : c.H);
    c.C = in.integer("hidden_size");
    c.F = in.integer("intermediate_size");
    c.norm_eps = in.number("rms_norm_eps", 1e-6);
    c.tied = in.boolean("tie_word_embeddings", false);
    c.init_std = in.number("initializer_range", 0.02);
    read_rope(in, c);
    // Qwen2's biases do not depend on a key. DeepSeek's classes have biases where attention_bias or mlp_bias is true,
    // which this program has not. The other types' ignore both keys; here true is an error, because whoever wrote it
    // expects a different model from the one that would be trained.
    const bool attention_bias = in.boolean("attention_bias", false);
    check(!attention_bias || type == "llama" || type == "qwen3", in.path(),
          ": attention_bias is supported for llama and qwen3 only, not for ", type);
    c.qkv_bias = attention_bias || type == "qwen2";
    c.attn_out_bias = attention_bias;
    c.mlp_bias = in.boolean("mlp_bias", false);
    check(!c.mlp_bias || type == "llama", in.path(), ": mlp_bias is supported for llama only, not for ", type);
    return c;
}

std::vector<std::string> read_layer_types(const ConfigReader& in, int64_t L) {
    std::vector<std::string> types;
    check(read_value(member(in.object(), "layer_types"), types) && std::ssize(types) == L, in.path(),
          ": \"layer_types\" is not a list of ", L, " layers");
    return types;
}

// How many of the first layers have no sliding window. Newer files name every layer in layer_types; older ones have
// max_window_layers, by which all layers after the first so many have the window.
int64_t read_full_layers(const ConfigReader& in, int64_t L) {
    if (!in.has("layer_types")) return in.has("max_window_layers") ? in.count("max_window_layers") : 28;
    const std::vector<std::string> types = read_layer_types(in, L);
    const auto first_sliding = std::find(types.begin(), types.end(), "sliding_attention");
    const bool sliding_to_the_end =
        std::all_of(first_sliding, types.end(), [](const std::string& kind) { return kind == "sliding_attention"; });
    const bool full_before =
        std::all_of(types.begin(), first_sliding, [](const std::string& kind) { return kind == "full_attention"; });
    check(sliding_to_the_end && full_before, in.path(),
          ": \"layer_types\" is supported only as full_attention in the first layers and sliding_attention in all "
          "others");
    return first_sliding - types.begin();
}

void read_window(const ConfigReader& in, const std::string& type, Config& c) {
    const bool qwen = type == "qwen2" || type == "qwen3";
    const bool uses = type == "mistral" || in.boolean("use_sliding_window", false);
    check(!uses || qwen || type == "mistral", in.path(), ": use_sliding_window is not supported for ", type);
    if (!uses) return;
    // A missing key and null differ: null means that there is no window.
    c.window = in.is_null("sliding_window") ? 0 : in.integer("sliding_window", 4096);
    if (qwen && c.window > 0) c.n_full_layers = read_full_layers(in, c.L);
    if (qwen || c.window == 0 || !in.has("layer_types")) return;
    // Ministral has the model_type of Mistral: by this key transformers tells them apart.
    const std::vector<std::string> types = read_layer_types(in, c.L);
    const auto all_are = [&](const char* kind) { return std::ranges::count(types, kind) == c.L; };
    check(all_are("full_attention") || all_are("sliding_attention"), in.path(),
          ": \"layer_types\" of mistral is supported only where all are full_attention, or all sliding_attention");
    if (all_are("full_attention")) c.window = 0;
}

// llama, mistral, qwen2, qwen3. mfa, our own: one key/value head, and queries from a latent of share_q_dim numbers.
Config read_llama(const ConfigReader& in, const std::string& type) {
    Config c = read_llama_like(in, type);
    // Heads need not fill the width: Qwen3-0.6B has 16 heads of 128 columns at a width of 1024.
    const int64_t default_D = in.is_null("head_dim") ? 0 : defaults_of(type).head_dim;
    check(in.has("head_dim") || default_D > 0 || c.C % c.H == 0, in.path(), ": hidden_size ", c.C,
          " cannot be divided by num_attention_heads ", c.H);
    c.D = in.integer("head_dim", default_D > 0 ? default_D : c.C / c.H);
    read_window(in, type, c);
    c.mistral = type == "mistral";
    c.qk_norm = type == "qwen3";
    if (type == "mfa") c.attention = "mfa", c.q_rank = in.integer("share_q_dim");
    return c;
}

// deepseek_v3, and deepseek_v2, which is the same where there are no experts.
Config read_deepseek(const ConfigReader& in, const std::string& type) {
    Config c = read_llama_like(in, type);
    const bool v3 = type == "deepseek_v3";
    const int64_t n_dense = in.has("first_k_dense_replace") ? in.count("first_k_dense_replace") : v3 ? 3 : 0;
    check(n_dense >= c.L, in.path(), ": layers from ", n_dense, " on have experts (first_k_dense_replace ", n_dense,
          ", num_hidden_layers ", c.L, "), which are not there yet: only models without experts can be used");
    check(c.K == c.H, in.path(), ": num_key_value_heads ", c.K, " must be num_attention_heads ", c.H,
          ": every head has its own key");
    // transformers multiplies the softmax scale by it for every rope_type.
    check(c.rope_scaling.kind == RopeKind::yarn || c.rope_scaling.mscale_all_dim == 0, in.path(),
          ": mscale_all_dim is supported for rope_type yarn only");
    c.attention = "mla";
    c.q_rank = in.is_null("q_lora_rank") ? 0 : in.integer("q_lora_rank");  // null: queries come from the input
    c.kv_rank = in.integer("kv_lora_rank");
    c.D_rope = in.integer("qk_rope_head_dim");
    c.D = in.integer("qk_nope_head_dim") + c.D_rope;
    c.D_v = in.integer("v_head_dim");
    const bool interleave = in.boolean("rope_interleave", !in.is_null("rope_interleave"));  // null is false
    c.rope_pairs = !v3 || interleave ? RopePairs::neighbours : RopePairs::halves;
    return c;
}

// The model types that can be read; what each has where a key is missing is in defaults_of.
const struct {
    const char* name;
    Config (*read)(const ConfigReader& in, const std::string& type);
} kModelTypes[] = {
    {"gpt2", read_gpt2},   {"llama", read_llama},          {"mistral", read_llama},        {"qwen2", read_llama},
    {"qwen3", read_llama}, {"deepseek_v2", read_deepseek}, {"deepseek_v3", read_deepseek}, {"mfa", read_llama}};

}  // namespace

Config load_config(const std::string& preset_or_path) {
    if (const Config* preset = find_preset(preset_or_path)) return *preset;
    std::string path = preset_or_path;
    const auto is_config_json = [&] { return std::filesystem::path(path).filename() == "config.json"; };
    if (!is_config_json() && is_folder(path)) path += "/config.json";
    if (!is_there(path))
        fail("no model '", preset_or_path, "': use one of ", comma_list(preset_names()),
             ", or the path of a config.json or of its folder (there is no file ", preset_or_path, ", and no folder ",
             preset_or_path, " with a config.json; models are not downloaded)");
    // A file of another name may be a pipe, as in --model <(...).
    const ConfigReader in(path, is_config_json() ? read_json_file(path) : parse_json(read_text_file(path), path));
    check(in.object().isObject(), path, ": expected a JSON object");
    const std::string type = in.text("model_type", "");
    const auto known = std::ranges::find_if(kModelTypes, [&](const auto& its) { return its.name == type; });
    if (known == std::end(kModelTypes)) {
        std::string names;
        for (const auto& its : kModelTypes) names += concat(names.empty() ? "" : ", ", its.name);
        fail(path, ": model_type ", in_quotes(type), " is not supported, only one of ", names);
    }
    const Config config = known->read(in, type);
    check(in.is_true("is_causal"), path,
          ": is_causal is not true: models in which a token sees those after it are not supported");
    // Other values of any key for single layers: the whole model's would be taken for them, too.
    check(member(in.object(), "per_layer_config").empty(), path,
          ": per_layer_config is not supported: a key has one value for all layers");
    check_config(config);
    return config;
}

std::pair<std::string, std::string> hugging_face_type(const Config& c) {
    if (c.attention == "mla") return {"deepseek_v3", "DeepseekV3ForCausalLM"};
    if (c.attention == "mfa") return {"mfa", "MfaForCausalLM"};  // transformers has none
    check(c.attention == "gqa", "model configuration: the attention '", c.attention,
          "' has no model_type, and would be read as grouped-query attention: give it one in "
          "model/huggingface_config.cu");
    const bool qwen3 = c.qk_norm, qwen2 = !qwen3 && c.qkv_bias && !c.attn_out_bias, qwen = qwen2 || qwen3;
    const bool mistral = !qwen && c.mistral, llama = !qwen && !mistral;
    check((c.qkv_bias == c.attn_out_bias || qwen2) && (!c.qkv_bias || !mistral) && (!c.mlp_bias || llama) &&
              (c.window == 0 || !llama) && (c.n_full_layers == 0 || qwen),
          "model configuration: no model_type of Hugging Face has these biases and windows together");
    if (qwen3) return {"qwen3", "Qwen3ForCausalLM"};
    if (qwen2) return {"qwen2", "Qwen2ForCausalLM"};
    if (mistral) return {"mistral", "MistralForCausalLM"};
    return {"llama", "LlamaForCausalLM"};
}

namespace {

// torch_dtype, here and below, is what save_model writes: float32 whatever the training's precision was, so that
// nothing is lost. n_ctx is what GPT-2's first readers called n_positions.
// The three "pdrop" are 0.1 where they are missing: transformers would train a model on with dropout that has had none.
JsonText gpt2_to_json(const Config& c) {
    return {{"architectures", JsonText::array({"GPT2LMHeadModel"})},
            {"model_type", "gpt2"},
            {"activation_function", c.feed_forward == "gelu" ? "gelu_new" : c.feed_forward},
            {"vocab_size", c.V},
            {"n_positions", c.T_max},
            {"n_ctx", c.T_max},
            {"n_embd", c.C},
            {"n_layer", c.L},
            {"n_head", c.H},
            {"n_inner", c.F},
            {"layer_norm_epsilon", c.norm_eps},
            {"initializer_range", c.init_std},
            {"attn_pdrop", 0.0},
            {"embd_pdrop", 0.0},
            {"resid_pdrop", 0.0},
            {"tie_word_embeddings", c.tied},
            {"torch_dtype", "float32"}};
}

JsonText rope_scaling_to_json(const RopeScaling& s) {
    const auto* kind = std::find_if(std::begin(kRopeKinds), std::end(kRopeKinds),
                                    [&](const auto& known) { return known.second == s.kind; });
    JsonText out = {{"rope_type", kind->first}, {"factor", s.factor}};
    if (s.kind == RopeKind::linear || s.kind == RopeKind::dynamic) return out;
    out.set("original_max_position_embeddings", s.original_max_position);
    if (s.kind == RopeKind::llama3) {
        out.set("low_freq_factor", s.low_freq_factor);
        out.set("high_freq_factor", s.high_freq_factor);
        return out;
    }
    out.set("beta_fast", s.beta_fast);
    out.set("beta_slow", s.beta_slow);
    if (s.mscale != 0) out.set("mscale", s.mscale);
    if (s.mscale_all_dim != 0) out.set("mscale_all_dim", s.mscale_all_dim);
    if (s.attention_factor != 0) out.set("attention_factor", s.attention_factor);
    return out;
}

// The keys that only multi-head latent attention has. It is always saved as deepseek_v3, with the keys that say what
// deepseek_v2 fixes.
void add_latent_attention(JsonText& out, const Config& c) {
    out.set("q_lora_rank", c.q_rank > 0 ? JsonText(c.q_rank) : nullptr);
    out.set("kv_lora_rank", c.kv_rank);
    out.set("qk_nope_head_dim", c.D - c.D_rope);
    out.set("qk_rope_head_dim", c.D_rope);
    out.set("v_head_dim", c.D_v);
    out.set("rope_interleave", c.rope_pairs == RopePairs::neighbours);
    out.set("first_k_dense_replace", c.L);  // no layer has experts
    out.set("num_nextn_predict_layers", 0);
}

// Mistral's class has a window by default, so null must be written where there is none. Qwen's classes have none by
// default. layer_types follows from max_window_layers.
void add_window(JsonText& out, const Config& c) {
    if (c.mistral) {
        out.set("sliding_window", c.window > 0 ? JsonText(c.window) : nullptr);
    } else if (c.window > 0) {
        out.set("use_sliding_window", true);
        out.set("sliding_window", c.window);
        out.set("max_window_layers", c.n_full_layers);
    }
}

JsonText llama_to_json(const Config& c) {
    const auto [type, architecture] = hugging_face_type(c);
    JsonText out = {{"architectures", JsonText::array({architecture})},
                    {"model_type", type},
                    {"hidden_act", c.feed_forward == "swiglu" ? "silu" : c.feed_forward},
                    {"vocab_size", c.V},
                    {"max_position_embeddings", c.T_max},
                    {"hidden_size", c.C},
                    {"num_hidden_layers", c.L},
                    {"num_attention_heads", c.H},
                    {"num_key_value_heads", c.K},
                    {"intermediate_size", c.F},
                    {"rms_norm_eps", c.norm_eps},
                    {"rope_theta", c.rope_base},
                    {"attention_bias", c.attn_out_bias},
                    {"mlp_bias", c.mlp_bias},
                    {"initializer_range", c.init_std},
                    {"tie_word_embeddings", c.tied},
                    {"torch_dtype", "float32"}};
    if (c.attention == "mla") add_latent_attention(out, c);
    else out.set("head_dim", c.D);
    if (c.attention == "mfa") out.set("share_q_dim", c.q_rank);
    add_window(out, c);
    // In the older form, which every version of transformers reads.
    if (c.rope_scaling.acts()) out.set("rope_scaling", rope_scaling_to_json(c.rope_scaling));
    return out;
}

}  // namespace

std::string config_to_json(const Config& c, const TokenIds& token_ids) {
    JsonText out = c.family == Family::gpt2 ? gpt2_to_json(c) : llama_to_json(c);
    for (const auto& [key, ids] : token_ids) out.set(key, parse_json(ids, key));
    return out.indented(2) + "\n";
}
