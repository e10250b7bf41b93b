"""Compiled by Numba: the ids of one pre-token, by replaying the merges.

A merge has a rank, the order in which it was learned, and the lowest rank among all neighbors comes
first. Looking up the rank of a pair is what takes the time, so the table for it is small: 32 bits a
merge, found by a hash of both ids, and then one look at the pair itself.

The rules for kernels are in `lib.tokenizer.compiled_scan`.
"""

import heapq
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from lib.tokenizer.compiled_scan import (
    ONE,
    U32,
    compiled,
    compiled_with_allocation,
    inlined,
    leading_zeros,
    trailing_zeros,
)
from lib.tokenizer.compiled_words import MIX_1, power_of_two

# the rank of a pair that is never merged; ranks have 24 bits
NEVER = 1 << 24
# stands beside the first id and the last one, and merges with neither
BORDER = 0xFFFFFFFF
# the id of a token that was merged into the one before it
GONE = 0xFFFFFFFE
# the positions of a short pre-token and of its two borders fit a word of 64 bits
LONGEST_SHORT = 62
# how much of `order` is searched at a time: as much as one vector register holds
LANES = 16
# the lowest bits of an entry of `order` are the index of a merge, those above are its rank
INDEX_BITS, INDEX = 6, 63
# the highest byte of an entry of `Ranks.table`
TAG = 0xFF000000


class Ranks(NamedTuple):
    """The merges, and where to find the one of two neighbors."""

    # (256,) uint32: the id of each byte
    byte_ids: np.ndarray
    # (65536,) uint32: the rank of two bytes, at first << 8 | second
    byte_ranks: np.ndarray
    # (slots,) uint32, a hash table with open addressing: a tag of 8 bits, and a rank + 1 of 24
    table: np.ndarray
    # (merges,) uint64 by rank: left id << 32 | right id
    pairs: np.ndarray
    # (merges,) uint32 by rank: the id of the merged token
    merged: np.ndarray


class Scratch(NamedTuple):
    """Space for one pre-token while it is merged."""

    # (longest pre-token that is cached,) uint32
    ids: np.ndarray
    # (64,) uint32: rank << 6 | index of the merge of each id with the next one
    order: np.ndarray


def new_ranks(byte_ids: Sequence[int], merges: Mapping[tuple[int, int], tuple[int, int]]) -> Ranks:
    """Lay out merges, (left id, right id) -> (rank, merged id), for `merge_rank`."""
    left, right = np.fromiter(chain.from_iterable(merges), np.uint64).reshape(-1, 2).T
    merged = np.fromiter((new for _, new in merges.values()), np.uint32)
    ranks = Ranks(
        byte_ids=np.array(byte_ids, dtype=np.uint32),
        byte_ranks=np.empty(1 << 16, dtype=np.uint32),
        table=np.zeros(power_of_two(4 * len(merges) + 2), dtype=np.uint32),
        # one more, so that there is always something to load
        pairs=np.append(left << U32 | right, ONE * 0),
        merged=np.append(merged, np.uint32(0)),
    )
    fill_table(ranks)
    return ranks


def new_scratch(longest: int) -> Scratch:
    """Make space for pre-tokens of at most `longest` bytes."""
    return Scratch(np.empty(longest, dtype=np.uint32), np.empty(INDEX + 1, dtype=np.uint32))


@compiled
def first_slot(table, key):
    """Return where the search for a pair begins, and the tag that its entry has."""
    mixed = np.uint64(key) * MIX_1
    slot = np.int64(mixed >> (leading_zeros(table.shape[0]) + ONE))
    return slot, np.int64(mixed >> np.uint64(8)) & TAG


@inlined
def merge_rank(ranks, left, right):
    """Look up the rank of a pair of ids; NEVER if they do not merge."""
    table = ranks.table
    key = np.uint64(left) << U32 | np.uint64(right)
    slot, tag = first_slot(table, key)
    found = np.int64(table[slot])
    while found:
        # a wrong entry has the same tag once in 256 times
        rank = (found & ~TAG) - 1
        if found & TAG == tag and ranks.pairs[rank] == key:
            return rank
        slot = (slot + 1) & (table.shape[0] - 1)
        found = np.int64(table[slot])
    return NEVER


