"""How encoding became fast: the compiled encoder step by step, each a small change of the last.

All of them look pre-tokens up in the tables of `lib.tokenizer.compiled_encoder`, and give the ids
of `Tokenizer`. Needs Numba.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lib.tokenizer.bpe import Tokenizer
from lib.tokenizer.compiled_encoder import (
    OUTSIDE,
    U56,
    Workspace,
    arrays_at,
    encode_anew,
    encode_ordinary,
    make_room,
    recall_outside,
)
from lib.tokenizer.compiled_scan import (
    PADDING,
    compiled,
    load_word,
    next_pretoken,
    pretoken_end,
    store_word,
)
from lib.tokenizer.compiled_words import find_entry, first_entry, pretoken_key


@compiled
def encode_by_character(addresses, start, end, n, width):
    """Write the ids of data[start:end] to `out` from `n` on; return where they end."""
    data, _, out, _, classes, _, _, _, cache = arrays_at(addresses)
    table = cache.table
    while start < end:
        after = pretoken_end(data, start, end, classes)
        low, high = pretoken_key(data, start, after - start)
        entry = find_entry(table, first_entry(table, low, high), low, high)
        last_ids = load_word(table, entry + 3)
        number = np.int64(last_ids >> U56)
        if 0 < number < OUTSIDE:
            store_word(out, n, load_word(table, entry + 2))
            store_word(out, n + 8, last_ids)
            n += number * width
        else:
            n = encode_other(addresses, start, after, low, high, entry, n, width)
        start = after
    return n


@compiled
def encode_by_window(addresses, start, end, n, width):
    """Write the ids of data[start:end] to `out` from `n` on; return where they end."""
    data, _, out, _, classes, _, _, _, cache = arrays_at(addresses)
    table = cache.table
    base, ends = start, np.uint64(0)
    while start < end:
        after, base, ends = next_pretoken(data, start, end, classes, base, ends)
        low, high = pretoken_key(data, start, after - start)
        entry = find_entry(table, first_entry(table, low, high), low, high)
        last_ids = load_word(table, entry + 3)
        number = np.int64(last_ids >> U56)
        if 0 < number < OUTSIDE:
            store_word(out, n, load_word(table, entry + 2))
            store_word(out, n + 8, last_ids)
            n += number * width
        else:
            n = encode_other(addresses, start, after, low, high, entry, n, width)
        start = after
    return n


@compiled
def encode_in_small_table(addresses, start, end, n, width):
    """Write the ids of data[start:end] to `out` from `n` on; return where they end."""
    data, _, out, _, classes, _, _, _, cache = arrays_at(addresses)
    make_room(cache)
    table = cache.table[: cache.used[3]]
    base, ends = start, np.uint64(0)
    while start < end:
        after, base, ends = next_pretoken(data, start, end, classes, base, ends)
        low, high = pretoken_key(data, start, after - start)
        entry = find_entry(table, first_entry(table, low, high), low, high)
        last_ids = load_word(table, entry + 3)
        number = np.int64(last_ids >> U56)
        if 0 < number < OUTSIDE:
            store_word(out, n, load_word(table, entry + 2))
            store_word(out, n + 8, last_ids)
            n += number * width
        else:
            n = encode_other(addresses, start, after, low, high, entry, n, width)
            make_room(cache)
            table = cache.table[: cache.used[3]]
        start = after
    return n


@compiled
def encode_other(addresses, start, after, low, high, entry, n, width):
    """Write the ids of a pre-token that has no entry in the table, or more ids than it holds."""
    data, _, out, _, _, _, _, _, cache = arrays_at(addresses)
    table, length, before = cache.table[: cache.used[3]], after - start, n
    if load_word(table, entry + 3):
        n = recall_outside(cache, table, entry, data, start, length, out, n, width)
    if n == before:
        n = encode_anew(addresses, start, length, low, high, n, width)
    return n


def encoder_of(kernel: Callable, tokenizer: Tokenizer) -> Callable[[str], np.ndarray]:
    """Return a function that encodes text with `kernel`, one of those above or `lib`'s."""
    compiled_half = tokenizer._compiled_for(0)
    work: Workspace | None = None

    def encode(text: str) -> np.ndarray:
        nonlocal work
        data = text.encode()
        if work is None or len(work.text) < len(data) + PADDING:
            work = Workspace(compiled_half, len(data))
            if kernel in (encode_by_character, encode_by_window):
                # these use the whole table from the beginning
                work.cache.table[:] = 0
                work.cache.used[3] = len(work.cache.table)
        work.text[: len(data)] = data
        end = kernel(work.without_special, 0, len(data), 0, compiled_half.width)
        return work.ids[: end // compiled_half.width]

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
