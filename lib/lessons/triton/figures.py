"""Pictures of what the programs of a kernel touched."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Patch, Rectangle

from lib.core.figures import GRAY, INK, VERMILLION

if TYPE_CHECKING:
    from lib.lessons.triton.recorder_triton import Memory, Run

# Lighter colors for many programs; the one for faults is not among them.
TINTS = ["#9fd3ef", "#fbe3b0", "#c9ead6", "#f3cfe0", "#e3dcf6", "#dfe6b8", "#f9d3bf", "#c8d6e5"]
MOST_OUTSIDE = 16


def show_run(run: Run, *, title: str = "", only: int | None = None) -> None:
    """Show each tensor that was loaded or stored as a grid of its elements.

    The number in a cell is the program that touched it; of several, how many (×3). Several that
    store the same element are a fault. Cells behind the end of a tensor are not in it.

    Args:
        only: show this program's accesses, and no others.
    """
    wanted = [
        (name, kind) for name in run.tensors for kind in ("load", "store") if run.of(kind, name)
    ]
    sizes = [_extent(run, name, kind) for name, kind in wanted]
    if not wanted:
        print("The kernel loads and stores nothing.")
        return
    columns = [max(columns, 5) for _, columns in sizes]
    # inches of a cell
    cell = min(0.24, 8.5 / sum(columns))
    figure, panels = plt.subplots(
        ncols=len(wanted),
        figsize=(max(4.5, sum(columns) * cell + 0.5), max(rows for rows, _ in sizes) * cell + 0.8),
        gridspec_kw={"width_ratios": columns},
        squeeze=False,
    )
    for axes, (name, kind), extent in zip(panels.flat, wanted, sizes):
        _draw_cells(axes, run, name, kind, extent, only, 29 * cell)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    if faults := run.faults():
        handles = [Patch(color=VERMILLION, label=faults[0])]
        figure.legend(handles=handles, loc="outside lower left", fontsize=9)
    plt.show()


def _shape_of(memory: Memory) -> tuple[int, int]:
    """Rows and columns in which a tensor is drawn."""
    shape = memory.shape or (1,)
    return (1, shape[0]) if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])


def _outside(run: Run, name: str, kind: str) -> tuple[set[int], set[int]]:
    """Offsets behind the end of a tensor: (touched, masked off)."""
    memory = run.tensors[name]
    end = math.prod(memory.shape)
    touched, masked = set(), set()
    for access in run.of(kind, name):
        for offsets, found in ((access.offsets, touched), (access.masked, masked)):
            # elements of a row behind its end are in the next row, or behind the last
            found |= {int(o) for o in offsets if end <= o < end + MOST_OUTSIDE}
    return touched, masked - touched


def _extent(run: Run, name: str, kind: str) -> tuple[int, int]:
    rows, columns = _shape_of(run.tensors[name])
    outside = set().union(*_outside(run, name, kind))
    extra = max(outside) - rows * columns + 1 if outside else 0
    return (1, columns + extra) if rows == 1 else (rows + math.ceil(extra / columns), columns)


def _draw_cells(
    axes: Axes,
    run: Run,
    name: str,
    kind: str,
    extent: tuple[int, int],
    only: int | None,
    fontsize: float,
) -> None:
    memory = run.tensors[name]
    rows, columns = _shape_of(memory)
    programs: dict[int, list[int]] = {}
    for access in run.of(kind, name):
        if only in (None, access.program):
            for place in memory.place(access.offsets).tolist():
                if place >= 0 and access.program not in programs.setdefault(place, []):
                    programs[place].append(access.program)
    # outside of the layout, and all cells at once: a thousand single ones would take seconds
    small = {"ha": "center", "va": "center", "fontsize": fontsize, "color": INK, "in_layout": False}
    cells, colors = [], []
    for place in range(rows * columns):
        row, column = divmod(place, columns)
        found = programs.get(place, [])
        color = TINTS[found[0] % len(TINTS)] if found else "white"
        if len(found) > 1:
            color = VERMILLION if kind == "store" else GRAY
        cells.append(Rectangle((column, row), 1, 1))
        colors.append(color)
        if found and rows * columns <= 600:
            text = f"×{len(found)}" if len(found) > 1 else str(found[0])
            axes.text(column + 0.5, row + 0.5, text, **small)
    how = {"facecolors": colors, "edgecolors": "#8a8f98", "linewidths": 0.5}
    axes.add_collection(PatchCollection(cells, **how), autolim=False)
    touched, masked = _outside(run, name, kind)
    for offsets, style in (
        (touched, {"facecolor": VERMILLION, "hatch": "///", "edgecolor": "white"}),
        (masked, {"facecolor": "none", "edgecolor": GRAY, "linestyle": ":"}),
    ):
        for offset in offsets:
            row, column = (0, offset) if rows == 1 else divmod(offset, columns)
            axes.add_patch(Rectangle((column, row), 1, 1, **style))
    axes.set(xlim=(-0.1, extent[1] + 0.1), ylim=(extent[0] + 0.1, -0.1), aspect="equal")
    axes.set_title(f"{name}: {kind}s", fontsize=9, fontweight="normal")
    axes.axis("off")
