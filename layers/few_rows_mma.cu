// The linear layer of inference in 16 bits, on tensor cores, with one order of summation for any number of rows.
//
//   out[n][o] = sum over c of inp[n][c] weight[o][c] + bias[o]
//
// A token of a prompt is computed with hundreds of others, a token of an answer with a few. For its bits to be the same
// both times the sum has to be formed in the same order. cuBLASLt chooses a kernel by the shape, and each has an order
// of its own. Here the order follows from C alone:
//
//   the columns are cut into chunks of 32; warp w of 8 has the chunks w, w + 8, w + 16, ...
//   for each of its chunks, ascending:  sum_w += 16 of the columns, in one instruction;  sum_w += the other 16
//   out = ((sum_0 + sum_1) + sum_2) + ... + sum_7 + bias
//
// The instruction adds 16 products to a sum in an order of its own, the same for every element of its result. So what a
// block computes is a matter of speed:
//
//   a block               reads for each multiply-add
//    8 outputs x  8 rows  the weight once for up to 8 rows (or 16, 32): the limit is the memory, as it is for one row
//    8 x 16, 16 x 8
//   16 x 16, 16 x 32
//   32 x 32
//   64 x 64               (64 + 64) 2 / (64 64) = 1/16 byte, of the second-level cache
//
// For many rows the largest is taken of which there are enough for all multiprocessors. For up to 16 rows the 16
// outputs are halved where they would not make two blocks for each multiprocessor: then half of the instruction's A is
// zero, which costs nothing, and twice as many warps ask the memory for weights. Each asks for kAhead chunks of its
// weights before it waits for any, and for the first before the launches in front have ended. What it asks for takes
// registers, and the more registers a thread has, the fewer blocks share a multiprocessor; blocks that do not fit have
// to wait before they ask. So three blocks share one, or four, whose threads ask for fewer chunks at a time, as long as
// all blocks then fit. More blocks come in rounds in any case: then two share one, and their threads ask for more.
//
// Of up to 16 rows the block also computes what follows a feed-forward's first product, GELU or SwiGLU, of the product
// rounded to T, as the kernels that do it by themselves read it. For SwiGLU a block has 8 outputs and the 8 that stand
// O / 2 rows of the weight behind them: gates and what they multiply.
//
// A single row may be given as what a norm makes of another one: then each block forms it (normed_row.cuh).
//
// The weight is the instruction's A (16 outputs x 16 columns), inp its B (16 columns x 8 rows): both with neighbouring
// columns in a register, as they lie in memory. An instruction does not care which 16 of the columns it is given, as
// long as A and B agree. So lane t of a quad takes the 8 columns 8t ... 8t + 7 of a chunk, 16 bytes, of each row, and
// the two instructions get the first and the second half of them: no shared memory, and a quad loads whole sectors.
//
//   lane                  0              1                2               3
//   first instruction     0 1 2 3        8 9 10 11        16 17 18 19     24 25 26 27
//   second instruction    4 5 6 7        12 13 14 15      20 21 22 23     28 29 30 31
#include "core/kernel.cuh"
#include "layers/early_launch.cuh"
#include "layers/few_rows.cuh"
#include "layers/gelu.cuh"
#include "layers/normed_row.cuh"
#include "layers/ptx.cuh"

namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kChunkColumns = 32, kLaneColumns = 8;

struct FewRowsShape {
    int64_t N, C, O;  // O: rows of the weight
    int64_t second;   // which row of the weight is output 8 of a block: 8, or O / 2
    int64_t columns;  // of out
    Activation activation;
};

// What a block computes: kOutputs = 8 or kFragments fragments of 16 outputs, and kRowTiles of 8 rows.
template <int kOutputs_, int kRowTiles_, int kAhead_>
struct Tile {
    static constexpr int kOutputs = kOutputs_, kRowTiles = kRowTiles_, kRows = 8 * kRowTiles;
    static constexpr int kHalves = kOutputs == 8 ? 1 : 2, kFragments = kOutputs == 8 ? 1 : kOutputs / 16;
    static constexpr int kAhead = kAhead_;
    static constexpr int kFragmentOutputs = 8 * kHalves, kPitch = kRows + 1;
    using Sums = float[kFragments][kRowTiles][4];
    using Shared = float[kWarps][kFragmentOutputs][kPitch];  // a fragment's sums of each warp
};

