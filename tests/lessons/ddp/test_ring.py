"""The ring's all-reduce: sums, what is sent when, and how little."""

import itertools

import numpy as np
import pytest

from lib.lessons.ddp.ring import ring_all_reduce
from lib.profiling.collectives import bus_factor, messages


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_every_rank_ends_with_the_sum(ranks):
    values = np.random.default_rng(0).integers(0, 100, (ranks, ranks))
    steps = ring_all_reduce(values)
    assert (steps[-1].values == values.sum(axis=0)).all()
    assert (steps[-1].added == ranks).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_a_step_each_rank_changes_what_the_one_before_sent(ranks):
    steps = ring_all_reduce(np.eye(ranks))
    for before, after in itertools.pairwise(steps):
        for rank, chunk in enumerate(after.sent):
            receiver = (rank + 1) % ranks
            moved = before.values[rank, chunk]
            kept = before.values[receiver, chunk] if after.phase == "reduce-scatter" else 0
            assert after.values[receiver, chunk] == moved + kept
            others = np.delete(after.values[receiver], chunk)
            assert (others == np.delete(before.values[receiver], chunk)).all()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_steps_and_bytes_are_those_of_the_cost_formula(ranks):
    steps = ring_all_reduce(np.zeros((ranks, ranks)))[1:]
    assert len(steps) == messages("all_reduce", ranks)
    sent = sum(len(step.sent) for step in steps) / ranks / ranks
    assert sent == pytest.approx(bus_factor("all_reduce", ranks))


def test_other_numbers_of_chunks_are_refused():
    with pytest.raises(ValueError, match=r"as many chunks as ranks, got shape \(2, 3\)"):
        ring_all_reduce(np.zeros((2, 3)))
