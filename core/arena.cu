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
cudaError_t allocate(void** pointer, size_t bytes, MemoryKind kind) {
    switch (kind) {
        case MemoryKind::pinned: return cudaMallocHost(pointer, bytes);
        case MemoryKind::managed: return cudaMallocManaged(pointer, bytes);
        default: return cudaMalloc(pointer, bytes);
    }
}
cudaError_t free_memory(void* pointer, MemoryKind kind) {
    return kind == MemoryKind::pinned ? cudaFreeHost(pointer) : cudaFree(pointer);
}

}  // namespace

Arena::~Arena() {
    // Errors are of no use in a destructor: the process is ending or another error is on its way.
    for (auto& [offset, allocation] : separate_) free_memory(allocation.first, kind_);
    free_memory(base_, kind_);
}

Tensor Arena::take(const std::string& what, DType dtype, std::initializer_list<int64_t> dims) {
    Tensor tensor = make_tensor(nullptr, dtype, dims);
    // In floating point: 64 bits may hold neither the product of the sizes nor the sum. 2^60, so that they hold the sum
    // of several arenas.
    double wanted = static_cast<double>(dtype_bytes(dtype));
    for (const int64_t dim : dims) wanted *= static_cast<double>(dim);
    check(static_cast<double>(used_bytes_) + wanted <= 0x1p60, name_, ": with ", what, " of ", wanted,
          " bytes they would be more than 2^60 bytes: is one of the model's or of the batch's sizes wrong?");
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
    check(used_bytes_ <= capacity_bytes_, "arena '", name_, "': ", what, " wants ", bytes, " bytes, ",
          capacity_bytes_ - offset, " of ", capacity_bytes_, " are left: the counting pass took less than this one");
    if (bytes == 0) return tensor;
    if (!separate_allocations()) {
        tensor.data = base_ + offset;
        return tensor;
    }
    auto& [pointer, pointer_bytes] = separate_[offset];
    if (pointer_bytes != tensor.bytes()) {
        if (pointer) cudaCheck(free_memory(pointer, kind_));
        cudaCheck(allocate(&pointer, tensor.bytes(), kind_));
        pointer_bytes = tensor.bytes();
    }
    tensor.data = pointer;
    return tensor;
}

void Arena::reserve() {
    check(!reserved_, "arena '", name_, "' is already reserved");
    capacity_bytes_ = high_bytes_;
    if (capacity_bytes_ > 0 && !separate_allocations()) {
        void* base = nullptr;
        cudaCheck(allocate(&base, capacity_bytes_, kind_));
        base_ = static_cast<char*>(base);
    }
    used_bytes_ = 0;
    reserved_ = true;
}

void Arena::release(size_t mark) {
    check(mark <= used_bytes_, "arena '", name_, "': released to ", mark, " bytes, only ", used_bytes_, " are taken");
    used_bytes_ = mark;
}
