#!/usr/bin/env python3
"""dev/bench_inference.py: the engine of inference/ compared with transformers' generate() and with llama.cpp, alternating, on
the same machine.

    make bench-inference LLM_PYTHON=python3
    make bench-inference LLM_PYTHON=python3 LLAMA_CPP=../llama.cpp     a folder with build/bin/llama-server

GPT-2 124M with random weights in float32, greedy. One sequence: 16 tokens of prompt, 64 more. Many: requests of mixed lengths, for
transformers in padded batches of the size in BATCHES that is the fastest, for llama.cpp in SEQUENCES slots of its server. Each
round runs every opponent once; the table has the median of the rounds.

In the environment, or after `make bench-inference`:
    LLM_PYTHON=     the Python that has PyTorch and transformers
    ROUNDS=3        rounds
    REQUESTS=64     requests of mixed lengths
    SEQUENCES=16    sequences that run at the same time, here and in llama.cpp
    BATCHES=8,16,32 sizes of transformers' batches
    LLAMA_CPP=      the folder of llama.cpp; its server also needs the Python packages of its gguf-py
"""
import concurrent.futures
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from script import ROOT, end_on_signals, output_of, refuse, show_usage, whole_number

TOKENS = 64

# Run by LLM_PYTHON: reads commands from stdin, answers each with a number of tokens per second.
OPPONENT = r"""
import signal, sys, time, torch, transformers
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: without a traceback
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

# The same weights as a file for llama.cpp. Its vocabulary is made up: prompts are ids.
MAKE_GGUF = r"""
import sys
sys.path.insert(0, sys.argv[2] + "/gguf-py")
import gguf, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
c = model.config
writer = gguf.GGUFWriter(sys.argv[1] + "/model.gguf", "gpt2")
writer.add_block_count(c.n_layer)
writer.add_context_length(c.n_positions)
writer.add_embedding_length(c.n_embd)
writer.add_feed_forward_length(4 * c.n_embd)
writer.add_head_count(c.n_head)
writer.add_layer_norm_eps(c.layer_norm_epsilon)
writer.add_file_type(0)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("default")
writer.add_token_list([f"t{i}" for i in range(c.vocab_size)])
writer.add_token_types([1] * c.vocab_size)
writer.add_token_merges(["t 0"])
names = {"wte.": "token_embd.", "wpe.": "position_embd.", "ln_f.": "output_norm.", "ln_1.": "attn_norm.", "ln_2.": "ffn_norm.",
         "attn.c_attn.": "attn_qkv.", "attn.c_proj.": "attn_output.", "mlp.c_fc.": "ffn_up.", "mlp.c_proj.": "ffn_down."}
for name, tensor in model.transformer.state_dict().items():
    conv1d = "c_" in name and name.endswith("weight")
    name = name.replace("h.", "blk.", 1) if name.startswith("h.") else name
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    writer.add_tensor(name, (tensor.T if conv1d else tensor).contiguous().numpy())
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


