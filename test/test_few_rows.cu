// Linear layers for a few rows, with weights as they are and of 8 bits, against loops in float64.
//
// Tolerance, for each element by itself: a float32 sum of C products, in any order, is off by at most C roundings of
// 2^-24 of sum |inp weight|; scale * code is rounded once more, and the bias adds one: (C + 3) 2^-24 (sum |inp weight|
// + |bias|). Then out's type rounds once.
#include "layers/few_rows.cuh"
#include "layers/norm.cuh"
#include "reference.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace {

const WeightFormat kFormats[] = {WeightFormat::int8, WeightFormat::fp8, WeightFormat::int8_block,
                                 WeightFormat::fp8_block};

bool is_int8(WeightFormat format) { return format == WeightFormat::int8 || format == WeightFormat::int8_block; }

// A quantised weight in memory, and what it stands for in float64.
struct Quantised {
    Arena arena{"test"};
    QuantisedWeight weight;
    std::vector<double> codes, scale;
    int64_t block;

    Quantised(WeightFormat format, int64_t O, int64_t C, const Tensor& from) {
        take_quantised_weight(arena, format, O, C);
        arena.reserve();
        weight = take_quantised_weight(arena, format, O, C);
        quantise_weight(weight, from, device().stream);
        std::vector<float> scales(static_cast<size_t>(weight.scale.n()));
        copy_to_host(scales.data(), weight.scale);
        scale.assign(scales.begin(), scales.end());
        std::vector<unsigned char> bytes(static_cast<size_t>(O * C));
        copy_to_host(bytes.data(), weight.codes);
        for (const unsigned char byte : bytes) {
            __nv_fp8_e4m3 code;
            std::memcpy(&code, &byte, 1);
            codes.push_back(is_int8(format) ? static_cast<signed char>(byte) : static_cast<float>(code));
        }
        block = weight.scale.ndim == 1 ? C : 128;
    }
    double scale_of(int64_t o, int64_t c, int64_t C) const {
        return scale[static_cast<size_t>(o * ceil_div(C, block) + c / block)];
    }
    std::vector<double> values(int64_t C) const {
        std::vector<double> x(codes.size());
        for (size_t i = 0; i < x.size(); ++i) {
            const int64_t at = static_cast<int64_t>(i);
            x[i] = scale_of(at / C, at % C, C) * codes[i];
        }
        return x;
    }
};

// CHECKs out (N, O) against inp weight^T + bias.
void check_product(const Tensor& out, const std::vector<double>& inp, const std::vector<double>& weight,
                   const std::vector<double>& bias, int64_t N, int64_t O, int64_t C) {
    const std::vector<float> got = to_floats(out);
    const double epsilon = static_cast<double>(C + 3) * 0x1p-24;
    double worst = 0;
    for (int64_t n = 0; n < N; ++n)
        for (int64_t o = 0; o < O; ++o) {
            double x = bias.empty() ? 0 : bias[static_cast<size_t>(o)], size = std::abs(x);
            for (int64_t c = 0; c < C; ++c) {
                const double term = inp[static_cast<size_t>(n * C + c)] * weight[static_cast<size_t>(o * C + c)];
                x += term, size += std::abs(term);
            }
            const double rounding = out.dtype == DType::f32 ? 0 : unit_roundoff(out.dtype) * std::abs(x);
            // 2^-14 * 2^-11: half a step among f16's subnormal numbers
            const double error = std::abs(got[static_cast<size_t>(n * O + o)] - x) /
                                 (epsilon * size + 1.001 * rounding + (out.dtype == DType::f16 ? 0x1p-25 : 0));
            worst = larger(worst, error);
        }
    CHECK(worst <= 1);
}

struct Size {
    int64_t O, C;
};
const Size kSizes[] = {{1, 1}, {37, 131}, {9, 272}, {65, 640}, {70, 7}};

}  // namespace

