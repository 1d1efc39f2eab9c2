#!/usr/bin/env python3
"""dev/long_functions.py: the functions that are too long to be read on one screen.   run: dev/long_functions.py [FILE...]

A function of the product has at most 60 lines, and one that runs on the device (__global__ or __device__) at most 80, from
the first line of its signature to its closing brace, comments included. Without FILE: every source in the folders that the
Makefile's FLOORS names, and cpu/. Prints one line for each longer function, the longest first; the exit status is 1 if
there is one.

This is not a C++ parser. It removes comments, strings and preprocessor lines, then follows the braces: a brace that opens
outside any function, after text that ends in a parameter list, opens a function's body.
"""
import os
import re
import sys

from floors import product_files
from script import read, refuse, show_usage

LIMIT, DEVICE_LIMIT = 60, 80


def without_comments_and_strings(text):
    """The text with every comment, literal and preprocessor line replaced by blanks, so that line numbers stay."""

    def blank(match):
        return re.sub(r'[^\n]', ' ', match[0])

    text = re.sub(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'', blank, text,
                  flags=re.DOTALL)
    return re.sub(r'^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', blank, text, flags=re.MULTILINE)


def functions(text):
    """Yields (name, first line, number of lines, whether it runs on the device) of each function that is defined."""
    text = without_comments_and_strings(text)
    line, statement, statement_line = 1, '', 1
    scopes = []  # one entry for each open brace: None, or (name, first line, on device) where it opened a function
    for c in text:
        inside_function = any(scopes)
        if c == '{':
            opened = None
            if not inside_function and is_signature(statement):
                opened = (name_of(statement), statement_line, bool(re.search(r'__(global|device)__', statement)))
            # A brace that initialises a member, `: size_{n}`, belongs to the signature that continues after it.
            scopes.append(opened)
            if opened or not is_initialiser(statement):
                statement = ''
        elif c == '}':
            opened = scopes.pop() if scopes else None
            if opened:
                yield opened[0], opened[1], line - opened[1] + 1, opened[2]
            if opened or not is_initialiser(statement):
                statement = ''
        elif c == ';' and not inside_function and statement.count('(') == statement.count(')'):
            statement = ''
        elif not inside_function:
            if not statement.strip() and not c.isspace():
                statement, statement_line = '', line
            statement += c
        if c == '\n':
            line += 1


def is_initialiser(statement):
    """Whether a brace after this text initialises a member in a constructor's list."""
    return bool(re.search(r'\)\s*(?:noexcept\s*)?:(?!:).*[\w>]\s*$', statement, re.DOTALL))


def is_signature(statement):
    """Whether a brace after this text opens a function's body."""
    statement = re.sub(r'^\s*(public|private|protected)\s*:', '', statement)
    if not re.search(r'\)', statement) or is_initialiser(statement):
        return False
    if re.search(r'(?<![=!<>+\-*/])=(?!=)\s*$', statement):  # x = {...}
        return False
    head = re.sub(r'template\s*<.*?>\s*(?=\w|\[)', '', statement, count=1, flags=re.DOTALL)
    return not re.match(r'\s*(class|struct|union|enum|namespace)\b(?!.*\)\s*(const|noexcept|override)?\s*$)', head, re.DOTALL)


def name_of(statement):
    head = re.sub(r'__launch_bounds__\s*\([^()]*(\([^()]*\)[^()]*)*\)', '', statement)
    match = re.search(r'([\w:~]+|operator\s*\S+)\s*\(', head)
    return match[1] if match else '?'


def main():
    if any(argument.startswith('-') for argument in sys.argv[1:]):
        show_usage(__doc__)
    for path in sys.argv[1:]:
        if not os.path.isfile(path):
            refuse(f'there is no file {path}')
    offenders = []
    for path in sys.argv[1:] or product_files():
        for name, first, n_lines, on_device in functions(read(os.path.abspath(path) if sys.argv[1:] else path)):
            limit = DEVICE_LIMIT if on_device else LIMIT
            if n_lines > limit:
                offenders.append((n_lines, limit, path, first, name))
    for n_lines, limit, path, first, name in sorted(offenders, reverse=True):
        print(f'{path}:{first}: {name} has {n_lines} lines; at most {limit}')
    return 1 if offenders else 0


if __name__ == '__main__':
    sys.exit(main())
