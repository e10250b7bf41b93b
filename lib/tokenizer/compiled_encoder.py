"""The tokenizer compiled by Numba: the same merges and ids as `lib.tokenizer.bpe`, much faster.

`train_compiled` trains, `CompiledEncoder` encodes and decodes. `lib.tokenizer.compiled_scan` finds
pre-tokens, and has the rules for kernels; `lib.tokenizer.compiled_words` counts them;
`lib.tokenizer.compiled_merges` learns merges.
Threads work on chunks between safe cuts, each with its own cache.
"""

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lib.core.hardware import ordered_map
from lib.tokenizer.compiled_merges import learn_merges, new_learner
from lib.tokenizer.compiled_pretoken import (
    LONGEST_SHORT,
    Ranks,
    Scratch,
    encode_long,
    encode_short,
    new_ranks,
    new_scratch,
)
from lib.tokenizer.compiled_scan import (
    LOW_32,
    PADDING,
    U32,
    Special,
    array_at,
    class_table,
    compiled,
    compiled_with_allocation,
    find_special,
    inlined,
    load_word,
    new_special,
    next_pretoken,
    prefetch,
    same_bytes,
    store_word,
    valid_utf8,
)
from lib.tokenizer.compiled_words import (
    ENTRY,
    LONGEST_KEY,
    LONGEST_LENGTH,
    WordCounts,
    find_entry,
    first_entry,
    new_table,
    pretoken_key,
)
from lib.tokenizer.pretokenize import split_at_safe_cuts

# stands for the number of ids of an entry that has no space for them
OUTSIDE = 255
# where the number of ids is in the last word of an entry
U56 = np.uint64(56)
FEW_IDS = 500
# bytes of text that are encoded at a time, and texts: memory that is used again is faster than new
CAPACITY, BATCH_TEXTS = 1 << 20, 1 << 14
# pre-tokens that are looked up together
BATCH = 128
# how much of a cache's table is used at first: little, since what is near in memory is fast
FIRST_TABLE = (1 << 13) * ENTRY
# Numba fails, rarely, where two threads compile at the same time: the first compiles alone
COMPILING = threading.Lock()


