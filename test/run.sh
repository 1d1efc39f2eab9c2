#!/usr/bin/env bash
# test/run.sh BUILD_FOLDER ONCE...: runs the tests that `make test` has built.
#
# All tests, as a person would run them; and beside them, on the CPU device, those that launch kernels again in strict mode
# (which uses one core) under three seeds: each seed is another order of threads and streams. A test passes if it passes every
# time, and if all that it read back from the device was the same every time, bit for bit. For the tests of programs, and for
# those in the files ONCE (test/test_ONCE.cu), once is enough; for those with the tag [shapes], one seed: they run the same
# kernels on one stream for dozens of shapes, each of which is another order.
#
# Three runs go on at the same time, each mostly on one core: the tests of programs; strict mode with its first seed; and the
# other tests, between those of programs that wait for each other, which need no core, and strict mode with the other seeds.
# The first and the last take about as long, and strict mode with its first seed less: both cores work until the end.
#
# On a GPU each test has a process of its own: test/run_each.sh.
#
# Each run leaves a log (test/main.cu writes it) and its output in BUILD_FOLDER/test_runs. Only what failed is shown.
set -u
cd "$(dirname "$0")/.."
# What tests write and sync goes to memory where there is such a file system: a checkpoint waits for its disk.
[ -n "${TMPDIR:-}" ] || { [ -w /dev/shm ] && export TMPDIR=/dev/shm; }
. dev/script.sh test/run.sh "$@"
build=$1
shift
expect_program "$build/run_tests" tests
[[ $build == build/cpu* ]] || exec test/run_each.sh "$build"
# More threads run than there are cores: one that waits for the others of its loop leaves its core to them.
export OMP_WAIT_POLICY=passive
runs=$build/test_runs
rm -rf "$runs" && mkdir -p "$runs"

# run NAME ARGUMENTS...
run() {
    local name=$1 started=$SECONDS status=0
    shift
    printf '  %-14s ' "$name"
    # The inner 2>&1 is the program's; the outer one takes the shell's own word on a program that crashed.
    { LLM_TEST_LOG=$runs/$name.log timeout --foreground "${TEST_TIMEOUT:-1500}" "$build/run_tests" --durations yes "$@" \
        > "$runs/$name.out" 2>&1 || status=$?; } 2> /dev/null
    if [ $status = 0 ]; then
        echo "ok, $((SECONDS - started)) s"
        return
    fi
    case $status in
        124) echo "STOPPED after $((SECONDS - started)) s: it hangs, or needs a longer TEST_TIMEOUT (in seconds)" ;;
        *) echo "FAILED, $((SECONDS - started)) s, exit status $status; the end of $runs/$name.out:" ;;
    esac
    grep -avE '^[0-9.]+ s: ' "$runs/$name.out" | tail -n "${TEST_TAIL:-100}"
    # The log tells which test failed or crashed. If it does not, the run itself counts as one.
    if ! grep -qs "^failed" "$runs/$name.log" && ! tail -n 1 "$runs/$name.log" 2>/dev/null | grep -q '^start'; then
        printf 'failed\t%s\n' "the run $name" >> "$runs/$name.log"
    fi
}

strict_filter='~[.]~[program]'
for test in "$@"; do strict_filter+="~[#test_$test]"; done
# run_strict SEED FILTER
run_strict() {
    CUDA_CPU_STRICT=$1 run "strict-seed-$1" --filenames-as-tags "$2"
}

# Each in a process group of its own, that ends with us (a second signal does not cut that short): a test that waits in system()
# for a program does not see Ctrl-C.
trap 'for job in $(jobs -p); do kill -- "-$job" 2> /dev/null; done' EXIT
trap 'trap "" INT TERM; exit 130' INT TERM
set -m
run_strict 1 "$strict_filter" > "$runs/strict.txt" &
strict=$!
{
    run messages '[comm][program]~[.]'
    run functions '~[.]~[program]'
    for seed in 2 3; do run_strict $seed "$strict_filter~[shapes]"; done
} > "$runs/functions.txt" &
functions=$!
run programs '[program]~[comm]~[.]' < /dev/null &
programs=$!
set +m
wait "$programs" "$strict" "$functions"
cat "$runs/strict.txt" "$runs/functions.txt"
awk -F '\t' -f test/summary.awk "$runs"/*.log
