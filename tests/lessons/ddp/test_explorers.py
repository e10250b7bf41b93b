"""Sliders of notebook 07: the ring's steps, a step on any network, scaling."""

import re

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.text import Text

from lib.core.figures import STYLE
from lib.lessons.ddp.costs import Interference
from lib.lessons.ddp.explorers import (
    RANKS,
    draw_scaling_setting,
    measured_scaling,
    network_explorer,
    ring_stepper,
    scaling_curve,
    scaling_explorer,
)
from lib.lessons.ddp.stack import Layers, bucketed
from tests.lessons.stored import stored_outputs

pytestmark = pytest.mark.usefixtures("quick_ranks")


def test_measured_points_are_of_the_setting_that_is_shown():
    found = measured_scaling("medium", 32_768)
    assert {ranks for points in found.values() for ranks, _ in points} == {2, 4}
    assert all(0.9 < efficiency < 0.97 for points in found.values() for _, efficiency in points)
    assert measured_scaling("medium", 1) == measured_scaling("tiny", 32_768) == {}


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
    with plt.rc_context(STYLE):
        step = Figure((10.0, 4.2), layout="none")
        draw_scaling_setting(step, "2.7b", 2**20, network, ranks, flops_per_s=3e14)
        texts = texts_of(step)
    assert [text for text in texts if re.search(r"\de[+-]\d", text)] == []
    assert [text for text, is_inside in texts.items() if not is_inside] == []
    (title,) = [text for text in texts if "efficiency" in text and "rank" in text]
    assert re.search(r"step \d\d,\d{3} ms", title)
    assert title.startswith("1 rank, NVLink" if ranks == 1 else "64 ranks")
    assert ranks > 1 or "exposed 0 ms" in title


def test_a_curve_begins_with_one_rank_at_full_speed_and_overlap_helps_where_it_is_free():
    settings = ("small", 4096, "8 × 400 Gbit/s", 2e14)
    free = scaling_curve(*settings, interference=Interference())
    plain = scaling_curve(*settings, overlap=False)
    assert free[0] == plain[0] == scaling_curve(*settings)[0] == (1, 1.0)
    assert [ranks for ranks, _ in free] == sorted(RANKS)
    assert all(a >= b for (_, a), (_, b) in zip(free, plain))
    # hidden messages cost on H200s
    assert all(a > b for (_, a), (_, b) in zip(free[1:], scaling_curve(*settings)[1:]))


def make(elements: int):
    return bucketed([[3], [2], [1], [0]] if elements == 10 else [[3, 2], [1, 0]])


@pytest.fixture(scope="module")
def boxes():
    return {
        "ring": ring_stepper(np.arange(9).reshape(3, 3)),
        "network": network_explorer(make, Layers((10,) * 4, forward=1.0, backward=2.0)),
        "scaling": scaling_explorer(
            flops_per_s={"small": 2e14, "medium": 3e14},
            tokens=[1024, 4096],
            start=("small", 4096, "100 Gbit/s", 16),
        ),
    }


@pytest.mark.parametrize("name", ["ring", "network", "scaling"])
def test_each_control_changes_the_picture(boxes, name):
    *controls, view, _ = boxes[name].children
    # one is a label, which says what runs
    for control in (control for control in controls if hasattr(control, "options")):
        before = view.outputs[0]["data"]["image/png"]
        control.index = (control.index + 1) % len(control.options)
        assert view.outputs[0]["data"]["image/png"] != before


@pytest.mark.parametrize(("name", "pictures"), [("ring", 2), ("network", 3), ("scaling", 1)])
def test_where_sliders_cannot_be_moved_some_settings_are_shown(boxes, name, pictures):
    outputs = stored_outputs(boxes[name])
    assert sum("image/png" in output.data for output in outputs) == pictures
