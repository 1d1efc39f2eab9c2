// optim/optim.h: everything that turns gradients into new weights.
//
// Parameters, gradients and optimizer states are flat arrays. Where an optimizer updates each weight by itself, one
// launch covers all parameters: a table of tiles says which elements a block updates and whether they are decayed.
#pragma once

#include "core/core.h"

#include <functional>
#include <memory>

// ---------------------------------------------------------------------------------------------------------------------
// schedule.cu: the learning rate at each step. Steps count from 1; every schedule starts with a linear warmup
//   lr(s) = peak * s / warmup                                 for s <= warmup
// and then, with u = (s - warmup) / (steps - warmup) in [0, 1]:
//   constant   peak
//   linear     peak + (floor - peak) u
//   cosine     floor + (peak - floor) (1 + cos(pi u)) / 2                  (Loshchilov & Hutter 2017, arXiv:1608.03983)
//   wsd        peak until the last `decay_fraction` of all steps,                   (Hu et al. 2024, arXiv:2404.06395)
//              then linear to floor (the paper: exponential); a warmup that reaches into the decay delays it
// floor = peak * min_ratio. Beyond `steps` the rate stays as in the last step.
//
// s is the position in the schedule: the step itself, until a resumed run is given another number of steps. Then
//   constant, wsd   the schedule is that of the new number of steps, as if the run had begun with it
//   linear, cosine  what is left of the schedule is stretched over the steps that are left of the run:
//                   s = position + (step - from) (steps - position) / (until - from)
// A schedule that begins anew in the middle of a run has position 0 there.

struct Schedule {
    std::string name = "cosine";  // one of schedule_names()
    double peak = 1e-3, min_ratio = 0.1, decay_fraction = 0.2;
    int64_t warmup = 0, steps = 1;
    int64_t from = 0, until = 0;  // steps of the run; until = 0: the position is the step
    double position = 0;          // at step `from`
    int64_t last_step() const { return until > 0 ? until : steps; }  // of the run
};
// The schedule of a run that has made `step` steps, and is to make `until` in all: the same one, continued by the rule
// above; or one that begins anew.
Schedule continue_schedule(Schedule schedule, int64_t step, int64_t until);
Schedule begin_schedule(Schedule schedule, int64_t step, int64_t until);
double learning_rate(const Schedule& schedule, int64_t step);
void check_schedule(const Schedule& schedule);  // Error for an unknown name, warmup > steps, ...
std::vector<std::string> schedule_names();
bool is_stretched(const std::string& schedule);  // linear and cosine: the second rule above
// Of a field that not all of them read: &Schedule::min_ratio or &Schedule::decay_fraction.
std::vector<std::string> schedules_that_read(double Schedule::*field);

// ---------------------------------------------------------------------------------------------------------------------
// grad_clip.cu: clipping by the global norm                                   (Pascanu et al. 2013, arXiv:1211.5063)
//   norm = unscale * sqrt(sum over all gradients of g^2)       scale = unscale * min(1, max_norm / (norm + 1e-6))
// grads: flat (n), f32, bf16 or f16. unscale: 1 / what the loss was multiplied by (loss_scaler.cu), otherwise 1.
// result: (2) f32 on the device = {norm, scale}: no round trip to the host; the update multiplies gradients by scale.
// max_norm <= 0: no clipping, scale = unscale. A norm that is inf or NaN gives scale NaN, which makes the update leave
// everything as it is (the sum of squares leaves as f32: a norm beyond 1.8e19, before unscaling, counts as inf).
// scratch: grad_norm_scratch_n(n) f32 on an 8-byte boundary (it holds doubles).

void grad_norm(Tensor result, Tensor grads, float max_norm, float unscale, Tensor scratch, cudaStream_t stream);
int64_t grad_norm_scratch_n(int64_t n);

