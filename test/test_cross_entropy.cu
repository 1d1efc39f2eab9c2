// test/test_cross_entropy.cu: the fused loss and gradient against float64.
#include "layers/kept_rows.cuh"
#include "layers/layers.h"
#include "reference.h"

#include <cmath>
#include <utility>

namespace {

constexpr double kUnit = 0x1p-24;  // float32's unit roundoff

struct Reference {
    std::vector<double> losses, dlogits;
};
Reference cross_entropy(const std::vector<double>& logits, const std::vector<int>& targets, int64_t V, int64_t Vp,
                        double dloss) {
    Reference reference{{}, std::vector<double>(logits.size(), 0.0)};
    for (size_t n = 0; n < targets.size(); ++n) {
        const double* x = logits.data() + n * static_cast<size_t>(Vp);
        double* dx = reference.dlogits.data() + n * static_cast<size_t>(Vp);
        reference.losses.push_back(0);
        if (targets[n] < 0) continue;
        double max = -INFINITY, sum = 0;
        for (int64_t v = 0; v < V; ++v) max = std::max(max, x[v]);
        for (int64_t v = 0; v < V; ++v) sum += std::exp(x[v] - max);
        reference.losses[n] = std::log(sum) + max - x[targets[n]];
        for (int64_t v = 0; v < V; ++v) dx[v] = (std::exp(x[v] - max) / sum - (v == targets[n])) * dloss;
    }
    return reference;
}

struct Size {
    int64_t N, V, padding;
};
// V around one chunk, around the limit of a one-thread row (1024 on the CPU), and GPT-2's,
// which needs several warps a row.
const Size kSizes[] = {{1, 1, 0},    {300, 2, 3},   {5, 31, 0},    {37, 97, 47},  {600, 256, 0},
                       {9, 1000, 0}, {9, 1000, 47}, {5, 1024, 3},  {7, 1025, 0},  {3, 1025, 47},
                       {4, 2500, 4}, {3, 50257, 0}, {3, 50257, 3}, {3, 50257, 47}};

std::vector<int> random_targets(int64_t N, int64_t V, uint64_t seed) {
    std::vector<int> targets;
    for (int64_t n = 0; n < N; ++n)
        targets.push_back(static_cast<int>(uniform_below(seed, 1, static_cast<uint64_t>(n), static_cast<uint64_t>(V))));
    targets[0] = static_cast<int>(V) - 1;
    if (N > 2) targets[1] = -1, targets[2] = 0;
    if (N > 4) targets[4] = -100;
    return targets;
}

// Logits of rows of Vp, with NaN in the padding: nothing may look at it.
std::vector<double> random_logits(const Size& size, DType dtype, double scale) {
    const int64_t Vp = size.V + size.padding;
    auto logits = rounded(random_values(size.N * Vp, 7, scale), dtype);
    for (int64_t i = 0; i < size.N * Vp; ++i)
        if (i % Vp >= size.V) logits[static_cast<size_t>(i)] = NAN;
    return logits;
}

}  // namespace

TEST_CASE("cross_entropy: the reference's gradient is that of the reference", "[cross_entropy]") {
    const std::vector<int> targets{3, -1, 0};
    const auto logits = random_values(3 * 8, 1, 2.0);
    const auto loss = [&](const std::vector<double>& x) {
        const auto losses = cross_entropy(x, targets, 6, 8, 1).losses;
        return 0.7 * (losses[0] + losses[1] + losses[2]);
    };
    const auto gradient = cross_entropy(logits, targets, 6, 8, 0.7).dlogits;
    // step^2 = 1e-10 times third derivatives below 1, rounding 1e-15 / 1e-5
    for (const auto& [i, derivative] : finite_differences(loss, logits, 1e-5, 24))
        CHECK(gradient[i] == Approx(derivative).margin(1e-8));
}

