// test/test_flash_attention.cu: flash attention against float64 loops over every pair of tokens.
#include "attention.h"

#include "layers/chunk.cuh"  // kOnCpu

namespace {

// The tier whose backward needs the most scratch.
FlashTier scratch_tier(DType dtype, const Case& c) {
    const bool hopper = dtype != DType::f32 && has_wgmma() && c.D % 8 == 0 && c.Dv % 8 == 0;
    return hopper ? FlashTier::hopper : FlashTier::automatic;
}

struct Flash {
    QkvRows qkv, dqkv;
    Buffer out, dout, lse, scratch;
    HeadColumns out_heads, dout_heads;
    std::unique_ptr<Buffer> documents;
    FlashAttentionOptions options;
    Flash(const Case& c, DType dtype, const Values& values)
        : qkv(c, dtype), dqkv(c, dtype), out(dtype, {c.B, c.T, c.H * c.Dv}),
          dout(dtype, {c.B, c.T, c.H * c.Dv}, values.dout), lse(DType::f32, {c.B, c.H, c.T}),
          scratch(DType::f32,
                  {flash_attention_backward_scratch_n(c.B, c.T, c.H, c.K, c.D, c.Dv, dtype, scratch_tier(dtype, c))}),
          out_heads{out, c.H, c.Dv}, dout_heads{dout, c.H, c.Dv} {
        qkv.set(values);
        options = {.scale = static_cast<float>(c.scale()), .causal = c.causal, .window = c.window};
        if (!c.lengths.empty()) {
            documents = std::make_unique<Buffer>(DType::i32, std::initializer_list<int64_t>{c.B, c.T, 2});
            documents->set_integers(documents_of(c));
            options.documents = *documents;
        }
    }
    void forward() {
        flash_attention_forward(out_heads, lse, qkv.heads.q, qkv.heads.k, qkv.heads.v, options, device().stream);
    }
    void backward() {
        flash_attention_backward(dqkv.heads.q, dqkv.heads.k, dqkv.heads.v, dout_heads, out_heads, lse, qkv.heads.q,
                                 qkv.heads.k, qkv.heads.v, options, scratch, device().stream);
    }
    Result run() {
        forward();
        backward();
        return {out.values(), lse.values(), dqkv.q(), dqkv.k(), dqkv.v()};
    }
};

// All tiers have the same inputs and the same reference. An error may be at most twice that of the plain computation in
// the same precision. On top come two roundings of the largest element, and 8 units of float32 of the size of the
// numbers that float32 sums on the way, which may cancel (with one key dP - delta is 0, a difference of two do . v).
void check_case(const Case& c, DType dtype, const std::vector<FlashTier>& tiers, uint64_t seed) {
    const Values in = random_inputs(c, dtype, seed);
    const Result exact = attention<double>(c, in, dtype), plain = plain_errors(c, dtype, in, exact, seed);
    const double dS_size = longest(in.dout, c.Dv) * longest(in.v, c.Dv) * c.scale();
    for (const FlashTier tier : tiers) {
        Flash flash(c, dtype, in);
        flash.options.tier = tier;
        const size_t n_between = flash.dqkv.n_untouched() - in.q.size() - in.k.size() - in.v.size();
        const Result got = flash.run();
        const auto check_result = [&](std::vector<double> Result::*member, DType stored, double size_on_the_way,
                                      const char* name) {
            const double two_roundings = 2 * unit_roundoff(stored) * largest(exact.*member);
            const double tolerance = 2 * (plain.*member)[0] + two_roundings + 8 * kUnit * size_on_the_way;
            check_close(got.*member, exact.*member, 0, tolerance,
                        concat(c.name(), ", ", dtype_name(dtype), ", tier ", static_cast<int>(tier), ", ", name));
        };
        check_result(&Result::out, dtype, largest(in.v), "out");
        check_result(&Result::lse, DType::f32, 1, "lse");
        check_result(&Result::dq, dtype, dS_size * largest(in.k), "dq");
        check_result(&Result::dk, dtype, dS_size * largest(in.q), "dk");
        check_result(&Result::dv, dtype, largest(in.dout), "dv");
        CHECK(flash.dqkv.n_untouched() >= n_between);
    }
}

std::vector<FlashTier> tiers_of(DType dtype) {
    if (dtype == DType::f32) return {FlashTier::automatic};
    if (!has_wgmma()) return {FlashTier::automatic, FlashTier::mma};
    return {FlashTier::automatic, FlashTier::mma, FlashTier::hopper};
}

// Has a block of this GPU the shared memory that heads of so many columns need? RTX 3090, 4090: 99 KiB; T4: 64.
bool has_room(int64_t D, int64_t Dv) {
    return std::max(D, Dv) <= (device().block_shared_bytes < 99 << 10    ? 128
                               : device().block_shared_bytes < 112 << 10 ? 192
                                                                         : 256);
}

// A grid of shapes, not a product of all: number i takes the i-th of each list, and lists of lengths without a common
// divisor meet in ever new combinations.
std::vector<Case> grid() {
    const int64_t lengths[] = {1,  2,  3,  5,  7,  8,  9,  15, 16,  17,  23,  31,  32,  33,  40, 47,
                               63, 64, 65, 66, 79, 95, 96, 97, 111, 127, 128, 129, 130, 145, 161};  // 31
    const int64_t heads[][2] = {{1, 1}, {2, 1}, {4, 2}, {2, 2}, {3, 1}};
    const int64_t sizes[][2] = {{16, 16},   {32, 32},   {64, 64}, {80, 80},   {96, 96},  {128, 128},
                                {192, 128}, {192, 192}, {40, 24}, {256, 256}, {200, 256}};
    const int64_t windows[] = {0, 1, 0, 7, 0, 64, 33};
    std::vector<Case> cases;
    for (int64_t i = 0; i < 217; ++i) {
        Case c{};
        c.T = lengths[i % 31];
        c.H = heads[i % 5][0], c.K = heads[i % 5][1];
        c.D = sizes[i % 11][0], c.Dv = sizes[i % 11][1];
        c.B = i / 2 % 3 == 0 ? 2 : 1;
        c.causal = i % 13 < 8;
        c.window = windows[i % 7];
        c.layout = static_cast<int>(i % 3);
        if (i % 4 == 1 && c.T > 2) c.lengths = {c.T / 3, c.T - c.T / 3 - c.T / 5, c.T / 5};
        if (i % 8 == 3 && c.T > 40) c.lengths = {1, c.T - 34, 33};
        std::erase(c.lengths, 0);
        if (c.T > 100 && c.D > 96) c.H = c.K = 1;  // the float64 loops are slow
        if (c.T > 60 && c.H > 1) c.B = 1;
        if (has_room(c.D, c.Dv)) cases.push_back(c);
    }
    cases.push_back({1, 641, 1, 1, 32, 32, true, 0, {}, 0});
    cases.push_back({1, 641, 1, 1, 16, 16, false, 100, {}, 0});
    cases.push_back({1, 641, 1, 1, 16, 16, true, 0, {300, 1, 340}, 1});
    cases.push_back({1, 513, 2, 1, 64, 64, true, 0, {}, 0});
    return cases;
}

}  // namespace

