// A model that is divided among ranks, with the requests on one of them: the answers are those of one rank.
#include "engine.h"
#include "ranks.h"
#include "temp_folder.h"

namespace {

struct Drawn {
    std::map<std::array<int64_t, 2>, std::vector<int32_t>> tokens;  // of (request, sample)
    std::vector<float> logprobs;
    size_t cache_bytes = 0;  // of rank 0
    int64_t preemptions = 0;
};

// Greedy requests, one of them for two answers, by n ranks.
Drawn draw(const std::string& folder, const EngineOptions& options, int n) {
    Drawn drawn;
    run_ranks(threads(n), [&](Comm& world) {
        EngineOptions its = options;
        if (n > 1) its.ranks = &world;
        LoadedModel m(folder, "", DType::f32, WeightFormat::none, its);
        m.load();
        if (world.rank > 0) return m.engine->follow();
        drawn.cache_bytes = m.cache.bytes();
        m.engine->token_ready = [&](Request& request, Sequence& sequence, const Sampled& token) {
            drawn.tokens[{request.id, static_cast<int64_t>(sequence.sample)}].push_back(token.token);
            drawn.logprobs.push_back(token.logprob);
            return true;
        };
        std::deque<Request> requests;
        for (int64_t id = 0; id < 5; ++id) {
            Request& request = requests.emplace_back();
            request.id = id, request.prompt = random_tokens(2 + 3 * id, m.config.V, static_cast<uint64_t>(id));
            request.max_tokens = 14 - id, request.n = id == 2 ? 2 : 1;
            request.sampling.temperature = 0, request.sampling.logprobs = 0;
            m.engine->add(request);
        }
        while (m.engine->step()) {
        }
        drawn.preemptions = m.engine->scheduler().n_preemptions();
        if (n > 1) m.engine->end_followers();
    });
    return drawn;
}

}  // namespace

// A logit is a sum of products whose order the ranks change: within 1e-5 for models of this size.
TEST_CASE("ranks that divide a model write what one rank writes", "[inference][ranks][tensor_parallel]") {
    EngineOptions roomy, tight;
    roomy.cache.n_pages = 40;
    roomy.graphs = true;  // of one rank: what several send each other is in no graph
    // Pages are copied to the host and back, and forked: the others have to hear of it.
    tight.cache = {.page_size = 3, .n_pages = 12}, tight.scheduler.step_tokens = 5, tight.scheduler.max_sequences = 4;
    tight.scheduler.preemption = Preemption::swap;
    const struct {
        Config config;
        int ranks;
        bool keys_are_divided;  // otherwise some ranks have the same, or all of them all
    } cases[] = {{small_gpt2(), 3, true},
                 {small_qwen3(), 2, true},
                 {small_llama(), 6, false},
                 {small_mla(16), 3, false},
                 {small_mfa(), 3, false}};
    for (const auto& [small, ranks, keys_are_divided] : cases) {
        Config config = small;
        config.F = 48;
        const TempFolder folder;
        save_model(ModelWithMemory(config, config.T_max).model, folder / "model");
        for (const EngineOptions& options : {roomy, tight}) {
            INFO(config.attention << ", " << ranks << " ranks");
            const Drawn one = draw(folder / "model", options, 1), many = draw(folder / "model", options, ranks);
            CHECK(many.tokens == one.tokens);
            CHECK(many.preemptions == one.preemptions);
            CHECK(largest_difference(many.logprobs, one.logprobs) < 1e-5);
            if (keys_are_divided) CHECK(many.cache_bytes <= one.cache_bytes / static_cast<size_t>(ranks) + 1024);
        }
    }
}
