"""The tokenizer compiled by Numba: the same merges and ids as `lib.tokenizer.bpe`, much faster.

`train_file` trains, `CompiledEncoder` encodes and decodes. `lib.tokenizer.compiled_scan` finds
pre-tokens, and has the rules for kernels; `lib.tokenizer.compiled_words` counts them;
`lib.tokenizer.compiled_merges` learns merges.
Threads work on chunks between safe cuts, each with its own cache.
"""

import heapq
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lib.core.hardware import ordered_map
from lib.tokenizer.compiled_merges import learn_merges, new_learner
from lib.tokenizer.compiled_scan import (
    LOW_32,
    PADDING,
    U32,
    class_table,
    compiled,
    compiled_with_allocation,
    find_special,
    load_word,
    new_special,
    next_pretoken,
    prepare,
    same_bytes,
    store_word,
)
from lib.tokenizer.compiled_words import (
    ENTRY,
    LONGEST_KEY,
    LONGEST_LENGTH,
    MIX_1,
    WordCounts,
    find_key,
    power_of_two,
    pretoken_key,
)
from lib.tokenizer.pretokenize import CHUNK_BYTES, iter_chunks

# a merge is stored as rank << 32 | id of the merged token; NEVER means no merge
NEVER = 0x7FFFFFFFFFFFFFFF
RANK, ID = 0x7FFFFFFF00000000, 0xFFFFFFFF
# the id of a token that was merged into the one before it
GONE = 0xFFFFFFFF
# ids that an entry of the cache has space for; OUTSIDE marks a number of ids that are elsewhere
INLINE, OUTSIDE = 3, 1 << 16