TEST_CASE("flash attention: the reference's gradient is that of the reference", "[flash]") {
    for (const Case& c : {Case{1, 5, 4, 2, 3, 2, true, 0, {}, 0}, Case{2, 6, 2, 1, 2, 3, false, 3, {2, 4}, 0}}) {
        const Values in = random_inputs(c, DType::f32, 3);
        check_differences(c, in, attention<double>(c, in, DType::f32), 1e-7);
    }
}

TEST_CASE("flash attention against float64, float32", "[flash][shapes]") {
    uint64_t seed = 100;
    for (const Case& c : grid()) check_case(c, DType::f32, {FlashTier::automatic}, seed += 10);
}

TEST_CASE("flash attention against float64, 16 bits, tensor cores", "[flash][shapes][hopper]") {
    // Half of the grid for each tier: of each length, of each pair of head sizes in each format, and of the documents.
    // The longest sequences for both.
    const std::vector<Case> cases = grid();
    for (size_t i = 0; i < cases.size(); ++i) {
        std::vector<FlashTier> tiers;
        if (!has_wgmma() || i / 9 % 2 == 0 || cases[i].T > 500) tiers.push_back(FlashTier::mma);
        if (has_wgmma() && (i / 9 % 2 == 1 || cases[i].T > 500)) tiers.push_back(FlashTier::hopper);
        check_case(cases[i], i / 5 % 2 ? DType::bf16 : DType::f16, tiers, 100 + 10 * i);
    }
}

