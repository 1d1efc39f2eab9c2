// test/test_latent_keys.cu: MLA's keys, put together and taken apart, against loops.
#include "layers/layers.h"
#include "reference.h"

namespace {

using Values = std::vector<double>;

struct Size {
    int64_t B, T, H, Dn, Dr, gap;  // gap: columns behind each head's own part, as the values stand there
};
// Chunks are 4 or 8 columns on the GPU and 32 on the CPU: parts below, at and above them, and odd ones.
const Size kSizes[] = {
    {1, 1, 1, 4, 2, 0}, {2, 3, 3, 16, 8, 16}, {1, 5, 5, 7, 3, 5}, {2, 2, 2, 128, 64, 128}, {3, 1, 4, 33, 32, 1}};

}  // namespace

TEST_CASE("latent keys: forward copies, backward copies and sums over heads", "[latent]") {
    for (DType dtype : kFloatDTypes)
        for (const auto& [B, T, H, Dn, Dr, gap] : kSizes) {
            const int64_t N = B * T, D = Dn + Dr, stride = Dn + gap, kv = H * stride, row = 16 + Dr;
            const Values own = rounded(random_values(N * kv, 1), dtype),
                         shared = rounded(random_values(N * row, 2), dtype),
                         dk = rounded(random_values(N * H * D, 3), dtype);
            Buffer own_rows(dtype, {B, T, kv}, own), shared_rows(dtype, {B, T, row}, shared),
                keys(dtype, {B, T, H * D});
            Buffer down_rows(dtype, {B, T, kv}, own), dshared_rows(dtype, {B, T, row}, shared),
                dkeys(dtype, {B, T, H * D}, dk);
            latent_keys_forward({keys, H, D}, {own_rows, H, Dn, 0, stride}, {shared_rows, 1, Dr, 16}, device().stream);
            latent_keys_backward({down_rows, H, Dn, 0, stride}, {dshared_rows, 1, Dr, 16}, {dkeys, H, D},
                                 device().stream);
            Values k, down = own, dshared = shared;  // what is not written stays
            for (int64_t n = 0; n < N; ++n)
                for (int64_t h = 0; h < H; ++h)
                    for (int64_t d = 0; d < D; ++d) {
                        const size_t mine = static_cast<size_t>(n * kv + h * stride + d),
                                     theirs = static_cast<size_t>(n * row + 16 + d - Dn);
                        const double gradient = dk[static_cast<size_t>((n * H + h) * D + d)];
                        k.push_back(d < Dn ? own[mine] : shared[theirs]);
                        if (d < Dn) down[mine] = gradient;
                        else dshared[theirs] = (h == 0 ? 0 : dshared[theirs]) + gradient;
                    }
            CHECK(keys.values() == k);
            CHECK(down_rows.values() == down);
            // A sum of H numbers, in float32, rounded once.
            check_close(dshared_rows.values(), dshared, unit_roundoff(dtype),
                        sum_error(H) * std::sqrt(static_cast<double>(H)) * 4,
                        concat("dshared, ", dtype_name(dtype), ", H ", H, ", Dr ", Dr));
        }
}

TEST_CASE("latent keys say what is wrong with their arguments", "[latent][errors]") {
    Buffer keys(DType::f32, {1, 2, 48}), own(DType::f32, {1, 2, 48}), shared(DType::f32, {1, 2, 24}),
        other(DType::f32, {1, 3, 24});
    const auto s = device().stream;
    CHECK_THROWS_WITH(latent_keys_forward({keys, 2, 20}, {own, 2, 16}, {shared, 1, 8}, s),
                      ContainsSubstring("latent_keys_forward: keys has 2 heads of 20 columns, expected 2 of 24"));
    CHECK_THROWS_WITH(latent_keys_forward({keys, 2, 24}, {own, 3, 16}, {shared, 1, 8}, s),
                      ContainsSubstring("own has 3 heads"));
    CHECK_THROWS_WITH(latent_keys_forward({keys, 2, 24}, {own, 2, 16}, {shared, 2, 8}, s),
                      ContainsSubstring("shared has 2 heads"));
    CHECK_THROWS_WITH(latent_keys_forward({keys, 2, 24}, {own, 2, 16}, {other, 1, 8}, s),
                      ContainsSubstring("latent_keys_forward: shared is"));
    CHECK_THROWS_WITH(
        latent_keys_backward({own, 2, 16, 20}, {shared, 1, 8}, {keys, 2, 24}, s),
        ContainsSubstring("down's 2 heads of 16 columns, 16 apart, from column 20 on, are not inside of 48"));
}
