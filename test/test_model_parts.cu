// The model in parts: micro-batches in flight, weight gradients computed later, blocks run by themselves. All of it
// must give the bits of one micro-batch after the other through the whole model: the same kernels on the same numbers
// in the same order of additions.
#include "io/io.h"
#include "model/sublayer.h"
#include "models.h"
#include "ranks.h"
#include "temp_folder.h"

#include <numeric>

namespace {

constexpr int64_t kB = 2, kT = 11;

// Two micro-batches in flight: activations of their own, one workspace.
struct TwoMicroBatches {
    TinyTrainer m;
    Arena arena{"second micro-batch"};
    Activations second;
    WeightGradients later;

    explicit TwoMicroBatches(const Config& config, const Precision& precision = {}, const Recompute& recompute = {},
                             int64_t T = kT)
        : m(config, kB, T, precision, recompute) {
        for (int pass = 0; pass < 2; ++pass) {
            second = take_activations(m.model, kB, T, recompute, arena);
            later.take_memory(m.model, kB, T, 2 * config.L, arena);
            if (pass == 0) arena.reserve();
        }
        init_weights(m.model, 3);
        quantise_weights(m.model, device().stream);
        uint64_t seed = 1;
        for (Activations* acts : {&m.acts, &second}) {
            copy_to_device(acts->tokens, random_tokens(kB * T, config.V, seed++).data());
            copy_to_device(acts->targets, random_tokens(kB * T, config.V, seed++).data());
        }
    }
    void forward_and_loss(Activations& acts) {
        forward(m.model, acts, m.workspace, device().stream);
        loss_backward(m.model, acts, 0.01f, device().stream);
    }
    void run_backward(Activations& acts) { backward(m.model, acts, m.workspace, device().stream); }
    std::vector<float> grads() { return to_floats(m.model.grads); }

    // One after the other.
    std::vector<float> sequential() {
        m.workspace.later = nullptr;
        m.zero_grads();
        for (Activations* acts : {&m.acts, &second}) forward_and_loss(*acts), run_backward(*acts);
        return grads();
    }
};

Config fp8_config() {
    Config c = small_gpt2();
    c.C = 32, c.D = 16, c.H = c.K = 2, c.F = 48;
    return c;
}
const Precision kFp8 = {.dtype = DType::bf16, .grad_dtype = DType::f32, .master = true, .fp8 = Fp8Recipe::delayed};

}  // namespace

TEST_CASE("two micro-batches in flight give the bits of one after the other", "[model]") {
    for (const Config& config : small_models())
        for (const Recompute& recompute : {Recompute{}, Recompute{.selective = true}}) {
            TwoMicroBatches two(config, {}, recompute);
            const std::vector<float> expected = two.sequential();
            two.m.zero_grads();
            two.forward_and_loss(two.m.acts);
            // Selective recomputation shares tensors between the blocks of a micro-batch, not between micro-batches.
            two.forward_and_loss(two.second);
            two.run_backward(two.m.acts);
            two.run_backward(two.second);
            CHECK(two.grads() == expected);
        }
}

