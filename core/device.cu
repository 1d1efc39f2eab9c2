// core/device.cu: the device that this thread computes on.
#include "core/core.h"

namespace {
thread_local std::unique_ptr<Device> current;
// cuBLASLt's own advice for Hopper; the CPU device needs none.
[[maybe_unused]] constexpr size_t kBlasWorkspaceBytes = 32 << 20;
}  // namespace

Device& device() { return current ? *current : open_device(0); }

Device& open_device(int index) {
    close_device();
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    check(status == cudaSuccess && count > 0, "no CUDA device: ", cudaGetErrorString(status),
          ". On a machine without a GPU build for the CPU: make DEVICE=cpu");
    check(index >= 0 && index < count, "CUDA device ", index, " does not exist: this machine shows ", count);
    cudaCheck(cudaSetDevice(index));
    cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, index));
    auto opened = std::make_unique<Device>();
    opened->index = index;
    opened->name = properties.name;
    opened->sm_count = properties.multiProcessorCount;
    cudaCheck(cudaStreamCreateWithFlags(&opened->stream, cudaStreamNonBlocking));
    cublasCheck(cublasLtCreate(&opened->blas));
#ifdef CUDA_ON_CPU
    opened->is_cpu = true;
#else
    opened->blas_workspace_bytes = kBlasWorkspaceBytes;
    cudaCheck(cudaMalloc(&opened->blas_workspace, kBlasWorkspaceBytes));
#endif
    current = std::move(opened);
    return *current;
}

void close_device() {
    if (!current) return;
    cudaStreamSynchronize(current->stream);
    cublasLtDestroy(current->blas);
    cudaFree(current->blas_workspace);
    cudaStreamDestroy(current->stream);
    current.reset();
}

void run_on_host(cudaStream_t stream, std::function<void()> function,
                 [[maybe_unused]] std::initializer_list<Tensor> reads,
                 [[maybe_unused]] std::initializer_list<Tensor> writes) {
#ifdef CUDA_ON_CPU
    cuda_cpu::Footprint footprint{"a function of the host", {nullptr, 0}, {}};
    for (const Tensor& tensor : reads) footprint.accesses.push_back({tensor.data, tensor.bytes(), false});
    for (const Tensor& tensor : writes) footprint.accesses.push_back({tensor.data, tensor.bytes(), true});
    cuda_cpu::enqueue(stream, std::move(function), footprint);
#else
    const auto call = [](void* owned) {
        const std::unique_ptr<std::function<void()>> its_function(static_cast<std::function<void()>*>(owned));
        (*its_function)();
    };
    auto owned = std::make_unique<std::function<void()>>(std::move(function));
    cudaCheck(cudaLaunchHostFunc(stream, call, owned.get()));
    owned.release();  // the call owns it now
#endif
}
