"""Compiled by Numba: learn the merges of byte-pair encoding from counted pre-tokens.

Every pair of neighboring tokens has a list of the cells where it was seen, so that a merge touches
only those. All distinct pre-tokens are laid out one after the other in `cells`, with BORDER between
them. A token has its id in the first and the last cell that it covers, so the neighbors of any
token are one step away; cells in between are DEAD. The word `lower`, before and after `er` has
become token 300 and `low` token 310:

    BORDER   l    o    w    e    r   BORDER
    BORDER  310 DEAD  310  300  300  BORDER

The rules for kernels are in `lib.tokenizer.compiled_scan`.
"""

from typing import NamedTuple

import numpy as np

from lib.tokenizer.compiled_scan import U32, compiled
from lib.tokenizer.compiled_words import MIX_1, WordCounts, enlarged

BORDER, DEAD = -1, -2
# the sides of a merged pair; of one type with variables, or Numba would compile for each
BEFORE, AFTER = np.int64(0), np.int64(1)
# columns of Learner.pairs, .tokens, .used and .cells
KEY, COUNT, ENDS, SITES = 0, 1, 2, 3
PREFIX, START, LENGTH = 0, 1, 2
TOKENS_USED, SITES_USED, PAIRS_USED, HEAP_USED, HEAP_FLOOR = 0, 1, 2, 3, 4
SYMBOL, WEIGHT = 0, 1
# results of `learn`: done, or which array must grow first
DONE, MORE_SITES, MORE_PAIRS, MORE_HEAP, MORE_BYTES, MORE_COUNTS = 0, 1, 2, 3, 4, 5
LOW = 0xFFFFFFFF


class Learner(NamedTuple):
    """The arrays to learn in, int64 unless noted; a site is an entry of a pair's list."""

    # (cells, 2) int32: token id, BORDER or DEAD; how often the pre-token of this cell occurred
    cells: np.ndarray
    # (tokens, 3): first seven bytes as a big-endian number, start in token_bytes, length
    tokens: np.ndarray
    # (bytes,) uint8
    token_bytes: np.ndarray
    # (rows, 4), a hash table: key + 1, count, first site | last site << 32, number of sites; a key
    # is left id << 32 | right id
    pairs: np.ndarray
    # (sites, 2) int32, linked lists: cell, next site or -1. A merge nearby can make a site stale:
    # it stays, and walking the list checks for it. 32 bits allow 2 GB of distinct words.
    sites: np.ndarray
    # (entries, 2), a binary heap: count when pushed, key; the next pair to merge is on top
    heap: np.ndarray
    # (2, tokens, 3): count, ends and number of sites of the tokens found before (0) and after (1)
    # the pair that is being merged
    beside: np.ndarray
    # (2, 1 + tokens): how many tokens those are, and which
    touched: np.ndarray
    # (merges, 2): left id, right id
    merges: np.ndarray
    # (5,): tokens, sites, pairs and heap entries in use, and the smallest count of pairs in the
    # heap: most pairs are too rare to ever be merged
    used: np.ndarray


@compiled
def lay_out(kept, starts, counts, num_words, cells):
    """Fill `cells` with words: kept[starts[w] : starts[w + 1]] occurred counts[w] times."""
    cell = 0
    cells[0, SYMBOL] = BORDER
    for word in range(num_words):
        for k in range(starts[word], starts[word + 1]):
            cell += 1
            cells[cell, SYMBOL], cells[cell, WEIGHT] = kept[k], counts[word]
        cell += 1
        cells[cell, SYMBOL] = BORDER


@compiled
def find_pair(pairs, key):
    """Return the row of the pair `key`, or the empty row where it belongs."""
    mask = pairs.shape[0] - 1
    row = np.int64((np.uint64(key) * MIX_1) >> U32) & mask
    while pairs[row, KEY] != 0 and pairs[row, KEY] != key + 1:
        row = (row + 1) & mask
    return row


