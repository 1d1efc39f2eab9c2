// Clipping by the global norm.      (Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063)
//
//   norm  = unscale * sqrt(sum over all gradients of g^2)
//   scale = unscale * min(1, max_norm / (norm + 1e-6))         1e-6 as in PyTorch: a norm of 0 is no divisor
//
// One bad batch can have gradients a hundred times the usual size. Scaling all of them by the same number keeps the
// direction of the step and bounds its length; clipping each element by itself would change the direction. The update
// multiplies by scale as it reads the gradients, so clipping costs one pass over them and no write; scale stays on the
// device, so the host does not wait for it. unscale divides by what the loss was multiplied by (loss_scaler.cu), in the
// same multiplication.
//
// The sum is computed in two stages, in an order that depends on n and the dtype alone: so a run repeats bit for bit.
//   1. sums of kRows squares each, in f32, are stored as doubles: kBlock of them for a chunk of kChunkN elements;
//   2. one block adds these in double, and with them the squares of the last n % kChunkN elements.
// It leaves as two floats, high + low, 48 bits together: ranks can add those. Of many parts of an array, each stage is
// one launch; where no rank adds anything, the last block of the second one computes norm and scale, too.
#include "layers/chunk.cuh"
#include "optim/optim.h"

#include <algorithm>
#include <cmath>

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