TEST_CASE("flash attention on hopper when all stages are filled again", "[flash][hopper]") {
    if (!has_wgmma()) SKIP_TEST("needs a GPU of compute capability 9.0");
    check_case({1, 450, 2, 1, 128, 128, false, 0, {}, 0}, DType::bf16, {FlashTier::hopper}, 1);
    check_case({1, 600, 1, 1, 64, 64, true, 0, {}, 0}, DType::f16, {FlashTier::hopper}, 2);
    check_case({3, 130, 4, 4, 64, 64, true, 0, {}, 0}, DType::bf16, {FlashTier::hopper}, 4);  // heads in sections
}
TEST_CASE("flash attention on hopper with wide heads", "[flash][hopper][counted]") {
    if (!has_wgmma()) SKIP_TEST("needs a GPU of compute capability 9.0");
    check_case({1, 400, 1, 1, 192, 128, true, 150, {100, 290, 10}, 2}, DType::bf16, {FlashTier::hopper}, 3);
    check_case({1, 270, 1, 1, 256, 256, true, 0, {}, 0}, DType::bf16, {FlashTier::hopper}, 5);
}

// Two chunks of a sequence, and keys of two others, as a rank of a ring has them. The last rounds of an item add zeros:
// nothing is loaded for them, and whoever loads may be late when the block's next item begins. Heads with the same
// numbers have the same results.
TEST_CASE("flash attention on hopper where queries see none of the keys of a tile", "[flash][hopper]") {
    if (!has_wgmma()) SKIP_TEST("needs a GPU of compute capability 9.0");
    constexpr int64_t kLength = 192, kHeads = 4, kD = 16;  // a chunk is no whole number of tiles
    const Case c{1, 2 * kLength, kHeads, kHeads, kD, kD, true, 100, {}, 1};
    Values in = random_inputs(c, DType::bf16, 61);
    for (std::vector<double>* x : {&in.q, &in.k, &in.v, &in.dout})
        for (size_t i = 0; i < x->size(); ++i) (*x)[i] = (*x)[i / (kHeads * kD) * kHeads * kD + i % kD];
    Flash flash(c, DType::bf16, in);
    flash.options.tier = FlashTier::hopper;
    flash.options.whole_T = 8 * kLength;
    flash.options.queries = {kLength, {1 * kLength, 6 * kLength}};
    flash.options.keys = {kLength, {2 * kLength, 5 * kLength}};
    flash.forward();
    std::vector<double> lse = flash.lse.values();
    for (double& x : lse) x = std::max(x, 0.0);  // the ring gives that of all keys, of which each query sees one
    flash.lse.set(lse);
    flash.backward();
    const std::vector<double> gradients[] = {flash.dqkv.q(), flash.dqkv.k(), flash.dqkv.v()};
    for (const std::vector<double>& gradient : gradients) {
        CHECK(largest(gradient) > 0);
        for (size_t i = 0; i < gradient.size(); ++i)
            REQUIRE(gradient[i] == gradient[i / (kHeads * kD) * kHeads * kD + i % kD]);
    }
}

// The second panel of a tile of values has nothing in it: the copy engine brings zeros, and is given it to store.
TEST_CASE("flash attention on hopper with an empty panel", "[flash][hopper]") {
    if (!has_wgmma()) SKIP_TEST("needs a GPU of compute capability 9.0");
    check_case({1, 140, 2, 1, 96, 64, true, 0, {}, 0}, DType::bf16, {FlashTier::hopper}, 5);
}

TEST_CASE("flash attention against float64, 16 bits, the device's own choice", "[flash]") {
    const std::vector<Case> cases = grid();
    for (size_t i = 0; i < cases.size(); i += 7)
        check_case(cases[i], i % 2 ? DType::f16 : DType::bf16, {FlashTier::automatic}, 20 + i);
}

