// Latent keys: assembling the keys of multi-head latent attention (MLA).   (DeepSeek-V2 2024, arXiv:2405.04434)
//
// Keys that are expanded from a latent are not rotated: the rotation, another one at each key, would stand between the
// query and the matrix that expands keys, and decoding could not apply this matrix to the query, once for all keys
// (flash_attention/paged_latent_attention.cu). Therefore MLA reserves some columns of every head for the position, in
// queries and keys, and all heads share those of the key:
//
//   forward     k_h = [own_h | shared]                      own_h (Dn) from the latent; shared (Dr) from the input,
//                                                           rotated
//   backward    down_h = dk_h's first columns               dshared = sum over h of dk_h's last columns
//               (down: the gradient of own)
//
// As plain loops, for one token:
//
//   for h < H:
//       keys[h][0 ... Dn) = own[h]                          down[h] = dkeys[h][0 ... Dn)
//       keys[h][Dn ... Dn + Dr) = shared                    dshared += dkeys[h][Dn ... Dn + Dr)
//
// Bytes: forward reads Dn and writes Dn + Dr numbers per head and token; backward the reverse. Memory limits both.
#include "layers/chunk.cuh"
#include "layers/layers.h"

#include <numeric>

namespace {

// A range of columns of each head, as kernels take it.
template <class Number>
struct Part {
    Number* data;
    int64_t token_stride, head_stride;
    int D;

    explicit Part(const HeadColumns& heads)
        : data(heads.rows.ptr<std::remove_const_t<Number>>() + heads.column), token_stride(heads.rows.cols()),
          head_stride(heads.head_stride()), D(narrow(heads.D, "columns of a head")) {}
    __device__ __forceinline__ Number* at(int64_t token, int head) const {
        return data + token * token_stride + head * head_stride;
    }
};

// Block (t, b, group of heads); threadIdx.y is the head in the group, threadIdx.x the chunk of kN of its Dn + Dr
// columns. A chunk is either own or shared columns, never both: n_own chunks are the head's own.
template <class Number, int kN>
__global__ void latent_keys_forward_kernel(Part<Number> keys, Part<const Number> own, Part<const Number> shared,
                                           int n_heads, int n_own) {
    const int head = blockIdx.z * blockDim.y + threadIdx.y, chunk = threadIdx.x;
    if (head >= n_heads) return;
    const int64_t token = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    Number* key = keys.at(token, head);
    if (chunk < n_own) {
        const int d = chunk * kN;
        copy_chunk<kN>(key + d, own.at(token, head) + d, own.D - d);
    } else {
        const int d = (chunk - n_own) * kN;
        copy_chunk<kN>(key + own.D + d, shared.at(token, 0) + d, shared.D - d);
    }
}

// Block (t, b); a thread moves the chunk's own columns of every head, or sums the shared ones over the heads, in
// their order.
template <class Number, int kN>
__global__ void latent_keys_backward_kernel(Part<Number> down, Part<Number> dshared, Part<const Number> dkeys,
                                            int n_heads, int n_own) {
    const int chunk = threadIdx.x;
    const int64_t token = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    if (chunk < n_own) {
        const int d = chunk * kN;
        for (int h = 0; h < n_heads; ++h) copy_chunk<kN>(down.at(token, h) + d, dkeys.at(token, h) + d, down.D - d);
        return;
    }
    const int d = (chunk - n_own) * kN, n_left = dshared.D - d;
    float sum[kN] = {};
    for (int h = 0; h < n_heads; ++h) {
        float x[kN];
        load_chunk(x, dkeys.at(token, h) + down.D + d, n_left);
        for (int l = 0; l < kN; ++l) sum[l] += x[l];
    }
    store_chunk(dshared.at(token, 0) + d, sum, n_left);
}

void check_part(const char* name, const char* argument, const HeadColumns& heads, const HeadColumns& keys,
                int64_t count, int64_t D) {
    check(count > 0 && D > 0, name, ": ", argument, " has ", count, " heads of ", D, " columns, expected at least one");
    expect_heads(name, argument, heads, keys.rows.dtype, keys.rows.shape[0], keys.rows.shape[1], count, D);
    expect_aligned(name, {{argument, heads.rows}});
}

// Checks the three, and gives the number that divides every address and size, for packed loads.
int64_t check_all(const char* name, const char* keys_name, const HeadColumns& keys, const char* own_name,
                  const HeadColumns& own, const char* shared_name, const HeadColumns& shared) {
    expect(name, keys_name, keys.rows, keys.rows.dtype, {-1, -1, -1});
    check_part(name, keys_name, keys, keys, keys.count, own.D + shared.D);
    check_part(name, own_name, own, keys, keys.count, own.D);
    check_part(name, shared_name, shared, keys, 1, shared.D);
    int64_t common = 0;
    for (const HeadColumns& heads : {keys, own, shared})
        for (const int64_t x : {heads.D, heads.column, heads.head_stride(), heads.rows.cols()})
            common = std::gcd(common, x);
    return common;
}

}  // namespace

void latent_keys_forward(const HeadColumns& keys, const HeadColumns& own, const HeadColumns& shared,
                         cudaStream_t stream) {
    const int64_t common = check_all("latent_keys_forward", "keys", keys, "own", own, "shared", shared);
    if (keys.rows.n() == 0) return;
    dispatch_chunks(keys.rows.dtype, common, [&](auto chunk) {
        using T = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const int64_t n_own = ceil_div(own.D, kN), n_shared = ceil_div(shared.D, kN);
        const HeadLaunch to = head_launch(keys.rows.shape[0], keys.rows.shape[1], keys.count, n_own + n_shared);
        latent_keys_forward_kernel<T, kN>
            <<<to.grid, to.block, 0, stream>>>(Part<T>(keys), Part<const T>(own), Part<const T>(shared),
                                               narrow(keys.count, "heads"), narrow(n_own, "chunks"));
        launched("latent_keys_forward_kernel", {.reads = bytes_of(own, shared), .writes = bytes_of(keys)});
    });
}

void latent_keys_backward(const HeadColumns& down, const HeadColumns& dshared, const HeadColumns& dkeys,
                          cudaStream_t stream) {
    const int64_t common = check_all("latent_keys_backward", "dkeys", dkeys, "down", down, "dshared", dshared);
    if (dkeys.rows.n() == 0) return;
    dispatch_chunks(dkeys.rows.dtype, common, [&](auto chunk) {
        using T = typename decltype(chunk)::Element;
        constexpr int kN = decltype(chunk)::n;
        const int64_t n_own = ceil_div(down.D, kN), n_shared = ceil_div(dshared.D, kN);
        const HeadLaunch to = head_launch(dkeys.rows.shape[0], dkeys.rows.shape[1], 1, n_own + n_shared);
        latent_keys_backward_kernel<T, kN>
            <<<to.grid, to.block, 0, stream>>>(Part<T>(down), Part<T>(dshared), Part<const T>(dkeys),
                                               narrow(dkeys.count, "heads"), narrow(n_own, "chunks"));
        launched("latent_keys_backward_kernel", {.reads = bytes_of(dkeys), .writes = bytes_of(down, dshared)});
    });
}
