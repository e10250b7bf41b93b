"""The exercises of notebook 07 against independent answers; their mistakes: test_exercises.py."""

import heapq
import itertools
import random

import numpy as np
import pytest
import torch

from lib.exercises import verdict
from lib.exercises_sharding import (
    BALANCED_OWNERS,
    METHODS,
    SENT_BYTES,
    SHARD_BOUNDARIES,
    weighed,
)
from lib.ring import ring_all_reduce
from lib.sharded_optimizer_bucket import FlatBucket
from lib.sharding_costs import COLLECTIVES_OF, sent_bytes

CHECKED = {"owners": BALANCED_OWNERS, "boundaries": SHARD_BOUNDARIES, "sent": SENT_BYTES}


def owners(sizes, ranks):
    heap, found = [(0, rank) for rank in range(ranks)], {}
    for size, index in sorted(zip(sizes, itertools.count()), reverse=True):
        load, found[index] = heapq.heappop(heap)
        heapq.heappush(heap, (load + size, found[index]))
    return [found[index] for index in range(len(sizes))]


def boundaries(num_elements, ranks, alignment):
    """By filling up, element by element, until it can be cut."""
    total = num_elements
    while total % ranks or (total // ranks) % alignment:
        total += 1
    cuts = range(0, total + 1, total // ranks)
    return list(itertools.pairwise(cuts))


def sent(method, num_bytes, ranks):
    """Message by message: what rank 0 sends in a ring that is played through."""
    half = (len(ring_all_reduce([[0] * ranks] * ranks)) - 1) / 2 * num_bytes / ranks
    # of its own and others' parameters: each goes through all links but one
    broadcast = sum(num_bytes / ranks for owner in range(ranks) if (owner - 1) % ranks != 0)
    return {
        "ddp": 2 * half,
        "zero1_parameters": 2 * half + (broadcast if ranks > 1 else 0),
        "zero1_flat": 2 * half,
        "zero3": 3 * half,
    }[method]


ANSWERS = [(BALANCED_OWNERS, weighed(owners)), (SHARD_BOUNDARIES, boundaries), (SENT_BYTES, sent)]


@pytest.mark.parametrize(("exercise", "independent"), ANSWERS, ids=CHECKED)
@pytest.mark.parametrize("seed", range(3))
def test_an_independent_answer_is_right(exercise, independent, seed):
    assert verdict(exercise, independent, seed=seed).startswith("right")


def best_owners(sizes, ranks):
    """Of all partitions one whose largest load is smallest."""
    every = itertools.product(range(ranks), repeat=len(sizes))
    return min(every, key=lambda one: max(np.bincount(one, sizes, ranks)))


@pytest.mark.parametrize("seed", range(3))
def test_the_best_partition_is_right_too(seed):
    generator = random.Random(seed)
    for _ in range(10):
        sizes = [generator.randint(1, 20) for _ in range(6)]
        right = BALANCED_OWNERS.solve(sizes, 3)
        assert weighed(best_owners)(sizes, 3) == right
        assert right["largest load"] <= 4 / 3 * max(np.bincount(best_owners(sizes, 3), sizes, 3))


@pytest.mark.parametrize(
    ("given", "key", "found"),
    [
        ([0, 1, 2], "parameters with an owner", 2),
        ([0, 1], "parameters with an owner", 2),
        ([0, 1, 1, 0], "owners", 4),
        ([0, 0, 1], "largest load", 9),
    ],
)
def test_an_impossible_partition_is_told_from_a_bad_one(given, key, found):
    weighing = weighed(lambda sizes, ranks: given)
    assert weighing([5, 4, 3], 2)[key] == found
    assert BALANCED_OWNERS.solve([5, 4, 3], 2)[key] != found


def test_smallest_first_is_told_to_turn_round():
    def smallest_first(sizes, ranks):
        found, loads = [0] * len(sizes), [0] * ranks
        for index in sorted(range(len(sizes)), key=sizes.__getitem__):
            found[index] = loads.index(min(loads))
            loads[found[index]] += sizes[index]
        return found

    text = verdict(BALANCED_OWNERS, weighed(smallest_first), seed=0)
    assert "or from the small end; take the largest first" in text


@pytest.mark.parametrize("elements", [1, 4, 5, 97, 128])
def test_boundaries_are_those_of_the_library(elements):
    # of one rank, as there is no group
    bucket = FlatBucket([torch.nn.Parameter(torch.zeros(elements))], None)
    # float32 at multiples of 16 bytes
    assert SHARD_BOUNDARIES.solve(elements, 1, 4) == [(0, bucket.slice_length)]


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_alone_sends_nothing_and_many_send_whole_passes(method):
    assert sent_bytes(method, 1000, 1) == 0
    passes = {"ddp": 2, "zero1_parameters": 3, "zero1_flat": 2, "zero3": 3}[method]
    assert sent_bytes(method, 1000, 10**6) == pytest.approx(passes * 1000, rel=1e-5)


def test_flat_slices_send_as_much_as_one_all_reduce():
    for ranks in (1, 2, 3, 8, 64):
        assert sent_bytes("zero1_flat", 10**9, ranks) == sent_bytes("ddp", 10**9, ranks)
        assert sent_bytes("zero2", 10**9, ranks) == sent_bytes("ddp", 10**9, ranks)


def test_an_unknown_method_is_refused_by_name():
    with pytest.raises(ValueError, match=r"method is 'zero4'.*zero1_flat"):
        sent_bytes("zero4", 1, 2)
    assert set(METHODS) <= set(COLLECTIVES_OF)
