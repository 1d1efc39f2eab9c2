// core/arena.cu: memory that is counted first, taken once, and then only handed out.
#include "core/core.h"

#include <algorithm>
#include <cstdlib>

namespace {
constexpr size_t kAlignment = 256;

bool separate_allocations() {
    static const bool on = std::getenv("ARENA_SEPARATE") || std::getenv("CUDA_CPU_STRICT");
    return on;
}
}  // namespace

Arena::~Arena() {
    // Errors are of no use in a destructor: the process is ending or another error is on its way.
    for (auto& [offset, allocation] : separate_) cudaFree(allocation.first);
    cudaFree(base_);
}

Tensor Arena::take(const std::string& what, DType dtype, std::initializer_list<int64_t> dims) {
    Tensor tensor = make_tensor(nullptr, dtype, dims);
    const size_t bytes = static_cast<size_t>(round_up(static_cast<int64_t>(tensor.bytes()), kAlignment));
    const size_t offset = used_bytes_;
    used_bytes_ += bytes;
    high_bytes_ = std::max(high_bytes_, used_bytes_);
    if (!reserved_) {
        auto row = std::find_if(table_.begin(), table_.end(), [&](const auto& entry) { return entry.first == what; });
        if (row == table_.end()) row = table_.insert(table_.end(), {what, 0});
        row->second += bytes;
        return tensor;
    }
    check(used_bytes_ <= capacity_bytes_, "arena '", name_, "': ", what, " wants ", bytes, " bytes, ", capacity_bytes_ - offset,
          " of ", capacity_bytes_, " are left: the counting pass took less than this one");
    if (bytes == 0) return tensor;
    if (!separate_allocations()) {
        tensor.data = base_ + offset;
        return tensor;
    }
    auto& [pointer, pointer_bytes] = separate_[offset];
    if (pointer_bytes != tensor.bytes()) {
        if (pointer) cudaCheck(cudaFree(pointer));
        cudaCheck(cudaMalloc(&pointer, tensor.bytes()));
        pointer_bytes = tensor.bytes();
    }
    tensor.data = pointer;
    return tensor;
}

void Arena::reserve() {
    check(!reserved_, "arena '", name_, "' is already reserved");
    capacity_bytes_ = high_bytes_;
    if (capacity_bytes_ > 0 && !separate_allocations()) cudaCheck(cudaMalloc(&base_, capacity_bytes_));
    used_bytes_ = 0;
    reserved_ = true;
}

void Arena::release(size_t mark) {
    check(mark <= used_bytes_, "arena '", name_, "': released to ", mark, " bytes, only ", used_bytes_, " are taken");
    used_bytes_ = mark;
}
