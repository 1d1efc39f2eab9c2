// Embedding: a token's row of one table, plus its position's row of another.
//
//   forward     out[b,t,:] = wte[tokens[b,t],:] + wpe[t,:]
//
//   backward    dwte[v,:] += sum of dout[i,:] over the positions i = (b,t) with tokens[i] == v
//               dwpe[t,:] += sum over b of dout[b,t,:]
//
// The gather is easy; its gradient is a scatter in which many positions meet in one row of dwte. Atomic adds would give other
// bits on every run. Instead the positions of each token are first linked into a list, in ascending order:
//
//     position    0     1     2     3     4     5
//     token       7     2     7     7     2     9
//     next        2     4     3    -1    -1    -1       links[0]
//     previous   -1    -1     0     2     1    -1       links[1]: -1 marks the first, whose block sums the whole list
//
// Every element of links is written by one thread only, and every row of dwte is added to by one block only.
//
// Limits: the search for the next position takes B T steps for a token that does not occur again, and the list of a very
// frequent token is walked by one block. Both hide behind the matrix products up to about 100,000 tokens a batch.
#include "layers/chunk.cuh"
#include "layers/layers.h"

namespace {

constexpr int kBlock = 128;

// One block a position. wpe may be null.
template <class T, int n>
__global__ void embedding_forward_kernel(T* out, const int32_t* tokens, const T* wte, const T* wpe, int64_t T_length,
                                         int64_t C, int64_t n_rows) {
    const int64_t i = blockIdx.x, t = i % T_length, token = tokens[i];
    if (token < 0 || token >= n_rows) __trap();
    for (int64_t c = threadIdx.x * n; c < C; c += blockDim.x * n) {
        float x[n], position[n];
        load_chunk(x, wte + token * C + c, C - c);
        if (wpe) {
            load_chunk(position, wpe + t * C + c, C - c);
            for (int l = 0; l < n; ++l) x[l] += position[l];
        }
        store_chunk(out + i * C + c, x, C - c);
    }
}

// One thread a position looks ahead for the same token. `previous` comes filled with -1; position j's previous is written by
// the thread of that previous position.
__global__ void embedding_link_kernel(int32_t* next, int32_t* previous, const int32_t* tokens, int64_t n_positions) {
    const int64_t i = global_thread();
    if (i >= n_positions) return;
    const int32_t token = tokens[i];
    int64_t j = i + 1;
    while (j < n_positions && tokens[j] != token) ++j;
    next[i] = j < n_positions ? static_cast<int32_t>(j) : -1;
    if (j < n_positions) previous[j] = static_cast<int32_t>(i);
}

// gradient += sum
template <int n, class G>
__device__ __forceinline__ void add_chunk(G* gradient, float (&sum)[n], int64_t n_left) {
    float before[n];
    load_chunk(before, gradient, n_left);
    for (int l = 0; l < n; ++l) sum[l] += before[l];
    store_chunk(gradient, sum, n_left);
}

// One block a position; only the first position of each token works, and walks through all of them. G: type of the gradient.
template <class T, class G, int n>
__global__ void embedding_backward_wte_kernel(G* dwte, const T* dout, const int32_t* tokens, const int32_t* next,
                                              const int32_t* previous, int64_t C, int64_t n_rows) {
    const int64_t first = blockIdx.x, token = tokens[first];
    if (previous[first] >= 0) return;
    if (token < 0 || token >= n_rows) __trap();
    for (int64_t c = threadIdx.x * n; c < C; c += blockDim.x * n) {
        float sum[n] = {}, x[n];
        for (int64_t i = first; i >= 0;) {
            const int64_t after = next[i];  // asked for before the row: the two loads run side by side
            load_chunk(x, dout + i * C + c, C - c);
            for (int l = 0; l < n; ++l) sum[l] += x[l];
            i = after;
        }
        add_chunk(dwte + token * C + c, sum, C - c);
    }
}

// One block a t.
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

void embedding_forward(Tensor out, Tensor tokens, Tensor wte, Tensor wpe, cudaStream_t stream) {
    const char* name = "embedding_forward";
    expect(name, "out", out, out.dtype, {-1, -1, -1});
    const int64_t B = out.shape[0], T_length = out.shape[1], C = out.shape[2];
    expect(name, "tokens", tokens, DType::i32, {B, T_length});
    expect(name, "wte", wte, out.dtype, {-1, C});
    if (wpe) {
        expect(name, "wpe", wpe, out.dtype, {-1, C});
        check(wpe.shape[0] >= T_length, name, ": wpe has ", wpe.shape[0], " positions, but T is ", T_length);
    }
    expect_aligned(name, {{"out", out}, {"wte", wte}, {"wpe", wpe}});
    if (out.n() == 0) return;
    const unsigned n_positions = static_cast<unsigned>(narrow(B * T_length, "embedding_forward: B T"));
    dispatch_chunks(out.dtype, C, [&](auto zero) {
        using Chunk = decltype(zero);
        using T = typename Chunk::Element;
        embedding_forward_kernel<T, Chunk::n><<<n_positions, kBlock, 0, stream>>>(
            out.ptr<T>(), tokens.ptr<int32_t>(), wte.ptr<T>(), wpe ? wpe.ptr<T>() : nullptr, T_length, C, wte.shape[0]);
    });
    cudaCheckLaunch();
}

template <class T, class G, int n>
static void launch_embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor links,
                                      cudaStream_t stream) {
    const int64_t B = dout.shape[0], T_length = dout.shape[1], C = dout.shape[2], n_positions = B * T_length;
    int32_t *next = links.ptr<int32_t>(), *previous = next + n_positions;
    cudaCheck(cudaMemsetAsync(previous, 0xff, static_cast<size_t>(n_positions) * sizeof(int32_t), stream));  // -1
    embedding_link_kernel<<<static_cast<unsigned>(ceil_div(n_positions, kBlock)), kBlock, 0, stream>>>(
        next, previous, tokens.ptr<int32_t>(), n_positions);
    cudaCheckLaunch();
    embedding_backward_wte_kernel<T, G, n><<<static_cast<unsigned>(n_positions), kBlock, 0, stream>>>(
        dwte.ptr<G>(), dout.ptr<T>(), tokens.ptr<int32_t>(), next, previous, C, dwte.shape[0]);
    cudaCheckLaunch();
    if (!dwpe) return;
    embedding_backward_wpe_kernel<T, G, n>
        <<<static_cast<unsigned>(T_length), kBlock, 0, stream>>>(dwpe.ptr<G>(), dout.ptr<T>(), B, C);
    cudaCheckLaunch();
}

void embedding_backward(Tensor dwte, Tensor dwpe, Tensor dout, Tensor tokens, Tensor links, cudaStream_t stream) {
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
    expect(name, "links", links, DType::i32, {2, B * T_length});
    expect_aligned(name, {{"dout", dout}, {"dwte", dwte}, {"dwpe", dwpe}});
    if (dout.n() == 0) return;
    narrow(B * T_length, "embedding_backward: B T");
    dispatch_chunks(dout.dtype, C, [&](auto zero) {
        using Chunk = decltype(zero);
        using T = typename Chunk::Element;
        if (dwte.dtype == DType::f32)
            launch_embedding_backward<T, float, Chunk::n>(dwte, dwpe, dout, tokens, links, stream);
        else launch_embedding_backward<T, T, Chunk::n>(dwte, dwpe, dout, tokens, links, stream);
    });
}
