// test/test_matmul.cu: the matrix product against float64, in every combination of its options.
#include "layers/layers.h"
#include "reference.h"

#include <algorithm>
#include <memory>
#include <sstream>

namespace {

using Values = std::vector<double>;

struct Size {
    int64_t batch, M, N, K;
};
// batch 0: no batch dimension. Odd sizes put every second row, and every second matrix of a batch, on odd addresses.
const Size kSizes[] = {{0, 1, 1, 1}, {0, 3, 5, 7}, {0, 33, 65, 17}, {0, 1, 100, 33}, {0, 130, 7, 260},
                       {1, 4, 6, 2}, {3, 5, 3, 9}, {2, 33, 17, 48}, {7, 16, 24, 8}};

// The (batch, rows, cols) matrices of x, or their transposes, element (b, i, j).
double element(const Values& x, bool transposed, int64_t rows, int64_t cols, int64_t b, int64_t i, int64_t j) {
    return x[static_cast<size_t>(b * rows * cols + (transposed ? j * rows + i : i * cols + j))];
}

Values product(const Size& s, const Values& a, const Values& b, const Values& before, const Values& bias,
               const MatmulOptions& o) {
    Values out(before.size());
    size_t at = 0;
    for (int64_t n = 0; n < std::max<int64_t>(s.batch, 1); ++n)
        for (int64_t i = 0; i < s.M; ++i)
            for (int64_t j = 0; j < s.N; ++j, ++at) {
                double sum = 0;
                for (int64_t k = 0; k < s.K; ++k)
                    sum += element(a, o.transpose_a, s.M, s.K, n, i, k) * element(b, o.transpose_b, s.K, s.N, n, k, j);
                out[at] = double{o.alpha} * sum + (o.beta == 0 ? 0.0 : double{o.beta} * before[at]);
                if (!bias.empty()) out[at] += bias[static_cast<size_t>(j)];
            }
    return out;
}

// The tensor without its batch dimension of 0.
Tensor shaped(const Tensor& x, int64_t batch, int64_t rows, int64_t cols) {
    return batch == 0 ? x.view({rows, cols}) : x.view({batch, rows, cols});
}

// cuBLASLt on an H100 rounds some products to a 16-bit out before it adds to them (a bias to rows off 16 bytes, an old
// out with beta = 1, fp8 with scales of blocks), and then the sum: one rounding more, of |product| <= |out| + |addend|.
struct Roundings {
    double relative, absolute;
    Roundings(DType out_dtype, double largest_addend)
        : relative(unit_roundoff(out_dtype)), absolute(relative * largest_addend) {
        if (device().is_cpu || out_dtype == DType::f32 || largest_addend == 0) absolute = 0;
        else relative *= 2;
    }
};

void check_product(const Size& s, DType dtype, DType out_dtype, MatmulOptions o, bool with_bias,
                   decltype(matmul)& multiply = matmul) {
    const int64_t batch = std::max<int64_t>(s.batch, 1);
    const Values a = rounded(random_values(batch * s.M * s.K, 1), dtype),
                 b = rounded(random_values(batch * s.K * s.N, 2), dtype);
    const Values before = rounded(random_values(batch * s.M * s.N, 3), out_dtype);
    const Values bias = with_bias ? rounded(random_values(s.N, 4), out_dtype) : Values{};
    Buffer left(dtype, {batch * s.M * s.K}, a), right(dtype, {batch * s.K * s.N}, b),
        out(out_dtype, {batch * s.M * s.N});
    Buffer bias_buffer(out_dtype, {s.N});
    if (o.beta != 0) out.set(before);  // otherwise it stays uninitialised, and in strict mode NaN: it must not be read
    if (with_bias) bias_buffer.set(bias), o.bias = bias_buffer;
    multiply(shaped(out, s.batch, s.M, s.N),
             shaped(left, s.batch, o.transpose_a ? s.K : s.M, o.transpose_a ? s.M : s.K),
             shaped(right, s.batch, o.transpose_b ? s.N : s.K, o.transpose_b ? s.K : s.N), o, device().stream);
    // K products of normal numbers, whose sum grows like sqrt(K), in float32; one rounding to the output's type.
    const Roundings u(out_dtype, &multiply == &plain_matmul ? 0
                                 : with_bias                ? largest(bias)
                                                            : std::abs(double{o.beta}) * largest(before));
    check_close(out.values(), product(s, a, b, before, bias, o), u.relative,
                sum_error(s.K) * 4 * std::sqrt(static_cast<double>(s.K)) * (1 + std::abs(double{o.beta})) + 0x1p-25 +
                    u.absolute,
                concat("matmul ", dtype_name(dtype), " to ", dtype_name(out_dtype), ", batch ", s.batch, ", M ", s.M,
                       ", N ", s.N, ", K ", s.K, o.transpose_a ? ", a^T" : "", o.transpose_b ? ", b^T" : "", ", alpha ",
                       o.alpha, ", beta ", o.beta, with_bias ? ", bias" : ""));
}

// check(size, dtype, out_dtype, options) for all sizes and types, with either factor transposed and not.
template <class F>
void for_each_product(F&& check) {
    for (const Size& s : kSizes)
        for (DType dtype : kFloatDTypes)
            for (DType out_dtype : {dtype, DType::f32})
                for (int transposes = 0; transposes < 4; ++transposes) {
                    MatmulOptions o;
                    o.transpose_a = transposes & 1, o.transpose_b = transposes & 2;
                    check(s, dtype, out_dtype, o);
                }
}

}  // namespace

TEST_CASE("matmul against float64", "[matmul]") {
    for_each_product([](const Size& s, DType dtype, DType out_dtype, MatmulOptions o) {
        check_product(s, dtype, out_dtype, o, false);
        check_product(s, dtype, out_dtype, o, true);
        o.alpha = 0.5f, o.beta = 1.0f;
        check_product(s, dtype, out_dtype, o, false);
        o.alpha = -1.5f, o.beta = 2.0f;
        check_product(s, dtype, out_dtype, o, false);
    });
}

