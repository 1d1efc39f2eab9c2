// test/ranks.h: many ranks inside of a test.
#pragma once

#include "parallel/data/data.h"

// n ranks as threads of this process, which print nothing and do not wait for long.
inline RankOptions threads(int n) {
    RankOptions options;
    options.ranks = n;
    options.quiet = true;
    options.timeout_s = 60;
    return options;
}

// Each with a device of its own, which talk by NCCL.
inline RankOptions by_nccl(int n) {
    RankOptions options = threads(n);
    options.comm = "nccl";
    return options;
}

// The CPU device's strict mode, where streams are asynchronous?
inline bool strict() {
#ifdef CUDA_ON_CPU
    return cuda_cpu::strict;
#else
    return false;
#endif
}