// Eight neighbouring columns of a row: four registers of two.
struct alignas(16) Columns {
    uint32_t pairs[4];
};

// The columns [c, c + 8) of a row, zeros from C on. kWhole: C is a multiple of 8.
template <bool kWhole, class T>
__device__ __forceinline__ Columns load_columns(const T* row, int64_t c, int64_t C) {
    Columns columns = {};
    if constexpr (kWhole) {
        if (c >= C) return columns;
        const Packed<T> pack = load_packed(row + c);
        memcpy(&columns, &pack, sizeof columns);
    } else {
        T numbers[kLaneColumns];
        for (int i = 0; i < kLaneColumns; ++i) numbers[i] = c + i < C ? row[c + i] : from_float<T>(0.0f);
        memcpy(&columns, numbers, sizeof columns);
    }
    return columns;
}

// Fragment (i, j): outputs 16 i ... and rows 8 j ... of the block. Behind the last output and the last row these are
// read again: what becomes of them there is not stored.
template <class Its, bool kWhole, class T>
struct Operands {
    const T *inp, *weight;
    const FewRowsShape& s;
    int64_t output0, row0;
    int group, column;  // of this lane: output or row of a fragment, and first column of a chunk

    __device__ __forceinline__ void load_weight(Columns (&w)[Its::kFragments][Its::kHalves], int64_t chunk) const {
#pragma unroll
        for (int i = 0; i < Its::kFragments; ++i)
#pragma unroll
            for (int half = 0; half < Its::kHalves; ++half) {
                const int64_t o = min(output0 + 16 * i + half * s.second + group, s.O - 1);
                w[i][half] = load_columns<kWhole>(weight + o * s.C, chunk * kChunkColumns + column, s.C);
            }
    }
    __device__ __forceinline__ void load_inp(Columns (&x)[Its::kRowTiles], int64_t chunk) const {
#pragma unroll
        for (int j = 0; j < Its::kRowTiles; ++j)
            x[j] = load_columns<kWhole>(inp + min(row0 + 8 * j + group, s.N - 1) * s.C, chunk * kChunkColumns + column,
                                        s.C);
    }
};

// sums += weight inp of one chunk.
template <class Its, class T>
__device__ __forceinline__ void add_chunk(typename Its::Sums& sums, const Columns (&w)[Its::kFragments][Its::kHalves],
                                          const Columns (&x)[Its::kRowTiles]) {
#pragma unroll
    for (int step = 0; step < 4; step += 2)
#pragma unroll
        for (int i = 0; i < Its::kFragments; ++i) {
            const Columns zeros = {}, &first = w[i][0], &second = Its::kHalves == 1 ? zeros : w[i][Its::kHalves - 1];
            const uint32_t a[4] = {first.pairs[step], second.pairs[step], first.pairs[step + 1],
                                   second.pairs[step + 1]};
#pragma unroll
            for (int j = 0; j < Its::kRowTiles; ++j) mma_m16n8k16<T>(sums[i][j], a, &x[j].pairs[step]);
        }
}