namespace {

void check_against_float64(DType dtype, const Size& size) {
    const auto& [N, V, padding] = size;
    const int64_t Vp = V + padding;
    const auto targets = random_targets(N, V, 5);
    const auto x = random_logits(size, dtype, 4.0);
    const float dloss = 0.37f;
    Buffer logits(dtype, {N, Vp}, x), targets_i32(DType::i32, {N}), losses(DType::f32, {N}),
        forward_losses(DType::f32, {N});
    targets_i32.set_integers(targets);
    const auto logits_before = logits.bits();
    cross_entropy_forward(forward_losses, logits, targets_i32, V, device().stream);
    CHECK(logits.bits() == logits_before);
    cross_entropy_forward_backward(losses, logits, targets_i32, V, dloss, device().stream);
    CHECK(losses.bits() == forward_losses.bits());

    const Reference expected = cross_entropy(x, targets, V, Vp, static_cast<double>(dloss));
    // The sum of exponentials: each exp(-d) is off by 2 d + 4 units, but d exp(-d) <= 1/e, so 5 units; scaling
    // to a new maximum costs 6 more at most once per addition; at most V/128 + 40 positive terms are added one
    // after the other (V/256 in a thread that takes single elements,
    // then 32 lanes, 32 threads, 8 warps pairwise).
    const double sum_error = (11 + static_cast<double>(V) / 128 + 40) * kUnit;
    const std::string what = concat("N = ", N, ", V = ", V, ", Vp = ", Vp, ", ", dtype_name(dtype));
    check_close(losses.values(), expected.losses, 3 * kUnit, sum_error + 2 * kUnit, "losses, " + what);
    // p - 1 cancels at the target: half a unit of 1 remains. f16's steps below 2^-14 are 2^-24.
    check_close(logits.values(), expected.dlogits, unit_roundoff(dtype) + sum_error + 8 * kUnit,
                0.37 * (sum_error + 2 * kUnit) + (dtype == DType::f16 ? 0x1p-25 : 0), "dlogits, " + what);
}

}  // namespace

TEST_CASE("cross_entropy against float64", "[cross_entropy]") {
    for (DType dtype : kFloatDTypes)
        for (const Size& size : kSizes) check_against_float64(dtype, size);
}

// As on a GPU: several warps a row; a row that fits in shared memory, and 60001 float32, which do not.
TEST_CASE("cross_entropy with rows kept in shared memory against float64", "[cross_entropy]") {
    const int64_t before = std::exchange(kept_bytes_of_thread, 208);
    for (DType dtype : kFloatDTypes)
        for (const Size& size : std::vector<Size>{{9, 1025, 47}, {4, 2500, 4}, {3, 50257, 47}, {2, 60001, 7}})
            check_against_float64(dtype, size);
    kept_bytes_of_thread = before;
}

TEST_CASE("cross_entropy states what a GPU reads from memory again", "[cross_entropy]") {
    const auto again = [](DType dtype, int64_t V) {
        const int64_t bytes = static_cast<int64_t>(dtype_bytes(dtype));
        return kept_rows(10, V, V, bytes, static_cast<int>(16 / bytes), 256).again_bytes;
    };
    CHECK(again(DType::bf16, 50304) == 0);   // all of a row is kept
    CHECK(again(DType::bf16, 128256) == 0);  // what is not stays in the second-level cache
    CHECK(again(DType::f32, 128256) == 10 * (4 * 128256 - (device().block_shared_bytes - 256)));
}

// Of 48 KB the kernel's own 256 bytes leave room for 24448 16-bit numbers: one row, or eight of 3056.
TEST_CASE("cross_entropy asks for more shared memory than every kernel has", "[cross_entropy]") {
    const int64_t before = std::exchange(kept_bytes_of_thread, 208);
    const auto asks = [](int64_t V) { return kept_rows(10, V, V, 2, 8, 256).asks_for_more; };
    CHECK(!asks(3056));
    CHECK(asks(3064));
    CHECK(!asks(24448));
    CHECK(asks(24456));
    kept_bytes_of_thread = before;
}

