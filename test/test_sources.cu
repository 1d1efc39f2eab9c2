// test/test_sources.cu: what can be said of the sources without compiling them, and that the scripts which say it would
// find what is wrong: in small trees of files with one mistake each.
#include "program.h"

namespace {

// A copy of the scripts, with a Makefile of three floors, in a folder that the scripts take for the repository.
void make_tree(const TempFolder& tree, const std::vector<std::pair<std::string, std::string>>& files) {
    run_shell(concat("mkdir -p ", tree / "dev",
                     " && cp dev/floors.py dev/includes.py dev/long_functions.py dev/script.py ", tree / "dev"));
    std::ofstream(tree / "Makefile") << "FLOORS := core | io layers | io optim | .\n";
    for (const auto& [path, text] : files) {
        std::filesystem::create_directories(std::filesystem::path(tree / path).parent_path());
        std::ofstream(tree / path) << text;
    }
}

std::string wrong_includes(const std::vector<std::pair<std::string, std::string>>& files) {
    const TempFolder tree;
    std::vector<std::pair<std::string, std::string>> all = {
        {"core/core.h", ""}, {"io/io.h", ""}, {"layers/layers.h", ""}, {"optim/optim.h", ""}, {"cpu/device.h", ""}};
    all.insert(all.end(), files.begin(), files.end());
    make_tree(tree, all);
    const Outcome outcome = run_python(tree / "dev/floors.py");
    CHECK(outcome.err == "");
    CHECK(outcome.status == (outcome.out.empty() ? 0 : 1));
    return outcome.out;
}

// Where in a text is a list behind ":" whose first element alone names its type: for (... : {T{1}, {2}})? Its lines.
std::vector<int64_t> half_typed_lists(const std::string& text) {
    std::vector<int64_t> lines;
    for (size_t at = text.find(": {"); at != std::string::npos; at = text.find(": {", at + 1)) {
        size_t end = text.find_first_of("({", at + 3);
        if (end == std::string::npos || text.find_first_of(";\"=", at) < end || end == at + 3) continue;
        for (int depth = 0; end < text.size(); ++end) {
            depth += (text[end] == '(' || text[end] == '{') - (text[end] == ')' || text[end] == '}');
            if (depth == 0) break;
        }
        if (end + 1 >= text.size() || text[end + 1] != ',') continue;
        const size_t next = text.find_first_not_of(" \n", end + 2);
        if (next != std::string::npos && text[next] == '{')
            lines.push_back(1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n'));
    }
    return lines;
}

}  // namespace

TEST_CASE("what nvcc compiles can be compiled by that of CUDA 12.0 to 12.4: lists name the type of each element",
          "[sources]") {
    CHECK(half_typed_lists("for (auto [a, b] : {std::pair(1, f(2)),\n {3, 4}})") == std::vector<int64_t>{1});
    CHECK(half_typed_lists("\nfor (Size size : {Size{1, 2}, {3, 4}})") == std::vector<int64_t>{2});
    CHECK(half_typed_lists("for (Size size : {Size{1, 2}, Size{3, 4}}) f({1}, {2}); case 1: {f(1); {}}").empty());
    int n_files = 0;
    for (const char* const folder : {"core", "layers", "optim", "inference", "parallel", "planning", "dev", "test"})
        for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
            const std::string file = entry.path().string(), extension = entry.path().extension();
            if (extension != ".cu" && extension != ".cuh" && extension != ".h") continue;
            const std::string text = slurp(file);
            // As in the Makefile.
            const bool has_kernels = text.find("__global__") != std::string::npos ||
                                     text.find("<<<") != std::string::npos || text.find(".cuh\"") != std::string::npos;
            if ((extension == ".cu" && !has_kernels) || file == "test/test_sources.cu") continue;
            ++n_files;
            INFO(file);
            CHECK(half_typed_lists(text) == std::vector<int64_t>{});
        }
    CHECK(n_files > 100);
}

TEST_CASE("floors: no file of ours includes upwards", "[program][sources]") {
    if (!python_is_here()) SKIP_TEST("needs Python; LLM_PYTHON names it");
    const Outcome outcome = run_python("dev/floors.py");
    CHECK(outcome.out == "");
    CHECK(outcome.status == 0);
}

