// training/training.h: a training run: its options, what it holds, its step, and what it leaves behind.
//
// Files, in reading order (train_gpt.cu, above this folder, calls them in the order of the algorithm):
//     options.cu         the command line
//     options_check.cu   what flags mean together, and what is refused
//     options_pipeline.cu   the same of --pp and the flags of its schedules
//     setup.cu           the model's configuration, the data, the folder of the run
//     pretrained.cu      what lies beside the weights in a Hugging Face folder: found, and copied to checkpoints
//     run_folder.cu      the folder of the run: one writer, and room on the disk
//     stop.cu            Ctrl-C, and the command that continues the run
//     memory.cu          what a run takes, counted before anything is taken
//     tune_matmul.cu     what computes each matrix product, chosen before the first step (--tune-matmul)
//     step.cu            the parts of a step: gradients, clipping, update, reading back
//     boundary.cu        between two steps: the host ahead of the device, and a step's launches as a CUDA graph
//     pipeline.cu        its forward and backward where ranks have some of the layers each
//     pipeline_versions.cu   steps that run at once, with several versions of the weights
//     pipeline_validation.cu updates that do not wait for the norm of all gradients
//     evaluation.cu      the loss on held-out text
//     diagnosis.cu       what is known where the loss or the gradients are not finite
//     checkpoint.cu      saving, and resuming with the same bits
//     state.cu           state.json, and which checkpoint is whole
//     sample.cu          text drawn from the model
//     progress.cu        what a person sees: the terminal, the logs, the plot
#pragma once

#include "inference/inference.h"
#include "io/io.h"
#include "io/lock.h"
#include "llm.h"
#include "optim/optim.h"
#include "parallel/data/data.h"
#include "parallel/pipeline/pipeline.h"

#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <set>

// ---------------------------------------------------------------------------------------------------------------------
// options.cu: the command line. Names and meanings are a contract: tests and scripts rely on them.

struct TrainOptions {
    std::string model = "tiny";  // "": that of --init
    std::string init, data, val, tokenizer, out;
    int64_t batch = 16, micro_batch = 0, seq = 128, steps = 1000, seed = 1;
    Schedule schedule;           // its peak is --lr; of a resumed run, continued as resumed_schedule() says
    Schedule typed_schedule;     // by the flags alone
    bool new_schedule = false;   // --schedule was given with --resume
    bool pretrained_lr = false;  // --lr was not given, and with --init the peak is lower than for random weights
    std::string optimizer = "adamw";
    OptimizerOptions optimizer_options;  // that optimizer's own defaults, except for what the flags say
    double clip = 1.0;
    std::string dtype = "fp32";
    Precision precision;  // from --dtype, --master and --grad-dtype
    FlashTier attention = FlashTier::automatic;
    std::string tune_matmul = "auto";
    bool verbose = false;
    LossScaleOptions loss_scale;
    Recompute recompute;
    RankOptions ranks;
    int64_t tp = 1;  // ranks that divide each layer
    TensorMode tp_mode = TensorMode::one_d;
    int64_t tp_depth = 0;  // of 2.5D; 0: chosen
    bool sp = false;       // 1D: they divide the tokens between the layers, too
    bool tp_overlap = false;
    int64_t cp = 1;  // ranks that divide each sequence
    ContextMode cp_mode = ContextMode::ring;
    int64_t pp = 1;                 // ranks that divide the layers
    std::string pipeline = "1f1b";  // their schedule
    int64_t chunks = 2;             // interleaved: stages a rank
    std::vector<int64_t> stages;    // blocks of each stage; empty: as many as make the stages' costs equal
    bool asynchronous = false;      // that schedule updates without waiting for the pipeline to be empty:
    bool vertical_sync = false;     //   pipedream: with the weights that the micro-batch met at stage 0
    int64_t flush_every = 50;       //   steps between two moments at which the pipeline is empty
    Times pipeline_times;           // auto: what its search takes for the durations; --draw: of what is drawn
    int64_t memory_limit = 0;       // auto: micro-batches alive on a rank at once, at most; 0: as 1f1b has them
    int64_t micro_batches = 0;  // --micro-batches: of a step on a rank, from which micro_batch follows; 0: not given
    bool draw = false;          // print the schedule, and end
    int64_t data_ranks() const { return rank_count(ranks) / (pp * tp * cp); }  // that divide the batch
    int64_t sharding_ranks() const { return cp * data_ranks(); }     // that have the same weights, and other tokens
    int64_t rank_seq() const { return seq / cp; }                    // tokens of a sequence on a rank
    bool has_positions() const { return mask_documents || cp > 1; }  // where a token is does not follow from its row
    DataParallelOptions data_parallel;
    Offload offload = Offload::none;
    bool plan = false;     // print the plan, and end
    bool account = false;  // print the account of a step, and end
    std::string device_spec = "this";
    double plan_parameters = 0;             // --params: the plan's states for this many parameters; 0: the model's
    int64_t inject_overflow = 0;            // for tests: the step in which one gradient becomes infinite
    bool graph = false, run_ahead = false;  // boundary.cu
    bool needs_graph = false;               // --graph on: Error where it fails, instead of launching one by one
    int64_t val_every = 100, val_sequences = 64, sample_tokens = 300, save_every = 250, keep = 2, stop_after = 0,
            log_every = 0, eot = -1;
    double temperature = 0.8, val_fraction = 0.1;
    bool mask_documents = false;
    bool resume = false, new_data = false;  // new_data: a resumed run may go on with different data
    bool keep_best = false;
    std::string checkpoint;    // the newest that is whole; with --resume at first the one that the options came from
    int64_t resumed_step = 0;  // and its step
    // For the command that continues the run: the program as it was called, and flags that no checkpoint has.
    std::string program = "./train_gpt";
    std::vector<std::string> repeated;
    int64_t last_step() const { return stop_after > 0 && stop_after < steps ? stop_after : steps; }

