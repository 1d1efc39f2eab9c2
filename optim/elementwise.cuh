// optim/elementwise.cuh: what the elementwise optimizers share: one launch that updates every parameter.
//
// In these optimizers each weight is updated by itself, from its gradient and zero to two numbers of state. They differ
// in an Update only:
//
//     struct Update {
//         static constexpr const char* kName = "Momentum";                    for errors
//         static constexpr std::array<const char*, 1> kStates = {"m"};        0, 1 or 2 states, f32, zero at first
//         Update(const OptimizerOptions& options, double lr, int64_t t);   what is the same for all elements in step t
//         __device__ float operator()(float w, float g, float decay, float& m) const;    one element; returns the new w
//     };
//
// g is scaled already. decay is 1 or 0. Elementwise<Update> is then the Optimizer. Adam and AdamW have two states and
// kernels of their own, in their files; the others use the kernel below.
#pragma once

#include "optim/weights.cuh"

#include <array>
#include <cmath>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// A tile and its threads

// Threads of a block: an element each, or the elements that share a draw of random bits.
template <class F>
constexpr int kTileThreads = F::stochastic ? kDrawStride : kTileN;
// Elements of a thread, kDrawStride apart.
template <class F>
constexpr int kTileParts = F::stochastic ? kDrawParts : 1;

