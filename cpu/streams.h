// cpu/streams.h: what streams (cpu/streams.cpp) and captures of them (cpu/graphs.cpp) share.
#pragma once

#include "races.h"

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>

namespace cuda_cpu {

using Clock = std::chrono::steady_clock;

// A piece of work in a stream and what must be done before it.
struct Operation {
    int device = 0;
    uint64_t number = 0;  // in the order in which the program has asked for work
    std::function<void()> work;
    std::function<bool()> may_run;  // what it waits for beside other operations; empty: nothing
    bool touches_host = false;      // pinned memory
    std::vector<std::shared_ptr<Operation>> after;
    enum { waiting, running, done } state = waiting;
    uint64_t mark = 0;       // see Wait
    Clock::time_point time;  // when it was done
    VectorClock clock;       // what comes before it, and itself
    bool ready() const;
};

struct Capture;  // cpu/graphs.cpp

// A place in a capture: the next work of a stream comes after these nodes, by their numbers. Without a capture:
// nowhere.
struct Captured {
    std::shared_ptr<Capture> capture;
    std::vector<size_t> after;
};

struct Stream {
    int device = 0;
    unsigned number = 0;   // in the order of creation; 0: a default stream
    bool blocking = true;  // takes part in the legacy default stream's rule
    bool of_graph = false;
    size_t in_clocks = 0;  // its place in vector clocks
    bool has_place = false;
    std::shared_ptr<Operation> last;
    std::deque<std::shared_ptr<Operation>> queue;  // what is not done yet
    Captured captured;                             // while it is captured
    std::string name() const {
        if (number == 0) return "the default stream";
        return "stream " + std::to_string(number) + (of_graph ? " of a graph" : "");
    }
};

struct Event {
    bool timed = true;
    std::shared_ptr<Operation> recorded;  // an operation without work, in the stream that it was last recorded in
    Captured captured;                    // if that stream was captured
};

// ---- cpu/streams.cpp
extern std::mutex streams_mutex;  // guards streams, events, operations and captures

// Notes work down in a stream, after what it has to wait for, and after `others`; strict mode, with the mutex held.
std::shared_ptr<Operation> note(Stream& stream, std::function<void()> work, const Footprint& footprint = {},
                                std::vector<std::shared_ptr<Operation>> others = {});
Stream& resolve(cudaStream_t stream);  // with the mutex held
void add_stream(Stream& stream);       // with the mutex held
void remove_stream(Stream& stream);    // all of its work has been waited for
void run_early(int device);            // strict mode: what may run at once, under the seeds that run it early
void wait_for(const std::shared_ptr<Operation>& target);
// Strict mode: the host waits for something that is no work of a stream, and the device works on meanwhile.
void wait_until(const std::function<bool()>& ready);

// ---- cpu/graphs.cpp
bool any_capture();  // whether some stream is captured: quick
// Work for a stream becomes a node, where the stream is captured. False: it is not, and the work has to run. An error
// is in `status` then.
bool capture(cudaStream_t stream, const std::function<void()>& work, const Footprint& footprint, cudaError_t& status);
bool capture_record(cudaStream_t stream, Event& event, cudaError_t& status);
bool capture_wait(cudaStream_t stream, const Event& event, cudaError_t& status);
// The error of a call that would wait for a stream that is captured, or for such a stream's device. cudaSuccess: it
// may.
cudaError_t refuse_wait(cudaStream_t stream);
cudaError_t refuse_wait_for_device(int device);

}  // namespace cuda_cpu
