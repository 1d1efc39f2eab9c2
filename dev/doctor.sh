#!/usr/bin/env bash
# dev/doctor.sh: what this machine has, what will therefore work, and what to install for the rest.   run: make doctor
#
# Every line is the result of a trial: the compiler compiles a program, the libraries are linked and called. Always exits with 0.
set -u
cd "$(dirname "$0")/.."
looked_in=${CUDA_HOME:+CUDA_HOME=$CUDA_HOME}
: "${CXX:=g++}" "${NVCC:=}" "${CUDA_HOME:=/usr/local/cuda}" "${CLANGXX:=clang++}" "${BUILDS_FOR:=}"
: "${CXXFLAGS:=-std=c++20 -march=native -fopenmp -I. -Icpu -idirafter /usr/include/jsoncpp}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

n_missing=0
yes() { printf '  ok   %-12s %s\n' "$1" "$2"; }
no() { # what, why, what to do
    printf '  --   %-12s %s\n       %-12s -> %s\n' "$1" "$2" "" "$3"
}
need() { # the same for something that the CPU build needs
    no "$@"
    n_missing=$((n_missing + 1))
}

# try CODE [LIBRARY...]: compiles, links and runs a program as the Makefile would, and prints what it prints.
try() {
    local code=$1
    shift
    printf '%b\n' "$code" > "$work/try.cpp"
    # shellcheck disable=SC2086
    $CXX $CXXFLAGS "$work/try.cpp" "$@" -o "$work/try" > "$work/log" 2>&1 && "$work/try" 2> /dev/null
}
first_line() { "$@" 2> /dev/null | head -n 1; }
has() { command -v "$1" > /dev/null 2>&1; }

echo "To build anything: ./install.sh installs what is marked --"
if ! has "$CXX"; then
    need "C++" "no $CXX" "./install.sh"
elif out=$(try '#include <version>\n#include <cstdio>\n#include <concepts>\n#include <span>
    int main() { return std::printf("%d.%d", __GNUC__, __GNUC_MINOR__) < 0 || __cplusplus < 202002L; }'); then
    yes "C++" "$(first_line $CXX --version), C++20 and OpenMP"
    # It makes no SIMD of the loop over threads.
    case $out in 11.*) no "" "with g++ 11 AdamW takes 3.7 times as long, a step up to a tenth longer" "make CXX=g++-12 (apt-get install g++-12)" ;; esac
else
    need "C++" "$(first_line $CXX --version) fails on a C++20 program with OpenMP: $(head -n 1 "$work/log")" "g++ 11 or newer"
fi
case $(first_line make --version) in
    "GNU Make"*) yes "make" "$(first_line make --version)" ;;
    *) need "make" "not GNU make" "./install.sh" ;;
esac

echo "CPU device:"
simd=$(echo | $CXX $CXXFLAGS -dM -E -x c++ - 2> /dev/null |
    sed -nE 's/^#define __(AVX512F|AVX512BF16|AVX2|FMA|F16C|ARM_NEON|ARM_FEATURE_SVE)(__)? 1/\1/p' | sort | paste -s -d ' ')
case "$simd" in
    *AVX512F*) yes "vectors" "512 bits: $simd" ;;
    *AVX2*FMA*) yes "vectors" "256 bits: $simd" ;;
    *ARM*) yes "vectors" "$simd" ;;
    *) yes "vectors" "128 bits only: it works, slowly" ;;