TEST_CASE("few rows: a product with any number of rows", "[few_rows][counted]") {
    for (const DType dtype : kFloatDTypes)
        for (const auto& [O, C] : kSizes)
            for (const int64_t N : {1, 2, 3, 16, 17, 33, 70}) {
                INFO(dtype_name(dtype) << " N " << N << " O " << O << " C " << C);
                const auto x = random_values(N * C, 1), w = random_values(O * C, 2), b = random_values(O, 3);
                Buffer inp(dtype, {N, C}, x), weight(dtype, {O, C}, w), bias(dtype, {O}, b), out(dtype, {N, O});
                few_rows_forward(out, inp, weight, bias, device().stream);
                check_product(out, rounded(x, dtype), rounded(w, dtype), rounded(b, dtype), N, O, C);
                few_rows_forward(out, inp, weight, {}, device().stream);
                check_product(out, rounded(x, dtype), rounded(w, dtype), {}, N, O, C);
                if (dtype == DType::f32) continue;
                few_rows_mma_forward(out, inp, weight, bias, device().stream);  // few_rows_forward of a GPU
                check_product(out, rounded(x, dtype), rounded(w, dtype), rounded(b, dtype), N, O, C);
            }
}

TEST_CASE("few rows: quantised weights, any number of rows", "[few_rows][counted]") {
    for (const WeightFormat format : kFormats)
        for (const DType dtype : kFloatDTypes)
            for (const auto& [O, C] : kSizes) {
                Buffer weight(dtype, {O, C}, random_values(O * C, 2));
                const Quantised quantised(format, O, C, weight);
                for (const int64_t N : {1, 2, 3, 16, 17, 33}) {
                    INFO(weight_format_name(format)
                         << ' ' << dtype_name(dtype) << " N " << N << " O " << O << " C " << C);
                    const auto x = random_values(N * C, 1), b = random_values(O, 3);
                    Buffer inp(dtype, {N, C}, x), bias(dtype, {O}, b), out(dtype, {N, O});
                    const bool biased = N % 2 == 1;
                    quantised_linear_forward(out, inp, quantised.weight, biased ? bias.tensor() : Tensor{},
                                             device().stream);
                    check_product(out, rounded(x, dtype), quantised.values(C),
                                  biased ? rounded(b, dtype) : std::vector<double>{}, N, O, C);
                }
            }
}

// A row's bits: alone, among others, at any place, whatever the others hold.
TEST_CASE("few rows: a row has the same bits in every batch", "[few_rows]") {
    const int64_t most = 37, O = 43, C = 390;
    for (const DType dtype : kFloatDTypes) {
        const auto x = random_values(most * C, 1);
        Buffer inp(dtype, {most, C}, x), weight(dtype, {O, C}, random_values(O * C, 2)), all(dtype, {most, O}),
            few(dtype, {most, O});
        for (const WeightFormat format : {WeightFormat::none, WeightFormat::int8, WeightFormat::fp8_block}) {
            std::unique_ptr<Quantised> quantised;
            if (format != WeightFormat::none) quantised = std::make_unique<Quantised>(format, O, C, weight);
            const auto forward = [&](Tensor out, Tensor rows) {
                if (quantised) quantised_linear_forward(out, rows, quantised->weight, {}, device().stream);
                else few_rows_forward(out, rows, weight, {}, device().stream);
            };
            forward(all, inp);
            for (const int64_t n : {1, 2, 4, 5, 8, 16, 20})
                for (int64_t first = 0; first + n <= most; first += 8) {  // rows of 780 bytes: on 16-byte boundaries
                    INFO(weight_format_name(format)
                         << ' ' << dtype_name(dtype) << ": rows " << first << " to " << first + n - 1);
                    const Tensor part = few.tensor().slice(0, n);
                    forward(part, inp.tensor().slice(first, n));
                    std::vector<unsigned char> got(part.bytes()), want(part.bytes());
                    copy_to_host(got.data(), part);
                    copy_to_host(want.data(), all.tensor().slice(first, n));
                    CHECK((got == want));
                }
        }
    }
}

