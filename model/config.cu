// model/config.cu: model configurations by name, what fits together, and FLOPs.
#include "model/sublayer.h"

#include <numeric>

namespace {

Config gpt2(int64_t L, int64_t H, int64_t C) {
    Config c;
    c.family = Family::gpt2, c.feed_forward = "gelu";
    c.V = 50257, c.T_max = 1024, c.L = L, c.H = H, c.K = H, c.D = C / H, c.C = C, c.F = 4 * C, c.tied = true;
    return c;
}

Config llama3(int64_t L, int64_t H, int64_t C, int64_t D, int64_t F, double factor, bool tied) {
    Config c;
    c.V = 128256, c.T_max = 131072, c.L = L, c.H = H, c.K = 8, c.D = D, c.C = C, c.F = F, c.rope_base = 500000.0,
    c.tied = tied;
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
    Config c;  // bytes as tokens: the defaults of Config
    c.tied = true;
    return c;
}

// tiny, and a model of LLaMA 3.2 1B's shape, with other attention. Ours: DeepSeek and StepFun have published none
// without experts.
Config with_mla(Config c, int64_t q_rank, int64_t kv_rank, int64_t D_nope, int64_t D_rope, int64_t D_v) {
    c.attention = "mla", c.rope_pairs = RopePairs::neighbours, c.norm_eps = 1e-6;
    c.K = c.H, c.q_rank = q_rank, c.kv_rank = kv_rank, c.D = D_nope + D_rope, c.D_rope = D_rope, c.D_v = D_v;
    return c;
}
Config with_mfa(Config c, int64_t H, int64_t D, int64_t q_rank) {
    c.attention = "mfa", c.H = H, c.K = 1, c.D = D, c.q_rank = q_rank;
    return c;
}
Config one_billion() {
    Config c = llama3(16, 16, 2048, 128, 8192, 1.0, true);
    c.T_max = 4096, c.rope_base = 10000.0, c.rope_scaling = {};
    return c;
}

// Sizes as published: GPT-2 by OpenAI (2019), LLaMA 3.1 and 3.2 by Meta (2024), Qwen2.5 and Qwen3 by Alibaba (2024,
// 2025).
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

}  // namespace

std::vector<std::string> preset_names() {
    std::vector<std::string> names;
    for (const auto& [name, config] : presets()) names.push_back(name);
    return names;
}

const Config* find_preset(const std::string& name) {
    for (const auto& [its_name, config] : presets())
        if (its_name == name) return &config;
    return nullptr;
}

// No fewer parameters than the model has, in floating point: so also where 64-bit products of the sizes would overflow.
// One side of each matrix of a block is C, q_rank or kv_rank.
static double most_parameters(const Config& c) {
    const auto x = [](int64_t n) { return static_cast<double>(n); };
    const double one_side = x(c.C) + x(c.q_rank) + x(c.kv_rank),
                 other_side = (x(c.H) + 2 * x(c.K)) * (x(c.D) + x(c.D_v)) + 3 * x(c.F) + one_side + x(c.D_rope);
    return x(c.L) * one_side * other_side + (2 * x(c.V) + x(c.T_max)) * x(c.C);
}

void check_config(const Config& c) {
    check(c.V > 0 && c.T_max > 0 && c.L > 0 && c.H > 0 && c.K > 0 && c.D > 0 && c.C > 0 && c.F > 0,
          "model configuration: every size must be positive");
    // Elements and bytes are counted in 64 bits, and lists on the host have an entry for each layer.
    constexpr int64_t most_layers = 1 << 16;
    check(c.L <= most_layers && most_parameters(c) <= 0x1p50, "model configuration: ", c.L, " layers with up to ",
          most_parameters(c), " parameters in all; at most ", most_layers,
          " layers and 2^50 parameters are supported: is one of its sizes wrong?");
    const SubLayer& attention = find_attention(c.attention);
    attention.check(c);
    find_feed_forward(c.feed_forward).check(c);
    check(c.window >= 0 && c.n_full_layers >= 0, "model configuration: a window of ", c.window, " and ",
          c.n_full_layers, " layers without it: neither can be negative");
    const bool plain_gqa = c.family == Family::llama && c.attention == "gqa";
    check(plain_gqa || (c.window == 0 && !c.qkv_bias && !c.attn_out_bias && !c.mlp_bias && !c.qk_norm),
          "model configuration: windows, norms of heads and optional biases are there for grouped-query attention with "
          "rotary positions only");
    const int64_t rope_width = attention.rope_width(c);
    check(c.family != Family::llama || (rope_width > 0 && rope_width % 2 == 0),
          "model configuration: rotary embedding turns pairs, so the head size ", rope_width, " must be even");
}

