"""What the ranks of notebook 06 do, run by two of them, against one process."""

import pytest
import torch

from lib import demo_ddp
from lib.config_training import ModelConfig
from lib.demo_ddp import Setup
from lib.distributed import launch

RANKS, STEPS = 2, 3
WRAPPERS = ["naive", "flat", "overlap", "flashddp", "torch_ddp"]
SHAPE = ModelConfig(vocab_size=32, context_length=8, d_model=16, num_layers=2, num_heads=2, d_ff=32)
# so long a backward pass that all-reduces begin in it on a busy machine too
SETUPS = [Setup("none", 2), Setup("naive", 2), Setup("overlap", 99), Setup("flashddp", 99, 0.01)]

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture(scope="module")
def results():
    """For each job the results of all ranks."""
    jobs = [
        (demo_ddp.introduce, ()),
        (demo_ddp.average_gradients, (SHAPE, 3)),
        (demo_ddp.train_on_ranks, (SHAPE, 3, STEPS, WRAPPERS)),
        (demo_ddp.time_setups, (SHAPE, SETUPS, 3, 1)),
    ]
    return list(zip(*launch(demo_ddp.in_turn, RANKS, jobs, backend="gloo")))


def test_ranks_are_processes_of_their_own(results):
    introductions = results[0]
    assert [one.rank for one in introductions] == [0, 1]
    assert {one.world_size for one in introductions} == {2}
    assert len({one.process_id for one in introductions}) == 2


def test_broadcast_gives_the_first_and_all_reduce_the_sum(results):
    first, second = results[0]
    for one in (first, second):
        assert torch.equal(one.after_broadcast, first.own)
        assert torch.equal(one.after_all_reduce, first.own + second.own)
    assert not torch.equal(first.own, second.own)


def test_the_mean_gradient_is_that_of_all_windows(results):
    expected = demo_ddp.gradient(SHAPE, 3, range(RANKS))
    (own, mean), (other, same) = results[1]
    assert torch.equal(mean, same)
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-7)
    assert (own - other).abs().max() > 1e-3


@pytest.mark.parametrize("name", WRAPPERS)
def test_each_wrapper_trains_as_one_process_does(results, name):
    first, second = (found[name] for found in results[2])
    assert torch.equal(first, second)
    expected = demo_ddp.train_alone(SHAPE, 3, STEPS, RANKS)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
    start = torch.cat([p.detach().flatten() for p in demo_ddp.make_model(SHAPE).parameters()])
    assert (first - start).abs().max() > 1e-3


def test_times_are_the_same_on_all_ranks_and_timelines_of_the_first(results):
    first, second = results[3]
    assert [one.setup for one in first] == SETUPS
    for ours, theirs in zip(first, second):
        assert ours.times_ms == theirs.times_ms
        assert len(ours.times_ms) == 3
        assert (len(ours.timelines), len(theirs.timelines)) == (2, 0)


def test_buckets_and_bytes_are_counted(results):
    none, naive, overlap, bucketed = results[3][0]
    parameters = list(demo_ddp.make_model(SHAPE).parameters())
    assert none.gradient_bytes == 4 * sum(param.numel() for param in parameters)
    assert none.num_buckets is naive.num_buckets is None
    assert overlap.num_buckets == len(parameters)
    assert 1 < bucketed.num_buckets < len(parameters)


def test_traces_tell_whose_communication_is_hidden(results):
    none, naive, overlap, bucketed = (one.timeline for one in results[3][0])
    assert none.communication_ms == 0
    assert naive.exposed_ms > 0
    # nothing is sent before backward ends
    assert naive.communication[0][0] >= naive.backward[1]
    for line in (overlap, bucketed):
        assert line.communication[0][0] < line.backward[1]
        assert line.exposed_ms < line.communication_ms


def test_every_phase_of_a_step_is_seen(results):
    compute = dict(results[3][0][3].timeline.compute)
    assert all(compute[phase] for phase in ("forward", "backward", "update"))
    assert compute["copies of the wrapper"]


def test_backward_is_a_part_of_the_step(results):
    for one in results[3][0]:
        assert 0 < one.backward_ms < one.median_ms