def train_file(
    path: Path,
    num_tokens: int,
    special_tokens: Sequence[str],
    workers: int,
    progress: Callable[[int], None] | None,
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Train on a file; return the vocabulary without special tokens, and the merges."""
    special_bytes = [token.encode() for token in special_tokens]
    words = WordCounts(new_special(dict.fromkeys(special_tokens, 0)))
    with open(path, "rb") as stream, ThreadPoolExecutor(workers) as executor:
        chunks = iter_chunks(stream, CHUNK_BYTES, special_bytes)
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
    # their number in the upper half of the last word. With more ids, or a pre-token that is longer
    # than its key, the number is OUTSIDE more, and the two first halves are the offset of its ids
    # in `ids` and that of its bytes in `kept`.
    table: np.ndarray
    # (ids,) uint32
    ids: np.ndarray
    # (bytes,) uint8
    kept: np.ndarray
    # (3,) int64: entries, ids and bytes in use
    used: np.ndarray
    # (LONGEST_LENGTH,) int64: space for the merges of one pre-token
    best: np.ndarray


def new_cache() -> Cache:
    """Make an empty cache of up to 24 MB; distinct pre-tokens decide how much of it is used."""
    return Cache(
        table=np.zeros((1 << 19) * ENTRY, dtype=np.uint64),
        ids=np.empty(1 << 20, dtype=np.uint32),
        kept=np.empty(1 << 21, dtype=np.uint8),
        used=np.zeros(3, dtype=np.int64),
        best=np.empty(LONGEST_LENGTH, dtype=np.int64),
    )


class Ranks(NamedTuple):
    """The merge of two neighbors: rank << 32 | id of the merged token, or NEVER."""

    # (256,) uint32: the id of each byte
    byte_ids: np.ndarray
    # (65536,) int64: the merge of two bytes, at first << 8 | second
    byte_pairs: np.ndarray
    # (rows, 2) int64, a hash table: (left id << 32 | right id) + 1, and their merge
    pairs: np.ndarray


@compiled
def merge_rank(ranks, left, right):
    """Look up the merge of a pair of ids."""
    pairs = ranks.pairs
    mask = pairs.shape[0] - 1
    key = np.int64(left) << 32 | np.int64(right)
    row = np.int64((np.uint64(key) * MIX_1) >> U32) & mask
    key += 1
    found = pairs[row, 0]
    given = pairs[row, 1] if found == key else NEVER
    while found != 0 and found != key:
        row = (row + 1) & mask
        found = pairs[row, 0]
        given = pairs[row, 1] if found == key else NEVER
    return given


@compiled
def fill_pairs(merges, pairs):
    """Fill the hash table from rows (left id, right id, merged id), ordered by rank."""
    mask = pairs.shape[0] - 1
    for rank in range(merges.shape[0]):
        key = merges[rank, 0] << 32 | merges[rank, 1]
        row = np.int64((np.uint64(key) * MIX_1) >> U32) & mask
        while pairs[row, 0] != 0:
            row = (row + 1) & mask
        pairs[row, 0], pairs[row, 1] = key + 1, np.int64(rank) << 32 | merges[rank, 2]


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
def remember(cache, data, start, length, low, high, ids):
    """Cache the `ids` of a pre-token; clear the cache first if it is full."""
    table, used, number = cache.table, cache.used, len(ids)
    if (
        2 * ENTRY * used[0] >= table.shape[0]
        or used[1] + number > cache.ids.shape[0]
        or used[2] + length > cache.kept.shape[0]
    ):
        table[:] = 0
        used[:] = 0
    at = find_key(table, low, high)
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
def recall_outside(cache, entry, data, start, length, out, n):
    """Write the ids of a cached pre-token that its entry has no space for; return their number.

    Returns 0 if the entry is that of another pre-token with the same hashes.
    """
    ids = np.int64(cache.table[entry + 2] & LOW_32)
    kept = np.int64(cache.table[entry + 2] >> U32)
    if length > LONGEST_KEY and not same_bytes(cache.kept, kept, data, start, length):
        return 0
    number = np.int64(cache.table[entry + 3] >> U32) - OUTSIDE
    for k in range(number):
        out[n + k] = cache.ids[ids + k]
    return number


@compiled
def encode_anew(data, start, length, low, high, ranks, cache, out, n):
    """Write the ids of a pre-token that is not cached, and cache it; return their number."""
    number = encode_pretoken(data, start, length, ranks, cache.best, out[n : n + length])
    remember(cache, data, start, length, low, high, out[n : n + number])
    return number


@compiled
def encode_ordinary(data, start, end, classes, ranks, cache, out, n):
    """Write the ids of data[start:end] to `out` from `n` on.

    Stops before a pre-token of more than LONGEST_LENGTH bytes. Returns (start, after, n): where it
    stopped, where the long pre-token ends, and where the ids end.
    """
    table = cache.table
    base, ends = start, np.uint64(0)
    while start < end:
        after, base, ends = next_pretoken(data, start, end, classes, base, ends)
        length = after - start
        low, high = pretoken_key(data, start, length)
        entry = find_key(table, low, high)
        last_ids = load_word(table, entry + 3)
        number = np.int64(last_ids >> U32)
        if load_word(table, entry + 1) and number <= INLINE:
            # writing all that an entry holds is cheaper than a branch
            store_word(out, n, load_word(table, entry + 2))
            store_word(out, n + 2, last_ids)
        elif length > LONGEST_LENGTH:
            return start, after, n
        else:
            number = 0
            if load_word(table, entry + 1):
                number = recall_outside(cache, entry, data, start, length, out, n)
            if number == 0:
                number = encode_anew(data, start, length, low, high, ranks, cache, out, n)
        n += number
        start = after
    return start, start, n


@compiled
def encode_text(data, start, end, classes, special, ranks, cache, out, n):
    """Write the ids of data[start:end] to `out` from `n` on; return what `encode_ordinary` does.

    `out` (uint32) has space for one id per byte, and INLINE more.
    """
    while start < end:
        stop, token = find_special(data, start, end, special)
        start, after, n = encode_ordinary(data, start, stop, classes, ranks, cache, out, n)
        if after > start:
            return start, after, n
        if token >= 0:
            out[n] = special.ids[token]
            n += 1
            start = stop + special.starts[token + 1] - special.starts[token]
    return start, start, n


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


class CompiledEncoder:
    """The compiled half of a `lib.tokenizer.bpe.Tokenizer`; threads may share it."""

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        byte_ids: Sequence[int],
        ranks: Mapping[tuple[int, int], tuple[int, int]],
        special_tokens: Mapping[str, int],
    ):
        self.special = new_special(special_tokens)
        self.no_special = new_special({})
        merges = np.array([(*pair, new) for pair, (_, new) in ranks.items()], dtype=np.int64)
        self.ranks = Ranks(
            byte_ids=np.array(byte_ids, dtype=np.uint32),
            byte_pairs=np.empty(1 << 16, dtype=np.int64),
            pairs=np.zeros((power_of_two(2 * len(merges) + 2), 2), dtype=np.int64),
        )
        fill_pairs(merges.reshape(-1, 3), self.ranks.pairs)
        fill_byte_pairs(self.ranks)
        lengths = [len(vocab.get(token, b"")) for token in range(max(vocab) + 1)]
        self.starts = np.cumsum([0, *lengths])
        token_bytes = b"".join(vocab[token] for token in sorted(vocab))
        self.token_bytes = np.frombuffer(token_bytes + bytes(PADDING), dtype=np.uint8)
        self.idle_caches: list[Cache] = []

    def encode(self, text: bytes, allow_special: bool = True) -> np.ndarray:
        """Convert UTF-8 `text` to ids, (num_tokens,) uint32; invalid bytes count as U+FFFD."""
        data, length = prepare(text)
        out = np.empty(length + 1 + INLINE, dtype=np.uint32)
        try:
            cache = self.idle_caches.pop()
        except IndexError:
            cache = new_cache()
        special = self.special if allow_special else self.no_special
        start = n = 0
        while start < length:
            start, after, n = encode_text(
                data, start, length, class_table(), special, self.ranks, cache, out, n
            )
            if after > start:
                n += encode_long(data, start, after - start, self.ranks, out[n:])
                start = after
        self.idle_caches.append(cache)
        return out[:n]

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