def train_compiled(
    chunks: Iterable[bytes],
    num_tokens: int,
    special_tokens: Sequence[str],
    workers: int,
    progress: Callable[[int], None] | None,
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Train on chunks of a text; return the vocabulary without special tokens, and the merges."""
    words = WordCounts(new_special(dict.fromkeys(special_tokens, 0)))
    with COMPILING:
        WordCounts(words.special).count(b"a")
    with ThreadPoolExecutor(workers) as executor:
        for num_bytes in ordered_map(executor, words.count, chunks, workers + 1):
            if progress:
                progress(num_bytes)
    learner = new_learner(words, num_tokens - 256)
    # free the words of a large text: the learner has a copy
    del words
    vocab = {byte: bytes([byte]) for byte in range(256)}
    merges = []
    for left, right in learn_merges(learner):
        merges.append((vocab[left], vocab[right]))
        vocab[len(vocab)] = vocab[left] + vocab[right]
    return vocab, merges


class Cache(NamedTuple):
    """The pre-tokens that one thread has encoded before."""

    # (rows * ENTRY,) uint64, as in `compiled_words`: a key, and up to 15 bytes of ids
    # as they are written, with their number, never 0, in the highest byte. With more ids, or a
    # pre-token that is longer than its key, that byte is OUTSIDE, and there are two offsets of 32
    # bits, of its ids in `ids` and of its bytes in `kept`, and the number of ids.
    table: np.ndarray
    # (ids,) uint32
    ids: np.ndarray
    # (bytes,) uint8
    kept: np.ndarray
    # (4,) int64: entries, ids and bytes in use, and how much of the table is
    used: np.ndarray
    # (BATCH * 4,) uint64: space for the pre-tokens to come
    batch: np.ndarray


def new_cache() -> Cache:
    """Make an empty cache of up to 21 MB; distinct pre-tokens decide how much of it is used."""
    # NumPy asks for huge pages for a large array, unless it is of zeros
    table = new_table(1 << 19)
    table[:FIRST_TABLE] = 0
    return Cache(
        table=table,
        ids=np.empty(1 << 20, dtype=np.uint32),
        kept=np.empty(1 << 20, dtype=np.uint8),
        used=np.array([0, 0, 0, FIRST_TABLE], dtype=np.int64),
        batch=np.empty(BATCH * 4, dtype=np.uint64),
    )


class Arrays(NamedTuple):
    """All that encoding reads and writes."""

    # (bytes + PADDING,) uint8: texts in UTF-8, one after the other
    data: np.ndarray
    # (texts,) int64: where each ends
    ends: np.ndarray
    # (bytes,) uint8: space for as many ids as `data` has bytes, and 16 bytes more
    out: np.ndarray
    # (texts,) int64: space for where the ids of each text end
    id_ends: np.ndarray
    # the classes of characters
    classes: np.ndarray
    special: Special
    ranks: Ranks
    scratch: Scratch
    cache: Cache


# Numba takes a microsecond or two to look at all these arrays, longer than to encode a short text,
# and kernels that pass them on are slow to call. So their addresses and lengths are in one array,
# and what is called from Python takes the address of that.
ARRAYS = 21


def addresses_of(*arrays: np.ndarray) -> np.ndarray:
    """Return the address and the length of each array, (2 * arrays,) int64."""
    pairs = [(array.ctypes.data, len(array)) for array in arrays]
    return np.array(pairs, dtype=np.int64).reshape(-1)


@inlined
def arrays_at(addresses):
    """Return the `Arrays` that addresses are those of, in the order of their fields."""
    at = addresses
    return Arrays(
        data=array_at(at[0], at[1], np.uint8),
        ends=array_at(at[2], at[3], np.int64),
        out=array_at(at[4], at[5], np.uint8),
        id_ends=array_at(at[6], at[7], np.int64),
        classes=array_at(at[8], at[9], np.uint8),
        special=Special(
            array_at(at[10], at[11], np.uint8),
            array_at(at[12], at[13], np.uint8),
            array_at(at[14], at[15], np.int64),
            array_at(at[16], at[17], np.uint32),
        ),
        ranks=Ranks(
            array_at(at[18], at[19], np.uint32),
            array_at(at[20], at[21], np.uint32),
            array_at(at[22], at[23], np.uint32),
            array_at(at[24], at[25], np.uint64),
            array_at(at[26], at[27], np.uint32),
        ),
        scratch=Scratch(array_at(at[28], at[29], np.uint32), array_at(at[30], at[31], np.uint32)),
        cache=Cache(
            array_at(at[32], at[33], np.uint64),
            array_at(at[34], at[35], np.uint32),
            array_at(at[36], at[37], np.uint8),
            array_at(at[38], at[39], np.int64),
            array_at(at[40], at[41], np.uint64),
        ),
    )


@compiled
def make_room(cache):
    """Double the part of the table that is in use, if a batch could fill half of it."""
    table, used = cache.table, cache.used
    size = used[3]
    if 2 * ENTRY * (used[0] + BATCH) < size or 2 * size > table.shape[0]:
        return
    used[3] = 2 * size
    table[size : 2 * size] = 0
    # place each entry anew, those that were in the way of others first
    begin = np.int64(0)
    while table[begin + 1]:
        begin += ENTRY
    for k in range(begin, begin + size, ENTRY):
        old = k & (size - 1)
        low, high = table[old], table[old + 1]
        if high:
            first_ids, last_ids = table[old + 2], table[old + 3]
            table[old + 1] = table[old + 3] = 0
            larger = table[: 2 * size]
            new = find_entry(larger, first_entry(larger, low, high), low, high)
            table[new], table[new + 1] = low, high
            table[new + 2], table[new + 3] = first_ids, last_ids


@inlined
def remember(cache, data, start, length, low, high, ids, number, width):
    """Cache the ids of a pre-token; clear the cache first if it is full."""
    used = cache.used
    table = cache.table[: used[3]]
    # a text with more distinct pre-tokens than entries is slow: each would miss in each round
    if (
        8 * ENTRY * used[0] >= 7 * table.shape[0]
        or used[1] + number > cache.ids.shape[0]
        or used[2] + length > cache.kept.shape[0]
    ):
        table[:] = 0
        used[:3] = 0
    at = find_entry(table, first_entry(table, low, high), low, high)
    if table[at + 1]:
        # another pre-token has the same hashes
        return
    table[at], table[at + 1] = low, high
    used[0] += 1
    if number * width < 16 and length <= LONGEST_KEY:
        table[at + 2], table[at + 3] = 0, np.uint64(number) << U56
        for k in range(number):
            bit = 8 * width * k
            table[at + 2 + (bit >> 6)] |= np.uint64(ids[k]) << np.uint64(bit & 63)
        return
    table[at + 2] = np.uint64(used[1]) | np.uint64(used[2]) << U32
    table[at + 3] = np.uint64(number) | np.uint64(OUTSIDE) << U56
    for k in range(number):
        cache.ids[used[1] + k] = ids[k]
    used[1] += number
    if length > LONGEST_KEY:
        for k in range(length):
            cache.kept[used[2] + k] = data[start + k]
        used[2] += length


@compiled
def recall_outside(cache, table, entry, data, start, length, out, n, width):
    """Write the ids of a cached pre-token that its entry has no space for; return where they end.

    Writes none if the entry is that of another pre-token with the same hashes.
    """
    first = np.int64(table[entry + 2] & LOW_32)
    kept = np.int64(table[entry + 2] >> U32)
    if length > LONGEST_KEY and not same_bytes(cache.kept, kept, data, start, length):
        return n
    number = np.int64(table[entry + 3] & LOW_32)
    return write_ids(cache.ids[first : first + number], number, out, n, width)


@compiled
def encode_anew(addresses, start, length, low, high, n, width):
    """Write the ids of a pre-token that is not cached, and cache it; return where they end."""
    data, _, out, _, _, _, ranks, scratch, cache = arrays_at(addresses)
    ids = scratch.ids
    if length > LONGEST_LENGTH:
        return encode_huge(data, start, length, ranks, out, n, width)
    if length <= LONGEST_SHORT:
        number = encode_short(data, start, length, ranks, scratch)
    else:
        number = encode_long(data, start, length, ranks, ids)
    remember(cache, data, start, length, low, high, ids, number, width)
    return write_ids(ids, number, out, n, width)


@compiled_with_allocation
def encode_huge(data, start, length, ranks, out, n, width):
    """Write the ids of a pre-token that is too long to be cached; return where they end."""
    ids = np.empty(length, dtype=np.uint32)
    return write_ids(ids, encode_long(data, start, length, ranks, ids), out, n, width)


@inlined
def write_ids(ids, number, out, n, width):
    """Write `number` ids to `out` from `n` on, each of `width` bytes; return where they end."""
    for k in range(number):
        store_word(out, n, np.uint64(ids[k]))
        n += width
    return n


@compiled
def look_ahead(data, start, end, classes, table, batch):
    """Find the next pre-tokens of data[start:end], at most BATCH; return their number.

    A row of `batch` is a pre-token's key, where the search for its entry begins, and its end. The
    entry is fetched while others are still being found: memory takes longer than all else here.
    """
    base, ends = start, np.uint64(0)
    number = 0
    while start < end and number < BATCH:
        after, base, ends = next_pretoken(data, start, end, classes, base, ends)
        low, high = pretoken_key(data, start, after - start)
        entry = first_entry(table, low, high)
        prefetch(table, entry)
        row = 4 * number
        batch[row], batch[row + 1] = low, high
        batch[row + 2], batch[row + 3] = np.uint64(entry), np.uint64(after)
        number += 1
        start = after
    return number


@compiled
def encode_ordinary(addresses, start, end, n, width):
    """Write the ids of data[start:end] to `out` from `n` on; return where they end."""
    data, _, out, _, classes, _, _, _, cache = arrays_at(addresses)
    batch = cache.batch
    while start < end:
        make_room(cache)
        table = cache.table[: cache.used[3]]
        for row in range(0, 4 * look_ahead(data, start, end, classes, table, batch), 4):
            low, high = load_word(batch, row), load_word(batch, row + 1)
            entry = find_entry(table, np.int64(load_word(batch, row + 2)), low, high)
            after = np.int64(load_word(batch, row + 3))
            last_ids = load_word(table, entry + 3)
            number = np.int64(last_ids >> U56)
            if 0 < number < OUTSIDE:
                # writing all that an entry holds is cheaper than a branch
                store_word(out, n, load_word(table, entry + 2))
                store_word(out, n + 8, last_ids)
                n += number * width
            else:
                length, before = after - start, n
                if number:
                    n = recall_outside(cache, table, entry, data, start, length, out, n, width)
                if n == before:
                    n = encode_anew(addresses, start, length, low, high, n, width)
            start = after
    return n


@compiled
def encode_text(addresses, start, end, n, width):
    """Write the ids of data[start:end] to `out` from `n` on, each of `width` bytes.

    Returns where they end.
    """
    arrays = arrays_at(addresses)
    special = arrays.special
    while start < end:
        stop, token = find_special(arrays.data, start, end, special)
        n = encode_ordinary(addresses, start, stop, n, width)
        start = stop
        if token >= 0:
            store_word(arrays.out, n, np.uint64(special.ids[token]))
            n += width
            start += special.starts[token + 1] - special.starts[token]
    return n


@compiled
def encode_texts(address, number, width):
    """Encode as many texts as `number`, which end at `ends` in `data`; return the number of ids.

    Writes the ids, of `width` bytes each, to `out`, and their ends to `id_ends`. `address` is that
    of the array of addresses.
    """
    addresses = array_at(address, 2 * ARRAYS, np.int64)
    arrays = arrays_at(addresses)
    start = n = np.int64(0)
    for k in range(number):
        n = encode_text(addresses, start, arrays.ends[k], n, width)
        start = arrays.ends[k]
        arrays.id_ends[k] = n // width
    return n // width


@compiled
def decoded_length(ids, starts):
    """Return the number of bytes of `ids`, or -1 - k if ids[k] is not in the vocabulary."""
    total = 0
    for k in range(len(ids)):
        token = np.int64(ids[k])
        if token < 0 or token + 1 >= len(starts) or starts[token + 1] == starts[token]:
            return -1 - k
        total += starts[token + 1] - starts[token]
    return total


@compiled
def copy_tokens(ids, starts, token_bytes, out):
    """Write the bytes of `ids` to `out`, eight at a time; both arrays have padding at the end."""
    n = 0
    for k in range(len(ids)):
        start = starts[ids[k]]
        length = starts[ids[k] + 1] - start
        for i in range(0, length, 8):
            store_word(out, n + i, load_word(token_bytes, start + i))
        n += length


AS_UTF8 = ctypes.pythonapi.PyUnicode_AsUTF8AndSize
AS_UTF8.argtypes, AS_UTF8.restype = (ctypes.py_object, ctypes.c_void_p), ctypes.c_void_p


def utf8_of(text: str) -> memoryview:
    """Return the bytes of `text` in UTF-8 without copying them; `text` must outlive them.

    A text that is not ASCII keeps them from then on, beside its own.
    """
    size = ctypes.c_ssize_t()
    address = AS_UTF8(text, ctypes.byref(size))
    return memoryview((ctypes.c_ubyte * size.value).from_address(address)).cast("B")


class Workspace:
    """The tools of one encoding thread: a cache, and space for text and ids."""

    def __init__(self, encoder: "CompiledEncoder", capacity: int):
        self.scratch, self.cache = new_scratch(LONGEST_LENGTH), new_cache()
        self.data = np.zeros(capacity + PADDING, dtype=np.uint8)
        # copying to a memory view takes half as long as to an array
        self.text = memoryview(self.data)  # type: ignore[arg-type]  # arrays are buffers before Python 3.12, too
        self.ends = np.zeros(BATCH_TEXTS, dtype=np.int64)
        self.id_ends = np.zeros(BATCH_TEXTS, dtype=np.int64)
        out = np.empty((capacity + 8) * encoder.width, dtype=np.uint8)
        self.ids = out.view(encoder.dtype)
        # kept, since the kernels know their addresses alone
        self.arrays = arrays = self.data, self.ends, out, self.id_ends, class_table()
        rest = *encoder.ranks, *self.scratch, *self.cache
        self.with_special = addresses_of(*arrays, *encoder.special, *rest)
        self.without_special = addresses_of(*arrays, *encoder.no_special, *rest)
        # by `allow_special`
        self.address = self.without_special.ctypes.data, self.with_special.ctypes.data


class CompiledEncoder:
    """The compiled half of a `lib.tokenizer.bpe.Tokenizer`; threads may share it."""

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        byte_ids: Sequence[int],
        ranks: Mapping[tuple[int, int], tuple[int, int]],
        special_tokens: Mapping[str, int],
        dtype: np.dtype,
    ):
        self.dtype = dtype
        self.width = dtype.itemsize
        self.integers = np.array(range(max(vocab) + 1), dtype=object)
        self.special_tokens = [token.encode() for token in special_tokens]
        self.special = new_special(special_tokens)
        self.no_special = new_special({})
        self.ranks = new_ranks(byte_ids, ranks)
        lengths = [len(vocab.get(token, b"")) for token in range(max(vocab) + 1)]
        self.starts = np.cumsum([0, *lengths])
        token_bytes = b"".join(vocab[token] for token in sorted(vocab))
        self.token_bytes = np.frombuffer(token_bytes + bytes(PADDING), dtype=np.uint8)
        # one for each thread that encodes at the same time
        self.idle: list[Workspace] = []
        with COMPILING:
            self.decode(self.encode(b"a").tolist())

    def encode(self, text: str | bytes, allow_special: bool = True) -> np.ndarray:
        """Convert text to ids of `dtype`, (num_tokens,); invalid UTF-8 counts as U+FFFD."""
        if len(text) > CAPACITY:
            return self._encode_long(text, allow_special)
        # short texts come by the million: everything that is done once for each is in this method
        data = text.encode() if isinstance(text, str) else valid_utf8(text)
        size = len(data)
        if size > CAPACITY:
            return self._encode_long(data, allow_special)
        try:
            work = self.idle.pop()
        except IndexError:
            work = Workspace(self, CAPACITY)
        work.text[:size] = data
        work.ends[0] = size
        number = encode_texts(work.address[bool(allow_special)], 1, self.width)
        ids = work.ids[:number].copy()
        self.idle.append(work)
        return ids

    def _encode_long(self, text: str | bytes, allow_special: bool) -> np.ndarray:
        data = utf8_of(text) if isinstance(text, str) else memoryview(valid_utf8(text))
        # most of it is never touched, and so takes no memory
        ids, number = np.empty(len(data), dtype=self.dtype), 0
        special_tokens = self.special_tokens if allow_special else []
        for chunk in split_at_safe_cuts(data, CAPACITY, special_tokens):
            work = self._workspace(len(chunk))
            work.text[: len(chunk)] = chunk
            work.ends[0] = len(chunk)
            found = encode_texts(work.address[bool(allow_special)], 1, self.width)
            ids[number : number + found] = work.ids[:found]
            number += found
            self._put_back(work)
        ids.resize(number, refcheck=False)
        return ids

    def encode_list(self, text: str | bytes, allow_special: bool = True) -> list[int]:
        """Do the same as `encode`, to a list."""
        ids = self.encode(text, allow_special)
        # many ids are fetched as Python integers faster than these are made
        return self.integers.take(ids).tolist() if len(ids) > FEW_IDS else ids.tolist()

    def encode_batch(self, texts: Sequence[bytes], allow_special: bool = True) -> list[np.ndarray]:
        """Convert each of at most BATCH_TEXTS texts of valid UTF-8 to an array of ids."""
        data = b"".join(texts)
        work = self._workspace(len(data))
        work.text[: len(data)] = data
        work.ends[: len(texts)] = np.cumsum([len(text) for text in texts])
        number = encode_texts(work.address[bool(allow_special)], len(texts), self.width)
        ids = work.ids[:number].copy()
        ends = work.id_ends[: len(texts)].tolist()
        self._put_back(work)
        return [ids[start:end] for start, end in pairwise([0, *ends])]

    def batches(self, texts: Iterable[str]) -> Iterator[list[bytes]]:
        """Group texts for `encode_batch`: as many as fit a workspace, or one that does not."""
        batch, size = [], 0
        for text in texts:
            data = text.encode()
            size += len(data)
            if batch and (size > CAPACITY or len(batch) == BATCH_TEXTS):
                yield batch
                batch, size = [], len(data)
            batch.append(data)
        if batch:
            yield batch

    def _workspace(self, length: int) -> Workspace:
        if length > CAPACITY:
            # one word that is longer than all texts
            return Workspace(self, length)
        try:
            return self.idle.pop()
        except IndexError:
            return Workspace(self, CAPACITY)

    def _put_back(self, work: Workspace) -> None:
        if len(work.text) == CAPACITY + PADDING:
            self.idle.append(work)

    def decode(self, ids: np.ndarray | list[int]) -> bytes:
        """Convert `ids` to bytes; raises KeyError or OverflowError if one is not in `vocab`."""
        if isinstance(ids, list):
            # twice as fast as NumPy's own conversion
            ids = np.frombuffer(array("I", ids), dtype=np.uint32)
        length = decoded_length(ids, self.starts)
        if length < 0:
            raise KeyError(int(ids[-1 - length]))
        out = np.empty(length + PADDING, dtype=np.uint8)
        copy_tokens(ids, self.starts, self.token_bytes, out)
        return out[:length].tobytes()