// Products that cuBLASLt has no algorithm for, and of which float32 sums are in one order.
TEST_CASE("plain matmul against float64", "[matmul][counted]") {
    for_each_product([](const Size& s, DType dtype, DType out_dtype, MatmulOptions o) {
        check_product(s, dtype, out_dtype, o, true, plain_matmul);
        o.alpha = -1.5f, o.beta = 2.0f;
        check_product(s, dtype, out_dtype, o, false, plain_matmul);
    });
}

namespace {

// Forgets what was chosen when a test ends.
struct Choices {
    explicit Choices(const std::string& text) { set_matmul_choices(text); }
    ~Choices() { set_matmul_choices(""); }
};

struct Epilogues {
    std::vector<unsigned char> out, before, dout, sums, sum_product;
};

// The epilogues against float64, at a size with 8 columns for each row of AUX and one without.
Epilogues check_epilogues(DType dtype, int64_t M, int64_t N, int64_t K, const std::string& way) {
    const double u = unit_roundoff(dtype);
    const double sum = sum_error(K) * 4 * std::sqrt(static_cast<double>(K)) + 0x1p-25;
    const std::string what = concat(way, " ", dtype_name(dtype), " ", M, " x ", N, " x ", K);
    const Values a = rounded(random_values(M * K, 1), dtype), b = rounded(random_values(K * N, 2, 0.2), dtype),
                 bias = rounded(random_values(N, 3), dtype), x = rounded(random_values(M * N, 4), dtype);
    Buffer left(dtype, {M, K}, a), right(dtype, {K, N}, b), bias_buffer(dtype, {N}, bias), inp(dtype, {M, N}, x);
    Buffer out(dtype, {M, N}), before(dtype, {M, N}), dout(dtype, {M, N}), sums(dtype, {K}), sum_product(dtype, {K, N});
    Buffer scratch(DType::f32, {column_sum_scratch_n(M, K)}), rows(dtype, {M, N}, x);
    const auto s = device().stream;

    const Values plain = product({0, M, N, K}, a, b, Values(x.size()), {}, {});
    const Values with_bias = product({0, M, N, K}, a, b, Values(x.size()), bias, {});
    matmul(out, left, right, {.bias = bias_buffer, .before_gelu = before}, s);
    const Roundings biased(dtype, largest(bias));
    check_close(before.values(), with_bias, biased.relative, sum + biased.absolute, what + ": before gelu");
    // |gelu'| < 1.13; in 16 bits gelu may be of the sum or of the rounded sum.
    Values expected = with_bias;
    for (double& v : expected) v = gelu(v);
    check_close(out.values(), expected, 2 * u + biased.relative + 0x1p-20,
                1.2 * (sum + biased.absolute) + 4 * u + 0x1p-20, what + ": gelu");

    matmul(dout, left, right, {.gelu_input = inp}, s);
    expected = plain;
    for (size_t i = 0; i < x.size(); ++i) expected[i] *= gelu_derivative(x[i]);
    // NVIDIA's derivative in float32 keeps fewer digits than ours: on an H100 it was off by 1.5e-5 at x = -3.5.
    const double slope = device().is_cpu ? 0 : 0x1p-15 * largest(plain);
    check_close(dout.values(), expected, 3 * u + 0x1p-20, 1.2 * sum + slope + 0x1p-20, what + ": gelu'");

    // out (K, N) = left^T rows: the sums are over the M rows of left, as a bias gradient's.
    matmul(sum_product, left, rows, {.transpose_a = true, .a_row_sums = sums, .scratch = scratch}, s);
    Values column(static_cast<size_t>(K));
    for (int64_t m = 0; m < M; ++m)
        for (int64_t k = 0; k < K; ++k) column[static_cast<size_t>(k)] += a[static_cast<size_t>(m * K + k)];
    const double long_sum = sum_error(M) * 4 * std::sqrt(static_cast<double>(M)) + 0x1p-25;
    check_close(sums.values(), column, u, long_sum, what + ": sums");
    MatmulOptions transposed{.transpose_a = true};
    check_close(sum_product.values(), product({0, K, N, M}, a, x, Values(static_cast<size_t>(K * N)), {}, transposed),
                u, long_sum, what + ": product beside sums");
    return {out.bits(), before.bits(), dout.bits(), sums.bits(), sum_product.bits()};
}

}  // namespace

TEST_CASE("matmul: what follows a product, in its epilogue and by kernels", "[matmul]") {
    for (DType dtype : kFloatDTypes)
        for (const int64_t N : {40, 37}) {  // 37: cuBLASLt wants rows of AUX that are multiples of 8
            const int64_t M = 70, K = 24;
            const Epilogues fused = check_epilogues(dtype, M, N, K, "epilogue");
            const std::string type = dtype_name(dtype), types = type + " " + type + " " + type;
            const std::string size = concat(M, "x", N, "x", K, " ", types, " nn ");
            const Choices in_parts(size + "bias_gelu: parts\n" + size + "gelu_derivative: parts\n" +
                                   concat(K, "x", N, "x", M, " ", types, " tn row_sums: parts\n"));
            LaunchNotes notes;
            const Epilogues parts = check_epilogues(dtype, M, N, K, "parts");
            std::vector<std::string> kernels;
            for (const NotedLaunch& launch : notes.launches) kernels.push_back(launch.kernel);
            CHECK(std::count(kernels.begin(), kernels.end(), "matmul") == 3);
            CHECK(std::count(kernels.begin(), kernels.end(), "gelu_forward_kernel") == 1);
            CHECK(std::count(kernels.begin(), kernels.end(), "gelu_backward_kernel") == 1);
            CHECK(std::count(kernels.begin(), kernels.end(), "column_sum_kernel") == 1);
            // What can be computed again from what is kept has the same bits (selective recomputation). On a GPU a
            // product with another epilogue may be another algorithm's: both have been held against float64.
            if (!device().is_cpu) continue;
            CHECK((parts.out == fused.out));
            if (dtype == DType::f32) CHECK((parts.dout == fused.dout));
            CHECK((parts.before == fused.before));
            CHECK((parts.sum_product == fused.sum_product));
        }
}

