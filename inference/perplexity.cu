// inference/perplexity.cu: how surprised a model is by a text.
//
//     perplexity = exp(mean over tokens of -log p(token | those before it))
//
// The text is cut into windows of T tokens; a token sees those before it in its window. So a perplexity is of a model,
// a text and a window length; the smaller, the better, and 1 for a model that knows the text by heart.
//
// A window is a step of inference (inference/paged_model.cu): weights of 8 bits and a cache of 8 bits do to it what
// they do to the text that the model writes.
#include "inference/inference.h"

#include <algorithm>

namespace {

constexpr int64_t kPageSize = 16;

// What a window of up to T tokens is computed with.
struct Evaluation {
    Arena memory{"evaluation"}, pinned{"evaluation", MemoryKind::pinned};
    PagedModel model;
    Tensor targets, losses;

    Evaluation(const Model& its_model, int64_t T, std::optional<DType> cache_dtype)
        : model(its_model, {.page_size = kPageSize, .n_pages = ceil_div(T, kPageSize), .share_prefixes = false},
                false) {
        const StepSizes sizes{.tokens = T,
                              .sequences = 1,
                              .chunks = ceil_div(T, kChunkRows),
                              .pages = ceil_div(T, kPageSize),
                              .logits = T};
        for (int pass = 0; pass < 2; ++pass) {
            model.take_memory(sizes, cache_dtype, memory, memory, pinned);
            targets = memory.take("tokens", DType::i32, {T});
            losses = memory.take("losses", DType::f32, {T});
            if (pass == 0) memory.reserve(), pinned.reserve();
        }
    }

    // The sum of the losses of all tokens but the first.
    double loss(std::span<const int32_t> tokens) {
        const int64_t n = std::ssize(tokens) - 1;
        const std::vector<int32_t> inputs(tokens.begin(), tokens.end() - 1), wanted(tokens.begin() + 1, tokens.end());
        const SequenceId sequence = model.cache.begin();
        check(model.cache.reserve(sequence, n), "evaluation: no pages for ", n, " tokens");
        model.cache.append(sequence, inputs);
        const Tensor logits = model.forward(std::vector<CachedRows>{{sequence, 0, inputs, n}});
        copy_to_device(targets.slice(0, n), wanted.data());
        cross_entropy_forward(losses.slice(0, n), logits, targets.slice(0, n), model.config().V, device().stream);
        model.cache.end(sequence);
        double sum = 0;
        for (const float loss : to_floats(losses.slice(0, n))) sum += loss;
        return sum;
    }
};

}  // namespace

std::vector<int32_t> tokens_to_evaluate(const LoadedModel& model, const std::string& path) {
    model.expect_text();
    std::vector<int32_t> tokens = encode_prompt(model, read_text_file(path));
    check(tokens.size() >= 2, "--eval ", path, ": the text has ", tokens.size(), " tokens, and at least 2 are needed");
    const int64_t V = model.config.V;
    for (const int32_t token : tokens)
        check(token < V, "--eval ", path, ": the text has the token ", token, ", but the model knows 0 to ", V - 1,
              ": the tokenizer is not the model's");
    return tokens;
}

Perplexity evaluate_text(const LoadedModel& loaded, std::span<const int32_t> tokens, int64_t window,
                         std::optional<DType> cache_dtype) {
    const Model& model = loaded.model;
    const int64_t n = std::ssize(tokens) - 1;  // each but the first is predicted
    const int64_t T = std::min(window, n);
    Evaluation evaluation(model, T, cache_dtype);
    const double start = seconds_now();
    double sum = 0;
    for (int64_t first = 0; first < n; first += T)
        sum += evaluation.loss(
            tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(std::min(T, n - first) + 1)));
    return {.loss = sum / static_cast<double>(n), .seconds = seconds_now() - start, .tokens = n, .window = T};
}
