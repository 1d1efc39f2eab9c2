#!/usr/bin/env python3
"""dev/docs.py: checks that README.md and doc/ agree with the sources and the programs.

    dev/docs.py write BUILD     writes doc/flags.md and what the commands quoted in the pages print   (make docs)
    dev/docs.py check BUILD     compares instead, and says what differs; exit status 1 if anything does (make test)
    dev/docs.py gdb BUILD       replays the debugger session of doc/debugging.md and compares its source lines and values

BUILD is a build folder with train_gpt, as build/cpu. What is checked:

  - every file and folder that a page links to, or names in `code`, exists
  - README.md has at most 150 lines, links every page of doc/, and its map names every folder of sources
  - doc/flags.md is what ./train_gpt --help prints
  - a block that begins with ```console and "$ ./train_gpt ..." holds what that command line prints
"""
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGES = ["README.md", "CONTRIBUTING.md", "cpu/README.md", "dev/README.md"]
# First folders of paths that a run or a build creates, or that exist on a reader's machine: they are not in the repository.
NOT_OURS = ("runs/", "build/", "path/", "my_text/", "gpu-bundle/", "/")
SOURCES = (".cu", ".cuh", ".h", ".cpp", ".py", ".sh", ".md", ".gdb", ".png", ".inc")


def read(page):
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        return file.read()


def write(page, text):
    with open(os.path.join(ROOT, page), "w", encoding="utf-8") as file:
        file.write(text)


def folders_and_files():
    """Folders that hold sources, and all names of files, except those that git ignores."""
    folders, names = set(), set()
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [d for d in inner if not d.startswith(".") and d not in ("build", "runs", "gpu-bundle", "golden")]
        names.update(files)
        if any(f.endswith((".cu", ".cpp", ".h", ".cuh")) for f in files) and folder != ROOT:
            folders.add(os.path.relpath(folder, ROOT))
    return folders, names


def pages():
    found = [p for p in PAGES if os.path.exists(os.path.join(ROOT, p))]
    return found + sorted("doc/" + f for f in os.listdir(os.path.join(ROOT, "doc")) if f.endswith(".md"))


def missing_names(page, names):
    """What a page links to or names in `code`, and the tree does not have."""
    here = os.path.dirname(os.path.join(ROOT, page))
    text = read(page)
    wrong = []
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"\w+:", link) and not os.path.exists(os.path.join(here, link)):
            wrong.append(f"links to {link}")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for code in re.findall(r"`([^`\n]+)`", prose):
        for word in code.split():
            word = word.rstrip(",;:")
            if "NAME" in word or not re.fullmatch(r"[\w+-][\w.+-]*(/[\w.+-]+)*/?", word) or word.startswith(NOT_OURS):
                continue
            if not (word.endswith(SOURCES) or word.endswith("/")):
                continue
            if "/" not in word:
                known = word in names
            else:
                known = any(os.path.exists(os.path.join(base, word)) for base in (ROOT, here))
            if not known:
                wrong.append(f"names {word}")
    return [f"{page} {w}, which is not there" for w in wrong]


def check_front_door(folders):
    wrong = []
    readme = read("README.md")
    n_lines = readme.count("\n")
    if n_lines > 150:
        wrong.append(f"README.md has {n_lines} lines; at most 150, the rest belongs on a page of doc/")
    for page in pages():
        if page.startswith("doc/") and f"]({page})" not in readme:
            wrong.append(f"README.md does not link {page}")
    for folder in sorted(folders):
        if f"`{folder}/`" not in readme and f"]({folder}/" not in readme and f"]({folder})" not in readme:
            wrong.append(f"README.md's map does not name the folder {folder}/")
    return wrong


def run(build, command):
    """What a quoted command line prints; ./train_gpt is the one in the build folder, and runs in a temporary folder."""
    line = command.replace("./train_gpt", os.path.join(build, "train_gpt"), 1)
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment.pop("CUDA_CPU_STRICT", None)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return re.sub(r"[ \t]+$", "", done.stdout, flags=re.M)


