// cpu/block.cpp: runs the blocks of a grid, and the threads of a block as fibers.
//
// One OS thread runs one block at a time. The block's threads run in a plain loop (run_threads in cuda_runtime.h) on the
// OS thread's own stack. A thread that has to wait keeps the stack it is on: that stack becomes its fiber, and the loop is
// continued from the next thread on a fresh one. So a kernel without barriers never pays for a switch, and a kernel with
// them pays one switch (a few nanoseconds: Boost.Context saves the callee-saved registers) a thread and barrier.
//
//     loop on main stack:  t0 waits ──> fiber 1: t1 waits ──> fiber 2: t2 ... last thread arrives, all become ready
//     ready: main (t0), fiber 1 (t1), ... resumed in turn; each runs to the next barrier or to the kernel's end
//
// Strict mode starts every thread on a fiber of its own and picks the next one to run at random.
#include "device.h"

#include <boost/context/detail/fcontext.hpp>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace cuda_cpu {
namespace {

namespace context = boost::context::detail;

constexpr size_t kStackBytes = 256 << 10;  // touched pages only are real memory
constexpr size_t kPageBytes = 4096;
constexpr unsigned kWarp = 32;

struct Fiber {
    context::fcontext_t saved = nullptr;  // where to continue; valid while it is not running
    char* stack = nullptr;                // nullptr: the OS thread's own stack
};

// A warp exchange that some lanes wait in.
struct Exchange {
    unsigned mask = 0, arrived = 0;
    Complete complete = nullptr;
    const char *what = nullptr, *file = nullptr;
    int line = 0;
    void* lanes[kWarp] = {};
    Fiber* waiting[kWarp] = {};
};

struct Warp {
    std::vector<Exchange> exchanges;  // more than one only while the warp's lanes have diverged; mask == 0: free
};

// First in, first out; strict mode takes from anywhere.
class ReadyQueue {
  public:
    bool empty() const { return head_ == fibers_.size(); }
    size_t size() const { return fibers_.size() - head_; }
    void push(Fiber* fiber) { fibers_.push_back(fiber); }
    Fiber* take(size_t pick) {
        std::swap(fibers_[head_], fibers_[head_ + pick]);
        Fiber* fiber = fibers_[head_++];
        if (empty()) fibers_.clear(), head_ = 0;
        return fiber;
    }

  private:
    std::vector<Fiber*> fibers_;
    size_t head_ = 0;
};

class Block {
  public:
    void run(const Launch& launch, const BlockProgram& program, uint3 index);
    void barrier(uint3 thread, const char* file, int line);
    void exchange(uint3 thread, unsigned mask, void* operands, Complete complete, const char* what, const char* file, int line);
    void shared_declared(void* variable, size_t bytes);
    void* dynamic_shared();
    std::string where() const;
    void set_thread(uint3 thread) { thread_ = linear(thread); }

  private:
    unsigned linear(uint3 t) const { return t.x + launch_->block.x * (t.y + launch_->block.y * t.z); }
    std::string name(unsigned linear_index) const;
    static void fiber_main(context::transfer_t from);
    void run_loop();                // runs threads from next_ on, in the loop on the current stack
    void park();                    // the current fiber waits; another one runs
    void go_on(Fiber* from);        // switches to whatever can run next; from == nullptr: never to come back
    void switch_to(Fiber* to, Fiber* from);
    void wait_begins();             // the running thread is about to wait: it keeps this stack, the loop moves on
    void recycle_finished();
    Fiber* fresh_fiber();
    [[noreturn]] void report_divergence();

    const Launch* launch_ = nullptr;
    const BlockProgram* program_ = nullptr;
    uint3 index_{};
    unsigned n_ = 0;              // threads in the block
    unsigned next_ = 0;           // first thread that has not been started (strict: index into order_)
    unsigned thread_ = 0;         // the thread that runs, as far as known: exact in strict mode
    std::vector<unsigned> order_;  // strict: the order in which threads are started

    ThreadLoop* loop_ = nullptr;  // the loop that starts threads, while the running fiber is inside it
    Fiber main_, *current_ = &main_;
    bool main_waits_for_end_ = false;
    ReadyQueue ready_;
    unsigned n_parked_ = 0;       // fibers that wait in the barrier or in an exchange
    std::vector<Fiber*> pool_;
    Fiber* finished_ = nullptr;   // its stack is free once we are off it

    std::vector<Fiber*> at_barrier_;
    std::vector<bool> arrived_;
    unsigned n_arrived_ = 0;
    const char* barrier_file_ = nullptr;
    int barrier_line_ = 0;
    std::vector<Warp> warps_;

