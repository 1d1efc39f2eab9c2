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
// block computes, 16 outputs x 8 rows or 64 x 64, is a matter of speed:
//
//   a block              reads for each multiply-add
//   16 outputs x 8 rows  the weight once for up to 8 rows: the limit is the memory, as it is for one row
//   16 x 32
//   32 x 32
//   64 x 64              (64 + 64) 2 / (64 64) = 1/16 byte, of the second-level cache
//
// The largest is taken of which there are enough for all multiprocessors.
//
// The weight is the instruction's A (16 outputs x 16 columns), inp its B (16 columns x 8 rows): both with neighbouring
// columns in a register, as they lie in memory. An instruction does not care which 16 of the columns it is given, as
// long as A and B agree. So lane t of a quad takes the 8 columns 8t ... 8t + 7 of a chunk, 16 bytes, of each row, and
// the two instructions get the first and the second half of them: no shared memory, and every load is a whole sector.
//
//   lane                  0              1                2               3
//   first instruction     0 1 2 3        8 9 10 11        16 17 18 19     24 25 26 27
//   second instruction    4 5 6 7        12 13 14 15      20 21 22 23     28 29 30 31
#include "core/kernel.cuh"
#include "layers/few_rows.cuh"
#include "layers/ptx.cuh"

namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kChunkColumns = 32, kLaneColumns = 8;

struct FewRowsShape {
    int64_t N, C, O;
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

// sums += weight inp of one chunk. Fragment (i, j): outputs 16 i ... and rows 8 j ... of the block. Outputs and rows
// behind the last one stand for it: what becomes of them is not stored.
template <int kOutputTiles, int kRowTiles, bool kWhole, class T>
__device__ __forceinline__ void add_chunk(float (&sums)[kOutputTiles][kRowTiles][4], const T* inp, const T* weight,
                                          int64_t row0, int64_t output0, int64_t c, const FewRowsShape& s) {
    const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
    Columns w[kOutputTiles][2], x[kRowTiles];
#pragma unroll
    for (int i = 0; i < kOutputTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            w[i][half] = load_columns<kWhole>(weight + min(output0 + 16 * i + 8 * half + group, s.O - 1) * s.C, c, s.C);
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j)
        x[j] = load_columns<kWhole>(inp + min(row0 + 8 * j + group, s.N - 1) * s.C, c, s.C);
#pragma unroll
    for (int step = 0; step < 4; step += 2)
#pragma unroll
        for (int i = 0; i < kOutputTiles; ++i) {
            const uint32_t a[4] = {w[i][0].pairs[step], w[i][1].pairs[step], w[i][0].pairs[step + 1],
                                   w[i][1].pairs[step + 1]};
#pragma unroll
            for (int j = 0; j < kRowTiles; ++j) mma_m16n8k16<T>(sums[i][j], a, &x[j].pairs[step]);
        }
}

// total = total + this warp's sums; the first warp's are the first. total: (rows, outputs) of the block.
template <int kOutputTiles, int kRowTiles>
__device__ __forceinline__ void add_to(float* total, const float (&sums)[kOutputTiles][kRowTiles][4], bool first) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int i = 0; i < kOutputTiles; ++i)
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int output = 16 * i + e / 2 * 8 + lane / 4, row = 8 * j + lane % 4 * 2 + e % 2;
                float& its = total[row * (16 * kOutputTiles) + output];
                its = first ? sums[i][j][e] : its + sums[i][j][e];
            }
}

// Block (outputs, rows).
template <int kOutputTiles, int kRowTiles, bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    few_rows_mma_kernel(T* out, const T* inp, const T* weight, const T* bias, FewRowsShape s) {
    constexpr int kOutputs = 16 * kOutputTiles, kRows = 8 * kRowTiles;
    __shared__ float total[kRows * kOutputs];
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t output0 = static_cast<int64_t>(blockIdx.x) * kOutputs,
                  row0 = static_cast<int64_t>(blockIdx.y) * kRows;
    float sums[kOutputTiles][kRowTiles][4] = {};
#pragma unroll(kOutputTiles == 1 ? 4 : 1)  // for few rows: more loads at a time
    for (int64_t chunk = warp; chunk * kChunkColumns < s.C; chunk += kWarps)
        add_chunk<kOutputTiles, kRowTiles, kWhole>(sums, inp, weight, row0, output0,
                                                   chunk * kChunkColumns + lane % 4 * kLaneColumns, s);
    for (int w = 0; w < kWarps; ++w) {
        if (warp == w) add_to(total, sums, w == 0);
        __syncthreads();  // the sums of warp w are in total
    }
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kOutputs; i += kThreads) {
        const int64_t row = row0 + i / kOutputs, output = output0 + i % kOutputs;
        if (row < s.N && output < s.O)
            out[row * s.O + output] = from_float<T>(total[i] + (bias ? to_float(bias[output]) : 0.0f));
    }
}

}  // namespace

void few_rows_mma_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, cudaStream_t stream, int64_t n_blocks) {
    const FewRowsShape s{inp.shape[0], inp.shape[1], out.shape[1]};
    if (n_blocks == 0) n_blocks = device().sm_count;
    const auto tiles = [&](int64_t n_outputs, int64_t n_rows) {
        return dim3(static_cast<unsigned>(ceil_div(s.O, 16 * n_outputs)),
                    static_cast<unsigned>(ceil_div(s.N, 8 * n_rows)));
    };
    const auto are_enough = [&](const dim3& grid) { return int64_t{grid.x} * grid.y >= n_blocks; };
    const auto launch = [&]<class T, int kOutputTiles, int kRowTiles>(
                            T, std::integer_sequence<int, kOutputTiles, kRowTiles>) {
        const auto launch_columns = [&]<bool kWhole>(std::bool_constant<kWhole>) {
            few_rows_mma_kernel<kOutputTiles, kRowTiles, kWhole, T>
                <<<tiles(kOutputTiles, kRowTiles), kThreads, 0, stream>>>(out.ptr<T>(), inp.ptr<T>(), weight.ptr<T>(),
                                                                          bias ? bias.ptr<T>() : nullptr, s);
        };
        if (s.C % kLaneColumns == 0) launch_columns(std::true_type());
        else launch_columns(std::false_type());
        launched("few_rows_mma_kernel", {.reads = bytes_of(inp, weight, bias),
                                         .writes = bytes_of(out),
                                         .flops = 2.0 * static_cast<double>(s.N) * static_cast<double>(s.C * s.O)});
    };
    const auto launch_tiles = [&](auto zero) {
        if (s.N <= 8) launch(zero, std::integer_sequence<int, 1, 1>());
        else if (s.N > 32 && are_enough(tiles(4, 8))) launch(zero, std::integer_sequence<int, 4, 8>());
        else if (are_enough(tiles(2, 4))) launch(zero, std::integer_sequence<int, 2, 4>());
        else launch(zero, std::integer_sequence<int, 1, 4>());
    };
    if (inp.dtype == DType::bf16) launch_tiles(__nv_bfloat16{});
    else launch_tiles(__half{});
}
