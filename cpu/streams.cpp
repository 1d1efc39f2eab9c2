// cpu/streams.cpp: streams and events of the CPU device.
//
// By default a stream runs its work at once, in order. In strict mode (CUDA_CPU_STRICT=seed) work is only put into a
// list, with what it has to wait for: the work before it in its stream, the events its stream was told to wait for, and
// the legacy default stream's rule (it waits for all blocking streams and they for it). The seed decides which of the
// work that may run does run, and when:
//
//     seed 1, 4, 7, ...   as late as possible: when the program waits for something, only what that needs
//     seed 2, 5, 8, ...   as early as possible: as soon as it is asked for; but copies from and to pinned memory, which
//                         the host could see, when they are needed
//     seed 3, 6, 9, ...   at random, when the program waits for something; by the three ways of RandomOrder
//
// So a missing wait can give a wrong result; and as late as possible, work that the program does not wait for does not
// run. But this alone would find many missing waits only by chance; cpu/races.cpp finds each of them, under every seed,
// from the vector clocks of the operations.
#include "streams.h"

#include <algorithm>
#include <map>
#include <thread>
#include <utility>

namespace cuda_cpu {

std::mutex streams_mutex;

bool Operation::ready() const {
    return state == waiting &&
           std::all_of(after.begin(), after.end(), [](const auto& earlier) { return earlier->state == done; }) &&
           (!may_run || may_run());
}

namespace {

enum class Order { late, early, random };
Order order() {
    static const Order the_order = [] {
        const char* seed = std::getenv("CUDA_CPU_STRICT");
        const uint64_t number = seed ? std::strtoull(seed, nullptr, 10) : 0;
        return number % 3 == 1 ? Order::late : number % 3 == 2 ? Order::early : Order::random;
    }();
    return the_order;
}

struct DeviceState {
    Stream default_stream;
    std::vector<Stream*> streams;
    bool idle() const {
        return default_stream.queue.empty() &&
               std::all_of(streams.begin(), streams.end(), [](const Stream* stream) { return stream->queue.empty(); });
    }
};

// With streams_mutex held:
std::map<int, DeviceState> devices;
uint64_t n_operations = 0;
// What the host has waited for, on any thread: threads of the host order their own work among each other in ways that
// the device does not see (a join, a mutex), and each rank has memory and streams of its own.
VectorClock host_clock;
std::vector<uint64_t> counts;     // operations so far that touch memory, by the stream's place in clocks
std::vector<size_t> free_places;  // of streams that have been destroyed

DeviceState& state_of(int device) {  // with the mutex held
    DeviceState& state = devices[device];
    state.default_stream.device = device;
    return state;
}

size_t place_in_clocks(Stream& stream) {
    if (!std::exchange(stream.has_place, true)) {
        if (free_places.empty()) free_places.push_back(counts.size()), counts.push_back(0);
        stream.in_clocks = free_places.back();
        free_places.pop_back();
    }
    return stream.in_clocks;
}

}  // namespace

Stream& resolve(cudaStream_t stream) { return stream ? *stream : state_of(current_device()).default_stream; }

std::shared_ptr<Operation> note(Stream& stream, std::function<void()> work, const Footprint& footprint,
                                std::vector<std::shared_ptr<Operation>> others) {
    DeviceState& state = state_of(stream.device);
    auto operation = std::make_shared<Operation>();
    operation->device = stream.device;
    operation->number = ++n_operations;
    operation->work = std::move(work);
    operation->after = std::move(others);
    if (stream.last) operation->after.push_back(stream.last);
    // The legacy default stream waits for all blocking streams, and they wait for it.
    if (&stream == &state.default_stream) {
        for (Stream* other : state.streams)
            if (other->blocking && other->last) operation->after.push_back(other->last);
    } else if (stream.blocking && state.default_stream.last) {
        operation->after.push_back(state.default_stream.last);
    }
    const size_t place = place_in_clocks(stream);
    // The operation comes after all that the host has waited for, and after the operations it has to wait for.
    operation->clock = host_clock;
    for (const auto& earlier : operation->after) operation->clock.join(earlier->clock);
    const auto touches = [](const Access& access) { return access.bytes > 0; };
    if (std::any_of(footprint.accesses.begin(), footprint.accesses.end(), touches)) {
        ++counts[place];
        for (const Access& access : footprint.accesses)
            operation->touches_host |= allocation_around(reinterpret_cast<uintptr_t>(access.data)).on_host;
    }
    operation->clock.set(place, counts[place]);
    check_races(footprint, place, stream.name(), operation->clock);
    stream.last = operation;
    stream.queue.push_back(operation);
    return operation;
}

namespace {

// How the next operation is chosen during one wait, at random. Each of the three finds mistakes that the others seldom
// find: only what the program waits for (finds waits that are missing); by a random priority of each stream, so that
// one runs far ahead of another (finds what is overwritten while it is still read); at random each time.
struct RandomOrder {
    enum { needed_only, by_stream, any } kind;
    uint64_t salt = strict_random();
    RandomOrder() {
        const uint64_t coin = strict_random_below(4);
        kind = coin < 2 ? needed_only : coin == 2 ? by_stream : any;
    }
    size_t pick(const std::vector<Stream*>& ready) const {
        if (kind != by_stream) return strict_random_below(ready.size());
        const auto priority = [&](const Stream* stream) { return (stream->number ^ salt) * kSplitmixStep; };
        const auto less = [&](const Stream* a, const Stream* b) { return priority(a) < priority(b); };
        return static_cast<size_t>(std::max_element(ready.begin(), ready.end(), less) - ready.begin());
    }
};

// The program waits for one operation, or, without a target, for all of a device. If it waits for nothing, work that
// may run early is run.
class Wait {
  public:
    struct ForNothing {};
    Wait(int device, ForNothing) : device_(device) {}
    Wait(int device, std::shared_ptr<Operation> target) : device_(device), target_(std::move(target)) { mark_needed(); }

