// The optimizer family: against PyTorch and the papers (test/golden/optim), and what must hold for every name.
//
//   run:   build/cpu/run_tests -# "[#test_optimizers]"
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <set>
#include <utility>

#include "optim/adam.h"
#include "optim/elementwise.cuh"
#include "own_optimizer.h"
#include "temp_folder.h"

// CHECK((a == b)), in two pairs of brackets, compares without printing thousands of elements.

namespace {

// Sides that no tile divides, more than one tile each way, gaps, odd offsets.
Layout odd_layout() {
    Layout layout;
    layout.add("layers.0.wide", {67, 150}, 1);
    layout.add("layers.0.bias", {67}, 2);
    layout.add("embed", {130, 5});
    layout.add("layers.1.tall", {90, 33}, 3);
    layout.add("layers.1.bias", {2049});
    layout.add("one", {1}, 5);
    return layout;
}

std::vector<double> gradients_of_step(int64_t n, int64_t t) {
    std::vector<double> g = random_values(n, 100 + static_cast<uint64_t>(t), 0.02);
    for (size_t i = 0; i < g.size(); i += 17) g[i] = 0;
    return g;
}

void take_steps(Optimizer& optimizer, Buffer& values, int64_t n, int64_t first, int64_t last) {
    Buffer grads(DType::f32, {n}), norm_scale(DType::f32, {2}, {123, 0.75});
    for (int64_t t = first; t <= last; ++t) {
        grads.set(gradients_of_step(n, t));
        optimizer.step({values}, grads, norm_scale, 1e-2, t, device().stream);
    }
}

void set_option(OptimizerOptions& options, const std::string& key, float value) {
    const std::map<std::string, float*> fields = {{"beta1", &options.beta1},
                                                  {"beta2", &options.beta2},
                                                  {"eps", &options.eps},
                                                  {"momentum", &options.momentum},
                                                  {"min_scale", &options.min_scale},
                                                  {"weight_decay", &options.weight_decay},
                                                  {"decay_power", &options.decay_power},
                                                  {"clip_threshold", &options.clip_threshold},
                                                  {"adamw_lr_ratio", &options.adamw_lr_ratio}};
    REQUIRE(fields.count(key) == 1);
    *fields.at(key) = value;
}

// All codes of a state of 8-bit Adam, parameter after parameter.
std::vector<int> codes_of(const OwnOptimizer& adam8bit, const Layout& layout, const std::string& name) {
    std::vector<int> codes;
    for (const Param& param : layout.params)
        for (const OptimizerState& state : adam8bit->states()) {
            if (state.kind != name || state.param != param.name) continue;
            const std::vector<unsigned char> bytes = bits_of(state.tensor);
            codes.insert(codes.end(), bytes.begin(), bytes.begin() + param.value.n());
        }
    return codes;
}

}  // namespace

TEST_CASE("every optimizer equals PyTorch's, or its paper's, over 50 steps", "[optim][golden]") {
    // As in make_optim_golden.py: these are exact.
    const auto start = [](int64_t i) { return static_cast<double>(i * 29 % 61 - 30) / 64; };
    const auto gradient = [](int layout, int64_t i, int64_t t) {
        const int64_t h = (i * 7919 + t * 104729 + i * t * 31 + t * t * 17) % 20011;
        const bool zero = layout == 0 ? i % 13 == 5 : i % 11 != 3;
        return zero ? 0.0 : static_cast<double>(h - 10005) / 65536;
    };
    Layout layouts[2];
    layouts[0].add("layers.0.wide", {5, 7});
    layouts[0].add("layers.0.tall", {7, 3});
    layouts[0].add("layers.0.bias", {3});
    layouts[0].add("layers.1.square", {4, 4});
    layouts[0].add("embed", {6, 2});
    layouts[0].add("norm", {11});
    layouts[0].add("one", {1, 1});
    layouts[1].add("layers.0.weight", {3, 100});
    layouts[1].add("bias", {9});

    std::ifstream file("test/golden/optim/golden.txt");
    REQUIRE(file.is_open());
    std::string line, word, title, name;
    std::getline(file, line);  // comment
    std::set<std::string> tested;
    while (file >> word) {
        REQUIRE(word == "case");
        int layout_index = 0, n_options = 0;
        double lr = 0;
        file >> title >> name >> layout_index >> lr >> n_options;
        OptimizerOptions options = default_optimizer_options(name);
        for (int k = 0; k < n_options; ++k) {
            float value = 0;
            file >> word >> value;
            set_option(options, word, value);
        }
        const Layout& layout = layouts[layout_index];
        const size_t n = static_cast<size_t>(layout.n);
        std::vector<double> start_values, g(n), expected(n);
        for (int64_t i = 0; i < layout.n; ++i) start_values.push_back(start(i));
        Buffer values(DType::f32, {layout.n}, start_values), grads(DType::f32, {layout.n});
        Buffer norm_scale(DType::f32, {2}, {1, 0.75});
        OwnOptimizer optimizer(name, layout.params, layout.n, options);
        for (int64_t t = 1; t <= 50; ++t) {
            for (int64_t i = 0; i < layout.n; ++i) g[static_cast<size_t>(i)] = gradient(layout_index, i, t);
            grads.set(g);
            optimizer->step({values}, grads, norm_scale, lr, t, device().stream);
            if (t != 1 && t != 2 && t != 50) continue;
            int64_t golden_t = 0;
            file >> word >> golden_t;
            REQUIRE((word == "step" && golden_t == t));
            for (double& value : expected) file >> value;
            // Each step rounds w, of up to 0.5, once (2^-25), and 1e-5 of the way w has gone, about lr a step, may be
            // wrong. (Gradients are below 0.2, so that sgd's and momentum's way is no longer.)
            const double steps = static_cast<double>(t);
            double tolerance = steps * (0x1p-25 + 1e-5 * lr);
            // Newton-Schulz multiplies small singular values by 3.4445 each time, and with them the rounding errors in
            // their directions, about 2^-24 as |X| = 1: in the end an element of X is wrong by 3.4445^5 * 2^-24.
            if (name == "muon") tolerance = steps * (0x1p-25 + lr * std::pow(3.4445, 5) * 0x1p-24);
            check_close(values.values(), expected, 0, tolerance, concat(title, ", step ", t));
        }
        for (const char* state : {"m_codes", "v_codes"}) {
            if (name != "adam8bit") break;
            file >> word;
            REQUIRE(word == state);
            std::vector<int> codes(n);
            for (int& code : codes) file >> code;
            CHECK((codes_of(optimizer, layout, state) == codes));
        }
        tested.insert(name);
    }
    for (const std::string& each : optimizer_names()) {
        INFO(each);
        CHECK(tested.count(each) == 1);
    }
}

