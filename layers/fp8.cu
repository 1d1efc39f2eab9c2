// fp8: linear layers on 8-bit floats.      (Micikevicius et al. 2022, arXiv:2209.05433; DeepSeek-V3, arXiv:2412.19437)
//
//   forward     out      = Q(inp) Q(weight)^T + bias
//   backward    dinp     = Q(dout) Q(weight)
//               dweight += Q(dout)^T Q(inp)            Q(x): x rounded to 8 bits
//
// As plain loops, with one scale per tensor:
//
//   for x in (inp, weight):  s = largest power of two with s * max|x| <= 448;  codes = round_e4m3(s * x)
//   for n < N, o < O:
//       sum = 0;  for c < C:  sum += inp_codes[n][c] * weight_codes[o][c]
//       out[n][o] = sum / s_inp / s_weight + bias[o]
//
// Tensor cores multiply 8-bit floats twice as fast as 16-bit ones, and half as many bytes are moved. The formats:
//
//   e4m3    3 mantissa bits, up to 448,   down to 2^-9     weights and activations: digits matter
//   e5m2    2 mantissa bits, up to 57344, down to 2^-16    gradients: range matters
//
// An activation gradient of 1e-7 would be zero in both. So a scale s moves the numbers into the format's range: the
// codes are round(s x), and the product is multiplied by 1/s. With amax = max |x| the best s is one that just fits:
//
//   s = the largest power of two with s amax <= 448 (57344)        s = 1 where amax = 0
//
// A power of two, because then scaling itself rounds nothing and 1/s is exact. What remains is the rounding of Q: its
// relative error is at most 2^-4 in e4m3 and 2^-3 in e5m2, for numbers above 2^-13 (2^-28) of the amax. The errors of
// the K terms of a product are independent, so the relative error of their sum is no larger, as long as the terms do
// not cancel more than random ones do. Three recipes say which numbers share a scale, and whose amax it comes from:
//
//   current    the tensor's own. Nothing saturates, but the tensor is read once for its amax before it is read for its
//              codes.
//   delayed    the largest of the last 16 steps. One read: codes and this step's amax in the same pass. The amax counts
//              from the next step on; what has grown past the old one saturates. The first step has no history and
//              takes the current amax: with s = 1 its gradients would all be rounded to zero. During a step the scale
//              does not move, so that the order of micro-batches does not matter.
//   block      of 128 numbers along K, of 128 x 128 for weights, each its own. An outlier costs its 127 neighbours, not
//              the tensor, and in so small a block e4m3's range is enough for gradients, which gain a bit of precision.
//              The tensor cores' sum over each block of K is scaled before it is added to the others: only Hopper can
//              do that.
//
// Infinity and NaN. A saturating conversion would turn an overflow into 448, and hide it. Here both become NaN; the
// products pass it on to the gradient norm, and the weights are not updated. An amax is that of the finite numbers
// only, so that such a step does not destroy the history.
//
// What stays in 16 or 32 bits, and why:
//
//   embedding, lm head          looking up rows multiplies nothing; a logit's error is one in an exponent of the loss
//   norms, softmax, GELU, rope  limited by memory, so 8-bit arithmetic gains nothing; many sums and exponentials
//   attention's two products    a relative error of 2^-4 in a score of 8 is half a unit in an exponent
//   residual stream             small numbers are added to large ones, twice per layer: 3 bits would lose most of them
//   bias and its gradient       O numbers; the gradient is summed from the 16-bit dout
//   weights, their gradients,   an update is some 1e-3 of a weight, and would vanish in 3 bits: weights are quantised
//   optimizer states            again after each step, from 16 bits
//   sums inside the products    float32
//
// Layouts. The tensor cores need K, the dimension that is summed over, contiguous in both factors (matmul.cu): C in the
// forward, O for dinp, the tokens N for dweight. So besides the codes of x there are those of x^T:
//
//   out: inp (N, C), weight (O, C)     dinp: dout (N, O), weight^T (C, O)     dweight: dout^T (O, N), inp^T (C, N)
//
// The square blocks of a weight are those of its transpose: both copies hold the same numbers, 2 bytes per weight until
// the next step. The blocks of dout^T run along N and not along O: they are quantised separately, from the 16-bit
// numbers and not from codes.
//
// Bytes: 2 read and 1 written per number (current: 4 read), compared with the product's 2 flops for each output
// channel. In layers narrower than about 1000 channels quantising takes longer than the product gains.
#include "core/names.h"
#include "layers/chunk.cuh"
#include "layers/layers.h"

#include <algorithm>

