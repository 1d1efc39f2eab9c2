// test/test_rmsnorm.cu: RMSNorm against float64, with and without the fused residual add.
#include "norms.cuh"

namespace {

struct Forward {
    Values out, rstd;
};
Forward rmsnorm(const Values& x, const Values& g, int64_t N, int64_t C, double eps) {
    Forward f{Values(x.size()), Values(static_cast<size_t>(N))};
    for (int64_t n = 0; n < N; ++n) {
        double sum = 0;
        for (int64_t c = 0; c < C; ++c) sum += x[at(n, c, C)] * x[at(n, c, C)];
        const double r = 1 / std::sqrt(sum / static_cast<double>(C) + eps);
        f.rstd[static_cast<size_t>(n)] = r;
        for (int64_t c = 0; c < C; ++c) f.out[at(n, c, C)] = x[at(n, c, C)] * r * g[static_cast<size_t>(c)];
    }
    return f;
}

struct Backward {
    Values dinp, dweight;
};
Backward rmsnorm_gradient(const Values& dy, const Values& dsum, const Values& x, const Values& g, int64_t N, int64_t C,
                          double eps) {
    const Values rstd = rmsnorm(x, g, N, C, eps).rstd;
    Backward b{Values(x.size()), Values(g.size())};
    for (int64_t n = 0; n < N; ++n) {
        const double r = rstd[static_cast<size_t>(n)];
        double mean = 0;
        for (int64_t c = 0; c < C; ++c)
            mean += dy[at(n, c, C)] * g[static_cast<size_t>(c)] * x[at(n, c, C)] * r / static_cast<double>(C);
        for (int64_t c = 0; c < C; ++c) {
            const double normal = x[at(n, c, C)] * r;
            b.dweight[static_cast<size_t>(c)] += dy[at(n, c, C)] * normal;
            b.dinp[at(n, c, C)] = r * (dy[at(n, c, C)] * g[static_cast<size_t>(c)] - normal * mean) + dsum[at(n, c, C)];
        }
    }
    return b;
}

}  // namespace

TEST_CASE("rmsnorm: the reference's gradient is that of the reference", "[rmsnorm]") {
    const int64_t N = 3, C = 7;
    const auto x = random_values(N * C, 1), g = random_values(C, 2), dy = random_values(N * C, 3),
               dsum = random_values(N * C, 4);
    const auto loss = [&](const Values& inp, const Values& weight) {
        const Values out = rmsnorm(inp, weight, N, C, 1e-3).out;
        double total = 0;
        for (size_t i = 0; i < out.size(); ++i) total += dy[i] * out[i] + dsum[i] * inp[i];
        return total;
    };
    const Backward gradient = rmsnorm_gradient(dy, dsum, x, g, N, C, 1e-3);
    // step^2 = 1e-10 times third derivatives below 100, and rounding 1e-15 / 1e-5
    for (const auto& [i, derivative] : finite_differences([&](const Values& v) { return loss(v, g); }, x))
        CHECK(gradient.dinp[i] == Approx(derivative).margin(1e-8));
    for (const auto& [i, derivative] : finite_differences([&](const Values& v) { return loss(x, v); }, g))
        CHECK(gradient.dweight[i] == Approx(derivative).margin(1e-8));
}

