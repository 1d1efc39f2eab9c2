// test/test_context_parallel.cu: sequences that are divided among ranks, by operation and in whole runs.
#include "attention.h"
#include "parallel/context/context.h"
#include "ranks.h"
#include "run_models.h"
#include "train_runs.h"

#include <mutex>
#include <set>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Attention of a whole sequence, whose tokens ranks have parts of

// Of rows (B, T, columns) those of some tokens; and back.
std::vector<double> rows_of(const std::vector<double>& whole, int64_t B, int64_t T,
                            const std::vector<int64_t>& tokens) {
    const int64_t columns = std::ssize(whole) / (B * T);
    std::vector<double> rows;
    for (int64_t b = 0; b < B; ++b)
        for (const int64_t token : tokens) {
            const auto first = whole.begin() + (b * T + token) * columns;
            rows.insert(rows.end(), first, first + columns);
        }
    return rows;
}
void put_rows(std::vector<double>& whole, const std::vector<double>& rows, int64_t B, int64_t T,
              const std::vector<int64_t>& tokens) {
    const int64_t columns = std::ssize(whole) / (B * T), n = std::ssize(tokens);
    for (int64_t b = 0; b < B; ++b)
        for (int64_t i = 0; i < n; ++i)
            std::copy_n(rows.begin() + (b * n + i) * columns, columns,
                        whole.begin() + (b * T + tokens[static_cast<size_t>(i)]) * columns);
}

struct Ranks {
    int n;
    ContextMode mode;
    FlashTier tier = FlashTier::automatic;
    int times = 1;  // forward and backward again, with the same buffers
};

// Forward and backward, each rank with its tokens. Result::lse stays empty: what it is differs with the mode.
Result run_ranks_on(const Case& c, DType dtype, const Values& in, const Ranks& ranks) {
    Result all;
    all.out.resize(in.dout.size()), all.dq.resize(in.q.size()), all.dk.resize(in.k.size()), all.dv.resize(in.v.size());
    std::mutex mutex;
    const std::vector<int32_t> documents = documents_of(c);
    run_ranks(threads(ranks.n), [&](Comm& world) {
        const cudaStream_t stream = device().stream;
        const ZigZag zigzag = make_zigzag(c.T, world.size);
        const std::vector<int64_t> tokens = zigzag.tokens(world.rank);
        Case here = c;
        here.T = zigzag.rows(), here.lengths.clear();
        const auto own = [&](const std::vector<double>& whole) { return rows_of(whole, c.B, c.T, tokens); };
        QkvRows qkv(here, dtype), dqkv(here, dtype);
        qkv.set({own(in.q), own(in.k), own(in.v), {}});
        Buffer out(dtype, {c.B, here.T, c.H * c.Dv}), dout(dtype, {c.B, here.T, c.H * c.Dv}, own(in.dout)),
            lse(DType::f32, {c.B, c.H, here.T}), of_all(DType::i32, {c.B, c.T, 2});
        FlashAttentionOptions options{
            .scale = static_cast<float>(c.scale()), .causal = c.causal, .window = c.window, .tier = ranks.tier};
        if (!documents.empty()) of_all.set_integers(documents), options.documents = of_all;

        Arena arena("context");
        const auto attention = make_context_parallel(ranks.mode, world, zigzag);
        const ContextParallel::Sizes sizes{c.B, c.H, c.K, c.D, c.Dv, dtype};
        attention->take_memory(sizes, arena);
        arena.reserve();
        attention->take_memory(sizes, arena);
        Buffer scratch(DType::f32, {attention->backward_scratch_n(sizes, ranks.tier)});
        const HeadColumns out_heads{out, c.H, c.Dv}, dout_heads{dout, c.H, c.Dv};
        for (int time = 0; time < ranks.times; ++time) {
            const Traffic before = world.traffic();
            attention->forward(out_heads, lse, qkv.heads.q, qkv.heads.k, qkv.heads.v, options, stream);
            const Traffic between = world.traffic();
            attention->backward(dqkv.heads.q, dqkv.heads.k, dqkv.heads.v, dout_heads, out_heads, lse, qkv.heads.q,
                                qkv.heads.k, qkv.heads.v, options, scratch, stream);
            const Traffic after = world.traffic();
            check(between.sent - before.sent == attention->forward_bytes(sizes), "forward sent ",
                  between.sent - before.sent, " bytes, the formula says ", attention->forward_bytes(sizes));
            check(after.sent - between.sent == attention->backward_bytes(sizes), "backward sent ",
                  after.sent - between.sent, " bytes, the formula says ", attention->backward_bytes(sizes));
        }
        cudaCheck(cudaStreamSynchronize(stream));
        const std::lock_guard lock(mutex);
        put_rows(all.out, out.values(), c.B, c.T, tokens);
        put_rows(all.dq, dqkv.q(), c.B, c.T, tokens);
        put_rows(all.dk, dqkv.k(), c.B, c.T, tokens);
        put_rows(all.dv, dqkv.v(), c.B, c.T, tokens);
    });
    return all;
}

