// test/test_rope.cu: rotary position embedding against float64 rotations; its frequencies against transformers.
#include "layers/layers.h"
#include "reference.h"

#include <cmath>

namespace {

struct Size {
    int64_t B, T, H, K, D;
};
// Chunks are 4 or 8 pairs on the GPU and 32 on the CPU: half of D below, at and above them, and odd ones.
const Size kSizes[] = {{1, 1, 1, 1, 2},   {2, 17, 6, 2, 8},   {1, 33, 4, 1, 10}, {2, 5, 3, 3, 64},
                       {1, 65, 4, 1, 80}, {1, 2, 12, 4, 128}, {1, 3, 300, 1, 2}, {1, 3, 2, 1, 512}};

// Rotates the q and k heads of (B, T, (H + 2K) D) by direction * angle.
std::vector<double> rotate(std::vector<double> x, const Size& size, const std::vector<double>& frequencies,
                           double direction) {
    const auto& [B, T, H, K, D] = size;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t t = 0; t < T; ++t)
            for (int64_t h = 0; h < H + K; ++h)
                for (int64_t i = 0; i < D / 2; ++i) {
                    const double angle = direction * static_cast<double>(t) * frequencies[static_cast<size_t>(i)];
                    const size_t first = static_cast<size_t>(((b * T + t) * (H + 2 * K) + h) * D + i),
                                 second = first + static_cast<size_t>(D / 2);
                    const double x1 = x[first], x2 = x[second];
                    x[first] = x1 * std::cos(angle) - x2 * std::sin(angle);
                    x[second] = x2 * std::cos(angle) + x1 * std::sin(angle);
                }
    return x;
}

}  // namespace

TEST_CASE("rope: the reference's gradient is the rotation back", "[rope]") {
    const Size size{1, 4, 2, 1, 6};
    const auto frequencies = rope_frequencies(size.D, 10000, {});
    const auto x = random_values(4 * 4 * 6, 1), weights = random_values(4 * 4 * 6, 2);
    const auto loss = [&](const std::vector<double>& v) {
        const auto y = rotate(v, size, frequencies, 1);
        double total = 0;
        for (size_t i = 0; i < y.size(); ++i) total += weights[i] * y[i];
        return total;
    };
    const auto gradient = rotate(weights, size, frequencies, -1);
    // Linear, so the difference quotient is exact but for rounding: 1e-14 / 1e-5.
    for (const auto& [i, derivative] : finite_differences(loss, x, 1e-5, 48))
        CHECK(gradient[i] == Approx(derivative).margin(1e-8));
}

TEST_CASE("rope against float64", "[rope]") {
    for (DType dtype : kFloatDTypes)
        for (const Size& size : kSizes) {
            const auto& [B, T, H, K, D] = size;
            const int64_t columns = (H + 2 * K) * D;
            const auto frequencies = rope_frequencies(D, 10000, {});
            const auto x = rounded(random_values(B * T * columns, 3), dtype);
            Buffer table(DType::f32, {T + 2, D}), qkv(dtype, {B, T, columns}, x), dqkv(dtype, {B, T, columns}, x);
            rope_table(table, frequencies);
            rope_forward(qkv, {}, table, H, K, device().stream);
            rope_backward(dqkv, {}, table, H, K, device().stream);
            // Two products (each a rounding and the table's own) and a sum of numbers up to largest(x): 5 units of
            // 2^-24.
            const double absolute = 5 * 0x1p-24 * 2 * largest(x) + (dtype == DType::f16 ? 0x1p-25 : 0);
            const std::string what = concat("B T H K D = ", B, " ", T, " ", H, " ", K, " ", D, ", ", dtype_name(dtype));
            check_close(qkv.values(), rotate(x, size, frequencies, 1), unit_roundoff(dtype), absolute,
                        "rope forward, " + what);
            check_close(dqkv.values(), rotate(x, size, frequencies, -1), unit_roundoff(dtype), absolute,
                        "rope backward, " + what);
            // The value heads, and position 0, are untouched to the bit.
            const auto y = qkv.values();
            size_t n_changed = 0;
            for (int64_t row = 0; row < B * T; ++row)
                for (int64_t c = row % T == 0 ? 0 : (H + K) * D; c < columns; ++c)
                    n_changed += y[static_cast<size_t>(row * columns + c)] != x[static_cast<size_t>(row * columns + c)];
            CHECK(n_changed == 0);
        }
}

