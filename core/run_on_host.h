// core/run_on_host.h: host work between the kernels of a stream.
#pragma once

#include "core/core.h"

#include <functional>

// Puts a function of the host on the stream: it runs when the work before it is done, and the work after it waits for
// it. It must not call CUDA. `reads` and `writes` are all the memory of the device, or pinned, that it touches: the CPU
// device's strict mode checks that nothing else touches it meanwhile (cpu/races.cpp).
void run_on_host(cudaStream_t stream, std::function<void()> function, std::initializer_list<Tensor> reads,
                 std::initializer_list<Tensor> writes);
