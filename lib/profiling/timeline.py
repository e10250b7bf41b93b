"""A training step over time, from a trace: compute, communication, and the exposed part of it.

A GPU's trace is read by its kernels, a CPU's by its operators. There gloo's collectives run in
threads of their own, and their operators show from when to when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lib.profiling.trace import (
    Span,
    Trace,
    category_of,
    contains,
    difference,
    edges,
    launch_times,
    union,
)

# Range in the code -> the phase that its work belongs to. Later ones are inside earlier ones.
PHASES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "update",
    "all-reduce": "copies of the wrapper",
}
# Where the host never waits for other ranks: these ranges, and autograd's nodes with their hooks.
OWN_WORK = ("forward", "optimizer")
NODE = "autograd::engine::evaluate_function"

Intervals = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Timeline:
    """One step on one rank, in ms from its start."""

    step_ms: float

    backward: tuple[float, float]
    """Its start and end: on a GPU of its first and last kernel, on a CPU of the host's call."""

    compute: tuple[tuple[str, Intervals], ...]
    """For each phase, when its operators or kernels run."""

    communication: Intervals
    """When at least one collective is in progress, including the wait for other ranks."""

    exposed: Intervals
    """The part of `communication` in which no kernel computes on this rank. On a CPU: in which no
    operator runs and the host is in none of forward, update and autograd's nodes."""

    @property
    def communication_ms(self) -> float:
        return sum(end - start for start, end in self.communication)

    @property
    def exposed_ms(self) -> float:
        return sum(end - start for start, end in self.exposed)

    @property
    def backward_ms(self) -> float:
        """The duration of the backward pass."""
        return self.backward[1] - self.backward[0]


def timelines(trace: Trace, step: str) -> list[Timeline]:
    """Return the timeline of each range called `step`, in order."""
    steps = [span for span in trace.ranges if span.name == step]
    if not steps:
        raise ValueError(f"the trace has no range {step!r}")
    spans = trace.kernels or trace.operators
    launched = np.array(launch_times(spans, trace.calls))
    return [_timeline(trace, spans, launched, span) for span in steps]


def _timeline(trace: Trace, spans: Sequence[Span], launched: np.ndarray, step: Span) -> Timeline:
    on_gpu = bool(trace.kernels)
    ranges = [span for span in trace.ranges if step.start <= span.start < step.end]
    backward = edges(span for span in ranges if span.name == "backward")
    if not len(backward):
        raise ValueError(f"the range {step.name!r} has no range 'backward' in it")

    # the step's spans: those launched in it, sorted into communication, work and neither
    chosen = np.flatnonzero((step.start <= launched) & (launched < step.end))
    spans, launched = [spans[index] for index in chosen.tolist()], launched[chosen]
    times = edges(spans)
    categories = np.array([category_of(span.name) for span in spans], dtype=object)
    communicates = categories == "communication"
    # a CPU's operators that are views, or only call others, do no work of their own
    works = ~communicates & (on_gpu | (categories != "other"))

    phases = _phases(ranges, launched)
    compute = {name: union(times[works & (phases == name)]) for name in PHASES.values()}
    communication = union(times[communicates])
    busy = times[works]
    if on_gpu:
        # the kernels of backward run when the host has long left its range
        ran = times[works & (phases == "backward")]
        backward = ran if len(ran) else backward
    else:
        # Python between two operators does not wait for other ranks; but PyTorch's own wrapper
        # does, at the end of backward, after autograd's last node
        own = [span for span in ranges if span.name in OWN_WORK]
        own += [span for span in spans if span.name.startswith(NODE)]
        busy = np.concatenate((busy, edges(own)))
    exposed = difference(communication, union(busy))

    return Timeline(
        step_ms=(max([step.end, *times[:, 1]]) - step.start) / 1e3,
        backward=(
            (backward[:, 0].min() - step.start) / 1e3,
            (backward[:, 1].max() - step.start) / 1e3,
        ),
        compute=tuple((name, _in_ms(found, step.start)) for name, found in compute.items()),
        communication=_in_ms(communication, step.start),
        exposed=_in_ms(exposed, step.start),
    )


def _phases(ranges: Sequence[Span], times: np.ndarray) -> np.ndarray:
    """Return the phase that the host is in at each of `times`; empty text for none."""
    phases = np.full(len(times), "", dtype=object)
    for name, phase in PHASES.items():
        inside = contains(union(edges(span for span in ranges if span.name == name)), times)
        phases[inside] = phase
    return phases


def _in_ms(spans: np.ndarray, start: float) -> Intervals:
    return tuple(((a - start) / 1e3, (b - start) / 1e3) for a, b in spans.tolist())
