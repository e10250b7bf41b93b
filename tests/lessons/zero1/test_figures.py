"""Figures of notebook 08 draw what they are given."""

import dataclasses

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lib.lessons.zero1.figures import (
    CARDS,
    KINDS,
    PURPOSE_COLORS,
    draw_cycles,
    draw_flat,
    draw_kinds,
    draw_partition,
    draw_sent,
    draw_stages,
)
from lib.profiling.timeline import Timeline


@pytest.fixture
def axes():
    return Figure().subplots()


def texts(axes):
    return [text.get_text() for text in axes.texts]


def bars_of(axes):
    """(color, left, width) of the bars."""
    return [
        (to_hex(patch.get_facecolor()).upper(), patch.get_x(), patch.get_width())
        for patch in axes.patches
    ]


def test_kinds_are_stacked_in_gb(axes):
    draw_kinds(axes, {"a": {"weights": 1e9, "gradients": 3e9}}, peaks={"a": 3.5e9})
    assert bars_of(axes) == [(KINDS["weights"], 0, 1), (KINDS["gradients"], 1, 3)]
    assert texts(axes) == ["4", "sum\n(GB)"]
    assert axes.collections[0].get_segments()[0][:, 0].tolist() == [3.5, 3.5]


def test_percentages_are_of_each_bar(axes):
    draw_kinds(axes, {"a": {"weights": 1e9, "gradients": 3e9}}, percent=True)
    assert [width for _, _, width in bars_of(axes)] == [25, 75]


@pytest.mark.parametrize(("longest", "count"), [(1, 1), (17, 2), (100, 4), (500, 4)])
def test_limits_are_drawn_up_to_the_first_that_no_bar_fills(axes, longest, count):
    draw_kinds(axes, {"a": {"weights": longest * 1e9}}, limits=list(CARDS))
    assert [line.get_xdata()[0] for line in axes.lines] == list(CARDS)[:count]
    assert axes.get_xlim()[1] > max(longest, list(CARDS)[count - 1])


def test_a_partition_says_the_largest_load(axes):
    draw_partition(axes, [4, 2, 2], [0, 1, 0], 2, title="so")
    assert axes.get_title() == "so: largest load 1.50 × an equal share"
    rows = [(patch.get_y() + 0.35, patch.get_width() * 1e6) for patch in axes.patches]
    assert rows == [pytest.approx(row) for row in [(0, 4), (1, 2), (0, 2)]]


@pytest.mark.parametrize(("sizes", "padding"), [([5, 4], [3]), ([8, 4], [])])
def test_a_buffer_shows_its_padding(axes, sizes, padding):
    draw_flat(axes, sizes, [(0, 6), (6, 12)])
    hatched = [1e6 * patch.get_width() for patch in axes.patches if patch.get_hatch()]
    assert hatched == pytest.approx(padding)
    assert texts(axes) == ["rank 0: 0 to 6", "rank 1: 6 to 12"]


def test_cycles_share_a_time_axis_and_have_a_lane_for_each_purpose():
    compute = (("forward", ((8.0, 9.0),)), ("backward", ((0.0, 5.0),)), ("", ((1.0, 2.0),)))
    line = Timeline(10.0, (0.0, 5.0), compute, (), ())
    collectives = {"gradients": ((1.0, 4.0),), "weights": ((6.0, 9.0),)}
    figure, longer = Figure(layout="constrained"), dataclasses.replace(line, step_ms=20.0)
    draw_cycles(figure, {"a": (line, collectives), "b": (longer, collectives)})
    assert [axes.get_xlim() for axes in figure.axes] == [pytest.approx((0, 20.4))] * 2
    drawn = {
        to_hex(found.get_facecolor()[0]).upper(): found.get_paths()[0].vertices[:, 0]
        for found in figure.axes[0].collections
    }
    for purpose, color in PURPOSE_COLORS.items():
        assert ((drawn[color].min(), drawn[color].max()),) == collectives[purpose]


def test_stages_are_curves_over_ranks_with_the_cards_that_are_within_reach(axes):
    draw_stages(axes, {"a": [(1, 30e9), (2, 20e9)], "b": [(1, 30e9), (2, 10e9)]}, [16, 24, 80])
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[30, 20], [30, 10]]
    assert texts(axes) == ["16 GB, T4", "24 GB, RTX 4090"]


def test_sent_bytes_are_drawn_in_gb_from_the_top(axes):
    draw_sent(axes, {"a": 1e9, "b": 2e9})
    assert texts(axes) == ["1", "2"]
    assert axes.yaxis_inverted()
