#!/usr/bin/env python3
"""dev/bench_cpu.py: our training step on a CPU compared with PyTorch's and llm.c's, alternating, on the same machine.

    make bench-cpu LLM_PYTHON=python3 LLMC=path/to/llm.c

Two jobs: GPT-2 124M with batch 4 x 64, which is what llm.c's CPU program does, and tiny with batch 16 x 128, which is what ./train_gpt
does without flags. Each in float32 and in bf16 (ours: bf16 weights, gradients and activations with float32 masters; PyTorch: autocast,
eager and compiled; llm.c has float32 alone). Each round runs every opponent once, as a process of its own, and takes the median of
its steps; the table has the median and the best of the rounds. The programs alternate because the speed of a machine changes from
minute to minute: the ratio of two programs is more reliable than either time. Where other programs run on the machine, compare the
best rounds.

In the environment, or after `make bench-cpu`:
    LLM_PYTHON=     the Python that has PyTorch: eager, and torch.compile       (none: PyTorch is left out)
    LLMC=           the folder of llm.c's source; its train_gpt2 is built there (none: llm.c is left out)
    ROUNDS=3        rounds
    STEPS=8         timed steps of each program in a round, after at least one more; at most 18
    MODEL=          a GPT-2, a preset or a config.json, with batch 4 x 64, instead of the two jobs
    DTYPES=fp32,bf16
    LIMIT=240       seconds: a program that takes longer is left out from then on (PyTorch in bf16 on a CPU without AVX-512)
"""
import array
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile

from script import ROOT, end_on_signals, output_of, refuse, show_usage, whole_number

BATCH, SEQ = 4, 64                                     # llm.c's
JOBS = [("gpt2", BATCH, SEQ), ("tiny", 16, 128)]
DTYPES = {"fp32": "float32", "bf16": "bf16"}


# ---- the opponents: each function returns the seconds of one step

def ours(build, job, dtype, steps):
    model, batch, seq = job
    out = output_of([f"{build}/dev/bench_cpu", "--model", model, "--batch", str(batch), "--seq", str(seq), "--dtype", dtype,
                     "--steps", str(steps)])
    return float(re.search(r"^step +([0-9.]+) s", out, re.M).group(1))


def pytorch(python, config, job, dtype, steps, compiled, limit):
    _, batch, seq = job
    out = output_of([python, "dev/bench_torch.py", "train", "--config", config, "--batch", str(batch), "--seq", str(seq),
                     "--dtype", dtype, "--compile", "full" if compiled else "", "--steps", str(steps)], timeout=limit)
    tokens_per_s = next(line.split("\t")[4] for line in out.splitlines() if line.startswith("train\t"))
    return batch * seq / float(tokens_per_s)


def llmc(program, folder, steps):
    """Its program takes 40 steps and samples text after 20: it is stopped when it has printed enough of them."""
    times = []
    with subprocess.Popen(["stdbuf", "-oL", program], cwd=folder, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL) as running:
        said = []
        for line in running.stdout:
            said.append(line)
            found = re.match(r"step \d+: .*took ([0-9.]+) ms", line)
            if found:
                times.append(float(found.group(1)) / 1000)
            if len(times) > steps:
                break
        running.kill()
    if len(times) <= steps:
        raise RuntimeError("llm.c ended early: " + "".join(said)[-400:])
    return statistics.median(times[1:])


# ---- llm.c's input: weights and tokens, in its formats

