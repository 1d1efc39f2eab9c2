// The engine: whole answers, against transformers' and against those of other settings.
#include "engine.h"
#include "io/json.h"
#include "program.h"
#include "ranks.h"
#include "training/training.h"

#include <limits>

TEST_CASE("greedy answers are those of transformers' generate", "[inference][engine][shapes]") {
    const auto golden = parsed_json(read_text_file("test/golden/generate/greedy.json"));
    for (const std::string& name : golden.getMemberNames()) {
        const json& of_model = golden[name];
        const int64_t positions = as<int64_t>(of_model["positions"]);
        const GoldenModel m("test/golden/" + name, positions);
        for (const Setting& s : kSettings) {
            INFO(name << ", pages of " << s.page_size << ", steps of " << s.step_tokens);
            EngineWithMemory e(m.model, s.options());
            check_greedy_answers(e, of_model, s.preempt_always);
            if (positions == 96 && (s.pages_in_all < 1000 || s.preempt_always))
                CHECK(e.engine.scheduler().n_preemptions() > 0);
        }
    }
}

static double free_bytes() { return static_cast<double>(device_memory().free); }

TEST_CASE("inference takes the memory that it plans, and no more while it runs", "[inference][engine][alone]") {
    EngineOptions plain, small;
    plain.cache.n_pages = 20;
    small.cache = {.page_size = 3, .n_pages = 7};
    small.scheduler.preemption = Preemption::swap, small.scheduler.step_tokens = 5;
    small.cache_dtype = DType::e4m3, small.lookup = 3;
    plain.graphs = small.graphs = false;  // what a GPU's driver keeps for graphs is in no plan
    const struct {
        const char* folder;
        DType dtype;
        WeightFormat format;
        EngineOptions options;
        int64_t row_bytes;  // of a token in the cache, all layers, by hand
        const char* draft = "";
    } cases[] = {
        // 2 layers, keys and values of 3 heads of 12 columns
        {"test/golden/gpt2", DType::f32, WeightFormat::none, plain, 2 * 2 * 3 * 12 * 4},
        // 2 layers, keys and values of 2 heads of 8 columns: a byte each, and a float's scale for each head
        {"test/golden/llama", DType::bf16, WeightFormat::int8, small, 2 * 2 * 2 * (8 + 4)},
        // 2 layers, a latent of 28 numbers and 8 rotated columns
        {"test/golden/deepseek", DType::f32, WeightFormat::none, plain, 2 * (28 + 8) * 4},
        // The first, twice
        {"test/golden/gpt2", DType::f32, WeightFormat::none, plain, 2 * 2 * 2 * 3 * 12 * 4, "test/golden/gpt2"},
    };
    for (const auto& c : cases) {
        INFO(c.folder);
        device();  // its own memory is there before
        const double before = free_bytes();
        LoadedModel m(c.folder, "", c.dtype, c.format, c.options, c.draft);
        const double planned = static_cast<double>(m.device_bytes() - device().blas_workspace_bytes);
        CHECK(taken_as_planned(before - free_bytes(), 0));
        m.load();
        // In strict mode each tensor is an allocation of its own, in whole pages.
        if (std::getenv("CUDA_CPU_STRICT") == nullptr) CHECK(taken_as_planned(before - free_bytes(), planned));
        const int64_t rows = c.options.cache.n_pages * c.options.cache.page_size;
        const int64_t gaps = static_cast<int64_t>(m.cache.bytes()) - rows * c.row_bytes;
        CHECK(gaps >= 0);
        CHECK(gaps < 256 * 4);  // the pools of two layers, and of their scales or the draft's, begin on 256 bytes
        const double loaded = free_bytes();
        std::deque<Request> requests;
        for (int64_t id = 0; id < 3; ++id) {
            Request& request = requests.emplace_back();
            request.id = id, request.prompt = random_tokens(2 + id, m.config.V, 1), request.max_tokens = 9;
            m.engine->add(request);
        }
        while (m.engine->step()) {
        }
        CHECK(taken_as_planned(loaded - free_bytes(), 0));  // a GPU loads kernels when they first run
    }
}

