// test/test_paged_attention.cu: attention over a cache in pages gives the bits of flash attention over whole sequences;
// what is in the pages is what rope gives; with codes of 8 bits the error is that of the codes.
#include "layers/flash_attention/paged_attention.cuh"
#include "paged_step.h"

#include <unistd.h>

#include <cmath>
#include <cstdlib>

namespace {

struct HeadCounts {
    int64_t H, K, D;
    int64_t width() const { return (H + 2 * K) * D; }
};

std::vector<unsigned char> last_bytes(const std::vector<unsigned char>& bytes, size_t n) {
    return {bytes.end() - static_cast<int64_t>(n), bytes.end()};
}

// flash_attention_forward on CUDA cores, of one sequence.
std::vector<unsigned char> flash(const Values& qkv, DType dtype, int64_t T, const HeadCounts& h, float scale,
                                 int64_t window) {
    Buffer rows(dtype, {1, T, h.width()}, qkv), out(dtype, {1, T, h.H * h.D}), lse(DType::f32, {1, h.H, T});
    const QkvHeads heads = qkv_heads(rows, h.H, h.K);
    flash_attention_forward({out, h.H, h.D}, lse, heads.q, heads.k, heads.v,
                            {.scale = scale, .window = window, .tier = FlashTier::cuda_cores}, device().stream);
    return out.bits();
}

Buffer scratch_for(const Step& s, const HeadCounts& h) {
    return Buffer(DType::f32, {1 + paged_attention_scratch_n(s.N, h.H, h.D, s.table_columns * s.page_size)});
}

// Writes a step and attends, without rope.
void attend(const Buffer& out, const Buffer& qkv, const DeviceStep& step, const Step& s, const HeadCounts& h,
            float scale, int64_t window) {
    const QkvHeads heads = qkv_heads(qkv, h.H, h.K);
    const Buffer scratch = scratch_for(s, h);
    paged_write(step, heads.q, heads.k, heads.v, RopePairs::halves, {}, {}, device().stream);
    paged_attention_forward({out, h.H, h.D}, heads.q, h.K, step, scale, window, scratch, device().stream);
}

}  // namespace

TEST_CASE("attention over pages has the bits of flash attention", "[paged]") {
    struct Case {
        std::vector<int64_t> lengths;
        int64_t page_size;
        std::vector<int64_t> chunk_rows;
        HeadCounts heads;
        int64_t window;
    };
    const Case cases[] = {{{1, 70, 33}, 1, {1}, {3, 3, 8}, 0},        {{131, 5, 64}, 16, {5}, {4, 1, 64}, 0},
                          {{40, 150}, 17, {32}, {6, 2, 32}, 0},       {{129, 65}, 16, {32, 1, 5}, {4, 4, 80}, 0},
                          {{66, 31, 2}, 17, {32, 1}, {8, 2, 128}, 0}, {{130}, 16, {7}, {3, 1, 192}, 0},
                          {{150, 20}, 16, {32, 1}, {4, 2, 64}, 9},    {{140}, 17, {1, 9}, {2, 2, 23}, 65}};
    for (DType dtype : kFloatDTypes) {
        if (dtype != DType::f32 && !device().is_cpu) continue;
        for (const Case& c : cases) {
            const Step s(c.lengths, c.page_size, c.chunk_rows);
            const HeadCounts& h = c.heads;
            const float scale = 1 / std::sqrt(static_cast<float>(h.D));
            const Values values = random_values(s.N * h.width(), 1, 1.5);
            Buffer qkv(dtype, {1, s.N, h.width()}, values), out(dtype, {1, s.N, h.H * h.D});
            attend(out, qkv, DeviceStep(s, dtype, 2 * h.K * h.D, 2 * h.K), s, h, scale, c.window);
            std::vector<unsigned char> expected;
            int64_t first = 0;
            for (int64_t T : c.lengths) {
                const auto its = flash(some_rows(values, first, T, h.width()), dtype, T, h, scale, c.window);
                expected.insert(expected.end(), its.begin(), its.end());
                first += T;
            }
            INFO(dtype_name(dtype) << ", pages of " << c.page_size << ", D = " << h.D << ", window " << c.window);
            CHECK(out.bits() == expected);
        }
    }
}

