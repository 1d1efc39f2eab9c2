// Linear: y = x W^T + b, three matrix products a training step.
//
//   forward     out (N, O)     =  inp (N, C)     weight^T (C, O)  + bias
//   backward    dinp (N, C)    =  dout (N, O)    weight (O, C)
//               dweight (O, C) += dout^T (O, N)  inp (N, C)
//               dbias (O)      += sum over rows of dout
//
// As plain loops:
//
//   for n < N, o < O:  out[n][o] = bias[o];  for c < C:  out[n][o] += inp[n][c] * weight[o][c]
//   for n < N, c < C:  dinp[n][c] = 0;       for o < O:  dinp[n][c] += dout[n][o] * weight[o][c]
//   for o < O, c < C:  for n < N:  dweight[o][c] += dout[n][o] * inp[n][c]
//
// Each product takes 2 N O C flops, so the backward takes twice as many as the forward. That is 6 flops for each weight
// and token: the 6 N D of the papers on scaling laws (their N is the number of parameters, their D of tokens). The
// weight is stored (O, C), as PyTorch stores it; no product needs a transposed copy, because matmul reads either way.
// The bias is added by the forward product before it stores its result, GELU is applied there, and its derivative by
// the product of the backward; the bias' gradient is summed by the product that reads dout anyway.
// (layers/matmul_plan.cu: where cuBLASLt can, and by kernels of their own elsewhere.) The two gradients are two
// functions: the layer below needs dinp at once, while dweight is needed only by the optimizer, so pipeline schedules
// compute it at times when a rank would otherwise be idle.
#include "layers/layers.h"

constexpr int64_t kSumsGrain = 64;  // floats: scratch begins on 256 bytes, and so does what is behind the sums

static void check_forward(const char* name, Tensor out, Tensor inp, Tensor weight, Tensor bias) {
    expect(name, "inp", inp, inp.dtype, {-1, -1});
    const int64_t N = inp.shape[0], C = inp.shape[1];
    expect(name, "weight", weight, inp.dtype, {-1, C});
    const int64_t O = weight.shape[0];
    expect(name, "out", out, inp.dtype, {N, O});
    if (bias) expect(name, "bias", bias, inp.dtype, {O});
}
static void check_backward_input(const char* name, const char* dinp_name, Tensor dinp, Tensor dout, Tensor weight) {
    expect(name, "dout", dout, dout.dtype, {-1, -1});
    const int64_t N = dout.shape[0], O = dout.shape[1];
    expect(name, "weight", weight, dout.dtype, {O, -1});
    expect(name, dinp_name, dinp, dout.dtype, {N, weight.shape[1]});
}

void linear_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, cudaStream_t stream) {
    check_forward("linear_forward", out, inp, weight, bias);
    matmul(out, inp, weight, {.transpose_b = true, .bias = bias}, stream);
}

void linear_backward_input(Tensor dinp, Tensor dout, Tensor weight, bool accumulate, cudaStream_t stream) {
    check_backward_input("linear_backward_input", "dinp", dinp, dout, weight);
    matmul(dinp, dout, weight, {.beta = accumulate ? 1.0f : 0.0f}, stream);
}

void linear_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor inp, bool accumulate, Tensor scratch,
                            cudaStream_t stream) {
    const char* name = "linear_backward_weight";
    expect(name, "dout", dout, inp.dtype, {-1, -1});
    const int64_t N = dout.shape[0], O = dout.shape[1];
    expect(name, "inp", inp, dout.dtype, {N, -1});
    expect(name, "dweight", dweight, dweight.dtype == DType::f32 ? DType::f32 : dout.dtype, {O, inp.shape[1]});
    if (dbias) expect(name, "dbias", dbias, dbias.dtype == DType::f32 ? DType::f32 : dout.dtype, {O});
    MatmulOptions options{.transpose_a = true, .beta = accumulate ? 1.0f : 0.0f};
    const bool one_dtype = dbias.dtype == dweight.dtype, rounds_twice = accumulate && dbias.dtype != DType::f32;
    if (!dbias || !one_dtype || rounds_twice) {
        if (dbias) scratch_as(name, scratch, {column_sum_scratch_n(N, O)});  // before dweight is written
        matmul(dweight, dout, inp, options, stream);
        if (dbias) column_sum(dbias, dout, accumulate, scratch, stream);
        return;
    }
    // The product sums dout, which it reads anyway: to dbias, or to scratch, from where they are added to dbias.
    const Tensor all = scratch_as(name, scratch, {linear_backward_scratch_n(N, O)});
    const int64_t sums_n = round_up(O, kSumsGrain);
    options.a_row_sums = accumulate ? all.slice(0, O) : dbias;
    options.scratch = all.slice(sums_n, all.n() - sums_n);
    matmul(dweight, dout, inp, options, stream);
    if (accumulate) column_sum(dbias, options.a_row_sums.view({1, O}), true, options.scratch, stream);
}

void linear_gelu_forward(Tensor out, Tensor before, Tensor inp, Tensor weight, Tensor bias, cudaStream_t stream) {
    check_forward("linear_gelu_forward", out, inp, weight, bias);
    expect("linear_gelu_forward", "before", before, inp.dtype, {out.shape[0], out.shape[1]});
    matmul(out, inp, weight, {.transpose_b = true, .bias = bias, .before_gelu = before}, stream);
}

void linear_gelu_backward_input(Tensor dbefore, Tensor dout, Tensor weight, Tensor before, cudaStream_t stream) {
    const char* name = "linear_gelu_backward_input";
    check_backward_input(name, "dbefore", dbefore, dout, weight);
    expect(name, "before", before, dout.dtype, {dbefore.shape[0], dbefore.shape[1]});
    matmul(dbefore, dout, weight, {.gelu_input = before}, stream);
}

void linear_delta_backward_input(Tensor dattended, const FlashDelta& delta, Tensor dout, Tensor weight, Tensor attended,
                                 cudaStream_t stream) {
    const char* name = "linear_delta_backward_input";
    check_backward_input(name, "dattended", dattended, dout, weight);
    expect(name, "attended", attended, dout.dtype, {dattended.shape[0], dattended.shape[1]});
    matmul(dattended, dout, weight, {.attended = attended, .delta = delta.delta, .zeros = delta.zeros}, stream);
}

int64_t linear_backward_scratch_n(int64_t N, int64_t O) { return round_up(O, kSumsGrain) + column_sum_scratch_n(N, O); }
