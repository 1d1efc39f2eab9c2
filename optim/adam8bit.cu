// 8-bit Adam: AdamW whose two states take one byte each.                       (Dettmers et al. 2022, arXiv:2110.02861)
//
//   m, v from their codes     m = table_m[code] * scale_m                optim/adam.h does the rest in f32
//   m, v back to codes        scale_m = max |m| of the block;  code = place of the number nearest to m / scale_m
//
// Blockwise: 256 neighbouring elements share a scale, so that one outlier makes only 255 others less precise, not
// millions.
//
// Dynamic: 8 bits of ordinary integers would hold two decimal orders of magnitude; m and v span seven. The table has
// as many numbers between 0.1 and 1 as in all orders below. With b(i) = 2^i for m, which has a sign, 2^(i+1) for v:
//
//   10^(i-6) * (centre of each of b(i) equal parts of [0.1, 1]),   i = 0..6,    and 0, and 1        256 numbers
//
//        1e-6   1e-5     1e-4          1e-3              1e-2 .........................  1         i = 6: 64 parts
//   ..|.|..|..|...|....|.....|......|........|............|................                        relative error 0.7 %
//
// One deviation from the paper: a v above 0 never becomes 0, but the table's smallest number. m would be divided by eps
// alone if the next gradient of this weight were 0, and the weight would make a huge step.
#include "optim/adam.h"
#include "optim/elementwise.cuh"

#include <algorithm>

