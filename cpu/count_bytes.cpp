// cpu/count_bytes.cpp: counts the bytes of device memory that a kernel touches (make count). Only that build has it.
// Of a kernel that may start before those in front of it have ended (layers/early_launch.cuh), it also checks what that
// touches before it waits for them.
//
// g++ -fsanitize=thread puts a call before every load and store, and the functions that are called are ours, instead of
// the library that looks for races with them; copies of whole ranges are calls of memcpy and its like, to which the
// Makefile gives other names. So a byte of an allocation gets a mark when it is read, and another when it is written;
// after a launch the marks are counted, and compared with what the launcher states (launched(), core/core.h).
//
// A kernel runs on the OS thread that launches it (OMP_NUM_THREADS=1), and each thread has marks of its own, because
// ranks may be threads. What the host itself does with device memory is not counted.
#include "races.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_cpu {
namespace {

constexpr uint8_t kRead = 1, kWritten = 2, kReadEarly = 4, kWrittenEarly = 8;
constexpr uintptr_t kPage = 4096, kLine = 256;  // an allocation has whole lines (cpu/memory.cpp)
struct Marks {
    uint8_t of[kPage] = {};
};
// Of memory that kernels can reach: which of it the launch has touched, by page number.
using Pages = std::map<uintptr_t, std::unique_ptr<Marks>>;
thread_local Pages pages;
// Where the marks of a line are, or null: it is ordinary memory. Most loads and stores are of a few lines.
struct FoundLine {
    uintptr_t number = ~uintptr_t{0};
    uint8_t* marks = nullptr;
};
thread_local std::array<FoundLine, 1024> found_lines;

// On a GPU these may all be running when a launch starts early: the early launches in front of it, and the launch in
// front of those, which has waited for everything before it.
struct InFront {
    std::string kernel;
    Pages pages;
};
thread_local std::vector<InFront> in_front;
// Of the launch that runs, if it may start early. A block has waited when all of its threads have.
struct Early {
    bool on = false;
    uint64_t blocks_before = 0, block = 0;  // begun before it; the last that has waited
    uint64_t n_waited = 0;                  // blocks
};
thread_local Early early;

// How what is touched is compared with what is stated. `most`: the data say how much it is; the statement is what it
// may be at most, and over all launches it is at least three quarters of that. `at_most`: the data may leave nothing.
enum class Held : uint8_t { exact, most, at_most, at_least };
struct HeldBytes {
    Held reads, writes;
};
HeldBytes how_to_hold(const std::string& kernel, int64_t reads) {
    using enum Held;
    static const std::map<std::string, HeldBytes> others = {
        // Of a table, or of structures, the rows or the fields that are asked for.
        {"rope_kernel", {most, exact}},
        {"paged_write_kernel", {most, exact}},
        {"adam8bit_kernel", {most, exact}},
        {"sum_squares_kernel", {most, exact}},
        {"squares_kernel", {most, exact}},
        {"sizes_kernel", {most, exact}},
        {"adafactor_apply_kernel", {most, exact}},
        {"factors_kernel", {at_most, most}},
        {"part_sums_kernel", {at_most, most}},
        {"divided_factors_kernel", {at_most, exact}},
        {"factors_of_part_kernel", {at_most, exact}},
        {"scales_kernel", {at_most, exact}},
        {"lengths_kernel", {at_most, exact}},
        {"adjust_kernel", {most, exact}},
        {"distribution_kernel", {most, exact}},
        {"draw_kernel", {most, exact}},
        {"log_probabilities_kernel", {most, at_most}},
        {"embedding_forward_kernel", {at_most, exact}},
        // Tokens that are to be ignored; parts of a gradient that are added to others.
        {"cross_entropy_finish_kernel", {most, exact}},
        {"flash_backward_hopper_kernel", {most, most}},
        // Which lists are long.
        {"embedding_backward_kernel", {at_most, at_most}},
        // How many rows the cache has, only the device knows: keys and values are not stated. Nor does the host know
        // which chunks have one row, and may be divided into splits.
        {"paged_attention_kernel", {at_least, at_most}},
        {"paged_decode_kernel", {at_least, most}},
        {"join_splits_kernel", {at_most, at_most}},
    };
    // Of an amax that may be known already, whether it is.
    if (kernel == "amax_kernel" && reads == sizeof(float)) return {at_least, exact};
    const auto found = others.find(kernel);
    return found == others.end() ? HeldBytes{exact, exact} : found->second;
}
bool holds(Held held, int64_t stated, int64_t counted) {
    return held == Held::exact ? counted == stated : held == Held::at_least ? counted >= stated : counted <= stated;
}

struct Bytes {
    int64_t reads = 0, writes = 0;
};
struct Verdict {
    int64_t launches = 0, differing = 0;
    Bytes stated, counted;          // of the last that differed
    Bytes all_stated, all_counted;  // of those whose limits are `most`
    std::string too_early;          // what the last launch that breaks the rules of early launches does
};
std::mutex mutex;                         // guards the next
std::map<std::string, Verdict> verdicts;  // by kernel

uint8_t* marks_of_line(uintptr_t number) {
    FoundLine& line = found_lines[number % found_lines.size()];
    if (line.number == number) return line.marks;
    const uintptr_t address = number * kLine;
    const Extent extent = allocation_around(address);
    line = {number, nullptr};
    if (extent.end == 0) return nullptr;
    auto& page = pages[address / kPage];
    if (!page) page = std::make_unique<Marks>();
    return line.marks = page->of + address % kPage;
}
[[gnu::noinline]] void set_marks(uintptr_t address, size_t bytes, uint8_t what) {
    for (const uintptr_t end = address + bytes; address < end;) {
        const uintptr_t first = address % kLine, n = std::min(kLine - first, end - address);
        if (uint8_t* marks = marks_of_line(address / kLine))
            for (uintptr_t i = first; i < first + n; ++i) marks[i] |= what;
        address += n;
    }
}
inline void mark(uintptr_t address, size_t bytes, uint8_t what) {
    // Ordinary memory, as of most loads and stores, has no marks.
    const FoundLine& line = found_lines[address / kLine % found_lines.size()];
    if (line.number == address / kLine && !line.marks && address % kLine + bytes <= kLine) return;
    if (!in_kernel()) return;
    const bool is_early = early.on && early.block != blocks_begun();
    set_marks(address, bytes, is_early ? what | what * (kReadEarly / kRead) : what);
}
// What the launch, an early one, has done that it may not; "" if nothing.
std::string done_too_early() {
    if (early.n_waited != blocks_begun() - early.blocks_before)
        return "has " + std::to_string(blocks_begun() - early.blocks_before) + " blocks, of which " +
               std::to_string(early.n_waited) + " call wait_for_previous()";
    for (const auto& [number, page] : pages) {
        for (const uint8_t marks : page->of)
            if (marks & kWrittenEarly) return "writes before it calls wait_for_previous()";
        for (const InFront& other : in_front) {
            const auto its = other.pages.find(number);
            if (its == other.pages.end()) continue;
            for (uintptr_t i = 0; i < kPage; ++i)
                if (page->of[i] & kReadEarly && its->second->of[i] & kWritten)
                    return "reads before it calls wait_for_previous() what " + other.kernel + " in front of it writes";
        }
    }
    return "";
}
// The launch has ended, and is now in front of the next.
void put_in_front(const char* kernel) {
    if (!kernel && pages.empty()) return;  // there was none
    if (!early.on) in_front.clear();
    in_front.push_back({kernel ? kernel : "a launch that states nothing", std::move(pages)});
    early = {};
    pages.clear();
    found_lines.fill({});
}

// At the end of the program: each kernel whose statement was not what it did.
struct AtExit {
    static void print(const std::string& kernel, const std::string& which, const Bytes& stated, const Bytes& counted) {
        std::printf("%s: %s %lld bytes read and %lld written, and touches %lld and %lld\n", kernel.c_str(),
                    which.c_str(), static_cast<long long>(stated.reads), static_cast<long long>(stated.writes),
                    static_cast<long long>(counted.reads), static_cast<long long>(counted.writes));
    }
    ~AtExit() {
        int64_t launches = 0;
        bool differs = false;
        std::string names;
        for (const auto& [kernel, v] : verdicts) {
            launches += v.launches;
            names += " " + kernel;
            if (v.differing > 0)
                print(kernel,
                      std::to_string(v.differing) + " of " + std::to_string(v.launches) +
                          " launches differ; the last states",
                      v.stated, v.counted);
            const bool too_much =
                4 * v.all_counted.reads < 3 * v.all_stated.reads || 4 * v.all_counted.writes < 3 * v.all_stated.writes;
            if (too_much) print(kernel, "all launches together state", v.all_stated, v.all_counted);
            if (!v.too_early.empty()) std::printf("%s %s\n", kernel.c_str(), v.too_early.c_str());
            differs = differs || v.differing > 0 || too_much || !v.too_early.empty();
        }
        std::printf("counted kernels:%s\ncounted the bytes of %lld launches: %s\n", names.c_str(),
                    static_cast<long long>(launches), differs ? "some are not as stated" : "all as stated");
        std::fflush(stdout);
        if (differs) std::_Exit(1);
    }
} at_exit;

}  // namespace

