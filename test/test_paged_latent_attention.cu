// test/test_paged_latent_attention.cu: MLA over a cache of latents in pages, against float64 that expands keys and
// values.
#include "paged_step.h"

#include <cmath>

namespace {

struct Size {
    std::vector<int64_t> lengths;
    int64_t H, R, Dr, Dn, Dv, page_size;
    std::vector<int64_t> chunk_rows;
    int64_t W() const { return R + Dr; }
    int64_t D() const { return Dn + Dr; }
};
// Odd sizes; latents below and above the 128 columns that a tile holds at a time, as wide as DeepSeek's; more heads
// than a tile has rows; one context that a GPU cuts into splits; and latents of which not every GPU's shared memory
// holds a whole tile's sums.
const Size kSizes[] = {{{1}, 1, 4, 2, 4, 3, 1, {1}},         {{11, 3}, 3, 24, 8, 16, 16, 4, {5}},
                       {{67}, 2, 7, 3, 5, 6, 17, {32, 1}},   {{35, 20}, 35, 136, 16, 12, 9, 16, {32, 1}},
                       {{9}, 2, 512, 64, 128, 128, 16, {4}}, {{270}, 1, 8, 8, 8, 8, 16, {32}},
                       {{9}, 3, 1008, 16, 8, 4, 16, {4}}};

struct Inputs {
    Values q, latents, keys, kv_b;
    Inputs(const Size& s, DType dtype) {
        int64_t N = 0;
        for (int64_t length : s.lengths) N += length;
        q = rounded(random_values(N * s.H * s.D(), 1), dtype);
        // Later latents are up to twice as large, so that the maximum moves from tile to tile.
        latents = random_values(N * s.R, 2);
        for (size_t i = 0; i < latents.size(); ++i)
            latents[i] *= 1 + static_cast<double>(i) / static_cast<double>(latents.size());
        latents = rounded(latents, dtype);
        keys = rounded(random_values(N * s.Dr, 3), dtype);
        kv_b = rounded(random_values(s.H * (s.Dn + s.Dv) * s.R, 4, 1 / std::sqrt(static_cast<double>(s.R))), dtype);
    }
};

// Wk and Wv expand every latent; then attention as anybody would write it. Tokens first ... first + T - 1.
void attend(Values& out, const Inputs& in, const Size& s, int64_t first, int64_t T, double scale) {
    const auto expand = [&](int64_t h, int64_t token, int64_t o) {
        const double *weight = &in.kv_b[static_cast<size_t>((h * (s.Dn + s.Dv) + o) * s.R)],
                     *latent = &in.latents[static_cast<size_t>(token * s.R)];
        return std::inner_product(weight, weight + s.R, latent, 0.0);
    };
    for (int64_t h = 0; h < s.H; ++h) {
        Values own, values;  // of this head: (T, Dn), (T, Dv)
        for (int64_t t = first; t < first + T; ++t) {
            for (int64_t d = 0; d < s.Dn; ++d) own.push_back(expand(h, t, d));
            for (int64_t d = 0; d < s.Dv; ++d) values.push_back(expand(h, t, s.Dn + d));
        }
        for (int64_t t = 0; t < T; ++t) {
            const double* query = &in.q[static_cast<size_t>(((first + t) * s.H + h) * s.D())];
            double* o = &out[static_cast<size_t>(((first + t) * s.H + h) * s.Dv)];
            double total = 0;
            for (int64_t k = 0; k <= t; ++k) {
                const double* shared = &in.keys[static_cast<size_t>((first + k) * s.Dr)];
                const double score = std::inner_product(query, query + s.Dn, &own[static_cast<size_t>(k * s.Dn)], 0.0) +
                                     std::inner_product(query + s.Dn, query + s.D(), shared, 0.0);
                const double p = std::exp(scale * score);
                total += p;
                for (int64_t d = 0; d < s.Dv; ++d) o[d] += p * values[static_cast<size_t>(k * s.Dv + d)];
            }
            for (int64_t d = 0; d < s.Dv; ++d) o[d] /= total;
        }
    }
}

// The attention of all tokens, in one step.
void run(const Buffer& out, const Inputs& in, const Size& s, const Step& its, DType dtype, DType pool_dtype,
         double scale) {
    const int64_t N = its.N, pad = 5;
    Values rows;  // queries, then the shared key, in wider rows
    for (int64_t n = 0; n < N; ++n) {
        const Values q = some_rows(in.q, n, 1, s.H * s.D()), key = some_rows(in.keys, n, 1, s.Dr);
        rows.insert(rows.end(), q.begin(), q.end());
        rows.insert(rows.end(), key.begin(), key.end());
        rows.insert(rows.end(), static_cast<size_t>(pad), 99.0);
    }
    Buffer q(dtype, {1, N, s.H * s.D() + s.Dr + pad}, rows), latents(dtype, {1, N, s.R}, in.latents);
    Buffer kv_b(dtype, {s.H * (s.Dn + s.Dv), s.R}, in.kv_b);
    Buffer scratch(DType::f32,
                   {paged_latent_attention_scratch_n(N, s.H, s.R, s.Dr, its.table_columns * its.page_size)});
    const DeviceStep step(its, pool_dtype, s.W(), 2);
    paged_latent_write(step, {latents, 1, s.R}, {q, 1, s.Dr, s.H * s.D()}, device().stream);
    paged_latent_attention_forward({out, s.H, s.Dv}, {q, s.H, s.D()}, step, kv_b, static_cast<float>(scale), scratch,
                                   device().stream);
}

}  // namespace

