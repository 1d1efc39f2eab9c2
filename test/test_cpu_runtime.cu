// The CUDA runtime on the CPU: memory, copies, streams, events, host functions, devices.
//
// Plain CUDA, so that a GPU can say whether the tests are right. What must hold under any order of streams is tested
// here, also in strict mode, where the order is drawn; that a wrong order is found is test_cpu_strict.cu's subject.
#include "layers/layers.h"
#include "program.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <thread>

#ifdef CUDA_ON_CPU
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#endif

namespace {

struct Stream {
    cudaStream_t stream;
    explicit Stream(unsigned flags = cudaStreamNonBlocking) {
        REQUIRE(cudaStreamCreateWithFlags(&stream, flags) == cudaSuccess);
    }
    Stream(const Stream&) = delete;
    ~Stream() { cudaStreamDestroy(stream); }
    operator cudaStream_t() const { return stream; }
};
struct Event {
    cudaEvent_t event;
    Event() { REQUIRE(cudaEventCreate(&event) == cudaSuccess); }
    Event(const Event&) = delete;
    ~Event() { cudaEventDestroy(event); }
    operator cudaEvent_t() const { return event; }
};
struct Ints {  // zeros
    int* data = nullptr;
    size_t n;
    explicit Ints(size_t n_) : n(n_) {
        REQUIRE(cudaMalloc(&data, n * sizeof(int)) == cudaSuccess);
        REQUIRE(cudaMemset(data, 0, n * sizeof(int)) == cudaSuccess);
        REQUIRE(cudaDeviceSynchronize() == cudaSuccess);  // a memset does not wait
    }
    Ints(const Ints&) = delete;
    ~Ints() { cudaFree(data); }
    int at(size_t i) const {
        int value = 0;
        REQUIRE(cudaMemcpy(&value, data + i, sizeof(int), cudaMemcpyDeviceToHost) == cudaSuccess);
        return value;
    }
};

// x = a x + b modulo 2^32: the order of two such updates shows in the result.
__global__ void update_kernel(int* x, unsigned a, unsigned b) {
    x[threadIdx.x] = static_cast<int>(a * static_cast<unsigned>(x[threadIdx.x]) + b);
}
__global__ void copy_kernel(int* to, const int* from, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) to[i] = from[i];
}

