// cpu/races.h: what streams (cpu/streams.cpp) and memory (cpu/memory.cpp) report to the check of races (cpu/races.cpp).
#pragma once

#include "device.h"

namespace cuda_cpu {

// A vector clock: how many operations of each stream come before, in every order in which the device may run them. Only
// those count that touch memory. An operation's own clock counts itself as well.
class VectorClock {
  public:
    uint64_t of(size_t stream) const { return stream < counts_.size() ? counts_[stream] : 0; }
    void set(size_t stream, uint64_t count);
    void join(const VectorClock& other);

  private:
    std::vector<uint64_t> counts_;  // by the stream's place in clocks (Stream::in_clocks)
};

// Reports the first pair of this operation and an earlier one that touch the same bytes, at least one of the two
// writing, where nothing orders the two. clock: the operation's own; it is number clock.of(stream) of its stream.
void check_races(const Footprint& footprint, size_t stream, const std::string& stream_name, const VectorClock& clock);
Footprint kernel_footprint(const Launch& launch, std::initializer_list<Argument> arguments);
void forget_accesses(uintptr_t begin, uintptr_t end);  // the memory has been freed

// ---- cpu/memory.cpp
struct Extent {
    uintptr_t begin = 0, end = 0;  // empty: there is none
    bool on_host = false;          // pinned memory
    int device = 0;
};
Extent allocation_around(uintptr_t address);

// ---- cpu/strict.cpp
std::string describe_bytes(uintptr_t begin,
                           uintptr_t end);  // "bytes 0 to 15 of an allocation of 64 bytes of device memory"

}  // namespace cuda_cpu
