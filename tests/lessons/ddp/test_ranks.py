"""Two ranks run the functions of notebook 07, against one process."""

import pytest
import torch

from lib.ddp.launcher import launch
from lib.lessons.ddp import ranks
from lib.lessons.ddp.ranks import Setup
from lib.model.config import ModelConfig

RANKS, STEPS = 2, 3
WRAPPERS = ["naive", "flat", "overlap", "flashddp", "torch_ddp"]
SHAPE = ModelConfig(vocab_size=32, context_length=8, d_model=16, num_layers=2, num_heads=2, d_ff=32)
# long backward passes, so that all-reduces begin in them on a busy machine too
SETUPS = [Setup("none", 2), Setup("naive", 2), Setup("overlap", 99), Setup("flashddp", 99, 0.01)]

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def results():
    """For each job the results of all ranks."""
    jobs = [
        (ranks.introduce, ()),
        (ranks.average_gradients, (SHAPE, 3)),
        (ranks.train_on_ranks, (SHAPE, 3, STEPS, WRAPPERS)),
        (ranks.time_setups, (SHAPE, SETUPS, 3, 1)),
    ]
    return list(zip(*launch(ranks.in_turn, RANKS, jobs, backend="gloo")))


def test_ranks_are_processes_that_broadcast_and_all_reduce(results):
    first, second = results[0]
    assert [first.rank, second.rank] == [0, 1]
    assert first.process_id != second.process_id
    for one in (first, second):
        assert one.world_size == 2
        assert torch.equal(one.after_broadcast, first.own)
        assert torch.equal(one.after_all_reduce, first.own + second.own)
    assert not torch.equal(first.own, second.own)


def test_the_mean_gradient_is_that_of_all_sequences(results):
    (own, mean), (other, same) = results[1]
    assert torch.equal(mean, same)
    torch.testing.assert_close(mean, ranks.gradient(SHAPE, 3, range(RANKS)), rtol=1e-5, atol=1e-7)
    assert (own - other).abs().max() > 1e-3


def test_each_wrapper_trains_as_one_process_does(results):
    expected = ranks.train_alone(SHAPE, 3, STEPS, RANKS)
    assert (expected - ranks.train_alone(SHAPE, 3, 0, RANKS)).abs().max() > 1e-3
    for name in WRAPPERS:
        first, second = (found[name] for found in results[2])
        assert torch.equal(first, second), name
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)


def test_times_are_the_same_on_all_ranks_and_timelines_of_the_first(results):
    first, second = results[3]
    assert [one.setup for one in first] == SETUPS
    for ours, theirs in zip(first, second):
        assert ours.times_ms == theirs.times_ms
        assert len(ours.times_ms) == 3
        assert 0 < ours.backward_ms < ours.median_ms
        assert (len(ours.timelines), len(theirs.timelines)) == (2, 0)


def test_buckets_and_bytes_are_counted(results):
    none, naive, overlap, bucketed = results[3][0]
    parameters = list(ranks.make_model(SHAPE).parameters())
    assert none.gradient_bytes == 4 * sum(param.numel() for param in parameters)
    assert none.num_buckets is naive.num_buckets is None
    assert overlap.num_buckets == len(parameters)
    assert 1 < bucketed.num_buckets < len(parameters)


def test_traces_show_all_phases_and_whose_communication_is_hidden(results):
    none, naive, overlap, bucketed = (one.timeline for one in results[3][0])
    assert none.communication_ms == 0
    assert naive.exposed_ms > 0
    # nothing is sent before backward ends
    assert naive.communication[0][0] >= naive.backward[1]
    for line in (overlap, bucketed):
        assert line.communication[0][0] < line.backward[1]
        assert line.exposed_ms < line.communication_ms
    assert all(dict(bucketed.compute).values())
