"""The roofline figure: performance against arithmetic intensity, below what a machine allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes

from lib.plots import BLUE, INK, ORANGE, PAPER, VERMILLION

if TYPE_CHECKING:
    from lib.roofline import Limits, Point

# which operations are matrix products, and which belong to attention
PRODUCTS = ("projection", "gate and value")
ATTENTION = ("scores", "softmax", "value product", "attention")


def draw_roofline(
    axes: Axes, limits: Limits, points: Sequence[Point], *, title: str, legend: bool = True
) -> None:
    """Each of `points` below the roof with its number, and beside it the list of their names."""
    intensities = [point.cost.intensity for point in points] or [limits.ridge / 300]
    low = min(*intensities, limits.ridge) / 3
    high = max(*intensities, limits.ridge) * 4
    span = np.geomspace(low, high, 200)
    unit, scale = ("TFLOP/s", 1e12) if limits.flops_per_s >= 1e13 else ("GFLOP/s", 1e9)
    roof = [limits.attainable(intensity) / scale for intensity in span]
    axes.plot(span, roof, color=INK, marker="")
    axes.axvline(limits.ridge, color=INK, linewidth=0.8, linestyle=":", marker="")
    axes.text(limits.ridge, roof[-1] * 1.15, " ridge", fontsize=9)
    for point in points:
        x, y = point.cost.intensity, point.flops_per_s / scale
        axes.plot(x, y, "o", color=_color(point.name), markersize=7, markeredgecolor=PAPER)
    lowest = min([point.flops_per_s / scale for point in points], default=roof[0])
    axes.set(xscale="log", yscale="log", title=title)
    axes.set(xlim=(low, high), ylim=(min(lowest, roof[0]) / 2, roof[-1] * 2.5))
    axes.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel=f"performance ({unit})")
    if legend and points:
        for number, point in enumerate(points, start=1):
            name = f"{number} {point.name}"
            axes.plot([], [], "o", color=_color(point.name), label=name)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, labelspacing=0.4)
    # the legend has taken its room: from here on nothing moves
    _number_points(axes, points, scale)


def _number_points(axes: Axes, points: Sequence[Point], scale: float) -> None:
    """The number of each point beside it, on the side that is free of other points and numbers."""
    places = [(point.cost.intensity, point.flops_per_s / scale) for point in points]
    axes.figure.canvas.draw()
    pixels = axes.transData.transform(places) if places else np.empty((0, 2))
    taken, size = list(pixels), axes.figure.dpi / 72
    angles = np.linspace(0, 2 * np.pi, 8, endpoint=False)
    # near places first
    steps = [r * np.array([np.cos(a), np.sin(a)]) for r in (11, 16, 21) for a in angles]
    for number, (place, pixel) in enumerate(zip(places, pixels), start=1):
        others = np.array([spot for spot in taken if spot is not pixel] or [[np.inf, np.inf]])
        room = [np.linalg.norm(others - (pixel + size * s), axis=1).min() / size for s in steps]
        step = next((s for s, r in zip(steps, room) if r > 10), steps[int(np.argmax(room))])
        taken.append(pixel + size * step)
        where = {"xytext": tuple(step), "textcoords": "offset points"}
        style = {"ha": "center", "va": "center", "fontsize": 9, "weight": "bold"}
        color = _color(points[number - 1].name)
        axes.annotate(str(number), place, color=color, **where, **style)


def _color(name: str) -> str:
    """By kind: products with weights, attention, everything else."""
    if any(word in name for word in ATTENTION):
        return VERMILLION
    return BLUE if any(word in name for word in PRODUCTS) else ORANGE