std::string name_of(const Case& c, DType dtype, const Ranks& ranks) {
    return concat(ranks.n, " ranks, ", context_mode_name(ranks.mode), ", ", dtype_name(dtype), ", tier ",
                  static_cast<int>(ranks.tier), ", ", c.name());
}

// The tolerances of one rank's flash attention (attention.h), and in 16 bits a rounding of each rank's part more, which
// may be twice as large as the sum of the parts. Ulysses is one rank's computation, with fewer heads.
void check_context(const Case& c, DType dtype, const Ranks& ranks, uint64_t seed) {
    const Values in = random_inputs(c, dtype, seed);
    const Result exact = attention<double>(c, in, dtype), plain = plain_errors(c, dtype, in, exact, seed);
    const Result got = run_ranks_on(c, dtype, in, ranks);
    const double dS_size = longest(in.dout, c.Dv) * longest(in.v, c.Dv) * c.scale();
    const auto check_result = [&](std::vector<double> Result::*member, double size_on_the_way, const char* name) {
        const double roundings = (2 + 2 * ranks.n) * unit_roundoff(dtype) * largest(exact.*member);
        check_close(got.*member, exact.*member, 0, 2 * (plain.*member)[0] + roundings + 8 * kUnit * size_on_the_way,
                    name_of(c, dtype, ranks) + ", " + name);
    };
    check_result(&Result::out, largest(in.v), "out");
    check_result(&Result::dq, dS_size * largest(in.k), "dq");
    check_result(&Result::dk, dS_size * largest(in.q), "dk");
    check_result(&Result::dv, largest(in.dout), "dv");
}

// Chunks of 1 to 35 tokens, which divide no tile; windows shorter and longer than a chunk; documents that end inside of
// chunks, and one that is all of the row but two tokens; MHA, GQA, MQA; heads as MLA has them; odd head sizes.
std::vector<Case> cases_for(int n) {
    const int64_t c = 2 * n;
    return {{1, 1 * c, 2, 1, 8, 8, true, 0, {}, 0},
            {2, 5 * c, 4, 4, 12, 12, true, 0, {}, 0},
            {1, 35 * c, 12, 4, 16, 16, true, 0, {}, 1},
            {2, 7 * c, 12, 12, 12, 6, true, 0, {}, 2},
            {1, 9 * c, 12, 4, 8, 8, true, 4, {}, 0},
            {1, 33 * c, 4, 1, 32, 32, true, 50, {}, 0},
            {2, 11 * c, 12, 4, 8, 8, true, 0, {3, 11 * c - 16, 13}, 0},
            {1, 17 * c, 4, 2, 9, 11, true, 21, {1, 17 * c - 2, 1}, 1},
            {1, 6 * c, 12, 12, 24, 16, false, 0, {}, 2},
            {2, 5 * c, 4, 2, 8, 8, false, 6, {5 * c - 7, 7}, 0}};
}

bool can_divide_heads(const Case& c, int n) { return c.H % n == 0 && (c.K % n == 0 || n % c.K == 0); }

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The parts

