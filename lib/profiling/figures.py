"""Figures of a profile: time by category, a step as a timeline, and memory over a step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from lib.core.charts import bars, gantt
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

if TYPE_CHECKING:
    from lib.profiling.memory_timeline import MemoryTimeline

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
    with house_figure(width=9.0, height=3.4, ncols=2) as (figure, panels):
        for axes, values, title, part in zip(
            panels,
            (by_category, whole),
            ("Kernels", "Host and device") if on_gpu else ("Operators", "The step"),
            (f"kind of {'kernel' if on_gpu else 'operator'}", "part of the step"),
        ):
            bars(
                values,
                axes=axes,
                title=title,
                xlabel="time in a step (ms)",
                ylabel=part,
                texts="{:.3g}",
                styles={name: {"color": TIME_COLORS.get(name, SKY)} for name in values},
            )
        return save_figure(figure, path)


def draw_trace(
    axes: Axes,
    trace: Trace,
    *,
    title: str,
    start_ms: float = 0,
    end_ms: float | None = None,
    legend: str = "none",
) -> None:
    """Draw a step as a timeline: ranges of the code, launches and waits of the host, GPU kernels.

    Ranges inside those of the code, such as the blocks and the loss, have a lane of their own.
    Without kernels, as on a CPU, the last lane shows operators instead, inner ones on top of those
    that call them.

    Args:
        start_ms, end_ms: the part to show, from the start of the trace's first range.
        legend: as in `lib.core.charts`.
    """
    origin = min(span.start for span in (trace.ranges or trace.operators))
    work = trace.kernels or trace.operators

    def boxes(spans: Iterable[Span], kind: str, *, named: bool = False) -> list[tuple]:
        return [
            ((s.start - origin) / 1e3, (s.end - origin) / 1e3, kind, s.name if named else "")
            for s in spans
        ]

    phases = phases_of(trace.ranges)
    lanes = {"code": boxes(phases, "_range", named=True)} if phases else {}
    inside = [part for phase in phases for part in phases_of(_within(phase, trace.ranges))]
    if inside:
        lanes["inside"] = boxes(inside, "_range", named=True)
    if trace.kernels:
        launches = [call for call in trace.calls if "Launch" in call.name]
        waits = [call for call in trace.calls if "Synchronize" in call.name]
        lanes["host launches"] = boxes(launches, "_launch") + boxes(waits, "_wait")
    # kernels of the step before have no call here that launched them
    launched = {call.correlation for call in trace.calls}
    earlier = [span for span in trace.kernels if span.correlation not in launched]
    drawn = boxes(earlier, "launched before this step")
    for category in CATEGORIES:
        # views, and operators that only call others, do no work of their own
        if trace.kernels or category != "other":
            found = [span for span in work if category_of(span.name) == category]
            mine = [s for s in found if not trace.kernels or s.correlation in launched]
            drawn += boxes(mine, category)
    lanes["GPU" if trace.kernels else "operators"] = drawn
    last = max(span.end for span in (*work, *trace.ranges)) - origin
    colors = {"_range": BOX, "_launch": INK, "_wait": VERMILLION, "launched before this step": GRID}
    colors |= TIME_COLORS
    gantt(
        lanes,
        axes=axes,
        title=title,
        xlabel="time (ms)",
        span=(start_ms, last / 1e3 if end_ms is None else end_ms),
        styles={kind: {"color": color} for kind, color in colors.items()},
        legend=legend,
    )


def _within(phase: Span, ranges: Sequence[Span]) -> list[Span]:
    """Return the ranges inside `phase`, itself included."""
    return [span for span in ranges if phase.start <= span.start and span.end <= phase.end]


def save_memory_figure(timeline: MemoryTimeline, path: str | os.PathLike) -> Path:
    """Save the memory over a step, category stacked upon category, its phases written above."""
    times_ms, num_bytes, most = timeline.times_ms, timeline.num_bytes, timeline.total.max()
    unit, scale = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    with house_figure(width=9.0, height=4.2) as (figure, axes):
        axes.stackplot(
            times_ms,
            [values / scale for values in num_bytes.values()],
            labels=list(num_bytes),
            colors=[MEMORY_COLORS.get(name, INK) for name in num_bytes],
            step="post",
            linewidth=0,
        )
        top = float(most) / scale
        width = times_ms[-1] - times_ms[0]
        for name, start, end in timeline.phases:
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
