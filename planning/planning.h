// planning/planning.h: what a training run takes: bytes, floating-point operations, seconds, messages. Before anything
// is taken (./train_gpt --plan), at the start of a run, and at its end beside what was measured.
//
// Files, in reading order:
//     memory.cu    weights, gradients, optimizer states, activations: bytes by kind and by ZeRO stage
//     time.cu      FLOPs and bytes of a step, and the seconds that they take on a device
//     step_account.cu  a step launch by launch, grouped: where its time goes
//     rates.h, rates.cu   the device's rates, measured
//     tensor_bill.cu   what tensor parallelism sends
//     pipeline_plan.cu   what each rank of a pipeline has
//     account.cu   a run on many ranks: measured bytes beside the formulas
//     pipeline_text.cu      --draw: schedules of pipelines in the terminal
//     pipeline_picture.cu   as PNG
//     pipeline_trace.cu     for Perfetto
//     pipeline_run.cu       a run of a pipeline beside what was predicted
#pragma once

#include "parallel/comm/transport.h"
#include "planning/rates.h"
#include "training/training.h"

// memory.cu
void print_memory(Memory& memory);  // the arenas, with the tensors that take at least a hundredth of all
void print_plan(Trainer& trainer);  // --plan: memory, FLOPs and time of this run; nothing has been allocated

// time.cu
struct DeviceSpec {
    const char* name;
    // Dense rates in FLOP/s, without sparsity, as the makers state them; float32 without tensor cores, because our
    // float32 products are not cut to TF32; 16 bits with sums in float32. fp8 = 0: the device has none.
    double f32, f16, fp8;
    bool multiplies_bf16 = true;  // its tensor cores do; otherwise bf16 is no faster than float32
    double bytes_per_s, bytes;    // of its memory
    const char* source;
    // What large products of random 16-bit numbers, and copies, reach.
    double reached_f16, reached_bytes;
    const char* reached_source;
    // Of a CPU: all kernels but the products take this many times as long as a copy of their bytes, at least and at
    // most, and no product runs meanwhile. 0, a GPU: as long as the copy, and products may run at the same time.
    double rest_least = 0, rest_most = 0;
    int sm_count = 0;          // streaming multiprocessors
    int block_shared_kib = 0;  // shared memory that a block may ask for
    bool is_hopper = false;
    double rate(DType dtype) const {
        return dtype == DType::f32 || (dtype == DType::bf16 && !multiplies_bf16) ? f32 : f16;
    }
    double reached_rate(DType dtype) const { return reached_f16 / f16 * rate(dtype); }  // float32: the same share
};
DeviceSpec device_spec(const std::string& name, DType dtype);  // --device-spec; "this" is measured
void expect_device_spec(const std::string& name);              // Error for a --device-spec that does not exist
void print_time(Trainer& trainer);  // the plan's part on FLOPs, bytes moved and seconds of a step

// step_account.cu: --account: every launch of a step with what it moves, computes and takes. The step is captured and
// never runs. With --out also as account.md, account.png and launches.tsv. Ends the use of this Trainer.
void print_step_account(Trainer& trainer);
// Before the Trainer of an account: from now on the CPU device divides work as the GPU of this --device-spec does, and
// chooses products like it. What never runs may do so.
void stand_in_for(const std::string& device_spec);

// tensor_bill.cu: bytes that all ranks of a group that divides the layers send together: for these visits with a
// micro-batch of N tokens; and once a step, for gradients that ranks have parts of.
struct TensorTraffic {
    int64_t visits, shared_gradients;
};
TensorTraffic tensor_traffic(const Model& model, int64_t N, const std::vector<Visit>& visits, bool selective);
// --plan: what a rank has and sends in each geometry that this many ranks can have, with the time on NVLink and
// InfiniBand.
void print_tensor_bills(const Trainer& trainer);

// pipeline_plan.cu: --plan with --pp: a row for each rank of a pipeline.
void print_pipeline_plan(const Trainer& trainer);
std::pair<int, double> largest_pipeline_rank(Trainer& trainer);  // which takes most on its device, and about how much

// account.cu: at the end of a run on many ranks. step: what this rank sent and received in one step; only_trains: that
// step followed another one, and no sample or evaluation, so that the formula holds. Collective; rank 0 prints.
void print_account(Trainer& trainer, const Traffic& step, bool only_trains, const CommTime& time);
// Bytes that all ranks together send in a step, which may be more than 2^63.
__int128 expected_traffic(const Trainer& trainer);
// Does that hold for these options?
bool traffic_is_known(const Trainer& trainer);
std::vector<Visit> visits_of_micro_batch(const Model& model, const Recompute& recompute);  // forward and backward

