// model/model.h: what a model is: configuration, parameters, activations, and Hugging Face folders.
//
// Letters as in layers/layers.h: B batch, T sequence length, C channels, H query heads, K key/value heads, D head size,
// V vocabulary, F feed-forward width, L layers; N = B T rows.
//
// Files, in reading order:
//     config.cu        presets, counts of parameters and FLOPs
//     parameters.cu    the parameters, their names and places; initial values
//     activations.cu   what a forward keeps for its backward, and what recomputation leaves out
//     attention.h, attention_gqa.cu, attention_mla.cu, attention_mfa.cu
//     huggingface_config.cu, huggingface_weights.cu   config.json and safetensors
#pragma once

#include "core/core.h"
#include "layers/layers.h"
#include "optim/optim.h"
#include "parallel/data/data.h"

// ---------------------------------------------------------------------------------------------------------------------
// Configuration

// gpt2: learned positions, LayerNorm, biases, GELU.  llama: rotary positions, RMSNorm, SwiGLU; Qwen and DeepSeek too.
enum class Family { gpt2, llama };

// How a block's queries, keys and values come from its input; model/attention.h has a module for each.
//   gqa   each from its own matrix: MHA (K = H), MQA (K = 1), GQA                                        model/attention_gqa.cu
//   mla   keys and values of all heads from one latent of kv_rank numbers                                model/attention_mla.cu
//   mfa   queries of all heads from one latent of q_rank numbers; one key and value head                 model/attention_mfa.cu
enum class AttentionKind { gqa, mla, mfa };

struct Config {
    Family family = Family::llama;
    int64_t V = 256;      // vocabulary
    int64_t T_max = 256;  // longest sequence: GPT-2 has a learned position for each; LLaMA only declares it
    int64_t L = 4, H = 4, K = 4, D = 32, C = 128, F = 352;
    double norm_eps = 1e-5;
    double rope_base = 10000.0;  // LLaMA
    RopeScaling rope_scaling;
    bool tied = false;  // the head is the token embedding
    double init_std = 0.02;

    AttentionKind attention = AttentionKind::gqa;
    // Biases of linear layers: GPT-2 always has all of them. LLaMA's and Qwen3's attention_bias is both of attention.
    bool qkv_bias = false;       // gqa: on queries, keys and values (Qwen2: there alone)
    bool attn_out_bias = false;  // gqa: on the product that follows attention
    bool mlp_bias = false;       // on the products of the feed-forward (LLaMA's mlp_bias)
    bool qk_norm = false;        // gqa: RMSNorm of each query and key head before rope (Qwen3)
    // gqa: sliding-window attention: token t sees the tokens s with t - window < s <= t, in all layers but the first
    // n_full_layers (Qwen's max_window_layers; 0 for Mistral). 0: no window.     (Beltagy et al. 2020, arXiv:2004.05150)
    int64_t window = 0, n_full_layers = 0;
    bool mistral = false;  // what Hugging Face calls it: without a window Mistral's maths is LLaMA's
    int64_t q_rank = 0;    // mla, mfa: numbers of the latent that queries come from; mla: 0 if they come from the input
    int64_t kv_rank = 0;   // mla: numbers of the latent that keys and values come from
    int64_t D_rope =
        0;            // mla: of the D columns of a query or key head the last D_rope are rotated; heads share the key's
    int64_t D_v = 0;  // mla: columns of a value head
    RopePairs rope_pairs = RopePairs::halves;  // mla

    int64_t V_padded() const {
        return round_up(V, 128);
    }  // rows of the embedding and of the head: GEMMs like multiples
    bool has_qkv_bias() const { return family == Family::gpt2 || qkv_bias; }
    bool has_attn_out_bias() const { return family == Family::gpt2 || attn_out_bias; }
    bool has_mlp_bias() const { return family == Family::gpt2 || mlp_bias; }
    int64_t rope_D() const {
        return attention == AttentionKind::mla ? D_rope : D;
    }  // columns of a head that rope rotates
    int64_t value_D() const { return attention == AttentionKind::mla ? D_v : D; }  // columns of a value head
    // Columns of what the block's first product gives: queries, keys and values, or what they are made from.
    int64_t qkv_width() const {
        if (attention == AttentionKind::mfa) return q_rank + 2 * D;
        if (attention == AttentionKind::mla) return (q_rank > 0 ? q_rank : H * D) + kv_rank + D_rope;
        return (H + 2 * K) * D;
    }
    int64_t attn_width() const { return H * value_D(); }  // of attention's output
    // Numbers that a token leaves in the cache of one layer while text is generated.
    int64_t cache_width() const { return attention == AttentionKind::mla ? kv_rank + D_rope : 2 * K * D; }
    // Inputs of the activation: LLaMA's SwiGLU has two, gate and up.
    int64_t up_width() const { return family == Family::llama ? 2 * F : F; }
};
void check_config(const Config& config);  // Error for sizes that do not fit together