    std::vector<void*> shared_filled_;
    void* shared_ = nullptr;
    size_t shared_capacity_ = 0;
};

thread_local Block* block = nullptr;  // this OS thread's, made on first use and kept

void Block::run(const Launch& launch, const BlockProgram& program, uint3 index) {
    launch_ = &launch;
    program_ = &program;
    index_ = index;
    n_ = launch.block.x * launch.block.y * launch.block.z;
    next_ = 0;
    program.enter_block(launch, index);
    if (strict) {
        order_.resize(n_);
        std::iota(order_.begin(), order_.end(), 0u);
        for (unsigned i = n_; i > 1; --i) std::swap(order_[i - 1], order_[strict_random_below(i)]);
        shared_filled_.clear();
        if (shared_) guarded_free(shared_, shared_capacity_);
        shared_ = nullptr;
    }
    current_ = &main_;
    run_loop();
    // Here either every thread has run without waiting, or the thread that took this stack over has just finished.
    if (next_ < n_ || n_parked_ > 0 || !ready_.empty()) {
        main_waits_for_end_ = true;
        go_on(&main_);
        main_waits_for_end_ = false;
    }
}

void Block::run_loop() {
    const dim3 size = launch_->block;
    ThreadLoop loop;
    if (strict) {
        thread_ = order_[next_++];
        const unsigned x = thread_ % size.x, y = thread_ / size.x % size.y, z = thread_ / size.x / size.y;
        loop = {x, y, z, x + 1, y + 1, z + 1};
    } else {
        loop = {next_ % size.x, next_ / size.x % size.y, next_ / size.x / size.y, size.x, size.y, size.z};
        next_ = n_;  // all of them, unless one waits
    }
    loop_ = &loop;
    program_->run_threads(program_->kernel, loop);
    if (loop_ == &loop) loop_ = nullptr;
}

// A fiber's whole life: run threads until one of them waits, come back, finish that one, leave.
void Block::fiber_main(context::transfer_t from) {
    if (from.data) static_cast<Fiber*>(from.data)->saved = from.fctx;
    Block* self = block;
    self->run_loop();
    self->recycle_finished();
    self->finished_ = self->current_;
    self->go_on(nullptr);
}

// The fiber that finished last still stands on its stack until another one runs.
void Block::recycle_finished() {
    if (!finished_ || finished_ == current_) return;
    pool_.push_back(finished_);
    finished_ = nullptr;
}

Fiber* Block::fresh_fiber() {
    if (pool_.empty()) {
        char* stack = static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (stack == MAP_FAILED) report("no memory for a fiber's stack");
        mprotect(stack, kPageBytes, PROT_NONE);  // a stack overflow faults instead of spilling into the next stack
        pool_.push_back(new Fiber{nullptr, stack});
    }
    Fiber* fiber = pool_.back();
    pool_.pop_back();
    fiber->saved = context::make_fcontext(fiber->stack + kStackBytes, kStackBytes - kPageBytes, &Block::fiber_main);
    return fiber;
}

void Block::switch_to(Fiber* to, Fiber* from) {
    if (to == from) return;
    current_ = to;
    const context::transfer_t back = context::jump_fcontext(to->saved, from);
    // Somebody has switched back to `from`: keep where that somebody stopped, unless it is finished for good.
    if (back.data) static_cast<Fiber*>(back.data)->saved = back.fctx;
}

void Block::go_on(Fiber* from) {
    recycle_finished();
    Fiber* to = nullptr;
    const size_t n_ready = ready_.size(), n_unstarted = n_ - next_;
    const bool start_one = strict ? n_unstarted > 0 && strict_random_below(n_ready + n_unstarted) >= n_ready
                                  : n_ready == 0 && n_unstarted > 0;
    if (start_one) {
        to = fresh_fiber();
    } else if (n_ready > 0) {
        to = ready_.take(strict ? strict_random_below(n_ready) : 0);
    } else if (main_waits_for_end_ && n_parked_ == 0) {
        to = &main_;
    } else {
        report_divergence();
    }
    switch_to(to, from);
}

void Block::park() {
    ++n_parked_;
    const unsigned thread = thread_;
    go_on(current_);
    thread_ = thread;
}

void Block::wait_begins() {
    if (!loop_) return;  // not its first wait
    loop_->x_end = loop_->y_end = loop_->z_end = 0;
    loop_ = nullptr;
    if (!strict) next_ = thread_ + 1;
}

void Block::barrier(uint3 thread, const char* file, int line) {
    if (n_ == 1) return;
    thread_ = linear(thread);
    if (n_arrived_ == 0) {
        arrived_.assign(n_, false);
        barrier_file_ = file;
        barrier_line_ = line;
    } else if (line != barrier_line_ || std::strcmp(file, barrier_file_) != 0) {
        report("barrier divergence in " + where() + ": it waits at " + file + ":" + std::to_string(line) +
               " while others of its block wait at " + barrier_file_ + ":" + std::to_string(barrier_line_));
    }
    arrived_[thread_] = true;
    if (++n_arrived_ == n_) {
        n_arrived_ = 0;
        n_parked_ -= static_cast<unsigned>(at_barrier_.size());
        for (Fiber* fiber : at_barrier_) ready_.push(fiber);
        at_barrier_.clear();
        if (!strict) return;
        // Strict: the last to arrive need not be the first to go on.
        wait_begins();
        ready_.push(current_);
        const unsigned me = thread_;
        go_on(current_);
        thread_ = me;
        return;
    }
    wait_begins();
    at_barrier_.push_back(current_);
    park();
}

void Block::exchange(uint3 thread, unsigned mask, void* operands, Complete complete, const char* what, const char* file,
                     int line) {
    thread_ = linear(thread);
    const unsigned warp_index = thread_ / kWarp, lane = thread_ % kWarp;
    const unsigned n_lanes = std::min(kWarp, n_ - warp_index * kWarp);
    if (!(mask >> lane & 1))
        report(std::string(what) + " at " + file + ":" + std::to_string(line) + ": the lane is not in its own mask; " + where());
    mask &= n_lanes == kWarp ? ~0u : (1u << n_lanes) - 1;  // a partial warp has only its existing lanes
    if (warp_index >= warps_.size()) warps_.resize((n_ + kWarp - 1) / kWarp);
    std::vector<Exchange>& slots = warps_[warp_index].exchanges;
    size_t at = 0;
    while (at < slots.size() && slots[at].mask != mask) ++at;
    if (at == slots.size()) {
        for (at = 0; at < slots.size() && slots[at].mask != 0;) ++at;
        if (at == slots.size()) slots.emplace_back();
        slots[at].mask = mask;
        slots[at].complete = complete;
        slots[at].what = what;
        slots[at].file = file;
        slots[at].line = line;
    }
    Exchange& mine = slots[at];
    if (mine.complete != complete)
        report("warp divergence in " + where() + ": it does " + what + " at " + file + ":" + std::to_string(line) +
               " while other lanes of its mask do " + mine.what + " at " + mine.file + ":" + std::to_string(mine.line));
    mine.arrived |= 1u << lane;
    mine.lanes[lane] = operands;
    if (mine.arrived == mask) {
        complete(mine.lanes, mask);
        for (unsigned l = 0; l < n_lanes; ++l)
            if (mine.waiting[l]) {
                ready_.push(mine.waiting[l]);
                mine.waiting[l] = nullptr;
                --n_parked_;
            }
        mine.mask = mine.arrived = 0;
        return;
    }
    wait_begins();
    mine.waiting[lane] = current_;
    park();
}

void Block::report_divergence() {
    std::string text = "barrier divergence in kernel '" + std::string(launch_->kernel) + "' launched at " + launch_->file + ":" +
                       std::to_string(launch_->line) + ", block (" + std::to_string(index_.x) + "," + std::to_string(index_.y) +
                       "," + std::to_string(index_.z) + "):";
    if (n_arrived_ > 0) {
        unsigned missing = 0;
        while (missing < n_ && arrived_[missing]) ++missing;
        text += "\n  __syncthreads() at " + std::string(barrier_file_) + ":" + std::to_string(barrier_line_) +
                " was reached by " + std::to_string(n_arrived_) + " of " + std::to_string(n_) + " threads; thread " +
                name(missing) + " is the first that never came";
    }
    for (const Warp& warp : warps_)
        for (const Exchange& e : warp.exchanges) {
            if (e.mask == 0) continue;
            const unsigned warp_index = static_cast<unsigned>(&warp - warps_.data());
            const unsigned absent = static_cast<unsigned>(__builtin_ctz(e.mask & ~e.arrived));
            text += "\n  " + std::string(e.what) + " at " + e.file + ":" + std::to_string(e.line) + " waits for " +
                    std::to_string(__builtin_popcount(e.mask & ~e.arrived)) + " lanes of warp " + std::to_string(warp_index) +
                    "; thread " + name(warp_index * kWarp + absent) + " is the first that never came";
        }
    report(text);
}

std::string Block::name(unsigned i) const {
    const dim3 s = launch_->block;
    return "(" + std::to_string(i % s.x) + "," + std::to_string(i / s.x % s.y) + "," + std::to_string(i / s.x / s.y) + ")";
}

std::string Block::where() const {
    return "kernel '" + std::string(launch_->kernel) + "' launched at " + launch_->file + ":" + std::to_string(launch_->line) +
           ", block (" + std::to_string(index_.x) + "," + std::to_string(index_.y) + "," + std::to_string(index_.z) +
           "), thread " + name(thread_);
}

void Block::shared_declared(void* variable, size_t bytes) {
    if (std::find(shared_filled_.begin(), shared_filled_.end(), variable) != shared_filled_.end()) return;
    shared_filled_.push_back(variable);
    std::memset(variable, 0xff, bytes);
}

void* Block::dynamic_shared() {
    const size_t bytes = launch_->shared_bytes;
    if (strict) {
        if (!shared_) shared_ = guarded_allocate(shared_capacity_ = bytes);
    } else if (bytes > shared_capacity_) {
        std::free(shared_);
        shared_capacity_ = (bytes + 1023) / 1024 * 1024;
        shared_ = std::aligned_alloc(1024, shared_capacity_);
    }
    return shared_;
}

Block& this_block() {
    if (!block) {
        block = new Block;
        if (strict) prepare_os_thread();
    }
    return *block;
}

thread_local bool in_kernel = false;

void run_block(const Launch& launch, const BlockProgram& program, uint64_t i) {
    const dim3 g = launch.grid;
    const uint3 index{static_cast<unsigned>(i % g.x), static_cast<unsigned>(i / g.x % g.y), static_cast<unsigned>(i / g.x / g.y)};
    in_kernel = true;
    this_block().run(launch, program, index);
    in_kernel = false;
}

}  // namespace

