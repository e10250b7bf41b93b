"""Compiled by Numba: split text into pre-tokens, look them up, count them.

A hand-written scanner over the UTF-8 bytes replaces the regular expression of
`lib.tokenizer.pretokenize`; one table holds the class of every code point. A text repeats its
pre-tokens, so counting and encoding look each one up in a hash table with rows of 32 bytes. A
pre-token of up to 16 bytes is its own key, loaded as two 64-bit words, so a hit costs two loads, a
few multiplications and one cache line.

Kernels (`@compiled`) take arrays and return numbers, and release the interpreter lock. Arrays do
not grow inside a kernel: it returns when it runs out of space, and the caller enlarges the array
and calls again. Numba turns int64 mixed with uint64 into float, so hashes stay in uint64 and
indices in int64.
"""

import hashlib
import re
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from lib.tokenizer.pretokenize import LETTERS, NUMBERS, WHITESPACE, parse_ranges

# the classes of characters; 0 is any other
LETTER, NUMBER, SPACE = 1, 2, 3
# bytes beyond the end of a text that may be read, since eight are loaded at a time
PADDING = 16


def _source_stamp() -> str:
    """Hash all Python files of this folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCE_STAMP = _source_stamp()


def compiled(function: Callable) -> Callable:
    """Compile a kernel that releases the interpreter lock, and cache its machine code on disk.

    Numba recompiles a kernel when its own file has changed. Kernels here call kernels of other
    files, so they must be recompiled when any of these has changed. Numba has no public way to say
    so; a test makes sure that this one still works.
    """
    kernel = njit(nogil=True, cache=True)(function)
    kernel._cache._cache_file._source_stamp = SOURCE_STAMP
    return kernel


@lru_cache(maxsize=1)
def class_table() -> np.ndarray:
    """Return the class of every code point, (0x110000,) uint8."""
    table = np.zeros(0x110000, dtype=np.uint8)
    for kind, ranges in ((LETTER, LETTERS), (NUMBER, NUMBERS), (SPACE, WHITESPACE)):
        for first, last in parse_ranges(ranges):
            table[first : last + 1] = kind
    return table


@intrinsic
def load_word(typing_context, array, index):
    """Load `array[index : index + 8]` of a uint8 array as one little-endian uint64, unaligned."""

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(view.data, [arguments[1]])
        return builder.load(builder.bitcast(pointer, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(array, types.int64), generate


@intrinsic
def store_word(typing_context, array, index, word):
    """Store a uint64 to `array[index : index + 8]` of a uint8 array, little-endian, unaligned."""

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(view.data, [arguments[1]])
        pointer = builder.bitcast(pointer, ir.IntType(64).as_pointer())
        builder.store(arguments[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@intrinsic
def trailing_zeros(typing_context, word):
    """Count the zero bits below the lowest one bit of a nonzero uint64."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


ALL_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
LOW_32 = np.uint64(0xFFFFFFFF)
ONE, U32 = np.uint64(1), np.uint64(32)
# Eight bytes at a time, after Mycroft: an addition to bytes below 0x80 carries into the high bit of
# those that exceed a bound.
HIGH_BITS = np.uint64(0x8080808080808080)
LOW_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
TO_LOWER = np.uint64(0x2020202020202020)
REACHES_A = np.uint64(0x0101010101010101 * (0x80 - ord("a")))
EXCEEDS_Z = np.uint64(0x0101010101010101 * (0x7F - ord("z")))


@compiled
def ascii_letters_end(data, i):
    """Return the first index from `i` on that is not an ASCII letter.

    It may be beyond the end of a segment; the caller clips it. Bytes of other alphabets have their
    high bit set, which `| word` catches.
    """
    while True:
        word = load_word(data, i)
        lower = (word | TO_LOWER) & LOW_BITS
        other = (~(lower + REACHES_A) | (lower + EXCEEDS_Z) | word) & HIGH_BITS
        if other:
            return i + np.int64(trailing_zeros(other) >> 3)
        i += 8


@compiled
def character(data, i, classes):
    """Return class and width in bytes of the character that starts at `i`."""
    b = np.int64(data[i])
    if b < 0x80:
        return classes[b], 1
    if b < 0xE0:
        return classes[(b & 0x1F) << 6 | (data[i + 1] & 0x3F)], 2
    if b < 0xF0:
        return classes[(b & 0x0F) << 12 | (data[i + 1] & 0x3F) << 6 | (data[i + 2] & 0x3F)], 3
    high = (b & 0x07) << 18 | (data[i + 1] & 0x3F) << 12
    return classes[high | (data[i + 2] & 0x3F) << 6 | (data[i + 3] & 0x3F)], 4


