// Muon: momentum, orthogonalised by Newton-Schulz.      (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon)
//
//   for each hidden matrix W (R, C) with gradient G:
//   m = momentum m + (1 - momentum) G
//   X = momentum m + (1 - momentum) G                                       Nesterov: one gradient further
//   X = X / |X|                                                             now all singular values are at most 1
//   5 times:  A = X X^T,  X = 3.4445 X - 4.7750 A X + 2.0315 A A X          now they lie between about 0.7 and 1.2
//   W = W - lr * (sqrt(max(1, R / C)) * X + weight_decay * W)
//
// A matrix's gradients are nearly of low rank: a few directions, which inputs and outputs share, drown all others. If X
// = U S V^T, U V^T has the same directions, each as large as any other. The iteration gets there without an SVD: an odd
// polynomial in X acts on its singular values alone, and this one makes small values 3.4 times larger each time, at the
// price of not settling at 1. All of it is matrix products: 5 (4 r^2 c + 2 r^3) flops with r <= c the sides of W.
//
// The scale is that of the author's reference: an orthogonal X with R > C changes the root mean square of a layer's R
// outputs by sqrt(C / R) of what a square one does, and sqrt(R / C) makes up for it.
//
// Hidden matrices are those of the numbered layers ("model.layers.3. ...", "transformer.h.3. ..."), each by itself: q,
// k and v are three, although they lie side by side (GPT-2's file has them as one). Embeddings and head, whose rows are
// tokens and not directions, norms and biases are AdamW's, with lr * adamw_lr_ratio (optim/adam.cuh).
#include "layers/layers.h"
#include "optim/adam.cuh"

#include <algorithm>
#include <cctype>

