// dev/bench_kernels.cu: times every operation of layers/ at the sizes of a model, and the two limits of this device.
//
//   run      make bench                                                   everything, against PyTorch (dev/bench.sh)
//            build/cuda/dev/bench_kernels --limits --dtype bf16
//            build/cuda/dev/bench_kernels --model gpt2 --batch 64 --seq 1024 --dtype bf16
//   debug    make DEBUG=1 DEVICE=cpu dev &&
//            gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/bench_kernels --batch 2 --seq 16
//
// Each line of the table operations() is one operation: its name, the bytes that it must move at least (each input read
// once, each output written once), the floating-point operations that it needs at least, and how to launch it. Then
//
//   limit = max(bytes / copy bandwidth, operations / matmul rate)          share of the limit = limit / time
//
// with both rates measured here, in the same process: a copy counts the bytes it reads and those it writes. Causal
// attention counts the half of the products that is needed. The time is the median over repeated launches,
// between CUDA events.
//
// All data is normal(0, 1), drawn on the device: matrix units need less power for zeros, so the clock is higher than
// with real data and the times are too short. Tensors should be a few times larger than the L2 cache (60 MB on an
// H200): then no launch finds data of the previous one in it.
//
// Output: tab-separated lines "kernel <operation> <pass> <shape> <seconds> <bytes> <operations>"; with --limits "limit
// <name> <rate>" and "device <name>".
#include "dev/fill.cuh"
#include "dev/program.h"
#include "layers/hopper_matmul.h"
#include "llm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <set>
#include <tuple>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Data

// The tensors of one operation. The code that takes them runs twice: first the arena only counts bytes, then it returns
// memory.
class Data {
  public:
    explicit Data(DType dtype) : dtype_(dtype) {}

    Tensor random(std::initializer_list<int64_t> dims, float scale = 1.0f) {
        const Tensor x = empty(dims);
        if (!x.data) return x;
        const int blocks = narrow(ceil_div(ceil_div(x.n(), 2), 256), "blocks");
        dispatch(x.dtype, [&](auto zero) {
            using T = decltype(zero);
            fill_normal_kernel<T><<<blocks, 256, 0, device().stream>>>(x.ptr<T>(), x.n(), scale, ++key_);
        });
        cudaCheckLaunch();
        return x;
    }
    // power: above 1 some ids are frequent (fill.cuh).
    Tensor tokens(std::initializer_list<int64_t> dims, int64_t below, int power = 1) {
        const Tensor x = arena.take("tokens", DType::i32, dims);
        if (!x.data) return x;
        const int blocks = narrow(ceil_div(x.n(), 256), "blocks");
        fill_tokens_kernel<<<blocks, 256, 0, device().stream>>>(x.ptr<int32_t>(), x.n(), static_cast<int>(below), power,
                                                                ++key_);
        cudaCheckLaunch();
        return x;
    }
    Tensor empty(std::initializer_list<int64_t> dims) { return arena.take("data", dtype_, dims); }
    Tensor floats(std::initializer_list<int64_t> dims) { return arena.take("floats", DType::f32, dims); }
    Tensor integers(std::initializer_list<int64_t> dims) { return arena.take("integers", DType::i32, dims); }
    bool counting() const { return arena.counting(); }

    Arena arena{"bench"};

