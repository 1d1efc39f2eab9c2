// test/reference.cu: see reference.h.
#include "reference.h"

#include "layers/layers.h"

#include <algorithm>
#include <cmath>

Buffer::Buffer(DType dtype, std::initializer_list<int64_t> dims) : tensor_(make_tensor(nullptr, dtype, dims)) {
    cudaCheck(cudaMalloc(&tensor_.data, tensor_.bytes()));
}
Buffer::Buffer(DType dtype, std::initializer_list<int64_t> dims, const std::vector<double>& values)
    : Buffer(dtype, dims) {
    set(values);
}
Buffer::~Buffer() { cudaFree(tensor_.data); }

void Buffer::set(const std::vector<double>& values) {
    from_floats(tensor_, std::vector<float>(values.begin(), values.end()));
}
// (Ranks that are threads come here, and Catch2 counts the assertions of one thread at a time.)
void Buffer::set_integers(const std::vector<int32_t>& values) {
    check(std::ssize(values) == tensor_.n(), "a buffer of ", tensor_.n(), " integers is set to ", values.size());
    copy_to_device(tensor_, values.data());
}
std::vector<double> Buffer::values() const {
    if (tensor_.dtype == DType::i32) {
        std::vector<int32_t> integers(static_cast<size_t>(tensor_.n()));
        copy_to_host(integers.data(), tensor_);
        record_bits(integers.data(), integers.size() * sizeof(int32_t));
        return {integers.begin(), integers.end()};
    }
    const std::vector<float> floats = to_floats(tensor_);
    record_bits(floats.data(), floats.size() * sizeof(float));
    return {floats.begin(), floats.end()};
}
std::vector<unsigned char> Buffer::bits() const {
    std::vector<unsigned char> bytes(tensor_.bytes());
    copy_to_host(bytes.data(), tensor_);
    record_bits(bytes.data(), bytes.size());
    return bytes;
}

std::vector<double> random_values(int64_t n, uint64_t seed, double scale) {
    const std::vector<float> normal = normal_values(n, 1.0, seed, 1);
    std::vector<double> values(normal.begin(), normal.end());
    for (double& x : values) x *= scale;
    return values;
}

std::vector<double> rounded(const std::vector<double>& values, DType dtype) {
    std::vector<double> out(values.size());
    dispatch(dtype, [&](auto zero) {
        using T = decltype(zero);
        for (size_t i = 0; i < values.size(); ++i)
            out[i] = static_cast<float>(static_cast<T>(static_cast<float>(values[i])));
    });
    return out;
}

std::vector<double> transposed(const std::vector<double>& x, int64_t rows, int64_t cols) {
    std::vector<double> y(x.size());
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; ++j) y[static_cast<size_t>(j * rows + i)] = x[static_cast<size_t>(i * cols + j)];
    return y;
}

namespace {
double gelu_tanh(double x) { return std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)); }
}  // namespace
double gelu(double x) { return 0.5 * x * (1 + gelu_tanh(x)); }
double gelu_derivative(double x) {
    const double t = gelu_tanh(x);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

double largest(const std::vector<double>& values) {
    double most = 0;
    for (double x : values) most = std::max(most, std::abs(x));
    return most;
}

double unit_roundoff(DType dtype) { return dtype == DType::f32 ? 0x1p-24 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-11; }

void check_close(const std::vector<double>& actual, const std::vector<double>& expected, double relative,
                 double absolute, const std::string& what) {
    REQUIRE(actual.size() == expected.size());
    double worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
        const double difference = std::abs(actual[i] - expected[i]);
        const double error = difference == 0 ? 0 : difference / (absolute + relative * std::abs(expected[i]));
        if (!(error <= worst)) worst = error, at = i;  // NaN counts as worst
        if (std::isnan(error)) break;
    }
    if (actual.empty()) return;
    INFO(what << ": element " << at << " is " << actual[at] << ", expected " << expected[at] << ", error is " << worst
              << " of the tolerance (relative " << relative << ", absolute " << absolute << ")");
    CHECK(worst <= 1.0);
}

bool has_fp8(bool block_scales) {
    try {
        expect_fp8_device(block_scales);
    } catch (const std::exception&) {
        return false;
    }
    return true;
}

void check_counters() {
    std::vector<unsigned> counters(static_cast<size_t>(kArrivals));
    cudaCheck(cudaStreamSynchronize(device().stream));
    cudaCheck(
        cudaMemcpy(counters.data(), device().arrivals, counters.size() * sizeof(unsigned), cudaMemcpyDeviceToHost));
    const auto left = std::find_if(counters.begin(), counters.end(), [](unsigned n) { return n != 0; });
    INFO("counter " << left - counters.begin() << " of " << kArrivals << " is left at "
                    << (left == counters.end() ? 0 : *left));
    CHECK(left == counters.end());
}

std::vector<Difference> finite_differences(const std::function<double(const std::vector<double>&)>& f,
                                           const std::vector<double>& x, double step, size_t n_picked) {
    std::vector<Difference> differences;
    std::vector<double> y = x;
    const size_t stride = std::max<size_t>(1, x.size() / n_picked);
    for (size_t i = 0; i < x.size(); i += stride) {
        y[i] = x[i] + step;
        const double above = f(y);
        y[i] = x[i] - step;
        const double below = f(y);
        y[i] = x[i];
        differences.push_back({i, (above - below) / (2 * step)});
    }
    return differences;
}
