// cpu/hopper_wgmma.cpp: products of tiles in shared memory by four warps together (wgmma). What strict mode checks is
// at the top of hopper.cpp.
#include "hopper_state.h"

namespace cuda_cpu {

using namespace hopper;

namespace {

constexpr uint32_t kNaN = 0xffffffffu;  // what an accumulator in flight holds

Accumulator& accumulator_of(ThreadState& t, float* registers, unsigned n) {
    for (Accumulator& a : t.in_flight)
        if (a.registers == registers && a.values.size() == n) return a;
    return t.in_flight.emplace_back(Accumulator{registers, std::vector<float>(registers, registers + n), 0, {}});
}

// All 128 threads have arrived. Their results go into a buffer, and NaN into their registers.
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
                              ", was overwritten before any thread had waited for it");
        return true;
    });
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Instructions

// The pattern of 8 lines of a swizzle must begin at a multiple of its size, because we do not fill the descriptor's
// field for other cases (PTX: base offset). Within the first line a tile may begin anywhere: this selects the next 16
// of k.
void check_descriptor(unsigned thread, uint64_t descriptor, Place here) {
    const uint32_t mode = static_cast<uint32_t>(descriptor >> 62), line = 256u >> mode,
                   start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
    if (mode > 0 && start % (8 * line) >= line)
        report_in(thread, "misaligned tile",
                  "the wgmma at " + place(here) + " reads a tile swizzled by " + std::to_string(line) +
                      " bytes, whose rows must begin at a multiple of " + std::to_string(8 * line) +
                      ": it begins at byte " + std::to_string(start % (8 * line)) + " of one");
}

void wgmma_by(unsigned thread, Wgmma& operands, unsigned n_registers, WgmmaComplete complete, Place here) {
    Unit& u = this_unit();
    const unsigned warp_group = thread / kWarpGroup;
    if (warp_group >= u.warp_groups.size())
        report_in(thread, "incomplete warp group", "wgmma at " + place(here) + " needs 128 threads");
    if (strict && !u.threads[thread].fenced)
        report_in(
            thread, "missing wgmma_fence",
            "wgmma at " + place(here) + " with no wgmma_fence since the kernel's start, or since the last wgmma_wait");
    WarpGroup& g = u.warp_groups[warp_group];
    // One instruction of four warps: all 128 threads must arrive at the same one, each of them once.
    if (g.n_arrived > 0 && (g.complete != complete || g.lanes[thread % kWarpGroup] || g.here.line != here.line))
        report_in(
            thread, "warp group divergence",
            "it does the wgmma at " + place(here) + " while others of its warp group do that at " + place(g.here));
    if (g.n_arrived == 0) std::fill(g.lanes, g.lanes + kWarpGroup, nullptr);
    g.lanes[thread % kWarpGroup] = &operands;
    g.complete = complete;
    g.here = here;
    // The last thread to arrive multiplies for all, and then lets them continue.
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
    // After a wait the thread may write its registers again, so the next wgmma needs a new fence.
    t.fenced = false;
    const std::vector<uint32_t>& committed = u.warp_groups[thread / kWarpGroup].committed;
    if (t.n_products > n_groups && !committed.empty())
        t.knowledge.n_done[thread / kWarpGroup] =
            committed[std::min<size_t>(t.n_products - n_groups, committed.size()) - 1];
    // An operand in registers must still hold what it held when the product was started.
    std::erase_if(t.fragments, [&](const Fragment& f) {
        if (f.group + n_groups >= t.n_products) return false;
        if (std::memcmp(f.registers, f.values, sizeof f.values) != 0)
            report_in(thread, "operand in flight",
                      "registers that are A of the wgmma at " + place(f.here) + " were written before its wgmma_wait");
        return true;
    });
    // An accumulator holds NaN until here, where it gets its result: any other contents have been written too early.
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

}  // namespace cuda_cpu
