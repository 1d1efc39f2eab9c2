#!/usr/bin/env bash
# test/run.sh BUILD_FOLDER ONCE...: runs the tests that `make test` has built.
#
# All tests, as a person would run them; and beside them, on the CPU device, those that launch kernels again in strict mode
# (which uses one core) under three seeds: each seed is another order of threads and streams. A test passes if it passes every
# time, and if all that it read back from the device was the same every time, bit for bit. For the tests of programs, and for
# those in the files ONCE (test/test_ONCE.cu), once is enough.
#
# Two runs go on at the same time, each mostly on one core: the tests of programs; and strict mode, then the other tests.
#
# Each run leaves a log (test/main.cu writes it) and its output in BUILD_FOLDER/test_runs. Only what failed is shown.
set -u
cd "$(dirname "$0")/.."
# What tests write and sync goes to memory where there is such a file system: a checkpoint waits for its disk.
[ -n "${TMPDIR:-}" ] || { [ -w /dev/shm ] && export TMPDIR=/dev/shm; }
build=$1
shift
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
    grep -vE '^[0-9.]+ s: ' "$runs/$name.out" | tail -n "${TEST_TAIL:-100}"
    # The log tells which test failed or crashed. If it does not, the run itself counts as one.
    if ! grep -qs "^failed" "$runs/$name.log" && ! tail -n 1 "$runs/$name.log" 2>/dev/null | grep -q '^start'; then
        printf 'failed\t%s\n' "the run $name" >> "$runs/$name.log"
    fi
}

strict_runs() {
    local filter='~[.]~[program]' test seed
    for test in "$@"; do filter+="~[#test_$test]"; done
    for seed in 1 2 3; do CUDA_CPU_STRICT=$seed run "strict-seed-$seed" --filenames-as-tags "$filter"; done
}

if [[ $build == build/cpu* ]]; then
    set -m  # a process group of its own, that ends with us
    { strict_runs "$@"; run functions '~[.]~[program]'; } > "$runs/beside.txt" &
    beside=$!
    set +m
    trap 'kill -- -$beside 2> /dev/null' EXIT
    run programs '[program]~[.]'
    wait "$beside"
    cat "$runs/beside.txt"
else
    run normal
fi

# A log has one line for the start of a test, and one for its end: "passed|failed|skipped <bits>", tabs between. A test that
# started and did not end has crashed or hung. One that read nothing back has no bits.
awk -F '\t' '
    function fail(name, why) { if (!(name in failed)) { failed[name] = 1; print "FAILED: " name " (" why ")" } }
    FNR == 1 { finish(); run = FILENAME; sub(/.*\//, "", run); sub(/\.log$/, "", run) }
    function finish() { if (running != "") fail(running, "ended " run ": a crash, or it hung"); running = "" }
    $1 == "start" { running = $2; seen[$2] = 1; next }
    {
        running = ""
        if ($1 == "failed") fail($2, run)
        if ($1 == "skipped" && !($2 in skipped)) { skipped[$2] = 1; print "skipped: " $2 ": " $4 }
        if ($1 == "passed" && ($2 in bits) && bits[$2] != $3) fail($2, "its results differ in their bits: " bits_run[$2] ", " run)
        if ($1 == "passed" && !($2 in bits)) { bits[$2] = $3; bits_run[$2] = run }
    }
    END {
        finish()
        for (name in seen) if (name in failed) n_failed++; else if (name in skipped) n_skipped++; else n_passed++
        if (n_passed + n_failed == 0) { print "no test ran"; n_failed = 1 }
        printf "%d passed, %d failed%s\n", n_passed, n_failed, n_skipped ? ", " n_skipped " skipped" : ""
        exit n_failed > 0
    }' "$runs"/*.log
