// Linear layers for a few rows of inp, and weights of 8 bits: what inference multiplies with.
//
//   out[n][o] = sum over c of inp[n][c] weight[o][c] + bias[o]          weight[o][c] ~ scale[o][c / block] codes[o][c]
//
// As plain loops:
//
//   for o < O, block b of a row:                                                          quantise_weight, once
//       scale[o][b] = max |weight[o][c in b]| / 127
//       for c in b:  codes[o][c] = round(weight[o][c] / scale[o][b])
//   for n < N, o < O:                                                                     quantised_linear_forward
//       sum = 0;  for c < C:  sum += inp[n][c] * (scale[o][c / block] * codes[o][c])
//       out[n][o] = sum + bias[o]
//
// A model that writes one token multiplies with every weight once: 2 flops for each 2 or 4 bytes that come from memory,
// where a GPU could do hundreds. The time is that of reading the weights, whatever N is up to about 16, and with half
// as many bytes it is half as long. That is what quantised weights are for here. The arithmetic stays float32: the
// codes are widened in registers, and inp is not quantised, so that the only error is that of the weights. A weight is
// off by at most half a scale, amax / 254 (int8), or by 2^-4 of itself, and by 2^-10 scale where it is below 2^-6 scale
// (e4m3). Of 768 normal weights the largest is about 3.4 standard deviations, and int8's error at most 0.013 of one; of
// 128 the largest is smaller, and one outlier spoils 128 weights instead of a row.
//
// One order of summation. Lane l of a warp adds up the columns of every 32nd chunk, in ascending order, and the 32 sums
// are added in a butterfly. Neither depends on N: a row gets the same bits alone and among any others, in prefill and
// in decoding. cuBLASLt chooses its algorithm by the shape, and promises no such thing.
//
// GPU: a warp has two rows of the weight and up to 16 rows of inp. A lane loads 16 bytes of each row of the weight, of
// several chunks before it waits for the first, and before the launch in front of this one, which makes inp, has ended
// (early_launch.cuh, which says what may be read so early). Then it loads the same columns of each row of inp, which
// every warp reads and which therefore lie in the caches. 16 rows take 16 multiply-adds for each weight: the CUDA
// cores of an H100 (33 T a second) then take longer than its memory (3.3 TB a second) for codes of 8 bits. Where weight
// and inp both have 16 bits, tensor cores multiply: few_rows_mma.cu.
//
// CPU: one thread takes 64 rows of the weight and up to 16 rows of inp, 256 columns at a time: widens these columns of
// inp and of eight rows of the weight to float32, in the nearest cache, multiplies them, and takes the next eight rows.
// Sums have 16 lanes, those of vector instructions, and lie in the second cache.
#include "core/names.h"
#include "layers/chunk.cuh"
#include "layers/early_launch.cuh"
#include "layers/few_rows.cuh"

