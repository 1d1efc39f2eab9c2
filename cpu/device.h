// cpu/device.h: what the .cpp files of the CPU device share with each other (the kernels see cuda_runtime.h only).
#pragma once

#include "cuda_runtime.h"

#include <cstdio>
#include <string>

namespace cuda_cpu {

// Strict mode's random numbers: splitmix64 from CUDA_CPU_STRICT=seed. Which number falls where depends only on the seed.
uint64_t strict_random();
inline uint64_t strict_random_below(uint64_t n) { return strict_random() % n; }

// Prints a report on stderr and aborts: the kernel is wrong and its block cannot go on. In gdb you are then at the fault.
[[noreturn]] void report(const std::string& text);
// "kernel 'foo' launched at file:line, block (1,0,0), thread (5,0,0)" of this OS thread; "no kernel" outside of one.
std::string where_are_we();

void check_canaries();     // strict: has the kernel that just ran written beside an allocation?
void prepare_os_thread();  // strict: an alternate signal stack, so that a fault on a fiber can be reported

// Memory that ends at a page which faults (strict mode). Filled with 0xff bytes: NaN in every float format, -1 as int.
void* guarded_allocate(size_t bytes);
void guarded_free(void* pointer, size_t bytes);

}  // namespace cuda_cpu
