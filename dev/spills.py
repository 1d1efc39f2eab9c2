#!/usr/bin/env python3
"""dev/spills.py FOLDER...: fails where a kernel of the product spills registers, where it has arrays in memory that are
not in registers, or where its wgmma are serialised.

Reads what ptxas reported of each file when it was compiled (X.ptxas beside X.o, and FOLDER/sm_80/X.ptxas: `make
DEVICE=cuda spills`). A register that is spilled goes through memory each time it is used, and so does an array whose
loop is not unrolled; of wgmma that are serialised each one waits for the one before. All compile without an error, and
take a good part of a kernel's speed.
"""
import pathlib
import re
import subprocess
import sys

from script import show_usage

KERNEL = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
SERIALISED = re.compile(r"\(C75\d\d\).*")


def demangled(name):
    """The kernel with its template arguments, without those of the call."""
    text = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip() or name
    text = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__\w+::", "", text)
    return text.split(">(")[0] + ">" if ">(" in text else text.split("(")[0]


def check(report, folder):
    """Prints what is wrong; gives how much that is, and the kernels of each architecture."""
    n_wrong, kernels, kernel = 0, {}, None
    for line in report.read_text().splitlines():
        if found := KERNEL.search(line):
            kernel = found.groups()
            kernels[kernel[1]] = kernels.get(kernel[1], 0) + 1
        wrong = None
        if (found := SPILLS.search(line)) and found.groups() != ("0", "0", "0"):
            wrong = f"{found[2]} bytes of registers are spilled, and {found[3]} loaded again"
            if found[2] == found[3] == "0":
                # No GPU before sm_89 runs the casts of fp8.cu: it lacks the products that they are for.
                if report.stem == "fp8" and kernel[1] == "sm_80":
                    continue
                wrong = f"{found[1]} bytes of arrays are in memory: is a loop over them not unrolled?"
        elif found := SERIALISED.search(line):
            wrong = found[0]
        if wrong:
            where = f"{demangled(kernel[0])} on {kernel[1]}: " if kernel else ""
            print(f"{report.relative_to(folder).with_suffix('.cu')}: {where}{wrong}")
            n_wrong += 1
    return n_wrong, kernels


def main():
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        show_usage(__doc__)
    n_wrong, total = 0, {}
    for folder in map(pathlib.Path, sys.argv[1:]):
        for report in sorted(folder.rglob("*.ptxas")):
            if {"dev", "test"} & set(report.relative_to(folder).parts):
                continue  # ladders show slow kernels, too
            n, kernels = check(report, folder)
            n_wrong += n
            for arch, count in kernels.items():
                total[arch] = total.get(arch, 0) + count
    if not total:
        sys.exit("spills.py: no report of ptxas in " + " ".join(sys.argv[1:]) + ": build with make DEVICE=cuda spills")
    print("spills: " + ", ".join(f"{count} kernels on {arch}" for arch, count in sorted(total.items())) +
          (f", {n_wrong} faults" if n_wrong else ": none spills"))
    sys.exit(n_wrong > 0)


main()
