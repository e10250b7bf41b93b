"""Texts for tests: anything that Unicode allows, mixed with what trips tokenizers."""

import functools
import sys

from hypothesis import strategies as st

from lib.tokenizer.pretokenize import LETTERS, NUMBERS, parse_ranges

# every code point but the halves of surrogate pairs
EVERY_CODE = [code for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]

TRICKY = [
    *"abcABC'’ \t\n\r019!?<|>",
    "\r\n",
    "  ",
    "'s",
    "'ll",
    "don't",
    " the",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x85",
    "\x1c",
    "\x00",
    "é",
    "e\u0301",
    "ß",
    "日本",
    "१२",
    "²",
    "Ⅷ",
    "👩‍👩‍👧",
    "\ufffd",
    "\U0010ffff",
    # letters and numbers that are younger than Unicode 16.0
    "\U000323b0",
    "\U00011de0",
    "<|a|>",
    "<|a|><|b|>",
    "<|endoftext|>",
    " <x>",
    "c\n",
]


def codes_of(table: str) -> set[int]:
    """The code points of a table of Unicode ranges."""
    return {code for lo, hi in parse_ranges(table) for code in range(lo, hi + 1)}


@functools.cache
def every_character() -> tuple[str, list[str]]:
    """A text that holds every character between `a` and `1`, and its pre-tokens by the tables."""
    letters, numbers = codes_of(LETTERS), codes_of(NUMBERS)
    pretokens = []
    for code in EVERY_CODE:
        char = chr(code)
        if code in letters:
            pretokens += ["a" + char, "1"]
        elif code in numbers:
            pretokens += ["a", char + "1"]
        else:
            pretokens += ["a", " 1"] if char == " " else ["a", char, "1"]
    return "".join(f"a{chr(code)}1" for code in EVERY_CODE), pretokens


def tricky_text(max_size: int = 30):
    """Strings of tricky pieces, some repeated often, with any characters between."""
    piece = st.one_of(st.sampled_from(TRICKY), st.characters(exclude_categories=["Cs"]))
    run = st.tuples(piece, st.sampled_from([1, 1, 1, 1, 2, 3, 9, 40])).map(lambda t: t[0] * t[1])
    return st.lists(run, max_size=max_size).map("".join)
