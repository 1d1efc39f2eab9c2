// AdamW against float64 with a running error bound, against PyTorch, and in its corner cases.
//
//   run:   build/cpu/run_tests -# "[#test_adamw]"
#include <algorithm>
#include <cmath>
#include <fstream>

#include "own_optimizer.h"
#include "temp_folder.h"

// CHECK((a == b)), in two pairs of brackets, compares without printing thousands of elements.

namespace {

// Parameters of these sizes, every other one decayed, with gaps between them, so that few begin on a round number.
Layout make_layout(const std::vector<int64_t>& sizes, int64_t first = 0) {
    Layout layout;
    layout.n = first;
    for (int64_t size : sizes) {
        const int64_t i = std::ssize(layout.params);
        layout.add(concat("parameter ", i), {size}, i % 3).decay = i % 2 == 0;
    }
    layout.n += 2;
    return layout;
}

const std::vector<int64_t> kOddSizes = {1, 3, 1023, 1025, 2049, 777};

struct OwnAdamW : OwnOptimizer {
    std::vector<Param> params;
    int64_t n;
    OwnAdamW(const Layout& layout, const OptimizerOptions& options)
        : OwnOptimizer("adamw", layout.params, layout.n, options), params(layout.params), n(layout.n) {}
    // The states lie like the parameters: as one flat tensor.
    Tensor flat(size_t state) const {
        float* const first = optimizer->states()[state].tensor.ptr<float>();
        return make_tensor(first - params[0].offset, DType::f32, {n});
    }
    Tensor m() const { return flat(0); }
    Tensor v() const { return flat(params.size()); }
};

// The equations of optim.h in float64, and with them a bound of the f32 kernel's error (running error analysis: each
// operation adds u times its result to what its operands bring along; Higham, Accuracy and Stability, 3.3).
struct Reference {
    OptimizerOptions options;
    std::vector<double> w, m, v, w_error, m_error, v_error;

    Reference(const OptimizerOptions& options_, const std::vector<double>& start)
        : options(options_), w(start), m(start.size()), v(start.size()), w_error(m), m_error(m), v_error(m) {}

