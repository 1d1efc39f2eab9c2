// layers/ptx.cuh: instructions of NVIDIA's GPUs that CUDA C++ has no function for, each as a function: its PTX, and
// beside it the same in C++, for the CPU device. (PTX is the assembly language that nvcc compiles to; NVIDIA's manual
// is "Parallel Thread Execution ISA".) The first half of the file needs sm_75 or later, where what came with sm_80 is
// made of other instructions; the second half is for Hopper.
//
// Tensor cores multiply small matrices that a warp holds together: each of its 32 lanes has a few elements in
// registers, its fragment. Which lane has which elements, with g = lane / 4 and t = lane % 4:
//
//     D = A B + C      A (16 x 16) and B (16 x 8): 16-bit, two in a register        C, D (16 x 8): float
//
//          A              columns 2t, 2t+1     columns 2t+8, 2t+9            B    rows 2t, 2t+1    rows 2t+8, 2t+9
//          row g          a[0]                 a[2]                     column g  b[0]             b[1]
//          row g + 8      a[1]                 a[3]
//
//          C, D           column 2t            column 2t+1
//          row g          c[0]                 c[1]
//          row g + 8      c[2]                 c[3]
//
// A quad (the four lanes of one g) holds whole rows of A and C. Two C fragments side by side, rounded and packed in
// pairs, are an A fragment: that is how the result of one product is an operand of the next without leaving the
// registers.
#pragma once

#include "core/kernel.cuh"

#include <cuda.h>

#include <cstring>

namespace {

#ifdef CUDA_ON_CPU
namespace ptx {
struct Ldmatrix {
    uint32_t r[4];
    const void* row;
};
struct Mma {
    float* c;
    const uint32_t *a, *b;
};
template <class Number>
static inline void unpack(float* low, float* high, uint32_t pair) {
    Number numbers[2];
    std::memcpy(static_cast<void*>(numbers), &pair, 4);
    *low = to_float(numbers[0]), *high = to_float(numbers[1]);
}
template <bool kTranspose>
static void complete_ldmatrix(void** lanes, unsigned) {
    uint16_t matrices[4][8][8];
    for (int l = 0; l < kWarp; ++l) std::memcpy(matrices[l / 8][l % 8], static_cast<Ldmatrix*>(lanes[l])->row, 16);
    for (int l = 0; l < kWarp; ++l)
        for (int i = 0; i < 4; ++i) {
            const int g = l / 4, t = l % 4;
            const uint16_t low = kTranspose ? matrices[i][2 * t][g] : matrices[i][g][2 * t];
            const uint16_t high = kTranspose ? matrices[i][2 * t + 1][g] : matrices[i][g][2 * t + 1];
            static_cast<Ldmatrix*>(lanes[l])->r[i] = low | static_cast<uint32_t>(high) << 16;
        }
}
// A GPU adds the 16 products to C in an order and with guard bits that are its own; here one after the other.
template <class Number>
static void complete_mma(void** lanes, unsigned) {
    float a[16][16], b[16][8];
    for (int l = 0; l < kWarp; ++l) {
        const Mma& lane = *static_cast<Mma*>(lanes[l]);
        const int g = l / 4, t = l % 4;
        for (int i = 0; i < 4; ++i)
            unpack<Number>(&a[g + i % 2 * 8][2 * t + i / 2 * 8], &a[g + i % 2 * 8][2 * t + i / 2 * 8 + 1], lane.a[i]);
        for (int i = 0; i < 2; ++i) unpack<Number>(&b[2 * t + i * 8][g], &b[2 * t + i * 8 + 1][g], lane.b[i]);
    }
    for (int row = 0; row < 16; ++row) {
        float sum[8];
        for (int n = 0; n < 8; ++n) sum[n] = static_cast<Mma*>(lanes[row % 8 * 4 + n / 2])->c[row / 8 * 2 + n % 2];
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 8; ++n) sum[n] = fmaf(a[row][k], b[k][n], sum[n]);
        for (int n = 0; n < 8; ++n) static_cast<Mma*>(lanes[row % 8 * 4 + n / 2])->c[row / 8 * 2 + n % 2] = sum[n];
    }
}
}  // namespace ptx
#else
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
#endif

// Loads four 8 x 8 matrices of 16-bit numbers from shared memory. Lane l says where row l % 8 of matrix l / 8 starts
// (16 bytes, on a 16-byte boundary), and gets from each matrix i the elements (row g, columns 2t and 2t + 1) in r[i].
// Transposed: (rows 2t and 2t + 1, column g).
template <bool kTranspose = false>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::check_aligned(row, 16, "ldmatrix", file, line);
    ptx::Ldmatrix operands{{}, row};
    cuda_cpu::exchange(kFullWarp, &operands, ptx::complete_ldmatrix<kTranspose>, "ldmatrix", file, line);
    for (int i = 0; i < 4; ++i) r[i] = operands.r[i];