TEST_CASE("weight gradients of all blocks, computed at the end of the step, have the same bits", "[model]") {
    std::vector<std::pair<Config, Precision>> cases;
    if (has_fp8()) cases.push_back({fp8_config(), kFp8});
    for (const Config& config : small_models()) cases.push_back({config, {}});
    for (const auto& [config, precision] : cases) {
        TwoMicroBatches two(config, precision, {}, precision.fp8 == Fp8Recipe::none ? kT : 16);
        const std::vector<float> expected = two.sequential();
        two.m.zero_grads();
        two.m.workspace.later = &two.later;
        CHECK_THROWS_WITH(two.later.keep(two.m.acts.embedded, device().stream), ContainsSubstring("call begin()"));
        int64_t micro = 0;
        for (Activations* acts : {&two.m.acts, &two.second}) {
            two.forward_and_loss(*acts);
            two.later.begin(micro++, 0);
            two.run_backward(*acts);
        }
        CHECK(largest(to_floats(two.m.model.blocks[0].attention.linears[0].dweight)) == 0);  // not yet
        CHECK(two.later.most_blocks() == 2 * config.L);
        CHECK_THROWS_WITH(two.later.begin(1, 0), ContainsSubstring("micro-batch 1, chunk 0 are still there"));
        for (micro = 0; micro < 2; ++micro) two.later.run(micro, 0, two.m.workspace, device().stream);
        // One matrix as embedding and head: the embedding's gradients are not put off here, and come before the head's.
        const std::vector<float> grads = two.grads();
        const size_t n_tied = config.tied ? static_cast<size_t>(two.m.model.wte.n()) : 0;
        CHECK(std::equal(grads.begin() + static_cast<std::ptrdiff_t>(n_tied), grads.end(),
                         expected.begin() + static_cast<std::ptrdiff_t>(n_tied)));
        CHECK(largest_difference(grads, expected) <= (n_tied > 0 ? 1e-6 * largest(expected) : 0));
        CHECK(two.later.is_empty());
        CHECK_THROWS_WITH(two.later.run(0, 0, two.m.workspace, device().stream), ContainsSubstring("there are none"));
        two.forward_and_loss(two.m.acts);
        two.later.begin(0, 0);
        for (int i = 0; i < 2; ++i) two.run_backward(two.m.acts);
        CHECK_THROWS_WITH(two.run_backward(two.m.acts), ContainsSubstring("call run()"));
    }
}

TEST_CASE("a model that is cut between two blocks has the bits of the whole", "[model]") {
    const cudaStream_t stream = device().stream;
    for (Config config : small_models()) {
        config.L = 3;
        for (const Precision& precision :
             {Precision{}, Precision{.dtype = DType::bf16, .grad_dtype = DType::bf16, .master = true}}) {
            TinyTrainer m(config, kB, kT, precision);
            const Model& model = m.model;
            init_weights(m.model, 3);
            m.set_batch(random_tokens(kB * kT, config.V, 1), random_tokens(kB * kT, config.V, 2));
            m.zero_grads();
            forward(model, m.acts, m.workspace, stream);
            const std::vector<float> logits = to_floats(m.acts.logits);
            loss_backward(model, m.acts, 0.01f, stream);
            backward(model, m.acts, m.workspace, stream);
            const std::vector<float> grads = to_floats(model.grads);
            for (int64_t cut = 0; cut <= config.L; ++cut) {
                Buffer between(precision.dtype, {kB * kT, config.C}), end(precision.dtype, {kB * kT, config.C});
                m.zero_grads();
                embed_forward(model, m.acts, m.workspace, m.acts.embedded, stream);
                forward_blocks(model, m.acts, m.workspace, 0, cut, m.acts.embedded, between, stream);
                forward_blocks(model, m.acts, m.workspace, cut, config.L, between, end, stream);
                head_forward(model, m.acts, m.workspace, end, stream);
                INFO(config.attention << " " << dtype_name(precision.dtype) << ", cut before block " << cut);
                CHECK(to_floats(m.acts.logits) == logits);
                loss_backward(model, m.acts, 0.01f, stream);
                head_backward(model, m.acts, m.workspace, end, stream);
                backward_blocks(model, m.acts, m.workspace, cut, config.L, between, end, stream);
                backward_blocks(model, m.acts, m.workspace, 0, cut, m.workspace.dresidual, between, stream);
                embed_backward(model, m.acts, m.workspace, m.workspace.dresidual, stream);
                CHECK(to_floats(model.grads) == grads);
            }
        }
    }
}

