// transport_nccl.cu: NCCL, NVIDIA's collectives between GPUs: where every rank has a GPU of its own. On the CPU device
// it is that of cpu/nccl.h, for ranks that are threads, if --comm nccl asks for it.
//
// NCCL works in streams by itself. What it is missing is a watchdog: a thread here looks at what each call's event
// says, and at NCCL's own errors, and aborts the communicator when the job has failed, so that no rank waits for a GPU
// that is gone. A communicator must not be aborted while a call uses it, nor be used afterwards: calls and the watchdog
// take turns. A call that does not return because of a rank that is gone keeps its turn; then the process ends with the
// job (ranks.cu). NCCL adds 16-bit numbers with a rounding at each hop; comm.cu widens them to float32 before it calls
// all_reduce, reduce_scatter or reduce.
#include "parallel/comm/transport.h"

#ifdef HAVE_NCCL

#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <thread>

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
        stop_ = true;
        watchdog_.join();
        for (const Pending& call : pending_) cudaEventDestroy(call.end);
        if (aborted_) return;
        // To destroy it waits for the others, who do not come if this rank, or another one, has failed.
        if (state_->job->failed() || std::uncaught_exceptions() > 0) ncclCommAbort(comm_);
        else ncclCommDestroy(comm_);
    }

    std::shared_ptr<Transport> split(const std::vector<int>& members) override {
        ncclComm_t part = nullptr;
        const auto me = std::find(members.begin(), members.end(), rank()) - members.begin();
        use([&] { ncclCheck(ncclCommSplit(comm_, members[0], static_cast<int>(me), &part, nullptr)); });
        return std::make_shared<NcclTransport>(part, state_, to_world(members), next_id(members));
    }

    void send(const void* data, size_t bytes, int to, cudaStream_t stream) override {
        use([&] { ncclCheck(ncclSend(data, bytes, ncclUint8, to, comm_, stream)); });
    }
    void recv(void* data, size_t bytes, int from, cudaStream_t stream) override {
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
    }

    void begin(cudaStream_t stream) override {
        enter(tag);
        if (tag.traced) note_time(stream, start_of_call_ = std::make_shared<double>(0), nullptr);
    }
    void end(cudaStream_t stream, size_t bytes) override {
        Pending call{tag, make_event()};
        cudaCheck(cudaEventRecord(call.end, stream));
        {
            const std::lock_guard lock(mutex_);
            pending_.push_back(call);
        }
        if (!tag.traced) return;
        note_time(stream, std::make_shared<double>(0),
                  [this, call_tag = tag, bytes, start = start_of_call_](double end) {
                      state_->trace->add({TraceEvent::collective, state_->rank, -1, call_tag.step, bytes,
                                          *start - state_->started, end - state_->started, describe(call_tag)});
                  });
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
    struct Pending {
        CallTag tag;
        cudaEvent_t end;
    };

    // A turn of the rank's thread. Stopped where the communicator has been aborted.
    template <class Call>
    void use(Call&& call) {
        std::unique_lock lock(in_use_, std::defer_lock);
        if (!group_.owns_lock()) lock.lock();
        if (aborted_) throw Stopped(state_->job->reason());
        call();
    }

    // What the time is when the stream gets here; then calls f, which must not call CUDA.
    void note_time(cudaStream_t stream, std::shared_ptr<double> time, std::function<void(double)> f) {
        struct Note {
            std::shared_ptr<double> time;
            std::function<void(double)> f;
        };
        cudaCheck(cudaLaunchHostFunc(
            stream,
            [](void* argument) {
                const std::unique_ptr<Note> note(static_cast<Note*>(argument));
                *note->time = seconds_now();
                if (note->f) note->f(*note->time);
            },
            new Note{std::move(time), std::move(f)}));
    }

    void watch() {
        cudaSetDevice(device_index_);
        double since = seconds_now();  // when the oldest call became the oldest
        double last = since;
        while (!stop_) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            const double now = seconds_now();
            since += std::max(0.0, now - last - kLongestPause);
            last = now;
            const std::lock_guard lock(mutex_);
            while (!pending_.empty() && cudaEventQuery(pending_.front().end) == cudaSuccess) {
                leave(pending_.front().tag);
                cudaEventDestroy(pending_.front().end);
                pending_.pop_front();
                since = seconds_now();
            }
            if (pending_.empty()) since = seconds_now();
            ncclResult_t error = ncclSuccess;
            if (!aborted_) ncclCommGetAsyncError(comm_, &error);
            if (error != ncclSuccess && error != ncclInProgress)
                state_->job->fail(state_->rank,
                                  concat("NCCL: ", ncclGetErrorString(error), ": ", ncclGetLastError(comm_)));
            if (!pending_.empty() && seconds_now() - since > state_->timeout_s())
                state_->job->fail(state_->rank, timeout_report(pending_.front().tag, seconds_now() - since));
            const std::unique_lock turn(in_use_, std::try_to_lock);
            if (turn.owns_lock() && state_->job->failed() && !aborted_) {
                aborted_ = true;
                ncclCommAbort(comm_);
            }
        }
    }

    std::string timeout_report(const CallTag& call, double waited) {
        std::string missing;
        for (int member : members()) {
            Slot* slot = state_->slots[static_cast<size_t>(member)];
            if (!slot || member == state_->rank) continue;
            const SlotCopy at = read_slot(*slot);
            if (at.comm != id() || at.call < call.number)
                missing += concat(missing.empty() ? "; missing: " : ", ", "rank ", member, " (last call: ", at.what,
                                  " at step ", at.step, ")");
        }
        return concat(describe(call), " at step ", call.step, " has waited ", static_cast<int>(waited), " s", missing,
                      ". (--comm-timeout sets how long to wait)");
    }

    ncclComm_t comm_;
    const int device_index_ = device().index;
    std::mutex in_use_;                   // held by who uses comm_
    std::unique_lock<std::mutex> group_;  // of in_use_, between group_start and group_end
    std::mutex mutex_;                    // guards pending_
    std::deque<Pending> pending_;
    std::atomic<bool> stop_{false}, aborted_{false};
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
