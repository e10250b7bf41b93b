"""Figures of notebook 07 draw what they are given."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lib.core.figures import SKY, VERMILLION
from lib.lessons.ddp.costs import predict_scaling
from lib.lessons.ddp.figures import (
    PHASE_COLORS,
    WHOLE,
    draw_overlap,
    draw_ring_step,
    draw_ring_strip,
    draw_scaling,
    draw_timeline,
    draw_timelines,
)
from lib.lessons.ddp.ring import ring_all_reduce
from lib.profiling.timeline import Timeline

STEPS = ring_all_reduce(np.array([[1, 2, 3], [10, 20, 30], [100, 200, 300]]))
LINE = Timeline(
    step_ms=10.0,
    backward=(2.0, 7.0),
    compute=(("forward", ((0.0, 1.5),)), ("backward", ((2.0, 4.0), (5.0, 7.0))), ("update", ())),
    communication=((3.0, 9.0),),
    exposed=((7.0, 9.0), (4.5, 4.501)),
)


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("number", range(5))
def test_a_ring_step_shows_values_and_colors_whole_sums(axes, number):
    draw_ring_step(axes, STEPS, number, arrows=False)
    assert [float(text) for text in texts(axes)] == STEPS[number].values.ravel().tolist()
    whole = sum(to_hex(patch.get_facecolor()).upper() == WHOLE for patch in axes.patches)
    assert whole == (STEPS[number].added == 3).sum()


def test_the_strip_has_a_panel_for_each_step():
    figure = Figure()
    draw_ring_strip(figure, STEPS)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["start", "step 1, reduce-scatter", "step 2", "step 3, all-gather", "step 4"]


def bars(axes, color):
    """(start, end) of the drawn spans of a color."""
    for collection in axes.collections:
        if to_hex(collection.get_facecolor()[0]).upper() == color:
            for path in collection.get_paths():
                yield path.vertices[:, 0].min(), path.vertices[:, 0].max()


def test_a_timeline_has_the_spans_of_its_phases_and_of_communication(axes):
    draw_timeline(axes, LINE, title="flat")
    assert list(bars(axes, PHASE_COLORS["backward"])) == [(2, 4), (5, 7)]
    assert list(bars(axes, SKY)) == [(3, 9)]
    assert list(bars(axes, VERMILLION)) == [(7, 9)]
    assert axes.get_title() == "flat: 10 ms, 6 ms of communication, 2 exposed"


def test_timelines_share_the_longest_time_axis():
    longer = Timeline(20.0, (2.0, 7.0), (("update", ((1.0, 2.0),)),), (), ())
    figure = Figure(layout="constrained")
    draw_timelines(figure, {"a": LINE, "b": longer})
    assert [axes.get_xlim() for axes in figure.axes] == [pytest.approx((0, 20.4))] * 2
    assert figure.axes[1].get_title() == "b: 20 ms"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["forward", "backward", "update", "all-reduce, hidden", "all-reduce, exposed"]


def test_scaling_draws_predictions_as_lines_and_measurements_as_points(axes):
    draw_scaling(axes, {"p": [(1, 1.0), (2, 0.9), (3, 0.8), (4, 0.5)]}, {"m": [(2, 0.85)]})
    line, points = axes.lines
    assert line.get_ydata().tolist() == [100, 90, 80, 50]
    assert (points.get_xdata(), points.get_ydata()) == ((2,), [85])
    assert points.get_linestyle() == "None"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4"]


def test_the_drawn_overlap_has_the_exposed_time_in_its_own_color(axes):
    link = {"ranks": 2, "latency_us": 0.0, "bandwidth_gbs": 1.0}
    prediction = predict_scaling(16e6, buckets=2, backward_ms=10.0, other_ms=6.0, **link)
    draw_overlap(axes, prediction, backward_ms=10.0)
    lengths = {
        bars.get_label(): sum(path.get_extents().width for path in bars.get_paths())
        for bars in axes.collections
    }
    expected = {"backward": 10, "all-reduce, hidden": 5, "all-reduce, exposed": 11}
    assert lengths == pytest.approx(expected)