#else
    if constexpr (kTranspose)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row))
                     : "memory");
#endif
}

// A B + C of bf16 numbers on CUDA cores: tensor cores before sm_80 multiply none. A lane gets the pairs that it needs
// of its rows of A and its columns of B from the lanes that have them. A call, so that kernels do not have it 64 times.
[[maybe_unused]] __device__ __attribute__((noinline)) float4 mma_bf16_by_shuffles(uint4 a, uint2 b, float4 c) {
    const int l = static_cast<int>(threadIdx.x) % kWarp, row = l / 4 * 4, column = l % 4 * 8;
    const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
    const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
    const auto add = [&](float sum, uint32_t x, uint32_t y) {
        return fmaf(high(x), high(y), fmaf(low(x), low(y), sum));
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const bool first = i < 4;  // half of the columns of A and rows of B
        const uint32_t above = __shfl_sync(kFullWarp, first ? a.x : a.z, row + i % 4),
                       below = __shfl_sync(kFullWarp, first ? a.y : a.w, row + i % 4),
                       left = __shfl_sync(kFullWarp, first ? b.x : b.y, column + i % 4),
                       right = __shfl_sync(kFullWarp, first ? b.x : b.y, column + 4 + i % 4);
        c = {add(c.x, above, left), add(c.y, above, right), add(c.z, below, left), add(c.w, below, right)};
    }
    return c;
}

// c += A B. Number is what A and B hold: __nv_bfloat16 or __half. b points to two registers.
template <class Number>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t* b) {
#ifdef CUDA_ON_CPU
    ptx::Mma operands{c, a, b};
    cuda_cpu::exchange(kFullWarp, &operands, ptx::complete_mma<Number>, "mma", __FILE__, __LINE__);
#elif __CUDA_ARCH__ < 800
    if constexpr (std::is_same_v<Number, __nv_bfloat16>) {
        const float4 sums = mma_bf16_by_shuffles({a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]});
        c[0] = sums.x, c[1] = sums.y, c[2] = sums.z, c[3] = sums.w;
    } else {
        // Each takes 8 of the 16 columns of A and rows of B.
        for (int half = 0; half < 2; ++half)
            asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
    }
#else
    if constexpr (std::is_same_v<Number, __nv_bfloat16>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
            "%1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Two floats, rounded to nearest even, in one register: `low` in its low half.
template <class Number>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t bits;
    if constexpr (std::is_same_v<Number, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        memcpy(&bits, &pair, 4);
    } else {
        const __half2 pair = __floats2half2_rn(low, high);
        memcpy(&bits, &pair, 4);
    }
    return bits;
}

// 2^x, within 2 units in the last place; 2^-infinity = 0, and results below 2^-126 are 0.
__device__ __forceinline__ float ex2_approx(float x) {
#ifdef CUDA_ON_CPU
    return x < -126.0f ? 0.0f : exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
// 1 / x, within 1 unit in the last place; results below 2^-126 are 0.
__device__ __forceinline__ float rcp_approx(float x) {
#ifdef CUDA_ON_CPU
    const float y = 1.0f / x;
    return fabsf(y) < 0x1p-126f ? 0.0f : y;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Asynchronous copies from device to shared memory. They pass the registers by: a thread starts a copy of 16 bytes,
// goes on, and waits for it later. What a thread started since its last commit is a group; cp_async_wait<n> returns
// when all groups of this thread but the latest n have landed. Other threads' copies are there after a barrier. In
// strict mode the CPU device lets a copy land when it is waited for, not before; until then its place holds NaN. Before
// sm_80 the thread itself copies, through registers, and has nothing to wait for but the load: a loop of copies is
// unrolled there, so that several loads are under way.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kCopiesAtOnce = 4;
#else
constexpr int kCopiesAtOnce = 1;
#endif

// Both addresses on 16-byte boundaries. With copy == false, zeros are written and nothing is read.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool copy = true CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::async_copy(shared, copy ? global : nullptr, 16, file, line);
#elif __CUDA_ARCH__ < 800
    uint4 x{};
    if (copy)
        asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "l"(global)
                     : "memory");
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(shared)), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(copy ? 16 : 0)
                 : "memory");
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#ifdef CUDA_ON_CPU
    cuda_cpu::async_commit();
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int n>
__device__ __forceinline__ void cp_async_wait() {
#ifdef CUDA_ON_CPU
    cuda_cpu::async_wait(n);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
#endif
}

