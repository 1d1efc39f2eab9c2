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
// g is scaled already. decay is 1 or 0. Elementwise<Update> is then the Optimizer. Adam and AdamW have kernels of their
// own, in their files; the others use the kernel below.
#pragma once

#include "optim/weights.cuh"

#include <array>
#include <cmath>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// A tile and its threads

// Neighbours that a thread updates at once: 16 bytes of f32. On the CPU device one: there the threads of a block are a
// loop over consecutive elements, which g++ turns into SIMD. It does not where a thread has several packs, so with
// stochastic rounding a thread of the CPU device has chunks, whose own loops are SIMD (layers/chunk.cuh).
template <class F>
constexpr int kPack = !kOnCpu         ? 4
                      : F::stochastic ? kChunk<float>
                                      : 1;
// Threads that share a tile: a pack each, or with stochastic rounding the packs whose elements share draws of random
// bits, kTileParts of them, kDrawStride elements apart. Blocks have 256 threads, so that several of them fit on a
// multiprocessor of a GPU, and the others move data while one reads where its tile is.
template <class F>
constexpr int kTileThreads = (F::stochastic ? kDrawStride : kTileN) / kPack<F>;
template <class F>
constexpr int kTileParts = F::stochastic ? kDrawParts : 1;
template <class F>
constexpr int kBlockTiles = kOnCpu ? 1 : 256 / kTileThreads<F>;

template <class F>
dim3 tile_block() {
    return dim3(kTileThreads<F>, kBlockTiles<F>);
}
template <class F>
unsigned tile_blocks(int n_tiles) {
    return static_cast<unsigned>(ceil_div(n_tiles, kBlockTiles<F>));
}
// The tile of this thread; some threads of the last block have none.
template <class F>
__device__ __forceinline__ int tile_here() {
    return static_cast<int>(blockIdx.x) * kBlockTiles<F> + static_cast<int>(kBlockTiles<F> > 1 ? threadIdx.y : 0);
}
// Its places in the arrays that the launch has, and how many elements are to be updated: none where this thread has no
// tile, or where `scale` is NaN: some gradient is inf or NaN, and the update is skipped. (As a number of elements,
// because g++ makes no SIMD instructions of a loop over threads in which they may end at two places.)
struct TileHere {
    const Tile& entry;
    int64_t values, copy, grads, state;
    int32_t n;
    float decay;
    // b: from tile_here(), which may be none of the n_tiles.
    __device__ __forceinline__ TileHere(const Tile* tiles, int n_tiles, int b, const TileOrigin& origin, float scale)
        : entry(tiles[kOnCpu || b < n_tiles ? b : 0]), values(entry.values - origin.values),
          copy(entry.copy - origin.copy), grads(entry.grads - origin.grads), state(entry.state - origin.state),
          n(entry.n), decay(static_cast<float>(entry.decay)) {
        if (scale != scale || (!kOnCpu && b >= n_tiles)) n = 0;
    }
};

// Does the tile end before its element k? In whole tiles no thread is asked for its index, so that their loop needs no
// masks. k is unsigned, as threadIdx is: from an int g++ could not tell that neighbours read neighbours, and made no
// SIMD instructions.
__device__ __forceinline__ bool is_behind(const TileHere& tile, unsigned k) {
    return tile.n < kTileN && static_cast<int>(k) >= tile.n;
}
// Those of the pack from element k on that are the tile's; and are they moved in one access? Parameters that are parts
// of one product, q, k and v for example, may begin anywhere.
template <int kN>
struct PackEnd {
    int n = kN;
    bool at_once = true;
    __device__ __forceinline__ PackEnd(const TileHere& tile, unsigned k) {
        if constexpr (kN > 1) {
            n = min(kN, tile.n - static_cast<int>(k));
            at_once = n == kN && (kOnCpu || (tile.values | tile.copy | tile.grads | tile.state) % kN == 0);
        }
    }
};
// The launch's part of an array may begin anywhere, too: a shard of ZeRO does. It is made to begin up to kN - 1
// elements earlier, with a whole pack, and a tile's place in it is a multiple of kN where its address is one.
template <int kN, class T>
T* from_whole_pack(T* first, int64_t& origin) {
    const int64_t n = static_cast<int64_t>(reinterpret_cast<uintptr_t>(first) / sizeof(T) % kN);
    origin -= n;
    return first - n;
}
template <int kN, class T>
__device__ __forceinline__ void load_pack(float (&x)[kN], const T* from, const PackEnd<kN>& end) {
    if constexpr (kN == 1) {
        x[0] = to_float(*from);
    } else if constexpr (kOnCpu) {
        load_chunk(x, from, end.n);
    } else if (end.at_once) {
        const Packed<T, kN> pack = load_packed<T, kN>(from);
        for (int l = 0; l < kN; ++l) x[l] = to_float(pack.v[l]);
    } else {
        for (int l = 0; l < kN; ++l) x[l] = l < end.n ? to_float(from[l]) : 0.0f;
    }
}
template <int kN, class T>
__device__ __forceinline__ void store_pack(T* to, const T (&x)[kN], const PackEnd<kN>& end) {
    if constexpr (kN == 1) {
        *to = x[0];
    } else if (!end.at_once) {
        for (int l = 0; l < kN; ++l)
            if (l < end.n) to[l] = x[l];
    } else if constexpr (kOnCpu) {
        for (int l = 0; l < kN; ++l) to[l] = x[l];
    } else {
        Packed<T, kN> pack;
        for (int l = 0; l < kN; ++l) pack.v[l] = x[l];
        store_packed(to, pack);
    }
}

