#!/usr/bin/env python3
"""test/golden/runs/runs.py: the bits of short training runs against those that an earlier program gave.

    runs.py check [--quick] [--mpi] PROGRAM [NAME ...]    runs what runs.txt lists and compares with recorded.txt
    runs.py record PROGRAM [NAME ...]                     writes recorded.txt (or only the lines of the named runs)
    runs.py show NAME ...                                 prints the command lines

PROGRAM is a train_gpt for the CPU device. A change of the product that must not change what is computed passes `check`. When bits
change on purpose, `record` with the new program, and say why in the commit. Names may be patterns: 'ranks_*'.

Three hashes (sha256) for each run: the columns loss and val_loss of log.csv, its columns grad_norm and loss_scale, and the weights
of the last checkpoint: name, dtype, shape and bytes of each tensor in the order of their names, so that neither the order in the
file nor its metadata matters. log.csv has 9 significant digits: all of a float32 (grad_norm), not all of a loss, which is a mean
in float64; what a loss does not show, the weights do.

Where the bits hold: on x86-64 CPUs with fused multiply-add, for any number of OpenMP threads. By construction they depend neither on
the width of the vectors (AVX2, AVX-512) nor on the optimisation level: floating-point operations are neither contracted nor
reordered, sgemm has one order of summation, and exp and the 16- and 8-bit roundings are the program's own. Some were recorded
with AVX2, some with AVX-512; one and two threads were compared. From the C library come log, cos, sin and pow in float64 (initial weights,
rotary tables, Adam's corrections; stored as float32, which hides nearly all differences of a last digit) and logf in float32
(losses). 19 runs kept their bits with glibc's variants of these functions that do without fused multiply-add.

When bits differ, `check` looks whether these functions round as they did where the table was recorded, through a hash of some
thousand results. If they do not, it ends with status 77, "cannot compare here". Then record a table with the program of a commit
that you trust, and check against that: runs.py --table FILE record OLD_PROGRAM, runs.py --table FILE check NEW_PROGRAM.
"""
import argparse
import ctypes
import fnmatch
import hashlib
import json
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile

FOLDER = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(FOLDER)))  # paths in flags, and in stored checkpoints, start here
CANNOT_COMPARE = 77


def read_runs():
    """The runs of runs.txt in its order: name -> (set, flags, stored checkpoint to resume or None)."""
    runs, common = {}, []
    with open(os.path.join(FOLDER, "runs.txt")) as lines:
        for words in (line.split() for line in lines if line.strip() and not line.startswith("#")):
            words = [word.replace("@", os.path.relpath(FOLDER, ROOT) + "/") for word in words]
            if words[0] == "common":
                common = words[1:]
            elif "<-" in words:  # the other flags are in the checkpoint
                at = words.index("<-")
                runs[words[1]] = (words[0], words[2:at] + ["--resume"], words[at + 1])
            else:
                runs[words[1]] = (words[0], common + words[2:], None)
    return runs


def hash_weights(path):
    """sha256 of the tensors of a safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    hashed = hashlib.sha256()
    for name in sorted(header):
        if name == "__metadata__":
            continue
        tensor = header[name]
        begin, end = tensor["data_offsets"]
        hashed.update(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode())
        hashed.update(data[begin:end])
    return hashed.hexdigest()


def read_columns(path, wanted):
    with open(path) as file:
        names, *rows = [line.rstrip("\n").split(",") for line in file]
    return [[row[names.index(name)] for name in wanted] for row in rows]


def hash_rows(rows):
    return hashlib.sha256("".join(",".join(row) + "\n" for row in rows).encode()).hexdigest()


def run(program, flags, fixture, use_mpi):
    """Runs the program in a temporary folder. Returns the five columns of the table; exits if the program fails."""
    with tempfile.TemporaryDirectory(prefix="llm_golden_") as folder:
        out = os.path.join(folder, "run")
        if fixture:
            shutil.copytree(os.path.join(FOLDER, "checkpoints", fixture), out)
        command = [program] + flags + ["--out", out]
        if use_mpi:
            at = command.index("--ranks")
            command = ["mpirun", "--oversubscribe", "-np", command[at + 1]] + command[:at] + command[at + 2 :]
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environment.setdefault("CUDA_CPU_EXACT", "1")  # bf16 products have other bits by other instructions
        environment.setdefault("OMP_NUM_THREADS", "1")  # the bits are the same with any number; one is the fastest here
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            return None, f"exit status {done.returncode}: {done.stderr.strip()[-600:]}"
        losses = read_columns(os.path.join(out, "log.csv"), ["loss", "val_loss"])
        norms = read_columns(os.path.join(out, "log.csv"), ["grad_norm", "loss_scale"])
        checkpoints = os.path.join(out, "checkpoints")
        weights = os.path.join(checkpoints, sorted(os.listdir(checkpoints))[-1], "model.safetensors")
        return [hash_rows(losses), hash_rows(norms), hash_weights(weights), losses[-1][0], norms[-1][0] or "overflow"], ""


def hash_of_libm():
    """How this machine's C library rounds what the program asks it for, over arguments that the program meets."""
    try:
        libm = ctypes.CDLL("libm.so.6")
    except OSError:
        return "not glibc"
    hashed = hashlib.sha256()

    def add(name, kind, code, arguments):
        function = getattr(libm, name)
        function.restype, function.argtypes = kind, [kind] * len(arguments[0])
        hashed.update(b"".join(struct.pack(code, function(*a)) for a in arguments))

    add("log", ctypes.c_double, "<d", [((i + 0.5) / 8192,) for i in range(8192)])  # initial weights: log, cos, sin
    for name in ["cos", "sin"]:
        add(name, ctypes.c_double, "<d", [(i / 8192 * 6.3,) for i in range(8192)])
        add(name, ctypes.c_double, "<d", [(i / 7.9,) for i in range(4096)])  # rotary tables: position x frequency
    add("pow", ctypes.c_double, "<d", [(10000.0, -i / 1024) for i in range(1024)])  # their frequencies
    for beta in [0.7, 0.8, 0.9, 0.95, 0.999]:  # Adam's corrections
        add("pow", ctypes.c_double, "<d", [(beta, float(i)) for i in range(1, 11)])
    add("logf", ctypes.c_float, "<f", [(1 + i / 64,) for i in range(16384)])  # losses
    return hashed.hexdigest()


