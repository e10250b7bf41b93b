"""Costs of overlap and scaling, and bytes sent, against sums by hand."""

import pytest

from lib.lessons.ddp import costs
from lib.lessons.ddp.costs import (
    CLUSTERS,
    Cluster,
    Interference,
    predict_scaling,
    predict_step,
    sent_bytes,
)
from lib.model.config import model_preset
from lib.model.costs import num_parameters
from lib.profiling.collectives import Link, predicted_ms

CLUSTER = Cluster(4, Link(2.0, 100.0), Link(10.0, 25.0))
SHAPE = model_preset("small")


# Two ranks, 1 GB/s and no latency: an all-reduce takes as many milliseconds as it has MB.
SLOW = {"ranks": 2, "latency_us": 0.0, "bandwidth_gbs": 1.0, "backward_ms": 10.0, "other_ms": 6.0}


@pytest.mark.parametrize(
    ("megabytes", "exposed_ms"),
    [
        # averaged faster than they fill, from 5 to 9 and from 10 to 14 ms: only the last is exposed
        (8, 4),
        # filled faster than they are averaged, from 5 to 13 and from 13 to 21 ms: the second waits
        (16, 11),
    ],
)
def test_a_bucket_is_sent_once_it_is_full_and_the_one_before_is_through(megabytes, exposed_ms):
    found = predict_scaling(megabytes * 1e6, buckets=2, **SLOW)
    assert (found.exposed_ms, found.communication_ms) == (exposed_ms, megabytes)
    assert found.step_ms == 16 + exposed_ms
    assert found.efficiency == 16 / found.step_ms


def test_hidden_messages_and_computing_beside_them_cost_what_interference_says():
    settings = SLOW | {"buckets": 2, "interference": Interference(hidden=0.5, computing=0.25)}
    # 4 of 8 ms are hidden beside 16 ms of computing
    found = predict_scaling(8e6, **settings)
    assert (found.exposed_ms, found.slowed_ms, found.step_ms) == (4, 2 + 4, 26)
    assert predict_scaling(8e6, **settings, overlap=False).slowed_ms == 0
    assert predict_scaling(8e6, **settings | {"ranks": 1}).slowed_ms == 0


def test_without_overlap_all_communication_is_exposed():
    found = predict_scaling(8e6, buckets=3, overlap=False, **SLOW)
    assert found.exposed_ms == pytest.approx(found.communication_ms) == pytest.approx(8)


def test_with_latency_there_can_be_too_many_buckets():
    slow = SLOW | {"latency_us": 500.0}
    exposed = [predict_scaling(8e6, buckets=n, **slow).exposed_ms for n in (1, 4, 64)]
    assert exposed[1] < min(exposed[0], exposed[2])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"buckets": 0}, "buckets"),
        ({"gradient_bytes": -1}, "gradient_bytes"),
        ({"backward_ms": -1.0}, "backward_ms"),
        ({"backward_ms": 0.0, "other_ms": 0.0}, "not both 0"),
    ],
)
def test_a_wrong_argument_of_the_prediction_is_named(changed, words):
    with pytest.raises(ValueError, match=words):
        predict_scaling(**{"gradient_bytes": 8e6, "buckets": 1} | SLOW | changed)


def test_between_hosts_the_slowest_bandwidth_and_the_mean_latency_count():
    assert CLUSTER.link(1) == CLUSTER.link(4) == CLUSTER.inside
    for ranks, hosts in ((5, 2), (8, 2), (16, 4)):
        link = CLUSTER.link(ranks)
        assert link.bandwidth_gbs == 25
        total = (hosts - 1) * 10 + (ranks - 1 - (hosts - 1)) * 2
        assert (ranks - 1) * link.latency_us == pytest.approx(total)
    # a network faster than the host does not help
    fast = Cluster(4, Link(2.0, 100.0), Link(2.0, 1000.0))
    assert fast.link(8) == fast.inside


def test_gradients_that_fit_one_bucket_are_one_float32_message_after_backward(monkeypatch):
    monkeypatch.setattr(costs, "BUCKET_CAPS_MB", (10**6,))
    link = CLUSTER.link(8)
    cost = (4 * num_parameters(SHAPE), 8, link.latency_us, link.bandwidth_gbs)
    found = predict_step(SHAPE, 8, link, alone_ms=50.0)
    assert found.exposed_ms == pytest.approx(predicted_ms("all_reduce", *cost))


def test_gradients_are_sent_in_the_last_pass_and_of_several_passes_once():
    once, twice = (
        predict_step(SHAPE, 8, CLUSTER.link(8), alone_ms=50.0 * passes, passes=passes)
        for passes in (1, 2)
    )
    assert once.exposed_ms == pytest.approx(twice.exposed_ms)
    assert once.exposed_ms > 0
    assert predict_step(SHAPE, 1, CLUSTER.link(1), alone_ms=50.0).step_ms == 50


def test_the_best_of_the_bucket_sizes_is_taken(monkeypatch):
    def step_ms(*caps: float) -> float:
        monkeypatch.setattr(costs, "BUCKET_CAPS_MB", caps)
        return predict_step(SHAPE, 16, CLUSTER.link(16), alone_ms=9.0).step_ms

    alone = [step_ms(cap) for cap in (1, 25, 400)]
    assert len({round(step, 6) for step in alone}) == 3
    assert step_ms(1, 25, 400) == min(alone)


def test_a_slower_network_never_scales_better():
    efficiency = [
        predict_step(SHAPE, 16, cluster.link(16), alone_ms=18.0).efficiency
        for cluster in CLUSTERS.values()
    ]
    assert efficiency == sorted(efficiency, reverse=True)
    assert len(set(efficiency)) == len(efficiency)


def test_zero2_sends_what_zero1_does_and_an_unknown_method_is_refused():
    # of the others, an exercise of notebook 09 has the formula, too
    assert sent_bytes("zero2", 900, 3) == sent_bytes("zero1_flat", 900, 3)
    with pytest.raises(ValueError, match=r"method must be one of ddp, .* got 'zero9'"):
        sent_bytes("zero9", 1, 2)