    bool finished() const { return target_ ? target_->state == Operation::done : state_of(device_).idle(); }

    // Runs one operation, with the mutex released; false if none may run. The work of other devices is only touched if
    // it is needed: they have OS threads of their own to drive them (a rank each), and two ranks that wait for each
    // other must not both depend on one thread.
    bool run_one(std::unique_lock<std::mutex>& lock) {
        std::vector<Stream*> ready;
        const auto consider = [&](Stream& stream) {
            if (stream.queue.empty() || !stream.queue.front()->ready()) return;
            const Operation& next = *stream.queue.front();
            if ((mark_ > 0 && next.mark == mark_) || (stream.device == device_ && may_run_unneeded(next)))
                ready.push_back(&stream);
        };
        for (auto& [index, state] : devices) {
            consider(state.default_stream);
            for (Stream* stream : state.streams) consider(*stream);
        }
        if (ready.empty()) {
            if (mark_ > 0 && seen_ != n_changes()) mark_needed();
            return false;
        }
        Stream& stream = *ready[pick(ready)];
        const auto operation = stream.queue.front();
        operation->state = Operation::running;
        lock.unlock();
        if (operation->work) operation->work();
        lock.lock();
        operation->state = Operation::done;
        operation->time = Clock::now();
        operation->work = nullptr;
        operation->may_run = nullptr;
        operation->after.clear();
        stream.queue.pop_front();
        return true;
    }

  private:
    bool may_run_unneeded(const Operation& operation) const {
        switch (order()) {
            case Order::late: return false;
            case Order::early: return !operation.touches_host;
            default: return !target_ || random_.kind != RandomOrder::needed_only;
        }
    }
    size_t pick(const std::vector<Stream*>& ready) const {
        if (order() != Order::early) return random_.pick(ready);
        const auto earlier = [](const Stream* a, const Stream* b) {
            return a->queue.front()->number < b->queue.front()->number;
        };
        return static_cast<size_t>(std::min_element(ready.begin(), ready.end(), earlier) - ready.begin());
    }
    // Others may have marked for themselves what is needed here, or have added work. (All that one operation waits for
    // was there before it.)
    uint64_t n_changes() const { return n_taken_over + (target_ ? 0 : n_operations); }
    // Marks what must be done before the wait is over: the target, or all of the device, and what they wait for.
    void mark_needed() {
        static uint64_t n_marks = 0;
        const uint64_t before = std::exchange(mark_, ++n_marks);
        std::vector<Operation*> open;
        const auto visit = [&](const std::shared_ptr<Operation>& operation) {
            if (operation->state == Operation::done || operation->mark == mark_) return;
            if (operation->mark != 0 && operation->mark != before) ++n_taken_over;
            operation->mark = mark_;
            open.push_back(operation.get());
        };
        if (target_) visit(target_);
        else {
            for (const auto& operation : state_of(device_).default_stream.queue) visit(operation);
            for (const Stream* stream : state_of(device_).streams)
                for (const auto& operation : stream->queue) visit(operation);
        }
        while (!open.empty()) {
            const Operation* operation = open.back();
            open.pop_back();
            for (const auto& earlier : operation->after) visit(earlier);
        }
        seen_ = n_changes();
    }

