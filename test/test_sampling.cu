// test/test_sampling.cu: tokens drawn from logits, against float64 loops that sort and add up.
#include "inference/inference.h"
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace {

// A Sampler and its memory.
struct TestSampler {
    Arena device_memory{"test", MemoryKind::device}, pinned{"test", MemoryKind::pinned};
    Sampler sampler;
    TestSampler(int64_t max_rows, int64_t V) {
        sampler.take_memory(max_rows, V, device_memory, pinned);
        device_memory.reserve(), pinned.reserve();
        sampler.take_memory(max_rows, V, device_memory, pinned);
    }
    std::vector<Sampled> draw(Tensor logits, const std::vector<SamplingRow>& rows) {
        return sampler.draw(logits, rows, device().stream);
    }
};

}  // namespace

TEST_CASE("sampling: greedy is the first of the largest logits, in every dtype, and never the padding", "[sampling]") {
    for (DType dtype : kFloatDTypes)
        for (int64_t V : {1, 53, 50257}) {
            const int64_t Vp = V + 15;
            auto x = rounded(random_values(3 * Vp, 3, 2.0), dtype);
            std::vector<int32_t> expected;
            for (int64_t row = 0; row < 3; ++row) {
                const auto first = x.begin() + row * Vp;
                std::fill(first + V, first + Vp, 60000.0);
                expected.push_back(static_cast<int32_t>(std::max_element(first, first + V) - first));
                if (row == 1) *(first + V - 1) = *(first + expected[1]);  // a second one, later
            }
            Buffer logits(dtype, {3, Vp}, x);
            const auto before = logits.bits();
            SamplingOptions greedy;
            greedy.temperature = 0;
            TestSampler test(3, V);
            const auto sampled = test.draw(logits, {{&greedy}, {&greedy}, {&greedy}});
            for (size_t row = 0; row < 3; ++row) CHECK(sampled[row].token == expected[row]);
            CHECK(logits.bits() == before);
        }
}