// Every size of tile, with columns that are whole packs, and not.
TEST_CASE("few rows on tensor cores: a row has the same bits in every batch", "[few_rows][counted]") {
    const int64_t most = 69, O = 70;
    for (const DType dtype : {DType::bf16, DType::f16})
        for (const int64_t C : {390, 392}) {
            Buffer inp(dtype, {most, C}, random_values(most * C, 1)), weight(dtype, {O, C}, random_values(O * C, 2)),
                bias(dtype, {O}, random_values(O, 3)), all(dtype, {most, O}), few(dtype, {most, O});
            few_rows_mma_forward(all, inp, weight, bias, device().stream, 1);
            for (const auto& [n, n_blocks] : std::vector<std::pair<int64_t, int64_t>>{{1, 1},
                                                                                      {1, 3},
                                                                                      {1, 99},
                                                                                      {7, 1},
                                                                                      {8, 4},
                                                                                      {8, 99},
                                                                                      {9, 1},
                                                                                      {16, 99},
                                                                                      {17, 1},
                                                                                      {32, 1},
                                                                                      {33, 5},
                                                                                      {61, 99},
                                                                                      {61, 1}})
                for (const int64_t first : {0, 8}) {  // rows of 780 bytes: on 16-byte boundaries
                    INFO(dtype_name(dtype) << " C " << C << ": rows " << first << " to " << first + n - 1);
                    const Tensor part = few.tensor().slice(0, n);
                    few_rows_mma_forward(part, inp.tensor().slice(first, n), weight, bias, device().stream, n_blocks);
                    CHECK((to_floats(part) == to_floats(all.tensor().slice(first, n))));
                }
        }
}

namespace {

// In one launch the bits are those of two.
void check_activated(DType dtype, int64_t C) {
    const cudaStream_t stream = device().stream;
    for (const int64_t N : {1, 5, 8, 11, 16})
        for (const int64_t F : {8, 35})
            for (const int64_t n_blocks : {1, 4, 99}) {  // outputs of a block: 16, 8 and 4 chunks ahead, 8 and 8
                INFO(dtype_name(dtype) << " N " << N << " C " << C << " F " << F << ", " << n_blocks);
                Buffer inp(dtype, {N, C}, random_values(N * C, 1)), before(dtype, {N, 2 * F}),
                    weight(dtype, {2 * F, C}, random_values(2 * F * C, 2, 0.05)),
                    bias(dtype, {2 * F}, random_values(2 * F, 3)), gated(dtype, {N, F}), apart(dtype, {N, F}),
                    wide(dtype, {N, 2 * F}), wide_apart(dtype, {N, 2 * F});
                few_rows_mma_forward(before, inp, weight, bias, stream, 1);
                few_rows_mma_forward(gated, inp, weight, bias, stream, n_blocks, Activation::swiglu);
                few_rows_mma_forward(wide, inp, weight, bias, stream, n_blocks, Activation::gelu);
                swiglu_forward(apart, before, stream);
                gelu_forward(wide_apart, before, stream);
                CHECK(gated.bits() == apart.bits());
                CHECK(wide.bits() == wide_apart.bits());
            }
}

}  // namespace

TEST_CASE("few rows on tensor cores: a product and an activation after it", "[few_rows][counted]") {
    for (const DType dtype : {DType::bf16, DType::f16}) check_activated(dtype, 70);
}
TEST_CASE("few rows on tensor cores: an activation after more chunks than a warp loads ahead", "[few_rows][shapes]") {
    for (const DType dtype : {DType::bf16, DType::f16}) check_activated(dtype, 3 * 8 * 32 * 12 + 40);
}

