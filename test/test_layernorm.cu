// test/test_layernorm.cu: LayerNorm against float64, with and without the fused residual add.
#include "norms.cuh"

namespace {

struct Forward {
    Values out, mean, rstd;
};
Forward layernorm(const Values& x, const Values& g, const Values& b, int64_t N, int64_t C, double eps) {
    Forward f{Values(x.size()), Values(static_cast<size_t>(N)), Values(static_cast<size_t>(N))};
    for (int64_t n = 0; n < N; ++n) {
        double sum = 0, squares = 0;
        for (int64_t c = 0; c < C; ++c) sum += x[at(n, c, C)];
        const double m = sum / static_cast<double>(C);
        for (int64_t c = 0; c < C; ++c) squares += (x[at(n, c, C)] - m) * (x[at(n, c, C)] - m);
        const double r = 1 / std::sqrt(squares / static_cast<double>(C) + eps);
        f.mean[static_cast<size_t>(n)] = m;
        f.rstd[static_cast<size_t>(n)] = r;
        for (int64_t c = 0; c < C; ++c)
            f.out[at(n, c, C)] = (x[at(n, c, C)] - m) * r * g[static_cast<size_t>(c)] + b[static_cast<size_t>(c)];
    }
    return f;
}

struct Backward {
    Values dinp, dweight, dbias;
};
Backward layernorm_gradient(const Values& dy, const Values& dsum, const Values& x, const Values& g, int64_t N,
                            int64_t C, double eps) {
    const Forward f = layernorm(x, g, Values(g.size()), N, C, eps);
    Backward b{Values(x.size()), Values(g.size()), Values(g.size())};
    for (int64_t n = 0; n < N; ++n) {
        const double m = f.mean[static_cast<size_t>(n)], r = f.rstd[static_cast<size_t>(n)];
        double mean = 0, mean_dot = 0;
        for (int64_t c = 0; c < C; ++c) {
            const double dn = dy[at(n, c, C)] * g[static_cast<size_t>(c)];
            mean += dn / static_cast<double>(C);
            mean_dot += dn * (x[at(n, c, C)] - m) * r / static_cast<double>(C);
        }
        for (int64_t c = 0; c < C; ++c) {
            const double normal = (x[at(n, c, C)] - m) * r;
            b.dbias[static_cast<size_t>(c)] += dy[at(n, c, C)];
            b.dweight[static_cast<size_t>(c)] += dy[at(n, c, C)] * normal;
            b.dinp[at(n, c, C)] =
                r * (dy[at(n, c, C)] * g[static_cast<size_t>(c)] - mean - normal * mean_dot) + dsum[at(n, c, C)];
        }
    }
    return b;
}

}  // namespace

TEST_CASE("layernorm: the reference's gradient is that of the reference", "[layernorm]") {
    const int64_t N = 3, C = 7;
    const auto x = random_values(N * C, 1), g = random_values(C, 2), b = random_values(C, 5);
    const auto dy = random_values(N * C, 3), dsum = random_values(N * C, 4);
    const auto loss = [&](const Values& inp, const Values& weight, const Values& bias) {
        const Values out = layernorm(inp, weight, bias, N, C, 1e-3).out;
        double total = 0;
        for (size_t i = 0; i < out.size(); ++i) total += dy[i] * out[i] + dsum[i] * inp[i];
        return total;
    };
    const Backward gradient = layernorm_gradient(dy, dsum, x, g, N, C, 1e-3);
    // step^2 = 1e-10 times third derivatives below 100, and rounding 1e-15 / 1e-5
    for (const auto& [i, derivative] : finite_differences([&](const Values& v) { return loss(v, g, b); }, x))
        CHECK(gradient.dinp[i] == Approx(derivative).margin(1e-8));
    for (const auto& [i, derivative] : finite_differences([&](const Values& v) { return loss(x, v, b); }, g))
        CHECK(gradient.dweight[i] == Approx(derivative).margin(1e-8));
    for (const auto& [i, derivative] : finite_differences([&](const Values& v) { return loss(x, g, v); }, b))
        CHECK(gradient.dbias[i] == Approx(derivative).margin(1e-8));
}

