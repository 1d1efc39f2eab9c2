// cpu/hopper_state.h: the asynchronous work of Hopper's instructions that a block has in flight; shared by
// cpu/hopper*.cpp.
#pragma once

#include "device.h"

#include <algorithm>
#include <deque>
#include <vector>

namespace cuda_cpu::hopper {

constexpr unsigned kNamedBarriers = 16;
constexpr unsigned kMaxWarpGroups = 1024 / kWarpGroup;
// How many products of each warp group are certainly complete from the point of view of one thread: it has waited for
// them itself, or at a barrier at which such a thread has arrived.
struct Knowledge {
    uint32_t n_done[kMaxWarpGroups] = {};
    void merge(const Knowledge& other) {
        for (unsigned g = 0; g < kMaxWarpGroups; ++g) n_done[g] = std::max(n_done[g], other.n_done[g]);
    }
};

struct Waiter {
    unsigned thread, parity;
    Place here;
};
struct Barrier {
    void* at;
    unsigned count, pending;  // arrivals of a phase, and how many are still missing
    int64_t bytes;            // announced, and not yet complete
    unsigned phase;           // how many phases are complete
    Place initialised;
    FiberList waiting;
    std::vector<Waiter> waiters;
    Knowledge brought, complete;  // by all arrivals, and by those of complete phases
};
struct NamedBarrier {
    unsigned n_threads, n_arrived;
    Place here;
    FiberList waiting;
    Knowledge brought;
};

struct Load {
    char* to;
    size_t bytes;
    void* barrier;
    unsigned phase, thread;
    Place here;
    bool landed;
    std::function<void()> copy;
};
struct Store {
    const char* from;
    std::vector<char> bytes;  // as they were when the store began
    unsigned group, thread;
    Place here;
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
    Place here;
    std::vector<Chunk> operands;
};
struct Accumulator {
    float* registers;
    std::vector<float> values;
    unsigned group;
    Place here;
};
// A thread's part of an A in registers, and what it was.
struct Fragment {
    const uint32_t* registers;
    uint32_t values[4];
    unsigned group;
    Place here;
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
    Place here;
    std::vector<Place> products;      // all that were started: number n stands at n - 1
    std::vector<uint32_t> committed;  // the number of the last one of each group of products
    std::vector<uint32_t> readers;    // for each 16 bytes of dynamic shared memory, the last one that read them
};

// All that one block has in flight.
struct Unit {
    bool used = false, lazy = false;  // lazy: loads land when all threads wait
    std::deque<Barrier> barriers;
    NamedBarrier named[kNamedBarriers] = {};
    std::vector<Load> loads;  // in flight, until a thread has waited for them
    size_t n_flying = 0;      // those of them that are not complete
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

Unit& this_unit();  // this block's

// ---- hopper.cpp: words for reports, and checks of addresses
std::string place(Place here);
std::string offset_of(const Unit& u, const void* at);  // "byte 16 of dynamic shared memory"
// Where the view has the bytes at `at`; null if they are not in dynamic shared memory.
char* view_of(Unit& u, const char* at);
void check_aligned(unsigned thread, const void* pointer, size_t alignment, const char* what, Place here);

// ---- hopper.cpp: mbarriers
Barrier& find_barrier(unsigned thread, void* at, Place here);
void complete_phase_if_due(Barrier& b);

// ---- hopper_copies.cpp
// The bytes that a copy or a product reads through the asynchronous proxy must be those that ordinary stores have left;
// and no copy may be on its way to them.
void check_fenced(Unit& u, unsigned thread, const char* at, size_t bytes, const char* what, Place here);
void check_not_in_flight(Unit& u, unsigned thread, const char* at, size_t bytes, const char* what, Place here);
void land(Unit& u, Load& load);
void finish_writing(Store& store);

}  // namespace cuda_cpu::hopper
