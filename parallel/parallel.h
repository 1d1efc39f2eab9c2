// parallel/parallel.h: many ranks. Who they are, how they talk, how they stand in a grid.
//
// A rank is one of n workers that run the same program on different data; it has a device of its own (core.h: device()). Ranks
// talk in two ways: a message goes from one to another (send, recv); in a collective all of them take part, and the name says
// what each of them has afterwards. Four ranks, three numbers each, and + for the reduction:
//
//     all_reduce      everybody gets the sum                        n-th of it each: reduce_scatter     only root: reduce
//     all_gather      everybody gets everybody's numbers            root's alone: broadcast
//     all_to_all      piece j of rank i becomes piece i of rank j   (a matrix of pieces is transposed)
//
// all_reduce = reduce_scatter + all_gather, and what a rank must at least send for N bytes is
//
//     reduce_scatter, all_gather   (n - 1)/n N                      all_reduce   2 (n - 1)/n N
//
// which no longer grows with n. That is the limit that dev/all_reduce.cu draws.
//
// Files, in reading order:
//     comm.cu                   communicators: the collectives
//     ring_all_reduce.cu        all_reduce written out, four times: ring, tree, halving, two levels; and in rank_order.cu the
//     tree.cu, halving_all_reduce.cu, two_level_all_reduce.cu, rank_order.cu      one whose result does not depend on n's cut
//     reduce.cu                 the additions, as kernels
//     host_messages.cu          what the hosts tell each other
//     mesh.cu                   ranks as a grid of named axes
//     shards.cu                 which rank holds which part of the parameters: plain data parallelism and ZeRO 1, 2, 3
//     data_parallel.cu          when the parts are gathered and reduced
//     compress.cu, power_sgd.cu gradients that travel in fewer bits
//     offload.cu                states, and parts of the weights, in the host's memory
//     ranks.cu                  starts the ranks, chooses the transport, ends the job when one of them fails
//     trace.cu                  --trace: who sent what to whom when, as text, Perfetto trace and PNG
//     transport.h, transport*.cu   how bytes travel: between threads, with MPI, with NCCL
#pragma once

#include "core/core.h"
#include "optim/optim.h"

#include <functional>

class Transport;
struct RankState;
struct CallTag;

// ---------------------------------------------------------------------------------------------------------------------
// comm.cu: communicators

// Sum: 16-bit numbers are added in float32 and rounded once at the end. int32 wraps around. Max: not for NaN.
enum class ReduceOp { sum, max };

// How all_reduce is done (--all-reduce). The order of the additions is part of the contract: it depends on n and on the sizes,
// never on timing, so a run repeats bit for bit.
enum class AllReduce {
    library,    // NCCL's where there is NCCL. Elsewhere rank_order.cu: ((x_0 + x_1) + x_2) + ... for every element
    ring,       // piece j:  ((x_j + x_j+1) + ...) + x_j-1
    tree,       // binomial: (x_0 + x_1) + (x_2 + x_3), ...
    halving,    // pairs at distance n/2, then n/4, ...
    two_level,  // rank order inside each node, then over the nodes
};
AllReduce all_reduce_from_name(const std::string& name);  // "library", "ring", "tree", "halving", "two-level"
const char* all_reduce_name(AllReduce algorithm);

struct Traffic {
    int64_t sent = 0, received = 0;  // bytes
};