TEST_CASE("zigzag: each token is some rank's, rows are in order, and causal work is balanced", "[context_parallel]") {
    for (const int n : {1, 2, 3, 4, 5, 8, 64}) {
        for (const int64_t c : {1, 2, 7, 250}) {
            const ZigZag zigzag = make_zigzag(2 * n * c, n);
            std::set<int64_t> all;
            std::vector<int64_t> pairs(static_cast<size_t>(n));  // of each rank
            for (int r = 0; r < n; ++r) {
                const std::vector<int64_t> tokens = zigzag.tokens(r);
                CHECK(std::ssize(tokens) == zigzag.rows());
                CHECK(std::is_sorted(tokens.begin(), tokens.end()));
                all.insert(tokens.begin(), tokens.end());
                std::set<int> seen;
                for (int step = 0; step < n; ++step) {
                    const int keys_of = zigzag.keys_in_step(r, step);
                    seen.insert(keys_of);
                    const int64_t its = zigzag.causal_pairs(r, keys_of);
                    if (n <= 8) {  // counted one by one
                        int64_t counted = 0;
                        for (const int64_t query : tokens)
                            for (const int64_t key : zigzag.tokens(keys_of)) counted += key <= query;
                        CHECK(its == counted);
                    }
                    CHECK(its == zigzag.causal_pairs(0, zigzag.keys_in_step(0, step)));  // balanced in every step
                    pairs[static_cast<size_t>(r)] += its;
                }
                CHECK(std::ssize(seen) == n);
            }
            CHECK(std::ssize(all) == zigzag.T);
            CHECK(*all.rbegin() == zigzag.T - 1);
            // The largest share of the causal work is 1 / n: all are equal, to the pair.
            for (const int64_t its : pairs) CHECK(n * its == zigzag.T * (zigzag.T + 1) / 2);
        }
    }
    CHECK_THROWS_WITH(make_zigzag(100, 3), ContainsSubstring("--seq 100 cannot be cut into the 6 equal chunks of "
                                                             "--cp 3 (two a rank): use --seq 96 or 102"));
    CHECK_THROWS_WITH(make_zigzag(5, 4), ContainsSubstring("use --seq 8"));
    CHECK(make_zigzag(5, 1).T == 5);  // one rank has all of them
}

TEST_CASE("heads are copied, added, spread and collected between rows of any two types",
          "[context_parallel][counted]") {
    const int64_t B = 2, T = 7, whole_T = 20, count = 3;
    const TokenChunks chunks{3, {2, 11}};
    const cudaStream_t stream = device().stream;
    for (const int64_t D : {1, 5, 8, 40})
        for (const DType to_dtype : kFloatDTypes)
            for (const DType from_dtype : kFloatDTypes) {
                INFO("D " << D << ", " << dtype_name(to_dtype) << " <- " << dtype_name(from_dtype));
                const int64_t wide = count * (D + 3) + 2, narrow = count * D;
                const std::vector<double> x = rounded(random_values(B * T * narrow, 1), from_dtype),
                                          y = rounded(random_values(B * T * wide, 2), to_dtype),
                                          z = rounded(random_values(B * whole_T * wide, 3), to_dtype);
                Buffer from(from_dtype, {B, T, narrow}, x), to(to_dtype, {B, T, wide}),
                    whole(to_dtype, {B, whole_T, wide});
                const HeadColumns from_heads{from, count, D}, to_heads{to, count, D, 2, D + 3},
                    whole_heads{whole, count, D, 2, D + 3};
                const auto token = [&](int64_t t) { return t < 3 ? 2 + t : 11 + t - 3; };
                // Calls f(place among x, head's place in the row) for each number of token t of row b.
                const auto each = [&](auto&& f) {
                    for (int64_t b = 0; b < B; ++b)
                        for (int64_t t = 0; t < T; ++t)
                            for (int64_t h = 0; h < count; ++h)
                                for (int64_t d = 0; d < D; ++d)
                                    f(b, t, static_cast<size_t>((b * T + t) * narrow + h * D + d), 2 + h * (D + 3) + d);
                };
                std::vector<double> copied = y, added = y, spread = z;
                each([&](int64_t b, int64_t t, size_t i, int64_t column) {
                    const size_t at = static_cast<size_t>((b * T + t) * wide + column);
                    copied[at] = x[i], added[at] += x[i];
                    spread[static_cast<size_t>((b * whole_T + token(t)) * wide + column)] = x[i];
                });
                to.set(y);
                copy_heads(to_heads, from_heads, stream);
                CHECK(to.values() == rounded(copied, to_dtype));
                to.set(y);
                add_heads(to_heads, from_heads, stream);
                check_close(to.values(), added, 2 * unit_roundoff(to_dtype), 1e-7, "add_heads");
                whole.set(z);
                spread_heads(whole_heads, from_heads, chunks, stream);
                CHECK(whole.values() == rounded(spread, to_dtype));
                Buffer again(from_dtype, {B, T, narrow});
                collect_heads({again, count, D}, whole_heads, chunks, stream);
                CHECK(again.values() == rounded(rounded(x, to_dtype), from_dtype));
            }
    Buffer a(DType::f32, {1, 4, 4}), b(DType::f32, {1, 8, 4}), two(DType::f32, {2, 4, 4});
    CHECK_THROWS_WITH(copy_heads({a, 1, 4}, {two, 1, 4}, stream), ContainsSubstring("copy_heads: from"));
    CHECK_THROWS_WITH(spread_heads({b, 1, 4}, {a, 1, 4}, {2, {0, 7}}, stream), ContainsSubstring("are not two chunks"));
    CHECK_THROWS_WITH(copy_heads({a, 1, 4}, {a, 1, 3}, stream), ContainsSubstring("expected 1 of 4"));
}

