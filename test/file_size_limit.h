// test/file_size_limit.h: a full disk without a disk to fill.
#pragma once

#include <signal.h>
#include <sys/resource.h>

// No file may grow beyond `bytes` while this lives.
struct FileSizeLimit {
    rlimit before;
    explicit FileSizeLimit(rlim_t bytes) {
        ::signal(SIGXFSZ, SIG_IGN);  // then write() fails with EFBIG instead of ending the process
        ::getrlimit(RLIMIT_FSIZE, &before);
        const rlimit limit{bytes, before.rlim_max};
        ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before); }
};