// The two halves of grad_norm, for gradients that lie in several places or on several ranks.
// sum: (2) f32 = {high, low}: a double as the f32 nearest to it and what that leaves over, so that collectives can
// add it.
void sum_squares(Tensor sum, Tensor grads, Tensor scratch, cudaStream_t stream);
// sums: (k, 2), rows like `sum`.
// stays_nan: a scale that was NaN before this call stays NaN. The host may launch a step before it has read that the
// update of the one before was skipped: then this one is skipped, too.
struct ClipScale {
    Tensor result = {};
    float max_norm = 0, unscale = 1;
    bool stays_nan = false;
};
void clip_scale(Tensor sums, const ClipScale& clip, cudaStream_t stream);

// sum_squares of many parts of a flat array in two launches: each row of `sums` (k, 2) that has parts becomes the sum
// of these, added in their order. A part has the same bits as by itself.
class SquareSums {
  public:
    struct Part {
        int64_t first, n;  // elements of the array
        int64_t row;       // ascending
    };
    SquareSums(Arena& arena, const std::string& what, const std::vector<Part>& parts);
    void init(cudaStream_t stream);  // after arena.reserve(): uploads the tables
    // With `clip` also clip_scale of all rows, each of which must have parts: no launch more.
    void add_up(Tensor sums, Tensor grads, cudaStream_t stream, const ClipScale& clip = {}) const;

  private:
    std::vector<int64_t> host_blocks_, host_parts_;
    int64_t n_ = 0, n_chunks_ = 0, n_blocks_ = 0, n_parts_ = 0;
    int64_t n_rows_ = 0, n_longer_rows_ = 0;  // longer: of several parts
    Tensor blocks_, parts_, scratch_;
};

// ---------------------------------------------------------------------------------------------------------------------
// loss_scaler.cu: the factor on the loss that keeps f16 gradients from becoming 0     (Micikevicius et al. 2018,
// arXiv:1710.03740). Every gradient is `scale` times as large; grad_norm multiplies by unscale = 1 / scale in f32.
//   dynamic   an overflow: scale *= backoff, and the step is skipped (its norm is not finite: no update)
//             `interval` steps in a row without one: scale *= growth, up to `largest`
//   static    scale stays

struct LossScaleOptions {
    bool dynamic = true;
    double start = 65536, growth = 2, backoff = 0.5, largest = 16777216;
    int64_t interval = 2000;
};
LossScaleOptions parse_loss_scale(const std::string& text);  // "dynamic", or a number: static. Error otherwise

// Lives on the host: the program reads the norm once a step and calls update(!isfinite(norm)).
// A checkpoint saves scale, good_steps and overflows.
struct LossScaler {
    LossScaleOptions options;
    double scale;            // of the next step
    int64_t good_steps = 0;  // without an overflow, since the last one or the last growth
    int64_t overflows = 0;   // in a row

    explicit LossScaler(const LossScaleOptions& options);
    // Error when training cannot continue: a dynamic scale falls below 1, or a static one overflows 20 times in a row.
    void update(bool overflow);
};

// ---------------------------------------------------------------------------------------------------------------------
// tiles.cu: the table that lets one launch update all parameters. A tile is at most kTileN consecutive elements of one
// parameter.

// What an optimizer updates: units of parameters, each with its place in every flat array (a rank may have all of one
// array, and of another only its shards, side by side). step_units() updates some of them.
struct UpdatedUnit {
    std::vector<Param> params = {};           // Param::offset counts from the unit's first element
    int64_t n = 0;                            // elements
    int64_t values = 0, copy = 0, grads = 0;  // the places of its first element
};

// Where the elements of a rank's part of a parameter (Param::cut) are in the whole one. Row r of the part, of `run`
// elements, is followed in the whole by `skip` that other ranks have; `group` rows, those of queries for example, by
// group_skip whole rows. Without a cut element i is element i.
struct PlaceInWhole {
    int64_t first = 0;
    int32_t run = 1, skip = 0, group = 1, group_skip = 0;
    __host__ __device__ bool is_cut() const { return skip != 0 || group_skip != 0; }
    __host__ __device__ int64_t of(int64_t i) const {
        if (!is_cut()) return first + i;
        const int64_t row = i / run;
        return first + i + row * skip + row / group * group_skip * (static_cast<int64_t>(run) + skip);
    }
};
PlaceInWhole place_in_whole(const Param& param);  // Error for ranges of rows that are not equal and at equal distances