TEST_CASE("two parts of attention are merged by their lse, against float64", "[context_parallel][counted]") {
    const int64_t B = 2, T = 19, H = 3, D = 10, n = B * H * T;
    for (const DType dtype : kFloatDTypes) {
        const std::vector<double> x = rounded(random_values(B * T * H * D, 1), dtype),
                                  y = rounded(random_values(B * T * H * D, 2), dtype);
        // Logarithms far apart and close together, and parts without a key.
        std::vector<double> l = rounded(random_values(n, 3, 30), DType::f32),
                            m = rounded(random_values(n, 4, 30), DType::f32);
        for (int64_t i = 0; i < n; ++i) {
            if (i % 5 == 0) m[static_cast<size_t>(i)] = l[static_cast<size_t>(i)] + 0.25;
            if (i % 7 == 0) m[static_cast<size_t>(i)] = -INFINITY;
            if (i % 11 == 0) l[static_cast<size_t>(i)] = -INFINITY;
        }
        Buffer out(DType::f32, {B, T, H * D}, x), lse(DType::f32, {B, H, T}, l), part(dtype, {B, T, H * D}, y),
            part_lse(DType::f32, {B, H, T}, m);
        merge_attention({out, H, D}, lse, {part, H, D}, part_lse, device().stream);
        std::vector<double> expected(x.size()), expected_lse(l.size());
        for (int64_t b = 0; b < B; ++b)
            for (int64_t h = 0; h < H; ++h)
                for (int64_t t = 0; t < T; ++t) {
                    const size_t row = static_cast<size_t>((b * H + h) * T + t);
                    const double larger = std::max(l[row], m[row]);
                    const bool any = larger > -INFINITY;
                    const double a = any ? std::exp(l[row] - larger) : 0, c = any ? std::exp(m[row] - larger) : 0;
                    expected_lse[row] = any ? larger + std::log(a + c) : -INFINITY;
                    for (int64_t d = 0; d < D; ++d) {
                        const size_t i = static_cast<size_t>(((b * T + t) * H + h) * D + d);
                        expected[i] = any ? (a * x[i] + c * y[i]) / (a + c) : 0;
                    }
                }
        // Exponents of up to 150, each rounded: 150 x 2^-24 relative in the weights.
        check_close(out.values(), expected, 0, 150 * 0x1p-24 * 4, "out");
        const std::vector<double> got = lse.values();
        for (size_t i = 0; i < got.size(); ++i) {
            if (expected_lse[i] == -INFINITY) CHECK(got[i] == -INFINITY);
            else CHECK(got[i] == Approx(expected_lse[i]).epsilon(1e-6).margin(1e-6));
        }
    }
}

TEST_CASE("ring and ulysses attention against float64 loops over whole sequences", "[context_parallel][flash]") {
    uint64_t seed = 10;
    for (const int n : {2, 3, 4})
        for (const Case& c : cases_for(n))
            for (const ContextMode mode : {ContextMode::ring, ContextMode::ulysses}) {
                if (mode == ContextMode::ulysses && !can_divide_heads(c, n)) continue;
                check_context(c, DType::f32, {n, mode}, seed += 10);
            }
}

static bool can_use_hopper(const Case& c) { return has_wgmma() && c.D % 8 == 0 && c.Dv % 8 == 0; }

TEST_CASE("ring and ulysses attention in 16 bits, on each tier", "[context_parallel][flash][hopper]") {
    uint64_t seed = 5000;
    size_t i = 0;
    for (const int n : {2, 3, 4})
        for (const Case& c : cases_for(n)) {
            const DType dtype = i % 2 ? DType::bf16 : DType::f16;
            const ContextMode mode = i++ % 3 == 0 && can_divide_heads(c, n) ? ContextMode::ulysses : ContextMode::ring;
            std::vector<FlashTier> tiers = {FlashTier::automatic};
            if ((n == 3 && c.T < 100) || is_full()) {  // tensor cores are emulated on the CPU device
                tiers.push_back(FlashTier::mma);
                if (mode == ContextMode::ulysses && can_use_hopper(c)) tiers.push_back(FlashTier::hopper);
            }
            for (const FlashTier tier : tiers) check_context(c, dtype, {n, mode, tier}, seed += 10);
        }
}

