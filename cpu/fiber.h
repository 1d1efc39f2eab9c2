// cpu/fiber.h: a fiber is a stack and the place where it stopped. Two functions switch between them.
//
// A compiled function keeps its state in registers and on its stack. To stop in the middle of one and continue in the
// middle of another, it is enough to save the registers that a called function must preserve, note the stack pointer,
// and load the other one's. This is all that is needed on x86-64: 16 instructions, 5 ns (cpu/fiber.cpp). Other
// processors use Boost.Context, which does the same for all of them and costs 14 ns.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(CUDA_CPU_BOOST_FIBERS)
#include <boost/context/detail/fcontext.hpp>
#endif

namespace cuda_cpu {

// Runs the threads of the current block on the current stack; never returns (cpu/block.cpp).
[[noreturn]] void fiber_main();

#if defined(__x86_64__) && !defined(CUDA_CPU_BOOST_FIBERS)

// Stops here, stores the place in *stopped, and continues at `to`, where another fiber stopped.
extern "C" void cuda_cpu_switch(void** stopped, void* to);
// Stops here likewise, and runs fiber_main on the fresh stack that ends at `top`.
extern "C" void cuda_cpu_start(void** stopped, void* top, void (*main)());

inline void switch_fiber(void** stopped, void* to) { cuda_cpu_switch(stopped, to); }
inline void start_fiber(void** stopped, char* top) { cuda_cpu_start(stopped, top, &fiber_main); }

#else

namespace context = boost::context::detail;

inline void switch_fiber(void** stopped, void* to) {
    const context::transfer_t back = context::jump_fcontext(to, stopped);
    *static_cast<void**>(back.data) = back.fctx;  // where the fiber that switched to this one stopped
}
inline void boost_fiber_main(context::transfer_t from) {
    *static_cast<void**>(from.data) = from.fctx;
    fiber_main();
}
inline void start_fiber(void** stopped, char* top) {
    constexpr size_t bytes = 64 << 10;  // of the stack: only Windows asks for it
    switch_fiber(stopped, context::make_fcontext(top, bytes, &boost_fiber_main));
}

#endif

}  // namespace cuda_cpu
