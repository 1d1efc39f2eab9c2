// test/norms.cuh: what the tests of LayerNorm and RMSNorm have in common.
#pragma once

#include "layers/layers.h"
#include "layers/norm.cuh"
#include "reference.h"

#include <utility>

namespace {

using Values = std::vector<double>;
constexpr float kEps = 1e-5f;

size_t at(int64_t n, int64_t c, int64_t C) { return static_cast<size_t>(n * C + c); }

// One element; rows that are no whole chunks of 4, 8 or 32; rows of several threads on the GPU (from 17 columns on) and
// on the CPU (from 2049 on), there of a warp with 24 or 32 columns a thread (from 513 on) and of a whole block (from
// 1025 on), and the widest. Row counts that leave warps and blocks part empty, and more rows than the backward's blocks
// and threads have at a time.
struct Size {
    int64_t N, C;
};
const Size kSizes[] = {{1, 1},    {3, 3},   {33, 33},  {37, 48},  {7, 100},  {2, 127},  {5, 129},  {70, 40},
                       {13, 768}, {5, 701}, {6, 1000}, {3, 1030}, {5, 1032}, {9, 2052}, {2, 8192}, {4300, 24}};

// Runs a test with the threads a row that this device chooses, then with those of a GPU.
template <class F>
void with_both_geometries(F&& test) {
    test("");
    if (!kOnCpu) return;
    const int64_t before = std::exchange(norm_row_columns, 16);
    test(", 16 columns a thread");
    norm_row_columns = before;
}

}  // namespace