constexpr int kTileN = 1024;
struct Tile {
    int64_t values, copy, grads, state;  // places of its first element in the flat arrays
    int32_t n;
    int32_t decay;  // 1 where weight decay applies, otherwise 0; an integer: no store of a float can change it, for g++
    // The random numbers of stochastic rounding are addressed by the parameter and the element, not by where they lie:
    uint64_t key;        // hash_name of the parameter's name in files
    int64_t element;     // index of the tile's first element in this rank's part of the parameter, a multiple of tile_n
    PlaceInWhole place;  // of that part
};
constexpr int64_t kTileWords = sizeof(Tile) / sizeof(int32_t);  // tables are (n_tiles, kTileWords) i32

// How many tiles units have, in order: enough to count memory. The states are flat arrays of state_n elements, in which
// units and parameters lie as in theirs; packed: only these parameters, side by side, without what is between them.
struct TileTable {
    int64_t tile_n;
    bool packed;
    std::vector<int64_t> first_tile, first_element;  // by unit, and the ends: tiles, elements of parameters before it
    std::vector<int64_t> first_state;                // by unit, and the end: where its states begin
    int64_t n_tiles() const { return first_tile.back(); }
    int64_t state_n() const { return first_state.back(); }
};
TileTable count_tiles(const std::vector<UpdatedUnit>& units, int64_t tile_n = kTileN, bool packed = false);
// The tiles, which of 70 billion parameters are 5.5 GB.
std::vector<Tile> make_tiles(const std::vector<UpdatedUnit>& units, const TileTable& table);

// ---------------------------------------------------------------------------------------------------------------------
// optimizer.cu: the optimizers, one file each, behind one interface.
//
//   name        file           state bytes a parameter     usual lr (with warmup, for language models)
//   sgd         sgd.cu         0                           0.1       w -= lr g
//   momentum    sgd.cu         4    m                      0.05      a decaying sum of g (heavy ball)
//   nesterov    sgd.cu         4    m                      0.05      the same, one gradient further
//   adagrad     adagrad.cu     4    v                      1e-2      g / square root of the sum of all squares
//   rmsprop     rmsprop.cu     4    v                      1e-3      g / square root of the decaying mean of squares
//   adam        adam.cu        8    m, v                   1e-3      m / sqrt(v); weight decay is part of g (L2)
//   adamw       adamw.cu       8    m, v                   1e-3      m / sqrt(v); weight decay is added to the step
//   adafactor   adafactor.cu   ~0   row, col               1e-2      v as an outer product, steps relative to w
//   lion        lion.cu        4    m                      1e-4      sign of a mean of g
//   muon        muon.cu        4    m  (matrices)          2e-2      orthogonalised momentum; AdamW for the rest
//   adam8bit    adam8bit.cu    2.03 m, v                   1e-3      AdamW with states of 8 bits
//
// All of them: g = scale * grad, with the scale of grad_norm; weight decay only where Param::decay says so.

// What a step updates. With 16-bit parameters an update is usually smaller than half the distance to the next number
// (of bf16: 1/512 to 1/256 of the weight), and rounding to nearest loses it, step after step. There are two remedies:
//   master   the f32 weights are what is updated, and forward and backward read the copy      (arXiv:1710.03740)
//   stochastic rounding   up or down at random, with the exact weight as expected value: w = 1 and 1000 updates of 1e-4
//            arrive near 1.1, where rounding to nearest stays at 1. Saves the master's 4 bytes a parameter, and adds
//            noise.           (Gupta et al. 2015, arXiv:1502.02551; for bf16: Zamirai et al. 2020, arXiv:2010.06192)
// The random bits are a function of the seed, the parameter's name, the element and t: the same on every mesh.
struct Weights {
    Tensor values;            // flat (n): f32 (plain training, or the master), or bf16
    Tensor copy = {};         // optional, with f32 values: bf16 or f16, flat (n); values rounded to nearest
    bool stochastic = false;  // bf16 values: round stochastically. false: to nearest
    uint64_t seed = 0;        // of the stochastic rounding
};

