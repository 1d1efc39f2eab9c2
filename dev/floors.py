#!/usr/bin/env python3
"""dev/floors.py: no file includes upwards.   run: dev/floors.py     one line for each wrong include or folder
                                                                  (make flags draws the floors: doc/floors.svg)

The Makefile's variable FLOORS holds the order, from the ground up; "|" stands between two floors. A file includes headers
of its own folder and of folders on lower floors. Two folders on one floor do not include each other. A folder that stands
on several floors (io) includes only what lies below its lowest floor, and only what lies above its highest floor includes it.

Above these stand the programs of the root (files with a main), then dev/, then test/. cpu/ holds the headers that bear
NVIDIA's names; it is on the include path of the CPU build, and only its own files and its tests name it. One header of it is for
kernels, too: cpu_vector.h, for what they do on the CPU device alone.
"""
import html
import os
import re
import sys
import textwrap

from script import ROOT, read, show_usage

SOURCES = ('.cu', '.cuh', '.h', '.cpp')
PROGRAMS = 'programs'  # the name under which the programs in the root are treated as a folder
CPU = 'cpu'
CPU_VECTORS = 'cpu/cpu_vector.h'


def makefile_variable(name):
    """The text of a variable of the Makefile, empty where it has none of that name."""
    match = re.search(rf'^{name}\s*:?=\s*((?:[^\n#]*\\\n)*[^\n#]*)', read('Makefile'), re.MULTILINE)
    return match[1].replace('\\\n', ' ') if match else ''


def read_floors():
    """The floors from the ground up, each a list of folders, as the Makefile has them and with those above them."""
    floors = [floor.split() for floor in makefile_variable('FLOORS').split('|')]
    return floors + [[PROGRAMS], ['dev'], ['test']]


def sources_in(folder):
    here = os.path.join(ROOT, folder)
    if not os.path.isdir(here):
        return []
    return sorted(os.path.normpath(os.path.join(folder, name)) for name in os.listdir(here) if name.endswith(SOURCES))


def product_files():
    """Every source of the product: the folders of the Makefile's floors, the programs, and the CPU device."""
    folders = {folder for floor in read_floors() for folder in floor} - {PROGRAMS, 'dev', 'test'}
    return [path for folder in sorted(folders | {CPU}) for path in sources_in(folder)]


def folder_of(path):
    folder = os.path.dirname(path) or '.'
    if folder == '.' and path.endswith('.cu') and re.search(r'^int main\(', read(path), re.MULTILINE):
        return PROGRAMS
    return folder


def includes(path):
    """Yields (line number, included file) for each #include "..." of a file of ours."""
    for number, line in enumerate(read(path).splitlines(), 1):
        match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not match:
            continue
        # As the compiler looks for it: beside the file, from the root, among the headers of the CPU device.
        for folder in (os.path.dirname(path), '', CPU):
            candidate = os.path.normpath(os.path.join(folder, match[1]))
            if os.path.exists(os.path.join(ROOT, candidate)):
                yield number, candidate
                break


def all_includes(floors):
    """Every include as (file, line, folder of the file, included file, its folder), for folders that differ."""
    folders = {folder for floor in floors for folder in floor} - {PROGRAMS} | {CPU}
    for folder in sorted(folders):
        for path in sources_in(folder):
            for number, included in includes(path):
                pair = folder_of(path), folder_of(included)
                if pair[0] != pair[1]:
                    yield path, number, pair[0], included, pair[1]


def heights(floors):
    """The lowest and the highest floor of each folder."""
    result = {}
    for i, floor in enumerate(floors):
        for folder in floor:
            result[folder] = (result.get(folder, (i, i))[0], i)
    return result


def is_allowed(height, path, folder, included, included_folder):
    if included == CPU_VECTORS:
        return folder.startswith('layers')
    if CPU in (folder, included_folder):  # only the tests of the CPU device may include its headers by name
        return folder == 'test' and os.path.basename(path).startswith(('test_cpu_', 'test_cublaslt', 'test_number_formats'))
    return included_folder in height and height[included_folder][1] < height[folder][0]


