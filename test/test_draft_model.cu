// A draft model changes how many steps an answer takes, and nothing else.
#include "engine.h"
#include "temp_folder.h"

namespace {

// Beside what the engine's cache says: nothing is left in that of the draft, and its counts are right.
void check_draft_is_empty(EngineWithMemory& e) {
    e.engine.draft()->cache().check_consistency();
    CHECK(e.engine.draft()->cache().use().owned_pages == 0);
}

// A model with the same vocabulary and other weights.
Config other_model(int64_t V, int64_t positions) {
    Config config = small_qwen3();
    config.V = V, config.T_max = positions, config.L = 1;
    return config;
}

struct DraftWithMemory {
    Arena cache{"cache"}, activations{"activations"}, pinned{"pinned", MemoryKind::pinned};
    DraftModel draft;
    DraftWithMemory(const Model& model, const EngineOptions& options, const StepSizes& largest)
        : draft(model, options) {
        for (int pass = 0; pass < 2; ++pass) {
            draft.take_memory(largest, cache, activations, pinned);
            if (pass == 0)
                for (Arena* arena : {&cache, &activations, &pinned}) arena->reserve();
        }
    }
};

double acceptance(const EngineWithMemory& e) {
    const SpeculationCount& count = e.engine.speculation();
    return static_cast<double>(count.accepted) / static_cast<double>(std::max<int64_t>(count.proposed, 1));
}

}  // namespace

TEST_CASE("greedy answers with a draft model are those of transformers' generate", "[inference][draft][shapes]") {
    const auto golden = parsed_json(read_text_file("test/golden/generate/greedy.json"));
    int n = 0;
    for (const std::string& name : golden.getMemberNames()) {
        const json& of_model = golden[name];
        const int64_t positions = as<int64_t>(of_model["positions"]);
        const GoldenModel m("test/golden/" + name, positions);
        const ModelWithMemory other(other_model(m.model.config.V, positions), positions);
        for (const Setting& s : kSettings) {
            if (s.preempt_always) continue;  // who is preempted has no draft
            const bool same = n++ % 2 == 0;  // each setting with both, by turns of the models
            INFO(name << ", pages of " << s.page_size << ", steps of " << s.step_tokens << ", same model " << same);
            EngineWithMemory e(m.model, s.options(), same ? &m.model : &other.model);
            check_greedy_answers(e, of_model);
            check_draft_is_empty(e);
            CHECK(e.engine.speculation().proposed > 0);
            if (positions == 96 && s.pages_in_all < 1000) CHECK(e.engine.scheduler().n_preemptions() > 0);
            if (same) CHECK(acceptance(e) == 1);
            else CHECK(acceptance(e) < 0.5);
        }
    }
}

TEST_CASE("a sampled answer with a draft model is the same tokens as without, alone and among others",
          "[inference][draft][shapes]") {
    for (const Config& config : {small_gpt2(), small_qwen3(), small_mla(16)}) {
        const ModelWithMemory m(config, config.T_max, DType::bf16);
        const ModelWithMemory other(other_model(config.V, config.T_max), config.T_max, DType::bf16);
        EngineOptions roomy, tight, tokens_only;
        roomy.scheduler.max_sequences = 8;
        tight.cache = {.page_size = 3, .n_pages = 44};
        tight.scheduler.max_sequences = 5, tight.scheduler.step_tokens = 5;
        tokens_only.cache = {.page_size = 4, .n_pages = 40, .share_prefixes = false};
        tokens_only.cache_dtype = DType::e4m3, tokens_only.draft_tokens = 1;
        EngineWithMemory plain(m.model, roomy), plain_fp8(m.model, tokens_only);
        const auto expected = sampled_answers(plain, config.V), of_fp8 = sampled_answers(plain_fp8, config.V);
        CHECK(expected.size() == 8);
        for (const Model* draft : {&m.model, &other.model}) {
            const auto run = [&](const EngineOptions& options, int64_t only = -1) {
                EngineWithMemory e(m.model, options, draft);
                const auto answers = sampled_answers(e, config.V, only);
                check_draft_is_empty(e);
                CHECK((acceptance(e) == 1) == (draft == &m.model));
                CHECK(acceptance(e) > 0.1);
                return answers;
            };
            CHECK(run(roomy) == expected);
            CHECK(run(tight) == expected);
            CHECK(run(tokens_only) == of_fp8);
            for (const auto& [key, tokens] : run(roomy, 2)) CHECK(tokens == expected.at(key));
        }
    }
}