TEST_CASE("cross_entropy writes exact zeros where there is no gradient", "[cross_entropy]") {
    for (DType dtype : kFloatDTypes) {
        const Size size{6, 50, 14};
        Buffer logits(dtype, {6, 64}, random_logits(size, dtype, 1.0)), targets(DType::i32, {6}),
            losses(DType::f32, {6});
        targets.set_integers({1, -1, 49, -100, 0, -2147483647});
        cross_entropy_forward_backward(losses, logits, targets, 50, 1.0f, device().stream);
        const auto dx = logits.values(), loss = losses.values();
        for (size_t row : {1, 3, 5}) {
            CHECK(loss[row] == 0);
            for (size_t v = 0; v < 64; ++v) CHECK(dx[row * 64 + v] == 0);
        }
        for (size_t row : {0, 2, 4})
            for (size_t v = 50; v < 64; ++v) CHECK(dx[row * 64 + v] == 0);
    }
}

TEST_CASE("cross_entropy with extreme logits", "[cross_entropy]") {
    for (DType dtype : kFloatDTypes)
        for (int64_t V : {5, 1030}) {  // one thread per row, and one warp per row
            const double big = rounded({1e4}, dtype)[0];
            std::vector<double> x(static_cast<size_t>(4 * V), -big);
            const size_t row = static_cast<size_t>(V);
            x[0] = big;                                             // row 0: certain, and right
            x[row + 1] = big;                                       // row 1: certain, and wrong
            for (size_t v = 0; v < row; ++v) x[2 * row + v] = big;  // row 2: all the same
            for (size_t v = 0; v < row; ++v)
                x[3 * row + v] = v == 2 || v == 3 ? -big : -INFINITY;  // row 3: masked but two
            Buffer logits(dtype, {4, V}, x), targets(DType::i32, {4}), losses(DType::f32, {4});
            targets.set_integers({0, 0, 0, 2});
            cross_entropy_forward_backward(losses, logits, targets, V, 1.0f, device().stream);
            const double n = static_cast<double>(V);
            check_close(losses.values(), {0, 2 * big, std::log(n), std::log(2.0)}, (n / 64 + 40) * kUnit, 0x1p-20,
                        "losses");
            const auto dx = logits.values();
            const double u = unit_roundoff(dtype) + (n / 64 + 40) * kUnit;
            CHECK(dx[0] == 0);
            CHECK(dx[1] == 0);
            CHECK(dx[row] == -1);
            CHECK(dx[row + 1] == 1);
            CHECK(dx[2 * row] == Approx(1 / n - 1).epsilon(u));
            CHECK(dx[2 * row + 1] == Approx(1 / n).epsilon(u));
            CHECK(dx[3 * row] == 0);
            CHECK(dx[3 * row + 2] == Approx(-0.5).epsilon(u));
            CHECK(dx[3 * row + 3] == Approx(0.5).epsilon(u));
        }
}

TEST_CASE("cross_entropy: a target beyond the vocabulary and NaN logits give a NaN loss", "[cross_entropy]") {
    for (int64_t V : {10, 2000}) {
        const int64_t Vp = V + 5;  // the target beyond the vocabulary has a column, of the padding
        auto x = random_values(3 * Vp, 3);
        x[static_cast<size_t>(2 * Vp + 7)] = NAN;
        Buffer logits(DType::f32, {3, Vp}, x), targets(DType::i32, {3}), losses(DType::f32, {3});
        targets.set_integers({static_cast<int>(V), 1, 1});
        cross_entropy_forward(losses, logits, targets, V, device().stream);
        const auto loss = losses.values();
        CHECK(std::isnan(loss[0]));
        CHECK(std::isfinite(loss[1]));
        CHECK(std::isnan(loss[2]));
    }
}