    // Must an update wait for the norm of all gradients? To clip by it, or because float16 may have overflowed.
    bool updates_after_norm() const { return clip > 0 || precision.dtype == DType::f16; }

    // What belongs to the run, above all what decides its loss curve, as flag -> value: kept in checkpoints, so that a
    // resumed run is the same run.
    std::map<std::string, std::string> identity;
    std::map<std::string, std::string> of_this_call;  // all other flags: what ranks must have been given alike as well
};

// Flags whose meaning depends on other flags, as they were typed.
// settle_options turns them into fields of TrainOptions.
struct TypedFlags {
    // Every optimizer has defaults of its own for those that were not given.
    std::optional<double> lr;
    std::map<std::string, std::optional<float>> hyperparameters;  // by flag
    std::string master = "auto", grad_dtype = "auto", loss_scale = "auto", recompute = "none", fp8 = "delayed",
                dp_mode = "ddp", tp_mode = "1d", cp_mode = "ring", attention = "auto", compress = "none",
                offload = "none", stages, times = "1,1,1,0", graph = "auto", run_ahead = "auto";
    std::set<std::string> given;  // the flags of the command line, without those that a checkpoint brings
};

// Parses argv. Prints help and exits for --help. Bad input throws Error. With --resume the options that decide the loss
// curve come from the newest checkpoint in --out; giving one of them with another value is an Error.
TrainOptions parse_train_options(int argc, char** argv);
// options_check.cu: settles what depends on several flags; Error, in one line, for what cannot be combined.
void settle_options(TrainOptions& options, const TypedFlags& typed);
// options_pipeline.cu: of pipelines, once it is known that --pp divides the ranks; and for --draw, which needs no other
// flags and refuses them.
void settle_pipeline(TrainOptions& options, const TypedFlags& typed);
void settle_drawing(TrainOptions& options, const TypedFlags& typed);
int64_t step_micro_batches(const TrainOptions& options);  // of a step, on a rank
ScheduleOptions schedule_options(const TrainOptions& options, int64_t micro_batches);
// Steps between two moments at which an asynchronous pipeline is empty; 1 of all other runs. (pipeline_versions.cu)
int64_t steps_at_once(const TrainOptions& options);
// Does a rank update before the norm of all gradients is known? (pipeline_validation.cu)
bool validates_later(const TrainOptions& options);
int64_t steps_read_at_once(const TrainOptions& options);  // whose sequences are in the host's memory
// Of the steps that a pipeline makes at once with this one, the last: after it the ranks can stop.
int64_t last_step_at_once(const TrainOptions& options, int64_t step);
int64_t n_pipeline_stages(const TrainOptions& options);  // of all ranks of --pp

// ---------------------------------------------------------------------------------------------------------------------
// state.cu: state.json of a checkpoint, and which checkpoint is whole

// Which tokens a run trains on and is validated on.
struct DataIdentity {
    int64_t train_n = 0, val_n = 0;
    uint64_t train_checksum = 0, val_checksum = 0;
};
struct BestStep {  // the one with the lowest validation loss so far
    int64_t step;
    double val_loss;
};
struct RunState {
    int64_t step = 0, updates = 0, sequences = 0, tokens = 0;
    double loss_scale = 1;
    int64_t good_steps = 0, overflows = 0;  // of the loss scaler
    std::optional<DataIdentity> data;
    std::optional<Schedule> schedule;
    std::optional<BestStep> best;                // with --keep-best
    std::map<std::string, std::string> options;  // TrainOptions::identity
};
// state.json, after all other files of the checkpoint: it has the checksums of their tensors.
void write_state(const std::string& checkpoint, const RunState& state);
RunState read_state(const std::string& checkpoint);  // Error for what is not a training state

