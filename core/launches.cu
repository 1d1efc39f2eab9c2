// core/launches.cu: notes what is launched, with its cost, for the account of a training step.
#include "core/core.h"

#include <string_view>

namespace {
thread_local LaunchNotes* notes = nullptr;
}

LaunchNotes::LaunchNotes() {
    check(notes == nullptr, "launches are noted already");
    notes = this;
}
LaunchNotes::~LaunchNotes() { notes = nullptr; }

void launched(const char* kernel, const LaunchCost& cost, const char* file, int line) {
#ifdef COUNT_BYTES
    const bool is_kernel = std::string_view(kernel).substr(0, 3) != "mem";  // memset and memcpy
    cuda_cpu::count_launch(is_kernel ? kernel : nullptr, cost.reads, cost.writes);
#endif
    cuda_check_launch(file, line);
    if (notes) notes->launches.push_back({kernel, cost});
}

void set_to_zero(const Tensor& tensor, cudaStream_t stream, const char* file, int line) {
    cudaCheck(cudaMemsetAsync(tensor.data, 0, tensor.bytes(), stream));
    launched("memset", {.writes = bytes_of(tensor)}, file, line);
}