TEST_CASE("matmul: ours for Hopper, where it is chosen and takes the product", "[matmul][choices][hopper]") {
    const int64_t M = 72, N = 40, K = 24;
    for (const DType dtype : kFloatDTypes) {
        const std::string type = dtype_name(dtype), types = type + " " + type + " " + type;
        const std::string size = concat(M, "x", N, "x", K, " ", types, " nn ");
        const std::string last = concat(K, "x", N, "x", M, " ", types, " tn ");
        const Choices ours(size + "bias_gelu: hopper\n" + size + "gelu_derivative: hopper\n" + last +
                           "row_sums: hopper\n");
        CHECK_THAT(matmul_choices(), ContainsSubstring(last + "row_sums: hopper\n"));
        LaunchNotes notes;
        check_epilogues(dtype, M, N, K, "hopper");
        int64_t products = 0, of_ours = 0;
        for (const NotedLaunch& launch : notes.launches) {
            products += launch.kernel == "matmul";
            of_ours += launch.kernel.starts_with("hopper_matmul");
        }
        // GELU is of products with transposed weights; float32 is multiplied without tensor cores.
        CHECK(of_ours == (has_wgmma() && dtype != DType::f32 ? 2 : 0));
        CHECK(products == 3 - of_ours);
    }
}

// As in an account of a step on a Hopper GPU that is not here: the launches are recorded, and never run.
TEST_CASE("matmul: as on Hopper, large products with an epilogue are ours where it takes them", "[matmul][hopper]") {
    if (!device().is_cpu) SKIP_TEST("a GPU multiplies as what it is");
    const cudaStream_t stream = device().stream;
    const int64_t most = 512;
    const auto is_ours = [&](DType dtype, int64_t K, bool with_gelu) {
        const Buffer a(dtype, {most, K}), b(dtype, {most, K}), out(dtype, {most, most}), before(dtype, {most, most});
        MatmulOptions options{.transpose_b = true};
        if (with_gelu) options.before_gelu = before;
        const LaunchNotes notes;
        cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        matmul(out, a, b, options, stream);
        cudaGraph_t graph = nullptr;
        cudaCheck(cudaStreamEndCapture(stream, &graph));
        cudaCheck(cudaGraphDestroy(graph));
        REQUIRE(notes.launches.size() == 1);
        return notes.launches[0].kernel != "matmul";
    };
    for (const bool as_hopper : {false, true, false}) {
        choose_matmuls_as_hopper(as_hopper);
        CHECK(is_ours(DType::bf16, most, true) == (as_hopper && has_wgmma()));
        CHECK(!is_ours(DType::bf16, most - 8, true));  // too small
        CHECK(!is_ours(DType::bf16, most, false));
        CHECK(!is_ours(DType::f32, most, true));
    }
}

// The bits of adding what out holds, by cuBLASLt and by ours. A factor may be what is added, and is read once.
TEST_CASE("matmul adds another matrix than out", "[matmul]") {
    for (const DType dtype : kFloatDTypes)
        for (const std::string choice : {"cublaslt", "parts"})
            for (const int64_t batch : {1, 3}) {
                INFO(dtype_name(dtype) << ' ' << choice << " batch " << batch);
                const int64_t n = 24, count = batch * n * n;
                Buffer a(dtype, {batch, n, n}, random_values(count, 1)),
                    b(dtype, {batch, n, n}, random_values(count, 2)),
                    added(dtype, {batch, n, n}, random_values(count, 3)), want(dtype, {batch, n, n}),
                    out(dtype, {batch, n, n}, random_values(count, 4));
                MatmulOptions options{.transpose_b = true, .alpha = 0.5f, .beta = -2.0f};
                const std::string name = concat("24x24x24 ", dtype_name(dtype), " ", dtype_name(dtype), " ",
                                                dtype_name(dtype), " nt plain", batch > 1 ? " batch 3" : "");
                const Choices these(name + ": " + choice + "\n" + name + " added: " + choice + "\n");
                const auto as_matrices = [&](const Tensor& x) { return batch > 1 ? x : x.view({n, n}); };
                copy_tensor(want, added, device().stream);
                matmul(as_matrices(want), as_matrices(a), as_matrices(b), options, device().stream);
                options.added = as_matrices(added);
                matmul(as_matrices(out), as_matrices(a), as_matrices(b), options, device().stream);
                CHECK(out.bits() == want.bits());
                copy_tensor(want, a, device().stream);
                options.added = {};
                matmul(as_matrices(want), as_matrices(a), as_matrices(b), options, device().stream);
                options.added = as_matrices(a);
                LaunchNotes notes;
                matmul(as_matrices(out), as_matrices(a), as_matrices(b), options, device().stream);
                CHECK(out.bits() == want.bits());
                REQUIRE(notes.launches.size() == 1);
                CHECK(notes.launches[0].kernel == (choice == "parts" ? "plain_matmul_kernel" : "matmul"));
                CHECK(notes.launches[0].cost.reads == bytes_of(a.tensor(), b.tensor()));
            }
}