TEST_CASE("the tokens that end an answer are those of generation_config.json, then of config.json",
          "[inference][engine]") {
    const TempFolder folder;
    const std::string config = slurp("test/golden/gpt2/config.json"), id = "\"eos_token_id\": 96";
    const size_t at = config.find(id);
    REQUIRE(at != std::string::npos);
    const auto ends = [&](const std::string& in_config, const std::string& generation_config) {
        spit(folder / "config.json", std::string(config).replace(at, id.size(), "\"eos_token_id\": " + in_config));
        spit(folder / "generation_config.json", generation_config);
        return LoadedModel(folder.path, "", DType::f32, WeightFormat::none, {}).stop_tokens;
    };
    CHECK(ends("96", "{}") == std::vector<int32_t>{96});
    CHECK(ends("96", "{\"eos_token_id\": [3, 50256, 5]}") == std::vector<int32_t>{3, 5});  // no model token is 50256
    CHECK(ends("50256", "{}").empty());
    CHECK_THROWS_WITH(ends("-1", "{}"), ContainsSubstring("eos_token_id is -1, expected one or more"));
    CHECK_THROWS_WITH(ends("96.0", "{}"), ContainsSubstring("eos_token_id is 96.0, expected one or more"));
    CHECK_THROWS_WITH(ends("96", "[96]"), ContainsSubstring("generation_config.json: this is not a JSON object"));
}

// Keys and values of a token take 1 MiB here: 64 sequences of 65536 tokens would take 4 TiB.
TEST_CASE("a cache of no given size is for all sequences, or takes the memory that is free",
          "[inference][engine][alone]") {
    const TempFolder folder;
    spit(folder / "config.json",
         R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
             "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 256, "num_hidden_layers": 8,
             "intermediate_size": 64, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
             "tie_word_embeddings": true})");
    EngineOptions options;
    options.cache.page_size = 128;
    const auto pages = [&](int64_t sequences, int64_t length) {
        options.scheduler.max_sequences = sequences, options.scheduler.max_length = length;
        LoadedModel m(folder.path, "", DType::f32, WeightFormat::none, options);
        return std::pair(m.engine->options().cache.n_pages, static_cast<double>(m.device_bytes()));
    };
    CHECK(pages(3, 300).first == 3 * 3);
    const double before = free_bytes();
    const auto [n, bytes] = pages(64, 65536);
    const double after = free_bytes();  // other programs take and give back memory meanwhile, between the two as well
    INFO(n << " pages; " << bytes << " of " << before << " bytes, then " << after);
    CHECK(bytes <= 0.9 * std::max(before, after));
    CHECK(bytes > 0.86 * std::min(before, after) - 256 * (1 << 20));  // a page takes 128 MiB
    if (!device().is_cpu) return;
    options.scheduler.preemption = Preemption::swap;  // then as many pages lie beside them
    CHECK(std::abs(static_cast<double>(pages(64, 65536).first) / static_cast<double>(n) - 0.5) < 0.1);
    // Two ranks, each with half of the heads, share the device: together they have as much.
    std::array<int64_t, 2> of_ranks{};
    run_ranks(threads(2), [&](Comm& world) {
        EngineOptions its = options;
        its.ranks = &world, its.scheduler.preemption = Preemption::recompute;
        const LoadedModel m(folder.path, "", DType::f32, WeightFormat::none, its);
        of_ranks[static_cast<size_t>(world.rank)] = m.engine->options().cache.n_pages;
    });
    CHECK(of_ranks[0] == of_ranks[1]);
    CHECK(std::abs(static_cast<double>(of_ranks[0]) / static_cast<double>(n) - 1) < 0.2);
}

// In 16 bits, too: nothing in a row's numbers depends on other rows, chunks, pages or preemptions.
TEST_CASE("a sampled answer is the same alone and among others", "[inference][engine]") {
    int64_t turn = 0;
    for (const Config& config : {small_gpt2(), small_qwen3(), small_mla(16)}) {
        const ModelWithMemory m(config, config.T_max, DType::bf16);
        const auto run = [&](const EngineOptions& options, int64_t only) {
            EngineWithMemory e(m.model, options);
            return sampled_answers(e, config.V, only);
        };
        EngineOptions roomy, tight;
        roomy.scheduler.max_sequences = 8;
        tight.cache = {.page_size = 3, .n_pages = 44};
        tight.scheduler.max_sequences = 5, tight.scheduler.step_tokens = 5;
        const auto together = run(roomy, -1), crowded = run(tight, -1);
        CHECK(together.size() == 8);
        CHECK(together == crowded);
        tight.lookup = 4;  // the draft of one beside the first tokens of another
        CHECK(run(tight, -1) == together);
        for (const int64_t id : {turn, turn + 3})  // each with one of the models
            for (const auto& [key, tokens] : run(roomy, id)) CHECK(together.at(key) == tokens);
        CHECK(together.at({2, 0}) != together.at({2, 1}));
        ++turn;
    }
}