TEST_CASE("the visits of a step: every block forward, and backward once, in the mirrored order", "[model]") {
    Config config = small_llama();
    config.L = 5;
    Arena weights("weights"), grads("gradients"), masters("master weights");
    const Model model = build_model(config, {}, kT, weights, grads, masters);
    for (const int64_t every : {0, 1, 2, 5, 9}) {
        std::vector<int64_t> forward_blocks, again, backward_blocks;
        for (const Visit& visit : forward_visits(model))
            if (visit.work == Work::forward_block) forward_blocks.push_back(visit.block);
        std::vector<size_t> begun, ended;
        for (const Visit& visit : backward_visits(model, {.every = every})) {
            if (visit.work == Work::recompute_block) again.push_back(visit.block);
            if (visit.work == Work::backward_block) backward_blocks.push_back(visit.block);
            begun.insert(begun.end(), visit.begin.begin(), visit.begin.end());
            ended.insert(ended.end(), visit.end.begin(), visit.end.end());
        }
        CHECK(forward_blocks == std::vector<int64_t>{0, 1, 2, 3, 4});
        CHECK(backward_blocks == std::vector<int64_t>{4, 3, 2, 1, 0});
        CHECK(begun == std::vector<size_t>{6, 5, 4, 3, 2, 1, 0});
        CHECK(ended == begun);
        // Blocks before the last kept input of `every` blocks.
        const std::vector<int64_t> expected = every == 1   ? std::vector<int64_t>{3, 2, 1, 0}
                                              : every == 2 ? std::vector<int64_t>{2, 3, 0, 1}
                                                           : std::vector<int64_t>{};
        CHECK(again == expected);
    }
}

namespace {

// A rank's part of a model, with its memory and its initial weights.
struct PartWithMemory {
    Arena weights{"weights"}, grads{"gradients"}, masters{"master weights"}, states{"states"};
    Model model;
    std::unique_ptr<Optimizer> optimizer;

    PartWithMemory(const Config& config, const std::optional<ModelPart>& part, const Precision& precision = {},
                   const std::string& optimizer_name = "adamw", const Sharding& sharding = {}) {
        for (int pass = 0; pass < 2; ++pass) {
            model = build_model(config, precision, kT, weights, grads, masters, sharding, {}, part);
            optimizer = make_optimizer(optimizer_name, states, model.params, model.n, {});
            if (pass == 0)
                for (Arena* arena : {&weights, &grads, &masters, &states}) arena->reserve();
        }
        optimizer->init(device().stream);
        init_weights(model, 3);
        quantise_weights(model, device().stream);
    }
    const Param& param(const std::string& name) const { return *std::ranges::find(model.params, name, &Param::name); }
};

// Cuts of four blocks: stages one after the other, and the two chunks of a V.
std::vector<std::vector<ModelPart>> cuts_of_four_blocks(bool tied) {
    return {{{.blocks = {0}, .head = false, .head_copy = tied},
             {.blocks = {1, 2}, .embedding = false, .head = false, .head_copy = tied},
             {.blocks = {3}, .embedding = false, .head_copy = tied}},
            {{.blocks = {0, 3}, .head_copy = tied},
             {.blocks = {1, 2}, .embedding = false, .head = false, .head_copy = tied}}};
}

}  // namespace

