// Products of bf16 matrices on the CPU device (cpu/sgemm.cpp): by AVX-512's dot products where the processor has them,
// and by AMX's tiles, whose five instructions are written out here, so that all but the instructions themselves is
// tested on every processor. test_cublaslt.cu tests products as a whole, exact ones and the processor's fastest.
//
//   run:   build/cpu/run_tests "[bf16_products]"
#include "test.h"

#ifdef CUDA_ON_CPU

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "bf16_products.h"
#include "bf16_tiles.h"

namespace {

using namespace cuda_cpu;

// ---- AMX in C++, as Intel's manual describes it

float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
float wide(uint16_t code) { return flushed(float(__ushort_as_bfloat16(code))); }
float add(float x, float y) { return flushed(flushed(x) + flushed(y)); }
float multiply_add(uint16_t x, uint16_t y, float sum) { return flushed(std::fma(wide(x), wide(y), flushed(sum))); }

struct WrittenOutTiles {
    WrittenOutTiles() {}
    struct Tile {
        uint16_t codes[16][32];  // or 16 x 16 floats
    };
    static inline thread_local Tile tiles[8];

    template <int tile>
    static void zero() {
        std::memset(&tiles[tile], 0, sizeof(Tile));
    }
    template <int tile>
    static void load(const void* rows, int64_t stride) {
        for (int i = 0; i < 16; ++i) std::memcpy(tiles[tile].codes[i], static_cast<const char*>(rows) + i * stride, 64);
    }
    template <int tile>
    static void store(void* rows, int64_t stride) {
        for (int i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(rows) + i * stride, tiles[tile].codes[i], 64);
    }
    template <int sums, int x, int y>
    static void add_products() {
        for (int i = 0; i < 16; ++i)
            for (int j = 0; j < 16; ++j) {
                float even = 0, odd = 0, sum;
                for (int l = 0; l < 16; ++l) {
                    even = multiply_add(tiles[x].codes[i][2 * l], tiles[y].codes[l][2 * j], even);
                    odd = multiply_add(tiles[x].codes[i][2 * l + 1], tiles[y].codes[l][2 * j + 1], odd);
                }
                char* const place = reinterpret_cast<char*>(tiles[sums].codes[i]) + j * sizeof(float);
                std::memcpy(&sum, place, sizeof sum);
                sum = add(sum, add(even, odd));
                std::memcpy(place, &sum, sizeof sum);
            }
    }
};

// ---- One product

// A, B and D stand in memory with gaps of NaN between their rows or columns.
struct Product {
    int64_t m, n, k;
    bool k_of_a_is_contiguous, k_of_b_is_contiguous;
    std::vector<__nv_bfloat16> a_numbers, b_numbers;
    std::vector<float> old_d;
    Matrix a, b;
    int64_t ld;
    float alpha, beta;

    Product(int64_t m_, int64_t n_, int64_t k_, int choice)
        : m(m_), n(n_), k(k_), k_of_a_is_contiguous(choice & 1), k_of_b_is_contiguous(choice & 2), ld(m_ + 3),
          alpha(choice & 4 ? 0.7f : 1), beta(choice & 2 ? -0.3f : 0) {
        std::mt19937 generator(unsigned(m * 31 + n * 7 + k));
        const auto fill = [&](std::vector<__nv_bfloat16>& numbers, Matrix& matrix, int64_t lines, bool contiguous) {
            const int64_t length = (contiguous ? k : lines) + 5;
            numbers.assign(size_t(length * (contiguous ? lines : k)), __ushort_as_bfloat16(0x7fc0));
            for (int64_t i = 0; i < lines; ++i)
                for (int64_t l = 0; l < k; ++l)
                    numbers[size_t(contiguous ? i * length + l : l * length + i)] =
                        std::ldexp(float(generator() % 255) - 127, int(generator() % 12) - 12);
            matrix.type = CUDA_R_16BF;
            matrix.data = reinterpret_cast<char*>(numbers.data());
            (contiguous ? matrix.row_stride : matrix.column_stride) = length;
        };
        fill(a_numbers, a, m, k_of_a_is_contiguous);
        fill(b_numbers, b, n, k_of_b_is_contiguous);
        b = b.transposed();
        old_d.resize(size_t(n * ld));
        for (float& x : old_d) x = float(generator() % 1000) - 500;
        for (int64_t j = 0; beta == 0 && j < n; ++j) std::fill_n(&old_d[size_t(j * ld)], m, NAN);
    }