TEST_CASE("what a draft model proposes depends on the text alone, not on what was proposed before",
          "[inference][draft]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max);
    EngineOptions options;
    options.cache = {.page_size = 3, .n_pages = 40};
    options.scheduler = {.step_tokens = 64, .max_sequences = 3, .max_length = config.T_max};
    options.graphs = !device().is_cpu;
    const StepSizes largest{.tokens = 64, .sequences = 3, .chunks = 64, .pages = 14};
    for (const double temperature : {0.0, 1.0}) {
        std::deque<Request> requests(3);
        std::deque<Sequence> sequences(3);
        for (size_t i = 0; i < 3; ++i) {
            requests[i].prompt =
                random_tokens(2 + 3 * static_cast<int64_t>(i / 2), config.V, i / 2);  // two begin alike
            requests[i].max_tokens = 34;
            requests[i].sampling.temperature = temperature, requests[i].sampling.seed = i;
            requests[i].sampling.presence_penalty = 0.5;
            sequences[i].tokens = requests[i].prompt;
            sequences[i].tokens.push_back(7);
        }
        DraftWithMemory kept(m.model, options, largest);
        for (uint64_t round = 0; round < 20; ++round) {
            // Another sequence may come to lie where one was that has ended.
            if (round % 2 == 1) std::swap(sequences[0].tokens, sequences[1].tokens);
            std::vector<DraftModel::Drafted> drafted;
            for (size_t i = 0; i < 3; ++i)
                if (round % 7 != i + 3) drafted.push_back({&requests[i], &sequences[i]});  // some are left out
            kept.draft.propose(drafted);
            kept.draft.cache().check_consistency();
            for (const auto& [request, sequence] : drafted) {
                const std::vector<int32_t> draft = std::exchange(sequence->draft, {});
                const int64_t left = request->max_tokens - (std::ssize(sequence->tokens) - std::ssize(request->prompt));
                CHECK(std::ssize(draft) == std::clamp<int64_t>(left - 1, 0, 4));
                DraftWithMemory fresh(m.model, options, largest);
                fresh.draft.propose({{request, sequence}});
                CHECK(std::exchange(sequence->draft, {}) == draft);
                // Some of them are accepted, and a token that nobody proposed follows.
                const int64_t n = static_cast<int64_t>(uniform_below(3, round, request->sampling.seed, 3));
                if (left <= n + 1) continue;
                sequence->tokens.insert(sequence->tokens.end(), draft.begin(), draft.begin() + n);
                sequence->tokens.push_back((draft[static_cast<size_t>(n)] + 1) % static_cast<int32_t>(config.V));
            }
        }
        kept.draft.propose({});
        CHECK(kept.draft.cache().use().owned_pages == 0);
    }
}

// As in the scheduler's test of the same: the first text's row fills a page when the second text comes.
TEST_CASE("a draft model shares no row alone in the step that computes it", "[inference][draft]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max);
    EngineOptions options;
    options.cache = {.page_size = 4, .n_pages = 40};
    options.scheduler = {.step_tokens = 64, .max_sequences = 3, .max_length = config.T_max};
    options.draft_tokens = 1, options.graphs = false;
    DraftWithMemory d(m.model, options, {.tokens = 64, .sequences = 3, .chunks = 64, .pages = 12});
    const std::vector<int32_t> tokens = random_tokens(9, config.V, 1);
    Request request;
    request.prompt = {tokens[0]}, request.max_tokens = 30, request.sampling.temperature = 0;
    Sequence first, second;
    first.tokens.assign(tokens.begin(), tokens.begin() + 7), second.tokens = tokens;
    d.draft.propose({{&request, &first}});
    first.tokens.push_back(tokens[7]), first.draft.clear();
    d.draft.propose({{&request, &first}, {&request, &second}});
    CHECK(first.draft.size() + second.draft.size() == 2);
    CHECK(d.draft.cache().use().owned_pages == 2 + 2);  // of the second text's three pages one is the first's
}

