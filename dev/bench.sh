#!/usr/bin/env bash
# dev/bench.sh BUILD_FOLDER: compares the speed of this build with PyTorch's and llm.c's.        make bench          make bench DEVICE=cpu
#
# One process a subject, one after the other, on random tokens and normal(0, 1) data:
#   1. training  tokens/s of ./train_gpt itself, read from its log.csv, against dev/bench_torch.py and llm.c, at each of a few
#                batch sizes; the fastest counts
#   2. limits    the copy bandwidth and the matmul rate of this device, by us and by PyTorch; the higher counts
#   3. kernels   every operation of layers/, forward and backward, at each model's sizes (dev/bench_kernels.cu), and PyTorch's
#                eager, compiled and SDPA forms of it (dev/bench_torch.py)
# It leaves in BENCH_OUT: results.md (also printed), kernels.png, training.png, results.tsv (each number), bench.log (all that
# the programs said). On a GPU the tables are added to dev/RESULTS.md.
#
# In the environment, or after `make bench`:
#   PARTS="training limits kernels"       what to do; always in this order, so that a run that is cut off has the headline
#   MODELS="gpt2 gpt2-xl llama-1b"        for which models (on the CPU device: toys)
#   SEQS="1024 4096"                      sequence lengths of the training runs
#   DTYPE=bf16                            (on the CPU device: fp32)
#   OPPONENTS="torch llm.c"               which programs to compare with
#   PRECISIONS="master autocast pure"     of bench_torch.py
#   STEPS=10                              timed training steps, after 3 more
#   BATCHES=                              batch sizes of the training runs, instead of those of batches() below
#   TRAIN_FLAGS=                          more flags for train_gpt
#   ONLY=                                 kernels: only operations whose name contains this
#   RECORD=1                              on a GPU, add the tables to dev/RESULTS.md; 0: do not
#   BENCH_SECONDS=540                     stop starting programs after this many seconds, and print what there is; 0: never
#   BENCH_OUT=build/<device>/bench        where the results go
#   LLM_PYTHON=python3                    the Python that has PyTorch
#   LLMC=llm.c                            the folder of llm.c's source, if it is there; LLMC_MAKE: flags for its Makefile
set -u
cd "$(dirname "$0")/.."
. dev/script.sh dev/bench.sh "$@"
build=$1
expect_program "$build/dev/bench_report" bench
case $build in *cuda*) device=cuda ;; *) device=cpu ;; esac
: "${PARTS:=training limits kernels}" "${OPPONENTS=torch llm.c}" "${BENCH_SECONDS:=540}" "${LLM_PYTHON:=python3}" "${LLMC:=llm.c}" "${LLMC_MAKE:=}"
: "${BENCH_OUT:=$build/bench}" "${RECORD:=1}"
expect_words PARTS training limits kernels
expect_words OPPONENTS torch llm.c
if [ $device = cuda ]; then
    : "${MODELS:=gpt2 gpt2-xl llama-1b}" "${SEQS:=1024 4096}" "${DTYPE:=bf16}" "${STEPS:=10}" "${PRECISIONS:=master autocast pure}" "${KERNEL_SECONDS:=0.1}"
else
    : "${MODELS:=toy-gpt2 tiny}" "${SEQS:=32}" "${DTYPE:=fp32}" "${STEPS:=3}" "${PRECISIONS:=autocast}" "${KERNEL_SECONDS:=0.005}"
fi
mkdir -p "$BENCH_OUT"
out=$(cd "$BENCH_OUT" && pwd)
tsv=$out/results.tsv
log=$out/bench.log
: > "$tsv" > "$log"
work=$(mktemp -d)
# A program that timeout has started is in a process group of timeout's own, which Ctrl-C does not reach. A second signal does
# not cut this short.
trap 'for job in $(jobs -p); do kill -- "-$job" 2> /dev/null; done; rm -rf "$work"' EXIT
trap 'trap "" INT TERM; exit 130' INT TERM
tab=$'\t'

say() { echo "$*" | tee -a "$log" >&2; }
wants() { [[ " $1 " == *" $2 "* ]]; }
seconds_left() { if [ "$BENCH_SECONDS" = 0 ]; then echo 36000; else echo $((BENCH_SECONDS - SECONDS)); fi; }
# timeout's: not 0, which is no limit. With --kill-after, for what waits for a kernel that never ends, and does not answer SIGTERM.
limit() { echo $(($(seconds_left) > 1 ? $(seconds_left) : 1)); }
# time_is_up WHAT: when there is not enough time left to start it, prints so and returns true.
time_is_up() {
    [ "$(seconds_left)" -gt 10 ] && return 1
    say "bench: no time left for $1 (BENCH_SECONDS=$BENCH_SECONDS)"
}
# ask COMMAND...: its standard output; its errors go to the log. If it fails, that is printed, and the script continues.
ask() {
    echo "==== $*" >> "$log"
    (
        timeout --kill-after=2 "$(limit)" "$@" 2>> "$log" &
        trap "kill -- -$! 2> /dev/null" EXIT
        trap 'trap "" INT TERM; exit 130' INT TERM
        wait $!
    ) || say "bench: exit status $? of: $* (see bench.log)"
}