// A group of ranks that talk to each other. Every member makes the same calls in the same order; each call is put on a stream,
// like a kernel, and takes place when the stream gets there. Calls of one communicator never overlap, on whatever streams they
// are. (Two communicators do: split() the one for the overlap.)
//
// Tensors lie on the device; out and inp have the same dtype: f32, bf16, f16 or i32. Their shapes do not matter, their n does.
// Sizes may be 0, and differ from rank to rank only where said. out may be inp ("in place"); out and inp must not overlap
// otherwise. All ranks must agree on n and dtype: where messages do not fit, the job ends with both sizes named.
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
    // inp: size equal pieces; out = piece `rank` of the reduction. In place: out is that piece of inp (whose others are lost).
    void reduce_scatter(Tensor out, Tensor inp, ReduceOp op, cudaStream_t stream);
    // out: size equal pieces; piece j = inp of rank j. In place: inp is piece `rank` of out.
    void all_gather(Tensor out, Tensor inp, cudaStream_t stream);
    // The same with pieces of any size: piece j is elements [cuts[j], cuts[j + 1]) of the whole tensor; size + 1 cuts.
    void reduce_scatter(Tensor out, Tensor inp, const std::vector<int64_t>& cuts, ReduceOp op, cudaStream_t stream);
    void all_gather(Tensor out, Tensor inp, const std::vector<int64_t>& cuts, cudaStream_t stream);
    // Piece j of out = piece `rank` of rank j's inp.
    void all_to_all(Tensor out, Tensor inp, cudaStream_t stream);
    // tensor = root's.
    void broadcast(Tensor tensor, int root, cudaStream_t stream);
    // Root's out = the reduction; the others' out is untouched, and may be no tensor.
    void reduce(Tensor out, Tensor inp, ReduceOp op, int root, cudaStream_t stream);
    // A message: matched by order between each two ranks. send() does not wait for its receiver, except under NCCL, where
    // messages that cross (I send to you, you send to me) go between group_start() and group_end().
    void send(Tensor tensor, int to, cudaStream_t stream);
    void recv(Tensor tensor, int from, cudaStream_t stream);
    void group_start();
    void group_end();
    // Work that is put on the stream after it begins when every rank's stream has come here.
    void barrier(cudaStream_t stream);

    // A communicator of some of the ranks, in this order; `members` are ranks of this one, and this rank is among them.
    // Collective: every rank calls it at the same time, each with the group that it will be in.
    std::unique_ptr<Comm> split(const std::vector<int>& members, const std::string& name);

    // The step that is going on: for traces and error messages, of this rank's communicators together.
    void set_step(int64_t step);
    // Rank of this communicator -> the machine that it runs on, counted from 0.
    int node_of(int member) const;
    // Bytes that this rank has sent and received so far, through all its communicators.
    Traffic traffic() const;
    // Device memory for pieces under way; grows at the first call of each size. For the memory plan.
    size_t workspace_bytes() const;

    // For the algorithms (transport.h says what they use).
    Transport& transport() { return *transport_; }
    RankState& state() { return *state_; }
    // Memory on the device, one buffer per slot 0 to 2, for this call only.
    Tensor scratch(int slot, DType dtype, int64_t n);

  private:
    template <class Body>
    void call(const CallTag& tag, size_t bytes, cudaStream_t stream, Body&& body);
    template <class Body>
    void collective(const char* what, size_t bytes, cudaStream_t stream, Body&& body);
    std::vector<int64_t> equal_cuts(int64_t n) const;
    void count_native(size_t piece_bytes);

    std::shared_ptr<RankState> state_;
    std::shared_ptr<Transport> transport_;
    struct Buffer {
        void* data = nullptr;
        size_t bytes = 0;
    } scratch_[3];
    cudaStream_t last_stream_ = nullptr;
    cudaEvent_t last_call_ = nullptr;
    int64_t n_calls_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// The all_reduce algorithms by themselves. Bytes sent by the busiest rank, and messages one after the other, for N bytes (of
// the type that travels: 16-bit sums travel as float32 except in rank order) and n ranks:
//
//     rank order   2 (n-1)/n N     2             all at once: short for small n; bit-equal to the serial sum, and to
//                                                reduce_scatter
//     ring         2 (n-1)/n N     2 (n-1)       only neighbours talk: every link is busy all the time
//     tree         2 N .. 2 log n N  2 log2 n    few messages: short tensors
//     halving      2 (n-1)/n N     2 log2 n      both, where n is a power of two
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
    std::string name;  // "dp", "pp", "tp", "cp", "ep"
    int size;
};

