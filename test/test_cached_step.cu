// Steps of inference over a cache in pages: the logits of a token are those of a forward over its whole sequence,
// however the tokens were cut into steps, whatever runs beside it, and wherever its pages lie.
#include "inference/inference.h"
#include "model/sublayer.h"
#include "models.h"
#include "test.h"

namespace {

// A model with a cache, whose sequences are advanced by hand.
struct CachedModel : ModelWithMemory {
    Arena memory{"inference"};
    PagedCache cache;
    CachePools pools;
    Activations acts;
    Workspace workspace;

    CachedModel(const Config& config, DType dtype, int64_t max_length, int64_t page_size, int64_t n_pages,
                DType cache_dtype)
        : ModelWithMemory(config, max_length, dtype), cache({.page_size = page_size, .n_pages = n_pages}) {
        const StepSizes largest{
            .tokens = 40, .sequences = 4, .chunks = 8, .pages = ceil_div(max_length, page_size), .logits = 40};
        for (int pass = 0; pass < 2; ++pass) {
            pools = take_cache_pools(model, n_pages, page_size, cache_dtype, memory);
            acts = take_step_activations(model, pools, largest, memory);
            workspace = take_step_workspace(model, largest, max_length, memory);
            if (pass == 0) memory.reserve();
        }
        // Weights of size 0.3 instead of 0.02: attention is far from uniform.
        for (const Param& param : model.params)
            if (param.decay) {
                std::vector<float> w = to_floats(param.value.slice(0, param.value.shape[0] - param.padded_rows));
                for (float& x : w) x *= 15;
                model.write(param, w);
            }
    }

    // New tokens of some sequences: (sequence, its tokens so far, how many are new). Returns all their logits.
    struct Part {
        SequenceId sequence;
        std::span<const int32_t> tokens;
        int64_t n;
    };
    std::vector<float> step(const std::vector<Part>& parts) {
        std::vector<int32_t> tokens, positions, rows, chunks, table, logit_rows;
        StepSizes sizes;
        for (const Part& part : parts) {
            const std::span<const int32_t> added = part.tokens.last(static_cast<size_t>(part.n));
            REQUIRE(cache.reserve(part.sequence, part.n));
            cache.append(part.sequence, added);
            sizes.pages = std::max<int64_t>(sizes.pages, std::ssize(cache.page_table(part.sequence)));
        }
        REQUIRE(cache.take_copies().empty());
        const int64_t P = cache.sizes().page_size;
        for (const Part& part : parts) {
            std::vector<int32_t> pages = cache.page_table(part.sequence);
            const int64_t first = std::ssize(part.tokens) - part.n;
            for (int64_t i = 0; i < part.n; ++i) {
                if (i % kChunkRows == 0)
                    for (const int64_t x :
                         {std::ssize(tokens), std::min(kChunkRows, part.n - i), sizes.sequences, first + i})
                        chunks.push_back(static_cast<int32_t>(x));
                logit_rows.push_back(static_cast<int32_t>(tokens.size()));
                tokens.push_back(part.tokens[static_cast<size_t>(first + i)]);
                positions.push_back(static_cast<int32_t>(first + i));
                rows.push_back(static_cast<int32_t>(pages[static_cast<size_t>((first + i) / P)] * P + (first + i) % P));
            }
            pages.resize(static_cast<size_t>(sizes.pages), -1);
            table.insert(table.end(), pages.begin(), pages.end());
            ++sizes.sequences;
        }
        sizes.tokens = sizes.logits = std::ssize(tokens), sizes.chunks = std::ssize(chunks) / 4;
        Activations part = of_step(acts, sizes);
        copy_to_device(part.tokens, tokens.data());
        copy_to_device(part.positions, positions.data());
        copy_to_device(part.cache_rows, rows.data());
        copy_to_device(part.chunks, chunks.data());
        copy_to_device(part.page_table, table.data());
        copy_to_device(part.logit_rows, logit_rows.data());
        forward(model, part, of_step(workspace, sizes), device().stream, false);
        return to_floats(part.logits);
    }
};

// The logits of a sequence, computed in steps of the given sizes, with another sequence beside it in some of them.
std::vector<float> in_steps(CachedModel& m, const std::vector<int32_t>& tokens, const std::vector<int64_t>& steps,
                            bool with_neighbour) {
    const SequenceId sequence = m.cache.begin(), neighbour = m.cache.begin();
    const std::vector<int32_t> other = random_tokens(30, m.model.config.V, 9);
    const int64_t V = m.model.config.V_padded();
    std::vector<float> all;
    int64_t n = 0, n_other = 0;
    for (const int64_t size : steps) {
        n += size;
        std::vector<CachedModel::Part> parts;
        if (with_neighbour && n_other < 30) {
            n_other += 5;
            parts.push_back({neighbour, std::span(other).first(static_cast<size_t>(n_other)), 5});
        }
        parts.push_back({sequence, std::span(tokens).first(static_cast<size_t>(n)), size});
        const std::vector<float> logits = m.step(parts);
        all.insert(all.end(), logits.end() - static_cast<std::ptrdiff_t>(size * V), logits.end());
    }
    m.cache.end(sequence);
    m.cache.end(neighbour);
    return all;
}

std::vector<float> whole_forward(const CachedModel& m, const std::vector<int32_t>& tokens) {
    Arena arena("forward");
    Activations acts;
    Workspace workspace;
    const int64_t T = std::ssize(tokens);
    for (int pass = 0; pass < 2; ++pass) {
        acts = take_forward_activations(m.model, 1, T, T, arena);
        workspace = take_workspace(m.model, 1, T, false, arena);
        if (pass == 0) arena.reserve();
    }
    copy_to_device(acts.tokens, tokens.data());
    forward(m.model, acts, workspace, device().stream, false);
    return to_floats(acts.logits);
}

}  // namespace

