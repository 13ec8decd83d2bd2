#!/usr/bin/env python3
"""Writes src/tokenizer/text/unicode_table.inc: the general category of every character.

The categories are those of the PyPI package `tokenizers` (its regular expressions know a newer Unicode than
distributions do), so that our splitting agrees with it. Needs `pip install tokenizers`:

    tools/make_unicode_table.py > src/tokenizer/text/unicode_table.inc
"""
from tokenizers import Regex, pre_tokenizers

CATEGORIES = ("Cn Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co").split()
NUM_CHARACTERS = 0x110000


def is_surrogate(code):
    return 0xD800 <= code < 0xE000


def members(category):
    """The characters of a category: those that splitting with removal takes out."""
    split = pre_tokenizers.Split(Regex(r"\p{%s}" % category), behavior="removed")
    found = []
    for start in range(0, NUM_CHARACTERS, 0x8000):
        codes = [code for code in range(start, start + 0x8000) if not is_surrogate(code)]
        kept = set()
        for _, (begin, end) in split.pre_tokenize_str("".join(map(chr, codes))):
            kept.update(range(begin, end))
        found += [code for i, code in enumerate(codes) if i not in kept]
    return found


def category_table():
    table = [CATEGORIES.index("Cn")] * NUM_CHARACTERS
    for index, category in enumerate(CATEGORIES):
        if category not in ("Cn", "Cs"):
            for code in members(category):
                table[code] = index
    for code in range(0xD800, 0xE000):
        table[code] = CATEGORIES.index("Cs")
    return table


def main():
    table = category_table()
    starts = [code for code in range(NUM_CHARACTERS) if code == 0 or table[code] != table[code - 1]]
    words = ["0x%x" % (code << 8 | table[code]) for code in starts]
    print("// Made by tools/make_unicode_table.py: where each run of characters of one general category starts,")
    print("// as (first character << 8 | category).")
    line = ""
    for word in words:
        if len(line) + len(word) + 2 > 100:
            print(line.rstrip())
            line = ""
        line += word + ", "
    print(line.rstrip())


if __name__ == "__main__":
    main()
