// transport_mpi.cu: messages between processes, by MPI.
//
// A message is copied and given to MPI_Isend, so that its sender goes on at once. Its receiver asks MPI_Improbe whether
// it is there, rather than waiting in MPI_Recv: so the watchdog looks at the clock meanwhile, and a message of the
// wrong size is an error that names both sizes. Of a long message only the announcement is there then: its bytes come
// when its receiver has asked for them, and are waited for in the same way (take). All calls come from the thread that
// runs the rank. In a few of them MPI itself waits for the other ranks, and would do so for ever: MpiWatchdog.
#include "parallel/comm/transport.h"

#ifdef HAVE_MPI

#define OMPI_SKIP_MPICXX 1  // the C interface only: MPI's C++ one has been withdrawn, and would need a library more
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <system_error>
#include <thread>

namespace {

void mpi_check(int status, const char* what) {
    if (status == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(status, text, &length);
    fail("MPI: ", what, ": ", text);
}

// While it exists, a thread that ends this process when MPI has not come back after timeout_s. Before MPI has started
// and after its end no rank can tell another one anything, so it is not known who is missing. mpirun ends the others.
class MpiWatchdog {
  public:
    MpiWatchdog(std::string what, double timeout_s) {
        const auto watch = [this, what = std::move(what), timeout_s] {
            std::unique_lock lock(mutex_);
            WaitedTime time;
            double waited = time.seconds();
            for (; waited < timeout_s; waited = time.seconds())
                if (changed_.wait_for(lock, std::chrono::milliseconds(100), [&] { return is_back_; })) return;
            std::fflush(stdout);
            std::fprintf(stderr,
                         "%s: MPI has waited %.3g s for the other ranks: one of them has ended, hangs, or was started "
                         "as another program. (--comm-timeout sets how long to wait)\n",
                         what.c_str(), waited);
            std::fflush(stderr);
            std::_Exit(2);
        };
        try {
            thread_ = std::thread(watch);
        } catch (const std::system_error&) {  // a limit of threads has been reached: MPI waits unwatched
        }
    }
    MpiWatchdog(const MpiWatchdog&) = delete;
    ~MpiWatchdog() {
        {
            const std::lock_guard lock(mutex_);
            is_back_ = true;
        }
        changed_.notify_one();
        if (thread_.joinable()) thread_.join();
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_back_ = false;
    std::thread thread_;
};

constexpr double kStartTimeouts = 5;  // of --comm-timeout: all machines load the program
constexpr double kEndTimeouts = 30;   // rank 0 may still write a trace

constexpr int64_t kTags = 32768;  // as many as every MPI has. Messages of one pair do not overtake, so reuse is safe

class MpiTransport final : public HostTransport {
  public:
    MpiTransport(MPI_Comm comm, std::shared_ptr<RankState> state, std::vector<int> members, uint64_t id)
        : HostTransport(std::move(state), std::move(members), id), comm_(comm) {}
    ~MpiTransport() override {
        // After a failure messages may be stuck, and after MPI_Finalize nothing may be asked.
        int finalized = 0;
        MPI_Finalized(&finalized);
        if (finalized || state_->job->failed()) return;
        const MpiWatchdog watchdog(concat("the end of ", name), kEndTimeouts * state_->timeout_s());
        while (!all_sent()) pause();
        if (comm_ != MPI_COMM_WORLD) MPI_Comm_free(&comm_);
    }

    std::shared_ptr<Transport> split(const std::vector<int>& members) override {
        const auto me = std::find(members.begin(), members.end(), rank()) - members.begin();
        MPI_Comm part = MPI_COMM_NULL;
        const MpiWatchdog watchdog(concat("a split of ", name), kStartTimeouts * state_->timeout_s());
        mpi_check(MPI_Comm_split(comm_, members[0], static_cast<int>(me), &part), "splitting a communicator");
        return std::make_shared<MpiTransport>(part, state_, to_world(members), next_id(members));
    }

  protected:
    void post(int to, int64_t number, const void* data, size_t bytes) override {
        all_sent();  // frees what has left: on a link of a pipeline a rank only sends, and arrived() is never called
        Sending& sending = sendings_.emplace_back();
        sending.to = to;
        sending.data = std::make_unique_for_overwrite<char[]>(bytes);
        if (bytes > 0) std::memcpy(sending.data.get(), data, bytes);
        mpi_check(MPI_Isend(sending.data.get(), static_cast<int>(bytes), MPI_BYTE, to, static_cast<int>(number % kTags),
                            comm_, &sending.request),
                  "sending");
    }
    bool arrived(int from, int64_t number) override {
        all_sent();  // MPI makes progress when it is called
        if (arrived_.count({from, number})) return true;
        Arrived message;
        int there = 0;
        MPI_Status status;
        mpi_check(MPI_Improbe(from, static_cast<int>(number % kTags), comm_, &there, &message.message, &status),
                  "receiving");
        if (!there) return false;
        int bytes = 0;
        mpi_check(MPI_Get_count(&status, MPI_BYTE, &bytes), "receiving");
        message.bytes = static_cast<size_t>(bytes);
        arrived_[{from, number}] = message;
        return true;
    }
    size_t arrived_bytes(int from, int64_t number) override { return arrived_.at({from, number}).bytes; }
    void take(void* data, int from, int64_t number) override {
        const auto at = arrived_.find({from, number});
        MPI_Request request = MPI_REQUEST_NULL;
        mpi_check(MPI_Imrecv(data, static_cast<int>(at->second.bytes), MPI_BYTE, &at->second.message, &request),
                  "receiving");
        WaitedTime time;
        for (int done = 0; mpi_check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "receiving"), !done; pause()) {
            const double waited = time.seconds();
            if (waited < state_->timeout_s()) continue;
            state_->job->fail(state_->rank,
                              concat(describe(tag), " at step ", tag.step, " has waited ", waited,
                                     " s for the rest of a message from rank ", members()[static_cast<size_t>(from)],
                                     ": that rank hangs or has ended, or the network to it is broken. (--comm-timeout "
                                     "sets how long to wait)"));
        }
        arrived_.erase(at);
    }
    bool all_sent() override {
        for (auto at = sendings_.begin(); at != sendings_.end();) {
            int done = 0;
            mpi_check(MPI_Test(&at->request, &done, MPI_STATUS_IGNORE), "sending");
            at = done ? sendings_.erase(at) : std::next(at);
        }
        return sendings_.empty();
    }
    int oldest_unsent_to() override { return sendings_.empty() ? -1 : sendings_.front().to; }
    // With more processes than cores, the one that we wait for may need ours.
    void pause() override { std::this_thread::yield(); }

  private:
    struct Sending {
        int to = 0;
        std::unique_ptr<char[]> data;
        MPI_Request request = MPI_REQUEST_NULL;
    };
    struct Arrived {
        MPI_Message message = MPI_MESSAGE_NULL;
        size_t bytes = 0;
    };
    MPI_Comm comm_;
    std::list<Sending> sendings_;
    std::map<std::pair<int, int64_t>, Arrived> arrived_;
};

int local_rank = 0;

}  // namespace

bool mpi_is_built_in() { return true; }
int mpi_local_rank() { return local_rank; }

std::shared_ptr<HostTransport> make_mpi_transport(std::shared_ptr<RankState> state) {
    const MpiWatchdog watchdog("the start", kStartTimeouts * state->timeout_s());
    int is_initialized = 0, level = 0;
    MPI_Initialized(&is_initialized);
    if (!is_initialized) mpi_check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "starting");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &state->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &state->size);

    // The ranks of this machine share the memory of their slots. A machine is known by its lowest rank.
    MPI_Comm here;
    mpi_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, state->rank, MPI_INFO_NULL, &here),
              "finding neighbours");
    int n_here = 0, lowest = state->rank;
    MPI_Comm_rank(here, &local_rank);
    MPI_Comm_size(here, &n_here);
    mpi_check(MPI_Bcast(&lowest, 1, MPI_INT, 0, here), "finding neighbours");
    std::vector<int> lowest_of(static_cast<size_t>(state->size));
    mpi_check(MPI_Allgather(&lowest, 1, MPI_INT, lowest_of.data(), 1, MPI_INT, MPI_COMM_WORLD), "finding neighbours");

    Slot* mine = nullptr;
    MPI_Win window;
    mpi_check(MPI_Win_allocate_shared(sizeof(Slot), sizeof(Slot), MPI_INFO_NULL, here, &mine, &window),
              "sharing memory");
    new (mine) Slot{};
    std::vector<int> machines;  // lowest ranks, in order
    state->slots.assign(static_cast<size_t>(state->size), nullptr);
    int neighbour = 0;
    for (int r = 0; r < state->size; ++r) {
        const int its = lowest_of[static_cast<size_t>(r)];
        const auto at = std::find(machines.begin(), machines.end(), its);
        state->node.push_back(static_cast<int>(at - machines.begin()));
        if (at == machines.end()) machines.push_back(its);
        if (its != lowest) continue;
        MPI_Aint bytes = 0;
        int unit = 0;
        mpi_check(MPI_Win_shared_query(window, neighbour++, &bytes, &unit, &state->slots[static_cast<size_t>(r)]),
                  "sharing memory");
    }
    mpi_check(MPI_Barrier(MPI_COMM_WORLD), "waiting for all ranks");

    std::vector<int> members;
    for (int r = 0; r < state->size; ++r) members.push_back(r);
    return std::make_shared<MpiTransport>(MPI_COMM_WORLD, std::move(state), std::move(members), 0);
}

void mpi_abort() {
    MPI_Abort(MPI_COMM_WORLD, 2);
    std::abort();  // MPI_Abort does not return, but does not say so
}
void mpi_finish(double timeout_s) {
    const MpiWatchdog watchdog("the end", kEndTimeouts * timeout_s);
    MPI_Finalize();
}

#else

bool mpi_is_built_in() { return false; }
int mpi_local_rank() { return 0; }
std::shared_ptr<HostTransport> make_mpi_transport(std::shared_ptr<RankState>) {
    fail("this program was built without MPI: install it (./install.sh) and run make again, or use --ranks N");
}
void mpi_abort() { std::abort(); }
void mpi_finish(double) {}

#endif