// This warp's sums over its chunks. receive() waits until inp is there.
template <class Its, bool kWhole, class T, class Receive>
__device__ __forceinline__ void add_columns(typename Its::Sums& sums, const Operands<Its, kWhole, T>& operands,
                                            int warp, Receive&& receive) {
    constexpr int kAhead = Its::kAhead, kGroup = kAhead < 4 ? kAhead : 4;  // chunks of inp that are loaded at a time
    const int64_t n_chunks = (operands.s.C + kChunkColumns - 1) / kChunkColumns;
    bool waited = false;
    for (int64_t first = warp; first < n_chunks || !waited; first += kWarps * kAhead) {
        Columns w[kAhead][Its::kFragments][Its::kHalves];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) operands.load_weight(w[k], first + k * kWarps);
        if (!waited) receive();
        waited = true;
#pragma unroll
        for (int k0 = 0; k0 < kAhead; k0 += kGroup) {
            Columns x[kGroup][Its::kRowTiles];
#pragma unroll
            for (int k = 0; k < kGroup; ++k) operands.load_inp(x[k], first + (k0 + k) * kWarps);
#pragma unroll
            for (int k = 0; k < kGroup; ++k)
                if (first + (k0 + k) * kWarps < n_chunks) add_chunk<Its, T>(sums, w[k0 + k], x[k]);
        }
    }
}

// The sums of all warps for one output of a fragment and one row of the block: in the order of the warps.
template <class Its>
__device__ __forceinline__ float add_warps(const typename Its::Shared& of_warps, int output, int row) {
    float sum = of_warps[0][output][row];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += of_warps[w][output][row];
    return sum;
}
template <class T>
__device__ __forceinline__ float rounded_product(float sum, T bias) {
    return to_float(from_float<T>(sum + to_float(bias)));
}

// The biases that this thread adds to a fragment.
template <class T>
struct Biases {
    T first, second;  // second: for SwiGLU
};
template <class Its, class T>
__device__ __forceinline__ Biases<T> load_biases(const T* bias, int64_t output0, const FewRowsShape& s) {
    const bool gated = s.activation == Activation::swiglu;
    const int64_t output = output0 + static_cast<int>(threadIdx.x) % (gated ? 8 : Its::kFragmentOutputs);
    const auto load = [&](int64_t o) { return bias && o < s.O ? bias[o] : from_float<T>(0.0f); };
    return {load(output), load(gated ? s.second + output : s.O)};
}

// Stores fragment i of the block, whose sums are in shared memory.
template <class Its, class T>
__device__ __forceinline__ void store_fragment(T* out, const Biases<T>& biases, const typename Its::Shared& of_warps,
                                               int64_t output0, int64_t row0, const FewRowsShape& s) {
    const bool gated = s.activation == Activation::swiglu;
    const int width = gated ? 8 : Its::kFragmentOutputs;  // which divides the threads: each has one output
    for (int k = static_cast<int>(threadIdx.x); k < Its::kRows * width; k += kThreads) {
        const int o = k % width, r = k / width;
        const int64_t output = output0 + o, row = row0 + r;
        if (row >= s.N || output >= s.columns) continue;
        float y = rounded_product(add_warps<Its>(of_warps, o, r), biases.first);
        if (s.activation == Activation::gelu) y = gelu(y);
        if constexpr (Its::kHalves == 2)
            if (gated) y = rounded_product(add_warps<Its>(of_warps, 8 + o, r), biases.second) * silu(y);
        out[row * s.columns + output] = from_float<T>(y);
    }
}

// Blocks that shall share a multiprocessor. (0: ptxas finds registers for as many as there can be.)
template <int kOutputs, int kRowTiles, int kAhead, bool kWhole>
constexpr int kBlocks = !kWhole || kOutputs > 16        ? 0
                        : kOutputs == 16                ? (kAhead == 8 ? 2 : 0)
                        : kRowTiles == 1 && kAhead == 4 ? 4
                                                        : 3;

