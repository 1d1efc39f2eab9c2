// cpu/strict.cpp: the parts of strict mode that are not scheduling: its random numbers, memory that ends at a page which
// faults, fresh memory full of NaN, and the report of a fault with the kernel's name.
//
//     ... no access page ... | canary, then the allocation's bytes, ending here -> | ... no access page ...
//
// The end is on a 16-byte boundary (the widest load a kernel may use), so up to 15 bytes may lie between an allocation's
// last byte and the page's end. They hold the canary 0xff, like the rest of the page before the allocation: read as floats
// they are NaN, and whether anyone wrote there is checked after every kernel.
#include "device.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>

namespace cuda_cpu {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr unsigned char kCanary = 0xff;

struct Guarded {
    uintptr_t map, map_bytes;  // with both guard pages
    uintptr_t user, user_bytes;
    bool freed;
};

std::mutex mutex;
std::map<uintptr_t, Guarded> guarded;  // by the first byte of the mapping
std::atomic<uint64_t> random_state{0};

const Guarded* find(uintptr_t address) {
    auto at = guarded.upper_bound(address);
    if (at == guarded.begin()) return nullptr;
    --at;
    return address < at->second.map + at->second.map_bytes ? &at->second : nullptr;
}

std::string what_lies_at(uintptr_t address) {
    const Guarded* g = find(address);
    if (!g) return "an address that is no device memory (a host pointer or a null pointer)";
    const std::string which = "an allocation of " + std::to_string(g->user_bytes) + " bytes";
    if (g->freed) return which + " that has been freed";
    if (address >= g->user + g->user_bytes)
        return std::to_string(address - g->user - g->user_bytes) + " bytes past the end of " + which;
    return std::to_string(g->user - address) + " bytes before the start of " + which;
}

void on_fault(int, siginfo_t* info, void*) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
    report("memory fault: " + where_are_we() + " touched " + what_lies_at(address));
}

bool start_strict_mode() {
    const char* seed = std::getenv("CUDA_CPU_STRICT");
    if (!seed || !*seed) return false;
    random_state = std::strtoull(seed, nullptr, 10) * 0x9e3779b97f4a7c15u + 1;
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    prepare_os_thread();
    return true;
}

void check_canary(const Guarded& g) {
    const auto intact = [](uintptr_t from, uintptr_t to) {
        for (uintptr_t at = from; at < to; ++at)
            if (*reinterpret_cast<const unsigned char*>(at) != kCanary) return false;
        return true;
    };
    const std::string which = "an allocation of " + std::to_string(g.user_bytes) + " bytes";
    const uintptr_t first = std::max(g.map + kPageBytes, g.user - std::min<uintptr_t>(g.user, 64));
    if (!intact(g.user + g.user_bytes, g.map + g.map_bytes - kPageBytes))
        report("memory fault: " + where_are_we() + " or an earlier thread of it wrote past the end of " + which);
    if (!intact(first, g.user)) report("memory fault: " + where_are_we() + " or an earlier thread of it wrote before the start of " + which);
}

}  // namespace

bool strict = start_strict_mode();

uint64_t strict_random() {
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void report(const std::string& text) {
    std::fprintf(stderr, "CUDA on the CPU: %s\n", text.c_str());
    std::fflush(stderr);
    signal(SIGABRT, SIG_DFL);
    std::abort();
}

void prepare_os_thread() {
    constexpr size_t bytes = 64 << 10;
    stack_t stack{};
    stack.ss_sp = std::malloc(bytes);
    stack.ss_size = bytes;
    sigaltstack(&stack, nullptr);
}

void* guarded_allocate(size_t bytes) {
    const size_t rounded = (bytes + 15) / 16 * 16, pages = (rounded + kPageBytes - 1) / kPageBytes;
    const size_t map_bytes = (pages + 2) * kPageBytes;
    void* map = mmap(nullptr, map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return nullptr;
    char* first = static_cast<char*>(map) + kPageBytes;
    std::memset(first, kCanary, pages * kPageBytes);
    mprotect(map, kPageBytes, PROT_NONE);
    mprotect(first + pages * kPageBytes, kPageBytes, PROT_NONE);
    void* user = first + pages * kPageBytes - rounded;
    const std::lock_guard lock(mutex);
    guarded[reinterpret_cast<uintptr_t>(map)] = {reinterpret_cast<uintptr_t>(map), map_bytes, reinterpret_cast<uintptr_t>(user),
                                                 bytes, false};
    return user;
}

// The address range stays taken and faults from now on; its memory goes back to the system.
void guarded_free(void* pointer, size_t) {
    const std::lock_guard lock(mutex);
    auto at = guarded.upper_bound(reinterpret_cast<uintptr_t>(pointer));
    Guarded& g = (--at)->second;
    check_canary(g);
    g.freed = true;
    madvise(reinterpret_cast<void*>(g.map), g.map_bytes, MADV_DONTNEED);
    mprotect(reinterpret_cast<void*>(g.map), g.map_bytes, PROT_NONE);
}

void check_canaries() {
    const std::lock_guard lock(mutex);
    for (const auto& [map, g] : guarded)
        if (!g.freed) check_canary(g);
}

}  // namespace cuda_cpu