// In 16 bits a GPU cuts a long context into splits, which have blocks of their own where a step has few rows.
TEST_CASE("a row's attention has the same bits in a prompt's chunks and alone", "[paged]") {
    const HeadCounts h{2, 1, 16};
    for (DType dtype : kFloatDTypes)
        for (int64_t window : {0, 300}) {
            const Step s({7, 590}, 16, {32});
            const Values values = random_values(s.N * h.width(), 2, 1.5);
            Buffer qkv(dtype, {1, s.N, h.width()}, values), out(dtype, {1, s.N, h.H * h.D});
            const DeviceStep prompt(s, dtype, 2 * h.K * h.D, 2 * h.K);
            attend(out, qkv, prompt, s, h, 0.25f, window);
            // The last three tokens again, as if they were decoded; their keys and values are there.
            Buffer last(dtype, {1, 3, h.width()}, some_rows(values, s.N - 3, 3, h.width())),
                again(dtype, {1, 3, h.H * h.D});
            Buffer chunks(DType::i32, {3, 4});
            chunks.set_integers({0, 1, 1, 587, 1, 1, 1, 588, 2, 1, 1, 589});
            PagedStep step = prompt;
            step.chunks = chunks;
            paged_attention_forward({again, h.H, h.D}, qkv_heads(last, h.H, h.K).q, h.K, step, 0.25f, window,
                                    scratch_for(s, h), device().stream);
            CHECK(again.bits() == last_bytes(out.bits(), again.tensor().bytes()));
        }
}

// With a window, tiles of keys begin anywhere, and the last one of a split may have few. In its other places stand
// scores of the tile before. The queries from position 272 on have a tile of 32 keys from 223 on, and then, up to the
// end of the split, one key. The key at 224 has a large score, and is too old for the queries from 274 on.
TEST_CASE("attention over pages takes no maximum from behind the end of a split", "[paged]") {
    const HeadCounts h{1, 1, 16};
    const Step s({288}, 16, {16});
    for (DType dtype : kFloatDTypes) {
        Values values(static_cast<size_t>(s.N * h.width()));
        for (size_t i = 0; i < values.size(); ++i) {
            const size_t row = i / 48, column = i % 48;
            values[i] = column < 16 ? 10 : column < 32 ? (row == 224 ? 10 : 0) : 1;  // query, key, value
        }
        Buffer qkv(dtype, {1, s.N, h.width()}, values), out(dtype, {1, s.N, h.H * h.D});
        attend(out, qkv, DeviceStep(s, dtype, 2 * h.K * h.D, 2 * h.K), s, h, 0.25f, 50);
        // All values are 1: an output is a sum times its inverse.
        check_close(out.values(), Values(static_cast<size_t>(s.N * h.D), 1.0), 2 * unit_roundoff(dtype), 0,
                    dtype_name(dtype));
    }
}

// As PyTorch's attention. (Query 0 sees key 0 alone.)
TEST_CASE("attention over pages gives scores of -infinity no weight", "[paged]") {
    const HeadCounts h{1, 1, 16};
    const Step s({290}, 16, {16});
    for (DType dtype : {DType::f32, DType::bf16}) {
        Values values(static_cast<size_t>(s.N * h.width()), 1);
        for (int64_t row = 0; row < s.N; ++row) {
            values[static_cast<size_t>(row * 48)] = 1e20;
            values[static_cast<size_t>(row * 48 + 16)] = row % 3 == 0 ? -1e20 : 0;
        }
        Buffer qkv(dtype, {1, s.N, h.width()}, values), out(dtype, {1, s.N, h.H * h.D});
        attend(out, qkv, DeviceStep(s, dtype, 2 * h.K * h.D, 2 * h.K), s, h, 0.25f, 0);
        Values expected(static_cast<size_t>(s.N * h.D), 1);
        std::fill_n(expected.begin(), h.D, 0);
        check_close(out.values(), expected, 2 * unit_roundoff(dtype), 0, dtype_name(dtype));
    }
}

