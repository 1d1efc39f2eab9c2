// parallel/data/data.h: data parallelism: every rank trains on a part of the batch. Who holds which part of the parameters,
// when weights are gathered and gradients reduced, in how many bits they travel, and what lies in the host's memory.
//
// It knows parameters as flat arrays of units, and nothing of the model: so the model, which is made of such arrays, includes it.
//
// Files, in reading order:
//     shards.cu                   which rank holds which part of the parameters: plain data parallelism and ZeRO 1, 2, 3
//     data_parallel.cu            when the parts are gathered and reduced
//     compress.cu, power_sgd.cu   gradients that travel in fewer bits
//     offload.cu                  states, and parts of the weights, in the host's memory
#pragma once

#include "optim/optim.h"
#include "parallel/comm/comm.h"

#include <functional>

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
// Where weights or gradients are cut, the layers still want them whole: there are buffers for whole units, two for the blocks,
// which take turns, and those of the embedding and the head.

struct Unit {
    std::string name;
    int64_t offset = 0, n = 0;  // in the flat arrays
    // Rank r's part is elements [bounds[r], bounds[r + 1]) of the unit.
    std::vector<int64_t> bounds = {};
    int64_t packed = 0;  // where this rank's part begins in an array of its parts only
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
    // Cuts lie at multiples of so many elements of a parameter (optimizer_granularity); 0: only between parameters.
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
    int64_t shard_n = 0;        // of this rank's parts, packed
    // Flat arrays of all n elements with a place for each parameter; or, where the stage cuts them, of this rank's parts.
    Tensor weights, grads, masters;  // masters: f32, in mixed precision, and where only the host's weights are updated
    std::vector<Tensor> weight_buffers, grad_buffers;

    // Decides the cuts and the buffers, from params and units. tied: the embedding is in use until the head is.
    void shard_units(const Sharding& sharding, bool tied);
    // Takes the memory. The masters' arena is that of what lies on the host, if something does.
    void take(DType dtype, DType grad_dtype, bool with_masters, Arena& weights, Arena& grads, Arena& masters);

    // A unit as the layers see it: in the flat array or in its buffer.
    Tensor unit_weights(size_t unit) const;
    Tensor unit_grads(size_t unit) const;
    Tensor unit_masters(size_t unit) const;  // none if they are cut
    // This rank's part of a unit, in whatever array has it.
    Range shard(size_t unit) const;
    Tensor weight_shard(size_t unit) const;
    Tensor grad_shard(size_t unit) const;
    Tensor master_shard(size_t unit) const;
    // What this rank's optimizer updates of a unit: its part, or all of it where the states are not cut. The offsets of the
    // parameters, whole ones and pieces, count from there.
    Range updated(size_t unit) const;
    Tensor updated_grads(size_t unit) const;
    Weights updated_weights(size_t unit,
                            uint64_t seed) const;  // seed: of stochastic rounding, for 16 bits without masters
    std::vector<Param> updated_params(size_t unit) const;

    size_t unit_of(const Param& param) const;
    // Writes a parameter's rows, of which each rank knows all (without the padding): those that it holds, rounded.
    void write(const Param& param, const std::vector<float>& rows) const;

  private:
    Tensor slice(const Tensor& array, bool is_sharded, size_t unit, Range range) const;
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
    double bucket_mib = 25;         // ddp
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
    void all_gather_weights(const FlatParameters& p, size_t unit, cudaStream_t stream);

    // If set: called in each step, once for every unit, last ones first, when its gradients are final: when this stream has done
    // what it has been given so far. (offload.cu)
    std::function<void(size_t unit, cudaStream_t stream)> grads_are_final;

    // The norm's sums, the loss and the like: small tensors of f32, added up.
    void all_reduce(Tensor tensor, cudaStream_t stream);
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
    std::unique_ptr<Compressor> compressor_;  // nullptr without --compress
    cudaStream_t comm_stream_ = nullptr;
    cudaEvent_t reached_ = nullptr;      // a point of a stream that the other one waits for
    Stopwatch busy_, waiting_;           // of comm_stream_ with collectives; of the computing stream for them
    std::vector<cudaEvent_t> gathered_;  // by unit: its weights are there
    std::vector<cudaEvent_t> reduced_;   // by buffer: its gradients have been read
    std::vector<int64_t> in_buffer_;     // buffer -> unit whose weights it holds, or -1
    int64_t micro_batches_ = 1, micro_batch_ = 0;
    int64_t bucket_end_ = 0;  // gradients from here on have been given to a bucket
    size_t not_final_ = 0;    // units 0 to here - 1 have gradients that are not final
    Tensor sum_rows_;         // zero 2 and 3 with several micro-batches: (2, largest part)
    Tensor staging_;
};

// ---------------------------------------------------------------------------------------------------------------------
// offload.cu: the host has ten times the device's memory, behind a bus of a fiftieth of its bandwidth. What is used once a step
// moves there.                                               (ZeRO-Offload: arXiv:2101.06840; ZeRO-Infinity: arXiv:2104.07857)
//
//     --offload    on the device                        on the host                       updates   crosses the bus in a step
//     none         weights, gradients, masters, m, v                                      device
//     optimizer    weights, gradients                   masters, m, v (pinned)            host      gradients, new weights
//     params       buffers for units, gradients           the same, and parts of weights    host      gradients, weights twice
//     unified      weights, gradients                   masters, m, v (pages that move)   device    those, both ways
//
// Each rank does so with what it updates: its parts, where ZeRO cuts them; params needs ZeRO 3 (on one rank, too: then a unit
// comes to the device for its forward and for its backward). A host update needs masters of its own: in float32 those are
// host copies of the weights, from which the device's are written.

class OffloadedUpdate {
  public:
    // optimizers: one a unit; on the host (make_host_optimizer), but for unified. norm_first: an update must wait for the norm of
    // all gradients, because it clips, or because fp16 may have overflowed. Otherwise it begins as soon as its unit's are final.
    OffloadedUpdate(const FlatParameters& p, const std::vector<std::unique_ptr<Optimizer>>& optimizers,
                    bool norm_first);
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
    Tensor host_norm_;                              // {norm, scale}
    double lr_ = 0;
    int64_t t_ = 1;
    uint64_t seed_ = 0;
};
