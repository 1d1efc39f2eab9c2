// layers/softmax.cuh: the maximum and the sum of exponentials of a row, in one pass over it.
//                                                                     (Milakov & Gimelshein 2018, arXiv:1805.02867)
//   softmax(x)_i = exp(x_i - m) / s,      m = max_i x_i,      s = sum_i exp(x_i - m)
//
// As plain loops, two passes:      for i: m = max(m, x[i])          for i: s += exp(x[i] - m)
//
// Subtracting m keeps every exponential in [0, 1], whatever the size of x. One pass is enough: when a new maximum m'
// arrives, the sum so far only has to be scaled, sum exp(x - m') = s exp(m - m'). So
//
//   add x:     d = x - m,  e = exp(-|d|)        d > 0: m = x, s = s e + 1        d <= 0: s = s + e
//
// which is one exponential per element and no branch. Two partial results are joined the same way: m = max(m1, m2),
// s = s1 exp(m1 - m) + s2 exp(m2 - m).
#pragma once

#include "layers/chunk.cuh"

#include <cfloat>

namespace {

// m is never NaN, so a comparison will do; it vectorises, which fmaxf with its rule for NaN does not.
struct Larger {
    __device__ __forceinline__ static float of(float a, float b) { return a > b ? a : b; }
};

// One running (m, s) for each element of a chunk, so that the loop below has no dependence between its rounds.
template <int n>
struct OnlineSoftmax {
    float m[n], s[n];

    // m starts at the lowest finite number, not at -infinity: x = -infinity (a masked place) then has d = -infinity and
    // adds exp(-infinity) = 0, where -infinity minus itself would be NaN. NaN in x makes s NaN.
    __device__ __forceinline__ OnlineSoftmax() {
        for (int l = 0; l < n; ++l) {
            m[l] = -FLT_MAX;
            s[l] = 0.0f;
        }
    }

    __device__ __forceinline__ void add(const float (&x)[n]) {
        for (int l = 0; l < n; ++l) {
            const float d = x[l] - m[l], e = __expf(-fabsf(d));
            s[l] = d > 0.0f ? s[l] * e + 1.0f : s[l] + e;
            m[l] = d > 0.0f ? x[l] : m[l];
        }
    }

    // Joins the n pairs into one. Destroys them.
    __device__ __forceinline__ void join(float& max, float& sum) {
        max = fold_chunk<Larger>(m);
        for (int l = 0; l < n; ++l) s[l] *= __expf(m[l] - max);
        sum = fold_chunk<Sum>(s);
    }
};

struct SoftmaxStatistics {
    float max, sum;
};

// The statistics of the first n_valid numbers of a row, by the team of threads that shares it (layers/chunk.cuh); each
// thread gets the result. load(x, i) gives a thread its chunk of the columns from i on. scratch: shared, 64 floats.
// Each half is used once, so no barrier stands between the two.
template <int n, class Load>
__device__ __forceinline__ SoftmaxStatistics softmax_statistics(const Load& load, int n_valid, float* scratch) {
    float max = -FLT_MAX, sum = 0.0f;
    const int first = static_cast<int>(threadIdx.x) * n, stride = static_cast<int>(blockDim.x) * n;
    if (first < n_valid) {
        OnlineSoftmax<n> online;
        float x[n];
        int i = first;
        for (; i + n <= n_valid; i += stride) {
            load(x, i);
            online.add(x);
        }
        if (i < n_valid) {  // a chunk that is valid in part: the last one
            load(x, i);
            for (int l = 0; l < n; ++l) x[l] = i + l < n_valid ? x[l] : -INFINITY;
            online.add(x);
        }
        online.join(max, sum);
    }
    const float row_max = team_reduce<Max>(max, scratch);
    return {row_max, team_reduce<Sum>(sum * __expf(max - row_max), scratch + kWarp)};
}
// Of a row of row_n numbers in memory.
template <int n, class T>
__device__ __forceinline__ SoftmaxStatistics softmax_statistics(const T* row, int n_valid, int row_n, float* scratch) {
    return softmax_statistics<n>([&](float(&x)[n], int i) { load_chunk(x, row + i, row_n - i); }, n_valid, scratch);
}

}  // namespace
