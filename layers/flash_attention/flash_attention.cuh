// layers/flash_attention/flash_attention.cuh: what the tiers of flash attention share: where heads lie, who sees whom,
// the softmax's powers of two. The maths is on the first page of flash_attention.cu.
#pragma once

#include "core/kernel.cuh"
#include "layers/layers.h"

#include <algorithm>

namespace {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// ---------------------------------------------------------------------------------------------------------------------
// Heads inside of rows: HeadColumns (layers.h) as kernels see it. Strides in elements.

template <class Number>
struct Heads {
    Number* data;
    int64_t batch_stride, token_stride, head_stride;

    explicit Heads(const HeadColumns& heads)
        : data(heads.rows.ptr<std::remove_const_t<Number>>() + heads.column),
          batch_stride(heads.rows.shape[1] * heads.rows.shape[2]), token_stride(heads.rows.shape[2]),
          head_stride(heads.head_stride()) {}
    // The D numbers of head `head` of token 0 of sequence b; token t stands t * token_stride later.
    __device__ __forceinline__ Number* head(int64_t b, int64_t head) const {
        return data + b * batch_stride + head * head_stride;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Who sees whom. What a query may see is an interval of keys, and what may see a key is an interval of queries:
//
//     query t sees the keys      [first of t's document, its end)  cut by  s <= t (causal)  and  |t - s| < window
//     key s is seen by queries   [first of s's document, its end)  cut by  t >= s (causal)  and  |t - s| < window
//
// Both ends of the interval never decrease from one token to the next, so the tokens [t0, t1] together see
// [first of t0, end of t1), which is all that a block has to walk through.
//
// Queries and keys may be chunks of a longer sequence, as TokenChunks says. t and s above are tokens of the whole
// sequence; kernels count rows. Later rows are later tokens, so an interval of tokens is an interval of rows, too.

struct Interval {
    int first, end;
};

struct RowTokens {
    int rows, length, first, second;  // TokenChunks
    __host__ __device__ __forceinline__ int token(int row) const {
        return row < length ? first + row : second + row - length;
    }
    // How many rows are tokens before this one.
    __host__ __device__ __forceinline__ int rows_before(int token) const {
        return min(max(token - first, 0), length) + min(max(token - second, 0), rows - length);
    }
};

struct Mask {
    int T;                // rows of queries, and of keys
    int whole_T, window;  // tokens; window >= whole_T: none
    bool causal;
    const int2* documents;  // (B, whole_T), null: each sequence is one document
    RowTokens queries, keys;

    // The rows that row `row` sees, or that see it.
    template <bool kOfQuery>
    __host__ __device__ __forceinline__ Interval visible(int b, int row) const {
        const RowTokens &mine = kOfQuery ? queries : keys, &others = kOfQuery ? keys : queries;
        const int t = mine.token(row);
        Interval seen{0, whole_T};
        if (documents) {
            const int2 document = documents[static_cast<int64_t>(b) * whole_T + t];
            seen = {max(document.x, 0), min(document.y, whole_T)};
        }
        seen.first = max(seen.first, t - window + 1);
        seen.end = min(seen.end, t + window);
        if (causal && kOfQuery) seen.end = min(seen.end, t + 1);
        if (causal && !kOfQuery) seen.first = max(seen.first, t);
        return {others.rows_before(seen.first), others.rows_before(seen.end)};
    }
};

struct Shape {
    int64_t H, K;
    int D, Dv;  // columns of a query and key head, and of a value head
    float scale;
    Mask mask;
    bool packed;  // rows of every head start and end at multiples of 16 bytes
};

// What n_rows rows from t0 on see together, and what every one of them sees. Rows behind the last one see nothing.
struct View {
    Interval any, all;
    // Of the others [first, first + n): does some row see any? Is there a pair that does not see each other?
    __device__ __forceinline__ bool overlaps(int first, int n) const {
        return first < any.end && first + n > any.first;
    }
    __device__ __forceinline__ bool needs_mask(int first, int n) const {
        return first < all.first || first + n > all.end;
    }
};
// The factor that divides a row's output by its sum of exponentials: 0 for a query that sees none of these keys, or
// whose scores are all -infinity.
__device__ __forceinline__ float inverse_sum(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

template <bool kOfQuery>
__device__ __forceinline__ View view_of(const Mask& mask, int b, int t0, int n_rows) {
    if (t0 >= mask.T) return {{0, 0}, {0, 0}};
    const Interval first = mask.visible<kOfQuery>(b, t0),
                   last = mask.visible<kOfQuery>(b, min(t0 + n_rows, mask.T) - 1);
    return {{first.first, last.end}, {last.first, first.end}};
}

// Whether all rows of these heads start and end at multiples of 16 bytes.
inline bool is_packed(std::initializer_list<HeadColumns> all) {
    for (const HeadColumns& heads : all) {
        const int64_t pack = 16 / static_cast<int64_t>(dtype_bytes(heads.rows.dtype));
        for (const int64_t columns : {heads.D, heads.column, heads.head_stride(), heads.rows.cols()})
            if (columns % pack != 0) return false;
    }
    return true;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The tiers. Arguments have been checked, delta (B, H, T) has been computed. D and Dv are at most 256.

struct FlashArguments {
    HeadColumns q, k, v, out;  // out is dout in the backward
    HeadColumns dq, dk, dv;    // backward only
    float *lse, *delta;        // (B, H, T)
    float* dq_sums;            // backward only: DqSums
    int* dq_counts;
    int64_t n_slots;
    int64_t B, T;
    float scale;
    bool causal;
    int64_t whole_T, window;
    TokenChunks queries, keys;
    const int2* documents;
    bool packed;  // as in Shape
};

void flash_forward_cores(const FlashArguments& arguments, cudaStream_t stream);
void flash_backward_cores(const FlashArguments& arguments, cudaStream_t stream);
void flash_forward_mma(const FlashArguments& arguments, cudaStream_t stream);
void flash_backward_mma(const FlashArguments& arguments, cudaStream_t stream);
void flash_forward_hopper(const FlashArguments& arguments, cudaStream_t stream);
void flash_backward_hopper(const FlashArguments& arguments, cudaStream_t stream);
void flash_backward_hopper_wide(const FlashArguments& arguments, cudaStream_t stream);  // heads of more than 128
// What the backward needs beside delta where one kernel computes dq, dk and dv: dq_sums, slot_floats for each slot,
// from a multiple of 16 bytes on; and dq_counts, one int and then slot_counts for each slot, all of them 0 before.
struct DqSums {
    int64_t n_slots = 0;  // 0: there are kernels for dq, and for dk with dv
    int64_t slot_floats = 0, slot_counts = 0;
    int64_t floats() const { return n_slots * slot_floats; }
    int64_t counts() const { return slot_counts == 0 ? 0 : 1 + n_slots * slot_counts; }
};
// hopper_backward.cu says why. Heads of more than 128 columns need no slot.
DqSums hopper_sums(int64_t B, int64_t T, int64_t H, int64_t K, int64_t D, int64_t Dv);
// cores_backward.cu, on the CPU device. There are no counts, and of float32 no floats: the sums lie in dq itself.
DqSums cores_sums(int64_t B, int64_t T, int64_t H, int64_t K, int64_t D, int64_t Dv, DType dtype);

namespace {

inline RowTokens row_tokens(int64_t rows, const TokenChunks& chunks) {
    return {static_cast<int>(rows), static_cast<int>(chunks.length), static_cast<int>(chunks.first[0]),
            static_cast<int>(chunks.first[1])};
}
inline Shape shape_of(const FlashArguments& a) {
    return {a.q.count,
            a.k.count,
            static_cast<int>(a.q.D),
            static_cast<int>(a.v.D),
            a.scale,
            {static_cast<int>(a.T), static_cast<int>(a.whole_T), static_cast<int>(std::min(a.window, a.whole_T)),
             a.causal, a.documents, row_tokens(a.T, a.queries), row_tokens(a.T, a.keys)},
            a.packed};
}

// What launches cost (core.h): bytes of masks and of a float for each row, and the multiply-adds' share of the pairs.
inline int64_t document_bytes(const FlashArguments& a) { return a.documents ? a.B * a.whole_T * 8 : 0; }
inline int64_t row_floats_bytes(const FlashArguments& a) { return a.B * a.q.count * a.T * 4; }
// FLOPs of one product of `columns` multiply-adds for each pair that sees each other, all heads. Documents, which the
// host does not know, count as one.
inline double product_flops(const FlashArguments& a, int64_t columns) {
    double pairs = static_cast<double>(a.T) * static_cast<double>(a.causal ? a.T + 1 : 2 * a.T) / 2;
    if (a.whole_T != a.T || a.window < a.T) {
        Mask mask = shape_of(a).mask;
        mask.documents = nullptr;
        pairs = 0;
        for (int row = 0; row < mask.T; ++row) {
            const Interval seen = mask.visible<true>(0, row);
            pairs += std::max(seen.end - seen.first, 0);
        }
    }
    return 2.0 * pairs * static_cast<double>(a.B * a.q.count * columns);
}
inline LaunchCost forward_cost(const FlashArguments& a) {
    return {.reads = bytes_of(a.q, a.k, a.v) + document_bytes(a),
            .writes = bytes_of(a.out) + row_floats_bytes(a),
            .flops = product_flops(a, a.q.D + a.v.D)};
}
// The two kernels of the backward that share no work: dq, and dk with dv.
inline LaunchCost dq_cost(const FlashArguments& a) {
    return {.reads = bytes_of(a.q, a.k, a.v, a.out) + 2 * row_floats_bytes(a) + document_bytes(a),
            .writes = bytes_of(a.dq),
            .flops = product_flops(a, 2 * a.q.D + a.v.D)};
}
// What a kernel that owns keys sums. The registers of a thread do not hold dk and dv of heads of more than 192 columns:
// then there is a kernel for each, and S is computed once more. dv needs S only, dk dP, too.
enum class KeySums { both, dk, dv };
inline LaunchCost key_sums_cost(const FlashArguments& a, KeySums sums) {
    const bool dk = sums != KeySums::dv, dv = sums != KeySums::dk;
    return {.reads = bytes_of(a.q, a.k, a.v, a.out) + 2 * row_floats_bytes(a) + document_bytes(a),
            .writes = (dk ? bytes_of(a.dk) : 0) + (dv ? bytes_of(a.dv) : 0),
            .flops = product_flops(a, a.q.D + (dk ? a.q.D + a.v.D : 0) + (dv ? a.v.D : 0))};
}
// Calls f with each of the kernels for heads of kD columns: f(std::integral_constant of a KeySums).
template <int kD, class F>
void for_key_sums(F&& f) {
    if constexpr (kD <= 192) {
        f(std::integral_constant<KeySums, KeySums::both>());
    } else {
        f(std::integral_constant<KeySums, KeySums::dk>());
        f(std::integral_constant<KeySums, KeySums::dv>());
    }
}

// Calls f with the smallest of the sizes that kernels are compiled for which holds heads of D and Dv columns. The
// columns between are zeros, in shared memory only.
template <int kD_, int kDv_>
struct HeadSize {
    static constexpr int kD = kD_, kDv = kDv_;
};
template <class... Sizes>
struct HeadSizes {
    template <class F>
    static void dispatch(int64_t D, int64_t Dv, F&& f) {
        bool found = false;
        ((found = found || (D <= Sizes::kD && Dv <= Sizes::kDv && (f(Sizes{}), true))), ...);
    }
};

// Tiles for GPUs of compute capability 7.5 (Turing), where a block has 64 KiB of shared memory; later ones have 99 or
// more. Where a Tile for heads of up to 128 columns takes more than 64, there is a small one with fewer others. Calls
// f(the tile that this GPU can have).
constexpr size_t kTuringBytes = 64 << 10;

template <class Tile, class SmallTile, class F>
void with_tile(F&& f) {
    if constexpr (Tile::kD <= 128 && Tile::kSharedBytes > kTuringBytes && SmallTile::kSharedBytes <= kTuringBytes)
        if (static_cast<size_t>(device().block_shared_bytes) < Tile::kSharedBytes) return f(SmallTile{});
    f(Tile{});
}
// Does nvcc compile for a later GPU? Kernels with small tiles are empty there.
#if !defined(CUDA_ON_CPU) && __CUDA_ARCH__ >= 800
constexpr bool kAfterTuring = true;
#else
constexpr bool kAfterTuring = false;
#endif

}  // namespace
