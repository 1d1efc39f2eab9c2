// test/paged_step.h: steps over a cache in pages, for the tests of its kernels.
#pragma once

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
        for (const Tensor& tensor : {pool.tensor(), scales.tensor()})  // NaN
            cudaCheck(cudaMemsetAsync(tensor.data, 0xff, tensor.bytes(), device().stream));
    }
    operator PagedStep() const { return {pool, scales, page_table, chunks, rows}; }
};

// Rows first ... first + T - 1 of values (N, width).
inline Values some_rows(const Values& values, int64_t first, int64_t T, int64_t width) {
    return Values(values.begin() + first * width, values.begin() + (first + T) * width);
}

}  // namespace