TEST_CASE("layernorm forward against float64", "[layernorm]") {
    with_both_geometries([](const std::string& geometry) {
        for (DType dtype : kFloatDTypes)
            for (const auto& [N, C] : kSizes)
                for (bool fused : {false, true}) {
                    const std::string what =
                        concat(dtype_name(dtype), " (", N, ", ", C, ")", fused ? " fused" : "", geometry);
                    const Values x = rounded(random_values(N * C, 5), dtype),
                                 y = rounded(random_values(N * C, 6, 0.5), dtype);
                    const Values g = rounded(random_values(C, 7), dtype), b = rounded(random_values(C, 8), dtype);
                    Values total = x;
                    for (size_t i = 0; i < x.size() && fused; ++i) total[i] += y[i];
                    total = rounded(total, dtype);  // the sum is what is stored, and what is normalised
                    Buffer inp(dtype, {N, C}, x), branch(dtype, {N, C}, y), weight(dtype, {C}, g), bias(dtype, {C}, b);
                    Buffer out(dtype, {N, C}), sum(dtype, {N, C}), mean(DType::f32, {N}), rstd(DType::f32, {N});
                    layernorm_forward(out, fused ? sum.tensor() : Tensor{}, mean, rstd, inp,
                                      fused ? branch.tensor() : Tensor{}, weight, bias, kEps, device().stream);
                    const Forward expected = layernorm(total, g, b, N, C, kEps);
                    // The mean is off by the error of a sum of C terms; r by that of the variance; out by both,
                    // times x r g.
                    const double size = largest(total), r = largest(expected.rstd);
                    check_close(mean.values(), expected.mean, 0, sum_error(C) * size, "layernorm mean, " + what);
                    if (C > 1)
                        check_close(rstd.values(), expected.rstd, sum_error(C) * (2 + size * r), 0,
                                    "layernorm rstd, " + what);
                    check_close(out.values(), expected.out, unit_roundoff(dtype),
                                sum_error(C) * 2 * size * r * largest(g) + 0x1p-25, "layernorm out, " + what);
                    if (fused) CHECK(sum.values() == total);
                }
    });
}

TEST_CASE("layernorm backward against float64", "[layernorm]") {
    with_both_geometries([](const std::string& geometry) {
        for (DType dtype : kFloatDTypes)
            for (const auto& [N, C] : kSizes)
                for (DType gradient_dtype : {DType::f32, dtype}) {
                    const bool past = gradient_dtype == dtype;  // with dsum in the one case, without in the other
                    const std::string what =
                        concat(dtype_name(dtype), " (", N, ", ", C, ")", past ? " dsum" : "", geometry);
                    const Values x = rounded(random_values(N * C, 8), dtype),
                                 dy = rounded(random_values(N * C, 9), dtype);
                    const Values g = rounded(random_values(C, 10), dtype),
                                 dw = rounded(random_values(C, 11), gradient_dtype);
                    const Values ds = past ? rounded(random_values(N * C, 12), dtype) : Values(x.size());
                    const Values db = rounded(random_values(C, 13), gradient_dtype);
                    const Forward saved = layernorm(x, g, g, N, C, kEps);
                    Buffer inp(dtype, {N, C}, x), dout(dtype, {N, C}, dy), weight(dtype, {C}, g);
                    Buffer mean(DType::f32, {N}, saved.mean), rstd(DType::f32, {N}, saved.rstd);
                    // dinp is the same memory as dsum, as the header allows.
                    Buffer dinp(dtype, {N, C}, ds), dweight(gradient_dtype, {C}, dw), dbias(gradient_dtype, {C}, db);
                    Buffer scratch(DType::f32, {layernorm_backward_scratch_n(N, C)});
                    layernorm_backward(dinp, dweight, dbias, dout, past ? dinp.tensor() : Tensor{}, inp, weight, mean,
                                       rstd, true, scratch, device().stream);
                    Backward expected = layernorm_gradient(dy, ds, x, g, N, C, kEps);
                    for (size_t c = 0; c < dw.size(); ++c)
                        expected.dweight[c] += dw[c], expected.dbias[c] += db[c];  // +=
                    // x - m is off by one rounding of x and m, the normalised row by that times r. dinp: four terms,
                    // each at most `size`, two of them with a sum of C terms; then one rounding.
                    const double normal = 0x1p-24 * largest(x) * largest(saved.rstd);
                    const double size = largest(saved.rstd) * largest(dy) * largest(g) + largest(ds);
                    check_close(dinp.values(), expected.dinp, unit_roundoff(dtype),
                                (sum_error(C) + 8 * normal) * size + 0x1p-25, "layernorm dinp, " + what);
                    // Sums over N rows of products of two normal numbers, that grow like sqrt(N).
                    const double absolute = (sum_error(N) + 2 * normal) * 4 * std::sqrt(static_cast<double>(N));
                    check_close(dweight.values(), expected.dweight, unit_roundoff(gradient_dtype), absolute,
                                "layernorm dweight, " + what);
                    check_close(dbias.values(), expected.dbias, unit_roundoff(gradient_dtype), absolute,
                                "layernorm dbias, " + what);
                }
    });
    check_counters();
}