// For make count: all prompts in one step, and in pieces beside drafts. (Whose answers are right: above.)
TEST_CASE("the kernels of an engine's steps", "[inference][engine][counted]") {
    for (const Config& config : {small_gpt2(), small_qwen3(), small_mla(16)}) {
        const ModelWithMemory m(config, config.T_max, DType::bf16);
        EngineOptions roomy, pieces;
        roomy.scheduler.max_sequences = 8;
        pieces.cache = {.page_size = 3, .n_pages = 44};
        pieces.scheduler.max_sequences = 5, pieces.scheduler.step_tokens = 5, pieces.lookup = 4;
        for (const EngineOptions& options : {roomy, pieces}) {
            EngineWithMemory e(m.model, options);
            CHECK(sampled_answers(e, config.V).size() == 8);
        }
    }
}

// Rows that are added to a graph's step, page tables that are longer: no bit of any logit may depend on them. The
// log-probabilities show the bits that the tokens do not.
TEST_CASE("answers are the same with steps that are launched as graphs", "[inference][engine][graphs]") {
    struct Case {
        Config config;
        DType dtype;
        std::optional<DType> cache_dtype;
    };
    for (const Case& c : {Case{small_gpt2(), DType::f32, {}}, Case{small_qwen3(), DType::bf16, {}},
                          Case{small_mla(16), DType::f32, {}}, Case{small_llama(), DType::bf16, DType::e4m3}}) {
        const ModelWithMemory m(c.config, c.config.T_max, c.dtype);
        EngineOptions roomy, tight, narrow;  // narrow: rows of prompts are alone, and rows are added beyond step_tokens
        roomy.scheduler.max_sequences = narrow.scheduler.max_sequences = 8;
        roomy.cache_dtype = tight.cache_dtype = narrow.cache_dtype = c.cache_dtype;
        tight.cache = {.page_size = 3, .n_pages = 44};
        tight.scheduler.max_sequences = 5, tight.scheduler.step_tokens = 5;
        narrow.scheduler.step_tokens = 3;
        for (EngineOptions options : {roomy, tight, narrow}) {
            std::map<bool, std::map<std::array<int64_t, 2>, std::vector<float>>> logprobs;
            std::map<bool, std::map<std::array<int64_t, 2>, std::vector<int32_t>>> answers;
            for (const bool graphs : {false, true}) {
                options.graphs = graphs;
                EngineWithMemory e(m.model, options);
                const auto keep = e.engine.token_ready;
                e.engine.token_ready = [&](Request& request, Sequence& sequence, const Sampled& token) {
                    logprobs[graphs][{request.id, static_cast<int64_t>(sequence.sample)}].push_back(token.logprob);
                    return keep(request, sequence, token);
                };
                sampled_answers(e, c.config.V, -1, 0);
                for (const int64_t n : {1, 2}) {  // then the first tokens of two answers are drawn from one row
                    Request request;
                    request.id = 5 + n, request.prompt = {1}, request.max_tokens = 4, request.n = n;
                    request.sampling.logprobs = 0;
                    e.engine.add(request);
                    e.finish();
                }
                answers[graphs] = e.answers;
                const StepGraphs& its = e.engine.graphs();
                INFO(its.n_launches() << " graphs in " << e.engine.n_steps() << " steps");
                CHECK((its.n_launches() > (graphs ? e.engine.n_steps() / 3 : 0)) == graphs);
                CHECK((its.n_nodes() > 20) == graphs);
            }
            CHECK(answers[true] == answers[false]);
            CHECK(logprobs[true] == logprobs[false]);
        }
    }
}

