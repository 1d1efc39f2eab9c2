// Embedding: a token's row of one table, plus its position's row of another.
//
//   forward     out[i,:] = wte[tokens[i],:] + wpe[positions[i],:]       i = (b,t); positions[i] = t if there are none
//
//   backward    dwte[v,:] += sum of dout[i,:] over the places i with tokens[i] == v
//               dwpe[p,:] += sum of dout[i,:] over the places i with positions[i] == p
//
// As plain loops, one table:
//
//   for i:  out[i,:] = table[ids[i],:]                         for i:  dtable[ids[i],:] += dout[i,:]
//
// The forward copies rows. In the backward many places add to the same row of dtable. Atomic additions would add them
// in another order on every run, and give other bits. Instead the places are sorted by their ids. The places of one id
// are then neighbours, in ascending order: a list, whose rows of dout are added up in that order:
//
//     place i     0  1  2  3  4  5                  order (of places)     1  4 | 0  2  3 | 5
//     id          7  2  7  7  2  9                  their ids             2  2 | 7  7  7 | 9
//
// The sort is a radix sort: ids have 8-bit digits, and there is one pass for each digit, from the lowest to the
// highest: two for a vocabulary of up to 65535. A pass moves places with a smaller digit before those with a larger
// one, and keeps the order of places with equal digits. A block of threads owns a stretch of neighbouring places, each
// of its warps a share of it. A pass is two kernels:
//
//     count      how many places of each stretch have digit d        counts[stretch][d]
//     scatter    position of a place = places with a smaller digit                                sums of counts
//                                    + those with its digit in the stretches in front             sums of counts
//                                    + those in the shares of the warps in front, of this stretch
//                                    + those in front in its warp's own share
//                each place goes to its position
//
// As plain loops, with one stretch of one share:
//
//     for d:  next[d] = how many places have a digit < d
//     for i:  sorted[next[digit(i)]++] = i
//
// A few ids are very frequent, as some words are, and one thread for a whole list would still add when all others have
// long ended. So a list is cut into pieces of 128 places, counted from its own beginning, and the last piece is what
// remains. A piece is added up from its first place to its last. A list of one piece is added to its row of dtable at
// once. A list of several leaves a partial sum, a row of float32, for each of them, and a further kernel adds these up,
// in order, and adds the result to dtable:
//
//     order      | 128 of id 2 | 128 of id 2 | 7 of id 2 | 3 of id 5 | 1 of id 6 | 128 of id 9 | 70 of id 9 | ...
//                |____________________________________|  |           |           |__________________________|
//     sums         partial 0     partial 1     partial 2   dtable[5]   dtable[6]   partial 3     partial 4
//                  dtable[2] += (0 + 1) + 2                                        dtable[9] += 3 + 4
//
// As plain loops:
//
//     for each list, of id v:
//         for each piece p of it:  partial[p] = 0;  for i in p, ascending:  partial[p] += dout[i,:]
//         sum = 0;  for p, ascending:  sum += partial[p]
//         dtable[v,:] += sum
//
// Block w of the first kernel has the pieces that begin at the positions [128 w, 128 (w + 1)) of the order: no more
// than 255 places, whatever the ids are. Of the pieces of long lists at most one that is followed by another piece of
// its list begins there (it has 128 places), and at most one that is the last of its list (128 places of that list are
// in front of it). These two are the block's two rows of partial sums. And no more than one list of several pieces can
// begin there, which the further kernel's block w adds up.
//
// The order of all additions follows from the places of a list alone. So a row has the same bits on every run, and
// beside whatever other ids: a rank that has a part of the vocabulary gives its rows the bits that the whole gives
// them.
#include "layers/chunk.cuh"
#include "layers/layers.h"

#include <bit>

