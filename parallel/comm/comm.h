// parallel/comm/comm.h: ranks, and how they talk to each other.
//
// A rank is one of n workers that run the same program on different data; it has a device (core.h: device()), which it
// shares where there are more ranks than GPUs. Ranks talk in two ways: a message goes from one to another (send, recv);
// in a collective all of them take part, and the name says what each of them has afterwards. In some of them one rank,
// the root, is the one that gives or gets:
//
//     all_reduce       every rank gets the sum of all ranks' numbers
//     reduce_scatter   every rank gets an n-th of that sum
//     reduce           the root gets that sum
//     all_gather       every rank gets the numbers of all ranks
//     broadcast        every rank gets the root's numbers
//     all_to_all       piece j of rank i becomes piece i of rank j (a matrix of pieces is transposed)
//     shift            every rank gets the numbers of the rank before it
//
// all_reduce = reduce_scatter + all_gather. For N bytes the rank that sends most must send at least
//
//     reduce_scatter, all_gather   (n - 1)/n N                      all_reduce   2 (n - 1)/n N
//
// which approaches a constant as n grows. That is the limit that dev/all_reduce.cu draws.
//
// Files, in reading order:
//     comm.cu                    communicators: the collectives
//     ring_all_reduce.cu         all_reduce written out: the ring, and the other algorithms in
//     tree_all_reduce.cu, halving_all_reduce.cu, two_level_all_reduce.cu, rank_order_all_reduce.cu
//     reduce.cu                  the additions, as kernels
//     host_messages.cu           what the hosts tell each other
//     mesh.cu                    ranks as a grid of named axes
//     ranks.cu                   starts the ranks, chooses the transport, ends the job when one of them fails
//     trace.cu                   --trace: who computed what, and sent what to whom, when: as text and for Perfetto
//     trace_picture.cu           the same as a picture
//     transport.h, transport*.cu how bytes travel: between threads, with MPI, with NCCL
#pragma once

#include "core/core.h"

#include <functional>
#include <memory>

class Transport;
struct RankState;
struct CallTag;
struct TraceEvent;

// ---------------------------------------------------------------------------------------------------------------------
// comm.cu: communicators

// Sum: 16-bit numbers are added in float32 and rounded once at the end. int32 wraps around. Max: not for NaN.
enum class ReduceOp { sum, max };

// How all_reduce is done (--all-reduce). The order of the additions is part of the contract: it depends on n and on the
// sizes, never on timing, so a run repeats bit for bit.
enum class AllReduce {
    library,    // NCCL's where there is NCCL. Elsewhere rank order: ((x_0 + x_1) + x_2) + ... for every element
    ring,       // piece j:  ((x_j + x_j+1) + ...) + x_j-1
    tree,       // binomial: (x_0 + x_1) + (x_2 + x_3), ...
    halving,    // pairs at distance n/2, then n/4, ...
    two_level,  // rank order inside each node, then over the nodes
};
const std::vector<AllReduce>& all_reduce_algorithms();
std::vector<std::string> all_reduce_names();
AllReduce all_reduce_from_name(const std::string& name);
const char* all_reduce_name(AllReduce algorithm);

// Elements [first, first + n).
struct Range {
    int64_t first, n;
};

struct Traffic {
    int64_t sent = 0, received = 0;  // bytes
};

// A group of ranks that talk to each other. Every member makes the same calls in the same order; each call is put on a
// stream, like a kernel, and takes place when the stream gets there. Calls of one communicator never overlap, on
// whatever streams they are. (Those of two communicators may: split() makes a second one.)
//
// Tensors lie on the device; out and inp have the same dtype: f32, bf16, f16 or i32. Their shapes do not matter, their
// n does. Sizes may be 0, and differ from rank to rank only where said. out may be inp ("in place"); out and inp must
// not overlap otherwise. All ranks must agree on n and dtype: where messages do not fit, the job ends with both sizes
// named. Only NCCL does not compare them.
class Comm {
  public:
    int rank = 0, size = 1;  // in this communicator
    std::string name;        // "world", "dp", ...
    AllReduce algorithm = AllReduce::library;