// rank = ((i_0 size_1 + i_1) size_2 + i_2) ...: the last axis counts fastest, so that its ranks are neighbours, most likely in
// one machine. The axis that talks most goes last: {dp, pp, cp, tp}.
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
// shards.cu: which rank holds which part of the parameters
//
// A unit is what is gathered, reduced and updated together: the embedding, a block, the head. Its parameters lie side by side.
// It is cut into one part a rank, and what is cut along those lines is the stage:
//
//                weights   gradients   optimizer states, masters     bytes a rank, mixed precision, AdamW, n ranks
//     ddp        whole     whole       whole                         (2 + 2 + 12) P
//     naive      whole     whole       all with rank 0               rank 0: 16 P, the others 4 P
//     zero 1     whole     whole       cut                           (2 + 2 + 12/n) P
//     zero 2     whole     cut         cut                           (2 + (2 + 12)/n) P
//     zero 3     cut       cut         cut                           (2 + 2 + 12)/n P          (Rajbhandari et al. 2020,
//                                                                                               arXiv:1910.02054)
// Where weights or gradients are cut, the layers still want them whole: there are rooms for whole units, two for the blocks,
// which take turns, and those of the embedding and the head.

struct Range {
    int64_t first, n;
};
struct Unit {
    std::string name;
    int64_t offset = 0, n = 0;  // in the flat arrays
    // Rank r's part is elements [cuts[r], cuts[r + 1]) of the unit.
    std::vector<int64_t> cuts = {};
    int64_t packed = 0;  // where this rank's part begins in an array of its parts only
    int room = 0;
};

// What lies in the host's memory (offload.cu).
enum class Offload { none, optimizer, params, unified };
Offload offload_from_name(const std::string& name);  // "none", "optimizer", "params", "unified"

struct Sharding {
    int rank = 0, size = 1;
    int zero = 0;
    bool naive = false;
    Offload offload = Offload::none;
    // Cuts lie at multiples of so many elements of a parameter (optimizer_granularity); 0: only between parameters.
    int64_t granularity = 1024;

    bool cuts_states() const { return zero >= 1 || naive; }
    bool cuts_grads() const { return zero >= 2; }
    bool cuts_values() const { return zero >= 3; }
    bool host_updates() const { return offload == Offload::optimizer || offload == Offload::params; }
};

// The memory of the parameters on this rank.
struct FlatParameters {
    Sharding sharding;
    std::vector<Unit> units;    // in the order of the forward
    std::vector<Param> params;  // by Hugging Face name, in the order of their places
    int64_t n = 0;              // elements of all units
    int64_t part_n = 0;         // of this rank's parts, packed
    // Flat arrays of all n elements with a place for each parameter; or, where the stage cuts them, of this rank's parts.
    Tensor values, grads, masters;  // masters: f32, in mixed precision, and where only the host's weights are updated
    std::vector<Tensor> value_rooms, grad_rooms;

    // Decides the cuts and the rooms, from params and units. tied: the embedding is in use until the head is.
    void cut(const Sharding& sharding, bool tied);
    // Takes the memory. The masters' arena is that of what lies on the host, if something does.
    void take(DType dtype, DType grad_dtype, bool with_masters, Arena& values, Arena& grads, Arena& masters);

    // A unit as the layers see it: in the flat array or in its room.
    Tensor unit_values(size_t unit) const;
    Tensor unit_grads(size_t unit) const;
    Tensor unit_masters(size_t unit) const;  // none if they are cut
    // This rank's part of a unit, in whatever array has it.
    Range part(size_t unit) const;
    Tensor part_of_values(size_t unit) const;
    Tensor part_of_grads(size_t unit) const;
    Tensor part_of_masters(size_t unit) const;
    // What this rank's optimizer updates of a unit: its part, or all of it where the states are not cut. The offsets of the
    // parameters, whole ones and pieces, count from there.
    Range updated(size_t unit) const;
    Tensor updated_grads(size_t unit) const;
    Weights updated_weights(size_t unit, uint64_t seed) const;  // seed: of stochastic rounding, for 16 bits without masters
    std::vector<Param> updated_params(size_t unit) const;

