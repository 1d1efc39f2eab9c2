#!/usr/bin/env python3
"""dev/readme_commands.py: runs what the pages show, as a newcomer would who types it.

    dev/readme_commands.py              every command of every page                         (make test-readme)
    dev/readme_commands.py --quick      only those that cost a second or two                (make test)
    dev/readme_commands.py --list       every command, and how it is run
    dev/readme_commands.py REGEX        only commands that REGEX is found in

The programs are those of build/cpu. Each command runs in a copy of this folder, in which made-up files stand where a page
names a reader's own (make_inputs below). RULES says of each command which flags it is given in addition, so that it ends
soon, or why it is not run. A command without a rule is a mistake, as is a rule without a command: so no line of a page escapes.
It is also a mistake when a command's exit status is not 0, or when it prints something other than the page shows.

Blocks of a page say what they are:

    ```sh         commands, as bash reads them
    ```console    "$ command", and what it prints (if the page shows that). A line "..." stands for any lines. After "$ gdb ..."
                  come the commands of a session, "(gdb) next": it is replayed, and its source lines and values are compared
    ```cpp, text  neither

Commands in `code` within a sentence are run, too. Figures that depend on the machine are those of MACHINE, in what a program
prints; in sentences and tables they have a date or the name of a processor beside them, and nothing here looks at them.
Other numbers of sentences and tables are compared if a rule quotes them (Rule.quotes).
"""
import argparse
import functools
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

from script import ROOT, end_on_signals, read

LANGUAGES = ("sh", "console", "cpp", "text")
SECONDS = 900  # that a command may take

# ---- the rules

# What ./train_gpt is given in addition, or in place of what the page says.
SMALL = "--steps 2 --warmup 1 --sample 0 --val-sequences 4"
GPT2 = "--batch 1 --seq 16 --steps 1 --warmup 1 --sample 0 --val-sequences 1"  # 124M parameters: a step of 16 tokens
# For mpirun in a container with few cores: the page says so, and has the line with the flags.
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
       "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}  # Open MPI 5


# A server in the background, until it answers; and its end, with its exit status.
PORT = "port=$((20000 + RANDOM % 10000)); "
STARTED = "--port $port > server.log & until curl -sf 127.0.0.1:$port/health > server.health; do kill -0 $! || exit 1; sleep 0.1; done; "
STOPPED = " && kill $! && wait $!"

@dataclass
class Rule:
    pattern: str                                 # the beginning of a command, or all of it with a $ at the end
    flags: str = ""                              # ./train_gpt gets these, in place of the same flags of the page
    replace: tuple = ()                          # ((regex, replacement), ...)
    env: dict = field(default_factory=dict)
    needs: tuple = ()                            # programs without which it cannot run
    skip: str = ""                               # why it is not run
    status: int = 0                              # exit status, or minus a signal
    quick: bool = False                          # cheap enough for make test
    compiler: bool = False                       # its numbers are those of the compiler's C++ headers
    cores: bool = False                          # all cores instead of one
    quotes: tuple = ()                           # ((regex of the page, regex of the output), ...): their groups are equal


def train(pattern, flags=SMALL, **how):
    return Rule(r"\./train_gpt " + pattern, flags=flags, **how)


BYTES_SENT = ((r"\| ([\d,]+) \| 1", r"sent in a step +\d+ +(\d+)"),)