// The schedule with which a run goes on from a checkpoint, and, where the flags change it, a line that says how.
struct ResumedSchedule {
    Schedule schedule;
    std::string change;
};
ResumedSchedule resumed_schedule(const TrainOptions& options, const RunState& saved);

// The newest checkpoint whose state and configuration can be read; Error if there is none.
std::string readable_checkpoint(const std::string& run);
// The newest checkpoint of which every byte of every tensor is as it was written, and every file the one that was
// written with its state.json. Where a newer one is broken, a line on stderr names the file, and the tensor if it is
// one; Error if none is whole. Collective: rank 0 reads, as fast as its disk can.
std::string whole_checkpoint(Comm& world, const std::string& run);

// ---------------------------------------------------------------------------------------------------------------------
// pretrained.cu: what lies beside the weights in a Hugging Face folder

// The tokenizer of --tokenizer (a file, or its folder), or else the tokenizer.json beside the model: of --init, of the
// folder of --model's config.json, or of the checkpoint that is resumed.
struct RunTokenizer {
    std::shared_ptr<const Tokenizer> tokenizer;  // without a file: a token for each byte
    std::string path;                            // the file, or ""
    std::string fault;  // why the file beside the model cannot be used: text cannot be read, token shards can
};
RunTokenizer find_tokenizer(const TrainOptions& options);

// What a checkpoint has beside the weights.
struct ModelFiles {
    std::map<std::string, std::string> files;  // name -> bytes
    TokenIds token_ids;                        // of config.json
};
struct RunData;
ModelFiles collect_model_files(const TrainOptions& options, const Config& config, const RunTokenizer& tokenizer,
                               const RunData& data);

// ---------------------------------------------------------------------------------------------------------------------
// memory.cu: everything on the device comes from these arenas, and what --offload keeps on the host. They are counted
// first, printed, and then taken.

struct Memory {
    explicit Memory(Offload offload);
    Arena weights, masters, grads, optimizer, activations, communication, sampling;
    Arena transit, batches;  // pinned: what is on its way between host and device; what is read of the data
    std::vector<Arena*> all() {
        return {&weights, &masters, &grads, &optimizer, &activations, &communication, &sampling, &transit, &batches};
    }
    size_t bytes();       // on the device, with cuBLASLt's workspace
    size_t host_bytes();  // pinned, and pages that move
};

// What the host reads back after a step: the last rows of Trainer::totals, in this order. Sums over ranks travel as a
// pair of floats {high, low}, which together hold 48 bits of a double.
struct StepNumbers {
    float stop_count, stop_low;   // ranks that were asked to stop
    float loss_high, loss_low;    // sum of the tokens' losses
    float grad_norm, grad_scale;  // optim.h: clip_scale
    double loss_sum() const { return static_cast<double>(loss_high) + loss_low; }
};
constexpr int64_t kStepNumberRows = sizeof(StepNumbers) / (2 * sizeof(float));

// How a step ended, as the host sees it. Three of them take turns: step s + 1 may be launched before the host reads the
// numbers of step s, and the time of step s begins where step s - 1 ended.
struct StepEnd {
    StepNumbers* numbers = nullptr;  // pinned
    cudaEvent_t arrived = nullptr;   // the numbers are there
    bool asked_to_stop = false;      // of one rank alone; several agree (StepNumbers::stop_count)
};

