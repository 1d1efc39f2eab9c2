// Strict mode: every deliberate mistake of test/wrong_kernels.cu must be caught, and its right version must pass.
//
// The program is run as a subprocess, under several seeds: a wrong order is drawn at random, so it must show under one
// of them; what is reported must be reported under each. Reports must name the kernel, the block, the thread and the
// lines: every line of wrong_kernels.cu that a report mentions must be marked there with "// <- " and the case.
#include "test.h"

#ifdef CUDA_ON_CPU

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace {

constexpr int kSeeds = 5;

std::string program() {
    if (const char* path = std::getenv("WRONG_KERNELS")) return path;
    return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "wrong_kernels").string();
}

struct Outcome {
    bool right, wrong, reported;  // exit status 0, 1, or aborted
    std::string text;
};

// seed 0: not in strict mode.
Outcome run(const std::string& arguments, int seed) {
    const std::string mode = seed > 0 ? "CUDA_CPU_STRICT=" + std::to_string(seed) : "-u CUDA_CPU_STRICT";
    FILE* pipe = popen(("ulimit -c 0; exec env " + mode + " '" + program() + "' " + arguments + " 2>&1").c_str(), "r");
    REQUIRE(pipe != nullptr);
    Outcome outcome{};
    for (char buffer[256]; const size_t n = fread(buffer, 1, sizeof buffer, pipe);) outcome.text.append(buffer, n);
    const int status = pclose(pipe);
    outcome.right = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    outcome.wrong = WIFEXITED(status) && WEXITSTATUS(status) == 1;
    outcome.reported = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
    return outcome;
}

std::vector<std::string> lines_of(const std::string& path) {
    std::ifstream file(path);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
}

// How often `text` mentions a line of wrong_kernels.cu, each of which must be marked with the case.
int marked_lines(const std::string& text, const std::string& name) {
    const std::string file = "wrong_kernels.cu:";
    int n = 0;
    for (size_t at = 0; (at = text.find(file, at)) != std::string::npos; at += file.size()) {
        const size_t start = text.rfind(' ', at) + 1;
        const std::vector<std::string> lines = lines_of(text.substr(start, at + file.size() - 1 - start));
        REQUIRE(!lines.empty());  // run the tests from the folder in which they were built
        const size_t line = std::stoul(text.substr(at + file.size()));
        REQUIRE(line <= lines.size());
        // The mark stands at the end of the line, or in the lines of comment above it.
        std::string marked_for = lines[line - 1] + " ";
        for (size_t above = line - 1; above > 0; --above) {
            const std::string& comment = lines[above - 1];
            const size_t start_of_text = comment.find_first_not_of(' ');
            if (start_of_text == std::string::npos || comment.compare(start_of_text, 2, "//") != 0) break;
            marked_for = comment + " " + marked_for;
        }
        REQUIRE(marked_for.find("// <- ") != std::string::npos);
        CHECK(marked_for.find(" " + name + " ") != std::string::npos);
        ++n;
    }
    return n;
}

