// model/attention.h: the attention of a block, in variants. Internal to the model: llm.cu calls them, attention_*.cu are them.
//
// A block's attention is three steps, of which the first and the last are the same for all:
//
//     qkv  = linear(norm1.out)              (N, qkv_width)      llm.cu
//     attn = the variant's own work          (N, H value_D)     here: norms, further products, rope, flash attention
//     x   += linear(attn)                                       llm.cu
//
// A variant is its parameters (place_attention in llm.cu), the activations that it keeps, its forward and its backward.
#pragma once

#include "llm.h"

#include <cmath>

struct AttentionVariant {
    // Activations beside qkv, lse and attn: those that are kept, and those that are cheap to compute again (selective
    // recomputation shares them between blocks, and calls recompute_cheap before a block's backward).
    void (*take_saved)(BlockSaved& saved, const Config& config, DType dtype, int64_t N, Arena& arena);
    void (*take_cheap)(BlockSaved& saved, const Config& config, DType dtype, int64_t N, Arena& arena);
    // Gradients beside dqkv and dattn.
    void (*take_gradients)(Activations& acts, const Config& config, DType dtype, int64_t N, Arena& arena);
    int64_t (*scratch_n)(const Config& config, int64_t N);  // for its norms

    // saved.qkv -> saved.attn;   acts.dattn -> acts.dqkv, and the gradients of the parameters between.
    void (*forward)(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
                    cudaStream_t stream);
    void (*recompute_cheap)(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
                            cudaStream_t stream);
    void (*backward)(const Model& model, const Block& block, const BlockSaved& saved, const Activations& acts,
                     cudaStream_t stream);
};
extern const AttentionVariant kGroupedQueryAttention, kLatentAttention, kFactorizationAttention;

inline const AttentionVariant& attention_variant(const Config& config) {
    switch (config.attention) {
        case AttentionKind::mla: return kLatentAttention;
        case AttentionKind::mfa: return kFactorizationAttention;
        default: return kGroupedQueryAttention;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What variants share

// A linear layer of a block, in dtype or with its products in fp8 (bodies in llm.cu). `which`: its row in BlockSaved::fp8.
enum BlockLinear : int64_t { kQkv, kAttnOut, kUp, kDown, kQUp, kKvUp, kBlockLinearN };
void linear_forward(Tensor out, const Linear& linear, BlockLinear which, Tensor inp, const BlockSaved& saved,
                    const Activations& acts, cudaStream_t stream);
void linear_backward(Tensor dinp, const Linear& linear, BlockLinear which, Tensor dout, Tensor inp,
                     const BlockSaved& saved, const Activations& acts, cudaStream_t stream);

// `count` heads of D columns in rows (N, columns).
inline HeadColumns heads_in(Tensor rows, const Activations& acts, int64_t count, int64_t D, int64_t column = 0,
                            int64_t stride = 0) {
    return {rows.view({acts.B, acts.T, rows.cols()}), count, D, column, stride};
}
// The rotations of the tokens' positions.
inline Tensor rope_rows(const Model& model, const Activations& acts) {
    return model.rope_table.slice(acts.first, acts.T);
}

inline FlashAttentionOptions attention_options(const Model& model, const Block& block, const Activations& acts) {
    const Config& config = model.config;
    const double sharper = config.attention == AttentionKind::mla ? rope_softmax_factor(config.rope_scaling) : 1.0;
    return {.scale = static_cast<float>(sharper) / std::sqrt(static_cast<float>(config.D)),
            .window = block.window,
            .documents = acts.documents,
            .tier = model.attention};
}