class Pipeline;
struct Trainer {
    TrainOptions options;
    Config config;
    Comm& world;
    std::unique_ptr<Comm> dp_and_cp;  // with --cp: all ranks with the same weights
    DataParallel data_parallel;
    int64_t dp_rank = 0;                                // which share of the batch is this rank's
    std::unique_ptr<TensorParallel> tensor_parallel;    // with --tp
    std::unique_ptr<ContextParallel> context_parallel;  // with --cp
    std::unique_ptr<Pipeline> pipeline;                 // with --pp
    std::unique_ptr<PipelineRanks> pipeline_ranks;      // likewise, for checkpoints
    int64_t local_batch = 0, micro_batch = 0;           // sequences of a step on this rank; and at a time
    Memory memory;
    Model model;
    Activations acts;
    Workspace workspace;
    std::unique_ptr<Engine> sampler;  // with --sample
    Arena sample_tables{"tables of samples", MemoryKind::pinned};
    std::unique_ptr<Optimizer> optimizer;      // of what this rank updates of the units
    std::unique_ptr<OffloadedUpdate> offload;  // with --offload: brings their work to the host, or their states here
    LossScaler scaler;
    DataIdentity data;                          // for checkpoints
    ModelFiles model_files;                     // likewise; rank 0's
    std::optional<BestStep> best, best_before;  // the one before it is the best again where it cannot be saved
    int64_t updates = 0;  // steps of the optimizer; steps of the run that overflowed are not among them
    // f32 (units of the whole model + kStepNumberRows, 2): the sum of squares of each unit's gradients, then
    // StepNumbers. Rows of units that are not here are 0.
    Tensor totals;
    std::optional<SquareSums> square_sums;  // of this rank's gradients, to the first rows of totals
    // Of memory.batches. A row is a sequence: those of two steps, which take turns (first_row), or of all steps that
    // are read at once; behind them those of an evaluation. Of a micro-batch all tokens come first, then all targets.
    int32_t* host_tokens = nullptr;
    int32_t *host_documents = nullptr, *host_positions = nullptr;  // with --mask-documents; positions also with --cp
    int64_t batch_read = 0;                                        // the step whose batch was read last
    float* host_stop = nullptr;                                    // pinned: was this rank asked to stop?
    std::array<StepEnd, 3> step_ends;
    // With --run-ahead the time of a step is the device's: the host reads its end when it has launched the next one.
    cudaEvent_t start = nullptr;  // of a step that is launched when the one before has been read
    cudaEvent_t began = nullptr;  // of the step that is read next: start, or the end of the one before
    StepGraphs graphs;            // with --graph

    Trainer(TrainOptions options, Config config, Mesh& mesh);
    ~Trainer();
    int64_t n_units() const { return config.L + 2; }  // of the whole model
    ContextParallel::Sizes attention_sizes() const;
    int64_t micro_batches() const { return local_batch / micro_batch; }       // of a step, on this rank
    int64_t first_row(int64_t step) const { return step % 2 * local_batch; }  // of its batch, in the host's memory
    int64_t evaluation_row() const;
    int64_t n_rows() const { return evaluation_row() + local_batch; }
    int32_t* tokens_of(int64_t row) const {
        const int64_t micro = row / micro_batch, in_micro = row % micro_batch;
        return host_tokens + (micro * 2 * micro_batch + in_micro) * options.rank_seq();
    }
    int32_t* targets_of(int64_t row) const { return tokens_of(row) + micro_batch * options.rank_seq(); }
    StepEnd& end_of(int64_t step) { return step_ends[static_cast<size_t>(step % 3)]; }
    // What is summed over all ranks: all but the norm, which follows from it.
    Tensor step_sums() const { return totals.slice(0, n_units() + 2); }
    void sum_over_ranks(cudaStream_t stream);
    void sum_over_equal_stages(cudaStream_t stream);  // without those of other stages of a pipeline
    // The losses of a micro-batch, to loss_sum(): of the ranks with the same tokens, one adds them.
    void add_losses_once(const Activations& acts, bool accumulate, cudaStream_t stream);
    ClipScale clip_scale(double clip) const;  // of this step's gradients, to norm_result()
    float dloss() const;  // gradient of each token's loss: the step's is their mean, times the loss scale
    Tensor stop_count() const { return totals.slice(n_units(), 1).view({2}); }
    Tensor loss_sum() const { return totals.slice(n_units() + 1, 1).view({2}); }
    Tensor norm_result() const { return totals.slice(n_units() + 2, 1).view({2}); }
    // Goes through all that the run takes: while the arenas count, and again once they are reserved.
    void take_memory();
    // What is wrong where that is more than the device has, with that of the ranks that share it; or "". Collective.
    std::string memory_fault();
    // What makes the run smaller, has not been asked for yet, and is not refused beside what has been.
    std::string ways_to_fit() const;
    void reserve();

  private:
    void take_tensor_parallel_memory();
    std::vector<SquareSums::Part> norm_parts() const;
};

// ---------------------------------------------------------------------------------------------------------------------
// pipeline.cu: the forward and backward of a step's micro-batches where the layers are divided among ranks.

// Of `steps` steps that run at once, of this many micro-batches on a rank each.
PipelineSchedule schedule_of_steps(const TrainOptions& options, int64_t micro_batches, int64_t steps);