// Attention in 16 bits on a GPU divides the rows of page tables, not those of sequences, among its blocks.
TEST_CASE("answers are the same with pages of more rows than the longest sequence", "[inference][engine]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max, DType::bf16);
    EngineOptions options;
    options.scheduler.max_sequences = options.scheduler.step_tokens = 4;
    std::map<int64_t, std::map<std::array<int64_t, 2>, std::vector<int32_t>>> answers;
    for (const int64_t page_size : {8, 300}) {
        options.cache.page_size = page_size;
        EngineWithMemory e(m.model, options);
        answers[page_size] = sampled_answers(e, config.V);
    }
    CHECK(answers[8] == answers[300]);
}

TEST_CASE("launches that cannot be captured are an error, and the stream goes on", "[inference][engine][graphs]") {
    const cudaStream_t stream = device().stream;
    Arena arena("numbers"), pinned("numbers", MemoryKind::pinned);
    Tensor number, host;
    for (int pass = 0; pass < 2; ++pass) {
        number = arena.take("number", DType::i32, {1}), host = pinned.take("number", DType::i32, {1});
        if (pass == 0) arena.reserve(), pinned.reserve();
    }
    const auto launches = [&](int byte) {
        return [&, byte] { cudaCheck(cudaMemsetAsync(number.data, byte, number.bytes(), stream)); };
    };
    const auto result = [&] {
        cudaCheck(cudaMemcpyAsync(host.data, number.data, host.bytes(), cudaMemcpyDefault, stream));
        cudaCheck(cudaStreamSynchronize(stream));
        return *host.ptr<int32_t>();
    };
    void* memory = nullptr;
    StepGraphs graphs;
    graphs.run({1, 1}, stream, launches(1));
    CHECK_THROWS_WITH(graphs.run({1, 1}, stream, [&] { cudaCheck(cudaMalloc(&memory, 100)); }),
                      ContainsSubstring("cudaErrorStreamCaptureUnsupported"));
    CHECK_THROWS_WITH(graphs.run({1, 1}, stream, [&] { launches(2)(), fail("not launched"); }),
                      ContainsSubstring("not launched"));
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(result() == 0x01010101);
    CHECK(graphs.n_launches() == 0);
    for (int64_t n = 1; n <= 2; ++n) {
        graphs.run({1, 1}, stream, launches(3));
        CHECK(result() == 0x03030303);
        CHECK(graphs.n_launches() == n);
        CHECK(graphs.n_nodes() == 1);
        launches(4)();
    }
    graphs.run({1, 2}, stream, launches(5));  // a step of other sizes
    CHECK(graphs.n_launches() == 2);
    CHECK(result() == 0x05050505);
}

TEST_CASE("a draft model's steps are graphs, too", "[inference][engine][graphs]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max);
    EngineOptions options;
    options.scheduler.max_sequences = 8;
    std::map<bool, std::map<std::array<int64_t, 2>, std::vector<int32_t>>> answers;
    for (const bool graphs : {false, true}) {
        options.graphs = graphs;
        EngineWithMemory e(m.model, options, &m.model);
        answers[graphs] = sampled_answers(e, config.V);
        CHECK((e.engine.draft()->graphs().n_launches() > 10) == graphs);
    }
    CHECK(answers[true] == answers[false]);
}

TEST_CASE("an answer ends at a stop token, at its length, or when it is cancelled", "[inference][engine]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max);
    EngineOptions options;
    options.scheduler.max_sequences = 4;
    EngineWithMemory e(m.model, options);
    e.engine.start_reports(true);
    int64_t n_runs = 0;
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
        request->id = n_runs++, request->prompt = random_tokens(5, config.V, 1);
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
    // The reports count an answer when it ends, with the token that ended it; then it is no longer there.
    CacheReport expected(e.engine.options().cache, config.T_max);
    const CacheReport none = expected;
    for (const int64_t drawn : {int64_t{12}, static_cast<int64_t>(first) + 1, config.T_max - 5})
        expected.finished(5, drawn);
    CHECK(e.engine.cache_report().contiguous().tokens == expected.contiguous().tokens);
    CHECK(e.engine.timeline().text().find('-') == std::string::npos);
    e.engine.start_reports(false);
    CHECK(e.engine.cache_report().text() == none.text());
}