// The row of a token may lie in a page that others share, whatever stands behind it in the prompt that computed it.
TEST_CASE("what is not finite in attention over pages is seen by no row that does not see it", "[paged]") {
    const HeadCounts h{3, 1, 16};
    for (const int64_t window : {0, 20})
        for (const DType dtype : {DType::f32, DType::bf16})
            for (const double wrong : {double(NAN), double(INFINITY)}) {
                const Step s({100, 300}, 16, {32, 1, 7});
                Values values = random_values(s.N * h.width(), 3, 1.5);
                const Buffer right(dtype, {1, s.N, h.width()}, values);
                const int64_t row = 100 + 77;  // of the second sequence; its key and value
                for (int64_t column = h.H * h.D; column < h.width(); ++column) values[row * h.width() + column] = wrong;
                const Buffer damaged(dtype, {1, s.N, h.width()}, values);
                const Buffer expected(dtype, {1, s.N, h.H * h.D}), out(dtype, {1, s.N, h.H * h.D});
                attend(expected, right, DeviceStep(s, dtype, 2 * h.D, 2), s, h, 0.25f, window);
                attend(out, damaged, DeviceStep(s, dtype, 2 * h.D, 2), s, h, 0.25f, window);
                const Values a = expected.values(), b = out.values();
                const int64_t end = window > 0 ? row + window : s.N;  // of the rows that see it
                for (int64_t i = 0; i < s.N; ++i)
                    for (int64_t c = 0; c < h.H * h.D; ++c) {
                        const size_t at = static_cast<size_t>(i * h.H * h.D + c);
                        INFO("row " << i << ", window " << window << ", " << dtype_name(dtype));
                        if (i < row || i >= end) REQUIRE(a[at] == b[at]);
                        else REQUIRE_FALSE(std::isfinite(b[at]));
                    }
            }
}