struct StepResult {
    double loss, grad_norm;
    bool skipped;  // a gradient overflowed; nothing has changed but the loss scale
    bool stop;     // some rank was asked to
    // What the host's clock does not tell: of steps that ran at once (pipeline_versions.cu) this one's share of what
    // they took, and with --run-ahead what the device took.
    struct Share {
        double seconds;
        Traffic traffic;
        CommTime collectives = {};  // not with --run-ahead, which has one rank
    };
    std::optional<Share> share = {};
    std::optional<double> loss_scale = {};  // after this step, where later ones have been made, too
};

// Of a rank, in what runs at once: a step, or the steps of an asynchronous schedule.
struct PipelineTraffic {
    int64_t activations = 0;  // bytes kept at most
    int64_t longer = 0;  // of these, because backwards by weight come later than backwards by input; of a plan alone
    int64_t messages = 0, bytes = 0;  // sent between stages in a step
};

class Pipeline final : public StageWork {
  public:
    // Collective over ranks, those of one pipeline.
    Pipeline(Trainer& trainer, Comm& ranks);
    ~Pipeline() override;
    const PipelineSchedule& schedule() const { return schedule_; }
    RankStages stages_of(int rank) const;
    const std::vector<int64_t>& blocks_of_stages() const { return n_blocks_; }
    const ModelPart& part() const { return stages_.part; }  // what this rank has of the model
    Comm& ranks() { return ranks_; }
    // Where two ranks have the same stages (DualPipe), one of them counts their gradients and saves them.
    bool has_twins() const { return schedule_.placement == Placement::both_ways; }
    bool counts() const { return !has_twins() || ranks_.rank < ranks_.size / 2; }
    bool ties_two_ranks() const;  // are the ends of a tied embedding on two ranks?
    PipelineTraffic planned(int rank) const;
    PipelineTraffic measured() const;  // of this rank, of the last step
    // After the model, the workspace and the totals. Returns a micro-batch, for those who want its sizes.
    Activations take_memory();

    // All micro-batches of a step, whose sequences are in the host's memory: gradients, added up over the ranks that
    // have the same weights, and losses.
    // The first of them is in row first_row.
    void accumulate(int64_t first_row, cudaStream_t stream);
    // Where a rank does not wait for the others between steps: a step with its update. With the first step of those
    // that run at once all of them are made, and the others' results are returned by the calls that ask for them.
    bool runs_ahead() const { return schedule_.asynchronous || numbers_; }
    int64_t updates_put_back() const { return n_put_back_; }
    StepResult step(const BatchReader& data, int64_t step);
    // The losses of this many micro-batches, at most those of a step.
    void add_losses_of(int64_t micro_batches, cudaStream_t stream);
    void add_up(Tensor sums, cudaStream_t stream);  // over the ranks of the pipeline
    // Where two ranks have the same stages: in place, the larger values of both.
    void max_over_twins(const Tensor& values, cudaStream_t stream);

    // For the runner.
    void forward(const Action& action, Tensor in, Tensor out, cudaStream_t stream) override;
    void backward(const Action& action, Tensor dx, cudaStream_t stream) override;
    void backward_weight(const Action& action, cudaStream_t stream) override;
    void update(const Action& action, cudaStream_t stream) override;

  private:
    // What is kept at once.
    struct Kept {
        Pieces pieces = {};
        int borders = 0;    // tensors at the borders of stages
        int64_t later = 0;  // blocks between their backward by input and by weight
    };
    Kept planned_pieces(const PipelineSchedule& schedule, int rank) const;
    int64_t bytes_of(int rank, const Kept& kept) const;
    void run_table(const PipelineSchedule& schedule, cudaStream_t stream);
    bool is_last(const Action& action) const;
    bool accumulates(const Action& action) const;
    void end_backward(const Action& action);
    void add_tied(cudaStream_t stream);
    void reduce_gradients(cudaStream_t stream);
    void take_versions();
    void run_steps(const BatchReader& data, int64_t first, int64_t n);
    void run_next_steps(const BatchReader& data, int64_t step);
    void trace_one_of(int64_t first, int64_t n);
    StepResult read_result(int64_t step, bool stop);
    const Model& model_of(const Action& action) const;
    void count_for(int64_t step);
    void for_all_gradients(const std::function<void(const Tensor&)>& call) const;
    // pipeline_validation.cu
    void take_validation_memory();
    void after(cudaStream_t later, cudaStream_t earlier);
    void update_early(int64_t step, bool stop, cudaStream_t stream);
    bool check_update(int64_t step, const BatchReader& data, cudaStream_t stream);
    void run_validated_steps(const BatchReader& data, int64_t first, int64_t n);
    void forget_forwards();

