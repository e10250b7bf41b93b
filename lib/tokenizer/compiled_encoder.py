"""The tokenizer compiled by Numba: the same merges and ids as `lib.tokenizer.bpe`, much faster.

`train_compiled` trains, `CompiledEncoder` encodes and decodes. `lib.tokenizer.compiled_scan` finds
pre-tokens, and has the rules for kernels; `lib.tokenizer.compiled_words` counts them;
`lib.tokenizer.compiled_merges` learns merges.
Threads work on chunks between safe cuts, each with its own cache.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lib.core.hardware import ordered_map
from lib.tokenizer.compiled_merges import learn_merges, new_learner
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
    MIX_1,
    WordCounts,
    find_entry,
    first_entry,
    power_of_two,
    pretoken_key,
)
from lib.tokenizer.pretokenize import split_at_safe_cuts

# a merge is stored as rank << 32 | id of the merged token; NEVER means no merge
NEVER = 0x7FFFFFFFFFFFFFFF
RANK, ID = 0x7FFFFFFF00000000, 0xFFFFFFFF
# the id of a token that was merged into the one before it
GONE = 0xFFFFFFFF
# ids that an entry of the cache has space for; OUTSIDE marks a number of ids that are elsewhere
INLINE, OUTSIDE = 3, 1 << 16
FEW_IDS = 500
# bytes of text that are encoded at a time, and texts: memory that is used again is faster than new
CAPACITY, BATCH_TEXTS = 1 << 20, 1 << 14
# pre-tokens that are looked up together
BATCH = 128
# how much of a cache's table is used at first: little, since what is near in memory is fast
FIRST_TABLE = (1 << 13) * ENTRY


def train_compiled(
    chunks: Iterable[list[bytes]],
    num_tokens: int,
    special_tokens: Sequence[str],
    workers: int,
    progress: Callable[[int], None] | None,
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Train on chunks of texts; return the vocabulary without special tokens, and the merges."""
    words = WordCounts(new_special(dict.fromkeys(special_tokens, 0)))
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

    # (rows * ENTRY,) uint64, as in `compiled_words`: a key, and up to INLINE ids of 32 bits with
    # their number, never 0, in the upper half of the last word. With more ids, or a pre-token that
    # is longer than its key, the number is OUTSIDE more, and the two first halves are the offset of
    # its ids in `ids` and that of its bytes in `kept`.
    table: np.ndarray
    # (ids,) uint32
    ids: np.ndarray
    # (bytes,) uint8
    kept: np.ndarray
    # (4,) int64: entries, ids and bytes in use, and how much of the table is
    used: np.ndarray
    # (LONGEST_LENGTH,) int64: space for the merges of one pre-token
    best: np.ndarray
    # (BATCH * 4,) uint64: space for the pre-tokens to come
    batch: np.ndarray


def new_cache() -> Cache:
    """Make an empty cache of up to 44 MB; distinct pre-tokens decide how much of it is used."""
    # NumPy asks for huge pages for a large array, unless it is of zeros
    table = np.empty((1 << 20) * ENTRY, dtype=np.uint64)
    table[:FIRST_TABLE] = 0
    return Cache(
        table=table,
        ids=np.empty(1 << 21, dtype=np.uint32),
        kept=np.empty(1 << 21, dtype=np.uint8),
        used=np.array([0, 0, 0, FIRST_TABLE], dtype=np.int64),
        best=np.empty(LONGEST_LENGTH, dtype=np.int64),
        batch=np.empty(BATCH * 4, dtype=np.uint64),
    )


class Ranks(NamedTuple):
    """The merge of two neighbors: rank << 32 | id of the merged token, or NEVER."""

    # (256,) uint32: the id of each byte
    byte_ids: np.ndarray
    # (65536,) int64: the merge of two bytes, at first << 8 | second
    byte_pairs: np.ndarray
    # (rows * 2,) int64, a hash table: (left id << 32 | right id) + 1, and their merge
    pairs: np.ndarray


@compiled
def merge_rank(ranks, left, right):
    """Look up the merge of a pair of ids."""
    pairs = ranks.pairs
    last = pairs.shape[0] - 2
    key = np.int64(left) << 32 | np.int64(right)
    row = np.int64((np.uint64(key) * MIX_1) >> U32) * 2 & last
    key += 1
    found = pairs[row]
    given = pairs[row + 1] if found == key else NEVER
    while found != 0 and found != key:
        row = (row + 2) & last
        found = pairs[row]
        given = pairs[row + 1] if found == key else NEVER
    return given


