// inference/paged_model.cu: a model over a cache in pages: the forward of some tokens of many sequences.
//
//     copies of pages that the cache wants made
//     tables: for each row its token, its position, its row in the cache; for each sequence its pages
//     forward: the rows through the model; their keys and values go to the cache, the attention reads them there
//
// The last two are the launches of a step, which may be a graph (inference/step_graphs.cu).
//
// The cache's pages lie in one pool per layer. A page that was swapped out lies in a pool of the host.
#include "inference/inference.h"
#include "layers/decode.h"

#include <algorithm>
#include <bit>

namespace {

// Few different numbers: each needs a graph of its own, for each length of the page tables.
int64_t rounded_rows(int64_t n) { return n <= 2 ? n : n <= 4 ? 4 : round_up(n, 8); }

// Does every sequence compute its last token alone?
bool decodes(std::span<const CachedRows> rows) {
    return std::ranges::all_of(
        rows, [](const CachedRows& its) { return its.tokens.size() == 1 && its.n_logits == 1 && its.times == 1; });
}

}  // namespace

PagedModel::PagedModel(const Model& model, const CacheSizes& sizes, bool graphs, Comm* ranks)
    : cache(sizes), model_(model), with_graphs_(graphs), ranks_(ranks) {}

void PagedModel::take_memory(const StepSizes& largest, std::optional<DType> cache_dtype, Arena& cache_arena,
                             Arena& activations, Arena& pinned) {
    largest_ = largest;
    const DType dtype = cache_dtype.value_or(model_.precision.dtype);
    const CacheSizes& sizes = cache.sizes();
    pools_ = take_cache_pools(model_, sizes.n_pages, sizes.page_size, dtype, cache_arena);
    if (sizes.n_host_pages > 0)
        host_pools_ = take_cache_pools(model_, sizes.n_host_pages, sizes.page_size, dtype, pinned);
    acts_ = take_step_activations(model_, pools_, largest, activations);
    // Attention knows no length but that of the page tables. The last page may have more rows than a sequence needs.
    workspace_ = take_step_workspace(model_, largest, largest.pages * sizes.page_size, activations);
    tables_.tokens = pinned.take("tables of a step", DType::i32, {acts_.tokens.n()});
    // The others side by side, as they are on the device (model/cached_step.cu).
    std::pair<Tensor*, const Tensor*> others[] = {{&tables_.chunks, &acts_.chunks},
                                                  {&tables_.positions, &acts_.positions},
                                                  {&tables_.cache_rows, &acts_.cache_rows},
                                                  {&tables_.logit_rows, &acts_.logit_rows},
                                                  {&tables_.page_table, &acts_.page_table}};
    int64_t n = 0;
    for (const auto& [mine, its] : others) n += its->n();
    const Tensor all = pinned.take("tables of a step", DType::i32, {n});
    n = 0;
    for (const auto& [mine, its] : others) *mine = all.slice((n += its->n()) - its->n(), its->n());
}

void PagedModel::copy_pages(std::span<const PageCopy> copies) {
    const cudaStream_t stream = device().stream;
    const auto copy = [&](const PageCopy& page, const std::vector<Tensor>& device, const std::vector<Tensor>& host) {
        for (size_t l = 0; l < device.size(); ++l) {
            const Tensor& from = page.way == PageCopy::Way::to_device ? host[l] : device[l];
            const Tensor& to = page.way == PageCopy::Way::to_host ? host[l] : device[l];
            const Tensor source = from.slice(page.from, 1);
            cudaCheck(
                cudaMemcpyAsync(to.slice(page.to, 1).data, source.data, source.bytes(), cudaMemcpyDefault, stream));
        }
    };
    for (const PageCopy& page : copies) {
        copy(page, pools_.layers, host_pools_.layers);
        copy(page, pools_.scales, host_pools_.scales);
    }
}

