// transport_nccl.cu: NCCL, NVIDIA's collectives between GPUs: where every rank has a GPU of its own. On the CPU device
// it is that of cpu/nccl.h, for ranks that are threads, if --comm nccl asks for it.
//
// NCCL works in streams by itself. What it is missing is a watchdog: a thread here looks at what each call's event
// says, and at NCCL's own errors, and aborts the communicator when the job has failed, so that no rank waits for a GPU
// that is gone. A communicator must not be aborted while a call uses it, nor be used afterwards: calls and the watchdog
// take turns. A call whose host waits for another one keeps its turn. The watchdog sees for how long, as it does with
// calls on streams; but if the call does not return, the process ends with the job (ranks.cu). NCCL adds 16-bit numbers
// with a rounding at each hop; comm.cu widens them to float32 before it calls all_reduce, reduce_scatter or reduce.
#include "core/run_on_host.h"
#include "parallel/comm/transport.h"

#ifdef HAVE_NCCL

#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <thread>
#include <utility>

namespace {

void nccl_check(ncclResult_t status, const char* expression, const char* file, int line) {
    if (status == ncclSuccess) return;
    fail("NCCL: ", ncclGetErrorString(status), " from ", expression, " at ", file, ":", line, ": ",
         ncclGetLastError(nullptr));
}
#define ncclCheck(call) nccl_check((call), #call, __FILE__, __LINE__)

ncclDataType_t type_of(DType dtype) {
    switch (dtype) {
        case DType::f32: return ncclFloat32;
        case DType::bf16: return ncclBfloat16;
        case DType::f16: return ncclFloat16;
        case DType::i32: return ncclInt32;
        default: fail("collectives of ", dtype_name(dtype), " are not supported");
    }
}
ncclRedOp_t op_of(ReduceOp op) { return op == ReduceOp::max ? ncclMax : ncclSum; }
size_t count(const Tensor& tensor) { return static_cast<size_t>(tensor.n()); }

class NcclTransport final : public Transport, public NativeCollectives {
  public:
    NcclTransport(ncclComm_t comm, std::shared_ptr<RankState> state, std::vector<int> members, uint64_t id)
        : Transport(std::move(state), std::move(members), id), comm_(comm), watchdog_([this] { watch(); }) {}
    ~NcclTransport() override {
        if (group_.owns_lock()) group_.unlock();  // after an error in a group
        await({"the end", -1, state_->step}, 2);  // ranks need not end at the same time
        {
            const std::lock_guard lock(in_use_);
            // To destroy it waits for the others, who do not come if this rank, or another one, has failed.
            if (!gone_ && (state_->job->failed() || std::uncaught_exceptions() > 0)) ncclCommAbort(comm_);
            else if (!gone_) ncclCommDestroy(comm_);
            gone_ = true;
        }
        stop_ = true;
        watchdog_.join();
        for (const Pending& call : pending_)
            if (call.end) cudaEventDestroy(call.end);
    }

    std::shared_ptr<Transport> split(const std::vector<int>& members) override {
        ncclComm_t part = nullptr;
        const auto me = std::find(members.begin(), members.end(), rank()) - members.begin();
        await({"split", -1, state_->step});
        use([&] { ncclCheck(ncclCommSplit(comm_, members[0], static_cast<int>(me), &part, nullptr)); });
        {
            const std::lock_guard lock(mutex_);
            pending_.pop_back();
        }
        return std::make_shared<NcclTransport>(part, state_, to_world(members), next_id(members));
    }

    void send(const void* data, size_t bytes, int to, cudaStream_t stream) override {
        note_peer(to);
        use([&] { ncclCheck(ncclSend(data, bytes, ncclUint8, to, comm_, stream)); });
    }
    void recv(void* data, size_t bytes, int from, cudaStream_t stream) override {
        note_peer(from);
        use([&] { ncclCheck(ncclRecv(data, bytes, ncclUint8, from, comm_, stream)); });
    }
    // What is between them uses the communicator at the end, all at once: it is one turn.
    void group_start() override {
        group_ = std::unique_lock(in_use_);
        use([] { ncclCheck(ncclGroupStart()); });
    }
    void group_end() override {
        use([] { ncclCheck(ncclGroupEnd()); });
        group_.unlock();
        mark_ends();
    }

    // The slot says where the host is, which is ahead of the stream.
    void begin(cudaStream_t stream) override {
        enter(tag);
        await(tag);
        start_of_call_ = std::make_shared<double>(0);
        if (tag.traced) run_on_host(stream, [start = start_of_call_] { *start = seconds_now(); }, {}, {});
    }
    void end(cudaStream_t stream, size_t bytes) override {
        leave(tag);
        ended_.push_back({tag, stream, bytes, start_of_call_});
        if (!group_.owns_lock()) mark_ends();
    }

