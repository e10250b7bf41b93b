"""Exercises of notebook 08: a balanced partition, the boundaries of shards, what ranks send."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

from lib.lessons.exercise import Exercise, check
from lib.sharded_optimizer import whole_parameters


def _draw_parameters(generator: random.Random, size: int) -> tuple:
    ranks = generator.randint(2, 4)
    # vectors and matrices, in no order
    sizes = [generator.choice([1, 2, 3, generator.randint(4, 40)]) for _ in range(ranks + size)]
    return sizes, ranks


def weighed(assign: Callable) -> Callable[[Sequence[int], int], dict[str, int]]:
    """A function that weighs the owners given by `assign(sizes, ranks)`.

    It counts the owners and those that are ranks, and takes the largest load, but at least that of
    largest first: any partition that is as balanced is as good.
    """

    def largest_load(owners: Sequence[int], sizes: Sequence[int], ranks: int) -> int:
        owned = list(zip(owners, sizes))
        return max(sum(size for owner, size in owned if owner == rank) for rank in range(ranks))

    @functools.wraps(assign)
    def weighing(sizes: Sequence[int], ranks: int) -> dict[str, int]:
        owners = assign(sizes, ranks)
        if strange := [owner for owner in owners if hasattr(owner, "__len__")]:
            raise TypeError(f"an owner must be the number of a rank, got {strange[0]!r}")
        owners = [int(owner) for owner in owners]
        largest_first = whole_parameters.balanced_owners(sizes, [0] * ranks)
        return {
            "parameters with an owner": sum(o in range(ranks) for o in owners[: len(sizes)]),
            "owners": len(owners),
            "largest load": max(
                largest_load(owners, sizes, ranks), largest_load(largest_first, sizes, ranks)
            ),
        }

    return weighing


@weighed
def balanced_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    owners, loads = [0] * len(sizes), [0] * ranks
    largest_first = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    for index in largest_first:
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


BALANCED_OWNERS = Exercise(
    balanced_owners,
    _draw_parameters,
    {
        "parameters go to the ranks round robin, whatever their sizes": (
            "return owners",
            "return [index % ranks for index in range(len(sizes))]",
        ),
        "parameters are sorted by size, but dealt round robin, or from the small end; take the "
        "largest first, for the rank with the least so far": (
            "loads.index(min(loads))",
            "largest_first.index(index) % ranks",
        ),
        "each rank gets equally many consecutive parameters; count elements, not parameters": (
            "return owners",
            "return [index // -(-len(sizes) // ranks) for index in range(len(sizes))]",
        ),
        "the owners are in the order in which they were assigned; return them in the order of "
        "`sizes`": ("return owners", "return [owners[index] for index in largest_first]"),
        "the list is not sorted first; a large parameter that comes late finds no room on any "
        "rank": ("in largest_first", "in range(len(sizes))"),
        "all go to one rank: the loads are never updated, or each goes to the rank with the most "
        "so far": ("min(loads)", "max(loads)"),
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


def shard_boundaries(num_elements: int, ranks: int, alignment: int) -> list[tuple[int, int]]:
    length = -(-num_elements // (ranks * alignment)) * alignment
    starts = [rank * length for rank in range(ranks)]
    return [(start, start + length) for start in starts]


def _rest_to_last(num_elements: int, ranks: int, alignment: int) -> list[tuple[int, int]]:
    starts = [rank * (num_elements // ranks) for rank in range(ranks)]
    return list(pairwise([*starts, num_elements]))


SHARD_BOUNDARIES = Exercise(
    shard_boundaries,
    _draw_buffer,
    {
        "there is no padding: the length is divided and rounded down, and elements are left over": (
            "-(-num_elements // (ranks * alignment)) * alignment",
            "num_elements // ranks",
        ),
        "there is no padding: the length is rounded down, and the last rank takes the rest; "
        "slices must be equal": _rest_to_last,
        "the buffer is padded to a multiple of the ranks alone, not to a multiple of ranks times "
        "alignment": ("(ranks * alignment)) * alignment", "ranks)"),
        "the buffer is padded to a multiple of the alignment alone, which need not divide by the "
        "ranks": ("(ranks * alignment)) * alignment", "alignment) * alignment // ranks"),
        "the length is rounded down to a multiple of the alignment; it must be rounded up to hold "
        "all elements": (
            "-(-num_elements // (ranks * alignment))",
            "num_elements // (ranks * alignment)",
        ),
        "the pairs are starts and lengths, not starts and stops": ("start + length", "length"),
        "a buffer that needs no padding is padded too; round up only where there is a remainder": (
            "-(-num_elements // (ranks * alignment))",
            "(num_elements // (ranks * alignment) + 1)",
        ),
        "the last rank overlaps the one before: its slice is moved back to end with the elements "
        "instead of the padding": (
            "    return",
            "    starts[-1] = num_elements - length\n    return",
        ),
        "slices end with the elements, so the last ones are shorter; all must have equal length, "
        "with padding": ("start + length", "min(start + length, num_elements)"),
        "stops are off by one: a slice ends before its stop": ("+ length", "+ length - 1"),
        "starts are off by one: rank 0 begins with element 0": ("(start,", "(start + 1,"),
    },
)
METHODS = ("ddp", "zero1_parameters", "zero1_flat", "zero3")


def _draw_volume(generator: random.Random, size: int) -> tuple:
    num_bytes = generator.choice([1000, 10**6, 25 * 10**6, 10**9, 4 * 10**9])
    return generator.choice(METHODS), num_bytes, generator.choice([1, 2, 3, 4, 8, 64])


def sent_bytes(method: str, num_bytes: int, ranks: int) -> float:
    passes = {"ddp": 2, "zero1_parameters": 3, "zero1_flat": 2, "zero3": 3}
    share = (ranks - 1) / ranks
    return passes[method] * share * num_bytes


SENT_BYTES = Exercise(
    sent_bytes,
    _draw_volume,
    {
        "(n - 1) / n is missing; each rank keeps one part": ("(ranks - 1) / ranks", "1"),
        "(n - 1) / n is missing, except for n = 1": ("(ranks - 1) / ranks", "ranks > 1"),
        "the factor is n - 1; each message is one part of n": (" / ranks", ""),
        "num_bytes counts for gradients and weights together; each of them has num_bytes by "
        "itself": ("* num_bytes", "* num_bytes / 2"),
        "(n - 1) // n is 0; divide with /": (" / ", " // "),
        "the factor is 1 / n; n - 1 parts of n are sent": ("(ranks - 1)", "1"),
        "an all-reduce counts once, in ddp and in zero1_parameters; it is a reduce-scatter and an "
        "all-gather": ('"ddp": 2, "zero1_parameters": 3', '"ddp": 1, "zero1_parameters": 2'),
        "ddp's all-reduce counts once; it makes two passes": ('"ddp": 2', '"ddp": 1'),
        "zero1_parameters lacks the broadcast after the update": ('meters": 3', 'meters": 2'),
        "zero1_parameters lacks the all-reduce of the gradients": ('meters": 3', 'meters": 1'),
        "only a rank's own part of the broadcasts counts; on a ring it also forwards the parts of "
        "others": (
            "    return",
            '    if method == "zero1_parameters":\n'
            "        return (2 * share + 1 / ranks) * num_bytes\n"
            "    return",
        ),
        "zero1_flat lacks its reduce-scatter or its all-gather": ('flat": 2', 'flat": 1'),
        "zero1_flat counts an all-reduce and an all-gather; a reduce-scatter is enough for the "
        "gradients": ('"zero1_flat": 2', '"zero1_flat": 3'),
        "zero3 counts one pass instead of two gathers and a reduce-scatter": (
            'zero3": 3',
            'zero3": 1',
        ),
        "zero3 gathers weights once; backward needs them again": ('"zero3": 3', '"zero3": 2'),
        "zero3 all-reduces gradients; reduce-scatter is enough": ('"zero3": 3', '"zero3": 4'),
    },
)


def check_balanced_owners(attempt: Callable) -> None:
    """Check `balanced_owners(sizes, ranks)` -> the rank that owns each parameter."""
    check(BALANCED_OWNERS, weighed(attempt))


def check_shard_boundaries(attempt: Callable) -> None:
    """Check `shard_boundaries(num_elements, ranks, alignment)` -> (start, stop) of each rank."""
    check(SHARD_BOUNDARIES, attempt)


def check_sent_bytes(attempt: Callable) -> None:
    """Check `sent_bytes(method, num_bytes, ranks)` -> bytes that each rank sends in a step."""
    check(SENT_BYTES, attempt)
