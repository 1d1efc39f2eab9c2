// layers/few_rows.cuh: what the files of few_rows_forward share.
#pragma once

#include "layers/layers.h"

// few_rows_mma.cu: few_rows_forward of 16-bit numbers on tensor cores. Its arguments, which have been checked.
void few_rows_mma_forward(Tensor out, Tensor inp, Tensor weight, Tensor bias, cudaStream_t stream);
