// test/test_docs.cu: README.md and doc/ are true. What is checked is said at the top of dev/docs.py and
// dev/readme_commands.py.
#include "model/model.h"
#include "optim/optim.h"
#include "parallel/pipeline/pipeline.h"
#include "program.h"

#include <filesystem>
#include <regex>

TEST_CASE("the pages name what exists, and have every flag", "[program][docs]") {
    if (!device().is_cpu) SKIP_TEST("the pages show the CPU build");
    if (!python_is_here()) SKIP_TEST("needs Python");
    const Outcome outcome = run_python("dev/docs.py check");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
}

// Lists that are written by hand: each name that the program knows is in them.
TEST_CASE("the pages describe every preset, optimizer and schedule", "[docs]") {
    const auto check_named = [](const std::string& path, const std::string& name, const std::string& around) {
        std::string pattern = around;
        INFO(path << " does not have " << name << " where it has the others: it has no text like\n" << around);
        CHECK(std::regex_search(slurp(path), std::regex(pattern.replace(pattern.find("NAME"), 4, name))));
    };
    for (const std::string& name : preset_names()) check_named("doc/models.md", name, "\n\\| [^|]*`NAME`");
    for (const std::string& name : schedule_names_of_pipelines()) {
        check_named("doc/pipelines.md", name, "\n\\| `NAME` \\|");
        check_named("doc/pipelines.md", name, "\n\\$ [^\n]*--pipeline NAME [^\n]*--draw");
    }
    for (const std::string& name : schedule_names()) {
        check_named("doc/runs.md", name, "\n\\| ([a-z-]+, )*NAME[ ,]");
        check_named("doc/flags.md", name, "--steps .*\\bNAME\\b");
        check_named("optim/optim.h", name, "\n//   NAME  ");
    }
    for (const std::string& name : optimizer_names()) {
        check_named("optim/optim.h", name, "\n//   NAME +[a-z0-9]+\\.cu ");
        if (!has_host_optimizer(name))
            check_named("doc/ranks.md", name, "\n\\| `--offload optimizer` [^\n]*`--optimizer NAME`");
        // Nesterov's update is momentum's kernel; all other runs have AdamW.
        if (name != "nesterov" && name != "adamw")
            check_named("test/count_bytes.sh", name, "\nfor optimizer in [a-z0-9 ]*\\bNAME\\b");
    }
}

// make test-readme runs all of them.
TEST_CASE("the quick commands of the pages run, and print what the pages show", "[program][docs]") {
    if (!device().is_cpu) SKIP_TEST("the pages show the CPU build");
    if (!python_is_here()) SKIP_TEST("needs Python");
    const Outcome outcome = run_python("dev/readme_commands.py --quick");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
}

TEST_CASE("cuda-break says at the end that no thread was the one that it waited for", "[program][docs]") {
    const std::string program = "build/cpu-debug/dev/reduce";  // make test builds it
    if (!device().is_cpu || !std::filesystem::exists(program)) SKIP_TEST("needs the debug build of dev/reduce");
    if (run_shell("gdb --version").status != 0) SKIP_TEST("needs gdb");
    const std::string stop = " -ex 'cuda-break reduce_sequential_kernel ";  // its blocks have 256 threads
    const Outcome outcome =
        run_shell(concat("gdb -batch -x cpu/cuda.gdb", stop, "255'", stop, "256' -ex run -ex continue --args ", program,
                         " --check --rung 3 --size 90"));
    INFO(outcome.out << outcome.err);
    CHECK_THAT(outcome.out, ContainsSubstring("Breakpoint 1, "));
    CHECK_THAT(outcome.out, ContainsSubstring("cuda-break reduce_sequential_kernel 256: no thread stopped. Either"));
    CHECK_THAT(outcome.out, !ContainsSubstring("cuda-break reduce_sequential_kernel 255: "));
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