TEST_CASE("parts of a model have together what the whole has: units, shards, initial values", "[model]") {
    for (Config config : small_models()) {
        config.L = 4;
        const Sharding sharding{.rank = 1, .size = 3, .zero = 1};
        const PartWithMemory whole(config, {}, {}, "adamw", sharding);
        for (const auto& parts : cuts_of_four_blocks(config.tied)) {
            std::map<std::string, int> seen;
            std::set<size_t> numbers;
            for (const ModelPart& part : parts) {
                const PartWithMemory its(config, part, {}, "adamw", sharding);
                const Model& model = its.model;
                REQUIRE(model.units.size() == part.blocks.size() + 2);
                for (size_t u = 0; u < model.units.size(); ++u) {
                    const Unit &unit = model.units[u], &same = whole.model.units[unit.number];
                    CHECK(unit.name == same.name);
                    if (unit.n == 0) {
                        CHECK(model.shard(u).n == 0);
                        CHECK(model.counted(u).empty());
                        continue;
                    }
                    numbers.insert(unit.number);
                    // A copy of the embedding makes the head's unit larger, and moves its boundaries.
                    if (!config.tied) CHECK(unit.bounds == same.bounds);
                }
                for (const Param& param : model.params) {
                    ++seen[param.file_name()];
                    const Param& same = whole.param(param.file_name());
                    CHECK(to_floats(param.value) == to_floats(same.value));
                    CHECK(hash_name(param.file_name()) == hash_name(same.name));
                    CHECK(param.copy_of.empty() == (param.name == param.file_name()));
                }
            }
            CHECK(numbers.size() == whole.model.units.size());
            CHECK(seen.size() == whole.model.params.size());
            for (const auto& [name, times] : seen)
                CHECK(times == 1 + (config.tied && name == whole.model.params[0].name));
        }
    }
    Arena a("weights"), b("gradients"), c("master weights");
    const auto build = [&](const Config& config, const ModelPart& part) {
        build_model(config, {}, kT, a, b, c, {}, {}, part);
    };
    CHECK_THROWS_WITH(build(small_llama(), {.blocks = {}}), ContainsSubstring("without a block"));
    CHECK_THROWS_WITH(build(small_llama(), {.blocks = {1, 0}}), ContainsSubstring("not ascending numbers below 2"));
    CHECK_THROWS_WITH(build(small_llama(), {.blocks = {0, 2}}), ContainsSubstring("not ascending numbers below 2"));
    CHECK_THROWS_WITH(build(small_llama(), {.blocks = {0}, .head_copy = true}), ContainsSubstring("not tied"));
    CHECK_THROWS_WITH(build(small_gpt2(), {.blocks = {0}, .embedding = false}), ContainsSubstring("needs a copy"));
}

TEST_CASE("the embedding and its copy in the head stay equal through every optimizer", "[model]") {
    Config config = small_gpt2();
    config.L = 1;
    const Precision f32, rounded{.dtype = DType::bf16, .grad_dtype = DType::bf16};
    for (const std::string& name : optimizer_names())
        for (const Precision& precision : {f32, rounded}) {
            PartWithMemory its(config, ModelPart{.blocks = {0}, .head_copy = true}, precision, name);
            const Param &embedding = its.model.params.front(), &copy = its.param("lm_head.weight");
            Buffer norm_scale(DType::f32, {2});
            const float numbers[2] = {1, 0.5f};
            copy_to_device(norm_scale, numbers);
            const std::vector<float> before = to_floats(embedding.value);
            cudaCheck(cudaMemsetAsync(its.model.grads.data, 0, its.model.grads.bytes(), device().stream));
            for (int64_t t = 1; t <= 3; ++t) {
                const std::vector<float> grads = normal_values(embedding.value.n() - embedding.padded_rows * config.C,
                                                               1, static_cast<uint64_t>(t), 1);
                for (const Param* param : {&embedding, &copy}) from_floats(param->grad.slice(0, config.V), grads);
                its.optimizer->step(its.model.all_weights(7), its.model.grads, norm_scale, 1e-2, t, device().stream);
            }
            INFO(name << " " << dtype_name(precision.dtype));
            CHECK(to_floats(embedding.value) == to_floats(copy.value));
            CHECK(to_floats(embedding.value) != before);
        }
}

namespace {

// Blocks [first, last) of one of the parts: a stage.
struct Stage {
    size_t part;
    int64_t first, last;
};
// A rank of a pipeline, on one rank: its part, and what its micro-batches take.
struct PartInFlight : PartWithMemory {
    Arena arena{"activations"};
    Workspace workspace;
    InFlight in_flight;
    WeightGradients later;
    std::vector<Activations> micro_batches;

