// parallel/data/data.h: data parallelism: every rank trains on its share of the batch. Which rank holds which shard of
// the parameters, when weights are gathered and gradients reduced, in how many bits they travel,
// and what lies in the host's memory.
//
// It knows parameters as flat arrays of units, and nothing of the model: so the model,
// which is made of such arrays, includes it.
//
// Files, in reading order:
//     shards.cu                   which rank holds which shard of the parameters
//     naive.cu                    the simplest scheme: rank 0 has the optimizer
//     ddp.cu                      every rank has the optimizer; gradients are summed in buckets, during the backward
//     zero.cu                     ZeRO 1, 2, 3: states, then gradients, then weights are sharded
//     data_parallel.cu            what the schemes share: the stream of the collectives, its clock, checkpoints
//     compress.cu, power_sgd.cu   gradients that travel in fewer bits
//     offload.cu                  states, and shards of the weights, in the host's memory
#pragma once

#include "optim/optim.h"
#include "parallel/comm/comm.h"
#include "parallel/tensor/tensor.h"

#include <functional>

// ---------------------------------------------------------------------------------------------------------------------
// shards.cu: which rank holds which shard of the parameters
//
// A unit is what is gathered, reduced and updated together: the embedding, a block, the head. Its parameters lie side
// by side. It is divided into one shard per rank; the stage says which arrays are stored as shards only:
//
//                weights   gradients   optimizer states, masters     bytes a rank, mixed precision, AdamW, n ranks
//     ddp        whole     whole       whole                         (2 + 2 + 12) P
//     naive      whole     whole       all with rank 0               rank 0: 16 P, the others 4 P
//     zero 1     whole     whole       shard                         (2 + 2 + 12/n) P
//     zero 2     whole     shard       shard                         (2 + (2 + 12)/n) P
//     zero 3     shard     shard       shard                         (2 + 2 + 12)/n P
//                                                                   (Rajbhandari et al. 2020, arXiv:1910.02054)
// Gradients take 4 bytes, not 2, where they are in float32: --grad-dtype, by default where a step has several
// micro-batches on a rank, or --head-chunks.
//
// The layers need whole weights and gradients in every stage. Where a rank stores a shard, there are buffers for whole
// units: two that the blocks use in turn, and those of the embedding and the head.

struct Unit {
    std::string name;
    int64_t offset = 0, n = 0;  // in the flat arrays; n may be 0
    size_t number = 0;          // among the units of the whole model, of which a rank of a pipeline has some
    // Rank r's shard is elements [bounds[r], bounds[r + 1]) of the unit.
    std::vector<int64_t> bounds = {};
    int64_t packed = 0;  // where this rank's shard begins in an array of its shards only
    int buffer = 0;      // weight_buffers[buffer] and grad_buffers[buffer] hold the unit where the stage shards them
};

// What lies in the host's memory (offload.cu).
enum class Offload { none, optimizer, params, unified };
Offload offload_from_name(const std::string& name);  // "none", "optimizer", "params", "unified"

struct Sharding {
    int rank = 0, size = 1;
    int zero = 0;
    bool naive = false;
    Offload offload = Offload::none;
    // Boundaries lie at multiples of this many elements of a parameter (optimizer_granularity); 0:
    // only between parameters.
    int64_t granularity = 1024;

    bool shards_states() const { return zero >= 1 || naive; }
    bool shards_grads() const { return zero >= 2; }
    bool shards_weights() const { return zero >= 3; }
    bool host_updates() const { return offload == Offload::optimizer || offload == Offload::params; }
};

// The memory of the parameters on this rank.
struct FlatParameters {
    Sharding sharding;
    std::vector<Unit> units;    // in the order of the forward
    std::vector<Param> params;  // by Hugging Face name, in the order of their places
    int64_t n = 0;              // elements of all units
    int64_t shard_n = 0;        // of this rank's shards, packed
    // Flat arrays of all n elements with a place for each parameter; or, where the stage shards them,
    // of this rank's shards.
    Tensor weights, grads, masters;  // masters: f32, in mixed precision, and where only the host's weights are updated
    std::vector<Tensor> weight_buffers, grad_buffers;

    // Decides the boundaries and the buffers, from params and units. tied: the head uses the embedding's weights.
    // whole: the parameters of which these are some units (or all). A unit's boundaries are those that it has there: so
    // they, and with them the norm's bits, do not depend on which units a rank has.
    void shard_units(const Sharding& sharding, bool tied, const FlatParameters& whole);
    // Takes the memory. The masters' arena is that of what lies on the host, if something does.
    void take(DType dtype, DType grad_dtype, bool with_masters, Arena& weights, Arena& grads, Arena& masters);

