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
// overwrites them: there is no second buffer, and no probabilities are ever stored. A row is read for m and s
// (layers/softmax.cuh), and then again to turn each x into dx: layers/kept_rows.cuh says from where.
//
// Vp >= V: the columns from V on only pad the rows to a size for which matrix products are fast. They are not tokens:
// they are left out of the sum, and their gradient is zero. Rows with a negative target (padding, prompts) have loss 0
// and gradient 0.
#include "layers/kept_rows.cuh"
#include "layers/layers.h"
#include "layers/softmax.cuh"

namespace {

constexpr int kScratch = 2 * kWarp;  // softmax_statistics'

// ---------------------------------------------------------------------------------------------------------------------
// Kernel: one team of threads per row (layers/chunk.cuh). kBackward: the gradient takes the place of the logits, of
// which the first kept_n columns wait for it in shared memory (layers/kept_rows.cuh).

template <class T, int kN, bool kBackward>
__global__ void __launch_bounds__(kMostRowThreads)
    cross_entropy_kernel(float* losses, T* logits, const int* targets, int64_t N, int V, int Vp, float dloss,
                         int kept_n) {
    __shared__ float scratch[kScratch];
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

    const KeptRow<kN, T> its{x_row, dynamic_shared<T>() + threadIdx.y * kept_n, kept_n, Vp, stride};
    its.start(first);
    const SoftmaxStatistics softmax = softmax_statistics<kN>([&](float(&x)[kN], int v) { its.load(x, v); }, V, scratch);
    // The thread that will overwrite the target's logit is the one that reads it: so no barrier is needed in between. A
    // target beyond the vocabulary has no logit: its loss is NaN, and training ends at that (not in fp16).
    const bool has_target = target / kN % static_cast<int>(blockDim.x) == static_cast<int>(threadIdx.x);
    const float target_logit = has_target && target < V ? to_float(x_row[target]) : NAN;
    if (has_target) losses[row] = logf(softmax.sum) + (softmax.max - target_logit);

    if (!kBackward) return;
    const float scale = dloss / softmax.sum;
    const auto gradient = [&](float x) { return __expf(x - softmax.max) * scale; };  // of what is not the target
    float x[kN];
    int v = first;
    for (; v + kN <= V; v += stride) {
        its.load_again(x, v);
        for (int l = 0; l < kN; ++l) x[l] = gradient(x[l]);
        store_chunk(x_row + v, x, Vp - v);
    }
    if (v < V) {  // a chunk of which not all are tokens: the last one
        its.load_again(x, v);
        for (int l = 0; l < kN; ++l) x[l] = v + l < V ? gradient(x[l]) : 0.0f;
        store_chunk(x_row + v, x, Vp - v);
        v += stride;
    }
    if (has_target && target < V) x_row[target] = from_float<T>(gradient(target_logit) - dloss);
    for (; v < Vp; v += stride) store_zeros<kN>(x_row + v, Vp - v);
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels for a vocabulary that is divided among ranks: this one has the tokens first ... first + V - 1. A row's
// softmax needs the maximum and the sum of all columns, and its loss the target's logit, which one rank has. The ranks
// exchange these numbers between the two reads of a row: nothing can wait in shared memory.

template <class T, int kN>
__global__ void cross_entropy_parts_kernel(float* max, float* sums, const T* logits, const int* targets, int64_t N,
                                           int first_token, int V, int Vp) {
    __shared__ float scratch[kScratch];
    const int64_t row = team_row();
    if (row >= N) return;
    const T* x_row = logits + row * Vp;
    const SoftmaxStatistics softmax = softmax_statistics<kN>(x_row, V, Vp, scratch);
    if (threadIdx.x > 0) return;
    const int target = targets[row] - first_token;  // below 0 also where the row is ignored
    max[row] = softmax.max;
    sums[2 * row] = softmax.sum;
    sums[2 * row + 1] = target >= 0 && target < V ? to_float(x_row[target]) : 0.0f;
}

__global__ void cross_entropy_rescale_kernel(float* sums, const float* max, const float* all_max, int64_t N) {
    const int64_t row = global_thread();
    if (row < N) sums[2 * row] *= __expf(max[row] - all_max[row]);
}

template <class T, int kN>
__global__ void cross_entropy_finish_kernel(float* losses, T* logits, const int* targets, const float* all_max,
                                            const float* all_sums, int64_t N, int first_token, int V, int Vp,
                                            float dloss, bool backward) {
    const int64_t row = team_row();
    if (row >= N) return;
    T* x_row = logits + row * Vp;
    const int first = static_cast<int>(threadIdx.x) * kN, stride = static_cast<int>(blockDim.x) * kN;
    const bool ignored = targets[row] < 0;
    const int target = targets[row] - first_token;
    const float max = all_max[row], sum = all_sums[2 * row];
    if (threadIdx.x == 0) losses[row] = ignored ? 0.0f : logf(sum) + (max - all_sums[2 * row + 1]);
    if (!backward) return;
    const float scale = dloss / sum;
    int v = first;
    for (; v < V; v += stride) {
        float x[kN];
        load_chunk(x, x_row + v, Vp - v);
        for (int l = 0; l < kN; ++l) {
            const float gradient = __expf(x[l] - max) * scale - (v + l == target ? dloss : 0.0f);
            x[l] = v + l < V && !ignored ? gradient : 0.0f;
        }
        store_chunk(x_row + v, x, Vp - v);
    }
    for (; v < Vp; v += stride) store_zeros<kN>(x_row + v, Vp - v);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// FLOPs for each logit: the maximum, the difference from it, its exponential, and the addition to the sum; and again
// the difference and the exponential, the quotient, and the 1 of the target.
constexpr double kForwardFlops = 4, kBackwardFlops = 4;

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
    if (N == 0) return;
    dispatch_chunks(logits.dtype, Vp, [&](auto chunk) {
        using T = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const KeptRows rows = kept_rows(N, V, Vp, sizeof(T), kN, kScratch * sizeof(float));
        if (rows.asks_for_more)
            cudaCheck(cudaFuncSetAttribute(cross_entropy_kernel<T, kN, kBackward>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(rows.shared_bytes)));
        cross_entropy_kernel<T, kN, kBackward><<<rows.teams.grid, rows.teams.block, rows.shared_bytes, stream>>>(
            losses.ptr<float>(), logits.ptr<T>(), targets.ptr<int>(), N, n_tokens, n_columns, dloss, rows.kept_n);
        const int64_t token_bytes = bytes_of_tokens<T, kN>(logits, V);
        launched("cross_entropy_kernel",
                 {.reads = token_bytes + bytes_of(targets),
                  .writes = bytes_of(losses) + (kBackward ? bytes_of(logits) : 0),
                  .again = kBackward ? rows.again_bytes : 0,
                  .flops = static_cast<double>(N * V) * (kForwardFlops + (kBackward ? kBackwardFlops : 0))});
    });
}

constexpr int kSumThreads = 256;

// One block: thread t adds losses t, t + 256, ...; thread 0 adds up the threads.
__global__ void __launch_bounds__(kSumThreads)
    add_losses_kernel(float* sum, const float* losses, int64_t n, bool accumulate) {
    __shared__ double shared[kSumThreads];
    double mine = 0;
#pragma unroll 16  // this many loads are under way
    for (int64_t i = threadIdx.x; i < n; i += kSumThreads) mine += losses[i];
    shared[threadIdx.x] = mine;
    __syncthreads();  // all values have been written
    if (threadIdx.x > 0) return;
    double total = accumulate ? static_cast<double>(sum[0]) + sum[1] : 0.0;
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

// Launches f's kernel for rows of logits: f(chunk, teams) with the type of an element and how many a thread loads.
template <class F>
static void launch_rows(Tensor logits, F&& f) {
    if (logits.shape[0] == 0) return;
    dispatch_chunks(logits.dtype, logits.shape[1],
                    [&](auto chunk) { f(chunk, row_teams(logits.shape[0], logits.shape[1], decltype(chunk)::n)); });
}

// The columns of logits that are tokens, and all of them; checks what the three steps have in common.
static std::pair<int, int> check_parts(const char* name, Tensor logits, Tensor targets, Tensor max, Tensor sums,
                                       int64_t V) {
    expect(name, "logits", logits, logits.dtype, {-1, -1});
    const int64_t N = logits.shape[0], Vp = logits.shape[1];
    check(V >= 0 && V <= Vp, name, ": V = ", V, " tokens do not fit in logits ", logits);
    expect(name, "targets", targets, DType::i32, {N});
    expect(name, "max", max, DType::f32, {N});
    expect(name, "sums", sums, DType::f32, {N, 2});
    expect_aligned(name, {{"logits", logits}});
    return {narrow(V, "vocabulary"), narrow(Vp, "columns of logits")};
}

void cross_entropy_parts(Tensor max, Tensor sums, Tensor logits, Tensor targets, int64_t first, int64_t V,
                         cudaStream_t stream) {
    const auto [n_tokens, n_columns] = check_parts("cross_entropy_parts", logits, targets, max, sums, V);
    const int first_token = narrow(first, "the first token");
    launch_rows(logits, [&](auto chunk, const RowTeams& teams) {
        using T = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        cross_entropy_parts_kernel<T, kN><<<teams.grid, teams.block, 0, stream>>>(
            max.ptr<float>(), sums.ptr<float>(), logits.ptr<T>(), targets.ptr<int>(), logits.shape[0], first_token,
            n_tokens, n_columns);
        const int64_t token_bytes = bytes_of_tokens<T, kN>(logits, V);
        launched("cross_entropy_parts_kernel", {.reads = token_bytes + bytes_of(targets),
                                                .writes = bytes_of(max, sums),
                                                .flops = static_cast<double>(max.n() * V) * kForwardFlops});
    });
}

void cross_entropy_rescale(Tensor sums, Tensor max, Tensor all_max, cudaStream_t stream) {
    const int64_t N = max.n();
    expect("cross_entropy_rescale", "sums", sums, DType::f32, {N, 2});
    expect("cross_entropy_rescale", "max", max, DType::f32, {N});
    expect("cross_entropy_rescale", "all_max", all_max, DType::f32, {N});
    if (N == 0) return;
    cross_entropy_rescale_kernel<<<static_cast<unsigned>(ceil_div(N, kSumThreads)), kSumThreads, 0, stream>>>(
        sums.ptr<float>(), max.ptr<float>(), all_max.ptr<float>(), N);
    // Of sums the first number of each pair.
    launched("cross_entropy_rescale_kernel",
             {.reads = 3 * bytes_of(max), .writes = bytes_of(max), .flops = 3.0 * static_cast<double>(N)});
}

void cross_entropy_finish(Tensor losses, Tensor logits, Tensor targets, Tensor all_max, Tensor all_sums, int64_t first,
                          int64_t V, float dloss, cudaStream_t stream) {
    const auto [n_tokens, n_columns] = check_parts("cross_entropy_finish", logits, targets, all_max, all_sums, V);
    expect("cross_entropy_finish", "losses", losses, DType::f32, {logits.shape[0]});
    const int first_token = narrow(first, "the first token");
    const bool backward = dloss == dloss;
    launch_rows(logits, [&](auto chunk, const RowTeams& teams) {
        using T = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        cross_entropy_finish_kernel<T, kN><<<teams.grid, teams.block, 0, stream>>>(
            losses.ptr<float>(), logits.ptr<T>(), targets.ptr<int>(), all_max.ptr<float>(), all_sums.ptr<float>(),
            logits.shape[0], first_token, n_tokens, n_columns, dloss, backward);
        const int64_t token_bytes = bytes_of_tokens<T, kN>(logits, V);
        launched("cross_entropy_finish_kernel",
                 {.reads = bytes_of(targets, all_max, all_sums) + (backward ? token_bytes : 0),
                  .writes = bytes_of(losses) + (backward ? bytes_of(logits) : 0),
                  .flops = backward ? static_cast<double>(losses.n() * V) * kBackwardFlops : 0});
    });
}

void add_losses(Tensor sum, Tensor losses, bool accumulate, cudaStream_t stream) {
    expect("add_losses", "sum", sum, DType::f32, {2});
    expect("add_losses", "losses", losses, DType::f32, {-1});
    add_losses_kernel<<<1, kSumThreads, 0, stream>>>(sum.ptr<float>(), losses.ptr<float>(), losses.n(), accumulate);
    launched("add_losses_kernel", {.reads = bytes_of(losses) + (accumulate ? bytes_of(sum) : 0),
                                   .writes = bytes_of(sum),
                                   .flops = static_cast<double>(losses.n())});
}