TEST_CASE("rmsnorm forward against float64", "[rmsnorm]") {
    with_both_geometries([](const std::string& geometry) {
        for (DType dtype : kFloatDTypes)
            for (const auto& [N, C] : kSizes)
                for (bool fused : {false, true}) {
                    const std::string what =
                        concat(dtype_name(dtype), " (", N, ", ", C, ")", fused ? " fused" : "", geometry);
                    const Values x = rounded(random_values(N * C, 5), dtype),
                                 b = rounded(random_values(N * C, 6, 0.5), dtype);
                    const Values g = rounded(random_values(C, 7), dtype);
                    Values total = x;
                    for (size_t i = 0; i < x.size() && fused; ++i) total[i] += b[i];
                    total = rounded(total, dtype);  // the sum is what is stored, and what is normalised
                    Buffer inp(dtype, {N, C}, x), branch(dtype, {N, C}, b), weight(dtype, {C}, g);
                    Buffer out(dtype, {N, C}), sum(dtype, {N, C}), rstd(DType::f32, {N});
                    rmsnorm_forward(out, fused ? sum.tensor() : Tensor{}, rstd, inp, fused ? branch.tensor() : Tensor{},
                                    weight, kEps, device().stream);
                    const Forward expected = rmsnorm(total, g, N, C, kEps);
                    // r carries the error of a sum of C positive terms; out that,
                    // two products and one rounding to dtype.
                    check_close(rstd.values(), expected.rstd, sum_error(C), 0, "rmsnorm rstd, " + what);
                    const double subnormal = dtype == DType::f16 ? 0x1p-25 : 0x1p-126;  // half a step where they begin
                    check_close(out.values(), expected.out, unit_roundoff(dtype) + sum_error(C), subnormal,
                                "rmsnorm out, " + what);
                    if (fused) CHECK(sum.values() == total);
                }
    });
}

TEST_CASE("rmsnorm backward against float64", "[rmsnorm]") {
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
                    Values rstd_values = rmsnorm(x, g, N, C, kEps).rstd;
                    Buffer inp(dtype, {N, C}, x), dout(dtype, {N, C}, dy), weight(dtype, {C}, g),
                        rstd(DType::f32, {N}, rstd_values);
                    // dinp is the same memory as dsum, as the header allows.
                    Buffer dinp(dtype, {N, C}, ds), dweight(gradient_dtype, {C}, dw);
                    Buffer scratch(DType::f32, {rmsnorm_backward_scratch_n(N, C)});
                    rmsnorm_backward(dinp, dweight, dout, past ? dinp.tensor() : Tensor{}, inp, weight, rstd, true,
                                     scratch, device().stream);
                    Backward expected = rmsnorm_gradient(dy, ds, x, g, N, C, kEps);
                    for (size_t c = 0; c < dw.size(); ++c) expected.dweight[c] += dw[c];  // += : it starts from dw
                    // dinp: terms r dn, r n mean (a sum of C terms) and dsum, each at most `size`; then one rounding.
                    const double size = largest(rstd_values) * largest(dy) * largest(g) + largest(ds);
                    check_close(dinp.values(), expected.dinp, unit_roundoff(dtype), sum_error(C) * size + 0x1p-25,
                                "rmsnorm dinp, " + what);
                    // dweight: N products of two normal numbers, whose sum grows like sqrt(N).
                    check_close(dweight.values(), expected.dweight, unit_roundoff(gradient_dtype),
                                sum_error(N) * 4 * std::sqrt(static_cast<double>(N)), "rmsnorm dweight, " + what);
                }
    });
    check_counters();
}

