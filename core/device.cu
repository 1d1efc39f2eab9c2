// core/device.cu: the device that this thread computes on.
#include "core/core.h"
#include "core/run_on_host.h"

#include <cublasLt.h>

#include <memory>

namespace {
thread_local std::unique_ptr<Device> current;
}  // namespace

Device& device() { return current ? *current : open_device(0); }

int device_count() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    check(status == cudaSuccess && count > 0, "no CUDA device: ", cudaGetErrorString(status),
          ". On a machine without a GPU build for the CPU: make DEVICE=cpu");
    return count;
}

DeviceMemory device_memory() {
    DeviceMemory memory;
    cudaCheck(cudaMemGetInfo(&memory.free, &memory.all));
    return memory;
}

Device& open_device(int index) {
    close_device();
    const int count = device_count();
    check(index >= 0 && index < count, "CUDA device ", index, " does not exist: this machine shows ", count);
    cudaCheck(cudaSetDevice(index));
    cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, index));
    auto opened = std::make_unique<Device>();
    opened->index = index;
    opened->name = properties.name;
    opened->sm_count = properties.multiProcessorCount;
    opened->capability = 10 * properties.major + properties.minor;
    opened->block_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
    opened->stream = make_stream();
    cublasCheck(cublasLtCreate(&opened->blas));
    cudaCheck(cudaMalloc(&opened->arrivals, kArrivals * sizeof(unsigned)));
    cudaCheck(cudaMemset(opened->arrivals, 0, kArrivals * sizeof(unsigned)));
    cudaCheck(cudaDeviceSynchronize());  // the stream does not wait for a memset by itself
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
    cudaFree(current->arrivals);
    cudaStreamDestroy(current->stream);
    current.reset();
}

cudaStream_t make_stream() {
    cudaStream_t stream = nullptr;
    cudaCheck(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}
cudaEvent_t make_event() {
    cudaEvent_t event = nullptr;
    cudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}
void copy_tensor(const Tensor& out, const Tensor& inp, cudaStream_t stream) {
    if (out.data == inp.data || inp.n() == 0) return;
    cudaCheck(cudaMemcpyAsync(out.data, inp.data, inp.bytes(), cudaMemcpyDeviceToDevice, stream));
    launched("memcpy", {.reads = bytes_of(inp), .writes = bytes_of(inp)});
}

void run_on_host(cudaStream_t stream, std::function<void()> function,
                 [[maybe_unused]] std::initializer_list<Tensor> reads,
                 [[maybe_unused]] std::initializer_list<Tensor> writes) {
#ifdef CUDA_ON_CPU
    cuda_cpu::Footprint footprint{"a function of the host", {nullptr, 0}, {}};
    for (const Tensor& tensor : reads) footprint.accesses.push_back({tensor.data, tensor.bytes(), false});
    for (const Tensor& tensor : writes) footprint.accesses.push_back({tensor.data, tensor.bytes(), true});
    cudaCheck(cuda_cpu::enqueue(stream, std::move(function), footprint));
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
