// cpu/hopper.h: the implementation of Hopper's asynchronous instructions (cpu/hopper.cpp). Kernels use it through
// layers/ptx.cuh, where each instruction is explained; cpu/README.md says what strict mode checks. X_by(thread, ...) is
// instruction X by the thread with this index in its block.
#pragma once

#include "cuda_runtime.h"

struct CUtensorMap;

namespace cuda_cpu {

// Shared memory as instructions address it: with 18 bits. A block's dynamic shared memory is smaller than 2^18 bytes,
// so that the low bits of an ordinary pointer are enough.
constexpr uint32_t kSharedAddressMask = (1u << 18) - 1;

// ---- mbarriers
void mbarrier_init_by(unsigned thread, void* barrier, unsigned n_arrivals, Place here);
void mbarrier_invalidate_by(unsigned thread, void* barrier, Place here);
void mbarrier_arrive_by(unsigned thread, void* barrier, unsigned n_arrivals, unsigned expected_bytes, Place here);
void mbarrier_wait_by(unsigned thread, void* barrier, unsigned parity, Place here);  // other threads run meanwhile

// ---- named barriers
void named_barrier_by(unsigned thread, unsigned id, unsigned n_threads, bool wait, Place here);

// ---- bulk copies. A load is announced to an mbarrier; a store belongs to the thread's group of stores.
void bulk_load_by(unsigned thread, void* to, const void* from, size_t bytes, void* barrier, Place here);
void bulk_store_by(unsigned thread, void* to, const void* from, size_t bytes, Place here);
void bulk_add_by(unsigned thread, float* to, const void* from, size_t bytes, Place here);
void tensor_load_by(unsigned thread, void* to, const CUtensorMap& map, const int* coordinates, unsigned rank,
                    void* barrier, Place here);
void tensor_store_by(unsigned thread, const CUtensorMap& map, const int* coordinates, unsigned rank, const void* from,
                     Place here);
void bulk_commit_by(unsigned thread);
void bulk_wait_by(unsigned thread, unsigned n_groups, bool read_only);
void fence_proxy_async_by(unsigned thread);

// ---- turns between blocks, which are other OS threads here: other threads of the block run while one waits.
void set_count_by(int* count, int value);
void wait_for_count_by(unsigned thread, const int* count, int value);

// ---- wgmma: 128 threads bring their operands, the last one multiplies.
struct Wgmma {
    float* d;           // this thread's part of the accumulator
    const uint32_t* a;  // its part of A; null: A lies in shared memory
    uint64_t a_descriptor, b_descriptor;
    bool accumulate;
};
constexpr unsigned kWarpGroup = 128;
using WgmmaComplete = void (*)(Wgmma** lanes);
void wgmma_by(unsigned thread, Wgmma& operands, unsigned n_registers, WgmmaComplete complete, Place here);
void wgmma_fence_by(unsigned thread);
void wgmma_commit_by(unsigned thread);
void wgmma_wait_by(unsigned thread, unsigned n_groups);
// The 16 bytes of dynamic shared memory at an 18-bit address, for WgmmaComplete.
const uint16_t* wgmma_shared(uint32_t address);

unsigned elected_lane(unsigned mask);
void registers_by(unsigned thread, unsigned n_registers);  // setmaxnreg: what each thread has from here on

// Calls f, in which other threads may run, and gives the thread its index back.
template <class F>
static inline void keeping_thread(F&& f) {
    const uint3 thread = threadIdx;
    f();
    threadIdx = thread;
}

}  // namespace cuda_cpu
