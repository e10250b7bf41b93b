"""Figures in the house style, on disk."""

import io
import os
import re

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from lib.core.figures import COLORS, INK, PAPER, STYLE, alt_text, house_figure, save_figure
from tests.core.contrast import contrast

matplotlib.use("Agg")


def draw(axes):
    for name in ("one", "two"):
        axes.plot([1, 2, 3], label=name)
    axes.set(xlabel="size (MB)", ylabel="time (s)")
    axes.set_title("Speed")
    axes.legend()


def test_saved_png_is_opaque_and_twice_the_size(tmp_path):
    with house_figure(width=3, height=2) as (figure, axes):
        draw(axes)
        path = save_figure(figure, tmp_path / "new" / "figure.png")
    image = Image.open(path)
    assert image.size == (600, 400)
    assert np.asarray(image.convert("RGBA"))[..., 3].min() == 255
    assert os.listdir(path.parent) == ["figure.png"]


def test_the_same_figure_gives_the_same_file(tmp_path):
    for ending in ("png", "svg"):
        files = []
        for name in ("a", "b"):
            with house_figure() as (figure, axes):
                draw(axes)
                files.append(save_figure(figure, tmp_path / f"{name}.{ending}").read_bytes())
        assert files[0] == files[1]


def test_text_can_be_read_and_lines_can_be_seen_on_the_paper():
    assert contrast(INK, PAPER) >= 7
    assert all(contrast(color, PAPER) >= 1.9 for color in COLORS)


def test_series_differ_by_color_and_by_marker():
    entries = list(STYLE["axes.prop_cycle"])
    assert len({entry["color"] for entry in entries}) == len(entries)
    assert len({entry["marker"] for entry in entries}) == len(entries)


def test_house_figure_leaves_other_settings_as_they_were():
    before = dict(matplotlib.rcParams)
    count = len(plt.get_fignums())
    with house_figure() as (_, axes):
        assert axes.get_facecolor() == matplotlib.colors.to_rgba(PAPER)
    assert dict(matplotlib.rcParams) == before
    assert len(plt.get_fignums()) == count


def test_a_logarithmic_axis_has_plain_digits():
    # less than a decade, which labels the ticks between, and several
    for top in (9, 900):
        with house_figure() as (figure, axes):
            axes.semilogy([0.8, top])
            figure.canvas.draw()
            shown = [
                t for t in axes.get_yticklabels(which="both") if 0.8 <= t.get_position()[1] <= top
            ]
            texts = {re.sub(r"[^\d^.]", "", label.get_text()) for label in shown} - {""}
        assert texts >= {"1"}
        assert not any("^" in text for text in texts)


def test_an_axis_without_a_label_is_rejected_by_name(tmp_path):
    with house_figure() as (figure, axes):
        draw(axes)
        axes.set_ylabel("")
        with pytest.raises(ValueError, match="the y axis of 'Speed' must have a label"):
            save_figure(figure, tmp_path / "figure.png")
    assert os.listdir(tmp_path) == []


def test_a_heat_map_with_its_color_bar_can_be_saved(tmp_path):
    with house_figure() as (figure, axes):
        image = axes.imshow(np.eye(3))
        axes.set(xlabel="queries", ylabel="keys")
        figure.colorbar(image, label="TFLOP/s")
        assert save_figure(figure, tmp_path / "map.png").exists()


def test_an_unknown_file_type_is_rejected(tmp_path):
    with house_figure() as (figure, _), pytest.raises(ValueError, match=r"\.png or \.svg"):
        save_figure(figure, tmp_path / "figure.jpg")


def test_alt_text_names_title_axes_and_series_in_one_line():
    with house_figure() as (figure, axes):
        draw(axes)
        assert alt_text(figure) == "Speed: time (s) against size (MB), for one, two."
    with house_figure(ncols=2) as (figure, (left, right)):
        for axes in (left, right):
            axes.set(title="Two\nlines", xlabel="x", ylabel="y")
        figure.suptitle("Both")
        assert alt_text(figure) == "Both. Two, lines: y against x. Two, lines: y against x."


def test_alt_text_travels_in_the_file(tmp_path):
    with house_figure() as (figure, axes):
        draw(axes)
        content = save_figure(figure, tmp_path / "a.png", alt="Rises to 3.").read_bytes()
    assert Image.open(io.BytesIO(content)).text["Description"] == "Rises to 3."