namespace {

struct Decoded {
    std::vector<int64_t> lengths;
    int64_t page_size;
    HeadCounts heads;
    int64_t window;
    bool rotates;
    RopePairs pairs;
};

// The last token of each sequence, once by paged_write and paged_attention_forward among the chunks of prompts, once by
// the kernel of a GPU that decodes (on the CPU device, too), which also writes it.
void check_decode(const Decoded& c, DType dtype) {
    const HeadCounts& h = c.heads;
    const int64_t n = static_cast<int64_t>(c.lengths.size()), width = h.width();
    // Chunks of up to 31 rows, and one more row for each last token.
    Step s(c.lengths, c.page_size, {31});
    Integers chunks, last_chunks, last_rows, last_positions;
    for (size_t i = 0; i < s.chunks.size(); i += 4) {
        const int32_t row = s.chunks[i], rows = s.chunks[i + 1], sequence = s.chunks[i + 2], first = s.chunks[i + 3];
        const bool is_last = first + rows == c.lengths[static_cast<size_t>(sequence)];
        if (!is_last || rows > 1)
            for (const int32_t x : {row, rows - is_last, sequence, first}) chunks.push_back(x);
        if (!is_last) continue;
        const int32_t last = row + rows - 1;
        for (const int32_t x : {last, 1, sequence, first + rows - 1}) chunks.push_back(x);
        for (const int32_t x : {sequence, 1, sequence, first + rows - 1}) last_chunks.push_back(x);
        last_rows.push_back(s.rows[static_cast<size_t>(last)]);
        last_positions.push_back(s.positions[static_cast<size_t>(last)]);
    }
    s.chunks = chunks;
    const Values values = random_values(s.N * width, 3, 1.5);
    Values last_values;
    int64_t first = 0;
    for (const int64_t length : c.lengths) {
        const Values row = some_rows(values, (first += length) - 1, 1, width);
        last_values.insert(last_values.end(), row.begin(), row.end());
    }
    Buffer table(DType::f32, {600, h.D});
    rope_table(table, rope_frequencies(h.D, 100.0, {}), 1.1);
    const Tensor turns = c.rotates ? table.tensor() : Tensor{};
    const float scale = 1 / std::sqrt(static_cast<float>(h.D));
    Buffer qkv(dtype, {1, s.N, width}, values), out(dtype, {1, s.N, h.H * h.D});
    const DeviceStep prompt(s, dtype, 2 * h.K * h.D, 2 * h.K);
    const QkvHeads heads = qkv_heads(qkv, h.H, h.K);
    paged_write(prompt, heads.q, heads.k, heads.v, c.pairs, prompt.positions, turns, device().stream);
    paged_attention_forward({out, h.H, h.D}, heads.q, h.K, prompt, scale, c.window, scratch_for(s, h), device().stream);

    // The same pool without the last rows.
    const std::vector<unsigned char> whole = prompt.pool.bits();
    std::vector<unsigned char> without = whole;
    const size_t bytes = static_cast<size_t>(h.D) * dtype_bytes(dtype);
    for (const int32_t row : last_rows)
        for (int64_t head = 0; head < 2 * h.K; ++head) {
            const int64_t place = (row / s.page_size * 2 * h.K + head) * s.page_size + row % s.page_size;
            std::fill_n(without.begin() + place * static_cast<int64_t>(bytes), bytes, 0xff);
        }
    copy_to_device(prompt.pool, without.data());
    Buffer last(dtype, {1, n, width}, last_values), again(dtype, {1, n, h.H * h.D}), positions(DType::i32, {1, n}),
        rows(DType::i32, {n}), one_each(DType::i32, {n, 4});
    positions.set_integers(last_positions), rows.set_integers(last_rows), one_each.set_integers(last_chunks);
    PagedStep step = prompt;
    step.chunks = one_each, step.rows = rows;
    const QkvHeads now = qkv_heads(last, h.H, h.K);
    const NewHeads fresh{now.k, now.v, c.pairs, positions, turns};
    const HeadColumns to{again, h.H, h.D};
    paged_decode("test", {to, now.q, h.K, 2 * h.K, h.K, h.D, scale, c.window}, step, &fresh, scratch_for(s, h),
                 device().stream);
    INFO(dtype_name(dtype) << ", pages of " << c.page_size << ", D = " << h.D << ", window " << c.window);
    std::vector<unsigned char> expected;
    first = 0;
    const std::vector<unsigned char> all = out.bits();
    const int64_t row_bytes = h.H * static_cast<int64_t>(bytes);
    for (const int64_t length : c.lengths) {
        first += length;
        expected.insert(expected.end(), all.begin() + (first - 1) * row_bytes, all.begin() + first * row_bytes);
    }
    CHECK(again.bits() == expected);
    CHECK((prompt.pool.bits() == whole));
    // The rows are in the pool now.
    Buffer rotated(dtype, {1, n, width}, last_values), third(dtype, {1, n, h.H * h.D});
    const HeadColumns q = qkv_heads(rotated, h.H, h.K).q;
    if (c.rotates) rope_forward(q, c.pairs, positions, table, device().stream);
    paged_decode("test", {{third, h.H, h.D}, q, h.K, 2 * h.K, h.K, h.D, scale, c.window}, step, nullptr,
                 scratch_for(s, h), device().stream);
    CHECK(third.bits() == expected);
}

}  // namespace

