// test/test_full_size.cu: every operation on tensors as large as training has them, and larger: past 2^31 elements,
// where a 32-bit index breaks.
//
// The other tests hold small calls against float64. Here a large call is held against small ones:
//   - a row of a result depends on that row of the inputs alone, so the large call must give each row the bits that a
//     call on a few rows gives it (matrix products: up to the order of their sums, which cuBLASLt chooses by shape);
//   - a parameter's gradient is a sum over rows. If dout is zero but for a few rows, it is the sum over those.
// The rows are the first, the last, and those around element 2^31.
//
// With LLM_FULL_SIZE=1 (make gpu-check sets it on a GPU: about 20 GB of its memory) the sizes are those of GPT-2 and
// LLaMA, otherwise a few rows each, so that the test itself is tested.
#include "dev/fill.cuh"
#include "layers/layers.h"
#include "temp_folder.h"
#include "test.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>

namespace {

bool full_size() {
    const char* set = std::getenv("LLM_FULL_SIZE");
    return set && std::string(set) == "1";
}

// A device tensor with an allocation of its own.
class Large {
  public:
    Large(DType dtype, std::initializer_list<int64_t> dims) : tensor_(make_tensor(nullptr, dtype, dims)) {
        cudaCheck(cudaMalloc(&tensor_.data, tensor_.bytes()));
        cudaCheck(cudaMemset(tensor_.data, 0xff, tensor_.bytes()));  // NaN: what nobody writes shows
        cudaCheck(cudaDeviceSynchronize());                          // the device's stream does not wait for it
    }
    ~Large() { cudaFree(tensor_.data); }
    Large(const Large&) = delete;
    Large& operator=(const Large&) = delete;
    operator Tensor() const { return tensor_; }
    Tensor rows(int64_t first, int64_t count) const { return tensor_.slice(first, count); }

    Large& normal(uint64_t key) {
        const int blocks = narrow(ceil_div(ceil_div(tensor_.n(), 2), 256), "blocks");
        dispatch(tensor_.dtype, [&](auto zero) {
            using T = decltype(zero);
            fill_normal_kernel<T><<<blocks, 256>>>(tensor_.ptr<T>(), tensor_.n(), 1.0f, key);
        });
        cudaCheckLaunch();
        return *this;
    }
    Large& tokens(int64_t below, uint64_t key) {
        const int blocks = narrow(ceil_div(tensor_.n(), 256), "blocks");
        fill_tokens_kernel<<<blocks, 256>>>(tensor_.ptr<int32_t>(), tensor_.n(), static_cast<int>(below), 1, key);
        cudaCheckLaunch();
        return *this;
    }
    // Zero but for rows [first, first + count).
    Large& only(int64_t first, int64_t count) {
        const size_t row_bytes = tensor_.bytes() / static_cast<size_t>(tensor_.shape[0]),
                     end = static_cast<size_t>(first + count) * row_bytes;
        cudaCheck(cudaMemset(tensor_.data, 0, static_cast<size_t>(first) * row_bytes));
        cudaCheck(cudaMemset(static_cast<char*>(tensor_.data) + end, 0, tensor_.bytes() - end));
        return *this;
    }
    Large& zero() {
        cudaCheck(cudaMemset(tensor_.data, 0, tensor_.bytes()));
        return *this;
    }

  private:
    Tensor tensor_;
};

constexpr int64_t kCount = 3;  // rows of a small call

// The first of each few rows to look at; row_n: elements in a row of the largest tensor.
std::vector<int64_t> places(int64_t n_rows, int64_t row_n) {
    std::vector<int64_t> found = {0, n_rows - kCount};
    const int64_t crossing = (int64_t{1} << 31) / row_n;
    if (crossing > kCount && crossing + kCount < n_rows) found.push_back(crossing - 1);
    return found;
}

// Equal to the bit where error is 0; otherwise |a - b| <= error (the largest |b|).
void check_same(const Tensor& large, const Tensor& small, const std::string& what, double error = 0) {
    cudaCheck(cudaDeviceSynchronize());
    const std::vector<float> a = to_floats(large), b = to_floats(small);
    REQUIRE(a.size() == b.size());
    double largest = 0, worst = 0;
    bool finite = true;
    for (size_t i = 0; i < a.size(); ++i) {
        finite = finite && std::isfinite(a[i]) && std::isfinite(b[i]);
        largest = std::max(largest, std::abs(static_cast<double>(b[i])));
        worst = std::max(worst, std::abs(static_cast<double>(a[i]) - b[i]));
    }
    INFO(what << ": worst difference " << worst << ", largest value " << largest);
    CHECK(finite);
    CHECK(largest > 0);
    CHECK(worst <= error * largest);
}

// Two float32 sums of the same n numbers in another order, each rounded to 16 bits once: half a unit each,
// and as much again.
constexpr double kOtherOrder = 0x1p-7;
const DType kDType = DType::bf16;

}  // namespace