// 65536 tokens of 16 heads, on 16 ranks: with ulysses a rank has one head of all tokens.
TEST_CASE("attention's backward has the scratch that ranks need for their share", "[context_parallel][hopper]") {
    run_ranks(threads(16), [](Comm& world) {
        const ContextParallel::Sizes s{1, 16, 16, 64, 64, DType::bf16};
        for (const ContextMode mode : {ContextMode::ring, ContextMode::ulysses}) {
            const auto attention = make_context_parallel(mode, world, make_zigzag(65536, world.size));
            const int64_t n = attention->backward_scratch_n(s, FlashTier::hopper);
            if (world.rank > 0) continue;
            const Buffer scratch(DType::f32, {n});
            const auto [T, heads] = mode == ContextMode::ring ? std::pair(4096, 16) : std::pair(65536, 1);
            // An error where it is too small.
            flash_delta_in(scratch, s.B, T, heads, heads, s.D, s.Dv, s.dtype, FlashTier::hopper);
        }
    });
}

TEST_CASE("ring attention on Hopper's tensor cores", "[context_parallel][flash][hopper]") {
    if (std::getenv("CUDA_CPU_STRICT") != nullptr)
        SKIP_TEST("strict mode takes all that a kernel has a tensor map of as written, also keys that are being sent");
    uint64_t seed = 9000;
    for (const Case& c : cases_for(3))
        if (can_use_hopper(c) && (c.T < 100 || is_full()))
            check_context(c, DType::bf16, {3, ContextMode::ring, FlashTier::hopper}, seed += 10);
}

TEST_CASE("the gradients of ring and ulysses attention are those of finite differences", "[context_parallel][flash]") {
    const Case c{1, 12, 4, 2, 3, 2, true, 7, {5, 7}, 0};
    const Values in = random_inputs(c, DType::f32, 77);
    for (const ContextMode mode : {ContextMode::ring, ContextMode::ulysses}) {
        // float32: some tens of roundings of numbers up to 10
        check_differences(c, in, run_ranks_on(c, DType::f32, in, {2, mode}), 2e-5);
    }
}

TEST_CASE("ring and ulysses attention repeat to the bit", "[context_parallel][flash]") {
    const Case c{2, 42, 6, 3, 16, 16, true, 30, {20, 22}, 0};
    const Values in = random_inputs(c, DType::bf16, 7);
    for (const ContextMode mode : {ContextMode::ring, ContextMode::ulysses}) {
        const Result once = run_ranks_on(c, DType::bf16, in, {3, mode}),
                     again = run_ranks_on(c, DType::bf16, in, {3, mode, FlashTier::automatic, 3});
        CHECK((once.out == again.out && once.dq == again.dq && once.dk == again.dk && once.dv == again.dv));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Whole runs

namespace {

// Models whose heads 2, 3 and 4 ranks can divide: GPT-2's learned positions; grouped queries; a sliding window shorter
// than a chunk; norms of heads; latents.
const std::vector<std::string> kModels = {"gpt2", "llama", "mistral", "qwen3", "deepseek", "mfa"};
std::string config_of(const std::string& name) {
    if (name == "gpt2")
        return R"({"model_type":"gpt2","vocab_size":257,"n_positions":64,"n_embd":48,"n_inner":96,"n_layer":2,
            "n_head":12,"activation_function":"gelu_new","layer_norm_epsilon":1e-5})";
    const std::string sizes = R"("vocab_size":257,"hidden_size":48,"intermediate_size":48,"num_hidden_layers":2,
        "max_position_embeddings":64,"rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu",)";
    const auto llama = [&](const std::string& type, int K) {
        return "{\"model_type\":\"" + type + "," + sizes +
               concat("\"num_attention_heads\":12,\"num_key_value_heads\":", K, ",\"head_dim\":8}");
    };
    if (name == "llama") return llama("llama\"", 12);
    if (name == "mistral") return llama("mistral\",\"sliding_window\":4", 12);
    if (name == "qwen3") return llama("qwen3\",\"attention_bias\":false", 6);
    if (name == "mfa") return llama("mfa\",\"share_q_dim\":20", 1);
    return llama(R"(deepseek_v3","q_lora_rank":24,"kv_lora_rank":16,"qk_nope_head_dim":8,"qk_rope_head_dim":4,
        "v_head_dim":6,"first_k_dense_replace":2)",
                 12);
}