    Comm(std::string name, std::shared_ptr<RankState> state, std::shared_ptr<Transport> transport);
    ~Comm();
    Comm(const Comm&) = delete;
    Comm& operator=(const Comm&) = delete;

    // out = sum or max over ranks of inp.
    void all_reduce(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream);
    void all_reduce(Tensor tensor, cudaStream_t stream) { all_reduce(tensor, tensor, ReduceOp::sum, stream); }
    // Does all_reduce add in the order of the ranks? Then an element's sum does not depend on its place in the tensor.
    bool adds_in_rank_order() const;
    // inp: size equal pieces; out = piece `rank` of the reduction. In place: out is that piece of inp
    // (whose other pieces may be overwritten).
    void reduce_scatter(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream);
    // out: size equal pieces; piece j = inp of rank j. In place: inp is piece `rank` of out.
    void all_gather(Tensor out, Tensor inp, cudaStream_t stream);
    // The same with pieces of any size: piece j is elements [bounds[j], bounds[j + 1]) of the whole tensor;
    // size + 1 bounds.
    void reduce_scatter(Tensor out, Tensor inp, const std::vector<int64_t>& bounds, ReduceOp op, cudaStream_t stream);
    void all_gather(Tensor out, Tensor inp, const std::vector<int64_t>& bounds, cudaStream_t stream);
    // Piece j of out = piece `rank` of rank j's inp.
    void all_to_all(Tensor out, Tensor inp, cudaStream_t stream);
    // A ring: out = inp of the rank before this one (the last one's for rank 0). out is not inp.
    void shift(Tensor out, Tensor inp, cudaStream_t stream);
    // tensor = root's.
    void broadcast(Tensor tensor, int root, cudaStream_t stream);
    // Root's out = the reduction; the others' out is untouched, and may be no tensor.
    void reduce(Tensor out, Tensor inp, ReduceOp op, int root, cudaStream_t stream);
    // A message: matched by order between each two ranks. send() does not wait for its receiver, except under NCCL,
    // where messages that cross (I send to you, you send to me) go between group_start() and group_end().
    void send(Tensor tensor, int to, cudaStream_t stream);
    void recv(Tensor tensor, int from, cudaStream_t stream);
    // Does recv() return only when its message is there? On a GPU where messages pass through the host's memory, and on
    // the CPU device where streams do their work at once.
    bool recv_waits_on_host(cudaStream_t stream) const;
    void group_start();
    void group_end();
    // Work that is put on the stream after it begins when every rank's stream has come here.
    void barrier(cudaStream_t stream);
    // Returns when every rank's host has called this, of whatever communicator; no device takes part. Called after
    // memory has been taken: with NCCL, cudaMalloc in one thread may wait for a collective on another thread's GPU,
    // which waits for the first thread.
    void meet_hosts();
    // work(), and then meet_hosts(); until then this rank waits 30 times --comm-timeout for others. For what may
    // take one rank long and the others not: reading or writing a model on a slow disk.
    void patiently(const std::function<void()>& work);

    // Is it a plan's (RankOptions::planning)? It has a size, and sends nothing.
    bool is_plan() const;

    // A communicator of some of the ranks, in this order; `members` are ranks of this one, and this rank is among them.
    // Collective: every rank calls it at the same time, each with the group that it will be in. `placed_like`, of as
    // many ranks, are those whose machines node_of() gives for the members; none: their own.
    std::unique_ptr<Comm> split(const std::vector<int>& members, const std::string& name,
                                const std::vector<int>& placed_like = {});

