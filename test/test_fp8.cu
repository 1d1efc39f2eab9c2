// test/test_fp8.cu: fp8 quantisation bit for bit, and linear layers on it against float64.
//
// The references here round by themselves: the nearest of all 256 codes, with exact arithmetic in double, ties to the
// even code. They share no code with the kernels nor with cpu/cuda_fp8.h.
#include "layers/layers.h"
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

using Values = std::vector<double>;
using Bytes = std::vector<unsigned char>;
const DType k16Bit[] = {DType::bf16, DType::f16};
const Fp8Recipe kRecipes[] = {Fp8Recipe::delayed, Fp8Recipe::current, Fp8Recipe::block};
std::vector<Fp8Recipe> recipes_here() {
    std::vector<Fp8Recipe> recipes(std::begin(kRecipes), std::end(kRecipes));
    std::erase_if(recipes, [](Fp8Recipe recipe) { return !has_fp8(recipe == Fp8Recipe::block); });
    return recipes;
}
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

// ---------------------------------------------------------------------------------------------------------------------
// The formats, by their definition

// The number that a code stands for. e4m3 has no infinity and one NaN a sign; in e5m2 0x7c is infinity and what follows
// NaN.
double decode(DType dtype, unsigned char code) {
    const bool e4m3 = dtype == DType::e4m3;
    const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, magnitude = code & 0x7f;
    const double sign = code & 0x80 ? -1 : 1;
    if (e4m3 ? magnitude == 0x7f : magnitude > 0x7c) return kNaN;
    if (!e4m3 && magnitude == 0x7c) return sign * kInfinity;
    const int exponent = magnitude >> mantissa_bits, mantissa = magnitude & ((1 << mantissa_bits) - 1);
    const double digits = mantissa + (exponent ? 1 << mantissa_bits : 0);
    return sign * std::ldexp(digits, std::max(exponent, 1) - bias - mantissa_bits);
}

// Nearest finite code, of two equally near ones the even one. Not finite: NaN.
unsigned char encode(DType dtype, double x) {
    if (!std::isfinite(x)) return 0x7f;
    const int largest_code = dtype == DType::e4m3 ? 0x7e : 0x7b;
    int low = 0, high = largest_code;  // codes without sign are ordered as their numbers are
    while (high - low > 1)
        (decode(dtype, static_cast<unsigned char>((low + high) / 2)) <= std::fabs(x) ? low : high) = (low + high) / 2;
    const double below = std::fabs(x) - decode(dtype, static_cast<unsigned char>(low)),
                 above = decode(dtype, static_cast<unsigned char>(high)) - std::fabs(x);
    const int code = below < above || (below == above && low % 2 == 0) ? low : high;
    return static_cast<unsigned char>(code | (std::signbit(x) ? 0x80 : 0));
}

// The largest power of two s with s amax <= the format's largest number, found by trying.
double scale_of(DType dtype, double amax) {
    if (amax == 0) return 1;
    int exponent = 126;
    while (std::ldexp(amax, exponent) > (dtype == DType::e4m3 ? 448 : 57344)) --exponent;
    return std::ldexp(1.0, exponent);
}

double finite_amax(const Values& x) {
    double most = 0;
    for (double v : x)
        if (std::isfinite(v)) most = std::max(most, std::fabs(v));
    return most;
}

// x (rows, K) in blocks of block_rows x 128 (0: all of it is one): codes, what they stand for, and the factors 1/s,
// (block rows, block columns).
struct Quantised {
    Bytes codes;
    Values values, factors;
};
Quantised quantise(DType dtype, const Values& x, int64_t rows, int64_t K, int64_t block_rows, double amax = -1) {
    Quantised q{Bytes(x.size()), Values(x.size()), {}};
    const int64_t height = block_rows ? block_rows : std::max<int64_t>(rows, 1),
                  width = block_rows ? 128 : std::max<int64_t>(K, 1);
    for (int64_t r = 0; r < rows; r += height)
        for (int64_t k = 0; k < K; k += width) {
            Values block;
            std::vector<size_t> at;
            for (int64_t i = r; i < std::min(r + height, rows); ++i)
                for (int64_t j = k; j < std::min(k + width, K); ++j)
                    at.push_back(static_cast<size_t>(i * K + j)), block.push_back(x[at.back()]);
            const double s = scale_of(dtype, amax >= 0 ? amax : finite_amax(block));
            for (size_t i : at) {
                q.codes[i] = encode(dtype, x[i] * s);
                q.values[i] = decode(dtype, q.codes[i]) / s;
            }
            q.factors.push_back(1 / s);
        }
    return q;
}

