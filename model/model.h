// model/model.h: what a model is made of: configuration, parameters, activations, and Hugging Face folders.
//
// Letters as in layers/layers.h: B batch, T sequence length, C channels, H query heads, K key/value heads, D head size,
// V vocabulary, F feed-forward width, L layers; N = B T rows.
//
// Files, in reading order:
//     config.cu          presets; FLOPs
//     parameters.cu      the parameters, their names, places and number; initial values
//     norm.cu            LayerNorm or RMSNorm, and the addition to the residual stream
//     block_linear.cu    the linear layer of a block: 16 bits or fp8; weight gradients that are computed later
//     activations.cu     what a forward keeps for its backward, and the memory that all micro-batches share
//     in_flight.cu       the same for a rank of a pipeline: pools that many micro-batches take their memory from
//     recompute.cu       what is not kept, but computed again
//     stages.cu          which blocks a stage of a pipeline has, and which rank has what
//     visits.cu          which units a step visits in which order
//     cached_step.cu     what a step of inference works with: the pools of the cache, and its activations
//     quantised.cu       a copy of a model with weights of 8 bits
//     versions.cu        the same model with other weights
//     sublayer.h         what an attention or a feed-forward is; the table of them is in sublayers.cu, and each is a
//                        file: attention_gqa.cu, attention_mla.cu, attention_mfa.cu, feed_forward_swiglu.cu,
//                        feed_forward_gelu.cu
//     huggingface_folder.cu, huggingface_config.cu, huggingface_weights.cu   which folder; config.json, safetensors
#pragma once

#include "core/core.h"
#include "layers/layers.h"
#include "optim/optim.h"
#include "parallel/context/context.h"
#include "parallel/data/data.h"
#include "parallel/tensor/tensor.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <set>

struct SubLayer;  // sublayer.h: an attention or a feed-forward
struct Model;

// ---------------------------------------------------------------------------------------------------------------------
// Configuration

// gpt2: learned positions, LayerNorm, biases, GELU.  llama: rotary positions, RMSNorm, SwiGLU; Qwen and DeepSeek too.
enum class Family { gpt2, llama };

// The attentions (attention_*.cu) and feed-forwards (feed_forward_*.cu) that a block can have, by name:
//   gqa      queries, keys and values each from a matrix of its own: MHA (K = H), MQA (K = 1), GQA
//   mla      keys and values of all heads from one latent of kv_rank numbers
//   mfa      queries of all heads from one latent of q_rank numbers; one key and value head
//   swiglu   down (silu(gate x) * up x)
//   gelu     down gelu(up x)
const SubLayer& find_attention(const std::string& name);     // Error for an unknown name: lists those in the table
const SubLayer& find_feed_forward(const std::string& name);  // likewise
std::vector<const SubLayer*>& attention_table();
std::vector<const SubLayer*>& feed_forward_table();

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

    std::string attention = "gqa", feed_forward = "swiglu";
    // Biases of linear layers: GPT-2 always has all of them. LLaMA's and Qwen3's attention_bias is both of attention.
    bool qkv_bias = false;       // gqa: on queries, keys and values (Qwen2: there alone)
    bool attn_out_bias = false;  // gqa: on the product that follows attention
    bool mlp_bias = false;       // on the products of the feed-forward (LLaMA's mlp_bias)
    bool qk_norm = false;        // gqa: RMSNorm of each query and key head before rope (Qwen3)
    // gqa: sliding-window attention: token t sees the tokens s with t - window < s <= t, in all layers but the first
    // n_full_layers (Qwen's max_window_layers; 0 for Mistral). 0: no window.   (Beltagy et al. 2020, arXiv:2004.05150)
    int64_t window = 0, n_full_layers = 0;
    bool mistral = false;  // what Hugging Face calls it: without a window Mistral's maths is LLaMA's
    int64_t q_rank = 0;    // mla, mfa: numbers of the latent that queries come from; mla: 0 if they come from the input
    int64_t kv_rank = 0;   // mla: numbers of the latent that keys and values come from
    // mla: of the D columns of a query or key head the last D_rope are rotated; all heads share the rotated keys.
    int64_t D_rope = 0;
    int64_t D_v = 0;                           // mla: columns of a value head; 0 elsewhere: they have D
    RopePairs rope_pairs = RopePairs::halves;  // mla

    // Rows of the embedding and of the head: matrix products are faster with a multiple of 128.
    int64_t V_padded() const { return round_up(V, 128); }
    int64_t value_D() const { return D_v > 0 ? D_v : D; }  // columns of a value head
};
void check_config(const Config& config);  // Error for sizes that do not fit together