    NativeCollectives* native() override { return this; }
    void all_reduce(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) override {
        use([&] {
            ncclCheck(ncclAllReduce(inp.data, out.data, count(inp), type_of(inp.dtype), op_of(op), comm_, stream));
        });
    }
    void reduce_scatter(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) override {
        use([&] {
            ncclCheck(ncclReduceScatter(inp.data, out.data, count(out), type_of(inp.dtype), op_of(op), comm_, stream));
        });
    }
    void reduce(Tensor out, Tensor inp, ReduceOp op, int root, cudaStream_t stream) override {
        use([&] {
            ncclCheck(ncclReduce(inp.data, out.data, count(inp), type_of(inp.dtype), op_of(op), root, comm_, stream));
        });
    }
    void all_gather(Tensor out, Tensor inp, cudaStream_t stream) override {
        use([&] { ncclCheck(ncclAllGather(inp.data, out.data, count(inp), type_of(inp.dtype), comm_, stream)); });
    }
    void broadcast(Tensor tensor, int root, cudaStream_t stream) override {
        use([&] {
            ncclCheck(
                ncclBroadcast(tensor.data, tensor.data, count(tensor), type_of(tensor.dtype), root, comm_, stream));
        });
    }

  private:
    // What the watchdog waits for.
    struct Pending {
        CallTag tag;
        int peer = -1;              // of a message
        double timeouts = 1;        // how long it may take
        cudaEvent_t end = nullptr;  // on its stream; the host has not put it there yet, and may be waiting itself
    };
    // A call that has ended on the host. In a group it is on its stream when the group ends, not before.
    struct Ended {
        CallTag tag;
        cudaStream_t stream;
        size_t bytes;
        std::shared_ptr<double> start;
    };

    void await(const CallTag& call, double timeouts = 1) {
        const std::lock_guard lock(mutex_);
        pending_.push_back({call, -1, timeouts});
    }
    void note_peer(int peer) {
        const std::lock_guard lock(mutex_);
        if (tag.number < 0) pending_.back().peer = peer;
    }
    void mark_ends() {
        for (const Ended& call : std::exchange(ended_, {})) {
            const cudaEvent_t event = make_event();
            cudaCheck(cudaEventRecord(event, call.stream));
            {
                const std::lock_guard lock(mutex_);
                std::ranges::find(pending_, nullptr, &Pending::end)->end = event;
            }
            if (!call.tag.traced) continue;
            const auto note = [this, call] {
                state_->trace->add({TraceEvent::collective, state_->rank, -1, call.tag.step, call.bytes,
                                    *call.start - state_->started, seconds_now() - state_->started,
                                    describe(call.tag)});
            };
            run_on_host(call.stream, note, {}, {});
        }
    }

    // A turn of the rank's thread. Stopped where the communicator has been aborted.
    template <class Call>
    void use(Call&& call) {
        std::unique_lock lock(in_use_, std::defer_lock);
        if (!group_.owns_lock()) lock.lock();
        if (gone_) throw Stopped(state_->job->reason());
        call();
    }

    void watch() {
        cudaSetDevice(device_index_);
        WaitedTime time;  // since the oldest call became the oldest
        while (!stop_) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            const std::lock_guard lock(mutex_);
            const auto is_over = [](const Pending& call) {
                return call.end && cudaEventQuery(call.end) == cudaSuccess;
            };
            while (!pending_.empty() && is_over(pending_.front())) {
                cudaEventDestroy(pending_.front().end);
                pending_.pop_front();
                time = {};
            }
            if (pending_.empty()) time = {};
            else if (const double waited = time.seconds(); waited > pending_.front().timeouts * state_->timeout_s())
                state_->job->fail(state_->rank, timeout_report(pending_.front().peer, pending_.front().tag, waited));
            const std::unique_lock turn(in_use_, std::try_to_lock);
            if (!turn.owns_lock() || gone_) continue;
            ncclResult_t error = ncclSuccess;
            ncclCommGetAsyncError(comm_, &error);
            if (error != ncclSuccess && error != ncclInProgress)
                state_->job->fail(state_->rank,
                                  concat("NCCL: ", ncclGetErrorString(error), ": ", ncclGetLastError(comm_)));
            if (state_->job->failed()) {
                gone_ = true;
                ncclCommAbort(comm_);
            }
        }
    }

    ncclComm_t comm_;
    const int device_index_ = device().index;
    std::mutex in_use_;                   // held by who uses comm_
    std::unique_lock<std::mutex> group_;  // of in_use_, between group_start and group_end
    std::mutex mutex_;                    // guards pending_
    std::deque<Pending> pending_;
    std::vector<Ended> ended_;
    bool gone_ = false;  // destroyed or aborted; guarded by in_use_
    std::atomic<bool> stop_{false};
    std::shared_ptr<double> start_of_call_;
    std::thread watchdog_;  // last: it uses the others
};

}  // namespace

bool nccl_is_built_in() { return true; }

// Rank 0 makes an id, and the ranks find each other by it.
std::shared_ptr<Transport> make_nccl_transport(std::shared_ptr<RankState> state,
                                               std::shared_ptr<HostTransport> control) {
    ncclUniqueId id;
    if (control->rank() == 0) {
        ncclCheck(ncclGetUniqueId(&id));
        for (int i = 1; i < control->size(); ++i) control->send_host(std::string(id.internal, sizeof id.internal), i);
    } else {
        std::memcpy(id.internal, control->recv_host(0).data(), sizeof id.internal);
    }
    ncclComm_t comm = nullptr;
    ncclCheck(ncclCommInitRank(&comm, control->size(), id, control->rank()));
    return std::make_shared<NcclTransport>(comm, state, control->members(), 0);
}

#else

bool nccl_is_built_in() { return false; }
std::shared_ptr<Transport> make_nccl_transport(std::shared_ptr<RankState>, std::shared_ptr<HostTransport>) {
    fail("this program was built without NCCL");
}

#endif