TEST_CASE("one launch writes a row and attends with the bits of two", "[paged][counted]") {
    for (DType dtype : kFloatDTypes) {
        check_decode({{1, 40, 33, 2}, 16, {3, 3, 64}, 0, true, RopePairs::halves}, dtype);
        check_decode({{131, 5}, 1, {4, 1, 8}, 0, false, RopePairs::halves}, dtype);
        check_decode({{66, 31, 2}, 17, {8, 2, 128}, 0, false, RopePairs::halves}, dtype);
    }
}
TEST_CASE("one launch for long sequences has the bits of two", "[paged][counted]") {
    for (DType dtype : kFloatDTypes) {
        check_decode({{290, 600}, 17, {6, 2, 32}, 0, true, RopePairs::neighbours}, dtype);
        check_decode({{300, 65}, 16, {10, 1, 80}, 70, true, RopePairs::halves}, dtype);
        check_decode({{530}, 16, {3, 1, 192}, 300, true, RopePairs::halves}, dtype);
    }
}

TEST_CASE("paged_write rotates as rope does", "[paged][counted]") {
    const HeadCounts h{3, 2, 10};
    const Step s({5, 9}, 4, {32});
    Buffer table(DType::f32, {s.N, h.D});
    rope_table(table, rope_frequencies(h.D, 100.0, {}), 1.1);
    for (DType dtype : kFloatDTypes)
        for (RopePairs pairs : {RopePairs::halves, RopePairs::neighbours}) {
            const Values values = random_values(s.N * h.width(), 3);
            Buffer fused(dtype, {1, s.N, h.width()}, values), apart(dtype, {1, s.N, h.width()}, values);
            const DeviceStep one(s, dtype, 2 * h.K * h.D, 2 * h.K), two(s, dtype, 2 * h.K * h.D, 2 * h.K);
            const QkvHeads q1 = qkv_heads(fused, h.H, h.K), q2 = qkv_heads(apart, h.H, h.K);
            paged_write(one, q1.q, q1.k, q1.v, pairs, one.positions, table, device().stream);
            rope_forward(q2.q, pairs, two.positions, table, device().stream);
            rope_forward(q2.k, pairs, two.positions, table, device().stream);
            paged_write(two, q2.q, q2.k, q2.v, pairs, {}, {}, device().stream);
            CHECK(one.pool.bits() == two.pool.bits());
            // Queries in place; the keys beside them are left as they were.
            const Values expected = apart.values(), actual = fused.values();
            for (size_t i = 0; i < actual.size(); ++i) {
                const int64_t column = static_cast<int64_t>(i) % h.width();
                const bool is_key = column >= h.H * h.D && column < (h.H + h.K) * h.D;
                if (!is_key && actual[i] != expected[i]) FAIL("element " << i);
            }
        }
}