# ---- sizes -----------------------------------------------------------------------------------------------------------
# batch and sequence at which a model's kernels are timed: activations of 100 MB and more, past every cache.
kernel_size() {
    case $1 in
        gpt2) echo 64 1024 ;;
        gpt2-xl) echo 32 1024 ;;
        llama-*) echo 8 4096 ;;
        *) echo 2 32 ;;
    esac
}
# The batch sizes that training tries, the same for all programs.
batches() {
    case $1-$2 in
        gpt2-1024) echo 64 32 ;;
        gpt2-4096 | gpt2-xl-1024) echo 16 8 ;;
        gpt2-xl-4096) echo 4 2 ;;
        llama-1b-1024) echo 16 32 ;;
        llama-1b-4096) echo 4 8 ;;
        *) echo 2 ;;
    esac
}
# A model's config.json, for all sides. GPT-2 gets as many positions as the longest sequence asks for.
write_config() {
    case $1 in
        toy-gpt2) echo '{"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 300, "n_positions": 128}' > "$out/$1.json" ;;
        *) "$build/dev/bench_report" config "$1" 2>> "$log" > "$out/$1.json" || { say "bench: no model $1"; return 1; } ;;
    esac
    local longest
    longest=$(printf '%s\n' $SEQS | sort -n | tail -n 1)
    sed -i -E "/\"n_(positions|ctx)\"/ s/(\"n_(positions|ctx)\": )(10[0-9][0-9]|[0-9]{1,3})\b/\1$((longest > 1024 ? longest : 1024))/g" "$out/$1.json"
}

# ---- limits and kernels ----------------------------------------------------------------------------------------------
torch_is_here=
has_torch() {
    wants "$OPPONENTS" torch || return
    if [ -z "$torch_is_here" ]; then "$LLM_PYTHON" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2> /dev/null && torch_is_here=yes || torch_is_here=no; fi
    [ $torch_is_here = yes ]
}
bench_limits() {
    ask "$build/dev/bench_kernels" --limits --dtype "$DTYPE" --budget "$KERNEL_SECONDS" |
        sed -E "s/^limit$tab/limit${tab}ours$tab/; s/^device$tab.*//" | grep . >> "$tsv"
    if has_torch; then ask "$LLM_PYTHON" dev/bench_torch.py limits --dtype "$DTYPE" --budget "$KERNEL_SECONDS" >> "$tsv"; fi
}
bench_kernels() {
    local model=$1 batch seq
    read -r batch seq <<< "$(kernel_size "$model")"
    printf 'size\t%s\t%s\t%s\n' "$model" "$batch" "$seq" >> "$tsv"
    local sizes=(--batch "$batch" --seq "$seq" --dtype "$DTYPE" --budget "$KERNEL_SECONDS")
    [ -z "${ONLY:-}" ] || sizes+=(--only "$ONLY")
    time_is_up "the kernels of $model" && return
    say "bench: kernels of $model, $batch x $seq"
    ask "$build/dev/bench_kernels" --model "$out/$model.json" "${sizes[@]}" | sed -E "s/^kernel$tab/kernel${tab}ours$tab$model$tab/" >> "$tsv"
    has_torch || return
    time_is_up "PyTorch's kernels of $model" && return
    ask "$LLM_PYTHON" dev/bench_torch.py kernels --config "$out/$model.json" "${sizes[@]}" |
        sed -E "s/^kernel$tab([^$tab]*)/kernel$tab\1$tab$model/" >> "$tsv"
}

