"""The tokenizer compiled by Numba: the same merges and ids as `lib.tokenizer`, much faster.

`train_file` trains, `FastEncoder` encodes and decodes. Pre-tokens are found and counted by
`lib.tokenizer_scan`, merges learned by `lib.tokenizer_merges`; rules for kernels are in the former.
Threads work on chunks that end where a cut is safe, each with a cache of its own.
"""

import heapq
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lib.parallel import ordered_map
from lib.pretokenize import CHUNK_BYTES, iter_chunks, special_token_pattern
from lib.tokenizer_merges import learn_merges, new_learner
from lib.tokenizer_scan import (
    MIX_1,
    PADDING,
    U32,
    WordCounts,
    class_table,
    compiled,
    find_slot,
    load_word,
    power_of_two,
    prepare,
    pretoken_end,
    pretoken_key,
    split_segments,
    store_word,
)

# Ranks are kept as rank << 32 | id of the merged token; NEVER is that of no merge.
NEVER = 0x7FFFFFFFFFFFFFFF
RANK, ID = 0x7FFFFFFF00000000, 0xFFFFFFFF
# The id of a token that was joined to the one before it.
GONE = 0xFFFFFFFF

# Up to this many bytes, a linear search for the next merge beats a heap.
SHORT = 64
# Longer pre-tokens hardly come again.
LONGEST_CACHED = 256


