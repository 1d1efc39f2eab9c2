// cpu/cuda_runtime.h: the CUDA runtime on the CPU. It has NVIDIA's file name, so that the same .cu files find it.
//
// Read cpu/README.md first. In short: a kernel launch runs the kernel once for each thread of each block. The blocks of
// a grid are spread over OpenMP threads. The threads of one block run one after the other in a plain loop (run_threads,
// below), which the compiler inlines the kernel into and vectorises. Only when a thread meets a barrier or a warp
// exchange does it need a stack of its own: then it becomes a fiber, and the loop continues in another one
// (cpu/block.cpp).
//
// threadIdx and the like are static thread-local variables of each translation unit. Because no other unit can see
// them, the compiler may keep them in registers and vectorise the loop. Therefore device functions in headers must be
// static or in an anonymous namespace (a function that the linker merges would use another file's threadIdx).
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "library_types.h"

#define CUDA_ON_CPU 1
#define CUDART_VERSION 13000

// ---------------------------------------------------------------------------------------------------------------------
// The words CUDA adds to C++

// A kernel is static: it uses the threadIdx of its own file. It is to be inlined into the loop over threads, which is
// SIMD then. A launch also takes its address, and of functions whose address is taken g++ inlines only small ones,
// unless they are `inline`.
#define __global__ static inline
#define __device__
#define __host__
#define __constant__ static
#define __managed__ static
#define __shared__ static __thread
#ifdef __OPTIMIZE__
#define __forceinline__ inline __attribute__((always_inline))
#else
#define __forceinline__ inline  // a debug build: breakpoints and step need functions
#endif
#define __launch_bounds__(...)  // the rewriter adds this to the kernel's first line:
#ifdef GPU_CHUNKS               // blocks have other sizes with this device's own choices
#define CHECK_LAUNCH_BOUNDS(...) ::cuda_cpu::check_launch_bounds(__VA_ARGS__)
#else
#define CHECK_LAUNCH_BOUNDS(...)
#endif
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

// ---------------------------------------------------------------------------------------------------------------------
// Vector types

// clang-format off
#define CUDA_CPU_VECTOR(T, name, alignment1, alignment2, alignment4)                          \
    struct name##1 { T x; };                                                                  \
    struct alignas(alignment2) name##2 { T x, y; };                                           \
    struct name##3 { T x, y, z; };                                                            \
    struct alignas(alignment4) name##4 { T x, y, z, w; };                                     \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                         \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                 \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_CPU_VECTOR(float, float, 4, 8, 16)
CUDA_CPU_VECTOR(double, double, 8, 16, 16)
CUDA_CPU_VECTOR(int, int, 4, 8, 16)
CUDA_CPU_VECTOR(unsigned, uint, 4, 8, 16)
CUDA_CPU_VECTOR(short, short, 2, 4, 8)
CUDA_CPU_VECTOR(unsigned short, ushort, 2, 4, 8)
CUDA_CPU_VECTOR(long long, longlong, 8, 16, 16)
CUDA_CPU_VECTOR(unsigned long long, ulonglong, 8, 16, 16)
#undef CUDA_CPU_VECTOR
// clang-format on

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// ---------------------------------------------------------------------------------------------------------------------
// Errors, devices (cpu/runtime.cpp), memory (cpu/memory.cpp), streams, events (cpu/streams.cpp)

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorIllegalState = 401,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureMerge = 902,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorStreamCaptureImplicit = 906,
    cudaErrorCapturedEvent = 907,
    cudaErrorStreamCaptureWrongThread = 908,
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrConcurrentManagedAccess = 89,
};
enum cudaMemLocationType { cudaMemLocationTypeDevice = 1, cudaMemLocationTypeHost = 2 };
struct cudaMemLocation {
    cudaMemLocationType type;
    int id;  // of the device
};
enum cudaMemoryAdvise { cudaMemAdviseSetPreferredLocation = 3 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
    int multiProcessorCount, major, minor, warpSize, maxThreadsPerBlock, l2CacheSize;
};

