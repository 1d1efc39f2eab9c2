// cpu/runtime.cpp: devices, memory, streams and events of the CPU device.
//
// By default a stream runs its work at once, in order. In strict mode (CUDA_CPU_STRICT=seed) work is only noted down, with
// what it has to wait for: the work before it in its stream, the events its stream was told to wait for, and the legacy
// default stream's rule (it waits for all blocking streams and they for it). When the program waits for something, work
// that is allowed to run is picked at random until that something is done. So a missing event wait shows as a wrong result.
#include "device.h"

#include <omp.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace cuda_cpu {

using Clock = std::chrono::steady_clock;

// A piece of work in a stream and what must be done before it.
struct Operation {
    std::function<void()> work;
    std::vector<std::shared_ptr<Operation>> after;
    enum { waiting, running, done } state = waiting;
    bool ready() const {
        return state == waiting &&
               std::all_of(after.begin(), after.end(), [](const auto& earlier) { return earlier->state == done; });
    }
};

struct Stream {
    int device = 0;
    bool blocking = true;  // takes part in the legacy default stream's rule
    std::shared_ptr<Operation> last;
};

struct Event {
    bool timed = true;
    std::shared_ptr<Operation> recorded;  // strict mode
    bool was_recorded = false;
    Clock::time_point time;
};

namespace {

struct DeviceState {
    Stream default_stream;
    std::vector<Stream*> streams;
    std::vector<std::shared_ptr<Operation>> pending;
};

struct Allocation {
    size_t bytes;
    bool pinned_host;
};

std::mutex mutex;  // guards everything below
std::map<int, DeviceState> devices;
std::map<uintptr_t, Allocation> allocations;  // by address

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t remember(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

int device_count() {
    static const int count = [] {
        const char* text = std::getenv("CUDA_CPU_DEVICES");
        return text ? std::max(1, std::atoi(text)) : 1;
    }();
    return count;
}

DeviceState& state_of(int device) {  // with the mutex held
    DeviceState& state = devices[device];
    state.default_stream.device = device;
    return state;
}

Stream& resolve(cudaStream_t stream) { return stream ? *stream : state_of(current_device).default_stream; }

// Notes work down in a stream; with the mutex held.
std::shared_ptr<Operation> note(Stream& stream, std::function<void()> work) {
    DeviceState& state = state_of(stream.device);
    auto operation = std::make_shared<Operation>();
    operation->work = std::move(work);
    if (stream.last) operation->after.push_back(stream.last);
    if (&stream == &state.default_stream) {
        for (Stream* other : state.streams)
            if (other->blocking && other->last) operation->after.push_back(other->last);
    } else if (stream.blocking && state.default_stream.last) {
        operation->after.push_back(state.default_stream.last);
    }
    stream.last = operation;
    state.pending.push_back(operation);
    return operation;
}

// Runs noted work in a random allowed order until `finished()`.
template <class Finished>
void run_until(Finished finished) {
    std::unique_lock lock(mutex);
    while (!finished()) {
        std::vector<std::shared_ptr<Operation>> ready;
        for (auto& [index, state] : devices)
            for (auto& operation : state.pending)
                if (operation->ready()) ready.push_back(operation);
        if (ready.empty()) {  // another thread is running what we wait for
            lock.unlock();
            std::this_thread::yield();
            lock.lock();
            continue;
        }
        const auto operation = ready[strict_random_below(ready.size())];
        operation->state = Operation::running;
        lock.unlock();
        if (operation->work) operation->work();
        lock.lock();
        operation->state = Operation::done;
        operation->after.clear();
        for (auto& [index, state] : devices) std::erase(state.pending, operation);
    }
}

void wait_for(std::shared_ptr<Operation> operation) {
    if (operation) run_until([&] { return operation->state == Operation::done; });
}
void wait_for_device(int device) {
    run_until([&] { return state_of(device).pending.empty(); });
}

// The allocation that [pointer, pointer + bytes) lies in; with the mutex held.
const Allocation* find(const void* pointer, size_t bytes) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    auto at = allocations.upper_bound(address);
    if (at == allocations.begin()) return nullptr;
    --at;
    return address + bytes <= at->first + at->second.bytes ? &at->second : nullptr;
}
bool is_device_memory(const void* pointer, size_t bytes) {
    const std::lock_guard lock(mutex);
    const Allocation* allocation = find(pointer, bytes);
    return allocation && !allocation->pinned_host;
}
bool is_known(const void* pointer, size_t bytes) {
    const std::lock_guard lock(mutex);
    return find(pointer, bytes) != nullptr;
}

cudaError_t allocate(void** pointer, size_t bytes, bool pinned_host) {
    if (!pointer) return remember(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    struct sysinfo info {};
    if (sysinfo(&info) == 0 && bytes > uint64_t{info.totalram} * info.mem_unit) return remember(cudaErrorMemoryAllocation);
    void* memory = strict ? guarded_allocate(bytes) : std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!memory) return remember(cudaErrorMemoryAllocation);
    const std::lock_guard lock(mutex);
    allocations[reinterpret_cast<uintptr_t>(memory)] = {bytes, pinned_host};
    *pointer = memory;
    return cudaSuccess;
}

cudaError_t release(void* pointer, bool pinned_host) {
    if (!pointer) return cudaSuccess;
    if (strict) wait_for_device(current_device);  // cudaFree waits for the device
    size_t bytes = 0;
    {
        const std::lock_guard lock(mutex);
        const auto at = allocations.find(reinterpret_cast<uintptr_t>(pointer));
        if (at == allocations.end() || at->second.pinned_host != pinned_host) return remember(cudaErrorInvalidValue);
        bytes = at->second.bytes;
        allocations.erase(at);
    }
    if (strict)
        guarded_free(pointer, bytes);
    else
        std::free(pointer);
    return cudaSuccess;
}

bool valid_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (!to || !from) return false;
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    return (!to_device || is_device_memory(to, bytes)) && (!from_device || is_device_memory(from, bytes));
}