TEST_CASE("matmul: one product for a linear layer and GELU", "[matmul]") {
    Buffer a(DType::bf16, {32, 16}, random_values(512, 1)), b(DType::bf16, {16, 24}, random_values(384, 2)),
        out(DType::bf16, {32, 24}), before(DType::bf16, {32, 24});
    LaunchNotes notes;
    matmul(out, a, b, {.before_gelu = before}, device().stream);
    REQUIRE(notes.launches.size() == 1);
    const NotedLaunch& launch = notes.launches[0];
    CHECK(launch.kernel == "matmul");
    CHECK(launch.cost.reads == 2 * (32 * 16 + 16 * 24));
    CHECK(launch.cost.writes == 2 * 2 * 32 * 24);
    CHECK(launch.cost.flops == 2.0 * 32 * 24 * 16);
    CHECK(launch.cost.product == std::array<int64_t, 3>{32, 24, 16});
}

TEST_CASE("matmul takes the algorithm that was chosen, and ours where it is told to", "[matmul][choices]") {
    Buffer a(DType::f32, {32, 7}, random_values(224, 1)), b(DType::f32, {7, 24}, random_values(168, 2)),
        out(DType::f32, {32, 24});
    const auto kernel_of = [&] {
        LaunchNotes notes;
        matmul(out, a, b, {}, device().stream);
        REQUIRE(notes.launches.size() == 1);
        return notes.launches[0].kernel;
    };
    const std::string name = "32x24x7 f32 f32 f32 nn plain";
    CHECK(kernel_of() == "matmul");
    {
        const Choices ours(name + ": parts\n");
        CHECK(kernel_of() == "plain_matmul_kernel");
        CHECK(matmul_choices() == name + ": parts\n");
    }
    CHECK(matmul_choices().empty());
    CHECK(kernel_of() == "matmul");
    for (const std::string choice : {"hopper", "cublaslt"}) {  // ours for Hopper has no float32 products
        const Choices these(name + ": " + choice + "\n");
        CHECK(kernel_of() == "matmul");
        CHECK(matmul_choices() == name + ": " + choice + "\n");
    }
    {  // An algorithm that this cuBLASLt does not know: its own first one.
        const Choices unknown(name + ": 1.2.3.4.5.6.7.8  # 1.0 us\n");
        CHECK(kernel_of() == "matmul");
    }
    // An algorithm for what no algorithm of cuBLASLt's computes: ours.
    Buffer attended(DType::f32, {32, 24}, random_values(768, 3)), delta(DType::f32, {1, 2, 32}),
        expected(DType::f32, {1, 2, 32});
    matmul(out, a, b, {.attended = attended, .delta = expected}, device().stream);
    const Choices impossible("32x24x7 f32 f32 f32 nn delta heads of 12: 0.0.0.0.0.0.0.0\n");
    matmul(out, a, b, {.attended = attended, .delta = delta}, device().stream);
    CHECK((delta.values() == expected.values()));
}

TEST_CASE("matmul: choices are timed, written and read", "[matmul][choices]") {
    const Choices none("");
    Buffer a(DType::f32, {64, 32}, random_values(2048, 1)), b(DType::f32, {32, 24}, random_values(768, 2)),
        out(DType::f32, {64, 24}), before(DType::f32, {64, 24}), expected(DType::f32, {64, 24});
    const auto run = [&] { matmul(out, a, b, {.before_gelu = before}, device().stream); };
    // On a GPU the fastest algorithm may sum in another order than the first, and have another GELU.
    const auto check_result = [&] {
        if (device().is_cpu) CHECK((out.values() == expected.values()));
        else check_close(out.values(), expected.values(), 0x1p-19, 0x1p-17, "the chosen algorithm");
    };
    run();
    CHECK(matmul_choices().empty());
    expected.set(out.values());
    tune_matmuls(true);
    run(), run();
    tune_matmuls(false);
    check_result();
    const std::string text = matmul_choices();
    CHECK_THAT(text, ContainsSubstring("64x24x32 f32 f32 f32 nn gelu: "));
    CHECK_THAT(text, ContainsSubstring(" us; "));
    CHECK_THAT(text, ContainsSubstring(" us, parts "));
    set_matmul_choices("");
    set_matmul_choices(text);
    CHECK(matmul_choices() == text);
    run();
    check_result();
    tune_matmuls(true);  // what is known is not timed again
    const LaunchNotes notes;
    run();
    tune_matmuls(false);
    CHECK(notes.launches.size() <= 2);  // the product, and GELU where that is in parts

    for (const std::string wrong :
         {"nonsense", "1x1x1 f32: 1.2.3", "x: 1.2.3.4.5.6.7.8.9", "x: 1.2.3.4.5.6.7.g", "x: 1..3.4.5.6.7.8",
          "x  # y: parts", ": parts", "x: parts  of it", "x: parts\nx: parts", "x: 1.2.3.4.5.6.7.8"}) {
        INFO(wrong);
        if (wrong == "x: 1.2.3.4.5.6.7.8") CHECK_NOTHROW(set_matmul_choices(wrong));
        else CHECK_THROWS_WITH(set_matmul_choices(wrong), ContainsSubstring("choices of matrix products"));
    }
}

