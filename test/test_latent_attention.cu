// test/test_latent_attention.cu: MLA over a cache of latents, against float64 that expands keys and values.
#include "layers/layers.h"
#include "reference.h"

#include <array>
#include <cmath>

namespace {

using Values = std::vector<double>;

struct Size {
    int64_t B, T, H, R, Dr, Dn, Dv, first, rows;
};
// Tiles are 128 rows: fewer, exactly so many, and more. Latents below, at and above a chunk of each device,
// and odd ones.
const Size kSizes[] = {{1, 1, 1, 4, 2, 4, 3, 0, 1},        {2, 3, 3, 24, 8, 16, 16, 5, 11},
                       {1, 2, 2, 7, 3, 5, 6, 125, 131},    {2, 1, 2, 40, 16, 32, 24, 127, 128},
                       {1, 3, 4, 24, 8, 16, 16, 270, 273}, {1, 1, 2, 512, 64, 128, 128, 300, 301}};

// Wk and Wv expand every row of the cache; then attention as anybody would write it.
Values attention(const Values& q, const Values& cache, const Values& kv_b, const Size& s, double scale) {
    const int64_t W = s.R + s.Dr, D = s.Dn + s.Dr;
    Values out;
    for (int64_t n = 0; n < s.B * s.T; ++n)
        for (int64_t h = 0; h < s.H; ++h) {
            const double* query = &q[static_cast<size_t>((n * s.H + h) * D)];
            const double* weights = &kv_b[static_cast<size_t>(h * (s.Dn + s.Dv) * s.R)];
            const auto expand = [&](const double* row, int64_t o) {
                double sum = 0;
                for (int64_t r = 0; r < s.R; ++r) sum += weights[o * s.R + r] * row[r];
                return sum;
            };
            Values o(static_cast<size_t>(s.Dv));
            double total = 0;
            for (int64_t key = 0; key <= s.first + n % s.T; ++key) {
                const double* row = &cache[static_cast<size_t>((n / s.T * s.rows + key) * W)];
                double score = 0;
                for (int64_t d = 0; d < s.Dn; ++d) score += query[d] * expand(row, d);
                for (int64_t d = 0; d < s.Dr; ++d) score += query[s.Dn + d] * row[s.R + d];
                const double p = std::exp(scale * score);
                total += p;
                for (int64_t d = 0; d < s.Dv; ++d) o[static_cast<size_t>(d)] += p * expand(row, s.Dn + d);
            }
            for (double x : o) out.push_back(x / total);
        }
    return out;
}

}  // namespace

TEST_CASE("latent attention against float64 with expanded keys and values", "[latent]") {
    for (DType dtype : kFloatDTypes)
        for (const Size& s : kSizes) {
            const int64_t W = s.R + s.Dr, D = s.Dn + s.Dr, N = s.B * s.T, pad = 16;
            const double scale = 1 / std::sqrt(static_cast<double>(D));
            // Queries and keys of size about 1: scores of size 1, so that the softmax is neither flat nor a single key.
            // Later keys are up to twice as large, so that the maximum moves from tile to tile.
            Values cache = random_values(s.B * s.rows * W, 2);
            for (size_t i = 0; i < cache.size(); ++i)
                cache[i] *= 1 + static_cast<double>(static_cast<int64_t>(i) / W % s.rows) / static_cast<double>(s.rows);
            cache = rounded(cache, dtype);
            const Values q = rounded(random_values(N * s.H * D, 1), dtype),
                         kv_b = rounded(
                             random_values(s.H * (s.Dn + s.Dv) * s.R, 3, 1 / std::sqrt(static_cast<double>(s.R))),
                             dtype);
            Values padded;  // queries in wider rows
            for (int64_t n = 0; n < N; ++n) {
                padded.insert(padded.end(), q.begin() + n * s.H * D, q.begin() + (n + 1) * s.H * D);
                padded.insert(padded.end(), static_cast<size_t>(pad), 99.0);
            }
            Buffer q_rows(dtype, {s.B, s.T, s.H * D + pad}, padded), rows(dtype, {s.B, s.rows, W}, cache),
                w(dtype, {s.H * (s.Dn + s.Dv), s.R}, kv_b), out(dtype, {s.B, s.T, s.H * s.Dv});
            latent_attention_forward({out, s.H, s.Dv}, {q_rows, s.H, D}, rows, w, s.first, static_cast<float>(scale),
                                     device().stream);
            const Values expected = attention(q, cache, kv_b, s, scale);
            // Sums in float32 all the way: the query's (Dn terms), the score's (R + Dr), over keys, the output's (R). A
            // score's error is one of its exponential; scores here stay below 10 (5 standard deviations of 2).
            // Then one rounding.
            const double error = 10 * (sum_error(s.Dn) + sum_error(W)) + sum_error(s.first + s.T) + sum_error(s.R);
            check_close(out.values(), expected, unit_roundoff(dtype),
                        4 * error * largest(expected) + (dtype == DType::f16 ? 0x1p-25 : 0),
                        concat("R ", s.R, ", ", s.first, " + ", s.T, " tokens, ", dtype_name(dtype)));
        }
}

