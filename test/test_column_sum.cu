// test/test_column_sum.cu: sums over rows in two stages, against float64.
#include "layers/layers.h"
#include "reference.h"

namespace {

using Values = std::vector<double>;

Values column_sums(const Values& x, Values total, int64_t N, int64_t C) {
    for (int64_t n = 0; n < N; ++n)
        for (int64_t c = 0; c < C; ++c) total[static_cast<size_t>(c)] += x[static_cast<size_t>(n * C + c)];
    return total;
}

struct Size {
    int64_t N, C;
};
// One element; columns that are no whole chunks of 4, 8 or 32 and no whole warps; one chunk of rows, one and a bit (64,
// 65), more partial rows than one warp adds up in the second stage (8: from 513 rows on), more than 32 warps (20000).
const Size kSizes[] = {{1, 1}, {3, 3}, {64, 33}, {65, 48}, {100, 100}, {600, 129}, {1100, 7}, {20000, 12}, {257, 768}};

}  // namespace

TEST_CASE("column_sum against float64", "[column_sum]") {
    for (DType dtype : kFloatDTypes)
        for (DType gradient_dtype : {DType::f32, dtype})
            for (const auto& [N, C] : kSizes) {
                const Values x = rounded(random_values(N * C, 1), dtype),
                             before = rounded(random_values(C, 2), gradient_dtype);
                Buffer inp(dtype, {N, C}, x), dparam(gradient_dtype, {C}, before),
                    scratch(DType::f32, {column_sum_scratch_n(N, C)});
                column_sum(dparam, inp, true, scratch, device().stream);
                // N numbers of random sign, whose sum grows like sqrt(N); += : it starts from `before`.
                check_close(dparam.values(), column_sums(x, before, N, C), unit_roundoff(gradient_dtype),
                            sum_error(N) * 4 * std::sqrt(static_cast<double>(N)),
                            concat("column_sum ", dtype_name(dtype), " into ", dtype_name(gradient_dtype), " (", N,
                                   ", ", C, ")"));
            }
    check_counters();
}

TEST_CASE("column_sum of whole numbers is exact", "[column_sum]") {
    const int64_t N = 1000, C = 5;  // every row counts once: sums below 2^24 have no rounding
    Values x(N * C);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i / C);
    Buffer inp(DType::f32, {N, C}, x), dparam(DType::f32, {C}, Values{1, 2, 3, 4, 5}),
        scratch(DType::f32, {column_sum_scratch_n(N, C)});
    column_sum(dparam, inp, true, scratch, device().stream);
    CHECK(dparam.values() == Values{499501, 499502, 499503, 499504, 499505});
    const std::vector<unsigned char> first = dparam.bits();
    dparam.set({1, 2, 3, 4, 5});
    column_sum(dparam, inp, true, scratch, device().stream);
    CHECK(dparam.bits() == first);
}

TEST_CASE("column_sum of float32 into 16 bits", "[column_sum]") {
    for (int64_t N : {1, 8, 9, 100, 300}) {
        const int64_t C = 70;
        const Values x = rounded(random_values(N * C, 3), DType::f32);
        Buffer inp(DType::f32, {N, C}, x), dparam(DType::bf16, {C}, Values(C, 1.0)),
            scratch(DType::f32, {column_sum_scratch_n(N, C)});
        column_sum(dparam, inp, true, scratch, device().stream);
        check_close(dparam.values(), column_sums(x, Values(C, 1.0), N, C), unit_roundoff(DType::bf16),
                    sum_error(N) * 4 * std::sqrt(static_cast<double>(N)), concat("column_sum of ", N, " rows"));
    }
}

TEST_CASE("column_sum says what is wrong with its arguments", "[column_sum][errors]") {
    Buffer x(DType::f32, {4, 8}), sum(DType::f32, {8}), five(DType::f32, {5}), half(DType::bf16, {8}),
        scratch(DType::f32, {7});
    const auto s = device().stream;
    CHECK_THROWS_WITH(column_sum(five, x, true, scratch, s),
                      ContainsSubstring("column_sum: dparam is f32 (5), expected f32 (8)"));
    Buffer of_half(DType::f16, {4, 8}), too_wide(DType::f32, {1, 10'000'000}), its_sum(DType::f32, {10'000'000});
    CHECK_THROWS_WITH(column_sum(half, of_half, true, scratch, s), ContainsSubstring("column_sum: dparam"));
    CHECK_THROWS_WITH(column_sum(sum, sum, true, scratch, s), ContainsSubstring("column_sum: inp"));
    CHECK_THROWS_WITH(column_sum(sum, x, true, scratch, s),
                      ContainsSubstring("column_sum: scratch is f32 (7), expected f32 of at least 8"));
    const Tensor shifted = make_tensor(static_cast<char*>(x.tensor().data) + 8, DType::f32, {4, 8});
    CHECK_THROWS_WITH(column_sum(sum, shifted, true, scratch, s), ContainsSubstring("column_sum: inp starts at"));
    const Tensor its_end = make_tensor(static_cast<char*>(x.tensor().data) + 8, DType::f32, {8});
    CHECK_THROWS_WITH(column_sum(its_end, x, true, scratch, s), ContainsSubstring("column_sum: dparam starts at"));
}

TEST_CASE("column_sum of no rows or no columns", "[column_sum]") {
    const Buffer some(DType::f32, {1, 3});
    const Tensor none = some.tensor().slice(0, 0), no_columns = make_tensor(none.data, DType::f32, {5, 0}),
                 empty = make_tensor(none.data, DType::f32, {0});
    for (const bool accumulate : {false, true}) {
        const Buffer sums(DType::f32, {3}, {1, 2, 3});
        column_sum(sums, none, accumulate, {}, device().stream);
        CHECK(sums.values() == (accumulate ? std::vector<double>{1, 2, 3} : std::vector<double>{0, 0, 0}));
    }
    column_sum(empty, no_columns, false, {}, device().stream);
    CHECK(column_sum_scratch_n(5, 0) == 0);
}