TEST_CASE("a cache of one row has room for two tokens, and no look-up is longer than a sequence",
          "[inference][engine]") {
    const Config config = small_gpt2();
    const ModelWithMemory m(config, config.T_max);
    EngineOptions options;
    options.cache = {.page_size = 1, .n_pages = 1};
    options.lookup = std::numeric_limits<int64_t>::max();
    EngineWithMemory e(m.model, options);
    CHECK(e.engine.options().scheduler.max_length == 2);
    CHECK(e.engine.options().lookup == config.T_max);
    Request request;
    request.prompt = {1}, request.max_tokens = 1;
    e.engine.add(request);
    e.finish();
    CHECK(e.answers.size() == 1);
    // The last page of the longest sequence is not full: the model has no positions for its other rows.
    options.cache = {.page_size = 3, .n_pages = ceil_div(config.T_max, 3)};
    REQUIRE(config.T_max % 3 > 0);
    CHECK(Engine(m.model, options).options().scheduler.max_length == config.T_max);
    options.cache.n_pages -= 1;
    CHECK(Engine(m.model, options).options().scheduler.max_length == options.cache.n_pages * 3);
    CHECK_THROWS_WITH(longest_sequence(config, nullptr, -1), ContainsSubstring("a length of -1 tokens"));
    Config dynamic = small_llama();
    dynamic.rope_scaling = {.factor = 2, .original_max_position = dynamic.T_max - 1, .kind = RopeKind::dynamic};
    CHECK(longest_sequence(dynamic, nullptr, 0) == dynamic.T_max - 1);
    CHECK_THROWS_WITH(longest_sequence(dynamic, nullptr, dynamic.T_max),
                      ContainsSubstring("before its dynamic rope scaling begins"));
    // Pages on the host: as many as on the device, or as asked for.
    options.scheduler.preemption = Preemption::swap;
    CHECK(Engine(m.model, options).options().cache.n_host_pages == options.cache.n_pages);
    options.cache.n_host_pages = 2;
    CHECK(Engine(m.model, options).options().cache.n_host_pages == 2);
}

// Each prompt has one row more than a chunk, so that no step of as many tokens and sequences has more chunks.
TEST_CASE("a step has memory for the chunks of long prompts", "[inference][engine]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max);
    for (const int64_t n : {1, 3}) {
        EngineOptions options;
        options.scheduler = {.step_tokens = n * (kChunkRows + 1), .max_sequences = n};
        EngineWithMemory e(m.model, options);
        std::deque<Request> requests(static_cast<size_t>(n));
        uint64_t n_added = 0;
        for (Request& request : requests) {
            request.id = static_cast<int64_t>(++n_added), request.max_tokens = 1;
            request.prompt = random_tokens(kChunkRows + 1, config.V, n_added);
            e.engine.add(request);
        }
        e.finish();
        CHECK(std::ssize(e.answers) == n);
        CHECK(e.engine.n_steps() == 1);
    }
}

// A sequence may lie in memory where one lay that has ended.
TEST_CASE("what is looked up for an answer is its own text", "[inference][engine]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max);
    EngineOptions options;
    options.lookup = 4;
    const auto answer = [&](EngineWithMemory& e, int32_t token, int n_steps) {
        const int64_t before = e.engine.speculation().proposed;
        Request request;
        request.prompt = {token, token + 1, token, token + 1}, request.max_tokens = 30;
        request.sampling.logit_bias = {{token, 100}, {token + 1, 100}};
        e.engine.add(request);
        for (int i = 0; i < n_steps && e.engine.step(); ++i) {
        }
        if (n_steps < 4) e.engine.cancel(request);
        return e.engine.speculation().proposed - before;
    };
    EngineWithMemory alone(m.model, options);
    const int64_t proposed = answer(alone, 10, 1000);
    CHECK(proposed > 0);
    for (const int n_steps : {3, 1000}) {
        EngineWithMemory e(m.model, options);
        answer(e, 20, n_steps);
        CHECK(answer(e, 10, 1000) == proposed);
    }
}

