// cpu/count_bytes.cpp: counts the bytes of device memory that a kernel touches (make count). Only that build has it.
//
// g++ -fsanitize=thread puts a call before every load and store, and the functions that are called are ours, instead of
// the library that looks for races with them; copies of whole ranges are calls of memcpy and its like, to which the
// Makefile gives other names. So a byte of an allocation gets a mark when it is read, and another when it is written;
// after a launch the marks are counted, and held against what the launcher states (launched(), core/core.h).
//
// One OS thread: the marks have no locks.
#include "races.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cuda_cpu {
namespace {

constexpr uint8_t kRead = 1, kWritten = 2;
constexpr uintptr_t kPage = 4096;
struct Marks {
    uint8_t of[kPage] = {};
};
std::map<uintptr_t, std::unique_ptr<Marks>> pages;  // of device memory that the launch has touched, by page number
Extent last_extent{};
uintptr_t last_page = ~uintptr_t{0};
Marks* last_marks = nullptr;
// From the first launch on, which is not counted: what runs before main must find nothing here.
bool counts = false;

struct Verdict {
    int64_t launches = 0, differing = 0, stated[2] = {}, counted[2] = {};  // the last that differed: read, written
};
std::map<std::string, Verdict> verdicts;

void mark(uintptr_t address, size_t bytes, uint8_t what) {
    if (!counts) return;
    if (address < last_extent.begin || address >= last_extent.end) {
        const Extent extent = allocation_around(address);
        if (extent.end == 0 || extent.on_host) return;
        last_extent = extent;
    }
    for (size_t i = 0; i < bytes; ++i, ++address) {
        if (address / kPage != last_page) {
            last_page = address / kPage;
            auto& page = pages[last_page];
            if (!page) page = std::make_unique<Marks>();
            last_marks = page.get();
        }
        last_marks->of[address % kPage] |= what;
    }
}
void forget() {
    pages.clear();
    last_page = ~uintptr_t{0};
    last_extent = {};
}

// At the end of the program: each kernel whose statement was not what it did.
struct AtExit {
    ~AtExit() {
        int64_t launches = 0;
        bool differs = false;
        for (const auto& [kernel, v] : verdicts) {
            launches += v.launches;
            if (v.differing == 0) continue;
            differs = true;
            std::printf(
                "%s: %lld of %lld launches differ; the last states %lld bytes read and %lld written, and touches "
                "%lld and %lld\n",
                kernel.c_str(), static_cast<long long>(v.differing), static_cast<long long>(v.launches),
                static_cast<long long>(v.stated[0]), static_cast<long long>(v.stated[1]),
                static_cast<long long>(v.counted[0]), static_cast<long long>(v.counted[1]));
        }
        std::printf("counted the bytes of %lld launches of %zu kernels: %s\n", static_cast<long long>(launches),
                    verdicts.size(), differs ? "some are not as stated" : "all as stated");
        std::fflush(stdout);
        if (differs) std::_Exit(1);
    }
} at_exit;

}  // namespace

void count_launch(const char* kernel, int64_t reads, int64_t writes) {
    int64_t read = 0, written = 0;
    for (const auto& [number, page] : pages)
        for (const uint8_t marks : page->of) read += marks & kRead, written += (marks & kWritten) / kWritten;
    forget();
    // Not held against what is stated: products, which are a library's, and reads that it may make again; Adafactor's
    // passes, whose statement is an estimate; and an amax that is known, which is read alone only once there is one.
    static const std::set<std::string> others = {"matmul",        "apply_kernel", "factors_kernel", "lengths_kernel",
                                                 "scales_kernel", "sizes_kernel", "squares_kernel"};
    const bool is_known = kernel && std::string(kernel) == "amax_kernel" && reads == sizeof(float);
    if (!kernel || !std::exchange(counts, true) || is_known || others.count(kernel) > 0) return;
    Verdict& verdict = verdicts[kernel];
    ++verdict.launches;
    // Which rows of a table these read, or write, follows from the data, and in the attention of Hopper which parts are
    // added to others: they state the most that there can be.
    static const std::set<std::string> lists = {"embedding_backward_pieces_kernel",
                                                "embedding_backward_long_lists_kernel", "flash_backward_hopper_kernel"};
    static const std::set<std::string> tables = {"rope_kernel", "embedding_forward_kernel", "adam8bit_kernel"};
    if ((written == writes || (written < writes && lists.count(kernel) > 0)) &&
        (lists.count(kernel) + tables.count(kernel) > 0 ? read <= reads : read == reads))
        return;
    ++verdict.differing;
    verdict.stated[0] = reads, verdict.stated[1] = writes;
    verdict.counted[0] = read, verdict.counted[1] = written;
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