// Rows of the embedding and of the head on a rank: those of tokens first_token() to first_token() + n_tokens() - 1, and
// padding.
int64_t vocabulary_rows(const Config& config, const TensorLayout& layout);
int64_t first_token(const Config& config, const TensorLayout& layout);
int64_t n_tokens(const Config& config, const TensorLayout& layout);
// The sub-layers of a rank as a configuration of their own: its heads, its columns of the feed-forward and of the
// residual stream. Error, with the number to change, where they cannot be divided.
Config config_of_rank(const Config& config, const TensorLayout& layout);

// A preset (preset_names()), or a Hugging Face config.json (or its folder) of a model_type that kModelTypes of
// huggingface_config.cu has.
// Error that lists the presets, or that names the file and the key that is missing, wrong or not supported.
Config load_config(const std::string& preset_or_path);
std::vector<std::string> preset_names();
const Config* find_preset(const std::string& name);  // nullptr: there is none of this name
// Ids of special tokens, as JSON: "eos_token_id" -> "2", "[2, 3]" or "null".
using TokenIds = std::map<std::string, std::string>;
// A config.json that transformers reads. Error for biases and windows that none of its model types has together.
std::string config_to_json(const Config& config, const TokenIds& token_ids = {});
// Its model_type, and the name of the class in transformers. The same Error.
std::pair<std::string, std::string> hugging_face_type(const Config& config);

int64_t parameter_count(const Config& config);                // without the padding of the vocabulary
std::set<std::string> parameter_names(const Config& config);  // of the whole model, in files
// Floating-point operations of a training step per token: 6 for each weight that multiplies (the head counts, also when
// tied; the embedding lookup does not), and 3 L H (D + value D) T for the attention scores and values, causal half
// counted; in layers with a window, what lies in it.
double flops_per_token(const Config& config, int64_t T);
// Those of each block. The head has the others, 6 V C.
std::vector<double> block_flops_per_token(const Config& config, int64_t T);
// (inputs, outputs) of the linear layers of a block, in the order of Linear::index.
std::vector<std::pair<int64_t, int64_t>> block_linear_shapes(const Config& config);

// ---------------------------------------------------------------------------------------------------------------------
// Parameters

struct Linear {
    Tensor weight, bias;  // (O, C), (O); GPT-2 has biases, Qwen2 on q, k and v, LLaMA none
    Tensor dweight, dbias;
    Fp8Weight fp8;                         // with fp8: the weight as the products read it
    Tensor fp8_state;                      // and, with delayed scaling, the largest values of the last steps
    int64_t index = 0;                     // among the linear layers of its block
    QuantisedWeight quantised;             // of a quantised_copy(): then there is no weight
    Crossing crossing = Crossing::inside;  // tensor parallelism: does it read the residual stream, or write it?
    bool adds_bias = true;                 // 1D tensor parallelism: of ranks whose outputs are added one adds the bias
    bool weight_is_read = false;  // by others than the layer's product: it is not quantised (MLA's up-projection)
};
struct Norm {
    Tensor weight, bias;  // (C); GPT-2: LayerNorm, with bias; LLaMA: RMSNorm, without
    Tensor dweight, dbias;
};
// Parameters of an attention or a feed-forward. linears[0] reads the sub-layer's input, linears[1] writes its output;
// the file of the sub-layer says what the others are.
struct SubLayerParameters {
    std::array<Linear, 4> linears;
    std::array<Norm, 2> norms;
    int64_t window = 0;  // attention: how many tokens up to itself a token sees; 0: all
};
struct Block {
    Norm norm1;
    SubLayerParameters attention;
    Norm norm2;
    SubLayerParameters feed_forward;
};

