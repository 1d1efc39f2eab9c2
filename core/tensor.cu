// core/tensor.cu: views of memory, their checks, and copies between host and device.
#include "core/core.h"

#include <algorithm>
#include <ostream>

size_t dtype_bytes(DType dtype) {
    switch (dtype) {
        case DType::e4m3:
        case DType::e5m2:
        case DType::i8: return 1;
        case DType::bf16:
        case DType::f16: return 2;
        default: return 4;
    }
}

const char* dtype_name(DType dtype) {
    switch (dtype) {
        case DType::f32: return "f32";
        case DType::bf16: return "bf16";
        case DType::f16: return "f16";
        case DType::e4m3: return "e4m3";
        case DType::e5m2: return "e5m2";
        case DType::i8: return "i8";
        case DType::i32: return "i32";
    }
    return "?";
}

DType dtype_from_name(const std::string& name) {
    if (name == "f32" || name == "fp32" || name == "float32") return DType::f32;
    if (name == "bf16" || name == "bfloat16") return DType::bf16;
    if (name == "f16" || name == "fp16" || name == "float16") return DType::f16;
    if (name == "e4m3") return DType::e4m3;
    if (name == "e5m2") return DType::e5m2;
    if (name == "i8" || name == "int8") return DType::i8;
    if (name == "i32" || name == "int32") return DType::i32;
    fail("unknown dtype '", name, "': use fp32, bf16, fp16, e4m3, e5m2, int8 or int32");
}

Tensor make_tensor(void* data, DType dtype, std::initializer_list<int64_t> dims) {
    check(dims.size() >= 1 && dims.size() <= 4, "a tensor has 1 to 4 dimensions, not ", dims.size());
    Tensor tensor;
    tensor.data = data;
    tensor.dtype = dtype;
    for (int64_t dim : dims) {
        check(dim >= 0, "a tensor dimension is negative: ", dim);
        tensor.shape[tensor.ndim++] = dim;
    }
    return tensor;
}

void Tensor::fail_dtype(DType read_as) const {
    fail("tensor holds ", dtype_name(dtype), ", read as ", dtype_name(read_as));
}

Tensor Tensor::view(std::initializer_list<int64_t> dims) const {
    const Tensor other = make_tensor(data, dtype, dims);
    check(other.n() == n(), "cannot view ", *this, " as ", other);
    return other;
}

Tensor Tensor::slice(int64_t first, int64_t count) const {
    check(ndim >= 1 && first >= 0 && count >= 0 && first + count <= shape[0], "rows [", first, ", ", first + count,
          ") are not all in ", *this);
    Tensor part = *this;
    part.shape[0] = count;
    const int64_t row_n = shape[0] == 0 ? 0 : n() / shape[0];
    if (data) part.data = static_cast<char*>(data) + static_cast<size_t>(first * row_n) * dtype_bytes(dtype);
    return part;
}

static std::string shape_text(DType dtype, const int64_t* shape, size_t ndim) {
    std::string text = concat(dtype_name(dtype), " (");
    for (size_t i = 0; i < ndim; ++i)
        text += (i ? ", " : "") + (shape[i] < 0 ? std::string("*") : std::to_string(shape[i]));
    return text + ")";
}

std::ostream& operator<<(std::ostream& text, const Tensor& tensor) {
    if (!tensor.exists()) return text << "no tensor";
    return text << shape_text(tensor.dtype, tensor.shape, static_cast<size_t>(tensor.ndim));
}

void expect(const char* operation, const char* argument, const Tensor& tensor, DType dtype,
            std::initializer_list<int64_t> dims) {
    const auto fits = [](int64_t dim, int64_t size) { return dim == -1 || dim == size; };
    if (tensor.data != nullptr && tensor.dtype == dtype && static_cast<size_t>(tensor.ndim) == dims.size() &&
        std::equal(dims.begin(), dims.end(), tensor.shape, fits))
        return;
    const std::vector<int64_t> wanted(dims);
    fail(operation, ": ", argument, " is ", tensor.ndim && !tensor.data ? "without memory, " : "", tensor,
         ", expected ", shape_text(dtype, wanted.data(), wanted.size()));
}

bool is_aligned(const void* data, size_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

void expect_aligned(const char* operation, std::initializer_list<std::pair<const char*, Tensor>> arguments) {
    for (const auto& [name, tensor] : arguments)
        check(is_aligned(tensor.data, 16), operation, ": ", name, " starts at ", tensor.data,
              ", which is not a multiple of 16 bytes");
}
Tensor scratch_as(const char* operation, const Tensor& scratch, std::initializer_list<int64_t> dims) {
    const Tensor wanted = make_tensor(scratch.data, DType::f32, dims);
    check(scratch && scratch.dtype == DType::f32 && scratch.n() >= wanted.n(), operation, ": scratch is ", scratch,
          ", expected f32 of at least ", wanted.n(), " elements");
    expect_aligned(operation, {{"scratch", scratch}});
    return wanted;
}

void copy_to_device(const Tensor& tensor, const void* host) {
    if (tensor.n() == 0) return;
    cudaCheck(cudaMemcpyAsync(tensor.data, host, tensor.bytes(), cudaMemcpyDefault, device().stream));
    cudaCheck(cudaStreamSynchronize(device().stream));
}

void copy_to_host(void* host, const Tensor& tensor) {
    if (tensor.n() == 0) return;
    cudaCheck(cudaMemcpyAsync(host, tensor.data, tensor.bytes(), cudaMemcpyDefault, device().stream));
    cudaCheck(cudaStreamSynchronize(device().stream));
}

std::vector<float> to_floats(const Tensor& tensor) {
    std::vector<float> values(static_cast<size_t>(tensor.n()));
    dispatch(tensor.dtype, [&](auto zero) {
        using T = decltype(zero);
        std::vector<T> stored(values.size());
        copy_to_host(stored.data(), tensor);
        for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(stored[i]);
    });
    return values;
}

void from_floats(const Tensor& tensor, const std::vector<float>& values) {
    check(static_cast<int64_t>(values.size()) == tensor.n(), values.size(), " values for ", tensor);
    dispatch(tensor.dtype, [&](auto zero) {
        using T = decltype(zero);
        std::vector<T> stored(values.size());
        for (size_t i = 0; i < values.size(); ++i) stored[i] = static_cast<T>(values[i]);
        copy_to_device(tensor, stored.data());
    });
}
