// planning/rates.cu: the rates of this device, measured.
#include "planning/rates.h"

#include "core/kernel.cuh"
#include "layers/layers.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

namespace {

// x[i] = uniform in [-1, 1), a function of (key, i); a thread writes the four of one draw. On the device, because the
// host takes seconds for two 8192 x 8192 matrices. Their numbers matter: a product of zeros draws less power, and runs
// at a higher clock than one of a training step.
template <class T>
__global__ void fill_uniform_kernel(T* x, int64_t n, uint64_t key) {
    const int64_t first = 4 * global_thread();
    if (first >= n) return;
    const auto draw = philox(1, key, static_cast<uint64_t>(first));
    for (int64_t i = first; i < first + 4 && i < n; ++i)
        x[i] = from_float<T>(static_cast<float>(draw.v[i - first] >> 8) * 0x1p-23f - 1.0f);
}

void fill_uniform(const Tensor& tensor, uint64_t key, cudaStream_t stream) {
    constexpr int kBlock = 256;
    dispatch(tensor.dtype, [&](auto zero) {
        using T = decltype(zero);
        const int n_blocks = narrow(ceil_div(tensor.n(), 4 * kBlock), "fill_uniform: the number of blocks");
        fill_uniform_kernel<T><<<n_blocks, kBlock, 0, stream>>>(tensor.ptr<T>(), tensor.n(), key);
        cudaCheckLaunch();
    });
}

// The shortest time of the runs that there are in 50 ms, at least three, after one that warms up and touches the
// memory's pages: other programs of a machine disturb for milliseconds.
template <class F>
double least_seconds(F&& run) {
    const double begin = seconds_now();
    double best = 1e30;
    for (int i = 0; i < 4 || seconds_now() - begin < 0.05; ++i) {
        const double start = seconds_now();
        run();
        cudaCheck(cudaStreamSynchronize(device().stream));
        if (i > 0) best = std::min(best, seconds_now() - start);
    }
    return best;
}

}  // namespace

double measure_matmul_rate(DType dtype) {
    // On a CPU 2^28 operations for each core (as many as it has, not as a GPU that it stands for), some milliseconds:
    // every run begins with this.
    const int64_t n = device().is_cpu ? 64 * std::llround(8 * std::cbrt(omp_get_max_threads())) : 8192;
    Arena arena("matmul probe");
    Tensor a, b, c;
    for (int pass = 0; pass < 2; ++pass) {
        a = arena.take("probe", dtype, {n, n});
        b = arena.take("probe", dtype, {n, n});
        c = arena.take("probe", dtype, {n, n});
        if (pass == 0) arena.reserve();
    }
    fill_uniform(a, 1, device().stream);
    fill_uniform(b, 2, device().stream);
    const double seconds = least_seconds([&] { matmul(c, a, b, {}, device().stream); });
    return 2.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n) / seconds;
}

double measure_copy_rate() {
    // On a CPU from 64 MiB to 64 MiB. With 300 MiB of L3 cache that is 14 to 17 GB/s, as with 2 GiB (14), where the
    // stores are a kernel's; but memcpy's of more than 114 MiB are others there, which pass the caches by: 28 GB/s.
    const int64_t n = device().is_cpu ? 16 << 20 : 256 << 20;
    Arena arena("copy probe");
    arena.take("probe", DType::f32, {2, n});
    arena.reserve();
    const Tensor both = arena.take("probe", DType::f32, {2, n}), from = both.slice(0, 1), to = both.slice(1, 1);
    const double seconds = least_seconds(
        [&] { cudaCheck(cudaMemcpyAsync(to.data, from.data, to.bytes(), cudaMemcpyDeviceToDevice, device().stream)); });
    return static_cast<double>(both.bytes()) / seconds;
}
