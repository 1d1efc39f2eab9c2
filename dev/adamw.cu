// dev/adamw.cu: one AdamW update of all parameters of a GPT, four times.
//
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + (1 - beta2) g^2
//   w = w - lr * (m^ / (sqrt(v^) + eps) + weight_decay w)         m^ = m / (1 - beta1^t),  v^ = v / (1 - beta2^t)
//
// optim/adamw.cu explains it. An element needs its g, m, v, w read and its m, v, w written: 28 bytes for about 15
// operations, so memory is the limit. The rungs of this ladder do not differ in how threads share the work, but in the
// number of kernels: a framework that runs one operation after the other ("eager") launches many, fused code launches
// few.
//
//   run      make dev && build/cpu/dev/adamw                    (on a GPU build/cuda/dev/adamw)
//            build/cpu/dev/adamw --check | --size 12x768 | --rung 3
//   debug    make DEVICE=cpu debug FILES=dev/adamw.cu PROGRAM=dev/adamw &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/adamw --check --rung 3
#include "dev/ladder.h"
#include "optim/optim.h"

namespace {

constexpr int kBlock = 256;  // threads of a block

// The numbers that are the same for all elements in step t.
struct Constants {
    float lr, eps, weight_decay, beta1, beta2, m_correction, v_correction;  // m^ = m * m_correction
};

// A range of elements that are updated in the same way (all decayed or none): a parameter tensor, or several.
struct Span {
    int64_t first, n;
    bool decay;
};

// Flat arrays of all parameters.
struct Problem {
    Tensor values, grads, m, v, temporary;
};

// ---------------------------------------------------------------------------------------------------------------------
// 1. Eager: one kernel per operation, one launch per tensor. This is what
//
//     m.mul_(beta1).add_(g, 1 - beta1);    v.mul_(beta2).addcmul_(g, g, 1 - beta2);
//     w.mul_(1 - lr wd);    w.addcdiv_(m, (v * v_correction).sqrt() + eps, -lr m_correction)
//
// means in a framework without fusion: seven kernels, each of which reads its operands from memory and writes its
// result there. 8 + 12 + 8 + 12 + 8 + 8 + 16 = 72 bytes per element, where 28 are enough. And the blocks of a GPT of 12
// layers have 144 tensors: 1008 launches of a few microseconds each. Most are for tensors of a few thousand elements,
// whose update takes less time than the launch.

__global__ void scale_kernel(float* x, float factor, int64_t n) {
    const int64_t i = global_thread();
    if (i < n) x[i] *= factor;
}
__global__ void add_scaled_kernel(float* x, const float* y, float factor, int64_t n) {
    const int64_t i = global_thread();
    if (i < n) x[i] += factor * y[i];
}
__global__ void add_scaled_square_kernel(float* x, const float* y, float factor, int64_t n) {
    const int64_t i = global_thread();
    if (i < n) x[i] += factor * (y[i] * y[i]);
}
__global__ void root_kernel(float* out, const float* x, float factor, float eps, int64_t n) {
    const int64_t i = global_thread();
    if (i < n) out[i] = sqrtf(x[i] * factor) + eps;
}
__global__ void add_scaled_quotient_kernel(float* x, const float* y, const float* z, float factor, int64_t n) {
    const int64_t i = global_thread();
    if (i < n) x[i] += factor * (y[i] / z[i]);
}

void adamw_eager(const Problem& p, const std::vector<Span>& spans, const Constants& c, cudaStream_t stream) {
    for (const Span& span : spans) {
        const int64_t n = span.n;
        const unsigned n_blocks = blocks_for(n, kBlock);
        float *w = p.values.ptr<float>() + span.first, *m = p.m.ptr<float>() + span.first;
        float *v = p.v.ptr<float>() + span.first, *root = p.temporary.ptr<float>() + span.first;
        const float* g = p.grads.ptr<float>() + span.first;
        scale_kernel<<<n_blocks, kBlock, 0, stream>>>(m, c.beta1, n);
        add_scaled_kernel<<<n_blocks, kBlock, 0, stream>>>(m, g, 1 - c.beta1, n);
        scale_kernel<<<n_blocks, kBlock, 0, stream>>>(v, c.beta2, n);
        add_scaled_square_kernel<<<n_blocks, kBlock, 0, stream>>>(v, g, 1 - c.beta2, n);
        root_kernel<<<n_blocks, kBlock, 0, stream>>>(root, v, c.v_correction, c.eps, n);
        scale_kernel<<<n_blocks, kBlock, 0, stream>>>(w, 1 - c.lr * (span.decay ? c.weight_decay : 0), n);
        add_scaled_quotient_kernel<<<n_blocks, kBlock, 0, stream>>>(w, m, root, -c.lr * c.m_correction, n);
        cudaCheckLaunch();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Flat: the same seven kernels over many tensors at once (frameworks call it "foreach"). Parameters lie side by
// side, the decayed ones first, so that two spans cover all of them: 14 launches for any model. The bytes stay 72 per
// element. For small models, most of the possible gain comes from this step. For large tensors it gains nothing and can
// be slower: in rung 1 a tensor that fits in the cache was still there for its next operation, but all tensors together
// do not fit.

// ---------------------------------------------------------------------------------------------------------------------
// 3. Fused: one kernel per tensor. Intermediate results, which rungs 1 and 2 write to memory and read back, stay in
// registers: 28 bytes per element, the smallest possible number. 144 launches.

__global__ void adamw_fused_kernel(float* values, float* m_all, float* v_all, const float* grads, Constants c,
                                   float decay, int64_t n) {
    const int64_t i = global_thread();
    if (i >= n) return;
    const float g = grads[i], w = values[i];
    const float m = c.beta1 * m_all[i] + (1 - c.beta1) * g;
    const float v = c.beta2 * v_all[i] + (1 - c.beta2) * (g * g);
    m_all[i] = m;
    v_all[i] = v;
    values[i] = w - c.lr * (m * c.m_correction / (sqrtf(v * c.v_correction) + c.eps) + decay * w);
}

void adamw_fused(const Problem& p, const std::vector<Span>& spans, const Constants& c, cudaStream_t stream) {
    for (const Span& span : spans) {
        adamw_fused_kernel<<<blocks_for(span.n, kBlock), kBlock, 0, stream>>>(
            p.values.ptr<float>() + span.first, p.m.ptr<float>() + span.first, p.v.ptr<float>() + span.first,
            p.grads.ptr<float>() + span.first, c, span.decay ? c.weight_decay : 0, span.n);
        cudaCheckLaunch();
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. The product: one launch for all tensors. A table tells each block where its 1024 elements are and whether they are
// decayed (optim/tiles.cu). As part of Optimizer::step it also handles 16-bit weights and gradients, multiplies the
// gradients by the clipping factor (which would otherwise be one more pass over the gradients), and changes nothing
// when that factor is NaN.

void adamw_product(Optimizer& optimizer, const Problem& p, Tensor norm_scale, double lr, int64_t t,
                   cudaStream_t stream) {
    optimizer.step({p.values}, p.grads, norm_scale, lr, t, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The ladder: reference values, tolerances, and the list of rungs

// The parameters of L transformer blocks of width C, as GPT-2 has them: first all matrices, which are decayed, then all
// biases and norm weights, which are not.
std::vector<Param> gpt_params(int64_t L, int64_t C) {
    std::vector<Param> params;
    int64_t offset = 0;
    const auto add = [&](const char* name, int64_t layer, int64_t n, bool decay) {
        Param param;
        param.name = concat("h.", layer, ".", name);
        param.value = make_tensor(nullptr, DType::f32, {n});
        param.offset = offset;
        param.decay = decay;
        params.push_back(param);
        offset += n;
    };
    for (int64_t l = 0; l < L; ++l) {
        add("attn.c_attn.weight", l, 3 * C * C, true);
        add("attn.c_proj.weight", l, C * C, true);
        add("mlp.c_fc.weight", l, 4 * C * C, true);
        add("mlp.c_proj.weight", l, 4 * C * C, true);
    }
    for (int64_t l = 0; l < L; ++l) {
        add("attn.c_attn.bias", l, 3 * C, false);
        add("mlp.c_fc.bias", l, 4 * C, false);
        for (const char* name :
             {"ln_1.weight", "ln_1.bias", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_proj.bias"})
            add(name, l, C, false);
    }
    return params;
}

struct Reference {
    std::vector<double> w, m, v;
};

Reference adamw_reference(std::vector<float> w, std::vector<float> m, std::vector<float> v, const std::vector<float>& g,
                          const std::vector<Span>& spans, const OptimizerOptions& o, double lr, int64_t t) {
    Reference y{{w.begin(), w.end()}, {m.begin(), m.end()}, {v.begin(), v.end()}};
    const double beta1 = o.beta1, beta2 = o.beta2, steps = static_cast<double>(t);
    for (const Span& span : spans) {
        for (size_t i = static_cast<size_t>(span.first); i < static_cast<size_t>(span.first + span.n); ++i) {
            y.m[i] = beta1 * y.m[i] + (1 - beta1) * g[i];
            y.v[i] = beta2 * y.v[i] + (1 - beta2) * g[i] * g[i];
            const double update =
                y.m[i] / (1 - std::pow(beta1, steps)) / (std::sqrt(y.v[i] / (1 - std::pow(beta2, steps))) + o.eps);
            y.w[i] -= lr * (update + (span.decay ? o.weight_decay : 0) * y.w[i]);
        }
    }
    return y;
}

void climb(Ladder& ladder) {
    const std::vector<Param> params = gpt_params(ladder.size(0), ladder.size(1));
    const int64_t n = params.back().offset + params.back().value.n(), t = 10;
    const double lr = 1e-3;
    const OptimizerOptions options = default_optimizer_options("adamw");
    const Constants constants{static_cast<float>(lr),
                              options.eps,
                              options.weight_decay,
                              options.beta1,
                              options.beta2,
                              static_cast<float>(1 / (1 - std::pow(static_cast<double>(options.beta1), t))),
                              static_cast<float>(1 / (1 - std::pow(static_cast<double>(options.beta2), t)))};
    std::vector<Span> tensors, groups;
    for (const Param& param : params) {
        tensors.push_back({param.offset, param.value.n(), param.decay});
        if (groups.empty() || groups.back().decay != param.decay) groups.push_back({param.offset, 0, param.decay});
        groups.back().n += param.value.n();
    }

    // The product's optimizer owns m and v; the other rungs use the same.
    Arena arena("AdamW");
    std::unique_ptr<Optimizer> optimizer = make_optimizer("adamw", arena, params, n, options);
    arena.reserve();
    optimizer = make_optimizer("adamw", arena, params, n, options);
    optimizer->init(ladder.stream());
    cudaCheck(cudaStreamSynchronize(ladder.stream()));
    // m and v have the same layout as the parameters, the first of which begins at 0.
    const auto flat_state = [&](size_t k) { return make_tensor(optimizer->states()[k].tensor.data, DType::f32, {n}); };
    const Tensor m = flat_state(0), v = flat_state(params.size());
    fill_normal(m, 0.1, 1, 101);
    const Tensor grads = ladder.normal({n});
    std::vector<float> squares = ladder.host(grads);
    for (float& x : squares) x = 0.1f + x * x;
    from_floats(v, squares);
    const Problem p{ladder.in_place(ladder.normal({n})), grads, ladder.in_place(m), ladder.in_place(v),
                    ladder.output({n})};
    const Tensor norm_scale = ladder.take(DType::f32, {2});
    fill_constant(norm_scale, 1.0f);
    const Reference y = adamw_reference(ladder.host(p.values), ladder.host(m), ladder.host(v), ladder.host(grads),
                                        tensors, options, lr, t);

    // In units of 2^-24, the error of one rounding. Gradients and weights are at most 6 (in 10^9). m: two products and
    // a sum, each at most 6; one rounding is added as a margin. v: the same for squares, at most 36. The update: the
    // error of m over a root that is at least 0.4, and about 10 roundings of a quotient of at most 10, make 200, times
    // lr. w: three roundings of at most 6.
    const double m_error = 4 * 6 * 0x1p-24, v_error = 4 * 36 * 0x1p-24, w_error = (3 * 6 + lr * 200) * 0x1p-24;
    ladder.table(concat("AdamW, ", params.size(), " tensors, ", n, " parameters"), Limit::copy,
                 28.0 * static_cast<double>(n));
    ladder.expects({{"m", m, y.m, 0, m_error}, {"v", v, y.v, 0, v_error}, {"values", p.values, y.w, 0, w_error}});
    ladder.rung("eager", "one kernel per operation, one launch per tensor",
                [&](cudaStream_t s) { adamw_eager(p, tensors, constants, s); });
    ladder.rung("flat", "the same kernels over all tensors at once",
                [&](cudaStream_t s) { adamw_eager(p, groups, constants, s); });
    ladder.rung("fused", "one kernel, one launch per tensor",
                [&](cudaStream_t s) { adamw_fused(p, tensors, constants, s); });
    ladder.rung("product", "one kernel, one launch",
                [&](cudaStream_t s) { adamw_product(*optimizer, p, norm_scale, lr, t, s); });
    cudaCheck(cudaStreamSynchronize(ladder.stream()));  // before the arena is freed
}

}  // namespace

int main(int argc, char** argv) {
    return run_ladder(argc, argv,
                      {.name = "adamw",
                       .sizes = "layers x channels",
                       .cpu_size = {12, 192},
                       .gpu_size = {12, 768},
                       .check_sizes = {{1, 1}, {2, 7}, {3, 33}},
                       .climb = climb});
}