TEST_CASE("every file includes the standard headers that it uses", "[program][sources]") {
    if (!python_is_here()) SKIP_TEST("needs Python; LLM_PYTHON names it");
    const Outcome outcome = run_python("dev/includes.py");
    CHECK(outcome.out == "");
    CHECK(outcome.status == 0);
    const TempFolder tree;
    make_tree(tree, {{"core/core.h", "#include <map>\n"},
                     {"core/a.cu", "#include \"core/core.h\"\n// std::set\nstd::map<int, int> a;\n"},
                     {"core/b.cu",
                      "#include \"core/core.h\"\n\nauto n = std::count_if(a, b, c);\nauto m = std::max(n, n);\n"},
                     {"core/c.cu", "std::map<int, int> a;\n"},
                     {"dev/d.cu", "auto a = std::max_element(b, c);\n"},
                     {"test/e.cu", "auto a = std::lower_bound(b, c, d);\n"}});
    const Outcome wrong = run_python(tree / "dev/includes.py");
    CHECK(wrong.status == 1);
    CHECK(wrong.out ==
          "core/b.cu:3: std::count_if needs #include <algorithm>\ncore/c.cu:1: std::map needs #include <map>\n"
          "dev/d.cu:1: std::max_element needs #include <algorithm>\n"
          "test/e.cu:1: std::lower_bound needs #include <algorithm>\n");
    std::ofstream(tree / "Makefile", std::ios::app) << "PCH_std := map queue\n";
    CHECK_THAT(run_python(tree / "dev/includes.py").err, ContainsSubstring("headers have queue, of which NAMES lacks"));
}

TEST_CASE("make: other flags compile everything again, and a new test does not", "[program][sources]") {
    const TempFolder tree;
    std::filesystem::create_directories(tree / "test");
    std::filesystem::copy_file("Makefile", tree / "Makefile");
    std::ofstream(tree / "test/test_a.cu") << "";
    const auto flags = [&](const std::string& variables) {
        const Outcome outcome = run_shell(concat("unset MAKEFLAGS MAKELEVEL; make -s -C ", tree.path,
                                                 " DEVICE=cpu CCACHE= build/cpu/flags ", variables));
        INFO(outcome.err);
        REQUIRE(outcome.status == 0);
        return slurp(tree / "build/cpu/flags");
    };
    const std::string first = flags("");
    CHECK_THAT(first, ContainsSubstring("-march=native"));
    std::ofstream(tree / "test/test_b.cu") << "";
    CHECK(flags("") == first);
    CHECK_THAT(flags("MARCH=x86-64"), ContainsSubstring("-march=x86-64"));
}

TEST_CASE("no function of the product is longer than a screen", "[program][sources]") {
    if (!python_is_here()) SKIP_TEST("needs Python; LLM_PYTHON names it");
    const Outcome outcome = run_python("dev/long_functions.py");
    INFO(outcome.out << outcome.err);
    CHECK(outcome.status == 0);
}

TEST_CASE("floors: each kind of wrong include is found", "[program][sources]") {
    if (!python_is_here()) SKIP_TEST("needs Python; LLM_PYTHON names it");
    CHECK(wrong_includes(
              {{"optim/a.cu", "#include \"core/core.h\"\n#include \"layers/layers.h\"\n#include \"optim.h\"\n"},
               {"llm.cu", "#include \"io/io.h\"\n"}}) == "");
    using Catch::Matchers::StartsWith;
    CHECK_THAT(wrong_includes({{"core/a.cu", "\n#include \"layers/layers.h\"\n"}}), StartsWith("core/a.cu:2: "));
    // io stands beside layers and optim: neither may include the other.
    CHECK_THAT(wrong_includes({{"layers/a.cuh", "#include \"io/io.h\"\n"}}), StartsWith("layers/a.cuh:1: "));
    CHECK_THAT(wrong_includes({{"optim/a.cu", "#include \"io/io.h\"\n"}}), StartsWith("optim/a.cu:1: "));
    CHECK_THAT(wrong_includes({{"io/a.cu", "#include \"../layers/layers.h\"\n"}}), StartsWith("io/a.cu:1: "));
    CHECK_THAT(wrong_includes({{"layers/a.cu", "#include \"cpu/device.h\"\n"}}), StartsWith("layers/a.cu:1: "));
    CHECK_THAT(wrong_includes({{"cpu/a.cpp", "#include \"core/core.h\"\n"}}), StartsWith("cpu/a.cpp:1: "));
    CHECK_THAT(wrong_includes({{"layers/a.cu", "#include \"device.h\"\n"}}), StartsWith("layers/a.cu:1: "));
    CHECK_THAT(wrong_includes({{"test/test_gelu.cu", "#include \"cpu/device.h\"\n"}}),
               StartsWith("test/test_gelu.cu:1: "));
    CHECK(wrong_includes({{"test/test_cpu_a.cu", "#include \"cpu/device.h\"\n"}}) == "");
    // Its vectors are for layers alone.
    const std::string vectors = "#include \"cpu_vector.h\"\n";
    CHECK_THAT(wrong_includes({{"cpu/cpu_vector.h", ""}, {"layers/a.cu", vectors}, {"optim/a.cu", vectors}}),
               StartsWith("optim/a.cu:1: "));
    // A folder that has no floor.
    CHECK_THAT(wrong_includes({{"other/a.h", ""}, {"layers/a.cu", "#include \"other/a.h\"\n"}}),
               StartsWith("layers/a.cu:1: "));
    CHECK_THAT(wrong_includes({{"layers/mine/a.cu", ""}}), StartsWith("layers/mine: on no floor"));
}

