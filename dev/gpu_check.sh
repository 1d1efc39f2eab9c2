#!/usr/bin/env bash
# dev/gpu_check.sh BUILD_FOLDER: all checks of correctness that need a GPU.     make gpu-check
#
#   1. build        the programs, the tests and dev/, for the GPU found (sm_90a on Hopper)
#   2. tests        the whole suite: kernels against float64, goldens, programs, ranks that share the GPU (test/run.sh); on a
#                   GPU each test in a process of its own, so that a kernel which traps or hangs ends its own test only
#   3. NCCL         where there are several GPUs: all collectives, a rank on each (test/comm_check.cu, by mpirun)
#   4. full size    the tests [full_size] at the sizes of GPT-2 and LLaMA, whose tensors have billions of elements
#   5. sanitizers   compute-sanitizer's memcheck, racecheck, initcheck and synccheck over the kernel tests, side by side,
#                   every tensor in an allocation of its own
#
# If a step fails, the others still run. One table is printed at the end; the log has the whole output. The exit status
# is 0 if every line of the table is ok. Nothing is fetched: what the machine lacks comes from gpu-bundle/ (make
# gpu-bundle). On the CPU device (make gpu-check DEVICE=cpu) strict mode is used instead of compute-sanitizer.
#
# In the environment, or after `make gpu-check`:
#   CHECK_OUT=build/<device>/gpu_check     where log.txt and table.md go
#   CHECK_SECONDS=540                      stop what runs after this many seconds, and print what there is; 0: never
#   CHECK_TESTS=                           only tests of these files, for 2 and 5: "gelu rope"
#   CHECK_STEPS="build tests nccl full_size sanitizers"; kernel_tests: of 2, those of kernels alone, which start no program
set -u
# Ctrl-C and SIGTERM end this script alone: timeout has a process group of its own, and what runs in it would go on. So commands
# are jobs in groups of their own (set -m), which are ended with the script; a second signal does not cut that short.
trap 'for job in $(jobs -p); do kill -- "-$job" 2> /dev/null; done' EXIT
trap 'trap "" INT TERM; exit 130' INT TERM
cd "$(dirname "$0")/.."
. dev/script.sh dev/gpu_check.sh "$@"
build=$1
case $build in *cuda*) device=cuda ;; *) device=cpu ;; esac
: "${CHECK_OUT:=$build/gpu_check}" "${CHECK_SECONDS:=540}" "${CHECK_TESTS:=}" "${CHECK_STEPS:=build tests nccl full_size sanitizers}" "${MAKE:=make}"
expect_words CHECK_STEPS build tests nccl full_size kernel_tests sanitizers
mkdir -p "$CHECK_OUT"
out=$(cd "$CHECK_OUT" && pwd)
log=$out/log.txt
: > "$log"
rows=()
failed=0
# MPI and libraries of the bundle, where the system has none.
if [ -d gpu-bundle/mpi ] && ! command -v mpirun > /dev/null; then
    # shellcheck disable=SC1091
    source gpu-bundle/mpi/use.sh
fi

seconds_left() { if [ "$CHECK_SECONDS" = 0 ]; then echo 36000; else echo $((CHECK_SECONDS - SECONDS > 1 ? CHECK_SECONDS - SECONDS : 1)); fi; }
# For test/run_each.sh: it ends by itself, before it is stopped.
test_seconds() { echo $(($(seconds_left) > 4 ? $(seconds_left) - 3 : 1)); }
wants() { [[ " $CHECK_STEPS " == *" $1 "* ]]; }
# add NAME STATUS SECONDS DETAIL
add() {
    local result=ok
    case $2 in
        0) ;;
        124) result="STOPPED" && failed=1 ;;
        absent) result="MISSING" && failed=1 ;;
        *) result="FAILED" && failed=1 ;;
    esac
    rows+=("| $1 | $result | $3 | $4 |")
    echo "  $1: $result, $3 s  $4"
}
# run NAME FILE COMMAND...: the output goes to FILE, and to the log.
run() {
    local file=$2 status=0
    echo "==== $1: ${*:3}" >> "$log"
    set -m
    timeout "$(seconds_left)" "${@:3}" > "$file" 2>&1 &
    set +m
    wait $! || status=$?
    cat "$file" >> "$log"
    return $status
}
first_error() { grep -m 1 -iE 'error|FAILED|fatal' "$1" | tr '|' '/' | cut -c 1-120; }

{
    date -u
    git log -1 --format='commit %h %s' 2> /dev/null
    nvidia-smi 2> /dev/null | head -n 20
    "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" --version 2> /dev/null | tail -n 2
    nproc && head -n 1 /proc/meminfo
} >> "$log" 2>&1
where=$([ $device = cuda ] && nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null | head -n 1 || echo "the CPU device")
echo "gpu-check on ${where:-no GPU}"

if wants build; then
    started=$SECONDS status=0
    run build "$out/build.txt" env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS "$MAKE" DEVICE=$device programs tests dev || status=$?
    add build $status $((SECONDS - started)) "$([ $status = 0 ] && echo "$(grep -cE '^  (NVCC|CXX)' "$out/build.txt") files compiled" || first_error "$out/build.txt")"
fi