    // A unit as the layers see it: in the flat array or in its buffer.
    Tensor unit_weights(size_t unit) const;
    Tensor unit_grads(size_t unit) const;
    Tensor unit_masters(size_t unit) const;  // none if they are sharded
    // This rank's shard of a unit, in whatever array has it.
    Range shard(size_t unit) const;
    Tensor weight_shard(size_t unit) const;
    Tensor grad_shard(size_t unit) const;
    int64_t grad_shard_place(size_t unit) const;  // its first element in `grads`
    Tensor master_shard(size_t unit) const;
    // What this rank's optimizer updates of a unit: its shard, or all of it where the states are not sharded. The
    // offsets of the parameters, whole ones and pieces, count from there.
    Range updated(size_t unit) const;
    Tensor updated_grads(size_t unit) const;
    // Of grad_shard(unit) the ranges that count in the norm of all gradients: without parameters that another rank of
    // tensor parallelism counts.
    std::vector<Range> counted(size_t unit) const;
    // Of updated_grads() of all units: the elements whose gradients ranks have parts of, by Param::sharers.
    std::map<AxisSet, std::vector<Tensor>> shared_grads() const;
    Tensor updated_copy(size_t unit) const;  // of its weights, where the optimizer updates masters
    // The whole arrays. seed: of stochastic rounding, for 16 bits without masters.
    Weights updated_weights(uint64_t seed) const;
    std::vector<Param> updated_params(size_t unit) const;
    // Of all units, as the optimizer needs them. Where the host updates, what crosses the bus lies there packed: the
    // gradients, and with Offload::optimizer the copies of the weights.
    std::vector<UpdatedUnit> updated_units() const;
    std::vector<Range> gaps(size_t unit) const;  // elements of the unit that are no parameter's

    size_t unit_of(const Param& param) const;
    // Writes a parameter, which each rank knows whole (without the padding): the elements that it holds, rounded.
    void write(const Param& param, const std::vector<float>& whole) const;

  private:
    Tensor slice(const Tensor& array, bool is_sharded, size_t unit, Range range) const;
};

// ---------------------------------------------------------------------------------------------------------------------
// compress.cu, power_sgd.cu: gradients that travel in fewer bits, for ddp. Sums are in float32. Bytes that one of n
// ranks sends for R x C gradients:
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
    // For p.sharding.size ranks. Once the arena is reserved: the errors start at 0.
    // Also counts what its collectives need.
    virtual void take_memory(const FlatParameters& p, Arena& arena) = 0;
    // The unit's gradients (f32) = the sum over the ranks of what they sent: the same bits everywhere.
    virtual void reduce(const FlatParameters& p, size_t unit, cudaStream_t stream) = 0;
    // What the next step needs from this one, by name; different on every rank.
    virtual std::vector<std::pair<std::string, Tensor>> states() const = 0;
};
std::unique_ptr<Compressor> make_compressor(Comm& comm, const CompressOptions& options);  // none: nullptr

// ---------------------------------------------------------------------------------------------------------------------
// naive.cu, ddp.cu, zero.cu: every rank has a share of the batch; their gradients are added.
//
//     naive   rank 0 gets the sum, updates, and sends the new weights to all: the simplest, here to show what it costs
//     ddp     the gradients are summed in buckets, last layers first, on their own stream while the backward goes on
//     zero 1  each rank gets the sum of its shard of each unit, updates that, and gathers the others' new weights
//     zero 2  the same, but sums after each micro-batch: a unit's whole gradients exist only until they are reduced
//     zero 3  weights, too, are gathered for as long as a unit needs them: before its forward and before its backward;
//             the next unit's while this one computes
//
// A rank sends (n-1)/n of:  2 P with ddp and zero 1; with M micro-batches (M + 1) P with zero 2, at most 3 M P with 3
// (less what is still in a buffer when the backward, or the next micro-batch, needs it).
//
// naive and the three stages add the ranks' gradients in rank order, and ddp as --all-reduce says: `library` is rank
// order without NCCL, and NCCL's own order with it (parallel/comm/comm.h). So without NCCL ddp and the three stages
// give the same bits, as long as a step is one micro-batch per rank. (With more of them zero 2 and 3 add the ranks
// before the micro-batches.) naive gives the same bits where no gradient is clipped: its norm is summed in another
// order.

struct DataParallelOptions {
    bool naive = false;
    int zero = 0;
    double bucket_mib = 25;         // ddp
    CompressOptions compress = {};  // ddp: a unit at a time, instead of buckets
};

// Seconds of a step: in collectives, and those of them that the computing stream spent waiting.
struct CommTime {
    double total = 0, exposed = 0;
};

// data_parallel.cu: the stream of the collectives. It goes on when the computing stream has come to a point (a unit's
// gradients are complete, a buffer is no longer read), and the computing stream waits where it needs a result,
// and for nothing else.
class CommStream {
  public:
    explicit CommStream(Comm& comm);
    ~CommStream();
    CommStream(const CommStream&) = delete;
    CommStream& operator=(const CommStream&) = delete;
    operator cudaStream_t() const { return stream_; }