    size_t unit_of(const Param& param) const;
    // Writes a parameter's rows, of which each rank knows all (without the padding): those that it holds, rounded.
    void write(const Param& param, const std::vector<float>& rows) const;

  private:
    Tensor slice(const Tensor& array, bool is_cut, size_t unit, Range range) const;
};

// ---------------------------------------------------------------------------------------------------------------------
// compress.cu, power_sgd.cu: gradients that travel in fewer bits, for ddp. Sums are in float32. Bytes that one of n ranks sends
// for R x C gradients:
//
//     none        (n-1)/n of 2 x  4 R C
//     bf16                    2 x  2 R C
//     fp8                     2 x  (1 + 4/1024) R C       errors are kept and added to the next step's gradients
//     1bit                    2 x  (1/8 + 4/1024) R C     the same
//     powersgd                2 x  4 r (R + C)            the same; r = --compress-rank

enum class Compression { none, bf16, fp8, power_sgd, one_bit };
Compression compression_from_name(const std::string& name);  // "none", "bf16", "fp8", "powersgd", "1bit"

struct CompressOptions {
    Compression kind = Compression::none;
    int64_t rank = 4;  // powersgd
};

class Compressor {
  public:
    virtual ~Compressor() = default;
    // For p.sharding.size ranks. Once the arena is reserved: the errors begin as 0.
    virtual void take_memory(const FlatParameters& p, Arena& arena) = 0;
    // The unit's gradients (f32) = the sum over the ranks of what they sent: the same bits everywhere.
    virtual void reduce(const FlatParameters& p, size_t unit, cudaStream_t stream) = 0;
    // What the next step needs from this one, by name; different on every rank.
    virtual std::vector<std::pair<std::string, Tensor>> states() const = 0;
};
std::unique_ptr<Compressor> make_compressor(Comm& comm, const CompressOptions& options);  // none: nullptr

// ---------------------------------------------------------------------------------------------------------------------
// data_parallel.cu: every rank has a part of the batch; their gradients are added.
//
//     ddp     the gradients are summed in buckets, last layers first, on a stream of their own while the backward goes on
//     naive   rank 0 gets the sum, updates, and sends the new weights to everybody: the old DataParallel, here to show why not
//     zero 1  each rank gets the sum of its part of each unit, updates that, and everybody gathers the new weights
//     zero 2  the same, after each micro-batch; a unit's gradients are forgotten as soon as they are reduced
//     zero 3  weights, too, are gathered for as long as a unit needs them: before its forward and before its backward;
//             the next unit's while this one computes
//
// A rank sends (n-1)/n of:  2 P with ddp, zero 1 and zero 2 (a micro-batch more with zero 2: P each), 3 P with zero 3.
// ddp and the three stages give the same bits, as long as a step is one micro-batch a rank and sums are in rank order. (With more
// of them zero 2 and 3 add up the ranks before the micro-batches; naive adds up the norm in another order.)

struct DataParallelOptions {
    bool naive = false;
    int zero = 0;
    double bucket_mib = 25;  // ddp
    CompressOptions compress = {};  // ddp: a unit at a time, instead of buckets
};

// Seconds of a step: in collectives, and those of them that the computing stream spent waiting.
struct CommTime {
    double total = 0, exposed = 0;
};

class DataParallel {
  public:
    DataParallel(Comm& comm, const DataParallelOptions& options);
    ~DataParallel();
    DataParallel(const DataParallel&) = delete;
    DataParallel& operator=(const DataParallel&) = delete;

    Comm& comm() { return comm_; }
    Sharding sharding(int64_t granularity) const;
    // micro_batches: of a step on this rank.
    void take_memory(const FlatParameters& p, int64_t micro_batches, Arena& arena);

    // Before a unit's weights are read: after this call the stream has them whole. `next` (or -1) is the unit that will be asked
    // for next: it is fetched meanwhile.
    void gather(const FlatParameters& p, size_t unit, int64_t next, cudaStream_t stream);

