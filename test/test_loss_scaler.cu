// Static and dynamic loss scaling: the recipe step by step, its errors, and its use with grad_norm and an optimizer.
//
//   run:   build/cpu/run_tests -# "[#test_loss_scaler]"
#include <cmath>

#include "optim/optim.h"
#include "reference.h"
#include "temp_folder.h"

TEST_CASE("a dynamic loss scale doubles after 2000 good steps and halves at an overflow", "[loss_scaler]") {
    LossScaler scaler{LossScaleOptions{}};
    CHECK(scaler.scale == 65536);
    for (int k = 0; k < 1999; ++k) scaler.update(false);
    CHECK(scaler.scale == 65536);
    scaler.update(false);
    CHECK(scaler.scale == 131072);
    for (int k = 0; k < 1999; ++k) scaler.update(false);
    scaler.update(true);  // the 2000th: an overflow starts the count anew
    CHECK(scaler.scale == 65536);
    for (int k = 0; k < 1999; ++k) scaler.update(false);
    CHECK(scaler.scale == 65536);
    scaler.update(false);
    CHECK(scaler.scale == 131072);
    for (int k = 0; k < 17; ++k) scaler.update(true);
    CHECK(scaler.scale == 1);
    CHECK_THAT(error_of([&] { scaler.update(true); }),
               ContainsSubstring("even with a loss scale of 1:") && ContainsSubstring("smaller learning rate"));
}

TEST_CASE("a dynamic loss scale stops growing at its largest", "[loss_scaler]") {
    LossScaler scaler{LossScaleOptions{.interval = 1}};
    for (int k = 0; k < 100; ++k) scaler.update(false);
    CHECK(scaler.scale == 16777216);
}

TEST_CASE("a loss scaler continues from its saved numbers", "[loss_scaler]") {
    const LossScaleOptions options{.start = 1024, .interval = 7};
    const auto overflows = [](int step) { return step % 23 == 5; };
    LossScaler whole(options), first(options), second(options);
    for (int step = 0; step < 200; ++step) {
        LossScaler& part = step < 90 ? first : second;
        if (step == 90) {
            second.scale = first.scale;
            second.good_steps = first.good_steps;
            second.overflows = first.overflows;
        }
        whole.update(overflows(step));
        part.update(overflows(step));
        REQUIRE(part.scale == whole.scale);
    }
    CHECK(second.good_steps == whole.good_steps);
}

TEST_CASE("a static loss scale stays, and gives up after 20 overflows in a row", "[loss_scaler]") {
    LossScaler scaler(parse_loss_scale("1024"));
    for (int k = 0; k < 5000; ++k) scaler.update(k % 20 != 0);  // 19 in a row
    CHECK(scaler.scale == 1024);
    scaler.update(false);
    for (int k = 0; k < 19; ++k) scaler.update(true);
    CHECK_THAT(error_of([&] { scaler.update(true); }),
               ContainsSubstring("20 steps in a row") && ContainsSubstring("loss scale 1024"));
}

TEST_CASE("loss scales as text", "[loss_scaler]") {
    CHECK(parse_loss_scale("dynamic").dynamic);
    CHECK(parse_loss_scale("dynamic").start == 65536);
    CHECK(!parse_loss_scale("1").dynamic);
    CHECK(parse_loss_scale("1024").start == 1024);
    CHECK(parse_loss_scale("1.5e3").start == 1500);
    // A static scale may be larger than any that the dynamic one grows to: up to 2^120.
    CHECK(parse_loss_scale("1329227995784915872903807060280344576").start == 0x1p120);
    for (const char* text : {"", "Dynamic", "static", "1024x", "1e999", "--"})
        CHECK_THAT(error_of([&] { parse_loss_scale(text); }), ContainsSubstring("use dynamic, or a number such as"));
    for (const char* text : {"0", "-8", "0.5", "nan", "inf", "1e300"})
        CHECK_THAT(error_of([&] { parse_loss_scale(text); }), ContainsSubstring("from 1 to 2^120"));
    const auto error = [](const LossScaleOptions& options) { return error_of([&] { LossScaler scaler(options); }); };
    CHECK(error({}).empty());
    CHECK_THAT(error({.growth = 1}), ContainsSubstring("growth is 1"));
    CHECK_THAT(error({.growth = INFINITY}), ContainsSubstring("growth is inf"));
    CHECK_THAT(error({.backoff = 1}), ContainsSubstring("backoff is 1"));
    CHECK_THAT(error({.backoff = 0}), ContainsSubstring("backoff is 0"));
    CHECK_THAT(error({.largest = 8}), ContainsSubstring("largest loss scale is 8"));
    CHECK_THAT(error({.largest = 0x1p121}), ContainsSubstring("largest loss scale is 2.65846e+36"));
    CHECK_THAT(error({.interval = 0}), ContainsSubstring("after 0 good steps"));
}

TEST_CASE("f16 gradients with a scaled loss: small ones survive, an overflow skips the step", "[loss_scaler]") {
    // The gradient 1e-8 is 0 in f16, and 6.6e-4 with the scale. The loss is linear: gradient = scale * slope.
    Param param;
    param.name = "weight";
    param.value = make_tensor(nullptr, DType::f32, {1});
    Arena arena("optimizer");
    const OptimizerOptions options = default_optimizer_options("sgd");
    make_optimizer("sgd", arena, {param}, 1, options);
    arena.reserve();
    const auto sgd = make_optimizer("sgd", arena, {param}, 1, options);
    sgd->init(device().stream);
    Buffer master(DType::f32, {1}, {0}), copy(DType::f16, {1}, {0}), grads(DType::f16, {1}), result(DType::f32, {2});
    Buffer scratch(DType::f32, {grad_norm_scratch_n(1)});
    LossScaler scaler{LossScaleOptions{}};
    int64_t t = 1;
    const auto step = [&](double slope) {
        grads.set({slope * scaler.scale});
        grad_norm(result, grads, 0, static_cast<float>(1 / scaler.scale), scratch, device().stream);
        sgd->step({.values = master, .copy = copy}, grads, result, 1, t, device().stream);
        const bool overflow = !std::isfinite(result.values()[0]);
        scaler.update(overflow);
        t += !overflow;
    };
    step(1e-8);
    CHECK(std::abs(master.values()[0] + 1e-8) <= 1e-8 * 0x1p-10);  // f16 keeps 11 bits
    const double before = master.values()[0];
    step(2);  // 131072 is infinite in f16
    CHECK(scaler.scale == 32768);
    CHECK(master.values()[0] == before);
    CHECK(t == 2);
    step(1.5);  // 49152 is not
    CHECK(std::abs(master.values()[0] + 1.5) <= 1.5 * 0x1p-10);
    CHECK((copy.values() == rounded(master.values(), DType::f16)));
    CHECK(t == 3);
}
