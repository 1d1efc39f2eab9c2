// test/test_docs.cu: README.md and doc/ are true. What dev/docs.py checks is at its top.
#include "program.h"

namespace {

Outcome docs_py(const std::string& what) {
    const char* set = std::getenv("LLM_PYTHON");
    const std::string build = std::filesystem::relative(program_path("run_tests")).parent_path().string();
    return run_shell(concat(set ? set : "python3", " dev/docs.py ", what, " ", build));
}

}  // namespace

TEST_CASE("the pages name what exists, and quote what the program prints", "[program][docs]") {
    if (!device().is_cpu) SKIP_TEST("the quoted plans are those of the CPU build");
    if (run_shell("python3 -c ''").status != 0) SKIP_TEST("needs Python");
    const Outcome outcome = docs_py("check");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
}

TEST_CASE("the debugger session of doc/debugging.md is what gdb shows", "[program][docs]") {
    if (!device().is_cpu) SKIP_TEST("a kernel is stepped through on the CPU device");
    if (run_shell("python3 -c '' && gdb --version").status != 0) SKIP_TEST("needs gdb and Python");
    if (!std::filesystem::exists("build/cpu-debug/dev/reduce"))
        SKIP_TEST("needs the program of the session: make debug FILES=dev/reduce.cu PROGRAM=dev/reduce");
    const Outcome outcome = docs_py("gdb");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
}
