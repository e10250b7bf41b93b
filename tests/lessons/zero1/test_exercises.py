"""The exercises of notebook 08 against the library; their mistakes: test_exercise.py."""

import itertools
import random

import numpy as np
import pytest
import torch

from lib.lessons.ddp.costs import sent_bytes
from lib.lessons.exercise import edited, verdict
from lib.lessons.ranks import run_on_threads
from lib.lessons.zero1 import attempts
from lib.lessons.zero1.exercises import (
    BALANCED_OWNERS,
    FAIR_OWNERS,
    RESHARD,
    SENT_BYTES,
    SHARD_BOUNDARIES,
    ZERO1_STEP,
    Close,
    check_fair_owners,
    check_shard_boundaries,
    loading,
    weighed,
    zero1_step,
)
from lib.sharded_optimizer.flat_slices import FlatBucket

pytestmark = pytest.mark.usefixtures("quick_ranks")


def boundaries(num_elements, ranks, alignment):
    total = num_elements
    while total % ranks or (total // ranks) % alignment:
        total += 1
    cuts = range(0, total + 1, total // ranks)
    return list(itertools.pairwise(cuts))


def test_padding_one_element_at_a_time_gives_the_same_boundaries():
    assert verdict(SHARD_BOUNDARIES, boundaries).startswith("right")


def test_sent_bytes_are_those_of_the_library():
    assert verdict(SENT_BYTES, sent_bytes).startswith("right")


@pytest.mark.parametrize("seed", range(10))
def test_the_best_partition_is_right_too(seed):
    sizes = random.Random(seed).choices(range(1, 21), k=6)
    every = itertools.product(range(3), repeat=len(sizes))
    best = min(every, key=lambda one: max(np.bincount(one, sizes, 3)))
    right = BALANCED_OWNERS.solve(sizes, 3)
    assert weighed(lambda sizes, ranks: best)(sizes, 3) == right
    assert right["largest load"] <= 4 / 3 * max(np.bincount(best, sizes, 3))


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


@pytest.mark.parametrize(("divide", "told"), [("//", "right"), ("/", "got 0.0; divide with //")])
def test_boundaries_are_whole_numbers(divide, told, capsys):
    old = "-(-num_elements // (ranks * alignment)) * alignment"
    new = f"-(-num_elements // (ranks * alignment)) * alignment * ranks {divide} ranks"
    check_shard_boundaries(edited(SHARD_BOUNDARIES.solve, old, new))
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(("given", "told"), [(None, "it returned None"), ([7], "yours 7")])
def test_something_that_is_no_list_of_pairs_is_told(given, told, capsys):
    check_shard_boundaries(lambda *arguments: given)
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("elements", [1, 4, 5, 97, 128])
def test_boundaries_are_those_of_the_library(elements):
    # one rank, as there is no group
    bucket = FlatBucket([torch.nn.Parameter(torch.zeros(elements))], None)
    # float32 at multiples of 16 bytes
    assert SHARD_BOUNDARIES.solve(elements, 1, 4) == [(0, bucket.slice_length)]


@pytest.mark.parametrize(("elements", "saved_by", "ranks"), [(7, 2, 3), (12, 3, 2), (5, 1, 4)])
def test_slices_for_other_ranks_are_those_of_the_whole(elements, saved_by, ranks):
    found = RESHARD.solve(elements, saved_by, ranks)
    length = -(-elements // ranks)
    whole = [*range(1, elements + 1)] + [0] * (ranks * length - elements)
    for rank in range(ranks):
        own = whole[rank * length : (rank + 1) * length]
        assert found[f"slice of rank {rank}"] == own
        # nothing twice, and no padding
        assert found[f"elements that rank {rank} reads"] == sum(value > 0 for value in own)


def test_reading_beyond_a_file_is_named():
    text = verdict(RESHARD, loading(lambda read, *_: read(0, 0, 10**6)))
    assert "elements, from 0 on" in text
    assert "got read(0, 0, 1000000)" in text


@pytest.mark.parametrize("count", [2, 3])
def test_the_step_trains_as_pytorchs_adam_does_in_one_process(count):
    x, target = attempts.batch(count)

    def job(ranks):
        params, state = attempts.first_weights(), {}
        for _ in range(4):
            own = (part.chunk(count)[ranks.number] for part in (x, target))
            grads = torch.autograd.grad(attempts.loss(params, *own), params)
            with torch.no_grad():
                zero1_step.__wrapped__(params, list(grads), state, ranks)
        return torch.cat([param.detach().flatten() for param in params]), state

    found = run_on_threads(job, count)
    expected = attempts.train_alone(count, 4)
    for weights, state in found:
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
        assert state["m"].numel() == -(-expected.numel() // count)
    start = torch.cat([param.detach().flatten() for param in attempts.first_weights()])
    assert (expected - start).abs().max() > 1e-2


def test_a_larger_epsilon_is_no_rounding():
    text = verdict(ZERO1_STEP, edited(zero1_step, "1e-8", "1e-6"), seed=0)
    assert text.startswith("not yet")


def test_a_step_with_another_order_of_roundings_is_right():
    old = "mine - lr * m_hat / (v_hat.sqrt() + eps)"
    new = "mine - lr / (1 - beta1**step) * m / (v.sqrt() / (1 - beta2**step) ** 0.5 + eps)"
    assert verdict(ZERO1_STEP, edited(zero1_step, old, new)).startswith("right")


def test_numbers_are_close_up_to_rounding():
    assert Close(1.0) == 1.00001
    assert Close(1.0) != 1.001
    assert Close(float("nan")) == Close(float("nan"))
    assert Close(1.0) != "1"


def test_fair_owners_must_be_better_than_largest_first(capsys):
    check_fair_owners(BALANCED_OWNERS.solve.__wrapped__)
    text = capsys.readouterr().out
    assert text.startswith("not yet: as good as largest first on 40")
    # as the notebook says
    assert "must be below largest first, 3.33 %" in text
    assert FAIR_OWNERS.measure(FAIR_OWNERS.solve) < 0.75 * 3.33
