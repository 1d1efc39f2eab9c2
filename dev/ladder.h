// dev/ladder.h: what all ladders of this folder use: random data, checks, times, the limit, one table.
//
// A ladder is one operation, written several times. Each version is a rung, and differs from the one before in one
// idea. A ladder's program is a list of kernels and a function `climb` that goes through them:
//
//     void climb(Ladder& ladder) {
//         const int64_t N = ladder.size(0), C = ladder.size(1);
//         const Tensor inp = ladder.normal({N, C}), out = ladder.output({N, C});
//         ladder.table("softmax", Limit::copy, 2 * inp.bytes());             the least bytes that any version must move
//         ladder.expects({{"out", out, reference(ladder.host(inp), N, C), 1e-5, 0}});
//         ladder.rung("naive", "one thread per row", [&](cudaStream_t s) { softmax_naive(out, inp, s); });
//         ladder.rung("online", ...);                                        numbered in this order
//     }
//     int main(int argc, char** argv) { return run_ladder(argc, argv, {.name = "softmax", ..., .climb = climb}); }
//
// Every rung is checked against `expects` before it is timed. The outputs are NaN before it starts, so that no rung
// passes with the results of the previous one. With --check the program only checks, at small sizes that are no
// multiples of the block sizes.
//
// Times are medians over single runs, between two CUDA events. Before each run a buffer larger than the L2 cache is
// written, so that the inputs come from memory, as they do in training, where other operations ran in between.
//
// The limit is measured, not looked up: the rate at which this device copies (Limit::copy), or multiplies matrices of
// this dtype (Limit::matmul, by the product's matmul). A rung's share of the limit is
//
//     (bytes or flops that the operation needs at least / that rate) / its time
//
// so a rung that moves each byte twice shows 50 %, even if it keeps the memory busy all the time.
#pragma once

#include "core/kernel.cuh"
#include "dev/program.h"
#include "layers/layers.h"
#include "planning/rates.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <functional>
#include <sstream>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// The description of a ladder, and the options of the command line

class Ladder;

struct LadderInfo {
    const char* name;                               // of the program
    const char* sizes;                              // what --size counts, "rows x columns"
    std::vector<int64_t> cpu_size, gpu_size;        // timed unless --size says otherwise
    std::vector<std::vector<int64_t>> check_sizes;  // for --check
    std::vector<DType> dtypes = {DType::f32};       // for --dtype; --check without it goes through all of them
    void (*climb)(Ladder&);
    void (*show)(Ladder&) = nullptr;  // a demonstration after the climb
};

struct LadderOptions {
    bool check = false;
    std::vector<int64_t> size;
    std::vector<DType> dtypes;
    int64_t rung = 0;  // 0: all of them
};

inline std::string size_text(const std::vector<int64_t>& size) {
    std::string text;
    for (int64_t n : size) text += concat(text.empty() ? "" : " x ", n);
    return text;
}

enum class Limit { copy, matmul };

// What a rung must leave in a tensor: |x - value| <= absolute + relative |value| for every element. Where a value is a
// sum whose terms cancel, `sizes` stands for |value|: the sum of the terms' magnitudes.
struct Expectation {
    const char* name;
    Tensor tensor;
    std::vector<double> values;
    double relative, absolute;
    std::vector<double> sizes = {};
};

// Of a launch: how many blocks have n threads, or numbers, where each has so many.
inline unsigned blocks_for(int64_t n, int64_t each) {
    return static_cast<unsigned>(narrow(ceil_div(n, each), "blocks"));
}

// 2^-24 for f32, 2^-8 for bf16, 2^-11 for f16: the largest relative error of one rounding.
inline double unit_roundoff(DType dtype) {
    return dtype == DType::f32 ? 0x1p-24 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
}

// Rounding x errs by at most a unit roundoff of max(|x|, this): below it the format's numbers are equally spaced.
inline double smallest_normal(DType dtype) { return dtype == DType::f16 ? 0x1p-14 : 0x1p-126; }

// The error of a float32 sum of n independent random terms of size 1, in any order. The partial sum of k terms is at
// most 6 sqrt(k) (in 10^9 of them), and its rounding error lies evenly between -2^-24 and 2^-24 of that. The sum of n
// such errors of random sign has the standard deviation  2^-24 * 6 / sqrt(3) * sqrt(1 + 2 + ... + n)  and stays within
// six of these.
inline double random_sum_error(int64_t n) { return 6 * 6 / std::sqrt(6.0) * 0x1p-24 * static_cast<double>(n + 1); }

// One float4 per thread: nothing but loads and stores.
__global__ void copy_kernel(Packed<float>* __restrict__ out, const Packed<float>* __restrict__ inp) {
    const int64_t i = global_thread();
    out[i] = inp[i];
}