struct Runs {
    TempFolder folder;
    int number = 0;
    std::string model(const std::string& name) {
        const std::string path = folder / (name + ".json");
        if (!std::filesystem::exists(path)) spit(path, config_of(name));
        return path;
    }
    std::string new_run() { return folder / std::to_string(number++); }
    // A folder with a file for each of many documents.
    std::string documents() {
        const std::string path = folder / "documents";
        if (std::filesystem::exists(path)) return path;
        std::filesystem::create_directory(path);
        for (int i = 0; i < 60; ++i)
            spit(path + "/" + std::to_string(100 + i), made_text(4 + i % 5).substr(0, static_cast<size_t>(11 + 7 * i)));
        return path;
    }
    Outcome outcome(const std::string& model_name, const std::string& flags, const std::string& run,
                    const std::string& before = "") {
        const bool masks = flags.find("--mask-documents") != std::string::npos;
        const std::string flags_of_all =
            " --batch 4 --seq 24 --steps 20 --warmup 2 --val-every 10 --val-sequences 8 "
            "--sample 0 --optimizer momentum ";
        return run_on_ranks("--data " + (masks ? documents() : text_file()) + " --model " + model(model_name) +
                                flags_of_all + flags + " --out " + run,
                            before);
    }
    std::string run(const std::string& model_name, const std::string& flags, const std::string& before = "") {
        const std::string path = new_run();
        const Outcome its = outcome(model_name, flags, path, before);
        INFO(model_name << " " << flags << "\n" << its.err);
        REQUIRE(its.status == 0);
        if (flags.find("--cp") != std::string::npos && before.empty()) check_account(its.out, flags);
        return path;
    }
};

void check_same(const std::string& a, const std::string& b, double tolerance = 1e-5) {
    check_same_run(a, b, tolerance, 1);
}

const std::string kUlysses = "--cp-mode ulysses ";

}  // namespace

TEST_CASE("every attention is in a model whose sequences ranks divide", "[context_parallel]") {
    Runs runs;
    std::vector<std::string> files;
    for (const std::string& name : kModels) files.push_back(runs.model(name));
    CHECK(attentions_without_model(files) == std::set<std::string>{});
}

TEST_CASE("20 steps on 2, 3 and 4 ranks of --cp are those of one", "[program][ranks][context_parallel]") {
    // Each model in both modes; each number of ranks; and what else divides the work, once at least.
    const std::map<std::string, std::vector<std::string>> quick = {
        {"gpt2",
         {"--ranks 3 --cp 3 ", "--ranks 8 --cp 2 --tp 4 --tp-mode 2d ", "--ranks 4 --cp 2 --zero 1 " + kUlysses}},
        {"llama", {"--ranks 4 --cp 2 --zero 3 --micro-batch 1 ", "--ranks 4 --cp 4 --recompute full " + kUlysses}},
        {"mistral", {"--ranks 4 --cp 4 ", "--ranks 2 --cp 2 " + kUlysses}},
        {"qwen3", {"--ranks 4 --cp 2 --tp 2 --zero 2 --recompute selective ", "--ranks 3 --cp 3 " + kUlysses}},
        {"deepseek", {"--ranks 3 --cp 3 --recompute full ", "--ranks 4 --cp 2 --tp 2 --sp " + kUlysses}},
        {"mfa", {"--ranks 2 --cp 2 --micro-batch 2 ", "--ranks 4 --cp 4 " + kUlysses}}};
    std::vector<std::string> all;
    for (const std::string mode : {"", kUlysses.c_str()}) {
        for (const int cp : {2, 3, 4}) all.push_back(concat("--ranks ", cp, " --cp ", cp, " ", mode));
        for (const int zero : {0, 1, 2, 3})
            all.push_back(concat("--ranks 4 --cp 2 --zero ", zero, " --micro-batch 1 ", mode));
        for (const char* other :
             {"--tp 2 ", "--tp 2 --sp --zero 1 ", "--recompute 1 ", "--recompute selective ", "--dp-mode naive "})
            all.push_back(concat("--ranks 4 --cp 2 ", other, mode));
    }
    Runs runs;
    for (const std::string& model : kModels) {
        const std::string one = runs.run(model, "");
        for (const std::string& mesh : is_full() ? all : quick.at(model)) {
            const bool heads_fit = mesh.find("--cp 4") == std::string::npos && mesh.find("--tp 2") == std::string::npos;
            if (model == "qwen3" && !heads_fit && mesh.find(kUlysses) != std::string::npos) continue;  // 6 key heads
            INFO(model << " " << mesh);
            check_same(runs.run(model, mesh), one);
        }
    }
}

