// wrong_kernels: kernels and host code with one deliberate mistake each, beside the right version.
//
//   run:   CUDA_CPU_STRICT=1 build/cpu/wrong_kernels missing_syncthreads wrong        (or: right)
//   list:  build/cpu/wrong_kernels
//   debug: CUDA_CPU_STRICT=1 gdb --args build/cpu/wrong_kernels past_the_end wrong
//
// Exit status 0: the result was right. 1: it was wrong. Aborted: the CPU device found out what is wrong, and said so.
// test/test_cpu_strict.cu runs every case under several seeds: the wrong version must be caught, the right one must
// pass. A line that a report must name is marked "// <- case". On a GPU several of these mistakes mostly go unnoticed.
#include "layers/ptx.cuh"
#include "layers/tensor_map.h"

#include <cublasLt.h>
#include <nccl.h>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr unsigned kAll = 0xffffffffu;

void must(cudaError_t status) {
    if (status == cudaSuccess) return;
    std::printf("CUDA error: %s\n", cudaGetErrorString(status));
    std::exit(3);
}

// Device memory for n numbers; `values` go there.
struct Buffer {
    float* data = nullptr;
    size_t n;
    explicit Buffer(size_t n_) : n(n_) { must(cudaMalloc(&data, n * sizeof(float))); }
    explicit Buffer(const std::vector<float>& values) : Buffer(values.size()) {
        must(cudaMemcpy(data, values.data(), n * sizeof(float), cudaMemcpyHostToDevice));
        must(cudaDeviceSynchronize());  // the bytes may still be on their way
    }
    ~Buffer() { cudaFree(data); }
    std::vector<float> read() const {
        std::vector<float> values(n);
        must(cudaMemcpy(values.data(), data, n * sizeof(float), cudaMemcpyDeviceToHost));
        return values;
    }
};

std::vector<float> counting(size_t n) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<float>(i);
    return values;
}

// ---------------------------------------------------------------------------------------------------------------------
// Order of threads, blocks and streams

// Sums 256 numbers by halves. Without the barrier a thread may add a number that is not there yet.
__global__ void sum_kernel(float* out, const float* inp, bool wrong) {
    __shared__ float part[256];
    const unsigned t = threadIdx.x;
    part[t] = inp[t];
    __syncthreads();
    for (unsigned half = 128; half > 0; half /= 2) {
        if (t < half) part[t] += part[t + half];
        if (!wrong || half > 64) __syncthreads();
    }
    if (t == 0) *out = part[0];
}
bool missing_syncthreads(bool wrong) {
    Buffer inp(counting(256)), out(1);
    sum_kernel<<<1, 256>>>(out.data, inp.data, wrong);
    return out.read()[0] == 255.0f * 256 / 2;
}

// Each thread subtracts its left neighbour's number. Right without the barrier if the threads happen to run in order.
__global__ void slope_kernel(float* out, const float* inp, bool wrong) {
    __shared__ float row[128];
    const unsigned t = threadIdx.x;
    row[t] = inp[t];
    if (!wrong) __syncthreads();
    out[t] = t > 0 ? row[t] - row[t - 1] : 0.0f;
}
bool threads_in_order(bool wrong) {
    Buffer inp(counting(128)), out(128);
    slope_kernel<<<1, 128>>>(out.data, inp.data, wrong);
    const std::vector<float> slope = out.read();
    for (size_t i = 1; i < 128; ++i)
        if (slope[i] != 1.0f) return false;
    return true;
}

// Each lane takes its left neighbour's number, twice. The second barrier is needed too: a neighbour must have read
// before its number is replaced.
__global__ void rotate_kernel(float* data, int which) {
    __shared__ float row[32];
    const unsigned lane = threadIdx.x;
    row[lane] = data[lane];
    for (int round = 0; round < 2; ++round) {
        if (which != 1) __syncwarp();
        const float left = row[(lane + 31) % 32];
        if (which != 2) __syncwarp();
        row[lane] = left;
    }
    data[lane] = row[lane];
}
bool rotate(int which) {
    Buffer data(counting(32));
    rotate_kernel<<<1, 32>>>(data.data, which);
    const std::vector<float> values = data.read();
    for (size_t i = 0; i < 32; ++i)
        if (values[i] != static_cast<float>((i + 30) % 32)) return false;
    return true;
}
bool missing_syncwarp(bool wrong) { return rotate(wrong ? 1 : 0); }
bool missing_second_syncwarp(bool wrong) { return rotate(wrong ? 2 : 0); }

// Asynchronous copies to shared memory (cp.async) are there when the thread has waited for them, and waiting is for
// groups: what has not been committed to one is not waited for.
__global__ void reverse_row_kernel(float* out, const float* inp, int which) {
    __shared__ __align__(16) float row[128];
    const unsigned t = threadIdx.x;
    cuda_cpu::async_copy(row + 4 * t, inp + 4 * t, 16);
    if (which != 2) cuda_cpu::async_commit();
    if (which != 1) cuda_cpu::async_wait(0);
    __syncthreads();
    for (unsigned i = t; i < 128; i += 32) out[i] = row[127 - i];
}
bool reverse_row(int which) {
    Buffer inp(counting(128)), out(128);
    reverse_row_kernel<<<1, 32>>>(out.data, inp.data, which);
    const std::vector<float> values = out.read();
    for (size_t i = 0; i < 128; ++i)
        if (values[i] != static_cast<float>(127 - i)) return false;
    return true;
}
bool async_copy_not_waited_for(bool wrong) { return reverse_row(wrong ? 1 : 0); }
bool async_copy_not_committed(bool wrong) { return reverse_row(wrong ? 2 : 0); }

// Blocks run in any order: one that needs another's result needs a launch of its own.
__global__ void prefix_kernel(float* sums, unsigned from) {
    const unsigned i = from + blockIdx.x;
    sums[i] += sums[i - 1];
}
bool blocks_in_order(bool wrong) {
    Buffer sums(std::vector<float>(64, 1.0f));
    if (wrong) prefix_kernel<<<63, 1>>>(sums.data, 1);
    else
        for (unsigned i = 1; i < 64; ++i) prefix_kernel<<<1, 1>>>(sums.data, i);
    return sums.read()[63] == 64.0f;
}