RULES = [
    # README.md
    Rule(r"\./install\.sh && make$"),
    Rule(r"\./train_gpt$", cores=True, compiler=True),
    train("--data layers/"),
    train("--dtype bf16 --optimizer muon"),
    train("--ranks 4 --zero 3 --steps 100"),
    train("--plan --model llama-8b", flags="", quick=True),
    Rule(r'\./generate --prompt "template <class T> class " --tokens', compiler=True),  # with the run that this has left
    Rule(r"make$"),
    Rule(r"make doctor$"),
    # CONTRIBUTING.md
    Rule(r"make format$", needs=("clang-format",)),
    Rule(r"make house-check$"),  # test/test_sources.cu runs its scripts
    Rule(r"make DEVICE=cuda", skip="needs nvcc, and compiles everything; .ci/run does so where nvcc is"),
    Rule(r"make (docs|flags)$", skip="it writes the pages that are compared here"),
    Rule(r"make DEVICE=cpu build/cpu/run_tests && build/cpu/run_tests", replace=((r"\[NAME\]", "[gelu]"),)),
    Rule(r"build/cpu/run_tests"),
    Rule(r"test/golden/runs/runs\.py check", replace=((" check ", " check --quick "),)),
    Rule(r"test/golden/runs/runs\.py record", skip="it records a run that does not exist yet"),
    # doc/checks.md
    Rule(r"make( DEVICE=cpu)? test$", skip="it runs this program"),
    Rule(r"make test-readme$", skip="it is this program"),
    Rule(r"make test-ranks$", skip="takes half an hour"),
    Rule(r"make (sanitize|fuzz)$", skip="compiles everything anew, for minutes; .ci/run runs the sanitizers"),
    Rule(r"CUDA_CPU_STRICT=1 build/cpu/run_tests", replace=((r"\[NAME\]", "[gelu]"),)),
    # doc/compression.md
    Rule(r"for c in none bf16", flags=SMALL, quotes=BYTES_SENT),
    Rule(r"build/cpu/dev/plot_runs", replace=(("plot_runs", "plot_runs --smooth 1"),)),
    # doc/debugging.md, cpu/README.md, dev/README.md
    Rule(r"make debug$", skip="compiles everything anew, for minutes; with FILES it is run"),
    Rule(r"make debug FILES="),
    Rule(r"gdb .* build/cpu-debug/dev/reduce --check --rung 3$", needs=("gdb",), quick=True),
    Rule(r"gdb .* build/cpu-debug/dev/softmax", needs=("gdb",), replace=(("^gdb ", "gdb -batch -ex run "),)),
    Rule(r"gdb .* build/cpu-debug/train_gpt --steps 2$", needs=("gdb",),
         replace=(("^gdb ", "gdb -batch -ex run "), ("train_gpt", "train_gpt --sample 0 --val-sequences 4"))),
    Rule(r"gdb .* build/cpu-debug/train_gpt --data LICENSE", needs=("gdb",)),
    Rule(r"CUDA_CPU_STRICT=1 \./train_gpt", flags=SMALL + " --batch 2 --seq 16"),
    Rule(r"(CUDA_CPU_STRICT=1 )?build/cpu/wrong_kernels \w+ wrong", status=-signal.SIGABRT, quick=True),
    # dev/README.md
    Rule(r"make dev$"),
    Rule(r"build/cuda/dev/softmax", replace=(("build/cuda", "build/cpu"), ("softmax$", "softmax --size 100x1000"),
                                             ("4000x8192", "40x8192"), ("--rung 4", "--rung 4 --size 100x1000"))),
    Rule(r"build/cpu/dev/softmax --check", quick=True),
    Rule(r"CUDA_CPU_STRICT=1 build/cpu/dev/reduce --check", quick=True),
    # doc/inference.md; a server is ended when it answers, and one is started for each command that asks it.
    Rule(r"\./generate --serve", needs=("curl",),
         replace=((r"\A", PORT + f"[ -d runs ] || ./train_gpt {SMALL} > /dev/null; "), (r"\Z", " " + STARTED + "true" + STOPPED))),
    Rule(r"\./generate --model gpt2 --serve", needs=("curl",), replace=((r"\A", PORT), (r"--port 8000$", STARTED + "true" + STOPPED))),
    Rule(r"curl ", needs=("curl",), replace=((":8000", ":$port"), (r"\A", PORT + "./generate --model gpt2 --serve " + STARTED),
                                             (r"\Z", STOPPED))),
    Rule(r"\./generate --model gpt2 --plan", replace=(("512", "32"),), quick=True),  # of the small GPT-2 here
    Rule(r"\./generate --model gpt2 --chat", replace=(("^", "echo Hello | "),), quick=True),
    Rule(r"\./generate --model gpt2 --tp", replace=(("--tp 2", "--tp 3"),), quick=True),  # the small GPT-2 has 3 heads
    Rule(r"\./generate --model gpt2", quick=True),
    Rule(r"make bench-inference LLM_PYTHON", skip="needs PyTorch, transformers and llama.cpp"),
    Rule(r"make bench-inference$", skip="takes minutes with GPT-2 124M; the next one is the same with a small model"),
    Rule(r"build/cpu/dev/bench_inference --sequences 8 --loads", skip="takes six minutes with GPT-2 124M"),
    Rule(r"build/cpu/dev/bench_inference"),
    Rule(r"sed 's/\"num_hidden_layers", replace=(("^", f"[ -d runs ] || ./train_gpt {SMALL} > /dev/null; "), ("00001000", "00000002"))),
    train("--model draft.json"),
    Rule(r"\./generate --model runs/1 --(draft|lookup)"),
    Rule(r"\./generate --prompt", replace=(("^", f"[ -d runs ] || ./train_gpt {SMALL} > /dev/null; "),)),
    # doc/memory.md
    train("--plan", flags="", quick=True),
    train("--offload"),
    Rule(r"build/cpu/dev/recompute recompute\.png", replace=((r"\.png", ".png --steps 1"),),
         quotes=((r"N = 1, 2, 6 and 18 take ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) of",
                  r"(?s)\n1 +\d+ +\d+ +(\S+).*\n2 +\d+ +\d+ +(\S+).*\n6 +\d+ +\d+ +(\S+).*\n18 +\d+ +\d+ +(\S+)"),
                 (r"`selective` ([\d.]+);", r"\nselective +\d+ +\d+ +(\S+)"))),
    # doc/models.md
    train("--data book"),
    train("--data my_text/"),
    train("--model gpt2 --tokenizer", flags=GPT2),
    train("--init gpt2", flags=GPT2),
    train("--model gpt2 --data 'fineweb_train", flags=GPT2),
    # doc/precision.md
    train("--dtype"),
    Rule(r"train\(\)", flags=SMALL),  # a function of the lines that follow
    Rule(r"train |for recipe in"),
    Rule(r"build/cpu/dev/float_formats --gradients", compiler=True,
         quotes=((r"fp16 makes ([\d.]+) % zero and keeps (\d+) %", r"activations +1 +([\d.]+) % +([\d.]+) %"),
                 (r"([\d.]+) % become zero", r"activations +2\^19 +([\d.]+) %"))),
    Rule(r"build/cpu/dev/float_formats", quick=True),
    # doc/ranks.md
    train("--ranks 8 --zero 2"),
    train("--ranks 4 --trace 2", flags="--sample 0 --val-sequences 4"),
    train("--ranks 3 --zero 3 --batch 15", flags="", quick=True),
    train("--ranks 4 --tp 4$", quick=True),
    train("--ranks 8 --tp 4 --zero 1"),
    train("--ranks 4 --tp 4 --sp"),
    train("--ranks 4 --tp 4 --tp-mode 2d", quick=True),
    train("--ranks 8 --tp 8 --tp-mode"),
    Rule(r"build/cpu/dev/tensor_overlap", quick=True),
    Rule(r"build/cpu/dev/tensor_layouts tensor_layouts\.png", quick=True),
    train("--ranks 4 --cp 4$", quick=True),
    train("--ranks 4 --cp 4 --cp-mode ulysses"),
    train("--ranks 8 --cp 2 --tp 2 --zero 1"),
    Rule(r"build/cpu/dev/context_parallel doc/context\.png", replace=((r"doc/", ""),), quick=True),
    # doc/pipelines.md, README.md
    Rule(r"echo '\{\"model_type\": \"llama\"", quick=True),
    train("--ranks 4 --pp 4 --pipeline zb-h1", replace=(("--trace 50", "--trace 2"),)),
    Rule(r"\./train_gpt --pipeline .* --draw", quick=True),
    Rule(r"mpirun --host a:2,b:2", skip="needs two hosts"),
    Rule(r"mpirun -np 8", flags=SMALL, env=MPI, needs=("mpirun",)),
    Rule(r"mpirun --allow-run-as-root --oversubscribe -np 8", flags=SMALL, needs=("mpirun",)),
    Rule(r"build/cpu/dev/all_reduce", replace=(("$", " --ranks 2 --max 1024 --out out"),)),
    # doc/speed.md
    Rule(r"make bench-cpu LLM_PYTHON", skip="needs PyTorch and llm.c"),
    Rule(r"make bench-cpu$", cores=True),
    Rule(r"\./train_gpt --account"),
    Rule(r"make account$", skip="writes dev/ACCOUNT.md; test/test_step_account.cu compares it"),
    Rule(r"make (count|gpu-choices)$", skip="compiles all kernels again"),
    Rule(r"make (gpu-check|bench|profile|gpu-window)$", skip="takes minutes at toy sizes, too; test/test_harness.cu runs it"),
    Rule(r"make gpu-bundle$", skip="needs the network"),
    # doc/flags.md
    train("--help", flags="", quick=True),
    Rule(r"\./generate --help$", quick=True),
]