@compiled
def fill_pairs(merges, pairs):
    """Fill the hash table from rows (left id, right id, merged id), ordered by rank."""
    last = pairs.shape[0] - 2
    for rank in range(merges.shape[0]):
        key = merges[rank, 0] << 32 | merges[rank, 1]
        row = np.int64((np.uint64(key) * MIX_1) >> U32) * 2 & last
        while pairs[row] != 0:
            row = (row + 2) & last
        pairs[row], pairs[row + 1] = key + 1, np.int64(rank) << 32 | merges[rank, 2]


@compiled
def fill_byte_pairs(ranks):
    """Fill the table of merges of two bytes from the hash table."""
    for pair in range(1 << 16):
        left, right = ranks.byte_ids[pair >> 8], ranks.byte_ids[pair & 0xFF]
        ranks.byte_pairs[pair] = merge_rank(ranks, left, right)


@compiled
def merge_short(ids, length, ranks, best):
    """Merge `length` ids in place, the lowest rank first; return how many are left.

    `best` holds the merge of each id with the next one, and is updated.
    """
    while length > 1:
        # the lowest rank, and the leftmost of several
        at, lowest = 0, best[0]
        for k in range(1, length - 1):
            if best[k] < lowest:
                at, lowest = k, best[k]
        if lowest == NEVER:
            break
        # merge, and close the gap
        ids[at] = lowest & ID
        length -= 1
        for k in range(at + 1, length):
            ids[k] = ids[k + 1]
            best[k] = best[k + 1]
        # the new token has new merges with its neighbors
        if at > 0:
            best[at - 1] = merge_rank(ranks, ids[at - 1], ids[at])
        best[at] = merge_rank(ranks, ids[at], ids[at + 1]) if at + 1 < length else NEVER
    return length


@compiled
def encode_pretoken(data, start, length, ranks, best, ids):
    """Write the ids of data[start : start + length] to `ids`; return their number."""
    for k in range(length):
        ids[k] = ranks.byte_ids[data[start + k]]
    for k in range(length - 1):
        best[k] = ranks.byte_pairs[np.int64(data[start + k]) << 8 | data[start + k + 1]]
    best[length - 1] = NEVER
    return merge_short(ids, length, ranks, best)


@compiled_with_allocation
def encode_long(data, start, length, ranks, ids):
    """Do as `encode_pretoken` in O(n log n): a heap of rank | index, and links to neighbors."""
    for k in range(length):
        ids[k] = ranks.byte_ids[data[start + k]]
    after = np.arange(1, length + 1)
    before = np.arange(-1, length - 1)
    # the entry for no merge sorts after all others, so the heap is never empty
    heap = [NEVER & RANK]
    for k in range(length - 1):
        heap.append(merge_rank(ranks, ids[k], ids[k + 1]) & RANK | k)
    heapq.heapify(heap)
    while heap[0] < NEVER & RANK:
        entry = heapq.heappop(heap)
        k = entry & ID
        # skip an entry that other merges have made stale
        if ids[k] == GONE or after[k] == length:
            continue
        merged = merge_rank(ranks, ids[k], ids[after[k]])
        if merged & RANK != entry & RANK:
            continue
        # merge, and push the new token's merges with its neighbors
        ids[k], ids[after[k]] = merged & ID, GONE
        after[k] = after[after[k]]
        if after[k] < length:
            before[after[k]] = k
            heapq.heappush(heap, merge_rank(ranks, ids[k], ids[after[k]]) & RANK | k)
        if before[k] >= 0:
            k = before[k]
            heapq.heappush(heap, merge_rank(ranks, ids[k], ids[after[k]]) & RANK | k)
    # move the ids that are left to the front
    left = k = 0
    while k < length:
        ids[left] = ids[k]
        left += 1
        k = after[k]
    return left


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


