#!/usr/bin/env bash
# test/count_bytes.sh TRAIN_GPT RUN_TESTS: runs a step of many models, number formats and optimizers, and the tests of the
# other kernels (those with the tag [counted]), with programs whose kernels report each byte that they read and write
# (make count). Fails where a launcher states other numbers, and where no run has a kernel.
set -u
for file in "${1:-}" "${2:-}"; do
    [ -x "$file" ] || { echo "test/count_bytes.sh: give a train_gpt and a run_tests that \`make count\` has built, not '$file'" >&2; exit 2; }
done
program=$(realpath "$1") tests=$(realpath "$2")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A kernel runs on the OS thread that launches it: the marks on bytes have no locks. As on an H100.
export OMP_NUM_THREADS=1 CUDA_CPU_GPU=132,9.0,227
"$tests" "[counted]" > "$work/tests" 2>&1 &
tests_pid=$!
cd test/golden/runs
n_failed=0
n_runs=0
# steps FLAGS...: two steps, of two micro-batches each
steps() {
    n_runs=$((n_runs + 1))
    rm -rf "$work/run"
    if ! CUDA_CPU_EXACT=1 "$program" --data corpus.txt --batch 4 --micro-batch 2 --seq 33 --steps 2 --val-every 0 --save-every 0 \
        --sample 0 --val-fraction 0 --out "$work/run" "$@" > "$work/log" 2>&1; then
        n_failed=$((n_failed + 1))
        echo "train_gpt $*:"
        grep -E ' touches |train_gpt:' "$work/log" || tail -n 5 "$work/log"
    fi
    grep '^counted kernels:' "$work/log" >> "$work/kernels"
}
steps --model models/gpt2.json
steps --model models/gpt2_heads_of_8.json --dtype bf16 --attention mma
steps --model models/gpt2_wide.json --dtype bf16 --grad-dtype same --attention hopper
steps --model models/llama.json --dtype bf16 --recompute selective --head-chunks 5
steps --model models/qwen3.json --dtype fp16
steps --model models/qwen2.json --mask-documents --data documents
steps --model models/deepseek.json --dtype bf16 --recompute 1
steps --model models/mfa.json --dtype bf16 --master none
for recipe in delayed current block; do steps --model models/llama_wide.json --dtype fp8 --fp8 $recipe --seq 48; done
for optimizer in sgd momentum adagrad rmsprop adam lion adam8bit adafactor muon; do
    steps --model models/narrow_llama.json --optimizer $optimizer --batch 2 --seq 16
done
if ! wait $tests_pid; then
    n_failed=$((n_failed + 1))
    grep -E ' touches |FAILED' "$work/tests" || tail -n 5 "$work/tests"
fi
grep '^counted kernels:' "$work/tests" >> "$work/kernels"

# These no GPU has.
cpu_only=' few_rows_cpu_kernel flash_backward_kernel '
for kernel in $(grep -rhoE '"[a-z0-9_]+_kernel"' ../../../layers ../../../optim | tr -d '"' | sort -u); do
    [[ $cpu_only == *" $kernel "* ]] || grep -qw "$kernel" "$work/kernels" && continue
    n_failed=$((n_failed + 1))
    echo "$kernel: no run has it, so nothing holds what it states. Tag a test that launches it with [counted]"
done
[ $n_failed = 0 ] && echo "$n_runs runs and the tests [counted]: every launch touches the bytes that its launcher states"
exit $((n_failed > 0))
