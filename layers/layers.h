// layers/layers.h: every operation of the model, with its maths, shapes and dtypes. One .cu per operation.
//
// Letters, the same everywhere:
//   B batch   T sequence length   C channels (model width)   N = B T rows   V vocabulary   F feed-forward width
//   H query heads   K key/value heads (K divides H)   D head size   O output channels of a linear layer
//
// Conventions
//   - Arguments are in the order: outputs, what is saved for the backward, inputs, sizes, scratch, stream.
//   - The gradient of X is dX. Gradients of activations are written (=). Gradients of parameters are added to (+=) with
//     `accumulate`, and written (=) without it: by the first micro-batch of a step, so that nobody sets them to 0.
//   - Tensors of one call share one float dtype (f32, bf16 or f16) unless the comment says otherwise; sums are in f32.
//   - Gradients of parameters (dweight, dbias, dwte, dwpe) may also be f32 while everything else is 16-bit.
//   - `scratch` is f32 memory that holds nothing between calls; the *_scratch_n functions say how many elements.
//   - Every operation is deterministic: sums have a fixed order. (Where blocks add floats to the same place by atomics,
//     in the backward of attention on Hopper, they do so in turns.)
//   - A wrong shape, dtype or alignment (16 bytes) throws Error, naming the operation and the argument.
//   - An empty Tensor ({}) means "there is none" where the comment says "optional".
#pragma once

#include "core/core.h"

#include <cmath>

// ---------------------------------------------------------------------------------------------------------------------
// Heads inside of rows. Attention's projections are packed in several ways: [q | k | v], or [key | value] head by head,
// or a latent beside a rotary key. Operations on heads (rope, RMSNorm of heads, flash attention) are told where
// they lie.

// `count` heads of D columns inside of rows (B, T, columns): head h is rows[b, t, column + h * stride ... + D). So q, k
// and v may lie apart or in one packed row, and a head's columns may be part of a wider one (MLA).
struct HeadColumns {
    Tensor rows;
    int64_t count = 0, D = 0, column = 0;
    int64_t stride = 0;  // columns from one head to the next; 0: D
    int64_t head_stride() const { return stride == 0 ? D : stride; }
    bool exists() const { return rows.exists(); }
    size_t bytes() const { return static_cast<size_t>(rows.rows() * count * D) * dtype_bytes(rows.dtype); }
};

// Which tokens of a whole sequence the rows of a part of it are: the first `length` rows are the tokens from first[0]
// on, the others those from first[1] on. (Context parallelism gives each rank two chunks of every sequence.)
struct TokenChunks {
    int64_t length = 0, first[2] = {0, 0};
};