// Which threads may not make calls that a capture cannot contain, such as cudaMalloc, while it goes on: all; the one
// that captures; none.
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2
};

namespace cuda_cpu {
struct Stream;
struct Event;
struct Graph;
struct GraphNode;
struct GraphExec;
// Where a call stands in the program, for reports: as the last parameter with a default value, it is the caller's
// place.
struct Place {
    const char* file;
    int line;
    static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};
}  // namespace cuda_cpu
using cudaStream_t = cuda_cpu::Stream*;
using cudaEvent_t = cuda_cpu::Event*;
using cudaGraph_t = cuda_cpu::Graph*;
using cudaGraphNode_t = cuda_cpu::GraphNode*;
using cudaGraphExec_t = cuda_cpu::GraphExec*;
using cudaHostFn_t = void (*)(void*);

constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventDisableTiming = 2;
constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1;
constexpr unsigned cudaMemAttachGlobal = 1;

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaRuntimeGetVersion(int* version);

cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMallocHost(void** pointer, size_t bytes);
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* pointer);
// Managed memory: on a GPU its pages move to the processor that touches them, and a prefetch moves them in advance.
// Here it is ordinary memory; the calls check that they are given managed memory, and a prefetch is put into the
// stream's order.
cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned flags = cudaMemAttachGlobal);
cudaError_t cudaMemPrefetchAsync(const void* pointer, size_t bytes, cudaMemLocation to, unsigned flags,
                                 cudaStream_t stream = nullptr, cuda_cpu::Place place = cuda_cpu::Place::here());
cudaError_t cudaMemAdvise(const void* pointer, size_t bytes, cudaMemoryAdvise advice, cudaMemLocation location);
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                       cuda_cpu::Place place = cuda_cpu::Place::here());
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr, cuda_cpu::Place place = cuda_cpu::Place::here());
cudaError_t cudaMemset(void* pointer, int value, size_t bytes, cuda_cpu::Place place = cuda_cpu::Place::here());
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream = nullptr,
                            cuda_cpu::Place place = cuda_cpu::Place::here());
namespace cuda_cpu {
// From now on cudaMalloc gives addresses without memory: for work that is recorded (captured) and never runs, of any
// size. A kernel that runs and touches them faults; copies and memsets do nothing there.
void take_addresses_alone(bool on);
// make count (cpu/count_bytes.cpp): what the launch just before has touched is compared with this. A launch that states
// nothing, nullptr, is not counted.
void count_launch(const char* kernel, int64_t reads, int64_t writes);
// The next launch may start before those in front of it have ended (layers/early_launch.cuh); the block that runs has
// waited for them.
void count_early_launch();
void count_wait_for_previous();
}  // namespace cuda_cpu
template <class T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
    return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}
template <class T>
cudaError_t cudaMallocHost(T** pointer, size_t bytes) {
    return cudaMallocHost(reinterpret_cast<void**>(pointer), bytes);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0,
                                cuda_cpu::Place place = cuda_cpu::Place::here());
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

// Graphs (cpu/graphs.cpp): work that streams are given between these two calls does not run. It is recorded, and each
// launch of the graph runs all of it, with the arguments that it was recorded with.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* n);  // nodes: nullptr, for n alone
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

// The driver's functions by name, so that a program need not be linked with the driver: cuTensorMapEncodeTiled
// (cuda.h).
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
constexpr unsigned long long cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result = nullptr);

