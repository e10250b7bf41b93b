"""A training step over time, from a trace: compute, communication, and the exposed part of it.

On a CPU, operators stand for kernels.
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
Intervals = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Timeline:
    """One step on one rank, in ms from its start."""

    step_ms: float

    backward: tuple[float, float]
    """Its first kernel's start and its last one's end."""

    compute: tuple[tuple[str, Intervals], ...]
    """For each phase, when its operators or kernels run."""

    communication: Intervals
    """When at least one collective is in progress, including the wait for other ranks."""

    exposed: Intervals
    """The part of `communication` in which no kernel computes on this rank."""

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


def step_timeline(trace: Trace, name: str) -> Timeline:
    """Return the timeline of the first range called `name` in the trace."""
    step = next((span for span in trace.ranges if span.name == name), None)
    if step is None:
        raise ValueError(f"the trace has no range {name!r}")
    spans = trace.kernels or trace.operators
    launched = np.array(launch_times(spans, trace.calls))
    ranges = [span for span in trace.ranges if step.start <= span.start < step.end]

    # the kernels launched in the step, sorted into communication and phases
    chosen = np.flatnonzero((step.start <= launched) & (launched < step.end))
    kernels = [spans[index] for index in chosen.tolist()]
    times, phases = edges(kernels), _phases(ranges, launched[chosen])
    categories = np.array([category_of(span.name) for span in kernels], dtype=object)
    communicates = categories == "communication"
    # operators that are views, or only call others, do no work of their own
    works = ~communicates & (bool(trace.kernels) | (categories != "other"))
    compute = {phase: union(times[works & (phases == phase)]) for phase in PHASES.values()}
    # they run when the host has long left the range
    backward = times[works & (phases == "backward")]
    if not len(backward):
        raise ValueError(f"the range {name!r} has no kernels of a range 'backward' in it")

    communication = union(times[communicates])
    exposed = difference(communication, union(times[works]))
    first, last = _in_ms(np.array([[backward[:, 0].min(), backward[:, 1].max()]]), step.start)[0]
    return Timeline(
        step_ms=(max([step.end, *times[:, 1]]) - step.start) / 1e3,
        backward=(first, last),
        compute=tuple((phase, _in_ms(found, step.start)) for phase, found in compute.items()),
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
