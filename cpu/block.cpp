// cpu/block.cpp: runs the blocks of a grid, and the threads of a block as fibers.
//
// One OS thread runs one block at a time. The block's threads run in a plain loop (run_threads in cuda_runtime.h) on
// the OS thread's own stack. A thread that has to wait keeps the stack it is on: that stack becomes its fiber, and the
// loop continues with the next thread on a new stack. So a kernel without barriers needs no switches, and a kernel with
// barriers needs one switch (cpu/fiber.h) for each thread and barrier.
//
//     OS thread's stack:  t0 waits ──> fiber 1: t1 waits ──> fiber 2: t2 ... the last thread arrives: all are ready
//     ready: t0 on the OS thread's stack, t1 on fiber 1, ... each continues in turn, to the next barrier or its end
//
// Strict mode starts every thread in a loop of its own and picks the next one to run at random. In every second block
// one warp is left behind: its threads continue rarely while others can. Warps of a GPU may be that far apart, and a
// random order alone never takes them there.
#include "device.h"
#include "fiber.h"
#include "races.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

namespace cuda_cpu {
namespace {

constexpr size_t kStackBytes = 256 << 10;  // only the pages that are touched are real memory
constexpr unsigned kStacksPerSlab = 32;
constexpr unsigned kGuardedStacks = 128;  // an OS thread's first stacks have a guard page (see add_stacks)
constexpr unsigned kMostGuards = 24000;   // of all OS threads together: each is two mappings more
std::atomic<unsigned> n_guards{0};
constexpr unsigned kWarp = 32;
constexpr unsigned kMaxWarps = 32;  // a block has at most 1024 threads

// A warp exchange that some lanes wait in. mask == 0: free.
struct Exchange {
    unsigned mask = 0, arrived = 0;
    const Collective* collective = nullptr;  // on the stack of the first lane to arrive
    FiberList waiting;
    void* lanes[kWarp] = {};
};

// Strict mode: copies that a thread has started and not waited for, the oldest first, and how many groups of them it
// has closed.
struct AsyncCopy {
    void* to;
    const void* from;  // nullptr: zeros
    size_t bytes;
    unsigned group;
};
struct AsyncCopies {
    std::vector<AsyncCopy> under_way;
    unsigned n_groups = 0;
};

std::string in_brackets(uint3 i) {
    char text[64];
    std::snprintf(text, sizeof text, "(%u,%u,%u)", i.x, i.y, i.z);
    return text;
}
std::string launched_at(const Launch& launch) {
    return "kernel '" + std::string(launch.kernel) + "' launched at " + launch.file + ":" + std::to_string(launch.line);
}

class Block {
  public:
    Block() = default;
    Block(const Block&) = delete;
    ~Block();
    void run(const Launch& launch, const BlockProgram& program, uint3 index);
    void barrier(unsigned thread, const char* file, int line);
    void exchange(unsigned thread, unsigned mask, void* operands, const Collective& collective);
    void run_loop();  // starts threads, from next_ on, in the loop on the current stack
    void leave_loop();
    [[noreturn]] void finish_fiber();
    void shared_declared(void* variable, size_t bytes);
    void* dynamic_shared();
    AsyncCopies& async_copies(unsigned thread) {
        if (async_copies_.empty()) async_copies_.resize(n_);
        return async_copies_[thread];
    }
    bool running() const { return launch_; }
    uint64_t n_begun() const { return n_begun_; }
    bool is_stack(uintptr_t address) const;
    std::string where_launched() const;
    std::string where() const { return where_launched() + ", thread " + name(current_->thread); }
    void set_thread(unsigned thread) { current_->thread = thread; }
    void park(unsigned thread, FiberList& list);
    void give_way(unsigned thread);
    void stand_back(unsigned thread);
    void set_ready(FiberList& fibers);
    unsigned n_threads() const { return n_; }
    size_t shared_bytes() const { return launch_->shared_bytes; }
    std::string name(unsigned thread) const { return in_brackets(index_of(thread)); }

