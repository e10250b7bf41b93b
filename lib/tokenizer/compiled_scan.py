"""Compiled by Numba: find pre-tokens and special tokens.

A scanner over the UTF-8 bytes replaces the regular expression of `lib.tokenizer.pretokenize`; one
table holds the class of every code point. `pretoken_ends` looks at 64 bytes at a time;
`long_pretoken_end` goes character by character where a pre-token is longer than that.

Kernels (`@compiled`) take arrays and return numbers, and release the interpreter lock. Arrays do
not grow inside a kernel: it returns when it runs out of space, and the caller enlarges the array
and calls again. Numba turns int64 mixed with uint64 into float, so hashes and sets of bits stay in
uint64 and indices in int64. A variable that begins as the constant 0 makes Numba compile twice the
kernels that take it; one that begins as np.int64(0) does not.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from lib.tokenizer.pretokenize import LETTERS, NUMBERS, WHITESPACE, parse_ranges

# the classes of characters; 0 is any other
LETTER, NUMBER, SPACE = 1, 2, 3
# bytes that the scanner looks at together: one bit each in a word of 64
WINDOW = 64
# bytes beyond the end of a text that may be read, since a whole window is loaded at a time
PADDING = WINDOW + 16


def _source_stamp() -> str:
    """Hash all files of this folder that have kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("compiled_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCE_STAMP = _source_stamp()


def compiled(function: Callable, *, allocates: bool = False, inline: bool = False) -> Callable:
    """Compile a kernel that releases the interpreter lock, and cache its machine code on disk.

    Unless it allocates arrays or lists, it does not count references to them: the caller holds
    every array for as long as the kernel runs, and counting takes most of the time of a kernel that
    passes arrays to others.

    Numba recompiles a kernel when its own file has changed. Kernels here call kernels of other
    files, so they must be recompiled when any of these has changed. Numba has no public way to say
    so; a test makes sure that this one still works.
    """
    kernel = njit(nogil=True, cache=True, _nrt=allocates, forceinline=inline)(function)
    kernel._cache._cache_file._source_stamp = SOURCE_STAMP
    return kernel


compiled_with_allocation = partial(compiled, allocates=True)
inlined = partial(compiled, inline=True)


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
    """Load eight bytes from `array[index]` on as one little-endian uint64, unaligned."""

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(view.data, [arguments[1]])
        return builder.load(builder.bitcast(pointer, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(array, types.int64), generate


@intrinsic
def store_word(typing_context, array, index, word):
    """Store a uint64 to eight bytes from `array[index]` on, little-endian, unaligned."""

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(view.data, [arguments[1]])
        pointer = builder.bitcast(pointer, ir.IntType(64).as_pointer())
        builder.store(arguments[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@intrinsic
def array_at(typing_context, address, length, dtype):
    """Make an array of `dtype`, (length,), from the address of its elements."""
    array_type = types.Array(dtype.dtype, 1, "C")

    def generate(context, builder, signature, arguments):
        array = context.make_array(array_type)(context, builder)
        size = context.get_constant(types.intp, dtype.dtype.bitwidth // 8)
        populate_array(
            array,
            data=builder.inttoptr(arguments[0], array.data.type),
            shape=[arguments[1]],
            strides=[size],
            itemsize=size,
            meminfo=None,
        )
        return array._getvalue()

    return array_type(types.int64, types.int64, dtype), generate


@intrinsic
def prefetch(typing_context, array, index):
    """Ask memory for the cache line of `array[index]`, which is read soon."""

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(view.data, [arguments[1]])
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # for reading, into all levels of the cache, data
        builder.call(function, [builder.bitcast(pointer, byte), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def trailing_zeros(typing_context, word):
    """Count the zero bits below the lowest one bit of a nonzero uint64."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@intrinsic
def leading_zeros(typing_context, number):
    """Count the zero bits above the highest one bit of a positive int64."""

    def generate(context, builder, signature, arguments):
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.int64), generate


def byte_test(first: int, last: int, *, ignoring: int = 0) -> Callable:
    """Make a kernel `test(data, i)`: which bytes of data[i : i + WINDOW] are in first..last?

    It returns a uint64, bit k for byte i + k. Bits of `ignoring` count as set in each byte. LLVM
    compiles it to a few vector instructions.
    """
    vector = ir.VectorType(ir.IntType(8), WINDOW)

    def all_bytes(value: int) -> ir.Constant:
        return ir.Constant(vector, [value] * WINDOW)

    @intrinsic
    def test(typing_context, array, index):
        def generate(context, builder, signature, arguments):
            view = context.make_array(signature.args[0])(context, builder, arguments[0])
            pointer = builder.gep(view.data, [arguments[1]])
            found = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=1)
            offset = builder.sub(builder.or_(found, all_bytes(ignoring)), all_bytes(first))
            inside = builder.icmp_unsigned("<=", offset, all_bytes(last - first))
            return builder.bitcast(inside, ir.IntType(64))

        return types.uint64(array, types.int64), generate

    return test


letters_at = byte_test(ord("a"), ord("z"), ignoring=0x20)
digits_at = byte_test(ord("0"), ord("9"))
controls_at = byte_test(ord("\t"), ord("\r"))
blanks_at = byte_test(ord(" "), ord(" "))
apostrophes_at = byte_test(ord("'"), ord("'"))
# the bytes of characters beyond ASCII: any of them, and the first of each character
wide_at = byte_test(0x80, 0xFF)
leads_at = byte_test(0xC0, 0xFF)


@intrinsic
def equal_at(typing_context, array, index, byte):
    """Which bytes of array[index : index + WINDOW] equal `byte`? Returns a uint64 of bits."""
    vector = ir.VectorType(ir.IntType(8), WINDOW)

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(view.data, [arguments[1]])
        found = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=1)
        splat = builder.insert_element(
            ir.Constant(vector, ir.Undefined), arguments[2], ir.IntType(32)(0)
        )
        splat = builder.shuffle_vector(
            splat, splat, ir.Constant(ir.VectorType(ir.IntType(32), WINDOW), [0] * WINDOW)
        )
        return builder.bitcast(builder.icmp_unsigned("==", found, splat), ir.IntType(64))

    return types.uint64(array, types.int64, types.uint8), generate


ALL_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
LOW_32 = np.uint64(0xFFFFFFFF)
ONE, U32 = np.uint64(1), np.uint64(32)


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
    while i < end:
        found, width = character(data, i, classes)
        if found != kind:
            break
        i += width
    return i


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
def long_pretoken_end(data, i, end, classes):
    """Return the end of the pre-token that starts at `i`, which is no contraction."""
    start = i
    if data[i] == ord(" ") and i + 1 < end:
        start = i + 1
    kind, width = character(data, start, classes)
    if kind == LETTER:
        return run_end(data, start + width, end, LETTER, classes)
    if kind == SPACE:
        return space_end(data, i, end, classes)
    return run_end(data, start + width, end, kind, classes)


@compiled
def classify_wide(data, start, leads, classes, letter, number, space):
    """Add the characters that begin at the bits `leads` of a window to the bits of each class."""
    while leads:
        k = trailing_zeros(leads)
        leads &= leads - ONE
        kind, width = character(data, start + k, classes)
        bits = ((ONE << np.uint64(width)) - ONE) << np.uint64(k)
        if kind == LETTER:
            letter |= bits
        elif kind == NUMBER:
            number |= bits
        elif kind == SPACE:
            space |= bits
    return letter, number, space


@compiled
def pretoken_ends(data, start, end, classes):
    """Find the ends of the pre-tokens in the window that begins at `start`, where one starts.

    Bit k is set if a pre-token ends, and the next one begins, at start + k. There is no branch that
    depends on ordinary text: the characters of each class are the bits of a word, and shifts
    compare neighbors. Returns 0 if the first pre-token ends beyond the window. What is beyond it
    never takes an end away: it may add one, which a window that begins later finds.
    """
    room = end - start
    valid = ALL_ONES if room >= WINDOW else (ONE << np.uint64(room)) - ONE
    letter = letters_at(data, start) & valid
    number = digits_at(data, start) & valid
    blank = blanks_at(data, start) & valid
    space = blank | controls_at(data, start) & valid
    wide = wide_at(data, start) & valid
    follows = np.uint64(0)
    if wide:
        leads = leads_at(data, start) & valid
        follows = wide & ~leads
        letter, number, space = classify_wide(data, start, leads, classes, letter, number, space)
        letter, number, space = letter & valid, number & valid, space & valid
    text = valid & ~space
    other = text & ~(letter | number)

    # text begins a pre-token, unless the character before is of the same class or a blank
    same = letter & (letter << ONE) | number & (number << ONE) | other & (other << ONE)
    starts = text & ~same & ~(blank << ONE)
    # white space does where it begins, and again with its last character if text follows
    last = space & (text >> ONE)
    if follows:
        last = last & ~follows | (last & follows) >> ONE
        last = last & ~follows | (last & follows) >> ONE
    starts |= space & ~(space << ONE) | last

    # contractions
    candidates = apostrophes_at(data, start) & valid & (starts | ONE)
    while candidates:
        k = trailing_zeros(candidates)
        candidates &= candidates - ONE
        length = contraction_length(data, start + k, end)
        if length:
            starts &= ~(ONE << np.uint64(k) << ONE)
            if k + length < WINDOW:
                starts |= ONE << np.uint64(k + length)

    # the text ends a pre-token, too; and none ends where the first one begins
    return (starts | valid + ONE) & ~ONE


@compiled
def next_pretoken(data, start, end, classes, base, ends):
    """Return the end of the pre-token at `start`, and the window to continue with.

    The window is `base` and those of its `pretoken_ends` that are still to come, at first none.
    """
    if ends == 0:
        base, ends = start, pretoken_ends(data, start, end, classes)
    if ends == 0:
        return long_pretoken_end(data, start, end, classes), base, ends
    return base + trailing_zeros(ends), base, ends & (ends - ONE)


@compiled
def is_valid_utf8(data, end):
    """Whether data[:end] is well-formed UTF-8 (RFC 3629: no overlong forms, no surrogates)."""
    i = 0
    while i < end:
        # most text is ASCII, and that is valid
        if i + WINDOW <= end and wide_at(data, i) == 0:
            i += WINDOW
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


def padded(text: bytes) -> np.ndarray:
    """Return `text` with padding at the end."""
    data = np.zeros(len(text) + PADDING, dtype=np.uint8)
    data[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    return data


def valid_utf8(text: bytes) -> bytes:
    """Return `text` with U+FFFD for bytes that are not valid UTF-8."""
    if is_valid_utf8(np.frombuffer(text, dtype=np.uint8), len(text)):
        return text
    return text.decode("utf-8", "replace").encode()


@compiled
def same_bytes(a, i, b, j, length):
    for k in range(length):  # noqa: SIM110 (Numba has no generator expressions)
        if a[i + k] != b[j + k]:
            return False
    return True


class Special(NamedTuple):
    """The special tokens, longest first."""

    # (distinct,) uint8: the bytes that they begin with
    first: np.ndarray
    # (bytes,) uint8: their bytes, one after the other
    bytes: np.ndarray
    # (tokens + 1,) int64: where each begins, and where the last one ends
    starts: np.ndarray
    # (tokens,) uint32
    ids: np.ndarray


def new_special(special_tokens: Mapping[str, int]) -> Special:
    """Lay out special tokens for `find_special`."""
    tokens = {token.encode(): token_id for token, token_id in special_tokens.items()}
    longest_first = sorted(tokens, key=len, reverse=True)
    return Special(
        first=np.array(sorted({token[0] for token in tokens}), dtype=np.uint8),
        bytes=np.frombuffer(b"".join(longest_first) + b"\0", dtype=np.uint8),
        starts=np.cumsum([0, *map(len, longest_first)]),
        ids=np.array([tokens[token] for token in longest_first], dtype=np.uint32),
    )


@compiled
def find_special(data, start, end, special):
    """Find the first special token in data[start:end], the longest if several begin there.

    Returns where it begins and its row, or `end` and -1.
    """
    for base in range(start, end, WINDOW):
        candidates = np.uint64(0)
        for first in special.first:
            candidates |= equal_at(data, base, first)
        while candidates:
            at = base + trailing_zeros(candidates)
            candidates &= candidates - ONE
            for row in range(len(special.ids)):
                begin = special.starts[row]
                length = special.starts[row + 1] - begin
                if at + length <= end and same_bytes(data, at, special.bytes, begin, length):
                    return at, row
    return end, -1