// Heads of small models, and heads that do not start at multiples of 16 bytes.
TEST_CASE("flash attention against float64, any head size", "[flash]") {
    const std::pair<int64_t, int64_t> sizes[] = {{12, 12}, {20, 20}, {10, 6}, {9, 9}, {1, 1}, {66, 35}};
    int i = 0;
    for (const auto& [D, Dv] : sizes)
        for (DType dtype : kFloatDTypes) {
            const Case c{1 + i % 2, 37 + i, 4, 2, D, Dv, i % 3 != 0, i % 4 == 1 ? 7 : 0, {}, i % 3};
            std::vector<FlashTier> tiers = {FlashTier::automatic};
            if (dtype != DType::f32) tiers.push_back(FlashTier::mma);
            check_case(c, dtype, tiers, 700 + static_cast<uint64_t>(10 * i++));
        }
}

TEST_CASE("head sizes that a tier cannot have are named before a kernel runs", "[flash]") {
    for (DType dtype : kFloatDTypes)
        for (const auto& [D, refusal] :
             {std::pair{1, ""}, std::pair{12, ""}, std::pair{128, ""},
              std::pair{192, "heads of more than 128 columns need 90 KiB of shared memory a block"},
              std::pair{256, "heads of more than 192 columns need 112 KiB of shared memory a block"}})
            if (has_room(D, D)) CHECK_NOTHROW(expect_head_size(FlashTier::automatic, dtype, D, D));
            else CHECK_THROWS_WITH(expect_head_size(FlashTier::automatic, dtype, D, D), ContainsSubstring(refusal));
    CHECK_THROWS_WITH(expect_head_size(FlashTier::automatic, DType::bf16, 257, 64),
                      ContainsSubstring("heads of 257 columns (values: 64) are beyond the 256"));
    CHECK_THROWS_WITH(expect_head_size(FlashTier::mma, DType::f32, 64, 64), ContainsSubstring("use cores or auto"));
    if (!has_wgmma()) return;
    CHECK_NOTHROW(expect_head_size(FlashTier::hopper, DType::bf16, 40, 24));
    CHECK_THROWS_WITH(expect_head_size(FlashTier::hopper, DType::bf16, 64, 20),
                      ContainsSubstring("multiples of 8, not 64 (values: 20): use mma or auto"));
    const Case c{1, 6, 2, 1, 12, 12, true, 0, {}, 0};
    Flash flash(c, DType::bf16, random_inputs(c, DType::bf16, 51));
    flash.options.tier = FlashTier::hopper;
    CHECK_THROWS_WITH(flash.run(), ContainsSubstring("start and end at multiples of 8 columns"));
}

TEST_CASE("flash attention: a document's bits do not depend on what stands before it", "[flash]") {
    // Packed in a row, documents begin anywhere in a tile. In float32 they get the same bits as alone.
    const std::vector<int64_t> lengths = {37, 64, 1, 100, 13};
    for (const auto& [D, Dv, causal, window] : std::vector<std::tuple<int64_t, int64_t, bool, int64_t>>{
             {32, 32, true, 0}, {64, 64, true, 20}, {80, 48, false, 0}, {16, 16, false, 30}}) {
        const Case packed{1, 215, 4, 2, D, Dv, causal, window, lengths, 0};
        const Values in = random_inputs(packed, DType::f32, 11, 3.0);
        const Result whole = Flash(packed, DType::f32, in).run();
        int64_t first = 0;
        for (int64_t n : lengths) {
            const auto part = [&](const std::vector<double>& x, int64_t width) {
                return std::vector<double>(x.begin() + first * width, x.begin() + (first + n) * width);
            };
            const Case alone{1, n, 4, 2, D, Dv, causal, window, {}, 0};
            const Result single =
                Flash(alone, DType::f32,
                      {part(in.q, 4 * D), part(in.k, 2 * D), part(in.v, 2 * Dv), part(in.dout, 4 * Dv)})
                    .run();
            INFO("document of " << n << " tokens, D = " << D);
            CHECK(single.out == part(whole.out, 4 * Dv));
            CHECK(single.dq == part(whole.dq, 4 * D));
            CHECK(single.dk == part(whole.dk, 2 * D));
            CHECK(single.dv == part(whole.dv, 2 * Dv));
            for (int64_t h = 0; h < 4; ++h)
                for (int64_t t = 0; t < n; ++t)
                    CHECK(single.lse[static_cast<size_t>(h * n + t)] ==
                          whole.lse[static_cast<size_t>(h * 215 + first + t)]);
            first += n;
        }
    }
}