// Numbers over many powers of two, among them what is special.
Values awkward(int64_t n, uint64_t seed, DType dtype, bool with_nan) {
    Values x = random_values(n, seed);
    const Values exponents = random_values(n, seed + 1000, 4.0);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= std::exp2(std::clamp(exponents[i], -12.0, 12.0));
    for (size_t i = 3; i < x.size(); i += 97) x[i] = 0;
    for (size_t i = 5; i < x.size(); i += 89) x[i] = -0.0;
    for (size_t i = 7; i < x.size(); i += 11) x[i] = (static_cast<double>(i % 16) + 0.5) / 16;  // ties
    if (with_nan)
        for (size_t i = 50; i < x.size(); i += 211) x[i] = i % 3 == 0 ? kNaN : i % 3 == 1 ? kInfinity : -kInfinity;
    return rounded(x, dtype);
}

void check_codes(const Bytes& actual, const Bytes& expected) {
    REQUIRE(actual.size() == expected.size());
    size_t n_wrong = 0, first = 0;
    for (size_t i = actual.size(); i-- > 0;)
        if (actual[i] != expected[i]) ++n_wrong, first = i;
    INFO("the first wrong code is number " << first << ": " << int{actual[first]} << ", expected "
                                           << int{expected[first]});
    CHECK(n_wrong == 0);
}

struct Shape {
    int64_t rows, cols;
};
const Shape kShapes[] = {{16, 16}, {16, 352}, {144, 48}, {128, 128}, {272, 144}, {160, 272}};

}  // namespace

TEST_CASE("fp8: the reference's formats", "[fp8]") {
    CHECK(decode(DType::e4m3, 0x7e) == 448);
    CHECK(decode(DType::e4m3, 0x01) == 0x1p-9);
    CHECK(decode(DType::e4m3, 0xb8) == -1);
    CHECK(decode(DType::e5m2, 0x7b) == 57344);
    CHECK(decode(DType::e5m2, 0x01) == 0x1p-16);
    CHECK(encode(DType::e4m3, 17) == encode(DType::e4m3, 16));  // a tie: 16 is even, 18 is not
    CHECK(encode(DType::e4m3, 1e9) == 0x7e);
    for (DType dtype : {DType::e4m3, DType::e5m2})
        for (int code = 0; code < 256; ++code) {
            const double x = decode(dtype, static_cast<unsigned char>(code));
            if (std::isfinite(x)) CHECK(encode(dtype, x) == code);
        }
}

TEST_CASE("fp8: codes and scales of a tensor, bit for bit", "[fp8]") {
    for (DType dtype : k16Bit)
        for (DType code : {DType::e4m3, DType::e5m2})
            for (const auto& [rows, cols] : kShapes)
                for (bool transpose : {false, true}) {
                    INFO(dtype_name(dtype)
                         << " to " << dtype_name(code) << ", " << rows << " x " << cols << ", " << transpose);
                    const bool with_nan = cols % 3 == 0;
                    const Values x = awkward(rows * cols, 1, dtype, with_nan);
                    Buffer inp(dtype, {rows, cols}, x), amax(DType::f32, {1}), scale(DType::f32, {1}),
                        recorded(DType::f32, {1}, {0.5});
                    Buffer codes(code, {transpose ? cols : rows, transpose ? rows : cols});
                    const Fp8Matrix to{codes, scale};
                    fp8_amax(amax, inp, {}, device().stream);
                    fp8_quantise(to, transpose, inp, amax, recorded, device().stream);
                    const double most = finite_amax(x);
                    CHECK(amax.values() == Values{most});
                    CHECK(recorded.values() == Values{std::max(0.5, most)});
                    const Quantised all = quantise(code, transpose ? transposed(x, rows, cols) : x,
                                                   transpose ? cols : rows, transpose ? rows : cols, 0);
                    CHECK(scale.values() == all.factors);
                    check_codes(codes.bits(), all.codes);
                    // With another tensor's amax, smaller: what does not fit saturates.
                    amax.set({most / 16});
                    fp8_quantise(to, transpose, inp, amax, {}, device().stream);
                    const Quantised clipped =
                        quantise(code, transpose ? transposed(x, rows, cols) : x, transpose ? cols : rows,
                                 transpose ? rows : cols, 0, amax.values()[0]);
                    CHECK(scale.values() == clipped.factors);
                    check_codes(codes.bits(), clipped.codes);
                }
}

TEST_CASE("fp8: codes and scales of 1 x 128 blocks, bit for bit", "[fp8]") {
    for (DType dtype : k16Bit)
        for (const auto& [rows, cols] : kShapes)
            for (bool transpose : {false, true}) {
                INFO(dtype_name(dtype) << ", " << rows << " x " << cols << ", " << transpose);
                Values x = awkward(rows * cols, 2, dtype, cols % 3 == 0);
                for (int64_t j = 0; j < cols; ++j) x[static_cast<size_t>(5 * cols + j)] = 0;  // blocks of zeros
                const int64_t to_rows = transpose ? cols : rows, K = transpose ? rows : cols, L = ceil_div(K, 128);
                Buffer inp(dtype, {rows, cols}, x), codes(DType::e4m3, {to_rows, K}), scale(DType::f32, {L, to_rows});
                fp8_quantise({codes, scale, MatmulScale::row128}, transpose, inp, {}, {}, device().stream);
                const Quantised want = quantise(DType::e4m3, transpose ? transposed(x, rows, cols) : x, to_rows, K, 1);
                check_codes(codes.bits(), want.codes);
                CHECK(scale.values() == transposed(want.factors, to_rows, L));  // scale[l, row]
            }
}

