// test/test_divided_norm.cu: norms of rows whose columns are divided among ranks, against float64 on whole rows, and
// copies of columns. The ranks are a loop here; test_tensor_geometries.cu has them talk.
#include "layers/layers.h"
#include "layers/norm.cuh"
#include "reference.h"

#include <deque>

namespace {

using Values = std::vector<double>;
constexpr double kEps = 1e-5;

// Columns [first, first + n) of rows of C.
Values columns_of(const Values& rows, int64_t C, int64_t first, int64_t n) {
    Values part;
    for (int64_t at = first; at < std::ssize(rows); at += C)
        part.insert(part.end(), rows.begin() + at, rows.begin() + at + n);
    return part;
}
void put_columns(Values& rows, int64_t C, int64_t first, int64_t n, const Values& part) {
    for (int64_t r = 0; r * n < std::ssize(part); ++r)
        std::copy_n(part.begin() + r * n, n, rows.begin() + r * C + first);
}

struct Norm {
    int64_t N, C;
    bool centred;
    Values x, g, b;  // b: 0 without a mean
    struct Row {
        double mean, rstd;
    };
    Row row(int64_t n) const {
        double mean = 0, square = 0;
        for (int64_t c = 0; centred && c < C; ++c) mean += x[static_cast<size_t>(n * C + c)] / static_cast<double>(C);
        for (int64_t c = 0; c < C; ++c)
            square += std::pow(x[static_cast<size_t>(n * C + c)] - mean, 2) / static_cast<double>(C);
        return {mean, 1 / std::sqrt(square + kEps)};
    }
    Values forward() const {
        Values out(x.size());
        for (int64_t n = 0; n < N; ++n) {
            const Row r = row(n);
            for (int64_t c = 0; c < C; ++c) {
                const size_t i = static_cast<size_t>(n * C + c), k = static_cast<size_t>(c);
                out[i] = (x[i] - r.mean) * r.rstd * g[k] + b[k];
            }
        }
        return out;
    }
    struct Gradients {
        Values dx, dg, db;
    };
    Gradients backward(const Values& dy, const Values& dsum) const {
        Gradients d{Values(x.size()), Values(g.size()), Values(g.size())};
        for (int64_t n = 0; n < N; ++n) {
            const Row r = row(n);
            double mean = 0, dot = 0;
            for (int64_t c = 0; c < C; ++c) {
                const size_t i = static_cast<size_t>(n * C + c), k = static_cast<size_t>(c);
                const double normal = (x[i] - r.mean) * r.rstd;
                d.dg[k] += dy[i] * normal, d.db[k] += dy[i];
                if (centred) mean += dy[i] * g[k] / static_cast<double>(C);
                dot += dy[i] * g[k] * normal / static_cast<double>(C);
            }
            for (int64_t c = 0; c < C; ++c) {
                const size_t i = static_cast<size_t>(n * C + c), k = static_cast<size_t>(c);
                d.dx[i] = r.rstd * (dy[i] * g[k] - mean - (x[i] - r.mean) * r.rstd * dot) + dsum[i];
            }
        }
        return d;
    }
};

// What one of the ranks has of a norm.
struct RankNorm {
    Buffer x, sum, branch, weight, bias, out, mean, rstd, dout, dsum, dinp, dweight, dbias, parts;
    RankNorm(int64_t N, int64_t C, DType dtype)
        : x(dtype, {N, C}), sum(dtype, {N, C}), branch(dtype, {N, C}), weight(dtype, {C}), bias(dtype, {C}),
          out(dtype, {N, C}), mean(DType::f32, {N}), rstd(DType::f32, {N}), dout(dtype, {N, C}), dsum(dtype, {N, C}),
          dinp(dtype, {N, C}), dweight(DType::f32, {C}, Values(static_cast<size_t>(C))),
          dbias(DType::f32, {C}, Values(static_cast<size_t>(C))), parts(DType::f32, {N, 2}) {}
};

void check_norm(int64_t N, int64_t C, int n_ranks, DType dtype, bool centred) {
    INFO(N << " rows of " << n_ranks << " x " << C << ", " << dtype_name(dtype)
           << (centred ? ", LayerNorm" : ", RMSNorm"));
    const cudaStream_t stream = device().stream;
    const int64_t all = C * n_ranks;
    // A mean that is large beside the spread: mean(x^2) - m^2 would cancel.
    Values inp = rounded(random_values(N * all, 1), dtype), branch = rounded(random_values(N * all, 2), dtype);
    for (double& value : inp) value = rounded({value + (centred ? 30 : 0)}, dtype)[0];
    Norm norm{N, all, centred, {}, rounded(random_values(all, 3), dtype), Values(static_cast<size_t>(all))};
    for (size_t i = 0; i < inp.size(); ++i) norm.x.push_back(rounded({inp[i] + branch[i]}, dtype)[0]);
    if (centred) norm.b = rounded(random_values(all, 4), dtype);
    const Values dy = rounded(random_values(N * all, 5), dtype), dsum = rounded(random_values(N * all, 6), dtype);

    std::deque<RankNorm> ranks;
    Values all_parts;
    for (int r = 0; r < n_ranks; ++r) {
        RankNorm& its = ranks.emplace_back(N, C, dtype);
        const auto set = [&](Buffer& to, const Values& rows) { to.set(columns_of(rows, all, r * C, C)); };
        set(its.x, inp), set(its.branch, branch), set(its.dout, dy), set(its.dsum, dsum);
        set(its.weight, norm.g), set(its.bias, norm.b);
        divided_norm_parts(its.parts, its.sum, its.x, its.branch, centred, stream);
        const Values parts = its.parts.values();
        all_parts.insert(all_parts.end(), parts.begin(), parts.end());
    }
    Buffer gathered(DType::f32, {n_ranks, N, 2}, all_parts), scratch(DType::f32, {layernorm_backward_scratch_n(N, C)});
    Values out(inp.size()), dx(inp.size()), dg(norm.g.size()), db(norm.g.size()), sums(static_cast<size_t>(2 * N));
    for (int r = 0; r < n_ranks; ++r) {
        RankNorm& its = ranks[static_cast<size_t>(r)];
        const Tensor mean = centred ? its.mean.tensor() : Tensor{};
        divided_norm_finish(its.out, mean, its.rstd, its.sum, gathered, its.weight,
                            centred ? its.bias.tensor() : Tensor{}, static_cast<float>(kEps), stream);
        put_columns(out, all, r * C, C, its.out.values());
        CHECK((its.rstd.bits() == ranks[0].rstd.bits()));  // the same on all ranks
        divided_norm_backward_parts(its.parts, its.dweight, centred ? its.dbias.tensor() : Tensor{}, its.dout, its.sum,
                                    its.weight, mean, its.rstd, true, scratch, stream);
        const Values parts = its.parts.values();
        for (size_t i = 0; i < parts.size(); ++i) sums[i] += parts[i];
    }
    Buffer summed(DType::f32, {N, 2}, sums);
    for (int r = 0; r < n_ranks; ++r) {
        RankNorm& its = ranks[static_cast<size_t>(r)];
        divided_norm_backward_finish(its.dinp, its.dout, its.dsum, its.sum, its.weight,
                                     centred ? its.mean.tensor() : Tensor{}, its.rstd, summed, all, stream);
        put_columns(dx, all, r * C, C, its.dinp.values());
        put_columns(dg, all, r * C, C, its.dweight.values());
        put_columns(db, all, r * C, C, its.dbias.values());
    }
    const Norm::Gradients expected = norm.backward(dy, dsum);
    // The mean of 30 rounds to 30 x 2^-24 before it is subtracted.
    const double error = sum_error(all) * (centred ? 60 : 4);
    check_close(out, norm.forward(), 2 * unit_roundoff(dtype), 8 * error, "out");
    check_close(dx, expected.dx, 2 * unit_roundoff(dtype), 16 * error * largest(expected.dx), "dinp");
    check_close(dg, expected.dg, 0,
                4 * sum_error(N) * largest(expected.dg) + 32 * error * std::sqrt(static_cast<double>(N)), "dweight");
    if (centred) check_close(db, expected.db, 0, 8 * sum_error(N) * largest(expected.db), "dbias");
}

}  // namespace

