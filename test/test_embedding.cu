// test/test_embedding.cu: token and position embedding against float64 loops.
#include "layers/layers.h"
#include "reference.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <numeric>

namespace {

using Values = std::vector<double>;

struct Case {
    int64_t B, T, C, rows;
};
// One element; channels that are no whole chunks; more chunks than threads in a block (129 * 32 channels would be
// needed on the CPU: 4100); a vocabulary smaller and larger than B T.
const Case kCases[] = {{1, 1, 1, 1},  {2, 3, 3, 4},      {3, 5, 33, 2},   {1, 37, 48, 11},
                       {4, 50, 7, 3}, {2, 65, 100, 300}, {1, 3, 4100, 5}, {5, 31, 129, 20}};

// Tokens that leave some rows of the table unused and hit others often.
std::vector<int32_t> random_tokens(const Case& c) {
    std::vector<int32_t> tokens(static_cast<size_t>(c.B * c.T));
    for (size_t i = 0; i < tokens.size(); ++i) {
        const double u = uniform(7, 8, i);
        tokens[i] = static_cast<int32_t>(u * u * static_cast<double>(c.rows));
    }
    return tokens;
}

size_t at(int64_t row, int64_t c, int64_t C) { return static_cast<size_t>(row * C + c); }

std::string name(const Case& c, DType dtype) {
    return concat(dtype_name(dtype), " B = ", c.B, ", T = ", c.T, ", C = ", c.C, ", ", c.rows, " rows");
}

}  // namespace

TEST_CASE("embedding forward against float64", "[embedding]") {
    for (DType dtype : kFloatDTypes)
        for (const Case& s : kCases)
            for (bool positions : {true, false}) {
                const auto [B, T, C, rows] = s;
                const Values e = rounded(random_values(rows * C, 1), dtype),
                             p = rounded(random_values((T + 2) * C, 2), dtype);
                const std::vector<int32_t> ids = random_tokens(s);
                Buffer tokens(DType::i32, {B, T}), wte(dtype, {rows, C}, e), wpe(dtype, {T + 2, C}, p),
                    out(dtype, {B, T, C});
                tokens.set_integers(ids);
                embedding_forward(out, tokens, {}, wte, positions ? wpe.tensor() : Tensor{}, device().stream);
                Values expected(static_cast<size_t>(B * T * C));
                for (int64_t i = 0; i < B * T; ++i)
                    for (int64_t c = 0; c < C; ++c)
                        expected[at(i, c, C)] =
                            e[at(ids[static_cast<size_t>(i)], c, C)] + (positions ? p[at(i % T, c, C)] : 0.0);
                // Two numbers of dtype are added in float32 and rounded once: that is the rounding of the exact sum (a
                // sum of two 16-bit numbers whose exponents are close enough to matter fits in float32's 24 bits).
                INFO(name(s, dtype));
                CHECK(out.values() == rounded(expected, dtype));
            }
}

TEST_CASE("embedding backward against float64", "[embedding]") {
    for (DType dtype : kFloatDTypes)
        for (DType gradient_dtype : {DType::f32, dtype})
            for (const Case& s : kCases) {
                const auto [B, T, C, rows] = s;
                const Values dy = rounded(random_values(B * T * C, 3), dtype);
                Values de = rounded(random_values(rows * C, 4), gradient_dtype),
                       dp = rounded(random_values((T + 2) * C, 5), gradient_dtype);
                const std::vector<int32_t> ids = random_tokens(s);
                Buffer tokens(DType::i32, {B, T}), scratch(DType::i32, {embedding_backward_scratch_n(dtype, B * T, C)}),
                    dout(dtype, {B, T, C}, dy);
                Buffer dwte(gradient_dtype, {rows, C}, de), dwpe(gradient_dtype, {T + 2, C}, dp);
                tokens.set_integers(ids);
                embedding_backward(dwte, dwpe, dout, tokens, {}, true, true, scratch, device().stream);
                for (int64_t i = 0; i < B * T; ++i)
                    for (int64_t c = 0; c < C; ++c) {
                        de[at(ids[static_cast<size_t>(i)], c, C)] +=
                            dy[at(i, c, C)];  // += : both start from random values
                        dp[at(i % T, c, C)] += dy[at(i, c, C)];
                    }
                // Sums of at most B T (or B) normal numbers, that grow like sqrt(B T).
                const double absolute = sum_error(B * T) * 4 * std::sqrt(static_cast<double>(B * T));
                const std::string what = concat(name(s, dtype), " into ", dtype_name(gradient_dtype));
                check_close(dwte.values(), de, unit_roundoff(gradient_dtype), absolute, "embedding dwte, " + what);
                check_close(dwpe.values(), dp, unit_roundoff(gradient_dtype), absolute, "embedding dwpe, " + what);
                // Once more, without positions: the same bits are added to dwte, and dwpe stays.
                const std::vector<unsigned char> positions = dwpe.bits(), first = dwte.bits();
                embedding_backward(dwte, {}, dout, tokens, {}, true, true, scratch, device().stream);
                CHECK(dwpe.bits() == positions);
                CHECK((dwte.bits() != first));
            }
}