TEST_CASE("fp8: weights and their transposes, bit for bit", "[fp8]") {
    // And one whose scales have rows of another length than those of the transpose: 8 and 4.
    std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
    shapes.push_back({16, 640});
    for (DType dtype : k16Bit)
        for (Fp8Recipe recipe : kRecipes)
            for (const auto& [O, C] : shapes) {
                INFO(fp8_recipe_name(recipe) << ", " << dtype_name(dtype) << ", " << O << " x " << C);
                const Values x = awkward(O * C, 3, dtype, C % 3 == 0);
                Buffer weight(dtype, {O, C}, x);
                Arena arena("fp8");
                (void)take_fp8_weight(arena, recipe, O, C);
                CHECK(arena.bytes() >= static_cast<size_t>(2 * O * C));
                arena.reserve();
                const Fp8Weight to = take_fp8_weight(arena, recipe, O, C);
                fp8_quantise_weight(to, weight, device().stream);
                const Quantised want = quantise(DType::e4m3, x, O, C, recipe == Fp8Recipe::block ? 128 : 0);
                const Quantised turned =
                    quantise(DType::e4m3, transposed(x, O, C), C, O, recipe == Fp8Recipe::block ? 128 : 0);
                Bytes codes(static_cast<size_t>(O * C));
                copy_to_host(codes.data(), to.forward.codes);
                record_bits(codes.data(), codes.size());
                check_codes(codes, want.codes);
                copy_to_host(codes.data(), to.backward.codes);
                record_bits(codes.data(), codes.size());
                check_codes(codes, turned.codes);
                // One factor; or (blocks of rows, blocks of columns), rows as long as a multiple of 4, zeros behind
                const auto factors = [&](const Tensor& scale, const Quantised& q, int64_t rows, int64_t cols) {
                    Values values;
                    for (float f : to_floats(scale)) values.push_back(f);
                    Values padded;
                    if (recipe != Fp8Recipe::block) padded = q.factors, rows = 0;
                    for (int64_t i = 0; i < ceil_div(rows, 128); ++i)
                        for (int64_t j = 0; j < fp8_block_scale_cols(cols); ++j)
                            padded.push_back(j < ceil_div(cols, 128)
                                                 ? q.factors[static_cast<size_t>(i * ceil_div(cols, 128) + j)]
                                                 : 0);
                    CHECK(values == padded);
                };
                factors(to.forward.scale, want, O, C);
                factors(to.backward.scale, turned, C, O);
            }
}

// Of a divided layer each rank has a part, and its caller has found the amax of the whole: here 100, whose scale is 4.
TEST_CASE("fp8: an amax of the caller's is taken as it is", "[fp8]") {
    if (!has_fp8()) SKIP_TEST(kNeedsFp8);
    const cudaStream_t stream = device().stream;
    Buffer weight(DType::bf16, {16, 32}, Values(16 * 32, 1.0)), inp(DType::bf16, {16, 32}, Values(16 * 32, 1.0)),
        out(DType::bf16, {16, 16}), dinp(DType::bf16, {16, 32}), saved(DType::f32, {2}, {100, 200}),
        scratch(DType::f32, {fp8_linear_scratch_n(Fp8Recipe::current, 16, 32, 16)});
    Arena arena("fp8");
    (void)take_fp8_weight(arena, Fp8Recipe::current, 16, 32);
    arena.reserve();
    const Fp8Weight to = take_fp8_weight(arena, Fp8Recipe::current, 16, 32);
    from_floats(to.amax, {100.0f});
    fp8_quantise_weight(to, weight, stream, AmaxFrom::caller);
    CHECK(to_floats(to.forward.scale) == std::vector<float>{0.25f});
    fp8_linear_forward(out, saved, inp, to, {}, {}, false, scratch, stream, AmaxFrom::caller);
    CHECK(out.values() == Values(16 * 16, 32.0));
    fp8_linear_backward_input(dinp, saved, out, to, false, {}, scratch, stream, AmaxFrom::caller);
    CHECK(dinp.values() == Values(16 * 32, 16 * 32.0));
    CHECK(saved.values() == Values{100, 200});
}

