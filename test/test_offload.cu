// Offload: the update on the host against the device's, bit for bit; training with states on the host against training
// without, over ranks, ZeRO stages, precisions and clipping, also in strict mode (a wait that is missing changes the
// bits); and the program: memory, resuming across, refusals.
#include "io/io.h"
#include "llm.h"
#include "optim/optim.h"
#include "program.h"
#include "ranks.h"
#include "test.h"

#include <algorithm>
#include <cmath>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// A step of train_gpt's without the program around it

struct Case {
    Offload offload = Offload::none;
    int zero = 0, n_ranks = 1;
    DType dtype = DType::f32;
    float clip = 0;
    std::string optimizer = "adamw";
    bool naive = false;
    Compression compress = Compression::none;
};
std::string text_of(const Case& c) {
    return concat("--offload ", static_cast<int>(c.offload), " --zero ", c.zero, c.naive ? " naive" : "", " --ranks ",
                  c.n_ranks, " ", dtype_name(c.dtype), " --clip ", c.clip, " ", c.optimizer, " --compress ",
                  static_cast<int>(c.compress));
}
MemoryKind home_of(Offload offload) {
    return offload == Offload::none      ? MemoryKind::device
           : offload == Offload::unified ? MemoryKind::managed
                                         : MemoryKind::pinned;
}

class Run {
  public:
    static constexpr int64_t kT = 7;

    Run(Comm& world, const Case& c)
        : case_(c), masters_("master weights", home_of(c.offload)), states_("optimizer states", home_of(c.offload)),
          ranks_(world, {.naive = c.naive,
                         .zero = c.zero,
                         .bucket_mib = 0.01,  // buckets that end inside of units
                         .compress = {.kind = c.compress}}) {
        take();
        for (Arena* arena : {&weights_, &masters_, &grads_, &states_, &rest_, &transit_}) arena->reserve();
        take();
        optimizer_->init(device().stream);
        init_weights(model, 3);
    }

    // Two micro-batches on one rank, one on several, so that both paths of the gradients are gone.
    void step(int64_t t, double lr) {
        const cudaStream_t stream = device().stream;
        const float loss_scale = 8;
        const int64_t n_micro = ranks_.comm().size == 1 ? 2 : 1;
        if (offload_) offload_->begin_step(lr, t, 1 / loss_scale, 5);
        for (int64_t micro = 0; micro < n_micro; ++micro) {
            std::vector<int32_t> tokens;
            for (uint64_t i = 0; i < kT; ++i)
                tokens.push_back(
                    static_cast<int32_t>(uniform_below(9, static_cast<uint64_t>(100 * t + ranks_.comm().rank + micro),
                                                       i, static_cast<uint64_t>(model.config.V))));
            copy_to_device(acts_.tokens, tokens.data());
            copy_to_device(acts_.targets, tokens.data());
            forward(model, acts_, workspace_, stream);
            loss_backward(model, acts_, loss_scale / static_cast<float>(kT), stream);
            workspace_.accumulate = ranks_.begin_backward(model, micro);
            backward(model, acts_, workspace_, stream);
        }
        ranks_.finish_grads(stream);
        for (size_t u = 0; u < model.units.size(); ++u)
            sum_squares(sums_.slice(static_cast<int64_t>(u), 1).view({2}), model.grad_shard(u), scratch_, stream);
        ranks_.all_reduce(sums_, stream);
        clip_scale(sums_, {norm_, case_.clip, 1 / loss_scale}, stream);
        for (size_t u = 0; u < model.units.size(); ++u) {
            if (offload_) offload_->update(u, norm_, stream);
            else optimizer_->step_units(u, 1, model.updated_weights(5), model.grads, norm_, lr, t, stream);
            ranks_.all_gather_weights(model, u, stream);
        }
        cudaCheck(cudaStreamSynchronize(stream));
    }

    // The exact weights, and whatever else of weights and states this rank holds.
    std::vector<float> numbers() {
        std::vector<float> all;
        const auto add = [&](const std::vector<float>& more) { all.insert(all.end(), more.begin(), more.end()); };
        cudaCheck(cudaDeviceSynchronize());
        for (const Param& param : model.params) add(ranks_.read(model, param));
        add(to_floats(model.weights));
        for (const OptimizerState& state : optimizer_->states()) add(to_floats(state.tensor));
        return all;
    }

