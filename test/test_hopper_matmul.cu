// test/test_hopper_matmul.cu: our product for Hopper against float64, with everything that may follow it. The CPU
// device computes its instructions one by one (test_ptx_hopper.cu).
#include "layers/hopper_matmul.h"

#include "reference.h"

namespace {

using Values = std::vector<double>;

#define NEEDS_HOPPER \
    if (!has_wgmma()) SKIP_TEST("needs a GPU of compute capability 9.0")

struct Size {
    int64_t M, N, K;
};
// One number of a tile, one tile, several of which the last ones are parts, and several for each block of the CPU
// device.
const Size kSizes[] = {{1, 8, 8}, {128, 256, 64}, {130, 264, 72}, {300, 520, 328}, {70, 2056, 136}};
const DType kHalfDTypes[] = {DType::bf16, DType::f16};

// a (M, K) b (K, N).
Values product(const Values& a, const Values& b, const Size& s) {
    Values out(static_cast<size_t>(s.M * s.N));
    for (int64_t m = 0; m < s.M; ++m)
        for (int64_t k = 0; k < s.K; ++k) {
            const double x = a[static_cast<size_t>(m * s.K + k)], *row = &b[static_cast<size_t>(k * s.N)];
            double* sums = &out[static_cast<size_t>(m * s.N)];
#pragma omp simd  // tests are compiled without vectorised loops
            for (int64_t n = 0; n < s.N; ++n) sums[n] += x * row[n];
        }
    return out;
}

// Random operands of a product of size 1, as they lie in device memory, and what they multiply to.
struct Operands {
    Values a_values, b_values, expected;
    Buffer a, b;
    // Of a sum in float32: K terms of size 1 / sqrt(K), in whatever order. A GPU cuts it off after every 16 products:
    // half a bit too much each time, 2^-24 of a sum of size 1 to 2.
    double error;
    Operands(const Size& s, DType dtype, bool transpose_a, bool transpose_b)
        : a_values(rounded(random_values(s.M * s.K, 1), dtype)),
          b_values(rounded(random_values(s.K * s.N, 2, 1 / std::sqrt(static_cast<double>(s.K))), dtype)),
          expected(product(a_values, b_values, s)), a(dtype, {transpose_a ? s.K : s.M, transpose_a ? s.M : s.K},
                                                      transpose_a ? transposed(a_values, s.M, s.K) : a_values),
          b(dtype, {transpose_b ? s.N : s.K, transpose_b ? s.K : s.N},
            transpose_b ? transposed(b_values, s.K, s.N) : b_values),
          error(4 * sum_error(s.K) + static_cast<double>(s.K) / 16 * 0x1p-24) {}
};

std::string name(const char* what, const Size& s, DType dtype) {
    return concat(what, ", ", dtype_name(dtype), " ", s.M, " x ", s.N, " x ", s.K);
}

}  // namespace

TEST_CASE("hopper matmul: a product and a bias", "[hopper_matmul][shapes][hopper][matmul]") {
    NEEDS_HOPPER;
    for (const Size& s : kSizes)
        for (const bool transpose_b : {false, true})
            for (DType dtype : kHalfDTypes) {
                const Operands x(s, dtype, false, transpose_b);
                const Values bias = rounded(random_values(s.N, 3), dtype);
                Buffer out(dtype, {s.M, s.N}), bias_buffer(dtype, {s.N}, bias);
                const auto check = [&](double alpha, bool has_bias) {
                    MatmulOptions options{.transpose_b = transpose_b, .alpha = static_cast<float>(alpha)};
                    if (has_bias) options.bias = bias_buffer;
                    hopper_matmul(out, x.a, x.b, options, device().stream);
                    Values expected = x.expected;
                    for (size_t i = 0; i < expected.size(); ++i)
                        expected[i] = alpha * expected[i] + (has_bias ? bias[i % bias.size()] : 0);
                    check_close(out.values(), expected, unit_roundoff(dtype), x.error + 0x1p-22,
                                name(has_bias ? "bias" : "plain", s, dtype));
                };
                check(1, false);
                check(0.5, false);
                if (!transpose_b) continue;
                check(1, true);
                check(-0.75, true);
            }
}

