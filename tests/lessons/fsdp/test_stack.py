"""FSDP of timed blocks takes as long as predicted, and is what notebook 10 says it is."""

from functools import partial

import pytest

from lib.ddp.launcher import launch
from lib.fsdp import FSDP
from lib.lessons.ddp.stack import Layers, miniatures, step_rows, time_steps
from lib.lessons.fsdp.exercises import just_in_time, prefetching
from lib.lessons.fsdp.orders import Costs, play
from lib.lessons.fsdp.stack import count_gathers
from lib.lessons.simulated_network import Network
from lib.profiling.collectives import Link

pytestmark = pytest.mark.usefixtures("quick_ranks")

LAYERS = Layers((3000,) * 4, forward=1.0, backward=2.0)
MAKERS = {"prefetched": FSDP, "just in time": partial(FSDP, prefetch=False)}


def test_steps_of_timed_blocks_take_as_long_as_predicted_on_every_network():
    networks = miniatures(LAYERS)
    found = launch(time_steps, 2, MAKERS, networks, LAYERS, backend="gloo")
    assert found[0] == found[1]
    for (place, name), step in found[0].items():
        gather, reduce = (
            networks[place].collective_ms(kind, 12_000, 2)
            for kind in ("all_gather", "reduce_scatter")
        )
        costs = Costs.equal(4, forward=1.0, backward=2.0, gather=gather, reduce=reduce)
        events = prefetching(4) if name == "prefetched" else just_in_time(4)
        # and a few bytes that tell which gradients there are
        assert step.step_ms == pytest.approx(play(events, costs).ms, rel=0.005), (place, name)
        assert step.exposed_ms == pytest.approx(step.step_ms - 4 * 3.0)


def test_a_checkpoint_of_one_block_adds_no_all_gather():
    network = Network(Link(0.0, 1.0), clock="virtual")
    for found in launch(count_gathers, 2, 5, backend="simulated", options=network):
        # the last is gathered once, all others twice
        assert found == (9, 9)


def test_a_row_has_the_steps_of_one_way():
    took = {("here", "a"): 1.0, ("there", "a"): 2.0, ("here", "b"): 3.0}
    rows = step_rows(took, {way: 10 * step for way, step in took.items()})
    assert [list(row.values()) for row in rows] == [["a", "1 (10)", "2 (20)"], ["b", "3 (30)"]]
