// Heads from rows to other rows: what context parallelism packs, sends and unpacks, and 3D tensor parallelism puts side
// by side.
//
//   for each row t, head h and column d:
//       copy_heads       to[t][h][d]          = from[t][h][d]
//       add_heads        to[t][h][d]         += from[t][h][d]
//       spread_heads     to[token(t)][h][d]   = from[t][h][d]           token(t): of row t of these chunks
//       collect_heads    to[t][h][d]          = from[token(t)][h][d]
//
// Bytes: each number is read once and written once; add_heads also reads what it adds to. Memory limits all of them.
#include "layers/chunk.cuh"
#include "layers/layers.h"

#include <numeric>

namespace {

// One side of the copy: where its heads are, and which of its rows is row t of the smaller side.
template <class Number>
struct Side {
    Number* data;
    int64_t batch_stride, token_stride, head_stride;
    int64_t length, first, second;  // TokenChunks

    Side(const HeadColumns& heads, const TokenChunks& chunks)
        : data(heads.rows.ptr<std::remove_const_t<Number>>() + heads.column),
          batch_stride(heads.rows.shape[1] * heads.rows.cols()), token_stride(heads.rows.cols()),
          head_stride(heads.head_stride()), length(chunks.length), first(chunks.first[0]), second(chunks.first[1]) {}
    __device__ __forceinline__ Number* at(int64_t b, int64_t t, int64_t head) const {
        const int64_t row = t < length ? first + t : second + t - length;
        return data + b * batch_stride + row * token_stride + head * head_stride;
    }
};

// Block (t, b, group of heads); threadIdx.y is the head in the group, threadIdx.x the chunk of kN of its columns.
template <class To, class From, int kN, bool kAdd>
__global__ void copy_heads_kernel(Side<To> to, Side<const From> from, int n_heads, int64_t D) {
    const int head = blockIdx.z * blockDim.y + threadIdx.y;
    const int64_t t = blockIdx.x, b = blockIdx.y, d = static_cast<int64_t>(threadIdx.x) * kN;
    if (head >= n_heads || d >= D) return;
    To* const at = to.at(b, t, head) + d;
    float x[kN];
    load_chunk(x, from.at(b, t, head) + d, D - d);
    if constexpr (kAdd) {
        float before[kN];
        load_chunk(before, at, D - d);
        for (int l = 0; l < kN; ++l) x[l] += before[l];
    }
    store_chunk(at, x, D - d);
}

template <class To, class From, bool kAdd>
void launch(const Side<To>& to, const Side<const From>& from, int64_t common, const HeadColumns& heads, int64_t T,
            cudaStream_t stream) {
    constexpr int kPack = kOnCpu ? kChunk<float> : static_cast<int>(16 / std::min(sizeof(To), sizeof(From)));
    const auto with = [&](auto n) {
        constexpr int kN = decltype(n)::value;
        const HeadLaunch at = head_launch(heads.rows.shape[0], T, heads.count, ceil_div(heads.D, kN));
        copy_heads_kernel<To, From, kN, kAdd>
            <<<at.grid, at.block, 0, stream>>>(to, from, narrow(heads.count, "heads"), heads.D);
        const int64_t elements = heads.rows.shape[0] * T * heads.count * heads.D;
        const int64_t to_bytes = elements * static_cast<int64_t>(sizeof(To)),
                      from_bytes = elements * static_cast<int64_t>(sizeof(From));
        launched("copy_heads_kernel", {.reads = from_bytes + (kAdd ? to_bytes : 0), .writes = to_bytes});
    };
    // Packed loads and stores need every head on a whole number of packs, on either side.
    if (kOnCpu || common % kPack == 0) with(std::integral_constant<int, kPack>{});
    else with(std::integral_constant<int, 1>{});
}

struct Rows {
    const HeadColumns& heads;
    TokenChunks chunks;
};

template <bool kAdd>
void run(const char* name, const Rows& to, const Rows& from, int64_t T, cudaStream_t stream) {
    for (const auto& [argument, side] : {std::pair{"to", to}, std::pair{"from", from}}) {
        const Tensor& rows = side.heads.rows;
        expect_heads(name, argument, side.heads, rows.dtype, to.heads.rows.shape[0], rows.shape[1], to.heads.count,
                     to.heads.D);
        expect_chunks(name, argument, side.chunks, T, rows.shape[1]);
    }
    if (to.heads.rows.shape[0] * T == 0) return;
    int64_t common = 0;
    for (const HeadColumns& heads : {to.heads, from.heads})
        for (const int64_t x : {heads.D, heads.column, heads.head_stride(), heads.rows.cols()})
            common = std::gcd(common, is_aligned(heads.rows.data, 16) ? x : 1);
    dispatch(to.heads.rows.dtype, [&](auto its) {
        using To = decltype(its);
        dispatch(from.heads.rows.dtype, [&](auto other) {
            using From = decltype(other);
            launch<To, From, kAdd>(Side<To>(to.heads, to.chunks), Side<const From>(from.heads, from.chunks), common,
                                   to.heads, T, stream);
        });
    });
}

TokenChunks all_of(const HeadColumns& heads) { return {heads.rows.shape[1], {0, heads.rows.shape[1]}}; }

}  // namespace

void copy_heads(const HeadColumns& to, const HeadColumns& from, cudaStream_t stream) {
    run<false>("copy_heads", {to, all_of(to)}, {from, all_of(to)}, to.rows.shape[1], stream);
}
void add_heads(const HeadColumns& to, const HeadColumns& from, cudaStream_t stream) {
    run<true>("add_heads", {to, all_of(to)}, {from, all_of(to)}, to.rows.shape[1], stream);
}
void spread_heads(const HeadColumns& to, const HeadColumns& from, const TokenChunks& chunks, cudaStream_t stream) {
    run<false>("spread_heads", {to, chunks}, {from, all_of(from)}, from.rows.shape[1], stream);
}
void collect_heads(const HeadColumns& to, const HeadColumns& from, const TokenChunks& chunks, cudaStream_t stream) {
    run<false>("collect_heads", {to, all_of(to)}, {from, chunks}, to.rows.shape[1], stream);
}
