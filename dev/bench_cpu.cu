// dev/bench_cpu.cu: one training step of GPT-2 124M in float32, batch 4 x 64, as llm.c's CPU program runs it.
//
//   run      make bench-cpu                          tokens/s, the share of the matmul limit, memory against the plan
//            build/cpu/dev/bench_cpu --steps 20      another number of timed steps
//            make bench-cpu LLM_PYTHON=python3 LLMC=llm.c      alternating with PyTorch and llm.c (dev/bench_cpu.py)
//   debug    make DEBUG=1 DEVICE=cpu dev && gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/bench_cpu --steps 1
//
// The matmul limit is the time that the step's matrix products take alone, one after the other, on the same machine.
#include "io/io.h"
#include "llm.h"
#include "optim/optim.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int64_t B = 4, T = 64, N = B * T;

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// The products of one linear layer: forward, gradient by input, gradient by weight.
void linear_products(Tensor out, Tensor inp, Tensor weight, cudaStream_t stream) {
    matmul(out, inp, weight, {.transpose_b = true}, stream);
    matmul(inp, out, weight, {}, stream);
    matmul(weight, out, inp, {.transpose_a = true}, stream);
}

// The products of all linear layers of a step, on tensors of the same sizes, and in the same places, as the model's.
void all_products(const Model& model, const Activations& acts, const Workspace& workspace, cudaStream_t stream) {
    for (size_t l = 0; l < model.blocks.size(); ++l) {
        const auto &attention = model.blocks[l].attention.linears, &feed_forward = model.blocks[l].feed_forward.linears;
        const BlockSaved& saved = acts.blocks[l];
        // What each product reads or writes: model/attention_gqa.cu, model/feed_forward_gelu.cu.
        const Tensor qkv = saved.attention[0], heads = saved.attention[2];
        const Tensor up = saved.feed_forward[0], act = saved.feed_forward[1];
        linear_products(qkv, saved.norm1.out, attention[0].dweight, stream);
        linear_products(workspace.branch, heads, attention[1].dweight, stream);
        linear_products(up, saved.norm2.out, feed_forward[0].dweight, stream);
        linear_products(workspace.branch, act, feed_forward[1].dweight, stream);
    }
    linear_products(acts.logits, acts.final_norm.out, model.head.dweight, stream);
}

void bench(const std::string& model_name, int steps) {
    const Config config = load_config(model_name);
    const cudaStream_t stream = device().stream;
    Arena weights("weights"), grads("gradients"), masters("master weights"), states("optimizer states"),
        activations("activations");
    Model model;
    Activations acts;
    Workspace workspace;
    std::unique_ptr<Optimizer> adamw;
    Tensor norm, norm_scratch;
    double plan_bytes = 0;
    for (int pass = 0; pass < 2; ++pass) {
        model = build_model(config, {}, T, weights, grads, masters);
        adamw = make_optimizer("adamw", states, model.params, model.weights.n(), {});
        acts = take_activations(model, B, T, {}, activations);
        workspace = take_workspace(model, B, T, true, activations);
        norm = activations.take("norm", DType::f32, {2});
        norm_scratch = activations.take("norm", DType::f32, {grad_norm_scratch_n(model.grads.n())});
        if (pass == 1) break;
        for (Arena* arena : {&weights, &grads, &states, &activations}) {
            plan_bytes += static_cast<double>(arena->bytes());
            arena->reserve();
        }
    }
    adamw->init(stream);
    init_weights(model, 1);
    std::vector<int32_t> tokens(static_cast<size_t>(N)), targets(static_cast<size_t>(N));
    for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = static_cast<int32_t>(uniform_below(1, 1, i, static_cast<uint64_t>(config.V)));
        targets[i] = static_cast<int32_t>(uniform_below(1, 2, i, static_cast<uint64_t>(config.V)));
    }
    copy_to_device(acts.tokens, tokens.data());
    copy_to_device(acts.targets, targets.data());

    workspace.accumulate = false;  // a step has one micro-batch
    std::vector<double> times, product_times;
    for (int step = 0; step <= steps; ++step) {  // the first one warms up
        const double start = seconds_now();
        forward(model, acts, workspace, stream);
        loss_backward(model, acts, 1.0f / static_cast<float>(N), stream);
        backward(model, acts, workspace, stream);
        grad_norm(norm, model.grads, 1.0f, 1.0f, norm_scratch, stream);
        adamw->step(model.all_weights(1), model.grads, norm, 1e-4, step + 1, stream);
        cudaCheck(cudaStreamSynchronize(stream));
        if (step > 0) times.push_back(seconds_now() - start);
    }
    struct rusage usage {};
    getrusage(RUSAGE_SELF, &usage);
    const double peak_bytes = static_cast<double>(usage.ru_maxrss) * 1024;
    for (int step = 0; step <= steps; ++step) {
        const double start = seconds_now();
        all_products(model, acts, workspace, stream);
        cudaCheck(cudaStreamSynchronize(stream));
        if (step > 0) product_times.push_back(seconds_now() - start);
    }
    const double step_s = median(times), products_s = median(product_times);
    std::printf("%s, %s parameters, float32, batch %lld x %lld, on %s\n", model_name.c_str(),
                human_count(static_cast<double>(parameter_count(config))).c_str(), static_cast<long long>(B),
                static_cast<long long>(T), device().name.c_str());
    std::printf("step                 %7.3f s   (median of %d)\n", step_s, steps);
    std::printf("its matmuls alone    %7.3f s   share of the matmul limit: %.0f %%\n", products_s,
                100 * products_s / step_s);
    std::printf("tokens/s             %7.0f\n", static_cast<double>(N) / step_s);
    std::printf("GFLOP/s              %7.0f\n", flops_per_token(config, T) * static_cast<double>(N) / step_s / 1e9);
    std::printf("peak memory          %7.0f MiB, plan %.0f MiB (%+.1f %%)\n", peak_bytes / (1 << 20),
                plan_bytes / (1 << 20), 100 * (peak_bytes / plan_bytes - 1));
}

}  // namespace

int main(int argc, char** argv) {
    try {
        int steps = 10;
        std::string model = "gpt2";
        for (int i = 1; i < argc; i += 2) {
            const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
            check(!value.empty() && (flag == "--steps" || flag == "--model"), flag,
                  ": give --steps N (timed steps) or --model NAME (a GPT-2: a preset or a config.json)");
            if (flag == "--model") model = value;
            else steps = std::max(1, std::atoi(value.c_str()));
        }
        bench(model, steps);
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_cpu: %s\n", error.what());
        return 2;
    }
}
