// core/random.cu: uniform and normal numbers, made from Philox (core.h).
#include "core/core.h"

#include <cmath>

double uniform(uint64_t seed, uint64_t key, uint64_t counter) {
    const Philox r = philox(seed, key, counter);
    const uint64_t bits = (uint64_t{r.v[0]} << 32 | r.v[1]) >> 11;
    return static_cast<double>(bits) * 0x1p-53;
}

uint64_t uniform_below(uint64_t seed, uint64_t key, uint64_t counter, uint64_t n) {
    check(n > 0, "uniform_below: n must be positive");
    const Philox r = philox(seed, key, counter);
    const uint64_t bits = uint64_t{r.v[0]} << 32 | r.v[1];
    return static_cast<uint64_t>(static_cast<unsigned __int128>(bits) * n >> 64);
}

// Box-Muller: two uniforms give two normals; one draw of 128 bits serves the elements 2i and 2i + 1.
std::vector<float> normal_values(int64_t n, double std, uint64_t seed, uint64_t key) {
    std::vector<float> values(static_cast<size_t>(n));
#pragma omp parallel for
    for (int64_t pair = 0; pair < (n + 1) / 2; ++pair) {
        const Philox r = philox(seed, key, static_cast<uint64_t>(pair));
        const double u1 = (static_cast<double>((uint64_t{r.v[0]} << 32 | r.v[1]) >> 11) + 1.0) * 0x1p-53;  // in (0, 1]
        const double u2 = static_cast<double>((uint64_t{r.v[2]} << 32 | r.v[3]) >> 11) * 0x1p-53;
        const double radius = std * std::sqrt(-2.0 * std::log(u1)), angle = 2.0 * 3.14159265358979323846 * u2;
        values[static_cast<size_t>(2 * pair)] = static_cast<float>(radius * std::cos(angle));
        if (2 * pair + 1 < n) values[static_cast<size_t>(2 * pair + 1)] = static_cast<float>(radius * std::sin(angle));
    }
    return values;
}

void fill_normal(const Tensor& tensor, double std, uint64_t seed, uint64_t key) {
    from_floats(tensor, normal_values(tensor.n(), std, seed, key));
}

void fill_constant(const Tensor& tensor, float value) {
    from_floats(tensor, std::vector<float>(static_cast<size_t>(tensor.n()), value));
}

uint64_t hash_name(const std::string& name) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3u;
    return hash;
}