// Block (outputs, rows). Input: const T*, or a NormedRow, of one row.
template <int kOutputs, int kRowTiles, int kAhead, bool kWhole, class Input, class T>
__global__ void __launch_bounds__(kThreads, (kBlocks<kOutputs, kRowTiles, kAhead, kWhole>))
    few_rows_mma_kernel(T* out, Input input, const T* weight, const T* bias, FewRowsShape s) {
    using Its = Tile<kOutputs, kRowTiles, kAhead>;
    let_next_start();
    __shared__ typename Its::Shared of_warps;
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t row0 = static_cast<int64_t>(blockIdx.y) * Its::kRows,
                  output0 = static_cast<int64_t>(blockIdx.x) * (s.activation == Activation::swiglu ? 8 : kOutputs);
    // Biases come from memory, as weights do: they are asked for early, where there are registers left for them.
    constexpr bool kEarly = Its::kFragments == 1 && kWhole;
    Biases<T> biases = {};
    if constexpr (kEarly) biases = load_biases<Its>(bias, output0, s);
    typename Its::Sums sums = {};
    const auto add = [&](const T* inp, auto&& receive) {
        const Operands<Its, kWhole, T> operands{inp, weight, s, output0, row0, lane / 4, lane % 4 * kLaneColumns};
        add_columns(sums, operands, warp, receive);
    };
    if constexpr (std::is_pointer_v<Input>) {
        add(input, [] { wait_for_previous(); });
    } else {
        T* const row = dynamic_shared<T>();
        load_norm(row, input);
        add(row, [&] { normalise_row(row, input, blockIdx.x == 0); });
    }
    const auto store = [&](auto fragment) {
        constexpr int i = decltype(fragment)::value;
        if (i > 0) __syncthreads();  // the fragment before it has been stored
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2 * Its::kHalves; ++e)
                of_warps[warp][e / 2 * 8 + lane / 4][8 * j + lane % 4 * 2 + e % 2] = sums[i][j][e];
        __syncthreads();  // the sums of all warps are there
        if constexpr (!kEarly) biases = load_biases<Its>(bias, output0 + 16 * i, s);
        store_fragment<Its>(out, biases, of_warps, output0 + 16 * i, row0, s);
    };
    // Not a loop: nvcc before 13.0 does not unroll one as long as this, and then the sums are in memory.
    [&]<int... i>(std::integer_sequence<int, i...>) { (store(std::integral_constant<int, i>{}), ...); }
    (std::make_integer_sequence<int, Its::kFragments>{});
}

// A product as few_rows_mma_forward has been told of it.
struct Product {
    Tensor out, weight, bias;
    FewRowsShape s;
    int64_t n_blocks;  // wanted
    cudaStream_t stream;

    Product(Tensor its_out, int64_t N, Tensor its_weight, Tensor its_bias, cudaStream_t its_stream,
            int64_t its_n_blocks, Activation activation)
        : out(its_out), weight(its_weight),
          bias(its_bias), s{N,
                            its_weight.shape[1],
                            its_weight.shape[0],
                            activation == Activation::swiglu ? its_weight.shape[0] / 2 : 8,
                            its_out.shape[1],
                            activation},
          n_blocks(its_n_blocks == 0 ? device().sm_count : its_n_blocks), stream(its_stream) {}
    bool gated() const { return s.activation == Activation::swiglu; }
    bool halved() const { return !gated() && ceil_div(s.O, 16) < 2 * n_blocks; }
    dim3 tiles(int64_t n_outputs, int64_t n_rows) const {
        return dim3(static_cast<unsigned>(ceil_div(s.columns, gated() ? 8 : n_outputs)),
                    static_cast<unsigned>(ceil_div(s.N, 8 * n_rows)));
    }
    bool are_enough(const dim3& grid) const { return int64_t{grid.x} * grid.y >= n_blocks; }
};

template <int kOutputs, int kRowTiles, int kAhead>
using TileSizes = std::integer_sequence<int, kOutputs, kRowTiles, kAhead>;