    // Before each micro-batch's backward; before the first kernel that adds to a unit's gradients; after the last one.
    void begin_backward(const FlatParameters& p, int64_t micro_batch, cudaStream_t stream);
    void begin_grads(const FlatParameters& p, size_t unit, cudaStream_t stream);
    void end_grads(const FlatParameters& p, size_t unit, cudaStream_t stream);
    // After the last backward: the stream waits for all sums.
    void finish_grads(cudaStream_t stream);
    // After the update of this rank's part of a unit.
    void share_update(const FlatParameters& p, size_t unit, cudaStream_t stream);

    // If set: called in each step, once for every unit, last ones first, when its gradients are final: when this stream has done
    // what it has been given so far. (offload.cu)
    std::function<void(size_t unit, cudaStream_t stream)> grads_are_final;

    // The norm's sums, the loss and the like: small tensors of f32, added up.
    void add_up(Tensor tensor, cudaStream_t stream);
    // Of what was done since start_clock(). Waits for the streams.
    void start_clock() { busy_.n = waiting_.n = 0; }
    CommTime read_clock();

    // The most precise values of a parameter, on rank 0, without padding. Collective if they are cut.
    std::vector<float> read(const FlatParameters& p, const Param& param);
    // What --compress keeps on this rank between steps; empty without, and where there is one rank only.
    std::vector<std::pair<std::string, Tensor>> compression_states() const;

  private:
    void fetch(const FlatParameters& p, size_t unit, cudaStream_t stream);
    void reduce_buckets(const FlatParameters& p, int64_t low, bool all, cudaStream_t stream);
    void announce(const FlatParameters& p, int64_t first, cudaStream_t stream);
    void reduce_unit(const FlatParameters& p, size_t unit, cudaStream_t stream);
    // A collective on comm_stream_, when `stream` has come here.
    template <class Call>
    void communicate(cudaStream_t stream, Call&& call);
    void wait(cudaStream_t stream, cudaEvent_t event);
    // Pairs of events around what is timed; used again each step.
    struct Stopwatch {
        std::vector<std::pair<cudaEvent_t, cudaEvent_t>> laps;
        size_t n = 0;
        void start(cudaStream_t stream);
        void stop(cudaStream_t stream);
        double seconds() const;
        ~Stopwatch();
    };

    Comm& comm_;
    const DataParallelOptions options_;
    std::unique_ptr<Compressor> compressor_;     // nullptr without --compress
    cudaStream_t comm_stream_ = nullptr;
    cudaEvent_t reached_ = nullptr;              // a point of a stream that the other one waits for
    Stopwatch busy_, waiting_;                   // of comm_stream_ with collectives; of the computing stream for them
    std::vector<cudaEvent_t> gathered_;          // by unit: its weights are there
    std::vector<cudaEvent_t> reduced_;           // by room: its gradients have been read
    std::vector<int64_t> in_room_;               // room -> unit whose weights it holds, or -1
    int64_t micro_batches_ = 1, micro_batch_ = 0;
    int64_t bucket_end_ = 0;                     // gradients from here on have been given to a bucket
    size_t not_final_ = 0;                       // units 0 to here - 1 have gradients that are not final
    Tensor sum_rows_;                            // zero 2 and 3 with several micro-batches: (2, largest part)
    Tensor staging_;
};

// ---------------------------------------------------------------------------------------------------------------------
// offload.cu: the host has ten times the device's memory, behind a bus of a fiftieth of its bandwidth. What is used once a step
// moves there.                                               (ZeRO-Offload: arXiv:2101.06840; ZeRO-Infinity: arXiv:2104.07857)
//
//     --offload    on the device                        on the host                       updates   crosses the bus in a step
//     none         weights, gradients, masters, m, v                                      device
//     optimizer    weights, gradients                   masters, m, v (pinned)            host      gradients, new weights
//     params       rooms for units, gradients           the same, and parts of weights    host      gradients, weights twice
//     unified      weights, gradients                   masters, m, v (pages that move)   device    those, both ways
//
// Each rank does so with what it updates: its parts, where ZeRO cuts them; params needs ZeRO 3 (on one rank, too: then a unit
// comes to the device for its forward and for its backward). A host update needs masters of its own: in float32 those are
// host copies of the weights, from which the device's are written.

