// cpu/hopper.cpp: Hopper's asynchronous instructions, for one block at a time: mbarriers and named barriers. Bulk and
// tensor copies are in hopper_copies.cpp, products (wgmma) in hopper_wgmma.cpp; what a block has in flight is in
// hopper_state.h.
//
// By default all asynchronous work is done at once. Strict mode completes each copy late ("it lands"), and records what
// is in flight:
//
//   a load (device -> shared)    is in flight until a thread has waited for the phase of its mbarrier. Its place holds
//                                NaN until it lands: at a random moment, or, in every second block, when all threads
//                                wait.
//   a store (shared -> device)   reads until its thread has waited for it, and is written at a random moment.
//   a wgmma                      reads shared memory until a thread of its warp group has waited for it, and has each
//                                thread's accumulators, which hold NaN meanwhile, and its registers of A, until that
//                                thread has.
//
// If one of these instructions touches what is in flight, it is reported; an ordinary read gets NaN.
//
// PROXIES. Copies and wgmma access shared memory in a different way from ordinary stores, by the asynchronous proxy,
// and see these stores only after fence.proxy.async. This device cannot observe ordinary stores. But it keeps a second
// copy of dynamic shared memory, the `view` of the asynchronous proxy: loads write to both, fences copy the ordinary
// memory to the view, and where an instruction reads bytes that differ, they were written without a fence after them.
#include "hopper_state.h"

#include <memory>

namespace cuda_cpu {

using namespace hopper;

namespace {

constexpr int64_t kMostCounted = (1 << 20) - 1;        // by an mbarrier, of arrivals as well as of bytes
constexpr uint64_t kBarrierTag = 0x4d62617272696572u;  // the contents of shared memory where an mbarrier is

thread_local Unit* unit = nullptr;  // this OS thread's; owned by the next, which is slower to look at
thread_local std::unique_ptr<Unit> owned_unit;

}  // namespace

namespace hopper {

Unit& this_unit() {
    if (!unit) unit = (owned_unit = std::make_unique<Unit>()).get();
    Unit& u = *unit;
    if (u.used) return u;
    u.used = true;
    u.threads.assign(block_threads(), {});
    u.warp_groups.assign(block_threads() / kWarpGroup, {});
    u.shared_bytes = dynamic_shared_bytes();
    u.shared = u.shared_bytes > 0 ? static_cast<char*>(dynamic_shared_memory()) : nullptr;
    if (strict) {
        u.lazy = strict_random_below(2) == 0;
        u.view.assign(u.shared_bytes, static_cast<char>(0xff));  // like fresh memory
    }
    return u;
}

std::string place(Place here) { return std::string(here.file) + ":" + std::to_string(here.line); }
std::string offset_of(const Unit& u, const void* at) {
    const char* byte = static_cast<const char*>(at);
    if (byte < u.shared || byte >= u.shared + u.shared_bytes) return "static shared memory";
    return "byte " + std::to_string(byte - u.shared) + " of dynamic shared memory";
}
char* view_of(Unit& u, const char* at) {
    return at >= u.shared && at < u.shared + u.shared_bytes ? u.view.data() + (at - u.shared) : nullptr;
}

void check_aligned(unsigned thread, const void* pointer, size_t alignment, const char* what, Place here) {
    if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0)
        report_misaligned(thread, pointer, alignment, what, here.file, here.line);
}

// ---------------------------------------------------------------------------------------------------------------------
// mbarriers

Barrier& find_barrier(unsigned thread, void* at, Place here) {
    Unit& u = this_unit();
    for (Barrier& b : u.barriers) {
        if (b.at != at) continue;
        uint64_t tag;
        std::memcpy(&tag, at, sizeof tag);
        if (tag != kBarrierTag)
            report_in(thread, "mbarrier overwritten",
                      "the mbarrier at " + offset_of(u, at) + ", initialised at " + place(b.initialised) +
                          ", has been written over, as " + place(here) + " finds");
        return b;
    }
    report_in(thread, "no mbarrier", "at " + place(here) + ": " + offset_of(u, at) + " holds no initialised mbarrier");
}

void complete_phase_if_due(Barrier& b) {
    if (b.pending > 0 || b.bytes != 0) return;
    ++b.phase;
    b.pending = b.count;
    b.complete.merge(b.brought);
    let_go(b.waiting);
}

}  // namespace hopper

