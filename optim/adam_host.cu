// adam_host.cu: Adam and AdamW on the host's cores, in host memory.     (ZeRO-Offload: arXiv:2101.06840, section 4.1)
//
//     stream        copies to the host  |  host function: update  |  copies to the device
//                   norm_scale, grads      values, copy, m, v        weights
//
// The update of an element is the function that the device's kernels call (optim/adam.h). A block of threads becomes a
// loop over a tile: g++ makes SIMD instructions of it (16 elements each with AVX-512), and OpenMP gives each core its
// share of the tiles. An element reads g, m, v, w and writes m, v, w and perhaps a copy: 28 bytes, as on the device. So
// memory is the limit here, too: a server with 200 GB/s updates 7 billion parameters per second.
//
// g++ compiles this file for both devices (no kernel, no launch), with -march=native and without contraction to fmaf.
#include "optim/adam.h"

#include <omp.h>

#include <functional>

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

template <class Update>
class HostElementwise final : public Optimizer {
  public:
    HostElementwise(Arena& arena, const std::vector<Param>& params, int64_t n, const OptimizerOptions& options)
        : options_(options), params_(params), n_(n), tiles_(make_tiles(params)), n_threads_(omp_get_max_threads()) {
        check_optimizer_input(Update::kName, params, n, options);
        for (size_t k = 0; k < 2; ++k)
            states_[k] = arena.take(concat("optimizer ", Update::kStates[k]), DType::f32, {n});
    }

    void init(cudaStream_t stream) override {
        for (const Tensor& state : states_)
            if (state) cudaCheck(cudaMemsetAsync(state.data, 0, state.bytes(), stream));
    }

    void step(const Weights& weights, Tensor grads, Tensor norm_scale, double lr, int64_t t,
              cudaStream_t stream) override {
        if (tiles_.empty()) return;
        check_optimizer_step(Update::kName, n_, weights, grads, norm_scale, lr, t);
        expect(Update::kName, "values", weights.values, DType::f32, {n_});
        const Update update(options_, lr, t);
        const float* const scale = norm_scale.ptr<float>() + 1;
        const auto with = [&](auto* copy, auto grad_zero) {
            const auto work = [=, this] {
                run(update, weights.values.ptr<float>(), copy, grads.ptr<decltype(grad_zero)>(), *scale);
            };
            run_on_host(stream, work, {grads, norm_scale}, {weights.values, weights.copy, states_[0], states_[1]});
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

    std::vector<OptimizerState> states() const override {
        std::vector<OptimizerState> all;
        for (size_t k = 0; k < 2; ++k)
            for (const Param& param : params_)
                all.push_back({Update::kStates[k], param.name, states_[k].slice(param.offset, param.value.n())});
        return all;
    }

  private:
    // Runs on a thread of the driver, where omp_get_max_threads() does not give the rank's share of the cores: so
    // n_threads_ holds it.
    template <class G, class C>
    void run(const Update& update, float* w, C* copy, const G* grads, float scale) const {
        if (scale != scale) return;  // NaN: some gradient is inf or NaN, and the update is skipped
        float *const m = states_[0].ptr<float>(), *const v = states_[1].ptr<float>();
        const int64_t n_tiles = static_cast<int64_t>(tiles_.size());
#pragma omp parallel for schedule(static) num_threads(n_threads_)
        for (int64_t i = 0; i < n_tiles; ++i) {
            const Tile& tile = tiles_[static_cast<size_t>(i)];
            update_tile(w + tile.first, copy ? copy + tile.first : nullptr, m + tile.first, v + tile.first,
                        grads + tile.first, tile.n, scale, tile.decay, update);
        }
    }

    OptimizerOptions options_;
    std::vector<Param> params_;
    int64_t n_;
    std::vector<Tile> tiles_;
    int n_threads_;
    Tensor states_[2];
};

}  // namespace

bool has_host_optimizer(const std::string& name) { return name == "adam" || name == "adamw"; }

std::unique_ptr<Optimizer> make_host_optimizer(const std::string& name, Arena& arena, const std::vector<Param>& params,
                                               int64_t n, const OptimizerOptions& options) {
    check(has_host_optimizer(name), "optimizer '", name,
          "' has no update on the host: use adamw or adam, or --offload unified");
    if (name == "adam") return std::make_unique<HostElementwise<AdamUpdate<false>>>(arena, params, n, options);
    return std::make_unique<HostElementwise<AdamUpdate<true>>>(arena, params, n, options);
}
