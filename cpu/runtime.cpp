// cpu/runtime.cpp: devices, memory, streams and events of the CPU device.
//
// By default a stream runs its work at once, in order. In strict mode (CUDA_CPU_STRICT=seed) work is only noted down,
// with what it has to wait for: the work before it in its stream, the events its stream was told to wait for, and the
// legacy default stream's rule (it waits for all blocking streams and they for it). When the program waits for
// something, work that is allowed to run is picked at random until that something is done. So a missing event wait
// shows as a wrong result, and work that nobody waits for does not happen.
#include "device.h"

#include <omp.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <chrono>
#include <deque>
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
    int device = 0;
    std::function<void()> work;
    std::function<bool()> may_run;  // what it waits for beside other operations; empty: nothing
    std::vector<std::shared_ptr<Operation>> after;
    enum { waiting, running, done } state = waiting;
    uint64_t mark = 0;       // see Wait
    Clock::time_point time;  // when it was done
    bool ready() const {
        return state == waiting &&
               std::all_of(after.begin(), after.end(), [](const auto& earlier) { return earlier->state == done; }) &&
               (!may_run || may_run());
    }
};

struct Stream {
    int device = 0;
    unsigned number = 0;   // in the order of creation; 0: a default stream
    bool blocking = true;  // takes part in the legacy default stream's rule
    std::shared_ptr<Operation> last;
    std::deque<std::shared_ptr<Operation>> queue;  // what is not done yet
};

struct Event {
    bool timed = true;
    std::shared_ptr<Operation> recorded;  // an operation without work, in the stream that it was last recorded in
};

namespace {

struct DeviceState {
    Stream default_stream;
    std::vector<Stream*> streams;
    bool idle() const {
        return default_stream.queue.empty() &&
               std::all_of(streams.begin(), streams.end(), [](const Stream* stream) { return stream->queue.empty(); });
    }
};

enum class MemoryKind { device, pinned_host, managed };

struct Allocation {
    size_t bytes;
    MemoryKind kind;
    int device;
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

// Asked for each time: a program that starts ranks as threads may ask for more devices (parallel/comm/ranks.cu).
int device_count() {
    const char* text = std::getenv("CUDA_CPU_DEVICES");
    return text ? std::max(1, std::atoi(text)) : 1;
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
    operation->device = stream.device;
    operation->work = std::move(work);
    if (stream.last) operation->after.push_back(stream.last);
    if (&stream == &state.default_stream) {
        for (Stream* other : state.streams)
            if (other->blocking && other->last) operation->after.push_back(other->last);
    } else if (stream.blocking && state.default_stream.last) {
        operation->after.push_back(state.default_stream.last);
    }
    stream.last = operation;
    stream.queue.push_back(operation);
    return operation;
}

// How the next operation is chosen during one wait. Each of the three finds mistakes that the others seldom find:
// only what the program waits for (who forgot to wait for the rest?); by a random priority of each stream, so that one
// runs far ahead of another (who overwrites what is still read?); at random each time.
struct Interleaving {
    enum { needed_only, by_stream, any } kind;
    uint64_t salt = strict_random();
    Interleaving() {
        const uint64_t coin = strict_random_below(4);
        kind = coin < 2 ? needed_only : coin == 2 ? by_stream : any;
    }
    size_t pick(const std::vector<Stream*>& ready) const {
        if (kind != by_stream) return strict_random_below(ready.size());
        const auto priority = [&](const Stream* stream) { return (stream->number ^ salt) * 0x9e3779b97f4a7c15u; };
        const auto less = [&](const Stream* a, const Stream* b) { return priority(a) < priority(b); };
        return static_cast<size_t>(std::max_element(ready.begin(), ready.end(), less) - ready.begin());
    }
};

// The program waits for one operation, or for all of a device if there is no such target.
class Wait {
  public:
    Wait(int device, std::shared_ptr<Operation> target) : device_(device), target_(std::move(target)) { mark_needed(); }

    bool finished() const { return target_ ? target_->state == Operation::done : state_of(device_).idle(); }

