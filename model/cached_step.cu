// model/cached_step.cu: what a step of inference works with.
//
// Its N tokens are the rows of one forward, whichever sequences they belong to: norms, linear layers and feed-forwards
// look at each row by itself. Only the attention has to know the sequences: it reads the rows of a sequence's tokens
// in the cache, through its page table.
#include "model/sublayer.h"

CachePools take_cache_pools(const Model& model, int64_t n_pages, int64_t page_size, DType dtype, Arena& arena) {
    check(dtype == model.precision.dtype || dtype == DType::e4m3, "cache: it holds numbers of the model's type, ",
          dtype_name(model.precision.dtype), ", or e4m3, not ", dtype_name(dtype));
    const SubLayer& attention = *model.attention;
    CachePools pools;
    for (int64_t l = 0; l < model.n_blocks(); ++l) {
        pools.layers.push_back(arena.take("cache", dtype, {n_pages, page_size, attention.cache_width(model.local)}));
        if (dtype == DType::e4m3)
            pools.scales.push_back(
                arena.take("cache", DType::f32, {n_pages, page_size, attention.cache_heads(model.local)}));
    }
    return pools;
}

Activations take_step_activations(const Model& model, const CachePools& pools, const StepSizes& largest, Arena& arena) {
    Activations acts = take_forward_activations(model, 1, largest.tokens, largest.logits, arena);
    // The tables lie side by side, in this order, so that one copy fills them. The pages are the last, because only
    // those that a step uses are copied.
    const int64_t N = largest.tokens, n_pages = largest.sequences * largest.pages;
    const Tensor tables =
        arena.take("tables of a step", DType::i32, {4 * largest.chunks + 2 * N + largest.logits + n_pages});
    int64_t first = 0;
    const auto take = [&](int64_t n) { return tables.slice((first += n) - n, n); };
    acts.chunks = take(4 * largest.chunks).view({largest.chunks, 4});
    acts.positions = take(N).view({1, N});
    acts.cache_rows = take(N);
    acts.logit_rows = take(largest.logits);
    acts.page_table = take(n_pages);
    for (size_t l = 0; l < acts.blocks.size(); ++l) {
        acts.blocks[l].cache = pools.layers[l];
        if (!pools.scales.empty()) acts.blocks[l].cache_scales = pools.scales[l];
    }
    return acts;
}

Workspace take_step_workspace(const Model& model, const StepSizes& largest, int64_t max_length, Arena& arena) {
    Workspace workspace = take_workspace(model, 1, largest.tokens, false, arena);
    const int64_t n = model.attention->cache_scratch_n(model.local, largest.tokens, max_length);
    if (n > workspace.scratch.n()) workspace.scratch = arena.take("shared by layers", DType::f32, {n});
    return workspace;
}

namespace {

Tensor first_rows(const Tensor& tensor, int64_t n) { return tensor.exists() ? tensor.slice(0, n) : tensor; }

// Rows of tokens. A slot that is something else (the sums of flash attention) is not used in inference.
Tensor first_tokens(const Tensor& tensor, int64_t N_largest, int64_t N) {
    return tensor.exists() && tensor.shape[0] == N_largest ? tensor.slice(0, N) : tensor;
}
NormSaved first_rows(const NormSaved& norm, int64_t n) {
    return {first_rows(norm.sum, n), first_rows(norm.out, n), first_rows(norm.mean, n), first_rows(norm.rstd, n)};
}

}  // namespace

Activations of_step(const Activations& largest, const StepSizes& sizes) {
    const int64_t N = sizes.tokens, R = sizes.logits;
    Activations acts = largest;
    acts.T = N;
    const auto first_of_row = [&](const Tensor& row) { return row.view({largest.T}).slice(0, N).view({1, N}); };
    acts.tokens = first_of_row(largest.tokens);
    if (largest.local_tokens.exists()) acts.local_tokens = first_of_row(largest.local_tokens);
    acts.positions = first_of_row(largest.positions);
    acts.cache_rows = first_rows(largest.cache_rows, N);
    acts.page_table =
        first_rows(largest.page_table, sizes.sequences * sizes.pages).view({sizes.sequences, sizes.pages});
    acts.chunks = first_rows(largest.chunks, sizes.chunks);
    acts.embedded = first_rows(largest.embedded, N);
    for (BlockSaved& saved : acts.blocks) {
        saved.norm1 = first_rows(saved.norm1, N), saved.norm2 = first_rows(saved.norm2, N);
        for (Slots* slots : {&saved.attention, &saved.feed_forward})
            for (Tensor& slot : *slots) slot = first_tokens(slot, largest.T, N);
    }
    acts.logit_rows = first_rows(largest.logit_rows, R);
    acts.final_norm = first_rows(largest.final_norm, R);
    acts.logits = first_rows(largest.logits, R);
    return acts;
}

Workspace of_step(const Workspace& largest, const StepSizes& sizes) {
    Workspace workspace = largest;
    workspace.branch = first_rows(largest.branch, sizes.tokens);
    return workspace;
}
