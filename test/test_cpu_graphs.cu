// CUDA graphs: streams that are captured, and what a launch runs. Plain CUDA: under make DEVICE=cuda a GPU runs it.
#include "test.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <thread>

namespace {

void must(cudaError_t status) { REQUIRE(status == cudaSuccess); }
bool fails_as(cudaError_t wanted, cudaError_t status) {
    cudaGetLastError();
    return status == wanted;
}

// x = a x + b: the order of two such updates shows in the result.
__global__ void update_kernel(int* x, int a, int b) { x[threadIdx.x] = a * x[threadIdx.x] + b; }
__global__ void add_kernel(int* out, const int* a, const int* b) { out[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x]; }

constexpr int kN = 64;
struct Ints {
    int* data = nullptr;
    Ints() {
        must(cudaMalloc(reinterpret_cast<void**>(&data), kN * sizeof(int)));
        must(cudaMemset(data, 0, kN * sizeof(int)));
        must(cudaDeviceSynchronize());  // a memset does not wait, and the streams do not wait for it
    }
    Ints(const Ints&) = delete;
    ~Ints() { cudaFree(data); }
    int last() const {
        int value = 0;
        must(cudaMemcpy(&value, data + kN - 1, sizeof(int), cudaMemcpyDeviceToHost));
        return value;
    }
};

struct Stream {
    cudaStream_t stream = nullptr;
    explicit Stream(unsigned flags = cudaStreamNonBlocking) { must(cudaStreamCreateWithFlags(&stream, flags)); }
    Stream(const Stream&) = delete;
    ~Stream() { cudaStreamDestroy(stream); }
    operator cudaStream_t() const { return stream; }
    void update(int* x, int a, int b) const { update_kernel<<<1, kN, 0, stream>>>(x, a, b); }
    void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) const {
        must(cudaStreamBeginCapture(stream, mode));
    }
    void wait() const { must(cudaStreamSynchronize(stream)); }
};
struct Event {
    cudaEvent_t event = nullptr;
    Event() { must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
    Event(const Event&) = delete;
    ~Event() { cudaEventDestroy(event); }
    operator cudaEvent_t() const { return event; }
    void between(cudaStream_t first, cudaStream_t second) const {
        must(cudaEventRecord(event, first));
        must(cudaStreamWaitEvent(second, event, 0));
    }
};

// What has been captured, ready to be launched.
struct Graph {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    explicit Graph(cudaStream_t stream) {
        must(cudaStreamEndCapture(stream, &graph));
        must(cudaGraphInstantiate(&exec, graph, 0));
    }
    Graph(const Graph&) = delete;
    ~Graph() {
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
    }
    size_t n() const {
        size_t n = 0;
        must(cudaGraphGetNodes(graph, nullptr, &n));
        return n;
    }
    void launch(cudaStream_t stream) const { must(cudaGraphLaunch(exec, stream)); }
};

cudaStreamCaptureStatus status_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    must(cudaStreamIsCapturing(stream, &status));
    return status;
}

// The capture that goes on in the stream has to be void; afterwards the stream is as any other one.
void check_void(const Stream& stream) {
    CHECK(status_of(stream) == cudaStreamCaptureStatusInvalidated);
    cudaGraph_t graph = nullptr;
    CHECK(fails_as(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(stream, &graph)));
    CHECK(graph == nullptr);
    CHECK(status_of(stream) == cudaStreamCaptureStatusNone);
    Ints x;
    stream.update(x.data, 1, 5);
    stream.wait();
    CHECK(x.last() == 5);
}

}  // namespace

TEST_CASE("captured work runs when its graph is launched, each time, and not before", "[cpu][graphs]") {
    Ints x;
    const Stream stream, other;
    CHECK(status_of(stream) == cudaStreamCaptureStatusNone);
    stream.begin();
    CHECK(status_of(stream) == cudaStreamCaptureStatusActive);
    CHECK(status_of(other) == cudaStreamCaptureStatusNone);
    stream.update(x.data, 1, 3);
    stream.update(x.data, 10, 1);
    must(cudaGetLastError());
    const Graph graph(stream);
    CHECK(graph.n() == 2);
    stream.wait();
    CHECK(x.last() == 0);
    graph.launch(stream);
    stream.wait();
    CHECK(x.last() == 31);
    stream.update(x.data, 0, 1);  // in order with what stands before and behind a launch
    graph.launch(stream);
    graph.launch(stream);
    stream.update(x.data, 2, 0);
    stream.wait();
    CHECK(x.last() == 2 * (10 * (10 * (1 + 3) + 1 + 3) + 1));
    graph.launch(other);  // another stream than the one that was captured
    other.wait();
    CHECK(x.last() == 10 * (888 - 6 + 3) + 1);
}