# Tests by file, as Catch2 takes them: "[#test_gelu],[#test_rope]".
tags_of() {
    local tags=""
    for name in "$@"; do tags+="${tags:+,}[#test_$name]"; done
    echo "$tags"
}
# each FILE FILTER [VARIABLE...]: these tests, each in a process of its own. What is left of the time ends them, not a signal.
each() { run "${1%.txt}" "$out/$1" env TEST_RUNS="$out/runs" TEST_SECONDS=$(test_seconds) "${@:3}" test/run_each.sh "$build" "$2"; }
tests_end() { # from Catch2's last lines
    sed -nE 's/^(All tests passed.*|test cases:.*|No tests ran.*)/\1/p' "$1" | tail -n 1 | tr -s ' ' | tr '|' ','
}
if wants tests; then
    started=$SECONDS status=0
    if [ -z "$CHECK_TESTS" ]; then
        run tests "$out/tests.txt" env TEST_SECONDS=$(test_seconds) test/run.sh "$build" || status=$?
    else
        # shellcheck disable=SC2046,SC2086
        each tests.txt "$(tags_of $CHECK_TESTS)" || status=$?
    fi
    add tests $status $((SECONDS - started)) "$(tail -n 1 "$out/tests.txt")"
fi
n_gpus=$([ $device = cuda ] && nvidia-smi -L 2> /dev/null | grep -c '^GPU ')
if wants nccl && [ "${n_gpus:-0}" -gt 1 ]; then
    started=$SECONDS status=0
    run NCCL "$out/nccl.txt" mpirun --allow-run-as-root -np "$n_gpus" "$build/comm_check" --comm nccl check || status=$?
    add "NCCL on $n_gpus GPUs" $status $((SECONDS - started)) "$([ $status = 0 ] || first_error "$out/nccl.txt")"
fi
if wants full_size; then
    started=$SECONDS status=0
    # One at a time: each takes most of a GPU's memory.
    each full_size.txt "[full_size]" LLM_FULL_SIZE=$([ $device = cuda ] && echo 1 || echo 0) TEST_JOBS=1 || status=$?
    add "full size" $status $((SECONDS - started)) "$(tail -n 1 "$out/full_size.txt")"
fi

# The tests of kernels: those of the files in layers/, layers/flash_attention/ and optim/.
kernel_tests=()
for file in layers/*.cu layers/flash_attention/*.cu optim/*.cu; do
    name=$(basename "$file" .cu)
    [ -e "test/test_$name.cu" ] || continue
    if [ -z "$CHECK_TESTS" ] || [[ " $CHECK_TESTS " == *" $name "* ]]; then kernel_tests+=("$name"); fi
done
filter=$(tags_of "${kernel_tests[@]}")
if wants kernel_tests; then
    started=$SECONDS status=0
    each kernel_tests.txt "$filter" || status=$?
    add "kernel tests" $status $((SECONDS - started)) "$(tail -n 1 "$out/kernel_tests.txt")"
fi
if wants sanitizers && [ $device = cpu ]; then
    for seed in 1 2; do
        started=$SECONDS status=0
        run "strict mode" "$out/strict-$seed.txt" env CUDA_CPU_STRICT=$seed ARENA_SEPARATE=1 "$build/run_tests" -# "$filter" || status=$?
        add "strict mode, seed $seed" $status $((SECONDS - started)) "$(tests_end "$out/strict-$seed.txt")"
    done
elif wants sanitizers; then
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null)
    tools=(memcheck racecheck initcheck synccheck)
    set -m
    for tool in "${tools[@]}"; do
        # The GPU waits for the host most of the time, so the four run side by side. Only the test's own process is looked
        # at: a kernel that shall trap does so in another (test/test_embedding.cu).
        {
            started=$SECONDS status=0
            [ -z "$sanitizer" ] || env ARENA_SEPARATE=1 TEST_WITH="$sanitizer --tool $tool --error-exitcode 86 --print-limit 20 --target-processes application-only" \
                TEST_RUNS="$out/runs-$tool" TEST_JOBS=$((($(nproc) + 3) / 4)) TEST_SECONDS=$(test_seconds) \
                test/run_each.sh "$build" "$filter" > "$out/$tool.txt" 2>&1 || status=$?
            echo "$status $((SECONDS - started))" > "$out/$tool.status"
        } &
    done
    set +m
    wait
    for tool in "${tools[@]}"; do
        if [ -z "$sanitizer" ]; then add "$tool" absent 0 "no compute-sanitizer here" && continue; fi
        read -r status seconds < "$out/$tool.status"
        found=$(grep -hE 'SUMMARY: [1-9]' "$out/runs-$tool"/*.out 2> /dev/null | head -n 1 | sed 's/^=* *//')
        { echo "==== $tool" && cat "$out/$tool.txt" && grep -lE 'SUMMARY: [1-9]' "$out/runs-$tool"/*.out | xargs -r cat; } >> "$log" 2> /dev/null
        add "$tool" "$status" "$seconds" "$(tail -n 1 "$out/$tool.txt")${found:+; $found}"
    done
fi

{
    echo "| gpu-check, ${where:-no GPU} | result | s | |"
    echo "| --- | --- | ---: | --- |"
    printf '%s\n' "${rows[@]}"
} > "$out/table.md"
echo
cat "$out/table.md"
echo "the whole output: $CHECK_OUT/log.txt"
exit $failed