TEST_CASE("latent cache: rows are appended where they belong, and no others written", "[latent]") {
    for (DType dtype : kFloatDTypes)
        for (const auto& [R, Dr, column, columns] :
             {std::array<int64_t, 4>{24, 8, 16, 24}, std::array<int64_t, 4>{7, 3, 2, 6}}) {
            const int64_t B = 3, T = 2, rows = 7, first = 4, W = R + Dr;
            const Values before = rounded(random_values(B * rows * W, 1), dtype),
                         c = rounded(random_values(B * T * R, 2), dtype),
                         k = rounded(random_values(B * T * columns, 3), dtype);
            Buffer cache(dtype, {B, rows, W}, before), latent(dtype, {B, T, R}, c), key(dtype, {B, T, columns}, k);
            latent_cache_append(cache, first, latent, {key, 1, Dr, column}, device().stream);
            Values expected = before;
            for (int64_t n = 0; n < B * T; ++n)
                for (int64_t i = 0; i < W; ++i)
                    expected[static_cast<size_t>((n / T * rows + first + n % T) * W + i)] =
                        i < R ? c[static_cast<size_t>(n * R + i)]
                              : k[static_cast<size_t>(n * columns + column + i - R)];
            CHECK(cache.values() == expected);
        }
}

TEST_CASE("latent attention says what is wrong with its arguments", "[latent][errors]") {
    Buffer q(DType::f32, {1, 2, 48}), out(DType::f32, {1, 2, 32}), cache(DType::f32, {1, 5, 20}),
        w(DType::f32, {64, 12}), wrong(DType::f32, {60, 12}), latent(DType::f32, {1, 2, 12}),
        half(DType::bf16, {1, 5, 20});
    const auto run = [&](const HeadColumns& o, const HeadColumns& heads, Tensor rows, Tensor weight, int64_t first) {
        latent_attention_forward(o, heads, rows, weight, first, 1.0f, device().stream);
    };
    run({out, 2, 16}, {q, 2, 24}, cache, w, 3);  // R 12, Dr 8, Dn 16, Dv 16
    CHECK_THROWS_WITH(run({out, 2, 16}, {q, 2, 24}, cache, w, 4),
                      ContainsSubstring("latent_attention_forward: tokens 4 to 5 do not fit in a cache of 5 rows"));
    CHECK_THROWS_WITH(run({out, 2, 16}, {q, 2, 24}, cache, wrong, 0),
                      ContainsSubstring("cache is f32 (1, 5, 20), expected f32 (1, *, 22)"));
    CHECK_THROWS_WITH(run({out, 1, 16}, {q, 2, 24}, cache, w, 0), ContainsSubstring("does not fit"));
    CHECK_THROWS_WITH(run({out, 2, 16}, {q, 2, 24}, half, w, 0),
                      ContainsSubstring("latent_attention_forward: q is f32"));
    CHECK_THROWS_WITH(latent_cache_append(cache, 4, latent, {q, 1, 8, 0}, device().stream),
                      ContainsSubstring("latent_cache_append: tokens 4 to 5"));
    CHECK_THROWS_WITH(latent_cache_append(cache, 0, latent, {q, 2, 8, 0}, device().stream),
                      ContainsSubstring("key is 2 heads"));
}