void mbarrier_init_by(unsigned thread, void* barrier, unsigned n_arrivals, Place here) {
    Unit& u = this_unit();
    check_aligned(thread, barrier, 8, "an mbarrier", here);
    if (n_arrivals < 1 || n_arrivals > kMostCounted)
        report_in(thread, "wrong mbarrier", "at " + place(here) + ": " + std::to_string(n_arrivals) + " arrivals");
    for (const Barrier& b : u.barriers)
        if (b.at == barrier)
            report_in(thread, "wrong mbarrier",
                      "at " + place(here) + ": the one initialised at " + place(b.initialised) +
                          " is still there (mbarrier_invalidate)");
    std::memcpy(barrier, &kBarrierTag, sizeof kBarrierTag);
    u.barriers.push_back({barrier, n_arrivals, n_arrivals, 0, 0, here, {}, {}, {}, {}});
}
void mbarrier_invalidate_by(unsigned thread, void* barrier, Place here) {
    Unit& u = this_unit();
    const Barrier& b = find_barrier(thread, barrier, here);
    if (!b.waiters.empty() || b.bytes != 0)
        report_in(thread, "wrong mbarrier",
                  "invalidated at " + place(here) + " while threads wait or copies are in flight");
    std::memset(barrier, 0xff, sizeof kBarrierTag);
    std::erase_if(u.barriers, [&](const Barrier& each) { return each.at == barrier; });
}
void mbarrier_arrive_by(unsigned thread, void* barrier, unsigned n_arrivals, unsigned expected_bytes, Place here) {
    Barrier& b = find_barrier(thread, barrier, here);
    if (b.pending < n_arrivals)
        report_in(thread, "too many arrivals",
                  "at " + place(here) + ": phase " + std::to_string(b.phase) + " of the mbarrier initialised at " +
                      place(b.initialised) + " has had its " + std::to_string(b.count));
    b.brought.merge(this_unit().threads[thread].knowledge);
    b.bytes += expected_bytes;
    if (b.bytes > kMostCounted)
        report_in(thread, "too many bytes",
                  "at " + place(here) + ": an mbarrier counts up to " + std::to_string(kMostCounted));
    b.pending -= n_arrivals;
    complete_phase_if_due(b);
}
void mbarrier_wait_by(unsigned thread, void* barrier, unsigned parity, Place here) {
    if (strict && strict_random_below(2) == 0) give_way(thread);
    Barrier* b = &find_barrier(thread, barrier, here);
    while (b->phase % 2 == parity % 2) {
        b->waiters.push_back({thread, parity, here});
        park(thread, b->waiting);
        b = &find_barrier(thread, barrier, here);
        std::erase_if(b->waiters, [&](const Waiter& w) { return w.thread == thread; });
    }
    this_unit().threads[thread].knowledge.merge(b->complete);
    std::erase_if(this_unit().loads,
                  [&](const Load& l) { return l.landed && l.barrier == barrier && l.phase < b->phase; });
}

void named_barrier_by(unsigned thread, unsigned id, unsigned n_threads, bool waits, Place here) {
    Unit& u = this_unit();
    if (id == 0 || id >= kNamedBarriers || n_threads == 0 || n_threads % 32 != 0 || n_threads > block_threads())
        report_in(
            thread, "wrong named barrier",
            "at " + place(here) + ": number " + std::to_string(id) + " for " + std::to_string(n_threads) +
                " threads. Numbers are 1 to 15 (0 is __syncthreads), threads a multiple of 32, at most the block's");
    NamedBarrier& b = u.named[id];
    if (b.n_arrived > 0 && b.n_threads != n_threads)
        report_in(thread, "wrong named barrier",
                  "number " + std::to_string(id) + " is for " + std::to_string(n_threads) + " threads at " +
                      place(here) + " and for " + std::to_string(b.n_threads) + " at " + place(b.here));
    b.n_threads = n_threads;
    b.here = here;
    b.brought.merge(u.threads[thread].knowledge);
    if (++b.n_arrived < n_threads) {
        if (!waits) return;
        park(thread, b.waiting);
    } else {
        b.n_arrived = 0;
        let_go(b.waiting);
        if (waits) give_way(thread);
    }
    if (waits) u.threads[thread].knowledge.merge(b.brought);
}

void set_count_by(int* count, int value) { __atomic_store_n(count, value, __ATOMIC_RELEASE); }
// In strict mode copies may be in flight which complete only when all threads wait: this one does not, so it completes
// some itself.
void wait_for_count_by(unsigned thread, const int* count, int value) {
    while (__atomic_load_n(count, __ATOMIC_ACQUIRE) != value) {
        if (strict && strict_random_below(4) == 0) hopper_land_one();
        stand_back(thread);
    }
}

void registers_by(unsigned thread, unsigned n_registers) { this_unit().threads[thread].n_registers = n_registers; }

// Always the same lane for the same mask, but a kernel may not rely on a certain one.
unsigned elected_lane(unsigned mask) {
    static const uint64_t salt = strict ? strict_random() : 0;
    unsigned skip = static_cast<unsigned>(salt % static_cast<unsigned>(__builtin_popcount(mask)));
    for (; skip > 0; --skip) mask &= mask - 1;
    return static_cast<unsigned>(__builtin_ctz(mask));
}

// ---------------------------------------------------------------------------------------------------------------------
// For the scheduler