namespace {

constexpr int kTile = 128;  // a block of threads quantises 128 x 128 numbers, which in a weight have one scale
// A thread's patch of the tile. GPU: 8 x 8 each, 16 patches per row. CPU: one thread, no barriers.
constexpr int kPatch = kOnCpu ? kTile : 8, kPatches = kTile / kPatch, kTileThreads = kPatches * kPatches;
constexpr int kAmaxThreads = kOnCpu ? 1 : 256;
constexpr int64_t kAmaxSpan = 16384;  // numbers per block

// ---------------------------------------------------------------------------------------------------------------------
// Scales. |x| and amax are handled as float32 bits: the bits of non-negative floats have the same order as the floats,
// and an integer maximum does not depend on the order, whether it is computed in registers or by atomicMax.

__device__ __forceinline__ unsigned finite_magnitude(float x) {
    const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
    return bits < 0x7f800000u ? bits : 0u;
}

// most[j] = max(most[j], finite |x[j]|). (On the CPU device a function of its own: g++ would exchange its loop with the
// one over rows around it, and then make no SIMD instructions.)
template <int n>
#ifdef CUDA_ON_CPU
[[gnu::noinline]]
#else
__device__ __forceinline__
#endif
void raise(unsigned (&most)[n], const float (&x)[n]) {
    for (int j = 0; j < n; ++j) most[j] = max(most[j], finite_magnitude(x[j]));
}

// Both largest numbers are 1.75 powers of two, 448 = 1.75 2^8 and 57344 = 1.75 2^15. So for an amax of m 2^e, 1 <= m <
// 2, the scale is s = 2^(8 - e), or half of that if m > 1.75: in that case adding 0.25 minus one unit to m carries into
// the exponent.
template <class Code>
__device__ __forceinline__ int scale_exponent(unsigned amax) {
    constexpr int top = std::is_same_v<Code, __nv_fp8_e4m3> ? 8 : 15;
    if (amax == 0) return 0;
    return min(top + 127 - static_cast<int>((amax + 0x1fffffu) >> 23), 126);  // 126: 1/s is not subnormal either
}
__device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(static_cast<unsigned>(127 + exponent) << 23);
}

template <class Code>
__device__ __forceinline__ Code quantise(float x, float scale) {
    return Code(__float_as_uint(fabsf(x)) < 0x7f800000u ? x * scale : NAN);  // rounds to nearest even, saturates
}

// ---------------------------------------------------------------------------------------------------------------------
// amax = max(amax, largest finite |x|), or `known` where there is one. amax starts as 0.

template <class T>
__global__ void amax_kernel(float* amax, const T* inp, int64_t n, const float* known) {
    if (known && *known > 0.0f) {
        if (blockIdx.x == 0 && threadIdx.x == 0) *amax = *known;
        return;
    }
    constexpr int kN = kChunk<T>;
    const int64_t first = blockIdx.x * kAmaxSpan, last = min(first + kAmaxSpan, n);
    unsigned most[kN] = {};
    for (int64_t i = first + threadIdx.x * kN; i < last; i += blockDim.x * kN) {
        float x[kN];
        load_chunk(x, inp + i, n - i);
        raise(most, x);
    }
    for (int l = 1; l < kN; ++l) most[0] = max(most[0], most[l]);
    if constexpr (kAmaxThreads > 1) {
        __shared__ float scratch[kWarp];
        most[0] = __float_as_uint(block_reduce<Max>(__uint_as_float(most[0]), scratch));
    }
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(amax), most[0]);
}

// ---------------------------------------------------------------------------------------------------------------------
// The quantising kernel: inp (rows, cols) -> codes (rows, cols), codes_t (cols, rows), or both.

enum class Shared { tensor, row, column, square };  // which numbers of a tile have one scale

struct Target {
    void *codes, *codes_t;
    float *scale, *scale_t;            // what the product multiplies by: 1/s. Their layout: MatmulOptions
    int64_t scale_cols, scale_t_cols;  // square
    const float* amax;                 // tensor
    float* recorded;                   // tensor, optional
};