    PartInFlight(const Config& config, const ModelPart& part, const Precision& precision, const Recompute& recompute,
                 int64_t T, const Pieces& most, int64_t largest_chunk, bool splits, int64_t n_micro)
        : PartWithMemory(config, part, precision) {
        for (int pass = 0; pass < 2; ++pass) {
            workspace = take_workspace(model, kB, T, true, arena);
            const size_t before = arena.bytes();
            in_flight.take_memory(model, kB, T, recompute, largest_chunk, most, arena);
            const PieceBytes bytes = piece_bytes(model, kB, T, recompute, largest_chunk);
            if (pass == 0) CHECK(static_cast<int64_t>(arena.bytes() - before) == bytes.of(most));
            if (splits) later.take_memory(model, kB, T, most.sets, arena);
            micro_batches.clear();
            for (int64_t i = 0; i < n_micro; ++i)
                micro_batches.push_back(take_micro_batch(model, kB, T, recompute, arena));
            if (pass == 0) arena.reserve();
        }
        if (splits) workspace.later = &later;
        cudaCheck(cudaMemsetAsync(model.grads.data, 0, model.grads.bytes(), device().stream));
    }
};

struct PartsCase {
    Config config;
    Precision precision = {};
    Recompute recompute = {};
    bool splits = false;
};

// All forwards, then all backwards, then, split, what is left of each: everything is in flight at once.
void run_parts(std::vector<std::unique_ptr<PartInFlight>>& ranks, const std::vector<Stage>& stages, int64_t n_micro,
               int64_t T, std::vector<float>& losses) {
    const cudaStream_t stream = device().stream;
    const Model& first_model = ranks[stages[0].part]->model;
    const int64_t S = std::ssize(stages), N = kB * T, C = first_model.config.C;
    const DType dtype = first_model.precision.dtype;
    const int64_t row_n = round_up(N * C, 64);  // aligned
    Buffer rows(dtype, {n_micro * (S + 1), row_n}), gradients(dtype, {n_micro, row_n});
    const auto in = [&](const Buffer& buffer, int64_t i) {
        return buffer.tensor().slice(i, 1).view({row_n}).slice(0, N * C).view({N, C});
    };
    const auto row = [&](int64_t micro, int64_t s) { return in(rows, micro * (S + 1) + s); };
    const auto dx = [&](int64_t micro) { return in(gradients, micro); };
    for (int64_t micro = 0; micro < n_micro; ++micro)
        for (int64_t s = 0; s < S; ++s) {
            const Stage& stage = stages[static_cast<size_t>(s)];
            PartInFlight& rank = *ranks[stage.part];
            Activations& acts = rank.micro_batches[static_cast<size_t>(micro)];
            rank.in_flight.take_chunk(acts, stage.first, stage.last, row(micro, s));
            if (s == 0) embed_forward(rank.model, acts, rank.workspace, row(micro, 0), stream);
            forward_blocks(rank.model, acts, rank.workspace, stage.first, stage.last, row(micro, s), row(micro, s + 1),
                           stream);
        }
    for (int64_t micro = 0; micro < n_micro; ++micro)
        for (int64_t s = S; s-- > 0;) {
            const Stage& stage = stages[static_cast<size_t>(s)];
            PartInFlight& rank = *ranks[stage.part];
            const bool splits = rank.workspace.later != nullptr;
            Activations& acts = rank.micro_batches[static_cast<size_t>(micro)];
            if (splits) rank.later.begin(micro, s);
            if (s + 1 == S) {
                rank.in_flight.take_head(acts, row(micro, S));
                head_forward(rank.model, acts, rank.workspace, row(micro, S), stream);
                loss_backward(rank.model, acts, 0.01f, stream);
                head_backward(rank.model, acts, rank.workspace, dx(micro), stream);
                const std::vector<float> its = to_floats(acts.losses);
                losses.insert(losses.end(), its.begin(), its.end());
                if (!splits) rank.in_flight.give_back_head(acts);
            }
            backward_blocks(rank.model, acts, rank.workspace, stage.first, stage.last, dx(micro), dx(micro), stream);
            if (s == 0) embed_backward(rank.model, acts, rank.workspace, dx(micro), stream);
            if (!splits) rank.in_flight.give_back_chunk(acts, stage.first, stage.last);
        }
    for (int64_t s = 0; s < S; ++s)
        for (int64_t micro = 0; micro < n_micro && ranks[stages[static_cast<size_t>(s)].part]->workspace.later;
             ++micro) {
            const Stage& stage = stages[static_cast<size_t>(s)];
            PartInFlight& rank = *ranks[stage.part];
            Activations& acts = rank.micro_batches[static_cast<size_t>(micro)];
            rank.later.run(micro, s, rank.workspace, stream);
            if (s + 1 == S) rank.in_flight.give_back_head(acts);
            rank.in_flight.give_back_chunk(acts, stage.first, stage.last);
        }
    cudaCheck(cudaStreamSynchronize(stream));  // before the rows go
}

void check_parts(const PartsCase& c, const std::vector<ModelPart>& parts, const std::vector<Stage>& stages) {
    constexpr int64_t kMicro = 3;
    const int64_t T = c.precision.fp8 == Fp8Recipe::none ? kT : 16, largest_chunk = 4;
    const auto batch = [&](int64_t micro, uint64_t what) {
        return random_tokens(kB * T, c.config.V, 10 * static_cast<uint64_t>(micro) + what);
    };
    TinyTrainer whole(c.config, kB, T, c.precision, c.recompute);
    init_weights(whole.model, 3);
    quantise_weights(whole.model, device().stream);
    whole.zero_grads();
    std::vector<float> expected_losses, losses;
    for (int64_t micro = 0; micro < kMicro; ++micro) {
        whole.set_batch(batch(micro, 1), batch(micro, 2));
        whole.compute_gradients(0.01f);
        const std::vector<float> its = to_floats(whole.acts.losses);
        expected_losses.insert(expected_losses.end(), its.begin(), its.end());
    }
    std::vector<std::unique_ptr<PartInFlight>> ranks;
    for (size_t r = 0; r < parts.size(); ++r) {
        Pieces most{.heads = parts[r].head ? (c.splits ? kMicro : 1) : 0};
        for (const Stage& stage : stages) {
            const Pieces its = chunk_pieces(c.precision, c.recompute, stage.last - stage.first);
            if (stage.part != r) continue;
            most.sets += kMicro * its.sets, most.inputs += kMicro * its.inputs, most.scales += kMicro * its.scales;
        }
        ranks.push_back(std::make_unique<PartInFlight>(c.config, parts[r], c.precision, c.recompute, T, most,
                                                       largest_chunk, c.splits, kMicro));
        for (int64_t micro = 0; micro < kMicro; ++micro) {
            copy_to_device(ranks[r]->micro_batches[static_cast<size_t>(micro)].tokens, batch(micro, 1).data());
            copy_to_device(ranks[r]->micro_batches[static_cast<size_t>(micro)].targets, batch(micro, 2).data());
        }
        CHECK(ranks[r]->in_flight.taken() == Pieces{});
    }
    run_parts(ranks, stages, kMicro, T, losses);
    CHECK(losses == expected_losses);
    for (const Param& param : whole.model.params) {
        std::vector<float> sum;
        int copies = 0;
        for (const auto& rank : ranks)
            for (const Param& its : rank->model.params) {
                if (its.file_name() != param.name) continue;
                const std::vector<float> grad = to_floats(its.grad);
                sum.resize(grad.size());
                for (size_t i = 0; i < grad.size(); ++i) sum[i] += grad[i];
                ++copies;
            }
        INFO(param.name);
        const std::vector<float> expected = to_floats(param.grad);
        // The sum of the gradients of the embedding and of its copy is formed in another order than in one matrix: at
        // most 6 additions of numbers that are no larger than the sum of magnitudes, each rounded by 2^-24.
        if (copies > 1) CHECK(largest_difference(sum, expected) < 2e-5 * largest(expected));
        else CHECK(sum == expected);
    }
    for (const auto& rank : ranks) CHECK(rank->in_flight.taken() == Pieces{});
}

}  // namespace

