#!/usr/bin/env python3
"""Writes io/unicode_tables.h: which code points the pre-tokenizer regexes of Hugging Face tokenizers call \\p{L},
\\p{N} and \\s, and which may change under Unicode normalization form C.

    python3 dev/make_unicode_tables.py > io/unicode_tables.h        (needs the Python package `tokenizers`)

The classes come from the library's own regex engine, which is asked for each code point, because a token split depends on the
engine's version of Unicode: Python's unicodedata is often some versions behind. Where unicodedata knows a code point,
the two must agree, and the script stops if they do not. The tables for form C come from unicodedata.
"""
import sys
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers

SCALARS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def members_of(regex):
    delete = normalizers.Replace(Regex(regex), "")
    return {c for c in SCALARS if delete.normalize_str(chr(c)) == ""}


def composable():
    """Code points whose NFC quick check is No or Maybe: changed by NFC alone, or second in a composition."""
    result = set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))  # Hangul vowels and final consonants compose
    for c in SCALARS:
        if unicodedata.normalize("NFC", chr(c)) != chr(c):
            result.add(c)
        elif not 0xAC00 <= c < 0xD7A4:
            result.update(ord(mark) for mark in unicodedata.normalize("NFD", chr(c))[1:])
    return result


def print_table(name, comment, members):
    ranges = []
    for c in sorted(members):
        if ranges and ranges[-1][1] == c - 1:
            ranges[-1][1] = c
        else:
            ranges.append([c, c])
    print(f"\n// {comment}: {len(members)} code points.")
    print(f"constexpr CodePointRange {name}[] = {{")
    line = "   "
    for first, last in ranges:
        entry = f" {{0x{first:X}, 0x{last:X}}},"
        if len(line) + len(entry) > 120:
            print(line)
            line = "   "
        line += entry
    print(line)
    print("};")


def main():
    letters, numbers, spaces = members_of(r"\p{L}"), members_of(r"\p{N}"), members_of(r"\s")
    for c in SCALARS:
        category = unicodedata.category(chr(c))
        if category != "Cn" and ((c in letters) != (category[0] == "L") or (c in numbers) != (category[0] == "N")):
            sys.exit(f"U+{c:04X}: unicodedata says {category}, the regex engine of tokenizers says otherwise")

    print("// io/unicode_tables.h: code point classes for words.cu. Made by dev/make_unicode_tables.py: do not edit.")
    print(f"// \\p{{L}}, \\p{{N}}, \\s as the regex engine of tokenizers {tokenizers.__version__} has them;")
    print(f"// form C from unicodedata {unicodedata.unidata_version}.")
    print("#pragma once\n")
    print("#include <cstdint>\n")
    print("struct CodePointRange {\n    uint32_t first, last;\n};")
    print_table("unicode_letters", r"\p{L}", letters)
    print_table("unicode_numbers", r"\p{N}", numbers)
    print_table("unicode_spaces", r"\s", spaces)
    print_table("unicode_composable", "NFC quick check No or Maybe: may change under form C", composable())
    marks = {c for c in SCALARS if unicodedata.combining(chr(c)) != 0}
    print_table("unicode_marks", "Combining class not 0: form C may reorder two in a row", marks)


main()