// Before a kernel is launched with more than 48 KiB of shared memory a block, they are asked for, on each device.
namespace cuda_cpu {
cudaError_t allow_shared(const void* function, int bytes);
}  // namespace cuda_cpu
template <class Function>
cudaError_t cudaFuncSetAttribute(Function* kernel, cudaFuncAttribute, int bytes) {
    return cuda_cpu::allow_shared(reinterpret_cast<const void*>(kernel), bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Where a thread is

static __thread uint3 threadIdx, blockIdx;
static __thread dim3 blockDim __attribute__((unused)), gridDim __attribute__((unused));
constexpr int warpSize = 32;

// ---------------------------------------------------------------------------------------------------------------------
// What a launch becomes, and what kernels call (cpu/block.cpp, cpu/streams.cpp, cpu/races.cpp)

namespace cuda_cpu {

// One launch: what is written between <<< and >>>, and where. Integers of any type are converted, as nvcc does.
struct Configuration {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
    template <class Grid = dim3, class Block = dim3, class Bytes = size_t>
    Configuration(Grid grid_, Block block_, Bytes shared_bytes_ = 0, cudaStream_t stream_ = nullptr)
        : grid(static_cast<dim3>(grid_)), block(static_cast<dim3>(block_)),
          shared_bytes(static_cast<size_t>(shared_bytes_)), stream(stream_) {}
};
struct Launch : Configuration {
    const char* kernel;
    const void* function;  // the kernel's address; nullptr if its template arguments follow from those of the launch
    const char* file;
    int line;
    size_t most_shared = 0;  // bytes of a block, dynamic and static together (prepare_launch)
};

// The loop over the threads of a block that have not started yet. When a thread in it has to wait, the scheduler takes
// the loop over: it sets the three ends to zero and continues with the next thread in another loop on another stack. So
// when the waiting thread continues and its kernel returns, this loop ends too.
struct ThreadLoop {
    unsigned x, y, z;              // first thread
    unsigned x_end, y_end, z_end;  // 0 when the loop has been taken over
};

// What a block needs to know of its kernel: how to run a thread loop, and how to set blockIdx and the dimensions in the
// kernel's own translation unit.
struct BlockProgram {
    const void* kernel;
    void (*run_threads)(const void* kernel, ThreadLoop& loop);
    void (*enter_block)(const Launch& launch, uint3 block);
};

// For strict mode's check of races (cpu/races.cpp): what a piece of work is called, and which bytes it reads and
// writes.
struct Access {
    const void* data;
    size_t bytes;
    bool writes;
};
struct Footprint {
    std::string name = "work of the host";
    Place place{nullptr, 0};
    std::vector<Access> accesses = {};
};
// Runs work at once, or in strict mode when something waits for it. Of a stream that is captured: records it. An error
// is what the call that has work to do must return.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work, const Footprint& footprint = {});
// The same, but not before may_run() returns true: work that waits for another rank. The stream stops until then, the
// others do not: strict mode calls may_run again and again, and holds the runtime's lock during the call (so it must be
// quick). It cannot be captured.
cudaError_t enqueue_when(cudaStream_t stream, std::function<bool()> may_run, std::function<void()> work,
                         const Footprint& footprint = {});
bool runs_at_once(cudaStream_t stream);  // whether enqueue would only call the work

// Called by a thread that has to wait, with its index in the block: returns when every thread of the block has arrived.
void block_barrier(unsigned thread, const char* file, int line);
// The warp's exchange, on which shuffles, votes and matrix instructions are built: each lane in `mask` brings a pointer
// to its operands; the last to arrive calls complete(lanes, mask), which sees all operands and writes all results.
using Complete = void (*)(void** lanes, unsigned mask);
struct Collective {
    Complete complete;
    const char *what, *file;  // for the report when not every lane arrives
    int line;
};
void warp_exchange(unsigned thread, unsigned mask, void* operands, const Collective& collective);
void loop_taken_over();         // a thread whose loop was taken over has finished
void* dynamic_shared_memory();  // on a 1024-byte boundary; in strict mode 16, so that it can end at a guard page
extern bool strict;

// A kernel that is given a pointer may touch what lies from there to the end of the tensor that the pointer was taken
// from. Code that takes a pointer for a kernel states here how long the tensor is.
void note_view_strict(const void* data, size_t bytes);
static inline void note_view(const void* data, size_t bytes) {
    if (strict) note_view_strict(data, bytes);
}
void shared_declared_strict(void* variable, size_t bytes);
static inline void shared_declared(void* variable, size_t bytes) {
    if (strict) shared_declared_strict(variable, bytes);
}
[[noreturn]] void trap(unsigned thread, const char* what, const char* file, int line);
// A GPU ends a kernel that loads, stores or copies n bytes at once at an address that is not a multiple of n.
[[noreturn, gnu::cold]] void report_misaligned(unsigned thread, const void* address, size_t alignment, const char* what,
                                               const char* file, int line);
// Nor can it launch a kernel with more threads than its __launch_bounds__.
[[noreturn, gnu::cold]] void report_launch_bounds(unsigned thread, unsigned n_threads);

// Copies to shared memory that a thread starts now and waits for later, in groups (cp.async). They are done at once; in
// strict mode when their thread waits for them, and until then their place is filled with 0xff. from == nullptr: zeros.
void async_copy_strict(unsigned thread, void* to, const void* from, size_t bytes);
void async_commit_strict(unsigned thread);
void async_wait_strict(unsigned thread, unsigned n_groups);  // all but the latest n_groups have landed

template <class Kernel>
static void run_threads(const void* kernel_pointer, ThreadLoop& loop) {
    const Kernel kernel = *static_cast<const Kernel*>(kernel_pointer);  // arguments in registers
    unsigned x = loop.x, y = loop.y;
    for (unsigned z = loop.z; z < loop.z_end; ++z) {
        threadIdx.z = z;
        for (; y < loop.y_end; ++y) {
            threadIdx.y = y;
            for (; x < loop.x_end; ++x) {
                threadIdx.x = x;
                kernel();
            }
            x = 0;
        }
        y = 0;
    }
    if (loop.x_end == 0) loop_taken_over();
}

static inline void enter_block(const Launch& launch, uint3 block) {
    blockIdx = block;
    blockDim = launch.block;
    gridDim = launch.grid;
}

// An argument of a launch, as the check of races sees it: bytes, among which are pointers, and whether the kernel only
// reads through them.
struct Argument {
    const void* value;
    size_t bytes;
    bool only_reads;
};
// Runs a kernel; in strict mode a copy of it, when something waits for it. program.kernel is the kernel with its
// arguments: kernel_bytes of memory.
constexpr size_t kKernelAlignment = 64;  // of a CUtensorMap
void launch_kernel(Launch launch, const BlockProgram& program, size_t kernel_bytes,
                   std::initializer_list<Argument> arguments);

// Whether `Call` can be called with an argument of type New in place of argument I.
template <size_t I, class New, class Call, class... Arguments, size_t... J>
constexpr bool takes(std::index_sequence<J...>) {
    return std::is_invocable_v<const Call&, std::conditional_t<I == J, New, Arguments>...>;
}
struct Anything {};  // no kernel is written for this type: if it takes one, its parameter's type is deduced
template <class T>
struct OfConst : std::false_type {};
template <template <class> class Struct, class T>
struct OfConst<Struct<const T>> : std::true_type {};

// Whether the kernel only reads through argument I. Its parameter is a pointer to const, or a structure of them,
// Heads<const float>. Other structures with pointers count as written through.
template <size_t I, class Call, class... Arguments>
constexpr bool only_reads() {
    using T = std::tuple_element_t<I, std::tuple<Arguments...>>;
    if constexpr (std::is_pointer_v<T>) {
        using All = std::index_sequence_for<Arguments...>;
        if constexpr (std::is_const_v<std::remove_pointer_t<T>>) return true;
        else
            return takes<I, const std::remove_pointer_t<T>*, Call, Arguments...>(All{}) &&
                   !takes<I, const Anything*, Call, Arguments...>(All{});
    } else {
        return OfConst<T>::value;
    }
}

// Zeros in the bytes of a structure that belong to no member: an old pointer that is left there is none that the kernel
// has. (A compiler without the built-in function leaves what is there.)
template <class T>
static inline void clear_padding([[maybe_unused]] T& argument) {
#if __has_builtin(__builtin_clear_padding)
    if constexpr (std::is_class_v<T> && std::is_trivially_copyable_v<T>) __builtin_clear_padding(&argument);
#endif
}

// A kernel's name in the source, and its address: give(AddressOf{}). If the name alone may mean several functions, that
// is no valid call.
struct AddressOf {
    template <class Function>
    const void* operator()(Function* kernel) const {
        return reinterpret_cast<const void*>(kernel);
    }
};
struct KernelName {
    const char* text;
    const void* function = nullptr;
    KernelName(const char* text_) : text(text_) {}
    template <class Give>
    KernelName(const char* text_, Give give) : text(text_) {
        if constexpr (std::is_invocable_v<Give, AddressOf>) function = give(AddressOf{});
    }
};

template <class Call, class... Arguments>
static void launch(const KernelName& name, const char* file, int line, const Configuration& configuration, Call call,
                   Arguments... arguments) {
    if (strict) (clear_padding(arguments), ...);
    const auto kernel = [=] { call(arguments...); };
    using Kernel = std::remove_const_t<decltype(kernel)>;
    static_assert(std::is_trivially_copyable_v<Kernel> && alignof(Kernel) <= kKernelAlignment);
    const auto numbered = [&]<size_t... I>(std::index_sequence<I...>) {
        launch_kernel({configuration, name.text, name.function, file, line},
                      {&kernel, &run_threads<Kernel>, &enter_block}, sizeof kernel,
                      {Argument{&arguments, std::is_arithmetic_v<Arguments> ? 0 : sizeof arguments,
                                only_reads<I, Call, Arguments...>()}...});
    };
    numbered(std::index_sequence_for<Arguments...>{});
}

// Threads are numbered x first; 32 consecutive numbers are a warp.
static inline unsigned linear_index() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
static inline unsigned lane_id() { return linear_index() % 32; }

static inline void check_launch_bounds(unsigned n_threads, unsigned = 0) {
    if (blockDim.x * blockDim.y * blockDim.z > n_threads) report_launch_bounds(linear_index(), n_threads);
}
static inline void check_aligned(const void* address, size_t alignment, const char* what,
                                 const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (reinterpret_cast<uintptr_t>(address) % alignment != 0)
        report_misaligned(linear_index(), address, alignment, what, file, line);
}

static inline void async_copy(void* to, const void* from, size_t bytes, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
    check_aligned(to, bytes, "cp.async to shared memory", file, line);
    check_aligned(from, bytes, "cp.async from device memory", file, line);
    if (strict) return async_copy_strict(linear_index(), to, from, bytes);
    if (from) std::memcpy(to, from, bytes);
    else std::memset(to, 0, bytes);
}
static inline void async_commit() {
    if (strict) async_commit_strict(linear_index());
}
static inline void async_wait(unsigned n_groups) {
    if (strict) async_wait_strict(linear_index(), n_groups);
}

// Threads wait through these functions, which restore the thread's index afterwards, because other threads ran in
// between.
static inline void wait_for_block(const char* file, int line) {
    const uint3 thread = threadIdx;
    block_barrier(linear_index(), file, line);
    threadIdx = thread;
}
static inline void exchange(unsigned mask, void* operands, Complete complete, const char* what, const char* file,
                            int line) {
    const uint3 thread = threadIdx;
    const Collective collective{complete, what, file, line};
    warp_exchange(linear_index(), mask, operands, collective);
    threadIdx = thread;
}

// Operands of a shuffle: any type of 1 to 8 bytes, carried as 64 bits.
struct Shuffle {
    uint64_t value, result;
    int source;  // lane to read from
};
void complete_shuffle(void** lanes, unsigned mask);
struct Vote {
    unsigned predicate, ballot;
};
void complete_vote(void** lanes, unsigned mask);
void complete_nothing(void** lanes, unsigned mask);

template <class T>
static inline T shuffle(unsigned mask, T value, int source, const char* what, const char* file, int line) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    Shuffle operands{0, 0, source};
    std::memcpy(&operands.value, &value, sizeof(T));
    exchange(mask, &operands, complete_shuffle, what, file, line);
    std::memcpy(static_cast<void*>(&value), &operands.result, sizeof(T));
    return value;
}
static inline unsigned vote(unsigned mask, bool predicate, const char* what, const char* file, int line) {
    Vote operands{predicate, 0};
    exchange(mask, &operands, complete_vote, what, file, line);
    return operands.ballot;
}

}  // namespace cuda_cpu

// ---------------------------------------------------------------------------------------------------------------------
// Barriers, shuffles, votes. FILE and LINE are those of the caller, for the report when not every thread arrives.

#define CUDA_CPU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

static inline void __syncthreads(CUDA_CPU_HERE) { cuda_cpu::wait_for_block(file, line); }
static inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_CPU_HERE) {
    cuda_cpu::exchange(mask, nullptr, cuda_cpu::complete_nothing, "__syncwarp", file, line);
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_CPU_HERE) {
    const int lane = cuda_cpu::lane_id(), segment = lane & ~(width - 1);
    return cuda_cpu::shuffle(mask, value, segment + (source & (width - 1)), "__shfl_sync", file, line);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CUDA_CPU_HERE) {
    const int lane = cuda_cpu::lane_id(), source = lane ^ (lane_mask & 31);
    // The manual lets a lane read from its own or an earlier segment, never from a later one.
    const bool inside = source < (lane & ~(width - 1)) + width;
    return cuda_cpu::shuffle(mask, value, inside ? source : lane, "__shfl_xor_sync", file, line);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_CPU_HERE) {
    const int lane = cuda_cpu::lane_id(), source = lane - static_cast<int>(delta & 31);
    const bool inside = source >= (lane & ~(width - 1));
    return cuda_cpu::shuffle(mask, value, inside ? source : lane, "__shfl_up_sync", file, line);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_CPU_HERE) {
    const int lane = cuda_cpu::lane_id(), source = lane + static_cast<int>(delta & 31);
    const bool inside = source < (lane & ~(width - 1)) + width;
    return cuda_cpu::shuffle(mask, value, inside ? source : lane, "__shfl_down_sync", file, line);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_CPU_HERE) {
    return cuda_cpu::vote(mask, predicate != 0, "__ballot_sync", file, line);
}
static inline int __any_sync(unsigned mask, int predicate, CUDA_CPU_HERE) {
    return cuda_cpu::vote(mask, predicate != 0, "__any_sync", file, line) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, CUDA_CPU_HERE) {
    return cuda_cpu::vote(mask, predicate == 0, "__all_sync", file, line) == 0;
}

