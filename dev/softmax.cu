// dev/softmax.cu: the softmax of every row of a matrix, six times.
//
//   softmax(x)_i = exp(x_i) / sum_j exp(x_j)                       x: a row of C logits; inp, out (N, C) f32
//                = exp(x_i - m) / sum_j exp(x_j - m)               for any m; with m = max_j x_j nothing overflows
//
// It turns scores into probabilities, in every attention head and at the end of every language model. There is little
// to compute and much to move: 4 bytes are read and 4 bytes written for one exponential. So the limit is the memory,
// and rungs 2 to 5 reduce its traffic or use it better.
//
//   run      make dev && build/cpu/dev/softmax                  (on a GPU build/cuda/dev/softmax)
//            build/cpu/dev/softmax --check | --size 1000x4096 | --rung 3
//   debug    make DEVICE=cpu debug FILES=dev/softmax.cu PROGRAM=dev/softmax &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/softmax --check --rung 4
#include "dev/ladder.h"
#include "layers/softmax.cuh"

namespace {

constexpr int kBlock = 256;  // threads of a block

// ---------------------------------------------------------------------------------------------------------------------
// 1. Naive: one thread per row, the formula as it is written. The first and the last pass read and write the row
// once, the second reads it: 5 C numbers are moved.
//
// Neighbouring threads read addresses that are C numbers apart. The memory of a GPU delivers sectors of 32 bytes, of
// which a thread needs 4; it is not certain that the other 28 are still in a cache when it needs them. And exp
// overflows: exp(88.8) is more than a float can hold, and inf / inf is NaN. `show_overflow` below shows it.

__global__ void softmax_naive_kernel(float* out, const float* inp, int64_t N, int64_t C) {
    const int64_t row = global_thread();
    if (row >= N) return;
    const float* x = inp + row * C;
    float* y = out + row * C;
    for (int64_t i = 0; i < C; ++i) y[i] = __expf(x[i]);
    float sum = 0.0f;
    for (int64_t i = 0; i < C; ++i) sum += y[i];
    for (int64_t i = 0; i < C; ++i) y[i] /= sum;
}

void softmax_naive(Tensor out, Tensor inp, cudaStream_t stream) {
    const int64_t N = inp.shape[0], C = inp.shape[1];
    softmax_naive_kernel<<<blocks_for(N, kBlock), kBlock, 0, stream>>>(out.ptr<float>(), inp.ptr<float>(), N, C);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Safe: the maximum first. x_i - m <= 0, so every exponential is at most 1, and the sum is at least 1.
//
// Correct for every row, and the exponentials are computed twice instead of stored: 4 C numbers are moved.

__global__ void softmax_safe_kernel(float* out, const float* inp, int64_t N, int64_t C) {
    const int64_t row = global_thread();
    if (row >= N) return;
    const float* x = inp + row * C;
    float* y = out + row * C;
    float m = -INFINITY, s = 0.0f;
    for (int64_t i = 0; i < C; ++i) m = fmaxf(m, x[i]);
    for (int64_t i = 0; i < C; ++i) s += __expf(x[i] - m);
    for (int64_t i = 0; i < C; ++i) y[i] = __expf(x[i] - m) / s;
}

void softmax_safe(Tensor out, Tensor inp, cudaStream_t stream) {
    const int64_t N = inp.shape[0], C = inp.shape[1];
    softmax_safe_kernel<<<blocks_for(N, kBlock), kBlock, 0, stream>>>(out.ptr<float>(), inp.ptr<float>(), N, C);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. Online: m and s in one pass.                                 (Milakov & Gimelshein 2018, arXiv:1805.02867)
//
// When a larger maximum m' is found, the sum so far is too large by the factor exp(m' - m), and one multiplication
// corrects it: s = s exp(m - m') + exp(x - m'). One pass less, 3 C numbers moved. FlashAttention is possible for the
// same reason: the statistics of a row can be computed while the row itself is computed, piece by piece.

struct MaxSum {
    float m = -FLT_MAX, s = 0.0f;

    __device__ __forceinline__ void add(float x) {
        const float larger = fmaxf(m, x);
        s = s * __expf(m - larger) + __expf(x - larger);
        m = larger;
    }
};

__global__ void softmax_online_kernel(float* out, const float* inp, int64_t N, int64_t C) {
    const int64_t row = global_thread();
    if (row >= N) return;
    const float* x = inp + row * C;
    float* y = out + row * C;
    MaxSum row_statistics;
    for (int64_t i = 0; i < C; ++i) row_statistics.add(x[i]);
    const float m = row_statistics.m, r = 1.0f / row_statistics.s;  // one division per row instead of one per element
    for (int64_t i = 0; i < C; ++i) y[i] = __expf(x[i] - m) * r;
}

void softmax_online(Tensor out, Tensor inp, cudaStream_t stream) {
    const int64_t N = inp.shape[0], C = inp.shape[1];
    softmax_online_kernel<<<blocks_for(N, kBlock), kBlock, 0, stream>>>(out.ptr<float>(), inp.ptr<float>(), N, C);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. Warp: 32 lanes share a row. Lane l takes the elements l, l + 32, ...: one load instruction of the warp reads 128
// neighbouring bytes, 4 full sectors. And N rows are now 32 N threads: enough to keep a GPU busy, which N threads are
// not.
//
// Each lane has an m and an s of its own; the butterfly of warp_max and warp_sum (core/kernel.cuh) joins them by
// shuffles, five exchanges from register to register, with no shared memory and no barrier. Still 3 C numbers moved;
// the second read often finds the row in the cache.

__global__ void softmax_warp_kernel(float* out, const float* inp, int64_t N, int64_t C) {
    const int64_t row = global_thread() / kWarp;
    const int lane = threadIdx.x % kWarp;
    if (row >= N) return;  // whole warps leave together, so that no shuffle waits for a missing lane
    const float* x = inp + row * C;
    float* y = out + row * C;
    MaxSum lane_statistics;
    for (int64_t i = lane; i < C; i += kWarp) lane_statistics.add(x[i]);
    const float m = warp_max(lane_statistics.m);
    const float r = 1.0f / warp_sum(lane_statistics.s * __expf(lane_statistics.m - m));
    for (int64_t i = lane; i < C; i += kWarp) y[i] = __expf(x[i] - m) * r;
}

void softmax_warp(Tensor out, Tensor inp, cudaStream_t stream) {
    const int64_t N = inp.shape[0], C = inp.shape[1];
    softmax_warp_kernel<<<blocks_for(N * kWarp, kBlock), kBlock, 0, stream>>>(out.ptr<float>(), inp.ptr<float>(), N, C);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. Registers: one block per row, 32 numbers per thread. The row is read once, and stays in registers until it is
// written: 2 C numbers moved, which is the minimum. Since the whole row is in registers, the online form is not needed:
// first the maximum, then the sum.
//
// Loads are 16 bytes per thread (n = 4; if a row's length is not a multiple of 4, rows are not aligned: n = 1), and all
// of a thread's loads are in flight before the first is needed. The cost: two reductions over the block, so two
// barriers, which take more time than they save where rows are short; and rows of more than 8192 do not fit.

constexpr int kRegisters = 32;  // numbers of a row that a thread holds
constexpr int64_t kLongestRow = kBlock * kRegisters;

template <int n>
__global__ void __launch_bounds__(kBlock) softmax_registers_kernel(float* out, const float* inp, int64_t C) {
    __shared__ float scratch[2 * kWarp];  // one half for the maximum, one for the sum: no barrier between their uses
    const float* x = inp + blockIdx.x * C;
    float* y = out + blockIdx.x * C;
    Packed<float, n> row[kRegisters / n];
    float m = -INFINITY, s = 0.0f;
#pragma unroll
    for (int k = 0; k < kRegisters / n; ++k) {
        const int64_t i = (static_cast<int64_t>(k) * kBlock + threadIdx.x) * n;
        for (int l = 0; l < n; ++l) row[k].v[l] = -INFINITY;  // beyond the row: exp is 0
        if (i < C) row[k] = load_packed<float, n>(x + i);
    }
#pragma unroll
    for (int k = 0; k < kRegisters / n; ++k)
        for (int l = 0; l < n; ++l) m = fmaxf(m, row[k].v[l]);
    m = block_reduce<Max>(m, scratch);
#pragma unroll
    for (int k = 0; k < kRegisters / n; ++k)
        for (int l = 0; l < n; ++l) {
            row[k].v[l] = __expf(row[k].v[l] - m);
            s += row[k].v[l];
        }
    const float r = 1.0f / block_reduce<Sum>(s, scratch + kWarp);
#pragma unroll
    for (int k = 0; k < kRegisters / n; ++k) {
        const int64_t i = (static_cast<int64_t>(k) * kBlock + threadIdx.x) * n;
        for (int l = 0; l < n; ++l) row[k].v[l] *= r;
        if (i < C) store_packed(y + i, row[k]);
    }
}

void softmax_registers(Tensor out, Tensor inp, cudaStream_t stream) {
    const int64_t N = inp.shape[0], C = inp.shape[1];
    check(C <= kLongestRow, "rung 5 keeps rows in registers: at most ", kLongestRow,
          " columns; leave it out with --rung");
    const unsigned n_blocks = static_cast<unsigned>(narrow(N, "rows"));
    if (C % 4 == 0) {
        softmax_registers_kernel<4><<<n_blocks, kBlock, 0, stream>>>(out.ptr<float>(), inp.ptr<float>(), C);
    } else {
        softmax_registers_kernel<1><<<n_blocks, kBlock, 0, stream>>>(out.ptr<float>(), inp.ptr<float>(), C);
    }
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 6. The product. llm.cu never writes a softmax to memory by itself: attention and cross-entropy need max and sum, and
// use the row at once. So the product has no softmax kernel, but layers/softmax.cuh, from which this one is made:
// online, 16 bytes at a time, by a team of threads whose size depends on the length of the row: one thread, a warp, or
// a block. It takes rows of any length, also the vocabulary's 50304, which do not fit in registers. 3 C numbers, the
// second read mostly from a cache.

template <int n>
__global__ void softmax_product_kernel(float* out, const float* inp, int64_t N, int C) {
    __shared__ float scratch[2 * kWarp];
    const int64_t row = team_row();
    if (row >= N) return;
    const float* x_row = inp + row * C;
    const SoftmaxStatistics statistics = softmax_statistics<n>(x_row, C, C, scratch);
    const float r = 1.0f / statistics.sum;
    for (int i = static_cast<int>(threadIdx.x) * n; i < C; i += static_cast<int>(blockDim.x) * n) {
        float x[n];
        load_chunk(x, x_row + i, C - i);
        for (int l = 0; l < n; ++l) x[l] = __expf(x[l] - statistics.max) * r;
        store_chunk(out + row * C + i, x, C - i);
    }
}

void softmax_product(Tensor out, Tensor inp, cudaStream_t stream) {
    const int64_t N = inp.shape[0], C = inp.shape[1];
    dispatch_chunks(DType::f32, C, [&](auto chunk) {
        constexpr int n = decltype(chunk)::n;
        if constexpr (std::is_same_v<typename decltype(chunk)::Element, float>) {
            const RowTeams teams = row_teams(N, C, n);
            softmax_product_kernel<n>
                <<<teams.grid, teams.block, 0, stream>>>(out.ptr<float>(), inp.ptr<float>(), N, static_cast<int>(C));
        }
    });
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// The ladder: reference values, tolerances, and the list of rungs

std::vector<double> softmax_reference(const std::vector<float>& x, int64_t N, int64_t C) {
    std::vector<double> y(x.size());
    for (int64_t row = 0; row < N; ++row) {
        const float* from = x.data() + row * C;
        const double m = *std::max_element(from, from + C);
        double s = 0;
        for (int64_t i = 0; i < C; ++i) s += std::exp(from[i] - m);
        for (int64_t i = 0; i < C; ++i) y[static_cast<size_t>(row * C + i)] = std::exp(from[i] - m) / s;
    }
    return y;
}

// The relative error of y = exp(d) / s, d = x - m, where 2^-24 is the error of one rounding. Logits of standard
// deviation 3 stay within 18 (in 10^8 of them), so |d| <= 36. The rounding of d makes an error of 36 * 2^-24 in its
// exponential; __expf on a GPU one of 2 + 1.16 |d| units of 2^-23; the sum of C positive terms, in the worst order, C
// 2^-24; and there are a product and a division.
double tolerance(int64_t C) { return (36 + 2 * (2 + 1.16 * 36) + static_cast<double>(C) + 2) * 0x1p-24; }

void climb(Ladder& ladder) {
    const int64_t N = ladder.size(0), C = ladder.size(1);
    narrow(C, "columns");
    const Tensor inp = ladder.normal({N, C}, 3.0), out = ladder.output({N, C});
    ladder.table("softmax", Limit::copy, 2.0 * static_cast<double>(inp.bytes()));
    ladder.expects({{"out", out, softmax_reference(ladder.host(inp), N, C), tolerance(C), 0x1p-126}});
    ladder.rung("naive", "one thread per row, no maximum", [&](cudaStream_t s) { softmax_naive(out, inp, s); });
    ladder.rung("safe", "the maximum first", [&](cudaStream_t s) { softmax_safe(out, inp, s); });
    ladder.rung("online", "maximum and sum in one pass", [&](cudaStream_t s) { softmax_online(out, inp, s); });
    ladder.rung("warp", "one warp per row, shuffles", [&](cudaStream_t s) { softmax_warp(out, inp, s); });
    ladder.rung("registers", "one block per row, read once, 16 bytes per load",
                [&](cudaStream_t s) { softmax_registers(out, inp, s); });
    ladder.rung("product", "softmax_statistics: rows of any length",
                [&](cudaStream_t s) { softmax_product(out, inp, s); });
}

// Rows with a largest logit of 80, 88 and 89: the largest float is exp(88.7).
void show_overflow(Ladder& ladder) {
    const Tensor inp = ladder.take(DType::f32, {3, 2}), out = ladder.take(DType::f32, {3, 2});
    from_floats(inp, {0, 80, 0, 88, 0, 89});
    softmax_naive(out, inp, ladder.stream());
    const std::vector<float> naive = ladder.host(out);
    softmax_safe(out, inp, ladder.stream());
    const std::vector<float> safe = ladder.host(out);
    std::printf("\nsoftmax of (0, 80), (0, 88), (0, 89), second number: naive %g, %g, %g; safe %g, %g, %g\n", naive[1],
                naive[3], naive[5], safe[1], safe[3], safe[5]);
    check(naive[3] == 1 && std::isnan(naive[5]), "naive should hold up to 88 and overflow at 89");
    check(safe[1] == 1 && safe[3] == 1 && safe[5] == 1, "safe should not overflow");
}

}  // namespace

int main(int argc, char** argv) {
    return run_ladder(argc, argv,
                      {.name = "softmax",
                       .sizes = "rows x columns",
                       .cpu_size = {2048, 4096},
                       .gpu_size = {16384, 4096},
                       .check_sizes = {{1, 1}, {3, 33}, {67, 129}, {5, 1028}, {2, 4099}},
                       .climb = climb,
                       .show = show_overflow});
}