    // Runs one operation, with the mutex released; false if none may run. The work of other devices is only touched if
    // it is needed: they have OS threads of their own to drive them (a rank each), and two ranks that wait for each
    // other must not end up in the hands of one thread.
    bool run_one(std::unique_lock<std::mutex>& lock) {
        std::vector<Stream*> ready;
        const auto consider = [&](Stream& stream) {
            if (stream.queue.empty() || !stream.queue.front()->ready()) return;
            const bool mine = stream.device == device_ && !(target_ && interleaving_.kind == Interleaving::needed_only);
            if (mine || stream.queue.front()->mark == mark_) ready.push_back(&stream);
        };
        for (auto& [index, state] : devices) {
            consider(state.default_stream);
            for (Stream* stream : state.streams) consider(*stream);
        }
        if (ready.empty()) {
            mark_needed();  // others may have added work, or marked it for themselves
            return false;
        }
        Stream& stream = *ready[interleaving_.pick(ready)];
        const auto operation = stream.queue.front();
        operation->state = Operation::running;
        lock.unlock();
        if (operation->work) operation->work();
        lock.lock();
        operation->state = Operation::done;
        operation->time = Clock::now();
        operation->work = nullptr;
        operation->may_run = nullptr;
        operation->after.clear();
        stream.queue.pop_front();
        return true;
    }

  private:
    void mark_needed() {
        static uint64_t n_marks = 0;
        mark_ = ++n_marks;
        std::vector<Operation*> open;
        const auto visit = [&](const std::shared_ptr<Operation>& operation) {
            if (operation->state == Operation::done || operation->mark == mark_) return;
            operation->mark = mark_;
            open.push_back(operation.get());
        };
        if (target_) visit(target_);
        else {
            for (const auto& operation : state_of(device_).default_stream.queue) visit(operation);
            for (const Stream* stream : state_of(device_).streams)
                for (const auto& operation : stream->queue) visit(operation);
        }
        while (!open.empty()) {
            const Operation* operation = open.back();
            open.pop_back();
            for (const auto& earlier : operation->after) visit(earlier);
        }
    }