# Figures of the machine in what programs print: (regex, what stands for it).
MACHINE = [
    (r"CPU device \(.*?\)(?=$|\n)", "CPU device (...)"),
    (r" *[\d.]+[kM]? tok/s", " ... tok/s"),
    (r" *[\d.]+ ?% of matmul peak", " ...% of matmul peak"),
    (r"\|[^|\n]* left\b", "| ... left"),
    (r"done in [^:\n]*:", "done in ...:"),
]

# ---- commands of a page


@dataclass
class Command:
    page: str
    line: int
    text: str
    shown: str = None   # what the page says that it prints
    block: int = 0      # line of its block
    before: str = ""    # functions that its block has defined

    @property
    def where(self):
        return f"{self.page}:{self.line}"

    @property
    def key(self):
        """The command without its comments."""
        return re.sub(r"\s+# .*$", "", self.text, flags=re.M).strip()


def pages():
    found = ["README.md", "CONTRIBUTING.md", "cpu/README.md", "dev/README.md"]
    return found + sorted("doc/" + name for name in os.listdir(os.path.join(ROOT, "doc")) if name.endswith(".md"))


def blocks(text):
    """(line of its first line, language, text) of each block."""
    for block in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, flags=re.M):
        yield text.count("\n", 0, block.start()) + 2, block.group(1), block.group(2)