// The types of a model's numbers.                                        (Micikevicius et al. 2018, arXiv:1710.03740)
// Mixed precision: forward and backward in 16 bits, and a float32 master copy of the weights for the optimizer, because
// a step is often smaller than the distance from a 16-bit weight to the next.
struct Precision {
    DType dtype = DType::f32;         // of weights and activations, and of the gradients of activations
    DType grad_dtype = DType::f32;    // of the parameters' gradients: f32, or dtype
    bool master = false;              // f32 master weights beside 16-bit ones
    Fp8Recipe fp8 = Fp8Recipe::none;  // products of the blocks' linear layers on 8-bit floats; the rest stays in dtype
};

// What a rank of a pipeline has of a model: the blocks of its stages, and with the first or the last of all stages the
// embedding or the head.
struct ModelPart {
    std::vector<int64_t> blocks = {};  // their numbers in the whole model, ascending; at least one
    bool embedding = true, head = true;
    // A tied head that is a matrix of its own, in the head's unit, with a gradient of its own: the same weights as the
    // embedding's, as long as both are updated with the sum of their gradients. Files have it once.
    bool head_copy = false;
};
ModelPart whole_model(const Config& config);

// The ranks of a pipeline, each with a part of the model, as checkpoints need to know them. (stages.cu)
class PipelineRanks {
  public:
    // parts: those of all ranks.
    PipelineRanks(Comm& comm, const Config& config, const std::vector<ModelPart>& parts);
    void take_memory(Arena& arena);
    int rank() const { return comm_.rank; }
    int size() const { return comm_.size; }
    // The first rank that has this unit of the whole model: it writes what several ranks have.
    int owner(size_t unit_number) const { return owners_[unit_number]; }
    bool owns(const Unit& unit) const { return owners_[unit.number] == comm_.rank; }
    // The same for the same parts on all ranks, and otherwise different.
    uint64_t key() const { return key_; }
    // n numbers of one rank, on rank 0; elsewhere nothing. To be called by these two.
    std::vector<float> bring(const std::vector<float>& values, int64_t n, int from);

  private:
    Comm& comm_;
    std::vector<int> owners_;  // by unit
    uint64_t key_ = 0;
    Tensor staging_;
};

// The parameters' memory is FlatParameters' (parallel/data/data.h): flat arrays of units, which are the embedding, the
// blocks and the head. Every parameter below is a view into its unit. A part of a model, too, has the unit of the
// embedding, without parameters where it is elsewhere, those of its blocks, and that of the head, likewise.
struct Model : FlatParameters {
    Config config;   // of the whole model
    ModelPart part;  // and what of it is here
    // Tensor parallelism: the sub-layers here are those of this configuration; without, it is config.
    Config local;
    TensorLayout layout;
    TensorParallel* tensor_parallel = nullptr;
    ContextParallel* context_parallel = nullptr;  // the tokens of a training step are those of this rank alone
    Precision precision;
    const SubLayer* attention = nullptr;  // what config names
    const SubLayer* feed_forward = nullptr;
    PipelineRanks* pipeline_ranks = nullptr;  // of a part: who has the others
    DataParallel* data_parallel = nullptr;    // many ranks: gathers weights before they are read, and reduces gradients
    FlashTier flash_tier = FlashTier::automatic;

    Tensor wte, dwte;           // (V_padded, C) token embedding; with tensor parallelism the rows of this rank
    Tensor wpe, dwpe;           // (T_max, C) position embedding, GPT-2
    std::vector<Block> blocks;  // those of this part: blocks[i] is block part.blocks[i] of the whole model
    Norm final_norm;
    Linear head;        // (V_padded, C); its weight is wte where tied
    Tensor rope_table;  // (T, rope_D) f32, LLaMA
    Tensor fp8_states;  // (2 x linear layers, kFp8StateN) f32, delayed scaling

    int64_t n_blocks() const { return std::ssize(blocks); }
    bool ties_head() const { return config.tied && !part.head_copy; }  // one matrix is the embedding and the head

    // What an optimizer of all parameters updates: the masters, and the weights as their copy; or the weights alone,
    // where 16 bits are rounded stochastically.
    Weights all_weights(uint64_t seed) const;
};

// Takes the model's memory from the arenas. Call it while they count, reserve() them, and call it again. T: tokens of
// the longest sequence. part: none is the whole model. Error for more tokens than GPT-2 has positions, for types that
// do not go together, and as config_of_rank.
Model build_model(const Config& config, const Precision& precision, int64_t T, Arena& weights, Arena& grads,
                  Arena& masters, const Sharding& sharding = {}, const TensorLayout& layout = {},
                  const std::optional<ModelPart>& part = {});