TEST_CASE("add_losses sums in double, to what was there if asked, and infinity and NaN stay", "[cross_entropy]") {
    const int64_t n = 1000;
    Buffer sum(DType::f32, {2}, {1e6, 0x1p-10}), losses(DType::f32, {n}, random_values(n, 3));
    double expected = 0;
    for (const double loss : losses.values()) expected += loss;
    const auto check_sum = [&](double wanted) {  // two floats have 48 bits together
        const auto halves = sum.values();
        CHECK(std::abs(halves[0] + halves[1] - wanted) <= 0x1p-47 * std::abs(wanted) + n * 0x1p-50);
    };
    add_losses(sum, losses, true, device().stream);
    check_sum(1e6 + 0x1p-10 + expected);
    add_losses(sum, losses, false, device().stream);
    check_sum(expected);
    for (const double bad : {INFINITY, NAN}) {
        Buffer one(DType::f32, {1}, {bad});
        add_losses(sum, one, false, device().stream);
        add_losses(sum, losses, true, device().stream);
        const auto halves = sum.values();
        CHECK((std::isnan(bad) ? std::isnan(halves[0]) : halves[0] == bad));
        CHECK(halves[1] == 0);
    }
}

TEST_CASE("cross_entropy twice gives the same bits", "[cross_entropy]") {
    for (int64_t V : {100, 3001, 50257}) {
        const auto x = random_values(4 * V, 9);
        Buffer first(DType::f32, {4, V}, x), second(DType::f32, {4, V}, x), targets(DType::i32, {4});
        Buffer losses1(DType::f32, {4}), losses2(DType::f32, {4});
        targets.set_integers({1, 2, -1, 99});
        cross_entropy_forward_backward(losses1, first, targets, V, 0.25f, device().stream);
        cross_entropy_forward_backward(losses2, second, targets, V, 0.25f, device().stream);
        CHECK(first.bits() == second.bits());
        CHECK(losses1.bits() == losses2.bits());
    }
}

TEST_CASE("cross_entropy names what is wrong", "[cross_entropy]") {
    Buffer logits(DType::f32, {4, 10}), targets(DType::i32, {4}), losses(DType::f32, {4}), long_row(DType::f32, {41});
    Buffer few(DType::i32, {3}), floats(DType::f32, {4}), half(DType::bf16, {4}), cube(DType::f32, {2, 2, 10}),
        whole(DType::i32, {4, 10});
    Tensor shifted = make_tensor(static_cast<char*>(long_row.tensor().data) + 4, DType::f32, {4, 10});
    cudaStream_t stream = device().stream;
    const std::string name = "cross_entropy_forward: ";
    CHECK_THROWS_WITH(cross_entropy_forward(losses, logits, targets, 11, stream),
                      ContainsSubstring(name + "V = 11 tokens do not fit in logits f32 (4, 10)"));
    CHECK_THROWS_WITH(cross_entropy_forward(losses, logits, targets, 0, stream), ContainsSubstring(name + "V = 0"));
    CHECK_THROWS_WITH(cross_entropy_forward(losses, logits, few, 10, stream),
                      ContainsSubstring(name + "targets is i32 (3), expected i32 (4)"));
    CHECK_THROWS_WITH(cross_entropy_forward(losses, logits, floats, 10, stream),
                      ContainsSubstring(name + "targets is f32"));
    CHECK_THROWS_WITH(cross_entropy_forward(half, logits, targets, 10, stream),
                      ContainsSubstring(name + "losses is bf16"));
    CHECK_THROWS_WITH(cross_entropy_forward(losses, cube, targets, 10, stream), ContainsSubstring(name + "logits is"));
    CHECK_THROWS_WITH(cross_entropy_forward(losses, whole, targets, 10, stream), ContainsSubstring("i32"));
    Buffer max(DType::f32, {4}), sums(DType::f32, {4, 2});  // a rank may have no token of a divided vocabulary: V = 0
    CHECK_NOTHROW(cross_entropy_parts(max, sums, logits, targets, 0, 0, stream));
    for (const int64_t V : {-1, 11})
        CHECK_THROWS_WITH(cross_entropy_parts(max, sums, logits, targets, 0, V, stream),
                          ContainsSubstring(concat("cross_entropy_parts: V = ", V, " tokens do not fit")));
    CHECK_THROWS_WITH(cross_entropy_forward_backward(losses, shifted, targets, 10, 1.0f, stream),
                      ContainsSubstring("cross_entropy_forward_backward: logits starts at"));
}