TEST_CASE("parts of a model, with all micro-batches in flight, have the bits of the whole", "[model]") {
    std::vector<PartsCase> cases;
    for (const Config& config : small_models())
        for (const bool splits : {false, true}) cases.push_back({config, {}, {}, splits});
    for (const Recompute& recompute :
         {Recompute{.selective = true}, Recompute{.every = 1}, Recompute{.every = 2, .head_chunks = 3}})
        for (const Config& config : {small_gpt2(), small_qwen3()}) cases.push_back({config, {}, recompute});
    const Precision bf16{.dtype = DType::bf16, .grad_dtype = DType::f32, .master = true};
    for (const bool splits : {false, true}) {
        cases.push_back({small_llama(), bf16, {}, splits});
        if (has_fp8()) cases.push_back({fp8_config(), kFp8, {}, splits});
    }
    if (has_fp8()) cases.push_back({fp8_config(), kFp8, {.every = 2}});
    for (PartsCase& c : cases) {
        c.config.L = 4;
        INFO(c.config.attention << " " << dtype_name(c.precision.dtype) << " every " << c.recompute.every << " splits "
                                << c.splits);
        const auto cuts = cuts_of_four_blocks(c.config.tied);
        check_parts(c, cuts[0], {{0, 0, 1}, {1, 0, 2}, {2, 0, 1}});
        check_parts(c, cuts[1], {{0, 0, 1}, {1, 0, 1}, {1, 1, 2}, {0, 1, 2}});
        if (c.recompute.every == 2)  // 3 and 1 blocks
            check_parts(c,
                        {{.blocks = {0, 1, 2}, .head = false, .head_copy = c.config.tied},
                         {.blocks = {3}, .embedding = false, .head_copy = c.config.tied}},
                        {{0, 0, 3}, {1, 0, 1}});
    }
}