def flags_page(build):
    out = run(build, "./train_gpt --help")
    groups = re.sub(r"\n{3,}", "\n\n", out[out.index("\nModel:"):]).strip()
    return ("# Flags\n\n"
            "What `./train_gpt --help` prints. This page is written by `make docs`; do not edit it.\n"
            "A flag that cannot be combined with another one is refused at the start, with the reason.\n\n"
            f"```\n{groups}\n```\n")


def refreshed(page, build):
    """The page with what its commands print now."""
    def block(match):
        command = match.group(1)
        return f"```console\n$ {command}\n{run(build, command)}```"
    return re.sub(r"^```console\n\$ (\./train_gpt [^\n]*)\n.*?^```", block, read(page), flags=re.M | re.S)


def first_difference(page, want):
    for i, (a, b) in enumerate(zip(read(page).split("\n") + [""], want.split("\n") + [""])):
        if a != b:
            return f"{page}:{i + 1} differs from what the program prints now; `make docs` writes it again\n  has   {a}\n  wants {b}"
    return None


# ---- the debugger's session

SESSION_PAGE = "doc/debugging.md"


def session():
    """The text of the block that holds the session, and the arguments of its gdb."""
    text = re.search(r"^```console\n(\$ make debug .*?)^```", read(SESSION_PAGE), re.M | re.S).group(1)
    return text, re.search(r"^\$ gdb (.*)$", text, re.M).group(1).split()


def replay(text, arguments):
    """The session as it is now: the same commands, and what gdb answers."""
    commands = re.findall(r"^\(gdb\) (.*)$", text, re.M)
    script = ["set confirm off", "set width 0", "set style enabled off", "set print frame-arguments presence"]
    for command in commands:
        script += [f"echo (gdb) {command}\\n", command]
    argv = ["gdb", "-batch"]
    for line in script:
        argv += ["-ex", line]
    done = subprocess.run(argv[:2] + arguments[:2] + argv[2:] + arguments[2:], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=120)
    noise = re.compile(r"^(\[Thread debugging|Using host libthread_db|\[New Thread|\[Switching|File\(s\) .* will be skipped|"
                       r"warning:|\[Inferior)")
    lines = [line for line in done.stdout.split("\n") if not noise.match(line)]
    start = next((i for i, line in enumerate(lines) if line.startswith("(gdb)")), 0)
    head = text[:text.index("(gdb)")]
    return head + "\n".join(lines[start:]).rstrip("\n") + "\n"


def facts(text):
    """What must be true of a session on any compiler and gdb: the commands, the source lines shown, the values printed."""
    kept = re.compile(r"^(\(gdb\) .*|\d+\t.*|\$\d+ = .*|kernel .*|  block .*)$", re.M)
    return [line.rstrip() for line in kept.findall(text)]


def check_session():
    text, arguments = session()
    now = replay(text, arguments)
    was, new = facts(text), facts(now)
    for a, b in zip(was + [""], new + [""]):
        if a != b:
            return [f"{SESSION_PAGE}: its session is another one now; `make docs` writes it again\n  has   {a}\n  wants {b}"]
    if len(was) != len(new):
        return [f"{SESSION_PAGE}: its session has {len(was)} lines of commands, sources and values, a replay {len(new)}"]
    return []


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "check", "gdb"):
        sys.exit(__doc__)
    what, build = sys.argv[1], os.path.join(ROOT, sys.argv[2])
    wrong = []
    if what == "write":
        write("doc/flags.md", flags_page(build))
        for page in pages():
            write(page, refreshed(page, build))
        text, arguments = session()
        if os.path.exists(os.path.join(ROOT, arguments[arguments.index("--args") + 1])):
            write(SESSION_PAGE, read(SESSION_PAGE).replace(text, replay(text, arguments)))
    elif what == "check":
        folders, names = folders_and_files()
        for page in pages():
            wrong += missing_names(page, names)
            if page != "doc/flags.md":
                wrong += [d for d in [first_difference(page, refreshed(page, build))] if d]
        wrong += check_front_door(folders)
        wrong += [d for d in [first_difference("doc/flags.md", flags_page(build))] if d]
    else:
        wrong = check_session()
    for line in wrong:
        print(line)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