void must(cudaError_t status) { REQUIRE(status == cudaSuccess); }
bool fails(cudaError_t status) {
    cudaGetLastError();
    return status != cudaSuccess;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Memory

TEST_CASE("memory is aligned, freed once, and refused when there is not enough", "[cpu]") {
    char *a = nullptr, *b = nullptr;
    must(cudaMalloc(&a, 1));
    must(cudaMalloc(&b, 3 << 20));
    CHECK(reinterpret_cast<uintptr_t>(a) % 16 == 0);
    CHECK(reinterpret_cast<uintptr_t>(b) % 16 == 0);
    must(cudaMemset(b, 7, 3 << 20));
    char last = 0;
    must(cudaMemcpy(&last, b + (3 << 20) - 1, 1, cudaMemcpyDeviceToHost));
    CHECK(last == 7);
    must(cudaFree(a));
    must(cudaFree(b));
    must(cudaFree(nullptr));
    must(cudaFreeHost(nullptr));

    size_t free_bytes = 0, total_bytes = 0;
    must(cudaMemGetInfo(&free_bytes, &total_bytes));
    CHECK((free_bytes > 0 && free_bytes <= total_bytes));
    CHECK(cudaMalloc(&a, total_bytes * 2) == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaSuccess);
}

#ifdef CUDA_ON_CPU
namespace cuda_cpu {
size_t available_bytes(const std::string& root);  // cpu/memory.cpp
}

TEST_CASE("the memory that can be had is the machine's, less where a control group has less", "[cpu]") {
    const TempFolder root;
    const auto write = [&](const std::string& path, const std::string& text) {
        std::filesystem::create_directories(std::filesystem::path(root / path).parent_path());
        spit(root / path, text);
    };
    const auto available = [&] { return cuda_cpu::available_bytes(root.path + "/"); };
    write("proc/meminfo", "MemTotal:       9000 kB\nMemAvailable:   4000 kB\nSwapTotal: 7 kB\n");
    const size_t machine = size_t{4000} << 10;
    CHECK(available() == machine);
    write("proc/self/cgroup", "7:cpu,cpuacct:/a\n4:memory:/docker/ab\n0::/\n");
    CHECK(available() == machine);  // no group says anything

    // Version 1: the group lies in another one; inside of a container it is the root.
    const std::string v1 = "sys/fs/cgroup/memory/";
    write(v1 + "docker/ab/memory.limit_in_bytes", "9223372036854771712\n");
    write(v1 + "docker/ab/memory.usage_in_bytes", "500000\n");
    CHECK(available() == machine);
    write(v1 + "docker/memory.limit_in_bytes", "3000000\n");
    write(v1 + "docker/memory.usage_in_bytes", "1000000\n");
    CHECK(available() == 2000000);
    write(v1 + "docker/memory.stat", "cache 5\ninactive_file 1\ntotal_inactive_file 400000\n");
    CHECK(available() == 2400000);
    write(v1 + "memory.limit_in_bytes", "1000\n");
    write(v1 + "memory.usage_in_bytes", "2000\n");
    CHECK(available() == 0);

    write("proc/self/cgroup", "0::/user/x\n");
    write("sys/fs/cgroup/memory.max", "max\n");
    write("sys/fs/cgroup/memory.current", "800000\n");
    CHECK(available() == machine);
    write("sys/fs/cgroup/user/x/memory.max", "1000000\n");
    write("sys/fs/cgroup/user/x/memory.current", "300000\n");
    write("sys/fs/cgroup/user/x/memory.stat", "anon 200000\ninactive_file 50000\n");
    CHECK(available() == 750000);
}

// No allocation is larger than what is free, all of them are. None is used.
TEST_CASE("memory that was taken and not used counts as taken", "[cpu]") {
    if (std::getenv("CUDA_CPU_STRICT")) SKIP_TEST("strict mode writes to all memory");
    size_t free_bytes = 0, total_bytes = 0;
    must(cudaMemGetInfo(&free_bytes, &total_bytes));
    std::vector<char*> taken;
    char* one = nullptr;
    while (taken.size() < 4 && cudaMalloc(&one, free_bytes / 3) == cudaSuccess) taken.push_back(one);
    CHECK(taken.size() <= 3);
    for (char* memory : taken) must(cudaFree(memory));
    cudaGetLastError();
}

TEST_CASE("copies to where no memory is are errors, not faults", "[cpu]") {
    Ints device(10);
    int host[20] = {}, *pinned = nullptr;
    must(cudaMallocHost(&pinned, 40));
    CHECK(fails(cudaMemcpy(host, host + 10, 4, cudaMemcpyHostToDevice)));  // not the device's
    CHECK(fails(cudaMemcpy(host, host + 10, 4, cudaMemcpyDeviceToHost)));
    CHECK(fails(cudaMemcpy(device.data, pinned, 4, cudaMemcpyDeviceToDevice)));
    CHECK(fails(cudaMemcpy(device.data, host, 11 * 4, cudaMemcpyHostToDevice)));  // longer than the allocation
    CHECK(fails(cudaMemcpy(host, device.data + 5, 6 * 4, cudaMemcpyDeviceToHost)));
    CHECK(fails(cudaMemcpy(nullptr, device.data, 4, cudaMemcpyDeviceToHost)));
    CHECK(fails(cudaMemcpy(host, host + 10, 4, static_cast<cudaMemcpyKind>(7))));
    CHECK(fails(cudaMemset(device.data + 9, 0, 8)));
    CHECK(fails(cudaMemset(host, 0, 8)));
    CHECK(fails(cudaFree(host)));
    CHECK(fails(cudaFree(device.data + 1)));
    CHECK(fails(cudaFree(pinned)));  // that is cudaFreeHost's
    CHECK(fails(cudaFreeHost(device.data)));
    must(cudaMemcpy(host, device.data + 5, 5 * 4, cudaMemcpyDeviceToHost));
    must(cudaMemcpy(host, device.data, 0, cudaMemcpyDeviceToHost));
    must(cudaMemcpy(device.data, device.data + 5, 5 * 4, cudaMemcpyDeviceToDevice));
    must(cudaMemcpy(device.data, pinned, 40, cudaMemcpyDefault));
    must(cudaMemset(pinned, 0, 40));
    CHECK(fails(cudaMemcpy(host, host + 10, 4, cudaMemcpyDefault)));
    CHECK(fails(cudaMemset(pinned + 9, 0, 8)));
    must(cudaFreeHost(pinned));
}
#endif

TEST_CASE("managed memory: the host's and the device's", "[cpu]") {
    int concurrent = 0, *managed = nullptr;
    must(cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, 0));
    if (!concurrent) SKIP_TEST("needs a device that shares pages with the host while kernels run");
    size_t free_before = 0, free_after = 0, total_bytes = 0;
    must(cudaMemGetInfo(&free_before, &total_bytes));
    must(cudaMallocManaged(reinterpret_cast<void**>(&managed), 400));
    must(cudaMemGetInfo(&free_after, &total_bytes));
    Stream stream;
    for (int i = 0; i < 100; ++i) managed[i] = i;
#if CUDART_VERSION >= 13000
    const cudaMemLocation host{cudaMemLocationTypeHost, 0}, on_device{cudaMemLocationTypeDevice, 0};
    must(cudaMemAdvise(managed, 400, cudaMemAdviseSetPreferredLocation, host));
    must(cudaMemPrefetchAsync(managed, 400, on_device, 0, stream));
#endif
    update_kernel<<<1, 100, 0, stream>>>(managed, 3, 1);
    must(cudaStreamSynchronize(stream));
    for (int i = 0; i < 100; ++i) CHECK(managed[i] == 3 * i + 1);
#ifdef CUDA_ON_CPU
    CHECK(free_after == free_before);  // it is not the device's
    Ints device_only(100);
    CHECK(fails(cudaMemPrefetchAsync(device_only.data, 400, on_device, 0, stream)));
    CHECK(fails(cudaMemPrefetchAsync(managed, 404, on_device, 0, stream)));
    CHECK(fails(cudaMemAdvise(device_only.data, 400, cudaMemAdviseSetPreferredLocation, host)));
    CHECK(fails(cudaFreeHost(managed)));
#endif
    must(cudaMemset(managed, 0, 400));
    must(cudaFree(managed));
}