void count_launch(const char* kernel, int64_t reads, int64_t writes) {
    Bytes counted;
    for (const auto& [number, page] : pages)
        for (const uint8_t marks : page->of)
            counted.reads += marks & kRead, counted.writes += (marks & kWritten) / kWritten;
    const std::string too_early = early.on ? done_too_early() : "";
    put_in_front(kernel);
    // What NVIDIA's library reads and writes more than once, its emulation cannot say.
    if (!kernel || kernel == std::string_view("matmul")) return;
    const HeldBytes held = how_to_hold(kernel, reads);
    const std::lock_guard lock(mutex);
    Verdict& verdict = verdicts[kernel];
    ++verdict.launches;
    if (!too_early.empty()) verdict.too_early = too_early;
    if (held.reads == Held::most) verdict.all_stated.reads += reads, verdict.all_counted.reads += counted.reads;
    if (held.writes == Held::most) verdict.all_stated.writes += writes, verdict.all_counted.writes += counted.writes;
    if (holds(held.reads, reads, counted.reads) && holds(held.writes, writes, counted.writes)) return;
    ++verdict.differing;
    verdict.stated = {reads, writes}, verdict.counted = counted;
}

void count_product(uintptr_t address, size_t bytes) { set_marks(address, bytes, kWritten); }
void count_end() { in_front.clear(); }
void count_early_launch() { early = {.on = true, .blocks_before = blocks_begun()}; }
void count_wait_for_previous() {
    if (early.block == blocks_begun()) return;
    early.block = blocks_begun();
    ++early.n_waited;
}

}  // namespace cuda_cpu