// A preset (preset_names()), or a Hugging Face config.json (or its folder): model_type gpt2, llama, mistral, qwen2,
// qwen3, deepseek_v2 and deepseek_v3 without experts, and our own mfa (keys as llama's, and share_q_dim for q_rank).
Config load_config(const std::string& preset_or_path);
std::vector<std::string> preset_names();
const Config* find_preset(const std::string& name);  // nullptr: there is none of this name
std::string config_to_json(const Config& config);    // a config.json that transformers reads
std::pair<std::string, std::string> hugging_face_type(
    const Config& config);  // model_type, and the class of transformers

int64_t parameter_count(const Config& config);  // without the padding of the vocabulary
// Floating-point operations of a training step per token: 6 for each weight that multiplies (the head counts, also when
// tied; the embedding lookup does not), and 3 L H (D + value D) T for the attention scores and values, causal half counted.
double flops_per_token(const Config& config, int64_t T);
// (inputs, outputs) of the linear layers of a block.
std::vector<std::pair<int64_t, int64_t>> block_linear_shapes(const Config& config);

// ---------------------------------------------------------------------------------------------------------------------
// Parameters

struct Linear {
    Tensor weight, bias;  // (O, C), (O); GPT-2 has biases, Qwen2 on q, k and v, LLaMA none
    Tensor dweight, dbias;
    Fp8Weight fp8;     // with fp8: the weight as the products read it
    Tensor fp8_state;  // and, with delayed scaling, the largest values of the last steps
};
struct Norm {
    Tensor weight, bias;  // (C); GPT-2: LayerNorm, with bias; LLaMA: RMSNorm, without
    Tensor dweight, dbias;
};
struct Block {
    int64_t window = 0;  // of its attention; 0: none
    Norm norm1;
    Linear qkv;       // (qkv_width, C): queries, keys and values in one product, or the latents they are made from
    Norm q_norm;      // (D) of query heads (Qwen3); (q_rank) of the query latent (MLA, MFA)
    Norm k_norm;      // (D) of key heads (Qwen3); (kv_rank) of the key/value latent (MLA)
    Linear q_up;      // MLA, MFA: (H D, q_rank), latent to queries
    Linear kv_up;     // MLA: (H (D - D_rope + D_v), kv_rank), latent to [key | value] of each head
    Linear attn_out;  // (C, H value_D)
    Norm norm2;
    Linear up;    // GPT-2 (F, C); LLaMA (2F, C) = [gate | up]
    Linear down;  // (C, F)
};

// The types of a model's numbers.                                        (Micikevicius et al. 2018, arXiv:1710.03740)
// Mixed precision: forward and backward in 16 bits, and a float32 master copy of the weights for the optimizer, because a
// step is often smaller than the distance from a 16-bit weight to the next.
struct Precision {
    DType dtype = DType::f32;         // of weights and activations, and of the gradients of activations
    DType grad_dtype = DType::f32;    // of the parameters' gradients: f32, or dtype
    bool master = false;              // f32 master weights beside 16-bit ones
    Fp8Recipe fp8 = Fp8Recipe::none;  // products of the blocks' linear layers on 8-bit floats; the rest stays in dtype
};

// The parameters' memory is FlatParameters' (parallel/data/data.h): flat arrays of units, which are the embedding, the blocks and
// the head. Every parameter below is a view into its unit.
struct Model : FlatParameters {
    Config config;
    Precision precision;
    DataParallel* data_parallel =
        nullptr;  // many ranks: gathers units before they are used, and reduces their gradients
    FlashTier attention = FlashTier::automatic;

    Tensor wte, dwte;  // (V_padded, C) token embedding
    Tensor wpe, dwpe;  // (T_max, C) position embedding, GPT-2
    std::vector<Block> blocks;
    Norm final_norm;
    Linear head;        // (V_padded, C); its weight is wte where tied
    Tensor rope_table;  // (T, rope_D) f32, LLaMA
    Tensor fp8_states;  // (2 x linear layers, kFp8StateN) f32, delayed scaling

    // What an optimizer of all parameters updates: the masters, and the weights as their copy; or the weights alone, where 16 bits are
    // rounded stochastically.
    Weights all_weights(uint64_t seed) const;
};

// Takes the model's memory from the arenas. Call it while they count, reserve() them, and call it again.
Model build_model(const Config& config, const Precision& precision, int64_t T, Arena& weights, Arena& grads,
                  Arena& masters, const Sharding& sharding = {});
