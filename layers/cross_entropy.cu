// Softmax cross-entropy: minus the log of the probability that the model gave to the token that came next, in nats.
//
//   forward     loss_n = -log p_n[target_n],       p_n = softmax(x_n) = exp(x_n - m_n) / s_n      x: logits (N, Vp)
//                      = log(s_n) + (m_n - x_n[target_n])
//   backward    dx_n[v] = (p_n[v] - [v == target_n]) dloss
//
// As plain loops, for each row x:
//
//   m = max(x);  s = 0;  for v < V:  s += exp(x[v] - m)
//   loss = log(s) + m - x[target]
//   for v < V:  x[v] = (exp(x[v] - m) / s - (v == target)) * dloss
//
// The logits are the largest tensor of a training step: 8 x 1024 x 50304 float32 numbers are 1.6 GB. So the gradient
// overwrites them: a row is read once for m and s (layers/softmax.cuh), and once more to turn each x into dx. There is
// no second buffer, and no probabilities are ever stored.
//
// Vp >= V: the columns from V on only pad the rows to a size for which matrix products are fast. They are no tokens:
// they are left out of the sum, and their gradient is zero. Rows with a negative target (padding, prompts) have loss 0
// and gradient 0.
#include "layers/layers.h"
#include "layers/softmax.cuh"

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Kernel: one team of threads per row (layers/chunk.cuh). kBackward: the gradient takes the place of the logits.

template <class T, int kN, bool kBackward>
__global__ void cross_entropy_kernel(float* losses, T* logits, const int* targets, int64_t N, int V, int Vp,
                                     float dloss) {
    __shared__ float scratch[2 * kWarp];
    const int64_t row = team_row();
    if (row >= N) return;  // a whole team; a block of several teams has no barrier that this one could miss
    T* x_row = logits + row * Vp;
    const int first = static_cast<int>(threadIdx.x) * kN, stride = static_cast<int>(blockDim.x) * kN;
    const int target = targets[row];

    if (target < 0) {  // ignored; the whole team agrees
        if (threadIdx.x == 0) losses[row] = 0.0f;
        for (int v = first; kBackward && v < Vp; v += stride) store_zeros<kN>(x_row + v, Vp - v);
        return;
    }

    const SoftmaxStatistics softmax = softmax_statistics<kN>(x_row, V, Vp, scratch);
    // The thread that will overwrite the target's logit is the one that reads it: so no barrier is needed in between. A
    // target beyond the vocabulary has no logit: its loss is NaN, and the training loop stops at that.
    if (target / kN % static_cast<int>(blockDim.x) == static_cast<int>(threadIdx.x))
        losses[row] = target < V ? logf(softmax.sum) + (softmax.max - to_float(x_row[target])) : NAN;

    if (!kBackward) return;
    const float scale = dloss / softmax.sum;
    for (int v = first; v < Vp; v += stride) {
        float x[kN];
        load_chunk(x, x_row + v, Vp - v);
        for (int l = 0; l < kN; ++l) {
            const float gradient = __expf(x[l] - softmax.max) * scale - (v + l == target ? dloss : 0.0f);
            x[l] = v + l < V ? gradient : 0.0f;
        }
        store_chunk(x_row + v, x, Vp - v);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

template <bool kBackward>
void launch(const char* operation, Tensor losses, Tensor logits, Tensor targets, int64_t V, float dloss,
            cudaStream_t stream) {
    expect(operation, "logits", logits, logits.dtype, {-1, -1});
    const int64_t N = logits.shape[0], Vp = logits.shape[1];
    check(V > 0 && V <= Vp, operation, ": V = ", V, " tokens do not fit in logits ", logits);
    expect(operation, "losses", losses, DType::f32, {N});
    expect(operation, "targets", targets, DType::i32, {N});
    expect_aligned(operation, {{"logits", logits}});
    const int n_tokens = narrow(V, "vocabulary"), n_columns = narrow(Vp, "columns of logits");
    dispatch_chunks(logits.dtype, Vp, [&](auto chunk) {
        using T = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const RowTeams teams = row_teams(N, V, kN);
        cross_entropy_kernel<T, kN, kBackward><<<teams.grid, teams.block, 0, stream>>>(
            losses.ptr<float>(), logits.ptr<T>(), targets.ptr<int>(), N, n_tokens, n_columns, dloss);
        cudaCheckLaunch();
    });
}

constexpr int kSumThreads = 256;

// One block: thread t adds losses t, t + 256, ...; thread 0 adds up the threads.
__global__ void __launch_bounds__(kSumThreads) add_losses_kernel(float* sum, const float* losses, int64_t n) {
    __shared__ double shared[kSumThreads];
    double mine = 0;
    for (int64_t i = threadIdx.x; i < n; i += kSumThreads) mine += losses[i];
    shared[threadIdx.x] = mine;
    __syncthreads();  // all values have been written
    if (threadIdx.x > 0) return;
    double total = static_cast<double>(sum[0]) + sum[1];
    for (int i = 0; i < kSumThreads; ++i) total += shared[i];
    sum[0] = static_cast<float>(total);
    sum[1] = sum[0] - sum[0] == 0 ? static_cast<float>(total - sum[0]) : 0.0f;  // inf and NaN leave nothing over
}

}  // namespace

void cross_entropy_forward(Tensor losses, Tensor logits, Tensor targets, int64_t V, cudaStream_t stream) {
    launch<false>("cross_entropy_forward", losses, logits, targets, V, 0.0f, stream);
}

void cross_entropy_forward_backward(Tensor losses, Tensor logits, Tensor targets, int64_t V, float dloss,
                                    cudaStream_t stream) {
    launch<true>("cross_entropy_forward_backward", losses, logits, targets, V, dloss, stream);
}

void add_losses(Tensor sum, Tensor losses, cudaStream_t stream) {
    expect("add_losses", "sum", sum, DType::f32, {2});
    expect("add_losses", "losses", losses, DType::f32, {-1});
    add_losses_kernel<<<1, kSumThreads, 0, stream>>>(sum.ptr<float>(), losses.ptr<float>(), losses.n());
    cudaCheckLaunch();
}
