// layers/few_rows.cuh: what the files of few_rows_forward share.
#pragma once

#include "layers/decode.h"

// few_rows_mma.cu: few_rows_forward of 16-bit numbers on tensor cores. Its arguments, which have been checked. The
// tiles of a block are the largest of which there are n_blocks (0: as many as the device has multiprocessors). The bits
// are the same with any. With an activation N is at most 16; with SwiGLU out has half as many columns as the weight
// has rows. Weight and bias are read before the launches in front have ended (early_launch.cuh).
void few_rows_mma_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, cudaStream_t stream, int64_t n_blocks = 0,
                          Activation activation = Activation::none);

// The same with the norm in front of it (normed_row.cuh), which has one row, if it is one that can be taken.
bool few_rows_mma_takes_norm(const NormInFront& norm, Tensor weight);
void few_rows_mma_normed_forward(Tensor out, const NormInFront& norm, Tensor weight, Tensor bias, cudaStream_t stream,
                                 int64_t n_blocks = 0, Activation activation = Activation::none);