TEST_CASE("layernorm repeats bit for bit", "[layernorm]") {
    with_both_geometries([](const std::string&) {
        const int64_t N = 77, C = 200;
        Buffer x(DType::bf16, {N, C}, random_values(N * C, 1)), g(DType::bf16, {C}, random_values(C, 2));
        Buffer dy(DType::bf16, {N, C}, random_values(N * C, 3)),
            scratch(DType::f32, {layernorm_backward_scratch_n(N, C)});
        std::vector<unsigned char> first[4];
        for (int run = 0; run < 2; ++run) {
            Buffer out(DType::bf16, {N, C}), mean(DType::f32, {N}), rstd(DType::f32, {N}), dx(DType::bf16, {N, C});
            Buffer dg(DType::f32, {C}, Values(C, 0.0)), db(DType::f32, {C}, Values(C, 0.0));
            layernorm_forward(out, {}, mean, rstd, x, {}, g, g, kEps, device().stream);
            layernorm_backward(dx, dg, db, dy, {}, x, g, mean, rstd, true, scratch, device().stream);
            const std::vector<unsigned char> bits[4] = {out.bits(), dx.bits(), dg.bits(), db.bits()};
            for (int i = 0; i < 4; ++i) {
                if (run == 0) first[i] = bits[i];
                CHECK(bits[i] == first[i]);
            }
        }
    });
}

TEST_CASE("layernorm of rows that are hard on float32", "[layernorm]") {
    const int64_t C = 64;
    // A constant row of a number whose sums are exact: x - m is 0, so out is the bias. (768 columns of 12345.678 have a
    // mean that is off by 0.001, a rounding of float32, and out is off by 0.3.) A row of 10000 +- 1: mean(x^2) - m^2
    // would have no digit of the variance left (1e8 has steps of 8); the two passes have all.
    Values x(2 * C, 3.0);
    for (size_t c = 0; c < C; ++c) x[C + c] = 10000 + (c % 2 ? 1 : -1);
    Buffer inp(DType::f32, {2, C}, x), weight(DType::f32, {C}, Values(C, 1.0)), bias(DType::f32, {C}, Values(C, 0.25));
    Buffer out(DType::f32, {2, C}), mean(DType::f32, {2}), rstd(DType::f32, {2});
    layernorm_forward(out, {}, mean, rstd, inp, {}, weight, bias, kEps, device().stream);
    const Forward expected = layernorm(x, Values(C, 1.0), Values(C, 0.25), 2, C, kEps);
    check_close(out.values(), expected.out, sum_error(C), 0, "out");
    CHECK(mean.values() == Values{3, 10000});
}

