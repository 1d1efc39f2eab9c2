// optim/elementwise.cuh: what the elementwise optimizers share: one launch that updates every parameter.
//
// In these optimizers each weight is updated by itself, from its gradient and zero to two numbers of state. All that
// tells them apart is an Update:
//
//     struct Update {
//         static constexpr const char* kName = "Momentum";                    for errors
//         static constexpr std::array<const char*, 1> kStates = {"m"};        0, 1 or 2 states, f32, zero at first
//         Update(const OptimizerOptions& options, double lr, int64_t t);   what is the same for all elements in step t
//         __device__ float operator()(float w, float g, float decay, float& m) const;    one element; returns the new w
//     };
//
// g is scaled already. decay is 1 or 0. Elementwise<Update> is then the Optimizer.
//
// Bound by memory: AdamW in f32 reads g, m, v, w and writes m, v, w: 28 bytes an element for one division and one root.
#pragma once

#include "core/kernel.cuh"
#include "optim/optim.h"

#include <array>
#include <cmath>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Kernel

// One element a thread and no barrier: on the CPU device the threads of a block are a loop over consecutive i, which
// g++ turns into SIMD. __restrict__ says that no store changes what is loaded after it: these are all different arrays.
template <class Update, class V, class G, size_t n_states = Update::kStates.size()>
__global__ void __launch_bounds__(kTileN)
    elementwise_kernel(V* __restrict__ values, float* __restrict__ state_a, float* __restrict__ state_b,
                       const G* __restrict__ grads, const float* __restrict__ norm_scale,
                       const Tile* __restrict__ tiles, Update update) {
    const Tile tile = tiles[blockIdx.x];
    const float scale = norm_scale[1];
    if (scale != scale) return;  // NaN: some gradient is inf or NaN, and this step must leave no trace
    // In whole tiles no thread is asked for its index, so that their loop needs no masks.
    if (tile.n < kTileN && static_cast<int>(threadIdx.x) >= tile.n) return;
    const int64_t i = tile.first + threadIdx.x, j = tile.state_first + threadIdx.x;

    const float g = scale * to_float(grads[i]);
    float w = to_float(values[i]);
    if constexpr (n_states == 0) {
        w = update(w, g, tile.decay);
    } else if constexpr (n_states == 1) {
        float a = state_a[j];
        w = update(w, g, tile.decay, a);
        state_a[j] = a;
    } else {
        float a = state_a[j], b = state_b[j];
        w = update(w, g, tile.decay, a, b);
        state_a[j] = a;
        state_b[j] = b;
    }
    values[i] = from_float<V>(w);
}

// Launches it over all tiles. The CPU device's rewriter sees .cu files only, so what it would write stands here.
template <class Update, class V, class G>
void launch_elementwise(int n_tiles, V* values, float* state_a, float* state_b, const G* grads, const float* norm_scale,
                        const Tile* tiles, const Update& update, cudaStream_t stream) {
#ifdef CUDA_ON_CPU
    ::cuda_cpu::launch(
        Update::kName, __FILE__, __LINE__, {n_tiles, kTileN, 0, stream},
        [](auto... arguments) { elementwise_kernel<Update, V, G>(arguments...); }, values, state_a, state_b, grads,
        norm_scale, tiles, update);
#else
    elementwise_kernel<Update, V, G>
        <<<n_tiles, kTileN, 0, stream>>>(values, state_a, state_b, grads, norm_scale, tiles, update);
#endif
    cudaCheckLaunch();
}

// ---------------------------------------------------------------------------------------------------------------------
// The optimizer around it

template <class Update>
class Elementwise final : public Optimizer {
    static constexpr int kN = static_cast<int>(Update::kStates.size());
    static_assert(kN <= 2);

  public:
    // packed: the states hold these parameters only, side by side, instead of n elements (Muon's AdamW).
    Elementwise(Arena& arena, const std::vector<Param>& params, int64_t n, const OptimizerOptions& options,
                bool packed = false)
        : options_(options), n_(n), packed_(packed), host_tiles_(make_tiles(params, kTileN, packed)) {
        static_assert(sizeof(Tile) == 6 * sizeof(int32_t), "the table is kept in a tensor of (n_tiles, 6) i32");
        check_optimizer_input(Update::kName, params, n, options);
        int64_t state_n = packed ? 0 : n;
        for (const Param& param : params) {
            if (packed) places_.push_back({param.name, state_n, param.value.n()});
            if (packed) state_n += param.value.n();
        }
        for (int k = 0; k < kN; ++k)
            states_[k] = arena.take(concat("optimizer ", Update::kStates[k]), DType::f32, {state_n});
        tiles_ = arena.take("optimizer tiles", DType::i32, {static_cast<int64_t>(host_tiles_.size()), 6});
    }

    void init(cudaStream_t stream) override {
        if (host_tiles_.empty()) return;
        check(tiles_.data != nullptr, Update::kName, ": init before the arena is reserved");
        for (int k = 0; k < kN; ++k) cudaCheck(cudaMemsetAsync(states_[k].data, 0, states_[k].bytes(), stream));
        cudaCheck(cudaMemcpyAsync(tiles_.data, host_tiles_.data(), tiles_.bytes(), cudaMemcpyHostToDevice, stream));
    }

    void step(Tensor values, Tensor grads, Tensor norm_scale, double lr, int64_t t, cudaStream_t stream) override {
        if (host_tiles_.empty()) return;
        check_optimizer_step(Update::kName, n_, values, grads, norm_scale, lr, t);
        const Update update(options_, lr, t);
        const int n_tiles = narrow(static_cast<int64_t>(host_tiles_.size()), "optimizer: the number of tiles");
        dispatch(values.dtype, [&](auto value_zero) {
            dispatch(grads.dtype, [&](auto grad_zero) {
                using V = decltype(value_zero);
                using G = decltype(grad_zero);
                launch_elementwise(n_tiles, values.ptr<V>(), state(0), state(1), static_cast<const G*>(grads.ptr<G>()),
                                   norm_scale.ptr<float>(), static_cast<const Tile*>(tiles_.data), update, stream);
            });
        });
    }

    std::vector<OptimizerState> states() const override {
        std::vector<OptimizerState> all;
        for (int k = 0; k < kN; ++k) {
            if (!packed_) all.push_back({Update::kStates[k], states_[k], true});
            for (const Place& place : places_)
                all.push_back(
                    {concat(Update::kStates[k], ".", place.name), states_[k].slice(place.first, place.n), false});
        }
        return all;
    }

  private:
    struct Place {
        std::string name;
        int64_t first, n;
    };
    float* state(int k) const { return k < kN ? states_[k].template ptr<float>() : nullptr; }

    OptimizerOptions options_;
    int64_t n_;
    bool packed_;
    std::vector<Tile> host_tiles_;
    std::vector<Place> places_;  // of packed states
    std::array<Tensor, 2> states_;
    Tensor tiles_;
};

}  // namespace
