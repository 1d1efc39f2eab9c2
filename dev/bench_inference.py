#!/usr/bin/env python3
"""dev/bench_inference.py: the engine of inference/ compared with transformers' generate(), alternating, on the same machine.

    make bench-inference LLM_PYTHON=python3

GPT-2 124M with random weights in float32, greedy. One sequence: 16 tokens of prompt, 64 more. Many: requests of mixed lengths, for
transformers in padded batches of the size in BATCHES that is the fastest. Each round runs every opponent once; the table has the
median of the rounds.

In the environment, or after `make bench-inference`:
    LLM_PYTHON=     the Python that has PyTorch and transformers
    ROUNDS=3        rounds
    REQUESTS=64     requests of mixed lengths
    BATCHES=8,16,32 sizes of transformers' batches
"""
import os
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKENS = 64

# Run by LLM_PYTHON: reads commands from stdin, answers each with a number of tokens per second.
OPPONENT = r"""
import sys, time, torch, transformers
transformers.logging.set_verbosity_error()
torch.set_num_threads(len(__import__("os").sched_getaffinity(0)))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0

def generate(prompts, n):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False)

print(f"PyTorch {torch.__version__}, transformers {transformers.__version__}", flush=True)
for line in sys.stdin:
    kind, *arguments = line.split()
    with torch.inference_mode():
        if kind == "one":
            prompt = list(range(1, 17))
            start = time.perf_counter()
            generate([prompt], 1)
            first = time.perf_counter()
            generate([prompt], int(arguments[0]) + 1)
            print(int(arguments[0]) / (time.perf_counter() - first - (first - start)), flush=True)
        else:
            requests = [[int(x) for x in row.split()] for row in open(arguments[1])]
            size, start = int(arguments[0]), time.perf_counter()
            for i in range(0, len(requests), size):
                batch = requests[i:i + size]
                generate([r[1:] for r in batch], max(r[0] for r in batch))
            print(sum(r[0] for r in requests) / (time.perf_counter() - start), flush=True)
"""

MAKE_MODEL = r"""
import sys, torch, transformers
torch.manual_seed(1)
transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(sys.argv[1])
"""


def output_of(command):
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode} of {command[0]}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout


def rates(out):
    """Tokens per second that bench_inference prints."""
    found = dict(re.findall(r"^(one sequence|static batches|continuous) +([\d.]+) tok/s", out, re.M))
    return {name: float(value) for name, value in found.items()}


def main():
    build = os.path.join(ROOT, sys.argv[1] if len(sys.argv) > 1 else "build/cpu")
    python, n_rounds = os.environ["LLM_PYTHON"], int(os.environ.get("ROUNDS", "3"))
    requests, sizes = os.environ.get("REQUESTS", "64"), os.environ.get("BATCHES", "8,16,32").split(",")
    with tempfile.TemporaryDirectory() as work:
        output_of([python, "-c", MAKE_MODEL, work])
        ours = [f"{build}/dev/bench_inference", "--model", work, "--rounds", "1", "--tokens", str(TOKENS), "--requests", requests]
        lengths = os.path.join(work, "requests.txt")
        with open(lengths, "w", encoding="utf-8") as file:
            file.write(output_of(ours + ["--list"]))
        with subprocess.Popen([python, "-c", OPPONENT, work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as opponent:
            def ask(command):
                opponent.stdin.write(command + "\n")
                opponent.stdin.flush()
                return float(opponent.stdout.readline())

            version = opponent.stdout.readline().strip()
            rows = {}
            for r in range(n_rounds):
                measured = rates(output_of(ours))
                measured["transformers, one sequence"] = ask(f"one {TOKENS}")
                for size in sizes:
                    measured[f"transformers, batches of {size}"] = ask(f"many {size} {lengths}")
                for name, value in measured.items():
                    rows.setdefault(name, []).append(value)
                    print(f"round {r + 1}: {name}: {value:.1f} tok/s (load average {os.getloadavg()[0]:.1f})", file=sys.stderr)
            opponent.stdin.close()
    median = {name: statistics.median(values) for name, values in rows.items()}
    best = max((name for name in median if "batches of" in name), key=median.get)
    print(f"GPT-2 124M, float32; median of {n_rounds} rounds in turns; {version}\n")
    print("| | tok/s | times transformers |\n| --- | --- | --- |")
    for name, of in (("one sequence", "transformers, one sequence"), ("static batches", best), ("continuous", best)):
        print(f"| {name} | {median[name]:.1f} | {median[name] / median[of]:.2f} |")
    print(f"| transformers, one sequence | {median['transformers, one sequence']:.1f} | 1 |\n| {best} | {median[best]:.1f} | 1 |")


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"bench_inference: {error}")