    // The step that is going on: for traces and error messages, of this rank's communicators together.
    void set_step(int64_t step);
    // What comes now (evaluation, samples, checkpoints) is no part of the step, and of no trace.
    void end_step();
    // For the trace: from here on the stream computes `what`; "": nothing.
    void trace_computing(const std::string& what, cudaStream_t stream);
    // Rank of this communicator -> the machine that it counts as a part of, from 0: along an axis of a mesh that of the
    // first such group's rank (mesh.cu), otherwise the one that it runs on.
    int node_of(int member) const;
    // How many ranks, with this one, take memory from this rank's device: on a CPU all of its machine.
    int sharers_of_device() const;
    // Bytes that this rank has sent and received so far, through all its communicators. NCCL's own collectives count as
    // those of a ring, and their sums of 16-bit numbers, which travel in float32, as 16 bits.
    Traffic traffic() const;

    // Device memory for pieces on their way. It is counted before the first call, and taken once:
    //     count_memory(calls)    `calls` makes the collective calls of a run, each with the largest sizes; they only
    //                            note what they need. Nothing is sent, and their tensors need no data. Any number of
    //                            times.
    //     take_memory(arena)     takes the largest need, while the arena counts and when it is reserved
    // A call that needs more than was counted is an Error.
    void count_memory(const std::function<void()>& calls);
    void take_memory(Arena& arena);

    // For the algorithms (transport.h says what they use).
    Transport& transport() { return *transport_; }
    RankState& state() { return *state_; }
    // Is this call only counted? Then it returns as soon as it has asked for its scratch memory.
    bool counting() const { return counting_; }
    // Memory on the device, one buffer per slot 0 to 2, for this call only. What is counted for a tensor must be enough
    // for every smaller one, of which this rank may have a longer piece: so ask for the longest piece of all ranks,
    // piece_of(n, size, 0).
    Tensor scratch(int slot, DType dtype, int64_t n);
    // A fixed buffer of this many i32, taken with the communicator: what the hosts tell each other (host_messages.cu).
    static constexpr int64_t kHostWords = 4096;
    Tensor host_words() const { return make_tensor(words_, DType::i32, {kHostWords}); }

  private:
    template <class Body>
    void call(const CallTag& tag, size_t bytes, cudaStream_t stream, Body&& body);
    template <class Body>
    void collective(const char* what, size_t bytes, cudaStream_t stream, Body&& body);
    std::vector<int64_t> equal_bounds(int64_t n) const;
    template <class Call>
    void native_reduce(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream, Call&& call);
    void copy_own(Tensor out, Tensor inp, cudaStream_t stream) const;
    void note_native_traffic(size_t piece_bytes);

