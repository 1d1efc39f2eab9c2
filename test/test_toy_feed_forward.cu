// A feed-forward that the project does not have, from this file alone: down(relu(up x)^2) (So et al. 2021,
// arXiv:2109.08668). It is registered in the table, and then trained, saved, loaded and planned like the others. What a
// new one needs is all here.
#include "core/kernel.cuh"
#include "model/sublayer.h"
#include "models.h"
#include "ranks.h"
#include "temp_folder.h"
#include "planning/planning.h"
#include "training/training.h"

#include <fcntl.h>
#include <unistd.h>

namespace {

template <class T>
__global__ void relu2_forward_kernel(T* out, const T* inp, int64_t n) {
    const int64_t i = global_thread();
    if (i >= n) return;
    const float x = fmaxf(to_float(inp[i]), 0.0f);
    out[i] = from_float<T>(x * x);
}
template <class T>
__global__ void relu2_backward_kernel(T* dinp, const T* dout, const T* inp, int64_t n) {
    const int64_t i = global_thread();
    if (i < n) dinp[i] = from_float<T>(2 * fmaxf(to_float(inp[i]), 0.0f) * to_float(dout[i]));
}

enum LinearOf { kUp, kDown };
enum Saved { kUpRows, kAct };

void check_sizes(const Config&) {}
void place(Placer& placer, const Config& c, const std::string& prefix, SubLayerParameters& p) {
    p.linears[kUp] = placer.linear(Crossing::enters, {{prefix + "mlp.up_proj", c.F}}, c.C, false);
    p.linears[kDown] = placer.linear(Crossing::leaves, {{prefix + "mlp.down_proj", c.C}}, c.F, false);
}
void take_saved(SavedTaker& take, const Config& c, Slots& saved) {
    saved[kUpRows] = take.keep("feed-forward", c.F);
    saved[kAct] = take.recomputable("feed-forward", c.F);
}
void take_gradients(SavedTaker& take, const Config& c, Slots& gradients) {
    gradients[kUpRows] = take.keep("gradients of activations", c.F);
    gradients[kAct] = take.keep("gradients of activations", c.F);
}
int64_t scratch_n(const Model&, int64_t, int64_t) { return 0; }

unsigned blocks_for(int64_t n) { return static_cast<unsigned>(ceil_div(n, 256)); }
void recompute(const BlockContext& b, const SubLayerParameters&, const Slots& saved) {
    const int64_t n = saved[kAct].n();
    dispatch(saved[kAct].dtype, [&](auto zero) {
        using T = decltype(zero);
        relu2_forward_kernel<T><<<blocks_for(n), 256, 0, b.stream>>>(saved[kAct].ptr<T>(), saved[kUpRows].ptr<T>(), n);
        cudaCheckLaunch();
    });
}
void forward_toy(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor out, Tensor inp) {
    block_linear_forward(b, p.linears[kUp], saved[kUpRows], inp);
    recompute(b, p, saved);
    if (out.exists()) block_linear_forward(b, p.linears[kDown], out, saved[kAct]);
}
void backward_toy(const BlockContext& b, const SubLayerParameters& p, const Slots& saved, Tensor dinp, Tensor dout,
                  Tensor inp) {
    const Tensor dup = b.workspace.dfeed_forward[kUpRows], dact = b.workspace.dfeed_forward[kAct];
    block_linear_backward_input(b, p.linears[kDown], dact, dout);
    block_linear_backward_weight(b, p.linears[kDown], dout, saved[kAct]);
    const int64_t n = dup.n();
    dispatch(dup.dtype, [&](auto zero) {
        using T = decltype(zero);
        relu2_backward_kernel<T>
            <<<blocks_for(n), 256, 0, b.stream>>>(dup.ptr<T>(), dact.ptr<T>(), saved[kUpRows].ptr<T>(), n);
        cudaCheckLaunch();
    });
    block_linear_backward_input(b, p.linears[kUp], dinp, dup);
    block_linear_backward_weight(b, p.linears[kUp], dup, inp);
}
Elements elements(const Config& c) { return {2.0 * static_cast<double>(c.F), 3.0 * static_cast<double>(c.F)}; }

const SubLayer kToy = {.name = "relu2",
                       .check = check_sizes,
                       .place = place,
                       .take_saved = take_saved,
                       .take_gradients = take_gradients,
                       .scratch_n = scratch_n,
                       .forward = forward_toy,
                       .recompute = recompute,
                       .backward = backward_toy,
                       .elements = elements};

// In the table for as long as a test runs.
struct Registered {
    Registered() { feed_forward_table().push_back(&kToy); }
    ~Registered() { feed_forward_table().pop_back(); }
};

Config toy_config() {
    Config c = small_llama();
    c.feed_forward = kToy.name;
    return c;
}

}  // namespace

TEST_CASE("a feed-forward from one file trains, and is recomputed with the same bits", "[model][toy]") {
    const Registered registered;
    const Config config = toy_config();
    const int64_t B = 2, T = 9;
    std::vector<float> expected;
    for (const Recompute& recompute : {Recompute{}, Recompute{.selective = true}, Recompute{.every = 1}}) {
        TinyTrainer m(config, B, T, {}, recompute);
        init_weights(m.model, 5);
        const std::vector<int32_t> tokens = random_tokens(B * T, config.V, 1);
        m.set_batch(tokens, tokens);
        const double first = m.train_step(1.0f / (B * T), 1e-2, 1);
        double loss = first;
        for (int64_t step = 2; step <= 20; ++step) loss = m.train_step(1.0f / (B * T), 1e-2, step);
        CHECK(loss < 0.5 * first);
        if (expected.empty()) expected = to_floats(m.model.weights);
        CHECK(to_floats(m.model.weights) == expected);
    }
}