TEST_CASE("full size: layernorm", "[full_size]") {
    const int64_t C = full_size() ? 1600 : 40, N = full_size() ? 1350000 : 11;
    Large inp(kDType, {N, C}), w(kDType, {C}), b(kDType, {C}), out(kDType, {N, C}), mean(DType::f32, {N}),
        rstd(DType::f32, {N});
    inp.normal(1), w.normal(2), b.normal(3);
    Large small_out(kDType, {kCount, C}), small_mean(DType::f32, {kCount}), small_rstd(DType::f32, {kCount});
    layernorm_forward(out, {}, mean, rstd, inp, {}, w, b, 1e-5f, nullptr);
    for (const int64_t first : places(N, C)) {
        layernorm_forward(small_out, {}, small_mean, small_rstd, inp.rows(first, kCount), {}, w, b, 1e-5f, nullptr);
        check_same(out.rows(first, kCount), small_out, concat("out, row ", first));
        check_same(rstd.rows(first, kCount), small_rstd, concat("rstd, row ", first));
        check_same(mean.rows(first, kCount), small_mean, concat("mean, row ", first));
    }
    Large dout(kDType, {N, C}), dinp(kDType, {N, C}), dw(kDType, {C}), db(kDType, {C}),
        scratch(DType::f32, {layernorm_backward_scratch_n(N, C)});
    Large small_dinp(kDType, {kCount, C}), small_dw(kDType, {C}), small_db(kDType, {C}),
        small_scratch(DType::f32, {layernorm_backward_scratch_n(kCount, C)});
    for (const int64_t first : places(N, C)) {
        dout.normal(4).only(first, kCount), dw.zero(), db.zero(), small_dw.zero(), small_db.zero();
        layernorm_backward(dinp, dw, db, dout, {}, inp, w, mean, rstd, true, scratch, nullptr);
        layernorm_backward(small_dinp, small_dw, small_db, dout.rows(first, kCount), {}, inp.rows(first, kCount), w,
                           mean.rows(first, kCount), rstd.rows(first, kCount), true, small_scratch, nullptr);
        check_same(dinp.rows(first, kCount), small_dinp, concat("dinp, row ", first));
        check_same(dw, small_dw, concat("dweight, row ", first), kOtherOrder);
        check_same(db, small_db, concat("dbias, row ", first), kOtherOrder);
    }
}

TEST_CASE("full size: rmsnorm", "[full_size]") {
    const int64_t C = full_size() ? 2048 : 40, N = full_size() ? 1050000 : 11;
    Large inp(kDType, {N, C}), w(kDType, {C}), out(kDType, {N, C}), rstd(DType::f32, {N});
    inp.normal(1), w.normal(2);
    Large small_out(kDType, {kCount, C}), small_rstd(DType::f32, {kCount});
    rmsnorm_forward(out, {}, rstd, inp, {}, w, 1e-5f, nullptr);
    Large dout(kDType, {N, C}), dinp(kDType, {N, C}), dw(kDType, {C}),
        scratch(DType::f32, {rmsnorm_backward_scratch_n(N, C)});
    Large small_dinp(kDType, {kCount, C}), small_dw(kDType, {C}),
        small_scratch(DType::f32, {rmsnorm_backward_scratch_n(kCount, C)});
    for (const int64_t first : places(N, C)) {
        rmsnorm_forward(small_out, {}, small_rstd, inp.rows(first, kCount), {}, w, 1e-5f, nullptr);
        check_same(out.rows(first, kCount), small_out, concat("out, row ", first));
        dout.normal(4).only(first, kCount), dw.zero(), small_dw.zero();
        rmsnorm_backward(dinp, dw, dout, {}, inp, w, rstd, true, scratch, nullptr);
        rmsnorm_backward(small_dinp, small_dw, dout.rows(first, kCount), {}, inp.rows(first, kCount), w, small_rstd,
                         true, small_scratch, nullptr);
        check_same(dinp.rows(first, kCount), small_dinp, concat("dinp, row ", first));
        check_same(dw, small_dw, concat("dweight, row ", first), kOtherOrder);
    }
}