// e4m3 has 3 bits of mantissa, and its smallest numbers are multiples of 2^-9: a code is off by at most 2^-4 of x, or
// by 2^-10 of the scale. So keys shift a score by at most d = scale * sum over x of |q_x| error(k_x), and a
// probability by a factor between e^-2d and e^2d; values are off by their own error. All of it stays below this bound,
// computed for each row; float32 sums add nothing that can be seen beside it (1e-5).
TEST_CASE("attention over e4m3 pages is as near as the codes allow", "[paged][counted]") {
    const HeadCounts h{4, 2, 24};
    const Step s({37}, 16, {32, 1});
    const double scale = 1 / std::sqrt(24.0);
    Values values = random_values(s.N * h.width(), 4);
    // Heads of keys and values differ in size, so that each needs its own scale. Queries are small: with scores that
    // move far the bound would be too wide to find a mistake.
    for (size_t i = 0; i < values.size(); ++i) {
        const int64_t head = static_cast<int64_t>(i) / h.D;
        values[i] *= head % (h.H + 2 * h.K) < h.H ? 0.02 : 1 + static_cast<double>(head % 7);
    }
    for (DType dtype : kFloatDTypes) {
        const Values x = rounded(values, dtype);
        const auto at = [&](int64_t t, int64_t head, int64_t d) {
            return x[static_cast<size_t>(t * h.width() + head * h.D + d)];
        };
        const auto code_error = [&](int64_t t, int64_t head, int64_t d) {
            double most = 0;
            for (int64_t c = 0; c < h.D; ++c) most = std::max(most, std::abs(at(t, head, c)));
            return std::max(0x1p-4 * std::abs(at(t, head, d)), 0x1p-10 * most / 448);
        };
        Buffer qkv(dtype, {1, s.N, h.width()}, values), out(dtype, {1, s.N, h.H * h.D});
        attend(out, qkv, DeviceStep(s, DType::e4m3, 2 * h.K * h.D, 2 * h.K), s, h, static_cast<float>(scale), 0);
        const Values actual = out.values();
        double worst = 0, largest_error = 0;
        for (int64_t t = 0; t < s.N; ++t)
            for (int64_t head = 0; head < h.H; ++head) {
                const int64_t key = h.H + head / 2, value = key + h.K;
                Values p(static_cast<size_t>(t + 1)), o(static_cast<size_t>(h.D));
                double total = 0, shift = 0;
                for (int64_t k = 0; k <= t; ++k) {
                    double score = 0, its_shift = 0;
                    for (int64_t d = 0; d < h.D; ++d) {
                        score += scale * at(t, head, d) * at(k, key, d);
                        its_shift += scale * std::abs(at(t, head, d)) * code_error(k, key, d);
                    }
                    total += p[static_cast<size_t>(k)] = std::exp(score);
                    shift = std::max(shift, its_shift);
                }
                for (int64_t d = 0; d < h.D; ++d) {
                    double exact = 0, size = 0, error = 0;
                    for (int64_t k = 0; k <= t; ++k) {
                        const double probability = p[static_cast<size_t>(k)] / total;
                        exact += probability * at(k, value, d);
                        size += probability * std::abs(at(k, value, d));
                        error += probability * code_error(k, value, d);
                    }
                    const double bound = std::expm1(2 * shift) * (size + error) + error +
                                         (1e-5 + unit_roundoff(dtype)) * (size + error) * std::exp(2 * shift);
                    const double off = std::abs(actual[static_cast<size_t>((t * h.H + head) * h.D + d)] - exact);
                    worst = larger(worst, off / bound), largest_error = std::max(largest_error, off);
                }
            }
        INFO(dtype_name(dtype) << ": " << worst << " of the bound");
        CHECK(worst <= 1);
        CHECK(largest_error > 0x1p-8);  // codes were used
    }
}

// The next three are run by the test after them, each in a process of its own, because a trap ends it.
namespace {
void write_beyond(const std::string& what) {
    const HeadCounts h{2, 1, 8};
    const Step s({3}, 4, {32});
    const Buffer qkv(DType::f32, {1, s.N, h.width()}, random_values(s.N * h.width(), 5)),
        table(DType::f32, {3, h.D}, random_values(3 * h.D, 6));
    DeviceStep step(s, DType::f32, 2 * h.K * h.D, 2 * h.K);
    const int behind = static_cast<int>(s.n_pages * s.page_size);
    step.rows.set_integers({0, what == "row" ? behind : what == "negative row" ? -1 : 2, 1});
    step.positions.set_integers({0, what == "position" ? 3 : 2, 1});
    const QkvHeads heads = qkv_heads(qkv, h.H, h.K);
    paged_write(step, heads.q, heads.k, heads.v, RopePairs::halves, step.positions, table, device().stream);
    step.pool.values();
}
}  // namespace
TEST_CASE("a token written behind the pages", "[.][paged_trap_of_row]") { write_beyond("row"); }
TEST_CASE("a token written before the pages", "[.][paged_trap_of_negative_row]") { write_beyond("negative row"); }
TEST_CASE("a token of a position beyond the table", "[.][paged_trap_of_position]") { write_beyond("position"); }
TEST_CASE("paged_write stops at a row or a position that there is not", "[paged][errors]") {
    char self[4096] = {};
    REQUIRE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    const auto status = [&](const std::string& tag) {
        return std::system(concat("env -u LLM_TEST_LOG '", self, "' '[", tag, "]' > /dev/null 2>&1").c_str());
    };
    for (const char* of : {"row", "negative_row", "position"}) {
        INFO(of);
        CHECK(status(concat("paged_trap_of_", of)) != 0);
    }
}

