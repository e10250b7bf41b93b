"""Texts for tests: whatever Unicode allows, mixed with what trips tokenizers."""

from hypothesis import strategies as st

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


def tricky_text(max_size: int = 30):
    """Strings of tricky pieces, some repeated often, with any characters between."""
    piece = st.one_of(st.sampled_from(TRICKY), st.characters(exclude_categories=["Cs"]))
    run = st.tuples(piece, st.sampled_from([1, 1, 1, 1, 2, 3, 9, 40])).map(lambda t: t[0] * t[1])
    return st.lists(run, max_size=max_size).map("".join)