enum Caught { by_some_seed, by_every_seed, without_strict_mode_too };
struct Mistake {
    const char* name;
    std::vector<std::string> report;  // words of the report; none: the result is wrong
    Caught caught = by_every_seed;
    std::vector<std::string> otherwise = {};  // words where another consequence of the mistake shows first
};
const std::vector<Mistake> mistakes = {
    // 1. The threads of a block, and the blocks of a grid, run in a random order.
    {"missing_syncthreads", {}, by_some_seed},
    {"threads_in_order", {}, by_some_seed},
    {"missing_syncwarp", {}, by_some_seed},
    {"missing_second_syncwarp", {}, by_some_seed},
    {"blocks_in_order", {}, by_some_seed},
    {"late_warp", {}, by_every_seed},
    // 2. Streams run as late as possible, as early as possible or at random; what touches the same bytes is ordered.
    {"missing_event_wait",
     {"race between streams", "kernel 'add_kernel' launched at", "on stream 1 writes", "on stream 2 reads",
      "bytes 0 to 3999 of an allocation of 4000 bytes of device memory"}},
    {"missing_wait_for_memset",
     {"race between streams", "cudaMemsetAsync at", "on the default stream writes", "on stream 1 reads",
      "bytes 0 to 3999"}},
    {"read_while_overwritten",
     {"race between streams", "kernel 'add_kernel' launched at", "on stream 1 reads", "cudaMemsetAsync at",
      "on stream 2 writes", "bytes 0 to 3999"}},
    {"recorded_too_early",
     {"race between streams", "cudaMemcpyAsync at", "on stream 1 writes", "on stream 2 reads",
      "bytes 400 to 799 of an allocation of 4000"}},
    {"missing_wait_in_graph",
     {"race between streams", "kernel 'add_kernel' launched at", "on stream 1 writes", "on stream 2 of a graph reads",
      "bytes 0 to 3999"}},
    {"graph_not_waited_for", {"race between streams", "on stream 1 writes", "on stream 2 reads", "bytes 0 to 3999"}},
    {"two_writers", {"race between streams", "cudaMemsetAsync at", "bytes 396 to 399 of an allocation of 4000"}},
    {"scale_overwritten",
     {"race between streams", "a matrix product", "cudaMemsetAsync at", "bytes 16 to 19 of an allocation of 20"}},
    {"c_overwritten", {"race between streams", "a matrix product", "cudaMemsetAsync at", "bytes 0 to 255 of"}},
    {"aux_overwritten", {"race between streams", "a matrix product", "cudaMemsetAsync at", "bytes 0 to 255 of"}},
    {"scalars_overwritten",
     {"race between streams", "a matrix product", "cudaMemsetAsync at", "of an allocation of 8 bytes"}},
    {"gradient_too_early",
     {"race between streams", "a matrix product", "cudaMemcpyAsync at", "of an allocation of 32 bytes"}},
    {"writers_in_structures",
     {"race between streams", "kernel 'zeros_kernel' launched at", "of an allocation of 4000"}},
    {"missing_stream_sync", {}},
    {"pinned_overwritten", {}},
    // 3. Fresh memory is NaN.
    {"uninitialised_device_memory", {}},
    {"uninitialised_shared_memory", {}},
    {"uninitialised_dynamic_shared_memory", {}},
    {"reads_past_an_odd_end", {}},
    {"async_copy_not_waited_for", {}},
    {"async_copy_not_committed", {}},
    // 4. Guard pages, and canaries where the page is not next to the allocation.
    {"past_the_end",
     {"kernel 'fill_kernel' launched at", "block (1,0,0), thread (36,0,0)",
      "the first byte past the end of an allocation of 400 bytes of device memory"}},
    {"past_an_odd_end",
     {"kernel 'fill_kernel' launched at", "block (1,0,0)", "wrote past the end of an allocation of 404 bytes"}},
    {"before_the_start", {"kernel 'fill_kernel' launched at", "wrote before the start of an allocation of 400 bytes"}},
    {"before_a_page",
     {"kernel 'fill_kernel' launched at", "block (0,0,0), thread (0,0,0)",
      "4 bytes before the start of an allocation of 65536 bytes"}},
    {"reads_past_the_end", {"kernel 'difference_kernel'", "block (3,0,0), thread (3,0,0)", "first byte past the end"}},
    {"use_after_free", {"kernel 'add_kernel'", "an allocation of 256 bytes of device memory that has been freed"}},
    {"null_pointer", {"kernel 'no_check_kernel'", "block (0,0,0), thread (0,0,0)", "a null pointer"}},
    {"past_dynamic_shared_memory",
     {"kernel 'reverse_kernel'", "past the end of an allocation of 240 bytes of dynamic shared"}},
    {"stack_overflow", {"kernel 'deep_kernel'", "the end of its stack"}},
    // 5. Barriers and exchanges that not every thread reaches.
    {"divergent_barrier",
     {"barrier divergence in kernel 'mean_kernel'", "block (", "thread (", "it waits at",
      "while others of its block wait at"},
     without_strict_mode_too},
    {"early_return",
     {"barrier divergence in kernel 'mean_kernel'", "block (", "was reached by 40 of 64 threads",
      "thread (40,0,0) is the first that did not arrive"},
     without_strict_mode_too},
    {"two_barriers",
     {"barrier divergence in kernel 'mean_kernel'", "block (", "it waits at", "others of its block wait at"},
     without_strict_mode_too},
    {"missing_lane",
     {"kernel 'warp_kernel'", "block (0,0,0)", "__shfl_xor_sync", "waits for 12 lanes of warp 1",
      "thread (52,0,0) is the first that did not arrive"},
     without_strict_mode_too},
    {"mask_without_lane",
     {"kernel 'warp_kernel'", "block (0,0,0), thread (", "a mask that the calling lane is not in"},
     without_strict_mode_too},
    {"two_collectives",
     {"kernel 'warp_kernel'", "block (0,0,0), thread (", "it does __", "other lanes of its mask do __"},
     without_strict_mode_too},
    // 6. Hopper's asynchronous copies and products: what is in flight, or has not been fenced.
    {"missing_mbarrier_wait",
     {"shared memory in flight in kernel 'product_kernel'", "block (0,0,0), thread (", "which the copy at",
      "no thread has waited for phase 0 (parity 0) of its mbarrier"}},
    {"wrong_parity", {"kernel 'product_kernel'", "block (0,0,0)", "parity "}},
    {"missing_empty_wait", {"kernel 'product_kernel'", "block (0,0,0), thread (128,0,0)"}},
    {"missing_expect_tx", {"kernel 'product_kernel'", "the copy at"}},
    {"missing_fence_of_mbarrier",
     {"missing proxy fence in kernel 'product_kernel'", "thread (128,0,0)", "the copy's mbarrier at",
      "ordinary stores have written with no fence_proxy_async after them"}},
    {"missing_proxy_fence",
     {"missing proxy fence in kernel 'product_kernel'", "block (0,0,0), thread (", "wgmma at",
      "ordinary stores have written with no fence_proxy_async after them"}},
    {"missing_wgmma_fence", {"missing wgmma_fence in kernel 'product_kernel'", "block (0,0,0), thread ("}},
    {"missing_wgmma_commit", {"kernel 'product_kernel'", "wgmma at", "waited for"}},
    {"missing_wgmma_wait", {"kernel 'product_kernel'", "wgmma at", "waited for"}},
    {"released_too_early",
     {"shared memory in use in kernel 'product_kernel'", "thread (128,0,0)", "a copy at", "which the wgmma at"}},
    {"operand_overwritten",
     {"shared memory in use in kernel 'product_kernel'", "what the wgmma at",
      "was overwritten before any thread had waited"}},
    {"fragment_overwritten", {"operand in flight in kernel 'fragment_kernel'", "registers that are A of the wgmma at"}},
    {"accumulator_overwritten",
     {"accumulator in flight in kernel 'fragment_kernel'", "registers of the wgmma at", "were written before"}},
    {"product_not_waited_for",
     {"wgmma not waited for in kernel 'fragment_kernel'",
      "the block ended, and no thread had waited for the wgmma at"}},
    {"tile_off_the_pattern", {"misaligned tile in kernel 'fragment_kernel'", "a multiple of 256", "byte 32"}},
    {"registers_of_half_a_group", {"incomplete warp group in kernel 'fragment_kernel'", "thread (64,0,0)"}},
    {"too_many_registers", {"too many registers in kernel 'fragment_kernel'", "take 65536 registers, of 64512"}},
    {"ordinary_read_in_flight", {}, by_some_seed},
    {"missing_store_fence", {"missing proxy fence in kernel 'round_trip_kernel'", "thread (0,0,0)", "a store at"}},
    {"missing_bulk_wait_read",
     {"shared memory in use in kernel 'round_trip_kernel'", "what the store at", "was overwritten"}},
    {"missing_bulk_wait", {"store not waited for in kernel 'round_trip_kernel'", "the block ended"}},
    {"arrival_that_never_comes",
     {"kernel 'round_trip_kernel'", "block (0,0,0)", "mbarrier_wait at", "and 63 others wait for a phase of parity 0",
      "lacks 1 of 2 arrivals and 0 bytes"},
     without_strict_mode_too},
    {"named_barrier_of_other_size",
     {"wrong named barrier in kernel 'round_trip_kernel'", "number 1 is for"},
     without_strict_mode_too,
     {"barrier divergence in kernel 'round_trip_kernel'", "named barrier 1 at"}},
    {"box_off_16_bytes",
     {"illegal instruction in kernel 'box_kernel'", "thread (0,0,0)",
      "begins at element 6 of its rows: the copy engine needs a multiple of 16 bytes"},
     without_strict_mode_too},
    {"store_at_negative",
     {"illegal instruction in kernel 'box_kernel'", "thread (0,0,0)", "the store at", "begins at -4 in dimension 0"},
     without_strict_mode_too},
    {"store_of_odd_rows",
     {"store past a row's end in kernel 'box_kernel'", "thread (0,0,0)", "have 120 bytes",
      "overwrite the 8 after a row"},
     without_strict_mode_too},
    {"mbarrier_of_no_arrivals",
     {"wrong mbarrier in kernel 'demands_kernel'", "thread (0,0,0)", ": 0 arrivals"},
     without_strict_mode_too},
    {"mbarrier_initialised_twice",
     {"wrong mbarrier in kernel 'demands_kernel'", "the one initialised at", "is still there (mbarrier_invalidate)"},
     without_strict_mode_too},
    {"mbarrier_invalidated_in_use",
     {"wrong mbarrier in kernel 'demands_kernel'", "invalidated at", "while threads wait or copies are in flight"},
     without_strict_mode_too},
    {"too_many_arrivals",
     {"too many arrivals in kernel 'demands_kernel'", "phase 0 of the mbarrier initialised at", "has had its 1"},
     without_strict_mode_too},
    {"too_many_bytes",
     {"too many bytes in kernel 'demands_kernel'", "an mbarrier counts up to 1048575"},
     without_strict_mode_too},
    {"mbarrier_never_initialised",
     {"no mbarrier in kernel 'demands_kernel'", "static shared memory holds no initialised mbarrier"},
     without_strict_mode_too},
    {"number_of_syncthreads",
     {"wrong named barrier in kernel 'demands_kernel'", "number 0 for 64 threads. Numbers are 1 to 15"},
     without_strict_mode_too},
    {"copy_not_waited_for",
     {"copy not waited for in kernel 'demands_kernel'", "the block ended, and no thread had waited for the copy at"}},
    {"two_copies_to_a_place",
     {"shared memory in flight in kernel 'demands_kernel'", "a copy at", "touches byte 0 of", "which the copy at",
      "fills"}},
    {"place_of_a_store_filled",
     {"shared memory in use in kernel 'demands_kernel'", "a copy at", "overwrites byte 0 of", "which the store at",
      "reads: its thread has not waited for it"}},
    {"store_not_committed",
     {"shared memory in use in kernel 'demands_kernel'", "a copy at", "which the store at",
      "reads: its thread has not waited for it"}},
    {"store_waited_for_by_another",
     {"store not waited for in kernel 'demands_kernel'", "its thread had not waited until the store at"}},
    {"map_of_another_rank",
     {"no tensor map in kernel 'demands_kernel'", "the map at", "is not one of a tensor of rank 3"},
     without_strict_mode_too},
    {"two_products_of_a_group",
     {"warp group divergence in kernel 'group_kernel'", "it does the wgmma at",
      "while others of its warp group do that at"},
     without_strict_mode_too},
    {"two_tiles_of_a_group",
     {"warp group divergence in kernel 'group_kernel'", "threads give different descriptors to the wgmma at"},
     without_strict_mode_too},
    {"tile_outside_shared_memory",
     {"memory fault: a wgmma of kernel 'group_kernel'", "reads beyond its 3072 bytes of dynamic shared memory"},
     without_strict_mode_too},
    {"wgmma_of_a_warp",
     {"incomplete warp group in kernel 'group_kernel'", "needs 128 threads"},
     without_strict_mode_too},
    {"more_threads_than_bounds",
     {"too many threads in kernel 'bounds_kernel'", "its __launch_bounds__ are 63 threads, and the block has 64"},
     without_strict_mode_too},
    {"shared_memory_not_asked_for",
     {"too much shared memory in kernel 'two_kinds_of_shared_kernel'",
      "49088 bytes of the launch and 128 of __shared__ variables are more than 49152, which a kernel has without "
      "asking"}},
    // 6. Addresses that are no multiple of what a GPU moves at once.
    {"misaligned_source",
     {"misaligned address in kernel 'aligned_kernel'", "thread (", "cp.async from device memory at",
      "needs a multiple of 16 bytes: the remainder is 4"},
     without_strict_mode_too},
    {"misaligned_destination",
     {"misaligned address in kernel 'aligned_kernel'", "thread (", "cp.async to shared memory at",
      "needs a multiple of 16 bytes: the remainder is 8"},
     without_strict_mode_too},
    {"misaligned_matrix_row",
     {"misaligned address in kernel 'aligned_kernel'", "thread (", "ldmatrix at",
      "needs a multiple of 16 bytes: the remainder is 2"},
     without_strict_mode_too},
    {"misaligned_load",
     {"misaligned address in kernel 'aligned_kernel'", "thread (", "load_packed at",
      "needs a multiple of 16 bytes: the remainder is 4"},
     without_strict_mode_too},
    {"misaligned_store",
     {"misaligned address in kernel 'aligned_kernel'", "thread (", "store_packed at",
      "needs a multiple of 16 bytes: the remainder is 12"},
     without_strict_mode_too},
    {"misaligned_bulk_copy",
     {"misaligned address in kernel 'aligned_kernel'", "thread (0,0,0)", "the destination of the bulk copy at",
      "a multiple of 16 bytes: the remainder is 4"},
     without_strict_mode_too},
    {"odd_bulk_copy",
     {"misaligned address in kernel 'aligned_kernel'", "thread (0,0,0)", "the size of the bulk copy at",
      "needs a multiple of 16 bytes: the remainder is 8"},
     without_strict_mode_too},
    {"misaligned_tile",
     {"misaligned address in kernel 'box_kernel'", "thread (0,0,0)", "a tile in shared memory at",
      "needs a multiple of 128 bytes: the remainder is 16"},
     without_strict_mode_too},
    {"misaligned_mbarrier",
     {"misaligned address in kernel 'aligned_kernel'", "thread (0,0,0)", "an mbarrier at",
      "needs a multiple of 8 bytes: the remainder is 4"},
     without_strict_mode_too},
    // 7. Calls of NCCL.
    {"ranks_of_other_counts",
     {"as number 0 of its collectives", "rank 0: ncclAllReduce of 8 ncclFloat32, ncclSum at",
      "rank 1: ncclAllReduce of 7 ncclFloat32, ncclSum at"},
     without_strict_mode_too},
    {"ranks_of_other_roots",
     {"as number 0 of its collectives", "ncclBroadcast of 8 ncclFloat32, root 0 at",
      "ncclBroadcast of 8 ncclFloat32, root 1 at"},
     without_strict_mode_too},
    {"messages_of_other_sizes",
     {"as number 0 of the messages between the two", "rank 0: ncclSend of 8 ncclFloat32 to rank 1",
      "rank 1: ncclRecv of 28 ncclUint8 from rank 0"},
     without_strict_mode_too},
    {"buffers_that_overlap",
     {"calls ncclAllGather of 4 ncclFloat32 at", "with two buffers that overlap"},
     without_strict_mode_too},
    {"group_that_overlaps",
     {"two calls of a group touch the same bytes: ncclRecv of 4 ncclFloat32 from rank",
      "and ncclSend of 4 ncclFloat32"},
     without_strict_mode_too},
    {"group_with_two_results_in_a_place",
     {"two calls of a group touch the same bytes: ncclAllReduce of 2 ncclFloat32, ncclSum at",
      "which writes them, and ncclAllReduce"},
     without_strict_mode_too},
    {"memory_of_another_rank",
     {"rank 0 of a communicator, whose device is 0, calls ncclAllReduce of 8 ncclFloat32, ncclMax",
      "with memory of device 1"},
     without_strict_mode_too},
    {"buffer_beyond_its_memory",
     {"calls ncclAllReduce of 9 ncclFloat32, ncclSum", "with a buffer that ends 4 bytes after its allocation"},
     without_strict_mode_too},
    {"another_current_device",
     {"of a communicator whose device is ", "; the current device is "},
     without_strict_mode_too},
    {"stream_of_another_device",
     {"of a communicator whose device is ", " on a stream of device "},
     without_strict_mode_too},
    {"collective_not_waited_for",
     {"race between streams", "ncclAllReduce of 8 ncclFloat32, ncclSum at", "cudaMemsetAsync at",
      "bytes 0 to 3 of an allocation of 32"}},
    {"sent_and_overwritten",
     {"race between streams", "ncclSend of 8 ncclFloat32 to rank 1 at", "cudaMemsetAsync at",
      "bytes 0 to 3 of an allocation of 32"}},
    {"split_while_under_way", {"calls ncclCommSplit at", "while its calls of the communicator are under way"}},
    {"used_after_destruction",
     {"a communicator that was never made, or has been destroyed or aborted"},
     without_strict_mode_too},
};

