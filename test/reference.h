// test/reference.h: helpers of the kernel tests: device buffers, random values, comparisons that report the worst
// element.
#pragma once

#include "test.h"

#include <cmath>
#include <functional>

// Device memory for one tensor, in an allocation of its own (so that strict mode's guard page follows it directly).
class Buffer {
  public:
    Buffer(DType dtype, std::initializer_list<int64_t> dims);
    Buffer(DType dtype, std::initializer_list<int64_t> dims, const std::vector<double>& values);  // rounded to dtype
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    operator Tensor() const { return tensor_; }
    const Tensor& tensor() const { return tensor_; }
    void set(const std::vector<double>& values);
    void set_integers(const std::vector<int32_t>& values);
    std::vector<double> values() const;
    std::vector<unsigned char> bits() const;  // for bit-identity

  private:
    Tensor tensor_;
};

// While this object exists, this device says that it has so many multiprocessors: launchers share out work for them.
struct Multiprocessors {
    int old = device().sm_count;
    explicit Multiprocessors(int n) { device().sm_count = n; }
    ~Multiprocessors() { device().sm_count = old; }
};

// n values from normal(0, scale), the same on every machine.
std::vector<double> random_values(int64_t n, uint64_t seed, double scale = 1.0);
// The values as the dtype can hold them: references start from the same numbers as the kernels.
std::vector<double> rounded(const std::vector<double>& values, DType dtype);
// Half the distance from 1 to the next number of the dtype: the relative error of one rounding.
double unit_roundoff(DType dtype);
// The error of a float32 sum of n terms of size 1 that stays of size 1 (a mean, a dot product of normalised rows). Each
// addition rounds by at most 2^-24 of the sum; n roundings of random sign add up to sqrt(n) of that. Twice that, and 8
// for the handful of operations around the sum.
inline double sum_error(int64_t n) { return (8 + 2 * std::sqrt(static_cast<double>(n))) * 0x1p-24; }
// The larger of the two, and NaN if one of them is, which std::max forgets: for the largest of many errors.
inline double larger(double a, double b) { return a >= b || std::isnan(a) ? a : b; }
// x (rows, cols) as (cols, rows).
std::vector<double> transposed(const std::vector<double>& x, int64_t rows, int64_t cols);
// GELU by the tanh formula.
double gelu(double x);
double gelu_derivative(double x);
// max |x|: absolute tolerances are multiples of it.
double largest(const std::vector<double>& values);
inline const DType kFloatDTypes[] = {DType::f32, DType::bf16, DType::f16};

// CHECKs |actual - expected| <= absolute + relative * |expected| for every element and reports the worst one.
void check_close(const std::vector<double>& actual, const std::vector<double>& expected, double relative,
                 double absolute, const std::string& what);

// CHECKs that the kernels so far have left the device's counters at 0 (is_last_block, kernel.cuh), as they found them:
// otherwise a later kernel would take another block for its last one.
void check_counters();

// Has this device products of fp8, with one scale for a tensor (Ada, Hopper) or with scales of blocks (Hopper)?
bool has_fp8(bool block_scales = false);
inline const char* const kNeedsFp8 = "needs a GPU with products of fp8";

// d f / d x[i] by central differences in float64, for a few i picked evenly over x.
struct Difference {
    size_t index;
    double derivative;
};
std::vector<Difference> finite_differences(const std::function<double(const std::vector<double>&)>& f,
                                           const std::vector<double>& x, double step = 1e-5, size_t n_picked = 16);