// ---------------------------------------------------------------------------------------------------------------------
// Ladder: the tensors of one ladder, and the results of its rungs

class Ladder {
  public:
    Ladder(const LadderOptions& options, std::vector<int64_t> size, DType dtype)
        : options_(options), size_(std::move(size)), dtype_(dtype), stream_(device().stream) {
        cudaCheck(cudaEventCreate(&start_));
        cudaCheck(cudaEventCreate(&stop_));
    }
    ~Ladder() {
        cudaStreamSynchronize(stream_);
        for (void* memory : memory_) cudaFree(memory);
        cudaEventDestroy(start_);
        cudaEventDestroy(stop_);
    }
    Ladder(const Ladder&) = delete;
    Ladder& operator=(const Ladder&) = delete;

    int64_t size(size_t dimension) const { return size_[dimension]; }
    DType dtype() const { return dtype_; }
    cudaStream_t stream() const { return stream_; }
    bool checking() const { return options_.check; }

    // Device memory that lives as long as the ladder, each tensor in an allocation of its own. Contents are undefined.
    Tensor take(DType dtype, std::initializer_list<int64_t> dims) {
        Tensor tensor = make_tensor(nullptr, dtype, dims);
        check(cudaMalloc(&tensor.data, tensor.bytes()) == cudaSuccess, "--size ", size_text(),
              ": the device has no memory left for ", tensor, ": use a smaller size");
        memory_.push_back(tensor.data);
        return tensor;
    }
    // Normal numbers, of the ladder's dtype; the same on every run.
    Tensor normal(std::initializer_list<int64_t> dims, double std = 1.0) {
        const Tensor tensor = take(dtype_, dims);
        fill_normal(tensor, std, 1, memory_.size());
        return tensor;
    }
    // What rungs write: NaN before each of them.
    Tensor output(std::initializer_list<int64_t> dims, DType dtype = DType::f32) {
        outputs_.push_back(take(dtype, dims));
        return outputs_.back();
    }
    // What rungs update in place: before each of them it is set to its present contents.
    Tensor in_place(const Tensor& tensor) {
        const Tensor copy = take(tensor.dtype, {tensor.n()});
        cudaCheck(cudaMemcpyAsync(copy.data, tensor.data, tensor.bytes(), cudaMemcpyDeviceToDevice, stream_));
        restored_.push_back({tensor, copy});
        return tensor;
    }
    std::vector<float> host(const Tensor& tensor) {
        cudaCheck(cudaStreamSynchronize(stream_));
        return to_floats(tensor);
    }

    // Starts a table: what every rung from here on computes, and what it needs at least: bytes moved, or flops.
    void table(const std::string& title, Limit limit, double amount) {
        amount_ = amount, first_ms_ = 0;
        if (checking()) return;
        rate_ = limit == Limit::copy ? copy_rate() : matmul_rate();
        const char* unit = limit == Limit::copy ? "GB/s" : "GFLOP/s";
        std::printf("\n%s: %s %s on %s\n", title.c_str(), size_text().c_str(), dtype_name(dtype_),
                    device().name.c_str());
        std::printf("at least %.4g %s; %s reaches %.4g %s here, so the limit is %.4g ms\n\n", amount / 1e6,
                    limit == Limit::copy ? "MB to move" : "Mflop", limit == Limit::copy ? "a copy" : "matmul",
                    rate_ / 1e9, unit, 1e3 * amount / rate_);
        std::printf("| # | rung | ms | %s | of the limit | times the first | error / tolerance | what changes |\n",
                    unit);
        std::printf("|--:|---|--:|--:|--:|--:|--:|---|\n");
    }
    // What the rungs from here on must compute.
    void expects(std::vector<Expectation> expectations) { expectations_ = std::move(expectations); }

    // One version of the operation: checked, then timed. repeats: it gives the same bits on every run.
    void rung(const char* name, const char* why, const std::function<void(cudaStream_t)>& launch, bool repeats = true) {
        ++number_;
        if (options_.rung != 0 && options_.rung != number_) return;
        prepare();
        launch(stream_);
        cudaCheck(cudaStreamSynchronize(stream_));
        double worst = 0;
        for (const Expectation& expectation : expectations_) {
            const double error = compare(name, expectation, repeats);
            worst = std::max(worst, error);
        }
        worst_ = std::max(worst_, worst);
        ++n_checked_;
        if (checking()) return;
        const double ms = median(times_ms(launch)), amount_a_second = amount_ / (ms / 1e3);
        if (first_ms_ == 0) first_ms_ = ms;
        std::printf("| %d | %s | %.4g | %.4g | %.3g %% | %.3g | %.2g | %s |\n", number_, name, ms,
                    amount_a_second / 1e9, 100 * amount_a_second / rate_, first_ms_ / ms, worst, why);
        std::fflush(stdout);
    }

