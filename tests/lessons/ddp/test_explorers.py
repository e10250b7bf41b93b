"""Sliders of notebook 07: the ring's steps, the size of buckets, predicted and measured scaling."""

import math
from functools import partial

import numpy as np
import pytest
from matplotlib.figure import Figure

from lib.ddp.costs import CLUSTERS, predict_scaling
from lib.lessons.ddp.explorers import (
    RANKS,
    bucket_caps,
    bucket_predictions,
    bucket_slider,
    draw_buckets,
    measured_scaling,
    ring_stepper,
    scaling_curve,
    scaling_explorer,
)
from lib.model.config import model_preset
from lib.model.costs import num_parameters
from tests.lessons.drawing_time import charts_per_move
from tests.lessons.stored import stored_outputs

MEDIUM, NETWORK = model_preset("medium"), "400 Gbit/s"
BYTES = 4 * num_parameters(MEDIUM)


def row(**changed):
    values = {"model": "small", "wrapper": "flashddp", "backend": "nccl", "status": "ok"}
    values |= {"ranks": 2, "tr_batch_size": 4, "context_length": 256, "compile": True}
    values |= {"dtype": "bfloat16", "device": "NVIDIA A", "scaling_efficiency": 0.9}
    return values | changed


def test_measured_points_are_the_best_of_our_wrapper_on_gpus():
    rows = [row(), row(ranks=4, scaling_efficiency=0.8), row(ranks=4, scaling_efficiency=0.7)]
    rows += [row(wrapper="naive"), row(backend="gloo"), row(status="oom")]
    rows += [row(scaling_efficiency=None)]
    name = "measured: 1,024 tokens, bfloat16, compiled, A"
    assert measured_scaling(rows) == {"small": {name: [(2, 0.9), (4, 0.8)]}}
    assert measured_scaling([]) == {}


def test_other_settings_are_other_points():
    found = measured_scaling([row(), row(compile=False), row(tr_batch_size=8), row(model="large")])
    assert [len(points) for points in found.values()] == [3, 1]


def test_a_curve_begins_with_one_rank_at_full_speed_and_overlap_helps():
    settings = ("small", 4096, "8 × 400 Gbit/s", 2e14)
    ours, plain = scaling_curve(*settings), scaling_curve(*settings, overlap=False)
    assert ours[0] == plain[0] == (1, 1.0)
    assert [ranks for ranks, _ in ours] == sorted(RANKS)
    assert all(a >= b for (_, a), (_, b) in zip(ours, plain))


@pytest.fixture(scope="module")
def predictions():
    return bucket_predictions(MEDIUM, 4096, 16, NETWORK, 4e14)


def test_each_bucket_size_is_predicted_with_its_number_of_buckets(predictions):
    assert [*predictions] == bucket_caps(MEDIUM) == [2**power for power in range(len(predictions))]
    link = CLUSTERS[NETWORK].link(16)
    for cap, found in predictions.items():
        count = math.ceil(BYTES / (cap * 2**20))
        assert len(found.buckets) == count
        expected = predict_scaling(
            BYTES,
            16,
            latency_us=link.latency_us,
            bandwidth_gbs=link.bandwidth_gbs,
            backward_ms=found.buckets[-1].ready_ms,
            buckets=count,
        )
        assert found.exposed_ms == pytest.approx(expected.exposed_ms)
    # the last one holds all gradients: nothing is hidden
    assert count == 1
    assert found.exposed_ms == pytest.approx(found.communication_ms)


def test_the_exposed_time_of_a_bucket_size_is_drawn_and_said(predictions):
    figure = Figure()
    draw_buckets(figure, predictions, 32)
    curve, point, _ = figure.axes[0].lines
    assert list(curve.get_ydata()) == [found.exposed_ms for found in predictions.values()]
    assert (point.get_xdata(), point.get_ydata()) == ([32], [predictions[32].exposed_ms])
    assert f"exposed {predictions[32].exposed_ms:.3g} ms" in figure.get_suptitle()


def test_a_bucket_size_that_is_not_on_the_slider_is_named():
    with pytest.raises(ValueError, match=r"bucket_mib must be one of \[1, 2, 4.*got 3"):
        bucket_slider(flops_per_s=4e14, still=(3,))


@pytest.fixture(scope="module")
def boxes():
    return {
        "ring": ring_stepper(np.arange(9).reshape(3, 3)),
        "buckets": bucket_slider(flops_per_s=4e14),
        "scaling": scaling_explorer(
            flops_per_s={"small": 2e14, "medium": 3e14},
            tokens=[1024, 4096],
            start=("small", 4096, "100 Gbit/s", 16),
        ),
    }


@pytest.mark.parametrize("name", ["ring", "buckets", "scaling"])
def test_each_control_changes_the_picture(boxes, name):
    *controls, view, _ = boxes[name].children
    for control in controls:
        before = view.outputs[0]["data"]["image/png"]
        control.index = (control.index + 1) % len(control.options)
        assert view.outputs[0]["data"]["image/png"] != before


def test_numbers_on_a_slider_have_commas(boxes):
    assert [label for label, _ in boxes["scaling"].children[1].options] == ["1,024", "4,096"]


def test_a_change_takes_as_long_as_a_chart(boxes):
    sizes = boxes["buckets"].children[0]
    moves = [partial(setattr, sizes, "value", value) for value in (2, 8, 32, 64, 128)]
    assert charts_per_move(moves) < 1.2


@pytest.mark.parametrize(("name", "pictures"), [("ring", 2), ("buckets", 3), ("scaling", 1)])
def test_where_sliders_cannot_be_moved_some_settings_are_shown(boxes, name, pictures):
    outputs = stored_outputs(boxes[name])
    assert sum("image/png" in output.data for output in outputs) == pictures
