// Muon: momentum, orthogonalised by Newton-Schulz.      (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon)
//
//   for each hidden matrix W (R, C) with gradient G:
//   m = momentum m + (1 - momentum) G
//   X = momentum m + (1 - momentum) G                                       Nesterov: one gradient further
//   X = X / |X|                                                             now all singular values are at most 1
//   5 times:  A = X X^T,  X = 3.4445 X - 4.7750 A X + 2.0315 A A X          now those above 0.0015 are 0.68 to 1.2
//   W = W - lr * (sqrt(max(1, R / C)) * X + weight_decay * W)
//
// A matrix's gradients are nearly of low rank: a few directions, which inputs and outputs share, are much larger than
// all others. If X = U S V^T, U V^T has the same directions, each as large as any other. The iteration approximates it
// without an SVD: an odd polynomial in X acts on its singular values alone, and this one makes small values 3.4 times
// larger each time, but does not converge to 1. All of it is matrix products: 5 (4 r^2 c + 2 r^3) flops, where r <= c
// are the sides of W. bf16 does for them, as in the author's reference, because a singular value may end anywhere near
// 1; training in 16 bits or fewer takes it (OptimizerOptions::ns_dtype): a GPU's tensor cores are many times as fast.
//
// The scale is that of the author's reference: an orthogonal X with R > C changes the root mean square of a layer's R
// outputs only by sqrt(C / R) of what a square matrix does, and the factor sqrt(R / C) compensates for that.
//
// Hidden matrices are those of the numbered layers ("model.layers.3. ...", "transformer.h.3. ..."), each by itself: q,
// k and v are three matrices, also where they are one parameter (GPT-2's c_attn, in which each has a third of the
// rows). AdamW (adamw.cu), with lr * adamw_lr_ratio (0.015: 3e-4 beside 0.02, as the author advises), updates all
// others: norms, biases, and the embeddings and the head, whose rows are tokens and not directions.
//
// Where ranks divide a matrix (Param::cut), each has the momentum of its part, puts X of it into its place among zeros,
// and the sum over the ranks is the whole X. Then all of them do the same iterations, and each updates its part.
#include "layers/layers.h"
#include "optim/weights.cuh"

#include <algorithm>
#include <cctype>

