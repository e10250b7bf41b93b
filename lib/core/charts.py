"""Charts in the house style: `lines`, `bars`, `heat`, `gantt` and `roofline`. A chart is a call.

The caller gives the data, a title, and the labels of the axes with their units. Without `axes` a
chart is a figure of its own, shown at once, as in a notebook's cell. With `axes` it is drawn there:
one of several panels, or a figure for `lib.core.figures.save_figure`.

    lines(
        {"naive": {1024: 2.1, 2048: 8.3}, "fused": {1024: 0.4, 2048: 1.3}},
        title="Time of a call",
        xlabel="tokens",
        ylabel="time (ms)",
        log="xy",
    )

Everywhere, `styles` maps the name of a series, a bar, a part or a kind to properties as matplotlib
takes them, such as `{"color": BLUE, "linestyle": "--"}`; what it doesn't name has the house's
colors in order. `legend` is "best" (inside), "right", "below" or "none". `size` is the width and
height of a figure of its own, in inches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize, to_rgb
from matplotlib.patches import Patch, Rectangle
from matplotlib.path import Path
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from lib.core.figures import BLUE, COLORS, GRAY, GRID, INK, MARKERS, PAPER, STYLE

# From the background of a figure to the house's blue, darkening all the way.
SHADES = LinearSegmentedColormap.from_list("shades", [PAPER, "#8FC1E3", BLUE, "#00304D"])
# Frames of more boxes than this in a lane would hide the boxes.
MOST_FRAMES = 200
# The width of a letter in a box, in inches.
LETTER = 0.07
# Directions from a point to its name, the best ones first, and how a name is aligned there.
AROUND = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
SIDES = {0: ("center", "center"), 1: ("left", "bottom"), -1: ("right", "top")}

Size = tuple[float, float]
Styles = Mapping[Any, Mapping[str, Any]]


def lines(
    series: Mapping[str, Any],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    axes: Axes | None = None,
    log: str = "",
    xticks: Sequence[float] = (),
    ylim: tuple[float | None, float | None] | None = None,
    levels: Mapping[str, float] | None = None,
    styles: Styles | None = None,
    legend: str = "best",
    size: Size = (7.0, 3.4),
) -> None:
    """Draw a line for each series.

    Args:
        series: name -> y by x, as a mapping or a pandas Series, or a sequence of y at 0, 1, 2, …
            A DataFrame has a line for each column.
        log: axes that are logarithmic: "", "x", "y" or "xy".
        xticks: where x is labeled; as matplotlib chooses by default.
        ylim: lowest and highest y; None where the data decide.
        levels: name -> y of a horizontal line, with its name on the right.
    """
    with _canvas(axes, size, title, xlabel, ylabel) as axes:
        for index, (name, points) in enumerate(series.items()):
            pairs = points.items() if hasattr(points, "items") else enumerate(np.asarray(points))
            points = dict(pairs)
            style: dict = {"color": COLORS[index % len(COLORS)], "label": name}
            style["marker"] = MARKERS[index % len(MARKERS)] if len(points) <= 30 else ""
            style |= (styles or {}).get(name, {})
            axes.plot(list(points), list(points.values()), **style)
        axes.set(**{f"{axis}scale": "log" for axis in log})
        if ylim is not None:
            axes.set_ylim(*ylim)
        for name, level in (levels or {}).items():
            axes.axhline(level, color=INK, linewidth=1.2, linestyle=":", marker="")
            place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 9}
            axes.text(1.01, level, name, **place)
        for axis in log:
            _plain_log_ticks(getattr(axes, f"{axis}axis"))
        if len(xticks):
            axes.set_xticks(xticks, [f"{x:,.10g}" for x in xticks])
            axes.xaxis.set_minor_locator(NullLocator())
        _add_legend(axes, legend)


def bars(
    values: Mapping[Any, Any],
    *,
    title: str,
    xlabel: str,
    ylabel: str = "",
    axes: Axes | None = None,
    upright: bool = False,
    stacked: bool = False,
    texts: str | Mapping[str, str] = "",
    names: Sequence[str] | None = None,
    styles: Styles | None = None,
    legend: str = "best",
    size: Size | None = None,
) -> None:
    """Draw a bar for each value, or for each part of it: in rows, or `upright`.

    Args:
        values: name -> a number, or name -> {part: number}; a DataFrame has a name for each column.
            A word in place of a number, such as "oom", is written where the bar would be; None
            leaves it out.
        stacked: parts one after another instead of side by side.
        texts: what is written at the end of bars: a format of the value, such as "{:.3g}", or
            name -> words for bars without parts. If `stacked`, the value is the sum.
        names: what is written beside the bars, if it isn't the names in `values`.
        styles: of the parts; of the bars, if they have none.
    """
    has_parts = any(hasattr(value, "items") for value in values.values())
    rows = {name: dict(v.items()) if has_parts else {name: v} for name, v in values.items()}
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    looks = {part: {"color": COLORS[i * has_parts % len(COLORS)]} for i, part in enumerate(parts)}
    looks = {part: look | dict((styles or {}).get(part, {})) for part, look in looks.items()}
    beside = len(parts) if has_parts and not stacked else 1
    thick = 0.8 / beside
    offsets = {p: (i % beside - (beside - 1) / 2) * thick for i, p in enumerate(parts)}
    size = size or ((9.0, 3.2) if upright else (7.0, 1.1 + 0.42 * len(rows)))
    with _canvas(axes, size, title, xlabel, ylabel) as axes:
        draw, start = (axes.bar, "bottom") if upright else (axes.barh, "left")
        totals = dict.fromkeys(rows, 0.0)
        for part in parts:
            drawn = []
            for row, (name, found) in enumerate(rows.items()):
                value, place = found.get(part), row + offsets[part]
                words = value if isinstance(value, str) else ""
                if _is_number(value):
                    drawn.append((place, value, totals[name]))
                    totals[name] += value * stacked
                    words = texts.format(value) if isinstance(texts, str) else texts.get(name, "")
                if not stacked:
                    end = value if _is_number(value) else 0
                    _write_at_end(axes, place, end, words, upright)
            places, numbers, starts = zip(*drawn) if drawn else ((), (), ())
            label = part if has_parts else None
            draw(places, numbers, thick, label=label, **{start: starts}, **looks[part])
        if stacked and isinstance(texts, str):
            for row, total in enumerate(totals.values()):
                _write_at_end(axes, row, total, texts.format(total), upright)
        _label_bars(axes, names or list(rows), upright=upright, room=0.16 if texts else 0.05)
        _add_legend(axes, legend)


def _write_at_end(axes: Axes, place: float, value: float, words: str, upright: bool) -> None:
    if words:
        at, aligned = ((place, value), "center") if upright else ((value, place), "left")
        offset = {"xytext": (0, 3) if upright else (4, 0), "textcoords": "offset points"}
        vertical = "bottom" if upright else "center"
        axes.annotate(words, at, ha=aligned, va=vertical, fontsize=9, **offset)


def _label_bars(axes: Axes, names: Sequence[str], *, upright: bool, room: float) -> None:
    """Name the bars, and leave `room` for what is written at their ends, a share of the axis."""
    if upright:
        axes.set_xticks(range(len(names)), names, rotation=_rotation(names))
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.margins(y=room)
    else:
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.margins(x=room)
    axes.grid(visible=False, axis="x" if upright else "y")


def heat(
    values: Any,
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    axes: Axes | None = None,
    rows: Sequence[Any] | None = None,
    columns: Sequence[Any] | None = None,
    texts: str | Any = "",
    kinds: Mapping[str, str] | None = None,
    framed: Any = None,
    norm: Normalize | None = None,
    scale: str = "",
    square: bool = True,
    legend: str = "right",
    size: Size = (6.4, 5.0),
) -> None:
    """Draw a matrix as cells, the first row above: darker is more, or a color for each kind.

    Args:
        values: (rows, columns) numbers, or names of `kinds`; of a DataFrame, index and columns are
            the names of `rows` and `columns`.
        rows, columns: what is written beside and below; None: the index, as matplotlib chooses.
        texts: what is written in the cells: a format of the value, or (rows, columns) words.
        kinds: kind -> color, for values that are kinds; explained in the legend.
        framed: (rows, columns), true for cells with a bold frame.
        norm: how numbers become shades (default: from lowest to highest).
        scale: the label of a bar that explains the shades; there is none without it.
        square: cells are as high as wide.
    """
    if hasattr(values, "columns"):
        rows, columns = rows or list(values.index), columns or list(values.columns)
    cells, shades = np.asarray(values), SHADES
    if cells.ndim != 2:
        raise ValueError(f"values must have rows and columns, got shape {cells.shape}")
    if kinds:
        numbers = np.vectorize(list(kinds).index, otypes=[float])(cells)
        shades, norm = ListedColormap(list(kinds.values())), Normalize(-0.5, len(kinds) - 0.5)
    else:
        numbers = cells.astype(float)
        norm = norm or Normalize(np.nanmin(numbers), np.nanmax(numbers))
    height, width = cells.shape
    with _canvas(axes, size, title, xlabel, ylabel) as axes:
        edges = np.arange(width + 1) - 0.5, np.arange(height + 1) - 0.5
        frame = {"edgecolors": GRID, "linewidth": 0.5 if cells.size <= 10_000 else 0}
        mesh = axes.pcolormesh(*edges, numbers, cmap=shades, norm=norm, **frame)
        _write_cells(axes, cells, shades(norm(numbers)), texts)
        for row, column in np.argwhere(framed) if framed is not None else ():
            box = {"facecolor": "none", "edgecolor": INK, "linewidth": 2.2, "zorder": 3}
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **box))
        _name_cells(axes, cells.shape, rows, columns)
        axes.set_aspect("equal" if square else "auto")
        if scale:
            bar = axes.figure.colorbar(mesh, ax=axes, shrink=0.6, label=scale)
            bar.outline.set_visible(False)
        named = [Patch(fc=color, ec=GRID, label=kind) for kind, color in (kinds or {}).items()]
        _add_legend(axes, legend, named)


def _name_cells(
    axes: Axes, shape: tuple[int, int], rows: Sequence | None, columns: Sequence | None
) -> None:
    """Name rows and columns, from the first row above; by their index where there are no names."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if rows is not None:
        axes.set_yticks(range(shape[0]), rows)
    if columns is not None:
        axes.set_xticks(range(shape[1]), columns, rotation=_rotation(columns))
    axes.set(xlim=(-0.6, shape[1] - 0.4), ylim=(shape[0] - 0.4, -0.6))
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _write_cells(axes: Axes, cells: np.ndarray, colors: np.ndarray, texts: str | Any) -> None:
    if isinstance(texts, str) and not texts:
        return
    for (row, column), value in np.ndenumerate(cells):
        words = texts.format(value) if isinstance(texts, str) else np.asarray(texts)[row, column]
        style = {"ha": "center", "va": "center", "fontsize": 9}
        axes.text(column, row, str(words), color=ink_on(colors[row, column]), **style)


