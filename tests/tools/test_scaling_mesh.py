"""Steps timed on GPUs, on two processes: right gradients, right attention, what is sent."""

import pytest

from lib.ddp import launch
from lib.tools.scaling_mesh import Pipeline, measure_ring


def measured():
    pipeline = Pipeline("tiny", 2, 16)
    return pipeline.measure(1), pipeline.measure(3), measure_ring(6, heads=2, head_dim=8)


def test_pipelines_and_rings_equal_one_process():
    one, three, ring = launch(measured, 2, backend="gloo", timeout=60)[0]
    assert (one["gradients_off_by"], three["gradients_off_by"]) == (0, 0)
    assert (one["predicted_bubble"], three["predicted_bubble"]) == (1 / 2, 1 / 4)
    assert three["predicted_ms"] == pytest.approx(4 / 3 * three["alone_ms"])
    assert ring["rms_error"]["ring"] < 2 * ring["rms_error"]["pytorch"]
    # two steps, in each of which half of all 6 · 6 pairs count; K and V of 6 tokens, two heads of 8
    assert (ring["flops"], ring["bytes_sent"]) == (2 * 36 / 2 * 2 * 2 * 2 * 8, 2 * 6 * 2 * 8 * 4)
