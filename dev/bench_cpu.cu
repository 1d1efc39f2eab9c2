// dev/bench_cpu.cu: one training step of GPT-2 124M, batch 4 x 64, as llm.c's CPU program runs it; or of another model.
//
//   run      make bench-cpu                          tokens/s, the share of the matmul limit, memory against the plan
//            build/cpu/dev/bench_cpu --steps 20      another number of timed steps
//            build/cpu/dev/bench_cpu --dtype bf16    with bf16 weights, gradients and activations, and float32 masters
//            build/cpu/dev/bench_cpu --model tiny --batch 16 --seq 128      what ./train_gpt trains without flags
//            make bench-cpu LLM_PYTHON=python3 LLMC=llm.c      alternating with PyTorch and llm.c (dev/bench_cpu.py)
//   debug    make DEBUG=1 DEVICE=cpu dev && gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/bench_cpu --steps 1
//
// The matmul limit is the time that the step's matrix products take alone, one after the other, on the same machine.
#include "dev/program.h"
#include "io/io.h"
#include "llm.h"
#include "optim/optim.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>

namespace {

struct Job {
    std::string model = "gpt2", dtype = "fp32";
    int64_t batch = 4, seq = 64;
    int64_t steps = 10;
};

// The products of all linear layers of a step for N tokens: forward, gradient by input, gradient by weight. Inputs and
// outputs are in scratch, two matrices of the largest layer's size.
void all_products(const Model& model, int64_t N, const Tensor (&scratch)[2], cudaStream_t stream) {
    const auto products = [&](const Linear& linear) {
        if (!linear.weight.exists()) return;
        const int64_t O = linear.weight.shape[0], I = linear.weight.shape[1];
        const Tensor out = make_tensor(scratch[0].data, scratch[0].dtype, {N, O});
        const Tensor inp = make_tensor(scratch[1].data, scratch[1].dtype, {N, I});
        matmul(out, inp, linear.weight, {.transpose_b = true}, stream);
        matmul(inp, out, linear.weight, {}, stream);
        matmul(linear.dweight, out, inp, {.transpose_a = true}, stream);
    };
    for (const Block& block : model.blocks) {
        for (const Linear& linear : block.attention.linears) products(linear);
        for (const Linear& linear : block.feed_forward.linears) products(linear);
    }
    products(model.head);
}

int64_t widest_layer(const Model& model) {
    int64_t widest = model.head.weight.shape[0];
    for (const Block& block : model.blocks)
        for (const auto* linears : {&block.attention.linears, &block.feed_forward.linears})
            for (const Linear& linear : *linears)  // a tensor that is not there has the shape 1 x 1
                widest = std::max({widest, linear.weight.shape[0], linear.weight.shape[1]});
    return widest;
}

void bench(const Job& job) {
    const Config config = load_config(job.model);
    const bool mixed = job.dtype == "bf16";
    const DType dtype = mixed ? DType::bf16 : DType::f32;
    const Precision precision{.dtype = dtype, .grad_dtype = dtype, .master = mixed};
    const int64_t B = job.batch, T = job.seq, N = B * T;
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
        model = build_model(config, precision, T, weights, grads, masters);
        adamw = make_optimizer("adamw", states, model.params, model.weights.n(), {});
        acts = take_activations(model, B, T, {}, activations);
        workspace = take_workspace(model, B, T, true, activations);
        norm = activations.take("norm", DType::f32, {2});
        norm_scratch = activations.take("norm", DType::f32, {grad_norm_scratch_n(model.grads.n())});
        if (pass == 1) break;
        for (Arena* arena : {&weights, &grads, &masters, &states, &activations}) {
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
    for (int64_t step = 0; step <= job.steps; ++step) {  // the first one warms up
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
    Arena products("products");
    Tensor scratch[2];
    for (int pass = 0; pass < 2; ++pass) {
        for (Tensor& matrix : scratch) matrix = products.take("matrix", dtype, {N, widest_layer(model)});
        if (pass == 0) products.reserve();
    }
    for (int64_t step = 0; step <= job.steps; ++step) {
        const double start = seconds_now();
        all_products(model, N, scratch, stream);
        cudaCheck(cudaStreamSynchronize(stream));
        if (step > 0) product_times.push_back(seconds_now() - start);
    }
    const double step_s = median(times), products_s = median(product_times);
    std::printf("%s, %s parameters, %s, batch %lld x %lld, on %s\n", job.model.c_str(),
                human_count(static_cast<double>(parameter_count(config))).c_str(), mixed ? "bf16" : "float32",
                static_cast<long long>(B), static_cast<long long>(T), device().name.c_str());
    std::printf("step                 %7.4f s   (median of %lld)\n", step_s, static_cast<long long>(job.steps));
    std::printf("its matmuls alone    %7.4f s   share of the matmul limit: %.0f %%\n", products_s,
                100 * products_s / step_s);
    std::printf("tokens/s             %7.0f\n", static_cast<double>(N) / step_s);
    std::printf("GFLOP/s              %7.0f\n", flops_per_token(config, T) * static_cast<double>(N) / step_s / 1e9);
    std::printf("peak memory          %7.0f MiB, plan %.0f MiB (%+.1f %%)\n", peak_bytes / (1 << 20),
                plan_bytes / (1 << 20), 100 * (peak_bytes / plan_bytes - 1));
}

}  // namespace

int main(int argc, char** argv) {
    Job job;
    CommandLine line{"bench_cpu: times a training step, and its matrix products alone"};
    Heading h{line, "Options"};
    h.option("--model", job.model, "a preset of train_gpt, or a config.json");
    h.count("--steps", job.steps, "timed steps");
    h.count("--batch", job.batch, "sequences");
    h.count("--seq", job.seq, "tokens per sequence");
    h.option("--dtype", job.dtype, "fp32 or bf16");
    return run_program("bench_cpu", line, argc, argv, [&] {
        check(job.dtype == "fp32" || job.dtype == "bf16", "--dtype ", job.dtype, ": use fp32 or bf16");
        bench(job);
    });
}