    // A rung that cannot run with this dtype, size or device keeps its number. If --rung asks for it, the error says
    // why.
    void no_rung(const char* name, const char* why_not) {
        ++number_;
        check(options_.rung != number_, size_text(), ' ', dtype_name(dtype_), ": rung ", number_, " (", name, ") ",
              why_not);
        if (options_.rung == 0 && !checking())
            std::printf("| %d | %s | - | - | - | - | - | %s |\n", number_, name, why_not);
    }

    int n_rungs() const { return number_; }
    int n_checked() const { return n_checked_; }
    double worst() const { return worst_; }
    uint64_t bits() const { return bits_; }
    std::string size_text() const { return ::size_text(size_); }

  private:
    void prepare() {
        for (const Tensor& tensor : outputs_) cudaCheck(cudaMemsetAsync(tensor.data, 0xff, tensor.bytes(), stream_));
        for (const auto& [tensor, copy] : restored_)
            cudaCheck(cudaMemcpyAsync(tensor.data, copy.data, tensor.bytes(), cudaMemcpyDeviceToDevice, stream_));
    }

    // The largest error, in tolerances. Throws where it is above 1.
    double compare(const char* name, const Expectation& expectation, bool repeats) {
        const std::vector<float> actual = to_floats(expectation.tensor);
        check(actual.size() == expectation.values.size(), "the reference of ", expectation.name, " has ",
              expectation.values.size(), " elements, not ", actual.size());
        double worst = 0;
        size_t at = 0;
        for (size_t i = 0; i < actual.size(); ++i) {
            const double value = expectation.values[i];
            const double difference = std::abs(actual[i] - value);
            const double size = expectation.sizes.empty() ? std::abs(value) : expectation.sizes[i];
            const double allowed = expectation.absolute + expectation.relative * size;
            const double error = difference == 0 ? 0 : difference / allowed;
            if (!(error <= worst)) worst = error, at = i;  // NaN counts as worst
            if (std::isnan(error)) break;
            if (repeats) bits_ = (bits_ ^ std::bit_cast<uint32_t>(actual[i])) * 0x100000001b3;  // FNV-1a
        }
        check(worst <= 1, size_text(), ' ', dtype_name(dtype_), ": rung ", number_, " (", name,
              ") is wrong: ", expectation.name, "[", at, "] is ", actual[at], ", expected ", expectation.values[at],
              ", error ", worst, " of the tolerance");
        return worst;
    }

    // The times of single runs: at least 3, and for half a second, but no more than 101; one run before them warms up.
    std::vector<double> times_ms(const std::function<void(cudaStream_t)>& launch) {
        if (!flush_) {
            cudaDeviceProp properties;
            cudaCheck(cudaGetDeviceProperties(&properties, device().index));
            flush_ =
                take(DType::f32, {std::max<int64_t>(2 * static_cast<int64_t>(properties.l2CacheSize), 64 << 20) / 4});
        }
        std::vector<double> times;
        const double enough = seconds_now() + 0.5;
        for (int run = -1; run < 3 || (run < 101 && seconds_now() < enough); ++run) {
            prepare();
            cudaCheck(cudaMemsetAsync(flush_.data, run & 1, flush_.bytes(), stream_));
            cudaCheck(cudaEventRecord(start_, stream_));
            launch(stream_);
            cudaCheck(cudaEventRecord(stop_, stream_));
            cudaCheck(cudaEventSynchronize(stop_));
            float ms = 0;
            cudaCheck(cudaEventElapsedTime(&ms, start_, stop_));
            if (run >= 0) times.push_back(std::max(ms, 1e-6f));  // events count in steps of half a microsecond
        }
        return times;
    }

