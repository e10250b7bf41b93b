"""Figures of data parallelism: a ring's steps, and timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lib.core.charts import gantt, heat
from lib.core.figures import BLUE, GRAY, GRID, INK, ORANGE, PURPLE, SKY, VERMILLION
from lib.lessons.ddp.ring import RingStep
from lib.profiling.timeline import PHASES, Timeline

# In the order of `PHASES`.
PHASE_COLORS = dict(zip(PHASES.values(), (GRAY, BLUE, PURPLE, ORANGE)))
# A chunk by how much of the sum is in it.
CHUNKS = {"of one rank": "#F1EEE6", "part of the sum": "#A9D8F5", "the whole sum": "#8FD6BD"}


def draw_ring_step(axes: Axes, step: RingStep, *, title: str) -> None:
    """Draw each rank, a column, with its part of each chunk, a row; framed: just received."""
    ranks = len(step.values)
    kinds = np.array(list(CHUNKS))[
        np.where(step.added == 1, 0, np.where(step.added == ranks, 2, 1))
    ]
    received = np.zeros((ranks, ranks), dtype=bool)
    for rank, chunk in enumerate(step.sent):
        received[(rank + 1) % ranks, chunk] = True
    heat(
        kinds.T,
        axes=axes,
        title=title,
        xlabel="rank",
        ylabel="chunk",
        rows=range(ranks),
        columns=range(ranks),
        texts=np.vectorize("{:g}".format)(step.values).T,
        kinds=CHUNKS,
        framed=received.T,
        legend="none",
    )


def explain_chunks(axes: Axes, **place: object) -> None:
    """Explain the colors and frames of `draw_ring_step`."""
    handles = [Patch(fc=color, ec=GRID, label=kind) for kind, color in CHUNKS.items()]
    handles.append(Patch(fc="none", ec=INK, lw=2.2, label="just received"))
    axes.legend(handles=handles, fontsize=9, **place)


def show_ring(steps: Sequence[RingStep]) -> None:
    """Show all steps of a ring side by side: reduce-scatter above, all-gather below."""
    half = len(steps) // 2
    _, panels = plt.subplots(nrows=2, ncols=half + 1, figsize=(9.5, 5))
    panels[1, 0].set_axis_off()
    for number, axes in enumerate([*panels[0], *panels[1, 1:]]):
        title = f"{number}: {steps[number].phase}" if number else "start"
        draw_ring_step(axes, steps[number], title=title)
        axes.label_outer()
    explain_chunks(panels[1, 0], loc="center")
    plt.show()


def draw_timeline(
    axes: Axes,
    line: Timeline,
    *,
    title: str,
    end_ms: float | None = None,
    messages: str = "all-reduce",
    legend: str = "none",
) -> None:
    """A step in two lanes, with the part of communication that is exposed in another color.

    Args:
        end_ms: where the time axis ends, so that several can be compared.
        messages: what is sent.
    """
    end = 1.02 * (end_ms or line.step_ms)
    hidden, exposed = f"{messages}, hidden", f"{messages}, exposed"
    compute = [(*span, phase) for phase, spans in line.compute for span in spans]
    sent = [(*span, hidden) for span in line.communication]
    # shorter ones would show as lines, wider than they are
    sent += [(a, b, exposed) for a, b in line.exposed if b - a > 1e-3 * end]
    words = f"{title}: {line.step_ms:.3g} ms"
    if line.communication:
        words += f", {line.communication_ms:.3g} ms of communication, {line.exposed_ms:.3g} exposed"
    colors = PHASE_COLORS | {hidden: SKY, exposed: VERMILLION}
    gantt(
        {"compute": compute, "communicate": sent},
        axes=axes,
        title=words,
        xlabel="time from the start of the step (ms)",
        span=(0, end),
        styles={kind: {"color": color} for kind, color in colors.items()},
        legend=legend,
    )
    for time in line.backward:
        axes.axvline(time, color=INK, linewidth=0.8, linestyle=":", marker="")


def show_timelines(lines: Mapping[str, Timeline], *, messages: str = "all-reduce") -> None:
    """Show timelines above one another, on the same time axis; `messages` names what is sent."""
    size = (9.5, 0.8 + 1.75 * len(lines))
    figure, grid = plt.subplots(nrows=len(lines), sharex=True, squeeze=False, figsize=size)
    end = max(line.step_ms for line in lines.values())
    named: dict = {}
    for axes, (name, line) in zip(grid[:, 0], lines.items()):
        draw_timeline(axes, line, title=name, end_ms=end, messages=messages)
        axes.label_outer()
        named |= dict(zip(*reversed(axes.get_legend_handles_labels())))
    columns = len(named) if len(named) <= 4 else 3
    figure.legend(named.values(), named, ncols=columns, fontsize=9, loc="outside lower center")
    plt.show()