void hopper_meet(unsigned first_thread, unsigned n_threads, unsigned mask) {
    if (!strict || !unit || !unit->used) return;
    std::vector<ThreadState>& threads = unit->threads;
    Knowledge all;
    const auto each = [&](auto&& f) {
        for (unsigned i = 0; i < n_threads; ++i)
            if (n_threads > 32 || mask >> i & 1) f(threads[first_thread + i].knowledge);
    };
    each([&](const Knowledge& knowledge) { all.merge(knowledge); });
    each([&](Knowledge& knowledge) { knowledge = all; });
}

bool hopper_land_one() {
    if (!unit || unit->n_flying == 0) return false;
    uint64_t pick = strict_random_below(unit->n_flying);
    for (Load& load : unit->loads)
        if (!load.landed && pick-- == 0) {
            land(*unit, load);
            return true;
        }
    return false;
}
void hopper_step() {
    if (!unit || !unit->used || unit->lazy || strict_random_below(4) > 0) return;
    hopper_land_one();
    if (!unit->stores.empty()) finish_writing(unit->stores[strict_random_below(unit->stores.size())]);
}

namespace {
// A kernel that changes its numbers of registers is compiled for the most that its threads can have of 65536, in steps
// of 8: that is all a block has. A warp group that takes more than the others have left waits for ever.
void check_registers(const Unit& u) {
    const unsigned n_threads = static_cast<unsigned>(u.threads.size());
    const unsigned n_each = std::min(65536 / n_threads / 8 * 8, 256u);
    unsigned total = 0;
    bool changed = false;
    for (unsigned t = 0; t < n_threads; ++t) {
        const unsigned n = u.threads[t].n_registers, first = t / kWarpGroup * kWarpGroup;
        if (n != u.threads[first].n_registers)
            report_in(t, "incomplete warp group",
                      "its warp group gives or takes registers, and not all 128 threads of it do the same");
        total += n > 0 ? n : n_each;
        changed = changed || n > 0;
    }
    if (changed && total > n_each * n_threads)
        report_in(0, "too many registers",
                  "the warp groups of this block take " + std::to_string(total) + " registers, of " +
                      std::to_string(n_each * n_threads) + " that " + std::to_string(n_threads) + " threads have");
}
}  // namespace

void hopper_leave_block() {
    if (!unit || !unit->used) return;
    Unit& u = *unit;
    check_registers(u);
    if (!u.loads.empty())
        report_in(u.loads[0].thread, "copy not waited for",
                  "the block ended, and no thread had waited for the copy at " + place(u.loads[0].here));
    if (!u.products.empty())
        report_in(u.products[0].thread, "wgmma not waited for",
                  "the block ended, and no thread had waited for the wgmma at " + place(u.products[0].here) +
                      " (wgmma_commit, then wgmma_wait)");
    for (Store& store : u.stores) {
        if (!store.read)
            report_in(store.thread, "store not waited for",
                      "the block ended, and its thread had not waited until the store at " + place(store.here) +
                          " had read shared memory (bulk_commit, then bulk_wait)");
        finish_writing(store);
    }
    u.used = false;
    u.barriers.clear(), u.loads.clear(), u.stores.clear(), u.products.clear();
    u.n_flying = 0;
    for (NamedBarrier& b : u.named) b = {};
}

std::string hopper_waits() {
    if (!unit || !unit->used) return "";
    std::string text;
    for (const Barrier& b : unit->barriers) {
        if (b.waiters.empty()) continue;
        const Waiter& w = b.waiters[0];
        text += "\n  mbarrier_wait at " + place(w.here) + ": thread " + thread_name(w.thread) + " and " +
                std::to_string(b.waiters.size() - 1) + " others wait for a phase of parity " +
                std::to_string(w.parity % 2) + "; phase " + std::to_string(b.phase) + " (parity " +
                std::to_string(b.phase % 2) + ") lacks " + std::to_string(b.pending) + " of " +
                std::to_string(b.count) + " arrivals and " + std::to_string(b.bytes) + " bytes";
    }
    for (unsigned id = 1; id < kNamedBarriers; ++id) {
        const NamedBarrier& b = unit->named[id];
        if (b.n_arrived > 0 && b.waiting.first)
            text += "\n  named barrier " + std::to_string(id) + " at " + place(b.here) + " was reached by " +
                    std::to_string(b.n_arrived) + " of " + std::to_string(b.n_threads) + " threads";
    }
    for (size_t i = 0; i < unit->warp_groups.size(); ++i)
        if (const WarpGroup& g = unit->warp_groups[i]; g.n_arrived > 0)
            text += "\n  wgmma at " + place(g.here) + " was reached by " + std::to_string(g.n_arrived) +
                    " of the 128 threads of warp group " + std::to_string(i);
    return text;
}

}  // namespace cuda_cpu