__global__ void add_kernel(float* out, const float* inp, float a, size_t n) {
    const size_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = inp[i] + a;
}
bool missing_event_wait(bool wrong) {
    Buffer a(counting(1000)), b(1000), c(1000);
    cudaStream_t first, second;
    cudaEvent_t b_is_there;
    must(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    must(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    must(cudaEventCreateWithFlags(&b_is_there, cudaEventDisableTiming));
    add_kernel<<<4, 256, 0, first>>>(b.data, a.data, 1.0f, 1000);  // <- missing_event_wait
    must(cudaEventRecord(b_is_there, first));
    if (!wrong) must(cudaStreamWaitEvent(second, b_is_there));
    add_kernel<<<4, 256, 0, second>>>(c.data, b.data, 1.0f, 1000);  // <- missing_event_wait
    must(cudaStreamSynchronize(second));
    const bool right = c.read()[999] == 1001.0f;
    must(cudaDeviceSynchronize());
    must(cudaEventDestroy(b_is_there));
    must(cudaStreamDestroy(first));
    must(cudaStreamDestroy(second));
    return right;
}

// Two streams, and an event between them.
struct Streams {
    cudaStream_t first, second;
    cudaEvent_t event;
    Streams() {
        must(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
        must(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
        must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
    ~Streams() {
        cudaStreamDestroy(first);
        cudaStreamDestroy(second);
        cudaEventDestroy(event);
    }
};

// A memset inside of the device does not wait, although its name does not say Async.
bool missing_wait_for_memset(bool wrong) {
    Buffer a(counting(1000)), b(1000);
    Streams s;
    must(cudaMemset(a.data, 0, 4000));  // <- missing_wait_for_memset
    if (!wrong) must(cudaDeviceSynchronize());
    add_kernel<<<4, 256, 0, s.first>>>(b.data, a.data, 1.0f, 1000);  // <- missing_wait_for_memset
    must(cudaDeviceSynchronize());
    return b.read()[999] == 1.0f;
}

// Who overwrites must wait for who reads.
bool read_while_overwritten(bool wrong) {
    Buffer a(counting(1000)), b(1000), c(1000);
    Streams s;
    add_kernel<<<4, 256, 0, s.first>>>(b.data, a.data, 1.0f, 1000);  // <- read_while_overwritten
    must(cudaEventRecord(s.event, s.first));
    add_kernel<<<4, 256, 0, s.second>>>(c.data, a.data, 1.0f, 1000);  // this one it does wait for
    if (!wrong) must(cudaStreamWaitEvent(s.second, s.event));
    must(cudaMemsetAsync(a.data, 0, 4000, s.second));  // <- read_while_overwritten
    must(cudaDeviceSynchronize());
    return b.read()[999] == 1000.0f;
}

// An event stands for what its stream had been given when it was recorded: not for what came later.
bool recorded_too_early(bool wrong) {
    Buffer a(counting(1000)), b(1000), c(1000);
    Streams s;
    constexpr cudaMemcpyKind kKind = cudaMemcpyDeviceToDevice;
    must(cudaMemcpyAsync(b.data, a.data, 400, kKind, s.first));
    must(cudaEventRecord(s.event, s.first));
    must(cudaMemcpyAsync(b.data + 100, a.data + 100, 400, kKind, s.first));  // <- recorded_too_early
    if (!wrong) must(cudaEventRecord(s.event, s.first));
    must(cudaStreamWaitEvent(s.second, s.event));
    must(cudaMemcpyAsync(c.data, b.data, 400, kKind, s.second));        // was there when the event was recorded
    must(cudaMemcpyAsync(c.data, b.data + 100, 400, kKind, s.second));  // <- recorded_too_early
    must(cudaDeviceSynchronize());
    return c.read()[99] == 199.0f;
}

// Neighbours may be written at the same time, the same element may not.
bool two_writers(bool wrong) {
    Buffer a(1000);
    Streams s;
    must(cudaMemsetAsync(a.data, 0, 400, s.first));                        // <- two_writers
    must(cudaMemsetAsync(a.data + (wrong ? 99 : 100), 0, 400, s.second));  // <- two_writers
    must(cudaDeviceSynchronize());
    return a.read()[0] == 0.0f;
}

// A structure whose padding still holds an old pointer, to other bytes than the kernel touches. The pointer counts.
struct Zeros {
    bool twice;  // 7 bytes of padding follow
    float* data;
};
__global__ void zeros_kernel(Zeros zeros) {
    for (int i = 0; i <= zeros.twice; ++i) zeros.data[threadIdx.x] = 0;
}
void start_zeros(float* data, const float* old_pointer, cudaStream_t stream) {
    const float* memory[2] = {old_pointer, old_pointer};
    Zeros* zeros = reinterpret_cast<Zeros*>(memory);
    asm volatile("" : : "r"(memory) : "memory");  // the compiler does not know what the padding holds
    zeros->twice = true;
    zeros->data = data;
    asm volatile("" : : "r"(memory) : "memory");
    zeros_kernel<<<1, 32, 0, stream>>>(*zeros);  // <- writers_in_structures
    must(cudaGetLastError());
}
bool writers_in_structures(bool wrong) {
    Buffer a(1000), b(1000);
    Streams s;
    start_zeros(a.data, a.data + 200, s.first);
    start_zeros(wrong ? a.data : b.data, a.data + 200, s.second);
    must(cudaDeviceSynchronize());
    return a.read()[0] == 0.0f;
}

// A copy to pinned memory returns at once; the numbers are there when the stream has been waited for.
bool missing_stream_sync(bool wrong) {
    Buffer a(counting(100));
    float* pinned;
    cudaStream_t stream;
    must(cudaMallocHost(&pinned, 400));
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::memset(pinned, 0, 400);
    must(cudaMemcpyAsync(pinned, a.data, 400, cudaMemcpyDeviceToHost, stream));
    if (!wrong) must(cudaStreamSynchronize(stream));
    const bool right = pinned[99] == 99.0f;
    must(cudaStreamDestroy(stream));
    must(cudaFreeHost(pinned));
    return right;
}

// The copy reads pinned memory when it runs, not when it is asked for.
bool pinned_overwritten(bool wrong) {
    Buffer a(1);
    float* pinned;
    cudaStream_t stream;
    must(cudaMallocHost(&pinned, 4));
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    *pinned = 1;
    must(cudaMemcpyAsync(a.data, pinned, 4, cudaMemcpyHostToDevice, stream));
    if (!wrong) must(cudaStreamSynchronize(stream));
    *pinned = 2;
    must(cudaStreamDestroy(stream));
    const bool right = a.read()[0] == 1;
    must(cudaFreeHost(pinned));
    return right;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory that has never been written

bool uninitialised_device_memory(bool wrong) {
    Buffer a(100), b(100);
    if (!wrong) must(cudaMemset(a.data, 0, 400));
    add_kernel<<<1, 128>>>(b.data, a.data, 1.0f, 100);
    return b.read()[99] == 1.0f;
}

// Counts in shared memory. The wrong version clears it in block 0 only: each block leaves it clean for the next one.
__global__ void count_kernel(float* out, bool dynamic, bool clear) {
    __shared__ float fixed[8];
    extern __shared__ float asked_for[];
    float* counts = dynamic ? asked_for : fixed;
    const unsigned t = threadIdx.x;
    if ((clear || blockIdx.x == 0) && t < 8) counts[t] = 0;
    __syncthreads();
    if (t < 8) counts[t] += 1;
    __syncthreads();
    if (t < 8) {
        out[blockIdx.x * 8 + t] = counts[t];
        counts[t] = 0;
    }
}
bool uninitialised_shared_memory(bool wrong) {
    Buffer out(16);
    count_kernel<<<2, 32, 32>>>(out.data, false, !wrong);
    return out.read()[15] == 1.0f;
}
bool uninitialised_dynamic_shared_memory(bool wrong) {
    Buffer out(16);
    count_kernel<<<2, 32, 32>>>(out.data, true, !wrong);
    return out.read()[15] == 1.0f;
}

// ---------------------------------------------------------------------------------------------------------------------
// Wrong addresses

__global__ void fill_kernel(float* out, long long from, long long to) {
    const long long i = from + blockIdx.x * blockDim.x + threadIdx.x;
    if (i < to) out[i] = 1.0f;
}
bool fill(size_t n, long long from, long long to) {
    Buffer out(n);
    must(cudaMemset(out.data, 0, n * sizeof(float)));
    fill_kernel<<<2, 64>>>(out.data, from, to);  // <- past_the_end past_an_odd_end before_the_start before_a_page
    must(cudaDeviceSynchronize());
    return out.read()[n - 1] == 1.0f;
}
bool past_the_end(bool wrong) { return fill(100, 0, wrong ? 101 : 100); }     // 400 bytes end where the page ends
bool past_an_odd_end(bool wrong) { return fill(101, 0, wrong ? 102 : 101); }  // 404 bytes do not: 12 lie between
bool before_the_start(bool wrong) { return fill(100, wrong ? -1 : 0, 100); }
bool before_a_page(bool wrong) { return fill(16384, wrong ? -1 : 16256, 16384); }  // 64 KiB: whole pages anywhere

__global__ void difference_kernel(float* out, const float* inp, size_t n, bool wrong) {
    const size_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (wrong || i + 1 < n ? inp[i + 1] : 0) - inp[i];
}
bool difference(size_t n, bool wrong) {
    Buffer inp(counting(n)), out(n);
    difference_kernel<<<4, 32>>>(out.data, inp.data, n, wrong);  // <- reads_past_the_end
    const std::vector<float> values = out.read();
    for (size_t i = 0; i + 1 < n; ++i)
        if (values[i] != 1.0f) return false;
    return values[n - 1] == -static_cast<float>(n - 1);
}
bool reads_past_the_end(bool wrong) { return difference(100, wrong); }
bool reads_past_an_odd_end(bool wrong) { return difference(101, wrong); }

bool use_after_free(bool wrong) {
    Buffer out(64);
    float* freed;
    must(cudaMalloc(&freed, 256));
    must(cudaMemset(freed, 0, 256));
    if (wrong) must(cudaFree(freed));
    add_kernel<<<1, 64>>>(out.data, freed, 1.0f, 64);  // <- use_after_free
    must(cudaDeviceSynchronize());
    if (!wrong) must(cudaFree(freed));
    return out.read()[63] == 1.0f;
}

__global__ void null_kernel(float* out, const float* optional) { *out = optional ? *optional : 1.0f; }
__global__ void no_check_kernel(float* out, const float* optional) { *out = *optional; }
bool null_pointer(bool wrong) {
    Buffer out(1);
    const float* nothing = nullptr;
    if (wrong) no_check_kernel<<<1, 1>>>(out.data, nothing);  // <- null_pointer
    else null_kernel<<<1, 1>>>(out.data, nothing);
    must(cudaDeviceSynchronize());
    return out.read()[0] == 1.0f;
}

__global__ void reverse_kernel(float* data, unsigned n) {
    extern __shared__ float asked_for[];
    const unsigned t = threadIdx.x;
    asked_for[t] = data[t];
    __syncthreads();
    data[t] = asked_for[n - 1 - t];
}
bool past_dynamic_shared_memory(bool wrong) {
    Buffer data(counting(64));
    reverse_kernel<<<1, 64, wrong ? 240 : 256>>>(data.data, 64);  // <- past_dynamic_shared_memory
    must(cudaDeviceSynchronize());
    return data.read()[0] == 63.0f;
}

__device__ float depth(volatile float* above, int n) {
    volatile float here[256];
    here[0] = above[0] + 1.0f;
    return n > 0 ? depth(here, n - 1) + here[0] * 0.0f : here[0];
}
__global__ void deep_kernel(float* out, int n) {
    volatile float start[1] = {0.0f};
    __syncthreads();
    out[threadIdx.x] = depth(start, threadIdx.x == blockDim.x - 1 ? n : 1);
}
bool stack_overflow(bool wrong) {
    Buffer out(1024);
    const int n = wrong ? 1000 : 10;        // a kilobyte each; a thread has 256, whichever of the many stacks it is on
    deep_kernel<<<1, 1024>>>(out.data, n);  // <- stack_overflow
    must(cudaDeviceSynchronize());
    return out.read()[1023] == static_cast<float>(n + 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers and exchanges that not every thread reaches

__global__ void mean_kernel(float* out, const float* inp, unsigned n, int which) {
    __shared__ float total;
    const unsigned t = threadIdx.x;
    if (which == 2 && t >= n) return;
    if (t == 0) total = 0;
    if (which != 1 || t < n) __syncthreads();  // <- divergent_barrier early_return
    if (t < n) atomicAdd(&total, inp[t]);
    if (which != 3 || t < n) {
        __syncthreads();  // <- two_barriers divergent_barrier
    } else {
        __syncthreads();  // <- two_barriers
    }
    if (t < n) out[blockIdx.x * n + t] = total / static_cast<float>(n);
}
bool mean(int which) {
    Buffer inp(counting(40)), out(80);
    mean_kernel<<<2, 64>>>(out.data, inp.data, 40, which);  // <- divergent_barrier early_return two_barriers
    must(cudaDeviceSynchronize());
    return out.read()[79] == 19.5f;
}
bool divergent_barrier(bool wrong) { return mean(wrong ? 1 : 0); }
bool early_return(bool wrong) { return mean(wrong ? 2 : 0); }
bool two_barriers(bool wrong) { return mean(wrong ? 3 : 0); }

// The sum of the first n lanes of each warp.
__global__ void warp_kernel(float* out, const float* inp, unsigned n, int which) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = lane < n ? inp[lane] : 0.0f;
    // clang-format off
    if (which == 1 && lane >= n) return;
    const unsigned mask = which == 2 ? kAll >> (32 - n) : kAll;
    for (int o = 16; o > 0; o /= 2) {
        if (which == 3 && lane >= n)
            sum += static_cast<float>(__ballot_sync(mask, 0));  // <- two_collectives
        else
            sum += __shfl_xor_sync(mask, sum, o);               // <- missing_lane mask_without_lane two_collectives
    }
    // clang-format on
    if (lane == 0) out[warp] = sum;
}
bool warp_sum(int which) {
    Buffer inp(counting(32)), out(2);
    warp_kernel<<<1, 64>>>(out.data, inp.data, 20, which);  // <- missing_lane mask_without_lane two_collectives
    must(cudaDeviceSynchronize());
    return out.read()[1] == 190.0f;
}
bool missing_lane(bool wrong) { return warp_sum(wrong ? 1 : 0); }
bool mask_without_lane(bool wrong) { return warp_sum(wrong ? 2 : 0); }
bool two_collectives(bool wrong) { return warp_sum(wrong ? 3 : 0); }

// ---------------------------------------------------------------------------------------------------------------------
// Hopper's asynchronous copies and products (layers/ptx.cuh). A producer loads tiles of A into two stages; a warp group
// multiplies each by a B of ones, which threads have written. Tile i is full of the number i + 1,
// so layouts do not matter here.

constexpr int kTiles = 5, kTileNumbers = 64 * 16, kTileBytes = kTileNumbers * 2;
enum Mistake {
    none,
    no_wait,
    other_parity,
    no_empty_wait,
    no_expect_tx,
    no_init_fence,
    no_fence,
    no_wgmma_fence,
    no_wgmma_commit,
    no_wgmma_wait,
    early_release,
    b_overwritten,
    a_overwritten,
    d_overwritten,
    off_the_pattern,
    half_a_group_gives,
    too_few_given
};

__global__ void __launch_bounds__(160) product_kernel(float* out, const __nv_bfloat16* inp, int which) {
    // clang-format off
    unsigned char* stages = shared_tiles();
    __nv_bfloat16* b = reinterpret_cast<__nv_bfloat16*>(stages + 2 * kTileBytes);
    uint64_t* full = reinterpret_cast<uint64_t*>(stages + 3 * kTileBytes);
    uint64_t* empty = full + 2;
    const unsigned t = threadIdx.x;
    if (which != no_fence && t < 128) b[t] = from_float<__nv_bfloat16>(1.0f);
    if (which == no_init_fence) fence_proxy_async();
    __syncthreads();
    if (t == 0)
        for (int i = 0; i < 2; ++i) mbarrier_init(&full[i], 1), mbarrier_init(&empty[i], 1); // <- missing_empty_wait
    if (which != no_init_fence && (which != no_fence || t == 0)) fence_proxy_async();
    if (which == no_fence && t < 128) b[t] = from_float<__nv_bfloat16>(1.0f);
    __syncthreads();
    if (t == 128) {
        for (int tile = 0; tile < kTiles; ++tile) {
            const int i = tile % 2;
            if (which != no_empty_wait) mbarrier_wait(&empty[i], (tile / 2 + 1) % 2); // <- wrong_parity
            if (which == no_expect_tx) mbarrier_arrive(&full[i]);
            else mbarrier_arrive_expect_tx(&full[i], kTileBytes); // <- missing_empty_wait
            // <- missing_mbarrier_wait wrong_parity missing_empty_wait missing_expect_tx missing_fence_of_mbarrier
            // released_too_early missing_wgmma_commit missing_wgmma_wait
            bulk_load(stages + i * kTileBytes, inp + tile * kTileNumbers, kTileBytes, &full[i]);
        }
    } else if (t < 128) {
        float d[1][4] = {};
        const uint64_t ones = wgmma_descriptor<0>(b, 128, 256);
        for (int tile = 0; tile < kTiles; ++tile) {
            const int i = tile % 2;
            if (which != no_wait) mbarrier_wait(&full[i], (tile / 2 + (which == other_parity)) % 2); // <- wrong_parity
            if (which != no_wgmma_fence) wgmma_fence();
            // <- missing_mbarrier_wait wrong_parity missing_empty_wait missing_expect_tx missing_proxy_fence
            // missing_wgmma_fence missing_wgmma_commit missing_wgmma_wait released_too_early operand_overwritten
            wgmma_m64k16<__nv_bfloat16>(d, wgmma_descriptor<0>(stages + i * kTileBytes, 128, 256), ones, true);
            if (which != no_wgmma_commit) wgmma_commit();
            if (which == early_release && t == 0) mbarrier_arrive(&empty[i]);
            if (which == early_release) __syncwarp();
            if (which == b_overwritten && tile == 2) b[t] = from_float<__nv_bfloat16>(2.0f);
            if (which != no_wgmma_wait) wgmma_wait<0>(d);
            if (which != early_release && t == 0) mbarrier_arrive(&empty[i]);
        }
        out[t] = d[0][0];
    }
    // clang-format on
}
bool product(Mistake mistake) {
    std::vector<__nv_bfloat16> tiles;
    for (int i = 0; i < kTiles * kTileNumbers; ++i)
        tiles.push_back(from_float<__nv_bfloat16>(static_cast<float>(i / kTileNumbers + 1)));
    Buffer inp(tiles.size() / 2), out(128);
    must(cudaMemcpy(inp.data, tiles.data(), tiles.size() * 2, cudaMemcpyHostToDevice));
    const __nv_bfloat16* numbers = reinterpret_cast<const __nv_bfloat16*>(inp.data);
    // <- missing_mbarrier_wait wrong_parity missing_empty_wait missing_expect_tx missing_fence_of_mbarrier
    // missing_proxy_fence missing_wgmma_fence missing_wgmma_commit missing_wgmma_wait released_too_early
    // operand_overwritten
    product_kernel<<<1, 160, 4 * kTileBytes + kTileAlignment>>>(out.data, numbers, mistake);
    must(cudaDeviceSynchronize());
    for (float x : out.read())
        if (x != 16.0f * (1 + 2 + 3 + 4 + 5)) return false;
    return true;
}
bool missing_mbarrier_wait(bool wrong) { return product(wrong ? no_wait : none); }
bool wrong_parity(bool wrong) { return product(wrong ? other_parity : none); }
bool missing_empty_wait(bool wrong) { return product(wrong ? no_empty_wait : none); }
bool missing_expect_tx(bool wrong) { return product(wrong ? no_expect_tx : none); }
bool missing_fence_of_mbarrier(bool wrong) { return product(wrong ? no_init_fence : none); }
bool missing_proxy_fence(bool wrong) { return product(wrong ? no_fence : none); }
bool missing_wgmma_fence(bool wrong) { return product(wrong ? no_wgmma_fence : none); }
bool missing_wgmma_commit(bool wrong) { return product(wrong ? no_wgmma_commit : none); }
bool missing_wgmma_wait(bool wrong) { return product(wrong ? no_wgmma_wait : none); }
bool released_too_early(bool wrong) { return product(wrong ? early_release : none); }
bool operand_overwritten(bool wrong) { return product(wrong ? b_overwritten : none); }

// A in registers, times a B of ones that is swizzled by 32 bytes. Three groups of warps: the first gives its registers
// to the others, and the second multiplies. They start with 168 a thread, 64512 in all.
__global__ void __launch_bounds__(384, 1) fragment_kernel(float* out, int which) {
    // clang-format off
    __nv_bfloat16* b = reinterpret_cast<__nv_bfloat16*>(shared_tiles());
    const unsigned t = threadIdx.x;
    b[t] = from_float<__nv_bfloat16>(1.0f);
    fence_proxy_async();
    __syncthreads();
    if (t < 128) {
        if (which == too_few_given) give_registers<32>();
        else if (which != half_a_group_gives || t < 64) give_registers<24>();
        return;
    }
    take_registers<240>();
    if (t >= 256) return;
    const uint32_t two = pack<__nv_bfloat16>(2.0f, 2.0f);
    float d[1][4];
    uint32_t a[1][4] = {{two, two, two, two}};
    const __nv_bfloat16* start = b + (which == off_the_pattern ? 16 : 0);
    wgmma_fence(d, a);
    // <- fragment_overwritten accumulator_overwritten product_not_waited_for tile_off_the_pattern
    wgmma_m64k16<__nv_bfloat16>(d, a[0], wgmma_descriptor<32>(start, 0, 256), false);
    wgmma_commit();
    if (which == a_overwritten) a[0][t % 4] = 0;
    if (which == d_overwritten) d[0][t % 4] = 0;
    if (which != no_wgmma_wait) wgmma_wait<0>(d, a);
    out[t - 128] = d[0][0];
    // clang-format on
}
bool fragment(Mistake mistake) {
    Buffer out(128);
    // <- fragment_overwritten accumulator_overwritten product_not_waited_for tile_off_the_pattern
    // registers_of_half_a_group too_many_registers
    fragment_kernel<<<1, 384, 2 * kTileAlignment>>>(out.data, mistake);
    must(cudaDeviceSynchronize());
    for (float x : out.read())
        if (x != 32.0f) return false;
    return true;
}
bool fragment_overwritten(bool wrong) { return fragment(wrong ? a_overwritten : none); }
bool accumulator_overwritten(bool wrong) { return fragment(wrong ? d_overwritten : none); }
bool product_not_waited_for(bool wrong) { return fragment(wrong ? no_wgmma_wait : none); }
bool tile_off_the_pattern(bool wrong) { return fragment(wrong ? off_the_pattern : none); }
bool registers_of_half_a_group(bool wrong) { return fragment(wrong ? half_a_group_gives : none); }
bool too_many_registers(bool wrong) { return fragment(wrong ? too_few_given : none); }

// Loads 64 numbers, adds 1, stores them; then clears the place.
__global__ void round_trip_kernel(float* out, const float* inp, int which) {
    // clang-format off
    __shared__ __align__(8) uint64_t landed;
    float* row = reinterpret_cast<float*>(shared_tiles());
    const unsigned t = threadIdx.x;
    if (t == 0) mbarrier_init(&landed, which == 5 ? 2 : 1);
    fence_proxy_async();
    __syncthreads();
    if (t == 0) {
        mbarrier_arrive_expect_tx(&landed, 256);
        bulk_load(row, inp, 256, &landed);
    }
    if (which != 1 || t == 0) mbarrier_wait(&landed, 0); // <- arrival_that_never_comes
    row[t] += 1.0f;
    if (which != 2) fence_proxy_async();
    if (which == 6 && t >= 32) named_barrier_sync(1, 32); // <- named_barrier_of_other_size
    else named_barrier_sync(1, 64);                       // <- named_barrier_of_other_size
    if (t == 0) {
        bulk_store(out, row, 256); // <- missing_store_fence missing_bulk_wait_read missing_bulk_wait
        bulk_commit();
        if (which < 3) bulk_wait_read<0>();
    }
    if (which != 4) {
        __syncthreads(); // <- named_barrier_of_other_size
        row[t] = 0.0f;
        __syncthreads();
    }
    if (t == 0 && which != 4) bulk_wait<0>();
    // clang-format on
}
bool round_trip(int which) {
    Buffer inp(counting(64)), out(64);
    // <- arrival_that_never_comes named_barrier_of_other_size missing_store_fence missing_bulk_wait_read
    // missing_bulk_wait
    round_trip_kernel<<<1, 64, 2 * kTileAlignment>>>(out.data, inp.data, which);
    must(cudaDeviceSynchronize());
    const std::vector<float> row = out.read();
    for (size_t i = 0; i < 64; ++i)
        if (row[i] != static_cast<float>(i + 1)) return false;
    return true;
}
bool ordinary_read_in_flight(bool wrong) { return round_trip(wrong ? 1 : 0); }
bool missing_store_fence(bool wrong) { return round_trip(wrong ? 2 : 0); }
bool missing_bulk_wait_read(bool wrong) { return round_trip(wrong ? 3 : 0); }
bool missing_bulk_wait(bool wrong) { return round_trip(wrong ? 4 : 0); }
bool arrival_that_never_comes(bool wrong) { return round_trip(wrong ? 5 : 0); }
bool named_barrier_of_other_size(bool wrong) { return round_trip(wrong ? 6 : 0); }

// Two streams of a graph: what the second reads, the first writes in the same launch.
bool missing_wait_in_graph(bool wrong) {
    Buffer a(counting(1000)), b(1000), c(1000);
    Streams s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must(cudaStreamBeginCapture(s.first, cudaStreamCaptureModeThreadLocal));
    if (wrong) must(cudaEventRecord(s.event, s.first));
    add_kernel<<<4, 256, 0, s.first>>>(b.data, a.data, 1.0f, 1000);  // <- missing_wait_in_graph
    if (!wrong) must(cudaEventRecord(s.event, s.first));
    must(cudaStreamWaitEvent(s.second, s.event));
    add_kernel<<<4, 256, 0, s.second>>>(c.data, b.data, 1.0f, 1000);  // <- missing_wait_in_graph
    must(cudaEventRecord(s.event, s.second));
    must(cudaStreamWaitEvent(s.first, s.event));
    must(cudaStreamEndCapture(s.first, &graph));
    must(cudaGraphInstantiate(&exec, graph));
    must(cudaGraphLaunch(exec, s.first));
    must(cudaStreamSynchronize(s.first));
    must(cudaGraphExecDestroy(exec));
    must(cudaGraphDestroy(graph));
    return c.read()[999] == 1001.0f;
}

// A launch writes what another stream reads.
bool graph_not_waited_for(bool wrong) {
    Buffer a(counting(1000)), b(1000), c(1000);
    Streams s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must(cudaStreamBeginCapture(s.first, cudaStreamCaptureModeThreadLocal));
    add_kernel<<<4, 256, 0, s.first>>>(b.data, a.data, 1.0f, 1000);  // <- graph_not_waited_for
    must(cudaStreamEndCapture(s.first, &graph));
    must(cudaGraphInstantiate(&exec, graph));
    must(cudaGraphLaunch(exec, s.first));
    must(cudaEventRecord(s.event, s.first));
    if (!wrong) must(cudaStreamWaitEvent(s.second, s.event));
    add_kernel<<<4, 256, 0, s.second>>>(c.data, b.data, 1.0f, 1000);  // <- graph_not_waited_for
    must(cudaDeviceSynchronize());
    must(cudaGraphExecDestroy(exec));
    must(cudaGraphDestroy(graph));
    return c.read()[999] == 1001.0f;
}

// A box of 16 x 8 numbers goes through shared memory, from one tensor to another.
__global__ void box_kernel(const __grid_constant__ CUtensorMap to, const __grid_constant__ CUtensorMap from, int from_x,
                           int to_x, unsigned off) {
    __shared__ __align__(8) uint64_t landed;
    unsigned char* tile = shared_tiles() + off;
    if (threadIdx.x == 0) {
        mbarrier_init(&landed, 1);
        fence_proxy_async();
        mbarrier_arrive_expect_tx(&landed, 512);
        tensor_load<2>(tile, &from, {from_x, 0}, &landed);  // <- box_off_16_bytes misaligned_tile
        mbarrier_wait(&landed, 0);
        tensor_store<2>(&to, {to_x, 0}, tile);  // <- store_at_negative store_of_odd_rows
        bulk_commit();
        bulk_wait<0>();
    }
}
bool box(int from_x, int to_x, int64_t to_row, unsigned off = 0) {
    Buffer inp(counting(32 * 8)), out(counting(32 * 8));
    const auto map = [](const Buffer& x, int64_t row) {
        return make_tensor_map(x.data, DType::f32, {row, 8}, {32}, {16, 8}, 0);
    };
    // <- box_off_16_bytes store_at_negative store_of_odd_rows misaligned_tile
    box_kernel<<<1, 32, 2 * kTileAlignment>>>(map(out, to_row), map(inp, 30), from_x, to_x, off);
    must(cudaDeviceSynchronize());
    return out.read()[8] == 12.0f;
}
bool box_off_16_bytes(bool wrong) { return box(wrong ? 6 : 4, 0, 32); }
bool store_at_negative(bool wrong) { return box(4, wrong ? -4 : 0, 32); }
bool store_of_odd_rows(bool wrong) { return box(4, 0, wrong ? 30 : 28); }
bool misaligned_tile(bool wrong) { return box(4, 0, 32, wrong ? 16 : 128); }

// ---------------------------------------------------------------------------------------------------------------------
// Addresses: what a GPU moves at once begins at a multiple of its bytes

// 32 x 4 numbers go through shared memory. The place of one of the instructions is `off` bytes further on.
enum Instruction {
    async_source = 1,
    async_destination,
    matrix_row,
    pack_load,
    pack_store,
    bulk_place,
    bulk_size,
    mbarrier
};
__global__ void aligned_kernel(float* out, const float* inp, Instruction which, size_t off) {
    __shared__ __align__(8) uint64_t landed;
    char* const tiles = reinterpret_cast<char*>(shared_tiles());
    const unsigned t = threadIdx.x;
    const auto at = [&](const void* address, Instruction here) {
        return const_cast<char*>(static_cast<const char*>(address)) + (which == here ? off : 0);
    };
    // clang-format off
    char* const row = tiles + 16 * t;
    // <- misaligned_source misaligned_destination
    cp_async_16(at(row, async_destination), at(inp + 4 * t, async_source));
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, at(row, matrix_row)); // <- misaligned_matrix_row
    const auto pack = load_packed(reinterpret_cast<const float*>(at(row, pack_load))); // <- misaligned_load
    store_packed(reinterpret_cast<float*>(at(row, pack_store)), pack);                 // <- misaligned_store
    fence_proxy_async();
    __syncwarp();
    if (t == 0) {
        // <- misaligned_bulk_copy odd_bulk_copy
        bulk_store(at(out, bulk_place), tiles, 512 + (which == bulk_size ? 8 : 0));
        bulk_commit();
        bulk_wait<0>();
        mbarrier_init(reinterpret_cast<uint64_t*>(at(&landed, mbarrier)), 1); // <- misaligned_mbarrier
    }
    // clang-format on
}
bool aligned(Instruction which, size_t off) {
    Buffer inp(counting(32 * 4 + 4)), out(32 * 4 + 4);
    // <- misaligned_source misaligned_destination misaligned_matrix_row misaligned_load misaligned_store
    // misaligned_bulk_copy odd_bulk_copy misaligned_mbarrier
    aligned_kernel<<<1, 32, 2 * kTileAlignment>>>(out.data, inp.data, which, off);
    must(cudaDeviceSynchronize());
    return out.read()[127] == 127.0f;
}
bool misaligned_source(bool wrong) { return aligned(async_source, wrong ? 4 : 0); }
bool misaligned_destination(bool wrong) { return aligned(async_destination, wrong ? 8 : 0); }
bool misaligned_matrix_row(bool wrong) { return aligned(matrix_row, wrong ? 2 : 0); }
bool misaligned_load(bool wrong) { return aligned(pack_load, wrong ? 4 : 0); }
bool misaligned_store(bool wrong) { return aligned(pack_store, wrong ? 12 : 0); }
bool misaligned_bulk_copy(bool wrong) { return aligned(bulk_place, wrong ? 4 : 0); }
bool odd_bulk_copy(bool wrong) { return aligned(wrong ? bulk_size : async_source, 0); }
bool misaligned_mbarrier(bool wrong) { return aligned(mbarrier, wrong ? 4 : 0); }

// What the rewriter adds to a kernel with __launch_bounds__, in make gpu-choices.
__global__ void bounds_kernel(float* out, unsigned n) {
    cuda_cpu::check_launch_bounds(n, 1);
    out[threadIdx.x] = 1.0f;
}
bool more_threads_than_bounds(bool wrong) {
    Buffer out(64);
    bounds_kernel<<<1, dim3(32, 2)>>>(out.data, wrong ? 63 : 64);  // <- more_threads_than_bounds
    must(cudaDeviceSynchronize());
    return out.read()[31] == 1.0f;
}

// ---------------------------------------------------------------------------------------------------------------------
// What Hopper's instructions ask of the kernel that uses them

enum Demand {
    all_met,
    arrivals,
    one_init,
    idle_when_invalidated,
    arrivals_of_a_phase,
    bytes_of_a_phase,
    init,
    number_of_barrier,
    copy_waited_for,
    copies_apart,
    store_read,
    store_committed,
    own_wait,
    rank_of_map
};
// Thread 0 of 64 loads a row, adds it to out, and loads a box to the place of the row.
__global__ void demands_kernel(float* out, const float* inp, const __grid_constant__ CUtensorMap map, Demand unmet) {
    // clang-format off
    __shared__ __align__(8) uint64_t landed;
    float* row = reinterpret_cast<float*>(shared_tiles());
    if (threadIdx.x == 0) {
        // <- mbarrier_of_no_arrivals mbarrier_initialised_twice too_many_arrivals
        if (unmet != init) mbarrier_init(&landed, unmet == arrivals ? 0 : 1);
        if (unmet == one_init) mbarrier_init(&landed, 1); // <- mbarrier_initialised_twice
        fence_proxy_async();
        // <- mbarrier_never_initialised too_many_bytes
        mbarrier_arrive_expect_tx(&landed, unmet == bytes_of_a_phase ? 1 << 20 : unmet == copies_apart ? 512 : 256);
        if (unmet == arrivals_of_a_phase) mbarrier_arrive(&landed);       // <- too_many_arrivals
        if (unmet == idle_when_invalidated) mbarrier_invalidate(&landed); // <- mbarrier_invalidated_in_use
        bulk_load(row, inp, 256, &landed);                                // <- two_copies_to_a_place
        if (unmet == copies_apart) bulk_load(row, inp, 256, &landed);     // <- two_copies_to_a_place
        mbarrier_wait(&landed, 0);
        // <- place_of_a_store_filled store_not_committed store_waited_for_by_another
        bulk_add(out, row, 256);
        if (unmet != store_committed) bulk_commit();
        if (unmet != store_read && unmet != own_wait) bulk_wait_read<0>();
        mbarrier_arrive_expect_tx(&landed, 256);
        // <- map_of_another_rank
        if (unmet == rank_of_map) tensor_load<3>(row, &map, {0, 0, 0}, &landed);
        // <- place_of_a_store_filled store_not_committed store_waited_for_by_another copy_not_waited_for
        else tensor_load<2>(unmet == own_wait ? row + 64 : row, &map, {0, 0}, &landed);
        if (unmet != copy_waited_for) mbarrier_wait(&landed, 1);
        if (unmet != own_wait) bulk_wait<0>();
    }
    named_barrier_sync(unmet == number_of_barrier ? 0 : 1, 64); // <- number_of_syncthreads
    if (threadIdx.x == 1) bulk_commit(), bulk_wait<0>();
    // clang-format on
}
bool demands(Demand unmet) {
    Buffer inp(counting(64)), out(std::vector<float>(64, 1.0f));
    const CUtensorMap map = make_tensor_map(inp.data, DType::f32, {16, 4}, {16}, {16, 4}, 0);
    // <- mbarrier_of_no_arrivals mbarrier_initialised_twice mbarrier_invalidated_in_use too_many_arrivals
    // too_many_bytes mbarrier_never_initialised number_of_syncthreads copy_not_waited_for two_copies_to_a_place
    // place_of_a_store_filled store_not_committed store_waited_for_by_another map_of_another_rank
    demands_kernel<<<1, 64, 2 * kTileAlignment>>>(out.data, inp.data, map, unmet);
    must(cudaDeviceSynchronize());
    return out.read()[63] == 64.0f;
}
bool mbarrier_of_no_arrivals(bool wrong) { return demands(wrong ? arrivals : all_met); }
bool mbarrier_initialised_twice(bool wrong) { return demands(wrong ? one_init : all_met); }
bool mbarrier_invalidated_in_use(bool wrong) { return demands(wrong ? idle_when_invalidated : all_met); }
bool too_many_arrivals(bool wrong) { return demands(wrong ? arrivals_of_a_phase : all_met); }
bool too_many_bytes(bool wrong) { return demands(wrong ? bytes_of_a_phase : all_met); }
bool mbarrier_never_initialised(bool wrong) { return demands(wrong ? init : all_met); }
bool number_of_syncthreads(bool wrong) { return demands(wrong ? number_of_barrier : all_met); }
bool copy_not_waited_for(bool wrong) { return demands(wrong ? copy_waited_for : all_met); }
bool two_copies_to_a_place(bool wrong) { return demands(wrong ? copies_apart : all_met); }
bool place_of_a_store_filled(bool wrong) { return demands(wrong ? store_read : all_met); }
bool store_not_committed(bool wrong) { return demands(wrong ? store_committed : all_met); }
bool store_waited_for_by_another(bool wrong) { return demands(wrong ? own_wait : all_met); }
bool map_of_another_rank(bool wrong) { return demands(wrong ? rank_of_map : all_met); }

// A warp group multiplies a tile by ones, three times; after each of them a thread of another warp fills the tile
// again, which it may do behind a barrier.
enum Disagreement { agreement, two_products, two_tiles, tile_outside, more_than_a_group };
__global__ void group_kernel(float* out, const __nv_bfloat16* inp, Disagreement which) {
    // clang-format off
    __shared__ __align__(8) uint64_t landed;
    __nv_bfloat16* tile = reinterpret_cast<__nv_bfloat16*>(shared_tiles());
    const unsigned t = threadIdx.x;
    if (t == 0) mbarrier_init(&landed, 1);
    for (unsigned i = t; i < 64 * 16; i += blockDim.x) tile[i] = from_float<__nv_bfloat16>(1.0f);
    fence_proxy_async();
    __syncthreads();
    float d[1][4] = {};
    const unsigned off = which == two_tiles && t == 70 ? 64 : which == tile_outside ? 4096 : 0;
    const uint64_t a = wgmma_descriptor<0>(tile + off, 128, 256), b = wgmma_descriptor<0>(tile, 128, 256);
    for (int round = 0; round < 3; ++round) {
        if (t < (which == more_than_a_group ? 160 : 128)) {
            wgmma_fence(d);
            // <- two_products_of_a_group two_tiles_of_a_group tile_outside_shared_memory wgmma_of_a_warp
            if (which != two_products || t < 70) wgmma_m64k16<__nv_bfloat16>(d, a, b, true);
            else wgmma_m64k16<__nv_bfloat16>(d, a, b, true); // <- two_products_of_a_group
            wgmma_commit();
            wgmma_wait<0>(d);
        }
        if (round == 0) __syncthreads();
        else named_barrier_sync(1, 160);
        if (t == 128) {
            mbarrier_arrive_expect_tx(&landed, 2048);
            bulk_load(tile, inp, 2048, &landed);
        }
        mbarrier_wait(&landed, round % 2);
    }
    if (t < 128) out[t] = d[0][0];
    // clang-format on
}
bool group(Disagreement which) {
    Buffer inp(512), out(128);
    const std::vector<__nv_bfloat16> ones(1024, from_float<__nv_bfloat16>(1.0f));
    must(cudaMemcpy(inp.data, ones.data(), 2048, cudaMemcpyHostToDevice));
    const __nv_bfloat16* numbers = reinterpret_cast<const __nv_bfloat16*>(inp.data);
    // <- two_products_of_a_group two_tiles_of_a_group tile_outside_shared_memory wgmma_of_a_warp
    group_kernel<<<1, 160, 2048 + kTileAlignment>>>(out.data, numbers, which);
    must(cudaDeviceSynchronize());
    return out.read()[127] == 48.0f;
}
bool two_products_of_a_group(bool wrong) { return group(wrong ? two_products : agreement); }
bool two_tiles_of_a_group(bool wrong) { return group(wrong ? two_tiles : agreement); }
bool tile_outside_shared_memory(bool wrong) { return group(wrong ? tile_outside : agreement); }
bool wgmma_of_a_warp(bool wrong) { return group(wrong ? more_than_a_group : agreement); }

// ---------------------------------------------------------------------------------------------------------------------
// Warps that are far apart

// Warp 1 reads a number that warp 0 overwrites after long work. Without the barrier this is right unless warp 1 is
// late.
__global__ void late_warp_kernel(float* out, bool wrong) {
    __shared__ float number;
    if (threadIdx.x == 0) number = 1.0f;
    __syncthreads();
    __syncwarp();
    if (threadIdx.x / 32 == 1) out[blockIdx.x * 32 + threadIdx.x % 32] = number;
    else
        for (int i = 0; i < 100; ++i) __syncwarp();
    if (!wrong) __syncthreads();
    if (threadIdx.x == 0) number = 2.0f;
}
bool late_warp(bool wrong) {
    Buffer out(64 * 32);
    late_warp_kernel<<<64, 64>>>(out.data, wrong);
    for (const float number : out.read())
        if (number != 1.0f) return false;
    return true;
}

// A scale for each 128 x 128 block of an fp8 matrix: the scales of a row of blocks have four places, also if they are
// fewer, so that those of the second row begin behind as many numbers.
bool scale_overwritten(bool wrong) {
    constexpr uint64_t m = 144, n = 4, k = 128;
    Buffer a(m * k / sizeof(float)), b(n * k / sizeof(float)), d(m * n);
    Buffer a_scales(std::vector<float>(5, 1.0f)), b_scales(std::vector<float>(n, 1.0f));
    for (const Buffer* matrix : {&a, &b}) must(cudaMemset(matrix->data, 0x38, matrix->n * sizeof(float)));  // ones
    must(cudaDeviceSynchronize());
    cublasLtMatmulDescOpaque_t operation;
    operation.transpose_a = CUBLAS_OP_T, operation.a_scale = a_scales.data, operation.b_scale = b_scales.data;
    operation.a_scale_mode = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    operation.b_scale_mode = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    cublasLtMatrixLayoutOpaque_t of_a{CUDA_R_8F_E4M3, CUBLASLT_ORDER_COL, k, m, k},
        of_b{CUDA_R_8F_E4M3, CUBLASLT_ORDER_COL, k, n, k}, of_d{CUDA_R_32F, CUBLASLT_ORDER_COL, m, n, m};
    cublasLtHandle_t handle;
    const float one = 1, zero = 0;
    Streams s;
    cublasLtCreate(&handle);
    const cublasStatus_t status = cublasLtMatmul(  // <- scale_overwritten
        handle, &operation, &one, a.data, &of_a, b.data, &of_b, &zero, d.data, &of_d, d.data, &of_d, nullptr, nullptr,
        0, s.first);
    if (status != CUBLAS_STATUS_SUCCESS) std::exit(3);
    must(cudaEventRecord(s.event, s.first));
    if (!wrong) must(cudaStreamWaitEvent(s.second, s.event));
    must(cudaMemsetAsync(a_scales.data + 4, 0, 4, s.second));  // <- scale_overwritten
    must(cudaDeviceSynchronize());
    cublasLtDestroy(handle);
    return d.read()[143] == 128.0f;
}

struct Product {
    float *c, *aux, *bias, *scalars;
};
// What a product touches beside its factors and D: C, AUX, a bias' gradient, alpha and beta. D is 1 times the
// derivative of GELU at 0: a half. Beside it a memset of the n numbers at `touched`, or a copy of them.
bool product_and(bool wrong, bool writes, float* Product::*touched, size_t n) {
    Buffer zeros(std::vector<float>(64, 0.0f)), ones(std::vector<float>(64, 1.0f)), d(64);
    Buffer aux(std::vector<float>(64, 0.0f)), bias(8), scalars(std::vector<float>{1.0f, 1.0f}), copied(64);
    const Product product{ones.data, aux.data, bias.data, scalars.data};
    cublasLtMatmulDescOpaque_t operation;
    operation.epilogue = CUBLASLT_EPILOGUE_DGELU_BGRAD, operation.pointer_mode = CUBLASLT_POINTER_MODE_DEVICE;
    operation.aux = product.aux, operation.aux_ld = 8, operation.bias = product.bias;
    cublasLtMatrixLayoutOpaque_t layout{CUDA_R_32F, CUBLASLT_ORDER_COL, 8, 8, 8};
    cublasLtHandle_t handle;
    Streams s;
    cublasLtCreate(&handle);
    if (cublasLtMatmul(  // <- c_overwritten aux_overwritten scalars_overwritten gradient_too_early
            handle, &operation, product.scalars, zeros.data, &layout, zeros.data, &layout, product.scalars + 1,
            product.c, &layout, d.data, &layout, nullptr, nullptr, 0, s.first) != CUBLAS_STATUS_SUCCESS)
        std::exit(3);
    must(cudaEventRecord(s.event, s.first));
    if (!wrong) must(cudaStreamWaitEvent(s.second, s.event));
    // <- c_overwritten aux_overwritten scalars_overwritten
    if (writes) must(cudaMemsetAsync(product.*touched, 0, n * sizeof(float), s.second));
    // <- gradient_too_early
    else must(cudaMemcpyAsync(copied.data, product.*touched, n * sizeof(float), cudaMemcpyDeviceToDevice, s.second));
    must(cudaDeviceSynchronize());
    cublasLtDestroy(handle);
    return d.read()[63] == 0.5f && (writes || copied.read()[0] == 4.0f);
}
bool c_overwritten(bool wrong) { return product_and(wrong, true, &Product::c, 64); }
bool aux_overwritten(bool wrong) { return product_and(wrong, true, &Product::aux, 64); }
bool scalars_overwritten(bool wrong) { return product_and(wrong, true, &Product::scalars, 2); }
bool gradient_too_early(bool wrong) { return product_and(wrong, false, &Product::bias, 8); }

// 48 KiB less 64 bytes of the launch, and 128 bytes of its own.
__global__ void two_kinds_of_shared_kernel(float* out) {
    extern __shared__ float asked_for[];
    __shared__ float own[32];
    own[threadIdx.x] = 1.0f;
    asked_for[threadIdx.x] = 2.0f;
    out[threadIdx.x] = own[threadIdx.x] + asked_for[threadIdx.x];
}
bool shared_memory_not_asked_for(bool wrong) {
    constexpr int n_bytes = (48 << 10) - 64;
    Buffer out(32);
    if (!wrong)
        must(cudaFuncSetAttribute(two_kinds_of_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    two_kinds_of_shared_kernel<<<1, 32, n_bytes>>>(out.data);  // <- shared_memory_not_asked_for
    must(cudaDeviceSynchronize());
    return out.read()[31] == 3.0f;
}

// ---------------------------------------------------------------------------------------------------------------------
// NCCL: two ranks, each a thread with a device of its own

struct Rank {
    int rank;
    ncclComm_t comm;
    cudaStream_t stream;
    float* data;   // of this rank's device: eight numbers, all of them rank + 1
    float* other;  // the other rank's
};
void must(ncclResult_t status) {
    if (status == ncclSuccess) return;
    std::printf("NCCL error: %s: %s\n", ncclGetErrorString(status), ncclGetLastError(nullptr));
    std::exit(3);
}
// Whether `first` and `last` are the first and last of the numbers of both ranks, after f.
bool two_ranks(float first, float last, void (*f)(const Rank& its, bool wrong), bool wrong) {
    setenv("CUDA_CPU_DEVICES", "2", 1);
    ncclUniqueId id;
    must(ncclGetUniqueId(&id));
    float* memory[2];
    for (const int rank : {0, 1}) {
        must(cudaSetDevice(rank));
        const std::vector<float> numbers(8, static_cast<float>(rank + 1));
        must(cudaMalloc(&memory[rank], 8 * sizeof(float)));
        must(cudaMemcpy(memory[rank], numbers.data(), 8 * sizeof(float), cudaMemcpyHostToDevice));
        must(cudaDeviceSynchronize());
    }
    bool right[2];
    const auto run = [&](int rank) {
        Rank its{rank, nullptr, nullptr, memory[rank], memory[1 - rank]};
        must(cudaSetDevice(rank));
        must(cudaStreamCreateWithFlags(&its.stream, cudaStreamNonBlocking));
        must(ncclCommInitRank(&its.comm, 2, id, rank));
        f(its, wrong);
        must(cudaDeviceSynchronize());
        must(ncclCommDestroy(its.comm));
        float numbers[8];
        must(cudaMemcpy(numbers, its.data, sizeof numbers, cudaMemcpyDeviceToHost));
        right[rank] = numbers[0] == first && numbers[7] == last;
    };
    std::thread other(run, 1);
    run(0);
    other.join();
    return right[0] && right[1];
}
void add(const Rank& its, size_t n) {
    // <- ranks_of_other_counts another_current_device stream_of_another_device collective_not_waited_for
    must(ncclAllReduce(its.data, its.data, n, ncclFloat32, ncclSum, its.comm, its.stream));
}

bool ranks_of_other_counts(bool wrong) {
    const auto f = [](const Rank& its, bool bad) { add(its, bad && its.rank == 1 ? 7 : 8); };
    return two_ranks(3, 3, f, wrong);
}
bool ranks_of_other_roots(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        const int root = bad ? its.rank : 0;
        must(ncclBroadcast(its.data, its.data, 8, ncclFloat32, root, its.comm, its.stream));  // <- ranks_of_other_roots
    };
    return two_ranks(1, 1, f, wrong);
}
bool messages_of_other_sizes(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        // <- messages_of_other_sizes
        if (its.rank == 0) must(ncclSend(its.data, 8, ncclFloat32, 1, its.comm, its.stream));
        else must(ncclRecv(its.data, bad ? 28 : 32, ncclUint8, 0, its.comm, its.stream));  // <- messages_of_other_sizes
    };
    return two_ranks(1, 1, f, wrong);
}
bool buffers_that_overlap(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        // In place a rank sends from its own piece of what it gathers.
        const float* const piece = its.data + 4 * (bad ? 1 - its.rank : its.rank);
        must(ncclAllGather(piece, its.data, 4, ncclFloat32, its.comm, its.stream));  // <- buffers_that_overlap
    };
    return two_ranks(1, 2, f, wrong);
}
bool group_that_overlaps(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        must(ncclGroupStart());
        float* const to = its.data + (bad ? 3 : 4);
        must(ncclSend(its.data, 4, ncclFloat32, 1 - its.rank, its.comm, its.stream));  // <- group_that_overlaps
        must(ncclRecv(to, 4, ncclFloat32, 1 - its.rank, its.comm, its.stream));        // <- group_that_overlaps
        must(ncclGroupEnd());
        add(its, 4);
        must(ncclBroadcast(its.data, its.data, 8, ncclFloat32, 0, its.comm, its.stream));
    };
    return two_ranks(3, 2, f, wrong);
}
bool group_with_two_results_in_a_place(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        float* const second = its.data + (bad ? 5 : 6);
        must(ncclGroupStart());
        // <- group_with_two_results_in_a_place
        must(ncclAllReduce(its.data, its.data + 4, 2, ncclFloat32, ncclSum, its.comm, its.stream));
        // <- group_with_two_results_in_a_place
        must(ncclAllReduce(its.data + 2, second, 2, ncclFloat32, ncclSum, its.comm, its.stream));
        must(ncclGroupEnd());
        add(its, 4);
    };
    return two_ranks(3, 3, f, wrong);
}
bool memory_of_another_rank(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        const float* const data = bad && its.rank == 0 ? its.other : its.data;
        must(
            ncclAllReduce(data, its.data, 8, ncclFloat32, ncclMax, its.comm, its.stream));  // <- memory_of_another_rank
    };
    return two_ranks(2, 2, f, wrong);
}
bool buffer_beyond_its_memory(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        // <- buffer_beyond_its_memory
        must(ncclAllReduce(its.data, its.data, bad ? 9 : 8, ncclFloat32, ncclSum, its.comm, its.stream));
    };
    return two_ranks(3, 3, f, wrong);
}
bool another_current_device(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        if (bad) must(cudaSetDevice(1 - its.rank));
        add(its, 8);
    };
    return two_ranks(3, 3, f, wrong);
}
bool stream_of_another_device(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        Rank with_another = its;
        if (bad) {
            must(cudaSetDevice(1 - its.rank));
            must(cudaStreamCreateWithFlags(&with_another.stream, cudaStreamNonBlocking));
            must(cudaSetDevice(its.rank));
        }
        add(with_another, 8);
    };
    return two_ranks(3, 3, f, wrong);
}
// The first number becomes 0, in a stream that may wait for what the rank's stream has to do.
void clear_beside(const Rank& its, bool waits) {
    cudaStream_t second;
    cudaEvent_t event;
    must(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    must(cudaEventCreate(&event));
    must(cudaEventRecord(event, its.stream));
    if (waits) must(cudaStreamWaitEvent(second, event));
    must(cudaMemsetAsync(its.data, 0, sizeof(float), second));  // <- collective_not_waited_for sent_and_overwritten
}
bool collective_not_waited_for(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        add(its, 8);
        clear_beside(its, !bad);
    };
    return two_ranks(0, 3, f, wrong);
}
bool sent_and_overwritten(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        // <- sent_and_overwritten
        if (its.rank == 0) must(ncclSend(its.data, 8, ncclFloat32, 1, its.comm, its.stream));
        else must(ncclRecv(its.data, 8, ncclFloat32, 0, its.comm, its.stream));
        clear_beside(its, its.rank == 1 || !bad);
    };
    return two_ranks(0, 1, f, wrong);
}
bool split_while_under_way(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        // Rank 0 has called it before there is a rank 1 to add with, so that under no seed the sum is there already.
        if (bad && its.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        add(its, 8);
        if (!bad) must(cudaStreamSynchronize(its.stream));
        ncclComm_t part;
        must(ncclCommSplit(its.comm, its.rank, 0, &part, nullptr));  // <- split_while_under_way
        must(ncclCommDestroy(part));
    };
    return two_ranks(3, 3, f, wrong);
}
bool used_after_destruction(bool wrong) {
    const auto f = [](const Rank& its, bool bad) {
        ncclComm_t copy;
        must(ncclCommSplit(its.comm, 0, its.rank, &copy, nullptr));
        must(ncclCommDestroy(copy));
        const ncclComm_t comm = bad ? copy : its.comm;
        must(
            ncclAllReduce(its.data, its.data, 8, ncclFloat32, ncclSum, comm, its.stream));  // <- used_after_destruction
    };
    return two_ranks(3, 3, f, wrong);
}