# ---- training --------------------------------------------------------------------------------------------------------
gpu_bytes() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits 2> /dev/null | awk '{ m = $1 > m ? $1 : m } END { printf "%.0f", m * 1048576 }'; }
# watch_memory PID FILE: the most memory in use while the process runs, ten times a second: of the GPU what nvidia-smi
# says, less what was in use before; on the CPU the process's resident set. This is measured in the same way for every
# subject, instead of relying on what each one reports.
watch_memory() {
    local before=0 now most=0
    if [ $device = cuda ]; then before=$idle_bytes; fi
    while kill -0 "$1" 2> /dev/null; do
        if [ $device = cuda ]; then now=$(gpu_bytes); else now=$(awk '/^VmHWM/ { printf "%.0f", $2 * 1024 }' "/proc/$1/status" 2> /dev/null); fi
        if [ "${now:-0}" -gt "$most" ]; then most=$now && echo $((most - before)) > "$2"; fi
        sleep 0.1
    done
}
# run_watched COMMAND...: its output to $work/out, its peak memory in $peak.
run_watched() {
    echo "==== $*" >> "$log"
    idle_bytes=$([ $device = cuda ] && gpu_bytes)
    echo 0 > "$work/peak"
    timeout --kill-after=2 "$(limit)" "$@" > "$work/out" 2>> "$log" &
    local pid=$! status=0
    # The subject is a child of timeout.
    sleep 0.2
    watch_memory "$(pgrep -P $pid | head -n 1 || echo $pid)" "$work/peak" &
    wait $pid || status=$?
    wait
    peak=$(cat "$work/peak")
    return $status
}
median() { sort -g | awk '{ v[NR] = $1 } END { if (NR) print v[int((NR + 1) / 2)] }'; }

# train_gpt is ended as soon as its log has enough steps: no checkpoint is written, no text sampled.
train_ours() {
    local model=$1 seq=$2 batch=$3 rows=0 status=0
    local run=$work/run n=$((STEPS + 3))
    rm -rf "$run"
    local command=("$build/train_gpt" --model "$out/$model.json" --dtype "$DTYPE" --data "$work/$model.bin" --batch "$batch" --seq "$seq"
        --steps 1000000 --warmup 1000 --lr 1e-4 --val-every 0 --save-every 0 --sample 0 --out "$run" ${TRAIN_FLAGS:-})
    echo "==== ${command[*]}" >> "$log"
    idle_bytes=$([ $device = cuda ] && gpu_bytes)
    echo 0 > "$work/peak"
    "${command[@]}" >> "$log" 2>&1 &
    local pid=$!
    watch_memory $pid "$work/peak" &
    while kill -0 $pid 2> /dev/null && [ "$rows" -le $n ] && [ "$(seconds_left)" -gt 2 ]; do
        sleep 0.25  # a small model has enough steps sooner than its memory has been looked at once more
        rows=$(wc -l 2> /dev/null < "$run/log.csv" || echo 0)
    done
    kill -9 $pid 2> /dev/null
    { wait $pid || status=$?; wait; } 2> /dev/null
    local speed
    speed=$(awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == "tokens_per_s") c = i } NR > 4 { print $c }' "$run/log.csv" 2> /dev/null | median)
    if [ "$rows" -le 4 ] || [ -z "$speed" ]; then say "bench: train_gpt, $model, $batch x $seq: no result (see bench.log)"; return; fi
    printf 'train\tours\t%s\t%s\t%s\t%s\t%s\t%s\n' "$model" "$seq" "$batch" "$speed" "$(cat "$work/peak")" "$DTYPE ${TRAIN_FLAGS:-}" >> "$tsv"
}
train_torch() {
    local model=$1 seq=$2 batch=$3 precision=$4 compile=()
    # 48 blocks, unrolled, take minutes to compile: one compilation for all of them.
    [ $device = cuda ] && case $model in gpt2-xl | gpt2-large) compile=(--compile blocks) ;; esac
    if run_watched "$LLM_PYTHON" dev/bench_torch.py train --config "$out/$model.json" --seq "$seq" --batch "$batch" --dtype "$DTYPE" \
        --precision "$precision" --steps "$STEPS" --budget "$KERNEL_SECONDS" "${compile[@]}"; then
        awk -F '\t' -v OFS='\t' -v model="$model" -v peak="$peak" '$1 == "train" { print $1, $2, model, $3, $4, $5, peak, $7 }' "$work/out" >> "$tsv"
    else
        say "bench: PyTorch $precision, $model, $batch x $seq: no result (see bench.log)"
    fi
}
# llm.c's CUDA program, for GPT-2's two sizes; its positions end at 1024.
train_llmc() {
    local model=$1 seq=$2 batch=$3 descriptor
    case $model in gpt2) descriptor=d12 ;; gpt2-xl) descriptor=d48 ;; *) return ;; esac
    if [ "$seq" -gt 1024 ]; then return; fi
    if [ ! -x "$LLMC/train_gpt2cu" ]; then
        local capability
        capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d .)
        # shellcheck disable=SC2086
        { echo "==== make -C $LLMC train_gpt2cu $LLMC_MAKE"; make -C "$LLMC" train_gpt2cu NO_MULTI_GPU=1 GPU_COMPUTE_CAPABILITY="$capability" $LLMC_MAKE; } >> "$log" 2>&1
    fi
    if [ ! -x "$LLMC/train_gpt2cu" ]; then say "bench: llm.c does not build (see bench.log)"; return; fi
    # One validation batch at the start and one at the end cannot be switched off; a step's milliseconds leave them out.
    if run_watched "$LLMC/train_gpt2cu" -i "$work/$model.bin" -j "$work/$model.bin" -e $descriptor -b "$batch" -t "$seq" -d $((batch * seq)) \
        -x $((STEPS + 3)) -v 1000000 -m 1 -s 0 -h 0 -l 1e-4 -r 0; then
        local speed
        speed=$(sed -nE 's/^step.*\| *([0-9.]+) ms .*/\1/p' "$work/out" | tail -n +4 | median)
        cat "$work/out" >> "$log"
        [ -n "$speed" ] && printf 'train\tllm.c\t%s\t%s\t%s\t%s\t%s\t%s\n' "$model" "$seq" "$batch" \
            "$(awk -v ms="$speed" -v n=$((batch * seq)) 'BEGIN { printf "%.6g", 1000 * n / ms }')" "$peak" "bf16 $LLMC_MAKE" >> "$tsv"
    else
        say "bench: llm.c, $model, $batch x $seq: no result (see bench.log)"
    fi
}
bench_training() {
    local model=$1 seq=$2 batch precision
    "$build/dev/bench_report" tokens "$out/$model.json" "$work/$model.bin" $([ $device = cuda ] && echo 4000000 || echo 100000) 2>> "$log" || return
    for batch in ${BATCHES:-$(batches "$model" "$seq")}; do
        time_is_up "training $model, $batch x $seq" && return
        say "bench: training $model, $batch x $seq"
        train_ours "$model" "$seq" "$batch"
        if has_torch; then
            for precision in $PRECISIONS; do
                time_is_up "PyTorch's training of $model, $batch x $seq" && return
                train_torch "$model" "$seq" "$batch" "$precision"
            done
        fi
        if [ $device = cuda ] && wants "$OPPONENTS" llm.c && [ -e "$LLMC/train_gpt2.cu" ]; then train_llmc "$model" "$seq" "$batch"; fi
    done
}

