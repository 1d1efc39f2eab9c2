#!/usr/bin/env bash
# dev/gpu_window.sh BUILD_FOLDER: the ten minutes in which a GPU is available, in the order of what is worth most.     make gpu-window
#
#   1. build       what the following needs, on all cores
#   2. smoke       each kernel for Hopper's tensor cores by itself, in a process with a time limit. One that hangs, traps or is
#                  wrong is reported; if it is no product, what follows is run with --attention mma
#   3. training    GPT-2 124M, bf16, 64 x 1024 tokens: tokens/s
#   4. profile     the same step: measured beside predicted, for each group of kernels (make profile)
#   5. kernels     every operation beside its limit and beside PyTorch (make bench PARTS="limits kernels")
#   6. torch       PyTorch's tokens/s for the same model and batch
#   7. tests       the tests of kernels; then compute-sanitizer over them (make gpu-check)
#
# Each step has a time limit of its own, so that one which hangs does not take the others' time. The table is printed line by
# line as the steps end: a run that is cut off has lost nothing. WINDOW_OUT then has at most eight files: table.md, log.txt,
# profile.md, profile.png, account.md, results.md, kernels.png, check.md.
#
# In the environment, or after `make gpu-window`:
#   SECONDS=540                       of all steps together
#   WINDOW_STEPS="build smoke training profile kernels torch tests"
#   MODEL=gpt2 BATCH=64 SEQ=1024 DTYPE=bf16      (on the CPU device: toys, fp32)
#   SMOKE_SECONDS=25                  of one smoke test; TEST_JOBS of them at a time (test/run_each.sh)
#   LLM_PYTHON=python3                the Python that has PyTorch
#   WINDOW_OUT=build/<device>/window
set -u
cd "$(dirname "$0")/.."
. dev/script.sh dev/gpu_window.sh "$@"
build=$1
case $build in
    *cuda*) device=cuda && : "${MODEL:=gpt2}" "${BATCH:=64}" "${SEQ:=1024}" "${DTYPE:=bf16}" ;;
    *) device=cpu && : "${MODEL:=tiny}" "${BATCH:=2}" "${SEQ:=32}" "${DTYPE:=fp32}" ;;
esac
: "${WINDOW_SECONDS:=540}" "${WINDOW_STEPS:=build smoke training profile kernels torch tests}" "${WINDOW_OUT:=$build/window}"
: "${SMOKE_SECONDS:=25}" "${LLM_PYTHON:=python3}" "${MAKE:=make}"
expect_words WINDOW_STEPS build smoke training profile kernels torch tests
rm -rf "$WINDOW_OUT"
mkdir -p "$WINDOW_OUT"
out=$(cd "$WINDOW_OUT" && pwd)
log=$out/log.txt
table=$out/table.md
work=$(mktemp -d)
session=
end_session() { [ -z "$session" ] || pkill -KILL -s "$session"; session=; }
# What the scripts of the steps log by themselves is not in their output: why a program failed, which test.
keep_logs() {
    local file
    for file in "$work"/*/bench.log "$work"/*/profile.log "$work"/*/log.txt; do
        [ -e "$file" ] && { echo "---- ${file#"$work/"}" && tail -c 4000000 "$file"; } >> "$log" && rm "$file"
    done
}
trap 'end_session; keep_logs; rm -rf "$work"' EXIT
trap 'trap "" INT TERM; exit 130' INT TERM  # a second signal does not cut that short
SECONDS=0
failed=0
attention=auto

left() { echo $((WINDOW_SECONDS - SECONDS)); }
wants() { [[ " $WINDOW_STEPS " == *" $1 "* ]]; }
# row STEP STATUS SECONDS DETAIL: a line of the table, printed at once.
row() {
    local result=ok
    case $2 in
        0) ;;
        124 | 137) result="TIME LIMIT" && failed=1 ;;
        *) result="FAILED ($2)" && failed=1 ;;
    esac
    echo "| $1 | $result | $3 | $4 |" | tee -a "$table"
}
# limited LIMIT COMMAND...: its output goes to $work/out and to the log. Never longer than what is left of the window. A process
# that waits for a kernel that never ends does not answer SIGTERM, and would keep the GPU after the script that started it has
# ended: so each command has a session of its own, of which nothing is left.
limited() {
    local limit=$1 status=0
    shift
    [ "$limit" -gt "$(left)" ] && limit=$(left)
    [ "$(left)" -lt 5 ] && echo "no time left" > "$work/out" && return 124
    echo "==== $SECONDS s, at most $limit s: $*" >> "$log"
    setsid timeout --kill-after=2 "$limit" "$@" > "$work/out" 2>&1 &
    session=$!
    wait "$session" || status=$?
    end_session
    cat "$work/out" >> "$log"
    return $status
}
# step NAME LIMIT DETAIL_COMMAND COMMAND...: one line of the table. DETAIL_COMMAND reads what the step wrote under $work. If there
# is nothing for it, the line has the first error.
step() {
    local name=$1 limit=$2 detail=$3 text status=0 started=$SECONDS
    shift 3
    limited "$limit" "$@" || status=$?
    text=$($detail 2> /dev/null)
    row "$name" $status $((SECONDS - started)) "$(echo "${text:-$(first_error)}" | tr '|\n' '/ ' | cut -c 1-150)"
    keep_logs
    return $status
}
last_line() { grep . "$work/out" | tail -n 1; }
first_error() { cat "$work"/*/{bench,profile}.log "$work/out" 2> /dev/null | grep -v '^====' | grep -m 1 -iE 'error|fail|trap|fatal|^train_gpt: ' || last_line; }
no_torch() { sed -nE 's/.* ([^ ]+ has no torch) .*/(\1)/p' "$work/out"; }
keep() { for file in "$@"; do [ -e "$file" ] && cp "$file" "$out/"; done; }

