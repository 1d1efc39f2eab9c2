// test/test_ladders.cu: every rung of every ladder of dev/, as a person would run them.
//
// The programs check themselves against float64 (dev/ladder.h); here they are started, at the small sizes of --check.
// The line with the bits of all that they computed must not depend on the order in which threads run.
#include "program.h"

#include <sstream>

namespace {

const std::vector<std::string> kLadders = {
    "softmax", "reduce",   "rmsnorm",           "cross_entropy",      "adamw",
    "matmul",  "few_rows", "attention_forward", "attention_backward", "decode_attention"};

std::string last_line(const std::string& text) {
    const size_t end = text.find_last_not_of('\n');
    return text.substr(text.rfind('\n', end) + 1, end - text.rfind('\n', end));
}

}  // namespace

TEST_CASE("every rung of every ladder agrees with float64, bit for bit in any order of threads", "[program][ladders]") {
    int n = 0;
    for (const std::string& name : kLadders) {
        const std::string normal = printed_by("dev/" + name, "--check");
        INFO(name << '\n' << normal);
        CHECK_THAT(normal, ContainsSubstring("rungs agree with float64"));
        CHECK_THAT(last_line(normal), ContainsSubstring(name + ": bits "));
        if (!device().is_cpu) continue;
        // One seed each: a ladder has one stream, and runs each rung at many sizes.
        const std::string mode = concat("CUDA_CPU_STRICT=", n++ % 3 + 1);
        INFO(mode);
        const std::string strict = must_succeed(run_program("dev/" + name, "--check", mode));
        CHECK(last_line(strict) == last_line(normal));
    }
}

TEST_CASE("a ladder's table has a row for every rung, or for the one that was asked for", "[program][ladders]") {
    const auto rows = [](const std::string& out) { return count(out, "\n| ") - 1; };  // without the head
    const Outcome all = run_program("dev/softmax", "--size 5x36");
    INFO(all.out << all.err);
    CHECK(all.status == 0);
    // The rungs are those that dev/README.md lists.
    const std::string readme = slurp("dev/README.md"), head = "| [softmax.cu](softmax.cu) | ";
    REQUIRE(readme.find(head) != std::string::npos);
    std::istringstream names(readme.substr(readme.find(head) + head.size()));
    std::string name, list;
    std::getline(names, list, '|');
    names = std::istringstream(list.substr(0, list.find_last_not_of(' ') + 1));
    size_t n = 0;
    while (std::getline(names >> std::ws, name, ',')) {
        ++n;
        CHECK_THAT(all.out, ContainsSubstring(concat("| ", n, " | ", name, " |")));
    }
    CHECK(rows(all.out) == n);
    const Outcome one = run_program("dev/softmax", "--size '5 x 36' --rung 4");
    INFO(one.out << one.err);
    CHECK(one.status == 0);
    CHECK(rows(one.out) == 1);
    CHECK_THAT(one.out, ContainsSubstring("| 4 | warp |"));
    const Outcome half = run_program("dev/matmul", "--size 20x24x16 --dtype bf16 --check");
    INFO(half.out << half.err);
    CHECK(half.status == 0);
    CHECK_THAT(half.out, ContainsSubstring("20 x 24 x 16 bf16: 12 rungs agree"));
    // Rungs on tensor cores keep their numbers where they cannot be.
    const Outcome odd = run_program("dev/matmul", "--size 9x20x3 --dtype f16"),
                  full = run_program("dev/matmul", "--size 9x20x3");
    INFO(odd.out << odd.err << full.out << full.err);
    CHECK((odd.status == 0 && full.status == 0));
    CHECK((rows(odd.out) == 12 && rows(full.out) == 12));
    CHECK_THAT(odd.out, ContainsSubstring("| 8 | three stages | ") && ContainsSubstring("| 9 | wgmma | - |"));
    CHECK_THAT(full.out, ContainsSubstring("| 7 | tensor cores | - |") && ContainsSubstring("| 12 | product |"));
    // So does the one that keeps a row in shared memory, where the row does not fit.
    const Outcome wide = run_program("dev/cross_entropy", "--size 1x60000 --check --rung 5");
    INFO(wide.out << wide.err);
    CHECK(wide.status == 0);
    CHECK(run_program("dev/adamw", "--help").status == 0);
}

TEST_CASE("a ladder says in one line what it cannot do", "[program][ladders]") {
    struct Case {
        std::string name, arguments, says;
    };
    const std::vector<Case> cases = {
        {"softmax", "--size 4x", "--size"},
        {"softmax", "--size 4x4x4", "expected rows x columns"},
        {"softmax", "--size 0x4", "--size 0: give a whole number of at least 1"},
        {"softmax", "--size", "needs a value"},
        {"softmax", "--size 2x9000 --check", "at most 8192 columns"},
        {"softmax", "--rung 7 --check", "this ladder has 6"},
        {"softmax", "--dtype bf16", "not written for it"},
        {"matmul", "--dtype int3", "int3"},
        {"matmul", "--rung 7 --check", "rung 7 (tensor cores) needs --dtype bf16 or f16"},
        {"matmul", "--rung 10 --check --dtype bf16 --size 8x8x12", "rung 10 (persistent) needs rows of whole 16 bytes"},
        {"cross_entropy", "--rung 4 --check --size 1x60000",
         "rung 4 (kept) needs rows that fit into the shared memory"},
        {"reduce", "--speed", "unknown flag --speed"},
        {"attention_forward", "--dtype f32", "not written for it"},
        {"attention_forward", "--size 70000x1 --check", "at most 65535"},
        {"matmul", "--size 2000000x2000000x2 --check", "no memory left for f32 (2000000, 2000000): use a smaller size"},
    };
    for (const Case& c : cases) {
        const Outcome outcome = run_program("dev/" + c.name, c.arguments);
        INFO(c.name << ' ' << c.arguments << "\nstderr: " << outcome.err);
        CHECK(outcome.err.starts_with(c.name + ": "));
        CHECK(one_line_with(line_of(outcome), c.says));
    }
}