@compiled
def fill_table(ranks):
    """Fill the hash table of ranks, and from it the table for two bytes."""
    table = ranks.table
    for rank in range(ranks.pairs.shape[0] - 1):
        slot, tag = first_slot(table, ranks.pairs[rank])
        while table[slot] != 0:
            slot = (slot + 1) & (table.shape[0] - 1)
        table[slot] = tag | (rank + 1)
    for pair in range(1 << 16):
        left, right = ranks.byte_ids[pair >> 8], ranks.byte_ids[pair & 0xFF]
        ranks.byte_ranks[pair] = merge_rank(ranks, left, right)


@inlined
def encode_short(data, start, length, ranks, scratch):
    """Write the ids of data[start : start + length] to `scratch.ids`; return their number.

    For at most LONGEST_SHORT bytes. Bit k of `alive` says that ids[k] is a token and not merged
    into the one before it. Each merge is one pass of the loop, without branches of its own.
    """
    ids, order = scratch
    rounded = (length + LANES - 1) & ~(LANES - 1)
    for k in range(rounded):
        order[k] = NEVER << INDEX_BITS
    ids[0] = ids[length + 1] = BORDER
    for k in range(length):
        ids[k + 1] = ranks.byte_ids[data[start + k]]
    for k in range(1, length):
        pair = np.int64(data[start + k - 1]) << 8 | data[start + k]
        order[k] = np.int64(ranks.byte_ranks[pair]) << INDEX_BITS | k

    alive = (ONE << np.uint64(length + 1) << ONE) - ONE
    while True:
        # the lowest rank, and the leftmost of several
        lowest = order[0]
        for k in range(rounded):
            lowest = min(lowest, order[k])
        rank = np.int64(lowest) >> INDEX_BITS
        if rank == NEVER:
            break
        # merge the token there with the next one
        at = np.int64(lowest) & INDEX
        gone = at + 1 + trailing_zeros(alive >> np.uint64(at) >> ONE)
        alive ^= ONE << np.uint64(gone)
        ids[at] = merged = ranks.merged[rank]
        order[gone] = NEVER << INDEX_BITS
        # the new token has new merges with its neighbors
        after = at + 1 + trailing_zeros(alive >> np.uint64(at) >> ONE)
        before = 63 - np.int64(leading_zeros(np.int64(alive & ((ONE << np.uint64(at)) - ONE))))
        order[at] = merge_rank(ranks, merged, ids[after]) << INDEX_BITS | at
        order[before] = merge_rank(ranks, ids[before], merged) << INDEX_BITS | before

    # move the ids that are left to the front
    alive ^= ONE | ONE << np.uint64(length + 1)
    number = 0
    while alive:
        ids[number] = ids[trailing_zeros(alive)]
        number += 1
        alive &= alive - ONE
    return number


@compiled_with_allocation
def encode_long(data, start, length, ranks, ids):
    """Do as `encode_short` for any length in O(n log n): a heap of rank << 32 | index."""
    for k in range(length):
        ids[k] = ranks.byte_ids[data[start + k]]
    after = np.arange(1, length + 1)
    before = np.arange(-1, length - 1)
    # the entry for no merge sorts after all others, so the heap is never empty
    heap = [NEVER << 32]
    for k in range(length - 1):
        heap.append(merge_rank(ranks, ids[k], ids[k + 1]) << 32 | k)
    heapq.heapify(heap)
    while heap[0] < NEVER << 32:
        entry = heapq.heappop(heap)
        k = entry & 0xFFFFFFFF
        # skip an entry that other merges have made stale
        if ids[k] == GONE or after[k] == length:
            continue
        rank = merge_rank(ranks, ids[k], ids[after[k]])
        if rank != entry >> 32:
            continue
        # merge, and push the new token's merges with its neighbors
        ids[k], ids[after[k]] = ranks.merged[rank], GONE
        after[k] = after[after[k]]
        if after[k] < length:
            before[after[k]] = k
            heapq.heappush(heap, merge_rank(ranks, ids[k], ids[after[k]]) << 32 | k)
        if before[k] >= 0:
            k = before[k]
            heapq.heappush(heap, merge_rank(ranks, ids[k], ids[after[k]]) << 32 | k)
    # move the ids that are left to the front
    number = k = 0
    while k < length:
        ids[number] = ids[k]
        number += 1
        k = after[k]
    return number
