// test/engine.h: engines with their memory, and the answers that transformers gives.
#pragma once

#include "inference/inference.h"
#include "json.h"
#include "models.h"
#include "test.h"

#include <array>

namespace {

// The models of test/golden/generate, as make_generate_golden.py opens them.
struct GoldenModel : ModelWithMemory {
    GoldenModel(const std::string& folder, int64_t positions)
        : ModelWithMemory(with_positions(load_config(folder), positions), positions) {
        if (model.config.family == Family::gpt2) repeat_positions(folder);
        else load_weights(model, folder);
    }
    static Config with_positions(Config config, int64_t positions) {
        config.T_max = positions;
        return config;
    }
    void repeat_positions(const std::string& folder) {
        const Config saved = load_config(folder);
        ModelWithMemory its(saved, saved.T_max);
        load_weights(its.model, folder);
        for (size_t i = 0; i < model.params.size(); ++i) {
            const Param &to = model.params[i], &from = its.model.params[i];
            const std::vector<float> values = to_floats(from.value.slice(0, from.value.shape[0] - from.padded_rows));
            std::vector<float> all;
            if (to.name != "transformer.wpe.weight") all = values;
            while (all.size() < static_cast<size_t>(to.value.n()) && to.name == "transformer.wpe.weight")
                all.insert(all.end(), values.begin(), values.end());
            model.write(to, all);
        }
    }
};

// Pages of one token, that end inside of a prompt, and that are larger than a prompt; prompts at once and in pieces; a
// pool of all that is needed, and one that holds the longest sequence and little more: then requests are preempted
// again and again; and all of them before every step.
struct Setting {
    int64_t page_size;
    bool share;
    int64_t step_tokens;
    int64_t pages_in_all;  // for sequences of 77 tokens
    Preemption preemption;
    bool preempt_always = false;  // all requests, before every step
    EngineOptions options() const {
        EngineOptions options;
        options.cache = {.page_size = page_size, .n_pages = pages_in_all, .share_prefixes = share};
        options.scheduler.step_tokens = step_tokens, options.scheduler.preemption = preemption;
        options.scheduler.max_sequences = 4;
        return options;
    }
};
const Setting kSettings[] = {{1, true, 3, 90, Preemption::recompute},
                             {16, false, 512, 1000, Preemption::recompute},
                             {17, true, 7, 6, Preemption::swap},
                             {16, true, 512, 1000, Preemption::recompute, true},
                             {1, false, 5, 1000, Preemption::swap, true}};

struct EngineWithMemory {
    Arena cache{"cache"}, activations{"activations"}, pinned{"pinned", MemoryKind::pinned};
    Engine engine;
    std::map<std::array<int64_t, 2>, std::vector<int32_t>> answers;  // of (request, sample)
    EngineWithMemory(const Model& model, const EngineOptions& options, const Model* draft = nullptr)
        : engine(model, options, draft) {
        for (int pass = 0; pass < 2; ++pass) {
            engine.take_memory(cache, activations, pinned);
            if (pass == 0)
                for (Arena* arena : {&cache, &activations, &pinned}) arena->reserve();
        }
        engine.token_ready = [this](Request& request, Sequence& sequence, const Sampled& token) {
            answers[{request.id, static_cast<int64_t>(sequence.sample)}].push_back(token.token);
            return true;
        };
    }
    void finish() {  // all requests
        while (engine.step()) {
        }
    }
};

Request greedy_request(int64_t id, const json& golden) {
    Request request;
    request.id = id;
    request.prompt = as<std::vector<int32_t>>(golden["prompt"]);
    request.max_tokens = golden["ids"].size();
    request.sampling.temperature = 0;
    return request;
}

// The requests of a golden model, all at once, and the first again: its prompt may be in the cache.
inline void check_greedy_answers(EngineWithMemory& e, const json& of_model, bool preempt_always = false) {
    std::deque<Request> requests;
    const Json::ArrayIndex n = of_model["cases"].size();
    for (Json::ArrayIndex i = 0; i <= n; ++i) {
        requests.push_back(greedy_request(i, of_model["cases"][i % n]));
        e.engine.add(requests.back());
    }
    while (e.engine.step())
        if (preempt_always) e.engine.preempt_all();
    INFO(e.engine.scheduler().n_preemptions() << " preemptions");
    for (Json::ArrayIndex i = 0; i <= n; ++i)
        CHECK(e.answers[{i, 0}] == as<std::vector<int32_t>>(of_model["cases"][i % n]["ids"]));
    CHECK(e.engine.cache().use().owned_pages == 0);
}

// Requests with beginnings that they share, one of them for several answers. Their answers.
inline auto sampled_answers(EngineWithMemory& e, int64_t V, int64_t only = -1, int64_t logprobs = -1) {
    std::deque<Request> requests;
    for (int64_t id = 0; id < 6; ++id) {
        if (only >= 0 && only != id) continue;
        Request& request = requests.emplace_back();
        request.id = id;
        request.prompt = random_tokens(3 + 4 * id, V, static_cast<uint64_t>(id % 3));
        request.max_tokens = 40 - std::ssize(request.prompt);
        request.n = id == 2 ? 3 : 1;
        request.sampling.temperature = 0.9, request.sampling.top_p = 0.95;
        request.sampling.seed = static_cast<uint64_t>(id), request.sampling.logprobs = logprobs;
        if (id == 1) {  // one of three tokens, the rarest so far most likely
            request.sampling.logit_bias = {{1, 100}, {2, 100}, {3, 100}};
            request.sampling.frequency_penalty = 2;
        }
        if (id == 4) request.sampling.repetition_penalty = 1.2, request.sampling.frequency_penalty = 0.5;
        e.engine.add(request);
    }
    e.finish();
    CHECK(e.engine.cache().use().owned_pages == 0);
    return e.answers;
}

}  // namespace
