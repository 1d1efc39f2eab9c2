// core/random.cu: Philox4x32-10, a counter-based random number generator.
//
// Ten rounds of  (L, R) -> (hi(M0 R0) ^ L1 ^ k0, lo(M0 R0), ...)  turn a 128-bit counter under a 64-bit key into 128 random
// bits. The key is the seed; the counter is (counter, key): "which number of which parameter".   (Salmon et al. 2011)
#include "core/core.h"

#include <cmath>

Philox philox(uint64_t seed, uint64_t key, uint64_t counter) {
    uint32_t c[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), static_cast<uint32_t>(key),
                     static_cast<uint32_t>(key >> 32)};
    uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
        for (int i = 0; i < 4; ++i) c[i] = next[i];
        k[0] += 0x9E3779B9u;  // Weyl sequence: the golden ratio
        k[1] += 0xBB67AE85u;  // sqrt(3) - 1
    }
    return {{c[0], c[1], c[2], c[3]}};
}

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
void fill_normal(const Tensor& tensor, double std, uint64_t seed, uint64_t key) {
    std::vector<float> values(static_cast<size_t>(tensor.n()));
#pragma omp parallel for
    for (int64_t pair = 0; pair < (tensor.n() + 1) / 2; ++pair) {
        const Philox r = philox(seed, key, static_cast<uint64_t>(pair));
        const double u1 = (static_cast<double>((uint64_t{r.v[0]} << 32 | r.v[1]) >> 11) + 1.0) * 0x1p-53;  // in (0, 1]
        const double u2 = static_cast<double>((uint64_t{r.v[2]} << 32 | r.v[3]) >> 11) * 0x1p-53;
        const double radius = std * std::sqrt(-2.0 * std::log(u1)), angle = 2.0 * 3.14159265358979323846 * u2;
        values[static_cast<size_t>(2 * pair)] = static_cast<float>(radius * std::cos(angle));
        if (2 * pair + 1 < tensor.n()) values[static_cast<size_t>(2 * pair + 1)] = static_cast<float>(radius * std::sin(angle));
    }
    from_floats(tensor, values);
}

void fill_constant(const Tensor& tensor, float value) {
    from_floats(tensor, std::vector<float>(static_cast<size_t>(tensor.n()), value));
}

uint64_t hash_name(const std::string& name) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3u;
    return hash;
}