// Heads inside of wider rows against the same numbers as rows by themselves: the same kernels, so the same bits, and
// what lies between the heads stays as it is. (For rows by themselves see above.)
TEST_CASE("rmsnorm of heads equals rmsnorm of rows, bit for bit", "[rmsnorm]") {
    struct Place {
        int64_t N, heads, D, column, stride, columns;
    };
    const Place places[] = {{5, 3, 16, 8, 24, 88},
                            {7, 1, 24, 16, 24, 48},
                            {3, 5, 7, 2, 9, 50},
                            {33, 2, 128, 0, 128, 384},
                            {4, 1, 20, 0, 20, 20}};
    with_both_geometries([&](const std::string&) {
        for (DType dtype : kFloatDTypes)
            for (const auto& [N, heads, D, column, stride, columns] : places) {
                const auto inside = [&, D = D, columns = columns, column = column, stride = stride,
                                     heads = heads](const Values& all) {
                    Values rows;
                    for (size_t n = 0; n < all.size() / static_cast<size_t>(columns); ++n)
                        for (int64_t h = 0; h < heads; ++h)
                            for (int64_t d = 0; d < D; ++d)
                                rows.push_back(all[at(static_cast<int64_t>(n), column + h * stride + d, columns)]);
                    return rows;
                };
                const Values x = random_values(N * columns, 1), dy = random_values(N * columns, 2),
                             g = random_values(D, 3);
                const int64_t M = N * heads;
                Buffer inp(dtype, {1, N, columns}, x), dout(dtype, {1, N, columns}, dy), weight(dtype, {D}, g);
                Buffer out(dtype, {1, N, columns}, x), dinp(dtype, {1, N, columns}, x), rstd(DType::f32, {N, heads});
                Buffer rows(dtype, {M, D}, inside(x)), drows(dtype, {M, D}, inside(dy)), row_out(dtype, {M, D}),
                    row_dinp(dtype, {M, D}), row_rstd(DType::f32, {M});
                Buffer dweight(DType::f32, {D}, g), row_dweight(DType::f32, {D}, g),
                    scratch(DType::f32, {rmsnorm_backward_scratch_n(M, D)});
                const auto in = [&, D = D, column = column, stride = stride, heads = heads](const Buffer& b) {
                    return HeadColumns{b, heads, D, column, stride};
                };
                rmsnorm_heads_forward(in(out), rstd, in(inp), weight, kEps, device().stream);
                rmsnorm_heads_backward(in(dinp), dweight, in(dout), in(inp), weight, rstd, true, scratch,
                                       device().stream);
                rmsnorm_forward(row_out, {}, row_rstd, rows, {}, weight, kEps, device().stream);
                rmsnorm_backward(row_dinp, row_dweight, drows, {}, rows, weight, row_rstd, true, scratch,
                                 device().stream);
                INFO(dtype_name(dtype) << ", " << heads << " heads of " << D);
                CHECK(rstd.values() == row_rstd.values());
                CHECK(dweight.values() == row_dweight.values());
                for (const auto& [all, mine] :
                     {std::pair{out.values(), row_out.values()}, std::pair{dinp.values(), row_dinp.values()}}) {
                    CHECK(inside(all) == mine);
                    Values untouched = all, before = inp.values();
                    for (int64_t n = 0; n < N; ++n)
                        for (int64_t h = 0; h < heads; ++h)
                            for (int64_t d = 0; d < D; ++d)
                                untouched[at(n, column + h * stride + d, columns)] =
                                    before[at(n, column + h * stride + d, columns)] = 0;
                    CHECK(untouched == before);
                }
            }
    });
    Buffer x(DType::f32, {1, 4, 40}), g(DType::f32, {8}), r(DType::f32, {4, 3}), few(DType::f32, {4, 2}),
        y(DType::f32, {1, 5, 40});
    const auto s = device().stream;
    CHECK_THROWS_WITH(rmsnorm_heads_forward({x, 3, 8, 20}, r, {x, 3, 8}, g, kEps, s),
                      ContainsSubstring("out's 3 heads of 8 columns are not inside of 40"));
    CHECK_THROWS_WITH(rmsnorm_heads_forward({x, 2, 8}, r, {x, 3, 8}, g, kEps, s),
                      ContainsSubstring("out has 2 heads of 8 columns, expected 3 of 8"));
    CHECK_THROWS_WITH(rmsnorm_heads_forward({x, 3, 8}, few, {x, 3, 8}, g, kEps, s), ContainsSubstring("rstd"));
    CHECK_THROWS_WITH(rmsnorm_heads_backward({y, 3, 8}, g, {x, 3, 8}, {x, 3, 8}, g, r, true, r, s),
                      ContainsSubstring("rmsnorm_heads_backward: dinp is"));
}

