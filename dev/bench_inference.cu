// dev/bench_inference.cu: the speed of the engine of inference/: one sequence, and many of mixed lengths.
//
//   run      make bench-inference                                       GPT-2 124M in float32
//            build/cpu/dev/bench_inference --model tiny --requests 16   another model, fewer requests
//            build/cpu/dev/bench_inference --loads 6 --out .            at more rates, with pictures
//            make bench-inference LLM_PYTHON=python3       alternating with transformers (dev/bench_inference.py)
//   debug    make DEBUG=1 DEVICE=cpu dev && gdb -x cpu/cuda.gdb --args build/cpu-debug/dev/bench_inference --model tiny
//
// One sequence     every token reads all weights once: the limit is weights / bandwidth of the memory.
// Many sequences   lengths are log-normal, with the means of the instructions in Kwon et al. 2023 (arXiv:2309.06180,
//                  the Alpaca data: prompts of 19.3 tokens, answers of 58.5). Static batches wait for their longest
//                  answer; continuous batching replaces each answer that has ended by the next request.
// Under load       requests arrive at random, at a part of the rate at which continuous batching serves them when all
//                  have come: how long does a request take for each of its tokens, and how long until the first comes?
#include "dev/program.h"
#include "inference/inference.h"
#include "io/io.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace {

struct BenchOptions {
    std::string model = "gpt2", dtype = "fp32", out;
    int64_t tokens = 64, requests = 64, sequences = 16, rounds = 3, loads = 3;
    bool list = false;
};

double percentile(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    return values[std::min(values.size() - 1, static_cast<size_t>(share * static_cast<double>(values.size())))];
}

// Bytes per second that all cores read and write while they copy an array that no cache holds.
double copy_bandwidth() {
    constexpr size_t kBytes = size_t{256} << 20;
    std::vector<char> from(kBytes, 1), to(kBytes, 2);
    std::vector<double> seconds;
    for (int round = 0; round < 5; ++round) {
        const double start = seconds_now();
#pragma omp parallel for
        for (size_t piece = 0; piece < 64; ++piece)
            std::memcpy(to.data() + piece * (kBytes / 64), from.data() + piece * (kBytes / 64), kBytes / 64);
        seconds.push_back(seconds_now() - start);
    }
    return 2.0 * kBytes / *std::min_element(seconds.begin(), seconds.end());
}

// A model with random weights, or one of a folder, and its memory for engines of one kind after the other.
struct Bench {
    Config config;
    Arena weights{"weights"}, gradients{"gradients"}, masters{"master weights"};
    Model model;
    int64_t max_length;

    explicit Bench(const BenchOptions& o) {
        const bool preset = find_preset(o.model) != nullptr;
        const std::string folder = preset ? "" : find_model_folder("--model", o.model);
        config = load_config(preset ? o.model : folder + "/config.json");
        max_length = std::min<int64_t>(config.T_max, 512);
        for (int pass = 0; pass < 2; ++pass) {
            model = build_model(config, {dtype_from_name(o.dtype), DType::f32, false}, max_length, weights, gradients,
                                masters);
            if (pass == 0) weights.reserve();
        }
        if (preset) init_weights(model, 1);
        else load_weights(model, folder);
    }
};

// Writes all of it: the first write to memory that the system has only promised takes longer, and is not measured here.
void touch(Arena& arena) {
    const size_t start = arena.mark();
    const Tensor all = arena.take(arena.name(), DType::e4m3, {static_cast<int64_t>(arena.bytes())});
    cudaCheck(cudaMemset(all.data, 0, all.bytes()));
    arena.release(start);
}