TEST_CASE("pieces of activations: what a chunk takes, and that no more is given out than there is", "[model]") {
    CHECK(chunk_pieces({}, {}, 5) == Pieces{.sets = 5, .inputs = 4});
    CHECK(chunk_pieces(kFp8, {.selective = true}, 5) == Pieces{.sets = 5, .inputs = 4, .scales = 5});
    CHECK(chunk_pieces({}, {.every = 2}, 5) == Pieces{.inputs = 2});
    CHECK(chunk_pieces(kFp8, {.every = 9}, 5) == Pieces{.scales = 5});
    Config config = small_llama();
    config.L = 3;
    PartInFlight rank(config, whole_model(config), {}, {}, kT, {.sets = 4, .inputs = 3, .heads = 1}, 3, false, 2);
    Activations &a = rank.micro_batches[0], &b = rank.micro_batches[1];
    rank.in_flight.take_chunk(a, 0, 2, {});
    rank.in_flight.take_chunk(b, 0, 2, {});
    CHECK(rank.in_flight.most_taken() == Pieces{.sets = 4, .inputs = 2});
    CHECK_THROWS_WITH(rank.in_flight.take_chunk(a, 2, 3, {}), ContainsSubstring("all 4 blocks are taken"));
    rank.in_flight.give_back_chunk(b, 0, 2);
    rank.in_flight.take_chunk(a, 2, 3, {});
    rank.in_flight.take_head(a, {});
    CHECK_THROWS_WITH(rank.in_flight.take_head(b, {}), ContainsSubstring("all 1 heads are taken"));
    CHECK(rank.in_flight.taken() == Pieces{.sets = 3, .inputs = 1, .heads = 1});
    CHECK(rank.in_flight.most_taken() == Pieces{.sets = 4, .inputs = 2, .heads = 1});
}

TEST_CASE("parts of a model on ranks of a pipeline are saved as the whole is, and loaded into other parts", "[model]") {
    for (Config config : {small_gpt2(), small_qwen3()}) {
        config.L = 4;
        const bool tied = config.tied;
        const TempFolder whole_folder, folder;
        const PartWithMemory whole(config, {});
        save_model(whole.model, whole_folder.path);
        const auto cuts = cuts_of_four_blocks(tied);
        // Both ways: what is in the middle is on two ranks.
        const std::vector<std::vector<ModelPart>> meshes = {cuts[0], cuts[1], {cuts[1][1], cuts[1][0], cuts[1][1]}};
        for (const auto& parts : meshes) {
            std::filesystem::remove_all(folder.path);
            run_ranks(threads(static_cast<int>(parts.size())), [&](Comm& comm) {
                const ModelPart& part = parts[static_cast<size_t>(comm.rank)];
                PartWithMemory its(config, part);
                PipelineRanks ranks(comm, config, parts);
                Arena staging("staging");
                ranks.take_memory(staging), staging.reserve(), ranks.take_memory(staging);
                its.model.pipeline_ranks = &ranks;
                save_model(its.model, folder.path);
                comm.barrier(device().stream);
                cudaCheck(cudaStreamSynchronize(device().stream));
                // What another cut of them has saved, this one reads.
                init_weights(its.model, 99);
                load_weights(its.model, folder.path);
                for (const Param& param : its.model.params)
                    check(to_floats(param.value) == to_floats(whole.param(param.file_name()).value), param.name,
                          ": loaded with other values");
            });
            for (const char* file : {"/model.safetensors", "/config.json"})
                CHECK(read_text_file(folder.path + file) == read_text_file(whole_folder.path + file));
        }
    }
}

