// transport.cu: what all transports share: the slots that say where each rank is, messages in stream order,
// the watchdog.
#include "parallel/comm/transport.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <thread>

// ---------------------------------------------------------------------------------------------------------------------
// Job and slots

void Job::fail(int rank, const std::string& text) {
    {
        const std::lock_guard lock(mutex_);
        if (failed_) return;
        reason_ = concat("rank ", rank, ": ", text);
        failed_.store(true, std::memory_order_release);
    }
    if (on_failure) on_failure(reason());
}

std::string Job::reason() const {
    const std::lock_guard lock(mutex_);
    return reason_;
}

namespace {
class SlotLock {
  public:
    explicit SlotLock(Slot& slot) : slot_(slot) {
        while (slot_.lock.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    }
    ~SlotLock() { slot_.lock.clear(std::memory_order_release); }

  private:
    Slot& slot_;
};
}  // namespace

void write_slot(Slot& slot, const SlotCopy& value) {
    const SlotLock lock(slot);
    slot.step = value.step;
    slot.since = value.since;
    slot.inside = value.inside;
    std::snprintf(slot.what, sizeof slot.what, "%s", value.what.c_str());
}

SlotCopy read_slot(Slot& slot) {
    const SlotLock lock(slot);
    return {slot.step, slot.since, slot.inside, slot.what};
}

void note_begun(Slot& slot, uint64_t comm, int64_t n) {
    const SlotLock lock(slot);
    Slot::Begun* place = nullptr;
    for (Slot::Begun& each : slot.begun) {
        if (each.n > 0 && each.comm == comm) place = &each;
        if (each.n == 0 && !place) place = &each;
    }
    if (place) *place = {comm, n};
}

int64_t read_begun(Slot& slot, uint64_t comm) {
    const SlotLock lock(slot);
    for (const Slot::Begun& each : slot.begun)
        if (each.n > 0 && each.comm == comm) return each.n;
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Transport

Transport::Transport(std::shared_ptr<RankState> state, std::vector<int> members, uint64_t id)
    : state_(std::move(state)), members_(std::move(members)), id_(id) {
    const auto at = std::find(members_.begin(), members_.end(), state_->rank);
    check(at != members_.end(), "rank ", state_->rank, " is not among the members of its communicator");
    rank_ = static_cast<int>(at - members_.begin());
}

std::string Transport::describe(const CallTag& tag) const {
    return tag.number < 0 ? concat(tag.what, " of ", name) : concat(tag.what, " #", tag.number, " of ", name);
}

Transport::~Transport() { note_begun(*state_->slots[static_cast<size_t>(state_->rank)], id_, 0); }

void Transport::enter(const CallTag& tag) {
    Slot& slot = *state_->slots[static_cast<size_t>(state_->rank)];
    write_slot(slot, {tag.step, seconds_now(), true, describe(tag)});
    if (tag.number >= 0) note_begun(slot, id_, tag.number + 1);
}
void Transport::leave(const CallTag& tag) {
    write_slot(*state_->slots[static_cast<size_t>(state_->rank)], {tag.step, seconds_now(), false, describe(tag)});
}

bool Transport::recv_waits_on_host([[maybe_unused]] cudaStream_t stream) const {
#ifdef CUDA_ON_CPU
    return cuda_cpu::runs_at_once(stream);
#else
    return false;
#endif
}

std::string Transport::timeout_report(int peer, const CallTag& call, double waited) {
    std::ostringstream text;
    text.precision(3);
    text << describe(call) << " at step " << call.step << " has waited " << waited << " s";
    const bool sends = std::strcmp(call.what, "send") == 0;
    if (peer >= 0)
        text << (sends ? " for it to be received by rank " : " for a message from rank ")
             << members_[static_cast<size_t>(peer)];
    else if (const int to = oldest_unsent_to(); to >= 0)
        text << " for rank " << members_[static_cast<size_t>(to)] << " to receive a message";
    const double now = seconds_now();
    std::string missing;
    for (int member : members_) {
        Slot* slot = state_->slots[static_cast<size_t>(member)];
        const bool is_peer = peer >= 0 && members_[static_cast<size_t>(peer)] == member;
        // In a collective whoever has not begun it holds up all others; for a message it is the other side.
        if (member == state_->rank || (call.number < 0 && peer >= 0 && !is_peer)) continue;
        std::ostringstream where;
        where.precision(3);
        if (!slot) {
            if (is_peer) where << "rank " << member << " runs on another machine: its own report tells more";
        } else if (call.number < 0 || read_begun(*slot, id_) <= call.number) {
            const SlotCopy at = read_slot(*slot);
            where << "rank " << member;
            if (at.since == 0) where << " (has not communicated yet)";
            else
                where << " (" << (at.inside ? "inside " : "last seen after ") << at.what << " at step " << at.step
                      << ", " << now - at.since << " s ago)";
        }
        if (!where.str().empty()) missing += (missing.empty() ? "" : ", ") + where.str();
    }
    if (!missing.empty()) text << "; missing: " << missing;
    text << ". (--comm-timeout sets how long to wait)";
    return text.str();
}

// All members of a group count their parent's splits alike, and agree on who they are.
uint64_t Transport::next_id(const std::vector<int>& members) {
    std::string text = concat(id_, " ", n_splits_++);
    for (int member : members) text += concat(" ", member);
    return hash_name(text);
}

std::vector<int> Transport::to_world(const std::vector<int>& members) const {
    std::vector<int> world;
    for (int member : members) world.push_back(members_.at(static_cast<size_t>(member)));
    return world;
}

// ---------------------------------------------------------------------------------------------------------------------
// HostTransport

namespace {

constexpr size_t kMaxMessageBytes = size_t{1} << 30;  // MPI counts in int
constexpr size_t kStagingBytes = size_t{8} << 20;     // long enough for the bus to reach its bandwidth

}  // namespace

HostTransport::~HostTransport() {
    for (void* buffer : staging_) cudaFreeHost(buffer);
}

void HostTransport::host_step(cudaStream_t stream, std::function<bool()> may_run, std::function<void()> work,
                              [[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes,
                              [[maybe_unused]] bool writes) {
    const std::shared_ptr<Job> job = state_->job;
#ifdef CUDA_ON_CPU
    if (!recv_waits_on_host(stream)) {  // strict mode
        // An exception must not pass through the runtime. What goes wrong is noted in the job instead.
        auto guarded = [job, work = std::move(work), rank = state_->rank] {
            if (job->failed()) return;
            try {
                work();
            } catch (const std::exception& error) {
                job->fail(rank, error.what());
            }
        };
        const cuda_cpu::Footprint footprint{describe(tag), {nullptr, 0}, {{data, bytes, writes}}};
        if (may_run) cudaCheck(cuda_cpu::enqueue_when(stream, std::move(may_run), guarded, footprint));
        else cudaCheck(cuda_cpu::enqueue(stream, guarded, footprint));
        return;
    }
#endif
    cudaCheck(cudaStreamSynchronize(stream));
    while (may_run && !may_run()) pause();
    if (job->failed()) throw Stopped(job->reason());
    work();
}

std::function<bool()> HostTransport::watched(std::function<bool()> ready, int from, const CallTag& call,
                                             double timeouts) {
    return [this, ready = std::move(ready), from, call, timeouts, time = WaitedTime()]() mutable {
        if (state_->job->failed() || ready()) return true;
        const double waited = time.seconds();
        if (waited < timeouts * state_->timeout_s()) return false;
        state_->job->fail(state_->rank, timeout_report(from, call, waited));
        return true;
    };
}

size_t HostTransport::largest_message() const { return device().is_cpu ? kMaxMessageBytes : kStagingBytes; }

// Taken at the first message, which is one of the run's start: a transport is made before its device is open.
void* HostTransport::staging(int which) {
    if (!staging_[which]) cudaCheck(cudaMallocHost(&staging_[which], kStagingBytes));
    return staging_[which];
}

void HostTransport::trace_message(const CallTag& call, int peer, bool sends, size_t bytes, double start) {
    if (!call.traced) return;
    state_->trace->add({sends ? TraceEvent::sending : TraceEvent::receiving, state_->rank,
                        members_[static_cast<size_t>(peer)], call.step, bytes, start - state_->started,
                        seconds_now() - state_->started, describe(call)});
}

void HostTransport::send(const void* data, size_t bytes, int to, cudaStream_t stream) {
    if (const size_t most = largest_message(); bytes > most) {
        send(data, most, to, stream);
        return send(static_cast<const char*>(data) + most, bytes - most, to, stream);
    }
    if (!device().is_cpu) {
        void* host = staging(0);
        cudaCheck(cudaMemcpyAsync(host, data, bytes, cudaMemcpyDeviceToHost, stream));
        data = host;
    }
    const int64_t number = n_sent_[to]++;
    const auto work = [=, this, call = tag] {
        const double start = seconds_now();
        post(to, number, data, bytes);
        trace_message(call, to, true, bytes, start);
    };
    host_step(stream, nullptr, work, data, bytes, false);
}

void HostTransport::recv(void* data, size_t bytes, int from, cudaStream_t stream) {
    if (const size_t most = largest_message(); bytes > most) {
        recv(data, most, from, stream);
        return recv(static_cast<char*>(data) + most, bytes - most, from, stream);
    }
    const bool on_cpu = device().is_cpu;
    void* host = data;
    if (!on_cpu) {
        cudaCheck(cudaStreamSynchronize(stream));  // the last receive has left the buffer
        host = staging(1);
    }
    const int64_t number = n_received_[from]++;
    auto start = std::make_shared<double>(0);
    const auto ready = [=, this] {
        if (*start == 0) *start = seconds_now();
        return arrived(from, number);
    };
    const auto work = [=, this, call = tag] {
        take_checked(host, bytes, from, number, call);
        trace_message(call, from, false, bytes, *start);
    };
    host_step(stream, watched(ready, from, tag), work, host, bytes, true);
    if (!on_cpu) cudaCheck(cudaMemcpyAsync(data, host, bytes, cudaMemcpyHostToDevice, stream));
}

bool HostTransport::recv_waits_on_host(cudaStream_t stream) const {
    return !device().is_cpu || Transport::recv_waits_on_host(stream);
}

void HostTransport::take_checked(void* data, size_t bytes, int from, int64_t number, const CallTag& call) {
    const size_t sent = arrived_bytes(from, number);
    if (sent != bytes)
        fail(describe(call), " at step ", call.step, " expects ", bytes, " bytes from rank ",
             members_[static_cast<size_t>(from)], ", which sent ", sent,
             ": the ranks make different calls, or disagree on sizes or dtypes");
    take(data, from, number);
}

void HostTransport::begin(cudaStream_t stream) {
    host_step(stream, nullptr, [this, call = tag] { enter(call); });
}

void HostTransport::end(cudaStream_t stream, size_t bytes) {
    // A collective is over when its own messages have left; a single message may be on its way for as long as it likes.
    std::function<bool()> may_run;
    if (tag.number >= 0) may_run = watched([this] { return all_sent(); }, -1, tag);
    host_step(stream, may_run, [this, call = tag, bytes] {
        const double start = read_slot(*state_->slots[static_cast<size_t>(state_->rank)]).since;
        leave(call);
        if (call.traced && call.number >= 0)
            state_->trace->add({TraceEvent::collective, state_->rank, -1, call.step, bytes, start - state_->started,
                                seconds_now() - state_->started, describe(call)});
    });
}

void HostTransport::send_host(const std::string& text, int to) { post(to, n_sent_[to]++, text.data(), text.size()); }

std::string HostTransport::recv_host(int from) {
    const int64_t number = n_received_[from]++;
    // Twice the timeout: a rank that waits inside a call knows better what is missing, so its report should come first.
    const auto ready =
        watched([=, this] { return arrived(from, number); }, from, {"a message of the program", -1, state_->step}, 2);
    while (!ready()) pause();
    if (state_->job->failed()) throw Stopped(state_->job->reason());
    std::string text(arrived_bytes(from, number), '\0');
    take(text.data(), from, number);
    return text;
}
