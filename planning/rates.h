// planning/rates.h: the two rates of this device that bound a training step, measured: a large matrix product, which
// computes, and a large copy, which moves bytes.
#pragma once

#include "core/core.h"

double measure_matmul_rate(DType dtype);  // in FLOP/s: what a step's FLOP/s are held against
double measure_copy_rate();               // in bytes read and written a second