namespace {

// A norm, the product behind it and an activation: in one launch the bits are those of three.
void check_normed(DType dtype, int64_t C, bool is_layernorm, bool adds, int64_t n_blocks) {
    INFO(dtype_name(dtype) << " C " << C << (is_layernorm ? " LayerNorm" : " RMSNorm") << (adds ? " of a sum, " : ", ")
                           << n_blocks);
    const cudaStream_t stream = device().stream;
    const int64_t F = 35;
    Buffer inp(dtype, {1, C}, random_values(C, 1)), branch(dtype, {1, C}, random_values(C, 2)),
        scale(dtype, {C}, random_values(C, 3)), shift(dtype, {C}, random_values(C, 4)),
        weight(dtype, {2 * F, C}, random_values(2 * F * C, 5, 0.05)), bias(dtype, {2 * F}, random_values(2 * F, 6)),
        row(dtype, {1, C}), sum(dtype, {1, C}), sum_apart(dtype, {1, C}), out(dtype, {1, 2 * F}),
        apart(dtype, {1, 2 * F}), gated(dtype, {1, F}), gated_apart(dtype, {1, F});
    Buffer mean(DType::f32, {1}), rstd(DType::f32, {1});
    const NormInFront norm{row,  adds ? sum.tensor() : Tensor{},    mean,  rstd,
                           inp,  adds ? branch.tensor() : Tensor{}, scale, is_layernorm ? shift.tensor() : Tensor{},
                           1e-5f};
    const Tensor want_sum = adds ? sum_apart.tensor() : Tensor{};
    if (is_layernorm) layernorm_forward(row, want_sum, mean, rstd, inp, norm.branch, scale, shift, norm.eps, stream);
    else rmsnorm_forward(row, want_sum, rstd, inp, norm.branch, scale, norm.eps, stream);
    for (const Activation activation : {Activation::none, Activation::gelu}) {
        few_rows_mma_forward(apart, row, weight, bias, stream, n_blocks, activation);
        few_rows_mma_normed_forward(out, norm, weight, bias, stream, n_blocks, activation);
        CHECK(out.bits() == apart.bits());
    }
    few_rows_mma_forward(gated_apart, row, weight, {}, stream, n_blocks, Activation::swiglu);
    few_rows_mma_normed_forward(gated, norm, weight, {}, stream, n_blocks, Activation::swiglu);
    CHECK(gated.bits() == gated_apart.bits());
    if (adds) CHECK(sum.bits() == sum_apart.bits());
}

}  // namespace

