// cpu/memory.cpp: memory of the CPU device, and copies.
//
// Device memory, pinned memory and managed memory are ordinary memory here, but the device records which kind each
// allocation has, and refuses copies that CUDA refuses. In strict mode each allocation ends at a guard page
// (cpu/strict.cpp).
#include "races.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace cuda_cpu {
namespace {

enum class MemoryKind { device, pinned_host, managed };

struct Allocation {
    size_t bytes;
    MemoryKind kind;
    int device;
    bool is_addresses = false;  // without memory behind them
};

std::mutex mutex;                             // guards the next
std::map<uintptr_t, Allocation> allocations;  // by address

std::atomic<bool> takes_addresses_alone = false;

// The allocation that [pointer, pointer + bytes) lies in.
std::optional<Allocation> find(const void* pointer, size_t bytes) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    const std::lock_guard lock(mutex);
    auto at = allocations.upper_bound(address);
    if (at == allocations.begin()) return {};
    --at;
    if (address + bytes > at->first + at->second.bytes) return {};
    return at->second;
}
bool is_device_memory(const void* pointer, size_t bytes) {
    const auto allocation = find(pointer, bytes);
    return allocation && allocation->kind != MemoryKind::pinned_host;
}
bool is_of_device(const void* pointer) {  // and no page of it can move to the host
    const auto allocation = find(pointer, 1);
    return allocation && allocation->kind == MemoryKind::device;
}
bool is_managed(const void* pointer, size_t bytes) {
    const auto allocation = find(pointer, bytes);
    return allocation && allocation->kind == MemoryKind::managed;
}
bool is_known(const void* pointer, size_t bytes) { return find(pointer, bytes).has_value(); }

// At addresses without memory a copy or memset that is not captured does nothing.
bool has_memory(const void* pointer) {
    if (!takes_addresses_alone) return true;
    const auto allocation = find(pointer, 1);
    return !allocation || !allocation->is_addresses;
}

constexpr size_t kHugePageBytes = 2 << 20;

constexpr size_t kNone = ~size_t{0};

// The number after `name` in a file, or the first one where no name is given; kNone: there is none.
size_t number_in(const std::string& path, const std::string& name = "") {
    std::ifstream file(path);
    if (!name.empty())
        for (std::string word; file >> word && word != name;) continue;
    size_t number = kNone;
    return file >> number ? number : kNone;
}

// What a control group leaves of its limit. Pages of files that were read, and not lately, make room.
size_t left_in_group(const std::string& group, bool version_2) {
    const size_t limit = number_in(group + (version_2 ? "/memory.max" : "/memory.limit_in_bytes"));  // kNone: "max"
    const size_t used = number_in(group + (version_2 ? "/memory.current" : "/memory.usage_in_bytes"));
    const size_t files = number_in(group + "/memory.stat", version_2 ? "inactive_file" : "total_inactive_file");
    if (limit == kNone || used == kNone) return kNone;
    const size_t kept = files == kNone ? used : used - std::min(used, files);
    return limit - std::min(limit, kept);
}

size_t available_at_start() {
    static const size_t bytes = available_bytes();
    return bytes;
}

// Of all devices, and of the host: it is the same memory.
size_t allocated_bytes() {
    size_t bytes = 0;
    const std::lock_guard lock(mutex);
    for (const auto& [address, allocation] : allocations) bytes += allocation.is_addresses ? 0 : allocation.bytes;
    return bytes;
}