// The units and parameters of the whole model, cut for this rank of tensor parallelism as build_model cuts them,
// without memory.
Model whole_without_memory(const Config& config, const TensorLayout& layout = {}, bool head_copy = false);
// Random weights, each parameter a function of (seed, its name): normal(0, init_std), output layers of the residual
// branches divided by sqrt(2 L) (Radford et al. 2019); biases 0, norm weights 1.
void init_weights(Model& model, uint64_t seed);
// With fp8. quantise_weights, after every change of the weights: makes the 8-bit weights of the blocks. advance_fp8,
// after every step: advances the amax histories.
void quantise_weights(const Model& model, cudaStream_t stream);
void advance_fp8(const Model& model, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// stages.cu: which blocks a stage of a pipeline has

// The numbers of blocks of S stages, in order: those given by hand; or as many as make the stages' costs equal, for
// sequences of T tokens. Error, with what to do, where a stage would have no block, or the blocks are not all there.
std::vector<int64_t> cut_stages(const Config& config, int64_t S, int64_t T, const std::vector<int64_t>& by_hand = {});
// What a rank has that has these of the stages (ascending): its part of the model, and of each stage the blocks, as
// places in Model::blocks.
struct RankStages {
    ModelPart part;
    std::vector<Range> chunks;
};
RankStages rank_stages(const Config& config, const std::vector<int64_t>& cut, const std::vector<int>& stages);

// ---------------------------------------------------------------------------------------------------------------------
// visits.cu: which units a step visits, in which order. A unit (FlatParameters) is the embedding, a block or the head:
// what is gathered, reduced and updated together. The run goes along such a list, data parallelism fetches the next
// unit of it ahead of time, and the account of traffic (planning/account.cu) adds it up.

enum class Work : uint8_t {
    embed,
    forward_block,
    forward_head,
    backward_head,
    recompute_block,
    backward_block,
    backward_embedding
};
struct Visit {
    Work work;
    int64_t block = -1;                // of the three kinds of work on a block: its place in Model::blocks
    std::vector<size_t> weights = {};  // units whose weights are read
    std::vector<size_t> begin = {},
                        end = {};      // units whose gradients are added to for the first time, and for the last
    int64_t next = -1;                 // the unit whose weights the visit after this one reads
    bool first = false, last = false;  // recompute_block: of the blocks between two kept inputs
    bool traced = true;                // by itself; a pipeline traces all visits of an action as one
};
std::vector<Visit> forward_visits(const Model& model);  // of a part: without the embedding and the head that it lacks

// Units by their place in Model::units: 0 the embedding, 1 + i blocks[i], and the last one the head.
inline size_t block_unit(int64_t block) { return static_cast<size_t>(1 + block); }
inline size_t head_unit(const Model& model) { return model.blocks.size() + 1; }
// Around the work of a visit: the stream has its weights, and may add to its gradients; its gradients are complete.
// With one rank there is nothing to do.
void begin_visit(const Model& model, const Visit& visit, cudaStream_t stream);
void end_visit(const Model& model, const Visit& visit, cudaStream_t stream);

// versions.cu: the model with other weights: a flat array as model.weights is. The gradients are the same.
Model with_weights(const Model& model, const Tensor& weights);

// Hugging Face folders: config.json with model.safetensors, or its shards (huggingface_weights.cu,
// huggingface_config.cu). With many ranks all of them call these, and rank 0 writes. A part of a model reads what it
// has, the head's copy from the embedding's place; and is saved as what it has of the whole (Model::pipeline_ranks).
// Tensors are saved with checksums. Errors of load_weights name the tensor: one that is missing, has another shape than
// config.json asks for, is not F32, F16 or BF16, has bytes with another checksum, or belongs to no parameter.
void load_weights(Model& model, const std::string& folder);
// The Hugging Face folder that a flag's value means: itself, or the newest checkpoint of a run. Error that names the
// flag and says what was looked for. And the run in runs/ whose newest checkpoint is the latest: "" if there is none.
std::string find_model_folder(const std::string& flag, const std::string& path);
std::string find_newest_run();
void save_model(const Model& model, const std::string& folder, const TokenIds& token_ids = {});

// ---------------------------------------------------------------------------------------------------------------------
// recompute.cu: which activations are not kept, but computed again in the backward; the law of what that saves is
// there.

struct Recompute {
    int64_t every = 0;  // blocks from one kept input to the next; 0: every block keeps everything
    bool selective = false;
    // --head-chunks: a micro-batch's rows go through the head in this many parts, one after the other, and only one has
    // logits at a time. 1: all at once.
    int64_t head_chunks = 1;
    // Of N rows those that have logits at a time. Eight rows of any width begin on 16 bytes, which products want.
    int64_t head_rows(int64_t N) const {
        return head_chunks == 1 ? N : std::min(N, round_up(ceil_div(N, head_chunks), 8));
    }
};
Recompute parse_recompute(const std::string& text);  // "none", "full" (every = 1), "selective" or a number; or Error

std::vector<Visit> backward_visits(const Model& model, const Recompute& recompute);
// Of blocks [first, last) alone, for a pipeline: of several chunks and micro-batches that take turns, so that nothing
// is still there from the forward that is to be computed again. The schedule says when gradients begin and end.
std::vector<Visit> chunk_forward_visits(int64_t first, int64_t last);
std::vector<Visit> chunk_backward_visits(int64_t first, int64_t last, const Recompute& recompute);

// ---------------------------------------------------------------------------------------------------------------------
// activations.cu: what a micro-batch keeps from its forward to its backward (Activations), and scratch that all
// micro-batches share, because nothing stays in it from one of them to the next (Workspace). Any number of
// micro-batches may be in flight, each with activations of its own.

struct NormSaved {
    Tensor sum;         // (N, C): what was normalised: the residual stream after the addition of the last branch
    Tensor out;         // (N, C)
    Tensor mean, rstd;  // (N) f32
};
// The tensors of an attention or a feed-forward; its file names the places.
using Slots = std::array<Tensor, 12>;
struct BlockSaved {
    NormSaved norm1, norm2;
    Slots attention, feed_forward;
    Tensor fp8;                  // (linear layers, 2) f32: what the inputs and output gradients of each were scaled by
    Tensor cache, cache_scales;  // of a step of inference: the layer's pool (PagedStep), and with e4m3 its scales
};
struct Activations {
    int64_t B = 0, T = 0;  // sequences of this rank, tokens of each
    bool divided_rows =
        false;  // sequence parallelism: (N, C) below are this rank's rows; sub-layers and logits have all
    Recompute recompute;
    // (B, T), (N) i32. Where ranks have other sequences of the same micro-batch (2D, 2.5D, 3D), tokens are those of all
    // of it.
    Tensor tokens, targets;
    // Where rows hold several documents that must not see each other, i32; otherwise empty. documents (B, T, 2):
    // [first, end) of each token's document in its row; positions (B, T): counted from its first token. Filled like
    // tokens. With context parallelism T are the tokens of this rank: documents are those of all tokens, and there are
    // positions also without documents.
    Tensor documents, positions;
    Tensor stream_positions;         // GPT-2 with 3D: positions of the sequences that the stream has here
    Tensor embedded;                 // (N, C)
    std::vector<BlockSaved> blocks;  // L of them; with recomputation they share tensors
    NormSaved final_norm;
    // (N, V_padded); the loss turns them into their own gradient. With head_chunks (head_rows(N), V_padded), which
    // exist within a call only: in training the head's backward computes them, and from dloss their gradient.
    Tensor logits;
    float dloss = 0;
    // Tensor parallelism: tokens as rows of this rank's embedding; the numbers of cross_entropy_parts, (N), (N), (N, 2)
    Tensor local_tokens, max, all_max, sums;
    Tensor losses;          // (N) f32
    bool training = false;  // the last forward was a training step's
    // Of a step of inference. page_table, chunks and cache_rows as in PagedStep (layers.h); positions is there, too.
    // Only some rows are followed by a token that is wanted, those of logit_rows (R) i32: final_norm and logits have R.
    Tensor page_table, chunks, cache_rows, logit_rows;
};
// For training, or only to run forward.
Activations take_activations(const Model& model, int64_t B, int64_t T, const Recompute& recompute, Arena& arena);
// n_logits: rows that the head is applied to, B T where all are.
Activations take_forward_activations(const Model& model, int64_t B, int64_t T, int64_t n_logits, Arena& arena);
// For rows that need them. T: tokens of a whole sequence.
void take_documents(const Model& model, Activations& acts, int64_t T, Arena& arena);
void take_positions(Activations& acts, Arena& arena);
// With 2D, 2.5D and 3D tensor parallelism: the sizes by which ColumnGeometry takes its memory, those of this rank's
// parts of the weights and of its rows and columns of the stream.
ColumnGeometry::Sizes geometry_sizes(const Model& model, const Activations& acts);

class WeightGradients;  // block_linear.cu
struct Workspace {
    Tensor branch;  // (N, C): output of an attention or feed-forward, until the next norm adds it to the stream
    Tensor dresidual, dnorm;          // (N, C): gradients of the residual stream, and of a norm's output
    Slots dattention, dfeed_forward;  // gradients of what the sub-layers keep, in the same places
    Tensor scratch, embedding_scratch;
    // The columns of rows are divided (2D, 2.5D, 3D): norms' numbers of a row, (N, 2) f32, of this rank and of all.
    Tensor norm_parts, all_norm_parts;
    Tensor position_rows, no_tokens;   // likewise, GPT-2: rows of the positions' embedding (N, C), and N times -1
    WeightGradients* later = nullptr;  // if set: weight gradients are queued there
    // Are the gradients of parameters added to (+=)? The first micro-batch of a step writes them (=) instead.
    bool accumulate = true;
};
// training: with what a backward needs. For micro-batches of B x T tokens, whatever their number.
Workspace take_workspace(const Model& model, int64_t B, int64_t T, bool training, Arena& arena);

// The residual stream between two operations is sum + branch: the norm that comes next does the addition, because it
// reads both anyway, and keeps the sum. No branch: the stream is sum.
struct Residual {
    Tensor sum, branch;
};

// Gradients of weights for later: a pipeline with a zero bubble computes them when its rank has nothing else to do.
// Of each linear layer of a block the gradient of its output is kept, in pieces of memory that serve any block; its
// input is kept by the activations, which must not be computed again (Recompute: none). The head's and the embedding's
// gradients lie where head_backward and embed_backward had them. All of that, and the model, must stay until run().
class WeightGradients {
  public:
    // Memory for the most (micro-batch, block) pairs that are between their backward by input and by weight at once.
    void take_memory(const Model& model, int64_t B, int64_t T, int64_t blocks, Arena& arena);
    // What backward_blocks, head_backward and embed_backward leave from here on belongs to this chunk of this
    // micro-batch.
    void begin(int64_t micro, int64_t chunk);
    // Computes that, and frees its memory: the bits are those of a backward at once, if for each weight run() is called
    // in the order of the micro-batches. Tensor parallelism: on all ranks in the same order.
    void run(int64_t micro, int64_t chunk, const Workspace& workspace, cudaStream_t stream);
    bool is_empty() const { return entries_.empty(); }
    int64_t most_blocks() const { return most_; }  // that have waited at once

    // For layers: a copy of dout, whose memory is written again by the next block; and what to do later.
    using Compute = std::function<void(const Workspace& workspace, cudaStream_t stream)>;
    Tensor keep(Tensor dout, cudaStream_t stream);
    void push(const Compute& compute);

  private:
    struct Entry {
        std::vector<Compute> computes;
        std::vector<int64_t> pieces = {};  // of memory_; the last one is filled up to `used` bytes
        int64_t used = 0;
    };
    std::map<std::pair<int64_t, int64_t>, Entry> entries_;  // by micro-batch and chunk
    Entry* now_ = nullptr;
    Tensor memory_;  // (pieces, bytes of the output gradients of a block / 4) i32
    std::vector<int64_t> free_;
    int64_t most_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// in_flight.cu: the activations of a rank of a pipeline. The forward of a chunk (consecutive blocks of the rank) takes
// pieces of memory from pools, and the end of its backward gives them back. All pieces of a pool are equal, and serve
// any block: so a schedule, which says what is alive when, says how many there must be.

// How many pieces of each kind.
struct Pieces {
    int64_t sets = 0;    // all that a block keeps but its input
    int64_t inputs = 0;  // (N, C): of a block that is not the first of its chunk
    int64_t scales = 0;  // fp8: what the products of a block were scaled by
    int64_t heads = 0;   // final norm, logits and losses
    bool operator==(const Pieces&) const = default;
};
// Of a chunk of n blocks. With --recompute N: the input of each N-th block, and no sets, because all chunks share
// those of N blocks.
Pieces chunk_pieces(const Precision& precision, const Recompute& recompute, int64_t n_blocks);
// Bytes of one piece of each kind; and of what all chunks share, of which the largest has this many blocks.
struct PieceBytes {
    int64_t set, input, scales, head, shared;
    int64_t of(const Pieces& n) const {
        return n.sets * set + n.inputs * input + n.scales * scales + n.heads * head + shared;
    }
};
PieceBytes piece_bytes(const Model& model, int64_t B, int64_t T, const Recompute& recompute, int64_t largest_chunk);

class InFlight {
  public:
    // B, T: of a micro-batch. most: pieces that are taken at once.
    void take_memory(const Model& model, int64_t B, int64_t T, const Recompute& recompute, int64_t largest_chunk,
                     const Pieces& most, Arena& arena);
    // Before the forward of blocks [first, last), whose input is, or will be, in a tensor (N, C) of the caller: their
    // places in acts. After their backward, or backward by weight.
    void take_chunk(Activations& acts, int64_t first, int64_t last, Tensor input);
    void give_back_chunk(Activations& acts, int64_t first, int64_t last);
    // Before head_forward; after head_backward, or the head's backward by weight. input: the output of the last block.
    void take_head(Activations& acts, Tensor input);
    void give_back_head(Activations& acts);
    Pieces taken() const;
    Pieces most_taken() const { return most_taken_; }  // at once, since take_memory

  private:
    template <class Piece>
    struct Pool {
        std::vector<Piece> free;
        int64_t size = 0;
        Piece take(const char* what);
        void give_back(const Piece& piece) { free.push_back(piece); }
    };
    Recompute recompute_;
    Pool<BlockSaved> sets_;
    Pool<Tensor> inputs_, scales_;
    Pool<Activations> heads_;         // of which the head's tensors are used
    std::vector<BlockSaved> shared_;  // with recomputation: those of the blocks between two inputs
    Pieces most_taken_;
};
// A micro-batch of a rank of a pipeline: tokens, targets, and places for what InFlight gives to its blocks.
Activations take_micro_batch(const Model& model, int64_t B, int64_t T, const Recompute& recompute, Arena& arena);

// ---------------------------------------------------------------------------------------------------------------------
// cached_step.cu: a step of inference. Its N new tokens belong to several sequences, each with what the tokens before
// left in a cache in pages (layers.h: PagedStep).

struct CachePools {
    std::vector<Tensor> layers;  // L of (pages, page size, numbers that a token leaves in a layer)
    std::vector<Tensor> scales;  // with e4m3: L of (pages, page size, heads of such a row) f32
};
// dtype: that of the model, or e4m3.
CachePools take_cache_pools(const Model& model, int64_t n_pages, int64_t page_size, DType dtype, Arena& arena);

struct StepSizes {
    int64_t tokens = 0;     // N
    int64_t sequences = 0;  // with a token in the step
    int64_t chunks = 0;     // of rows (PagedStep)
    int64_t pages = 0;      // the most that one of the sequences has
    int64_t logits = 0;     // R: rows that are followed by a token that is wanted
};
// For steps of at most these sizes.
Activations take_step_activations(const Model& model, const CachePools& pools, const StepSizes& largest, Arena& arena);
Workspace take_step_workspace(const Model& model, const StepSizes& largest, int64_t max_length, Arena& arena);
// The part of them that a step of these sizes uses.
Activations of_step(const Activations& largest, const StepSizes& sizes);
Workspace of_step(const Workspace& largest, const StepSizes& sizes);

// ---------------------------------------------------------------------------------------------------------------------
// quantised.cu: the model with weights of 8 bits in the linear layers of its blocks; the embedding, the head, norms,
// biases and MLA's up-projection of keys and values (Linear::weight_is_read) stay as they are. For inference alone: it
// has no parameters to update or save. Its memory is the arena's; where the arena has been reserved, the weights are
// copied, from wherever the model's are.
Model quantised_copy(const Model& model, WeightFormat format, Arena& arena);