TEST_CASE("paged attention refuses what does not fit", "[paged]") {
    const HeadCounts h{4, 2, 8};
    const Step s({5}, 4, {32});
    Buffer qkv(DType::f32, {1, s.N, h.width()}, random_values(s.N * h.width(), 5)),
        out(DType::f32, {1, s.N, h.H * h.D});
    const DeviceStep step(s, DType::f32, 2 * h.K * h.D, 2 * h.K);
    const DeviceStep narrow_pool(s, DType::f32, h.K * h.D, 2 * h.K), other_type(s, DType::bf16, 2 * h.K * h.D, 2 * h.K);
    const QkvHeads heads = qkv_heads(qkv, h.H, h.K);
    const auto write = [&](const PagedStep& to, const HeadColumns& k, const Tensor& table) {
        paged_write(to, heads.q, k, heads.v, RopePairs::halves, step.positions, table, device().stream);
    };
    const auto attention = [&](const PagedStep& from, int64_t K, float scale, int64_t window) {
        paged_attention_forward({out, h.H, h.D}, heads.q, K, from, scale, window, {}, device().stream);
    };
    Buffer narrow_table(DType::f32, {9, 6});
    CHECK_THROWS_WITH(write(narrow_pool, heads.k, {}), ContainsSubstring("paged_write: step.pool"));
    CHECK_THROWS_WITH(write(other_type, heads.k, {}), ContainsSubstring("paged_write: step.pool"));
    CHECK_THROWS_WITH(write(step, {qkv, h.K, 4}, {}), ContainsSubstring("k has 2 heads of 4 columns, expected 2 of 8"));
    CHECK_THROWS_WITH(write(step, heads.k, narrow_table), ContainsSubstring("paged_write: table"));
    Buffer wide(DType::f32, {1, s.N, 3 * 257}), odd(DType::f32, {1, s.N, 3 * 7}), odd_table(DType::f32, {9, 7});
    const QkvHeads wide_heads = qkv_heads(wide, 1, 1), odd_heads = qkv_heads(odd, 1, 1);
    const DeviceStep wide_pool(s, DType::f32, 2 * 257, 2), odd_pool(s, DType::f32, 2 * 7, 2);
    CHECK_THROWS_WITH(paged_write(wide_pool, wide_heads.q, wide_heads.k, wide_heads.v, RopePairs::halves,
                                  step.positions, {}, device().stream),
                      ContainsSubstring("heads of q have 257 columns; 1 to 256 are possible"));
    CHECK_THROWS_WITH(paged_write(odd_pool, odd_heads.q, odd_heads.k, odd_heads.v, RopePairs::halves, step.positions,
                                  odd_table, device().stream),
                      ContainsSubstring("heads of D = 7 columns cannot be rotated"));
    CHECK_THROWS_WITH(attention(narrow_pool, h.K, 1, 0), ContainsSubstring("paged_attention_forward: step.pool"));
    CHECK_THROWS_WITH(attention(other_type, h.K, 1, 0), ContainsSubstring("expected f32 or e4m3"));
    CHECK_THROWS_WITH(attention(step, 3, 1, 0), ContainsSubstring("not a multiple of K = 3"));
    CHECK_THROWS_WITH(attention(step, h.K, -1, 0), ContainsSubstring("scale is -1"));
    CHECK_THROWS_WITH(attention(step, h.K, 1, -1), ContainsSubstring("window is -1"));
}
