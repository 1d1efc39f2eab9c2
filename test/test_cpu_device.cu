// The device itself: launches, built-in variables, barriers, warp exchanges, atomics, shared memory, arithmetic.
//
// Plain CUDA: under nvcc the same tests run on a GPU, and say whether our device does what NVIDIA's does. What only the
// CPU device has is behind CUDA_ON_CPU. test_cpu_runtime.cu has streams, events, copies and devices.
#include "test.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <latch>
#include <random>
#include <thread>

#ifdef CUDA_ON_CPU
#include <omp.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace {

constexpr unsigned kAll = 0xffffffffu;

// Device memory for n elements; all bytes 0.
template <class T>
struct Buffer {
    T* data = nullptr;
    size_t n;
    explicit Buffer(size_t n_) : n(n_) {
        REQUIRE(cudaMalloc(&data, n * sizeof(T)) == cudaSuccess);
        REQUIRE(cudaMemset(data, 0, n * sizeof(T)) == cudaSuccess);
        REQUIRE(cudaStreamSynchronize(nullptr) == cudaSuccess);  // the memset was put on a stream, no more
    }
    explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
        REQUIRE(cudaMemcpy(data, values.data(), n * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { cudaFree(data); }
    std::vector<T> read(bool same_in_every_run = true) const {
        std::vector<T> values(n);
        REQUIRE(cudaMemcpy(values.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
        if (same_in_every_run) record_bits(values.data(), n * sizeof(T));
        return values;
    }
};

void check_launch() {
    REQUIRE(cudaGetLastError() == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches

struct Place {
    uint3 thread, block;
    dim3 block_size, grid_size;
};

// Every thread writes down where it is; with waits, only after it has waited in several ways.
__global__ void where_kernel(Place* places, unsigned* visits, int waits) {
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    for (int i = 0; i < waits; ++i) {
        if (i % 2 == 0) __syncthreads();
        else __syncwarp();
    }
    const unsigned i = block * (blockDim.x * blockDim.y * blockDim.z) + thread;
    places[i].thread = threadIdx;
    places[i].block = blockIdx;
    places[i].block_size = blockDim;
    places[i].grid_size = gridDim;
    atomicAdd(&visits[i], 1u);
}

void check_places(dim3 grid, dim3 block, int waits) {
    const size_t n = size_t{grid.x} * grid.y * grid.z * block.x * block.y * block.z;
    Buffer<Place> places(n);
    Buffer<unsigned> visits(n);
    where_kernel<<<grid, block>>>(places.data, visits.data, waits);
    check_launch();
    const std::vector<Place> p = places.read();
    const std::vector<unsigned> v = visits.read();
    size_t i = 0, n_wrong = 0;
    for (unsigned bz = 0; bz < grid.z; ++bz)
        for (unsigned by = 0; by < grid.y; ++by)
            for (unsigned bx = 0; bx < grid.x; ++bx)
                for (unsigned z = 0; z < block.z; ++z)
                    for (unsigned y = 0; y < block.y; ++y)
                        for (unsigned x = 0; x < block.x; ++x, ++i) {
                            const Place &at = p[i], want{{x, y, z}, {bx, by, bz}, block, grid};
                            n_wrong += std::memcmp(&at, &want, sizeof at) != 0 || v[i] != 1;
                        }
    INFO("block " << block.x << "," << block.y << "," << block.z << " waits " << waits);
    CHECK(n_wrong == 0);
}

template <class T, int kTimes>
__global__ void axpy_kernel(T* out, const T* inp, T a, size_t n) {
    const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < n)
        for (int k = 0; k < kTimes; ++k) out[i] += a * inp[i];
}

template <class T>
void launch_axpy(T* out, const T* inp, double a, int64_t n) {
    constexpr int kBlock = 96;
    // Sizes are 64-bit integers here, as they are in the layers, and `a` is not of the kernel's type.
    const auto go = [&](auto argument) {
        axpy_kernel<T, 2><<<(n + kBlock - 1) / kBlock, kBlock>>>(out, inp, argument, n);
    };
    go(static_cast<T>(a));
}

__global__ void count_kernel(int* counter) { atomicAdd(counter, 1); }
__global__ void answer_kernel(int* out, int answer) { *out = answer; }

}  // namespace

TEST_CASE("threads know where they are, in one, two and three dimensions", "[cpu]") {
    for (const dim3 block : {dim3(1), dim3(2), dim3(31), dim3(32), dim3(33), dim3(257), dim3(1024), dim3(5, 3, 2),
                             dim3(16, 16), dim3(1, 1, 64), dim3(1, 40, 1), dim3(8, 8, 16), dim3(3, 11, 31)})
        for (const int waits : {0, 1, 2, 5}) check_places(dim3(2), block, waits);
    check_places(dim3(3, 2, 5), dim3(7, 3), 3);
    check_places(dim3(1, 1, 4), dim3(64), 1);
    check_places(dim3(1000), dim3(3), 0);
}

TEST_CASE("kernels are launched from templates, lambdas, and through pointers, with any integer as size", "[cpu]") {
    Buffer<double> inp(std::vector<double>(1000, 0.5)), out(1000);
    launch_axpy(out.data, inp.data, 3.0, 1000);
    check_launch();
    CHECK(out.read() == std::vector<double>(1000, 3.0));

    Buffer<int> counter(1);
    const short grid = 3;
    const long long block = 70;
    count_kernel<<<grid, block>>>(counter.data);
    count_kernel<<<dim3(2, 2), 10>>>(counter.data);
    count_kernel<<<dim3{1, 1, 2}, dim3{4}, 0, nullptr>>>(counter.data);
    check_launch();
    CHECK(counter.read()[0] == 3 * 70 + 40 + 8);

    void (*const kernel)(int*, int) = answer_kernel;
    kernel<<<1, 1>>>(counter.data, 'a');
    check_launch();
    CHECK(counter.read()[0] == 'a');
}

TEST_CASE("a launch with impossible sizes is an error, and does nothing", "[cpu]") {
    Buffer<int> counter(1);
    const auto refused = [&] {
        CHECK(cudaPeekAtLastError() != cudaSuccess);
        const cudaError_t error = cudaGetLastError();
        CHECK(cudaGetLastError() == cudaSuccess);  // reading it clears it
        return error == cudaErrorInvalidConfiguration || error == cudaErrorInvalidValue;
    };
    count_kernel<<<1, 0>>>(counter.data);
    CHECK(refused());
    count_kernel<<<0, 1>>>(counter.data);
    CHECK(refused());
    count_kernel<<<1, 1025>>>(counter.data);
    CHECK(refused());
    count_kernel<<<1, dim3(32, 33)>>>(counter.data);
    CHECK(refused());
    count_kernel<<<1, dim3(1, 1, 65)>>>(counter.data);
    CHECK(refused());
    count_kernel<<<dim3(1, 65536), 1>>>(counter.data);
    CHECK(refused());
    count_kernel<<<1, 1, 300 << 10>>>(counter.data);
    CHECK(refused());
    count_kernel<<<1, 1024>>>(counter.data);
    check_launch();
    CHECK(counter.read()[0] == 1024);
    CHECK(std::string(cudaGetErrorName(cudaErrorInvalidConfiguration)) == "cudaErrorInvalidConfiguration");
    CHECK(std::strlen(cudaGetErrorString(cudaErrorInvalidConfiguration)) > 0);
}

#ifdef CUDA_ON_CPU
TEST_CASE("several OS threads launch at once, and from inside a parallel region", "[cpu]") {
    std::vector<std::thread> threads;
    std::atomic<int> n_wrong{0};
    for (int rank = 0; rank < 4; ++rank)
        threads.emplace_back([rank, &n_wrong] {
            int* counter = nullptr;
            cudaMalloc(&counter, sizeof(int));
            cudaMemset(counter, 0, sizeof(int));
            for (int i = 0; i < 50; ++i) count_kernel<<<7, 33 + rank>>>(counter);
            int count = 0;
            cudaMemcpy(&count, counter, sizeof(int), cudaMemcpyDeviceToHost);
            n_wrong += count != 50 * 7 * (33 + rank);
            cudaFree(counter);
        });
    for (std::thread& thread : threads) thread.join();
    CHECK(n_wrong == 0);

    Buffer<int> counters(8);
#pragma omp parallel for num_threads(2)
    for (int i = 0; i < 8; ++i) {
        count_kernel<<<5, 40>>>(counters.data + i);
        cudaDeviceSynchronize();
    }
    CHECK(counters.read() == std::vector<int>(8, 200));
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Barriers and shared memory

namespace {

// Reverses n numbers a block through shared memory, again and again.
template <int kRounds>
__global__ void reverse_kernel(int* data) {
    __shared__ int row[1024];
    const unsigned t = threadIdx.x, n = blockDim.x;
    int value = data[blockIdx.x * n + t];
    for (int round = 0; round < kRounds; ++round) {
        row[t] = value;
        __syncthreads();  // the row is there
        value = row[n - 1 - t] + 1;
        __syncthreads();  // everybody has read it
    }
    data[blockIdx.x * n + t] = value;
}

// Some warps leave before the exchanges of the others; warps do different numbers of exchanges; all within one block.
__global__ void ragged_kernel(int* out) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp % 3 == 1) return;
    int sum = static_cast<int>(lane);
    for (unsigned i = 0; i < warp; ++i) sum += __shfl_sync(kAll, sum, i % 32);
    out[threadIdx.x] = sum;
}

// Lanes that have diverged exchange among themselves: evens with evens, odds with odds, different numbers of times.
__global__ void diverged_kernel(int* out) {
    const unsigned lane = threadIdx.x % 32;
    int value = static_cast<int>(threadIdx.x);
    if (lane % 2 == 0) {
        for (int i = 0; i < 3; ++i) value = __shfl_xor_sync(0x55555555u, value, 2);
    } else {
        value = __shfl_xor_sync(0xaaaaaaaau, value, 4);
        if (lane % 4 == 1) value += __shfl_xor_sync(0x22222222u, 1000, 8);
    }
    __syncwarp();
    out[threadIdx.x] = value;
}

__global__ void two_shared_kernel(int* out) {
    __shared__ int fixed[33];
    extern __shared__ int asked_for[];
    const unsigned t = threadIdx.x;
    fixed[t] = static_cast<int>(t);
    asked_for[t] = static_cast<int>(100 * t);
    __syncthreads();
    const unsigned other = blockDim.x - 1 - t;
    out[blockIdx.x * blockDim.x + t] = fixed[other] + asked_for[other];
}

// A program of random steps, run by every thread of a block; which warps take part in a step is in its bits.
struct Step {
    int kind;  // 0: through shared memory. 1: an exchange in a warp. 2: in its lower half. 3: the warp leaves
    unsigned k, warps;
};
__global__ void program_kernel(unsigned* values, const Step* steps, int n_steps) {
    extern __shared__ unsigned row[];
    const unsigned t = threadIdx.x, n = blockDim.x, lane = t % 32, warp = t / 32;
    const unsigned n_lanes = n - warp * 32 < 32 ? n - warp * 32 : 32, mask = n_lanes == 32 ? kAll : (1u << n_lanes) - 1;
    unsigned* mine = values + blockIdx.x * n + t;
    unsigned v = *mine;
    for (int i = 0; i < n_steps; ++i) {
        const Step s = steps[i];
        const bool takes_part = s.warps >> warp & 1;
        if (s.kind == 0) {
            row[t] = v;
            __syncthreads();
            v = 3 * row[(t + s.k) % n] + t;
            __syncthreads();
        } else if (s.kind == 1 && takes_part) {
            v += __shfl_sync(mask, v, static_cast<int>(s.k % n_lanes));
        } else if (s.kind == 2 && takes_part && lane < 16) {
            v ^= __shfl_sync(mask & 0xffffu, v, static_cast<int>(s.k % (n_lanes < 16 ? n_lanes : 16)));
        } else if (s.kind == 3 && takes_part) {
            break;
        }
    }
    *mine = v;
}
std::vector<unsigned> program_on_host(std::vector<unsigned> v, const std::vector<Step>& steps, unsigned n) {
    std::vector<bool> gone(v.size());
    for (const Step& s : steps) {
        const std::vector<unsigned> before = v;
        for (unsigned i = 0; i < v.size(); ++i) {
            const unsigned t = i % n, block = i - t, warp = t / 32, n_lanes = std::min(32u, n - warp * 32),
                           first = block + warp * 32;
            if (gone[i] || (s.kind > 0 && !(s.warps >> warp & 1))) continue;
            if (s.kind == 0) v[i] = 3 * before[block + (t + s.k) % n] + t;
            if (s.kind == 1) v[i] += before[first + s.k % n_lanes];
            if (s.kind == 2 && t % 32 < 16) v[i] ^= before[first + s.k % std::min(16u, n_lanes)];
            if (s.kind == 3) gone[i] = true;
        }
    }
    return v;
}

}  // namespace

#if defined(CUDA_ON_CPU) && !defined(__SANITIZE_ADDRESS__)  // whose own memory is taken with this limit, too
// In a child process, on a thread that has run no block with so much shared memory: exit status 2, and 0 with memory.
TEST_CASE("a block for whose shared memory the machine has no memory ends the program with one line") {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        std::thread([] {
            constexpr int kBytes = 200 << 10;
            int out[33];
            cudaFuncSetAttribute(two_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
            two_shared_kernel<<<1, 33, 33 * sizeof(int)>>>(out);
            cudaDeviceSynchronize();
            const rlimit none{0, 0};
            setrlimit(RLIMIT_AS, &none);
            for (void* volatile taken = out; taken;) taken = std::malloc(kBytes / 2);  // volatile: else g++ takes none
            two_shared_kernel<<<1, 33, kBytes>>>(out);
            cudaDeviceSynchronize();
        }).join();
        _exit(0);
    }
    close(ends[1]);
    std::string line;
    char text[500];
    for (ssize_t n; (n = read(ends[0], text, sizeof text)) > 0;) line.append(text, static_cast<size_t>(n));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 2));
    CHECK(line.find("no memory for the shared memory of kernel 'two_shared_kernel'") != std::string::npos);
    CHECK(line.find('\n') == line.size() - 1);
}

// In a child process, which ends with status 2 where the system has no mapping left for the pages below their stacks.
TEST_CASE("hundreds of OS threads have stacks for blocks of 128 threads at the same time", "[cpu]") {
    if (std::getenv("CUDA_CPU_STRICT")) SKIP_TEST("in strict mode hundreds of threads wait very long for their turns");
    constexpr int kOsThreads = 300;
    const pid_t child = fork();
    if (child == 0) {
        std::latch all(kOsThreads);
        std::vector<std::thread> threads;
        for (int i = 0; i < kOsThreads; ++i)
            threads.emplace_back([&all] {
                int values[128] = {};
                reverse_kernel<7><<<1, 128>>>(values);
                cudaDeviceSynchronize();
                all.arrive_and_wait();
            });
        for (std::thread& thread : threads) thread.join();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}
#endif

TEST_CASE("barriers in a loop, in blocks of many sizes", "[cpu]") {
    for (const unsigned n : {1u, 2u, 31u, 32u, 33u, 100u, 256u, 1023u, 1024u}) {
        std::vector<int> values(5 * n);
        for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i);
        Buffer<int> data(values);
        reverse_kernel<7><<<5, n>>>(data.data);
        check_launch();
        const std::vector<int> reversed = data.read();
        size_t n_wrong = 0;
        for (size_t b = 0; b < 5; ++b)
            for (size_t i = 0; i < n; ++i) n_wrong += reversed[b * n + i] != values[b * n + n - 1 - i] + 7;
        INFO("block of " << n);
        CHECK(n_wrong == 0);
    }
}

TEST_CASE("warps of one block go their own ways", "[cpu]") {
    Buffer<int> out(320);
    ragged_kernel<<<1, 320>>>(out.data);
    check_launch();
    const std::vector<int> sums = out.read();
    size_t n_wrong = 0;
    for (unsigned warp = 0; warp < 10; ++warp) {
        std::vector<int> want(32);
        for (unsigned lane = 0; lane < 32; ++lane) want[lane] = static_cast<int>(lane);
        for (unsigned i = 0; i < warp; ++i) {
            const int source = want[i % 32];
            for (int& w : want) w += source;
        }
        for (unsigned lane = 0; lane < 32; ++lane)
            n_wrong += sums[warp * 32 + lane] != (warp % 3 == 1 ? 0 : want[lane]);
    }
    CHECK(n_wrong == 0);
}

TEST_CASE("lanes of one warp go their own ways", "[cpu]") {
    Buffer<int> out(128);
    diverged_kernel<<<1, 128>>>(out.data);
    check_launch();
    const std::vector<int> values = out.read();
    size_t n_wrong = 0;
    for (int t = 0; t < 128; ++t) {
        const int want = t % 2 == 0 ? t ^ 2 : (t ^ 4) + (t % 4 == 1 ? 1000 : 0);
        n_wrong += values[static_cast<size_t>(t)] != want;
    }
    CHECK(n_wrong == 0);
}

TEST_CASE("dynamic shared memory is as large as the launch says, beside the fixed one", "[cpu]") {
    for (const unsigned n : {1u, 7u, 33u}) {
        Buffer<int> out(4 * n);
        two_shared_kernel<<<4, n, n * sizeof(int)>>>(out.data);
        check_launch();
        const std::vector<int> values = out.read();
        for (unsigned i = 0; i < 4 * n; ++i) CHECK(values[i] == static_cast<int>(101 * (n - 1 - i % n)));
    }
}

TEST_CASE("random programs of barriers and exchanges", "[cpu]") {
    std::mt19937 random(3);
    for (int round = 0; round < 40; ++round) {
        const unsigned n = round % 3 == 0 ? 32 * (1 + unsigned(random()) % 32) : 1 + unsigned(random()) % 1024;
        std::vector<Step> steps(30);
        for (size_t i = 0; i < steps.size(); ++i)  // once a warp has left, no more barriers
            steps[i] = {static_cast<int>(i < 20 ? random() % 3 : 1 + random() % 3), unsigned(random()) % 1024,
                        unsigned(random())};
        std::vector<unsigned> values(3 * n);
        for (unsigned& v : values) v = unsigned(random());
        Buffer<unsigned> data(values);
        Buffer<Step> program(steps);
        program_kernel<<<3, n, n * sizeof(unsigned)>>>(data.data, program.data, static_cast<int>(steps.size()));
        check_launch();
        INFO("block of " << n);
        CHECK((data.read() == program_on_host(values, steps, n)));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Shuffles and votes, against the definition in the PTX manual (shfl.sync): which lane a lane reads from

namespace {

enum Kind { idx, up, down, xor_ };

// From the manual: the clamp c packs the segment mask and the end of the segment; p says whether the source is inside.
unsigned ptx_source(Kind kind, unsigned lane, unsigned b, unsigned width) {
    const unsigned c = ((32 - width) << 8) | (kind == up ? 0 : 31), segment_mask = c >> 8 & 31;
    const unsigned max_lane = (lane & segment_mask) | ((c & 31) & ~segment_mask), min_lane = lane & segment_mask;
    b &= 31;
    const int j = kind == up     ? int(lane) - int(b)
                  : kind == down ? int(lane + b)
                  : kind == xor_ ? int(lane ^ b)
                                 : int(min_lane | (b & ~segment_mask));
    const bool p = kind == up ? j >= int(max_lane) : j <= int(max_lane);
    return p ? unsigned(j) : lane;
}

template <class T>
__device__ T shuffled(Kind kind, unsigned mask, T value, int b, int width) {
    if (kind == idx) return __shfl_sync(mask, value, b, width);
    if (kind == up) return __shfl_up_sync(mask, value, static_cast<unsigned>(b), width);
    if (kind == down) return __shfl_down_sync(mask, value, static_cast<unsigned>(b), width);
    return __shfl_xor_sync(mask, value, b, width);
}

template <class T>
__global__ void shuffle_kernel(T* out, const T* inp, Kind kind, unsigned mask, int width) {
    const unsigned n = blockDim.x, t = threadIdx.x;
    for (int b = 0; b < 34; ++b) out[static_cast<unsigned>(b) * n + t] = shuffled(kind, mask, inp[t], b, width);
}

// n threads; sources outside of the existing lanes are not looked at (they are undefined).
template <class T>
void check_shuffles(unsigned n, unsigned mask) {
    std::vector<T> values(n);
    for (unsigned i = 0; i < n; ++i) values[i] = static_cast<T>(static_cast<float>(i * 3 + 1));
    Buffer<T> inp(values), out(34 * n);
    for (const Kind kind : {idx, up, down, xor_})
        for (const unsigned width : {2u, 4u, 8u, 16u, 32u}) {
            shuffle_kernel<T><<<1, n>>>(out.data, inp.data, kind, mask, static_cast<int>(width));
            check_launch();
            const std::vector<T> got = out.read();
            size_t n_wrong = 0;
            for (unsigned b = 0; b < 34; ++b)
                for (unsigned t = 0; t < n; ++t) {
                    const unsigned source = t / 32 * 32 + ptx_source(kind, t % 32, b, width);
                    if (source < n) n_wrong += static_cast<float>(got[b * n + t]) != static_cast<float>(values[source]);
                }
            INFO("n " << n << " kind " << kind << " width " << width);
            CHECK(n_wrong == 0);
        }
}

__global__ void vote_kernel(unsigned* out, unsigned mask, const int* predicate) {
    const unsigned t = threadIdx.x;
    out[3 * t] = __ballot_sync(mask, predicate[t]);
    out[3 * t + 1] = static_cast<unsigned>(__any_sync(mask, predicate[t]) != 0);
    out[3 * t + 2] = static_cast<unsigned>(__all_sync(mask, predicate[t]) != 0);
}

}  // namespace

TEMPLATE_TEST_CASE("shuffles of every kind, width and type", "[cpu]", float, double, int, unsigned, long long,
                   unsigned long long, __nv_bfloat16, __half) {
    check_shuffles<TestType>(32, kAll);
    check_shuffles<TestType>(64, kAll);
    check_shuffles<TestType>(20, (1u << 20) - 1);  // a warp of which only a part exists
}

#ifdef CUDA_ON_CPU
TEST_CASE("shuffles of small structs, and of what a part of a warp does not have", "[cpu]") {
    check_shuffles<short>(44, kAll);  // a mask may name lanes that do not exist
    check_shuffles<signed char>(32, kAll);
}
#endif

TEST_CASE("votes", "[cpu]") {
    std::mt19937 random(1);
    for (const unsigned n : {32u, 5u, 31u}) {
        const unsigned mask = n == 32 ? kAll : (1u << n) - 1;
        for (unsigned pattern : {0u, kAll, 1u, 0x80000000u, unsigned(random()), unsigned(random())}) {
            pattern &= mask;
            std::vector<int> predicate(n);
            for (unsigned t = 0; t < n; ++t) predicate[t] = pattern >> t & 1 ? int(1u << t) : 0;  // any bit is "true"
            Buffer<int> inp(predicate);
            Buffer<unsigned> out(3 * n);
            vote_kernel<<<1, n>>>(out.data, mask, inp.data);
            check_launch();
            const std::vector<unsigned> got = out.read();
            for (unsigned t = 0; t < n; ++t) {
                CHECK(got[3 * t] == pattern);
                CHECK(got[3 * t + 1] == (pattern != 0));
                CHECK(got[3 * t + 2] == (pattern == mask));
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Atomics

namespace {

struct Totals {
    int sum, difference, largest, smallest;
    unsigned bits_or, bits_and, swapped;
    unsigned long long long_sum, claimed;
    float float_sum;
    double double_sum;
};

__global__ void atomics_kernel(Totals* totals, int* old_values) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    old_values[i] = atomicAdd(&totals->sum, 1);
    atomicSub(&totals->difference, 2);
    atomicMax(&totals->largest, i);
    atomicMin(&totals->smallest, -i);
    atomicOr(&totals->bits_or, 1u << (i % 32));
    atomicAnd(&totals->bits_and, ~(1u << (i % 31)));
    atomicExch(&totals->swapped, 7u);
    atomicAdd(&totals->long_sum, 1ull << 33);
    atomicCAS(&totals->claimed, 0ull, static_cast<unsigned long long>(i) + 1);
    atomicAdd(&totals->float_sum, 0.5f);
    atomicAdd(&totals->double_sum, 0.25);
}

}  // namespace

TEST_CASE("atomics from every block", "[cpu]") {
    constexpr int n = 200 * 96;
    Totals start{};
    start.bits_and = kAll;
    Buffer<Totals> totals(std::vector<Totals>{start});
    Buffer<int> old_values(n);
    atomics_kernel<<<200, 96>>>(totals.data, old_values.data);
    check_launch();
    const Totals t = totals.read(false)[0];
    CHECK(t.sum == n);
    CHECK(t.difference == -2 * n);
    CHECK(t.largest == n - 1);
    CHECK(t.smallest == -(n - 1));
    CHECK(t.bits_or == kAll);
    CHECK(t.bits_and == 0x80000000u);
    CHECK(t.swapped == 7);
    CHECK(t.long_sum == (1ull << 33) * n);
    CHECK((t.claimed >= 1 && t.claimed <= n));
    CHECK(t.float_sum == 0.5f * n);
    CHECK(t.double_sum == 0.25 * n);
    std::vector<int> old = old_values.read(false);  // each value was seen by exactly one thread
    std::sort(old.begin(), old.end());
    size_t n_wrong = 0;
    for (int i = 0; i < n; ++i) n_wrong += old[static_cast<size_t>(i)] != i;
    CHECK(n_wrong == 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic

namespace {

__global__ void exp_kernel(float* out, const float* inp, size_t n) {
    const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __expf(inp[i]);
}

struct Numbers {
    float f[12];
    int i[24];
    unsigned long long u[4];
};
__global__ void arithmetic_kernel(Numbers* out, float nan) {
    Numbers n{};
    n.f[0] = min(1.5f, -2.0f);
    n.f[1] = max(1.5f, -2.0f);
    n.f[2] = min(nan, 3.0f);
    n.f[3] = max(4.0f, nan);
    n.f[4] = rsqrtf(16.0f);
    n.f[5] = __fdividef(1.0f, 4.0f);
    n.f[6] = __saturatef(1.5f) + __saturatef(-1.0f) + __saturatef(0.25f);
    n.f[7] = __int_as_float(0x3f800000);
    n.f[8] = __uint_as_float(0x40000000u);
    n.f[9] = __fmaf_rn(2.0f, 3.0f, 4.0f);
    n.i[0] = min(3, -4);
    n.i[1] = max(3, -4);
    n.i[2] = __float_as_int(1.0f);
    n.i[3] = static_cast<int>(__float_as_uint(-0.0f) >> 31);
    n.i[4] = __popc(0xf0f0u);
    n.i[5] = __clz(1);
    n.i[6] = __clz(0);
    n.i[7] = __ffs(0);
    n.i[8] = __ffs(8);
    n.i[9] = __popcll(~0ull);
    n.i[10] = static_cast<int>(__umulhi(0x80000000u, 6u));
    n.i[11] = __float2int_rn(2.5f);
    n.i[12] = __float2int_rz(-2.7f);
    n.i[13] = static_cast<int>(sizeof(float4) + alignof(float4) + sizeof(int3) + alignof(double2));
    n.i[14] = make_int4(1, 2, 3, 4).w + make_uint2(5, 6).y;
    n.i[15] = warpSize + static_cast<int>(__int2float_rn(-7));
    n.u[0] = max(1ull, 1ull << 40);
    n.u[1] = min(size_t{7}, size_t{9});
    *out = n;
    __stcs(&out->f[10], __ldg(&out->f[0]) + __ldcs(&out->f[1]));
    __stcg(&out->f[11], __ldcg(&out->f[3]));
}

}  // namespace

TEST_CASE("arithmetic that CUDA adds to C++", "[cpu]") {
    Buffer<Numbers> out(1);
    arithmetic_kernel<<<1, 1>>>(out.data, NAN);
    check_launch();
    const Numbers n = out.read()[0];
    const float f[12] = {-2.0f, 1.5f, 3.0f, 4.0f, 0.25f, 0.25f, 1.25f, 1.0f, 2.0f, 10.0f, -0.5f, 4.0f};
    for (int i = 0; i < 12; ++i) CHECK(n.f[i] == f[i]);
    const int want[16] = {-4, 3, 0x3f800000, 1, 8, 31, 32, 0, 4, 64, 3, 2, -2, 16 + 16 + 12 + 16, 10, 25};
    for (int i = 0; i < 16; ++i) CHECK(n.i[i] == want[i]);
    CHECK(n.u[0] == 1ull << 40);
    CHECK(n.u[1] == 7);
}

TEST_CASE("__expf over the whole range, against double", "[cpu]") {
    // Every 1009th float, of either sign, and what lies around the ends of the range.
    std::vector<float> x;
    for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 1009)
        x.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    for (float start : {-103.98f, -87.34f, 88.72f, 0.0f, 0.34657f})
        for (int i = -2000; i < 2000; ++i) x.push_back(start + static_cast<float>(i) * 1e-5f);
    x.insert(x.end(), {INFINITY, -INFINITY, -0.0f, 1e-45f});
    Buffer<float> inp(x), out(x.size());
    exp_kernel<<<(x.size() + 255) / 256, 256>>>(out.data, inp.data, x.size());
    check_launch();
    const std::vector<float> y = out.read();
    double worst = 0;
    size_t n_wrong = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        const double exact = std::exp(static_cast<double>(x[i]));
        if (std::isnan(x[i])) {
            n_wrong += !std::isnan(y[i]);
        } else if (exact >= 3.4028236e38) {
            n_wrong += y[i] != INFINITY;
        } else {
            // The unit in the last place of a float of this size; below the normal numbers all are 2^-149.
            const double ulp = std::ldexp(1.0, std::max(std::ilogb(std::max(exact, 1e-300)) - 23, -149));
            n_wrong += std::isnan(y[i]);
            worst = std::max(worst, std::fabs(y[i] - exact) / ulp);
        }
    }
    CHECK(n_wrong == 0);
    INFO("worst error " << worst << " ulp");
#ifdef CUDA_ON_CPU
    CHECK(worst < 0.9);  // 0.8913 over all floats
#else
    CHECK(worst < 2 + 104 * 1.17);  // the CUDA Programming Guide: 2 + floor(|1.173 x|) ulp
#endif
}