TEST_CASE("matmul: products that differ in what a choice may depend on have choices of their own",
          "[matmul][choices]") {
    const Choices none("");
    const Buffer a(DType::f32, {2, 4, 8}, random_values(64, 1)), b(DType::f32, {2, 8, 6}, random_values(96, 2)),
        out(DType::f32, {2, 4, 6}), other(DType::f32, {4, 6}, random_values(24, 3)), delta(DType::f32, {1, 2, 4});
    const Tensor one_a = a.tensor().slice(0, 1).view({4, 8}), one_b = b.tensor().slice(0, 1).view({8, 6}),
                 one_out = out.tensor().slice(0, 1).view({4, 6});
    const cudaStream_t s = device().stream;
    tune_matmuls(true);
    matmul(out, a, b, {}, s);
    matmul(one_out, one_a, one_b, {}, s);
    matmul(one_out, one_a, one_b, {.beta = 1.0f, .added = other}, s);
    matmul(one_out, one_a, one_b, {.attended = other, .delta = delta}, s);
    const Buffer codes(DType::e4m3, {16, 16}), wide(DType::bf16, {16, 16}), one(DType::f32, {1}),
        rows(DType::f32, {1, 16});
    MatmulOptions fp8{.transpose_b = true, .a_scale = one, .b_scale = one};
    if (has_fp8(true)) matmul(wide, codes, codes, fp8, s);
    fp8.a_scale_mode = fp8.b_scale_mode = MatmulScale::row128, fp8.a_scale = fp8.b_scale = rows;
    if (has_fp8(true)) matmul(wide, codes, codes, fp8, s);
    tune_matmuls(false);
    std::istringstream lines(matmul_choices());
    std::vector<std::string> names;
    for (std::string line; std::getline(lines, line);) names.push_back(line.substr(0, line.find(": ")));
    const std::string size = "4x6x8 f32 f32 f32 nn ";
    std::vector<std::string> expected{size + "delta heads of 3", size + "plain", size + "plain added",
                                      size + "plain batch 2"};
    const std::string of_fp8 = "16x16x16 e4m3 e4m3 bf16 nt plain";
    if (has_fp8(true)) expected.insert(expected.begin(), {of_fp8, of_fp8 + " scales 1 1"});
    CHECK(names == expected);
}

TEST_CASE("matmul: a choice that a product cannot have is none", "[matmul][choices]") {
    if (!has_fp8()) return;
    const Buffer codes(DType::e4m3, {16, 16}), one(DType::f32, {1}, {1.0});
    cudaCheck(cudaMemsetAsync(codes.tensor().data, 0x38, 256, device().stream));  // each is 1
    Buffer out(DType::bf16, {16, 16});
    for (const char* way : {"parts", "hopper"}) {  // nothing of ours multiplies fp8
        const Choices choice(concat("16x16x16 e4m3 e4m3 bf16 nt plain: ", way, "\n"));
        out.set(Values(256, 0.0));
        matmul(out, codes, codes, {.transpose_b = true, .a_scale = one, .b_scale = one}, device().stream);
        CHECK(out.values() == Values(256, 16.0));
    }
}

TEST_CASE("the fastest of some times is the first that is hardly slower than the least", "[matmul][choices]") {
    CHECK(fastest({3.0}) == 0);
    CHECK(fastest({3.0, 2.0, 2.5}) == 1);
    CHECK(fastest({2.01, 3.0, 2.0}) == 0);
    CHECK(fastest({2.03, 3.0, 2.0}) == 2);
    CHECK(fastest({INFINITY, 3.0, INFINITY}) == 1);
}

TEST_CASE("matmul in float32 is not done in TF32", "[matmul]") {
    // 1 + 2^-12 has 13 significant bits; TF32 keeps 11.
    Buffer a(DType::f32, {16, 16}, Values(256, 1 + 0x1p-12)), b(DType::f32, {16, 16}, Values(256, 1.0)),
        out(DType::f32, {16, 16});
    matmul(out, a, b, {}, device().stream);
    CHECK(out.values() == Values(256, 16 + 0x1p-8));
}

TEST_CASE("matmul adds a bias in float32, before it rounds", "[matmul]") {
    // 256 + 1 + 1 is 258, a bf16 number. Rounded after the product, 257 would be 256, and 256 + 1 again 256.
    Buffer a(DType::bf16, {8, 8}), b(DType::bf16, {8, 8}, Values(64, 1.0)), bias(DType::bf16, {8}, Values(8, 1.0));
    Buffer out(DType::bf16, {8, 8});
    Values x(64);
    for (size_t i = 0; i < 8; ++i) x[8 * i] = 256, x[8 * i + 1] = 1;
    a.set(x);
    matmul(out, a, b, {.bias = bias}, device().stream);
    CHECK(out.values() == Values(64, 258.0));
}

TEST_CASE("matmul with a kept plan reads the new addresses", "[matmul]") {
    const int64_t n = 24;
    for (double scale : {1.0, 2.0, 3.0}) {  // three products of one shape, in memory of their own
        Buffer a(DType::f32, {n, n}, Values(n * n, scale)), b(DType::f32, {n, n}, Values(n * n, 1.0)),
            bias(DType::f32, {n}, Values(n, scale));
        Buffer out(DType::f32, {n, n});
        matmul(out, a, b, {.alpha = static_cast<float>(scale), .bias = bias}, device().stream);
        CHECK(out.values() == Values(n * n, scale * scale * static_cast<double>(n) + scale));
    }
}

// ZeRO shifts parameters: the same product elsewhere has the same algorithm, because nothing else is asked for.
TEST_CASE("matmul has one choice for a product, wherever its operands lie", "[matmul][choices]") {
    const Choices none("");
    Buffer a(DType::bf16, {1024}, random_values(1024, 1)), b(DType::bf16, {1024}, random_values(1024, 2)),
        out(DType::bf16, {1024});
    const auto at = [](const Buffer& buffer, int64_t shift) {
        return make_tensor(static_cast<char*>(buffer.tensor().data) + shift, DType::bf16, {16, 16});
    };
    tune_matmuls(true);
    for (const int64_t shift : {0, 16, 128, 1024}) matmul(at(out, shift), at(a, 0), at(b, shift), {}, device().stream);
    tune_matmuls(false);
    const std::string text = matmul_choices();
    CHECK(std::count(text.begin(), text.end(), '\n') == 1);
}

TEST_CASE("matmul repeats bit for bit", "[matmul]") {
    const int64_t M = 150, N = 70, K = 333;
    Buffer a(DType::f32, {M, K}, random_values(M * K, 1)), b(DType::f32, {K, N}, random_values(K * N, 2)),
        out(DType::f32, {M, N});
    matmul(out, a, b, {}, device().stream);
    const std::vector<unsigned char> first = out.bits();
    matmul(out, a, b, {}, device().stream);
    CHECK(out.bits() == first);
}

