#!/usr/bin/env bash
# test/gpu_choices.sh BUILD_FOLDER ONCE...: runs what `make gpu-choices` has built: kernels with a GPU's packs, tiles and blocks,
# which end where an address is misaligned.
#
# All tests that compute in this process, but those of the files ONCE (test/test_ONCE.cu), as on an H100; of what chooses by the
# properties of a GPU also as on an A100, an RTX 4090 and a T4, and with one multiprocessor.
set -u
cd "$(dirname "$0")/.."
. dev/script.sh test/gpu_choices.sh "$@"
build=$1
shift
expect_program "$build/run_tests" gpu-choices
# As in test/run.sh.
[ -n "${TMPDIR:-}" ] || { [ -w /dev/shm ] && export TMPDIR=/dev/shm; }
export OMP_WAIT_POLICY=passive

status=0
# run CUDA_CPU_GPU FILTER
run() {
    local started=$SECONDS log=$build/as_on_$1.txt
    if CUDA_CPU_GPU=$1 "$build/run_tests" --filenames-as-tags "$2" > "$log" 2>&1; then
        echo "  as on $1: ok, $((SECONDS - started)) s: $(tail -n 2 "$log" | head -n 1)"
    else
        echo "  as on $1: FAILED, $((SECONDS - started)) s; the end of $log:"
        tail -n "${TEST_TAIL:-100}" "$log"
        status=1
    fi
}
filter='~[.]~[program]'
for test in "$@"; do filter+="~[#test_$test]"; done
run 132,9.0,227 "$filter"
chooses="[matmul]$filter"
for tag in hopper flash few_rows paged fp8; do chooses+=",[$tag]$filter"; done
for gpu in 108,8.0,163 128,8.9,99 40,7.5,64 1,9.0,227; do run $gpu "$chooses"; done
exit $status