// DeepSeek's form: pairs of neighbours, in the last columns of every head, from a later position on.
TEST_CASE("rope of neighbours inside of wider heads against float64", "[rope]") {
    struct Place {
        int64_t B, T, heads, D, column, stride, columns, first;
    };
    const Place places[] = {{2, 5, 3, 16, 8, 24, 72, 0},
                            {1, 9, 1, 8, 32, 8, 40, 3},
                            {3, 2, 2, 6, 1, 9, 23, 1},
                            {1, 3, 4, 64, 128, 192, 768, 7}};
    for (DType dtype : kFloatDTypes)
        for (const auto& [B, T, heads, D, column, stride, columns, first] : places)
            for (RopePairs pairs : {RopePairs::neighbours, RopePairs::halves}) {
                const auto frequencies = rope_frequencies(D, 10000, {});
                const double amplitude = 1.25;
                const auto x = rounded(random_values(B * T * columns, 3), dtype);
                const auto turned = [&, T = T, heads = heads, D = D, column = column, stride = stride,
                                     columns = columns, first = first](double direction) {
                    std::vector<double> y = x;
                    for (size_t n = 0; n < x.size() / static_cast<size_t>(columns); ++n)
                        for (int64_t h = 0; h < heads; ++h)
                            for (int64_t i = 0; i < D / 2; ++i) {
                                const double angle = direction *
                                                     static_cast<double>(static_cast<int64_t>(n) % T + first) *
                                                     frequencies[static_cast<size_t>(i)];
                                const size_t head =
                                    n * static_cast<size_t>(columns) + static_cast<size_t>(column + h * stride);
                                const bool next = pairs == RopePairs::neighbours;
                                const size_t a = head + static_cast<size_t>(next ? 2 * i : i),
                                             b = next ? a + 1 : a + static_cast<size_t>(D / 2);
                                y[a] = amplitude * (x[a] * std::cos(angle) - x[b] * std::sin(angle));
                                y[b] = amplitude * (x[b] * std::cos(angle) + x[a] * std::sin(angle));
                            }
                    return y;
                };
                Buffer table(DType::f32, {T + first, D}), forward(dtype, {B, T, columns}, x),
                    backward(dtype, {B, T, columns}, x);
                rope_table(table, frequencies, amplitude);
                const Tensor rows = table.tensor().slice(first, T);
                rope_forward({forward, heads, D, column, stride}, pairs, {}, rows, device().stream);
                rope_backward({backward, heads, D, column, stride}, pairs, {}, rows, device().stream);
                // As above, with cosines up to the amplitude.
                const double absolute = amplitude * 5 * 0x1p-24 * 2 * largest(x) + (dtype == DType::f16 ? 0x1p-25 : 0);
                const std::string what = concat(heads, " heads of ", D, " of ", columns, ", ", dtype_name(dtype));
                check_close(forward.values(), turned(1), unit_roundoff(dtype), absolute, "rope forward, " + what);
                check_close(backward.values(), turned(-1), unit_roundoff(dtype), absolute, "rope backward, " + what);
                size_t n_changed = 0;  // between the heads
                const auto y = forward.values();
                for (size_t i = 0; i < y.size(); ++i) {
                    const int64_t c = static_cast<int64_t>(i) % columns - column;
                    if (c < 0 || c >= heads * stride || c % stride >= D) n_changed += y[i] != x[i];
                }
                CHECK(n_changed == 0);
            }
    Buffer rows(DType::f32, {1, 3, 40}), table(DType::f32, {3, 8}), odd(DType::f32, {3, 7});
    CHECK_THROWS_WITH(
        rope_forward({rows, 5, 8, 8}, RopePairs::halves, {}, table, device().stream),
        ContainsSubstring(
            "rope_forward: heads's 5 heads of 8 columns, 8 apart, from column 8 on, are not inside of 40"));
    CHECK_THROWS_WITH(rope_backward({rows, 5, 7}, RopePairs::halves, {}, odd, device().stream),
                      ContainsSubstring("dheads has 5 heads of 7 columns, expected an even"));
}