    void step(const std::vector<Param>& params, const std::vector<double>& grads, double scale, double lr, double t,
              double value_roundoff) {
        constexpr double u = 0x1p-24;
        const double beta1 = options.beta1, beta2 = options.beta2;
        const double m_correction = 1 / (1 - std::pow(beta1, t)), v_correction = 1 / (1 - std::pow(beta2, t));
        for (const Param& param : params)
            for (int64_t k = 0; k < param.value.n(); ++k) {
                const size_t i = static_cast<size_t>(param.offset + k);
                const double g = scale * grads[i], g_error = u * std::abs(g);
                m_error[i] = beta1 * (m_error[i] + u * std::abs(m[i])) + (1 - beta1) * (g_error + u * std::abs(g));
                m[i] = beta1 * m[i] + (1 - beta1) * g;
                m_error[i] += u * std::abs(m[i]);
                v_error[i] = beta2 * (v_error[i] + u * v[i]);
                v_error[i] += (1 - beta2) * (2 * std::abs(g) * g_error + 2 * u * g * g);
                v[i] = beta2 * v[i] + (1 - beta2) * g * g;
                v_error[i] += u * v[i];

                // Two roundings each: the correction itself, and the product.
                const double m_hat = m[i] * m_correction, v_hat = v[i] * v_correction;
                const double m_hat_error = m_error[i] * m_correction + 2 * u * std::abs(m_hat);
                const double v_hat_error = v_error[i] * v_correction + 2 * u * v_hat;
                const double root = std::sqrt(v_hat);
                const double root_error = root - std::sqrt(std::max(0.0, v_hat - v_hat_error)) + u * root;
                const double divisor = root + options.eps, divisor_error = root_error + u * divisor;
                const double ratio = m_hat / divisor;
                const double ratio_error = m_hat_error / divisor + std::abs(ratio) * (divisor_error / divisor + u);

                const double decay = param.decay ? options.weight_decay : 0.0;
                const double sum = ratio + decay * w[i];
                const double sum_error = ratio_error + decay * (w_error[i] + u * std::abs(w[i])) + u * std::abs(sum);
                w[i] -= lr * sum;
                w_error[i] += lr * (sum_error + 2 * u * std::abs(sum)) + (u + value_roundoff) * std::abs(w[i]);
            }
    }
    void check_against(const std::vector<double>& actual, const std::string& what) const {
        double worst = 0;
        size_t at = 0;
        for (size_t i = 0; i < w.size(); ++i) {
            // 1.01: the bound leaves out products of two errors. 1e-30: below it float has subnormals.
            const double error = std::abs(actual[i] - w[i]) / (1.01 * w_error[i] + 1e-30);
            if (!(error <= worst)) worst = error, at = i;  // NaN counts as worst
            if (std::isnan(error)) break;
        }
        INFO(what << ": element " << at << " is " << actual[at] << ", expected " << w[at] << ", which is " << worst
                  << " of the bound " << w_error[at]);
        CHECK(worst <= 1);
    }
};

// 50 steps on random gradients. The learning rate and the scale change from step to step.
void compare_with_reference(DType value_dtype, DType grad_dtype, int64_t n_steps) {
    const Layout layout = make_layout(kOddSizes);
    const OptimizerOptions options;
    const double value_roundoff = value_dtype == DType::f32 ? 0 : unit_roundoff(value_dtype);  // on top of f32's own
    const std::vector<double> start = rounded(random_values(layout.n, 1), value_dtype);
    Buffer values(value_dtype, {layout.n}, start), grads(grad_dtype, {layout.n}), norm_scale(DType::f32, {2});
    OwnAdamW optimizer(layout, options);
    Reference reference(options, start);
    for (int64_t t = 1; t <= n_steps; ++t) {
        std::vector<double> g = rounded(random_values(layout.n, 100 + static_cast<uint64_t>(t), 0.02), grad_dtype);
        for (size_t i = 0; i < g.size(); i += 17) g[i] = 0;
        grads.set(g);
        const double scale = static_cast<float>(1.0 / static_cast<double>(1 + t % 3));
        const double lr = 1e-3 * (1 + 0.1 * static_cast<double>(t % 5));
        norm_scale.set({123.0, scale});
        // 16-bit weights: one step at a time, from the device's weights, as their rounding is far coarser than a step.
        if (value_dtype != DType::f32) {
            reference.w = values.values();
            reference.w_error.assign(reference.w.size(), 0.0);
        }
        optimizer->step({values}, grads, norm_scale, lr, t, device().stream);
        reference.step(layout.params, g, scale, lr, static_cast<double>(t), value_roundoff);
        if (value_dtype != DType::f32 || t == 1 || t == n_steps)
            reference.check_against(values.values(), concat(dtype_name(value_dtype), " values, ",
                                                            dtype_name(grad_dtype), " gradients, step ", t));
    }
    if (value_dtype == DType::f32)  // the bound says something: weights and steps are of the order of 1 and 1e-3
        CHECK(*std::max_element(reference.w_error.begin(), reference.w_error.end()) < 5e-5);
}

}  // namespace

TEST_CASE("AdamW equals float64 over 50 steps", "[adamw]") { compare_with_reference(DType::f32, DType::f32, 50); }

TEST_CASE("AdamW equals float64 in every dtype", "[adamw]") {
    // Master weights with a 16-bit copy: test_optimizers.cu.
    for (DType grad_dtype : {DType::f32, DType::bf16}) compare_with_reference(DType::bf16, grad_dtype, 6);
}