// What a launch over some units is given: of each array their part, which begins at these places of the table. So it
// cannot touch what others do meanwhile with the rest (the collectives of ZeRO, for example).
struct TileOrigin {
    int64_t values = 0, copy = 0, grads = 0, state = 0;
};
struct UnitsPart {
    Weights weights;
    Tensor grads;
    TileOrigin origin;
};
UnitsPart part_of_units(const std::vector<UpdatedUnit>& units, size_t first, size_t count, const Weights& weights,
                        Tensor grads);

// Every optimizer reads the fields that its maths names. Start from default_optimizer_options(name): the defaults below
// are AdamW's, with GPT-3's values (Brown et al. 2020).
struct OptimizerOptions {
    float weight_decay = 0.1f;      // adamw, adam8bit, lion, muon, adafactor: w -= lr wd w.  Others: g += wd w
    float beta1 = 0.9f;             // decay rate of the first moment, m; lion: share of m in the step's direction
    float beta2 = 0.95f;            // decay rate of the second moment, v; lion: of m
    float eps = 1e-8f;              // added to the root that divides; adafactor: lower limit of v
    float momentum = 0.9f;          // decay rate of the momentum
    bool nesterov = false;          // momentum: the step as if m were one gradient further; make_nesterov sets it
    float decay_power = 0.8f;       // adafactor: beta2 at step t is 1 - t^-decay_power
    float clip_threshold = 1;       // adafactor: largest root mean square of an update before lr
    float min_scale = 1e-3f;        // adafactor: lower limit of a parameter's root mean square, which scales its steps
    int ns_steps = 5;               // muon: Newton-Schulz iterations
    DType ns_dtype = DType::f32;    // muon: precision of their matrices, f32 or bf16
    float adamw_lr_ratio = 0.015f;  // muon: lr of the parameters that AdamW updates / lr of the matrices
};

// What one state of an optimizer holds for one parameter: saving its bytes and copying them back continues bit for bit.
struct OptimizerState {
    std::string kind;   // "m", "v", "row", ...
    std::string param;  // name of the parameter
    size_t unit;        // its place among the optimizer's units
    Tensor tensor;
    // Its element i stands for elements [i per, (i + 1) per) of the parameter, so a shard's states are a part of the
    // whole's. 0: for the parameter as a whole.
    int64_t per = 1;
};

using SumOverRanks = std::function<void(Tensor tensor, cudaStream_t stream)>;

class Optimizer {
  public:
    virtual ~Optimizer() = default;
    // After arena.reserve(): zeroes the states and uploads tables.
    virtual void init(cudaStream_t stream) = 0;
    // One update of the parameters of units [first, first + count), or of all. grads: flat, f32, or of the 16-bit dtype
    // of the weights. norm_scale: grad_norm's result; a scale of NaN leaves values, copy and states as they are (an
    // update on the host then writes the copy, as the rounded values). t counts updates from 1, and only those that
    // happened: after a step that was skipped for its NaN, the next one has the same t. Elements of no parameter
    // (gaps, padding of the flat arrays) are never touched.
    virtual void step_units(size_t first, size_t count, const Weights& weights, Tensor grads, Tensor norm_scale,
                            double lr, int64_t t, cudaStream_t stream) = 0;
    void step(const Weights& weights, Tensor grads, Tensor norm_scale, double lr, int64_t t, cudaStream_t stream) {
        step_units(0, n_units(), weights, grads, norm_scale, lr, t, stream);
    }
    virtual size_t n_units() const = 0;
    virtual std::vector<OptimizerState> states() const = 0;  // unit by unit
    // f32 elements of scratch that step() writes before it reads them: use_scratch() before the first step.
    virtual int64_t scratch_n() const { return 0; }
    virtual void use_scratch(Tensor) {}
    // Parameters that are cut (Param::cut), of an optimizer that looks at whole matrices: what step() adds up over the
    // ranks that have the other parts, in the order of its calls (tensors without memory); and the function that does
    // so, in place. The ranks' parts of one parameter must be updated at the same time.
    virtual std::vector<Tensor> sums() const { return {}; }
    virtual void use_sums(const SumOverRanks&) {}
    // What step() computes beside its work on each element: products of matrices, in ns_dtype.
    struct Products {
        double flops = 0, bytes = 0;  // read and written
    };
    virtual Products products() const { return {}; }
};

