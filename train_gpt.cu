// train_gpt.cu: trains a GPT-2, LLaMA, Qwen or DeepSeek-like model.
//
//   run      make && ./train_gpt              a small LLaMA on the C++ headers of this machine
//            ./train_gpt --data shakespeare.txt --out runs/shakespeare    (--help lists all flags)
//   debug    make debug && gdb -x cpu/cuda.gdb --args build/cpu-debug/train_gpt --steps 2
//
// A run is prepare, loop, finish. The body of the loop is one training step: train_step, below.
#include "planning/planning.h"
#include "training/training.h"

#include <atomic>
#include <cstdio>

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// One training step, which is the algorithm. Each call is a function of training/step.cu. It is launched here; how it
// ended is read by finish_step.

void begin_step(Trainer& t, int64_t step) {
    t.world.set_step(step);         // for traces and error messages
    t.data_parallel.start_clock();  // measures the collectives
}

void train_step(Trainer& t, const BatchReader& data, int64_t step) {
    begin_step(t, step);
    read_batch(t, data, step);  // sequences [(step - 1) batch, step batch) of the run; each rank reads its share
    launch_as_graph(t, step, [&] {
        accumulate_gradients(t, step);  // for each micro-batch: forward, scaled loss, backward, in --dtype
        clip_gradients(t, step);        // norm of all; unscale, check, clip: on the device
    });
    update_weights(t, step);   // the optimizer's step in float32, and its 16-bit copy for the next forward
    t.world.end_step();        // for traces: evaluation and samples are not a part of it
    request_numbers(t, step);  // loss and norm; a norm that is not finite: nothing was updated
}

// ---------------------------------------------------------------------------------------------------------------------
// A run

struct Run {
    Trainer& trainer;
    const RunData& data;
    std::unique_ptr<RunFolder> folder = {};  // rank 0's, as the log
    std::optional<RunLog> log = {};
    int64_t first_step = 0;     // steps made before, by the run that is resumed
    int64_t step = 0;           // steps made
    int64_t launched = 0;       // the last one that was launched
    double matmul_rate = 0;     // FLOP/s of a large product on this device: what the step's FLOP/s are held against
    size_t free_before = 0;     // bytes of the device before memory was taken
    double start = 0;           // seconds_now() before the first step
    Traffic step_traffic = {};  // of one step
    bool only_trains = false;   // that step followed another: a sample or an evaluation leaves weights of ZeRO 3 behind
    CommTime comm_time = {};    // of the last step
    bool is_first() const { return trainer.world.rank == 0; }  // the rank that prints and writes
};

// The weights of the first step: of the checkpoint, of --init, or random.
int64_t set_weights(Trainer& t) {
    const TrainOptions& o = t.options;
    int64_t step = 0;
    t.world.patiently([&] {
        if (o.resume) step = resume_run(t);
        else if (!o.init.empty()) load_weights(t.model, o.init);
        else init_weights(t.model, static_cast<uint64_t>(o.seed));
    });
    quantise_weights(t.model, device().stream);
    note_saved(o, step, step == o.steps);
    return step;
}

// What the weights of --init are worth: a row for step 0, with nothing but a validation loss.
bool evaluates_init(const Run& run) {
    const TrainOptions& o = run.trainer.options;
    return !o.init.empty() && !o.resume && o.val_every > 0 && run.data.val;
}
std::optional<LogRow> evaluate_init(const Run& run) {
    if (!evaluates_init(run)) return {};
    LogRow row;
    row.val_loss = evaluate(run.trainer, *run.data.val, run.trainer.options.val_sequences);
    return row;
}

// Folder, memory, weights and logs. What can be wrong with flags, model and data has been found before (open_model,
// open_run), and what is wrong with weights or a checkpoint is found here, before the log begins: a folder without one
// can be given again.
void prepare(Run& run, Mesh& mesh) {
    Trainer& t = run.trainer;
    const TrainOptions& o = t.options;
    run.folder = settle_folder(t, run.data);
    if (run.is_first()) {
        if (t.world.size > 1) std::printf("%s", mesh.picture().c_str());
        print_start(t, run.data);
        print_memory(t.memory);
        std::fflush(stdout);  // also where it is a pipe: what comes now may take long
        run.matmul_rate = measure_matmul_rate(o.precision.dtype);
    }
    run.free_before = device_memory().free;
    t.reserve();
    t.world.meet_hosts();  // no collective before all have their memory
    run.step = run.first_step = set_weights(t);
    choose_matmuls(t, run.data.train);
    if (!o.resume) print_sample(t, run.data, "sample before training");
    const std::optional<LogRow> of_init = evaluate_init(run);
    if (!run.is_first()) return;
    run.log.emplace(o.out, o.resume ? run.step : -1);
    if (!of_init) return;
    run.log->write(*of_init);
    print_val_loss_of_init(*of_init, o.steps);
}

// The next step that the run makes, and while the device works on it what can be done of the one after
// (training/boundary.cu).
StepResult finish_step(Run& run, int64_t step) {
    Trainer& t = run.trainer;
    const BatchReader& data = run.data.train;
    // Pipelines whose ranks do not wait for each other between steps do the same in another order.
    if (t.pipeline && t.pipeline->runs_ahead()) {
        begin_step(t, step);
        const StepResult result = t.pipeline->step(data, step);  // which may have been made with an earlier one
        t.world.end_step();
        return result;
    }
    if (run.launched < step) note_start(t), train_step(t, data, run.launched = step);
    if (may_run_ahead(t, step)) train_step(t, data, run.launched = step + 1);
    else if (step < t.options.last_step()) read_batch(t, data, step + 1);
    return read_back(t, data, step);
}

