// cpu/strict.cpp: the parts of strict mode that are not scheduling: its random numbers, memory that ends at a page
// which faults, fresh memory full of NaN, and the report of a fault with the kernel's name.
//
//     ... no access page ... | canary, then the allocation's bytes, ending here -> | ... no access page ...
//
// The end is on a 16-byte boundary (the widest load a kernel may use), so up to 15 bytes may lie between an
// allocation's last byte and the page's end. They hold the canary 0xff, like the rest of the page before the
// allocation: read as floats they are NaN, and after every block and kernel it is checked that they have not been
// written to.
#include "races.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace cuda_cpu {

// A function, because other files allocate before main().
size_t page_bytes() {
    static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

namespace {

constexpr size_t kAlignment = 16;
constexpr size_t kBytesBefore = 64;    // how far before an allocation its canary is checked
constexpr size_t kFreedRanges = 4096;  // how many freed allocations are remembered, and fault
constexpr unsigned char kCanary = 0xff;

struct Guarded {
    uintptr_t map, map_bytes;  // with both guard pages
    uintptr_t user, user_bytes;
    uintptr_t first() const { return map + page_bytes(); }
    uintptr_t end() const { return map + map_bytes - page_bytes(); }  // the guard page that follows
    const char* kind;                                                 // "device memory", ...

    std::string name() const { return "an allocation of " + std::to_string(user_bytes) + " bytes of " + kind; }
};

// Where an allocation has canaries. They are compared after every block and kernel: with a walk through `live` that was
// half of strict mode's time.
struct Canaries {
    uintptr_t before, user;  // one end of those in front of it, the other
    uintptr_t last;          // kAlignment bytes: the allocation's last ones and the gap, if there is one
    uint64_t gap[2]{};       // all bits of the gap's bytes
    const Guarded* of;
    explicit Canaries(const Guarded& g)
        : before(std::max(g.first(), g.user - kBytesBefore)), user(g.user), last(g.end() - kAlignment), of(&g) {
        const size_t n = g.end() - (g.user + g.user_bytes);
        std::memset(reinterpret_cast<char*>(gap) + kAlignment - n, kCanary, n);
    }
    bool start_intact() const {
        uint64_t all = ~uint64_t{0};
        for (uintptr_t at = before; at < user; at += sizeof all) all &= word(at);
        return all == ~uint64_t{0};
    }
    bool has_gap() const { return gap[1] != 0; }
    bool end_intact() const { return !has_gap() || ((~word(last) & gap[0]) | (~word(last + 8) & gap[1])) == 0; }

  private:
    static uint64_t word(uintptr_t address) {
        uint64_t bytes;
        std::memcpy(&bytes, reinterpret_cast<const void*>(address), sizeof bytes);
        return bytes;
    }
};

std::mutex mutex;
std::map<uintptr_t, Guarded> live;  // by the first byte of the mapping
std::vector<Canaries> canaries;     // theirs
std::vector<Canaries> with_gap;     // of those whose end is not on the guard page
std::deque<Guarded> freed;
std::atomic<uint64_t> random_state{0};

// ---------------------------------------------------------------------------------------------------------------------
// Faults

std::string what_lies_at(uintptr_t address) {
    if (address < page_bytes()) return "a null pointer";
    for (const Guarded& g : freed)
        if (address - g.map < g.map_bytes) return g.name() + " that has been freed";
    auto at = live.upper_bound(address);
    if (at != live.begin()) {
        const Guarded& g = (--at)->second;
        if (address - g.map < g.map_bytes) {
            if (address == g.user + g.user_bytes) return "the first byte past the end of " + g.name();
            if (address > g.user)
                return std::to_string(address - g.user - g.user_bytes) + " bytes past the end of " + g.name();
            return std::to_string(g.user - address) + " bytes before the start of " + g.name();
        }
    }
    if (is_fiber_stack(address)) return "the end of its stack: its local variables take more than 256 KiB";
    char text[64];
    std::snprintf(text, sizeof text, "0x%zx, which is in no allocation", static_cast<size_t>(address));
    return text;
}

void on_fault(int number, siginfo_t* info, void*) {
    const std::string text = "memory fault: " + where_are_we() + " touched ";
    if (strict) report(text + what_lies_at(reinterpret_cast<uintptr_t>(info->si_addr)));
    if (in_kernel())
        std::fprintf(stderr,
                     "CUDA on the CPU: %s%p\n  Run it again with CUDA_CPU_STRICT=1 to see the thread and what lies "
                     "there, or in gdb.\n",
                     text.c_str(), info->si_addr);
    signal(number, SIG_DFL);  // the instruction faults again: for the core dump, the debugger, the exit status
}

constexpr int kFaults[2] = {SIGSEGV, SIGBUS};
struct sigaction previous[2];
int n_fault_reports = 0;

void catch_faults() {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 2; ++i) sigaction(kFaults[i], &action, &previous[i]);
}

bool start_strict_mode() {
    const char* seed = std::getenv("CUDA_CPU_STRICT");
    const bool on = seed && *seed;
    if (on) random_state = splitmix(std::strtoull(seed, nullptr, 10) + 1);
    struct sigaction now {};
    // Another handler (such as a sanitizer's) stays installed, except while strict mode runs a kernel.
    if (sigaction(SIGSEGV, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) catch_faults();
    return on;
}

// ---------------------------------------------------------------------------------------------------------------------
// Canaries

// `who` is not asked before it is needed.
void check_end(const Canaries& c, const std::function<std::string()>& who) {
    if (!c.end_intact()) report("memory fault: " + who() + " wrote past the end of " + c.of->name());
}
void check_start(const Canaries& c, const std::function<std::string()>& who) {
    if (!c.start_intact()) report("memory fault: " + who() + " wrote before the start of " + c.of->name());
}

Guarded& find_live(void* pointer) { return std::prev(live.upper_bound(reinterpret_cast<uintptr_t>(pointer)))->second; }

}  // namespace

bool strict = start_strict_mode();

uint64_t strict_random() { return splitmix(random_state += kSplitmixStep); }

// The fault may be that a fiber's stack is full.
void prepare_os_thread() {
    static thread_local bool is_prepared = false;
    if (std::exchange(is_prepared, true)) return;
    stack_t stack{};
    if (sigaltstack(nullptr, &stack) == 0 && !(stack.ss_flags & SS_DISABLE)) return;
    stack = {};
    stack.ss_size = 64 << 10;
    stack.ss_sp = std::malloc(stack.ss_size);
    sigaltstack(&stack, nullptr);
}

FaultReports::FaultReports() {
    prepare_os_thread();
    const std::lock_guard lock(mutex);
    if (n_fault_reports++ == 0) catch_faults();
}
FaultReports::~FaultReports() {
    const std::lock_guard lock(mutex);
    if (--n_fault_reports > 0) return;
    for (int i = 0; i < 2; ++i) sigaction(kFaults[i], &previous[i], nullptr);
}

void check_end_canaries(const std::function<std::string()>& who) {
    const std::lock_guard lock(mutex);
    for (const Canaries& its : with_gap) check_end(its, who);
}
void check_all_canaries(const std::function<std::string()>& who) {
    const std::lock_guard lock(mutex);
    for (const Canaries& its : canaries) {
        check_end(its, who);
        check_start(its, who);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Guarded memory

void* guarded_allocate(size_t bytes, const char* kind) {
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const size_t n_pages = (rounded + page_bytes() - 1) / page_bytes();
    Guarded g{};
    g.map_bytes = (n_pages + 2) * page_bytes();
    void* map = mmap(nullptr, g.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return nullptr;
    g.map = reinterpret_cast<uintptr_t>(map);
    g.user = g.end() - rounded;
    g.user_bytes = bytes;
    g.kind = kind;
    std::memset(reinterpret_cast<void*>(g.first()), kCanary, n_pages * page_bytes());
    mprotect(map, page_bytes(), PROT_NONE);
    mprotect(reinterpret_cast<void*>(g.end()), page_bytes(), PROT_NONE);
    const std::lock_guard lock(mutex);
    const Guarded& lives = live[g.map] = g;
    canaries.emplace_back(lives);
    if (canaries.back().has_gap()) with_gap.push_back(canaries.back());
    return reinterpret_cast<void*>(g.user);
}

std::string describe_bytes(uintptr_t begin, uintptr_t end) {
    const std::lock_guard lock(mutex);
    const Guarded& g = find_live(reinterpret_cast<void*>(begin));
    return "bytes " + std::to_string(begin - g.user) + " to " + std::to_string(end - 1 - g.user) + " of " + g.name();
}

// The address range stays taken for a while, and faults; its memory goes back to the system.
void guarded_free(void* pointer) {
    const std::lock_guard lock(mutex);
    const Guarded &lives = find_live(pointer), g = lives;
    const auto who = [] { return std::string("some code, perhaps of the host,"); };
    check_end(Canaries(lives), who);
    check_start(Canaries(lives), who);
    madvise(reinterpret_cast<void*>(g.map), g.map_bytes, MADV_DONTNEED);
    mprotect(reinterpret_cast<void*>(g.map), g.map_bytes, PROT_NONE);
    for (std::vector<Canaries>* all : {&canaries, &with_gap})
        std::erase_if(*all, [&](const Canaries& its) { return its.of == &lives; });
    live.erase(g.map);
    freed.push_back(g);
    if (freed.size() <= kFreedRanges) return;
    munmap(reinterpret_cast<void*>(freed.front().map), freed.front().map_bytes);
    freed.pop_front();
}

void report(const std::string& text) {
    static std::atomic_flag reported;
    static thread_local bool by_me = false;
    while (reported.test_and_set() && !by_me) pause();  // another OS thread was first, and is about to end the process
    by_me = true;
    std::fprintf(stderr, "CUDA on the CPU: %s\n", text.c_str());
    std::fflush(stderr);
    signal(SIGABRT, SIG_DFL);
    std::abort();
}

}  // namespace cuda_cpu
