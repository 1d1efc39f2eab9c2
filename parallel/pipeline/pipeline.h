// parallel/pipeline/pipeline.h: pipeline parallelism: each rank has some of the layers, and micro-batches go from rank
// to rank. Which rank does what, in which order, is a table: a schedule. One runner executes any table, one simulator
// times it, and one printer draws it (planning/).
//
// The layers are cut into S stages. The forward of a micro-batch goes through stages 0 to S - 1 and its backward
// through S - 1 to 0. Which rank has a stage is the schedule's placement:
//
//     loop        stage s on rank s mod p; S = v p, with v stages ("chunks") a rank
//     vee         S = 2 p: stages 0 to p - 1 go down the ranks, p to 2 p - 1 come back: the last rank has the turn,
//                 rank 0 the embedding and the head
//     both_ways   S = p, and each stage is on two ranks: the first half of the micro-batches goes down the ranks, the
//                 second half goes up (DualPipe)
//
// Files, in reading order:
//     table.cu       what a table says: names, messages, what is alive when
//     validity.cu    what makes a table invalid
//     schedules.cu   naive, GPipe, 1F1B, interleaved
//     zero_bubble.cu ZB-H1, ZB-H2 and ZB-V
//     search.cu      the search for the best table for given durations ("auto")
//     dual_pipe.cu   DualPipe and DualPipeV
//     stashing.cu    PipeDream and PipeDream-2BW, which update without waiting for the pipeline to be empty
//     simulator.cu   when everything happens, for given durations
//     runner.cu      a table on the communicators
#pragma once

#include "parallel/comm/comm.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// ---------------------------------------------------------------------------------------------------------------------
// table.cu

enum class Do : uint8_t {
    forward,             // F
    backward,            // the gradients by input and by weight at once
    backward_input,      // B
    backward_weight,     // W
    send_activation,     // the output of this stage's forward, to the next stage's rank
    receive_activation,  // the input of this stage's forward
    send_gradient,       // the gradient of this stage's input, to the rank of the stage before
    receive_gradient,    // the gradient of this stage's output
    update,              // asynchronous schedules: a new version of the rank's weights
};

struct Action {
    Do what;
    int micro = 0, stage = 0;
    // Asynchronous schedules. Of computing: with which weights, counted in the updates that made them since the table
    // began (version 0 is there at its beginning). Of an update: the version that it makes, out of the one before (and
    // micro is the last micro-batch whose gradient is in it). Otherwise, and of messages: 0.
    int version = 0;
    int peer = -1;  // of messages: the rank at the other end
    bool operator==(const Action&) const = default;
};
inline bool computes(Do what) { return what <= Do::backward_weight; }
inline bool is_input_gradient(Do what) { return what == Do::backward || what == Do::backward_input; }
inline bool is_weight_gradient(Do what) { return what == Do::backward || what == Do::backward_weight; }
inline bool sends(Do what) { return what == Do::send_activation || what == Do::send_gradient; }
inline bool receives(Do what) { return what == Do::receive_activation || what == Do::receive_gradient; }

enum class Placement : uint8_t { loop, vee, both_ways };

struct PipelineSchedule {
    std::string name;
    int p = 1, m = 1;  // ranks, micro-batches
    int n_stages = 1;  // S
    Placement placement = Placement::loop;
    bool splits_backward = false;  // into backward_input and backward_weight
    bool forward_only = false;     // an evaluation: no backwards
    bool asynchronous = false;     // has updates: one of the gradients of every per_update micro-batches
    int per_update = 0;
    // By rank: versions of the weights that it keeps, always the newest ones: version v is there while
    // newest - versions[rank] < v <= newest. Synchronous: 1.
    std::vector<int> versions;
    std::vector<std::vector<Action>> ranks;

    int rank_of(int stage, int micro) const;
    std::vector<int> stages_of(int rank) const;  // ascending
    // Messages of a forward, or of a gradient by input: the rank that sends what it waits for, and the rank that waits
    // for what it computes; -1 where there is none, or it is the same rank. Then the messages themselves.
    int sender_to(const Action& action) const;
    int receiver_of(const Action& action) const;
    Action receive_for(const Action& action) const;
    Action send_of(const Action& action) const;
};

Action receive_of(const Action& send, int from);  // the other end of a send

// For errors and traces: "F3 of stage 1" (F, B, W, BW), "send B3 of stage 1 to rank 0", "update 4 of stage 1".
std::string action_text(const Action& action);

// Schedules below give only computing and updates. This adds the messages: each send right after the action whose
// result it takes; each receive before the action that its rank computes when it is sent, if all durations are equal:
// so it travels during that, and on each link (from rank a to rank b) receives are in the order of the sends. Error for
// a table in which a rank would wait for ever.
void add_messages(PipelineSchedule& schedule);