// heads.cu: heads from rows to other rows: the same number of heads of as many columns; f32, bf16 or f16 on each side.
//   copy_heads     to = from              rows (B, T, any columns) on both sides
//   add_heads      to = to + from         in f32, rounded once
//   spread_heads   to[b, token of row t] = from[b, t]      to (B, whole T, ...), from (B, T, ...): rows of these chunks
//   collect_heads  to[b, t] = from[b, token of row t]      the other way
void copy_heads(const HeadColumns& to, const HeadColumns& from, cudaStream_t stream);
void add_heads(const HeadColumns& to, const HeadColumns& from, cudaStream_t stream);
void spread_heads(const HeadColumns& to, const HeadColumns& from, const TokenChunks& chunks, cudaStream_t stream);
void collect_heads(const HeadColumns& to, const HeadColumns& from, const TokenChunks& chunks, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// matmul.cu: the one matrix product, row-major, on cuBLASLt (cpu/cublasLt.h on the CPU device).
//
//   out = alpha op(a) op(b) + beta out + bias          op(x) = x or its transpose
//   out (M, N), op(a) (M, K), op(b) (K, N), bias (N) optional, added to every row (beta must then be 0)
//   With a leading dimension each (batch, M, N): all three are batched. a and b have one dtype, out has it or f32; bias
//   has out's.
//
//   fp8: a and b may be e4m3 or e5m2, not both e5m2; out is bf16, f16 or, without a bias, f32; no batches. Both must
//   stand with K along their rows, a (M, K) and b (N, K) with transpose_b; K and N are multiples of 16. What a and b
//   stand for is their numbers times their scales, f32 on the device, on a 16-byte boundary, in one of these forms:
//     tensor      (1)                                       one scale
//     row128      (ceil(K/128), M), for b N                 one for 128 neighbours of a row: that of a[m, k] is
//                                                           scale[k / 128, m]
//     block128    (ceil(M/128), fp8_block_scale_cols(K))    one for 128 x 128: of a[m, k] scale[m / 128, k / 128];
//                                                           the columns after ceil(K/128) are padding
//   Either both are `tensor` or none is, and not both are block128; then M is a multiple of 4 too.

enum class MatmulScale { tensor, row128, block128 };
struct MatmulOptions {
    bool transpose_a = false, transpose_b = false;
    float alpha = 1.0f, beta = 0.0f;
    Tensor added = {};  // as out: beta times this is added, not beta out. Without bias, fp8 and what follows below
    Tensor bias = {};
    Tensor a_scale = {}, b_scale = {};  // fp8 only
    MatmulScale a_scale_mode = MatmulScale::tensor, b_scale_mode = MatmulScale::tensor;
    // One of these at most, without batches and without fp8: what is done before the result is stored, where cuBLASLt
    // has an epilogue for it; otherwise kernels do it after the product. In 16 bits such kernels see the product
    // rounded, an epilogue does not. Only before_gelu can have a bias, only a_row_sums beta.
    Tensor before_gelu = {};  // (M, N), of out's type: written, x = alpha op(a) op(b) + bias;      out = gelu(x)
    Tensor gelu_input = {};   // (M, N), of out's type: read;     out = (alpha op(a) op(b)) * gelu'(gelu_input)
    Tensor a_row_sums = {};   // (M), of out's type: written, the sum of each row of op(a), which must be a transpose
    // Of out as the gradient of attention's output, which is `attended` (M, N), of out's type:
    //   delta[b,h,t] = sum over the columns c of head h of out[b T + t, c] attended[b T + t, c]     delta (B, H, T) f32
    Tensor attended = {}, delta = {};
    Tensor zeros = {};    // i32, with delta: set to 0
    Tensor scratch = {};  // f32, for a_row_sums: column_sum_scratch_n(K, M)
};
constexpr int64_t fp8_block_scale_cols(int64_t K) { return round_up(ceil_div(K, 128), 4); }
void matmul(Tensor out, Tensor a, Tensor b, const MatmulOptions& options, cudaStream_t stream);

// plain_matmul.cu: the same by a kernel of our own, one thread for each number of out, for the sizes that cuBLASLt has
// no algorithm for. No fp8, and nothing of what may be done before the result is stored but the bias.
void plain_matmul(Tensor out, Tensor a, Tensor b, const MatmulOptions& options, cudaStream_t stream);

// matmul_plan.cu: what computes a product: one of cuBLASLt's algorithms, on Hopper our own (hopper_matmul.h), or
// kernels without an epilogue. While tune_matmuls is on, the fastest of them, timed when this thread first meets a
// product: that overwrites the product's results several times, so it is for times at which nobody needs them.
// Otherwise the algorithm that cuBLASLt's heuristic names first, but ours for large products with GELU, its derivative
// or sums, and kernels where neither can.
void tune_matmuls(bool on);
// Without times, this device chooses as an H100 does: for the account of a step that never runs.
void choose_matmuls_as_hopper(bool on);
// What was timed, or set: a line for each product of this thread, "PRODUCT: CHOICE  # what was measured". A choice is
// an algorithm of this version of cuBLASLt, "cublaslt" (its first), "hopper", or "parts": without an epilogue.
std::string matmul_choices();
// From now on these are the choices; all others are forgotten. Error: a line that is none.
void set_matmul_choices(const std::string& text);
// The index of the first of these times that is at most 1 % above the least one.
size_t fastest(const std::vector<double>& seconds);

// Throws, and says what to use instead, if this device has no fp8 products, or none with the scales of blocks.
void expect_fp8_device(bool block_scales);

// ---------------------------------------------------------------------------------------------------------------------
// linear.cu:  out = inp weight^T + bias
//   out (N, O), inp (N, C), weight (O, C), bias (O) optional
//   dinp = dout weight;   dweight (+)= dout^T inp;   dbias (+)= sum over rows of dout
// The two gradients are two calls, so that a pipeline schedule can run the second one later.

void linear_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, cudaStream_t stream);
// accumulate: dinp += instead of = (an activation that feeds two layers).
void linear_backward_input(Tensor dinp, Tensor dout, Tensor weight, bool accumulate, cudaStream_t stream);
// A linear layer and GELU after it:   before (N, O) = inp weight^T + bias,   out = gelu(before)
void linear_gelu_forward(Tensor out, Tensor before, Tensor inp, Tensor weight, Tensor bias, cudaStream_t stream);
// GELU and a linear layer after it, out = gelu(before) weight^T:   dbefore (N, C) = (dout weight) * gelu'(before)
void linear_gelu_backward_input(Tensor dbefore, Tensor dout, Tensor weight, Tensor before, cudaStream_t stream);
// Attention and a linear layer after it, out = attended weight^T:   dattended (N, C) = dout weight, and its delta
void linear_delta_backward_input(Tensor dattended, const struct FlashDelta& delta, Tensor dout, Tensor weight,
                                 Tensor attended, cudaStream_t stream);
// dbias optional.
void linear_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Tensor scratch,
                            cudaStream_t stream);
int64_t linear_backward_scratch_n(int64_t N, int64_t O);

// ---------------------------------------------------------------------------------------------------------------------
// few_rows.cu: the linear layer's forward in inference, where inp has few rows, and the time is that of reading the
// weight from memory. It is read once for up to 16 rows; more rows are computed in groups of 16, or, in 16 bits, in
// larger tiles on tensor cores (few_rows_mma.cu). An element is summed in an order that depends on C alone: the bits of
// a row are the same whatever N is, and whatever the other rows hold.
//   out[n,o] = sum over c of inp[n,c] weight[o,c] + bias[o]   out (N, O), inp (N, C), weight (O, C), bias (O) optional
// (linear_forward, through cuBLASLt, promises this on the CPU device only, where it is also the faster of the two.)

void few_rows_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, cudaStream_t stream);

// The same for a weight of 8 bits, a quarter of float32's bytes:      weight[o,c] ~ scale[o,c/block] codes[o,c]
//   codes (O, C)   int8: i8, -127 to 127; fp8: e4m3, -448 to 448
//   scale f32      of a row: (O), block = C; of 128 neighbours of a row: (O, ceil(C/128)), block = 128
// scale = max |weight| of its block / 127 (or 448); codes = weight / scale, rounded to nearest even. An infinity or NaN
// in a weight makes the scale of its block NaN, and so what is computed from it.
enum class WeightFormat : uint8_t { none, int8, fp8, int8_block, fp8_block };
WeightFormat weight_format_from_name(const std::string& name);  // "none", "int8", "fp8", "int8-block", "fp8-block"
const char* weight_format_name(WeightFormat format);