// Writes a patch's rows of codes_t. On the GPU neighbouring threads hold neighbouring columns, but must write along
// rows: the tile goes through shared memory. There a row of the transposed tile has 16 pieces of 8 bytes; thread row h
// writes piece h. If the pieces were stored in order, the 16 threads of a row of patches would all write to the same
// two banks; so piece h of row c is stored at h ^ (c / 8), which is another place for each of them. A thread reads two
// pieces at a time, in order or swapped.
template <class Code>
__device__ __forceinline__ void store_transposed(Code* codes_t, const Code (&codes)[kPatch][kPatch], int64_t first_row,
                                                 int64_t first_col, int64_t rows, int64_t cols, int y, int x) {
    if constexpr (kTileThreads == 1) {
        for (int64_t j = 0; j < min(cols - first_col, static_cast<int64_t>(kTile)); ++j)
            for (int64_t i = 0; i < min(rows - first_row, static_cast<int64_t>(kTile)); ++i)
                codes_t[(first_col + j) * rows + first_row + i] = codes[i][j];
    } else {
        using Piece = Packed<Code, 8>;
        using Pair = Packed<Code, 16>;
        __shared__ Pair tile[kTile][kTile / 16];
        for (int j = 0; j < kPatch; ++j) {
            Piece piece;
            for (int i = 0; i < kPatch; ++i) piece.v[i] = codes[i][j];
            store_packed(reinterpret_cast<Code*>(tile[x * kPatch + j]) + (y ^ x) * 8, piece);
        }
        __syncthreads();  // the tile is complete: each thread reads what other threads wrote
        for (int k = threadIdx.x; k < kTile * kTile / 16; k += kTileThreads) {
            const int c = k / (kTile / 16), q = k % (kTile / 16), group = c / 8;
            Pair pair = tile[c][q ^ (group >> 1)];
            if (group & 1)
                for (int i = 0; i < 8; ++i) {
                    const Code low = pair.v[i];
                    pair.v[i] = pair.v[i + 8], pair.v[i + 8] = low;
                }
            const int64_t col = first_col + c, row = first_row + 16 * q;
            if (col < cols && row < rows) store_packed(codes_t + col * rows + row, pair);
        }
    }
}

// Writes a patch's rows of codes: its first number is inp[row][col].
template <class Code>
__device__ __forceinline__ void store_straight(Code* to, const Code (&codes)[kPatch][kPatch], int64_t row, int64_t col,
                                               int64_t rows, int64_t cols) {
    for (int i = 0; i < kPatch; ++i) {
        if (row + i >= rows || col >= cols) continue;
        Code* const at = to + (row + i) * cols + col;
        if constexpr (kOnCpu) {
            std::copy_n(codes[i], min(cols - col, static_cast<int64_t>(kPatch)), at);
        } else {
            Packed<Code, kPatch> pack;
            for (int j = 0; j < kPatch; ++j) pack.v[j] = codes[i][j];
            store_packed(at, pack);
        }
    }
}

template <class T, class Code, Shared kShared, bool kStraight, bool kTransposed>
__global__ void __launch_bounds__(kTileThreads) quantise_kernel(Target to, const T* inp, int64_t rows, int64_t cols) {
    const int y = threadIdx.x / kPatches, x = threadIdx.x % kPatches;  // of the patch
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTile,
                  first_col = static_cast<int64_t>(blockIdx.x) * kTile;
    const int64_t row = first_row + y * kPatch, col = first_col + x * kPatch;

    float values[kPatch][kPatch];  // 0 outside of inp
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
        load_chunk(values[i], inp + (row + i) * cols + col, row + i < rows ? cols - col : 0);

    Code codes[kPatch][kPatch];
    if constexpr (kShared == Shared::row) {
        for (int i = 0; i < kPatch; ++i) {
            unsigned most = 0;
            for (int j = 0; j < kPatch; ++j) most = max(most, finite_magnitude(values[i][j]));
            if constexpr (kPatches > 1) most = __float_as_uint(warp_max(__uint_as_float(most), kPatches));
            const int exponent = scale_exponent<Code>(most);
            for (int j = 0; j < kPatch; ++j) codes[i][j] = quantise<Code>(values[i][j], power_of_two(exponent));
            if (x == 0 && row + i < rows) to.scale[blockIdx.x * rows + row + i] = power_of_two(-exponent);
        }
    } else if constexpr (kShared == Shared::column) {
        unsigned most[kPatch] = {};
        for (int i = 0; i < kPatch; ++i) raise(most, values[i]);
        if constexpr (kPatches > 1) {
            __shared__ unsigned parts[kPatches][kTile];
            for (int j = 0; j < kPatch; ++j) parts[y][x * kPatch + j] = most[j];
            __syncthreads();  // every patch's maxima are complete; thread c takes column c alone
            if (threadIdx.x < kTile)
                for (int k = 1; k < kPatches; ++k)
                    parts[0][threadIdx.x] = max(parts[0][threadIdx.x], parts[k][threadIdx.x]);
            __syncthreads();  // row 0 has the columns' maxima
            for (int j = 0; j < kPatch; ++j) most[j] = parts[0][x * kPatch + j];
        }
        float scale[kPatch];
        for (int j = 0; j < kPatch; ++j) {
            const int exponent = scale_exponent<Code>(most[j]);
            scale[j] = power_of_two(exponent);
            if (y == 0 && col + j < cols) to.scale_t[blockIdx.y * cols + col + j] = power_of_two(-exponent);
        }
        for (int i = 0; i < kPatch; ++i)
            for (int j = 0; j < kPatch; ++j) codes[i][j] = quantise<Code>(values[i][j], scale[j]);
    } else {
        unsigned most = 0;
        if (kShared == Shared::square || to.recorded) {
            unsigned columns[kPatch] = {};
            for (int i = 0; i < kPatch; ++i) raise(columns, values[i]);
            for (int j = 0; j < kPatch; ++j) most = max(most, columns[j]);
            if constexpr (kTileThreads > 1) {
                __shared__ float scratch[kWarp];
                most = __float_as_uint(block_reduce<Max>(__uint_as_float(most), scratch));
            }
        }
        const int exponent = scale_exponent<Code>(kShared == Shared::square ? most : __float_as_uint(*to.amax));
        for (int i = 0; i < kPatch; ++i)
            for (int j = 0; j < kPatch; ++j) codes[i][j] = quantise<Code>(values[i][j], power_of_two(exponent));
        if (threadIdx.x == 0) {
            if constexpr (kShared == Shared::square) {
                to.scale[blockIdx.y * to.scale_cols + blockIdx.x] = power_of_two(-exponent);
                to.scale_t[blockIdx.x * to.scale_t_cols + blockIdx.y] = power_of_two(-exponent);
            } else {
                if (blockIdx.x == 0 && blockIdx.y == 0) *to.scale = power_of_two(-exponent);
                if (to.recorded) atomicMax(reinterpret_cast<unsigned*>(to.recorded), most);
            }
        }
    }

    if constexpr (kStraight) store_straight(static_cast<Code*>(to.codes), codes, row, col, rows, cols);
    if constexpr (kTransposed)
        store_transposed(static_cast<Code*>(to.codes_t), codes, first_row, first_col, rows, cols, y, x);
}

