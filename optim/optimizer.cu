// The optimizers by name, their defaults, the hyperparameters that have flags, and the checks that all of them share.
#include "core/names.h"
#include "optim/optim.h"

#include <algorithm>
#include <cmath>

namespace {

struct Entry {
    const char* name;
    MakeOptimizer* make;
    double lr;
    int64_t granularity;
    std::vector<float OptimizerOptions::*> reads;  // of hyperparameters(), beside weight decay
    OptimizerOptions defaults;
};

// Learning rates: those with which the small default model of train_gpt trained well in 150 steps. Other defaults are
// the usual ones for language models, or else those of the paper or of PyTorch. Lion's steps are all of length lr, so
// its lr is smaller than AdamW's, and its weight decay larger.
const std::vector<Entry>& entries() {
    using O = OptimizerOptions;
    static const std::vector<Entry> table = {
        {"sgd", make_sgd, 0.3, kTileN, {}, {.weight_decay = 0}},
        {"momentum", make_momentum, 0.1, kTileN, {&O::momentum}, {.weight_decay = 0}},
        {"nesterov", make_nesterov, 0.1, kTileN, {&O::momentum}, {.weight_decay = 0}},
        {"adagrad", make_adagrad, 1e-2, kTileN, {&O::eps}, {.weight_decay = 0, .eps = 1e-10f}},
        {"rmsprop", make_rmsprop, 1e-3, kTileN, {&O::beta2, &O::eps}, {.weight_decay = 0, .beta2 = 0.99f}},
        {"adam", make_adam, 3e-3, kTileN, {&O::beta1, &O::beta2, &O::eps}, {.weight_decay = 0, .beta2 = 0.999f}},
        {"adamw", make_adamw, 3e-3, kTileN, {&O::beta1, &O::beta2, &O::eps}, {}},
        {"adafactor", make_adafactor, 3e-2, 0, {&O::eps}, {.weight_decay = 0, .eps = 1e-30f}},
        {"lion", make_lion, 1e-3, kTileN, {&O::beta1, &O::beta2}, {.weight_decay = 1, .beta2 = 0.99f}},
        {"muon", make_muon, 5e-2, 0, {&O::momentum, &O::beta1, &O::beta2, &O::eps}, {.momentum = 0.95f}},
        {"adam8bit", make_adam8bit, 3e-3, kTileN, {&O::beta1, &O::beta2, &O::eps}, {}},
    };
    return table;
}

const Entry& entry(const std::string& name) { return find_named(entries(), "--optimizer", name); }

class ByUnit final : public Optimizer {
  public:
    using Make = std::function<std::unique_ptr<Optimizer>(const std::vector<Param>& params, int64_t n)>;
    ByUnit(const std::vector<UpdatedUnit>& units, const Make& make) : units_(units) {
        for (const UpdatedUnit& unit : units) optimizers_.push_back(make(unit.params, unit.n));
    }
    void init(cudaStream_t stream) override {
        for (const auto& optimizer : optimizers_) optimizer->init(stream);
    }
    void step_units(size_t first, size_t count, const Weights& weights, Tensor grads, Tensor norm_scale, double lr,
                    int64_t t, cudaStream_t stream) override {
        for (size_t u = first; u < first + count; ++u) {
            if (units_[u].n == 0) continue;
            check_optimizer_step("optimizer", units_, weights, grads, norm_scale, lr, t);
            const UnitsPart part = part_of_units(units_, u, 1, weights, grads);
            optimizers_[u]->step(part.weights, part.grads, norm_scale, lr, t, stream);
        }
    }
    size_t n_units() const override { return units_.size(); }
    std::vector<OptimizerState> states() const override {
        std::vector<OptimizerState> all;
        for (size_t u = 0; u < units_.size(); ++u)
            for (OptimizerState& state : optimizers_[u]->states()) all.push_back(state), all.back().unit = u;
        return all;
    }
    int64_t scratch_n() const override {
        int64_t n = 0;
        for (const auto& optimizer : optimizers_) n = std::max(n, optimizer->scratch_n());
        return n;
    }
    void use_scratch(Tensor scratch) override {
        for (const auto& optimizer : optimizers_) optimizer->use_scratch(scratch);
    }
    std::vector<Tensor> sums() const override {
        std::vector<Tensor> all;
        for (const auto& optimizer : optimizers_)
            for (const Tensor& sum : optimizer->sums()) all.push_back(sum);
        return all;
    }
    Products products() const override {
        Products all;
        for (const auto& optimizer : optimizers_) {
            const Products its = optimizer->products();
            all.flops += its.flops, all.bytes += its.bytes;
        }
        return all;
    }
    void use_sums(const SumOverRanks& sum) override {
        for (const auto& optimizer : optimizers_) optimizer->use_sums(sum);
    }

  private:
    std::vector<UpdatedUnit> units_;
    std::vector<std::unique_ptr<Optimizer>> optimizers_;
};

}  // namespace

std::unique_ptr<Optimizer> make_by_unit(
    const std::vector<UpdatedUnit>& units,
    const std::function<std::unique_ptr<Optimizer>(const std::vector<Param>& params, int64_t n)>& make) {
    return std::make_unique<ByUnit>(units, make);
}