// Takes states, tables and scratch from the arena, also from one that counts: construct it while the arena counts,
// reserve(), and construct it again. An unknown name is an Error that lists the names.
std::unique_ptr<Optimizer> make_optimizer(const std::string& name, Arena& arena, const std::vector<UpdatedUnit>& units,
                                          const OptimizerOptions& options);
// All of it is one unit, of n elements.
std::unique_ptr<Optimizer> make_optimizer(const std::string& name, Arena& arena, const std::vector<Param>& params,
                                          int64_t n, const OptimizerOptions& options);
// adam_host.cu: adam and adamw on the host's cores, for states that do not fit on the device (--offload). The same
// updates, bit for bit those on the device. Arena, weights, gradients and norm_scale are pinned host memory, and
// step() puts the update on the stream, as a host function that reads them when the stream gets there; only one at a
// time may be under way. Values are f32, with a copy or without; bf16 alone, and another name, is an Error.
std::unique_ptr<Optimizer> make_host_optimizer(const std::string& name, Arena& arena,
                                               const std::vector<UpdatedUnit>& units, const OptimizerOptions& options);
bool has_host_optimizer(const std::string& name);
// A parameter may be sharded between ranks at multiples of this many elements. 0: nowhere, its update needs all of it.
int64_t optimizer_granularity(const std::string& name);
std::vector<std::string> optimizer_names();
OptimizerOptions default_optimizer_options(const std::string& name);
// The hyperparameters that have flags, beside the learning rate.
struct Hyperparameter {
    std::string name;  // "weight-decay"
    float OptimizerOptions::*field;
    enum class Range { not_negative, positive, below_1 } range;
    std::string help;
};
const std::vector<Hyperparameter>& hyperparameters();
std::vector<std::string> optimizers_that_read(const Hyperparameter& hyperparameter);
// What is wrong with this value of it, as "it must be a number above 0", or "".
std::string hyperparameter_fault(const Hyperparameter& hyperparameter, float value);
// For the small default model of train_gpt; models of 100M and more want those of the table above, mostly smaller.
double default_learning_rate(const std::string& name);

// What make_optimizer chooses from.
using MakeOptimizer = std::unique_ptr<Optimizer>(Arena& arena, const std::vector<UpdatedUnit>& units,
                                                 const OptimizerOptions& options);
MakeOptimizer make_sgd, make_momentum, make_nesterov, make_adagrad, make_rmsprop, make_adam, make_adamw, make_adafactor,
    make_lion, make_muon, make_adam8bit;
// AdamW whose states hold these parameters only, side by side: for Muon's other parameters.
MakeOptimizer make_packed_adamw;
// An optimizer for each unit, of the arrays' parts that are the unit's: for those that look at whole matrices, and
// launch many kernels for each of them. Their scratch is the same, because units are updated one after the other.
std::unique_ptr<Optimizer> make_by_unit(
    const std::vector<UpdatedUnit>& units,
    const std::function<std::unique_ptr<Optimizer>(const std::vector<Param>& params, int64_t n)>& make);

// Checks that all optimizers share. They name the optimizer in the error.
void check_optimizer_input(const char* name, const std::vector<UpdatedUnit>& units, const OptimizerOptions& options);
// What step_units() is given holds the units (UpdatedUnit, of which the parameters are not looked at).
void check_optimizer_step(const char* name, const std::vector<UpdatedUnit>& units, const Weights& weights, Tensor grads,
                          Tensor norm_scale, double lr, int64_t t);