TEST_CASE("flash attention that can be read by eye", "[flash]") {
    // Keys are 32 times unit vectors, and each query asks for one of them: the others get exp(-1024) = 0.
    for (DType dtype : kFloatDTypes) {
        const Case c{1, 3, 1, 1, 8, 8, true, 0, {}, 1};
        Values in{std::vector<double>(24), std::vector<double>(24), std::vector<double>(24),
                  std::vector<double>(24, 1.0)};
        in.q[0] = in.k[0] = in.k[9] = in.k[17] = 32;  // token 0 has key (32, 0), tokens 1 and 2 have (0, 32)
        in.q[8] = 32;                                 // token 1 asks for (32, 0): token 0
        in.q[17] = 32;                                // token 2 asks for (0, 32): tokens 1 and 2, half and half
        in.v[0] = 1, in.v[8] = 3, in.v[16] = 5;
        Flash flash(c, dtype, in);
        flash.options.scale = 1.0f;
        flash.forward();
        const auto out = flash.out.values(), lse = flash.lse.values();
        CHECK(std::vector<double>{out[0], out[8], out[16]} == std::vector<double>{1, 1, 4});
        CHECK(lse[0] == Approx(1024));
        CHECK(lse[2] == Approx(1024 + std::log(2.0)));
    }
}

TEST_CASE("flash attention looks only where it may", "[flash]") {
    // Tokens 70 to 99 change. The queries before them do not notice, nor those that are a window away.
    for (DType dtype : kFloatDTypes)
        for (FlashTier tier : tiers_of(dtype)) {
            const Case c{1, 150, 2, 1, 32, 32, true, 40, {}, 1};
            Values in = random_inputs(c, dtype, 21);
            Flash before(c, dtype, in);
            for (size_t i = 70 * 32; i < 100 * 32; ++i) in.k[i] *= -7, in.v[i] *= -7;
            Flash after(c, dtype, in);
            before.options.tier = after.options.tier = tier;
            before.forward();
            after.forward();
            const auto a = before.out.values(), b = after.out.values();
            for (int64_t t = 0; t < 150; ++t) {
                const bool same = std::equal(a.begin() + t * 64, a.begin() + (t + 1) * 64, b.begin() + t * 64);
                INFO("query " << t);
                CHECK(same == (t < 70 || t >= 100 + 39));
            }
        }
}

TEST_CASE("flash attention with extreme scores", "[flash]") {
    for (DType dtype : kFloatDTypes)
        for (FlashTier tier : tiers_of(dtype)) {
            const Case c{1, 70, 2, 1, 16, 16, true, 0, {}, 1};
            Values in = random_inputs(c, dtype, 31, 80.0);  // scores of some 0.25 * 16 * 80 * 80 = 25000
            for (double& v : in.v) v = 1;
            Flash flash(c, dtype, in);
            flash.options.tier = tier;
            const Result got = flash.run();
            // Probabilities add up to 1 whatever the scores. On tensor cores each is rounded to 16 bits, and their sum
            // is not.
            for (double out : got.out) CHECK(out == Approx(1).epsilon(2 * unit_roundoff(dtype) + 70 * kUnit));
            for (const auto* gradient : {&got.dq, &got.dk, &got.dv})
                for (double value : *gradient) CHECK(std::isfinite(value));
        }
}

// Where scores are beyond 1e9, two sums of the same products differ by hundreds, and so may a score of the backward and
// lse. e^(score - lse) is then infinite, in all tiers: the run ends with a message, where finite numbers would change
// the weights.
TEST_CASE("flash attention backward is infinite or NaN where scores are far above lse", "[flash]") {
    for (DType dtype : kFloatDTypes)
        for (FlashTier tier : tiers_of(dtype))
            for (double above : {95.0, 1000.0, 1e10}) {
                const Case c{1, 3, 1, 1, 8, 8, true, 0, {}, 1};
                Flash flash(c, dtype, random_inputs(c, dtype, 33));
                flash.options.tier = tier;
                flash.forward();
                std::vector<double> lse = flash.lse.values();
                for (double& x : lse) x -= above;
                flash.lse.set(lse);
                flash.backward();
                INFO(dtype_name(dtype) << ", tier " << static_cast<int>(tier) << ", " << above << " above lse");
                CHECK(!std::isfinite(flash.dqkv.v()[0]));
                CHECK(!std::isfinite(flash.dqkv.k()[0]));
            }
}