// Advances the amax histories between two steps, one thread per state: the oldest amax is dropped, this step's is
// added.
__global__ void advance_kernel(float* states, int64_t n) {
    const int64_t i = global_thread();
    if (i >= n) return;
    float* const state = states + i * kFp8StateN;
    float* const history = state + 2;
    float most = state[1];
    for (int64_t k = kFp8History - 1; k > 0; --k) {
        history[k] = history[k - 1];
        most = fmaxf(most, history[k]);
    }
    history[0] = state[1];
    state[0] = most;
    state[1] = 0.0f;
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

void expect_16_bits(const char* operation, const Tensor& inp) {
    check(inp.dtype == DType::bf16 || inp.dtype == DType::f16, operation, ": inp is ", dtype_name(inp.dtype),
          ", expected bf16 or f16");
}

template <class Code, Shared kShared, bool kStraight, bool kTransposed>
void launch_quantise(const Target& to, const Tensor& inp, cudaStream_t stream) {
    const int64_t rows = inp.shape[0], cols = inp.shape[1];
    const dim3 grid(static_cast<unsigned>(ceil_div(cols, kTile)), static_cast<unsigned>(ceil_div(rows, kTile)));
    expect_16_bits("fp8_quantise", inp);
    dispatch_16_bits(inp.dtype, [&](auto zero) {
        using T = decltype(zero);
        quantise_kernel<T, Code, kShared, kStraight, kTransposed>
            <<<grid, kTileThreads, 0, stream>>>(to, inp.ptr<T>(), rows, cols);
    });
    const int64_t in_rows = grid.x * rows, in_cols = grid.y * cols, squares = int64_t{grid.x} * grid.y;
    const int64_t scales = kShared == Shared::row      ? in_rows
                           : kShared == Shared::column ? in_cols
                           : kShared == Shared::square ? 2 * squares
                                                       : 1;
    const int64_t recorded = to.recorded ? 4 : 0, codes = inp.n() * ((kStraight ? 1 : 0) + (kTransposed ? 1 : 0));
    launched("quantise_kernel", {.reads = bytes_of(inp) + (kShared == Shared::tensor ? 4 : 0) + recorded,
                                 .writes = codes + 4 * scales + recorded});
}

// The message says what a user can change: the size, or the dtype.
void expect_multiple(const char* operation, const char* what, int64_t value, int64_t of) {
    check(value % of == 0, operation, ": fp8 products need ", what, " that are a multiple of ", of, ", not ", value,
          ": choose another size, or --dtype bf16");
}
constexpr int64_t kScaledRows = 4;  // cuBLASLt's scales of blocks are for a multiple of this many rows
constexpr const char* kTokens = "tokens of a micro-batch (sequences times length)";

bool is_block(Fp8Recipe recipe) { return recipe == Fp8Recipe::block; }
DType gradient_dtype(Fp8Recipe recipe) { return is_block(recipe) ? DType::e4m3 : DType::e5m2; }

// Returns pieces of a scratch tensor, or only counts them if there is no memory (data == nullptr).
struct Pieces {
    char* data = nullptr;
    int64_t used_bytes = 0;
    Tensor take(DType dtype, std::initializer_list<int64_t> dims) {
        const Tensor piece = make_tensor(data ? data + used_bytes : nullptr, dtype, dims);
        used_bytes += round_up(static_cast<int64_t>(piece.bytes()), 16);
        return piece;
    }
    Fp8Matrix take_matrix(Fp8Recipe recipe, DType dtype, int64_t rows, int64_t K) {
        Fp8Matrix matrix;
        matrix.codes = take(dtype, {rows, K});
        matrix.scale = is_block(recipe) ? take(DType::f32, {ceil_div(K, 128), rows}) : take(DType::f32, {1});
        matrix.mode = is_block(recipe) ? MatmulScale::row128 : MatmulScale::tensor;
        return matrix;
    }
};
Pieces pieces_of(const char* operation, const Tensor& scratch, Fp8Recipe recipe, int64_t N, int64_t C, int64_t O) {
    return {static_cast<char*>(scratch_as(operation, scratch, {fp8_linear_scratch_n(recipe, N, C, O)}).data)};
}

// Checks what the per-tensor recipes need in addition to the matrices.
void expect_saved(const char* operation, Fp8Recipe recipe, const Tensor& saved) {
    check(recipe != Fp8Recipe::none, operation, ": the recipe is none: linear.cu has the 16-bit products");
    if (!is_block(recipe)) expect(operation, "saved", saved, DType::f32, {2});
}

// Of the state: the amax of earlier steps (place 0), and this step's (1); nothing unless scaling is delayed.
Tensor of_state(Fp8Recipe recipe, const Tensor& state, int64_t which, int64_t place) {
    if (recipe != Fp8Recipe::delayed) return {};
    expect("fp8_linear", "state", state, DType::f32, {2, kFp8StateN});
    return state.view({2 * kFp8StateN}).slice(which * kFp8StateN + place, 1);
}

// x, which is inp (which = 0) or dout (1), quantised for its first use in this step. saved[which] becomes its amax.
void quantise_first(const Fp8Matrix& to, const Tensor& x, int64_t which, Fp8Recipe recipe, const Tensor& saved,
                    const Tensor& state, bool record, AmaxFrom amax_from, cudaStream_t stream) {
    if (is_block(recipe)) return fp8_quantise(to, false, x, {}, {}, stream);
    if (amax_from == AmaxFrom::here) fp8_linear_amax(saved, which, x, recipe, state, stream);
    fp8_quantise(to, false, x, saved.slice(which, 1), record ? of_state(recipe, state, which, 1) : Tensor{}, stream);
}

MatmulOptions product_of(const Fp8Matrix& a, const Fp8Matrix& b) {
    return {
        .transpose_b = true, .a_scale = a.scale, .b_scale = b.scale, .a_scale_mode = a.mode, .b_scale_mode = b.mode};
}

}  // namespace

