"""Steps of a stack with an optimizer on simulated networks, for notebook 09."""

from functools import partial

import pytest

from lib.ddp.launcher import launch
from lib.lessons.ddp.stack import Layers
from lib.lessons.simulated_network import Network
from lib.lessons.zero1 import stack
from lib.optimizer.adamw import AdamW
from lib.profiling.collectives import Link, predicted_ms
from lib.sharded_optimizer.optimizer import ShardedOptimizer

pytestmark = pytest.mark.usefixtures("quick_ranks")

LAYERS = Layers(sizes=(1000,) * 4, forward=1.0, backward=2.0)
ALONE_MS = 4 * 3.0
FAST = Network(Link(0.0, 4e-3), clock="virtual")
# a layer's all-reduce takes three times as long as its backward
SLOW = Network(Link(0.0, 4e-3 / 6), clock="virtual")
AFTER_BACKWARD = partial(
    ShardedOptimizer, optimizer_cls=AdamW, strategy="flat", reduces_gradients=True
)
MAKERS = {
    "optimizer": stack.of_optimizer(AFTER_BACKWARD),
    "flashddp": stack.flashddp,
    "zero1": stack.zero1,
}


@pytest.fixture(scope="module")
def steps():
    found = launch(stack.time_ways, 2, MAKERS, {"fast": FAST, "slow": SLOW}, LAYERS, backend="gloo")
    assert {key: one.timeline.step_ms for key, one in found[0].items()} == {
        key: one.timeline.step_ms for key, one in found[1].items()
    }
    return found[0]


@pytest.mark.parametrize("name", MAKERS)
def test_each_way_sends_the_bytes_of_one_all_reduce(steps, name):
    # and a few bytes that tell which gradients there are
    assert steps["fast", name].sent_bytes == pytest.approx(LAYERS.gradient_bytes, rel=1e-2)


@pytest.mark.parametrize(("place", "network"), [("fast", FAST), ("slow", SLOW)])
def test_a_step_takes_what_a_schedule_by_hand_takes(steps, place, network):
    half = predicted_ms("all_gather", 4000, 2, 0.0, network.inside.bandwidth_gbs)
    network_ms = now = 0.0
    for _ in range(4):
        now += 2.0
        network_ms = max(network_ms, now) + half
    now = network_ms
    for _ in range(4):
        network_ms += half
        now = max(now, network_ms) + 1.0
    expected = {
        "optimizer": ALONE_MS + 8 * half,
        "zero1": now,
    }
    measured = {name: steps[place, name].timeline.step_ms for name in expected}
    assert measured == pytest.approx(expected, rel=0.01)


def test_messages_under_forward_pay_where_the_network_is_slow(steps):
    ddp, zero1 = (steps["slow", name].timeline.step_ms for name in ("flashddp", "zero1"))
    assert zero1 < 0.95 * ddp


def test_a_timeline_has_the_computing_of_one_step(steps):
    for one in steps.values():
        for phase, milliseconds in (("forward", 4.0), ("backward", 8.0)):
            spans = dict(one.timeline.compute)[phase]
            assert sum(end - start for start, end in spans) == pytest.approx(milliseconds)