template <bool kWhole, class T, class Input, int kOutputs, int kRowTiles, int kAhead>
void launch_tile(const Product& p, Input input, TileSizes<kOutputs, kRowTiles, kAhead>) {
    const size_t shared_bytes = std::is_pointer_v<Input> ? 0 : normed_row_bytes<T>(p.s.C);
    const EarlyLaunch start(p.tiles(kOutputs, kRowTiles), kThreads, shared_bytes, p.stream);
    start("few_rows_mma_kernel", few_rows_mma_kernel<kOutputs, kRowTiles, kAhead, kWhole, Input, T>, p.out.ptr<T>(),
          input, p.weight.ptr<T>(), p.bias.ptr_or_null<T>(), p.s);
}
// launch(TileSizes) with what a block computes, of up to 8 rows and of any number.
template <class F>
void choose_narrow_tile(const Product& p, F&& launch) {
    const bool few_blocks = ceil_div(p.s.O, 8) <= 2 * p.n_blocks;
    if (p.halved() && few_blocks) launch(TileSizes<8, 1, 8>());
    else if (p.halved()) launch(TileSizes<8, 1, 4>());
    else if (ceil_div(p.s.O, 16) <= 4 * p.n_blocks) launch(TileSizes<16, 1, 4>());
    else launch(TileSizes<16, 1, 8>());
}
template <class F>
void choose_tile(const Product& p, F&& launch) {
    const int64_t N = p.s.N;
    if (N <= 8) choose_narrow_tile(p, launch);
    else if (N <= 16 && p.halved()) launch(TileSizes<8, 2, 4>());
    else if (N <= 16) launch(TileSizes<16, 2, 4>());
    else if (N > 32 && p.s.C % kLaneColumns == 0 && p.are_enough(p.tiles(64, 8))) launch(TileSizes<64, 8, 1>());
    else if (p.are_enough(p.tiles(32, 4))) launch(TileSizes<32, 4, 1>());
    else launch(TileSizes<16, 4, 4>());
}

void note_launched(const Product& p, int64_t more_reads, int64_t more_writes) {
    launched("few_rows_mma_kernel", {.reads = bytes_of(p.weight, p.bias) + more_reads,
                                     .writes = bytes_of(p.out) + more_writes,
                                     .flops = 2.0 * static_cast<double>(p.s.N) * static_cast<double>(p.s.C * p.s.O)});
}

}  // namespace

void few_rows_mma_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, cudaStream_t stream, int64_t n_blocks,
                          Activation activation) {
    const Product product(out, inp.shape[0], weight, bias, stream, n_blocks, activation);
    const auto launch = [&](auto zero) {
        using T = decltype(zero);
        choose_tile(product, [&]<int kOutputs, int kRowTiles, int kAhead>(TileSizes<kOutputs, kRowTiles, kAhead> tile) {
            const T* const input = inp.ptr<T>();
            if (product.s.C % kLaneColumns == 0) launch_tile<true, T>(product, input, tile);
            else if constexpr (kOutputs < 64) launch_tile<false, T>(product, input, tile);
        });
    };
    dispatch_16_bits(inp.dtype, launch);
    note_launched(product, bytes_of(inp), 0);
}

bool few_rows_mma_takes_norm(const NormInFront& norm, Tensor weight) {
    const int64_t C = weight.shape[1];
    return norm.inp.shape[0] == 1 && C % kLaneColumns == 0 && C <= kMostNormedC;
}

void few_rows_mma_normed_forward(Tensor out, const NormInFront& norm, Tensor weight, Tensor bias, cudaStream_t stream,
                                 int64_t n_blocks, Activation activation) {
    const Product product(out, 1, weight, bias, stream, n_blocks, activation);
    const int64_t C = product.s.C;
    const auto launch = [&](auto zero) {
        using T = decltype(zero);
        const NormedRow<T> row{norm.inp.ptr<T>(),
                               norm.branch.ptr_or_null<T>(),
                               norm.weight.ptr<T>(),
                               norm.bias.ptr_or_null<T>(),
                               (norm.branch ? norm.sum : Tensor{}).ptr_or_null<T>(),
                               norm.eps,
                               narrow(C, "columns"),
                               static_cast<int>(norm_geometry("few_rows_normed_forward", 1, C, C).block.x)};
        choose_narrow_tile(product, [&](auto tile) { launch_tile<true, T>(product, row, tile); });
    };
    dispatch_16_bits(norm.inp.dtype, launch);
    note_launched(product, bytes_of(norm.inp, norm.branch, norm.weight, norm.bias),
                  norm.branch ? bytes_of(norm.sum) : 0);
}
