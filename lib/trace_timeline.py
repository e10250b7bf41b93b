"""What happened when in a training step, from a trace: computation, communication, what is exposed.

A GPU's trace is read by its kernels, one of a CPU by operators; gloo's collectives run in threads
of their own there, and their operators tell from when to when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lib import intervals
from lib.trace_categories import category_of
from lib.trace_file import Span, Trace, launch_times

# A range of the code -> the phase that its work belongs to. Later ones are inside earlier ones.
PHASES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "update",
    "all-reduce": "copies of the wrapper",
}
# In these ranges, and in autograd's nodes with the hooks that they call, the host does not wait.
OWN_WORK = ("forward", "optimizer")
NODE = "autograd::engine::evaluate_function"
Intervals = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Timeline:
    """One step on one rank, in ms from its start."""

    step_ms: float

    backward: tuple[float, float]
    """When it begins and ends: on a GPU its first and last kernel, on a CPU the host's call."""

    compute: tuple[tuple[str, Intervals], ...]
    """For each phase, when its operators or kernels run."""

    communication: Intervals
    """When at least one collective is under way, waiting for other ranks included."""

    exposed: Intervals
    """The part of it in which no kernel computes on this rank. On a CPU: in which no operator runs
    and the host is neither in forward or update nor in a node of autograd."""

    @property
    def communication_ms(self) -> float:
        return _total(self.communication)

    @property
    def exposed_ms(self) -> float:
        return _total(self.exposed)

    @property
    def backward_ms(self) -> float:
        """How long the backward pass takes."""
        return self.backward[1] - self.backward[0]


def timelines(trace: Trace, step: str) -> list[Timeline]:
    """Those of all ranges called `step`, in their order.

    Raises:
        ValueError: there is no such range, or no backward pass in one.
    """
    ranges = [span for span in trace.ranges if span.name == step]
    if not ranges:
        raise ValueError(f"the trace has no range {step!r}")
    spans = trace.kernels or trace.operators
    asked = np.array(launch_times(spans, trace.calls))
    return [_timeline(trace, spans, asked, span) for span in ranges]


def _timeline(trace: Trace, spans: Sequence[Span], asked: np.ndarray, step: Span) -> Timeline:
    ranges = [span for span in trace.ranges if step.start <= span.start < step.end]
    backward = [span for span in ranges if span.name == "backward"]
    if not backward:
        raise ValueError(f"the range {step.name!r} has no range 'backward' in it")
    chosen = np.flatnonzero((step.start <= asked) & (asked < step.end))
    times = _edges([spans[index] for index in chosen])
    categories = np.array([category_of(spans[index].name) for index in chosen], dtype=object)
    talks = categories == "communication"
    # a CPU's operators that are views, or only call others, do no work of their own
    works = ~talks & (bool(trace.kernels) | (categories != "other"))
    phases = _phases(ranges, asked[chosen])
    compute = [(name, intervals.union(times[works & (phases == name)])) for name in PHASES.values()]
    communication = intervals.union(times[talks])
    edges = _edges(backward)
    busy = times[works]
    if trace.kernels:
        # the host has long left when they run
        ran = times[works & (phases == "backward")]
        edges = ran if len(ran) else edges
    else:
        # Python between two operators does not wait for other ranks; but PyTorch's own wrapper
        # waits for them at the end of the range of backward, after autograd's last node
        own = [span for span in ranges if span.name in OWN_WORK]
        own += [spans[index] for index in chosen if spans[index].name.startswith(NODE)]
        busy = np.concatenate((busy, _edges(own)))
    exposed = intervals.difference(communication, intervals.union(busy))
    end = max([step.end, *times[:, 1]])
    return Timeline(
        step_ms=(end - step.start) / 1e3,
        backward=((edges[:, 0].min() - step.start) / 1e3, (edges[:, 1].max() - step.start) / 1e3),
        compute=tuple((name, _in_ms(found, step.start)) for name, found in compute),
        communication=_in_ms(communication, step.start),
        exposed=_in_ms(exposed, step.start),
    )


def _phases(ranges: Sequence[Span], times: np.ndarray) -> np.ndarray:
    """The phase that the host is in at each of `times`."""
    phases = np.full(len(times), "", dtype=object)
    for name, phase in PHASES.items():
        found = intervals.union(_edges([span for span in ranges if span.name == name]))
        phases[intervals.contains(found, times)] = phase
    return phases


def _edges(spans: Sequence[Span]) -> np.ndarray:
    """(count, 2): starts and ends in µs."""
    return np.array([(span.start, span.end) for span in spans], dtype=np.float64).reshape(-1, 2)


def _in_ms(spans: np.ndarray, start: float) -> Intervals:
    return tuple(((a - start) / 1e3, (b - start) / 1e3) for a, b in spans.tolist())


def _total(spans: Intervals) -> float:
    return sum(b - a for a, b in spans)