esac
yes "cores" "$(nproc 2> /dev/null || echo '?') usable, $(awk '/MemAvailable/ { printf "%.0f GiB of memory free", $2 / 1048576 }' /proc/meminfo 2> /dev/null)"
if out=$(try '#include <boost/context/detail/fcontext.hpp>\n#include <boost/version.hpp>\n#include <cstdio>
    namespace c = boost::context::detail; char stack[65536];
    int main() { c::jump_fcontext(c::make_fcontext(stack + sizeof stack, sizeof stack, [](c::transfer_t t) { c::jump_fcontext(t.fctx, nullptr); }), nullptr);
    std::printf("%d.%d", BOOST_VERSION / 100000, BOOST_VERSION / 100 % 1000); }' -lboost_context); then
    yes "fibers" "Boost.Context $out"
else
    need "fibers" "no Boost.Context" "./install.sh (libboost-context-dev)"
fi

echo "Libraries:"
# header NAME HEADER MACROS PACKAGE: the version is in the macros.
header() {
    local out
    if out=$(try "#include <$2>\n#include <cstdio>\nint main() { std::printf($3); }"); then yes "$1" "$out"; else need "$1" "no <$2>" "./install.sh ($4)"; fi
}
header "CLI11" CLI/CLI.hpp '"command line: version %s", CLI11_VERSION' libcli11-dev
if out=$(try '#include <json/json.h>\n#include <cstdio>\nint main() { Json::Value v(1); std::printf("JSON: version %s", JSONCPP_VERSION_STRING); return v.asInt() != 1; }' -ljsoncpp); then
    yes "JsonCpp" "$out"
else
    need "JsonCpp" "no <json/json.h>" "./install.sh (libjsoncpp-dev)"
fi
header "stb" stb/stb_image_write.h '"PNG"' libstb-dev
if out=$(try '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\n#include <cstdio>\nint main() { char v[64]; int jit = 0;
    pcre2_config(PCRE2_CONFIG_VERSION, v); pcre2_config(PCRE2_CONFIG_JIT, &jit);
    std::printf("patterns: version %s%s", v, jit ? ", with its compiler" : ", interpreted: tokenizing is slower"); }' -lpcre2-8); then
    yes "PCRE2" "$out"
else
    need "PCRE2" "no <pcre2.h>" "./install.sh (libpcre2-dev)"
fi
if out=$(try '#include <utf8proc.h>\n#include <cstdio>\nint main() { std::printf("normal forms: version %s, Unicode %s", utf8proc_version(), utf8proc_unicode_version()); }' -lutf8proc); then
    yes "utf8proc" "$out"
else
    need "utf8proc" "no <utf8proc.h>" "./install.sh (libutf8proc-dev)"
fi
if out=$(try '#include <catch2/catch_all.hpp>\n#include <cstdio>\nint main() { std::printf("%d.%d, a library", CATCH_VERSION_MAJOR, CATCH_VERSION_MINOR); }' -lCatch2); then
    yes "Catch2" "tests: version $out"
elif out=$(try '#include <catch2/catch.hpp>\n#include <cstdio>\nint main() { std::printf("%d.%d, all header", CATCH_VERSION_MAJOR, CATCH_VERSION_MINOR); }'); then
    yes "Catch2" "tests: version $out"
else
    need "Catch2" "no <catch2/catch_all.hpp> and no <catch2/catch.hpp>" "./install.sh (catch2)"
fi

echo "GPU:"
gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null | grep -v -i 'fail\|error')
if [ -n "$gpu" ]; then
    while read -r line; do yes "GPU" "$line"; done <<< "$gpu"
else
    no "GPU" "nvidia-smi shows none" "nothing: everything runs on the CPU, and make DEVICE=cuda still compiles"
