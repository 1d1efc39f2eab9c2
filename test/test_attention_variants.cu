// test/test_attention_variants.cu: what whole models promise of their attention: GQA, MLA and MFA, on every tier, over
// documents, with a cache of latents. (That they equal PyTorch's and transformers': test_model.cu.)
#include "model/sublayer.h"
#include "models.h"
#include "temp_folder.h"

// Documents side by side in a row, and each alone: at the beginning of a row that is not masked (what stands behind it
// there no token of it can see), and on the CPU device also as a batch of its own, as long as it is. In float32 the
// losses agree to the bit: a token's row of a matrix product is the same bits at every place and in any batch
// (cpu/sgemm.h; a GPU's library promises it for products of one shape), and so are the other layers. Gradients differ
// in the order in which documents add up. In 16 bits attention works in tiles that a document's place shifts.
TEST_CASE("documents packed in a row give the losses that they have apart", "[model][documents][shapes]") {
    const int64_t B = 2, T = 192;
    const std::vector<std::vector<int64_t>> lengths = {{37, 11, 1, 47, 95, 1}, {13, 24, 1, 9, 145}};
    for (Config config : {small_llama(), small_gpt2(), small_mla(16), small_mfa()}) {
        config.T_max = T, config.L = 3;
        const std::vector<int32_t> tokens = random_tokens(B * T, config.V, 1),
                                   targets = random_tokens(B * T, config.V, 2);
        std::vector<int32_t> spans, positions;
        std::vector<std::pair<int64_t, int64_t>> documents;  // first token in the batch, length
        for (const std::vector<int64_t>& row : lengths) {
            int32_t first = 0;
            for (const int64_t n : row) {
                documents.push_back({static_cast<int64_t>(positions.size()), n});
                for (int32_t t = 0; t < n; ++t) {
                    spans.insert(spans.end(), {first, first + static_cast<int32_t>(n)});
                    positions.push_back(t);
                }
                first += static_cast<int32_t>(n);
            }
        }
        REQUIRE(positions.size() == tokens.size());
        const auto run = [](TinyTrainer& m) {
            m.compute_gradients(1.0f / static_cast<float>(m.acts.B * m.acts.T));
            return to_floats(m.acts.losses);
        };
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
            for (const std::string recompute : {"none", "2", "selective"}) {
                if (dtype != DType::f32 && recompute != "2") continue;
                INFO("family " << static_cast<int>(config.family) << ", attention " << config.attention << ", "
                               << dtype_name(dtype) << ", --recompute " << recompute);
                const Precision precision{dtype, DType::f32, dtype != DType::f32};
                TinyTrainer packed(config, B, T, precision, parse_recompute(recompute), "adamw", true);
                TinyTrainer alone(config, B, T, precision, parse_recompute(recompute));
                init_weights(packed.model, 9);
                init_weights(alone.model, 9);
                copy_to_device(packed.acts.documents, spans.data());
                copy_to_device(packed.acts.positions, positions.data());
                packed.set_batch(tokens, targets);
                packed.zero_grads();
                const std::vector<float> together = run(packed);
                std::vector<float> apart(together.size());
                alone.zero_grads();  // and then the documents' gradients add up
                // One in each row.
                for (size_t d = 0; d < documents.size(); d += B) {
                    std::vector<int32_t> rows(tokens.size(), 1), row_targets(targets.size(), -1);
                    const size_t end = std::min<size_t>(d + B, documents.size());
                    for (size_t i = d; i < end; ++i) {
                        const auto& [first, n] = documents[i];
                        const int64_t at = static_cast<int64_t>(i - d) * T;
                        std::copy_n(tokens.begin() + first, n, rows.begin() + at);
                        std::copy_n(targets.begin() + first, n, row_targets.begin() + at);
                    }
                    alone.set_batch(rows, row_targets);
                    const std::vector<float> losses = run(alone);
                    for (size_t i = d; i < end; ++i)
                        std::copy_n(losses.begin() + static_cast<int64_t>(i - d) * T, documents[i].second,
                                    apart.begin() + documents[i].first);
                }
                // In 16 bits the roundings of two models (models.h). In float32 the losses are equal, and the gradients
                // are sums over 384 tokens in two orders, at each of the roundings that model_error counts.
                const double error = (dtype == DType::f32 ? 2 * std::sqrt(384.0) : 1.0) * model_error(dtype);
                CHECK(largest_difference(together, apart) <= error * largest(apart));
                if (dtype == DType::f32) CHECK((together == apart));
#ifdef CUDA_ON_CPU
                for (const auto& [first, n] : documents) {
                    if (dtype != DType::f32 || recompute != "none") break;
                    TinyTrainer own(config, 1, n, precision);
                    init_weights(own.model, 9);
                    own.set_batch({tokens.begin() + first, tokens.begin() + first + n},
                                  {targets.begin() + first, targets.begin() + first + n});
                    own.zero_grads();
                    CHECK((run(own) == std::vector<float>(together.begin() + first, together.begin() + first + n)));
                }
#endif
                const std::vector<float> grads = to_floats(alone.model.grads),
                                         packed_grads = to_floats(packed.model.grads);
                CHECK(norm_of_difference(packed_grads, grads) <= error * norm_of(grads));

                // At any place and in any precision: other neighbours change no bit.
                const auto& [first, n] = documents[9];
                REQUIRE(n == 9);
                std::vector<int32_t> others = random_tokens(B * T, config.V, 3);
                std::copy_n(tokens.begin() + first, n, others.begin() + first);
                packed.set_batch(others, targets);
                const std::vector<float> among_others = run(packed);
                CHECK(std::equal(together.begin() + first, together.begin() + first + n, among_others.begin() + first));
                CHECK(among_others != together);
            }
    }
}