// rounded: to sizes that recur, for a step that decodes.
StepSizes PagedModel::fill_tables(std::span<const CachedRows> rows, bool rounded) {
    const int64_t P = cache.sizes().page_size;
    StepSizes sizes;
    for (const CachedRows& its : rows)
        sizes.pages = std::max<int64_t>(sizes.pages, std::ssize(cache.page_table(its.sequence)));
    if (rounded)
        sizes.pages = std::min(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(sizes.pages))), largest_.pages);
    int32_t *tokens = tables_.tokens.ptr<int32_t>(), *positions = tables_.positions.ptr<int32_t>(),
            *cache_rows = tables_.cache_rows.ptr<int32_t>(), *page_table = tables_.page_table.ptr<int32_t>(),
            *chunks = tables_.chunks.ptr<int32_t>(), *logit_rows = tables_.logit_rows.ptr<int32_t>();
    for (const CachedRows& its : rows) {
        const std::vector<int32_t>& pages = cache.page_table(its.sequence);
        std::copy(pages.begin(), pages.end(), page_table + sizes.sequences * sizes.pages);
        const int64_t n = std::ssize(its.tokens);
        for (int64_t i = 0; i < n; ++i) {
            const int64_t row = sizes.tokens + i, position = its.first + i;
            tokens[row] = its.tokens[static_cast<size_t>(i)];
            positions[row] = static_cast<int32_t>(position);
            cache_rows[row] = static_cast<int32_t>(pages[static_cast<size_t>(position / P)] * P + position % P);
            if (i % kChunkRows == 0) {
                const int64_t chunk[4] = {row, std::min(kChunkRows, n - i), sizes.sequences, position};
                for (int k = 0; k < 4; ++k) chunks[4 * sizes.chunks + k] = static_cast<int32_t>(chunk[k]);
                ++sizes.chunks;
            }
        }
        ++sizes.sequences;
        sizes.tokens += n;
        for (int64_t row = sizes.tokens - its.n_logits; row < sizes.tokens; ++row)
            logit_rows[sizes.logits++] = static_cast<int32_t>(row);
        for (int64_t time = 1; time < its.times; ++time)
            logit_rows[sizes.logits++] = static_cast<int32_t>(sizes.tokens - 1);
    }
    const int64_t n = rounded ? std::min(rounded_rows(sizes.tokens), largest_.sequences) : sizes.tokens;
    while (sizes.tokens < n) repeat_last_row(sizes);
    return sizes;
}

// Of a step that decodes: it has as many sequences, chunks and logits as tokens.
void PagedModel::repeat_last_row(StepSizes& sizes) {
    const int64_t row = sizes.tokens;
    const auto repeat = [&](const Tensor& table, int64_t width) {
        int32_t* const end = table.ptr<int32_t>() + row * width;
        std::copy_n(end - width, width, end);
    };
    for (const Tensor* table : {&tables_.tokens, &tables_.positions, &tables_.cache_rows, &tables_.logit_rows})
        repeat(*table, 1);
    repeat(tables_.page_table, sizes.pages);
    repeat(tables_.chunks, 4);
    tables_.chunks.ptr<int32_t>()[4 * row] = static_cast<int32_t>(row);
    for (int64_t* n : {&sizes.tokens, &sizes.sequences, &sizes.chunks, &sizes.logits}) *n = row + 1;
}

// The first rows of the tables, as the step's activations have them.
std::vector<Tensor> PagedModel::filled_tables(const StepSizes& s) const {
    return {tables_.tokens.slice(0, s.tokens),     tables_.positions.slice(0, s.tokens),
            tables_.cache_rows.slice(0, s.tokens), tables_.page_table.slice(0, s.sequences * s.pages),
            tables_.chunks.slice(0, 4 * s.chunks), tables_.logit_rows.slice(0, s.logits)};
}

// What a step puts on the stream: the tables and the forward.
void PagedModel::launch(const StepSizes& sizes) {
    const cudaStream_t stream = device().stream;
    Activations acts = of_step(acts_, sizes);
    const auto upload = [](const Tensor& to, const Tensor& from, int64_t n) {
        return Upload{to.ptr<int32_t>(), from.ptr<int32_t>(), n};
    };
    const int64_t first_page = tables_.page_table.ptr<int32_t>() - tables_.chunks.ptr<int32_t>();
    upload_tables(upload(acts.tokens, tables_.tokens, sizes.tokens),
                  upload(acts.chunks, tables_.chunks, first_page + sizes.sequences * sizes.pages), stream);
    ::forward(model_, acts, of_step(workspace_, sizes), stream, false);
}

// A step whose tables are filled: its logits.
Tensor PagedModel::compute(const StepSizes& sizes, bool as_graph) {
    const cudaStream_t stream = device().stream;
    const Tensor logits = acts_.logits.slice(0, sizes.logits);
    if (as_graph) {
        graphs_.run({sizes.tokens, sizes.pages}, stream, [&] { launch(sizes); });
        return logits;
    }
    launch(sizes);
    if (sizes.logits == 0) {
        cudaCheck(cudaStreamSynchronize(stream));  // the next step fills the same tables
        return logits;
    }
    TensorParallel* const ranks = model_.tensor_parallel;  // each has the logits of its tokens
    return ranks ? ranks->gather_columns(logits, stream) : logits;
}

Tensor PagedModel::forward(std::span<const CachedRows> rows) {
    const std::vector<PageCopy> copies = cache.take_copies();
    // Ranks wait for each other: that is not work of a stream alone.
    const bool as_graph = with_graphs_ && !model_.tensor_parallel && !model_.data_parallel && decodes(rows);
    const StepSizes sizes = fill_tables(rows, as_graph);
    if (ranks_) tell_step(copies, sizes);
    copy_pages(copies);
    const Tensor logits = compute(sizes, as_graph);
    return as_graph ? logits.slice(0, std::ssize(rows)) : logits;
}
