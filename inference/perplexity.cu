// inference/perplexity.cu: how surprised a model is by a text.
//
//     perplexity = exp(mean over tokens of -log p(token | those before it))
//
// The text is cut into windows of T tokens; a token sees those before it in its window. So a perplexity is of a model,
// a text and a window length; the smaller, the better, and 1 for a model that knows the text by heart.
#include "inference/inference.h"

#include <algorithm>
#include <cmath>

Perplexity evaluate_text(const LoadedModel& loaded, const std::string& text, int64_t window) {
    const Model& model = loaded.model;
    const std::vector<int32_t> tokens = encode_prompt(loaded, text);
    const int64_t n = std::ssize(tokens) - 1;  // each but the first is predicted
    check(n >= 1, "--eval: the text has ", n + 1, " tokens, and at least 2 are needed");
    const int64_t T = std::min(window, n);
    for (const int32_t token : tokens)
        check(token < model.config.V, "--eval: the text has the token ", token, ", but the model knows 0 to ",
              model.config.V - 1, ": its tokenizer is another one");
    Arena arena("evaluation");
    Activations acts;
    Workspace workspace;
    for (int pass = 0; pass < 2; ++pass) {
        acts = take_forward_activations(model, 1, T, T, arena);
        workspace = take_workspace(model, 1, T, false, arena);
        if (pass == 0) arena.reserve();
    }
    Perplexity result;
    const double start = seconds_now();
    double sum = 0;
    std::vector<int32_t> inputs(static_cast<size_t>(T)), targets(static_cast<size_t>(T));
    for (int64_t first = 0; first < n; first += T) {
        // The last window is filled up with tokens that are not counted.
        for (int64_t t = 0; t < T; ++t) {
            inputs[static_cast<size_t>(t)] = tokens[static_cast<size_t>(std::min(first + t, n))];
            targets[static_cast<size_t>(t)] = first + t < n ? tokens[static_cast<size_t>(first + t + 1)] : -1;
        }
        copy_to_device(acts.tokens, inputs.data());
        copy_to_device(acts.targets, targets.data());
        forward(model, acts, workspace, device().stream, false);
        loss_forward(model, acts, device().stream);
        for (const float loss : to_floats(acts.losses)) sum += loss;  // 0 where a token is not counted
    }
    result.tokens = n;
    result.window = T;
    result.loss = sum / static_cast<double>(n);
    result.seconds = seconds_now() - start;
    return result;
}