    Model model;

  private:
    // The memory: counted, and taken.
    void take() {
        Config config;
        config.V = 70, config.L = 2, config.C = 32, config.H = 2, config.K = 1, config.D = 16, config.F = 40;
        config.tied = case_.dtype == DType::f32;
        Sharding sharding = ranks_.sharding(optimizer_granularity(case_.optimizer));
        sharding.offload = case_.offload;
        const bool half = case_.dtype != DType::f32;
        model = build_model(config, {case_.dtype, ranks_.comm().size == 1 ? DType::f32 : case_.dtype, half}, kT,
                            weights_, grads_, masters_, sharding);
        model.data_parallel = &ranks_;
        int64_t scratch_n = 0;
        for (size_t u = 0; u < model.units.size(); ++u)
            scratch_n = std::max(scratch_n, grad_norm_scratch_n(model.shard(u).n));
        OptimizerOptions options = default_optimizer_options(case_.optimizer);
        options.weight_decay = 0.1f;
        optimizer_ = sharding.host_updates()
                         ? make_host_optimizer(case_.optimizer, states_, model.updated_units(), options)
                         : make_optimizer(case_.optimizer, states_, model.updated_units(), options);
        if (case_.offload != Offload::none) {
            if (!offload_) offload_ = std::make_unique<OffloadedUpdate>(model, optimizer_, case_.clip > 0);
            offload_->take_memory(transit_);
            ranks_.grads_are_final = [this](size_t u, cudaStream_t stream) { offload_->grads_are_final(u, stream); };
        }
        acts_ = take_activations(model, 1, kT, {}, rest_);
        workspace_ = take_workspace(model, 1, kT, true, rest_);
        sums_ = rest_.take("sums", DType::f32, {static_cast<int64_t>(model.units.size()), 2});
        norm_ = rest_.take("norm", DType::f32, {2});
        scratch_ = rest_.take("scratch", DType::f32, {scratch_n});
        ranks_.take_memory(model, ranks_.comm().size == 1 ? 2 : 1, {sums_}, rest_);
    }

    const Case case_;
    Arena weights_{"weights"}, masters_, grads_{"gradients"}, states_, rest_{"rest"},
        transit_{"transit", MemoryKind::pinned};
    DataParallel ranks_;
    Activations acts_;
    Workspace workspace_;
    Tensor sums_, norm_, scratch_;
    std::unique_ptr<Optimizer> optimizer_;
    std::unique_ptr<OffloadedUpdate> offload_;
};

// All numbers of all ranks after three steps.
std::vector<float> train(const Case& c) {
    std::vector<std::vector<float>> by_rank(static_cast<size_t>(c.n_ranks));
    run_ranks(threads(c.n_ranks), [&](Comm& world) {
        Run run(world, c);
        for (int64_t t = 1; t <= 3; ++t) run.step(t, 1e-2 / static_cast<double>(t));
        by_rank[static_cast<size_t>(world.rank)] = run.numbers();
    });
    std::vector<float> all;
    for (const auto& numbers : by_rank) all.insert(all.end(), numbers.begin(), numbers.end());
    return all;
}