TEST_CASE("Adafactor equals float64 on matrices of many tiles", "[optim]") {
    Layout layout = odd_layout();
    layout.params[2].padded_rows = 3;  // the vocabulary's padding counts in no mean
    const OptimizerOptions options = default_optimizer_options("adafactor");
    std::vector<double> w = rounded(random_values(layout.n, 1), DType::f32);
    const auto is_padding = [&](const Param& param, int64_t k) {
        return k >= (param.value.rows() - param.padded_rows) * param.value.cols();
    };
    for (int64_t k = 0; k < 650; ++k)
        if (is_padding(layout.params[2], k)) w[static_cast<size_t>(layout.params[2].offset + k)] = 0;
    Buffer values(DType::f32, {layout.n}, w), grads(DType::f32, {layout.n}), norm_scale(DType::f32, {2}, {1, 0.5});
    OwnOptimizer adafactor("adafactor", layout);
    std::map<std::string, std::vector<double>> row, col;
    const double lr = 1e-2;
    for (int64_t t = 1; t <= 5; ++t) {
        std::vector<double> g = rounded(gradients_of_step(layout.n, t), DType::f32);
        for (int64_t k = 0; k < 650; ++k)
            if (is_padding(layout.params[2], k)) g[static_cast<size_t>(layout.params[2].offset + k)] = 0;
        grads.set(g);
        adafactor->step({values}, grads, norm_scale, lr, t, device().stream);
        const double rest = std::pow(static_cast<double>(t), -static_cast<double>(options.decay_power));
        for (const Param& param : layout.params) {
            const bool is_matrix = param.value.ndim == 2;
            const int64_t R = is_matrix ? param.value.rows() - param.padded_rows : 1, C = param.value.cols();
            auto &rows = row[param.name], &cols = col[param.name];
            rows.resize(static_cast<size_t>(R)), cols.resize(static_cast<size_t>(C));
            for (double& x : rows) x *= 1 - rest;
            for (double& x : cols) x *= 1 - rest;
            double w_sum = 0, mean = 0, u_sum = 0;
            std::vector<double> u(static_cast<size_t>(R * C));
            for (int64_t k = 0; k < R * C; ++k) {
                const size_t i = static_cast<size_t>(param.offset + k);
                rows[static_cast<size_t>(k / C)] += rest * 0.25 * g[i] * g[i] / static_cast<double>(C);
                cols[static_cast<size_t>(k % C)] += rest * 0.25 * g[i] * g[i] / static_cast<double>(R);
                w_sum += w[i] * w[i];
            }
            for (double x : rows) mean += x / static_cast<double>(R);
            for (int64_t k = 0; k < R * C; ++k) {
                const double v = rows[static_cast<size_t>(k / C)] / mean * cols[static_cast<size_t>(k % C)];
                const double x = 0.5 * g[static_cast<size_t>(param.offset + k)] / std::sqrt(std::max(v, 1e-30));
                u[static_cast<size_t>(k)] = x;
                u_sum += x * x;
            }
            const double n = static_cast<double>(R * C), rms = std::sqrt(u_sum / n);
            const double alpha = std::max(1e-3, std::sqrt(w_sum / n)) *
                                 std::min(lr, 1 / std::sqrt(static_cast<double>(t))) /
                                 std::max(1.0, rms / options.clip_threshold);
            for (int64_t k = 0; k < R * C; ++k)
                w[static_cast<size_t>(param.offset + k)] -= alpha * u[static_cast<size_t>(k)];
        }
        // w rounds once a step (values up to 4: 2^-23). A tile sums 64 squares in f32, and u has ten roundings more.
        const double steps = static_cast<double>(t);
        check_close(values.values(), w, 0, steps * (0x1p-23 + 4 * lr * 80 * 0x1p-24), concat("step ", t));
    }
    for (const OptimizerState& state : adafactor->states()) {
        const bool is_row = state.kind == "row";
        const std::vector<float> actual = to_floats(state.tensor);
        check_close({actual.begin(), actual.end()}, (is_row ? row : col).at(state.param), 5 * 80 * 0x1p-24, 1e-30,
                    state.kind + "." + state.param);
    }
}