TEST_CASE("matmul says what is wrong with its arguments", "[matmul][errors]") {
    Buffer a(DType::f32, {4, 8}), b(DType::f32, {8, 5}), out(DType::f32, {4, 5}), bias(DType::f32, {5}),
        half(DType::bf16, {8, 5});
    Buffer cube(DType::f32, {2, 4, 5}), ids(DType::i32, {4, 8});
    const auto s = device().stream;
    CHECK_THROWS_WITH(matmul(bias, a, b, {}, s),
                      ContainsSubstring("matmul: out is f32 (5), expected (M, N) or (batch, M, N)"));
    CHECK_THROWS_WITH(matmul(out, b, b, {}, s), ContainsSubstring("matmul: a is f32 (8, 5), expected f32 (4, 5)"));
    CHECK_THROWS_WITH(matmul(out, a, a, {}, s), ContainsSubstring("matmul: b is f32 (4, 8), expected f32 (8, 5)"));
    CHECK_THROWS_WITH(matmul(out, a, half, {}, s), ContainsSubstring("matmul: b is bf16 (8, 5), expected f32 (8, 5)"));
    CHECK_THROWS_WITH(matmul(half.tensor().slice(0, 4), a, b, {}, s), ContainsSubstring("matmul: out is bf16"));
    CHECK_THROWS_WITH(matmul(cube, a, b, {}, s),
                      ContainsSubstring("matmul: a is f32 (4, 8), but out is f32 (2, 4, 5)"));
    CHECK_THROWS_WITH(matmul(out, ids, ids, {.transpose_b = true}, s), ContainsSubstring("matmul"));
    CHECK_THROWS_WITH(matmul(out, a, b, {.bias = a}, s),
                      ContainsSubstring("matmul: bias is f32 (4, 8), expected f32 (5)"));
    CHECK_THROWS_WITH(matmul(out, a, b, {.beta = 1.0f, .bias = bias}, s),
                      ContainsSubstring("matmul: with a bias beta must be 0"));
    CHECK_THROWS_WITH(matmul(out, a, b, {.beta = 1.0f, .added = b}, s),
                      ContainsSubstring("matmul: added is f32 (8, 5), expected f32 (4, 5)"));
    CHECK_THROWS_WITH(matmul(out, a, b, {.added = out, .bias = bias}, s),
                      ContainsSubstring("matmul: added excludes a bias"));
    CHECK_THROWS_WITH(matmul(out, a, {}, {}, s), ContainsSubstring("matmul: b is no tensor"));
    const Tensor shifted = make_tensor(static_cast<char*>(a.tensor().data) + 4, DType::f32, {4, 8});
    CHECK_THROWS_WITH(matmul(out, shifted, b, {}, s), ContainsSubstring("matmul: a starts at"));
    const Tensor nothing = make_tensor(a.tensor().data, DType::f32, {4, 0}),
                 none = make_tensor(b.tensor().data, DType::f32, {0, 5});
    CHECK_THROWS_WITH(matmul(out, nothing, none, {}, s), ContainsSubstring("matmul: K is 0"));
}

TEST_CASE("matmul says which of its options exclude each other", "[matmul][errors]") {
    const Buffer a(DType::f32, {4, 8}), b(DType::f32, {8, 5}), out(DType::f32, {4, 5}), bias(DType::f32, {5}),
        sums(DType::f32, {4}), zeros(DType::i32, {4}), delta(DType::f32, {1, 1, 4}), two_heads(DType::f32, {1, 2, 4});
    const Buffer wide(DType::f32, {5, 5});
    const auto shifted = [&](std::initializer_list<int64_t> dims) {
        return make_tensor(static_cast<char*>(wide.tensor().data) + 4, DType::f32, dims);
    };
    const Tensor no_heads = make_tensor(delta.tensor().data, DType::f32, {1, 0, 4});
    const std::pair<MatmulOptions, const char*> wrong[] = {
        {{.zeros = zeros}, "attended and zeros are for delta"},
        {{.attended = out}, "attended and zeros are for delta"},
        {{.added = out, .before_gelu = out}, "at most, without batches, added and fp8 factors"},
        {{.beta = 1.0f, .attended = out, .delta = delta}, "delta excludes a bias, and beta must be 0"},
        {{.bias = bias, .attended = out, .delta = delta}, "delta excludes a bias, and beta must be 0"},
        {{.attended = out, .delta = no_heads}, "is not that of heads in"},
        {{.attended = out, .delta = two_heads}, "is not that of heads in"},
        {{.a_row_sums = sums}, "a_row_sums are of a transposed a, without a bias"},
        {{.beta = 1.0f, .before_gelu = out}, "with before_gelu beta must be 0, not 1"},
        {{.beta = 1.0f, .gelu_input = out}, "with gelu_input beta must be 0, not 1"},
        {{.bias = bias, .gelu_input = out}, "gelu_input excludes a bias"},
        {{.before_gelu = out, .gelu_input = out}, "one of before_gelu, gelu_input, a_row_sums and delta at most"},
        {{.attended = bias, .delta = delta}, "matmul: attended is f32 (5), expected f32 (4, 5)"},
        {{.attended = shifted({4, 5}), .delta = delta}, "matmul: attended starts at"},
        {{.attended = out, .delta = sums}, "matmul: delta is f32 (4), expected"},
        {{.before_gelu = bias}, "matmul: before_gelu is f32 (5), expected f32 (4, 5)"},
        {{.gelu_input = shifted({4, 5})}, "matmul: gelu_input starts at"},
        {{.bias = shifted({5})}, "matmul: bias starts at"}};
    for (const auto& [options, message] : wrong)
        CHECK_THROWS_WITH(matmul(out, a, b, options, device().stream), ContainsSubstring(message));
    CHECK_THROWS_WITH(matmul(b, a, out, {.transpose_a = true, .a_row_sums = bias}, device().stream),
                      ContainsSubstring("matmul: a_row_sums is f32 (5), expected f32 (8)"));
}

