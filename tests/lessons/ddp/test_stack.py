"""Steps of the stack take their time on the network's clock, and idle time is exposed."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lib.ddp.launcher import launch
from lib.ddp.wrappers import wrap
from lib.lessons.ddp.stack import Layers, time_accumulation, time_steps, timeline
from lib.lessons.simulated_network import Network, Straggler, Transfer
from lib.profiling.collectives import Link

pytestmark = pytest.mark.usefixtures("quick_ranks")
LAYERS = Layers((1000,) * 4, forward=1.0, backward=2.0)
# an all-reduce of 1,000 elements on two ranks takes 3 ms
NETWORK = Network(Link(500.0, 0.002), clock="virtual")
FLAT = partial(wrap, "flat")


@pytest.fixture(scope="module")
def found():
    networks = {"well": NETWORK, "late": replace(NETWORK, straggler=Straggler(1, 4.0))}
    makers = {"alone": None, "flat": FLAT, "overlap": partial(wrap, "overlap")}
    return launch(time_steps, 2, makers, networks, LAYERS, backend="gloo")


def test_alone_nothing_is_sent_and_a_step_takes_its_computing(found):
    for rank in found:
        step = rank["well", "alone"]
        assert step.step_ms == pytest.approx(12.0)
        assert (step.communication, step.exposed) == ((), ())


def test_what_a_step_is_longer_by_is_exposed_also_when_a_rank_is_late(found):
    for rank in found:
        for step in rank.values():
            assert step.step_ms - 12.0 == pytest.approx(step.exposed_ms)
        assert rank["late", "flat"].step_ms > rank["well", "flat"].step_ms + 3.9


def test_the_wait_for_others_is_communication_and_computing_beside_it_hides_it():
    spans = [("forward", 1.0, 1.002), ("backward", 1.002, 1.006)]
    transfers = [Transfer("all_reduce", 8, 1.004, 1.007, 1.009)]
    line = timeline(spans, transfers, 1.0, 1.009)
    assert line.communication == (pytest.approx((4.0, 9.0)),)
    assert line.exposed == (pytest.approx((6.0, 9.0)),)
    assert dict(line.compute)["backward"] == (pytest.approx((2.0, 6.0)),)
    assert line.step_ms == pytest.approx(9.0)


def test_with_no_sync_a_step_of_several_passes_sends_once():
    make = partial(wrap, "flashddp")
    for found in launch(time_accumulation, 2, make, {"": NETWORK}, LAYERS, 3, backend="gloo"):
        (each, gradients), (once, same) = found["", False], found["", True]
        assert torch.equal(gradients, same)
        assert torch.equal(gradients, torch.full_like(gradients, 3.0))
        assert once < each - 8.0


def test_by_the_wall_clock_matrices_are_multiplied_and_messages_waited_for():
    wall = {"": replace(NETWORK, clock="wall")}
    makers = {"alone": None, "flat": FLAT}
    for rank in launch(time_steps, 2, makers, wall, LAYERS, 2, backend="gloo"):
        # 1 ms and 4 × 2 ms
        assert rank["", "flat"].step_ms > 9.0
        assert rank["", "flat"].exposed_ms > 8.5
        assert rank["", "alone"].exposed_ms == 0


class Uneven:
    """Makes a rank's steps longer by so many ms, the first one warming up."""

    LONGER = ((0, 1, 50, 20), (0, 50, 1, 20))

    def __init__(self, stack, group):
        self.stack, self.group = stack, group
        self.longer = iter(self.LONGER[group.rank()])

    def __call__(self, x):
        self.group.compute(next(self.longer) / 1e3)
        return self.stack(x)

    def finish_gradient_synchronization(self):
        pass


def test_the_fastest_step_is_the_same_one_on_all_ranks():
    for rank in launch(time_steps, 2, {"": Uneven}, {"": NETWORK}, LAYERS, 3, backend="gloo"):
        assert rank["", ""].step_ms == pytest.approx(12.0 + 20)
