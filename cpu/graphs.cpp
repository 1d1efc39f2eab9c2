// cpu/graphs.cpp: work that is recorded once and launched many times: CUDA graphs, made by capturing streams.
//
//     cudaStreamBeginCapture(stream, mode)       from here on work for the stream is recorded, and does not run
//     kernel<<<..., stream>>>(...) ...
//     cudaStreamEndCapture(stream, &graph)
//     cudaGraphInstantiate(&exec, graph)
//     cudaGraphLaunch(exec, stream)              any number of times: runs all of it
//
// On a GPU a launch costs the host some microseconds, and a graph of a hundred kernels hardly more than one kernel.
// Here nothing is gained: a launch is a function call. But programs that use graphs run, and mistakes are found that a
// GPU punishes with old numbers: work with arguments of the step in which it was recorded.
//
// A node is a piece of work and the nodes that it comes after. While a stream is captured, it has the numbers of the
// nodes that its next work comes after (Captured). An event that is recorded in it keeps these numbers, and a stream
// that waits for such an event takes them over: it is captured, too, from then on, until the capture ends.
//
// By default a launch runs the nodes in the order in which they were recorded. In strict mode every node becomes an
// operation of its own (cpu/streams.cpp), which waits for what the capture says, and for nothing else: nodes of the
// stream that is launched in go there, those of each other captured stream into a stream of the graph's own. So the
// check of races sees each launch as if its work had been asked for one by one.
//
// What a capture cannot contain is an error, and nearly always ends it: cudaStreamEndCapture then gives no graph.
#include "streams.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <utility>