namespace {

// Words that begin with a space, and bytes that begin a character, by turns: as LLaMA 2's, which drops the first space.
std::unique_ptr<Tokenizer> words_and_bytes(int64_t V) {
    JsonText vocab = JsonText::object();
    for (int64_t id = 0; id < V; ++id) {
        constexpr char kHex[] = "0123456789ABCDEF";
        const int64_t byte = 0xC2 + id / 2;
        vocab.set(id % 2 == 0 ? concat("_", id) : concat("<0x", kHex[byte / 16], kHex[byte % 16], ">"), id);
    }
    const JsonText file = {{"decoder", parsed_json(R"({"type": "Sequence", "decoders": [{"type": "Replace",
                                "pattern": {"String": "_"}, "content": " "}, {"type": "ByteFallback"},
                                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})")},
                           {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", JsonText::array()}}}};
    return parse_tokenizer(file.str(), "t");
}

}  // namespace

TEST_CASE("the text of an answer goes on from the prompt, and ends before the first stop string",
          "[inference][engine]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, config.T_max);
    EngineOptions options;
    options.scheduler.max_sequences = 4;
    EngineWithMemory e(m.model, options);
    const auto tokenizer = words_and_bytes(config.V);
    Requests requests(e.engine, *tokenizer);
    std::vector<AnswerPiece> answers;  // of the last request, each in one piece
    const auto ready = [&](const AnswerPiece& piece) {
        answers.resize(std::max<size_t>(answers.size(), piece.sample + 1));
        AnswerPiece& its = answers[piece.sample];
        its.text += piece.text, its.finish_reason = piece.finish_reason;
        its.tokens.insert(its.tokens.end(), piece.tokens.begin(), piece.tokens.end());
    };
    const auto run = [&](TextRequest request) {
        answers.clear();
        request.ready = ready;
        requests.add(request);
        while (requests.step()) {
        }
        CHECK(requests.unfinished().empty());
        for (const AnswerPiece& answer : answers) {
            if (!request.stop.empty()) continue;
            std::vector<int32_t> all = request.prompt;
            for (const Sampled& token : answer.tokens) all.push_back(token.token);
            CHECK(tokenizer->decode(request.prompt) + answer.text == tokenizer->decode(all));
        }
        return answers;
    };
    TextRequest request, scored, beams, greedy;
    request.prompt = scored.prompt = beams.prompt = greedy.prompt = {1, 2, 3, 4};
    request.max_tokens = 6, request.n = 3;
    CHECK(run(request).size() == 3);
    request.n = 1, request.sampling.logit_bias = {{5, 100}};  // an answer that ends inside of a character
    CHECK(run(request)[0].tokens.back().token == 5);
    // Tokens 2 and 4 by turns.
    request.sampling.temperature = 0;
    request.sampling.logit_bias = {{2, 100}, {4, 90}}, request.sampling.frequency_penalty = 20;
    CHECK(run(request)[0].text == " 2 4 2 4 2 4");
    request.stop = {" 2 4", "4"};
    CHECK(run(request)[0].text == "");
    // As much is held back as the longest beginning of any of them, also where a shorter one is there, too.
    request.stop = {"4 4", " 2 4 2 4 2"};
    CHECK(run(request)[0].text == "");
    request.stop = {"2 4 2 ", "4 2"};
    CHECK(run(request)[0].text == " 2 ");
    CHECK(answers[0].finish_reason == std::string("stop"));
    // The prompt alone.
    scored.max_tokens = 0, scored.scores_prompt = true;
    scored.sampling.logprobs = 0;
    CHECK(run(scored)[0].finish_reason == std::string("length"));
    scored.prompt[1] = 0;  // a token like the others
    CHECK(run(scored)[0].finish_reason == std::string("length"));
    // Beams, with an end that is the most probable token.
    beams.max_tokens = 5, beams.n = 2, beams.beams = BeamOptions{.n_beams = 3};
    beams.sampling.temperature = 0;
    e.engine.start_reports(false);
    CHECK(run(beams).size() == 2);
    CacheReport expected(e.engine.options().cache, e.engine.options().scheduler.max_length);
    for (int64_t i = 0; i < beams.beams->n_beams; ++i) expected.finished(4, 5);
    CHECK(e.engine.cache_report().contiguous().tokens == expected.contiguous().tokens);
    greedy.max_tokens = 1;
    greedy.sampling.temperature = 0;
    const int32_t likely = run(greedy)[0].tokens.at(0).token;
    beams.stop_tokens = {likely}, beams.beams->length_penalty = -2;  // short answers
    const auto ended = run(beams);
    CHECK(ended[0].finish_reason == std::string("stop"));
    for (const Sampled& token : ended[0].tokens) CHECK(token.token != likely);

    const auto refused = [&](auto&& change) {
        TextRequest other = request;
        change(other);
        return error_of([&] { requests.add(other); });
    };
    CHECK(one_line_with(refused([](TextRequest& r) { r.prompt = {-1}; }), "token -1"));
    CHECK(one_line_with(refused([&](TextRequest& r) { r.prompt = {static_cast<int32_t>(config.V)}; }),
                        concat("token ", config.V, ", but the model knows 0 to ", config.V - 1)));
    CHECK(one_line_with(refused([&](TextRequest& r) { r.prompt.resize(static_cast<size_t>(config.T_max), 1); }),
                        concat("the prompt has ", config.T_max, " tokens, and prompt and answer together")));
    CHECK(one_line_with(refused([](TextRequest& r) { r.stop = {""}; }), "a stop string is empty"));
    CHECK(one_line_with(refused([](TextRequest& r) { r.scores_prompt = true; }), "logprobs must be 0 or more"));
    const auto refused_beams = [&](const std::function<void(TextRequest&)>& unsupported) {
        return refused([&](TextRequest& r) {
            r.beams = BeamOptions{.n_beams = 4}, r.stop = {}, r.sampling.logit_bias = {};
            unsupported(r);
        });
    };
    CHECK(
        one_line_with(refused_beams([](TextRequest& r) { r.n = 5; }), "as many answers as it has beams, 4, and not 5"));
    for (const std::function<void(TextRequest&)> unsupported : {+[](TextRequest& r) { r.stop = {"a"}; },
                                                                +[](TextRequest& r) {
                                                                    r.sampling.logit_bias = {{5, 1}};
                                                                },
                                                                +[](TextRequest& r) { r.sampling.logprobs = 0; }})
        CHECK(one_line_with(refused_beams(unsupported), "beam search supports no stop strings"));
    const int64_t id = requests.add(request);
    CHECK(requests.unfinished().size() == 1);
    requests.cancel(id);
    CHECK(requests.unfinished().empty());
}

TEST_CASE("the loss of a text is the mean over its windows, of which the last may be shorter", "[inference][engine]") {
    EngineOptions options;
    options.cache.n_pages = 4, options.scheduler.max_sequences = 1;
    LoadedModel m("test/golden/gpt2", "", DType::f32, WeightFormat::none, options);
    m.load();
    const std::vector<int32_t> tokens = random_tokens(20, m.config.V, 3);
    const Perplexity all = evaluate_text(m, tokens, 8);
    CHECK(all.tokens == 19);
    double sum = 0;
    for (const auto& [first, n] : {std::pair<size_t, size_t>{0, 9}, {8, 9}, {16, 4}}) {
        const Perplexity one = evaluate_text(m, std::span(tokens).subspan(first, n), 100);
        CHECK(one.tokens == static_cast<int64_t>(n) - 1);
        sum += one.loss * static_cast<double>(one.tokens);
    }
    CHECK(std::abs(all.loss - sum / 19) < 1e-12);
}

TEST_CASE("a sample of a training run may be longer than its sequences", "[inference][engine]") {
    const Config config = small_llama();
    const ModelWithMemory m(config, 16);
    TrainOptions options;
    options.seq = 16;
    EngineWithMemory e(m.model, sample_engine(options, config));
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
    options.seq = 2 * config.T_max;
    CHECK(sample_engine(options, config).scheduler.max_length == config.T_max);
}

TEST_CASE("beam search finds the answers of transformers' beam search", "[inference][engine][counted]") {
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
            e.finish();
            INFO(name << ", " << e.engine.scheduler().n_preemptions() << " preemptions");
            // A request that lies in memory where one lay that has ended has a search of its own.
            found[0].clear(), requests[0].sequences.clear();
            e.engine.add(requests[0]);
            e.finish();
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