# ---- all of it -------------------------------------------------------------------------------------------------------
info() { [ -n "$2" ] && printf 'info\t%s\t%s\n' "$1" "$2" >> "$tsv"; }
info date "$(date -u '+%Y-%m-%d %H:%M UTC')"
info device "$("$build/dev/bench_kernels" --limits --budget 0 --repeats 3 2>> "$log" | sed -nE "s/^device$tab//p")"
info dtype "$DTYPE"
if [ $device = cuda ]; then
    info driver "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -n 1)"
    info CUDA "$("${NVCC:-nvcc}" --version 2> /dev/null | sed -nE 's/.*release ([0-9.]+).*/\1/p')"
    info "clocks and power at the start" "$(nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,power.limit --format=csv,noheader 2> /dev/null | head -n 1)"
fi
info commit "$(git rev-parse --short HEAD 2> /dev/null || echo unknown)$(git diff --quiet HEAD 2> /dev/null || echo ', with changes')"
if wants "$OPPONENTS" torch && ! has_torch; then say "bench: $LLM_PYTHON has no torch (LLM_PYTHON names another): ours alone"; fi

for model in $MODELS; do write_config "$model"; done
if wants "$PARTS" training; then
    for model in $MODELS; do
        for seq in $SEQS; do
            [ -e "$out/$model.json" ] && bench_training "$model" "$seq"
        done
    done
fi
if wants "$PARTS" limits; then bench_limits; fi
for model in $MODELS; do
    if wants "$PARTS" kernels && [ -e "$out/$model.json" ]; then bench_kernels "$model"; fi
done
if [ $device = cuda ]; then info "clocks and power at the end" "$(nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw --format=csv,noheader 2> /dev/null | head -n 1)"; fi

"$build/dev/bench_report" results "$out" > "$out/results.md" || exit 1
cat "$out/results.md"
if [ $device = cuda ] && [ "$RECORD" = 1 ]; then { echo; cat "$out/results.md"; } >> dev/RESULTS.md; fi
say "bench: $SECONDS s; tables, pictures and the log are in $BENCH_OUT"
# If nothing was measured, the script fails.
grep -qE '^(limit|kernel|train)' "$tsv"