// The tiers differ in the order of their sums only, and with it in which numbers are rounded up and which down. A
// number differs by about half of bf16's unit roundoff, 2^-9 of itself, with either sign; the loss is a mean over 150
// tokens, in which such differences become sqrt(150) = 12 times smaller: 2^-12.6. The test allows 2^-13, because a
// token's loss, ln 53 at these weights, depends but weakly on the numbers that differ.
TEST_CASE("a bf16 model trains alike on every tier of attention", "[model][precision][hopper]") {
    Config config = small_llama();
    config.L = 1, config.T_max = 150;  // two blocks of hopper's, and three tiles of mma's keys
    const int64_t B = 1, T = config.T_max;
    const std::vector<int32_t> tokens = random_tokens(B * T, config.V, 1), targets = random_tokens(B * T, config.V, 2);
    const auto losses = [&](FlashTier tier) {
        TinyTrainer m(config, B, T, {DType::bf16, DType::f32, true}, {}, "adamw", false, tier);
        init_weights(m.model, 3);
        m.set_batch(tokens, targets);
        std::vector<double> all;
        for (int64_t t = 1; t <= 3; ++t) all.push_back(m.train_step(1.0f / static_cast<float>(B * T), 1e-3, t));
        return all;
    };
    const std::vector<double> mma = losses(FlashTier::mma);
    CHECK(mma.back() < 0.995 * mma.front());
    for (FlashTier tier : {FlashTier::hopper, FlashTier::cuda_cores}) {
        if (!error_of([&] { expect_flash_tier(tier, DType::bf16); }).empty()) continue;  // not on this device
        const std::vector<double> other = losses(tier);
        for (size_t i = 0; i < mma.size(); ++i) {
            INFO("step " << i << ", tier " << static_cast<int>(tier) << ": " << other[i] << ", mma " << mma[i]);
            CHECK(std::abs(other[i] - mma[i]) <= 0x1p-13 * mma[i]);
        }
    }
}

TEST_CASE("every optimizer learns a batch by heart with every attention", "[model]") {
    for (const Config& config : {small_qwen3(), small_mla(16), small_mfa()})
        for (const std::string& name : optimizer_names()) {
            INFO(name << ", attention " << config.attention);
            TinyTrainer m(config, 2, 13, {}, {}, name);
            init_weights(m.model, 4);
            m.set_batch(random_tokens(26, config.V, 1), random_tokens(26, config.V, 2));
            const double first = m.train_step(1.0f / 26, default_learning_rate(name), 1);
            double last = first;
            for (int64_t t = 2; t <= 8; ++t) last = m.train_step(1.0f / 26, default_learning_rate(name), t);
            CHECK(last < first - 0.005);
        }
}