TEST_CASE("Muon makes every singular value about 1", "[optim]") {
    // W = 0 and lr = 1 before the scale: -W is the orthogonalised gradient. 33 of its directions: X^T X is about I.
    Layout layout;
    layout.add("layers.1.tall", {90, 33}, 3);
    layout.add("layers.2.wide", {33, 90}, 3);
    for (const DType ns_dtype : {DType::f32, DType::bf16}) {
        OptimizerOptions options = default_optimizer_options("muon");
        options.ns_dtype = ns_dtype;
        Buffer values(DType::f32, {layout.n}, std::vector<double>(static_cast<size_t>(layout.n), 0.0));
        Buffer grads(DType::f32, {layout.n}, random_values(layout.n, 4)), norm_scale(DType::f32, {2}, {1, 1});
        OwnOptimizer muon("muon", layout.params, layout.n, options);
        muon->step({values}, grads, norm_scale, 1, 1, device().stream);
        const std::vector<double> w = values.values();
        for (const Param& param : layout.params) {
            const bool tall = param.value.rows() > param.value.cols();
            const double scale = tall ? std::sqrt(90.0 / 33) : 1.0;
            double trace = 0, square = 0;
            for (int64_t a = 0; a < 33; ++a)
                for (int64_t b = 0; b < 33; ++b) {
                    double dot = 0;
                    for (int64_t k = 0; k < 90; ++k) {
                        const auto at = [&](int64_t side) { return tall ? k * 33 + side : side * 90 + k; };
                        dot +=
                            w[static_cast<size_t>(param.offset + at(a))] * w[static_cast<size_t>(param.offset + at(b))];
                    }
                    dot /= scale * scale;
                    if (a == b) trace += dot;
                    square += dot * dot;
                }
            // With singular values s: trace = sum s^2, square = sum s^4. All s in [0.68, 1.21] for a random matrix.
            INFO(param.name << " " << dtype_name(ns_dtype) << ": mean s^2 " << trace / 33 << ", mean s^4 "
                            << square / 33);
            CHECK(trace / 33 > 0.68 * 0.68);
            CHECK(trace / 33 < 1.21 * 1.21);
            CHECK(square / 33 - (trace / 33) * (trace / 33) <
                  0.2);  // the spread of s^2, squared, of numbers in [0.46, 1.46]
        }
    }
}

// With beta1 = beta2 = 0, m is the gradient and v its square; an element of 1 in each block makes the scales 1. The
// expected code is the number of midpoints below, of a table that is computed here. A number and its neighbours on
// either side of each midpoint, and where floats change their exponent.
TEST_CASE("8-bit Adam stores the code of the nearest number", "[optim]") {
    const auto midpoints_of = [](bool is_signed) {
        std::vector<float> table = {0, 1}, midpoints;
        for (int i = 0; i < 7; ++i)
            for (int k = 0, parts = 1 << (is_signed ? i : i + 1); k < parts; ++k)
                for (const double sign : {1.0, -1.0})
                    if (sign > 0 || is_signed)
                        table.push_back(
                            static_cast<float>(sign * std::pow(10.0, i - 6) * (0.1 + 0.9 * (k + 0.5) / parts)));
        std::sort(table.begin(), table.end());
        REQUIRE(table.size() == 256);
        for (size_t k = 0; k + 1 < table.size(); ++k) midpoints.push_back(0.5f * (table[k] + table[k + 1]));
        return midpoints;
    };
    const std::vector<float> m_midpoints = midpoints_of(true), v_midpoints = midpoints_of(false);
    std::vector<float> places = m_midpoints;
    for (const float midpoint : v_midpoints)
        places.push_back(std::sqrt(midpoint)), places.push_back(-std::sqrt(midpoint));
    for (int exponent = -30; exponent <= 0; ++exponent)
        places.push_back(std::ldexp(1.0f, exponent)), places.push_back(-std::ldexp(1.0f, exponent));
    std::vector<double> g;
    const auto add = [&](float x) {
        if (g.size() % 256 == 0) g.push_back(1);
        if (std::abs(x) <= 1) g.push_back(x);
    };
    for (const float x : places) add(x), add(std::nextafter(x, 2.0f)), add(std::nextafter(x, -2.0f));
    for (const float x : {0.0f, -0.0f, 1e-40f, -1e-40f}) add(x);

    Layout layout;
    layout.add("weight", {std::ssize(g)});
    Buffer values(DType::f32, {layout.n}), grads(DType::f32, {layout.n}, g), norm_scale(DType::f32, {2}, {1, 1});
    OptimizerOptions options = default_optimizer_options("adam8bit");
    options.beta1 = options.beta2 = 0;
    OwnOptimizer adam8bit("adam8bit", layout.params, layout.n, options);
    adam8bit->step({values}, grads, norm_scale, 1e-3, 1, device().stream);
    std::vector<int> m_codes, v_codes;
    for (const double x : g) {
        const float m = static_cast<float>(x), v = m * m;
        const auto nearest = [](const std::vector<float>& midpoints, float number) {
            return static_cast<int>(std::lower_bound(midpoints.begin(), midpoints.end(), number) - midpoints.begin());
        };
        m_codes.push_back(nearest(m_midpoints, m));
        v_codes.push_back(v > 0 ? std::max(nearest(v_midpoints, v), 1) : 0);  // above 0 it stays above 0
    }
    CHECK((codes_of(adam8bit, layout, "m_codes") == m_codes));
    CHECK((codes_of(adam8bit, layout, "v_codes") == v_codes));
}

TEST_CASE("8-bit Adam never divides by eps alone", "[optim]") {
    // Beside element 0, the v of element 1 is below half of the table's smallest number. Were it 0, step 2 without a
    // gradient would move w by about lr * m / eps, thousands of lr.
    Layout layout;
    layout.add("weight", {3});
    Buffer values(DType::f32, {3}, {0, 0, 0}), grads(DType::f32, {3}, {1, 3e-4, 0}),
        norm_scale(DType::f32, {2}, {1, 1});
    OwnOptimizer adam8bit("adam8bit", layout);
    adam8bit->step({values}, grads, norm_scale, 1e-3, 1, device().stream);
    grads.set({0, 0, 0});
    adam8bit->step({values}, grads, norm_scale, 1e-3, 2, device().stream);
    const std::vector<double> w = values.values();
    CHECK(w[0] < -1e-3);
    CHECK(w[1] < -1e-3);
    CHECK(w[1] > -2e-3);
    CHECK(w[2] == 0);
}

