"""Exercises of notebook 07: a balanced partition, the boundaries of shards, what ranks send."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lib.exercises import Exercise, check
from lib.sharded_optimizer_parts import balanced_owners
from lib.sharding_costs import sent_bytes


def _like(function: Callable, name: str, **how: Any) -> Callable:
    """`function` with the keywords `how`, which make a mistake, under a name of its own."""

    def mistaken(*arguments):
        return function(*arguments, **how)

    mistaken.__name__ = name
    return mistaken


def _draw_parameters(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 4)
    # vectors and matrices, in no order
    sizes = [generator.choice([1, 2, 3, generator.randint(4, 40)]) for _ in range(ranks + size)]
    return sizes, ranks


def weighed(assign: Callable) -> Callable[[Sequence[int], int], dict[str, int]]:
    """A function that weighs what `assign(sizes, ranks)` gives, the owner of each parameter.

    How many parameters have an owner among the ranks, and the largest load, at least the bound: the
    one of largest first. So any partition that is as balanced is as good.
    """

    def weighing(sizes: Sequence[int], ranks: int) -> dict[str, int]:
        bound = _largest_load(balanced_owners(sizes, [0] * ranks), sizes, ranks)
        owners = assign(sizes, ranks)
        if strange := [owner for owner in owners if hasattr(owner, "__len__")]:
            raise TypeError(f"an owner is {strange[0]!r}; right is: the number of a rank")
        owners = [int(owner) for owner in owners]
        owned = sum(owner in range(ranks) for owner in owners[: len(sizes)])
        found = {"parameters with an owner": owned, "owners": len(owners)}
        return found | {"largest load": max(bound, _largest_load(owners, sizes, ranks))}

    weighing.__name__ = assign.__name__
    return weighing


def _largest_load(owners: Sequence[int], sizes: Sequence[int], ranks: int) -> int:
    loads = [0] * ranks
    for owner, size in zip(owners, sizes):
        if owner in range(ranks):
            loads[owner] += size
    return max(loads)


def _assign(
    sizes: Sequence[int],
    ranks: int,
    *,
    order: Callable[[list[int], Sequence[int]], list[int]] = lambda indices, sizes: indices,
    owner: Callable[[int, list[int], int], int] = lambda place, loads, count: loads.index(
        min(loads)
    ),
) -> list[int]:
    """Owners that are dealt one after another; the keywords make mistakes."""
    owners, loads = [0] * len(sizes), [0] * ranks
    for place, index in enumerate(order(list(range(len(sizes))), sizes)):
        owners[index] = owner(place, loads, len(sizes))
        loads[owners[index]] += sizes[index]
    return owners


def _largest_first(indices: list[int], sizes: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: -sizes[index])


def _in_sorted_order(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owners of largest first, in the order in which they were dealt."""
    owners = balanced_owners(sizes, [0] * ranks)
    return [owners[index] for index in _largest_first(list(range(len(sizes))), sizes)]


def _mistaken_owners(name: str, **how: Any) -> Callable:
    return weighed(_like(_assign, name, **how))


BALANCED_OWNERS = Exercise(
    solve=weighed(_like(_assign, "largest_first", order=_largest_first)),
    draw=_draw_parameters,
    mistakes={
        "parameters go to the ranks in turn (round robin), whatever their sizes": (
            _mistaken_owners("round_robin", owner=lambda place, loads, count: place % len(loads))
        ),
        "parameters are dealt by size, but in turn, or from the small end; take the largest first, "
        "for the rank with the least so far": (
            _mistaken_owners(
                "sorted_round_robin",
                order=_largest_first,
                owner=lambda place, loads, count: place % len(loads),
            )
        ),
        "each rank gets equally many parameters, a stretch of the list; count elements, not "
        "parameters": (
            _mistaken_owners(
                "by_count",
                owner=lambda place, loads, count: min(
                    place // -(-count // len(loads)), len(loads) - 1
                ),
            )
        ),
        "the owners stand in the order in which they were dealt; they are to stand in the order of "
        "`sizes`": weighed(_in_sorted_order),
        "the list is not sorted first; a large one that comes late finds no room": (
            _mistaken_owners("unsorted")
        ),
        "all go to one rank: the loads are never updated, or each goes to the rank with the most": (
            _mistaken_owners(
                "most_loaded",
                order=_largest_first,
                owner=lambda place, loads, count: loads.index(max(loads)),
            )
        ),
    },
)