void expect_fp8_device(Fp8Recipe recipe) {
    if (recipe != Fp8Recipe::none) expect_fp8_device(is_block(recipe));
}

void expect_fp8_sizes(Fp8Recipe recipe, int64_t N, int64_t C, int64_t O) {
    if (recipe == Fp8Recipe::none) return;
    expect_multiple("model", "output channels of a linear layer", O, 16);
    expect_multiple("model", "input channels of a linear layer", C, 16);
    expect_multiple("model", kTokens, N, 16);
    constexpr int64_t kMost = int64_t{65535} * kTile;  // a GPU's grids have at most 65535 rows of blocks
    check(N <= kMost, "model: a micro-batch of ", N, " tokens, and the casts of fp8 take at most ", kMost,
          ": use a smaller --micro-batch");
}

constexpr Named<Fp8Recipe> kRecipeNames[] = {{"none", Fp8Recipe::none},
                                             {"delayed", Fp8Recipe::delayed},
                                             {"current", Fp8Recipe::current},
                                             {"block", Fp8Recipe::block}};
Fp8Recipe fp8_recipe_from_name(const std::string& name) { return find_named(kRecipeNames, "--fp8", name).value; }
const char* fp8_recipe_name(Fp8Recipe recipe) { return name_of(kRecipeNames, recipe); }