TEST_CASE("AdamW's first step is the paper's", "[adamw]") {
    // m^ = g and v^ = g^2: whatever the betas, the step is g / (|g| + eps), the sign of g unless it is as small as eps.
    const Layout layout = make_layout({4, 4});
    const std::vector<double> w = {0.5, -0.25, 1, 2, 0.5, -0.25, 1, 2, 9, 9, 9};  // 8 to 10 belong to no parameter
    const std::vector<double> g = {0.5, -3, 0.0625, 0, 0.5, -3, 0.0625, 0, 7, 7, 7};
    OptimizerOptions options;
    options.eps = 0.0625f;
    options.weight_decay = 0.125f;
    for (float beta2 : {0.0f, 0.5f, 0.95f, 0.999f}) {
        options.beta2 = beta2;
        Buffer values(DType::f32, {11}, w), grads(DType::f32, {11}, g), norm_scale(DType::f32, {2}, {1, 1});
        OwnAdamW optimizer(layout, options);
        optimizer->step({values}, grads, norm_scale, 0.0625, 1, device().stream);
        std::vector<double> expected = w;
        for (size_t i = 0; i < 8; ++i)
            expected[i] -= 0.0625 * (g[i] / (std::abs(g[i]) + 0.0625) + (i < 4 ? 0.125 * w[i] : 0.0));
        // About ten roundings of numbers up to 2.
        check_close(values.values(), expected, 0, 10 * 0x1p-23, concat("first step, beta2 ", beta2));
    }
}

TEST_CASE("AdamW equals torch.optim.AdamW with clip_grad_norm_", "[adamw][golden]") {
    // As in make_adamw_golden.py: these are exact.
    const auto start = [](int64_t i) { return static_cast<double>(i * 29 % 61 - 30) / 64; };
    const auto gradient = [](int64_t i, int64_t t) {
        if (i % 13 == 5) return 0.0;
        return static_cast<double>((i * 7 + t * 13) % 31 - 14) / 128 * (t % 4 == 0 ? 10 : 1);
    };
    Layout layout;
    for (int64_t size : {35, 3, 1, 11})
        layout.add(concat("parameter ", layout.params.size()), {size}).decay = size == 35 || size == 1;
    std::ifstream file("test/golden/adamw/golden.txt");
    REQUIRE(file.is_open());
    std::string line, word, name;
    std::getline(file, line);  // comment
    int n_cases = 0, n_compared = 0;
    while (file >> word) {
        REQUIRE(word == "case");
        double lr, max_norm;
        OptimizerOptions options;
        file >> name >> lr >> options.beta1 >> options.beta2 >> options.eps >> options.weight_decay >> max_norm >> word;
        REQUIRE(word == "norms");
        std::vector<double> norms(50), start_values, g(static_cast<size_t>(layout.n));
        for (double& norm : norms) file >> norm;
        for (int64_t i = 0; i < layout.n; ++i) start_values.push_back(start(i));
        Buffer values(DType::f32, {layout.n}, start_values), grads(DType::f32, {layout.n}), norm_scale(DType::f32, {2});
        Buffer scratch(DType::f32, {grad_norm_scratch_n(layout.n)});
        OwnAdamW optimizer(layout, options);
        for (int64_t t = 1; t <= 50; ++t) {
            for (int64_t i = 0; i < layout.n; ++i) g[static_cast<size_t>(i)] = gradient(i, t);
            grads.set(g);
            grad_norm(norm_scale, grads, static_cast<float>(max_norm), 1.0f, scratch, device().stream);
            // A thread of the norm adds one square here, so all that is rounded is the norm itself.
            const double norm = norms[static_cast<size_t>(t - 1)];
            CHECK(std::abs(norm_scale.values()[0] - norm) <= 1.01 * 0x1p-24 * norm);
            optimizer->step({values}, grads, norm_scale, lr, t, device().stream);
            if (t != 1 && t != 2 && t != 10 && t != 50) continue;
            int64_t golden_t = 0;
            file >> word >> golden_t;
            REQUIRE(golden_t == t);
            std::vector<double> expected(static_cast<size_t>(layout.n));
            for (double& value : expected) file >> value;
            // Each step rounds w once (2^-24 of at most 0.5), and moves it by about lr, at most 1e-5 of which is wrong:
            // betas rounded to float, and a mean m of gradients that cancel.
            const double tolerance = static_cast<double>(t) * (0x1p-25 + 1e-5 * lr);
            check_close(values.values(), expected, 0, tolerance, concat(name, ", step ", t));
            ++n_compared;
        }
        ++n_cases;
    }
    CHECK(n_cases == 3);
    CHECK(n_compared == 12);
}