TEST_CASE("a graph's copies read and write what is there when it is launched", "[cpu][graphs]") {
    Ints x, y;
    const Stream stream;
    int *in = nullptr, *out = nullptr;
    must(cudaMallocHost(reinterpret_cast<void**>(&in), kN * sizeof(int)));
    must(cudaMallocHost(reinterpret_cast<void**>(&out), kN * sizeof(int)));
    for (int i = 0; i < kN; ++i) in[i] = out[i] = -1;
    const size_t bytes = kN * sizeof(int);
    stream.begin();
    must(cudaMemcpyAsync(x.data, in, bytes, cudaMemcpyHostToDevice, stream));
    must(cudaMemsetAsync(y.data, 0, bytes, stream));
    add_kernel<<<1, kN, 0, stream>>>(y.data, x.data, y.data);
    must(cudaMemcpyAsync(out, y.data, bytes, cudaMemcpyDeviceToHost, stream));
    const Graph graph(stream);
    CHECK(graph.n() == 4);
    for (const int value : {7, 8}) {
        in[kN - 1] = value;
        graph.launch(stream);
        stream.wait();
        CHECK(out[kN - 1] == value);
        CHECK(y.last() == value);
    }
    must(cudaFreeHost(in));
    must(cudaFreeHost(out));
}

TEST_CASE("a stream that waits for a captured event is captured, too", "[cpu][graphs]") {
    Ints x, y, sum;
    const Stream first, second;
    const Event fork, join;
    first.update(x.data, 0, 100);  // before the capture: not in the graph
    first.begin();
    fork.between(first, second);
    CHECK(status_of(second) == cudaStreamCaptureStatusActive);
    first.update(x.data, 1, 1);
    second.update(y.data, 1, 1);
    second.update(y.data, 3, 0);
    join.between(second, first);
    add_kernel<<<1, kN, 0, first>>>(sum.data, x.data, y.data);
    const Graph graph(first);
    CHECK(graph.n() == 4);
    // Some of the nodes, and more places than there are nodes.
    cudaGraphNode_t nodes[6];
    for (const size_t places : {3, 6}) {
        size_t n = places;
        must(cudaGraphGetNodes(graph.graph, nodes, &n));
        CHECK(n == std::min<size_t>(places, 4));
    }
    CHECK((nodes[3] != nullptr && nodes[4] == nullptr && nodes[5] == nullptr));
    CHECK(status_of(second) == cudaStreamCaptureStatusNone);
    for (int i = 0; i < 3; ++i) graph.launch(first);
    first.wait();
    CHECK(x.last() == 103);
    CHECK(y.last() == 3 + 9 + 27);
    CHECK(sum.last() == 103 + 39);
    cudaGraphExec_t gone_soon;  // what has been launched ends all the same
    must(cudaGraphInstantiate(&gone_soon, graph.graph, 0));
    must(cudaGraphLaunch(gone_soon, first));
    must(cudaGraphExecDestroy(gone_soon));
    first.wait();
    CHECK(sum.last() == 104 + 3 * 40);
}

TEST_CASE("events order a launch with other streams, and launches with each other", "[cpu][graphs]") {
    Ints x, y;
    const Stream first, second, third;
    const Event before, between, after;
    first.begin();
    first.update(x.data, 2, 1);
    const Graph graph(first);
    third.update(x.data, 0, 5);
    before.between(third, first);
    graph.launch(first);
    between.between(first, second);
    graph.launch(second);
    after.between(second, third);
    third.update(x.data, 1, 100);
    third.wait();
    CHECK(x.last() == 100 + 2 * (2 * 5 + 1) + 1);
    graph.launch(third);  // one launch of a graph waits for the one before, without an event
    graph.launch(first);
    first.wait();
    CHECK(x.last() == 2 * (2 * 123 + 1) + 1);
}

TEST_CASE("what would wait for captured work is an error, and makes the capture void", "[cpu][graphs]") {
    const bool is_cpu = device().is_cpu;  // opened here: in a capture it could not take its memory
    const Stream stream, other;
    stream.begin();
    CHECK(fails_as(cudaErrorStreamCaptureUnsupported, cudaStreamSynchronize(stream)));
    check_void(stream);
    stream.begin();
    CHECK(fails_as(cudaErrorStreamCaptureUnsupported, cudaStreamQuery(stream)));
    check_void(stream);
    stream.begin();
    CHECK(fails_as(cudaErrorStreamCaptureUnsupported, cudaDeviceSynchronize()));
    check_void(stream);
    stream.begin();  // another stream, which is not captured: its wait is refused as cudaMalloc is, by the mode
    CHECK(fails_as(cudaErrorStreamCaptureUnsupported, cudaStreamSynchronize(other)));
    check_void(stream);
    stream.begin(cudaStreamCaptureModeRelaxed);
    other.wait();
    CHECK(status_of(stream) == cudaStreamCaptureStatusActive);
    const Graph nothing(stream);
    CHECK(nothing.n() == 0);
    nothing.launch(stream);

    const Event event;
    stream.begin();
    must(cudaEventRecord(event, stream));
    CHECK(fails_as(cudaErrorCapturedEvent, cudaEventSynchronize(event)));
    // On an H100 the capture is over by now.
    if (is_cpu) CHECK(fails_as(cudaErrorCapturedEvent, cudaEventQuery(event)));
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    if (graph) must(cudaGraphDestroy(graph));
    must(cudaEventRecord(event, stream));  // as any other event again
    must(cudaEventSynchronize(event));
}

