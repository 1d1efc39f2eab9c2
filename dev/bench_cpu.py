#!/usr/bin/env python3
"""dev/bench_cpu.py: our training step on a CPU compared with PyTorch's and llm.c's, alternating, on the same machine.

    make bench-cpu LLM_PYTHON=python3 LLMC=path/to/llm.c

A training step of GPT-2 124M in float32, batch 4 x 64, which is what llm.c's CPU program does. Each round runs every opponent once,
as a process of its own, and takes the median of its steps; the table has the median of the rounds. The programs alternate because
the speed of a machine changes from minute to minute: the ratio of two programs is more reliable than either time.

In the environment, or after `make bench-cpu`:
    LLM_PYTHON=     the Python that has PyTorch: eager, and torch.compile       (none: PyTorch is left out)
    LLMC=           the folder of llm.c's source; its train_gpt2 is built there (none: llm.c is left out)
    ROUNDS=3        rounds
    STEPS=8         timed steps of each program in a round, after at least one more; at most 18
    MODEL=gpt2      a GPT-2: a preset, or a config.json
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

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BATCH, SEQ = 4, 64


def output_of(command, **options):
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, stdin=subprocess.DEVNULL, **options)
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode} of {' '.join(command)}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout


# ---- the opponents: each function returns the seconds of one step

def ours(build, model, steps):
    out = output_of([f"{build}/dev/bench_cpu", "--model", model, "--steps", str(steps)])
    return float(re.search(r"^step +([0-9.]+) s", out, re.M).group(1))


def pytorch(python, config, steps, compiled):
    out = output_of([python, "dev/bench_torch.py", "train", "--config", config, "--batch", str(BATCH), "--seq", str(SEQ),
                     "--dtype", "fp32", "--compile", "full" if compiled else "", "--steps", str(steps)])
    tokens_per_s = next(line.split("\t")[4] for line in out.splitlines() if line.startswith("train\t"))
    return BATCH * SEQ / float(tokens_per_s)


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


def main():
    build = os.path.join(ROOT, sys.argv[1] if len(sys.argv) > 1 else "build/cpu")
    asked = {name: os.environ.get(name, default) for name, default in
             (("LLM_PYTHON", ""), ("LLMC", ""), ("ROUNDS", "3"), ("STEPS", "8"), ("MODEL", "gpt2"))}
    rounds, steps, model = max(1, int(asked["ROUNDS"])), min(18, max(1, int(asked["STEPS"]))), asked["MODEL"]
    if os.path.exists(model):
        model = os.path.abspath(model)
    with tempfile.TemporaryDirectory() as work:
        config = os.path.join(work, "config.json")
        with open(config, "w", encoding="utf-8") as file:
            file.write(output_of([f"{build}/dev/bench_report", "config", model]))
        subjects = {"llm.cu": lambda: ours(build, model, steps)}
        if asked["LLM_PYTHON"]:
            version = output_of([asked["LLM_PYTHON"], "-c", "import torch; print(torch.__version__)"]).strip()
            subjects[f"PyTorch {version}, eager"] = lambda: pytorch(asked["LLM_PYTHON"], config, steps, False)
            subjects[f"PyTorch {version}, torch.compile"] = lambda: pytorch(asked["LLM_PYTHON"], config, steps, True)
        if asked["LLMC"]:
            folder = os.path.abspath(asked["LLMC"])
            output_of(["make", "-C", folder, "train_gpt2", "CC=gcc"], env={k: v for k, v in os.environ.items() if "MAKE" not in k})
            with open(config, encoding="utf-8") as file:
                write_llmc_files(work, json.load(file))
            subjects["llm.c, CPU program (gcc -Ofast, OpenMP)"] = lambda: llmc(f"{folder}/train_gpt2", work, steps)

        seconds = {name: [] for name in subjects}
        for r in range(rounds):
            for name, measure in subjects.items():
                busy = os.getloadavg()[0]
                seconds[name].append(measure())
                print(f"round {r + 1}: {name}: {seconds[name][-1]:.3f} s a step (load average before it {busy:.1f})", file=sys.stderr)
    print(f"GPT-2 ({os.path.basename(model)}), float32, batch {BATCH} x {SEQ}; median of {rounds} rounds of {steps} steps, in turns\n")
    print("| | seconds a step | of each round | times ours |\n| --- | --- | --- | --- |")
    first = statistics.median(seconds["llm.cu"])
    for name, all_rounds in seconds.items():
        median = statistics.median(all_rounds)
        print(f"| {name} | {median:.3f} | {', '.join(f'{s:.3f}' for s in all_rounds)} | {median / first:.2f} |")


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"bench_cpu: {error}")