TEST_CASE("an update with two states needs no kernel of its own", "[optim]") {
    const Layout layout = odd_layout();
    const std::vector<UpdatedUnit> units = {{.params = layout.params, .n = layout.n}};
    Arena arena{"optimizer"};
    using Common = Elementwise<AdamUpdate<true>>;  // by the kernel that most optimizers share
    const OptimizerOptions options = default_optimizer_options("adamw");
    Common(arena, units, options);
    arena.reserve();
    Common common(arena, units, options);
    common.init(device().stream);
    OwnOptimizer own("adamw", layout);
    Buffer by_common(DType::f32, {layout.n}, random_values(layout.n, 1)),
        by_own(DType::f32, {layout.n}, random_values(layout.n, 1));
    take_steps(common, by_common, layout.n, 1, 3);
    take_steps(*own.optimizer, by_own, layout.n, 1, 3);
    CHECK((by_common.bits() == by_own.bits()));
}

TEST_CASE("one fused launch equals a launch for each parameter, bit for bit", "[optim]") {
    const Layout layout = odd_layout();
    for (const std::string& name : optimizer_names()) {
        INFO(name);
        const std::vector<double> start = random_values(layout.n, 1);
        Buffer fused(DType::f32, {layout.n}, start), unfused(DType::f32, {layout.n}, start);
        OwnOptimizer all(name, layout);
        take_steps(*all.optimizer, fused, layout.n, 1, 3);
        for (const Param& param : layout.params) {
            OwnOptimizer alone(name, {param}, layout.n, default_optimizer_options(name));
            take_steps(*alone.optimizer, unfused, layout.n, 1, 3);
        }
        CHECK((fused.bits() == unfused.bits()));
        // The gaps between parameters belong to nobody; every parameter has moved (Lion's
        // after three steps of the same length, too).
        std::vector<double> values = fused.values(), rounded_start = rounded(start, DType::f32);
        std::vector<bool> in_gap(static_cast<size_t>(layout.n), true);
        for (const Param& param : layout.params) {
            int64_t moved = 0;
            for (int64_t k = 0; k < param.value.n(); ++k) {
                const size_t i = static_cast<size_t>(param.offset + k);
                in_gap[i] = false;
                moved += values[i] != rounded_start[i];
            }
            CHECK(moved * 10 >= param.value.n() * 9);
        }
        for (size_t i = 0; i < in_gap.size(); ++i)
            if (in_gap[i] && values[i] != rounded_start[i]) FAIL("element " << i << " is in a gap");
    }
}

TEST_CASE("stochastic rounding does not depend on where a parameter lies", "[optim][stochastic]") {
    const Layout layout = odd_layout();
    for (const std::string& name : optimizer_names()) {
        INFO(name);
        const std::vector<double> start = random_values(layout.n, 1);
        Buffer together(DType::bf16, {layout.n}, start), grads(DType::bf16, {layout.n}, gradients_of_step(layout.n, 1));
        Buffer norm_scale(DType::f32, {2}, {1, 0.75});
        OwnOptimizer all(name, layout);
        const Weights weights = {.values = together, .stochastic = true, .seed = 3};
        all->step(weights, grads, norm_scale, 1e-2, 1, device().stream);
        for (Param param : layout.params) {
            const int64_t n = param.value.n(), from = param.offset;
            const std::vector<double> g = grads.values();
            Buffer alone(DType::bf16, {n}, {start.begin() + from, start.begin() + from + n});
            Buffer alone_grads(DType::bf16, {n}, {g.begin() + from, g.begin() + from + n});
            param.offset = 0;
            param.copy_of = std::exchange(param.name, "copy");  // as a pipeline's second copy of the embedding
            OwnOptimizer optimizer(name, {param}, n, default_optimizer_options(name));
            const Weights alone_weights = {.values = alone, .stochastic = true, .seed = 3};
            optimizer->step(alone_weights, alone_grads, norm_scale, 1e-2, 1, device().stream);
            const std::vector<double> w = together.values();
            CHECK((alone.values() == std::vector<double>(w.begin() + from, w.begin() + from + n)));
        }
    }
}

TEST_CASE("stochastic rounding of a shard draws the whole parameter's random numbers", "[optim][stochastic]") {
    const int64_t n = 3 * kTileN + 5, cut_at = 2 * kTileN;
    const std::vector<double> start = random_values(n, 1), g = gradients_of_step(n, 1);
    const auto updated = [&](int64_t first, int64_t its_n) {
        Layout shard;
        shard.add("layers.0.bias", {its_n});
        shard.params[0].first = first;
        OwnOptimizer adamw("adamw", shard);
        const Buffer values(DType::bf16, {its_n}, {start.begin() + first, start.begin() + first + its_n}),
            grads(DType::f32, {its_n}, {g.begin() + first, g.begin() + first + its_n}), norm(DType::f32, {2}, {1, 1});
        adamw->step({.values = values, .stochastic = true, .seed = 3}, grads, norm, 1e-2, 1, device().stream);
        return values.values();
    };
    const std::vector<double> whole = updated(0, n), rest = updated(cut_at, n - cut_at);
    CHECK((rest == std::vector<double>(whole.begin() + cut_at, whole.end())));
    Layout exact;  // a parameter of a whole tile has no second one
    exact.add("layers.0.bias", {kTileN});
    exact.add("layers.1.bias", {5});
    const std::vector<UpdatedUnit> unit = {{.params = exact.params, .n = exact.n}};
    CHECK(std::ssize(make_tiles(unit, count_tiles(unit))) == 2);
}

TEST_CASE("gradients that are all 0 change no weights", "[optim]") {
    // No norm, root or mean of theirs may divide by 0.
    const Layout layout = odd_layout();
    const std::vector<double> start = random_values(layout.n, 1), zeros(start.size(), 0.0);
    for (const std::string& name : optimizer_names()) {
        INFO(name);
        OptimizerOptions options = default_optimizer_options(name);
        options.weight_decay = 0;
        OwnOptimizer optimizer(name, layout.params, layout.n, options);
        const Buffer values(DType::f32, {layout.n}, start), grads(DType::f32, {layout.n}, zeros),
            norm(DType::f32, {2}, {0, 1});
        const auto before = values.bits();
        for (int64_t t = 1; t <= 2; ++t) optimizer->step({values}, grads, norm, 1e-2, t, device().stream);
        CHECK((values.bits() == before));
    }
}