def check():
    """The wrong includes and folders, one line each."""
    floors = read_floors()
    height = heights(floors)
    wrong = [f'{path}:{number}: {folder} may not include {included}: ' + (
             'cpu/ is on the include path of the CPU build, and only its tests name it' if CPU in (folder, to) else
             f'{to} is not on a lower floor (FLOORS in the Makefile)')
             for path, number, folder, included, to in all_includes(floors)
             if not is_allowed(height, path, folder, included, to)]
    tops = {folder.split('/')[0] for folder in height} - {'.', PROGRAMS, 'dev', 'test'}
    inside = {os.path.relpath(folder, ROOT) for top in tops for folder, _, _ in os.walk(os.path.join(ROOT, top))}
    return wrong + [f'{folder}: on no floor, so nothing in it is compiled (FLOORS in the Makefile)'
                    for folder in sorted(inside - set(height)) if sources_in(folder)]


# ---------------------------------------------------------------------------------------------------------------------
# The picture: one box for each folder, standing where FLOORS has it, with what its headers say it is for and which
# folders its files include.

WIDTH, FLOOR_HEIGHT, MARGIN, LINE = 1000, 108, 8, 15


def purpose(folder):
    """The first sentence of the folder's header (of its first file, where it has none), without the name of the file; of
    each program."""
    if folder == 'test':
        return 'tests: Catch2, float64 references, golden files'
    if folder == 'dev':
        return 'ladders from the naive kernel to the fastest, benchmarks'
    name = 'llm' if folder == '.' else os.path.basename(folder)
    files = [path for path in sources_in('.' if folder == PROGRAMS else folder) if folder_of(path) == folder]
    if folder == PROGRAMS:
        return '; '.join(f'{os.path.basename(path)[:-3]}: {first_sentence(path)}' for path in files)
    headers = [path for path in files if os.path.basename(path) in (name + '.h', name + '.cuh')] or files
    return first_sentence(headers[0])


def first_sentence(path):
    text = re.match(r'(// .*\n)*', read(path))[0].replace('\n// ', ' ').strip()
    text = text.split(': ', 1)[1]
    return re.split(r'(?<=\w)\.(?= )', text + ' ')[0].strip().rstrip('.')


def place(floors):
    """The box (left, bottom floor, width, number of floors) of each folder. Those on several floors stand on the left."""
    height = heights(floors)
    boxes = {}
    for i, floor in enumerate(floors):
        left = 0
        for folder in floor:
            first, last = height[folder]
            if first < last:
                boxes.setdefault(folder, (left, first, WIDTH // 4, last - first + 1))
                left = boxes[folder][0] + boxes[folder][2]
        others = [folder for folder in floor if height[folder] == (i, i)]
        for k, folder in enumerate(others):
            width = (WIDTH - left) // len(others)
            boxes[folder] = (left + k * width, i, width, 1)
    return boxes


def draw():
    floors = read_floors()
    uses = {}
    for _, _, folder, _, to in all_includes(floors):
        uses.setdefault(folder, set()).add(to)
    order = [folder for folder in heights(floors)]
    titles = {'.': 'llm.h, llm.cu', PROGRAMS: ', '.join(
        path for path in sources_in('.') if folder_of(path) == PROGRAMS)}
    total = len(floors) * FLOOR_HEIGHT
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 -4 {WIDTH + 8} {total + 8}" font-family="sans-serif">',
             '<rect x="-4" y="-4" width="100%" height="100%" fill="white"/>']
    for folder, (left, first, width, n_floors) in place(floors).items():
        top = total - (first + n_floors) * FLOOR_HEIGHT
        lines.append(f'<rect x="{left + 2}" y="{top + 2}" width="{width - 4}" height="{n_floors * FLOOR_HEIGHT - 4}" rx="4" '
                     'fill="#eef3f8" stroke="#5a7184"/>')
        included = [titles.get(f, f + '/') for f in order if f in uses.get(folder, ())]
        characters = (width - 2 * MARGIN) // 7
        texts = [(titles.get(folder, folder + '/'), 'font-size="15" font-weight="bold"')]
        texts += [(line, 'font-size="13"') for line in textwrap.wrap(purpose(folder), characters)]
        texts += [(line, 'font-size="12" fill="#5a7184"') for line in
                  textwrap.wrap('includes ' + ', '.join(included) if included else 'includes nothing of ours', characters)]
        y = top + (n_floors * FLOOR_HEIGHT - len(texts) * LINE) // 2 + 12
        for text, style in texts:
            lines.append(f'<text x="{left + MARGIN}" y="{y}" {style}>{html.escape(text)}</text>')
            y += LINE
    return '\n'.join(lines + ['</svg>', ''])


if __name__ == '__main__':
    if sys.argv[1:]:
        show_usage(__doc__)
    wrong = check()
    for line in wrong:
        print(line)
    sys.exit(1 if wrong else 0)