TEST_CASE("fp8: the scale at the ends of the range", "[fp8]") {
    // zero; the smallest bf16; exactly the largest code; one bf16 above; the largest bf16
    const double smallest = 0x1p-133, above = 450, largest_bf16 = 0x1.fep127;
    for (double most : {0.0, smallest, 0x1p-126, 448.0, above, 57344.0, 57600.0, largest_bf16})
        for (DType code : {DType::e4m3, DType::e5m2}) {
            INFO(most << " " << dtype_name(code));
            Values x(256, 0.0);
            x[100] = -most;
            Buffer inp(DType::bf16, {16, 16}, x), amax(DType::f32, {1}), scale(DType::f32, {1}), codes(code, {16, 16});
            fp8_amax(amax, inp, {}, device().stream);
            fp8_quantise({codes, scale}, false, inp, amax, {}, device().stream);
            const Quantised want = quantise(code, x, 16, 16, 0);
            CHECK(scale.values() == want.factors);
            CHECK(std::fpclassify(static_cast<float>(scale.values()[0])) == FP_NORMAL);
            check_codes(codes.bits(), want.codes);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The linear layer

namespace {

// What a linear layer is given, and all that it is asked for.
struct Layer {
    int64_t N, C, O;
    Fp8Recipe recipe;
    DType dtype, gradient_dtype;
    double g;  // the size of gradients, so far from that of inp that the other one's scale would lose digits
    Values x, w, b, dy, dw_before, db_before, dx_before;
    Buffer inp, weight, bias, dout, out, dinp, dweight, dbias, state, saved, scratch;
    Arena arena{"fp8"};
    Fp8Weight weight8;

    Layer(int64_t N_, int64_t C_, int64_t O_, Fp8Recipe recipe_, DType dtype_, DType gradient_dtype_)
        : N(N_), C(C_), O(O_), recipe(recipe_), dtype(dtype_), gradient_dtype(gradient_dtype_),
          g(dtype == DType::f16 ? 1e-3 : 1e-8), x(rounded(random_values(N * C, 1, 3.0), dtype)),
          w(rounded(random_values(O * C, 2, 0.02), dtype)), b(rounded(random_values(O, 3), dtype)),
          dy(rounded(random_values(N * O, 4, g), dtype)),
          dw_before(rounded(random_values(O * C, 5, g), gradient_dtype)),
          db_before(rounded(random_values(O, 6, g), gradient_dtype)),
          dx_before(rounded(random_values(N * C, 7, g), dtype)), inp(dtype, {N, C}, x), weight(dtype, {O, C}, w),
          bias(dtype, {O}, b), dout(dtype, {N, O}, dy), out(dtype, {N, O}), dinp(dtype, {N, C}),
          dweight(gradient_dtype, {O, C}, dw_before), dbias(gradient_dtype, {O}, db_before),
          state(DType::f32, {2, kFp8StateN}, Values(2 * kFp8StateN, 0.0)), saved(DType::f32, {2}),
          scratch(DType::f32, {fp8_linear_scratch_n(recipe, N, C, O)}) {
        (void)take_fp8_weight(arena, recipe, O, C);
        arena.reserve();
        weight8 = take_fp8_weight(arena, recipe, O, C);
        fp8_quantise_weight(weight8, weight, device().stream);
    }
    Tensor saved_or_none() const { return recipe == Fp8Recipe::block ? Tensor{} : saved.tensor(); }
    Tensor state_or_none() const { return recipe == Fp8Recipe::delayed ? state.tensor() : Tensor{}; }
    void forward(bool with_bias, bool record = true) {
        fp8_linear_forward(out, saved_or_none(), inp, weight8, with_bias ? bias.tensor() : Tensor{}, state_or_none(),
                           record, scratch, device().stream);
    }
    void backward_input(bool accumulate) {
        fp8_linear_backward_input(dinp, saved_or_none(), dout, weight8, accumulate, state_or_none(), scratch,
                                  device().stream);
    }
    void backward_weight() {
        fp8_linear_backward_weight(dweight, dbias, dout, inp, saved_or_none(), recipe, true, scratch, device().stream);
    }
};

// a (M, K) b (N, K)^T in float64, and the sums of its terms' magnitudes and squares.
struct Product {
    Values sum, size, squares;
};
Product product(const Values& a, const Values& b, int64_t M, int64_t N, int64_t K) {
    const Values zeros(static_cast<size_t>(M * N));
    Product p{zeros, zeros, zeros};
    for (int64_t i = 0; i < M; ++i)
        for (int64_t j = 0; j < N; ++j)
            for (int64_t k = 0; k < K; ++k) {
                const double term = a[static_cast<size_t>(i * K + k)] * b[static_cast<size_t>(j * K + k)];
                p.sum[static_cast<size_t>(i * N + j)] += term;
                p.size[static_cast<size_t>(i * N + j)] += std::fabs(term);
                p.squares[static_cast<size_t>(i * N + j)] += term * term;
            }
    return p;
}

// actual = before + a b^T, where a and b are what the codes stand for: off by float32's sum of K + 2 terms, each
// addition by 2^-23 of what has been added up, and one rounding to the result's type (subnormal f16 steps: 2^-24). On a
// GPU: Hopper's tensor cores keep about 14 bits of a sum of fp8 products until it is moved to a register, so 2^-10 of
// all terms; and some of cuBLASLt's kernels round a 16-bit product before they add to it, too.
void check_product(const Values& actual, const Product& exact, const Values& before, int64_t K, DType dtype,
                   const std::string& what) {
    INFO(what);
    double worst = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
        const double want = exact.sum[i] + (before.empty() ? 0 : before[i]),
                     size = exact.size[i] + (before.empty() ? 0 : std::fabs(before[i]));
        const double sum_error = device().is_cpu ? static_cast<double>(K + 2) * 0x1p-23 : 0x1p-10;
        const bool twice = !device().is_cpu && dtype != DType::f32 && !before.empty();
        const double rounded = std::fabs(want) + (twice ? std::fabs(exact.sum[i]) : 0);
        const double tolerance =
            sum_error * size + unit_roundoff(dtype) * rounded * 1.001 + (dtype == DType::f16 ? 0x1p-25 : 0);
        const double error = std::fabs(actual[i] - want) / tolerance;
        worst = larger(worst, error);
    }
    CHECK(worst <= 1);
}

// Against the product of what has not been quantised. A number is rounded by at most u of itself, 2^-4 (e4m3) or 2^-3
// (e5m2), and at most evenly in between: a standard deviation of u / sqrt(3). (Below the normal numbers, 2^-14 of the
// block's largest, it is more of the number, but nothing beside the others.) Both factors of a term are: sqrt(2/3) u |a
// b|. The errors of the K terms are independent, so their sum is a random walk. Six standard deviations, and the
// result's own rounding.
void check_quantised(const Values& actual, const Product& exact, const Values& before, double u, DType dtype,
                     const std::string& what) {
    INFO(what);
    double worst = 0, error_squares = 0, squares = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
        const double error = actual[i] - exact.sum[i] - (before.empty() ? 0 : before[i]);
        const double rounding = unit_roundoff(dtype) * (std::fabs(actual[i]) + (dtype == DType::f16 ? 0x1p-14 : 0));
        worst = larger(worst, (std::fabs(error) - rounding) / (std::sqrt(2.0 / 3 * exact.squares[i]) * u));
        error_squares += error * error, squares += exact.squares[i];
    }
    CHECK(worst <= 6);
    // And it is quantised: a product in 16 bits would be far more exact.
    if (before.empty()) CHECK(std::sqrt(error_squares / squares) > u / 8);
}

}  // namespace

