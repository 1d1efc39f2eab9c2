// test/program.h: runs the programs that were built together with the tests, as a user would.
#pragma once

#include "io/io.h"
#include "parallel/comm/transport.h"
#include "reference.h"
#include "temp_folder.h"
#include "test.h"

#include <sys/wait.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

struct Outcome {
    int status = -1;  // exit status; 128 + signal when a signal ended it
    std::string out, err;
};

// The program `name` in the folder of the running test program.
inline std::string program_file(const std::string& name) {
    return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
}
// A path as a word of a shell's command line, also inside of '': folders may have blanks in their names.
inline std::string shell_word(const std::string& path) {
    std::string word;
    for (const char c : path)
        word += (std::string_view(" \t!\"#$&()*;<>?[\\]^`{|}~").find(c) == std::string_view::npos ? "" : "\\") +
                std::string(1, c);
    return word;
}
inline std::string program_path(const std::string& name) { return shell_word(program_file(name)); }

// Runs a shell command line in the repository's root, with what it prints caught.
inline Outcome run_shell(const std::string& command) {
    const TempFolder folder;
    const std::string out = folder / "out", err = folder / "err";
    const int status = std::system(concat("( ", command, " ) > ", out, " 2> ", err, " < /dev/null").c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), slurp(out), slurp(err)};
}

// The one line of an error, without its newline.
inline std::string line_of(const Outcome& outcome) {
    INFO(outcome.err);
    CHECK(outcome.status == 2);
    CHECK(outcome.err.ends_with('\n'));
    return outcome.err.substr(0, outcome.err.rfind('\n'));
}

// The Python that runs scripts: LLM_PYTHON names one that has the packages they need.
inline std::string python_name() {
    const char* set = std::getenv("LLM_PYTHON");
    return set ? set : "python3";
}
inline Outcome run_python(const std::string& arguments) { return run_shell(python_name() + " " + arguments); }
inline bool python_is_here() { return run_python("-c ''").status == 0; }

// What goes behind train_gpt where runs are compared bit for bit: on a GPU each run would time the algorithms of its
// products, and two runs, or one before and after --resume, could take different ones.
#ifdef CUDA_ON_CPU
inline const std::string kUntimed = "";
#else
inline const std::string kUntimed = " --tune-matmul off";
#endif

// before: shell text in front of the program, such as "ulimit -f 8; exec". One OpenMP thread: the models of these
// runs are so small that a second thread waits for longer than it computes, and other tests run at the same time.
inline Outcome run_program(const std::string& name, const std::string& arguments, const std::string& before = "") {
    const auto has = [&](const char* flag) { return arguments.find(flag) != std::string::npos; };
    const bool untimed = name == "train_gpt" && !has("--tune-matmul") && !has("--draw");  // which trains nothing
    return run_shell(
        concat("export OMP_NUM_THREADS=1; ", before, " ", program_path(name), untimed ? kUntimed : "", " ", arguments));
}

// Can this device train with these flags? Not every GPU has products of fp8.
inline bool can_train(const std::string& flags) {
    return flags.find("--dtype fp8") == std::string::npos || has_fp8(flags.find("--fp8 block") != std::string::npos);
}

// What a program has printed that must have succeeded.
inline std::string must_succeed(const Outcome& outcome) {
    INFO(outcome.out << outcome.err);
    REQUIRE(outcome.status == 0);
    return outcome.out;
}
inline std::string printed_by(const std::string& name, const std::string& arguments) {
    return must_succeed(run_program(name, arguments));
}

// The number that follows `before` in a text.
inline double number_after(const std::string& text, const std::string& before) {
    const size_t at = text.find(before);
    INFO(text << "\nlooking for: " << before);
    REQUIRE(at != std::string::npos);
    return std::strtod(text.c_str() + at + before.size(), nullptr);
}

// How often a text has `what`.
inline size_t count(const std::string& text, const std::string& what) {
    size_t n = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
    return n;
}

// Of a run: the folder of its newest checkpoint, and the file with the weights there.
inline std::string newest_checkpoint(const std::string& run) {
    const auto found = latest_checkpoint(run);
    REQUIRE(found.has_value());
    return *found;
}
inline std::string weights_of(const std::string& run) { return slurp(newest_checkpoint(run) + "/model.safetensors"); }

// The same tensors, with NaN for every number.
inline void fill_with_nan(const std::string& path) {
    const SafetensorsReader file(path);
    std::vector<TensorToStore> tensors;
    for (const auto& [name, tensor] : file.tensors())
        tensors.push_back(
            {name, tensor.dtype, tensor.shape, [n = tensor.bytes](void* bytes) { std::memset(bytes, 0xff, n); }});
    write_safetensors(path, tensors);
}

// A text to train on.
inline std::string made_text(int n_lines) {
    std::string text;
    for (int i = 0; i < n_lines; ++i) text += concat("Line ", i * i % 97, " of a text that a test made.\n");
    return text;
}

// What a command line begins with to run a program as n processes. Without epoll: now and then a process of Open MPI 4
// says "Epoll MOD(1) on fd 14 failed", which in its ranks is the connection with mpirun.
inline bool have_mpirun() { return mpi_is_built_in() && run_shell("command -v mpirun").status == 0; }
inline std::string mpirun_command(int n, int seconds = 60) {
    return concat("env EVENT_NOEPOLL=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout ", seconds,
                  " mpirun --oversubscribe -np ", n, " ");
}
// A command line for two processes that differ: shell text for rank 0, and for rank 1, both without a '. (mpirun has a
// form for it, FIRST : SECOND, but the one of Debian 13, Open MPI 5.0.7, crashes there: open-mpi/ompi, issue 13303.)
inline std::string mpirun_of_two(const std::string& first, const std::string& second) {
    return concat(mpirun_command(2), "sh -c 'if [ $OMPI_COMM_WORLD_RANK = 0 ]; then ", first, "; else ", second,
                  "; fi'");
}

// Are the bytes that cudaMemGetInfo says were taken those that were planned? The CPU device counts bytes. A GPU hands
// out memory in pieces of 2 MiB: each of the at most 16 arenas may take one more piece than its bytes, or lie in a
// piece that was taken before it. While other tests use the GPU nobody can say: test/run_each.sh, which runs the tests
// [alone] afterwards.
inline bool gpu_is_shared() { return !device().is_cpu && std::getenv("LLM_GPU_SHARED") != nullptr; }
inline bool taken_as_planned(double taken, double planned) {
    if (gpu_is_shared()) return true;
    const double difference = std::abs(taken - planned);
    return device().is_cpu ? difference == 0 : difference <= 16 * 0x1p21;
}