struct QuantisedWeight {
    Tensor codes, scale;
};
QuantisedWeight take_quantised_weight(Arena& arena, WeightFormat format, int64_t O, int64_t C);  // not none
void quantise_weight(const QuantisedWeight& to, Tensor weight, cudaStream_t stream);  // weight (O, C) f32, bf16 or f16
// out, inp and bias of one dtype, f32, bf16 or f16.
void quantised_linear_forward(Tensor out, Tensor inp, const QuantisedWeight& weight, Tensor bias, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// fp8.cu: the linear layer with its three products on 8-bit floats. What stays 16-bit: inp, dout, bias, out and dinp
// (bf16 or f16); dweight and dbias may be f32. C and O are multiples of 16. N is any in the forward; in backward_input
// any, but with block a multiple of 4; in backward_weight a multiple of 16.

enum class Fp8Recipe : uint8_t {
    none,     // 16-bit products: linear.cu
    delayed,  // one scale per tensor: of inp and dout from the largest |x| of the last 16 steps, of the weight from its
              // own;   inp, weight e4m3, dout e5m2
    current,  // one scale per tensor, from its own largest |x|: inp and dout are read twice;   the same types
    block,    // one scale for 1 x 128 of inp and dout, and for 128 x 128 of the weight, from their own;   all e4m3
};
Fp8Recipe fp8_recipe_from_name(const std::string& name);  // "none", "delayed", "current", "block"
const char* fp8_recipe_name(Fp8Recipe recipe);
// Both throw, with what to do: if this device has no fp8 products of this kind; if C or O, or the N tokens of a
// micro-batch that is trained on, are not multiples of 16, or these tokens are more than a cast can have.
void expect_fp8_device(Fp8Recipe recipe);
void expect_fp8_sizes(Fp8Recipe recipe, int64_t N, int64_t C, int64_t O);

// A quantised matrix: codes * scale ~ x, ready to be a factor of matmul (which says where the scales stand).
struct Fp8Matrix {
    Tensor codes;  // (rows, K) e4m3 or e5m2
    Tensor scale;  // f32
    MatmulScale mode = MatmulScale::tensor;
};

// The weight of a linear layer for its two products, quantised once after every optimizer step.
struct Fp8Weight {
    Fp8Recipe recipe = Fp8Recipe::none;
    Fp8Matrix forward;   // (O, C): out = inp forward^T
    Fp8Matrix backward;  // (C, O), its transpose with the same numbers: dinp = dout backward^T
    Tensor amax;         // (1) f32
};
Fp8Weight take_fp8_weight(Arena& arena, Fp8Recipe recipe, int64_t O, int64_t C);
// weight (O, C) bf16 or f16. AmaxFrom::caller, here and below: it is a part of a divided layer, and the caller has put
// the amax of the whole into to.amax (fp8_amax), or into saved (fp8_linear_amax).
enum class AmaxFrom : uint8_t { here, caller };
void fp8_quantise_weight(const Fp8Weight& to, Tensor weight, cudaStream_t stream, AmaxFrom amax = AmaxFrom::here);

// The amax histories of delayed scaling: two rows, for inp and dout, of (kFp8StateN) f32 for each linear layer. All
// layers' states lie in one f32 tensor (2 layers, kFp8StateN): it starts as zeros, is saved with the model, and is
// advanced once a step, after all micro-batches. Several ranks reduce it before, element by element, to the maximum.
constexpr int64_t kFp8History = 16;  // steps
// [amax that scales this step, 0: none yet | this step's own | history]
constexpr int64_t kFp8StateN = 2 + kFp8History;
void fp8_advance(Tensor states, cudaStream_t stream);

// saved (2) f32 belongs to the activations: forward and backward_input note the amax that inp and dout were scaled by,
// and backward_weight scales by the same. state (2, kFp8StateN): delayed only. Block scaling needs neither, take {}.
// record: this forward counts for the history; false in evaluation. A forward may be repeated (recomputation), and
// gives the same bits.
void fp8_linear_forward(Tensor out, Tensor saved, Tensor inp, const Fp8Weight& weight, Tensor bias, Tensor state,
                        bool record, Tensor scratch, cudaStream_t stream, AmaxFrom amax = AmaxFrom::here);
void fp8_linear_backward_input(Tensor dinp, Tensor saved, Tensor dout, const Fp8Weight& weight, bool accumulate,
                               Tensor state, Tensor scratch, cudaStream_t stream, AmaxFrom amax = AmaxFrom::here);
// For parts of a divided layer. saved[which] = the amax that x, inp (which = 0) or dout (1), would be scaled by if this
// part were the whole; the caller makes it the largest of all parts', and passes AmaxFrom::caller. With block scaling
// there is none, and nothing is written.
void fp8_linear_amax(Tensor saved, int64_t which, Tensor x, Fp8Recipe recipe, Tensor state, cudaStream_t stream);
// After backward_input of the same micro-batch, now or later. dbias optional.
void fp8_linear_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor inp, Tensor saved, Fp8Recipe recipe,
                                bool accumulate, Tensor scratch, cudaStream_t stream);
int64_t fp8_linear_scratch_n(Fp8Recipe recipe, int64_t N, int64_t C, int64_t O);  // enough for all three