// =====================================================================================================================
// Hopper (sm_90a): copies and matrix products that run beside the threads.
//
// A thread starts a copy of a whole tile, or a product of two of them, and goes on. Three things make that safe:
//
//     mbarriers      tell when copies have landed, and when a tile may be overwritten
//     wait_group     tells a thread when its own stores, or products, are done
//     proxy fences   make ordinary stores visible to the engines that copy and multiply
//
// A loop over tiles with a ring of stages: one warp fills, other warps work. `full` counts one arrival and the bytes of
// a stage, `empty` an arrival of each that reads it.
//
//     producer    wait(empty[i], parity ^ 1)     arrive_expect_tx(full[i], bytes)     copies to stage i, with full[i]
//     consumers   wait(full[i], parity)          work on stage i                      arrive(empty[i])
//
// i = 0, 1, ..., n - 1, 0, ...; parity = 0 in the first round, then 1, 0, ... The phases of an mbarrier are numbered 0,
// 1, 2, ... and a wait for parity p returns unless the current phase, which is not complete, has that parity. So the
// first wait for parity 1 returns at once: the "phase before the first" is complete, as all stages are empty at the
// start.
//
// On the CPU device all of it is done at once, and in strict mode late, with a report of what is touched meanwhile
// (cpu/README.md). Compiled for other GPUs than sm_90a these functions stop the kernel: the code that launches them
// checks first.

#ifdef CUDA_ON_CPU
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(pointer)) & cuda_cpu::kSharedAddressMask;
}
#else
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define HOPPER_ASM(...) __trap()
#endif
#endif

// ---------------------------------------------------------------------------------------------------------------------
// mbarriers: 8 bytes of shared memory. A phase is complete when n_arrivals have come and all bytes that were announced
// have landed; then the next one begins. After mbarrier_init: fence_proxy_async, and a barrier for the other threads.

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t n_arrivals CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::mbarrier_init_by(cuda_cpu::linear_index(), barrier, n_arrivals, {file, line});
#else
    HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_arrivals) : "memory");
#endif
}
// Its bytes may be used for something else.
__device__ __forceinline__ void mbarrier_invalidate(uint64_t* barrier CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::mbarrier_invalidate_by(cuda_cpu::linear_index(), barrier, {file, line});
#else
    HOPPER_ASM("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}
// What this thread has written before is visible to threads that wait for the phase.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::mbarrier_arrive_by(cuda_cpu::linear_index(), barrier, 1, 0, {file, line});
#else
    HOPPER_ASM("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
               : "memory");
#endif
}
// Arrives, and announces that n_bytes will land in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t n_bytes CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::mbarrier_arrive_by(cuda_cpu::linear_index(), barrier, 1, n_bytes, {file, line});
#else
    HOPPER_ASM("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(
                   shared_address(barrier)),
               "r"(n_bytes)
               : "memory");
#endif
}
// Returns when the phase of this parity (0 or 1) is complete.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::keeping_thread([&] {
        cuda_cpu::mbarrier_wait_by(cuda_cpu::linear_index(), barrier, parity, {file, line});
    });
#else
    uint32_t complete = 0;
    do {  // try_wait sleeps for a while, of a length that the hardware chooses
        HOPPER_ASM("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(complete)
                   : "r"(shared_address(barrier)), "r"(parity)
                   : "memory");
    } while (!complete);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Named barriers 1 to 15, each for some warps of the block: n_threads, a multiple of 32, arrive; those that sync wait
// for it, those that only arrive go on. (0 is __syncthreads.)

__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t n_threads CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::keeping_thread([&] {
        cuda_cpu::named_barrier_by(cuda_cpu::linear_index(), id, n_threads, true, {file, line});
    });
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
#endif
}
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t n_threads CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::named_barrier_by(cuda_cpu::linear_index(), id, n_threads, false, {file, line});
#else
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Of a warp