def _draw_buffer(generator: random.Random, size: int) -> tuple:
    ranks = generator.choice([1, 2, 3, 4, 8])
    alignment = generator.choice([1, 2, 4, 8])
    elements = generator.randint(1, 20 * size)
    if generator.random() < 0.3:
        # nothing to pad
        elements = generator.randint(1, 3) * ranks * alignment
    return elements, ranks, alignment


def _boundaries(
    elements: int,
    ranks: int,
    alignment: int,
    *,
    length: Callable[[int, int, int], int] = lambda n, ranks, a: -(-n // (ranks * a)) * a,
    start: Callable[[int, int, int, int], int] = lambda rank, ranks, length, n: rank * length,
    stop: Callable[[int, int, int, int], int] = lambda rank, ranks, start_and_length, n: (
        start_and_length
    ),
) -> list[tuple[int, int]]:
    """Start and stop of each rank's slice; the keywords make mistakes."""
    each = length(elements, ranks, alignment)
    starts = [start(rank, ranks, each, elements) for rank in range(ranks)]
    return [(s, stop(rank, ranks, s + each, elements)) for rank, s in enumerate(starts)]


def _starts_and_lengths(elements: int, ranks: int, alignment: int) -> list[tuple[int, int]]:
    return [(start, stop - start) for start, stop in _boundaries(elements, ranks, alignment)]


def _unpadded_stop(rank: int, ranks: int, stop: int, elements: int) -> int:
    return elements if rank == ranks - 1 else stop


SHARD_BOUNDARIES = Exercise(
    solve=_boundaries,
    draw=_draw_buffer,
    mistakes={
        "there is no padding: the length is divided and rounded down, and elements are left over": (
            _like(_boundaries, "floor", length=lambda n, ranks, a: n // ranks)
        ),
        "there is no padding: the length is rounded down, and the last rank takes what is left; "
        "slices are to be equal": (
            _like(
                _boundaries,
                "rest_to_last",
                length=lambda n, ranks, a: n // ranks,
                stop=_unpadded_stop,
            )
        ),
        "the buffer is padded to a multiple of the ranks alone, not of ranks times alignment": (
            _like(_boundaries, "no_alignment", length=lambda n, ranks, a: -(-n // ranks))
        ),
        "the buffer is padded to a multiple of the alignment alone, which ranks cannot share": (
            _like(_boundaries, "no_ranks", length=lambda n, ranks, a: -(-n // a) * a // ranks)
        ),
        "the length is rounded down to a multiple of the alignment; round up": (
            _like(_boundaries, "rounds_down", length=lambda n, ranks, a: n // (ranks * a) * a)
        ),
        "the pairs are starts and lengths; they are to be starts and stops": _starts_and_lengths,
        "a buffer that needs no padding is padded once more; round up, and not always up": (
            _like(_boundaries, "always_pads", length=lambda n, ranks, a: (n // (ranks * a) + 1) * a)
        ),
        "the last rank overlaps the one before: its slice is moved back to end with the elements; "
        "the padding belongs to it": (
            _like(
                _boundaries,
                "last_overlaps",
                start=lambda rank, ranks, length, n: (
                    n - length if rank == ranks - 1 else rank * length
                ),
            )
        ),
        "slices end with the elements, so that the last ones are shorter; the padding belongs to "
        "them": (_like(_boundaries, "short_last", stop=lambda rank, ranks, stop, n: min(stop, n))),
        "stops are off by one: a slice ends before its stop, as in Python": (
            _like(_boundaries, "inclusive", stop=lambda rank, ranks, stop, n: stop - 1)
        ),
        "starts are off by one: rank 0 begins with element 0": (
            _like(
                _boundaries,
                "from_one",
                start=lambda rank, ranks, length, n: rank * length + 1,
                stop=lambda rank, ranks, stop, n: stop - 1,
            )
        ),
    },
)

METHODS = ("ddp", "zero1_parameters", "zero1_flat", "zero3")


def _draw_volume(generator: random.Random, size: int) -> tuple:
    num_bytes = generator.choice([1000, 10**6, 25 * 10**6, 10**9, 4 * 10**9])
    return generator.choice(METHODS), num_bytes, generator.choice([1, 2, 3, 4, 8, 64])


def _sent(
    method: str,
    num_bytes: int,
    ranks: int,
    *,
    factors: dict[str, float] | None = None,
    share: Callable[[int], float] = lambda n: (n - 1) / n,
) -> np.float64:
    """Bytes that a rank sends; the keywords make mistakes."""
    passes = {"ddp": 2, "zero1_parameters": 3, "zero1_flat": 2, "zero3": 3} | (factors or {})
    return np.float64(passes[method] * share(ranks) * num_bytes)


def _own_part_alone(method: str, num_bytes: int, ranks: int) -> np.float64:
    if method != "zero1_parameters":
        return _sent(method, num_bytes, ranks)
    return np.float64(_sent("ddp", num_bytes, ranks) + num_bytes / ranks)


def _right_volume(method: str, num_bytes: int, ranks: int) -> np.float64:
    return np.float64(sent_bytes(method, num_bytes, ranks))


SENT_BYTES = Exercise(
    solve=_right_volume,
    draw=_draw_volume,
    mistakes={
        "the factor (n - 1) / n is missing; what a rank keeps itself is not sent": (
            _like(_sent, "no_share", share=lambda n: 1)
        ),
        "the factor (n - 1) / n is missing, though a rank alone sends nothing": (
            _like(_sent, "no_share_but_alone", share=lambda n: n > 1)
        ),
        "the factor is n - 1; each message has one part of n": (
            _like(_sent, "whole_messages", share=lambda n: n - 1)
        ),
        "num_bytes is taken for gradients and weights together; each of them has as many": (
            _like(_sent, "half_of_the_bytes", share=lambda n: (n - 1) / n / 2)
        ),
        "(n - 1) // n is 0; divide with /": (
            _like(_sent, "divides_whole_numbers", share=lambda n: (n - 1) // n)
        ),
        "the factor is 1 / n; n - 1 parts of n are sent": (
            _like(_sent, "one_part", share=lambda n: 1 / n)
        ),
        "an all-reduce counts once; it is a reduce-scatter and an all-gather": (
            _like(_sent, "half_all_reduce", factors={"ddp": 1, "zero1_parameters": 2})
        ),
        "an all-reduce counts once for ddp; it is a reduce-scatter and an all-gather": (
            _like(_sent, "half_ddp", factors={"ddp": 1})
        ),
        "zero1_parameters lacks the broadcast after the update": (
            _like(_sent, "no_broadcast", factors={"zero1_parameters": 2})
        ),
        "zero1_parameters lacks the all-reduce of the gradients": (
            _like(_sent, "broadcast_alone", factors={"zero1_parameters": 1})
        ),
        "of the broadcasts only a rank's own part counts; on a ring it also passes on the parts of "
        "others": _own_part_alone,
        "zero1_flat lacks one of its halves, the reduce-scatter or the all-gather": (
            _like(_sent, "half_flat", factors={"zero1_flat": 1})
        ),
        "zero1_flat counts an all-reduce and an all-gather; a reduce-scatter is enough": (
            _like(_sent, "all_reduce_in_flat", factors={"zero1_flat": 3})
        ),
        "zero3 counts one pass; weights are gathered twice, and gradients reduce-scattered": (
            _like(_sent, "one_pass", factors={"zero3": 1})
        ),
        "zero3 gathers weights once; they are freed after forward, and backward needs them too": (
            _like(_sent, "gathers_once", factors={"zero3": 2})
        ),
        "zero3 averages gradients with an all-reduce; a reduce-scatter is enough": (
            _like(_sent, "all_reduce_in_zero3", factors={"zero3": 4})
        ),
    },
)


def check_balanced_owners(attempt: Callable) -> None:
    """Check `balanced_owners(sizes, ranks)`: -> the rank that owns each parameter."""
    check(BALANCED_OWNERS, weighed(attempt))


def check_shard_boundaries(attempt: Callable) -> None:
    """Check `shard_boundaries(num_elements, ranks, alignment)`: -> (start, stop) of each rank."""
    check(SHARD_BOUNDARIES, attempt)


def check_sent_bytes(attempt: Callable) -> None:
    """Check `sent_bytes(method, num_bytes, ranks)`: -> bytes that each rank sends in a step."""
    check(SENT_BYTES, attempt)
