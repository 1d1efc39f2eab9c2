// dev/profile_cupti.cpp: a library that writes when each kernel, copy and fill of a CUDA program ran on the GPU. The
// program is not changed: the driver loads the library when the environment says so.
//
//   run      make profile                (dev/profile.sh), or by hand:
//            CUDA_INJECTION64_PATH=$PWD/build/cuda/dev/libprofile.so PROFILE_FILE=trace.tsv ./train_gpt --steps 5
//
// CUPTI, part of the CUDA toolkit, hands out buffers full of records, each with the GPU's own clock at start and end:
// true times of kernels, also of those in CUDA graphs, while they run as they always do, one after the other without
// gaps that a profiler made. Lines as cpu/profile.cpp writes them:   <start, ns> <tab> <duration, ns> <tab> <name>
//
// Records are written every quarter of a second and at the end, lines whole, so that the program may also be killed.
#include <cupti.h>
#include <cxxabi.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

// CUPTI gives a buffer back when it is full, and while the program runs only then if all of its records are complete:
// the next one is begun meanwhile, and a large one that is never full keeps what a killed program did. 64 KiB are some
// 300 kernels, less than a step.
constexpr size_t kBufferBytes = 64 << 10;
std::FILE* file = nullptr;

void check(CUptiResult status, const char* what) {
    if (status == CUPTI_SUCCESS) return;
    const char* text = "?";
    cuptiGetResultString(status, &text);
    std::fprintf(stderr, "profile: %s: %s\n", what, text);
}

// Kernel names come mangled, and there are few different ones. The map is never destroyed: finish() may come after what
// is static.
const std::string& readable(const char* mangled) {
    static auto& known = *new std::unordered_map<std::string, std::string>;
    std::string& name = known[mangled];
    if (name.empty()) {
        int status = 0;
        char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
        name = status == 0 && text ? text : mangled;
        std::free(text);
    }
    return name;
}

void write(uint64_t start, uint64_t end, const char* name) {
    std::fprintf(file, "%llu\t%llu\t%s\n", static_cast<unsigned long long>(start),
                 static_cast<unsigned long long>(end - start), name);
}

// The places of start, end and name are the same in every version of these records since CUDA 11.
void write(const CUpti_Activity* record) {
    switch (record->kind) {
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
            const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel8*>(record);
            return write(kernel->start, kernel->end, readable(kernel->name).c_str());
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY: {
            const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy5*>(record);
            return write(copy->start, copy->end, "memcpy");
        }
        case CUPTI_ACTIVITY_KIND_MEMSET: {
            const auto* fill = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
            return write(fill->start, fill->end, "memset");
        }
        default: return;
    }
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* bytes, size_t* max_records) {
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBufferBytes));
    *bytes = *buffer ? kBufferBytes : 0;
    *max_records = 0;  // as many as fit
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid_bytes) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    CUpti_Activity* record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, valid_bytes, &record) == CUPTI_SUCCESS) write(record);
    std::fflush(file);
    std::free(buffer);
}

void finish() { check(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "the last records"); }

}  // namespace

// The driver calls this once, when the program first uses it.
extern "C" int InitializeInjection() {
    const char* path = std::getenv("PROFILE_FILE");
    file = path ? std::fopen(path, "w") : nullptr;
    if (!file) {
        std::fprintf(stderr, "profile: PROFILE_FILE is '%s', which cannot be written\n", path ? path : "");
        return 1;
    }
    check(cuptiActivityRegisterCallbacks(give_buffer, take_buffer), "callbacks");
    check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "kernels");
    check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY), "copies");
    check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET), "fills");
    check(cuptiActivityFlushPeriod(250), "flush period");  // ms
    std::atexit(finish);
    return 1;
}
