// layers/early_launch.cuh: kernels that start before the one in front of them in the stream has ended.
//
// A step that decodes is a chain of short kernels. Each needs what the one before it has written, but not at once: its
// blocks have to start, and it reads weights, which nobody writes. On Hopper and later GPUs a kernel can say that the
// next one may start now, beside it (it does when all blocks have said so, or ended), and the next one where it waits
// until the one before it has ended and everything that it wrote can be read ("programmatic dependent launch" in
// NVIDIA's manual):
//
//     kernel n      ----- let_next_start() --------------------------- end
//     kernel n + 1           start, weights to registers ... wait_for_previous() | reads what n has written -----
//
// What holds for such a kernel:
//
//   - it is launched by EarlyLaunch, which is <<<>>> with that permission;
//   - before wait_for_previous() it writes nothing, and reads only what neither the early launches in front of it nor
//     the launch in front of those write, such as weights: several may be running, and none of them need have waited;
//   - every thread calls wait_for_previous(), so that a kernel never ends before the one in front of it: what holds for
//     two neighbours then holds for all in the stream;
//   - what it reads after wait_for_previous(), and the kernels in front write, is not const __restrict__: to the
//     compiler that is memory which never changes while the kernel runs, and it may load it sooner;
//   - it may call let_next_start() at any time, also if the next one is launched as always, and waits.
//
// Older GPUs, and the CPU device, run one kernel after the other, and both functions do nothing. `make count` checks
// the second and the third of these rules in each such launch of its runs (cpu/count_bytes.cpp).
#pragma once

#include "core/kernel.cuh"

namespace {

__device__ __forceinline__ void let_next_start() {
#if !defined(CUDA_ON_CPU) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#ifdef COUNT_BYTES
    cuda_cpu::wait_for_block("wait_for_previous()", 0);
    cuda_cpu::count_wait_for_previous();
#elif !defined(CUDA_ON_CPU) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Asks for what lies at this address, in device memory, which is then in the second-level cache.
__device__ __forceinline__ void prefetch_to_cache([[maybe_unused]] const void* address) {
#ifndef CUDA_ON_CPU
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// EarlyLaunch(grid, block, shared_bytes, stream)("kernel", kernel, arguments...):
// kernel<<<grid, block, shared_bytes, stream>>>(arguments...)
struct EarlyLaunch {
    const dim3 grid, block;
    const size_t shared_bytes;
    const cudaStream_t stream;
    const char* const file;
    const int line;

    EarlyLaunch(dim3 its_grid, dim3 its_block, size_t its_shared_bytes, cudaStream_t its_stream,
                const char* its_file = __builtin_FILE(), int its_line = __builtin_LINE())
        : grid(its_grid), block(its_block), shared_bytes(its_shared_bytes), stream(its_stream), file(its_file),
          line(its_line) {}

    template <class... Parameters, class... Arguments>
    void operator()([[maybe_unused]] const char* name, void (*kernel)(Parameters...), Arguments... arguments) const {
#ifdef COUNT_BYTES
        cuda_cpu::count_early_launch();
#endif
#ifdef CUDA_ON_CPU
        cuda_cpu::launch({name, [kernel](auto of) { return of(kernel); }}, file, line,
                         cuda_cpu::Configuration(grid, block, shared_bytes, stream), kernel,
                         static_cast<Parameters>(arguments)...);
#else
        cudaLaunchAttribute permission{};
        permission.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        permission.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t configuration{};
        configuration.gridDim = grid, configuration.blockDim = block;
        configuration.dynamicSmemBytes = shared_bytes, configuration.stream = stream;
        configuration.attrs = &permission, configuration.numAttrs = device().capability >= 90 ? 1 : 0;
        cudaCheck(cudaLaunchKernelEx(&configuration, kernel, static_cast<Parameters>(arguments)...));
#endif
    }
};

}  // namespace