cudaError_t allocate(void** pointer, size_t bytes, MemoryKind kind) {
    if (!pointer) return remember(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (const cudaError_t error = refuse_in_capture()) return error;
    if (bytes == 0) return cudaSuccess;
    if (takes_addresses_alone && kind == MemoryKind::device) {
        void* const addresses = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (addresses == MAP_FAILED) return remember(cudaErrorMemoryAllocation);
        const std::lock_guard lock(mutex);
        allocations[reinterpret_cast<uintptr_t>(addresses)] = {bytes, kind, current_device(), true};
        *pointer = addresses;
        return cudaSuccess;
    }
    // The operating system grants more memory than it has, and kills the process when the memory is used. A device
    // refuses at once, and so does this check. What has been taken counts even where it has not been used yet.
    if (bytes >= kHugePageBytes && (bytes > available_bytes() || bytes + allocated_bytes() > available_at_start()))
        return remember(cudaErrorMemoryAllocation);
    void* memory = nullptr;
    if (strict) {
        memory = guarded_allocate(bytes, kind == MemoryKind::pinned_host ? "pinned host memory"
                                         : kind == MemoryKind::managed   ? "managed memory"
                                                                         : "device memory");
    } else {
        const size_t alignment = bytes >= kHugePageBytes ? kHugePageBytes : 256;
        memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
        if (memory && bytes >= kHugePageBytes) madvise(memory, bytes, MADV_HUGEPAGE);
    }
    if (!memory) return remember(cudaErrorMemoryAllocation);
    const std::lock_guard lock(mutex);
    allocations[reinterpret_cast<uintptr_t>(memory)] = {bytes, kind, current_device()};
    *pointer = memory;
    return cudaSuccess;
}

cudaError_t release(void* pointer, bool pinned_host) {
    if (!pointer) return cudaSuccess;
    if (const cudaError_t error = refuse_in_capture()) return error;
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    Allocation allocation;
    {
        const std::lock_guard lock(mutex);
        const auto at = allocations.find(address);
        if (at == allocations.end() || (at->second.kind == MemoryKind::pinned_host) != pinned_host)
            return remember(cudaErrorInvalidValue);
        allocation = at->second;
    }
    if (strict) wait_for_device(allocation.device);  // cudaFree waits for the device
    if (count_end) count_end();
    {
        const std::lock_guard lock(mutex);
        allocations.erase(address);
    }
    const size_t bytes = allocation.bytes;
    if (allocation.is_addresses) return munmap(pointer, bytes), cudaSuccess;
    if (!strict) return std::free(pointer), cudaSuccess;
    forget_accesses(address, address + bytes);
    guarded_free(pointer);
    return cudaSuccess;
}

bool is_valid_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (!to || !from || kind > cudaMemcpyDefault) return false;
    if (kind == cudaMemcpyDefault)
        return is_known(to, bytes) || is_known(from, bytes);  // ordinary memory on one side only
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    return (!to_device || is_device_memory(to, bytes)) && (!from_device || is_device_memory(from, bytes));
}

}  // namespace

size_t available_bytes(const std::string& root) {
    size_t available = number_in(root + "/proc/meminfo", "MemAvailable:");
    if (available != kNone) available <<= 10;  // from KiB
    else {
        struct sysinfo info {};
        sysinfo(&info);
        available = uint64_t{info.freeram} * info.mem_unit;
    }
    // "4:memory:/docker/ab12", or of version 2 "0::/docker/ab12". Inside of a container its own group may be the root.
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const size_t controllers = line.find(':') + 1, path = line.find(":/");
        if (controllers == 0 || path == std::string::npos) continue;
        const bool version_2 = path == controllers;
        if (!version_2 && line.substr(controllers, path - controllers) != "memory") continue;
        const std::string mounted = root + (version_2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
        for (std::string group = line.substr(path + 1); !group.empty(); group.erase(group.rfind('/')))
            available = std::min(available, left_in_group(mounted + group, version_2));
        available = std::min(available, left_in_group(mounted, version_2));
    }
    return available;
}

void take_addresses_alone(bool on) { takes_addresses_alone = on; }

Extent allocation_around(uintptr_t address) {
    const std::lock_guard lock(mutex);
    auto at = allocations.upper_bound(address);
    if (at == allocations.begin()) return {};
    const auto& [begin, allocation] = *--at;
    if (address >= begin + allocation.bytes) return {};
    return {begin, begin + allocation.bytes, allocation.kind == MemoryKind::pinned_host, allocation.device};
}

}  // namespace cuda_cpu

using namespace cuda_cpu;

cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes, MemoryKind::device); }
cudaError_t cudaFree(void* pointer) { return release(pointer, false); }
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return allocate(pointer, bytes, MemoryKind::pinned_host); }
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    return allocate(pointer, bytes, MemoryKind::pinned_host);
}
cudaError_t cudaFreeHost(void* pointer) { return release(pointer, true); }
cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) {
    return allocate(pointer, bytes, MemoryKind::managed);
}
cudaError_t cudaMemPrefetchAsync(const void* pointer, size_t bytes, cudaMemLocation, unsigned, cudaStream_t stream,
                                 Place place) {
    if (bytes == 0 || !is_managed(pointer, bytes)) return remember(cudaErrorInvalidValue);
    if (runs_at_once(stream)) return cudaSuccess;
    // No page moves here. But on a GPU a prefetch must not move pages while a kernel uses them: so it counts as a
    // write, and strict mode finds a missing wait.
    return enqueue(stream, [] {}, {"cudaMemPrefetchAsync", place, {{pointer, bytes, true}}});
}
cudaError_t cudaMemAdvise(const void* pointer, size_t bytes, cudaMemoryAdvise, cudaMemLocation) {
    return bytes > 0 && is_managed(pointer, bytes) ? cudaSuccess : remember(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    struct sysinfo info {};
    sysinfo(&info);
    *total_bytes = uint64_t{info.totalram} * info.mem_unit;
    // As on a GPU that no other program uses: the memory that was free when the device was first asked, less the device
    // memory that it has given since. (The system counts a page only once it is touched.)
    const size_t at_start = available_at_start();
    size_t allocated = 0;
    const std::lock_guard lock(mutex);
    for (const auto& [address, allocation] : allocations)
        if (allocation.kind == MemoryKind::device && allocation.device == current_device())
            allocated += allocation.bytes;
    *free_bytes = at_start > allocated ? at_start - allocated : 0;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                            Place place) {
    if (bytes == 0) return cudaSuccess;
    if (!is_valid_copy(to, from, bytes, kind)) return remember(cudaErrorInvalidValue);
    if (count_end) count_end();
    const auto copy = [=] {
        if (has_memory(to) && has_memory(from)) std::memmove(to, from, bytes);
    };
    if (runs_at_once(stream)) return copy(), cudaSuccess;
    const Footprint footprint{"cudaMemcpyAsync", place, {{from, bytes, false}, {to, bytes, true}}};
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(stream, &capturing);
    // Pageable host memory is copied to a staging buffer before the call returns; pinned memory is read when the copy
    // runs, and so is all memory when a graph is launched.
    std::function<void()> work = copy;
    if (!is_known(from, bytes) && capturing == cudaStreamCaptureStatusNone) {
        const auto* first = static_cast<const char*>(from);
        work = [=, staging = std::make_shared<std::vector<char>>(first, first + bytes)] {
            if (has_memory(to)) std::memcpy(to, staging->data(), bytes);
        };
    }
    if (const cudaError_t error = enqueue(stream, std::move(work), footprint)) return error;
    // To pageable memory: returns when it is done.
    return capturing == cudaStreamCaptureStatusNone && !is_known(to, bytes) ? cudaStreamSynchronize(stream)
                                                                            : cudaSuccess;
}
// Of the calls without "Async" in their names only some wait. A copy from pageable memory returns when the bytes are in
// a staging buffer, a copy or a memset inside of the device at once: streams that do not block the default stream may
// come before them.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, Place place) {
    if (const cudaError_t error = refuse_in_capture()) return error;
    if (const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr, place)) return error;
    const bool staged = !is_known(from, bytes), inside = is_of_device(from) && is_of_device(to);
    return staged || inside ? cudaSuccess : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream, Place place) {
    if (bytes == 0) return cudaSuccess;
    if (!is_known(pointer, bytes)) return remember(cudaErrorInvalidValue);
    if (count_end) count_end();
    const auto set = [=] {
        if (has_memory(pointer)) std::memset(pointer, value, bytes);
    };
    if (runs_at_once(stream)) return set(), cudaSuccess;
    return enqueue(stream, set, {"cudaMemsetAsync", place, {{pointer, bytes, true}}});
}
cudaError_t cudaMemset(void* pointer, int value, size_t bytes, Place place) {
    if (const cudaError_t error = refuse_in_capture()) return error;
    if (const cudaError_t error = cudaMemsetAsync(pointer, value, bytes, nullptr, place)) return error;
    return is_of_device(pointer) ? cudaSuccess : cudaStreamSynchronize(nullptr);
}