def gantt(
    lanes: Mapping[str, Sequence[tuple]],
    *,
    title: str,
    xlabel: str,
    ylabel: str = "",
    axes: Axes | None = None,
    span: tuple[float, float] | None = None,
    styles: Styles | None = None,
    legend: str = "right",
    size: Size | None = None,
) -> None:
    """Draw who did what and when: lanes of boxes over a common time.

    Args:
        lanes: name -> (start, end, kind) or (start, end, kind, words) of its boxes; lanes are drawn
            from above, and boxes over those before them. Words are left out where they don't fit.
        span: the part of the time to show (default: from 0 to the end of the last box).
        styles: of the kinds. A kind that begins with "_" is not in the legend.
    """
    boxes = [box for lane in lanes.values() for box in lane]
    kinds = dict.fromkeys(box[2] for box in boxes)
    looks = {kind: {"facecolor": COLORS[i % len(COLORS)]} for i, kind in enumerate(kinds)}
    for kind, style in (styles or {}).items():
        looks[kind] = {"facecolor": style.get("color", GRAY)} | dict(style)
        looks[kind].pop("color", None)
    first, last = span or (0.0, max((box[1] for box in boxes), default=1.0))
    with _canvas(axes, size or (9.0, 1.2 + 0.5 * len(lanes)), title, xlabel, ylabel) as axes:
        explained: set[str] = set()
        inches = axes.get_position().width * axes.figure.get_figwidth()
        for row, lane in enumerate(lanes.values()):
            shown = [box for box in lane if box[1] > first and box[0] < last]
            # boxes thinner than a pixel are drawn pale; snapped to pixels, most would vanish
            frame: dict[str, Any] = {"edgecolor": PAPER, "linewidth": 0.6}
            if len(shown) > MOST_FRAMES:
                frame |= {"linewidth": 0, "snap": False}
            for kind in dict.fromkeys(box[2] for box in shown):
                found = [(box[0], box[1] - box[0]) for box in shown if box[2] == kind]
                label = kind if kind not in explained else None
                axes.broken_barh(found, (row - 0.4, 0.8), label=label, **frame | looks[kind])
                explained.add(kind)
            for start, end, kind, *words in shown:
                left, right = max(start, first), min(end, last)
                text = str(*words)
                if text and (right - left) * inches > LETTER * len(text) * (last - first):
                    ink = ink_on(looks[kind]["facecolor"])
                    style = {"ha": "center", "va": "center", "fontsize": 9, "color": ink}
                    axes.text((left + right) / 2, row, text, **style)
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.set(xlim=(first, last), ylim=(len(lanes) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")
        _add_legend(axes, legend)


def roofline(
    flops_per_s: float,
    bytes_per_s: float,
    points: Mapping[str, tuple[float, float]],
    *,
    title: str,
    axes: Axes | None = None,
    styles: Styles | None = None,
    legend: str = "right",
    size: Size = (9.0, 4.2),
) -> None:
    """Draw the roof of a machine, and operations below it.

    Args:
        flops_per_s, bytes_per_s: the highest rates of arithmetic and of memory.
        points: name -> (arithmetic intensity in FLOP/byte, rate in FLOP/s).
        legend: as elsewhere, or "direct": each point has its name beside it.
    """
    ridge = flops_per_s / bytes_per_s
    unit, divisor = ("TFLOP/s", 1e12) if flops_per_s >= 1e13 else ("GFLOP/s", 1e9)
    intensities = [intensity for intensity, _ in points.values()] or [ridge / 300]
    low, high = min(*intensities, ridge) / 3, max(*intensities, ridge) * 4
    # names need room
    high *= 4 if legend == "direct" else 1
    labels = ("arithmetic intensity (FLOP/byte)", f"performance ({unit})")
    with _canvas(axes, size, title, *labels) as axes:
        x = np.array([low, ridge, high])
        roof = np.minimum(x * bytes_per_s, flops_per_s) / divisor
        axes.plot(x, roof, color=INK, marker="")
        axes.axvline(ridge, color=INK, linewidth=0.8, linestyle=":", marker="")
        axes.text(ridge, 0.02, " ridge", fontsize=9, transform=axes.get_xaxis_transform())
        for index, (name, (intensity, rate)) in enumerate(points.items()):
            # hollow: points at one spot stay visible
            style: dict = {"markerfacecolor": "none", "markeredgewidth": 1.6, "markersize": 9}
            style |= {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
            style |= {"linestyle": "", "label": name} | dict((styles or {}).get(name, {}))
            axes.plot([intensity], [rate / divisor], **style)
        lowest = min([rate / divisor for _, rate in points.values()], default=roof[0])
        axes.set(xscale="log", yscale="log")
        axes.set(xlim=(low, high), ylim=(min(lowest, roof[0]) / 2, roof[-1] * 2.5))
        if legend == "direct":
            _name_points(axes, {name: (x, rate / divisor) for name, (x, rate) in points.items()})
        else:
            _add_legend(axes, legend)


def _name_points(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write each name in the nearest free place around its point, with a line to it from afar."""
    axes.figure.draw_without_rendering()
    roof_and_ridge = [line.get_path().transformed(line.get_transform()) for line in axes.lines[:2]]
    centers = [axes.transData.transform(point) for point in points.values()]
    taken = [Bbox([center - 8, center + 8]) for center in centers]
    taken += [text.get_window_extent() for text in axes.texts]

    def is_free(marker: Bbox, box: Bbox) -> bool:
        """Whether a name fits in `box`, and nothing is between it and its point."""
        center = np.mean(marker, 0)
        way = Path([center, np.clip(center, box.min, box.max)])
        others = [other for other in taken if not other.contains(*center)]
        return (
            axes.bbox.contains(*box.min)
            and axes.bbox.contains(*box.max)
            and not box.count_overlaps(taken)
            and not any(line.intersects_bbox(box, filled=False) for line in roof_and_ridge)
            and not any(way.intersects_bbox(other) for other in others)
        )

    how: dict = {"textcoords": "offset points", "fontsize": 9}
    markers = dict(zip(points, taken))
    for name, point in sorted(points.items(), key=lambda item: -item[1][1]):
        for away, (right, up) in itertools.product(range(8, 120, 8), AROUND):
            sides = {"ha": SIDES[right][0], "va": SIDES[up][1]}
            text = axes.annotate(name, point, (away * right, away * up), **sides, **how)
            box = text.get_window_extent().padded(2)
            if is_free(markers[name], box):
                break
            text.remove()
        else:
            away, right, up = 8, 1, 0
            text = axes.annotate(name, point, (8, 0), va="center", **how)
            box = text.get_window_extent().padded(2)
        taken.append(box)
        if away > 8:
            line = {"arrowstyle": "-", "color": GRAY, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 5}
            axes.annotate("", point, (away * right, away * up), arrowprops=line, **how)


def ink_on(color: Any) -> str:
    """The color of text on `color`: dark on light ones, light on dark ones."""
    red, green, blue = to_rgb(color)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.53 else PAPER


@contextmanager
def _canvas(axes: Axes | None, size: Size, title: str, xlabel: str, ylabel: str) -> Iterator[Axes]:
    """Yield `axes`, or those of a new figure, which is shown at the end; label them."""
    is_new = axes is None
    with plt.rc_context(STYLE):
        if axes is None:
            _, axes = plt.subplots(figsize=size)
        # first, since what measures the axes needs room for them
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.set_title(title, fontsize=11)
        yield axes
        if is_new:
            plt.show()


def _add_legend(axes: Axes, place: str, handles: Sequence[Patch] | None = None) -> None:
    """Explain `handles`, or all that has a label, if there is more than one of them."""
    found = axes.get_legend_handles_labels()[0] if handles is None else handles
    if len(found) < 2 or place == "none":
        return
    if place == "below":
        how = {"loc": "outside lower center", "ncols": min(len(found), 6), "fontsize": 9}
        axes.figure.legend(handles=found, **how)
        return
    where = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if place == "right" else {}
    axes.legend(handles=found, fontsize=9, **{"loc": place} | where)


def _rotation(names: Sequence[Any]) -> int:
    """The angle of names below an axis: upwards if together they are too long for a line."""
    return 90 if sum(len(str(name)) + 2 for name in names) > 90 else 0


def _plain_log_ticks(axis: Axis) -> None:
    """Label a logarithmic axis 1, 2, 5, 10 or 1, 10, 100 in plain digits, unless it is too long."""
    low, high = axis.get_view_interval()
    if high / low < 3e3:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_locator(NullLocator())


def _is_number(value: Any) -> bool:
    return not isinstance(value, str) and value is not None and math.isfinite(value)