TEST_CASE("rope with positions gives each document the bits that it has alone", "[rope]") {
    const int64_t T = 12, H = 4, K = 2, D = 10, columns = (H + 2 * K) * D;
    const std::vector<int64_t> lengths = {1, 5, 6, 12};  // two rows: 1 + 5 + 6, and 12
    for (DType dtype : kFloatDTypes) {
        const auto x = rounded(random_values(2 * T * columns, 3), dtype);
        Buffer table(DType::f32, {T, D}), qkv(dtype, {2, T, columns}, x), positions(DType::i32, {2, T});
        rope_table(table, rope_frequencies(D, 10000, {}));
        std::vector<int32_t> counted;
        for (int64_t n : lengths)
            for (int32_t t = 0; t < n; ++t) counted.push_back(t);
        positions.set_integers(counted);
        using OfQkv = void (*)(Tensor, Tensor, Tensor, int64_t, int64_t, cudaStream_t);
        for (const OfQkv operation : {OfQkv{rope_forward}, OfQkv{rope_backward}}) {
            qkv.set(x);
            operation(qkv, positions, table, H, K, device().stream);
            const auto packed = qkv.values();
            auto at = packed.begin(), in = x.begin();
            for (int64_t n : lengths) {
                Buffer alone(dtype, {1, n, columns}, {in, in + n * columns});
                operation(alone, {}, table, H, K, device().stream);
                INFO("document of " << n << " tokens, " << dtype_name(dtype));
                CHECK(alone.values() == std::vector<double>(at, at + n * columns));
                at += n * columns, in += n * columns;
            }
        }
    }
}

TEST_CASE("rope: attention scores depend on distances only", "[rope]") {
    // The same query and key at every position: q_t . k_s must be the same along each diagonal.
    const int64_t T = 40, D = 16;
    std::vector<double> x;
    const auto q = random_values(D, 4), k = random_values(D, 5);
    for (int64_t t = 0; t < T; ++t) {
        x.insert(x.end(), q.begin(), q.end());
        x.insert(x.end(), k.begin(), k.end());
        x.insert(x.end(), D, 0.0);
    }
    Buffer table(DType::f32, {T, D}), qkv(DType::f32, {1, T, 3 * D}, x);
    rope_table(table, rope_frequencies(D, 10000, {}));
    rope_forward(qkv, {}, table, 1, 1, device().stream);
    const auto y = qkv.values();
    const auto score = [&](int64_t t, int64_t s) {
        double sum = 0;
        for (int64_t d = 0; d < D; ++d)
            sum += y[static_cast<size_t>(t * 3 * D + d)] * y[static_cast<size_t>(s * 3 * D + D + d)];
        return sum;
    };
    // D products of numbers of size up to 3, each with the 5 units of the test above
    for (int64_t distance : {0, 1, 7, 20})
        for (int64_t s = 1; s + distance < T; ++s)
            CHECK(score(s + distance, s) == Approx(score(distance, 0)).margin(16 * 9 * 10 * 0x1p-24));
}

TEST_CASE("rope table far from the start", "[rope]") {
    const int64_t T = 20000, D = 8;
    const auto frequencies = rope_frequencies(D, 500000, {});
    Buffer table(DType::f32, {T, D});
    rope_table(table, frequencies);
    const auto values = table.values();
    std::vector<double> last(values.end() - D, values.end()), expected;
    for (int64_t i = 0; i < D / 2; ++i) expected.push_back(std::cos((T - 1) * frequencies[static_cast<size_t>(i)]));
    for (int64_t i = 0; i < D / 2; ++i) expected.push_back(std::sin((T - 1) * frequencies[static_cast<size_t>(i)]));
    check_close(last, expected, 0x1p-24, 1e-11,
                "row 19999");  // one rounding to float; a float32 angle would be off by 1e-3
}