namespace {

constexpr int kScaleBlock = 128, kScaleShift = 7;  // columns with one scale, in the formats *_block
constexpr int kMostRows = 16;                      // of inp, that share each loaded weight

// ---------------------------------------------------------------------------------------------------------------------
// The product on the GPU

constexpr int kWarps = 4, kOutputs = 2;  // warps of a block, outputs of a warp

// Chunks of n columns that are on their way at a time, of each output: as many as there are registers for beside the
// sums, and, for kernels of columns one by one or of many multiplications for a chunk, as keep the code short.
template <int n, int kRows>
constexpr int kAhead = n == 1       ? 1
                       : kRows <= 4 ? 32 / n
                       : n == 4     ? 4
                                    : 1;

// Codes as floats. A GPU converts integers at an eighth of the rate of additions. So the code plus 128, a byte, becomes
// the lowest byte of the float 2^23, and 2^23 + 128 is subtracted: both are exact.
template <int n, class Code>
__device__ __forceinline__ void widen_codes(float (&w)[n], const Packed<Code, n>& codes) {
    if constexpr (std::is_same_v<Code, int8_t> && n % 4 == 0) {
        uint32_t words[n / 4];
        memcpy(words, &codes, n);
        for (int i = 0; i < n; ++i) {
            const uint32_t byte = (words[i / 4] ^ 0x80808080u) >> 8 * (i % 4) & 0xffu;
            w[i] = __uint_as_float(0x4b000000u | byte) - 8388736.0f;
        }
    } else {
        for (int i = 0; i < n; ++i) w[i] = to_float(codes.v[i]);
    }
}

// Column c of output o has scale[o * n_blocks + (c >> shift)], or 1 where there are no scales. n columns a load. Behind
// row N - 1 of inp that row is read again; what becomes of it there is not stored.
// Without the 2, blocks of a multiprocessor, ptxas stops at 128 registers, and spills one.
template <int n, int kRows, class T, class Code>
__global__ void __launch_bounds__(kWarps* kWarp, 2)
    few_rows_kernel(T* out, const T* inp, const Code* codes, const float* scale, const T* bias, int64_t N, int64_t C,
                    int64_t O, int64_t n_blocks, int shift) {
    let_next_start();
    const int lane = threadIdx.x % kWarp;
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kMostRows;
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp) * kOutputs;
    if (first >= O) return wait_for_previous();
    float sums[kOutputs][kRows] = {};
    bool waited = false;
    for (int64_t first_c = lane * n; first_c < C || !waited; first_c += kAhead<n, kRows> * kWarp * n) {
        Packed<Code, n> ahead[kAhead<n, kRows>][kOutputs] = {};
#pragma unroll
        for (int a = 0; a < kAhead<n, kRows>; ++a)
#pragma unroll
            for (int k = 0; k < kOutputs; ++k) {
                const int64_t c = first_c + a * kWarp * n;
                if (c < C) ahead[a][k] = load_packed<Code, n>(codes + min(first + k, O - 1) * C + c);
            }
        if (!waited) wait_for_previous();
        waited = true;
#pragma unroll
        for (int a = 0; a < kAhead<n, kRows>; ++a) {
            const int64_t c = first_c + a * kWarp * n;
            if (c >= C) break;
            float w[kOutputs][n];
#pragma unroll
            for (int k = 0; k < kOutputs; ++k) {
                const float s = scale ? scale[min(first + k, O - 1) * n_blocks + (c >> shift)] : 1.0f;
                widen_codes(w[k], ahead[a][k]);
                for (int i = 0; i < n; ++i) w[k][i] *= s;
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                float x[n];
                load_chunk(x, inp + min(first_row + r, N - 1) * C + c, C - c);
                for (int k = 0; k < kOutputs; ++k)
                    for (int i = 0; i < n; ++i) sums[k][r] = fmaf(x[i], w[k][i], sums[k][r]);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < kOutputs; ++k)
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float sum = warp_sum(sums[k][r]);
            const int64_t row = first_row + r, o = first + k;
            if (lane == 0 && row < N && o < O)
                out[row * O + o] = from_float<T>(sum + (bias ? to_float(bias[o]) : 0.0f));
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The product on the CPU

#ifdef CUDA_ON_CPU
constexpr int kLanes = 16, kStrip = 256;  // columns that are widened at a time
constexpr int kTileOutputs = 8, kBlockOutputs = 64;
constexpr int64_t kLead = 2 * kTileOutputs;  // codes of this many outputs further on are fetched to the cache

using Lanes = float[kLanes];
using Strip = float[kStrip];

// to_float, for e4m3 in few operations on 32 bits: its exponent and fraction, where a float32 has them, are the number
// times 2^-120, below the normal numbers, too.
template <class From>
__device__ __forceinline__ float widened(From x) {
    return to_float(x);
}
__device__ __forceinline__ float widened(__nv_fp8_e4m3 x) {
    const uint32_t bits = static_cast<uint32_t>(static_cast<int8_t>(x.__x)) << 20;  // the sign, repeated up to bit 31
    const float number = __uint_as_float(bits & 0x87f00000) * 0x1p120f;
    return (bits & 0x07f00000) == 0x07f00000 ? NAN : number;
}
// to = scale * from, for n columns that have one scale. This, add_products and fold_lanes are not inlined: so g++
// vectorises them, and keeps in registers what they work on.
template <class From>
[[gnu::noinline]] void widen(float* __restrict to, const From* __restrict from, int64_t n, float scale) {
    if (n == kScaleBlock) {  // the same loop, of a length that g++ knows
        for (int l = 0; l < kScaleBlock; ++l) to[l] = scale * widened(from[l]);
    } else {
        for (int64_t l = 0; l < n; ++l) to[l] = scale * widened(from[l]);
    }
}
// The same for a strip, whose columns may have several scales.
template <class From, class ScaleOf>
void widen_strip(Strip& to, const From* from, int64_t n, ScaleOf&& scale_of) {
    for (int64_t l = 0; l < n; l += kScaleBlock)
        widen(to + l, from + l, min(n - l, static_cast<int64_t>(kScaleBlock)), scale_of(l));
}

// sums[k * rows + r] += x[r] * w[k], lane by lane, for some outputs k and rows r; sums of the first strip start at 0.
// The outer loop is the one over lanes, which are independent: g++ does 8 or 16 of them at a time, and their sums stay
// in registers until the strip's end.
template <bool is_first, int kTile, int kRows>
[[gnu::noinline]] void add_products(Lanes* __restrict sums, int64_t rows, const Strip* __restrict x,
                                    const Strip* __restrict w) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) {
        float sum[kTile][kRows];
        for (int k = 0; k < kTile; ++k)
            for (int r = 0; r < kRows; ++r) sum[k][r] = is_first ? 0.0f : sums[k * rows + r][l];
#pragma GCC unroll 8
        for (int c = 0; c < kStrip; c += kLanes)
            for (int k = 0; k < kTile; ++k)
                for (int r = 0; r < kRows; ++r) sum[k][r] = fmaf(x[r][c + l], w[k][c + l], sum[k][r]);
        for (int k = 0; k < kTile; ++k)
            for (int r = 0; r < kRows; ++r) sums[k * rows + r][l] = sum[k][r];
    }
}
template <bool is_first>
void add_tile(Lanes* sums, int64_t rows, const Strip* x, const Strip* w) {
    if (rows == 1) return add_products<is_first, kTileOutputs, 1>(sums, 1, x, w);
    for (int k = 0; k < kTileOutputs; k += 4)
        for (int64_t r = 0; r < rows; r += 2) add_products<is_first, 4, 2>(sums + k * rows + r, rows, x + r, w + k);
}

// folded[k] = the sum of the lanes of sums[k * rows], in the order of fold_chunk.
[[gnu::noinline]] void fold_lanes(float* __restrict folded, const Lanes* __restrict sums, int64_t rows, int64_t n) {
    constexpr int kQuarter = kLanes / 4;
    float quarters[kBlockOutputs][kQuarter];
    for (int64_t k = 0; k < n; ++k)
        for (int l = 0; l < kQuarter; ++l) {
            const float* const lane = sums[k * rows] + l;
            quarters[k][l] = (lane[0] + lane[2 * kQuarter]) + (lane[kQuarter] + lane[3 * kQuarter]);
        }
    for (int64_t k = 0; k < n; ++k) folded[k] = fold_chunk<Sum>(quarters[k]);
}

template <class T, class Code>
__global__ void few_rows_cpu_kernel(T* out, const T* inp, const Code* codes, const float* scale, const T* bias,
                                    int64_t N, int64_t C, int64_t O, int64_t n_blocks, int shift) {
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kMostRows;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockOutputs;
    const int64_t inputs = min(N - first_row, static_cast<int64_t>(kMostRows));
    const int64_t rows = inputs == 1 ? 1 : round_up(inputs, 2);  // with a row of zeros, if need be
    const int64_t outputs = min(O - first, static_cast<int64_t>(kBlockOutputs));
    alignas(64) Lanes sums[kBlockOutputs * kMostRows];
    alignas(64) Strip x[kMostRows] = {}, w[kTileOutputs] = {};
    for (int64_t c = 0; c < C; c += kStrip) {
        const int64_t n = min(C - c, static_cast<int64_t>(kStrip));
        if (n < kStrip) memset(x, 0, sizeof x), memset(w, 0, sizeof w);  // what stands there behind the rows' end
        for (int64_t r = 0; r < inputs; ++r)
            widen_strip(x[r], inp + (first_row + r) * C + c, n, [](int64_t) { return 1.0f; });
        for (int64_t tile = 0; tile < outputs; tile += kTileOutputs) {
            // kLead outputs further on, or from the block's last ones on to its first ones in the next strip.
            const int64_t later = kLead * C + (tile + kLead < kBlockOutputs ? 0 : kStrip - kBlockOutputs * C);
            for (int64_t o = first + tile; o < first + min(tile + kTileOutputs, outputs); ++o) {
                const Code* const from = codes + o * C + c;
                for (int64_t l = 0; l < n; l += 64 / static_cast<int64_t>(sizeof(Code)))
                    __builtin_prefetch(from + later + l);
                widen_strip(w[o - first - tile], from, n,
                            [&](int64_t l) { return scale ? scale[o * n_blocks + ((c + l) >> shift)] : 1.0f; });
            }
            (c == 0 ? add_tile<true> : add_tile<false>)(sums + tile * rows, rows, x, w);
        }
    }
    for (int64_t r = 0; r < inputs; ++r) {
        float folded[kBlockOutputs];
        fold_lanes(folded, sums + r, rows, outputs);
        T* const to = out + (first_row + r) * O + first;
        for (int64_t k = 0; k < outputs; ++k)
            to[k] = from_float<T>(folded[k] + (bias ? to_float(bias[first + k]) : 0.0f));
    }
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// The quantising kernel: a warp (CPU: one thread) has a block of `n` columns, or what a row's end leaves of it.

constexpr int kQuantiseWarps = kOnCpu ? 1 : 4, kQuantiseLanes = kOnCpu ? 1 : kWarp;

template <class Code>
constexpr float kLargestCode = std::is_same_v<Code, int8_t> ? 127.0f : 448.0f;

__device__ __forceinline__ void set_code(int8_t& code, float x) {
    code = static_cast<int8_t>(rintf(fminf(fmaxf(x, -127.0f), 127.0f)));
}
__device__ __forceinline__ void set_code(__nv_fp8_e4m3& code, float x) { code = __nv_fp8_e4m3(x); }  // saturates

template <class Code, class T>
__global__ void quantise_weight_kernel(Code* codes, float* scale, const T* weight, int64_t C, int64_t n,
                                       int64_t n_blocks, int64_t n_scales) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kQuantiseWarps + threadIdx.x / kQuantiseLanes;
    if (i >= n_scales) return;
    const int lane = threadIdx.x % kQuantiseLanes;
    const int64_t first = i / n_blocks * C + i % n_blocks * n, count = min(n, C - i % n_blocks * n);
    // As bits, which have the order of the magnitudes: a NaN is above infinity, and is not lost in a maximum.
    unsigned most = 0;
    for (int64_t l = lane; l < count; l += kQuantiseLanes)
        most = max(most, __float_as_uint(to_float(weight[first + l])) & 0x7fffffffu);
    float amax = most < 0x7f800000u ? __uint_as_float(most) : INFINITY;
    if constexpr (kQuantiseLanes > 1) amax = warp_max(amax);
    const float s = amax < INFINITY ? amax / kLargestCode<Code> : NAN;
    for (int64_t l = lane; l < count; l += kQuantiseLanes)
        set_code(codes[first + l], s > 0.0f ? to_float(weight[first + l]) / s : 0.0f);
    if (lane == 0) scale[i] = s;
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

template <class T, class Code>
void launch_few_rows(const Tensor& out, const Tensor& inp, const Code* codes, const float* scale, const Tensor& bias,
                     int64_t n_blocks, int shift, cudaStream_t stream) {
    const int64_t N = inp.shape[0], C = inp.shape[1], O = out.shape[1];
    T* const to = out.ptr<T>();
    const T *const from = inp.ptr<T>(), *const bias_from = bias.ptr_or_null<T>();
    const auto grid = [&](int64_t outputs) {
        return dim3(static_cast<unsigned>(ceil_div(O, outputs)), static_cast<unsigned>(ceil_div(N, kMostRows)));
    };
    if constexpr (kOnCpu) {
#ifdef CUDA_ON_CPU
        few_rows_cpu_kernel<T, Code>
            <<<grid(kBlockOutputs), 1, 0, stream>>>(to, from, codes, scale, bias_from, N, C, O, n_blocks, shift);
#endif
    } else {
        const auto launch = [&]<int n, int kRows>(std::integer_sequence<int, n, kRows>) {
            EarlyLaunch(grid(kWarps * kOutputs), kWarps * kWarp, 0, stream)(
                "few_rows_kernel", few_rows_kernel<n, kRows, T, Code>, to, from, codes, scale, bias_from, N, C, O,
                n_blocks, shift);
        };
        const auto launch_rows = [&]<int n>(std::integer_sequence<int, n>) {
            if (N == 1) launch(std::integer_sequence<int, n, 1>());
            else if (N <= 4) launch(std::integer_sequence<int, n, 4>());
            else launch(std::integer_sequence<int, n, kMostRows>());
        };
        constexpr int kPack = Packed<Code>::n;
        if (C % kPack == 0) launch_rows(std::integer_sequence<int, kPack>());
        else launch_rows(std::integer_sequence<int, 1>());
    }
    const int64_t scale_bytes = scale ? O * n_blocks * int64_t{sizeof(float)} : 0;
    launched(kOnCpu ? "few_rows_cpu_kernel" : "few_rows_kernel",
             {.reads = bytes_of(inp, bias) + O * C * int64_t{sizeof(Code)} + scale_bytes,
              .writes = bytes_of(out),
              .flops = 2.0 * static_cast<double>(N) * static_cast<double>(C * O)});
}

// All but the weight.
void expect_few_rows(const char* name, const Tensor& out, const Tensor& inp, const Tensor& bias, int64_t O) {
    expect(name, "inp", inp, inp.dtype, {-1, -1});
    const int64_t N = inp.shape[0];
    expect(name, "out", out, inp.dtype, {N, O});
    if (bias) expect(name, "bias", bias, inp.dtype, {O});
    expect_aligned(name, {{"out", out}, {"inp", inp}});
    check(N <= 65535 * kMostRows, name, ": inp has ", N, " rows, and at most ", 65535 * kMostRows,
          " can be multiplied at a time");
}

template <class F>
void dispatch_codes(const char* name, const Tensor& codes, F&& f) {
    if (codes.dtype == DType::i8) return f(int8_t{});
    check(codes.dtype == DType::e4m3, name, ": codes are ", dtype_name(codes.dtype), ", expected i8 or e4m3");
    f(__nv_fp8_e4m3{});
}

// The scales of a row: one, or one for each block.
int64_t expect_scales(const char* name, const QuantisedWeight& weight) {
    expect(name, "codes", weight.codes, weight.codes.dtype, {-1, -1});
    const int64_t O = weight.codes.shape[0], n_blocks = ceil_div(weight.codes.shape[1], kScaleBlock);
    expect_aligned(name, {{"codes", weight.codes}});
    if (weight.scale.ndim == 1) {
        expect(name, "scale", weight.scale, DType::f32, {O});
        return 1;
    }
    expect(name, "scale", weight.scale, DType::f32, {O, n_blocks});
    return n_blocks;
}

constexpr Named<WeightFormat> kFormatNames[] = {{"none", WeightFormat::none},
                                                {"int8", WeightFormat::int8},
                                                {"fp8", WeightFormat::fp8},
                                                {"int8-block", WeightFormat::int8_block},
                                                {"fp8-block", WeightFormat::fp8_block}};

}  // namespace

void few_rows_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, cudaStream_t stream) {
    const char* name = "few_rows_forward";
    expect_few_rows(name, out, inp, bias, weight.shape[0]);
    expect(name, "weight", weight, inp.dtype, {-1, inp.shape[1]});
    expect_aligned(name, {{"weight", weight}});
    if (out.n() == 0) return;
    dispatch(inp.dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (kOnCpu || std::is_same_v<T, float>)
            launch_few_rows<T, T>(out, inp, weight.ptr<T>(), nullptr, bias, 1, 0, stream);
        else few_rows_mma_forward(out, inp, weight, bias, stream);
    });
}

