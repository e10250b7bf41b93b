"""Figures of the language-model matrix: time, memory, speed, losses; a panel for each section."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lib.plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    SKY,
    VERMILLION,
    house_figure,
    save_figure,
)

COLORS = {
    "none": BLACK,
    "naive": SKY,
    "flat": GREEN,
    "overlap": PURPLE,
    "flashddp": VERMILLION,
    "torch_ddp": BLUE,
}
# For the kernels in one panel.
LINES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 3)))


@dataclass(frozen=True)
class Section:
    """What may be compared: the cells of one model on one machine in one setting."""

    title: str
    rows: tuple[Mapping[str, Any], ...]
    """One for each kernel and wrapper; see `lib.benchmark_lm_matrix_report.matrix_rows`."""


def save_time_figure(sections: Sequence[Section], path: str | os.PathLike) -> Path:
    """Milliseconds a step, with the part in which communication is exposed hatched."""
    return _save_bars(sections, path, "median_ms", "time a step (ms)", _mark_exposed)


def save_memory_figure(sections: Sequence[Section], path: str | os.PathLike) -> Path:
    """Peak memory of a rank, and above each bar what it is beyond that of `none`."""
    return _save_bars(
        sections, path, "peak_memory_mb", "peak memory of a rank (MB)", _mark_overhead
    )


def save_throughput_figure(sections: Sequence[Section], path: str | os.PathLike) -> Path:
    """Tokens/s of all ranks, and above each bar the scaling efficiency."""
    return _save_bars(sections, path, "tokens_per_s", "tokens/s of all ranks", _mark_efficiency)


@contextlib.contextmanager
def _panels(count: int, *, most: int, width: float, parts: int = 1) -> Iterator[tuple]:
    """A figure for so many sections, from four on side by side; the places left over are blank.

    Args:
        most: sections in a row, where there are more than three.
        width: inches, of one section in a row.
        parts: panels of a section.
    """
    across = most if count > 3 else 1
    down = -(-count // across)
    # side by side, a section has half the width and more, so that its words stay legible
    size = {"width": width * (1 + 0.65 * (across - 1)), "height": 3.2 * down + 0.7}
    with house_figure(nrows=down, ncols=across * parts, squeeze=False, **size) as (figure, grid):
        for axes in grid.flat[count * parts :]:
            axes.set_axis_off()
        yield figure, grid


def _title(axes: Axes, section: Section) -> None:
    lines = [textwrap.fill(part, 75) for part in section.title.split("; ", 1)]
    axes.set_title("\n".join(lines), fontsize=9)


def _save_bars(
    sections: Sequence[Section], path: str | os.PathLike, key: str, label: str, mark: Any
) -> Path:
    """Groups of bars by kernel, one for each wrapper; a word where there is no figure."""
    with _panels(len(sections), most=3, width=9.5) as (figure, grid):
        for axes, section in zip(grid.flat, sections):
            kernels = list(dict.fromkeys(row["kernel"] for row in section.rows))
            wrappers = _wrappers([section])
            width = 0.86 / len(wrappers)
            for row in section.rows:
                place = wrappers.index(row["wrapper"]) - (len(wrappers) - 1) / 2
                x = kernels.index(row["kernel"]) + place * width
                if row.get(key) is None:
                    word = row["status"] if row["status"] != "ok" else "not known"
                    axes.text(x, 0, f" {word}", rotation=90, ha="center", va="bottom", fontsize=8)
                    continue
                axes.bar(x, row[key], width * 0.94, color=COLORS[row["wrapper"]])
                mark(axes, x, width, row)
            axes.set_xticks(range(len(kernels)), kernels)
            axes.set_xlim(-0.5, len(kernels) - 0.5)
            axes.set(xlabel="attention kernel", ylabel=label)
            _title(axes, section)
            axes.grid(visible=False, axis="x")
            axes.yaxis.set_major_formatter("{x:,.4g}" if key == "median_ms" else "{x:,.0f}")
            axes.margins(y=0.17)
        handles = [Patch(color=COLORS[name], label=name) for name in _wrappers(sections)]
        if mark is _mark_exposed:
            hatch = {"facecolor": GREY, "edgecolor": "white", "hatch": "////", "linewidth": 0}
            handles.append(Patch(label="exposed communication", **hatch))
        _add_legend(figure, handles)
        return save_figure(figure, path)


def _mark_exposed(axes: Axes, x: float, width: float, row: Mapping[str, Any]) -> None:
    """The time above the bar, and hatched at its top the communication that is exposed."""
    exposed = min(row.get("exposed_communication_ms") or 0.0, row["median_ms"])
    if exposed:
        style = {"color": "none", "edgecolor": "white", "hatch": "////", "linewidth": 0}
        axes.bar(x, exposed, width * 0.94, bottom=row["median_ms"] - exposed, **style)
    _write(axes, x, width, row["median_ms"], f"{row['median_ms']:.3g}")


def _mark_overhead(axes: Axes, x: float, width: float, row: Mapping[str, Any]) -> None:
    overhead = row.get("memory_overhead")
    if overhead is not None and row["wrapper"] != "none":
        _write(axes, x, width, row["peak_memory_mb"], f"{overhead:+.1%}")


def _mark_efficiency(axes: Axes, x: float, width: float, row: Mapping[str, Any]) -> None:
    efficiency = row.get("scaling_efficiency")
    if efficiency is not None and row["wrapper"] != "none":
        _write(axes, x, width, row["tokens_per_s"], f"{efficiency:.0%}")


def _write(axes: Axes, x: float, width: float, y: float, text: str) -> None:
    place = {"xytext": (0, 2), "textcoords": "offset points"}
    if width < 0.16 and len(text) > 4:
        place |= {"rotation": 60, "xytext": (2, 2)}
    axes.annotate(text, (x, y), ha="center", va="bottom", fontsize=7, **place)


def save_losses_figure(sections: Sequence[Section], path: str | os.PathLike) -> Path:
    """Losses of the first steps over those of one process, and how far they are apart.

    Of the sections where losses were kept; one without any stands for all if no other does.
    """
    sections = [s for s in sections if any(row.get("losses") for row in s.rows)] or sections[:1]
    drawn: list[list[Mapping[str, Any]]] = []
    with _panels(len(sections), most=2, width=11.0, parts=2) as (figure, grid):
        for (left, right), section in zip(grid.reshape(-1, 2), sections):
            rows = [row for row in section.rows if row.get("losses")]
            drawn.append(rows)
            _draw_losses(left, rows)
            _draw_differences(right, rows)
            _title(left, section)
            right.set_title("difference to one process\non the batches of all ranks", fontsize=9)
        names = [n for n in COLORS if any(r["wrapper"] == n for rows in drawn for r in rows)]
        handles = [Line2D([], [], color=COLORS[name], label=name) for name in names]
        handles.insert(0, Line2D([], [], color=GREY, linewidth=7, label="one process"))
        _add_legend(figure, handles)
        return save_figure(figure, path)


def _draw_losses(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    for kernel in kernels:
        of_kernel = [row for row in rows if row["kernel"] == kernel]
        reference = of_kernel[0].get("reference_losses") or []
        wide = {"color": GREY, "linewidth": 7, "marker": "", "solid_capstyle": "round"}
        axes.plot(range(1, len(reference) + 1), reference, **wide)
        for place, row in enumerate(of_kernel):
            steps = range(1, len(row["losses"]) + 1)
            # each shows a stretch of its own where all lie on one another
            style = {"linestyle": (2 * place, (2, 2 * len(of_kernel) - 2)), "marker": ""}
            style = style if len(of_kernel) > 1 else {"linestyle": "-", "marker": ""}
            axes.plot(steps, row["losses"], color=COLORS[row["wrapper"]], **style)
    _label(axes, rows, "loss (nats per token)")


def _draw_differences(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    for row in rows:
        pairs = zip(row["losses"], row.get("reference_losses") or [])
        points = [(step, abs(a - b)) for step, (a, b) in enumerate(pairs, start=1) if a != b]
        style = {"linestyle": LINES[kernels.index(row["kernel"])], "linewidth": 1.2}
        if points:
            axes.plot(*zip(*points), color=COLORS[row["wrapper"]], markersize=3, **style)
    if axes.lines:
        axes.set_yscale("log")
    else:
        axes.set_yticks([])
        is_compared = any(row.get("reference_losses") for row in rows)
        words = "equal to the last bit" if is_compared else "not compared"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center")
    _label(axes, rows, "|difference| (nats per token)")


def _label(axes: Axes, rows: Sequence[Mapping[str, Any]], label: str) -> None:
    steps = max((len(row["losses"]) for row in rows), default=1)
    axes.set(xlabel="training step", ylabel=label, xlim=(0, steps + 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _wrappers(sections: Sequence[Section]) -> list[str]:
    """Those that were measured, in the order of `COLORS`."""
    present = {row["wrapper"] for section in sections for row in section.rows}
    return [wrapper for wrapper in COLORS if wrapper in present]


def _add_legend(figure: Figure, handles: Sequence[Any]) -> None:
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", fontsize="small")
