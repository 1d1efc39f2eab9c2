// test/test_docs.cu: README.md and doc/ are true. What is checked is said at the top of dev/docs.py and
// dev/readme_commands.py.
#include "program.h"

#include <regex>

namespace {

Outcome python(const std::string& command) {
    const char* set = std::getenv("LLM_PYTHON");
    return run_shell(concat(set ? set : "python3", " ", command));
}

}  // namespace

TEST_CASE("the pages name what exists, and have every flag", "[program][docs]") {
    if (!device().is_cpu) SKIP_TEST("the pages show the CPU build");
    if (python("-c ''").status != 0) SKIP_TEST("needs Python");
    const Outcome outcome = python("dev/docs.py check");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
}

// make test-readme runs all of them.
TEST_CASE("the quick commands of the pages run, and print what the pages show", "[program][docs]") {
    if (!device().is_cpu) SKIP_TEST("the pages show the CPU build");
    if (python("-c ''").status != 0) SKIP_TEST("needs Python");
    const Outcome outcome = python("dev/readme_commands.py --quick");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
}

// make test does not run README.md's first command, which takes minutes: its plan has the same memory.
TEST_CASE("./train_gpt without flags takes the memory that README.md shows", "[program][docs]") {
    if (!device().is_cpu) SKIP_TEST("the pages show the CPU build");
    const auto total = [](const std::string& text) {
        std::smatch found;
        const bool has = std::regex_search(text, found, std::regex("\n  total .* ([0-9.]+ MiB)"));
        return has ? found[1].str() : "no total in:\n" + text;
    };
    CHECK(total(slurp("README.md")) == total(run_shell(program_path("train_gpt") + " --plan").out));
}