fi
if [ -n "$NVCC" ] && out=$("$NVCC" --version 2> /dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p') && [ -n "$out" ]; then
    echo '__global__ void k() {} int main() { k<<<1, 1>>>(); }' > "$work/try.cu"
    if [ "${out%%.*}" -lt 12 ]; then
        no "nvcc" "CUDA $out in $CUDA_HOME is too old for C++20" "CUDA 12 or newer: https://developer.nvidia.com/cuda-downloads"
    elif "$NVCC" -std=c++20 "$work/try.cu" -o "$work/try" > "$work/log" 2>&1; then
        yes "nvcc" "CUDA $out in $CUDA_HOME compiles"
    else
        no "nvcc" "CUDA $out does not compile: $(head -n 1 "$work/log")" "a compiler that this CUDA accepts, NVCC_PREPEND_FLAGS=\"-ccbin g++-13\" in the environment"
    fi
    # cuda_library NAME HEADER LIBRARY OTHERWISE
    cuda_library() {
        printf '#include <%s>\nint main() {}\n' "$2" > "$work/try.cu"
        if "$NVCC" "$work/try.cu" "-l$3" -o "$work/try" > "$work/log" 2>&1; then yes "$1" "found"; else no "$1" "does not link" "$4"; fi
    }
    cuda_library "cuBLASLt" cublasLt.h cublasLt "part of the CUDA toolkit: libcublas-dev-${out/./-} from NVIDIA's apt repository"
    cuda_library "NCCL" nccl.h nccl "only for several GPUs: libnccl-dev from NVIDIA's apt repository"
else
    no "nvcc" "none in ${looked_in:-PATH, /usr/local/cuda/bin or /opt/cuda/bin}" "only for GPUs: https://developer.nvidia.com/cuda-downloads (12 or newer)"
fi

echo "Optional:"
if has gdb; then yes "gdb" "$(first_line gdb --version)"; else no "gdb" "none" "./install.sh, to step through kernels"; fi
# By default Open MPI starts at most one process per core, and none for root: this prints the first command line that works.
mpi_line() {
    local options
    for options in "" "--oversubscribe " "--allow-run-as-root " "--oversubscribe --allow-run-as-root "; do
        # shellcheck disable=SC2086
        if timeout 20 mpirun $options-np 8 true < /dev/null > "$work/log" 2>&1; then
            echo "mpirun $options-np 8 ./train_gpt"
            return
        fi
    done
    return 1
}
if ! has mpirun; then
    no "MPI" "no mpirun" "only for several machines: apt install openmpi-bin libopenmpi-dev"
elif out=$(mpi_line); then
    mpi=$(first_line mpirun --version)
    [[ $mpi == *[0-9]* ]] || mpi=$(first_line ompi_info --version)  # Ubuntu 26.04's mpirun lacks all of its texts
    yes "MPI" "$mpi; eight ranks on this machine: $out"
else
    no "MPI" "mpirun -np 8 true fails: $(grep -m 1 '[a-z]' "$work/log")" "--ranks 8 instead: ranks as threads of one process"
fi
# shellcheck disable=SC2046
if ! has pkg-config || ! pkg-config --exists cpp-httplib; then
    no "httplib" "pkg-config finds no cpp-httplib" "./install.sh (libcpp-httplib-dev, pkg-config), for generate --serve"
elif try '#include <httplib.h>\nint main() { httplib::Server server; }' $(pkg-config --cflags --libs cpp-httplib); then
    yes "httplib" "cpp-httplib $(pkg-config --modversion cpp-httplib): generate --serve"
else
    no "httplib" "cpp-httplib does not compile: $(grep -m 1 -E 'error|cannot' "$work/log")" "./install.sh, for generate --serve"
fi
if has ccache; then yes "ccache" "$(first_line ccache --version): what was compiled before is not compiled again"; else no "ccache" "none" "./install.sh: builds after the first take seconds"; fi
echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' > "$work/try.cpp"
if has "$CLANGXX" && "$CLANGXX" -fsanitize=fuzzer "$work/try.cpp" -o "$work/try" > /dev/null 2>&1; then
    yes "clang" "$(first_line "$CLANGXX" --version), with libFuzzer: make fuzz"
else
    no "clang" "no $CLANGXX with libFuzzer" "./install.sh --dev, for make fuzz"
fi
if has clang-format; then yes "clang-format" "$(first_line clang-format --version)"; else no "clang-format" "none" "./install.sh --dev, for make format"; fi
if has clangd; then yes "clangd" "$(first_line clangd --version): make compile_commands.json"; else no "clangd" "none" "./install.sh --dev, for editors"; fi
python=${LLM_PYTHON:-python3}
if out=$("$python" -c 'import sys, torch, transformers; print("Python %d.%d, torch %s, transformers %s" % (*sys.version_info[:2], torch.__version__, transformers.__version__))' 2> /dev/null); then
    yes "transformers" "$out: the tests that compare with them"
else
    no "transformers" "$python has no torch and transformers" "pip install torch transformers (and LLM_PYTHON=its/bin/python); the tests that compare with them are skipped without"
fi

echo
if [ $n_missing = 0 ]; then
    echo "The CPU build and the tests will work. \`make\` builds for $BUILDS_FOR."
else
    echo "$n_missing needed for the CPU build: ./install.sh"
fi
exit 0
