"""Figures of notebook 08 draw what they are given."""

import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from lib.lessons.zero1.figures import (
    CARDS,
    KINDS,
    draw_contexts,
    draw_flat,
    draw_kinds,
    draw_partition,
    draw_who_holds,
)


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


def test_each_stage_divides_one_kind_more_and_ranks_hold_slices_of_their_own():
    figure = Figure(layout="constrained")
    draw_who_holds(figure, ranks=4)
    assert [axes.get_title().split(": ")[1] for axes in figure.axes] == [
        f"{held} bytes" for held in (16, 10, 7, 4)
    ]
    colors = {to_rgb(KINDS[kind]) for kind in ("weights", "gradients", "Adam's moments")}
    for axes, divided in zip(figure.axes, range(4)):
        drawn: dict = {}
        for patch in axes.patches:
            if patch.get_facecolor()[:3] in colors:
                drawn.setdefault(patch.get_facecolor()[:3], []).append(
                    (patch.get_y(), patch.get_height())
                )
        # all hold the same, or slices that together are the whole
        assert (
            sorted(len(set(held)) for held in drawn.values()) == [1] * (3 - divided) + [4] * divided
        )
        for held in drawn.values():
            whole = 8 if max(y + height for y, height in held) > 8 else 4
            assert sum(height for _, height in set(held)) == whole


def test_contexts_are_curves_with_the_cards_that_are_within_reach(axes):
    plain, dashed = [(256, 10e9), (512, 30e9)], [(256, 8e9), (512, 9e9)]
    draw_contexts(axes, {"a": plain, "a, checkpoints": dashed}, [4, 16, 24, 80])
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[10, 30], [8, 9]]
    assert [line.get_linestyle() for line in axes.lines[:2]] == ["-", "--"]
    assert texts(axes) == ["16 GB, T4", "24 GB, RTX 4090"]