def is_complete(text):
    return subprocess.run(["bash", "-n", "-c", text], stderr=subprocess.DEVNULL).returncode == 0


def commands_of_sh(page, line, text):
    pending, start, functions = "", line, ""
    for i, row in enumerate(text.splitlines()):
        if not pending:
            start = line + i
        pending += row + "\n"
        if pending.strip() and is_complete(pending):
            command = Command(page, start, pending.rstrip("\n"), block=line, before=functions)
            yield command
            if re.match(r"\w+\(\)", pending) and rule_of(command):
                functions += with_flags(pending, rule_of(command).flags)
            pending = ""
    if pending.strip():
        raise SystemExit(f"{page}:{start}: bash waits for the rest of this command")


def commands_of_console(page, line, text):
    command = None
    for i, row in enumerate(text.splitlines(keepends=True)):
        if row.startswith("$ "):
            if command:
                yield command
            command = Command(page, line + i, row[2:].rstrip("\n"), shown="", block=line)
        elif command:
            command.shown += row
        else:
            raise SystemExit(f"{page}:{line + i}: a console block begins with \"$ command\"")
    if command:
        yield command


def commands_of_sentences(page, text):
    """Commands in `code`; a name of a program alone, or of a file, is none."""
    prose = re.sub(r"^```(?:.*\n)*?```$", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.M)
    command = re.compile(r"(\w+=\S+ )*(\./\w+ |build/\w+/|make( |$)|mpirun |gdb |(dev|test)/\S+\.(py|sh) )")
    for code in re.finditer(r"`([^`\n]+)`", prose):
        if command.match(code.group(1)) and not code.group(1).endswith("/"):
            yield Command(page, prose.count("\n", 0, code.start()) + 1, code.group(1))