void few_rows_activated_forward(Tensor out, Tensor before, Tensor inp, Tensor weight, Tensor bias,
                                Activation activation, cudaStream_t stream) {
    const char* name = "few_rows_activated_forward";
    const bool gated = activation == Activation::swiglu;
    check(activation != Activation::none, name, ": no activation: use few_rows_forward");
    expect_few_rows(name, before, inp, bias, weight.shape[0]);
    expect(name, "weight", weight, inp.dtype, {-1, inp.shape[1]});
    check(!gated || weight.shape[0] % 2 == 0, name, ": the weight ", weight, " does not have two equal halves");
    expect(name, "out", out, inp.dtype, {inp.shape[0], weight.shape[0] / (gated ? 2 : 1)});
    expect_aligned(name, {{"out", out}, {"weight", weight}});
    if (!kOnCpu && inp.dtype != DType::f32 && inp.shape[0] <= kMostRows && out.n() > 0)
        return few_rows_mma_forward(out, inp, weight, bias, stream, 0, activation);
    few_rows_forward(before, inp, weight, bias, stream);
    if (gated) swiglu_forward(out, before, stream);
    else gelu_forward(out, before, stream);
}

void few_rows_normed_forward(Tensor out, Tensor before, const NormInFront& norm, Tensor weight, Tensor bias,
                             Activation activation, cudaStream_t stream) {
    const char* name = "few_rows_normed_forward";
    const bool gated = activation == Activation::swiglu;
    const int64_t N = norm.inp.shape[0], O = weight.shape[0], C = weight.shape[1];
    expect(name, "inp", norm.inp, weight.dtype, {N, C});
    if (norm.branch) expect(name, "branch", norm.branch, weight.dtype, {N, C});
    if (norm.branch || norm.sum) expect(name, "sum", norm.sum, weight.dtype, {N, C});
    expect(name, "norm.weight", norm.weight, weight.dtype, {C});
    if (norm.bias) expect(name, "norm.bias", norm.bias, weight.dtype, {C});
    check(!gated || O % 2 == 0, name, ": the weight ", weight, " does not have two equal halves");
    expect(name, "out", out, weight.dtype, {N, gated ? O / 2 : O});
    expect_few_rows(name, gated ? before : out, norm.inp, bias, O);
    expect_aligned(name, {{"out", out},
                          {"branch", norm.branch},
                          {"sum", norm.sum},
                          {"norm.weight", norm.weight},
                          {"norm.bias", norm.bias},
                          {"weight", weight}});
    if (!kOnCpu && weight.dtype != DType::f32 && few_rows_mma_takes_norm(norm, weight)) {
        check(norm.sum.data != norm.inp.data || !norm.branch, name, ": sum is inp, which all blocks read");
        return few_rows_mma_normed_forward(out, norm, weight, bias, stream, 0, activation);
    }
    if (norm.bias)
        layernorm_forward(norm.out, norm.sum, norm.mean, norm.rstd, norm.inp, norm.branch, norm.weight, norm.bias,
                          norm.eps, stream);
    else rmsnorm_forward(norm.out, norm.sum, norm.rstd, norm.inp, norm.branch, norm.weight, norm.eps, stream);
    if (activation == Activation::none) few_rows_forward(out, norm.out, weight, bias, stream);
    else few_rows_activated_forward(out, before, norm.out, weight, bias, activation, stream);
}

