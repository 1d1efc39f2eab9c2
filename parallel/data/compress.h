// parallel/data/compress.h: what the compressors of gradients share; used inside parallel/ only.
#pragma once

#include "parallel/comm/transport.h"
#include "parallel/data/data.h"

// compress.cu
std::vector<Param> params_of(const FlatParameters& p, size_t unit);
void zero(const Tensor& tensor);  // waits

// power_sgd.cu
std::unique_ptr<Compressor> make_power_sgd(Comm& comm, int64_t rank);