TEST_CASE("fp8: linear forward and gradients against float64", "[fp8][shapes]") {
    if (!has_fp8()) SKIP_TEST(kNeedsFp8);
    struct Size {
        int64_t N, C, O;
    };
    for (const auto& [N, C, O] : {Size{16, 32, 48}, Size{48, 352, 80}, Size{144, 144, 272}})
        for (Fp8Recipe recipe : recipes_here())
            for (DType dtype : k16Bit)
                for (DType gradient_dtype : {dtype, DType::f32}) {
                    const bool block = recipe == Fp8Recipe::block, accumulate = gradient_dtype == DType::f32;
                    const std::string what = concat(fp8_recipe_name(recipe), " ", dtype_name(dtype), ", gradients ",
                                                    dtype_name(gradient_dtype), ", N ", N, " C ", C, " O ", O);
                    Layer l(N, C, O, recipe, dtype, gradient_dtype);
                    if (accumulate) l.dinp.set(l.dx_before);
                    l.forward(true);
                    l.backward_input(accumulate);
                    l.backward_weight();

                    const DType gradient = block ? DType::e4m3 : DType::e5m2;
                    const Values xt = transposed(l.x, N, C), dyt = transposed(l.dy, N, O), wt = transposed(l.w, O, C);
                    const auto q = [&](DType type, const Values& v, int64_t rows, int64_t K, int64_t height) {
                        return quantise(type, v, rows, K, block ? height : 0).values;
                    };
                    Values all_bias(static_cast<size_t>(N * O));
                    for (size_t i = 0; i < all_bias.size(); ++i) all_bias[i] = l.b[i % static_cast<size_t>(O)];
                    const Product y = product(q(DType::e4m3, l.x, N, C, 1), q(DType::e4m3, l.w, O, C, 128), N, O, C);
                    const Product dx = product(q(gradient, l.dy, N, O, 1), q(DType::e4m3, wt, C, O, 128), N, C, O);
                    const Product dw = product(q(gradient, dyt, O, N, 1), q(DType::e4m3, xt, C, N, 1), O, C, N);
                    const Values dx_before = accumulate ? l.dx_before : Values{};
                    const Values out = l.out.values(), dinp = l.dinp.values(), dweight = l.dweight.values();
                    check_product(out, y, all_bias, C, dtype, "out, " + what);
                    check_product(dinp, dx, dx_before, O, dtype, "dinp, " + what);
                    check_product(dweight, dw, l.dw_before, N, gradient_dtype, "dweight, " + what);

                    const double u = block ? 0x1p-4 : 0x1p-3;
                    check_quantised(out, product(l.x, l.w, N, O, C), all_bias, 0x1p-4, dtype, "exact out, " + what);
                    check_quantised(dinp, product(l.dy, wt, N, C, O), dx_before, u, dtype, "exact dinp, " + what);
                    check_quantised(dweight, product(dyt, xt, O, C, N), l.dw_before, u, gradient_dtype,
                                    "exact dweight, " + what);

                    Values db = l.db_before;  // from the 16-bit dout
                    for (size_t i = 0; i < l.dy.size(); ++i) db[i % static_cast<size_t>(O)] += l.dy[i];
                    check_close(l.dbias.values(), db, unit_roundoff(gradient_dtype), sum_error(N) * largest(db),
                                "dbias, " + what);
                }
}