void quantised_linear_forward(Tensor out, Tensor inp, const QuantisedWeight& weight, Tensor bias, cudaStream_t stream) {
    const char* name = "quantised_linear_forward";
    expect_few_rows(name, out, inp, bias, weight.codes.shape[0]);
    expect(name, "codes", weight.codes, weight.codes.dtype, {-1, inp.shape[1]});
    const int64_t n_blocks = expect_scales(name, weight);
    if (out.n() == 0) return;
    const int shift = weight.scale.ndim == 1 ? 62 : kScaleShift;  // 62: every column is in block 0
    dispatch_codes(name, weight.codes, [&](auto code) {
        using Code = decltype(code);
        dispatch(inp.dtype, [&](auto zero) {
            using T = decltype(zero);
            launch_few_rows<T, Code>(out, inp, weight.codes.ptr<Code>(), weight.scale.ptr<float>(), bias, n_blocks,
                                     shift, stream);
        });
    });
}

void quantise_weight(const QuantisedWeight& to, Tensor weight, cudaStream_t stream) {
    const char* name = "quantise_weight";
    const int64_t n_blocks = expect_scales(name, to), C = to.codes.shape[1], n_scales = to.scale.n();
    expect(name, "weight", weight, weight.dtype, {to.codes.shape[0], C});
    if (to.codes.n() == 0) return;
    const unsigned blocks = static_cast<unsigned>(narrow(ceil_div(n_scales, kQuantiseWarps), "blocks"));
    dispatch_codes(name, to.codes, [&](auto code) {
        using Code = decltype(code);
        dispatch(weight.dtype, [&](auto zero) {
            using T = decltype(zero);
            quantise_weight_kernel<Code, T><<<blocks, kQuantiseWarps * kQuantiseLanes, 0, stream>>>(
                to.codes.ptr<Code>(), to.scale.ptr<float>(), weight.ptr<T>(), C, to.scale.ndim == 1 ? C : kScaleBlock,
                n_blocks, n_scales);
        });
    });
    launched("quantise_weight_kernel", {.reads = bytes_of(weight), .writes = bytes_of(to.codes, to.scale)});
}

QuantisedWeight take_quantised_weight(Arena& arena, WeightFormat format, int64_t O, int64_t C) {
    check(format != WeightFormat::none,
          "take_quantised_weight: the format is none: use int8, fp8, int8-block or fp8-block");
    const bool int8 = format == WeightFormat::int8 || format == WeightFormat::int8_block;
    const bool per_row = format == WeightFormat::int8 || format == WeightFormat::fp8;
    QuantisedWeight weight;
    weight.codes = arena.take("quantised weights", int8 ? DType::i8 : DType::e4m3, {O, C});
    weight.scale = per_row ? arena.take("scales of weights", DType::f32, {O})
                           : arena.take("scales of weights", DType::f32, {O, ceil_div(C, kScaleBlock)});
    return weight;
}

WeightFormat weight_format_from_name(const std::string& name) {
    return find_named(kFormatNames, "--weights", name).value;
}

const char* weight_format_name(WeightFormat format) { return name_of(kFormatNames, format); }