// Their parts. amax[0] = known[0] where that is given and above 0, else the largest finite |x| of inp, or 0.
void fp8_amax(Tensor amax, Tensor inp, Tensor known, cudaStream_t stream);
// to = inp, or with `transpose` to = inp^T, rounded to nearest. Mode tensor: amax (1) chooses the scale, numbers above
// saturate, and recorded (1, optional) becomes max(recorded, largest finite |x|). Mode row128: every 128 neighbours of
// a row of `to` have the scale of their own amax. Infinities and NaN become NaN. inp (rows, cols) bf16 or f16, cols a
// multiple of 16, with `transpose` rows too.
void fp8_quantise(const Fp8Matrix& to, bool transpose, Tensor inp, Tensor amax, Tensor recorded, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// column_sum.cu: the sum over rows, in two stages of fixed order: the gradient of a bias, where the product that reads
// dout does not form it (MatmulOptions::a_row_sums).

// dparam[c] (+)= sum over rows n of inp[n, c]       dparam (C) of inp's dtype or f32, inp (N, C)
// An inp of f32, such as sums that another kernel has left, may go to a dparam of 16 bits.
void column_sum(Tensor dparam, Tensor inp, bool accumulate, Tensor scratch, cudaStream_t stream);
int64_t column_sum_scratch_n(int64_t N, int64_t C);

// ---------------------------------------------------------------------------------------------------------------------
// embedding.cu:  out[b,t,:] = wte[tokens[b,t],:] + wpe[positions[b,t],:]
//   out (B, T, C), tokens (B, T) i32, wte (rows, C), wpe (at least T, C) optional
//   positions (B, T) i32 optional: where in its document a token stands; without them t
//   dwte[v,:] (+)= sum of dout[b,t,:] over the places where tokens[b,t] == v; dwpe likewise. They are added in
//   ascending (b,t): every 128 of them to a partial sum, then the partial sums to each other (of dwpe
//   without positions one after the other: there are B)
// A token or position outside of its table is an error of the data reader: the kernels stop with a trap.

void embedding_forward(Tensor out, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe, cudaStream_t stream);
// A token of -1 has no row here: it gives zeros (with wpe its position's row), and its gradient goes nowhere.
// Without accumulate_wte the rows of all other tokens are 0, without accumulate_wpe those of all other positions.
// scratch: i32, of at least embedding_backward_scratch_n(dtype of dout, B T, C) elements.
void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions, bool accumulate_wte,
                        bool accumulate_wpe, Tensor scratch, cudaStream_t stream);
// Error, with what to do, where so many places are more than the kernels can count.
int64_t embedding_backward_scratch_n(DType dtype, int64_t n_places, int64_t C);

// ---------------------------------------------------------------------------------------------------------------------
// layernorm.cu:  out = (x - mean) * rstd * weight + bias      x = inp, or x = inp + branch  (the residual add, fused)
//   out, inp, branch (N, C), sum (N, C) = x is written when there is a branch; weight, bias (C); mean, rstd (N) f32
//   rstd = 1 / sqrt(mean_c((x - mean)^2) + eps);   C is at most kMaxNormC, for RMSNorm too
//   backward: dinp = layernorm's gradient + dsum  (dsum (N, C) optional: the gradient that reaches x past the norm; it
//   may be the same memory as dinp). The branch's gradient is the same dinp: d(inp + branch) goes to both.

constexpr int64_t kMaxNormC = 8192;
void layernorm_forward(Tensor out, Tensor sum, Tensor mean, Tensor rstd, Tensor inp, Tensor branch, Tensor weight,
                       Tensor bias, float eps, cudaStream_t stream);
// inp: the x of the forward (its `sum` where there was a branch).
void layernorm_backward(Tensor dinp, Tensor dweight, Tensor dbias, Tensor dout, Tensor dsum, Tensor inp, Tensor weight,
                        Tensor mean, Tensor rstd, bool accumulate, Tensor scratch, cudaStream_t stream);
int64_t layernorm_backward_scratch_n(int64_t N, int64_t C);

// ---------------------------------------------------------------------------------------------------------------------
// rmsnorm.cu:  out = x * rstd * weight,   rstd = 1 / sqrt(mean_c(x^2) + eps);   arguments as for layernorm

void rmsnorm_forward(Tensor out, Tensor sum, Tensor rstd, Tensor inp, Tensor branch, Tensor weight, float eps,
                     cudaStream_t stream);
void rmsnorm_backward(Tensor dinp, Tensor dweight, Tensor dout, Tensor dsum, Tensor inp, Tensor weight, Tensor rstd,
                      bool accumulate, Tensor scratch, cudaStream_t stream);
int64_t rmsnorm_backward_scratch_n(int64_t N, int64_t C);

// The same over the D columns of each head, all with one weight (D): Qwen3's norm of queries and keys; with one head
// over a part of each row: the latents of MLA and MFA. rstd (N, heads) f32; scratch:
// rmsnorm_backward_scratch_n(N heads, D).
void rmsnorm_heads_forward(const HeadColumns& out, Tensor rstd, const HeadColumns& inp, Tensor weight, float eps,
                           cudaStream_t stream);
