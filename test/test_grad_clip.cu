// The global norm of the gradients, and the factor that clips them, against float64.
//
//   run:   build/cpu/run_tests -# "[#test_grad_clip]"
#include <algorithm>
#include <cmath>

#include "optim/optim.h"
#include "reference.h"
#include "temp_folder.h"

namespace {

// One block of the first stage sums kChunkN elements, one thread kRows of them in f32 (optim/grad_clip.cu).
constexpr int64_t kChunkN = 65536, kRows = 512;
const int64_t kSizes[] = {1, 3, 1000, 4097, kChunkN - 1, kChunkN, 2 * kChunkN + 1, 1000003};

// Relative error of the norm. A sum of kRows squares in f32 is off by at most kRows * u (each square is rounded once,
// and takes part in at most kRows - 1 roundings of the sum); the root halves that; rounding the norm to f32 adds one u.
constexpr double kTolerance = (kRows / 2 + 1) * 0x1p-24;

struct Result {
    double norm, scale;
    std::vector<unsigned char> bits;
};

Result run(const Tensor& grads, float max_norm, float unscale = 1) {
    Buffer result(DType::f32, {2}), scratch(DType::f32, {grad_norm_scratch_n(grads.n())});
    grad_norm(result, grads, max_norm, unscale, scratch, device().stream);
    const std::vector<double> values = result.values();
    return {values[0], values[1], result.bits()};
}

double reference_norm(const std::vector<double>& values) {
    double sum = 0;
    for (double g : values) sum += g * g;
    return std::sqrt(sum);
}

}  // namespace

TEST_CASE("grad_norm equals float64, for every size and dtype", "[grad_clip][counted]") {
    for (DType dtype : kFloatDTypes)
        for (int64_t n : kSizes) {
            const std::vector<double> values = rounded(random_values(n, 7, 0.01), dtype);
            const Buffer grads(dtype, {n}, values);
            const double norm = reference_norm(values);
            const Result result = run(grads, static_cast<float>(norm / 3));
            INFO(dtype_name(dtype) << ", n " << n);
            CHECK(std::abs(result.norm - norm) <= kTolerance * norm);
            const double scale = std::min(1.0, static_cast<float>(norm / 3) / (norm + 1e-6));
            CHECK(std::abs(result.scale - scale) <= (kTolerance + 3 * 0x1p-24) * scale);
        }
}

TEST_CASE("grad_norm is exact where float sums are exact", "[grad_clip]") {
    // Small integers: no sum is rounded, so a single element left out or taken twice shows among a million.
    for (DType dtype : kFloatDTypes)
        for (int64_t n : kSizes) {
            std::vector<double> values(static_cast<size_t>(n));
            for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i * 7 % 5 + 1);
            INFO(dtype_name(dtype) << ", n " << n);
            CHECK(run(Buffer(dtype, {n}, values), 1.0f).norm == static_cast<float>(reference_norm(values)));
        }
}

TEST_CASE("grad_norm sees every place exactly once", "[grad_clip]") {
    const int64_t n = 3 * kChunkN + 1234;
    for (DType dtype : kFloatDTypes) {
        Buffer grads(dtype, {n}, std::vector<double>(static_cast<size_t>(n), 0.0));
        bool good = true;
        std::vector<int64_t> places = {0,   1,    15,   16,          31,      32,          511,
                                       512, 8191, 8192, kChunkN - 1, kChunkN, 2 * kChunkN, n - 1};
        for (uint64_t k = 0; k < 40; ++k)
            places.push_back(static_cast<int64_t>(uniform_below(5, 0, k, static_cast<uint64_t>(n))));
        for (int64_t place : places) {
            const Tensor one = grads.tensor().slice(place, 1);
            from_floats(one, {-3.5f});
            const double norm = run(grads, 0).norm;
            if (norm != 3.5) good = false, UNSCOPED_INFO("element " << place << " alone gives the norm " << norm);
            from_floats(one, {0.0f});
        }
        INFO(dtype_name(dtype));
        CHECK(good);
    }
}