struct Case {
    const char* name;
    bool (*run)(bool wrong);  // true: the result was right
};
// clang-format off
#define CASE(name) {#name, name}
const Case cases[] = {
    CASE(missing_syncthreads), CASE(threads_in_order), CASE(missing_syncwarp), CASE(missing_second_syncwarp),
    CASE(blocks_in_order), CASE(missing_event_wait), CASE(missing_wait_for_memset), CASE(read_while_overwritten),
    CASE(recorded_too_early), CASE(missing_wait_in_graph), CASE(graph_not_waited_for),
    CASE(two_writers), CASE(writers_in_structures), CASE(missing_stream_sync), CASE(pinned_overwritten),
    CASE(uninitialised_device_memory), CASE(uninitialised_shared_memory), CASE(uninitialised_dynamic_shared_memory),
    CASE(past_the_end), CASE(past_an_odd_end), CASE(before_the_start), CASE(before_a_page), CASE(reads_past_the_end),
    CASE(reads_past_an_odd_end), CASE(use_after_free), CASE(null_pointer), CASE(past_dynamic_shared_memory),
    CASE(stack_overflow), CASE(divergent_barrier), CASE(early_return), CASE(two_barriers),
    CASE(missing_lane), CASE(mask_without_lane), CASE(two_collectives), CASE(async_copy_not_waited_for),
    CASE(async_copy_not_committed), CASE(missing_mbarrier_wait), CASE(wrong_parity), CASE(missing_empty_wait),
    CASE(missing_expect_tx), CASE(missing_fence_of_mbarrier), CASE(missing_proxy_fence), CASE(missing_wgmma_fence),
    CASE(missing_wgmma_commit), CASE(missing_wgmma_wait), CASE(released_too_early), CASE(operand_overwritten),
    CASE(fragment_overwritten), CASE(accumulator_overwritten), CASE(product_not_waited_for), CASE(tile_off_the_pattern),
    CASE(registers_of_half_a_group), CASE(too_many_registers),
    CASE(ordinary_read_in_flight), CASE(missing_store_fence), CASE(missing_bulk_wait_read), CASE(missing_bulk_wait),
    CASE(arrival_that_never_comes), CASE(named_barrier_of_other_size), CASE(box_off_16_bytes), CASE(store_at_negative),
    CASE(store_of_odd_rows), CASE(late_warp), CASE(misaligned_source), CASE(misaligned_destination),
    CASE(misaligned_matrix_row), CASE(misaligned_load), CASE(misaligned_store), CASE(misaligned_bulk_copy),
    CASE(odd_bulk_copy), CASE(misaligned_tile), CASE(misaligned_mbarrier),
    CASE(more_threads_than_bounds), CASE(scale_overwritten), CASE(shared_memory_not_asked_for),
    CASE(c_overwritten), CASE(aux_overwritten), CASE(scalars_overwritten),
    CASE(gradient_too_early),
    CASE(ranks_of_other_counts), CASE(ranks_of_other_roots), CASE(messages_of_other_sizes), CASE(buffers_that_overlap),
    CASE(group_that_overlaps), CASE(group_with_two_results_in_a_place), CASE(memory_of_another_rank),
    CASE(buffer_beyond_its_memory), CASE(another_current_device), CASE(stream_of_another_device),
    CASE(collective_not_waited_for), CASE(sent_and_overwritten),
    CASE(split_while_under_way), CASE(used_after_destruction),
    CASE(mbarrier_of_no_arrivals), CASE(mbarrier_initialised_twice), CASE(mbarrier_invalidated_in_use),
    CASE(too_many_arrivals), CASE(too_many_bytes), CASE(mbarrier_never_initialised), CASE(number_of_syncthreads),
    CASE(copy_not_waited_for), CASE(two_copies_to_a_place), CASE(place_of_a_store_filled), CASE(store_not_committed),
    CASE(store_waited_for_by_another), CASE(map_of_another_rank), CASE(two_products_of_a_group),
    CASE(two_tiles_of_a_group), CASE(tile_outside_shared_memory), CASE(wgmma_of_a_warp),
};
// clang-format on

}  // namespace

int main(int argc, char** argv) {
    for (const Case& c : cases) {
        if (argc == 3 && std::strcmp(argv[1], c.name) == 0) {
            const bool right = c.run(std::strcmp(argv[2], "wrong") == 0);
            std::printf("%s result\n", right ? "right" : "wrong");
            return right ? 0 : 1;
        }
    }
    std::printf("usage: wrong_kernels CASE right|wrong, with CASE one of\n");
    for (const Case& c : cases) std::printf("  %s\n", c.name);
    return 2;
}