    const int device_;
    const std::shared_ptr<Operation> target_;
    const Interleaving interleaving_;
    uint64_t mark_ = 0;  // what mark_needed has written last
};

void run_until_done(int device, std::shared_ptr<Operation> target) {
    std::unique_lock lock(mutex);
    Wait wait(device, std::move(target));
    while (!wait.finished()) {
        if (wait.run_one(lock)) continue;
        lock.unlock();  // another OS thread is running what we wait for
        std::this_thread::yield();
        lock.lock();
    }
}
void wait_for(const std::shared_ptr<Operation>& target) {
    if (target) run_until_done(target->device, target);
}
void wait_for_device(int device) { run_until_done(device, nullptr); }

// Is it done? If not, one operation is run before the answer: a program that asks until it is done must get there.
bool poll(const std::shared_ptr<Operation>& operation) {
    std::unique_lock lock(mutex);
    if (!operation || operation->state == Operation::done) return true;
    Wait(operation->device, operation).run_one(lock);
    return false;
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
    return allocation && allocation->kind != MemoryKind::pinned_host;
}
bool is_managed(const void* pointer, size_t bytes) {
    const std::lock_guard lock(mutex);
    const Allocation* allocation = find(pointer, bytes);
    return allocation && allocation->kind == MemoryKind::managed;
}
bool is_known(const void* pointer, size_t bytes) {
    const std::lock_guard lock(mutex);
    return find(pointer, bytes) != nullptr;
}

constexpr size_t kHugePageBytes = 2 << 20;

size_t available_bytes() {
    std::ifstream info("/proc/meminfo");
    for (std::string word; info >> word;)
        if (size_t kib; word == "MemAvailable:" && info >> kib) return kib << 10;
    struct sysinfo fallback {};
    sysinfo(&fallback);
    return uint64_t{fallback.freeram} * fallback.mem_unit;
}

cudaError_t allocate(void** pointer, size_t bytes, MemoryKind kind) {
    if (!pointer) return remember(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    // The system promises more than it has, and kills the process when it cannot keep it. A device says no at once.
    if (bytes >= kHugePageBytes && bytes > available_bytes()) return remember(cudaErrorMemoryAllocation);
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
    allocations[reinterpret_cast<uintptr_t>(memory)] = {bytes, kind, current_device};
    *pointer = memory;
    return cudaSuccess;
}

cudaError_t release(void* pointer, bool pinned_host) {
    if (!pointer) return cudaSuccess;
    int device = 0;
    {
        const std::lock_guard lock(mutex);
        const auto at = allocations.find(reinterpret_cast<uintptr_t>(pointer));
        if (at == allocations.end() || (at->second.kind == MemoryKind::pinned_host) != pinned_host)
            return remember(cudaErrorInvalidValue);
        device = at->second.device;
    }
    if (strict) wait_for_device(device);  // cudaFree waits for the device
    {
        const std::lock_guard lock(mutex);
        allocations.erase(reinterpret_cast<uintptr_t>(pointer));
    }
    if (strict) guarded_free(pointer);
    else std::free(pointer);
    return cudaSuccess;
}

bool valmark_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (!to || !from) return false;
    if (kind == cudaMemcpyDefault)
        return is_known(to, bytes) || is_known(from, bytes);  // ordinary memory on one side only
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
void enqueue_when(cudaStream_t stream, std::function<bool()> may_run, std::function<void()> work) {
    if (!strict) {
        while (!may_run()) std::this_thread::yield();
        return work();
    }
    const std::lock_guard lock(mutex);
    note(resolve(stream), std::move(work))->may_run = std::move(may_run);
}
bool runs_at_once() { return !strict; }

bool launch_is_valid(const Launch& launch) {
    const dim3 g = launch.grid, b = launch.block;
    const bool valid = g.x > 0 && g.y > 0 && g.z > 0 && g.x <= INT_MAX && g.y <= 65535 && g.z <= 65535 && b.x > 0 &&
                       b.y > 0 && b.z > 0 && b.z <= 64 && uint64_t{b.x} * b.y * b.z <= 1024 &&
                       launch.shared_bytes <= 227 * 1024;
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
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = static_cast<int>(properties.sharedMemPerBlockOptin);
            break;
        case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
        case cudaDevAttrConcurrentManagedAccess: *value = 1; break;
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
cudaError_t cudaMemPrefetchAsync(const void* pointer, size_t bytes, cudaMemLocation, unsigned, cudaStream_t stream) {
    if (!is_managed(pointer, bytes)) return remember(cudaErrorInvalidValue);
    enqueue(stream, [] {});
    return cudaSuccess;
}
cudaError_t cudaMemAdvise(const void* pointer, size_t bytes, cudaMemoryAdvise, cudaMemLocation) {
    return is_managed(pointer, bytes) ? cudaSuccess : remember(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    struct sysinfo info {};
    sysinfo(&info);
    *total_bytes = uint64_t{info.totalram} * info.mem_unit;
    // As on a GPU of its own: what there was when the program started, less what it has allocated since. (The system counts
    // a page only once it is touched.)
    static const size_t at_start = available_bytes();
    size_t allocated = 0;
    const std::lock_guard lock(mutex);
    for (const auto& [address, allocation] : allocations)
        if (allocation.kind == MemoryKind::device && allocation.device == current_device) allocated += allocation.bytes;
    *free_bytes = at_start > allocated ? at_start - allocated : 0;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    if (!valmark_copy(to, from, bytes, kind)) return remember(cudaErrorInvalidValue);
    if (!strict) return std::memmove(to, from, bytes), cudaSuccess;
    // Pageable host memory is copied to a staging buffer before the call returns; pinned memory is read when the copy
    // runs.
    if (!is_known(from, bytes)) {
        auto staged =
            std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
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
    if (!is_known(pointer, bytes)) return remember(cudaErrorInvalidValue);
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
    static unsigned n_streams = 0;
    const std::lock_guard lock(mutex);
    (*stream)->number = ++n_streams;
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
    if (!strict) return cudaSuccess;
    std::shared_ptr<Operation> last;
    {
        const std::lock_guard lock(mutex);
        last = resolve(stream).last;
    }
    return poll(last) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    if (!strict) return cudaSuccess;
    const std::lock_guard lock(mutex);
    const auto operation = note(resolve(stream), nullptr);
    if (event->recorded) operation->after.push_back(event->recorded);
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
    delete event;  // the operation that it was recorded as lives on by itself
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    if (!strict) {
        event->recorded = std::make_shared<Operation>();
        event->recorded->state = Operation::done;
        event->recorded->time = Clock::now();
        return cudaSuccess;
    }
    const std::lock_guard lock(mutex);
    event->recorded = note(resolve(stream), nullptr);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    wait_for(event->recorded);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    return poll(event->recorded) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (!start || !end || !start->recorded || !end->recorded || !start->timed || !end->timed)
        return remember(cudaErrorInvalidResourceHandle);
    if (start->recorded->state != Operation::done || end->recorded->state != Operation::done) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(end->recorded->time - start->recorded->time).count();
    return cudaSuccess;
}