TEST_CASE("long functions: found in code, not in comments, strings or classes", "[program][sources]") {
    if (!python_is_here()) SKIP_TEST("needs Python; LLM_PYTHON names it");
    const TempFolder folder;
    const auto lines = [](int n) {
        std::string text;
        for (int i = 0; i < n; ++i) text += "    x = \"}\";  // } {\n";
        return text;
    };
    std::ofstream(folder / "a.cu") << "struct S {\n"
                                   << lines(70) << "};\nint fits(int a) {\n"
                                   << lines(58) << "}\nS::S(int a) : n_{a}, m_(a) {\n"
                                   << lines(59) << "}\n__global__ void kernel(int a) {\n"
                                   << lines(78) << "}\ntemplate <class T>\n__device__ void long_kernel(T a) {\n"
                                   << lines(78) << "}\n";
    const Outcome outcome = run_python(concat("dev/long_functions.py ", folder / "a.cu"));
    CHECK(outcome.status == 1);
    CHECK(outcome.err == "");
    CHECK(outcome.out == concat(folder / "a.cu", ":274: long_kernel has 81 lines; at most 80\n", folder / "a.cu",
                                ":133: S::S has 61 lines; at most 60\n"));
}

TEST_CASE("spills.py names kernels that spill registers or have arrays in memory, and wgmma that are serialised",
          "[sources]") {
    if (!python_is_here()) SKIP_TEST("needs python3");
    const TempFolder folder;
    run_shell(concat("mkdir -p ", folder / "layers", " ", folder / "dev"));
    const auto report = [](const char* kernel, int frame, int spilled) {
        return concat("ptxas info    : Compiling entry function '", kernel, "' for 'sm_80'\n    ", frame,
                      " bytes stack frame, ", spilled, " bytes spill stores, ", spilled / 2, " bytes spill loads\n");
    };
    std::ofstream(folder / "layers/a.ptxas") << report("_Z3onev", 0, 0);
    std::ofstream(folder / "layers/fp8.ptxas") << report("_Z5castsv", 320, 0);  // no GPU of sm_80 runs them
    std::ofstream(folder / "dev/slow.ptxas") << report("_Z4slowv", 64, 64);     // ladders show slow kernels, too
    const std::string spills = concat("dev/spills.py ", folder.path);
    CHECK(run_python(spills).out == "spills: 2 kernels on sm_80: none spills\n");
    std::ofstream(folder / "layers/b.ptxas") << report("_Z3twov", 16, 16) << report("_Z5threev", 64, 0)
                                             << "ptxas info    : (C7510) Potential Performance Loss: wgmma\n";
    const Outcome outcome = run_python(spills);
    CHECK(outcome.status == 1);
    CHECK(outcome.out ==
          "layers/b.cu: two on sm_80: 16 bytes of registers are spilled, and 8 loaded again\n"
          "layers/b.cu: three on sm_80: 64 bytes of arrays are in memory: is a loop over them not unrolled?\n"
          "layers/b.cu: three on sm_80: (C7510) Potential Performance Loss: wgmma\n"
          "spills: 4 kernels on sm_80, 3 faults\n");
}
