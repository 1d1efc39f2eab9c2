// cpu/profile.cpp: where a program's time goes, by kernel. CUDA_CPU_PROFILE=FILE in the environment writes a line into
// FILE for each kernel and each matrix product, when it ends:
//
//     <start, ns> <tab> <duration, ns> <tab> <name>
//
// dev/profile_cupti.cpp writes the same for a GPU; `make profile` makes a table and a picture of either. Lines are
// written whole, so the file can be read while the program runs, and after it was killed.
#include "device.h"

#include <chrono>
#include <cstdlib>

namespace cuda_cpu {
namespace {

std::FILE* profile_file() {
    static std::FILE* const file = [] {
        const char* path = std::getenv("CUDA_CPU_PROFILE");
        std::FILE* opened = path && *path ? std::fopen(path, "a") : nullptr;
        if (path && *path && !opened) std::fprintf(stderr, "CUDA_CPU_PROFILE: cannot write %s\n", path);
        if (opened) std::setvbuf(opened, nullptr, _IOLBF, 0);
        return opened;
    }();
    return file;
}

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

}  // namespace

Profiled::Profiled(const char* name) : name_(name), start_ns_(profile_file() ? now_ns() : 0) {}
Profiled::~Profiled() {
    if (std::FILE* file = profile_file())
        std::fprintf(file, "%lld\t%lld\t%s\n", static_cast<long long>(start_ns_),
                     static_cast<long long>(now_ns() - start_ns_), name_);
}

}  // namespace cuda_cpu