TEST_CASE("few rows on tensor cores: a norm in front of a product", "[few_rows][counted]") {
    const int64_t before = std::exchange(norm_row_columns, 16);
    for (const DType dtype : {DType::bf16, DType::f16})
        for (const bool is_layernorm : {false, true}) {
            for (const int64_t C : {8, 72, 200, 520, 1000})  // 1, 8, 16 and 32 threads a row
                check_normed(dtype, C, is_layernorm, true, 4);
            for (const int64_t n_blocks : {1, 99}) check_normed(dtype, 1160, is_layernorm, n_blocks == 1, n_blocks);
        }
    norm_row_columns = before;
}
// The shift takes all of LayerNorm's result but the rounding to 16 bits off again: there the last bit of rstd is seen.
// On a GPU a square is rounded with its addition, or before it: if not alike in both kernels, seeds 21 and 58 differ.
TEST_CASE("few rows on tensor cores: a norm in front of a product is rounded as by itself", "[few_rows]") {
    const int64_t before = std::exchange(norm_row_columns, 16), C = 1000, O = 16;
    const DType dtype = DType::f16;
    const cudaStream_t stream = device().stream;
    std::vector<double> first_columns(static_cast<size_t>(O * C));
    for (int64_t o = 0; o < O; ++o) first_columns[static_cast<size_t>(o * C + o)] = 1;
    for (const uint64_t seed : {1, 21, 58}) {
        Buffer inp(dtype, {1, C}, random_values(C, seed)), scale(dtype, {C}, random_values(C, seed + 1000)),
            shift(dtype, {C}, std::vector<double>(static_cast<size_t>(C))), weight(dtype, {O, C}, first_columns),
            row(dtype, {1, C}), mean(DType::f32, {1}), rstd(DType::f32, {1}), out(dtype, {1, O});
        layernorm_forward(row, {}, mean, rstd, inp, {}, scale, shift, 1e-5f, stream);
        std::vector<double> rounded = row.values();
        for (double& x : rounded) x = -x;
        shift.set(rounded);
        layernorm_forward(row, {}, mean, rstd, inp, {}, scale, shift, 1e-5f, stream);
        const NormInFront norm{row, {}, mean, rstd, inp, {}, scale, shift, 1e-5f};
        few_rows_mma_normed_forward(out, norm, weight, {}, stream, 4);
        std::vector<double> expected = row.values();
        expected.resize(static_cast<size_t>(O));
        INFO("seed " << seed);
        CHECK(out.values() == expected);
    }
    norm_row_columns = before;
}
TEST_CASE("few rows on tensor cores: a norm of the most columns", "[few_rows][shapes]") {
    const int64_t before = std::exchange(norm_row_columns, 16);
    for (const DType dtype : {DType::bf16, DType::f16}) check_normed(dtype, 2048, dtype == DType::f16, true, 4);
    norm_row_columns = before;
}
TEST_CASE("few rows: a norm in front of a product, in one launch or several", "[few_rows]") {
    const int64_t F = 24;
    const cudaStream_t stream = device().stream;
    for (const DType dtype : kFloatDTypes)
        for (const auto& [N, C] : std::vector<std::pair<int64_t, int64_t>>{{1, 40}, {1, 43}, {3, 40}, {1, 2056}}) {
            INFO(dtype_name(dtype) << " N " << N << " C " << C);
            Buffer inp(dtype, {N, C}, random_values(N * C, 1)), branch(dtype, {N, C}, random_values(N * C, 2)),
                scale(dtype, {C}, random_values(C, 3)), weight(dtype, {2 * F, C}, random_values(2 * F * C, 5, 0.05)),
                row(dtype, {N, C}), sum(dtype, {N, C}), rstd(DType::f32, {N}), before(dtype, {N, 2 * F}),
                out(dtype, {N, 2 * F}), apart(dtype, {N, 2 * F}), gated(dtype, {N, F}), gated_apart(dtype, {N, F});
            const NormInFront norm{row, sum, {}, rstd, inp, branch, scale, {}, 1e-5f};
            CHECK(few_rows_mma_takes_norm(norm, weight) == (N == 1 && C == 40));  // asked on a GPU, in 16 bits
            few_rows_normed_forward(out, {}, norm, weight, {}, Activation::none, stream);
            few_rows_normed_forward(gated, before, norm, weight, {}, Activation::swiglu, stream);
            const auto got_sum = sum.bits();
            rmsnorm_forward(row, sum, rstd, inp, branch, scale, norm.eps, stream);
            few_rows_forward(apart, row, weight, {}, stream);
            few_rows_activated_forward(gated_apart, before, row, weight, {}, Activation::swiglu, stream);
            CHECK(out.bits() == apart.bits());
            CHECK(gated.bits() == gated_apart.bits());
            CHECK(got_sum == sum.bits());
        }
    Buffer inp(DType::bf16, {1, 40}, random_values(40, 1)), weight(DType::bf16, {8, 41}), out(DType::bf16, {1, 8});
    NormInFront narrower;
    narrower.inp = inp;
    CHECK_THROWS_AS(few_rows_normed_forward(out, {}, narrower, weight, {}, Activation::none, stream), Error);
}
TEST_CASE("few rows: a norm in front of a product says what is wrong, and writes nothing", "[few_rows][errors]") {
    const DType dtype = DType::bf16;
    Buffer inp(dtype, {1, 40}, random_values(40, 1)), weight(dtype, {8, 40}), scale(dtype, {40}), wide(dtype, {48}),
        row(dtype, {1, 40}, random_values(40, 2)), sum(dtype, {1, 40}), rstd(DType::f32, {1}), out(dtype, {1, 8}),
        before(dtype, {1, 8}), gated(dtype, {1, 4});
    const NormInFront norm{row, sum, {}, rstd, inp, inp, scale, {}, 1e-5f};
    const auto written = row.bits();
    const auto check_named = [&](Tensor to, const NormInFront& its, Activation activation, const std::string& message) {
        CHECK_THROWS_WITH(few_rows_normed_forward(to, before, its, weight, {}, activation, device().stream),
                          ContainsSubstring("few_rows_normed_forward: " + message));
    };
    check_named(gated, norm, Activation::none, "out is bf16 (1, 4), expected bf16 (1, 8)");
    check_named(out, norm, Activation::swiglu, "out is bf16 (1, 8), expected bf16 (1, 4)");
    NormInFront wrong = norm;
    wrong.weight = wide;
    check_named(out, wrong, Activation::none, "norm.weight is bf16 (48), expected bf16 (40)");
    wrong = norm, wrong.bias = wide;
    check_named(out, wrong, Activation::none, "norm.bias is bf16 (48), expected bf16 (40)");
    wrong = norm, wrong.inp = wide.tensor().view({1, 48});
    check_named(out, wrong, Activation::none, "inp is bf16 (1, 48), expected bf16 (1, 40)");
    wrong = norm, wrong.branch = wide;
    check_named(out, wrong, Activation::none, "branch is bf16 (48), expected bf16 (1, 40)");
    wrong.branch = make_tensor(static_cast<char*>(wide.tensor().data) + 2, dtype, {1, 40});
    check_named(out, wrong, Activation::none, "branch starts at");
    wrong = norm, wrong.sum = {};
    check_named(out, wrong, Activation::none, "sum is no tensor");
    CHECK_THROWS_WITH(few_rows_normed_forward(gated.tensor().view({4}).slice(0, 3).view({1, 3}), before, norm,
                                              weight.tensor().slice(0, 7), {}, Activation::swiglu, device().stream),
                      ContainsSubstring("does not have two equal halves"));
    CHECK(row.bits() == written);
}