def commands(page):
    """Every command of a page; what is wrong with its blocks."""
    text = read(page)
    found, wrong = [], []
    for line, language, body in blocks(text):
        if language not in LANGUAGES:
            wrong.append(f"{page}:{line - 1}: the block says \"{language}\"; say one of {', '.join(LANGUAGES)}")
        elif language == "sh":
            found += commands_of_sh(page, line, body)
        elif language == "console":
            found += commands_of_console(page, line, body)
        elif re.search(r"^(\$ |\./|make |build/)", body, flags=re.M):
            wrong.append(f"{page}:{line}: there is a command in a block of {language}")
    return found + list(commands_of_sentences(page, text)), wrong


def rule_of(command):
    return next((rule for rule in RULES if re.match(rule.pattern, command.key)), None)


# ---- the copy in which commands run

def make_tokenizer(path):
    """A tokenizer.json like GPT-2's with the 256 bytes and a few merges; how many tokens it has."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable}
    letters.update({b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)})
    space = letters[32]
    merges = [("t", "h"), ("th", "e"), (space, "the"), (space, "a"), ("i", "n"), ("o", "r")]
    vocab = sorted(letters.values()) + ["".join(pair) for pair in merges] + ["<|endoftext|>"]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"version": "1.0",
                   "added_tokens": [{"id": len(vocab) - 1, "content": "<|endoftext|>", "single_word": False, "lstrip": False,
                                     "rstrip": False, "normalized": False, "special": True}],
                   "normalizer": None,
                   "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
                   "post_processor": None,
                   "decoder": {"type": "ByteLevel"},
                   "model": {"type": "BPE", "unk_token": None, "vocab": {token: i for i, token in enumerate(vocab)},
                             "merges": [" ".join(pair) for pair in merges]}}, file)
    return len(vocab)


def make_gpt2(folder, n_tokens):
    """The small GPT-2 of test/golden/gpt2 with as many tokens as the tokenizer: its table of embeddings, repeated."""
    golden = os.path.join(ROOT, "test/golden/gpt2")
    with open(os.path.join(golden, "config.json"), encoding="utf-8") as file:
        config = dict(json.load(file), vocab_size=n_tokens)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    with open(os.path.join(golden, "model.safetensors"), "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        header, data = json.loads(file.read(size)), file.read()
    tensors, weights = {}, b""
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        values, shape = data[begin:end], tensor["shape"]
        if name.endswith("wte.weight"):
            row = len(values) // shape[0]
            values, shape = (values * (n_tokens // shape[0] + 1))[:n_tokens * row], [n_tokens, shape[1]]
        tensors[name] = dict(tensor, shape=shape, data_offsets=[len(weights), len(weights) + len(values)])
        weights += values
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + weights)


def make_inputs(folder):
    """What the pages name and a reader has: texts, token shards, the Hugging Face folder of a GPT-2 (a small one)."""
    text = "".join(read(page) for page in pages())
    os.makedirs(os.path.join(folder, "data"))
    os.makedirs(os.path.join(folder, "my_text"))
    for name in ("book.txt", "data/tinyshakespeare.txt", "my_text/one.txt", "my_text/two.txt"):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text[: len(text) // 8] if name == "book.txt" else text)  # each token of a book is evaluated
    for shard in (1, 2):
        with open(os.path.join(folder, f"fineweb_train_{shard:06}.bin"), "wb") as file:
            ids = [50256] + [i * 7919 % 50000 for i in range(2000)]
            file.write(struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253) + struct.pack(f"<{len(ids)}H", *ids))
    with open(os.path.join(folder, "prompts.jsonl"), "w", encoding="utf-8") as file:
        file.write('{"prompt": "Once upon a time"}\n{"prompt": "The end", "tokens": 5, "samples": 2}\n')
    os.makedirs(os.path.join(folder, "gpt2"))
    make_gpt2(os.path.join(folder, "gpt2"), make_tokenizer(os.path.join(folder, "gpt2/tokenizer.json")))


class Tree:
    """A copy of this folder without what git ignores; the builds are this folder's own."""

    def __enter__(self):
        self.temporary = tempfile.TemporaryDirectory(prefix="llm-readme-")
        self.folder = os.path.join(self.temporary.name, "llm.cu")
        # Only in the root: test/golden/runs is ours.
        left_out = {".git", "build", "runs", "gpu-bundle", "train_gpt", "generate", "data", "llm.c"}
        shutil.copytree(ROOT, self.folder, symlinks=True,
                        ignore=lambda path, names: {"__pycache__"} | (left_out if path == ROOT else set()))
        os.symlink(os.path.join(ROOT, "build"), os.path.join(self.folder, "build"))
        for program in ("train_gpt", "generate"):
            os.symlink(f"build/cpu/{program}", os.path.join(self.folder, program))
        make_inputs(self.folder)
        return self

    def __exit__(self, *_):
        self.temporary.cleanup()

    def bash(self, text, env={}, cores=False):
        """Exit status and output of a command line."""
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(("CUDA_CPU_", "LLM_", "MAKE", "MFLAGS")) and name != "OMP_NUM_THREADS"}
        environment.update({"CUDA_CPU_EXACT": "1", **env}, DEVICE="cpu", **({} if cores else {"OMP_NUM_THREADS": "1"}))
        process = subprocess.Popen(["bash", "-e", "-o", "pipefail", "-c", text], cwd=self.folder, env=environment, text=True,
                                   errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.communicate(timeout=SECONDS)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0] + f"\nstopped after {SECONDS} s\n", 124
        except BaseException:  # a signal, as Ctrl-C, that main has made an exception
            os.killpg(process.pid, signal.SIGKILL)
            raise

    @functools.cached_property
    def has_the_text(self):
        """Are the C++ headers here, which ./train_gpt learns from, those of README.md?"""
        out, _ = self.bash("./train_gpt --steps 1 --batch 1 --seq 8 --sample 0 --val-sequences 1 --out text")
        return re.search(r"^data .*?tokens", out, flags=re.M).group(0) in read("README.md")