TEST_CASE("a long prompt takes the rows that other sequences of a draft model leave", "[inference][draft]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max);
    EngineOptions options;
    options.cache = {.page_size = 4, .n_pages = 40};
    options.scheduler = {.step_tokens = 5, .max_sequences = 2, .max_length = config.T_max};
    options.graphs = false;
    DraftWithMemory d(m.model, options, {.tokens = 5, .sequences = 2, .chunks = 2, .pages = 10});
    Request request;
    request.prompt = {1}, request.max_tokens = 39, request.sampling.temperature = 0;
    Sequence longer, shorter;
    longer.tokens = random_tokens(30, config.V, 1), shorter.tokens = random_tokens(3, config.V, 2);
    longer.tokens[0] = shorter.tokens[0] = request.prompt[0];
    d.draft.propose({{&request, &longer}, {&request, &shorter}});
    CHECK(longer.draft.empty());
    CHECK(std::ssize(shorter.draft) == options.draft_tokens);
}

TEST_CASE("answers end with a draft model as they do without", "[inference][draft]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max), other(other_model(config.V, config.T_max), config.T_max);
    EngineWithMemory plain(m.model, {}), same(m.model, {}, &m.model), mixed(m.model, {}, &other.model);
    for (EngineWithMemory* e : {&plain, &same, &mixed}) {
        std::string reason;
        e->engine.answer_ended = [&](Request&, uint64_t, const char* why) { reason = why; };
        const auto run = [&](int64_t max_tokens, const std::vector<int32_t>& stop_tokens, int64_t n_steps) {
            e->answers.clear(), reason.clear();
            auto request = std::make_unique<Request>();
            request->prompt = random_tokens(5, config.V, 1);
            request->max_tokens = max_tokens, request->stop_tokens = stop_tokens;
            request->sampling.seed = 3, request->sampling.repetition_penalty = 1.3;
            request->sampling.temperature = 0.1;  // at 1 the other model, too, proposes what is drawn
            e->engine.add(*request);
            for (int64_t i = 0; i < n_steps && e->engine.step(); ++i) {
            }
            return request;
        };
        const auto answer = [&] { return e->answers[{0, 0}]; };
        run(12, {}, 1000);
        const std::vector<int32_t> all = answer();
        CHECK(all.size() == 12);
        CHECK(reason == "length");
        // The first token, and then five a step; the last step has one left.
        if (e == &same) CHECK(e->engine.n_steps() == 1 + 3);
        if (e == &same) CHECK(e->engine.speculation().steps == 3);
        if (e == &plain) CHECK(e->engine.n_steps() == 12);
        for (const int32_t stop : all) {  // some are drawn where the draft has another token
            const int64_t before = e->engine.speculation().proposed;
            run(12, {stop}, 1000);
            // The same model proposes what is drawn behind the first token, and nothing behind the stop token.
            if (e == &same) CHECK(e->engine.speculation().proposed - before <= std::ssize(answer()));
            CHECK(answer() == std::vector<int32_t>(all.begin(), std::find(all.begin(), all.end(), stop)));
            CHECK(reason == "stop");
        }
        run(config.T_max - 5, {}, 1000);  // to the end of the positions
        CHECK(std::ssize(answer()) == config.T_max - 5);
        e->engine.token_ready = [&, n = 0](Request&, Sequence&, const Sampled&) mutable { return ++n < 7; };
        run(30, {}, 1000);  // a stop string, in the middle of a draft
        CHECK(reason == "stop");
        e->engine.token_ready = {};
        const std::unique_ptr<Request> request = run(20, {}, 3);  // cancelled while it runs
        e->engine.cancel(*request);
        CHECK_FALSE(e->engine.step());
        CHECK(reason.empty());
        CHECK(e->engine.cache().use().owned_pages == 0);
        if (e->engine.draft()) check_draft_is_empty(*e);
    }
    CHECK(plain.engine.speculation().text().empty());
    CHECK_THAT(same.engine.speculation().text(), ContainsSubstring("100.0% of "));
}

TEST_CASE("a draft model whose logits are not finite proposes nothing", "[inference][draft]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max), broken(config, config.T_max);
    for (const Param& param : broken.model.params)  // bytes 0xFF: not a number
        cudaCheck(cudaMemsetAsync(param.value.data, 0xFF, param.value.bytes(), device().stream));
    EngineWithMemory plain(m.model, {}), e(m.model, {}, &broken.model);
    CHECK(sampled_answers(e, config.V) == sampled_answers(plain, config.V));
    CHECK(e.engine.speculation().proposed == 0);
    check_draft_is_empty(e);
}