// What g++ calls.
extern "C" {
#define TOUCHES(n)                                                                          \
    void __tsan_read##n(uintptr_t address) { cuda_cpu::mark(address, n, cuda_cpu::kRead); } \
    void __tsan_write##n(uintptr_t address) { cuda_cpu::mark(address, n, cuda_cpu::kWritten); }
TOUCHES(1)
TOUCHES(2)
TOUCHES(4)
TOUCHES(8)
TOUCHES(16)
void __tsan_read_range(uintptr_t address, size_t n) { cuda_cpu::mark(address, n, cuda_cpu::kRead); }
void __tsan_write_range(uintptr_t address, size_t n) { cuda_cpu::mark(address, n, cuda_cpu::kWritten); }
char __tsan_atomic8_load(const char* from, int) { return __atomic_load_n(from, __ATOMIC_SEQ_CST); }  // of the host's
int __tsan_atomic32_load(const int* from, int) {
    __tsan_read4(reinterpret_cast<uintptr_t>(from));
    return __atomic_load_n(from, __ATOMIC_SEQ_CST);
}
bool __tsan_atomic32_compare_exchange_weak(int* at, int* expected, int value, int, int) {
    __tsan_read4(reinterpret_cast<uintptr_t>(at));
    __tsan_write4(reinterpret_cast<uintptr_t>(at));
    return __atomic_compare_exchange_n(at, expected, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_init() {}
void* __wrap_memcpy(void* to, const void* from, size_t n) {
    cuda_cpu::mark(reinterpret_cast<uintptr_t>(from), n, cuda_cpu::kRead);
    cuda_cpu::mark(reinterpret_cast<uintptr_t>(to), n, cuda_cpu::kWritten);
    return std::memcpy(to, from, n);
}
void* __wrap_memmove(void* to, const void* from, size_t n) {
    cuda_cpu::mark(reinterpret_cast<uintptr_t>(from), n, cuda_cpu::kRead);
    cuda_cpu::mark(reinterpret_cast<uintptr_t>(to), n, cuda_cpu::kWritten);
    return std::memmove(to, from, n);
}
void* __wrap_memset(void* to, int value, size_t n) {
    cuda_cpu::mark(reinterpret_cast<uintptr_t>(to), n, cuda_cpu::kWritten);
    return std::memset(to, value, n);
}
}