// True in one lane, always the same one. All 32 take part.
__device__ __forceinline__ bool elect_one() {
#ifdef CUDA_ON_CPU
    __syncwarp();
    return cuda_cpu::lane_id() == cuda_cpu::elected_lane(kFullWarp);
#else
    uint32_t elected = 0;
    HOPPER_ASM("{\n.reg .pred p;\nelect.sync _|p, %1;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected) : "r"(kFullWarp));
    return elected != 0;
#endif
}
// The warps of a group give registers back, or take them: kRegisters for each thread, a multiple of 8 from 24 to 256.
// A warp group that asks for more waits until there are enough. All four warps of a group call it.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
#ifdef CUDA_ON_CPU
    cuda_cpu::registers_by(cuda_cpu::linear_index(), kRegisters);
#else
    HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
#ifdef CUDA_ON_CPU
    cuda_cpu::registers_by(cuda_cpu::linear_index(), kRegisters);
#else
    HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Bulk copies between device and shared memory, started by one thread.

// Copies and wgmma see what ordinary stores have put into shared memory only after this fence: stores, fence, then a
// barrier if another thread starts the copy or product.
__device__ __forceinline__ void fence_proxy_async() {
#ifdef CUDA_ON_CPU
    cuda_cpu::fence_proxy_async_by(cuda_cpu::linear_index());
#else
    HOPPER_ASM("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Device to shared memory: n_bytes, a multiple of 16, as both addresses. They land in the barrier's current phase.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t n_bytes,
                                          uint64_t* barrier CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::bulk_load_by(cuda_cpu::linear_index(), shared, global, n_bytes, barrier, {file, line});
#else
    HOPPER_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(n_bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}
// Shared to device memory. What a thread has stored since its last bulk_commit is a group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t n_bytes CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::bulk_store_by(cuda_cpu::linear_index(), global, shared, n_bytes, {file, line});
#else
    HOPPER_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(n_bytes)
               : "memory");
#endif
}
// The same for floats, each of which is added to the one that is there, by an atomic addition.
__device__ __forceinline__ void bulk_add(float* global, const void* shared, uint32_t n_bytes CALLERS_LINE) {
#ifdef CUDA_ON_CPU
    cuda_cpu::bulk_add_by(cuda_cpu::linear_index(), global, shared, n_bytes, {file, line});
#else
    HOPPER_ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(n_bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void bulk_commit() {
#ifdef CUDA_ON_CPU
    cuda_cpu::bulk_commit_by(cuda_cpu::linear_index());
#else
    HOPPER_ASM("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Returns when all groups of this thread but the latest n are written, or only: have been read from shared memory.
template <int n>
__device__ __forceinline__ void bulk_wait() {
#ifdef CUDA_ON_CPU
    cuda_cpu::bulk_wait_by(cuda_cpu::linear_index(), n, false);
#else
    HOPPER_ASM("cp.async.bulk.wait_group %0;" ::"n"(n) : "memory");
#endif
}
template <int n>
__device__ __forceinline__ void bulk_wait_read() {
#ifdef CUDA_ON_CPU
    cuda_cpu::bulk_wait_by(cuda_cpu::linear_index(), n, true);
#else
    HOPPER_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(n) : "memory");
#endif
}

// Turns between blocks: a thread counts what it has done, after bulk_wait, and one of another block waits for a count.
// What the first one and the copies that it has waited for have written is visible after the second one's wait, to its
// own copies too. The block that is waited for must be running, or have ended: not every block of a grid is.
__device__ __forceinline__ void set_count(int* count, int value) {
#ifdef CUDA_ON_CPU
    cuda_cpu::set_count_by(count, value);
#else
    HOPPER_ASM("fence.proxy.async;\nst.release.gpu.global.s32 [%0], %1;" ::"l"(count), "r"(value) : "memory");
#endif
}
__device__ __forceinline__ void wait_for_count(const int* count, int value) {
#ifdef CUDA_ON_CPU
    cuda_cpu::keeping_thread([&] { cuda_cpu::wait_for_count_by(cuda_cpu::linear_index(), count, value); });
#else
    int now = 0;
    do HOPPER_ASM("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
    while (now != value);
    HOPPER_ASM("fence.proxy.async;" ::: "memory");
#endif
}

// Boxes of tensors (layers/tensor_map.h): the box whose first element has these coordinates, dimension 0 first, of
// which that of dimension 0 is a multiple of 16 bytes. Elements outside of the tensor are zero when loaded, count among
// the bytes, and are not stored. But stores are of 16 bytes at a time: so rows of a tensor that is stored to have a
// multiple of 16 bytes, what lies behind them would be overwritten; and a store's coordinates are not negative. In
// shared memory a box is packed, on a boundary of 128 bytes, with its chunks swizzled:
//
//     The address of byte x of the packed box is start + x, and then its bits 4-6 (which 16-byte chunk of a line of
//     128 bytes) are xored with its bits 7-9 (which line): all three for a swizzle of 128 bytes, the lower two for 64,
//     the lowest for 32.
//
// So the 8 chunks of a column in 8 neighbouring rows of 128 bytes lie in 8 different groups of banks. Bits of the
// address itself are meant, therefore tiles start where the pattern does: at multiples of 8 lines (1024 bytes).
template <int kRank>
__device__ __forceinline__ void tensor_load(void* shared, const CUtensorMap* map, const int (&at)[kRank],
                                            uint64_t* barrier CALLERS_LINE) {
    static_assert(kRank >= 2 && kRank <= 4);
#ifdef CUDA_ON_CPU
    cuda_cpu::tensor_load_by(cuda_cpu::linear_index(), shared, *map, at, kRank, barrier, {file, line});
#else
    if constexpr (kRank == 2)
        HOPPER_ASM(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
            "[%2];" ::"r"(shared_address(shared)),
            "l"(map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1])
            : "memory");
    else if constexpr (kRank == 3)
        HOPPER_ASM(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(shared)),
            "l"(map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2])
            : "memory");
    else
        HOPPER_ASM(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
            "l"(map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
            : "memory");
#endif
}
template <int kRank>
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, const int (&at)[kRank],
                                             const void* shared CALLERS_LINE) {
    static_assert(kRank >= 2 && kRank <= 4);
#ifdef CUDA_ON_CPU
    cuda_cpu::tensor_store_by(cuda_cpu::linear_index(), *map, at, kRank, shared, {file, line});
#else
    if constexpr (kRank == 2)
        HOPPER_ASM("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                   "r"(shared_address(shared)), "r"(at[0]), "r"(at[1])
                   : "memory");
    else if constexpr (kRank == 3)
        HOPPER_ASM("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                   "r"(shared_address(shared)), "r"(at[0]), "r"(at[1]), "r"(at[2])
                   : "memory");
    else
        HOPPER_ASM(
            "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
            "r"(shared_address(shared)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
            : "memory");
#endif
}
// Where byte `offset` of a packed box lies, from the start of a tile on a boundary of 1024 bytes. kSwizzle: 0, 32, 64
// or 128.
template <int kSwizzle>
__device__ __forceinline__ constexpr uint32_t swizzled(uint32_t offset) {
    static_assert(kSwizzle == 0 || kSwizzle == 32 || kSwizzle == 64 || kSwizzle == 128);
    if constexpr (kSwizzle == 0) return offset;
    else return offset ^ (offset >> 7 & (kSwizzle / 16 - 1)) << 4;
}

// The dynamic shared memory from its first multiple of 1024 bytes on. The launch asks for kTileAlignment bytes more
// than it needs.
constexpr uint32_t kTileAlignment = 1024;
__device__ __forceinline__ unsigned char* shared_tiles() {
    unsigned char* start = dynamic_shared<unsigned char>();
    return start + (-shared_address(start) & (kTileAlignment - 1));
}

// ---------------------------------------------------------------------------------------------------------------------
// wgmma: D (64 x N) += A (64 x 16) B (16 x N), by four warps (a warp group) whose first thread is a multiple of 128.
// A and B are 16-bit, D is float.
//
// D: warp w of the group has rows 16 w .. 16 w + 15, as N / 8 of mma's C fragments side by side. A in registers: mma's
// A fragment of those rows. So here too two D fragments, packed, are an A fragment.
//
// A and B in shared memory are read through descriptors. Both are made of blocks of 8 x 16 bytes: with (mn, k) for a
// row of A or a column of B and its place in the sum, element (mn, k) lies, before swizzling, at
//
//     K-major       no swizzle     mn % 8 * 16 + mn / 8 * stride + k / 8 * leading + k % 8 * 2
//                   S bytes        mn % 8 * S  + mn / 8 * stride + k * 2
//     MN-major      no swizzle     k % 8 * 16 + k / 8 * leading + mn / 8 * stride + mn % 8 * 2
//                   S bytes        k % 8 * S  + k / 8 * stride + mn / (S / 2) * leading + mn % (S / 2) * 2
//
// K-major is a tile of rows (mn) that was loaded with its S bytes of k side by side: stride = 8 S, and the next 16 of k
// start 32 bytes further on. MN-major is a tile of rows (k) with S / 2 of mn side by side: stride = 8 S, leading = from
// one such tile to the next, and the next 16 of k start 16 S bytes further on. The start of a tile is a multiple of 8
// S.

template <int kSwizzle>
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* start, uint32_t leading_bytes, uint32_t stride_bytes) {
    static_assert(kSwizzle == 0 || kSwizzle == 32 || kSwizzle == 64 || kSwizzle == 128);
    constexpr uint64_t mode = kSwizzle == 128 ? 1 : kSwizzle == 64 ? 2 : kSwizzle == 32 ? 3 : 0;
    const auto field = [](uint32_t bytes) { return static_cast<uint64_t>(bytes >> 4 & 0x3fff); };
    return field(shared_address(start)) | field(leading_bytes) << 16 | field(stride_bytes) << 32 | mode << 62;
}
// The same tile, so many bytes further on: one addition, where a descriptor takes six instructions. No carry leaves the
// lower half, because shared memory ends before its field does.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, uint32_t n_bytes) {
    return (descriptor >> 32 << 32) | (static_cast<uint32_t>(descriptor) + (n_bytes >> 4));
}

// A compiler does not know that a product is asynchronous. For it D is there at once, and A's registers are free again:
// nothing but these empty asm statements, which pretend to change `registers`, keeps what computes them before the
// fence, and what uses them after the wait. Arrays of fragments: float[][4] or uint32_t[][4].
template <class... Registers>
__device__ __forceinline__ void wgmma_pin(Registers&... registers) {
#ifdef CUDA_ON_CPU
    ((void)registers, ...);
#else
    const auto pin = [](auto& fragments) {
#pragma unroll
        for (auto& fragment : fragments)
#pragma unroll
            for (auto& x : fragment)
                if constexpr (std::is_same_v<decltype(x), float&>) asm volatile("" : "+f"(x)::"memory");
                else asm volatile("" : "+r"(x)::"memory");
    };
    (pin(registers), ...);
#endif
}
// `registers`, accumulators and A's, may be touched by wgmma from here on, and by nothing else. Before the first
// product, and after each wait.
template <class... Registers>
__device__ __forceinline__ void wgmma_fence(Registers&... registers) {
    wgmma_pin(registers...);
#ifdef CUDA_ON_CPU
    cuda_cpu::wgmma_fence_by(cuda_cpu::linear_index());
#else
    HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// What was started since the last commit is a group.
__device__ __forceinline__ void wgmma_commit() {
#ifdef CUDA_ON_CPU
    cuda_cpu::wgmma_commit_by(cuda_cpu::linear_index());
#else
    HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Returns when all groups but the latest n are done. `registers`, accumulators and A's, are those of groups that are:
// they may be touched from here on.
template <int n, class... Registers>
__device__ __forceinline__ void wgmma_wait(Registers&... registers) {
#ifdef CUDA_ON_CPU
    cuda_cpu::wgmma_wait_by(cuda_cpu::linear_index(), n);
#else
    HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
#endif
    wgmma_pin(registers...);
}

// Between two waits: x >= 0 is computed before the second one. Arithmetic that should go on beside a product needs
// this: ptxas moves a wait up, in front of all arithmetic that does not touch the product's registers. It does not move
// it in front of a store, not even of one that never happens.
__device__ __forceinline__ void compute_before_wait(float x) {
#ifdef CUDA_ON_CPU
    (void)x;
#else
    asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.u32 [%1], 0;\n}" ::"f"(x), "r"(0)
                 : "memory");
#endif
}

#ifdef CUDA_ON_CPU
namespace ptx {
// The 8 neighbouring elements that begin with (mn, k) of a tile in shared memory: along k if it is K-major, else along
// mn.
template <bool kMnMajor>
static const uint16_t* wgmma_eight(uint64_t descriptor, uint32_t mn, uint32_t k) {
    const uint32_t start = static_cast<uint32_t>(descriptor & 0x3fff) << 4,
                   mode = static_cast<uint32_t>(descriptor >> 62);
    const uint32_t leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
    const uint32_t stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
    const uint32_t S = mode == 0 ? 16 : 256u >> mode;  // bytes side by side
    uint32_t offset;
    if (!kMnMajor) offset = mn % 8 * S + mn / 8 * stride + (mode == 0 ? k / 8 * leading : k * 2);
    else if (mode == 0) offset = k % 8 * 16 + k / 8 * leading + mn / 8 * stride;
    else offset = k % 8 * S + k / 8 * stride + mn / (S / 2) * leading + mn % (S / 2) * 2;
    const uint32_t address = start + offset;
    return cuda_cpu::wgmma_shared(address ^ (address >> 7 & (S / 16 - 1)) << 4);
}
template <class Number>
static float number_at(const uint16_t* bits) {
    Number number;
    std::memcpy(static_cast<void*>(&number), bits, 2);
    return to_float(number);
}
template <class Number, int N, bool kAShared, bool kAMnMajor, bool kBMnMajor>
static void complete_wgmma(cuda_cpu::Wgmma** lanes) {
    float a[64][16], b[16][N];
    if constexpr (kAShared && !kAMnMajor) {
        for (uint32_t m = 0; m < 64; ++m)
            for (uint32_t k = 0; k < 16; k += 8) {
                const uint16_t* eight = wgmma_eight<false>(lanes[0]->a_descriptor, m, k);
                for (uint32_t i = 0; i < 8; ++i) a[m][k + i] = number_at<Number>(eight + i);
            }
    } else if constexpr (kAShared) {
        for (uint32_t m = 0; m < 64; m += 8)
            for (uint32_t k = 0; k < 16; ++k) {
                const uint16_t* eight = wgmma_eight<true>(lanes[0]->a_descriptor, m, k);
                for (uint32_t i = 0; i < 8; ++i) a[m + i][k] = number_at<Number>(eight + i);
            }
    } else {
        for (int thread = 0; thread < 128; ++thread)
            for (int i = 0; i < 4; ++i) {
                const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8, k = thread % 4 * 2 + i / 2 * 8;
                unpack<Number>(&a[row][k], &a[row][k + 1], lanes[thread]->a[i]);
            }
    }
    for (uint32_t n = 0; n < N; n += kBMnMajor ? 8 : 1)
        for (uint32_t k = 0; k < 16; k += kBMnMajor ? 1 : 8) {
            const uint16_t* eight = wgmma_eight<kBMnMajor>(lanes[0]->b_descriptor, n, k);
            for (uint32_t i = 0; i < 8; ++i)
                b[kBMnMajor ? k : k + i][kBMnMajor ? n + i : n] = number_at<Number>(eight + i);
        }
    for (int row = 0; row < 64; ++row) {
        cuda_cpu::Wgmma** quad = lanes + row / 16 * 32 + row % 8 * 4;
        const int half = row % 16 / 8 * 2;
        float sum[N];
        for (int n = 0; n < N; ++n) sum[n] = lanes[0]->accumulate ? quad[n % 8 / 2]->d[n / 8 * 4 + half + n % 2] : 0.0f;
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < N; ++n) sum[n] = fmaf(a[row][k], b[k][n], sum[n]);
        for (int n = 0; n < N; ++n) quad[n % 8 / 2]->d[n / 8 * 4 + half + n % 2] = sum[n];
    }
}
}  // namespace ptx
#else
// One asm statement for each N, with its N / 2 registers by name. R10("1") is %10 to %19; D8(2) are the 8 floats of
// fragments 2 and 3.
#define PTX_R10(t) "%" t "0,%" t "1,%" t "2,%" t "3,%" t "4,%" t "5,%" t "6,%" t "7,%" t "8,%" t "9,"
#define PTX_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define PTX_D8(i) PTX_D4(i), PTX_D4(i + 1)
#define PTX_D16 PTX_D8(0), PTX_D8(2)
#define PTX_D32 PTX_D16, PTX_D8(4), PTX_D8(6)
#define PTX_D48 PTX_D32, PTX_D8(8), PTX_D8(10)
#define PTX_D64 PTX_D48, PTX_D8(12), PTX_D8(14)
#define PTX_D96 PTX_D64, PTX_D8(16), PTX_D8(18), PTX_D8(20), PTX_D8(22)
#define PTX_D128 PTX_D96, PTX_D8(24), PTX_D8(26), PTX_D8(28), PTX_D8(30)
#define PTX_R30 PTX_R10("") PTX_R10("1") PTX_R10("2")
#define PTX_R60 PTX_R30 PTX_R10("3") PTX_R10("4") PTX_R10("5")
#define PTX_R90 PTX_R60 PTX_R10("6") PTX_R10("7") PTX_R10("8")
#define PTX_R120 PTX_R90 PTX_R10("9") PTX_R10("10") PTX_R10("11")
// N, type, registers, the numbers of the operands that follow (A and B, whether to add to D, the majors; or A's four,
// B, ...), and D's floats.
#define PTX_WGMMA_SHARED(N, type, registers, a_, b_, add_, am_, bm_, ...)                                             \
    HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" add_ ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type \
               "." type " {" registers "}, %" a_ ", %" b_ ", p, 1, 1, %" am_ ", %" bm_ ";\n}"                         \
               : __VA_ARGS__                                                                                          \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kAMnMajor), "n"(kBMnMajor)                    \
               : "memory")
