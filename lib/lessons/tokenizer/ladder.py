"""How encoding became fast: the compiled encoder step by step, each a small change of the last.

All of them look pre-tokens up in the tables of `lib.tokenizer.compiled_encoder`, and give the ids
of `Tokenizer`. Needs Numba.
"""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from lib.tokenizer.bpe import Tokenizer
from lib.tokenizer.compiled_encoder import (
    INLINE,
    CompiledEncoder,
    encode_anew,
    encode_ordinary,
    make_room,
    new_cache,
    recall_outside,
)
from lib.tokenizer.compiled_scan import (
    U32,
    class_table,
    compiled,
    load_word,
    next_pretoken,
    padded,
    pretoken_end,
    store_word,
)
from lib.tokenizer.compiled_words import find_entry, first_entry, pretoken_key

if TYPE_CHECKING:
    from IPython.display import Markdown


@compiled
def encode_by_character(data, start, end, classes, ranks, cache, out, n):
    """Write the ids of data[start:end] to `out` from `n` on; return where they end."""
    table = cache.table
    while start < end:
        after = pretoken_end(data, start, end, classes)
        low, high = pretoken_key(data, start, after - start)
        entry = find_entry(table, first_entry(table, low, high), low, high)
        last_ids = load_word(table, entry + 3)
        number = np.int64(last_ids >> U32)
        if 0 < number <= INLINE:
            store_word(out, n, load_word(table, entry + 2))
            store_word(out, n + 2, last_ids)
        else:
            number = encode_other(data, start, after, low, high, entry, ranks, cache, out, n)
        n += number
        start = after
    return n


@compiled
def encode_by_window(data, start, end, classes, ranks, cache, out, n):
    """Write the ids of data[start:end] to `out` from `n` on; return where they end."""
    table = cache.table
    base, ends = start, np.uint64(0)
    while start < end:
        after, base, ends = next_pretoken(data, start, end, classes, base, ends)
        low, high = pretoken_key(data, start, after - start)
        entry = find_entry(table, first_entry(table, low, high), low, high)
        last_ids = load_word(table, entry + 3)
        number = np.int64(last_ids >> U32)
        if 0 < number <= INLINE:
            store_word(out, n, load_word(table, entry + 2))
            store_word(out, n + 2, last_ids)
        else:
            number = encode_other(data, start, after, low, high, entry, ranks, cache, out, n)
        n += number
        start = after
    return n


@compiled
def encode_in_small_table(data, start, end, classes, ranks, cache, out, n):
    """Write the ids of data[start:end] to `out` from `n` on; return where they end."""
    make_room(cache)
    table = cache.table[: cache.used[3]]
    base, ends = start, np.uint64(0)
    while start < end:
        after, base, ends = next_pretoken(data, start, end, classes, base, ends)
        low, high = pretoken_key(data, start, after - start)
        entry = find_entry(table, first_entry(table, low, high), low, high)
        last_ids = load_word(table, entry + 3)
        number = np.int64(last_ids >> U32)
        if 0 < number <= INLINE:
            store_word(out, n, load_word(table, entry + 2))
            store_word(out, n + 2, last_ids)
        else:
            number = encode_other(data, start, after, low, high, entry, ranks, cache, out, n)
            make_room(cache)
            table = cache.table[: cache.used[3]]
        n += number
        start = after
    return n


@compiled
def encode_other(data, start, after, low, high, entry, ranks, cache, out, n):
    """Write the ids of a pre-token that has no entry in the table, or more ids than it holds."""
    table = cache.table[: cache.used[3]]
    number = np.int64(0)
    if load_word(table, entry + 3):
        number = recall_outside(cache, table, entry, data, start, after - start, out, n)
    if number == 0:
        number = encode_anew(data, start, after - start, low, high, ranks, cache, table, out, n)
    return number


def encoder_of(kernel: Callable, tokenizer: Tokenizer) -> Callable[[str], np.ndarray]:
    """Return a function that encodes text with `kernel`, one of those above or `lib`'s."""
    compiled_half: CompiledEncoder = tokenizer._compiled
    cache = new_cache()
    if kernel in (encode_by_character, encode_by_window):
        # these use the whole table from the beginning
        cache.table[:] = 0
        cache.used[3] = len(cache.table)
    out = np.empty(1 << 16, dtype=np.uint32)

    def encode(text: str) -> np.ndarray:
        nonlocal out
        data = text.encode()
        if len(out) < len(data) + 1 + INLINE:
            out = np.empty(len(data) + 1 + INLINE, dtype=np.uint32)
        arguments = class_table(), compiled_half.ranks, cache, out, 0
        return out[: kernel(padded(data), 0, len(data), *arguments)]

    return encode


def compiled_rungs(tokenizer: Tokenizer) -> dict[str, Callable[[str], np.ndarray]]:
    """The compiled steps of the ladder, by what each does that the one before does not."""
    compiled_tokenizer = Tokenizer(tokenizer.vocab, tokenizer.merges, implementation="numba")
    kernels = {
        "4. compiled": encode_by_character,
        "5. 64 bytes at a time": encode_by_window,
        "6. a small table": encode_in_small_table,
        "7. look ahead": encode_ordinary,
    }
    return {name: encoder_of(kernel, compiled_tokenizer) for name, kernel in kernels.items()}


def show_diff(before: Callable, after: Callable) -> Markdown:
    """Show how the code of `after` differs from that of `before`."""
    from IPython.display import Markdown

    old, new = (
        textwrap.dedent(inspect.getsource(getattr(function, "py_func", function))).splitlines()
        for function in (before, after)
    )
    lines = [
        line
        for line in difflib.unified_diff(old, new, n=2, lineterm="")
        if not line.startswith(("---", "+++"))
    ]
    return Markdown("```diff\n" + "\n".join(lines) + "\n```")