TEST_CASE("norms of rows that ranks divide by columns, against float64", "[divided_norm][counted]") {
    const int64_t own = norm_row_columns;
    for (const int64_t threads : {own, int64_t{16}}) {  // as this device shares a row among threads, and as a GPU does
        norm_row_columns = threads;
        for (const bool centred : {false, true})
            for (const DType dtype : kFloatDTypes) {
                check_norm(37, 24, 3, dtype, centred);
                check_norm(5, 129, 2, dtype, centred);
                check_norm(70, 33, 4, dtype, centred);
                check_norm(3, 1030, 2, dtype, centred);
                check_norm(1, 1, 2, dtype, centred);
            }
    }
    norm_row_columns = own;
    check_counters();
}

TEST_CASE("gradients of a divided norm's parameters must be aligned", "[divided_norm][errors]") {
    Buffer x(DType::f32, {4, 8}), g(DType::f32, {8}), r(DType::f32, {4}), parts(DType::f32, {4, 2}),
        scratch(DType::f32, {16});
    const Tensor off = make_tensor(static_cast<char*>(x.tensor().data) + 4, DType::f32, {8});
    const auto backward = [&](const Tensor& dweight, const Tensor& dbias) {
        divided_norm_backward_parts(parts, dweight, dbias, x, x, g, r, r, true, scratch, device().stream);
    };
    CHECK_THROWS_WITH(backward(off, g), ContainsSubstring("divided_norm_backward_parts: dweight starts at"));
    CHECK_THROWS_WITH(backward(g, off), ContainsSubstring("divided_norm_backward_parts: dbias starts at"));
}

