// Writing new tokens to a cache in pages: keys, rotated on their way, and values; or MLA's latents and shared keys.
//
//     GQA   page = [K key heads | K value heads], each P rows of D columns      row r of head h:  (h P + r) D
//     MLA   page = P rows [latent (R) | shared key (Dr)]
//
// What a block of the attention reads of a page, all rows of one head, so lies side by side.
//
// A pool of e4m3 has a scale for each row of each head (MLA: for the latent and for the shared key), which makes its
// largest number the largest code: scale = max |x| / 448, and x is code * scale, with an error of at most 2^-4 |x|, or
// 2^-10 scale where |x| < 2^-6 scale (half a unit of e4m3's three bits of mantissa, and of its smallest numbers).
#include "layers/chunk.cuh"
#include "layers/layers.h"
#include "layers/rope.cuh"

#include <cfloat>

namespace {

// A team of threads, which waits for no other, has one head of one token.
constexpr int kTeam = kOnCpu ? 1 : kWarp, kTeams = 8;  // threads of a team, teams of a block
constexpr int64_t kMaxD = 256;                         // as the attention
constexpr float kLargestCode = 448.0f;                 // of e4m3

__device__ __forceinline__ void wait_for_team() {
    if constexpr (!kOnCpu) __syncwarp();
}

// Writes n numbers to a row of the pool; `scale` is that of the row, if it has one.
template <class Stored, class Number>
__device__ __forceinline__ void store_row(Stored* to, float* scale, const Number* from, int n) {
    if constexpr (std::is_same_v<Stored, __nv_fp8_e4m3>) {
        float largest = 0.0f;
        for (int i = threadIdx.x; i < n; i += kTeam) {
            const float size = fabsf(to_float(from[i]));
            if (size > largest) largest = size;  // g++ 12 for AArch64 cannot compile this loop with fmaxf
        }
        if constexpr (!kOnCpu) largest = warp_max(largest);
        const float share = largest / kLargestCode, divisor = share > FLT_MIN ? share : 1.0f;  // nothing but zeros: 1
        for (int i = threadIdx.x; i < n; i += kTeam) to[i] = from_float<Stored>(to_float(from[i]) / divisor);
        if (threadIdx.x == 0) *scale = divisor;
    } else {
        for (int i = threadIdx.x; i < n; i += kTeam) to[i] = from_float<Stored>(to_float(from[i]));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Keys and values

struct WriteShape {
    int H, K, D, P;
    int64_t pool_rows, n_positions;  // n_positions: rows of the table
    int64_t q_stride, k_stride, v_stride, q_head_stride, k_head_stride, v_head_stride;
    bool neighbours;
};

// Rotates one head, by the row of the table of its position.
__device__ __forceinline__ void rotate_head(float* x, const float* table, int D, bool neighbours) {
    for (int i = threadIdx.x; i < D / 2; i += kTeam) {
        float &x1 = x[neighbours ? 2 * i : i], &x2 = x[neighbours ? 2 * i + 1 : i + D / 2];
        rotate_point(x1, x2, table[i], table[D / 2 + i]);
    }
}

// Block (token, group of heads): first the H query heads, then the K key heads, then the K value heads.
template <class Number, class Stored>
__global__ void paged_write_kernel(Stored* pool, float* scales, Number* q, const Number* k, const Number* v,
                                   const int32_t* rows, const int32_t* positions, const float* table, WriteShape s) {
    __shared__ float heads[kTeams][kMaxD];
    const int64_t token = blockIdx.x, row = rows[token], position = table ? positions[token] : 0;
    const int h = static_cast<int>(blockIdx.y * kTeams + threadIdx.y) - s.H;  // head of the page; below 0: query
    if (row < 0 || row >= s.pool_rows || position < 0 || (table && position >= s.n_positions)) __trap();
    if (h >= 2 * s.K || (h < 0 && !table)) return;  // the whole team; without a table queries stay as they are

    Number* query = q + token * s.q_stride + (s.H + h) * s.q_head_stride;
    const Number* from = h < 0     ? query
                         : h < s.K ? k + token * s.k_stride + h * s.k_head_stride
                                   : v + token * s.v_stride + (h - s.K) * s.v_head_stride;
    float* x = heads[threadIdx.y];
    for (int i = threadIdx.x; i < s.D; i += kTeam) x[i] = to_float(from[i]);
    wait_for_team();
    if (table && h < s.K) rotate_head(x, table + position * s.D, s.D, s.neighbours);
    wait_for_team();
    if (h < 0) {
        for (int i = threadIdx.x; i < s.D; i += kTeam) query[i] = from_float<Number>(x[i]);
    } else {
        const int64_t place = (row / s.P * 2 * s.K + h) * s.P + row % s.P;  // in rows of D columns
        store_row(pool + place * s.D, scales + place, x, s.D);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Latents and shared keys. Block (group of tokens, part of the row).

template <class Number, class Stored>
__global__ void paged_latent_write_kernel(Stored* pool, float* scales, const Number* latent, const Number* key,
                                          int64_t latent_stride, int64_t key_stride, const int32_t* rows, int64_t N,
                                          int64_t pool_rows, int R, int Dr) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * kTeams + threadIdx.y;
    if (token >= N) return;  // the whole team
    const int64_t row = rows[token];
    if (row < 0 || row >= pool_rows) __trap();
    if (blockIdx.y == 0) store_row(pool + row * (R + Dr), scales + 2 * row, latent + token * latent_stride, R);
    else store_row(pool + row * (R + Dr) + R, scales + 2 * row + 1, key + token * key_stride, Dr);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// The pool has the dtype of what is written, or is e4m3 and has scales. Returns where the scales are, if anywhere.
float* check_pool(const char* operation, const PagedStep& step, DType dtype, int64_t N, int64_t width,
                  int64_t scales_of_row) {
    const Tensor& pool = step.pool;
    const bool quantised = pool.dtype == DType::e4m3;
    expect(operation, "step.pool", pool, quantised ? DType::e4m3 : dtype, {-1, -1, width});
    expect(operation, "step.rows", step.rows, DType::i32, {N});
    if (!quantised) return nullptr;
    expect(operation, "step.scales", step.scales, DType::f32, {pool.shape[0], pool.shape[1], scales_of_row});
    return step.scales.ptr<float>();
}

template <class F>
void dispatch_pool(DType dtype, const Tensor& pool, F&& f) {
    dispatch(dtype, [&](auto number) {
        if (pool.dtype == DType::e4m3) f(number, __nv_fp8_e4m3{});
        else f(number, number);
    });
}

}  // namespace

void paged_write(const PagedStep& step, const HeadColumns& q, const HeadColumns& k, const HeadColumns& v,
                 RopePairs pairs, Tensor positions, Tensor table, cudaStream_t stream) {
    const char* operation = "paged_write";
    const DType dtype = q.rows.dtype;
    const int64_t H = q.count, K = k.count, D = q.D, N = q.rows.ndim == 3 ? q.rows.shape[1] : 0;
    check(D >= 1 && D <= kMaxD, operation, ": heads of q have ", D, " columns; 1 to ", kMaxD, " are possible");
    check(N > 0 && H > 0 && K > 0, operation, ": q is ", q.rows, " with ", H, " heads, for ", K, " heads of keys");
    expect_heads(operation, "q", q, dtype, 1, N, H, D);
    expect_heads(operation, "k", k, dtype, 1, N, K, D);
    expect_heads(operation, "v", v, dtype, 1, N, K, D);
    float* scales = check_pool(operation, step, dtype, N, 2 * K * D, 2 * K);
    if (table.exists()) {
        check(D % 2 == 0, operation, ": heads of D = ", D, " columns cannot be rotated: D must be even");
        expect(operation, "table", table, DType::f32, {-1, D});
        expect(operation, "positions", positions, DType::i32, {1, N});
    }
    WriteShape s{};
    s.H = narrow(H, "heads"), s.K = narrow(K, "heads"), s.D = narrow(D, "columns"),
    s.P = narrow(step.pool.shape[1], "P");
    s.pool_rows = step.pool.shape[0] * step.pool.shape[1], s.n_positions = table.shape[0];
    s.q_stride = q.rows.cols(), s.k_stride = k.rows.cols(), s.v_stride = v.rows.cols();
    s.q_head_stride = q.head_stride(), s.k_head_stride = k.head_stride(), s.v_head_stride = v.head_stride();
    s.neighbours = pairs == RopePairs::neighbours;
    const dim3 grid(static_cast<unsigned>(N), static_cast<unsigned>(ceil_div(H + 2 * K, kTeams)));
    dispatch_pool(dtype, step.pool, [&](auto number, auto stored) {
        using Number = decltype(number);
        using Stored = decltype(stored);
        paged_write_kernel<Number, Stored><<<grid, dim3(kTeam, kTeams), 0, stream>>>(
            step.pool.ptr<Stored>(), scales, q.rows.ptr<Number>() + q.column, k.rows.ptr<Number>() + k.column,
            v.rows.ptr<Number>() + v.column, step.rows.ptr<int32_t>(),
            table.exists() ? positions.ptr<int32_t>() : nullptr, table.exists() ? table.ptr<float>() : nullptr, s);
        const int64_t rotated = table.exists() ? N * H * D : 0, written = N * 2 * K * D;
        const int64_t number_bytes = sizeof(Number), stored_bytes = sizeof(Stored);
        launched("paged_write_kernel",
                 {.reads = (rotated + written) * number_bytes + bytes_of(step.rows) +
                           (rotated > 0 ? bytes_of(positions) + N * D * int64_t{sizeof(float)} : 0),
                  .writes = rotated * number_bytes + written * stored_bytes +
                            (scales ? N * 2 * K * int64_t{sizeof(float)} : 0),
                  .flops = rotated > 0 ? 3.0 * static_cast<double>(N * (H + K) * D) : 0});
    });
}

void paged_latent_write(const PagedStep& step, const HeadColumns& latent, const HeadColumns& key, cudaStream_t stream) {
    const char* operation = "paged_latent_write";
    const DType dtype = latent.rows.dtype;
    const int64_t R = latent.D, Dr = key.D, N = latent.rows.ndim == 3 ? latent.rows.shape[1] : 0;
    check(N > 0, operation, ": latent is ", latent.rows, ", expected rows (1, N, columns)");
    expect_heads(operation, "latent", latent, dtype, 1, N, 1, R);
    expect_heads(operation, "key", key, dtype, 1, N, 1, Dr);
    float* scales = check_pool(operation, step, dtype, N, R + Dr, 2);
    const dim3 grid(static_cast<unsigned>(ceil_div(N, kTeams)), 2);
    dispatch_pool(dtype, step.pool, [&](auto number, auto stored) {
        using Number = decltype(number);
        using Stored = decltype(stored);
        paged_latent_write_kernel<Number, Stored><<<grid, dim3(kTeam, kTeams), 0, stream>>>(
            step.pool.ptr<Stored>(), scales, latent.rows.ptr<Number>() + latent.column,
            key.rows.ptr<Number>() + key.column, latent.rows.cols(), key.rows.cols(), step.rows.ptr<int32_t>(), N,
            step.pool.shape[0] * step.pool.shape[1], narrow(R, "columns"), narrow(Dr, "columns"));
        const int64_t n = N * (R + Dr), number_bytes = sizeof(Number), stored_bytes = sizeof(Stored);
        launched("paged_latent_write_kernel",
                 {.reads = n * number_bytes + bytes_of(step.rows),
                  .writes = n * stored_bytes + (scales ? 2 * N * int64_t{sizeof(float)} : 0)});
    });
}
