// training/sample.cu: text drawn from the model, one token at a time.
#include "training/training.h"

#include <algorithm>
#include <cmath>

std::vector<int32_t> sample(const Model& model, Activations& acts, const Workspace& workspace,
                            const std::vector<int32_t>& prompt, int64_t n, double temperature, uint64_t seed,
                            const std::function<bool(int32_t)>& token_ready) {
    check(acts.B == 1 && !prompt.empty(),
          "sample: needs activations for one sequence and a prompt of at least one token");
    const cudaStream_t stream = device().stream;
    const uint64_t key = hash_name("sample");
    std::vector<int32_t> text = prompt;
    std::vector<int32_t> window(static_cast<size_t>(acts.T), 0);
    for (int64_t i = 0; i < n; ++i) {
        // The last T tokens, at the front of the window: later positions cannot be seen by earlier ones.
        const size_t length = std::min(text.size(), window.size());
        std::copy(text.end() - static_cast<std::ptrdiff_t>(length), text.end(), window.begin());
        copy_to_device(acts.tokens, window.data());
        forward(model, acts, workspace, stream, false);
        const Tensor row = acts.logits.slice(static_cast<int64_t>(length) - 1, 1);
        std::vector<float> logits = to_floats(row);
        logits.resize(static_cast<size_t>(model.config.V));

        const double largest = *std::max_element(logits.begin(), logits.end());
        double total = 0;
        std::vector<double> weights(logits.size());
        for (size_t v = 0; v < logits.size(); ++v) total += weights[v] = std::exp((logits[v] - largest) / temperature);
        double left = uniform(seed, key, text.size()) * total;
        size_t token = 0;
        while (token + 1 < weights.size() && (left -= weights[token]) >= 0) ++token;
        text.push_back(static_cast<int32_t>(token));
        if (!token_ready(text.back())) break;
    }
    return text;
}
