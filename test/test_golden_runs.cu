// test/test_golden_runs.cu: train_gpt computes the bits that it computed when the table was recorded.
//
// test/golden/runs/runs.txt lists the runs, recorded.txt has the hashes of their losses, norms and final weights, and
// runs.py (whose head says on which machines the bits hold) runs and compares. Some of the runs continue checkpoints
// that an earlier program wrote. `make test` runs the quick ones, `make test-ranks` all,
// and those on several ranks again under mpirun.
#include "program.h"

#include <cstdlib>

namespace {

constexpr int kCannotCompare = 77;  // runs.py: another C library, or a CPU without fused multiply-add
#if defined(__x86_64__) && !(defined(__AVX2__) && defined(__FMA__))
constexpr bool kFused = false;  // make MARCH=x86-64, for any such CPU: a product and a sum are rounded twice
#else
constexpr bool kFused = true;
#endif

Outcome runs_py(const std::string& arguments) { return run_python("test/golden/runs/runs.py " + arguments); }

}  // namespace

TEST_CASE("short runs of every kind have the recorded bits", "[program][ranks][golden_runs]") {
    if (!device().is_cpu) SKIP_TEST("the recorded bits are those of the CPU device");
    if (!kFused) SKIP_TEST("the recorded bits are those of fused multiply-adds, which this build does without");
    if (!python_is_here()) SKIP_TEST("needs Python; LLM_PYTHON names it");
    const bool full = std::getenv("LLM_TEST_RANKS") != nullptr;
    const std::string program = program_path("train_gpt");
    std::vector<std::string> commands = {(full ? "check " : "check --quick ") + program};
    if (full && have_mpirun()) commands.push_back("check --mpi " + program);
    for (const std::string& command : commands) {
        const Outcome outcome = runs_py(command);
        INFO("runs.py " << command << "\n" << outcome.out << outcome.err);
        if (outcome.status == kCannotCompare)
            SKIP_TEST("bits differ, but this machine rounds differently from the one that recorded them");
        CHECK(outcome.status == 0);
    }
}

TEST_CASE("runs.py names the run whose bits differ, and what differs", "[program][golden_runs]") {
    if (!device().is_cpu) SKIP_TEST("the recorded bits are those of the CPU device");
    if (!python_is_here()) SKIP_TEST("needs Python; LLM_PYTHON names it");
    const TempFolder folder;
    const std::string program = program_path("train_gpt"), table = "--table " + (folder / "table.txt") + " ";
    REQUIRE(runs_py(table + "record " + program + " sgd").status == 0);
    std::string rows = slurp(folder / "table.txt");
    rows.replace(rows.find("\nsgd ") + 5, 8, "01234567");  // the first digits of the losses' hash
    rows.replace(rows.find("# Recorded on: ") + 15, 0, "another ");
    spit(folder / "table.txt", rows);
    const Outcome outcome = runs_py(table + "check " + program + " sgd");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 1);
    CHECK_THAT(outcome.out, ContainsSubstring("sgd: loss not as recorded"));
    CHECK_THAT(outcome.out, ContainsSubstring("0 of 1 runs have the recorded bits"));
    REQUIRE(runs_py(table + "record " + program + " sgd").status == 0);  // of some runs: the others are of that machine
    CHECK(count(slurp(folder / "table.txt"), "# Recorded on: another ") == 1);
    CHECK(count(slurp(folder / "table.txt"), "# Recorded on: ") == 2);
}