// The same against loops with positions that begin anew, at places of each row's own.
TEST_CASE("embedding with positions against float64", "[embedding]") {
    for (DType dtype : kFloatDTypes)
        for (const Case& s : kCases) {
            const auto [B, T, C, rows] = s;
            const Values e = rounded(random_values(rows * C, 1), dtype), p = rounded(random_values(T * C, 2), dtype);
            const Values dy = rounded(random_values(B * T * C, 3), dtype);
            Values dp = random_values(T * C, 5), expected(static_cast<size_t>(B * T * C));
            for (double& x : dp) x = static_cast<float>(x);
            const std::vector<int32_t> ids = random_tokens(s);
            std::vector<int32_t> positions(ids.size());
            for (int64_t i = 0; i < B * T; ++i) {
                const bool begins = i % T == 0 || uniform(9, 9, static_cast<uint64_t>(i)) < 0.2;
                positions[static_cast<size_t>(i)] = begins ? 0 : positions[static_cast<size_t>(i - 1)] + 1;
            }
            Buffer tokens(DType::i32, {B, T}), places(DType::i32, {B, T}),
                scratch(DType::i32, {embedding_backward_scratch_n(dtype, B * T, C)}), wte(dtype, {rows, C}, e),
                wpe(dtype, {T, C}, p), out(dtype, {B, T, C}), dout(dtype, {B, T, C}, dy), dwpe(DType::f32, {T, C}, dp),
                dwte(DType::f32, {rows, C}, Values(static_cast<size_t>(rows * C))),
                dwte_without(DType::f32, {rows, C}, Values(static_cast<size_t>(rows * C)));
            tokens.set_integers(ids);
            places.set_integers(positions);
            embedding_forward(out, tokens, places, wte, wpe, device().stream);
            embedding_backward(dwte, dwpe, dout, tokens, places, true, true, scratch, device().stream);
            embedding_backward(dwte_without, {}, dout, tokens, {}, true, true, scratch, device().stream);
            for (int64_t i = 0; i < B * T; ++i)
                for (int64_t c = 0; c < C; ++c) {
                    const int64_t position = positions[static_cast<size_t>(i)];
                    expected[at(i, c, C)] = e[at(ids[static_cast<size_t>(i)], c, C)] + p[at(position, c, C)];
                    dp[at(position, c, C)] += dy[at(i, c, C)];
                }
            INFO(name(s, dtype));
            CHECK(out.values() == rounded(expected, dtype));  // as without positions: one rounding of the exact sum
            check_close(dwpe.values(), dp, unit_roundoff(DType::f32),
                        sum_error(B * T) * 4 * std::sqrt(static_cast<double>(B * T)),
                        "embedding dwpe with positions, " + name(s, dtype));
            CHECK(dwte.bits() == dwte_without.bits());
            // Positions that only say t change no bit.
            for (int64_t i = 0; i < B * T; ++i) positions[static_cast<size_t>(i)] = static_cast<int32_t>(i % T);
            places.set_integers(positions);
            std::vector<unsigned char> bits[2];
            for (const bool given : {false, true}) {
                dwpe.set(dp);
                embedding_backward(dwte, dwpe, dout, tokens, given ? places.tensor() : Tensor{}, true, true, scratch,
                                   device().stream);
                bits[given] = dwpe.bits();
            }
            CHECK(bits[0] == bits[1]);
        }
}

