// cpu/bf16_tiles.cpp: bf16_tiles.h's multiplication by the processor's own tile instructions (AMX), whatever processor
// the other files are compiled for.
//
// A process has to ask Linux for the tile registers, 8 KiB of state a thread. A thread says how many rows and bytes a
// row its tiles have (ldtilecfg) before it uses them, and gives them back afterwards (tilerelease), so that nobody has
// to save them.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "bf16_products.h"

// GCC compiles what follows for AVX-512, which every processor with AMX has.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define CUDA_CPU_TILES
#define CUDA_CPU_AVX512
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "bf16_tiles.h"

namespace cuda_cpu {

int64_t tiles_space(int64_t columns, int64_t k) { return space_of_tiles(columns, k); }

#if defined(CUDA_CPU_TILES)

namespace {

// Eight tile registers of 16 rows x 64 bytes. "memory": the compiler must have stored what a tile loads.
struct AmxTiles {
    AmxTiles() {
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes_of_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } configuration;
        static_assert(sizeof configuration == 64);
        asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
    }
    ~AmxTiles() { asm volatile("tilerelease" ::: "memory"); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;

    template <int tile>
    static void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(tile));
    }
    template <int tile>
    static void load(const void* rows, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
    }
    template <int tile>
    static void store(void* rows, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
    }
    // sums[i][j] += sum over k of x[i][k] y[k][j]
    template <int sums, int x, int y>
    static void add_products() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(x), "i"(y));
    }
};

// Do the tiles give what float64 gives, but for rounding? Nobody should get wrong products from a processor, or a
// virtual machine, on which this file has not been tested.
bool product_is_right(int64_t rows, int64_t columns, int64_t k) {
    std::vector<__nv_bfloat16> a(size_t(rows * k)), b(size_t(k * columns));
    for (size_t i = 0; i < a.size(); ++i) a[i] = float(int(i * 37 % 101) - 50) / 32;
    for (size_t i = 0; i < b.size(); ++i) b[i] = float(int(i * 53 % 89) - 44) / 32;
    Matrix rows_of_a, columns_of_b;
    rows_of_a.type = columns_of_b.type = CUDA_R_16BF;
    rows_of_a.data = reinterpret_cast<char*>(a.data()), rows_of_a.row_stride = k;
    columns_of_b.data = reinterpret_cast<char*>(b.data()), columns_of_b.column_stride = k;
    std::vector<float> d(size_t(rows * columns)), space(size_t(space_of_tiles(columns, k)) + 16);
    const size_t misaligned = reinterpret_cast<uintptr_t>(space.data()) / sizeof(float) % 16;
    multiply_by_tiles<AmxTiles>(rows_of_a, columns_of_b, rows, columns, k, 1, 0, d.data(), rows,
                                space.data() + (16 - misaligned) % 16);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
            double sum = 0, size = 0;
            for (int64_t l = 0; l < k; ++l) {
                const double product = double(float(a[size_t(i * k + l)])) * double(float(b[size_t(j * k + l)]));
                sum += product, size += std::fabs(product);
            }
            if (!(std::fabs(double(d[size_t(j * rows + i)]) - sum) <= 1e-5 * size)) return false;
        }
    return true;
}

bool ask_for_tiles() {
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;  // EDX of leaf 7
    constexpr long request_permission = 0x1023, tile_data = 18;   // arch_prctl's ARCH_REQ_XCOMP_PERM
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & amx_bf16) || !(d & amx_tile)) return false;
    if (!__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq"))
        return false;
    if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) return false;
    if (product_is_right(50, 57, 400) && product_is_right(37, 5, 70)) return true;
    std::fprintf(stderr,
                 "CUDA on the CPU: this processor's tile instructions (AMX) give wrong products; going on "
                 "without them. Please report this, with the processor's name.\n");
    return false;
}

}  // namespace

bool has_bf16_tiles() {
    static const bool has = ask_for_tiles();
    return has;
}

void multiply_with_tiles(const Matrix& a, const Matrix& b, int64_t rows, int64_t columns, int64_t k, float alpha,
                         float beta, float* d, int64_t ld, float* space) {
    multiply_by_tiles<AmxTiles>(a, b, rows, columns, k, alpha, beta, d, ld, space);
}

#else

bool has_bf16_tiles() { return false; }
void multiply_with_tiles(const Matrix&, const Matrix&, int64_t, int64_t, int64_t, float, float, float*, int64_t,
                         float*) {}

#endif

}  // namespace cuda_cpu