// Ranks send 2^18 numbers at a time, and a parameter is written 2^20 at a time.
TEST_CASE("a parameter that is longer than a message is whole on the first rank", "[model]") {
    Config config = small_llama();
    config.F = 35008;
    const int64_t n = config.F * config.C;
    REQUIRE(n > 1 << 20);
    std::vector<float> values(static_cast<size_t>(n));
    std::iota(values.begin(), values.end(), 1.0f);
    std::vector<ModelPart> parts(2, whole_model(config));
    parts[0].blocks = {0}, parts[0].head = false;
    parts[1].blocks = {1}, parts[1].embedding = false;
    run_ranks(threads(2), [&](Comm& comm) {
        const auto expect = [&](const std::vector<float>& here, const char* from) {
            check(comm.rank != 0 || here == values, from, ": other values");
        };
        DataParallel shards(comm, {.zero = 3});
        TensorParallel columns(comm, tensor_layout(TensorMode::one_d, comm.rank, 2, false, 0), config.K);
        PipelineRanks stages(comm, config, parts);
        Arena weights("weights"), grads("gradients"), masters("masters"), staging("staging");
        Model model;
        for (int pass = 0; pass < 2; ++pass) {
            model = build_model(config, {}, kT, weights, grads, masters, shards.sharding(1024), {}, ModelPart{{0}});
            shards.take_memory(model, 1, {}, staging);
            columns.take_memory({.N = 1, .C = 1, .dtype = DType::f32, .grad_dtype = DType::f32}, staging);
            stages.take_memory(staging);
            if (pass == 0)
                for (Arena* arena : {&weights, &grads, &masters, &staging}) arena->reserve();
        }
        for (const Param& param : model.params) {
            if (param.value.n() != n) continue;
            model.write(param, values);
            expect(shards.read(model, param), "ZeRO 3");
        }
        const int64_t half = config.F / 2;
        Param cut;
        cut.cut = {config.F, config.C, {{comm.rank * half, half}}, 0, config.C};
        expect(columns.collect(cut, cut_from(cut, values)), "--tp");
        expect(stages.bring(values, n, 1), "--pp");
    });
}

TEST_CASE("where the folder of a model cannot be made, what the other ranks send is received all the same", "[model]") {
    Config config = small_gpt2();
    config.L = 4;
    const TempFolder folder;
    spit(folder / "file", "");
    const std::vector<ModelPart> parts = cuts_of_four_blocks(config.tied)[0];
    std::string error;
    run_ranks(threads(static_cast<int>(parts.size())), [&](Comm& comm) {
        PartWithMemory its(config, parts[static_cast<size_t>(comm.rank)]);
        PipelineRanks ranks(comm, config, parts);
        Arena staging("staging");
        ranks.take_memory(staging), staging.reserve(), ranks.take_memory(staging);
        its.model.pipeline_ranks = &ranks;
        const std::string its_error = error_of([&] { save_model(its.model, folder / "file/model"); });
        if (comm.rank == 0) error = its_error;
        else check(its_error.empty(), its_error);
        gather_numbers(comm, {comm.rank});  // the next message is the next call's
    });
    CHECK(one_line_with(error, folder / "file/model", "cannot make the folder"));
}
