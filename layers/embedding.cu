// Embedding: a token's row of one table, plus its position's row of another.
//
//   forward     out[i,:] = wte[tokens[i],:] + wpe[positions[i],:]       i = (b,t); positions[i] = t if there are none
//
//   backward    dwte[v,:] += sum of dout[i,:] over the places i with tokens[i] == v
//               dwpe[p,:] += sum of dout[i,:] over the places i with positions[i] == p
//
// The gather is easy; its gradient is a scatter in which many places meet in one row of dwte. Atomic adds would give other
// bits on every run. Instead the places of each token are first linked into a list, in ascending order:
//
//     place i     0     1     2     3     4     5
//     token       7     2     7     7     2     9
//     next        2     4     3    -1    -1    -1       links[0]
//     previous   -1    -1     0     2     1    -1       links[1]: -1 marks the first, whose block sums the whole list
//
// Every element of links is written by one thread only, and every row of dwte is added to by one block only. Positions that
// begin anew with every document make lists in the same way; without documents row t of dwpe is a plain sum over b.
//
// Limits: the search for the next place takes B T steps for a token that does not occur again, and the list of a very
// frequent token is walked by one block. Both hide behind the matrix products up to about 100,000 tokens a batch.
#include "layers/chunk.cuh"
#include "layers/layers.h"

namespace {

constexpr int kBlock = 128;

// One block a place. wpe and positions may be null.
template <class T, int n>
__global__ void embedding_forward_kernel(T* out, const int32_t* tokens, const int32_t* positions, const T* wte,
                                         const T* wpe, int64_t T_length, int64_t C, int64_t n_rows,
                                         int64_t n_positions) {
    const int64_t i = blockIdx.x, token = tokens[i], p = positions ? positions[i] : i % T_length;
    if (token < 0 || token >= n_rows || p < 0 || (wpe && p >= n_positions)) __trap();
    for (int64_t c = threadIdx.x * n; c < C; c += blockDim.x * n) {
        float x[n], position[n];
        load_chunk(x, wte + token * C + c, C - c);
        if (wpe) {
            load_chunk(position, wpe + p * C + c, C - c);
            for (int l = 0; l < n; ++l) x[l] += position[l];
        }
        store_chunk(out + i * C + c, x, C - c);
    }
}

// One thread a place looks ahead for the same id: token, or position. `previous` comes filled with -1; place j's previous is
// written by the thread of that previous place.
__global__ void embedding_link_kernel(int32_t* next, int32_t* previous, const int32_t* ids, int64_t n_places) {
    const int64_t i = global_thread();
    if (i >= n_places) return;
    const int32_t id = ids[i];
    int64_t j = i + 1;
    while (j < n_places && ids[j] != id) ++j;
    next[i] = j < n_places ? static_cast<int32_t>(j) : -1;
    if (j < n_places) previous[j] = static_cast<int32_t>(i);
}

// gradient += sum
template <int n, class G>
__device__ __forceinline__ void add_chunk(G* gradient, float (&sum)[n], int64_t n_left) {
    float before[n];
    load_chunk(before, gradient, n_left);
    for (int l = 0; l < n; ++l) sum[l] += before[l];
    store_chunk(gradient, sum, n_left);
}

// One block a place; only the first place of each id works, and walks through all of them. G: type of the gradient.
template <class T, class G, int n>
__global__ void embedding_backward_lists_kernel(G* dtable, const T* dout, const int32_t* ids, const int32_t* next,
                                                const int32_t* previous, int64_t C, int64_t n_rows) {
    const int64_t first = blockIdx.x, id = ids[first];
    if (previous[first] >= 0) return;
    if (id < 0 || id >= n_rows) __trap();
    for (int64_t c = threadIdx.x * n; c < C; c += blockDim.x * n) {
        float sum[n] = {}, x[n];
        for (int64_t i = first; i >= 0;) {
            const int64_t after = next[i];  // asked for before the row: the two loads run side by side
            load_chunk(x, dout + i * C + c, C - c);
            for (int l = 0; l < n; ++l) sum[l] += x[l];
            i = after;
        }
        add_chunk(dtable + id * C + c, sum, C - c);
    }
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

void embedding_forward(Tensor out, Tensor tokens, Tensor positions, Tensor wte, Tensor wpe, cudaStream_t stream) {
    const char* name = "embedding_forward";
    expect(name, "out", out, out.dtype, {-1, -1, -1});
    const int64_t B = out.shape[0], T_length = out.shape[1], C = out.shape[2];
    expect(name, "tokens", tokens, DType::i32, {B, T_length});
    if (positions) expect(name, "positions", positions, DType::i32, {B, T_length});
    expect(name, "wte", wte, out.dtype, {-1, C});
    if (wpe) {
        expect(name, "wpe", wpe, out.dtype, {-1, C});
        check(wpe.shape[0] >= T_length, name, ": wpe has ", wpe.shape[0], " positions, but T is ", T_length);
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
    cudaCheckLaunch();
}

// Adds dout to the rows of one table: row ids[i] gets dout[i].
template <class T, class G, int n>
static void add_by_lists(Tensor dtable, Tensor dout, Tensor ids, Tensor links, cudaStream_t stream) {
    const int64_t C = dout.shape[2], n_places = dout.shape[0] * dout.shape[1];
    int32_t *next = links.ptr<int32_t>(), *previous = next + n_places;
    cudaCheck(cudaMemsetAsync(previous, 0xff, static_cast<size_t>(n_places) * sizeof(int32_t), stream));  // -1
    embedding_link_kernel<<<static_cast<unsigned>(ceil_div(n_places, kBlock)), kBlock, 0, stream>>>(
        next, previous, ids.ptr<int32_t>(), n_places);
    cudaCheckLaunch();
    embedding_backward_lists_kernel<T, G, n><<<static_cast<unsigned>(n_places), kBlock, 0, stream>>>(
        dtable.ptr<G>(), dout.ptr<T>(), ids.ptr<int32_t>(), next, previous, C, dtable.shape[0]);
    cudaCheckLaunch();
}

template <class T, class G, int n>
static void launch_embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions,
                                      Tensor links, cudaStream_t stream) {
    if (dwpe && positions) {
        add_by_lists<T, G, n>(dwpe, dout, positions, links, stream);
    } else if (dwpe) {
        embedding_backward_wpe_kernel<T, G, n><<<static_cast<unsigned>(dout.shape[1]), kBlock, 0, stream>>>(
            dwpe.ptr<G>(), dout.ptr<T>(), dout.shape[0], dout.shape[2]);
        cudaCheckLaunch();
    }
    add_by_lists<T, G, n>(dwte, dout, tokens, links, stream);
}

void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor positions, Tensor links,
                        cudaStream_t stream) {
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
    expect(name, "links", links, DType::i32, {2, B * T_length});
    expect_aligned(name, {{"dout", dout}, {"dwte", dwte}, {"dwpe", dwpe}});
    if (dout.n() == 0) return;
    narrow(B * T_length, "embedding_backward: B T");
    dispatch_chunks(dout.dtype, C, [&](auto zero) {
        using Chunk = decltype(zero);
        using T = typename Chunk::Element;
        if (dwte.dtype == DType::f32)
            launch_embedding_backward<T, float, Chunk::n>(dwte, dwpe, dout, tokens, positions, links, stream);
        else launch_embedding_backward<T, T, Chunk::n>(dwte, dwpe, dout, tokens, positions, links, stream);
    });
}
