// cpu/hopper.cpp: mbarriers, named barriers, bulk and tensor copies, and wgmma's bookkeeping, for one block at a time.
//
// By default all that is asynchronous is done at once. Strict mode lets each copy land late, and follows what is under
// way:
//
//   a load (device -> shared)    is in flight until a thread has waited for the phase of its mbarrier. Its place holds
//                                NaN until it lands: at a random moment, or, in every second block, when all threads
//                                wait.
//   a store (shared -> device)   reads until its thread has waited for it, and is written at a random moment.
//   a wgmma                      reads shared memory until a thread of its warp group has waited for it, and has each
//                                thread's accumulators, which hold NaN meanwhile, and its registers of A, until that
//                                thread has.
//
// Whoever touches what is in flight in a way that shows here (an instruction of these) is reported; an ordinary read
// gets NaN.
//
// PROXIES. Copies and wgmma reach shared memory by another way than ordinary stores, the asynchronous proxy, and see
// these only after fence.proxy.async. Nothing here can watch ordinary stores. But there is a second copy of dynamic
// shared memory, the `view` of the asynchronous proxy: loads write to both, fences copy the one to the other, and where
// an instruction reads bytes that differ, somebody has written them and not fenced.
#include "cuda.h"
#include "device.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

namespace cuda_cpu {
namespace {

constexpr unsigned kNamedBarriers = 16;
constexpr int64_t kMaxTransactionBytes = (1 << 20) - 1;
constexpr uint64_t kBarrierTag = 0x4d62617272696572u;  // what lies in shared memory where an mbarrier is

// How many products of each warp group have been waited for, as far as a thread can know: it has waited itself, or somebody
// who knows has arrived at a barrier that it has waited at since.
constexpr unsigned kMaxWarpGroups = 1024 / kWarpGroup;
struct Knowledge {
    uint32_t n_done[kMaxWarpGroups] = {};
    void merge(const Knowledge& other) {
        for (unsigned g = 0; g < kMaxWarpGroups; ++g) n_done[g] = std::max(n_done[g], other.n_done[g]);
    }
};

struct Waiter {
    unsigned thread, parity;
    Here here;
};
struct Barrier {
    void* at;
    unsigned count, pending;  // arrivals of a phase, and those that have not come
    int64_t bytes;            // announced, and not yet landed
    unsigned phase;           // how many phases are complete
    Here initialised;
    FiberList waiting;
    std::vector<Waiter> waiters;
    Knowledge brought, complete;  // by all arrivals, and by those of complete phases
};
struct NamedBarrier {
    unsigned n_threads, n_arrived;
    Here here;
    FiberList waiting;
    Knowledge brought;
};

struct Load {
    char* to;
    size_t bytes;
    void* barrier;
    unsigned phase, thread;
    Here here;
    bool landed;
    std::function<void()> copy;
};
struct Store {
    const char* from;
    std::vector<char> bytes;  // as they were when the store began
    unsigned group, thread;
    Here here;
    bool read, written;
    std::function<void(const char*)> write;
};

// 16 bytes that a wgmma reads, and what they were.
struct Chunk {
    const char* at;
    char bytes[16];
};
struct Product {
    unsigned warp_group, group, thread;
    Here here;
    std::vector<Chunk> operands;
};
struct Accumulator {
    float* registers;
    std::vector<float> values;
    unsigned group;
    Here here;
};
// A thread's part of an A in registers, and what it was.
struct Fragment {
    const uint32_t* registers;
    uint32_t values[4];
    unsigned group;
    Here here;
};
struct ThreadState {
    unsigned n_stores = 0;    // groups of stores that it has closed
    unsigned n_products = 0;  // groups of wgmma likewise
    bool fenced = false;      // wgmma_fence since the last wait
    std::vector<Accumulator> in_flight;
    std::vector<Fragment> fragments;
    unsigned n_registers = 0;  // that it has given or taken; 0: neither
    Knowledge knowledge;
};
struct WarpGroup {
    unsigned n_arrived = 0;
    FiberList waiting;
    Wgmma* lanes[kWarpGroup];
    WgmmaComplete complete;
    Here here;
    std::vector<Here> products;       // all that were started: number n stands at n - 1
    std::vector<uint32_t> committed;  // the number of the last one of each group of products
    std::vector<uint32_t> readers;    // for each 16 bytes of dynamic shared memory, the last one that read them
};

// All that one block has under way.
struct Unit {
    bool used = false, lazy = false;
    std::deque<Barrier> barriers;
    NamedBarrier named[kNamedBarriers] = {};
    std::vector<Load> loads;  // in flight, until a thread has waited for them
    size_t n_flying = 0;      // those of them that have not landed
    std::vector<Store> stores;
    std::vector<Product> products;
    std::vector<ThreadState> threads;
    std::vector<WarpGroup> warp_groups;
    char* shared = nullptr;
    size_t shared_bytes = 0;
    std::vector<char> view;      // strict mode: dynamic shared memory as the asynchronous proxy sees it
    Product* product = nullptr;  // strict mode: whose operands are being read
    unsigned product_thread = 0;
};
thread_local Unit* unit = nullptr;
thread_local std::unique_ptr<Unit> owned_unit;

// This block's.
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
        u.view.assign(u.shared_bytes, static_cast<char>(0xff));  // as fresh memory is
    }
    return u;
}