void check_same(const Case& plain, Offload offload) {
    Case c = plain;
    const std::vector<float> expected = train(plain);
    REQUIRE(std::all_of(expected.begin(), expected.end(), [](float x) { return std::isfinite(x); }));
    c.offload = offload;
    INFO(text_of(c));
    CHECK((train(c) == expected));
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The update

TEST_CASE("the host's update is the device's", "[offload]") {
    const std::vector<int64_t> sizes = {1, 1023, 1025, 2500, 7};
    for (const std::string name : {"adam", "adamw"}) {
        for (const auto& [copy, grad] : std::vector<std::pair<DType, DType>>{{DType::f32, DType::f32},
                                                                             {DType::bf16, DType::f32},
                                                                             {DType::bf16, DType::bf16},
                                                                             {DType::f16, DType::f32},
                                                                             {DType::f16, DType::f16}}) {
            INFO(name << ", copy in " << dtype_name(copy) << ", gradients in " << dtype_name(grad));
            std::vector<Param> params;
            int64_t n = 3;  // few parameters begin on a round number
            for (int64_t size : sizes) {
                Param param;
                param.name = concat("parameter ", size);
                param.value = make_tensor(nullptr, DType::f32, {size});
                param.offset = n, param.decay = size % 2 == 1;
                n += size + 2;
                params.push_back(param);
            }
            struct Side {
                explicit Side(MemoryKind kind) : arena("side", kind) {}
                Arena arena;
                Tensor values, copy, grads, norm;
                std::unique_ptr<Optimizer> optimizer;
            };
            const bool has_copy = copy != DType::f32;
            std::vector<std::unique_ptr<Side>> sides;
            for (const MemoryKind kind : {MemoryKind::device, MemoryKind::pinned})
                sides.push_back(std::make_unique<Side>(kind));
            for (size_t s = 0; s < 2; ++s) {
                Side& side = *sides[s];
                for (int pass = 0; pass < 2; ++pass) {
                    side.values = side.arena.take("values", DType::f32, {n});
                    if (has_copy) side.copy = side.arena.take("copy", copy, {n});
                    side.grads = side.arena.take("gradients", grad, {n});
                    side.norm = side.arena.take("norm", DType::f32, {2});
                    OptimizerOptions options = default_optimizer_options(name);
                    options.weight_decay = 0.1f;
                    if (s == 0) side.optimizer = make_optimizer(name, side.arena, params, n, options);
                    else side.optimizer = make_host_optimizer(name, side.arena, {{.params = params, .n = n}}, options);
                    if (pass == 0) side.arena.reserve();
                }
                side.optimizer->init(device().stream);
                from_floats(side.values, normal_values(n, 1, 1, 1));
                if (has_copy) from_floats(side.copy, std::vector<float>(static_cast<size_t>(n), 0.25f));
            }
            // The third step overflowed: nothing may change.
            for (int64_t t = 1; t <= 4; ++t) {
                for (const auto& side : sides) {
                    from_floats(side->grads, normal_values(n, 1e-2, 2, static_cast<uint64_t>(t)));
                    from_floats(side->norm, {1.0f, t == 3 ? NAN : 0.7f});
                    side->optimizer->step({.values = side->values, .copy = side->copy}, side->grads, side->norm, 1e-2,
                                          std::min<int64_t>(t, 3), device().stream);
                }
            }
            const auto same = [&](const Tensor& a, const Tensor& b) {
                const std::vector<float> on_device = to_floats(a), on_host = to_floats(b);
                record_bits(on_host.data(), on_host.size() * sizeof(float));
                return on_device == on_host;
            };
            CHECK(same(sides[0]->values, sides[1]->values));
            if (has_copy) CHECK(same(sides[0]->copy, sides[1]->copy));
            const auto device_states = sides[0]->optimizer->states(), host_states = sides[1]->optimizer->states();
            REQUIRE(device_states.size() == host_states.size());
            for (size_t i = 0; i < host_states.size(); ++i) {
                CHECK((host_states[i].kind == device_states[i].kind && host_states[i].param == device_states[i].param));
                CHECK(same(device_states[i].tensor, host_states[i].tensor));
            }
        }
    }
    Arena arena("none");
    CHECK_THROWS_WITH(make_host_optimizer("lion", arena, {}, {}),
                      ContainsSubstring("'lion' has no update on the host"));
}

// The copy goes to the device after every step; before the first one it holds nothing.
TEST_CASE("a first update that the host skips still rounds the weights into their copy", "[offload]") {
    constexpr int64_t n = 1500;
    Param param;
    param.name = "parameter", param.value = make_tensor(nullptr, DType::f32, {n});
    Arena arena("side", MemoryKind::pinned);
    Weights weights;
    Tensor grads, norm;
    std::unique_ptr<Optimizer> optimizer;
    for (int pass = 0; pass < 2; ++pass) {
        weights = {.values = arena.take("values", DType::f32, {n}), .copy = arena.take("copy", DType::bf16, {n})};
        grads = arena.take("gradients", DType::bf16, {n}), norm = arena.take("norm", DType::f32, {2});
        optimizer =
            make_host_optimizer("adamw", arena, {{.params = {param}, .n = n}}, default_optimizer_options("adamw"));
        if (pass == 0) arena.reserve();
    }
    optimizer->init(device().stream);
    const std::vector<float> values = normal_values(n, 1, 1, 1);
    from_floats(weights.values, values);
    from_floats(weights.copy, std::vector<float>(n, 0.25f));
    from_floats(grads, std::vector<float>(n, INFINITY));
    from_floats(norm, {INFINITY, NAN});
    optimizer->step(weights, grads, norm, 1e-2, 1, device().stream);
    CHECK(to_floats(weights.values) == values);
    const std::vector<float> copy = to_floats(weights.copy);
    for (size_t i = 0; i < values.size(); ++i) REQUIRE(copy[i] == __bfloat162float(__float2bfloat16(values[i])));
}

// ---------------------------------------------------------------------------------------------------------------------
// Training

// Each wait of a host update was taken out once, and strict mode saw it here: for the gradients to be final and on the
// host, for the norm, for the update to be over, and for the new weights.
TEST_CASE("offload does not change training: ranks, ZeRO, precision, clipping", "[offload]") {
    const int n_ranks = GENERATE(1, 3);
    const DType dtype = GENERATE(DType::f32, DType::bf16);
    const float clip = GENERATE(0.0f, 0.05f);
    for (int zero = 0; zero <= 3; ++zero) {
        const Case plain = {.zero = zero, .n_ranks = n_ranks, .dtype = dtype, .clip = clip};
        const std::vector<float> expected = train(plain);
        REQUIRE(std::all_of(expected.begin(), expected.end(), [](float x) { return std::isfinite(x); }));
        for (const Offload offload : {Offload::optimizer, Offload::params, Offload::unified}) {
            if (offload == Offload::params && zero < 3) continue;
            Case c = plain;
            c.offload = offload;
            INFO(text_of(c));
            const std::vector<float> numbers = train(c);
            record_bits(numbers.data(), numbers.size() * sizeof(float));
            CHECK((numbers == expected));
        }
    }
}

TEST_CASE("offload with other optimizers, and when rank 0 has everything", "[offload]") {
    check_same({.n_ranks = 3, .dtype = DType::bf16, .clip = 0.05f, .naive = true}, Offload::optimizer);
    check_same({.n_ranks = 3, .naive = true}, Offload::optimizer);
    check_same({.zero = 1, .n_ranks = 2, .optimizer = "adam"}, Offload::optimizer);
    check_same({.zero = 3, .n_ranks = 2, .dtype = DType::bf16, .optimizer = "lion"}, Offload::unified);
    check_same({.zero = 1, .n_ranks = 2, .dtype = DType::bf16, .optimizer = "muon"}, Offload::unified);
}

TEST_CASE("offload with compressed gradients: a unit leaves while the ones before it are compressed", "[offload]") {
    for (const Compression kind : {Compression::bf16, Compression::fp8, Compression::power_sgd, Compression::one_bit})
        check_same({.n_ranks = 2, .compress = kind}, Offload::optimizer);
}

// ---------------------------------------------------------------------------------------------------------------------
// The program

namespace {

const std::string kSmall = " --batch 3 --seq 16 --steps 9 --val-every 4 --val-sequences 3 --sample 0 --warmup 2 ";

Outcome program(const TempFolder& folder, const std::string& arguments) {
    const std::string text = folder / "text.txt";
    if (!std::filesystem::exists(text)) spit(text, made_text(200));
    return run_program("train_gpt", "--data " + text + kSmall + arguments);
}

}  // namespace

TEST_CASE("a run goes on with other parts of it on the host", "[program][offload]") {
    const TempFolder folder;
    const std::string whole = folder / "whole", parts = folder / "parts";
    const std::string flags = "--dtype bf16 --ranks 3 --zero ";
    REQUIRE(program(folder, flags + "2 --out " + whole).status == 0);
    REQUIRE(program(folder, flags + "2 --out " + parts + " --offload optimizer --stop-after 3").status == 0);
    int64_t stop = 5;
    for (const std::string more : {"--zero 1", "--zero 3 --offload params", "--zero 2 --offload unified"}) {
        INFO(more);
        must_succeed(
            run_program("train_gpt", concat("--resume --ranks 3 --out ", parts, " ", more, " --stop-after ", stop)));
        stop += 2;
    }
    for (const std::string file :
         {"/model.safetensors", "/optimizer-00001-of-00003.safetensors", "/optimizer-00003-of-00003.safetensors"}) {
        INFO(file);
        CHECK((slurp(newest_checkpoint(whole) + file) == slurp(newest_checkpoint(parts) + file)));
    }
    const auto a = read_csv_log(whole + "/log.csv"), b = read_csv_log(parts + "/log.csv");
    REQUIRE((a.size() == 9 && b.size() == 9));
    for (size_t i = 0; i < 9; ++i)
        CHECK((a[i].loss == b[i].loss && a[i].grad_norm == b[i].grad_norm && a[i].val_loss == b[i].val_loss));
}

TEST_CASE("ranks of --tp update on the host once, when their parts have been added", "[program][offload]") {
    const TempFolder folder;
    std::string weights[2];
    for (const int offloads : {0, 1}) {
        const std::string run = folder / concat("run", offloads);
        must_succeed(program(
            folder, concat("--clip 0 --steps 2 --ranks 2 --tp 2 --out ", run, offloads ? " --offload optimizer" : "")));
        weights[offloads] = weights_of(run);
    }
    CHECK((weights[0] == weights[1]));
}

TEST_CASE("an overflow before the first update leaves the weights on the device as they are", "[program][offload]") {
    const TempFolder folder;
    const std::string plain = folder / "plain", offloaded = folder / "offloaded";
    const std::string flags = "--dtype fp16 --steps 3 --inject-overflow 1 --out ";
    REQUIRE(program(folder, flags + plain).status == 0);
    REQUIRE(program(folder, flags + offloaded + " --offload optimizer").status == 0);
    const auto a = read_csv_log(plain + "/log.csv"), b = read_csv_log(offloaded + "/log.csv");
    REQUIRE((a.size() == 3 && b.size() == 3));
    CHECK(!a[0].grad_norm);
    for (size_t i = 0; i < 3; ++i) CHECK((a[i].loss == b[i].loss && a[i].grad_norm == b[i].grad_norm));
}

TEST_CASE("offloaded bytes leave the device, and the plan knows", "[program][offload][plan][alone]") {
    const TempFolder folder;
    const auto bytes_of = [&](const std::string& flags) {
        const std::string run = folder / concat("run ", flags).substr(0, 60);
        const Outcome outcome = program(folder, "--clip 0 --steps 2 " + flags + " --out '" + run + "'");
        const Outcome plan = program(folder, "--clip 0 --steps 2 " + flags + " --plan --device-spec h200");
        INFO(flags << "\n" << outcome.err << plan.err << plan.out);
        REQUIRE((outcome.status == 0 && plan.status == 0));
        const double taken = number_after(outcome.out, "taken on the device ("),
                     planned = number_after(plan.out, "\n  total      ");
        CHECK(taken_as_planned(taken, planned));
        CHECK(number_after(plan.out, "\n  tables, cuBLASLt workspace ") < planned);  // what is left of the sum
        if (flags.find("offload") == std::string::npos) return std::pair(taken, 0.0);
        const double on_host = number_after(outcome.out, " on the host (");
        CHECK(on_host == number_after(plan.out, "\n  on the host   "));
        return std::pair(taken, on_host);
    };
    // The tiny model has P parameters; padding and tables are less than a hundredth of them.
    const double P = static_cast<double>(parameter_count(load_config("tiny")));
    for (const auto& [dtype, states, transit] : {std::tuple{"fp32", 8.0, 4.0 + 4.0}, {"bf16", 12.0, 2.0 + 2.0}}) {
        const std::string flags = concat("--dtype ", dtype);
        const double plain = bytes_of(flags).first;
        const auto optimizer = bytes_of(flags + " --offload optimizer"),
                   unified = bytes_of(flags + " --offload unified");
        CHECK(plain - optimizer.first == Approx(states * P).epsilon(0.02));
        CHECK(optimizer.second == Approx((states + transit) * P).epsilon(0.02));
        CHECK(plain - unified.first == Approx(states * P).epsilon(0.02));
        CHECK(unified.second == Approx(states * P).epsilon(0.02));
        const double cut = bytes_of(flags + " --zero 3 --offload optimizer").first,
                     params = bytes_of(flags + " --zero 3 --offload params").first;
        CHECK(cut - params == Approx((states == 8.0 ? 4.0 : 2.0) * P).epsilon(0.02));
    }
}

TEST_CASE("the plan's table of ZeRO has what stays on the device, and what is on the host",
          "[program][offload][plan]") {
    const TempFolder folder;
    const double P = static_cast<double>(parameter_count(load_config("tiny")));
    // Of a parameter in bf16: 2 + 2 bytes of weight and gradient; 12 of master weight and AdamW's states, on the host.
    for (const auto& [flags, stage, device, host] : {std::tuple("optimizer", "0 (ddp)", 4.0, 12.0),
                                                     {"optimizer --zero 1", "1", 4.0, 6.0},
                                                     {"unified --zero 2", "2", 3.0, 6.0},
                                                     {"optimizer --zero 3", "3", 2.0, 6.0},
                                                     {"params --zero 3", "3", 1.0, 7.0}}) {
        const std::string plan =
            program(folder, concat("--plan --batch 2 --dtype bf16 --ranks 2 --device-spec h200 --offload ", flags)).out;
        INFO(flags << "\n" << plan);
        const size_t begin = plan.find(concat("\n  --zero ", stage)), end = plan.find('\n', begin + 1);
        REQUIRE((begin != std::string::npos && end != std::string::npos));
        const std::string row = plan.substr(begin, end - begin);
        double a_parameter = NAN, on_device = NAN, on_host = NAN;
        std::sscanf(row.c_str() + row.find(stage) + std::strlen(stage), "%lf %*f %*s %lf GB %*f %*s %lf GB",
                    &a_parameter, &on_device, &on_host);
        CHECK(a_parameter == device);
        CHECK(1e9 * on_device == Approx(device * P).epsilon(1e-3));
        CHECK(1e9 * on_host == Approx(host * P).epsilon(1e-3));
        CHECK_THAT(row, Catch::Matchers::EndsWith("   this run"));
        // Shards of all ranks, and the buffers through which they travel, are what the ranks take together;
        // padding and tables are less than a hundredth of them.
        const double n_shards = device + host < 16 ? 2 : 1,
                     sum = number_after(plan.substr(plan.find("on the host\n")), "\n  sum ");
        CHECK(sum * P == Approx(n_shards * number_after(plan, "\n  on the host ")).epsilon(0.01));
        // Other stages do not go with --offload params.
        CHECK((plan.find("--zero 0") == std::string::npos) == (std::string(flags) == "params --zero 3"));
    }
}

TEST_CASE("the plan counts the batches that the host reads", "[program][plan]") {
    const TempFolder folder;
    // Of two steps and an evaluation 4 sequences of 64 each: tokens and targets; documents from and to, and positions.
    const std::string flags = "--plan --batch 4 --seq 64 --device-spec h200";
    CHECK(number_after(program(folder, flags).out, "\n  on the host   ") == 12 * 64 * 4 * 2);
    CHECK(number_after(program(folder, flags + " --mask-documents").out, "\n  on the host   ") == 12 * 64 * 4 * 5);
}

TEST_CASE("offload refuses what does not go with it", "[program][offload]") {
    const TempFolder folder;
    for (const auto& [flags, says] : std::vector<std::pair<std::string, std::string>>{
             {"--offload disk", "use none, optimizer, params or unified"},
             {"--offload params --zero 2", "needs --zero 3"},
             {"--offload optimizer --optimizer lion", "--optimizer lion: the host updates by adamw and adam"},
             {"--offload params --zero 3 --optimizer muon", "--optimizer muon"},
             {"--offload optimizer --dtype bf16 --master none", "--master none"}}) {
        const Outcome outcome = program(folder, flags + " --out " + (folder / "run"));
        INFO(flags << "\n" << outcome.err);
        CHECK(one_line_with(line_of(outcome), "train_gpt: --offload", says));
    }
    // The last good step is what is saved, and a step that was half done does not say that it was not.
    const Outcome outcome =
        program(folder, "--offload optimizer --clip 0 --lr 1e20 --warmup 0 --save-every 1 --out " + (folder / "run"));
    INFO(outcome.err);
    CHECK(one_line_with(line_of(outcome), "step 2: the loss is",
                        "the weights have been updated with them. The step's data are sequences 3 to 5 of the run"));
    CHECK(outcome.err.find("unchanged") == std::string::npos);
}