TEST_CASE("every optimizer skips a step whose scale is NaN", "[optim]") {
    const Layout layout = odd_layout();
    for (const std::string& name : optimizer_names()) {
        INFO(name);
        Buffer values(DType::f32, {layout.n}, random_values(layout.n, 1)), grads(DType::f32, {layout.n});
        Buffer norm_scale(DType::f32, {2}, {INFINITY, NAN});
        OwnOptimizer optimizer(name, layout);
        take_steps(*optimizer.optimizer, values, layout.n, 1, 2);
        const auto before = values.bits();
        const auto states = optimizer.states();
        std::vector<double> g = gradients_of_step(layout.n, 3);
        for (size_t i = 0; i < g.size(); i += 100) g[i] = i % 200 ? NAN : INFINITY;
        grads.set(g);
        optimizer->step({values}, grads, norm_scale, 1e-2, 3, device().stream);
        CHECK((values.bits() == before));
        CHECK((optimizer.states() == states));
        take_steps(*optimizer.optimizer, values, layout.n, 3, 3);  // and nothing is left behind: it goes on
        CHECK((values.bits() != before));
        for (double w : values.values()) REQUIRE(std::isfinite(w));
    }
}

TEST_CASE("every optimizer continues bit for bit from its saved states", "[optim]") {
    const Layout layout = odd_layout();
    for (const std::string& name : optimizer_names()) {
        INFO(name);
        Buffer whole(DType::f32, {layout.n}, random_values(layout.n, 1)), resumed(DType::f32, {layout.n});
        OwnOptimizer first(name, layout), second(name, layout);
        take_steps(*first.optimizer, whole, layout.n, 1, 3);
        resumed.set(whole.values());
        const auto from = first->states(), to = second->states();
        REQUIRE(from.size() == to.size());
        std::map<std::string, int> names;
        const auto name_of = [](const OptimizerState& state) { return state.kind + "." + state.param; };
        for (size_t k = 0; k < from.size(); ++k) {
            CHECK(name_of(from[k]) == name_of(to[k]));
            CHECK(++names[name_of(from[k])] == 1);
            const Param& param = *std::find_if(layout.params.begin(), layout.params.end(),
                                               [&](const Param& p) { return p.name == from[k].param; });
            CHECK((from[k].per == 0 || from[k].tensor.n() >= ceil_div(param.value.n(), from[k].per)));
            copy_to_device(to[k].tensor, first.states()[k].data());
        }
        take_steps(*first.optimizer, whole, layout.n, 4, 6);
        take_steps(*second.optimizer, resumed, layout.n, 4, 6);
        CHECK((whole.bits() == resumed.bits()));
        CHECK((first.states() == second.states()));
    }
}

TEST_CASE("master weights: f32 training bit for bit, and a copy that is their rounding", "[optim][master]") {
    const Layout layout = odd_layout();
    const std::vector<double> start = random_values(layout.n, 1), sevens(static_cast<size_t>(layout.n), 7.0);
    std::vector<bool> in_gap(static_cast<size_t>(layout.n), true);
    for (const Param& param : layout.params)
        for (int64_t k = 0; k < param.value.n(); ++k) in_gap[static_cast<size_t>(param.offset + k)] = false;
    for (const std::string& name : optimizer_names())
        for (const DType copy_dtype : {DType::bf16, DType::f16})
            for (const DType grad_dtype : {DType::f32, copy_dtype}) {
                INFO(name << ", copy " << dtype_name(copy_dtype) << ", gradients " << dtype_name(grad_dtype));
                Buffer plain(DType::f32, {layout.n}, start), master(DType::f32, {layout.n}, start);
                Buffer copy(copy_dtype, {layout.n}, sevens), grads(grad_dtype, {layout.n}), f32(DType::f32, {layout.n});
                Buffer norm_scale(DType::f32, {2}, {1, 0.75});
                OwnOptimizer exact(name, layout), optimizer(name, layout);
                for (int64_t t = 1; t <= 3; ++t) {
                    grads.set(gradients_of_step(layout.n, t));
                    f32.set(grads.values());
                    exact->step({plain}, f32, norm_scale, 1e-2, t, device().stream);
                    optimizer->step({.values = master, .copy = copy}, grads, norm_scale, 1e-2, t, device().stream);
                }
                CHECK((master.bits() == plain.bits()));
                CHECK((optimizer.states() == exact.states()));
                std::vector<double> expected = rounded(master.values(), copy_dtype);
                for (size_t i = 0; i < expected.size(); ++i)
                    if (in_gap[i]) expected[i] = 7;
                CHECK((copy.values() == expected));
                // NaN: the copy, too, stays as it is.
                const auto before = copy.bits();
                norm_scale.set({INFINITY, NAN});
                optimizer->step({.values = master, .copy = copy}, grads, norm_scale, 1e-2, 4, device().stream);
                CHECK((copy.bits() == before));
                CHECK((master.bits() == plain.bits()));
                CHECK((optimizer.states() == exact.states()));
            }
}

namespace {

// What optim/weights.cuh promises for element e of a parameter, on the host.
double stochastically_rounded(float w, uint64_t seed, const std::string& name, int64_t t, int64_t e) {
    const Philox draw =
        philox(seed, hash_name(name),
               static_cast<uint64_t>(t) * 0x100000000u + static_cast<uint64_t>(e / 1024 * 128 + e % 128));
    const uint64_t part = static_cast<uint64_t>(e / 128 % 8);
    const uint32_t random_bits = part % 2 == 0 ? draw.v[part / 2] % 65536 : draw.v[part / 2] / 65536;
    // f32 numbers of one sign are ordered as their bits: those below and above have lower halves of 0.
    const uint32_t bits = std::bit_cast<uint32_t>(w);
    const uint32_t down = bits / 65536 * 65536, up = down + 65536;
    return std::bit_cast<float>(bits % 65536 + random_bits >= 65536 ? up : down);
}

}  // namespace

