// dev/fill.cuh: kernels that fill tensors of billions of elements with random data on the device, because the host
// would need minutes. Element i is a function of (key, i). Launch them over (n + 1) / 2 and over n threads.
#pragma once

#include "core/kernel.cuh"

namespace {

// x[i] = scale normal(0, 1): Box-Muller on Philox. A thread makes the two numbers of a pair.
template <class T>
__global__ void fill_normal_kernel(T* x, int64_t n, float scale, uint64_t key) {
    const int64_t pair = global_thread();
    if (2 * pair >= n) return;
    const Philox r = philox(20261121, key, static_cast<uint64_t>(pair));
    const float u1 = (static_cast<float>(r.v[0] >> 8) + 1.0f) * 0x1p-24f;  // in (0, 1]
    const float u2 = static_cast<float>(r.v[1] >> 8) * 0x1p-24f;
    const float radius = scale * sqrtf(-2.0f * logf(u1)), angle = 6.2831853f * u2;
    x[2 * pair] = from_float<T>(radius * cosf(angle));
    if (2 * pair + 1 < n) x[2 * pair + 1] = from_float<T>(radius * sinf(angle));
}

// x[i] = below u^power, u uniform in [0, 1): with a power of 1 all ids are as frequent; with 4 one of 50,000 is 7 % of
// all tokens, about as frequent as the most frequent word of a language.
__global__ void fill_tokens_kernel(int32_t* x, int64_t n, int below, int power, uint64_t key) {
    const int64_t i = global_thread();
    if (i >= n) return;
    const float u = static_cast<float>(philox(20261121, key, static_cast<uint64_t>(i)).v[0] >> 8) * 0x1p-24f;
    float share = u;
    for (int k = 1; k < power; ++k) share *= u;
    x[i] = min(static_cast<int32_t>(share * static_cast<float>(below)), below - 1);
}

}  // namespace