namespace {

constexpr int kBlock = 128;
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
// Each block of scatter sums the counts of all stretches. So that this is little work, there are only so many.
constexpr int64_t kStretch = 2048, kMostStretches = 128;
// Threads of count and scatter. Barriers are expensive on the CPU device, where a warp is enough.
constexpr int kSortBlock = kOnCpu ? kWarp : 256, kSortWarps = kSortBlock / kWarp;
constexpr int kPiece = 128;             // places of a list that are added up as one
constexpr int32_t kNoId = -2;           // of no place
constexpr int kAhead = kOnCpu ? 1 : 4;  // places whose rows a thread loads at a time

// One block per place. wpe and positions may be null. A token of -1 has no row.
template <class T, int n>
__global__ void embedding_forward_kernel(T* out, const int32_t* tokens, const int32_t* positions, const T* wte,
                                         const T* wpe, int64_t T_length, int64_t C, int64_t n_rows,
                                         int64_t n_positions) {
    const int64_t i = blockIdx.x, token = tokens[i], p = positions ? positions[i] : i % T_length;
    if (token < -1 || token >= n_rows || p < 0 || (wpe && p >= n_positions)) __trap();
    for (int64_t c = threadIdx.x * n; c < C; c += blockDim.x * n) {
        float x[n] = {}, position[n];
        if (token >= 0) load_chunk(x, wte + token * C + c, C - c);
        if (wpe) {
            load_chunk(position, wpe + p * C + c, C - c);
            for (int l = 0; l < n; ++l) x[l] += position[l];
        }
        store_chunk(out + i * C + c, x, C - c);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Sorting the places by their ids

// The places that one block has: at least kStretch, whole rounds of its threads, and the same on both devices.
inline int64_t stretch_of(int64_t n_places) {
    return std::max(kStretch, round_up(ceil_div(n_places, kMostStretches), 256));
}
inline int64_t n_stretches(int64_t n_places) { return ceil_div(n_places, stretch_of(n_places)); }

__device__ __forceinline__ int digit_of(int32_t id, int shift) { return id >> shift & (kDigits - 1); }

// One block a stretch. ids: in the order of the pass before.
__global__ void __launch_bounds__(kSortBlock)
    embedding_count_kernel(int32_t* counts, const int32_t* ids, int shift, int64_t n_places, int64_t stretch) {
    __shared__ int32_t count[kDigits];
    for (int d = threadIdx.x; d < kDigits; d += kSortBlock) count[d] = 0;
    __syncthreads();  // all are 0
    const int64_t first = blockIdx.x * stretch, end = min(first + stretch, n_places);
    for (int64_t k = first + threadIdx.x; k < end; k += kSortBlock) atomicAdd(&count[digit_of(ids[k], shift)], 1);
    __syncthreads();  // all places are counted
    for (int d = threadIdx.x; d < kDigits; d += kSortBlock) counts[blockIdx.x * kDigits + d] = count[d];
}

// counts[d] <- sum of counts[0 ... d - 1]. One warp, whose lanes have 8 neighbouring digits each.
__device__ __forceinline__ void scan_digits(int32_t* counts) {
    constexpr int share = kDigits / kWarp;
    const int lane = threadIdx.x % kWarp;
    int32_t own = 0;
    for (int d = lane * share; d < (lane + 1) * share; ++d) own += counts[d];
    int32_t before = own;
    // After the round of `distance` it covers the 2 distance lanes up to this one.
    for (int distance = 1; distance < kWarp; distance *= 2) {
        const int32_t other = __shfl_up_sync(kFullWarp, before, distance);
        if (lane >= distance) before += other;
    }
    before -= own;
    for (int d = lane * share; d < (lane + 1) * share; ++d) {
        const int32_t count = counts[d];
        counts[d] = before;
        before += count;
    }
}

// The lanes of `among`, one bit each, whose digit is this lane's. Every lane of the warp takes part.
__device__ __forceinline__ unsigned lanes_of_digit(int digit, unsigned among) {
    for (int bit = 0; bit < kDigitBits; ++bit) {
        const int has = digit >> bit & 1;
        const unsigned have = __ballot_sync(kFullWarp, has);
        among &= has ? have : ~have;
    }
    return among;
}

// One block a stretch. order: null in the first pass, where place k is the k-th. The atomics add up integers, and every
// position is written by one thread: the result is always the same.
__global__ void __launch_bounds__(kSortBlock)
    embedding_scatter_kernel(int32_t* sorted_ids, int32_t* sorted, const int32_t* counts, const int32_t* ids,
                             const int32_t* order, int shift, int64_t n_places, int64_t stretch) {
    // next[w][d]: first how many places of warp w have digit d, later the position of the next one of them.
    __shared__ int32_t next[kSortWarps][kDigits], totals[kDigits], in_front[kDigits];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t share = stretch / kSortWarps, first = blockIdx.x * stretch + warp * share,
                  end = min(first + share, n_places);
    for (int d = threadIdx.x; d < kDigits; d += kSortBlock) {
        int32_t total = 0, before = 0;
#pragma unroll 8
        for (unsigned b = 0; b < gridDim.x; ++b) {  // neighbouring threads, neighbouring counts
            const int32_t count = counts[b * kDigits + d];
            total += count;
            if (b < blockIdx.x) before += count;
        }
        totals[d] = total, in_front[d] = before;
        for (int w = 0; w < kSortWarps; ++w) next[w][d] = 0;
    }
    __syncthreads();  // totals are there, and all of next is 0
    if (warp == 0) scan_digits(totals);
    for (int64_t k = first + lane; k < end; k += kWarp) atomicAdd(&next[warp][digit_of(ids[k], shift)], 1);
    __syncthreads();  // all places are counted, totals are scanned
    for (int d = threadIdx.x; d < kDigits; d += kSortBlock) {
        int32_t position = totals[d] + in_front[d];
        for (int w = 0; w < kSortWarps; ++w) {
            const int32_t count = next[w][d];
            next[w][d] = position;
            position += count;
        }
    }
    __syncthreads();                                   // next has positions
    for (int64_t k0 = first; k0 < end; k0 += kWarp) {  // 32 neighbouring places in a round, a lane each
        const int64_t k = k0 + lane;
        const bool is_place = k < end;
        const int32_t id = is_place ? ids[k] : 0;
        const int digit = digit_of(id, shift);
        const unsigned same = lanes_of_digit(digit, __ballot_sync(kFullWarp, is_place));
        const int rank = __popc(same & ((1u << lane) - 1));
        const int32_t position = next[warp][digit] + rank;
        __syncwarp();  // all lanes have read next
        if (is_place && rank == 0) next[warp][digit] += __popc(same);
        __syncwarp();  // it is ready for the next round
        if (!is_place) continue;
        sorted_ids[position] = id;
        sorted[position] = order ? order[k] : static_cast<int32_t>(k);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Adding up. ids: sorted; a list is where neighbours are equal. Its places are those of `order` at the same positions.

// gradient += sum
template <int n, class G>
__device__ __forceinline__ void add_chunk(G* gradient, float (&sum)[n], int64_t n_left) {
    float before[n];
    load_chunk(before, gradient, n_left);
    for (int l = 0; l < n; ++l) sum[l] += before[l];
    store_chunk(gradient, sum, n_left);
}

// The first position of (below, end] at which holds() is true, which it is from there on; it is not asked about `end`.
// Every lane of the warp takes part: each asks about one of 32 positions, and the interval between two of them remains.
template <class Holds>
__device__ __forceinline__ int64_t first_position(int64_t below, int64_t end, Holds holds) {
    while (end - below > 1) {
        const int64_t step = (end - below + kWarp - 1) / kWarp,
                      position = below + (static_cast<int>(threadIdx.x % kWarp) + 1) * step;
        const int first = __ffs(static_cast<int>(__ballot_sync(kFullWarp, position >= end || holds(position)))) - 1;
        end = min(end, below + (first + 1) * step);
        below += first * step;
    }
    return end;
}
// The first position, from `begin` on, of the list that position k is in; the first position after it, up to `end`.
__device__ __forceinline__ int64_t first_of_list(const int32_t* ids, int64_t k, int64_t begin) {
    const int32_t id = ids[k];
    return first_position(begin - 1, k, [=](int64_t at) { return ids[at] == id; });
}
__device__ __forceinline__ int64_t end_of_list(const int32_t* ids, int64_t k, int64_t end) {
    const int32_t id = ids[k];
    return first_position(k, end, [=](int64_t at) { return ids[at] != id; });
}

// The first position, from `from` on, at which a piece begins; n_places if there is none. For a whole warp.
__device__ __forceinline__ int64_t first_piece(const int32_t* ids, int64_t from, int64_t n_places) {
    if (from >= n_places) return n_places;
    const int64_t list = first_of_list(ids, from, 0),
                  its_next = min(list + (from - list + kPiece - 1) / kPiece * kPiece, n_places);
    return its_next == from ? from : end_of_list(ids, from, its_next);
}

// The columns of a thread. Rows that are whole chunks need no test for their end, and loads without a branch between
// them are in flight together.
template <int n>
__device__ __forceinline__ int64_t first_column() {
    return (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
}
template <int n>
__device__ __forceinline__ int64_t columns_left(int64_t C, int64_t c) {
    return kOnCpu ? C - c : n;
}

// One block for kPiece positions, and the columns of its threads: the pieces that begin there. G: type of the gradient.
template <class T, class G, int n>
__global__ void __launch_bounds__(kBlock)
    embedding_backward_pieces_kernel(G* dtable, float* partial, const T* dout, const int32_t* ids, const int32_t* order,
                                     int64_t n_places, int64_t C, int64_t n_rows) {
    // Of the positions from one before this block's to one after the last piece. Beyond all places: no row.
    __shared__ int32_t id_at[2 * kPiece + 1], place_at[2 * kPiece + 1];
    __shared__ int32_t borders[2];
    const int64_t before = static_cast<int64_t>(blockIdx.x) * kPiece - 1;
    for (int j = threadIdx.x; j < 2 * kPiece + 1; j += blockDim.x) {
        const int64_t k = before + j;
        const bool is_place = k >= 0 && k < n_places;
        const int32_t id = is_place ? ids[k] : kNoId, place = is_place ? order[k] : 0;
        if (is_place && (id < -1 || id >= n_rows)) __trap();
        id_at[j] = id, place_at[j] = place;
    }
    for (unsigned i = threadIdx.x / kWarp; i < 2; i += blockDim.x / kWarp)  // a warp each
        borders[i] = static_cast<int32_t>(first_piece(ids, before + 1 + i * kPiece, n_places) - before);
    __syncthreads();  // ids, places and borders are there
    const int64_t c = first_column<n>(), n_left = columns_left<n>(C, c);
    if (c >= C) return;
    const int end = borders[1];
    int piece = borders[0];  // where the current one begins
    float sum[n] = {};
    for (int j0 = piece; j0 < end && id_at[j0] != -1; j0 += kAhead) {  // -1 is the last id
        float x[kAhead][n], row[kAhead][n];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const int j = min(j0 + a, end - 1);
            load_chunk(x[a], dout + place_at[j] * C + c, n_left);
            // Only the last place of a list needs the row. To ask costs more than the others' loads, from the cache.
            if (!kOnCpu || id_at[j + 1] != id_at[j]) load_chunk(row[a], dtable + max(id_at[j], 0) * C + c, n_left);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const int j = j0 + a;
            if (j >= end || id_at[j] == -1) break;
            for (int l = 0; l < n; ++l) sum[l] += x[a][l];
            const bool ends_list = id_at[j + 1] != id_at[j];
            if (!ends_list && j + 1 < piece + kPiece) continue;
            if (ends_list && id_at[piece - 1] != id_at[piece]) {  // the whole list
                for (int l = 0; l < n; ++l) row[a][l] += sum[l];
                store_chunk(dtable + id_at[j] * C + c, row[a], n_left);
            } else {
                store_chunk(partial + (2 * static_cast<int64_t>(blockIdx.x) + ends_list) * C + c, sum, n_left);
            }
            piece = j + 1;
            for (int l = 0; l < n; ++l) sum[l] = 0.0f;
        }
    }
}

// One block for kPiece positions, and the columns of its threads: the list of several pieces that begins there, if
// there is one. Then it reaches the next block's first position.
template <class G, int n>
__global__ void __launch_bounds__(kBlock)
    embedding_backward_long_lists_kernel(G* dtable, const float* partial, const int32_t* ids, int64_t n_places,
                                         int64_t C) {
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * kPiece, next = begin + kPiece;
    const int64_t c = first_column<n>(), n_left = columns_left<n>(C, c);
    if (next >= n_places || ids[next] == -1 || ids[next - 1] != ids[next]) return;
    if (begin > 0 && ids[begin - 1] == ids[next]) return;  // it begins in front of this block's positions
    const int64_t first = first_of_list(ids, next, begin), end = end_of_list(ids, next, n_places);
    const int64_t n_pieces = (end - first + kPiece - 1) / kPiece;
    if (n_pieces == 1 || c >= C) return;
    const float* from = partial + 2 * static_cast<int64_t>(blockIdx.x) * C + c;  // of the list's first piece
    float sum[n] = {}, x[n];
    for (int64_t p = 0; p < n_pieces; ++p, from += 2 * C) {
        load_chunk(x, p == n_pieces - 1 ? from + C : from, n_left);
        for (int l = 0; l < n; ++l) sum[l] += x[l];
    }
    add_chunk(dtable + ids[next] * C + c, sum, n_left);
}

__global__ void ids_from_kernel(int32_t* out, const int32_t* ids, int32_t first, int32_t n, int64_t n_ids) {
    const int64_t i = global_thread();
    if (i >= n_ids) return;
    const int32_t id = ids[i] - first;
    out[i] = id >= 0 && id < n ? id : -1;
}

// Without positions. One block a t.
template <class T, class G, int n>
__global__ void embedding_backward_wpe_kernel(G* dwpe, const T* dout, int64_t B, int64_t C) {
    const int64_t t = blockIdx.x, T_length = gridDim.x;
    for (int64_t c = threadIdx.x * n; c < C; c += blockDim.x * n) {
        const int64_t n_left = columns_left<n>(C, c);
        float sum[n] = {};
#pragma unroll 8  // 8 loads are in flight at a time; the additions keep their order
        for (int64_t b = 0; b < B; ++b) {
            float x[n];
            load_chunk(x, dout + (b * T_length + t) * C + c, n_left);
            for (int l = 0; l < n; ++l) sum[l] += x[l];
        }
        add_chunk(dwpe + t * C + c, sum, n_left);
    }
}

}  // namespace

// The bytes of n rows of a table. Of rows that ids choose, callers state the most that there can be.
static int64_t bytes_of_rows(const Tensor& table, int64_t n) {
    return table ? n * table.shape[1] * static_cast<int64_t>(dtype_bytes(table.dtype)) : 0;
}

void embedding_forward(Tensor out, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe, cudaStream_t stream) {
    const char* name = "embedding_forward";
    expect(name, "out", out, out.dtype, {-1, -1, -1});
    const int64_t B = out.shape[0], T_length = out.shape[1], C = out.shape[2];
    expect(name, "tokens", tokens, DType::i32, {B, T_length});
    if (positions) expect(name, "positions", positions, DType::i32, {B, T_length});
    expect(name, "wte", wte, out.dtype, {-1, C});
    if (wpe) {
        expect(name, "wpe", wpe, out.dtype, {-1, C});
        check(positions || wpe.shape[0] >= T_length, name, ": wpe has ", wpe.shape[0], " positions, but T is ",
              T_length);
    }
    expect_aligned(name, {{"out", out}, {"wte", wte}, {"wpe", wpe}});
    if (out.n() == 0) return;
    const unsigned n_places = static_cast<unsigned>(narrow(B * T_length, "embedding_forward: B T"));
    dispatch_chunks(out.dtype, C, [&](auto zero) {
        using Chunk = decltype(zero);
        using T = typename Chunk::Element;
        embedding_forward_kernel<T, Chunk::n><<<n_places, kBlock, 0, stream>>>(
            out.ptr<T>(), tokens.ptr<int32_t>(), positions ? positions.ptr<int32_t>() : nullptr, wte.ptr<T>(),
            wpe ? wpe.ptr<T>() : nullptr, T_length, C, wte.shape[0], wpe ? wpe.shape[0] : 0);
    });
    const int64_t position_rows = !wpe ? 0 : positions ? std::min(wpe.shape[0], B * T_length) : T_length;
    launched("embedding_forward_kernel",
             {.reads = bytes_of(tokens, positions) + bytes_of_rows(wte, std::min(wte.shape[0], B * T_length)) +
                       bytes_of_rows(wpe, position_rows),
              .writes = bytes_of(out),
              .flops = wpe ? static_cast<double>(out.n()) : 0.0});
}

static int64_t n_partial(int64_t n_places, int64_t C) { return 2 * ceil_div(n_places, kPiece) * C; }

int64_t embedding_backward_scratch_n(int64_t n_places, int64_t C) {
    // Partial sums; ids and places in two orders, from one to the other; counts
    return n_partial(n_places, C) + 4 * n_places + kDigits * n_stretches(n_places);
}

namespace {
struct SortedPlaces {
    const int32_t *ids, *order;
};
}  // namespace

// The places 0 ... n - 1 in ascending order of ids[place], which are below n_rows, or -1, all of whose digits are the
// largest; equal ids in ascending order of places. Another id outside of the table may be sorted to any place; the
// kernel that adds up stops there. memory: 4 n_places + kDigits n_stretches.
static SortedPlaces sort_places(Tensor ids, int64_t n_rows, int32_t* memory, cudaStream_t stream) {
    const int64_t n_places = ids.n(), stretch = stretch_of(n_places);
    const unsigned blocks = static_cast<unsigned>(n_stretches(n_places));
    int32_t* const counts = memory + 4 * n_places;
    const int id_bits = std::bit_width(static_cast<uint64_t>(n_rows));  // so many bits, all ones, are no row's id
    SortedPlaces from{ids.ptr<int32_t>(), nullptr};
    for (int shift = 0; shift == 0 || shift < id_bits; shift += kDigitBits) {
        const bool is_first = shift == 0;
        int32_t *const to_ids = memory + (shift / kDigitBits % 2) * 2 * n_places, *const to = to_ids + n_places;
        const int64_t counts_bytes = 4 * kDigits * int64_t{blocks}, n_bytes = 4 * n_places;
        embedding_count_kernel<<<blocks, kSortBlock, 0, stream>>>(counts, from.ids, shift, n_places, stretch);
        launched("embedding_count_kernel",
                 {.reads = n_bytes, .writes = counts_bytes, .scratch = counts_bytes + (is_first ? 0 : n_bytes)});
        embedding_scatter_kernel<<<blocks, kSortBlock, 0, stream>>>(to_ids, to, counts, from.ids, from.order, shift,
                                                                    n_places, stretch);
        launched("embedding_scatter_kernel", {.reads = counts_bytes + (is_first ? 1 : 2) * n_bytes,
                                              .writes = 2 * n_bytes,
                                              .scratch = counts_bytes + (is_first ? 2 : 4) * n_bytes});
        from = {to_ids, to};
    }
    return from;
}

// Adds dout to the rows of one table: row ids[i] gets dout[i].
template <class T, class G, int n>
static void add_by_lists(Tensor dtable, Tensor dout, Tensor ids, Tensor scratch, cudaStream_t stream) {
    const int64_t C = dout.shape[2], n_places = dout.shape[0] * dout.shape[1], n_rows = dtable.shape[0];
    int32_t* const memory = scratch.ptr<int32_t>();
    float* const partial = reinterpret_cast<float*>(memory);
    const SortedPlaces sorted = sort_places(ids, n_rows, memory + n_partial(n_places, C), stream);
    const int64_t x = std::min<int64_t>(kBlock, round_up(ceil_div(C, n), kWarp));  // whole warps
    const dim3 grid(static_cast<unsigned>(ceil_div(n_places, kPiece)), static_cast<unsigned>(ceil_div(C, x * n)));
    const unsigned block = static_cast<unsigned>(x);
    embedding_backward_pieces_kernel<T, G, n><<<grid, block, 0, stream>>>(
        dtable.ptr<G>(), partial, dout.ptr<T>(), sorted.ids, sorted.order, n_places, C, n_rows);
    // At the most: all places in rows of their own, or all in long lists.
    const int64_t rows = bytes_of_rows(dtable, std::min(n_rows, n_places)), partial_bytes = 4 * n_partial(n_places, C);
    launched("embedding_backward_pieces_kernel", {.reads = bytes_of(dout) + 8 * n_places + rows,
                                                  .writes = rows + partial_bytes,
                                                  .scratch = 8 * n_places + partial_bytes,
                                                  .flops = static_cast<double>(dout.n())});
    embedding_backward_long_lists_kernel<G, n>
        <<<grid, block, 0, stream>>>(dtable.ptr<G>(), partial, sorted.ids, n_places, C);
    const int64_t long_rows = bytes_of_rows(dtable, std::min(n_rows, n_places / (kPiece + 1)));
    launched("embedding_backward_long_lists_kernel", {.reads = 4 * n_places + partial_bytes + long_rows,
                                                      .writes = long_rows,
                                                      .scratch = 4 * n_places + partial_bytes,
                                                      .flops = static_cast<double>(n_partial(n_places, C))});
}

template <class T, class G, int n>
static void launch_embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions,
                                      Tensor scratch, cudaStream_t stream) {
    if (dwpe && positions) {
        add_by_lists<T, G, n>(dwpe, dout, positions, scratch, stream);
    } else if (dwpe) {
        embedding_backward_wpe_kernel<T, G, n><<<static_cast<unsigned>(dout.shape[1]), kBlock, 0, stream>>>(
            dwpe.ptr<G>(), dout.ptr<T>(), dout.shape[0], dout.shape[2]);
        const int64_t sums = bytes_of_rows(dwpe, dout.shape[1]);
        launched("embedding_backward_wpe_kernel",
                 {.reads = bytes_of(dout) + sums, .writes = sums, .flops = static_cast<double>(dout.n())});
    }
    add_by_lists<T, G, n>(dwte, dout, tokens, scratch, stream);
}

void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions, bool accumulate_wte,
                        bool accumulate_wpe, Tensor scratch, cudaStream_t stream) {
    const char* name = "embedding_backward";
    expect(name, "dout", dout, dout.dtype, {-1, -1, -1});
    const int64_t B = dout.shape[0], T_length = dout.shape[1], C = dout.shape[2];
    const DType gradient = dwte.dtype == DType::f32 ? DType::f32 : dout.dtype;
    expect(name, "dwte", dwte, gradient, {-1, C});
    if (dwpe) {
        expect(name, "dwpe", dwpe, gradient, {-1, C});
        check(dwpe.shape[0] >= T_length, name, ": dwpe has ", dwpe.shape[0], " positions, but T is ", T_length);
    }
    expect(name, "tokens", tokens, DType::i32, {B, T_length});
    if (positions) expect(name, "positions", positions, DType::i32, {B, T_length});
    expect_aligned(name, {{"dout", dout}, {"dwte", dwte}, {"dwpe", dwpe}});
    zero_unless(accumulate_wte, dwte, stream);
    zero_unless(accumulate_wpe, dwpe, stream);
    if (dout.n() == 0) return;
    // The sort stores places as 32-bit integers.
    narrow(B * T_length, "embedding_backward: B T");
    const int64_t scratch_n = embedding_backward_scratch_n(B * T_length, C);
    check(scratch && scratch.dtype == DType::i32 && scratch.n() >= scratch_n, name, ": scratch is ", scratch,
          ", expected i32 of at least ", scratch_n, " elements");
    expect_aligned(name, {{"scratch", scratch}});
    dispatch_chunks(dout.dtype, C, [&](auto zero) {
        using Chunk = decltype(zero);
        using T = typename Chunk::Element;
        if (dwte.dtype == DType::f32)
            launch_embedding_backward<T, float, Chunk::n>(dwte, dwpe, dout, tokens, positions, scratch, stream);
        else launch_embedding_backward<T, T, Chunk::n>(dwte, dwpe, dout, tokens, positions, scratch, stream);
    });
}

void ids_from(Tensor out, Tensor ids, int64_t first, int64_t n, cudaStream_t stream) {
    expect("ids_from", "ids", ids, DType::i32, {-1, -1});
    expect("ids_from", "out", out, DType::i32, {ids.shape[0], ids.shape[1]});
    if (ids.n() == 0) return;
    ids_from_kernel<<<static_cast<unsigned>(ceil_div(ids.n(), kBlock)), kBlock, 0, stream>>>(
        out.ptr<int32_t>(), ids.ptr<int32_t>(), narrow(first, "ids_from: first"), narrow(n, "ids_from: n"), ids.n());
    launched("ids_from_kernel", {.reads = bytes_of(ids), .writes = bytes_of(out)});
}