    Trainer& t_;
    Comm& ranks_;
    const PipelineSchedule schedule_;
    const std::vector<int64_t> n_blocks_;  // of each stage
    const RankStages stages_;
    struct Chunk {
        int64_t first, last;
    };
    std::map<int, Chunk> chunks_;  // by stage: places in Model::blocks
    int64_t largest_chunk_ = 0;
    std::unique_ptr<Comm> twin_;  // DualPipe: the two ranks with the same stages; a tied embedding's two ends
    PipelineRunner runner_;
    std::vector<Activations> micro_batches_;
    InFlight in_flight_;
    WeightGradients later_;
    std::map<int, Tensor> last_out_;  // by micro-batch: the output of the last stage, until its backward
    bool training_ = true;
    int64_t messages_ = 0;  // that this rank sent in the last training step
    // Asynchronous: the model with each version of its weights, and of the steps that run at once the totals.
    std::vector<Model> versions_;
    Tensor step_totals_;  // (steps, rows of Trainer::totals, 2)
    int64_t first_step_ = 0;
    std::deque<StepResult> results_;  // of steps that have been made and not been asked for
    std::exception_ptr failure_;      // of the step after them
    // Validated later: numbers that go from rank to rank, on a stream of their own; and what an update changes, as it
    // was.
    std::unique_ptr<Comm> numbers_;
    cudaStream_t numbers_stream_ = nullptr;
    cudaEvent_t reached_ = nullptr;
    Tensor totals_, passed_, final_;  // Trainer::totals of this rank; of those before it; of all
    std::vector<Tensor> updated_, before_;
    std::set<std::pair<int, int>> forwards_;  // (micro-batch, stage) without their backward
    int64_t n_put_back_ = 0;                  // updates
};

// ---------------------------------------------------------------------------------------------------------------------
// tune_matmul.cu: what computes each product of the run: --tune-matmul.

// The choices are rank 0's, of its file and of what is timed now, on all ranks; for this it makes a step without an
// update on the data of step 1: gradients and activations have no meaning afterwards. Collective; after set_weights.
void choose_matmuls(Trainer& trainer, const BatchReader& data);
// Sets those of the file, and times nothing: for --account, which runs no step.
void recall_matmuls(const TrainOptions& options);
// Where the choices are kept: for this GPU and this version of cuBLASLt. "" where there is no home folder.
std::string matmul_file();
// Its text: a line of what it is for, then matmul_choices(). Error, with what is wrong, for another one.
std::string matmul_file_text(const std::string& choices);
std::string choices_in_matmul_file(const std::string& text);

// ---------------------------------------------------------------------------------------------------------------------
// run_folder.cu: the folder of a run. While a RunFolder exists, no other process writes there.

class RunFolder {
  public:
    // Makes the folder with its parents, and locks it; "" is the first of runs/1, runs/2, ... that does not exist.
    // Error if another process writes it, with its process number and host.
    explicit RunFolder(const std::string& path);
    const std::string& path() const { return path_; }

  private:
    struct MadeFolders {  // removed at the end if nothing was written into them
        std::vector<std::string> paths;
        ~MadeFolders();
    };
    struct Lock {
        LockedFile file;
        explicit Lock(const std::string& run);
        ~Lock();
    };
    MadeFolders made_;
    std::string path_;
    std::optional<Lock> lock_;
};
// What the lock of this run says, "PID HOST"; "" where there is none.
std::string lock_text(const std::string& run);
// Error if another process writes this run: it may remove what would be read here.
void check_not_written(const std::string& run);
// Error if the disk has no room for the checkpoints and logs to come. Nothing has been written yet. Collective.
void check_disk_space(const Trainer& trainer);

// ---------------------------------------------------------------------------------------------------------------------
// stop.cu: Ctrl-C, and the command that continues the run

// From here on the first SIGINT, SIGTERM or SIGHUP asks for the end of the run after the step that is going on, and the
// second ends the process. SIGUSR1 asks, too, and never ends the process; nor does SIGPIPE, which comes when nobody
// reads the output any more. All are answered on stderr at once.
void answer_signals();
bool stop_requested();
// Is the run to end after this step? A signal that comes later is one for the next step.
bool take_stop_request(const TrainOptions& options, int64_t step);
void note_saved(const TrainOptions& options, int64_t step, bool last);  // for the answers; 0: nothing is saved
std::string resume_command(const TrainOptions& options);
std::string shell_quoted(const std::string& word);  // as a shell takes it: in quotes where it needs them

// ---------------------------------------------------------------------------------------------------------------------
// setup.cu: what is settled before memory is taken