TEST_CASE("bf16 weights without a master, to nearest and stochastically, against a host loop", "[optim][stochastic]") {
    const Layout layout = odd_layout();
    const uint64_t seed = 0x123456789abcdef;
    for (const std::string& name : optimizer_names())
        for (const DType grad_dtype : {DType::f32, DType::bf16})
            for (const bool stochastic : {false, true}) {
                INFO(name << ", gradients " << dtype_name(grad_dtype) << (stochastic ? ", stochastic" : ", nearest"));
                Buffer values(DType::bf16, {layout.n}, random_values(layout.n, 1)), grads(grad_dtype, {layout.n});
                Buffer exact_values(DType::f32, {layout.n}), exact_grads(DType::f32, {layout.n});
                Buffer norm_scale(DType::f32, {2}, {1, 0.75});
                OwnOptimizer exact(name, layout), optimizer(name, layout);
                for (int64_t t = 1; t <= 3; ++t) {
                    grads.set(gradients_of_step(layout.n, t));
                    exact_grads.set(grads.values());
                    exact_values.set(values.values());
                    const Weights weights = {.values = values, .stochastic = stochastic, .seed = seed};
                    exact->step({exact_values}, exact_grads, norm_scale, 1e-2, t, device().stream);
                    optimizer->step(weights, grads, norm_scale, 1e-2, t, device().stream);
                    const std::vector<double> w = exact_values.values();
                    std::vector<double> expected = rounded(w, DType::bf16);
                    for (const Param& param : layout.params)
                        for (int64_t e = 0; e < param.value.n() && stochastic; ++e) {
                            const size_t i = static_cast<size_t>(param.offset + e);
                            expected[i] = stochastically_rounded(static_cast<float>(w[i]), seed, param.name, t, e);
                        }
                    REQUIRE((values.values() == expected));
                    REQUIRE((optimizer.states() == exact.states()));
                }
                const auto before = values.bits();
                norm_scale.set({INFINITY, NAN});
                const Weights weights = {.values = values, .stochastic = stochastic, .seed = seed};
                optimizer->step(weights, grads, norm_scale, 1e-2, 4, device().stream);
                CHECK((values.bits() == before));
                CHECK((optimizer.states() == exact.states()));
            }
}

TEST_CASE("stochastic rounding is exact on average, and keeps updates that nearest rounding loses",
          "[optim][stochastic]") {
    const int64_t n = 20000;
    Layout layout;
    layout.add("weight", {n});
    const std::vector<double> ones(static_cast<size_t>(n), 1.0);
    Buffer grads(DType::f32, {n}, std::vector<double>(static_cast<size_t>(n), -1.0)),
        norm_scale(DType::f32, {2}, {1, 1});
    const auto mean = [](const std::vector<double>& values) {
        double sum = 0;
        for (double x : values) sum += x;
        return sum / static_cast<double>(values.size());
    };
    OwnOptimizer sgd("sgd", layout);
    // Above 1 the next bf16 is 1 + 2^-7. A step to 1 + p 2^-7 goes up with the probability p; the mean of n such
    // choices has a standard deviation of sqrt(p (1 - p) / n) 2^-7. Five of them: wrong once in 1.7 million tests, and
    // this one always has the same seed.
    for (const double p : {0.01, 0.25, 0.5, 0.9}) {
        Buffer values(DType::bf16, {n}, ones);
        const Weights weights = {.values = values, .stochastic = true, .seed = 5};
        sgd->step(weights, grads, norm_scale, p * 0x1p-7, 1, device().stream);
        CHECK(std::abs(mean(values.values()) - (1 + p * 0x1p-7)) <=
              5 * std::sqrt(p * (1 - p) / static_cast<double>(n)) * 0x1p-7 + 0x1p-24);
        for (double w : values.values()) REQUIRE((w == 1 || w == 1 + 0x1p-7));
    }
    // 1000 updates of 1e-4. Each choice adds a variance of p (1 - p) 2^-14 with p = 1e-4 * 2^7 = 0.0128: after 1000 the
    // standard deviation of one weight is sqrt(12.6) 2^-7 = 0.028, that of the mean of n weights smaller by sqrt(n).
    Buffer nearest(DType::bf16, {n}, ones), stochastic(DType::bf16, {n}, ones);
    for (int64_t t = 1; t <= 1000; ++t) {
        sgd->step({nearest}, grads, norm_scale, 1e-4, t, device().stream);
        const Weights weights = {.values = stochastic, .stochastic = true, .seed = 5};
        sgd->step(weights, grads, norm_scale, 1e-4, t, device().stream);
    }
    CHECK((nearest.values() == ones));
    const std::vector<double> w = stochastic.values();
    const double deviation = 0.028;
    // 1e-4 itself is rounded, and w - lr * g in f32, 1000 times: 1000 * 2^-24.
    CHECK(std::abs(mean(w) - 1.1) <= 5 * deviation / std::sqrt(static_cast<double>(n)) + 1000 * 0x1p-24);
    double variance = 0;
    for (double x : w) variance += (x - 1.1) * (x - 1.1) / static_cast<double>(n);
    // The choices of different weights and steps are independent: the variance is that of the sum, within 10 %. (The
    // relative deviation of a variance from n samples is sqrt(2 / n) = 1 %.)
    CHECK(std::abs(std::sqrt(variance) - 0.0277) < 0.1 * 0.0277);
}