TEST_CASE("few rows: codes are rounded to nearest, and the largest weight has the largest code", "[few_rows]") {
    for (const WeightFormat format : kFormats)
        for (const DType dtype : kFloatDTypes) {
            INFO(weight_format_name(format) << ' ' << dtype_name(dtype));
            const int64_t O = 11, C = 300;
            std::vector<double> w = random_values(O * C, 4);
            w[5 * C + 17] = 1000;                                                             // an outlier
            for (int64_t c = 0; c < C; ++c) w[7 * C + c] = 0;                                 // a row of zeros
            for (int64_t c = 0; c < C; ++c) w[8 * C + c] *= 1e-20;                            // 0 in f16
            for (int64_t c = 0; c < C; ++c) w[9 * C + c] = c % 128 == 3 ? 127.0 : c - 150.5;  // ties of int8
            Buffer weight(dtype, {O, C}, w);
            const auto x = rounded(w, dtype);
            const Quantised q(format, O, C, weight);
            const double largest_code = is_int8(format) ? 127 : 448;
            int64_t wrong = 0;
            for (int64_t o = 0; o < O; ++o)
                for (int64_t first = 0; first < C; first += q.block) {
                    float amax = 0;
                    for (int64_t c = first; c < std::min(first + q.block, C); ++c)
                        amax = std::max(amax, static_cast<float>(std::abs(x[static_cast<size_t>(o * C + c)])));
                    const float scale = amax / static_cast<float>(largest_code);
                    wrong += q.scale_of(o, first, C) != scale;
                    for (int64_t c = first; c < std::min(first + q.block, C); ++c) {
                        const float quotient = static_cast<float>(x[static_cast<size_t>(o * C + c)]) / scale;
                        double code = is_int8(format) ? std::nearbyint(quotient)
                                                      : static_cast<double>(static_cast<__nv_fp8_e4m3>(quotient));
                        if (scale == 0) code = 0;
                        wrong += q.codes[static_cast<size_t>(o * C + c)] != code;
                    }
                }
            CHECK(wrong == 0);
            // The promise of the head comment, from the definition alone: half a scale, or 2^-4 and half of e4m3's
            // smallest step, 2^-10 scale. 1 + 2^-20: the roundings of scale and quotient.
            double worst = 0;
            const auto values = q.values(C);
            for (size_t i = 0; i < x.size(); ++i) {
                const int64_t at = static_cast<int64_t>(i);
                const double s = q.scale_of(at / C, at % C, C);
                const double bound = is_int8(format) ? s / 2 : std::max(std::abs(x[i]) * 0x1p-4, s * 0x1p-10);
                if (values[i] != x[i]) worst = larger(worst, std::abs(values[i] - x[i]) / bound);
            }
            CHECK(worst <= 1 + 0x1p-16);
        }
    // 190 / 127 of float32's smallest step: a scale of one step, by which the quotients are beyond the codes.
    Buffer tiny(DType::f32, {1, 3}, {190 * 0x1p-149, -190 * 0x1p-149, 0x1p-149});
    CHECK(Quantised(WeightFormat::int8, 1, 3, tiny).codes == std::vector<double>{127, -127, 1});
}