TEST_CASE("plain_matmul says what is wrong with its arguments", "[matmul][errors]") {
    Buffer a(DType::f32, {4, 8}), b(DType::f32, {8, 5}), out(DType::f32, {4, 5}), row(DType::f32, {5}),
        wide(DType::f32, {4, 6}), cube(DType::f32, {2, 4, 5}), cube_a(DType::f32, {2, 4, 8});
    const auto s = device().stream;
    CHECK_THROWS_WITH(plain_matmul(wide, a, b, {}, s),
                      ContainsSubstring("plain_matmul: b is f32 (8, 5), expected f32 (8, 6)"));
    CHECK_THROWS_WITH(plain_matmul(out, b, b, {}, s), ContainsSubstring("plain_matmul: a is f32 (8, 5), expected"));
    CHECK_THROWS_WITH(plain_matmul(row, a, b, {}, s), ContainsSubstring("plain_matmul: out is f32 (5)"));
    CHECK_THROWS_WITH(plain_matmul(cube, cube_a, b, {}, s), ContainsSubstring("expected f32 (2, 8, 5)"));
    CHECK_THROWS_WITH(plain_matmul(out, a, {}, {}, s), ContainsSubstring("plain_matmul: b is no tensor"));
    CHECK_THROWS_WITH(plain_matmul(out, a, b, {.bias = a}, s), ContainsSubstring("plain_matmul: bias is f32 (4, 8)"));
    CHECK_THROWS_WITH(plain_matmul(out, a, b, {.beta = 1.0f, .added = b}, s),
                      ContainsSubstring("plain_matmul: added is f32 (8, 5), expected f32 (4, 5)"));
}

TEST_CASE("matmul of fp8 factors", "[matmul]") {
    if (!has_fp8()) SKIP_TEST(kNeedsFp8);
    // Small integers and powers of two: every sum is exact, so that each scale, bias and transpose is seen, not how
    // sums round.
    const int64_t M = 20, N = 160, K = 272, L = 3;  // blocks of K: 128, 128, 16
    const DType pairs[][2] = {{DType::e4m3, DType::e4m3}, {DType::e5m2, DType::e4m3}, {DType::e4m3, DType::e5m2}};
    const auto factor = [](DType dtype, int64_t n, uint64_t seed) {
        std::vector<unsigned char> codes;
        Values values;
        for (int64_t i = 0; i < n; ++i) {
            const float x = static_cast<float>(uniform_below(seed, 1, static_cast<uint64_t>(i), 5)) - 2;
            codes.push_back(dtype == DType::e4m3 ? __nv_fp8_e4m3(x).__x : __nv_fp8_e5m2(x).__x), values.push_back(x);
        }
        return std::pair(codes, values);
    };
    for (const auto& [a_dtype, b_dtype] : pairs)
        for (DType out_dtype : {DType::bf16, DType::f16, DType::f32})
            for (MatmulScale a_mode : {MatmulScale::tensor, MatmulScale::row128, MatmulScale::block128})
                for (MatmulScale b_mode : {MatmulScale::tensor, MatmulScale::row128, MatmulScale::block128}) {
                    const bool tensor = a_mode == MatmulScale::tensor;
                    if (tensor != (b_mode == MatmulScale::tensor) ||
                        (!tensor && a_mode != MatmulScale::row128 && a_mode == b_mode) || !has_fp8(!tensor))
                        continue;
                    INFO(dtype_name(a_dtype) << " " << dtype_name(b_dtype) << " " << dtype_name(out_dtype) << " "
                                             << int(a_mode) << int(b_mode));
                    const auto [a_codes, a_values] = factor(a_dtype, M * K, 1);
                    const auto [b_codes, b_values] = factor(b_dtype, N * K, 2);
                    Buffer a(a_dtype, {M, K}), b(b_dtype, {N, K});
                    copy_to_device(a, a_codes.data()), copy_to_device(b, b_codes.data());
                    const auto scales = [&](MatmulScale mode, int64_t rows) {  // 1/4, 1/2 or 1
                        auto buffer = std::make_unique<Buffer>(DType::f32, std::initializer_list<int64_t>{1});
                        if (mode == MatmulScale::row128)
                            buffer = std::make_unique<Buffer>(DType::f32, std::initializer_list<int64_t>{L, rows});
                        if (mode == MatmulScale::block128)
                            buffer = std::make_unique<Buffer>(
                                DType::f32,
                                std::initializer_list<int64_t>{ceil_div(rows, 128), fp8_block_scale_cols(K)});
                        Values values;
                        for (int64_t i = 0; i < buffer->tensor().n(); ++i)
                            values.push_back(
                                0.25 * static_cast<double>(int64_t{1} << uniform_below(static_cast<uint64_t>(rows), 2,
                                                                                       static_cast<uint64_t>(i), 3)));
                        buffer->set(values);
                        return std::pair(std::move(buffer), values);
                    };
                    const auto [a_scale, a_factors] = scales(a_mode, M);
                    const auto [b_scale, b_factors] = scales(b_mode, N);
                    const auto scale_at = [&](const Values& f, MatmulScale mode, int64_t rows, int64_t row, int64_t k) {
                        if (mode == MatmulScale::tensor) return f[0];
                        if (mode == MatmulScale::row128) return f[static_cast<size_t>(k / 128 * rows + row)];
                        return f[static_cast<size_t>(row / 128 * fp8_block_scale_cols(K) + k / 128)];
                    };
                    Values before(M * N), want;
                    for (size_t i = 0; i < before.size(); ++i) before[i] = static_cast<double>(i % 3);
                    for (int64_t i = 0; i < M; ++i)
                        for (int64_t j = 0; j < N; ++j) {
                            double sum = before[static_cast<size_t>(i * N + j)];
                            for (int64_t k = 0; k < K; ++k)
                                sum += scale_at(a_factors, a_mode, M, i, k) * scale_at(b_factors, b_mode, N, j, k) *
                                       a_values[static_cast<size_t>(i * K + k)] *
                                       b_values[static_cast<size_t>(j * K + k)];
                            want.push_back(sum);
                        }
                    const auto check = [&](const Buffer& out, double largest_addend) {
                        const Roundings u(out_dtype, largest_addend);
                        if (u.absolute > 0) check_close(out.values(), want, u.relative, u.absolute, "fp8");
                        else CHECK((out.values() == rounded(want, out_dtype)));
                    };
                    Buffer out(out_dtype, {M, N}, before);
                    MatmulOptions options{.transpose_b = true,
                                          .beta = 1.0f,
                                          .a_scale = *a_scale,
                                          .b_scale = *b_scale,
                                          .a_scale_mode = a_mode,
                                          .b_scale_mode = b_mode};
                    matmul(out, a, b, options, device().stream);
                    check(out, 2);
                    if (out_dtype == DType::f32) continue;
                    Buffer bias(out_dtype, {N}, Values(N, 3.0));
                    options.beta = 0, options.bias = bias;
                    for (size_t i = 0; i < want.size(); ++i) want[i] += 3 - before[i];
                    matmul(out, a, b, options, device().stream);
                    check(out, 3);
                }
}