    std::shared_ptr<RankState> state_;
    std::shared_ptr<Transport> transport_;
    struct Scratch {
        Tensor words;          // i32
        int64_t n_needed = 0;  // words that the counted calls need
    } scratch_[3];
    bool counting_ = false;
    std::vector<int> nodes_;  // of the members
    void* words_ = nullptr;   // host_words(), and two more for barrier()
    cudaStream_t last_stream_ = nullptr;
    cudaEvent_t last_call_ = nullptr;
    int64_t n_calls_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// The all_reduce algorithms by themselves. Bytes sent by the busiest rank, and messages one after the other, for N
// bytes (of the type that travels: partial sums of 16-bit numbers travel as float32) and n ranks:
//
//     rank order   2 (n-1)/n N     2             all at once: short for small n; bit-equal to the serial sum, and to
//                                                reduce_scatter
//     ring         2 (n-1)/n N     2 (n-1)       only neighbours talk: every link is busy all the time
//     tree         log2 n N        2 log2 n      few messages: short tensors
//     halving      2 (n-1)/n N     2 log2 n      few bytes and few messages, where n is a power of two
//     two-level    see there                     little between nodes

void rank_order_all_reduce(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream);
void ring_all_reduce(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream);
void tree_all_reduce(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream);
void halving_all_reduce(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream);
void two_level_all_reduce(Comm& comm, Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------------------
// host_messages.cu: what the ranks' hosts tell each other at the start and the end of a run. Collective; they wait.

std::string broadcast_text(Comm& comm, const std::string& text);  // rank 0's
// Row r: the numbers of rank r. All give equally many.
std::vector<std::vector<int64_t>> gather_numbers(Comm& comm, const std::vector<int64_t>& numbers);
// Error on a rank where something differs from what rank 0 has: things that have to be the same, as name -> value.
void check_same_everywhere(Comm& comm, const std::vector<std::pair<std::string, std::string>>& things);

// ---------------------------------------------------------------------------------------------------------------------
// mesh.cu: ranks as a grid of named axes

struct Axis {
    std::string name;  // "dp", "pp", "cp", "tp"
    int size;
};

// rank = ((i_0 size_1 + i_1) size_2 + i_2) ...: the last axis counts fastest, so that its ranks are neighbours, most
// likely in one machine. The axis that talks most goes last: {dp, pp, cp, tp}.
class Mesh {
  public:
    // Collective. The sizes' product is world.size; axes of size 1 are welcome.
    Mesh(Comm& world, std::vector<Axis> axes);
    Comm& world() { return world_; }
    Comm& comm(const std::string& axis);  // the ranks that differ from this one along that axis only
    int index(const std::string& axis) const;
    int size(const std::string& axis) const;
    const std::vector<Axis>& axes() const { return axes_; }
    int rank_at(const std::vector<int>& indices) const;
    std::vector<int> indices_of(int rank) const;
    // Collective: a communicator along several axes at once, {"dp", "cp"}.
    std::unique_ptr<Comm> make_comm(const std::vector<std::string>& along);
    std::string picture() const;  // the grid with every rank's number, for the start of the log

  private:
    size_t find(const std::string& axis) const;
    Comm& world_;
    std::vector<Axis> axes_;
    std::vector<int> indices_;  // this rank's
    std::vector<std::unique_ptr<Comm>> comms_;
};

// ---------------------------------------------------------------------------------------------------------------------
// ranks.cu: starts the ranks and ends them

struct RankOptions {
    int ranks = 0;                       // --ranks: that many threads; 0: as many as mpirun started, otherwise one
    std::string comm = "auto";           // --comm: auto, threads, mpi, nccl (on the CPU device for threads)
    std::string all_reduce = "library";  // --all-reduce
    double timeout_s = 120;              // --comm-timeout: a rank that waits longer for another one ends the job
    int ranks_per_node = 0;              // threads only: pretend that this many share a machine (for two-level); 0: all
    std::string trace;                   // --trace 3,4: print these steps, and write trace.json and trace.png
    std::string trace_folder = ".";
    // Called when the trace has been written, in the process that wrote it: with all of its events.
    std::function<void(const std::vector<TraceEvent>& events)> after_trace = {};
    bool quiet = false;     // do not print what was chosen
    bool planning = false;  // run f once, as rank 0 of this many ranks that do not exist: it may count, but not send
};

// Runs f on every rank, and returns when all have ended. Call it once, from main, with all the work inside f. (Where
// ranks are threads it may be called again when it has returned.)
//
//   - Under mpirun each process is one rank. Otherwise --ranks threads of this process are, each with its own device:
//     on the CPU as many as there are ranks, each with its share of the cores; GPUs are shared if there are fewer.
//   - NCCL carries the bytes if every rank has a GPU of its own, or if the CPU device's is asked for; otherwise memory
//     between threads, MPI between processes. What was chosen and why is printed by rank 0.
//   - A rank's exception ends the job: the others stop at their next wait, and the Error thrown here is "rank 3: " and
//     its text. Under mpirun the line is printed and MPI ends the other processes; exit status 2.
//   - A rank that waits for longer than timeout_s ends the job, with what it waits for, and who is missing since when.
void run_ranks(const RankOptions& options, const std::function<void(Comm& world)>& f);
// How many ranks a run can have, and a plan that starts none of them.
constexpr int kMostRanks = 1024, kMostPlannedRanks = 1 << 16;
// Error for options that run_ranks cannot follow, before it has begun: so that a program can say it in one line, and
// not each process for itself.
void check_rank_options(const RankOptions& options);
bool started_by_mpirun();                    // is this process one of several that mpirun started?
int rank_count(const RankOptions& options);  // how many there will be
// True in the one process that should print and write files, also before run_ranks.
bool is_first_process();
