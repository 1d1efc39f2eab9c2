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
// are then neighbours, in ascending order: a list. For each list and each few columns, one thread adds up the list from
// its first place to its last:
//
//     place i     0  1  2  3  4  5                  order (of places)     1  4 | 0  2  3 | 5
//     id          7  2  7  7  2  9                  their ids             2  2 | 7  7  7 | 9
//
// The sort is a radix sort: ids have 4-bit digits, and there is one pass for each digit, from the lowest to the
// highest. A pass moves places with a smaller digit before those with a larger one, and keeps the order of places with
// equal digits. A pass is three kernels, in which a thread owns a run of 32 neighbouring places:
//
//     count      how many places of each run have digit d            counts[d][run]
//     scan       counts become the first position of (d, run)        sums over all (d', run') in front of it
//     scatter    each run, from its first place on, puts its places at these positions
//
// The work is proportional to the number of places, whatever the ids are. A list is never split into partial sums,
// since that would change the order of additions. The columns of a long list are spread over many blocks, and its
// threads load rows in advance.
#include "layers/chunk.cuh"
#include "layers/layers.h"

#include <bit>

namespace {

constexpr int kBlock = 128;
constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits;
constexpr int kRun = 32;  // places that one thread counts and scatters
// One block scans all counts. Its barriers are expensive on the CPU device, where a warp is enough.
constexpr int kScanBlock = kOnCpu ? 32 : 1024;

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

// order: the places in the order that the previous passes gave them; null in the first pass, where place k is the k-th.
__device__ __forceinline__ int32_t place_at(const int32_t* order, int64_t k) {
    return order ? order[k] : static_cast<int32_t>(k);
}
__device__ __forceinline__ int digit_of(int32_t id, int shift) { return id >> shift & (kDigits - 1); }

// One thread a run.
__global__ void embedding_count_kernel(int32_t* counts, const int32_t* order, const int32_t* ids, int shift,
                                       int64_t n_places, int64_t n_runs) {
    const int64_t run = global_thread();
    if (run >= n_runs) return;
    int32_t count[kDigits] = {};
    for (int64_t k = run * kRun; k < min((run + 1) * kRun, n_places); ++k)
        ++count[digit_of(ids[place_at(order, k)], shift)];
    for (int d = 0; d < kDigits; ++d) counts[d * n_runs + run] = count[d];  // neighbouring threads, neighbouring counts
}

// counts[i] <- sum of counts[0 ... i - 1]. One block; a thread owns n / kScanBlock neighbouring counts.
__global__ void __launch_bounds__(kScanBlock) embedding_scan_kernel(int32_t* counts, int64_t n) {
    __shared__ int32_t sums[kScanBlock];
    const int64_t share = (n + kScanBlock - 1) / kScanBlock, first = threadIdx.x * share;
    int32_t own = 0;
    for (int64_t i = first; i < min(first + share, n); ++i) own += counts[i];
    sums[threadIdx.x] = own;
    // After the round of `distance` sums[x] covers the 2 distance threads up to x.
    for (unsigned distance = 1; distance < kScanBlock; distance *= 2) {
        __syncthreads();  // all sums of the round before are written
        const int32_t other = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
        __syncthreads();  // all are read
        sums[threadIdx.x] += other;
    }
    int32_t before = sums[threadIdx.x] - own;
    for (int64_t i = first; i < min(first + share, n); ++i) {
        const int32_t count = counts[i];
        counts[i] = before;
        before += count;
    }
}

// One thread a run. Integers only, and every position is written by one thread: the result is always the same.
__global__ void embedding_scatter_kernel(int32_t* sorted, const int32_t* firsts, const int32_t* order,
                                         const int32_t* ids, int shift, int64_t n_places, int64_t n_runs) {
    const int64_t run = global_thread();
    if (run >= n_runs) return;
    int32_t next[kDigits];
    for (int d = 0; d < kDigits; ++d) next[d] = firsts[d * n_runs + run];
    for (int64_t k = run * kRun; k < min((run + 1) * kRun, n_places); ++k) {
        const int32_t place = place_at(order, k);
        sorted[next[digit_of(ids[place], shift)]++] = place;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Adding up

// gradient += sum
template <int n, class G>
__device__ __forceinline__ void add_chunk(G* gradient, float (&sum)[n], int64_t n_left) {
    float before[n];
    load_chunk(before, gradient, n_left);
    for (int l = 0; l < n; ++l) sum[l] += before[l];
    store_chunk(gradient, sum, n_left);
}

// The first position after the list that begins at `first`. Most lists are short, so it looks 1, 2, 4, ... positions
// ahead, and then bisects the last interval.
__device__ __forceinline__ int64_t end_of_list(const int32_t* order, const int32_t* ids, int64_t first,
                                               int64_t n_places) {
    const int32_t id = ids[order[first]];
    int64_t inside = first, step = 1;
    for (; inside + step < n_places && ids[order[inside + step]] == id; step *= 2) inside += step;
    int64_t outside = min(inside + step, n_places);  // a position after the list
    while (outside - inside > 1) {
        const int64_t middle = (inside + outside) / 2;
        (ids[order[middle]] == id ? inside : outside) = middle;
    }
    return outside;
}

// One thread for each position of `order` and n columns; only the threads of a list's first position have work: they
// add up the whole list. G: type of the gradient.
template <class T, class G, int n>
__global__ void embedding_backward_lists_kernel(G* dtable, const T* dout, const int32_t* ids, const int32_t* order,
                                                int64_t n_places, int64_t C, int64_t n_rows) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int64_t c = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
    if (first >= n_places || c >= C) return;
    const int64_t id = ids[order[first]];
    if (first > 0 && ids[order[first - 1]] == id) return;
    if (id == -1) return;
    if (id < 0 || id >= n_rows) __trap();
    const int64_t end = end_of_list(order, ids, first, n_places);
    float sum[n] = {};
#pragma unroll 16  // 16 loads are in flight at a time; the additions keep their order
    for (int64_t k = first; k < end; ++k) {
        float x[n];
        load_chunk(x, dout + order[k] * C + c, C - c);
        for (int l = 0; l < n; ++l) sum[l] += x[l];
    }
    add_chunk(dtable + id * C + c, sum, C - c);
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
        float sum[n] = {}, x[n];
        for (int64_t b = 0; b < B; ++b) {
            load_chunk(x, dout + (b * T_length + t) * C + c, C - c);
            for (int l = 0; l < n; ++l) sum[l] += x[l];
        }
        add_chunk(dwpe + t * C + c, sum, C - c);
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

int64_t embedding_backward_scratch_n(int64_t n_places) {
    return 2 * n_places + kDigits * ceil_div(n_places, kRun);  // two orders, from one to the other; counts
}

// The places 0 ... n - 1 in ascending order of ids[place], which are below n_rows, or -1, all of whose digits are the
// largest; equal ids in ascending order of places. Another id outside of the table may be sorted to any place, but it
// always begins a list, and the kernel that adds up stops there.
static const int32_t* sort_places(Tensor ids, int64_t n_rows, Tensor scratch, cudaStream_t stream) {
    const int64_t n_places = ids.n(), n_runs = ceil_div(n_places, kRun);
    int32_t* const orders[2] = {scratch.ptr<int32_t>(), scratch.ptr<int32_t>() + n_places};
    int32_t* const counts = scratch.ptr<int32_t>() + 2 * n_places;
    const unsigned blocks = static_cast<unsigned>(ceil_div(n_runs, kBlock));
    const int id_bits = std::bit_width(static_cast<uint64_t>(n_rows));  // so many bits, all ones, are no row's id
    const int32_t* order = nullptr;
    for (int pass = 0; pass == 0 || pass * kDigitBits < id_bits; ++pass) {
        int32_t* const sorted = orders[pass % 2];
        const int shift = pass * kDigitBits;
        const int64_t counts_bytes = 4 * kDigits * n_runs, order_bytes = 4 * n_places,
                      read_order = order ? order_bytes : 0;
        embedding_count_kernel<<<blocks, kBlock, 0, stream>>>(counts, order, ids.ptr<int32_t>(), shift, n_places,
                                                              n_runs);
        launched("embedding_count_kernel",
                 {.reads = bytes_of(ids) + read_order, .writes = counts_bytes, .scratch = counts_bytes + read_order});
        embedding_scan_kernel<<<1, kScanBlock, 0, stream>>>(counts, kDigits * n_runs);
        launched("embedding_scan_kernel", {.reads = counts_bytes, .writes = counts_bytes, .scratch = 2 * counts_bytes});
        embedding_scatter_kernel<<<blocks, kBlock, 0, stream>>>(sorted, counts, order, ids.ptr<int32_t>(), shift,
                                                                n_places, n_runs);
        launched("embedding_scatter_kernel", {.reads = bytes_of(ids) + counts_bytes + read_order,
                                              .writes = order_bytes,
                                              .scratch = counts_bytes + read_order + order_bytes});
        order = sorted;
    }
    return order;
}

// Adds dout to the rows of one table: row ids[i] gets dout[i].
template <class T, class G, int n>
static void add_by_lists(Tensor dtable, Tensor dout, Tensor ids, Tensor scratch, cudaStream_t stream) {
    const int64_t C = dout.shape[2], n_places = dout.shape[0] * dout.shape[1];
    const int32_t* order = sort_places(ids, dtable.shape[0], scratch, stream);
    // At most a warp of columns in a block, so that the list of a frequent token is spread over many blocks.
    const int64_t x = std::min<int64_t>(kWarp, ceil_div(C, n)), y = 2 * kBlock / x;
    const dim3 grid(static_cast<unsigned>(ceil_div(n_places, y)), static_cast<unsigned>(ceil_div(C, x * n))),
        block(static_cast<unsigned>(x), static_cast<unsigned>(y));
    embedding_backward_lists_kernel<T, G, n><<<grid, block, 0, stream>>>(
        dtable.ptr<G>(), dout.ptr<T>(), ids.ptr<int32_t>(), order, n_places, C, dtable.shape[0]);
    const int64_t sums = bytes_of_rows(dtable, std::min(dtable.shape[0], n_places));
    launched("embedding_backward_lists_kernel", {.reads = bytes_of(dout, ids) + 4 * n_places + sums,
                                                 .writes = sums,
                                                 .scratch = 4 * n_places,
                                                 .flops = static_cast<double>(dout.n())});
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
    check(scratch && scratch.dtype == DType::i32 && scratch.n() >= embedding_backward_scratch_n(B * T_length), name,
          ": scratch is ", scratch, ", expected i32 of at least ", embedding_backward_scratch_n(B * T_length),
          " elements");
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
