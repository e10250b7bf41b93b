"""Predicted scaling of hosts of several GPUs, against sums by hand."""

import math

import pytest

from lib.communication_costs import Link, predict_scaling, predicted_ms
from lib.model_costs import flops_per_token, num_parameters
from lib.model_presets import model_preset
from lib.scaling import CLUSTERS, Cluster, predict_step

CLUSTER = Cluster(4, Link(2.0, 100.0), Link(10.0, 25.0))
SHAPE = model_preset("small")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_within_a_host_the_network_does_not_count(ranks):
    assert CLUSTER.link(ranks) == CLUSTER.inside


@pytest.mark.parametrize(("ranks", "hosts"), [(5, 2), (8, 2), (16, 4)])
def test_between_hosts_the_slowest_bandwidth_and_the_mean_latency_count(ranks, hosts):
    link = CLUSTER.link(ranks)
    assert link.bandwidth_gbs == 25
    total = (hosts - 1) * 10 + (ranks - 1 - (hosts - 1)) * 2
    assert (ranks - 1) * link.latency_us == pytest.approx(total)


def test_a_network_faster_than_the_host_does_not_help():
    fast = Cluster(4, Link(2.0, 100.0), Link(2.0, 1000.0))
    assert fast.link(8) == fast.inside


def test_a_step_alone_takes_its_flops():
    found = predict_step(SHAPE, 1000, 1, CLUSTER, flops_per_s=1e14)
    assert found.step_ms == pytest.approx(1e3 * flops_per_token(SHAPE) * 1000 / 1e14)
    assert found.efficiency == 1


def test_without_overlap_one_message_of_all_gradients_is_added():
    settings = {"flops_per_s": 1e14, "bucket_caps_mb": (10**6,), "overlap": False}
    found = predict_step(SHAPE, 1000, 8, CLUSTER, **settings)
    link = CLUSTER.link(8)
    cost = (4 * num_parameters(SHAPE), 8, link.latency_us, link.bandwidth_gbs)
    assert found.exposed_ms == pytest.approx(predicted_ms("all_reduce", *cost))


def test_the_best_of_the_bucket_sizes_is_taken():
    caps = (1, 25, 400)
    alone = 1e3 * flops_per_token(SHAPE) * 1000 / 1e14
    link, num_bytes = CLUSTER.link(16), 4 * num_parameters(SHAPE)
    steps = [
        predict_scaling(
            num_bytes,
            16,
            latency_us=link.latency_us,
            bandwidth_gbs=link.bandwidth_gbs,
            backward_ms=alone * 2 / 3,
            other_ms=alone / 3,
            buckets=math.ceil(num_bytes / (cap * 2**20)),
        ).step_ms
        for cap in caps
    ]
    found = predict_step(SHAPE, 1000, 16, CLUSTER, flops_per_s=1e14, bucket_caps_mb=caps)
    assert found.step_ms == pytest.approx(min(steps))
    assert len({round(step, 6) for step in steps}) == 3


def test_a_slower_network_never_scales_better():
    efficiency = [
        predict_step(SHAPE, 4096, 16, cluster, flops_per_s=2e14).efficiency
        for cluster in CLUSTERS.values()
    ]
    assert efficiency == sorted(efficiency, reverse=True)
    assert len(set(efficiency)) == len(efficiency)
