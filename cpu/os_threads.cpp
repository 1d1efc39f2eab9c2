// cpu/os_threads.cpp: the OS threads that blocks and matrix products run on: how many there are, and how they wait for
// each other.
//
// OpenMP's threads meet at the end of each parallel region, about a hundred times in a training step. A thread that
// arrives first can spin (ask again and again, which occupies its core) or sleep (and then needs about 20 us to wake
// up). GNU OpenMP spins for 3 ms, which is longer than most regions take. On an idle machine that is the fastest. But
// with another busy process on the machine, a thread that spins takes its core from the thread that it waits for, and a
// step takes up to four times as long. So we spin for about as long as a wake-up takes, and then sleep: whichever
// thread arrives first, this takes at most about twice the time of the better choice (Karlin et al. 1991, "Empirical
// studies of competitive spinning for a shared-memory multiprocessor").
#include "device.h"

#include <omp.h>
#include <sys/resource.h>
#include <unistd.h>

#include <climits>

namespace cuda_cpu {

int os_threads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

namespace {

constexpr int kMostThreads = 4096;  // GNU OpenMP notes all of them on the stack of the thread that starts them
constexpr size_t kLeastStackBytes = 512 << 10;  // twice a fiber's: a block's first threads run on the OS thread's stack
constexpr const char* kSpins = "3000";          // about 30 us
constexpr const char* kSecondStart = "CUDA_CPU_SECOND_START";  // set between the two starts

// GNU OpenMP reads its environment when the library is loaded, before any code of this program runs. So the program
// sets the variable and starts itself once more: it keeps its process number, its arguments and its open files. The
// second start removes the variable again, so that programs that this one starts find the environment that the user
// gave it. A user's own choice is respected. So is that of places: where one is asked for, OpenMP has bound this thread
// to the first of them already, and the second start, which keeps that, would find no other. The priority 101 puts this
// before the constructors of other files, which may have changed the environment already.
[[gnu::constructor(101)]] void bound_spinning(int, char** arguments, char**) {
    if (omp_get_max_threads() > kMostThreads) {
        std::fprintf(stderr, "OMP_NUM_THREADS asks for %d threads: at most %d are possible\n", omp_get_max_threads(),
                     kMostThreads);
        std::_Exit(2);
    }
    struct rlimit stack;
    if (getrlimit(RLIMIT_STACK, &stack) == 0 && stack.rlim_cur < kLeastStackBytes) {
        std::fprintf(stderr, "a stack of %zu KiB is too small: allow 8192 (ulimit -s 8192)\n",
                     static_cast<size_t>(stack.rlim_cur >> 10));
        std::_Exit(2);
    }
    const auto is_set = [](const char* name) { return std::getenv(name) != nullptr; };
    if (is_set(kSecondStart)) {
        unsetenv(kSecondStart);
        unsetenv("GOMP_SPINCOUNT");
        return;
    }
    for (const char* name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})
        if (is_set(name)) return;
    const char* threads = std::getenv("OMP_NUM_THREADS");
    if (threads && std::string(threads) == "1") return;  // it waits for no other: gdb sessions and ranks start once
    char program[PATH_MAX];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length <= 0) return;
    program[length] = '\0';
    setenv("GOMP_SPINCOUNT", kSpins, 1);
    setenv(kSecondStart, "1", 1);
    execv(program, arguments);  // returns only if it fails: then the threads spin for longer, and all else works
    unsetenv("GOMP_SPINCOUNT");
    unsetenv(kSecondStart);
}

}  // namespace
}  // namespace cuda_cpu
