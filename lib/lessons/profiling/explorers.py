"""Tables and figures of notebook 04: records, profiles, predictions beside measurements."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from lib.core.figures import BLUE, SKY, house_figure
from lib.core.records import Record, read_records
from lib.lessons.explorer import explorer, figure_output
from lib.lessons.show import show_table

if TYPE_CHECKING:
    import torch
    from ipywidgets import VBox

    from lib.profiling.memory_timeline import MemoryTimeline
    from lib.profiling.trace_summary import Summary
    from lib.training.step import TrainStep


# The figures that identify a record among those of one benchmark run.
IDENTITY = ("task", "model", "candidate", "name", "size", "numbers", "tokens")
MOST_SHOWN = 5


@dataclass(frozen=True)
class StepEstimate:
    """Predicted and measured time and memory of a training step."""

    name: str
    """Such as `8 × 128, float32`."""

    predicted_ms: float
    measured_ms: float | None
    """None: out of memory."""

    predicted_mb: float
    measured_mb: float | None
    """None: out of memory."""


def place_of(record: Record) -> str:
    """The device and the date of a record.

    >>> place_of({"device": "NVIDIA H200", "date": "2026-11-21T18:32:57+00:00"})
    'NVIDIA H200, 2026-11-21'
    """
    return f"{record['device']}, {record['date']:.10}"


def newest_records(path: str | os.PathLike) -> list[Record]:
    """Read the records at `path`, keeping the last for each device and measurement.

    A measurement is identified by its figures' names (IDENTITY) if they have a task, else by its
    config.
    """
    newest = {}
    for record in read_records(path):
        figures = record["figures"]
        names = [figures.get(key) for key in IDENTITY] if "task" in figures else record["config"]
        newest[json.dumps([record["device"], names], sort_keys=True)] = record
    return list(newest.values())


def show_records(
    records: Iterable[Record],
    row_of: Callable[[Record], Mapping[str, Any] | None],
    *,
    command: str,
    title: str = "",
) -> None:
    """Display a table of `records` for each machine and date, or how to make such records.

    Args:
        row_of: the row of a record, None to leave it out.
        command: the command that makes the records.
        title: printed before the machine and the date.
    """
    from IPython.display import display

    tables: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        row = row_of(record)
        if row is not None:
            tables.setdefault(place_of(record), []).append(row)
    for place, rows in tables.items():
        print(f"{title} on {place}" if title else place)
        display(show_table(rows))
    if not tables:
        print(f"There is no record of this yet. To make it, on a GPU: {command}")


def profile_step(
    step: TrainStep, windows: torch.Tensor, device: torch.device, *, steps: int = 2
) -> Summary:
    """Profile `steps` training steps with PyTorch's profiler, and summarize the trace."""
    from lib.core.allocator import without_stderr
    from lib.profiling.profiler import trace_steps
    from lib.profiling.trace import read_trace
    from lib.profiling.trace_summary import summarise

    with tempfile.TemporaryDirectory() as folder, without_stderr():
        path = Path(folder) / "trace.json.gz"
        trace_steps(step, windows, path, steps=steps)
        return summarise(read_trace(path))


def profile_step_memory(
    step: TrainStep, windows: torch.Tensor, device: torch.device
) -> MemoryTimeline:
    """Record the memory of one training step by category."""
    from lib.core.allocator import without_stderr
    from lib.profiling.memory_timeline import profile_memory
    from lib.profiling.profiler import LEARNING_RATE

    with without_stderr():
        return profile_memory(
            lambda: step(windows, LEARNING_RATE), step.model, step.optimizer, device=device
        )


def plain_log_ticks(axis: Axis) -> None:
    """Label a logarithmic axis 1, 2, 5, 10, 20, … in plain digits."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def draw_estimates(figure: Figure, estimates: Sequence[StepEstimate]) -> None:
    """Draw bars of time and of memory, predicted above measured, for each of `estimates`."""
    left, right = figure.subplots(ncols=2, sharey=True)
    places = np.arange(len(estimates))
    for axes, unit in ((left, "ms"), (right, "mb")):
        for offset, kind, color in ((-0.2, "predicted", SKY), (0.2, "measured", BLUE)):
            values = [getattr(estimate, f"{kind}_{unit}") for estimate in estimates]
            lengths = [0 if value is None else value for value in values]
            labels = ["oom" if value is None else f"{value:,.3g}" for value in values]
            bars = axes.barh(places + offset, lengths, height=0.36, color=color, label=kind)
            axes.bar_label(bars, labels, padding=3, fontsize=9)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.2)
    left.set_yticks(places, [estimate.name for estimate in estimates])
    left.set_ylim(len(estimates) - 0.4, -0.6)
    left.set(xlabel="time of a step (ms)", ylabel="batch × context, dtype", title="Time")
    right.set(xlabel="peak memory (MB)", title="Memory")
    names = left.get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=2)


def step_explorer(
    estimate: Callable[[int, int, str], StepEstimate],
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    dtypes: Sequence[str],
    still: Sequence[tuple[int, int, str]],
) -> VBox:
    """Sliders for batch, context and dtype; each setting is measured when it is first chosen.

    The settings chosen before stay beside the new one.

    Args:
        estimate: (batch size, context, dtype) -> a row of the figure.
        still: the settings shown first.
    """
    known = functools.cache(estimate)
    chosen = list(still)

    def show(batch: int, context: int, dtype: str) -> dict[str, Any]:
        setting = (batch, context, dtype)
        chosen[:] = [*(other for other in chosen if other != setting), setting][-MOST_SHOWN:]
        estimates = [known(*each) for each in chosen]
        with house_figure(width=9.0, height=1.5 + 0.6 * len(estimates)) as (figure, axes):
            axes.remove()
            draw_estimates(figure, estimates)
            return figure_output(figure, "Predicted and measured")

    start = dict(zip(("batch", "context", "dtype"), chosen[-1]))
    controls = {"batch": batch_sizes, "context": contexts, "dtype": dtypes}
    return explorer(show, start=start, busy="measuring…", **controls)