Config config_of_rank(const Config& c, const TensorLayout& layout) {
    const int64_t n = layout.part(layout.heads).of, columns = layout.part(layout.stream_columns).of,
                  inputs = layout.part(layout.enter_columns).of, outputs = layout.part(layout.leave_columns).of;
    const std::string flags = layout.divides_columns()
                                  ? concat("--tp ", layout.size, " --tp-mode ", tensor_mode_name(layout.mode))
                                  : concat("--tp ", layout.size);
    const auto divides = [&](int64_t size, const char* what, int64_t parts) {
        const char* among = layout.divides_columns() ? "by" : "among";
        check(size % parts == 0, flags, ": the model's ", size, " ", what, " cannot be divided ", among, " ", parts,
              parts == n && !layout.divides_columns() ? " ranks: use a divisor of " : ": it must be a divisor of ",
              size);
    };
    divides(c.H, "heads", n);
    divides(c.F, "feed-forward columns", n);
    if (layout.divides_columns()) {
        divides(c.C, "columns of the residual stream (hidden_size)", std::lcm(columns, inputs));
        divides(c.H * c.value_D(), "columns of all heads", outputs);
        divides(c.F, "feed-forward columns", outputs);
    }
    check(c.K % n == 0 || n % c.K == 0, flags, ": the model's ", c.K, " key/value heads cannot be given to ", n,
          " ranks evenly: use a divisor or a multiple of ", c.K);
    Config local = c;
    local.H /= n, local.F /= n, local.K = std::max<int64_t>(1, c.K / n), local.C /= columns;
    // Found here, and not by the kernels of norms: those would name no size of the model, some only in the first step.
    constexpr int64_t most = kMaxNormC;
    check(local.C <= most, "model configuration: hidden_size ", c.C,
          columns > 1 ? concat(" on ", columns, " ranks") : "", ": norms take rows of at most ", most,
          " columns on a rank: ",
          columns > 1 ? "give --tp more ranks, or use a smaller model"
                      : "use a smaller model, or train it with tensor parallelism in 2d, 2.5d or 3d, which divides the "
                        "rows (doc/ranks.md)");
    const int64_t latent = std::max(c.q_rank, c.kv_rank);
    check(latent <= most, "model configuration: a latent of ", latent,
          " columns (q_lora_rank, kv_lora_rank): norms take rows of at most ", most, ": use a smaller model");
    return local;
}

int64_t vocabulary_rows(const Config& c, const TensorLayout& layout) {
    const int64_t n = layout.part(layout.heads).of;
    return n == 1 ? c.V_padded() : round_up(ceil_div(c.V, n), 16);
}
int64_t first_token(const Config& c, const TensorLayout& layout) {
    return layout.part(layout.heads).index * vocabulary_rows(c, layout);
}
int64_t n_tokens(const Config& c, const TensorLayout& layout) {
    return std::clamp<int64_t>(c.V - first_token(c, layout), 0, vocabulary_rows(c, layout));
}

std::vector<std::pair<int64_t, int64_t>> block_linear_shapes(const Config& c) {
    Model model;
    Placer placer(model, true);
    placer.begin_unit("block", 1);
    Block block = place_block(placer, c, 0);
    std::vector<std::pair<int64_t, int64_t>> shapes;
    for (const Linear* linear : linears(block)) shapes.push_back({linear->weight.shape[1], linear->weight.shape[0]});
    return shapes;
}

double flops_per_token(const Config& c, int64_t T) {
    int64_t multiplying = c.V * c.C;
    for (const auto& [inputs, outputs] : block_linear_shapes(c)) multiplying += c.L * inputs * outputs;
    // Keys that a token sees, the mean over the tokens, of all layers together. With a window of w tokens the first w
    // tokens see w / 2, and the others w.
    const double t = static_cast<double>(T), w = static_cast<double>(std::min(c.window, T)),
                 full = static_cast<double>(c.window > 0 ? std::min(c.n_full_layers, c.L) : c.L),
                 keys = full * t / 2 + (static_cast<double>(c.L) - full) * (w - w * w / (2 * t));
    return 6.0 * static_cast<double>(multiplying) +
           6.0 * static_cast<double>(find_attention(c.attention).score_width(c)) * keys;
}

std::vector<double> block_flops_per_token(const Config& c, int64_t T) {
    const auto one_of = [&](int64_t n_full_layers) {  // where all blocks are alike
        Config alike = c;
        alike.n_full_layers = n_full_layers;
        return (flops_per_token(alike, T) - 6 * static_cast<double>(c.V * c.C)) / static_cast<double>(c.L);
    };
    std::vector<double> flops(static_cast<size_t>(c.L), one_of(0));
    std::fill_n(flops.begin(), std::min(c.n_full_layers, c.L), one_of(c.L));
    return flops;
}