// Does the tile end before its element k? In whole tiles no thread is asked for its index, so that their loop needs no
// masks. k is unsigned, as threadIdx is: from an int g++ could not tell that neighbours read neighbours, and made no
// SIMD instructions.
__device__ __forceinline__ bool is_behind(const Tile& tile, unsigned k) {
    return tile.n < kTileN && static_cast<int>(k) >= tile.n;
}
// The random bits of a thread's elements. In a tile whose elements are a tile of the whole parameter, too, the thread
// draws once; in a part that is cut elsewhere, an element's draw may be one that no other element here needs.
template <class F>
struct TileDraws {
    const F& format;
    const Tile& tile;
    bool is_whole = true;
    Philox draw = {};
    __device__ __forceinline__ TileDraws(const F& its_format, const Tile& its_tile)
        : format(its_format), tile(its_tile) {
        if constexpr (F::stochastic) {
            const int64_t first = tile.place.first + tile.element;
            is_whole = tile.place.skip == 0 && tile.place.group_skip == 0 && first % kTileN == 0;
            if (is_whole) draw = draw_of(format.seed, tile.key, format.t, first / kDrawParts + threadIdx.x);
        }
    }
    __device__ __forceinline__ uint32_t bits(int part, unsigned k) const {
        if constexpr (!F::stochastic) return 0;
        if (is_whole) return part_of(draw, part);
        return format.random_bits(tile.key, tile.place.of(tile.element + k));
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The kernel of optimizers with one state or none

// Here and not in the kernel, because device code may not call the host's string_view::empty.
template <class Update>
constexpr bool kHasState = !Update::kStates.empty();

// No barrier: on the CPU device the threads of a block are a loop over consecutive elements, which g++ turns into SIMD.
// __restrict__ says that no store changes what is loaded after it: these are all different arrays.
template <class Update, class F, class G>
__global__ void __launch_bounds__(kTileThreads<F>)
    elementwise_kernel(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy,
                       float* __restrict__ state, const G* __restrict__ grads, const float* __restrict__ norm_scale,
                       const Tile* __restrict__ tiles, F format, Update update) {
    const Tile tile = tiles[blockIdx.x];
    const float scale = norm_scale[1];
    if (scale != scale) return;  // NaN: some gradient is inf or NaN, and the update is skipped
    const TileDraws<F> draws(format, tile);
    for (int part = 0; part < kTileParts<F>; ++part) {
        const unsigned k = static_cast<unsigned>(part * kDrawStride) + threadIdx.x;
        if (is_behind(tile, k)) return;
        const int64_t i = tile.first + k;
        const float g = scale * to_float(grads[i]);
        float w = to_float(values[i]);
        if constexpr (!kHasState<Update>) {
            w = update(w, g, tile.decay);
        } else {
            float a = state[tile.state_first + k];
            w = update(w, g, tile.decay, a);
            state[tile.state_first + k] = a;
        }
        format.store(values, copy, i, w, draws.bits(part, k));
    }
}

// Launches it over all tiles. The CPU device's rewriter sees .cu files only, so what it would write stands here.
template <class Update>
struct LaunchElementwise {
    template <class F, class G>
    static void launch(int n_tiles, cudaStream_t stream, typename F::Value* values, typename F::Copy* copy,
                       float* state, float* /* no second one */, const G* grads, const float* norm_scale,
                       const Tile* tiles, const F& format, const Update& update) {
#ifdef CUDA_ON_CPU
        ::cuda_cpu::launch(
            Update::kName, __FILE__, __LINE__, {n_tiles, kTileThreads<F>, 0, stream},
            [](auto... arguments) -> decltype(elementwise_kernel<Update, F, G>(arguments...)) {
                elementwise_kernel<Update, F, G>(arguments...);
            },
            values, copy, state, grads, norm_scale, tiles, format, update);
#else
        elementwise_kernel<Update, F, G>
            <<<n_tiles, kTileThreads<F>, 0, stream>>>(values, copy, state, grads, norm_scale, tiles, format, update);
#endif
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The optimizer around it

// Launch::launch<F, G> queues the kernel.
template <class Update, class Launch = LaunchElementwise<Update>>
class Elementwise final : public Optimizer {
    static constexpr int kN = static_cast<int>(Update::kStates.size());
    static_assert(kN <= 2);

  public:
    // packed: the states hold these parameters only, side by side, instead of n elements (Muon's AdamW).
    Elementwise(Arena& arena, const std::vector<Param>& params, int64_t n, const OptimizerOptions& options,
                bool packed = false)
        : options_(options), n_(n), host_tiles_(make_tiles(params, kTileN, packed)) {
        check_optimizer_input(Update::kName, params, n, options);
        int64_t state_n = packed ? 0 : n;
        for (const Param& param : params) {
            places_.push_back({param.name, packed ? state_n : param.offset, param.value.n()});
            if (packed) state_n += param.value.n();
        }
        for (int k = 0; k < kN; ++k)
            states_[k] = arena.take(concat("optimizer ", Update::kStates[k]), DType::f32, {state_n});
        tiles_ = arena.take("optimizer tiles", DType::i32, {static_cast<int64_t>(host_tiles_.size()), kTileWords});
    }

    void init(cudaStream_t stream) override {
        if (host_tiles_.empty()) return;
        check(tiles_.data != nullptr, Update::kName, ": init before the arena is reserved");
        for (int k = 0; k < kN; ++k) cudaCheck(cudaMemsetAsync(states_[k].data, 0, states_[k].bytes(), stream));
        cudaCheck(cudaMemcpyAsync(tiles_.data, host_tiles_.data(), tiles_.bytes(), cudaMemcpyHostToDevice, stream));
    }

    void step(const Weights& weights, Tensor grads, Tensor norm_scale, double lr, int64_t t,
              cudaStream_t stream) override {
        if (host_tiles_.empty()) return;
        check_optimizer_step(Update::kName, n_, weights, grads, norm_scale, lr, t);
        const Update update(options_, lr, t);
        const int n_tiles = narrow(static_cast<int64_t>(host_tiles_.size()), "optimizer: the number of tiles");
        dispatch_weights(Update::kName, weights, grads.dtype, t, [&](auto format, auto grad_zero) {
            using F = decltype(format);
            using G = decltype(grad_zero);
            Launch::template launch<F, G>(n_tiles, stream, weights.values.ptr<typename F::Value>(), copy_of<F>(weights),
                                          state(0), state(1), grads.ptr<G>(),
                                          static_cast<const float*>(norm_scale.ptr<float>()),
                                          static_cast<const Tile*>(tiles_.data), format, update);
            cudaCheckLaunch();
        });
    }

    std::vector<OptimizerState> states() const override {
        std::vector<OptimizerState> all;
        for (int k = 0; k < kN; ++k)
            for (const Place& place : places_)
                all.push_back({Update::kStates[k], place.name, states_[k].slice(place.first, place.n)});
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
    std::vector<Tile> host_tiles_;
    std::vector<Place> places_;  // of the parameters' states
    std::array<Tensor, 2> states_;
    Tensor tiles_;
};

}  // namespace
