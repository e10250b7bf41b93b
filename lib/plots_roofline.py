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
    """Each of `points` as a number below the roof, and beside it the list of their names."""
    intensities = [point.cost.intensity for point in points] or [limits.ridge / 300]
    low = min(*intensities, limits.ridge) / 3
    high = max(*intensities, limits.ridge) * 4
    span = np.geomspace(low, high, 200)
    roof = [limits.attainable(intensity) / 1e9 for intensity in span]
    axes.plot(span, roof, color=INK, marker="")
    axes.axvline(limits.ridge, color=INK, linewidth=0.8, linestyle=":", marker="")
    axes.text(limits.ridge, roof[-1] * 1.15, " ridge", fontsize=9)
    for number, point in enumerate(points, start=1):
        x, y = point.cost.intensity, point.flops_per_s / 1e9
        style = {"color": PAPER, "ha": "center", "va": "center", "fontsize": 8, "weight": "bold"}
        axes.plot(x, y, "o", color=_color(point.name), markersize=13, markeredgecolor=PAPER)
        axes.annotate(str(number), (x, y), **style)
    lowest = min([point.flops_per_s / 1e9 for point in points], default=roof[0])
    axes.set(xscale="log", yscale="log", title=title)
    axes.set(xlim=(low, high), ylim=(min(lowest, roof[0]) / 2, roof[-1] * 2.5))
    axes.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="performance (GFLOP/s)")
    if legend and points:
        for number, point in enumerate(points, start=1):
            name = f"{number} {point.name}"
            axes.plot([], [], "o", color=_color(point.name), label=name)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, labelspacing=0.4)


def _color(name: str) -> str:
    """By kind: products with weights, attention, everything else."""
    if any(word in name for word in ATTENTION):
        return VERMILLION
    return BLUE if any(word in name for word in PRODUCTS) else ORANGE
