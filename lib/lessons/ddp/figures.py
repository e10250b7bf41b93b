"""Figures of data parallelism: a ring's steps, timelines, predicted scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch
from matplotlib.ticker import MaxNLocator

from lib.core.figures import (
    BLUE,
    COLORS,
    GRAY,
    GRID,
    INK,
    MARKERS,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
)
from lib.lessons.ddp.costs import ScalingPrediction
from lib.lessons.ddp.ring import RingStep
from lib.profiling.timeline import PHASES, Intervals, Timeline

# In the order of `PHASES`.
PHASE_COLORS = dict(zip(PHASES.values(), (GRAY, BLUE, PURPLE, ORANGE)))
# With more buckets than this, the gaps between them would hide them.
MOST_GAPS = 100
# A chunk by how much of the sum is in it: own, partial, whole.
OWN, PARTIAL, WHOLE = "#F1EEE6", "#A9D8F5", "#8FD6BD"


def draw_ring_step(axes: Axes, steps: Sequence[RingStep], number: int, *, arrows: bool) -> None:
    """Draw each rank, a column, with its part of each chunk, a row, after `number` steps.

    Args:
        arrows: draw what was sent in the step, from column to column.
    """
    step = steps[number]
    ranks = len(step.values)
    for rank in range(ranks):
        for chunk in range(ranks):
            added = step.added[rank, chunk]
            color = OWN if added == 1 else WHOLE if added == ranks else PARTIAL
            is_new = step.sent and step.sent[rank - 1] == chunk
            edge, width = (VERMILLION, 2.0) if is_new else (PAPER, 1.0)
            box = {"boxstyle": "round,pad=0,rounding_size=0.06", "linewidth": width}
            corner = (rank - 0.36, -chunk - 0.36)
            axes.add_patch(FancyBboxPatch(corner, 0.72, 0.72, fc=color, ec=edge, **box))
            weight = "bold" if added == ranks else "normal"
            text = f"{step.values[rank, chunk]:g}"
            style = {"fontsize": 11 if arrows else 8, "weight": weight}
            axes.text(rank, -chunk, text, ha="center", va="center", **style)
    if arrows:
        for rank, chunk in enumerate(step.sent):
            _draw_message(axes, rank, chunk, ranks)
        axes.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.set_yticks([-c for c in range(ranks)], [f"chunk {c}" for c in range(ranks)])
    else:
        axes.set(xticks=[], yticks=[])
    axes.tick_params(length=0)
    axes.set(xlim=(-0.9, ranks - 0.1), ylim=(-ranks + 0.45, 0.55), aspect="equal")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _draw_message(axes: Axes, rank: int, chunk: int, ranks: int) -> None:
    style = {"arrowstyle": "-|>", "color": VERMILLION, "linewidth": 1.8}
    if rank < ranks - 1:
        axes.annotate("", (rank + 0.66, -chunk), (rank + 0.34, -chunk), arrowprops=style)
        return
    # from the last to the first: out on the right, in on the left
    axes.annotate("", (rank + 0.75, -chunk), (rank + 0.34, -chunk), arrowprops=style)
    axes.annotate("", (-0.34, -chunk), (-0.75, -chunk), arrowprops=style)


def draw_ring_strip(figure: Figure, steps: Sequence[RingStep]) -> None:
    """All steps of a ring side by side: reduce-scatter above, all-gather below."""
    half = len(steps) // 2
    grid = figure.subplots(nrows=2, ncols=half + 1)
    for axes in grid.flat:
        axes.set_axis_off()
    places = [*grid[0], *grid[1, 1:]]
    for number, axes in enumerate(places):
        axes.set_axis_on()
        draw_ring_step(axes, steps, number, arrows=False)
        axes.set_title("start" if number == 0 else f"step {number}", fontsize=10, loc="center")
    _ring_legend(grid[1, 0], loc="center")
    grid[0, 1].set_title("step 1, reduce-scatter", fontsize=10, loc="center")
    grid[1, 1].set_title(f"step {half + 1}, all-gather", fontsize=10, loc="center")


def _ring_legend(axes: Axes, **where: object) -> None:
    names = {"of one rank": OWN, "part of the sum": PARTIAL, "the whole sum": WHOLE}
    handles = [Patch(fc=color, ec=GRID, label=name) for name, color in names.items()]
    handles.append(Patch(fc=PAPER, ec=VERMILLION, lw=2, label="just received"))
    axes.legend(handles=handles, fontsize=9, **where)


def draw_ring(figure: Figure, steps: Sequence[RingStep], number: int) -> None:
    """One step of a ring with what was sent, and what that was for.

    The axes stand in a fixed place, since finding one takes as long as drawing.
    """
    figure.set_layout_engine("none")
    axes = figure.add_axes((0.05, 0.09, 0.74, 0.81))
    draw_ring_step(axes, steps, number, arrows=True)
    step, ranks = steps[number], len(steps[0].values)
    words = {
        "start": "Each rank has numbers of its own, in as many chunks as there are ranks",
        "reduce-scatter": "What arrives is added to one's own",
        "all-gather": "What arrives is whole, and replaces one's own",
    }
    whole = int((step.added == ranks).sum())
    text = words[step.phase]
    if number:
        text = f"{number} of {len(steps) - 1}: {step.phase}. {text}; whole: {whole} of {ranks**2}"
    figure.suptitle(text, x=0.01, y=0.98, ha="left", fontsize=11)
    _ring_legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_timeline(axes: Axes, line: Timeline, *, title: str, end_ms: float | None = None) -> None:
    """A step in two lanes, with the part of communication that is exposed in another color.

    Args:
        end_ms: where the time axis ends, so that several can be compared.
    """
    for phase, spans in line.compute:
        draw_spans(axes, spans, (0.6, 0.8), PHASE_COLORS[phase])
    draw_spans(axes, line.communication, (-0.4, 0.8), SKY)
    # shorter ones would show as lines, wider than they are
    visible = tuple((a, b) for a, b in line.exposed if b - a > 1e-3 * (end_ms or line.step_ms))
    draw_spans(axes, visible, (-0.4, 0.8), VERMILLION)
    for time in line.backward:
        axes.axvline(time, color=INK, linewidth=0.8, linestyle=":", marker="")
    axes.set_yticks([1, 0], ["compute", "communicate"])
    axes.set(ylim=(-0.6, 1.6), xlim=(0, 1.02 * (end_ms or line.step_ms)))
    axes.set_xlabel("time from the start of the step (ms)")
    axes.grid(visible=False, axis="y")
    words = f"{title}: {line.step_ms:.3g} ms"
    if line.communication:
        words += f", {line.communication_ms:.3g} ms of communication, {line.exposed_ms:.3g} exposed"
    axes.set_title(words, fontsize=11)


def draw_spans(axes: Axes, spans: Intervals, lane: tuple[float, float], color: str) -> None:
    """Draw (start, end) intervals in a `lane`, its lower edge and height."""
    if spans:
        axes.broken_barh([(a, b - a) for a, b in spans], lane, color=color, linewidth=0)


def draw_timelines(
    figure: Figure, lines: Mapping[str, Timeline], *, messages: str = "all-reduce"
) -> None:
    """Timelines above one another, on the same time axis; `messages` names what is sent."""
    grid = figure.subplots(nrows=len(lines), sharex=True, squeeze=False)
    end = max(line.step_ms for line in lines.values())
    for axes, (name, line) in zip(grid[:, 0], lines.items()):
        draw_timeline(axes, line, title=name, end_ms=end)
        axes.label_outer()
    used = [p for p in PHASES.values() if any(dict(x.compute).get(p) for x in lines.values())]
    handles = [Patch(color=PHASE_COLORS[phase], label=phase) for phase in used]
    handles.append(Patch(color=SKY, label=f"{messages}, hidden"))
    handles.append(Patch(color=VERMILLION, label=f"{messages}, exposed"))
    figure.legend(handles=handles, ncols=3, fontsize=9, loc="outside lower center")


def draw_scaling(
    axes: Axes,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    measured: Mapping[str, Sequence[tuple[int, float]]],
) -> None:
    """Predicted efficiency by number of ranks as lines, measured as points.

    Args:
        curves, measured: a name -> (ranks, efficiency) of each point; efficiency 1 is ideal.
    """
    for place, (name, points) in enumerate(curves.items()):
        ranks, efficiency = zip(*points)
        style = {"color": COLORS[place % len(COLORS)], "marker": ""}
        axes.plot(ranks, 100 * np.array(efficiency), label=name, **style)
    for place, (name, points) in enumerate(measured.items()):
        ranks, efficiency = zip(*points)
        style = {"color": INK, "linestyle": "", "marker": MARKERS[place % len(MARKERS)]}
        axes.plot(ranks, 100 * np.array(efficiency), label=name, zorder=5, **style)
    axes.set_xscale("log", base=2)
    every = sorted({ranks for points in curves.values() for ranks, _ in points})
    shown = [ranks for ranks in every if ranks & (ranks - 1) == 0]
    axes.set_xticks(shown, [str(ranks) for ranks in shown])
    axes.minorticks_off()
    axes.set(ylim=(0, 105), xlabel="ranks", ylabel="scaling efficiency (%)")


def draw_overlap(axes: Axes, prediction: ScalingPrediction, *, backward_ms: float) -> None:
    """Backward and the all-reduces of its buckets over time, their exposed part in another color.

    `prediction` is of `lib.lessons.ddp.costs.predict_scaling` with the same `backward_ms`.
    """
    few = len(prediction.buckets) <= MOST_GAPS
    edge = {"edgecolor": PAPER, "linewidth": 0.6} if few else {"linewidth": 0}
    axes.broken_barh([(0, backward_ms)], (0.6, 0.8), color=BLUE, label="backward")
    hidden, exposed = [], []
    for bucket in prediction.buckets:
        cut = min(max(bucket.start_ms, backward_ms), bucket.end_ms)
        hidden.append((bucket.start_ms, cut - bucket.start_ms))
        exposed.append((cut, bucket.end_ms - cut))
    for spans, color, label in (
        (hidden, SKY, "all-reduce, hidden"),
        (exposed, VERMILLION, "all-reduce, exposed"),
    ):
        spans = [span for span in spans if span[1] > 0]
        axes.broken_barh(spans, (-0.4, 0.8), facecolor=color, label=label, **edge)
    axes.set_yticks([1, 0], ["compute", "communicate"])
    axes.set(xlabel="time from the start of backward (ms)", ylim=(-0.6, 1.6))
    axes.set_xlim(0, max(backward_ms, prediction.buckets[-1].end_ms) * 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.grid(visible=False, axis="y")
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(fontsize=9, ncols=3, columnspacing=1.0, handlelength=1.2, **place)