TEST_CASE("documents are masked across the ranks of --cp", "[program][ranks][context_parallel]") {
    Runs runs;
    const std::string flags = "--mask-documents ";
    for (const std::string model : {"gpt2", "llama"}) {
        const std::string one = runs.run(model, flags), unmasked = runs.run(model, "--data " + runs.documents() + " ");
        CHECK(log_without_times(one) != log_without_times(unmasked));
        check_same(runs.run(model, flags + "--ranks 3 --cp 3 "), one);
        check_same(runs.run(model, flags + "--ranks 4 --cp 2 --micro-batch 1 " + kUlysses), one);
    }
}

TEST_CASE("--cp in 16 and 8 bits", "[program][ranks][context_parallel]") {
    // Ranks round parts of attention, and with fp8 scale by the largest values of their own tokens: a rounding is 2^-9,
    // 2^-12 and 2^-4. The learning rate is small, so that the runs do not drift apart.
    Runs runs;
    for (const std::string dtype : {"bf16", "fp16", "fp8"}) {
        const std::string flags = "--dtype " + dtype + " --seq 64 --lr 1e-3 --steps 5 ";
        if (!can_train(flags)) continue;
        const std::string one = runs.run("llama", flags);
        const double tolerance = dtype == "fp16" ? 1e-3 : dtype == "bf16" ? 4e-3 : 2e-2;
        check_same(runs.run("llama", flags + "--ranks 4 --cp 4 "), one, tolerance);
        check_same(runs.run("llama", flags + "--ranks 4 --cp 2 --zero 3 " + kUlysses), one, tolerance);
    }
}

TEST_CASE("optimizers of whole matrices, offloading and compression with --cp", "[program][ranks][context_parallel]") {
    Runs runs;
    const std::string adamw = "--optimizer adamw --eps 1e-4 --steps 8 ";
    struct {
        std::string flags, ranks;
        double tolerance;
    } const cases[] = {{adamw, "--zero 3 --offload params ", 1e-5},
                       {adamw, "--offload unified ", 1e-5},
                       // Muon makes all singular values of a step 1, also those that are rounding alone.
                       {"--optimizer muon --steps 8 ", "--zero 1 ", 1e-4},
                       {"--optimizer adafactor --steps 8 ", "--zero 1 ", 1e-5},
                       // Gradients are rounded to 2^-9.
                       {"--steps 8 ", "--compress bf16 ", 4e-3}};
    for (const auto& [flags, ranks, tolerance] : cases) {
        INFO(flags << ranks);
        check_same(runs.run("llama", flags + ranks + "--ranks 4 --cp 2 "), runs.run("llama", flags), tolerance);
    }
}

TEST_CASE("a run with --cp repeats bit for bit, also under strict mode", "[program][ranks][context_parallel]") {
    Runs runs;
    for (const std::string& mode : {std::string(), kUlysses}) {
        const std::string flags =
            "--ranks 3 --cp 3 --steps 2 --batch 2 --zero 2 --micro-batch 1 --val-sequences 2 " + mode;
        const std::string once = runs.run("qwen3", flags), again = runs.run("qwen3", flags);
        check_same_end(once, again);
        if (!device().is_cpu) continue;
        for (const int seed : {1, 2, 3}) {
            if (!is_full() && !mode.empty() && seed != 2) continue;  // Ulysses has one stream
            INFO("seed " << seed);
            check_same_end(runs.run("qwen3", flags, concat("CUDA_CPU_STRICT=", seed, " ")), once);
        }
    }
}

TEST_CASE("a checkpoint goes on with another --cp", "[program][ranks][context_parallel]") {
    Runs runs;
    const std::string adamw = "--optimizer adamw --eps 1e-4 ";
    const std::string whole = runs.run("llama", adamw);
    const std::array<std::string, 2> meshes[] = {{"--ranks 4 --cp 4 ", ""},
                                                 {"", "--ranks 3 --cp 3 " + kUlysses},
                                                 {"--ranks 4 --cp 2 --zero 3 " + kUlysses, "--ranks 4 --cp 2 --tp 2 "},
                                                 {"--ranks 4 --tp 2 --zero 1 ", "--ranks 2 --cp 2 --zero 2 "}};
    for (const auto& [before, after] : meshes) {
        INFO(before << "-> " << after);
        const std::string run = runs.run("llama", adamw + before + "--stop-after 9 ");
        must_succeed(runs.outcome("llama", adamw + after + "--resume ", run));
        check_same(run, whole);
    }
    const Outcome stopped = runs.outcome("llama", "--ranks 2 --cp 2 --cp-mode ulysses --stop-after 3 ", runs.new_run());
    if (!is_full())
        CHECK_THAT(stopped.out, ContainsSubstring("--resume" + kUntimed + " --ranks 2 --cp 2 --cp-mode ulysses\n"));
}