    float sum_in_order_of_tiles(int64_t i, int64_t j) const {
        const auto number = [&](const Matrix& matrix, int64_t row, int64_t column) {
            return *reinterpret_cast<const uint16_t*>(matrix.at(0, row, column));
        };
        const float old = old_d[size_t(j * ld + i)];
        float sum = alpha == 1 && beta != 0 ? beta * old : 0;
        for (int64_t first = 0; first < k; first += 32) {
            float parts[2] = {};
            for (int64_t l = first; l < std::min(k, first + 32); ++l)
                parts[l % 2] = multiply_add(number(a, i, l), number(b, l, j), parts[l % 2]);
            sum = add(sum, add(parts[0], parts[1]));
        }
        if (alpha == 1) return sum;
        return beta == 0 ? alpha * sum : alpha * sum + beta * old;
    }

    template <class Multiply>
    std::vector<float> operator()(Multiply multiply) const {
        std::vector<float> d = old_d, space(size_t(sgemm_space(n, k)) + 16, NAN);
        const size_t misaligned = reinterpret_cast<uintptr_t>(space.data()) / sizeof(float) % 16;
        multiply(a, b, m, n, k, alpha, beta, d.data(), ld, space.data() + (16 - misaligned) % 16);
        return d;
    }
};

// Edges of every kind: of tiles of 16, of blocks of 32, of panels of 192 rows and 384 k's; few columns and many; no k
// at all.
template <class F>
void for_each_product(F f) {
    const int64_t sizes[][3] = {{1, 1, 1},    {16, 17, 32},   {33, 5, 385}, {17, 33, 63},
                                {50, 16, 70}, {195, 40, 416}, {33, 50, 70}, {33, 50, 0}};
    for (const auto& [m, n, k] : sizes)
        for (int choice = 0; choice < 8; ++choice) {
            INFO("m n k " << m << " " << n << " " << k << "  choice " << choice);
            f(Product(m, n, k, choice));
        }
}

}  // namespace

#ifdef __FP_FAST_FMAF
TEST_CASE("bf16 products: tiles give each element its one order of summation", "[bf16_products]") {
    for_each_product([](const Product& product) {
        const std::vector<float> d = product(multiply_by_tiles<WrittenOutTiles>);
        int64_t wrong = 0, touched = 0;
        for (int64_t j = 0; j < product.n; ++j)
            for (int64_t i = 0; i < product.ld; ++i) {
                const size_t at = size_t(j * product.ld + i);
                if (i < product.m) wrong += d[at] != product.sum_in_order_of_tiles(i, j);
                else touched += d[at] != product.old_d[at];
            }
        CHECK(wrong == 0);
        CHECK(touched == 0);
        if (has_bf16_tiles()) CHECK((product(multiply_with_tiles) == d));
    });
}

TEST_CASE("bf16 products: dot products give the bits of exact products, but for denormals", "[bf16_products]") {
    if (!has_bf16_dots()) SKIP_TEST("this processor has no AVX-512 BF16");
    const Bf16Products before = bf16_products();
    set_bf16_products(Bf16Products::exact);
    for_each_product([](const Product& product) {
        const std::vector<float> d = product(multiply_with_dots), exact = product(sgemm);
        CHECK(std::memcmp(d.data(), exact.data(), d.size() * sizeof(float)) == 0);
    });
    // 2^-100 * 2^-28 = 2^-128 is no normal number: it counts as zero, as do such numbers in A.
    Product small(2, 1, 2, 2);
    small.alpha = 1, small.beta = 0;
    const float rows[2][2] = {{0x1p-100f, 0x1p-98f}, {0x1p-130f, 0x1p-98f}}, column[2] = {0x1p-28f, 0x1p-28f};
    for (int i = 0; i < 2; ++i)
        for (int l = 0; l < 2; ++l)
            *reinterpret_cast<__nv_bfloat16*>(small.a.at(0, i, l)) = rows[i][l],
                                                               *reinterpret_cast<__nv_bfloat16*>(small.b.at(0, l, 0)) =
                                                                   column[l];
    const std::vector<float> d = small(multiply_with_dots), exact = small(sgemm);
    CHECK(d[0] == 0x1p-126f);
    CHECK(d[1] == 0x1p-126f);
    CHECK(exact[0] == 0x1p-126f + 0x1p-128f);
    set_bf16_products(before);
}
#endif

#endif