TEST_CASE("full size: gelu and swiglu", "[full_size]") {
    const int64_t F = full_size() ? 8192 : 24, N = full_size() ? 135000 : 11;
    Large inp(kDType, {N, 2 * F}), out(kDType, {N, F}), dout(kDType, {N, F}), dinp(kDType, {N, 2 * F});
    inp.normal(1), dout.normal(2);
    Large small_out(kDType, {kCount, F}), small_dinp(kDType, {kCount, 2 * F});
    swiglu_forward(out, inp, nullptr);
    swiglu_backward(dinp, dout, inp, nullptr);
    for (const int64_t first : places(N, 2 * F)) {
        swiglu_forward(small_out, inp.rows(first, kCount), nullptr);
        swiglu_backward(small_dinp, dout.rows(first, kCount), inp.rows(first, kCount), nullptr);
        check_same(out.rows(first, kCount), small_out, concat("swiglu out, row ", first));
        check_same(dinp.rows(first, kCount), small_dinp, concat("swiglu dinp, row ", first));
    }
    Large act(kDType, {N, 2 * F}), small_act(kDType, {kCount, 2 * F});
    gelu_forward(act, inp, nullptr);
    gelu_backward(dinp, act, inp, nullptr);
    for (const int64_t first : places(N, 2 * F)) {
        gelu_forward(small_act, inp.rows(first, kCount), nullptr);
        gelu_backward(small_dinp, act.rows(first, kCount), inp.rows(first, kCount), nullptr);
        check_same(act.rows(first, kCount), small_act, concat("gelu out, row ", first));
        check_same(dinp.rows(first, kCount), small_dinp, concat("gelu dinp, row ", first));
    }
}

TEST_CASE("full size: linear layers and column sums, at the sizes of the head", "[full_size]") {
    const int64_t C = full_size() ? 768 : 40, O = full_size() ? 50304 : 56, N = full_size() ? 43000 : 11;
    Large inp(kDType, {N, C}), w(kDType, {O, C}), b(kDType, {O}), out(kDType, {N, O}), dinp(kDType, {N, C});
    inp.normal(1), w.normal(2), b.normal(3);
    Large small_out(kDType, {kCount, O}), small_dinp(kDType, {kCount, C});
    linear_forward(out, inp, w, b, nullptr);
    for (const int64_t first : places(N, O)) {
        linear_forward(small_out, inp.rows(first, kCount), w, b, nullptr);
        check_same(out.rows(first, kCount), small_out, concat("out, row ", first), kOtherOrder);
    }
    Large dw(kDType, {O, C}), db(kDType, {O}), scratch(DType::f32, {linear_backward_scratch_n(N, O)});
    Large small_dw(kDType, {O, C}), small_db(kDType, {O}),
        small_scratch(DType::f32, {linear_backward_scratch_n(kCount, O)});
    for (const int64_t first : places(N, O)) {
        out.normal(4).only(first, kCount), dw.zero(), db.zero(), small_dw.zero(), small_db.zero();
        linear_backward_input(dinp, out, w, false, nullptr);
        linear_backward_weight(dw, db, out, inp, true, scratch, nullptr);
        linear_backward_input(small_dinp, out.rows(first, kCount), w, false, nullptr);
        linear_backward_weight(small_dw, small_db, out.rows(first, kCount), inp.rows(first, kCount), true,
                               small_scratch, nullptr);
        check_same(dinp.rows(first, kCount), small_dinp, concat("dinp, row ", first), kOtherOrder);
        check_same(dw, small_dw, concat("dweight, row ", first), kOtherOrder);
        check_same(db, small_db, concat("dbias, row ", first), kOtherOrder);
    }
}

TEST_CASE("full size: cross entropy", "[full_size]") {
    const int64_t V = full_size() ? 50257 : 37, Vp = round_up(V, 128), N = full_size() ? 43000 : 11;
    Large logits(kDType, {N, Vp}), targets(DType::i32, {N}), losses(DType::f32, {N});
    Large small_logits(kDType, {kCount, Vp}), small_losses(DType::f32, {kCount});
    logits.normal(1), targets.tokens(V, 2);
    const std::vector<int64_t> firsts = places(N, Vp);
    std::vector<std::unique_ptr<Large>> kept;  // the logits of those rows: the call writes over them
    for (const int64_t first : firsts) {
        kept.push_back(std::make_unique<Large>(kDType, std::initializer_list<int64_t>{kCount, Vp}));
        const Tensor copy = *kept.back(), from = logits.rows(first, kCount);
        cudaCheck(cudaMemcpy(copy.data, from.data, copy.bytes(), cudaMemcpyDeviceToDevice));
    }
    cross_entropy_forward_backward(losses, logits, targets, V, 0.5f, nullptr);
    for (size_t i = 0; i < firsts.size(); ++i) {
        cross_entropy_forward_backward(small_losses, *kept[i], targets.rows(firsts[i], kCount), V, 0.5f, nullptr);
        check_same(losses.rows(firsts[i], kCount), small_losses, concat("losses, row ", firsts[i]));
        check_same(logits.rows(firsts[i], kCount), *kept[i], concat("dlogits, row ", firsts[i]));
    }
}