# ---- running

def with_flags(text, flags):
    """The command with ./train_gpt's flags replaced or added."""
    pairs = re.findall(r"(--\S+) (\S+)", flags)
    for flag, value in pairs:
        text, n = re.subn(rf"{flag} \S+", f"{flag} {value}", text)
        if n == 0:
            text = re.sub(r"\./train_gpt\b", f"./train_gpt {flag} {value}", text)
    return text


def line_to_run(command, rule):
    text = with_flags(command.key, rule.flags)
    for pattern, by in rule.replace:
        text = re.sub(pattern, by, text, count=1)
    return command.before + text


def printed(command, rule, tree):
    """(output, exit status); lines without the blanks at their ends."""
    out, status = tree.bash(line_to_run(command, rule), rule.env, rule.cores)
    return re.sub(r"[ \t]+$", "", out, flags=re.M), status


def without_machine(text):
    for pattern, by in MACHINE:
        text = re.sub(pattern, by, text)
    return text


def difference(shown, out):
    """The first line of the page that the program does not print there, or None. A line "..." stands for any lines."""
    wanted, lines = without_machine(shown).splitlines(), without_machine(out).splitlines()
    at, i, free = 0, 0, False
    while i < len(wanted):
        if wanted[i].strip() == "...":
            i, free = i + 1, True
            continue
        end = next((j for j in range(i, len(wanted)) if wanted[j].strip() == "..."), len(wanted))
        part = wanted[i:end]
        if free:
            # The last part is the end of the output; others may stand anywhere after the part before.
            starts = [len(lines) - len(part)] if end == len(wanted) else range(at, len(lines) - len(part) + 1)
            start = next((s for s in starts if s >= at and lines[s:s + len(part)] == part), None)
            if start is None:
                near = next((s for s in range(at, len(lines)) if lines[s] == part[0]), None)
                if near is None:
                    return f"has   {part[0]}\n  which is not printed after what stands before"
                start = near
        else:
            start = at
        for j, line in enumerate(part):
            got = lines[start + j] if start + j < len(lines) else "(nothing)"
            if got != line:
                return f"has   {line}\n  wants {got}"
        at, i, free = start + len(part), end, False
    if not free and at < len(lines):
        return f"ends, and there follows   {lines[at]}"
    return None


