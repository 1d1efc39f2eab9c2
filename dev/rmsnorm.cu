// dev/rmsnorm.cu: RMSNorm forward, four times, and backward, four times.
//
//   forward     y = x r g                 r = 1 / sqrt(mean_c(x^2) + eps)       x, y (N, C) f32, g (C), r (N)
//   backward    with n = x r, dn = dy g:
//               dx = r (dn - n mean_c(dn n))
//               dg = sum over rows of dy n
//
// layers/rmsnorm.cu derives it. The forward moves 2 N C numbers, the backward 3 N C (dy, x, dx); arithmetic is little:
// both are bound by memory. The forward is softmax's ladder again, shorter: one sum along each row. The backward has a
// sum along rows and one along columns, of the same data, and that makes it difficult: an arrangement of threads that
// is good for one sum is bad for the other.
//
//   run      make dev && build/cpu/dev/rmsnorm                  (on a GPU build/cuda/dev/rmsnorm)
//            build/cpu/dev/rmsnorm --check | --size 1000x768 | --rung 3
//   debug    make DEVICE=cpu debug FILES=dev/rmsnorm.cu PROGRAM=dev/rmsnorm &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/rmsnorm --check --rung 2
#include "dev/ladder.h"

namespace {

constexpr int kBlock = 256;  // threads of a block
constexpr float kEps = 1e-5f;

struct Forward {
    Tensor out, rstd, inp, weight;
};
struct Backward {
    Tensor dinp, dweight, dout, inp, weight, rstd, scratch, sums;  // sums: scratch of column_sum
};

// ---------------------------------------------------------------------------------------------------------------------
// 1. Naive: one thread per row, which reads it twice: once for the sum of squares, once to scale it. 3 N C numbers
// moved, and neighbouring threads are C numbers apart, so that a GPU uses 4 bytes of each sector of 32 that it fetches.

__global__ void forward_naive_kernel(float* out, float* rstd, const float* inp, const float* weight, int64_t N,
                                     int64_t C) {
    const int64_t row = global_thread();
    if (row >= N) return;
    const float* x = inp + row * C;
    float squares = 0.0f;
    for (int64_t c = 0; c < C; ++c) squares += x[c] * x[c];
    const float r = 1.0f / sqrtf(squares / static_cast<float>(C) + kEps);
    for (int64_t c = 0; c < C; ++c) out[row * C + c] = x[c] * r * weight[c];
    rstd[row] = r;
}

void forward_naive(const Forward& f, cudaStream_t stream) {
    const int64_t N = f.inp.shape[0], C = f.inp.shape[1];
    forward_naive_kernel<<<blocks_for(N, kBlock), kBlock, 0, stream>>>(f.out.ptr<float>(), f.rstd.ptr<float>(),
                                                                       f.inp.ptr<float>(), f.weight.ptr<float>(), N, C);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Warp: 32 lanes per row, neighbouring lanes read neighbouring numbers, and the sum over the lanes is made by
// shuffles. All bytes of every sector are used. The second read of the row mostly finds it in the cache.

__global__ void forward_warp_kernel(float* out, float* rstd, const float* inp, const float* weight, int64_t N,
                                    int64_t C) {
    const int64_t row = global_thread() / kWarp;
    const int lane = threadIdx.x % kWarp;
    if (row >= N) return;
    const float* x = inp + row * C;
    float squares = 0.0f;
    for (int64_t c = lane; c < C; c += kWarp) squares += x[c] * x[c];
    const float r = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(C) + kEps);
    for (int64_t c = lane; c < C; c += kWarp) out[row * C + c] = x[c] * r * weight[c];
    if (lane == 0) rstd[row] = r;
}

void forward_warp(const Forward& f, cudaStream_t stream) {
    const int64_t N = f.inp.shape[0], C = f.inp.shape[1];
    forward_warp_kernel<<<blocks_for(N * kWarp, kBlock), kBlock, 0, stream>>>(
        f.out.ptr<float>(), f.rstd.ptr<float>(), f.inp.ptr<float>(), f.weight.ptr<float>(), N, C);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. Registers: the row stays in the lanes' registers between the sum and the scaling, and is loaded 16 bytes at a time
// (or one at a time, if a row's length is not a multiple of 4). 2 N C numbers moved, the minimum. Registers can only
// hold an array with constant indices, so the longest row is a constant too: 32 lanes of 64 numbers.

constexpr int kRegisters = 64;
constexpr int64_t kLongestRow = kWarp * kRegisters;

template <int n>
__global__ void __launch_bounds__(kBlock)
    forward_registers_kernel(float* out, float* rstd, const float* inp, const float* weight, int64_t N, int64_t C) {
    const int64_t row = global_thread() / kWarp;
    const int lane = threadIdx.x % kWarp;
    if (row >= N) return;
    Packed<float, n> x[kRegisters / n] = {};  // zeros beyond the row's end: they add nothing
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kRegisters / n; ++k) {
        const int64_t c = (k * kWarp + lane) * n;
        if (c < C) x[k] = load_packed<float, n>(inp + row * C + c);
    }
#pragma unroll
    for (int k = 0; k < kRegisters / n; ++k)
        for (int l = 0; l < n; ++l) squares += x[k].v[l] * x[k].v[l];
    const float r = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(C) + kEps);
#pragma unroll
    for (int k = 0; k < kRegisters / n; ++k) {
        const int64_t c = (k * kWarp + lane) * n;
        if (c >= C) continue;
        const Packed<float, n> g = load_packed<float, n>(weight + c);
        for (int l = 0; l < n; ++l) x[k].v[l] *= r * g.v[l];
        store_packed(out + row * C + c, x[k]);
    }
    if (lane == 0) rstd[row] = r;
}