// Every third key has a score of -infinity, q[0] k[0] = -1e40, and no weight. Query 0 sees no other key: it has
// out = 0, as in PyTorch.
TEST_CASE("flash attention gives scores of -infinity no weight", "[flash][hopper]") {
    for (DType dtype : {DType::f32, DType::bf16})
        for (FlashTier tier : tiers_of(dtype))
            for (const int64_t D : {16, 136}) {
                if (!has_room(D, D)) continue;
                const Case c{1, 70, 1, 1, D, D, true, 0, {}, 1};
                Values in = random_inputs(c, dtype, 75, 0.5);
                for (int64_t t = 0; t < c.T; ++t) {
                    in.q[static_cast<size_t>(t * D)] = 1e20;
                    in.k[static_cast<size_t>(t * D)] = t % 3 == 0 ? -1e20 : 0;
                }
                in.q = rounded(in.q, dtype), in.k = rounded(in.k, dtype);
                const Result exact = attention<double>(c, in, dtype);
                Flash flash(c, dtype, in);
                flash.options.tier = tier;
                const Result got = flash.run();
                INFO(dtype_name(dtype) << ", tier " << static_cast<int>(tier) << ", D = " << D);
                CHECK(got.lse[0] == -INFINITY);
                for (int64_t d = 0; d < D; ++d) CHECK(got.out[static_cast<size_t>(d)] == 0);
                const auto behind_query_0 = [&](const std::vector<double>& x) {
                    return std::vector<double>(x.begin() + D, x.end());
                };
                const double tolerance = 4 * unit_roundoff(dtype) + 70 * kUnit;
                for (auto member : {&Result::out, &Result::dq})
                    check_close(behind_query_0(got.*member), behind_query_0(exact.*member), 0,
                                4 * tolerance * largest(exact.*member), member == &Result::out ? "out" : "dq");
            }
}

// All keys are equal, and so large that scale * score * log2(e) is rounded by up to 1/64: the first tiles of keys must
// not have another weight than the last ones.
TEST_CASE("flash attention weighs the first keys as the last ones", "[flash][hopper]") {
    for (DType dtype : kFloatDTypes)
        for (FlashTier tier : tiers_of(dtype)) {
            const Case c{1, 1000, 1, 1, 16, 16, false, 0, {}, 1};
            Values in = random_inputs(c, dtype, 73);
            in.q.assign(in.q.size(), 304), in.k.assign(in.k.size(), 304), in.v.assign(in.v.size(), 0);
            std::fill_n(in.v.begin(), 100 * c.Dv, 1);  // one key in ten
            Flash flash(c, dtype, in);
            flash.options.tier = tier;
            flash.forward();
            // A probability and the output are rounded.
            check_close(flash.out.values(), std::vector<double>(in.v.size(), 0.1),
                        3 * unit_roundoff(dtype) + 1000 * kUnit, 0,
                        concat(dtype_name(dtype), ", tier ", static_cast<int>(tier)));
        }
}

// Behind the last token a tile has zeros. Their scores of 0 are far above those of all tokens, and exp(0 - lse) is
// infinite.
TEST_CASE("flash attention backward does not use what is behind the last token", "[flash][hopper]") {
    for (DType dtype : {DType::bf16, DType::f16})
        for (FlashTier tier : tiers_of(dtype))
            for (int64_t T : {1, 129}) {
                const Case c{1, T, 1, 1, 16, 16, false, 0, {}, 0};
                Values in = random_inputs(c, dtype, 71);
                in.q.assign(in.q.size(), 6), in.k.assign(in.k.size(), -6);
                Flash flash(c, dtype, in);
                flash.options.tier = tier;
                const Result got = flash.run();
                INFO(dtype_name(dtype) << ", T = " << T << ", tier " << static_cast<int>(tier));
                for (const auto* gradient : {&got.dq, &got.dk, &got.dv})
                    CHECK(std::all_of(gradient->begin(), gradient->end(), [](double x) { return std::isfinite(x); }));
            }
}