TEST_CASE("paged latent attention against float64 with expanded keys and values", "[paged][latent][counted]") {
    for (DType dtype : kFloatDTypes)
        for (const Size& s : kSizes) {
            const Inputs in(s, dtype);
            const Step its(s.lengths, s.page_size, s.chunk_rows);
            const double scale = 1 / std::sqrt(static_cast<double>(s.D()));
            Buffer out(dtype, {1, its.N, s.H * s.Dv});
            run(out, in, s, its, dtype, dtype, scale);
            Values expected(static_cast<size_t>(its.N * s.H * s.Dv));
            int64_t first = 0;
            for (int64_t T : s.lengths) attend(expected, in, s, first, T, scale), first += T;
            // Sums in float32 all the way: the query's (Dn terms), the score's (R + Dr), over keys, the output's (R). A
            // score's error is one of its exponential; scores here stay below 10 (5 standard deviations of 2).
            // Then one rounding.
            const double error = 10 * (sum_error(s.Dn) + sum_error(s.W())) + sum_error(its.N) + sum_error(s.R);
            check_close(out.values(), expected, unit_roundoff(dtype),
                        4 * error * largest(expected) + (dtype == DType::f16 ? 0x1p-25 : 0),
                        concat("R ", s.R, ", H ", s.H, ", ", dtype_name(dtype)));
        }
}

TEST_CASE("a token's latent attention does not depend on pages, chunks and neighbours", "[paged][latent]") {
    const Size s{{70, 13}, 5, 40, 16, 24, 12, 16, {32}}, alone{{70}, 5, 40, 16, 24, 12, 16, {32}};
    for (DType dtype : kFloatDTypes)
        for (DType pool : {dtype, DType::e4m3}) {
            Inputs in(s, dtype);
            const Step first({70, 13}, 16, {32}), second({70, 13}, 17, {1, 5}), third({70}, 1, {1});
            Buffer a(dtype, {1, 83, s.H * s.Dv}), b(dtype, {1, 83, s.H * s.Dv}), c(dtype, {1, 70, s.H * s.Dv});
            run(a, in, s, first, dtype, pool, 0.2);
            run(b, in, s, second, dtype, pool, 0.2);
            in.q.resize(static_cast<size_t>(70 * s.H * s.D())), in.latents.resize(static_cast<size_t>(70 * s.R));
            in.keys.resize(static_cast<size_t>(70 * s.Dr));
            run(c, in, alone, third, dtype, pool, 0.2);
            CHECK(a.bits() == b.bits());
            std::vector<unsigned char> its = a.bits();
            its.resize(c.tensor().bytes());
            CHECK(its == c.bits());
        }
}