class OffloadedUpdate {
  public:
    // optimizers: one a unit; on the host (make_host_optimizer), but for unified. norm_first: an update must wait for the norm of
    // all gradients, because it clips, or because fp16 may have overflowed. Otherwise it begins as soon as its unit's are final.
    OffloadedUpdate(const FlatParameters& p, const std::vector<std::unique_ptr<Optimizer>>& optimizers, bool norm_first);
    ~OffloadedUpdate();
    OffloadedUpdate(const OffloadedUpdate&) = delete;
    OffloadedUpdate& operator=(const OffloadedUpdate&) = delete;

    // Pinned memory for what crosses the bus; after p and the optimizers have theirs.
    void take_memory(Arena& pinned);
    // Before a step's backward: what its updates will need. The last step must be over. unscale: 1 / loss scale.
    void begin_step(double lr, int64_t t, float unscale, uint64_t seed);
    void grads_are_final(size_t unit, cudaStream_t stream);  // DataParallel's call
    // For unit 0, 1, ...: after this call the stream has this rank's part of its new weights. norm_scale: grad_norm's result.
    void update(size_t unit, Tensor norm_scale, cudaStream_t stream);

  private:
    void update_on_host(size_t unit);
    void update_on_device(size_t unit, Tensor norm_scale, cudaStream_t stream);
    std::vector<Tensor> pages(size_t unit) const;
    void move_pages(size_t unit, bool to_device, cudaStream_t stream);
    // `later` goes on when `earlier` has come here.
    void after(cudaStream_t later, cudaStream_t earlier);

    const FlatParameters& p_;
    const std::vector<std::unique_ptr<Optimizer>>& optimizers_;
    const bool norm_first_;
    cudaStream_t to_host_ = nullptr, host_ = nullptr, to_device_ = nullptr;
    cudaEvent_t reached_ = nullptr;
    std::vector<cudaEvent_t> arrived_;  // by unit: its gradients on the host; unified: its pages on the device
    std::vector<cudaEvent_t> done_;     // by unit: its new weights on the device; unified: its pages on the host again
    std::vector<Tensor> host_grads_, host_copies_;  // by unit; copies: new 16-bit weights
    Tensor host_norm_;                  // {norm, scale}
    double lr_ = 0;
    int64_t t_ = 1;
    uint64_t seed_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// ranks.cu: starts the ranks and ends them

struct RankOptions {
    int ranks = 0;                    // --ranks: that many threads; 0: as many as mpirun started, otherwise one
    std::string comm = "auto";        // --comm: auto, threads, mpi, nccl
    std::string all_reduce = "library";  // --all-reduce
    double timeout_s = 120;           // --comm-timeout: a rank that waits longer for another one ends the job
    int ranks_per_node = 0;           // threads only: pretend that so many share a machine (for two-level); 0: all
    bool trace = false;               // --trace: print, and write trace.json and trace.png
    std::string trace_folder = ".";
    bool quiet = false;               // do not print what was chosen
};

// Runs f on every rank, and returns when all have ended. Call it once, from main, with all the work inside f; as threads
// several times.
//
//   - Under mpirun each process is one rank. Otherwise --ranks threads of this process are, each with its own device: on the
//     CPU as many as there are ranks, each with its share of the cores; GPUs are shared if there are fewer.
//   - NCCL carries the bytes if every rank has a GPU of its own; otherwise memory between threads, MPI between processes.
//     What was chosen and why is printed by rank 0.
//   - A rank's exception ends the job: the others stop at their next wait, and the Error thrown here is "rank 3: " and its
//     text. Under mpirun the line is printed and MPI ends the other processes; exit status 2.
//   - A rank that waits for longer than timeout_s ends the job, with what it waits for, and who is missing since when.
void run_ranks(const RankOptions& options, const std::function<void(Comm& world)>& f);
bool started_by_mpirun();  // is this process one of several that mpirun started?
int rank_count(const RankOptions& options);  // how many there will be
// True in the one process that should print and write files, also before run_ranks.
bool is_first_process();