TEST_CASE("clipping is active above max_norm, inactive below, and can be switched off", "[grad_clip]") {
    const Buffer grads(DType::f32, {4}, {3, 0, -4, 12});  // norm 13
    CHECK(run(grads, 1.0f).norm == 13);
    CHECK(std::abs(run(grads, 1.0f).scale - 1 / 13.000001) <= 4 * 0x1p-24 / 13);
    CHECK(std::abs(run(grads, 6.5f).scale - 0.5) <= 1e-6 / 13);
    CHECK(run(grads, 13.1f).scale == 1);
    CHECK(run(grads, 1e30f).scale == 1);
    CHECK(run(grads, 0.0f).scale == 1);
    CHECK(run(grads, -1.0f).scale == 1);
    const Result zero = run(Buffer(DType::f32, {5}, {0, 0, 0, 0, 0}), 1.0f);
    CHECK(zero.norm == 0);
    CHECK(zero.scale == 1);
}

TEST_CASE("grad_norm takes back what the loss was multiplied by", "[grad_clip]") {
    // Powers of two change no mantissa: the norm is the same bit for bit, and the scale unscale times the other one.
    for (DType dtype : kFloatDTypes)
        for (int64_t n : {int64_t{1000}, kChunkN + 77}) {
            const std::vector<double> values = rounded(random_values(n, 7, 0.01), dtype);
            std::vector<double> larger = values;
            for (double& g : larger) g *= 1024;
            const Buffer grads(dtype, {n}, values), scaled(dtype, {n}, larger);
            for (float max_norm : {0.0f, 0.1f, 1e6f}) {
                const Result plain = run(grads, max_norm), unscaled = run(scaled, max_norm, 1.0f / 1024);
                CHECK(unscaled.norm == plain.norm);
                CHECK(unscaled.scale == plain.scale / 1024);
            }
        }
    // f16 at its largest everywhere: 65504^2 times the 512 elements of a thread is 2e12, far from f32's largest.
    const int64_t n = 2 * kChunkN + 5;
    const Buffer largest_f16(DType::f16, {n}, std::vector<double>(static_cast<size_t>(n), 65504.0));
    const Result result = run(largest_f16, 1.0f, 0x1p-16f);
    const double norm = 65504.0 / 65536 * std::sqrt(static_cast<double>(n));
    CHECK(std::abs(result.norm - norm) <= kTolerance * norm);
    CHECK(std::abs(result.scale - 0x1p-16 / norm) <= (kTolerance + 1e-6 / norm) * 0x1p-16 / norm);
    CHECK(std::isnan(run(Buffer(DType::f16, {2}, {1, INFINITY}), 1.0f, 0x1p-16f).scale));
}

TEST_CASE("an infinite or NaN gradient anywhere makes the scale NaN", "[grad_clip]") {
    const int64_t n = kChunkN + 77;
    const double bad_values[] = {INFINITY, -INFINITY, NAN};
    for (DType dtype : kFloatDTypes)
        for (double bad : bad_values)
            for (int64_t place : {int64_t{0}, int64_t{40000}, kChunkN - 1, kChunkN, n - 1})
                for (float max_norm : {1.0f, 0.0f}) {
                    std::vector<double> values(static_cast<size_t>(n), 0.25);
                    values[static_cast<size_t>(place)] = bad;
                    const Result result = run(Buffer(dtype, {n}, values), max_norm);
                    const bool as_bad = std::isnan(bad) ? std::isnan(result.norm) : result.norm == INFINITY;
                    if (std::isnan(result.scale) && as_bad) continue;
                    FAIL_CHECK(dtype_name(dtype) << ": " << bad << " at " << place << " gives norm " << result.norm
                                                 << ", scale " << result.scale);
                }
}

TEST_CASE("a sum of squares beyond float32 has an infinite norm", "[grad_clip]") {
    for (const auto& [n, value] : {std::pair(int64_t{1}, 2e19), {kChunkN, 8e17}}) {
        const Result result = run(Buffer(DType::f32, {n}, std::vector<double>(static_cast<size_t>(n), value)), 1.0f);
        CHECK(result.norm == INFINITY);
        CHECK(std::isnan(result.scale));
    }
}