TEST_CASE("hopper matmul: a batch of one", "[hopper_matmul][hopper][matmul]") {
    NEEDS_HOPPER;
    const Size s{130, 264, 72};
    const Operands x(s, DType::bf16, false, true);
    for (DType out_dtype : {DType::bf16, DType::f32}) {  // f32: the product that may be cut
        Buffer result(out_dtype, {1, s.M, s.N});
        hopper_matmul(result, x.a.tensor().view({1, s.M, s.K}), x.b.tensor().view({1, s.N, s.K}), {.transpose_b = true},
                      device().stream);
        check_close(result.values(), x.expected, unit_roundoff(out_dtype), x.error + 0x1p-22, dtype_name(out_dtype));
    }
}

TEST_CASE("hopper matmul: GELU of a product", "[hopper_matmul][shapes][hopper][matmul][counted]") {
    NEEDS_HOPPER;
    for (const Size& s : kSizes)
        for (DType dtype : kHalfDTypes)
            for (const bool has_bias : {false, true}) {
                const Operands x(s, dtype, false, true);
                const Values bias = rounded(random_values(s.N, 3, 2), dtype);
                Buffer out(dtype, {s.M, s.N}), before(dtype, {s.M, s.N}), bias_buffer(dtype, {s.N}, bias);
                MatmulOptions options{.transpose_b = true, .before_gelu = before};
                if (has_bias) options.bias = bias_buffer;
                hopper_matmul(out, x.a, x.b, options, device().stream);
                Values expected = x.expected;
                if (has_bias)
                    for (size_t i = 0; i < expected.size(); ++i) expected[i] += bias[i % bias.size()];
                const double u = unit_roundoff(dtype);
                check_close(before.values(), expected, u, x.error + 0x1p-22, name("before gelu", s, dtype));
                // gelu of the rounded numbers; below 2^-14 fp16 has fewer digits
                Values y = before.values();
                for (double& v : y) v = gelu(v);
                check_close(out.values(), y, u + 0x1p-20, 0x1p-24, name("gelu", s, dtype));
            }
}

TEST_CASE("hopper matmul: a product with GELU's derivative", "[hopper_matmul][shapes][hopper][matmul][counted]") {
    NEEDS_HOPPER;
    for (const Size& s : kSizes)
        for (DType dtype : kHalfDTypes) {
            const Operands x(s, dtype, false, false);
            const Values at = rounded(random_values(s.M * s.N, 3, 3), dtype);
            Buffer out(dtype, {s.M, s.N}), inp(dtype, {s.M, s.N}, at);
            hopper_matmul(out, x.a, x.b, {.gelu_input = inp}, device().stream);
            Values expected = x.expected;
            for (size_t i = 0; i < expected.size(); ++i) expected[i] *= gelu_derivative(at[i]);
            // Two roundings; the derivative has an absolute error of 36 2^-23 and is at most 1.13.
            const double u = unit_roundoff(dtype);
            check_close(out.values(), expected, 2 * u + u * u,
                        1.13 * x.error + 36 * 0x1p-23 * largest(x.expected) + 0x1p-22, name("gelu'", s, dtype));
        }
}

// As PyTorch's, whose square of x is finite up to 1.8e19.
TEST_CASE("hopper matmul: GELU's derivative is 0 or 1 at large numbers", "[hopper_matmul][hopper][matmul]") {
    NEEDS_HOPPER;
    const Values large = {1e2, 1e4, 6e4, 1e12, 2e13, 1e15, 1e18, 1.5e19};
    for (DType dtype : kHalfDTypes) {
        Values at;
        for (double x : large)
            if (dtype == DType::bf16 || x < 65504) at.insert(at.end(), {x, -x});
        at.resize(16);
        const Size s{1, std::ssize(at), 8};
        const Values ones(static_cast<size_t>(s.K * s.N), 1);
        Buffer a(dtype, {s.M, s.K}, {1, 1, 1, 1, 1, 1, 1, 1}), b(dtype, {s.K, s.N}, ones), inp(dtype, {s.M, s.N}, at),
            out(dtype, {s.M, s.N});
        hopper_matmul(out, a, b, {.gelu_input = inp}, device().stream);
        Values expected;
        for (double x : at) expected.push_back(x > 0 ? 8 : x < 0 ? 0 : 4);
        CHECK(out.values() == expected);
    }
}

