"""Figures of notebook 06: what they draw is what they were given."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from lib.plots import SKY, VERMILLION, house_figure
from lib.plots_ddp import (
    PHASE_COLORS,
    WHOLE,
    draw_collective,
    draw_ring,
    draw_ring_step,
    draw_ring_strip,
    draw_scaling,
    draw_timeline,
    draw_timelines,
)
from lib.ring import ring_all_reduce
from lib.trace_timeline import PHASES, Timeline

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


def test_a_collective_shows_all_numbers_before_and_after():
    with house_figure() as (_, axes):
        draw_collective(axes, [[1, 2], [3, 4]], [[4, 6], [4, 6]], "all-reduce")
        shown = texts(axes)
    assert [text for text in shown if text.isdigit()] == ["1", "2", "4", "6", "3", "4", "4", "6"]
    assert {"rank 0", "rank 1", "all-reduce"} <= set(shown)


@pytest.mark.parametrize(("name", "arrows"), [("broadcast", 3), ("all-reduce", 9)])
def test_arrows_lead_from_where_the_numbers_come(name, arrows):
    with house_figure() as (_, axes):
        draw_collective(axes, [[1]] * 3, [[1]] * 3, name)
        found = [text for text in axes.texts if getattr(text, "arrow_patch", None)]
    assert len(found) == arrows


@pytest.mark.parametrize("number", range(5))
def test_a_ring_step_shows_values_and_colours_whole_sums(number):
    with house_figure() as (_, axes):
        draw_ring_step(axes, STEPS, number, arrows=False)
        shown = [float(text) for text in texts(axes)]
        whole = sum(to_hex(patch.get_facecolor()).upper() == WHOLE for patch in axes.patches)
    assert shown == STEPS[number].values.ravel().tolist()
    assert whole == (STEPS[number].added == 3).sum()


def test_a_ring_step_has_an_arrow_for_each_message_and_two_around_the_corner():
    with house_figure() as (_, axes):
        draw_ring_step(axes, STEPS, 1, arrows=True)
        arrows = [text for text in axes.texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == 4


def test_the_strip_has_a_panel_for_each_step():
    with house_figure(squeeze=False) as (figure, _):
        figure.clear()
        draw_ring_strip(figure, STEPS)
        titles = [axes.get_title(loc="center") for axes in figure.axes]
    assert [t for t in titles if t] == [
        "start",
        "step 1, reduce-scatter",
        "step 2",
        "step 3, all-gather",
        "step 4",
    ]


@pytest.mark.parametrize(
    ("number", "words"), [(0, "numbers of its own"), (2, "2 of 4: reduce-scatter"), (4, "9 of 9")]
)
def test_a_step_says_what_it_is_for(number, words):
    with house_figure(squeeze=False) as (figure, _):
        figure.clear()
        draw_ring(figure, STEPS, number)
        assert words in figure.get_suptitle()


def bars(axes, color):
    """(start, end) of the drawn spans of a colour."""
    for collection in axes.collections:
        if to_hex(collection.get_facecolor()[0]).upper() == color:
            for path in collection.get_paths():
                yield path.vertices[:, 0].min(), path.vertices[:, 0].max()


def test_a_timeline_has_the_spans_of_its_phases_and_of_communication():
    with house_figure() as (_, axes):
        draw_timeline(axes, LINE, title="flat")
        assert list(bars(axes, PHASE_COLORS["backward"])) == [(2, 4), (5, 7)]
        assert list(bars(axes, SKY)) == [(3, 9)]
        assert list(bars(axes, VERMILLION)) == [(7, 9)]
        title = axes.get_title(loc="left")
    assert title == "flat: 10 ms, communication 6 ms, of it exposed 2 ms"


def test_without_communication_the_title_says_the_step_alone():
    line = Timeline(10.0, (2.0, 7.0), (), (), ())
    with house_figure() as (_, axes):
        draw_timeline(axes, line, title="none")
        assert axes.get_title(loc="left") == "none: 10 ms"


def test_timelines_share_the_longest_time_axis():
    longer = Timeline(20.0, (2.0, 7.0), (("update", ((1.0, 2.0),)),), (), ())
    with house_figure(squeeze=False) as (figure, _):
        figure.clear()
        draw_timelines(figure, {"a": LINE, "b": longer})
        limits = [axes.get_xlim() for axes in figure.axes]
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert limits == [pytest.approx((0, 20.4))] * 2
    assert legend == ["forward", "backward", "update", "all-reduce, hidden", "all-reduce, exposed"]


def test_every_phase_has_a_colour():
    assert set(PHASE_COLORS) == set(PHASES.values())
    assert len(set(PHASE_COLORS.values())) == len(PHASES)


def test_scaling_draws_predictions_as_lines_and_measurements_as_points():
    with house_figure() as (_, axes):
        draw_scaling(axes, {"p": [(1, 1.0), (2, 0.9), (3, 0.8), (4, 0.5)]}, {"m": [(2, 0.85)]})
        line, points = axes.lines
        assert line.get_ydata().tolist() == [100, 90, 80, 50]
        assert (points.get_xdata(), points.get_ydata()) == ((2,), [85])
        assert points.get_linestyle() == "None"
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4"]