TEST_CASE("fp8: without bias, and without its gradient", "[fp8]") {
    if (!has_fp8()) SKIP_TEST(kNeedsFp8);
    for (Fp8Recipe recipe : recipes_here()) {
        Layer l(32, 48, 64, recipe, DType::bf16, DType::f32);
        l.forward(false);
        l.backward_input(false);
        const int64_t height = recipe == Fp8Recipe::block ? 1 : 0;
        const Product y = product(quantise(DType::e4m3, l.x, l.N, l.C, height).values,
                                  quantise(DType::e4m3, l.w, l.O, l.C, height * 128).values, l.N, l.O, l.C);
        check_product(l.out.values(), y, {}, l.C, DType::bf16, "out without bias");
        check_quantised(l.out.values(), product(l.x, l.w, l.N, l.O, l.C), {}, 0x1p-4, DType::bf16, "exact out");
        const Bytes before = l.dbias.bits();
        fp8_linear_backward_weight(l.dweight, {}, l.dout, l.inp, l.saved_or_none(), recipe, true, l.scratch,
                                   device().stream);
        CHECK(l.dbias.bits() == before);
    }
}

// What a sampled token needs: any number of rows, each with the bits that it has among others.
TEST_CASE("fp8: a forward of any number of rows", "[fp8]") {
    if (!has_fp8()) SKIP_TEST(kNeedsFp8);
    // Of three tiles: what is quantised of the first must not lie where the others are read.
    Layer l(32, 272, 64, recipes_here().back(), DType::bf16, DType::f32);
    l.forward(true);
    const Bytes whole = l.out.bits();
    for (const int64_t n : {1, 3, 4, 7, 30}) {
        Buffer out(DType::bf16, {n, l.O});
        fp8_linear_forward(out, l.saved_or_none(), l.inp.tensor().slice(0, n), l.weight8, l.bias, l.state, false,
                           l.scratch, device().stream);
        INFO(n << " rows");
        CHECK((out.bits() == Bytes(whole.begin(), whole.begin() + 2 * n * l.O)));
    }
}

