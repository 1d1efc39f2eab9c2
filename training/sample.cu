// training/sample.cu: text drawn from the model that is trained, by the engine of inference/.
#include "training/training.h"

#include <algorithm>

EngineOptions sample_engine(const TrainOptions& o, const Config& config) {
    EngineOptions options;
    options.scheduler.max_length = std::min({o.seq, int64_t{256}, longest_sequence(config, nullptr, 0)});
    options.scheduler.step_tokens = options.scheduler.max_length;
    options.scheduler.max_sequences = 1;
    options.graphs = false;  // a graph is not worth its memory for so few texts
    return options;
}

std::vector<int32_t> sample(Engine& engine, const std::vector<int32_t>& prompt, int64_t n, double temperature,
                            uint64_t seed, const std::function<bool(int32_t)>& token_ready) {
    const size_t T = static_cast<size_t>(engine.options().scheduler.max_length);
    std::vector<int32_t> text = prompt;
    bool go_on = true;
    for (uint64_t part = 0; go_on && n > 0; ++part) {
        const size_t before = text.size();
        // The engine holds T tokens, as many as the model saw in training or fewer. Where a text is full, its second
        // half begins the next.
        Request request;
        request.prompt.assign(text.end() - static_cast<std::ptrdiff_t>(text.size() < T ? text.size() : T / 2),
                              text.end());
        request.max_tokens = std::min<int64_t>(n, static_cast<int64_t>(T - request.prompt.size()));
        request.sampling.temperature = temperature;
        request.sampling.seed = seed + part;
        engine.token_ready = [&](Request&, Sequence&, const Sampled& drawn) {
            text.push_back(drawn.token);
            --n;
            return go_on = token_ready(drawn.token);
        };
        engine.add(request);
        while (engine.step()) {
        }
        if (text.size() == before) break;  // logits that are not finite end an answer before its first token
    }
    engine.token_ready = nullptr;
    return text;
}
