// adam_host.cu: Adam and AdamW on the host's cores, in host memory.     (ZeRO-Offload: arXiv:2101.06840, section 5.1)
//
//     stream        copies to the host  |  host function: update  |  copies to the device
//                   norm_scale, grads      values, copy, m, v        weights
//
// The update of an element is the function that the device's kernels call (optim/adam.h). A block of threads becomes a
// loop over a tile: g++ makes SIMD instructions of it (8 elements each, also with AVX-512), and OpenMP gives each core
// its share of the tiles. An element reads g, m, v, w and writes m, v, w and perhaps a copy: 28 bytes, as on the
// device. So memory is the limit here, too: a server with 200 GB/s updates 7 billion parameters per second.
//
// g++ compiles this file for both devices (no kernel, no launch), with -march=native and without contraction to fmaf.
#include "core/run_on_host.h"
#include "optim/adam.h"

#include <omp.h>

namespace {

struct NoCopy {};

// n elements. __restrict__: no store changes what is loaded after it, as in the kernel (elementwise.cuh's).
template <class Update, class G, class C>
void update_tile(float* __restrict__ w, C* __restrict__ copy, float* __restrict__ m, float* __restrict__ v,
                 const G* __restrict__ grads, int64_t n, float scale, float decay, const Update& update) {
    for (int64_t i = 0; i < n; ++i) {
        const float g = scale * static_cast<float>(grads[i]);
        float a = m[i], b = v[i];
        const float updated = update(w[i], g, decay, a, b);
        w[i] = updated, m[i] = a, v[i] = b;
        if constexpr (!std::is_same_v<C, NoCopy>) copy[i] = static_cast<C>(updated);  // to nearest even
    }
}

template <class C>
void round_tile(C* __restrict__ copy, const float* __restrict__ w, int64_t n) {
    if constexpr (!std::is_same_v<C, NoCopy>)
        for (int64_t i = 0; i < n; ++i) copy[i] = static_cast<C>(w[i]);
}

template <class Update>
class HostElementwise final : public Optimizer {
  public:
    HostElementwise(Arena& arena, const std::vector<UpdatedUnit>& units, const OptimizerOptions& options)
        : options_(options), units_(units), table_(count_tiles(units)), n_threads_(omp_get_max_threads()) {
        check_optimizer_input(Update::kName, units, options);
        for (size_t k = 0; k < 2; ++k)
            states_[k] = arena.take(concat("optimizer ", Update::kStates[k]), DType::f32, {table_.state_n()});
    }

    void init(cudaStream_t stream) override {
        tiles_ = make_tiles(units_, table_);
        for (const Tensor& state : states_)
            if (state) cudaCheck(cudaMemsetAsync(state.data, 0, state.bytes(), stream));
    }

    void step_units(size_t first, size_t count, const Weights& weights, Tensor grads, Tensor norm_scale, double lr,
                    int64_t t, cudaStream_t stream) override {
        const int64_t first_tile = table_.first_tile[first], end_tile = table_.first_tile[first + count];
        if (end_tile == first_tile) return;
        check_optimizer_step(Update::kName, units_, weights, grads, norm_scale, lr, t);
        expect(Update::kName, "values", weights.values, DType::f32, {-1});
        const UnitsPart part = part_of_units(units_, first, count, weights, grads);
        const int64_t first_state = table_.first_state[first],
                      state_n = table_.first_state[first + count] - first_state;
        const Update update(options_, lr, t);
        const float* const scale = norm_scale.ptr<float>() + 1;
        const auto with = [&](auto* copy, auto grad_zero) {
            const auto work = [=, this] {
                run(first_tile, end_tile, update, weights.values.ptr<float>(), copy, grads.ptr<decltype(grad_zero)>(),
                    *scale);
            };
            run_on_host(stream, work, {part.grads, norm_scale},
                        {part.weights.values, part.weights.copy, states_[0].slice(first_state, state_n),
                         states_[1].slice(first_state, state_n)});
        };
        if (!weights.copy.exists()) {
            with(static_cast<NoCopy*>(nullptr), float{});
        } else {
            dispatch(weights.copy.dtype, [&](auto zero) {
                if (grads.dtype == DType::f32) with(weights.copy.ptr<decltype(zero)>(), float{});
                else with(weights.copy.ptr<decltype(zero)>(), zero);
            });
        }
    }

    size_t n_units() const override { return units_.size(); }
    std::vector<OptimizerState> states() const override {
        std::vector<OptimizerState> all;
        for (size_t u = 0; u < units_.size(); ++u)
            for (size_t k = 0; k < 2; ++k)
                for (const Param& param : units_[u].params)
                    all.push_back({Update::kStates[k], param.name, u,
                                   states_[k].slice(table_.first_state[u] + param.offset, param.value.n())});
        return all;
    }

  private:
    // Runs on a thread of the driver, where omp_get_max_threads() does not give the rank's share of the cores: so
    // n_threads_ holds it.
    template <class G, class C>
    void run(int64_t first_tile, int64_t end_tile, const Update& update, float* w, C* copy, const G* grads,
             float scale) const {
        // NaN: some gradient is inf or NaN, and the update is skipped. The copy is written all the same, with the
        // numbers that the device has: it goes there after every step, and is empty before the first one.
        const bool is_skipped = scale != scale;
        float *const m = states_[0].ptr<float>(), *const v = states_[1].ptr<float>();
#pragma omp parallel for schedule(static) num_threads(n_threads_)
        for (int64_t i = first_tile; i < end_tile; ++i) {
            const Tile& tile = tiles_[static_cast<size_t>(i)];
            C* const its_copy = copy ? copy + tile.copy : nullptr;
            if (is_skipped) round_tile(its_copy, w + tile.values, tile.n);
            else
                update_tile(w + tile.values, its_copy, m + tile.state, v + tile.state, grads + tile.grads, tile.n,
                            scale, static_cast<float>(tile.decay), update);
        }
    }

    OptimizerOptions options_;
    std::vector<UpdatedUnit> units_;
    TileTable table_;
    std::vector<Tile> tiles_;
    int n_threads_;
    Tensor states_[2];
};

}  // namespace

bool has_host_optimizer(const std::string& name) { return name == "adam" || name == "adamw"; }

std::unique_ptr<Optimizer> make_host_optimizer(const std::string& name, Arena& arena,
                                               const std::vector<UpdatedUnit>& units, const OptimizerOptions& options) {
    check(has_host_optimizer(name), "optimizer '", name,
          "' has no update on the host: use adamw or adam, or --offload unified");
    if (name == "adam") return std::make_unique<HostElementwise<AdamUpdate<false>>>(arena, units, options);
    return std::make_unique<HostElementwise<AdamUpdate<true>>>(arena, units, options);
}