TEST_CASE("full size: embedding", "[full_size]") {
    const int64_t V = full_size() ? 128256 : 50, C = full_size() ? 2048 : 40, T = full_size() ? 4096 : 5,
                  B = full_size() ? 257 : 5;
    Large tokens(DType::i32, {B, T}), wte(kDType, {V, C}), wpe(kDType, {T, C}), out(kDType, {B, T, C}),
        small_out(kDType, {kCount, T, C});
    tokens.tokens(V, 1), wte.normal(2), wpe.normal(3);
    embedding_forward(out, tokens, {}, wte, wpe, nullptr);
    for (const int64_t first : places(B, T * C)) {
        embedding_forward(small_out, tokens.rows(first, kCount), {}, wte, wpe, nullptr);
        check_same(out.rows(first, kCount), small_out, concat("out, sequence ", first));
    }
    Large dwte(kDType, {V, C}), dwpe(kDType, {T, C}),
        scratch(DType::i32, {embedding_backward_scratch_n(kDType, B * T, C)});
    Large small_dwte(kDType, {V, C}), small_dwpe(kDType, {T, C}),
        small_scratch(DType::i32, {embedding_backward_scratch_n(kDType, kCount * T, C)});
    for (const int64_t first : places(B, T * C)) {
        out.normal(4).only(first, kCount), dwte.zero(), dwpe.zero(), small_dwte.zero(), small_dwpe.zero();
        embedding_backward(dwte, dwpe, out, tokens, {}, true, true, scratch, nullptr);
        embedding_backward(small_dwte, small_dwpe, out.rows(first, kCount), tokens.rows(first, kCount), {}, true, true,
                           small_scratch, nullptr);
        check_same(dwte, small_dwte, concat("dwte, sequence ", first), kOtherOrder);
        check_same(dwpe, small_dwpe, concat("dwpe, sequence ", first), kOtherOrder);
    }
}

TEST_CASE("full size: rope and attention", "[full_size]") {
    const int64_t H = full_size() ? 32 : 4, K = full_size() ? 8 : 2, D = full_size() ? 64 : 8,
                  T = full_size() ? 4096 : 9, B = 5;
    const int64_t Q = (H + 2 * K) * D, few = 1;
    Large qkv(kDType, {B, T, Q}), table(DType::f32, {T, D}), out(kDType, {B, T, H * D}), dout(kDType, {B, T, H * D}),
        dqkv(kDType, {B, T, Q});
    Large before(kDType, {few, T, Q}), small_out(kDType, {few, T, H * D}), small_dqkv(kDType, {few, T, Q});
    rope_table(table, rope_frequencies(D, 500000.0, {}));
    // A sequence is a row here; the scores of 5 sequences of 4096 tokens and 32 heads are 2.7e9 numbers.
    const auto attend = [&](FlashTier tier, int64_t n, Tensor o, Tensor d_qkv, Tensor in, Tensor d_out) {
        const HeadColumns out_heads{o, H, D}, dout_heads{d_out, H, D};
        const QkvHeads h = qkv_heads(in, H, K), dh = qkv_heads(d_qkv, H, K);
        Large lse(DType::f32, {n, H, T}),
            scratch(DType::f32, {flash_attention_backward_scratch_n(n, T, H, K, D, D, kDType, tier)});
        const FlashAttentionOptions options{.scale = 1 / std::sqrt(static_cast<float>(D)), .tier = tier};
        flash_attention_forward(out_heads, lse, h.q, h.k, h.v, options, nullptr);
        flash_attention_backward(dh.q, dh.k, dh.v, dout_heads, out_heads, lse, h.q, h.k, h.v, options, scratch,
                                 nullptr);
        cudaCheck(cudaDeviceSynchronize());
    };
    for (const int64_t first : {int64_t{0}, B - 1}) {
        qkv.normal(1), dout.normal(2);
        const Tensor rows = qkv.rows(first, few);
        cudaCheck(cudaMemcpy(Tensor(before).data, rows.data, rows.bytes(), cudaMemcpyDeviceToDevice));
        rope_forward(qkv, {}, table, H, K, nullptr);
        rope_forward(before, {}, table, H, K, nullptr);
        check_same(rows, before, concat("rope, sequence ", first));
        for (const FlashTier tier : {FlashTier::mma, FlashTier::hopper}) {
            if (!error_of([&] { expect_flash_tier(tier, kDType); }).empty()) continue;  // not on this device
            attend(tier, B, out, dqkv, qkv, dout);
            attend(tier, few, small_out, small_dqkv, before, dout.rows(first, few));
            const std::string where = concat(", sequence ", first, ", tier ", static_cast<int>(tier));
            check_same(out.rows(first, few), small_out, "attention out" + where, kOtherOrder);
            check_same(dqkv.rows(first, few), small_dqkv, "attention dqkv" + where, kOtherOrder);
        }
    }
}