struct Running {
    Arena cache{"cache"}, activations{"activations"}, pinned{"pinned", MemoryKind::pinned};
    Engine engine;
    uint64_t n_served = 0;  // times that it has served all requests
    Running(const Bench& bench, const EngineOptions& options) : engine(bench.model, options) {
        for (int pass = 0; pass < 2; ++pass) {
            engine.take_memory(cache, activations, pinned);
            if (pass > 0) continue;
            for (Arena* arena : {&cache, &activations, &pinned}) arena->reserve();
            touch(cache);
        }
    }
};

EngineOptions options_of(const Bench& bench, const BenchOptions& o, Batching batching) {
    EngineOptions options;
    options.scheduler.max_length = bench.max_length;
    options.scheduler.max_sequences = o.sequences;
    options.scheduler.batching = batching;
    return options;
}

std::vector<int32_t> prompt_of(const Config& config, int64_t n, uint64_t seed) {
    std::vector<int32_t> prompt;
    for (int64_t i = 0; i < n; ++i)
        prompt.push_back(
            static_cast<int32_t>(uniform_below(seed, 5, static_cast<uint64_t>(i), static_cast<uint64_t>(config.V))));
    return prompt;
}

// A log-normal length: half of them are below 0.6 times the mean, and a tenth beyond 2.2 times.
int64_t length_of(uint64_t which, uint64_t key, double mean, int64_t most) {
    const double normal = normal_values(1, 1.0, which, key)[0];
    return std::clamp<int64_t>(std::llround(mean * std::exp(normal - 0.5)), 1, most);
}
// The lengths are those of every round, the prompts are new: the cache still has those of the round before.
std::deque<Request> mixed_requests(const Bench& bench, int64_t n, uint64_t round) {
    std::deque<Request> requests;
    for (int64_t id = 0; id < n; ++id) {
        Request& request = requests.emplace_back();
        request.id = id;
        const uint64_t which = static_cast<uint64_t>(id);
        request.prompt = prompt_of(bench.config, length_of(which, 1, 19.3, bench.max_length / 2), round << 32 | which);
        request.max_tokens = length_of(which, 2, 58.5, bench.max_length / 2);
        request.sampling.temperature = 0;
    }
    return requests;
}

// ---------------------------------------------------------------------------------------------------------------------

double decode_seconds(Running& running, const Bench& bench, int64_t tokens) {
    Request request;
    request.prompt = prompt_of(bench.config, 16, 1);
    request.max_tokens = tokens + 1;
    request.sampling.temperature = 0;
    running.engine.add(request);
    running.engine.step();  // the prompt, and the first token
    const double start = seconds_now();
    while (running.engine.step()) {
    }
    return (seconds_now() - start) / static_cast<double>(tokens);
}

struct Served {
    double seconds = 0;
    int64_t tokens = 0, steps = 0;
    std::vector<double> first_token;  // seconds from arrival
    std::vector<double> per_token;    // seconds from arrival to the last token, for each token of the answer
    double rate() const { return static_cast<double>(tokens) / seconds; }
};

// arrivals: seconds after the start; empty: all at once.
Served serve(Running& running, const Bench& bench, int64_t n_requests, const std::vector<double>& arrivals) {
    Engine& engine = running.engine;
    std::deque<Request> requests = mixed_requests(bench, n_requests, running.n_served++);
    Served served;
    served.first_token.resize(requests.size(), -1), served.per_token.resize(requests.size());
    engine.start_reports(true);
    std::vector<double> came(requests.size());
    const double start = seconds_now();
    const auto now = [&] { return seconds_now() - start; };
    engine.token_ready = [&](Request& request, Sequence&, const Sampled&) {
        ++served.tokens;
        const size_t i = static_cast<size_t>(request.id);
        const double seconds = now() - came[i];
        if (served.first_token[i] < 0) served.first_token[i] = seconds;
        served.per_token[i] = seconds / static_cast<double>(request.max_tokens);  // of the last one, in the end
        return true;
    };
    const int64_t steps_before = engine.n_steps();
    size_t next = 0;
    while (true) {
        for (; next < requests.size() && (arrivals.empty() || arrivals[next] <= now()); ++next) {
            came[next] = arrivals.empty() ? 0 : arrivals[next];
            engine.add(requests[next]);
        }
        if (!engine.step() && next == requests.size()) break;
    }
    served.seconds = now();
    served.steps = engine.n_steps() - steps_before;
    return served;
}

