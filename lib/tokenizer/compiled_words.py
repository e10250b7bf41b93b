"""Compiled by Numba: a hash table of pre-tokens, and counting them.

A text repeats its pre-tokens, so counting and encoding look each one up in a table with entries of
32 bytes. A pre-token of up to 15 bytes and its length are the key itself, two 64-bit words, so a
hit costs two loads, a few multiplications and one cache line.

The rules for kernels are in `lib.tokenizer.compiled_scan`.
"""

import threading

import numpy as np

from lib.tokenizer.compiled_scan import (
    LOW_32,
    ONE,
    U32,
    Special,
    class_table,
    compiled,
    find_special,
    leading_zeros,
    load_word,
    next_pretoken,
    padded,
    same_bytes,
    valid_utf8,
)

# an entry of a table has four uint64: the key's low and high word, and two for the caller; in an
# empty entry, high is 0
ENTRY = 4
# longer pre-tokens do not fit a key: it holds hashes of them
LONGEST_KEY = 15
# the key holds the length in its highest byte, up to this one
LONGEST_LENGTH = 255

# odd constants with well-mixed bits (the golden ratio, and one of xxHash's primes)
MIX_1, MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
# for each length up to LONGEST_KEY, the bits that are kept of its first and second eight bytes
KEEP_LOW = np.array([(1 << 8 * min(n, 8)) - 1 for n in range(16)], dtype=np.uint64)
KEEP_HIGH = np.array([(1 << 8 * max(n - 8, 0)) - 1 for n in range(16)], dtype=np.uint64)


