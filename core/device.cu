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