TEST_CASE("matmul says what is wrong with fp8 factors", "[matmul][errors]") {
    if (!has_fp8(true)) SKIP_TEST(kNeedsFp8);
    const int64_t M = 8, N = 32, K = 48;
    Buffer a(DType::e4m3, {M, K}), b(DType::e4m3, {N, K}), out(DType::bf16, {M, N}), one(DType::f32, {1}, {1.0});
    Buffer gradient_a(DType::e5m2, {M, K}), gradient_b(DType::e5m2, {N, K}), whole(DType::bf16, {N, K}),
        a_rows(DType::f32, {1, M}), b_blocks(DType::f32, {1, 4}), bias(DType::f32, {N}), long_out(DType::f32, {M, N});
    const auto s = device().stream;
    const MatmulOptions good{.transpose_b = true, .a_scale = one, .b_scale = one};
    CHECK_NOTHROW(matmul(out, a, b, good, s));
    CHECK_THROWS_WITH(matmul(out, gradient_a, gradient_b, good, s),
                      ContainsSubstring("there is no product of e5m2 and e5m2"));
    CHECK_THROWS_WITH(matmul(out, a, whole, good, s), ContainsSubstring("there is no product of e4m3 and bf16"));
    CHECK_THROWS_WITH(matmul(out, a, b.tensor().view({K, N}), {.a_scale = one, .b_scale = one}, s),
                      ContainsSubstring("with transpose_b"));
    CHECK_THROWS_WITH(matmul(out, a, b, {.transpose_b = true}, s),
                      ContainsSubstring("matmul: a_scale is no tensor, expected f32 (1)"));
    CHECK_THROWS_WITH(matmul(out.tensor().view({M * 2, N / 2}).slice(0, M), a.tensor(),
                             b.tensor().view({N / 2, 2 * K}).slice(0, 16), good, s),
                      ContainsSubstring("matmul: b is"));
    CHECK_THROWS_WITH(matmul(out.tensor().view({16, 16}).slice(0, 4), a.tensor().view({16, 24}).slice(0, 4),
                             b.tensor().view({64, 24}).slice(0, 16), good, s),
                      ContainsSubstring("multiples of 16, not K = 24, N = 16"));
    CHECK_THROWS_WITH(matmul(make_tensor(out.tensor().data, DType::bf16, {M, 24}), a, b.tensor().slice(0, 24), good, s),
                      ContainsSubstring("multiples of 16, not K = 48, N = 24"));
    CHECK_THROWS_WITH(
        matmul(out.tensor().view({1, M, N}), a.tensor().view({1, M, K}), b.tensor().view({1, N, K}), good, s),
        ContainsSubstring("fp8 products have no batch dimension"));
    MatmulOptions options = good;
    options.a_scale = make_tensor(static_cast<char*>(a_rows.tensor().data) + 4, DType::f32, {1});
    CHECK_THROWS_WITH(matmul(out, a, b, options, s), ContainsSubstring("matmul: a_scale starts at"));
    options.a_scale_mode = MatmulScale::row128, options.a_scale = a_rows;
    CHECK_THROWS_WITH(matmul(out, a, b, options, s), ContainsSubstring("both have scales of blocks"));
    options.b_scale_mode = MatmulScale::block128;
    CHECK_THROWS_WITH(matmul(out, a, b, options, s),
                      ContainsSubstring("matmul: b_scale is f32 (1), expected f32 (1, 4)"));
    options.b_scale = b_blocks;
    b_blocks.set({1, 1, 1, 1}), a_rows.set(Values(M, 1.0));
    CHECK_NOTHROW(matmul(out, a, b, options, s));
    CHECK_THROWS_WITH(matmul(out.tensor().slice(0, 6), a.tensor().slice(0, 6), b, options, s),
                      ContainsSubstring("with scales of blocks M must be a multiple of 4, not 6"));
    options.a_scale_mode = MatmulScale::block128, options.a_scale = b_blocks;
    CHECK_THROWS_WITH(matmul(out, a, b, options, s), ContainsSubstring("not both of 128 x 128"));
    options = good, options.bias = bias;
    CHECK_THROWS_WITH(matmul(long_out, a, b, options, s), ContainsSubstring("with a bias have a 16-bit out"));
    CHECK_THROWS_WITH(matmul(out, whole.tensor().slice(0, M), whole, good, s),
                      ContainsSubstring("only fp8 factors have scales"));
}