  private:
    uint3 index_of(unsigned thread) const {
        const dim3& size = launch_->block;
        if (thread < size.x) return {thread, 0, 0};  // two divisions cost as much as a switch of fibers
        return {thread % size.x, thread / size.x % size.y, thread / size.x / size.y};
    }
    void take_over(unsigned thread);  // the running thread waits for the first time: its loop ends with it
    void arrive(Exchange& e, unsigned lane, void* operands, unsigned thread);
    void wait(unsigned thread);  // the running fiber is in a list: continues with another. Returns when it may continue
    [[gnu::noinline]] void wait_slowly(unsigned thread);
    [[gnu::noinline]] void exchange_slowly(unsigned thread, unsigned mask, void* operands,
                                           const Collective& collective);
    [[gnu::noinline]] void complete_exchange(Exchange& e, unsigned thread);
    [[gnu::noinline]] void complete_barrier(unsigned thread);
    [[gnu::noinline, gnu::cold]] void barrier_elsewhere(unsigned thread, const char* file, int line);
    void arrive_at_barrier(unsigned thread);
    bool anything_ready();
    Fiber* pick_ready();  // the next ready fiber; nullptr: start a thread
    Fiber* fresh_fiber();
    void add_stacks();
    [[noreturn, gnu::noinline, gnu::cold]] Fiber* report_divergence();

    const Launch* launch_ = nullptr;
    const BlockProgram* program_ = nullptr;
    uint64_t n_begun_ = 0;
    unsigned n_ = 0;  // threads in the block
    unsigned last_warp_ = 0, last_warp_mask_ = ~0u;
    uint3 index_{};

    unsigned next_ = 0;            // the first thread that has not been started (strict: an index into order_)
    std::vector<unsigned> order_;  // strict: the order in which threads are started
    unsigned late_warp_ = 0;       // strict: the warp that is left behind; above last_warp_: none is
    ThreadLoop* loop_ = nullptr;   // the loop that starts threads, while the running fiber is inside it

    Fiber main_, *current_ = &main_;
    unsigned n_live_ = 0;  // threads that have waited and not finished: each keeps a fiber
    FiberList ready_;
    std::vector<Fiber*> ready_strict_;  // strict mode takes from anywhere
    FiberList pool_;                    // fibers whose stacks are free
    std::vector<Fiber*> all_;
    std::vector<char*> slabs_;
    unsigned n_guards_ = 0;  // of these stacks

    unsigned n_arrived_ = 0;
    FiberList at_barrier_;
    const char* barrier_file_ = nullptr;
    int barrier_line_ = 0;
    Exchange exchanges_[kMaxWarps];                    // one a warp, and
    std::vector<Exchange> more_exchanges_[kMaxWarps];  // more while the warp's lanes have diverged

    std::vector<AsyncCopies> async_copies_;  // strict mode: one a thread, once a thread has started one

    std::vector<void*> shared_filled_;
    size_t static_shared_bytes_ = 0;
    void* shared_ = nullptr;
    size_t shared_capacity_ = 0;
    std::map<size_t, void*> guarded_shared_;  // strict mode: dynamic shared memory, by its bytes
    bool shared_is_fresh_ = false;            // strict mode: this block has been given it