def write_llmc_files(folder, config):
    V, L, H, C, T = (config[k] for k in ("vocab_size", "n_layer", "n_head", "n_embd", "n_positions"))
    Vp = -(-V // 128) * 128
    generator = random.Random(1)
    pool = array.array("f", (generator.gauss(0, 0.02) for _ in range(1 << 16)))
    # (elements, kind) in the order of the file: token and position embeddings, then each parameter of all layers.
    shapes = [(Vp * C, "random"), (T * C, "random"),
              (L * C, "one"), (L * C, "zero"), (L * 3 * C * C, "random"), (L * 3 * C, "zero"),
              (L * C * C, "random"), (L * C, "zero"), (L * C, "one"), (L * C, "zero"),
              (L * 4 * C * C, "random"), (L * 4 * C, "zero"), (L * 4 * C * C, "random"), (L * C, "zero"),
              (C, "one"), (C, "zero")]
    with open(os.path.join(folder, "gpt2_124M.bin"), "wb") as file:
        array.array("i", [20240326, 3, T, V, L, H, C, Vp] + [0] * 248).tofile(file)
        for n, kind in shapes:
            chunk = {"random": pool, "one": array.array("f", [1.0]) * len(pool), "zero": array.array("f", bytes(4 * len(pool)))}[kind]
            for first in range(0, n, len(chunk)):
                chunk[:min(len(chunk), n - first)].tofile(file)
    data = os.path.join(folder, "dev/data/tinyshakespeare")
    os.makedirs(data)
    n_tokens = 64 * BATCH * SEQ + 1
    for name in ("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"):
        with open(os.path.join(data, name), "wb") as file:
            array.array("i", [20240520, 1, n_tokens] + [0] * 253).tofile(file)
            array.array("H", (generator.randrange(V) for _ in range(n_tokens))).tofile(file)


def compare(job, rounds, steps, dtypes, build, python, llmc_folder, limit, work):
    """Runs one job's opponents in turn, and prints their table."""
    config = os.path.join(work, "config.json")
    with open(config, "w", encoding="utf-8") as file:
        file.write(output_of([f"{build}/dev/bench_report", "config", job[0]]))
    subjects = {}
    for dtype in dtypes:
        name = DTYPES[dtype]
        subjects[f"llm.cu, {name}"] = lambda dtype=dtype: ours(build, job, dtype, steps)
        if python:
            version = output_of([python, "-c", "import torch; print(torch.__version__)"]).strip()
            who = f"PyTorch {version}, {name}" + ("" if dtype == "fp32" else " autocast")
            subjects[f"{who}, eager"] = lambda dtype=dtype: pytorch(python, config, job, dtype, steps, False, limit)
            subjects[f"{who}, torch.compile"] = lambda dtype=dtype: pytorch(python, config, job, dtype, steps, True, limit)
    if llmc_folder and (job[1], job[2]) == (BATCH, SEQ):
        folder = os.path.abspath(llmc_folder)
        output_of(["make", "-C", folder, "train_gpt2", "CC=gcc"], env={k: v for k, v in os.environ.items() if "MAKE" not in k})
        with open(config, encoding="utf-8") as file:
            write_llmc_files(work, json.load(file))
        subjects["llm.c, CPU program (gcc -Ofast, OpenMP)"] = lambda: llmc(f"{folder}/train_gpt2", work, steps)

    seconds = {name: [] for name in subjects}
    for r in range(rounds):
        for name, measure in list(subjects.items()):
            busy = os.getloadavg()[0]
            try:
                seconds[name].append(measure())
            except subprocess.TimeoutExpired:
                del subjects[name]
                print(f"round {r + 1}: {name}: more than {limit} s, left out from now on (LIMIT=)", file=sys.stderr)
                continue
            print(f"round {r + 1}: {name}: {seconds[name][-1]:.4f} s a step (load average before it {busy:.1f})", file=sys.stderr)
    print(f"{os.path.basename(job[0])}, batch {job[1]} x {job[2]}; median of {rounds} rounds of {steps} steps, in turn\n")
    print("| | seconds a step | of each round | times ours | of the best rounds |\n| --- | --- | --- | --- | --- |")
    for name, all_rounds in seconds.items():
        if not all_rounds:
            print(f"| {name} | more than {limit} s for {steps} steps, with what comes before them | | | |")
            continue
        # Ours of the same type, or of the type that llm.c has.
        base = seconds.get(f"llm.cu, {DTYPES['bf16'] if ', bf16' in name else DTYPES['fp32']}") or seconds[next(iter(seconds))]
        median = statistics.median(all_rounds)
        print(f"| {name} | {median:.4f} | {', '.join(f'{s:.4f}' for s in all_rounds)} | {median / statistics.median(base):.2f} "
              f"| {min(all_rounds) / min(base):.2f} |")
    if len(dtypes) == 2:
        one, other = (seconds[f"llm.cu, {DTYPES[dtype]}"] for dtype in ("bf16", "fp32"))
        print(f"\nOur bf16 step takes {min(one) / min(other):.2f} of our float32 step (best rounds).")
    print(flush=True)


def main():
    end_on_signals()
    if sys.argv[1:] == ["--help"]:
        show_usage(__doc__)
    build = os.path.join(ROOT, sys.argv[1] if len(sys.argv) > 1 else "build/cpu")
    asked = {name: os.environ.get(name, default) for name, default in
             (("LLM_PYTHON", ""), ("LLMC", ""), ("ROUNDS", "3"), ("STEPS", "8"), ("MODEL", ""), ("DTYPES", "fp32,bf16"),
              ("LIMIT", "240"))}
    rounds, steps, limit = (whole_number(name, asked[name]) for name in ("ROUNDS", "STEPS", "LIMIT"))
    steps, model = min(18, steps), asked["MODEL"]
    wanted = asked["DTYPES"].split(",")
    if not set(wanted) <= set(DTYPES):
        refuse(f"DTYPES={asked['DTYPES']}: give fp32, bf16 or fp32,bf16")
    dtypes = [dtype for dtype in DTYPES if dtype in wanted]
    if not os.path.exists(f"{build}/dev/bench_cpu"):
        refuse(f"there is no {build}/dev/bench_cpu: `make bench-cpu` builds it")
    jobs = [(os.path.abspath(model) if os.path.exists(model) else model, BATCH, SEQ)] if model else JOBS
    for job in jobs:
        with tempfile.TemporaryDirectory() as work:
            compare(job, rounds, steps, dtypes, build, asked["LLM_PYTHON"], asked["LLMC"], limit, work)


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"bench_cpu: {error}")