    // Bytes per second, read and written, of a copy much larger than the caches.
    double copy_rate() {
        if (copy_rate_ > 0) return copy_rate_;
        const int64_t n = (device().is_cpu ? 64 : 512) << 18;  // floats: 64 MiB, 512 MiB
        const Tensor from = take(DType::f32, {n}), to = take(DType::f32, {n});
        cudaCheck(cudaMemsetAsync(from.data, 0, from.bytes(), stream_));
        const int n_blocks = narrow(n / (4 * 256), "blocks");
        auto* out = static_cast<Packed<float>*>(to.data);
        const auto* inp = static_cast<const Packed<float>*>(from.data);
        const std::vector<double> times = times_ms([&](cudaStream_t stream) {
#ifdef CUDA_ON_CPU  // the CPU device's rewriter translates .cu files only: this is what it would write
            ::cuda_cpu::launch(
                "copy_kernel", __FILE__, __LINE__, {n_blocks, 256, 0, stream},
                [](auto... arguments) -> decltype(copy_kernel(arguments...)) { copy_kernel(arguments...); }, out, inp);
#else
            copy_kernel<<<n_blocks, 256, 0, stream>>>(out, inp);
#endif
            cudaCheckLaunch();
        });
        return copy_rate_ =
                   2.0 * static_cast<double>(from.bytes()) / (*std::min_element(times.begin(), times.end()) / 1e3);
    }

    double matmul_rate() {
        if (matmul_rate_ == 0) matmul_rate_ = measure_matmul_rate(dtype_);
        return matmul_rate_;
    }

    const LadderOptions& options_;
    std::vector<int64_t> size_;
    DType dtype_;
    cudaStream_t stream_;
    cudaEvent_t start_ = nullptr, stop_ = nullptr;
    std::vector<void*> memory_;
    std::vector<Tensor> outputs_;
    std::vector<std::pair<Tensor, Tensor>> restored_;
    std::vector<Expectation> expectations_;
    Tensor flush_;
    double amount_ = 0, rate_ = 0, copy_rate_ = 0, matmul_rate_ = 0, first_ms_ = 0, worst_ = 0;
    int number_ = 0, n_checked_ = 0;
    uint64_t bits_ = 0xcbf29ce484222325;
};

// ---------------------------------------------------------------------------------------------------------------------
// The command line

// "4000x8192", or "4000 x 8192", as the tables write it.
inline std::vector<int64_t> parse_size(std::string text, const LadderInfo& info) {
    std::erase(text, ' ');
    std::vector<int64_t> size;
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, 'x');) size.push_back(parse_count("--size", part));
    check(size.size() == info.cpu_size.size(), "--size: got ", size.size(), " numbers, expected ", info.sizes);
    return size;
}

inline std::vector<DType> chosen_dtypes(const std::string& name, bool check_all, const LadderInfo& info) {
    if (name.empty()) return check_all ? info.dtypes : std::vector<DType>{info.dtypes.front()};
    const DType dtype = dtype_from_name(name);
    check(std::ranges::count(info.dtypes, dtype) > 0, "--dtype ", dtype_name(dtype),
          ": this ladder is not written for it; see --help");
    return {dtype};
}

// Times the ladder, or with --check only checks it. The exit status is 2 after an error, and after a wrong rung.
inline int run_ladder(int argc, char** argv, const LadderInfo& info) {
    LadderOptions options;
    std::string size, dtype, dtypes;
    for (const DType each : info.dtypes) dtypes += concat(dtypes.empty() ? "" : ", ", dtype_name(each));
    CommandLine line{concat(info.name, ": checks and times every rung, at ", size_text(info.cpu_size), ", on a GPU at ",
                            size_text(info.gpu_size))};
    Heading h{line, "Options"};
    h.option("--size", size, concat("another size, with an x between the numbers: ", info.sizes));
    h.count("--rung", options.rung, "this rung only");
    h.option("--dtype", dtype, dtypes);
    h.flag("--check", options.check, "check only, at small sizes unless --size is given");
    return run_program(info.name, line, argc, argv, [&] {
        if (!size.empty()) options.size = parse_size(size, info);
        options.dtypes = chosen_dtypes(dtype, options.check, info);
        std::vector<std::vector<int64_t>> sizes = {options.size};
        if (options.size.empty()) sizes = {device().is_cpu ? info.cpu_size : info.gpu_size};
        if (options.check && options.size.empty()) sizes = info.check_sizes;
        uint64_t bits = 0;
        for (DType dtype : options.dtypes) {
            for (const std::vector<int64_t>& size : sizes) {
                Ladder ladder(options, size, dtype);
                info.climb(ladder);
                check(options.rung <= ladder.n_rungs(), "--rung ", options.rung, ": this ladder has ",
                      ladder.n_rungs());
                bits = bits * 31 + ladder.bits();
                if (options.check)
                    std::printf("%s %s %s: %d rungs agree with float64, worst error %.2g of its tolerance\n", info.name,
                                ladder.size_text().c_str(), dtype_name(dtype), ladder.n_checked(), ladder.worst());
                if (info.show && &size == &sizes.back() && options.rung == 0) info.show(ladder);
            }
        }
        if (options.check) std::printf("%s: bits %016llx\n", info.name, static_cast<unsigned long long>(bits));
    });
}

}  // namespace