TEST_CASE("layernorm says what is wrong with its arguments", "[layernorm][errors]") {
    Buffer x(DType::f32, {4, 8}), g(DType::f32, {8}), r(DType::f32, {4}), half(DType::bf16, {4, 8}),
        scratch(DType::f32, {8});
    Buffer wide(DType::f32, {1, kMaxNormC + 1}), wide_g(DType::f32, {kMaxNormC + 1}), tall(DType::f32, {5, 8});
    const auto s = device().stream;
    CHECK_THROWS_WITH(layernorm_forward(x, {}, r, r, tall, {}, g, g, kEps, s),
                      ContainsSubstring("layernorm_forward: out"));
    CHECK_THROWS_WITH(layernorm_forward(x, {}, r, r, half, {}, g, g, kEps, s),
                      ContainsSubstring("layernorm_forward: inp"));
    CHECK_THROWS_WITH(layernorm_forward(x, {}, g, r, x, {}, g, g, kEps, s),
                      ContainsSubstring("layernorm_forward: mean"));
    CHECK_THROWS_WITH(layernorm_forward(x, {}, r, g, x, {}, g, g, kEps, s),
                      ContainsSubstring("layernorm_forward: rstd"));
    CHECK_THROWS_WITH(layernorm_forward(x, {}, r, r, x, {}, r, g, kEps, s),
                      ContainsSubstring("layernorm_forward: weight"));
    CHECK_THROWS_WITH(layernorm_forward(x, {}, r, r, x, {}, g, {}, kEps, s),
                      ContainsSubstring("layernorm_forward: bias is no tensor"));
    CHECK_THROWS_WITH(layernorm_forward(x, x, r, r, x, tall, g, g, kEps, s),
                      ContainsSubstring("layernorm_forward: branch"));
    CHECK_THROWS_WITH(layernorm_forward(x, {}, r, r, x, x, g, g, kEps, s), ContainsSubstring("layernorm_forward: sum"));
    const Tensor one = r.tensor().slice(0, 1);
    CHECK_THROWS_WITH(layernorm_forward(wide, {}, one, one, wide, {}, wide_g, wide_g, kEps, s),
                      ContainsSubstring("layernorm_forward: rows of 8193 channels"));
    const Tensor shifted = make_tensor(static_cast<char*>(x.tensor().data) + 4, DType::f32, {4, 8});
    CHECK_THROWS_WITH(layernorm_forward(x, {}, r, r, shifted, {}, g, g, kEps, s),
                      ContainsSubstring("layernorm_forward: inp starts"));
    CHECK_THROWS_WITH(layernorm_backward(x, g, g, tall, {}, x, g, r, r, true, scratch, s),
                      ContainsSubstring("layernorm_backward: dout"));
    CHECK_THROWS_WITH(layernorm_backward(x, g, g, x, tall, x, g, r, r, true, scratch, s),
                      ContainsSubstring("layernorm_backward: dsum"));
    CHECK_THROWS_WITH(layernorm_backward(x, half, g, x, {}, x, g, r, r, true, scratch, s),
                      ContainsSubstring("layernorm_backward: dweight"));
    CHECK_THROWS_WITH(layernorm_backward(x, g, r, x, {}, x, g, r, r, true, scratch, s),
                      ContainsSubstring("layernorm_backward: dbias"));
    CHECK_THROWS_WITH(layernorm_backward(x, g, g, x, {}, x, g, g, r, true, scratch, s),
                      ContainsSubstring("layernorm_backward: mean"));
    CHECK_THROWS_WITH(layernorm_backward(x, g, g, x, {}, x, g, r, g, true, scratch, s),
                      ContainsSubstring("layernorm_backward: rstd"));
    CHECK_THROWS_WITH(layernorm_backward(x, g, g, x, {}, x, g, r, r, true, scratch, s),
                      ContainsSubstring("layernorm_backward: scratch is f32 (8), expected f32 of at least 16"));
    const Tensor off = make_tensor(static_cast<char*>(x.tensor().data) + 4, DType::f32, {8});
    CHECK_THROWS_WITH(layernorm_backward(x, off, g, x, {}, x, g, r, r, true, scratch, s),
                      ContainsSubstring("layernorm_backward: dweight starts at"));
    CHECK_THROWS_WITH(layernorm_backward(x, g, off, x, {}, x, g, r, r, true, scratch, s),
                      ContainsSubstring("layernorm_backward: dbias starts at"));
}
