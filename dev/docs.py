#!/usr/bin/env python3
"""dev/docs.py: checks that README.md and doc/ agree with the sources and the programs.

    dev/docs.py write     writes doc/flags.md, doc/floors.svg, doc/pipelines.png and what the commands quoted in the pages print   (make docs)
    dev/docs.py flags     writes the first three alone: these need ./train_gpt and ./generate   (make flags)
    dev/docs.py check     says what is wrong; exit status 1 if anything is                      (make test)

The programs are those of build/cpu. What is checked:

  - every file and folder that a page links to, or names in `code`, exists
  - README.md has at most 150 lines, links every page of doc/, and its map names every folder of sources
  - doc/flags.md is what ./train_gpt --help and ./generate --help print
  - doc/floors.svg is what dev/floors.py draws of the includes
  - doc/pipelines.png has the size of what ./train_gpt draws of all schedules: none is missing

dev/readme_commands.py runs the commands of the pages and compares what they print.
"""
import os
import re
import sys

import floors
from readme_commands import Tree, pages, refreshed
from script import ROOT, end_on_signals, read, show_usage

# First folders of paths that a run or a build creates, or that exist on a reader's machine: they are not in the repository.
NOT_OURS = ("runs/", "build/", "path/", "my_text/", "gpu-bundle/", "/")
SOURCES = (".cu", ".cuh", ".h", ".cpp", ".py", ".sh", ".md", ".gdb", ".png", ".inc")


def write(page, text):
    with open(os.path.join(ROOT, page), "wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def folders_and_files():
    """Folders that hold sources, and all names of files, except those that git ignores."""
    folders, names = set(), set()
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [d for d in inner if not d.startswith(".") and d not in ("build", "runs", "gpu-bundle", "golden")]
        names.update(files)
        if any(f.endswith((".cu", ".cpp", ".h", ".cuh")) for f in files) and folder != ROOT:
            folders.add(os.path.relpath(folder, ROOT))
    return folders, names


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
    return [f"{page} {w}, which does not exist" for w in wrong]


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


def flags_page(tree):
    def groups(program):
        out, _ = tree.bash(f"./{program} --help")
        return re.sub(r"\n{3,}", "\n\n", out[out.index("\nModel:"):]).strip()

    return ("# Flags\n\n"
            "What `./train_gpt --help` and `./generate --help` print. This page is written by `make docs`; do not edit it.\n"
            "A flag that cannot be combined with another one is refused at the start, with the reason.\n\n"
            f"## ./train_gpt\n\n```text\n{groups('train_gpt')}\n```\n\n"
            f"## ./generate\n\n```text\n{groups('generate')}\n```\n")


def pipelines_picture(tree):
    tree.bash("./train_gpt --pipeline all --pp 4 --micro-batches 8 --draw --out runs/schedules")
    with open(os.path.join(tree.folder, "runs/schedules/schedule.png"), "rb") as file:
        return file.read()


def check_picture(want):
    with open(os.path.join(ROOT, "doc/pipelines.png"), "rb") as file:
        return [] if file.read(24) == want[:24] else ["doc/pipelines.png is not the schedules of now; `make flags` draws it again"]


def first_difference(page, want):
    for i, (a, b) in enumerate(zip(read(page).split("\n") + [""], want.split("\n") + [""])):
        if a != b:
            return [f"{page}:{i + 1} differs from what the program prints now; `make flags` writes it again\n  has   {a}\n  wants {b}"]
    return []


def main():
    if len(sys.argv) != 2 or sys.argv[1] not in ("write", "flags", "check"):
        show_usage(__doc__)
    end_on_signals()
    wrong = []
    with Tree() as tree:
        if sys.argv[1] != "check":
            write("doc/flags.md", flags_page(tree))
            write("doc/floors.svg", floors.draw())
            write("doc/pipelines.png", pipelines_picture(tree))
            for page in pages() if sys.argv[1] == "write" else []:
                write(page, refreshed(page, tree))
        else:
            folders, names = folders_and_files()
            for page in pages():
                wrong += missing_names(page, names)
            wrong += check_front_door(folders)
            wrong += first_difference("doc/flags.md", flags_page(tree)) + first_difference("doc/floors.svg", floors.draw())
            wrong += check_picture(pipelines_picture(tree))
    for line in wrong:
        print(line)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