namespace {

// ".<digits>." in the name of something with two dimensions.
bool is_hidden_matrix(const Param& param) {
    const std::string& name = param.name;
    for (size_t i = 0; i < name.size(); ++i) {
        size_t end = i + 1;
        while (name[i] == '.' && end < name.size() && std::isdigit(static_cast<unsigned char>(name[end]))) ++end;
        if (end > i + 1 && end < name.size() && name[end] == '.') return param.value.rank == 2;
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
// Kernels: a thread an element of one matrix

constexpr int kBlock = 256;
int blocks_for(int64_t n) { return narrow(ceil_div(n, kBlock), "Muon: the number of blocks"); }

template <class T, class G>
__global__ void momentum_kernel(T* __restrict__ x, float* __restrict__ ms, const G* __restrict__ grads,
                                const float* __restrict__ norm_scale, int64_t n, float momentum) {
    const int64_t i = global_thread();
    const float scale = norm_scale[1], rest = 1 - momentum;
    if (i >= n || scale != scale) return;  // NaN: no update
    const float g = scale * to_float(grads[i]);
    const float m = momentum * ms[i] + rest * g;
    ms[i] = m;
    x[i] = from_float<T>(momentum * m + rest * g);
}

template <class T>
__global__ void normalise_kernel(T* __restrict__ x, const float* __restrict__ norm, int64_t n) {
    const int64_t i = global_thread();
    if (i < n) x[i] = from_float<T>(to_float(x[i]) / fmaxf(norm[0], 1e-7f));  // a matrix without gradients stays 0
}

template <class V, class T>
__global__ void apply_kernel(V* __restrict__ values, const T* __restrict__ x, const float* __restrict__ norm_scale,
                             int64_t n, float step, float decay_step) {
    const int64_t i = global_thread();
    const float scale = norm_scale[1];
    if (i >= n || scale != scale) return;
    const float w = to_float(values[i]);
    values[i] = from_float<V>(w - (step * to_float(x[i]) + decay_step * w));
}

// ---------------------------------------------------------------------------------------------------------------------
// The optimizer

class Muon final : public Optimizer {
    static constexpr const char* kName = "Muon";

  public:
    Muon(Arena& arena, const std::vector<Param>& params, int64_t n, const OptimizerOptions& options)
        : matrices_(select(params, true)), n_(n), options_(options),
          adamw_(arena, select(params, false), n, options, true) {
        check_optimizer_input(kName, params, n, options);
        int64_t m_n = 0, max_n = 0, max_side = 0;
        for (const Param& matrix : matrices_) {
            m_n += matrix.value.n();
            max_n = std::max(max_n, matrix.value.n());
            max_side = std::max(max_side, std::min(matrix.value.rows(), matrix.value.cols()));
        }
        m_ = arena.take("optimizer m", DType::f32, {m_n});
        for (Tensor* x : {&x_, &y_}) *x = arena.take("optimizer scratch", options.ns_dtype, {max_n});
        for (Tensor* a : {&a_, &b_}) *a = arena.take("optimizer scratch", options.ns_dtype, {max_side * max_side});
        norm_ = arena.take("optimizer scratch", DType::f32, {2});
        norm_scratch_ = arena.take("optimizer scratch", DType::f32, {grad_norm_scratch_n(max_n)});
    }
    void init(cudaStream_t stream) override {
        adamw_.init(stream);
        if (matrices_.empty()) return;
        check(m_.data != nullptr, kName, ": init before the arena is reserved");
        cudaCheck(cudaMemsetAsync(m_.data, 0, m_.bytes(), stream));
    }
    void step(Tensor values, Tensor grads, Tensor norm_scale, double lr, int64_t t, cudaStream_t stream) override {
        adamw_.step(values, grads, norm_scale, lr * options_.adamw_lr_ratio, t, stream);
        if (matrices_.empty()) return;
        check_optimizer_step(kName, n_, values, grads, norm_scale, lr, t);
        int64_t first = 0;
        for (const Param& matrix : matrices_) {
            const int64_t n = matrix.value.n();
            update_matrix(matrix, values.slice(matrix.offset, n), grads.slice(matrix.offset, n), m_.slice(first, n),
                          norm_scale, lr, stream);
            first += n;
        }
    }
    std::vector<OptimizerState> states() const override {
        std::vector<OptimizerState> all = adamw_.states();
        int64_t first = 0;
        for (const Param& matrix : matrices_) {
            all.push_back({"m." + matrix.name, m_.slice(first, matrix.value.n()), false});
            first += matrix.value.n();
        }
        return all;
    }

  private:
    // w, g, m: the matrix's elements.
    void update_matrix(const Param& matrix, Tensor w, Tensor g, Tensor m, Tensor norm_scale, double lr,
                       cudaStream_t stream) {
        const int64_t n = w.n(), R = matrix.value.rows(), C = matrix.value.cols();
        const int n_blocks = blocks_for(n);
        dispatch(options_.ns_dtype, [&](auto zero) {
            using T = decltype(zero);
            dispatch(g.dtype, [&](auto grad_zero) {
                using G = decltype(grad_zero);
                momentum_kernel<T, G><<<n_blocks, kBlock, 0, stream>>>(x_.ptr<T>(), m.ptr<float>(), g.ptr<G>(),
                                                                       norm_scale.ptr<float>(), n, options_.momentum);
                cudaCheckLaunch();
            });
            const Tensor scratch = norm_scratch_.slice(0, grad_norm_scratch_n(n));
            grad_norm(norm_, x_.slice(0, n), 0, scratch, stream);
            normalise_kernel<T><<<n_blocks, kBlock, 0, stream>>>(x_.ptr<T>(), norm_.ptr<float>(), n);
            cudaCheckLaunch();
            const Tensor x = newton_schulz(R, C, stream);
            const float step =
                static_cast<float>(lr * std::sqrt(std::max(1.0, static_cast<double>(R) / static_cast<double>(C))));
            const float decay_step = matrix.decay ? static_cast<float>(lr * options_.weight_decay) : 0.0f;
            dispatch(w.dtype, [&](auto value_zero) {
                using V = decltype(value_zero);
                apply_kernel<V, T><<<n_blocks, kBlock, 0, stream>>>(w.ptr<V>(), x.ptr<T>(), norm_scale.ptr<float>(), n,
                                                                    step, decay_step);
                cudaCheckLaunch();
            });
        });
    }

    // The iterations, on x_. The product A is made on the shorter side: X^T X and X (...) where R > C.
    Tensor newton_schulz(int64_t R, int64_t C, cudaStream_t stream) const {
        constexpr float ka = 3.4445f, kb = -4.7750f, kc = 2.0315f;
        const bool tall = R > C;
        const int64_t side = std::min(R, C);
        Tensor x = x_.slice(0, R * C).view({R, C}), y = y_.slice(0, R * C).view({R, C});
        const Tensor a = a_.slice(0, side * side).view({side, side}), b = b_.slice(0, side * side).view({side, side});
        const auto copy = [&](const Tensor& to, const Tensor& from) {
            cudaCheck(cudaMemcpyAsync(to.data, from.data, from.bytes(), cudaMemcpyDeviceToDevice, stream));
        };
        for (int k = 0; k < options_.ns_steps; ++k) {
            matmul(a, x, x, {.transpose_a = tall, .transpose_b = !tall}, stream);
            copy(b, a);
            matmul(b, a, a, {.alpha = kc, .beta = kb}, stream);  // b = kb A + kc A A
            copy(y, x);
            matmul(y, tall ? x : b, tall ? b : x, {.beta = ka}, stream);  // y = ka X + b X
            std::swap(x, y);
        }
        return x;
    }

    std::vector<Param> matrices_;
    int64_t n_;
    OptimizerOptions options_;
    Elementwise<AdamUpdate<true>> adamw_;
    Tensor m_, x_, y_, a_, b_, norm_, norm_scratch_;
};

}  // namespace

std::unique_ptr<Optimizer> make_muon(Arena& arena, const std::vector<Param>& params, int64_t n,
                                     const OptimizerOptions& options) {
    return std::make_unique<Muon>(arena, params, n, options);
}