void fp8_amax(Tensor amax, Tensor inp, Tensor known, cudaStream_t stream) {
    const char* name = "fp8_amax";
    expect(name, "amax", amax, DType::f32, {1});
    if (known) expect(name, "known", known, DType::f32, {1});
    check(inp.data, name, ": inp is ", inp);
    expect_aligned(name, {{"inp", inp}});
    set_to_zero(amax, stream);
    const unsigned n_blocks = static_cast<unsigned>(ceil_div(inp.n(), kAmaxSpan));
    if (n_blocks == 0) return;
    expect_16_bits(name, inp);
    dispatch_16_bits(inp.dtype, [&](auto zero) {
        using T = decltype(zero);
        amax_kernel<T><<<n_blocks, kAmaxThreads, 0, stream>>>(amax.ptr<float>(), inp.ptr<T>(), inp.n(),
                                                              known.ptr_or_null<float>());
    });
    // What is known is 0 in the first step alone.
    launched("amax_kernel", {.reads = known ? bytes_of(known) : bytes_of(inp, amax), .writes = bytes_of(amax)});
}

void fp8_quantise(const Fp8Matrix& to, bool transpose, Tensor inp, Tensor amax, Tensor recorded, cudaStream_t stream) {
    const char* name = "fp8_quantise";
    expect(name, "inp", inp, inp.dtype, {-1, -1});
    const int64_t rows = inp.shape[0], cols = inp.shape[1];
    const bool is_e5m2 = to.codes.dtype == DType::e5m2;
    expect(name, "codes", to.codes, is_e5m2 ? DType::e5m2 : DType::e4m3,
           {transpose ? cols : rows, transpose ? rows : cols});
    expect_aligned(name, {{"inp", inp}, {"codes", to.codes}});
    expect_multiple(name, "columns", cols, 16);
    if (transpose) expect_multiple(name, "rows", rows, 16);
    if (inp.n() == 0) return;
    Target target{};
    // The kernel can write codes and their transpose in one pass; here only one of the two is needed.
    (transpose ? target.codes_t : target.codes) = to.codes.data;
    if (to.mode == MatmulScale::tensor) {
        expect(name, "scale", to.scale, DType::f32, {1});
        expect(name, "amax", amax, DType::f32, {1});
        if (recorded) expect(name, "recorded", recorded, DType::f32, {1});
        target.scale = to.scale.ptr<float>();
        target.amax = amax.ptr<float>();
        target.recorded = recorded.ptr_or_null<float>();
        if (transpose && is_e5m2) launch_quantise<__nv_fp8_e5m2, Shared::tensor, false, true>(target, inp, stream);
        else if (transpose) launch_quantise<__nv_fp8_e4m3, Shared::tensor, false, true>(target, inp, stream);
        else if (is_e5m2) launch_quantise<__nv_fp8_e5m2, Shared::tensor, true, false>(target, inp, stream);
        else launch_quantise<__nv_fp8_e4m3, Shared::tensor, true, false>(target, inp, stream);
    } else {
        check(to.mode == MatmulScale::row128 && !is_e5m2, name,
              ": blocks of 128 are e4m3, and those of weights not made here");
        expect(name, "scale", to.scale, DType::f32, {ceil_div(to.codes.shape[1], 128), to.codes.shape[0]});
        (transpose ? target.scale_t : target.scale) = to.scale.ptr<float>();
        if (transpose) launch_quantise<__nv_fp8_e4m3, Shared::column, false, true>(target, inp, stream);
        else launch_quantise<__nv_fp8_e4m3, Shared::row, true, false>(target, inp, stream);
    }
}

Fp8Weight take_fp8_weight(Arena& arena, Fp8Recipe recipe, int64_t O, int64_t C) {
    const char *name = "fp8 weights", *scales = "fp8 scales of weights";
    check(recipe != Fp8Recipe::none, "take_fp8_weight: the recipe is none");
    expect_multiple("take_fp8_weight", "output channels of a linear layer", O, 16);
    expect_multiple("take_fp8_weight", "input channels of a linear layer", C, 16);
    Fp8Weight weight;
    weight.recipe = recipe;
    weight.forward.codes = arena.take(name, DType::e4m3, {O, C});
    weight.backward.codes = arena.take(name, DType::e4m3, {C, O});
    if (is_block(recipe)) {
        weight.forward.mode = weight.backward.mode = MatmulScale::block128;
        weight.forward.scale = arena.take(scales, DType::f32, {ceil_div(O, 128), fp8_block_scale_cols(C)});
        weight.backward.scale = arena.take(scales, DType::f32, {ceil_div(C, 128), fp8_block_scale_cols(O)});
    } else {
        weight.forward.scale = weight.backward.scale = arena.take(scales, DType::f32, {1});
        weight.amax = arena.take(scales, DType::f32, {1});
    }
    return weight;
}