    StrictRandom random_;
};

// This OS thread's, made on first use. The second is the same and ends with the OS thread; it is slower to look at.
// (What is destroyed later, as globals are, still asks in_kernel().)
thread_local Block* block = nullptr;
struct OwnedBlock {
    std::unique_ptr<Block> its;
    ~OwnedBlock() { block = nullptr; }
};
thread_local OwnedBlock owned_block;

// ---------------------------------------------------------------------------------------------------------------------
// Starting threads

void Block::run(const Launch& launch, const BlockProgram& program, uint3 index) {
    launch_ = &launch;
    program_ = &program;
    ++n_begun_;
    index_ = index;
    n_ = launch.block.x * launch.block.y * launch.block.z;
    last_warp_ = (n_ - 1) / kWarp;
    last_warp_mask_ = ~0u >> (kWarp - 1 - (n_ - 1) % kWarp);
    next_ = 0;
    program.enter_block(launch, index);
    if (strict) {
        late_warp_ = static_cast<unsigned>(random_.below(2 * (last_warp_ + 1)));
        order_.resize(n_);
        std::iota(order_.begin(), order_.end(), 0u);
        for (unsigned i = n_; i > 1; --i) std::swap(order_[i - 1], order_[random_.below(i)]);
        shared_filled_.clear();
        static_shared_bytes_ = 0;
        async_copies_.clear();
        shared_is_fresh_ = false;
    }
    current_ = &main_;
    for (;;) {
        run_loop();
        // Here every thread of the loop has run without waiting, or the one that kept this stack has just finished.
        if (anything_ready()) {
            Fiber* to = pick_ready();
            if (!to) continue;
            current_ = to;
            switch_fiber(&main_.stopped, to->stopped);
            break;
        }
        if (next_ < n_) continue;
        if (n_live_ > 0) report_divergence();
        break;
    }
    hopper_leave_block();
    if (strict) check_end_canaries([this] { return where_launched(); });
    launch_ = nullptr;
}

void Block::run_loop() {
    ThreadLoop loop;
    if (strict) {
        const uint3 at = index_of(current_->thread = order_[next_++]);
        loop = {at.x, at.y, at.z, at.x + 1, at.y + 1, at.z + 1};
    } else {
        const dim3& size = launch_->block;
        const uint3 at = index_of(next_);
        loop = {at.x, at.y, at.z, size.x, size.y, size.z};
        next_ = n_;  // all of them, unless one waits
    }
    loop_ = &loop;
    program_->run_threads(program_->kernel, loop);
    loop_ = nullptr;
}

inline void Block::take_over(unsigned thread) {
    ThreadLoop& loop = *loop_;
    loop_ = nullptr;
    ++n_live_;
    loop.x_end = loop.y_end = loop.z_end = 0;
    if (strict) return;
    next_ = thread + 1;
}

// The loop on the current stack has been taken over, and the thread that kept the stack has just finished: another
// fiber continues. Only the OS thread's own stack returns from here. The frames on the other stacks are abandoned:
// returning through them would take longer than everything else, because the processor predicts returns with a stack of
// its own, which does not follow our switches.
void Block::leave_loop() {
    --n_live_;
    if (current_ != &main_) finish_fiber();
}

void Block::finish_fiber() {
    Fiber *self = current_, *to = nullptr;
    if (anything_ready()) to = pick_ready();
    else if (next_ == n_) to = n_live_ == 0 ? &main_ : report_divergence();
    if (to) {
        self->next = pool_.first;
        pool_.first = self;
        current_ = to;
        switch_fiber(&self->stopped, to->stopped);
    } else {
        start_fiber(&self->stopped, self->stack_top);  // the next threads may have this stack
    }
    __builtin_unreachable();
}

// Nothing is wrong with the kernel, and none of its threads could take an exception.
[[noreturn]] void end_for_lack_of_memory(const std::string& what) {
    std::fflush(stdout);
    std::fprintf(stderr,
                 "CUDA on the CPU: no memory for %s: allow more (ulimit -v, sysctl vm.max_map_count), or use fewer "
                 "threads (OMP_NUM_THREADS, --ranks)\n",
                 what.c_str());
    std::_Exit(2);
}

Fiber* Block::fresh_fiber() {
    if (!pool_.first) add_stacks();
    return pool_.pop();
}

// Below a stack lies a page that faults, so that a stack overflow does not overwrite the next stack. The system allows
// a process only about 65 000 mappings, and a machine may have hundreds of cores, or a job hundreds of ranks: so only
// the first stacks of an OS thread, which every block uses first, have this page, and only those of the first 187 OS
// threads. In strict mode, where one OS thread runs all of a grid, each of its stacks has it.
void Block::add_stacks() {
    constexpr size_t bytes = kStacksPerSlab * kStackBytes;
    char* slab = static_cast<char*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (slab == MAP_FAILED) end_for_lack_of_memory("the stacks of a block's threads");
    slabs_.push_back(slab);
    for (unsigned i = 0; i < kStacksPerSlab; ++i) {
        char* stack = slab + i * kStackBytes;
        if ((strict || all_.size() < kGuardedStacks) && n_guards < kMostGuards) {
            mprotect(stack, page_bytes(), PROT_NONE);
            ++n_guards, ++n_guards_;
        }
        // If all stacks started at the same offset in 4 KiB, their most used parts would compete for the same cache
        // lines.
        const size_t offset = all_.size() * 640 % 4096;
        Fiber* fiber = new Fiber;
        fiber->stack_top = stack + kStackBytes - offset;
        all_.push_back(fiber);
    }
    for (unsigned i = 0; i < kStacksPerSlab; ++i) {
        Fiber* fiber = all_[all_.size() - 1 - i];
        fiber->next = pool_.first;
        pool_.first = fiber;
    }
}

Block::~Block() {
    for (char* slab : slabs_) munmap(slab, kStacksPerSlab * kStackBytes);
    n_guards -= n_guards_;
    for (Fiber* fiber : all_) delete fiber;
    std::free(shared_);
    for (const auto& [bytes, guarded] : guarded_shared_) guarded_free(guarded);
}

bool Block::is_stack(uintptr_t address) const {
    for (const char* slab : slabs_) {
        const uintptr_t from = reinterpret_cast<uintptr_t>(slab);
        if (address >= from && address < from + kStacksPerSlab * kStackBytes) return true;
    }
    return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// Waiting

inline void Block::set_ready(FiberList& fibers) {
    if (!strict) return ready_.append(fibers);
    for (Fiber* fiber = fibers.first; fiber; fiber = fiber->next) ready_strict_.push_back(fiber);
    fibers.first = nullptr;
}

inline Fiber* Block::pick_ready() {
    if (!strict) return ready_.pop();
    hopper_step();
    uint64_t pick = random_.below(ready_strict_.size() + (n_ - next_));
    if (pick >= ready_strict_.size()) return nullptr;
    const auto is_late = [&](uint64_t i) { return ready_strict_[i]->thread / kWarp == late_warp_; };
    // Rarely, not never: another thread may wait for what this warp does, and be ready each time that it looks.
    if (late_warp_ <= last_warp_ && random_.below(1024) > 0)
        for (uint64_t i = 0; i < ready_strict_.size() && is_late(pick); ++i)
            if (++pick == ready_strict_.size()) pick = 0;
    std::swap(ready_strict_[pick], ready_strict_.back());
    Fiber* fiber = ready_strict_.back();
    ready_strict_.pop_back();
    return fiber;
}

// If every thread waits, asynchronous copies are completed until one of the threads may continue.
bool Block::anything_ready() {
    while (!ready_.first && ready_strict_.empty() && next_ == n_ && n_live_ > 0 && hopper_land_one()) {
    }
    return ready_.first || !ready_strict_.empty();
}

// The switch is the last action, so that a fiber that continues returns directly into its kernel. Rare cases are
// handled in other functions than those below, which must not need any stack.
inline void Block::wait(unsigned thread) {
    Fiber *self = current_, *to = ready_.first;
    if (loop_ || !to) return wait_slowly(thread);
    ready_.first = to->next;
    current_ = to;
    if (const Fiber* then = to->next) {  // a large block's stacks do not fit into the first-level cache
        __builtin_prefetch(then->stopped);
        __builtin_prefetch(static_cast<const char*>(then->stopped) + 64);
    }
    switch_fiber(&self->stopped, to->stopped);
}

// The general case: its first wait, or no fiber is ready, or strict mode.
void Block::wait_slowly(unsigned thread) {
    if (loop_) take_over(thread);
    Fiber* self = current_;
    if (anything_ready()) {
        Fiber* to = pick_ready();
        if (to) {
            current_ = to;
            if (to == self) return;
            return switch_fiber(&self->stopped, to->stopped);
        }
    } else if (next_ == n_) {
        report_divergence();
    }
    current_ = fresh_fiber();
    start_fiber(&self->stopped, current_->stack_top);
}

inline void Block::barrier(unsigned thread, const char* file, int line) {
    current_->thread = thread;
    if (line != barrier_line_ || file != barrier_file_) return barrier_elsewhere(thread, file, line);
    arrive_at_barrier(thread);
}

inline void Block::arrive_at_barrier(unsigned thread) {
    if (++n_arrived_ == n_) return complete_barrier(thread);
    at_barrier_.push(current_);
    wait(thread);
}

// For waits of other kinds: the thread continues after a call of set_ready(list).
void Block::park(unsigned thread, FiberList& list) {
    current_->thread = thread;
    list.push(current_);
    wait(thread);
}

// Strict mode: other threads may continue before this one does.
void Block::give_way(unsigned thread) {
    if (!strict) return;
    current_->thread = thread;
    ready_strict_.push_back(current_);
    wait(thread);
}

// The thread waits for something outside of this block: all others come first.
void Block::stand_back(unsigned thread) {
    if (!ready_.first && ready_strict_.empty() && next_ == n_) {
        sched_yield();
        return;
    }
    if (strict) return give_way(thread);
    current_->thread = thread;
    ready_.push(current_);
    wait_slowly(thread);
}

// Another barrier than the last one: an error, unless no thread waits at that one.
void Block::barrier_elsewhere(unsigned thread, const char* file, int line) {
    if (n_arrived_ > 0 && (line != barrier_line_ || std::strcmp(file, barrier_file_) != 0))
        report("barrier divergence in " + where() + ":\n  it waits at " + file + ":" + std::to_string(line) +
               " while others of its block wait at " + barrier_file_ + ":" + std::to_string(barrier_line_));
    barrier_file_ = file;
    barrier_line_ = line;
    arrive_at_barrier(thread);
}

void Block::complete_barrier(unsigned thread) {
    n_arrived_ = 0;
    set_ready(at_barrier_);
    if (!strict) return;
    hopper_meet(0, n_, ~0u);
    // The last thread to arrive need not be the first to continue.
    ready_strict_.push_back(current_);
    wait(thread);
}

inline void Block::exchange(unsigned thread, unsigned mask, void* operands, const Collective& collective) {
    const unsigned warp = thread / kWarp, lane = thread % kWarp;
    current_->thread = thread;
    Exchange& e = exchanges_[warp];
    if (e.mask != mask || !(mask >> lane & 1) || e.collective->complete != collective.complete ||
        e.collective->what != collective.what)
        return exchange_slowly(thread, mask, operands, collective);
    arrive(e, lane, operands, thread);
}

inline void Block::arrive(Exchange& e, unsigned lane, void* operands, unsigned thread) {
    e.lanes[lane] = operands;
    e.arrived |= 1u << lane;
    if (e.arrived == e.mask) return complete_exchange(e, thread);
    e.waiting.push(current_);
    wait(thread);
}

// The first lane to arrive, or a partial warp, or lanes that have diverged into exchanges with different masks.
void Block::exchange_slowly(unsigned thread, unsigned mask, void* operands, const Collective& collective) {
    const unsigned warp = thread / kWarp, lane = thread % kWarp;
    if (warp == last_warp_) mask &= last_warp_mask_;  // a partial warp has only its existing lanes
    if (!(mask >> lane & 1))
        report(std::string(collective.what) + " at " + collective.file + ":" + std::to_string(collective.line) +
               " with a mask that the calling lane is not in, in " + where());
    std::vector<Exchange>& more = more_exchanges_[warp];
    Exchange *found = nullptr, *free = nullptr;
    const auto consider = [&](Exchange& e) {
        if (e.mask == mask) found = &e;
        if (e.mask == 0) free = &e;
    };
    for (Exchange& e : more) consider(e);
    consider(exchanges_[warp]);
    if (!found) {
        found = free ? free : &more.emplace_back();
        found->mask = mask;
        found->collective = &collective;
    }
    const Collective& first = *found->collective;
    if (first.complete != collective.complete || std::strcmp(first.what, collective.what) != 0)
        report("warp divergence in " + where() + ":\n  it does " + collective.what + " at " + collective.file + ":" +
               std::to_string(collective.line) + " while other lanes of its mask do " + first.what + " at " +
               first.file + ":" + std::to_string(first.line));
    arrive(*found, lane, operands, thread);
}

void Block::complete_exchange(Exchange& e, unsigned thread) {
    e.collective->complete(e.lanes, e.mask);
    const unsigned mask = e.mask;
    e.mask = e.arrived = 0;
    set_ready(e.waiting);
    if (!strict) return;
    hopper_meet(thread / kWarp * kWarp, std::min(kWarp, n_ - thread / kWarp * kWarp), mask);
    ready_strict_.push_back(current_);
    wait(thread);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reports

Fiber* Block::report_divergence() {
    std::string text = "barrier divergence in " + where_launched() + ":";
    if (n_arrived_ > 0) {
        std::vector<bool> arrived(n_);
        for (Fiber* fiber = at_barrier_.first; fiber; fiber = fiber->next) arrived[fiber->thread] = true;
        const auto missing = std::find(arrived.begin(), arrived.end(), false) - arrived.begin();
        text += "\n  __syncthreads() at " + std::string(barrier_file_) + ":" + std::to_string(barrier_line_) +
                " was reached by " + std::to_string(n_arrived_) + " of " + std::to_string(n_) + " threads; thread " +
                name(static_cast<unsigned>(missing)) + " is the first that did not arrive";
    }
    for (unsigned warp = 0; warp <= last_warp_; ++warp) {
        std::vector<const Exchange*> all{&exchanges_[warp]};
        for (const Exchange& e : more_exchanges_[warp]) all.push_back(&e);
        for (const Exchange* e : all) {
            const unsigned absent = e->mask & ~e->arrived;
            if (!absent) continue;
            text += "\n  " + std::string(e->collective->what) + " at " + e->collective->file + ":" +
                    std::to_string(e->collective->line) + " waits for " + std::to_string(__builtin_popcount(absent)) +
                    " lanes of warp " + std::to_string(warp) + "; thread " +
                    name(warp * kWarp + static_cast<unsigned>(__builtin_ctz(absent))) +
                    " is the first that did not arrive";
        }
    }
    report(text + hopper_waits());
}

std::string Block::where_launched() const { return launched_at(*launch_) + ", block " + in_brackets(index_); }

// ---------------------------------------------------------------------------------------------------------------------
// Shared memory

void Block::shared_declared(void* variable, size_t bytes) {
    if (std::find(shared_filled_.begin(), shared_filled_.end(), variable) != shared_filled_.end()) return;
    shared_filled_.push_back(variable);
    std::memset(variable, 0xff, bytes);
    static_shared_bytes_ += bytes;
    // Variables alone nvcc checks; and those of a kernel's code for the CPU may be larger than those for a GPU.
    if (launch_->shared_bytes > 0 && static_shared_bytes_ + launch_->shared_bytes > launch_->most_shared)
        report("too much shared memory in " + where_launched() + ": " + std::to_string(launch_->shared_bytes) +
               " bytes of the launch and " + std::to_string(static_shared_bytes_) +
               " of __shared__ variables are more than " + std::to_string(launch_->most_shared) +
               (launch_->most_shared == kSharedUnasked ? ", which a kernel has without asking with cudaFuncSetAttribute"
                                                       : ", which a block can have"));
}

void* Block::dynamic_shared() {
    const size_t bytes = launch_->shared_bytes;
    const auto check_memory = [&](const void* memory) {
        if (!memory) end_for_lack_of_memory("the shared memory of " + where_launched());
    };
    if (strict) {
        void*& guarded = guarded_shared_[bytes];
        if (!guarded) check_memory(guarded = guarded_allocate(bytes, "dynamic shared memory"));
        else if (!shared_is_fresh_) std::memset(guarded, 0xff, bytes);
        shared_is_fresh_ = true;
        return guarded;
    }
    if (bytes > shared_capacity_) {
        std::free(shared_);
        check_memory(shared_ = std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
        shared_capacity_ = bytes;
    }
    return shared_;
}

Block& this_block() {
    if (!block) {
        block = (owned_block.its = std::make_unique<Block>()).get();
        prepare_os_thread();
    }
    return *block;
}

// {x, y, z}. A uint3 is passed in registers, x and y in one of them: if each were stored by itself, the load of both
// would wait until they are in the cache, which takes as long as a short block (1 % of a training step of the tiny
// model). (Not for threadIdx: with such stores in it g++ does not vectorise the loop over threads.)
uint3 in_two_words(uint64_t x, uint64_t y, uint64_t z) {
    const uint64_t xy = x | y << 32;
    uint3 index;
    std::memcpy(&index, &xy, sizeof xy);
    index.z = static_cast<unsigned>(z);
    return index;
}

void run_block(const Launch& launch, const BlockProgram& program, uint64_t i) {
    const dim3 g = launch.grid;
    this_block().run(launch, program,
                     i < g.x ? in_two_words(i, 0, 0) : in_two_words(i % g.x, i / g.x % g.y, i / g.x / g.y));
}

}  // namespace

void fiber_main() {
    block->run_loop();
    block->finish_fiber();
}
void loop_taken_over() { block->leave_loop(); }

static void run_grid(const Launch& launch, const BlockProgram& program) {
    if (in_kernel()) report("kernel '" + std::string(launch.kernel) + "' is launched by a kernel: " + where_are_we());
    const Profiled profiled(launch.kernel);
    const uint64_t n_blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    if (strict) {
        std::vector<uint64_t> order(n_blocks);
        std::iota(order.begin(), order.end(), uint64_t{0});
        StrictRandom random;
        for (uint64_t i = n_blocks; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
        const FaultReports reports;
        for (uint64_t i : order) run_block(launch, program, i);
        check_all_canaries([&] { return launched_at(launch); });
        return;
    }
    const int n_os_threads = os_threads();
    if (n_blocks == 1 || n_os_threads == 1) {
        for (uint64_t i = 0; i < n_blocks; ++i) run_block(launch, program, i);
        return;
    }
    const int64_t chunk = std::max<int64_t>(1, static_cast<int64_t>(n_blocks) / (n_os_threads * 8));
#pragma omp parallel for schedule(dynamic, chunk) num_threads(n_os_threads)
    for (int64_t i = 0; i < static_cast<int64_t>(n_blocks); ++i) run_block(launch, program, static_cast<uint64_t>(i));
}

void launch_kernel(Launch launch, const BlockProgram& program, size_t kernel_bytes,
                   std::initializer_list<Argument> arguments) {
    if (!prepare_launch(launch)) return;
    if (runs_at_once(launch.stream)) return run_grid(launch, program);
    const size_t bytes = (kernel_bytes + kKernelAlignment - 1) / kKernelAlignment * kKernelAlignment;
    const std::shared_ptr<void> kernel(std::aligned_alloc(kKernelAlignment, bytes), std::free);
    if (!kernel) throw std::bad_alloc();
    std::memcpy(kernel.get(), program.kernel, kernel_bytes);
    const auto run = [=] { run_grid(launch, {kernel.get(), program.run_threads, program.enter_block}); };
    enqueue(launch.stream, run, strict ? kernel_footprint(launch, arguments) : Footprint{});
}

void block_barrier(unsigned thread, const char* file, int line) { block->barrier(thread, file, line); }
void warp_exchange(unsigned thread, unsigned mask, void* operands, const Collective& collective) {
    block->exchange(thread, mask, operands, collective);
}
void* dynamic_shared_memory() {
    if (!in_kernel()) report("dynamic shared memory outside of a kernel: declare it inside");
    return block->dynamic_shared();
}

// A copy may complete at any time between its start and the wait for it. No thread may read its destination meanwhile,
// so it holds NaN.
void async_copy_strict(unsigned thread, void* to, const void* from, size_t bytes) {
    AsyncCopies& copies = block->async_copies(thread);
    std::memset(to, 0xff, bytes);
    copies.under_way.push_back({to, from, bytes, copies.n_groups});
}
void async_commit_strict(unsigned thread) { ++block->async_copies(thread).n_groups; }
void async_wait_strict(unsigned thread, unsigned n_groups) {
    AsyncCopies& copies = block->async_copies(thread);
    auto copy = copies.under_way.begin();
    for (; copy != copies.under_way.end() && copy->group + n_groups < copies.n_groups; ++copy) {
        if (copy->from) std::memcpy(copy->to, copy->from, copy->bytes);
        else std::memset(copy->to, 0, copy->bytes);
    }
    copies.under_way.erase(copies.under_way.begin(), copy);
}

void park(unsigned thread, FiberList& list) { block->park(thread, list); }
void let_go(FiberList& list) { block->set_ready(list); }
void give_way(unsigned thread) { block->give_way(thread); }
void stand_back(unsigned thread) { block->stand_back(thread); }
unsigned block_threads() { return block->n_threads(); }
size_t dynamic_shared_bytes() { return block->shared_bytes(); }
std::string thread_name(unsigned thread) { return block->name(thread); }
void report_in(unsigned thread, const std::string& what, const std::string& details) {
    block->set_thread(thread);
    report(what + " in " + block->where() + ":\n  " + details);
}

void shared_declared_strict(void* variable, size_t bytes) { block->shared_declared(variable, bytes); }
std::string where_are_we() {
    if (!block || !block->running()) return "host code, outside of any kernel,";
    return strict ? block->where() : block->where_launched();
}
bool in_kernel() { return block && block->running(); }
uint64_t blocks_begun() { return block ? block->n_begun() : 0; }
bool is_fiber_stack(uintptr_t address) { return block && block->is_stack(address); }

void trap(unsigned thread, const char* what, const char* file, int line) {
    block->set_thread(thread);
    report(std::string(what) + " at " + file + ":" + std::to_string(line) + " in " + block->where());
}

void report_misaligned(unsigned thread, const void* address, size_t alignment, const char* what, const char* file,
                       int line) {
    report_in(thread, "misaligned address",
              std::string(what) + " at " + file + ":" + std::to_string(line) + " needs a multiple of " +
                  std::to_string(alignment) + " bytes: the remainder is " +
                  std::to_string(reinterpret_cast<uintptr_t>(address) % alignment));
}

void report_launch_bounds(unsigned thread, unsigned n_threads) {
    report_in(thread, "too many threads",
              "its __launch_bounds__ are " + std::to_string(n_threads) + " threads, and the block has " +
                  std::to_string(block_threads()));
}

void complete_shuffle(void** lanes, unsigned mask) {
    for (unsigned l = 0; l < kWarp; ++l) {
        if (!(mask >> l & 1)) continue;
        Shuffle& to = *static_cast<Shuffle*>(lanes[l]);
        // Reading from a lane that takes no part is undefined on a GPU; here it gives NaN bits, which make the mistake
        // visible.
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