    // Runs `call`, which puts collectives on this stream, when `computing` has come here.
    void communicate(cudaStream_t computing, const std::function<void()>& call);
    // `computing` goes on when the event has come; or when all that is on this stream is done.
    void wait(cudaStream_t computing, cudaEvent_t event);
    void wait_for_all(cudaStream_t computing);
    void start_clock() { busy_.n = waiting_.n = 0; }
    CommTime read_clock();  // since start_clock(); waits for the streams

    Comm& comm;

  private:
    // Pairs of events around what is timed; used again each step.
    struct Stopwatch {
        std::vector<std::pair<cudaEvent_t, cudaEvent_t>> laps;
        size_t n = 0;
        void start(cudaStream_t stream);
        void stop(cudaStream_t stream);
        double seconds() const;
        ~Stopwatch();
    };
    cudaStream_t stream_ = nullptr;
    cudaEvent_t reached_ = nullptr;  // a point of a stream that the other one waits for
    Stopwatch busy_, waiting_;       // of this stream with collectives; of the computing stream for them
    bool is_used_ = false;           // not on one rank that shards nothing
};

// What a scheme does at each point of a step. DataParallel below says when each function is called. The defaults are
// those of a scheme that shards nothing.
class Scheme {
  public:
    explicit Scheme(CommStream& comm_stream) : comm_stream_(comm_stream), comm_(comm_stream.comm) {}
    virtual ~Scheme() = default;
    // Takes memory of its own, and counts what its collectives will need (Comm::count_memory).
    virtual void take_memory(const FlatParameters& p, int64_t micro_batches, Arena& arena) = 0;
    virtual void gather(const FlatParameters&, size_t, int64_t, cudaStream_t) {}
    virtual void begin_backward(const FlatParameters&, int64_t micro_batch) { micro_batch_ = micro_batch; }
    virtual void begin_grads(const FlatParameters&, size_t, cudaStream_t) {}
    virtual void end_grads(const FlatParameters& p, size_t unit, cudaStream_t stream) = 0;
    virtual void all_gather_weights(const FlatParameters&, size_t, cudaStream_t) {}
    virtual std::vector<std::pair<std::string, Tensor>> states() const { return {}; }
    std::function<void(size_t unit, cudaStream_t stream)> grads_are_final;  // DataParallel's

  protected:
    bool in_last_micro_batch() const { return micro_batch_ + 1 == micro_batches_; }
    CommStream& comm_stream_;
    Comm& comm_;
    int64_t micro_batches_ = 1, micro_batch_ = 0;
};
std::unique_ptr<Scheme> make_naive(CommStream& stream);                   // naive.cu
std::unique_ptr<Scheme> make_ddp(CommStream& stream, double bucket_mib);  // ddp.cu
std::unique_ptr<Scheme> make_compressed_ddp(CommStream& stream, const CompressOptions& options);
std::unique_ptr<Scheme> make_zero(CommStream& stream, int stage);  // zero.cu; stage 1, 2 or 3

// data_parallel.cu: data parallelism as the model and the step see it, whatever the scheme.
class DataParallel {
  public:
    DataParallel(Comm& comm, const DataParallelOptions& options);
    ~DataParallel() { cudaStreamSynchronize(stream_); }  // before the scheme's events go
    DataParallel(const DataParallel&) = delete;
    DataParallel& operator=(const DataParallel&) = delete;

    Comm& comm() { return stream_.comm; }
    Sharding sharding(int64_t granularity) const;
    // micro_batches: of a step on this rank. summed: the small tensors that all_reduce() will be called with. The
    // memory of the communicator is counted and taken here.
    void take_memory(const FlatParameters& p, int64_t micro_batches, const std::vector<Tensor>& summed, Arena& arena);

    // Before a unit's weights are read: after this call the stream has them whole. `next` (or -1) is the unit that will
    // be asked for next: it is fetched meanwhile.
    void gather(const FlatParameters& p, size_t unit, int64_t next, cudaStream_t stream);

    // Before each micro-batch's backward: does it add to the gradients of parameters, or write them? The first one of a
    // step writes, and where the scheme reduces each micro-batch by itself, so does every one.
    bool begin_backward(const FlatParameters& p, int64_t micro_batch);
    // Before the first kernel that writes or adds to a unit's gradients; after the last one.
    void begin_grads(const FlatParameters& p, size_t unit, cudaStream_t stream);
    void end_grads(const FlatParameters& p, size_t unit, cudaStream_t stream);
    // After the last backward: the stream waits for all sums.
    void finish_grads(cudaStream_t stream);
    // Are the units updated one after the other, each while the new weights of the one before travel? Otherwise all are
    // updated at once.
    bool updates_by_unit() const { return options_.zero > 0 || options_.naive; }
    void begin_updates(const FlatParameters& p, cudaStream_t stream);
    // After the update of this rank's shard of a unit, or of all: for each unit in order.
    void all_gather_weights(const FlatParameters& p, size_t unit, cudaStream_t stream);

