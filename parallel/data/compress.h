// parallel/data/compress.h: what the compressors of gradients share; used inside parallel/ only.
#pragma once

#include "parallel/comm/transport.h"
#include "parallel/data/data.h"

// compress.cu
std::vector<Param> params_of(const FlatParameters& p, size_t unit);
// Without the rows that only pad the vocabulary: their gradients are 0 on every rank, and have to stay so.
int64_t numbers_of(const Param& param);
void zero(const Tensor& tensor);  // waits

// power_sgd.cu
std::unique_ptr<Compressor> make_power_sgd(Comm& comm, int64_t rank);