// As of keys and values (test_paged_attention.cu): with one scale for the latent and one for the shared key, each
// number is off by at most 2^-4 of itself or 2^-10 of its scale. Then the attention itself is as exact as without
// codes.
TEST_CASE("paged latent attention over e4m3 pages is that of the numbers that the codes stand for",
          "[paged][latent][counted]") {
    const Size s{{37}, 3, 40, 16, 24, 12, 16, {32}};
    const Step its(s.lengths, s.page_size, s.chunk_rows);
    Inputs in(s, DType::f32);
    for (double& x : in.keys) x *= 50;  // the two parts need scales of their own
    Buffer exact(DType::f32, {1, its.N, s.H * s.Dv}), coded(DType::f32, {1, its.N, s.H * s.Dv});
    Inputs read_back = in;
    const DeviceStep step(its, DType::e4m3, s.W(), 2);
    Buffer latents(DType::f32, {1, its.N, s.R}, in.latents), keys(DType::f32, {1, its.N, s.Dr}, in.keys);
    paged_latent_write(step, {latents, 1, s.R}, {keys, 1, s.Dr}, device().stream);
    const std::vector<unsigned char> codes = step.pool.bits();
    const Values scales = step.scales.values();
    const auto check_codes = [&](Values& x, int64_t token, int64_t n, int64_t column, int64_t which) {
        const int64_t row = its.rows[static_cast<size_t>(token)];
        const double scale = scales[static_cast<size_t>(2 * row + which)];
        for (int64_t i = 0; i < n; ++i) {
            double& number = x[static_cast<size_t>(token * n + i)];
            __nv_fp8_e4m3 code;
            code.__x = codes[static_cast<size_t>(row * s.W() + column + i)];
            const double read = static_cast<float>(static_cast<double>(code) * scale);
            if (!(std::abs(read - number) <= 0x1.00001p-4 * std::abs(number) + 0x1p-10 * scale))
                FAIL("token " << token << ": " << number << " became " << read);
            number = read;
        }
    };
    for (int64_t n = 0; n < its.N; ++n) {
        check_codes(read_back.latents, n, s.R, 0, 0);
        check_codes(read_back.keys, n, s.Dr, s.R, 1);
    }
    run(coded, in, s, its, DType::f32, DType::e4m3, 0.01);
    run(exact, read_back, s, its, DType::f32, DType::f32, 0.01);
    CHECK(coded.bits() == exact.bits());
}

TEST_CASE("paged latent attention refuses what does not fit", "[paged][latent]") {
    const Size s{{4}, 2, 12, 8, 16, 16, 4, {32}};
    const Step its(s.lengths, s.page_size, s.chunk_rows);
    const DeviceStep step(its, DType::f32, s.W(), 2), narrow_pool(its, DType::f32, s.W() - 2, 2);
    Buffer q(DType::f32, {1, 4, 48}), out(DType::f32, {1, 4, 32}), w(DType::f32, {64, 12}), wrong(DType::f32, {60, 12});
    Buffer latents(DType::f32, {1, 4, 12}), scratch(DType::f32, {1000});
    const auto attention = [&](const HeadColumns& o, const PagedStep& from, const Tensor& weight, const Tensor& space) {
        paged_latent_attention_forward(o, {q, 2, 24}, from, weight, 1.0f, space, device().stream);
    };
    CHECK_THROWS_WITH(attention({out, 2, 16}, narrow_pool, w, scratch), ContainsSubstring("step.pool is f32"));
    CHECK_THROWS_WITH(attention({out, 2, 16}, step, wrong, scratch), ContainsSubstring("expected f32 (*, *, 22)"));
    CHECK_THROWS_WITH(attention({out, 2, 32}, step, w, scratch), ContainsSubstring("does not fit"));
    CHECK_THROWS_WITH(attention({out, 2, 16}, step, w, {}), ContainsSubstring("scratch is no tensor"));
    CHECK_THROWS_WITH(paged_latent_write(step, {latents, 1, 12}, {q, 2, 8}, device().stream),
                      ContainsSubstring("key has 2 heads of 8 columns, expected 1 of 8"));
}