TEST_CASE("the sample of a run with --cp is that of one process", "[program][ranks][context_parallel]") {
    Runs runs;
    std::vector<std::string> samples;
    for (const std::string mesh : {"", "--ranks 3 --cp 3 ", "--ranks 4 --cp 2 --tp 2 --zero 3 --cp-mode ulysses "}) {
        const std::string its =
            must_succeed(runs.outcome("deepseek", mesh + "--sample 40 --steps 3 --val-every 0 ", runs.new_run()));
        const size_t first = its.find("---- sample after training"), last = its.find("\n----\n", first + 8);
        REQUIRE(last != std::string::npos);
        samples.push_back(its.substr(first, last - first));
    }
    CHECK(samples[0].size() > 60);
    CHECK(samples[1] == samples[0]);
    CHECK(samples[2] == samples[0]);
}

TEST_CASE("--cp refuses in one line what it cannot divide", "[program][ranks][context_parallel]") {
    Runs runs;
    const std::array<std::string, 3> wrong[] = {
        {"gpt2", "--cp 0", "--cp must be at least 1"},
        {"gpt2", "--cp 2", "--cp 2: one rank cannot be divided into groups of 2"},
        {"gpt2", "--ranks 6 --cp 2 --tp 2", "--tp 2 --cp 2: the 6 ranks cannot be divided into groups of 4"},
        {"gpt2", "--ranks 2 --cp 2 --seq 22",
         "--seq 22 cannot be cut into the 4 equal chunks of --cp 2 (two a rank): use --seq 20 or 24"},
        {"gpt2", "--ranks 4 --cp 2 --batch 3", "--batch 3 cannot be divided among 2 ranks"},
        {"llama", "--ranks 2 --cp 2 --dtype fp8 --seq 48", "--seq 48 is not a multiple of 32"},
        {"gpt2", "--ranks 2 --cp 2 --cp-mode tree", "--cp-mode tree: use ring or ulysses"},
        {"gpt2", "--cp-mode ulysses", "--cp-mode has no effect without --cp"},
        {"gpt2", "--ranks 5 --cp 5 --cp-mode ulysses --seq 20", "the 12 query heads of a rank cannot be divided"},
        {"qwen3", "--ranks 4 --cp 4 --cp-mode ulysses", "the 6 key/value heads of a rank cannot be given to the 4"},
        {"gpt2", "--ranks 2 --context-parallel-size 2", "did you mean --cp?"}};
    for (const auto& [model, flags, words] : wrong) {
        if (!can_train(flags)) continue;
        const Outcome outcome =
            run_program("train_gpt", "--data " + text_file() + " --seq 24 --sample 0 --model " + runs.model(model) +
                                         " " + flags + " --out " + (runs.folder / "wrong"));
        INFO(flags);
        CHECK_THAT(line_of(outcome), ContainsSubstring(words));
        CHECK(!std::filesystem::exists(runs.folder / "wrong"));
    }
}

TEST_CASE("a loss that is not finite is found in one sequence, whatever rank has its tokens",
          "[program][ranks][context_parallel]") {
    Runs runs;
    std::vector<std::string> texts;
    for (const std::string mesh : {"", "--ranks 4 --cp 2 "}) {
        const std::string line = line_of(runs.outcome("llama", mesh + "--lr 1e30 --clip 0 ", runs.new_run()));
        const size_t first = line.find("The loss is not finite for "), last = line.find(" (tokens ");
        INFO(line);
        REQUIRE((first != std::string::npos && last != std::string::npos));
        texts.push_back(line.substr(first, last - first));
    }
    CHECK(texts[0] == texts[1]);
}

TEST_CASE("--plan of 32k tokens: 8 ranks of --cp keep an eighth of the activations",
          "[program][ranks][context_parallel]") {
    const auto plan = [](const std::string& flags) {
        const std::string text = printed_by(
            "train_gpt", "--plan --model llama-8b --dtype bf16 --batch 1 --seq 32768 --device-spec h100 " + flags);
        return number_after(text, "\n  activations and scratch");
    };
    const double one = plan("");
    for (const std::string& mode : {std::string(), kUlysses})
        CHECK(plan("--ranks 8 --cp 8 " + mode) == Approx(one / 8).epsilon(0.01));
}