def misquotes(command, rule, out):
    """Numbers of the page, outside of blocks, that the output has otherwise."""
    wrong = []
    for in_page, in_output in rule.quotes:
        shown, now = numbers(in_page, read(command.page)), numbers(in_output, out)
        if not shown or len(shown) != len(now) or any(a != rounded_like(b, a) for a, b in zip(shown, now)):
            wrong.append(f"the page says {shown}, the program {now} ({in_page})")
    return wrong


def numbers(pattern, text):
    """What the groups of the pattern match, wherever it does, without the commas of thousands."""
    return [n.replace(",", "") for match in re.finditer(pattern, text) for n in match.groups()]


def rounded_like(number, like):
    """0.1234 as 0.12 where the page has two digits after the point."""
    return f"{float(number):.{len(like.partition('.')[2])}f}" if "." in number else number


def missing(rule):
    return [name for name in rule.needs if not shutil.which(name)]


def run(command, rule, tree):
    """What is wrong with it: a list of sentences."""
    if command.shown and command.key.startswith("gdb "):
        return session_differs(command, tree)
    out, status = printed(command, rule, tree)
    if status != rule.status:
        return [f"exit status {status}:\n" + "\n".join(out.splitlines()[-15:])]
    if rule.compiler and not tree.has_the_text:
        print(f"  {command.where}: the C++ headers here are another text than README.md's: the numbers are not compared")
        return []
    differs = command.shown and difference(command.shown, out)
    wrong = [f"prints something else (`make docs` may write it again):\n  {differs}"] if differs else []
    return wrong + misquotes(command, rule, out)


# ---- the debugger's sessions

def replay(command, tree):
    """The session as it is now: the same commands, and what gdb answers. What the program prints is left out."""
    arguments = command.key.split()[1:]
    script = ["set confirm off", "set width 0", "set style enabled off", "set print frame-arguments presence",
              "set inferior-tty /dev/null"]
    for line in re.findall(r"^\(gdb\) (.*)$", command.shown, re.M):
        script += [f"echo (gdb) {line}\\n", line]
    argv = ["gdb", "-batch", *arguments[:2]]
    for line in script:
        argv += ["-ex", line]
    done = subprocess.run(argv + arguments[2:], cwd=tree.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          stdin=subprocess.DEVNULL, timeout=SECONDS)
    noise = re.compile(r"^(\[Thread debugging|Using host libthread_db|\[New Thread|\[Switching|\[Thread 0x|\[Detaching|"
                       r"File\(s\) .* will be skipped|warning:|\[Inferior)")
    lines = [line for line in done.stdout.split("\n") if not noise.match(line)]
    start = next((i for i, line in enumerate(lines) if line.startswith("(gdb)")), 0)
    return "\n".join(lines[start:]).rstrip("\n") + "\n"


def debugged_program(command):
    return re.search(r"--args (\S+)", command.key).group(1)


def facts(session):
    """What must be true of a session on any compiler and gdb: the commands, the source lines shown, the values printed."""
    kept = re.compile(r"^(\(gdb\) .*|\d+\t.*|\$\d+ = .*|kernel .*|  block .*)$", re.M)
    return [line.rstrip() for line in kept.findall(session)]


def session_differs(command, tree):
    if not os.path.exists(os.path.join(ROOT, debugged_program(command))):
        return [f"{debugged_program(command)} does not exist: the page says how to build it"]
    shown, now = facts(command.shown), facts(replay(command, tree))
    for i in range(max(len(shown), len(now))):
        has, wants = (lines[i] if i < len(lines) else "(nothing)" for lines in (shown, now))
        if has != wants:
            return [f"the session has changed; `make docs` writes it again\n  has   {has}\n  wants {wants}"]
    return []