TEST_CASE("a copy from pageable memory may be overwritten at once, one to it is there at once", "[cpu]") {
    Stream stream;
    Ints a(1000);
    std::vector<int> host(1000, 1);
    must(cudaMemcpyAsync(a.data, host.data(), 4000, cudaMemcpyHostToDevice, stream));
    std::fill(host.begin(), host.end(), 2);
    update_kernel<<<1, 1000, 0, stream>>>(a.data, 10, 5);
    must(cudaMemcpyAsync(host.data(), a.data, 4000, cudaMemcpyDeviceToHost, stream));
    CHECK(host == std::vector<int>(1000, 15));
}

TEST_CASE("copies of pinned memory, in a stream", "[cpu]") {
    Stream stream;
    Ints a(100);
    int* pinned = nullptr;
    must(cudaHostAlloc(reinterpret_cast<void**>(&pinned), 800, cudaHostAllocDefault));
    for (int i = 0; i < 100; ++i) pinned[i] = i, pinned[100 + i] = -1;
    must(cudaMemcpyAsync(a.data, pinned, 400, cudaMemcpyHostToDevice, stream));
    update_kernel<<<1, 100, 0, stream>>>(a.data, 2, 1);
    must(cudaMemcpyAsync(pinned + 100, a.data, 400, cudaMemcpyDeviceToHost, stream));
#ifdef CUDA_ON_CPU
    // In strict mode nothing has happened yet. (On a GPU nobody knows.)
    CHECK(pinned[199] == (cuda_cpu::strict ? -1 : 199));
#endif
    must(cudaStreamSynchronize(stream));
    for (int i = 0; i < 100; ++i) CHECK(pinned[100 + i] == 2 * i + 1);
    must(cudaFreeHost(pinned));
}