struct RunData {
    std::shared_ptr<const Tokenizer> tokenizer;
    bool is_text = true;  // tokens can be shown as text: not those of shards without a tokenizer
    TokenMix train_tokens, val_tokens;
    BatchReader train;
    std::optional<BatchReader> val;  // not with --val-fraction 0
    DataIdentity identity;
    std::string show(const std::vector<int32_t>& tokens) const;  // as text for a terminal, or as ids
    std::vector<int32_t> prompt() const;                         // what a sample begins with
};
struct RunModel {
    RunTokenizer tokenizer;
    Config config;
};
// What a run begins with. Ranks that are threads of one process read it once, and share it: the first that asks reads.
struct RunFiles {
    std::once_flag model_once, data_once;
    std::string model_fault, data_fault;
    std::optional<RunModel> model;
    std::optional<RunData> data;
};
// What is wrong with it, in one line, or "". The tokenizer and the model's configuration:
std::string open_model(const TrainOptions& options, RunFiles& files);
// Then, when all ranks have those, for the ranks meet here: counts the memory, and opens the data (not with --plan).
std::string open_run(const TrainOptions& options, RunFiles& files, Mesh& mesh, std::optional<Trainer>& trainer);

// What was found before the start. Where all ranks found a fault, they end together: rank 0 prints its line, and no
// rank's end is an accident for the others. A fault that only some ranks have is thrown there. Collective; false: do
// not start.
bool agree_to_start(Comm& world, const std::string& fault);
// Error where this rank is a different program from rank 0, or has other flags. Collective.
void check_same_flags(Comm& world, const TrainOptions& options);
// Error where ranks were given different things, the disk has no room for the run, or the folder has another run.
// Chooses --out where it was not given. Returns rank 0's hold on the folder. Collective.
std::unique_ptr<RunFolder> settle_folder(Trainer& trainer, const RunData& data);

// ---------------------------------------------------------------------------------------------------------------------
// step.cu: the parts of a training step, in the order in which train_gpt.cu calls them. Collective.

// Host: this rank's sequences of step `step`, [(step - 1) batch, step batch) of the run, are read from the data, unless
// they were read last. The other version reads them to the host's memory from row `row` on.
void read_batch(Trainer& trainer, const BatchReader& data, int64_t step);
void read_batch_to(int64_t row, const Trainer& trainer, const BatchReader& data, int64_t step);
// Device: all micro-batches forward and backward, on many ranks with the reduction of the gradients.
void accumulate_gradients(Trainer& trainer, int64_t step);
// The norm of all gradients, and from it the factor that removes the loss scale and clips. Several ranks learn with the
// norm whether one of them was asked to stop after this step.
void clip_gradients(Trainer& trainer, int64_t step);
// Its parts: the squares of this rank's gradients; and the sums over all ranks, with the factor.
void add_squares(Trainer& trainer);
void set_stop(Trainer& trainer, bool stop);
void add_stop_and_norm(Trainer& trainer, bool stop, double clip);
// The optimizer's step, the copies of the new weights for the next forward, and on many ranks their way to the others.
void update_weights(Trainer& trainer, int64_t step);
// The first and the last of these alone, of the trainer's model or of a version of it; n_updates: with this one.
void update_units(Trainer& trainer, const Model& model, double lr, int64_t n_updates);
// Before a step that is launched when the one before has been read: it begins now.
void note_start(Trainer& trainer);
// Asks the device for the step's loss and norm, after its work. A run of one rank finds here whether it was asked to
// stop.
void request_numbers(Trainer& trainer, int64_t step);
// Waits until they are there. Error if the loss or the norm is not finite, except in float16: there a step whose norm
// is not finite is skipped.
StepResult read_back(Trainer& trainer, const BatchReader& data, int64_t step);
// diagnosis.cu: what is known of a step whose loss or gradients are not finite, and what to do, in one line. Runs its
// forward again, to find the sequences that it comes from (not in a pipeline, nor where the weights have been updated
// already: --offload with --clip 0). Collective, but for these.
std::string explain_not_finite(Trainer& trainer, const BatchReader& data, int64_t step, double loss, double norm);

// For evaluation too. Tokens and targets of a sequence, of which this rank has some, to row `row` of the host's memory;
// and where in the sequence they are, to the first n rows.
void read_sequence(const Trainer& trainer, const BatchReader& data, int64_t sequence, int64_t row);
void set_positions(const Trainer& trainer, int64_t n);
// The tokens and targets of the micro-batch from row `row` of the host's memory on, to the device.
void upload_micro_batch(const Trainer& trainer, const Activations& acts, int64_t row, cudaStream_t stream);
// What the device has summed; waits for it.
StepNumbers read_numbers(Trainer& trainer, cudaStream_t stream);
// The parts of accumulate_gradients: --tp: sums of gradients that ranks have parts of (Param::sharers); for tests,
// --inject-overflow in this step.
void add_shared_gradients(Trainer& trainer, cudaStream_t stream);
void inject_overflow(const Trainer& trainer, int64_t step, cudaStream_t stream);

