// parallel/comm/transport.h: how bytes travel from rank to rank: what comm.cu and the algorithms see of it, and what a
// transport is made of. Used inside parallel/ only, but for --trace: its steps, which training/ checks, and its events,
// which planning/ draws.
//
//     Transport ── HostTransport ── transport_threads.cu     mailboxes in memory
//               │                └─ transport_mpi.cu         MPI
//               ├─ transport_nccl.cu                         NCCL, and its own collectives (on the CPU: cpu/nccl.h)
//               └─ transport_plan.cu                         nothing travels: --plan
#pragma once

#include "parallel/comm/comm.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <set>

// ---------------------------------------------------------------------------------------------------------------------
// The state of a job

// The first failure of any rank in this process. From then on no rank waits for another.
class Job {
  public:
    void fail(int rank, const std::string& text);  // only the first is kept
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    std::string reason() const;                                 // "rank 3: ..."
    std::function<void(const std::string& reason)> on_failure;  // MPI: ends the other processes

  private:
    mutable std::mutex mutex_;
    std::atomic<bool> failed_{false};
    std::string reason_;
};

// Thrown where a rank stops because another one has failed: not a failure of its own.
struct Stopped : Error {
    using Error::Error;
};

// The watchdog asks again and again. Between two questions at most this counts as waiting, in seconds: a process that
// was stopped (Ctrl-Z) and goes on has waited for nobody meanwhile.
constexpr double kLongestPause = 1;
class WaitedTime {
  public:
    // Seconds since the first question: it is asked again and again.
    double seconds() {
        const double now = seconds_now();
        if (last_ > 0) seconds_ += std::min(now - last_, kLongestPause);
        last_ = now;
        return seconds_;
    }

  private:
    double seconds_ = 0, last_ = 0;
};

// Where each rank is, for the watchdog's report: one slot per rank, in memory that all ranks of a machine see.
constexpr size_t kCommsOfRank = 64;  // communicators of a rank at the same time, at most: axes of the mesh, and pairs
struct Slot {
    std::atomic_flag lock;  // spinning: the memory may be shared between processes
    int64_t step;
    double since;   // seconds_now() of the last change; 0: has not called yet
    bool inside;    // has the call begun and not ended?
    char what[64];  // "all_reduce #12 of dp"
    struct Begun {
        uint64_t comm;
        int64_t n;  // collectives; 0: the place is free
    } begun[kCommsOfRank];
};
struct SlotCopy {
    int64_t step;
    double since;
    bool inside;
    std::string what;
};
void write_slot(Slot& slot, const SlotCopy& value);
SlotCopy read_slot(Slot& slot);
// How many collectives of a communicator have begun, by its id.
void note_begun(Slot& slot, uint64_t comm, int64_t n);
int64_t read_begun(Slot& slot, uint64_t comm);

// trace.cu
struct TraceEvent {
    enum Kind { computing, collective, sending, receiving } kind = computing;
    int rank = 0, peer = -1;  // world ranks; peer: of a message
    int64_t step = 0;
    size_t bytes = 0;
    double start = 0, end = 0;  // seconds since the job began
    std::string what;           // "all_reduce #12 of dp", "forward of block 3"
};
class Trace {
  public:
    void add(const TraceEvent& event);
    std::vector<TraceEvent> take();

  private:
    std::mutex mutex_;
    std::vector<TraceEvent> events_;
};
std::string trace_line(const TraceEvent& event);
std::set<int64_t> traced_steps(const std::string& list);                      // "3,4"
void write_trace(const std::string& folder, std::vector<TraceEvent> events);  // trace.json and trace.png
void write_trace_picture(const std::string& path, const std::vector<TraceEvent>& events,
                         int n_ranks);                           // trace_picture.cu
std::string pack_events(const std::vector<TraceEvent>& events);  // to one string, to be sent
std::vector<TraceEvent> unpack_events(const std::string& packed);
// A message: the k-th send from a to b within a call, and the k-th receive there.
struct TracedMessage {
    const TraceEvent *send = nullptr, *recv = nullptr;
};
std::vector<TracedMessage> match_messages(const std::vector<TraceEvent>& events);

// Device memory for the words that hosts send each other (Comm::host_words), of all communicators of a rank. It is
// taken with the first one and freed with the rank's state: cudaMalloc and cudaFree may wait for the device, on which a
// collective of another communicator may be waiting for a rank that is a thread of this process, and cannot launch its
// part while they do.
class WordPool {
  public:
    WordPool() = default;
    WordPool(const WordPool&) = delete;
    ~WordPool();
    void* take();  // kPlaceBytes
    void give_back(void* place);
    static constexpr size_t kPlaceBytes = (Comm::kHostWords + 32) * sizeof(int32_t);

  private:
    char* base_ = nullptr;
    std::set<size_t> taken_;  // numbers of places
};