TEST_CASE("a copy or a memset of pinned memory without Async in its name has ended when it returns", "[cpu]") {
    Ints a(100);
    int* pinned = nullptr;
    must(cudaMallocHost(reinterpret_cast<void**>(&pinned), 400));
    std::fill(pinned, pinned + 100, 5);
    must(cudaMemcpy(a.data, pinned, 400, cudaMemcpyHostToDevice));
    std::fill(pinned, pinned + 100, 6);
    CHECK(a.at(99) == 5);
    must(cudaMemcpy(pinned, a.data, 400, cudaMemcpyDeviceToHost));
    CHECK(pinned[99] == 5);
    must(cudaMemset(pinned, 0, 400));
    CHECK(pinned[99] == 0);
    must(cudaFreeHost(pinned));
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams and events

TEST_CASE("a stream runs its work in order", "[cpu]") {
    Stream stream;
    Ints x(32);
    unsigned want = 0;
    for (int i = 0; i < 200; ++i) {
        update_kernel<<<1, 32, 0, stream>>>(x.data, 3, i);
        want = 3 * want + static_cast<unsigned>(i);
    }
    must(cudaStreamSynchronize(stream));
    CHECK(x.at(31) == static_cast<int>(want));
}

// Tells strict mode's check of races that a kernel which gets this pointer touches one number only.
int* one(int* number) {
#ifdef CUDA_ON_CPU
    cuda_cpu::note_view(number, sizeof(int));
#endif
    return number;
}

// A random graph of work over several streams, with an event for every dependence between two of them.
TEST_CASE("events order the work of streams", "[cpu]") {
    std::mt19937 random(5);
    for (int round = 0; round < 10; ++round) {
        Stream streams[4];
        Event events[40];
        Ints value(41);  // value[i+1] is written by step i, from value[earlier]
        std::vector<int> want(41), stream_of(40);
        for (int i = 0; i < 40; ++i) {
            const int stream = stream_of[static_cast<size_t>(i)] = static_cast<int>(random() % 4);
            const int earlier =
                static_cast<int>(random() % static_cast<unsigned>(i + 1));  // a step before, or value[0]
            if (earlier > 0 && stream_of[static_cast<size_t>(earlier - 1)] != stream)
                must(cudaStreamWaitEvent(streams[stream], events[earlier - 1]));
            copy_kernel<<<1, 1, 0, streams[stream]>>>(one(value.data + i + 1), one(value.data + earlier), 1);
            update_kernel<<<1, 1, 0, streams[stream]>>>(one(value.data + i + 1), 3, i + 1);
            must(cudaEventRecord(events[i], streams[stream]));
            want[static_cast<size_t>(i + 1)] =
                static_cast<int>(3u * static_cast<unsigned>(want[static_cast<size_t>(earlier)]) + i + 1);
        }
        // Waiting for the last event is enough for what it depends on; the rest needs a wait of its own.
        must(cudaEventSynchronize(events[39]));
        CHECK(cudaEventQuery(events[39]) == cudaSuccess);
        must(cudaDeviceSynchronize());
        std::vector<int> got(41);
        must(cudaMemcpy(got.data(), value.data, 41 * sizeof(int), cudaMemcpyDeviceToHost));
        CHECK(got == want);
    }
}

TEST_CASE("an event stands for what was recorded last, and may be destroyed before it happens", "[cpu]") {
    Stream first, second;
    Ints x(1), y(1);
    cudaEvent_t event;
    must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaEventQuery(event) == cudaSuccess);  // never recorded: done
    must(cudaStreamWaitEvent(second, event));     // and nothing to wait for
    update_kernel<<<1, 1, 0, first>>>(x.data, 0, 1);
    must(cudaEventRecord(event, first));
    update_kernel<<<1, 1, 0, first>>>(x.data, 0, 2);
    must(cudaEventRecord(event, first));
    must(cudaStreamWaitEvent(second, event));
    must(cudaEventDestroy(event));
    copy_kernel<<<1, 1, 0, second>>>(y.data, x.data, 1);
    must(cudaStreamSynchronize(second));
    CHECK(y.at(0) == 2);
}

