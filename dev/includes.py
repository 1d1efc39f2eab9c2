#!/usr/bin/env python3
"""dev/includes.py: every file includes the standard headers that it uses.   run: dev/includes.py     one line for each that lacks

The precompiled headers (PCH_std in the Makefile) give these headers to every file, so that a missing one is no error of the
compiler: only make PCH= and another compiler would find it. Here each name of NAMES that a file uses must come from the
header that has it, included by the file itself or by a header of ours that it includes. PCH_std may have no header that
NAMES lacks.
"""
import re
import sys

from floors import includes, makefile_variable, product_files, sources_in
from long_functions import without_comments_and_strings
from script import read, show_usage

# Of each header the names that we use. A name of std::ranges and one that begins with another of these (count, count_if)
# need no entry.
NAMES = {
    'algorithm': '''all_of any_of clamp copy count equal fill find is_sorted lower_bound max min minmax none_of nth_element
        partial_sort partition_point pop_heap push_heap ranges remove_if replace reverse rotate shuffle sort stable_sort transform
        upper_bound''',
    'atomic': 'atomic',
    'chrono': 'chrono',
    'deque': 'deque',
    'filesystem': 'filesystem',
    'fstream': 'ifstream ofstream fstream',
    'functional': 'bind equal_to function greater hash less multiplies plus',
    'map': 'map multimap',
    'memory': 'make_shared make_unique shared_ptr unique_ptr weak_ptr',
    'mutex': 'lock_guard mutex scoped_lock unique_lock once_flag call_once',
    'numeric': 'accumulate exclusive_scan gcd inclusive_scan inner_product iota lcm partial_sum reduce',
    'optional': 'nullopt optional',
    'set': 'multiset set',
    'sstream': 'istringstream ostringstream stringstream',
    'thread': 'this_thread thread',
    'vector': 'vector',
}


def standard_headers(path, seen):
    """The standard headers that a file includes, itself and through headers of ours."""
    if path in seen:
        return set()
    seen.add(path)
    found = set(re.findall(r'^\s*#\s*include\s+<(\w+)>', read(path), re.MULTILINE))
    for _, included in includes(path):
        found |= standard_headers(included, seen)
    return found


def lacking(path, header_of):
    """Yields (line, name, header) of the first use of each header that the file does not include."""
    there = standard_headers(path, set())
    for number, line in enumerate(without_comments_and_strings(read(path)).splitlines(), 1):
        for name in re.findall(r'\bstd::(\w+)', line):
            header = header_of(name)
            if header and header not in there:
                there.add(header)
                yield number, name, header


def main():
    if sys.argv[1:]:
        show_usage(__doc__)
    unknown = [header for header in makefile_variable('PCH_std').split() if header not in NAMES]
    if unknown:
        sys.exit(f'includes.py: the precompiled headers have {" ".join(unknown)}, of which NAMES lacks the names')
    table = {name: header for header, names in NAMES.items() for name in names.split()}

    def header_of(name):
        return table.get(name) or table.get(re.sub(r'_(n|if|if_not|element|backward|copy|bound)$', '', name))

    files = product_files() + sources_in('dev') + sources_in('test')
    wrong = [f'{path}:{number}: std::{name} needs #include <{header}>' for path in files
             for number, name, header in lacking(path, header_of)]
    print('\n'.join(wrong), end='\n' if wrong else '')
    sys.exit(len(wrong) > 0)


if __name__ == '__main__':
    main()