  private:
    DType dtype_;
    uint64_t key_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// The operations

using Launch = std::function<void()>;
using Prepare = std::function<Launch(Data&)>;  // takes the tensors, and returns what is timed
struct Operation {
    std::string name, pass, shape;
    double bytes, flops;
    Prepare prepare;
};

// The operation with its product computed in each of the ways that this device has: ", cublaslt" in its name means the
// algorithm that cuBLASLt's heuristic names first, and ", parts" that kernels follow cuBLASLt's product.
void add_ways(std::vector<Operation>& table, const Operation& operation, const Product& product) {
    for (const std::string way : {"cublaslt", "hopper", "parts"}) {
        if (way == "hopper" && (device().is_cpu || !hopper_matmul_takes(product))) continue;
        Operation forced = operation;
        forced.name += ", " + way;
        const std::string choices = name_of(product) + ": " + way + "\n";
        forced.prepare = [choices, prepare = operation.prepare](Data& d) {
            const Launch launch = prepare(d);
            set_matmul_choices(choices);
            return launch;
        };
        table.push_back(forced);
    }
}

// Does this device have what f() is an Error without?
template <class F>
bool passes(F&& f) {
    try {
        return f(), true;
    } catch (const Error&) {
        return false;
    }
}

std::vector<Operation> operations(const Config& c, int64_t B, int64_t T, DType dtype) {
    check(c.attention == "gqa" && !c.qk_norm, "bench_kernels: models with MHA, MQA or GQA, such as llama-1b");
    const int64_t N = B * T, C = c.C, H = c.H, K = c.K, D = c.D, F = c.F, V = c.V, Vp = c.V_padded(),
                  Q = (H + 2 * K) * D;
    const bool gpt2 = c.family == Family::gpt2;
    const double e = static_cast<double>(dtype_bytes(dtype)), rows = static_cast<double>(N);
    const double x = rows * static_cast<double>(C) * e;  // bytes of one activation (N, C)
    const double f = rows * static_cast<double>(F) * e;  // of one (N, F)
    const double logits = rows * static_cast<double>(Vp) * e;
    const double heads = rows * static_cast<double>(Q + H * D) * e;  // q, k, v and the output of attention
    const double rotated = rows * static_cast<double>((H + K) * D) * e;
    const double pairs =
        static_cast<double>(B * H * D) * static_cast<double>(T) * static_cast<double>(T) / 2;  // causal half
    const double wte_rows = static_cast<double>(std::min(N, V) * C) * e;
    const cudaStream_t s = device().stream;
    const std::string nc = concat("N=", N, " C=", C), nf = concat("N=", N, " F=", F), nv = concat("N=", N, " V=", Vp),
                      attn = concat("B=", B, " T=", T, " H=", H, " K=", K, " D=", D);
    std::vector<Operation> table;

    // Linear layers: inp (N, I), weight (O, I).
    const auto linear = [&](const std::string& name, int64_t O, int64_t I, bool bias) {
        const std::string shape = concat("N=", N, " C=", I, " O=", O);
        const double n = rows, i = static_cast<double>(I), o = static_cast<double>(O);
        const double bytes = (n * i + n * o + o * i) * e, flops = 2 * n * i * o;
        table.push_back({name, "forward", shape, bytes, flops, [=](Data& d) -> Launch {
                             const Tensor out = d.empty({N, O}), inp = d.random({N, I}), w = d.random({O, I}, 0.02f),
                                          b = bias ? d.random({O}) : Tensor{};
                             return [=] { linear_forward(out, inp, w, b, s); };
                         }});
        table.push_back({name, "backward input", shape, bytes, flops, [=](Data& d) -> Launch {
                             const Tensor dinp = d.empty({N, I}), dout = d.random({N, O}), w = d.random({O, I}, 0.02f);
                             return [=] { linear_backward_input(dinp, dout, w, false, s); };
                         }});
        table.push_back({name, "backward weight", shape, bytes, flops, [=](Data& d) -> Launch {
                             const Tensor dw = d.random({O, I}), db = bias ? d.random({O}) : Tensor{},
                                          dout = d.random({N, O}), inp = d.random({N, I});
                             const Tensor scratch = d.floats({linear_backward_scratch_n(N, O)});
                             return [=] { linear_backward_weight(dw, db, dout, inp, true, scratch, s); };
                         }});
    };
    linear("linear qkv", Q, C, gpt2);
    linear("linear attn_out", C, H * D, gpt2);
    linear("linear up", (gpt2 ? F : 2 * F), C, gpt2);
    linear("linear down", C, F, gpt2);
    linear("linear head", Vp, C, false);

    // Products with what follows them in GPT-2's training, as the first micro-batch of a step has them.
    const auto product_of = [&](int64_t M, int64_t N_, int64_t K_, bool transpose_a, bool transpose_b,
                                Epilogue epilogue) {
        return Product{.M = M,
                       .N = N_,
                       .K = K_,
                       .batch_count = 1,
                       .a_dtype = dtype,
                       .b_dtype = dtype,
                       .out_dtype = dtype,
                       .transpose_a = transpose_a,
                       .transpose_b = transpose_b,
                       .epilogue = epilogue,
                       .a_scale_mode = MatmulScale::tensor,
                       .b_scale_mode = MatmulScale::tensor,
                       .device = device().index};
    };
    const std::string ncf = concat("N=", N, " C=", C, " F=", F);
    const double weight = static_cast<double>(F * C) * e;
    if (gpt2) {
        add_ways(table,
                 {"linear up gelu", "forward", ncf, x + 2 * f + weight, 2 * f / e * static_cast<double>(C),
                  [=](Data& d) -> Launch {
                      const Tensor out = d.empty({N, F}), before = d.empty({N, F}), inp = d.random({N, C}),
                                   w = d.random({F, C}, 0.02f), b = d.random({F});
                      return [=] { linear_gelu_forward(out, before, inp, w, b, s); };
                  }},
                 product_of(N, F, C, false, true, Epilogue::bias_gelu));
        add_ways(table,
                 {"linear down gelu derivative", "backward input", ncf, x + 2 * f + weight,
                  2 * f / e * static_cast<double>(C),
                  [=](Data& d) -> Launch {
                      const Tensor dbefore = d.empty({N, F}), dout = d.random({N, C}), w = d.random({C, F}, 0.02f),
                                   before = d.random({N, F});
                      return [=] { linear_gelu_backward_input(dbefore, dout, w, before, s); };
                  }},
                 product_of(N, F, C, false, false, Epilogue::gelu_derivative));
        for (const auto& [name, O, I] :
             std::vector<std::tuple<const char*, int64_t, int64_t>>{{"linear qkv and bias", Q, C},
                                                                    {"linear attn_out and bias", C, C},
                                                                    {"linear up and bias", F, C},
                                                                    {"linear down and bias", C, F}})
            add_ways(table,
                     {name, "backward weight", concat("N=", N, " C=", I, " O=", O),
                      (rows * static_cast<double>(O + I) + static_cast<double>(O * I)) * e,
                      2 * rows * static_cast<double>(O * I),
                      [=, O = O, I = I](Data& d) -> Launch {
                          const Tensor dw = d.empty({O, I}), db = d.empty({O}), dout = d.random({N, O}),
                                       inp = d.random({N, I}), scratch = d.floats({linear_backward_scratch_n(N, O)});
                          return [=] { linear_backward_weight(dw, db, dout, inp, false, scratch, s); };
                      }},
                     product_of(O, I, N, true, false, Epilogue::row_sums));
    }

    // The widest of a block's linear layers on 8-bit floats. Its limit is that of 16-bit products, so that its share of
    // the limit may be above 100 %.
    const int64_t O = (gpt2 ? F : 2 * F);
    for (const Fp8Recipe recipe : {Fp8Recipe::delayed, Fp8Recipe::current, Fp8Recipe::block}) {
        if (dtype == DType::f32 || !passes([&] { expect_fp8_device(recipe); })) continue;
        const std::string name = concat("linear up fp8 ", fp8_recipe_name(recipe)),
                          shape = concat("N=", N, " C=", C, " O=", O);
        const double n = rows, i = static_cast<double>(C), o = static_cast<double>(O);
        const double bytes = (n * i + n * o) * e + o * i, flops = 2 * n * i * o;
        const auto scratch_of = [=](Data& d) { return d.floats({fp8_linear_scratch_n(recipe, N, C, O)}); };
        table.push_back({name, "quantise weight", shape, o * i * (e + 2), 0, [=](Data& d) -> Launch {
                             const Fp8Weight w8 = take_fp8_weight(d.arena, recipe, O, C);
                             const Tensor w = d.random({O, C}, 0.02f);
                             return [=] { fp8_quantise_weight(w8, w, s); };
                         }});
        const auto ready = [=](Data& d) {  // a quantised weight, and the memory of its scaling
            const Fp8Weight w8 = take_fp8_weight(d.arena, recipe, O, C);
            const Tensor w = d.random({O, C}, 0.02f), state = d.floats({2, kFp8StateN}), saved = d.floats({2});
            if (!d.counting()) {
                fp8_quantise_weight(w8, w, s);
                cudaCheck(cudaMemsetAsync(state.data, 0, state.bytes(), s));
                fill_constant(saved, 4.0f);
            }
            return std::tuple(w8, state, saved);
        };
        table.push_back({name, "forward", shape, bytes, flops, [=](Data& d) -> Launch {
                             const auto [w8, state, saved] = ready(d);
                             const Tensor out = d.empty({N, O}), inp = d.random({N, C}), scratch = scratch_of(d);
                             return [=, w8 = w8, state = state, saved = saved] {
                                 fp8_linear_forward(out, saved, inp, w8, {}, state, true, scratch, s);
                             };
                         }});
        table.push_back({name, "backward input", shape, bytes, flops, [=](Data& d) -> Launch {
                             const auto [w8, state, saved] = ready(d);
                             const Tensor dinp = d.empty({N, C}), dout = d.random({N, O}), scratch = scratch_of(d);
                             return [=, w8 = w8, state = state, saved = saved] {
                                 fp8_linear_backward_input(dinp, saved, dout, w8, false, state, scratch, s);
                             };
                         }});
        table.push_back({name, "backward weight", shape, (n * i + n * o + o * i) * e, flops, [=](Data& d) -> Launch {
                             const auto [w8, state, saved] = ready(d);
                             const Tensor dw = d.random({O, C}), dout = d.random({N, O}), inp = d.random({N, C}),
                                          scratch = scratch_of(d);
                             return [=, saved = saved] {
                                 fp8_linear_backward_weight(dw, {}, dout, inp, saved, recipe, true, scratch, s);
                             };
                         }});
    }

    // Attention as the model uses it, and with each of the tiers for 16 bits that this device has.
    for (const auto& [name, tier] :
         std::vector<std::pair<const char*, FlashTier>>{{"attention", FlashTier::automatic},
                                                        {"attention mma", FlashTier::mma},
                                                        {"attention hopper", FlashTier::hopper}}) {
        if (!passes([&, tier = tier] { expect_flash_tier(tier, dtype); })) continue;
        const FlashAttentionOptions attention{.scale = 1 / std::sqrt(static_cast<float>(D)), .tier = tier};
        table.push_back({name, "forward", attn, heads, 4 * pairs, [=](Data& d) -> Launch {
                             const HeadColumns out{d.empty({B, T, H * D}), H, D};
                             const QkvHeads h = qkv_heads(d.random({B, T, Q}), H, K);
                             const Tensor lse = d.floats({B, H, T});
                             return [=] { flash_attention_forward(out, lse, h.q, h.k, h.v, attention, s); };
                         }});
        table.push_back(
            {name, "backward", attn, 2 * heads, 10 * pairs, [=](Data& d) -> Launch {
                 const HeadColumns out{d.empty({B, T, H * D}), H, D}, dout{d.random({B, T, H * D}), H, D};
                 const QkvHeads h = qkv_heads(d.random({B, T, Q}), H, K), dh = qkv_heads(d.empty({B, T, Q}), H, K);
                 const int64_t scratch_n = flash_attention_backward_scratch_n(B, T, H, K, D, D, dtype, attention.tier);
                 const Tensor lse = d.floats({B, H, T}), scratch = d.floats({scratch_n});
                 if (!d.counting())
                     flash_attention_forward(out, lse, h.q, h.k, h.v, attention, s);  // what the backward reads of it
                 return [=] {
                     flash_attention_backward(dh.q, dh.k, dh.v, dout, out, lse, h.q, h.k, h.v, attention, scratch, s);
                 };
             }});
    }

    if (gpt2) {
        table.push_back(
            {"layernorm", "forward", nc, 4 * x, 0, [=](Data& d) -> Launch {
                 const Tensor out = d.empty({N, C}), sum = d.empty({N, C}), mean = d.floats({N}), rstd = d.floats({N});
                 const Tensor inp = d.random({N, C}), branch = d.random({N, C}), w = d.random({C}), b = d.random({C});
                 return [=] { layernorm_forward(out, sum, mean, rstd, inp, branch, w, b, 1e-5f, s); };
             }});
        table.push_back(
            {"layernorm", "backward", nc, 4 * x, 0, [=](Data& d) -> Launch {
                 const Tensor out = d.empty({N, C}), mean = d.floats({N}), rstd = d.floats({N}), inp = d.random({N, C});
                 const Tensor w = d.random({C}), b = d.random({C}), dw = d.random({C}), db = d.random({C});
                 const Tensor dinp = d.empty({N, C}), dout = d.random({N, C}), dsum = d.random({N, C});
                 const Tensor scratch = d.floats({layernorm_backward_scratch_n(N, C)});
                 if (!d.counting()) layernorm_forward(out, {}, mean, rstd, inp, {}, w, b, 1e-5f, s);
                 return [=] { layernorm_backward(dinp, dw, db, dout, dsum, inp, w, mean, rstd, true, scratch, s); };
             }});
        table.push_back({"gelu", "forward", nf, 2 * f, 0, [=](Data& d) -> Launch {
                             const Tensor out = d.empty({N, F}), inp = d.random({N, F});
                             return [=] { gelu_forward(out, inp, s); };
                         }});
        table.push_back({"gelu", "backward", nf, 3 * f, 0, [=](Data& d) -> Launch {
                             const Tensor dinp = d.empty({N, F}), dout = d.random({N, F}), inp = d.random({N, F});
                             return [=] { gelu_backward(dinp, dout, inp, s); };
                         }});
        table.push_back({"column sum", "backward", nf, f, 0, [=](Data& d) -> Launch {
                             const Tensor db = d.random({F}), dout = d.random({N, F}),
                                          scratch = d.floats({column_sum_scratch_n(N, F)});
                             return [=] { column_sum(db, dout, true, scratch, s); };
                         }});
    } else {
        table.push_back({"rmsnorm", "forward", nc, 4 * x, 0, [=](Data& d) -> Launch {
                             const Tensor out = d.empty({N, C}), sum = d.empty({N, C}), rstd = d.floats({N});
                             const Tensor inp = d.random({N, C}), branch = d.random({N, C}), w = d.random({C});
                             return [=] { rmsnorm_forward(out, sum, rstd, inp, branch, w, 1e-5f, s); };
                         }});
        table.push_back({"rmsnorm", "backward", nc, 4 * x, 0, [=](Data& d) -> Launch {
                             const Tensor out = d.empty({N, C}), rstd = d.floats({N}), inp = d.random({N, C}),
                                          w = d.random({C}), dw = d.random({C});
                             const Tensor dinp = d.empty({N, C}), dout = d.random({N, C}), dsum = d.random({N, C});
                             const Tensor scratch = d.floats({rmsnorm_backward_scratch_n(N, C)});
                             if (!d.counting()) rmsnorm_forward(out, {}, rstd, inp, {}, w, 1e-5f, s);
                             return [=] { rmsnorm_backward(dinp, dw, dout, dsum, inp, w, rstd, true, scratch, s); };
                         }});
        table.push_back({"swiglu", "forward", nf, 3 * f, 0, [=](Data& d) -> Launch {
                             const Tensor out = d.empty({N, F}), inp = d.random({N, 2 * F});
                             return [=] { swiglu_forward(out, inp, s); };
                         }});
        table.push_back(
            {"swiglu", "backward", nf, 5 * f, 0, [=](Data& d) -> Launch {
                 const Tensor dinp = d.empty({N, 2 * F}), dout = d.random({N, F}), inp = d.random({N, 2 * F});
                 return [=] { swiglu_backward(dinp, dout, inp, s); };
             }});
        for (const bool forward : {true, false})
            table.push_back({"rope", forward ? "forward" : "backward", attn, 2 * rotated, 0, [=](Data& d) -> Launch {
                                 const Tensor qkv = d.random({B, T, Q}), angles = d.floats({T, D});
                                 if (!d.counting())
                                     rope_table(angles, rope_frequencies(D, c.rope_base, c.rope_scaling));
                                 return [=] {
                                     forward ? rope_forward(qkv, {}, angles, H, K, s)
                                             : rope_backward(qkv, {}, angles, H, K, s);
                                 };
                             }});
    }
    table.push_back({"embedding", "forward", nc, 2 * x, 0, [=](Data& d) -> Launch {
                         const Tensor out = d.empty({B, T, C}), tokens = d.tokens({B, T}, V), wte = d.random({Vp, C}),
                                      wpe = gpt2 ? d.random({T, C}) : Tensor{};
                         return [=] { embedding_forward(out, tokens, {}, wte, wpe, s); };
                     }});
    // Ids of equal frequency, and ids distributed like those of words. The time must grow linearly with the number of
    // tokens.
    for (const auto& [name, power] :
         std::vector<std::pair<const char*, int>>{{"embedding", 1}, {"embedding, skewed ids", 4}})
        table.push_back({name, "backward", nc, x + 2 * wte_rows, 0, [=, power = power](Data& d) -> Launch {
                             const Tensor dout = d.random({B, T, C}), tokens = d.tokens({B, T}, V, power),
                                          scratch = d.integers({embedding_backward_scratch_n(dtype, N, C)});
                             const Tensor dwte = d.random({Vp, C}), dwpe = gpt2 ? d.random({T, C}) : Tensor{};
                             return [=] { embedding_backward(dwte, dwpe, dout, tokens, {}, true, true, scratch, s); };
                         }});
    table.push_back({"cross entropy", "forward", nv, logits, 0, [=](Data& d) -> Launch {
                         const Tensor losses = d.floats({N}), scores = d.random({N, Vp}), targets = d.tokens({N}, V);
                         return [=] { cross_entropy_forward(losses, scores, targets, V, s); };
                     }});
    table.push_back({"cross entropy", "forward+backward", nv, 2 * logits, 0, [=](Data& d) -> Launch {
                         const Tensor losses = d.floats({N}), scores = d.random({N, Vp}), targets = d.tokens({N}, V);
                         return [=] {
                             cross_entropy_forward_backward(losses, scores, targets, V, 1 / static_cast<float>(N), s);
                         };
                     }});
    return table;
}

// The operations whose name contains `only`; Error if there are none.
std::vector<Operation> chosen(std::vector<Operation> table, const std::string& only) {
    std::set<std::string> names;
    for (const Operation& operation : table) names.insert(operation.name);
    std::erase_if(table, [&](const Operation& operation) { return operation.name.find(only) == std::string::npos; });
    if (!table.empty()) return table;
    std::string choices;
    for (const std::string& name : names) choices += concat(choices.empty() ? "'" : ", '", name, "'");
    fail("--only '", only, "': no operation of this model has that in its name; they are ", choices);
}

// ---------------------------------------------------------------------------------------------------------------------
// Timing

// Seconds of one launch. All repeats are queued before the host waits, so that the device is never idle; the events are
// recorded directly before and after the work.
double seconds_of(const Launch& launch, double budget_s, int max_repeats) {
    const cudaStream_t stream = device().stream;
    std::vector<double> times;
    const auto time_launches = [&](int n) {
        std::vector<cudaEvent_t> events(static_cast<size_t>(2 * n));
        for (cudaEvent_t& event : events) cudaCheck(cudaEventCreate(&event));
        for (int i = 0; i < n; ++i) {
            cudaCheck(cudaEventRecord(events[static_cast<size_t>(2 * i)], stream));
            launch();
            cudaCheck(cudaEventRecord(events[static_cast<size_t>(2 * i + 1)], stream));
        }
        cudaCheck(cudaStreamSynchronize(stream));
        times.clear();
        for (int i = 0; i < n; ++i) {
            float ms = 0;
            cudaCheck(
                cudaEventElapsedTime(&ms, events[static_cast<size_t>(2 * i)], events[static_cast<size_t>(2 * i + 1)]));
            times.push_back(1e-3 * ms);
        }
        for (const cudaEvent_t event : events) cudaCheck(cudaEventDestroy(event));
    };
    time_launches(3);  // warm-up: cuBLASLt's choice of an algorithm, clocks, page faults
    const double first = *std::min_element(times.begin(), times.end());
    time_launches(std::clamp(static_cast<int>(budget_s / std::max(first, 1e-7)), 3, max_repeats));
    return median(times);
}

double time_operation(const Prepare& prepare, DType dtype, double budget_s, int max_repeats) {
    Data data(dtype);
    set_matmul_choices("");
    prepare(data);
    data.arena.reserve();
    return seconds_of(prepare(data), budget_s, max_repeats);
}

void print_limits(DType dtype, double budget_s, int max_repeats) {
    const bool cpu = device().is_cpu;
    const int64_t copy_n = cpu ? 1 << 22 : int64_t{1} << 30, n = cpu ? 256 : 8192;  // GPU: 4 GiB from here to there
    const auto copy = [=](Data& d) -> Launch {
        const Tensor from = d.floats({copy_n}), to = d.floats({copy_n});
        if (!d.counting()) cudaCheck(cudaMemsetAsync(from.data, 1, from.bytes(), device().stream));
        return [=] {
            cudaCheck(cudaMemcpyAsync(to.data, from.data, from.bytes(), cudaMemcpyDeviceToDevice, device().stream));
        };
    };
    const auto product = [=](Data& d) -> Launch {
        const Tensor out = d.empty({n, n}), a = d.random({n, n}), b = d.random({n, n});
        return [=] { matmul(out, a, b, {.transpose_b = true}, device().stream); };
    };
    const double size = static_cast<double>(n);
    std::printf("limit\tcopy\t%.6g\n",
                2 * 4 * static_cast<double>(copy_n) / time_operation(copy, dtype, budget_s, max_repeats));
    std::printf("limit\tmatmul %s\t%.6g\n", dtype_name(dtype),
                2 * size * size * size / time_operation(product, dtype, budget_s, max_repeats));
    std::printf("device\t%s\n", device().name.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    std::string model = "tiny", dtype_text = "fp32", only;
    int64_t B = 4, T = 64;
    double budget_s = 0.2;
    int max_repeats = 50;
    bool limits = false;
    CommandLine line{"bench_kernels: times every operation of layers/ at the sizes of a model"};
    Heading h{line, "Options"};
    h.option("--model", model, "a preset of train_gpt, or a config.json");
    h.count("--batch", B, "sequences");
    h.count("--seq", T, "tokens per sequence");
    h.option("--dtype", dtype_text, "fp32, bf16 or fp16");
    h.option("--only", only, "only operations whose name contains this");
    h.option("--budget", budget_s, "seconds to repeat an operation for, after the warm-up");
    h.option("--repeats", max_repeats, "at most this many launches");
    h.flag("--limits", limits, "measure the copy bandwidth and the matmul rate instead");
    return run_program("bench_kernels", line, argc, argv, [&] {
        const DType dtype = dtype_from_name(dtype_text);
        check(max_repeats >= 3, "--repeats ", max_repeats, ": it must be at least 3");
        if (limits) return print_limits(dtype, budget_s, max_repeats);
        for (const Operation& operation : chosen(operations(load_config(model), B, T, dtype), only)) {
            const double seconds = time_operation(operation.prepare, dtype, budget_s, max_repeats);
            std::printf("kernel\t%s\t%s\t%s\t%.6g\t%.6g\t%.6g\n", operation.name.c_str(), operation.pass.c_str(),
                        operation.shape.c_str(), seconds, operation.bytes, operation.flops);
            std::fflush(stdout);
        }
    });
}
