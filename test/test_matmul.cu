// test/test_matmul.cu: the matrix product against float64, in every combination of its options.
#include "layers/layers.h"
#include "reference.h"

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

void check_product(const Size& s, DType dtype, DType out_dtype, MatmulOptions o, bool with_bias) {
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
    matmul(shaped(out, s.batch, s.M, s.N), shaped(left, s.batch, o.transpose_a ? s.K : s.M, o.transpose_a ? s.M : s.K),
           shaped(right, s.batch, o.transpose_b ? s.N : s.K, o.transpose_b ? s.K : s.N), o, device().stream);
    // K products of normal numbers, whose sum grows like sqrt(K), in float32; one rounding to the output's type.
    check_close(out.values(), product(s, a, b, before, bias, o), unit_roundoff(out_dtype),
                sum_error(s.K) * 4 * std::sqrt(static_cast<double>(s.K)) * (1 + std::abs(double{o.beta})) + 0x1p-25,
                concat("matmul ", dtype_name(dtype), " to ", dtype_name(out_dtype), ", batch ", s.batch, ", M ", s.M,
                       ", N ", s.N, ", K ", s.K, o.transpose_a ? ", a^T" : "", o.transpose_b ? ", b^T" : "", ", alpha ",
                       o.alpha, ", beta ", o.beta, with_bias ? ", bias" : ""));
}

}  // namespace

TEST_CASE("matmul against float64", "[matmul]") {
    for (const Size& s : kSizes)
        for (DType dtype : kFloatDTypes)
            for (DType out_dtype : {dtype, DType::f32})
                for (int transposes = 0; transposes < 4; ++transposes) {
                    MatmulOptions o;
                    o.transpose_a = transposes & 1, o.transpose_b = transposes & 2;
                    check_product(s, dtype, out_dtype, o, false);
                    check_product(s, dtype, out_dtype, o, true);
                    o.alpha = 0.5f, o.beta = 1.0f;
                    check_product(s, dtype, out_dtype, o, false);
                    o.alpha = -1.5f, o.beta = 2.0f;
                    check_product(s, dtype, out_dtype, o, false);
                }
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
    CHECK_THROWS_WITH(matmul(out, a, {}, {}, s), ContainsSubstring("matmul: b is no tensor"));
    const Tensor shifted = make_tensor(static_cast<char*>(a.tensor().data) + 4, DType::f32, {4, 8});
    CHECK_THROWS_WITH(matmul(out, shifted, b, {}, s), ContainsSubstring("matmul: a starts at"));
    const Tensor nothing = make_tensor(a.tensor().data, DType::f32, {4, 0}),
                 none = make_tensor(b.tensor().data, DType::f32, {0, 5});
    CHECK_THROWS_WITH(matmul(out, nothing, none, {}, s), ContainsSubstring("matmul: K is 0"));
}