void check_report(const Mistake& mistake, const Outcome& outcome) {
    INFO(outcome.text);
    CHECK(outcome.reported);
    const bool is_other = !mistake.otherwise.empty() && outcome.text.find(mistake.report[0]) == std::string::npos;
    for (const std::string& words : is_other ? mistake.otherwise : mistake.report)
        CHECK_THAT(outcome.text, ContainsSubstring(words));
    CHECK(marked_lines(outcome.text, mistake.name) >= 1);
}

}  // namespace

TEST_CASE("strict mode catches every mistake", "[cpu][strict]") {
    for (const Mistake& mistake : mistakes) {
        INFO(mistake.name);
        int n_wrong = 0;
        for (int seed = 1; seed <= kSeeds; ++seed) {
            INFO("seed " << seed);
            const Outcome outcome = run(mistake.name + std::string(" wrong"), seed);
            if (!mistake.report.empty()) {
                check_report(mistake, outcome);
            } else {
                INFO(outcome.text);
                CHECK((outcome.wrong || outcome.right));
                n_wrong += outcome.wrong;
            }
        }
        if (mistake.report.empty()) CHECK(n_wrong >= (mistake.caught == by_some_seed ? 1 : kSeeds));
    }
}

TEST_CASE("strict mode passes what is right", "[cpu][strict]") {
    for (const Mistake& mistake : mistakes) {
        for (int seed = 0; seed <= kSeeds; ++seed) {
            const Outcome outcome = run(mistake.name + std::string(" right"), seed);
            INFO(mistake.name << " seed " << seed << ": " << outcome.text);
            CHECK(outcome.right);
        }
    }
}

