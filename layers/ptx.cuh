// layers/ptx.cuh: the instructions of NVIDIA's GPUs that C++ has no word for, each as a function: its PTX, and beside
// it what it means, as the CPU device does it. (PTX is the assembly language that nvcc compiles to; NVIDIA's manual is
// "Parallel Thread Execution ISA".) All of these are there from sm_80 on.
//
// Tensor cores multiply small matrices that a warp holds together: each of its 32 lanes has a few elements in
// registers, its fragment. Which ones, is all that there is to know. With g = lane / 4 and t = lane % 4:
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
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
#ifdef CUDA_ON_CPU
    ptx::Ldmatrix operands{{}, row};
    cuda_cpu::exchange(kFullWarp, &operands, ptx::complete_ldmatrix<kTranspose>, "ldmatrix", __FILE__, __LINE__);
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

// c += A B. Number is what A and B hold: __nv_bfloat16 or __half. b points to two registers.
template <class Number>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t* b) {
#ifdef CUDA_ON_CPU
    ptx::Mma operands{c, a, b};
    cuda_cpu::exchange(kFullWarp, &operands, ptx::complete_mma<Number>, "mma", __FILE__, __LINE__);
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

// ---------------------------------------------------------------------------------------------------------------------
// Asynchronous copies from device to shared memory. They pass the registers by: a thread starts a copy of 16 bytes,
// goes on, and waits for it later. What a thread started since its last commit is a group; cp_async_wait<n> returns
// when all groups of this thread but the latest n have landed. Other threads' copies are there after a barrier. In
// strict mode the CPU device lets a copy land when it is waited for, not before; until then its place holds NaN.

// Both addresses on 16-byte boundaries. With copy == false, zeros are written and nothing is read.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool copy = true) {
#ifdef CUDA_ON_CPU
    cuda_cpu::async_copy(shared, copy ? global : nullptr, 16);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(copy ? 16 : 0)
                 : "memory");
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#ifdef CUDA_ON_CPU
    cuda_cpu::async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int n>
__device__ __forceinline__ void cp_async_wait() {
#ifdef CUDA_ON_CPU
    cuda_cpu::async_wait(n);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
#endif
}

}  // namespace