TEST_CASE("what cannot be recorded is refused in the threads that the mode names", "[cpu][graphs]") {
    const Stream stream;
    Ints x;
    void* memory = nullptr;
    for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
        stream.begin(mode);
        CHECK(fails_as(cudaErrorStreamCaptureUnsupported, cudaMalloc(&memory, 100)));
        check_void(stream);
        cudaError_t elsewhere = cudaErrorNotReady;
        stream.begin(mode);
        std::thread([&] {
            cudaSetDevice(0);
            elsewhere = cudaMalloc(&memory, 100);
            cudaGetLastError();
        }).join();
        if (mode == cudaStreamCaptureModeGlobal) {
            CHECK(elsewhere == cudaErrorStreamCaptureUnsupported);
            check_void(stream);
        } else {
            CHECK(elsewhere == cudaSuccess);
            stream.update(x.data, 1, 1);
            const Graph graph(stream);
            must(cudaFree(memory));
        }
    }
    stream.begin(cudaStreamCaptureModeRelaxed);
    must(cudaMalloc(&memory, 100));
    must(cudaFree(memory));
    const Graph graph(stream);
}

TEST_CASE("captures that cannot become a graph", "[cpu][graphs]") {
    const Stream first, second;
    const Event event;
    cudaGraph_t graph = nullptr;
    CHECK(fails_as(cudaErrorStreamCaptureUnsupported, cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal)));
    CHECK(fails_as(cudaErrorIllegalState, cudaStreamEndCapture(first, &graph)));

    first.begin();
    CHECK(fails_as(cudaErrorIllegalState, cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal)));
    cudaStreamEndCapture(first, &graph);
    cudaGetLastError();
    if (graph) must(cudaGraphDestroy(graph));

    // Work of another stream that the first one does not wait for.
    Ints x, y;
    first.begin();
    event.between(first, second);
    first.update(y.data, 1, 1);
    second.update(x.data, 1, 1);
    CHECK(fails_as(cudaErrorStreamCaptureUnjoined, cudaStreamEndCapture(first, &graph)));
    CHECK(graph == nullptr);
    CHECK(status_of(second) == cudaStreamCaptureStatusNone);

    // The end in another stream than the beginning, or in another thread.
    first.begin();
    event.between(first, second);
    CHECK(fails_as(cudaErrorStreamCaptureUnmatched, cudaStreamEndCapture(second, &graph)));
    CHECK(fails_as(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(first, &graph)));
    first.begin();
    cudaError_t elsewhere = cudaSuccess;
    std::thread([&] {
        cudaSetDevice(0);
        cudaGraph_t none = nullptr;
        elsewhere = cudaStreamEndCapture(first, &none);
    }).join();
    CHECK(elsewhere == cudaErrorStreamCaptureWrongThread);
    cudaStreamEndCapture(first, &graph);
    cudaGetLastError();
    if (graph) must(cudaGraphDestroy(graph));

    // Work that was not captured cannot be waited for, nor can that of another capture.
    must(cudaEventRecord(event, second));
    first.begin();
    CHECK(fails_as(cudaErrorStreamCaptureIsolation, cudaStreamWaitEvent(first, event, 0)));
    check_void(first);
    first.begin();
    second.begin();
    must(cudaEventRecord(event, first));
    CHECK(fails_as(cudaErrorStreamCaptureMerge, cudaStreamWaitEvent(second, event, 0)));
    CHECK(fails_as(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(second, &graph)));
    cudaStreamEndCapture(first, &graph);
    cudaGetLastError();
    if (device().is_cpu) CHECK(graph == nullptr);  // both are void
    if (graph) must(cudaGraphDestroy(graph));
}

TEST_CASE("the default stream cannot wait for a captured stream", "[cpu][graphs]") {
    const Stream blocking(cudaStreamDefault), apart;
    Ints x;
    apart.begin();
    update_kernel<<<1, kN>>>(x.data, 1, 7);  // waits for no stream of this kind
    must(cudaGetLastError());
    { const Graph graph(apart); }
    CHECK(x.last() == 7);
    blocking.begin();
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CHECK(fails_as(cudaErrorStreamCaptureImplicit, cudaStreamIsCapturing(nullptr, &status)));
    CHECK(status_of(blocking) == cudaStreamCaptureStatusActive);
    CHECK(fails_as(cudaErrorStreamCaptureImplicit, cudaMemsetAsync(x.data, 0, 4, nullptr)));
    check_void(blocking);
    CHECK(x.last() == 7);
}