TEST_CASE("threads that wait for ever are reported without strict mode too", "[cpu][strict]") {
    for (const Mistake& mistake : mistakes) {
        if (mistake.caught != without_strict_mode_too) continue;
        INFO(mistake.name);
        check_report(mistake, run(mistake.name + std::string(" wrong"), 0));
    }
}

TEST_CASE("a fault without strict mode names the kernel and says how to learn more", "[cpu][strict]") {
    const Outcome outcome = run("null_pointer wrong", 0);
    CHECK(!outcome.right);
    CHECK_THAT(outcome.text, ContainsSubstring("kernel 'no_check_kernel'") && ContainsSubstring("CUDA_CPU_STRICT=1"));
}

// What strict mode is for: without it the threads of this kernel run in order, and all looks well.
TEST_CASE("some mistakes only show in strict mode", "[cpu][strict]") {
    for (const std::string name : {"threads_in_order", "missing_event_wait", "missing_stream_sync", "past_the_end"})
        CHECK(run(name + " wrong", 0).right);
}

TEST_CASE("a seed repeats: the same mistake is reported in the same thread", "[cpu][strict]") {
    const std::string report = run("use_after_free wrong", 7).text;
    CHECK_THAT(report, ContainsSubstring("thread ("));
    CHECK(run("use_after_free wrong", 7).text == report);
}

TEST_CASE("every case of wrong_kernels is tested", "[cpu][strict]") {
    std::istringstream usage(run("", 0).text);
    std::string line;
    std::getline(usage, line);  // "usage: ..."
    size_t n = 0;
    for (std::string name; usage >> name; ++n) {
        INFO(name);
        CHECK(std::any_of(mistakes.begin(), mistakes.end(), [&](const Mistake& m) { return m.name == name; }));
    }
    CHECK(n == mistakes.size());
}

#endif