def source_lines_differ(command):
    """Lines "83<tab>text" of a session that are not line 83 of the file that the session has stopped in."""
    wrong, source, path = [], [], ""
    for row in command.shown.splitlines():
        at = re.search(r" at (\S+\.cu):\d+$", row)
        if at:
            path = at.group(1)
            source = read(path).splitlines()
        numbered = re.match(r"(\d+)\t(.*)", row)
        if numbered and (source + [""] * 10000)[int(numbered.group(1)) - 1] != numbered.group(2):
            wrong.append(f"{command.where}: line {numbered.group(1)} of {path} has changed; `make docs` writes it again\n"
                         f"  has   {numbered.group(2)}")
    return wrong


# ---- for dev/docs.py

def refreshed(page, tree):
    """The page with what its commands print now. Blocks with "..." are left as they are: a person has chosen their lines."""
    text = read(page)
    for command in commands(page)[0]:
        rule = rule_of(command)
        if not command.shown or rule is None or rule.skip or missing(rule) or re.search(r"^ *\.\.\.$", command.shown, re.M):
            continue
        if command.key.startswith("gdb "):
            built = os.path.exists(os.path.join(ROOT, debugged_program(command)))
            now = replay(command, tree) if built else command.shown
        else:
            now = printed(command, rule, tree)[0]
        text = text.replace(f"$ {command.text}\n{command.shown}", f"$ {command.text}\n{now}")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("regex", nargs="?", default="")
    options = parser.parse_args()
    try:
        re.compile(options.regex)
    except re.error as error:
        parser.error(f"{options.regex} is not a regular expression of Python: {error}")
    sys.stdout.reconfigure(line_buffering=True)
    end_on_signals()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # reports of strict mode end in abort()

    wrong, todo, used = [], [], set()
    for page in pages():
        found, mistakes = commands(page)
        wrong += mistakes
        for command in found:
            rule = rule_of(command)
            if rule is None:
                wrong.append(f"{command.where}: no rule of dev/readme_commands.py says how to run: {command.key}")
                continue
            used.add(rule.pattern)
            if command.shown and command.key.startswith("gdb "):
                wrong += source_lines_differ(command)
            todo.append((command, rule))
    wrong += [f"dev/readme_commands.py: no page has a command for the rule {r.pattern}" for r in RULES if r.pattern not in used]

    if not any(re.search(options.regex, command.key) for command, _ in todo):
        parser.error(f"{options.regex} is found in no command: --list shows them")

    n_run, done, shown = 0, set(), {command.key for command, _ in todo if command.shown}
    with Tree() as tree:
        block = None
        for command, rule in todo:
            again = not command.shown and (command.key in shown or (command.key, command.before) in done)
            if again or not re.search(options.regex, command.key) or (options.quick and not rule.quick and not rule.skip):
                continue
            done.add((command.key, command.before))
            lacks = "needs " + ", ".join(missing(rule)) if missing(rule) else ""
            if options.list or rule.skip or lacks:
                if options.list or not options.quick:
                    how = f"not run: {rule.skip or lacks}" if rule.skip or lacks else line_to_run(command, rule)
                    print(f"  {command.where}: {command.key.splitlines()[0]}\n      {how}")
                continue
            # A block may use its own runs, and begins with runs/1; ./generate takes the run that was left before it.
            if (command.page, command.block) != block and not command.key.startswith("./generate"):
                shutil.rmtree(os.path.join(tree.folder, "runs"), ignore_errors=True)
            block = (command.page, command.block)
            started = time.monotonic()
            mistakes = run(command, rule, tree)
            n_run += 1
            if not options.quick:
                print(f"  {command.where}: {command.key.splitlines()[0]}   "
                      f"{'WRONG' if mistakes else 'ok'}, {time.monotonic() - started:.1f} s")
            wrong += [f"{command.where}: {command.key}\n  {m}" for m in mistakes]
    for line in wrong:
        print(line)
    if not options.list:
        print(f"{n_run} commands run, {len(wrong)} mistakes")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