TEST_CASE("a scale that is NaN stays NaN where that is asked for", "[grad_clip]") {
    const Buffer sums(DType::f32, {2, 2}, {9, 0, 16, 0});
    for (const double before : {0.0, 0.5, static_cast<double>(NAN)})
        for (const bool stays_nan : {false, true}) {
            Buffer result(DType::f32, {2}, {1, before});
            clip_scale(sums, {result, 0, 0.25f, stays_nan}, device().stream);
            CHECK(result.values()[0] == 1.25);
            if (stays_nan && std::isnan(before)) CHECK(std::isnan(result.values()[1]));
            else CHECK(result.values()[1] == 0.25);
        }
}

TEST_CASE("grad_norm repeats bit for bit, wherever the gradients lie", "[grad_clip]") {
    // In strict mode the threads run in another order each time.
    const int64_t n = 2 * kChunkN + 4097;
    for (DType dtype : kFloatDTypes) {
        const std::vector<double> values = random_values(n, 11);
        const Buffer grads(dtype, {n}, values);
        const Result first = run(grads, 1.0f);
        for (int k = 0; k < 3; ++k) CHECK((run(grads, 1.0f).bits == first.bits));
        // A slice of a larger buffer that starts on no boundary but its element's; what is around it does not count.
        std::vector<double> inside(3, 1000.0);
        inside.insert(inside.end(), values.begin(), values.end());
        inside.push_back(NAN);
        const Buffer larger(dtype, {n + 4}, inside);
        CHECK((run(larger.tensor().slice(3, n), 1.0f).bits == first.bits));
    }
}

TEST_CASE("grad_norm refuses wrong arguments", "[grad_clip]") {
    const int64_t scratch_n = grad_norm_scratch_n(10);
    Buffer result(DType::f32, {2}), one(DType::f32, {1}), grads(DType::bf16, {10}), scratch(DType::f32, {scratch_n});
    Buffer integers(DType::i32, {10}), short_scratch(DType::f32, {scratch_n - 1}), matrix(DType::f32, {2, 5});
    from_floats(grads, std::vector<float>(10, 1.0f));
    const auto error = [&](Tensor result, Tensor grads, float max_norm, Tensor scratch) {
        return error_of([&] { grad_norm(result, grads, max_norm, 1.0f, scratch, device().stream); });
    };
    CHECK(error(result, grads, 1.0f, scratch).empty());
    CHECK_THAT(error(one, grads, 1.0f, scratch), ContainsSubstring("sum_squares: sum is f32 (1)"));
    CHECK_THAT(error(result, matrix, 1.0f, scratch), ContainsSubstring("sum_squares: grads is f32 (2, 5)"));
    CHECK_THAT(error(result, integers, 1.0f, scratch), ContainsSubstring("i32"));
    CHECK_THAT(error(result, grads, 1.0f, short_scratch), ContainsSubstring("sum_squares: scratch"));
    Buffer codes(DType::i32, {scratch_n}), longer_scratch(DType::f32, {scratch_n + 1});
    CHECK_THAT(error(result, grads, 1.0f, codes), ContainsSubstring("sum_squares: scratch is i32"));
    CHECK_THAT(error(result, grads, 1.0f, longer_scratch.tensor().slice(1, scratch_n)),
               ContainsSubstring("scratch must be on an 8-byte boundary"));
    CHECK_THAT(error(result, grads, NAN, scratch), ContainsSubstring("max_norm is NaN"));
    for (float unscale : {0.0f, -1.0f, INFINITY, NAN})
        CHECK_THAT(error_of([&] { grad_norm(result, grads, 1.0f, unscale, scratch, device().stream); }),
                   ContainsSubstring("unscale is"));
}