TEST_CASE("stochastic rounding does not touch infinity and NaN, and overflows as any rounding", "[optim][stochastic]") {
    const double largest = 0x1.FEp127;  // of bf16
    Layout layout;
    layout.add("weight", {6});
    Buffer values(DType::bf16, {6}), grads(DType::f32, {6});
    grads.set({-INFINITY, INFINITY, NAN, -1e36, -1e36, 0});  // times lr: 45 % of a step of bf16
    Buffer norm_scale(DType::f32, {2}, {1, 1});
    OwnOptimizer sgd("sgd", layout);
    bool stayed = false, overflowed = false;
    for (uint64_t seed = 0; seed < 20; ++seed) {
        values.set({0, 0, 0, largest, -largest, 0});
        const Weights weights = {.values = values, .stochastic = true, .seed = seed};
        sgd->step(weights, grads, norm_scale, 0.6, 1, device().stream);
        const std::vector<double> w = values.values();
        CHECK(w[0] == INFINITY);
        CHECK(w[1] == -INFINITY);
        CHECK(std::isnan(w[2]));
        CHECK((w[3] == largest || w[3] == INFINITY));
        stayed = stayed || w[3] == largest;
        overflowed = overflowed || w[3] == INFINITY;
        CHECK(w[4] >= -largest);
        CHECK(w[4] < -0.99 * largest);
        CHECK(w[5] == 0);
    }
    CHECK(stayed);
    CHECK(overflowed);
}

TEST_CASE("the formats of weights and gradients that do not go together", "[optim][master]") {
    const Layout layout = odd_layout();
    const int64_t n = layout.n;
    Buffer f32(DType::f32, {n}), bf16(DType::bf16, {n}), f16(DType::f16, {n}), shorter(DType::bf16, {n - 1});
    Buffer norm_scale(DType::f32, {2}, {1, NAN});
    for (const std::string& name : optimizer_names()) {
        INFO(name);
        OwnOptimizer optimizer(name, layout);
        const auto error = [&](const Weights& weights, const Tensor& grads) {
            return error_of([&] { optimizer->step(weights, grads, norm_scale, 1e-3, 1, device().stream); });
        };
        CHECK(error({f32, bf16}, bf16).empty());
        CHECK_THAT(error({f32}, bf16), ContainsSubstring("f32 values do not go with gradients in bf16: use f32"));
        CHECK_THAT(error({f32, bf16}, f16), ContainsSubstring("with a copy in bf16 do not go with gradients in f16"));
        CHECK_THAT(error({f32, f16}, bf16), ContainsSubstring("use f32 or f16"));
        CHECK_THAT(error({bf16}, f16), ContainsSubstring("use f32 or bf16"));
        CHECK_THAT(error({f16}, f16), ContainsSubstring("f16 values: values are f32"));
        CHECK_THAT(error({bf16, bf16}, bf16), ContainsSubstring("or bf16 without a copy"));
        CHECK_THAT(error({f32, f32}, f32), ContainsSubstring("f32 values with a copy in f32"));
        CHECK_THAT(error({f32, shorter}, bf16), ContainsSubstring("copy is bf16"));
        CHECK_THAT(error({.values = f32, .stochastic = true}, f32),
                   ContainsSubstring("stochastic rounding is for bf16"));
    }
}

