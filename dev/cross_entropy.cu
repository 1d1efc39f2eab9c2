// dev/cross_entropy.cu: the loss of a language model and its gradient, five times.
//
//   loss_n   = -log p_n[target_n],    p_n = softmax(x_n)               x: logits (N, V) f32, targets (N) i32
//   dx_n[v]  = (p_n[v] - [v == target_n]) dloss                        dloss = 1 / N for a mean
//
// The logits are the largest tensor of a training step: 8 x 1024 tokens times a vocabulary of 50304 are 1.6 GB. A
// version has two costs: the bytes that it moves, and the memory that it keeps, because a second tensor of that size
// takes memory from the model. The minimum is one tensor, read once and written once.
//
//   run      make dev && build/cpu/dev/cross_entropy            (on a GPU build/cuda/dev/cross_entropy)
//            build/cpu/dev/cross_entropy --check | --size 64x50304 | --rung 3
//   debug    make DEVICE=cpu debug FILES=dev/cross_entropy.cu PROGRAM=dev/cross_entropy &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/cross_entropy --check --rung 3
#include "dev/ladder.h"

#include <cfloat>

namespace {

constexpr int kBlock = 256;  // threads of a block

struct Problem {
    Tensor losses;          // (N) f32
    Tensor logits;          // (N, V): rungs 3 to 5 leave the gradient here
    Tensor targets;         // (N) i32
    Tensor probs, dlogits;  // (N, V): of rungs 1 and 2
    float dloss;
};

// ---------------------------------------------------------------------------------------------------------------------
// 1. Naive: the three formulas, a kernel each: softmax with the probabilities stored, loss, gradient.
//
// Three tensors of the size of the logits exist, and 6 N V numbers move: the logits are read three times (maximum, sum,
// quotient), the probabilities written and read, the gradient written. One thread computes one row of the softmax:
// neighbouring threads read addresses V numbers apart, and N threads are too few.

__global__ void softmax_naive_kernel(float* probs, const float* logits, int64_t N, int V) {
    const int64_t row = global_thread();
    if (row >= N) return;
    const float* x = logits + row * V;
    float m = -INFINITY, s = 0.0f;
    for (int v = 0; v < V; ++v) m = fmaxf(m, x[v]);
    for (int v = 0; v < V; ++v) s += __expf(x[v] - m);
    for (int v = 0; v < V; ++v) probs[row * V + v] = __expf(x[v] - m) / s;
}

__global__ void loss_kernel(float* losses, const float* probs, const int* targets, int64_t N, int V) {
    const int64_t row = global_thread();
    // A probability below 7e-46 is 0 as a float, and its loss infinite, where it should be 104 or more: this is the
    // other reason not to compute the loss from probabilities. log s + m - x does not have this problem.
    if (row < N) losses[row] = -logf(probs[row * V + targets[row]]);
}

__global__ void gradient_kernel(float* dlogits, const float* probs, const int* targets, float dloss, int64_t n, int V) {
    const int64_t i = global_thread();
    if (i >= n) return;
    dlogits[i] = (probs[i] - (i % V == targets[i / V] ? 1.0f : 0.0f)) * dloss;
}

void loss_and_gradient(const Problem& p, cudaStream_t stream) {
    const int64_t N = p.logits.shape[0], n = p.logits.n();
    const int V = narrow(p.logits.shape[1], "vocabulary");
    loss_kernel<<<blocks_for(N, kBlock), kBlock, 0, stream>>>(p.losses.ptr<float>(), p.probs.ptr<float>(),
                                                              p.targets.ptr<int>(), N, V);
    cudaCheckLaunch();
    gradient_kernel<<<blocks_for(n, kBlock), kBlock, 0, stream>>>(p.dlogits.ptr<float>(), p.probs.ptr<float>(),
                                                                  p.targets.ptr<int>(), p.dloss, n, V);
    cudaCheckLaunch();
}

void cross_entropy_naive(const Problem& p, cudaStream_t stream) {
    const int64_t N = p.logits.shape[0];
    const int V = narrow(p.logits.shape[1], "vocabulary");
    softmax_naive_kernel<<<blocks_for(N, kBlock), kBlock, 0, stream>>>(p.probs.ptr<float>(), p.logits.ptr<float>(), N,
                                                                       V);
    cudaCheckLaunch();
    loss_and_gradient(p, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The statistics of a row by a block, for rungs 2 to 4: the maximum and the sum of exponentials in one pass, each
// thread for its part of the row, joined at the end (dev/softmax.cu, rungs 3 and 4). scratch: shared, 64 floats.

struct RowStatistics {
    float m, s;
};
__device__ __forceinline__ RowStatistics block_statistics(const float* x, int V, float* scratch) {
    float m = -FLT_MAX, s = 0.0f;
    for (int v = threadIdx.x; v < V; v += static_cast<int>(blockDim.x)) {
        const float larger = fmaxf(m, x[v]);
        s = s * __expf(m - larger) + __expf(x[v] - larger);
        m = larger;
    }
    const float row_m = block_reduce<Max>(m, scratch);
    return {row_m, block_reduce<Sum>(s * __expf(m - row_m), scratch + kWarp)};
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Block: one block per row in the softmax: neighbouring threads read neighbouring numbers, 256 N threads are enough
// for any GPU, and there is one pass less. Everything else is as before: three tensors, 5 N V numbers moved.

__global__ void __launch_bounds__(kBlock) softmax_block_kernel(float* probs, const float* logits, int V) {
    __shared__ float scratch[2 * kWarp];
    const float* x = logits + blockIdx.x * static_cast<int64_t>(V);
    float* p = probs + blockIdx.x * static_cast<int64_t>(V);
    const RowStatistics row = block_statistics(x, V, scratch);
    const float r = 1.0f / row.s;
    for (int v = threadIdx.x; v < V; v += kBlock) p[v] = __expf(x[v] - row.m) * r;
}

void cross_entropy_block(const Problem& p, cudaStream_t stream) {
    const unsigned N = static_cast<unsigned>(narrow(p.logits.shape[0], "rows"));
    const int V = narrow(p.logits.shape[1], "vocabulary");
    softmax_block_kernel<<<N, kBlock, 0, stream>>>(p.probs.ptr<float>(), p.logits.ptr<float>(), V);
    cudaCheckLaunch();
    loss_and_gradient(p, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. Fused: one kernel. When m and s of a row are known, each logit is overwritten by its gradient: the probabilities
// are not needed anywhere else. One tensor instead of three, 3 N V numbers moved.
//
// Working in place has one difficulty: the loss needs the target's logit, which one of the threads overwrites. Here the
// same thread reads it first, so that no barrier is needed.

__global__ void __launch_bounds__(kBlock)
    cross_entropy_fused_kernel(float* losses, float* logits, const int* targets, int V, float dloss) {
    __shared__ float scratch[2 * kWarp];
    float* x = logits + blockIdx.x * static_cast<int64_t>(V);
    const int target = targets[blockIdx.x];
    const RowStatistics row = block_statistics(x, V, scratch);
    const float scale = dloss / row.s;
    for (int v = threadIdx.x; v < V; v += kBlock) {
        if (v == target) losses[blockIdx.x] = logf(row.s) + (row.m - x[v]);
        x[v] = __expf(x[v] - row.m) * scale - (v == target ? dloss : 0.0f);
    }
}

void cross_entropy_fused(const Problem& p, cudaStream_t stream) {
    const unsigned N = static_cast<unsigned>(narrow(p.logits.shape[0], "rows"));
    const int V = narrow(p.logits.shape[1], "vocabulary");
    cross_entropy_fused_kernel<<<N, kBlock, 0, stream>>>(p.losses.ptr<float>(), p.logits.ptr<float>(),
                                                         p.targets.ptr<int>(), V, p.dloss);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. Kept: rung 3 reads each row twice, and between the two reads other blocks have read so much that no cache still
// has it. Here a row waits in shared memory, which 50304 float32 numbers just fit into (197 of 227 KiB on an H100;
// where a row does not fit, the rung only keeps its number): 2 N V numbers moved, the minimum. Each thread reads back
// only what it has put there itself, so that there is no barrier more than in rung 3. One block has a multiprocessor
// for itself, so it has 1024 threads.

constexpr int kKeptBlock = 1024;

__global__ void __launch_bounds__(kKeptBlock)
    cross_entropy_kept_kernel(float* losses, float* logits, const int* targets, int V, float dloss) {
    __shared__ float scratch[2 * kWarp];
    float* kept = dynamic_shared<float>();
    float* x = logits + blockIdx.x * static_cast<int64_t>(V);
    const int target = targets[blockIdx.x];
    for (int v = threadIdx.x; v < V; v += kKeptBlock) kept[v] = x[v];
    const RowStatistics row = block_statistics(kept, V, scratch);
    const float scale = dloss / row.s;
    for (int v = threadIdx.x; v < V; v += kKeptBlock) {
        if (v == target) losses[blockIdx.x] = logf(row.s) + (row.m - kept[v]);
        x[v] = __expf(kept[v] - row.m) * scale - (v == target ? dloss : 0.0f);
    }
}

size_t kept_bytes(const Problem& p) { return static_cast<size_t>(p.logits.shape[1]) * sizeof(float); }
bool rows_fit(const Problem& p) {
    return kept_bytes(p) + 2 * kWarp * sizeof(float) <= static_cast<size_t>(device().block_shared_bytes);
}

void cross_entropy_kept(const Problem& p, cudaStream_t stream) {
    const unsigned N = static_cast<unsigned>(narrow(p.logits.shape[0], "rows"));
    const int V = narrow(p.logits.shape[1], "vocabulary");
    cudaCheck(cudaFuncSetAttribute(cross_entropy_kept_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(kept_bytes(p))));
    cross_entropy_kept_kernel<<<N, kKeptBlock, kept_bytes(p), stream>>>(p.losses.ptr<float>(), p.logits.ptr<float>(),
                                                                        p.targets.ptr<int>(), V, p.dloss);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. The product: layers/cross_entropy.cu. Rung 4 with copies of 16 bytes that run ahead of the computing, one
// exponential per element in the first pass instead of two (layers/softmax.cuh), 16-bit logits, rows of any length
// (layers/kept_rows.cuh), ignored targets and a padded vocabulary.

void cross_entropy_product(const Problem& p, cudaStream_t stream) {
    cross_entropy_forward_backward(p.losses, p.logits, p.targets, p.logits.shape[1], p.dloss, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The ladder: reference values, tolerances, and the list of rungs

struct Reference {
    std::vector<double> losses, dlogits;
};

Reference cross_entropy_reference(const std::vector<float>& x, const std::vector<int32_t>& targets, int64_t V,
                                  double dloss) {
    Reference y{{}, std::vector<double>(x.size())};
    for (size_t row = 0; row < targets.size(); ++row) {
        const size_t first = row * static_cast<size_t>(V), columns = static_cast<size_t>(V);
        const double m =
            *std::max_element(x.begin() + static_cast<int64_t>(first), x.begin() + static_cast<int64_t>(first) + V);
        double s = 0;
        for (size_t v = 0; v < columns; ++v) s += std::exp(x[first + v] - m);
        const size_t target = static_cast<size_t>(targets[row]);
        y.losses.push_back(std::log(s) + m - x[first + target]);
        for (size_t v = 0; v < columns; ++v)
            y.dlogits[first + v] = (std::exp(x[first + v] - m) / s - (v == target ? 1 : 0)) * dloss;
    }
    return y;
}

void climb(Ladder& ladder) {
    const int64_t N = ladder.size(0), V = ladder.size(1);
    const float dloss = 1.0f / static_cast<float>(N);
    const Tensor logits = ladder.in_place(ladder.normal({N, V}, 2.0)), targets = ladder.take(DType::i32, {N});
    std::vector<int32_t> target_values;
    for (int64_t row = 0; row < N; ++row)
        target_values.push_back(
            static_cast<int32_t>(uniform_below(1, 2, static_cast<uint64_t>(row), static_cast<uint64_t>(V))));
    copy_to_device(targets, target_values.data());
    const Problem p{ladder.output({N}), logits, targets, ladder.output({N, V}), ladder.output({N, V}), dloss};
    const Reference y = cross_entropy_reference(ladder.host(logits), target_values, V, dloss);

    // Probabilities have the relative error that dev/softmax.cu explains; logits of standard deviation 2 differ by 24
    // at most. It is an absolute error of the loss, which is at most log V + 24 and rounded three times. The gradient
    // at the target is a difference of numbers up to dloss.
    const double p_error = (24 + 2 * (2 + 1.16 * 24) + static_cast<double>(V) + 3) * 0x1p-24;
    const double loss_error = p_error + 3 * (std::log(static_cast<double>(V)) + 24) * 0x1p-24;
    ladder.table("cross-entropy, forward and backward", Limit::copy, 2.0 * static_cast<double>(logits.bytes()));
    const Expectation losses{"losses", p.losses, y.losses, 0, loss_error};
    ladder.expects({losses, {"dlogits", p.dlogits, y.dlogits, p_error, 2 * dloss * 0x1p-24}});
    ladder.rung("naive", "three kernels, three tensors, one thread per row",
                [&](cudaStream_t s) { cross_entropy_naive(p, s); });
    ladder.rung("block", "one block per row", [&](cudaStream_t s) { cross_entropy_block(p, s); });
    ladder.expects({losses, {"dlogits", p.logits, y.dlogits, p_error, 2 * dloss * 0x1p-24}});
    ladder.rung("fused", "one kernel, in place", [&](cudaStream_t s) { cross_entropy_fused(p, s); });
    if (rows_fit(p))
        ladder.rung("kept", "a row waits in shared memory", [&](cudaStream_t s) { cross_entropy_kept(p, s); });
    else ladder.no_rung("kept", "needs rows that fit into the shared memory of a block");
    ladder.rung("product", "16 bytes per copy, one exponential less",
                [&](cudaStream_t s) { cross_entropy_product(p, s); });
}

}  // namespace

int main(int argc, char** argv) {
    return run_ladder(argc, argv,
                      {.name = "cross_entropy",
                       .sizes = "rows x vocabulary",
                       .cpu_size = {128, 50304},
                       .gpu_size = {2048, 50304},
                       .check_sizes = {{1, 1}, {3, 33}, {67, 129}, {5, 1028}, {2, 4099}},
                       .climb = climb});
}
