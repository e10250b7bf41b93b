"""The map of the workbook: its notebooks as stations from raw text to several GPUs.

`python -m lib lessons map` draws it for the README, into artifacts/map.svg.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from lib.core.figures import BLACK, BLUE, GREEN, INK, VERMILLION, house_figure, save_figure

if TYPE_CHECKING:
    from IPython.display import Image


@dataclass(frozen=True)
class Stop:
    """One notebook on the map."""

    name: str
    """The file name without its suffix."""

    title: str
    builds: str
    leaves: str
    """The result that the next notebooks take from here: the label of the arrow."""

    hours: float
    """To read it and do its exercises: about 15 minutes for each of them."""

    minutes: str
    """Run time on two CPU cores."""

    color: str = BLACK


STOPS = (
    Stop("00_start_here", "Start here", "a story, token by token", "raw text", 0.5, "½"),
    Stop("01_tokenizer", "Tokenizer", "BPE: text to numbers", "token\narrays", 3.5, "½", BLUE),
    Stop("02_model", "Model", "a Transformer", "model", 4, "1", BLUE),
    Stop("03_training", "Training", "the loop, and its floor", "training\nstep", 4.5, "1", BLUE),
    Stop(
        "04_profiling", "Profiling", "a clock you can trust", "what\nis slow", 3.5, "1", VERMILLION
    ),
    Stop("05_triton", "Triton", "your first GPU kernels", "kernels", 3, "½", VERMILLION),
    Stop("06_flash_attention", "FlashAttention", "a fast kernel", "fast\nstep", 8, "1", VERMILLION),
    Stop("07_ddp", "Data parallelism", "one model, many ranks", "copies\nof state", 5, "1", GREEN),
    Stop("08_zero1", "ZeRO-1", "sharded optimizer state", "sharded\nstate", 2.5, "1", GREEN),
    Stop("09_fsdp", "FSDP", "everything is sharded", "every\npart", 4, "1", GREEN),
    Stop("10_speedrun", "Speedrun", "a race, and a real run", "a trained model", 1.5, "1"),
)
COLUMNS = 3
ROWS = -(-len(STOPS) // COLUMNS)
# In inches: the size of a card, the distance from one card to the next, the margin around all.
WIDTH, HEIGHT, ACROSS, DOWN, MARGIN = 2.45, 1.72, 3.4, 2.3, 0.15


def show_map() -> Image:
    """The map as a PNG with alternative text."""
    from IPython.display import Image

    file = io.BytesIO()
    with map_figure() as figure:
        figure.savefig(file, format="png")
    return Image(file.getvalue(), format="png", retina=True, alt=map_words())


def save_map(path: str | os.PathLike = "artifacts/map.svg") -> Path:
    """Write the map to `path`, a .svg or a .png, with alternative text in the file."""
    with map_figure() as figure:
        return save_figure(figure, path, alt=map_words())


def map_words() -> str:
    """The alternative text of the map."""
    stations = []
    for stop in STOPS:
        leaves = stop.leaves.replace("\n", " ")
        stations.append(
            f"{stop.name[:2]} {stop.title}, {times(stop)}: {stop.builds}; leads on with: {leaves}"
        )
    return f"A path through the notebooks. {'. '.join(stations)}."


def times(stop: Stop) -> str:
    """How long a notebook takes, as on its card.

    >>> times(STOPS[1])
    '2½ h to read and do, ½ min to run'
    """
    return f"{in_halves(stop.hours)} h to read and do, {stop.minutes} min to run"


def in_halves(hours: float) -> str:
    """Write whole and half hours.

    >>> in_halves(0.5), in_halves(2), in_halves(2.5)
    ('½', '2', '2½')
    """
    return f"{int(hours) or ''}{'½' if hours % 1 else ''}"


def total_hours() -> float:
    """The hours to read all notebooks and do their exercises."""
    return sum(stop.hours for stop in STOPS)


@contextmanager
def map_figure() -> Iterator[Figure]:
    """Cards in rows, each row in the other direction, with arrows between; data are in inches."""
    width = ACROSS * (COLUMNS - 1) + WIDTH + 2 * MARGIN
    height = DOWN * (ROWS - 1) + HEIGHT + 2 * MARGIN
    with house_figure(width=width, height=height, layout="none") as (figure, axes):
        axes.set_position((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(0, height))
        axes.axis("off")
        corners = [_corner(index) for index in range(len(STOPS))]
        for (x, y), stop, draw in zip(corners, STOPS, PICTURES, strict=True):
            _draw_card(axes, x, y, stop)
            box = (x + 0.14, y + 0.58, WIDTH - 0.28, 0.74)
            picture = axes.inset_axes(box, transform=axes.transData)
            draw(picture, stop.color)
            picture.axis("off")
        for start, end, stop in zip(corners, corners[1:], STOPS):
            _draw_arrow(axes, start, end, stop.leaves)
        yield figure


def _corner(index: int) -> tuple[float, float]:
    """The lower left corner of a card."""
    row, column = divmod(index, COLUMNS)
    if row % 2:
        column = COLUMNS - 1 - column
    return MARGIN + column * ACROSS, MARGIN + (ROWS - 1 - row) * DOWN


def _draw_card(axes: Axes, x: float, y: float, stop: Stop) -> None:
    style = {"boxstyle": "round,pad=0,rounding_size=0.1", "facecolor": "white", "linewidth": 1.6}
    axes.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, edgecolor=stop.color, **style))
    axes.text(x + 0.12, y + 1.46, stop.name[:2], color=stop.color, weight="bold", fontsize=12)
    axes.text(x + 0.44, y + 1.46, stop.title, weight="bold", fontsize=12)
    axes.text(x + 0.12, y + 0.36, stop.builds, fontsize=10.5)
    axes.text(x + 0.12, y + 0.13, times(stop), fontsize=9, color=INK)


def _draw_arrow(axes: Axes, start: tuple, end: tuple, label: str) -> None:
    is_across = start[1] == end[1]
    # from center to center, shortened by half a card, in points
    half_card = 36 * (WIDTH if is_across else HEIGHT)
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.4}
    style |= {"shrinkA": half_card, "shrinkB": half_card}
    (x1, y1), (x2, y2) = ((x + WIDTH / 2, y + HEIGHT / 2) for x, y in (start, end))
    axes.annotate("", (x2, y2), (x1, y1), arrowprops=style)
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    if is_across:
        axes.text(x, y + 0.08, label, ha="center")
    else:
        axes.text(x + 0.1, y, label.replace("\n", " "), va="center")


# The small pictures; each fills axes of its own.


def _start(axes: Axes, color: str) -> None:
    axes.plot(0, 0, marker="o", markersize=34, color=color)
    axes.plot(0, 0, marker=">", markersize=14, color="white")


def _tokens(axes: Axes, color: str) -> None:
    axes.set(xlim=(-0.4, 3.4), ylim=(0, 1))
    style = {"family": "monospace", "ha": "center", "va": "center", "fontsize": 8.5}
    for place, (piece, number) in enumerate(
        {"Once": 539, "·upon": 540, "·a": 258, "·time": 399}.items()
    ):
        axes.text(place, 0.7, piece, bbox={"facecolor": "white", "edgecolor": color}, **style)
        axes.text(place, 0.15, number, color=color, **style)


def _layers(axes: Axes, color: str) -> None:
    axes.bar(range(4), 0.4, color=color)
    axes.bar(range(4), 0.4, bottom=0.6, color=color, alpha=0.4)


def _loss(axes: Axes, color: str) -> None:
    step = np.linspace(0, 1, 61)
    axes.plot(
        step, np.exp(-4 * step) + 0.05 * np.sin(41 * step) * (1 - step), color=color, marker=""
    )


def _timeline(axes: Axes, color: str) -> None:
    axes.broken_barh([(0, 30), (34, 10), (48, 46)], (0.6, 0.35), color=color)
    axes.broken_barh([(5, 12), (30, 8), (62, 30)], (0.1, 0.35), color=color, alpha=0.4)


def _programs(axes: Axes, color: str) -> None:
    for program, alpha in enumerate((1, 0.6, 0.3)):
        for row in (0, 1.1):
            axes.bar((2 * program, 2 * program + 1), 1, 0.9, row, color=color, alpha=alpha)


def _tiles(axes: Axes, color: str) -> None:
    rows, columns = np.tril_indices(4)
    axes.plot(columns, -rows, marker="s", markersize=10, linestyle="", color=color)
    axes.set(xlim=(-4, 7), ylim=(-3.5, 0.5))


def _ranks(axes: Axes, color: str) -> None:
    axes.plot(range(4), [0] * 4, marker="s", markersize=24, color=color)
    axes.margins(x=0.2)


def _shards(axes: Axes, color: str) -> None:
    axes.bar(range(4), 4, color="white", edgecolor=color)
    axes.bar(range(4), 1, bottom=[3, 2, 1, 0], color=color)


def _slices(axes: Axes, color: str) -> None:
    for rank in range(4):
        axes.bar(range(4), 1, bottom=rank, color="white", edgecolor=color)
        axes.bar(rank, 1, bottom=3 - rank, color=color)
        axes.bar(rank, 1, bottom=(4 - rank) % 4, color=color, alpha=0.4)


def _stopwatch(axes: Axes, color: str) -> None:
    axes.pie(
        [1, 5],
        colors=[VERMILLION, "white"],
        startangle=90,
        counterclock=False,
        radius=1.2,
        wedgeprops={"edgecolor": color, "linewidth": 1.5},
    )


PICTURES: tuple[Callable[[Axes, str], None], ...] = (
    _start, _tokens, _layers, _loss, _timeline, _programs, _tiles, _ranks, _shards, _slices,
    _stopwatch,
)  # fmt: skip