namespace {

constexpr int kBlock = 128;                  // sums of a chunk
constexpr int kRows = 512;                   // elements of a sum, in f32: relative error at most kRows * 2^-24
constexpr int64_t kChunkN = kBlock * kRows;  // elements of a chunk
constexpr int kLastBlock = 1024;             // sums of a block of stage 2
constexpr int kPerThread = kOnCpu ? 32 : 1;  // of these; on a CPU each thread that waits for others takes time

// Neighbours that a thread of stage 1 reads at once, each of which belongs to a sum of its own; and chunks of a block.
template <class T>
constexpr int kPack = kOnCpu ? 1 : Packed<T>::n;
constexpr int64_t kBlockChunks = kOnCpu ? 1 : 2;
constexpr int kInFlight = kOnCpu ? 1 : 8;  // loads of a thread
// Sums that together read 64 bytes: the cache line of a CPU, and two of the 32-byte sectors that a GPU loads.
template <class T>
constexpr int kRow = 64 / sizeof(T);

// What a block of stage 1 adds up: this many chunks from this element on; and the place of their sums.
struct ChunkBlock {
    int64_t first, n_chunks, first_sum;
};
// Consecutive gradients; the sums of their whole chunks, and the row of the result.
struct SummedPart {
    int64_t first, n, first_sum, row;
};
// Tables of them, or, where these are null, one part that is the whole array.
struct SumTables {
    const ChunkBlock* blocks;
    const SummedPart* parts;
    int64_t n_parts, n;
};
template <bool kTables>
__device__ __forceinline__ ChunkBlock block_at(const SumTables& tables, int64_t b) {
    if constexpr (kTables) {
        const ChunkBlock& block = tables.blocks[b];
        return {block.first, block.n_chunks, block.first_sum};
    }
    const int64_t first = b * kBlockChunks;
    return {first * kChunkN, min(kBlockChunks, tables.n / kChunkN - first), first * kBlock};
}
__device__ __forceinline__ SummedPart part_at(const SumTables& tables, int64_t p) {
    if (tables.parts) return tables.parts[p];
    return {0, tables.n, 0, 0};
}

// The threads of one y walk together down kRows rows that follow each other:
//
//   grads   | row 0: x = 0 1 2 ... | row 1: x = 0 1 2 ... | ... | row 511 |   then the same for the next y
//
// A GPU sees full sectors. On the CPU device the loop over x becomes SIMD: a vector addition or two for each row, in
// the order of memory, which hardware prefetchers recognise (rows of 128 bytes, read half by half, take twice as long).
// Because the sums are doubles, g++ also knows that storing them cannot change grads; otherwise it would not vectorise
// the loop. Nor would it with a branch in the loop, or a structure copied as a whole: so kTables is a parameter of the
// template, and a block is read number by number. (Without SIMD it takes six times as long, with 16 bits eleven times.)
template <class T, bool kTables>
__global__ void sum_squares_kernel(double* __restrict__ sums, const T* __restrict__ grads, SumTables tables) {
    constexpr int n = kPack<T>;
    const ChunkBlock block = block_at<kTables>(tables, blockIdx.x);
    const int64_t run = threadIdx.y;
    if (!kOnCpu && run >= block.n_chunks * (kBlock / kRow<T>)) return;
    const T* first = grads + block.first + run * (kRow<T> * kRows) + threadIdx.x * n;
    float sum[n] = {};
    if (n == 1 || reinterpret_cast<uintptr_t>(first) % sizeof(Packed<T, n>) == 0) {
        for (int k = 0; k < kRows; k += kInFlight) {
            Packed<T, n> g[kInFlight];
            for (int j = 0; j < kInFlight; ++j) g[j] = load_packed<T, n>(first + (k + j) * kRow<T>);
            for (int j = 0; j < kInFlight; ++j)
                for (int l = 0; l < n; ++l) sum[l] += to_float(g[j].v[l]) * to_float(g[j].v[l]);
        }
    } else {  // a part that begins anywhere
        for (int k = 0; k < kRows; ++k)
            for (int l = 0; l < n; ++l) sum[l] += to_float(first[k * kRow<T> + l]) * to_float(first[k * kRow<T> + l]);
    }
    for (int l = 0; l < n; ++l) sums[block.first_sum + run * kRow<T> + threadIdx.x * n + l] = sum[l];
}

// A double as two floats.
__device__ __forceinline__ void store_pair(float* result, double sum) {
    result[0] = static_cast<float>(sum);
    result[1] = result[0] < INFINITY ? static_cast<float>(sum - result[0]) : 0.0f;
}

// A ClipScale of `sums` (n_sums, 2). result is null: there is none.
struct Clip {
    float* result;
    const float* sums;
    int n_sums;
    float max_norm, unscale;
    bool stays_nan;
};
// One thread.
__device__ __forceinline__ void clip(const Clip& c) {
    double sum = 0;
    for (int i = 0; i < c.n_sums; ++i) sum += static_cast<double>(c.sums[2 * i]) + c.sums[2 * i + 1];
    const float norm = static_cast<float>(c.unscale * sqrt(sum));
    float scale = c.unscale;
    if (c.max_norm > 0) scale *= fminf(1.0f, c.max_norm / (norm + 1e-6f));
    if (!(norm < INFINITY)) scale = NAN;  // inf or NaN: the update must not happen
    if (c.stays_nan && c.result[1] != c.result[1]) scale = NAN;
    c.result[0] = norm;
    c.result[1] = scale;
}
__global__ void clip_scale_kernel(Clip c) { clip(c); }

// One block adds up the parts of a row; it reads 1 / 256 of what stage 1 read of them (1 / 128 of 16-bit
// gradients). Block p has work if part p is the first of its row.
template <class T>
__device__ __forceinline__ void add_parts_of_row(float* __restrict__ results, const double* __restrict__ sums,
                                                 const T* __restrict__ grads, const SumTables& tables) {
    __shared__ double shared[kLastBlock];
    const int t = threadIdx.x;
    const int64_t row = part_at(tables, blockIdx.x).row;
    if (blockIdx.x > 0 && part_at(tables, static_cast<int64_t>(blockIdx.x) - 1).row == row) return;
    float* const result = results + 2 * row;
    for (int64_t p = blockIdx.x; p < tables.n_parts; ++p) {
        const SummedPart part = part_at(tables, p);
        if (part.row != row) return;
        const int64_t n_sums = part.n / kChunkN * kBlock, n_rest = part.n % kChunkN;
        const double* const its_sums = sums + part.first_sum;
        const T* const rest = grads + part.first + part.n - n_rest;
        double mine[kPerThread] = {};
#pragma unroll 8
        for (int64_t i = t * kPerThread; i < n_sums; i += kLastBlock)
            for (int64_t l = 0; l < min(int64_t{kPerThread}, n_sums - i); ++l) mine[l] += its_sums[i + l];
#pragma unroll 8
        for (int64_t i = t * kPerThread; i < n_rest; i += kLastBlock)
            for (int64_t l = 0; l < min(int64_t{kPerThread}, n_rest - i); ++l) {
                const double g = to_float(rest[i + l]);
                mine[l] += g * g;
            }
        if (p > blockIdx.x) __syncthreads();  // the sums of the part before have been read
        for (int l = 0; l < kPerThread; ++l) shared[t * kPerThread + l] = mine[l];
        __syncthreads();  // all sums are in shared
        if (t < kWarp) {
            double sum = shared[t];
            for (int i = t + kWarp; i < kLastBlock; i += kWarp) sum += shared[i];
            shared[t] = sum;  // no other thread reads the first kWarp elements before the next barrier
            __syncwarp();     // the 32 sums of this warp are in shared
        }
        if (t > 0) continue;
        double sum = shared[0];
        for (int i = 1; i < kWarp; ++i) sum += shared[i];
        if (p > blockIdx.x) sum += static_cast<double>(result[0]) + result[1];
        store_pair(result, sum);
    }
}

template <class T>
__global__ void __launch_bounds__(kLastBlock / kPerThread)
    add_sums_kernel(float* results, const double* sums, const T* grads, SumTables tables, unsigned* arrivals, Clip c) {
    add_parts_of_row(results, sums, grads, tables);
    if (c.result && is_last_block(arrivals, gridDim.x) && threadIdx.x == 0) clip(c);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// As a number of f32: kBlock doubles per chunk, the last part of one counted as a chunk.
int64_t grad_norm_scratch_n(int64_t n) { return ceil_div(n, kChunkN) * kBlock * 2; }

// Stage 1 of n_blocks, which read `whole` elements and leave n_sums; stage 2, which reads the other `rest`, and the
// results of the n_longer_rows rows that have several parts.
static void launch_sums(Tensor sums, Tensor grads, double* scratch, const SumTables& tables, int64_t n_rows,
                        int64_t n_longer_rows, int64_t n_blocks, int64_t whole, int64_t rest, const Clip& clip,
                        cudaStream_t stream) {
    const int64_t n_sums = whole / kRows * static_cast<int64_t>(sizeof(double));
    const int64_t of_blocks = tables.blocks ? n_blocks * static_cast<int64_t>(sizeof(ChunkBlock)) : 0,
                  of_parts = tables.parts ? tables.n_parts * static_cast<int64_t>(sizeof(SummedPart)) : 0;
    dispatch(grads.dtype, [&](auto zero) {
        using T = decltype(zero);
        const T* const from = grads.ptr<T>();
        const int64_t bytes = sizeof(T);
        if (n_blocks > 0) {
            const dim3 block(kRow<T> / kPack<T>, static_cast<unsigned>(kBlockChunks * kBlock / kRow<T>));
            const unsigned blocks = narrow(n_blocks, "sum_squares: the number of blocks");
            if (tables.blocks) sum_squares_kernel<T, true><<<blocks, block, 0, stream>>>(scratch, from, tables);
            else sum_squares_kernel<T, false><<<blocks, block, 0, stream>>>(scratch, from, tables);
            launched("sum_squares_kernel", {.reads = whole * bytes + of_blocks,
                                            .writes = n_sums,
                                            .scratch = n_sums,
                                            .flops = 2.0 * static_cast<double>(whole)});
        }
        add_sums_kernel<T>
            <<<narrow(tables.n_parts, "sum_squares: the number of parts"), kLastBlock / kPerThread, 0, stream>>>(
                sums.ptr<float>(), scratch, from, tables, device().arrivals, clip);
        // Rows that are clipped are read; otherwise those of several parts. With the count of blocks.
        const int64_t pair = 2 * int64_t{sizeof(float)}, count = clip.result ? int64_t{sizeof(unsigned)} : 0;
        launched("add_sums_kernel", {.reads = n_sums + rest * bytes + of_parts + count + (clip.stays_nan ? 4 : 0) +
                                              (clip.result ? clip.n_sums : n_longer_rows) * pair,
                                     .writes = n_rows * pair + count + (clip.result ? pair : 0),
                                     .scratch = n_sums,
                                     .flops = 2.0 * static_cast<double>(rest)});
    });
}

void sum_squares(Tensor sum, Tensor grads, Tensor scratch, cudaStream_t stream) {
    const int64_t n = grads.n(), n_chunks = n / kChunkN;
    expect("sum_squares", "sum", sum, DType::f32, {2});
    expect("sum_squares", "grads", grads, grads.dtype, {-1});
    check(scratch.dtype == DType::f32 && scratch.n() >= grad_norm_scratch_n(n), "sum_squares: scratch is ", scratch,
          ", expected at least f32 (", grad_norm_scratch_n(n), ")");
    check(is_aligned(scratch.data, sizeof(double)), "sum_squares: scratch must be on an 8-byte boundary");
    launch_sums(sum, grads, reinterpret_cast<double*>(scratch.ptr<float>()), {nullptr, nullptr, 1, n}, 1, 0,
                ceil_div(n_chunks, kBlockChunks), n_chunks * kChunkN, n % kChunkN, {}, stream);
}

SquareSums::SquareSums(Arena& arena, const std::string& what, const std::vector<Part>& parts)
    : n_parts_(std::ssize(parts)) {
    int64_t parts_of_row = 0;
    for (const Part& part : parts) {
        const int64_t n_chunks = part.n / kChunkN;
        parts_of_row = host_parts_.empty() || host_parts_.back() != part.row ? 1 : parts_of_row + 1;
        n_rows_ += parts_of_row == 1, n_longer_rows_ += parts_of_row == 2;
        host_parts_.insert(host_parts_.end(), {part.first, part.n, n_chunks_ * kBlock, part.row});
        for (int64_t c = 0; c < n_chunks; c += kBlockChunks, ++n_blocks_)
            host_blocks_.insert(host_blocks_.end(), {part.first + c * kChunkN, std::min(kBlockChunks, n_chunks - c),
                                                     (n_chunks_ + c) * kBlock});
        n_chunks_ += n_chunks;
        n_ += part.n;
    }
    const auto take = [&](const std::vector<int64_t>& table) {
        return arena.take(what, DType::i32, {2 * std::ssize(table)});
    };
    blocks_ = take(host_blocks_);
    parts_ = take(host_parts_);
    scratch_ = arena.take(what, DType::f32, {2 * n_chunks_ * kBlock});
}

void SquareSums::init(cudaStream_t stream) {
    const auto upload = [stream](Tensor to, const auto& from) {
        if (!from.empty()) cudaCheck(cudaMemcpyAsync(to.data, from.data(), to.bytes(), cudaMemcpyHostToDevice, stream));
    };
    upload(blocks_, host_blocks_), upload(parts_, host_parts_);
}

static Clip clip_of(Tensor sums, const ClipScale& clip) {
    expect("clip_scale", "result", clip.result, DType::f32, {2});
    expect("clip_scale", "sums", sums, DType::f32, {-1, 2});
    check(!std::isnan(clip.max_norm), "clip_scale: max_norm is NaN");
    check(clip.unscale > 0 && std::isfinite(clip.unscale), "clip_scale: unscale is ", clip.unscale,
          ": it must be a number above 0");
    return {clip.result.ptr<float>(),
            sums.ptr<float>(),
            narrow(sums.shape[0], "clip_scale: sums"),
            clip.max_norm,
            clip.unscale,
            clip.stays_nan};
}

void SquareSums::add_up(Tensor sums, Tensor grads, cudaStream_t stream, const ClipScale& clip) const {
    expect("sum_squares", "sums", sums, DType::f32, {-1, 2});
    check(!clip.result || n_rows_ == sums.shape[0], "sum_squares: only ", n_rows_, " of ", sums.shape[0],
          " rows to be clipped have gradients");
    if (n_parts_ == 0) return;  // as on a rank without a shard, where gradients have no memory
    expect("sum_squares", "grads", grads, grads.dtype, {-1});
    const int64_t whole = n_chunks_ * kChunkN;
    const SumTables tables = {static_cast<const ChunkBlock*>(blocks_.data), static_cast<const SummedPart*>(parts_.data),
                              n_parts_, 0};
    launch_sums(sums, grads, static_cast<double*>(scratch_.data), tables, n_rows_, n_longer_rows_, n_blocks_, whole,
                n_ - whole, clip.result ? clip_of(sums, clip) : Clip{}, stream);
}

void clip_scale(Tensor sums, const ClipScale& clip, cudaStream_t stream) {
    clip_scale_kernel<<<1, 1, 0, stream>>>(clip_of(sums, clip));
    launched("clip_scale_kernel",
             {.reads = bytes_of(sums) + (clip.stays_nan ? 4 : 0), .writes = bytes_of(clip.result)});
}

void grad_norm(Tensor result, Tensor grads, float max_norm, float unscale, Tensor scratch, cudaStream_t stream) {
    sum_squares(result, grads, scratch, stream);
    clip_scale(result.view({1, 2}), {result, max_norm, unscale}, stream);
}