TEST_CASE("hopper matmul: the gradient of attention's output, and its delta",
          "[hopper_matmul][shapes][hopper][matmul][counted]") {
    NEEDS_HOPPER;
    struct Heads {
        int64_t B, T, H, K;
    };
    // Rows of several sequences in one tile, sequences of fewer rows than a warp has at a time, three heads a tile and
    // fewer; more zeros than threads.
    for (const Heads& h : {Heads{2, 33, 3, 40}, {1, 130, 5, 72}, {30, 3, 1, 16}, {3, 61, 7, 24}})
        for (DType dtype : kHalfDTypes) {
            const Size s{h.B * h.T, h.H * 64, h.K};
            const Operands x(s, dtype, false, false);
            const Values at = rounded(random_values(s.M * s.N, 3), dtype);
            Buffer out(dtype, {s.M, s.N}), alone(dtype, {s.M, s.N}), attended(dtype, {s.M, s.N}, at),
                delta(DType::f32, {h.B, h.H, h.T}), zeros(DType::i32, {1111});
            zeros.set_integers(std::vector<int32_t>(1111, 7));
            hopper_matmul(out, x.a, x.b, {.attended = attended, .delta = delta, .zeros = zeros}, device().stream);
            hopper_matmul(alone, x.a, x.b, {}, device().stream);
            check_close(out.values(), x.expected, unit_roundoff(dtype), x.error + 0x1p-22, name("dout", s, dtype));
            CHECK((out.bits() == alone.bits()));
            const Values dy = out.values();
            Values expected(static_cast<size_t>(s.M * h.H));
            for (int64_t m = 0; m < s.M; ++m)
                for (int64_t n = 0; n < s.N; ++n)
                    expected[static_cast<size_t>((m / h.T * h.H + n / 64) * h.T + m % h.T)] +=
                        dy[static_cast<size_t>(m * s.N + n)] * at[static_cast<size_t>(m * s.N + n)];
            // A product of two 16-bit numbers is exact, or almost; their sum has seven rounds.
            const double largest_term = largest(dy) * largest(at);
            check_close(delta.values(), expected, 0, 64 * largest_term * 8 * 0x1p-24, name("delta", s, dtype));
            CHECK((zeros.bits() == std::vector<unsigned char>(4 * 1111, 0)));
        }
}

TEST_CASE("hopper matmul says what it takes", "[hopper_matmul][hopper][matmul]") {
    NEEDS_HOPPER;
    Product good{};
    good.M = 70, good.N = 24, good.K = 16, good.batch_count = 1;
    good.a_dtype = good.b_dtype = good.out_dtype = DType::bf16, good.epilogue = Epilogue::gelu_derivative;
    CHECK(hopper_matmul_takes(good));
    const auto takes = [&](auto change) {
        Product product = good;
        change(product);
        return hopper_matmul_takes(product);
    };
    CHECK(takes([](Product& p) { p.a_dtype = p.b_dtype = p.out_dtype = DType::f16; }));
    CHECK_FALSE(takes([](Product& p) { p.a_dtype = p.b_dtype = p.out_dtype = DType::f32; }));
    CHECK_FALSE(takes([](Product& p) { p.b_dtype = DType::f16; }));
    CHECK_FALSE(takes([](Product& p) { p.N = 20; }));
    CHECK_FALSE(takes([](Product& p) { p.K = 20; }));
    CHECK_FALSE(takes([](Product& p) { p.batch_count = 2; }));
    CHECK_FALSE(takes([](Product& p) { p.transpose_a = true; }));
    const auto delta = [](Product& p) { p.epilogue = Epilogue::delta, p.N = 192, p.head_size = 64; };
    CHECK(takes(delta));
    CHECK_FALSE(takes([&](Product& p) { delta(p), p.head_size = 48; }));
    const auto row_sums = [](Product& p) { p.epilogue = Epilogue::row_sums, p.M = 72, p.transpose_a = true; };
    CHECK(takes(row_sums));
    CHECK(takes([&](Product& p) { row_sums(p), p.out_dtype = DType::f32; }));
    CHECK_FALSE(takes([&](Product& p) { row_sums(p), p.transpose_a = false; }));
    CHECK_FALSE(takes([&](Product& p) { row_sums(p), p.M = 70; }));
}