TEST_CASE("rope frequencies with llama3 scaling are those of transformers", "[rope]") {
    // transformers 5.23, ROPE_INIT_FUNCTIONS["llama3"] with Llama 3.1's numbers: theta 500000, head size 128, factor 8,
    // low 1, high 4, 8192 original positions. Points 0 to 28 are unchanged, 29 to 35 in between, from 36 on divided by
    // 8.
    const auto frequencies = rope_frequencies(128, 500000, {8.0, 1.0, 4.0, 8192});
    const std::pair<size_t, double> golden[] = {{0, 1.0},
                                                {1, 0.8146172165870667},
                                                {28, 0.0032114461064338684},
                                                {29, 0.0021665706299245358},
                                                {32, 0.0005248460220173001},
                                                {35, 9.556212171446532e-05},
                                                {36, 7.784655463183299e-05},
                                                {37, 6.341514381347224e-05},
                                                {63, 3.068925877869333e-07}};
    REQUIRE(frequencies.size() == 64);
    // transformers computes the power in float32, whose exponent i/64 ln(500000) <= 13 carries 13 units of error, and
    // the interpolation subtracts numbers of size 1.
    for (const auto& [i, expected] : golden) CHECK(frequencies[i] == Approx(expected).epsilon(40 * 0x1p-24));
}

TEST_CASE("rope frequencies by transformers' formula in float64", "[rope]") {
    const double factor = 32, low = 1, high = 4, positions = 8192, base = 500000;  // Llama 3.2
    const int64_t D = 64;
    const auto frequencies = rope_frequencies(D, base, {factor, low, high, 8192});
    int n_kept = 0, n_between = 0, n_slowed = 0;
    for (int64_t i = 0; i < D / 2; ++i) {
        const double w = 1.0 / std::pow(base, 2.0 * static_cast<double>(i) / D), wavelength = 2 * M_PI / w;
        const double smooth = (positions / wavelength - low) / (high - low);
        double expected = (1 - smooth) * w / factor + smooth * w;
        if (wavelength < positions / high) expected = w, ++n_kept;
        else if (wavelength > positions / low) expected = w / factor, ++n_slowed;
        else ++n_between;
        CHECK(frequencies[static_cast<size_t>(i)] == Approx(expected).epsilon(1e-14));  // a few roundings of float64
    }
    CHECK((n_kept > 0 && n_between > 0 && n_slowed > 0));
    const auto plain = rope_frequencies(D, base, {});
    for (size_t i = 0; i < plain.size(); ++i)
        CHECK(plain[i] == Approx(std::pow(base, -static_cast<double>(i) / 32)).epsilon(1e-14));
}