// The random bits of a thread's elements. In a tile whose elements are a tile of the whole parameter, too, the thread
// draws once for each place of its packs; in a part that is cut elsewhere, an element's draw may be one that no other
// element here needs.
template <class F>
struct TileDraws {
    const F& format;
    const Tile& entry;
    bool is_whole = true;
    Philox draws[kPack<F>] = {};
    __device__ __forceinline__ TileDraws(const F& its_format, const Tile& its_entry)
        : format(its_format), entry(its_entry) {
        if constexpr (F::stochastic) {
            const int64_t first = entry.place.first + entry.element;
            is_whole = !entry.place.is_cut() && first % kTileN == 0;
            const int64_t draw = first / kDrawParts + threadIdx.x * kPack<F>;
            if (!is_whole) return;
            for (int l = 0; l < kPack<F>; ++l) draws[l] = draw_of(format.seed, entry.key, format.t, draw + l);
        }
    }
    // Of the pack from element k of the tile on.
    __device__ __forceinline__ void bits(uint32_t (&random)[kPack<F>], int part, unsigned k) const {
        if (is_whole) {
            for (int l = 0; l < kPack<F>; ++l) random[l] = part_of(draws[l], part);
        } else {
            format.random_bits(random, entry.key, entry.element + k, entry.place);
        }
    }
};

