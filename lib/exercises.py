"""Exercises: a reader's function runs beside a right one, and a check says where they part.

A check tries fresh random inputs, short ones first, and prints one of three verdicts: not
attempted, right, or not yet with the first input that failed. It never raises, so that a notebook
with open exercises runs to its end. Each exercise knows the usual mistakes: functions that make
them. When the reader's results are those of such a function, the check says so.
"""

from __future__ import annotations

import copy
import random
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

from lib.tokenizer import merge_pair

TRIALS = 150
# Seconds for one call; short, since an endless loop that appends fills memory meanwhile.
TIME_LIMIT = 2
MISSING = object()
NOT_FINISHED = object()


@dataclass(frozen=True)
class Exercise:
    """A task for which right answers can be computed."""

    solve: Callable
    """The right function."""

    draw: Callable[[random.Random, int], tuple]
    """(generator, size) -> arguments of about that size."""

    mistakes: Mapping[str, Callable]
    """What went wrong, as a sentence -> a function that goes wrong in this way."""


@dataclass(frozen=True)
class Raised:
    """What a call gave that ended in an error."""

    error: str
    line: int | None


class TimeLimitError(BaseException):
    """A call took too long; no Exception, so that the reader's `except Exception` lets it pass."""


def check(exercise: Exercise, attempt: Callable, *, seed: int | None = None) -> None:
    """Print the verdict on `attempt`; `seed` repeats the inputs of another check."""
    print(verdict(exercise, attempt, seed=seed))


def verdict(exercise: Exercise, attempt: Callable, *, seed: int | None = None) -> str:
    """What `check` prints."""
    generator = random.Random(seed)
    inputs = [exercise.draw(generator, 1 + trial // 10) for trial in range(TRIALS)]
    expected = [_call(exercise.solve, arguments) for arguments in inputs]
    results = []
    for arguments, right in zip(inputs, expected):
        try:
            results.append(_call(attempt, arguments))
        except NotImplementedError:
            return "not attempted"
        if not _equal(results[-1], right):
            break
    else:
        return f"right: the same as expected on {TRIALS} random inputs"
    shown = ", ".join(map(repr, arguments))
    lines = [f"not yet: {attempt.__name__}({shown})", f"  {difference(results[-1], right)}"]
    if results[-1] is not NOT_FINISHED and (name := _recognise(exercise, attempt, inputs)):
        lines.append(f"  It looks as if {name}.")
    return "\n".join(lines)


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TimeLimitError after TIME_LIMIT; no limit on Windows or outside the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    if not (in_main and hasattr(signal, "setitimer")):
        yield
        return

    def stop(number, frame):
        raise TimeLimitError

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _call(function: Callable, arguments: tuple) -> Any:
    try:
        # a copy, since a function may change the list that it is given
        arguments = copy.deepcopy(arguments)
        with _time_limit():
            return function(*arguments)
    except TimeLimitError:
        return NOT_FINISHED
    except NotImplementedError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame.lineno for frame in frames if frame.name == function.__name__]
        return Raised(f"{type(error).__name__}: {error}", inside[-1] if inside else None)


def _recognise(exercise: Exercise, attempt: Callable, inputs: Sequence[tuple]) -> str | None:
    """The mistake that gives what `attempt` gives on all inputs, if there is one."""
    results = []
    for arguments in inputs:
        try:
            results.append(_call(attempt, arguments))
        except NotImplementedError:
            return None
        # no mistake loops for ever, and each further input might cost the whole limit
        if results[-1] is NOT_FINISHED:
            return None
    for name, function in exercise.mistakes.items():
        if all(_equal(_call(function, a), result) for a, result in zip(inputs, results)):
            return name
    return None


def _plain(value: Any) -> Any:
    """Dicts of any kind as dict, sequences and arrays as list, so that only values count."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _equal(yours: Any, expected: Any) -> bool:
    return _plain(yours) == _plain(expected)


def difference(yours: Any, expected: Any) -> str:
    """The first value in which a result differs from the expected one, as a sentence."""
    yours, expected = _plain(yours), _plain(expected)
    if yours is NOT_FINISHED:
        return f"it did not finish in {TIME_LIMIT} s; does the position grow in every branch?"
    if isinstance(yours, Raised):
        where = f" in line {yours.line} of the cell" if yours.line else ""
        return f"it raised {yours.error}{where}; expected {expected!r}"
    if yours is None:
        return f"it returned None (is a `return` missing?); expected {expected!r}"
    if type(yours) is not type(expected):
        return f"it returned {yours!r}, which is a {type(yours).__name__}; expected {expected!r}"
    if isinstance(expected, dict):
        strange = expected and {*map(_shape, yours)} - {*map(_shape, expected)}
        if strange and len(repr(yours)) <= 80:
            return f"it returned {yours!r}, with keys of another kind; expected {expected!r}"
        keys = [*expected, *(key for key in yours if key not in expected)]
        places = [(repr(key), yours.get(key, MISSING), expected.get(key, MISSING)) for key in keys]
    elif isinstance(expected, list):
        pairs = enumerate(zip_longest(yours, expected, fillvalue=MISSING))
        places = [(f"position {i}", mine, right) for i, (mine, right) in pairs]
    else:
        places = [("result", yours, expected)]
    place, mine, right = next(place for place in places if place[1] != place[2])
    return f"{place}: yours {_shown(mine)}, expected {_shown(right)}"


def _shape(key: Any) -> Any:
    return tuple(map(type, key)) if isinstance(key, tuple) else type(key)


def _shown(value: Any) -> str:
    return "nothing" if value is MISSING else repr(value)


# Notebook 01: byte-pair encoding


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