TEST_CASE("rope frequencies with YaRN are those of transformers", "[rope]") {
    // transformers 5.23, ROPE_INIT_FUNCTIONS["yarn"] with DeepSeek-V3's numbers: theta 10000, head size 64, factor 40,
    // 4096 original positions, beta_fast 32, beta_slow 1, mscale = mscale_all_dim = 1.
    RopeScaling v3{
        .factor = 40, .original_max_position = 4096, .kind = RopeKind::yarn, .mscale = 1, .mscale_all_dim = 1};
    const auto frequencies = rope_frequencies(64, 10000, v3);
    const std::pair<size_t, double> golden[] = {{0, 1.0},
                                                {5, 0.23713736236095428},
                                                {10, 0.05623412877321243},
                                                {11, 0.039006926119327545},
                                                {15, 0.0083345090970397},
                                                {20, 0.0007905694073997438},
                                                {22, 0.00017782794020604342},
                                                {23, 3.333803397254087e-05},
                                                {24, 2.499999936844688e-05},
                                                {31, 3.3338035336782923e-06}};
    // As for llama3: a power in float32, and an interpolation.
    for (const auto& [i, expected] : golden) CHECK(frequencies[i] == Approx(expected).epsilon(40 * 0x1p-24));
    CHECK(rope_amplitude(v3) == 1.0);
    CHECK(rope_softmax_factor(v3) == Approx(std::pow(0.1 * std::log(40.0) + 1, 2)).epsilon(1e-14));
    v3.mscale = v3.mscale_all_dim = 0;  // the YaRN of its authors
    CHECK(rope_amplitude(v3) == Approx(0.1 * std::log(40.0) + 1).epsilon(1e-14));
    CHECK(rope_softmax_factor(v3) == 1.0);
    v3.mscale_all_dim = 1;  // one of the two alone: transformers leaves both out
    CHECK(rope_amplitude(v3) == Approx(0.1 * std::log(40.0) + 1).epsilon(1e-14));
    v3.factor = 0.5;  // fewer positions than before: nothing to compensate for
    CHECK(rope_amplitude(v3) == 1.0);
    v3.factor = 40;
    CHECK(rope_amplitude({8.0, 1.0, 4.0, 8192}) == 1.0);
    // All points of a head of 8 make more than 32 turns: by theta 7.5 and 32768 positions, factor 2.
    const auto all_fast =
        rope_frequencies(8, 7.5, {.factor = 2, .original_max_position = 32768, .kind = RopeKind::yarn});
    const double golden_fast[] = {0.5, 0.3021375238895416, 0.18257418274879456, 0.11032503098249435};
    for (size_t i = 0; i < 4; ++i) CHECK(all_fast[i] == Approx(golden_fast[i]).epsilon(40 * 0x1p-24));
    // Trained with fewer positions than a turn of the first point has: first and last are both 0, and it is not slowed.
    const auto all_slow = rope_frequencies(8, 10000, {.factor = 2, .original_max_position = 6, .kind = RopeKind::yarn});
    const double golden_slow[] = {1, 0.05, 0.005, 0.0005};
    for (size_t i = 0; i < 4; ++i) CHECK(all_slow[i] == Approx(golden_slow[i]).epsilon(40 * 0x1p-24));
    v3.beta_slow = 32;
    CHECK_THROWS_WITH(rope_frequencies(64, 10000, v3), ContainsSubstring("beta_slow = 32 is not below"));
    v3.beta_slow = 0;
    CHECK_THROWS_WITH(rope_frequencies(64, 10000, v3), ContainsSubstring("beta_slow = 0 is not below"));
}

TEST_CASE("rope frequencies with linear and dynamic scaling are those of transformers", "[rope]") {
    // transformers 5.23, ROPE_INIT_FUNCTIONS["linear"] and ["dynamic"]: theta 10000, head size 64; dynamic with
    // max_position_embeddings 4096, below and above which T lies. Points 1, 16 and 31.
    const RopeScaling linear{.factor = 2.5, .kind = RopeKind::linear};
    const auto dynamic = [](double factor) {
        return RopeScaling{.factor = factor, .original_max_position = 4096, .kind = RopeKind::dynamic};
    };
    struct Golden {
        RopeScaling scaling;
        int64_t T;
        double w1, w16, w31;
    };
    const Golden all[] = {
        {linear, 100, 0.2999576926231384, 0.003999999724328518, 5.3340860176831484e-05},
        {dynamic(2), 1000, 0.7498942017555237, 0.009999999776482582, 0.0001333521504420787},
        {dynamic(2), 4096, 0.7498942017555237, 0.009999999776482582, 0.0001333521504420787},
        {dynamic(2), 4097, 0.7498824000358582, 0.009997480548918247, 0.00013328705972526222},
        {dynamic(2), 20000, 0.6991778612136841, 0.003261387348175049, 1.5213078768283594e-05},
        {dynamic(1), 8192, 0.7333129644393921, 0.006992454640567303, 6.667607522103935e-05},
    };
    for (const auto& [scaling, T, w1, w16, w31] : all) {
        INFO("kind " << static_cast<int>(scaling.kind) << ", T " << T);
        const auto frequencies = rope_frequencies(64, 10000, scaling, T);
        CHECK(frequencies[0] == (scaling.kind == RopeKind::linear ? 1 / 2.5 : 1.0));
        // As for llama3, transformers computes powers in float32; dynamic's base is one of them, raised to at most 1
        // again.
        CHECK(frequencies[1] == Approx(w1).epsilon(40 * 0x1p-24));
        CHECK(frequencies[16] == Approx(w16).epsilon(40 * 0x1p-24));
        CHECK(frequencies[31] == Approx(w31).epsilon(40 * 0x1p-24));
    }
    // The slowest point is slowed by exactly factor T/P - (factor - 1), here 2 * 3 - 1.
    const double slowest = rope_frequencies(64, 10000, {}).back();
    CHECK(rope_frequencies(64, 10000, dynamic(2), 3 * 4096).back() == Approx(slowest / 5).epsilon(1e-13));
    CHECK_THROWS_WITH(rope_frequencies(2, 10000, dynamic(2), 8192), ContainsSubstring("head size above 2"));
}