// The new weights of the pack from element k of the tile on.
template <class F>
__device__ __forceinline__ void store_weights(typename F::Value* values, typename F::Copy* copy,
                                              const float (&w)[kPack<F>], const TileHere& tile,
                                              const TileDraws<F>& draws, int part, unsigned k,
                                              const PackEnd<kPack<F>>& end) {
    typename F::Value rounded[kPack<F>];
    uint32_t random[kPack<F>] = {};
    if constexpr (F::stochastic) draws.bits(random, part, k);
    for (int l = 0; l < kPack<F>; ++l) rounded[l] = draws.format.rounded(w[l], random[l]);
    store_pack(values + (tile.values + k), rounded, end);
    if constexpr (F::has_copy) {
        typename F::Copy copied[kPack<F>];
        for (int l = 0; l < kPack<F>; ++l) copied[l] = from_float<typename F::Copy>(w[l]);
        store_pack(copy + (tile.copy + k), copied, end);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The update, and the kernel of all optimizers but Adam and AdamW

// Here and not in the function, because device code may not call the host's array::size.
template <class Update>
constexpr int kNStates = static_cast<int>(Update::kStates.size());

// The update of this thread's elements, with the states a and b of those optimizers that have them.
// No barrier: on the CPU device the threads of a block are a loop over consecutive elements, which g++ turns into SIMD.
// __restrict__ says that no store changes what is loaded after it: these are all different arrays.
template <class F, class G, class Update>
__device__ __forceinline__ void update_tile(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy,
                                            float* __restrict__ as, float* __restrict__ bs, const G* __restrict__ grads,
                                            const float* __restrict__ norm_scale, const Tile* __restrict__ tiles,
                                            int n_tiles, const TileOrigin& origin, const F& format,
                                            const Update& update) {
    constexpr int n_states = kNStates<Update>;
    const float scale = norm_scale[1];  // of gradient clipping and loss scaling
    const TileHere tile(tiles, n_tiles, tile_here<F>(), origin, scale);
    if (tile.n == 0) return;  // here, too, so that the loop over threads is SIMD in every format
    const TileDraws<F> draws(format, tile.entry);
    for (int part = 0; part < kTileParts<F>; ++part) {
        const unsigned k =
            static_cast<unsigned>(part * kDrawStride) + threadIdx.x * kPack<F>;  // first element, in the tile
        if (is_behind(tile, k)) return;
        const PackEnd<kPack<F>> end(tile, k);
        float g[kPack<F>], w[kPack<F>], a[kPack<F>], b[kPack<F>];
        load_pack(g, grads + (tile.grads + k), end);
        load_pack(w, values + (tile.values + k), end);
        if constexpr (n_states > 0) load_pack(a, as + (tile.state + k), end);
        if constexpr (n_states > 1) load_pack(b, bs + (tile.state + k), end);
        for (int l = 0; l < kPack<F>; ++l) {
            const float scaled = scale * g[l];
            if constexpr (n_states == 0) w[l] = update(w[l], scaled, tile.decay);
            else if constexpr (n_states == 1) w[l] = update(w[l], scaled, tile.decay, a[l]);
            else w[l] = update(w[l], scaled, tile.decay, a[l], b[l]);
        }
        if constexpr (n_states > 0) store_pack(as + (tile.state + k), a, end);
        if constexpr (n_states > 1) store_pack(bs + (tile.state + k), b, end);
        store_weights(values, copy, w, tile, draws, part, k, end);
    }
}

template <class Update, class F, class G>
__global__ void __launch_bounds__(kTileThreads<F>* kBlockTiles<F>)
    elementwise_kernel(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy,
                       float* __restrict__ as, float* __restrict__ bs, const G* __restrict__ grads,
                       const float* __restrict__ norm_scale, const Tile* __restrict__ tiles, int n_tiles,
                       TileOrigin origin, F format, Update update) {
    update_tile(values, copy, as, bs, grads, norm_scale, tiles, n_tiles, origin, format, update);
}

// Launches it over tiles. The CPU device's rewriter sees .cu files only, so what it would write stands here.
template <class Update>
struct LaunchElementwise {
    static constexpr const char* kKernel = "elementwise_kernel";
    template <class F, class G>
    static void launch(int n_tiles, cudaStream_t stream, typename F::Value* values, typename F::Copy* copy, float* as,
                       float* bs, const G* grads, const float* norm_scale, const Tile* tiles, const TileOrigin& origin,
                       const F& format, const Update& update) {
#ifdef CUDA_ON_CPU
        ::cuda_cpu::launch(
            kKernel, __FILE__, __LINE__, {tile_blocks<F>(n_tiles), tile_block<F>(), 0, stream},
            [](auto... arguments) -> decltype(elementwise_kernel<Update, F, G>(arguments...)) {
                elementwise_kernel<Update, F, G>(arguments...);
            },
            values, copy, as, bs, grads, norm_scale, tiles, n_tiles, origin, format, update);
#else
        elementwise_kernel<Update, F, G><<<tile_blocks<F>(n_tiles), tile_block<F>(), 0, stream>>>(
            values, copy, as, bs, grads, norm_scale, tiles, n_tiles, origin, format, update);
#endif
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The optimizer around it

// What an update of n elements in this many tiles moves.
template <class F, class G>
LaunchCost update_cost(int64_t n, int64_t n_tiles, int64_t n_states) {
    // Of an entry of the table: places, n and decay; with random numbers also the element's. For packs of several
    // elements all places, also of arrays that are not there (PackEnd).
    const int64_t places = kPack<F> > 1 ? 4 : 2 + F::has_copy + (n_states > 0);
    const int64_t entry = 8 * places + 8 + (F::stochastic ? 32 : 0);
    const int64_t both = static_cast<int64_t>(sizeof(typename F::Value)) + 4 * n_states;
    return {.reads = n * (both + static_cast<int64_t>(sizeof(G))) + n_tiles * entry + 4,
            .writes = n * (both + (F::has_copy ? static_cast<int64_t>(sizeof(typename F::Copy)) : 0)),
            .flops = static_cast<double>(n * (4 + 5 * n_states))};
}

// Launch::launch<F, G> queues the kernel.
template <class Update, class Launch = LaunchElementwise<Update>>
class Elementwise final : public Optimizer {
    static constexpr int kN = kNStates<Update>;
    static_assert(kN <= 2);

  public:
    // packed: the states hold these parameters only, side by side (Muon's AdamW).
    Elementwise(Arena& arena, const std::vector<UpdatedUnit>& units, const OptimizerOptions& options,
                bool packed = false)
        : options_(options), units_(units), table_(count_tiles(units, kTileN, packed)) {
        check_optimizer_input(Update::kName, units, options);
        for (size_t u = 0; u < units.size(); ++u) {
            int64_t first = table_.first_state[u];
            places_.emplace_back();
            for (const Param& param : units[u].params) {
                places_[u].push_back({param.name, packed ? first : first + param.offset, param.value.n()});
                if (packed) first += param.value.n();
            }
        }
        for (int k = 0; k < kN; ++k)
            states_[k] = arena.take(concat("optimizer ", Update::kStates[k]), DType::f32, {table_.state_n()});
        tiles_ = arena.take("optimizer tiles", DType::i32, {table_.n_tiles(), kTileWords});
    }

    void init(cudaStream_t stream) override {
        if (table_.n_tiles() == 0) return;
        check(tiles_.data != nullptr, Update::kName, ": init before the arena is reserved");
        for (int k = 0; k < kN; ++k) cudaCheck(cudaMemsetAsync(states_[k].data, 0, states_[k].bytes(), stream));
        copy_to_device(tiles_, make_tiles(units_, table_).data());
    }

    void step_units(size_t first, size_t count, const Weights& weights, Tensor grads, Tensor norm_scale, double lr,
                    int64_t t, cudaStream_t stream) override {
        const int64_t first_tile = table_.first_tile[first], end_tile = table_.first_tile[first + count];
        const int64_t n = table_.first_element[first + count] - table_.first_element[first];
        if (end_tile == first_tile) return;
        check_optimizer_step(Update::kName, units_, weights, grads, norm_scale, lr, t);
        const UnitsPart part = part_of_units(units_, first, count, weights, grads);
        TileOrigin origin = part.origin;
        origin.state = table_.first_state[first];
        const int64_t state_n = table_.first_state[first + count] - origin.state;
        const Update update(options_, lr, t);
        const int n_tiles = narrow(end_tile - first_tile, "optimizer: the number of tiles");
        dispatch_weights(Update::kName, weights, grads.dtype, t, [&](auto format, auto grad_zero) {
            using F = decltype(format);
            using G = decltype(grad_zero);
            auto* const values = from_whole_pack<kPack<F>>(part.weights.values.ptr<typename F::Value>(), origin.values);
            auto* const copy = from_whole_pack<kPack<F>>(copy_of<F>(part.weights), origin.copy);
            const G* const its_grads = from_whole_pack<kPack<F>>(part.grads.ptr<G>(), origin.grads);
            Launch::template launch<F, G>(
                n_tiles, stream, values, copy, state(0, origin.state, state_n), state(1, origin.state, state_n),
                its_grads, static_cast<const float*>(norm_scale.ptr<float>()),
                static_cast<const Tile*>(tiles_.slice(first_tile, n_tiles).data), origin, format, update);
            launched(Launch::kKernel, update_cost<F, G>(n, n_tiles, kN));
        });
    }

    size_t n_units() const override { return units_.size(); }
    std::vector<OptimizerState> states() const override {
        std::vector<OptimizerState> all;
        for (size_t u = 0; u < units_.size(); ++u)
            for (int k = 0; k < kN; ++k)
                for (const Place& place : places_[u])
                    all.push_back({Update::kStates[k], place.name, u, states_[k].slice(place.first, place.n)});
        return all;
    }

  private:
    struct Place {
        std::string name;
        int64_t first, n;
    };
    float* state(int k, int64_t first, int64_t n) const {
        return k < kN ? states_[k].slice(first, n).template ptr<float>() : nullptr;
    }

    OptimizerOptions options_;
    std::vector<UpdatedUnit> units_;
    TileTable table_;
    std::vector<std::vector<Place>> places_;  // by unit: of the parameters' states
    std::array<Tensor, 2> states_;
    Tensor tiles_;
};

}  // namespace
