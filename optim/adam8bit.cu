// 8-bit Adam: AdamW whose two states take one byte each.                       (Dettmers et al. 2022, arXiv:2110.02861)
//
//   m, v from their codes     m = table_m[code] * scale_m                optim/adam.h does the rest in f32
//   m, v back to codes        scale_m = max |m| of the block;  code = place of the number nearest to m / scale_m
//
// Blockwise: 256 neighbouring elements share a scale, so that one outlier makes only 255 others less precise, not
// millions.
//
// Dynamic: 8 bits of ordinary integers would hold two decimal orders of magnitude, and the paper found that v spans
// three to five. The table spans six, and half of its numbers are above 0.1. With b(i) = 2^i for m, which has a sign,
// 2^(i+1) for v:
//
//   10^(i-6) * (centre of each of b(i) equal parts of [0.1, 1]),   i = 0..6,    and 0, and 1        256 numbers
//
//       1e-7      1e-6      1e-5      1e-4      1e-3      0.01       0.1        1
//   m     |    1    |    2    |    4    |    8    |   16    |   32    |   64    |     numbers of each sign
//   v     |    2    |    4    |    8    |   16    |   32    |   64    |   128   |
//
// The error of m is up to 0.7 % near 1 and 6 % near 0.1, and that of v half of it.
//
// What differs from the paper: its blocks have 2048 elements (those of its library have 256 today), and its embeddings
// keep states of 32 bits. And here a v above 0 never becomes 0, but the table's smallest number: m would be divided by
// eps alone if the next gradient of this weight were 0, and the weight would take a huge step.
#include "optim/adam.h"
#include "optim/elementwise.cuh"

#include <algorithm>
#include <bit>

