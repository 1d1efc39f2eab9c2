// Tables of integers, from the host's memory to the device: what a step of inference is told of its rows.
//
//   for i < n:  to[i] = from[i]
//
// `from` is pinned memory, which a GPU's threads can read, over the bus. A copy engine moves large tensors at the same
// rate, but a table of a few rows is all latency: on an H100 the kernel after a copy starts 7 us after it, the one
// after a kernel 1 us; and this one asks for its numbers before the launch in front has ended (early_launch.cuh).
#include "layers/decode.h"
#include "layers/early_launch.cuh"

namespace {

constexpr int kUploadThreads = 256;

struct Tables {
    Upload first, second;
};

__global__ void __launch_bounds__(kUploadThreads) upload_kernel(Tables tables) {
    let_next_start();
    int64_t i = global_thread();
    const bool is_first = i < tables.first.n;
    const Upload table = is_first ? tables.first : tables.second;  // a reference would have both copied to memory
    if (!is_first) i -= tables.first.n;
    const int32_t number = i < table.n ? table.from[i] : 0;
    wait_for_previous();
    if (i < table.n) table.to[i] = number;
}

}  // namespace

void upload_tables(const Upload& first, const Upload& second, cudaStream_t stream) {
    const int64_t n = first.n + second.n;
    if (n == 0) return;
    EarlyLaunch(static_cast<unsigned>(narrow(ceil_div(n, kUploadThreads), "upload_tables: blocks")), kUploadThreads, 0,
                stream)("upload_kernel", upload_kernel, Tables{first, second});
    const int64_t bytes = n * int64_t{sizeof(int32_t)};
    launched("upload_kernel", {.reads = bytes, .writes = bytes});
}