gpu=$([ $device = cuda ] && nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null | head -n 1 || echo "the CPU device")
{
    date -u
    git log -1 --format='commit %h %s' 2> /dev/null
    [ $device = cuda ] && nvidia-smi 2> /dev/null | head -n 20
    nproc && head -n 1 /proc/meminfo
} > "$log" 2>&1
{
    echo "| gpu-window on ${gpu:-no GPU}, $WINDOW_SECONDS s | result | s | |"
    echo "| --- | --- | ---: | --- |"
} | tee "$table"

if wants build; then
    step build 300 first_error env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS "$MAKE" -j"$(nproc)" DEVICE=$device programs "$build/run_tests" \
        "$build/dev/bench_kernels" "$build/dev/bench_report" $([ $device = cuda ] && echo "$build/dev/libprofile.so") || exit 1
fi

if wants smoke; then
    # "[hopper]" on a GPU: the copy engine, mbarriers and wgmma; and attention on them. One process each.
    smoke_started=$SECONDS status=0
    limited 150 env LAUNCH_BLOCKING=1 TEST_RUNS="$work/smoke" TEST_TIMEOUT="$SMOKE_SECONDS" TEST_SECONDS=140 test/run_each.sh "$build" "[hopper]~[model]" || status=$?
    while read -r failed_test; do
        row "smoke: ${failed_test//|/ }" 1 "" ""
    done < <(sed -n 's/^FAILED: //p' "$work/out" | cut -c 1-200)
    # Attention needs none of our products for Hopper. (And not where the time was too short for some.)
    grep '^FAILED: ' "$work/out" | grep -qvE '^FAILED: (hopper )?matmul' && attention=mma
    row "smoke: kernels and pieces of them" $status $((SECONDS - smoke_started)) "$(last_line); what follows uses --attention $attention"
fi
[ $attention = auto ] && train_flags="" || train_flags="--attention $attention"

if wants training; then
    speed() { awk -F '\t' '$1 == "train" { printf "%s: %.0f tokens/s, %.1f GB  ", $2, $6, $7 / 1e9 }' "$work/bench/results.tsv"; }
    step "training: $MODEL, $DTYPE, $BATCH x $SEQ" 120 speed env PARTS=training MODELS="$MODEL" SEQS="$SEQ" BATCHES="$BATCH" DTYPE="$DTYPE" \
        OPPONENTS= RECORD=0 BENCH_SECONDS=110 BENCH_OUT="$work/bench" TRAIN_FLAGS="$train_flags" dev/bench.sh "$build"
fi
if wants profile; then
    per_step() { grep -m 1 ' ms per step ' "$work/out"; }
    step "profile: predicted beside measured" 90 per_step env MODEL="$MODEL" BATCH="$BATCH" SEQ="$SEQ" DTYPE="$DTYPE" \
        PROFILE_OUT="$work/profile" TRAIN_FLAGS="$train_flags" dev/profile.sh "$build"
    cat "$work/out"
    keep "$work/profile/profile.md" "$work/profile/profile.png" "$work/profile/account.md"
fi
if wants kernels; then
    limits() { sed -n 's/^- limits, measured: //p; /^Geometric mean/p' "$work/kernels/results.md" && no_torch; }
    step "kernels beside PyTorch" 150 limits env PARTS="limits kernels" MODELS="$MODEL" DTYPE="$DTYPE" OPPONENTS=torch RECORD=0 \
        BENCH_SECONDS=140 BENCH_OUT="$work/kernels" LLM_PYTHON="$LLM_PYTHON" dev/bench.sh "$build"
    keep "$work/kernels/results.md" "$work/kernels/kernels.png"
fi
if wants torch; then
    torch_speed() { awk -F '\t' '$1 == "train" { printf "%s %s: %.0f tokens/s  ", $2, $8, $6 }' "$work/torch/results.tsv" && no_torch; }
    step "training beside PyTorch" 150 torch_speed env PARTS=training MODELS="$MODEL" SEQS="$SEQ" BATCHES="$BATCH" DTYPE="$DTYPE" \
        OPPONENTS=torch PRECISIONS=autocast RECORD=0 BENCH_SECONDS=140 BENCH_OUT="$work/torch" TRAIN_FLAGS="$train_flags" \
        LLM_PYTHON="$LLM_PYTHON" dev/bench.sh "$build"
    { echo && sed -n '/^### Training/,$p' "$work/torch/results.md"; } >> "$out/results.md" 2> /dev/null
fi
if wants tests; then
    checks() { awk -F ' *[|] *' 'NR > 2 { printf "%s%s: %s", NR == 3 ? "" : ", ", $2, $3 }' "$work/check/table.md"; }
    step "tests of kernels, sanitizers" "$(left)" checks env CHECK_STEPS="kernel_tests sanitizers" CHECK_SECONDS="$(($(left) > 11 ? $(left) - 10 : 1))" \
        CHECK_OUT="$work/check" dev/gpu_check.sh "$build"
    [ -e "$work/check/table.md" ] && cp "$work/check/table.md" "$out/check.md"
fi
echo "gpu-window: $SECONDS s; $(find "$out" -type f | wc -l) files in $WINDOW_OUT"
exit $failed