// What is alive on a rank at once, at most. Computing action by computing action, in the order of the table: what a
// forward saves is there from its beginning until the end of the stage's backward (of backward_weight where that comes
// later).
struct Alive {
    std::vector<int> micro_batches;  // by stage of stages_of(rank): forwards whose backward has not been done
    int in_all = 0;                  // the same of all stages of the rank together: the largest sum
    int weight_gradients = 0;        // pairs (micro-batch, stage) between backward_input and backward_weight
};
Alive alive(const PipelineSchedule& schedule, int rank);
// The largest sum of weight_of(stage) over the (micro-batch, stage) pairs that are alive at once on this rank.
int64_t peak_alive(const PipelineSchedule& schedule, int rank, const std::function<int64_t(int stage)>& weight_of);

// ---------------------------------------------------------------------------------------------------------------------
// validity.cu

// Error, with the rank, the action and the reason, for a table that cannot be executed: a rank or stage that does not
// exist; an action twice, or missing; a backward before its forward, a weight's gradient before its backward; a message
// without its other end, or in another order there; a deadlock (all ranks wait); a version of the weights that is not
// there yet, or is gone; gradients of micro-batches that an update should have and has not; weights' gradients of a
// stage not in the order of the micro-batches (the order in which their sums are formed, the same in all schedules).
void check_schedule(const PipelineSchedule& schedule);

// ---------------------------------------------------------------------------------------------------------------------
// simulator.cu

// Durations of a stage, in any unit.
struct StageTimes {
    double forward = 1, backward_input = 1, backward_weight = 1;
};
struct Times {
    std::vector<StageTimes> stages = {{}};  // one for all, or one a stage
    double message = 0;                     // from the end of the action that makes it to when it can be used
    double update = 0;
    const StageTimes& of(int stage) const { return stages[stages.size() == 1 ? 0 : static_cast<size_t>(stage)]; }
    double of(const Action& action) const;  // of computing and updates
};
struct Span {
    Action action;  // computing or update
    double start = 0, end = 0;
};
struct Simulation {
    std::vector<std::vector<Span>> ranks;  // in the order of the table
    double end = 0;                        // the last action's
    // Share of the time in which ranks do nothing, the mean of all ranks. The time is that from a rank's first to its
    // last action, of the rank where that is longest (Qi et al. 2023): a rank that is ready begins the next step.
    double bubble = 0;
    // (rank, place in ranks[rank]) of the actions that the end waits for, one after the other.
    std::vector<std::pair<int, size_t>> critical_path;
};
Simulation simulate(const PipelineSchedule& schedule, const Times& times);
// The bubble of spans, simulated or measured.
double bubble_of(const std::vector<std::vector<Span>>& ranks);

// ---------------------------------------------------------------------------------------------------------------------
// The schedules. All of them give each stage's weights' gradients in the order of the micro-batches.

struct ScheduleOptions {
    std::string name = "1f1b";
    int p = 1, m = 1;
    int chunks = 2;              // interleaved: stages a rank
    bool vertical_sync = false;  // pipedream
    int per_update = 0;          // 2bw: micro-batches of a step
    Times times;                 // auto: what is measured
    int max_alive = 0;           // auto: micro-batches alive on a rank at once, at most; 0: min(p, m), as 1f1b has them
};

// Each gives only computing and updates: make_schedule() adds the messages.
// schedules.cu
PipelineSchedule naive(const ScheduleOptions& options);  // one micro-batch after the other: one stage is busy
PipelineSchedule gpipe(const ScheduleOptions& options);  // all forwards, then all backwards
PipelineSchedule one_f_one_b(const ScheduleOptions& options);
PipelineSchedule interleaved(const ScheduleOptions& options);
// zero_bubble.cu
PipelineSchedule zero_bubble_h1(const ScheduleOptions& options);
PipelineSchedule zero_bubble_h2(const ScheduleOptions& options);
PipelineSchedule zero_bubble_v(const ScheduleOptions& options);
// search.cu: one stage per rank. Of the tables that its search finds, and those above with one stage per rank, as far
// as they keep to max_alive: the one whose longest time of a rank, from its first to its last action, is the shortest.
PipelineSchedule auto_schedule(const ScheduleOptions& options);
// dual_pipe.cu
PipelineSchedule dual_pipe(const ScheduleOptions& options);
PipelineSchedule dual_pipe_v(const ScheduleOptions& options);
// stashing.cu: with updates; one table is several steps.
PipelineSchedule pipedream(const ScheduleOptions& options);      // a step is one micro-batch
PipelineSchedule pipedream_2bw(const ScheduleOptions& options);  // a step is per_update micro-batches
// How old each gradient is, by stage and micro-batch: the updates between the weights with which it was computed and
// those from which it is subtracted. 0: not stale; everywhere 0 where the table has no updates.
std::vector<std::vector<int>> staleness(const PipelineSchedule& schedule);
// A table without actions for these options, for the functions above to fill.
PipelineSchedule empty_schedule(const ScheduleOptions& options, Placement placement, int n_stages);