namespace {

constexpr int kBlockN = 256;         // elements that share a scale
constexpr int kWords = kBlockN / 4;  // their codes, four in an i32, the first in the lowest byte
constexpr int kBlocks = 4;           // blocks of elements in a block of threads
// The number of threads that share a block of elements: a warp. On the CPU device a maximum over a warp takes 32
// switches of stacks, so there it is one thread, whose loops are SIMD.
constexpr int kLanes = kOnCpu ? 1 : kWarp;
constexpr int kLaneN = kBlockN / kLanes;  // elements of a thread

// The tables on the device: (4, 256) f32. Midpoint k lies between numbers k and k + 1.
struct CodeTables {
    const float *m, *m_midpoints, *v, *v_midpoints;
};

std::vector<float> dynamic_table(bool is_signed) {
    std::vector<float> table = {0.0f, 1.0f};
    for (int i = 0; i < 7; ++i) {
        const int parts = 1 << (is_signed ? i : i + 1);
        for (int k = 0; k < parts; ++k) {
            const double number = std::pow(10.0, i - 6) * (0.1 + 0.9 * (k + 0.5) / parts);
            table.push_back(static_cast<float>(number));
            if (is_signed) table.push_back(static_cast<float>(-number));
        }
    }
    std::sort(table.begin(), table.end());
    return table;  // 2 + 2 * 127 = 2 + 254 numbers
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernel

// The number of midpoints below x, by binary search: it is the place of the number nearest to x; of two equally near
// ones, the lower.
__device__ __forceinline__ void nearest_codes(uint32_t (&codes)[kLaneN], const float (&x)[kLaneN],
                                              const float* midpoints) {
    for (int k = 0; k < kLaneN; ++k) codes[k] = 0;
    for (uint32_t step = 128; step > 0; step /= 2)
        for (int k = 0; k < kLaneN; ++k) codes[k] += x[k] > midpoints[codes[k] + step - 1] ? step : 0;
}

__device__ __forceinline__ float lanes_max(float x) { return kLanes == 1 ? x : warp_max(x); }

struct States {
    uint32_t *m_codes, *v_codes;  // (n_blocks, kWords)
    float *m_scales, *v_scales;   // (n_blocks)
};

// Lane l of 32 has the elements 4 l to 4 l + 3, and 128 further on again: 16 bytes per load, one i32 of codes.
template <class F, class G>
__global__ void __launch_bounds__(kLanes* kBlocks)
    adam8bit_kernel(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy, States states,
                    const G* __restrict__ grads, const float* __restrict__ norm_scale, const Tile* __restrict__ tiles,
                    int n_tiles, TileOrigin origin, CodeTables tables, F format, AdamUpdate<true> update) {
    const int b = static_cast<int>(blockIdx.x) * kBlocks + threadIdx.y, lane = threadIdx.x;
    const float scale = norm_scale[1];
    if (b >= n_tiles || scale != scale) return;  // all lanes of a block of elements. NaN: no update
    const TileHere tile(tiles, n_tiles, b, origin, scale);
    const Tile& entry = tile.entry;
    const float old_m_scale = states.m_scales[b], old_v_scale = states.v_scales[b];
    uint32_t* m_words = states.m_codes + b * int64_t{kWords};
    uint32_t* v_words = states.v_codes + b * int64_t{kWords};

    float m[kLaneN], v[kLaneN], m_max = 0, v_max = 0;
    for (int k = 0; k < kLaneN; ++k) {
        const int word = k / 4 * kLanes + lane, e = word * 4 + k % 4, shift = k % 4 * 8;
        m[k] = tables.m[m_words[word] >> shift & 255] * old_m_scale;
        v[k] = tables.v[v_words[word] >> shift & 255] * old_v_scale;
        if (e >= tile.n) continue;  // beyond the parameter's end, where m and v stay 0
        const float g = scale * to_float(grads[tile.grads + e]);
        const float w = update(to_float(values[tile.values + e]), g, tile.decay, m[k], v[k]);
        format.store(values, tile.values + e, copy, tile.copy + e, w,
                     format.random_bits(entry.key, entry.place.of(entry.element + e)));
    }
    for (int k = 0; k < kLaneN; ++k)
        m_max = fabsf(m[k]) > m_max ? fabsf(m[k]) : m_max, v_max = v[k] > v_max ? v[k] : v_max;
    m_max = lanes_max(m_max);  // after this, all lanes have read the old scales
    v_max = lanes_max(v_max);
    for (int k = 0; k < kLaneN; ++k) {
        m[k] = m_max > 0 ? m[k] / m_max : 0.0f;
        v[k] = v_max > 0 ? v[k] / v_max : 0.0f;
    }
    uint32_t m_codes[kLaneN], v_codes[kLaneN];
    nearest_codes(m_codes, m, tables.m_midpoints);
    nearest_codes(v_codes, v, tables.v_midpoints);
    for (int k = 0; k < kLaneN; ++k) v_codes[k] += v[k] > 0 && v_codes[k] == 0;
    for (int k = 0; k < kLaneN; k += 4) {
        const int word = k / 4 * kLanes + lane;
        m_words[word] = m_codes[k] | m_codes[k + 1] << 8 | m_codes[k + 2] << 16 | m_codes[k + 3] << 24;
        v_words[word] = v_codes[k] | v_codes[k + 1] << 8 | v_codes[k + 2] << 16 | v_codes[k + 3] << 24;
    }
    if (lane == 0) states.m_scales[b] = m_max, states.v_scales[b] = v_max;
}

// ---------------------------------------------------------------------------------------------------------------------
// Launcher

class Adam8bit final : public Optimizer {
    static constexpr const char* kName = "8-bit Adam";

  public:
    Adam8bit(Arena& arena, const std::vector<UpdatedUnit>& units, const OptimizerOptions& options)
        : units_(units), options_(options), table_(make_tiles(units, kBlockN)) {
        check_optimizer_input(kName, units, options);
        const int64_t n_blocks = std::ssize(table_.tiles);
        m_codes_ = arena.take("optimizer m", DType::i32, {n_blocks, kWords});
        v_codes_ = arena.take("optimizer v", DType::i32, {n_blocks, kWords});
        m_scales_ = arena.take("optimizer scales", DType::f32, {n_blocks});
        v_scales_ = arena.take("optimizer scales", DType::f32, {n_blocks});
        tables_ = arena.take("optimizer tiles", DType::f32, {4, 256});
        tiles_ = arena.take("optimizer tiles", DType::i32, {n_blocks, kTileWords});
        for (bool is_signed : {true, false}) {
            const std::vector<float> table = dynamic_table(is_signed);
            host_tables_.insert(host_tables_.end(), table.begin(), table.end());
            for (size_t k = 0; k < 256; ++k)
                host_tables_.push_back(k + 1 < 256 ? 0.5f * (table[k] + table[k + 1]) : INFINITY);
        }
    }
    // Scales of 0 make every state 0, whatever its code.
    void init(cudaStream_t stream) override {
        if (table_.tiles.empty()) return;
        check(tiles_.data != nullptr, kName, ": init before the arena is reserved");
        for (const Tensor& state : {m_codes_, v_codes_, m_scales_, v_scales_})
            cudaCheck(cudaMemsetAsync(state.data, 0, state.bytes(), stream));
        cudaCheck(cudaMemcpyAsync(tiles_.data, table_.tiles.data(), tiles_.bytes(), cudaMemcpyHostToDevice, stream));
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
        const States states = {reinterpret_cast<uint32_t*>(of_tiles(m_codes_).ptr<int32_t>()),
                               reinterpret_cast<uint32_t*>(of_tiles(v_codes_).ptr<int32_t>()),
                               of_tiles(m_scales_).ptr<float>(), of_tiles(v_scales_).ptr<float>()};
        const float* tables = tables_.ptr<float>();
        const CodeTables code_tables = {tables, tables + 256, tables + 512, tables + 768};
        const dim3 block(kLanes, kBlocks);
        const int n_blocks = static_cast<int>(ceil_div(n_tiles, kBlocks));
        dispatch_weights(kName, weights, grads.dtype, t, [&](auto format, auto grad_zero) {
            using F = decltype(format);
            using G = decltype(grad_zero);
            adam8bit_kernel<F, G><<<n_blocks, block, 0, stream>>>(
                part.weights.values.ptr<typename F::Value>(), copy_of<F>(part.weights), states, part.grads.ptr<G>(),
                norm_scale.ptr<float>(), static_cast<const Tile*>(of_tiles(tiles_).data), n_tiles, part.origin,
                code_tables, format, update);
            LaunchCost cost = update_cost<F, G>(n, n_tiles, 0);
            const int64_t states_bytes = n_tiles * (2 * kBlockN + 2 * int64_t{sizeof(float)});
            cost.reads += states_bytes + static_cast<int64_t>(tables_.bytes());
            cost.writes += states_bytes;
            cost.flops = 40.0 * static_cast<double>(n);  // 14 of AdamW, and two searches of 8 rounds
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
                for (const auto& [kind, codes] : {std::pair("m_codes", m_codes_), {"v_codes", v_codes_}})
                    all.push_back({kind, param.name, u, codes.slice(first, n_blocks), 4});
                for (const auto& [kind, scales] : {std::pair("m_scales", m_scales_), {"v_scales", v_scales_}})
                    all.push_back({kind, param.name, u, scales.slice(first, n_blocks), kBlockN});
                first += n_blocks;
            }
        return all;
    }

  private:
    std::vector<UpdatedUnit> units_;
    OptimizerOptions options_;
    TileTable table_;
    std::vector<float> host_tables_;
    Tensor m_codes_, v_codes_, m_scales_, v_scales_, tables_, tiles_;
};

}  // namespace

std::unique_ptr<Optimizer> make_adam8bit(Arena& arena, const std::vector<UpdatedUnit>& units,
                                         const OptimizerOptions& options) {
    return std::make_unique<Adam8bit>(arena, units, options);
}