void fp8_quantise_weight(const Fp8Weight& to, Tensor weight, cudaStream_t stream, AmaxFrom amax) {
    const char* name = "fp8_quantise_weight";
    expect(name, "forward.codes", to.forward.codes, DType::e4m3, {-1, -1});
    const int64_t O = to.forward.codes.shape[0], C = to.forward.codes.shape[1];
    expect(name, "backward.codes", to.backward.codes, DType::e4m3, {C, O});
    expect(name, "weight", weight, weight.dtype, {O, C});
    expect_aligned(name,
                   {{"weight", weight}, {"forward.codes", to.forward.codes}, {"backward.codes", to.backward.codes}});
    if (is_block(to.recipe)) {
        expect(name, "forward.scale", to.forward.scale, DType::f32, {ceil_div(O, 128), fp8_block_scale_cols(C)});
        expect(name, "backward.scale", to.backward.scale, DType::f32, {ceil_div(C, 128), fp8_block_scale_cols(O)});
    } else {
        for (const Tensor& scale : {to.forward.scale, to.backward.scale}) expect(name, "scale", scale, DType::f32, {1});
        expect(name, "amax", to.amax, DType::f32, {1});
    }
    Target target{};
    target.codes = to.forward.codes.data, target.codes_t = to.backward.codes.data;
    target.scale = to.forward.scale.ptr<float>(), target.scale_t = to.backward.scale.ptr<float>();
    if (is_block(to.recipe)) {
        target.scale_cols = to.forward.scale.cols(), target.scale_t_cols = to.backward.scale.cols();
        // cuBLASLt's manual does not say whether the padding is read: it is set to 0, so that it is never
        // uninitialised.
        for (const Tensor& scale : {to.forward.scale, to.backward.scale}) set_to_zero(scale, stream);
        launch_quantise<__nv_fp8_e4m3, Shared::square, true, true>(target, weight, stream);
    } else {
        if (amax == AmaxFrom::here) fp8_amax(to.amax, weight, {}, stream);
        target.amax = to.amax.ptr<float>();
        launch_quantise<__nv_fp8_e4m3, Shared::tensor, true, true>(target, weight, stream);
    }
}

void fp8_advance(Tensor states, cudaStream_t stream) {
    expect("fp8_advance", "states", states, DType::f32, {-1, kFp8StateN});
    const int64_t n = states.shape[0];
    if (n == 0) return;
    advance_kernel<<<static_cast<unsigned>(ceil_div(n, 128)), 128, 0, stream>>>(states.ptr<float>(), n);
    launched("advance_kernel", {.reads = bytes_of(states) - 8 * n, .writes = bytes_of(states)});
}

void fp8_linear_amax(Tensor saved, int64_t which, Tensor x, Fp8Recipe recipe, Tensor state, cudaStream_t stream) {
    expect_saved("fp8_linear_amax", recipe, saved);
    if (!is_block(recipe)) fp8_amax(saved.slice(which, 1), x, of_state(recipe, state, which, 0), stream);
}

void fp8_linear_forward(Tensor out, Tensor saved, Tensor inp, const Fp8Weight& weight, Tensor bias, Tensor state,
                        bool record, Tensor scratch, cudaStream_t stream, AmaxFrom amax) {
    const char* name = "fp8_linear_forward";
    const Tensor& codes = weight.forward.codes;
    expect(name, "weight", codes, DType::e4m3, {-1, -1});
    const int64_t O = codes.shape[0], C = codes.shape[1];
    expect(name, "inp", inp, inp.dtype, {-1, C});
    const int64_t N = inp.shape[0];
    expect(name, "out", out, inp.dtype, {N, O});
    if (bias) expect(name, "bias", bias, inp.dtype, {O});
    expect_saved(name, weight.recipe, saved);
    Pieces pieces = pieces_of(name, scratch, weight.recipe, N, C, O);
    // cuBLASLt takes scales of blocks for multiples of four rows: the last ones, with rows of zeros, by themselves.
    const int64_t rest = is_block(weight.recipe) ? N % 4 : 0, whole = N - rest;
    if (rest > 0) {
        if (whole > 0)
            fp8_linear_forward(out.slice(0, whole), saved, inp.slice(0, whole), weight, bias, state, record, scratch,
                               stream, amax);
        pieces.take_matrix(weight.recipe, DType::e4m3, kScaledRows, C);  // of the call below
        const Tensor four_in = pieces.take(inp.dtype, {kScaledRows, C}),
                     four_out = pieces.take(inp.dtype, {kScaledRows, O});
        set_to_zero(four_in, stream);
        copy_tensor(four_in.slice(0, rest), inp.slice(whole, rest), stream);
        fp8_linear_forward(four_out, saved, four_in, weight, bias, state, record, scratch, stream, amax);
        return copy_tensor(out.slice(whole, rest), four_out.slice(0, rest), stream);
    }
    const Fp8Matrix inp8 = pieces.take_matrix(weight.recipe, DType::e4m3, N, C);
    quantise_first(inp8, inp, 0, weight.recipe, saved, state, record, amax, stream);
    MatmulOptions options = product_of(inp8, weight.forward);
    options.bias = bias;
    matmul(out, inp8.codes, codes, options, stream);
}

