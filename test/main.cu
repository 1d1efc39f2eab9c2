// test/main.cu: the entry point of run_tests, and its log.
//
//   run:   build/cpu/run_tests                    all tests, as Catch2 has it; --list-tests, --help
//          build/cpu/run_tests "[rmsnorm]"        those with a tag, or "a name"
//          build/cpu/run_tests -# "[#test_log]"   those of a file
//
// With LLM_TEST_LOG=FILE each test leaves two lines there, from which test/run.sh counts and compares:
//   start <tab> name
//   passed|failed|skipped <tab> name <tab> bits of what it read back from the device <tab> why it was skipped
#if __has_include(<catch2/catch_all.hpp>)
#define CATCH2_VERSION 3
#else
#define CATCH2_VERSION 2
#define CATCH_CONFIG_RUNNER
#endif
#include "test.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace {

// The test that runs.
struct Result {
    uint64_t bits = 0;
    std::string skipped;
    std::mutex mutex;
} result;

// Tests fork, and start programs and themselves: what these do is not ours to report.
const pid_t process = getpid();
const std::string log_path = [] {
    const char* path = std::getenv("LLM_TEST_LOG");
    const std::string copy = path ? path : "";
    unsetenv("LLM_TEST_LOG");
    return copy;
}();

class Log : public
#if CATCH2_VERSION == 3
            Catch::EventListenerBase
#else
            Catch::TestEventListenerBase
#endif
{
  public:
#if CATCH2_VERSION == 3
    using EventListenerBase::EventListenerBase;
    static const Catch::TestCaseInfo& info(const Catch::TestCaseStats& stats) { return *stats.testInfo; }
#else
    using TestEventListenerBase::TestEventListenerBase;
    static const Catch::TestCaseInfo& info(const Catch::TestCaseStats& stats) { return stats.testInfo; }
#endif

    void testCaseStarting(const Catch::TestCaseInfo& test) override {
        result.bits = 0;
        result.skipped.clear();
        write(concat("start\t", test.name, "\n"));
    }
    void testCaseEnded(const Catch::TestCaseStats& stats) override {
        const bool failed = stats.totals.assertions.failed > 0;
        const char* outcome = failed ? "failed" : result.skipped.empty() ? "passed" : "skipped";
        const std::string bits = format("%016llx", static_cast<unsigned long long>(result.bits));
        write(concat(outcome, "\t", info(stats).name, "\t", bits, "\t", result.skipped, "\n"));
    }

  private:
    // Opened and closed each time: after a crash the file is complete.
    static void write(const std::string& line) {
        if (log_path.empty() || getpid() != process) return;
        std::FILE* file = std::fopen(log_path.c_str(), "a");
        if (!file) return;
        std::fwrite(line.data(), 1, line.size(), file);
        std::fclose(file);
    }
};
CATCH_REGISTER_LISTENER(Log)

}  // namespace

void record_bits(const void* data, size_t bytes) {
    uint64_t hash = 0xcbf29ce484222325;  // as FNV-1a, by eight bytes at a time
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = 0;
        std::memcpy(&word, static_cast<const char*>(data) + i, std::min<size_t>(8, bytes - i));
        hash = (hash ^ word) * 0x100000001b3;
        hash ^= hash >> 32;  // a product moves no bit down
    }
    const std::lock_guard<std::mutex> lock(result.mutex);
    result.bits += hash;  // a sum, because a test's threads read back in any order
}

void record_skipped(const std::string& reason) { result.skipped = reason; }

// Recorded bits are those of exact products, on whatever processor (cpu/sgemm.cpp): here, and in what tests start.
int main(int argc, char** argv) {
    setenv("CUDA_CPU_EXACT", "1", 0);
    return Catch::Session().run(argc, argv);
}
