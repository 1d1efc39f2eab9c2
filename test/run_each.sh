#!/usr/bin/env bash
# test/run_each.sh BUILD_FOLDER [FILTER]: each test in a process of its own, several at a time.
#
# On a GPU one kernel that traps ends everything that its process still wanted to do there, and one that never ends holds its
# process for ever. So no test shares a process with another, each has a time limit, and the others go on. FILTER: tags of
# Catch2, those of files too: "[#test_gelu],[#test_rope]"; without it all tests. None that is hidden.
#
# A line for each test that fails is printed as it ends; its output and log (test/main.cu writes it) are in
# TEST_RUNS. The last line has the counts.
#
# They see one GPU, which ranks share: what they compare bit for bit is added in the order of the ranks, and NCCL, which
# carries the messages of ranks that have a GPU each, has an order of its own (dev/gpu_check.sh checks it).
#
# The tests [alone] compare times, or the memory that the device has left: they run afterwards, one after another. The
# others know from LLM_GPU_SHARED that somebody else's memory comes and goes (taken_as_planned, test/program.h).
#
# In the environment:
#   TEST_RUNS=BUILD_FOLDER/test_runs
#   TEST_JOBS=12          tests at a time; not more than the cores
#   TEST_TIMEOUT=180      seconds for one test
#   TEST_WITH=            what each test is run with: "compute-sanitizer --tool racecheck"
#   TEST_SECONDS=0        seconds for all: tests that it leaves no time for are counted; 0: no limit
set -u
cd "$(dirname "$0")/.."
[ -n "${TMPDIR:-}" ] || { [ -w /dev/shm ] && export TMPDIR=/dev/shm; }

[ "${1:-}" = --one ] || . dev/script.sh test/run_each.sh "$@"
if [ "$1" = --one ]; then
    name=$2
    file=$RUNS/$(printf %s "$name" | tr -c 'a-zA-Z0-9' _ | cut -c 1-120)-$$
    limit=$TEST_TIMEOUT is_cut=0
    if [ "$UNTIL" != 0 ]; then
        left=$((UNTIL - $(date +%s)))
        [ $left -lt 3 ] && printf 'left out\t%s\n' "$name" > "$file.log" && exit 0
        [ $left -lt "$limit" ] && limit=$left is_cut=1
    fi
    # A test's name as Catch2 takes it; one that begins with "-" would be an option.
    spec=$(printf %s "$name" | sed -e 's/[][\\,"]/\\&/g' -e 's/^[-~*]/\\&/')
    status=0 started=$SECONDS
    # timeout has a process group of its own. What is left in it would keep the GPU: programs that the test has started, and that
    # wait for a kernel that never ends. A second signal must not end the trap: a script that runs under timeout gets two.
    {
        trap 'trap "" HUP INT TERM; [ -z "$!" ] || kill -KILL -- $! -$!; exit 130' HUP INT TERM
        LLM_TEST_LOG=$file.log timeout --kill-after=5 "$limit" ${TEST_WITH:-} "$RUN_TESTS" "$spec" > "$file.out" 2>&1 < /dev/null &
        wait $! || status=$?
        kill -KILL -- -$!
        trap - HUP INT TERM
    } 2> /dev/null
    if [ $is_cut = 1 ] && { [ $status = 124 ] || [ $status = 137 ]; }; then
        printf 'left out\t%s\n' "$name" > "$file.log"
        exit 0
    fi
    case $status in
        124 | 137) why="STOPPED after $limit s" ;;
        *) why="status $status, $((SECONDS - started)) s" ;;
    esac
    # A process that fails although its test did not, or that found no such test, fails, too.
    if [ $status = 0 ] && ! grep -q '^start' "$file.log" 2> /dev/null; then status=1 why="its name finds no test"; fi
    [ $status = 0 ] && exit 0
    grep -qs '^failed' "$file.log" || printf 'failed\t%s\n' "$name" >> "$file.log"
    error=$(tr -d '\000-\010\016-\037' < "$file.out" | grep -m 1 -iE 'error|trap|fatal|due to|FAILED' | cut -c 1-160)
    printf 'FAILED: %s (%s): %s\n' "$name" "$why" "$error"
    exit 0
fi

build=$1 filter=${2:-}
expect_program "$build/run_tests" tests
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
cores=$(nproc)
jobs=${TEST_JOBS:-$((cores < 12 ? cores : 12))}
export RUN_TESTS=$build/run_tests RUNS=${TEST_RUNS:-$build/test_runs} TEST_TIMEOUT=${TEST_TIMEOUT:-180} UNTIL=0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / jobs > 2 ? cores / jobs : 2))}
[ "${TEST_SECONDS:-0}" = 0 ] || UNTIL=$(($(date +%s) + TEST_SECONDS))
rm -rf "$RUNS" && mkdir -p "$RUNS"

# names TAGS: of the tests of FILTER that have (and, with "~", do not have) these tags. Catch2 3 has another option for it than 2.
list=(--list-test-names-only)
"$RUN_TESTS" "${list[@]}" 2> /dev/null | grep -q . || list=(--list-tests --verbosity quiet)
names() { "$RUN_TESTS" -# "${list[@]}" "$(printf %s "$filter" | sed -e "s/,/$1,/g")$1" 2> /dev/null | grep .; }
each() { xargs -r -d '\n' -n 1 -P "$1" "$PWD/test/run_each.sh" --one; }
{ names "[program]~[alone]~[.]" || true; names "~[program]~[alone]~[.]"; } > "$RUNS/names"  # the longest first
names "[alone]~[.]" > "$RUNS/names_alone"
if [ ! -s "$RUNS/names" ] && [ ! -s "$RUNS/names_alone" ]; then
    echo "$RUN_TESTS has no test ${filter:-that is not hidden}"
    exit 1
fi
if [ "$jobs" -gt 1 ]; then export LLM_GPU_SHARED=1; fi
each "$jobs" < "$RUNS/names"
unset LLM_GPU_SHARED
each 1 < "$RUNS/names_alone"
[ "$jobs" = 1 ] || echo "bytes taken on a GPU were compared in the tests [alone]; TEST_JOBS=1 compares them in all"
awk -F '\t' -v quiet=1 -f test/summary.awk "$RUNS"/*.log
