// model/activations.cu: the memory of a forward and of its backward, and what recomputation leaves out of it.
#include "model/attention.h"

#include <algorithm>
#include <cstdlib>

Recompute parse_recompute(const std::string& text) {
    if (text == "none") return {};
    if (text == "full") return {.every = 1};
    if (text == "selective") return {.selective = true};
    char* end = nullptr;
    const long long every = std::strtoll(text.c_str(), &end, 10);
    check(!text.empty() && *end == 0 && every > 0, "--recompute ", text,
          ": use none, selective, full, or a number of blocks");
    return {.every = every};
}

namespace {

NormSaved take_norm(const Config& c, const Activations& acts, Tensor sum, Tensor out, Arena& arena) {
    NormSaved saved{sum, out, {}, {}};
    const int64_t N = acts.B * acts.T;
    if (c.family == Family::gpt2) saved.mean = arena.take("norms", DType::f32, {N});
    saved.rstd = arena.take("norms", DType::f32, {N});
    return saved;
}

// The activations of L blocks. Blocks l, l + n, l + 2 n, ... share one set of tensors, but for the input of a segment of n
// blocks, from which its forward can be run again. n = 1 without inputs is what a forward without a backward needs: block 0's
// input is the embedding, which nobody reads any more when block 1 writes its own there.
void take_blocks(const Model& model, Activations& acts, int64_t n, bool keep_inputs, Arena& arena) {
    const Config& c = model.config;
    const DType dtype = model.precision.dtype;
    const int64_t N = acts.B * acts.T;
    const bool selective = acts.recompute.selective;
    const auto stream_tensor = [&] { return arena.take("residual stream", dtype, {N, c.C}); };
    const auto norm_tensor = [&] { return arena.take("norms", dtype, {N, c.C}); };
    const auto act_tensor = [&] { return arena.take("feed-forward", dtype, {N, c.F}); };
    const AttentionVariant& attention = attention_variant(c);

    BlockSaved shared;  // with selective recomputation
    if (selective) {
        shared.norm1.out = norm_tensor();
        shared.norm2.out = norm_tensor();
        shared.act = act_tensor();
        attention.take_cheap(shared, c, dtype, N, arena);
    }
    for (int64_t l = 0; l < c.L; ++l) {
        BlockSaved saved = shared;
        if (l < n) {
            const Tensor input = l == 0 ? acts.embedded : stream_tensor();
            saved.norm1 = take_norm(c, acts, input, selective ? shared.norm1.out : norm_tensor(), arena);
            saved.qkv = arena.take("attention", dtype, {N, c.qkv_width()});
            saved.lse = arena.take("attention", DType::f32, {acts.B, c.H, acts.T});
            saved.attn = arena.take("attention", dtype, {N, c.attn_width()});
            attention.take_saved(saved, c, dtype, N, arena);
            if (!selective) attention.take_cheap(saved, c, dtype, N, arena);
            saved.norm2 = take_norm(c, acts, stream_tensor(), selective ? shared.norm2.out : norm_tensor(), arena);
            saved.up = arena.take("feed-forward", dtype, {N, c.up_width()});
            saved.act = selective ? shared.act : act_tensor();
        } else {
            saved = acts.blocks[static_cast<size_t>(l % n)];
            if (keep_inputs && l % n == 0) saved.norm1.sum = stream_tensor();
        }
        // Not shared: a block that is run again does not run its last product, but needs what its input was scaled by.
        if (model.precision.fp8 != Fp8Recipe::none)
            saved.fp8 = arena.take("fp8 scales", DType::f32, {kBlockLinearN, 2});
        acts.blocks.push_back(saved);
    }
}

// Scratch of the linear layers of a block, forward and backward.
int64_t linear_scratch_n(const Model& model, int64_t N) {
    const Fp8Recipe fp8 = model.precision.fp8;
    int64_t n = 0;
    for (const auto& [C, O] : block_linear_shapes(model.config))
        n = std::max(
            {n, linear_backward_scratch_n(N, O), fp8 == Fp8Recipe::none ? 0 : fp8_linear_scratch_n(fp8, N, C, O)});
    return n;
}

// What forward needs around the blocks.
Activations take_common(const Model& model, int64_t B, int64_t T, Arena& arena) {
    const Config& c = model.config;
    const DType dtype = model.precision.dtype;
    Activations acts;
    acts.B = B;
    acts.T = T;
    acts.tokens = arena.take("tokens", DType::i32, {B, T});
    acts.targets = arena.take("tokens", DType::i32, {B * T});
    acts.embedded = arena.take("residual stream", dtype, {B * T, c.C});
    acts.losses = arena.take("losses", DType::f32, {B * T});
    acts.branch = arena.take("shared by layers", dtype, {B * T, c.C});
    return acts;
}
void take_head(const Model& model, Activations& acts, Arena& arena) {
    const Config& c = model.config;
    const DType dtype = model.precision.dtype;
    const int64_t N = acts.B * acts.T;
    const Tensor sum = arena.take("residual stream", dtype, {N, c.C});
    acts.final_norm = take_norm(c, acts, sum, arena.take("norms", dtype, {N, c.C}), arena);
    acts.logits = arena.take("logits", dtype, {N, c.V_padded()});
}

}  // namespace

Activations take_activations(const Model& model, int64_t B, int64_t T, const Recompute& recompute, Arena& arena) {
    const Config& c = model.config;
    const DType dtype = model.precision.dtype;
    const int64_t N = B * T;
    Activations acts = take_common(model, B, T, arena);
    acts.recompute = recompute;
    take_blocks(model, acts, recompute.every > 0 ? std::min(recompute.every, c.L) : c.L, true, arena);
    take_head(model, acts, arena);

    acts.dresidual = arena.take("gradients of activations", dtype, {N, c.C});
    acts.dnorm = arena.take("gradients of activations", dtype, {N, c.C});
    acts.dqkv = arena.take("gradients of activations", dtype, {N, c.qkv_width()});
    acts.dattn = arena.take("gradients of activations", dtype, {N, c.attn_width()});
    attention_variant(c).take_gradients(acts, c, dtype, N, arena);
    acts.dup = arena.take("gradients of activations", dtype, {N, c.up_width()});
    acts.dact = arena.take("gradients of activations", dtype, {N, c.F});
    acts.links = arena.take("shared by layers", DType::i32, {2, N});
    const int64_t scratch_n =
        std::max({linear_scratch_n(model, N), layernorm_backward_scratch_n(N, c.C), rmsnorm_backward_scratch_n(N, c.C),
                  flash_attention_backward_scratch_n(B, T, c.H), attention_variant(c).scratch_n(c, N)});
    acts.scratch = arena.take("shared by layers", DType::f32, {scratch_n});
    return acts;
}

Activations take_forward_activations(const Model& model, int64_t B, int64_t T, Arena& arena) {
    Activations acts = take_common(model, B, T, arena);
    take_blocks(model, acts, 1, false, arena);
    take_head(model, acts, arena);
    if (model.precision.fp8 != Fp8Recipe::none)
        acts.scratch = arena.take("shared by layers", DType::f32, {linear_scratch_n(model, B * T)});
    return acts;
}

void take_documents(Activations& acts, Arena& arena) {
    acts.documents = arena.take("tokens", DType::i32, {acts.B, acts.T, 2});
    acts.positions = arena.take("tokens", DType::i32, {acts.B, acts.T});
}