TEST_CASE("rmsnorm repeats bit for bit", "[rmsnorm]") {
    with_both_geometries([](const std::string&) {
        const int64_t N = 77, C = 200;
        Buffer x(DType::bf16, {N, C}, random_values(N * C, 1)), g(DType::bf16, {C}, random_values(C, 2));
        Buffer dy(DType::bf16, {N, C}, random_values(N * C, 3)),
            scratch(DType::f32, {rmsnorm_backward_scratch_n(N, C)});
        std::vector<unsigned char> first[3];
        for (int run = 0; run < 2; ++run) {
            Buffer out(DType::bf16, {N, C}), rstd(DType::f32, {N}), dx(DType::bf16, {N, C}),
                dg(DType::f32, {C}, Values(C, 0.0));
            rmsnorm_forward(out, {}, rstd, x, {}, g, kEps, device().stream);
            rmsnorm_backward(dx, dg, dy, {}, x, g, rstd, true, scratch, device().stream);
            const std::vector<unsigned char> bits[3] = {out.bits(), dx.bits(), dg.bits()};
            for (int i = 0; i < 3; ++i) {
                if (run == 0) first[i] = bits[i];
                CHECK(bits[i] == first[i]);
            }
        }
    });
}

// A block of more threads than its kernel was compiled for does not start.
TEST_CASE("norms: on a GPU no block has more threads than its kernel's __launch_bounds__", "[rmsnorm][layernorm]") {
    const int64_t before = std::exchange(norm_row_columns, 16);
    for (int64_t C = 1; C <= kMaxNormC; ++C)
        for (const int64_t chunk_columns : {C, int64_t{1}})
            for (const int pack : {4, 8}) {  // of float32, and of 16 bits
                const NormGeometry its = norm_geometry("norm", 1000, C, chunk_columns);
                const int columns = thread_columns(C, chunk_columns % pack != 0);
                const int forward = columns == 16   ? kNormThreads<16>
                                    : columns == 24 ? kNormThreads<24>
                                                    : kNormThreads<32>,
                          backward = columns == 16   ? kBackwardThreads<16>
                                     : columns == 24 ? kBackwardThreads<24>
                                                     : kBackwardThreads<32>;
                const auto fits = [](dim3 block, int most) { return block.x * block.y <= static_cast<unsigned>(most); };
                if (!fits(its.block, forward) || !fits(its.backward_block, backward))
                    FAIL("rows of " << C << ", chunks within " << chunk_columns << ", packs of " << pack);
                // Nor has a row more columns than its threads.
                if (its.block.x * static_cast<unsigned>(columns) < static_cast<unsigned>(C)) FAIL("rows of " << C);
            }
    norm_row_columns = before;
}

TEST_CASE("norms and sums of no rows: gradients that do not accumulate are 0", "[rmsnorm][layernorm][column_sum]") {
    const Values ones(8, 1.0);
    const cudaStream_t stream = device().stream;
    Buffer weight(DType::f32, {8}, ones), memory(DType::f32, {8});
    const Tensor rows = make_tensor(memory.tensor().data, DType::f32, {0, 8}),
                 of_rows = make_tensor(memory.tensor().data, DType::f32, {0});
    for (const bool accumulate : {false, true}) {
        Buffer rms(DType::f32, {8}, ones), layer(DType::f32, {8}, ones), bias(DType::f32, {8}, ones),
            sum(DType::f32, {8}, ones);
        rmsnorm_backward(rows, rms, rows, {}, rows, weight, of_rows, accumulate, {}, stream);
        layernorm_backward(rows, layer, bias, rows, {}, rows, weight, of_rows, of_rows, accumulate, {}, stream);
        column_sum(sum, rows, accumulate, {}, stream);
        for (const Buffer* gradient : {&rms, &layer, &bias, &sum})
            CHECK(gradient->values() == (accumulate ? ones : Values(8)));
    }
}

TEST_CASE("rmsnorm of rows that are hard on float32", "[rmsnorm]") {
    const int64_t C = 64;
    // A row of zeros has r = 1 / sqrt(eps), and out = 0. A row of 1e-10 drowns in eps.
    // A row of 1e18 has squares of 1e36.
    Values x(3 * C);
    for (size_t c = 0; c < C; ++c) x[C + c] = 1e-10, x[2 * C + c] = c % 2 ? 1e18 : -1e18;
    Buffer inp(DType::f32, {3, C}, x), weight(DType::f32, {C}, Values(C, 1.0)), out(DType::f32, {3, C}),
        rstd(DType::f32, {3});
    rmsnorm_forward(out, {}, rstd, inp, {}, weight, kEps, device().stream);
    const Forward expected = rmsnorm(rounded(x, DType::f32), Values(C, 1.0), 3, C, kEps);
    check_close(out.values(), expected.out, sum_error(C), 1e-30, "out");
    check_close(rstd.values(), expected.rstd, sum_error(C), 0, "rstd");
}