void bench_one_sequence(const Bench& bench, const BenchOptions& o) {
    BenchOptions one = o;
    one.sequences = 1;
    EngineOptions options = options_of(bench, one, Batching::continuous), with_graphs = options;
    options.graphs = false, with_graphs.graphs = true;
    Running running(bench, options), graphs(bench, with_graphs);
    std::vector<double> seconds, graph_seconds, bandwidth;
    for (int64_t round = 0; round < o.rounds; ++round) {
        if (device().is_cpu) bandwidth.push_back(copy_bandwidth());
        seconds.push_back(decode_seconds(running, bench, o.tokens));
        graph_seconds.push_back(decode_seconds(graphs, bench, o.tokens));
    }
    const double step = median(seconds), bytes = static_cast<double>(bench.weights.bytes());
    std::printf("one sequence         %8.1f tok/s   (%.2f ms a token, median of %lld)\n", 1 / step, 1e3 * step,
                static_cast<long long>(o.rounds));
    std::printf("  as graphs          %8.1f tok/s   of %zu kernels and copies each\n", 1 / median(graph_seconds),
                graphs.engine.graphs().n_nodes());
    std::printf("  bytes of weights   %8.2f GB/s\n", bytes / step / 1e9);
    if (!bandwidth.empty())
        std::printf("  copy bandwidth     %8.2f GB/s    share: %.0f %%\n", median(bandwidth) / 1e9,
                    100 * bytes / step / median(bandwidth));
    std::fflush(stdout);
}

// Both ways to batch, while requests arrive at 1 / n, 2 / n, ... and n / n of the rate at which continuous batching
// serves them when all have come.
void bench_load(Running& still, Running& moving, const Bench& bench, const BenchOptions& o, double served_per_s) {
    const std::pair<const char*, Running*> modes[] = {{"static batches", &still}, {"continuous", &moving}};
    Plot latency{"Latency under load", "requests a second that arrive", "ms for each token of an answer, median", {}};
    Plot throughput{"Throughput under load", "requests a second that arrive", "tokens a second", {}};
    for (const auto& [name, running] : modes)
        latency.series.push_back({name, {}, {}, true, true}), throughput.series.push_back({name, {}, {}, true, true});
    latency.log_y = true;
    latency.height = throughput.height = 360;
    std::printf("\nload  requests/s  %-16s %8s  ms a token: %6s %6s   first token, s: %6s %6s\n", "", "tok/s", "median",
                "99 %", "median", "99 %");
    for (int64_t i = 1; i <= o.loads; ++i) {
        const double load = static_cast<double>(i) / static_cast<double>(o.loads);
        std::vector<double> arrivals(static_cast<size_t>(o.requests));
        double at = 0;
        for (size_t r = 0; r < arrivals.size(); ++r)
            arrivals[r] = at += -std::log(1 - uniform(1, 3, r)) / (load * served_per_s);
        for (size_t mode = 0; mode < std::size(modes); ++mode) {
            const Served served = serve(*modes[mode].second, bench, o.requests, arrivals);
            std::printf("%3.0f %%  %10.2f  %-16s %8.1f              %6.1f %6.1f                   %6.2f %6.2f\n",
                        100 * load, load * served_per_s, modes[mode].first, served.rate(),
                        1e3 * median(served.per_token), 1e3 * percentile(served.per_token, 0.99),
                        median(served.first_token), percentile(served.first_token, 0.99));
            std::fflush(stdout);
            latency.series[mode].x.push_back(load * served_per_s);
            latency.series[mode].y.push_back(1e3 * median(served.per_token));
            throughput.series[mode].x.push_back(load * served_per_s);
            throughput.series[mode].y.push_back(served.rate());
        }
    }
    if (o.out.empty()) return;
    write_png(o.out + "/load.png", {latency, throughput});
    std::printf("%s/load.png\n", o.out.c_str());
}