// The sums of dy's rows by ids, in float32 and in the order that layers/embedding.cu promises: ascending, every 128
// places of an id to a partial sum, and these to each other.
std::vector<float> sums_by_pieces(const std::vector<int32_t>& ids, const Values& dy, int64_t rows, int64_t C) {
    std::vector<float> sums(static_cast<size_t>(rows * C)), piece = sums;
    std::vector<int64_t> n_added(static_cast<size_t>(rows));
    const auto end_piece = [&](int64_t row) {
        for (int64_t c = 0; c < C; ++c) sums[at(row, c, C)] += std::exchange(piece[at(row, c, C)], 0.0f);
    };
    for (size_t k = 0; k < ids.size(); ++k) {
        for (int64_t c = 0; c < C; ++c)
            piece[at(ids[k], c, C)] += static_cast<float>(dy[at(static_cast<int64_t>(k), c, C)]);
        if (++n_added[static_cast<size_t>(ids[k])] % 128 == 0) end_piece(ids[k]);
    }
    for (int64_t row = 0; row < rows; ++row) end_piece(row);
    return sums;
}

// Sums are ordered, so float32 loops in that order have the same bits. Ids of all kinds, at lengths around a round of
// the sort, 32 places, a piece, and several of them, with the ids of one block of the sort and of several.
TEST_CASE("embedding backward adds in the order that it promises, to the bit", "[embedding]") {
    const int64_t C = 5;
    int i = 0;
    for (int64_t N : {1, 31, 32, 33, 127, 128, 129, 256, 257, 2048, 2049, 5000})
        for (int64_t rows : {int64_t{1}, int64_t{255}, int64_t{256}, int64_t{70000}})
            for (const char* kind : {"random", "skewed", "descending", "one id", "two ids"}) {
                const std::string ids_kind = kind;
                std::vector<int32_t> ids(static_cast<size_t>(N));
                for (size_t k = 0; k < ids.size(); ++k) {
                    const double u = uniform(3, static_cast<uint64_t>(i), k), last = static_cast<double>(rows - 1);
                    ids[k] = ids_kind == "random"       ? static_cast<int32_t>(u * static_cast<double>(rows))
                             : ids_kind == "skewed"     ? static_cast<int32_t>(last * u * u * u * u)
                             : ids_kind == "descending" ? static_cast<int32_t>((N - 1 - static_cast<int64_t>(k)) % rows)
                             : ids_kind == "two ids"    ? static_cast<int32_t>(u < 0.5 ? 0 : rows - 1)
                                                        : static_cast<int32_t>(rows - 1);
                }
                const Values dy = rounded(random_values(N * C, 8, 1000.0), DType::f32),
                             before = rounded(random_values(rows * C, 9), DType::f32);
                const std::vector<float> sums = sums_by_pieces(ids, dy, rows, C);
                Values expected = before;
                for (size_t k = 0; k < sums.size(); ++k) expected[k] = static_cast<float>(before[k]) + sums[k];
                Buffer tokens(DType::i32, {1, N}),
                    scratch(DType::i32, {embedding_backward_scratch_n(DType::f32, N, C)}),
                    dout(DType::f32, {1, N, C}, dy), dwte(DType::f32, {rows, C}, before);
                tokens.set_integers(ids);
                embedding_backward(dwte, {}, dout, tokens, {}, true, true, scratch, device().stream);
                INFO(N << " places, " << rows << " rows, " << kind);
                CHECK((dwte.values() == rounded(expected, DType::f32)));
                ++i;
            }
}