TEST_CASE("hopper matmul says what it launches", "[hopper_matmul][hopper][matmul][counted]") {
    NEEDS_HOPPER;
    const int64_t M = 130, N = 24, K = 16;
    Buffer a(DType::bf16, {M, K}, Values(M * K, 1.0)), b(DType::bf16, {K, N}, Values(K * N, 1.0)),
        x(DType::bf16, {M, N}, Values(M * N, 0.0)), out(DType::bf16, {M, N});
    LaunchNotes notes;
    hopper_matmul(out, a, b, {.gelu_input = x}, device().stream);
    CHECK(out.values() == Values(M * N, 8.0));  // 16, times a derivative of 1/2
    REQUIRE(notes.launches.size() == 1);
    CHECK(notes.launches[0].kernel == "hopper_matmul_kernel");
    CHECK(notes.launches[0].cost.reads == 2 * (M * K + K * N + M * N));
    CHECK(notes.launches[0].cost.writes == 2 * M * N);
    CHECK(notes.launches[0].cost.flops == 2.0 * M * N * K);

    Buffer bias(DType::bf16, {N}, Values(N, 1.0)), b_transposed(DType::bf16, {N, K}, Values(K * N, 1.0));
    hopper_matmul(out, a, b, {}, device().stream);
    CHECK(out.values() == Values(M * N, 16.0));
    hopper_matmul(out, a, b_transposed, {.transpose_b = true, .bias = bias}, device().stream);
    CHECK(out.values() == Values(M * N, 17.0));
    REQUIRE(notes.launches.size() == 3);
    CHECK(notes.launches[1].cost.reads == 2 * (M * K + K * N));
    CHECK(notes.launches[2].cost.reads == 2 * (M * K + K * N + N));
    for (const size_t i : {1, 2}) CHECK(notes.launches[i].cost.writes == 2 * M * N);
}

namespace {

struct LongProduct {
    Size size;
    int multiprocessors;
    const char* what;
};
const LongProduct kCuts[] = {
    {{40, 72, 88}, 2, "one tile, whole"},
    {{264, 520, 72}, 2, "tiles in rounds"},
    {{128, 256, 2952}, 3, "one tile in three pieces"},
    {{136, 256, 5832}, 3, "two tiles in three pieces: the second piece lies in both"},
    {{128, 520, 4232}, 7, "three tiles in seven pieces: some lie inside of one"},
    {{72, 1032, 5832}, 3, "a round of whole tiles, and two tiles in three pieces"},
    {{128, 256, 2056}, 132, "fewer steps than multiprocessors"},
    {{128, 512, 2056}, 132, "two tiles, and fewer steps than multiprocessors"},
};

}  // namespace

TEST_CASE("hopper matmul: a long K is cut", "[hopper_matmul][shapes][hopper][matmul]") {
    NEEDS_HOPPER;
    for (size_t i = 0; i < std::size(kCuts); ++i)
        for (DType dtype : kHalfDTypes)
            for (int transposes = 0; transposes < 4; ++transposes) {
                const LongProduct& cut = kCuts[i];
                const bool transpose_a = transposes & 1, transpose_b = transposes & 2, is_f16 = dtype == DType::f16;
                if (!transpose_a && !transpose_b && cut.size.K < 100) continue;  // that is not cut: above
                // Each long cut has each format and each pair of transposes, and each two of these meet in one of the
                // cuts. The longest ones, which take seconds, have one combination.
                const bool first = !is_f16 && transpose_a && !transpose_b;
                if (cut.size.K > 3000 && !first) continue;
                if (cut.size.K > 100 && is_f16 != (i % 4 == 2 ? transposes % 3 > 0 : transposes % 3 == 0)) continue;
                // Each cut and each combination of formats and transposes has both kinds of results, in turns.
                const bool to_float = (i + static_cast<size_t>(transposes) + is_f16) % 2;
                const DType out_dtype = to_float ? DType::f32 : dtype;
                const Size& s = cut.size;
                const Multiprocessors so_many(cut.multiprocessors);
                const Operands x(s, dtype, transpose_a, transpose_b);
                const Values before = rounded(random_values(s.M * s.N, 3), out_dtype);
                Buffer out(out_dtype, {s.M, s.N}), sums(out_dtype, {s.M});
                MatmulOptions options{.transpose_a = transpose_a, .transpose_b = transpose_b};
                if (transpose_a) options.a_row_sums = sums;
                const double u = to_float ? 0 : unit_roundoff(out_dtype);
                const std::string what =
                    concat(name(cut.what, s, dtype), " to ", dtype_name(out_dtype), " ", transposes);
                hopper_matmul(out, x.a, x.b, options, device().stream);
                check_close(out.values(), x.expected, u, x.error + 0x1p-22, what);
                if (transpose_a) {
                    Values expected(static_cast<size_t>(s.M));
                    for (size_t k = 0; k < x.a_values.size(); ++k)
                        expected[k / static_cast<size_t>(s.K)] += x.a_values[k];
                    const double size = 4 * std::sqrt(static_cast<double>(s.K));
                    check_close(sums.values(), expected, u, sum_error(s.K) * size + 0x1p-22, what + ": row sums");
                }
                if (cut.size.K > 5000 && cut.size.N > 1000) continue;  // and those added to: shorter cuts
                const std::vector<unsigned char> bits = out.bits();
                options.beta = 1.0f, options.alpha = -0.5f, options.a_row_sums = {};
                out.set(before);
                hopper_matmul(out, x.a, x.b, options, device().stream);
                Values expected = x.expected;
                for (size_t k = 0; k < expected.size(); ++k) expected[k] = before[k] - 0.5 * expected[k];
                check_close(out.values(), expected, u, x.error + 4 * 0x1p-22, what + ", added");
                if (transposes != 1) continue;  // once for each cut
                options.beta = 0.0f, options.alpha = 1.0f;
                hopper_matmul(out, x.a, x.b, options, device().stream);
                CHECK((out.bits() == bits));
            }
    check_counters();
}

