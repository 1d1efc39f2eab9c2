// ranks.cu: starts the ranks, gives each its device and its transport, and ends the job when one of them fails.
#include "core/host_name.h"
#include "io/io.h"
#include "parallel/comm/transport.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <system_error>
#include <thread>

namespace {

// What mpirun tells the processes that it starts, as environment variables: that of Open MPI; of MPICH and Intel MPI.
const char* launcher_value(const char* open_mpi, const char* mpich) {
    const char* value = std::getenv(open_mpi);
    return value ? value : std::getenv(mpich);
}

#ifdef CUDA_ON_CPU
constexpr bool kCpuDevice = true;
#else
constexpr bool kCpuDevice = false;
#endif

// Each rank gets its share of the cores, which are a CPU device or run the updates of --offload (offload.cu), unless
// OMP_NUM_THREADS says otherwise.
void share_cores(int n_ranks_here) {
    if (!std::getenv("OMP_NUM_THREADS")) omp_set_num_threads(std::max(1, omp_get_num_procs() / n_ranks_here));
}

int ranks_here(const RankState& state) {
    return static_cast<int>(
        std::count(state.node.begin(), state.node.end(), state.node[static_cast<size_t>(state.rank)]));
}

// Ranks of one machine get its devices in turn.
int sharers_of_a_device(int n_ranks_here) {
    return kCpuDevice ? n_ranks_here : narrow(ceil_div(n_ranks_here, device_count()), "ranks");
}

// True on all ranks if every rank said true. Rank 0 collects the answers and sends the result.
bool all_agree(HostTransport& control, bool opinion) {
    if (control.rank() != 0) {
        control.send_host(opinion ? "1" : "0", 0);
        return control.recv_host(0) == "1";
    }
    for (int i = 1; i < control.size(); ++i) opinion = (control.recv_host(i) == "1") && opinion;
    for (int i = 1; i < control.size(); ++i) control.send_host(opinion ? "1" : "0", i);
    return opinion;
}

// Time 0 of the trace, when all ranks are there: rank 0's, on all ranks whose clock is the same.
double common_start(const RankState& state, HostTransport& control, bool processes) {
    all_agree(control, true);
    std::string zero = std::to_string(seconds_now());  // microseconds
    if (control.rank() != 0) zero = control.recv_host(0);
    else
        for (int i = 1; i < control.size(); ++i) control.send_host(zero, i);
    const bool one_clock = !processes || state.node[static_cast<size_t>(state.rank)] == state.node[0];
    return one_clock ? std::stod(zero) : seconds_now();
}

// The transport of the world, over the one that the ranks found each other with.
std::shared_ptr<Transport> choose_transport(const std::shared_ptr<RankState>& state,
                                            const std::shared_ptr<HostTransport>& control, bool processes) {
    const RankOptions& options = state->options;
    // Threads share this machine's GPUs, however many machines they pretend to be (ranks_per_node).
    const int n_here = processes ? ranks_here(*state) : state->size;
    const bool own_gpus = !kCpuDevice && all_agree(*control, state->sharers == 1);
    const std::string reason = kCpuDevice            ? "the device is the CPU"
                               : !nccl_is_built_in() ? "built without NCCL"
                               : !own_gpus           ? "ranks share a GPU"
                                                     : "";
    // The CPU device has an NCCL for tests, and for those who want to see what it does (cpu/nccl.h).
    if (options.comm == "nccl")
        check(kCpuDevice || reason.empty(), "--comm nccl is not available here: ", reason,
              "; leave --comm out, or give each rank a GPU and build with NCCL");
    const bool nccl = options.comm == "nccl" || (options.comm == "auto" && reason.empty());
    if (state->rank == 0 && !options.quiet) {
        std::printf("ranks    %d %s on %d device%s of %s; messages by %s (%s)\n", state->size,
                    processes ? "processes (MPI)" : "threads of this process", std::min(n_here, device_count()),
                    device_count() == 1 ? "" : "s", device().name.c_str(),
                    nccl        ? "NCCL"
                    : processes ? "MPI"
                                : "memory",
                    options.comm != "auto" ? "--comm"
                    : nccl                 ? "every rank has a GPU of its own"
                                           : reason.c_str());
        std::fflush(stdout);
    }
    if (nccl) return make_nccl_transport(state, control);
    return control;
}

// One rank, from its first message to its last. options: the caller's, whose trace_folder f may set.
void run_rank(const RankOptions& options, const std::shared_ptr<RankState>& state,
              const std::shared_ptr<HostTransport>& control, bool processes, const std::function<void(Comm&)>& f) {
    control->name = "the start";
    state->started = common_start(*state, *control, processes);
    state->meet_hosts = [&] { all_agree(*control, true); };
    {
        Comm world("world", state, choose_transport(state, control, processes));
        f(world);
        cudaCheck(cudaDeviceSynchronize());  // what is still in streams may be what others wait for
        if (state->job->failed()) throw Stopped(state->job->reason());
        // No rank ends before all have come here, so the watchdog finds one that hangs. And NCCL destroys a world when
        // all of its ranks have come to that.
        control->name = "the end";
        all_agree(*control, true);
    }
    if (!processes || !state->trace) return;
    if (state->rank != 0) return control->send_host(pack_events(state->trace->take()), 0);
    std::vector<TraceEvent> events = state->trace->take();
    for (int i = 1; i < state->size; ++i)
        for (const TraceEvent& event : unpack_events(control->recv_host(i))) events.push_back(event);
    write_trace(options.trace_folder, events);
    if (options.after_trace) options.after_trace(events);
}

void run_as_process(const RankOptions& options, const std::function<void(Comm&)>& f) {
    auto state = std::make_shared<RankState>();
    state->options = options;
    state->job = std::make_shared<Job>();
    if (!options.trace.empty()) state->trace = std::make_shared<Trace>();
    state->traced_steps = traced_steps(options.trace);
    state->tracing = state->traced_steps.count(0) > 0;
    auto control = make_mpi_transport(state);
    // The other processes cannot be told; they can be ended. mpirun does that also if this one is killed.
    state->job->on_failure = [&ranks = *state](const std::string& reason) {
        const bool several = std::ranges::any_of(ranks.node, [](int node) { return node != 0; });
        std::fflush(stdout);
        std::fprintf(stderr, "%s\n", (several ? concat("host ", host_name(), ", ", reason) : reason).c_str());
        std::fflush(stderr);
        mpi_abort();
    };
    try {
        check(state->size == rank_count(options), "the environment says that mpirun has started ", rank_count(options),
              " processes, and MPI finds ", state->size,
              ": unset OMPI_COMM_WORLD_SIZE and PMI_SIZE, or start the program with the mpirun of the MPI that it was "
              "built with");
        share_cores(ranks_here(*state));
        open_device(mpi_local_rank() % device_count());
        state->sharers = sharers_of_a_device(ranks_here(*state));
        run_rank(options, state, control, true, f);
        control.reset();
    } catch (const std::exception& error) {
        state->job->fail(state->rank, reason_of(error));
    }
    mpi_finish(options.timeout_s);
}

// What all ranks of this process share.
struct ThreadJob {
    const RankOptions& options;
    const int n;
    const std::shared_ptr<ThreadWorld> world;
    const std::shared_ptr<Job> job;
    const std::shared_ptr<Trace> trace;
};

std::shared_ptr<RankState> state_of_thread(const ThreadJob& all, int rank) {
    const int per_node = all.options.ranks_per_node > 0 ? all.options.ranks_per_node : all.n;
    auto state = std::make_shared<RankState>();
    state->rank = rank;
    state->size = all.n;
    state->sharers = sharers_of_a_device(all.n);
    state->options = all.options;
    state->job = all.job;
    state->trace = all.trace;
    state->traced_steps = traced_steps(all.options.trace);
    state->tracing = all.trace && state->traced_steps.count(0) > 0;
    for (int i = 0; i < all.n; ++i) {
        state->node.push_back(i / per_node);
        state->slots.push_back(thread_slot(*all.world, i));
    }
    return state;
}

void run_thread(const ThreadJob& all, int rank, const std::function<void(Comm&)>& f) {
    const bool own_thread = all.n > 1;
    try {
        const auto state = state_of_thread(all, rank);
        if (own_thread) {
            share_cores(all.n);
            open_device(rank % device_count());
        }
        run_rank(all.options, state, make_thread_transport(all.world, state), false, f);
    } catch (const Stopped&) {  // because of another rank, or noted already
    } catch (const std::exception& error) {
        all.job->fail(rank, reason_of(error));
    }
    if (own_thread) close_device();
}

// A thread cannot be ended from outside, only the process. One that computes for long, or hangs, while another rank has
// failed would keep it.
void wait_for_threads(const ThreadJob& all, std::mutex& mutex, std::condition_variable& changed, const int& n_ended) {
    std::unique_lock lock(mutex);
    double failed_at = 0;
    while (n_ended < all.n) {
        changed.wait_for(lock, std::chrono::milliseconds(100));
        if (failed_at == 0 && all.job->failed()) failed_at = seconds_now();
        if (failed_at == 0 || seconds_now() - failed_at < 10) continue;
        std::fprintf(stderr, "%s\n%d of %d ranks have not ended within 10 s: stopping the process\n",
                     all.job->reason().c_str(), all.n - n_ended, all.n);
        std::fflush(nullptr);
        std::_Exit(2);
    }
}

void run_as_threads(const RankOptions& options, int n, const std::function<void(Comm&)>& f) {
#ifdef CUDA_ON_CPU
    if (device_count() < n) setenv("CUDA_CPU_DEVICES", std::to_string(n).c_str(), 1);
#endif
    const ThreadJob all{options, n, make_thread_world(n), std::make_shared<Job>(),
                        options.trace.empty() ? nullptr : std::make_shared<Trace>()};
    if (n == 1) {
        run_thread(all, 0, f);
    } else {
        std::mutex mutex;
        std::condition_variable changed;
        int n_ended = 0;
        std::vector<std::thread> threads;
        const auto run = [&](int rank) {
            run_thread(all, rank, f);
            const std::lock_guard lock(mutex);
            ++n_ended;
            changed.notify_all();
        };
        try {
            for (int rank = 0; rank < n; ++rank) threads.emplace_back(run, rank);
        } catch (const std::system_error& error) {  // those that have started must end, and be joined
            const int n_started = narrow(std::ssize(threads), "threads");
            all.job->fail(n_started, concat("cannot start a thread: ", error.what(), "; use fewer --ranks, or allow ",
                                            "more processes (ulimit -u) or memory (ulimit -v)"));
            const std::lock_guard lock(mutex);
            n_ended += n - n_started;
        }
        wait_for_threads(all, mutex, changed, n_ended);
        for (std::thread& thread : threads) thread.join();
    }
    const bool failed = all.job->failed();
    std::string reason = failed ? all.job->reason() : "";
    if (failed && n == 1) reason = reason.substr(std::string("rank 0: ").size());
    try {
        if (all.trace) {
            const std::vector<TraceEvent> events = all.trace->take();
            write_trace(options.trace_folder, events);
            if (options.after_trace && !failed) options.after_trace(events);
        }
    } catch (const std::exception& error) {  // a full disk, from which the job has failed, too
        if (!failed) throw;
        reason += concat(". There is no trace of it: ", reason_of(error));
    }
    if (failed) throw Error(reason);
}

void run_as_plan(const RankOptions& options, int n, const std::function<void(Comm&)>& f) {
    if (!is_first_process()) return;
    const ThreadJob all{options, n, make_thread_world(n), std::make_shared<Job>(), nullptr};
    const auto state = state_of_thread(all, 0);
    Comm world("world", state, make_plan_transport(state));
    f(world);
}

}  // namespace