TEST_CASE("AdamW decays exactly the parameters that say so, and touches nothing else", "[adamw]") {
    const Layout layout = make_layout(kOddSizes);
    OptimizerOptions options;
    options.weight_decay = 0.25f;
    const std::vector<double> ones(static_cast<size_t>(layout.n), 1.0), zeros(static_cast<size_t>(layout.n), 0.0);
    Buffer values(DType::f32, {layout.n}, ones), grads(DType::f32, {layout.n}, zeros);
    Buffer norm_scale(DType::f32, {2}, {1, 1});
    OwnAdamW optimizer(layout, options);
    for (int64_t t = 1; t <= 3; ++t) optimizer->step({values}, grads, norm_scale, 0.5, t, device().stream);
    std::vector<double> expected = ones;
    for (const Param& param : layout.params)
        for (int64_t k = 0; k < param.value.n() && param.decay; ++k)
            expected[static_cast<size_t>(param.offset + k)] = 0.875 * 0.875 * 0.875;  // 1 - lr * weight_decay, exact
    CHECK((values.values() == expected));
    // The gaps between parameters: gradients there reach neither values nor states.
    grads.set(ones);
    optimizer->step({values}, grads, norm_scale, 0.5, 4, device().stream);
    std::vector<bool> in_gap(static_cast<size_t>(layout.n), true);
    for (const Param& param : layout.params)
        for (int64_t k = 0; k < param.value.n(); ++k) in_gap[static_cast<size_t>(param.offset + k)] = false;
    const std::vector<double> w = values.values();
    const std::vector<float> m = to_floats(optimizer.m()), v = to_floats(optimizer.v());
    bool good = true;
    for (size_t i = 0; i < w.size(); ++i)
        good = good && (in_gap[i] ? w[i] == 1 && m[i] == 0 && v[i] == 0 : w[i] != 1 && m[i] != 0 && v[i] != 0);
    CHECK(good);
}

TEST_CASE("AdamW leaves everything as it is when the scale is NaN", "[adamw]") {
    const Layout layout = make_layout(kOddSizes);
    Buffer values(DType::f32, {layout.n}, random_values(layout.n, 1));
    Buffer grads(DType::f32, {layout.n}, random_values(layout.n, 2));
    Buffer norm_scale(DType::f32, {2}), scratch(DType::f32, {grad_norm_scratch_n(layout.n)});
    OwnAdamW optimizer(layout, {});
    const auto step = [&](int64_t t) {
        grad_norm(norm_scale, grads, 1.0f, 1.0f, scratch, device().stream);
        optimizer->step({values}, grads, norm_scale, 1e-3, t, device().stream);
    };
    step(1);
    const auto w = values.bits(), m = bits_of(optimizer.m()), v = bits_of(optimizer.v());
    for (double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
        std::vector<double> g = random_values(layout.n, 3);
        g[1500] = bad;
        grads.set(g);
        step(2);
        CHECK((values.bits() == w));
        CHECK((bits_of(optimizer.m()) == m));
        CHECK((bits_of(optimizer.v()) == v));
    }
    grads.set(random_values(layout.n, 3));
    step(2);
    CHECK((values.bits() != w));
}