TEST_CASE("few rows: an infinity or NaN in a weight is seen in what it touches, and nowhere else", "[few_rows]") {
    const int64_t O = 10, C = 270, row = 9;
    for (const WeightFormat format : kFormats)
        for (const double bad : {static_cast<double>(INFINITY), static_cast<double>(-INFINITY), std::nan("")}) {
            std::vector<double> w = random_values(O * C, 5);
            w[row * C + 200] = bad;
            Buffer weight(DType::bf16, {O, C}, w), inp(DType::bf16, {1, C}, random_values(C, 6)),
                out(DType::bf16, {1, O});
            const Quantised q(format, O, C, weight);
            quantised_linear_forward(out, inp, q.weight, {}, device().stream);
            const std::vector<float> y = to_floats(out);
            for (int64_t o = 0; o < O; ++o) CHECK(std::isnan(y[static_cast<size_t>(o)]) == (o == row));
            CHECK(std::isnan(q.scale_of(row, 200, C)));
            CHECK(std::isnan(q.scale_of(row, 0, C)) == (q.block == C));
        }
}

// Output o has code o in column o % C, among zeros: in each lane of a vector, and (C = 37) behind the last whole one.
TEST_CASE("few rows: every code of 8 bits stands for its number", "[few_rows]") {
    for (const WeightFormat format : {WeightFormat::int8, WeightFormat::fp8})
        for (const int64_t C : {128, 37}) {
            INFO(weight_format_name(format) << " C " << C);
            const int64_t O = 256;
            const Buffer zeros(DType::f32, {O, C}, std::vector<double>(static_cast<size_t>(O * C)));
            Quantised q(format, O, C, zeros);
            std::vector<unsigned char> codes(static_cast<size_t>(O * C));
            for (int64_t o = 0; o < O; ++o) codes[static_cast<size_t>(o * C + o % C)] = static_cast<unsigned char>(o);
            const std::vector<float> scale(static_cast<size_t>(O), 0.5f);
            const auto copy = [](const Tensor& to, const void* from) {
                cudaCheck(cudaMemcpyAsync(to.data, from, to.bytes(), cudaMemcpyHostToDevice, device().stream));
            };
            copy(q.weight.codes, codes.data());
            copy(q.weight.scale, scale.data());
            Buffer inp(DType::f32, {1, C}, std::vector<double>(static_cast<size_t>(C), 1)), out(DType::f32, {1, O});
            quantised_linear_forward(out, inp, q.weight, {}, device().stream);
            const std::vector<float> y = to_floats(out);
            for (int o = 0; o < O; ++o) {
                __nv_fp8_e4m3 code;
                std::memcpy(&code, &codes[static_cast<size_t>(o * C + o % C)], 1);
                const float number = is_int8(format) ? static_cast<signed char>(o) : static_cast<float>(code);
                const float got = y[static_cast<size_t>(o)];
                CHECK((std::isnan(number) ? std::isnan(got) : got == 0.5f * number));
            }
        }
}