std::string place(Here here) { return std::string(here.file) + ":" + std::to_string(here.line); }
std::string offset_of(const Unit& u, const void* at) {
    const char* byte = static_cast<const char*>(at);
    if (byte < u.shared || byte >= u.shared + u.shared_bytes) return "static shared memory";
    return "byte " + std::to_string(byte - u.shared) + " of dynamic shared memory";
}
bool overlap(const char* a, size_t a_bytes, const char* b, size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}
// Where the view has the bytes at `at`; null if they are not in dynamic shared memory.
char* view_of(Unit& u, const char* at) {
    return at >= u.shared && at < u.shared + u.shared_bytes ? u.view.data() + (at - u.shared) : nullptr;
}

void check_aligned(unsigned thread, const void* pointer, size_t alignment, const char* what, Here here) {
    if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0)
        report_in(
            thread, "misaligned address",
            std::string(what) + " at " + place(here) + " needs a multiple of " + std::to_string(alignment) + " bytes");
}

// ---------------------------------------------------------------------------------------------------------------------
// mbarriers

Barrier& find_barrier(unsigned thread, void* at, Here here) {
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

// ---------------------------------------------------------------------------------------------------------------------
// Copies

// The bytes that a copy or a product reads through the asynchronous proxy must be those that ordinary stores have left.
void check_fenced(Unit& u, unsigned thread, const char* at, size_t bytes, const char* what, Here here) {
    const char* seen = view_of(u, at);
    if (!seen || at + bytes > u.shared + u.shared_bytes || std::memcmp(seen, at, bytes) == 0) return;
    while (*seen == *at) ++seen, ++at;
    report_in(thread, "missing proxy fence",
              std::string(what) + " at " + place(here) + " reads " + offset_of(u, at) +
                  ", which ordinary stores have written with no fence_proxy_async after them");
}
void check_not_in_flight(Unit& u, unsigned thread, const char* at, size_t bytes, const char* what, Here here) {
    for (const Load& load : u.loads)
        if (overlap(at, bytes, load.to, load.bytes))
            report_in(thread, "shared memory in flight",
                      std::string(what) + " at " + place(here) + " touches " +
                          offset_of(u, std::max<const char*>(at, load.to)) + ", which the copy at " + place(load.here) +
                          " fills: nobody has waited for phase " + std::to_string(load.phase) + " (parity " +
                          std::to_string(load.phase % 2) + ") of its mbarrier");
}
void check_not_read(Unit& u, unsigned thread, const char* at, size_t bytes, const char* what, Here here) {
    for (const Store& store : u.stores)
        if (!store.read && overlap(at, bytes, store.from, store.bytes.size()))
            report_in(thread, "shared memory in use",
                      std::string(what) + " at " + place(here) + " overwrites " + offset_of(u, at) +
                          ", which the store at " + place(store.here) + " reads: its thread has not waited for it");
    for (const Product& p : u.products)
        for (const Chunk& chunk : p.operands)
            if (overlap(at, bytes, chunk.at, 16))
                report_in(thread, "shared memory in use",
                          std::string(what) + " at " + place(here) + " overwrites " + offset_of(u, chunk.at) +
                              ", which the wgmma at " + place(p.here) + " reads: nobody has waited for it");
}

// A tile may be overwritten by whom the wait for the last product that read it has reached through barriers. That the product
// is done by now is not enough: it may have been luck.
void check_known_done(Unit& u, unsigned thread, const char* at, size_t bytes, const char* what, Here here) {
    if (!view_of(u, at)) return;
    const size_t first = static_cast<size_t>(at - u.shared) / 16, n = std::min(bytes, u.shared_bytes - first * 16) / 16;
    for (size_t g = 0; g < u.warp_groups.size(); ++g) {
        const WarpGroup& group = u.warp_groups[g];
        if (group.readers.empty()) continue;
        for (size_t chunk = first; chunk < first + n; ++chunk)
            if (const uint32_t reader = group.readers[chunk]; reader > u.threads[thread].knowledge.n_done[g])
                report_in(thread, "shared memory in use",
                          std::string(what) + " at " + place(here) + " overwrites " +
                              offset_of(u, u.shared + chunk * 16) + ", which the wgmma at " +
                              place(group.products[reader - 1]) +
                              " reads: this thread has waited for no arrival that came after its wgmma_wait");
    }
}

void finish_load(unsigned thread, void* barrier, size_t bytes, unsigned phase, Here here) {
    Barrier& b = find_barrier(thread, barrier, here);
    if (b.phase != phase)
        report_in(thread, "bytes that were not expected",
                  "the mbarrier's phase " + std::to_string(phase) + " was complete before the copy at " + place(here) +
                      " had landed: its " + std::to_string(bytes) +
                      " bytes were not announced (mbarrier_arrive_expect_tx)");
    b.bytes -= static_cast<int64_t>(bytes);
    complete_phase_if_due(b);
}

// Starts a load. `copy` writes to shared memory.
void start_load(unsigned thread, char* to, size_t bytes, void* barrier, Here here, std::function<void()> copy) {
    Unit& u = this_unit();
    Barrier& b = find_barrier(thread, barrier, here);
    const unsigned phase = b.phase;
    if (!strict) {
        copy();
        return finish_load(thread, barrier, bytes, phase, here);
    }
    check_fenced(u, thread, static_cast<char*>(barrier), 8, "the copy's mbarrier", here);
    check_not_in_flight(u, thread, to, bytes, "a copy", here);
    check_not_read(u, thread, to, bytes, "a copy", here);
    check_known_done(u, thread, to, bytes, "a copy", here);
    std::memset(to, 0xff, bytes);
    if (char* view = view_of(u, to)) std::memset(view, 0xff, bytes);
    u.loads.push_back({to, bytes, barrier, phase, thread, here, false, std::move(copy)});
    ++u.n_flying;
}
void land(Unit& u, Load& load) {
    load.copy();
    load.landed = true;
    --u.n_flying;
    if (char* view = view_of(u, load.to)) std::memcpy(view, load.to, load.bytes);
    finish_load(load.thread, load.barrier, load.bytes, load.phase, load.here);
}

void start_store(unsigned thread, const char* from, size_t bytes, Here here, std::function<void(const char*)> write) {
    Unit& u = this_unit();
    if (!strict) return write(from);
    check_fenced(u, thread, from, bytes, "a store", here);
    check_not_in_flight(u, thread, from, bytes, "a store", here);
    u.stores.push_back({from, std::vector<char>(from, from + bytes), u.threads[thread].n_stores, thread, here, false,
                        false, std::move(write)});
}
void finish_reading(Store& store) {
    if (store.read) return;
    store.read = true;
    if (std::memcmp(store.from, store.bytes.data(), store.bytes.size()) != 0)
        report_in(
            store.thread, "shared memory in use",
            "what the store at " + place(store.here) + " reads was overwritten before its thread had waited for it");
}
void finish_writing(Store& store) {
    if (!store.written) store.write(store.bytes.data());
    store.written = true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensor maps

struct TensorMap {
    uint64_t tag;
    char* data;
    uint64_t dims[5], strides[5];
    uint16_t box[5];
    uint8_t rank, element_bytes, swizzle_bytes;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
constexpr uint64_t kMapTag = 0x54656e736f724d70u;

TensorMap decode(unsigned thread, const CUtensorMap& map, unsigned rank, const void* shared, Here here) {
    TensorMap decoded;
    std::memcpy(&decoded, &map, sizeof decoded);
    if (decoded.tag != kMapTag || decoded.rank != rank)
        report_in(thread, "no tensor map",
                  "the map at " + place(here) + " is not one of a tensor of rank " + std::to_string(rank));
    check_aligned(thread, shared, 128, "a tile in shared memory", here);
    return decoded;
}
size_t box_bytes(const TensorMap& map) {
    size_t bytes = map.element_bytes;
    for (unsigned d = 0; d < map.rank; ++d) bytes *= map.box[d];
    return bytes;
}
// A row of a box is cut into chunks of 16 bytes. In a line of 128 bytes the chunks change places: the number of a chunk
// (address bits 4 to 6) is xored with the number of its line (bits 7 to 9), as many bits as the swizzle has.
uintptr_t swizzled(const TensorMap& map, uintptr_t address) {
    const uintptr_t chunks = map.swizzle_bytes > 0 ? map.swizzle_bytes / 16u - 1 : 0;
    return address ^ (address >> 7 & chunks) << 4;
}
// f(chunk of the box, where it lies in device memory, first and end of its bytes that are inside of the tensor)
template <class F>
void for_each_chunk(const TensorMap& map, const int* coordinates, F&& f) {
    const size_t row_bytes = map.box[0] * size_t{map.element_bytes}, n_rows = box_bytes(map) / row_bytes;
    for (size_t row = 0; row < n_rows; ++row) {
        int64_t offset = 0;
        bool inside = true;
        for (size_t d = 1, rest = row; d < map.rank; rest /= map.box[d], ++d) {
            const int64_t i = coordinates[d] + static_cast<int64_t>(rest % map.box[d]);
            inside = inside && i >= 0 && i < static_cast<int64_t>(map.dims[d]);
            offset += i * static_cast<int64_t>(map.strides[d]);
        }
        for (size_t chunk = 0; chunk < row_bytes / 16; ++chunk) {
            const int64_t start = int64_t{coordinates[0]} * map.element_bytes + static_cast<int64_t>(chunk) * 16;
            const int64_t end = static_cast<int64_t>(map.dims[0]) * map.element_bytes - start;
            const size_t from = static_cast<size_t>(std::clamp<int64_t>(-start, 0, 16));
            const size_t to = inside ? static_cast<size_t>(std::clamp<int64_t>(end, 0, 16)) : 0;
            f(row * (row_bytes / 16) + chunk, map.data + offset + start, from, std::max(from, to));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// wgmma

constexpr uint32_t kNaN = 0xffffffffu;  // what an accumulator in flight holds

Accumulator& accumulator_of(ThreadState& t, float* registers, unsigned n) {
    for (Accumulator& a : t.in_flight)
        if (a.registers == registers && a.values.size() == n) return a;
    return t.in_flight.emplace_back(Accumulator{registers, std::vector<float>(registers, registers + n), 0, {}});
}

// All 128 threads are here. Their results go into a buffer of ours, and NaN into their registers.
void multiply_strict(Unit& u, WarpGroup& g, unsigned warp_group, unsigned thread, unsigned n_registers) {
    float* registers[kWarpGroup];
    for (unsigned l = 0; l < kWarpGroup; ++l) {
        ThreadState& t = u.threads[warp_group * kWarpGroup + l];
        registers[l] = g.lanes[l]->d;
        Accumulator& a = accumulator_of(t, registers[l], n_registers);
        a.group = t.n_products;
        a.here = g.here;
        g.lanes[l]->d = a.values.data();
        if (const uint32_t* A = g.lanes[l]->a)
            t.fragments.push_back({A, {A[0], A[1], A[2], A[3]}, t.n_products, g.here});
    }
    g.products.push_back(g.here);
    g.committed.resize(u.threads[thread].n_products + 1, static_cast<uint32_t>(g.products.size() - 1));
    g.committed.back() = static_cast<uint32_t>(g.products.size());
    g.readers.resize(u.shared_bytes / 16);
    u.products.push_back({warp_group, u.threads[thread].n_products, thread, g.here, {}});
    u.product = &u.products.back();
    u.product_thread = thread;
    g.complete(g.lanes);
    u.product = nullptr;
    for (unsigned l = 0; l < kWarpGroup; ++l) std::memset(registers[l], 0xff, n_registers * sizeof(float));
}

void finish_products(Unit& u, unsigned thread, unsigned n_groups) {
    const unsigned n_products = u.threads[thread].n_products;
    std::erase_if(u.products, [&](const Product& p) {
        if (p.warp_group != thread / kWarpGroup || p.group + n_groups >= n_products) return false;
        for (const Chunk& chunk : p.operands)
            if (std::memcmp(chunk.at, chunk.bytes, 16) != 0)
                report_in(thread, "shared memory in use",
                          "what the wgmma at " + place(p.here) + " reads, " + offset_of(u, chunk.at) +
                              ", was overwritten before anybody had waited for it");
        return true;
    });
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Instructions

void mbarrier_init_by(unsigned thread, void* barrier, unsigned n_arrivals, Here here) {
    Unit& u = this_unit();
    check_aligned(thread, barrier, 8, "an mbarrier", here);
    if (n_arrivals < 1 || n_arrivals >= 1u << 20)
        report_in(thread, "wrong mbarrier", "at " + place(here) + ": " + std::to_string(n_arrivals) + " arrivals");
    for (const Barrier& b : u.barriers)
        if (b.at == barrier)
            report_in(thread, "wrong mbarrier",
                      "at " + place(here) + ": the one initialised at " + place(b.initialised) +
                          " is still there (mbarrier_invalidate)");
    std::memcpy(barrier, &kBarrierTag, sizeof kBarrierTag);
    u.barriers.push_back({barrier, n_arrivals, n_arrivals, 0, 0, here, {}, {}, {}, {}});
}
void mbarrier_invalidate_by(unsigned thread, void* barrier, Here here) {
    Unit& u = this_unit();
    const Barrier& b = find_barrier(thread, barrier, here);
    if (!b.waiters.empty() || b.bytes != 0)
        report_in(thread, "wrong mbarrier",
                  "invalidated at " + place(here) + " while threads wait or copies are under way");
    std::memset(barrier, 0xff, sizeof kBarrierTag);
    std::erase_if(u.barriers, [&](const Barrier& each) { return each.at == barrier; });
}
void mbarrier_arrive_by(unsigned thread, void* barrier, unsigned n_arrivals, unsigned expected_bytes, Here here) {
    Barrier& b = find_barrier(thread, barrier, here);
    if (b.pending < n_arrivals)
        report_in(thread, "too many arrivals",
                  "at " + place(here) + ": phase " + std::to_string(b.phase) + " of the mbarrier initialised at " +
                      place(b.initialised) + " has had its " + std::to_string(b.count));
    b.brought.merge(this_unit().threads[thread].knowledge);
    b.bytes += expected_bytes;
    if (b.bytes > kMaxTransactionBytes)
        report_in(thread, "too many bytes",
                  "at " + place(here) + ": an mbarrier counts up to " + std::to_string(kMaxTransactionBytes));
    b.pending -= n_arrivals;
    complete_phase_if_due(b);
}
void mbarrier_wait_by(unsigned thread, void* barrier, unsigned parity, Here here) {
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

void named_barrier_by(unsigned thread, unsigned id, unsigned n_threads, bool waits, Here here) {
    Unit& u = this_unit();
    if (id == 0 || id >= kNamedBarriers || n_threads == 0 || n_threads % 32 != 0 || n_threads > block_threads())
        report_in(thread, "wrong named barrier",
                  "at " + place(here) + ": number " + std::to_string(id) + " for " + std::to_string(n_threads) +
                      " threads. Numbers are 1 to 15 (0 is __syncthreads), threads a multiple of 32 and of this block");
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

void bulk_load_by(unsigned thread, void* to, const void* from, size_t bytes, void* barrier, Here here) {
    for (const void* pointer : {static_cast<const void*>(to), from})
        check_aligned(thread, pointer, 16, "a bulk copy", here);
    check_aligned(thread, reinterpret_cast<const void*>(bytes), 16, "a bulk copy's size", here);
    start_load(thread, static_cast<char*>(to), bytes, barrier, here, [=] { std::memcpy(to, from, bytes); });
}
void bulk_store_by(unsigned thread, void* to, const void* from, size_t bytes, Here here) {
    for (const void* pointer : {static_cast<const void*>(to), from})
        check_aligned(thread, pointer, 16, "a bulk copy", here);
    check_aligned(thread, reinterpret_cast<const void*>(bytes), 16, "a bulk copy's size", here);
    start_store(thread, static_cast<const char*>(from), bytes, here,
                [=](const char* source) { std::memcpy(to, source, bytes); });
}
void tensor_load_by(unsigned thread, void* to, const CUtensorMap& encoded, const int* coordinates, unsigned rank,
                    void* barrier, Here here) {
    const TensorMap map = decode(thread, encoded, rank, to, here);
    int at[5] = {};
    std::copy(coordinates, coordinates + rank, at);
    const auto copy = [=] {
        for_each_chunk(map, at, [&](size_t chunk, const char* from, size_t first, size_t end) {
            char* place_in_tile = reinterpret_cast<char*>(swizzled(map, reinterpret_cast<uintptr_t>(to) + chunk * 16));
            std::memset(place_in_tile, 0, 16);
            if (first < end) std::memcpy(place_in_tile + first, from + first, end - first);
        });
    };
    start_load(thread, static_cast<char*>(to), box_bytes(map), barrier, here, copy);
}
void tensor_store_by(unsigned thread, const CUtensorMap& encoded, const int* coordinates, unsigned rank,
                     const void* from, Here here) {
    const TensorMap map = decode(thread, encoded, rank, from, here);
    int at[5] = {};
    std::copy(coordinates, coordinates + rank, at);
    const uintptr_t tile = reinterpret_cast<uintptr_t>(from);
    const auto write = [=](const char* source) {
        for_each_chunk(map, at, [&](size_t chunk, char* to, size_t first, size_t end) {
            if (first < end)
                std::memcpy(to + first, source + (swizzled(map, tile + chunk * 16) - tile) + first, end - first);
        });
    };
    start_store(thread, static_cast<const char*>(from), box_bytes(map), here, write);
}
void bulk_commit_by(unsigned thread) { ++this_unit().threads[thread].n_stores; }
void bulk_wait_by(unsigned thread, unsigned n_groups, bool read_only) {
    Unit& u = this_unit();
    for (Store& store : u.stores) {
        if (store.thread != thread || store.group + n_groups >= u.threads[thread].n_stores) continue;
        finish_reading(store);
        if (!read_only) finish_writing(store);
    }
    std::erase_if(u.stores, [](const Store& store) { return store.read && store.written; });
}
void fence_proxy_async_by(unsigned) {
    Unit& u = this_unit();
    if (strict && u.shared) std::memcpy(u.view.data(), u.shared, u.shared_bytes);
}

// A descriptor has no field that we fill for a swizzle whose pattern of 8 lines does not begin at a multiple of its size
// (PTX: base offset). Within the first line a tile may begin anywhere: that is the next 16 of k.
void check_descriptor(unsigned thread, uint64_t descriptor, Here here) {
    const uint32_t mode = static_cast<uint32_t>(descriptor >> 62), line = 256u >> mode,
                   start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
    if (mode > 0 && start % (8 * line) >= line)
        report_in(thread, "misaligned tile",
                  "the wgmma at " + place(here) + " reads a tile swizzled by " + std::to_string(line) +
                      " bytes, whose rows must begin at a multiple of " + std::to_string(8 * line) +
                      ": it begins at byte " + std::to_string(start % (8 * line)) + " of one");
}

void wgmma_by(unsigned thread, Wgmma& operands, unsigned n_registers, WgmmaComplete complete, Here here) {
    Unit& u = this_unit();
    const unsigned warp_group = thread / kWarpGroup;
    if (warp_group >= u.warp_groups.size())
        report_in(thread, "incomplete warp group", "wgmma at " + place(here) + " needs 128 threads");
    if (strict && !u.threads[thread].fenced)
        report_in(
            thread, "missing wgmma_fence",
            "wgmma at " + place(here) + " with no wgmma_fence since the kernel's start, or since the last wgmma_wait");
    WarpGroup& g = u.warp_groups[warp_group];
    if (g.n_arrived > 0 && (g.complete != complete || g.lanes[thread % kWarpGroup] || g.here.line != here.line))
        report_in(
            thread, "warp group divergence",
            "it does the wgmma at " + place(here) + " while others of its warp group do that at " + place(g.here));
    if (g.n_arrived == 0) std::fill(g.lanes, g.lanes + kWarpGroup, nullptr);
    g.lanes[thread % kWarpGroup] = &operands;
    g.complete = complete;
    g.here = here;
    if (++g.n_arrived < kWarpGroup) return park(thread, g.waiting);
    for (const Wgmma* lane : g.lanes)
        if (lane->b_descriptor != operands.b_descriptor || lane->a_descriptor != operands.a_descriptor ||
            lane->accumulate != operands.accumulate)
            report_in(thread, "warp group divergence",
                      "threads give different descriptors to the wgmma at " + place(here));
    g.n_arrived = 0;
    if (!operands.a) check_descriptor(thread, operands.a_descriptor, here);
    check_descriptor(thread, operands.b_descriptor, here);
    if (strict) multiply_strict(u, g, warp_group, thread, n_registers);
    else complete(g.lanes);
    let_go(g.waiting);
    give_way(thread);
}
void wgmma_fence_by(unsigned thread) { this_unit().threads[thread].fenced = true; }
void wgmma_commit_by(unsigned thread) { ++this_unit().threads[thread].n_products; }
void wgmma_wait_by(unsigned thread, unsigned n_groups) {
    if (!strict) return;
    Unit& u = this_unit();
    ThreadState& t = u.threads[thread];
    finish_products(u, thread, n_groups);
    t.fenced = false;
    const std::vector<uint32_t>& committed = u.warp_groups[thread / kWarpGroup].committed;
    if (t.n_products > n_groups && !committed.empty())
        t.knowledge.n_done[thread / kWarpGroup] =
            committed[std::min<size_t>(t.n_products - n_groups, committed.size()) - 1];
    std::erase_if(t.fragments, [&](const Fragment& f) {
        if (f.group + n_groups >= t.n_products) return false;
        if (std::memcmp(f.registers, f.values, sizeof f.values) != 0)
            report_in(thread, "operand in flight",
                      "registers that are A of the wgmma at " + place(f.here) + " were written before its wgmma_wait");
        return true;
    });
    std::erase_if(t.in_flight, [&](const Accumulator& a) {
        if (a.group + n_groups >= t.n_products) return false;
        for (size_t i = 0; i < a.values.size(); ++i) {
            uint32_t bits;
            std::memcpy(&bits, &a.registers[i], sizeof bits);
            if (bits != kNaN)
                report_in(thread, "accumulator in flight",
                          "registers of the wgmma at " + place(a.here) + " were written before its wgmma_wait");
        }
        std::copy(a.values.begin(), a.values.end(), a.registers);
        return true;
    });
}

const uint16_t* wgmma_shared(uint32_t address) {
    Unit& u = this_unit();
    const uint32_t base = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(u.shared)) & kSharedAddressMask;
    const uint32_t offset = (address - base) & kSharedAddressMask;
    if (offset + 16 > u.shared_bytes)
        report("memory fault: a wgmma of " + where_are_we() + " reads beyond its " + std::to_string(u.shared_bytes) +
               " bytes of dynamic shared memory");
    const char* at = u.shared + offset;
    if (u.product) {
        Product& p = *u.product;
        check_not_in_flight(u, u.product_thread, at, 16, "wgmma", p.here);
        check_fenced(u, u.product_thread, at, 16, "wgmma", p.here);
        WarpGroup& group = u.warp_groups[p.warp_group];
        group.readers[offset / 16] = static_cast<uint32_t>(group.products.size());
        p.operands.push_back({at, {}});
        std::memcpy(p.operands.back().bytes, at, 16);
    }
    return reinterpret_cast<const uint16_t*>(at);
}

void registers_by(unsigned thread, unsigned n_registers) { this_unit().threads[thread].n_registers = n_registers; }

// Always the same lane for the same mask, and none that a kernel may count on.
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
// A kernel that changes its numbers of registers is compiled for the most that its threads can have of 65536, in steps of
// 8: that is all a block has. Who takes more than the others have left waits for ever.
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
                  "the block ended, and nobody had waited for the copy at " + place(u.loads[0].here));
    if (!u.products.empty())
        report_in(u.products[0].thread, "wgmma not waited for",
                  "the block ended, and nobody had waited for the wgmma at " + place(u.products[0].here) +
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

// ---------------------------------------------------------------------------------------------------------------------
// The driver

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    using namespace cuda_cpu;
    if (!map || !data || rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(data) % 16 != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
        return CUDA_ERROR_NOT_SUPPORTED;
    TensorMap m{};
    m.tag = kMapTag;
    m.data = static_cast<char*>(data);
    m.rank = static_cast<uint8_t>(rank);
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT8: m.element_bytes = 1; break;
        case CU_TENSOR_MAP_DATA_TYPE_UINT16:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: m.element_bytes = 2; break;
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: m.element_bytes = 4; break;
    }
    m.swizzle_bytes = static_cast<uint8_t>(swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16 << swizzle);
    for (cuuint32_t d = 0; d < rank; ++d) {
        if (dims[d] < 1 || dims[d] > uint64_t{1} << 32 || box[d] < 1 || box[d] > 256) return CUDA_ERROR_INVALID_VALUE;
        if (element_strides[d] != 1) return CUDA_ERROR_NOT_SUPPORTED;
        m.dims[d] = dims[d];
        m.box[d] = static_cast<uint16_t>(box[d]);
        if (d == 0) continue;
        if (strides[d - 1] % 16 != 0 || strides[d - 1] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
        m.strides[d] = strides[d - 1];
    }
    const unsigned row_bytes = m.box[0] * m.element_bytes;
    if (row_bytes % 16 != 0 || (m.swizzle_bytes > 0 && row_bytes > m.swizzle_bytes)) return CUDA_ERROR_INVALID_VALUE;
    if (m.swizzle_bytes > 0 && row_bytes != m.swizzle_bytes) return CUDA_ERROR_NOT_SUPPORTED;
    std::memset(map, 0, sizeof *map);
    std::memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    const bool found = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    *function = found ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
    if (result) *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return found ? cudaSuccess : cudaErrorInvalidValue;
}