TEST_CASE("AdamW gives an element the same bits in every place and in every run", "[adamw]") {
    // The same numbers as one parameter, and cut into two, with other offsets: other tiles, other alignment.
    const std::vector<double> start = random_values(3000, 1);
    const auto run = [&](const std::vector<int64_t>& sizes, int64_t first) {
        Layout layout = make_layout(sizes, first);
        for (Param& param : layout.params) param.decay = true;
        layout.params.back().offset = layout.n - 2 - sizes.back();  // right behind the other one, at the end
        if (sizes.size() == 2) layout.params[0].offset = layout.params[1].offset - sizes[0];
        const int64_t begin = layout.params[0].offset;
        Buffer values(DType::f32, {layout.n}), grads(DType::f32, {layout.n}), norm_scale(DType::f32, {2}, {1, 0.75});
        std::vector<double> all(static_cast<size_t>(layout.n), 0.0);
        std::copy(start.begin(), start.end(), all.begin() + begin);
        values.set(all);
        OwnAdamW optimizer(layout, {});
        for (int64_t t = 1; t <= 3; ++t) {
            const std::vector<double> g = random_values(3000, 10 + static_cast<uint64_t>(t));
            std::copy(g.begin(), g.end(), all.begin() + begin);
            grads.set(all);
            optimizer->step({values}, grads, norm_scale, 1e-3, t, device().stream);
        }
        auto bits = bits_of(values.tensor().slice(begin, 3000));
        for (const Tensor& state : {optimizer.m(), optimizer.v()})
            for (unsigned char byte : bits_of(state.slice(begin, 3000))) bits.push_back(byte);
        return bits;
    };
    const auto first = run({3000}, 0);
    CHECK((run({3000}, 0) == first));
    CHECK((run({3000}, 5) == first));
    CHECK((run({1, 2999}, 2) == first));
    CHECK((run({1531, 1469}, 3) == first));
}

TEST_CASE("tiles cover each element of each parameter once", "[adamw]") {
    const Layout layout = make_layout({1, 1024, 1025, 5000, 7, 2048});
    // Two units whose gradients, weights and states have other places each.
    const auto some = [&](size_t first, size_t n) {
        std::vector<Param> params(layout.params.begin() + static_cast<std::ptrdiff_t>(first),
                                  layout.params.begin() + static_cast<std::ptrdiff_t>(first + n));
        const int64_t start = params[0].offset;
        for (Param& param : params) param.offset -= start;
        return UpdatedUnit{.params = params, .n = 7100, .values = start, .copy = start + 8, .grads = start + 100};
    };
    const UpdatedUnit low = some(0, 3), high = some(3, 3);
    const TileTable table = count_tiles({low, high});
    const std::vector<Tile> tiles = make_tiles({low, high}, table);
    CHECK(table.first_tile == std::vector<int64_t>{0, 4, 12});
    CHECK(table.first_element == std::vector<int64_t>{0, 2050, 9105});
    CHECK(table.first_state == std::vector<int64_t>{0, 7104, 14208});
    CHECK(tiles.size() == 1 + 1 + 2 + 5 + 1 + 2);
    CHECK(table.n_tiles() == std::ssize(tiles));
    std::vector<float> seen(static_cast<size_t>(layout.n), -1.0f);
    for (const Tile& tile : tiles) {
        REQUIRE(tile.n >= 1);
        REQUIRE(tile.n <= kTileN);
        CHECK(tile.copy == tile.values + 8);
        CHECK(tile.grads == tile.values + 100);
        CHECK(tile.state == (tile.values < high.values ? tile.values : tile.values - high.values + 7104));
        for (int64_t i = tile.values; i < tile.values + tile.n; ++i) {
            REQUIRE(seen[static_cast<size_t>(i)] == -1.0f);
            seen[static_cast<size_t>(i)] = tile.decay;
        }
    }
    std::vector<float> expected(static_cast<size_t>(layout.n), -1.0f);
    for (const Param& param : layout.params)
        for (int64_t k = 0; k < param.value.n(); ++k) expected[static_cast<size_t>(param.offset + k)] = param.decay;
    CHECK((seen == expected));
    CHECK(make_tiles({}, count_tiles({})).empty());
    // Counting takes no memory: the tiles of a plan's 2^46 parameters would be 5.5 TB.
    Param large;
    large.value = make_tensor(nullptr, DType::bf16, {int64_t{1} << 46});
    CHECK(count_tiles({{.params = {large}, .n = large.value.n()}}).n_tiles() == int64_t{1} << 36);
}