void bench_many(const Bench& bench, const BenchOptions& o) {
    Running still(bench, options_of(bench, o, Batching::static_batches)),
        moving(bench, options_of(bench, o, Batching::continuous));
    std::vector<double> static_rates, rates;
    Served last_static, last;
    for (int64_t round = 0; round < o.rounds; ++round) {
        last_static = serve(still, bench, o.requests, {});
        last = serve(moving, bench, o.requests, {});
        static_rates.push_back(last_static.rate());
        rates.push_back(last.rate());
    }
    const auto line = [&](const char* name, const Served& served, const std::vector<double>& tokens_per_s) {
        std::printf(
            "%-20s %8.1f tok/s   %lld requests, %lld tokens in %lld steps; first token after %.2f s (median), "
            "%.2f s (99 %%)\n",
            name, median(tokens_per_s), static_cast<long long>(o.requests), static_cast<long long>(served.tokens),
            static_cast<long long>(served.steps), median(served.first_token), percentile(served.first_token, 0.99));
    };
    line("static batches", last_static, static_rates);
    line("continuous", last, rates);
    std::printf("  ratio              %8.2f\n", median(rates) / median(static_rates));

    std::printf("%s", moving.engine.cache_report().text().c_str());
    if (!o.out.empty()) {
        const std::pair<std::string, Timeline> timelines[] = {{"static batches", still.engine.timeline()},
                                                              {"continuous batching", moving.engine.timeline()}};
        write_timelines_png(o.out + "/batching.png", timelines);
        moving.engine.cache_report().write_png(o.out + "/cache.png");
        std::printf("%s/batching.png, cache.png\n", o.out.c_str());
    }
    if (o.loads > 0) bench_load(still, moving, bench, o, static_cast<double>(o.requests) / last.seconds);
}

// The requests, for another program to serve: a line for each, its number of tokens and the ids of its prompt.
void list_requests(const Bench& bench, const BenchOptions& o) {
    for (const Request& request : mixed_requests(bench, o.requests, 0)) {
        std::printf("%lld", static_cast<long long>(request.max_tokens));
        for (const int32_t token : request.prompt) std::printf(" %d", token);
        std::printf("\n");
    }
}

}  // namespace

int main(int argc, char** argv) {
    BenchOptions o;
    CommandLine line{"bench_inference: times the engine: one sequence, many, and requests that arrive at random"};
    Heading h{line, "Options"};
    h.option("--model", o.model, "a preset of train_gpt, or a model's folder");
    h.option("--dtype", o.dtype, "fp32, bf16 or fp16");
    h.count("--tokens", o.tokens, "tokens of the one sequence's answer");
    h.count("--requests", o.requests, "requests of mixed lengths; 0: the one sequence only", 0);
    h.count("--sequences", o.sequences, "sequences of a batch");
    h.count("--rounds", o.rounds, "times that everything is measured");
    h.count("--loads", o.loads, "rates at which requests arrive", 0);
    h.option("--out", o.out, "a folder for pictures");
    h.flag("--list", o.list, "print the requests, for another program to serve");
    return run_program("bench_inference", line, argc, argv, [&] {
        if (!o.out.empty()) make_folder(o.out);
        const Bench bench(o);
        if (o.list) return list_requests(bench, o);
        std::printf("%s, %s parameters, %s, on %s\n", o.model.c_str(),
                    human_count(static_cast<double>(parameter_count(bench.config))).c_str(), o.dtype.c_str(),
                    device().name.c_str());
        bench_one_sequence(bench, o);
        if (o.requests > 0) bench_many(bench, o);
    });
}
