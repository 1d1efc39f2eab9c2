// layers/decode.h: operations of layers.h that a step of inference does together: on a GPU one launch where layers.h
// has two, for steps of few rows, whose time is that of starting, waiting and reading weights. And the upload of the
// tables that say what the step's rows are.
#pragma once

#include "layers/layers.h"

#include <cstdint>

// few_rows.cu. The first product of a feed-forward and what follows it:    before (N, O) = inp weight^T + bias
//   gelu     out (N, O) = gelu(before)        swiglu     out (N, O / 2) = silu(before[:, :O / 2]) * before[:, O / 2:]
// Up to 16 rows in 16 bits are one launch on a GPU, which does not write before. The bits are those of two.
enum class Activation : uint8_t { none, gelu, swiglu };
void few_rows_activated_forward(Tensor out, Tensor before, Tensor inp, Tensor weight, Tensor bias,
                                Activation activation, cudaStream_t stream);

// The norm in front of a product: the arguments of layernorm_forward, or without a bias of rmsnorm_forward.
struct NormInFront {
    Tensor out, sum, mean, rstd, inp, branch, weight, bias;
    float eps = 0;
};
// few_rows.cu. few_rows_forward, or few_rows_activated_forward, of the norm's out. One row in 16 bits on a GPU, of up
// to 2048 columns, a multiple of 8, is one launch, which writes out and norm.sum, and neither before nor norm.out, mean
// and rstd. The bits are those of two or three. norm.sum must not be norm.inp.
void few_rows_normed_forward(Tensor out, Tensor before, const NormInFront& norm, Tensor weight, Tensor bias,
                             Activation activation, cudaStream_t stream);

// flash_attention/paged_attention.cu. paged_write and paged_attention_forward of a step in which each sequence has one
// new token: N rows, chunks and rows of the page table. The bits are those of the two. On a GPU, for most sizes, one
// launch does both (and where the keys are cut into splits that have blocks of their own, a second one joins them). It
// leaves q as it is; the two rotate it. It reads chunks, page table and the older rows of the pool before the launches
// in front have ended (early_launch.cuh). No sequence may have another one's new row in its pages.
void paged_decode_forward(const HeadColumns& out, const HeadColumns& q, const HeadColumns& k, const HeadColumns& v,
                          const PagedStep& step, RopePairs pairs, Tensor positions, Tensor table, float scale,
                          int64_t window, Tensor scratch, cudaStream_t stream);

// upload.cu. to[i] = from[i] for i < n, for one table or two. from: pinned memory of the host, which must not change
// before the launch has ended.
struct Upload {
    int32_t* to = nullptr;
    const int32_t* from = nullptr;
    int64_t n = 0;
};
void upload_tables(const Upload& first, const Upload& second, cudaStream_t stream);
