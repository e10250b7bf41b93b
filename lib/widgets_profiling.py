"""What notebook 04 shows: records with their machine, profiles, a step predicted and measured.

As in `lib.widgets`, where nobody can move a slider a few settings are shown instead.
"""

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

from lib.plots import BLUE, SKY, house_figure
from lib.report import Record, read_records
from lib.widgets import show_table
from lib.widgets_model import choice_slider, picture_of

if TYPE_CHECKING:
    import torch
    from ipywidgets import VBox

    from lib.memory_profile import MemoryTimeline
    from lib.trace_summary import Summary
    from lib.train_step import TrainStep

# what tells records of one file apart that were asked for together
IDENTITY = ("task", "model", "candidate", "name", "size", "numbers", "tokens")

MOST_SHOWN = 5


@dataclass(frozen=True)
class StepEstimate:
    """Time and memory of a training step, as predicted and as measured."""

    name: str
    """Such as `8 × 128, float32`."""

    predicted_ms: float
    measured_ms: float | None
    """None: memory ran out."""

    predicted_mb: float
    measured_mb: float | None
    """None: memory ran out."""


def place_of(record: Record) -> str:
    """The device and the day of a record.

    >>> place_of({"device": "NVIDIA H200", "date": "2026-11-21T18:32:57+00:00"})
    'NVIDIA H200, 2026-11-21'
    """
    return f"{record['device']}, {record['date']:.10}"


def newest_records(path: str | os.PathLike) -> list[Record]:
    """The records in the file at `path`, of those for the same thing on the same device the last.

    The same thing: the same config, or where the figures name their task, the same names in them.
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
    """Display a table of `records` for each machine and day; or how to make them, in a line.

    Args:
        row_of: the row of a record, None to leave it out.
        command: what makes the records.
        title: what they are of.
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
    """What PyTorch's profiler says of `steps` training steps, summed up."""
    from lib.allocations import without_stderr
    from lib.config_profile import ProfileConfig
    from lib.profile_run import trace_steps
    from lib.trace_file import read_trace
    from lib.trace_summary import summarise

    with tempfile.TemporaryDirectory() as folder, without_stderr():
        path = Path(folder) / "trace.json.gz"
        trace_steps(step, windows, ProfileConfig(steps=steps), device, path)
        return summarise(read_trace(path))


def profile_step_memory(
    step: TrainStep, windows: torch.Tensor, device: torch.device
) -> MemoryTimeline:
    """The memory of one training step, by category."""
    from lib.allocations import without_stderr
    from lib.memory_profile import profile_memory
    from lib.profile_run import take

    with without_stderr():
        return profile_memory(
            lambda: take(step, windows), step.model, step.optimizer, device=device
        )


def plain_log_ticks(axis: Axis) -> None:
    """Let a logarithmic axis say 1, 2, 5, 10, 20, … in plain digits."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def draw_estimates(figure: Figure, estimates: Sequence[StepEstimate]) -> None:
    """Bars of time and of memory, predicted above measured, for each of `estimates`."""
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

    The settings chosen last stay beside the new one.

    Args:
        estimate: (batch size, context, dtype) -> what is shown.
        still: the settings shown at first, and where nobody can move the sliders.
    """
    import ipywidgets

    known = functools.cache(estimate)
    chosen = list(still)

    def picture() -> tuple[dict[str, Any]]:
        estimates = [known(*setting) for setting in chosen[-MOST_SHOWN:]]
        height = 1.5 + 0.6 * len(estimates)
        with house_figure(width=9.0, height=height) as (figure, axes):
            axes.remove()
            draw_estimates(figure, estimates)
            return (picture_of(figure, "Predicted and measured"),)

    batch, context, dtype = sliders = [
        choice_slider(*each)
        for each in zip(("Batch", "Context", "dtype"), (batch_sizes, contexts, dtypes), chosen[-1])
    ]
    note = ipywidgets.Label()
    view = ipywidgets.Output(layout=ipywidgets.Layout(min_height="20em"))
    view.outputs = picture()

    def show(change: Mapping[str, Any]) -> None:
        setting = (batch.value, context.value, dtype.value)
        if setting in chosen:
            chosen.remove(setting)
        chosen.append(setting)
        # which takes seconds where it is new
        note.value = "measuring…"
        view.outputs = picture()
        note.value = ""

    for slider in sliders:
        slider.observe(show, "value")
    return ipywidgets.VBox([*sliders, note, view])
