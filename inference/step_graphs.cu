// inference/step_graphs.cu: launches of many kernels as one.
//
// A step of GPT-2 124M that decodes has 65 to 101 launches (twelve blocks of five to eight kernels), each of which
// takes the host some microseconds, and the GPU less where a step has few rows: it waits for the host. A CUDA graph is
// a list of launches that the host starts all at once. What a launch is given is part of the graph: pointers, and the
// sizes that grids and strides follow from. So there is a graph for each key, the sizes of a step, and what changes
// from step to step (tokens, positions, page tables) lies in memory, always the same, from which the graph's first node
// brings it to the device.
//
// The first step of a key is launched as always: a kernel is loaded at its first launch, which may wait for the device,
// and a capture is to record launches and do nothing else. The second step is captured, and from then on the graph is
// launched.
#include "inference/inference.h"

namespace {

// Ends the capture in any case: a stream that is left captured cannot be used.
struct StreamCapture {
    const cudaStream_t stream;
    cudaGraph_t graph = nullptr;
    bool ended = false;

    explicit StreamCapture(cudaStream_t its_stream) : stream(its_stream) {
        // Thread-local: other threads may meanwhile call what must not be captured, as cudaMalloc.
        cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    }
    StreamCapture(const StreamCapture&) = delete;
    ~StreamCapture() {
        if (!ended) cudaStreamEndCapture(stream, &graph), cudaGetLastError();
        if (graph) cudaGraphDestroy(graph);
    }
    void end() {
        ended = true;
        cudaCheck(cudaStreamEndCapture(stream, &graph));
    }
};

}  // namespace

StepGraphs::~StepGraphs() {
    for (const auto& [key, graph] : graphs_)
        if (graph.exec) cudaGraphExecDestroy(graph.exec);
}

void StepGraphs::run(const Key& key, cudaStream_t stream, const std::function<void()>& launches) {
    const auto [at, is_new] = graphs_.try_emplace(key);
    Graph& graph = at->second;
    if (is_new) return launches();
    if (!graph.exec) {
        StreamCapture capture(stream);
        launches();
        capture.end();
        cudaCheck(cudaGraphGetNodes(capture.graph, nullptr, &graph.n_nodes));
        cudaCheck(cudaGraphInstantiate(&graph.exec, capture.graph, 0));
    }
    cudaCheck(cudaGraphLaunch(graph.exec, stream));
    ++n_launches_;
    n_nodes_ = graph.n_nodes;
}
