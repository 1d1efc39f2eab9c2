// layers/residual.cu: out = inp + branch, the addition of a branch to the residual stream, where no norm follows that
// would do it.
//
//   for (i = 0; i < N * C; ++i) out[i] = inp[i] + branch[i];
//
// The sum is formed in float32 and rounded once, as in the norms: so a model that is divided at this place gives the
// same bits as one that is not. Bytes: two elements are read and one is written; memory is the limit.
#include "layers/chunk.cuh"
#include "layers/layers.h"

namespace {

// out may be inp or branch: a thread has read its chunk of both before it writes that chunk.
template <class T>
__global__ void residual_add_kernel(T* out, const T* inp, const T* branch, int64_t n) {
    constexpr int kN = kChunk<T>;
    const int64_t i = global_thread() * kN;
    if (i >= n) return;
    float x[kN], b[kN];
    load_chunk(x, inp + i, n - i);
    load_chunk(b, branch + i, n - i);
    for (int l = 0; l < kN; ++l) x[l] += b[l];
    store_chunk(out + i, x, n - i);
}

}  // namespace

void residual_add(Tensor out, Tensor inp, Tensor branch, cudaStream_t stream) {
    const char* const name = "residual_add";
    check(inp.data && inp.ndim == 2, name, ": inp is ", inp, ", expected (N, C)");
    expect(name, "out", out, inp.dtype, {inp.shape[0], inp.shape[1]});
    expect(name, "branch", branch, inp.dtype, {inp.shape[0], inp.shape[1]});
    expect_aligned(name, {{"out", out}, {"inp", inp}, {"branch", branch}});
    const int64_t n = inp.n();
    if (n == 0) return;
    dispatch(inp.dtype, [&](auto zero) {
        using T = decltype(zero);
        const unsigned blocks = static_cast<unsigned>(narrow(ceil_div(n, int64_t{256} * kChunk<T>), name));
        residual_add_kernel<T><<<blocks, 256, 0, stream>>>(out.ptr<T>(), inp.ptr<T>(), branch.ptr<T>(), n);
        launched("residual_add_kernel", {.reads = bytes_of(inp, branch), .writes = bytes_of(out)});
    });
}