// boundary.cu: --graph and --run-ahead, once the other options are settled; Error for one that is on and cannot be.
void settle_boundary(TrainOptions& options, const TypedFlags& typed);
// May step + 1 be launched before the numbers of `step`, which has been launched, are read?
bool may_run_ahead(Trainer& trainer, int64_t step);
// With --graph `launches`, those of this step's gradients and norm, are one launch from the third step on.
void launch_as_graph(Trainer& trainer, int64_t step, const std::function<void()>& launches);
// Does an evaluation follow the step, if there is held-out text; or a checkpoint that is not the last?
bool evaluates_after(const TrainOptions& options, int64_t step);
bool saves_after(const TrainOptions& options, int64_t step);

// The same memory for rows whose documents are not masked.
Activations without_documents(const Trainer& trainer, const Activations& acts);
// evaluation.cu: mean loss (nats per token) over the first n_sequences of the held-out text, or over all that it has.
// Documents are never masked here, so that runs can be compared. Collective.
double evaluate(Trainer& trainer, const BatchReader& data, int64_t n_sequences);
// Is this validation loss lower than all before? Then it is Trainer::best from now on.
bool note_best(Trainer& trainer, int64_t step, double val_loss);

// ---------------------------------------------------------------------------------------------------------------------
// checkpoint.cu: the model as a Hugging Face folder, the optimizer's states by parameter, and state.json.
// Collective; any number of ranks and any --zero can go on from it.

// A save that fails, on a full disk for example, is said on stderr, and the next one is tried; Error if no older
// checkpoint exists, or if this is the last save of the run.
void save_checkpoint(Trainer& trainer, int64_t step, bool last);
// Loads the newest whole checkpoint of --out, continues its schedule, and says so; returns its step.
int64_t resume_run(Trainer& trainer);
// Bytes of the optimizer's states and of compression's errors that this rank writes into a checkpoint; they need no
// memory yet.
int64_t saved_state_bytes(const Trainer& trainer);
// Does this rank write files of its own into a checkpoint? They may have no bytes of states, as those of sgd.
bool writes_checkpoint_files(const Trainer& trainer);

// ---------------------------------------------------------------------------------------------------------------------
// sample.cu: continues `prompt` by `n` tokens, drawn from softmax(logits / temperature) with Philox (seed, position).
// `token_ready` sees each token; false ends the text. Collective where ranks shard or divide the model's weights.

// For one text at a time, of at most 256 tokens: fewer where --seq or the number of the model's positions is smaller.
// (With rotary positions --seq may be larger than that number.) When a text is full, its second half begins the next.
EngineOptions sample_engine(const TrainOptions& options, const Config& config);
std::vector<int32_t> sample(Engine& engine, const std::vector<int32_t>& prompt, int64_t n, double temperature,
                            uint64_t seed, const std::function<bool(int32_t)>& token_ready);

// ---------------------------------------------------------------------------------------------------------------------
// progress.cu: what a person sees. Only rank 0 prints and writes; print_sample is collective.

// log.csv, TensorBoard events and the lines of the terminal: a row per step.
class RunLog {
  public:
    RunLog(const std::string& out, int64_t resume_step);  // -1: a new run
    // Where a row cannot be written, on a full disk, it waits for the next one, and a line on stderr says so once.
    void write(const LogRow& row);
    void write_waiting();  // Error if that is not possible

  private:
    CsvLog csv_;
    TensorBoardLog tensorboard_;
    std::deque<LogRow> csv_waits_, events_wait_;  // what each of them has not been able to write
    bool said_ = false;
};
LogRow make_row(const Trainer& trainer, int64_t step, const StepResult& result, double step_seconds,
                double matmul_rate);
void print_start(const Trainer& trainer, const RunData& data);
// A line every --log-every steps. Without it a line every step; in a terminal these are one line that changes, and only
// those with a validation loss stay.
void print_progress(const LogRow& row, const TrainOptions& options, double seconds_left);
void end_progress_line();  // before anything else is printed
void print_val_loss_of_init(const LogRow& row, int64_t steps);
void print_sample(Trainer& trainer, const RunData& data, const char* title);
void draw_loss(const std::string& out);  // OUT/loss.png from OUT/log.csv; where it cannot be written, stderr says so
// How the run ended, what it leaves, and how to go on.
void print_end(Trainer& trainer, int64_t step, size_t bytes_taken, double seconds);