TEST_CASE("units at other places of the arrays, one after the other or at once, have the same bits", "[optim]") {
    const Layout layout = odd_layout();
    // The same parameters in two units, which begin elsewhere in each array; all that is no parameter's is NaN.
    std::vector<UpdatedUnit> units(2);
    for (size_t p = 0; p < layout.params.size(); ++p) {
        UpdatedUnit& unit = units[p / 3];
        unit.params.push_back(layout.params[p]);
        unit.params.back().offset = round_up(unit.n, 4);
        unit.n = unit.params.back().offset + layout.params[p].value.n();
    }
    units[0].values = 64, units[0].copy = 0, units[0].grads = 128;
    CHECK(count_tiles(units).first_state[1] == round_up(units[0].n, 64));  // on 256 bytes
    // The second one on no round number, as shards of ZeRO may: a GPU's vector loads are not for it.
    units[1].values = round_up(64 + units[0].n, 64) + 3, units[1].copy = units[1].values + 62;
    units[1].grads = units[1].values + 1023;
    const int64_t n = units[1].grads + units[1].n + 3;
    const auto spread = [&](const std::vector<double>& flat, int64_t UpdatedUnit::*place) {
        std::vector<double> spread(static_cast<size_t>(n), NAN);
        for (size_t p = 0; p < layout.params.size(); ++p)
            std::copy_n(flat.begin() + layout.params[p].offset, layout.params[p].value.n(),
                        spread.begin() + units[p / 3].*place + units[p / 3].params[p % 3].offset);
        return spread;
    };
    struct Format {
        DType values, copy;
    };
    for (const std::string& name : optimizer_names())
        for (const Format& format : {Format{DType::f32, DType::f32}, Format{DType::f32, DType::bf16},
                                     Format{DType::bf16, DType::f32}}) {  // a copy in f32: none
            INFO(name << ", values in " << dtype_name(format.values));
            const bool has_copy = format.copy != DType::f32;
            const DType grad_dtype = has_copy ? DType::bf16 : DType::f32;
            const auto train = [&](Optimizer& optimizer, bool is_spread, bool at_once) {
                const auto lay = [&](const std::vector<double>& flat, int64_t UpdatedUnit::*place) {
                    return is_spread ? spread(flat, place) : flat;
                };
                const int64_t its_n = is_spread ? n : layout.n;
                const std::vector<double> start = random_values(layout.n, 1);
                const Buffer values(format.values, {its_n}, lay(start, &UpdatedUnit::values)),
                    copy(format.copy, {its_n}, lay(start, &UpdatedUnit::copy)), norm(DType::f32, {2}, {1, 0.75});
                Weights weights{.values = values, .stochastic = format.values == DType::bf16, .seed = 3};
                if (has_copy) weights.copy = copy;
                for (int64_t t = 1; t <= 2; ++t) {
                    const Buffer grads(grad_dtype, {its_n}, lay(gradients_of_step(layout.n, t), &UpdatedUnit::grads));
                    if (at_once) optimizer.step(weights, grads, norm, 1e-2, t, device().stream);
                    else
                        for (size_t u = 0; u < optimizer.n_units(); ++u)
                            optimizer.step_units(u, 1, weights, grads, norm, 1e-2, t, device().stream);
                    cudaCheck(cudaDeviceSynchronize());
                }
                // Where parameters are; elsewhere NaN stays, or what is there without units.
                return std::pair(values.values(), copy.values());
            };
            const OwnOptimizer whole(name, layout);
            const auto expected = train(*whole.optimizer, false, true);
            for (const bool at_once : {true, false}) {
                Arena arena("optimizer");
                const OptimizerOptions options = default_optimizer_options(name);
                make_optimizer(name, arena, units, options);
                arena.reserve();
                const auto optimizer = make_optimizer(name, arena, units, options);
                optimizer->init(device().stream);
                const auto [values, copy] = train(*optimizer, true, at_once);
                const auto same = [](const std::vector<double>& a, const std::vector<double>& b) {
                    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                                      [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
                };
                CHECK(same(values, spread(expected.first, &UpdatedUnit::values)));
                if (has_copy) CHECK(same(copy, spread(expected.second, &UpdatedUnit::copy)));
                const auto states = optimizer->states();
                REQUIRE(states.size() == whole->states().size());
                for (const OptimizerState& state : states) {
                    const auto& params = units[state.unit].params;
                    CHECK(std::ranges::count(params, state.param, &Param::name) == 1);
                }
            }
        }
}

TEST_CASE("Muon orthogonalises GPT-2's q, k and v each by itself", "[optim]") {
    // As one parameter and as three, the same bits; for bf16 weights the random numbers are the fused parameter's.
    Layout fused, three;
    fused.add("h.0.attn.c_attn.weight", {3 * 17, 17});
    for (const char* part : {"q", "k", "v"}) three.add(concat("h.0.attn.", part, ".weight"), {17, 17});
    const std::vector<double> start = random_values(fused.n, 1);
    Buffer a(DType::f32, {fused.n}, start), b(DType::f32, {fused.n}, start);
    OwnOptimizer muon_a("muon", fused), muon_b("muon", three);
    take_steps(*muon_a.optimizer, a, fused.n, 1, 3);
    take_steps(*muon_b.optimizer, b, fused.n, 1, 3);
    CHECK((a.bits() == b.bits()));
}

TEST_CASE("optimizers by name: an unknown one, an empty one, bad arguments", "[optim]") {
    const Layout layout = odd_layout();
    Arena arena("optimizer");
    const auto error_of_name = [&](const std::string& name) {
        return error_of([&] { make_optimizer(name, arena, layout.params, layout.n, {}); });
    };
    CHECK_THAT(error_of_name("adam16"), ContainsSubstring("--optimizer adam16: use sgd, momentum, nesterov"));
    CHECK_THAT(error_of_name(""), ContainsSubstring("adam8bit"));
    CHECK(default_learning_rate("adamw") == 3e-3);
    CHECK(default_learning_rate("sgd") > default_learning_rate("lion"));
    CHECK_THROWS_AS(default_learning_rate("adam16"), Error);
    for (const std::string& name : optimizer_names()) {
        INFO(name);
        CHECK(error_of_name(name).empty());
        OwnOptimizer nothing(name, {}, 0, default_optimizer_options(name));  // a rank that owns no parameters
        nothing->step({}, {}, {}, 1e-3, 1, device().stream);
        CHECK(nothing.states().empty());
        OwnOptimizer optimizer(name, layout);
        Buffer good(DType::f32, {layout.n}), shorter(DType::f32, {layout.n - 1}), norm_scale(DType::f32, {2}, {1, NAN});
        const auto step = [&](const Tensor& grads, double lr, int64_t t) {
            optimizer->step({good}, grads, norm_scale, lr, t, device().stream);
        };
        CHECK_NOTHROW(step(good, 1e-3, 1));
        CHECK_THROWS_AS(step(shorter, 1e-3, 1), Error);
        CHECK_THROWS_AS(step(good, NAN, 1), Error);
        CHECK_THROWS_AS(step(good, 1e-3, 0), Error);
        OptimizerOptions bad = default_optimizer_options(name);
        bad.momentum = 1;
        CHECK_THROWS_AS(make_optimizer(name, arena, layout.params, layout.n, bad), Error);
        CHECK_THROWS_AS(make_optimizer(name, arena, layout.params, layout.n - 6, {}), Error);  // "one" is outside
    }
}

TEST_CASE("the states take the bytes that optim.h says", "[optim]") {
    Layout layout;
    layout.add("layers.0.weight", {512, 512});
    layout.add("layers.0.bias", {256});
    const std::map<std::string, double> expected = {
        {"sgd", 0},   {"momentum", 4},     {"nesterov", 4}, {"adagrad", 4},  {"rmsprop", 4},      {"adam", 8},
        {"adamw", 8}, {"adafactor", 0.02}, {"lion", 4},     {"muon", 4.004}, {"adam8bit", 2.0313}};
    CHECK(optimizer_names().size() == expected.size());
    for (const std::string& name : optimizer_names()) {
        INFO(name);
        OwnOptimizer optimizer(name, layout);
        size_t bytes = 0;
        for (const OptimizerState& state : optimizer->states()) bytes += state.tensor.bytes();
        CHECK(std::abs(static_cast<double>(bytes) / static_cast<double>(layout.n) - expected.at(name)) < 0.001);
    }
}

// For comparing builds and seeds: run_tests "[.bits]" prints a number that any other bit would change.
TEST_CASE("bits of every optimizer", "[.bits]") {
    const Layout layout = odd_layout();
    for (const std::string& name : optimizer_names()) {
        Buffer values(DType::f32, {layout.n}, random_values(layout.n, 1));
        OwnOptimizer optimizer(name, layout);
        take_steps(*optimizer.optimizer, values, layout.n, 1, 3);
        std::string text;
        for (unsigned char byte : values.bits()) text += static_cast<char>(byte);
        for (const auto& state : optimizer.states()) text.append(state.begin(), state.end());
        std::printf("%-10s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash_name(text)));
    }
}