void run_grid(const Launch& launch, const BlockProgram& program) {
    const uint64_t n_blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    if (strict) {
        std::vector<uint64_t> order(n_blocks);
        std::iota(order.begin(), order.end(), uint64_t{0});
        for (uint64_t i = n_blocks; i > 1; --i) std::swap(order[i - 1], order[strict_random_below(i)]);
        for (uint64_t i : order) run_block(launch, program, i);
        check_canaries();
        return;
    }
    const int n_os_threads = omp_in_parallel() ? 1 : omp_get_max_threads();
    if (n_blocks == 1 || n_os_threads == 1) {
        for (uint64_t i = 0; i < n_blocks; ++i) run_block(launch, program, i);
        return;
    }
    const int64_t chunk = std::max<int64_t>(1, static_cast<int64_t>(n_blocks) / (n_os_threads * 8));
#pragma omp parallel for schedule(dynamic, chunk) num_threads(n_os_threads)
    for (int64_t i = 0; i < static_cast<int64_t>(n_blocks); ++i) run_block(launch, program, static_cast<uint64_t>(i));
}

void block_barrier(uint3 thread, const char* file, int line) { block->barrier(thread, file, line); }
void warp_exchange(uint3 thread, unsigned mask, void* operands, Complete complete, const char* what, const char* file, int line) {
    block->exchange(thread, mask, operands, complete, what, file, line);
}
void* dynamic_shared_memory() { return block->dynamic_shared(); }
void shared_declared_strict(void* variable, size_t bytes) { block->shared_declared(variable, bytes); }
std::string where_are_we() { return in_kernel ? block->where() : "no kernel"; }

void trap(uint3 thread, const char* what, const char* file, int line) {
    block->set_thread(thread);
    report(std::string(what) + " at " + file + ":" + std::to_string(line) + " in " + block->where());
}

void complete_shuffle(void** lanes, unsigned mask) {
    for (unsigned l = 0; l < kWarp; ++l) {
        if (!(mask >> l & 1)) continue;
        Shuffle& to = *static_cast<Shuffle*>(lanes[l]);
        // Reading from a lane that takes no part is undefined on a GPU; here it gives NaN bits, which show.
        const unsigned source = static_cast<unsigned>(to.source);
        to.result = source < kWarp && (mask >> source & 1) ? static_cast<Shuffle*>(lanes[source])->value : ~uint64_t{0};
    }
}
void complete_vote(void** lanes, unsigned mask) {
    unsigned ballot = 0;
    for (unsigned l = 0; l < kWarp; ++l)
        if (mask >> l & 1) ballot |= static_cast<Vote*>(lanes[l])->predicate << l;
    for (unsigned l = 0; l < kWarp; ++l)
        if (mask >> l & 1) static_cast<Vote*>(lanes[l])->ballot = ballot;
}
void complete_nothing(void**, unsigned) {}

}  // namespace cuda_cpu
