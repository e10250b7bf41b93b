"""Exercises of notebook 01: counting pairs, merging one, encoding a pre-token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from lib.exercises import Exercise, check
from lib.tokenizer import merge_pair


def _draw_ids(generator: random.Random, size: int) -> list[int]:
    # few different ids, so that pairs repeat and overlap
    return generator.choices(range(1, generator.choice([3, 4])), k=generator.randint(0, size))


def _draw_words(generator: random.Random, size: int) -> tuple:
    number = generator.randint(1, 1 + size // 4)
    words = (tuple(_draw_ids(generator, size)) for _ in range(number))
    return ({word: generator.randint(1, 5) for word in words},)


def _count_pairs(words: Mapping[tuple, int]) -> dict:
    counts = Counter()
    for word, count in words.items():
        for pair in pairwise(word):
            counts[pair] += count
    return dict(counts)


def _count_without_weight(words: Mapping[tuple, int]) -> dict:
    return _count_pairs(dict.fromkeys(words, 1))


def _count_across_words(words: Mapping[tuple, int]) -> dict:
    ids = [token for word, count in words.items() for token in word * count]
    return dict(Counter(pairwise(ids)))


def _count_each_pair_once(words: Mapping[tuple, int]) -> dict:
    counts = Counter()
    for word, count in words.items():
        for pair in set(pairwise(word)):
            counts[pair] += count
    return dict(counts)


def _count_overwriting(words: Mapping[tuple, int]) -> dict:
    return {pair: count for word, count in words.items() for pair in pairwise(word)}


COUNT_PAIRS = Exercise(
    solve=_count_pairs,
    draw=_draw_words,
    mistakes={
        "each word counts once; add the word's count instead of 1": _count_without_weight,
        "pairs are counted across the end of a word; "
        "the last id of one word and the first of the next are no pair": _count_across_words,
        "a pair that stands twice in a word counts once": _count_each_pair_once,
        "a new count overwrites the one before; add to it": _count_overwriting,
    },
)


def _draw_merge(generator: random.Random, size: int) -> tuple:
    # 0 is false; 1, 11 and 111 look alike as text; two ints of 300 are equal, yet two objects
    tokens = generator.sample(["0", "1", "11", "111", "256", "300"], k=generator.choice([2, 3]))
    ids = generator.choices(tokens, k=generator.randint(0, size + 2))
    pair = generator.choices(tokens[:2], k=2)
    return [int(token) for token in ids], tuple(int(token) for token in pair), 9


def _merge_every_place(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    """Both of two overlapping pairs are replaced."""
    merged, was_pair = [], False
    for i, token in enumerate(ids):
        is_pair = tuple(ids[i : i + 2]) == tuple(pair)
        if is_pair:
            merged.append(new_id)
        elif not was_pair:
            merged.append(token)
        was_pair = is_pair
    return merged


def _merge_without_skipping(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    places = range(len(ids))
    return [new_id if tuple(ids[i : i + 2]) == tuple(pair) else ids[i] for i in places]


def _merge_from_the_right(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    return merge_pair(ids[::-1], pair[::-1], new_id)[::-1]


def _merge_first_only(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    for i in range(len(ids) - 1):
        if tuple(ids[i : i + 2]) == tuple(pair):
            return [*ids[:i], new_id, *ids[i + 2 :]]
    return list(ids)


def _merge_without_last(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    merged, i = [], 0
    while i < len(ids) - 1:
        found = tuple(ids[i : i + 2]) == tuple(pair)
        merged.append(new_id if found else ids[i])
        i += 2 if found else 1
    return merged


def _merge_either_order(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    merged, i = [], 0
    while i < len(ids):
        found = tuple(ids[i : i + 2]) in (tuple(pair), tuple(pair[::-1]))
        merged.append(new_id if found else ids[i])
        i += 2 if found else 1
    return merged


def _merge_nothing(ids: Sequence[int], pair: tuple, new_id: int) -> list[int]:
    return list(ids)


MERGE_PAIR = Exercise(
    solve=merge_pair,
    draw=_draw_merge,
    mistakes={
        "overlapping pairs are merged twice; in [1, 1, 1] the middle 1 belongs to one pair only": (
            _merge_every_place
        ),
        "the second id of a merged pair stays; after a merge, step over both": (
            _merge_without_skipping
        ),
        "the merging runs from right to left; [1, 1, 1] becomes [9, 1], not [1, 9]": (
            _merge_from_the_right
        ),
        "only the first place is merged; go on to the end of the list": _merge_first_only,
        "the last id gets lost where no pair ends the list": _merge_without_last,
        "the pair is also merged the other way round; (1, 2) is not (2, 1)": _merge_either_order,
        "nothing is merged; a list slice never equals a tuple": _merge_nothing,
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


def _encode(ids: Sequence[int], merges: Mapping[tuple, int], choose: Callable = min) -> list[int]:
    ids = list(ids)
    while known := [pair for pair in pairwise(ids) if pair in merges]:
        pair = choose(known, key=merges.__getitem__)
        ids = merge_pair(ids, pair, merges[pair])
    return ids


def _encode_latest_first(ids: Sequence[int], merges: Mapping[tuple, int]) -> list[int]:
    return _encode(ids, merges, max)


def _encode_leftmost(ids: Sequence[int], merges: Mapping[tuple, int]) -> list[int]:
    return _encode(ids, merges, lambda known, key: known[0])


def _encode_leftmost_place(ids: Sequence[int], merges: Mapping[tuple, int]) -> list[int]:
    ids, i = list(ids), 0
    while i < len(ids) - 1:
        if tuple(ids[i : i + 2]) in merges:
            ids[i : i + 2] = [merges[tuple(ids[i : i + 2])]]
            i = 0
        else:
            i += 1
    return ids


def _encode_once(ids: Sequence[int], merges: Mapping[tuple, int]) -> list[int]:
    known = [pair for pair in pairwise(ids) if pair in merges]
    pair = min(known, key=merges.__getitem__, default=None)
    return merge_pair(ids, pair, merges[pair]) if pair else list(ids)


def _encode_longest_match(ids: Sequence[int], merges: Mapping[tuple, int]) -> list[int]:
    spelled = {token: (token,) for token in (1, 2, 3)}
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
    solve=_encode,
    draw=_draw_encoding,
    mistakes={
        "the merge learned last comes first; take the smallest new id": _encode_latest_first,
        "the leftmost known pair comes first, and not the one learned first": _encode_leftmost,
        "pairs are joined from left to right, and not in the order learned": (
            _encode_leftmost_place
        ),
        "it stops after one merge; merges make new pairs, so look again": _encode_once,
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