    // If set: called in each step, once for every unit, last ones first, when its gradients are final: when this stream
    // has done what is on it so far. (offload.cu)
    std::function<void(size_t unit, cudaStream_t stream)> grads_are_final;

    // The norm's sums, the loss and the like: small tensors of f32, added up.
    void all_reduce(Tensor tensor, cudaStream_t stream);
    // Of what was done since start_clock(). Waits for the streams.
    void start_clock() { stream_.start_clock(); }
    CommTime read_clock() { return stream_.read_clock(); }

    // The most precise values of a parameter, on rank 0, without padding. Collective if they are sharded.
    std::vector<float> read(const FlatParameters& p, const Param& param);
    // What --compress keeps on this rank between steps; empty without, and where there is one rank only.
    std::vector<std::pair<std::string, Tensor>> compression_states() const { return scheme_->states(); }

  private:
    const DataParallelOptions options_;
    CommStream stream_;
    std::unique_ptr<Scheme> scheme_;
    Tensor staging_;  // what read() sends
};

// ---------------------------------------------------------------------------------------------------------------------
// offload.cu: the host has several times the device's memory, behind a bus that is some fifty times slower than that
// memory. What is used once a step moves there.  (ZeRO-Offload: arXiv:2101.06840; ZeRO-Infinity: arXiv:2104.07857)
//
//     --offload  on the device                       on the host                     updates  crosses the bus in a step
//     none       weights, gradients, masters, m, v                                   device
//     optimizer  weights, gradients                  masters, m, v (pinned)          host     gradients, new weights
//     params     buffers for units, gradients        the same, and weight shards     host     gradients, weights twice
//     unified    weights, gradients                  masters, m, v (pages that move) device   those, both ways
//
// (params: the weights twice for each micro-batch, for its forward and for its backward.)
//
// Each rank does so with what it updates: its shards, with ZeRO; params needs ZeRO 3 (on one rank, too: then a unit
// comes to the device for its forward and for its backward). A host update needs masters of its own: in float32 those
// are host copies of the weights, from which the device's are written.

class OffloadedUpdate {
  public:
    // optimizer: of p.updated_units(), on the host (make_host_optimizer), but for unified. norm_first: an update must
    // wait for the norm of all gradients, because it clips, or because fp16 may have overflowed. Otherwise it begins as
    // soon as its unit's are final.
    OffloadedUpdate(const FlatParameters& p, const std::unique_ptr<Optimizer>& optimizer, bool norm_first);
    ~OffloadedUpdate();
    OffloadedUpdate(const OffloadedUpdate&) = delete;
    OffloadedUpdate& operator=(const OffloadedUpdate&) = delete;

    // Pinned memory for what crosses the bus; after p and the optimizers have theirs.
    void take_memory(Arena& pinned);
    // Before a step's backward: what its updates will need. The last step must be over. unscale: 1 / loss scale.
    void begin_step(double lr, int64_t t, float unscale, uint64_t seed);
    void grads_are_final(size_t unit, cudaStream_t stream);  // DataParallel's call
    // For unit 0, 1, ...: after this call the stream has this rank's shard of its new weights. norm_scale:
    // grad_norm's result.
    void update(size_t unit, Tensor norm_scale, cudaStream_t stream);

  private:
    void update_on_host(size_t unit);
    void update_on_device(size_t unit, Tensor norm_scale, cudaStream_t stream);
    std::vector<std::vector<Tensor>> all_pages() const;
    void move_pages(size_t unit, bool to_device, cudaStream_t stream);
    // `later` goes on when `earlier` has come here.
    void after(cudaStream_t later, cudaStream_t earlier);

    const FlatParameters& p_;
    const std::unique_ptr<Optimizer>& optimizer_;
    const bool norm_first_;
    cudaStream_t to_host_ = nullptr, host_ = nullptr, to_device_ = nullptr;
    cudaEvent_t reached_ = nullptr;
    std::vector<cudaEvent_t> arrived_;  // by unit, unified: its pages are on the device
    std::vector<cudaEvent_t> done_;     // by unit: its new weights on the device; unified: its pages on the host again
    std::vector<UpdatedUnit> units_;
    std::vector<std::vector<Tensor>> pages_;  // by unit, unified
    Tensor host_grads_, host_copies_;         // packed; copies: new 16-bit weights
    Tensor host_norm_;                        // {norm, scale}
    double lr_ = 0;
    int64_t t_ = 1;
    uint64_t seed_ = 0;
};