// On a GPU attention over a whole sequence, in 16 bits, and the products of a whole forward sum in other orders than
// those of a step, which do not depend on the number of rows.
TEST_CASE("logits over a cache in pages are the bits of the whole forward", "[inference][paged][counted]") {
    const std::vector<int64_t> whole{23}, pieces{7, 1, 9, 1, 1, 4}, single(23, 1);
    for (const Config& config : small_models())
        for (const DType dtype : {DType::f32, DType::bf16}) {
            const std::vector<int32_t> tokens = random_tokens(23, config.V, 1);
            CachedModel m(config, dtype, 40, 5, 40, dtype);
            const std::vector<float> reference = in_steps(m, tokens, whole, false), full = whole_forward(m, tokens);
            INFO(config.attention << ", " << dtype_name(dtype));
            CHECK(in_steps(m, tokens, pieces, true) == reference);
            CHECK(in_steps(m, tokens, single, true) == reference);
            if (config.attention == "mla") {
                // The absorbed form sums in another order: over kv_rank numbers of the latent where the training form
                // sums over a head's own columns. In float32 both are within sum_error of the exact logits, relative to
                // the largest, times the 20 such sums of two layers (q, kv, up-projections, scores, values, output, and
                // feed-forward); in bf16 within model_error of them.
                const double tolerance = dtype == DType::f32 ? 20 * sum_error(config.kv_rank) : model_error(dtype);
                CHECK(largest_difference(reference, full) <= tolerance * largest(full));
            } else if (device().is_cpu) {
                CHECK(reference == full);
            } else {
                const double tolerance = dtype == DType::f32 ? 20 * sum_error(config.F) : model_error(dtype);
                CHECK(largest_difference(reference, full) <= tolerance * largest(full));
            }
        }
}

TEST_CASE("what a token leaves in the cache has the size that its attention names", "[inference][paged]") {
    const Config mla = small_mla(16);
    // 32 numbers a token and layer, instead of 96 with keys (H D) and values (H D_v) expanded.
    CHECK(find_attention(mla.attention).cache_width(mla) == 32);
    // DeepSeek-V3's numbers: 576 against 128 heads of 192 + 128.                                  (arXiv:2412.19437)
    Config v3 = mla;
    v3.kv_rank = 512, v3.D_rope = 64;
    CHECK(find_attention(v3.attention).cache_width(v3) == 576);
    CachedModel m(mla, DType::bf16, 40, 5, 7, DType::bf16);
    CHECK(m.pools.layers.size() == 2);
    CHECK(m.pools.layers[0].bytes() == 7 * 5 * 32 * 2);
}

// The same sums in another order: each product of two layers is within sum_error of the exact one, as above.
TEST_CASE("a quantised copy computes what the model does with the weights that its codes stand for",
          "[inference][counted]") {
    for (const Config& config : small_models()) {
        CachedModel m(config, DType::f32, 40, 5, 40, DType::f32);
        Arena arena("quantised");
        Model quantised = quantised_copy(m.model, WeightFormat::int8, arena);
        const size_t planned = arena.bytes();
        arena.reserve();
        quantised = quantised_copy(m.model, WeightFormat::int8, arena);
        CHECK(arena.bytes() == planned);
        int64_t n_quantised = 0;
        for (size_t l = 0; l < m.model.blocks.size(); ++l) {
            for (const Linear* linear : linears(m.model.blocks[l])) {
                // The layer at the same place in the copy's block.
                const auto place =
                    reinterpret_cast<const char*>(linear) - reinterpret_cast<const char*>(&m.model.blocks[l]);
                const Linear& copy =
                    *reinterpret_cast<const Linear*>(reinterpret_cast<const char*>(&quantised.blocks[l]) + place);
                CHECK(copy.weight.exists() == copy.weight_is_read);
                n_quantised += !copy.weight_is_read;
                if (copy.weight_is_read) continue;
                const Tensor codes = copy.quantised.codes;
                std::vector<int8_t> code(static_cast<size_t>(codes.n()));
                copy_to_host(code.data(), codes);
                const std::vector<float> scale = to_floats(copy.quantised.scale);
                std::vector<float> weight;
                for (size_t k = 0; k < code.size(); ++k)
                    weight.push_back(scale[k / static_cast<size_t>(codes.cols())] * static_cast<float>(code[k]));
                from_floats(linear->weight, weight);
            }
        }
        const std::vector<int32_t> tokens = random_tokens(23, config.V, 1);
        CHECK(n_quantised >= 2 * 4);
        const std::vector<float> expected = in_steps(m, tokens, {7, 16}, false);
        m.model = quantised;
        const std::vector<float> logits = in_steps(m, tokens, {7, 16}, false);
        INFO(config.attention << ", off by " << largest_difference(logits, expected) << " of " << largest(expected));
        CHECK(largest_difference(logits, expected) <= 20 * sum_error(config.F) * largest(expected));
        CHECK(logits != expected);
    }
}