bool started_by_mpirun() { return launcher_value("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") != nullptr; }

int rank_count(const RankOptions& options) {
    const char* size = launcher_value("OMPI_COMM_WORLD_SIZE", "PMI_SIZE");
    if (!size) return std::max(1, options.ranks);
    const int n = std::atoi(size);
    check(n >= 1, "the environment says that mpirun has started \"", size,
          "\" processes: unset OMPI_COMM_WORLD_SIZE and PMI_SIZE, or start the program with mpirun");
    return n;
}

bool is_first_process() {
    const char* rank = started_by_mpirun() ? launcher_value("OMPI_COMM_WORLD_RANK", "PMI_RANK") : nullptr;
    return !rank || std::atoi(rank) == 0;
}

void check_rank_options(const RankOptions& options) {
    const std::string& comm = options.comm;
    check(comm == "auto" || comm == "threads" || comm == "mpi" || comm == "nccl", "--comm ", comm,
          ": use auto, threads, mpi or nccl");
    const int most = options.planning ? kMostPlannedRanks : kMostRanks;
    check(options.ranks >= 0 && options.ranks <= most, "--ranks ", options.ranks, ": a number of ranks from 1 to ",
          most);
    check(options.timeout_s > 0, "--comm-timeout ", options.timeout_s, ": seconds, more than 0");
    check(options.ranks_per_node >= 0, "--ranks-per-node ", options.ranks_per_node, ": use 1 or more, or 0 for all");
    all_reduce_from_name(options.all_reduce);
    traced_steps(options.trace);
    if (options.planning) return;
    const bool mpi = started_by_mpirun();
    check(!mpi || options.ranks == 0 || options.ranks == rank_count(options), "--ranks ", options.ranks,
          " under an mpirun of ", rank_count(options), " processes: leave --ranks out");
    check(!(mpi && comm == "threads"), "--comm threads under mpirun: start the program without mpirun, with --ranks N");
    check(!(mpi && comm == "nccl" && kCpuDevice),
          "--comm nccl under mpirun: on the CPU device NCCL is for ranks that are "
          "threads of one process: start the program without mpirun, with --ranks N");
    check(!(!mpi && comm == "mpi"), "--comm mpi: start the program with mpirun -np N");
}

// trace_folder is read when all ranks have ended: until then f may say which folder the traces go to, on rank 0.
void run_ranks(const RankOptions& options, const std::function<void(Comm& world)>& f) {
    check_rank_options(options);
    if (options.planning) run_as_plan(options, rank_count(options), f);
    else if (started_by_mpirun()) run_as_process(options, f);
    else run_as_threads(options, std::max(1, options.ranks), f);
}