@compiled
def append_sites(pairs, sites, row, ends, number):
    """Append a list of sites, given as first | last << 32, to the one of `row`."""
    if pairs[row, SITES] == 0:
        pairs[row, ENDS] = ends
    else:
        sites[pairs[row, ENDS] >> 32, 1] = ends & LOW
        pairs[row, ENDS] = (pairs[row, ENDS] & LOW) | (ends & ~LOW)
    pairs[row, SITES] += number


@compiled
def next_pair(cells, tokens, cell):
    """Return the next cell from `cell` on where a pair begins, and where its second token begins.

    Returns the number of cells twice if there is none.
    """
    while cell < cells.shape[0]:
        left = cells[cell, SYMBOL]
        if left == BORDER:
            cell += 1
            continue
        after = cell + tokens[left, LENGTH]
        if cells[after, SYMBOL] != BORDER:
            return cell, after
        cell = after
    return cell, cell


@compiled
def gather_sites(learner):
    """Count all pairs and list their sites anew, those of a pair next to one another.

    The first call enters the pairs of bytes; later ones drop the sites that merges made stale.
    """
    cells, tokens, pairs, sites = learner.cells, learner.tokens, learner.pairs, learner.sites
    # count
    for row in range(pairs.shape[0]):
        pairs[row, COUNT] = pairs[row, SITES] = 0
    cell, after = next_pair(cells, tokens, np.int64(0))
    while cell < cells.shape[0]:
        key = np.int64(cells[cell, SYMBOL]) << 32 | np.int64(cells[after, SYMBOL])
        row = find_pair(pairs, key)
        if pairs[row, KEY] == 0:
            pairs[row, KEY] = key + 1
            learner.used[PAIRS_USED] += 1
        pairs[row, COUNT] += cells[cell, WEIGHT]
        pairs[row, SITES] += 1
        cell, after = next_pair(cells, tokens, after)
    # divide the list among the pairs; for now, ENDS is the site to fill next
    total = 0
    for row in range(pairs.shape[0]):
        pairs[row, ENDS] = total
        total += pairs[row, SITES]
    # fill
    cell, after = next_pair(cells, tokens, np.int64(0))
    while cell < cells.shape[0]:
        key = np.int64(cells[cell, SYMBOL]) << 32 | np.int64(cells[after, SYMBOL])
        row = find_pair(pairs, key)
        site = pairs[row, ENDS]
        sites[site, 0], sites[site, 1] = cell, site + 1
        pairs[row, ENDS] += 1
        cell, after = next_pair(cells, tokens, after)
    # end the list of each pair
    for row in range(pairs.shape[0]):
        if pairs[row, SITES] > 0:
            last = pairs[row, ENDS] - 1
            sites[last, 1] = -1
            pairs[row, ENDS] = (last - pairs[row, SITES] + 1) | last << 32
    learner.used[SITES_USED] = total


@compiled
def refill_heap(learner):
    """Fill the heap with the pairs that occur at least HEAP_FLOOR times, as far as it has space.

    Returns the number of these pairs.
    """
    pairs, heap = learner.pairs, learner.heap
    number = 0
    learner.used[HEAP_USED] = 0
    for row in range(pairs.shape[0]):
        if pairs[row, COUNT] >= learner.used[HEAP_FLOOR]:
            number += 1
            if number <= heap.shape[0]:
                push(learner, pairs[row, COUNT], pairs[row, KEY] - 1)
    return number


@compiled
def move_pairs(old, pairs):
    """Copy the rows of `old` with a count into an empty, larger table; return their number."""
    number = 0
    for k in range(old.shape[0]):
        if old[k, COUNT] > 0:
            row = find_pair(pairs, old[k, KEY] - 1)
            for column in range(old.shape[1]):
                pairs[row, column] = old[k, column]
            number += 1
    return number


