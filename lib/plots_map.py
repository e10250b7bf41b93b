"""The map of the workbook: its notebooks as stations from raw text to several GPUs.

`python -m lib.plots_map` draws it for the README, into artifacts/map.svg.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Polygon, Rectangle

from lib.plots import (
    BLACK,
    BLUE,
    COLORS,
    GREEN,
    INK,
    PAPER,
    VERMILLION,
    house_figure,
    save_figure,
)

if TYPE_CHECKING:
    from IPython.display import Image


@dataclass(frozen=True)
class Stop:
    """One notebook on the map."""

    name: str
    """Its file's, without the ending."""

    title: str
    builds: str
    leaves: str
    """What the next ones take from here; the label of the arrow that leads on."""

    minutes: str
    """How long it runs on two processor cores."""

    color: str = BLACK


STOPS = (
    Stop("00_start_here", "Start here", "a look at what comes", "raw text", "½"),
    Stop("01_tokenizer", "Tokenizer", "BPE: text to numbers", "token\narrays", "½", BLUE),
    Stop("02_model", "Model", "a Transformer", "model", "1", BLUE),
    Stop("03_training", "Training", "AdamW, runs, stories", "training\nstep", "2–3", BLUE),
    Stop("04_profiling", "Profiling", "a clock that holds", "what\nis slow", "1–2", VERMILLION),
    Stop("05_flash_attention", "FlashAttention", "a fast kernel", "fast\nstep", "1", VERMILLION),
    Stop("06_ddp", "Data parallelism", "one model, many ranks", "copies\nof state", "1", GREEN),
    Stop("07_zero1", "ZeRO-1", "state in shares", "every\npart", "1", GREEN),
    Stop("08_speedrun", "Speedrun", "text to story, timed", "a trained model", "1"),
)
COLUMNS = 3
# Inches: of a card, from one card to the next, and around all of them.
WIDTH, HEIGHT, ACROSS, DOWN, MARGIN = 2.45, 1.5, 3.4, 2.1, 0.15


def show_map() -> Image:
    """The map as a picture, with its words for those who cannot see it."""
    from IPython.display import Image

    file = io.BytesIO()
    with map_figure() as figure:
        figure.savefig(file, format="png")
    return Image(file.getvalue(), format="png", retina=True, alt=map_words())


def save_map(path: str | os.PathLike) -> Path:
    """Write the map to `path`, a .svg or a .png; its words are in the file."""
    with map_figure() as figure:
        return save_figure(figure, path, alt=map_words())


@contextmanager
def map_figure() -> Iterator[Figure]:
    """The map as a figure, closed at the end."""
    rows = math.ceil(len(STOPS) / COLUMNS)
    width = ACROSS * (COLUMNS - 1) + WIDTH + 2 * MARGIN
    height = DOWN * (rows - 1) + HEIGHT + 2 * MARGIN
    with house_figure(width=width, height=height) as (figure, axes):
        figure.set_layout_engine("none")
        axes.set_position((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
        axes.axis("off")
        draw_map(axes)
        yield figure


def map_words() -> str:
    """What the map shows, in words."""
    stations = []
    for stop in STOPS:
        leaves = stop.leaves.replace("\n", " ")
        number, minutes = stop.name[:2], stop.minutes.replace("½", "half a")
        unit = "minute" if minutes in ("1", "half a") else "minutes"
        stations.append(
            f"{number} {stop.title}, {minutes} {unit}: {stop.builds}; leads on with: {leaves}"
        )
    return f"A path through the notebooks. {'. '.join(stations)}."


def draw_map(axes: Axes) -> None:
    """Cards in rows, read like a snake, with arrows between; coordinates are inches."""
    for index, stop in enumerate(STOPS):
        x, y = _place(index)
        _draw_card(axes, x, y, index, stop)
        if index + 1 < len(STOPS):
            _draw_arrow(axes, (x, y), _place(index + 1), stop.leaves)


def _place(index: int) -> tuple[float, float]:
    """The upper left corner of a card."""
    row, column = divmod(index, COLUMNS)
    if row % 2:
        column = COLUMNS - 1 - column
    return MARGIN + column * ACROSS, MARGIN + row * DOWN


def _draw_card(axes: Axes, x: float, y: float, index: int, stop: Stop) -> None:
    shape = FancyBboxPatch(
        (x, y), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.1",
        facecolor="white", edgecolor=stop.color, linewidth=1.6,
    )  # fmt: skip
    axes.add_patch(shape)
    axes.text(x + 0.12, y + 0.26, stop.name[:2], color=stop.color, weight="bold", fontsize=12)
    axes.text(x + 0.44, y + 0.26, stop.title, weight="bold", fontsize=12)
    axes.text(x + 0.12, y + 1.36, stop.builds, fontsize=10.5)
    time = {"fontsize": 9.5, "ha": "right", "color": "#555555"}
    axes.text(x + WIDTH - 0.1, y + 1.36, f"{stop.minutes} min", **time)
    PICTURES[index](axes, x + 0.14, y + 0.42, WIDTH - 0.28, 0.64, stop.color)


def _draw_arrow(axes: Axes, start: tuple, end: tuple, label: str) -> None:
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    if start[1] == end[1]:
        forward = end[0] > start[0]
        tail, head = start[0] + WIDTH * forward, end[0] + WIDTH * (not forward)
        y = start[1] + 0.95
        axes.annotate("", (head, y), (tail, y), arrowprops=style)
        axes.text((tail + head) / 2, y - 0.08, label, fontsize=10, ha="center")
        return
    x = start[0] + WIDTH / 2
    axes.annotate("", (x, end[1]), (x, start[1] + HEIGHT), arrowprops=style)
    middle = (start[1] + HEIGHT + end[1]) / 2
    axes.text(x + 0.1, middle, label.replace("\n", " "), fontsize=10, va="center")


def _start(axes: Axes, x: float, y: float, w: float, h: float, color: str) -> None:
    for row, length in enumerate((0.42, 0.3, 0.36)):
        axes.plot([x, x + length * w], [y + (0.2 + 0.3 * row) * h] * 2, marker="", color="#999999")
    center = x + 0.72 * w, y + h / 2
    axes.add_patch(Circle(center, h / 2, color=color))
    corners = [(center[0] + a * h, center[1] + b * h) for a, b in ((-0.14, -0.22), (-0.14, 0.22))]
    axes.add_patch(Polygon([*corners, (center[0] + 0.26 * h, center[1])], color="white"))


def _tokens(axes: Axes, x: float, y: float, w: float, h: float, color: str) -> None:
    start = x
    for piece, number in (("Once", "539"), ("·upon", "540"), ("·a", "258"), ("·time", "399")):
        width = w * (0.1 + 0.036 * len(piece))
        box = {"facecolor": "#D6E9F5", "edgecolor": color}
        axes.add_patch(Rectangle((start, y + 0.05), width - 0.04, 0.27, **box))
        middle = start + width / 2 - 0.02
        mono = {"ha": "center", "va": "center", "family": "monospace"}
        axes.text(middle, y + 0.19, piece, fontsize=8.5, **mono)
        axes.text(middle, y + 0.5, number, fontsize=8, color=color, **mono)
        start += width


def _layers(axes: Axes, x: float, y: float, w: float, h: float, color: str) -> None:
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x + w, y + h / 2), (x, y + h / 2), arrowprops=arrow)
    for layer in range(4):
        left = x + w * (0.12 + 0.2 * layer)
        for top, height, shade in ((0.0, 0.42, color), (0.58, 0.42, "#8FC1E3")):
            axes.add_patch(Rectangle((left, y + top * h), 0.13 * w, height * h, color=shade))


