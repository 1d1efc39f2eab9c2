// layers/flash_attention/paged_attention.cuh: attention over a cache in pages, as its two callers see it: grouped-query
// attention (paged_attention.cu, where the kernels are) and MLA (paged_latent_attention.cu).
#pragma once

#include "layers/decode.h"
#include "layers/flash_attention/flash_attention.cuh"

// H query heads of D columns over K heads of keys (D) and values (the first Dv columns of their rows).
struct PagedAttention {
    HeadColumns out, q;  // in rows (1, N, columns), of one dtype
    int64_t K;
    int64_t page_heads;  // heads of a page, each P rows of D columns: key head h is head h,
    int64_t values;      // value head h is head h + values
    int64_t
        scale_column;  // e4m3: columns from this one on have a scale of their own, the row's second; D: there is none
    float scale;
    int64_t window;
};

// Checks the step (pool, page table, chunks) too.
void paged_attention(const char* operation, const PagedAttention& arguments, const PagedStep& step, Tensor scratch,
                     cudaStream_t stream);
int64_t paged_splits_n(int64_t N, int64_t H, int64_t D, int64_t max_length);  // floats of its scratch

// New keys and values, and how they are rotated on their way to the pool; without a table they are not.
struct NewHeads {
    HeadColumns k, v;
    RopePairs pairs;
    Tensor positions, table;
};
// A step of one row for each chunk, on a GPU: paged_decode.cuh, whose heads have an even number of columns, and rows of
// a multiple of 16 bytes in the pool. fresh: the new keys and values are not in the pool yet, and belong there;
// otherwise nullptr. Arguments have been checked, but for the step.
void paged_decode(const char* operation, const PagedAttention& arguments, const PagedStep& step, const NewHeads* fresh,
                  Tensor scratch, cudaStream_t stream);
