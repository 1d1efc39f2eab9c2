// cpu/device.h: what the .cpp files of the CPU device share with each other (kernels see cuda_runtime.h only).
#pragma once

#include "cuda_runtime.h"

#include <cstdio>
#include <string>

namespace cuda_cpu {

// ---- cpu/block.cpp
struct Fiber {
    void* stopped = nullptr;  // where to continue; valid while it is not running
    Fiber* next = nullptr;    // in the list that it waits in
    unsigned thread = 0;      // the thread that it runs, as of its last wait (strict mode: always)
    char* stack_top = nullptr;
};

// Fibers in the order in which they came.
struct FiberList {
    Fiber *first = nullptr, *last = nullptr;
    void push(Fiber* fiber) {
        fiber->next = nullptr;
        (first ? last->next : first) = fiber;
        last = fiber;
    }
    void append(FiberList& other) {
        if (!other.first) return;
        (first ? last->next : first) = other.first;
        last = other.last;
        other.first = nullptr;
    }
    Fiber* pop() {
        Fiber* fiber = first;
        first = fiber->next;
        return fiber;
    }
};

// Waits of other kinds, for cpu/hopper.cpp: the running thread waits in a list while others run, and continues some
// time after let_go has been called for the list. give_way: in strict mode other threads may run now.
void park(unsigned thread, FiberList& list);
void let_go(FiberList& list);
void give_way(unsigned thread);
void stand_back(unsigned thread);  // other threads run now, if any may; otherwise other OS threads
unsigned block_threads();
size_t dynamic_shared_bytes();
std::string thread_name(unsigned thread);  // "(5,0,0)"
// Reports "what in kernel ..., block ..., thread ...:" and the details.
[[noreturn]] void report_in(unsigned thread, const std::string& what, const std::string& details);

// "kernel 'foo' launched at file:line, block (1,0,0), thread (5,0,0)" of this OS thread. Which thread of the block it
// is, only strict mode knows at any time.
std::string where_are_we();
bool in_kernel();
uint64_t blocks_begun();  // by this OS thread
bool is_fiber_stack(uintptr_t address);

// ---- cpu/hopper.cpp, called by the scheduler
void hopper_leave_block();  // all threads of a block have ended: checks that it has waited for all that it started
void hopper_meet(unsigned first_thread, unsigned n_threads, unsigned mask);  // these threads have met at a barrier
void hopper_step();                                                          // strict mode: completes a copy, at random
bool hopper_land_one();      // every thread waits: completes a copy. False: none is in flight
std::string hopper_waits();  // for the report when all wait for ever: which threads wait at which barrier

// ---- cpu/count_bytes.cpp, which only the programs of `make count` have: in others these two are null
[[gnu::weak]] void count_product(uintptr_t address, size_t bytes);  // a product of cuBLASLt has written these bytes
[[gnu::weak]] void count_end();                                     // all launches so far have ended

// ---- cpu/memory.cpp
// Memory that can still be had: of the machine, and of the control groups that this process is in, which is how a
// container is limited. root: where /proc and /sys are.
size_t available_bytes(const std::string& root = "");

// ---- cpu/runtime.cpp
int current_device();
cudaError_t remember(cudaError_t error);     // for cudaGetLastError; returns it
constexpr size_t kSharedUnasked = 48 << 10;  // bytes of a block, with static arrays, without cudaFuncSetAttribute
bool prepare_launch(Launch& launch);         // false: it fails, and the error is what cudaGetLastError returns

// ---- cpu/streams.cpp
void wait_for_device(int device);

// ---- cpu/graphs.cpp
// The error of a call that no capture can contain, and that this thread may not make while one goes on: it would be
// done at once. cudaSuccess: it may.
cudaError_t refuse_in_capture();

// ---- cpu/os_threads.cpp
int os_threads();  // how many of them a grid or a product may use

// ---- cpu/strict.cpp
// Strict mode's random numbers: splitmix64 (Steele, Lea & Flood 2014).
inline uint64_t splitmix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
constexpr uint64_t kSplitmixStep = 0x9e3779b97f4a7c15u;
inline uint64_t scaled_below(uint64_t n, uint64_t random) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(random) * n >> 64);
}
// From CUDA_CPU_STRICT=seed, for all OS threads.
uint64_t strict_random();
inline uint64_t strict_random_below(uint64_t n) { return scaled_below(n, strict_random()); }
// For one OS thread, which draws many of them: they begin at one of those.
struct StrictRandom {
    uint64_t state = strict_random();
    uint64_t below(uint64_t n) { return scaled_below(n, splitmix(state += kSplitmixStep)); }
};

// Prints a report on stderr and aborts: the kernel is wrong and its block cannot continue. In gdb you are then at the
// fault.
[[noreturn]] void report(const std::string& text);

// Of a page of memory: 4 KiB on x86-64; 16 or 64 KiB on some machines with ARM processors.
size_t page_bytes();
// Memory that ends at a page which faults. Filled with 0xff bytes: NaN in every float format, -1 as int.
void* guarded_allocate(size_t bytes, const char* kind);  // kind: "device memory", for reports
void guarded_free(void* pointer);
// Checks that `who` has not written next to an allocation, where no page faults: after every block between its end and
// the guard page, after every kernel anywhere near it.
void check_end_canaries(const std::function<std::string()>& who);
void check_all_canaries(const std::function<std::string()>& who);

void prepare_os_thread();  // gives this OS thread a stack for the handler of memory faults
// While this object exists, a memory fault of this process is reported with kernel, block, thread and what is at the
// address.
struct FaultReports {
    FaultReports();
    ~FaultReports();
};

// ---- cpu/profile.cpp
// Measures the time from its constructor to its destructor for CUDA_CPU_PROFILE=FILE: one line; `name` is a kernel's or
// "matmul".
class Profiled {
  public:
    explicit Profiled(const char* name);
    ~Profiled();
    Profiled(const Profiled&) = delete;
    Profiled& operator=(const Profiled&) = delete;

  private:
    const char* name_;
    int64_t start_ns_;
};

}  // namespace cuda_cpu
