// compress.cu: --compress: gradients that travel in fewer bits, and the errors that are kept for the next step.
//
// A gradient is noise around a direction; to send all of its 32 bits is a waste when the network is slow. What a
// compressor Q drops is not lost but kept by the rank that dropped it, and added to its next gradient
// ("error feedback"):
//
//     x = g + e          send Q(x)          e = x - Q(x)
//
// so that over steps 1 .. t   sum of what was sent + e_t = sum of the gradients:   the error stays one step's error,
// while the gradients add up.                       (Seide et al. 2014, "1-bit stochastic gradient descent";
//                                                      Karimireddy et al. 2019, arXiv:1901.09847)
// The sum over ranks is compressed once more on its way back, and has errors of its own
//                                                     (Tang et al. 2021, arXiv:2102.02888):
//
//     rank 0   a0 b0 c0        Q(a0) Q(a1) Q(a2) -> A = Q(sum + error)         A B C
//     rank 1   a1 b1 c1        Q(b0) Q(b1) Q(b2) -> B                          A B C
//     rank 2   a2 b2 c2        Q(c0) Q(c1) Q(c2) -> C                          A B C
//              encode          add in rank order, encode                       decode
//
// All ranks decode the same codes, so that all ranks have the same bits; and all sums are in rank order and float32.
//
//     bf16   no error is kept: to round to 8 bits is an error without a direction          2 bytes a number
//     fp8    blocks of 1024 numbers with a scale: e4m3, whose three bits of mantissa have half
//            the error of e5m2's two. Its range, 2^-9 .. 448, is enough inside a block, and
//            what is below comes back by the error                                          1 + 4/1024
//     1bit   the sign, times the mean of |x| over the block: of all +-s the nearest to x    1/8 + 4/1024
//
// A block belongs to one parameter: the scale of a matrix does not suit a norm's weight. power_sgd.cu has the fourth.
//
// What this does not give: with Adam a step is not a sum of gradients, and errors also go into the mean square v, from
// where nothing takes them out again. 1-bit Adam therefore freezes v after a warm-up; we do not,
// and the losses in doc/compression.md show what that costs.
#include "parallel/data/compress.h"

#include "core/kernel.cuh"
#include "core/names.h"

#include <algorithm>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Codecs. A warp has a block: x[k] of a lane is number 32 k + lane. Numbers beyond the block's n are 0, and nothing
// reads what they become. encode() writes the words of the block, decode() is number 32 k + lane again.

constexpr int kBlockN = 1024, kPerLane = kBlockN / kWarp;
constexpr int kWarps = 4;  // of a thread block

// Word k: the signs of numbers 32 k to 32 k + 31. Word 32: the scale. NaN or infinity anywhere makes all of the block
// NaN or infinite: the step must not look as if nothing had happened.
struct OneBit {
    static constexpr int kWords = kPerLane + 1;
    __device__ static void encode(int32_t* words, const float (&x)[kPerLane], int n) {
        const int lane = threadIdx.x;
        float sum = 0;
        unsigned mine = 0;
        for (int k = 0; k < kPerLane; ++k) {
            sum += fabsf(x[k]);
            const unsigned signs = __ballot_sync(kFullWarp, x[k] < 0);
            if (k == lane) mine = signs;
        }
        sum = warp_sum(sum);
        words[lane] = static_cast<int32_t>(mine);
        if (lane == 0) words[kPerLane] = __float_as_int(n > 0 ? sum / static_cast<float>(n) : 0.0f);
        __syncwarp();  // the words are there for every lane
    }
    __device__ static float decode(const int32_t* words, int k) {
        const float scale = __int_as_float(words[kPerLane]);
        return static_cast<unsigned>(words[k]) >> threadIdx.x & 1u ? -scale : scale;
    }
};

