"""Figures of a profile: time by category, a step as a timeline, and memory over a step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from lib.core.figures import (
    BLUE,
    COLORS,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    house_figure,
    save_figure,
)
from lib.profiling.trace import CATEGORIES, Span, Trace, category_of, phases_of

TIME_COLORS = dict(zip(CATEGORIES, COLORS))
# The color of boxes with a name in them.
BOX = "#CFE6F4"
MEMORY_COLORS = {
    "parameters": BLUE,
    "optimizer state": SKY,
    "gradients": PURPLE,
    "activations": ORANGE,
    "other": GREEN,
}


def save_time_figure(figures: Mapping[str, Any], path: str | os.PathLike) -> Path:
    """Save bars of a step's time, by the figures of a record of `python -m lib profile`."""
    by_category = {name: ms for name, ms in figures["ms_by_category"].items() if ms > 0}
    on_gpu = figures["profiled"] == "gpu"
    names = {
        "wall_ms": "the step",
        "busy_ms": "GPU busy" if on_gpu else "in operators",
        "idle_ms": "GPU idle" if on_gpu else "between operators",
        "dispatch_ms": "host dispatches",
        "communication_ms": "communication",
        "exposed_communication_ms": "… exposed",
    }
    whole = {name: figures[key] for key, name in names.items() if figures[key]}
    with house_figure(width=9.0, height=3.4, ncols=2) as (figure, (left, right)):
        for axes, values, title in (
            (left, by_category, "Kernels" if on_gpu else "Operators"),
            (right, whole, "Host and device" if on_gpu else "The step"),
        ):
            colors = [TIME_COLORS.get(name, SKY) for name in values]
            bars = axes.barh(list(values), list(values.values()), color=colors)
            axes.invert_yaxis()
            axes.bar_label(bars, fmt="%.3g", padding=3)
            axes.set(title=title, xlabel="time in a step (ms)")
            axes.grid(visible=False, axis="y")
            axes.margins(x=0.18)
        left.set_ylabel("kind of kernel" if on_gpu else "kind of operator")
        right.set_ylabel("part of the step")
        return save_figure(figure, path)


def draw_trace(axes: Axes, trace: Trace, *, start_ms: float = 0, end_ms: float | None = None):
    """Draw a step as a timeline: ranges of the code, launches and waits of the host, GPU kernels.

    Ranges inside those of the code, such as the blocks and the loss, have a lane of their own.
    Without kernels, as on a CPU, the last lane shows operators instead, inner ones on top of those
    that call them.

    Args:
        start_ms, end_ms: the part to show, from the start of the trace's first range.
    """
    origin = min(span.start for span in (trace.ranges or trace.operators))
    work = trace.kernels or trace.operators
    last = max(span.end for span in (*work, *trace.ranges)) - origin
    window = (1e3 * start_ms, last if end_ms is None else 1e3 * end_ms)

    def bars(spans: Sequence[Span], y: float, height: float, color: str) -> None:
        shown = [(s.start - origin, s.end - s.start) for s in spans]
        shown = [(a / 1e3, d / 1e3) for a, d in shown if a + d > window[0] and a < window[1]]
        axes.broken_barh(shown, (y - height / 2, height), facecolors=color, linewidth=0)

    # lane by lane, from above: the outermost ranges below that of the whole step
    phases = phases_of(trace.ranges)
    lanes = ["code"]
    _draw_ranges(axes, phases, 0, origin, window)
    inside = [part for phase in phases for part in phases_of(_within(phase, trace.ranges))]
    if inside:
        _draw_ranges(axes, inside, len(lanes), origin, window)
        lanes.append("inside")
    if trace.kernels:
        waits = [call for call in trace.calls if "Synchronize" in call.name]
        bars([call for call in trace.calls if "Launch" in call.name], len(lanes), 0.6, INK)
        bars(waits, len(lanes), 0.6, VERMILLION)
        lanes.append("host launches")
    # kernels of the step before have no call here that launched them
    launched = {call.correlation for call in trace.calls}
    earlier = [span for span in trace.kernels if span.correlation not in launched]
    bars(earlier, len(lanes), 0.8, GRID)
    if earlier:
        axes.plot([], [], "s", color=GRID, label="launched before this step")
    found = {category: [] for category in CATEGORIES}
    for span in work:
        if not trace.kernels or span.correlation in launched:
            found[category_of(span.name)].append(span)
    for category, spans in found.items():
        # views, and operators that only call others, do no work of their own
        if spans and (trace.kernels or category != "other"):
            bars(spans, len(lanes), 0.8, TIME_COLORS[category])
            axes.plot([], [], "s", color=TIME_COLORS[category], label=category)
    lanes.append("GPU" if trace.kernels else "operators")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(xlim=(window[0] / 1e3, window[1] / 1e3), ylim=(len(lanes) - 0.5, -0.5))
    axes.set(xlabel="time (ms)", ylabel="")
    axes.grid(visible=False, axis="y")


def _draw_ranges(
    axes: Axes, ranges: Sequence[Span], lane: int, origin: float, window: tuple[float, float]
) -> None:
    """Draw ranges as boxes, each with its name where there is room for it; times in µs."""
    width = (window[1] - window[0]) / 1e3
    for span in ranges:
        left = max(span.start - origin, window[0]) / 1e3
        right = min(span.end - origin, window[1]) / 1e3
        if right <= left:
            continue
        style = {"facecolors": BOX, "edgecolor": "white", "linewidth": 0.8}
        axes.broken_barh([(left, right - left)], (lane - 0.4, 0.8), **style)
        if right - left > 0.011 * width * len(span.name):
            axes.text((left + right) / 2, lane, span.name, ha="center", va="center", fontsize=9)


def _within(phase: Span, ranges: Sequence[Span]) -> list[Span]:
    """Return the ranges inside `phase`, itself included."""
    return [span for span in ranges if phase.start <= span.start and span.end <= phase.end]


def save_memory_figure(
    times_ms: np.ndarray,
    num_bytes: Mapping[str, np.ndarray],
    path: str | os.PathLike,
    *,
    phases: Sequence[tuple[str, float, float]],
) -> Path:
    """Save the memory over a step, category stacked upon category.

    Args:
        times_ms: (count,) times at which something changes.
        num_bytes: category -> (count,) bytes from then on.
        phases: name, start and end in ms, written above.
    """
    total = np.sum([*num_bytes.values()], axis=0)
    unit, scale = ("GB", 1e9) if total.max() >= 1e9 else ("MB", 1e6)
    with house_figure(width=9.0, height=4.2) as (figure, axes):
        axes.stackplot(
            times_ms,
            [values / scale for values in num_bytes.values()],
            labels=list(num_bytes),
            colors=[MEMORY_COLORS.get(name, INK) for name in num_bytes],
            step="post",
            linewidth=0,
        )
        top = float(total.max()) / scale
        width = times_ms[-1] - times_ms[0]
        for name, start, end in phases:
            # a name needs room to be read
            if end - start > 0.06 * width:
                axes.axvline(start, color=INK, linewidth=0.8, linestyle=":")
                axes.text(start + 0.005 * width, top * 1.03, name, fontsize=9)
        axes.set(
            title=f"Allocated memory, at most {top:,.3g} {unit}",
            xlabel="time (ms)",
            ylabel=f"memory ({unit})",
            xlim=(times_ms[0], times_ms[-1]),
            ylim=(0, top * 1.12 or 1),
        )
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9
        )
        return save_figure(figure, path)