TEST_CASE("few rows: names, memory and errors", "[few_rows]") {
    for (const WeightFormat format : kFormats) CHECK(weight_format_from_name(weight_format_name(format)) == format);
    CHECK(weight_format_from_name("none") == WeightFormat::none);
    CHECK_THROWS_WITH(weight_format_from_name("int4"), ContainsSubstring("--weights int4: use none, int8, fp8"));

    Arena arena("test");
    CHECK_THROWS_WITH(take_quantised_weight(arena, WeightFormat::none, 4, 4), ContainsSubstring("the format is none"));
    for (const WeightFormat format : kFormats) {
        const QuantisedWeight counted = take_quantised_weight(arena, format, 5, 300);
        const bool per_row = format == WeightFormat::int8 || format == WeightFormat::fp8;
        CHECK((counted.codes.bytes() == 1500 && counted.scale.n() == (per_row ? 5 : 15)));
        CHECK(counted.codes.dtype == (is_int8(format) ? DType::i8 : DType::e4m3));
    }

    Buffer inp(DType::f32, {2, 32}, random_values(64, 1)), weight(DType::f32, {8, 32}, random_values(256, 2)),
        out(DType::f32, {2, 8}), narrow(DType::f32, {2, 7}), half(DType::f16, {8, 32}, random_values(256, 2)),
        bias(DType::f32, {7}, random_values(7, 3)), scale(DType::f32, {8, 2});
    const Quantised q(WeightFormat::int8, 8, 32, weight);
    cudaStream_t s = device().stream;
    CHECK_THROWS_WITH(few_rows_forward(narrow, inp, weight, {}, s), ContainsSubstring("few_rows_forward: out is"));
    CHECK_THROWS_WITH(few_rows_forward(out, inp, half, {}, s), ContainsSubstring("weight is f16 (8, 32)"));
    CHECK_THROWS_WITH(few_rows_forward(out, inp, weight, bias, s), ContainsSubstring("bias is f32 (7)"));
    CHECK_THROWS_WITH(quantised_linear_forward(out, inp, {weight, q.weight.scale}, {}, s),
                      ContainsSubstring("codes are f32, expected i8 or e4m3"));
    CHECK_THROWS_WITH(quantised_linear_forward(out, inp, {q.weight.codes, scale}, {}, s),
                      ContainsSubstring("scale is f32 (8, 2), expected f32 (8, 1)"));
    CHECK_THROWS_WITH(quantise_weight(q.weight, inp, s), ContainsSubstring("quantise_weight: weight is f32 (2, 32)"));
    Tensor shifted = weight;
    shifted.data = static_cast<char*>(shifted.data) + 4;
    CHECK_THROWS_WITH(few_rows_forward(out, inp, shifted, {}, s), ContainsSubstring("not a multiple of 16 bytes"));
    const Tensor no_rows = inp.tensor().slice(0, 0), no_out = make_tensor(out.tensor().data, DType::f32, {0, 8});
    Buffer wide(DType::f32, {3, 8});
    const Tensor shifted_out = make_tensor(static_cast<char*>(wide.tensor().data) + 4, DType::f32, {2, 8});
    CHECK_THROWS_WITH(few_rows_forward(shifted_out, inp, weight, {}, s), ContainsSubstring("forward: out starts at"));
    const Quantised other(WeightFormat::int8, 8, 48, Buffer(DType::f32, {8, 48}, random_values(384, 4)));
    CHECK_THROWS_WITH(quantised_linear_forward(out, inp, other.weight, {}, s),
                      ContainsSubstring("codes is i8 (8, 48)"));
    const Tensor codes = make_tensor(static_cast<char*>(other.weight.codes.data) + 4, DType::i8, {8, 32});
    CHECK_THROWS_WITH(quantised_linear_forward(out, inp, {codes, q.weight.scale}, {}, s),
                      ContainsSubstring("codes starts at"));
    CHECK_THROWS_WITH(quantised_linear_forward(out, inp, {q.weight.codes, bias}, {}, s),
                      ContainsSubstring("scale is f32 (7), expected f32 (8)"));
    CHECK_THROWS_WITH(few_rows_activated_forward(narrow, out, inp, weight, {}, Activation::gelu, s),
                      ContainsSubstring("few_rows_activated_forward: out is f32 (2, 7), expected f32 (2, 8)"));
    few_rows_forward(no_out, no_rows, weight, {}, s);
    quantised_linear_forward(no_out, no_rows, q.weight, {}, s);
    quantise_weight({q.weight.codes.slice(0, 0), q.weight.scale.slice(0, 0)}, weight.tensor().slice(0, 0), s);
    const int64_t too_many = 16 * 65535 + 1;  // the check comes before anything is read
    CHECK_THROWS_WITH(few_rows_forward(make_tensor(out.tensor().data, DType::f32, {too_many, 8}),
                                       make_tensor(inp.tensor().data, DType::f32, {too_many, 32}), weight, {}, s),
                      ContainsSubstring("inp has 1048561 rows, and at most 1048560"));
    const Tensor odd = weight.tensor().slice(0, 7), half_of_odd = make_tensor(out.tensor().data, DType::f32, {2, 3});
    CHECK_THROWS_WITH(few_rows_activated_forward(half_of_odd, narrow, inp, odd, {}, Activation::swiglu, s),
                      ContainsSubstring("does not have two equal halves"));
    CHECK_THROWS_WITH(few_rows_activated_forward(out, out, inp, weight, {}, Activation::none, s),
                      ContainsSubstring("no activation: use few_rows_forward"));
}
