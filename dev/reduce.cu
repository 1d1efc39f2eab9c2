// dev/reduce.cu: the sum of n floats, eight times. After the ladder of Harris 2007, "Optimizing parallel reduction in
// CUDA".
//
//   sum = x_0 + x_1 + ... + x_{n-1}                                inp (n) f32, out (1) f32
//
// One addition for 4 bytes: memory is the limit by far, if a hundred thousand threads can add to one number without
// waiting for each other. A tree does it in log2(n) rounds: each round adds half of the numbers to the other half, with
// one thread for each addition.
//
//        x0   x1   x2   x3   x4   x5   x6   x7
//          \  |      \  |      \  |      \  |            round 1        a block does the rounds of its numbers in
//            s01       s23       s45       s67                          shared memory, and writes one partial sum;
//               \______ |           \______ |            round 2        a second launch sums the partial sums
//                     s0123               s4567
//                         \_______________ |             round 3
//                                     s01234567
//
// A tree is also more accurate: a number goes through log2(n) additions, not through n. See the column of errors.
//
//   run      make dev && build/cpu/dev/reduce                   (on a GPU build/cuda/dev/reduce)
//            build/cpu/dev/reduce --check | --size 1000000 | --rung 3
//   debug    doc/debugging.md has a session of rung 3: make DEVICE=cpu debug FILES=dev/reduce.cu PROGRAM=dev/reduce
#include "dev/ladder.h"
#include "optim/optim.h"

#include <set>

