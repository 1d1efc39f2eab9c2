// dev/few_rows.cu: a linear layer for a few rows, as in generating text: five times with weights as they are, twice
// with int8 codes.
//
//   out (N, O) = inp (N, C) weight^T          weight (O, C), N = 1 to 16 sequences that each get one token
//
// A training step has thousands of rows, and uses each weight as often: dev/matmul.cu. Here a weight is used N times,
// and the time is that of reading it: what counts is that every byte is read once, in large pieces, with many of them
// in flight; and then that there are fewer bytes. The limit is a copy's bandwidth. (Reading alone is faster.)
//
//   run      make dev && build/cpu/dev/few_rows                  (on a GPU build/cuda/dev/few_rows)
//            build/cpu/dev/few_rows --check | --size 1x3072x768 --dtype bf16 | --rung 3
//   debug    make DEVICE=cpu debug FILES=dev/few_rows.cu PROGRAM=dev/few_rows &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/few_rows --check --rung 2
#include "dev/ladder.h"

namespace {

constexpr int kBlock = 128;  // threads of a block: 4 warps
constexpr int64_t kMostRows = 16;

struct Problem {
    Tensor out, inp, weight;
    QuantisedWeight quantised;
    int64_t N, O, C;
};

// ---------------------------------------------------------------------------------------------------------------------
// 1. Naive: one thread per element of out. Neighbouring threads read neighbouring rows of the weight, C elements apart:
// of each 32 bytes that a GPU fetches a warp uses 2 or 4 at a time, and hopes to find the others in a cache later. Each
// row of inp reads the whole weight anew.

template <class T>
__global__ void few_rows_naive_kernel(T* out, const T* inp, const T* weight, int64_t N, int64_t O, int64_t C) {
    const int64_t i = global_thread();
    if (i >= N * O) return;
    const int64_t n = i / O, o = i % O;
    float sum = 0.0f;
    for (int64_t c = 0; c < C; ++c) sum += to_float(inp[n * C + c]) * to_float(weight[o * C + c]);
    out[i] = from_float<T>(sum);
}

template <class T>
void launch_naive(const Problem& p, cudaStream_t stream) {
    few_rows_naive_kernel<T><<<blocks_for(p.N * p.O, kBlock), kBlock, 0, stream>>>(p.out.ptr<T>(), p.inp.ptr<T>(),
                                                                                   p.weight.ptr<T>(), p.N, p.O, p.C);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 2 to 4 are one kernel: a warp per row of the weight and kRows rows of inp; each lane loads n neighbours of the weight
// at a time, and neighbouring lanes load neighbouring ones. The lanes' sums are added by shuffles.
//
// 2. Warp: n = 1, one row of inp. All bytes of every sector are used, 64 or 128 of them by each load of the warp.
// 3. 16 bytes: n = 4 or 8. 512 bytes by each load: a quarter or an eighth of the instructions, and as many loads in
//    flight carry more. (A row whose length is not a multiple of n goes one element at a time.)
// 4. Shared rows: up to 16 rows of inp for each loaded weight, which is therefore read once. The rows of inp are read
//    by every warp, and lie in the caches.

template <int n, int kRows, class T>
__global__ void few_rows_warp_kernel(T* out, const T* inp, const T* weight, int64_t N, int64_t O, int64_t C) {
    const int64_t o = global_thread() / kWarp, first = static_cast<int64_t>(blockIdx.y) * kRows;
    const int lane = threadIdx.x % kWarp;
    if (o >= O) return;
    float sums[kRows] = {};
    for (int64_t c = lane * n; c < C; c += kWarp * n) {
        const Packed<T, n> w = load_packed<T, n>(weight + o * C + c);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int64_t row = min(first + r, N - 1);  // rows that do not exist are not stored
            const Packed<T, n> x = load_packed<T, n>(inp + row * C + c);
            for (int i = 0; i < n; ++i) sums[r] = fmaf(to_float(x.v[i]), to_float(w.v[i]), sums[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const float sum = warp_sum(sums[r]);
        if (lane == 0 && first + r < N) out[(first + r) * O + o] = from_float<T>(sum);
    }
}

template <class T, int n, int kRows>
void launch_warp(const Problem& p, cudaStream_t stream) {
    const dim3 grid(blocks_for(p.O * kWarp, kBlock), static_cast<unsigned>(ceil_div(p.N, kRows)));
    few_rows_warp_kernel<n, kRows, T>
        <<<grid, kBlock, 0, stream>>>(p.out.ptr<T>(), p.inp.ptr<T>(), p.weight.ptr<T>(), p.N, p.O, p.C);
    cudaCheckLaunch();
}

template <class T, int kRows>
void launch_packed(const Problem& p, cudaStream_t stream) {
    if (p.C % Packed<T>::n == 0) launch_warp<T, Packed<T>::n, kRows>(p, stream);
    else launch_warp<T, 1, kRows>(p, stream);
}
template <class T>
void launch_shared(const Problem& p, cudaStream_t stream) {
    if (p.N == 1) launch_packed<T, 1>(p, stream);
    else if (p.N <= 4) launch_packed<T, 4>(p, stream);
    else launch_packed<T, kMostRows>(p, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. The product: layers/few_rows.cu. In float32 rung 4, with two rows of the weight for each loaded row of inp; in 16
// bits on tensor cores (layers/few_rows_mma.cu). On the CPU device one thread has 64 rows of the weight, without
// shuffles. (There linear_forward, through cpu/few_columns.h, is the one that inference uses.)

void few_rows_product(const Problem& p, cudaStream_t stream) { few_rows_forward(p.out, p.inp, p.weight, {}, stream); }

// ---------------------------------------------------------------------------------------------------------------------
// 6. int8: rung 2 on codes of 8 bits, which are multiplied by the scale of their row at the end. A quarter of float32's
// bytes, half of bf16's.

template <class T>
__global__ void few_rows_int8_kernel(T* out, const T* inp, const int8_t* codes, const float* scale, int64_t O,
                                     int64_t C) {
    const int64_t o = global_thread() / kWarp, row = blockIdx.y;
    const int lane = threadIdx.x % kWarp;
    if (o >= O) return;
    float sum = 0.0f;
    for (int64_t c = lane; c < C; c += kWarp) sum = fmaf(to_float(inp[row * C + c]), to_float(codes[o * C + c]), sum);
    sum = warp_sum(sum);
    if (lane == 0) out[row * O + o] = from_float<T>(scale[o] * sum);
}

template <class T>
void launch_int8(const Problem& p, cudaStream_t stream) {
    const dim3 grid(blocks_for(p.O * kWarp, kBlock), static_cast<unsigned>(p.N));
    few_rows_int8_kernel<T><<<grid, kBlock, 0, stream>>>(
        p.out.ptr<T>(), p.inp.ptr<T>(), p.quantised.codes.ptr<int8_t>(), p.quantised.scale.ptr<float>(), p.O, p.C);
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// 7. The product for codes: rung 5's kernel for float32, which widens the codes in registers. 16 bytes are 16 weights.

void few_rows_quantised(const Problem& p, cudaStream_t stream) {
    quantised_linear_forward(p.out, p.inp, p.quantised, {}, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The ladder: reference values, tolerances, and the list of rungs

// out, and for each element the sum of the magnitudes of its terms. weight[o][c] is value(o C + c).
template <class Value>
Expectation product_reference(const Problem& p, const std::vector<float>& inp, Value&& value) {
    Expectation expectation{"out", p.out, {}, 0, 0};
    for (int64_t n = 0; n < p.N; ++n)
        for (int64_t o = 0; o < p.O; ++o) {
            double sum = 0, size = 0;
            for (int64_t c = 0; c < p.C; ++c) {
                const double term = inp[static_cast<size_t>(n * p.C + c)] * value(o * p.C + c);
                sum += term, size += std::abs(term);
            }
            expectation.values.push_back(sum);
            expectation.sizes.push_back(size);
        }
    // C additions in any order, the rounding of each product and of scale times code: (C + 2) 2^-24 of the terms'
    // sizes. Then out's type rounds once, by less than that of the same sizes, or of its smallest normal number.
    const double u = p.out.dtype == DType::f32 ? 0 : unit_roundoff(p.out.dtype);
    expectation.relative = static_cast<double>(p.C + 2) * 0x1p-24 + u;
    expectation.absolute = u * smallest_normal(p.out.dtype);
    return expectation;
}

void climb(Ladder& ladder) {
    const int64_t N = ladder.size(0), O = ladder.size(1), C = ladder.size(2);
    check(N <= kMostRows, "this ladder is for at most ", kMostRows, " rows of inp, not ", N);
    Problem p{ladder.output({N, O}, ladder.dtype()), ladder.normal({N, C}), ladder.normal({O, C}), {}, N, O, C};
    p.quantised = {ladder.take(DType::i8, {O, C}), ladder.take(DType::f32, {O})};
    quantise_weight(p.quantised, p.weight, ladder.stream());

    const std::vector<float> inp = ladder.host(p.inp), weight = ladder.host(p.weight),
                             scale = ladder.host(p.quantised.scale);
    std::vector<int8_t> codes(static_cast<size_t>(O * C));
    copy_to_host(codes.data(), p.quantised.codes);

    const double activations = static_cast<double>(p.inp.bytes() + p.out.bytes());
    ladder.table("few_rows", Limit::copy, static_cast<double>(p.weight.bytes()) + activations);
    ladder.expects({product_reference(p, inp, [&](int64_t i) { return double{weight[static_cast<size_t>(i)]}; })});
    dispatch(ladder.dtype(), [&](auto zero) {
        using T = decltype(zero);
        ladder.rung("naive", "one thread per element", [&](auto s) { launch_naive<T>(p, s); });
        ladder.rung("warp", "neighbouring lanes read neighbours", [&](auto s) { launch_warp<T, 1, 1>(p, s); });
        ladder.rung("16 bytes", "4 or 8 weights per load", [&](auto s) { launch_packed<T, 1>(p, s); });
        ladder.rung("shared rows", "each loaded weight for all rows of inp", [&](auto s) { launch_shared<T>(p, s); });
        ladder.rung("product", "two rows of the weight for each load of inp", [&](auto s) { few_rows_product(p, s); });

        ladder.table("few_rows, int8", Limit::copy,
                     static_cast<double>(p.quantised.codes.bytes() + p.quantised.scale.bytes()) + activations);
        ladder.expects({product_reference(p, inp, [&](int64_t i) {
            return double{scale[static_cast<size_t>(i / C)]} * codes[static_cast<size_t>(i)];
        })});
        ladder.rung("codes", "a warp per element, 1 byte per weight", [&](auto s) { launch_int8<T>(p, s); });
        ladder.rung("product, int8", "16 bytes per load, shared by all rows",
                    [&](auto s) { few_rows_quantised(p, s); });
    });
}

}  // namespace

int main(int argc, char** argv) {
    return run_ladder(argc, argv,
                      {.name = "few_rows",
                       .sizes = "rows x outputs x columns",
                       .cpu_size = {4, 3072, 768},
                       .gpu_size = {4, 16384, 4096},
                       .check_sizes = {{1, 1, 1}, {13, 128, 1}, {3, 33, 65}, {5, 7, 136}, {16, 40, 272}},
                       .dtypes = {DType::f32, DType::bf16, DType::f16},
                       .climb = climb});
}