    static inline uint64_t n_taken_over = 0;  // marks of one wait that another has replaced
    const int device_;
    const std::shared_ptr<Operation> target_;
    const RandomOrder random_;
    uint64_t mark_ = 0;  // what mark_needed has written last; 0: nothing is needed
    uint64_t seen_ = 0;  // n_changes then
};

// Until the target is done, or without one all of the device; or, where `over` is given, until that says so.
void run_until_done(int device, std::shared_ptr<Operation> target, const std::function<bool()>& over = nullptr) {
    std::unique_lock lock(streams_mutex);
    Wait wait(device, std::move(target));
    while (over ? !over() : !wait.finished()) {
        if (wait.run_one(lock)) continue;
        lock.unlock();  // another OS thread is running what we wait for
        std::this_thread::yield();
        lock.lock();
    }
}
// Whether it is done. If not, one operation is run before the answer, so that a program that asks again and again comes
// to an end.
bool poll(const std::shared_ptr<Operation>& operation) {
    std::unique_lock lock(streams_mutex);
    if (!operation || operation->state == Operation::done) {
        if (operation) host_clock.join(operation->clock);
        return true;
    }
    Wait(operation->device, operation).run_one(lock);
    return false;
}

void put_on_stream(cudaStream_t stream, std::function<bool()> may_run, std::function<void()> work,
                   const Footprint& footprint) {
    std::unique_lock lock(streams_mutex);
    const auto operation = note(resolve(stream), std::move(work), footprint);
    operation->may_run = std::move(may_run);
    lock.unlock();
    run_early(operation->device);
}

// For the tests of this check. CUDA_CPU_STRICT_SKIP_WAIT=FILE:LINE leaves out the waits of that line; =list prints the
// lines of all waits on stderr.
bool is_skipped_wait(Place place) {
    static const char* const asked = std::getenv("CUDA_CPU_STRICT_SKIP_WAIT");
    if (!asked) return false;
    const std::string line = std::string(place.file) + ":" + std::to_string(place.line);
    if (std::strcmp(asked, "list") == 0) std::fprintf(stderr, "wait at %s\n", line.c_str());
    return asked == line;
}

}  // namespace

void wait_for(const std::shared_ptr<Operation>& target) {
    if (!target) return;
    run_until_done(target->device, target);
    const std::lock_guard lock(streams_mutex);
    host_clock.join(target->clock);
}

void wait_until(const std::function<bool()>& ready) { run_until_done(current_device(), nullptr, ready); }

void run_early(int device) {
    if (order() != Order::early) return;
    std::unique_lock lock(streams_mutex);
    Wait nothing(device, Wait::ForNothing{});
    while (nothing.run_one(lock)) {
    }
}

void add_stream(Stream& stream) { state_of(stream.device).streams.push_back(&stream); }
void remove_stream(Stream& stream) {
    std::erase(state_of(stream.device).streams, &stream);
    if (stream.has_place) free_places.push_back(stream.in_clocks);  // all of its operations are in the host's clock
}

void wait_for_device(int device) {
    run_until_done(device, nullptr);
    const std::lock_guard lock(streams_mutex);
    const auto join = [](const Stream& stream) {
        if (stream.last) host_clock.join(stream.last->clock);
    };
    join(state_of(device).default_stream);
    for (const Stream* stream : state_of(device).streams) join(*stream);
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work, const Footprint& footprint) {
    cudaError_t status = cudaSuccess;
    if (any_capture() && capture(stream, work, footprint, status)) return status;
    if (strict) put_on_stream(stream, nullptr, std::move(work), footprint);
    else work();
    return cudaSuccess;
}
cudaError_t enqueue_when(cudaStream_t stream, std::function<bool()> may_run, std::function<void()> work,
                         const Footprint& footprint) {
    cudaError_t status = cudaSuccess;
    if (any_capture() && capture(stream, nullptr, footprint, status)) return status;
    if (strict) return put_on_stream(stream, std::move(may_run), std::move(work), footprint), cudaSuccess;
    while (!may_run()) std::this_thread::yield();
    work();
    return cudaSuccess;
}
bool runs_at_once(cudaStream_t stream) {
    if (strict) return false;
    if (!any_capture()) return true;
    const std::lock_guard lock(streams_mutex);
    return stream != nullptr && !stream->captured.capture;
}

}  // namespace cuda_cpu