// What all communicators of one rank share.
struct RankState {
    int rank = 0, size = 1;  // in the world
    RankOptions options;
    std::shared_ptr<Job> job;
    std::vector<int> node;         // world rank -> machine
    std::vector<Slot*> slots;      // world rank -> slot; nullptr: on another machine
    int sharers = 1;               // ranks that take memory from this one's device
    std::shared_ptr<Trace> trace;  // nullptr without --trace
    std::set<int64_t> traced_steps;
    bool tracing = false;  // is the current step one of them?
    TraceEvent computing;  // what the stream computes now; used by its host functions
    double started = 0;    // seconds_now() when all ranks were there
    std::atomic<int64_t> step{0};
    std::atomic<int64_t> bytes_sent{0}, bytes_received{0};
    WordPool words;
    std::function<void()> meet_hosts;  // ranks.cu
    std::atomic<double> patience{1};
    double timeout_s() const { return patience * options.timeout_s; }
};

// ---------------------------------------------------------------------------------------------------------------------
// Transport: the members of one communicator.

// Which call of which communicator an operation belongs to; it travels along into the work that is done later.
struct CallTag {
    const char* what = "";
    int64_t number = 0, step = 0;
    bool traced = false;
};

class NativeCollectives {
  public:
    virtual ~NativeCollectives() = default;
    virtual void all_reduce(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) = 0;
    virtual void reduce_scatter(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream) = 0;
    virtual void all_gather(Tensor out, Tensor inp, cudaStream_t stream) = 0;
    virtual void broadcast(Tensor tensor, int root, cudaStream_t stream) = 0;
    virtual void reduce(Tensor out, Tensor inp, ReduceOp op, int root, cudaStream_t stream) = 0;
};

class Transport {
  public:
    Transport(std::shared_ptr<RankState> state, std::vector<int> members, uint64_t id);
    virtual ~Transport();

    int rank() const { return rank_; }
    int size() const { return static_cast<int>(members_.size()); }
    const std::vector<int>& members() const { return members_; }  // world ranks
    uint64_t id() const { return id_; }                           // the same on all members, and on no other group
    std::string name;                                             // of the communicator
    CallTag tag;                                                  // of the call that is being put on a stream
    std::string describe(const CallTag& tag) const;               // "all_reduce #12 of dp"

    // Put on the stream: bytes of device memory to or from a member. send does not wait for its receiver; within a
    // group NCCL does sends and receives at once, and the others in order: so inside a group all sends come first. With
    // NCCL the host does wait in the first message from one member to another, until the other's host has come to it.
    virtual void send(const void* data, size_t bytes, int to, cudaStream_t stream) = 0;
    virtual void recv(void* data, size_t bytes, int from, cudaStream_t stream) = 0;
    // Does recv return only when its message is there? On the CPU device where streams do their work at once; of a
    // HostTransport also on a GPU.
    virtual bool recv_waits_on_host(cudaStream_t stream) const;
    virtual void group_start() {}
    virtual void group_end() {}
    virtual void begin(cudaStream_t stream) = 0;  // around each call: for the slots and the trace
    virtual void end(cudaStream_t stream, size_t bytes) = 0;

    // Collective over this transport's members.
    virtual std::shared_ptr<Transport> split(const std::vector<int>& members) = 0;

    // Collectives of its own, where the transport is a library that has them.
    virtual NativeCollectives* native() { return nullptr; }
    virtual bool has_native() { return native() != nullptr; }

  protected:
    void enter(const CallTag& tag);  // this rank's slot
    void leave(const CallTag& tag);
    // peer: the other side of a message; -1: all are waited for.
    std::string timeout_report(int peer, const CallTag& tag, double waited);
    virtual int oldest_unsent_to() { return -1; }  // the member for whom the first message in our hands is; -1: none
    uint64_t next_id(const std::vector<int>& members);  // for split(): the same on all members
    std::vector<int> to_world(const std::vector<int>& members) const;

    const std::shared_ptr<RankState> state_;
    const std::vector<int> members_;
    const uint64_t id_;
    int rank_ = 0;
    uint64_t n_splits_ = 0;
};

// Bytes pass through the host. A transport says how a message is posted and how it arrives; this class says when: in
// the stream's order.
//
//   CPU device     device memory is the host's: post and take work on it directly, as functions in the stream. In
//                  strict mode a receive is work that may not run before its message is there, and other streams go on
//                  meanwhile.
//   GPU            through pinned buffers of a fixed size, and the calling thread waits for the stream, then for the
//                  message: with ranks that share a GPU a host function that waits for another rank's host function
//                  would wait for ever, since CUDA may run all of them on one thread. Kernels already on other
//                  streams go on.
class HostTransport : public Transport {
  public:
    using Transport::Transport;
    ~HostTransport() override;
    void send(const void* data, size_t bytes, int to, cudaStream_t stream) override;
    void recv(void* data, size_t bytes, int from, cudaStream_t stream) override;
    bool recv_waits_on_host(cudaStream_t stream) const override;
    void begin(cudaStream_t stream) override;
    void end(cudaStream_t stream, size_t bytes) override;

    // Messages of the host itself, outside of any stream. send_host returns at once; recv_host waits for its message.
    void send_host(const std::string& text, int to);
    std::string recv_host(int from);