std::unique_ptr<Optimizer> make_optimizer(const std::string& name, Arena& arena, const std::vector<UpdatedUnit>& units,
                                          const OptimizerOptions& options) {
    auto optimizer = entry(name).make(arena, units, options);
    if (optimizer->scratch_n() > 0)
        optimizer->use_scratch(arena.take("optimizer scratch", DType::f32, {optimizer->scratch_n()}));
    return optimizer;
}
std::unique_ptr<Optimizer> make_optimizer(const std::string& name, Arena& arena, const std::vector<Param>& params,
                                          int64_t n, const OptimizerOptions& options) {
    return make_optimizer(name, arena, {{.params = params, .n = n}}, options);
}

int64_t optimizer_granularity(const std::string& name) { return entry(name).granularity; }

std::vector<std::string> optimizer_names() { return names_of(entries()); }

OptimizerOptions default_optimizer_options(const std::string& name) { return entry(name).defaults; }

double default_learning_rate(const std::string& name) { return entry(name).lr; }

const std::vector<Hyperparameter>& hyperparameters() {
    using Range = Hyperparameter::Range;
    static const std::vector<Hyperparameter> table = {
        {"weight-decay", &OptimizerOptions::weight_decay, Range::not_negative, "on matrices only"},
        {"beta1", &OptimizerOptions::beta1, Range::below_1,
         "decay rate of the first moment (running mean of the gradients); lion: its share in the step"},
        {"beta2", &OptimizerOptions::beta2, Range::below_1,
         "decay rate of the second moment (running mean of their squares); lion: of the first"},
        {"eps", &OptimizerOptions::eps, Range::positive,
         "added to the root that divides the step; adafactor: lower limit of the second moment"},
        {"momentum", &OptimizerOptions::momentum, Range::below_1, "decay rate of the momentum"},
    };
    return table;
}

std::vector<std::string> optimizers_that_read(const Hyperparameter& hyperparameter) {
    std::vector<std::string> names;
    for (const Entry& e : entries())
        if (hyperparameter.field == &OptimizerOptions::weight_decay ||
            std::ranges::count(e.reads, hyperparameter.field) > 0)
            names.push_back(e.name);
    return names;
}

std::string hyperparameter_fault(const Hyperparameter& hyperparameter, float value) {
    // Written so that a NaN is a fault, too.
    switch (hyperparameter.range) {
        case Hyperparameter::Range::not_negative:
            return value >= 0 && std::isfinite(value) ? "" : "it must be a number >= 0";
        case Hyperparameter::Range::positive:
            return value > 0 && std::isfinite(value) ? "" : "it must be a number above 0";
        case Hyperparameter::Range::below_1: return value >= 0 && value < 1 ? "" : "it must be from 0 to below 1";
    }
    fail("no such range");
}

void check_optimizer_input(const char* name, const std::vector<UpdatedUnit>& units, const OptimizerOptions& o) {
    for (const Hyperparameter& h : hyperparameters()) {
        const std::string fault = hyperparameter_fault(h, o.*h.field);
        check(fault.empty(), name, ": ", h.name, " is ", o.*h.field, ": ", fault);
    }
    const auto positive = [&](const char* what, float x) {
        check(x > 0 && std::isfinite(x), name, ": ", what, " is ", x, ": it must be a number above 0");
    };
    positive("decay power", o.decay_power);
    positive("clip threshold", o.clip_threshold);
    positive("smallest scale", o.min_scale);
    positive("ratio of AdamW's learning rate", o.adamw_lr_ratio);
    check(o.ns_steps >= 1 && o.ns_steps <= 100, name, ": ", o.ns_steps, " Newton-Schulz steps: it must be 1 to 100");
    for (const UpdatedUnit& unit : units)
        for (const Param& param : unit.params)
            check(param.offset >= 0 && param.offset + param.value.n() <= unit.n, name, ": ", param.name, " ",
                  param.value, " at offset ", param.offset, " is not inside the ", unit.n, " flat elements");
}

void check_optimizer_step(const char* name, const std::vector<UpdatedUnit>& units, const Weights& weights, Tensor grads,
                          Tensor norm_scale, double lr, int64_t t) {
    const auto holds = [&](const char* what, const Tensor& array, int64_t UpdatedUnit::*place) {
        for (const UpdatedUnit& unit : units)
            check(array.ndim == 1 && unit.*place + unit.n <= array.n(), name, ": ", what, " is ", array,
                  ", expected at least (", unit.*place + unit.n, ")");
    };
    holds("values", weights.values, &UpdatedUnit::values);
    if (weights.copy.exists()) holds("copy", weights.copy, &UpdatedUnit::copy);
    holds("grads", grads, &UpdatedUnit::grads);
    expect(name, "norm_scale", norm_scale, DType::f32, {2});
    check(t >= 1, name, ": t is ", t, ": updates count from 1");
    check(lr >= 0 && std::isfinite(lr), name, ": the learning rate is ", lr, ": it must be a number >= 0");
}