namespace {

constexpr int kBlockN = 256;  // elements that share a scale
constexpr int kBlocks = 4;    // blocks of elements in a block of threads
// The number of threads that share a block of elements: a warp. On the CPU device a maximum over a warp takes 32
// switches of stacks, so there it is one thread, whose loops are SIMD.
constexpr int kLanes = kOnCpu ? 1 : kWarp;
constexpr int kLaneN = kBlockN / kLanes;   // elements of a thread
constexpr int kCodePack = kOnCpu ? 1 : 4;  // codes that a thread loads and stores at once

// The nearest number is found without a search. Floats that differ in their lower 16 bits only are a bucket, and in a
// bucket lies at most one midpoint between two neighbours of the table. The bucket's entry has
//
//   upper half   the code of the bucket's lowest float
//   lower half   what the lower half of a float is added to: for those above the midpoint, the sum carries
//
// so that the code of a float is (entry + its lower half) >> 16. All floats from 0 to 2^-23 have one entry: the lowest
// midpoint is 1.6e-7, or 1.4 * 2^-23.
constexpr uint32_t kFirstBucket = ((127 - 23) << 7) - 1, kLastBucket = 127 << 7;  // the last one begins at 1
constexpr uint32_t kBuckets = kLastBucket - kFirstBucket + 1;

// A negative float's lower half is inverted, so that it grows with the float.
__host__ __device__ __forceinline__ uint32_t lower_half(uint32_t bits) { return (bits >> 31 ? ~bits : bits) & 0xffff; }

struct CodeTable {
    float numbers[256];
    uint32_t entries[2][kBuckets];  // of positive and of negative floats
};

CodeTable make_code_table(bool is_signed) {
    CodeTable table;
    int n = 0;
    for (const float number : {0.0f, 1.0f}) table.numbers[n++] = number;
    for (int i = 0; i < 7; ++i) {
        const int parts = 1 << (is_signed ? i : i + 1);
        for (int k = 0; k < parts; ++k) {
            const double number = std::pow(10.0, i - 6) * (0.1 + 0.9 * (k + 0.5) / parts);
            table.numbers[n++] = static_cast<float>(number);
            if (is_signed) table.numbers[n++] = static_cast<float>(-number);
        }
    }
    std::sort(table.numbers, table.numbers + n);  // 2 + 2 * 127 = 2 + 254 numbers
    float midpoints[255];
    for (int k = 0; k < 255; ++k) midpoints[k] = 0.5f * (table.numbers[k] + table.numbers[k + 1]);
    for (uint32_t sign : {0, 1})
        for (uint32_t b = 0; b < kBuckets; ++b) {
            const uint32_t first = (kFirstBucket + b) << 16;
            const float nearest = b > 0 ? std::bit_cast<float>(first) : 0.0f,
                        farthest = std::bit_cast<float>(first | 0xffff);  // from 0
            const float lowest = sign ? -farthest : nearest, highest = sign ? -nearest : farthest;
            const float* const midpoint = std::lower_bound(midpoints, midpoints + 255, lowest);
            table.entries[sign][b] = static_cast<uint32_t>(midpoint - midpoints) << 16;
            if (midpoint < midpoints + 255 && *midpoint < highest)
                table.entries[sign][b] |= 0xffff - lower_half(std::bit_cast<uint32_t>(*midpoint));
        }
    return table;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernel

// The number of midpoints below x: it is the place of the number nearest to x; of two equally near ones, the lower.
__device__ __forceinline__ void nearest_codes(uint32_t (&codes)[kLaneN], const float (&x)[kLaneN],
                                              const CodeTable& table) {
    const uint32_t* const entries = table.entries[0];
    for (int k = 0; k < kLaneN; ++k) {
        const uint32_t bits = __float_as_uint(x[k]), bucket = (bits & 0x7fffffff) >> 16;
        codes[k] = min(max(bucket, kFirstBucket), kLastBucket) - kFirstBucket + (bits >> 31) * kBuckets;
    }
    for (int k = 0; k < kLaneN; ++k) codes[k] = entries[codes[k]];
    for (int k = 0; k < kLaneN; ++k) codes[k] = (codes[k] + lower_half(__float_as_uint(x[k]))) >> 16;
}

// The place in the block of elements of this thread's k-th one.
__device__ __forceinline__ int element_of(int k) {
    return (k / kCodePack * kLanes + static_cast<int>(kLanes > 1 ? threadIdx.x : 0)) * kCodePack + k % kCodePack;
}
__device__ __forceinline__ void load_state(float (&x)[kLaneN], const uint8_t* codes, float scale,
                                           const CodeTable& table) {
    for (int k = 0; k < kLaneN; k += kCodePack) {
        const auto pack = load_packed<uint8_t, kCodePack>(codes + element_of(k));
        for (int l = 0; l < kCodePack; ++l) x[k + l] = table.numbers[pack.v[l]] * scale;
    }
}
__device__ __forceinline__ void store_codes(uint8_t* to, const uint32_t (&codes)[kLaneN]) {
    for (int k = 0; k < kLaneN; k += kCodePack) {
        Packed<uint8_t, kCodePack> pack;
        for (int l = 0; l < kCodePack; ++l) pack.v[l] = static_cast<uint8_t>(codes[k + l]);
        store_packed(to + element_of(k), pack);
    }
}

// The largest magnitude of a block. As bits, which have the order of the magnitudes: their maximum is SIMD.
__device__ __forceinline__ float block_max(const float (&x)[kLaneN]) {
    uint32_t most = 0;
    for (int k = 0; k < kLaneN; ++k) most = max(most, __float_as_uint(x[k]) & 0x7fffffff);
    const float mine = __uint_as_float(most);
    return kLanes == 1 ? mine : warp_max(mine);
}

struct States {
    uint8_t *m_codes, *v_codes;  // (n_blocks, kBlockN), four in an i32 of the tensors
    float *m_scales, *v_scales;  // (n_blocks)
};

// Lane l of 32 has the elements 4 l to 4 l + 3, and 128 further on again: four codes per load.
template <class F, class G>
__global__ void __launch_bounds__(kLanes* kBlocks)
    adam8bit_kernel(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy, States states,
                    const G* __restrict__ grads, const float* __restrict__ norm_scale, const Tile* __restrict__ tiles,
                    int n_tiles, TileOrigin origin, const CodeTable* __restrict__ tables, F format,
                    AdamUpdate<true> update) {
    const int b = static_cast<int>(blockIdx.x) * kBlocks + threadIdx.y;
    const float scale = norm_scale[1];
    if (b >= n_tiles || scale != scale) return;  // all lanes of a block of elements. NaN: no update
    const TileHere tile(tiles, n_tiles, b, origin, scale);
    const Tile& entry = tile.entry;
    uint8_t* const m_codes = states.m_codes + b * int64_t{kBlockN};
    uint8_t* const v_codes = states.v_codes + b * int64_t{kBlockN};
    float m[kLaneN], v[kLaneN];
    load_state(m, m_codes, states.m_scales[b], tables[0]);
    load_state(v, v_codes, states.v_scales[b], tables[1]);
#pragma unroll
    for (int k = 0; k < kLaneN; k += kUpdated) {
        const int e = element_of(k), n_left = tile.n - e;
        if (n_left <= 0) continue;
        float g[kUpdated], w[kUpdated];
        load_chunk(g, grads + (tile.grads + e), n_left);
        load_chunk(w, values + (tile.values + e), n_left);
        // Beyond the parameter's end all are 0, and m and v stay so.
        for (int l = 0; l < kUpdated; ++l) w[l] = update(w[l], scale * g[l], tile.decay, m[k + l], v[k + l]);
        format.store_chunk(values, tile.values + e, copy, tile.copy + e, w, n_left, entry.key, entry.element + e,
                           entry.place);
    }
    const float m_max = block_max(m), v_max = block_max(v);  // after this, all lanes have read the old scales
    for (int k = 0; k < kLaneN; ++k) {
        m[k] = m_max > 0 ? m[k] / m_max : 0.0f;
        v[k] = v_max > 0 ? v[k] / v_max : 0.0f;
    }
    uint32_t codes[kLaneN];
    nearest_codes(codes, m, tables[0]);
    store_codes(m_codes, codes);
    nearest_codes(codes, v, tables[1]);
    for (int k = 0; k < kLaneN; ++k) codes[k] += v[k] > 0 && codes[k] == 0;
    store_codes(v_codes, codes);
    if (element_of(0) == 0) states.m_scales[b] = m_max, states.v_scales[b] = v_max;
}

// ---------------------------------------------------------------------------------------------------------------------
// Launcher

class Adam8bit final : public Optimizer {
    static constexpr const char* kName = "8-bit Adam";

  public:
    Adam8bit(Arena& arena, const std::vector<UpdatedUnit>& units, const OptimizerOptions& options)
        : units_(units), options_(options), table_(count_tiles(units, kBlockN)) {
        check_optimizer_input(kName, units, options);
        const int64_t n_blocks = table_.n_tiles();
        m_codes_ = arena.take("optimizer m", DType::i32, {n_blocks, kBlockN / 4});
        v_codes_ = arena.take("optimizer v", DType::i32, {n_blocks, kBlockN / 4});
        m_scales_ = arena.take("optimizer scales", DType::f32, {n_blocks});
        v_scales_ = arena.take("optimizer scales", DType::f32, {n_blocks});
        tables_ = arena.take("optimizer tiles", DType::i8, {2 * int64_t{sizeof(CodeTable)}});
        tiles_ = arena.take("optimizer tiles", DType::i32, {n_blocks, kTileWords});
    }
    // Scales of 0 make every state 0, whatever its code.
    void init(cudaStream_t stream) override {
        if (table_.n_tiles() == 0) return;
        check(tiles_.data != nullptr, kName, ": init before the arena is reserved");
        for (const Tensor& state : {m_codes_, v_codes_, m_scales_, v_scales_})
            cudaCheck(cudaMemsetAsync(state.data, 0, state.bytes(), stream));
        copy_to_device(tiles_, make_tiles(units_, table_).data());
        cudaCheck(cudaMemcpyAsync(tables_.data, host_tables_.data(), tables_.bytes(), cudaMemcpyHostToDevice, stream));
    }
    void step_units(size_t first, size_t count, const Weights& weights, Tensor grads, Tensor norm_scale, double lr,
                    int64_t t, cudaStream_t stream) override {
        const int64_t first_tile = table_.first_tile[first], end_tile = table_.first_tile[first + count];
        const int64_t n = table_.first_element[first + count] - table_.first_element[first];
        if (end_tile == first_tile) return;
        check_optimizer_step(kName, units_, weights, grads, norm_scale, lr, t);
        const UnitsPart part = part_of_units(units_, first, count, weights, grads);
        const AdamUpdate<true> update(options_, lr, t);
        const int n_tiles = narrow(end_tile - first_tile, "8-bit Adam: the number of blocks");
        const auto of_tiles = [&](const Tensor& states) { return states.slice(first_tile, n_tiles); };
        // From ptr(): strict mode then knows that the kernel touches these blocks alone, and not all behind them.
        const auto codes_of = [&](const Tensor& codes) {
            return reinterpret_cast<uint8_t*>(of_tiles(codes).ptr<int32_t>());
        };
        const States states = {codes_of(m_codes_), codes_of(v_codes_), of_tiles(m_scales_).ptr<float>(),
                               of_tiles(v_scales_).ptr<float>()};
        const dim3 block(kLanes, kBlocks);
        const int n_blocks = static_cast<int>(ceil_div(n_tiles, kBlocks));
        dispatch_weights(kName, weights, grads.dtype, t, [&](auto format, auto grad_zero) {
            using F = decltype(format);
            using G = decltype(grad_zero);
            adam8bit_kernel<F, G><<<n_blocks, block, 0, stream>>>(
                part.weights.values.ptr<typename F::Value>(), copy_of<F>(part.weights), states, part.grads.ptr<G>(),
                norm_scale.ptr<float>(), static_cast<const Tile*>(of_tiles(tiles_).data), n_tiles, part.origin,
                static_cast<const CodeTable*>(tables_.data), format, update);
            LaunchCost cost = update_cost<F, G>(n, n_tiles, 0);
            const int64_t states_bytes = n_tiles * (2 * kBlockN + 2 * int64_t{sizeof(float)});
            // Of the tables the numbers, and an entry for about every second state: others have the same.
            cost.reads += states_bytes + std::min(static_cast<int64_t>(tables_.bytes()), 2048 + 4 * n);
            cost.writes += states_bytes;
            cost.flops = 18.0 * static_cast<double>(n);  // 14 of AdamW; two states, times and by their scales
            launched("adam8bit_kernel", cost);
        });
    }
    // By parameter: a parameter begins a block, so its blocks are rows of the states.
    size_t n_units() const override { return units_.size(); }
    std::vector<OptimizerState> states() const override {
        std::vector<OptimizerState> all;
        int64_t first = 0;
        for (size_t u = 0; u < units_.size(); ++u)
            for (const Param& param : units_[u].params) {
                const int64_t n_blocks = ceil_div(param.value.n(), kBlockN);
                for (const auto& [kind, codes] : {std::pair("m_codes", m_codes_), std::pair("v_codes", v_codes_)})
                    all.push_back({kind, param.name, u, codes.slice(first, n_blocks), 4});
                for (const auto& [kind, scales] : {std::pair("m_scales", m_scales_), std::pair("v_scales", v_scales_)})
                    all.push_back({kind, param.name, u, scales.slice(first, n_blocks), kBlockN});
                first += n_blocks;
            }
        return all;
    }

  private:
    std::vector<UpdatedUnit> units_;
    OptimizerOptions options_;
    TileTable table_;
    std::vector<CodeTable> host_tables_ = {make_code_table(true), make_code_table(false)};  // of m, of v
    Tensor m_codes_, v_codes_, m_scales_, v_scales_, tables_, tiles_;
};

}  // namespace

std::unique_ptr<Optimizer> make_adam8bit(Arena& arena, const std::vector<UpdatedUnit>& units,
                                         const OptimizerOptions& options) {
    return std::make_unique<Adam8bit>(arena, units, options);
}
