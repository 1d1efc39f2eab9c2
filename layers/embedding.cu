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
// The sort is one kernel, without messages between its blocks. Each block has some ids of its own, neighbours, and
// reads the ids of all places, from the L2 cache, twice. The first time it counts how many places have smaller ids:
// that is where its own begin; and how many each of its warps finds of each of its ids, in that warp's share of the
// places. So each of these lists of a share knows its positions, and the second time each place goes to its own:
//
//     position of a place = places with a smaller id                             of other blocks, and of this one
//                         + those with its id in the shares of the warps in front
//                         + those in front in its warp's own share
//
// As plain loops, with one block of one warp:
//
//     for v:  next[v] = how many places have an id < v
//     for i:  sorted[next[id(i)]++] = i
//
// A few ids are very frequent, as some words are, and one thread for a whole list would still add when all others have
// long ended. So a list is cut into pieces of 128 places, counted from its own beginning, and the last piece is what
// remains. A piece is added up from its first place to its last. A list of one piece is added to its row of dtable at
// once. A list of several leaves a partial sum, a row of float32, for each of them; the last block that has one of
// these pieces adds them up, in order, and adds the result to dtable:
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
// Block w has the pieces that begin at the positions [128 w, 128 (w + 1)) of the order: no more than 255 places,
// whatever the ids are. Of the pieces of long lists at most one that is followed by another piece of its list begins
// there (it has 128 places), and at most one that is the last of its list (128 places of that list are in front of it).
// These two are the block's two rows of partial sums. And no more than one list of several pieces can begin there,
// whose pieces are counted in the block's counter: the last block that has one adds them up.
//
// The order of all additions follows from the places of a list alone. So a row has the same bits on every run, and
// beside whatever other ids: a rank that has a part of the vocabulary gives its rows the bits that the whole gives
// them.
#include "layers/chunk.cuh"
#include "layers/layers.h"

#include <algorithm>
#include <climits>

