#!/usr/bin/env bash
# dev/profile.sh BUILD_FOLDER: where the time of a training step goes, by kernel.     make profile      make profile DEVICE=cpu
#
# Runs ./train_gpt for a few steps on random tokens while every kernel's start and duration is written to a file: on the
# GPU by a library that CUDA loads (dev/profile_cupti.cpp; the program is not changed and not slowed), on the CPU device
# by CUDA_CPU_PROFILE. dev/bench_report.cu then selects whole steps, sums by kernel and by part of the model, and compares
# each part with the time that its bytes and operations need at this device's measured copy bandwidth and matmul rate.
#
# It leaves in PROFILE_OUT: profile.md (also printed), profile.png, trace.tsv (every kernel), account.md, account.png,
# launches.tsv, profile.log.
#
# In the environment, or after `make profile`:
#   MODEL=gpt2 BATCH=32 SEQ=1024 DTYPE=bf16      (on the CPU device: toys, fp32)
#   STEPS=8                                      steps to run; the first two are left out
#   TRAIN_FLAGS="--recompute none"               more flags for train_gpt
#   PROFILE_OUT=build/<device>/profile           where the results go
set -u
cd "$(dirname "$0")/.."
. dev/script.sh dev/profile.sh "$@"
build=$1
expect_program "$build/dev/bench_report" profile
case $build in
    *cuda*) device=cuda && : "${MODEL:=gpt2}" "${BATCH:=32}" "${SEQ:=1024}" "${DTYPE:=bf16}" ;;
    *) device=cpu && : "${MODEL:=tiny}" "${BATCH:=2}" "${SEQ:=32}" "${DTYPE:=fp32}" ;;
esac
: "${STEPS:=8}" "${PROFILE_OUT:=$build/profile}" "${TRAIN_FLAGS:=}"
mkdir -p "$PROFILE_OUT"
out=$(cd "$PROFILE_OUT" && pwd)
log=$out/profile.log
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: > "$log"
die() {
    echo "profile: $*" >&2
    tail -n 20 "$log" >&2
    exit 1
}
name=$(basename "${MODEL%.json}")
if [ -e "$MODEL" ]; then cp "$MODEL" "$work/model.json"; else "$build/dev/bench_report" config "$MODEL" 2>> "$log" > "$work/model.json" || die "no model $MODEL"; fi
cp "$work/model.json" "$out/$name.json"
{
    "$build/dev/bench_kernels" --limits --dtype "$DTYPE" 2>> "$log" | awk -F '\t' -v OFS='\t' \
        '$1 == "limit" { print "limit", "ours", $2, $3 } $1 == "device" { print "info", "device", $2 }'
    printf 'step\t%s\t%s\t%s\t%s\n' "$name" "$BATCH" "$SEQ" "$DTYPE"
} > "$out/results.tsv"
"$build/dev/bench_report" tokens "$out/$name.json" "$work/tokens.bin" $((BATCH * SEQ * 20 + 10000)) 2>> "$log" || die "no tokens"

trace=$out/trace.tsv
rm -f "$trace"
if [ $device = cuda ]; then
    [ -e "$build/dev/libprofile.so" ] || die "there is no $build/dev/libprofile.so: it needs CUPTI (cupti.h), part of the CUDA toolkit"
    tracing=(CUDA_INJECTION64_PATH="$(cd "$build/dev" && pwd)/libprofile.so" PROFILE_FILE="$trace")
else
    tracing=(CUDA_CPU_PROFILE="$trace")
fi
# shellcheck disable=SC2086
env "${tracing[@]}" "$build/train_gpt" --model "$out/$name.json" --dtype "$DTYPE" --data "$work/tokens.bin" --batch "$BATCH" --seq "$SEQ" \
    --steps 1000000 --warmup 1000 --lr 1e-4 --val-every 0 --save-every 0 --sample 0 --out "$work/run" $TRAIN_FLAGS >> "$log" 2>&1 &
pid=$!
# It is stopped shortly after the log has enough steps, so that their records are in the file; no checkpoint is written.
rows=0
while kill -0 $pid 2> /dev/null && [ "$rows" -le "$STEPS" ]; do
    sleep 0.1
    rows=$(wc -l 2> /dev/null < "$work/run/log.csv" || echo 0)
done
[ $device = cuda ] && sleep 2
kill -9 $pid 2> /dev/null
wait $pid 2> /dev/null
[ "$rows" -gt 4 ] || die "train_gpt made no steps; the end of $log:"

# What each group of launches is predicted to take here: the same run's launches, recorded and not run. After the run,
# which leaves what it has chosen for each product (--tune-matmul).
# shellcheck disable=SC2086
"$build/train_gpt" --account --model "$out/$name.json" --dtype "$DTYPE" --batch "$BATCH" --seq "$SEQ" --sample 0 --out "$out" $TRAIN_FLAGS \
    >> "$log" 2>&1 || die "no account"

"$build/dev/bench_report" profile "$out" > "$out/profile.md" 2>> "$log" || die "no table; the end of $log:"
cat "$out/profile.md"