@compiled
def run_end(data, i, end, kind, classes):
    """Return the first index from `i` on whose character is not of class `kind`."""
    while True:
        if kind == LETTER:
            i = ascii_letters_end(data, i)
        if i >= end:
            return end
        found, width = character(data, i, classes)
        if found != kind:
            return i
        i += width


@compiled
def contraction_length(data, i, end):
    """Return the length of the contraction ('s, 'd, 'm, 't, 'll, 've, 're) at `i`, or 0."""
    if i + 1 < end:
        b = data[i + 1]
        if b == ord("s") or b == ord("d") or b == ord("m") or b == ord("t"):
            return 2
        if i + 2 < end:
            c = data[i + 2]
            if b == ord("l") and c == ord("l"):
                return 3
            if (b == ord("v") or b == ord("r")) and c == ord("e"):
                return 3
    return 0


@compiled
def space_end(data, i, end, classes):
    """Return the end of the white space at `i`, less its last character if text follows."""
    j = last = i
    while j < end:
        kind, width = character(data, j, classes)
        if kind != SPACE:
            return j if last == i else last
        last = j
        j += width
    return j


@compiled
def pretoken_end(data, i, end, classes):
    """Return the end of the pre-token that starts at `i`, by GPT-2's pattern."""
    start = i
    if data[i] == ord(" ") and i + 1 < end:
        start = i + 1
    kind, width = character(data, start, classes)
    if kind == LETTER:
        return run_end(data, start + width, end, LETTER, classes)
    if kind == SPACE:
        return space_end(data, i, end, classes)
    if data[i] == ord("'"):
        length = contraction_length(data, i, end)
        if length:
            return i + length
    return run_end(data, start + width, end, kind, classes)


@compiled
def is_valid_utf8(data, end):
    """Whether data[:end] is well-formed UTF-8 (RFC 3629: no overlong forms, no surrogates)."""
    i = 0
    while i < end:
        if load_word(data, i) & HIGH_BITS == 0:
            i += 8
            continue
        b = data[i]
        if b < 0x80:
            i += 1
            continue
        if b < 0xC2 or b > 0xF4:
            return False
        width = 2 if b < 0xE0 else 3 if b < 0xF0 else 4
        if i + width > end:
            return False
        second = data[i + 1]
        if (
            (b == 0xE0 and second < 0xA0)
            or (b == 0xED and second > 0x9F)
            or (b == 0xF0 and second < 0x90)
            or (b == 0xF4 and second > 0x8F)
        ):
            return False
        for k in range(1, width):
            if data[i + k] & 0xC0 != 0x80:
                return False
        i += width
    return True


def prepare(text: bytes) -> tuple[np.ndarray, int]:
    """Return `text` as valid UTF-8 with padding at the end, and its length without it."""
    data = np.frombuffer(text + bytes(PADDING), dtype=np.uint8)
    if is_valid_utf8(data, len(text)):
        return data, len(text)
    text = text.decode("utf-8", "replace").encode()
    return np.frombuffer(text + bytes(PADDING), dtype=np.uint8), len(text)


def split_segments(
    data: np.ndarray, length: int, pattern: re.Pattern[bytes] | None
) -> tuple[np.ndarray, list[bytes]]:
    """Return rows (start, end) of the text between special tokens, and those special tokens."""
    spans, found, start = [], [], 0
    for match in pattern.finditer(data.data, 0, length) if pattern else ():
        spans.append((start, match.start()))
        found.append(match.group())
        start = match.end()
    spans.append((start, length))
    return np.array(spans, dtype=np.int64), found


# A table of pre-tokens has rows of four uint64: (low, high, length | offset << 32, value), where
# low and high are the key. A length of 0 marks an empty row. Offset and value mean what the caller
# wants; an offset has 32 bits, so a chunk is smaller than 4 GB.

# odd constants with well-mixed bits (the golden ratio, and one of xxHash's primes)
MIX_1, MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