def new_table(rows: int) -> np.ndarray:
    """Make a table of `rows` entries, not initialized, (rows * ENTRY,) uint64.

    It begins at a multiple of an entry's size, so that none lies in two lines of the cache, of
    which `prefetch` would fetch only the first. NumPy alone may begin it anywhere.
    """
    table = np.empty((rows + 1) * ENTRY, dtype=np.uint64)
    begin = -(table.ctypes.data // table.itemsize) % ENTRY
    return table[begin : begin + rows * ENTRY]


@compiled
def hash_bytes(data, start, length):
    """Return two hashes of at least eight bytes."""
    low, high = np.uint64(0), np.uint64(length)
    for i in range(start, start + length - 8, 8):
        word = load_word(data, i)
        low = (low ^ word) * MIX_1
        low ^= low >> U32
        high = (high + word) * MIX_2
        high ^= high >> U32
    word = load_word(data, start + length - 8)
    return (low ^ word) * MIX_1, (high + word) * MIX_2


@compiled
def pretoken_key(data, start, length):
    """Return two words that identify the bytes: themselves and their number, or hashes."""
    if length <= LONGEST_KEY:
        low = load_word(data, start) & KEEP_LOW[np.uint64(length)]
        high = load_word(data, start + 8) & KEEP_HIGH[np.uint64(length)]
        return low, high | np.uint64(length) << np.uint64(56)
    low, high = hash_bytes(data, start, length)
    return low, high >> np.uint64(8) | np.uint64(min(length, LONGEST_LENGTH)) << np.uint64(56)


@compiled
def pretoken_hash(low, high):
    """Return 32 well-mixed bits of a key."""
    mixed = (low ^ (high * MIX_2)) * MIX_1
    return ((mixed ^ (mixed >> U32)) * MIX_2) >> U32


@compiled
def first_entry(table, low, high):
    """Return where the search for a key begins, in a table whose size is a power of two."""
    # the highest bits of a product depend on all bits of its factors
    mixed = (low ^ (high * MIX_2)) * MIX_1
    return np.int64(mixed >> (leading_zeros(table.shape[0]) + ONE)) & ~(ENTRY - 1)


@compiled
def find_entry(table, at, low, high):
    """Return where the entry of a key is from `at` on, or the empty entry where it belongs.

    At least one entry must be empty, or the search never ends.
    """
    last = table.shape[0] - ENTRY
    # one branch for both words of the key
    while (load_word(table, at) ^ low) | (load_word(table, at + 1) ^ high):
        if load_word(table, at + 1) == 0:
            break
        at = (at + ENTRY) & last
    return at


@compiled
def find_counted(table, low, high, length, data, start):
    """Return where the entry of a pre-token of any length begins, or the empty one for it.

    Where the key holds hashes, the bytes are compared with those that were counted first.
    """
    at = find_entry(table, first_entry(table, low, high), low, high)
    while length > LONGEST_KEY and table[at + 1]:
        tag = table[at + 2]
        first = np.int64(tag >> U32)
        same_key = table[at] == low and table[at + 1] == high
        if (
            same_key
            and np.int64(tag & LOW_32) == length
            and same_bytes(data, first, data, start, length)
        ):
            break
        at = (at + ENTRY) & (table.shape[0] - ENTRY)
    return at


@compiled
def count_text(data, start, end, classes, special, table, room):
    """Count the pre-tokens of data[start:end].

    Stops early once `table` holds `room` pre-tokens. An entry of the table is a key, the length and
    the first occurrence in `data` << 32, and the count. Returns where it stopped, and the number of
    pre-tokens in the table.
    """
    filled = 0
    while start < end:
        stop, token = find_special(data, start, end, special)
        base, window = start, np.uint64(0)
        while start < stop:
            if filled == room:
                return start, filled
            after, base, window = next_pretoken(data, start, stop, classes, base, window)
            length = after - start
            low, high = pretoken_key(data, start, length)
            at = find_counted(table, low, high, length, data, start)
            if table[at + 1] == 0:
                table[at], table[at + 1] = low, high
                table[at + 2] = np.uint64(length) | np.uint64(start) << U32
                table[at + 3] = 0
                filled += 1
            table[at + 3] += ONE
            start = after
        if token >= 0:
            start += special.starts[token + 1] - special.starts[token]
    return start, filled


@compiled
def collect(table, data, index, hashes, starts, counts, kept, num_words):
    """Move the counts of `table` to the words kept so far; return the new number of words.

    Word w is kept[starts[w] : starts[w + 1]] and occurred counts[w] times. `index` maps a hash to
    w + 1 by open addressing. The arrays must have space for every row of the table.
    """
    mask = index.shape[0] - 1
    for entry in range(0, table.shape[0], ENTRY):
        if table[entry + 1] == 0:
            continue
        tag = table[entry + 2]
        length, offset = np.int64(tag & LOW_32), np.int64(tag >> U32)
        count = np.int64(table[entry + 3])
        mixed = np.uint32(pretoken_hash(table[entry], table[entry + 1]))
        at = np.int64(mixed) & mask
        while True:
            word = np.int64(index[at]) - 1
            if word < 0:
                # a new word
                index[at] = num_words + 1
                hashes[num_words] = mixed
                counts[num_words] = count
                begin = starts[num_words]
                for k in range(length):
                    kept[begin + k] = data[offset + k]
                starts[num_words + 1] = begin + length
                num_words += 1
                break
            if (
                hashes[word] == mixed
                and starts[word + 1] - starts[word] == length
                and same_bytes(kept, starts[word], data, offset, length)
            ):
                counts[word] += count
                break
            at = (at + 1) & mask
        table[entry + 1] = 0
    return num_words


@compiled
def reindex(index, hashes, num_words):
    """Fill an empty, larger `index`."""
    mask = index.shape[0] - 1
    for word in range(num_words):
        at = np.int64(hashes[word]) & mask
        while index[at] != 0:
            at = (at + 1) & mask
        index[at] = word + 1


class WordCounts:
    """The distinct pre-tokens of a text and their counts, gathered from several threads.

    Each thread counts a chunk in a small table that fits its cache, and moves the counts here when
    the table is half full. So memory grows with the distinct pre-tokens, not with text or threads.
    """

    SMALL_TABLE_ROWS = 1 << 15

    def __init__(self, special: Special):
        self.special = special
        self.lock = threading.Lock()
        self.num_words = 0
        self.index = np.zeros(1 << 16, dtype=np.int32)
        self.hashes = np.empty(1 << 15, dtype=np.uint32)
        self.counts = np.empty(1 << 15, dtype=np.int64)
        self.starts = np.zeros((1 << 15) + 1, dtype=np.int64)
        self.kept = np.empty(1 << 18, dtype=np.uint8)

    def count(self, text: bytes) -> int:
        """Count the pre-tokens of a text; return the number of bytes."""
        valid = valid_utf8(text)
        data = padded(valid)
        table = new_table(self.SMALL_TABLE_ROWS)
        table[:] = 0
        room = self.SMALL_TABLE_ROWS // 2
        start = 0
        while start < len(valid):
            begin = start
            rest = data, start, len(valid)
            start, filled = count_text(*rest, class_table(), self.special, table, room)
            self._add(table, data, filled, start - begin)
        return len(text)

    def _add(self, table: np.ndarray, data: np.ndarray, words: int, num_bytes: int) -> None:
        """Move the counts of `table` here: at most `words` new words of `num_bytes` in all."""
        with self.lock:
            most = self.num_words + words
            if most > len(self.counts):
                self.hashes = enlarged(self.hashes, 2 * most)
                self.counts = enlarged(self.counts, 2 * most)
                self.starts = enlarged(self.starts, 2 * most + 1)
            if 2 * most > len(self.index):
                self.index = np.zeros(power_of_two(4 * most), dtype=np.int32)
                reindex(self.index, self.hashes, self.num_words)
            used = int(self.starts[self.num_words])
            if used + num_bytes > len(self.kept):
                self.kept = enlarged(self.kept, 2 * used + num_bytes)
            words = self.index, self.hashes, self.starts, self.counts, self.kept
            self.num_words = collect(table, data, *words, self.num_words)


def enlarged(array: np.ndarray, length: int) -> np.ndarray:
    """Return a copy with space for `length` elements along the first axis."""
    larger = np.empty((length, *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()