@compiled
def compare_tokens(learner, a, b):
    """Return > 0 if token `a` is lexicographically greater than token `b`, < 0 if less."""
    tokens, token_bytes = learner.tokens, learner.token_bytes
    if tokens[a, PREFIX] != tokens[b, PREFIX]:
        return tokens[a, PREFIX] - tokens[b, PREFIX]
    for k in range(min(tokens[a, LENGTH], tokens[b, LENGTH])):
        byte_a = np.int64(token_bytes[tokens[a, START] + k])
        byte_b = np.int64(token_bytes[tokens[b, START] + k])
        if byte_a != byte_b:
            return byte_a - byte_b
    return tokens[a, LENGTH] - tokens[b, LENGTH]


@compiled
def comes_first(learner, i, j):
    """Whether entry `i` of the heap is merged before `j`: higher count, then the greater pair."""
    heap = learner.heap
    if heap[i, 0] != heap[j, 0]:
        return heap[i, 0] > heap[j, 0]
    order = compare_tokens(learner, heap[i, 1] >> 32, heap[j, 1] >> 32)
    if order == 0:
        order = compare_tokens(learner, heap[i, 1] & LOW, heap[j, 1] & LOW)
    return order > 0


@compiled
def swap(heap, i, j):
    for k in range(2):
        heap[i, k], heap[j, k] = heap[j, k], heap[i, k]


@compiled
def push(learner, count, key):
    """Add an entry to the heap."""
    i = learner.used[HEAP_USED]
    learner.heap[i, 0], learner.heap[i, 1] = count, key
    while i > 0 and comes_first(learner, i, (i - 1) >> 1):
        swap(learner.heap, i, (i - 1) >> 1)
        i = (i - 1) >> 1
    learner.used[HEAP_USED] += 1


@compiled
def sift_down(learner):
    """Restore the order of the heap after its top has changed."""
    size = learner.used[HEAP_USED]
    i = np.int64(0)
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and comes_first(learner, child + 1, child):
            child += 1
        if not comes_first(learner, child, i):
            break
        swap(learner.heap, i, child)
        i = child


@compiled
def pop(learner):
    """Remove the top of the heap."""
    learner.used[HEAP_USED] -= 1
    swap(learner.heap, 0, learner.used[HEAP_USED])
    sift_down(learner)


@compiled
def record_neighbor(learner, side, token, count, cell):
    """Record a neighbor of the merged pair on one side, and the cell where its new pair begins."""
    sites, beside, touched = learner.sites, learner.beside, learner.touched
    site = learner.used[SITES_USED]
    learner.used[SITES_USED] += 1
    sites[site, 0], sites[site, 1] = cell, -1
    if beside[side, token, 2] == 0:
        beside[side, token, 1] = site | site << 32
        touched[side, 0] += 1
        touched[side, touched[side, 0]] = token
    else:
        sites[beside[side, token, 1] >> 32, 1] = site
        beside[side, token, 1] = (beside[side, token, 1] & LOW) | site << 32
    beside[side, token, 0] += count
    beside[side, token, 2] += 1


@compiled
def merge_everywhere(learner, site, left, right, new):
    """Merge `left` and `right` at every valid site of the list that begins at `site`, in order."""
    cells, tokens, sites = learner.cells, learner.tokens, learner.sites
    left_length, right_length = tokens[left, LENGTH], tokens[right, LENGTH]
    while site >= 0:
        p = np.int64(sites[site, 0])
        site = np.int64(sites[site, 1])
        q = p + left_length
        if cells[p, SYMBOL] != left or cells[q, SYMBOL] != right:
            continue
        end = q + right_length
        before, after = np.int64(cells[p - 1, SYMBOL]), np.int64(cells[end, SYMBOL])
        cells[q - 1, SYMBOL] = DEAD
        cells[q, SYMBOL] = DEAD
        cells[p, SYMBOL] = new
        cells[end - 1, SYMBOL] = new
        count = np.int64(cells[p, WEIGHT])
        if before >= 0:
            record_neighbor(learner, BEFORE, before, count, p - tokens[before, LENGTH])
        if after >= 0:
            record_neighbor(learner, AFTER, after, count, p)


@compiled
def new_key(side, token, new):
    """Return the key of the pair of `token`, on that side, and the token `new`."""
    return new << 32 | token if side else token << 32 | new