def train_file(
    path: Path,
    num_tokens: int,
    special_tokens: Sequence[str],
    workers: int,
    progress: Callable[[int], None] | None,
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Train on a file; returns the vocabulary without special tokens, and the merges."""
    special_bytes = [token.encode() for token in special_tokens]
    words = WordCounts(special_token_pattern(special_bytes))
    with open(path, "rb") as stream, ThreadPoolExecutor(workers) as executor:
        chunks = iter_chunks(stream, CHUNK_BYTES, special_bytes)
        for num_bytes in ordered_map(executor, words.count, chunks, workers + 1):
            if progress:
                progress(num_bytes)
    learner = new_learner(words, num_tokens - 256)
    # A large text has many distinct words; they are laid out in the learner now.
    del words
    vocab = {byte: bytes([byte]) for byte in range(256)}
    merges = []
    for left, right in learn_merges(learner):
        merges.append((vocab[left], vocab[right]))
        vocab[len(vocab)] = vocab[left] + vocab[right]
    return vocab, merges


class Cache(NamedTuple):
    """Pre-tokens that were encoded before, for one thread."""

    # (rows, 4) uint64, as in `lib.tokenizer_scan`. The place is that of a long pre-token's bytes in
    # `kept`. The value is the number of ids, and above its 16 bits, up to two ids of 24 bits each
    # or, of more than two, the place in `ids`. So a vocabulary has less than 2**24 ids.
    table: np.ndarray
    # uint32
    ids: np.ndarray
    # uint8
    kept: np.ndarray
    # (3,) int64: rows, ids and bytes in use
    used: np.ndarray


def new_cache() -> Cache:
    """An empty cache of up to 24 MB; a text takes as much of it as it has distinct pre-tokens."""
    return Cache(
        table=np.zeros((1 << 19, 4), dtype=np.uint64),
        ids=np.empty(1 << 20, dtype=np.uint32),
        kept=np.empty(1 << 21, dtype=np.uint8),
        used=np.zeros(3, dtype=np.int64),
    )


class Ranks(NamedTuple):
    """The merges: what two neighbours give, as rank << 32 | id, or NEVER."""

    # (256,) uint32: the id of each byte
    byte_ids: np.ndarray
    # (65536,) int64: of two bytes, by first << 8 | second
    byte_pairs: np.ndarray
    # (rows, 2) int64, a hash table: (left id << 32 | right id) + 1, and what they give
    pairs: np.ndarray


@compiled
def merge_rank(ranks, left, right):
    """What a pair of ids gives."""
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
    """Enter rows (left id, right id, id given), in the order of their rank."""
    mask = pairs.shape[0] - 1
    for rank in range(merges.shape[0]):
        key = merges[rank, 0] << 32 | merges[rank, 1]
        row = np.int64((np.uint64(key) * MIX_1) >> U32) & mask
        while pairs[row, 0] != 0:
            row = (row + 1) & mask
        pairs[row, 0], pairs[row, 1] = key + 1, np.int64(rank) << 32 | merges[rank, 2]


@compiled
def fill_byte_pairs(ranks):
    for pair in range(1 << 16):
        left, right = ranks.byte_ids[pair >> 8], ranks.byte_ids[pair & 0xFF]
        ranks.byte_pairs[pair] = merge_rank(ranks, left, right)


@compiled
def merge_short(ids, length, ranks, best):
    """Merge `length` ids in place, the lowest rank first; returns how many are left.

    `best` holds the ranks of each id with the next one, and is worked on.
    """
    while length > 1:
        at, lowest = 0, best[0]
        for k in range(1, length - 1):
            if best[k] < lowest:
                at, lowest = k, best[k]
        if lowest == NEVER:
            break
        ids[at] = lowest & ID
        length -= 1
        for k in range(at + 1, length):
            ids[k] = ids[k + 1]
            best[k] = best[k + 1]
        if at > 0:
            best[at - 1] = merge_rank(ranks, ids[at - 1], ids[at])
        best[at] = merge_rank(ranks, ids[at], ids[at + 1]) if at + 1 < length else NEVER
    return length


@compiled
def merge_long(ids, length, ranks):
    """The same in O(length log length): a heap of rank | position, and links to neighbours."""
    after = np.arange(1, length + 1)
    before = np.arange(-1, length - 1)
    # The entry of no merge stays behind all others, so the heap is never empty.
    heap = [NEVER & RANK]
    for k in range(length - 1):
        heap.append(merge_rank(ranks, ids[k], ids[k + 1]) & RANK | k)
    heapq.heapify(heap)
    while heap[0] < NEVER & RANK:
        entry = heapq.heappop(heap)
        k = entry & ID
        if ids[k] == GONE or after[k] == length:
            continue
        merged = merge_rank(ranks, ids[k], ids[after[k]])
        if merged & RANK != entry & RANK:
            continue
        ids[k], ids[after[k]] = merged & ID, GONE
        after[k] = after[after[k]]
        if after[k] < length:
            before[after[k]] = k
            heapq.heappush(heap, merge_rank(ranks, ids[k], ids[after[k]]) & RANK | k)
        if before[k] >= 0:
            k = before[k]
            heapq.heappush(heap, merge_rank(ranks, ids[k], ids[after[k]]) & RANK | k)
    left = k = 0
    while k < length:
        ids[left] = ids[k]
        left += 1
        k = after[k]
    return left


@compiled
def encode_pretoken(data, start, length, ranks, best, ids):
    """Write the ids of data[start : start + length] to `ids`; returns their number."""
    for k in range(length):
        ids[k] = ranks.byte_ids[data[start + k]]
    if length > SHORT:
        return merge_long(ids, length, ranks)
    for k in range(length - 1):
        best[k] = ranks.byte_pairs[np.int64(data[start + k]) << 8 | data[start + k + 1]]
    best[length - 1] = NEVER
    return merge_short(ids, length, ranks, best)


@compiled
def remember(cache, data, start, length, low, high, ids):
    """Enter the `ids` of a pre-token; forget everything else when there is no room."""
    used, number = cache.used, len(ids)
    if (
        2 * used[0] >= cache.table.shape[0]
        or used[1] + number > cache.ids.shape[0]
        or used[2] + length > cache.kept.shape[0]
    ):
        cache.table[:] = 0
        used[:] = 0
    row = cache.table[find_slot(cache.table, low, high, length, data, start, cache.kept)]
    row[0], row[1], row[2] = low, high, np.uint64(length)
    used[0] += 1
    if number <= 2:
        second = ids[1] if number == 2 else 0
        row[3] = np.uint64(number | np.int64(ids[0]) << 16 | np.int64(second) << 40)
    else:
        row[3] = np.uint64(number | used[1] << 16)
        for k in range(number):
            cache.ids[used[1] + k] = ids[k]
        used[1] += number
    if length > 16:
        row[2] |= np.uint64(used[2]) << U32
        for k in range(length):
            cache.kept[used[2] + k] = data[start + k]
        used[2] += length


@compiled
def encode_segments(data, segments, separators, classes, ranks, cache, out):
    """Encode data[first:last] for each row of `segments`, followed by its separator's id if >= 0.

    `out` (uint32) has room for one id for each byte and separator, and one more. Returns the number
    of ids.
    """
    best = np.empty(SHORT, dtype=np.int64)
    n = 0
    for segment in range(segments.shape[0]):
        i, end = segments[segment]
        while i < end:
            j = pretoken_end(data, i, end, classes)
            length = j - i
            low, high = pretoken_key(data, i, length)
            slot = find_slot(cache.table, low, high, length, data, i, cache.kept)
            if cache.table[slot, 2]:
                value = np.int64(cache.table[slot, 3])
                number = value & 0xFFFF
                # Mostly right, and cheaper than to ask first whether there are one or two.
                out[n] = (value >> 16) & 0xFFFFFF
                out[n + 1] = (value >> 40) & 0xFFFFFF
                if number > 2:
                    place = value >> 16
                    for k in range(number):
                        out[n + k] = cache.ids[place + k]
            else:
                ids = out[n : n + length]
                number = encode_pretoken(data, i, length, ranks, best, ids)
                if length <= LONGEST_CACHED:
                    remember(cache, data, i, length, low, high, ids[:number])
            n += number
            i = j
        if separators[segment] >= 0:
            out[n] = separators[segment]
            n += 1
    return n


@compiled
def decoded_length(ids, starts):
    """How many bytes `ids` stand for, or -1 - k if ids[k] is not in the vocabulary."""
    total = 0
    for k in range(len(ids)):
        token = np.int64(ids[k])
        if token < 0 or token + 1 >= len(starts) or starts[token + 1] == starts[token]:
            return -1 - k
        total += starts[token + 1] - starts[token]
    return total


@compiled
def copy_tokens(ids, starts, token_bytes, out):
    """Write the bytes of `ids` to `out`, eight at a time; both arrays have padding behind."""
    n = 0
    for k in range(len(ids)):
        start = starts[ids[k]]
        length = starts[ids[k] + 1] - start
        for i in range(0, length, 8):
            store_word(out, n + i, load_word(token_bytes, start + i))
        n += length


class FastEncoder:
    """The compiled side of a `lib.tokenizer.Tokenizer`; several threads may use it at once."""

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        byte_ids: Sequence[int],
        ranks: Mapping[tuple[int, int], tuple[int, int]],
        special_tokens: Mapping[str, int],
    ):
        self.special_ids = {token.encode(): number for token, number in special_tokens.items()}
        self.special_pattern = special_token_pattern(list(self.special_ids))
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

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of UTF-8 `text`, uint32; invalid bytes count as U+FFFD."""
        data, length = prepare(text)
        segments, found = split_segments(data, length, self.special_pattern)
        separators = np.array([*(self.special_ids[token] for token in found), -1], dtype=np.int64)
        out = np.empty(length + len(found) + 1, dtype=np.uint32)
        try:
            cache = self.idle_caches.pop()
        except IndexError:
            cache = new_cache()
        number = encode_segments(data, segments, separators, class_table(), self.ranks, cache, out)
        self.idle_caches.append(cache)
        return out[:number]

    def decode(self, ids: np.ndarray | list[int]) -> bytes:
        """The bytes of `ids`. Raises KeyError or OverflowError if one is not in the vocabulary."""
        if isinstance(ids, list):
            # Twice as fast as NumPy's own conversion.
            ids = np.frombuffer(array("I", ids), dtype=np.uint32)
        length = decoded_length(ids, self.starts)
        if length < 0:
            raise KeyError(int(ids[-1 - length]))
        out = np.empty(length + PADDING, dtype=np.uint8)
        copy_tokens(ids, self.starts, self.token_bytes, out)
        return out[:length].tobytes()