namespace {

constexpr int kBlock = 256;  // threads of a block

// ---------------------------------------------------------------------------------------------------------------------
// 1. Atomic: every thread adds its number to the one sum. n additions to one address: the memory does them one by one.
//
// And the order of the additions is random. Float addition is not associative, (a + b) + c != a + (b + c), so that two
// runs give two sums: `show_atomics` counts how many. A training run that cannot be repeated cannot be debugged. That
// is why no kernel of the product has a float atomic. (Integers are associative: atomics on them are fine.)

__global__ void reduce_atomic_kernel(float* out, const float* inp, int64_t n) {
    const int64_t i = global_thread();
    if (i < n) atomicAdd(out, inp[i]);
}

void reduce_atomic(Tensor out, Tensor inp, cudaStream_t stream) {
    cudaCheck(cudaMemsetAsync(out.data, 0, out.bytes(), stream));
    reduce_atomic_kernel<<<blocks_for(inp.n(), kBlock), kBlock, 0, stream>>>(out.ptr<float>(), inp.ptr<float>(),
                                                                             inp.n());
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Interleaved: a tree in shared memory. Round by round thread t adds its neighbour at distance 1, 2, 4, ..., 128.
//
// The threads that still work are t = 0, 2 d, 4 d, ...: spread over all warps. A warp with one busy lane takes as many
// instructions as one with 32. The rounds keep 8, 8, 8, 8, 8, 4, 2, 1 warps busy: 47 in all, for 255 additions, which
// eight instructions of full warps could do.

__global__ void __launch_bounds__(kBlock) reduce_interleaved_kernel(float* partial, const float* inp, int64_t n) {
    __shared__ float sums[kBlock];
    const int t = threadIdx.x;
    const int64_t i = global_thread();
    sums[t] = i < n ? inp[i] : 0.0f;
    for (int d = 1; d < kBlock; d *= 2) {
        __syncthreads();  // what is read below has been written: above, or in the round before
        if (t % (2 * d) == 0) sums[t] += sums[t + d];
    }
    if (t == 0) partial[blockIdx.x] = sums[0];
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. Sequential: the distances run the other way, 128, 64, ..., 1. The same number of additions, but the busy threads
// are t < d, side by side: whole warps work or rest. 4, 2, 1, 1, 1, 1, 1, 1 warps are busy: 12 in all.

__global__ void __launch_bounds__(kBlock) reduce_sequential_kernel(float* partial, const float* inp, int64_t n) {
    __shared__ float sums[kBlock];
    const int t = threadIdx.x;
    const int64_t i = global_thread();
    sums[t] = i < n ? inp[i] : 0.0f;
    for (int d = kBlock / 2; d > 0; d /= 2) {
        __syncthreads();  // what is read below has been written: above, or in the round before
        if (t < d) sums[t] += sums[t + d];
    }
    if (t == 0) partial[blockIdx.x] = sums[0];
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. First add: half of the threads only load. So each thread loads two numbers and adds them on the way: half as many
// blocks, and half as many barriers for each number.

__device__ __forceinline__ float load_two(const float* inp, int64_t n) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * (2 * kBlock) + threadIdx.x;
    return (i < n ? inp[i] : 0.0f) + (i + kBlock < n ? inp[i + kBlock] : 0.0f);
}

__global__ void __launch_bounds__(kBlock) reduce_first_add_kernel(float* partial, const float* inp, int64_t n) {
    __shared__ float sums[kBlock];
    const int t = threadIdx.x;
    sums[t] = load_two(inp, n);
    for (int d = kBlock / 2; d > 0; d /= 2) {
        __syncthreads();  // what is read below has been written: above, or in the round before
        if (t < d) sums[t] += sums[t + d];
    }
    if (t == 0) partial[blockIdx.x] = sums[0];
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. Unrolled: the last six rounds are one warp's, and 32 lanes need no barrier of 256 threads: __syncwarp is enough.
// The other seven warps are done. (In 2007 a warp ran in lockstep and nothing was needed. Since 2017 its lanes may run
// independently.) With kBlock known, `#pragma unroll` turns the rounds into straight code without a loop counter.

__global__ void __launch_bounds__(kBlock) reduce_unrolled_kernel(float* partial, const float* inp, int64_t n) {
    __shared__ float sums[kBlock];
    const int t = threadIdx.x;
    sums[t] = load_two(inp, n);
#pragma unroll
    for (int d = kBlock / 2; d >= kWarp; d /= 2) {
        __syncthreads();  // what is read below has been written: above, or in the round before
        if (t < d) sums[t] += sums[t + d];
    }
    if (t >= kWarp) return;
#pragma unroll
    for (int d = kWarp / 2; d > 0; d /= 2) {
        __syncwarp();  // the same among the 32 that are left
        if (t < d) sums[t] += sums[t + d];
    }
    if (t == 0) partial[blockIdx.x] = sums[0];
}

// ---------------------------------------------------------------------------------------------------------------------
// 6. Shuffles: lanes read each other's registers. A warp needs no shared memory; block_reduce (core/kernel.cuh) uses it
// only to bring eight sums of eight warps together. One barrier is left of eight.

__global__ void __launch_bounds__(kBlock) reduce_shuffle_kernel(float* partial, const float* inp, int64_t n) {
    __shared__ float scratch[kWarp];
    const float sum = block_reduce<Sum>(load_two(inp, n), scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The launcher of rungs 2 to 6: levels of partial sums, from one half of `scratch` to the other, until one is left.
using ReduceKernel = void(float* partial, const float* inp, int64_t n);

template <ReduceKernel* kernel>
void reduce_levels(Tensor out, Tensor inp, Tensor scratch, int64_t n_a_block, cudaStream_t stream) {
    const float* from = inp.ptr<float>();
    float *to = scratch.ptr<float>(), *other = to + ceil_div(inp.n(), n_a_block);
    for (int64_t n = inp.n();; std::swap(to, other)) {
        const int64_t n_sums = ceil_div(n, n_a_block);
        if (n_sums == 1) to = out.ptr<float>();
        kernel<<<static_cast<unsigned>(narrow(n_sums, "blocks")), kBlock, 0, stream>>>(to, from, n);
        cudaCheckLaunch();
        if (n_sums == 1) return;
        from = to;
        n = n_sums;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// 7. Stride: only as many blocks as are needed to keep a GPU busy. Each thread goes through the input with a stride of
// the whole grid, 16 bytes at a time into 4 sums of its own. The tree is only for what is left: 256 sums of a block
// once, instead of once for every 512 numbers. So a second launch of one block is enough for any n.
//
// The number of blocks depends on n only. If it depended on the number of multiprocessors, every GPU would have another
// order of additions, and another sum.

constexpr int64_t kMostBlocks = 1024;

int64_t stride_blocks(int64_t n) { return std::min(kMostBlocks, ceil_div(n, 16 * kBlock)); }

__global__ void __launch_bounds__(kBlock) reduce_stride_kernel(float* partial, const float* inp, int64_t n) {
    __shared__ float scratch[kWarp];
    float sums[4] = {};
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlock;
#pragma unroll 4  // loads in flight
    for (int64_t i = global_thread(); i < n / 4; i += stride) {
        const Packed<float> pack = load_packed(inp + 4 * i);
        for (int l = 0; l < 4; ++l) sums[l] += pack.v[l];
    }
    const int64_t rest = n / 4 * 4 + global_thread();  // the last n % 4
    if (rest < n) sums[0] += inp[rest];
    const float sum = block_reduce<Sum>((sums[0] + sums[1]) + (sums[2] + sums[3]), scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

void reduce_stride(Tensor out, Tensor inp, Tensor scratch, cudaStream_t stream) {
    const int64_t n_blocks = stride_blocks(inp.n());
    reduce_stride_kernel<<<static_cast<unsigned>(n_blocks), kBlock, 0, stream>>>(scratch.ptr<float>(), inp.ptr<float>(),
                                                                                 inp.n());
    cudaCheckLaunch();
    reduce_stride_kernel<<<1, kBlock, 0, stream>>>(out.ptr<float>(), scratch.ptr<float>(), n_blocks);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 8. The product. What it reduces to one number is the gradient: grad_norm (optim/grad_clip.cu) is the root of the sum
// of all squares. It has two launches, as rung 7: each sum of the first one is of 512 squares of one thread, without a
// tree, and the second one adds these in double. The numbers that it adds are squares, so its reference is another.

void reduce_product(Tensor norm, Tensor inp, Tensor scratch, cudaStream_t stream) {
    grad_norm(norm, inp, 0.0f, 1.0f, scratch, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The ladder: reference values, tolerances, and the list of rungs

void climb(Ladder& ladder) {
    const int64_t n = ladder.size(0);
    const Tensor inp = ladder.normal({n}), out = ladder.output({1});
    const Tensor scratch = ladder.output({ceil_div(n, kBlock) + ceil_div(n, kBlock * kBlock) + kMostBlocks});
    const Tensor norm = ladder.output({2}), norm_scratch = ladder.output({grad_norm_scratch_n(n)});
    double sum = 0, squares = 0;
    for (double x : ladder.host(inp)) sum += x, squares += x * x;

    ladder.table("sum", Limit::copy, static_cast<double>(inp.bytes()));
    ladder.expects({{"out", out, {sum}, 0, random_sum_error(n)}});  // of the worst order, one after the other
    ladder.rung(
        "atomic", "one thread per number, one sum", [&](cudaStream_t s) { reduce_atomic(out, inp, s); }, false);
    ladder.rung("interleaved", "a tree in shared memory",
                [&](cudaStream_t s) { reduce_levels<reduce_interleaved_kernel>(out, inp, scratch, kBlock, s); });
    ladder.rung("sequential", "busy threads side by side",
                [&](cudaStream_t s) { reduce_levels<reduce_sequential_kernel>(out, inp, scratch, kBlock, s); });
    ladder.rung("first add", "two loads a thread",
                [&](cudaStream_t s) { reduce_levels<reduce_first_add_kernel>(out, inp, scratch, 2 * kBlock, s); });
    ladder.rung("unrolled", "the last warp without barriers",
                [&](cudaStream_t s) { reduce_levels<reduce_unrolled_kernel>(out, inp, scratch, 2 * kBlock, s); });
    ladder.rung("shuffle", "registers instead of shared memory",
                [&](cudaStream_t s) { reduce_levels<reduce_shuffle_kernel>(out, inp, scratch, 2 * kBlock, s); });
    ladder.rung("stride", "many numbers per thread, 16 bytes per load, two launches",
                [&](cudaStream_t s) { reduce_stride(out, inp, scratch, s); });
    // n positive terms, each rounded once, 512 at a time summed in float: relative error 513 * 2^-24 at most. The root
    // halves it, and is rounded. The scale is exactly 1.
    ladder.expects({{"norm and scale", norm, {std::sqrt(squares), 1}, 258 * 0x1p-24, 0}});
    ladder.rung("product", "grad_norm: the same for squares",
                [&](cudaStream_t s) { reduce_product(norm, inp, norm_scratch, s); });
}

// 20 runs of the atomic rung and of rung 7 on the same numbers: how many different sums?
void show_atomics(Ladder& ladder) {
    const int64_t n = 1 << 16;
    const Tensor inp = ladder.take(DType::f32, {n}), out = ladder.take(DType::f32, {1});
    const Tensor scratch = ladder.take(DType::f32, {kMostBlocks});
    fill_normal(inp, 1.0, 2, 1);
    std::set<float> atomic, stride;
    for (int run = 0; run < 20; ++run) {
        reduce_atomic(out, inp, ladder.stream());
        atomic.insert(ladder.host(out)[0]);
        reduce_stride(out, inp, scratch, ladder.stream());
        stride.insert(ladder.host(out)[0]);
    }
    std::printf(
        "\nthe sum of the same %lld numbers, 20 times: atomics gave %zu different sums (from %.8g to %.8g), the tree "
        "%zu\n",
        static_cast<long long>(n), atomic.size(), *atomic.begin(), *atomic.rbegin(), stride.size());
    if (device().is_cpu && atomic.size() == 1)
        std::printf("(here threads run in order; CUDA_CPU_STRICT=1 in the environment draws the order at random)\n");
    check(stride.size() == 1, "the tree should give the same bits every time");
}

}  // namespace

int main(int argc, char** argv) {
    return run_ladder(argc, argv,
                      {.name = "reduce",
                       .sizes = "numbers",
                       .cpu_size = {1 << 22},
                       .gpu_size = {1 << 28},
                       .check_sizes = {{1}, {255}, {513}, {66049}, {131091}},
                       .climb = climb,
                       .show = show_atomics});
}