#define PTX_WGMMA_REGISTERS(N, type, registers, a0, a1, a2, a3, b_, add_, bm_, ...)                                    \
    HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" add_ ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type  \
               "." type " {" registers "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b_ ", p, 1, 1, %" bm_ ";\n}"       \
               : __VA_ARGS__                                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kBMnMajor) \
               : "memory")
#define PTX_WGMMA(KIND, N, registers, ...)                                                            \
    if constexpr (n_columns == N) {                                                                   \
        if constexpr (std::is_same_v<Number, __nv_bfloat16>) KIND(N, "bf16", registers, __VA_ARGS__); \
        else KIND(N, "f16", registers, __VA_ARGS__);                                                  \
    }
#endif

// d += A B, or d = A B. N is that of d: float d[N / 8][4], N = 8, 16, 32, 64, 96, 128, 192 or 256. A and B by
// descriptors. Where `accumulate` is not a constant, d is given a value once, even if nothing is ever added to it:
// where it has none, ptxas before CUDA 12.9 makes each product wait for the one before (it says so: C7515).
template <class Number, bool kAMnMajor = false, bool kBMnMajor = false, int kFragments>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[kFragments][4], uint64_t a, uint64_t b,
                                             bool accumulate CALLERS_LINE) {
    constexpr int n_columns = kFragments * 8;
    static_assert(n_columns == 8 || n_columns == 16 || n_columns == 32 || n_columns == 64 || n_columns == 96 ||
                  n_columns == 128 || n_columns == 192 || n_columns == 256);
#ifdef CUDA_ON_CPU
    cuda_cpu::Wgmma operands{&d[0][0], nullptr, a, b, accumulate};
    cuda_cpu::keeping_thread([&] {
        cuda_cpu::wgmma_by(cuda_cpu::linear_index(), operands, n_columns / 2,
                           ptx::complete_wgmma<Number, n_columns, true, kAMnMajor, kBMnMajor>, {file, line});
    });
#else
    // clang-format off
    PTX_WGMMA(PTX_WGMMA_SHARED, 8, "%0,%1,%2,%3", "4", "5", "6", "7", "8", PTX_D4(0))
    PTX_WGMMA(PTX_WGMMA_SHARED, 16, "%0,%1,%2,%3,%4,%5,%6,%7", "8", "9", "10", "11", "12", PTX_D8(0))
    PTX_WGMMA(PTX_WGMMA_SHARED, 32, PTX_R10("") "%10,%11,%12,%13,%14,%15", "16", "17", "18", "19", "20", PTX_D16)
    PTX_WGMMA(PTX_WGMMA_SHARED, 64, PTX_R30 "%30,%31", "32", "33", "34", "35", "36", PTX_D32)
    PTX_WGMMA(PTX_WGMMA_SHARED, 96, PTX_R30 PTX_R10("3") "%40,%41,%42,%43,%44,%45,%46,%47",
              "48", "49", "50", "51", "52", PTX_D48)
    PTX_WGMMA(PTX_WGMMA_SHARED, 128, PTX_R60 "%60,%61,%62,%63", "64", "65", "66", "67", "68", PTX_D64)
    PTX_WGMMA(PTX_WGMMA_SHARED, 192, PTX_R90 "%90,%91,%92,%93,%94,%95", "96", "97", "98", "99", "100", PTX_D96)
    PTX_WGMMA(PTX_WGMMA_SHARED, 256, PTX_R120 "%120,%121,%122,%123,%124,%125,%126,%127",
              "128", "129", "130", "131", "132", PTX_D128)
    // clang-format on
#endif
}
// The same with A in registers: a fragment of this warp's 16 rows.
template <class Number, bool kBMnMajor = false, int kFragments>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[kFragments][4], const uint32_t (&a)[4], uint64_t b,
                                             bool accumulate CALLERS_LINE) {
    constexpr int n_columns = kFragments * 8;
    static_assert(n_columns == 8 || n_columns == 16 || n_columns == 32 || n_columns == 64 || n_columns == 96 ||
                  n_columns == 128 || n_columns == 192 || n_columns == 256);
#ifdef CUDA_ON_CPU
    cuda_cpu::Wgmma operands{&d[0][0], a, 0, b, accumulate};
    cuda_cpu::keeping_thread([&] {
        cuda_cpu::wgmma_by(cuda_cpu::linear_index(), operands, n_columns / 2,
                           ptx::complete_wgmma<Number, n_columns, false, false, kBMnMajor>, {file, line});
    });
#else
    // clang-format off
    PTX_WGMMA(PTX_WGMMA_REGISTERS, 8, "%0,%1,%2,%3", "4", "5", "6", "7", "8", "9", "10", PTX_D4(0))
    PTX_WGMMA(PTX_WGMMA_REGISTERS, 16, "%0,%1,%2,%3,%4,%5,%6,%7", "8", "9", "10", "11", "12", "13", "14", PTX_D8(0))
    PTX_WGMMA(PTX_WGMMA_REGISTERS, 32, PTX_R10("") "%10,%11,%12,%13,%14,%15",
              "16", "17", "18", "19", "20", "21", "22", PTX_D16)
    PTX_WGMMA(PTX_WGMMA_REGISTERS, 64, PTX_R30 "%30,%31", "32", "33", "34", "35", "36", "37", "38", PTX_D32)
    PTX_WGMMA(PTX_WGMMA_REGISTERS, 96, PTX_R30 PTX_R10("3") "%40,%41,%42,%43,%44,%45,%46,%47",
              "48", "49", "50", "51", "52", "53", "54", PTX_D48)
    PTX_WGMMA(PTX_WGMMA_REGISTERS, 128, PTX_R60 "%60,%61,%62,%63", "64", "65", "66", "67", "68", "69", "70", PTX_D64)
    PTX_WGMMA(PTX_WGMMA_REGISTERS, 192, PTX_R90 "%90,%91,%92,%93,%94,%95",
              "96", "97", "98", "99", "100", "101", "102", PTX_D96)
    PTX_WGMMA(PTX_WGMMA_REGISTERS, 256, PTX_R120 "%120,%121,%122,%123,%124,%125,%126,%127",
              "128", "129", "130", "131", "132", "133", "134", PTX_D128)
    // clang-format on
#endif
}

}  // namespace