class LlamaServer:
    """llama.cpp's server on a port of its own, with a cache of float32."""

    def __init__(self, folder, model, n_slots, port=18083):
        self.url = f"http://127.0.0.1:{port}"
        n_cores = len(os.sched_getaffinity(0))
        self.process = subprocess.Popen(
            [f"{folder}/build/bin/llama-server", "-m", model, "-np", str(n_slots), "-c", str(512 * int(n_slots)), "-t", str(n_cores),
             "-ctk", "f32", "-ctv", "f32", "--host", "127.0.0.1", "--port", str(port), "--log-disable"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        until = time.monotonic() + 120
        while True:
            try:
                with self.open(self.url + "/health", timeout=1):
                    return
            except (urllib.error.URLError, OSError):
                if self.process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{folder}/build/bin/llama-server does not start with {model}") from None
                time.sleep(0.2)

    def stop(self):
        self.process.kill()
        self.process.wait()

    def complete(self, prompt, n):
        body = {"prompt": prompt, "n_predict": n, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(self.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with self.open(request, timeout=600) as answer:
            return json.load(answer)

    def one(self, n):
        return self.complete(list(range(1, 17)), n)["timings"]["predicted_per_second"]

    def many(self, requests):
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(lambda row: self.complete(row[1:], row[0]), requests))
        seconds = time.perf_counter() - start
        return sum(answer["tokens_predicted"] for answer in answers) / seconds


def rates(out):
    """Tokens per second that bench_inference prints."""
    found = dict(re.findall(r"^(one sequence|static batches|continuous) +([\d.]+) tok/s", out, re.M))
    return {name: float(value) for name, value in found.items()}


def print_table(rows, n_rounds, version):
    median = {name: statistics.median(values) for name, values in rows.items()}
    best = max((name for name in median if "batches of" in name), key=median.get)
    print(f"GPT-2 124M, float32; median of {n_rounds} rounds in turn; {version}\n")
    print("| | tok/s | times transformers |\n| --- | --- | --- |")
    for theirs, others in (("transformers, one sequence", ("one sequence", "llama.cpp, one sequence")),
                           (best, ("static batches", "continuous", "llama.cpp, many"))):
        for name in median:
            if name in (theirs, *others):
                print(f"| {name} | {median[name]:.1f} | {median[name] / median[theirs]:.2f} |")


def run_rounds(work, build, n_rounds, sizes, ask, llama):
    ours = [f"{build}/dev/bench_inference", "--model", work, "--rounds", "1", "--loads", "0", "--tokens", str(TOKENS),
            "--requests", os.environ.get("REQUESTS", "64"), "--sequences", os.environ.get("SEQUENCES", "16")]
    lengths = os.path.join(work, "requests.txt")
    listed = output_of(ours + ["--list"])
    with open(lengths, "w", encoding="utf-8") as file:
        file.write(listed)
    requests = [[int(x) for x in row.split()] for row in listed.splitlines()]
    rows = {}
    for r in range(n_rounds):
        measured = rates(output_of(ours))
        measured["transformers, one sequence"] = ask(f"one {TOKENS}")
        for size in sizes:
            measured[f"transformers, batches of {size}"] = ask(f"many {size} {lengths}")
        if llama:
            server = LlamaServer(llama, work + "/model.gguf", os.environ.get("SEQUENCES", "16"))
            try:
                measured["llama.cpp, one sequence"] = server.one(TOKENS)
                measured["llama.cpp, many"] = server.many(requests)
            finally:
                server.stop()
        for name, value in measured.items():
            rows.setdefault(name, []).append(value)
            print(f"round {r + 1}: {name}: {value:.1f} tok/s (load average {os.getloadavg()[0]:.1f})", file=sys.stderr)
    return rows


def main():
    end_on_signals()
    if sys.argv[1:] == ["--help"]:
        show_usage(__doc__)
    build = os.path.join(ROOT, sys.argv[1] if len(sys.argv) > 1 else "build/cpu")
    python, llama = os.environ.get("LLM_PYTHON", ""), os.environ.get("LLAMA_CPP", "")
    if not python:
        refuse("LLM_PYTHON must name the Python that has PyTorch and transformers")
    n_rounds = whole_number("ROUNDS", os.environ.get("ROUNDS", "3"))
    sizes = [whole_number("BATCHES", size) for size in os.environ.get("BATCHES", "8,16,32").split(",")]
    if not os.path.exists(f"{build}/dev/bench_inference"):
        refuse(f"there is no {build}/dev/bench_inference: `make bench-inference` builds it")
    with tempfile.TemporaryDirectory() as work:
        output_of([python, "-c", MAKE_MODEL, work])
        if llama:
            output_of([python, "-c", MAKE_GGUF, work, llama])
        with subprocess.Popen([python, "-c", OPPONENT, work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as opponent:
            def ask(command):
                opponent.stdin.write(command + "\n")
                opponent.stdin.flush()
                answer = opponent.stdout.readline()
                if not answer:
                    raise RuntimeError("transformers has ended: its error stands above")
                return float(answer)

            try:
                version = opponent.stdout.readline().strip()
                rows = run_rounds(work, build, n_rounds, sizes, ask, llama)
            finally:
                opponent.kill()
    print_table(rows, n_rounds, version + (", llama.cpp" if llama else ""))


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"bench_inference: {error}")