TEST_CASE("rmsnorm says what is wrong with its arguments", "[rmsnorm][errors]") {
    Buffer x(DType::f32, {4, 8}), g(DType::f32, {8}), r(DType::f32, {4}), half(DType::bf16, {4, 8}),
        scratch(DType::f32, {1});
    Buffer wide(DType::f32, {1, kMaxNormC + 1}), wide_g(DType::f32, {kMaxNormC + 1}), tall(DType::f32, {5, 8});
    const auto s = device().stream;
    CHECK_THROWS_WITH(rmsnorm_forward(x, {}, r, tall, {}, g, kEps, s),
                      ContainsSubstring("rmsnorm_forward: out is f32 (4, 8), expected f32 (5, 8)"));
    CHECK_THROWS_WITH(rmsnorm_forward(x, {}, r, half, {}, g, kEps, s), ContainsSubstring("rmsnorm_forward: inp"));
    CHECK_THROWS_WITH(rmsnorm_forward(x, {}, g, x, {}, g, kEps, s), ContainsSubstring("rmsnorm_forward: rstd"));
    CHECK_THROWS_WITH(rmsnorm_forward(x, {}, r, x, {}, r, kEps, s), ContainsSubstring("rmsnorm_forward: weight"));
    CHECK_THROWS_WITH(rmsnorm_forward(x, x, r, x, tall, g, kEps, s), ContainsSubstring("rmsnorm_forward: branch"));
    CHECK_THROWS_WITH(rmsnorm_forward(x, {}, r, x, x, g, kEps, s),
                      ContainsSubstring("rmsnorm_forward: sum is no tensor"));
    CHECK_THROWS_WITH(rmsnorm_forward(wide, {}, r.tensor().slice(0, 1), wide, {}, wide_g, kEps, s),
                      ContainsSubstring("rmsnorm_forward: rows of 8193 channels"));
    const Tensor shifted = make_tensor(static_cast<char*>(x.tensor().data) + 4, DType::f32, {4, 8});
    CHECK_THROWS_WITH(rmsnorm_forward(x, {}, r, shifted, {}, g, kEps, s),
                      ContainsSubstring("rmsnorm_forward: inp starts at"));
    CHECK_THROWS_WITH(rmsnorm_backward(x, g, tall, {}, x, g, r, true, scratch, s),
                      ContainsSubstring("rmsnorm_backward: dout"));
    CHECK_THROWS_WITH(rmsnorm_backward(x, g, x, tall, x, g, r, true, scratch, s),
                      ContainsSubstring("rmsnorm_backward: dsum"));
    CHECK_THROWS_WITH(rmsnorm_backward(x, half, x, {}, x, g, r, true, scratch, s),
                      ContainsSubstring("rmsnorm_backward: dweight"));
    CHECK_THROWS_WITH(rmsnorm_backward(x, g, x, {}, x, g, r, true, scratch, s),
                      ContainsSubstring("rmsnorm_backward: scratch is f32 (1), expected f32 of at least 8"));
    CHECK_THROWS_WITH(rmsnorm_backward(x, g, x, {}, x, g, g, true, scratch, s),
                      ContainsSubstring("rmsnorm_backward: rstd"));
    CHECK_THROWS_WITH(rmsnorm_backward(x, g, x, {}, shifted, g, r, true, scratch, s),
                      ContainsSubstring("rmsnorm_backward: inp starts at"));
    const Tensor off = make_tensor(static_cast<char*>(x.tensor().data) + 4, DType::f32, {8});
    CHECK_THROWS_WITH(rmsnorm_backward(x, off, x, {}, x, g, r, true, scratch, s),
                      ContainsSubstring("rmsnorm_backward: dweight starts at"));
}