constexpr int64_t kMostPairs = 1 << 22;  // of a micro-batch and a stage, in a table
// With messages, and checked. Error for a name that does not exist (lists those that do), and for numbers that the
// schedule cannot have, with those that it can.
PipelineSchedule make_schedule(const ScheduleOptions& options);
const std::vector<std::string>& schedule_names_of_pipelines();
int64_t stages_per_rank(const ScheduleOptions& options);
bool is_asynchronous_pipeline(const std::string& name);  // has updates; false for a name that does not exist
// For an evaluation: only forwards, of m micro-batches, with the same stages and placement.
PipelineSchedule forward_schedule(const PipelineSchedule& like, int m);

// ---------------------------------------------------------------------------------------------------------------------
// runner.cu: executes a table on one rank.

// What the stages of a rank do. Tensors at the borders of stages are of one shape (rows, columns).
class StageWork {
  public:
    virtual ~StageWork() = default;
    // in: what the stage before gave; of stage 0 memory of the same shape, to be filled. It stays until the end of this
    // (micro-batch, stage)'s backward. out: for the next stage; at the last one it stays until the backward.
    virtual void forward(const Action& action, Tensor in, Tensor out, cudaStream_t stream) = 0;
    // backward, or backward_input: dout -> din, in place: dx is both. At the last stage it holds nothing before. At
    // stage 0 it stays until the end of the backward (backward_weight where that comes later).
    virtual void backward(const Action& action, Tensor dx, cudaStream_t stream) = 0;
    virtual void backward_weight(const Action& action, cudaStream_t stream) = 0;
    virtual void update(const Action& action, cudaStream_t stream) = 0;
};

// Tensors at the stages' borders that a rank needs at once.
int border_tensors(const PipelineSchedule& schedule, int rank);
// How far all ranks can go in their lists without a backward: to their first one; or, where that comes first, to the
// first receive of a message that its sender sends after such a place.
std::vector<size_t> places_before_backward(const PipelineSchedule& schedule);
// Messages that a rank sends in a table.
int64_t messages_sent(const PipelineSchedule& schedule, int rank);

class Borders;  // which tensors at the borders the actions use
class PipelineRunner {
  public:
    // For tables with these links. Collective over pp.
    PipelineRunner(Comm& pp, const PipelineSchedule& schedule);
    ~PipelineRunner();
    PipelineRunner(const PipelineRunner&) = delete;
    PipelineRunner& operator=(const PipelineRunner&) = delete;
    // n: the most that border_tensors() says of the tables to come.
    void take_memory(int n, int64_t rows, int64_t columns, DType dtype, Arena& arena);
    // Puts all of this rank's actions on their streams. Computing is on `stream`, which has done it all afterwards;
    // messages of each link (from one rank to another) are on a stream and a communicator of their own.
    void run(const PipelineSchedule& schedule, StageWork& work, cudaStream_t stream);
    // The same in parts: the actions before place `until` of this rank's list; and what is left.
    void begin(const PipelineSchedule& schedule);
    void advance(size_t until, StageWork& work, cudaStream_t stream);
    // Instead of going on: from the first action again. All ranks have advanced to the places `until` of their lists;
    // messages of what was done for nothing are received and forgotten.
    void begin_again(const std::vector<size_t>& until, cudaStream_t stream);
    int most_borders() const { return most_borders_; }  // tensors at the borders that a table has used
    int64_t messages_sent() const { return messages_sent_; }

  private:
    struct Link;
    Link& link(int from, int to);
    Tensor row(int index) const { return rows_[static_cast<size_t>(index)]; }
    void begin_use(int row, cudaStream_t stream);
    void end_use(int row, cudaStream_t stream);
    void send(const Action& action, int row);
    void receive(const Action& action, int row);
    void await(int row);
    void execute(const Action& action, StageWork& work, cudaStream_t stream);

    Comm& pp_;
    std::map<std::pair<int, int>, std::unique_ptr<Link>> links_;  // that this rank is an end of
    std::vector<Tensor> rows_;                                    // (rows, columns), each aligned as kernels need it
    std::vector<cudaEvent_t> used_;                               // by row: the end of its last use
    std::vector<Link*> awaited_;                                  // by row: where its message is still to be received
    const PipelineSchedule* schedule_ = nullptr;                  // what is executed
    size_t done_ = 0;                                             // this many of its actions
    std::unique_ptr<Borders> borders_;
    int most_borders_ = 0;
    int64_t messages_sent_ = 0;
};
