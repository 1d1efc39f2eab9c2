// training/tune_matmul.cu: what computes each product of the run.
//
// cuBLASLt's heuristic names up to 16 algorithms for a product, its favourite first; often another one is faster,
// or our product for Hopper, or kernels after a product (layers/matmul_plan.cu). What was measured once is kept in a
// file, so that the next run on this GPU has the same choices, and with them the same bits:
//
//   ~/.cache/llm.cu/matmul-NVIDIA_H100_80GB_HBM3-130000.txt                        ($XDG_CACHE_HOME for ~/.cache)
//
//     llm.cu matmul choices of NVIDIA H100 80GB HBM3, cuBLASLt 130000, hopper 3
//     65536x3072x768 bf16 bf16 bf16 nt bias_gelu: 1f.2.0.0.0.0.0.0  # 431.0 us; 18 candidates, the first 452.1 us, ...
//     ...
//
// All ranks have rank 0's choices: what several ranks compute alike must have the same bits on each of them. Products
// that rank 0 has not, and those of runs that cannot rehearse a step, have what the file says, or the heuristic's
// first.
//
// The rehearsal is a step without an update: forward and backward of the first batch. Its results are overwritten when
// the first step begins.
#include "io/io.h"
#include "layers/hopper_matmul.h"
#include "training/training.h"

#include <cublasLt.h>

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

std::string matmul_file() {
    const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
    std::string folder;
    if (cache && *cache == '/') folder = cache;  // the standard says to ignore relative ones
    else if (home && *home) folder = concat(home, "/.cache");
    else return "";
    std::string gpu = device().name;
    for (char& c : gpu)
        if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
    return concat(folder, "/llm.cu/matmul-", gpu, "-", cublasLtGetVersion(), ".txt");
}

static std::string first_line() {
    return concat("llm.cu matmul choices of ", device().name, ", cuBLASLt ", cublasLtGetVersion(), ", hopper ",
                  kHopperMatmulVersion);
}

std::string matmul_file_text(const std::string& choices) { return first_line() + "\n" + choices; }

std::string choices_in_matmul_file(const std::string& text) {
    const size_t end = text.find('\n');
    check(end != std::string::npos && text.substr(0, end) == first_line(), "its first line is not '", first_line(),
          "'");
    return text.substr(end + 1);
}

namespace {

// A CPU has one algorithm.
bool is_tuned(const TrainOptions& o) { return o.tune_matmul == "on" || (o.tune_matmul == "auto" && !device().is_cpu); }

// Sets the choices of the file, if there is one. One that cannot be used is as good as none, but somebody should know.
void read_choices(const std::string& path, bool times) {
    if (path.empty()) return;
    try {
        if (is_there(path)) set_matmul_choices(choices_in_matmul_file(read_regular_file(path)));
    } catch (const Error& error) {
        std::fprintf(stderr, "%s is ignored, and %s: %s\n", path.c_str(),
                     times ? "will be written anew" : "written anew by the next run that times products", error.what());
    }
}

void write_choices(const std::string& path) {
    if (path.empty()) return;
    try {
        make_folder(std::filesystem::path(path).parent_path());
        write_text_file(path, matmul_file_text(matmul_choices()));
    } catch (const Error& error) {
        std::fprintf(stderr, "the choices of matrix products are not kept: %s\n", error.what());
    }
}

void take_choices_of_rank_0(Trainer& t) { set_matmul_choices(broadcast_text(t.world, matmul_choices())); }

// What the rehearsal would leave changed: histories of fp8, errors of compression, states on the host. Pipelines have
// no such step.
bool can_rehearse(const Trainer& t) {
    const TrainOptions& o = t.options;
    return !t.pipeline && !t.offload && o.precision.fp8 == Fp8Recipe::none &&
           o.data_parallel.compress.kind == Compression::none;
}

}  // namespace

void recall_matmuls(const TrainOptions& o) {
    if (is_tuned(o)) read_choices(matmul_file(), false);
}

void choose_matmuls(Trainer& t, const BatchReader& data) {
    if (!is_tuned(t.options)) return;
    const std::string path = matmul_file();
    const bool is_first = t.world.rank == 0, times = can_rehearse(t);
    set_matmul_choices("");
    if (is_first) read_choices(path, times);
    take_choices_of_rank_0(t);
    const std::string before = matmul_choices();
    if (times) {
        read_batch(t, data, 1);
        tune_matmuls(true);
        accumulate_gradients(t, 1);
        cudaCheck(cudaStreamSynchronize(device().stream));
        tune_matmuls(false);
        take_choices_of_rank_0(t);
    }
    if (!is_first) return;
    if (matmul_choices() != before) write_choices(path);
    if (t.options.verbose) std::printf("matrix products (%s)\n%s", path.c_str(), matmul_choices().c_str());
}