TEST_CASE("AdamW counts its memory before it takes it", "[adamw]") {
    const Layout layout = make_layout({5000});
    Arena arena("optimizer");
    const auto counted = make_optimizer("adamw", arena, layout.params, layout.n, {});
    CHECK(arena.table() == std::vector<std::pair<std::string, size_t>>{
                               {"optimizer m", 20224}, {"optimizer v", 20224}, {"optimizer tiles", 512}});
    CHECK(counted->states()[0].kind == "m");
    CHECK(counted->states()[1].kind == "v");
    CHECK_THAT(error_of([&] { counted->init(device().stream); }), ContainsSubstring("before the arena is reserved"));
    OwnAdamW optimizer(layout, {});
    CHECK((to_floats(optimizer.m()) == std::vector<float>(5002, 0.0f)));
    CHECK((to_floats(optimizer.v()) == std::vector<float>(5002, 0.0f)));
    OwnAdamW nothing(Layout{}, {});  // a rank that owns no parameters
    nothing->step({}, {}, {}, 1e-3, 1, device().stream);
}

TEST_CASE("AdamW refuses wrong arguments", "[adamw]") {
    const Layout layout = make_layout({5, 6});
    const auto option_error = [&](auto change) {
        OptimizerOptions options;
        change(options);
        return error_of([&] { OwnAdamW optimizer(layout, options); });
    };
    CHECK(option_error([](OptimizerOptions&) {}).empty());
    CHECK_THAT(option_error([](OptimizerOptions& o) { o.beta1 = 1; }), ContainsSubstring("beta1 is 1"));
    CHECK_THAT(option_error([](OptimizerOptions& o) { o.beta2 = -0.5f; }), ContainsSubstring("beta2 is -0.5"));
    CHECK_THAT(option_error([](OptimizerOptions& o) { o.eps = 0; }), ContainsSubstring("eps is 0"));
    CHECK_THAT(option_error([](OptimizerOptions& o) { o.weight_decay = NAN; }),
               ContainsSubstring("weight-decay is nan"));
    Layout outside = layout;
    outside.n -= 4;
    CHECK_THAT(error_of([&] { OwnAdamW optimizer(outside, {}); }), ContainsSubstring("parameter 1"));

    OwnAdamW optimizer(layout, {});
    const int64_t n = layout.n;
    Buffer good(DType::f32, {n}), shorter(DType::f32, {n - 1}), integers(DType::i32, {n}), norm_scale(DType::f32, {2});
    norm_scale.set({1, NAN});
    const auto error = [&](Tensor values, Tensor grads, Tensor norm_scale, double lr, int64_t t) {
        return error_of([&] { optimizer->step({values}, grads, norm_scale, lr, t, device().stream); });
    };
    CHECK(error(good, good, norm_scale, 1e-3, 1).empty());
    CHECK_THAT(error(shorter, good, norm_scale, 1e-3, 1), ContainsSubstring("AdamW: values is f32 ("));
    CHECK_THAT(error(good, shorter, norm_scale, 1e-3, 1), ContainsSubstring("AdamW: grads is f32 ("));
    CHECK_THAT(error(good, integers, norm_scale, 1e-3, 1), ContainsSubstring("i32"));
    CHECK_THAT(error(good, good, good, 1e-3, 1), ContainsSubstring("AdamW: norm_scale"));
    CHECK_THAT(error(good, good, norm_scale, NAN, 1), ContainsSubstring("learning rate is nan"));
    CHECK_THAT(error(good, good, norm_scale, 1e-3, 0), ContainsSubstring("count from 1"));
}