std::string cpu_model() {
    std::ifstream info("/proc/cpuinfo");
    for (std::string line; std::getline(info, line);)
        if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
    return "CPU";
}

}  // namespace

void enqueue(cudaStream_t stream, std::function<void()> work) {
    if (!strict) return work();
    const std::lock_guard lock(mutex);
    note(resolve(stream), std::move(work));
}
bool runs_at_once() { return !strict; }

bool launch_is_valid(const Launch& launch) {
    const dim3 g = launch.grid, b = launch.block;
    const bool valid = g.x > 0 && g.y > 0 && g.z > 0 && g.x <= INT_MAX && g.y <= 65535 && g.z <= 65535 && b.x > 0 && b.y > 0 &&
                       b.z > 0 && b.z <= 64 && uint64_t{b.x} * b.y * b.z <= 1024 && launch.shared_bytes <= 227 * 1024;
    if (!valid) last_error = cudaErrorInvalidConfiguration;
    return valid;
}

}  // namespace cuda_cpu

using namespace cuda_cpu;

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
        case cudaErrorNotSupported: return "cudaErrorNotSupported";
    }
    return "unknown error";
}
const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid grid, block or shared memory size in a kernel launch";
        case cudaErrorNoDevice: return "no device";
        case cudaErrorInvalidDevice: return "no such device (CUDA_CPU_DEVICES says how many the CPU shows)";
        case cudaErrorInvalidResourceHandle: return "invalid stream or event";
        case cudaErrorNotReady: return "not finished yet";
        case cudaErrorLaunchFailure: return "kernel launch failed";
        case cudaErrorNotSupported: return "not supported on the CPU device";
    }
    return "unknown error";
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) { return *count = device_count(), cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
    *properties = {};
    const std::string name = "CPU device (" + cpu_model() + ", " + std::to_string(omp_get_max_threads()) + " threads)";
    std::snprintf(properties->name, sizeof properties->name, "%s", name.c_str());
    size_t free_bytes = 0;
    cudaMemGetInfo(&free_bytes, &properties->totalGlobalMem);
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->multiProcessorCount = omp_get_max_threads();
    properties->major = 9;
    properties->minor = 0;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->l2CacheSize = 32 << 20;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp properties;
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, device)) return error;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
        case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(properties.sharedMemPerBlockOptin); break;
        case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
        default: return remember(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    if (strict) wait_for_device(current_device);
    return cudaSuccess;
}
cudaError_t cudaDeviceReset() { return cudaDeviceSynchronize(); }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes, false); }
cudaError_t cudaFree(void* pointer) { return release(pointer, false); }
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return allocate(pointer, bytes, true); }
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) { return allocate(pointer, bytes, true); }
cudaError_t cudaFreeHost(void* pointer) { return release(pointer, true); }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    struct sysinfo info {};
    sysinfo(&info);
    *total_bytes = uint64_t{info.totalram} * info.mem_unit;
    *free_bytes = uint64_t{info.freeram + info.bufferram} * info.mem_unit;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    if (!valid_copy(to, from, bytes, kind)) return remember(cudaErrorInvalidValue);
    if (!strict) return std::memmove(to, from, bytes), cudaSuccess;
    // Pageable host memory is copied to a staging buffer before the call returns; pinned memory is read when the copy runs.
    if (!is_known(from, bytes)) {
        auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
        enqueue(stream, [=] { std::memcpy(to, staged->data(), bytes); });
    } else {
        enqueue(stream, [=] { std::memmove(to, from, bytes); });
    }
    if (!is_known(to, bytes)) return cudaStreamSynchronize(stream);  // to pageable memory: returns when it is there
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr)) return error;
    return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    if (!is_device_memory(pointer, bytes)) return remember(cudaErrorInvalidValue);
    enqueue(stream, [=] { std::memset(pointer, value, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
    if (const cudaError_t error = cudaMemsetAsync(pointer, value, bytes, nullptr)) return error;
    return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    *stream = new Stream;
    (*stream)->device = current_device;
    (*stream)->blocking = !(flags & cudaStreamNonBlocking);
    const std::lock_guard lock(mutex);
    state_of(current_device).streams.push_back(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (!stream) return remember(cudaErrorInvalidResourceHandle);
    cudaStreamSynchronize(stream);
    const std::lock_guard lock(mutex);
    std::erase(state_of(stream->device).streams, stream);
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (!strict) return cudaSuccess;
    std::shared_ptr<Operation> last;
    {
        const std::lock_guard lock(mutex);
        last = resolve(stream).last;
        if (!stream) last = note(resolve(stream), nullptr);  // the legacy stream waits for the blocking ones
    }
    wait_for(last);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    const std::lock_guard lock(mutex);
    const auto& last = resolve(stream).last;
    return !last || last->state == Operation::done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    if (!strict) return cudaSuccess;
    const std::lock_guard lock(mutex);
    const auto earlier = event->recorded;
    const auto operation = note(resolve(stream), nullptr);
    if (earlier) operation->after.push_back(earlier);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
    enqueue(stream, [=] { function(argument); });
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    *event = new Event;
    (*event)->timed = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    wait_for(event->recorded);  // its work writes the time into it
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    event->was_recorded = true;
    if (!strict) return event->time = Clock::now(), cudaSuccess;
    const std::lock_guard lock(mutex);
    event->recorded = note(resolve(stream), [event] { event->time = Clock::now(); });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    wait_for(event->recorded);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    const std::lock_guard lock(mutex);
    return !event->recorded || event->recorded->state == Operation::done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (!start || !end || !start->was_recorded || !end->was_recorded || !start->timed || !end->timed)
        return remember(cudaErrorInvalidResourceHandle);
    if (cudaEventQuery(end) != cudaSuccess || cudaEventQuery(start) != cudaSuccess) return remember(cudaErrorNotReady);
    *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
    return cudaSuccess;
}