void loop(Run& run) {
    Trainer& t = run.trainer;
    const TrainOptions& o = t.options;
    bool stop = false, after_a_step = o.sample_tokens == 0 && !evaluates_init(run);
    run.start = seconds_now();
    while (!stop && run.step < o.steps) {
        const int64_t step = ++run.step;
        const double step_start = seconds_now();
        const Traffic before = t.world.traffic();
        const StepResult result = finish_step(run, step);
        const double step_end = seconds_now();
        const Traffic after = t.world.traffic();
        const StepResult::Share took = result.share.value_or(
            StepResult::Share{step_end - step_start, {after.sent - before.sent, after.received - before.received}});
        if (after_a_step || !run.only_trains) run.step_traffic = took.traffic;
        run.only_trains |= after_a_step;
        stop = result.stop || step == o.stop_after;
        if (step == o.last_step())
            run.comm_time = result.share ? result.share->collectives : t.data_parallel.read_clock();
        LogRow row = make_row(t, step, result, took.seconds, run.matmul_rate);
        const bool evaluates = run.data.val && evaluates_after(o, step);
        if (evaluates) row.val_loss = evaluate(t, *run.data.val, o.val_sequences);
        const bool best = evaluates && o.keep_best && note_best(t, step, *row.val_loss);
        after_a_step = !evaluates;
        if (run.is_first()) {
            run.log->write(row);
            const double per_step = (seconds_now() - run.start) / static_cast<double>(step - run.first_step);
            print_progress(row, o, per_step * static_cast<double>(o.steps - step));
        }
        const bool last = stop || step == o.steps;
        if (last || best || saves_after(o, step)) {
            save_checkpoint(t, step, last);
            if (run.is_first()) draw_loss(o.out);
        }
    }
    if (!run.is_first()) return;
    end_progress_line();
    run.log->write_waiting();
    if (run.step == run.first_step) draw_loss(o.out);  // a run that was killed after its last save may not have
}

void finish(Run& run) {
    Trainer& t = run.trainer;
    const TrainOptions& o = t.options;
    if (t.world.size > 1 && run.step > run.first_step)
        print_account(t, run.step_traffic, run.only_trains, run.comm_time);
    if (run.step == o.steps) print_sample(t, run.data, "sample after training");
    if (run.is_first())
        print_end(t, run.step, run.free_before - device_memory().free + device().blas_workspace_bytes,
                  seconds_now() - run.start);
}

// What the ranks of this process share.
struct Process {
    std::string fault = {};           // what is wrong with the command line, or nothing
    std::atomic<bool> starts = true;  // false where all ranks have a fault
    RunFiles files = {};
    RankOptions ranks = {};  // rank 0 sets the trace_folder, once it knows the folder of the run
    TracedPipeline traced_pipeline = {};
};

// All of a run on one rank.
void run_rank(const TrainOptions& options, Comm& world, Process& process) {
    const auto agree = [&](const std::string& fault) -> bool { return process.starts = agree_to_start(world, fault); };
    // Before all that follows from the flags: with different ones ranks would make different meshes, and wait there.
    if (started_by_mpirun()) {
        if (!agree(process.fault)) return;
        if (world.size > 1) check_same_flags(world, options);
    }
    std::vector<Axis> axes = {{"dp", static_cast<int>(options.data_ranks())}};
    if (options.pp > 1) axes.push_back({"pp", static_cast<int>(options.pp)});
    if (options.cp > 1) axes.push_back({"cp", static_cast<int>(options.cp)});
    if (options.tp > 1) axes.push_back({"tp", static_cast<int>(options.tp)});
    Mesh mesh(world, axes);
    std::optional<Trainer> trainer;
    if (options.account) stand_in_for(options.device_spec);
    const bool plans_alone = options.plan && !started_by_mpirun();  // the other ranks do not exist
    std::string fault = open_model(options, process.files);
    if (!plans_alone && !agree(fault)) return;
    if (fault.empty()) fault = open_run(options, process.files, mesh, trainer);
    if (plans_alone) {
        if (!fault.empty()) fail(fault);
        return print_plan(*trainer);
    }
    if (!agree(fault)) return;
    if (options.account) return print_step_account(*trainer);
    if (options.plan) {
        if (world.rank == 0) print_plan(*trainer);
        return;
    }
    if (!agree(trainer->memory_fault())) return;
    note_saved(options, options.resumed_step, options.resumed_step == options.steps);
    answer_signals();
    Run run{.trainer = *trainer, .data = *process.files.data};
    prepare(run, mesh);
    if (run.is_first()) process.ranks.trace_folder = run.trainer.options.out;
    note_traced_pipeline(*trainer, process.traced_pipeline);
    loop(run);
    finish(run);
}

}  // namespace

int main(int argc, char** argv) {
    keep_standard_numbers();
    end_with_reason();
    TrainOptions options;
    Process process;
    try {
        try {
            options = parse_train_options(argc, argv);
        } catch (const Error& error) {
            if (!started_by_mpirun()) throw;
            process.fault = error.what();  // every process has found it; they agree on one line (agree_to_start)
        }
        if (options.draw) {
            if (is_first_process()) draw_pipelines(options), check_output();
            return 0;
        }
        process.ranks = options.ranks;
        process.ranks.quiet = rank_count(process.ranks) == 1;
        process.ranks.after_trace = [&](const std::vector<TraceEvent>& events) {
            show_traced_pipeline(process.traced_pipeline, events);
        };
        run_ranks(process.ranks, [&](Comm& world) { run_rank(options, world, process); });
        if (options.plan || options.account) check_output();
        return process.starts ? 0 : 2;
    } catch (const std::exception& error) {
        end_progress_line();
        std::fprintf(stderr, "train_gpt: %s\n", reason_of(error));
        return 2;
    }
}