@compiled
def remember(cache, table, data, start, length, low, high, ids):
    """Cache the `ids` of a pre-token in `table`; clear the cache first if it is full."""
    used, number = cache.used, len(ids)
    if (
        2 * ENTRY * used[0] >= table.shape[0]
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
    if number <= INLINE and length <= LONGEST_KEY:
        table[at + 2] = table[at + 3] = 0
        for k in range(number):
            table[at + 2 + (k >> 1)] |= np.uint64(ids[k]) << np.uint64(32 * (k & 1))
        table[at + 3] |= np.uint64(number) << U32
        return
    table[at + 2] = np.uint64(used[1]) | np.uint64(used[2]) << U32
    table[at + 3] = np.uint64(number + OUTSIDE) << U32
    for k in range(number):
        cache.ids[used[1] + k] = ids[k]
    used[1] += number
    if length > LONGEST_KEY:
        for k in range(length):
            cache.kept[used[2] + k] = data[start + k]
        used[2] += length


@compiled
def recall_outside(cache, table, entry, data, start, length, out, n):
    """Write the ids of a cached pre-token that its entry has no space for; return their number.

    Returns 0 if the entry is that of another pre-token with the same hashes.
    """
    ids = np.int64(table[entry + 2] & LOW_32)
    kept = np.int64(table[entry + 2] >> U32)
    if length > LONGEST_KEY and not same_bytes(cache.kept, kept, data, start, length):
        return 0
    number = np.int64(table[entry + 3] >> U32) - OUTSIDE
    for k in range(number):
        out[n + k] = cache.ids[ids + k]
    return number


@compiled
def encode_anew(data, start, length, low, high, ranks, cache, table, out, n):
    """Write the ids of a pre-token that is not cached, and cache it; return their number."""
    if length > LONGEST_LENGTH:
        return encode_long(data, start, length, ranks, out[n : n + length])
    number = encode_pretoken(data, start, length, ranks, cache.best, out[n : n + length])
    remember(cache, table, data, start, length, low, high, out[n : n + number])
    return number


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
def encode_ordinary(data, start, end, classes, ranks, cache, out, n):
    """Write the ids of data[start:end] to `out` from `n` on; return where they end."""
    batch = cache.batch
    while start < end:
        make_room(cache)
        table = cache.table[: cache.used[3]]
        for row in range(0, 4 * look_ahead(data, start, end, classes, table, batch), 4):
            low, high = load_word(batch, row), load_word(batch, row + 1)
            entry = find_entry(table, np.int64(load_word(batch, row + 2)), low, high)
            after = np.int64(load_word(batch, row + 3))
            last_ids = load_word(table, entry + 3)
            number = np.int64(last_ids >> U32)
            if 0 < number <= INLINE:
                # writing all that an entry holds is cheaper than a branch
                store_word(out, n, load_word(table, entry + 2))
                store_word(out, n + 2, last_ids)
            else:
                length, number = after - start, 0
                if last_ids:
                    number = recall_outside(cache, table, entry, data, start, length, out, n)
                if number == 0:
                    number = encode_anew(
                        data, start, length, low, high, ranks, cache, table, out, n
                    )
            n += number
            start = after
    return n


@compiled
def encode_text(data, start, end, classes, special, ranks, cache, out, n):
    """Write the ids of data[start:end] to `out` from `n` on; return where they end.

    `out` (uint32) has space for one id per byte, and INLINE more.
    """
    while start < end:
        stop, token = find_special(data, start, end, special)
        n = encode_ordinary(data, start, stop, classes, ranks, cache, out, n)
        start = stop
        if token >= 0:
            out[n] = special.ids[token]
            n += 1
            start += special.starts[token + 1] - special.starts[token]
    return n


# Numba takes a microsecond or two to look at all these arrays, longer than to encode a short text.
# So they come as one array, of their addresses and lengths.


def addresses_of(*arrays: np.ndarray) -> np.ndarray:
    """Return the address and the length of each array, (2 * arrays,) int64."""
    pairs = [(array.ctypes.data, len(array)) for array in arrays]
    return np.array(pairs, dtype=np.int64).reshape(-1)


@compiled
def encode_texts(addresses, number, narrow):
    """Encode as many texts as `number`, which end at `ends` in `data`; return the number of ids.

    Writes the ids to `out`, with `narrow` as uint16, and their ends to `id_ends`. `addresses` are
    those of data, ends, out, id_ends, the classes of characters, Special, Ranks and Cache.
    """
    at = addresses
    data, ends = array_at(at[0], at[1], np.uint8), array_at(at[2], at[3], np.int64)
    out, id_ends = array_at(at[4], at[5], np.uint32), array_at(at[6], at[7], np.int64)
    classes = array_at(at[8], at[9], np.uint8)
    special = Special(
        array_at(at[10], at[11], np.uint8),
        array_at(at[12], at[13], np.uint8),
        array_at(at[14], at[15], np.int64),
        array_at(at[16], at[17], np.uint32),
    )
    ranks = Ranks(
        array_at(at[18], at[19], np.uint32),
        array_at(at[20], at[21], np.int64),
        array_at(at[22], at[23], np.int64),
    )
    cache = Cache(
        array_at(at[24], at[25], np.uint64),
        array_at(at[26], at[27], np.uint32),
        array_at(at[28], at[29], np.uint8),
        array_at(at[30], at[31], np.int64),
        array_at(at[32], at[33], np.int64),
        array_at(at[34], at[35], np.uint64),
    )
    start = n = np.int64(0)
    for k in range(number):
        n = encode_text(data, start, ends[k], classes, special, ranks, cache, out, n)
        start = ends[k]
        id_ends[k] = n
    if narrow:
        narrowed = array_at(at[4], 2 * at[5], np.uint16)
        for k in range(n):
            narrowed[k] = out[k]
    return n


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


class Workspace:
    """The tools of one encoding thread: a cache, and space for text and ids."""

    def __init__(self, encoder: "CompiledEncoder", capacity: int):
        self.cache = new_cache()
        self.data = np.zeros(capacity + PADDING, dtype=np.uint8)
        # copying to a memory view takes half as long as to an array
        self.text = memoryview(self.data)  # type: ignore[arg-type]  # arrays are buffers before Python 3.12, too
        self.ends = np.zeros(BATCH_TEXTS, dtype=np.int64)
        self.id_ends = np.zeros(BATCH_TEXTS, dtype=np.int64)
        out = np.empty(capacity + 1 + INLINE, dtype=np.uint32)
        self.ids = out.view(encoder.dtype)
        arrays = self.data, self.ends, out, self.id_ends, class_table()
        rest = *encoder.ranks, *self.cache
        self.with_special = addresses_of(*arrays, *encoder.special, *rest)
        self.without_special = addresses_of(*arrays, *encoder.no_special, *rest)


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
        self.narrow = dtype == np.uint16
        self.integers = np.array(range(max(vocab) + 1), dtype=object)
        self.special_tokens = [token.encode() for token in special_tokens]
        self.special = new_special(special_tokens)
        self.no_special = new_special({})
        merges = np.array([(*pair, new) for pair, (_, new) in ranks.items()], dtype=np.int64)
        self.ranks = Ranks(
            byte_ids=np.array(byte_ids, dtype=np.uint32),
            byte_pairs=np.empty(1 << 16, dtype=np.int64),
            pairs=np.zeros(2 * power_of_two(2 * len(merges) + 2), dtype=np.int64),
        )
        fill_pairs(merges.reshape(-1, 3), self.ranks.pairs)
        fill_byte_pairs(self.ranks)
        lengths = [len(vocab.get(token, b"")) for token in range(max(vocab) + 1)]
        self.starts = np.cumsum([0, *lengths])
        token_bytes = b"".join(vocab[token] for token in sorted(vocab))
        self.token_bytes = np.frombuffer(token_bytes + bytes(PADDING), dtype=np.uint8)
        # one for each thread that encodes at the same time
        self.idle: list[Workspace] = []

    def encode(self, text: str | bytes, allow_special: bool = True) -> np.ndarray:
        """Convert text to ids of `dtype`, (num_tokens,); invalid UTF-8 counts as U+FFFD."""
        data = text.encode() if isinstance(text, str) else valid_utf8(text)
        if len(data) > CAPACITY:
            special_tokens = self.special_tokens if allow_special else []
            chunks = split_at_safe_cuts(memoryview(data), CAPACITY, special_tokens)
            return np.concatenate([self._encode_chunk(chunk, allow_special) for chunk in chunks])
        return self._encode_chunk(data, allow_special)

    def encode_list(self, text: str | bytes, allow_special: bool = True) -> list[int]:
        """Do the same as `encode`, to a list."""
        ids = self.encode(text, allow_special)
        # many ids are fetched as Python integers faster than these are made
        return self.integers.take(ids).tolist() if len(ids) > FEW_IDS else ids.tolist()

    def _encode_chunk(self, data: bytes | memoryview, allow_special: bool) -> np.ndarray:
        length = len(data)
        work = self._workspace(length)
        work.text[:length] = data
        work.ends[0] = length
        addresses = work.with_special if allow_special else work.without_special
        number = encode_texts(addresses, 1, self.narrow)
        ids = work.ids[:number].copy()
        self._put_back(work)
        return ids

    def encode_batch(self, texts: Sequence[bytes], allow_special: bool = True) -> list[np.ndarray]:
        """Convert each of at most BATCH_TEXTS texts of valid UTF-8 to an array of ids."""
        data = b"".join(texts)
        work = self._workspace(len(data))
        work.text[: len(data)] = data
        work.ends[: len(texts)] = np.cumsum([len(text) for text in texts])
        addresses = work.with_special if allow_special else work.without_special
        number = encode_texts(addresses, len(texts), self.narrow)
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