TEST_CASE("rope names what is wrong", "[rope]") {
    Buffer qkv(DType::f32, {2, 3, 5 * 6}), table(DType::f32, {3, 6}), short_table(DType::f32, {2, 6}),
        half(DType::f16, {3, 6});
    Buffer wide_table(DType::f32, {3, 8}), odd(DType::f32, {2, 3, 5 * 3}), flat(DType::f32, {6, 30}),
        whole(DType::i32, {2, 3, 30}), long_row(DType::f32, {181});
    Tensor shifted = make_tensor(static_cast<char*>(long_row.tensor().data) + 4, DType::f32, {2, 3, 30});
    cudaStream_t stream = device().stream;
    CHECK_THROWS_WITH(rope_forward(qkv, {}, table, 3, 2, stream),
                      ContainsSubstring("rope_forward: H = 3 query heads are not a multiple of K = 2"));
    CHECK_THROWS_WITH(rope_forward(qkv, {}, table, 4, 2, stream),
                      ContainsSubstring("rope_forward: qkv has 30 columns"));
    CHECK_THROWS_WITH(rope_forward(odd, {}, table, 3, 1, stream), ContainsSubstring("with an even D"));
    CHECK_THROWS_WITH(
        rope_forward(qkv, {}, short_table, 3, 1, stream),
        ContainsSubstring("rope_forward: table is f32 (2, 6), expected a row for each of T = 3 positions"));
    CHECK_THROWS_WITH(rope_forward(qkv, {}, wide_table, 3, 1, stream),
                      ContainsSubstring("rope_forward: table is f32 (3, 8), expected f32 (*, 6)"));
    CHECK_THROWS_WITH(rope_forward(qkv, {}, half, 3, 1, stream), ContainsSubstring("rope_forward: table is f16"));
    CHECK_THROWS_WITH(rope_forward(flat, {}, table, 3, 1, stream), ContainsSubstring("rope_forward: qkv is"));
    CHECK_THROWS_WITH(rope_forward(whole, {}, table, 3, 1, stream), ContainsSubstring("i32"));
    CHECK_THROWS_WITH(rope_backward(shifted, {}, table, 3, 1, stream),
                      ContainsSubstring("rope_backward: dqkv starts at"));
    CHECK_THROWS_WITH(rope_forward(qkv, table, table, 3, 1, stream),
                      ContainsSubstring("rope_forward: positions is f32 (3, 6), expected i32 (2, 3)"));
    CHECK_THROWS_WITH(rope_frequencies(7, 10000, {}), ContainsSubstring("D = 7 is not even"));
    CHECK_THROWS_WITH(rope_frequencies(8, -1, {}), ContainsSubstring("base = -1"));
    CHECK_THROWS_WITH(rope_frequencies(8, 10000, {8.0, 4.0, 4.0, 8192}), ContainsSubstring("low_freq_factor = 4"));
    CHECK_THROWS_WITH(rope_table(table, rope_frequencies(8, 10000, {})),
                      ContainsSubstring("rope_table: table is f32 (3, 6), expected f32 (*, 8)"));
}