  protected:
    // Messages from one rank to another are numbered from 0.
    virtual void post(int to, int64_t number, const void* data,
                      size_t bytes) = 0;                 // returns at once; data may then change
    virtual bool arrived(int from, int64_t number) = 0;  // asked again and again
    virtual size_t arrived_bytes(int from, int64_t number) = 0;
    virtual void take(void* data, int from, int64_t number) = 0;
    virtual bool all_sent() { return true; }  // is nothing of what was posted still in our hands?
    virtual void pause() = 0;                 // between two questions: gives way to others

  private:
    // Runs work on the host when the stream gets there and may_run() holds. The work reads or writes `bytes` of `data`.
    void host_step(cudaStream_t stream, std::function<bool()> may_run, std::function<void()> work,
                   const void* data = nullptr, size_t bytes = 0, bool writes = false);
    // may_run for a message, with the watchdog: true also when the job has failed (and then the work does nothing).
    // Waits for `timeouts` times --comm-timeout.
    std::function<bool()> watched(std::function<bool()> ready, int from, const CallTag& tag, double timeouts = 1);
    void take_checked(void* data, size_t bytes, int from, int64_t number, const CallTag& tag);
    size_t largest_message() const;  // longer ones travel in several
    void* staging(int which);
    void trace_message(const CallTag& tag, int peer, bool sends, size_t bytes, double start);

    std::map<int, int64_t> n_sent_, n_received_;  // by member
    void* staging_[2] = {};  // on a GPU: pinned buffers, one for what is sent and one for what arrives
};

// The transports. Each throws an Error if it is not built in or not available.
class ThreadWorld;  // the mailboxes of n threads
std::shared_ptr<ThreadWorld> make_thread_world(int n);
Slot* thread_slot(ThreadWorld& world, int rank);
std::shared_ptr<HostTransport> make_thread_transport(std::shared_ptr<ThreadWorld> world,
                                                     std::shared_ptr<RankState> state);

bool mpi_is_built_in();
// Starts MPI (once a process) and fills in rank, size, node and slots of the state.
std::shared_ptr<HostTransport> make_mpi_transport(std::shared_ptr<RankState> state);
int mpi_local_rank();
[[noreturn]] void mpi_abort();
void mpi_finish(double timeout_s);  // all ranks have come here and nothing is under way

// A plan's: rank 0 of this many ranks that do not exist. Sends nothing.
std::shared_ptr<Transport> make_plan_transport(std::shared_ptr<RankState> state);

bool nccl_is_built_in();
std::shared_ptr<Transport> make_nccl_transport(std::shared_ptr<RankState> state,
                                               std::shared_ptr<HostTransport> control);

// ---------------------------------------------------------------------------------------------------------------------
// What the algorithms are made of

// Numbers [first, first + n) of a flat tensor.
Tensor part_of(const Tensor& tensor, int64_t first, int64_t n);
// Element range of piece j when n elements are divided into n_pieces: all of the same length, a multiple of 32 so that
// each starts on a boundary that kernels like, but the last ones, which may be shorter, or empty.
Range piece_of(int64_t n, int n_pieces, int j);

void send_tensor(Comm& comm, const Tensor& tensor, int to, cudaStream_t stream);
void recv_tensor(Comm& comm, const Tensor& tensor, int from, cudaStream_t stream);

// reduce.cu. Kernels over flat tensors.
// acc = acc op part;  acc and part are of one dtype, f32 or i32.
void reduce_into(Tensor acc, Tensor part, ReduceOp op, cudaStream_t stream);
// out = (((x_0 op x_1) op x_2) ...), where x_j is row j of parts. For 16 bits the sum is in float32;
// out is of their dtype, or f32.
void reduce_rows(Tensor out, Tensor parts, int n_parts, ReduceOp op, cudaStream_t stream);
// out = inp in another float dtype.
void convert(Tensor out, Tensor inp, cudaStream_t stream);
// Algorithms that send partial results start from here: a tensor of f32 or i32 that holds inp: out itself, or scratch
// slot 1. While memory is counted it holds nothing.
Tensor widened(Comm& comm, Tensor out, Tensor inp, cudaStream_t stream);
// ... and end here: part of out = the same part of sum, rounded to out's dtype.
void narrowed(Tensor out, Tensor sum, Range part, cudaStream_t stream);

// tree_all_reduce.cu
void tree_broadcast(Comm& comm, Tensor tensor, int root, cudaStream_t stream);

// rank_order_all_reduce.cu. `members` are ranks of comm; the first n_owners of them own a piece each of the reduction.
struct Group {
    std::vector<int> members;
    int me, n_owners;
};
// out (my piece; none if I own none) = reduction of that piece over the members, in their order.
void reduce_to_owners(Comm& comm, const Group& group, Tensor out, Tensor inp, ReduceOp op, int slot,
                      cudaStream_t stream);
// On every rank, out = the owners' pieces, which lie in their out already.
void gather_from_owners(Comm& comm, const Group& group, Tensor out, cudaStream_t stream);