TEST_CASE("hopper matmul: the parts of a product", "[hopper_matmul][hopper][matmul][counted]") {
    NEEDS_HOPPER;
    const Multiprocessors three(3);
    const int64_t M = 72, N = 264, K = 6144;  // two tiles of 96 steps in three pieces, four parts
    Buffer a(DType::bf16, {K, M}, Values(K * M, 1.0)), b(DType::bf16, {K, N}, Values(K * N, 0.5)),
        out(DType::f32, {M, N}), sums(DType::f32, {M});
    LaunchNotes notes;
    hopper_matmul(out, a, b, {.transpose_a = true, .a_row_sums = sums}, device().stream);
    CHECK(out.values() == Values(M * N, 3072.0));
    CHECK(sums.values() == Values(M, 6144.0));
    const int64_t parts = 4 * 4 * 128 * (256 + 1), tile_sums = 4 * 2 * 128;  // with row sums of parts; those of tiles
    const int64_t counters = 4 * 2 * (2 + 1);  // of two tiles and a row of tiles, a consumer
    REQUIRE(notes.launches.size() == 1);
    CHECK(notes.launches[0].kernel == "hopper_matmul_split_kernel");
    CHECK(notes.launches[0].cost.reads == 2 * K * (M + N) + parts + 4 * 2 * M + counters);
    CHECK(notes.launches[0].cost.writes == 4 * M * (N + 1) + parts + tile_sums + counters);
    CHECK(notes.launches[0].cost.scratch == 2 * parts + tile_sums + 4 * 2 * M);
    CHECK(notes.launches[0].cost.flops == 2.0 * M * N * K);
}

// Of out's columns the last tile has few, and that tile is cut: the others are not.
TEST_CASE("hopper matmul: the parts of the last tile of a row", "[hopper_matmul][hopper][matmul][counted]") {
    NEEDS_HOPPER;
    const Multiprocessors two(2);
    const int64_t M = 72, N = 520, K = 4000;  // three tiles of 63 steps: a round of two, and one in two pieces
    Buffer a(DType::bf16, {K, M}, Values(K * M, 1.0)), b(DType::bf16, {K, N}, Values(K * N, 0.5)),
        out(DType::f32, {M, N}, Values(M * N, 1.0));
    LaunchNotes notes;
    hopper_matmul(out, a, b, {.transpose_a = true, .beta = 1.0f}, device().stream);
    CHECK(out.values() == Values(M * N, 2001.0));
    const int64_t parts = 2 * 4 * 128 * 256;
    REQUIRE(notes.launches.size() == 1);
    CHECK(notes.launches[0].cost.reads == 2 * K * (M + N) + 4 * M * N + parts + 4 * 2);  // two counters
    CHECK(notes.launches[0].cost.writes == 4 * M * N + parts + 4 * 2);
}