#define __trap() ::cuda_cpu::trap(::cuda_cpu::linear_index(), "__trap()", __FILE__, __LINE__)

// ---------------------------------------------------------------------------------------------------------------------
// Atomics. Blocks run on several OS threads, so these are real ones. Each returns the old value.

template <class T, class Update>
static inline T cuda_cpu_atomic(T* address, Update update) {
    using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
    Bits* bits = reinterpret_cast<Bits*>(address);
    Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
    T old;
    do {
        std::memcpy(static_cast<void*>(&old), &before, sizeof(T));
        const T value = update(old);
        std::memcpy(&after, &value, sizeof(T));
    } while (!__atomic_compare_exchange_n(bits, &before, after, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    return old;
}
template <class T>
static inline T atomicAdd(T* address, std::common_type_t<T> value) {
    return cuda_cpu_atomic(address, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
static inline T atomicSub(T* address, std::common_type_t<T> value) {
    return cuda_cpu_atomic(address, [=](T old) { return static_cast<T>(old - value); });
}
// One more, and 0 after `last`: so a counter that n have passed is 0 again.
static inline unsigned atomicInc(unsigned* address, unsigned last) {
    return cuda_cpu_atomic(address, [=](unsigned old) { return old >= last ? 0u : old + 1; });
}
template <class T>
static inline T atomicMax(T* address, std::common_type_t<T> value) {
    return cuda_cpu_atomic(address, [=](T old) { return old > value ? old : value; });
}
template <class T>
static inline T atomicMin(T* address, std::common_type_t<T> value) {
    return cuda_cpu_atomic(address, [=](T old) { return old < value ? old : value; });
}
template <class T>
static inline T atomicOr(T* address, std::common_type_t<T> value) {
    return cuda_cpu_atomic(address, [=](T old) { return old | value; });
}
template <class T>
static inline T atomicAnd(T* address, std::common_type_t<T> value) {
    return cuda_cpu_atomic(address, [=](T old) { return old & value; });
}
template <class T>
static inline T atomicExch(T* address, std::common_type_t<T> value) {
    return cuda_cpu_atomic(address, [=](T) { return value; });
}
template <class T>
static inline T atomicCAS(T* address, std::common_type_t<T> compare, std::common_type_t<T> value) {
    return cuda_cpu_atomic(address, [=](T old) { return old == compare ? value : old; });
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic functions of CUDA that C++ does not have

// Of two floats one of which is NaN, the other: as fminf and fmaxf.
template <class A, class B, class C = std::common_type_t<A, B>>
static inline constexpr C min(A a, B b) {
    const C x = a, y = b;
    if constexpr (std::is_floating_point_v<C>) return y < x || x != x ? y : x;
    else return y < x ? y : x;
}
template <class A, class B, class C = std::common_type_t<A, B>>
static inline constexpr C max(A a, B b) {
    const C x = a, y = b;
    if constexpr (std::is_floating_point_v<C>) return x < y || x != x ? y : x;
    else return x < y ? y : x;
}

// clang-format off
static inline int __float_as_int(float x) { int bits; std::memcpy(&bits, &x, 4); return bits; }
static inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
static inline float __int_as_float(int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
// clang-format on
#if !defined(__GLIBC__) || __GLIBC__ * 1000 + __GLIBC_MINOR__ < 2042  // later ones have these, as C23 does
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
#endif
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN gives 0
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
static inline int __float2int_rz(float x) { return static_cast<int>(x); }
static inline float __int2float_rn(int x) { return static_cast<float>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }

// exp(x), branch-free so that a loop over it vectorises: x = n ln2 + r with |r| <= ln2/2 (ln2 in two parts: n times the
// first, of 9 bits, is exact), a degree-6 polynomial for exp(r) (minimax, 3e-9), and n added to the exponent. Largest
// error over all floats: 0.9 units in the last place. Overflow gives inf, underflow goes gradually to 0, NaN stays NaN.
static inline float cuda_cpu_expf(float x) {
    const float clamped = x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x);  // NaN passes both comparisons as itself
    const float shifted = fmaf(clamped, 1.44269504f, 12582912.0f);  // rounds to an integer in the low mantissa bits
    const float n = shifted - 12582912.0f;
    float r = fmaf(n, -0.693359375f, clamped);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.38388120e-3f;
    p = fmaf(p, r, 8.36919248e-3f);
    p = fmaf(p, r, 4.16681021e-2f);
    p = fmaf(p, r, 0.166665167f);
    p = fmaf(p, r, 0.49999994f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    // 2^n in two factors, each of which is a normal number, so that the result may be subnormal or overflow.
    const int whole = __float_as_int(shifted) - 0x4b400000, half = whole >> 1;
    return p * __int_as_float((half + 127) << 23) * __int_as_float((whole - half + 127) << 23);
}

// glibc declares these three names, so they are macros here.
#define __expf(x) cuda_cpu_expf(x)
#define __logf(x) logf(x)
#define __exp2f(x) exp2f(x)

// Loads and stores with cache hints: the hint means nothing here.
// clang-format off
template <class T>
static inline T __ldg(const T* address) { return *address; }
template <class T>
static inline T __ldcs(const T* address) { return *address; }
template <class T>
static inline T __ldcg(const T* address) { return *address; }
template <class T>
static inline void __stcs(T* address, T value) { *address = value; }
template <class T>
static inline void __stcg(T* address, T value) { *address = value; }
// clang-format on

#include "hopper.h"  // asynchronous copies and matrix products