// As in a text: one id is every third place, so its list has hundreds of pieces, and another is every fifth; the others
// are rare, and a tenth of all has no row.
TEST_CASE("embedding backward of very frequent ids against float64", "[embedding]") {
    const int64_t N = 300000, C = 2, rows = 40000;
    std::vector<int32_t> ids(static_cast<size_t>(N));
    for (size_t k = 0; k < ids.size(); ++k) {
        const double u = uniform(4, 4, k), v = uniform(4, 5, k);
        ids[k] = u < 1.0 / 3     ? 1234
                 : u < 8.0 / 15  ? 39999
                 : u < 19.0 / 30 ? -1
                                 : static_cast<int32_t>(v * static_cast<double>(rows));
    }
    for (DType dtype : {DType::f32, DType::bf16}) {
        const Values dy = rounded(random_values(N * C, 6), dtype);
        Values expected = rounded(random_values(rows * C, 7), DType::f32);
        Buffer tokens(DType::i32, {1, N}), scratch(DType::i32, {embedding_backward_scratch_n(dtype, N, C)}),
            dout(dtype, {1, N, C}, dy), dwte(DType::f32, {rows, C}, expected), again(DType::f32, {rows, C}, expected);
        tokens.set_integers(ids);
        embedding_backward(dwte, {}, dout, tokens, {}, true, true, scratch, device().stream);
        embedding_backward(again, {}, dout, tokens, {}, true, true, scratch, device().stream);
        for (int64_t k = 0; k < N; ++k)
            for (int64_t c = 0; c < C && ids[static_cast<size_t>(k)] != -1; ++c)
                expected[at(ids[static_cast<size_t>(k)], c, C)] += dy[at(k, c, C)];
        // Pieces of 128 normal numbers grow to 4 sqrt(128), and a sum of N / 3 / 128 < 800 of them to 4 sqrt(N / 3).
        const double absolute = sum_error(128) * 4 * std::sqrt(128.0) + sum_error(800) * 4 * std::sqrt(N / 3.0);
        check_close(dwte.values(), expected, unit_roundoff(DType::f32), absolute,
                    concat("embedding dwte, frequent ids, ", dtype_name(dtype)));
        CHECK((dwte.bits() == again.bits()));
    }
    check_counters();
}

// 16 times as many places, none of which recurs or all of which have the same id, may take 16 times as long. What grows
// with the square takes 256 times as long, and fails by a factor of 4. Time is that of the processor, on one thread:
// other programs on the machine do not make it longer.
TEST_CASE("embedding backward takes time in proportion to the number of places", "[embedding]") {
    const auto seconds = [](int64_t N, bool recurring) {
        std::vector<int32_t> ids(static_cast<size_t>(N));
        if (!recurring) std::iota(ids.begin(), ids.end(), 0);
        Buffer tokens(DType::i32, {1, N}), scratch(DType::i32, {embedding_backward_scratch_n(DType::f32, N, 1)}),
            dout(DType::f32, {1, N, 1}, Values(static_cast<size_t>(N))),
            dwte(DType::f32, {N, 1}, Values(static_cast<size_t>(N)));
        tokens.set_integers(ids);
        double best = 1e9;
        const int n_threads = omp_get_max_threads();
        omp_set_num_threads(1);
        for (int i = 0; i < 5; ++i) {
            const std::clock_t start = std::clock();
            embedding_backward(dwte, {}, dout, tokens, {}, true, true, scratch, device().stream);
            cudaCheck(cudaStreamSynchronize(device().stream));
            best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
        }
        omp_set_num_threads(n_threads);
        return best;
    };
    for (bool recurring : {false, true}) {
        const double few = seconds(1 << 12, recurring), many = seconds(1 << 16, recurring);
        INFO((recurring ? "one id: " : "no id recurs: ") << 1e3 * few << " ms, then " << 1e3 * many << " ms");
        // Under a limit of processor time (ulimit -t) some systems count it in ticks, of which the few take none.
        CHECK(many < 64 * std::max(few, 2e-4));
    }
}

TEST_CASE("embedding backward of no tokens: gradients that do not accumulate are 0", "[embedding]") {
    const Values ones(32, 1.0);
    for (const bool accumulate : {false, true}) {
        Buffer dwte(DType::f32, {4, 8}, ones), dwpe(DType::f32, {4, 8}, ones), memory(DType::f32, {8});
        const Tensor dout = make_tensor(memory.tensor().data, DType::f32, {0, 3, 8}),
                     tokens = make_tensor(memory.tensor().data, DType::i32, {0, 3});
        embedding_backward(dwte, dwpe, dout, tokens, {}, accumulate, accumulate, {}, device().stream);
        embedding_forward(dout, tokens, {}, dwte, {}, device().stream);
        CHECK(dwte.values() == (accumulate ? ones : Values(32)));
        CHECK(dwpe.values() == (accumulate ? ones : Values(32)));
    }
}

