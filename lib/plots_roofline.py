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
# Points (1/72 inch) from the middle of a dot to the middle of a number beside it.
CLOSE = 12


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
    axes.text(limits.ridge, 0.02, " ridge", fontsize=9, transform=axes.get_xaxis_transform())
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
    _number_points(axes, points, scale, list(zip(span, roof)))


def _number_points(
    axes: Axes, points: Sequence[Point], scale: float, roof: Sequence[tuple[float, float]]
) -> None:
    """The number of each point near it, off other points, numbers and the roof, and a line to it.

    The line is left out where the number stands close by.
    """
    if not points:
        return
    places = [(point.cost.intensity, point.flops_per_s / scale) for point in points]
    axes.figure.canvas.draw()
    pixels, size = axes.transData.transform(places), axes.figure.dpi / 72
    taken = [*pixels, *axes.transData.transform(roof)]
    angles = np.linspace(0, -2 * np.pi, 16, endpoint=False)
    # near places first, and then those below, where the roof is not
    steps = [r * np.array([np.cos(a), np.sin(a)]) for r in (CLOSE, 17, 24, 32, 40) for a in angles]
    for number, (point, place, pixel) in enumerate(zip(points, places, pixels), start=1):
        others = np.array([spot for spot in taken if spot is not pixel])
        room = [np.linalg.norm(others - (pixel + size * s), axis=1).min() / size for s in steps]
        step = next((s for s, r in zip(steps, room) if r > 11), steps[int(np.argmax(room))])
        taken.append(pixel + size * step)
        color = _color(point.name)
        style = {"ha": "center", "va": "center", "fontsize": 9, "weight": "bold", "color": color}
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
        is_close = np.linalg.norm(step) <= CLOSE + 0.1
        axes.annotate(
            str(number),
            place,
            xytext=tuple(step),
            textcoords="offset points",
            arrowprops=None if is_close else line,
            **style,
        )


def _color(name: str) -> str:
    """By kind: products with weights, attention, everything else."""
    if any(word in name for word in ATTENTION):
        return VERMILLION
    return BLUE if any(word in name for word in PRODUCTS) else ORANGE
