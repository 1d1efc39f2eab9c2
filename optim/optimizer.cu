// The optimizers by name, their defaults, and the checks that all of them share.
#include "optim/optim.h"

#include <cmath>

namespace {

struct Entry {
    const char* name;
    MakeOptimizer* make;
    double lr;
    int64_t granularity;
    OptimizerOptions defaults;
};

// Learning rates: those with which the small default model of train_gpt trained well in 150 steps. Other defaults are
// the usual ones for language models, or else those of the paper or of PyTorch. Lion's steps are all of length lr, so
// its lr is smaller than AdamW's, and its weight decay larger.
const std::vector<Entry>& entries() {
    static const std::vector<Entry> table = {
        {"sgd", make_sgd, 0.3, kTileN, {.weight_decay = 0}},
        {"momentum", make_momentum, 0.1, kTileN, {.weight_decay = 0}},
        {"nesterov", make_nesterov, 0.1, kTileN, {.weight_decay = 0}},
        {"adagrad", make_adagrad, 1e-2, kTileN, {.eps = 1e-10f, .weight_decay = 0}},
        {"rmsprop", make_rmsprop, 1e-3, kTileN, {.beta2 = 0.99f, .weight_decay = 0}},
        {"adam", make_adam, 3e-3, kTileN, {.beta2 = 0.999f, .weight_decay = 0}},
        {"adamw", make_adamw, 3e-3, kTileN, {}},
        {"adafactor", make_adafactor, 3e-2, 0, {.eps = 1e-30f, .weight_decay = 0}},
        {"lion", make_lion, 1e-3, kTileN, {.beta2 = 0.99f, .weight_decay = 1}},
        {"muon", make_muon, 5e-2, 0, {.momentum = 0.95f}},
        {"adam8bit", make_adam8bit, 3e-3, kTileN, {}},
    };
    return table;
}

const Entry& entry(const std::string& name) {
    std::string names;
    for (const Entry& e : entries()) {
        if (name == e.name) return e;
        names += concat(names.empty() ? "" : ", ", e.name);
    }
    fail("unknown optimizer '", name, "': use one of ", names);
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const std::string& name, Arena& arena, const std::vector<Param>& params,
                                          int64_t n, const OptimizerOptions& options, bool own_scratch) {
    auto optimizer = entry(name).make(arena, params, n, options);
    if (own_scratch && optimizer->scratch_n() > 0)
        optimizer->use_scratch(arena.take("optimizer scratch", DType::f32, {optimizer->scratch_n()}));
    return optimizer;
}

int64_t optimizer_granularity(const std::string& name) { return entry(name).granularity; }

std::vector<std::string> optimizer_names() {
    std::vector<std::string> names;
    for (const Entry& e : entries()) names.push_back(e.name);
    return names;
}

OptimizerOptions default_optimizer_options(const std::string& name) { return entry(name).defaults; }

double default_learning_rate(const std::string& name) { return entry(name).lr; }

void check_optimizer_input(const char* name, const std::vector<Param>& params, int64_t n, const OptimizerOptions& o) {
    // Written so that a NaN fails, too.
    const auto below_1 = [&](const char* what, float x) {
        check(x >= 0 && x < 1, name, ": ", what, " is ", x, ": it must be from 0 to below 1");
    };
    const auto positive = [&](const char* what, float x) {
        check(x > 0 && std::isfinite(x), name, ": ", what, " is ", x, ": it must be a number above 0");
    };
    below_1("beta1", o.beta1);
    below_1("beta2", o.beta2);
    below_1("momentum", o.momentum);
    positive("eps", o.eps);
    check(o.weight_decay >= 0 && std::isfinite(o.weight_decay), name, ": weight decay is ", o.weight_decay,
          ": it must be a number >= 0");
    positive("decay power", o.decay_power);
    positive("clip threshold", o.clip_threshold);
    positive("smallest scale", o.min_scale);
    positive("ratio of AdamW's learning rate", o.adamw_lr_ratio);
    check(o.ns_steps >= 1 && o.ns_steps <= 100, name, ": ", o.ns_steps, " Newton-Schulz steps: it must be 1 to 100");
    for (const Param& param : params)
        check(param.offset >= 0 && param.offset + param.value.n() <= n, name, ": ", param.name, " ", param.value,
              " at offset ", param.offset, " is not inside the ", n, " flat elements");
}

void check_optimizer_step(const char* name, int64_t n, const Weights& weights, Tensor grads, Tensor norm_scale,
                          double lr, int64_t t) {
    expect(name, "values", weights.values, weights.values.dtype, {n});
    if (weights.copy.exists()) expect(name, "copy", weights.copy, weights.copy.dtype, {n});
    expect(name, "grads", grads, grads.dtype, {n});
    expect(name, "norm_scale", norm_scale, DType::f32, {2});
    check(t >= 1, name, ": t is ", t, ": updates count from 1");
    check(lr >= 0 && std::isfinite(lr), name, ": the learning rate is ", lr, ": it must be a number >= 0");
}
