// cpu/runtime.cpp: errors and devices of the CPU device. Memory is in cpu/memory.cpp, streams and events in
// cpu/streams.cpp.
#include "device.h"

#include <omp.h>
#include <sys/utsname.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <utility>

namespace cuda_cpu {
namespace {

thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

// Asked for each time: a program that starts ranks as threads may ask for more devices (parallel/comm/ranks.cu).
int device_count() {
    const char* text = std::getenv("CUDA_CPU_DEVICES");
    if (!text || !*text) return 1;
    int count = 0, end = 0;
    std::sscanf(text, "%d%n", &count, &end);
    if (end == 0 || text[end] || count < 1) {
        std::fprintf(stderr, "CUDA_CPU_DEVICES=%s is not a number of devices, 1 or more\n", text);
        std::_Exit(2);
    }
    return count;
}

// What the device shows of itself. Code chooses by it, and CUDA_CPU_GPU lets it choose as on a GPU.
struct Shown {
    int multiprocessors = omp_get_max_threads(), major = 9, minor = 0, shared_kib = 227;
};
Shown shown() {
    Shown s;
    const char* text = std::getenv("CUDA_CPU_GPU");
    if (!text || !*text) return s;
    int end = 0;
    std::sscanf(text, "%d,%d.%d,%d%n", &s.multiprocessors, &s.major, &s.minor, &s.shared_kib, &end);
    if (end == 0 || text[end] || s.multiprocessors < 1 || s.major < 1 || s.minor < 0 || s.shared_kib < 48 ||
        s.shared_kib > 227) {
        std::fprintf(stderr,
                     "CUDA_CPU_GPU=%s is not the multiprocessors, the compute capability and the KiB of shared memory "
                     "of a block (48 to 227) of a GPU, as in 132,9.0,227\n",
                     text);
        std::_Exit(2);
    }
    return s;
}

std::string cpu_model() {
    std::ifstream info("/proc/cpuinfo");
    for (std::string line; std::getline(info, line);)
        if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
    utsname system{};  // ARM processors have no name there: "aarch64"
    return uname(&system) == 0 ? system.machine : "CPU";
}

// The dynamic shared memory of a block that cudaFuncSetAttribute has allowed a kernel, by its address and device.
std::map<std::pair<const void*, int>, size_t> allowed_shared;
std::mutex allowed_shared_mutex;

bool has_asked(const Launch& launch) {
    if (!launch.function) return true;  // which kernel it is cannot be told
    const std::lock_guard lock(allowed_shared_mutex);
    const auto allowed = allowed_shared.find({launch.function, device_of_thread});
    return allowed != allowed_shared.end() && launch.shared_bytes <= allowed->second;
}

size_t most_shared() { return size_t{1024} * shown().shared_kib; }

// The name of an error, and what it says.
std::pair<const char*, const char*> words_for(cudaError_t error) {
#define ERROR(name, text) \
    case name: return std::pair(#name, text)
    switch (error) {
        ERROR(cudaSuccess, "no error");
        ERROR(cudaErrorInvalidValue, "invalid argument");
        ERROR(cudaErrorMemoryAllocation, "out of memory");
        ERROR(cudaErrorInvalidConfiguration, "invalid grid or block size in a kernel launch");
        ERROR(cudaErrorNoDevice, "no device");
        ERROR(cudaErrorInvalidDevice, "no such device (CUDA_CPU_DEVICES says how many the CPU shows)");
        ERROR(cudaErrorInvalidResourceHandle, "invalid stream or event");
        ERROR(cudaErrorNotReady, "not finished yet");
        ERROR(cudaErrorLaunchFailure, "kernel launch failed");
        ERROR(cudaErrorNotSupported, "not supported on the CPU device");
        ERROR(cudaErrorIllegalState, "the stream is captured already, or is not captured");
        ERROR(cudaErrorStreamCaptureUnsupported, "not possible while a stream is captured");
        ERROR(cudaErrorStreamCaptureInvalidated, "the capture is void because of an earlier error");
        ERROR(cudaErrorStreamCaptureMerge, "two captures cannot become one");
        ERROR(cudaErrorStreamCaptureUnmatched, "the capture began in another stream");
        ERROR(cudaErrorStreamCaptureUnjoined, "a captured stream's work was not waited for by the first stream");
        ERROR(cudaErrorStreamCaptureIsolation, "captured work cannot wait for work outside of the capture");
        ERROR(cudaErrorStreamCaptureImplicit, "the default stream would have to wait for a captured stream");
        ERROR(cudaErrorCapturedEvent, "the event was recorded in a captured stream");
        ERROR(cudaErrorStreamCaptureWrongThread, "the capture began in another thread");
    }
#undef ERROR
    return {"unknown error", "unknown error"};
}

}  // namespace

cudaError_t allow_shared(const void* function, int bytes) {
    if (bytes < 0 || static_cast<size_t>(bytes) > most_shared()) return remember(cudaErrorInvalidValue);
    const std::lock_guard lock(allowed_shared_mutex);
    allowed_shared[{function, device_of_thread}] = static_cast<size_t>(bytes);
    return cudaSuccess;
}

int current_device() { return device_of_thread; }
cudaError_t remember(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

bool prepare_launch(Launch& launch) {
    const dim3 g = launch.grid, b = launch.block;
    const bool has_shape = g.x > 0 && g.y > 0 && g.z > 0 && g.x <= INT_MAX && g.y <= 65535 && g.z <= 65535 && b.x > 0 &&
                           b.y > 0 && b.z > 0 && b.z <= 64 && uint64_t{b.x} * b.y * b.z <= 1024;
    if (!has_shape) last_error = cudaErrorInvalidConfiguration;
    if (!has_shape || (launch.shared_bytes <= kSharedUnasked && !strict)) return has_shape;
    launch.most_shared = has_asked(launch) ? most_shared() : kSharedUnasked;
    const bool has_room = launch.shared_bytes <= launch.most_shared;
    if (!has_room) last_error = cudaErrorInvalidValue;
    return has_room;
}

}  // namespace cuda_cpu

using namespace cuda_cpu;

const char* cudaGetErrorName(cudaError_t error) { return words_for(error).first; }
const char* cudaGetErrorString(cudaError_t error) { return words_for(error).second; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
    if (!count) return remember(cudaErrorInvalidValue);
    return *count = device_count(), cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
    device_of_thread = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    if (!device) return remember(cudaErrorInvalidValue);
    return *device = device_of_thread, cudaSuccess;
}

// Without the name and the memory, which are read from files and asked of the system: an attribute may be asked for in
// each launch.
static cudaDeviceProp properties_that_stay() {
    const Shown s = shown();
    cudaDeviceProp properties{};
    properties.sharedMemPerBlock = 48 << 10;
    properties.sharedMemPerBlockOptin = size_t{1024} * s.shared_kib;
    properties.multiProcessorCount = s.multiprocessors;
    properties.major = s.major;
    properties.minor = s.minor;
    properties.warpSize = 32;
    properties.maxThreadsPerBlock = 1024;
    properties.l2CacheSize = 32 << 20;
    return properties;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
    *properties = properties_that_stay();
    const std::string name = "CPU device (" + cpu_model() + ", " + std::to_string(omp_get_max_threads()) + " threads)";
    std::snprintf(properties->name, sizeof properties->name, "%s", name.c_str());
    size_t free_bytes = 0;
    cudaMemGetInfo(&free_bytes, &properties->totalGlobalMem);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
    const cudaDeviceProp properties = properties_that_stay();
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
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