void rmsnorm_heads_backward(const HeadColumns& dinp, Tensor dweight, const HeadColumns& dout, const HeadColumns& inp,
                            Tensor weight, Tensor rstd, bool accumulate, Tensor scratch, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// divided_norm.cu: both norms of rows whose columns are divided among ranks: here (N, C), C of all `columns` of a row.
// In two steps each, between which the ranks exchange two numbers a row.
//   parts     parts (N, 2) f32; x = inp, or x = inp + branch, written to sum. centred: LayerNorm; otherwise RMSNorm,
//             which has no mean, bias and dbias anywhere below
//             then   all_parts (n, N, 2) = those of all n ranks
//   finish    out (N, C); mean, rstd (N) f32
//   backward parts: dweight and dbias (C) too; scratch: layernorm_backward_scratch_n(N, C)
//             then   parts = the sum of all ranks'
//   backward finish: dinp = the norm's gradient + dsum (optional)

void divided_norm_parts(Tensor parts, Tensor sum, Tensor inp, Tensor branch, bool centred, cudaStream_t stream);
void divided_norm_finish(Tensor out, Tensor mean, Tensor rstd, Tensor x, Tensor all_parts, Tensor weight, Tensor bias,
                         float eps, cudaStream_t stream);
void divided_norm_backward_parts(Tensor parts, Tensor dweight, Tensor dbias, Tensor dout, Tensor x, Tensor weight,
                                 Tensor mean, Tensor rstd, bool accumulate, Tensor scratch, cudaStream_t stream);
void divided_norm_backward_finish(Tensor dinp, Tensor dout, Tensor dsum, Tensor x, Tensor weight, Tensor mean,
                                  Tensor rstd, Tensor parts, int64_t columns, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// residual.cu:  out = inp + branch, (N, C) each, in float32 and rounded once; out may be either of them.

void residual_add(Tensor out, Tensor inp, Tensor branch, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// gelu.cu:  out = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))      the tanh form, as in GPT-2; any shape
// dinp may be the same memory as dout.

void gelu_forward(Tensor out, Tensor inp, cudaStream_t stream);
void gelu_backward(Tensor dinp, Tensor dout, Tensor inp, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// swiglu.cu:  out = silu(gate) * up,   silu(x) = x / (1 + exp(-x));   inp (N, 2F) = [gate | up] in each row, out (N, F)

void swiglu_forward(Tensor out, Tensor inp, cudaStream_t stream);
void swiglu_backward(Tensor dinp, Tensor dout, Tensor inp, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// rope.cu: rotary position embedding, in place.
//   (x1, x2) -> a (x1 cos - x2 sin,  x2 cos + x1 sin)         angle = t * frequency_i,   i = 0 ... D/2 - 1
// Pair i of a head of D columns is (x_i, x_{i+D/2}), as Hugging Face lays LLaMA out, or two neighbours (x_2i, x_2i+1),
// as DeepSeek does. The backward rotates by the negative angle. a is 1 except with YaRN.
// t is the token's index in its row, or positions (B, T) i32, as for the embedding; a position outside of the table
// stops the kernel with a trap.

enum class RopePairs { halves, neighbours };
enum class RopeKind { llama3, yarn, linear, dynamic };
struct RopeScaling {  // for long contexts, the formulas in rope.cu
    // Whether it changes anything. (Dynamic scaling by a factor of 1 still follows the length.)
    bool acts() const { return factor != 1.0 || kind == RopeKind::dynamic || attention_factor != 0.0; }
    double factor = 1.0;
    double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
    int64_t original_max_position = 8192;                  // the longest sequence of the training; not read by linear
    RopeKind kind = RopeKind::llama3;
    // yarn: pairs that make at least beta_fast turns in the original context keep their frequency, those that make at
    // most beta_slow are slowed by `factor`, those between partly.
    double beta_fast = 32.0, beta_slow = 1.0;
    double mscale = 0.0, mscale_all_dim = 0.0;
    double attention_factor = 0.0;  // the table's a; 0: what follows from factor and mscale
};
// D/2 frequencies base^(-2i/D), scaled for long contexts. T, the length of the sequences: for dynamic scaling alone.
std::vector<double> rope_frequencies(int64_t D, double base, const RopeScaling& scaling, int64_t T = 0);
// YaRN's a, and what it (in DeepSeek's form) multiplies the softmax scale by. Both 1 without YaRN.
double rope_amplitude(const RopeScaling& scaling);
double rope_softmax_factor(const RopeScaling& scaling);
// table (at least T, D; with positions any number) f32: a cos in the first D/2 columns, a sin in the others, computed
// in double on the host.
void rope_table(Tensor table, const std::vector<double>& frequencies, double amplitude = 1.0);
// Heads of rows (B, T, columns); table's row t is that of position t: a slice of it starts later.
void rope_forward(const HeadColumns& heads, RopePairs pairs, Tensor positions, Tensor table, cudaStream_t stream);
void rope_backward(const HeadColumns& dheads, RopePairs pairs, Tensor positions, Tensor table, cudaStream_t stream);
// The q and k heads of qkv (B, T, (H + 2K) D), in halves.
void rope_forward(Tensor qkv, Tensor positions, Tensor table, int64_t H, int64_t K, cudaStream_t stream);
void rope_backward(Tensor dqkv, Tensor positions, Tensor table, int64_t H, int64_t K, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// flash_attention.cu: attention that never stores its probabilities. H query heads over K key/value heads: MHA
// (K = H), MQA (K = 1), GQA (between; K divides H).
//   probs[b,h,t,s] = softmax over the s that t sees, of scale * q[b,t,h,:] . k[b,s,h/(H/K),:]
//   out[b,t,h,:]   = sum over s of probs[b,h,t,s] v[b,s,h/(H/K),:]
//   lse[b,h,t]     = log(sum over the same s of exp(scale * q . k)), f32
//   Backward: from lse and out the probabilities are computed again, tile by tile. dq, dk, dv are written (=).
// f32 runs on CUDA cores, bf16 and f16 on tensor cores. Heads have D columns (q, k) and Dv columns (v, out), any number
// up to 256; where a head does not start and end at multiples of 16 bytes, 16-bit loads are slower and the hopper tier
// cannot run. T is any length from 1 on. Any heads of one call may be parts of the same rows (MLA, packed qkv).

struct QkvHeads {
    HeadColumns q, k, v;
};
// The heads of packed rows (B, T, (H + 2K) D) = [H query heads | K key heads | K value heads].
QkvHeads qkv_heads(Tensor qkv, int64_t H, int64_t K);

// How it is computed: on CUDA cores (f32, and on the CPU device 16 bits too), on tensor cores by mma.sync (16 bits), or
// by wgmma and the copy engine (hopper: 16 bits on GPUs of compute capability 9.0, and on the CPU device). automatic
// chooses by device, type and head size (flash_attention.cu).
enum class FlashTier { automatic, cuda_cores, mma, hopper };
bool has_wgmma();                                         // Does this thread's device have wgmma and the copy engine?
FlashTier flash_tier_from_name(const std::string& name);  // auto, cores, mma or hopper
// Both throw, with what to do: if this device has no such tier for this type; if the tier cannot have heads of D and Dv
// columns.
void expect_flash_tier(FlashTier tier, DType dtype);
void expect_head_size(FlashTier tier, DType dtype, int64_t D, int64_t Dv);

struct FlashAttentionOptions {
    float scale = 1.0f;  // usually 1 / sqrt(D)
    bool causal = true;  // t sees s only if s <= t
    int64_t window = 0;  // t sees s only if |t - s| < window; 0: no window
    // Optional, (B, T, 2) i32: [first, end) of the document that token t of row b belongs to. No token sees another
    // document. Documents follow each other without gaps (padding is a document of its own). Each then gets the same
    // bits as in a row of its own, in f32.
    Tensor documents = {};
    FlashTier tier = FlashTier::automatic;
    // Where queries and keys are chunks of a sequence of whole_T tokens, each its own (0: they are all of it): t and s
    // above are then tokens of the whole sequence, documents are (B, whole_T, 2). A query that sees none of these keys
    // has out = 0 and lse = -infinity.
    int64_t whole_T = 0;
    TokenChunks queries = {}, keys = {};
    // What the backward's scratch holds: nothing; FlashDelta; or, over keys that come in parts, what the call for the
    // first part has left there. (The backward's lse is that over all keys, so that it is finite: with -infinity, as
    // the forward gives it for a query that sees none of one part, dq, dk and dv are NaN.)
    enum Scratch : uint8_t { empty, has_delta, of_other_keys };
    Scratch scratch = empty;
};
// lse: (B, H, T) f32, for the backward.
void flash_attention_forward(const HeadColumns& out, Tensor lse, const HeadColumns& q, const HeadColumns& k,
                             const HeadColumns& v, const FlashAttentionOptions& options, cudaStream_t stream);
void flash_attention_backward(const HeadColumns& dq, const HeadColumns& dk, const HeadColumns& dv,
                              const HeadColumns& dout, const HeadColumns& out, Tensor lse, const HeadColumns& q,
                              const HeadColumns& k, const HeadColumns& v, const FlashAttentionOptions& options,
                              Tensor scratch, cudaStream_t stream);
// Floats of scratch: of the rows' sums, and where one kernel computes dq, dk and dv, of dq's that are not complete: in
// the tier hopper, and of 16-bit heads on the CPU device.
int64_t flash_attention_backward_scratch_n(int64_t B, int64_t T, int64_t H, int64_t K, int64_t D, int64_t Dv,
                                           DType dtype, FlashTier tier);
// What the backward computes first, in its scratch: delta[b,h,t] = sum_d dout[b,t,h,d] out[b,t,h,d], and zeros. The
// product that makes dout can do it, too (linear_delta_backward_input). delta.cu: by itself.
struct FlashDelta {
    Tensor delta;  // (B, H, T) f32
    Tensor zeros;  // i32; may be empty
};
FlashDelta flash_delta_in(Tensor scratch, int64_t B, int64_t T, int64_t H, int64_t K, int64_t D, int64_t Dv,
                          DType dtype, FlashTier tier);
void flash_delta(const FlashDelta& to, const HeadColumns& dout, const HeadColumns& out, cudaStream_t stream);
// merge.cu: attention over two sets of keys from that over each: (out, lse) = (out, lse) and (part, part_lse) together.
//   out = (exp(lse) out + exp(part_lse) part) / (exp(lse) + exp(part_lse)),  lse = log(exp(lse) + exp(part_lse))
// out and part: f32, bf16 or f16 each, (B, T, ...), H heads; lse, part_lse (B, H, T) f32.
void merge_attention(const HeadColumns& out, Tensor lse, const HeadColumns& part, Tensor part_lse, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// A cache in pages, for inference. Each token leaves one row of W numbers in a layer's pool, which the attention of
// later tokens reads: GQA [K key heads | K value heads] of D columns, MLA [latent | rotated shared key]. The rows of a
// sequence lie in pages of P rows (inference/paged_cache.cu):
//
//     row of the token at position s of sequence i  =  row s % P of page page_table[i, s / P]
//
// Within a page GQA has the P rows of key head 0, then those of key head 1, ... of the last value head: what one head
// reads of a page lies side by side. MLA has P rows of [latent | rotated shared key].
//
// A step has N new tokens, rows 0 ... N - 1 of its inputs, cut into chunks: neighbouring rows that are tokens of one
// sequence at neighbouring positions. A sequence that decodes has a chunk of one row; a prompt has several, of at most
// kChunkRows rows. All tokens of a step are written to their pages before the attention reads them, so that a chunk
// sees those before it: the token at position t sees the rows of the positions s <= t of its sequence.
constexpr int64_t kChunkRows = 32;

struct PagedStep {
    Tensor pool;        // (pages, P, W) of the layer: the model's dtype, or e4m3
    Tensor scales;      // e4m3 only: (pages, P, heads of a row) f32: a number is code * scale of its row and head. In a
                        // page they lie as the heads do. MLA: two for each row, for the latent and for the rotary key
    Tensor page_table;  // (sequences, most pages of a sequence) i32
    Tensor chunks;      // (n_chunks, 4) i32: {first row, rows, sequence (row of page_table), position of the first row}
    Tensor rows;        // (N) i32: row of the pool, page * P + offset, to which each new token is written
};

// paged_write.cu. q, k, v and out are heads in rows (1, N, columns).
// Writes the new tokens' keys and values to their rows of the pool. With a table (rope.cu) queries are rotated in
// place, and keys on their way; positions (1, N) i32 are those of the tokens. Without one ({}) they go as they are.
// In e4m3 the scale is largest |x| / 448, or 1 where that is not above 2^-126: all are 0, or become 0.
void paged_write(const PagedStep& step, const HeadColumns& q, const HeadColumns& k, const HeadColumns& v,
                 RopePairs pairs, Tensor positions, Tensor table, cudaStream_t stream);
// MLA. latent: one head of R columns, key: one head of Dr.
void paged_latent_write(const PagedStep& step, const HeadColumns& latent, const HeadColumns& key, cudaStream_t stream);

// flash_attention/paged_attention.cu: GQA over a cache in pages.
// out[n,h] = sum over the s that n sees of softmax(scale q[n,h] . key_s)[s] value_s      key head h / (H/K)
// window > 0: n sees the last `window` positions up to its own. In f32 the bits are those of flash_attention_forward
// on CUDA cores over the whole sequence, whatever the pages, chunks and neighbours are.
void paged_attention_forward(const HeadColumns& out, const HeadColumns& q, int64_t K, const PagedStep& step,
                             float scale, int64_t window, Tensor scratch, cudaStream_t stream);
// max_length, here and below: at least the rows that the page table has for a sequence, its columns times P.
int64_t paged_attention_scratch_n(int64_t N, int64_t H, int64_t D, int64_t max_length);

// ---------------------------------------------------------------------------------------------------------------------
// sampling.cu, draw_tokens.cu: a token from each row of logits, in three steps. Each row has a rule, and does not
// depend on other rows.
//
//   adjusted logits   x[v] = logits[v], changed where the row has an adjustment of v
//   distribution      p[v] = exp((x[v] - max x) / temperature) of the tokens that are kept, otherwise 0; over their sum
//   draw              token = the first v with the largest  (x[v] - max x) / temperature - log E[v]
//
// E[v] = -log(1 - u[v]) with a uniform number u[v] for each token: number v % 4 of philox(seed, sample, position | v /
// 4 << 40), r, as u = (r + 1/2) / 2^32 in f32, and at most 1 - 2^-24. So token v has probability p[v] (draw_tokens.cu
// says why), and distributions that are alike mostly give the same token of the same numbers. Where one token has
// nearly all of the probability, one below 2^-38 is never drawn: u is from 2^-33 to 1 - 2^-24. V is at most 2^18.

struct SamplingRule {                             // of a row
    uint64_t seed = 0, sample = 0, position = 0;  // of the random numbers; position below 2^40
    double top_p = 1.0;             // the threshold keeps the largest x: as few as together have at least top_p of the
                                    // probability of those that top_k keeps (and all that equal the last of them)
    float inverse_temperature = 0;  // 0: greedy, the first of the largest x; no random number, top_k, top_p, min_p
    float log_min_p = -INFINITY;    // those with (x - max x) / temperature >= log_min_p
    int32_t top_k = 0;  // as few of the largest as are at least top_k (more than that only if equal); 0: all
    float repetition = 1, presence = 0, frequency = 0;
    int32_t first_adjustment = 0, n_adjustments = 0;  // in the table of adjustments; no token twice
    int32_t n_top = -1;  // of the most probable tokens; 0: the log-probability of the token alone; -1: none
    int32_t given = -1;  // the token, where it is known and only its log-probability is wanted; -1: it is drawn
};
//   x = logit + bias;   if is_seen: x = x > 0 ? x / repetition : x * repetition;
//   if n_times > 0: x = x - (presence + frequency * n_times)
struct LogitAdjustment {
    int32_t token = 0;
    float bias = 0;
    int32_t is_seen = 0, n_times = 0;
};
struct SamplingDistribution {
    float max, inverse_temperature, threshold, log_min_p;
    int32_t is_valid;  // 0: some x is NaN or +infinity, or all are -infinity. Nothing can be drawn: the token is -1
};
// Structs lie in i32 tensors, a row each: rules (rows, kStructN<SamplingRule>).
template <class Struct>
constexpr int64_t kStructN = sizeof(Struct) / sizeof(int32_t);

// x (rows, sampling_columns(V)) f32, with -infinity from V on; logits (rows, Vp), Vp >= V, are not changed.
constexpr int64_t kMostSampledTokens = int64_t{1} << 18;  // V is at most this
int64_t sampling_columns(int64_t V);
void adjust_logits(Tensor x, Tensor logits, Tensor rules, Tensor adjustments, int64_t V, cudaStream_t stream);
void sampling_distributions(Tensor distributions, Tensor x, Tensor rules, cudaStream_t stream);
// results (rows, at least 1) i32: the first column becomes the token; log_probabilities writes others.
void draw_tokens(Tensor results, Tensor x, Tensor distributions, Tensor rules, cudaStream_t stream);

// log_probabilities.cu: log softmax(logits)[v] = logits[v] - max - log(sum of exp(logits - max)) over v < V, of the
// token in results and of the rule's n_top <= n most probable ones, descending, of equals the smaller id first.
// results (rows, 2 + 2 n) i32: [token | its log-probability | top tokens | their log-probabilities], floats as bits
void log_probabilities(Tensor results, Tensor logits, Tensor rules, int64_t V, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// latent_keys.cu: MLA's keys. Every head's key ends in the same columns, those that rope turns:
//   keys[b,t,h] = [own[b,t,h] | shared[b,t]]     own H heads of Dn columns, shared 1 head of Dr, keys H of Dn + Dr
//   down (d own) = the first columns of dkeys;   dshared[b,t] = sum over h of the last columns of dkeys[b,t,h]

void latent_keys_forward(const HeadColumns& keys, const HeadColumns& own, const HeadColumns& shared,
                         cudaStream_t stream);
void latent_keys_backward(const HeadColumns& down, const HeadColumns& dshared, const HeadColumns& dkeys,
                          cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// flash_attention/paged_latent_attention.cu: MLA over a cache of latents in pages (paged_latent_write), without ever
// expanding them to keys and values.
//   row s of a sequence = [latent c_s (R) | rotated shared key r_s (Dr)],   R + Dr up to kMaxLatentColumns
//   q     H heads of Dn + Dr columns in rows (1, N, ...): [q_h | rotated part]
//   kv_b  (H (Dn + Dv), R): for each head Wk (Dn, R), by which keys are expanded from latents, and Wv (Dv, R), values
//   score[s] = scale ((Wk^T q_h) . c_s + rotated part . r_s),   s <= position of n
//   out[n,h] = Wv (sum over s of softmax(score)[s] c_s)           H heads of Dv columns in rows (1, N, ...)
// Bits do not depend on pages, chunks and neighbours.

constexpr int64_t kMaxLatentColumns = 1024;  // queries and outputs of a tile lie in shared memory
void paged_latent_attention_forward(const HeadColumns& out, const HeadColumns& q, const PagedStep& step, Tensor kv_b,
                                    float scale, Tensor scratch, cudaStream_t stream);
int64_t paged_latent_attention_scratch_n(int64_t N, int64_t H, int64_t R, int64_t Dr, int64_t max_length);

// ---------------------------------------------------------------------------------------------------------------------
// cross_entropy.cu: softmax cross-entropy, forward and backward in one.
//   losses[n] = log(sum_v exp(logits[n,v])) - logits[n, targets[n]]           0 where targets[n] < 0 (ignored)
//   logits[n,v] <- (softmax(logits[n])[v] - [v == targets[n]]) * dloss  in place; 0 for ignored rows and for v >= V
//   logits (N, Vp): the first V columns are the vocabulary, the rest is padding;  targets (N) i32;  losses (N) f32
// There is never a second buffer of the size of the logits. cross_entropy_forward leaves the logits as they are.
// A target >= V is an error of the data reader; its loss is NaN (of divided logits: as if its logit were 0).

void cross_entropy_forward(Tensor losses, Tensor logits, Tensor targets, int64_t V, cudaStream_t stream);
void cross_entropy_forward_backward(Tensor losses, Tensor logits, Tensor targets, int64_t V, float dloss,
                                    cudaStream_t stream);
// The same where the vocabulary is divided, and this rank has V of its columns, those of tokens first, first + 1, ...
// (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Three steps, between which ranks exchange 3 numbers a row:
//   parts    max[n] = max_v logits[n,v];  sums[n] = {sum_v exp(logits[n,v] - max[n]), logits[n, targets[n]] or 0}
//            then   all_max = the ranks' largest max
//   rescale  sums[n][0] *= exp(max[n] - all_max[n])
//            then   all_sums = sum of the ranks' sums
//   finish   losses[n] = log(all_sums[n][0]) + all_max[n] - all_sums[n][1]; and, unless dloss is NaN, the gradient
// max, all_max (N), sums, all_sums (N, 2) f32. A rank may have no column (V = 0).
void cross_entropy_parts(Tensor max, Tensor sums, Tensor logits, Tensor targets, int64_t first, int64_t V,
                         cudaStream_t stream);
void cross_entropy_rescale(Tensor sums, Tensor max, Tensor all_max, cudaStream_t stream);
void cross_entropy_finish(Tensor losses, Tensor logits, Tensor targets, Tensor all_max, Tensor all_sums, int64_t first,
                          int64_t V, float dloss, cudaStream_t stream);
// out[i] = ids[i] - first where that is in [0, n), otherwise -1: as embedding_forward and _backward take it; both are
// (B, T) i32.
void ids_from(Tensor out, Tensor ids, int64_t first, int64_t n, cudaStream_t stream);
// sum: (2) f32 {high, low}, a double as two floats (48 bits, which ranks can add): sum (+)= losses, in an order that
// depends on N alone.
void add_losses(Tensor sum, Tensor losses, bool accumulate, cudaStream_t stream);