namespace {

constexpr int kBlock = 128;
// Threads of the sort, and lanes of each of its warps; the most ids that a block has. On the CPU device votes are
// expensive, and one thread is as good as many.
constexpr int kSortBlock = kOnCpu ? 1 : 512, kSortLanes = kOnCpu ? 1 : kWarp, kSortWarps = kSortBlock / kSortLanes;
constexpr int kIdBits = kOnCpu ? 14 : 9, kBlockIds = 1 << kIdBits;
constexpr int64_t kSortBlocks = kOnCpu ? 1 : 128;  // this many share the ids of a small table
constexpr int kPiece = 128;                        // places of a list that are added up as one
constexpr int32_t kNoId = -2;                      // of no place
constexpr int kAhead = kOnCpu ? 1 : 4;             // places whose rows a thread loads at a time

// One block per place. wpe and positions may be null. A token of -1 has no row.
template <class T, int n>
__global__ void embedding_forward_kernel(T* out, const int32_t* tokens, const int32_t* positions, const T* wte,
                                         const T* wpe, int64_t T_length, int64_t C, int64_t n_rows,
                                         int64_t n_positions) {
    const int64_t i = blockIdx.x, token = tokens[i];
    const int64_t p = positions ? positions[i] : wpe ? i % T_length : 0;  // a division takes as long as many copies
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

// The lanes of the warp for which it is true, one bit each.
__device__ __forceinline__ unsigned vote(bool is_true) {
    if constexpr (kSortLanes == 1) return is_true;
    else return __ballot_sync(kFullWarp, is_true);
}
// The lanes of `among` whose id is this lane's, below kBlockIds. Every lane of the warp takes part.
__device__ __forceinline__ unsigned lanes_of_id(int id, unsigned among) {
    for (int bit = 0; bit < kIdBits && kSortLanes > 1; ++bit) {
        const int has = id >> bit & 1;
        const unsigned have = vote(has);
        among &= has ? have : ~have;
    }
    return among;
}

// The sum of the numbers of all threads in front of this one; `sums` is shared memory. Every thread takes part.
__device__ __forceinline__ int sum_before(int own, int (&sums)[kSortWarps]) {
    if (kSortBlock == 1) return 0;
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    int sum = own;
    // After the round of `distance` it covers the 2 distance lanes up to this one.
    for (int distance = 1; distance < kWarp; distance *= 2) {
        const int other = __shfl_up_sync(kFullWarp, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == kWarp - 1) sums[warp] = sum;
    __syncthreads();  // every warp's sum is there
    for (int w = 0; w < warp; ++w) sum += sums[w];
    return sum - own;
}

// Block b has the ids from b block_ids on. An id of no row, -1 or a wrong one, counts as n_rows, behind all
// others. The atomics add up integers, and every position is written by one thread: the result is always the same.
__global__ void __launch_bounds__(kSortBlock)
    embedding_sort_kernel(int32_t* sorted_ids, int32_t* sorted, const int32_t* ids, int64_t n_places, int n_rows,
                          int block_ids) {
    // next[w][i]: first how many places of warp w have the block's id i, later the position of the next one of them.
    __shared__ int next[kSortWarps][kBlockIds], sums[kSortWarps], n_smaller;
    const int warp = static_cast<int>(threadIdx.x) / kSortLanes, lane = static_cast<int>(threadIdx.x) % kSortLanes,
              first_id = static_cast<int>(blockIdx.x) * block_ids;
    const int64_t share = (n_places + kSortBlock - 1) / kSortBlock * kSortLanes, first = warp * share,
                  end = min(first + share, n_places);
    const auto own_id = [=](int32_t id) { return (id >= 0 && id < n_rows ? id : n_rows) - first_id; };
    for (int i = threadIdx.x; i < kSortWarps * block_ids; i += kSortBlock) next[i / block_ids][i % block_ids] = 0;
    if (threadIdx.x == 0) n_smaller = 0;
    __syncthreads();  // all are 0
    int smaller = 0;
#pragma unroll 8
    for (int64_t k = first + lane; k < end; k += kSortLanes) {
        const int id = own_id(ids[k]);
        smaller += id < 0;
        if (id >= 0 && id < block_ids) atomicAdd(&next[warp][id], 1);
    }
    atomicAdd(&n_smaller, smaller);
    __syncthreads();  // all places are counted
    // The positions of an id's places, warp after warp; a thread has some neighbouring ids.
    const int thread_ids = (block_ids + kSortBlock - 1) / kSortBlock,
              begin = min(static_cast<int>(threadIdx.x) * thread_ids, block_ids),
              its_end = min(begin + thread_ids, block_ids);
    int own = 0;
    for (int i = begin; i < its_end; ++i)
        for (int w = 0; w < kSortWarps; ++w) own += next[w][i];
    int position = n_smaller + sum_before(own, sums);
    for (int i = begin; i < its_end; ++i)
        for (int w = 0; w < kSortWarps; ++w) {
            const int count = next[w][i];
            next[w][i] = position;
            position += count;
        }
    __syncthreads();  // next has positions
    // In a round 32 neighbouring places, a lane each.
    for (int64_t k0 = first; k0 < end; k0 += kSortLanes) {
        const int64_t k = k0 + lane;
        const int32_t id = k < end ? ids[k] : 0;
        const int its_id = k < end ? own_id(id) : -1;
        const bool is_own = its_id >= 0 && its_id < block_ids;
        const unsigned owners = vote(is_own);
        if (owners == 0) continue;
        const unsigned same = lanes_of_id(its_id, owners);
        const int rank = __popc(same & ((1u << lane) - 1)), at = is_own ? next[warp][its_id] + rank : 0;
        if (kSortLanes > 1) __syncwarp();  // all lanes have read next
        if (is_own && rank == 0) next[warp][its_id] += __popc(same);
        if (kSortLanes > 1) __syncwarp();  // it is ready for the next round
        if (!is_own) continue;
        sorted_ids[at] = id;
        sorted[at] = static_cast<int32_t>(k);
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

// A list of several pieces, of which a block has one; n_pieces is 0 if it has none.
struct LongList {
    int64_t first;  // position
    int n_pieces, id;
};
// That of the piece that begins at position k. For a whole warp.
__device__ __forceinline__ LongList long_list_at(const int32_t* ids, int64_t k, int64_t n_places) {
    const int64_t first = first_of_list(ids, k, 0), end = end_of_list(ids, k, n_places);
    return {first, static_cast<int>((end - first + kPiece - 1) / kPiece), ids[k]};
}

// One block for kPiece positions, and the columns of its threads: the pieces that begin there. G: type of the gradient.
template <class T, class G, int n>
__device__ __forceinline__ void add_pieces(G* dtable, float* partial, unsigned* arrivals, const T* dout,
                                           const int32_t* ids, const int32_t* order, int64_t n_places, int64_t C,
                                           int64_t n_rows) {
    // Of the positions from one before this block's to one after the last piece. Beyond all places: no row.
    __shared__ int32_t id_at[2 * kPiece + 1], place_at[2 * kPiece + 1];
    __shared__ int32_t borders[2];
    __shared__ LongList long_lists[2];  // of a last piece, of a piece that another one follows
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
    const int first = borders[0], end = borders[1];
    if (first >= end || id_at[first] == -1) return;  // -1 is the last id
    int piece = first;                               // where the current one begins
    float sum[n] = {};
    for (int j0 = piece; c < C && j0 < end && id_at[j0] != -1; j0 += kAhead) {
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

    // The block's last piece is the one that another one of its list may follow; and its first piece is the one that
    // may be the last of a list with others in front, if it is not the same.
    const bool is_followed = id_at[end - 1] != -1 && id_at[end - 1] == id_at[end],
               is_last = id_at[first - 1] == id_at[first] && !(is_followed && id_at[first] == id_at[end - 1]);
    if (!is_followed && !is_last) return;
    for (unsigned i = threadIdx.x / kWarp; i < 2; i += blockDim.x / kWarp) {
        const LongList list = long_list_at(ids, before + (i == 0 ? first : end - 1), n_places);
        if (threadIdx.x % kWarp == 0) long_lists[i] = list;
    }
    __syncthreads();  // the lists are there
    for (int i = is_last ? 0 : 1; i < (is_followed ? 2 : 1); ++i) {
        const LongList list = long_lists[i];
        const int64_t its_block = list.first / kPiece;
        if (!is_last_block(&arrivals[its_block * gridDim.y + blockIdx.y], static_cast<unsigned>(list.n_pieces)) ||
            c >= C)
            continue;
        const float* from = partial + 2 * its_block * C + c;
        float total[n] = {}, x[n];
        for (int p = 0; p < list.n_pieces; ++p, from += 2 * C) {
            load_chunk(x, p == list.n_pieces - 1 ? from + C : from, n_left);
            for (int l = 0; l < n; ++l) total[l] += x[l];
        }
        add_chunk(dtable + list.id * C + c, total, n_left);
    }
}

// The rows of positions 0 ... T - 1 of a table, and with zeros the others, where they are written.
template <class G>
struct PositionRows {
    G* dtable;
    int64_t B, T;
    bool accumulate;
};
template <class T, class G, int n>
__device__ __forceinline__ void add_position(const PositionRows<G>& to, const T* dout, int64_t t, int64_t C) {
    const int64_t c = first_column<n>(), n_left = columns_left<n>(C, c);
    if (c >= C) return;
    float sum[n] = {};
#pragma unroll 8  // 8 loads are in flight at a time; the additions keep their order
    for (int64_t b = 0; t < to.T && b < to.B; ++b) {
        float x[n];
        load_chunk(x, dout + (b * to.T + t) * C + c, n_left);
        for (int l = 0; l < n; ++l) sum[l] += x[l];
    }
    if (to.accumulate) add_chunk(to.dtable + t * C + c, sum, n_left);
    else store_chunk(to.dtable + t * C + c, sum, n_left);
}

// The first n_piece_blocks blocks have pieces; the others a position each.
template <class T, class G, int n>
__global__ void __launch_bounds__(kBlock)
    embedding_backward_kernel(G* dtable, float* partial, unsigned* arrivals, const T* dout, const int32_t* ids,
                              const int32_t* order, int64_t n_places, int64_t C, int64_t n_rows,
                              PositionRows<G> positions, unsigned n_piece_blocks) {
    if (blockIdx.x < n_piece_blocks)
        add_pieces<T, G, n>(dtable, partial, arrivals, dout, ids, order, n_places, C, n_rows);
    else add_position<T, G, n>(positions, dout, blockIdx.x - n_piece_blocks, C);
}

__global__ void ids_from_kernel(int32_t* out, const int32_t* ids, int32_t first, int32_t n, int64_t n_ids) {
    const int64_t i = global_thread();
    if (i >= n_ids) return;
    const int32_t id = ids[i] - first;
    out[i] = id >= 0 && id < n ? id : -1;
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
        const auto threads = static_cast<unsigned>(std::min<int64_t>(kBlock, ceil_div(C, Chunk::n)));
        embedding_forward_kernel<T, Chunk::n><<<n_places, threads, 0, stream>>>(
            out.ptr<T>(), tokens.ptr<int32_t>(), positions.ptr_or_null<int32_t>(), wte.ptr<T>(), wpe.ptr_or_null<T>(),
            T_length, C, wte.shape[0], wpe ? wpe.shape[0] : 0);
    });
    const int64_t position_rows = !wpe ? 0 : positions ? std::min(wpe.shape[0], B * T_length) : T_length;
    launched("embedding_forward_kernel",
             {.reads = bytes_of(tokens, positions) + bytes_of_rows(wte, std::min(wte.shape[0], B * T_length)) +
                       bytes_of_rows(wpe, position_rows),
              .writes = bytes_of(out),
              .flops = wpe ? static_cast<double>(out.n()) : 0.0});
}

static int64_t n_partial(int64_t n_places, int64_t C) { return 2 * ceil_div(n_places, kPiece) * C; }

// The threads of a block, whole warps, and the blocks that share a row of C columns in chunks of n.
struct RowBlocks {
    int64_t threads, count;
};
static RowBlocks row_blocks(int64_t C, int n) {
    const int64_t threads = std::min<int64_t>(kBlock, round_up(ceil_div(C, n), kWarp));
    return {threads, ceil_div(C, threads * n)};
}

int64_t embedding_backward_scratch_n(DType dtype, int64_t n_places, int64_t C) {
    dispatch_chunks(dtype, C, [&](auto chunk) {  // each block has a counter
        static_assert(kArrivals * kPiece <= INT_MAX, "the sort stores places as 32-bit integers");
        check(
            ceil_div(n_places, kPiece) * row_blocks(C, decltype(chunk)::n).count <= kArrivals, "a micro-batch of ",
            n_places, " tokens of ", C,
            " channels is too large for the gradient of the embedding: use a smaller --micro-batch or a shorter --seq");
    });
    return n_partial(n_places, C) + 2 * n_places;  // partial sums; sorted ids, and their places
}

namespace {
struct SortedPlaces {
    const int32_t *ids, *order;
};
}  // namespace

// The places 0 ... n - 1 in ascending order of ids[place], which are below n_rows, or -1, which comes last; equal ids
// in ascending order of places. The kernel that adds up stops at another id. memory: 2 n_places.
static SortedPlaces sort_places(Tensor ids, int64_t n_rows, int32_t* memory, cudaStream_t stream) {
    const int64_t n_places = ids.n(), n_ids = n_rows + 1,
                  block_ids = std::clamp<int64_t>(ceil_div(n_ids, kSortBlocks), 1, kBlockIds);
    int32_t *const sorted_ids = memory, *const order = memory + n_places;
    embedding_sort_kernel<<<static_cast<unsigned>(ceil_div(n_ids, block_ids)), kSortBlock, 0, stream>>>(
        sorted_ids, order, ids.ptr<int32_t>(), n_places, narrow(n_rows, "embedding: rows"),
        static_cast<int>(block_ids));
    launched("embedding_sort_kernel", {.reads = 4 * n_places, .writes = 8 * n_places, .scratch = 8 * n_places});
    return {sorted_ids, order};
}

// Adds dout to the rows of one table: row ids[i] gets dout[i]. And to the table of positions, where it has blocks.
template <class T, class G, int n>
static void add_by_lists(Tensor dtable, Tensor dout, Tensor ids, Tensor dwpe, bool accumulate_wpe, Tensor scratch,
                         cudaStream_t stream) {
    const int64_t B = dout.shape[0], T_length = dout.shape[1], C = dout.shape[2], n_places = B * T_length,
                  n_rows = dtable.shape[0];
    int32_t* const memory = scratch.ptr<int32_t>();
    float* const partial = reinterpret_cast<float*>(memory);
    const SortedPlaces sorted = sort_places(ids, n_rows, memory + n_partial(n_places, C), stream);
    const auto [x, y] = row_blocks(C, n);
    const int64_t piece_blocks = ceil_div(n_places, kPiece);
    const int64_t positions = !dwpe ? 0 : accumulate_wpe ? T_length : dwpe.shape[0];
    const dim3 grid(static_cast<unsigned>(piece_blocks + positions), static_cast<unsigned>(y));
    embedding_backward_kernel<T, G, n><<<grid, static_cast<unsigned>(x), 0, stream>>>(
        dtable.ptr<G>(), partial, device().arrivals, dout.ptr<T>(), sorted.ids, sorted.order, n_places, C, n_rows,
        PositionRows<G>{dwpe.ptr_or_null<G>(), B, T_length, accumulate_wpe}, static_cast<unsigned>(piece_blocks));
    // At the most: all places in rows of their own, or all in long lists, with a counter each.
    const int64_t rows = bytes_of_rows(dtable, std::min(n_rows, n_places)), partial_bytes = 4 * n_partial(n_places, C),
                  counters = n_places / (kPiece + 1) * y * static_cast<int64_t>(sizeof(unsigned)),
                  position_rows = bytes_of_rows(dwpe, positions);
    launched("embedding_backward_kernel",
             {.reads = bytes_of(dout) + 8 * n_places + rows + partial_bytes + counters +
                       (accumulate_wpe ? position_rows : 0),
              .writes = rows + partial_bytes + counters + position_rows,
              .scratch = 8 * n_places + 2 * partial_bytes,
              .flops = static_cast<double>((dwpe ? 2 : 1) * dout.n() + n_partial(n_places, C))});
}

template <class T, class G, int n>
static void launch_embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions,
                                      bool accumulate_wpe, Tensor scratch, cudaStream_t stream) {
    if (dwpe && positions) add_by_lists<T, G, n>(dwpe, dout, positions, {}, false, scratch, stream);
    add_by_lists<T, G, n>(dwte, dout, tokens, positions ? Tensor{} : dwpe, accumulate_wpe, scratch, stream);
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
    if (positions || dout.n() == 0) zero_unless(accumulate_wpe, dwpe, stream);
    if (dout.n() == 0) return;
    const int64_t scratch_n = embedding_backward_scratch_n(dout.dtype, B * T_length, C);
    check(scratch && scratch.dtype == DType::i32 && scratch.n() >= scratch_n, name, ": scratch is ", scratch,
          ", expected i32 of at least ", scratch_n, " elements");
    expect_aligned(name, {{"scratch", scratch}});
    dispatch_chunks(dout.dtype, C, [&](auto zero) {
        using Chunk = decltype(zero);
        using T = typename Chunk::Element;
        if (dwte.dtype == DType::f32)
            launch_embedding_backward<T, float, Chunk::n>(dwte, dwpe, dout, tokens, positions, accumulate_wpe, scratch,
                                                          stream);
        else
            launch_embedding_backward<T, T, Chunk::n>(dwte, dwpe, dout, tokens, positions, accumulate_wpe, scratch,
                                                      stream);
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
