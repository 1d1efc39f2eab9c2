// The engine: whole answers, against transformers' and against those of other settings.
#include "inference/inference.h"
#include "models.h"
#include "program.h"
#include "test.h"
#include "training/training.h"
#include "json.h"

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

struct Setting {
    int64_t page_size;
    bool share;
    int64_t step_tokens;
    int64_t pages_in_all;  // for sequences of 77 tokens
    Preemption preemption;
    bool preempt_always = false;  // all requests, before every step
};

struct EngineWithMemory {
    Arena cache{"cache"}, activations{"activations"}, pinned{"pinned", MemoryKind::pinned};
    Engine engine;
    EngineWithMemory(const Model& model, const EngineOptions& options) : engine(model, options) {
        for (int pass = 0; pass < 2; ++pass) {
            engine.take_memory(cache, activations, pinned);
            if (pass == 0)
                for (Arena* arena : {&cache, &activations, &pinned}) arena->reserve();
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

}  // namespace

TEST_CASE("greedy answers are those of transformers' generate", "[inference][engine]") {
    const auto golden = parsed_json(read_text_file("test/golden/generate/greedy.json"));
    // Pages of one token, that end inside of a prompt, and that are larger than a prompt; prompts at once and in
    // pieces; a pool of all that is needed, and one that holds the longest sequence and little more: then requests
    // are preempted again and again; and all of them before every step.
    const Setting settings[] = {{1, true, 3, 90, Preemption::recompute},
                                {16, false, 512, 1000, Preemption::recompute},
                                {17, true, 7, 6, Preemption::swap},
                                {16, true, 512, 1000, Preemption::recompute, true},
                                {1, false, 5, 1000, Preemption::swap, true}};
    for (const std::string& name : golden.getMemberNames()) {
        const json& of_model = golden[name];
        const GoldenModel m("test/golden/" + name, as<int64_t>(of_model["positions"]));
        for (const Setting& s : settings) {
            EngineOptions options;
            options.cache = {.page_size = s.page_size, .n_pages = s.pages_in_all, .share_prefixes = s.share};
            options.scheduler.step_tokens = s.step_tokens, options.scheduler.preemption = s.preemption;
            options.scheduler.max_sequences = 4;
            EngineWithMemory e(m.model, options);
            std::map<int64_t, std::vector<int32_t>> answers;
            e.engine.token_ready = [&](Request& request, Sequence&, const Sampled& token) {
                answers[request.id].push_back(token.token);
                return true;
            };
            std::deque<Request> requests;
            for (const auto& one : of_model["cases"]) {
                requests.push_back(greedy_request(std::ssize(requests), one));
                e.engine.add(requests.back());
            }
            // The first again: its prompt may be in the cache.
            requests.push_back(greedy_request(std::ssize(requests), of_model["cases"][0]));
            e.engine.add(requests.back());
            while (e.engine.step())
                if (s.preempt_always) e.engine.preempt_all();
            INFO(name << ", pages of " << s.page_size << ", steps of " << s.step_tokens << ", "
                      << e.engine.scheduler().n_preemptions() << " preemptions");
            for (const Request& request : requests) {
                const auto i = static_cast<Json::ArrayIndex>(request.id) % of_model["cases"].size();
                CHECK(answers[request.id] == as<std::vector<int32_t>>(of_model["cases"][i]["ids"]));
            }
            CHECK(e.engine.cache().use().owned_pages == 0);
            if (of_model["positions"] == 96 && (s.pages_in_all < 1000 || s.preempt_always))
                CHECK(e.engine.scheduler().n_preemptions() > 0);
        }
    }
}

TEST_CASE("inference takes the memory that it plans, and no more while it runs", "[inference][engine]") {
    const auto free_bytes = [] {
        size_t free = 0, all = 0;
        cudaCheck(cudaMemGetInfo(&free, &all));
        return static_cast<double>(free);
    };
    EngineOptions plain, small;
    plain.cache.n_pages = 20;
    small.cache = {.page_size = 3, .n_pages = 7};
    small.scheduler.preemption = Preemption::swap, small.scheduler.step_tokens = 5;
    small.cache_dtype = DType::e4m3, small.lookup = 3;
    const struct {
        const char* folder;
        DType dtype;
        WeightFormat format;
        EngineOptions options;
        int64_t row_bytes;  // of a token in the cache, all layers, by hand
    } cases[] = {
        // 2 layers, keys and values of 3 heads of 12 columns
        {"test/golden/gpt2", DType::f32, WeightFormat::none, plain, 2 * 2 * 3 * 12 * 4},
        // 2 layers, keys and values of 2 heads of 8 columns: a byte each, and a float's scale for each head
        {"test/golden/llama", DType::bf16, WeightFormat::int8, small, 2 * 2 * 2 * (8 + 4)},
        // 2 layers, a latent of 28 numbers and 8 rotated columns
        {"test/golden/deepseek", DType::f32, WeightFormat::none, plain, 2 * (28 + 8) * 4},
    };
    for (const auto& c : cases) {
        INFO(c.folder);
        device();  // its own memory is there before
        const double before = free_bytes();
        LoadedModel m(c.folder, "", c.dtype, c.format, c.options);
        const double planned = static_cast<double>(m.device_bytes() - device().blas_workspace_bytes);
        CHECK(free_bytes() == before);
        m.load();
        CHECK(taken_as_planned(before - free_bytes(), planned));
        const int64_t rows = c.options.cache.n_pages * c.options.cache.page_size;
        const int64_t gaps = static_cast<int64_t>(m.cache.bytes()) - rows * c.row_bytes;
        CHECK(gaps >= 0);
        CHECK(gaps < 256 * 4);  // the pools of two layers, and of their scales, begin on 256 bytes
        const double loaded = free_bytes();
        std::deque<Request> requests;
        for (int64_t id = 0; id < 3; ++id) {
            Request& request = requests.emplace_back();
            request.id = id, request.prompt = random_tokens(2 + id, m.config.V, 1), request.max_tokens = 9;
            m.engine->add(request);
        }
        while (m.engine->step()) {
        }
        CHECK(free_bytes() == loaded);
    }
}

// In 16 bits, too: nothing in a row's numbers depends on other rows, chunks, pages or preemptions.
TEST_CASE("a sampled answer is the same alone and among others", "[inference][engine]") {
    for (const Config& config : {small_gpt2(), small_qwen3(), small_mla(16)}) {
        const ModelWithMemory m(config, config.T_max, DType::bf16);
        using Answers = std::map<std::array<int64_t, 2>, std::vector<int32_t>>;  // of (request, sample)
        const auto run = [&](const EngineOptions& options, int64_t only) {
            EngineWithMemory e(m.model, options);
            Answers answers;
            e.engine.token_ready = [&](Request& request, Sequence& sequence, const Sampled& token) {
                answers[{request.id, static_cast<int64_t>(sequence.sample)}].push_back(token.token);
                return true;
            };
            std::deque<Request> requests;
            for (int64_t id = 0; id < 6; ++id) {
                if (only >= 0 && only != id) continue;
                Request& request = requests.emplace_back();
                request.id = id;
                request.prompt =
                    random_tokens(3 + 4 * id, config.V, static_cast<uint64_t>(id % 3));  // shared beginnings
                request.max_tokens = 40 - std::ssize(request.prompt);
                request.n = id == 2 ? 3 : 1;
                request.sampling.temperature = 0.9, request.sampling.top_p = 0.95;
                request.sampling.seed = static_cast<uint64_t>(id);
                e.engine.add(request);
            }
            while (e.engine.step()) {
            }
            CHECK(e.engine.cache().use().owned_pages == 0);
            return answers;
        };
        EngineOptions roomy, tight;
        roomy.scheduler.max_sequences = 8;
        tight.cache = {.page_size = 3, .n_pages = 44};
        tight.scheduler.max_sequences = 5, tight.scheduler.step_tokens = 5;
        const Answers together = run(roomy, -1), crowded = run(tight, -1);
        CHECK(together.size() == 8);
        CHECK(together == crowded);
        for (int64_t id = 0; id < 6; ++id)
            for (const auto& [key, tokens] : run(roomy, id)) CHECK(together.at(key) == tokens);
        CHECK(together.at({2, 0}) != together.at({2, 1}));
    }
}

TEST_CASE("an answer ends at a stop token, at its length, or when it is cancelled", "[inference][engine]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max);
    EngineOptions options;
    options.scheduler.max_sequences = 4;
    EngineWithMemory e(m.model, options);
    std::vector<int32_t> tokens;
    std::string reason;
    e.engine.token_ready = [&](Request&, Sequence&, const Sampled& token) {
        tokens.push_back(token.token);
        return true;
    };
    e.engine.answer_ended = [&](Request&, uint64_t, const char* why) { reason = why; };
    const auto run = [&](int64_t max_tokens, const std::vector<int32_t>& stop_tokens, int n_steps) {
        tokens.clear(), reason.clear();
        auto request = std::make_unique<Request>();
        request->prompt = random_tokens(5, config.V, 1);
        request->max_tokens = max_tokens, request->stop_tokens = stop_tokens;
        request->sampling.seed = 3;
        e.engine.add(*request);
        for (int i = 0; i < n_steps && e.engine.step(); ++i) {
        }
        return request;
    };
    run(12, {}, 1000);
    CHECK(tokens.size() == 12);
    CHECK(reason == "length");
    const std::vector<int32_t> all = tokens;
    const size_t first = static_cast<size_t>(std::find(all.begin(), all.end(), all[5]) - all.begin());
    run(12, {all[5]}, 1000);
    CHECK(tokens == std::vector<int32_t>(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(first)));
    CHECK(reason == "stop");
    run(config.T_max - 5, {}, 1000);  // to the end of the positions
    CHECK(std::ssize(tokens) == config.T_max - 5);
    // Cancelled while it runs.
    const std::unique_ptr<Request> request = run(20, {}, 4);
    e.engine.cancel(*request);
    CHECK(e.engine.cache().use().owned_pages == 0);
    CHECK_FALSE(e.engine.step());
    CHECK(reason.empty());
    CHECK(tokens.size() == 4);
}

TEST_CASE("a sample of a training run may be longer than its sequences", "[inference][engine]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, 16);
    TrainOptions options;
    options.seq = 16;
    EngineWithMemory e(m.model, sample_engine(options));
    std::vector<int32_t> heard;
    const auto hear = [&](int32_t token) {
        heard.push_back(token);
        return heard.size() < 40;
    };
    const std::vector<int32_t> prompt{1, 2, 3}, text = sample(e.engine, prompt, 50, 0.8, 7, hear);
    REQUIRE(heard.size() == 40);
    CHECK(std::vector<int32_t>(text.begin() + 3, text.end()) == heard);
    // Where 16 tokens are full, the next begin with the last 8 of them: those that follow depend on no others.
    std::vector<int32_t> again =
        sample(e.engine, {text.begin() + 8, text.begin() + 16}, 8, 0.8, 8, [](int32_t) { return true; });
    CHECK(std::vector<int32_t>(again.begin() + 8, again.end()) ==
          std::vector<int32_t>(text.begin() + 16, text.begin() + 24));
}

TEST_CASE("beam search finds the answers of transformers' beam search", "[inference][engine]") {
    const auto golden = parsed_json(read_text_file("test/golden/generate/beams.json"));
    for (const std::string& name : golden.getMemberNames()) {
        const json& of_model = golden[name];
        const GoldenModel m("test/golden/" + name, as<int64_t>(of_model["positions"]));
        for (const int64_t n_pages : {1000, 22}) {  // with few pages the beams of one search make the other one wait
            EngineOptions options;
            options.cache = {.page_size = 3, .n_pages = n_pages};
            options.scheduler.max_sequences = 8, options.scheduler.step_tokens = 9;
            EngineWithMemory e(m.model, options);
            std::map<int64_t, std::vector<BeamAnswer>> found;
            e.engine.beams_ended = [&](Request& request, const std::vector<BeamAnswer>& answers) {
                found[request.id] = answers;
            };
            std::deque<Request> requests;
            for (const auto& one : of_model["cases"]) {
                Request& request = requests.emplace_back();
                request.id = std::ssize(requests) - 1;
                request.prompt = as<std::vector<int32_t>>(one["prompt"]);
                request.max_tokens = as<int64_t>(one["tokens"]), request.n = 3;
                request.stop_tokens = {as<int32_t>(one["stop"])};
                request.beams = BeamOptions{.length_penalty = 0.7};
                e.engine.add(request);
            }
            while (e.engine.step()) {
            }
            INFO(name << ", " << e.engine.scheduler().n_preemptions() << " preemptions");
            CHECK(e.engine.cache().use().owned_pages == 0);
            for (Json::ArrayIndex i = 0; i < requests.size(); ++i) {
                const auto& wanted = of_model["cases"][i]["answers"];
                const std::vector<BeamAnswer>& answers = found[static_cast<int64_t>(i)];
                REQUIRE(answers.size() == wanted.size());
                for (Json::ArrayIndex k = 0; k < answers.size(); ++k) {
                    std::vector<int32_t> tokens = answers[k].tokens;
                    if (tokens.back() == requests[i].stop_tokens[0]) tokens.pop_back();
                    CHECK(tokens == as<std::vector<int32_t>>(wanted[k]));
                }
            }
        }
    }
}