TEST_CASE("embedding backward is the transpose of embedding forward", "[embedding]") {
    // Forward is linear in the two tables, so <forward(e, p), dy> = <e, de> + <p, dp> for any e, p, dy.
    const Case s{3, 17, 20, 9};
    const auto [B, T, C, rows] = s;
    const Values e = random_values(rows * C, 1), p = random_values(T * C, 2), dy = random_values(B * T * C, 3);
    Buffer tokens(DType::i32, {B, T}), scratch(DType::i32, {embedding_backward_scratch_n(DType::f32, B * T, C)}),
        wte(DType::f32, {rows, C}, e), wpe(DType::f32, {T, C}, p);
    Buffer out(DType::f32, {B, T, C}), dout(DType::f32, {B, T, C}, dy),
        dwte(DType::f32, {rows, C}, Values(rows * C, 0.0));
    Buffer dwpe(DType::f32, {T, C}, Values(T * C, 0.0));
    tokens.set_integers(random_tokens(s));
    embedding_forward(out, tokens, {}, wte, wpe, device().stream);
    embedding_backward(dwte, dwpe, dout, tokens, {}, true, true, scratch, device().stream);
    const auto dot = [](const Values& a, const Values& b) {
        return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
    };
    const double forward = dot(out.values(), dy), backward = dot(e, dwte.values()) + dot(p, dwpe.values());
    CHECK(forward == Approx(backward).margin(static_cast<double>(B * T * C) * 0x1p-22));
}

TEST_CASE("embedding backward with positions: nothing is left of a gradient that does not accumulate", "[embedding]") {
    Buffer tokens(DType::i32, {1, 2}), positions(DType::i32, {1, 2}), dwte(DType::f32, {1, 4}),
        dwpe(DType::f32, {3, 4}), dout(DType::f32, {1, 2, 4}, {1, 2, 3, 4, 5, 6, 7, 8}),
        scratch(DType::i32, {embedding_backward_scratch_n(DType::f32, 2, 4)});
    tokens.set_integers({0, 0}), positions.set_integers({2, 0});
    dwte.set(Values(4, 9.0)), dwpe.set(Values(12, 9.0));
    embedding_backward(dwte, dwpe, dout, tokens, positions, false, false, scratch, device().stream);
    CHECK(dwte.values() == Values{6, 8, 10, 12});
    CHECK(dwpe.values() == Values{5, 6, 7, 8, 0, 0, 0, 0, 1, 2, 3, 4});
}

// Rows of positions beyond T, and places without a row (-1), beside tables that begin with what they held before.
TEST_CASE("embedding backward that does not accumulate leaves nothing of what was there", "[embedding]") {
    const int64_t C = 3, scratch_n = embedding_backward_scratch_n(DType::f32, 4, C);
    const std::vector<int32_t> zeros(static_cast<size_t>(scratch_n));
    Buffer tokens(DType::i32, {2, 2}), scratch(DType::i32, {scratch_n}), dwte(DType::f32, {3, C}, Values(9, 9.0)),
        dwpe(DType::f32, {4, C}, Values(12, 9.0)),
        dout(DType::f32, {2, 2, C}, {1, 2, 3, 10, 20, 30, 100, 200, 300, 1000, 2000, 3000});
    tokens.set_integers({1, -1, -1, 1}), scratch.set_integers(zeros);
    embedding_backward(dwte, dwpe, dout, tokens, {}, false, false, scratch, device().stream);
    CHECK(dwte.values() == Values{0, 0, 0, 1001, 2002, 3003, 0, 0, 0});
    CHECK(dwpe.values() == Values{101, 202, 303, 1010, 2020, 3030, 0, 0, 0, 0, 0, 0});
}

