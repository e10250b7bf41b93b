"""Figures in the house style, on disk."""

import re

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from lib.core.figures import COLORS, INK, PAPER, STYLE, alt_text, house_figure, save_figure

matplotlib.use("Agg")


def draw(axes):
    for name in ("one", "two"):
        axes.plot([1, 2, 3], label=name)
    axes.set(xlabel="size (MB)", ylabel="time (s)")
    axes.set_title("Speed")
    axes.legend()


def test_a_saved_figure_is_opaque_sharper_than_described_and_always_the_same(tmp_path):
    for ending in ("png", "svg"):
        files = []
        for folder in ("a", "b"):
            with house_figure(width=3, height=2) as (figure, axes):
                draw(axes)
                files.append(save_figure(figure, tmp_path / folder / f"f.{ending}"))
        assert files[0].read_bytes() == files[1].read_bytes()
    image = Image.open(tmp_path / "a/f.png")
    assert image.size == (450, 300)
    assert np.asarray(image.convert("RGBA"))[..., 3].min() == 255
    assert image.text["Description"] == "Speed: time (s) against size (MB), for one, two."
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        save_figure(figure, tmp_path / "figure.jpg")


def contrast(color: str) -> float:
    """How well a color stands out from the paper, as WCAG 2 defines it."""
    light = []
    for rgb in (np.array(to_rgb(color)), np.array(to_rgb(PAPER))):
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        light.append(linear @ [0.2126, 0.7152, 0.0722])
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_text_and_lines_stand_out_from_the_paper_and_series_from_one_another():
    assert contrast(INK) >= 7
    assert all(contrast(color) >= 1.9 for color in COLORS)
    entries = list(STYLE["axes.prop_cycle"])
    for name in ("color", "marker"):
        assert len({entry[name] for entry in entries}) == len(entries)


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


def test_alt_text_names_title_axes_and_series_in_one_line():
    with house_figure(ncols=2) as (figure, (left, right)):
        for axes in (left, right):
            axes.set(title="Two\nlines", xlabel="x", ylabel="y")
        figure.suptitle("Both")
        assert alt_text(figure) == "Both. Two, lines: y against x. Two, lines: y against x."
