"""Sliders of notebook 07: the ring's steps, the size of buckets, predicted and measured scaling."""

import math
import re
from functools import partial

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.text import Text

from lib.core.figures import STYLE
from lib.ddp.costs import CLUSTERS, predict_scaling
from lib.lessons.ddp.explorers import (
    RANKS,
    bucket_caps,
    bucket_predictions,
    bucket_slider,
    draw_buckets,
    draw_scaling_setting,
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


def texts_of(figure: Figure) -> dict[str, bool]:
    """The texts that `figure` shows -> whether one lies wholly inside it."""
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            labels = zip(axis.get_ticklocs(), axis.get_ticklabels())
            unseen = {label for value, label in labels if not low <= value <= high}
            texts = [text for text in texts if text not in unseen]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    return {
        text: box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        for text, box in boxes
    }


@pytest.mark.parametrize("ranks", [1, 64])
@pytest.mark.parametrize("network", ["8 × 400 Gbit/s", "10 Gbit/s"])
def test_large_and_tiny_times_read_as_plain_numbers_and_no_label_is_cut(network, ranks):
    long = "measured: 1,024 tokens, bfloat16, compiled, H200"
    with plt.rc_context(STYLE):
        step, buckets = (Figure((w, h), layout="none") for w, h in ((10.0, 4.2), (9.6, 3.2)))
        settings = ("2.7b", 2**20, network, ranks)
        draw_scaling_setting(step, *settings, flops_per_s=3e14, measured={long: [(2, 0.9)]})
        draw_buckets(buckets, bucket_predictions(MEDIUM, 4096, 16, network, 3e14), 1)
        texts = texts_of(step) | texts_of(buckets)
    assert [text for text in texts if re.search(r"\de[+-]\d", text)] == []
    assert [text for text, is_inside in texts.items() if not is_inside] == []
    (title,) = [text for text in texts if "efficiency" in text and "rank" in text]
    assert re.search(r"step \d\d,\d{3} ms", title)
    assert title.startswith("1 rank, NVLink" if ranks == 1 else "64 ranks")
    assert ranks > 1 or "exposed 0 ms" in title


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