TEST_CASE("a draft model's memory is what was planned, and what cannot be is refused", "[inference][draft]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max);
    EngineOptions options;
    options.scheduler.max_sequences = 3, options.scheduler.preemption = Preemption::swap;
    EngineWithMemory alone(m.model, options), both(m.model, options, &m.model);
    for (const Arena* arena : {&both.cache, &both.activations, &both.pinned}) CHECK(arena->mark() == arena->bytes());
    CHECK(both.cache.bytes() == 2 * alone.cache.bytes());  // the same number of pages
    CHECK(both.activations.bytes() > alone.activations.bytes());
    CHECK(both.pinned.bytes() < alone.pinned.bytes() + alone.cache.bytes());  // and none on the host

    Config larger = config, shorter = config;
    larger.V = 54, shorter.T_max = 17;
    const ModelWithMemory wrong(larger, config.T_max), small(shorter, 17);
    CHECK_THROWS_WITH(Engine(m.model, options, &wrong.model),
                      ContainsSubstring("the draft model has a vocabulary of 54 tokens, the model one of 53"));
    CHECK_THROWS_WITH(Engine(m.model, options, &small.model),
                      ContainsSubstring(concat("a length of ", config.T_max, " tokens: the draft model has 17 ")));
    options.scheduler.max_length = 18;
    CHECK_THROWS_WITH(Engine(m.model, options, &small.model),
                      ContainsSubstring("a length of 18 tokens: the draft model has 17 positions"));
    options.scheduler.max_length = 17;
    CHECK(Engine(m.model, options, &small.model).options().scheduler.max_length == 17);
    options.draft_tokens = std::numeric_limits<int64_t>::max();  // no draft is longer than a sequence
    CHECK(Engine(m.model, options, &small.model).options().draft_tokens == 17);
    options.lookup = 3;
    CHECK_THROWS_WITH(Engine(m.model, options, &small.model), ContainsSubstring("no prompt look-up beside it"));
    options.lookup = 0, options.draft_tokens = 0;
    CHECK_THROWS_WITH(Engine(m.model, options, &small.model), ContainsSubstring("at least 1 token, not 0"));
}

TEST_CASE("a draft model with another tokenizer is refused", "[inference][draft]") {
    const TempFolder folder;
    std::ofstream(folder / "config.json") << read_text_file("test/golden/llama/config.json");
    std::string tokenizer = byte_tokenizer_json();
    const auto load = [&] {
        std::ofstream(folder / "tokenizer.json") << tokenizer;
        return LoadedModel("test/golden/llama", "", DType::f32, WeightFormat::none, {}, folder.path).engine != nullptr;
    };
    CHECK(load());  // bytes in a file, and bytes without one
    const std::string bytes = tokenizer;
    tokenizer = replaced(bytes, "\"added_tokens\": []", R"("added_tokens": [{"id": 256, "content": "<x>"}])");
    CHECK_THROWS_WITH(load(), ContainsSubstring("token 256 of the draft model's tokenizer is not that of the model's"));
    tokenizer = bytes;
    for (const auto& [from, to] : {std::pair{"\"a\": 97", "\"a\": 98"}, std::pair{"\"b\": 98", "\"b\": 97"}})
        tokenizer = replaced(tokenizer, from, to);
    CHECK_THROWS_WITH(load(), ContainsSubstring("token 97 of the draft model's tokenizer is not that of the model's"));
    // A model that has no tokenizer, and more tokens than bytes, says nothing of their texts.
    json config = parsed_json(read_text_file("test/golden/llama/config.json"));
    config["vocab_size"] = 600;
    const TempFolder model;
    for (const TempFolder* each : {&folder, &model}) std::ofstream(*each / "config.json") << dumped(config);
    CHECK(LoadedModel(model.path, "", DType::f32, WeightFormat::none, {}, folder.path).engine != nullptr);
    config["max_position_embeddings"] = 20;
    std::ofstream(folder / "config.json") << dumped(config);
    CHECK_THROWS_WITH(LoadedModel(model.path, "", DType::f32, WeightFormat::none, {}, folder.path),
                      ContainsSubstring("the draft model has 20 positions"));
}