// Byte j of word 32 i + lane: number 32 (4 i + j) + lane. Word 256: the scale, amax / 448.
struct E4m3 {
    static constexpr int kWords = kBlockN / 4 + 1;
    __device__ static void encode(int32_t* words, const float (&x)[kPerLane], int) {
        const int lane = threadIdx.x;
        float amax = 0;
        for (int k = 0; k < kPerLane; ++k) amax = fmaxf(amax, fabsf(x[k]) < INFINITY ? fabsf(x[k]) : 0.0f);
        amax = warp_max(amax);
        const float inverse =
            amax > 1e-30f ? 448.0f / amax : 0.0f;  // less is not a gradient, and 448 / amax might be infinite
        for (int i = 0; i < kPerLane / 4; ++i) {
            unsigned word = 0;
            for (int j = 0; j < 4; ++j) {
                const float value = x[4 * i + j];  // infinity must not saturate
                word |= static_cast<unsigned>(__nv_fp8_e4m3(fabsf(value) < INFINITY ? value * inverse : NAN).__x)
                        << (8 * j);
            }
            words[kWarp * i + lane] = static_cast<int32_t>(word);
        }
        if (lane == 0) words[kBlockN / 4] = __float_as_int(amax > 1e-30f ? amax / 448.0f : 0.0f);
        __syncwarp();  // the words are there for every lane
    }
    __device__ static float decode(const int32_t* words, int k) {
        __nv_fp8_e4m3 code;
        code.__x =
            static_cast<__nv_fp8_storage_t>(static_cast<unsigned>(words[k / 4 * kWarp + threadIdx.x]) >> (8 * (k % 4)));
        return static_cast<float>(code) * __int_as_float(words[kBlockN / 4]);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Kernels: a warp for each block of numbers. The kWarps warps of a thread block have no barrier in common, so one that
// has no block of numbers may return.

struct Block {
    int32_t first, n;  // numbers [first, first + n) of the unit; n = 0: only there to give all ranks equally many
};

// x = gradient + error;  codes = encode(x);  error = x - decode(codes)
template <class Codec>
__global__ void __launch_bounds__(kWarp* kWarps)
    encode_gradients_kernel(int32_t* codes, float* error, const float* grads, const Block* blocks, int n_blocks) {
    const int b = blockIdx.x * kWarps + threadIdx.y, lane = threadIdx.x;
    if (b >= n_blocks) return;
    const Block block = blocks[b];
    float x[kPerLane];
    for (int k = 0; k < kPerLane; ++k) {
        const int i = k * kWarp + lane;
        x[k] = i < block.n ? grads[block.first + i] + error[block.first + i] : 0.0f;
    }
    int32_t* words = codes + static_cast<int64_t>(b) * Codec::kWords;
    Codec::encode(words, x, block.n);
    for (int k = 0; k < kPerLane; ++k) {
        const int i = k * kWarp + lane;
        if (i < block.n) error[block.first + i] = x[k] - Codec::decode(words, k);
    }
}

// The same for sums of what the ranks have sent: parts (n_ranks, n_blocks, kWords), error (n_blocks, kBlockN).
template <class Codec>
__global__ void __launch_bounds__(kWarp* kWarps) encode_sums_kernel(int32_t* codes, float* error, const int32_t* parts,
                                                                    int n_ranks, const Block* blocks, int n_blocks) {
    const int b = blockIdx.x * kWarps + threadIdx.y, lane = threadIdx.x;
    if (b >= n_blocks) return;
    float x[kPerLane] = {};
    for (int r = 0; r < n_ranks; ++r) {
        const int32_t* words = parts + (static_cast<int64_t>(r) * n_blocks + b) * Codec::kWords;
        for (int k = 0; k < kPerLane; ++k) x[k] += Codec::decode(words, k);
    }
    const int n = blocks[b].n;
    float* its_error = error + static_cast<int64_t>(b) * kBlockN;
    for (int k = 0; k < kPerLane; ++k) x[k] = k * kWarp + lane < n ? x[k] + its_error[k * kWarp + lane] : 0.0f;
    int32_t* words = codes + static_cast<int64_t>(b) * Codec::kWords;
    Codec::encode(words, x, n);
    for (int k = 0; k < kPerLane; ++k)
        if (k * kWarp + lane < n) its_error[k * kWarp + lane] = x[k] - Codec::decode(words, k);
}

template <class Codec>
__global__ void __launch_bounds__(kWarp* kWarps)
    decode_kernel(float* grads, const int32_t* codes, const Block* blocks, int n_blocks) {
    const int b = blockIdx.x * kWarps + threadIdx.y;
    if (b >= n_blocks) return;
    const Block block = blocks[b];
    for (int k = 0; k < kPerLane; ++k) {
        const int i = k * kWarp + threadIdx.x;
        if (i < block.n) grads[block.first + i] = Codec::decode(codes + static_cast<int64_t>(b) * Codec::kWords, k);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Compressors

template <class Codec>
class BlockCompressor : public Compressor {
  public:
    explicit BlockCompressor(Comm& comm) : comm_(comm) {}

    // A unit's blocks are dealt out to the ranks in pieces of equally many.
    void take_memory(const FlatParameters& p, Arena& arena) override {
        const int64_t n_ranks = p.sharding.size;
        std::vector<Block> blocks;
        units_.clear();
        int64_t n_sums = 0, largest = 0;
        for (size_t u = 0; u < p.units.size(); ++u) {
            const int64_t first = static_cast<int64_t>(blocks.size());
            for (const Param& param : params_of(p, u)) {
                const int64_t n = param.used_n(), at = param.offset - p.units[u].offset;
                for (int64_t i = 0; i < n; i += kBlockN)
                    blocks.push_back({narrow(at + i, "--compress: a unit's numbers"),
                                      static_cast<int32_t>(std::min<int64_t>(kBlockN, n - i))});
            }
            const int64_t piece = ceil_div(static_cast<int64_t>(blocks.size()) - first, n_ranks);
            blocks.resize(static_cast<size_t>(first + piece * n_ranks), {0, 0});
            units_.push_back({first, piece, n_sums});
            n_sums += piece;
            largest = std::max(largest, piece * n_ranks);
        }
        blocks_ = arena.take("gradients' blocks", DType::i32, {static_cast<int64_t>(blocks.size()), 2});
        sent_ = arena.take("compressed gradients", DType::i32, {largest * Codec::kWords});
        received_ = arena.take("compressed gradients", DType::i32, {largest * Codec::kWords});
        error_ = arena.take("compression's errors", DType::f32, {p.n});
        sum_error_ = arena.take("compression's errors", DType::f32, {n_sums * kBlockN});
        if (arena.counting()) return;
        copy_to_device(blocks_, blocks.data());
        zero(error_);
        zero(sum_error_);
    }

    void reduce(const FlatParameters& p, size_t u, cudaStream_t stream) override {
        const auto [first, piece, first_sum] = units_[u];
        if (piece == 0) return;  // with --tp: the rows of the vocabulary that these ranks have only pad it
        const Tensor grads = p.unit_grads(u), error = error_.slice(p.units[u].offset, p.units[u].n);
        const int n_mine = static_cast<int>(piece), n_all = n_mine * comm_.size;
        const int64_t piece_words = piece * Codec::kWords;
        const Block* all = static_cast<const Block*>(blocks_.slice(first, n_all).data);
        const Tensor sent = sent_.slice(0, piece_words * comm_.size),
                     received = received_.slice(0, piece_words * comm_.size);
        const Tensor mine = sent.slice(piece_words * comm_.rank, piece_words);
        const dim3 threads(kWarp, kWarps), few(static_cast<unsigned>(ceil_div(n_mine, kWarps)));
        const dim3 many(static_cast<unsigned>(ceil_div(n_all, kWarps)));

        encode_gradients_kernel<Codec>
            <<<many, threads, 0, stream>>>(sent.ptr<int32_t>(), error.ptr<float>(), grads.ptr<float>(), all, n_all);
        cudaCheckLaunch();
        comm_.all_to_all(received, sent, stream);
        encode_sums_kernel<Codec>
            <<<few, threads, 0, stream>>>(mine.ptr<int32_t>(), sum_error_.ptr<float>() + first_sum * kBlockN,
                                          received.ptr<int32_t>(), comm_.size, all + piece * comm_.rank, n_mine);
        cudaCheckLaunch();
        comm_.all_gather(sent, mine, stream);
        decode_kernel<Codec><<<many, threads, 0, stream>>>(grads.ptr<float>(), sent.ptr<int32_t>(), all, n_all);
        cudaCheckLaunch();
    }

    std::vector<std::pair<std::string, Tensor>> states() const override {
        return {{"error", error_}, {"sum_error", sum_error_}};
    }

  private:
    struct Dealt {
        int64_t first, piece, first_sum;  // its first block; blocks of a rank; those of this rank in the units before
    };
    Comm& comm_;
    std::vector<Dealt> units_;
    Tensor blocks_, sent_, received_, error_, sum_error_;
};

// What travels are bf16 numbers; they are added in float32 by the rank that owns them, and the sum is rounded once.
class Bf16Compressor : public Compressor {
  public:
    explicit Bf16Compressor(Comm& comm) : comm_(comm) {}
    void take_memory(const FlatParameters& p, Arena& arena) override {
        int64_t largest = 0;
        for (const Unit& unit : p.units) largest = std::max(largest, unit.n);
        rounded_ = arena.take("compressed gradients", DType::bf16, {largest});
        sum_ = arena.take("compressed gradients", DType::bf16, {piece_of(largest, p.sharding.size, 0).n});
        comm_.count_memory([&] {
            for (const Unit& unit : p.units) reduce_scatter(unit.n, nullptr);
        });
    }
    void reduce(const FlatParameters& p, size_t u, cudaStream_t stream) override {
        const Tensor grads = p.unit_grads(u), rounded = rounded_.slice(0, grads.n());
        convert(rounded, grads, stream);
        const Tensor sum = reduce_scatter(grads.n(), stream);
        comm_.all_gather(rounded, sum, bounds_of(grads.n()), stream);
        convert(grads, rounded, stream);
    }
    std::vector<std::pair<std::string, Tensor>> states() const override { return {}; }

  private:
    std::vector<int64_t> bounds_of(int64_t n) const {
        std::vector<int64_t> bounds;
        for (int r = 0; r < comm_.size; ++r) bounds.push_back(piece_of(n, comm_.size, r).first);
        bounds.push_back(n);
        return bounds;
    }
    // This rank's piece of the sum of the first n rounded gradients.
    Tensor reduce_scatter(int64_t n, cudaStream_t stream) {
        const Tensor sum = sum_.slice(0, piece_of(n, comm_.size, comm_.rank).n);
        comm_.reduce_scatter(sum, rounded_.slice(0, n), bounds_of(n), ReduceOp::sum, stream);
        return sum;
    }
    Comm& comm_;
    Tensor rounded_, sum_;
};

// ddp with a compressor: a unit at a time, instead of buckets.
class CompressedDdp final : public Scheme {
  public:
    CompressedDdp(CommStream& stream, const CompressOptions& options)
        : Scheme(stream), compressor_(make_compressor(stream.comm, options)) {}
    void take_memory(const FlatParameters& p, int64_t micro_batches, Arena& arena) override {
        micro_batches_ = micro_batches;
        compressor_->take_memory(p, arena);
    }
    void end_grads(const FlatParameters& p, size_t u, cudaStream_t stream) override {
        if (!in_last_micro_batch()) return;
        if (p.units[u].n > 0) comm_stream_.communicate(stream, [&] { compressor_->reduce(p, u, comm_stream_); });
        grads_are_final(u, comm_stream_);
    }
    std::vector<std::pair<std::string, Tensor>> states() const override { return compressor_->states(); }

  private:
    std::unique_ptr<Compressor> compressor_;
};

constexpr Named<Compression> kNames[] = {{"none", Compression::none},
                                         {"bf16", Compression::bf16},
                                         {"fp8", Compression::fp8},
                                         {"powersgd", Compression::power_sgd},
                                         {"1bit", Compression::one_bit}};

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------

Compression compression_from_name(const std::string& name) { return find_named(kNames, "--compress", name).value; }

std::unique_ptr<Compressor> make_compressor(Comm& comm, const CompressOptions& options) {
    switch (options.kind) {
        case Compression::none: return nullptr;
        case Compression::bf16: return std::make_unique<Bf16Compressor>(comm);
        case Compression::fp8: return std::make_unique<BlockCompressor<E4m3>>(comm);
        case Compression::power_sgd: return make_power_sgd(comm, options.rank);
        case Compression::one_bit: return std::make_unique<BlockCompressor<OneBit>>(comm);
    }
    return nullptr;
}

std::unique_ptr<Scheme> make_compressed_ddp(CommStream& stream, const CompressOptions& options) {
    return std::make_unique<CompressedDdp>(stream, options);
}

std::vector<Param> params_of(const FlatParameters& p, size_t u) {
    std::vector<Param> params;
    for (const Param& param : p.params)
        if (p.unit_of(param) == u) params.push_back(param);
    return params;
}

void zero(const Tensor& tensor) {
    cudaCheck(cudaMemset(tensor.data, 0, tensor.bytes()));
    cudaCheck(cudaDeviceSynchronize());
}