using namespace cuda_cpu;

cudaError_t cudaDeviceSynchronize() {
    if (const cudaError_t error = refuse_wait_for_device(current_device())) return error;
    if (strict) wait_for_device(current_device());
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    if (!stream || (flags & ~cudaStreamNonBlocking)) return remember(cudaErrorInvalidValue);
    *stream = new Stream;
    (*stream)->device = current_device();
    (*stream)->blocking = !(flags & cudaStreamNonBlocking);
    static unsigned n_streams = 0;
    const std::lock_guard lock(streams_mutex);
    (*stream)->number = ++n_streams;
    add_stream(**stream);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (!stream) return remember(cudaErrorInvalidResourceHandle);
    if (const cudaError_t error = cudaStreamSynchronize(stream)) return error;  // it is captured
    const std::lock_guard lock(streams_mutex);
    remove_stream(*stream);
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (const cudaError_t error = refuse_wait(stream)) return error;
    if (!strict) return cudaSuccess;
    std::shared_ptr<Operation> last;
    {
        const std::lock_guard lock(streams_mutex);
        last = resolve(stream).last;
        if (!stream) last = note(resolve(stream), nullptr);  // the legacy stream waits for the blocking ones
    }
    wait_for(last);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (const cudaError_t error = refuse_wait(stream)) return error;
    if (!strict) return cudaSuccess;
    std::shared_ptr<Operation> last;
    {
        const std::lock_guard lock(streams_mutex);
        last = resolve(stream).last;
    }
    return poll(last) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags, Place place) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    if (flags != 0) return remember(cudaErrorInvalidValue);
    if (strict && is_skipped_wait(place)) return cudaSuccess;
    cudaError_t status = cudaSuccess;
    if ((any_capture() || event->captured.capture) && capture_wait(stream, *event, status)) return status;
    if (!strict) return cudaSuccess;
    const std::lock_guard lock(streams_mutex);
    if (event->recorded) note(resolve(stream), nullptr, {}, {event->recorded});
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
    return enqueue(stream, [=] { function(argument); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    if (!event || (flags & ~cudaEventDisableTiming)) return remember(cudaErrorInvalidValue);
    *event = new Event;
    (*event)->timed = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    delete event;  // the operation that it was recorded as still exists
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    cudaError_t status = cudaSuccess;
    if ((any_capture() || event->captured.capture) && capture_record(stream, *event, status)) return status;
    if (!strict) {
        event->recorded = std::make_shared<Operation>();
        event->recorded->state = Operation::done;
        event->recorded->time = Clock::now();
        return cudaSuccess;
    }
    const std::lock_guard lock(streams_mutex);
    event->recorded = note(resolve(stream), nullptr);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    if (event->captured.capture) return remember(cudaErrorCapturedEvent);
    wait_for(event->recorded);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (!event) return remember(cudaErrorInvalidResourceHandle);
    if (event->captured.capture) return remember(cudaErrorCapturedEvent);
    if (const cudaError_t error = refuse_in_capture()) return error;
    return poll(event->recorded) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (!milliseconds) return remember(cudaErrorInvalidValue);
    if (!start || !end || !start->recorded || !end->recorded || !start->timed || !end->timed)
        return remember(cudaErrorInvalidResourceHandle);
    if (start->captured.capture || end->captured.capture) return remember(cudaErrorCapturedEvent);
    if (start->recorded->state != Operation::done || end->recorded->state != Operation::done) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(end->recorded->time - start->recorded->time).count();
    return cudaSuccess;
}