TEST_CASE("the default stream waits for blocking streams, and they for it", "[cpu]") {
    Stream blocking(cudaStreamDefault);
    Ints x(1);
    for (int i = 0; i < 10; ++i) {
        update_kernel<<<1, 1, 0, blocking>>>(x.data, 2, 1);
        update_kernel<<<1, 1>>>(x.data, 2, 0);
    }
    must(cudaStreamSynchronize(nullptr));
    int want = 0;
    for (int i = 0; i < 10; ++i) want = (2 * want + 1) * 2;
    CHECK(x.at(0) == want);
}

TEST_CASE("elapsed time, and what has none", "[cpu]") {
    Stream stream;
    Event start, end, never;
    float milliseconds = -1;
    must(cudaEventRecord(start, stream));
    must(cudaLaunchHostFunc(
        stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }, nullptr));
    must(cudaEventRecord(end, stream));
#ifdef CUDA_ON_CPU
    if (cuda_cpu::strict) CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorNotReady);
#endif
    must(cudaEventSynchronize(end));
    must(cudaEventElapsedTime(&milliseconds, start, end));
    CHECK((milliseconds >= 19 && milliseconds < 10'000));
    CHECK(fails(cudaEventElapsedTime(&milliseconds, start, never)));
    cudaEvent_t untimed;
    must(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    must(cudaEventRecord(untimed, stream));
    must(cudaEventSynchronize(untimed));
    CHECK(fails(cudaEventElapsedTime(&milliseconds, start, untimed)));
    must(cudaEventDestroy(untimed));
}

TEST_CASE("host functions run in their stream's order", "[cpu]") {
    struct Record {
        int* pinned;
        std::vector<int> seen;
    };
    Stream stream;
    Ints x(1);
    Record record{};
    must(cudaMallocHost(&record.pinned, sizeof(int)));
    for (int i = 0; i < 5; ++i) {
        update_kernel<<<1, 1, 0, stream>>>(x.data, 1, i);
        must(cudaMemcpyAsync(record.pinned, x.data, sizeof(int), cudaMemcpyDeviceToHost, stream));
        must(cudaLaunchHostFunc(
            stream,
            [](void* argument) {
                Record& r = *static_cast<Record*>(argument);
                r.seen.push_back(*r.pinned);
            },
            &record));
    }
    must(cudaStreamSynchronize(stream));
    CHECK(record.seen == std::vector<int>{0, 1, 3, 6, 10});
    must(cudaFreeHost(record.pinned));
}

#ifdef CUDA_ON_CPU
// What GNU OpenMP says of itself when it is loaded: twice, if the program starts itself again (cpu/os_threads.cpp).
TEST_CASE("OpenMP's threads spin for a short time, unless the user says otherwise", "[cpu][program]") {
    const auto spins = [](const std::string& variables) {
        const std::string text = run_program("wrong_kernels", "",
                                             "env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY -u OMP_NUM_THREADS "
                                             "OMP_DISPLAY_ENV=verbose " +
                                                 variables)
                                     .err;
        const std::string name = "GOMP_SPINCOUNT = '";
        const size_t at = text.rfind(name);
        REQUIRE(at != std::string::npos);  // another OpenMP than GNU's: nothing is known of its waiting
        return std::stoll(text.substr(at + name.size()));
    };
    CHECK(spins("") == 3000);
    CHECK(spins("OMP_WAIT_POLICY=passive") == 0);
    CHECK(spins("OMP_WAIT_POLICY=active") > 3000);
    CHECK(spins("GOMP_SPINCOUNT=77") == 77);
    CHECK(spins("OMP_PROC_BIND=true") > 3000);  // a second start would be bound to the first's one place
    CHECK(run_program("wrong_kernels", "", "env OMP_DISPLAY_ENV=verbose OMP_NUM_THREADS=1").err.find("'3000'") ==
          std::string::npos);
}

TEST_CASE("work that must wait holds up its own stream only", "[cpu]") {
    Stream first, second;
    std::atomic<bool> open{false};
    std::vector<int> seen;
    // In the order of the calls where work runs at once;
    // in strict mode the gate may be opened by what is asked for later.
    if (!cuda_cpu::strict) open = true;
    cuda_cpu::enqueue_when(
        first, [&] { return open.load(); }, [&] { seen.push_back(open ? 1 : -1); });
    cuda_cpu::enqueue(first, [&] { seen.push_back(2); });
    cuda_cpu::enqueue(second, [&] { open = true; });
    must(cudaDeviceSynchronize());
    CHECK(seen == std::vector<int>{1, 2});
}
#endif

TEST_CASE("a program that asks until a stream is done gets there", "[cpu]") {
    Stream stream;
    Event event;
    Ints x(1);
    for (int i = 0; i < 20; ++i) update_kernel<<<1, 1, 0, stream>>>(x.data, 1, 1);
    must(cudaEventRecord(event, stream));
    while (cudaEventQuery(event) == cudaErrorNotReady) {
    }
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {
    }
    CHECK(x.at(0) == 20);
}

TEST_CASE("freeing waits for the device", "[cpu]") {
    Stream stream;
    Ints x(64);
    int* freed = nullptr;
    must(cudaMalloc(&freed, 256));
    must(cudaMemsetAsync(freed, 0, 256, stream));
    update_kernel<<<1, 64, 0, stream>>>(freed, 0, 9);
    copy_kernel<<<1, 64, 0, stream>>>(x.data, freed, 64);
    must(cudaFree(freed));
    CHECK(x.at(63) == 9);
}

TEST_CASE("invalid handles are errors", "[cpu]") {
    CHECK(fails(cudaSetDevice(-1)));
    CHECK(fails(cudaSetDevice(1000)));
#ifdef CUDA_ON_CPU
    CHECK(fails(cudaEventRecord(nullptr)));
    CHECK(fails(cudaEventSynchronize(nullptr)));
    CHECK(fails(cudaStreamWaitEvent(nullptr, nullptr)));
    CHECK(fails(cudaStreamDestroy(nullptr)));
    CHECK(std::string(cudaGetErrorName(static_cast<cudaError_t>(12345))) == "unknown error");
#endif
}

TEST_CASE("flags that CUDA does not know, and results without a place, are errors", "[cpu]") {
    const auto is_invalid = [](cudaError_t status) { return fails(status) && status == cudaErrorInvalidValue; };
    Stream stream;
    Event event;
    cudaStream_t no_stream = nullptr;
    cudaEvent_t no_event = nullptr;
    CHECK(is_invalid(cudaStreamCreateWithFlags(&no_stream, 2)));
    CHECK(is_invalid(cudaEventCreateWithFlags(&no_event, 8)));
    must(cudaEventRecord(event, stream));
    CHECK(is_invalid(cudaStreamWaitEvent(stream, event, 2)));
    must(cudaEventSynchronize(event));
    CHECK(is_invalid(cudaEventElapsedTime(nullptr, event, event)));
    CHECK(is_invalid(cudaEventCreate(nullptr)));
    CHECK(is_invalid(cudaStreamCreate(nullptr)));
    CHECK(is_invalid(cudaGetDeviceCount(nullptr)));
    CHECK(is_invalid(cudaGetDevice(nullptr)));
}

// ---------------------------------------------------------------------------------------------------------------------
// Devices

TEST_CASE("what a device says of itself", "[cpu]") {
    cudaDeviceProp properties;
    must(cudaGetDeviceProperties(&properties, 0));
    CHECK(std::strlen(properties.name) > 0);
    CHECK(properties.totalGlobalMem > 0);
    CHECK(properties.warpSize == 32);
    CHECK(properties.maxThreadsPerBlock == 1024);
    CHECK(properties.multiProcessorCount >= 1);
    int value = 0;
    must(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    CHECK(value == properties.multiProcessorCount);
    must(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(value >= 48 << 10);
    must(cudaRuntimeGetVersion(&value));
    CHECK(value >= 12000);
}

#ifdef CUDA_ON_CPU

TEST_CASE("CUDA_CPU_GPU shows the properties of a GPU", "[cpu]") {
    struct Shown {
        const char* const before = std::getenv("CUDA_CPU_GPU");
        const std::string old = before ? before : "";
        void set(const char* gpu) {
            setenv("CUDA_CPU_GPU", gpu, 1);
            open_device(0);  // again: device() keeps what it was told
        }
        ~Shown() { set(old.c_str()); }
    } shown;
    const auto value_of = [](cudaDeviceAttr attribute) {
        int value = 0;
        must(cudaDeviceGetAttribute(&value, attribute, 0));
        return value;
    };
    shown.set("108,8.6,99");
    CHECK(value_of(cudaDevAttrMultiProcessorCount) == 108);
    CHECK(value_of(cudaDevAttrComputeCapabilityMajor) == 8);
    CHECK(value_of(cudaDevAttrComputeCapabilityMinor) == 6);
    CHECK(value_of(cudaDevAttrMaxSharedMemoryPerBlockOptin) == 99 << 10);
    CHECK(!has_wgmma());
    CHECK(device().block_shared_bytes == 99 << 10);
    CHECK(device().capability == 86);
    const auto allow = [](int bytes) {
        return cudaFuncSetAttribute(update_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    };
    Ints a(32);
    update_kernel<<<1, 32, (48 << 10) + 1>>>(a.data, 2, 1);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    must(allow(98 << 10));
    update_kernel<<<1, 32, 99 << 10>>>(a.data, 2, 1);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    must(allow(99 << 10));
    update_kernel<<<1, 32, 99 << 10>>>(a.data, 2, 1);
    must(cudaGetLastError());
    CHECK(fails(allow((99 << 10) + 1)));
    update_kernel<<<1, 32, (99 << 10) + 1>>>(a.data, 2, 1);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    shown.set("");
    must(allow((99 << 10) + 1));
    update_kernel<<<1, 32, (99 << 10) + 1>>>(a.data, 2, 1);
    must(cudaGetLastError());
    CHECK(has_wgmma());
    for (const std::string wrong : {"132", "132,9.0", "132,9,227", "0,9.0,227", "132,9.0,20", "132,9.0,227 "}) {
        const Outcome outcome =
            run_program("run_tests", "'what a device says of itself'", "export CUDA_CPU_GPU='" + wrong + "';");
        CHECK(outcome.status == 2);
        CHECK(outcome.err.starts_with("CUDA_CPU_GPU=" + wrong + " is not the multiprocessors, the"));
    }
    for (const std::string wrong : {"two", "2 ", "0", "-1"}) {
        const Outcome outcome =
            run_program("run_tests", "'what a device says of itself'", "export CUDA_CPU_DEVICES='" + wrong + "';");
        CHECK(outcome.status == 2);
        CHECK(outcome.err == "CUDA_CPU_DEVICES=" + wrong + " is not a number of devices, 1 or more\n");
    }
}

// Nothing else tells when this is lost: the results are the same, and a step takes up to twice as long.
TEST_CASE("the loop over threads becomes vector instructions", "[cpu][program]") {
#if !defined(__x86_64__) || defined(__clang__) || __GNUC__ < 12
    SKIP_TEST("needs g++ 12 or newer for x86-64");
#endif
    const std::filesystem::path object = program_file("optim/adamw.o"), build = object.parent_path().parent_path();
    if (build.filename() != "cpu" || !std::filesystem::exists(object)) SKIP_TEST("needs build/cpu/optim/adamw.o");
    std::istringstream code(run_shell("objdump -d " + shell_word(object.string())).out);
    bool in_loop = false;
    int n_roots = 0;  // of vectors: AdamW has one for each element
    for (std::string line; std::getline(code, line);) {
        if (line.ends_with(">:")) in_loop = line.find("run_threads") != std::string::npos;
        n_roots += in_loop && line.find("sqrtps") != std::string::npos;
    }
    CHECK(n_roots > 0);
}

// Run as a process of its own, by the next test: how many devices there are is decided once.
TEST_CASE("three devices, a thread each", "[.][three_devices]") {
    if (!std::getenv("CUDA_CPU_DEVICES")) return;  // somebody runs the hidden tests too
    int count = 0;
    must(cudaGetDeviceCount(&count));
    REQUIRE(count == 3);
    CHECK(fails(cudaSetDevice(3)));
    // A ring: device d adds its number to what device d-1 gives, waiting for it through an event. Work on a stream goes
    // to the stream's device, whatever device is current.
    cudaStream_t streams[3];
    cudaEvent_t events[3];
    int* values[3];
    for (int d = 0; d < 3; ++d) {
        must(cudaSetDevice(d));
        must(cudaStreamCreateWithFlags(&streams[d], cudaStreamNonBlocking));
        must(cudaEventCreate(&events[d]));
        must(cudaMalloc(&values[d], sizeof(int)));
        must(cudaMemset(values[d], 0, sizeof(int)));
        must(cudaDeviceSynchronize());
    }
    must(cudaSetDevice(0));
    for (int step = 0; step < 12; ++step) {
        const int d = step % 3, before = (step + 2) % 3;
        if (step > 0) must(cudaStreamWaitEvent(streams[d], events[before]));
        must(cudaMemcpyAsync(values[d], values[before], sizeof(int), cudaMemcpyDeviceToDevice, streams[d]));
        update_kernel<<<1, 1, 0, streams[d]>>>(values[d], 2, d + 1);
        must(cudaEventRecord(events[d], streams[d]));
    }
    must(cudaStreamSynchronize(streams[2]));
    int want = 0, got = 0;
    for (int step = 0; step < 12; ++step) want = 2 * want + step % 3 + 1;
    must(cudaMemcpy(&got, values[2], sizeof(int), cudaMemcpyDeviceToHost));
    CHECK(got == want);

    // Three ranks meet in host functions, as collectives do: each waits for the other two, thirty times.
    std::atomic<int> arrived{0};
    struct Rank {
        std::atomic<int>* arrived;
        int round;
    };
    std::vector<std::thread> ranks;
    for (int d = 0; d < 3; ++d)
        ranks.emplace_back([d, &arrived] {
            cudaSetDevice(d);
            cudaStream_t stream;
            cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
            std::vector<Rank> rounds;
            for (int i = 0; i < 30; ++i) rounds.push_back({&arrived, i});
            for (Rank& rank : rounds)
                cudaLaunchHostFunc(
                    stream,
                    [](void* argument) {
                        const Rank& r = *static_cast<Rank*>(argument);
                        ++*r.arrived;
                        while (*r.arrived < 3 * (r.round + 1)) std::this_thread::yield();
                    },
                    &rank);
            cudaStreamSynchronize(stream);
            cudaStreamDestroy(stream);
        });
    for (std::thread& rank : ranks) rank.join();
    CHECK(arrived == 90);
}

TEST_CASE("CUDA_CPU_DEVICES says how many devices there are", "[cpu]") {
    const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
    for (const char* mode : {"-u CUDA_CPU_STRICT", "CUDA_CPU_STRICT=1", "CUDA_CPU_STRICT=2", "CUDA_CPU_STRICT=3"}) {
        FILE* pipe =
            popen(("timeout 60 env " + std::string(mode) + " CUDA_CPU_DEVICES=3 '" + self + "' '[three_devices]' 2>&1")
                      .c_str(),
                  "r");
        REQUIRE(pipe != nullptr);
        std::string text;
        for (char buffer[256]; const size_t n = fread(buffer, 1, sizeof buffer, pipe);) text.append(buffer, n);
        INFO(text);
        CHECK(pclose(pipe) == 0);
        CHECK_THAT(text, ContainsSubstring("All tests passed"));
    }
}

#endif