namespace {

// ".<digits>." in the name of something with two dimensions.
bool is_hidden_matrix(const Param& param) {
    const std::string& name = param.file_name();
    for (size_t i = 0; i < name.size(); ++i) {
        size_t end = i + 1;
        while (name[i] == '.' && end < name.size() && std::isdigit(static_cast<unsigned char>(name[end]))) ++end;
        if (end > i + 1 && end < name.size() && name[end] == '.') return param.value.ndim == 2;
    }
    return false;
}

std::vector<Param> select(const std::vector<Param>& params, bool hidden) {
    std::vector<Param> chosen;
    for (const Param& param : params)
        if (is_hidden_matrix(param) == hidden) chosen.push_back(param);
    return chosen;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels: one thread per element, or kUpdated elements, of one matrix

constexpr int kBlock = 256;
int blocks_for(int64_t n) { return narrow(ceil_div(n, kBlock), "Muon: the number of blocks"); }

// ms and grads are of this rank's part of a matrix, x is the whole matrix. Element i of the part is element place.of(i)
// of the whole parameter, whose element `first` is the first one of x.
template <class T, class G>
__global__ void momentum_kernel(T* __restrict__ x, float* __restrict__ ms, const G* __restrict__ grads,
                                const float* __restrict__ norm_scale, int64_t n, float momentum, bool counted,
                                PlaceInWhole place, int64_t first) {
    const int64_t i = global_thread();
    const float scale = norm_scale[1], rest = 1 - momentum;
    if (i >= n || scale != scale) return;  // NaN: no update
    const float g = scale * to_float(grads[i]);
    const float m = momentum * ms[i] + rest * g;
    ms[i] = m;
    if (counted) x[place.of(i) - first] = from_float<T>(momentum * m + rest * g);
}

template <class T>
__global__ void normalise_kernel(T* __restrict__ x, const float* __restrict__ norm, int64_t n) {
    const int64_t i = global_thread();
    if (i < n) x[i] = from_float<T>(to_float(x[i]) / fmaxf(norm[0], 1e-7f));  // a matrix without gradients stays 0
}

// values is this rank's part, and x the whole matrix, as above; the parameter has this key. A thread has kUpdated
// elements.
template <class F, class T>
__global__ void apply_kernel(typename F::Value* __restrict__ values, typename F::Copy* __restrict__ copy,
                             const T* __restrict__ x, const float* __restrict__ norm_scale, int64_t n, float step,
                             float decay_step, F format, uint64_t key, PlaceInWhole place, int64_t first) {
    const int64_t i = global_thread() * kUpdated, n_left = n - i;
    const float scale = norm_scale[1];
    if (n_left <= 0 || scale != scale) return;
    float w[kUpdated], update[kUpdated] = {};
    load_chunk(w, values + i, n_left);
    if (place.is_cut()) {
        for (int k = 0; k < kUpdated; ++k)
            if (k < n_left) update[k] = to_float(x[place.of(i + k) - first]);
    } else {
        load_chunk(update, x + (place.first + i - first), n_left);
    }
    for (int k = 0; k < kUpdated; ++k) w[k] -= step * update[k] + decay_step * w[k];
    format.store_chunk(values, i, copy, i, w, n_left, key, i, place);
}

// ---------------------------------------------------------------------------------------------------------------------
// The optimizer

// What is orthogonalised by itself: a parameter, or a third of it.
struct Matrix {
    int64_t R, C;          // of the whole matrix
    int64_t offset, n;     // of this rank's part of it in the flat arrays
    int64_t m_first;       // place in the state
    uint64_t key;          // hash_name of its parameter
    int64_t element;       // of the parameter: the first one of this matrix
    PlaceInWhole place;    // of the part's elements in the parameter
    bool is_cut, counted;  // counted: of the ranks that have the same part one puts it into the whole
    bool decay;
    int64_t whole_n() const { return R * C; }
};

class Muon final : public Optimizer {
    static constexpr const char* kName = "Muon";

  public:
    Muon(Arena& arena, const std::vector<Param>& params, int64_t n, const OptimizerOptions& options)
        : params_(select(params, true)), n_(n), options_(options),
          adamw_(make_packed_adamw(arena, {{.params = select(params, false), .n = n}}, options)) {
        check_optimizer_input(kName, {{.params = params, .n = n}}, options);
        int64_t m_n = 0;
        for (const Param& param : params_) {
            const bool is_cut = param.cut.exists();
            const int64_t n_parts = param.name.ends_with(".attn.c_attn.weight") ? 3 : 1,
                          C = is_cut ? param.cut.cols : param.value.cols(),
                          R = div_exact(is_cut ? param.cut.rows : param.value.rows(), n_parts, "rows of q, k and v"),
                          n_here = param.value.n() / n_parts;
            for (int64_t part = 0; part < n_parts; ++part, m_n += n_here) {
                PlaceInWhole place = place_in_whole(param);
                place.first = place.of(part * n_here);
                if (n_parts > 1) place.group = 1, place.group_skip = 0;  // a third is one group of rows
                matrices_.push_back({R, C, param.offset + part * n_here, n_here, m_n, hash_name(param.file_name()),
                                     part * R * C, place, is_cut, param.counted || !is_cut, param.decay});
            }
            max_n_ = std::max(max_n_, R * C);
            max_side_ = std::max(max_side_, std::min(R, C));
        }
        m_ = arena.take("optimizer m", DType::f32, {m_n});
    }
    // Two matrices, two products, a norm: each aligned as matrix products need it.
    int64_t scratch_n() const override {
        if (matrices_.empty()) return 0;
        return 2 * words(max_n_) + 2 * words(max_side_ * max_side_) + kAlignN +
               round_up(grad_norm_scratch_n(max_n_), kAlignN);
    }
    void use_scratch(Tensor scratch) override {
        int64_t first = 0;
        const auto take = [&](DType dtype, int64_t n, int64_t n_words) {
            char* const data = static_cast<char*>(scratch.data);
            const Tensor part =
                make_tensor(data ? data + static_cast<size_t>(first) * sizeof(float) : nullptr, dtype, {n});
            first += n_words;
            return part;
        };
        for (Tensor* x : {&x_, &y_}) *x = take(options_.ns_dtype, max_n_, words(max_n_));
        for (Tensor* a : {&a_, &b_}) *a = take(options_.ns_dtype, max_side_ * max_side_, words(max_side_ * max_side_));
        norm_ = take(DType::f32, 2, kAlignN);
        norm_scratch_ = take(DType::f32, grad_norm_scratch_n(max_n_), 0);
    }
    std::vector<Tensor> sums() const override {
        std::vector<Tensor> all;
        for (const Matrix& matrix : matrices_)
            if (matrix.is_cut) all.push_back(make_tensor(nullptr, options_.ns_dtype, {matrix.whole_n()}));
        return all;
    }
    void use_sums(const SumOverRanks& sum) override { sum_ = sum; }
    // newton_schulz(), and the norm before it.
    Products products() const override {
        Products all;
        for (const Matrix& matrix : matrices_) {
            const double n = static_cast<double>(matrix.whole_n()), steps = options_.ns_steps;
            const double side = static_cast<double>(std::min(matrix.R, matrix.C)), square = side * side;
            all.flops += steps * (2 * n * side + 2 * square * side + 2 * n * side);
            const double moved = (n + square) + 2 * square + (square + 2 * n);  // x -> a; a -> b; b, x -> y
            all.bytes += (steps * moved + n) * static_cast<double>(dtype_bytes(options_.ns_dtype));
        }
        return all;
    }
    void init(cudaStream_t stream) override {
        adamw_->init(stream);
        if (matrices_.empty()) return;
        check(m_.data != nullptr, kName, ": init before the arena is reserved");
        cudaCheck(cudaMemsetAsync(m_.data, 0, m_.bytes(), stream));
    }
    void step_units(size_t, size_t, const Weights& weights, Tensor grads, Tensor norm_scale, double lr, int64_t t,
                    cudaStream_t stream) override {
        adamw_->step(weights, grads, norm_scale, lr * options_.adamw_lr_ratio, t, stream);
        if (matrices_.empty()) return;
        check_optimizer_step(kName, {{.n = n_}}, weights, grads, norm_scale, lr, t);
        dispatch_weights(kName, weights, grads.dtype, t, [&](auto format, auto grad_zero) {
            for (const Matrix& matrix : matrices_) {
                update_momentum(matrix, grads.ptr<decltype(grad_zero)>() + matrix.offset, norm_scale, stream);
                normalise(matrix.whole_n(), stream);
                apply(matrix, newton_schulz(matrix.R, matrix.C, stream), weights, format, norm_scale, lr, stream);
            }
        });
    }
    size_t n_units() const override { return 1; }  // make_by_unit has the others
    std::vector<OptimizerState> states() const override {
        std::vector<OptimizerState> all = adamw_->states();
        int64_t first = 0;
        for (const Param& param : params_) {
            all.push_back({"m", param.name, 0, m_.slice(first, param.value.n())});
            first += param.value.n();
        }
        return all;
    }

  private:
    static constexpr int64_t kAlignN = 64;  // 256 bytes
    int64_t words(int64_t n) const {        // f32 elements that n of ns_dtype take
        return round_up(ceil_div(n * static_cast<int64_t>(dtype_bytes(options_.ns_dtype)), 4), kAlignN);
    }
    // The three parts of an update. Each of them is compiled for the types that it knows, and not for all combinations.
    // grads: of this rank's part of the matrix. x_ is the whole one afterwards.
    template <class G>
    void update_momentum(const Matrix& matrix, const G* grads, const Tensor& norm_scale, cudaStream_t stream) {
        const Tensor x = x_.slice(0, matrix.whole_n());
        if (matrix.is_cut) set_to_zero(x, stream);
        dispatch(options_.ns_dtype, [&](auto zero) {
            using T = decltype(zero);
            momentum_kernel<T, G><<<blocks_for(matrix.n), kBlock, 0, stream>>>(
                x.ptr<T>(), m_.ptr<float>() + matrix.m_first, grads, norm_scale.ptr<float>(), matrix.n,
                options_.momentum, matrix.counted, matrix.place, matrix.element);
            const int64_t written = matrix.counted ? matrix.n * static_cast<int64_t>(sizeof(T)) : 0;
            launched("momentum_kernel", {.reads = matrix.n * (4 + static_cast<int64_t>(sizeof(G))) + 4,
                                         .writes = matrix.n * 4 + written,
                                         .scratch = written,
                                         .flops = 7.0 * static_cast<double>(matrix.n)});
        });
        if (!matrix.is_cut) return;
        check(sum_ != nullptr, kName, ": a matrix is cut, and there is no sum over the ranks that have its parts");
        sum_(x, stream);
    }
    void normalise(int64_t n, cudaStream_t stream) {
        grad_norm(norm_, x_.slice(0, n), 0, 1, norm_scratch_.slice(0, grad_norm_scratch_n(n)), stream);
        dispatch(options_.ns_dtype, [&](auto zero) {
            using T = decltype(zero);
            normalise_kernel<T><<<blocks_for(n), kBlock, 0, stream>>>(x_.ptr<T>(), norm_.ptr<float>(), n);
            const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
            launched("normalise_kernel",
                     {.reads = bytes + 4, .writes = bytes, .scratch = 2 * bytes, .flops = static_cast<double>(n)});
        });
    }
    template <class F>
    void apply(const Matrix& matrix, const Tensor& x, const Weights& weights, const F& format, const Tensor& norm_scale,
               double lr, cudaStream_t stream) {
        const double aspect = static_cast<double>(matrix.R) / static_cast<double>(matrix.C);
        const float step = static_cast<float>(lr * std::sqrt(std::max(1.0, aspect)));
        const float decay_step = matrix.decay ? static_cast<float>(lr * options_.weight_decay) : 0.0f;
        auto* const values = weights.values.ptr<typename F::Value>() + matrix.offset;
        auto* const copy = copy_of<F>(weights) + (weights.copy ? matrix.offset : 0);
        dispatch(options_.ns_dtype, [&](auto zero) {
            using T = decltype(zero);
            apply_kernel<F, T><<<blocks_for(ceil_div(matrix.n, kUpdated)), kBlock, 0, stream>>>(
                values, copy, x.ptr<T>(), norm_scale.ptr<float>(), matrix.n, step, decay_step, format, matrix.key,
                matrix.place, matrix.element);
            const int64_t value_bytes = matrix.n * static_cast<int64_t>(sizeof(typename F::Value)),
                          x_bytes = matrix.n * static_cast<int64_t>(sizeof(T)),
                          copy_bytes = F::has_copy ? matrix.n * static_cast<int64_t>(sizeof(typename F::Copy)) : 0;
            launched("apply_kernel", {.reads = value_bytes + x_bytes + 4,
                                      .writes = value_bytes + copy_bytes,
                                      .scratch = x_bytes,
                                      .flops = 4.0 * static_cast<double>(matrix.n)});
        });
    }

    // The iterations, on x_. The product A is made on the shorter side: X^T X and X (...) where R > C.
    Tensor newton_schulz(int64_t R, int64_t C, cudaStream_t stream) const {
        constexpr float ka = 3.4445f, kb = -4.7750f, kc = 2.0315f;
        const bool tall = R > C;
        const int64_t side = std::min(R, C);
        Tensor x = x_.slice(0, R * C).view({R, C}), y = y_.slice(0, R * C).view({R, C});
        const Tensor a = a_.slice(0, side * side).view({side, side}), b = b_.slice(0, side * side).view({side, side});
        for (int k = 0; k < options_.ns_steps; ++k) {
            matmul(a, x, x, {.transpose_a = tall, .transpose_b = !tall}, stream);
            matmul(b, a, a, {.alpha = kc, .beta = kb, .added = a}, stream);           // b = kb A + kc A A
            matmul(y, tall ? x : b, tall ? b : x, {.beta = ka, .added = x}, stream);  // y = ka X + b X
            std::swap(x, y);
        }
        return x;
    }

    std::vector<Param> params_;  // the hidden ones
    std::vector<Matrix> matrices_;
    int64_t n_, max_n_ = 0, max_side_ = 0;
    OptimizerOptions options_;
    std::unique_ptr<Optimizer> adamw_;  // updates the others
    Tensor m_, x_, y_, a_, b_, norm_, norm_scratch_;
    SumOverRanks sum_;
};

}  // namespace

std::unique_ptr<Optimizer> make_muon(Arena& arena, const std::vector<UpdatedUnit>& units,
                                     const OptimizerOptions& options) {
    return make_by_unit(units, [&](const std::vector<Param>& params, int64_t n) {
        return std::make_unique<Muon>(arena, params, n, options);
    });
}