@compiled
def pretoken_key(data, start, length):
    """Return two words that identify the bytes: up to 16 bytes themselves, or two hashes."""
    low = load_word(data, start)
    if length <= 8:
        return low & (ALL_ONES >> np.uint64(64 - 8 * length)), np.uint64(0)
    high = load_word(data, start + 8)
    if length <= 16:
        return low, high & (ALL_ONES >> np.uint64(128 - 8 * length))
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
def pretoken_hash(low, high, length):
    """Return 32 well-mixed bits of a key."""
    mixed = (low ^ (high * MIX_2) ^ np.uint64(length)) * MIX_1
    return ((mixed ^ (mixed >> U32)) * MIX_2) >> U32


@compiled
def same_bytes(a, i, b, j, length):
    for k in range(length):  # noqa: SIM110 (Numba has no generator expressions)
        if a[i + k] != b[j + k]:
            return False
    return True


@compiled
def find_slot(table, low, high, length, data, start, kept):
    """Return the row of the pre-token, or the empty row where it belongs.

    Keys of more than 16 bytes are compared in full with the copy in `kept` at the row's offset.
    At least one row must be empty, or the search never ends.
    """
    mask = table.shape[0] - 1
    slot = np.int64(pretoken_hash(low, high, length)) & mask
    while True:
        tag = table[slot, 2]
        if tag == 0:
            return slot
        if (
            table[slot, 0] == low
            and table[slot, 1] == high
            and np.int64(tag & LOW_32) == length
            and (length <= 16 or same_bytes(kept, np.int64(tag >> U32), data, start, length))
        ):
            return slot
        slot = (slot + 1) & mask


@compiled
def count_segments(data, segments, row, position, classes, table, room):
    """Count the pre-tokens of data[start:end] for each row (start, end) of `segments`.

    Continues at `position` in `row`, and stops early once `table` holds `room` pre-tokens. In the
    table, the value is the count, and the offset that of the first occurrence in `data`. Returns
    (row, position, pre-tokens in the table).
    """
    filled = 0
    while row < segments.shape[0]:
        end = segments[row, 1]
        i = max(position, segments[row, 0])
        while i < end:
            if filled == room:
                return row, i, filled
            j = pretoken_end(data, i, end, classes)
            length = j - i
            low, high = pretoken_key(data, i, length)
            slot = find_slot(table, low, high, length, data, i, data)
            if table[slot, 2] == 0:
                table[slot, 0] = low
                table[slot, 1] = high
                table[slot, 2] = np.uint64(length) | np.uint64(i) << U32
                table[slot, 3] = 0
                filled += 1
            table[slot, 3] += ONE
            i = j
        row += 1
    return row, position, filled


@compiled
def collect(table, data, index, hashes, starts, counts, kept, num_words):
    """Move the counts of `table` to the words kept so far; return the new number of words.

    Word w is kept[starts[w] : starts[w + 1]] and occurred counts[w] times. `index` maps a hash to
    w + 1 by open addressing. The arrays must have space for every row of the table.
    """
    mask = index.shape[0] - 1
    for slot in range(table.shape[0]):
        tag = table[slot, 2]
        if tag == 0:
            continue
        length, offset = np.int64(tag & LOW_32), np.int64(tag >> U32)
        count = np.int64(table[slot, 3])
        mixed = np.uint32(pretoken_hash(table[slot, 0], table[slot, 1], length))
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
        table[slot, 2] = 0
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

    def __init__(self, pattern: re.Pattern[bytes] | None):
        self.pattern = pattern
        self.lock = threading.Lock()
        self.num_words = 0
        self.index = np.zeros(1 << 16, dtype=np.int32)
        self.hashes = np.empty(1 << 15, dtype=np.uint32)
        self.counts = np.empty(1 << 15, dtype=np.int64)
        self.starts = np.zeros((1 << 15) + 1, dtype=np.int64)
        self.kept = np.empty(1 << 18, dtype=np.uint8)

    def count(self, chunk: bytes) -> int:
        """Count the pre-tokens of `chunk`; return its number of bytes."""
        data, length = prepare(chunk)
        segments, _ = split_segments(data, length, self.pattern)
        table = np.zeros((self.SMALL_TABLE_ROWS, 4), dtype=np.uint64)
        room = self.SMALL_TABLE_ROWS // 2
        row, position = 0, 0
        while row < len(segments):
            begin = position
            row, position, filled = count_segments(
                data, segments, row, position, class_table(), table, room
            )
            stopped = position if row < len(segments) else length
            self._add(table, data, filled, stopped - begin)
        return len(chunk)

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
