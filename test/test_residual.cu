// test/test_residual.cu: the addition of a branch to the residual stream against float64, at odd sizes.
#include "layers/layers.h"
#include "reference.h"

TEST_CASE("residual_add rounds the exact sum once", "[residual][counted]") {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
        for (const int64_t C : {8, 24, 768}) {
            const int64_t N = 7;
            const auto x = rounded(random_values(N * C, 1), dtype), b = rounded(random_values(N * C, 2), dtype);
            Buffer inp(dtype, {N, C}, x), branch(dtype, {N, C}, b), out(dtype, {N, C});
            residual_add(out, inp, branch, device().stream);
            std::vector<double> sum(x.size());
            for (size_t i = 0; i < sum.size(); ++i) sum[i] = x[i] + b[i];
            // Float32 rounds the sum and a 16-bit type rounds it again; f16 may be subnormal: half of its smallest
            // step.
            check_close(out.values(), sum, unit_roundoff(dtype) + 0x1p-24, 0x1p-25, concat("residual_add, C = ", C));
            residual_add(inp, inp, branch, device().stream);  // in place
            CHECK(inp.bits() == out.bits());
        }
    Buffer small(DType::f32, {2, 8}), wide(DType::f32, {2, 9});
    CHECK_THROWS_WITH(residual_add(small, small, wide, device().stream), ContainsSubstring("branch"));
}