TEST_CASE("sums of squares of many parts have the bits of each by itself", "[grad_clip][counted]") {
    // Parts that begin on no boundary, are shorter and longer than a chunk, and leave gaps of NaN. Row 4 has two parts,
    // rows 0 and 3 none.
    const std::vector<SquareSums::Part> parts = {
        {0, 70000, 1}, {70003, 2 * kChunkN + 5, 2}, {202000, kChunkN, 4}, {267601, 100, 4}, {267712, 3 * kChunkN, 5}};
    const int64_t n = parts.back().first + parts.back().n;
    for (const DType dtype : kFloatDTypes) {
        INFO(dtype_name(dtype));
        std::vector<double> values(static_cast<size_t>(n), NAN);
        const std::vector<double> numbers = random_values(n, 5, 0.01);
        for (const auto& [first, part_n, row] : parts)
            std::copy_n(numbers.begin() + first, part_n, values.begin() + first);
        const Buffer grads(dtype, {n}, values);
        const std::vector<double> before(12, 7.0);
        const Buffer sums(DType::f32, {6, 2}, before);
        Arena arena("norm");
        SquareSums(arena, "norm", parts);
        arena.reserve();
        SquareSums all(arena, "norm", parts);
        all.init(device().stream);
        all.add_up(sums, grads, device().stream);
        const std::vector<double> together = sums.values();
        std::vector<double> expected = before, row_4;
        for (const auto& [first, part_n, row] : parts) {
            const Buffer sum(DType::f32, {2}), scratch(DType::f32, {grad_norm_scratch_n(part_n)});
            sum_squares(sum, grads.tensor().slice(first, part_n), scratch, device().stream);
            if (row == 4) row_4.push_back(sum.values()[0] + sum.values()[1]);
            std::copy_n(sum.values().begin(), 2, expected.begin() + 2 * row);
        }
        const double sum_4 = together[8] + together[9];
        CHECK(std::abs(sum_4 - row_4[0] - row_4[1]) <= 0x1p-45 * sum_4);
        expected[8] = together[8], expected[9] = together[9];
        CHECK(together == expected);
    }
    // A rank without a shard has nothing to add: its gradients have no memory.
    const Buffer sums(DType::f32, {1, 2}, {3, 4});
    Arena arena("norm");
    const SquareSums none(arena, "norm", {});
    none.add_up(sums, {}, device().stream);
    CHECK(sums.values() == std::vector<double>{3, 4});
}

TEST_CASE("sums of squares are clipped in the same launch", "[grad_clip][counted]") {
    // Row 1 has two parts; one, and the rest behind the last chunk, is shorter than a chunk.
    const std::vector<SquareSums::Part> parts = {{0, 3000, 0}, {3000, 2 * kChunkN + 5, 1}, {200000, 100, 1}};
    const int64_t n = 200100;
    for (const DType dtype : kFloatDTypes)
        for (const double bad : {0.0, static_cast<double>(INFINITY)}) {
            INFO(dtype_name(dtype) << ", " << bad);
            std::vector<double> values = random_values(n, 5, 0.01);
            values[70000] += bad;
            const Buffer grads(dtype, {n}, values), result(DType::f32, {2}), same_sums(DType::f32, {2, 2}),
                same_result(DType::f32, {2});
            Buffer sums(DType::f32, {2, 2});
            Arena arena("norm");
            SquareSums(arena, "norm", parts);
            arena.reserve();
            SquareSums all(arena, "norm", parts);
            all.init(device().stream);
            LaunchNotes notes;
            for (int k = 0; k < 2; ++k) {
                sums.set({1, 2, 3, 4});  // nothing may remain of them
                all.add_up(sums, grads, device().stream, {result, 0.5f, 0.25f});
            }
            CHECK(notes.launches.size() == 4);
            all.add_up(same_sums, grads, device().stream);
            clip_scale(same_sums, {same_result, 0.5f, 0.25f}, device().stream);
            CHECK((sums.bits() == same_sums.bits()));
            CHECK((result.bits() == same_result.bits()));
            CHECK(std::isnan(result.values()[1]) == (bad > 0));
            const Buffer three(DType::f32, {3, 2});
            CHECK_THROWS_WITH(all.add_up(three, grads, device().stream, {result}),
                              ContainsSubstring("only 2 of 3 rows to be clipped have gradients"));
        }
    check_counters();
}