TEST_CASE("flash attention backward never uses what it may not see", "[flash]") {
    // In f16 dP = do v^T overflows for t = 0, s = 1, where P is 0: infinity times zero must not become NaN.
    for (FlashTier tier : tiers_of(DType::f16)) {
        const Case c{1, 2, 1, 1, 16, 16, true, 0, {}, 0};
        Values in{std::vector<double>(32, 0.1), std::vector<double>(32, 0.1), std::vector<double>(32, 0.1),
                  std::vector<double>(32, 0.1)};
        for (size_t d = 0; d < 16; ++d) in.v[16 + d] = 200, in.dout[d] = 200;  // 16 * 40000
        Flash flash(c, DType::f16, in);
        flash.options.tier = tier;
        const Result got = flash.run();
        for (const auto* gradient : {&got.dq, &got.dk, &got.dv})
            for (double value : *gradient) CHECK(std::isfinite(value));
    }
}

// The CPU device sums dq beside dk and dv where there are heads enough for its threads.
TEST_CASE("flash attention backward in one pass gives the numbers of two kernels", "[flash]") {
    if (!kOnCpu) SKIP_TEST("a GPU always has two kernels on CUDA cores");
    std::vector<Case> cases = grid();
    cases.push_back({3, 70, 4, 2, 32, 32, true, 0, {}, 0});  // more key heads than blocks, where dq has 16 bits
    for (const DType dtype : kFloatDTypes) {
        int n_one_pass = 0;
        for (const Case& c : cases) {
            const Values in = random_inputs(c, dtype, 43);
            const auto backward_on = [&](int n_threads) {
                const Multiprocessors threads(n_threads);
                auto flash = std::make_unique<Flash>(c, dtype, in);
                flash->forward();
                LaunchNotes notes;
                flash->backward();
                return std::pair(std::move(flash), notes.launches.size() - 1);  // the first one computes delta
            };
            const auto [one, n_kernels] = backward_on(1);
            const auto [two, n_kernels_of_two] = backward_on(64);
            n_one_pass += n_kernels == 1;
            INFO(dtype_name(dtype) << ", " << c.name());
            CHECK(n_kernels_of_two == 2);
            CHECK(one->dqkv.q() == two->dqkv.q());
            CHECK(one->dqkv.k() == two->dqkv.k());
            CHECK(one->dqkv.v() == two->dqkv.v());
        }
        CHECK(n_one_pass > 100);  // all but those with heads of more than 128 columns
    }
}

TEST_CASE("flash attention twice gives the same bits", "[flash]") {
    for (DType dtype : kFloatDTypes)
        for (FlashTier tier : tiers_of(dtype)) {
            const Case c{2, 77, 6, 2, 40, 40, true, 0, {30, 47}, 0};
            const Values in = random_inputs(c, dtype, 41);
            Flash first(c, dtype, in), second(c, dtype, in);
            first.options.tier = second.options.tier = tier;
            const Result a = first.run(), b = second.run();
            CHECK(a.out == b.out);
            CHECK(a.lse == b.lse);
            CHECK(a.dq == b.dq);
            CHECK(a.dk == b.dk);
            CHECK(a.dv == b.dv);
        }
}

// As where the product that makes dout has computed it.
TEST_CASE("flash attention backward takes the delta that is there", "[flash][hopper]") {
    const Case c{2, 70, 4, 2, 64, 64, true, 0, {}, 0};
    for (DType dtype : kFloatDTypes)
        for (const FlashTier tier : tiers_of(dtype)) {
            Flash flash(c, dtype, random_inputs(c, dtype, 5));
            flash.options.tier = tier;
            const Result whole = flash.run();
            const auto stream = device().stream;
            const FlashDelta in = flash_delta_in(flash.scratch, c.B, c.T, c.H, c.K, c.D, c.Dv, dtype, tier);
            cudaCheck(cudaMemsetAsync(flash.scratch.tensor().data, 0xff, flash.scratch.tensor().bytes(), stream));
            flash_delta(in, flash.dout_heads, flash.out_heads, stream);
            flash.options.scratch = FlashAttentionOptions::has_delta;
            flash.backward();
            CHECK((flash.dqkv.q() == whole.dq));
            CHECK((flash.dqkv.k() == whole.dk));
            CHECK((flash.dqkv.v() == whole.dv));
        }
}