@compiled
def update_pairs(learner, left, right, new):
    """Update the table of pairs and the heap after `merge_everywhere`.

    All new pairs are added before any old one is reduced, since a pair that one site makes and the
    next destroys is in both.
    """
    pairs, beside, touched, used = learner.pairs, learner.beside, learner.touched, learner.used
    # add the new pairs
    for side in range(2):
        for k in range(1, 1 + touched[side, 0]):
            token = touched[side, k]
            row = find_pair(pairs, new_key(side, token, new))
            if pairs[row, KEY] == 0:
                pairs[row, KEY] = new_key(side, token, new) + 1
                used[PAIRS_USED] += 1
            append_sites(pairs, learner.sites, row, beside[side, token, 1], beside[side, token, 2])
            pairs[row, COUNT] += beside[side, token, 0]
            # the sites are in the table now: keep the row instead
            beside[side, token, 1] = row
    # reduce the old pairs
    for side in range(2):
        for k in range(1, 1 + touched[side, 0]):
            token = touched[side, k]
            old_key = right << 32 | token if side else token << 32 | left
            pairs[find_pair(pairs, old_key), COUNT] -= beside[side, token, 0]
    # push the new pairs, and clear the notes
    for side in range(2):
        for k in range(1, 1 + touched[side, 0]):
            token = touched[side, k]
            row = beside[side, token, 1]
            if pairs[row, COUNT] >= used[HEAP_FLOOR]:
                push(learner, pairs[row, COUNT], pairs[row, KEY] - 1)
            beside[side, token, 2] = beside[side, token, 0] = 0
        touched[side, 0] = 0


@compiled
def add_token(learner, left, right, new):
    """Add token `new`: the bytes of `left` followed by those of `right`."""
    tokens, token_bytes = learner.tokens, learner.token_bytes
    start = tokens[new - 1, START] + tokens[new - 1, LENGTH]
    length = prefix = 0
    for part in (left, right):
        for k in range(tokens[part, LENGTH]):
            token_bytes[start + length] = token_bytes[tokens[part, START] + k]
            length += 1
    for k in range(7):
        prefix = prefix << 8 | (np.int64(token_bytes[start + k]) if k < length else 0)
    tokens[new, PREFIX], tokens[new, START], tokens[new, LENGTH] = prefix, start, length


@compiled
def learn(learner):
    """Merge until `merges` is full, no pair is left, or an array must grow first."""
    tokens, pairs, heap, used = learner.tokens, learner.pairs, learner.heap, learner.used
    while used[TOKENS_USED] < tokens.shape[0]:
        if used[HEAP_USED] == 0 or heap[0, 0] < used[HEAP_FLOOR]:
            if used[HEAP_FLOOR] == 1:
                break
            return MORE_COUNTS
        # the pair with the highest count
        key = heap[0, 1]
        row = find_pair(pairs, key)
        if pairs[row, COUNT] == 0:
            pop(learner)
            continue
        if pairs[row, COUNT] != heap[0, 0]:
            # The count fell after it was pushed. It cannot have grown: a merge makes pairs only
            # with its new token, and no two merges make the same token. For wherever two tokens are
            # neighbors, no token has crossed the ends of the bytes that they cover, so these bytes
            # were merged as they would be alone, which can happen in one way only.
            heap[0, 0] = pairs[row, COUNT]
            sift_down(learner)
            continue
        # return before the arrays could overflow
        left, right, new = key >> 32, key & LOW, used[TOKENS_USED]
        most_sites = 2 * pairs[row, SITES]
        most_pairs = min(most_sites, 2 * (new + 1))
        end = tokens[new - 1, START] + tokens[new - 1, LENGTH]
        if used[SITES_USED] + most_sites > learner.sites.shape[0]:
            return MORE_SITES
        if 2 * (used[PAIRS_USED] + most_pairs) > pairs.shape[0]:
            return MORE_PAIRS
        if used[HEAP_USED] + most_pairs > heap.shape[0]:
            return MORE_HEAP
        if end + tokens[left, LENGTH] + tokens[right, LENGTH] > learner.token_bytes.shape[0]:
            return MORE_BYTES
        # merge
        pop(learner)
        add_token(learner, left, right, new)
        used[TOKENS_USED] += 1
        learner.merges[new - 256, 0], learner.merges[new - 256, 1] = left, right
        merge_everywhere(learner, pairs[row, ENDS] & LOW, left, right, new)
        update_pairs(learner, left, right, new)
        pairs[row, COUNT] = pairs[row, SITES] = 0
    return DONE