def _loss(axes: Axes, x: float, y: float, w: float, h: float, color: str) -> None:
    axes.plot([x, x, x + w], [y, y + h, y + h], color="#999999", marker="", linewidth=1)
    steps = [step / 60 for step in range(61)]
    wiggle = [0.05 * math.sin(41 * s) * (1 - s) for s in steps]
    losses = [0.9 * math.exp(-4 * s) + 0.08 + more for s, more in zip(steps, wiggle)]
    axes.plot(
        [x + s * w for s in steps], [y + h * (1 - loss) for loss in losses], color=color, marker=""
    )


def _timeline(axes: Axes, x: float, y: float, w: float, h: float, color: str) -> None:
    lanes = (((0, 0.3), (0.34, 0.1), (0.48, 0.46)), ((0.05, 0.12), (0.3, 0.08), (0.62, 0.3)))
    for lane, bars in enumerate(lanes):
        for place, (start, length) in enumerate(bars):
            shade = color if (lane, place) == (0, 2) else "#F2C7A5"
            corner = x + start * w, y + (0.08 + 0.5 * lane) * h
            axes.add_patch(Rectangle(corner, length * w, 0.34 * h, color=shade))


def _tiles(axes: Axes, x: float, y: float, w: float, h: float, color: str) -> None:
    side = h / 4
    for row in range(4):
        for column in range(4):
            shade = color if (row, column) == (2, 1) else "#F6DCC8" if column <= row else PAPER
            corner = x + w / 2 - 2 * side + column * side, y + row * side
            look = {"facecolor": shade, "edgecolor": "#999999", "linewidth": 0.7}
            axes.add_patch(Rectangle(corner, side, side, **look))


def _ranks(axes: Axes, x: float, y: float, w: float, h: float, color: str) -> None:
    places = [x + w * (0.14 + 0.24 * rank) for rank in range(4)]
    arrow = {"arrowstyle": "<|-|>", "color": INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    for left, right in pairwise(places):
        axes.annotate("", (right - 0.19, y + h / 2), (left + 0.19, y + h / 2), arrowprops=arrow)
    for place in places:
        corner = place - 0.19, y + h / 2 - 0.19
        axes.add_patch(Rectangle(corner, 0.38, 0.38, facecolor="#BFE3D6", edgecolor=color))


def _shares(axes: Axes, x: float, y: float, w: float, h: float, color: str) -> None:
    for rank in range(4):
        for share in range(4):
            shade = color if share == rank else PAPER
            corner = x + w * (0.05 + 0.24 * rank), y + share * h / 4
            look = {"facecolor": shade, "edgecolor": color, "linewidth": 0.8}
            axes.add_patch(Rectangle(corner, 0.18 * w, h / 4, **look))


def _stopwatch(axes: Axes, x: float, y: float, w: float, h: float, color: str) -> None:
    center = x + w / 2, y + 0.54 * h
    axes.add_patch(Circle(center, 0.42 * h, facecolor="white", edgecolor=color, linewidth=2))
    axes.plot([center[0]] * 2, [y, y + 0.1 * h], color=color, marker="", linewidth=4)
    for angle, color_of in ((-0.6, COLORS[1]), (0.9, color)):
        tip = center[0] + 0.3 * h * math.sin(angle), center[1] - 0.3 * h * math.cos(angle)
        axes.plot(*zip(center, tip), color=color_of, marker="", linewidth=1.8)


PICTURES: tuple[Any, ...] = (
    _start,
    _tokens,
    _layers,
    _loss,
    _timeline,
    _tiles,
    _ranks,
    _shares,
    _stopwatch,
)

if __name__ == "__main__":
    print(save_map("artifacts/map.svg"))
