// test/test_paged_attention.cu: attention over a cache in pages gives the bits of flash attention over whole sequences,
// and what is in the pages is what rope gives.
#include "layers/layers.h"
#include "reference.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace {

using Values = std::vector<double>;
using Integers = std::vector<int32_t>;

// A step in which whole sequences are new, cut into chunks, with pages anywhere in a pool that is full of NaN.
struct Step {
    Integers positions, page_table, chunks, rows;
    int64_t N = 0, n_pages = 0, table_columns = 0, page_size;
    std::vector<int64_t> lengths;

    // chunk_rows are used in turn: {5, 1}: 5 rows, 1 row, 5 rows, ...
    Step(std::vector<int64_t> its_lengths, int64_t its_page_size, const std::vector<int64_t>& chunk_rows)
        : page_size(its_page_size), lengths(std::move(its_lengths)) {
        for (int64_t length : lengths) {
            N += length;
            n_pages += ceil_div(length, page_size);
            table_columns = std::max(table_columns, ceil_div(length, page_size));
        }
        n_pages += 3;  // pages of nobody
        Integers pages(static_cast<size_t>(n_pages));
        std::iota(pages.begin(), pages.end(), 0);
        std::shuffle(pages.begin(), pages.end(), std::mt19937_64(7));
        int64_t first = 0;
        for (int64_t i = 0; i < static_cast<int64_t>(lengths.size()); ++i) {
            Integers its_pages(static_cast<size_t>(table_columns), -1);
            for (int64_t s = 0; s < lengths[i]; ++s) {
                int32_t& page = its_pages[static_cast<size_t>(s / page_size)];
                if (page < 0) page = pages.back(), pages.pop_back();
                rows.push_back(static_cast<int32_t>(page * page_size + s % page_size));
                positions.push_back(static_cast<int32_t>(s));
            }
            page_table.insert(page_table.end(), its_pages.begin(), its_pages.end());
            int64_t n = 0;
            for (int64_t s = 0, c = 0; s < lengths[i]; s += n, ++c) {
                n = std::min(chunk_rows[static_cast<size_t>(c) % chunk_rows.size()], lengths[i] - s);
                for (int64_t x : {first + s, n, i, s}) chunks.push_back(static_cast<int32_t>(x));
            }
            first += lengths[i];
        }
    }
};

// Its tensors on the device.
struct DeviceStep {
    Buffer pool, scales, page_table, chunks, rows, positions;
    DeviceStep(const Step& s, DType dtype, int64_t width, int64_t heads)
        : pool(dtype, {s.n_pages, s.page_size, width}), scales(DType::f32, {s.n_pages, s.page_size, heads}),
          page_table(DType::i32, {static_cast<int64_t>(s.lengths.size()), s.table_columns}),
          chunks(DType::i32, {static_cast<int64_t>(s.chunks.size()) / 4, 4}), rows(DType::i32, {s.N}),
          positions(DType::i32, {1, s.N}) {
        page_table.set_integers(s.page_table), chunks.set_integers(s.chunks), rows.set_integers(s.rows);
        positions.set_integers(s.positions);
        cudaCheck(cudaMemset(pool.tensor().data, 0xff, pool.tensor().bytes()));  // NaN
        cudaCheck(cudaMemset(scales.tensor().data, 0xff, scales.tensor().bytes()));
    }
    operator PagedStep() const { return {pool, scales, page_table, chunks, rows}; }
};

struct Heads {
    int64_t H, K, D;
    int64_t width() const { return (H + 2 * K) * D; }
};

// Rows first ... first + T - 1 of values (N, width).
Values some_rows(const Values& values, int64_t first, int64_t T, int64_t width) {
    return Values(values.begin() + first * width, values.begin() + (first + T) * width);
}

// flash_attention_forward on CUDA cores, of one sequence.
std::vector<unsigned char> flash(const Values& qkv, DType dtype, int64_t T, const Heads& h, float scale,
                                 int64_t window) {
    Buffer rows(dtype, {1, T, h.width()}, qkv), out(dtype, {1, T, h.H * h.D}), lse(DType::f32, {1, h.H, T});
    const QkvHeads heads = qkv_heads(rows, h.H, h.K);
    flash_attention_forward({out, h.H, h.D}, lse, heads.q, heads.k, heads.v,
                            {.scale = scale, .window = window, .tier = FlashTier::cuda_cores}, device().stream);
    return out.bits();
}

std::vector<unsigned char> paged(const Values& qkv, DType dtype, const Step& s, const Heads& h, float scale,
                                 int64_t window, DType pool_dtype) {
    Buffer rows(dtype, {1, s.N, h.width()}, qkv), out(dtype, {1, s.N, h.H * h.D});
    const QkvHeads heads = qkv_heads(rows, h.H, h.K);
    DeviceStep step(s, pool_dtype, 2 * h.K * h.D, 2 * h.K);
    const int64_t scratch_n = paged_attention_scratch_n(s.N, h.H, h.D, s.table_columns * s.page_size);
    Buffer scratch(DType::f32, {std::max<int64_t>(1, scratch_n)});
    paged_write(step, heads.q, heads.k, heads.v, RopePairs::halves, {}, {}, device().stream);
    paged_attention_forward({out, h.H, h.D}, heads.q, h.K, step, scale, window, scratch, device().stream);
    return out.bits();
}

}  // namespace

TEST_CASE("attention over pages has the bits of flash attention", "[paged]") {
    struct Case {
        std::vector<int64_t> lengths;
        int64_t page_size;
        std::vector<int64_t> chunk_rows;
        Heads heads;
        int64_t window;
    };
    const Case cases[] = {{{1, 70, 33}, 1, {1}, {3, 3, 8}, 0},        {{131, 5, 64}, 16, {5}, {4, 1, 64}, 0},
                          {{40, 150}, 17, {32}, {6, 2, 32}, 0},       {{129, 65}, 16, {32, 1, 5}, {4, 4, 80}, 0},
                          {{66, 31, 2}, 17, {32, 1}, {8, 2, 128}, 0}, {{130}, 16, {7}, {3, 1, 192}, 0},
                          {{150, 20}, 16, {32, 1}, {4, 2, 64}, 9},    {{140}, 17, {1, 9}, {2, 2, 24}, 65}};
    for (DType dtype : kFloatDTypes) {
        if (dtype != DType::f32 && !device().is_cpu) continue;
        for (const Case& c : cases) {
            const Step step(c.lengths, c.page_size, c.chunk_rows);
            const float scale = 1 / std::sqrt(static_cast<float>(c.heads.D));
            const Values qkv = random_values(step.N * c.heads.width(), 1, 1.5);
            const auto actual = paged(qkv, dtype, step, c.heads, scale, c.window, dtype);
            std::vector<unsigned char> expected;
            int64_t first = 0;
            for (int64_t T : c.lengths) {
                const auto its = flash(some_rows(qkv, first, T, c.heads.width()), dtype, T, c.heads, scale, c.window);
                expected.insert(expected.end(), its.begin(), its.end());
                first += T;
            }
            INFO(dtype_name(dtype) << ", pages of " << c.page_size << ", D = " << c.heads.D << ", window " << c.window);
            CHECK(actual == expected);
        }
    }
}