// Several blocks share a row, and each counts the pieces of a list for its own columns. (On the CPU a block has 4096.)
TEST_CASE("embedding backward adds long lists of wide rows in the order that it promises", "[embedding]") {
    const int64_t N = 300, C = 4100;
    const std::vector<int32_t> ids(static_cast<size_t>(N), 1);
    const Values dy = rounded(random_values(N * C, 8, 1000.0), DType::f32);
    const std::vector<float> sums = sums_by_pieces(ids, dy, 2, C);
    Buffer tokens(DType::i32, {1, N}), scratch(DType::i32, {embedding_backward_scratch_n(DType::f32, N, C)}),
        dout(DType::f32, {1, N, C}, dy), dwte(DType::f32, {2, C});
    tokens.set_integers(ids);
    embedding_backward(dwte, {}, dout, tokens, {}, false, false, scratch, device().stream);
    CHECK((dwte.values() == Values(sums.begin(), sums.end())));
}

// The next five are run by the test after them, each in a process of its own, because a trap ends it.
TEST_CASE("embedding of a token beyond the table", "[.][embedding_trap]") {
    Buffer tokens(DType::i32, {1, 3}), wte(DType::f32, {4, 8}, Values(32)), out(DType::f32, {1, 3, 8});
    tokens.set_integers({0, 4, 1});
    embedding_forward(out, tokens, {}, wte, {}, device().stream);
    out.values();
}
TEST_CASE("embedding of a token below -1", "[.][embedding_trap_of_negative_token]") {
    Buffer tokens(DType::i32, {1, 3}), wte(DType::f32, {4, 8}, Values(32)), out(DType::f32, {1, 3, 8});
    tokens.set_integers({0, -2, 1});
    embedding_forward(out, tokens, {}, wte, {}, device().stream);
    out.values();
}
TEST_CASE("embedding of a position beyond the table", "[.][embedding_trap_of_position]") {
    Buffer tokens(DType::i32, {1, 3}), positions(DType::i32, {1, 3}), wte(DType::f32, {4, 8}, Values(32)),
        wpe(DType::f32, {2, 8}, Values(16)), out(DType::f32, {1, 3, 8});
    tokens.set_integers({0, 1, 3}), positions.set_integers({0, 2, 1});
    embedding_forward(out, tokens, positions, wte, wpe, device().stream);
    out.values();
}
TEST_CASE("embedding of a position below 0", "[.][embedding_trap_of_negative_position]") {
    Buffer tokens(DType::i32, {1, 2}), positions(DType::i32, {1, 2}), wte(DType::f32, {4, 8}, Values(32)),
        wpe(DType::f32, {2, 8}, Values(16)), out(DType::f32, {1, 2, 8});
    tokens.set_integers({0, 1}), positions.set_integers({0, -1});
    embedding_forward(out, tokens, positions, wte, wpe.tensor().slice(1, 1), device().stream);
    out.values();
}
TEST_CASE("embedding's gradient of a token beyond the table", "[.][embedding_trap_of_gradient]") {
    Buffer tokens(DType::i32, {1, 3}), dwte(DType::f32, {4, 8}, Values(32)), dout(DType::f32, {1, 3, 8}, Values(24)),
        scratch(DType::i32, {embedding_backward_scratch_n(DType::f32, 3, 8)});
    tokens.set_integers({0, 4, 1});
    embedding_backward(dwte, {}, dout, tokens, {}, true, true, scratch, device().stream);
    dwte.values();
}
TEST_CASE("embedding stops at a token or a position beyond the table", "[embedding][errors]") {
    char self[4096] = {};
    REQUIRE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    for (const char* trap : {"embedding_trap", "embedding_trap_of_negative_token", "embedding_trap_of_position",
                             "embedding_trap_of_negative_position", "embedding_trap_of_gradient"}) {
        INFO(trap);
        CHECK(std::system(concat("env -u LLM_TEST_LOG '", self, "' '[", trap, "]' > /dev/null 2>&1").c_str()) != 0);
    }
}

