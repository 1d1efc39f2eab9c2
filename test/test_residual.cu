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
    Buffer small(DType::f32, {2, 8}), wide(DType::f32, {2, 9}), flat(DType::f32, {16});
    const cudaStream_t stream = device().stream;
    CHECK_THROWS_WITH(residual_add(small, small, wide, stream), ContainsSubstring("residual_add: branch"));
    CHECK_THROWS_WITH(residual_add(wide, small, small, stream), ContainsSubstring("residual_add: out"));
    CHECK_THROWS_WITH(residual_add(flat, flat, flat, stream), ContainsSubstring("residual_add: inp"));
    const Tensor shifted = make_tensor(static_cast<char*>(small.tensor().data) + 4, DType::f32, {1, 8});
    const Tensor row = small.tensor().slice(0, 1);
    CHECK_THROWS_WITH(residual_add(row, row, shifted, stream), ContainsSubstring("residual_add: branch starts at"));
}

TEST_CASE("operations on no rows do nothing", "[residual][gelu][swiglu][cross_entropy][heads]") {
    Buffer memory(DType::f32, {64}), integers(DType::i32, {4});
    const cudaStream_t s = device().stream;
    const auto none = [&](std::initializer_list<int64_t> dims) {
        return make_tensor(memory.tensor().data, DType::f32, dims);
    };
    const Tensor rows = none({0, 16}), half = none({0, 8}), losses = none({0}), sums = none({0, 2}),
                 targets = make_tensor(integers.tensor().data, DType::i32, {0});
    const HeadColumns head{none({1, 0, 16}), 1, 16}, part{none({1, 0, 8}), 1, 8};
    const Tensor lse = none({1, 1, 0}), table = none({4, 16});
    residual_add(rows, rows, rows, s);
    gelu_forward(rows, rows, s), gelu_backward(rows, rows, rows, s);
    swiglu_forward(half, rows, s), swiglu_backward(rows, half, rows, s);
    cross_entropy_forward(losses, rows, targets, 16, s);
    cross_entropy_forward_backward(losses, rows, targets, 16, 1.0f, s);
    cross_entropy_parts(losses, sums, rows, targets, 0, 16, s);
    cross_entropy_rescale(sums, losses, losses, s);
    cross_entropy_finish(losses, rows, targets, losses, sums, 0, 16, 1.0f, s);
    copy_heads(head, head, s), add_heads(head, head, s);
    rope_forward(head, RopePairs::halves, {}, table, s);
    latent_keys_forward(head, part, part, s), latent_keys_backward(part, part, head, s);
    flash_delta({lse, {}}, head, head, s);
    merge_attention(head, lse, head, lse, s);
    cudaCheck(cudaStreamSynchronize(s));
}