void forward_registers(const Forward& f, cudaStream_t stream) {
    const int64_t N = f.inp.shape[0], C = f.inp.shape[1];
    check(C <= kLongestRow, "rung 3 keeps rows in registers: at most ", kLongestRow,
          " channels; leave it out with --rung");
    float *out = f.out.ptr<float>(), *rstd = f.rstd.ptr<float>();
    const float *inp = f.inp.ptr<float>(), *weight = f.weight.ptr<float>();
    if (C % 4 == 0) {
        forward_registers_kernel<4><<<blocks_for(N * kWarp, kBlock), kBlock, 0, stream>>>(out, rstd, inp, weight, N, C);
    } else {
        forward_registers_kernel<1><<<blocks_for(N * kWarp, kBlock), kBlock, 0, stream>>>(out, rstd, inp, weight, N, C);
    }
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. The product: layers/rmsnorm.cu. Rung 3 for every dtype, with as many threads per row as it needs (a few lanes, a
// warp, a block), and with the residual add before the norm in the same pass.

void forward_product(const Forward& f, cudaStream_t stream) {
    rmsnorm_forward(f.out, {}, f.rstd, f.inp, {}, f.weight, kEps, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. Naive backward: one thread per row for dx, one thread per column for dg, two launches.
//
// dx reads dy and x twice, dg once more: 7 N C numbers moved instead of 3. The second kernel reads whole sectors
// (neighbouring threads have neighbouring columns), but C threads are a few thousand, where a GPU needs a hundred
// thousand, and each goes through all N rows. The alternative, one thread per row that adds into dg by atomics, would
// give other bits on every run (dev/reduce.cu, rung 1).

__global__ void backward_naive_input_kernel(float* dinp, const float* dout, const float* inp, const float* weight,
                                            const float* rstd, int64_t N, int64_t C) {
    const int64_t row = global_thread();
    if (row >= N) return;
    const float *dy = dout + row * C, *x = inp + row * C, r = rstd[row];
    float dot = 0.0f;
    for (int64_t c = 0; c < C; ++c) dot += dy[c] * weight[c] * (x[c] * r);
    const float mean = dot / static_cast<float>(C);
    for (int64_t c = 0; c < C; ++c) dinp[row * C + c] = r * (dy[c] * weight[c] - x[c] * r * mean);
}

__global__ void backward_naive_weight_kernel(float* dweight, const float* dout, const float* inp, const float* rstd,
                                             int64_t N, int64_t C) {
    const int64_t c = global_thread();
    if (c >= C) return;
    float sum = 0.0f;
    for (int64_t row = 0; row < N; ++row) sum += dout[row * C + c] * (inp[row * C + c] * rstd[row]);
    dweight[c] += sum;  // gradients of parameters are added to: several micro-batches make one step
}

void backward_naive(const Backward& b, cudaStream_t stream) {
    const int64_t N = b.inp.shape[0], C = b.inp.shape[1];
    backward_naive_input_kernel<<<blocks_for(N, kBlock), kBlock, 0, stream>>>(
        b.dinp.ptr<float>(), b.dout.ptr<float>(), b.inp.ptr<float>(), b.weight.ptr<float>(), b.rstd.ptr<float>(), N, C);
    cudaCheckLaunch();
    backward_naive_weight_kernel<<<blocks_for(C, kBlock), kBlock, 0, stream>>>(
        b.dweight.ptr<float>(), b.dout.ptr<float>(), b.inp.ptr<float>(), b.rstd.ptr<float>(), N, C);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 6. Two stages: dx by one warp per row; dg by many blocks that each sum 64 rows into one partial row, after which the
// product's column_sum adds the partial rows in its order. The second stage reads 1/64 of what the first one
// did. Now both kernels have enough threads; but both still read dy and x: 5 N C numbers (and 2 from the cache).

constexpr int64_t kChunkRows = 64;

__global__ void backward_warp_input_kernel(float* dinp, const float* dout, const float* inp, const float* weight,
                                           const float* rstd, int64_t N, int64_t C) {
    const int64_t row = global_thread() / kWarp;
    const int lane = threadIdx.x % kWarp;
    if (row >= N) return;
    const float *dy = dout + row * C, *x = inp + row * C, r = rstd[row];
    float dot = 0.0f;
    for (int64_t c = lane; c < C; c += kWarp) dot += dy[c] * weight[c] * (x[c] * r);
    const float mean = warp_sum(dot) / static_cast<float>(C);
    for (int64_t c = lane; c < C; c += kWarp) dinp[row * C + c] = r * (dy[c] * weight[c] - x[c] * r * mean);
}

// partial: (chunks of rows, C). Block (chunk, columns).
__global__ void backward_partial_kernel(float* partial, const float* dout, const float* inp, const float* rstd,
                                        int64_t N, int64_t C) {
    const int64_t c = static_cast<int64_t>(blockIdx.y) * kBlock + threadIdx.x;
    if (c >= C) return;
    const int64_t first = blockIdx.x * kChunkRows, last = min(first + kChunkRows, N);
    float sum = 0.0f;
#pragma unroll 8  // loads in flight
    for (int64_t row = first; row < last; ++row) sum += dout[row * C + c] * (inp[row * C + c] * rstd[row]);
    partial[blockIdx.x * C + c] = sum;
}

void backward_two_stages(const Backward& b, cudaStream_t stream) {
    const int64_t N = b.inp.shape[0], C = b.inp.shape[1], n_chunks = ceil_div(N, kChunkRows);
    backward_warp_input_kernel<<<blocks_for(N * kWarp, kBlock), kBlock, 0, stream>>>(
        b.dinp.ptr<float>(), b.dout.ptr<float>(), b.inp.ptr<float>(), b.weight.ptr<float>(), b.rstd.ptr<float>(), N, C);
    cudaCheckLaunch();
    const dim3 grid(static_cast<unsigned>(n_chunks), blocks_for(C, kBlock));
    backward_partial_kernel<<<grid, kBlock, 0, stream>>>(b.scratch.ptr<float>(), b.dout.ptr<float>(),
                                                         b.inp.ptr<float>(), b.rstd.ptr<float>(), N, C);
    cudaCheckLaunch();
    column_sum(b.dweight, make_tensor(b.scratch.data, DType::f32, {n_chunks, C}), true, b.sums, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// 7. Fused: one kernel reads dy and x once, for both sums. A warp goes through several rows; its lanes keep the row,
// and the sums of their columns over all rows so far, in registers: 3 N C numbers moved, the minimum. At the end each
// warp writes its sums as one partial row. The cost is registers: three arrays of 32 numbers take most of a thread's
// registers, so fewer warps fit on a multiprocessor, and rows are at most 1024 long.

constexpr int kFusedRegisters = 32;
constexpr int64_t kLongestFusedRow = kWarp * kFusedRegisters;
constexpr int64_t kRowsAWarp = 16;

__global__ void __launch_bounds__(kBlock)
    backward_fused_kernel(float* dinp, float* partial, const float* dout, const float* inp, const float* weight,
                          const float* rstd, int64_t N, int64_t C) {
    const int64_t warp = global_thread() / kWarp;
    const int lane = threadIdx.x % kWarp;
    const int64_t first = warp * kRowsAWarp, last = min(first + kRowsAWarp, N);
    if (first >= N) return;
    // This lane's columns of dg, summed over all rows of the warp.
    float dweight[kFusedRegisters] = {};
    for (int64_t row = first; row < last; ++row) {
        float dn[kFusedRegisters], n[kFusedRegisters], dot = 0.0f;
        const float r = rstd[row];
#pragma unroll
        for (int k = 0; k < kFusedRegisters; ++k) {
            const int64_t c = k * kWarp + lane;
            const float dy = c < C ? dout[row * C + c] : 0.0f;
            n[k] = c < C ? inp[row * C + c] * r : 0.0f;
            dn[k] = c < C ? dy * weight[c] : 0.0f;
            dweight[k] += dy * n[k];
            dot += dn[k] * n[k];
        }
        const float mean = warp_sum(dot) / static_cast<float>(C);
#pragma unroll
        for (int k = 0; k < kFusedRegisters; ++k)
            if (k * kWarp + lane < C) dinp[row * C + k * kWarp + lane] = r * (dn[k] - n[k] * mean);
    }
#pragma unroll
    for (int k = 0; k < kFusedRegisters; ++k)
        if (k * kWarp + lane < C) partial[warp * C + k * kWarp + lane] = dweight[k];
}

void backward_fused(const Backward& b, cudaStream_t stream) {
    const int64_t N = b.inp.shape[0], C = b.inp.shape[1], n_warps = ceil_div(N, kRowsAWarp);
    check(C <= kLongestFusedRow, "rung 7 keeps rows in registers: at most ", kLongestFusedRow,
          " channels; leave it out with --rung");
    backward_fused_kernel<<<blocks_for(n_warps * kWarp, kBlock), kBlock, 0, stream>>>(
        b.dinp.ptr<float>(), b.scratch.ptr<float>(), b.dout.ptr<float>(), b.inp.ptr<float>(), b.weight.ptr<float>(),
        b.rstd.ptr<float>(), N, C);
    cudaCheckLaunch();
    column_sum(b.dweight, make_tensor(b.scratch.data, DType::f32, {n_warps, C}), true, b.sums, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// 8. The product: rung 7 with loads of 16 bytes, several warps per row where it is longer than 1024 (16 numbers per
// thread instead of 32, so that more warps fit), fewer partial rows, and with the gradient of the residual stream added
// in the same pass.

void backward_product(const Backward& b, cudaStream_t stream) {
    rmsnorm_backward(b.dinp, b.dweight, b.dout, {}, b.inp, b.weight, b.rstd, true, b.scratch, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The ladder: reference values, tolerances, and the list of rungs

struct Reference {
    std::vector<double> out, rstd, dinp, dweight;
};

Reference rmsnorm_reference(const std::vector<float>& x, const std::vector<float>& g, const std::vector<float>& dy,
                            const std::vector<float>& dweight, int64_t N, int64_t C) {
    Reference y{std::vector<double>(x.size()), {}, std::vector<double>(x.size()), {dweight.begin(), dweight.end()}};
    for (int64_t row = 0; row < N; ++row) {
        const size_t at = static_cast<size_t>(row * C), columns = static_cast<size_t>(C);
        double squares = 0, dot = 0;
        for (size_t c = 0; c < columns; ++c) squares += static_cast<double>(x[at + c]) * x[at + c];
        const double r = 1 / std::sqrt(squares / static_cast<double>(C) + static_cast<double>(kEps));
        for (size_t c = 0; c < columns; ++c) dot += static_cast<double>(dy[at + c]) * g[c] * x[at + c] * r;
        const double mean = dot / static_cast<double>(C);
        for (size_t c = 0; c < columns; ++c) {
            const double n = x[at + c] * r;
            y.out[at + c] = n * g[c];
            y.dinp[at + c] = r * (static_cast<double>(dy[at + c]) * g[c] - n * mean);
            y.dweight[c] += dy[at + c] * n;
        }
        y.rstd.push_back(r);
    }
    return y;
}

void climb(Ladder& ladder) {
    const int64_t N = ladder.size(0), C = ladder.size(1);
    const Tensor inp = ladder.normal({N, C}), dout = ladder.normal({N, C}), weight = ladder.normal({C});
    const Tensor out = ladder.output({N, C}), rstd = ladder.output({N}), dinp = ladder.output({N, C});
    const Tensor dweight = ladder.in_place(ladder.normal({C})), saved_rstd = ladder.take(DType::f32, {N});
    const Tensor scratch = ladder.output(
        {std::max({ceil_div(N, kChunkRows) * C, ceil_div(N, kRowsAWarp) * C, rmsnorm_backward_scratch_n(N, C)})});
    const Tensor sums = ladder.output({column_sum_scratch_n(ceil_div(N, std::min(kChunkRows, kRowsAWarp)), C)});
    const Reference y =
        rmsnorm_reference(ladder.host(inp), ladder.host(weight), ladder.host(dout), ladder.host(dweight), N, C);
    from_floats(saved_rstd, {y.rstd.begin(), y.rstd.end()});

    // r: the sum of C positive squares has a relative error of at most C 2^-24 in the worst order, 2 sqrt(C) 2^-24
    // where roundings are random; half of it after the root, and 4 operations. y: 2 products more.
    const double r_error = (4 + std::sqrt(static_cast<double>(C))) * 0x1p-24,
                 r_largest = *std::max_element(y.rstd.begin(), y.rstd.end());
    const Forward f{out, rstd, inp, weight};
    ladder.table("RMSNorm forward", Limit::copy, 2.0 * static_cast<double>(inp.bytes()));
    ladder.expects({{"out", out, y.out, r_error + 2 * 0x1p-24, 0}, {"rstd", rstd, y.rstd, r_error, 0}});
    ladder.rung("naive", "one thread per row", [&](cudaStream_t s) { forward_naive(f, s); });
    ladder.rung("warp", "one warp per row, shuffles", [&](cudaStream_t s) { forward_warp(f, s); });
    ladder.rung("registers", "each row read once, 16 bytes per load", [&](cudaStream_t s) { forward_registers(f, s); });
    ladder.rung("product", "rmsnorm_forward", [&](cudaStream_t s) { forward_product(f, s); });

    // dx / r = dn - n mean: dn and n are products of two normal numbers, at most 25 (in 10^9), each rounded a few
    // times; the mean of C of them has random_sum_error(C) / C. dg: a random sum over N rows, of products.
    const Backward b{dinp, dweight, dout, inp, weight, saved_rstd, scratch, sums};
    const double dn_error = 4 * 25 * 0x1p-24 + 6 * random_sum_error(C) / static_cast<double>(C);
    ladder.table("RMSNorm backward", Limit::copy, 3.0 * static_cast<double>(inp.bytes()));
    ladder.expects({{"dinp", dinp, y.dinp, 0, r_largest * dn_error},
                    {"dweight", dweight, y.dweight, 0, 4 * 25 * 0x1p-24 + random_sum_error(N)}});
    ladder.rung("naive", "one thread per row, one thread per column", [&](cudaStream_t s) { backward_naive(b, s); });
    ladder.rung("two stages", "one warp per row; partial sums of 64 rows",
                [&](cudaStream_t s) { backward_two_stages(b, s); });
    ladder.rung("fused", "both sums from one read", [&](cudaStream_t s) { backward_fused(b, s); });
    ladder.rung("product", "rmsnorm_backward", [&](cudaStream_t s) { backward_product(b, s); });
}

}  // namespace

int main(int argc, char** argv) {
    return run_ladder(argc, argv,
                      {.name = "rmsnorm",
                       .sizes = "rows x channels",
                       .cpu_size = {8192, 768},
                       .gpu_size = {65536, 768},
                       .check_sizes = {{1, 1}, {3, 33}, {67, 129}, {130, 132}, {5, 1021}},
                       .climb = climb});
}