TEST_CASE("fp8: overflows reach the results as NaN", "[fp8]") {
    if (!has_fp8()) SKIP_TEST(kNeedsFp8);
    for (Fp8Recipe recipe : recipes_here())
        for (DType dtype : k16Bit) {
            Layer l(32, 48, 64, recipe, dtype, DType::f32);
            l.forward(true);
            fp8_advance(l.state, device().stream);  // delayed: now there is a history, and inf is far above it
            l.dy[5 * 64 + 3] = kInfinity, l.dout.set(l.dy);
            l.backward_input(false);
            l.backward_weight();
            const Values dinp = l.dinp.values(), dweight = l.dweight.values();
            for (size_t i = 0; i < dinp.size(); ++i) CHECK(std::isnan(dinp[i]) == (i / 48 == 5));        // row 5
            for (size_t i = 0; i < dweight.size(); ++i) CHECK(std::isnan(dweight[i]) == (i / 48 == 3));  // output 3
            for (double s : l.state.values()) CHECK(std::isfinite(s));
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The history of delayed scaling

TEST_CASE("fp8: delayed scaling takes the largest amax of the last 16 steps", "[fp8]") {
    if (!has_fp8()) SKIP_TEST(kNeedsFp8);
    Layer l(16, 32, 16, Fp8Recipe::delayed, DType::bf16, DType::f32);
    std::vector<double> history;  // of inp, the newest last
    for (int step = 0; step < 40; ++step) {
        // Two micro-batches, the second one's numbers larger or smaller; a spike in step 3 that is forgotten after step
        // 19.
        double step_amax = 0, used = 0;
        for (double d : history) used = std::max(used, d);
        for (int micro = 0; micro < 2; ++micro) {
            const double size = (step == 3 ? 64.0 : 1.0 + step % 5) * (micro ? 1.5 : 1.0);
            const Values x =
                rounded(random_values(16 * 32, 100 + static_cast<uint64_t>(2 * step + micro), size), DType::bf16);
            l.inp.set(x);
            const double amax = finite_amax(x), its = used > 0 ? used : amax;
            l.forward(false, false);  // evaluation: the history is not touched
            const Bytes evaluated = l.out.bits();
            CHECK(l.state.values()[1] == step_amax);
            l.forward(false);
            CHECK(l.out.bits() == evaluated);
            step_amax = std::max(step_amax, amax);
            const Values state = l.state.values();
            CHECK(state[0] == used);
            CHECK(state[1] == step_amax);
            CHECK(to_floats(l.saved.tensor().slice(0, 1))[0] == its);  // dout's place has nothing yet
            l.forward(false);                                          // recomputation
            CHECK(l.out.bits() == evaluated);
            CHECK(l.state.values() == state);
            const Product y = product(quantise(DType::e4m3, x, 16, 32, 0, its).values,
                                      quantise(DType::e4m3, l.w, 16, 32, 0).values, 16, 16, 32);
            check_product(l.out.values(), y, {}, 32, DType::bf16, concat("step ", step));
        }
        fp8_advance(l.state, device().stream);
        history.push_back(step_amax);
        if (history.size() > 16) history.erase(history.begin());
        const Values state = l.state.values();
        for (size_t k = 0; k < 16; ++k)
            CHECK(state[2 + k] == (k < history.size() ? history[history.size() - 1 - k] : 0.0));
        CHECK(state[1] == 0);
    }
}

TEST_CASE("fp8: micro-batches in flight keep their own scales", "[fp8]") {
    if (!has_fp8()) SKIP_TEST(kNeedsFp8);
    // Two forwards, then the two backwards, the weights' part last of all: the same bits as one micro-batch after the
    // other.
    for (Fp8Recipe recipe : recipes_here()) {
        Layer a(32, 48, 64, recipe, DType::bf16, DType::f32), b(32, 48, 64, recipe, DType::bf16, DType::f32);
        Buffer first_dout(DType::bf16, {32, 64}, random_values(32 * 64, 21, 1e-4)),
            first_inp(DType::bf16, {32, 48}, random_values(32 * 48, 20, 9.0)), saved(DType::f32, {2});
        const Tensor first_saved = recipe == Fp8Recipe::block ? Tensor{} : saved.tensor();
        const auto s = device().stream;
        const auto forward = [&](Layer& l) {
            fp8_linear_forward(l.out, first_saved, first_inp, l.weight8, {}, l.state_or_none(), true, l.scratch, s);
        };
        const auto backward_input = [&](Layer& l) {
            fp8_linear_backward_input(l.dinp, first_saved, first_dout, l.weight8, false, l.state_or_none(), l.scratch,
                                      s);
        };
        const auto backward_weight = [&](Layer& l) {
            fp8_linear_backward_weight(l.dweight, l.dbias, first_dout, first_inp, first_saved, recipe, true, l.scratch,
                                       s);
        };
        forward(a), backward_input(a), backward_weight(a);
        a.forward(false), a.backward_input(false), a.backward_weight();
        forward(b), b.forward(false), backward_input(b), b.backward_input(false), backward_weight(b),
            b.backward_weight();
        CHECK(a.out.bits() == b.out.bits());
        CHECK(a.dinp.bits() == b.dinp.bits());
        CHECK(a.dweight.bits() == b.dweight.bits());
        CHECK(a.dbias.bits() == b.dbias.bits());
        CHECK(a.state.bits() == b.state.bits());
        if (recipe != Fp8Recipe::delayed) continue;
        // The first row of the state is inp's, the second dout's.
        const auto largest = [](const Buffer& one, const Buffer& other) {
            return std::max(finite_amax(one.values()), finite_amax(other.values()));
        };
        const double of_inp = largest(first_inp, a.inp), of_dout = largest(first_dout, a.dout);
        CHECK(a.state.values()[1] == of_inp);
        CHECK(a.state.values()[kFp8StateN + 1] == of_dout);
        fp8_advance(a.state, s);
        a.forward(false), a.backward_input(false);
        CHECK(a.saved.values() == Values{of_inp, of_dout});
    }
}

TEST_CASE("fp8: all layers' states advance in one call", "[fp8]") {
    const int64_t n = 300;
    Values x(static_cast<size_t>(n * kFp8StateN));
    for (size_t i = 0; i < x.size(); ++i) x[i] = uniform_below(9, 9, i, 100);
    Buffer states(DType::f32, {n, kFp8StateN}, x);
    fp8_advance(states, device().stream);
    Values want = x;
    for (int64_t i = 0; i < n; ++i) {
        double* const state = &want[static_cast<size_t>(i * kFp8StateN)];
        for (int64_t k = kFp8StateN - 1; k > 1; --k) state[k] = state[k - 1];
        state[0] = *std::max_element(state + 2, state + kFp8StateN);
        state[1] = 0;
    }
    CHECK(states.values() == want);
}

TEST_CASE("fp8 says what is wrong with its arguments", "[fp8][errors]") {
    const auto s = device().stream;
    CHECK(fp8_recipe_from_name("block") == Fp8Recipe::block);
    for (Fp8Recipe recipe : kRecipes) {
        CHECK(fp8_recipe_from_name(fp8_recipe_name(recipe)) == recipe);
        if (has_wgmma()) CHECK_NOTHROW(expect_fp8_device(recipe));
    }
    if (!has_fp8(true)) SKIP_TEST(kNeedsFp8);
    CHECK_THROWS_WITH(fp8_recipe_from_name("mxfp8"),
                      ContainsSubstring("--fp8 mxfp8: use none, delayed, current or block"));
    Arena arena("fp8");
    CHECK_THROWS_WITH(take_fp8_weight(arena, Fp8Recipe::block, 32, 40),
                      ContainsSubstring("input channels of a linear layer that are a multiple of 16, not 40"));
    CHECK_THROWS_WITH(take_fp8_weight(arena, Fp8Recipe::block, 50, 32),
                      ContainsSubstring("output channels of a linear layer"));
    CHECK_THROWS_WITH(take_fp8_weight(arena, Fp8Recipe::none, 32, 32), ContainsSubstring("recipe is none"));

    Layer l(32, 48, 64, Fp8Recipe::delayed, DType::bf16, DType::f32),
        block(32, 48, 64, Fp8Recipe::block, DType::bf16, DType::f32);
    CHECK_THROWS_WITH(fp8_linear_forward(l.out, {}, l.inp, l.weight8, {}, l.state, true, l.scratch, s),
                      ContainsSubstring("fp8_linear_forward: saved is no tensor, expected f32 (2)"));
    CHECK_THROWS_WITH(fp8_linear_forward(l.out, l.saved, l.inp, l.weight8, {}, {}, true, l.scratch, s),
                      ContainsSubstring("state is no tensor"));
    CHECK_THROWS_WITH(fp8_linear_forward(l.out, l.saved, l.dout, l.weight8, {}, l.state, true, l.scratch, s),
                      ContainsSubstring("fp8_linear_forward: inp is bf16 (32, 64), expected bf16 (*, 48)"));
    CHECK_THROWS_WITH(
        fp8_linear_forward(l.out, l.saved, l.inp, l.weight8, {}, l.state, true, l.scratch.tensor().slice(0, 8), s),
        ContainsSubstring("fp8_linear_forward: scratch is"));
    CHECK_THROWS_WITH(fp8_linear_forward(l.out, l.saved, l.inp, l.weight8, l.dbias, l.state, true, l.scratch, s),
                      ContainsSubstring("fp8_linear_forward: bias is f32"));
    CHECK_THROWS_WITH(fp8_linear_backward_input(l.out, l.saved, l.dout, l.weight8, false, l.state, l.scratch, s),
                      ContainsSubstring("fp8_linear_backward_input: dinp is"));
    Tensor few = block.dout.tensor().slice(0, 24), few_inp = block.inp.tensor().slice(0, 24);
    CHECK_THROWS_WITH(
        fp8_linear_backward_weight(block.dweight, {}, few, few_inp, {}, Fp8Recipe::block, true, block.scratch, s),
        ContainsSubstring("tokens of a micro-batch (sequences times length) that are a multiple of 16, not 24"));
    CHECK_THROWS_WITH(fp8_linear_backward_input(block.dinp.tensor().slice(0, 6), {}, block.dout.tensor().slice(0, 6),
                                                block.weight8, false, {}, block.scratch, s),
                      ContainsSubstring("that are a multiple of 4, not 6"));
    Buffer whole(DType::f32, {32, 48}), codes(DType::e4m3, {32, 48}), scale(DType::f32, {1});
    CHECK_THROWS_WITH(fp8_quantise({codes, scale}, false, whole, scale, {}, s),
                      ContainsSubstring("inp is f32, expected bf16 or f16"));
    CHECK_THROWS_WITH(fp8_quantise({codes, scale}, true, l.inp, scale, {}, s),
                      ContainsSubstring("fp8_quantise: codes is"));
    CHECK_THROWS_WITH(fp8_amax(scale, whole, {}, s), ContainsSubstring("fp8_amax: inp is f32"));
    CHECK_THROWS_WITH(fp8_advance(l.inp, s), ContainsSubstring("fp8_advance: states is"));

    // What a weight is quantised to.
    const auto quantise = [&](const Layer& layer, auto&& change) {
        Fp8Weight to = layer.weight8;
        change(to);
        fp8_quantise_weight(to, layer.weight, s);
    };
    CHECK_THROWS_WITH(quantise(l, [](Fp8Weight& to) { to.backward.codes = {}; }),
                      ContainsSubstring("fp8_quantise_weight: backward.codes is no tensor, expected e4m3 (48, 64)"));
    CHECK_THROWS_WITH(quantise(l, [](Fp8Weight& to) { to.amax = {}; }),
                      ContainsSubstring("fp8_quantise_weight: amax is no tensor"));
    CHECK_THROWS_WITH(quantise(l, [](Fp8Weight& to) { to.forward.scale = {}; }),
                      ContainsSubstring("fp8_quantise_weight: scale is no tensor"));
    CHECK_THROWS_WITH(quantise(block, [](Fp8Weight& to) { to.forward.scale.shape[1] = 2; }),
                      ContainsSubstring("fp8_quantise_weight: forward.scale is f32 (1, 2), expected f32 (1, 4)"));
}