TEST_CASE("flash attention names what is wrong", "[flash]") {
    const Case c{2, 6, 4, 2, 16, 16, true, 0, {2, 4}, 1};
    Flash flash(c, DType::f32, random_inputs(c, DType::f32, 51));
    const cudaStream_t stream = device().stream;
    const QkvHeads& heads = flash.qkv.heads;
    const auto forward = [&](HeadColumns out, Tensor lse, HeadColumns q, HeadColumns k, HeadColumns v,
                             const FlashAttentionOptions& options) {
        flash_attention_forward(out, lse, q, k, v, options, stream);
    };
    const std::string name = "flash_attention_forward: ";
    const auto message = [&](const std::string& words) { return ContainsSubstring(name + words); };
    HeadColumns q = heads.q, k = heads.k, v = heads.v, out = flash.out_heads;
    FlashAttentionOptions options = flash.options;
    const auto wrong = [&](const std::string& words) {
        CHECK_THROWS_WITH(forward(out, flash.lse, q, k, v, options), message(words));
        q = heads.q, k = heads.k, v = heads.v, out = flash.out_heads, options = flash.options;
    };
    q.D = k.D = 264;
    wrong("heads of q have 264 columns; 1 to 256 are possible");
    v.D = 0;
    wrong("heads of v have 0 columns");
    k.count = v.count = 3;
    wrong("H = 4 query heads are not a multiple of K = 3");
    k.D = 12;
    wrong("k has 2 heads of 12 columns, expected 2 of 16");
    out.D = 12;
    wrong("out has 4 heads of 12 columns, expected 4 of 16");
    v.column = 4;
    wrong("v's 2 heads of 16 columns, 16 apart, from column 4 on, are not inside of 32 columns");
    q.rows = make_tensor(q.rows.data, DType::f32, {2, 6, 60});
    wrong("q's 4 heads of 16 columns, 16 apart, from column 16 on, are not inside of 60 columns");
    q.rows = {};
    wrong("q is no tensor");
    k.rows = make_tensor(static_cast<char*>(k.rows.data) + 4, DType::f32, {2, 6, 32});
    wrong("k starts at");
    q.rows = make_tensor(q.rows.data, DType::f32, {2, 0, 80});
    wrong("q is f32 (2, 0, 80): there must be a token");
    options.window = -1;
    wrong("window is -1");
    options.scale = 0;
    wrong("scale is 0");
    options.whole_T = int64_t{1} << 32, options.documents = {};  // kernels count tokens in 32 bits
    options.queries = options.keys = {3, {0, options.whole_T - 3}};
    wrong("q is f32 (2, 6, 80) with 4 heads, of sequences of 4294967296 tokens");
    options.documents = make_tensor(options.documents.data, DType::i32, {2, 6});
    wrong("options.documents is i32 (2, 6), expected i32 (2, 6, 2)");
    options.tier = FlashTier::mma;
    CHECK_THROWS_WITH(forward(out, flash.lse, q, k, v, options),
                      "attention on 'mma' is for bf16 and f16, not for f32: use cores or auto");
    options = flash.options;
    CHECK_THROWS_WITH(forward(out, flash.scratch, q, k, v, options), message("lse is"));
    Buffer half(DType::bf16, {2, 6, 32}), few(DType::f32, {47});
    k.rows = half;
    wrong("k is bf16 (2, 6, 32), expected f32");
    const auto backward = [&](HeadColumns dq, HeadColumns dout, Tensor scratch) {
        flash_attention_backward(dq, flash.dqkv.heads.k, flash.dqkv.heads.v, dout, out, flash.lse, q, k, v, options,
                                 scratch, stream);
    };
    CHECK_THROWS_WITH(backward(flash.dqkv.heads.q, out, few),
                      ContainsSubstring("flash_attention_backward: scratch is f32 (47), expected f32 of at least 48"));
    CHECK_THROWS_WITH(backward(flash.dqkv.heads.k, out, flash.scratch),
                      ContainsSubstring("flash_attention_backward: dq has 2 heads of 16 columns, expected 4 of 16"));
    CHECK_THROWS_WITH(backward(flash.dqkv.heads.q, heads.k, flash.scratch),
                      ContainsSubstring("flash_attention_backward: dout has 2 heads of 16 columns, expected 4 of 16"));
    CHECK_THROWS_WITH(qkv_heads(heads.k.rows, 5, 2), ContainsSubstring("columns of a head"));
}