TEST_CASE("embedding says what is wrong with its arguments", "[embedding][errors]") {
    Buffer out(DType::f32, {2, 3, 8}), tokens(DType::i32, {2, 3}), wte(DType::f32, {5, 8}), wpe(DType::f32, {3, 8});
    Buffer scratch(DType::i32, {embedding_backward_scratch_n(DType::f32, 6, 8)}), places(DType::i32, {2, 6}),
        short_wpe(DType::f32, {2, 8}), flat(DType::f32, {6, 8}), half(DType::bf16, {5, 8});
    const auto s = device().stream;
    CHECK_THROWS_WITH(embedding_forward(flat, tokens, {}, wte, wpe, s), ContainsSubstring("embedding_forward: out"));
    CHECK_THROWS_WITH(embedding_forward(out, wte, {}, wte, wpe, s), ContainsSubstring("embedding_forward: tokens"));
    CHECK_THROWS_WITH(embedding_forward(out, tokens, {}, half, wpe, s), ContainsSubstring("embedding_forward: wte"));
    CHECK_THROWS_WITH(embedding_forward(out, tokens, {}, wte, half, s), ContainsSubstring("embedding_forward: wpe"));
    CHECK_THROWS_WITH(embedding_forward(out, tokens, {}, wte, short_wpe, s),
                      ContainsSubstring("embedding_forward: wpe has 2 positions, but T is 3"));
    CHECK_THROWS_WITH(embedding_backward(wte, half, out, tokens, {}, true, true, scratch, s),
                      ContainsSubstring("embedding_backward: dwpe"));
    CHECK_THROWS_WITH(embedding_backward(half, {}, out, tokens, {}, true, true, scratch, s),
                      ContainsSubstring("embedding_backward: dwte"));
    CHECK_THROWS_WITH(embedding_backward(wte, short_wpe, out, tokens, {}, true, true, scratch, s),
                      ContainsSubstring("embedding_backward: dwpe has 2 positions"));
    CHECK_THROWS_WITH(embedding_backward(wte, wpe, out, tokens, {}, true, true, tokens, s),
                      ContainsSubstring("embedding_backward: scratch is i32 (2, 3), expected i32 of at least 28"));
    CHECK_THROWS_WITH(embedding_backward(wte, wpe, out, tokens, {}, true, true, wte, s),
                      ContainsSubstring("embedding_backward: scratch is f32 (5, 8), expected i32 of at least 28"));
    CHECK_THROWS_WITH(embedding_forward(out, tokens, places, wte, wpe, s),
                      ContainsSubstring("embedding_forward: positions"));
    CHECK_THROWS_WITH(embedding_backward(wte, wpe, out, tokens, places, true, true, scratch, s),
                      ContainsSubstring("embedding_backward: positions"));
    CHECK_THROWS_WITH(embedding_backward(wte, wpe, out, places, {}, true, true, scratch, s),
                      ContainsSubstring("embedding_backward: tokens"));
    CHECK_THROWS_WITH(embedding_backward(wte, wpe, flat, tokens, {}, true, true, scratch, s),
                      ContainsSubstring("embedding_backward: dout"));
    CHECK_THROWS_WITH(ids_from(tokens, flat, 0, 5, s), ContainsSubstring("ids_from: ids is f32 (6, 8)"));
    CHECK_THROWS_WITH(ids_from(places, tokens, 0, 5, s), ContainsSubstring("ids_from: out is i32 (2, 6)"));
    ids_from(tokens.tensor().slice(0, 0), tokens.tensor().slice(0, 0), 0, 5, s);
    const Tensor shifted = make_tensor(static_cast<char*>(wte.tensor().data) + 4, DType::f32, {5, 8});
    CHECK_THROWS_WITH(embedding_forward(out, tokens, {}, shifted, {}, s),
                      ContainsSubstring("embedding_forward: wte starts at"));
    CHECK_THROWS_WITH(embedding_backward(shifted, {}, out, tokens, {}, true, true, scratch, s),
                      ContainsSubstring("embedding_backward: dwte starts at"));
    const Tensor shifted_scratch = make_tensor(static_cast<char*>(scratch.tensor().data) + 4, DType::i32, {28});
    CHECK_THROWS_WITH(embedding_backward(wte, wpe, out, tokens, {}, true, true, shifted_scratch, s),
                      ContainsSubstring("embedding_backward: scratch starts at"));
    // One block, with a counter, for every 128 places of 8 channels.
    const int64_t most = 128 * kArrivals;
    CHECK_NOTHROW(embedding_backward_scratch_n(DType::f32, most, 8));
    CHECK_THROWS_WITH(
        embedding_backward_scratch_n(DType::f32, most + 1, 8),
        "a micro-batch of 8388609 tokens of 8 channels is too large for the gradient of the embedding: use a smaller "
        "--micro-batch or a shorter --seq");
}