// ---------------------------------------------------------------------------------------------------------------------
// pipeline_text.cu

struct DrawnPipeline {
    PipelineSchedule schedule;
    Times times;
    Simulation simulation;
};
// --draw: in the terminal, and with --out as schedule.png and schedule.json. The last line, of one schedule, is
// pipeline_summary().
void draw_pipelines(const TrainOptions& options);
// --pipeline with --micro-batches, timed by --times. Error for numbers that the schedule cannot have.
DrawnPipeline simulated_pipeline(const TrainOptions& options);
// A row a rank, of `width` characters at most: longer ones go on below. Times begin at 0. colored: for terminals.
std::string pipeline_drawing(const PipelineSchedule& schedule, const std::vector<std::vector<Span>>& ranks,
                             size_t width, bool colored);
// "1f1b p 4 m 8: bubble 0.2727, peak activations 4 3 2 1, weight versions 1 1 1 1": the last line of --draw, which
// scripts read.
std::string pipeline_summary(const PipelineSchedule& schedule, double bubble);
double end_of(const std::vector<std::vector<Span>>& ranks);  // of the last span
// By rank: activations that it keeps at most, in units of what a micro-batch leaves on a rank.
std::vector<double> peak_activations(const PipelineSchedule& schedule);
// staleness() as a table, of micro-batches that fit into width characters.
std::string staleness_table(const PipelineSchedule& schedule, size_t width);
// Which of a rank's stages an action belongs to: 0, 1, ...; with DualPipe: which way the micro-batch goes.
int pipeline_chunk(const PipelineSchedule& schedule, int rank, const Action& action);

// pipeline_picture.cu: panels one below the other, with the same time a pixel. Times begin at 0.
struct PipelinePanel {
    std::string title, subtitle;
    const PipelineSchedule* schedule;
    const std::vector<std::vector<Span>>* ranks;
    std::vector<std::pair<int, size_t>> critical_path = {};  // outlined; of a run it is not known
    bool seconds = false;                                    // what the times are; otherwise they have no unit
    bool may_be_cut = false;  // at the right, where it takes more than 1.5 times as long as the shortest
};
void write_pipeline_panels(const std::string& path, const std::vector<PipelinePanel>& panels);
// Their bubble, activations and versions.
std::string panel_subtitle(const PipelineSchedule& schedule, double bubble);
std::vector<PipelinePanel> schedule_panels(const std::vector<DrawnPipeline>& drawn);

// pipeline_trace.cu: Chrome's trace format: a process for each panel, with a row per rank.
void write_pipeline_trace(const std::string& path, const std::vector<PipelinePanel>& panels);

// pipeline_run.cu: --trace with --pp.
// By rank of the pipeline, whose ranks of the world are given: its actions in these events, which are those of one
// table, or of a part of it. In seconds; the first begins at 0.
std::vector<std::vector<Span>> traced_spans(const std::vector<TraceEvent>& events, const PipelineSchedule& schedule,
                                            const std::vector<int>& world_ranks);
// The mean durations of the stages' actions, and the median of the messages that a rank has waited for.
Times measured_times(const PipelineSchedule& schedule, const std::vector<std::vector<Span>>& measured);
struct ComparedPipeline {
    PipelineSchedule schedule;
    Times times;                                         // measured
    std::vector<std::vector<Span>> predicted, measured;  // the same actions: simulated with these times, and traced
    std::vector<std::pair<int, size_t>> critical_path;   // of the prediction, where all actions were traced
};
ComparedPipeline compare_pipeline(const PipelineSchedule& schedule, const std::vector<std::vector<Span>>& measured);
// FOLDER/pipeline.png and pipeline.json: predicted above measured, on one axis of time.
void write_pipeline_picture(const std::string& folder, const ComparedPipeline& both);
// What a run keeps of its pipeline for the trace, which is written when all ranks have ended.
struct TracedPipeline {
    PipelineSchedule schedule;
    std::vector<int> world_ranks;
    std::string folder;
};
// Collective over the ranks of a pipeline; rank 0 of the world notes its own. Without --pp there is nothing to note.
void note_traced_pipeline(Trainer& trainer, TracedPipeline& traced);
// The picture of the last step in these events, and a line on its bubble. Nothing where no pipeline was noted.
void show_traced_pipeline(const TracedPipeline& pipeline, const std::vector<TraceEvent>& events);
// What each rank of rank 0's pipeline was planned to keep and send, and did. Collective.
void print_pipeline_traffic(const Trainer& trainer);