TEST_CASE("a divided norm says what it is not given", "[divided_norm][errors]") {
    const auto s = device().stream;
    Buffer x(DType::f32, {4, 8}), g(DType::f32, {8}), r(DType::f32, {4}), parts(DType::f32, {4, 2}),
        all_parts(DType::f32, {1, 4, 2}), scratch(DType::f32, {16});
    CHECK_THROWS_WITH(divided_norm_parts(parts, {}, make_tensor(nullptr, DType::f32, {4, 8}), {}, true, s),
                      ContainsSubstring("divided_norm_parts: inp is without memory, f32 (4, 8)"));
    const auto finish = [&](Tensor mean, Tensor rstd, Tensor weight, Tensor bias) {
        divided_norm_finish(x, mean, rstd, x, all_parts, weight, bias, 1e-5f, s);
    };
    CHECK_THROWS_WITH(finish({}, r, {}, {}), ContainsSubstring("divided_norm_finish: weight is no tensor"));
    CHECK_THROWS_WITH(finish({}, {}, g, {}), ContainsSubstring("divided_norm_finish: rstd is no tensor"));
    CHECK_THROWS_WITH(finish(r, r, g, {}), ContainsSubstring("mean and bias are LayerNorm's: give both or none"));
    CHECK_THROWS_WITH(finish({}, r, g, g), ContainsSubstring("mean and bias are LayerNorm's: give both or none"));
    CHECK_THROWS_WITH(divided_norm_backward_parts(parts, g, {}, x, x, g, {}, {}, true, scratch, s),
                      ContainsSubstring("divided_norm_backward_parts: rstd is no tensor"));
    CHECK_THROWS_WITH(divided_norm_backward_parts(parts, g, g, x, x, g, g, r, true, scratch, s),
                      ContainsSubstring("divided_norm_backward_parts: mean is f32 (8), expected f32 (4)"));
    CHECK_THROWS_WITH(divided_norm_backward_finish(x, x, {}, x, {}, r, r, parts, 8, s),
                      ContainsSubstring("divided_norm_backward_finish: weight is no tensor"));
}

TEST_CASE("copies of columns", "[divided_norm]") {
    const int64_t R = 13;
    for (const DType dtype : kFloatDTypes) {
        const Values from = rounded(random_values(R * 7, 1), dtype), to = rounded(random_values(R * 9, 2), dtype);
        Buffer inp(dtype, {R, 7}, from), out(dtype, {R, 9}, to);
        copy_heads({out.tensor().view({1, R, 9}), 1, 5, 4}, {inp.tensor().view({1, R, 7}), 1, 5, 2}, device().stream);
        Values expected = to;
        put_columns(expected, 9, 4, 5, columns_of(from, 7, 2, 5));
        CHECK(out.values() == expected);
    }
}
