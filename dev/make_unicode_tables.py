#!/usr/bin/env python3
"""Writes io/unicode_tables.h: in what our libraries for Unicode differ from those of Hugging Face's `tokenizers`.

    python3 dev/make_unicode_tables.py > io/unicode_tables.h    (needs the package `tokenizers` and libutf8proc.so.2)

newer_characters: what the regex engine of `tokenizers` knows and Python's unicodedata, of version 14 as the PCRE2 of
Debian 12, does not (or has in another class); each with an older one of the same class. The classes come from the engine.
punctuation: what the pre-tokenizer Punctuation of `tokenizers` takes, whose own table is of Unicode 8.
never_normalized: what utf8proc reorders, composes or replaces and the normalizers of `tokenizers`, which are older, do not.
"""
import ctypes
import sys
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

SCALARS = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
ALL = "".join(SCALARS)
CLASSES = ["Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc",
           "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Co"]
SCRIPTS = ["Latin", "Greek", "Cyrillic", "Han", "Hiragana", "Katakana", "Hangul", "Arabic", "Hebrew", "Thai", "Devanagari"]


def members_of(regex):
    return set(ALL) - set(normalizers.Replace(Regex(regex), "").normalize_str(ALL))


def punctuation():
    step = pre_tokenizers.Punctuation("isolated")
    return {c for c in SCALARS if len(step.pre_tokenize_str("a" + c + "a")) == 3}


def stand_ins(isolated):
    """[(character, older character like it)]. isolated: as by punctuation()"""
    class_of = {c: name for name in CLASSES for c in members_of(rf"\p{{{name}}}")}
    scripts = {name: members_of(rf"\p{{{name}}}") for name in SCRIPTS}
    older, newer = {}, []
    for c in SCALARS:
        if c not in class_of:
            continue
        key = (class_of[c], len(c.encode()), tuple(c in scripts[name] for name in SCRIPTS), c in isolated)
        if unicodedata.category(c) == class_of[c]:
            older.setdefault(key, []).append(c)
        else:
            newer.append((c, key))
    likes = [("\u180e", "\u200b")]  # no white space, but PCRE2 takes it for one: U+200B is of the same class (Cf) and length
    for c, key in newer:
        alike = older.get(key) or older[*key[:2], (False,) * len(SCRIPTS), key[3]]
        # The one before it, which a range in a pattern most likely takes, too.
        likes.append((c, max((o for o in alike if o < c), default=alike[0])))
    return sorted(likes)


def utf8proc():
    library = ctypes.CDLL("libutf8proc.so.2")
    library.utf8proc_map.restype = ctypes.c_ssize_t
    library.utf8proc_version.restype = library.utf8proc_unicode_version.restype = ctypes.c_char_p
    return library


def never_normalized(library):
    free = ctypes.CDLL(None).free

    def decompose(text, compatibility):
        data, out = text.encode(), ctypes.c_void_p()
        n = library.utf8proc_map(data, ctypes.c_ssize_t(len(data)), ctypes.byref(out), 1 << 1 | 1 << 4 | compatibility << 2)
        result = ctypes.string_at(out, n).decode()
        free(out)
        return result

    nfd, nfkd = normalizers.NFD(), normalizers.NFKD()
    differ = set()
    for c in SCALARS:
        # Two marks in a row are sorted by their classes: one of class 1, one of 230 and one of 240 tell classes apart.
        texts = [c, "a\u0301" + c, "a" + c + "\u0334", "a\u0345" + c, "a" + c + "\u0301"]
        if nfkd.normalize_str(c) != decompose(c, True) or any(nfd.normalize_str(t) != decompose(t, False) for t in texts):
            differ |= {c, *decompose(c, False)[1:]}
    return differ


def print_rows(rows):
    line = "   "
    for entry in rows:
        if len(line) + len(entry) > 119:
            print(line)
            line = "   "
        line += " " + entry
    print(line + "\n};")


def ranges_of(characters, like=lambda c: None):
    ranges = []
    for c in sorted(characters):
        if ranges and ranges[-1][1] == ord(c) - 1 and ranges[-1][2] == like(c):
            ranges[-1][1] = ord(c)
        else:
            ranges.append([ord(c), ord(c), like(c)])
    return ranges


def main():
    if sys.argv[1:]:
        sys.stderr.write(__doc__)
        sys.exit(0 if sys.argv[1:] == ["--help"] else 2)
    if unicodedata.unidata_version != "14.0.0":
        sys.exit(f"this needs a Python whose unicodedata is of version 14.0.0 (Python 3.11), not {unicodedata.unidata_version}")
    library = utf8proc()
    isolated = punctuation()
    likes = dict(stand_ins(isolated))
    print("// io/unicode_tables.h: in what PCRE2 and utf8proc differ from the libraries of Hugging Face's tokenizers.")
    print("// Made by dev/make_unicode_tables.py: do not edit.")
    print(f"// tokenizers {tokenizers.__version__}; utf8proc {library.utf8proc_version().decode()}"
          f" (Unicode {library.utf8proc_unicode_version().decode()}).")
    print("#pragma once\n\n#include <cstdint>\n")
    print("// Characters of Unicode 15 and 16 (and one of another class since), and for each range an older one of the same class and length in UTF-8.")
    print("struct StandIn {\n    uint32_t first, last, like;\n};")
    print("constexpr StandIn newer_characters[] = {")
    print_rows(f"{{0x{a:X}, 0x{b:X}, 0x{ord(like):X}}}," for a, b, like in ranges_of(likes, likes.get))
    print("\nstruct CodePointRange {\n    uint32_t first, last;\n};")
    print("// What the pre-tokenizer Punctuation takes for punctuation: that of ASCII and of Unicode 8.")
    print("constexpr CodePointRange punctuation[] = {")
    print_rows(f"{{0x{a:X}, 0x{b:X}}}," for a, b, _ in ranges_of(isolated))
    print("\n// Characters that the normalizers of tokenizers do not change or reorder, and utf8proc does.")
    print("constexpr CodePointRange never_normalized[] = {")
    print_rows(f"{{0x{a:X}, 0x{b:X}}}," for a, b, _ in ranges_of(never_normalized(library)))


main()
