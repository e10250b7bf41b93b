"""Figures of sharded training: where a rank's bytes go, and what a step takes."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lib.plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
    house_figure,
    save_figure,
)
from lib.plots_lm_matrix import Section

# Kinds of bytes from the bottom up; what a peak has beyond them is above.
KIND_COLORS = {"parameters": BLUE, "optimizer_state": VERMILLION, "gradients": GREEN}
KIND_NAMES = {"parameters": "weights", "optimizer_state": "state", "gradients": "gradients"}
BEYOND, BEYOND_COLOR = "beyond them at the peak: activations, buffers", GREY
METHOD_COLORS = {
    "none": BLACK,
    "flashddp": VERMILLION,
    "flashddp+zero1": SKY,
    "flashddp+zero1_parameters": GREEN,
    "zero1": BLUE,
    "torch_ddp+torch_zero": ORANGE,
    "fsdp2": PURPLE,
}


@dataclass(frozen=True)
class RankBar:
    """What one rank holds: bytes of each of `KIND_COLORS`, and of `peak`."""

    group: str
    """Bars of one group stand together, such as those of so many ranks."""

    name: str
    """Such as how the optimizer is sharded."""

    predicted: Mapping[str, int]
    """By formula; drawn hatched."""

    measured: Mapping[str, int] | None = None


def save_sharding_memory_figure(
    panels: Mapping[str, Sequence[RankBar]], path: str | os.PathLike, *, title: str = ""
) -> Path:
    """Stacked bars of bytes by model, ranks and method: measured, and hatched by formula."""
    columns = min(3, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    size = {"width": 4.6 * columns, "height": 3.5 * rows + 0.8}
    with house_figure(nrows=rows, ncols=columns, squeeze=False, **size) as (figure, grid):
        for axes, (model, bars) in zip(grid.flat, panels.items()):
            draw_rank_bars(axes, bars)
            axes.set_title(model)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        handles = [Patch(color=KIND_COLORS[kind], label=KIND_NAMES[kind]) for kind in KIND_COLORS]
        handles.append(Patch(color=BEYOND_COLOR, label=BEYOND))
        hatched = {"facecolor": PAPER, "edgecolor": BLACK, "hatch": "////", "linewidth": 0}
        handles += [Patch(label="by formula", **hatched)]
        figure.legend(handles=handles, ncols=3, loc="outside lower center", fontsize="small")
        if title:
            figure.suptitle(title, fontsize="medium")
        return save_figure(figure, path)


def draw_rank_bars(axes: Axes, bars: Sequence[RankBar]) -> None:
    """A bar for each of `bars`, and beside it what was measured; groups stand apart."""
    largest = max(max(bar.predicted["peak"], (bar.measured or {}).get("peak", 0)) for bar in bars)
    unit, size = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    place, places, names, groups = 0.0, [], [], {}
    for bar in bars:
        if groups and bar.group not in groups:
            place += 0.7
        found = [(bar.predicted, True)]
        if bar.measured is not None:
            found = [(bar.measured, False), (bar.predicted, True)]
        width = 0.86 / len(found)
        for index, (kinds, is_hatched) in enumerate(found):
            x = place + (index - (len(found) - 1) / 2) * width
            _stack(axes, x, width * 0.94, kinds, size, is_hatched)
        places.append(place)
        names.append(bar.name)
        groups.setdefault(bar.group, []).append(place)
        place += 1
    axes.set_xticks(places, names, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    for group, of_group in groups.items():
        axes.text(
            sum(of_group) / len(of_group),
            1.0,
            group,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=8,
        )
    axes.set(xlabel="method", ylabel=f"peak memory of a rank ({unit})")
    axes.set_ylim(top=1.12 * largest / size)
    axes.grid(visible=False, axis="x")


def _stack(
    axes: Axes, x: float, width: float, kinds: Mapping[str, int], size: float, is_hatched: bool
) -> None:
    bottom = 0.0
    style = {"hatch": "////", "edgecolor": PAPER, "linewidth": 0} if is_hatched else {}
    beyond = kinds["peak"] - sum(kinds[kind] for kind in KIND_COLORS)
    for color, num_bytes in (
        *((color, kinds[kind]) for kind, color in KIND_COLORS.items()),
        (BEYOND_COLOR, max(0, beyond)),
    ):
        axes.bar(x, num_bytes / size, width, bottom=bottom, color=color, **style)
        bottom += num_bytes / size


def save_sharding_time_figure(sections: Sequence[Section], path: str | os.PathLike) -> Path:
    """Milliseconds a step by method, half the IQR to each side, and the ratio to `flashddp`."""
    counts = [len(section.rows) for section in sections] or [1]
    columns = min(2, len(counts))
    highest = [max(counts[at : at + columns]) for at in range(0, len(counts), columns)]
    size = {"width": 8.5 * columns, "height": sum(0.42 * count + 1.2 for count in highest)}
    grid = {"nrows": len(highest), "ncols": columns, "squeeze": False}
    with house_figure(**grid, gridspec_kw={"height_ratios": highest}, **size) as (figure, panels):
        for axes, section in itertools.zip_longest(panels.flat, sections):
            if section is None:
                axes.set_axis_off()
            else:
                _draw_times(axes, section)
        figure.align_ylabels()
        return save_figure(figure, path)


def _draw_times(axes: Axes, section: Section) -> None:
    rows = section.rows[::-1]
    for place, row in enumerate(rows):
        if row["status"] != "ok":
            axes.text(0, place, f" {row['status']}", va="center", fontsize=10)
            continue
        spread = (row["iqr_ms"] or 0) / 2
        color = METHOD_COLORS[row["method"]]
        axes.barh(place, row["median_ms"], 0.7, color=color, xerr=spread, ecolor=BLACK)
        text = f"{row['median_ms']:.3g} ms"
        if row["step_ratio"] is not None:
            text += f", {row['step_ratio']:.3f}"
        axes.annotate(
            text,
            (row["median_ms"] + spread, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
        )
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set(xlabel="time a step (ms), and its ratio to flashddp", ylabel="method")
    axes.set_title(section.title.replace("; ", "\n", 1), fontsize="medium")
    axes.grid(visible=False, axis="y")
