"""Charts: each draws the data it is given, in words that a reader and a screen reader find."""

from functools import partial

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from lib.core.charts import bars, gantt, heat, lines, roofline
from lib.core.figures import PAPER, SKY, alt_text, save_figure

matplotlib.use("Agg")

LABELS = {"title": "Speed", "xlabel": "tokens", "ylabel": "time (ms)"}
LINES = {"ours": {1: 3.0, 4: 6.0}, "theirs": {1: 2.0, 4: 9.0}}
LANES = {
    "host": [(0, 4, "launch", "7"), (4, 5, "wait", "words too long for it")],
    "GPU": [(1, 9, "work")],
}
POINTS = {"a": (1, 1e11), "b": (99, 1e12)}
# chart -> words of its legend
CHARTS = {
    "lines": (partial(lines, LINES, **LABELS, levels={"best": 1.0}, log="xy"), "ours theirs"),
    "lines of a frame": (partial(lines, pd.DataFrame(LINES), **LABELS), "ours theirs"),
    "bars": (partial(bars, {"a": 1.0, "b": 2.5}, **LABELS, texts="{:.3g}"), ""),
    "grouped": (partial(bars, LINES, **LABELS, upright=True), "1 4"),
    "stacked": (partial(bars, LINES, **LABELS, stacked=True, texts="{:.3g}"), "1 4"),
    "heat": (partial(heat, np.eye(3), **LABELS, scale="weight"), ""),
    "kinds": (partial(heat, [["on", "off"]], **LABELS, kinds={"on": SKY, "off": PAPER}), "on off"),
    "gantt": (partial(gantt, LANES, **LABELS), "launch wait work"),
    "roofline": (partial(roofline, 1e13, 1e12, POINTS, title="Speed"), "a b"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)
    yield
    plt.close("all")


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_has_a_title_labels_and_a_legend_and_reads_aloud(name, tmp_path):
    draw, words = CHARTS[name]
    draw()
    figure = plt.gcf()
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "Speed"
    assert axes.get_xlabel()
    legend = axes.get_legend()
    assert [t.get_text() for t in legend.get_texts()] == words.split() if words else not legend
    assert alt_text(figure).startswith("Speed: ")
    assert save_figure(figure, tmp_path / "chart.png").stat().st_size > 1000


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_with_axes_leaves_the_figure_to_its_caller(name):
    draw, _ = CHARTS[name]
    _, panels = plt.subplots(ncols=2)
    draw(axes=panels[1])
    assert [bool(panel.get_title(loc="left")) for panel in panels] == [False, True]
    assert len(plt.get_fignums()) == 1


def test_lines_have_the_points_given_and_long_ones_no_markers():
    lines({"short": {1: 3.0, 4: 6.0}, "long": np.arange(100.0)}, **LABELS)
    short, long = plt.gca().lines
    assert [*short.get_xdata(), *short.get_ydata()] == [1, 4, 3, 6]
    assert list(long.get_xdata()) == list(long.get_ydata()) == list(range(100))
    assert [line.get_marker() == "" for line in (short, long)] == [False, True]


def test_bars_have_the_lengths_given_and_words_where_there_is_no_number():
    bars({"a": 2.0, "b": "oom", "c": None}, **LABELS, texts="{:.1f} MB")
    axes = plt.gca()
    assert [bar.get_width() for bar in axes.patches] == [2.0]
    assert [text.get_text() for text in axes.texts] == ["2.0 MB", "oom"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]


def test_stacked_parts_follow_one_another_and_their_sum_is_written():
    bars({"a": {"x": 1.0, "y": 2.0}, "b": {"y": 5.0}}, **LABELS, stacked=True, texts="{:g}")
    axes = plt.gca()
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 1), (1, 2), (0, 5)]
    assert [text.get_text() for text in axes.texts] == ["3", "5"]


def test_cells_have_the_values_words_and_frames_given():
    heat([[1, 2, 3], [4, 5, 6]], **LABELS, texts="{}", framed=[[0, 0, 1], [0, 0, 0]])
    axes = plt.gca()
    assert axes.collections[0].get_array().ravel().tolist() == [1, 2, 3, 4, 5, 6]
    assert [text.get_text() for text in axes.texts] == list("123456")
    assert [patch.get_xy() for patch in axes.patches] == [(1.5, -0.5)]


def test_boxes_start_and_end_as_given_and_words_are_left_out_where_they_do_not_fit():
    gantt(LANES, **LABELS)
    axes = plt.gca()
    spans = [path.get_extents() for part in axes.collections for path in part.get_paths()]
    assert [(box.x0, box.x1) for box in spans] == [(0, 4), (4, 5), (1, 9)]
    assert [text.get_text() for text in axes.texts] == ["7"]


def test_the_roof_bends_at_the_ridge():
    roofline(1e13, 1e12, {"a": (1, 1e11)}, title="")
    roof, _, point = plt.gca().lines
    assert [roof.get_xdata()[1], *roof.get_ydata()[1:]] == [10, 10, 10]
    assert [*point.get_xdata(), *point.get_ydata()] == [1, 0.1]


def test_heat_refuses_what_is_no_matrix():
    with pytest.raises(ValueError, match=r"values must have rows and columns, got shape \(3,\)"):
        heat([1, 2, 3], **LABELS)


CROWD = {"residual sum": (0.08, 1.4e9), "RoPE": (0.38, 2.7e9), "RMSNorm": (0.5, 2.4e9)}
CROWD |= {"softmax": (0.63, 2.2e9), "scores": (11, 98e9), "values": (11, 74e9)}
CROWD |= {"q, k, v projection": (44, 132e9), "down projection": (43, 128e9)}


def test_each_name_in_a_roofline_is_beside_its_own_point_or_joined_to_it():
    roofline(219e9, 47.7e9, CROWD, title="", legend="direct")
    axes = plt.gca()
    axes.figure.draw_without_rendering()
    joined = {text.xy for text in axes.texts if not text.get_text() and text.arrow_patch}
    names = {text.get_text(): text for text in axes.texts if text.get_text() in CROWD}
    assert names.keys() == CROWD.keys()
    boxes = {name: text.get_window_extent() for name, text in names.items()}
    centers = {name: axes.transData.transform(text.xy) for name, text in names.items()}
    for name, box in boxes.items():
        others = [box for other, box in boxes.items() if other != name]
        assert not box.count_overlaps(others), name
        assert not any(box.padded(5).contains(*center) for center in centers.values()), name
        away = {
            other: np.hypot(*(center - np.clip(center, box.min, box.max)))
            for other, center in centers.items()
        }
        assert names[name].xy in joined or away[name] < 20, name