TEST_CASE("its gradients are those of finite differences", "[model][toy]") {
    const Registered registered;
    const Config config = toy_config();
    TinyTrainer m(config, 1, 7);
    init_weights(m.model, 5);
    const std::vector<int32_t> tokens = random_tokens(7, config.V, 1);
    m.set_batch(tokens, tokens);
    m.zero_grads();
    m.compute_gradients(1.0f / 7);
    // Along the gradient the loss rises by its squared norm. Central differences with a step of 1e-2 / norm err by its
    // third power, and by float32's rounding of a loss near 4 (2^-22) over twice the rise: 1 % of both together at
    // most.
    const std::vector<float> w = to_floats(m.model.weights), g = to_floats(m.model.grads);
    const double norm = norm_of(g), step = 1e-2 / norm;
    double loss[2];
    for (int side = 0; side < 2; ++side) {
        std::vector<float> moved = w;
        for (size_t i = 0; i < w.size(); ++i) moved[i] += static_cast<float>((side == 0 ? -step : step) * g[i] / norm);
        from_floats(m.model.weights, moved);
        forward(m.model, m.acts, m.workspace, device().stream);
        loss_forward(m.model, m.acts, device().stream);
        loss[side] = m.mean_loss();
    }
    CHECK((loss[1] - loss[0]) / (2 * step) == Approx(norm).epsilon(0.01));
}

TEST_CASE("it is saved, loaded and counted", "[model][toy]") {
    const Registered registered;
    Config like_gpt2 = small_gpt2();
    like_gpt2.feed_forward = kToy.name;
    const Config config = toy_config();
    for (const Config& saved : {config, like_gpt2}) {
        const TempFolder folder;
        TinyTrainer m(saved, 1, 7);
        init_weights(m.model, 5);
        m.set_batch(random_tokens(7, saved.V, 1), random_tokens(7, saved.V, 2));
        forward(m.model, m.acts, m.workspace, device().stream);
        save_model(m.model, folder.path);
        const Config loaded_config = load_config(folder.path);
        CHECK(loaded_config.feed_forward == "relu2");
        TinyTrainer loaded(loaded_config, 1, 7);
        load_weights(loaded.model, folder.path);
        loaded.set_batch(random_tokens(7, saved.V, 1), random_tokens(7, saved.V, 2));
        forward(loaded.model, loaded.acts, loaded.workspace, device().stream);
        CHECK(to_floats(loaded.acts.logits) == to_floats(m.acts.logits));
    }

    const Config swiglu = small_llama();  // one matrix (F, C) more a block
    CHECK(parameter_count(swiglu) - parameter_count(config) == config.L * config.F * config.C);
    CHECK(flops_per_token(swiglu, 7) - flops_per_token(config, 7) ==
          6.0 * static_cast<double>(config.L * config.F * config.C));
}

TEST_CASE("it is planned, and takes what is planned", "[model][toy][plan]") {
    const Registered registered;
    const TempFolder folder;
    make_folder(folder.path);
    write_text_file(folder.path + "/config.json", config_to_json(toy_config()));
    const std::string config = folder.path + "/config.json";
    const char* const words[] = {"train_gpt", "--model", config.c_str(), "--seq", "16",
                                 "--batch",   "4",       "--sample",     "0"};
    const TrainOptions options = parse_train_options(static_cast<int>(std::size(words)), const_cast<char**>(words));
    run_ranks(threads(1), [&](Comm& world) {
        Mesh mesh(world, {{"dp", 1}});
        Trainer trainer(options, load_config(config), mesh);
        trainer.take_memory();
        print_plan(trainer);
        const size_t planned = trainer.memory.activations.bytes();
        trainer.reserve();
        CHECK(trainer.memory.activations.bytes() == planned);
    });
}

TEST_CASE("what products in fp8 leave to kernels of a feed-forward is planned, whatever its name",
          "[model][toy][plan]") {
    if (!has_fp8()) SKIP_TEST("no fp8");
    SubLayer copy = find_feed_forward("gelu");
    copy.name = "copy of gelu";
    feed_forward_table().push_back(&copy);
    std::vector<std::string> plans;
    for (const char* name : {"gelu", copy.name}) {
        const TempFolder folder;
        Config config = *find_preset("gpt2");
        config.feed_forward = name;
        const char* const words[] = {"train_gpt", "--dtype", "fp8", "--device-spec", "h100", "--plan"};
        const TrainOptions options = parse_train_options(static_cast<int>(std::size(words)), const_cast<char**>(words));
        std::fflush(stdout);
        const int own_stdout = dup(STDOUT_FILENO);
        const int plan = open((folder / "plan").c_str(), O_CREAT | O_WRONLY, 0600);
        dup2(plan, STDOUT_FILENO);
        run_ranks(threads(1), [&](Comm& world) {
            Mesh mesh(world, {{"dp", 1}});
            Trainer trainer(options, config, mesh);
            trainer.take_memory();
            print_time(trainer);
        });
        std::fflush(stdout);
        dup2(own_stdout, STDOUT_FILENO);
        close(own_stdout), close(plan);
        plans.push_back(slurp(folder / "plan"));
    }
    feed_forward_table().pop_back();
    CHECK_THAT(plans[0], ContainsSubstring("iB moved"));
    CHECK(plans[1] == plans[0]);
}