RECORDED_ON = "# Recorded on: "  # a line for each machine


def machine():
    """The processor in words; "" if it has no fused multiply-add, so that its bits differ."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return f"{model}, {'AVX-512' if 'avx512f' in flags else 'AVX2'}" if "fma" in flags and "avx2" in flags else ""


def read_table(path):
    with open(path) as file:
        rows = [line.split() for line in file if line.strip() and not line.startswith("#")]
    return {row[0]: row[1:] for row in rows}


def machines_of(path):
    with open(path) as file:
        return [line[len(RECORDED_ON):-1] for line in file if line.startswith(RECORDED_ON)]


def write_table(path, table, order, machines):
    with open(path, "w") as file:
        file.write("# Written by `runs.py record`. sha256 of loss and val_loss, of grad_norm and loss_scale, of the final\n")
        file.write("# weights; then the last loss and gradient norm as log.csv has them.\n")
        file.writelines(f"{RECORDED_ON}{one}\n" for one in machines)
        file.write(f"libm {hash_of_libm()}\n")
        for name in order:
            if name in table:
                file.write(" ".join([name] + table[name]) + "\n")


def check(options, runs, names):
    table = read_table(options.table)
    [libm] = table.pop("libm")
    n_failed = n_different = 0
    for name in names:
        if name not in table:
            print(f"{name}: not in {options.table}: record it with the program of a commit that you trust")
            n_failed += 1
            continue
        columns, error = run(options.program, *runs[name][1:], options.mpi)
        if columns is None:
            print(f"{name}: {error}")
            n_failed += 1
            continue
        different = [what for what, a, b in zip(["loss", "norm", "weights"], columns, table[name]) if a != b]
        if different:
            print(f"{name}: {', '.join(different)} not as recorded: last loss {columns[3]}, recorded {table[name][3]};",
                  f"last norm {columns[4]}, recorded {table[name][4]}")
            n_different += 1
    print(f"{len(names) - n_failed - n_different} of {len(names)} runs have the recorded bits")
    if n_failed:
        return 1
    if n_different and (not machine() or libm != hash_of_libm()):
        print("this may be the machine: its log, cos, sin, pow or logf round differently from those of the machine that")
        print("recorded the table, or it has no fused multiply-add; the head of runs.py says how to compare here")
        return CANNOT_COMPARE
    return 1 if n_different else 0


def record(options, runs, names):
    table = read_table(options.table) if os.path.exists(options.table) else {}
    here = f"{machine()}; {' '.join(platform.libc_ver())}; {platform.machine()}"
    machines = machines_of(options.table) if table and len(names) < len(runs) else []
    for name in names:
        columns, error = run(options.program, *runs[name][1:], False)
        if columns is None:
            print(f"{name}: {error}")
            return 1
        table[name] = columns
    write_table(options.table, table, runs, machines if here in machines else [*machines, here])
    print(f"{len(names)} runs recorded in {options.table}")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default=os.path.join(FOLDER, "recorded.txt"), help="another file of recorded results")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ["check", "record", "show"]:
        sub = commands.add_parser(command)
        if command != "show":
            sub.add_argument("program")
        if command == "check":
            sub.add_argument("--quick", action="store_true", help="only the runs of `make test`")
            sub.add_argument("--mpi", action="store_true", help="only runs with --ranks, as processes under mpirun")
        sub.add_argument("names", nargs="*")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C: without a traceback, and nothing temporary is left
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    runs = read_runs()
    names = [name for name in runs if not options.names or any(fnmatch.fnmatch(name, wanted) for wanted in options.names)]
    for wanted in options.names:
        if not fnmatch.filter(runs, wanted):
            parser.error(f"runs.txt has no run named {wanted}")
    if options.command == "show":
        for name in names:
            print(name, " ".join(runs[name][1]), f"(resumes {runs[name][2]})" if runs[name][2] else "")
        return 0
    options.program = os.path.abspath(options.program)
    if not os.access(options.program, os.X_OK) or os.path.isdir(options.program):
        parser.error(f"{options.program} is no program: give a train_gpt, as build/cpu/train_gpt")
    if options.command == "record":
        return record(options, runs, names)
    if options.quick:
        names = [name for name in names if runs[name][0] == "quick"]
    if options.mpi:
        names = [name for name in names if "--ranks" in runs[name][1] and "--ranks-per-node" not in runs[name][1]]
        if not shutil.which("mpirun"):
            parser.error("--mpi needs mpirun: ./install.sh installs it")
    if not names:
        parser.error("none of these runs is left by --quick or --mpi")
    if not os.path.exists(options.table):
        parser.error(f"there is no table {options.table}: `runs.py --table {options.table} record PROGRAM` writes one")
    return check(options, runs, names)


if __name__ == "__main__":
    sys.exit(main())
