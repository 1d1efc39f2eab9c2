// cpu/device.h: what the .cpp files of the CPU device share with each other (kernels see cuda_runtime.h only).
#pragma once

#include "cuda_runtime.h"

#include <cstdio>
#include <string>

namespace cuda_cpu {

// ---- cpu/block.cpp
// "kernel 'foo' launched at file:line, block (1,0,0), thread (5,0,0)" of this OS thread. Which thread of the block it
// is, only strict mode knows at any time.
std::string where_are_we();
bool in_kernel();
bool is_fiber_stack(uintptr_t address);

// ---- cpu/strict.cpp
// Strict mode's random numbers: splitmix64 from CUDA_CPU_STRICT=seed.
uint64_t strict_random();
inline uint64_t strict_random_below(uint64_t n) { return strict_random() % n; }

// Prints a report on stderr and aborts: the kernel is wrong and its block cannot go on. In gdb you are then at the
// fault.
[[noreturn]] void report(const std::string& text);

// Memory that ends at a page which faults. Filled with 0xff bytes: NaN in every float format, -1 as int.
void* guarded_allocate(size_t bytes, const char* kind);  // kind: "device memory", for reports
void guarded_free(void* pointer);
void guarded_refill(void* pointer);
// Has `who` written beside an allocation, where no page faults? Between its end and the guard page, after every block;
// anywhere near it, after every kernel.
void check_end_canaries(const std::string& who);
void check_all_canaries(const std::string& who);

void prepare_os_thread();  // gives this OS thread a stack for the handler of memory faults
// While it lives, a memory fault of this process is reported with kernel, block, thread and what lies at the address.
struct FaultReports {
    FaultReports();
    ~FaultReports();
};

// ---- cpu/profile.cpp
// Times its own life for CUDA_CPU_PROFILE=FILE: one line, `name` a kernel's or "matmul".
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