namespace cuda_cpu {

struct GraphNode {
    std::function<void()> work;
    Footprint footprint;
    size_t stream;              // which of the graph's
    std::vector<size_t> after;  // numbers of nodes
};
struct Graph {
    int device = 0;
    std::deque<GraphNode> nodes;
    std::vector<unsigned> streams;  // numbers of those that were captured, first that in which the capture began
    std::vector<size_t> last;       // what is done when these are is all of it
};

struct Capture {
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    std::unique_ptr<Graph> graph = std::make_unique<Graph>();
    std::vector<Stream*> streams;  // the first is that in which it began
    bool invalid = false;
};

struct GraphExec {
    Graph graph;
    std::deque<Stream> streams;       // of the nodes whose stream is not the first
    std::shared_ptr<Operation> done;  // the last launch
};

namespace {

std::vector<Capture*> captures;  // all that go on; with streams_mutex held
std::atomic<int> n_captures = 0;

void merge(std::vector<size_t>& to, const std::vector<size_t>& from) {
    for (const size_t node : from)
        if (std::find(to.begin(), to.end(), node) == to.end()) to.push_back(node);
}

cudaError_t invalidate(Capture& its, cudaError_t error) {
    its.invalid = true;
    return remember(error);
}

// The capture of a stream that takes part in the legacy default stream's rule: work of the default stream would have to
// wait for work that is only recorded.
Capture* implicit_capture(int device) {
    for (Capture* each : captures)
        for (const Stream* stream : each->streams)
            if (stream->device == device && stream->blocking) return each;
    return nullptr;
}

bool is_default(const Stream& stream) { return stream.number == 0; }

// Whether every node of every stream comes before the end of the first one.
bool is_joined(const Capture& its) {
    std::set<size_t> before;
    std::vector<size_t> open = its.streams.front()->captured.after;
    while (!open.empty()) {
        const size_t node = open.back();
        open.pop_back();
        if (!before.insert(node).second) continue;
        const std::vector<size_t>& after = its.graph->nodes[node].after;
        open.insert(open.end(), after.begin(), after.end());
    }
    for (const Stream* stream : its.streams)
        for (const size_t node : stream->captured.after)
            if (before.count(node) == 0) return false;
    return true;
}

}  // namespace

bool any_capture() { return n_captures.load(std::memory_order_relaxed) > 0; }

bool capture(cudaStream_t to, const std::function<void()>& work, const Footprint& footprint, cudaError_t& status) {
    const std::lock_guard lock(streams_mutex);
    Stream& stream = resolve(to);
    status = cudaSuccess;
    if (!stream.captured.capture) {
        Capture* const blocking = is_default(stream) ? implicit_capture(stream.device) : nullptr;
        if (blocking) status = invalidate(*blocking, cudaErrorStreamCaptureImplicit);
        return blocking != nullptr;
    }
    Capture& its = *stream.captured.capture;
    if (its.invalid) return status = remember(cudaErrorStreamCaptureInvalidated), true;
    if (!work) return status = invalidate(its, cudaErrorStreamCaptureUnsupported), true;
    const auto place = std::find(its.streams.begin(), its.streams.end(), &stream) - its.streams.begin();
    its.graph->nodes.push_back({work, footprint, static_cast<size_t>(place), stream.captured.after});
    stream.captured.after = {its.graph->nodes.size() - 1};
    return true;
}

bool capture_record(cudaStream_t in, Event& event, cudaError_t& status) {
    const std::lock_guard lock(streams_mutex);
    const Stream& stream = resolve(in);
    event.captured = stream.captured;
    if (!stream.captured.capture) return false;
    status = stream.captured.capture->invalid ? remember(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
    return true;
}

bool capture_wait(cudaStream_t in, const Event& event, cudaError_t& status) {
    const std::lock_guard lock(streams_mutex);
    Stream& stream = resolve(in);
    const std::shared_ptr<Capture> its = stream.captured.capture, of_event = event.captured.capture;
    if (!its && !of_event) return false;
    status = cudaSuccess;
    const bool is_over = of_event && std::find(captures.begin(), captures.end(), of_event.get()) == captures.end();
    if (its && its->invalid) status = remember(cudaErrorStreamCaptureInvalidated);
    else if (is_over)
        status = its ? invalidate(*its, cudaErrorStreamCaptureIsolation) : remember(cudaErrorCapturedEvent);
    else if (!of_event) status = invalidate(*its, cudaErrorStreamCaptureIsolation);
    else if (of_event->invalid) status = remember(cudaErrorStreamCaptureInvalidated);
    else if (its && its != of_event) of_event->invalid = true, status = invalidate(*its, cudaErrorStreamCaptureMerge);
    else if (is_default(stream)) status = invalidate(*of_event, cudaErrorStreamCaptureUnsupported);
    if (status != cudaSuccess) return true;
    if (!its) stream.captured.capture = of_event, of_event->streams.push_back(&stream);
    merge(stream.captured.after, event.captured.after);
    return true;
}

cudaError_t refuse_in_capture() {
    if (!any_capture()) return cudaSuccess;
    const std::lock_guard lock(streams_mutex);
    cudaError_t status = cudaSuccess;
    for (Capture* each : captures)
        if (each->mode == cudaStreamCaptureModeGlobal ||
            (each->mode == cudaStreamCaptureModeThreadLocal && each->thread == std::this_thread::get_id()))
            status = invalidate(*each, cudaErrorStreamCaptureUnsupported);
    return status;
}

// A wait for a stream that is not captured is refused like an allocation: an H100 says so (CUDA 13).
cudaError_t refuse_wait(cudaStream_t of) {
    if (!any_capture()) return cudaSuccess;
    {
        const std::lock_guard lock(streams_mutex);
        const Stream& stream = resolve(of);
        if (stream.captured.capture) return invalidate(*stream.captured.capture, cudaErrorStreamCaptureUnsupported);
        Capture* const blocking = is_default(stream) ? implicit_capture(stream.device) : nullptr;
        if (blocking) return invalidate(*blocking, cudaErrorStreamCaptureImplicit);
    }
    return refuse_in_capture();
}

cudaError_t refuse_wait_for_device(int device) {
    if (!any_capture()) return cudaSuccess;
    const std::lock_guard lock(streams_mutex);
    cudaError_t status = cudaSuccess;
    for (Capture* each : captures)
        if (each->streams.front()->device == device) status = invalidate(*each, cudaErrorStreamCaptureUnsupported);
    return status;
}

}  // namespace cuda_cpu

using namespace cuda_cpu;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    if (!stream) return remember(cudaErrorStreamCaptureUnsupported);  // the legacy stream
    const std::lock_guard lock(streams_mutex);
    if (stream->captured.capture) return remember(cudaErrorIllegalState);
    const auto its = std::make_shared<Capture>();
    its->mode = mode, its->thread = std::this_thread::get_id();
    its->graph->device = stream->device;
    its->streams = {stream};
    stream->captured = {its, {}};
    captures.push_back(its.get());
    ++n_captures;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    if (!graph) return remember(cudaErrorInvalidValue);
    *graph = nullptr;
    const std::lock_guard lock(streams_mutex);
    if (!stream || !stream->captured.capture) return remember(cudaErrorIllegalState);
    const std::shared_ptr<Capture> its = stream->captured.capture;
    if (its->mode != cudaStreamCaptureModeRelaxed && its->thread != std::this_thread::get_id())
        return remember(cudaErrorStreamCaptureWrongThread);
    if (its->streams.front() != stream) return invalidate(*its, cudaErrorStreamCaptureUnmatched);
    const bool joined = is_joined(*its);
    for (const Stream* each : its->streams) its->graph->streams.push_back(each->number);
    its->graph->last = stream->captured.after;
    for (Stream* each : its->streams) each->captured = {};
    std::erase(captures, its.get());
    --n_captures;
    if (its->invalid) return remember(cudaErrorStreamCaptureInvalidated);
    if (!joined) return remember(cudaErrorStreamCaptureUnjoined);
    *graph = its->graph.release();
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    if (!status) return remember(cudaErrorInvalidValue);
    *status = cudaStreamCaptureStatusNone;
    if (!any_capture()) return cudaSuccess;
    const std::lock_guard lock(streams_mutex);
    const Stream& its = resolve(stream);
    if (is_default(its) && implicit_capture(its.device)) return remember(cudaErrorStreamCaptureImplicit);
    if (its.captured.capture)
        *status = its.captured.capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* n) {
    if (!graph || !n) return remember(cudaErrorInvalidValue);
    const size_t size = graph->nodes.size();
    for (size_t i = 0; nodes && i < *n; ++i) nodes[i] = i < size ? &graph->nodes[i] : nullptr;
    if (!nodes || *n > size) *n = size;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    if (!exec || !graph) return remember(cudaErrorInvalidValue);
    *exec = new GraphExec{*graph, {}, nullptr};
    const std::lock_guard lock(streams_mutex);
    for (size_t i = 1; i < graph->streams.size(); ++i) {
        Stream& stream = (*exec)->streams.emplace_back();
        stream.device = graph->device, stream.number = graph->streams[i];
        stream.blocking = false, stream.of_graph = true;
        add_stream(stream);
    }
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    if (!exec) return remember(cudaErrorInvalidValue);
    cudaError_t status = cudaSuccess;
    if (any_capture() && capture(stream, nullptr, {}, status)) return status;  // a graph in a graph is not supported
    if (!strict) {
        for (const GraphNode& node : exec->graph.nodes) node.work();
        return cudaSuccess;
    }
    std::unique_lock lock(streams_mutex);
    Stream& first = resolve(stream);
    std::vector<std::shared_ptr<Operation>> operations;
    const auto all = [&](const std::vector<size_t>& numbers) {
        std::vector<std::shared_ptr<Operation>> its;
        for (const size_t number : numbers) its.push_back(operations[number]);
        return its;
    };
    std::vector<std::shared_ptr<Operation>> before;  // a graph does not run twice at the same time
    if (exec->done) before.push_back(exec->done);
    const auto start = note(first, nullptr, {}, before);
    for (const GraphNode& node : exec->graph.nodes) {
        auto after = all(node.after);
        if (after.empty()) after.push_back(start);
        Stream& its = node.stream == 0 ? first : exec->streams[node.stream - 1];
        operations.push_back(note(its, node.work, node.footprint, std::move(after)));
    }
    exec->done = note(first, nullptr, {}, all(exec->graph.last));
    const int device = first.device;
    lock.unlock();
    run_early(device);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    if (!exec) return remember(cudaErrorInvalidValue);
    wait_for(exec->done);
    {
        const std::lock_guard lock(streams_mutex);
        for (Stream& stream : exec->streams) remove_stream(stream);
    }
    delete exec;
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    if (!graph) return remember(cudaErrorInvalidValue);
    delete graph;
    return cudaSuccess;
}
