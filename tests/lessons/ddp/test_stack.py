"""Steps of the stack take their time on the network's clock, and idle time is exposed."""

from dataclasses import replace
from functools import partial

import pytest

from lib.ddp.launcher import launch
from lib.ddp.wrappers import wrap
from lib.lessons.ddp.costs import predict_scaling
from lib.lessons.ddp.exercises import a_quarter_each, plan, step_ms
from lib.lessons.ddp.stack import Layers, bucketed, miniatures, time_steps, timeline
from lib.lessons.simulated_network import Network, Straggler, Transfer
from lib.profiling.collectives import Link

pytestmark = pytest.mark.usefixtures("quick_ranks")
LAYERS = Layers((1000,) * 4, forward=1.0, backward=2.0)
# an all-reduce of 1,000 elements on two ranks takes 3 ms
NETWORK = Network(Link(500.0, 0.002), clock="virtual")
PLANS = {"one": [[3, 2, 1, 0]], "two": [[3, 2], [1, 0]], "four": [[3], [2], [1], [0]]}


@pytest.fixture(scope="module")
def found():
    networks = {"well": NETWORK, "late": replace(NETWORK, straggler=Straggler(1, 4.0))}
    makers = {name: bucketed(plan) for name, plan in PLANS.items()}
    makers |= {"alone": None, "flat": partial(wrap, "flat")}
    return launch(time_steps, 2, makers, networks, LAYERS, backend="gloo")


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_takes_as_long_as_predicted(found, name):
    expected = predict_scaling(
        LAYERS.gradient_bytes,
        2,
        latency_us=500.0,
        bandwidth_gbs=0.002,
        backward_ms=8.0,
        other_ms=4.0,
        buckets=len(PLANS[name]),
    )
    for rank in found:
        step = rank["well", name]
        assert step.step_ms == pytest.approx(expected.step_ms)
        assert step.exposed_ms == pytest.approx(expected.exposed_ms)
        assert step.backward_ms == pytest.approx(8.0)


# Each wrapper, and whether its messages of one layer each start in backward.
OVERLAPS = {"naive": False, "flat": False, "overlap": True, "flashddp": True}


def test_every_wrapper_takes_as_long_as_predicted_on_every_network():
    makers = {name: partial(wrap, name, bucket_cap_mb=4_000 / 2**20) for name in OVERLAPS}
    networks = miniatures(LAYERS)
    for steps in launch(time_steps, 2, makers, networks, LAYERS, backend="gloo"):
        assert len(steps) == len(networks) * len(makers)
        for (place, name), step in steps.items():
            link = networks[place].link(2)
            expected = predict_scaling(
                LAYERS.gradient_bytes,
                2,
                latency_us=link.latency_us,
                bandwidth_gbs=link.bandwidth_gbs,
                backward_ms=8.0,
                other_ms=4.0,
                buckets=1 if name == "flat" else 4,
                overlap=OVERLAPS[name],
            ).step_ms
            # and the message that says who has gradients
            expected += networks[place].collective_ms("all_reduce", 4 * 4, 2)
            assert step.step_ms == pytest.approx(expected, rel=0.05), (place, name)
        # where communication is slow, overlap saves more than a tenth of the step
        slow = {name: steps["100 Gb Ethernet", name].step_ms for name in ("flat", "flashddp")}
        assert slow["flashddp"] < 0.9 * slow["flat"]


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


def test_by_the_wall_clock_matrices_are_multiplied_and_messages_waited_for():
    wall = {"": replace(NETWORK, clock="wall")}
    makers = {"alone": None, "one": bucketed(PLANS["one"])}
    for rank in launch(time_steps, 2, makers, wall, LAYERS, 2, backend="gloo"):
        # 1 ms and 4 × 2 ms
        assert rank["", "one"].step_ms > 9.0
        assert rank["", "one"].exposed_ms > 8.5
        assert rank["", "alone"].exposed_ms == 0


def test_the_rule_of_the_open_exercise_is_beaten_by_its_solution():
    # as the notebook says
    assert step_ms(a_quarter_each) == pytest.approx(57.0, abs=0.05)
    assert 50.3 < step_ms(plan.solve) < 51.35
