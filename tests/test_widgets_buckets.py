"""The size of buckets against overlap: what is predicted is what is drawn, and soon."""

import math
from functools import partial

import pytest
from matplotlib.figure import Figure

from lib.communication_costs import predict_scaling
from lib.model_costs import num_parameters
from lib.model_presets import model_preset
from lib.scaling import CLUSTERS
from lib.widgets_buckets import bucket_caps, bucket_predictions, bucket_slider, draw_buckets
from tests.drawing_time import charts_per_move

MEDIUM, NETWORK = model_preset("medium"), "400 Gbit/s"
BYTES = 4 * num_parameters(MEDIUM)


@pytest.fixture(scope="module")
def predictions():
    return bucket_predictions(MEDIUM, 4096, 16, NETWORK, 4e14)


@pytest.fixture(scope="module")
def slider():
    return bucket_slider(flops_per_s=4e14)


def test_the_largest_bucket_holds_all_gradients_and_the_one_before_does_not():
    caps = bucket_caps(MEDIUM)
    assert caps[0] == 1
    assert caps[-2] * 2**20 < BYTES <= caps[-1] * 2**20


def test_each_size_is_predicted_with_its_own_number_of_buckets(predictions):
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


def test_in_one_bucket_nothing_hides(predictions):
    found = predictions[bucket_caps(MEDIUM)[-1]]
    assert found.exposed_ms == pytest.approx(found.communication_ms)


@pytest.mark.parametrize("cap", [1, 32, 2048])
def test_the_lanes_show_all_of_the_communication(predictions, cap):
    figure = Figure()
    draw_buckets(figure, predictions, cap)
    lanes = figure.axes[1]
    widths = {}
    for bars in lanes.collections:
        boxes = [path.get_extents() for path in bars.get_paths()]
        widths[bars.get_label()] = sum(box.width for box in boxes)
    found = predictions[cap]
    assert widths["backward"] == pytest.approx(found.buckets[-1].ready_ms)
    told = widths["all-reduce, hidden"] + widths["all-reduce, exposed"]
    assert told == pytest.approx(found.communication_ms)
    if cap == 2048:
        assert widths["all-reduce, hidden"] == 0
    assert f"exposed {found.exposed_ms:.3g} ms" in figure.get_suptitle()


def test_words_keep_clear_of_one_another(predictions):
    figure = Figure(figsize=(9.6, 3.2))
    draw_buckets(figure, predictions, 1)
    figure.canvas.draw()
    left, right = figure.axes
    legend, title = right.get_legend().get_window_extent(), left.title.get_window_extent()
    assert not legend.overlaps(left.get_tightbbox())
    assert legend.x1 <= figure.bbox.x1
    assert not figure._suptitle.get_window_extent().overlaps(title)
    assert not left.get_tightbbox().overlaps(right.get_tightbbox())


def test_each_control_changes_the_picture(slider):
    sizes, networks, view, _ = slider.children
    seen = [view.outputs[0]["data"]["image/png"]]
    for control, value in ((sizes, 256), (networks, "10 Gbit/s"), (sizes, 1)):
        control.value = value
        seen.append(view.outputs[0]["data"]["image/png"])
        words = view.outputs[0]["data"]["text/plain"]
        assert words.startswith(f"{networks.value}, 16 ranks. ")
        assert f"of {sizes.value} MiB" in words
    assert len(set(seen)) == 4


def test_a_change_takes_as_long_as_a_chart(slider):
    sizes, *_ = slider.children
    moves = [partial(setattr, sizes, "value", value) for value in (2, 4, 8, 16, 32, 64, 128)]
    assert charts_per_move(moves) < 1.2


def test_where_nobody_can_move_it_several_sizes_are_shown(slider):
    words = [output["data"]["text/plain"] for output in slider.children[3].outputs]
    assert ["buckets of 1 MiB" in words[0], "of 1,024 MiB" in words[1]] == [True, True]


def test_a_size_that_is_not_on_the_slider_is_named():
    with pytest.raises(ValueError, match=r"still has \[3\]; right are some of: 1, 2, 4"):
        bucket_slider(flops_per_s=4e14, still=(3,))