void fp8_linear_backward_input(Tensor dinp, Tensor saved, Tensor dout, const Fp8Weight& weight, bool accumulate,
                               Tensor state, Tensor scratch, cudaStream_t stream, AmaxFrom amax) {
    const char* name = "fp8_linear_backward_input";
    const Tensor& codes = weight.backward.codes;
    expect(name, "weight", codes, DType::e4m3, {-1, -1});
    const int64_t C = codes.shape[0], O = codes.shape[1];
    expect(name, "dout", dout, dout.dtype, {-1, O});
    const int64_t N = dout.shape[0];
    expect(name, "dinp", dinp, dout.dtype, {N, C});
    if (is_block(weight.recipe)) expect_multiple(name, kTokens, N, 4);
    expect_saved(name, weight.recipe, saved);
    const Fp8Matrix dout8 = pieces_of(name, scratch, weight.recipe, N, C, O)
                                .take_matrix(weight.recipe, gradient_dtype(weight.recipe), N, O);
    quantise_first(dout8, dout, 1, weight.recipe, saved, state, true, amax, stream);
    MatmulOptions options = product_of(dout8, weight.backward);
    options.beta = accumulate ? 1.0f : 0.0f;
    matmul(dinp, dout8.codes, codes, options, stream);
}

void fp8_linear_backward_weight(Tensor dweight, Tensor dbias, Tensor dout, Tensor inp, Tensor saved, Fp8Recipe recipe,
                                bool accumulate, Tensor scratch, cudaStream_t stream) {
    const char* name = "fp8_linear_backward_weight";
    expect(name, "dout", dout, dout.dtype, {-1, -1});
    const int64_t N = dout.shape[0], O = dout.shape[1];
    expect(name, "inp", inp, dout.dtype, {N, -1});
    const int64_t C = inp.shape[1];
    expect(name, "dweight", dweight, dweight.dtype == DType::f32 ? DType::f32 : dout.dtype, {O, C});
    if (dbias) expect(name, "dbias", dbias, dbias.dtype == DType::f32 ? DType::f32 : dout.dtype, {O});
    expect_multiple(name, kTokens, N, 16);
    expect_saved(name, recipe, saved);
    Pieces pieces = pieces_of(name, scratch, recipe, N, C, O);
    const Fp8Matrix dout8 = pieces.take_matrix(recipe, gradient_dtype(recipe), O, N);
    const Fp8Matrix inp8 = pieces.take_matrix(recipe, DType::e4m3, C, N);
    const auto amax = [&](int64_t which) { return is_block(recipe) ? Tensor{} : saved.slice(which, 1); };
    fp8_quantise(dout8, true, dout, amax(1), {}, stream);
    fp8_quantise(inp8, true, inp, amax(0), {}, stream);
    MatmulOptions options = product_of(dout8, inp8);
    options.beta = accumulate ? 1.0f : 0.0f;
    matmul(dweight, dout8.codes, inp8.codes, options, stream);
    if (dbias) column_sum(dbias, dout, accumulate, scratch, stream);
}

int64_t fp8_linear_scratch_n(Fp8Recipe recipe, int64_t N, int64_t C, int64_t O) {
    Pieces forward, four, backward_input, backward_weight;
    forward.take_matrix(recipe, DType::e4m3, N, C);
    if (is_block(recipe)) {  // fp8_linear_forward of a number of rows that is not a multiple of four
        four.take_matrix(recipe, DType::e4m3, kScaledRows, C);
        four.take(DType::bf16, {kScaledRows, C}), four.take(DType::bf16, {kScaledRows, O});
    }
    backward_input.take_matrix(recipe, DType::e4m3, N, O);
    backward_weight.take_matrix(recipe, DType::e4m3, O, N);
    backward_weight.take_matrix(recipe, DType::e4m3, C, N);
    const int64_t bytes =
        std::max({forward.used_bytes, four.used_bytes, backward_input.used_bytes, backward_weight.used_bytes});
    return std::max<int64_t>(bytes / static_cast<int64_t>(sizeof(float)), column_sum_scratch_n(N, O));
}
