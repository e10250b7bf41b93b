"""Exercises of notebook 01: count pairs, merge one, encode a pre-token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from lib.lessons.exercise import Exercise, check
from lib.tokenizer.bpe import merge_pair


def _draw_ids(generator: random.Random, size: int) -> list[int]:
    # few different ids, so that pairs repeat and overlap
    return generator.choices(range(1, generator.choice([3, 4])), k=generator.randint(0, size))


def _draw_words(generator: random.Random, size: int) -> tuple:
    number = generator.randint(1, 1 + size // 4)
    words = (tuple(_draw_ids(generator, size)) for _ in range(number))
    return ({word: generator.randint(1, 5) for word in words},)


def count_pairs(words: Mapping[tuple, int]) -> dict:
    counts = Counter()
    for word, count in words.items():
        for pair in pairwise(word):
            counts[pair] += count
    return dict(counts)


COUNT_PAIRS = Exercise(
    count_pairs,
    _draw_words,
    {
        "each word counts once; add the word's count instead of 1": ("+= count", "+= 1"),
        "pairs are counted across the end of a word; "
        "the last id of one word and the first of the next are no pair": (
            """\
    for word, count in words.items():
        for pair in pairwise(word):
            counts[pair] += count
""",
            """\
    ids = [token for word, count in words.items() for token in word * count]
    counts.update(pairwise(ids))
""",
        ),
        "a pair that occurs twice in a word counts once": ("pairwise(word)", "set(pairwise(word))"),
        "a new count overwrites the one before; add to it": ("+= count", "= count"),
    },
)


def _draw_merge(generator: random.Random, size: int) -> tuple:
    # 0 is false; 1, 11 and 111 look alike as text; two ints of 300 are equal, yet two objects
    tokens = generator.sample(["0", "1", "11", "111", "256", "300"], k=generator.choice([2, 3]))
    ids = generator.choices(tokens, k=generator.randint(0, size + 2))
    pair = generator.choices(tokens[:2], k=2)
    return [int(token) for token in ids], tuple(int(token) for token in pair), 9


def _merge_overlapping(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    merged, was_pair = [], False
    for i, token in enumerate(ids):
        is_pair = tuple(ids[i : i + 2]) == tuple(pair)
        if is_pair:
            merged.append(new_id)
        elif not was_pair:
            merged.append(token)
        was_pair = is_pair
    return merged


def solve_merge_pair(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    merged, i = [], 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == tuple(pair):
            merged.append(new_id)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged


MERGE_PAIR = Exercise(
    solve_merge_pair,
    _draw_merge,
    {
        "overlapping pairs are merged twice; in [1, 1, 1] the middle 1 belongs to one pair only": (
            _merge_overlapping
        ),
        "the second id of a merged pair stays; after a merge, step over both": ("i += 2", "i += 1"),
        "the merging runs from right to left; [1, 1, 1] becomes [9, 1], not [1, 9]": (
            "    return merged",
            "    return merge_pair(ids[::-1], pair[::-1], new_id)[::-1]",
        ),
        "only the first pair is merged; go on to the end of the list": (
            "            i += 2",
            "            return [*merged, *ids[i + 2 :]]",
        ),
        "the last id gets lost where no pair ends the list": ("i < len(ids)", "i < len(ids) - 1"),
        "the pair is also merged the other way round; (1, 2) is not (2, 1)": (
            "== tuple(pair)",
            "in (tuple(pair), tuple(pair[::-1]))",
        ),
        "nothing is merged; a list slice never equals a tuple": (
            "tuple(ids[i : i + 2]) == tuple(pair)",
            "ids[i : i + 2] == tuple(pair)",
        ),
    },
)


def _draw_encoding(generator: random.Random, size: int) -> tuple:
    tokens, merges = [1, 2, 3], {}
    while len(merges) < 5:
        pair = tuple(generator.choices(tokens, k=2))
        if pair not in merges:
            merges[pair] = 10 + len(merges)
            tokens.append(merges[pair])
    # in any order, since only the new ids say which merge was learned earlier
    merges = dict(generator.sample(list(merges.items()), k=len(merges)))
    return generator.choices(range(1, 4), k=generator.randint(0, size + 2)), merges


def encode_pretoken(ids: Sequence[int], merges: Mapping[tuple, int]) -> list[int]:
    ids = list(ids)
    while known := [pair for pair in pairwise(ids) if pair in merges]:
        pair = min(known, key=merges.__getitem__)
        ids = merge_pair(ids, pair, merges[pair])
    return ids


def _encode_left_to_right(ids: Sequence[int], merges: Mapping[tuple, int]) -> list[int]:
    ids, i = list(ids), 0
    while i < len(ids) - 1:
        if tuple(ids[i : i + 2]) in merges:
            ids[i : i + 2] = [merges[tuple(ids[i : i + 2])]]
            i = 0
        else:
            i += 1
    return ids


def _encode_longest_match(ids: Sequence[int], merges: Mapping[tuple, int]) -> list[int]:
    spelled: dict[int, tuple[int, ...]] = {token: (token,) for token in (1, 2, 3)}
    for new_id, (left, right) in sorted((new_id, pair) for pair, new_id in merges.items()):
        spelled[new_id] = spelled[left] + spelled[right]
    # of two tokens with the same spelling the earlier one
    tokens = {spelling: token for token, spelling in reversed(spelled.items())}
    found, i = [], 0
    while i < len(ids):
        longest = max(
            (s for s in tokens if tuple(ids[i : i + len(s)]) == s), key=len, default=(ids[i],)
        )
        found.append(tokens.get(longest, ids[i]))
        i += len(longest)
    return found


def _encode_in_dictionary_order(ids: Sequence[int], merges: Mapping[tuple, int]) -> list[int]:
    for pair, new_id in merges.items():
        ids = merge_pair(ids, pair, new_id)
    return list(ids)


ENCODE_PRETOKEN = Exercise(
    encode_pretoken,
    _draw_encoding,
    {
        "the merge learned last comes first; take the smallest new id": ("min(known", "max(known"),
        "the leftmost known pair comes first, and not the one learned first": (
            "min(known, key=merges.__getitem__)",
            "known[0]",
        ),
        "pairs are joined from left to right, and not in the order learned": _encode_left_to_right,
        "it stops after one merge; merges make new pairs, so look again": (
            "    while known := [pair for pair in pairwise(ids) if pair in merges]:",
            "    if known := [pair for pair in pairwise(ids) if pair in merges]:",
        ),
        "the longest token comes first, as in WordPiece; byte-pair encoding replays merges": (
            _encode_longest_match
        ),
        "merges run in the dictionary's order; the smallest new id was learned first": (
            _encode_in_dictionary_order
        ),
    },
)


def check_count_pairs(attempt: Callable) -> None:
    """Check `count_pairs(words)`: {tuple of ids: count} -> {pair: count}."""
    check(COUNT_PAIRS, attempt)


def check_merge_pair(attempt: Callable) -> None:
    """Check `merge_pair(ids, pair, new_id)` -> list of ids."""
    check(MERGE_PAIR, attempt)


def check_encode_pretoken(attempt: Callable) -> None:
    """Check `encode_pretoken(ids, merges)`, with merges {pair: new id} -> list of ids."""
    check(ENCODE_PRETOKEN, attempt)