def new_learner(words: WordCounts, num_merges: int) -> Learner:
    """Allocate the arrays for learning `num_merges` merges, with `words` laid out but no pairs."""
    num_bytes = int(words.starts[words.num_words])
    # each merge makes at least one word shorter
    num_merges = min(num_merges, num_bytes)
    heaviest = int(words.counts[: words.num_words].max(initial=0))
    tokens = np.zeros((256 + num_merges, 3), dtype=np.int64)
    tokens[:256, PREFIX] = np.arange(256) << 48
    tokens[:256, START] = np.arange(256)
    tokens[:256, LENGTH] = 1
    # there are never more valid sites than bytes; the rest is for stale ones
    num_sites = num_bytes + min(num_bytes, max(1 << 24, num_bytes // 4))
    learner = Learner(
        cells=np.empty(
            (num_bytes + words.num_words + 1, 2), dtype=np.int32 if heaviest < 1 << 31 else np.int64
        ),
        tokens=tokens,
        token_bytes=enlarged(np.arange(256, dtype=np.uint8), 1 << 16),
        pairs=np.zeros((1 << 18, 4), dtype=np.int64),
        sites=np.empty((num_sites, 2), dtype=np.int32),
        heap=np.empty((1 << 16, 2), dtype=np.int64),
        beside=np.zeros((2, 256 + num_merges, 3), dtype=np.int64),
        touched=np.zeros((2, 257 + num_merges), dtype=np.int64),
        merges=np.empty((num_merges, 2), dtype=np.int64),
        used=np.array([256, 0, 0, 0, 1 << 62], dtype=np.int64),
    )
    lay_out(words.kept, words.starts, words.counts, words.num_words, learner.cells)
    return learner


def with_lower_floor(learner: Learner) -> Learner:
    """Refill the heap with rarer pairs, once all others are merged."""
    most = int(learner.pairs[:, COUNT].max())
    learner.used[HEAP_FLOOR] = max(1, most // 8)
    while (number := refill_heap(learner)) > len(learner.heap):
        learner = learner._replace(heap=np.empty((2 * number, 2), dtype=np.int64))
    return learner


def learn_merges(learner: Learner) -> list[tuple[int, int]]:
    """Learn merges until the arrays are full or no pair is left: (left id, right id) in order."""
    gather_sites(learner)
    gathered_at = 0
    while (short := learn(learner)) != DONE:
        if short == MORE_COUNTS:
            learner = with_lower_floor(learner)
        elif short == MORE_SITES and gathered_at < learner.used[TOKENS_USED]:
            gathered_at = learner.used[TOKENS_USED]
            gather_sites(learner)
        elif short == MORE_SITES:
            sites = enlarged(learner.sites, len(learner.sites) * 3 // 2 + 4)
            learner = learner._replace(sites=sites)
        elif short == MORE_PAIRS:
            pairs = np.zeros((2 * len(learner.pairs), 4), dtype=np.int64)
            learner.used[PAIRS_USED] = move_pairs(learner.pairs, pairs)
            learner = learner._replace(pairs=pairs)
        elif short == MORE_HEAP:
            learner = learner._replace(heap=enlarged(learner.heap, 2 * len(learner.heap)))
        else:
            token_bytes = enlarged(learner.token_bytes, 2 * len(learner.token_bytes))
            learner = learner._replace(token_bytes=token_bytes)
    learned = learner.used[TOKENS_USED] - 256
    return [tuple(pair) for pair in learner.merges[:learned].tolist()]