// Random weights, each parameter a function of (seed, its name): normal(0, 0.02), output layers of the residual branches
// divided by sqrt(2 L) (Radford et al. 2019); biases 0, norm weights 1.
void init_weights(Model& model, uint64_t seed);
// With fp8, after every change of the weights: quantises those of the blocks; and after every step: moves the histories on.
void quantise_weights(const Model& model, cudaStream_t stream);
void advance_fp8(const Model& model, cudaStream_t stream);

// Units by their place in Model::units: 0 the embedding, 1 + l block l, L + 1 the head.
size_t head_unit(const Model& model);
// With many ranks; no-ops on one. Before a unit's weights are read (`next`: the unit that follows, or -1); before the first
// kernel that adds to a unit's gradients; after the last one.
void gather(const Model& model, size_t unit, int64_t next, cudaStream_t stream);
void begin_grads(const Model& model, size_t unit, cudaStream_t stream);
void end_grads(const Model& model, size_t unit, cudaStream_t stream);

// Hugging Face folders: config.json with model.safetensors, or its shards (huggingface_weights.cu, huggingface_config.cu).
// With many ranks all of them call these, and rank 0 writes.
void load_weights(Model& model, const std::string& folder);
void save_model(const Model& model, const std::string& folder);

// ---------------------------------------------------------------------------------------------------------------------
// Activations: all that a forward keeps for its backward. The caller owns them; several sets may be in flight.
//
// Recomputation keeps less and computes the rest again in the backward: the same kernels on the same numbers, so the same
// bits.                                  (Chen et al. 2016, arXiv:1604.06174; selective: Korthikanti et al. 2022, arXiv:2205.05198)
//   none        all activations of L blocks
//   every n     the input of every n-th block, and all activations of n blocks at a time: L/n + n, least at n = sqrt(L)
//   full        every 1: the input of every block
//   selective   not what is cheap to compute again: the outputs of norms and activation functions

struct Recompute {
    int64_t every = 0;  // 0: do not forget blocks
    bool selective = false;
};
Recompute parse_recompute(const std::string& text);  // "none", "full", "selective" or a number

struct NormSaved {
    Tensor sum;         // (N, C): what was normalised, inp + branch
    Tensor out;         // (N, C)
    Tensor mean, rstd;  // (N) f32
};
struct BlockSaved {
    NormSaved norm1, norm2;
    Tensor qkv;       // (N, qkv_width): the first product; what is a query or a key in it, after rope
    Tensor q, k, kv;  // queries, keys, [key | value] of each head: where they do not stand in qkv (model/attention.h)
    Tensor q_latent, kv_latent;  // (N, q_rank), (N, kv_rank) after their norms
    Tensor q_rstd, k_rstd;       // (N, heads) f32, of q_norm and k_norm
    Tensor lse;                  // (B, H, T) f32: the logarithm of each softmax's denominator
    Tensor attn;                 // (N, H value_D): attention's output
    Tensor up, act;              // (N, up_width), (N, F)
    Tensor fp8;                  // (6, 2) f32: what the inputs and output gradients of the linear layers were scaled by
    Tensor cache;                // this layer's rows of a LatentCache; set only by forward_cached
};
struct Activations {
    int64_t B = 0, T = 0;
    Recompute recompute;
    Tensor tokens, targets;  // (B, T), (N) i32
    // Where rows hold several documents that must not see each other, i32; otherwise empty. documents (B, T, 2): [first, end)
    // of each token's document in its row; positions (B, T): counted from its first token. Filled like tokens.
    Tensor documents, positions;
    Tensor embedded;                 // (N, C)
    std::vector<BlockSaved> blocks;  // L of them; with recomputation they share tensors
    NormSaved final_norm;
    Tensor logits;  // (N, V_padded); the loss turns them into their own gradient
    Tensor losses;  // (N) f32
    // Shared by all layers, holding nothing between them.
    Tensor branch;                                    // (N, C): output of a residual branch until the next norm adds it
    Tensor dresidual, dnorm, dqkv, dattn, dup, dact;  // training only
    Tensor dq, dk, dkv, dq_latent, dkv_latent;        // training only, where attention has them
    Tensor scratch, links;
    bool training = false;  // the last forward was a training step's
    int64_t first = 0;      // position of the first token: 0 but in forward_cached
};
// For training, or only to run forward.
Activations take_activations(const Model& model, int64_t B, int64_t T, const Recompute& recompute, Arena& arena);
Activations take_forward_activations(const Model& model, int64_t B, int64_t T, Arena& arena);
void take_documents(Activations& acts, Arena& arena);  // documents and positions, for rows that need them

// ---------------------------------------------------------------------------------------------------------------------
// MLA with a cache: what a token leaves in it

struct LatentCache {
    std::vector<Tensor> layers;  // L of (B, T_max, kv_rank + D_rope)
    int64_t length = 0;          // tokens of each sequence that are in it
};
LatentCache take_latent_cache(const Model& model, int64_t B, int64_t T_max, Arena& arena);
